"""Factorizations with a banded noising matrix: noise from the last rows of Z alone.

C^-1 is Toeplitz with ``num_bands`` coefficients, those of (1 - x)^(1/2) cut off or better
ones, so that a row of the noise combines the last ``num_bands`` rows of Z, which are
drawn again from their seeds: no state (Kalinin, McKenna, Upadhyay and Lampert, "Back to
square roots").
"""

import dataclasses
from typing import Any, Literal

import numpy as np
import scipy.optimize
import scipy.signal
import scipy.special

from mf_aggregators import sensitivity as sensitivities
from mf_aggregators import validation
from mf_aggregators.arrays import FloatArray, IntArray
from mf_aggregators.factorizations._toeplitz_search import (
    ErrorMeasure,
    PatternOfRounds,
    check_bands,
    check_measure,
    check_workload,
    error_weights,
    parameters_of,
    with_momentum,
    with_momentum_adjoint,
)
from mf_aggregators.factorizations.convergence import minimise, warn_unless_stationary
from mf_aggregators.factorizations.toeplitz import (
    ToeplitzStructure,
    check_range,
    checked_coefficients,
)
from mf_aggregators.linear_algebra import power_series
from mf_aggregators.noise.recursions import WindowNoise
from mf_aggregators.participation import Participation, SingleParticipation, check_fits
from mf_aggregators.progress_bars import ProgressBar

# Bounds of the variables of ratios, logarithms of odds.
_LARGEST_LOG = 40.0
# The most n p^2 of a step of Newton's method.
_MOST_OPERATIONS = 2.5e7
# Factors n mu of the barrier, one after the other: if they fall faster, searches end in worse
# optima.
_BARRIERS = tuple(0.2 * 10.0 ** (-0.5 * halves) for halves in range(13))
# The search goes on to the next mu after so many steps, or a decrement of so much of mu.
_STEPS_OF_BARRIER, _CENTRED = 50, 1e-2
_TRIALS_OF_STEP = 40
# It ends once a barrier whose optimum it does not reach takes less than this off the logarithm.
_LEAST_PROGRESS = 1e-4
_LEAST_CURVATURE = 1e-13
# By how much all rounds together may break constraints: the sensitivity takes it for rounding.
_ROUNDING_OF_SLACKS = 5e-14
# Entries fall no further than to about this: arithmetic of denormal numbers is slow.
_NO_DENORMALS = 1e-30
_ROWS_AT_A_TIME = 4096


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class BandedInverseFactorization(ToeplitzStructure):
    """C^-1 is lower-triangular Toeplitz with ``num_bands`` coefficients.

    Attributes:
      num_rounds: n.
      coefficients: (p,), read-only: the first column of C^-1, p at most n; zeros follow. The
        first is not zero.

    Raises:
      ValueError: If the coefficients are not as said.
    """

    mechanism = "banded_inverse"
    _described_as = "the banded inverse"
    ends_because = "the bands of C^-1 are optimised together for all rounds"

    coefficients: FloatArray

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set(coefficients=checked_coefficients(self.coefficients, self.num_rounds))
        check_range(self.strategy_coefficients(), self.noising_coefficients())

    @property
    def num_bands(self) -> int:
        """The number of bands of C^-1."""
        return len(self.coefficients)

    def strategy_coefficients(self) -> FloatArray:
        """Returns the first column of C, (n,) float64."""
        return power_series.reciprocal(self.coefficients, self.num_rounds)

    def noising_coefficients(self) -> FloatArray:
        """Returns the first column of C^-1, (n,) float64."""
        return power_series.padded(self.coefficients, self.num_rounds)

    def noise_recursion(self) -> WindowNoise:
        """Returns the combination of the last ``num_bands`` rows of Z."""
        none = np.empty((self.num_rounds, 0))
        return WindowNoise(self.num_rounds, self.coefficients[np.newaxis], none, none)


def banded_inverse(
    num_rounds: Any = None,
    num_bands: int | None = None,
    participation: Participation | None = None,
    *,
    coefficients: Literal["optimised", "square_root"] = "optimised",
    error: ErrorMeasure = "mean",
    workload: Any = None,
    max_evaluations: int = 2000,
    show_progress: bool = False,
) -> BandedInverseFactorization:
    """Computes a factorization of a Toeplitz workload with a banded C^-1, in O(n) memory.

    Args:
      num_rounds: n, for the prefix sum of n rounds; or the workload itself, as ``workload``.
      num_bands: The number of bands of C^-1, 1 (independent noise) to n.
      participation: The schema to optimise for; SingleParticipation by default.
      coefficients: ``optimised``, or ``square_root`` for those of the inverse of the workload's
        square root, (1 - x)^(1/2) for the prefix sum.
      error: What to minimise: the ``mean`` squared error over rounds or its ``max``.
      workload: What to optimise for: the prefix sum, which is the default, or momentum with
        constant learning rates, a ``workloads.Workload`` or an (n, n) array.
      max_evaluations: Give up after this many evaluations of the error.
      show_progress: Whether to show a progress bar on standard error.

    Returns:
      The factorization; the coefficients of C are non-negative. If the optimiser stopped
      before its gradient vanished, the best coefficients found, with a
      NotConvergedWarning.

    Raises:
      ValueError: If an argument is out of its range, the workload has other learning rates than
        constant ones or is given twice, or the schema names more participations than fit.

    Example:
      >>> import mf_aggregators as mfa
      >>> make = mfa.factorizations.banded_inverse
      >>> make(4, num_bands=2, coefficients="square_root").noising_matrix()[:, 0]
      array([ 1. , -0.5,  0. ,  0. ])
    """
    num_rounds, momentum = check_workload(num_rounds, workload, "the banded inverse")
    participation = check_fits(
        SingleParticipation() if participation is None else participation, num_rounds
    )
    num_bands = check_bands(validation.positive_integer(num_bands, "num_bands"), num_rounds, 1)
    error = check_measure(error)
    max_evaluations = validation.positive_integer(max_evaluations, "max_evaluations")
    if coefficients not in ("optimised", "square_root"):
        raise ValueError(
            "coefficients must be 'optimised' or 'square_root', found "
            f"{validation.shown(coefficients)}."
        )
    weights = error_weights(num_rounds, error)
    series = power_series.inverse_square_root_coefficients(num_bands, momentum)
    if coefficients == "optimised" and num_bands > 1:
        pattern = PatternOfRounds.of(participation, num_rounds)
        candidates: list[tuple[FloatArray, Any]] = [(series, None)]
        with ProgressBar(
            desc=f"banded inverse, {num_bands} bands",
            unit=" evaluations",
            disable=not show_progress,
        ) as progress:
            by_ratios = _ErrorByRatios(pattern, weights, momentum)
            candidates.append(_optimised(series, by_ratios, max_evaluations, progress))
            if pattern.most > 1:
                # Independent noise is best where clients return all the time.
                candidates.append((power_series.padded(np.ones(1), num_bands), None))
                # More bands than a step has time for are zero.
                bands = min(num_bands, int((_MOST_OPERATIONS / num_rounds) ** 0.5))
                within = _ErrorWithin(pattern, weights, momentum, bands)
                for start in within.starts():
                    found, result = within.optimised(start, max_evaluations, progress)
                    candidates.append((power_series.padded(found, num_bands), result))
        series, result = min(
            candidates,
            key=lambda found: _squared_error(found[0], participation, weights, momentum),
        )
        if result is not None:
            warn_unless_stationary(result)
    return BandedInverseFactorization(
        num_rounds,
        series,
        participation=participation,
        parameters={
            "num_bands": num_bands,
            "coefficients": coefficients,
            "error": error,
            **parameters_of(momentum),
        },
    )


def _squared_error(
    coefficients: FloatArray, participation: Participation, weights: FloatArray, momentum: float
) -> float:
    """sens(C)^2 sum_t w_t b_t^2 of the coefficients of C^-1, whatever they are."""
    num_rounds = len(weights)
    column = power_series.reciprocal(coefficients, num_rounds)
    bound = sensitivities.from_toeplitz_coefficients(column, num_rounds, participation)
    decoder = with_momentum(np.cumsum(power_series.padded(coefficients, num_rounds)), momentum)
    return bound.value**2 * float(weights @ np.square(decoder))


@dataclasses.dataclass(frozen=True, eq=False)
class _ErrorByRatios:
    """The squared error by the ratios r_t = s_t / s_(t-1) of running sums s of C^-1's coefficients.

    Ratios between 0 and 1 keep the coefficients of C non-negative and at most one. The
    decoder's b(x) is s(x) / (1 - beta x). The free variables are the logarithms of odds
    r_t / (1 - r_t).

    Attributes:
      pattern: The worst pattern of the schema.
      weights: (n,) weights of the squares of the decoder's coefficients.
      momentum: beta.
    """

    pattern: PatternOfRounds
    weights: FloatArray
    momentum: float

    def free_variables(self, sums: FloatArray) -> FloatArray:
        """Returns the (p - 1,) free variables of (p,) running sums."""
        logs = np.log(sums[1:] / sums[:-1])
        return np.asarray(logs - np.log(-np.expm1(logs)))

    def running_sums(self, free: FloatArray) -> FloatArray:
        """Returns the (p,) running sums of (p - 1,) free variables."""
        logs = np.cumsum(scipy.special.log_expit(free))
        return np.asarray(np.exp(np.append(0.0, logs)))

    def logarithm(self, free: FloatArray) -> tuple[float, FloatArray]:
        """Returns log(sens(C)^2 sum_t w_t b_t^2) and its gradient by the free variables."""
        sums = self.running_sums(free)
        squared_sensitivity, by_noising = self._squared_sensitivity(np.diff(sums, prepend=0.0))
        squared_rows, by_all_sums = self._squared_rows(sums)
        by_sums = by_noising / squared_sensitivity
        by_sums[:-1] -= by_sums[1:].copy()
        by_sums += by_all_sums[: len(sums)] / squared_rows
        # The last running sum stands for all later rounds as well.
        by_sums[-1] += np.sum(by_all_sums[len(sums) :]) / squared_rows
        value = float(np.log(squared_sensitivity) + np.log(squared_rows))
        by_logs = np.cumsum((by_sums * sums)[::-1])[::-1][1:]
        return value, by_logs * (1.0 - scipy.special.expit(free))

    def _squared_sensitivity(self, noising: FloatArray) -> tuple[float, FloatArray]:
        """The pattern's squared sensitivity, and its gradient by the (p,) coefficients of C^-1."""
        column = power_series.reciprocal(noising, self.pattern.num_rounds)
        value, by_column = self.pattern.squared_sensitivity(column)
        # A change of C^-1 by x^j changes c(x) by -x^j c(x)^2.
        response = power_series.product(column, column, self.pattern.num_rounds)
        return value, -power_series.correlation(by_column, response, len(noising))

    def _squared_rows(self, sums: FloatArray) -> tuple[float, FloatArray]:
        """The sum of w_t b_t^2, and its gradient by the running sums of all n rounds."""
        all_sums = np.pad(sums, (0, self.pattern.num_rounds - len(sums)), mode="edge")
        decoder = with_momentum(all_sums, self.momentum)
        slopes = with_momentum_adjoint(2.0 * self.weights * decoder, self.momentum)
        return float(self.weights @ np.square(decoder)), slopes


def _optimised(
    start: FloatArray, error: _ErrorByRatios, max_evaluations: int, progress: "ProgressBar"
) -> tuple[FloatArray, Any]:
    """L-BFGS over the free variables of the ratios, from the coefficients of some C^-1."""

    def function(free: FloatArray) -> tuple[float, FloatArray]:
        progress.update()
        return error.logarithm(free)

    result = minimise(
        function,
        error.free_variables(np.cumsum(start)),
        max_evaluations=max_evaluations,
        corrections=20,
        least_change=1e-10,
        bounds=scipy.optimize.Bounds(-_LARGEST_LOG, _LARGEST_LOG),
    )
    return np.diff(error.running_sums(result.x), prepend=0.0), result


@dataclasses.dataclass(frozen=True, eq=False)
class _Point:
    """A C^-1 with what the error and the constraints are made of.

    Attributes:
      noising: (p,) coefficients of C^-1, the first of them one.
      column: (n,) c(x), the first column of C.
      slacks: (n - 1,) how far each constraint is from being broken.
      value: log(sens(C)^2 sum_t w_t b_t^2).
    """

    noising: FloatArray
    column: FloatArray
    slacks: FloatArray
    value: float


class _ErrorWithin:
    """The squared error where clients return, over all C^-1 whose sensitivity is exact.

    C must not be negative, and must not increase from lag b on
    (``sensitivity.from_toeplitz_coefficients``): n - 1 linear constraints h_t >= 0 on c(x), which
    is 1 / x(x) for the coefficients x of C^-1. Newton's method minimises the logarithm of the
    error less mu sum_t log h_t for falling mu. Derivatives are exact: a change of x by x^j changes
    c by -x^j c^2, and changes by x^j and x^k have the second derivative 2 x^(j + k) c^3. So the
    matrix of second derivatives is a sum of weighted products of shifted series, in O(n p^2), and
    of terms that depend on j + k alone. The decoder is linear in x.

    Where the search ends, mu / h_t are multipliers of the constraints, and (n - 1) mu bounds what
    linear terms could still take off the logarithm: a local optimum.
    """

    def __init__(
        self, pattern: PatternOfRounds, weights: FloatArray, momentum: float, num_bands: int
    ) -> None:
        self._pattern = pattern
        self._weights = weights
        self._momentum = momentum
        self._num_bands = num_bands
        workload = with_momentum(np.ones(pattern.num_rounds), momentum)
        # The decoder's squares are a quadratic form of the coefficients.
        everything = np.arange(pattern.num_rounds)
        self._rows = _gram(workload, weights, everything, num_bands, 0.0)
        # From lag b on, where clients return, coefficients must not increase.
        self._falling = everything >= pattern.separation
        self._falling[-1] = False

    def starts(self) -> list[FloatArray]:
        """Returns coefficients of C^-1 to start from, within the constraints."""
        root = power_series.inverse_square_root_coefficients(self._num_bands)
        # That of the prefix sum is within, as its running sums are log-convex.
        starts = [root]
        if self._momentum:
            own = power_series.inverse_square_root_coefficients(self._num_bands, self._momentum)
            starts += [own] if self._at(own) else []
        return starts

    def optimised(
        self, start: FloatArray, max_evaluations: int, progress: "ProgressBar"
    ) -> tuple[FloatArray, Any]:
        """Returns the (p,) coefficients of C^-1 found from a start, and how the search ended."""
        point = self._at(start)
        if point is None:
            raise ValueError("the search must start within its constraints.")
        evaluations, decrement = 0, 0.0
        for barrier_of_all in _BARRIERS:
            barrier = barrier_of_all / self._pattern.num_rounds
            before = point.value
            for _ in range(_STEPS_OF_BARRIER):
                gradient, curvature = self._slopes(point, barrier)
                step, decrement = _newton_step(gradient, curvature)
                # What is left is small beside what the barrier costs.
                if decrement <= _CENTRED * barrier or evaluations >= max_evaluations:
                    break
                moved, tried = self._along(point, step, decrement, barrier)
                evaluations += tried
                progress.update(tried)
                if moved is None:
                    break
                point = moved
            # Smaller barriers would take long and give little.
            if decrement > barrier and before - point.value < _LEAST_PROGRESS:
                break
        result = scipy.optimize.OptimizeResult(
            # Newton's estimate of what is left is half the square of this slope.
            jac=np.sqrt(np.array([decrement])),
            status=int(evaluations >= max_evaluations),
            nfev=evaluations,
            message="Newton's method with a barrier",
        )
        return point.noising, result

    def _at(self, noising: FloatArray) -> _Point | None:
        """The point of some coefficients of C^-1; None if it breaks a constraint."""
        num_rounds = self._pattern.num_rounds
        with np.errstate(over="ignore", invalid="ignore"):
            impulse = np.full(num_rounds, _NO_DENORMALS)
            impulse[0] = 1.0
            column = _divided(impulse, noising)
            slacks = column - np.append(column[1:], 0.0) * self._falling
            slacks = slacks[1:] + _ROUNDING_OF_SLACKS / num_rounds
            if not (np.all(slacks > 0.0) and np.all(column < 1e100)):
                return None
        squared_sensitivity, _ = self._pattern.squared_sensitivity(column)
        squared_rows = float(noising @ self._rows @ noising)
        value = float(np.log(squared_sensitivity) + np.log(squared_rows))
        return _Point(noising, column, slacks, value)

    def _along(
        self, point: _Point, step: FloatArray, decrement: float, barrier: float
    ) -> tuple[_Point | None, int]:
        """The point a step away, shortened until it is lower; None if there is none."""
        length = 1.0
        for tried in range(1, _TRIALS_OF_STEP + 1):
            moved = self._at(point.noising + length * np.append(0.0, step))
            if moved is not None:
                change = moved.value - point.value
                change -= barrier * float(np.sum(np.log(moved.slacks / point.slacks)))
                if change <= -1e-4 * length * decrement:
                    return moved, tried
            length *= 0.5
        return None, _TRIALS_OF_STEP

    def _slopes(self, point: _Point, barrier: float) -> tuple[FloatArray, FloatArray]:
        """The (p - 1,) gradient and (p - 1, p - 1) curvature of the error less the barrier's."""
        separation, most = self._pattern.separation, self._pattern.most
        bands, column, noising = self._num_bands, point.column, point.noising
        first = _divided(column, noising)
        second = _divided(first, noising)
        squared_sensitivity, by_column = self._pattern.squared_sensitivity(column)
        by_column /= squared_sensitivity
        by_sensitivity = -_correlation(by_column, first, bands)
        by_rows = self._rows @ noising
        squared_rows = float(noising @ by_rows)
        by_rows *= 2.0 / squared_rows
        of_pattern = sensitivities.pattern_sum(first, separation, most)
        curvature = 2.0 * _unweighted_gram(of_pattern, bands) / squared_sensitivity
        curvature += 2.0 * self._rows / squared_rows
        curvature -= np.outer(by_sensitivity, by_sensitivity) + np.outer(by_rows, by_rows)
        gradient = by_sensitivity + by_rows
        bends = _correlation(by_column, second, 2 * bands - 1)
        # Entries before lag b have to be positive, and the others above the next.
        multipliers = np.append(0.0, barrier / point.slacks)
        for is_falling in (False, True):
            rows = np.flatnonzero(self._falling == is_falling)
            slopes, curves, before = first, second, 0.0
            if is_falling:
                slopes, curves = (each - np.append(each[1:], 0.0) for each in (first, second))
                before = -1.0
            those = np.where(self._falling == is_falling, multipliers, 0.0)
            gradient += _correlation(those, slopes, bands, before)
            bends -= _correlation(those, curves, 2 * bands - 1, before)
            curvature += _gram(slopes, np.square(those) / barrier, rows, bands, before)
        lags = np.arange(bands)
        curvature += 2.0 * bends[lags[:, np.newaxis] + lags]
        return gradient[1:], curvature[1:, 1:]


def _divided(series: FloatArray, noising: FloatArray) -> FloatArray:
    """The (n,) series over that of C^-1: each entry to its own rounding, however small."""
    return np.asarray(scipy.signal.lfilter([1.0], noising, series))


def _correlation(
    values: FloatArray, series: FloatArray, count: int, before: float = 0.0
) -> FloatArray:
    """The (count,) sums over t of values[t] series[t - j], with ``before`` as entry -1.

    Terms are summed one by one: large values meet small entries here.
    """
    longer = np.concatenate([np.zeros(count - 2), [before], series])
    return np.correlate(longer, values, "valid")[::-1]


def _gram(
    series: FloatArray, weights: FloatArray, rows: IntArray, num_bands: int, before: float
) -> FloatArray:
    """The (p, p) sums over ``rows`` t of weights[t] series[t - j] series[t - k].

    Args:
      series: (n,); ``before`` is its entry -1, and earlier ones are zero.
      weights: (n,).
      rows: Those of n whose weights are not zero.
      num_bands: p, at least 2.
      before: What stands before the first entry.
    """
    longer = np.concatenate([np.zeros(num_bands - 2), [before], series])
    windows = np.lib.stride_tricks.sliding_window_view(longer, num_bands)
    total = np.zeros((num_bands, num_bands))
    for start in range(0, len(rows), _ROWS_AT_A_TIME):
        chosen = rows[start : start + _ROWS_AT_A_TIME]
        weighted = np.sqrt(weights[chosen])[:, np.newaxis] * windows[chosen]
        total += weighted.T @ weighted
    return total[::-1, ::-1]


def _unweighted_gram(series: FloatArray, num_bands: int) -> FloatArray:
    """The (p, p) sums over all t of series[t - j] series[t - k]."""
    last = series[::-1][:num_bands]
    total = np.empty((num_bands, num_bands))
    total[0] = total[:, 0] = power_series.correlation(series, series, num_bands)
    for j in range(num_bands - 1):
        # The shift takes the last product out.
        total[j + 1, 1:] = total[j, :-1] - last[j] * last[:-1]
    return total


def _newton_step(gradient: FloatArray, curvature: FloatArray) -> tuple[FloatArray, float]:
    """Newton's step, downhill where curvature is negative as well, and its decrement."""
    # Scaled to a diagonal of ones, so that rounding spares directions of little curvature.
    scales = 1.0 / np.sqrt(np.maximum(np.abs(np.diag(curvature)), 1e-300))
    values, vectors = np.linalg.eigh(curvature * scales * scales[:, np.newaxis])
    values = np.maximum(np.abs(values), _LEAST_CURVATURE * np.max(np.abs(values)))
    along = vectors.T @ (scales * gradient)
    step = -scales * (vectors @ (along / values))
    return step, float(-(gradient @ step))
