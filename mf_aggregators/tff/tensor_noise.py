"""Correlated noise rows as TensorFlow graphs, over any structure of tensors.

``initial_state`` and ``next_row`` are the same small shape as ``noise.streams`` has in
NumPy, with the same rows of Z: functions of (seed, row, coordinate) alone, by a
counter-based generator, so that no state is kept for them. What else a recursion needs of
earlier rounds is in the state, or in files outside it (``noise.costs`` says which).
"""

import dataclasses
from typing import Any, NamedTuple

import tensorflow as tf

from mf_aggregators.noise import recursions, row_layout
from mf_aggregators.noise.recursions import NoiseRecursion
from mf_aggregators.noise.row_layout import Segment
from mf_aggregators.tff import tensor_blocks, tensor_steps
from mf_aggregators.tff.tensor_blocks import BlockFiles
from mf_aggregators.tff.tensor_rows_of_z import PhiloxWords, WordSource, panel_rows

_PARALLEL_PANELS = 4


class NoiseState(NamedTuple):
    """Where a stream of noise rows stands, as tensors.

    Attributes:
      round_index: int64 scalar: the round that the next row is for, from 0.
      seed: (2,) int64: the stream's secret.
      stream: (2,) int64: the stream's name, which is not secret.
      history: For each segment of a row, what the recursion needs of earlier rounds and
        cannot draw again: (panels, recursions.floats_per_parameter, width); an empty
        tuple if nothing is needed or it is kept in files.
    """

    round_index: Any
    seed: Any
    stream: Any
    history: Any


@dataclasses.dataclass(frozen=True, eq=False)
class TensorNoise:
    """What defines a stream but for its seed.

    Attributes:
      recursion: The mechanism's recursion.
      specs: The tensors of a row, flat: tf.TensorSpec of floating-point types.
      source: Where random words come from.
      files: Where rows are kept, or None to keep history in the state.
    """

    recursion: NoiseRecursion
    specs: tuple[tf.TensorSpec, ...]
    source: WordSource = dataclasses.field(default_factory=PhiloxWords)
    files: BlockFiles | None = None

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The layout of a row."""
        return segments_of(self.specs)


def segments_of(specs: tuple[tf.TensorSpec, ...]) -> tuple[Segment, ...]:
    """Returns the layout of a row of these tensors."""
    return row_layout.segments(
        [tuple(spec.shape) for spec in specs], [noise_dtype(spec.dtype).name for spec in specs]
    )


def initial_state(noise: TensorNoise, seed: tf.Tensor, stream: tf.Tensor) -> NoiseState:
    """Returns the state before the first round.

    Args:
      noise: The stream's definition.
      seed: (2,) int64.
      stream: (2,) int64; no two streams of different seeds may have the same.

    Returns:
      The state.
    """
    history: tuple[tf.Tensor, ...] = ()
    kept = recursions.floats_per_parameter(noise.recursion)
    if kept and noise.files is None:
        history = tuple(
            tf.zeros([segment.num_panels, kept, segment.width], segment.dtype)
            for segment in noise.segments
        )
    return NoiseState(tf.zeros([], tf.int64), seed, stream, history)


def next_row(noise: TensorNoise, state: NoiseState) -> tuple[list[tf.Tensor], NoiseState]:
    """Returns the row of C^-1 Z for the state's round, at unit variance of Z, and the next state.

    Args:
      noise: The stream's definition.
      state: What :func:`initial_state` or the last call returned.

    Returns:
      A tensor for each spec, float64 for float64 specs and float32 for all others, and
      the state for the next round. Running the graph fails with InvalidArgumentError if
      the mechanism has no more rounds.
    """
    recursion = noise.recursion
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
    row: list[tf.Tensor] = [tf.zeros(spec.shape, noise_dtype(spec.dtype)) for spec in noise.specs]
    history = []
    for position, segment in enumerate(noise.segments):
        if noise.files is not None:
            flat = tensor_blocks.next_row(noise.files, segment, i, state.seed, state.stream)
        else:
            kept = state.history[position] if state.history else None
            flat, kept = _stepped(noise, segment, i, state.seed, kept)
            history.append(kept)
        for tensor_position, tensor in _split(segment, flat, noise.specs):
            row[tensor_position] = tensor
    next_history = tuple(history) if state.history else state.history
    return row, NoiseState(i + 1, state.seed, state.stream, next_history)


def _stepped(
    noise: TensorNoise,
    segment: Segment,
    i: tf.Tensor,
    seed: tf.Tensor,
    history: tf.Tensor | None,
) -> tuple[tf.Tensor, tf.Tensor | None]:
    """One step of a segment, panel by panel: (size,), and the next history."""
    dtype, width, panels = tf.as_dtype(segment.dtype), segment.width, segment.num_panels

    def step(panel: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        def draw(row: tf.Tensor) -> tf.Tensor:
            number = segment.first_panel + panel
            return panel_rows(noise.source, seed, row, 1, number, width, dtype)[0]

        of_panel = tf.zeros([0, width], dtype) if history is None else history[panel]
        return tensor_steps.step(noise.recursion, i, draw, of_panel)

    if panels == 1:
        row, kept = step(tf.zeros([], tf.int64))
        return row, None if history is None else kept[tf.newaxis]

    def add_panel(
        panel: tf.Tensor, rows: tf.TensorArray, histories: tf.TensorArray
    ) -> tuple[tf.Tensor, tf.TensorArray, tf.TensorArray]:
        row, kept = step(panel)
        position = tf.cast(panel, tf.int32)
        return panel + 1, rows.write(position, row), histories.write(position, kept)

    kept_rows = 0 if history is None else int(history.shape[1])
    _, rows, histories = tf.while_loop(
        lambda panel, *_: panel < panels,
        add_panel,
        (
            tf.zeros([], tf.int64),
            tf.TensorArray(dtype, panels, element_shape=[width]),
            tf.TensorArray(dtype, panels, element_shape=[kept_rows, width]),
        ),
        parallel_iterations=_PARALLEL_PANELS,
    )
    row = tf.reshape(rows.concat(), [-1])[: segment.size]
    return row, None if history is None else histories.stack()


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
    """Returns what noise for a tensor is computed in: float64 for float64, else float32."""
    return tf.float64 if dtype == tf.float64 else tf.float32
