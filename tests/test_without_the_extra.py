"""The console commands where no extra is installed.

A subprocess refuses to import whatever only the extras (or the development tools) brings.
"""

import dataclasses
import importlib.metadata
import json
import pathlib
import subprocess
import sys
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests import console_commands

_MATHEMATICS = {
    "mf-factorize": "--mechanism=blt --num_rounds=8 --num_buffers=1 --output=checkpoint",
    "mf-report": "--checkpoint=checkpoint --target_epsilon=8",
    "mf-plan": "--num_rounds=4 --population=40 --clients_per_round=10 --target_epsilon=8 "
    "--model_size=1000 --cache_dir=cache",
    "simulate-participation": "--population=50 --clients_per_round=5 --num_rounds=4 --separation=2",
}
_DRAWING = {
    "mf-report": f"{_MATHEMATICS['mf-report']} --figure=figure.png",
    "reproduce-paper": "--only=bandmf-production --output_dir=report --cache_dir=cache",
}
_TRAINING = {
    "compare-mechanisms": "--output_dir=comparison",
    "make-text-dataset": "--input=text --output=text.sqlite",
    "mf-audit": "--mechanism=identity --backend=tff",
    "reproduce-paper": "--only=bandmf-production,training --output_dir=trained",
    "run-cifar10": "--output_dir=run",
    "run-digits": "--output_dir=run",
    "run-fashion-mnist": "--output_dir=run",
    "run-stackoverflow": "--output_dir=run",
    "start-tff-worker": "",
}
_PROGRAM = """
import contextlib, importlib, io, json, sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None

blocked, calls = json.loads(sys.stdin.read())
blocked = set(blocked)
for name in [name for name in sys.modules if name.partition(".")[0] in blocked]:
    del sys.modules[name]
sys.meta_path.insert(0, Missing())
for command, entry_point, flags in calls:
    module, _, function = entry_point.partition(":")
    sys.argv = [command, *flags.split()]
    printed, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors):
        try:
            status = getattr(importlib.import_module(module), function)()
        except SystemExit as ended:
            status = ended.code
        except BaseException as error:
            status = repr(error)
    print(json.dumps([command, status, printed.getvalue(), errors.getvalue()]))
"""


def _closure(requirements: list[str]) -> set[str]:
    """The names of distributions, with all that they need."""
    found: set[str] = set()
    todo = [Requirement(text) for text in requirements]
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if applies and name not in found:
            found.add(name)
            todo += [Requirement(text) for text in importlib.metadata.requires(name) or ()]
    return found


def _blocked() -> list[str]:
    """The packages to import that a plain installation of this project lacks."""
    kept = _closure(console_commands.of_setup()["_MATHEMATICS"]) | {"mf-aggregators"}
    return sorted(
        package
        for package, distributions in importlib.metadata.packages_distributions().items()
        if not kept & {canonicalize_name(name) for name in distributions}
    )


@dataclasses.dataclass(frozen=True)
class _Ended:
    command: str
    status: Any
    printed: str
    errors: str


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Where commands are run: a folder with three text files."""
    folder = tmp_path_factory.mktemp("commands")
    (folder / "text").mkdir()
    for name in ("one", "two", "three"):
        (folder / "text" / f"{name}.txt").write_text("A sentence of some words.\n")
    return folder


@pytest.fixture(scope="module")
def ended(folder: pathlib.Path) -> dict[str, list[_Ended]]:
    """How all calls ended, in one process, by kind."""
    entry_points = console_commands.of_setup()["commands"]
    kinds = {
        "help": [(command, "--help") for command in entry_points],
        "mathematics": list(_MATHEMATICS.items()),
        "drawing": list(_DRAWING.items()),
        "training": list(_TRAINING.items()),
    }
    calls = [(name, entry_points[name], flags) for calls in kinds.values() for name, flags in calls]
    finished = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        input=json.dumps([_blocked(), calls]),
        capture_output=True,
        text=True,
        cwd=folder,
        check=True,
    )
    lines = iter(finished.stdout.splitlines())
    return {
        kind: [_Ended(*json.loads(next(lines))) for _ in calls] for kind, calls in kinds.items()
    }


def test_every_command_prints_its_help(ended: dict[str, list[_Ended]]) -> None:
    for each in ended["help"]:
        assert (each.status, each.errors) == (0, ""), each
        assert "--format" in each.printed, each


def test_the_mathematics_works(ended: dict[str, list[_Ended]]) -> None:
    for each in ended["mathematics"]:
        assert each.status == 0, each
        assert each.printed, each


def test_what_draws_names_what_to_install(ended: dict[str, list[_Ended]]) -> None:
    for each in ended["drawing"]:
        assert (each.status, each.printed) == (2, ""), each
        last = each.errors.splitlines()[-1]
        assert last.startswith(f"{each.command}: "), each
        assert "install" in last, each
        assert {"matplotlib"} <= set(last.split()), each


def test_what_trains_says_in_one_line_what_to_install(ended: dict[str, list[_Ended]]) -> None:
    for each in ended["training"]:
        assert (each.status, each.printed) == (2, ""), each
        assert each.errors.startswith(f"{each.command}: "), each
        assert each.errors.count("\n") == 1, each
        assert "python3 quickstart.py setup" in each.errors, each


def test_all_commands_are_called_here() -> None:
    assert {*_MATHEMATICS, *_DRAWING, *_TRAINING} == set(console_commands.of_setup()["commands"])
