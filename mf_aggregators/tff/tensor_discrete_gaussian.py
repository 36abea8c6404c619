"""Wide discrete Gaussian noise in a TensorFlow graph: the integers of ``discrete_gaussian``."""

from collections.abc import Callable
from typing import NamedTuple

import tensorflow as tf

from mf_aggregators.noise import discrete_gaussian

# Bits of a column or an alias in a word.
_COLUMN_MASK = 2**discrete_gaussian.COLUMN_BITS - 1
_WORDS = 3


class GraphTable(NamedTuple):
    """The sampler's table as constants of a graph.

    Attributes:
      packed: (columns,) uint32.
      further: (columns, tie_words) uint32: further words of thresholds.
    """

    packed: tf.Tensor
    further: tf.Tensor


def graph_table() -> GraphTable:
    """Returns the table, 3 MB: call it once in a graph."""
    table = discrete_gaussian.table()
    return GraphTable(tf.constant(table.packed), tf.constant(table.further))


def from_words(
    table: GraphTable, words: tf.Tensor, tie_words: Callable[[tf.Tensor], tf.Tensor]
) -> tf.Tensor:
    """Returns Z as a function of random words; see :func:`discrete_gaussian.from_words`.

    Args:
      table: From :func:`graph_table`.
      words: (3, count) uint32: X1, X2 and X3 of all coordinates.
      tie_words: Takes the number of ties, an int32 scalar, and returns (ties, TIE_WORDS) uint32
        for ties in the order of coordinates. They are drawn only where something ties.

    Returns:
      (count,) int64.
    """
    mask = tf.constant(_COLUMN_MASK, tf.uint32)
    chosen, ties = [], []
    for word in tf.unstack(words, num=_WORDS):
        column = tf.bitcast(tf.bitwise.bitwise_and(word, mask), tf.int32)
        # Several times as fast as tf.gather.
        entry = tf.gather_nd(table.packed, column[:, tf.newaxis])
        # With all lower bits set, the word is below the entry just if its fraction is below the
        # threshold, and their difference, modulo 2^32, is a lower part alone just for a tie.
        filled = tf.bitwise.bitwise_or(word, mask)
        chosen.append(tf.bitwise.bitwise_and(tf.where(filled < entry, word, entry), mask))
        ties.append(filled - entry <= mask)
    any_tie = tf.reduce_any([tf.reduce_any(tie) for tie in ties])
    chosen = tf.cond(
        any_tie,
        lambda: tf.unstack(_decided(table, words, tf.stack(chosen), ties, tie_words)),
        lambda: chosen,
    )
    x1, x2, x3 = (tf.cast(tf.bitcast(word, tf.int32), tf.int64) for word in chosen)
    step = 2**discrete_gaussian.STEP_BITS
    # The sum of columns, less that of the columns of zeros.
    return x1 + step * (x2 + step * x3) - discrete_gaussian.LARGEST


def _decided(
    table: GraphTable,
    words: tf.Tensor,
    chosen: tf.Tensor,
    ties: list[tf.Tensor],
    tie_words: Callable[[tf.Tensor], tf.Tensor],
) -> tf.Tensor:
    """The (3, count) uint32 columns or aliases that are chosen, where some tie."""
    # In the order of coordinates, and of X1, X2 and X3 in each of them.
    numbers = tf.sort(
        tf.concat(
            [_WORDS * tf.where(tie)[:, 0] + number for number, tie in enumerate(ties)], axis=0
        )
    )
    places = tf.stack([tf.math.floormod(numbers, _WORDS), numbers // _WORDS], axis=1)
    columns = tf.bitwise.bitwise_and(
        tf.gather_nd(words, places), tf.constant(_COLUMN_MASK, tf.uint32)
    )
    thresholds = _as_numbers(tf.gather(table.further, tf.bitcast(columns, tf.int32)))
    fractions = _as_numbers(tie_words(tf.size(numbers, tf.int32)))
    # The first word that differs decides; where none does, the fraction is not below.
    first = tf.argmax(tf.cast(tf.not_equal(fractions, thresholds), tf.int32), axis=1)
    is_kept = tf.gather(fractions, first, batch_dims=1) < tf.gather(thresholds, first, batch_dims=1)
    # What is not kept was chosen already: a tie is not below.
    return tf.tensor_scatter_nd_update(
        chosen, tf.boolean_mask(places, is_kept), tf.boolean_mask(columns, is_kept)
    )


def _as_numbers(words: tf.Tensor) -> tf.Tensor:
    """uint32 words as int64, which more operations know."""
    return tf.cast(words, tf.int64)
