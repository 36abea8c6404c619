"""Banded-inverse factorizations against printed values, dense algebra and other solvers."""

from typing import Any

import numpy as np
import pytest
import scipy.linalg
import scipy.optimize
from hypothesis import given, settings
from hypothesis import strategies as st

from mf_aggregators import linear_algebra
from mf_aggregators.factorizations import (
    BandedInverseFactorization,
    IdentityFactorization,
    NotConvergedWarning,
    banded_inverse,
    toeplitz,
)
from mf_aggregators.factorizations.banded_inverse import _RowsByLags
from mf_aggregators.participation import (
    FixedEpochOrder,
    MinSeparation,
    Participation,
)
from mf_aggregators.workloads import Workload
from tests.examples import examples
from tests.mf_aggregators.toeplitz_cases import (
    PAPER,
    SINGLE,
    ErrorMeasure,
    dense,
    error_of,
    least_error_of_another_solver,
    prefix,
)


def test_the_square_root_at_the_papers_size() -> None:
    workload = prefix(2052)
    root = banded_inverse(2052, 64, PAPER, coefficients="square_root")
    assert root.rmse(workload, PAPER) <= 10.60
    assert root.sensitivity(PAPER).is_exact
    np.testing.assert_array_equal(
        root.noising_coefficients()[:64], linear_algebra.square_root_coefficients(64, inverse=True)
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
    np.testing.assert_allclose(ours.strategy_coefficients(), expected, rtol=1e-10)
    assert ours.max_error(prefix(300), SINGLE) == pytest.approx(
        other.max_error(prefix(300), SINGLE), rel=1e-12
    )


@pytest.mark.parametrize("num_rounds", [2, 3, 10, 100])
def test_all_bands_reach_the_least_maximal_error_of_all_toeplitz(num_rounds: int) -> None:
    factorization = banded_inverse(num_rounds, num_rounds, error="max")
    root = linear_algebra.square_root_coefficients(num_rounds)
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


@pytest.mark.short_cases(5)
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


@pytest.mark.parametrize(
    ("num_bands", "error", "printed"),
    # Those of JAX Privacy with 16 bands.
    [(16, "mean", 6.9665), (16, "max", 8.6134), (32, "mean", 6.9665), (32, "max", 8.6134)],
)
def test_clients_that_return_are_no_worse_off_than_elsewhere(
    num_bands: int, error: ErrorMeasure, printed: float
) -> None:
    schema = MinSeparation(21, 6)
    factorization = banded_inverse(128, num_bands, schema, error=error)
    assert error_of(factorization, error, schema) <= printed
    # Coefficients from the seventh on are not zero.
    assert np.max(np.abs(factorization.coefficients[8:])) > 1e-3


@pytest.mark.parametrize("error", ["mean", "max"])
@pytest.mark.parametrize(
    ("num_rounds", "num_bands", "separation"), [(128, 32, 21), (64, 20, 8), (300, 8, 60)]
)
def test_what_is_found_is_a_local_optimum(
    num_rounds: int, num_bands: int, separation: int, error: ErrorMeasure
) -> None:
    """The slope of the error is one of non-negative multiples of constraints that are met."""
    most = -(-num_rounds // separation)
    pattern = np.zeros(num_rounds)
    pattern[::separation] = 1.0
    weights = np.ones(num_rounds) if error == "max" else np.arange(num_rounds, 0, -1) / num_rounds
    found = banded_inverse(num_rounds, num_bands, MinSeparation(separation, most), error=error)

    def value_and_slacks(noising: np.ndarray) -> tuple[float, np.ndarray]:
        column = linear_algebra.reciprocal_series(noising, num_rounds)
        decoder = np.cumsum(linear_algebra.padded(noising, num_rounds))
        squared = np.sum(linear_algebra.product_of_series(column, pattern, num_rounds) ** 2)
        falls = np.append(column[separation:-1] - column[separation + 1 :], column[-1])
        slacks = np.append(column[1:separation], falls)
        return float(np.log(squared) + np.log(weights @ decoder**2)), slacks

    value, slacks = value_and_slacks(found.coefficients)
    slope, normals = np.empty(num_bands - 1), np.empty((len(slacks), num_bands - 1))
    for j in range(1, num_bands):
        step = np.zeros(num_bands)
        step[j] = 1e-6
        above = value_and_slacks(found.coefficients + step)
        below = value_and_slacks(found.coefficients - step)
        slope[j - 1] = (above[0] - below[0]) / 2e-6
        normals[:, j - 1] = (above[1] - below[1]) / 2e-6
    multipliers, remaining = scipy.optimize.nnls(normals.T, slope)
    assert remaining <= 1e-4
    # What all constraints together could still take off.
    assert multipliers @ np.maximum(slacks, 0.0) <= 1e-4
    assert np.min(slacks) >= -1e-13
    assert value == pytest.approx(
        np.log(error_of(found, error, MinSeparation(separation, most)) ** 2), abs=1e-9
    )


def test_a_few_negative_entries_are_better_than_none_though_their_sensitivity_is_a_bound() -> None:
    """Another solver, over all C without negative entries, ends above; the bound is no less."""
    num_rounds, num_bands, schema = 128, 16, MinSeparation(21, 6)
    found = banded_inverse(num_rounds, num_bands, schema, error="max")
    pattern = np.zeros(num_rounds)
    pattern[: 6 * 21 : 21] = 1.0

    def column(free: np.ndarray) -> np.ndarray:
        return linear_algebra.reciprocal_series(np.append(1.0, free), num_rounds)

    def error(free: np.ndarray) -> float:
        squared = np.sum(linear_algebra.product_of_series(column(free), pattern, num_rounds) ** 2)
        sums = np.cumsum(linear_algebra.padded(np.append(1.0, free), num_rounds))
        return float(np.log(squared) + np.log(sums @ sums))

    ours = found.max_error(num_rounds, schema)
    assert np.min(found.strategy_coefficients()) < 0.0
    # The bound is above what a client can change in the first pattern, and close to it.
    of_pattern = np.exp(error(found.coefficients[1:]) / 2)
    assert of_pattern <= ours <= 1.001 * of_pattern
    root = linear_algebra.square_root_coefficients(num_bands, inverse=True)[1:]
    others = []
    for start in (0.98 * found.coefficients[1:], root, 0.7 * root):
        # Steps too far overflow, and are taken back.
        with np.errstate(over="ignore", invalid="ignore"):
            other = scipy.optimize.minimize(
                error,
                start,
                method="SLSQP",
                constraints={"type": "ineq", "fun": lambda free: 100.0 * column(free)[1:]},
                options={"maxiter": 80, "ftol": 1e-11},
            )
        others.append(np.exp(other.fun / 2))
    assert 1.0003 * ours <= min(others) <= 1.001 * ours


@pytest.mark.long
@given(st.data())
@settings(max_examples=10)
def test_another_solver_finds_nothing_better_where_clients_return(data: st.DataObject) -> None:
    """From several starts, on dense matrices."""
    num_rounds = data.draw(st.integers(4, 16))
    num_bands = data.draw(st.integers(2, min(5, num_rounds)))
    separation = data.draw(st.integers(1, num_rounds // 2))
    error: ErrorMeasure = data.draw(st.sampled_from(["mean", "max"]))
    schema = MinSeparation(separation)

    def column(free: np.ndarray) -> np.ndarray:
        # Steps too far would overflow.
        inverse = dense(np.clip(np.append(1.0, free), -9.0, 9.0), num_rounds)
        return scipy.linalg.solve_triangular(inverse, np.eye(num_rounds)[0], lower=True)

    generator = np.random.default_rng(0)
    root = linear_algebra.square_root_coefficients(num_bands, inverse=True)[1:]
    starts = [root] + [root * generator.uniform(0.2, 1.8, len(root)) for _ in range(2)]
    best = least_error_of_another_solver(num_rounds, separation, error, column, starts)
    ours = banded_inverse(num_rounds, num_bands, schema, error=error)
    assert error_of(ours, error, schema) <= best * (1 + 1e-5)


@st.composite
def _changing(draw: st.DrawFn, most_rounds: int) -> Workload:
    """Momentum with learning rates that change from round to round, by up to twenty times."""
    num_rounds = draw(st.integers(2, most_rounds))
    momentum = draw(st.sampled_from([0.0, 0.5, 0.9, 0.95]))
    numbers = np.random.default_rng(draw(st.integers(0, 2**32)))
    rates = numbers.uniform(0.05, 1.0, num_rounds)
    if draw(st.booleans()):
        rates = np.sort(rates)[:: draw(st.sampled_from([-1, 1]))]
    return Workload("momentum_sgd", num_rounds, momentum, tuple(rates.tolist()))


def _dense_rows(workload: Workload, noising: np.ndarray) -> np.ndarray:
    decoder = workload.matrix() @ dense(noising, workload.num_rounds)
    return np.asarray(np.sum(decoder**2, axis=1))


@given(_changing(60), st.data())
@settings(max_examples=examples(40))
def test_rows_of_any_workload_by_dense_algebra(workload: Workload, data: st.DataObject) -> None:
    num_rounds = workload.num_rounds
    num_bands = data.draw(st.integers(1, num_rounds))
    numbers = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    noising = np.append(1.0, -numbers.dirichlet(np.ones(num_bands))[1:])
    weights = numbers.uniform(size=num_rounds)
    expected = _dense_rows(workload, noising)
    # By polarisation: a form of two vectors from norms of their sum and difference.
    basis = np.eye(num_bands)
    products = np.stack(
        [
            (_dense_rows(workload, each + noising) - _dense_rows(workload, each - noising)) / 4.0
            for each in basis
        ],
        axis=1,
    )
    scale = float(np.max(np.abs(products)))
    rows = _RowsByLags.of(workload.matrix(), num_bands)
    np.testing.assert_allclose(rows.squares(noising), expected, rtol=1e-7)
    np.testing.assert_allclose(rows.slopes(noising), products, atol=1e-9 * scale)
    np.testing.assert_allclose(
        rows.gram(weights) @ noising, weights @ products, atol=1e-9 * scale * num_rounds
    )
    made = BandedInverseFactorization(num_rounds, noising)
    np.testing.assert_allclose(made.squared_decoder_rows(workload), expected, rtol=1e-7)


def test_a_search_that_fails_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    true_minimize = scipy.optimize.minimize

    def failing(*arguments: Any, method: str, **options: Any) -> Any:
        result = true_minimize(*arguments, method=method, **options)
        # Too many steps for a quadratic problem.
        result.status = 3 if method == "SLSQP" else result.status
        return result

    monkeypatch.setattr(scipy.optimize, "minimize", failing)
    with pytest.warns(NotConvergedWarning):
        banded_inverse(16, 4, MinSeparation(4))


def _least_of_another_solver(
    workload: Workload, num_bands: int, separation: int, weights: np.ndarray | None
) -> float:
    """The least squared error by sequential quadratic programming, dense, from several starts.

    The bound of the rounds' errors is a variable where there are no weights; C is non-negative,
    and its coefficients do not increase from lag ``separation`` on.
    """
    num_rounds = workload.num_rounds
    pattern = np.zeros(num_rounds)
    pattern[::separation] = 1.0

    def column(free: np.ndarray) -> np.ndarray:
        inverse = dense(np.clip(np.append(1.0, free[1:]), -9.0, 9.0), num_rounds)
        return scipy.linalg.solve_triangular(inverse, np.eye(num_rounds)[0], lower=True)

    def logs(free: np.ndarray) -> np.ndarray:
        return np.log(_dense_rows(workload, np.append(1.0, free[1:])))

    def function(free: np.ndarray) -> float:
        sensitivity = np.sum((dense(column(free), num_rounds) @ pattern) ** 2)
        if weights is None:
            return float(np.log(sensitivity) + free[0])
        return float(np.log(sensitivity) + np.log(weights @ np.exp(logs(free))))

    def slacks(free: np.ndarray) -> np.ndarray:
        series = column(free)
        found = np.append(series, series[separation:-1] - series[separation + 1 :])
        return found if weights is not None else np.append(found, free[0] - logs(free))

    root = linear_algebra.square_root_coefficients(num_bands, inverse=True)[1:]
    numbers, best = np.random.default_rng(0), np.inf
    for scale in (np.ones(len(root)), *numbers.uniform(0.2, 1.8, (3, len(root)))):
        start = np.append(0.0, root * scale)
        start[0] = np.max(logs(start)) + 0.1
        found = scipy.optimize.minimize(
            function,
            start,
            method="SLSQP",
            constraints={"type": "ineq", "fun": slacks},
            options={"maxiter": 300, "ftol": 1e-13},
        )
        if np.min(slacks(found.x)) >= -1e-9:
            best = min(best, float(found.fun))
    return float(np.exp(best))


def _errors_of_three(
    workload: Workload, num_bands: int, separation: int, kind: str
) -> tuple[float, float, float]:
    """The squared error of our matrix, of another solver's, and of that for constant rates."""
    num_rounds = workload.num_rounds
    schema = MinSeparation(separation) if separation < num_rounds else SINGLE
    weights: np.ndarray | None = np.ones(num_rounds) / num_rounds
    error: ErrorMeasure | np.ndarray = "mean"
    if kind == "max":
        weights, error = None, "max"
    elif kind == "weights":
        weights = np.linspace(0.0, 1.0, num_rounds)
        error = weights = weights / np.sum(weights)
    plain = Workload("momentum_sgd", num_rounds, workload.momentum)
    found = []
    for optimised_for in (workload, plain):
        made = banded_inverse(optimised_for, num_bands, schema, error=error)
        variances = made.per_round_variance(workload, schema)
        found.append(float(np.max(variances) if weights is None else weights @ variances))
    least = _least_of_another_solver(workload, num_bands, separation, weights)
    return found[0], least, found[1]


@pytest.mark.parametrize("kind", ["mean", "max", "weights"])
@pytest.mark.parametrize(("num_rounds", "num_bands", "separation"), [(24, 3, 24), (21, 3, 7)])
def test_another_solver_finds_nothing_better_where_rates_change(
    num_rounds: int, num_bands: int, separation: int, kind: str
) -> None:
    rates = np.random.default_rng(num_rounds).uniform(0.05, 1.0, num_rounds)
    workload = Workload("momentum_sgd", num_rounds, 0.9, tuple(rates.tolist()))
    found, least, _ = _errors_of_three(workload, num_bands, separation, kind)
    assert found <= least * (1 + 1e-5)


def test_rates_that_change_more_than_a_little_change_the_matrix() -> None:
    """A warm-up and a cool-down, as the papers have them."""
    rates = np.minimum(np.linspace(0.05, 7.0, 128), np.linspace(4.0, 0.05, 128)).clip(max=1.0)
    workload = Workload("momentum_sgd", 128, 0.95, tuple(rates.tolist()))
    plain = Workload("momentum_sgd", 128, 0.95)
    errors: list[tuple[ErrorMeasure, str]] = [("mean", "rmse"), ("max", "max_error")]
    for error, measure in errors:
        own, other = (banded_inverse(each, 16, error=error) for each in (workload, plain))
        found = getattr(own, measure)(workload, SINGLE)
        assert found < 0.999 * getattr(other, measure)(workload, SINGLE)
        # An array of the same workload is the same.
        by_array = banded_inverse(workload.matrix(), 16, error=error)
        assert getattr(by_array, measure)(workload, SINGLE) == pytest.approx(found, rel=1e-6)
        assert own.parameters["workload"] == workload.fingerprint()
        assert "workload" not in other.parameters


def test_weights_of_rounds() -> None:
    schema, weights = MinSeparation(10), np.zeros(40)
    assert np.array_equal(
        banded_inverse(40, 6, schema, error=np.ones(40)).coefficients,
        banded_inverse(40, 6, schema).coefficients,
    )
    # The last round is the worst one where learning rates are constant.
    weights[-1] = 1.0
    last = banded_inverse(40, 6, schema, error=weights)
    worst = banded_inverse(40, 6, schema, error="max")
    assert last.max_error(40, schema) == pytest.approx(worst.max_error(40, schema), rel=1e-6)
    assert last.parameters["error"] == "weights"
    assert last.parameters["weights"] == weights.tolist()
    weights[19] = 3.0
    both = banded_inverse(40, 6, schema, error=weights)
    least = _least_of_another_solver(Workload("momentum_sgd", 40, 0.0), 6, 10, weights)
    assert weights @ both.per_round_variance(40, schema) <= least * (1 + 1e-5)
