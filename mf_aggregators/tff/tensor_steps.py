"""One step of a recursion as a TensorFlow graph: what ``noise.recursions`` does, row by row.

Earlier rows of Z are drawn again from their seeds; everything else that a recursion needs
of earlier rounds is its history. A step works on one panel of coordinates, whose tensors
fit into a processor's cache.
"""

from collections.abc import Callable
from typing import TypeAlias

import tensorflow as tf

from mf_aggregators.noise import block_plans
from mf_aggregators.noise.recursions import (
    BandedNoise,
    DenseNoise,
    IndependentNoise,
    NoiseRecursion,
    StateSpaceNoise,
    ToeplitzNoise,
    WindowNoise,
)

# Takes a row's index (int64 scalar) and returns that row of Z, (width,), in the noise's dtype.
DrawRow: TypeAlias = Callable[[tf.Tensor], tf.Tensor]


def step(
    recursion: NoiseRecursion, i: tf.Tensor, draw: DrawRow, history: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the row of C^-1 Z for a round, and the history after it.

    Args:
      recursion: The mechanism's recursion.
      i: int64 scalar: the round, from 0.
      draw: Gives rows of Z.
      history: (noise_recursions.floats_per_parameter, width), zeros before the first round.

    Returns:
      The row, (width,), and the next history, of the history's dtype.
    """
    if isinstance(recursion, IndependentNoise):
        return draw(i), history
    if isinstance(recursion, DenseNoise):
        weights = tf.gather(tf.constant(recursion.noising_matrix), i)
        combined = _combined_rows_of_z(draw, tf.zeros([], tf.int64), i, weights, history)
        return tf.cast(combined, history.dtype), history
    if isinstance(recursion, WindowNoise):
        return _windowed(recursion, i, draw, history)
    if isinstance(recursion, StateSpaceNoise):
        return _advanced(recursion, i, draw, history)
    return _substituted(recursion, i, draw, history)


def _substituted(
    recursion: BandedNoise | ToeplitzNoise, i: tf.Tensor, draw: DrawRow, ring: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Forward substitution over a ring of the last b - 1 rows; slot j mod (b - 1) holds row j."""
    scale = tf.ones([], tf.float64)
    if isinstance(recursion, ToeplitzNoise):
        bands = tf.constant(recursion.coefficients)
        if recursion.row_scales is not None:
            scale = tf.gather(tf.constant(recursion.row_scales), i)
    else:
        bands = tf.gather(tf.constant(recursion.bands), i)
    row = draw(i)
    slots = recursion.num_bands - 1
    if not slots:
        return row * tf.cast(scale / bands[0], row.dtype), ring
    # Slots that no round has filled hold zeros, so their weights do not matter.
    lags = tf.math.floormod(i - 1 - tf.range(slots, dtype=tf.int64), slots) + 1
    weights = tf.cast(tf.gather(bands, lags), ring.dtype)
    noise = (row - tf.linalg.matvec(ring, weights, transpose_a=True)) / tf.cast(
        bands[0], ring.dtype
    )
    is_slot = tf.equal(tf.range(slots, dtype=tf.int64), tf.math.floormod(i, slots))
    # A selection, and not a scatter, because that refuses empty tensors.
    ring = tf.where(is_slot[:, tf.newaxis], noise[tf.newaxis], ring)
    return noise * tf.cast(scale, noise.dtype), ring


def _windowed(
    recursion: WindowNoise, i: tf.Tensor, draw: DrawRow, accumulators: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Row i of a banded C^-1 with accumulators; the window's rows of Z are drawn anew."""
    length = recursion.window_length
    is_constant = len(recursion.window) == 1
    window = tf.gather(tf.constant(recursion.window), tf.zeros_like(i) if is_constant else i)
    oldest = i - length + 1
    first = tf.maximum(oldest, 0)
    # The weights of the rows from ``first`` to i.
    weights = tf.reverse(window[: i - first + 1], axis=[0])
    row = _combined_rows_of_z(draw, first, i, weights, accumulators)
    if recursion.num_accumulators:
        leaving = tf.cast(draw(first), tf.float64)
        # Nothing leaves the window in its first rounds.
        gains = tf.gather(tf.constant(recursion.right), first) * tf.cast(oldest >= 0, tf.float64)
        added = gains[:, tf.newaxis] * leaving
        accumulators = accumulators + tf.cast(added, accumulators.dtype)
        left = tf.gather(tf.constant(recursion.left), i)
        row += tf.linalg.matvec(tf.cast(accumulators, tf.float64), left, transpose_a=True)
    if recursion.row_scales is not None:
        row *= tf.gather(tf.constant(recursion.row_scales), i)
    return tf.cast(row, accumulators.dtype), accumulators


def _advanced(
    recursion: StateSpaceNoise, i: tf.Tensor, draw: DrawRow, kept: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """One step of the linear recurrence over the state vectors.

    Decays rounded to single precision would be those of another matrix: weights are the sum
    of two numbers, and products with float64 tensors would take twice the time.
    """
    phase = tf.gather(tf.constant(recursion.phases, tf.int64), i)
    weights = tf.gather(tf.constant(block_plans.weights_of_phases(recursion)), phase)
    rounded = tf.cast(weights, kept.dtype)
    rest = tf.cast(weights - tf.cast(rounded, tf.float64), kept.dtype)
    inputs = tf.concat([kept, draw(i)[tf.newaxis]], axis=0)
    outputs = tf.concat([rounded, rest], axis=0) @ inputs
    outputs = outputs[: weights.shape[1]] + outputs[weights.shape[1] :]
    return outputs[0], outputs[1:]


def _combined_rows_of_z(
    draw: DrawRow, first: tf.Tensor, last: tf.Tensor, weights: tf.Tensor, history: tf.Tensor
) -> tf.Tensor:
    """The float64 sum of ``weights[j - first] * Z[j]``, each row drawn anew: no state."""

    def add_row(j: tf.Tensor, total: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return j + 1, total + weights[j - first] * tf.cast(draw(j), tf.float64)

    zeros = tf.zeros(history.shape[1:], tf.float64)
    _, row = tf.while_loop(lambda j, _: j <= last, add_row, (first, zeros))
    return row
