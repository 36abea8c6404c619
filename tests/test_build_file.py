"""BUILD has every package and command, with what it imports."""

import sys
from typing import Any

import grimp
import pytest

from tests import console_commands

_PACKAGES = ("mf_aggregators", "reproduction", "simulations", "stackoverflow_nwp")
# Import names whose distribution has another name, as a hub of rules_python spells it.
_DISTRIBUTIONS = {
    "absl": "absl_py",
    "google": "protobuf",
    "grpc": "grpcio",
    "sklearn": "scikit_learn",
}


def _rules() -> dict[str, dict[str, Any]]:
    """The rules of BUILD by name: its syntax is Python's."""
    found: dict[str, dict[str, Any]] = {}

    def rule(**values: Any) -> None:
        found[values["name"]] = values

    def other(*_: str, **also: object) -> None:
        pass

    names = {"load": other, "package": other, "py_library": rule, "py_binary": rule}
    exec((console_commands.ROOT / "BUILD").read_text(encoding="utf-8"), {**names, "glob": tuple})
    return found


@pytest.mark.parametrize("name", _PACKAGES)
def test_a_library_depends_on_what_it_imports(name: str) -> None:
    graph = grimp.build_graph(*_PACKAGES, include_external_packages=True)
    imported = {
        each.partition(".")[0]
        for module in graph.modules
        if module.partition(".")[0] == name
        for each in graph.find_modules_directly_imported_by(module)
    }
    expected = {
        f":{module}" if module in _PACKAGES else f"@pypi//{_DISTRIBUTIONS.get(module, module)}"
        for module in imported - set(sys.stdlib_module_names) - {name}
    }
    rule = _rules()[name]
    assert rule["srcs"] == (f"{name}/**/*.py",)
    assert rule["deps"] == sorted(expected)
    assert all((console_commands.ROOT / file).is_file() for file in rule.get("data", []))


def test_every_console_command_is_a_binary() -> None:
    binaries = {name: rule["main"] for name, rule in _rules().items() if "main" in rule}
    assert binaries == {
        name: entry.removesuffix(":run").replace(".", "/") + ".py"
        for name, entry in console_commands.of_setup()["commands"].items()
    }
