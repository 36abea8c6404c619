"""Draws are functions of a claim's integers, a seed and the round; they never change.

Their distributions are tested in ``tests/mf_aggregators/participation``.
"""

import hashlib

import pytest

from mf_aggregators.kernel.cohorts import Cohorts
from mf_aggregators.kernel.draws_of_clients import (
    BallsInBins,
    Draws,
    FixedSize,
    MinSeparation,
    Poisson,
    RandomAllocation,
    Shuffling,
    TruncatedPoisson,
)
from tests.refusals import refuses


@pytest.mark.parametrize(
    ("draws", "digest"),
    [
        (Poisson(20, 3, 100, 7), "c35cbc68bfb61c63"),
        (TruncatedPoisson(20, 3, 100, 7, 8), "6aabb33c02f8a0fc"),
        (FixedSize(20, 3, 100, 7), "bb7605bc1c8d933f"),
        (Shuffling(20, 3, 100, 7), "30824410c7eabb28"),
        (RandomAllocation(20, 3, 100, 7), "5c78e3cf5842cbaa"),
        (MinSeparation(20, 3, 100, 7, 4), "c9ace4d824560c84"),
        (BallsInBins(20, 3, 100, 10, 10), "16471705b1484629"),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_draws_are_those_of_version_2_0_0(draws: Draws, digest: str) -> None:
    found = hashlib.sha256()
    for seed in (0, 5, 2**127 + 3):
        cohorts = Cohorts(draws, seed)
        for i in range(draws.num_rounds):
            found.update(repr((cohorts.draw(i).tolist(), cohorts.num_eligible(i))).encode())
    assert found.hexdigest()[:16] == digest


def test_nothing_of_cohorts_is_set() -> None:
    cohorts = Cohorts(Poisson(4, 2, 8, 2), 1)
    for name in ("draws", "seed", "_order"):
        with pytest.raises(AttributeError, match=f"{name} of a Cohorts cannot be set"):
            setattr(cohorts, name, 2)
    with pytest.raises(ValueError, match="read-only"):
        cohorts.group_of_round(0)[0] = 1


def test_other_draws_seeds_and_rounds_are_refused() -> None:
    class Other(Poisson):  # type: ignore[misc]
        pass

    with pytest.raises(TypeError, match="draws must be one of"):
        Cohorts(Other(4, 2, 8, 2), 1)
    with refuses("seed", "-1"):
        Cohorts(Poisson(4, 2, 8, 2), -1)
    for index in (-1, 4):
        with refuses(f"round {index} is not one of the 4 rounds"):
            Cohorts(Poisson(4, 2, 8, 2), 1).draw(index)
