"""The squared rows of B = A C^-1 for a Toeplitz C^-1 of few bands, and any workload A.

With C^-1 = sum_t x_t S^t over t < p, where S^t moves rows down by t, row i of B is
sum_t x_t A_i S^t for row A_i of A. So its squared norm is x^T R_i x, with

    R_i[s, t] = sum_(j >= 0) A[i, j + s] A[i, j + t]
              = L_i(s - t) - sum_(m = 1..t) A[i, s - m] A[i, t - m]    for s >= t,

where L_i(d) = sum_(a >= 0) A[i, a + d] A[i, a]. Rows of weighted sums of R_i, of gradients R_i x
and of norms all follow from the (n, p) numbers L_i(d) and the first p - 1 columns of A.

If A^-1 has few bands, so that A_i = sum_k f_k A_(i-k) + g e_i, products of shifted rows follow
from those of the rows before, and nothing of the size of A is needed.

**The worst row.** The logarithm of the largest norm is the least s above all l_i = log x^T R_i x.
A barrier mu takes the minimum of s - mu sum_i log(s - l_i) over s in its place, which is smooth in
x and for one s: there sum_i mu / (s - l_i) = 1, and these terms are weights of the rows. That s is
at most n mu above the largest l_i.
"""

import abc
import dataclasses
import functools
from collections.abc import Iterator

import numpy as np
import scipy.linalg
import scipy.signal

from mf_aggregators import workloads
from mf_aggregators.factorizations._round_errors import RoundError
from mf_aggregators.factorizations._toeplitz_search import (
    error_weights,
    with_momentum,
    with_momentum_adjoint,
)
from mf_aggregators.kernel.numbers import FloatArray, IntArray
from mf_aggregators.linear_algebra import power_series
from mf_aggregators.workloads import Workload

# Rows whose numbers are in memory at a time where all are used once.
_NUMBERS_AT_A_TIME = 1 << 20
_ROWS_AT_A_TIME = 4096
# Relative to the largest multiplier of a row.
_LEAST_MULTIPLIER = 1e-6
_STEPS_OF_BOUND, _ROUNDING_OF_BOUND = 50, 1e-13


@dataclasses.dataclass(frozen=True, eq=False)
class RowsByLags:
    """What the squared norms of some rows of B follow from.

    Attributes:
      lags: (rows, p) L_i(d), the products of row i of A with itself moved by d.
      head: (rows, p - 1) the first columns of A.
    """

    lags: FloatArray
    head: FloatArray

    @classmethod
    def of(cls, workload: Workload | FloatArray, num_bands: int) -> "RowsByLags":
        """Returns those of all n rows.

        Args:
          workload: A, known by its name, or (n, n) and lower triangular.
          num_bands: p, at most n.
        """
        if isinstance(workload, Workload):
            column = workload.coefficients()
            bands = workloads.inverse_bands(workload)
            if column is not None:
                return cls._of_toeplitz(column, num_bands)
            if bands is not None:
                return next(_by_recursion(bands, num_bands, workload.num_rounds))
            workload = workload.matrix()
        num_rounds = len(workload)
        lags = [
            np.einsum("ij,ij->i", workload[:, lag:], workload[:, : num_rounds - lag])
            for lag in range(num_bands)
        ]
        return cls(np.stack(lags, axis=1), workload[:, : num_bands - 1].copy())

    @classmethod
    def _of_toeplitz(cls, column: FloatArray, num_bands: int) -> "RowsByLags":
        """Returns those of the Toeplitz workload with the first column (n,)."""
        num_rounds = len(column)
        lags = np.zeros((num_rounds, num_bands))
        head = np.zeros((num_rounds, num_bands - 1))
        for lag in range(num_bands):
            lags[lag:, lag] = np.cumsum(column[lag:] * column[: num_rounds - lag])
        for j in range(num_bands - 1):
            head[j:, j] = column[: num_rounds - j]
        return cls(lags, head)

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


class MeanOfRows:
    """The logarithm of a weighted sum of squared norms."""

    def __init__(self, gram: FloatArray) -> None:
        """Takes the (p, p) quadratic form of the sum."""
        self._gram = gram

    def logarithm(self, noising: FloatArray, barrier: float) -> float:
        """Returns the value for (p,) coefficients of C^-1, whatever the barrier."""
        del barrier
        return float(np.log(noising @ self._gram @ noising))

    def derivatives(self, noising: FloatArray, barrier: float) -> tuple[FloatArray, FloatArray]:
        """Returns its (p,) gradient and (p, p) second derivatives."""
        del barrier
        along = self._gram @ noising
        square = noising @ along
        gradient = 2.0 * along / square
        return gradient, 2.0 * self._gram / square - np.outer(gradient, gradient)


class WorstOfRows:
    """The logarithm of the largest squared norm, smoothed by a barrier."""

    def __init__(self, rows: RowsByLags) -> None:
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
        rows = RowsByLags(self._rows.lags[matter], self._rows.head[matter])
        slopes = 2.0 * rows.slopes(noising) / squares[matter, np.newaxis]
        bends, changes = bends[matter], (bends - multipliers)[matter]
        total = 2.0 * self._rows.gram(multipliers / squares)
        gradient = total @ noising
        total += (slopes * changes[:, np.newaxis]).T @ slopes
        of_bound = bends @ slopes
        return gradient, total - np.outer(of_bound, of_bound) / np.sum(bends)


class Rows(abc.ABC):
    """What is minimised beside the sensitivity: the rows of B, by the coefficients of C^-1."""

    @property
    def is_sum(self) -> bool:
        """Whether it is a weighted sum over the rows, of which :meth:`by_sums` knows."""
        return True

    @abc.abstractmethod
    def squared(self, noising: FloatArray) -> float:
        """The weighted sum of the squared norms, or their maximum."""

    @abc.abstractmethod
    def by_sums(self, sums: FloatArray) -> tuple[float, FloatArray]:
        """A weighted sum, and its gradient by p or all n running sums of C^-1.

        Where it is by all of them, those after the first p are equal to the last one of these.
        """

    @abc.abstractmethod
    def of_bands(self, num_bands: int) -> MeanOfRows | WorstOfRows:
        """The same for few bands, with second derivatives."""


@dataclasses.dataclass(frozen=True, eq=False)
class RowsOfConstantRates(Rows):
    """Rows of a Toeplitz B, of coefficients b(x) = s(x) / (1 - beta x) for running sums s.

    Attributes:
      weights: (n,) weights of the squares of the coefficients.
      momentum: beta.
    """

    weights: FloatArray
    momentum: float

    @classmethod
    def of(cls, error: RoundError, momentum: float) -> "RowsOfConstantRates":
        """Returns those of an error: row i has the squared norm b_0^2 + ... + b_i^2."""
        if error.is_maximum:
            return cls(np.ones(error.num_rounds), momentum)
        if error.weights is None:
            return cls(error_weights(error.num_rounds, "mean"), momentum)
        return cls(np.cumsum(error.weights[::-1])[::-1], momentum)

    def squared(self, noising: FloatArray) -> float:
        """The weighted sum of b_t^2."""
        sums = np.cumsum(power_series.padded(noising, len(self.weights)))
        return float(self.weights @ np.square(with_momentum(sums, self.momentum)))

    def by_sums(self, sums: FloatArray) -> tuple[float, FloatArray]:
        """The weighted sum, and its gradient by all n running sums."""
        all_sums = np.pad(sums, (0, len(self.weights) - len(sums)), mode="edge")
        decoder = with_momentum(all_sums, self.momentum)
        squared = float(self.weights @ np.square(decoder))
        return squared, with_momentum_adjoint(2.0 * self.weights * decoder, self.momentum)

    def of_bands(self, num_bands: int) -> MeanOfRows:
        """The quadratic form of the coefficients of C^-1."""
        workload = with_momentum(np.ones(len(self.weights)), self.momentum)
        everything = np.arange(len(self.weights))
        return MeanOfRows(gram_of_shifts(workload, self.weights, everything, num_bands, 0.0))


@dataclasses.dataclass(frozen=True, eq=False)
class RowsOfAnyRates(Rows):
    """Rows of B for any workload.

    Attributes:
      rows: Of as many bands as there is memory for; more are zero.
      error: Which error of the rounds.
    """

    rows: RowsByLags
    error: RoundError

    @property
    def num_bands(self) -> int:
        """The number of bands p."""
        return self.rows.lags.shape[1]

    @property
    def is_sum(self) -> bool:
        """Whether it is no maximum."""
        return not self.error.is_maximum

    def squared(self, noising: FloatArray) -> float:
        """The mean or weighted sum of the squared norms, or their maximum."""
        return self.error.of_rows(self.rows.squares(noising[: self.num_bands]))

    def by_sums(self, sums: FloatArray) -> tuple[float, FloatArray]:
        """The weighted sum, and its gradient by the p running sums."""
        noising = np.diff(sums, prepend=0.0)
        gradient = 2.0 * self._gram @ noising
        squared = 0.5 * float(noising @ gradient)
        gradient[:-1] -= gradient[1:].copy()
        return squared, gradient

    @functools.cached_property
    def _gram(self) -> FloatArray:
        weights = self.error.weights
        return self.rows.gram(np.ones(len(self.rows.lags)) if weights is None else weights)

    def of_bands(self, num_bands: int) -> MeanOfRows | WorstOfRows:
        """The same for at most as many bands."""
        if not self.error.is_maximum:
            return MeanOfRows(self._gram[:num_bands, :num_bands])
        rows = self.rows
        return WorstOfRows(RowsByLags(rows.lags[:, :num_bands], rows.head[:, : num_bands - 1]))


def gram_of_shifts(
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


def squared_rows(inverse_bands: FloatArray, noising: FloatArray) -> FloatArray:
    """Returns the (n,) squared norms of the rows of B, in O(n + p) memory.

    Args:
      inverse_bands: (n, w) the bands of A^-1, ``inverse_bands[i, t] = A^-1[i, i - t]``.
      noising: (p,) the coefficients of C^-1.
    """
    size = len(noising)
    parts = _by_recursion(inverse_bands, size, max(1, _NUMBERS_AT_A_TIME // size))
    return np.concatenate([part.squares(noising) for part in parts])


def _shifted(noising: FloatArray) -> FloatArray:
    """(p - 1, p - 1): what entries of A's first columns are times in columns -1, -2, ... of B."""
    return np.asarray(scipy.linalg.hankel(noising[1:]))


def _by_recursion(bands: FloatArray, num_bands: int, at_a_time: int) -> Iterator[RowsByLags]:
    """Blocks of rows, from the (n, w) bands of A^-1."""
    num_rounds, width = bands.shape
    factors = -bands[:, 1:] / bands[:, :1]
    gains = 1.0 / bands[:, 0]
    known, lags = width - 1, 2 * num_bands - 1
    # Of the last w - 1 rows, the last one first: products of row k with row l moved by -p + 1 to
    # p - 1, entries from the diagonal to the left, and first entries.
    products = np.zeros((known, known, lags))
    near = np.zeros((known, num_bands + known))
    heads = np.zeros((known, num_bands - 1))
    for start in range(0, num_rounds, at_a_time):
        stop = min(num_rounds, start + at_a_time)
        block = RowsByLags(
            np.empty((stop - start, num_bands)), np.empty((stop - start, num_bands - 1))
        )
        for i in range(start, stop):
            factor, gain = factors[i], gains[i]
            # Row k has its entry of column i - d at near[k, d - 1 - k].
            with_earlier = (factor @ products.reshape(known, known * lags)).reshape(known, lags)
            for k in range(known):
                after = min(num_bands + k, lags)
                with_earlier[k, after:] += gain * near[k, : lags - after]
            entries = np.zeros(num_bands + known)
            entries[0] = gain
            for k in range(known):
                entries[k + 1 :] += factor[k] * near[k, : num_bands + known - k - 1]
            with_itself = factor @ with_earlier[:, num_bands - 1 :: -1] + gain * entries[:num_bands]
            head = factor @ heads
            if i < num_bands - 1:
                head[i] += gain
            block.lags[i - start] = with_itself
            block.head[i - start] = head
            if known:
                products[1:, 1:] = products[:-1, :-1].copy()
                # Symmetric in the lag to the last bit: rounding that is not would grow.
                products[0, 0, num_bands - 1 :] = with_itself
                products[0, 0, : num_bands - 1] = with_itself[:0:-1]
                products[0, 1:] = with_earlier[:-1]
                products[1:, 0] = with_earlier[:-1, ::-1]
                near = np.concatenate([entries[np.newaxis], near[:-1]])
                heads = np.concatenate([head[np.newaxis], heads[:-1]])
        yield block
