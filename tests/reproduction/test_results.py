"""What a change of code makes void, and what it leaves."""

import json
import pathlib
import shutil
import subprocess
import sys

import pytest

from reproduction import reproduce_paper, results

_LISTS_MODULES = """
import importlib, json, sys
importlib.import_module(sys.argv[1])
print(json.dumps([name for name in sys.modules if name.startswith("reproduction.")]))
"""


@pytest.mark.short_cases(1)
@pytest.mark.parametrize("module", ["prefix_sums", "banded_guarantees", "training"])
def test_all_that_an_import_brings_counts(module: str) -> None:
    """Python itself says which modules of the package are loaded."""
    command = [sys.executable, "-c", _LISTS_MODULES, f"reproduction.{module}"]
    loaded = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    assert results._needed(module) == {name.partition(".")[2] for name in loaded}


@pytest.mark.long
def test_only_what_an_experiment_needs_makes_it_void(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = pathlib.Path(results.__file__).parent
    for path in package.glob("*.py"):
        shutil.copy(path, tmp_path)
    every = reproduce_paper.experiments()
    here = {name: results.fingerprint(experiment) for name, experiment in every.items()}
    monkeypatch.setattr(results, "_path", lambda name: tmp_path / f"{name}.py")

    def void_after_a_change_of(module: str) -> set[str]:
        path = tmp_path / f"{module}.py"
        text = path.read_text()
        path.write_text(text + "# A comment.\n")
        found = {name for name, each in every.items() if results.fingerprint(each) != here[name]}
        path.write_text(text)
        return found

    assert {name: results.fingerprint(each) for name, each in every.items()} == here
    of_prefix_sums = {"prefix-sums-table-1", "prefix-sums-figure-1", "denisov-table-2"}
    assert void_after_a_change_of("prefix_sums") == of_prefix_sums
    # Small models are trained by a program of their own.
    small = {"fashion-mnist", "shakespeare"}
    trained = {name for name, each in every.items() if each.targets} - small
    assert void_after_a_change_of("training_tables") == trained
    assert void_after_a_change_of("small_models") == small
    assert void_after_a_change_of("shakespeare") == {"shakespeare"}
    assert void_after_a_change_of("experiment") == set(every)
    assert void_after_a_change_of("results") == set()
    # How numbers are drawn changes none of them.
    assert void_after_a_change_of("drawings") == set()
    for name, each in every.items():
        module = each.run.func.__module__ if hasattr(each.run, "func") else each.run.__module__
        needed = results._needed(module.partition(".")[2])
        sources = "".join((package / f"{one}.py").read_text() for one in needed)
        assert "matplotlib" not in sources, name
        assert "import figures" not in sources, name
    assert of_prefix_sums <= void_after_a_change_of("matrices")
