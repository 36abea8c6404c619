"""Factorizations with a banded noising matrix: noise from the last rows of Z alone.

C^-1 is Toeplitz with ``num_bands`` coefficients, those of (1 - x)^(1/2) cut off or better
ones, so that a row of the noise combines the last ``num_bands`` rows of Z, which are
drawn again from their seeds: no state (Kalinin, McKenna, Upadhyay and Lampert, "Back to
square roots").

**Changing learning rates.** With C^-1 = sum_t x_t S^t over t < p, where S^t moves rows down by t,
row i of B = A C^-1 is sum_t x_t A_i S^t for row A_i of A. So its squared norm is x^T R_i x, with

    R_i[s, t] = sum_(j >= 0) A[i, j + s] A[i, j + t]
              = L_i(s - t) - sum_(m = 1..t) A[i, s - m] A[i, t - m]    for s >= t,

where L_i(d) = sum_(a >= 0) A[i, a + d] A[i, a]. Rows of weighted sums of R_i, of gradients R_i x
and of norms all follow from the (n, p) numbers L_i(d) and the first p - 1 columns of A.

**The worst row.** The logarithm of the largest norm is the least s above all l_i = log x^T R_i x.
A barrier mu takes the minimum of s - mu sum_i log(s - l_i) over s in its place, which is smooth in
x and for one s: there sum_i mu / (s - l_i) = 1, and these terms are weights of the rows. That s is
at most n mu above the largest l_i.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import scipy.fft
import scipy.linalg
import scipy.optimize
import scipy.signal
import scipy.special

from mf_aggregators import memory, workloads
from mf_aggregators.factorizations import _decoder_rows
from mf_aggregators.factorizations._round_errors import RoundError, RoundWeights
from mf_aggregators.factorizations.convergence import (
    Objective,
    minimise,
    minimise_with_restarts,
    warn_unless_stationary,
)
from mf_aggregators.factorizations.toeplitz import (
    PatternOfRounds,
    Problem,
    ToeplitzOfCoefficients,
    check_bands,
    check_kind,
)
from mf_aggregators.kernel import numbers, schemas
from mf_aggregators.kernel import sensitivity as sensitivities
from mf_aggregators.kernel.numbers import FloatArray, IntArray
from mf_aggregators.kernel.rows import WindowNoise
from mf_aggregators.linear_algebra import power_series
from mf_aggregators.participation import Participation
from mf_aggregators.progress_bars import ProgressBar
from mf_aggregators.workloads import Workload

# The most n p^2 of a step of Newton's method.
_MOST_OPERATIONS = 2.5e7
# Factors n mu of the barrier, one after the other: if they fall faster, searches end in worse
# optima.
_BARRIERS = tuple(0.2 * 10.0 ** (-0.5 * halves) for halves in range(13))
# The steps, and the decrement relative to mu, after which the search takes the next mu.
_STEPS_OF_BARRIER, _CENTRED = 50, 1e-2
_TRIALS_OF_STEP = 40
# The search ends if a barrier ends early and lowers the logarithm by less than this.
_LEAST_PROGRESS = 1e-4
_LEAST_CURVATURE = 1e-13
# The most that all rounds together may break constraints by: the sensitivity allows for roundings.
_ROUNDING_OF_SLACKS = 5e-14
# Widths, one after another, that smooth magnitudes of entries of C, which may be negative.
_SMOOTHINGS = (1e-3, 1e-4, 1e-5)
_MOST_SMOOTH_EVALUATIONS = 300
# The least share of the squared error that a matrix with a mere bound as sensitivity must save.
_WORTH_A_BOUND = 5e-4
# Entries fall no further than to about this: arithmetic of denormal numbers is slow.
_NO_DENORMALS = 1e-30
# The most n p of the numbers that the rows of B follow from where learning rates change.
_MOST_NUMBERS = 2.5e7
_ROWS_AT_A_TIME = 4096
# Rows with smaller multipliers, relative to the largest, do not count.
_LEAST_MULTIPLIER = 1e-6
_STEPS_OF_BOUND, _ROUNDING_OF_BOUND = 50, 1e-13


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class BandedInverseFactorization(ToeplitzOfCoefficients):
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
    reason = "the bands of C^-1 are optimised together for all rounds"

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
    workload: Any,
    num_bands: int,
    participation: Participation | None = None,
    *,
    coefficients: Literal["optimised", "square_root"] = "optimised",
    error: RoundWeights = "mean",
    max_evaluations: int = 2000,
    show_progress: bool = False,
) -> BandedInverseFactorization:
    """Computes a factorization of a workload with a banded C^-1.

    It takes O(n) memory for prefix sums and momentum with constant learning rates, and O(n^2) for
    other workloads.

    Args:
      workload: What to optimise for: an int n for the prefix sum of n rounds, a
        ``workloads.Workload``, or an (n, n) array.
      num_bands: The number of bands of C^-1, 1 (independent noise) to n.
      participation: The schema to optimise for; SingleParticipation by default.
      coefficients: ``optimised``, or ``square_root`` for those of the inverse of the workload's
        square root, (1 - x)^(1/2) for the prefix sum; of that of constant learning rates, where
        they change.
      error: What to minimise: the ``mean`` squared error over rounds, its ``max``, or (n,) weights
        of the rounds.
      max_evaluations: Give up after this many evaluations of the error.
      show_progress: Whether to show a progress bar on standard error.

    Returns:
      The factorization; the coefficients of C are non-negative unless clients return and a few
      small negative ones take 5e-4 off the squared error, though their sensitivity is a bound.
      They are a local optimum: where rates of few rounds change at random, there may be others.
      If the optimiser stopped before its gradient vanished, the best coefficients found, with a
      NotConvergedWarning.

    Raises:
      ValueError: If an argument is out of its range, the workload is not lower triangular with a
        non-zero diagonal, or the schema names more participations than fit.

    Example:
      >>> import mf_aggregators as mfa
      >>> make = mfa.factorizations.banded_inverse
      >>> make(4, num_bands=2, coefficients="square_root").noising_matrix()[:, 0]
      array([ 1. , -0.5,  0. ,  0. ])
    """
    problem = Problem.of(workload, participation, error, max_evaluations, "the banded inverse")
    rounds, momentum = problem.pattern.num_rounds, problem.momentum
    num_bands = check_bands(numbers.positive_integer(num_bands, "num_bands"), rounds)
    check_kind(coefficients)
    series = power_series.inverse_square_root_coefficients(num_bands, momentum)
    root = power_series.inverse_square_root_coefficients(num_bands)
    if coefficients == "optimised" and num_bands > 1:
        with ProgressBar(
            desc=f"banded inverse, {num_bands} bands",
            unit=" evaluations",
            disable=not show_progress,
        ) as progress:
            constant = _rows_of_constant_rates(problem.nearest_constant, problem.error)
            found, end = _best(problem, constant, num_bands, [series, root], False, progress)
            if not problem.has_constant_rates:
                bands = min(num_bands, max(2, int(_MOST_NUMBERS / rounds)))
                rows = _rows_of_any_rates(problem.workload, problem.error, bands)
                starts = [series, power_series.padded(found[:bands], num_bands)]
                found, end = _best(problem, rows, bands, starts, True, progress)
            series = found
        if end is not None:
            warn_unless_stationary(end)
    return BandedInverseFactorization(
        rounds,
        series,
        participation=problem.participation,
        parameters={
            "num_bands": num_bands,
            "coefficients": coefficients,
            **problem.parameters(),
        },
    )


@dataclasses.dataclass(frozen=True, eq=False)
class _RowsByLags:
    """Numbers that determine the squared norms of some rows of B.

    Attributes:
      lags: (rows, p) L_i(d), the products of row i of A with itself moved by d.
      head: (rows, p - 1) the first columns of A.
    """

    lags: FloatArray
    head: FloatArray

    @classmethod
    def of(cls, matrix: FloatArray, num_bands: int) -> "_RowsByLags":
        """Returns those of all n rows.

        Args:
          matrix: A, (n, n) and lower triangular.
          num_bands: p, at most n.
        """
        lags, size = np.empty((len(matrix), num_bands)), 2 * len(matrix)
        for start in range(0, len(matrix), _ROWS_AT_A_TIME):
            rows = slice(start, start + _ROWS_AT_A_TIME)
            spectra = np.square(np.abs(scipy.fft.rfft(matrix[rows], size, workers=-1)))
            lags[rows] = scipy.fft.irfft(spectra, size, workers=-1)[:, :num_bands]
        return cls(lags, matrix[:, : num_bands - 1].copy())

    def gram(self, weights: FloatArray) -> FloatArray:
        """Returns the sum of w_i R_i, (p, p).

        Args:
          weights: (rows,) w.
        """
        of_head = self.head.T @ (weights[:, np.newaxis] * self.head)
        total = scipy.linalg.toeplitz(weights @ self.lags)
        missing = np.zeros_like(total)
        for t in range(1, len(total)):
            missing[t, 1:] = missing[t - 1, :-1] + of_head[t - 1]
        return np.asarray(total - missing)

    def squares(self, noising: FloatArray) -> FloatArray:
        """Returns the (rows,) squared norms x^T R_i x.

        Args:
          noising: (p,) x.
        """
        own = np.correlate(noising, noising, "full")[len(noising) - 1 :]
        own[1:] *= 2.0
        before = self.head @ _shifted(noising)
        return np.asarray(self.lags @ own - np.einsum("ij,ij->i", before, before))

    def slopes(self, noising: FloatArray) -> FloatArray:
        """Returns the (rows, p) products R_i x, halves of the gradients of the squared norms.

        Args:
          noising: (p,) x.
        """
        size = len(noising)
        by_lag = scipy.linalg.hankel(noising)
        by_lag[1:] += scipy.linalg.toeplitz(noising, np.zeros(size)).T[1:]
        total = self.lags @ by_lag
        if size > 1:
            before = self.head @ _shifted(noising)
            total[:, 1:] -= scipy.signal.fftconvolve(self.head, before, axes=1)[:, : size - 1]
        return np.asarray(total)


class _MeanOfRows:
    """The logarithm of a weighted sum of squared norms."""

    def __init__(self, gram: FloatArray) -> None:
        """Takes the (p, p) quadratic form of the sum."""
        self._gram = gram

    def logarithm(self, noising: FloatArray, barrier: float) -> float:
        """Returns the value for (p,) coefficients of C^-1; it does not depend on the barrier."""
        del barrier
        return float(np.log(noising @ self._gram @ noising))

    def derivatives(self, noising: FloatArray, barrier: float) -> tuple[FloatArray, FloatArray]:
        """Returns its (p,) gradient and (p, p) second derivatives."""
        del barrier
        along = self._gram @ noising
        square = noising @ along
        gradient = 2.0 * along / square
        return gradient, 2.0 * self._gram / square - np.outer(gradient, gradient)


class _WorstOfRows:
    """The logarithm of the largest squared norm, smoothed by a barrier."""

    def __init__(self, rows: _RowsByLags) -> None:
        """Takes all n rows."""
        self._rows = rows

    def logarithm(self, noising: FloatArray, barrier: float) -> float:
        """Returns the smoothed value for (p,) coefficients of C^-1.

        Args:
          noising: x.
          barrier: mu.
        """
        logs = np.log(self._rows.squares(noising))
        below = _below_bound(logs, barrier)
        return float(logs[0] + below[0] - barrier * np.sum(np.log(below)))

    def derivatives(self, noising: FloatArray, barrier: float) -> tuple[FloatArray, FloatArray]:
        """Returns its (p,) gradient and (p, p) second derivatives."""
        squares = self._rows.squares(noising)
        multipliers = barrier / _below_bound(np.log(squares), barrier)
        bends = np.square(multipliers) / barrier
        # Rows far below the largest do not bend it, and there are many.
        matter = multipliers > _LEAST_MULTIPLIER * np.max(multipliers)
        rows = _RowsByLags(self._rows.lags[matter], self._rows.head[matter])
        slopes = 2.0 * rows.slopes(noising) / squares[matter, np.newaxis]
        bends, changes = bends[matter], (bends - multipliers)[matter]
        total = 2.0 * self._rows.gram(multipliers / squares)
        gradient = total @ noising
        total += (slopes * changes[:, np.newaxis]).T @ slopes
        of_bound = bends @ slopes
        return gradient, total - np.outer(of_bound, of_bound) / np.sum(bends)


class _Rows(NamedTuple):
    """The error of the rows of B by the coefficients of C^-1, besides the sensitivity.

    Attributes:
      squared: From (p,) coefficients to the mean or weighted sum of the squared norms, or their
        maximum.
      weighted: The same, with its (p,) gradient; None for a maximum that may be of any round.
      of_bands: Returns the logarithm of the error for some number of bands.
    """

    squared: Callable[[FloatArray], float]
    weighted: Objective | None
    of_bands: Callable[[int], _MeanOfRows | _WorstOfRows]


def _rows_of_constant_rates(workload: Workload, error: RoundError) -> _Rows:
    """The error for a workload of constant learning rates."""
    column = workload.coefficients()
    assert column is not None
    objective = _decoder_rows.objectives(_decoder_rows.of(workload), error)[0]

    def weighted(noising: FloatArray) -> tuple[float, FloatArray]:
        value, slope = objective(power_series.padded(noising, len(column)))
        return value, slope[: len(noising)]

    def of_bands(num_bands: int) -> _MeanOfRows:
        rounds = np.arange(len(column))
        return _MeanOfRows(_gram_of_shifts(column, error.lag_weights, rounds, num_bands, 0.0))

    return _Rows(lambda noising: weighted(noising)[0], weighted, of_bands)


def _rows_of_any_rates(workload: Workload | FloatArray, error: RoundError, num_bands: int) -> _Rows:
    """The error for any workload, of at most some bands of C^-1: more are zero."""
    rounds = workloads.rounds_of(workload)
    memory.check_rounds(rounds, 8 * rounds, "the matrix of the workload")
    matrix = workload.matrix() if isinstance(workload, Workload) else workload
    # Squares of a multiple do not overflow.
    rows = _RowsByLags.of(matrix / workloads.largest_entry(workload), num_bands)

    def squared(noising: FloatArray) -> float:
        return error.of_rows(rows.squares(noising[:num_bands]))

    if error.is_maximum:
        return _Rows(
            squared,
            None,
            lambda bands: _WorstOfRows(
                _RowsByLags(rows.lags[:, :bands], rows.head[:, : bands - 1])
            ),
        )
    gram = rows.gram(np.ones(rounds) if error.weights is None else error.weights)

    def weighted(noising: FloatArray) -> tuple[float, FloatArray]:
        gradient = 2.0 * gram @ noising
        return 0.5 * float(noising @ gradient), gradient

    return _Rows(squared, weighted, lambda bands: _MeanOfRows(gram[:bands, :bands]))


def _gram_of_shifts(
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


def _below_bound(logs: FloatArray, barrier: float) -> FloatArray:
    """The (n,) s - l_i, for the s with sum_i mu / (s - l_i) = 1."""
    below = float(np.max(logs)) - logs
    above = barrier
    # Newton's method on the reciprocal of the sum, which is concave: from below, and monotone.
    for _ in range(_STEPS_OF_BOUND):
        terms = barrier / (below + above)
        total = float(np.sum(terms))
        above += (total - 1.0) * total * barrier / float(np.sum(np.square(terms)))
        if total - 1.0 <= _ROUNDING_OF_BOUND:
            break
    return below + above


def _shifted(noising: FloatArray) -> FloatArray:
    """(p - 1, p - 1): what entries of A's first columns are times in columns -1, -2, ... of B."""
    return np.asarray(scipy.linalg.hankel(noising[1:]))


def _best(
    problem: Problem,
    rows: _Rows,
    num_bands: int,
    starts: Sequence[FloatArray],
    has_newton: bool,
    progress: ProgressBar,
) -> tuple[FloatArray, Any]:
    """Returns the (p,) coefficients of C^-1 of least error, and how their search ended.

    Args:
      problem: The participation, and limits of the search.
      rows: What is minimised.
      num_bands: The most bands to search over; more are zero.
      starts: (p,) coefficients, none of which is better than what is returned. The first has
        running sums that fall.
      has_newton: Whether Newton's method searches as well; it does where clients return.
      progress: Shows evaluations.
    """
    pattern, schema = problem.pattern, problem.participation.as_schema()
    limits = problem.max_evaluations, progress

    def squared_error(coefficients: FloatArray) -> float:
        column = power_series.reciprocal(coefficients, pattern.num_rounds)
        bound = sensitivities.toeplitz_bound(column, pattern.num_rounds, schema)
        return bound.value**2 * rows.squared(coefficients)

    candidates: list[tuple[FloatArray, Any]] = [(start, None) for start in starts]
    if rows.weighted is not None and pattern.most == 1:
        # Signs do not matter to the norm of a column.
        candidates.append(_of_any_sign(starts[0][:num_bands], problem, rows, 0.0, progress))
    if pattern.most > 1:
        # Independent noise is best where clients return all the time.
        candidates.append((np.ones(1), None))
    if pattern.most > 1 or has_newton:
        # More bands than a step has time for are zero.
        bands = min(num_bands, int((_MOST_OPERATIONS / pattern.num_rounds) ** 0.5))
        within = _ErrorWithin(pattern, rows.of_bands(bands), bands, *limits)
        candidates += [within.optimised(start) for start in within.starts(starts)]
    padded = [(power_series.padded(each, len(starts[0])), end) for each, end in candidates]
    found, end = min(padded, key=lambda each: squared_error(each[0]))
    if pattern.most > 1 and rows.weighted is not None:
        signed, least = found[:bands], squared_error(found)
        for smoothing in _SMOOTHINGS:
            signed, _ = _of_any_sign(signed, problem, rows, smoothing, progress)
            # Further searches would take long and rarely find better coefficients.
            if not squared_error(signed) < least:
                break
        if squared_error(signed) < (1.0 - _WORTH_A_BOUND) * least:
            return power_series.padded(signed, len(found)), end
    return found, end


def _of_any_sign(
    start: FloatArray, problem: Problem, rows: _Rows, smoothing: float, progress: ProgressBar
) -> tuple[FloatArray, Any]:
    """Returns (p,) coefficients of C^-1, found from a start, and how the search ended.

    If clients return, entries of C may be negative: the magnitudes of C's entries c bound the
    sensitivity then. They are smoothed, as sqrt(c^2 + s^2), and L-BFGS runs over all coefficients
    but the first. Otherwise it runs over those of B for constant learning rates, of which the error
    is a sum of squares: that takes a tenth of the evaluations.
    """
    pattern, weighted = problem.pattern, rows.weighted
    assert weighted is not None
    impulse = np.eye(1, pattern.num_rounds)[0]
    # (1 - x) (1 - beta x), the inverse of the workload.
    taps = np.array([1.0, -1.0 - problem.momentum, problem.momentum])
    if pattern.most > 1:
        taps = np.ones(1)

    def logarithm(free: FloatArray) -> tuple[float, FloatArray]:
        noising = scipy.signal.lfilter(taps, [1.0], np.append(1.0, free))
        column = _divided(impulse, noising)
        sizes = np.hypot(column, smoothing)
        squared_sensitivity, by_sizes = pattern.squared_sensitivity(sizes)
        if not squared_sensitivity < 1e100:
            return np.inf, np.zeros(len(free))
        by_column = by_sizes * np.divide(column, sizes, where=sizes > 0.0, out=np.zeros_like(sizes))
        # A change of C^-1 by x^j changes c(x) by -x^j c(x)^2.
        response = power_series.product(column, column, len(column))
        squared_rows, by_rows = weighted(noising)
        gradient = by_rows / squared_rows
        gradient -= (
            power_series.correlation(by_column, response, len(noising)) / squared_sensitivity
        )
        by_decoder = scipy.signal.lfilter(taps, [1.0], gradient[::-1])[::-1]
        return float(np.log(squared_sensitivity) + np.log(squared_rows)), by_decoder[1:].copy()

    free, most = scipy.signal.lfilter([1.0], taps, start)[1:], problem.max_evaluations
    if pattern.most == 1:
        result = minimise_with_restarts(
            logarithm, free, max_evaluations=most, least_change=1e-12, progress=progress
        )
    else:
        with np.errstate(over="ignore", invalid="ignore"):
            result = minimise(
                logarithm,
                free,
                max_evaluations=min(most, _MOST_SMOOTH_EVALUATIONS),
                corrections=20,
                least_change=1e-10,
            )
    found = scipy.signal.lfilter(taps, [1.0], np.append(1.0, result.x))
    return np.asarray(found), result


@dataclasses.dataclass(frozen=True, eq=False)
class _Point:
    """A C^-1, with the numbers that determine the error and the constraints.

    Attributes:
      noising: (p,) coefficients of C^-1, the first of them one.
      column: (n,) c(x), the first column of C.
      slacks: (n - 1,) how far each constraint is from being broken.
      value: The logarithm of the squared error, a maximum smoothed by the barrier.
    """

    noising: FloatArray
    column: FloatArray
    slacks: FloatArray
    value: float


class _ErrorWithin:
    """The squared error where clients return, over all C^-1 with an exact sensitivity.

    C must not be negative, and must not increase from lag b on
    (``kernel.sensitivity.toeplitz_bound``): n - 1 linear constraints h_t >= 0 on c(x), which
    is 1 / x(x) for the coefficients x of C^-1. Newton's method minimises the logarithm of the
    error less mu sum_t log h_t for falling mu. Derivatives are exact: a change of x by x^j changes
    c by -x^j c^2, and changes by x^j and x^k have the second derivative 2 x^(j + k) c^3. So the
    matrix of second derivatives is a sum of weighted products of shifted series, in O(n p^2), and
    of terms that depend on j + k alone. The decoder is linear in x.

    Where the search ends, mu / h_t are multipliers of the constraints, and (n - 1) mu bounds what
    linear terms could still take off the logarithm: a local optimum.
    """

    def __init__(
        self,
        pattern: PatternOfRounds,
        rows: _MeanOfRows | _WorstOfRows,
        num_bands: int,
        max_evaluations: int,
        progress: ProgressBar,
    ) -> None:
        self._max_evaluations = max_evaluations
        self._progress = progress
        self._pattern = pattern
        self._rows = rows
        self._num_bands = num_bands
        # From lag b on, where clients return, coefficients must not increase.
        self._falling = np.arange(pattern.num_rounds) >= pattern.separation
        self._falling[-1] = False

    def starts(self, others: Sequence[FloatArray]) -> list[FloatArray]:
        """Returns coefficients of C^-1 to start from, those of others that are allowed."""
        found: list[FloatArray] = []
        for other in (each[: self._num_bands] for each in others):
            is_new = not any(np.array_equal(other, each) for each in found)
            if is_new and self._at(other, 1.0) is not None:
                found.append(other)
        # The prefix sum keeps the constraints, because its running sums are log-convex.
        return found or [power_series.inverse_square_root_coefficients(self._num_bands)]

    def optimised(self, start: FloatArray) -> tuple[FloatArray, Any]:
        """Returns the (p,) coefficients of C^-1 found from a start, and how the search ended."""
        noising, evaluations, decrement = start, 0, 0.0
        for barrier_of_all in _BARRIERS:
            barrier = barrier_of_all / self._pattern.num_rounds
            point = self._at(noising, barrier)
            if point is None:
                raise ValueError("the search must start within its constraints.")
            before = point.value
            for _ in range(_STEPS_OF_BARRIER):
                gradient, curvature = self._slopes(point, barrier)
                step, decrement = _newton_step(gradient, curvature)
                # The rest is small compared with the cost of the barrier.
                if decrement <= _CENTRED * barrier or evaluations >= self._max_evaluations:
                    break
                moved, tried = self._along(point, step, decrement, barrier)
                evaluations += tried
                self._progress.update(tried)
                if moved is None:
                    break
                point = moved
            noising = point.noising
            # Smaller barriers would take long and give little.
            if decrement > barrier and before - point.value < _LEAST_PROGRESS:
                break
        result = scipy.optimize.OptimizeResult(
            # Newton's estimate of the rest is half the square of this slope.
            jac=np.sqrt(np.array([decrement])),
            status=int(evaluations >= self._max_evaluations),
            nfev=evaluations,
            message="Newton's method with a barrier",
        )
        return noising, result

    def _at(self, noising: FloatArray, barrier: float) -> _Point | None:
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
        value = float(np.log(squared_sensitivity)) + self._rows.logarithm(noising, barrier)
        return _Point(noising, column, slacks, value)

    def _along(
        self, point: _Point, step: FloatArray, decrement: float, barrier: float
    ) -> tuple[_Point | None, int]:
        """The point a step away, shortened until it is lower; None if there is none."""
        length = 1.0
        for tried in range(1, _TRIALS_OF_STEP + 1):
            moved = self._at(point.noising + length * np.append(0.0, step), barrier)
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
        of_pattern = schemas.pattern_sum(first, separation, most)
        curvature = 2.0 * _unweighted_gram(of_pattern, bands) / squared_sensitivity
        curvature -= np.outer(by_sensitivity, by_sensitivity)
        by_rows, of_rows = self._rows.derivatives(noising, barrier)
        curvature += of_rows
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
            curvature += _gram_of_shifts(slopes, np.square(those) / barrier, rows, bands, before)
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
