"""A number that was replaced in a cache, with its hash, makes no guarantee false.

Plans with a poisoned cache have mechanisms whose epsilon, asked for without any cache, is at most
the target, and whose sensitivity is that of the matrix that makes the noise.
"""

import dataclasses
import hashlib
import io
import itertools
import json
import os
import pathlib
import pwd
import re
import shutil
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import pytest

from mf_aggregators import (
    accounting,
    atomic_files,
    checkpoints,
    factorizations,
    inputs,
    planning,
    sensitivity,
)
from mf_aggregators.atomic_files import CacheWarning
from mf_aggregators.kernel import certificate
from mf_aggregators.participation import MinSeparation, SingleParticipation
from mf_aggregators.participation.certificate_search import Certification
from mf_aggregators.planning import Candidate, Plan
from stackoverflow_nwp import datasets
from tests import console_commands
from tests.mf_aggregators.planning.small_settings import TIMERS
from tests.refusals import refuses

_FACTORS = (0.4, 2.5, float("nan"))
_DRAWN = dataclasses.replace(
    TIMERS,
    num_rounds=8,
    population=80,
    participation=None,
    sampling="poisson",
    epsilon=4.0,
    delta=1e-5,
)
_SETTINGS = {
    "timers": dataclasses.replace(
        TIMERS, num_rounds=12, participation=MinSeparation(4), population=40
    ),
    "poisson": _DRAWN,
    "min_separation": dataclasses.replace(_DRAWN, sampling="min_separation"),
}
# What is drawn has the same kinds of entries for each mechanism.
_MECHANISMS = {"timers": None, "poisson": ("banded",), "min_separation": ("banded",)}


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], pathlib.Path]:
    """Returns the cache that a plan of a setting leaves."""
    caches_of: dict[str, pathlib.Path] = {}

    def cache_of(name: str) -> pathlib.Path:
        if name not in caches_of:
            caches_of[name] = tmp_path_factory.mktemp(name)
            _planned(name, caches_of[name])
            # What nobody changed is used, without a word.
            with warnings.catch_warnings():
                warnings.simplefilter("error", CacheWarning)
                _planned(name, caches_of[name])
        return caches_of[name]

    return cache_of


def _planned(name: str, cache: pathlib.Path) -> Plan:
    # As in a process of its own.
    certificate._proves.cache_clear()
    return planning.make(_SETTINGS[name], cache_directory=cache, mechanisms=_MECHANISMS[name])


def _multiplied(value: Any, factor: float) -> Any:
    """A JSON value with all its numbers multiplied; whole numbers stay whole where they can."""
    if isinstance(value, dict):
        return {name: _multiplied(each, factor) for name, each in value.items()}
    if isinstance(value, list):
        return [_multiplied(each, factor) for each in value]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value
    product = value * factor
    return int(product) if isinstance(value, int) and np.isfinite(product) else product


def _poison(cache: pathlib.Path, part: int, factor: float) -> int:
    """Replaces one part of every entry, hashes and all; returns how many entries have one."""
    return sum(
        _poison_number(entry, part, factor)
        if entry.is_file()
        else _poison_checkpoint(entry, part, factor)
        for entry in cache.iterdir()
    )


def _poison_number(entry: pathlib.Path, part: int, factor: float) -> bool:
    contents = json.loads(entry.read_text())
    del contents["sha256"]
    (field,) = set(contents) - {"description"}
    whole = contents[field]
    names = sorted(whole) if isinstance(whole, dict) else [None]
    if part >= len(names) or whole is None:
        return False
    if names[part] is None:
        contents[field] = _multiplied(whole, factor)
    else:
        contents[field] = {**whole, names[part]: _multiplied(whole[names[part]], factor)}
    entry.write_text(json.dumps({**contents, "sha256": atomic_files.digest(contents)}))
    return True


def _poison_checkpoint(entry: pathlib.Path, part: int, factor: float) -> bool:
    description = json.loads((entry / "factorization.json").read_text())
    arrays = dict(np.load(entry / "arrays.npz"))
    of_arrays = sorted(arrays)
    of_description = ["num_rounds", "parameters", "optimised_for", "optimality_gap", "errors"]
    if part < len(of_arrays):
        name = of_arrays[part]
        file = io.BytesIO()
        np.savez(file, **{**arrays, name: arrays[name] * factor})
        (entry / "arrays.npz").write_bytes(file.getvalue())
        description["arrays_sha256"] = hashlib.sha256(file.getvalue()).hexdigest()
    elif part < len(of_arrays) + len(of_description):
        name = of_description[part - len(of_arrays)]
        description[name] = _multiplied(description[name], factor)
    else:
        return False
    del description["description_sha256"]
    digest = hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()
    (entry / "factorization.json").write_text(
        json.dumps({**description, "description_sha256": digest})
    )
    return True


def _check(plan: Plan) -> None:
    """What is stated of all mechanisms of a plan holds, by accountants and matrices alone."""
    assert not plan.recommended.is_estimate
    for candidate in plan.candidates:
        if not candidate.is_estimate:
            assert _epsilon(candidate, plan.setting.delta) <= plan.setting.epsilon
        matrix, schema = candidate.mechanism.factorization, candidate.mechanism.noise_reference
        # The rows of a tree are those of a smaller matrix than the one that noise is scaled to.
        if candidate.kind != "tree":
            drawn = np.linalg.inv(matrix.noising_matrix())
            true = sensitivity.compute(drawn, SingleParticipation()).value
            found = matrix.sensitivity(SingleParticipation()).value
            assert found == pytest.approx(true, rel=1e-9)
            if np.all(drawn >= 0.0):
                patterns = sensitivity.compute(drawn, schema).value
                assert matrix.sensitivity(schema).value >= patterns * (1.0 - 0.02)


def _epsilon(candidate: Candidate, delta: float) -> float:
    mechanism = candidate.mechanism
    if mechanism.sampling is None:
        return accounting.epsilon(mechanism.noise_multiplier, delta)
    alone = Certification(directory=None)
    return mechanism.guarantee(delta, certification=alone).epsilon


@pytest.mark.parametrize(
    ("name", "factor"),
    [
        pytest.param(name, factor, marks=() if name in short else pytest.mark.long)
        for factor, short in zip(_FACTORS, (("timers",), (), ("poisson",)), strict=True)
        for name in _SETTINGS
    ],
)
@pytest.mark.filterwarnings("ignore::mf_aggregators.atomic_files.CacheWarning")
def test_no_plan_believes_its_cache(
    filled: Callable[[str], pathlib.Path], tmp_path: pathlib.Path, name: str, factor: float
) -> None:
    """The numbers of one place in all entries at a time."""
    for part in itertools.count():
        cache = tmp_path / str(part)
        shutil.copytree(filled(name), cache)
        if not _poison(cache, part, factor):
            break
        _check(_planned(name, cache))
    assert part > 5


# Commands for a user without a home directory, with one that is read-only, and with odd JSON.


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
    assert "not cached (there is no home directory)" in ended.errors
    assert "are cached in" not in ended.errors
    # Clients that draw for themselves have a certificate, which is kept where there is a place.
    console_commands.call("mf-plan", *_PLAN, "--sampling=balls_in_bins").done()

    console_commands.call("mf-plan", *_PLAN, "--output=~/plan").refused(
        "no home directory of this user for ~"
    )


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
    assert re.search(r"not cached \(/proc/zz.* cannot be written: ", warning)
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
        console_commands.call(command, *arguments).refused("nested too deeply")


def test_half_a_character_in_a_text_is_refused_with_its_line(tmp_path: pathlib.Path) -> None:
    for client, text in (("\ud83d", "words"), ("ada", "some \ud83d words")):
        lines = [{"client": "bo", "text": "words"}, {"client": client, "text": text}]
        (tmp_path / "text.jsonl").write_text("\n".join(map(json.dumps, lines)))
        line = console_commands.call(
            "make-text-dataset",
            f"--input={tmp_path}/text.jsonl",
            f"--output={tmp_path}/made.sqlite",
        ).refused("text.jsonl, line 2")
        assert "half of a character" in line or "no text in UTF-8" in line
        assert not (tmp_path / "made.sqlite").exists()


def test_no_run_begins_where_tensorflow_cannot_write(tmp_path: pathlib.Path) -> None:
    for flag in ("output_dir", "noise_directory"):
        others = [] if flag == "output_dir" else [f"--output_dir={tmp_path / 'run'}"]
        console_commands.call("run-digits", f"--{flag}={tmp_path}/\udcff", *others).refused(
            f"--{flag}=", "is not valid UTF-8"
        )
        assert list(tmp_path.iterdir()) == []
