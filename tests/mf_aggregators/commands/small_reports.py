"""Calls of mf-report for a small checkpoint, with its ledger in text."""

import pathlib
from typing import Any

from tests import console_commands

_PLANNED = ("--separation=4", "--max_participations=3", "--noise_multiplier=0.9", "--delta=1e-5")
# What clients' names begin with, where nothing that is printed may hold it.
NAMED = "zebra-"


def call_report(checkpoint: pathlib.Path, *flags: str) -> console_commands.Ended:
    """A report of a checkpoint, with what was planned."""
    return console_commands.call("mf-report", f"--checkpoint={checkpoint}", *_PLANNED, *flags)


def flag_of_ledger(tmp_path: pathlib.Path, lines: str) -> str:
    """The flag of a text ledger with some lines."""
    file = tmp_path / "rounds.csv"
    file.write_text(lines)
    return f"--ledger={file}"


def flags_of_complete_ledger(tmp_path: pathlib.Path, lines: str, rounds: int) -> tuple[str, str]:
    """The flags of a text ledger and of the numbers of clients that its rounds had."""
    found = [int(line.rpartition(",")[2]) for line in lines.splitlines()]
    file = tmp_path / "counts.csv"
    file.write_text("".join(f"{found.count(index)}\n" for index in range(rounds)))
    return flag_of_ledger(tmp_path, lines), f"--round_counts={file}"


def fields_of_report(*flags: str) -> dict[str, Any]:
    """What a report has in JSON, but for the time that it took."""
    found = console_commands.call("mf-report", "--delta=1e-5", "--format=json", *flags).fields()
    del found["seconds"]
    return found
