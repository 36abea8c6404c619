"""Names that move: the release's are there, and the main branch's are those that it exports.

No release was made from the main branch. Which names it has, with their parameters, stands in
``tff_main.json``, which ``tools/record_tff_names.py`` has made of the commit that it names.
"""

import ast
import functools
import importlib
import inspect
import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
from mf_aggregators.tff import compatibility
from tests.mf_aggregators.tff.main_stand_in import RECORD

_ROOT = pathlib.Path(__file__).resolve().parents[3]
_PACKAGES = ("mf_aggregators", "simulations", "stackoverflow_nwp", "reproduction", "benchmarks")
_NOTHING = object()


def _recorded(path: str) -> Any:
    """What the record has under a full name: a dictionary, parameters, None or _NOTHING."""
    for module, names in RECORD["besides"].items():
        if path == module:
            return names
        if path.startswith(f"{module}."):
            return names.get(path.removeprefix(f"{module}."), _NOTHING)
    found: Any = RECORD["exports"]
    for part in path.split("."):
        if not isinstance(found, dict):
            # A class or an enumeration, whose attributes no record has.
            return found
        found = found.get(part, _NOTHING)
    return found


def test_the_installed_release_is_taken_for_what_it_is() -> None:
    assert compatibility.LAYOUT is compatibility.RELEASE_0_87
    for name in compatibility.NAMES:
        path = compatibility.RELEASE_0_87.path_of(name)
        assert getattr(compatibility, name) is _at(path), path


def _at(path: str) -> Any:
    """What stands under a full name, by the two kinds of imports that there are."""
    package, *rest = path.split(".")
    found: Any = importlib.import_module(package)
    for position, part in enumerate(rest):
        if not hasattr(found, part):
            # Of the release, the package forgets this one, and Python does not.
            found = importlib.import_module(".".join([package, *rest[: position + 1]]))
            continue
        found = getattr(found, part)
    return found


@pytest.mark.parametrize("name", compatibility.NAMES)
def test_the_main_branch_exports_what_the_layout_says(name: str) -> None:
    assert _recorded(compatibility.MAIN.path_of(name)) is not _NOTHING


@functools.cache
def _sources() -> tuple[tuple[pathlib.Path, ast.Module], ...]:
    return tuple(
        (path, ast.parse(path.read_text(encoding="utf-8")))
        for package in _PACKAGES
        for path in sorted((_ROOT / package).rglob("*.py"))
    )


@functools.cache
def _used_names() -> dict[str, set[str]]:
    """Full names below ``tff.`` that the code uses, each with the files that use it."""
    found: dict[str, set[str]] = {}
    for path, tree in _sources():
        inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        for node in ast.walk(tree):
            if not isinstance(node, ast.Attribute) or id(node) in inner:
                continue
            parts: list[str] = []
            below: ast.expr = node
            while isinstance(below, ast.Attribute):
                parts.insert(0, below.attr)
                below = below.value
            if isinstance(below, ast.Name) and below.id == "tff":
                name = ".".join(["tensorflow_federated", *parts])
                found.setdefault(name, set()).add(str(path.relative_to(_ROOT)))
    return found


def test_all_other_names_that_are_used_stay_where_they_are() -> None:
    used = _used_names()
    assert "tensorflow_federated.aggregators.DifferentiallyPrivateFactory" in used
    missing = {name: files for name, files in used.items() if _recorded(name) is _NOTHING}
    assert not missing


def test_no_other_module_names_what_moves() -> None:
    for path, tree in _sources():
        if path.name == "compatibility.py":
            continue
        for node in ast.walk(tree):
            modules = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                modules = [node.module or ""]
            for module in modules:
                assert module.split(".")[0] not in ("federated_language", "tensorflow_privacy"), (
                    path
                )


def _parameters(function: Any) -> list[str] | None:
    """As the record writes them; None for what no Python source says."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return None
    found: list[str] = []
    for each in signature.parameters.values():
        if each.kind is inspect.Parameter.VAR_POSITIONAL:
            found.append(f"*{each.name}")
        elif each.kind is inspect.Parameter.VAR_KEYWORD:
            found.append(f"**{each.name}")
        else:
            if each.kind is inspect.Parameter.KEYWORD_ONLY and "*" not in "".join(found):
                found.append("*")
            is_needed = each.default is inspect.Parameter.empty
            found.append(each.name if is_needed else f"{each.name}=")
    return found


def test_what_is_called_takes_the_same_arguments_in_both() -> None:
    """The main branch may take further ones that can be left out."""
    differences, compared = {}, 0
    paths = {
        **{
            compatibility.RELEASE_0_87.path_of(name): compatibility.MAIN.path_of(name)
            for name in compatibility.NAMES
        },
        **{name: name for name in _used_names()},
    }
    for here, there in paths.items():
        recorded = _recorded(there)
        if not isinstance(recorded, list):
            continue
        ours = _parameters(_at(here))
        if ours is None or ours[:1] == ["*args"]:
            continue
        compared += 1
        new = {each for each in recorded if each.endswith("=")} - set(ours)
        if ours != [each for each in recorded if each not in new]:
            differences[here.rpartition(".")[2]] = (ours, recorded)
    assert compared > 30
    assert differences == {}


def _in_a_process(folder: pathlib.Path, text: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(_ROOT)])}
    return subprocess.run(
        [sys.executable, "-c", text],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def _write_main_branch(folder: pathlib.Path, without: str = "") -> None:
    """A package of each name that the record has, in which every name is a text: its own."""

    def write(path: pathlib.Path, title: str, names: dict[str, Any]) -> None:
        path.mkdir(parents=True, exist_ok=True)
        lines = ["__version__ = '0.88.0'"]
        for name, inner in names.items():
            full = f"{title}.{name}"
            if full == without:
                continue
            if isinstance(inner, dict):
                write(path / name, full, inner)
                lines.append(f"from {title} import {name}")
            else:
                lines.append(f"{name} = {full!r}")
        (path / "__init__.py").write_text("\n".join(lines) + "\n")

    for package, names in RECORD["exports"].items():
        write(folder / package, package, names)
    for module, names in RECORD["besides"].items():
        path = folder.joinpath(*module.split("."))
        write(path, module, names)
        for parent in path.parents:
            if parent == folder:
                break
            (parent / "__init__.py").touch()


def test_a_package_with_the_names_of_the_main_branch_is_taken_for_it(
    tmp_path: pathlib.Path,
) -> None:
    _write_main_branch(tmp_path)
    ran = _in_a_process(
        tmp_path,
        "import json, sys\n"
        "from mf_aggregators.tff import compatibility\n"
        "assert compatibility.LAYOUT is compatibility.MAIN\n"
        "found = {name: getattr(compatibility, name) for name in compatibility.NAMES}\n"
        "assert 'tensorflow_privacy' not in sys.modules\n"
        "print(json.dumps({name: getattr(each, '__name__', each)"
        " for name, each in found.items()}))\n",
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert found == {name: compatibility.MAIN.path_of(name) for name in compatibility.NAMES}
    assert found["SumAggregationDPQuery"].startswith("tensorflow_federated.python.aggregators.")


def test_a_name_that_is_in_neither_place_is_said(tmp_path: pathlib.Path) -> None:
    _write_main_branch(tmp_path, without="federated_language.federated_zip")
    ran = _in_a_process(tmp_path, "from mf_aggregators.tff import compatibility")
    assert ran.returncode == 1
    last = ran.stderr.strip().splitlines()[-1]
    assert "TensorFlow Federated 0.88.0 was taken for" in last
    assert "federated_language.federated_zip is not there" in last
    assert "docs/installing.md" in last


@pytest.mark.long
def test_the_aggregator_runs_under_the_names_of_the_main_branch() -> None:
    """With what the release has behind the names, and without TensorFlow Privacy."""
    ran = subprocess.run(
        [sys.executable, "-m", "tests.mf_aggregators.tff.main_stand_in"],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert ran.returncode == 0, ran.stderr
    result = json.loads(ran.stdout.splitlines()[-1])
    assert [result[each][0] for each in ("release", "main")] == [
        "tensorflow_federated",
        "federated_language",
    ]
    assert result["base"] == "SumAggregationDPQuery"
    # The same seed, and noise in it: the mean without noise would be 0.1, 0.2, 0.3.
    assert result["main"][1] == result["release"][1]
    assert abs(result["main"][1][0][0] - 0.1) > 1e-3
