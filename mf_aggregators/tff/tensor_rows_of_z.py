"""Rows of Z as TensorFlow graphs: what ``random_bits`` and ``rows_of_z`` define, for TFF."""

import tensorflow as tf

from mf_aggregators.noise.discrete_gaussian import TIE_WORDS
from mf_aggregators.noise.random_bits import WORDS_PER_BLOCK, NoiseSource
from mf_aggregators.noise.row_layout import CHUNK
from mf_aggregators.noise.rows_of_z import (
    FIRST_TIE_BLOCK,
    TIE_BLOCKS_PER_CHUNK,
    WORDS_PER_COORDINATE,
)
from mf_aggregators.tff import tensor_discrete_gaussian, tensor_random_bits
from mf_aggregators.tff.tensor_discrete_gaussian import GraphTable

# Rows that are drawn at the same time, each with some megabytes of temporary memory.
_PARALLEL_ROWS = 4
# Blocks of words for ties that are drawn with a chunk: enough for 14 ties, where a chunk has three
# on average. More are drawn where more are needed.
_TIE_BLOCKS = 8
_BLOCKS_PER_CHUNK = WORDS_PER_COORDINATE * CHUNK // WORDS_PER_BLOCK


def chunk_rows(
    source: NoiseSource,
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
    blocks = tensor_random_bits.of_source(source)
    groups = -(-width // WORDS_PER_BLOCK)
    first_block = _BLOCKS_PER_CHUNK * chunk
    first_tie_block = FIRST_TIE_BLOCK + TIE_BLOCKS_PER_CHUNK * chunk

    def one_row(row: tf.Tensor | int) -> tf.Tensor:
        i = first_row + tf.cast(row, tf.int64)
        drawn, for_ties = blocks(
            seed, i, (first_block, WORDS_PER_COORDINATE * groups), (first_tie_block, _TIE_BLOCKS)
        )

        def tie_words(ties: tf.Tensor) -> tf.Tensor:
            count = TIE_WORDS * ties
            needed = -(-count // WORDS_PER_BLOCK)
            words = tf.cond(
                needed <= _TIE_BLOCKS,
                lambda: for_ties,
                lambda: blocks(seed, i, (first_tie_block, needed))[0],
            )
            return tf.reshape(tf.reshape(words, [-1])[:count], [ties, TIE_WORDS])

        by_word = tf.transpose(
            tf.reshape(drawn, [groups, WORDS_PER_COORDINATE, WORDS_PER_BLOCK]), [1, 0, 2]
        )
        words = tf.reshape(by_word, [WORDS_PER_COORDINATE, -1])[:, :width]
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
