"""Random bits in a TensorFlow graph: the words of ``noise.random_bits``."""

from typing import Protocol

import tensorflow as tf

from mf_aggregators.noise import random_bits
from mf_aggregators.noise.random_bits import WORDS_PER_BLOCK, NoiseSource

# TensorFlow's number for the Philox generator.
_PHILOX = 1
# Up to so many blocks, the number of operations costs more than what they compute.
_FEW_BLOCKS = 2**10


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
        *tf.unstack(tf.constant(random_bits.CHACHA_CONSTANTS, tf.uint32)),
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
        lambda number, *_: number < random_bits.CHACHA_DOUBLE_ROUNDS,
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
                    tf.stack([random_bits.PHILOX_COUNTERS_PER_BLOCK * first, upper]), tf.uint64
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
