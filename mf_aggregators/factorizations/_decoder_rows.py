"""The squared norms of the rows of B = A C^-1, for a Toeplitz C^-1 and any workload A.

Row i of B has the squared norm e_i, which is quadratic in the coefficients g of C^-1. A search
needs sum_i w_i e_i for some weights w of the rounds, and its slope by g.

* For a Toeplitz workload B is Toeplitz: e_i is a running sum of the squares of a(x) g(x).
* Training is a sequence of recursions, A = F_q ... F_1 (``Workload.recursions``), which takes
  O(n^1.5) operations and floats (times a logarithm).

**Recursions.** Rounds come in blocks of m, about n^0.5. With the rows U_k of the Toeplitz matrix of
g, block k of B is P_k U_k + R_k S_k, where S_k has the last row of each stage before the block, and
S_(k+1) is a combination of rows of U_k and S_k. Products with U_k are convolutions. The sum over
rounds is that of

    tr(P^T w P U U^T) + 2 tr(P^T w R S U^T) + tr(R^T w R S S^T).

The first is a quadratic form of g with m bands, as entries of U U^T are running sums of products
g_t g_(t+d), and the slopes of the others go through the blocks backwards.
"""

import abc
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

import numpy as np
import scipy.fft
import scipy.signal

from mf_aggregators import linear_algebra
from mf_aggregators.factorizations.searches import Objective, RoundError
from mf_aggregators.kernel.numbers import ComplexArray, FloatArray
from mf_aggregators.workloads import Recursion, Workload

# The most rounds of a workload that is not Toeplitz: for more, memory is gigabytes.
_MOST_ROUNDS = 1 << 16
# The orders of the norms over rounds that are minimised in place of the maximum. The last norm is
# at most 0.4 % above the maximum for 2,052 rounds.
_ORDERS = (16.0, 128.0, 2048.0)
# C^-1 as coefficients, or as its states.
_Noising = TypeVar("_Noising")


class DecoderRows(abc.ABC, Generic[_Noising]):
    """The squared norms of the rows of B = A C^-1, as functions of the coefficients of C^-1.

    Attributes:
      num_rounds: The number of rounds n.
      is_increasing: Whether each row of B is at least as long as the row before, for any C^-1.
    """

    is_increasing = False
    num_rounds: int

    @abc.abstractmethod
    def squared(self, noising: _Noising) -> FloatArray:
        """Returns (n,) squared norms e of the rows of B.

        Args:
          noising: (n,) g.
        """

    @abc.abstractmethod
    def weighing(self, weights: FloatArray) -> Callable[[_Noising], tuple[float, _Noising]]:
        """Returns a function from (n,) g to sum_i w_i e_i and the (n,) slope of the sum.

        Args:
          weights: (n,) w.
        """

    @staticmethod
    def of(workload: Workload) -> "DecoderRows[FloatArray]":
        """Returns the decoder rows of a workload, by its structure.

        Args:
          workload: A.

        Raises:
          ValueError: If A is not Toeplitz and has too many rounds, so that memory would be
            gigabytes.
        """
        if workload.coefficients() is not None:
            return _ToeplitzRows(workload)
        rounds = workload.num_rounds
        if rounds > _MOST_ROUNDS:
            raise ValueError(
                f"errors of a Toeplitz matrix take too long for {rounds} rounds of a workload that "
                f"changes with the rounds, above {_MOST_ROUNDS}: use blt or banded."
            )
        return _RecursionRows(workload.recursions())

    def objectives(
        self, error: RoundError
    ) -> tuple[Callable[[_Noising], tuple[float, _Noising]], ...]:
        """Returns the functions of C^-1 that a search minimises one after another for an error.

        Args:
          error: The error.

        Returns:
          The error itself or, for a maximum that may be of any round, norms of rising order. Each
          is a function from (n,) coefficients of C^-1, or its states, to a value and its slopes.
        """
        n = self.num_rounds
        if error.is_maximum and self.is_increasing:
            return (self.weighing(np.eye(1, n, n - 1)[0]),)
        if not error.is_maximum:
            return (self.weighing(error.weighed(np.ones(n), None)[1]),)

        def norm(noising: _Noising, order: float) -> tuple[float, _Noising]:
            # The norm is the sum of the e_i with these weights, and has the slopes of this sum. It
            # is at least the maximum, and at most n^(1/order) times the maximum.
            value, weights = error.weighed(self.squared(noising), order)
            return value, self.weighing(weights)(noising)[1]

        return tuple(functools.partial(norm, order=order) for order in _ORDERS)


class _ToeplitzRows(DecoderRows[FloatArray]):
    """Decoder rows for a Toeplitz workload, as running sums of squared coefficients."""

    is_increasing = True

    def __init__(self, workload: Workload) -> None:
        self.num_rounds = workload.num_rounds
        self._filters = workload.recursions()

    def squared(self, noising: FloatArray) -> FloatArray:
        return np.cumsum(np.square(self._decoder(noising)))

    def weighing(self, weights: FloatArray) -> Objective:
        # A coefficient occurs in all rows from its lag on, so it has the sum of their weights.
        tails = 2.0 * np.cumsum(weights[::-1])[::-1]

        def weighted(noising: FloatArray) -> tuple[float, FloatArray]:
            decoder = self._decoder(noising)
            slope = tails * decoder
            return 0.5 * float(slope @ decoder), self._decoder(slope[::-1])[::-1]

        return weighted

    def _decoder(self, noising: FloatArray) -> FloatArray:
        """Returns the coefficients of the product of a(x) and a series."""
        return _filtered(self._filters, noising)


class _RecursionRows(DecoderRows[FloatArray]):
    """Decoder rows for a workload that is a sequence of recursions, by blocks of rounds."""

    def __init__(self, recursions: Sequence[Recursion]) -> None:
        self.num_rounds = len(recursions[0].kept)
        left = list(recursions)
        # If the first stages do not change over the rounds, they are applied to g as filters.
        self._filters: list[Recursion] = []
        while left and left[0].is_constant:
            self._filters.append(left.pop(0))
        self._size = size = 1 << max(4, int(np.ceil(np.log2(2.0 * np.sqrt(self.num_rounds)))))
        self._count = count = -(-self.num_rounds // size)
        self._length = scipy.fft.next_fast_len(2 * count * size, real=True)
        stages, carried = len(left), np.arange(len(left))
        blocks = np.zeros((count, size, size + stages))
        blocks[:, :, :size] = np.eye(size)
        last = np.empty((count, stages, size + stages))
        for b, stage in enumerate(left):
            kept, added = (self._in_blocks(each) for each in (stage.kept, stage.added))
            blocks *= added[:, :, np.newaxis]
            blocks[:, 0, size + carried[b]] += kept[:, 0]
            for i in range(1, size):
                blocks[:, i] += kept[:, i, np.newaxis] * blocks[:, i - 1]
            last[:, b] = blocks[:, -1]
        self._own, self._carried = blocks[:, :, :size].copy(), blocks[:, :, size:].copy()
        self._last_own, self._last_carried = last[:, :, :size].copy(), last[:, :, size:].copy()

    def _in_blocks(self, values: FloatArray) -> FloatArray:
        """Returns (n,) values as rows of blocks, filled up with zeros."""
        longer = linear_algebra.padded(values, self._count * self._size)
        return longer.reshape(self._count, self._size)

    def squared(self, noising: FloatArray) -> FloatArray:
        size = self._size
        series = _filtered(self._filters, noising)
        longer, spectrum = self._spectrum(series)
        grams = np.empty((self._count, size, size))
        for lag in range(size):
            sums = np.cumsum(longer[lag:] * longer[: len(longer) - lag])
            entries = self._in_blocks(sums)[:, : size - lag]
            rows = np.arange(size - lag)
            grams[:, rows, rows + lag] = grams[:, rows + lag, rows] = entries
        squares = np.einsum("kij,kij->ki", self._own @ grams, self._own)
        for k, state in enumerate(self._states(spectrum)):
            transformed = scipy.fft.rfft(state, self._length)
            products = scipy.fft.irfft(transformed * spectrum, self._length)
            crossed = self._own[k] @ products[:, k * size : (k + 1) * size].T
            carried = self._carried[k]
            squares[k] += 2.0 * np.einsum("ij,ij->i", crossed, carried)
            squares[k] += np.einsum("ij,ij->i", carried @ (state @ state.T), carried)
        return np.asarray(squares.ravel()[: self.num_rounds])

    def weighing(self, weights: FloatArray) -> Objective:
        size, rounds = self._size, self._count * self._size
        weighted_own = self._own * self._in_blocks(weights)[:, :, np.newaxis]
        own_squares = weighted_own.transpose(0, 2, 1) @ self._own
        mixed = self._carried.transpose(0, 2, 1) @ weighted_own
        weighted_carried = self._carried * self._in_blocks(weights)[:, :, np.newaxis]
        squares = weighted_carried.transpose(0, 2, 1) @ self._carried
        form = np.zeros((size, self._count, size))
        for lag in range(size):
            form[lag, :, : size - lag] = np.diagonal(own_squares, lag, 1, 2)
        form = form.reshape(size, rounds)
        np.cumsum(form[:, ::-1], axis=1, out=form[:, ::-1])

        def weighted(noising: FloatArray) -> tuple[float, FloatArray]:
            series = _filtered(self._filters, noising)
            longer, spectrum = self._spectrum(series)
            slope = form[0] * longer
            for lag in range(1, size):
                slope[:-lag] += form[lag, :-lag] * longer[lag:]
                slope[lag:] += form[lag, :-lag] * longer[:-lag]
            states = list(self._states(spectrum))
            # This loop computes the slopes by the states, from the last block to the first.
            by_state, total = np.zeros_like(states[0]), np.zeros(len(spectrum), np.complex128)
            for k in range(self._count - 1, 0, -1):
                state, own = states[k], self._placed(mixed[k], k)
                total += np.sum(own * np.conj(scipy.fft.rfft(state, self._length)), axis=0)
                if k + 1 < self._count:
                    later = np.conj(scipy.fft.rfft(by_state, self._length))
                    total += np.sum(self._placed(self._last_own[k], k) * later, axis=0)
                moved = self._correlated(own, spectrum, k * size)
                by_state = squares[k] @ state + self._last_carried[k].T @ by_state + moved
            if self._count > 1:
                later = np.conj(scipy.fft.rfft(by_state, self._length))
                total += np.sum(self._placed(self._last_own[0], 0) * later, axis=0)
            slope += scipy.fft.irfft(total, self._length)[:rounds]
            slope = 2.0 * slope[: self.num_rounds]
            return 0.5 * float(slope @ series), _filtered(self._filters, slope[::-1])[::-1]

        return weighted

    def _spectrum(self, series: FloatArray) -> tuple[FloatArray, ComplexArray]:
        """Returns a series filled up with zeros, and its Fourier transform."""
        longer = linear_algebra.padded(series, self._count * self._size)
        return longer, scipy.fft.rfft(longer, self._length)

    def _states(self, spectrum: ComplexArray) -> Iterator[FloatArray]:
        """Yields the state S_k of each block, (q, n)."""
        state = np.zeros((self._last_own.shape[1], self._count * self._size))
        for k in range(self._count):
            yield state
            added = self._correlated(
                self._placed(self._last_own[k], k), spectrum, (k + 1) * self._size
            )
            state = self._last_carried[k] @ state + added

    def _placed(self, values: FloatArray, k: int) -> ComplexArray:
        """Returns the Fourier transform of (q, m) values, placed in the rounds of block k."""
        longer = np.zeros((len(values), self._count * self._size))
        longer[:, k * self._size : (k + 1) * self._size] = values
        return np.asarray(scipy.fft.rfft(longer, self._length))

    def _correlated(self, placed: ComplexArray, spectrum: ComplexArray, rounds: int) -> FloatArray:
        """Returns combinations of rows of the Toeplitz matrix, cut off after a number of rounds."""
        found = scipy.fft.irfft(placed * np.conj(spectrum), self._length)
        found = found[:, : self._count * self._size]
        found[:, rounds:] = 0.0
        return np.asarray(found)


def _filtered(filters: Sequence[Recursion], series: FloatArray) -> FloatArray:
    """Applies recursions that do not change over the rounds to an (n,) series, in turn."""
    for stage in filters:
        taps = [stage.added[0]], [1.0, -stage.kept[-1]]
        series = np.asarray(scipy.signal.lfilter(*taps, series))
    return series
