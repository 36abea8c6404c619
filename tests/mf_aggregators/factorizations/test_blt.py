"""BLT factorizations against printed values, exact fractions, enumeration and other solvers."""

import fractions
import functools
import sys

import numpy as np
import pytest
import scipy.linalg
import scipy.optimize
import tqdm
from hypothesis import given, settings
from hypothesis import strategies as st

from mf_aggregators.factorizations import (
    BltFactorization,
    blt,
    toeplitz,
)
from mf_aggregators.factorizations.blt import (
    _MOST_BUFFERS,
    _log_squared_rows,
    _log_squared_sensitivity,
    _Search,
)
from mf_aggregators.factorizations.toeplitz import PatternOfRounds, Problem
from mf_aggregators.participation import (
    FixedEpochOrder,
    MinSeparation,
    Participation,
)
from mf_aggregators.workloads import Workload
from tests.examples import covering, examples
from tests.mf_aggregators.toeplitz_cases import (
    PAPER,
    SINGLE,
    ErrorMeasure,
    error_of,
    prefix,
    schemas,
)
from tests.refusals import refuses


def _exact_quotient(zeros: np.ndarray, poles: np.ndarray, count: int) -> list[fractions.Fraction]:
    """The first coefficients of prod (1 - zeros x) / prod (1 - poles x), in exact fractions."""
    series = [fractions.Fraction(1)] + [fractions.Fraction(0)] * (count - 1)
    for zero in zeros:
        factor = fractions.Fraction(float(zero))
        series = [
            value - factor * before
            for value, before in zip(series, [fractions.Fraction(0), *series], strict=False)
        ]
    for pole in poles:
        factor = fractions.Fraction(float(pole))
        for t in range(1, count):
            series[t] += factor * series[t - 1]
    return series


@st.composite
def _interlacing(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Decays down from one, which some of them almost reach."""
    count = draw(st.integers(1, 4))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    power = draw(st.sampled_from([1.0, 3.0, 8.0]))
    distances = np.sort(generator.uniform(0.05, 1.0, 2 * count) ** power)
    decays = 1.0 - distances
    return decays[0::2], decays[1::2]


@pytest.mark.long
def test_the_papers_size_reaches_the_printed_errors() -> None:
    workload = prefix(2052)
    two, four = blt(2052, 2, PAPER), blt(2052, 4, PAPER)
    assert two.rmse(workload, PAPER) <= 9.19
    assert four.rmse(workload, PAPER) <= 9.175
    assert blt(2052, 4, PAPER, error="max").max_error(workload, PAPER) <= 10.74
    assert blt(2052, 4).rmse(workload, SINGLE) <= 3.279
    assert four.sensitivity(PAPER).is_exact
    # No Toeplitz matrix with all bands is worse than one of few buffers.
    assert toeplitz(2052).rmse(workload, SINGLE) <= blt(2052, 4).rmse(workload, SINGLE)


def test_one_buffer_in_closed_form() -> None:
    num_rounds, decay, inverse = 50, 0.9, 0.6
    factorization = BltFactorization(num_rounds, np.array([decay]), np.array([inverse]))
    weight = decay - inverse
    np.testing.assert_allclose(factorization.output_scales, [weight], rtol=1e-15)
    np.testing.assert_allclose(factorization.inverse_output_scales, [-weight], rtol=1e-15)
    # |c|^2 = 1 + w^2 (1 + d^2 + ... + d^(2 n - 4)).
    squared = 1 + weight**2 * (1 - decay ** (2 * num_rounds - 2)) / (1 - decay**2)
    computed = factorization.sensitivity(SINGLE)
    assert computed.value**2 == pytest.approx(squared, rel=1e-13)
    # b_t = 1 - w (1 + e + ... + e^(t - 1)).
    lags = np.arange(num_rounds)
    decoder = 1 - weight * (1 - inverse**lags) / (1 - inverse)
    np.testing.assert_allclose(
        factorization.squared_decoder_rows(prefix(num_rounds)), np.cumsum(decoder**2), rtol=1e-12
    )


@given(_interlacing())
@settings(max_examples=examples(60))
def test_coefficients_are_those_of_the_rational_function(
    decays: tuple[np.ndarray, np.ndarray],
) -> None:
    buffer_decays, inverse_decays = decays
    factorization = BltFactorization(25, buffer_decays, inverse_decays)
    strategy = [float(c) for c in _exact_quotient(inverse_decays, buffer_decays, 25)]
    noising = [float(c) for c in _exact_quotient(buffer_decays, inverse_decays, 25)]
    # Relative to each coefficient: no sum cancels.
    np.testing.assert_allclose(factorization.strategy_coefficients(), strategy, rtol=1e-11)
    np.testing.assert_allclose(factorization.noising_coefficients(), noising, rtol=1e-11)
    assert np.all(factorization.output_scales > 0)
    assert np.all(factorization.inverse_output_scales < 0)
    assert np.all(np.diff(factorization.strategy_coefficients()) <= 0)


@given(st.integers(2, 40), st.integers(1, 3), st.data())
@settings(max_examples=examples(60))
def test_the_objective_is_the_stated_error_and_its_gradient_the_slope(
    num_rounds: int, num_buffers: int, data: st.DataObject
) -> None:
    participation = data.draw(schemas(num_rounds))
    error: ErrorMeasure = data.draw(st.sampled_from(["mean", "max"]))
    generator = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    distances = np.cumsum(generator.uniform(0.05, 1.0, 2 * num_buffers))
    distances /= distances[-1] * 1.1
    pattern = PatternOfRounds.of(participation, num_rounds)

    def search(momentum: float) -> _Search:
        workload = (
            Workload("momentum_sgd", num_rounds, momentum) if momentum else prefix(num_rounds)
        )
        problem = Problem.of(workload, None, error, 10)._replace(pattern=pattern)
        return _Search(problem, workload, tqdm.tqdm(disable=True))

    value, _ = search(0.0)._log_error(distances)
    decays = 1.0 - distances
    factorization = BltFactorization(num_rounds, decays[0::2], decays[1::2])
    stated = error_of(factorization, error, participation)
    assert value == pytest.approx(2 * np.log(stated), rel=1e-10, abs=1e-10)
    direction, step = generator.normal(size=2 * num_buffers), 1e-7
    for momentum in (0.0, 0.85):
        function = search(momentum)._log_error
        _, gradient = function(distances)
        above, below = (function(distances + s * step * direction)[0] for s in (1, -1))
        slope = (above - below) / (2 * step)
        assert gradient @ direction == pytest.approx(slope, rel=1e-5, abs=1e-6)


def _found_by_another_solver(
    num_rounds: int, num_buffers: int, participation: Participation, error: ErrorMeasure
) -> float:
    """The least stated error from several starts of Nelder-Mead over ratios of distances."""

    def function(free: np.ndarray) -> float:
        distances = np.cumprod(1.0 / (1.0 + np.exp(-free)))[::-1]
        decays = 1.0 - distances
        try:
            candidate = BltFactorization(num_rounds, decays[0::2], decays[1::2])
        except ValueError:
            return np.inf
        return error_of(candidate, error, participation)

    starts = np.random.default_rng(0).normal(size=(3, 2 * num_buffers))
    options = {"maxfev": 1500, "xatol": 1e-7, "fatol": 1e-9}
    found = (
        scipy.optimize.minimize(function, start, method="Nelder-Mead", options=options)
        for start in starts
    )
    return min(float(result.fun) for result in found)


@pytest.mark.short_cases(3)
@pytest.mark.parametrize(
    ("size", "error"),
    covering(
        [
            (2, SINGLE),
            (5, SINGLE),
            (16, SINGLE),
            (30, SINGLE),
            (100, SINGLE),
            (6, MinSeparation(2)),
            (23, MinSeparation(4)),
            (30, MinSeparation(15)),
            (64, FixedEpochOrder(3, 10)),
        ],
        ["mean", "max"],
    ),
    ids=str,
)
def test_another_solver_finds_no_better_single_buffer(
    size: tuple[int, Participation], error: ErrorMeasure
) -> None:
    num_rounds, participation = size
    factorization = blt(num_rounds, 1, participation, error=error)
    other = _found_by_another_solver(num_rounds, 1, participation, error)
    assert error_of(factorization, error, participation) <= other * (1 + 1e-4)


@pytest.mark.parametrize("num_buffers", [1, 2, 8])
def test_one_round_is_independent_noise(num_buffers: int) -> None:
    factorization = blt(1, num_buffers)
    np.testing.assert_array_equal(factorization.strategy_matrix(), [[1.0]])
    assert error_of(factorization, "mean", SINGLE) == 1.0


@pytest.mark.long_cases(1)
@pytest.mark.short_cases(1)
@pytest.mark.parametrize(
    ("num_rounds", "participation", "error"),
    [
        (1, SINGLE, "mean"),
        pytest.param(64, SINGLE, "max", marks=pytest.mark.long),
        (64, MinSeparation(16), "mean"),
    ],
    ids=str,
)
def test_the_fewest_buffers_of_an_accuracy(
    num_rounds: int, participation: Participation, error: ErrorMeasure
) -> None:
    @functools.cache
    def error_with(num_buffers: int) -> float:
        factorization = blt(num_rounds, num_buffers, participation, error=error)
        return error_of(factorization, error, participation)

    for accuracy in (1e-3, 0.05):
        chosen = blt(num_rounds, None, participation, error=error, accuracy=accuracy)
        highest = error_with(_MOST_BUFFERS) * (1 + accuracy)
        found = error_of(chosen, error, participation)
        assert found <= highest * (1 + 1e-12)
        assert found == pytest.approx(error_with(chosen.num_buffers), rel=1e-12)
        if chosen.num_buffers > 1:
            assert error_with(chosen.num_buffers - 1) > highest * (1 - 1e-12)
        assert chosen.parameters["num_buffers"] == chosen.num_buffers
        assert chosen.parameters["accuracy"] == accuracy


def test_decays_as_close_to_one_as_floats_are() -> None:
    """The weights, in exact fractions, at distances of one rounding error and more."""
    distances = np.array([2.0**-52, 2.0**-50, 1e-12, 1e-9, 1e-4, 0.3])
    decays = 1.0 - distances
    factorization = BltFactorization(10**6, decays[0::2], decays[1::2])
    buffer_decays = [fractions.Fraction(float(decay)) for decay in decays[0::2]]
    inverse_decays = [fractions.Fraction(float(decay)) for decay in decays[1::2]]
    for i, decay in enumerate(buffer_decays):
        weight = fractions.Fraction(1)
        for other in inverse_decays:
            weight *= decay - other
        for j, other in enumerate(buffer_decays):
            if i != j:
                weight /= decay - other
        assert factorization.output_scales[i] == pytest.approx(float(weight), rel=1e-14)
    coefficients = factorization.strategy_coefficients()
    assert np.all(np.diff(coefficients) <= 0.0)
    assert np.all(coefficients >= 0.0)
    assert factorization.sensitivity(MinSeparation(1000)).is_exact


def test_a_pair_of_equal_decays_has_no_effect() -> None:
    one = BltFactorization(30, np.array([0.9]), np.array([0.6]))
    two = BltFactorization(30, np.array([0.9, 0.5]), np.array([0.6, 0.5]))
    np.testing.assert_allclose(two.strategy_coefficients(), one.strategy_coefficients(), rtol=1e-14)
    np.testing.assert_allclose(two.noising_coefficients(), one.noising_coefficients(), rtol=1e-14)


@pytest.mark.parametrize(
    ("buffer_decays", "inverse_decays"),
    [
        ([0.5], [0.6]),
        ([0.9, 0.8], [0.7, 0.6]),
        ([0.5, 0.9], [0.4, 0.8]),
        ([1.0], [0.5]),
        ([0.5], [-1.0]),
        ([0.5], [np.nan]),
    ],
    ids=str,
)
def test_decays_that_do_not_interlace_are_refused(
    buffer_decays: list[float], inverse_decays: list[float]
) -> None:
    with refuses("interlace"):
        BltFactorization(10, np.array(buffer_decays), np.array(inverse_decays))


@pytest.mark.parametrize(
    ("buffer_decays", "inverse_decays"),
    [([0.9], [-0.2]), ([-0.1], [-0.5]), ([0.9, -0.1], [0.5, -0.3])],
    ids=["first step above one", "negative", "one negative"],
)
def test_decays_of_rising_coefficients_are_refused(
    buffer_decays: list[float], inverse_decays: list[float]
) -> None:
    with refuses("non-increasing"):
        BltFactorization(10, np.array(buffer_decays), np.array(inverse_decays))


def test_vectors_of_other_shapes_are_refused() -> None:
    for decays, inverse in [
        (np.array([]), np.array([])),
        (np.array([0.5]), np.array([0.4, 0.3])),
        (np.array([[0.5]]), np.array([[0.4]])),
    ]:
        with refuses("length"):
            BltFactorization(10, decays, inverse)


_ERRORS = st.sampled_from(["mean", "max"])


def _log_error(
    distances: np.ndarray, pattern: PatternOfRounds, error: ErrorMeasure
) -> tuple[float, np.ndarray]:
    """The logarithm of the squared error for prefix sums, and its gradient, by closed forms."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[BltFactorization.__module__], "_MOST_ROUNDS_OF_SUMS", 0)
        of_pattern, by_pattern = _log_squared_sensitivity(distances, pattern)
    of_rows, by_rows = _log_squared_rows(distances, pattern.num_rounds, error == "max")
    return of_pattern + of_rows, by_pattern + by_rows


@st.composite
def _problems(draw: st.DrawFn) -> tuple[np.ndarray, PatternOfRounds]:
    num_rounds = draw(st.integers(1, 60))
    separation = draw(st.integers(1, num_rounds))
    most = draw(st.integers(1, -(-num_rounds // separation)))
    count = draw(st.integers(1, 4))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    # Distances range from evenly spread ones to some very close to a decay of one.
    power = draw(st.floats(1.0, 8.0))
    distances = np.sort(generator.uniform(1e-2, 1.0 - 1e-6, 2 * count)) ** power
    return distances, PatternOfRounds(num_rounds, separation, most)


@given(_problems(), _ERRORS)
def test_closed_forms_are_errors_of_the_factorization(
    problem: tuple[np.ndarray, PatternOfRounds], error: ErrorMeasure
) -> None:
    distances, pattern = problem
    decays = 1.0 - distances
    factorization = BltFactorization(pattern.num_rounds, decays[0::2], decays[1::2])
    schema = FixedEpochOrder(pattern.most, pattern.separation)
    workload = Workload("prefix_sum", pattern.num_rounds).matrix()
    expected = (
        factorization.rmse(workload, schema)
        if error == "mean"
        else factorization.max_error(workload, schema)
    )
    value, _ = _log_error(distances, pattern, error)
    assert np.exp(value / 2.0) == pytest.approx(expected, rel=1e-7)


@given(_problems(), _ERRORS)
def test_slopes_of_closed_forms(
    problem: tuple[np.ndarray, PatternOfRounds], error: ErrorMeasure
) -> None:
    distances, pattern = problem
    _, gradient = _log_error(distances, pattern, error)
    for j in range(len(distances)):
        # Neighbours may be close: a step that keeps the order.
        gaps = np.abs(np.delete(distances, j) - distances[j])
        step = 1e-4 * min(distances[j], 1.0 - distances[j], *gaps)
        moved: np.ndarray = np.zeros_like(distances)
        moved[j] = step
        above, _ = _log_error(distances + moved, pattern, error)
        below, _ = _log_error(distances - moved, pattern, error)
        slope = (above - below) / 2.0
        assert gradient[j] * step == pytest.approx(slope, rel=1e-4, abs=1e-12)


def test_distances_near_zero_lose_no_digits() -> None:
    """A decay that is one for all that 10^6 rounds can tell, beside its limit."""
    pattern = PatternOfRounds(10**6, 10**6, 1)
    tiny, _ = _log_error(np.array([1e-15, 0.25]), pattern, "max")
    # c_t = (1 - e) for all t >= 1, e = 3 / 4, and b_t = e^t.
    squared_sensitivity = 1.0 + (10**6 - 1) * 0.25**2
    squared_rows = 1.0 / (1.0 - 0.75**2)
    assert tiny == pytest.approx(np.log(squared_sensitivity * squared_rows), abs=1e-7)
