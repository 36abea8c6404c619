"""A number that was replaced in a cache, with its hash, makes no guarantee false.

Plans with a poisoned cache have mechanisms whose epsilon, asked for without any cache, is at most
the target, and whose sensitivity is that of the matrix that makes the noise.
"""

import dataclasses
import hashlib
import io
import itertools
import json
import pathlib
import shutil
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mf_aggregators import accounting, atomic_files, planning, sensitivity
from mf_aggregators.atomic_files import CacheWarning
from mf_aggregators.kernel import certificate
from mf_aggregators.participation import MinSeparation, SingleParticipation
from mf_aggregators.participation.certificate_search import Certification
from mf_aggregators.planning import Candidate, Plan
from tests.mf_aggregators.planning.small_settings import TIMERS

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
        matrix, schema = candidate.mechanism.factorization, candidate.mechanism.schema
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
