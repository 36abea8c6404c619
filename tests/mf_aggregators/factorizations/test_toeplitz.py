"""Toeplitz factorizations against printed values, dense linear algebra and other solvers."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mf_aggregators import linear_algebra
from mf_aggregators.factorizations import (
    BandedInverseFactorization,
    IdentityFactorization,
    ToeplitzFactorization,
    toeplitz,
)
from mf_aggregators.factorizations.toeplitz import PatternOfRounds, Problem, _log_errors
from mf_aggregators.participation import (
    MinSeparation,
)
from mf_aggregators.workloads import Workload
from tests.examples import examples
from tests.mf_aggregators.toeplitz_cases import (
    PAPER,
    SINGLE,
    ErrorMeasure,
    error_of,
    least_error_of_another_solver,
    prefix,
    schemas,
)
from tests.refusals import refuses


def test_the_square_root_at_the_papers_size() -> None:
    factorization = toeplitz(2052, coefficients="square_root")
    assert round(factorization.max_error(prefix(2052), SINGLE), 4) == 3.4938
    found = factorization.strategy_coefficients()
    np.testing.assert_array_equal(found, linear_algebra.square_root_coefficients(2052))


def test_optimised_bands_at_the_papers_size() -> None:
    mean = toeplitz(2052, 342, PAPER)
    worst = toeplitz(2052, 342, PAPER, error="max")
    assert mean.rmse(prefix(2052), PAPER) <= 8.805
    assert worst.max_error(prefix(2052), PAPER) <= 10.41
    assert worst.max_error(prefix(2052), PAPER) < mean.max_error(prefix(2052), PAPER)
    assert mean.sensitivity(PAPER).is_exact
    assert worst.sensitivity(PAPER).is_exact
    assert toeplitz(2052, participation=PAPER).num_bands == 342
    root = toeplitz(2052, 342, PAPER, coefficients="square_root")
    assert mean.rmse(prefix(2052), PAPER) < 0.99 * root.rmse(prefix(2052), PAPER)


@pytest.mark.parametrize("num_rounds", [1, 2, 3, 10, 100])
def test_the_square_root_has_the_least_maximal_error_of_all_toeplitz(num_rounds: int) -> None:
    factorization = toeplitz(num_rounds, error="max")
    root = linear_algebra.square_root_coefficients(num_rounds)
    # Both factors are the square root, and the error is the product of their norms.
    assert factorization.max_error(prefix(num_rounds), SINGLE) == pytest.approx(
        float(root @ root), rel=1e-9
    )


def test_one_band_is_independent_noise() -> None:
    factorization = toeplitz(20, 1, MinSeparation(3))
    np.testing.assert_array_equal(factorization.strategy_matrix(), np.eye(20))
    assert error_of(factorization, "mean", MinSeparation(3)) == pytest.approx(
        IdentityFactorization(20).rmse(prefix(20), MinSeparation(3)), rel=1e-14
    )


@given(st.integers(2, 12), st.data())
@settings(max_examples=examples(60))
def test_gradients_are_the_slopes_of_their_values(num_rounds: int, data: st.DataObject) -> None:
    num_bands = data.draw(st.integers(1, num_rounds))
    error: ErrorMeasure = data.draw(st.sampled_from(["mean", "max"]))
    momentum = data.draw(st.sampled_from([0.0, 0.85]))
    participation = data.draw(schemas(num_rounds))
    generator = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    series = generator.normal(size=num_bands) / num_bands
    series[0] = 1.0
    workload = Workload("momentum_sgd", num_rounds, momentum) if momentum else prefix(num_rounds)
    pattern = PatternOfRounds.of(participation, num_rounds)
    problem = Problem.of(workload, None, error, 10)._replace(pattern=pattern)
    (log_error,) = _log_errors(workload, problem)
    direction, step = generator.normal(size=num_bands), 1e-6
    _, gradient = log_error(series)
    above, below = (log_error(series + sign * step * direction)[0] for sign in (1, -1))
    assert gradient @ direction == pytest.approx((above - below) / (2 * step), rel=1e-5, abs=1e-5)


@given(st.integers(1, 10), st.data())
@settings(max_examples=examples(60))
def test_the_objective_is_the_error_that_is_stated(num_rounds: int, data: st.DataObject) -> None:
    num_bands = data.draw(st.integers(1, num_rounds))
    participation = data.draw(schemas(num_rounds))
    generator = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    series = np.sort(generator.uniform(0.1, 1.0, num_bands))[::-1]
    pattern = PatternOfRounds.of(participation, num_rounds)
    squared, _ = pattern.squared_sensitivity(series)
    longer, _ = pattern.squared_sensitivity(linear_algebra.padded(series, num_rounds))
    assert squared == pytest.approx(longer, rel=1e-12)
    factorization = ToeplitzFactorization(num_rounds, series)
    errors: list[ErrorMeasure] = ["mean", "max"]
    for error in errors:
        problem = Problem.of(num_rounds, None, error, 10)._replace(pattern=pattern)
        value, _ = _log_errors(prefix(num_rounds), problem)[0](series)
        stated = error_of(factorization, error, participation)
        assert value == pytest.approx(2.0 * np.log(stated), rel=1e-9, abs=1e-9)


def test_equal_column_norms_change_the_last_columns_alone() -> None:
    participation = MinSeparation(8, 4)
    plain = toeplitz(32, 8, participation)
    equal = toeplitz(32, 8, participation, equal_column_norms=True)
    norms = np.linalg.norm(equal.strategy_matrix(), axis=0)
    np.testing.assert_allclose(norms, 1.0, rtol=1e-14)
    scale = np.linalg.norm(plain.strategy_matrix()[:, 0])
    np.testing.assert_allclose(
        equal.strategy_matrix()[:, :25] * scale, plain.strategy_matrix()[:, :25], atol=1e-14
    )
    computed = equal.sensitivity(participation)
    assert (computed.value, computed.is_exact) == (2.0, True)


@given(st.data())
@settings(max_examples=15)
def test_another_solver_finds_nothing_better_where_columns_overlap(data: st.DataObject) -> None:
    num_rounds = data.draw(st.integers(4, 16))
    separation = data.draw(st.integers(1, num_rounds // 2))
    num_bands = data.draw(st.integers(separation + 1, num_rounds))
    error: ErrorMeasure = data.draw(st.sampled_from(["mean", "max"]))
    schema = MinSeparation(separation)

    def column(free: np.ndarray) -> np.ndarray:
        return np.concatenate([[1.0], free, np.zeros(num_rounds - num_bands)])

    generator = np.random.default_rng(0)
    root = linear_algebra.square_root_coefficients(num_bands)[1:]
    starts = [root] + [root * generator.uniform(0.2, 1.0, len(root)) for _ in range(3)]
    best = least_error_of_another_solver(num_rounds, separation, error, column, starts)
    ours = toeplitz(num_rounds, num_bands, schema, error=error)
    assert ours.sensitivity(schema).is_exact
    assert error_of(ours, error, schema) <= best * (1 + 1e-5)


@pytest.mark.parametrize("coefficients", [[1.0, 10.0], [1.0, -10.0, 3.0]], ids=str)
def test_noise_that_would_overflow_is_refused(coefficients: list[float]) -> None:
    """Row i of C^-1 grows tenfold each round: after 2000 rounds there is no such float."""
    with refuses("large"):
        ToeplitzFactorization(2000, np.array(coefficients))
    with refuses("large"):
        BandedInverseFactorization(2000, np.array(coefficients))


@pytest.mark.parametrize(
    "coefficients",
    [
        np.array([]),
        np.ones((2, 2)),
        np.ones(6),
        np.array([1.0, np.nan]),
        np.array([np.inf, 1.0]),
        np.array([0.0, 1.0]),
    ],
    ids=["none", "matrix", "too many", "NaN", "infinite", "singular"],
)
def test_what_are_no_coefficients_is_refused(coefficients: np.ndarray) -> None:
    for class_of in (ToeplitzFactorization, BandedInverseFactorization):
        with pytest.raises(ValueError, match="coefficient"):
            class_of(5, coefficients)
