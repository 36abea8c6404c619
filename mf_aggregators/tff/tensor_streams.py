"""Streams of correlated noise as TensorFlow graphs, over any structure of tensors.

``initial_state`` and ``next_row`` are those of ``kernel.integers`` in NumPy. Rows of Z
are the same, too: each is a function of (seed, row, coordinate) alone, so that no state is kept for
them. What else a noising matrix needs of earlier rounds is in the state (``tensor_rows``) or in
files outside it (``rows_on_disk``); ``noise.costs`` says which is cheaper, and :func:`make` takes
that one.
"""

import dataclasses
import math
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from mf_aggregators import inputs
from mf_aggregators.kernel import integers
from mf_aggregators.kernel.claim import Claim, Guarantee, claim_of
from mf_aggregators.kernel.draws import DEFAULT_SOURCE, NoiseSource
from mf_aggregators.kernel.integers import IntegerSums, RowLayout, Segment
from mf_aggregators.kernel.numbers import FloatArray
from mf_aggregators.kernel.release import Release
from mf_aggregators.kernel.rows import NoiseRecursion
from mf_aggregators.noise import costs, noise_directory
from mf_aggregators.noise.costs import NoiseCost, NoiseStorage
from mf_aggregators.tff import processes, rows_on_disk
from mf_aggregators.tff.release_record import ReleaseRecord
from mf_aggregators.tff.rows_on_disk import RowsOnDisk
from mf_aggregators.tff.tensor_rows import RowsInState

# The refusal of a state that has another fingerprint than the process.
OTHER_PROCESS = (
    "This state is of another mechanism, of other options (clip norm, clients per round, noise "
    "source or storage, sums, model) or of another version: its rows of noise are not those of "
    "this process. Go on with the process that made it, or start a new run from a fresh state. "
    "(States of version 2 and before tell no mechanism, and are all refused.)"
)


class NoiseState(NamedTuple):
    """Where a stream of noise rows stands, as tensors.

    It prints neither its seed nor its history. TFF keeps the class wherever a state is nested, so
    that neither of them shows up in a notebook, a log or a traceback.

    Attributes:
      fingerprint: int64 scalar: tells the mechanism, options and version that made the state.
      round_index: int64 scalar: the round that the next row is for, from 0.
      seed: (2,) int64: the stream's secret.
      stream: (2,) int64: the stream's name, which is not secret.
      history: For each segment of a row, what the noising matrix needs of earlier rounds and
        cannot draw again: (tiles, floats_per_parameter of it, width) int32 rows or float64
        state vectors; an empty tuple if nothing is needed or it is kept in files.
    """

    fingerprint: Any
    round_index: Any
    seed: Any
    stream: Any
    history: Any

    def __repr__(self) -> str:
        """Returns a text without what noise could be subtracted with."""
        return (
            f"{type(self).__name__}(fingerprint={self.fingerprint}, "
            f"round_index={self.round_index}, seed=<secret>, stream={self.stream}, "
            "history=<secret>)"
        )


@dataclasses.dataclass(frozen=True, eq=False)
class TensorNoise:
    """A stream of noise rows but for its seed.

    Attributes:
      store: Makes the rows: ``RowsInState`` or ``RowsOnDisk``.
      specs: The tensors of a row, flat: tf.TensorSpec of floating-point types.
      fingerprints: The fingerprint of the states of each horizon before this run was extended, and
        last the fingerprint of its own states.
    """

    store: RowsInState | RowsOnDisk
    specs: tuple[tf.TensorSpec, ...]
    fingerprints: tuple[int, ...] = (0,)

    @property
    def recursion(self) -> NoiseRecursion:
        """The mechanism's noising matrix."""
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
        fingerprint = tf.constant(self.fingerprints[-1], tf.int64)
        return NoiseState(fingerprint, tf.zeros([], tf.int64), seed, stream, kept)

    def next_row(
        self, state: NoiseState, stddev: float = 1.0
    ) -> tuple[list[tf.Tensor], tf.Tensor, NoiseState]:
        """Returns the state's row of C^-1 Z as integers, their step, and the next state.

        Args:
          state: What :meth:`initial_state` or the last call returned.
          stddev: The standard deviation of Z.

        Returns:
          An int32 tensor for each spec, the row's step at this standard deviation (float64 scalar,
          not zero), and the state for the next round. Running the graph fails with
          InvalidArgumentError if the mechanism has no more rounds.
        """
        i = self._checked_round(state)
        row = [tf.zeros(spec.shape, tf.int32) for spec in self.specs]
        histories = []
        for number, segment in enumerate(self.segments):
            history = state.history[number] if state.history else None
            flat, history = self.store.next_row(segment, i, state.seed, state.stream, history)
            histories.append(history)
            shapes = [self.specs[position].shape for position in segment.positions]
            tensors = tf.split(flat, [shape.num_elements() for shape in shapes])
            for position, shape, tensor in zip(segment.positions, shapes, tensors, strict=True):
                row[position] = tf.reshape(tensor, shape)
        kept = tuple(histories) if state.history else state.history
        step = of_round(self.store.rows.steps * stddev, i)
        fingerprint = tf.constant(self.fingerprints[-1], tf.int64)
        return row, step, NoiseState(fingerprint, i + 1, state.seed, state.stream, kept)

    def _checked_round(self, state: NoiseState) -> tf.Tensor:
        """The state's round, if there is one left and the state is of this run."""
        num_rounds = self.recursion.num_rounds
        checks = [
            tf.debugging.assert_equal(
                tf.reduce_any(
                    tf.equal(state.fingerprint, tf.constant(self.fingerprints, tf.int64))
                ),
                True,
                message=processes.refusal(OTHER_PROCESS),
            ),
            tf.debugging.assert_less(
                state.round_index,
                tf.constant(num_rounds, tf.int64),
                message=processes.refusal(
                    f"The factorization has noise for {num_rounds} rounds, and one more round "
                    "was asked for: its noise row would repeat an earlier one. Stop training, or "
                    "use a factorization for more rounds."
                ),
            ),
        ]
        with tf.control_dependencies([check for check in checks if check is not None]):
            return tf.identity(state.round_index)


def of_round(numbers: FloatArray, i: tf.Tensor) -> tf.Tensor:
    """Returns a round's entry of a table, in a form that TensorFlow's optimizer leaves alone.

    The optimizer makes a constant of a table whose entries are all the same, and regroups products
    with constants, which changes last bits. The NaN at the end keeps the entries different.

    Args:
      numbers: (n,) float64: one for each round.
      i: int64 scalar: the round, of those that there are.
    """
    return tf.gather(tf.constant([*numbers, math.nan], tf.float64), i)


def layout_of(specs: tuple[tf.TensorSpec, ...]) -> RowLayout:
    """Returns the layout of a row of these tensors."""
    shapes = tuple(tuple(spec.shape) for spec in specs)
    return RowLayout(shapes, tuple(noise_dtype(spec.dtype).name for spec in specs))


def segments_of(specs: tuple[tf.TensorSpec, ...]) -> tuple[Segment, ...]:
    """Returns the segments of a row of these tensors."""
    return layout_of(specs).segments


def noise_dtype(dtype: tf.DType) -> tf.DType:
    """Returns what noise for a tensor is computed and released in: float64, or float32 for others.

    Its segment of a row is the one of this dtype.
    """
    return tf.float64 if dtype == tf.float64 else tf.float32


@dataclasses.dataclass(frozen=True)
class NoiseOptions:
    """What a user may choose about a run's noise.

    Attributes:
      storage: Where the noise of earlier rounds is kept.
      directory: Where noise files go; None for a temporary directory.
      source: What random bits come from.
    """

    storage: NoiseStorage = NoiseStorage.AUTO
    directory: str | os.PathLike[str] | None = None
    source: NoiseSource = DEFAULT_SOURCE

    @classmethod
    def of(
        cls, storage: str, directory: str | os.PathLike[str] | None, source: str
    ) -> "NoiseOptions":
        """Returns the options by their names.

        Raises:
          ValueError: If a name is not known.
        """
        return cls(
            inputs.member(NoiseStorage, storage, "noise_storage"),
            directory,
            inputs.member(NoiseSource, source, "noise_source"),
        )


@dataclasses.dataclass(frozen=True)
class NoiseParts:
    """What the graphs of a run need for its noise.

    Attributes:
      release: The kernel's, whose numbers all graphs have.
      noise: The definition of its stream.
      record: The record of what noise was added to; None for none.
    """

    release: Release
    noise: TensorNoise
    record: ReleaseRecord | None = None


def make(
    horizons: Sequence[Claim | Guarantee],
    norm: float,
    specs: tuple[tf.TensorSpec, ...],
    options: NoiseOptions,
    *,
    sums: IntegerSums | None = None,
    label: str = "",
    is_recorded: bool = False,
) -> NoiseParts:
    """Returns what a run's graphs need for its noise, with all files in place.

    Args:
      horizons: The claim or guarantee of each horizon of the run, the first one first.
      norm: The largest norm of the vector that a client adds.
      specs: The tensors of a row: floating point, of known shapes.
      options: The choices.
      sums: The grid of vectors; None for multiples of the norm over 2^30, of at most 2^22 vectors.
      label: Further options that states must not change.
      is_recorded: Whether to keep a record of released sums without a directory of the options as
        well, in a temporary one.

    Returns:
      The parts.

    Raises:
      NotProved: If the kernel refuses to release by the claims: a ValueError.
      ValueError: If the state would be too large to be passed between TFF's processes, or
        the directory cannot be used or is too small.
    """
    layout, claims = layout_of(specs), [*map(claim_of, horizons)]
    size = integers.total_size(layout.segments)
    # Without entries or standard deviation, there is no noise.
    has_noise = size > 0 and claims[0].sigma > 0.0
    if has_noise:
        # Before costs, which are of no use for more noise than that.
        inputs.check_charged(size, claims[-1].rows.num_rounds)
        cost = _cost([each.rows for each in claims], size, options.storage)
    is_on_disk = has_noise and cost.storage is NoiseStorage.DISK
    grid = IntegerSums() if sums is None else sums
    inputs.check_rounding(grid, size)
    release = Release(
        horizons[-1],
        norm,
        grid,
        earlier=horizons[:-1],
        layout=layout,
        source=options.source,
        is_on_disk=is_on_disk,
        label=f"{label} {specs}",
    )
    store: RowsInState | RowsOnDisk = RowsInState(release.rows, options.source)
    record = None
    if has_noise and (is_recorded or is_on_disk or options.directory is not None):
        directory = noise_directory.open_directory(options.directory)
        record = ReleaseRecord.in_directory(directory, release.noise_digests)
        if release.blocks is not None:
            noise_directory.check_room(directory, cost.disk_bytes)
            store = rows_on_disk.prepare(
                release.rows, release.blocks, layout.segments, options.source, directory
            )
    fingerprints = [int.from_bytes(each[:8], "little", signed=True) for each in release.digests]
    return NoiseParts(release, TensorNoise(store, specs, tuple(fingerprints)), record)


def _cost(horizons: Sequence[NoiseRecursion], size: int, storage: NoiseStorage) -> NoiseCost:
    """The cost of the storage that is used, if it can be."""
    recursion = horizons[-1]
    if storage is NoiseStorage.AUTO:
        if len(horizons) == 1:
            return costs.choose(recursion, size)
        # An extended run keeps its noise where it was.
        storage = costs.choose(horizons[0], size).storage
    cost = costs.cost(recursion, size, storage)
    if cost.state_bytes > costs.LARGEST_STATE_IN_BYTES:
        raise ValueError(
            f"the noise of earlier rounds would need {cost.state_bytes / 2**30:.1f} GiB of server "
            f"state, and at most {costs.LARGEST_STATE_IN_BYTES / 2**30:.1f} GiB can be "
            "passed between TFF's processes: use noise_storage='disk', fewer bands or a smaller "
            "model."
        )
    if storage is NoiseStorage.STATE and not costs.fits_in_graph(recursion):
        raise ValueError(
            "this factorization's matrix is too large to be put into a graph: use "
            "noise_storage='disk'."
        )
    return cost
