"""Correlated noise rows as TensorFlow graphs, over any structure of tensors.

``initial_state`` and ``next_row`` are the same pair as in NumPy's ``noise.streams``, with the
same rows of Z: functions of (seed, row, coordinate) alone, by a counter-based generator, so
that no state is kept for them. What else a recursion needs of earlier rounds is in the state
(``rows_in_state``) or in files outside it (``rows_on_disk``); ``noise.costs`` says which is
cheaper.
"""

import dataclasses
from typing import Any, NamedTuple, Protocol

import tensorflow as tf

from mf_aggregators.noise import NOISE_FORMAT, row_layout
from mf_aggregators.noise.integer_rows import IntegerRows
from mf_aggregators.noise.random_bits import NoiseSource
from mf_aggregators.noise.recursions import NoiseRecursion
from mf_aggregators.noise.rounding import Rounding
from mf_aggregators.noise.row_layout import Segment
from mf_aggregators.tff import processes


class NoiseState(NamedTuple):
    """Where a stream of noise rows stands, as tensors.

    It is printed without its seed and its history: TFF keeps the class, whatever a state is nested
    in, so that no cell of a notebook, log or traceback holds them.

    Attributes:
      noise_format: int64 scalar: ``noise.NOISE_FORMAT`` of the version that made the state.
      round_index: int64 scalar: the round that the next row is for, from 0.
      seed: (2,) int64: the stream's secret.
      stream: (2,) int64: the stream's name, which is not secret.
      history: For each segment of a row, what the recursion needs of earlier rounds and
        cannot draw again: (chunks, floats_per_parameter of it, width) int32 rows or float64
        state vectors; an empty tuple if nothing is needed or it is kept in files.
    """

    noise_format: Any
    round_index: Any
    seed: Any
    stream: Any
    history: Any

    def __repr__(self) -> str:
        """Returns a text without what noise could be subtracted with."""
        return (
            f"{type(self).__name__}(noise_format={self.noise_format}, "
            f"round_index={self.round_index}, seed=<secret>, stream={self.stream}, "
            "history=<secret>)"
        )


class RowStore(Protocol):
    """Makes the rows of one recursion, and keeps what they need of earlier rounds."""

    @property
    def rows(self) -> IntegerRows:
        """The mechanism's rows."""

    @property
    def rounding(self) -> Rounding:
        """What bounds the roundings of the rows."""

    @property
    def source(self) -> NoiseSource:
        """Where random bits come from."""

    def initial_history(self, segment: Segment) -> tf.Tensor | None:
        """Returns what the state holds for a segment before the first round; None for nothing."""

    def next_row(
        self,
        segment: Segment,
        i: tf.Tensor,
        seed: tf.Tensor,
        stream: tf.Tensor,
        history: tf.Tensor | None,
    ) -> tuple[tf.Tensor, tf.Tensor | None]:
        """Returns the (segment.size,) int32 row of round i, and what the state holds after it."""


@dataclasses.dataclass(frozen=True, eq=False)
class TensorNoise:
    """A stream of noise rows but for its seed.

    Attributes:
      store: Makes the rows: ``RowsInState`` or ``RowsOnDisk``.
      specs: The tensors of a row, flat: tf.TensorSpec of floating-point types.
    """

    store: RowStore
    specs: tuple[tf.TensorSpec, ...]

    @property
    def recursion(self) -> NoiseRecursion:
        """The mechanism's recursion."""
        return self.store.rows.recursion

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The layout of a row."""
        return segments_of(self.specs)

    def initial_state(self, seed: tf.Tensor, stream: tf.Tensor) -> NoiseState:
        """Returns the state before the first round.

        Args:
          seed: (2,) int64.
          stream: (2,) int64; no two streams of different seeds may have the same.
        """
        histories = (self.store.initial_history(segment) for segment in self.segments)
        kept = tuple(history for history in histories if history is not None)
        noise_format = tf.constant(NOISE_FORMAT, tf.int64)
        return NoiseState(noise_format, tf.zeros([], tf.int64), seed, stream, kept)

    def next_row(self, state: NoiseState) -> tuple[list[tf.Tensor], tf.Tensor, NoiseState]:
        """Returns the state's row of C^-1 Z as integers, their step, and the next state.

        Args:
          state: What :meth:`initial_state` or the last call returned.

        Returns:
          An int32 tensor for each spec, the row's step at unit variance of Z (float64 scalar, not
          zero), and the state for the next round. Running the graph fails with
          InvalidArgumentError if the mechanism has no more rounds.
        """
        i = self._checked_round(_of_this_noise(state))
        row = [tf.zeros(spec.shape, tf.int32) for spec in self.specs]
        histories = []
        for number, segment in enumerate(self.segments):
            history = state.history[number] if state.history else None
            flat, history = self.store.next_row(segment, i, state.seed, state.stream, history)
            histories.append(history)
            for position, tensor in _split(segment, flat, self.specs):
                row[position] = tensor
        kept = tuple(histories) if state.history else state.history
        step = tf.gather(tf.constant(self.store.rows.steps), i)
        return row, step, state._replace(round_index=i + 1, history=kept)

    def _checked_round(self, round_index: tf.Tensor) -> tf.Tensor:
        num_rounds = self.recursion.num_rounds
        has_round = tf.debugging.assert_less(
            round_index,
            tf.constant(num_rounds, tf.int64),
            message=processes.refusal(
                f"The factorization has noise for {num_rounds} rounds, and one more round "
                "was asked for: its noise row would repeat an earlier one. Stop training, or use a "
                "factorization for more rounds."
            ),
        )
        with tf.control_dependencies([has_round] if has_round is not None else []):
            return tf.identity(round_index)


def _of_this_noise(state: NoiseState) -> tf.Tensor:
    """The state's round, of a state whose earlier rows this version would have made."""
    is_same = tf.debugging.assert_equal(
        state.noise_format,
        tf.constant(NOISE_FORMAT, tf.int64),
        message=processes.refusal(
            "This state was made by a version whose noise is another one of the same seed: go on "
            "with that version, or start anew."
        ),
    )
    with tf.control_dependencies([is_same] if is_same is not None else []):
        return tf.identity(state.round_index)


def segments_of(specs: tuple[tf.TensorSpec, ...]) -> tuple[Segment, ...]:
    """Returns the layout of a row of these tensors."""
    return row_layout.segments(
        [tuple(spec.shape) for spec in specs], [noise_dtype(spec.dtype).name for spec in specs]
    )


def _split(
    segment: Segment, flat: tf.Tensor, specs: tuple[tf.TensorSpec, ...]
) -> list[tuple[int, tf.Tensor]]:
    """The tensors of a segment with their positions in the row."""
    sizes = [specs[position].shape.num_elements() for position in segment.positions]
    return [
        (position, tf.reshape(tensor, specs[position].shape))
        for position, tensor in zip(segment.positions, tf.split(flat, sizes), strict=True)
    ]


def noise_dtype(dtype: tf.DType) -> tf.DType:
    """Returns which segment a tensor belongs to: that of float64, or that of all others."""
    return tf.float64 if dtype == tf.float64 else tf.float32
