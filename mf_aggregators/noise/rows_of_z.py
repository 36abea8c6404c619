"""Rows of Z, standard normal, from random bits: a function of (seed, row, coordinate) alone.

Box-Muller in float64 on uniforms of 53 bits, whose normals reach 8.57 standard deviations: a
cut tail is a chance of no deniability at all (``noise_tail`` says how large it is), and few
radii are recognised in the output.

A row's coordinates come in chunks of ``CHUNK``. Coordinate j of chunk p belongs to pair
``q = j % (CHUNK // 2)``: the integer ``p * CHUNK + q`` gives the pair's radius, the integer
``p * CHUNK + CHUNK // 2 + q`` its angle, and the pair's cosine is the entry of the chunk's
first half and its sine that of the second. So cosines and sines, radii and angles are
contiguous, and a row's integers number no more than its coordinates, rounded up to chunks.
"""

import math
from typing import Any

import numpy as np

from mf_aggregators import validation
from mf_aggregators.noise import random_bits, row_layout
from mf_aggregators.noise.random_bits import NoiseSource
from mf_aggregators.noise.row_layout import CHUNK

_HALF = CHUNK // 2
# A float64 holds integers of 53 bits exactly.
UNIFORM_BITS = 53
# The smallest uniform number, and what they all are multiples of.
UNIFORM_UNIT = 2.0**-UNIFORM_BITS
# The largest radius of a pair of normal numbers, that of the smallest uniform number.
LARGEST_NORMAL = math.sqrt(-2.0 * math.log(UNIFORM_UNIT))
_UNIFORM_SHIFT = np.uint64(64 - UNIFORM_BITS)


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
    if np.dtype(dtype).name not in row_layout.NOISE_DTYPES:
        raise ValueError(f"noise is computed in float32 or float64, found {np.dtype(dtype).name}.")
    normals = np.empty(count, dtype)
    filled = 0
    while filled < count:
        chunk, offset = divmod(first_coordinate + filled, CHUNK)
        part = normals[filled : filled + CHUNK - offset]
        _fill_from_chunk(source, seed, row, chunk, offset, part)
        filled += len(part)
    return normals


def segment_of_row(
    source: NoiseSource, seed: np.ndarray, row: int, segment: row_layout.Segment
) -> np.ndarray:
    """Returns the (size,) entries of a segment of a row of Z, see :func:`standard_normal`."""
    return standard_normal(source, seed, row, segment.first_coordinate, segment.size, segment.dtype)


def _fill_from_chunk(
    source: NoiseSource, seed: np.ndarray, row: int, chunk: int, first: int, part: np.ndarray
) -> None:
    """Fills ``part`` with a chunk's coordinates from offset ``first`` on."""
    stop = first + len(part)
    for start_pair, stop_pair in _ranges_of_pairs(first, stop):
        radii, angles = _polar(source, seed, row, chunk, start_pair, stop_pair)
        for base in (0, _HALF):
            skipped = base + start_pair
            lower, upper = max(first, skipped), min(stop, base + stop_pair)
            if lower < upper:
                normals = radii * (np.sin(angles) if base else np.cos(angles))
                part[lower - first : upper - first] = normals[lower - skipped : upper - skipped]


def _ranges_of_pairs(first: int, stop: int) -> list[tuple[int, int]]:
    """The pairs that a chunk's coordinates from ``first`` to ``stop - 1`` belong to.

    Ranges start and stop at even pairs: integers come by twos, and NumPy may handle an array
    of one entry by another loop, whose result can differ in the last bit.
    """
    if stop <= _HALF:
        ranges = [(first, stop)]
    elif first >= _HALF:
        ranges = [(first - _HALF, stop - _HALF)]
    elif stop - _HALF < first:
        ranges = [(0, stop - _HALF), (first, _HALF)]
    else:
        ranges = [(0, _HALF)]
    return [(start - start % 2, end + end % 2) for start, end in ranges]


def _polar(
    source: NoiseSource, seed: np.ndarray, row: int, chunk: int, start: int, stop: int
) -> tuple[np.ndarray, np.ndarray]:
    """The float64 radii and angles of a chunk's pairs ``start``, ..., ``stop - 1``."""
    radius_index = chunk * CHUNK + start
    if stop - start == _HALF:
        # All of a chunk's integers are one range.
        radius_bits, angle_bits = np.split(
            random_bits.integers(source, seed, row, radius_index, CHUNK), 2
        )
    else:
        radius_bits = random_bits.integers(source, seed, row, radius_index, stop - start)
        angle_bits = random_bits.integers(source, seed, row, radius_index + _HALF, stop - start)
    # Above zero, so that the logarithm is finite.
    uniforms = (_upper_bits(radius_bits) + 1.0) * UNIFORM_UNIT
    radii = np.sqrt(-2.0 * np.log(uniforms))
    return radii, _upper_bits(angle_bits) * (2.0 * math.pi * UNIFORM_UNIT)


def _upper_bits(integers: np.ndarray) -> np.ndarray:
    """The upper 53 bits of each integer as a float64 integer."""
    # Signed integers convert several times faster than unsigned ones.
    return (integers >> _UNIFORM_SHIFT).view(np.int64).astype(np.float64)
