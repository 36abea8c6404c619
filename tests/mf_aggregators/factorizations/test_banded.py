"""Banded factorizations against printed values, limiting cases and their certificate."""

import numpy as np
import pytest
import scipy.optimize
from hypothesis import given, settings
from hypothesis import strategies as st

from mf_aggregators import workloads
from mf_aggregators.factorizations import (
    banded,
    identity,
    optimal,
)
from mf_aggregators.participation import FixedEpochOrder, MinSeparation, SingleParticipation
from tests.examples import examples
from tests.mf_aggregators import brute_force


def _checked_rmse(num_rounds: int, separation: int) -> float:
    """The error of the best matrix of six participations, once all that it says of itself holds."""
    workload = workloads.prefix_sum(num_rounds)
    participation = MinSeparation(separation, 6)
    factorization = banded(workload, separation, participation=participation)
    computed = factorization.sensitivity(participation)
    assert computed.is_exact
    norms = np.linalg.norm(factorization.strategy_matrix(), axis=0)
    assert computed.value == pytest.approx(np.sqrt(6) * np.max(norms), rel=1e-12)
    np.testing.assert_allclose(norms, 1.0, rtol=1e-12)
    assert factorization.optimality_gap is not None
    assert factorization.optimality_gap <= 1e-5
    return factorization.rmse(workload, participation)


def test_a_ninth_of_the_papers_size_is_as_close_to_the_optimum() -> None:
    """Its 1.05 of the optimum for participations exactly b apart hardly depends on the size."""
    best = optimal(workloads.prefix_sum(228), FixedEpochOrder(6, 38), relative_gap=1e-3)
    of_best = best.rmse(workloads.prefix_sum(228), FixedEpochOrder(6, 38))
    assert _checked_rmse(228, 38) / of_best == pytest.approx(1.05, abs=0.01)


def test_one_band_is_the_identity() -> None:
    factorization = banded(workloads.prefix_sum(7), 1)
    np.testing.assert_allclose(factorization.strategy_matrix(), np.eye(7), atol=1e-12)


@pytest.mark.parametrize("num_rounds", [2, 5, 40])
def test_all_bands_are_the_optimum(num_rounds: int) -> None:
    workload = workloads.momentum_sgd(num_rounds, 0.5)
    ours = banded(workload, num_rounds, relative_gap=1e-8)
    best = optimal(workload, relative_gap=1e-9)
    single = SingleParticipation()
    assert ours.total_error(workload, single) == pytest.approx(
        best.total_error(workload, single), rel=1e-7
    )


@pytest.mark.parametrize("seed", range(2))
def test_another_solver_finds_nothing_better(seed: int) -> None:
    """Direct minimisation over the entries of a banded X with unit diagonal."""
    generator = np.random.default_rng(seed)
    num_rounds, num_bands = 6, 2
    workload = np.tril(generator.normal(size=(num_rounds, num_rounds))) + 3 * np.eye(num_rounds)
    gram = workload.T @ workload

    def error(entries: np.ndarray) -> float:
        x = np.eye(num_rounds) + np.diag(entries, 1) + np.diag(entries, -1)
        if np.linalg.eigvalsh(x)[0] <= 1e-9:
            return 1e9
        return float(np.trace(np.linalg.solve(x, gram)))

    other = scipy.optimize.minimize(
        error,
        np.zeros(num_rounds - 1),
        method="Nelder-Mead",
        options={"maxfev": 20000, "maxiter": 20000, "xatol": 1e-9, "fatol": 1e-9},
    )
    factorization = banded(workload, num_bands, relative_gap=1e-9)
    ours = factorization.total_error(workload, SingleParticipation()) ** 2
    assert ours <= other.fun * (1 + 1e-9)
    assert ours == pytest.approx(other.fun, rel=1e-5)


@given(st.integers(2, 24), st.data())
@settings(max_examples=examples(30), deadline=None)
def test_structure_sensitivity_and_certificate(num_rounds: int, data: st.DataObject) -> None:
    num_bands = data.draw(st.integers(1, num_rounds))
    momentum = data.draw(st.sampled_from([0.0, 0.9]))
    workload = workloads.momentum_sgd(num_rounds, momentum)
    participation = MinSeparation(num_bands)
    factorization = banded(workload, num_bands)
    strategy = factorization.strategy_matrix()
    assert not np.any(np.tril(strategy, -num_bands))
    assert not np.any(np.triu(strategy, 1))
    np.testing.assert_allclose(
        factorization.decoder_matrix(workload) @ strategy, workload, atol=1e-8
    )
    most = participation.most_participations(num_rounds)
    assert factorization.sensitivity(participation) == pytest.approx(np.sqrt(most), rel=1e-9)
    if num_rounds <= 9:
        truth = brute_force.scalar_sensitivity(strategy, participation)
        assert factorization.sensitivity(participation) == pytest.approx(truth, rel=1e-9)
    # Never worse than fewer bands, never better than no band limit.
    error = factorization.total_error(workload, SingleParticipation())
    assert error <= identity(num_rounds).total_error(workload, SingleParticipation()) * (1 + 1e-9)
    gap = factorization.optimality_gap
    assert gap is not None
    bound = error**2 / (1 + gap)
    best = optimal(workload).total_error(workload, SingleParticipation())
    if num_bands == num_rounds:
        assert bound <= best**2 * (1 + 1e-9)


def test_fewer_rounds_between_participations_than_bands_give_a_bound() -> None:
    factorization = banded(workloads.prefix_sum(12), 4)
    computed = factorization.sensitivity(MinSeparation(2))
    truth = brute_force.scalar_sensitivity(factorization.strategy_matrix(), MinSeparation(2))
    assert computed.value >= truth * (1 - 1e-9)
    assert computed.value > factorization.sensitivity(MinSeparation(4)).value


@pytest.mark.parametrize("separation", [3, 4])
def test_fixed_epochs_of_enough_separation_are_exact(separation: int) -> None:
    factorization = banded(workloads.prefix_sum(10), 3)
    participation = FixedEpochOrder(2, separation)
    truth = brute_force.scalar_sensitivity(factorization.strategy_matrix(), participation)
    assert factorization.sensitivity(participation).is_exact
    assert factorization.sensitivity(participation) == pytest.approx(truth, rel=1e-9)


@pytest.mark.parametrize(
    ("epochs", "separation", "num_rounds"), [(3, 4, 12), (2, 3, 8), (2, 3, 14)]
)
def test_free_column_norms_beat_equal_ones_under_their_own_schema(
    epochs: int, separation: int, num_rounds: int
) -> None:
    workload = workloads.prefix_sum(num_rounds)
    schema = FixedEpochOrder(epochs, separation)
    equal = banded(workload, separation, relative_gap=1e-7)
    free = banded(workload, separation, False, MinSeparation(separation, epochs), relative_gap=1e-3)
    schema = FixedEpochOrder(-(-num_rounds // separation), separation)
    assert free.participation == schema
    assert free.optimality_gap is not None
    assert free.optimality_gap <= 1e-3
    assert free.total_error(workload, schema) <= equal.total_error(workload, schema) * (1 + 1e-4)
    # The certificate: no matrix of the class, such as that of equal norms, beats the bound.
    bound = free.total_error(workload, schema) ** 2 / (1 + free.optimality_gap)
    assert bound <= equal.total_error(workload, schema) ** 2
    truth = brute_force.scalar_sensitivity(free.strategy_matrix(), schema)
    assert free.sensitivity(schema).value == pytest.approx(truth, rel=1e-9)
    assert free.sensitivity(schema).value == pytest.approx(1.0, rel=1e-9)
