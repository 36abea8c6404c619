"""Rows of Z as TensorFlow graphs: what ``noise.rows_of_z`` and ``noise.discrete_gaussian`` define.

Random bits become integers of a wide discrete Gaussian, and these the rows that TFF's worker adds.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import tensorflow as tf

from mf_aggregators.noise import discrete_gaussian, rows_of_z
from mf_aggregators.noise.discrete_gaussian import TIE_WORDS
from mf_aggregators.noise.rows_of_z import (
    CHUNK,
    FIRST_TIE_BLOCK,
    TIE_BLOCKS_PER_CHUNK,
    WORDS_PER_BLOCK,
    WORDS_PER_COORDINATE,
    NoiseSource,
)

# TensorFlow's number for the Philox generator.
_PHILOX = 1
# Up to so many blocks, the number of operations costs more than what they compute.
_FEW_BLOCKS = 2**10
# Bits of a column or an alias in a word.
_COLUMN_MASK = 2**discrete_gaussian.COLUMN_BITS - 1
# Rows that are drawn at the same time, each with some megabytes of temporary memory.
_PARALLEL_ROWS = 4
# Blocks of words for ties that are drawn with a chunk: enough for 14 ties, where a chunk has three
# on average. More are drawn where more are needed.
_TIE_BLOCKS = 8
_BLOCKS_PER_CHUNK = WORDS_PER_COORDINATE * CHUNK // WORDS_PER_BLOCK


class Blocks(Protocol):
    """Blocks of random bits in a graph: a function of seed, row and block."""

    def __call__(
        self, seed: tf.Tensor, row: tf.Tensor, *ranges: tuple[tf.Tensor, tf.Tensor | int]
    ) -> list[tf.Tensor]:
        """Returns blocks of a row, see :func:`chacha20` and :func:`philox`."""


def of_source(source: NoiseSource) -> Blocks:
    """Returns the function for a source of random bits."""
    return {NoiseSource.CHACHA20: chacha20, NoiseSource.PHILOX: philox}[source]


def chacha20(
    seed: tf.Tensor, row: tf.Tensor, *ranges: tuple[tf.Tensor, tf.Tensor | int]
) -> list[tf.Tensor]:
    """Returns blocks of a row by ChaCha20.

    Args:
      seed: (2,) int64.
      row: int64 scalar.
      *ranges: Pairs of a first block, int64 scalar, and a number of blocks: a Python integer or
        an int32 scalar. All ranges are computed at once, which costs no more than one of their
        size.

    Returns:
      For each range (blocks, 16) uint32.
    """
    counts = [count for _, count in ranges]
    counters = tf.concat(
        [first + tf.range(tf.cast(count, tf.int64)) for first, count in ranges], axis=0
    )
    low, high = tf.unstack(tf.bitcast(counters, tf.uint32), axis=1)
    shared = [
        *tf.unstack(tf.constant(rows_of_z.CHACHA_CONSTANTS, tf.uint32)),
        *2 * tf.unstack(tf.reshape(tf.bitcast(seed, tf.uint32), [4])),
    ]
    row_words = tf.unstack(tf.bitcast(row, tf.uint32), num=2)
    zeros = tf.zeros_like(low)
    words = [zeros + word for word in shared] + [low, high] + [zeros + word for word in row_words]
    size = counters.shape.num_elements()
    is_small = size is not None and size <= _FEW_BLOCKS
    state = tf.unstack(tf.reshape(tf.stack(words), [4, 4, -1])) if is_small else words
    double_round = _double_round_of_rows if is_small else _double_round
    # A loop, because the operations of all rounds would make a graph that takes seconds to build.
    _, *mixed = tf.while_loop(
        lambda number, *_: number < rows_of_z.CHACHA_DOUBLE_ROUNDS,
        lambda number, *words: (number + 1, *double_round(words)),
        (tf.constant(0), *state),
        parallel_iterations=1,
    )
    sums = [after + before for after, before in zip(mixed, state, strict=True)]
    blocks = tf.transpose(tf.concat(sums, axis=0) if is_small else tf.stack(sums))
    return tf.split(blocks, counts) if len(counts) > 1 else [blocks]


def philox(
    seed: tf.Tensor, row: tf.Tensor, *ranges: tuple[tf.Tensor, tf.Tensor | int]
) -> list[tf.Tensor]:
    """Returns blocks of a row by TensorFlow's Philox 4x32-10; see :func:`chacha20`."""
    # int64 addition wraps around, which is what a counter wants.
    upper = seed[1] + row
    return [
        tf.reshape(
            tf.raw_ops.StatelessRandomUniformFullIntV2(
                shape=tf.reshape(WORDS_PER_BLOCK * tf.cast(count, tf.int32), [1]),
                key=tf.bitcast(seed[:1], tf.uint64),
                counter=tf.bitcast(
                    tf.stack([rows_of_z.PHILOX_COUNTERS_PER_BLOCK * first, upper]), tf.uint64
                ),
                alg=_PHILOX,
                dtype=tf.uint32,
            ),
            [-1, WORDS_PER_BLOCK],
        )
        for first, count in ranges
    ]


def _double_round(words: tuple[tf.Tensor, ...]) -> list[tf.Tensor]:
    """A column round and a diagonal round (RFC 8439, Sec. 2.3) of sixteen (blocks,) tensors."""
    mixed = list(words)
    for turn in range(2):
        for column in range(4):
            places = [4 * row + (column + turn * row) % 4 for row in range(4)]
            quarter = _quarter_round(*(mixed[place] for place in places))
            for place, word in zip(places, quarter, strict=True):
                mixed[place] = word
    return mixed


def _double_round_of_rows(rows: tuple[tf.Tensor, ...]) -> list[tf.Tensor]:
    """The same of four (4, blocks) tensors: a quarter of the operations, and more copies."""
    mixed = list(rows)
    for turn in (1, -1):
        mixed = list(_quarter_round(*mixed))
        mixed = [mixed[0], *(tf.roll(mixed[row], -turn * row, axis=0) for row in (1, 2, 3))]
    return mixed


def _quarter_round(
    a: tf.Tensor, b: tf.Tensor, c: tf.Tensor, d: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]:
    """RFC 8439, Sec. 2.1, of tensors of one shape."""
    for first, second in ((16, 12), (8, 7)):
        a = a + b
        d = _rotated(tf.bitwise.bitwise_xor(d, a), first)
        c = c + d
        b = _rotated(tf.bitwise.bitwise_xor(b, c), second)
    return a, b, c, d


def _rotated(words: tf.Tensor, distance: int) -> tf.Tensor:
    """Words whose bits are rotated to the left."""
    left = tf.bitwise.left_shift(words, tf.constant(distance, tf.uint32))
    right = tf.bitwise.right_shift(words, tf.constant(32 - distance, tf.uint32))
    return tf.bitwise.bitwise_or(left, right)


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
    for word in tf.unstack(words, num=WORDS_PER_COORDINATE):
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
            [
                WORDS_PER_COORDINATE * tf.where(tie)[:, 0] + number
                for number, tie in enumerate(ties)
            ],
            axis=0,
        )
    )
    places = tf.stack(
        [tf.math.floormod(numbers, WORDS_PER_COORDINATE), numbers // WORDS_PER_COORDINATE], axis=1
    )
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
    blocks = of_source(source)
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
        integers = from_words(table, words, tie_words)
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
