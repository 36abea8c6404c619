"""What --help prints, of every console command."""

import os
import re
import shlex
from unittest import mock

import pytest

from mf_aggregators.version import __version__
from tests import console_commands

_COMMANDS = sorted(console_commands.of_setup()["commands"])


def _help(command: str, flag: str = "--help", columns: str | None = "80") -> str:
    with mock.patch.dict(os.environ, {} if columns is None else {"COLUMNS": columns}):
        if columns is None:
            os.environ.pop("COLUMNS", None)
        ended = console_commands.call(command, flag)
    assert ended.status == 0
    return ended.printed


def _with_whole_choices(text: str) -> str:
    """The text with choices that are too long for one line put together again."""
    return re.sub(r"\|\n {6}", "|", text)


def _listed(text: str) -> dict[str, str]:
    """The texts of flags by name, of what --help printed; each paragraph has a subject."""
    found: dict[str, str] = {}
    for paragraph in text.split("\n\n"):
        _, *lines = paragraph.strip().splitlines()
        if lines and lines[0].startswith("  --"):
            flat = re.sub(r"\n {6}", " ", _with_whole_choices("\n".join(lines)))
            texts = dict(re.findall(r"^  --(\w+): (.*)$", flat, re.MULTILINE))
            assert len(texts) == len(flat.splitlines())
            assert not texts.keys() & found.keys()
            found |= texts
    return found


@pytest.mark.parametrize("command", _COMMANDS)
def test_every_flag_is_described_once_with_its_choices_and_default(command: str) -> None:
    text = _help(command)
    values = console_commands.flags_of(command)
    listed = _listed(text)
    assert sorted(listed) == sorted(values)
    for name, said in listed.items():
        flag = values[name]
        meaning = said
        if choices := getattr(flag.parser, "enum_values", None):
            assert _with_whole_choices(text).count("|".join(choices)) == 1, name
            assert said.startswith("|".join(choices) + ". "), name
            meaning = said.removeprefix("|".join(choices) + ". ")
        # A sentence: it begins as one, has a few words, and ends as one.
        assert re.fullmatch(r"[A-Z].*[^.]\.", meaning), (name, meaning)
        assert len(meaning.split(" Default:")[0].split()) >= 3, (name, meaning)
        if (default := flag.default) not in (None, "", []):
            shown = ",".join(default) if isinstance(default, list) else str(default)
            assert said.lower().endswith(f"default: {shown}.".lower()), (name, said)
    assert _help(command, "--helpfull") == text


@pytest.mark.parametrize("columns", ["80", "60", "132", None])
@pytest.mark.parametrize("command", _COMMANDS)
def test_no_line_is_wider_than_the_terminal(command: str, columns: str | None) -> None:
    # Where there is no terminal, 80; a wide one is not used whole, for the eye's sake.
    widest = min(int(columns or 80), 100)
    found = max(map(len, _help(command, columns=columns).splitlines()))
    assert widest - 12 < found <= widest


@pytest.mark.parametrize("command", _COMMANDS)
def test_the_help_ends_with_examples_that_the_command_takes(command: str) -> None:
    _, _, examples = _help(command).partition("\n\nExamples:\n")
    lines = examples.replace("\\\n", "").splitlines()
    commands = [words for line in lines if (words := shlex.split(line, comments=True))]
    assert commands
    for words in commands:
        assert words[0] == command
        assert console_commands.flags_of(command)(words) == [command]


@pytest.mark.parametrize("command", _COMMANDS)
def test_version_and_usage(command: str) -> None:
    assert _help(command, "--version") == f"{command} {__version__}\n"
    (usage,) = re.findall(
        rf"(?s)\nUsage: {command} .*?(?=\n\n)", f"\n{_help(command, columns='100')}"
    )
    # What the help calls required is what a call without flags is told of, all at once.
    values = console_commands.flags_of(command)
    required = [name for name in values if (values[name].help or "").endswith("equired.")]
    assert all(f"--{name}=" in usage for name in required)
    if required:
        ended = console_commands.call(command)
        assert (ended.status, ended.printed) == (2, "")
        assert ended.errors.count("\n") == 1
        assert all(f"--{name}" in ended.errors.partition("Usage:")[0] for name in required)
        assert " ".join(usage.split()) in ended.errors
