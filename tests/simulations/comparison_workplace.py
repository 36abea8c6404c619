"""Comparisons whose runs are those of a small program in the place of the next-word command.

The program tells what it was handed, and waits where a test asks it to.
"""

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

from mf_aggregators import Mechanism, accounting, factorizations
from mf_aggregators.participation import MinSeparation
from tests import console_commands

_ROOT = pathlib.Path(__file__).parents[2]

# Accuracies in thousandths, by run.
_ACCURACIES = {
    "none_1": 500,
    "none_2": 502,
    "banded_1": 400,
    "banded_2": 402,
    "identity_1": 390,
    "identity_2": 396,
}

# What most comparisons are of, as flags and by name.
THREE = ("--mechanisms=identity,none,banded", "--repetitions=2")
THREE_MECHANISMS = ("identity", "none", "banded")

_RUN = f"""
import json, os, pathlib, shutil, signal, sys, time

flags = dict(flag[2:].partition("=")[::2] for flag in sys.argv[1:])
directory = pathlib.Path(flags["output_dir"])
control = pathlib.Path(__file__).parent.parent / "control"
mechanism = flags["mechanism"]
if "refuse" in flags.get("only_for", "") and mechanism == flags["only_for"].split(":")[1]:
    sys.exit("run: --only_for is not for " + mechanism)
is_check = directory.name == "run"
with (control / "started.jsonl").open("a") as file:
    file.write(json.dumps([directory.name, sys.argv[1:]]) + "\\n")
directory.mkdir(parents=True, exist_ok=True)
stops = []
signal.signal(signal.SIGTERM, lambda *_: stops.append(1))
signal.signal(signal.SIGINT, lambda *_: stops.append(1))
conditions = control / "conditions.json"
kept = json.loads(conditions.read_text()) if conditions.exists() else {{}}
seed = flags.get("cohort_seed")
(directory / "config.json").write_text(
    json.dumps({{"cohort_seed": seed, **kept.get("config", {{}})}})
)
# Who takes part is a matter of the seed.
ledger = control / f"ledger-{{seed}}.npz"
if ledger.exists():
    shutil.copy(ledger, directory / "participation.npz")
if "data" in kept:
    (directory / "checkpoints").mkdir(exist_ok=True)
    (directory / "checkpoints" / "dataset.json").write_text(json.dumps(kept["data"]))
if is_check:
    time.sleep(60)
failure = control / f"fail-{{directory.name}}"
if failure.exists():
    print("  9%|#   \\r 10%|#   \\nrun: the disk is full\\n", file=sys.stderr)
    sys.exit(7)
(control / f"at-work-{{directory.name}}").write_text(str(os.getpid()))
while (control / f"hold-{{directory.name}}").exists():
    if stops:
        (control / f"stops-{{directory.name}}").write_text(str(len(stops)))
        sys.exit(130)
    time.sleep(0.02)
accuracy = {_ACCURACIES!r}.get(directory.name, 100) / 1000
(directory / "metrics.csv").write_text(
    "round,heldout_accuracy\\n1,\\n2,0.25\\n3,\\n4," + str(accuracy) + "\\n"
)
is_private = mechanism != "none"
if is_private:
    shutil.copytree(control / "mechanism", directory, dirs_exist_ok=True)
epsilon = 8.0 if is_private else None
print("a log line", file=sys.stderr)
print(json.dumps({{
    "output_dir": str(directory),
    "rounds": 4,
    "test_accuracy": accuracy,
    "initial_model": f"of seed {{seed}}",
    "privacy": {{
        "is_private": is_private,
        # Who was drawn made it better, which is none of the mechanism's merits; or worse.
        "keeps_plan": mechanism != "tree",
        "headline": {{"guarantee": "observed"}},
        **{{
            name: {{
                "epsilon": None if found is None else str(found),
                "delta": "0.0001",
                "only_if": None,
            }}
            for name, found in (
                ("observed", epsilon if mechanism == "tree" else 0.5),
                ("planned", 0.7 if mechanism == "tree" else epsilon),
            )
        }},
    }},
}}))
"""


class Workplace:
    """A directory in which the next-word command is the small program."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self.control = path / "control"
        self.output = path / "comparison"
        self.control.mkdir()
        noise = accounting.noise_multiplier(8.0, 1e-4)
        Mechanism(factorizations.identity(4), MinSeparation(2), noise).save(
            self.control / "mechanism"
        )
        package = path / "stackoverflow_nwp"
        package.mkdir()
        (package / "__init__.py").touch()
        (package / "run_stackoverflow.py").write_text(_RUN)

    def started(self) -> list[tuple[str, list[str]]]:
        """The directories and command lines of runs, without those that check flags."""
        return [(name, arguments) for name, arguments in self._lines() if name != "run"]

    def checks(self) -> list[list[str]]:
        """The command lines that check flags."""
        return [arguments for name, arguments in self._lines() if name == "run"]

    def _lines(self) -> list[Any]:
        path = self.control / "started.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def process(self, *arguments: str) -> "subprocess.Popen[str]":
        """Starts the command as a process in a session of its own, as a shell would."""
        return subprocess.Popen(
            [
                sys.executable,
                "-m",
                "simulations.compare_mechanisms",
                f"--output_dir={self.output}",
                *arguments,
            ],
            cwd=self.path,
            env={**os.environ, "PYTHONPATH": str(_ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )


def call(*arguments: str) -> console_commands.Ended:
    """How a comparison ended in this process, and what it printed."""
    has_place = any(each.startswith("--output_dir=") for each in arguments)
    place = () if has_place else ("--output_dir=comparison",)
    return console_commands.call("compare-mechanisms", *place, *arguments)
