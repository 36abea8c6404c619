"""Rows of noise one by one, as TensorFlow graphs that keep in the state what they need.

Earlier rows of Z are drawn again from their seeds; everything else that a recursion needs of
earlier rounds is its history: int32 rows, or float64 state vectors. A step works on one chunk of
coordinates, whose tensors fit into a processor's cache. ``IntegerRows`` is the same in NumPy.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import tensorflow as tf

from mf_aggregators.noise.integer_rows import IntegerRows, Rounding
from mf_aggregators.noise.recursions import (
    DenseNoise,
    IndependentNoise,
    NoiseRecursion,
    StateSpaceNoise,
    WindowNoise,
)
from mf_aggregators.noise.recursions.substitution import SubstitutionNoise
from mf_aggregators.noise.rows_of_z import DEFAULT_SOURCE, NoiseSource, Segment
from mf_aggregators.tff import tensor_rows_of_z
from mf_aggregators.tff.tensor_rows_of_z import chunk_rows

_PARALLEL_CHUNKS = 4

# Takes a row's index (int64 scalar) and returns that row of Z, (width,) int64, in steps.
_DrawRow: TypeAlias = Callable[[tf.Tensor], tf.Tensor]


@dataclasses.dataclass(frozen=True, eq=False)
class RowsInState:
    """Rows whose history is a part of the state that TFF passes between its processes.

    Attributes:
      rows: The mechanism's rows.
      source: Where random bits come from.
    """

    rows: IntegerRows
    source: NoiseSource = DEFAULT_SOURCE

    @functools.cached_property
    def rounding(self) -> Rounding:
        """What bounds the roundings of the rows."""
        return Rounding.of(self.rows)

    def initial_history(self, segment: Segment) -> tf.Tensor | None:
        """Returns (chunks, floats_per_parameter, width) zeros; None if nothing is kept."""
        kept = self.rows.recursion.floats_per_parameter
        shape = [segment.num_chunks, kept, segment.width]
        return tf.zeros(shape, _history_dtype(self.rows.normalised)) if kept else None

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
          (segment.size,) int32, and the history for the next round.
        """
        del stream
        width, chunks = segment.width, segment.num_chunks
        table = tensor_rows_of_z.graph_table()
        recursion, dtype = self.rows.normalised, _history_dtype(self.rows.normalised)

        def step(chunk: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            def draw(row: tf.Tensor) -> tf.Tensor:
                number = segment.first_chunk + chunk
                return chunk_rows(self.source, seed, row, 1, number, width, table)[0]

            of_chunk = tf.zeros([0, width], dtype) if history is None else history[chunk]
            return _step(recursion, self.rows, i, draw, of_chunk)

        if chunks == 1:
            row, kept = step(tf.zeros([], tf.int64))
            return row, None if history is None else kept[tf.newaxis]

        def add_chunk(
            chunk: tf.Tensor, rows: tf.TensorArray, histories: tf.TensorArray
        ) -> tuple[tf.Tensor, tf.TensorArray, tf.TensorArray]:
            row, kept = step(chunk)
            position = tf.cast(chunk, tf.int32)
            return chunk + 1, rows.write(position, row), histories.write(position, kept)

        kept_rows = recursion.floats_per_parameter
        _, rows, histories = tf.while_loop(
            lambda chunk, *_: chunk < chunks,
            add_chunk,
            (
                tf.zeros([], tf.int64),
                tf.TensorArray(tf.int32, chunks, element_shape=[width]),
                tf.TensorArray(dtype, chunks, element_shape=[kept_rows, width]),
            ),
            parallel_iterations=_PARALLEL_CHUNKS,
        )
        row = tf.reshape(rows.concat(), [-1])[: segment.size]
        return row, None if history is None else histories.stack()


def integer_row(rows: IntegerRows, z: tf.Tensor, earlier: tf.Tensor) -> tf.Tensor:
    """Returns rows as ``integer_rows`` defines them, (...) int32.

    Args:
      rows: The mechanism's rows.
      z: (...) int64: rows of Z, in steps.
      earlier: (...) float64: what earlier rounds add to them, in steps of Z.
    """
    half = tf.constant(1 << (rows.shift - 1), tf.int64)
    sums = z + tf.cast(tf.round(earlier), tf.int64) + half
    return tf.cast(tf.bitwise.right_shift(sums, tf.constant(rows.shift, tf.int64)), tf.int32)


def _history_dtype(recursion: NoiseRecursion) -> tf.DType:
    """Rows are integers, and state vectors are not."""
    return tf.float64 if recursion.num_state_vectors else tf.int32


@functools.singledispatch
def _step(
    recursion: NoiseRecursion, rows: IntegerRows, i: tf.Tensor, draw: _DrawRow, history: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """A row of C^-1 Z in one chunk, (width,) int32, and the next history.

    Args:
      recursion: The normalised recursion.
      rows: The mechanism's rows.
      i: int64 scalar: the round, from 0.
      draw: Gives rows of Z.
      history: (floats_per_parameter, width), zeros before the first round.
    """
    raise TypeError(f"{type(recursion).__name__} is no recursion of the library.")


@_step.register
def _independent(
    recursion: IndependentNoise,
    rows: IntegerRows,
    i: tf.Tensor,
    draw: _DrawRow,
    history: tf.Tensor,
) -> tuple[tf.Tensor, tf.Tensor]:
    return integer_row(rows, draw(i), tf.zeros([], tf.float64)), history


@_step.register
def _dense(
    recursion: DenseNoise, rows: IntegerRows, i: tf.Tensor, draw: _DrawRow, history: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    weights = _row_of(recursion.inverse, i)
    earlier = _combined_rows_of_z(draw, tf.zeros([], tf.int64), i, weights, history)
    return integer_row(rows, draw(i), earlier), history


@_step.register
def _substituted(
    recursion: SubstitutionNoise,
    rows: IntegerRows,
    i: tf.Tensor,
    draw: _DrawRow,
    history: tf.Tensor,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Forward substitution over a ring of the last b - 1 rows; slot j mod (b - 1) holds row j."""
    slots = recursion.num_earlier_rows
    if not slots:
        return integer_row(rows, draw(i), tf.zeros([], tf.float64)), history
    # Slots that no round has filled hold zeros, so their weights do not matter.
    lags = tf.math.floormod(i - 1 - tf.range(slots, dtype=tf.int64), slots) + 1
    weights = tf.gather(_row_of(recursion.table, i), lags) * -rows.row_to_z
    earlier = tf.linalg.matvec(tf.cast(history, tf.float64), weights, transpose_a=True)
    row = integer_row(rows, draw(i), earlier)
    is_slot = tf.equal(tf.range(slots, dtype=tf.int64), tf.math.floormod(i, slots))
    # A selection, and not a scatter, because that refuses empty tensors.
    return row, tf.where(is_slot[:, tf.newaxis], row[tf.newaxis], history)


@_step.register
def _windowed(
    recursion: WindowNoise, rows: IntegerRows, i: tf.Tensor, draw: _DrawRow, history: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """A banded C^-1 with accumulators; the window's rows of Z are drawn anew."""
    oldest = i - recursion.window_length + 1
    first = tf.maximum(oldest, 0)
    # The weights of the rows from ``first`` to i - 1.
    weights = tf.reverse(_row_of(recursion.window, i)[1 : i - first + 1], axis=[0])
    earlier = _combined_rows_of_z(draw, first, i, weights, history)
    z = draw(i)
    if recursion.num_state_vectors:
        leaving = z if recursion.window_length == 1 else draw(first)
        # Nothing leaves the window in its first rounds.
        gains = tf.gather(tf.constant(recursion.right), first) * tf.cast(oldest >= 0, tf.float64)
        following = history + gains[:, tf.newaxis] * tf.cast(leaving, tf.float64)
        # Z[i] itself is not of what earlier rounds add.
        of_earlier = history if recursion.window_length == 1 else following
        left = tf.gather(tf.constant(recursion.left), i)
        earlier += tf.linalg.matvec(of_earlier, left, transpose_a=True)
        history = following
    return integer_row(rows, z, earlier), history


@_step.register
def _recurred(
    recursion: StateSpaceNoise, rows: IntegerRows, i: tf.Tensor, draw: _DrawRow, history: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """One step of the linear recurrence over the state vectors."""
    phase = tf.gather(tf.constant(recursion.phases, tf.int64), i)
    outputs = tf.gather(tf.constant(recursion.outputs), phase) * rows.row_to_z
    row = integer_row(rows, draw(i), tf.linalg.matvec(history, outputs, transpose_a=True))
    weights = tf.gather(tf.constant(recursion.following_by_phase()), phase)
    inputs = tf.concat([history, tf.cast(row, tf.float64)[tf.newaxis]], axis=0)
    return row, weights @ inputs


def _row_of(table: np.ndarray, i: tf.Tensor) -> tf.Tensor:
    """Row i of a table, or its only row where all rounds have the same."""
    return tf.constant(table[0]) if len(table) == 1 else tf.gather(tf.constant(table), i)


def _combined_rows_of_z(
    draw: _DrawRow, first: tf.Tensor, end: tf.Tensor, weights: tf.Tensor, history: tf.Tensor
) -> tf.Tensor:
    """The float64 sum of ``weights[j - first] * Z[j]`` over j < end, drawn anew: no state."""

    def add_row(j: tf.Tensor, total: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return j + 1, total + weights[j - first] * tf.cast(draw(j), tf.float64)

    zeros = tf.zeros(history.shape[1:], tf.float64)
    _, row = tf.while_loop(lambda j, _: j < end, add_row, (first, zeros))
    return row
