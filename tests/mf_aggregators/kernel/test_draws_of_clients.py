"""Sizes of sampling schemes: against counts of all rounds and clients, and what is refused."""

import copy
import dataclasses
import hashlib
import itertools
import math
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mf_aggregators.factorizations.noise_rows import dense_rows
from mf_aggregators.kernel import losses
from mf_aggregators.kernel.cohorts import Cohorts
from mf_aggregators.kernel.integers import IntegerRows
from mf_aggregators.kernel.losses import (
    BallsInBins,
    Draws,
    FixedSize,
    Groups,
    MinSeparation,
    Poisson,
    RandomAllocation,
    SampledRun,
    Shuffling,
    StrategyColumns,
    TruncatedPoisson,
)
from mf_aggregators.kernel.numbers import NotProved
from mf_aggregators.kernel.sensitivity import Schema
from mf_aggregators.participation import PoissonSampling
from tests.examples import examples
from tests.mf_aggregators.random_recursions import toeplitz_rows
from tests.refusals import refuses

_drawn = st.tuples(st.integers(1, 30), st.integers(1, 6), st.integers(0, 40), st.integers(1, 5))
_sizes = _drawn.map(lambda drawn: (*drawn[:2], drawn[1] * drawn[3] + drawn[2], drawn[3]))


@given(_sizes)
@settings(max_examples=examples(60), deadline=None)
def test_sizes_are_those_of_all_rounds_and_clients(sizes: tuple[int, int, int, int]) -> None:
    n, b, m, batch = sizes
    rounds = max(len(range(group, n, b)) for group in range(b))
    for kind in (Poisson, FixedSize, Shuffling, RandomAllocation):
        assert kind(*sizes).rounds_of_group == rounds
        assert kind(*sizes).schema == Schema(rounds, b, is_even=True)
    assert Poisson(*sizes).most_participations == FixedSize(*sizes).most_participations == rounds
    # In every group, q of the expected m / b clients are B.
    assert Poisson(*sizes).sampling_probability * m / b == pytest.approx(batch)
    assert TruncatedPoisson(*sizes, batch).sampling_probability <= 1.0
    fixed = FixedSize(*sizes)
    assert fixed.group_size * b <= m < (fixed.group_size + 1) * b
    assert fixed.sampling_probability * fixed.group_size == pytest.approx(batch)
    cycle = [start for start in range(0, m // b, batch) if start + batch <= m // b]
    cycles: tuple[Shuffling | RandomAllocation, ...] = (Shuffling(*sizes), RandomAllocation(*sizes))
    for each in cycles:
        assert each.rounds_of_cycle == len(cycle)
        assert each.group_size == len(cycle) * batch
        assert each.most_participations == len(range(0, rounds, len(cycle)))
        run = losses.SampledRun(each, 1.0)
        assert run.disjoint_participations == each.most_participations
        assert run.norm_of_all == pytest.approx(math.sqrt(each.most_participations))
        assert run.amplified_part == 1.0 / each.largest_move


@pytest.mark.parametrize("scale", [1e-300, 2.7e-162, 1e-20, 1.0, 1e200, 1.7e308])
def test_a_scaling_of_the_matrix_changes_nothing(scale: float) -> None:
    """Squares of entries may be beyond floats, which would leave columns of zeros."""
    columns = np.array([[1.0, -0.5], [0.25, 0.5], [1.0, 0.0]])
    np.testing.assert_allclose(
        StrategyColumns(scale * columns).scaled(), np.abs(columns) / 1.25**0.5, rtol=1e-12
    )


@pytest.mark.parametrize("value", [0.0, np.nan, np.inf])
def test_columns_that_have_no_norm_are_refused(value: float) -> None:
    with pytest.raises(ValueError, match="must be finite, and not zero"):
        StrategyColumns(np.array([[0.0, 0.0], [value, value]])).scaled()


def test_columns_follow_from_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """If C has ones only, a number of the ninth row has the roundings of nine rows of Z."""
    found = StrategyColumns.of(dense_rows(np.eye(9) - np.eye(9, k=-1)), 3)
    np.testing.assert_allclose(found.entries, [[1, 1, 1], [1, 1, 0], [1, 0, 0]], atol=1e-15)
    assert found.rounding == pytest.approx(9.0, rel=1e-3)
    rows = toeplitz_rows(5, np.array([1.0, 0.5]))
    found = StrategyColumns.of(rows, 5)
    assert found.entries.tolist() == [*4 * [[1.0, 0.5]], [1.0, 0.0]]
    assert found.rounding == 4.0
    for unknown in (math.inf, math.nan):
        monkeypatch.setattr(IntegerRows, "largest_rounding", lambda _, found=unknown: found)
        with pytest.raises(NotProved, match="no finite bound"):
            StrategyColumns.of(rows, 5)


def test_participations_of_one_bin_add_up() -> None:
    entries = np.array([[1.0, 0.5, 0.25]] * 4 + [[1.0, 0.5, 0.0], [1.0, 0.0, 0.0]])
    run = SampledRun(BallsInBins(6, 3, 20, 4, 2), 1.0, StrategyColumns(entries))
    matrix = np.zeros((6, 6))
    for i in range(6):
        matrix[i : i + 3, i] = entries[i, : 6 - i]
    sums = np.stack([matrix[:, first::2].sum(axis=1) for first in range(2)], axis=1)
    np.testing.assert_array_equal(losses.sums_of_bins(entries, 2), sums)
    expected = max(np.linalg.norm(sums, axis=0)) / np.linalg.norm(entries[0])
    assert expected < run.norm_of_all < expected * (1.0 + 2e-9)
    assert run.noise_multiplier == pytest.approx(run.sigma / expected, rel=2e-9)
    assert run.disjoint_participations == 1


def test_a_client_that_takes_the_place_of_another_moves_a_sum_twice() -> None:
    assert Poisson.largest_move == RandomAllocation.largest_move == 1.0
    for kind in (TruncatedPoisson, FixedSize, Shuffling):
        assert kind.largest_move == 2.0  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("kind", "sizes", "message"),
    [
        (Poisson, (4, 2, 9, 5), "population of 9 is too small, 10 are needed"),
        (FixedSize, (4, 2, 9, 5), "10 are needed: use fewer bands .at most 1."),
        (Shuffling, (0, 1, 9, 5), "num_rounds must be at least 1"),
        (RandomAllocation, (4, 1, 9, True), "clients_per_round must be an integer"),
        (Poisson, (4, 1.0, 9, 5), "num_bands must be an integer"),
        (TruncatedPoisson, (4, 1, 9, 5, 4), "largest_batch must be at least clients_per_round, 5"),
        (TruncatedPoisson, (4, 1, 9, 5, 0), "largest_batch must be at least 1"),
    ],
)
def test_bad_sizes_are_refused(kind: type, sizes: tuple[object, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(*sizes)


def test_integers_of_numpy_become_ints() -> None:
    draws = TruncatedPoisson(*np.array([4, 2, 20, 5, 7]))
    assert all(type(value) is int for value in dataclasses.astuple(draws))
    others: tuple[Any, ...] = (draws, BallsInBins(4, 2, 20, 4, 3))
    for each in others:
        with pytest.raises(dataclasses.FrozenInstanceError):
            each.norm = 3.0


def test_draws_are_of_a_closed_list() -> None:
    class More(Poisson):  # type: ignore[misc]
        @property
        def sampling_probability(self) -> float:
            return 1e-9

    others: tuple[Any, ...] = (More(4, 1, 10, 5), (4, 1, 10, 5), None)
    takers: tuple[Any, ...] = (losses.checked_draws, SampledRun, Cohorts)
    for draws, taker in itertools.product(others, takers):
        with pytest.raises(TypeError, match="draws must be one of Poisson, TruncatedPoisson"):
            taker(draws, *[1] * (taker is not losses.checked_draws))


@pytest.mark.parametrize("kind", [Poisson, FixedSize, Shuffling, RandomAllocation])
def test_draws_whose_integers_were_altered_are_checked_again(kind: type[Groups]) -> None:
    draws = kind(4, 2, 20, 5)  # type: ignore[call-arg]
    assert losses.checked_draws(draws) == draws
    object.__setattr__(draws, "population", 3)
    with pytest.raises(ValueError, match="too small"):
        losses.checked_draws(draws)


_SIZES: dict[str, Any] = {
    "num_rounds": 4,
    "num_bands": 2,
    "population": 12,
    "clients_per_round": 4,
    "separation": 3,
}


@pytest.mark.parametrize("kind", [MinSeparation, BallsInBins])
@pytest.mark.parametrize("name", _SIZES)
def test_sizes_of_secret_rounds_are_integers_of_at_least_1(
    kind: type[MinSeparation | BallsInBins], name: str
) -> None:
    kind(**_SIZES)
    for value in (0, -1, 2.5, True, "2", None):
        with pytest.raises(ValueError, match=name):
            kind(**{**_SIZES, name: value})
    with pytest.raises(ValueError, match=r"use a smaller separation \(at most 2\)"):
        kind(4, 2, 11, 4, 3)


def test_secret_rounds_are_a_separation_apart() -> None:
    with pytest.raises(ValueError, match="separation must be at least num_bands, 3"):
        MinSeparation(5, 3, 20, 4, 2)
    bins, timers = BallsInBins(7, 3, 20, 4, 2), MinSeparation(7, 3, 20, 4, 3)
    assert bins.shares_rows
    assert not BallsInBins(7, 3, 20, 4, 3).shares_rows
    assert not timers.shares_rows
    assert bins.largest_move == timers.largest_move == 1.0
    assert (bins.schema, timers.schema) == (Schema(4, 2, is_even=True), Schema(3, 3))
    assert bins.most_participations == 4
    # Clients that took part in the last separation - 1 rounds are not free.
    assert timers.joining_probability == 4 / (20 - 2 * 4)
    assert MinSeparation(4, 1, 12, 4, 3).joining_probability == 1.0
    assert str(timers) == "min_separation sampling of 4 of 20 clients"
    assert str(Poisson(4, 1, 10, 5)) == "poisson sampling of 5 of 10 clients"


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
        with pytest.raises(AttributeError, match=name):
            setattr(cohorts, name, 2)
    with pytest.raises(ValueError, match="read-only"):
        cohorts.group_of_round(0)[0] = 1


def test_entries_of_columns_stay_those_of_their_digest() -> None:
    columns = StrategyColumns(np.ones((3, 2)), 5.0)
    for each in (columns, copy.deepcopy(columns), pickle.loads(pickle.dumps(columns))):
        assert each == columns
        with pytest.raises(ValueError, match="WRITEABLE"):
            each.entries.setflags(write=True)


def test_the_seed_of_cohorts_is_not_printed() -> None:
    seed = 123456789
    for cohorts in (Cohorts(Poisson(4, 2, 8, 2), seed), PoissonSampling(4, 2, 8, 2).sampler(seed)):
        cohorts.draw(0)
        assert str(seed) not in f"{cohorts!r} {cohorts} {[cohorts]}"


def test_other_seeds_and_rounds_are_refused() -> None:
    with refuses("seed", "-1"):
        Cohorts(Poisson(4, 2, 8, 2), -1)
    for index in (-1, 4):
        with refuses("round_index must be in range(4)"):
            Cohorts(Poisson(4, 2, 8, 2), 1).draw(index)
