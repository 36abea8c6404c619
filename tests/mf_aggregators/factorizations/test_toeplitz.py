"""Toeplitz factorizations against printed values, dense linear algebra and other solvers."""

import pathlib
import tracemalloc

import numpy as np
import pytest
import scipy.linalg
import scipy.optimize
from hypothesis import given, settings
from hypothesis import strategies as st

from mf_aggregators import checkpoints, workloads
from mf_aggregators.factorizations import (
    IdentityFactorization,
    NotConvergedWarning,
    ToeplitzFactorization,
    toeplitz,
)
from mf_aggregators.factorizations._toeplitz_search import (
    ErrorMeasure,
    PatternOfRounds,
    error_weights,
    squared_rows_by_strategy,
)
from mf_aggregators.linear_algebra import power_series
from mf_aggregators.participation import (
    FixedEpochOrder,
    MinSeparation,
    Participation,
)
from mf_aggregators.workloads import Workload
from tests.mf_aggregators import brute_force
from tests.mf_aggregators.toeplitz_cases import PAPER, SINGLE, dense, error_of, prefix, schemas
from tests.refusals import refuses


@st.composite
def _examples(draw: st.DrawFn, largest: int) -> ToeplitzFactorization:
    num_rounds = draw(st.integers(1, largest))
    num_bands = draw(st.integers(1, num_rounds))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    coefficients = generator.normal(size=num_bands) / num_bands
    if draw(st.booleans()):
        coefficients = np.sort(np.abs(coefficients))[::-1]
    coefficients[0] = draw(st.sampled_from([-1.0, 1.0])) * generator.uniform(0.8, 2.0)
    equal = draw(st.booleans())
    return ToeplitzFactorization(
        num_rounds,
        coefficients,
        equal_column_norms=equal,
        parameters={"equal_column_norms": equal},
    )


def test_the_square_root_at_the_papers_size() -> None:
    factorization = toeplitz(2052, coefficients="square_root")
    assert round(factorization.max_error(prefix(2052), SINGLE), 4) == 3.4938
    found = factorization.strategy_coefficients()
    assert found is not None
    np.testing.assert_array_equal(found, power_series.square_root_coefficients(2052))


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
    root = power_series.square_root_coefficients(num_rounds)
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


def test_two_rounds_in_closed_form() -> None:
    """C = [[1, 0], [c, 1]]: the squared total error is (1 + c^2) (2 + (1 - c)^2)."""
    best = scipy.optimize.minimize_scalar(
        lambda c: (1 + c**2) * (2 + (1 - c) ** 2), bounds=(0, 1), method="bounded"
    )
    total = toeplitz(2).total_error(prefix(2), SINGLE)
    assert total**2 == pytest.approx(best.fun, rel=1e-8)


@given(_examples(largest=24), st.sampled_from([0.0, 0.9]))
@settings(max_examples=120, deadline=None)
def test_every_view_is_that_of_the_dense_matrix(
    factorization: ToeplitzFactorization, momentum: float
) -> None:
    num_rounds = factorization.num_rounds
    strategy = dense(factorization.arrays()["coefficients"], num_rounds)
    if factorization.equal_column_norms:
        strategy = strategy / np.linalg.norm(strategy, axis=0)
    np.testing.assert_allclose(factorization.strategy_matrix(), strategy, atol=1e-13)
    inverse = scipy.linalg.solve_triangular(strategy, np.eye(num_rounds), lower=True)
    scale = max(1.0, float(np.max(np.abs(inverse))))
    np.testing.assert_allclose(factorization.noising_matrix(), inverse, atol=1e-10 * scale)
    generator = np.random.default_rng(0)
    for shape in [(num_rounds,), (num_rounds, 2), (num_rounds, 2, 3)]:
        z = generator.normal(size=shape)
        flat = z.reshape(num_rounds, -1)
        np.testing.assert_allclose(
            factorization.noise_rows(z), (inverse @ flat).reshape(shape), atol=1e-9 * scale
        )
        np.testing.assert_allclose(
            factorization.encode(z), (strategy @ flat).reshape(shape), atol=1e-12
        )
    described = Workload("momentum_sgd", num_rounds, momentum)
    for workload, matrix in [
        (prefix(num_rounds), workloads.prefix_sum(num_rounds)),
        (described, described.matrix()),
    ]:
        decoder = factorization.decoder_matrix(workload)
        np.testing.assert_allclose(decoder @ strategy, matrix, atol=1e-9 * scale)
        squared = np.sum((matrix @ inverse) ** 2, axis=1)
        np.testing.assert_allclose(factorization.squared_decoder_rows(workload), squared, rtol=1e-8)
        np.testing.assert_allclose(factorization.squared_decoder_rows(matrix), squared, rtol=1e-8)


@given(_examples(largest=8), st.data())
@settings(max_examples=200, deadline=None)
def test_sensitivities_are_those_of_enumeration(
    factorization: ToeplitzFactorization, data: st.DataObject
) -> None:
    num_rounds = factorization.num_rounds
    participation = data.draw(schemas(num_rounds))
    rounds = data.draw(st.integers(1, num_rounds))
    for computed, part in [
        (factorization.sensitivity(participation), num_rounds),
        (factorization.sensitivity_of_first(rounds, participation), rounds),
    ]:
        leading = factorization.strategy_matrix()[:part, :part]
        truth = brute_force.scalar_sensitivity(leading, participation)
        assert computed.value >= truth * (1 - 1e-12)
        if computed.is_exact:
            assert computed.value == pytest.approx(truth, rel=1e-12)


@given(_examples(largest=12), st.sampled_from([-3.0, 1e-60, 0.25, 1e60]))
@settings(max_examples=60, deadline=None)
def test_no_scaling_changes_an_error(factorization: ToeplitzFactorization, scale: float) -> None:
    scaled = ToeplitzFactorization(
        factorization.num_rounds,
        factorization.arrays()["coefficients"] * scale,
        equal_column_norms=factorization.equal_column_norms,
    )
    schemas: list[Participation] = [SINGLE, MinSeparation(3), FixedEpochOrder(2, 4)]
    for participation in schemas:
        np.testing.assert_allclose(
            scaled.per_round_variance(prefix(scaled.num_rounds), participation),
            factorization.per_round_variance(prefix(scaled.num_rounds), participation),
            rtol=1e-9,
        )


@given(st.integers(2, 12), st.data())
@settings(max_examples=60, deadline=None)
def test_gradients_are_the_slopes_of_their_values(num_rounds: int, data: st.DataObject) -> None:
    num_bands = data.draw(st.integers(1, num_rounds))
    error: ErrorMeasure = data.draw(st.sampled_from(["mean", "max"]))
    participation = data.draw(schemas(num_rounds))
    generator = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    series = generator.normal(size=num_bands) / num_bands
    series[0] = 1.0
    pattern = PatternOfRounds.of(participation, num_rounds)
    weights = error_weights(num_rounds, error)
    direction = generator.normal(size=num_bands)
    column = power_series.padded(series, num_rounds)
    along = power_series.padded(direction, num_rounds)
    step = 1e-6
    for function, point, towards in [
        (lambda c: squared_rows_by_strategy(c, weights), series, direction),
        (pattern.squared_sensitivity, column, along),
        (pattern.sum_of_squared_norms, series, direction),
    ]:
        value, gradient = function(point)
        above, below = (function(point + sign * step * towards)[0] for sign in (1, -1))
        slope = (above - below) / (2 * step)
        assert gradient @ towards == pytest.approx(slope, rel=1e-5, abs=1e-5 * max(1.0, value))


@given(st.integers(1, 10), st.data())
@settings(max_examples=60, deadline=None)
def test_the_objective_is_the_error_that_is_stated(num_rounds: int, data: st.DataObject) -> None:
    num_bands = data.draw(st.integers(1, num_rounds))
    participation = data.draw(schemas(num_rounds))
    generator = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    series = np.sort(generator.uniform(0.1, 1.0, num_bands))[::-1]
    pattern = PatternOfRounds.of(participation, num_rounds)
    squared, _ = pattern.squared_sensitivity(power_series.padded(series, num_rounds))
    if num_bands <= pattern.separation:
        assert pattern.sum_of_squared_norms(series)[0] == pytest.approx(squared, rel=1e-12)
    factorization = ToeplitzFactorization(num_rounds, series)
    mean, _ = squared_rows_by_strategy(series, error_weights(num_rounds, "mean"))
    worst, _ = squared_rows_by_strategy(series, error_weights(num_rounds, "max"))
    assert error_of(factorization, "mean", participation) ** 2 == pytest.approx(squared * mean)
    assert error_of(factorization, "max", participation) ** 2 == pytest.approx(squared * worst)


def _found_by_another_solver(
    num_rounds: int, num_bands: int, participation: Participation, error: ErrorMeasure
) -> float:
    """Minimises the stated error over c_t = c_(t-1) r_t with r_t in (0, 1), without gradients."""

    def function(free: np.ndarray) -> float:
        ratios = 1.0 / (1.0 + np.exp(-free))
        series = np.cumprod(np.concatenate([[1.0], ratios]))
        return error_of(ToeplitzFactorization(num_rounds, series), error, participation)

    starts = np.random.default_rng(0).normal(size=(2, num_bands - 1))
    return min(
        float(scipy.optimize.minimize(function, start, method="BFGS").fun) for start in starts
    )


@pytest.mark.parametrize("error", ["mean", "max"])
@pytest.mark.parametrize(
    ("num_bands", "participation"),
    [
        (3, SINGLE),
        (10, SINGLE),
        (3, MinSeparation(3)),
        (6, MinSeparation(3)),
        (10, MinSeparation(4, 2)),
        (4, FixedEpochOrder(2, 5)),
    ],
    ids=str,
)
def test_another_solver_finds_nothing_better(
    num_bands: int, participation: Participation, error: ErrorMeasure
) -> None:
    factorization = toeplitz(10, num_bands, participation, error=error)
    other = _found_by_another_solver(10, num_bands, participation, error)
    assert error_of(factorization, error, participation) <= other * (1 + 1e-6)
    assert factorization.sensitivity(participation).is_exact


@pytest.mark.parametrize("error", ["mean", "max"])
@pytest.mark.parametrize("participation", [SINGLE, MinSeparation(7), MinSeparation(16, 2)], ids=str)
def test_more_bands_are_never_worse(participation: Participation, error: ErrorMeasure) -> None:
    errors = [
        error_of(toeplitz(32, bands, participation, error=error), error, participation)
        for bands in (1, 2, 4, 8, 16, 32)
    ]
    assert np.all(np.diff(errors) <= 1e-7 * errors[0])
    assert errors[1] < 0.95 * errors[0]


def test_bands_beyond_the_separation_stay_falling() -> None:
    factorization = toeplitz(64, 40, MinSeparation(10))
    series = factorization.arrays()["coefficients"]
    assert np.all(series >= 0.0)
    assert np.all(np.diff(series) <= 0.0)


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


def test_the_first_rounds_of_many_take_no_matrix_of_all_rounds() -> None:
    factorization = ToeplitzFactorization(
        100_000,
        np.array([1.0, 0.5, 0.25]),
        equal_column_norms=True,
        parameters={"equal_column_norms": True},
    )
    small = ToeplitzFactorization(100, np.array([1.0, 0.5, 0.25]))
    scale = float(np.sqrt(1.3125))
    tracemalloc.start()
    try:
        computed = factorization.sensitivity_of_first(100, MinSeparation(5, 3))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    expected = small.sensitivity(MinSeparation(5, 3)).value / scale
    assert computed.value == pytest.approx(expected, rel=1e-12)
    assert peak <= 50e6


def test_many_rounds_take_no_dense_matrix(tmp_path: pathlib.Path) -> None:
    num_rounds, participation = 100_000, MinSeparation(1000, 20)
    tracemalloc.start()
    try:
        factorization = toeplitz(num_rounds, 100, participation)
        sensitivity = factorization.sensitivity(participation)
        rmse = factorization.rmse(prefix(num_rounds), participation)
        checkpoints.save(factorization, tmp_path / "c")
        loaded = checkpoints.load(tmp_path / "c")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= 200e6
    assert sensitivity.is_exact
    root = toeplitz(num_rounds, 100, participation, coefficients="square_root")
    assert rmse <= root.rmse(prefix(num_rounds), participation)
    assert loaded.sensitivity(participation) == sensitivity
    assert (tmp_path / "c" / "arrays.npz").stat().st_size < 10_000
    # The first rows are those of the leading part.
    z = np.random.default_rng(0).normal(size=(300, 2))
    recursion = factorization.noise_recursion()
    state = recursion.initial_state((2,))
    rows = np.empty_like(z)
    for i, row_of_z in enumerate(z):
        rows[i], state = recursion.next_row(state, row_of_z)
    expected = np.linalg.solve(dense(factorization.arrays()["coefficients"], 300), z)
    np.testing.assert_allclose(rows, expected, atol=1e-10)


@pytest.mark.parametrize("num_bands", [3, 11])
@pytest.mark.parametrize("equal_column_norms", [False, True])
def test_no_noise_after_the_last_round(num_bands: int, equal_column_norms: bool) -> None:
    factorization = toeplitz(12, num_bands, equal_column_norms=equal_column_norms)
    recursion = factorization.noise_recursion()
    state = recursion.initial_state(())
    for _ in range(12):
        _, state = recursion.next_row(state, np.ones(()))
    with refuses("12 rounds"):
        recursion.next_row(state, np.ones(()))


@pytest.mark.parametrize("equal_column_norms", [False, True])
def test_checkpoints_hold_the_bands_alone(equal_column_norms: bool, tmp_path: pathlib.Path) -> None:
    factorization = toeplitz(40, 5, MinSeparation(8, 3), equal_column_norms=equal_column_norms)
    checkpoints.save(factorization, tmp_path / "c")
    with np.load(tmp_path / "c" / "arrays.npz") as archive:
        assert {name: archive[name].shape for name in archive.files} == {"coefficients": (5,)}
    loaded = checkpoints.load(tmp_path / "c")
    assert isinstance(loaded, ToeplitzFactorization)
    np.testing.assert_array_equal(loaded.strategy_matrix(), factorization.strategy_matrix())
    assert loaded.participation == factorization.participation
    assert loaded.parameters == factorization.parameters


def test_a_checkpoint_never_forgets_that_columns_have_norm_one(tmp_path: pathlib.Path) -> None:
    """Also without parameters, and where the sensitivity would not show it."""
    factorization = ToeplitzFactorization(6, np.array([0.8, 0.6]), equal_column_norms=True)
    checkpoints.save(factorization, tmp_path / "c")
    loaded = checkpoints.load(tmp_path / "c")
    np.testing.assert_array_equal(loaded.strategy_matrix(), factorization.strategy_matrix())


def test_the_same_arguments_give_the_same_bits() -> None:
    first, second = (toeplitz(200, 60, MinSeparation(50), error="max") for _ in range(2))
    np.testing.assert_array_equal(first.arrays()["coefficients"], second.arrays()["coefficients"])


def test_a_solver_that_is_stopped_says_so() -> None:
    with pytest.warns(NotConvergedWarning):
        toeplitz(200, 50, max_evaluations=2)


@pytest.mark.parametrize("coefficients", [[1.0, 10.0], [1.0, -10.0, 3.0]], ids=str)
def test_noise_that_would_overflow_is_refused(coefficients: list[float]) -> None:
    """Row i of C^-1 grows tenfold each round: after 2000 rounds there is no such float."""
    with refuses("large"):
        ToeplitzFactorization(2000, np.array(coefficients))


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
    with pytest.raises(ValueError, match="coefficient"):
        ToeplitzFactorization(5, coefficients)


@pytest.mark.parametrize(
    ("arguments", "options", "name"),
    [
        ((0,), {}, "num_rounds"),
        ((8, 0), {}, "num_bands"),
        ((8, 9), {}, "num_bands"),
        ((8, 2.5), {}, "num_bands"),
        ((8, 2), {"coefficients": "best"}, "coefficients"),
        ((8, 2), {"error": "worst"}, "error"),
        ((8, 2), {"max_evaluations": 0}, "max_evaluations"),
        ((10**7, 10**4), {"equal_column_norms": True}, "equal_column_norms"),
    ],
    ids=str,
)
def test_arguments_out_of_range_are_refused(
    arguments: tuple[int, ...], options: dict[str, object], name: str
) -> None:
    with refuses(name):
        toeplitz(*arguments, **options)  # type: ignore[arg-type]


def test_a_workload_of_other_rounds_is_refused() -> None:
    for equal in (False, True):
        factorization = toeplitz(8, 2, equal_column_norms=equal)
        with refuses("9 rounds"):
            factorization.rmse(prefix(9), SINGLE)


def test_rows_of_another_number_are_refused() -> None:
    factorization = toeplitz(8, 2)
    with refuses("8 rows"):
        factorization.noise_rows(np.ones(9))
    with refuses("8 rows"):
        factorization.encode(np.ones((7, 2)))
    with refuses("8"):
        factorization.sensitivity_of_first(9, SINGLE)
