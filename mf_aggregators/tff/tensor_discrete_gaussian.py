"""Wide discrete Gaussian noise in a TensorFlow graph: the integers of ``discrete_gaussian``."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from mf_aggregators.noise import discrete_gaussian

# Bits of a column or an alias in a word.
_COLUMN_MASK = 2**discrete_gaussian.COLUMN_BITS - 1
_COLUMNS = 2**discrete_gaussian.COLUMN_BITS
_LEVELS = discrete_gaussian.WORDS - 1


class GraphTable(NamedTuple):
    """The sampler's table as constants of a graph.

    Attributes:
      packed: (columns,) int64.
      further: (levels * columns,) int64: further words of thresholds.
    """

    packed: tf.Tensor
    further: tf.Tensor


def graph_table() -> GraphTable:
    """Returns the table, 3 MB: call it once in a graph."""
    table = discrete_gaussian.table()
    return GraphTable(
        *(tf.constant(array.view(np.int64).ravel()) for array in (table.packed, table.further))
    )


def from_words(
    table: GraphTable, words: tf.Tensor, tie_words: Callable[[tf.Tensor], tf.Tensor]
) -> tf.Tensor:
    """Returns Z as a function of random words; see :func:`discrete_gaussian.from_words`.

    Args:
      table: From :func:`graph_table`.
      words: (3, count) uint64, count at least 1.
      tie_words: Returns (3, count) uint64 words of a level, an int32 scalar from 0 to 4. They
        are drawn only for ties.

    Returns:
      (count,) int64.
    """
    mask = tf.constant(_COLUMN_MASK, tf.uint64)
    entries, chosen, gaps = [], [], []
    for word in tf.unstack(words):
        column = _lower_bits(tf.bitcast(word, tf.int64))
        # Several times as fast as tf.gather.
        entry = tf.gather_nd(table.packed, column[:, tf.newaxis])
        # With all lower bits set, the word is below the entry just if its fraction is below the
        # threshold, and their difference, modulo 2^64, is a lower part alone just for a tie.
        filled, unsigned = tf.bitwise.bitwise_or(word, mask), tf.bitcast(entry, tf.uint64)
        entries.append(entry)
        chosen.append(tf.where(filled < unsigned, tf.bitcast(word, tf.int64), entry))
        gaps.append(tf.reduce_min(filled - unsigned))
    chosen = tf.cond(
        tf.reduce_min(gaps) <= mask,
        lambda: tf.unstack(_decided(table, words, tf.stack(entries), tie_words)),
        lambda: chosen,
    )
    x1, x2, x3 = (_lower_bits(word) for word in chosen)
    step = 2**discrete_gaussian.STEP_BITS
    # The sum of columns, less that of the columns of zeros.
    return x1 + step * (x2 + step * x3) - discrete_gaussian.LARGEST


def _decided(
    table: GraphTable,
    words: tf.Tensor,
    entries: tf.Tensor,
    tie_words: Callable[[tf.Tensor], tf.Tensor],
) -> tf.Tensor:
    """The (3, count) int64 words or entries whose lower bits are chosen, where some tie."""
    columns = _lower_bits(tf.bitcast(words, tf.int64))
    fractions, thresholds = _fractions(words), _fractions(tf.bitcast(entries, tf.uint64))

    def decide(
        level: tf.Tensor, kept: tf.Tensor, tied: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        thresholds = tf.gather(table.further, columns + _COLUMNS * tf.cast(level, tf.int64))
        fractions = _fractions(tie_words(level))
        kept |= tied & (fractions < thresholds)
        return level + 1, kept, tied & tf.equal(fractions, thresholds)

    _, kept, _ = tf.while_loop(
        lambda level, _, tied: (level < _LEVELS) & tf.reduce_any(tied),
        decide,
        (tf.constant(0), fractions < thresholds, tf.equal(fractions, thresholds)),
    )
    return tf.where(kept, columns, entries)


def _lower_bits(words: tf.Tensor) -> tf.Tensor:
    """The column or alias in each int64."""
    return tf.bitwise.bitwise_and(words, tf.constant(_COLUMN_MASK, tf.int64))


def _fractions(words: tf.Tensor) -> tf.Tensor:
    """The upper 48 bits of each uint64 as an int64."""
    shift = tf.constant(discrete_gaussian.COLUMN_BITS, tf.uint64)
    return tf.bitcast(tf.bitwise.right_shift(words, shift), tf.int64)
