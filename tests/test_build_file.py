"""The BUILD file says what the tree holds: every package and command, with what it imports."""

import ast
import pathlib
import re
import sys
from typing import Any

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Import names whose distribution has another name, as a hub of rules_python spells it.
DISTRIBUTIONS = {
    "absl": "absl_py",
    "google": "protobuf",
    "grpc": "grpcio",
    "sklearn": "scikit_learn",
}


def _read(text: str) -> tuple[dict[str, dict[str, Any]], list[tuple[str, str, str]]]:
    """Libraries by name, and (command, file, library)."""
    libraries: dict[str, dict[str, Any]] = {}
    commands: list[tuple[str, str, str]] = []
    for node in ast.parse(text).body:
        assert isinstance(node, ast.Expr)
        if isinstance(node.value, ast.ListComp):
            commands = ast.literal_eval(node.value.generators[0].iter)
        elif isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "py_library":
            values = {
                each.arg: ast.literal_eval(
                    each.value.args[0] if isinstance(each.value, ast.Call) else each.value
                )
                for each in node.value.keywords
                if each.arg is not None
            }
            libraries[values["name"]] = values
    return libraries, commands


LIBRARIES, COMMANDS = _read((ROOT / "BUILD").read_text(encoding="utf-8"))
SETUP = (ROOT / "setup.py").read_text(encoding="utf-8")


def test_every_package_is_a_library() -> None:
    packages = re.findall(r'"(\w+)\*"', SETUP)
    assert packages
    assert sorted(LIBRARIES) == sorted(packages)
    assert not [path for name in packages for path in (ROOT / name).rglob("BUILD")]
    for name, library in LIBRARIES.items():
        assert library["srcs"] == [f"{name}/**/*.py"]


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_library_depends_on_what_it_imports(name: str) -> None:
    imported = set()
    for file in (ROOT / name).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                imported.add(node.module.partition(".")[0])
    expected = {
        f":{module}" if module in LIBRARIES else f"@pypi//{DISTRIBUTIONS.get(module, module)}"
        for module in imported - set(sys.stdlib_module_names) - {name}
    }
    assert sorted(LIBRARIES[name]["deps"]) == sorted(expected)


def test_every_console_command_is_a_binary() -> None:
    entry_points = re.findall(r'"([\w-]+)=([\w.]+):run"', SETUP)
    assert entry_points
    assert [(name, file) for name, file, _ in COMMANDS] == [
        (name, module.replace(".", "/") + ".py") for name, module in entry_points
    ]
    for _, file, library in COMMANDS:
        assert file.startswith(library.removeprefix(":") + "/")
