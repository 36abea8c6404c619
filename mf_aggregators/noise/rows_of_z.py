"""Rows of Z from random bits: a function of (seed, row, coordinate) alone.

An entry is a discrete Gaussian (``discrete_gaussian``): an integer number of steps. Its law is
that of rounded normal numbers up to a proven failure probability, which
``accounting.noise_failure`` charges to delta.

A row of Z is made in chunks (``row_layout.CHUNK``). Sixteen coordinates have three blocks of the
row's random bits, one each for X1, X2 and X3: coordinate c has word c modulo 16 of the blocks
3 floor(c / 16), and so on. Each chunk has a stream of further words for its ties, in a range of
blocks of its own, and the j-th tie of the chunk has the j-th group of words in it.
"""

import math

import numpy as np

from mf_aggregators import validation
from mf_aggregators.noise import discrete_gaussian, random_bits, row_layout
from mf_aggregators.noise.discrete_gaussian import TIE_WORDS
from mf_aggregators.noise.random_bits import WORDS_PER_BLOCK, NoiseSource
from mf_aggregators.noise.row_layout import CHUNK

# Which rows of noise a seed gives: a run must not go on with rows of another format. Version 0.5.0
# had 1, and version 1.0.0 had 3.
NOISE_FORMAT = 4

# Of an entry, where the standard deviation is one: rounded up, so that no noise is less.
STEP = math.nextafter(1.0 / discrete_gaussian.STANDARD_DEVIATION, 1.0)
# X1, X2 and X3.
WORDS_PER_COORDINATE = 3
# Where the words for ties of chunk 0 begin, and how many blocks each chunk has for them, which is
# enough if everything ties.
FIRST_TIE_BLOCK = 2**60
TIE_BLOCKS_PER_CHUNK = 2**17
_COORDINATE_LIMIT = 2**56
# Coordinates whose temporaries stay in a processor's cache.
_TILE = 2**13


def integers(
    source: NoiseSource, seed: np.ndarray, row: int, first_coordinate: int, count: int
) -> np.ndarray:
    """Returns ``count`` coordinates of a row of Z, in steps.

    Which words decide a tie depends on the ties before it in its chunk. So a range that begins
    within a chunk costs as much as one from the chunk's first coordinate on.

    Args:
      source: Where random bits come from.
      seed: (2,) int64: the stream's secret.
      row: The row of Z, from 0.
      first_coordinate: The first coordinate, from 0.
      count: How many.

    Returns:
      (count,) int64: multiplied by ``STEP``, numbers of standard deviation one.

    Raises:
      ValueError: If a number is out of its range.
    """
    first_coordinate = validation.integer_at_least(first_coordinate, 0, "first_coordinate")
    count = validation.integer_at_least(count, 0, "count")
    end = first_coordinate + count
    if end > _COORDINATE_LIMIT:
        raise ValueError(
            f"coordinates must be below 2^56, found {count} from coordinate {first_coordinate}."
        )
    seed, row = random_bits.checked_seed(seed), validation.integer_at_least(row, 0, "row")
    chunks = range(first_coordinate // CHUNK, -(-end // CHUNK)) if count else range(0)
    entries = [
        _of_chunk(source, seed, row, chunk, min(CHUNK, end - chunk * CHUNK)) for chunk in chunks
    ]
    if not entries:
        return np.empty(0, np.int64)
    return np.concatenate(entries)[first_coordinate % CHUNK :]


def segment_of_row(
    source: NoiseSource, seed: np.ndarray, row: int, segment: row_layout.Segment
) -> np.ndarray:
    """Returns the (size,) entries of a segment of a row of Z, see :func:`integers`."""
    return integers(source, seed, row, segment.first_coordinate, segment.size)


def _of_chunk(
    source: NoiseSource, seed: np.ndarray, row: int, chunk: int, count: int
) -> np.ndarray:
    """(count,) int64: the discrete Gaussian of the first coordinates of a chunk."""
    entries = np.empty(count, np.int64)
    num_ties = 0
    first_tie_block = FIRST_TIE_BLOCK + chunk * TIE_BLOCKS_PER_CHUNK

    def tie_words(ties: int) -> np.ndarray:
        nonlocal num_ties
        first, end = num_ties * TIE_WORDS, (num_ties + ties) * TIE_WORDS
        block, skipped = divmod(first, WORDS_PER_BLOCK)
        needed = -(-end // WORDS_PER_BLOCK) - block
        words = random_bits.blocks(source, seed, row, first_tie_block + block, needed)
        num_ties += ties
        return words.ravel()[skipped : skipped + end - first].reshape(ties, TIE_WORDS)

    for start in range(0, count, _TILE):
        part = entries[start : start + _TILE]
        groups = -(-len(part) // WORDS_PER_BLOCK)
        first_block = WORDS_PER_COORDINATE * (chunk * CHUNK + start) // WORDS_PER_BLOCK
        blocks = random_bits.blocks(source, seed, row, first_block, WORDS_PER_COORDINATE * groups)
        words = blocks.reshape(groups, WORDS_PER_COORDINATE, WORDS_PER_BLOCK).swapaxes(1, 2)
        words = words.reshape(-1, WORDS_PER_COORDINATE)[: len(part)]
        part[:] = discrete_gaussian.from_words(words, tie_words)
    return entries
