"""C^-1 as matrices: of all rounds, of a block of rounds, and the norms of its rows.

The rows are linear in Z, so those of rounds s to e - 1 together are

    rows = Z + W_earlier * (rows before s) + W_state * (state vectors at s) + W * (driving rows)

for a normalised noising matrix. The driving rows are rows of Z if rows follow from those, and the
block's own rows otherwise, each of which enters only later ones. The state vectors at e follow in
the same way. These weights, the *transition* of a block, are small and the same for all coordinates
of the model.

Rows are made in *blocks*. Row by row, all that is kept of earlier rounds is read in every round:
with b bands, b - 1 rows of the model's size. The rows of a block are one matrix product, which
reads it once. Blocks start small and double (rounds 0, 1, 2 to 3, 4 to 7, ...) up to their largest
size, so that no round has to wait for a whole large block, and so that each block can be made while
the one before it is used.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence

import numpy as np
import scipy.linalg

from mf_aggregators.kernel.numbers import FloatArray, IntArray
from mf_aggregators.kernel.rows import (
    BandedNoise,
    DenseNoise,
    NoiseRecursion,
    StateSpaceNoise,
    WindowNoise,
)

# Rows of weights for rows of Z that are computed at once.
_ROWS = 512
# Rows whose covariance is computed at once, at least.
_FEWEST_ROWS = 64
# A block of rows that draws each row of Z once: larger blocks read what is kept less often, and
# hold more rows. A block that draws earlier rows of Z again: larger blocks draw fewer.
_ROWS_PER_BLOCK, _ROWS_PER_REDRAWING_BLOCK = 64, 128
# With many bands, what is kept is large, and a block of rows is to add little to it.
_MANY_EARLIER_ROWS = 128
_FEWEST_ROWS_PER_BLOCK = 24
_EARLIER_ROWS_PER_ROW_OF_BLOCK = 14


@functools.singledispatch
def transition(normalised: NoiseRecursion, start: int, end: int) -> FloatArray:
    """Returns the transition of rounds ``start`` to ``end - 1`` of a normalised matrix.

    Args:
      normalised: A normalised noising matrix.
      start: The first round.
      end: The round after the last.

    Returns:
      (end - start + m, earlier rows + m + driving rows) float64 for m state vectors. First what
      the rows are beside the row of Z of their round, and then the state vectors at ``end``:
      from the last ``num_earlier_rows`` rows before ``start`` (oldest first; fewer in the
      first rounds), the state vectors at ``start``, and the driving rows. Those are the rows of
      Z from ``first_row_of_z(start)`` on if ``draws_earlier_rows_of_z``, and the block's own rows
      otherwise. No row has a weight for itself or for a later one.
    """
    raise TypeError(f"no noising matrix: {normalised!r}")


@transition.register
def _of_bands(normalised: BandedNoise, start: int, end: int) -> FloatArray:
    """The entries of C off its diagonal, for the rows before the block and its own."""
    size, num_earlier = end - start, min(normalised.num_earlier_rows, start)
    matrix = np.zeros((size, num_earlier + size))
    bands = normalised.bands[start:end] if len(normalised.bands) > 1 else normalised.bands
    for row, weights in enumerate(np.broadcast_to(bands, (size, bands.shape[1]))):
        last = num_earlier + row
        lags = min(len(weights), last + 1)
        matrix[row, last - lags + 1 : last] = -weights[1:lags][::-1]
    return matrix


@transition.register
def _of_dense(normalised: DenseNoise, start: int, end: int) -> FloatArray:
    """Rows of the matrix, without its diagonal."""
    return np.tril(normalised.inverse[start:end, :end], start - 1)


@transition.register
def _of_window(normalised: WindowNoise, start: int, end: int) -> FloatArray:
    """The window's diagonals, and accumulators of what leaves the window within the block."""
    length, first_row_of_z = normalised.window_length, normalised.first_row_of_z(start)
    rows_of_z = np.arange(first_row_of_z, end)
    lags = np.arange(start, end)[:, np.newaxis] - rows_of_z
    windows = normalised.window[start:end] if len(normalised.window) > 1 else normalised.window
    windows = np.broadcast_to(windows, (end - start, length))
    inside = (lags >= 0) & (lags < length)
    of_z = np.where(inside, np.take_along_axis(windows, np.clip(lags, 0, length - 1), 1), 0.0)
    left, right = normalised.left[start:end], normalised.right[first_row_of_z:end]
    # The accumulators at the start hold rows up to start - length.
    added = (rows_of_z > start - length) & (lags >= length - 1)
    of_z = of_z + np.where(added, left @ right.T, 0.0)
    # A row's own row of Z has no weight here, even where it leaves the window at once.
    weights = np.concatenate([left, np.where(lags > 0, of_z, 0.0)], axis=1)
    leaves = (rows_of_z > start - length) & (rows_of_z <= end - length)
    kept = np.eye(normalised.num_state_vectors)
    following = np.concatenate([kept, np.where(leaves, right.T, 0.0)], axis=1)
    return np.concatenate([weights, following])


@transition.register
def _of_state_vectors(normalised: StateSpaceNoise, start: int, end: int) -> FloatArray:
    """The recurrence applied to one unit vector for each state vector and each row."""
    vectors, size = normalised.num_state_vectors, end - start
    rows, state = np.zeros((size, vectors + size)), np.eye(vectors, vectors + size)
    for row, phase in enumerate(normalised.phases[start:end]):
        rows[row] = normalised.outputs[phase] @ state
        state = state[normalised.sources[phase]] * normalised.decays[phase][:, np.newaxis]
        state[:, vectors + row] += normalised.feedbacks[phase]
    return np.concatenate([rows, state])


def is_toeplitz(normalised: NoiseRecursion) -> bool:
    """Returns whether a normalised noising matrix is known to be the same in all rounds.

    Args:
      normalised: The normalised noising matrix.
    """
    if isinstance(normalised, StateSpaceNoise):
        return bool(np.all(normalised.phases == normalised.phases[0]))
    if isinstance(normalised, WindowNoise):
        return len(normalised.window) == 1 and not normalised.num_state_vectors
    return isinstance(normalised, BandedNoise) and len(normalised.bands) == 1


def signature(normalised: NoiseRecursion, start: int, end: int) -> object:
    """Returns an object that is equal for blocks that are known to have equal transitions.

    Args:
      normalised: A normalised noising matrix.
      start: The first round.
      end: The round after the last.
    """
    if isinstance(normalised, StateSpaceNoise):
        return normalised.phases[start:end].tobytes()
    if not is_toeplitz(normalised):
        return "rounds", start, end
    first = start - normalised.first_row_of_z(start)
    return end - start, min(normalised.num_earlier_rows, start), first


def following_by_phase(rows: StateSpaceNoise) -> FloatArray:
    """Returns how the state vectors follow from one round to the next, for each phase.

    Args:
      rows: The rows.

    Returns:
      (P, m, m + 1) float64: the next state vectors from the state vectors and the row.
    """
    phases, vectors = len(rows.gains), rows.num_state_vectors
    kept = np.eye(vectors)[rows.sources] * rows.decays[:, :, np.newaxis]
    return np.concatenate([kept, rows.feedbacks.reshape(phases, vectors, 1)], axis=2)


def row_norms(normalised: NoiseRecursion) -> FloatArray:
    """Returns the (n,) L2 norms of the rows of a normalised noising matrix.

    They are the standard deviations of the rows' numbers, if those of Z are one.

    Args:
      normalised: A normalised noising matrix.

    Returns:
      float64; infinite or NaN where a norm is beyond floats.
    """
    with np.errstate(all="ignore"):
        if isinstance(normalised, StateSpaceNoise):
            return _state_space_norms(normalised)[0]
        if normalised.draws_earlier_rows_of_z:
            return np.sqrt(_squares_of_redrawn(normalised))
        return np.sqrt(_squares_of_substituted(normalised))


def _squares_of_redrawn(normalised: NoiseRecursion) -> FloatArray:
    """The (n,) squares of row norms, where rows follow from rows of Z and their accumulators."""
    num_rounds, vectors = normalised.num_rounds, normalised.num_state_vectors
    right = normalised.right if isinstance(normalised, WindowNoise) else np.zeros((num_rounds, 0))
    squares = np.empty(num_rounds)
    for start in range(0, num_rounds, _ROWS):
        end = min(start + _ROWS, num_rounds)
        weights = transition(normalised, start, end)[: end - start]
        of_vectors, of_z = np.split(weights, [vectors], axis=1)
        # The accumulators have the rows of Z before those that are drawn.
        added = right[: normalised.first_row_of_z(start)]
        accumulated = np.sum(of_vectors @ (added.T @ added) * of_vectors, axis=1)
        squares[start:end] = 1.0 + np.sum(of_z**2, axis=1) + accumulated
    return squares


def _squares_of_substituted(normalised: NoiseRecursion) -> FloatArray:
    """The (n,) squares of row norms, from the covariances of blocks of rows: O(n b^2)."""
    num_rounds, num_earlier = normalised.num_rounds, normalised.num_earlier_rows
    size = max(num_earlier, _FEWEST_ROWS)
    squares, covariance = np.empty(num_rounds), np.zeros((0, 0))
    for start in range(0, num_rounds, size):
        end = min(start + size, num_rounds)
        before, own = np.split(transition(normalised, start, end), [len(covariance)], axis=1)
        one = np.eye(end - start)
        inverse = scipy.linalg.solve_triangular(one - own, one, lower=True, check_finite=False)
        moved = inverse @ before
        whole = inverse @ inverse.T + moved @ covariance @ moved.T
        squares[start:end] = np.diagonal(whole)
        covariance = whole[len(whole) - num_earlier :, len(whole) - num_earlier :]
    return squares


def state_vector_norms(normalised: NoiseRecursion) -> FloatArray:
    """Returns (m,) bounds on the L2 norms of the state vectors, as combinations of rows of Z.

    Args:
      normalised: A normalised noising matrix.
    """
    if isinstance(normalised, StateSpaceNoise):
        return _state_space_norms(normalised)[1]
    if isinstance(normalised, WindowNoise):
        # The accumulators only grow.
        return np.asarray(np.linalg.norm(normalised.right, axis=0))
    return np.zeros(normalised.num_state_vectors)


def _state_space_norms(normalised: StateSpaceNoise) -> tuple[FloatArray, FloatArray]:
    """The (n,) norms of a normalised matrix's rows, and (m,) the largest of its state vectors.

    They follow from the covariance of the state vectors, from round to round, if Z is independent
    with variance one.
    """
    vectors = normalised.num_state_vectors
    squares, most = np.empty(normalised.num_rounds), np.zeros(vectors)
    covariance = np.zeros((vectors, vectors))
    of_phases = following_by_phase(normalised)
    for i, phase in enumerate(normalised.phases):
        outputs, of_row = normalised.outputs[phase], of_phases[phase, :, -1]
        squares[i] = 1.0 + outputs @ covariance @ outputs / normalised.gains[phase] ** 2
        step = of_phases[phase, :, :-1] + np.multiply.outer(of_row, outputs)
        of_z = of_row * normalised.gains[phase]
        covariance = step @ covariance @ step.T + np.multiply.outer(of_z, of_z)
        np.maximum(most, np.diagonal(covariance), out=most)
    return np.sqrt(squares), np.sqrt(most)


@dataclasses.dataclass(frozen=True, eq=False)
class Blocks:
    """The blocks in which rows are made.

    Attributes:
      recursion: The noising matrix.
      starts: (number of blocks + 1,) int64: block k has the rounds ``starts[k]`` to
        ``starts[k + 1] - 1``; the last entry is the number of rounds.
    """

    recursion: NoiseRecursion
    starts: IntArray

    @classmethod
    def of(cls, recursion: NoiseRecursion, horizons: Sequence[int] = ()) -> "Blocks":
        """Returns the blocks in which rows are made.

        Args:
          recursion: The noising matrix.
          horizons: The rounds of the horizons that were extended to this one, increasing. A block
            ends with each of them, so that rows are products of the same shapes as before.

        Returns:
          A function of the arguments alone, so that a run that is resumed elsewhere makes the
          same rows.
        """
        largest = rows_per_block(recursion)
        starts = [0]
        for end in (*horizons, recursion.num_rounds):
            begin = starts[-1]
            while starts[-1] < end:
                size = min(largest, max(1, starts[-1] - begin))
                starts.append(min(end, starts[-1] + size))
        return cls(recursion, np.array(starts, dtype=np.int64))

    @classmethod
    def single(cls, recursion: NoiseRecursion) -> "Blocks":
        """Returns blocks of one row each.

        Args:
          recursion: The noising matrix.
        """
        return cls(recursion, np.arange(recursion.num_rounds + 1))

    @property
    def num_blocks(self) -> int:
        """The number of blocks."""
        return len(self.starts) - 1

    def rounds(self, block: int) -> tuple[int, int]:
        """Returns the first round of a block and the one after its last."""
        return int(self.starts[block]), int(self.starts[block + 1])

    def num_earlier_rows(self, block: int) -> int:
        """Returns how many rows before a block its weights are for."""
        return min(self.recursion.num_earlier_rows, int(self.starts[block]))

    def first_row_of_z(self, block: int) -> int:
        """Returns the first row of Z that a block needs; the last one is that of its last row."""
        return self.recursion.first_row_of_z(int(self.starts[block]))

    def transition(self, block: int) -> FloatArray:
        """Returns the transition of a block, see :func:`transition`."""
        return transition(self.recursion.normalised, *self.rounds(block))

    def distinct_transitions(self) -> IntArray:
        """Returns, for each block, the first block that is known to have the same transition.

        Matrices that are the same in all rounds, or repeat themselves, have few transitions.

        Returns:
          (number of blocks,) int64.
        """
        first_of: dict[object, int] = {}
        normalised = self.recursion.normalised
        return np.array(
            [
                first_of.setdefault(signature(normalised, *ends), block)
                for block, ends in enumerate(itertools.pairwise(self.starts.tolist()))
            ]
        )


def rows_per_block(recursion: NoiseRecursion) -> int:
    """Returns the most rows that are worth making at once.

    Args:
      recursion: The noising matrix.
    """
    if recursion.draws_earlier_rows_of_z:
        return _ROWS_PER_REDRAWING_BLOCK
    earlier = recursion.num_earlier_rows
    if earlier < _MANY_EARLIER_ROWS:
        return _ROWS_PER_BLOCK
    return max(_FEWEST_ROWS_PER_BLOCK, earlier // _EARLIER_ROWS_PER_ROW_OF_BLOCK)
