"""Rows of the noise as combinations of rows of Z: C^-1 is known, and not C."""

import dataclasses
from typing import ClassVar

import numpy as np

from mf_aggregators.kernel.arrays import FloatArray, RealArray
from mf_aggregators.noise.recursions.recursion import NoiseRecursion, ToeplitzNoise

# A block that draws earlier rows of Z again: larger blocks draw fewer.
_ROWS_PER_REDRAWING_BLOCK = 128
# No dense matrix of more rounds is put into a graph.
_MOST_DENSE_ROUNDS = 512


@dataclasses.dataclass(frozen=True)
class IndependentNoise(NoiseRecursion):
    """C is the identity: row i of the noise is row i of Z.

    Attributes:
      num_rounds: n.
    """

    num_rounds: int

    def __post_init__(self) -> None:
        self._freeze_num_rounds()

    @property
    def diagonal(self) -> FloatArray:
        """Ones, (n,) float64."""
        return np.ones(self.num_rounds)

    @property
    def is_toeplitz(self) -> bool:
        """Always."""
        return True

    def divided_by(self, divisor: float) -> NoiseRecursion:
        """Returns the noising matrix of the identity over ``divisor``, which has one band."""
        return ToeplitzNoise(self.num_rounds, np.array([1.0 / divisor]))

    def _with_unit_diagonal(self) -> NoiseRecursion:
        return self

    def earlier(self, i: int, history: RealArray) -> FloatArray:
        """Returns zeros: earlier rounds add nothing."""
        return np.zeros(history.shape[1:])

    def following(
        self, i: int, history: RealArray, row_of_z: RealArray, row: RealArray
    ) -> RealArray:
        """Returns the history, which is empty."""
        return history

    def block_transition(self, start: int, end: int) -> FloatArray:
        """Returns zeros."""
        return np.zeros((end - start, end - start))

    def block_signature(self, start: int, end: int) -> object:
        """Blocks of one size have the same transition."""
        return end - start

    def noising_matrix(self) -> FloatArray:
        """Returns the identity, (n, n) float64."""
        return np.eye(self.num_rounds)


@dataclasses.dataclass(frozen=True, eq=False)
class DenseNoise(NoiseRecursion):
    """C is dense: row i of the noise is a combination of all rows of Z so far.

    Attributes:
      inverse: C^-1, (n, n) float64, lower triangular; entries above the diagonal become zero.
    """

    draws_earlier_rows_of_z: ClassVar[bool] = True

    inverse: FloatArray

    def __post_init__(self) -> None:
        self._freeze("inverse", (len(self.inverse), len(self.inverse)))
        # A row at a time: a comparison of whole copies costs twice the memory.
        if any(np.any(row[i + 1 :]) for i, row in enumerate(self.inverse)):
            lower = np.tril(self.inverse)
            lower.setflags(write=False)
            object.__setattr__(self, "inverse", lower)

    @property
    def num_rounds(self) -> int:
        """The number of rounds n."""
        return int(self.inverse.shape[0])

    @property
    def rows_of_z_per_round(self) -> int:
        """The rows of Z that the last round draws, n."""
        return self.num_rounds

    @property
    def rows_per_block(self) -> int:
        """The most rows that are worth making at once."""
        return _ROWS_PER_REDRAWING_BLOCK

    @property
    def fits_in_graph(self) -> bool:
        """Whether the matrix is small enough to be a constant of a graph."""
        return self.num_rounds <= _MOST_DENSE_ROUNDS

    @property
    def diagonal(self) -> FloatArray:
        """The diagonal of the matrix, (n,) float64."""
        return np.diagonal(self.inverse)

    def divided_by(self, divisor: float) -> NoiseRecursion:
        """Returns the noising matrix of C / divisor."""
        return DenseNoise(self.inverse * divisor)

    def _with_unit_diagonal(self) -> NoiseRecursion:
        return DenseNoise(self.inverse / self.diagonal[:, np.newaxis])

    def earlier(self, i: int, history: RealArray) -> FloatArray:
        """Combines all rows of Z before the round's, which are the history."""
        return np.tensordot(self.inverse[i, :i], history[:i], axes=1)

    def following(
        self, i: int, history: RealArray, row_of_z: RealArray, row: RealArray
    ) -> RealArray:
        """Keeps the row of Z."""
        history[i] = row_of_z
        return history

    def row_norms(self) -> FloatArray:
        """Returns the (n,) L2 norms of the rows of the matrix."""
        return np.asarray(np.linalg.norm(self.inverse, axis=1))

    def block_transition(self, start: int, end: int) -> FloatArray:
        """Returns rows of the matrix, without its diagonal."""
        return np.tril(self.inverse[start:end, :end], start - 1)

    def noising_matrix(self) -> FloatArray:
        """Returns C^-1, (n, n) float64."""
        return self.inverse


@dataclasses.dataclass(frozen=True, eq=False)
class WindowNoise(NoiseRecursion):
    """C^-1 is banded plus low rank: row i combines the last p rows of Z and r accumulators.

    ``Y[i] = row_scales[i] (sum_{t=0}^{p-1} window[i, t] Z[i - t] + left[i] . beta_i)``
    with ``beta_i = beta_{i-1} + right[j] Z[j]``, j = i - p + 1 (Denisov et al. Alg. 3;
    without accumulators, a banded C^-1).

    Attributes:
      num_rounds: n.
      window: (n, p) float64, or (1, p) where all rounds have the same; entries for rows
        before the first become zero.
      left: (n, r) float64; r = 0 without accumulators.
      right: (n, r) float64.
      row_scales: (n,) float64, or None for ones.
    """

    draws_earlier_rows_of_z: ClassVar[bool] = True

    num_rounds: int
    window: FloatArray
    left: FloatArray
    right: FloatArray
    row_scales: FloatArray | None = None

    def __post_init__(self) -> None:
        self._freeze_num_rounds()
        rounds, rank = self.num_rounds, np.shape(self.left)[-1]
        self._freeze("window", (1 if len(self.window) == 1 else rounds, None))
        self._freeze("left", (rounds, rank))
        self._freeze("right", (rounds, rank))
        if self.row_scales is not None:
            self._freeze("row_scales", (rounds,))
        if not self.window_length:
            raise ValueError("window of WindowNoise must have a column for its own round.")
        self._clear_lags_before_first_round("window")

    @property
    def window_length(self) -> int:
        """The rows of Z that one row of the noise needs, p."""
        return int(self.window.shape[1])

    @property
    def num_state_vectors(self) -> int:
        """The number of accumulators r."""
        return int(self.left.shape[1])

    @property
    def rows_of_z_per_round(self) -> int:
        """The rows of Z that a round draws, p."""
        return self.window_length

    @property
    def mean_rows_of_z_per_round(self) -> float:
        """The rows of Z that a row draws on average: with accumulators, one that leaves too."""
        return super().mean_rows_of_z_per_round + int(self.num_state_vectors > 0)

    @property
    def rows_per_block(self) -> int:
        """The most rows that are worth making at once."""
        return _ROWS_PER_REDRAWING_BLOCK

    @property
    def diagonal(self) -> FloatArray:
        """The first of the window's numbers of each round, scaled, (n,) float64."""
        entries = np.broadcast_to(self.window[:, 0], self.num_rounds)
        if self.window_length == 1:
            # The row of Z leaves the window in its own round.
            entries = entries + np.sum(self.left * self.right, axis=1)
        return entries if self.row_scales is None else entries * self.row_scales

    @property
    def is_toeplitz(self) -> bool:
        """Whether all rounds have the same window, and there is nothing else."""
        return len(self.window) == 1 and not self.num_state_vectors

    def divided_by(self, divisor: float) -> NoiseRecursion:
        """Returns the noising matrix of C / divisor."""
        return dataclasses.replace(self, window=self.window * divisor, left=self.left * divisor)

    def _with_unit_diagonal(self) -> NoiseRecursion:
        if self.is_toeplitz:
            window, left = self.window / self.window[0, 0], self.left
        else:
            scales: float | FloatArray = 1.0 if self.row_scales is None else self.row_scales
            rows = (scales / self.diagonal)[:, np.newaxis]
            window, left = self.window * rows, self.left * rows
        return WindowNoise(self.num_rounds, window, left, self.right)

    def earlier(self, i: int, history: RealArray) -> FloatArray:
        """Combines the earlier rows of Z in the window, and the accumulators."""
        length = self.window_length
        ring, accumulators = history[:length], history[length:]
        # Rows so far only: neither the terms nor their order depend on the length of the ring.
        ring = ring[:i]
        lags = (i - np.arange(len(ring))) % length
        weights = self.window[i if len(self.window) > 1 else 0][lags]
        combined = np.tensordot(np.where((lags > 0) & (lags <= i), weights, 0.0), ring, axes=1)
        if self.num_state_vectors:
            combined = combined + np.tensordot(self.left[i], accumulators, axes=1)
            # What leaves the window in this round counts already.
            if 0 <= i - length + 1 < i:
                gain = self.left[i] @ self.right[i - length + 1]
                combined += gain * ring[(i + 1) % length]
        return combined

    def following(
        self, i: int, history: RealArray, row_of_z: RealArray, row: RealArray
    ) -> RealArray:
        """Puts the row of Z into the window, and adds what leaves it to the accumulators."""
        length, oldest = self.window_length, i - self.window_length + 1
        history[i % length] = row_of_z
        if self.num_state_vectors and oldest >= 0:
            history[length:] += np.multiply.outer(self.right[oldest], history[oldest % length])
        return history

    def largest_vector_norms(self) -> FloatArray:
        """Returns the (r,) norms of the accumulators at the end."""
        return np.asarray(np.linalg.norm(self.right, axis=0))

    def block_transition(self, start: int, end: int) -> FloatArray:
        """The window's diagonals, and accumulators of what leaves the window within the block."""
        length, first_row_of_z = self.window_length, self.first_row_of_z(start)
        rows_of_z = np.arange(first_row_of_z, end)
        lags = np.arange(start, end)[:, np.newaxis] - rows_of_z
        windows = self.window[start:end] if len(self.window) > 1 else self.window
        windows = np.broadcast_to(windows, (end - start, length))
        inside = (lags >= 0) & (lags < length)
        of_z = np.where(inside, np.take_along_axis(windows, np.clip(lags, 0, length - 1), 1), 0.0)
        left, right = self.left[start:end], self.right[first_row_of_z:end]
        # The accumulators at the start hold rows up to start - length.
        added = (rows_of_z > start - length) & (lags >= length - 1)
        of_z = of_z + np.where(added, left @ right.T, 0.0)
        # A row's own row of Z has no weight here, even where it leaves the window at once.
        weights = np.concatenate([left, np.where(lags > 0, of_z, 0.0)], axis=1)
        leaves = (rows_of_z > start - length) & (rows_of_z <= end - length)
        kept = np.eye(self.num_state_vectors)
        following = np.concatenate([kept, np.where(leaves, right.T, 0.0)], axis=1)
        return np.concatenate([weights, following])

    def block_signature(self, start: int, end: int) -> object:
        """With one window for all rounds and nothing else, blocks of one size are the same."""
        if not self.is_toeplitz:
            return super().block_signature(start, end)
        return end - start, start - self.first_row_of_z(start)
