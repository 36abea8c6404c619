"""Rows of Z as TensorFlow graphs: what ``random_bits`` and ``rows_of_z`` define, for TFF.

TensorFlow supplies the random bits, and not the normal samples: its Box-Muller transform
replaces uniforms below 1e-7, which cuts the tails at 5.68 standard deviations, and draws
float32 samples from 2^23 radii. A cut tail is a chance of no deniability at all, and few
radii are recognised in the output. Here the transform runs in float64 on uniforms of 53
bits, which reaches 8.57 standard deviations (``rows_of_z.LARGEST_NORMAL``).
"""

import math
from typing import Any, Protocol

import tensorflow as tf

from mf_aggregators.noise.row_layout import CHUNK
from mf_aggregators.noise.rows_of_z import UNIFORM_BITS, UNIFORM_UNIT

# TensorFlow's number for the Philox generator.
_PHILOX = 1
_HALF = CHUNK // 2
# Rows that are drawn at the same time, each with some megabytes of temporary memory.
_PARALLEL_ROWS = 4


class BitSource(Protocol):
    """Random bits in a graph: integer ``index`` of a row, a function of seed, row and index."""

    def prepare(
        self,
        seed: tf.Tensor,
        first_row: tf.Tensor,
        num_rows: tf.Tensor | int,
        first_index: tf.Tensor,
        count: int,
    ) -> Any:
        """Returns what :meth:`integers` needs for integers of these rows, once for all of them."""

    def integers(
        self,
        prepared: Any,
        seed: tf.Tensor,
        first_row: tf.Tensor,
        row: tf.Tensor | int,
        first_index: tf.Tensor,
        offset: int,
        count: int,
    ) -> tf.Tensor:
        """Returns (count,) uint64 integers of row ``first_row + row`` from index first + offset."""


class PhiloxBits:
    """Integers from TensorFlow's Philox 4x32-10; nothing is prepared."""

    def prepare(
        self,
        seed: tf.Tensor,
        first_row: tf.Tensor,
        num_rows: tf.Tensor | int,
        first_index: tf.Tensor,
        count: int,
    ) -> tuple[()]:
        """Returns nothing; see :class:`BitSource`."""
        return ()

    def integers(
        self,
        prepared: Any,
        seed: tf.Tensor,
        first_row: tf.Tensor,
        row: tf.Tensor | int,
        first_index: tf.Tensor,
        offset: int,
        count: int,
    ) -> tf.Tensor:
        """Returns integers of one row; see :class:`BitSource`."""
        # Each step of the counter gives two integers. int64 addition wraps around, which is
        # what a counter wants.
        lower = (first_index + offset) // 2
        upper = seed[1] + first_row + tf.cast(row, tf.int64)
        return tf.raw_ops.StatelessRandomUniformFullIntV2(
            shape=tf.constant([count], tf.int32),
            key=tf.bitcast(seed[:1], tf.uint64),
            counter=tf.bitcast(tf.stack([lower, upper]), tf.uint64),
            alg=_PHILOX,
            dtype=tf.uint64,
        )


def chunk_rows(
    source: BitSource,
    seed: tf.Tensor,
    first_row: tf.Tensor,
    num_rows: tf.Tensor | int,
    chunk: tf.Tensor,
    width: int,
    dtype: tf.DType,
) -> tf.Tensor:
    """Returns the entries of consecutive rows of Z in one chunk of coordinates.

    Args:
      source: Where random bits come from.
      seed: (2,) int64.
      first_row: int64 scalar: the first row's index.
      num_rows: How many rows; a Python integer or an int32 scalar.
      chunk: int64 scalar: the chunk's number in the row.
      width: How many coordinates, at most CHUNK.
      dtype: float32 or float64.

    Returns:
      (num_rows, width) of the dtype.
    """
    pairs = min(width, _HALF)
    first_index = chunk * CHUNK
    prepared = source.prepare(seed, first_row, num_rows, first_index, _HALF + pairs)

    def one_row(row: tf.Tensor | int) -> tf.Tensor:
        radii, angles = (
            source.integers(prepared, seed, first_row, row, first_index, offset, pairs)
            for offset in (0, _HALF)
        )
        return _normals(radii, angles, width, dtype)

    if isinstance(num_rows, int) and num_rows == 1:
        return one_row(0)[tf.newaxis]
    rows = tf.TensorArray(dtype, size=num_rows, element_shape=[width])
    _, rows = tf.while_loop(
        lambda row, _: row < num_rows,
        lambda row, rows: (row + 1, rows.write(row, one_row(row))),
        (tf.constant(0), rows),
        parallel_iterations=_PARALLEL_ROWS,
    )
    return rows.stack()


def _normals(radii: tf.Tensor, angles: tf.Tensor, width: int, dtype: tf.DType) -> tf.Tensor:
    """Box-Muller: the cosines of all pairs of integers, then the sines."""
    # Uniforms in (0, 1] keep the logarithm finite.
    radius = tf.sqrt(-2.0 * tf.math.log((_bits(radii) + 1.0) * UNIFORM_UNIT))
    angle = _bits(angles) * (2.0 * math.pi * UNIFORM_UNIT)
    normals = tf.cast(radius * tf.cos(angle), dtype)
    sines = width - min(width, _HALF)
    if sines:
        normals = tf.concat([normals, tf.cast((radius * tf.sin(angle))[:sines], dtype)], axis=0)
    return normals


def _bits(integers: tf.Tensor) -> tf.Tensor:
    """The upper 53 bits of each integer as a float64, which holds them exactly."""
    return tf.cast(
        tf.bitwise.right_shift(integers, tf.constant(64 - UNIFORM_BITS, tf.uint64)), tf.float64
    )
