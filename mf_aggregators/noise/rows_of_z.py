"""Rows of Z from random bits: a function of (seed, row, coordinate) alone.

An entry is a discrete Gaussian (``discrete_gaussian``) over its standard deviation. Its law is
that of rounded normal numbers up to a proven failure probability, which
``accounting.noise_failure`` charges to delta.

Coordinate c of a row has the words 3 c, 3 c + 1 and 3 c + 2 of the row's random bits. A word that
does not decide is decided by the word of the same number in a further range of the row's bits,
one range for each level.
"""

import math
from typing import Any

import numpy as np

from mf_aggregators import validation
from mf_aggregators.noise import discrete_gaussian, random_bits, row_layout
from mf_aggregators.noise.random_bits import NoiseSource

# Which rows a seed gives: a run must not go on with rows of another format. Version 0.5.0 had 1.
NOISE_FORMAT = 2

# What entries are multiples of: rounded up, so that no noise is less than one.
STEP = math.nextafter(1.0 / discrete_gaussian.STANDARD_DEVIATION, 1.0)
WORDS_PER_COORDINATE = 3
# Ranges of words that are needed only where the first ones do not decide.
WORDS_PER_LEVEL = 2**58
_COORDINATE_LIMIT = 2**56
# Pieces whose temporaries stay in a processor's cache.
_PIECE = 2**13


def standard_normal(
    source: NoiseSource, seed: np.ndarray, row: int, first_coordinate: int, count: int, dtype: Any
) -> np.ndarray:
    """Returns ``count`` coordinates of a row of Z.

    Args:
      source: Where random bits come from.
      seed: (2,) int64: the stream's secret.
      row: The row of Z, from 0.
      first_coordinate: The first coordinate, from 0.
      count: How many.
      dtype: float32 or float64; float32 entries are the float64 ones, rounded.

    Returns:
      (count,) of the dtype.

    Raises:
      ValueError: If the dtype is another one, or a number is out of its range.
      ImportError: If the source needs a package that is not installed.
    """
    first_coordinate = validation.integer_at_least(first_coordinate, 0, "first_coordinate")
    count = validation.integer_at_least(count, 0, "count")
    if first_coordinate + count > _COORDINATE_LIMIT:
        raise ValueError(
            f"coordinates must be below 2^56, found {count} from coordinate {first_coordinate}."
        )
    if np.dtype(dtype).name not in row_layout.NOISE_DTYPES:
        raise ValueError(f"noise is computed in float32 or float64, found {np.dtype(dtype).name}.")
    entries = np.empty(count, dtype)
    for start in range(0, count, _PIECE):
        part = entries[start : start + _PIECE]
        integers = _integers(source, seed, row, first_coordinate + start, len(part))
        part[:] = integers * STEP
    return entries


def segment_of_row(
    source: NoiseSource, seed: np.ndarray, row: int, segment: row_layout.Segment
) -> np.ndarray:
    """Returns the (size,) entries of a segment of a row of Z, see :func:`standard_normal`."""
    return standard_normal(source, seed, row, segment.first_coordinate, segment.size, segment.dtype)


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
