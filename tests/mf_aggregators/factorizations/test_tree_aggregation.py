"""Tree aggregation against the papers' values, dense linear algebra and enumeration."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mf_aggregators import sensitivity as sensitivities
from mf_aggregators.factorizations.tree_aggregation import tree_aggregation
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
from tests.mf_aggregators.kernel.test_trees import tree_matrix

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
    """Denisov et al. Table 2, column Honaker: noise is scaled to the nodes."""
    factorization = tree_aggregation(num_rounds)
    squared = np.sum(factorization.squared_decoder_rows(num_rounds))
    assert round(float(np.sqrt(num_rounds.bit_length() * squared)), 1) == printed


def test_online_noise_needs_seven_percent_less_than_the_nodes() -> None:
    for num_rounds, least, most in ((7, 0.951, 0.952), (96, 0.932, 0.933), (1024, 0.927, 0.928)):
        found = tree_aggregation(num_rounds).sensitivity(SingleParticipation())
        assert found.is_exact
        assert least < found / np.sqrt(num_rounds.bit_length()) < most


@given(st.integers(1, 40), _DECODERS)
@settings(max_examples=examples(40), deadline=None)
def test_the_strategy_matrix_is_the_inverse_of_the_noise(num_rounds: int, decoder: str) -> None:
    factorization = tree_aggregation(num_rounds, decoder)
    strategy = factorization.strategy_matrix()
    assert not np.any(np.triu(strategy, 1))
    streamed = factorization.noise_rows(np.eye(num_rounds))
    np.testing.assert_allclose(strategy @ streamed, np.eye(num_rounds), atol=1e-12)
    nodes = tree_matrix(num_rounds, num_rounds)
    excess = nodes.T @ nodes - strategy.T @ strategy
    assert np.min(np.linalg.eigvalsh(excess)) >= -1e-12
    if decoder == "full":
        np.testing.assert_allclose(excess, 0.0, atol=1e-11)


@given(st.integers(1, 24), _DECODERS)
@settings(max_examples=examples(40), deadline=None)
def test_each_prefix_is_the_best_estimate_from_its_nodes(num_rounds: int, decoder: str) -> None:
    """Of the nodes completed so far, or of all of them: variances and covariances."""
    nodes = tree_matrix(num_rounds, num_rounds)
    best = np.zeros((num_rounds, len(nodes)))
    for i in range(num_rounds):
        known = (decoder == "full") | ~np.any(nodes[:, i + 1 :], axis=1)
        target = (np.arange(num_rounds) <= i).astype(np.float64)
        best[i, known] = target @ np.linalg.pinv(nodes[known])
    decoder_matrix = tree_aggregation(num_rounds, decoder).decoder_matrix(num_rounds)
    np.testing.assert_allclose(decoder_matrix @ decoder_matrix.T, best @ best.T, atol=1e-11)


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
    strategy = tree_matrix(num_rounds, rounds)
    found = of_tree(num_rounds, rounds, participation.as_schema())
    assert found.is_exact
    assert found == pytest.approx(np.sqrt(_largest_sum(strategy, participation)), rel=1e-12)
    assert found <= sensitivities.compute(strategy, participation) * (1 + 1e-9)
    if rounds <= 6:
        truth = brute_force.scalar_sensitivity(strategy, participation)
        assert found == pytest.approx(truth, rel=1e-12)
    if rounds < num_rounds:
        return
    decoder = data.draw(_DECODERS)
    factorization = tree_aggregation(num_rounds, decoder)
    own = factorization.sensitivity(participation)
    assert own <= found
    assert own == found or decoder == "online"
    if rounds <= 10:
        truth = brute_force.scalar_sensitivity(factorization.strategy_matrix(), participation)
        assert own >= truth * (1.0 - 1e-12)
        assert own == pytest.approx(truth, rel=1e-12) or not own.is_exact


def test_a_long_stream_is_small_and_quickly_described() -> None:
    num_rounds = 50_000
    for decoder, most in (("online", 17), ("full", 16)):
        factorization = tree_aggregation(num_rounds, decoder)
        recursion = factorization.noise_recursion()
        assert recursion.rows_of_z_per_round == 1
        assert recursion.num_state_vectors <= most
        stored = sum(
            getattr(recursion, field.name).nbytes for field in dataclasses.fields(recursion)
        )
        assert stored < 50e6
        assert factorization.sensitivity(MinSeparation(1000, 6)).is_exact == (decoder == "full")
        variances = factorization.squared_decoder_rows(Workload("prefix_sum", num_rounds))
        assert np.all(variances > 0)
