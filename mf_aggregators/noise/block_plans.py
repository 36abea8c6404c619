"""Noise rows many rounds at a time: each block of rows is one matrix product.

Row by row, a recursion reads all that it keeps of earlier rounds in every round: with b
bands, b - 1 rows of the model's size. But any recursion is linear, so the rows of rounds
s to e - 1 together are

    rows = W_earlier * (rows before s) + W_state * (state vectors at s) + W_z * (rows of Z),

and what is kept is read once for all of them. The weights are small matrices that depend
on the recursion alone; coordinates of the model are independent of one another. Each
coordinate's state vectors at e follow in the same way.

Blocks start small and double (rounds 0, 1, 2 to 3, 4 to 7, ...) up to their largest size,
so that no round has to wait for a whole large block, and so that each block can be made
while the one before it is used.
"""

import dataclasses

import numpy as np
import scipy.linalg

from mf_aggregators.noise.recursions import (
    BandedNoise,
    DenseNoise,
    IndependentNoise,
    NoiseRecursion,
    StateSpaceNoise,
    ToeplitzNoise,
    WindowNoise,
)

# A block of a recursion that draws each row of Z once: larger blocks read what is kept less
# often, and hold more rows. With many bands, what is kept is large, and a block is to add
# little to it.
_ROWS_PER_BLOCK = 64
_MANY_EARLIER_ROWS = 128
_FEWEST_ROWS_PER_BLOCK = 24
_EARLIER_ROWS_PER_ROW_OF_BLOCK = 14
# A block of a recursion that draws earlier rows of Z again for each block: larger blocks draw
# fewer.
_ROWS_PER_REDRAWING_BLOCK = 128


@dataclasses.dataclass(frozen=True, eq=False)
class BlockPlan:
    """How the rows of a recursion are made in blocks.

    Attributes:
      recursion: The recursion.
      starts: (number of blocks + 1,) int64: block k has the rounds ``starts[k]`` to
        ``starts[k + 1] - 1``; the last entry is the number of rounds.
    """

    recursion: NoiseRecursion
    starts: np.ndarray

    @property
    def num_blocks(self) -> int:
        """The number of blocks."""
        return len(self.starts) - 1

    @property
    def largest_block(self) -> int:
        """The rows of the largest block."""
        return int(np.max(np.diff(self.starts)))

    @property
    def most_earlier_rows(self) -> int:
        """The most rows before a block that the block needs: b - 1 for b bands, else none."""
        if isinstance(self.recursion, BandedNoise | ToeplitzNoise):
            return self.recursion.num_bands - 1
        return 0

    @property
    def num_state_vectors(self) -> int:
        """The state vectors at the start of a block: accumulators, or of the recurrence."""
        if isinstance(self.recursion, StateSpaceNoise):
            return self.recursion.num_state_vectors
        if isinstance(self.recursion, WindowNoise):
            return self.recursion.num_accumulators
        return 0

    @property
    def rows_kept(self) -> int:
        """The rows that are needed at any time: for the block in use and for the next one."""
        return max(self.largest_block, self.most_earlier_rows) + self.largest_block

    @property
    def row_scales(self) -> np.ndarray | None:
        """(n,) float64 factors of the rows when they are used, or None for ones.

        Toeplitz noise with row scales recurs on its unscaled rows.
        """
        return self.recursion.row_scales if isinstance(self.recursion, ToeplitzNoise) else None

    @property
    def draws_earlier_rows_of_z(self) -> bool:
        """Whether blocks need rows of Z from before their first round."""
        return isinstance(self.recursion, DenseNoise | WindowNoise)

    def num_earlier_rows(self, block: int) -> int:
        """Returns how many rows before a block its weights are for."""
        return min(self.most_earlier_rows, int(self.starts[block]))

    def first_row_of_z(self, block: int) -> int:
        """Returns the first row of Z that a block needs; the last one is that of its last row."""
        start = int(self.starts[block])
        if isinstance(self.recursion, DenseNoise):
            return 0
        if isinstance(self.recursion, WindowNoise):
            return max(0, start - self.recursion.window_length + 1)
        return start

    def weights(self, block: int) -> np.ndarray:
        """Returns the weights of a block as one matrix.

        Args:
          block: k.

        Returns:
          (rows of the block + m, earlier rows + m + rows of Z) float64 for m state vectors:
          the block's rows and then the next state vectors, from the earlier rows (oldest
          first), the state vectors and the rows of Z from :meth:`first_row_of_z` on.
        """
        start, end = int(self.starts[block]), int(self.starts[block + 1])
        recursion = self.recursion
        if isinstance(recursion, IndependentNoise):
            return np.eye(end - start)
        if isinstance(recursion, DenseNoise):
            return recursion.noising_matrix[start:end, :end]
        if isinstance(recursion, WindowNoise):
            return _window_weights(recursion, self.first_row_of_z(block), start, end)
        if isinstance(recursion, StateSpaceNoise):
            return _state_space_weights(recursion, start, end)
        return _banded_weights(recursion, self.num_earlier_rows(block), start, end)

    def distinct_weights(self) -> np.ndarray:
        """Returns, for each block, the first block that is known to have the same weights.

        Matrices that are the same in all rounds, or repeat themselves, need few weights.

        Returns:
          (number of blocks,) int64.
        """
        first_of: dict[object, int] = {}
        return np.array(
            [first_of.setdefault(self._signature(block), block) for block in range(self.num_blocks)]
        )

    def _signature(self, block: int) -> object:
        """Blocks with equal signatures have equal weights."""
        start, end = int(self.starts[block]), int(self.starts[block + 1])
        recursion = self.recursion
        if isinstance(recursion, IndependentNoise):
            return end - start
        if isinstance(recursion, ToeplitzNoise):
            return end - start, self.num_earlier_rows(block)
        if isinstance(recursion, StateSpaceNoise):
            return recursion.phases[start:end].tobytes()
        if (
            isinstance(recursion, WindowNoise)
            and len(recursion.window) == 1
            and not recursion.num_accumulators
            and recursion.row_scales is None
        ):
            return end - start, start - self.first_row_of_z(block)
        return ("of its own", block)


def plan(recursion: NoiseRecursion) -> BlockPlan:
    """Returns the blocks in which the rows of a recursion are made.

    Args:
      recursion: The recursion.

    Returns:
      A plan that is a function of the recursion alone, so that a run that is resumed
      elsewhere makes the same rows.
    """
    largest = _ROWS_PER_BLOCK
    if isinstance(recursion, DenseNoise | WindowNoise):
        largest = _ROWS_PER_REDRAWING_BLOCK
    elif isinstance(recursion, BandedNoise | ToeplitzNoise):
        earlier = recursion.num_bands - 1
        if earlier >= _MANY_EARLIER_ROWS:
            largest = max(_FEWEST_ROWS_PER_BLOCK, earlier // _EARLIER_ROWS_PER_ROW_OF_BLOCK)
    num_rounds = recursion.num_rounds
    starts = [0]
    while starts[-1] < min(num_rounds, largest):
        size = min(largest, max(1, starts[-1]))
        starts.append(min(num_rounds, starts[-1] + size))
    if starts[-1] < num_rounds:
        # All later blocks are of one size.
        starts += [*range(starts[-1] + largest, num_rounds, largest), num_rounds]
    return BlockPlan(recursion, np.array(starts, dtype=np.int64))


def _banded_weights(
    recursion: BandedNoise | ToeplitzNoise, num_earlier: int, start: int, end: int
) -> np.ndarray:
    """From C Y = Z for the block's rows: Y = C_block^-1 (Z - C_earlier Y_earlier)."""
    size = end - start
    matrix = np.zeros((size, num_earlier + size))
    for row in range(size):
        last = num_earlier + row
        lags = min(recursion.num_bands, last + 1)
        matrix[row, last - lags + 1 : last + 1] = recursion.weights(start + row)[:lags][::-1]
    of_earlier, of_block = matrix[:, :num_earlier], matrix[:, num_earlier:]
    right = np.concatenate([-of_earlier, np.eye(size)], axis=1)
    return np.asarray(scipy.linalg.solve_triangular(of_block, right, lower=True))


def _window_weights(
    recursion: WindowNoise, first_row_of_z: int, start: int, end: int
) -> np.ndarray:
    """The window's diagonals, and accumulators of what leaves the window within the block."""
    length, accumulators = recursion.window_length, recursion.num_accumulators
    rows_of_z = np.arange(first_row_of_z, end)
    rounds = np.arange(start, end)[:, np.newaxis]
    lags = rounds - rows_of_z
    windows = recursion.window[start:end] if len(recursion.window) > 1 else recursion.window
    windows = np.broadcast_to(windows, (end - start, length))
    inside = (lags >= 0) & (lags < length)
    of_z = np.where(inside, np.take_along_axis(windows, np.clip(lags, 0, length - 1), 1), 0.0)
    left, right = recursion.left[start:end], recursion.right[first_row_of_z:end]
    # The accumulators at the start hold rows up to start - length.
    added = (rows_of_z > start - length) & (lags >= length - 1)
    of_z = of_z + np.where(added, left @ right.T, 0.0)
    weights = np.concatenate([left, of_z], axis=1)
    if recursion.row_scales is not None:
        weights = weights * recursion.row_scales[start:end, np.newaxis]
    leaves = (rows_of_z > start - length) & (rows_of_z <= end - length)
    following = np.concatenate([np.eye(accumulators), np.where(leaves, right.T, 0.0)], axis=1)
    return np.concatenate([weights, following])


def _state_space_weights(recursion: StateSpaceNoise, start: int, end: int) -> np.ndarray:
    """The recurrence applied to one unit vector for each state vector and row of Z."""
    vectors, size = recursion.num_state_vectors, end - start
    state = np.eye(vectors, vectors + size)
    rows = np.zeros((size, vectors + size))
    for row, phase in enumerate(recursion.phases[start:end]):
        rows[row] = recursion.outputs[phase] @ state
        rows[row, vectors + row] += recursion.gains[phase]
        state = state[recursion.sources[phase]] * recursion.decays[phase][:, np.newaxis]
        state += np.multiply.outer(recursion.feedbacks[phase], rows[row])
        state[:, vectors + row] += recursion.inputs[phase]
    return np.concatenate([rows, state])


def weights_of_phases(recursion: StateSpaceNoise) -> np.ndarray:
    """Returns the weights of a block of one round, for each phase of a recurrence.

    Args:
      recursion: The recursion, of m state vectors and P phases.

    Returns:
      (P, 1 + m, m + 1) float64: the row and then the next state vectors, from the state
      vectors and the row of Z.
    """
    every_phase = dataclasses.replace(recursion, phases=np.arange(len(recursion.gains)))
    return np.array(
        [_state_space_weights(every_phase, phase, phase + 1) for phase in every_phase.phases]
    )
