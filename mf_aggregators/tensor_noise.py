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
    StateSpaceNoise,
    ToeplitzNoise,
    WindowNoise,
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
      history: For each tensor of a row, what the recursion needs of earlier rounds
        and cannot draw again, (noise_recursions.floats_per_parameter, ...); an empty
        tuple for recursions that need nothing.
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
    kept = noise_recursions.floats_per_parameter(recursion)
    if kept:
        history = tuple(tf.zeros([kept, *spec.shape], noise_dtype(spec.dtype)) for spec in specs)
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
        weights = tf.gather(tf.constant(recursion.noising_matrix), i)
        combined = _combined_rows_of_z(state.seed, tf.zeros([], tf.int64), i, weights, specs)
        row, history = _in_noise_dtype(combined, specs), state.history
    elif isinstance(recursion, WindowNoise):
        row, history = _windowed_row(recursion, state, i, specs)
    elif isinstance(recursion, StateSpaceNoise):
        row, history = _state_space_row(recursion, state, i, specs)
    else:
        row, history = _banded_row(recursion, state, i, specs)
    return row, NoiseState(i + 1, state.seed, history)


def _banded_row(
    recursion: BandedNoise | ToeplitzNoise,
    state: NoiseState,
    i: tf.Tensor,
    specs: Sequence[tf.TensorSpec],
) -> tuple[list[tf.Tensor], tuple[tf.Tensor, ...]]:
    """Forward substitution over a ring of the last b - 1 rows; slot j mod (b - 1) holds row j."""
    scale = tf.ones([], tf.float64)
    if isinstance(recursion, ToeplitzNoise):
        bands = tf.constant(recursion.coefficients)
        if recursion.row_scales is not None:
            scale = tf.gather(tf.constant(recursion.row_scales), i)
    else:
        bands = tf.gather(tf.constant(recursion.bands), i)
    z = _row_of_z(state.seed, i, specs)
    slots = recursion.num_bands - 1
    if not slots:
        return [row * tf.cast(scale / bands[0], row.dtype) for row in z], state.history
    # Slots that no round has filled hold zeros, so their weights do not matter.
    lags = tf.math.floormod(i - 1 - tf.range(slots, dtype=tf.int64), slots) + 1
    weights = tf.gather(bands, lags)
    is_slot = tf.equal(tf.range(slots, dtype=tf.int64), tf.math.floormod(i, slots))
    rows, history = [], []
    for row, ring in zip(z, state.history, strict=True):
        earlier = tf.tensordot(tf.cast(weights, ring.dtype), ring, axes=1)
        noise = (row - earlier) / tf.cast(bands[0], ring.dtype)
        rows.append(noise * tf.cast(scale, noise.dtype))
        # A selection, and not a scatter, because that refuses empty tensors.
        mask = tf.reshape(is_slot, [slots] + [1] * noise.shape.rank)
        history.append(tf.where(mask, noise[tf.newaxis], ring))
    return rows, tuple(history)


def _windowed_row(
    recursion: WindowNoise, state: NoiseState, i: tf.Tensor, specs: Sequence[tf.TensorSpec]
) -> tuple[list[tf.Tensor], tuple[tf.Tensor, ...]]:
    """Row i of a banded C^-1 with accumulators; the window's rows of Z are drawn anew."""
    length = recursion.window_length
    is_constant = len(recursion.window) == 1
    window = tf.gather(tf.constant(recursion.window), tf.zeros_like(i) if is_constant else i)
    oldest = i - length + 1
    first = tf.maximum(oldest, 0)
    # From the weight of row ``first`` to that of row i.
    weights = tf.reverse(window[: i - first + 1], axis=[0])
    row = _combined_rows_of_z(state.seed, first, i, weights, specs)
    history = state.history
    if recursion.num_accumulators:
        leaving = _row_of_z(state.seed, first, specs)
        # Nothing leaves the window in its first rounds.
        gains = tf.gather(tf.constant(recursion.right), first) * tf.cast(oldest >= 0, tf.float64)
        history = tuple(
            accumulators + tf.cast(_outer(gains, z), accumulators.dtype)
            for accumulators, z in zip(state.history, leaving, strict=True)
        )
        left = tf.gather(tf.constant(recursion.left), i)
        row = [
            partial + tf.tensordot(left, tf.cast(accumulators, tf.float64), axes=1)
            for partial, accumulators in zip(row, history, strict=True)
        ]
    if recursion.row_scales is not None:
        scale = tf.gather(tf.constant(recursion.row_scales), i)
        row = [partial * scale for partial in row]
    return _in_noise_dtype(row, specs), history


def _state_space_row(
    recursion: StateSpaceNoise, state: NoiseState, i: tf.Tensor, specs: Sequence[tf.TensorSpec]
) -> tuple[list[tf.Tensor], tuple[tf.Tensor, ...]]:
    """One step of the linear recurrence over the state vectors, in float64.

    Decays rounded to single precision would be those of another matrix.
    """
    phase = tf.gather(tf.constant(recursion.phases, tf.int64), i)

    def of_phase(table: np.ndarray) -> tf.Tensor:
        return tf.gather(tf.constant(table), phase)

    gain, outputs = of_phase(recursion.gains), of_phase(recursion.outputs)
    sources, decays = of_phase(recursion.sources), of_phase(recursion.decays)
    inputs, feedbacks = of_phase(recursion.inputs), of_phase(recursion.feedbacks)
    rows, history = [], []
    z_row = _row_of_z(state.seed, i, specs)
    for single, kept in zip(z_row, state.history, strict=True):
        z, vectors = tf.cast(single, tf.float64), tf.cast(kept, tf.float64)
        noise = gain * z + tf.tensordot(outputs, vectors, axes=1)
        column = [-1] + [1] * z.shape.rank
        following = tf.gather(vectors, sources) * tf.reshape(decays, column)
        following += _outer(inputs, z) + _outer(feedbacks, noise)
        rows.append(tf.cast(noise, single.dtype))
        history.append(tf.cast(following, kept.dtype))
    return rows, tuple(history)


def _in_noise_dtype(row: list[tf.Tensor], specs: Sequence[tf.TensorSpec]) -> list[tf.Tensor]:
    return [
        tf.cast(tensor, noise_dtype(spec.dtype)) for tensor, spec in zip(row, specs, strict=True)
    ]


def _outer(weights: tf.Tensor, row: tf.Tensor) -> tf.Tensor:
    """The float64 tensor whose slice d is ``weights[d] * row``."""
    column = [-1] + [1] * row.shape.rank
    return tf.reshape(weights, column) * tf.cast(row, tf.float64)[tf.newaxis]


def _combined_rows_of_z(
    seed: tf.Tensor,
    first: tf.Tensor,
    last: tf.Tensor,
    weights: tf.Tensor,
    specs: Sequence[tf.TensorSpec],
) -> list[tf.Tensor]:
    """The float64 sum of ``weights[j - first] * Z[j]``, each row drawn anew: no state."""

    def add_row(j: tf.Tensor, total: list[tf.Tensor]) -> tuple[tf.Tensor, list[tf.Tensor]]:
        row = _row_of_z(seed, j, specs)
        added = [
            partial + weights[j - first] * tf.cast(z, tf.float64)
            for partial, z in zip(total, row, strict=True)
        ]
        return j + 1, added

    zeros = [tf.zeros(spec.shape, tf.float64) for spec in specs]
    _, row = tf.while_loop(lambda j, _: j <= last, add_row, (first, zeros))
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
