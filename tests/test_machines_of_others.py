"""Commands for a user without a home directory, with one that is read-only, and with odd JSON."""

import json
import os
import pathlib
import pwd
import re
from typing import Any, NoReturn

import pytest

from mf_aggregators import atomic_files, checkpoints, factorizations, inputs
from stackoverflow_nwp import datasets
from tests import console_commands
from tests.refusals import refuses

_PLAN = [
    "--num_rounds=2",
    "--population=20",
    "--clients_per_round=10",
    "--target_epsilon=4",
    "--model_size=100",
]
_DEEP = "[" * 100_000 + "]" * 100_000


@pytest.fixture
def _without_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container that runs under any user id: no HOME, and no entry in the password file."""

    def unknown(*unused: Any) -> NoReturn:
        raise KeyError("uid not found")

    for name in ("HOME", "KERAS_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)


@pytest.mark.usefixtures("_without_home")
def test_without_a_home_nothing_is_kept_and_all_goes_on(tmp_path: pathlib.Path) -> None:
    assert atomic_files.find_cache() is None
    with refuses("HOME", "XDG_CACHE_HOME", error=OSError):
        datasets.load(datasets.DOCSTRINGS)

    ended = console_commands.call("mf-plan", *_PLAN)
    assert ended.status == 0, ended
    assert ended.errors.count("warning") == 1
    assert "without being cached (there is no home directory)" in ended.errors
    assert "are cached in" not in ended.errors
    # Clients that draw for themselves have a certificate, which is kept where there is a place.
    ended = console_commands.call("mf-plan", *_PLAN, "--sampling=balls_in_bins")
    assert ended.status == 0, ended

    refused = console_commands.call("mf-plan", *_PLAN, "--output=~/plan")
    assert refused.status == 2
    assert "no home directory of this user for ~" in refused.errors


@pytest.mark.usefixtures("_without_home")
def test_without_a_home_keras_is_told_of_another_place(monkeypatch: pytest.MonkeyPatch) -> None:
    assert console_commands.call("mf-report").status == 2
    assert os.environ["KERAS_HOME"] == os.devnull
    monkeypatch.setenv("KERAS_HOME", "mine")
    assert console_commands.call("mf-report").status == 2
    assert os.environ["KERAS_HOME"] == "mine"


@pytest.mark.parametrize("flag", [[], ["--cache_dir=/proc/zz"]])
def test_a_home_that_is_read_only_is_said_once(
    monkeypatch: pytest.MonkeyPatch, flag: list[str]
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/proc/zz")
    ended = console_commands.call("mf-plan", *_PLAN, *flag)
    assert ended.status == 0, ended
    (warning,) = re.findall("warning: .*", ended.errors)
    assert re.search(r"without being cached \(/proc/zz.* cannot be written: ", warning)
    assert "are cached in" not in ended.errors


@pytest.mark.parametrize(
    "text",
    [_DEEP, f'{{"format_version": {_DEEP}}}'],
    ids=["list", "object"],
)
def test_json_that_is_nested_too_deeply_is_refused_in_one_line(
    tmp_path: pathlib.Path, text: str
) -> None:
    with refuses("nested"):
        inputs.parsed_json(text)
    checkpoints.save(factorizations.identity(4), tmp_path / "checkpoint")
    (tmp_path / "checkpoint" / checkpoints._DESCRIPTION_FILE).write_text(text)
    (tmp_path / "text.jsonl").write_text(text)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text(text)
    for command, *arguments in (
        ("mf-report", f"--checkpoint={tmp_path}/checkpoint"),
        ("mf-audit", f"--checkpoint={tmp_path}/checkpoint"),
        ("make-text-dataset", f"--input={tmp_path}/text.jsonl", f"--output={tmp_path}/o.sqlite"),
        ("run-digits", f"--output_dir={tmp_path}/run"),
    ):
        ended = console_commands.call(command, *arguments)
        assert (ended.status, ended.printed) == (2, ""), ended
        assert ended.errors.count("\n") == 1, ended
        assert "nested too deeply" in ended.errors


def test_half_a_character_in_a_text_is_refused_with_its_line(tmp_path: pathlib.Path) -> None:
    for client, text in (("\ud83d", "words"), ("ada", "some \ud83d words")):
        lines = [{"client": "bo", "text": "words"}, {"client": client, "text": text}]
        (tmp_path / "text.jsonl").write_text("\n".join(map(json.dumps, lines)))
        ended = console_commands.call(
            "make-text-dataset",
            f"--input={tmp_path}/text.jsonl",
            f"--output={tmp_path}/made.sqlite",
        )
        assert (ended.status, ended.printed) == (2, ""), ended
        assert "text.jsonl, line 2" in ended.errors
        assert "half of a character" in ended.errors or "no text in UTF-8" in ended.errors
        assert not (tmp_path / "made.sqlite").exists()


def test_no_run_begins_where_tensorflow_cannot_write(tmp_path: pathlib.Path) -> None:
    for flag in ("output_dir", "noise_directory"):
        others = [] if flag == "output_dir" else [f"--output_dir={tmp_path / 'run'}"]
        ended = console_commands.call("run-digits", f"--{flag}={tmp_path}/\udcff", *others)
        assert (ended.status, ended.printed) == (2, ""), ended
        assert f"--{flag}=" in ended.errors
        assert "has a name that is not UTF-8" in ended.errors
        assert list(tmp_path.iterdir()) == []
