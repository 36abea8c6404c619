"""How commands are started, and what they say of errors."""

import importlib.util
import subprocess
import sys

import pytest
from absl import flags

from mf_aggregators.commands import command_line
from mf_aggregators.commands.command_line import FlagGroup
from tests.refusals import refuses


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("delta must be finite.", "--delta must be finite."),
        ("folder is of another run: choose --first.", "folder is of another run: choose --first."),
        # What was not given, or is no parameter, is not named.
        ("epsilon must be finite.", "epsilon must be finite."),
        ("folder/a.csv, line 1: x", "--first: folder/a.csv, line 1: x"),
        ("folders: x", "folders: x"),
        ("d.bin cannot be read", "--others: d.bin cannot be read"),
    ],
)
def test_a_message_of_the_library_gets_the_flag_that_it_is_about(
    capsys: pytest.CaptureFixture[str], message: str, line: str
) -> None:
    def define(values: flags.FlagValues) -> None:
        group = FlagGroup(values, "Things")
        group.number("delta", "A number.")
        group.number("epsilon", "A number.", 1.0)
        group.integer("rounds", "An integer.")
        group.path("first", "A file.")
        group.path("second", "A folder.")
        group.path("unused", "A file.", "word")
        group.repeated_paths("others", "Files.")
        group.string("text", "A text.")

    def main(values: flags.FlagValues) -> None:
        raise ValueError(message)

    given = ("--delta=1", "--rounds=3", "--first=./folder/a.csv", "--second=folder/")
    words = ["program", *given, "--others=c", "--others=d.bin", "--text=word"]
    assert command_line.run("", define, main, words) == 2
    assert capsys.readouterr().err == f"program: {line}\n"


def test_commands_run_as_modules() -> None:
    finished = subprocess.run(
        [sys.executable, "-m", "mf_aggregators.commands.factorize", "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "Usage:" in finished.stdout
    assert finished.stderr == ""


def test_a_missing_package_of_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"tensorflow_federated", "tensorflow_privacy", "tensorflow", "psutil"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name in installed or None)
    command_line.check_extra("a run")
    installed.remove("tensorflow_privacy")
    with refuses("tensorflow_privacy", error=command_line.CommandError):
        command_line.check_extra("a run")
