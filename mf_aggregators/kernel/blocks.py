"""Blocks of rounds whose rows of noise are made at once.

Row by row, all that is kept of earlier rounds is read in every round: with b
bands, b - 1 rows of the model's size. In a block, whose rows are one matrix
product, what is kept is read once for all of them. Blocks start small and double (rounds 0, 1,
2 to 3, 4 to 7, ...) up to their largest size, so that no round has to wait for a whole large block,
and so that each block can be made while the one before it is used.
"""

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from mf_aggregators.kernel import noising_matrices
from mf_aggregators.kernel.arrays import FloatArray, IntArray
from mf_aggregators.kernel.rows import NoiseRecursion

# A block of rows that draws each row of Z once: larger blocks read what is kept less often, and
# hold more rows. A block that draws earlier rows of Z again: larger blocks draw fewer.
_ROWS_PER_BLOCK, _ROWS_PER_REDRAWING_BLOCK = 64, 128
# With many bands, what is kept is large, and a block of rows is to add little to it.
_MANY_EARLIER_ROWS = 128
_FEWEST_ROWS_PER_BLOCK = 24
_EARLIER_ROWS_PER_ROW_OF_BLOCK = 14


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
        """Returns the transition of a block, see ``noising_matrices.transition``."""
        return noising_matrices.transition(self.recursion.normalised, *self.rounds(block))

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
                first_of.setdefault(noising_matrices.signature(normalised, *ends), block)
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
