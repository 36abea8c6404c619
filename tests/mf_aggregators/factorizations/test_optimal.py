"""The optimum against printed values, closed forms, other solvers and its own certificate."""

import warnings

import numpy as np
import pytest
import scipy.optimize
from hypothesis import given, settings
from hypothesis import strategies as st

from mf_aggregators import workloads
from mf_aggregators.factorizations import NotConvergedWarning, identity, optimal
from mf_aggregators.participation import MinSeparation, SingleParticipation
from tests.examples import examples
from tests.refusals import refuses

_SINGLE = SingleParticipation()


@pytest.mark.parametrize(
    ("num_rounds", "printed"),
    [
        (256, 40.4),
        (512, 62.0),
        pytest.param(1024, 94.6, marks=pytest.mark.long),
        pytest.param(2048, 143.6, marks=pytest.mark.long),
    ],
)
def test_prefix_sums_reach_the_printed_errors(num_rounds: int, printed: float) -> None:
    """Denisov et al. Table 2; the prefix-sum paper's Table 1."""
    workload = workloads.prefix_sum(num_rounds)
    factorization = optimal(workload)
    assert round(factorization.total_error(workload, _SINGLE), 1) == printed
    assert factorization.optimality_gap is not None
    assert factorization.optimality_gap <= 1e-6
    assert factorization.sensitivity(_SINGLE) == pytest.approx(1.0, rel=1e-12)


def test_two_rounds_have_a_closed_form() -> None:
    # X = [[1, c], [c, 1]] gives tr(A^T A X^-1) = (3 - 2 c) / (1 - c^2), least at
    # c = (3 - sqrt(5)) / 2, where it is the square of the golden ratio.
    workload = workloads.prefix_sum(2)
    factorization = optimal(workload, relative_gap=1e-12)
    golden = (1 + np.sqrt(5)) / 2
    assert factorization.total_error(workload, _SINGLE) == pytest.approx(golden, rel=1e-10)


@pytest.mark.short_cases(1)
@pytest.mark.parametrize("seed", range(3))
def test_another_solver_finds_nothing_better(seed: int) -> None:
    """Direct minimisation over the entries of X, for a workload without structure."""
    generator = np.random.default_rng(seed)
    num_rounds = 5
    workload = np.tril(generator.normal(size=(num_rounds, num_rounds))) + 3 * np.eye(num_rounds)
    gram = workload.T @ workload
    rows, columns = np.tril_indices(num_rounds, -1)

    def error(entries: np.ndarray) -> float:
        x = np.eye(num_rounds)
        x[rows, columns] = x[columns, rows] = entries
        if np.linalg.eigvalsh(x)[0] <= 1e-9:
            return 1e9
        return float(np.trace(np.linalg.solve(x, gram)))

    other = scipy.optimize.minimize(
        error,
        np.zeros(len(rows)),
        method="Nelder-Mead",
        options={"maxfev": 20000, "maxiter": 20000, "xatol": 1e-9, "fatol": 1e-9},
    )
    factorization = optimal(workload, relative_gap=1e-9)
    ours = factorization.total_error(workload, _SINGLE) ** 2
    assert ours <= other.fun * (1 + 1e-9)
    assert ours == pytest.approx(other.fun, rel=1e-5)


@given(st.integers(1, 12), st.floats(0.0, 0.97), st.integers(0, 2**32 - 1))
@settings(max_examples=examples(40), deadline=None)
def test_the_certificate_holds_for_momentum_and_learning_rates(
    num_rounds: int, momentum: float, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    workload = workloads.momentum_sgd(num_rounds, momentum, generator.uniform(0.2, 1, num_rounds))
    with warnings.catch_warnings():
        warnings.simplefilter("error", NotConvergedWarning)
        factorization = optimal(workload)
    decoder = factorization.decoder_matrix(workload)
    np.testing.assert_allclose(decoder @ factorization.strategy_matrix(), workload, atol=1e-9)
    # Nothing feasible is better than the certified bound: not the identity, not a
    # perturbation of the optimum with columns of norm one.
    error = factorization.total_error(workload, _SINGLE) ** 2
    bound = error / (1 + (factorization.optimality_gap or 0.0)) * (1 - 1e-9)
    assert identity(num_rounds).total_error(workload, _SINGLE) ** 2 >= bound
    for size in (1e-3, 1e-1):
        strategy = factorization.strategy_matrix()
        strategy = strategy + size * np.tril(generator.normal(size=strategy.shape))
        strategy /= np.linalg.norm(strategy, axis=0)
        if np.min(np.abs(np.diagonal(strategy))) > 1e-6:
            perturbed = np.linalg.norm(np.linalg.solve(strategy.T, workload.T)) ** 2
            assert perturbed >= bound


def test_a_solver_that_is_stopped_says_so_and_states_its_gap() -> None:
    workload = workloads.prefix_sum(64)
    with pytest.warns(NotConvergedWarning):
        factorization = optimal(workload, max_evaluations=1)
    assert factorization.optimality_gap is not None
    assert factorization.optimality_gap > 1e-6
    best = optimal(workload).total_error(workload, _SINGLE)
    stated = factorization.total_error(workload, _SINGLE) ** 2 / (1 + factorization.optimality_gap)
    assert stated <= best**2 * (1 + 1e-6)


def test_clients_that_return_are_refused() -> None:
    with refuses("participation"):
        optimal(workloads.prefix_sum(8), MinSeparation(2))
    # A schema under which nobody can return is single participation.
    optimal(workloads.prefix_sum(8), MinSeparation(8))
