"""Noise rows many rounds at a time: each block of rows is one matrix product.

Row by row, a recursion reads all that it keeps of earlier rounds in every round: with b
bands, b - 1 rows of the model's size. In a block (``NoiseRecursion.block_weights``), what is
kept is read once for all of its rows.

Blocks start small and double (rounds 0, 1, 2 to 3, 4 to 7, ...) up to their largest size,
so that no round has to wait for a whole large block, and so that each block can be made
while the one before it is used.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from mf_aggregators.noise.recursions import NoiseRecursion


@dataclasses.dataclass(frozen=True, eq=False)
class Blocks:
    """The blocks in which the rows of a recursion are made.

    Attributes:
      recursion: The recursion.
      starts: (number of blocks + 1,) int64: block k has the rounds ``starts[k]`` to
        ``starts[k + 1] - 1``; the last entry is the number of rounds.
    """

    recursion: NoiseRecursion
    starts: np.ndarray

    @classmethod
    def of(cls, recursion: NoiseRecursion, plans: Sequence[int] = ()) -> "Blocks":
        """Returns the blocks in which the rows of a recursion are made.

        Args:
          recursion: The recursion.
          plans: The rounds of the plans that were extended to this one, increasing. A block ends
            with each of them, so that rows are products of the same shapes as before.

        Returns:
          A function of the arguments alone, so that a run that is resumed elsewhere makes the
          same rows.
        """
        largest = recursion.rows_per_block
        starts = [0]
        for end in (*plans, recursion.num_rounds):
            begin = starts[-1]
            while starts[-1] < min(end, begin + largest):
                size = min(largest, max(1, starts[-1] - begin))
                starts.append(min(end, starts[-1] + size))
            if starts[-1] < end:
                # All later blocks are of one size.
                starts += [*range(starts[-1] + largest, end, largest), end]
        return cls(recursion, np.array(starts, dtype=np.int64))

    @property
    def num_blocks(self) -> int:
        """The number of blocks."""
        return len(self.starts) - 1

    @property
    def largest_block(self) -> int:
        """The rows of the largest block."""
        return int(np.max(np.diff(self.starts)))

    @property
    def rows_kept(self) -> int:
        """The rows that are needed at any time: for the block in use and for the next one."""
        return max(self.largest_block, self.recursion.num_earlier_rows) + self.largest_block

    def rounds(self, block: int) -> tuple[int, int]:
        """Returns the first round of a block and the one after its last."""
        return int(self.starts[block]), int(self.starts[block + 1])

    def num_earlier_rows(self, block: int) -> int:
        """Returns how many rows before a block its weights are for."""
        return min(self.recursion.num_earlier_rows, int(self.starts[block]))

    def first_row_of_z(self, block: int) -> int:
        """Returns the first row of Z that a block needs; the last one is that of its last row."""
        return self.recursion.first_row_of_z(int(self.starts[block]))

    def weights(self, block: int) -> np.ndarray:
        """Returns the weights of a block, see ``NoiseRecursion.block_weights``."""
        return self.recursion.unit.block_weights(*self.rounds(block))

    def distinct_weights(self) -> np.ndarray:
        """Returns, for each block, the first block that is known to have the same weights.

        Matrices that are the same in all rounds, or repeat themselves, need few weights.

        Returns:
          (number of blocks,) int64.
        """
        first_of: dict[object, int] = {}
        signatures = (
            self.recursion.unit.block_signature(*self.rounds(block))
            for block in range(self.num_blocks)
        )
        return np.array(
            [first_of.setdefault(signature, block) for block, signature in enumerate(signatures)]
        )
