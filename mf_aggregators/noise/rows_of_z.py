"""Rows of Z from random bits: a function of (seed, row, coordinate) alone.

An entry is a discrete Gaussian (``discrete_gaussian``): an integer number of steps. Its law is
that of rounded normal numbers up to a proven failure probability, which
``accounting.noise_failure`` charges to delta.

Coordinate c of a row has the words 3 c, 3 c + 1 and 3 c + 2 of the row's random bits. A word that
does not decide is decided by the word of the same number in a further range of the row's bits,
one range for each level.
"""

import math

import numpy as np

from mf_aggregators import validation
from mf_aggregators.noise import discrete_gaussian, random_bits, row_layout
from mf_aggregators.noise.random_bits import NoiseSource

# Which rows of noise a seed gives: a run must not go on with rows of another format. Version 0.5.0
# had 1.
NOISE_FORMAT = 3

# Of an entry, where the standard deviation is one: rounded up, so that no noise is less.
STEP = math.nextafter(1.0 / discrete_gaussian.STANDARD_DEVIATION, 1.0)
WORDS_PER_COORDINATE = 3
# Ranges of words that are needed only where the first ones do not decide.
WORDS_PER_LEVEL = 2**58
_COORDINATE_LIMIT = 2**56
# Pieces whose temporaries stay in a processor's cache.
_PIECE = 2**13


def integers(
    source: NoiseSource, seed: np.ndarray, row: int, first_coordinate: int, count: int
) -> np.ndarray:
    """Returns ``count`` coordinates of a row of Z, in steps.

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
      ImportError: If the source needs a package that is not installed.
    """
    first_coordinate = validation.integer_at_least(first_coordinate, 0, "first_coordinate")
    count = validation.integer_at_least(count, 0, "count")
    if first_coordinate + count > _COORDINATE_LIMIT:
        raise ValueError(
            f"coordinates must be below 2^56, found {count} from coordinate {first_coordinate}."
        )
    entries = np.empty(count, np.int64)
    for start in range(0, count, _PIECE):
        part = entries[start : start + _PIECE]
        part[:] = _integers(source, seed, row, first_coordinate + start, len(part))
    return entries


def segment_of_row(
    source: NoiseSource, seed: np.ndarray, row: int, segment: row_layout.Segment
) -> np.ndarray:
    """Returns the (size,) entries of a segment of a row of Z, see :func:`integers`."""
    return integers(source, seed, row, segment.first_coordinate, segment.size)


def _integers(
    source: NoiseSource, seed: np.ndarray, row: int, first: int, count: int
) -> np.ndarray:
    """(count,) int64: the discrete Gaussian of coordinates from ``first`` on."""

    def words(level: int) -> np.ndarray:
        # Integers come by twos, from even numbers on.
        odd = first % 2
        index = level * WORDS_PER_LEVEL + WORDS_PER_COORDINATE * (first - odd)
        number = WORDS_PER_COORDINATE * (count + odd)
        drawn = random_bits.integers(source, seed, row, index, number)
        return drawn.reshape(-1, WORDS_PER_COORDINATE)[odd:].T

    return discrete_gaussian.from_words(words(0), lambda level: words(level + 1))
