"""The BUILD file says what the tree holds: every package and command, with what it imports."""

import ast
import pathlib
import sys
from typing import Any

import grimp
import pytest

from tests import console_commands

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGES = ("mf_aggregators", "reproduction", "simulations", "stackoverflow_nwp")
# Import names whose distribution has another name, as a hub of rules_python spells it.
DISTRIBUTIONS = {
    "absl": "absl_py",
    "google": "protobuf",
    "grpc": "grpcio",
    "sklearn": "scikit_learn",
}


def _read() -> tuple[dict[str, dict[str, Any]], list[tuple[str, str, str]]]:
    """Libraries by name, and (command, file, library)."""
    libraries: dict[str, dict[str, Any]] = {}
    commands: list[tuple[str, str, str]] = []
    for node in ast.parse((ROOT / "BUILD").read_text(encoding="utf-8")).body:
        call = node.value if isinstance(node, ast.Expr) else None
        if isinstance(call, ast.ListComp):
            commands = ast.literal_eval(call.generators[0].iter)
        elif isinstance(call, ast.Call) and ast.unparse(call.func) == "py_library":
            values = {str(each.arg): each.value for each in call.keywords}
            assert "glob" in ast.unparse(values["srcs"])
            libraries[ast.literal_eval(values["name"])] = values
    return libraries, commands


LIBRARIES, COMMANDS = _read()


def test_every_package_is_a_library() -> None:
    assert sorted(LIBRARIES) == sorted(PACKAGES)
    for name, library in LIBRARIES.items():
        assert ast.unparse(library["srcs"]) == f"glob(['{name}/**/*.py'])"


@pytest.mark.parametrize("name", PACKAGES)
def test_a_library_depends_on_what_it_imports(name: str) -> None:
    graph = grimp.build_graph(*PACKAGES, include_external_packages=True)
    imported = {
        each.partition(".")[0]
        for module in graph.modules
        if module.partition(".")[0] == name
        for each in graph.find_modules_directly_imported_by(module)
    }
    expected = {
        f":{module}" if module in PACKAGES else f"@pypi//{DISTRIBUTIONS.get(module, module)}"
        for module in imported - set(sys.stdlib_module_names) - {name}
    }
    assert ast.literal_eval(LIBRARIES[name]["deps"]) == sorted(expected)


def test_every_console_command_is_a_binary() -> None:
    entry_points = console_commands.of_setup()["commands"]
    assert sorted((name, file) for name, file, _ in COMMANDS) == [
        (name, entry.removesuffix(":run").replace(".", "/") + ".py")
        for name, entry in entry_points.items()
    ]
    for _, file, library in COMMANDS:
        assert file.startswith(library.removeprefix(":") + "/")
