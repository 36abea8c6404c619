"""Structured approximations against printed values, the dense product and enumeration."""

import sys
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mf_aggregators import workloads
from mf_aggregators.factorizations import (
    DenseFactorization,
    banded,
    optimal,
)
from mf_aggregators.factorizations.structured import (
    _PENALTY,
    StructuredFactorization,
    _ridge_rows,
    _total_error,
    structured,
)
from mf_aggregators.participation import MinSeparation, SingleParticipation
from mf_aggregators.workloads import Workload
from tests.examples import examples

_SINGLE = SingleParticipation()


@st.composite
def _structured(draw: st.DrawFn, most_rounds: int = 20) -> StructuredFactorization:
    """Any matrix of the structure, not only those that least squares returns."""
    num_rounds = draw(st.integers(1, most_rounds))
    num_diagonals = draw(st.integers(1, num_rounds))
    rank = draw(st.integers(0, num_rounds))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    diagonals = generator.normal(size=(num_rounds, num_diagonals)) / num_rounds
    diagonals[~np.tri(num_rounds, num_diagonals, dtype=bool)] = 0.0
    diagonals[:, 0] = generator.uniform(0.5, 2.0, num_rounds)
    left, right = generator.normal(size=(2, num_rounds, rank)) / num_rounds
    return StructuredFactorization(diagonals, left, right)


@pytest.mark.short_cases(1)
@pytest.mark.parametrize(
    ("num_rounds", "num_diagonals", "rank", "printed"),
    [(256, 4, 4, 40.4), (512, 5, 4, 62.2), (1024, 5, 5, 95.5)],
)
def test_the_printed_errors(num_rounds: int, num_diagonals: int, rank: int, printed: float) -> None:
    """Denisov et al. Table 2, column Efficient, with the paired C and no warning."""
    base = optimal(workloads.prefix_sum(num_rounds))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        factorization = structured(base, num_diagonals, rank)
    workload = Workload("prefix_sum", num_rounds)
    error = factorization.total_error(workload, _SINGLE)
    assert round(error, 1) <= printed
    assert error >= base.total_error(workloads.prefix_sum(num_rounds), _SINGLE) * (1 - 1e-6)
    recursion = factorization.noise_recursion()
    assert recursion.num_state_vectors == rank
    assert recursion.rows_of_z_per_round == num_diagonals + 1


@given(_structured())
@settings(max_examples=60, deadline=None)
def test_the_error_that_is_watched_is_the_total_error(
    factorization: StructuredFactorization,
) -> None:
    workload = Workload("prefix_sum", factorization.num_rounds)
    watched = _total_error(**factorization.arrays())
    assert watched == pytest.approx(factorization.total_error(workload, _SINGLE), rel=1e-9)


@given(st.integers(1, 24), st.data())
@settings(max_examples=examples(40), deadline=None)
def test_approximations_are_never_better_than_the_optimum(
    num_rounds: int, data: st.DataObject
) -> None:
    num_diagonals = data.draw(st.integers(1, num_rounds))
    rank = data.draw(st.integers(0, num_rounds))
    base = optimal(workloads.prefix_sum(num_rounds))
    factorization = structured(base, num_diagonals, rank)
    assert factorization.num_diagonals == num_diagonals
    assert factorization.rank == rank
    workload = workloads.prefix_sum(num_rounds)
    kept = np.tril(base.decoder_matrix(workload))
    kept -= np.tril(kept, -num_diagonals)
    found = factorization.decoder_matrix(workload)
    np.testing.assert_allclose(found - np.tril(found, -num_diagonals), kept, rtol=1e-9, atol=1e-12)
    best = base.total_error(workload, _SINGLE)
    assert factorization.total_error(workload, _SINGLE) >= best * (1 - 1e-6)


@pytest.mark.parametrize(("num_diagonals", "rank"), [(1, 30), (12, 30), (1, 29), (18, 12), (30, 0)])
def test_all_ranks_or_all_diagonals_are_the_factorization_itself(
    num_diagonals: int, rank: int
) -> None:
    base = optimal(workloads.prefix_sum(30))
    factorization = structured(base, num_diagonals, rank)
    np.testing.assert_allclose(
        factorization.strategy_matrix(), base.strategy_matrix(), rtol=1e-9, atol=1e-10
    )


def test_a_scaling_of_the_factorization_changes_no_error() -> None:
    base = optimal(workloads.prefix_sum(40))
    larger = DenseFactorization(1000.0 * base.strategy_matrix())
    workload = Workload("prefix_sum", 40)
    error = structured(base, 3, 2).total_error(workload, _SINGLE)
    assert structured(larger, 3, 2).total_error(workload, _SINGLE) == pytest.approx(error, rel=1e-6)


def test_least_squares_solves_its_problem() -> None:
    """One half step against a ridge regression for each row, across the blocks of a stack."""
    generator = np.random.default_rng(3)
    lag, rank, num_rounds = 3, 2, 11
    matrix = np.tril(generator.normal(size=(num_rounds, num_rounds)), -lag)
    factors = generator.normal(size=(num_rounds, rank))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[_ridge_rows.__module__], "_STACK", 4 * rank**2)
        solved = _ridge_rows(matrix @ factors, factors, lag)
    expected = np.zeros((num_rounds, rank))
    for i in range(lag, num_rounds):
        known = factors[: i - lag + 1]
        gram = known.T @ known + _PENALTY * np.eye(rank)
        expected[i] = np.linalg.solve(gram, known.T @ matrix[i, : i - lag + 1])
    np.testing.assert_allclose(solved, expected, rtol=1e-9, atol=1e-12)


def test_the_schema_and_the_parameters_are_those_of_the_run() -> None:
    participation = MinSeparation(4, 3)
    base = banded(workloads.prefix_sum(16), 4, participation=participation)
    factorization = structured(base, 3, 2)
    assert factorization.mechanism == "structured"
    assert factorization.participation == participation
    assert factorization.optimality_gap is None
    assert factorization.parameters == {
        "num_diagonals": 3,
        "rank": 2,
        "base_mechanism": "banded",
    }


@pytest.mark.parametrize(
    ("diagonals", "left", "right"),
    [
        (np.ones(3), np.zeros((3, 1)), np.zeros((3, 1))),
        (np.ones((3, 2)), np.zeros((3, 1)), np.zeros((3, 1))),
        (np.zeros((3, 1)), np.zeros((3, 1)), np.zeros((3, 1))),
        (np.full((3, 1), np.nan), np.zeros((3, 1)), np.zeros((3, 1))),
        (np.ones((3, 1)), np.full((3, 1), np.inf), np.zeros((3, 1))),
        (np.ones((3, 1)), np.zeros((2, 1)), np.zeros((2, 1))),
        (np.ones((3, 1)), np.zeros((3, 4)), np.zeros((3, 4))),
        (np.ones((3, 1)), np.zeros((3, 1)), np.zeros((3, 2))),
    ],
)
def test_arrays_without_the_structure_are_refused(
    diagonals: np.ndarray, left: np.ndarray, right: np.ndarray
) -> None:
    with pytest.raises(ValueError, match=r"diagonals|decoder|left|right"):
        StructuredFactorization(diagonals, left, right)
