"""Tree aggregation against the papers' values, dense linear algebra and enumeration."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mf_aggregators import sensitivity as sensitivities
from mf_aggregators import workloads
from mf_aggregators.factorizations.tree_aggregation import (
    tree_aggregation,
)
from mf_aggregators.kernel.sensitivity import of_tree
from mf_aggregators.participation import (
    FixedEpochOrder,
    MinSeparation,
    Participation,
    SingleParticipation,
)
from mf_aggregators.workloads import Workload
from tests.examples import examples
from tests.mf_aggregators import brute_force

_DECODERS = st.sampled_from(["online", "full"])


def _largest_sum(strategy: np.ndarray, participation: Participation) -> int:
    """The squared sensitivity of a matrix of zeros and ones, by enumeration."""
    largest = 0
    for pattern in brute_force.patterns(participation, strategy.shape[1]):
        rows: np.ndarray = strategy[:, pattern].sum(axis=1)
        largest = max(largest, int(rows @ rows))
    return largest


@pytest.mark.parametrize(
    ("num_rounds", "printed"),
    [(256, 74.4), (512, 116.5), (1024, 180.8), (2048, 278.3), (4096, 425.6)],
)
def test_the_printed_errors_of_the_online_estimator(num_rounds: int, printed: float) -> None:
    """Denisov et al. Table 2, column Honaker."""
    workload = Workload("prefix_sum", num_rounds)
    error = tree_aggregation(num_rounds).total_error(workload, SingleParticipation())
    assert round(error, 1) == printed


def test_the_papers_matrix_for_four_rounds() -> None:
    """Denisov et al. Eq. 12."""
    expected = [
        [1, 0, 0, 0],
        [0, 1, 0, 0],
        [1, 1, 0, 0],
        [0, 0, 1, 0],
        [0, 0, 0, 1],
        [0, 0, 1, 1],
        [1, 1, 1, 1],
    ]
    np.testing.assert_array_equal(tree_aggregation(4).strategy_matrix(), expected)


@given(st.integers(1, 70))
def test_the_rows_are_the_complete_trees_of_the_binary_expansion(num_rounds: int) -> None:
    strategy = tree_aggregation(num_rounds).strategy_matrix()
    assert strategy.shape == (2 * num_rounds - 1, num_rounds)
    expected, start = set(), 0
    for exponent in reversed(range(7)):
        if num_rounds >> exponent & 1:
            for height in range(exponent + 1):
                for first in range(start, start + 2**exponent, 2**height):
                    expected.add((first, first + 2**height))
            start += 2**exponent
    found = set()
    for row in strategy[np.any(strategy, axis=1)]:
        (covered,) = np.nonzero(row)
        assert np.all(row[covered[0] : covered[-1] + 1] == 1.0)
        found.add((int(covered[0]), int(covered[-1]) + 1))
    assert found == expected
    assert np.count_nonzero(np.any(strategy, axis=1)) == len(expected)


@given(st.integers(1, 40))
@settings(max_examples=30, deadline=None)
def test_the_full_estimator_is_the_pseudo_inverse(num_rounds: int) -> None:
    factorization = tree_aggregation(num_rounds, "full")
    expected = np.linalg.pinv(factorization.strategy_matrix())
    np.testing.assert_allclose(factorization.noising_matrix(), expected, atol=1e-11)


@given(st.integers(1, 24))
@settings(max_examples=24, deadline=None)
def test_the_online_estimator_is_the_best_from_completed_nodes(num_rounds: int) -> None:
    factorization = tree_aggregation(num_rounds, "online")
    strategy = factorization.strategy_matrix()
    decoder = factorization.decoder_matrix(workloads.prefix_sum(num_rounds))
    for i in range(num_rounds):
        completed = ~np.any(strategy[:, i + 1 :], axis=1)
        target = (np.arange(num_rounds) <= i).astype(np.float64)
        best = np.zeros(len(strategy))
        best[completed] = target @ np.linalg.pinv(strategy[completed])
        np.testing.assert_allclose(decoder[i], best, atol=1e-11)


@given(st.integers(1, 12), st.data())
@settings(max_examples=examples(150), deadline=None)
def test_the_sensitivity_is_that_of_the_worst_pattern(num_rounds: int, data: st.DataObject) -> None:
    rounds = data.draw(st.integers(1, num_rounds))
    separation = data.draw(st.integers(1, num_rounds + 1))
    most = data.draw(st.integers(1, 5))
    schemas: list[Participation] = [
        SingleParticipation(),
        FixedEpochOrder(most, separation),
        MinSeparation(separation, most),
        MinSeparation(separation),
    ]
    participation = data.draw(st.sampled_from(schemas))
    factorization = tree_aggregation(num_rounds, data.draw(_DECODERS))
    strategy = factorization.strategy_matrix()[:, :rounds]
    found = of_tree(num_rounds, rounds, participation.as_schema())
    assert found.is_exact
    assert found == pytest.approx(np.sqrt(_largest_sum(strategy, participation)), rel=1e-12)
    assert found <= sensitivities.compute(strategy, participation) * (1 + 1e-9)
    if rounds <= 6:
        truth = brute_force.scalar_sensitivity(strategy, participation)
        assert found == pytest.approx(truth, rel=1e-12)
    if rounds == num_rounds:
        assert factorization.sensitivity(participation) == found


def test_a_long_stream_is_small_and_quickly_described() -> None:
    num_rounds = 50_000
    for decoder, most in (("online", 17), ("full", 16)):
        factorization = tree_aggregation(num_rounds, decoder)
        recursion = factorization.noise_recursion()
        assert recursion.rows_of_z_per_round == 1
        assert recursion.floats_per_parameter <= most
        stored = sum(
            getattr(recursion, field.name).nbytes for field in dataclasses.fields(recursion)
        )
        assert stored < 50e6
        assert factorization.sensitivity(MinSeparation(1000, 6)).is_exact
        variances = factorization.squared_decoder_rows(Workload("prefix_sum", num_rounds))
        assert np.all(variances > 0)
