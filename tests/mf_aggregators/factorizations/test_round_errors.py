"""Optima for the maximum and for weighted means, against solvers that share no code with them."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import scipy.optimize
from hypothesis import given, settings
from hypothesis import strategies as st

from mf_aggregators import inputs
from mf_aggregators.factorizations import (
    Factorization,
    NotConvergedWarning,
    _banded_search,
    banded,
    optimal,
)
from mf_aggregators.factorizations._band_certificate import BandedWorkload
from mf_aggregators.factorizations._duals import MultiEpochDual
from mf_aggregators.kernel.numbers import FloatArray
from mf_aggregators.participation import (
    FixedEpochOrder,
    Participation,
    SingleParticipation,
)
from mf_aggregators.workloads import Workload
from tests.examples import examples

_ONCE = SingleParticipation()


def random_workload(rng: np.random.Generator, num_rounds: int) -> FloatArray:
    workload = np.tril(rng.normal(size=(num_rounds, num_rounds)))
    workload[np.diag_indices(num_rounds)] = rng.uniform(0.5, 2.0, size=num_rounds)
    return workload


def gap_of(found: Factorization) -> float:
    assert found.optimality_gap is not None
    return found.optimality_gap


def squared_rows(workload: FloatArray, strategy: FloatArray) -> FloatArray:
    decoder = workload @ np.linalg.inv(strategy)
    return np.asarray(np.sum(decoder**2, axis=1))


def least_by_power_means(
    workload: FloatArray,
    weights: FloatArray | None = None,
    exponents: Sequence[float] = (1, 8, 64, 512),
    num_bands: int | None = None,
) -> float:
    """The least error of columns of norm one, by power means over the entries of C."""
    num_rounds = len(workload)
    in_band = np.tri(num_rounds) - np.tri(num_rounds, k=-(num_bands or num_rounds))
    triangle = np.nonzero(in_band)

    def matrix(free: FloatArray) -> FloatArray:
        strategy = np.zeros((num_rounds, num_rounds))
        strategy[triangle] = free
        return np.asarray(strategy / np.linalg.norm(strategy, axis=0))

    def objective(free: FloatArray, exponent: float) -> float:
        rows = squared_rows(workload, matrix(free))
        if weights is not None:
            return float(np.log(weights @ rows))
        return float(
            np.log(np.max(rows)) + np.log(np.mean((rows / rows.max()) ** exponent)) / exponent
        )

    free = (np.tril(np.full((num_rounds, num_rounds), 0.3)) + np.eye(num_rounds))[triangle]
    for exponent in exponents:
        free = scipy.optimize.minimize(objective, free, args=(exponent,), method="BFGS").x
    rows = squared_rows(workload, matrix(free))
    return float(np.max(rows) if weights is None else weights @ rows)


@pytest.mark.short_cases(4)
@pytest.mark.parametrize("seed", range(12))
def test_no_other_solver_is_below_the_bound_on_the_maximum(seed: int) -> None:
    rng = np.random.default_rng(seed)
    workload = random_workload(rng, 4)

    found = optimal(workload, error="max", relative_gap=1e-5)

    error = found.max_error(workload, _ONCE) ** 2
    assert gap_of(found) <= 1e-5
    other = least_by_power_means(workload)
    assert error / (1 + gap_of(found)) <= other * (1 + 1e-12)
    # And it is no worse than the other one.
    assert error <= other * (1 + 1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_no_other_solver_is_below_the_bound_on_a_weighted_mean(seed: int) -> None:
    rng = np.random.default_rng(seed)
    workload, weights = random_workload(rng, 4), rng.uniform(0.1, 1.0, size=4)

    found = optimal(workload, error=weights)

    error = float(weights @ found.per_round_variance(workload, _ONCE))
    other = least_by_power_means(workload, weights, (1,))
    assert gap_of(found) <= 1e-6
    assert error / (1 + gap_of(found)) <= other * (1 + 1e-9)
    assert error <= other * (1 + 2e-6)


@pytest.mark.parametrize("num_rounds", [1, 2, 17, 300])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_maximum_has_a_certificate_and_is_below_that_of_the_mean(
    num_rounds: int, momentum: float
) -> None:
    workload = Workload("momentum_sgd", num_rounds, momentum)
    if momentum and num_rounds == 300:
        workload = Workload("momentum_sgd", 60, momentum)

    found = optimal(workload, error="max", relative_gap=1e-4)
    mean = optimal(workload)

    assert gap_of(found) <= 1e-4
    largest = found.max_error(workload, _ONCE)
    assert largest <= mean.max_error(workload, _ONCE) * (1 + 1e-9)
    assert largest >= mean.rmse(workload, _ONCE) * (1 - 1e-6)
    assert found.parameters["error"] == "max"


def test_the_maximum_of_prefix_sums_is_that_of_every_round() -> None:
    found = optimal(128, error="max")

    assert found.max_error(128, _ONCE) == pytest.approx(2.32079, abs=2e-5)
    squared = np.max(squared_rows(np.tri(128), found.matrix))
    squared *= np.max(np.sum(np.square(found.matrix), axis=0))
    assert np.sqrt(squared) == pytest.approx(2.32079, abs=2e-5)
    assert found.rmse(128, _ONCE) == pytest.approx(2.32079, abs=2e-5)
    np.testing.assert_allclose(found.per_round_variance(128, _ONCE), 2.32079**2, rtol=1e-4)


def test_equal_weights_are_the_mean() -> None:
    mean, weighted = optimal(20), optimal(20, error=np.full(20, 3.0))

    assert np.array_equal(mean.matrix, weighted.matrix)
    assert "error" not in weighted.parameters


def test_weights_of_zero_cost_what_the_gap_says() -> None:
    weights = np.zeros(24)
    weights[-1] = 1.0

    found = optimal(24, error=weights)

    # The last prefix sum alone: noise of standard deviation one on the sum of all rounds.
    assert 1.0 <= found.per_round_variance(24, _ONCE)[-1] <= 1.0 + gap_of(found)
    assert gap_of(found) < 1e-6
    assert found.parameters["weights"] == weights.tolist()


@pytest.mark.parametrize(
    "error", ["worst", np.ones(3), np.zeros(4), -np.ones(4), np.full(4, np.nan), [1, 2, 3, "x"]]
)
def test_an_error_that_is_none_is_refused(error: Any) -> None:
    with pytest.raises(ValueError, match="error"):
        optimal(4, error=error)


def test_a_bound_above_the_error_of_a_matrix_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    true_bound = BandedWorkload.lower_bound
    monkeypatch.setattr(
        BandedWorkload, "lower_bound", lambda *arguments: 1.5 * true_bound(*arguments)
    )
    with pytest.warns(NotConvergedWarning):
        assert banded(16, 4, max_evaluations=60).optimality_gap is None


def test_weights_of_zero_are_refused_for_bands() -> None:
    with pytest.raises(ValueError, match="use optimal"):
        banded(16, 4, error=np.eye(16)[0])


def test_what_cannot_be_decomposed_is_refused() -> None:
    with pytest.raises(ValueError, match="ill-conditioned"):
        optimal(np.diag([1e-200, 1.0, 1.0]), error="max")


@pytest.mark.short_cases(4)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("num_bands", [1, 2, 3])
def test_no_other_banded_matrix_is_below_the_bound_on_the_maximum(
    seed: int, num_bands: int
) -> None:
    rng = np.random.default_rng(seed)
    workload = random_workload(rng, 5)

    found = banded(workload, num_bands, error="max")

    error = found.max_error(workload, _ONCE) ** 2
    other = least_by_power_means(workload, num_bands=num_bands)
    assert gap_of(found) <= 1e-3
    assert error / (1 + gap_of(found)) <= other * (1 + 1e-12)
    assert error <= other * (1 + 1e-3)
    assert found.strategy_bands() == num_bands


def test_weights_on_rounds_reach_the_search_of_few_bands() -> None:
    rng = np.random.default_rng(0)
    workload, weights = random_workload(rng, 5), rng.uniform(0.1, 1.0, size=5)

    found = banded(workload, 2, error=weights)

    error = float(weights @ found.per_round_variance(workload, _ONCE))
    other = least_by_power_means(workload, weights, (1,), num_bands=2)
    assert gap_of(found) <= 1e-5
    assert error / (1 + gap_of(found)) <= other * (1 + 1e-9)
    assert error <= other * (1 + 2e-5)


@settings(max_examples=examples(20))
@given(st.integers(2, 48), st.data())
def test_the_maximum_of_any_size_and_bands_is_certified(
    num_rounds: int, data: st.DataObject
) -> None:
    num_bands = data.draw(st.integers(1, num_rounds))

    found = banded(num_rounds, num_bands, error="max")
    mean = banded(num_rounds, num_bands)

    assert gap_of(found) <= 1e-3
    largest = found.max_error(num_rounds, _ONCE)
    assert mean.rmse(num_rounds, _ONCE) * (1 - 1e-5) <= largest
    assert largest <= mean.max_error(num_rounds, _ONCE) * (1 + 1e-3)


@given(st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=9), st.floats(0.0, 2.0), st.data())
def test_the_floor_of_weights_costs_what_there_is(
    drawn: list[float], budget: float, data: st.DataObject
) -> None:
    weights = np.array(drawn)
    costs = np.array([data.draw(st.floats(1e-3, 1.0)) for _ in weights])

    raised = _banded_search._raised_to_floor(weights, costs, budget)

    assert np.all(raised >= weights)
    assert costs @ (raised - weights) == pytest.approx(budget, rel=1e-9, abs=1e-12)
    # All that were raised are equal, and no other one is smaller.
    is_raised = raised > weights * (1 + 1e-12)
    assert np.all(raised[is_raised] == raised.min())


@pytest.mark.parametrize(("num_bands", "num_blocks"), [(2, 1), (2, 4), (7, 1)])
def test_a_block_more_adds_one_and_more(num_bands: int, num_blocks: int) -> None:
    errors = []
    for blocks in (num_blocks, num_blocks + 1):
        workload = Workload("prefix_sum", blocks * num_bands)
        found = banded(workload, num_bands, error="max", relative_gap=1e-5)
        errors.append(np.max(found.squared_decoder_rows(workload)))
    # Nothing is certified of the larger one here.
    assert errors[0] / (1.0 + 1e-5) + 1.0 <= errors[1] <= errors[0] + 1.0 + 1.0 / num_blocks


@pytest.mark.parametrize(("num_rounds", "num_bands"), [(35, 2), (52, 3)])
def test_bounds_from_half_the_blocks_are_below_what_a_closer_search_finds(
    num_rounds: int, num_bands: int
) -> None:
    workload = Workload("prefix_sum", num_rounds)
    found = banded(workload, num_bands, error="max", relative_gap=1e-3)
    closer = banded(workload, num_bands, error="max", relative_gap=2e-4)
    assert found.optimality_gap is not None
    assert found.optimality_gap <= 1e-3
    bound = np.max(found.squared_decoder_rows(workload)) / (1.0 + found.optimality_gap)
    assert bound <= np.max(closer.squared_decoder_rows(workload))


def test_the_maximum_needs_more_memory_than_the_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "_ALWAYS_THERE", 0)
    monkeypatch.setattr(inputs, "_available_bytes", lambda: 8 * 50 * 20 * 4)

    assert banded(20, 4).num_bands == 4
    with pytest.raises(MemoryError, match="the banded factorization"):
        banded(20, 4, error="max")


def squared_sensitivity(strategy: FloatArray, participation: Participation) -> float:
    """The largest squared norm of sums of columns of a pattern, with any signs, by enumeration."""
    separation = participation.separation_in(len(strategy))
    most = participation.most_participations(len(strategy))
    found = 0.0
    for first in range(len(strategy)):
        columns = strategy[:, first : first + most * separation : separation]
        signs = np.array(list(itertools.product((-1.0, 1.0), repeat=columns.shape[1])))
        found = max(found, float(np.max(np.sum((columns @ signs.T) ** 2, axis=0))))
    return found


@pytest.mark.short_cases(4)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("num_rounds", "separation", "most"), [(4, 2, 2), (5, 2, 3), (6, 2, 3)])
def test_no_random_matrix_is_below_the_bound_where_clients_return(
    seed: int, num_rounds: int, separation: int, most: int
) -> None:
    rng = np.random.default_rng(seed)
    workload, schema = random_workload(rng, num_rounds), FixedEpochOrder(most, separation)

    found = optimal(workload, schema, error="max")

    least = found.max_error(workload, schema) ** 2 / (1 + gap_of(found))
    assert gap_of(found) <= 1e-3

    def error_of(strategy: FloatArray) -> float:
        rows = squared_rows(workload, strategy)
        return float(np.max(rows) * squared_sensitivity(strategy, schema))

    # A walk from what was found, and others from the identity, that keep what is better.
    for start in (found.matrix, np.eye(num_rounds)):
        best, size = error_of(start), 0.3
        strategy = start
        for _ in range(400):
            moved = (
                strategy + size * np.tril(rng.normal(size=strategy.shape)) * np.abs(strategy).max()
            )
            if abs(np.linalg.det(moved)) > 1e-9 and error_of(moved) < best:
                strategy, best = moved, error_of(moved)
            else:
                size = max(size * 0.97, 1e-4)
        assert least <= best * (1 + 1e-12)


def test_the_maximum_where_clients_return_is_below_that_of_the_mean() -> None:
    schema = FixedEpochOrder(3, 8)

    found, mean = optimal(24, schema, error="max"), optimal(24, schema)

    assert gap_of(found) <= 1e-3
    assert mean.rmse(24, schema) <= found.max_error(24, schema) < mean.max_error(24, schema) * 0.9


@pytest.mark.short_cases(1)
@pytest.mark.parametrize(
    ("equal_column_norms", "most"), [(False, 6.932), (True, 7.042)], ids=["any", "equal"]
)
def test_six_participations_are_better_than_a_dense_search_with_norms_of_high_order(
    equal_column_norms: bool, most: int
) -> None:
    """Errors and sensitivity anew, the latter by enumeration of patterns and signs."""
    schema = FixedEpochOrder(6, 21)

    found = optimal(126, schema, error="max", equal_column_norms=equal_column_norms)

    assert gap_of(found) <= 1e-3
    squared = np.max(squared_rows(np.tri(126), found.matrix))
    squared *= squared_sensitivity(found.matrix, schema)
    assert np.sqrt(squared) < most
    assert found.max_error(126, schema) == pytest.approx(np.sqrt(squared), rel=1e-9)


def test_a_dual_that_forgets_the_weights_of_rounds_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its bound is above the error of the matrix itself, and certifies nothing."""
    workload = np.tri(6)
    assert optimal(workload, error="max", max_evaluations=1).optimality_gap is not None

    true_total = MultiEpochDual._total
    monkeypatch.setattr(MultiEpochDual, "_total", lambda *arguments: 0.5 * true_total(*arguments))
    assert optimal(workload, error="max", max_evaluations=1).optimality_gap is None
