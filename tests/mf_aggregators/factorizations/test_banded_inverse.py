"""Banded-inverse factorizations against printed values, dense algebra and other solvers."""

import numpy as np
import pytest
import scipy.linalg
import scipy.optimize
from hypothesis import given, settings
from hypothesis import strategies as st

from mf_aggregators.factorizations import (
    BandedInverseFactorization,
    IdentityFactorization,
    banded_inverse,
    toeplitz,
)
from mf_aggregators.factorizations._toeplitz_search import ErrorMeasure
from mf_aggregators.linear_algebra import power_series
from mf_aggregators.participation import (
    FixedEpochOrder,
    MinSeparation,
    Participation,
)
from tests.mf_aggregators import brute_force
from tests.mf_aggregators.toeplitz_cases import PAPER, SINGLE, error_of, prefix


def test_the_square_root_at_the_papers_size() -> None:
    workload = prefix(2052)
    root = banded_inverse(2052, 64, PAPER, coefficients="square_root")
    assert root.rmse(workload, PAPER) <= 10.60
    assert root.sensitivity(PAPER).is_exact
    np.testing.assert_array_equal(
        root.noising_coefficients()[:64], power_series.inverse_square_root_coefficients(64)
    )
    assert not np.any(root.noising_coefficients()[64:])


def test_better_coefficients_at_the_papers_size() -> None:
    workload = prefix(2052)
    root = banded_inverse(2052, 64, PAPER, coefficients="square_root")
    mean = banded_inverse(2052, 64, PAPER)
    worst = banded_inverse(2052, 64, PAPER, error="max")
    assert mean.rmse(workload, PAPER) <= 0.87 * root.rmse(workload, PAPER)
    assert worst.max_error(workload, PAPER) <= 0.79 * root.max_error(workload, PAPER)
    assert worst.max_error(workload, PAPER) < mean.max_error(workload, PAPER)
    assert mean.rmse(workload, PAPER) < worst.rmse(workload, PAPER)
    assert mean.sensitivity(PAPER).is_exact
    assert worst.sensitivity(PAPER).is_exact


def test_all_bands_of_the_square_root_are_the_square_root() -> None:
    ours = banded_inverse(300, 300, coefficients="square_root")
    other = toeplitz(300, coefficients="square_root")
    expected = other.strategy_coefficients()
    assert expected is not None
    np.testing.assert_allclose(ours.strategy_coefficients(), expected, rtol=1e-10)
    assert ours.max_error(prefix(300), SINGLE) == pytest.approx(
        other.max_error(prefix(300), SINGLE), rel=1e-12
    )


@pytest.mark.parametrize("num_rounds", [2, 3, 10, 100])
def test_all_bands_reach_the_least_maximal_error_of_all_toeplitz(num_rounds: int) -> None:
    factorization = banded_inverse(num_rounds, num_rounds, error="max")
    root = power_series.square_root_coefficients(num_rounds)
    assert factorization.max_error(prefix(num_rounds), SINGLE) == pytest.approx(
        float(root @ root), rel=1e-6
    )


@pytest.mark.parametrize("participation", [SINGLE, MinSeparation(3)], ids=str)
def test_one_band_is_independent_noise(participation: Participation) -> None:
    factorization = banded_inverse(20, 1, participation)
    np.testing.assert_array_equal(factorization.strategy_matrix(), np.eye(20))
    assert error_of(factorization, "max", participation) == pytest.approx(
        IdentityFactorization(20).max_error(prefix(20), participation), rel=1e-14
    )


def test_two_bands_in_closed_form() -> None:
    """C^-1 has 1 and -r on its diagonals, so that c_t = r^t and b = 1, 1 - r, 1 - r, ..."""
    num_rounds, ratio = 30, 0.7
    factorization = BandedInverseFactorization(num_rounds, np.array([1.0, -ratio]))
    np.testing.assert_allclose(
        factorization.strategy_coefficients(), ratio ** np.arange(num_rounds), rtol=1e-12
    )
    squared = (1 - ratio ** (2 * num_rounds)) / (1 - ratio**2)
    assert factorization.sensitivity(SINGLE).value ** 2 == pytest.approx(squared, rel=1e-13)
    np.testing.assert_allclose(
        factorization.squared_decoder_rows(prefix(num_rounds)),
        1 + np.arange(num_rounds) * (1 - ratio) ** 2,
        rtol=1e-12,
    )


@given(st.integers(2, 8), st.data())
@settings(max_examples=40, deadline=None)
def test_what_the_optimiser_returns_is_non_negative_and_never_understated(
    num_rounds: int, data: st.DataObject
) -> None:
    num_bands = data.draw(st.integers(1, num_rounds))
    separation = data.draw(st.integers(1, num_rounds - 1))
    error: ErrorMeasure = data.draw(st.sampled_from(["mean", "max"]))
    participation = MinSeparation(separation)
    factorization = banded_inverse(num_rounds, num_bands, participation, error=error)
    assert np.all(factorization.strategy_coefficients() >= -1e-14)
    # Also under schemas of returning clients that it was not made for.
    schemas: list[Participation] = [participation, MinSeparation(1), FixedEpochOrder(2, 1), SINGLE]
    for schema in schemas:
        computed = factorization.sensitivity(schema)
        truth = brute_force.scalar_sensitivity(factorization.strategy_matrix(), schema)
        assert computed.value >= truth * (1 - 1e-12)
        if computed.is_exact:
            assert computed.value == pytest.approx(truth, rel=1e-10)


@pytest.mark.parametrize("participation", [PAPER, MinSeparation(20), MinSeparation(1)], ids=str)
@pytest.mark.parametrize("num_bands", [2, 16, 200])
def test_sensitivities_at_thousands_of_rounds(num_bands: int, participation: MinSeparation) -> None:
    root = banded_inverse(2052, num_bands, participation, coefficients="square_root")
    assert root.sensitivity(participation).is_exact
    for factorization in [root, banded_inverse(2052, num_bands, participation)]:
        computed = factorization.sensitivity(participation)
        most = participation.most_participations(2052)
        columns = np.zeros(2052)
        for start in range(0, most * participation.separation, participation.separation):
            columns[start:] += factorization.strategy_coefficients()[: 2052 - start]
        change = float(np.linalg.norm(columns))
        assert computed.value >= change * (1 - 1e-12)
        if computed.is_exact:
            assert computed.value == pytest.approx(change, rel=1e-10)


def test_coefficients_that_rise_are_bounded_and_not_exact() -> None:
    """C^-1 = 1 + x/2 gives C the signs + - + -."""
    factorization = BandedInverseFactorization(8, np.array([1.0, 0.5]))
    computed = factorization.sensitivity(MinSeparation(3))
    truth = brute_force.scalar_sensitivity(factorization.strategy_matrix(), MinSeparation(3))
    assert computed.value >= truth * (1 - 1e-12)
    assert not computed.is_exact


@pytest.mark.parametrize("error", ["mean", "max"])
@pytest.mark.parametrize(
    ("num_rounds", "participation"),
    [
        (2, SINGLE),
        (15, SINGLE),
        (400, SINGLE),
        (15, MinSeparation(1)),
        (15, MinSeparation(4)),
        (400, MinSeparation(100, 3)),
        (60, FixedEpochOrder(3, 10)),
    ],
    ids=str,
)
def test_the_best_two_bands_by_a_search_over_their_one_number(
    num_rounds: int, participation: Participation, error: ErrorMeasure
) -> None:
    def function(ratio: float) -> float:
        candidate = BandedInverseFactorization(num_rounds, np.array([1.0, -ratio]))
        return error_of(candidate, error, participation)

    ratios = np.concatenate([np.linspace(0.0, 0.99, 100), 1.0 - np.geomspace(1e-6, 1e-2, 50)])
    best = float(ratios[np.argmin([function(ratio) for ratio in ratios])])
    refined = scipy.optimize.minimize_scalar(
        function, bounds=(max(0.0, best - 0.02), min(1.0, best + 0.02)), method="bounded"
    )
    ours = error_of(banded_inverse(num_rounds, 2, participation, error=error), error, participation)
    assert ours <= min(float(refined.fun), function(best)) * (1 + 1e-6)


@pytest.mark.parametrize("error", ["mean", "max"])
@pytest.mark.parametrize("num_bands", [3, 4])
def test_another_solver_finds_nothing_better_where_nobody_returns(
    num_bands: int, error: ErrorMeasure
) -> None:
    """Over all coefficients, also those that the parametrisation leaves out."""

    def function(free: np.ndarray) -> float:
        series = np.concatenate([[1.0], free])
        return error_of(BandedInverseFactorization(16, series), error, SINGLE)

    start = power_series.inverse_square_root_coefficients(num_bands)[1:]
    other = scipy.optimize.minimize(function, start, method="BFGS")
    ours = error_of(banded_inverse(16, num_bands, error=error), error, SINGLE)
    assert ours <= float(other.fun) * (1 + 1e-5)


@pytest.mark.parametrize("error", ["mean", "max"])
@pytest.mark.parametrize(
    "participation", [SINGLE, MinSeparation(10), MinSeparation(16, 3)], ids=str
)
def test_more_bands_are_never_worse(participation: Participation, error: ErrorMeasure) -> None:
    errors = [
        error_of(banded_inverse(64, bands, participation, error=error), error, participation)
        for bands in (1, 2, 4, 8, 16, 32, 64)
    ]
    assert np.all(np.diff(errors) <= 1e-4 * errors[-1])
    assert errors[3] < 0.7 * errors[0]


@pytest.mark.parametrize("error", ["mean", "max"])
@pytest.mark.parametrize(
    "participation",
    [SINGLE, MinSeparation(1), MinSeparation(12), FixedEpochOrder(2, 20)],
    ids=str,
)
def test_optimised_coefficients_are_never_worse_than_the_square_root(
    participation: Participation, error: ErrorMeasure
) -> None:
    for bands in (2, 5, 40):
        root = banded_inverse(40, bands, participation, coefficients="square_root", error=error)
        ours = banded_inverse(40, bands, participation, error=error)
        limit = error_of(root, error, participation) * (1 + 1e-9)
        assert error_of(ours, error, participation) <= limit
