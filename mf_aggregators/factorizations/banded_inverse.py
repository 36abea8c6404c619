"""Factorizations with a banded C^-1: each row of noise combines the last few rows of Z.

C^-1 is Toeplitz with ``num_bands`` coefficients: the first ones of (1 - x)^(1/2), or better ones
from a search. A row of noise combines the last ``num_bands`` rows of Z, which are drawn again from
their seed, so no state is kept (Kalinin, McKenna, Upadhyay and Lampert, "Back to square roots").

**Changing learning rates.** With C^-1 = sum_t x_t S^t over t < p, where S^t moves rows down by t,
row i of B = A C^-1 is sum_t x_t A_i S^t for row A_i of A. So its squared norm is x^T R_i x, with

    R_i[s, t] = sum_(j >= 0) A[i, j + s] A[i, j + t]
              = L_i(s - t) - sum_(m = 1..t) A[i, s - m] A[i, t - m]    for s >= t,

where L_i(d) = sum_(a >= 0) A[i, a + d] A[i, a]. Rows of weighted sums of R_i, of gradients R_i x
and of norms all follow from the (n, p) numbers L_i(d) and the first p - 1 columns of A.

**Returning clients.** The coefficients of C must not be negative, and must not increase from lag b
on (``kernel.sensitivity.toeplitz_bound``): these are linear constraints on c(x), which is 1 / x(x)
for the coefficients x of C^-1, and a change of x by x^j changes c by -x^j c^2. Sequential quadratic
programming minimises the logarithm of the error under them.

**The worst row.** The logarithm of the maximum is the least s that is not below any logarithm of
x^T R_i x: s is one more variable, and each row is one more constraint.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import numpy as np
import scipy.fft
import scipy.linalg
import scipy.optimize
import scipy.signal
import scipy.special

from mf_aggregators import inputs, linear_algebra
from mf_aggregators.factorizations._decoder_rows import DecoderRows
from mf_aggregators.factorizations._scaled import ScaledToeplitz
from mf_aggregators.factorizations.searches import (
    NotConvergedWarning,
    Objective,
    RoundError,
    RoundWeights,
    check_bands,
    minimise,
    minimise_with_restarts,
    progress_bar,
)
from mf_aggregators.factorizations.toeplitz import Problem, ToeplitzOfCoefficients
from mf_aggregators.kernel import numbers
from mf_aggregators.kernel import sensitivity as sensitivities
from mf_aggregators.kernel.numbers import FloatArray
from mf_aggregators.kernel.rows import WindowNoise
from mf_aggregators.participation import Participation
from mf_aggregators.progress_bars import ProgressBar
from mf_aggregators.workloads import AnyWorkload, Workload

# The largest n p^2, the number of operations of a step, for which a search with constraints is run.
_MOST_OPERATIONS = 2.5e7
# The number of constraints at the beginning of a search, the most times that violated constraints
# are added, and the most steps of each search.
_FIRST_CONSTRAINTS, _MOST_ADDITIONS, _MOST_STEPS = 256, 20, 300
# Each constraint is divided by its slack at the start, or by this number if the slack is smaller.
_LEAST_SLACK = 1e-9
# The tolerance by which the optimiser may violate constraints, and the margin that large
# constraints get for it.
_TOLERANCE, _MARGIN = 1e-12, 2e-12
# Coefficients of C above the first number are refused; the second is then the logarithm of the
# error.
_LARGEST_ENTRY, _INFEASIBLE = 1e6, 1e3
# The widths of smoothing the magnitudes of coefficients of C near zero, in the order of searches.
_SMOOTHINGS = (1e-3, 1e-4, 1e-5)
_MOST_SMOOTH_EVALUATIONS = 300
# A matrix with only a bound on its sensitivity is chosen over others if it reduces the squared
# error by at least this share.
_WORTH_A_BOUND = 5e-4
# The largest n p of the numbers that are stored to compute the rows of B if learning rates change.
_MOST_NUMBERS = 2.5e7
_ROWS_AT_A_TIME = 4096
# The number of entries of columns of D^-1 T^-1 that are computed together.
_ENTRIES_AT_A_TIME = 1 << 21


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class BandedInverseFactorization(ToeplitzOfCoefficients, ScaledToeplitz):
    """A factorization with a lower-triangular Toeplitz C^-1 of ``num_bands`` coefficients.

    With scales, T^-1 has these coefficients instead, and C = P T D has columns of norm one.

    Attributes:
      num_rounds: n.
      coefficients: (p,), read-only: the first column of C^-1, p at most n; zeros follow. The
        first is not zero.

    Raises:
      ValueError: If the coefficients do not have this form, or as for :class:`ScaledToeplitz`.
    """

    mechanism = "banded_inverse"
    _described_as = "the banded inverse"
    reason = "the bands of C^-1 are optimised together for all rounds"

    def strategy_coefficients(self) -> FloatArray:
        """Returns the first column of the strategy matrix C, (n,) float64."""
        return linear_algebra.reciprocal_series(self.coefficients, self.num_rounds)

    def noising_coefficients(self) -> FloatArray:
        """Returns the first column of the noising matrix C^-1, (n,) float64."""
        return linear_algebra.padded(self.coefficients, self.num_rounds)

    def _inner_rows(self) -> WindowNoise:
        """Returns the recursion in which each row combines the last ``num_bands`` rows of Z."""
        none = np.empty((self.num_rounds, 0))
        return WindowNoise(self.num_rounds, self.coefficients[np.newaxis], none, none)

    def _decoder_squares(
        self, momentum: float, rates: FloatArray, nu: FloatArray, norms: FloatArray
    ) -> "_ScaledSquares":
        return _ScaledSquares(self.coefficients, momentum, rates, nu, norms)


class _ScaledSquares:
    """The squared norms of the rows of B with scales, and their gradients, in O(n p).

    Column j of D^-1 T^-1 has entries s_i c_(i - j) for i < j + p. Training adds them up, round by
    round: w' = beta w + s_i c_(i - j) and x' = x + eta_i w', and the squared norm of row i of B is
    the sum of nu_j x^2 over all j. After p rounds a column has no further entries: the sums of nu
    x^2, nu x w and nu w^2 over such columns follow from those of the round before.
    """

    def __init__(
        self,
        noising: FloatArray,
        momentum: float,
        rates: FloatArray,
        nu: FloatArray,
        norms: FloatArray,
    ) -> None:
        """Runs the recursions.

        Args:
          noising: (p,) the coefficients of T^-1.
          momentum: beta.
          rates: (n,) eta.
          nu: (n,) the squares of the diagonal of P^-1.
          norms: (n,) s, those of the columns of P T.
        """
        self._noising, self._momentum, self._rates = noising, momentum, rates
        self._nu, self._norms = nu, norms
        n, beta, late = len(nu), momentum, max(0, len(nu) - len(noising))
        self.squared, ended = np.zeros(n), np.zeros((3, n))
        for start in self._starts():
            for lag, (x, _) in enumerate(columns := self._columns(start)):
                first = start + lag
                self.squared[first : first + len(x)] += nu[start : start + len(x)] * x * x
            count = min(len(x), max(0, late - start))
            places = slice(start + len(noising), start + len(noising) + count)
            x, w = (each[:count] for each in columns[-1])
            ended[:, places] = nu[start : start + count] * np.array([x * x, x * w, w * w])
        of_w = beta**2 * _filtered(beta**2, ended[2])
        crossed = beta * _filtered(beta, ended[1] + np.append(0.0, (rates * of_w)[:-1]))
        self.squared += np.cumsum(ended[0] + rates * (2.0 * crossed + rates * of_w))

    def _starts(self) -> range:
        """Returns the first columns of the blocks in which columns are computed."""
        return range(0, len(self._nu), max(1, _ENTRIES_AT_A_TIME // len(self._noising)))

    def _columns(self, start: int) -> list[tuple[FloatArray, FloatArray]]:
        """Returns, for each lag, x and w of a block's columns that are long enough for the lag."""
        n = len(self._nu)
        x, w = np.zeros((2, min(self._starts().step, n - start)))
        found = []
        for lag, entry in enumerate(self._noising[: n - start]):
            count = min(len(x), n - start - lag)
            rounds = slice(start + lag, start + lag + count)
            w = self._momentum * w[:count] + self._norms[rounds] * entry
            x = x[:count] + self._rates[rounds] * w
            found.append((x, w))
        return found

    def slopes(self, weights: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Returns the gradient of sum_i w_i e_i by nu and by s.

        Args:
          weights: (n,) w.
        """
        n, beta, rates = len(self._nu), self._momentum, self._rates
        width = len(self._noising)
        tails = np.cumsum(weights[::-1])[::-1]
        by_crossed = _filtered_back(beta, 2.0 * beta * rates * tails)
        by_w = _filtered_back(
            beta**2, beta**2 * rates * (rates * tails + np.append(by_crossed[1:], 0.0))
        )
        by_nu, by_norms = np.zeros((2, n))
        for start in self._starts():
            columns = self._columns(start)
            x, w = columns[-1]
            of_z = self._nu[start : start + len(columns[0][0])]
            of_x, of_w = np.zeros((2, len(x)))
            count = min(len(x), max(0, n - width - start))
            ended, x, w = slice(start + width, start + width + count), x[:count], w[:count]
            by = tails[ended], by_crossed[ended], by_w[ended]
            of_x[:count] = of_z[:count] * (2.0 * x * by[0] + w * by[1])
            of_w[:count] = of_z[:count] * (x * by[1] + 2.0 * w * by[2])
            by_nu[start : start + count] += x * x * by[0] + x * w * by[1] + w * w * by[2]
            for lag in range(len(columns) - 1, -1, -1):
                x = columns[lag][0]
                # From this lag on, columns that end before the largest lag are included.
                of_x, of_w = (linear_algebra.padded(each, len(x)) for each in (of_x, of_w))
                rounds = slice(start + lag, start + lag + len(x))
                weighted = x * weights[rounds]
                by_nu[start : start + len(x)] += x * weighted
                of_x += 2.0 * of_z[: len(x)] * weighted
                of_w += rates[rounds] * of_x
                by_norms[rounds] += self._noising[lag] * of_w
                of_w *= beta
        return by_nu, by_norms


def _filtered(kept: float, added: FloatArray) -> FloatArray:
    """Returns the series x_i = kept x_(i-1) + added_i."""
    return np.asarray(scipy.signal.lfilter([1.0], [1.0, -kept], added))


def _filtered_back(kept: float, added: FloatArray) -> FloatArray:
    """Returns the series x_i = kept x_(i+1) + added_i, computed from its end."""
    return np.asarray(_filtered(kept, added[::-1])[::-1])


def banded_inverse(
    workload: object,
    num_bands: int,
    participation: Participation | None = None,
    *,
    coefficients: Literal["optimised", "square_root"] = "optimised",
    equal_column_norms: bool = False,
    error: RoundWeights = "mean",
    max_evaluations: int = 2000,
    show_progress: bool = False,
) -> BandedInverseFactorization:
    """Computes a factorization of a workload with a banded C^-1.

    Use it when no state of noise should be kept, and clients return often.

    The search takes O(n) memory for prefix sums and momentum with constant learning rates, and
    O(n^2) for other workloads.

    Args:
      workload: The workload to optimise for: an int n for the prefix sum of n rounds, a
        ``workloads.Workload``, or an (n, n) array.
      num_bands: The number of bands of C^-1, 1 (independent noise) to n.
      participation: The schema to optimise for; SingleParticipation by default.
      coefficients: ``optimised``, or ``square_root`` for those of the inverse of the workload's
        square root, (1 - x)^(1/2) for the prefix sum. If learning rates change, the workload with
        constant rates is used.
      equal_column_norms: Whether rows and columns are scaled afterwards, C = P T D, so that all
        columns have norm one. For one participation this reduces the mean error by 1 to 3 % and the
        largest by 8 to 15 %. It is possible only for prefix sums and momentum.
      error: The error to minimise: the ``mean`` squared error over rounds, its ``max``, or a sum
        with (n,) weights of the rounds.
      max_evaluations: Give up after this many evaluations of the error.
      show_progress: Whether to show a progress bar on standard error.

    Returns:
      The factorization. The coefficients of C are non-negative, unless clients return and a few
      small negative ones reduce the squared error by at least a share of 5e-4, although the
      sensitivity is then only bounded. The result is a local optimum; there may be others if
      learning rates change irregularly. If the optimiser stopped before its gradient vanished, the
      best coefficients found, with a NotConvergedWarning.

    Raises:
      ValueError: If an argument is out of its range, the workload is not lower triangular with a
        non-zero diagonal, or the schema's participations do not fit into the rounds.

    Example:
      >>> import mf_aggregators as mfa
      >>> make = mfa.factorizations.banded_inverse
      >>> make(4, num_bands=2, coefficients="square_root").noising_matrix()[:, 0]
      array([ 1. , -0.5,  0. ,  0. ])
    """
    problem = Problem.of(
        workload, participation, error, max_evaluations, "the banded inverse", coefficients
    )
    rounds, momentum = problem.pattern.num_rounds, problem.momentum
    num_bands = check_bands(numbers.positive_integer(num_bands, "num_bands"), rounds)
    series = linear_algebra.square_root_coefficients(num_bands, momentum, inverse=True)
    root = linear_algebra.square_root_coefficients(num_bands, inverse=True)
    if coefficients == "optimised" and num_bands > 1:
        with progress_bar(f"banded inverse, {num_bands} bands", show=show_progress) as progress:
            constant = _rows_of_constant_rates(problem.nearest_constant, problem.error)
            found, end = _best(problem, constant, num_bands, [series, root], progress)
            if not problem.has_constant_rates:
                bands = min(num_bands, max(2, int(_MOST_NUMBERS / rounds)))
                rows = _rows_of_any_rates(problem.workload, problem.error, bands)
                starts = [series, linear_algebra.padded(found[:bands], num_bands)]
                found, end = _best(problem, rows, bands, starts, progress)
            series = found
        if end is not None:
            NotConvergedWarning.unless_stationary(end)
    made = BandedInverseFactorization(
        rounds,
        series,
        participation=problem.participation,
        parameters={
            "num_bands": num_bands,
            "coefficients": coefficients,
            **problem.parameters(),
        },
    )
    return made.scaled(problem) if equal_column_norms else made


@dataclasses.dataclass(frozen=True, eq=False)
class _RowsByLags:
    """The numbers from which the squared norms of rows of B are computed for any coefficients.

    Attributes:
      lags: (rows, p) L_i(d), the products of row i of A with itself shifted by d.
      head: (rows, p - 1) the first columns of A.
    """

    lags: FloatArray
    head: FloatArray

    @classmethod
    def of(cls, matrix: FloatArray, num_bands: int) -> "_RowsByLags":
        """Returns the numbers of all n rows of a workload.

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
        """Returns the (p, p) sum of w_i R_i, the quadratic form of a weighted sum of squared norms.

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
        """Returns the (rows,) squared norms x^T R_i x of rows of B.

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


class _Rows(NamedTuple):
    """The error of the rows of B, as a function of the coefficients of C^-1, at sensitivity 1.

    Attributes:
      squared: A function from (p,) coefficients to the mean, weighted sum or maximum of the squared
        norms.
      weighted: The same function with its (p,) gradient; None for a maximum over all rounds.
      each: The rows, for a maximum over all rounds.
    """

    squared: Callable[[FloatArray], float]
    weighted: Objective | None
    each: _RowsByLags | None = None


def _rows_of_constant_rates(workload: Workload, error: RoundError) -> _Rows:
    """Returns the error of rows of B for a workload with constant learning rates."""
    column = workload.coefficients()
    assert column is not None
    objective = DecoderRows.of(workload).objectives(error)[0]

    def weighted(noising: FloatArray) -> tuple[float, FloatArray]:
        value, slope = objective(linear_algebra.padded(noising, len(column)))
        return value, slope[: len(noising)]

    return _Rows(lambda noising: weighted(noising)[0], weighted)


def _rows_of_any_rates(workload: AnyWorkload, error: RoundError, num_bands: int) -> _Rows:
    """Returns the error of rows of B for any workload and at most ``num_bands`` bands."""
    rounds = workload.num_rounds
    inputs.check_rounds(rounds, 8 * rounds, "the matrix of the workload")
    # The workload is scaled so that squares do not overflow.
    rows = _RowsByLags.of(workload.matrix() / workload.largest_entry(), num_bands)

    def squared(noising: FloatArray) -> float:
        return error.of_rows(rows.squares(noising[:num_bands]))

    if error.is_maximum:
        return _Rows(squared, None, rows)
    gram = rows.gram(np.ones(rounds) if error.weights is None else error.weights)

    def weighted(noising: FloatArray) -> tuple[float, FloatArray]:
        gradient = 2.0 * gram[: len(noising), : len(noising)] @ noising
        return 0.5 * float(noising @ gradient), gradient

    return _Rows(squared, weighted)


def _shifted(noising: FloatArray) -> FloatArray:
    """Returns (p - 1, p - 1) factors of A's first columns in columns -1, -2, ... of B."""
    return np.asarray(scipy.linalg.hankel(noising[1:]))


def _best(
    problem: Problem,
    rows: _Rows,
    num_bands: int,
    starts: Sequence[FloatArray],
    progress: ProgressBar,
) -> tuple[FloatArray, scipy.optimize.OptimizeResult]:
    """Returns the (p,) coefficients of C^-1 with the least error, and the search's result.

    Args:
      problem: The participation, and the limits of the search.
      rows: The error that is minimised.
      num_bands: The largest number of bands.
      starts: (p,) coefficients to start from; the result is at least as good as each of them.
      progress: Shows evaluations.
    """
    pattern, schema = problem.pattern, problem.participation.as_schema()

    def squared_error(coefficients: FloatArray) -> float:
        with np.errstate(all="ignore"):
            column = linear_algebra.reciprocal_series(coefficients, pattern.num_rounds)
        if not np.max(np.abs(column)) < _LARGEST_ENTRY:
            return np.inf
        bound = sensitivities.toeplitz_bound(column, pattern.num_rounds, schema)
        return bound.value**2 * rows.squared(coefficients)

    candidates: list[tuple[FloatArray, scipy.optimize.OptimizeResult | None]]
    candidates = [(start, None) for start in starts]
    if rows.weighted is not None and pattern.most == 1:
        # For one participation, the signs of coefficients of C do not matter, because only norms
        # count.
        candidates.append(_of_any_sign(starts[0][:num_bands], problem, rows, 0.0, progress))
    if pattern.most > 1:
        # If clients may take part in every round, independent noise is best.
        candidates.append((np.ones(1), None))
    if pattern.most > 1 or rows.each is not None:
        # The number of bands is limited, so that a step of the search does not take too long.
        bands = min(num_bands, max(2, int((_MOST_OPERATIONS / pattern.num_rounds) ** 0.5)))
        searched = [*starts]
        if bands > pattern.separation:
            # With these bands there are several local optima, so there is another start.
            searched.append(np.append(1.0, -(0.5 ** np.arange(1.0, bands))))
        candidates += [
            _ErrorWithin(each[:bands], problem, rows, progress).minimised() for each in searched
        ]
    padded = [(linear_algebra.padded(each, len(starts[0])), end) for each, end in candidates]
    found, end = min(padded, key=lambda each: squared_error(each[0]))
    if pattern.most > 1 and rows.weighted is not None:
        signed, least = found[:bands], squared_error(found)
        for smoothing in _SMOOTHINGS:
            signed, _ = _of_any_sign(signed, problem, rows, smoothing, progress)
            # If a search finds nothing better, further ones take long and rarely do.
            if not squared_error(signed) < least:
                break
        if squared_error(signed) < (1.0 - _WORTH_A_BOUND) * least:
            return linear_algebra.padded(signed, len(found)), end
    return found, end


def _of_any_sign(
    start: FloatArray, problem: Problem, rows: _Rows, smoothing: float, progress: ProgressBar
) -> tuple[FloatArray, scipy.optimize.OptimizeResult]:
    """Searches for (p,) coefficients of C^-1 without constraints on signs of C, from one start.

    If clients return, entries of C may be negative: the magnitudes of C's entries c bound the
    sensitivity then. They are smoothed, as sqrt(c^2 + s^2), and L-BFGS runs over all coefficients
    but the first. Otherwise it runs over those of B for constant learning rates, of which the error
    is a sum of squares: that takes a tenth of the evaluations.
    """
    pattern, weighted = problem.pattern, rows.weighted
    assert weighted is not None
    impulse = np.eye(1, pattern.num_rounds)[0]
    # The coefficients of (1 - x) (1 - beta x), which is the inverse of the workload.
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
        # If C^-1 changes by x^j, the series c(x) of C changes by -x^j c(x)^2.
        response = linear_algebra.product_of_series(column, column, len(column))
        squared_rows, by_rows = weighted(noising)
        gradient = by_rows / squared_rows
        gradient -= (
            linear_algebra.correlation(by_column, response, len(noising)) / squared_sensitivity
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


class _ErrorWithin:
    """The error over all C^-1 for which sensitivity is exact, with the constraints for that.

    The free variables are the coefficients of C^-1 but the first, and, for the largest error of
    rounds, its logarithm.
    """

    def __init__(
        self, start: FloatArray, problem: Problem, rows: _Rows, progress: ProgressBar
    ) -> None:
        self._start, self._rows, self._progress = start, rows, progress
        self._pattern, self._bands = problem.pattern, len(start)
        self._most_steps = min(problem.max_evaluations, _MOST_STEPS)
        num_rounds = self._pattern.num_rounds
        self._impulse = np.eye(1, num_rounds)[0]
        # From lag b on, where a client may return, coefficients of C must not increase.
        self._falling = np.arange(num_rounds) >= self._pattern.separation
        self._falling[-1] = False
        slack = np.abs(self._slacks_of(_divided(self._impulse, start)))
        self._scales = 1.0 / np.maximum(slack, _LEAST_SLACK)
        self._margins = np.where(slack > _LEAST_SLACK, _MARGIN, 0.0)
        self._each = rows.each
        if rows.each is not None:
            lags, head = rows.each.lags[:, : self._bands], rows.each.head[:, : self._bands - 1]
            self._each = _RowsByLags(lags, head)

    def minimised(self) -> tuple[FloatArray, scipy.optimize.OptimizeResult]:
        """Searches for (p,) coefficients of C^-1 under constraints; also returns how it ended.

        It is SciPy's sequential least-squares programming, with some constraints at first, to which
        those that its result breaks are added.
        """
        free = self._start[1:]
        if self._each is not None:
            free = np.append(free, np.log(np.max(self._each.squares(self._start))))
        chosen = np.zeros(len(self._slacks(free)), dtype=bool)
        first = np.geomspace(1, len(self._impulse), _FIRST_CONSTRAINTS).astype(int)
        chosen[np.concatenate([first, -first]) % len(chosen)] = True
        for _ in range(_MOST_ADDITIONS):
            kept = np.flatnonzero(chosen)
            result = scipy.optimize.minimize(
                self._logarithm,
                free,
                jac=True,
                method="SLSQP",
                constraints={
                    "type": "ineq",
                    "fun": lambda free, kept: self._slacks(free)[kept],
                    "jac": lambda free, kept: self._slopes(free)[kept],
                    "args": (kept,),
                },
                options={"maxiter": self._most_steps, "ftol": _TOLERANCE},
            )
            broken = self._slacks(result.x) < -_TOLERANCE
            if not np.any(broken & ~chosen):
                break
            chosen |= broken
        # The optimiser's status 8 means steps below rounding; others than 0 are limits and
        # failures.
        result.jac, result.status = np.zeros(1), int(result.status not in (0, 8))
        return np.append(1.0, result.x[: self._bands - 1]), result

    def _slacks_of(self, column: FloatArray) -> FloatArray:
        """Returns (n - 1,) slacks: how far coefficients of C are from breaking each constraint."""
        return (column - np.append(column[1:], 0.0) * self._falling)[1:]

    def _series(self, free: FloatArray) -> tuple[FloatArray, FloatArray | None]:
        """Returns the coefficients of C^-1 and of C; None for those of C if they are too large."""
        noising = np.append(1.0, free[: self._bands - 1])
        with np.errstate(all="ignore"):
            column = _divided(self._impulse, noising)
        return noising, column if np.max(np.abs(column)) < _LARGEST_ENTRY else None

    def _logarithm(self, free: FloatArray) -> tuple[float, FloatArray]:
        """Returns the logarithm of the squared error, and its gradient."""
        self._progress.update()
        noising, column = self._series(free)
        if column is None:
            return _INFEASIBLE, np.zeros(len(free))
        squared, by_column = self._pattern.squared_sensitivity(column)
        # If C^-1 changes by x^j, the series c(x) of C changes by -x^j c(x)^2.
        response = _divided(column, noising)
        slope = -linear_algebra.correlation(by_column, response, self._bands) / squared
        if self._rows.weighted is None:
            return float(np.log(squared) + free[-1]), np.append(slope[1:], 1.0)
        error, by_noising = self._rows.weighted(noising)
        return float(np.log(squared) + np.log(error)), (slope + by_noising / error)[1:]

    def _slacks(self, free: FloatArray) -> FloatArray:
        """Returns scaled slacks of all constraints: on C if clients return, and on rows."""
        noising, column = self._series(free)
        found = np.empty(0)
        if self._pattern.most > 1:
            found = np.full(len(self._scales), -1.0)
            if column is not None:
                found = self._slacks_of(column) * self._scales - self._margins
        if self._each is None:
            return found
        return np.append(found, free[-1] - np.log(self._each.squares(noising)))

    def _slopes(self, free: FloatArray) -> FloatArray:
        """Returns the slopes of all slacks by the free variables."""
        noising, column = self._series(free)
        found = np.zeros((len(self._scales) * (self._pattern.most > 1), len(free)))
        if len(found) and column is not None:
            series = np.concatenate([np.zeros(self._bands - 1), _divided(column, noising)])
            shifted = np.lib.stride_tricks.sliding_window_view(series, self._bands - 1)[:, ::-1]
            by_column = shifted[1:] * self._falling[:, np.newaxis] - shifted[:-1]
            found[:, : self._bands - 1] = by_column[1:] * self._scales[:, np.newaxis]
        if self._each is None:
            return found
        slopes = -2.0 * self._each.slopes(noising) / self._each.squares(noising)[:, np.newaxis]
        by_bound = np.ones((len(slopes), 1))
        return np.concatenate([found, np.append(slopes[:, 1:], by_bound, axis=1)])


def _divided(series: FloatArray, noising: FloatArray) -> FloatArray:
    """Returns an (n,) series divided by that of C^-1, with a small relative error in each entry."""
    return np.asarray(scipy.signal.lfilter([1.0], noising, series))
