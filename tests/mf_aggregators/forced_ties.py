"""Random words that tie with the thresholds of the table of a discrete Gaussian."""

import numpy as np

from mf_aggregators.noise import discrete_gaussian


def words_that_tie(seed: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns words whose fractions equal the thresholds in up to all of their words.

    Args:
      seed: Of the columns and of what follows a tie.
      count: How many draws.

    Returns:
      (3, count) uint64 words and (levels, 3, count) uint64 further words.
    """
    random = np.random.default_rng(seed)
    table = discrete_gaussian.table()
    levels = len(table.further)
    mask, shift = np.uint64(2**table.column_bits - 1), np.uint64(table.column_bits)
    drawn = random.integers(0, 2**64, (levels + 1, 3, count), dtype=np.uint64)
    for index in range(3):
        columns = drawn[0, index] & mask
        first = table.packed[columns.astype(int)] >> shift
        thresholds = np.concatenate([first[np.newaxis], table.further[:, columns.astype(int)]])
        # The word after the equal ones is the threshold's, one more, one less, or a random one.
        words = drawn[:, index] >> shift
        equal = np.arange(levels + 1)[:, np.newaxis] < random.integers(0, levels + 2, count)
        near = thresholds + random.integers(-1, 2, thresholds.shape).astype(np.uint64)
        near &= np.uint64(2**table.fraction_bits - 1)
        words = np.where(random.random(words.shape) < 0.5, near, words)
        words = np.where(equal, thresholds, words)
        drawn[:, index] = words << shift | (drawn[:, index] & mask)
    return drawn[0], drawn[1:]
