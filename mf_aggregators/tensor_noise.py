"""Correlated noise rows as TensorFlow graphs: what ``noise_recursions`` does, for TFF's executors.

Rows of Z are functions of (seed, row, tensor, coordinate) alone, by a counter-based
generator (Philox): the seed's first half is the key, its second half plus the row and
the tensor the upper half of the counter, and the coordinate the lower half. Streams of
different rows and tensors are disjoint ranges of one generator, and no state is kept
for them.

TensorFlow supplies the random bits, and not the normal samples: its Box-Muller transform
replaces uniforms below 1e-7, which cuts the tails at 5.68 standard deviations, and draws
float32 samples from 2^23 radii. A cut tail is a chance of no deniability at all, and few
radii are recognised in the output. Here the transform runs in float64 on uniforms of 53
bits, which reaches 8.57 standard deviations.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from mf_aggregators import noise_recursions
from mf_aggregators.noise_recursions import (
    BandedNoise,
    DenseNoise,
    IndependentNoise,
    NoiseRecursion,
)

# TensorFlow's number for the Philox generator.
_PHILOX = 1

# Noise that crosses between TFF's processes every round. Above 2^31 bytes the worker
# fails without an error; a state of this size already costs minutes a round.
LARGEST_STATE_IN_BYTES = 1 << 30


class NoiseState(NamedTuple):
    """Where a stream of noise rows stands, as tensors.

    Attributes:
      round_index: int64 scalar: the round that the next row is for, from 0.
      seed: (2,) int64: the stream's secret.
      history: For each tensor of a row, the earlier noise rows that a banded
        recursion needs, (b - 1, ...); an empty tuple for other recursions.
    """

    round_index: Any
    seed: Any
    history: Any


def state_bytes(recursion: NoiseRecursion, specs: Sequence[tf.TensorSpec]) -> int:
    """Returns the size of the history that a state holds, in bytes.

    Args:
      recursion: The mechanism's recursion.
      specs: The tensors of a row.

    Returns:
      The number of bytes.
    """
    if not isinstance(recursion, BandedNoise):
        return 0
    row = sum(math.prod(spec.shape) * noise_dtype(spec.dtype).size for spec in specs)
    return noise_recursions.floats_per_parameter(recursion) * row


def initial_state(
    recursion: NoiseRecursion, specs: Sequence[tf.TensorSpec], seed: tf.Tensor
) -> NoiseState:
    """Returns the state before the first round.

    Args:
      recursion: The mechanism's recursion.
      specs: The tensors of a row.
      seed: (2,) int64.

    Returns:
      The state.
    """
    history: tuple[tf.Tensor, ...] = ()
    if isinstance(recursion, BandedNoise) and recursion.num_bands > 1:
        slots = recursion.num_bands - 1
        history = tuple(tf.zeros([slots, *spec.shape], noise_dtype(spec.dtype)) for spec in specs)
    return NoiseState(tf.zeros([], tf.int64), seed, history)


def next_row(
    recursion: NoiseRecursion, state: NoiseState, specs: Sequence[tf.TensorSpec]
) -> tuple[list[tf.Tensor], NoiseState]:
    """Returns the row of C^-1 Z for the state's round, at unit variance of Z, and the next state.

    Args:
      recursion: The mechanism's recursion.
      state: What :func:`initial_state` or the last call returned.
      specs: The tensors of a row.

    Returns:
      A tensor for each spec, float64 for float64 specs and float32 for all others, and
      the state for the next round. Running the graph fails with InvalidArgumentError if
      the mechanism has no more rounds.
    """
    last_round = tf.debugging.assert_less(
        state.round_index,
        tf.constant(recursion.num_rounds, tf.int64),
        message=(
            f"The factorization has noise for {recursion.num_rounds} rounds, and one more round "
            "was asked for: its noise row would repeat an earlier one. Stop training, or use a "
            "factorization for more rounds."
        ),
    )
    with tf.control_dependencies([last_round] if last_round is not None else []):
        i = tf.identity(state.round_index)
    if isinstance(recursion, IndependentNoise):
        row, history = _row_of_z(state.seed, i, specs), state.history
    elif isinstance(recursion, DenseNoise):
        row, history = _combined_rows_of_z(recursion, state.seed, i, specs), state.history
    else:
        row, history = _banded_row(recursion, state, i, specs)
    return row, NoiseState(i + 1, state.seed, history)


def _banded_row(
    recursion: BandedNoise, state: NoiseState, i: tf.Tensor, specs: Sequence[tf.TensorSpec]
) -> tuple[list[tf.Tensor], tuple[tf.Tensor, ...]]:
    """Forward substitution over a ring of the last b - 1 rows; slot j mod (b - 1) holds row j."""
    bands = tf.gather(tf.constant(recursion.bands), i)
    z = _row_of_z(state.seed, i, specs)
    slots = recursion.num_bands - 1
    if not slots:
        return [row / tf.cast(bands[0], row.dtype) for row in z], state.history
    # Slots that no round has filled hold zeros, so their weights do not matter.
    lags = tf.math.floormod(i - 1 - tf.range(slots, dtype=tf.int64), slots) + 1
    weights = tf.gather(bands, lags)
    is_slot = tf.equal(tf.range(slots, dtype=tf.int64), tf.math.floormod(i, slots))
    rows, history = [], []
    for row, ring in zip(z, state.history, strict=True):
        earlier = tf.tensordot(tf.cast(weights, ring.dtype), ring, axes=1)
        noise = (row - earlier) / tf.cast(bands[0], ring.dtype)
        rows.append(noise)
        # A selection, and not a scatter, because that refuses empty tensors.
        mask = tf.reshape(is_slot, [slots] + [1] * noise.shape.rank)
        history.append(tf.where(mask, noise[tf.newaxis], ring))
    return rows, tuple(history)


def _combined_rows_of_z(
    recursion: DenseNoise, seed: tf.Tensor, i: tf.Tensor, specs: Sequence[tf.TensorSpec]
) -> list[tf.Tensor]:
    """Row i of C^-1 Z with every row of Z drawn anew: no state, work that grows with i."""
    weights = tf.gather(tf.constant(recursion.noising_matrix), i)

    def add_row(j: tf.Tensor, total: list[tf.Tensor]) -> tuple[tf.Tensor, list[tf.Tensor]]:
        row = _row_of_z(seed, j, specs)
        added = [
            partial + tf.cast(weights[j], z.dtype) * z
            for partial, z in zip(total, row, strict=True)
        ]
        return j + 1, added

    zeros = [tf.zeros(spec.shape, noise_dtype(spec.dtype)) for spec in specs]
    _, row = tf.while_loop(lambda j, _: j <= i, add_row, (tf.zeros([], tf.int64), zeros))
    return row


def _row_of_z(
    seed: tf.Tensor, row_index: tf.Tensor, specs: Sequence[tf.TensorSpec]
) -> list[tf.Tensor]:
    """Row ``row_index`` of Z, standard normal, one tensor for each spec."""
    key = tf.bitcast(seed[:1], tf.uint64)
    row = []
    for position, spec in enumerate(specs):
        # int64 addition wraps around, which is what a counter wants.
        upper = seed[1] + row_index * len(specs) + position
        counter = tf.bitcast(tf.stack([tf.zeros([], tf.int64), upper]), tf.uint64)
        size = math.prod(spec.shape)
        samples = _standard_normal(key, counter, size)
        row.append(tf.cast(tf.reshape(samples, spec.shape), noise_dtype(spec.dtype)))
    return row


def _standard_normal(key: tf.Tensor, counter: tf.Tensor, size: int) -> tf.Tensor:
    """The first ``size`` float64 normals of a stream, two from each two words of 64 bits."""
    words = tf.raw_ops.StatelessRandomUniformFullIntV2(
        shape=tf.constant([(size + 1) // 2, 2], tf.int32),
        key=key,
        counter=counter,
        alg=_PHILOX,
        dtype=tf.uint64,
    )
    # A float64 holds 53 bits exactly; uniforms in (0, 1] keep the logarithm finite.
    bits = tf.cast(tf.bitwise.right_shift(words, tf.constant(64 - 53, tf.uint64)), tf.float64)
    uniforms = (bits + 1.0) * 2.0**-53
    radius = tf.sqrt(-2.0 * tf.math.log(uniforms[:, 0]))
    angle = (2.0 * math.pi) * uniforms[:, 1]
    pairs = tf.stack([radius * tf.cos(angle), radius * tf.sin(angle)], axis=1)
    return tf.reshape(pairs, [-1])[:size]


def noise_dtype(dtype: tf.DType) -> tf.DType:
    """Returns what noise for a tensor is computed in: float64 for float64, else float32."""
    return tf.float64 if dtype == tf.float64 else tf.float32


def seed_from_bytes(entropy: bytes) -> np.ndarray:
    """Returns 16 bytes as a (2,) int64 seed."""
    return np.frombuffer(entropy, dtype="<i8", count=2).astype(np.int64)
