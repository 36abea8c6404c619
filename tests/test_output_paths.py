"""Every command with an output: a place that cannot be written is refused at once."""

import os
import pathlib

import pytest

from mf_aggregators import checkpoints, factorizations
from mf_aggregators.noise import noise_directory
from tests import console_commands
from tests.refusals import refuses

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
    ended = console_commands.call(command, *arguments)
    assert ended.status == 2, (place, ended)
    assert ended.printed == ""
    assert ended.errors.count("\n") == 1, (place, ended.errors)
    assert place in ended.errors, ended.errors


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
            noise_directory.open_directory(place)
        _refused("run-digits", "--output_dir={folder}/run --noise_directory={}", place, folder)


# What is there already


@pytest.mark.parametrize("command", ["mf-factorize", "mf-plan"])
def test_a_checkpoint_is_replaced_only_on_request(command: str, folder: pathlib.Path) -> None:
    flags = _FILES[command].format(folder / "checkpoint", folder=folder).split()
    flags = [flag.replace("num_rounds=4", "num_rounds=5") for flag in flags]
    refused = console_commands.call(command, *flags)
    assert refused.status == 2
    assert "--overwrite" in refused.errors
    assert refused.errors.count("\n") == 1
    assert checkpoints.load(folder / "checkpoint").num_rounds == 4

    assert console_commands.call(command, *flags, "--overwrite").status == 0
    assert checkpoints.load(folder / "checkpoint").num_rounds == 5


@pytest.mark.parametrize("command", ["mf-factorize", "mf-plan"])
def test_what_is_no_checkpoint_is_never_replaced(command: str, folder: pathlib.Path) -> None:
    flags = _FILES[command].format(folder / "words.txt", folder=folder).split()
    ended = console_commands.call(command, *flags, "--overwrite")
    assert ended.status == 2
    assert "not a checkpoint" in ended.errors
    assert (folder / "words.txt").read_text() == "A sentence of some words.\n"
