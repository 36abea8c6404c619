"""Paths that begin with a tilde, and names that are not UTF-8, of every command."""

import json
import os
import pathlib
import re

import pytest
from absl import flags

from mf_aggregators import checkpoints, factorizations
from mf_aggregators.commands import command_line
from tests import console_commands

_COMMANDS = sorted(console_commands.of_setup()["commands"])
# What the meaning of a flag has that takes a path, and of flags that take none.
_PATH = re.compile(r"\b(file|files|directory|folder|Where (?!the noise|an?\b)\w+)\b")
_NO_PATHS = {
    # Words, numbers and switches that speak of files or places.
    ("make-text-dataset", "client_column"),
    ("make-text-dataset", "text_column"),
}


@pytest.fixture
def home(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A home directory with a checkpoint and a ledger, beside the one where commands are called."""
    home = tmp_path / "home"
    (tmp_path / "here").mkdir()
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    # Where the first process to draw caches its fonts.
    monkeypatch.setenv("MPLCONFIGDIR", str(tmp_path / "matplotlib"))
    monkeypatch.chdir(tmp_path / "here")
    checkpoints.save(factorizations.identity(4), home / "checkpoint")
    (home / "ledger.csv").write_text("ada,0\n")
    return home


def _takes_text(flag: "flags.Flag[object]") -> bool:
    return flag.parser.flag_type() in ("string", "multi string")


@pytest.mark.parametrize("command", _COMMANDS)
def test_every_flag_that_takes_a_path_resolves_it(command: str) -> None:
    values = console_commands.flags_of(command)
    for name in values:
        flag = values[name]
        if _takes_text(flag) and (command, name) not in _NO_PATHS:
            assert not _PATH.search(flag.help or ""), name
    paths = [name for name in values if values[name].parser.flag_type().endswith("path")]
    assert paths or command in ("start-tff-worker",)
    for name in paths:
        flag = console_commands.flags_of(command)[name]
        flag.parse("~/x")
        assert flag.value in (os.path.expanduser("~/x"), [os.path.expanduser("~/x")])


@pytest.mark.parametrize("command", _COMMANDS)
def test_no_second_path_drops_the_first(command: str) -> None:
    """A ledger that is left out makes an epsilon too small."""
    for name in console_commands.flags_of(command):
        values = console_commands.flags_of(command)
        if values[name].flag_type() != "path":
            continue
        values([command, f"--{name}=a", f"--{name}=a"])
        assert values[name].value == "a"
        with pytest.raises(flags.IllegalFlagValueError, match="given twice"):
            values([command, f"--{name}=b"])


def test_a_report_counts_no_half_of_its_ledgers(home: pathlib.Path) -> None:
    """Nor of those that a file of flags names, in which numbers may be given another value."""
    pathlib.Path("other.csv").write_text("bo,1\n")
    pathlib.Path("usual").write_text(
        "--ledger=~/ledger.csv\n--checkpoint=~/checkpoint\n--delta=0.1"
    )
    flags_of_it = ("--flagfile=usual", "--noise_multiplier=1", "--delta=1e-5", "--format=json")
    ended = console_commands.call("mf-report", *flags_of_it)
    assert ended.status == 0, ended.errors
    assert json.loads(ended.printed)["delta"] == 1e-5
    for path in ("ledger", "round_times", "checkpoint"):
        given = (f"--{path}=~/ledger.csv", f"--{path}=other.csv")
        refused = console_commands.call("mf-report", *given, "--noise_multiplier=1")
        assert refused.status == 2
        assert f"--{path} is given twice, and the first one would be lost" in refused.errors
    refused = console_commands.call("mf-report", *flags_of_it, "--ledger=other.csv")
    assert refused.status == 2
    assert "--ledger is given twice" in refused.errors


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("~", "{home}"),
        ("~/a b/~", "{home}/a b/~"),
        ("./~/x", "./~/x"),
        ("runs", "runs"),
        ("~root/x", os.path.expanduser("~root/x")),
    ],
)
def test_a_leading_tilde_is_a_home_directory(home: pathlib.Path, text: str, found: str) -> None:
    assert command_line.resolved_path(text) == found.format(home=home)


@pytest.mark.long
def test_names_that_are_not_utf_8_are_used_and_printed_in_ascii(home: pathlib.Path) -> None:
    name = os.fsdecode(os.fsencode(home) + b"/\xff")
    made = console_commands.call(
        "mf-factorize", "--mechanism=identity", "--num_rounds=4", f"--output={name}"
    )
    assert made.status == 0, made
    assert b"\xff" in os.listdir(os.fsencode(home))
    for form in ("text", "json"):
        ended = console_commands.call(
            "mf-report",
            f"--checkpoint={name}",
            "--overwrite",
            f"--figure={name}.png",
            f"--format={form}",
        )
        assert (ended.status, ended.errors) == (0, ""), ended
        assert "\\udcff.png" in ended.printed
    assert b"\xff.png" in os.listdir(os.fsencode(home))
    missing = console_commands.call("mf-report", f"--checkpoint={name}nowhere")
    assert missing.status == 2
    assert missing.errors.count("\n") == 1
