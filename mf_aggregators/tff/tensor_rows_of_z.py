"""Rows of Z as TensorFlow graphs: what ``random_bits`` and ``rows_of_z`` define, for TFF."""

from typing import Any, Protocol

import tensorflow as tf

from mf_aggregators.noise.row_layout import CHUNK
from mf_aggregators.noise.rows_of_z import WORDS_PER_COORDINATE, WORDS_PER_LEVEL
from mf_aggregators.tff import tensor_discrete_gaussian
from mf_aggregators.tff.tensor_discrete_gaussian import GraphTable

# TensorFlow's number for the Philox generator.
_PHILOX = 1
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
    table: GraphTable,
) -> tf.Tensor:
    """Returns the entries of consecutive rows of Z in one chunk of coordinates.

    Args:
      source: Where random bits come from.
      seed: (2,) int64.
      first_row: int64 scalar: the first row's index.
      num_rows: How many rows; a Python integer or an int32 scalar.
      chunk: int64 scalar: the chunk's number in the row.
      width: How many coordinates, at most CHUNK.
      table: The sampler's table, which the graph should hold once.

    Returns:
      (num_rows, width) int64, in steps of Z.
    """
    first_index = WORDS_PER_COORDINATE * CHUNK * chunk
    count = WORDS_PER_COORDINATE * width
    prepared = source.prepare(seed, first_row, num_rows, first_index, count)

    def one_row(row: tf.Tensor | int) -> tf.Tensor:
        def tie_words(level: tf.Tensor) -> tf.Tensor:
            # Needed about once in a billion chunks, so that nothing is prepared for it.
            index = first_index + WORDS_PER_LEVEL * (tf.cast(level, tf.int64) + 1)
            i = first_row + tf.cast(row, tf.int64)
            found = source.prepare(seed, i, 1, index, count)
            return _by_word(source.integers(found, seed, i, 0, index, 0, count))

        words = _by_word(source.integers(prepared, seed, first_row, row, first_index, 0, count))
        integers = tensor_discrete_gaussian.from_words(table, words, tie_words)
        return tf.ensure_shape(integers, [width])

    if isinstance(num_rows, int) and num_rows == 1:
        return one_row(0)[tf.newaxis]
    rows = tf.TensorArray(tf.int64, size=num_rows, element_shape=[width])
    _, rows = tf.while_loop(
        lambda row, _: row < num_rows,
        lambda row, rows: (row + 1, rows.write(row, one_row(row))),
        (tf.constant(0), rows),
        parallel_iterations=_PARALLEL_ROWS,
    )
    return rows.stack()


def _by_word(integers: tf.Tensor) -> tf.Tensor:
    """The first words of all coordinates, the second ones and the third ones."""
    return tf.transpose(tf.reshape(integers, [-1, WORDS_PER_COORDINATE]))
