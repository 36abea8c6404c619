"""What --help prints, of every console command."""

import re
import shlex

import pytest

from mf_aggregators.version import __version__
from tests import console_commands

_COMMANDS = sorted(console_commands.of_setup()["commands"])


def _help(command: str, flag: str = "--help") -> str:
    ended = console_commands.call(command, flag)
    assert ended.status == 0
    return ended.printed


@pytest.mark.parametrize("command", _COMMANDS)
def test_every_flag_is_described_once(command: str) -> None:
    text = _help(command)
    values = console_commands.flags_of(command)
    listed = re.findall(r"^  --(?:\[no\])?(\w+):\s", text, re.MULTILINE)
    assert sorted(listed) == sorted(values)
    for name in values:
        choices = "|".join(getattr(values[name].parser, "enum_values", None) or ())
        # absl adds choices, and that a flag may be repeated.
        meaning = (values[name].help or "").removeprefix(f"<{choices}>: ").partition(";\n")[0]
        # A sentence: it begins as one, has a few words, and ends as one.
        assert re.fullmatch(r"[A-Z].*[^.]\.", meaning), (name, meaning)
        assert len(meaning.split(" Default:")[0].split()) >= 3, (name, meaning)
    assert _help(command, "--helpfull") == text


@pytest.mark.parametrize("command", _COMMANDS)
def test_the_help_has_examples_that_the_command_takes(command: str) -> None:
    _, _, examples = _help(command).partition("\n\nExamples:\n")
    lines = examples.partition("\n\n")[0].replace("\\\n", "").splitlines()
    commands = [words for line in lines if (words := shlex.split(line, comments=True))]
    assert commands
    for words in commands:
        assert words[0] == command
        assert console_commands.flags_of(command)(words) == [command]


@pytest.mark.parametrize("command", _COMMANDS)
def test_version_and_usage(command: str) -> None:
    assert _help(command, "--version") == f"{command} {__version__}\n"
    (usage,) = re.findall(rf"^Usage: {command} .*$", _help(command), re.MULTILINE)
    # What the help calls required is what a call without flags is told of, all at once.
    values = console_commands.flags_of(command)
    required = [name for name in values if (values[name].help or "").endswith("equired.")]
    assert all(f"--{name}=" in usage for name in required)
    if required:
        ended = console_commands.call(command)
        assert (ended.status, ended.printed) == (2, "")
        assert ended.errors.count("\n") == 1
        assert all(f"--{name}" in ended.errors.partition("Usage:")[0] for name in required)
        assert usage in ended.errors
