"""Paths that begin with a tilde, and names that are not UTF-8, of every command."""

import os
import pathlib
import re
import shlex

import pytest
from absl import flags

from mf_aggregators import checkpoints, factorizations
from mf_aggregators.commands import command_line
from mf_aggregators.noise import places
from mf_aggregators.version import __version__
from tests import console_commands
from tests.refusals import refuses

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
    assert console_commands.call("mf-report", *flags_of_it).fields()["delta"] == 1e-5
    for path in ("ledger", "round_times", "checkpoint"):
        given = (f"--{path}=~/ledger.csv", f"--{path}=other.csv")
        console_commands.call("mf-report", *given, "--noise_multiplier=1").refused(
            f"--{path} is given twice, and only the last one would count"
        )
    console_commands.call("mf-report", *flags_of_it, "--ledger=other.csv").refused(
        "--ledger is given twice"
    )


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
    console_commands.call(
        "mf-factorize", "--mechanism=identity", "--num_rounds=4", f"--output={name}"
    ).done()
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
    console_commands.call("mf-report", f"--checkpoint={name}nowhere").refused()


# What --help prints, of every console command.


def _help(command: str, flag: str = "--help") -> str:
    return console_commands.call(command, flag).done()


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
        line = console_commands.call(command).refused(usage)
        assert all(f"--{name}" in line.partition("Usage:")[0] for name in required)


# Every command with an output: a place that cannot be written is refused at once.


# Flags of commands that write a directory of files; {} is the place.
_DIRECTORIES = {
    "compare-mechanisms": "--output_dir={}",
    "reproduce-paper": "--only=bandmf-production --output_dir={}",
    "run-cifar10": "--output_dir={}",
    "run-digits": "--output_dir={}",
    "run-fashion-mnist": "--output_dir={}",
    "run-stackoverflow": "--output_dir={}",
}
# Flags of commands that write one file, or one checkpoint.
_FILES = {
    "make-text-dataset": "--input={folder}/words.txt --output={}.sqlite",
    "mf-factorize": "--mechanism=identity --num_rounds=4 --output={}",
    "mf-plan": "--num_rounds=4 --population=40 --clients_per_round=10 --target_epsilon=8 "
    "--model_size=1000 --output={}",
    "mf-report": "--checkpoint={folder}/checkpoint --figure={}.png",
    "simulate-participation": "--population=50 --clients_per_round=5 --num_rounds=4 "
    "--separation=2 --output={}.npz",
}


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    """A folder with a text file, and a checkpoint."""
    (tmp_path / "words.txt").write_text("A sentence of some words.\n")
    checkpoints.save(factorizations.identity(4), tmp_path / "checkpoint")
    return tmp_path


def _bad_places(folder: pathlib.Path) -> list[str]:
    return [
        "/proc/zz",
        "/proc/zz/deeper",
        "/sys/zz",
        "/dev/null/x",
        f"{folder}/words.txt/x",
        f"{folder}/{'n' * 300}",
        f"{folder}/{'n' * 300}/x",
    ]


def _refused(command: str, flags: str, place: str, folder: pathlib.Path) -> None:
    arguments = flags.format(place, folder=folder).split()
    console_commands.call(command, *arguments).refused(place)


@pytest.mark.parametrize(("command", "flags"), [*_DIRECTORIES.items(), *_FILES.items()])
def test_what_cannot_be_made_is_refused(command: str, flags: str, folder: pathlib.Path) -> None:
    before = sorted(folder.rglob("*"))
    for place in _bad_places(folder):
        _refused(command, flags, place, folder)
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize("command", _DIRECTORIES)
def test_what_is_no_directory_or_takes_no_file_is_refused(
    command: str, folder: pathlib.Path
) -> None:
    for place in (f"{folder}/words.txt", "/proc", "/dev/null"):
        _refused(command, _DIRECTORIES[command], place, folder)


def test_a_noise_directory_that_takes_no_file_is_refused(folder: pathlib.Path) -> None:
    # Only its owner may use it, and nobody can make a file in it.
    for place in (f"/proc/{os.getpid()}/fd", "/proc/zz", f"{folder}/{'n' * 300}"):
        with refuses("noise_directory", place):
            places.open_directory(place)
        _refused("run-digits", "--output_dir={folder}/run --noise_directory={}", place, folder)


# What is there already


@pytest.mark.parametrize("command", ["mf-factorize", "mf-plan"])
def test_a_checkpoint_is_replaced_only_on_request(command: str, folder: pathlib.Path) -> None:
    flags = _FILES[command].format(folder / "checkpoint", folder=folder).split()
    flags = [flag.replace("num_rounds=4", "num_rounds=5") for flag in flags]
    console_commands.call(command, *flags).refused("--overwrite")
    assert checkpoints.load(folder / "checkpoint").num_rounds == 4

    assert console_commands.call(command, *flags, "--overwrite").status == 0
    assert checkpoints.load(folder / "checkpoint").num_rounds == 5


@pytest.mark.parametrize("command", ["mf-factorize", "mf-plan"])
def test_what_is_no_checkpoint_is_never_replaced(command: str, folder: pathlib.Path) -> None:
    flags = _FILES[command].format(folder / "words.txt", folder=folder).split()
    console_commands.call(command, *flags, "--overwrite").refused("not a checkpoint")
    assert (folder / "words.txt").read_text() == "A sentence of some words.\n"
