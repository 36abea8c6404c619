"""Random words that tie with the thresholds of the table of a discrete Gaussian."""

import numpy as np

from mf_aggregators.kernel import draws


def words_that_tie(seed: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns words of which two in three tie, in up to all of their words.

    Args:
      seed: Of the columns and of what follows a tie.
      count: How many draws.

    Returns:
      (count, 3) uint32 words, and (ties, TIE_WORDS) uint32 further words.
    """
    random = np.random.default_rng(seed)
    table = draws.table()
    mask, shift = np.uint32(2**table.column_bits - 1), np.uint32(table.column_bits)
    words = random.integers(0, 2**32, (count, 3), dtype=np.uint32)
    columns = words & mask
    thresholds = table.packed[columns] >> shift
    words = np.where(random.random((count, 3)) < 2 / 3, thresholds << shift | columns, words)
    further = table.further[columns[words >> shift == thresholds]]
    # The word after the equal ones is the threshold's, one more, one less, or a random one.
    near = further + random.integers(0, 3, further.shape, dtype=np.uint32) - np.uint32(1)
    other = random.integers(0, 2**32, further.shape, dtype=np.uint32)
    drawn = np.where(random.random(further.shape) < 0.5, near, other)
    num_equal = random.integers(0, table.further.shape[1] + 1, len(further))
    equal = np.arange(further.shape[1]) < num_equal[:, np.newaxis]
    return words, np.where(equal, further, drawn)
