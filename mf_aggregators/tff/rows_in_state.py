"""Rows of noise one by one, as TensorFlow graphs that keep in the state what they need.

Earlier rows of Z are drawn again from their seeds; everything else that a recursion needs of
earlier rounds is its history. A step works on one chunk of coordinates, whose tensors fit into
a processor's cache. Each kind of recursion has the arithmetic of its own that loses nothing:
``NoiseRecursion.advance`` in NumPy.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import tensorflow as tf

from mf_aggregators.noise.recursions import (
    DenseNoise,
    IndependentNoise,
    NoiseRecursion,
    StateSpaceNoise,
    WindowNoise,
)
from mf_aggregators.noise.recursions.substitution import SubstitutionNoise
from mf_aggregators.noise.row_layout import Segment
from mf_aggregators.tff import tensor_discrete_gaussian
from mf_aggregators.tff.tensor_rows_of_z import BitSource, PhiloxBits, chunk_rows

_PARALLEL_CHUNKS = 4

# Takes a row's index (int64 scalar) and returns that row of Z, (width,), in the noise's dtype.
_DrawRow: TypeAlias = Callable[[tf.Tensor], tf.Tensor]


@dataclasses.dataclass(frozen=True, eq=False)
class RowsInState:
    """Rows whose history is a part of the state that TFF passes between its processes.

    Attributes:
      recursion: The mechanism's recursion.
      source: Where random bits come from.
    """

    recursion: NoiseRecursion
    source: BitSource = dataclasses.field(default_factory=PhiloxBits)

    def initial_history(self, segment: Segment) -> tf.Tensor | None:
        """Returns (chunks, floats_per_parameter, width) zeros; None if nothing is kept."""
        kept = self.recursion.floats_per_parameter
        return tf.zeros([segment.num_chunks, kept, segment.width], segment.dtype) if kept else None

    def next_row(
        self,
        segment: Segment,
        i: tf.Tensor,
        seed: tf.Tensor,
        stream: tf.Tensor,
        history: tf.Tensor | None,
    ) -> tuple[tf.Tensor, tf.Tensor | None]:
        """Returns a row of a segment and the next history.

        Args:
          segment: The part of the row.
          i: int64 scalar: the round, of those that there are.
          seed: (2,) int64.
          stream: The stream's name, which only files need.
          history: What :meth:`initial_history` or the last call returned.

        Returns:
          (segment.size,) of the segment's dtype, and the history for the next round.
        """
        del stream
        dtype, width, chunks = tf.as_dtype(segment.dtype), segment.width, segment.num_chunks
        table = tensor_discrete_gaussian.graph_table()
        kept_rows = self.recursion.floats_per_parameter

        def step(chunk: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            def draw(row: tf.Tensor) -> tf.Tensor:
                number = segment.first_chunk + chunk
                return chunk_rows(self.source, seed, row, 1, number, width, dtype, table)[0]

            of_chunk = tf.zeros([0, width], dtype) if history is None else history[chunk]
            return _step(self.recursion, i, draw, of_chunk)

        if chunks == 1:
            row, kept = step(tf.zeros([], tf.int64))
            return row, None if history is None else kept[tf.newaxis]

        def add_chunk(
            chunk: tf.Tensor, rows: tf.TensorArray, histories: tf.TensorArray
        ) -> tuple[tf.Tensor, tf.TensorArray, tf.TensorArray]:
            row, kept = step(chunk)
            position = tf.cast(chunk, tf.int32)
            return chunk + 1, rows.write(position, row), histories.write(position, kept)

        _, rows, histories = tf.while_loop(
            lambda chunk, *_: chunk < chunks,
            add_chunk,
            (
                tf.zeros([], tf.int64),
                tf.TensorArray(dtype, chunks, element_shape=[width]),
                tf.TensorArray(dtype, chunks, element_shape=[kept_rows, width]),
            ),
            parallel_iterations=_PARALLEL_CHUNKS,
        )
        row = tf.reshape(rows.concat(), [-1])[: segment.size]
        return row, None if history is None else histories.stack()


@functools.singledispatch
def _step(
    recursion: NoiseRecursion, i: tf.Tensor, draw: _DrawRow, history: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """A row of C^-1 Z in one chunk, (width,), and the next history, of the history's dtype.

    Args:
      recursion: The mechanism's recursion.
      i: int64 scalar: the round, from 0.
      draw: Gives rows of Z.
      history: (floats_per_parameter, width), zeros before the first round.
    """
    raise TypeError(f"{type(recursion).__name__} is no recursion of the library.")


@_step.register
def _independent(
    recursion: IndependentNoise, i: tf.Tensor, draw: _DrawRow, history: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    del recursion
    return draw(i), history


@_step.register
def _dense(
    recursion: DenseNoise, i: tf.Tensor, draw: _DrawRow, history: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    weights = _row_of(recursion.inverse, i)
    row = _combined_rows_of_z(draw, tf.zeros([], tf.int64), i, weights, history)
    return tf.cast(row, history.dtype), history


@_step.register
def _substituted(
    recursion: SubstitutionNoise, i: tf.Tensor, draw: _DrawRow, history: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Forward substitution over a ring of the last b - 1 rows; slot j mod (b - 1) holds row j."""
    bands, scale = _row_of(recursion.table, i), tf.ones([], tf.float64)
    if recursion.scales_on_use is not None:
        scale = tf.gather(tf.constant(recursion.scales_on_use), i)
    row = draw(i)
    slots = recursion.num_earlier_rows
    if not slots:
        return row * tf.cast(scale / bands[0], row.dtype), history
    # Slots that no round has filled hold zeros, so their weights do not matter.
    lags = tf.math.floormod(i - 1 - tf.range(slots, dtype=tf.int64), slots) + 1
    weights = tf.cast(tf.gather(bands, lags), history.dtype)
    noise = (row - tf.linalg.matvec(history, weights, transpose_a=True)) / tf.cast(
        bands[0], history.dtype
    )
    is_slot = tf.equal(tf.range(slots, dtype=tf.int64), tf.math.floormod(i, slots))
    # A selection, and not a scatter, because that refuses empty tensors.
    history = tf.where(is_slot[:, tf.newaxis], noise[tf.newaxis], history)
    return noise * tf.cast(scale, noise.dtype), history


@_step.register
def _windowed(
    recursion: WindowNoise, i: tf.Tensor, draw: _DrawRow, history: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Row i of a banded C^-1 with accumulators; the window's rows of Z are drawn anew."""
    oldest = i - recursion.window_length + 1
    first = tf.maximum(oldest, 0)
    # The weights of the rows from ``first`` to i.
    weights = tf.reverse(_row_of(recursion.window, i)[: i - first + 1], axis=[0])
    row = _combined_rows_of_z(draw, first, i, weights, history)
    if recursion.num_state_vectors:
        leaving = tf.cast(draw(first), tf.float64)
        # Nothing leaves the window in its first rounds.
        gains = tf.gather(tf.constant(recursion.right), first) * tf.cast(oldest >= 0, tf.float64)
        added = gains[:, tf.newaxis] * leaving
        history = history + tf.cast(added, history.dtype)
        left = tf.gather(tf.constant(recursion.left), i)
        row += tf.linalg.matvec(tf.cast(history, tf.float64), left, transpose_a=True)
    if recursion.row_scales is not None:
        row *= tf.gather(tf.constant(recursion.row_scales), i)
    return tf.cast(row, history.dtype), history


@_step.register
def _recurred(
    recursion: StateSpaceNoise, i: tf.Tensor, draw: _DrawRow, history: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """One step of the linear recurrence over the state vectors.

    Decays rounded to single precision would be those of another matrix: weights are the sum
    of two numbers, and products with float64 tensors would take twice the time.
    """
    phase = tf.gather(tf.constant(recursion.phases, tf.int64), i)
    weights = tf.gather(tf.constant(recursion.weights_by_phase()), phase)
    rounded = tf.cast(weights, history.dtype)
    rest = tf.cast(weights - tf.cast(rounded, tf.float64), history.dtype)
    inputs = tf.concat([history, draw(i)[tf.newaxis]], axis=0)
    outputs = tf.concat([rounded, rest], axis=0) @ inputs
    outputs = outputs[: weights.shape[1]] + outputs[weights.shape[1] :]
    return outputs[0], outputs[1:]


def _row_of(table: np.ndarray, i: tf.Tensor) -> tf.Tensor:
    """Row i of a table, or its only row where all rounds have the same."""
    return tf.constant(table[0]) if len(table) == 1 else tf.gather(tf.constant(table), i)


def _combined_rows_of_z(
    draw: _DrawRow, first: tf.Tensor, last: tf.Tensor, weights: tf.Tensor, history: tf.Tensor
) -> tf.Tensor:
    """The float64 sum of ``weights[j - first] * Z[j]``, each row drawn anew: no state."""

    def add_row(j: tf.Tensor, total: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return j + 1, total + weights[j - first] * tf.cast(draw(j), tf.float64)

    zeros = tf.zeros(history.shape[1:], tf.float64)
    _, row = tf.while_loop(lambda j, _: j <= last, add_row, (first, zeros))
    return row
