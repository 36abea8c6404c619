"""What --help prints, of every console command."""

import importlib
import pathlib
import re
import shlex
import sys

import pytest

from mf_aggregators.version import __version__
from tests import console_commands

ROOT = pathlib.Path(__file__).resolve().parent.parent
COMMANDS = {
    command: entry_point.partition(":")[0]
    for command, entry_point in console_commands.of_setup()["commands"].items()
}
SUBJECTS = {
    "Audit",
    "Data",
    "Devices",
    "Experiments",
    "Mechanism",
    "Model",
    "Noise",
    "Output",
    "Participation",
    "Privacy",
    "Runs",
    "Training",
    "Worker",
}


def _help(
    command: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flag: str = "--help",
    columns: str | None = "80",
) -> str:
    if columns is None:
        monkeypatch.delenv("COLUMNS", raising=False)
    else:
        monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr(sys, "argv", [command, flag])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(COMMANDS[command]).run()
    assert ended.value.code == 0
    return capsys.readouterr().out


def _groups(text: str) -> dict[str, dict[str, str]]:
    """The texts of flags by name, by subject, of what --help printed."""
    groups: dict[str, dict[str, str]] = {}
    for paragraph in text.split("\n\n"):
        title, *lines = paragraph.strip().splitlines()
        if not lines or not lines[0].startswith("  --"):
            continue
        assert title not in groups
        flat = re.sub(r"\n {6}", " ", "\n".join(lines))
        groups[title] = dict(re.findall(r"^  --(\w+): (.*)$", flat, re.MULTILINE))
        assert len(groups[title]) == len(flat.splitlines())
    return groups


def test_there_are_twelve_commands() -> None:
    assert len(COMMANDS) == 12


@pytest.mark.parametrize("command", COMMANDS)
def test_every_flag_is_described_once_under_a_subject(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = _help(command, monkeypatch, capsys)
    values = console_commands.flags_of(command)
    groups = _groups(text)
    assert set(groups) <= SUBJECTS
    listed = [name for group in groups.values() for name in group]
    assert sorted(listed) == sorted(values)
    assert re.findall(r"^  --(\w+):", text, re.MULTILINE) == listed
    said_of = {name: said for group in groups.values() for name, said in group.items()}
    for name, said in said_of.items():
        flag = values[name]
        choices = getattr(flag.parser, "enum_values", None)
        meaning = said
        if choices:
            assert text.count("|".join(choices)) == 1, name
            assert meaning.startswith("|".join(choices) + ". "), name
            meaning = meaning.removeprefix("|".join(choices) + ". ")
        # A sentence: it begins as one, has a few words, and ends as one.
        assert re.fullmatch(r"[A-Z].*[^.]\.", meaning), (name, meaning)
        assert len(meaning.split(" Default:")[0].split()) >= 3, (name, meaning)
        assert said.count("Default:") <= 1, (name, said)
        if flag.default not in (None, "", []):
            default = flag.default
            shown = ",".join(default) if isinstance(default, list) else str(default)
            assert said.lower().endswith(f"default: {shown}.".lower()), (name, said)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("columns", ["80", "60", "132", None])
def test_no_line_is_wider_than_the_terminal(
    command: str,
    columns: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = _help(command, monkeypatch, capsys, columns=columns)
    # Where there is no terminal, 80; a wide one is not used whole, for the eye's sake.
    widest = min(int(columns or 80), 100)
    assert max(map(len, text.splitlines())) <= widest
    assert max(map(len, text.splitlines())) > widest - 12


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_ends_with_examples_that_the_command_takes(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = _help(command, monkeypatch, capsys)
    _, _, examples = text.partition("\n\nExamples:\n")
    assert "\n\n" not in examples
    lines = examples.replace("\\\n", "").splitlines()
    commands = [shlex.split(line, comments=True) for line in lines]
    assert any(commands)
    for words in filter(None, commands):
        assert words[0] == command
        values = console_commands.flags_of(command)
        assert values(words) == [command]


@pytest.mark.parametrize("command", COMMANDS)
def test_helpfull_documents_every_flag_too(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    short = _help(command, monkeypatch, capsys)
    assert _help(command, monkeypatch, capsys, "--helpfull") == short


def test_the_most_used_flags_of_a_run_come_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    groups = _groups(_help("run-stackoverflow", monkeypatch, capsys))
    assert list(groups) == [
        "Data",
        "Model",
        "Training",
        "Mechanism",
        "Privacy",
        "Participation",
        "Devices",
        "Noise",
        "Output",
    ]
    first = {title: next(iter(group)) for title, group in groups.items()}
    assert first == {
        "Data": "dataset",
        "Model": "embedding_size",
        "Training": "num_rounds",
        "Mechanism": "mechanism",
        "Privacy": "target_epsilon",
        "Participation": "sampling",
        "Devices": "timer",
        "Noise": "noise_storage",
        "Output": "output_dir",
    }


@pytest.mark.parametrize("command", COMMANDS)
def test_version_and_usage(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _help(command, monkeypatch, capsys, "--version") == f"{command} {__version__}\n"
    text = _help(command, monkeypatch, capsys, columns="100")
    (usage,) = [each for each in text.split("\n\n") if each.startswith("Usage: ")]
    # What the help calls required is what a call without flags is told of, all at once.
    values = console_commands.flags_of(command)
    required = [name for name in values if (values[name].help or "").endswith("equired.")]
    for name in required:
        assert f"--{name}=" in usage
    assert usage.startswith(f"Usage: {command} ")
    if required:
        ended = console_commands.call(command)
        assert (ended.status, ended.printed) == (2, "")
        assert ended.errors.count("\n") == 1
        assert all(f"--{name}" in ended.errors.partition("Usage:")[0] for name in required)
        assert " ".join(usage.split()) in ended.errors
