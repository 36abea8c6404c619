"""DPQueries of tensorflow-privacy that add the noise of a matrix factorization to sums.

:class:`MatrixFactorizationSumQuery` clips records to integers (``kernel.integers``), sums them, and
adds the round's row of noise. :class:`AdaptiveClipSumQuery` releases a clip norm that adapts, and
metrics, with the records, inside one matrix mechanism. It adds two steps, and no noise of its own.
Before the sum, each client turns its record into a vector: the record over the round's clip norm,
clipped to norm 1, and a weighted clipped-count indicator, which tells whether it had to be
(``adaptive_clip``). After it, the noisy sum of records is multiplied by the clip norm, and the
noisy sum of indicators moves the clip norm of later rounds.

With private metrics, a record has metrics beside its tensors, and the vector has one more
coordinate for each of them (``private_metrics``). Their noisy sums, over the clients that are
expected, are released.

*Why it is private.* The first step is a function of one record and of earlier releases; the second
is a function of the release. Between them is MatrixFactorizationSumQuery on vectors of a few more
coordinates, which clips them once more, in integers, to the norm R that its noise is scaled to. So
whatever the two steps did, the release is a function of a mechanism with the noise multiplier z
(``docs/privacy-proofs.md``, section 8).
"""

import collections
import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import dp_accounting
import numpy as np
import tensorflow as tf
import tensorflow_privacy as tfp

from mf_aggregators import adaptive_clip
from mf_aggregators.adaptive_clip import ClipState
from mf_aggregators.aggregator import Options, check_same, in_structure, is_plain, named_leaves
from mf_aggregators.kernel import draws, integers
from mf_aggregators.kernel.claim import Claim, Guarantee, claim_of
from mf_aggregators.kernel.draws import TILE
from mf_aggregators.kernel.integers import IntegerSums
from mf_aggregators.kernel.numbers import FloatArray, IntArray
from mf_aggregators.kernel.release import Release
from mf_aggregators.mechanism import check_charged
from mf_aggregators.noise import places
from mf_aggregators.noise.places import NoiseStorage
from mf_aggregators.participation import Participation, SingleParticipation
from mf_aggregators.private_metrics import BoundedMetric, PrivateMetrics
from mf_aggregators.tff import processes
from mf_aggregators.tff.processes import SCHEMA_KINDS, NoiseState
from mf_aggregators.tff.release_record import ReleaseRecord
from mf_aggregators.tff.rows_on_disk import RowsOnDisk
from mf_aggregators.tff.tensor_rows import RowsInState, TensorNoise

# The number of coordinates of an update that are computed at a time, so that temporary arrays stay
# in a processor's cache.
_ENTRIES_AT_ONCE = 2**14
# Adding this float rounds smaller non-negative numbers to integers: floats from here to twice as
# much are the integers, in the order of their bits.
_ZERO_OF_INTEGERS = 2.0**52


@dataclasses.dataclass(frozen=True)
class NoiseParts:
    """The noise of a run as TensorFlow graphs, with the kernel's release that defines it.

    Attributes:
      release: The kernel's release; all graphs compute the same numbers.
      noise: The graphs of the stream of noise.
      record: The record of the sums that noise was added to; None for no record.
    """

    release: Release
    noise: TensorNoise
    record: ReleaseRecord | None = None

    @classmethod
    def of(
        cls,
        horizons: Sequence[Claim | Guarantee],
        norm: float,
        specs: tuple[tf.TensorSpec, ...],
        *,
        storage: NoiseStorage = NoiseStorage.AUTO,
        directory: str | os.PathLike[str] | None = None,
        sums: IntegerSums | None = None,
        label: str = "",
        participation: Participation | None = None,
        is_recorded: bool = False,
    ) -> "NoiseParts":
        """Returns the noise of a run as TensorFlow graphs, and creates the files that it needs.

        Args:
          horizons: The claim or guarantee of each horizon of the run, the first one first.
          norm: The largest norm of the vector that a client adds.
          specs: The tensors of a row: floating point, of known shapes.
          storage: Where the noise of earlier rounds is kept.
          directory: Where noise files go; None for a temporary directory.
          sums: The grid of vectors; None for multiples of the norm over 2^30, of at most 2^22
            vectors.
          label: The text of further options that must be the same for a state and its release.
          participation: The schema that the noise is scaled to, which states show; None for a
            single participation.
          is_recorded: Whether to keep a record of released sums in a temporary directory if none is
            given.

        Returns:
          The parts.

        Raises:
          NotProved: If the kernel refuses to release by the claims: a ValueError.
          ValueError: If the state would be too large to be passed between TFF's processes, or
            the directory cannot be used or is too small.
        """
        layout, claims = TensorNoise.layout_of(specs), [*map(claim_of, horizons)]
        size = layout.size
        has_noise = size > 0 and claims[0].sigma > 0.0
        if has_noise:
            # This check comes before costs are computed, which are of no use if the noise is
            # refused.
            check_charged(size, claims[-1].rows.num_rounds)
            cost = places.NoiseCost.of_run([each.rows for each in claims], size, storage)
        is_on_disk = has_noise and cost.storage is NoiseStorage.DISK
        grid = IntegerSums() if sums is None else sums
        release = Release(
            horizons,
            norm,
            grid,
            layout=layout,
            is_on_disk=is_on_disk,
            label=f"{label} {specs}",
        )
        store: RowsInState | RowsOnDisk = RowsInState(release.rows)
        record = None
        if has_noise and (is_recorded or is_on_disk or directory is not None):
            needed_bytes = cost.disk_bytes if is_on_disk else 0
            private = places.open_directory(directory, needed_bytes)
            record = ReleaseRecord(private, release.noise_digests)
            if release.blocks is not None:
                store = RowsOnDisk.prepared(release.rows, release.blocks, layout.segments, private)
        fingerprints = [int.from_bytes(each[:8], "little", signed=True) for each in release.digests]
        schema = _schema_numbers(participation or SingleParticipation())
        return cls(release, TensorNoise(store, specs, tuple(fingerprints), schema), record)


def _schema_numbers(participation: Participation) -> tuple[int, int, int]:
    """Encodes a participation schema as the three numbers of ``NoiseState.schema``."""
    described = participation.to_dict()
    return (
        1 + SCHEMA_KINDS.index(described["schema"]),
        getattr(participation, "separation", 0),
        participation.limit or 0,
    )


# ----- Clipped records, as integers.


def _clip_to_grid(record: Any, clip_norm: tf.Tensor, steps_per_clip_norm: int) -> Any:
    """Clips a structure of tensors to an L2 norm of ``clip_norm``, in quantization steps.

    Entries are rounded to the nearest step. If the norm would then exceed the clip norm, they are
    rounded towards zero instead, which never lengthens an update. The comparison is one of
    integers: it uses the sum of squares of the rounded entries.

    Args:
      record: A structure of floating-point tensors of known shapes.
      clip_norm: A scalar above zero; the step is ``clip_norm / steps_per_clip_norm``.
      steps_per_clip_norm: Steps in a clip norm, at most
        ``kernel.integers.STEPS_PER_CLIP_NORM``.

    Returns:
      The structure as int32 tensors, in steps, whose squares add up to at most
      ``steps_per_clip_norm ** 2``; all zeros if any entry is NaN or infinite.
    """
    flat = [_wide_enough(tensor) for tensor in tf.nest.flatten(record)]
    scaling, _, is_finite = _scaling(flat, clip_norm, tf.constant(steps_per_clip_norm, tf.float64))
    most = tf.constant(steps_per_clip_norm**2, tf.int64)

    def rounded(number_of: Callable[[tf.Tensor], tf.Tensor]) -> tuple[list[tf.Tensor], tf.Tensor]:
        found = [_in_steps(tensor, *scaling, number_of) for tensor in flat]
        return [steps for steps, _ in found], _sum([squares for _, squares in found])

    # A factor that makes entries smaller by more than all floating-point errors before they are
    # rounded towards zero.
    margin = tf.constant(1.0 - integers.MARGIN, tf.float64)
    steps, squares = rounded(tf.round)
    steps, squares = tf.cond(
        squares <= most, lambda: (steps, squares), lambda: rounded(lambda each: each * margin)
    )
    # If an update is still too long, it becomes zero, so the proof does not depend on sizes of
    # roundings.
    steps = tf.cond(
        is_finite & (squares <= most), lambda: steps, lambda: [*map(tf.zeros_like, steps)]
    )
    return tf.nest.pack_sequence_as(record, steps)


def _clip_with_indicator(record: Any, clip_norm: tf.Tensor) -> tuple[Any, tf.Tensor]:
    """Returns a clipped record divided by its clip norm, and the clipped-count indicator.

    Args:
      record: A structure of floating-point tensors.
      clip_norm: A scalar above zero.

    Returns:
      The structure as float64 tensors, of an L2 norm of at most 1 but for errors of floats, and a
      float64 scalar: 1/2 if the record's norm was at most ``clip_norm``, and -1/2 otherwise. All
      zeros, the indicator as well, if any entry is NaN or infinite.
    """
    flat = [_wide_enough(tensor) for tensor in tf.nest.flatten(record)]
    scaling, is_within, is_finite = _scaling(flat, clip_norm, tf.ones([], tf.float64))
    scaled = [tf.cast(tensor, tf.float64) / scaling[0] * scaling[1] for tensor in flat]
    scaled = tf.cond(is_finite, lambda: scaled, lambda: [*map(tf.zeros_like, scaled)])
    side = tf.where(is_within, tf.constant(0.5, tf.float64), tf.constant(-0.5, tf.float64))
    indicator = tf.where(is_finite, side, tf.zeros([], tf.float64))
    return tf.nest.pack_sequence_as(record, scaled), indicator


def _wide_enough(tensor: tf.Tensor) -> tf.Tensor:
    """Returns a tensor in float32, or unchanged if it is in float64."""
    return tensor if tensor.dtype == tf.float64 else tf.cast(tensor, tf.float32)


def _scaling(
    flat: list[tf.Tensor], clip_norm: tf.Tensor, unit_norm: tf.Tensor
) -> tuple[tuple[tf.Tensor, tf.Tensor], tf.Tensor, tf.Tensor]:
    """Returns the unit that divides entries, and the scale that multiplies them, for clipping.

    The unit is the largest magnitude, so that norms neither overflow nor underflow.

    Returns:
      Unit and scale, by which a norm of ``clip_norm`` becomes ``unit_norm``; whether the norm was
      at most ``clip_norm``; and whether all entries are finite. If an entry is not finite, the unit
      is 1.
    """
    with_entries = [tensor for tensor in flat if tensor.shape.num_elements() != 0]
    one = tf.ones([], tf.float64)
    unit, norm_in_units, is_finite = one, tf.zeros([], tf.float64), tf.constant(True)
    if with_entries:
        largest = tf.reduce_max(tf.stack([*map(_largest, with_entries)]))
        is_finite = tf.math.is_finite(largest)
        unit = tf.where(is_finite & (largest > integers.LEAST_UNIT), largest, one)
        # Squares are added up as integers: a sum of floats would depend on the number of threads.
        units = tf.constant(
            integers.units_of_squares(sum(tensor.shape.num_elements() for tensor in flat)),
            tf.float64,
        )
        squares = _sum([_squares_in_units(tensor, unit, units) for tensor in with_entries])
        norm_in_units = tf.sqrt(tf.cast(squares, tf.float64) / units)
    limit = tf.cast(clip_norm, tf.float64)
    # If the norm of a record is at most the clip norm, the record is not scaled down.
    is_within = unit * norm_in_units <= limit
    scale = tf.where(
        is_within, unit * (unit_norm / limit), unit_norm / tf.maximum(norm_in_units, 1.0)
    )
    return (unit, scale), is_within, is_finite


def _sum(numbers: list[tf.Tensor]) -> tf.Tensor:
    return tf.add_n([tf.zeros([], tf.int64), *numbers])


def _largest(tensor: tf.Tensor) -> tf.Tensor:
    """Returns the largest magnitude of a tensor, float64; NaN or infinite if an entry is."""
    # Magnitudes of floats are in the order of their bits, and NaN is above all others.
    of_bits = tf.int64 if tensor.dtype == tf.float64 else tf.int32

    def of_tile(tile: tf.Tensor) -> tf.Tensor:
        bits = tf.bitcast(tile, of_bits)
        return tf.reduce_max(tf.bitwise.bitwise_and(bits, tf.constant(of_bits.max, of_bits)))

    found, _ = _over_tiles(tensor, lambda tile: (of_tile(tile), None), tf.maximum, of_bits)
    return tf.cast(tf.bitcast(found, tensor.dtype), tf.float64)


def _squares_in_units(tensor: tf.Tensor, unit: tf.Tensor, units: tf.Tensor) -> tf.Tensor:
    """Returns the sum of ceil(units * (entry / unit)^2) over all entries, an exact integer."""
    zero = tf.constant(_ZERO_OF_INTEGERS, tf.float64)

    def of_tile(tile: tf.Tensor) -> tf.Tensor:
        wholes = tf.math.ceil(tf.square(tf.cast(tile, tf.float64) / unit) * units)
        # The integers are read from the bits of floats, less the bits of zero: a cast would take as
        # long as all else here.
        bits = tf.reduce_sum(tf.bitcast(wholes + zero, tf.int64))
        return bits - tf.bitcast(zero, tf.int64) * tf.size(tile, tf.int64)

    return _over_tiles(tensor, lambda tile: (of_tile(tile), None), tf.add, tf.int64)[0]


def _in_steps(
    tensor: tf.Tensor,
    unit: tf.Tensor,
    scale: tf.Tensor,
    number_of: Callable[[tf.Tensor], tf.Tensor],
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the entries in quantization steps, int32, and the sum of their squares, int64."""

    def of_tile(tile: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        steps = tf.cast(number_of(tf.cast(tile, tf.float64) / unit * scale), tf.int32)
        return tf.reduce_sum(tf.square(tf.cast(steps, tf.int64))), steps

    squares, steps = _over_tiles(tensor, of_tile, tf.add, tf.int64, tf.int32)
    return steps, squares


def _over_tiles(
    tensor: tf.Tensor,
    of_tile: Callable[[tf.Tensor], tuple[tf.Tensor, tf.Tensor | None]],
    join: Callable[[tf.Tensor, tf.Tensor], tf.Tensor],
    dtype: tf.DType,
    kept_dtype: tf.DType | None = None,
) -> tuple[tf.Tensor, Any]:
    """Computes a reduction and new entries of a tensor in tiles that fit into a cache.

    Args:
      tensor: The tensor, of a known shape.
      of_tile: Takes a flat tile, and returns a scalar and a tensor of the tile's size or None.
      join: Joins two scalars; the first call gets zero and the scalar of the first tile.
      dtype: The dtype of the scalars.
      kept_dtype: The dtype of the tensors; None if ``of_tile`` returns no tensors.

    Returns:
      The joined scalars, and the tensors as one of the shape of ``tensor``, or None.
    """
    flat, size = tf.reshape(tensor, [-1]), tensor.shape.num_elements()
    if size <= TILE:
        scalar, tile = of_tile(flat)
        return scalar, None if tile is None else tf.reshape(tile, tensor.shape)
    count = -(-size // _ENTRIES_AT_ONCE)
    tiles = (
        []
        if kept_dtype is None
        else [tf.TensorArray(kept_dtype, count, infer_shape=False, element_shape=[None])]
    )

    def add_tile(number: tf.Tensor, total: tf.Tensor, *tiles: tf.TensorArray) -> tuple[Any, ...]:
        start = number * _ENTRIES_AT_ONCE
        scalar, tile = of_tile(flat[start : start + _ENTRIES_AT_ONCE])
        return number + 1, join(total, scalar), *(each.write(number, tile) for each in tiles)

    _, total, *tiles = tf.while_loop(
        lambda number, *_: number < count,
        add_tile,
        (tf.constant(0), tf.zeros([], dtype), *tiles),
        parallel_iterations=1,
    )
    return total, tf.reshape(tiles[0].concat(), tensor.shape) if tiles else None


# ----- The query.


class SampleState(NamedTuple):
    """The sum of a round's clipped records so far, in integers, which any order of adding gives.

    Attributes:
      steps: The structure of the records, int64: the sum of their entries, in quantization steps.
      num_records: int64 scalar: the number of records in the sum.
      least_steps: int64 scalar: the least entry that this number of records can add up to. It wraps
        around if any other entry could.
    """

    steps: Any
    num_records: Any
    least_steps: Any


class MatrixFactorizationSumQuery(tfp.SumAggregationDPQuery):
    """A DPQuery that clips records, sums them and adds row i of ``noise_stddev * C^-1 Z``.

    Each record is clipped to an L2 norm of the release's ``norm`` over all its tensors and rounded
    to multiples of a quantization step; a record with a NaN or infinite entry counts as
    zero. Sums are of integers, so that no single record can move the sum by more than the clip
    norm, whatever the others are (MF-DP-FTRL: BandMF Alg. 1).

    It composes with the queries of tensorflow-privacy and with
    ``tff.aggregators.DifferentiallyPrivateFactory``. Records may be Python numbers and arrays as
    well, and their sums are of int64: a sum that may have wrapped around is refused. Results have
    the dtypes of the records, but for half precision, in which a sum may overflow: there they are
    of float32, to be divided before they are cast.

    The query is pure: its state says which round is next, and a round that is run again
    from the same state adds the same noise. It therefore must not be run again on other
    records, since the difference of the two sums would be free of noise; with a record of sums,
    that fails. A graph that would hold the state as a constant is refused where the graph shows
    it: a function that another tf.function calls cannot see that its caller holds the state.
    """

    def __init__(
        self,
        parts: NoiseParts,
        specs: Any,
        *,
        seed: IntArray | None = None,
        record_dtype: tf.DType = tf.int64,
    ) -> None:
        """Creates the query without starting a thread or writing a file.

        Args:
          parts: The rows of noise, with clip norm, standard deviation and grid, and the record of
            sums, as ``NoiseParts.of`` returns them for these tensors. Z has a larger standard
            deviation than sigma, by which the roundings of integers take nothing of the noise
            multiplier.
          specs: A structure of tf.TensorSpec: the records' floating-point tensors, of
            known shapes.
          seed: For tests only: (2,) int64 that all noise follows from. None draws 128
            bits from the operating system.
          record_dtype: The dtype of the steps of a record: int32, which holds all of them, where
            sums widen records.

        Raises:
          TypeError: If a tensor is not floating point.
          ValueError: If a shape is not known, or the noise is for other tensors.
        """
        self.structure, self._specs = specs, _checked_specs(specs)
        if parts.noise.specs != self._specs:
            raise ValueError("noise must be made for the tensors of the query.")
        self.parts, self.release, self.record_dtype = parts, parts.release, record_dtype
        self._noise, self._record = parts.noise, parts.record
        self._noise_stddev = self.release.stddev
        self._unit = self.release.norm / self.release.sums.steps_per_clip_norm
        self._fixed_seed, self.has_fixed_seed = seed, seed is not None
        self._seed, self._stream = draws.fresh_seed()

    @classmethod
    def of_options(
        cls, options: Options, specs: Any, *, is_recorded: bool, record_dtype: tf.DType = tf.int64
    ) -> "MatrixFactorizationSumQuery":
        """Returns the query for the records of an aggregator's clients, from its options.

        Args:
          options: The options.
          specs: A structure of tf.TensorSpec: the tensors of an update, without metrics. Where the
            options split the noise, records are the vectors of :class:`AdaptiveClipSumQuery`.
          is_recorded: Whether to keep a record of released sums, in a temporary directory if the
            options have none.
          record_dtype: The dtype of the steps of records.

        Raises:
          TypeError: If a tensor is not floating point.
          ValueError: As ``NoiseParts.of`` does, or if a shape is not known.
        """
        options.check_floats(spec.dtype.name for spec in _checked_specs(specs))
        vectors = specs if options.split is None else _vector_specs(specs, options.metrics)
        tensors = _checked_specs(vectors)
        options.check_rounding(TensorNoise.layout_of(tensors).size)
        label = options.clip_norm, options.clients_per_round, options.sums, options.metrics
        parts = NoiseParts.of(
            options.mechanism.proved_horizons,
            options.norm,
            tensors,
            storage=options.storage,
            directory=options.noise_directory,
            sums=options.sums,
            label=repr(label),
            participation=options.mechanism.noise_reference,
            is_recorded=is_recorded,
        )
        return cls(parts, vectors, seed=options.seed, record_dtype=record_dtype)

    @property
    def num_rounds(self) -> int:
        """The number of rounds for which there is noise."""
        return self._noise.recursion.num_rounds

    @property
    def fingerprints(self) -> tuple[int, ...]:
        """The fingerprints of the noise states that the query accepts, its own last."""
        return self._noise.fingerprints

    def initial_global_state(self) -> NoiseState:
        """Returns the noise state before the first round, with a fresh seed unless it is fixed."""
        if self._fixed_seed is None:
            # The secret comes from the operating system, when the query is made. A graph may start
            # several runs, and no two of them may share their noise: so each start mixes in bits
            # that the graph draws.
            seed = _different_each_time(tf.constant(self._seed))
        else:
            seed = tf.constant(self._fixed_seed)
        stream = _different_each_time(tf.constant(self._stream))
        return self._noise.initial_state(seed, stream)

    def derive_sample_params(self, global_state: NoiseState) -> tf.Tensor:
        """Returns the clip norm, which clients need to clip their records."""
        del global_state
        return tf.constant(self.release.norm, tf.float64)

    def initial_sample_state(self, template: Any = None) -> SampleState:
        """Returns the sum of no records: zeros in the structure of a record.

        Args:
          template: A record, or its tf.TensorSpecs; None for the structure that the query is for.

        Raises:
          ValueError: If it has other tensors or names than the records of the query.
        """
        template = self.structure if template is None else template
        _check_leaves(template, self.structure)
        zeros = [tf.zeros(spec.shape, tf.int64) for spec in self._specs]
        zero = tf.zeros([], tf.int64)
        return SampleState(tf.nest.pack_sequence_as(template, zeros), zero, zero)

    def preprocess_record(self, params: tf.Tensor, record: Any) -> SampleState:
        """Returns a client's clipped record in steps; zeros if an entry is not finite.

        Args:
          params: The clip norm.
          record: Numbers, arrays and tensors of the structure and shapes that the query is for.

        Raises:
          TypeError: If the record holds anything but numbers and plain arrays of them.
          ValueError: If it has other tensors, names or containers than the query is for. A sum
            would broadcast a smaller one, beyond the clip norm.
        """
        steps_per_clip_norm = self.release.sums.steps_per_clip_norm
        steps = _clip_to_grid(_tensors_of(record, self.structure), params, steps_per_clip_norm)
        steps = tf.nest.map_structure(lambda each: tf.cast(each, self.record_dtype), steps)
        least = tf.constant(-steps_per_clip_norm, tf.int64)
        return SampleState(steps, tf.ones([], tf.int64), least)

    def get_noised_result(
        self, sample_state: SampleState, global_state: NoiseState
    ) -> tuple[Any, NoiseState, dp_accounting.DpEvent]:
        """Returns the noisy sum of a round, the next noise state and a DpEvent.

        The guarantee is one of all rounds together (``Mechanism.guarantee``), so the event of a
        round is an UnsupportedDpEvent. Running the graph fails with InvalidArgumentError for more
        records than a sum may have, for a sum that could have wrapped around, and in a round that
        there is no noise for.

        Raises:
          TypeError: If the sum is not one of int64.
          ValueError: If it has other tensors than the records of the query, or a graph would hold
            the state as a constant.
        """
        scales = [1.0] * len(self._specs)
        result, following = self.scaled_result(sample_state, global_state, scales)
        return result, following, dp_accounting.UnsupportedDpEvent()

    def scaled_result(
        self,
        sample_state: SampleState,
        global_state: NoiseState,
        scales: Sequence[tf.Tensor | float],
    ) -> tuple[Any, NoiseState]:
        """Returns the noisy sum of a round, multiplied by scales, and the next noise state.

        Args:
          sample_state: The sum.
          global_state: The state.
          scales: A float64 scalar for each tensor, known before the round; a Python number if it is
            a constant.

        Raises:
          TypeError: As :meth:`get_noised_result` raises it.
          ValueError: As :meth:`get_noised_result` raises it.
        """
        _check_not_frozen(global_state)
        noise, step, following = self._noise.next_row(global_state, self._noise_stddev)
        steps_of_rounds = self.release.rows.steps * self._noise_stddev
        units = np.full(self.num_rounds, self._unit)

        def of_this_round(numbers: FloatArray) -> tf.Tensor:
            return TensorNoise.of_round(numbers, following.round_index - 1)

        def scaled(number: tf.Tensor, numbers: FloatArray, scale: tf.Tensor | float) -> tf.Tensor:
            return number * scale if tf.is_tensor(scale) else of_this_round(numbers * scale)

        layout, unit = TensorNoise.layout_of(self._specs), of_this_round(units)
        dtypes = [*map(tf.as_dtype, layout.dtypes)]
        sums = self._checked_sums(sample_state)
        if not self.release.has_noise:
            # The result depends on the round's check even without noise, so that the graph runs the
            # check.
            with tf.control_dependencies([following.round_index]):
                factors = [scaled(unit, units, scale) for scale in scales]
                noised = [
                    tf.cast(tf.cast(steps, tf.float64) * factor, dtype)
                    for steps, factor, dtype in zip(sums, factors, dtypes, strict=True)
                ]
        else:
            if self._record is not None:
                varying = {id(scale): scale for scale in scales if tf.is_tensor(scale)}
                of_sums = [unit, step, *varying.values()]
                place = (global_state.seed, global_state.stream, global_state.round_index)
                sums = self._record.check(*place, sums, of_sums)
            released_steps = [scaled(step, steps_of_rounds, scale) for scale in scales]
            noised = [
                _released(steps, unit, row, step, released, dtype)
                for steps, row, released, dtype in zip(
                    sums, noise, released_steps, dtypes, strict=True
                )
            ]
        return tf.nest.pack_sequence_as(sample_state.steps, noised), following

    def spent(self, state: NoiseState) -> NoiseState:
        """Returns the noise state after a round that is given up: the row is never released.

        Args:
          state: The noise state before the round.

        Raises:
          tf.errors.InvalidArgumentError: If the state is of another process, or no round is left.
        """
        _, _, following = self._noise.next_row(state)
        if self._record is not None:
            self._record.spend(state.stream, state.round_index)
        return following

    def _checked_sums(self, sample_state: SampleState) -> list[tf.Tensor]:
        """Returns the sums in steps, after checks that they cannot have overflowed."""
        for total in tf.nest.flatten(sample_state):
            if total.dtype != tf.int64:
                raise TypeError(
                    f"sums of records must be of int64, found {total.dtype.name}: add records up "
                    "with a sum that keeps integers, such as tff.aggregators.SumFactory."
                )
        _check_leaves(sample_state.steps, self.structure)
        largest_cohort = self.release.sums.largest_cohort
        are_few = tf.debugging.assert_less_equal(
            sample_state.num_records,
            tf.constant(largest_cohort, tf.int64),
            message=processes.refusal(
                f"More than {largest_cohort} clients reported, and their sums could overflow: "
                "nothing is released of this round."
            ),
        )
        # If an assertion is known to hold while the graph is built, TensorFlow returns None.
        with tf.control_dependencies([] if are_few is None else [are_few]):
            num_records = tf.identity(sample_state.num_records)
        # The sum of too many records may wrap around too, and is refused for their number.
        is_whole = tf.debugging.assert_equal(
            sample_state.least_steps,
            -self.release.sums.steps_per_clip_norm * num_records,
            message=processes.refusal(
                "The clients' integers were not simply added up: a modular, bounded or scaled sum "
                "may have wrapped around, and nothing is released of this round. Use "
                "secure_aggregation_bits= of the aggregator, or tff.aggregators.SumFactory."
            ),
        )
        checks = [check for check in (are_few, is_whole) if check is not None]
        with tf.control_dependencies(checks):
            return [tf.identity(steps) for steps in tf.nest.flatten(sample_state.steps)]

    def derive_metrics(self, global_state: NoiseState) -> collections.OrderedDict[str, tf.Tensor]:
        """Returns the number of released rounds as a metric; never the seed or the noise."""
        return collections.OrderedDict(rounds_released=global_state.round_index)


def _checked_specs(specs: Any) -> tuple[tf.TensorSpec, ...]:
    """Returns the tensors of a structure of tf.TensorSpec, or raises if one is not supported.

    Args:
      specs: The structure.

    Raises:
      TypeError: If a tensor is not floating point.
      ValueError: If a shape is not known.
    """
    flat = tuple(tf.nest.flatten(specs))
    for spec in flat:
        if not isinstance(spec, tf.TensorSpec):
            raise TypeError(
                f"updates must be tensors in Python containers, found {type(spec).__name__}."
            )
        if not spec.dtype.is_floating:
            raise TypeError(
                "only floating-point tensors can be clipped and get noise, found a tensor of "
                f"{spec.dtype.name} and shape {spec.shape}: leave it out, or convert it to float32."
            )
        if not spec.shape.is_fully_defined():
            raise ValueError(f"tensors must have a known shape, found {spec.shape}.")
    return flat


def _tensors_of(record: Any, specs: Any) -> Any:
    """Returns a record as tensors in its own structure; Python numbers get the specs' dtypes."""
    _check_leaves(record, specs)
    tensors = []
    for (path, leaf), spec in zip(named_leaves(record), tf.nest.flatten(specs), strict=True):
        if not (isinstance(leaf, int) or is_plain(leaf)):
            raise TypeError(
                f"records are structures of plain arrays of numbers, found {type(leaf).__name__} "
                f"{path and f'at {path}'}: convert it to a dense array."
            )
        tensor = tf.convert_to_tensor(leaf, None if tf.is_tensor(leaf) else spec.dtype)
        # If a shape is not known while the graph is traced, it is checked when the graph runs.
        tensors.append(tf.ensure_shape(tensor, spec.shape))
    return in_structure(record, tensors)


def _check_leaves(nest: Any, specs: Any) -> None:
    """Raises ValueError unless a nested structure has the paths and shapes of the specs."""
    expected, found = (
        [
            (path, tf.TensorShape(leaf.shape if hasattr(leaf, "shape") else np.asarray(leaf).shape))
            for path, leaf in named_leaves(each)
        ]
        for each in (specs, nest)
    )
    check_same(expected, found, lambda one, other: bool(one.is_compatible_with(other)))


def _check_not_frozen(state: NoiseState) -> None:
    """Raises ValueError if the graph that is being built has the noise state as a constant."""
    for part in () if tf.executing_eagerly() else (state.round_index, *state.history):
        if not isinstance(part, tf.Variable) and tf.get_static_value(part) is not None:
            raise ValueError(
                "a graph would hold the state of the query as a constant, and release the same row "
                "of noise in each call: pass the state to the tf.function as an argument and "
                "return the next one, or run eagerly (Keras: compile(run_eagerly=True))."
            )


def _released(
    sums: tf.Tensor,
    unit: tf.Tensor,
    row: tf.Tensor,
    step: tf.Tensor,
    released_step: tf.Tensor,
    dtype: tf.DType,
) -> tf.Tensor:
    """Adds a row of noise to a sum, as integers in the steps of the row, and returns floats.

    Args:
      sums: The sum, in steps of ``unit``.
      unit: The step of the sum.
      row: The row, in steps of ``step``.
      step: The step of the row, in the units of ``unit``.
      released_step: The value of a step of the row in the result.
      dtype: The type of the result.
    """

    def add(sums: tf.Tensor, row: tf.Tensor) -> tf.Tensor:
        # The rest is a function of these integers, so its floating-point roundings are
        # post-processing.
        of_sums = tf.cast(tf.round(tf.cast(sums, tf.float64) * unit / step), tf.int64)
        released = of_sums + tf.cast(row, tf.int64)
        return tf.cast(tf.cast(released, tf.float64) * released_step, dtype)

    shape, flat = sums.shape, [tf.reshape(tensor, [-1]) for tensor in (sums, row)]
    size = shape.num_elements()
    if size <= TILE:
        return tf.reshape(add(*flat), shape)
    # The sum is handled one tile at a time, so that no temporary has the size of the sum.
    count = -(-size // TILE)

    def add_tile(number: tf.Tensor, tiles: tf.TensorArray) -> tuple[tf.Tensor, tf.TensorArray]:
        start = number * TILE
        tile = add(*(tensor[start : start + TILE] for tensor in flat))
        return number + 1, tiles.write(number, tile)

    _, tiles = tf.while_loop(
        lambda number, _: number < count,
        add_tile,
        (tf.constant(0), tf.TensorArray(dtype, count, infer_shape=False, element_shape=[None])),
        parallel_iterations=1,
    )
    return tf.reshape(tiles.concat(), shape)


def _different_each_time(integers: tf.Tensor) -> tf.Tensor:
    """Returns two integers that are mixed with fresh random bits at each run of the graph."""
    # This operation is allowed even if TensorFlow is told to be deterministic, which refuses all
    # other random ones.
    drawn = tf.raw_ops.NonDeterministicInts(shape=[2], dtype=tf.int64)
    return tf.bitwise.bitwise_xor(integers, drawn)


# ----- Clip norms that adapt, and metrics.


class _AdaptiveState(NamedTuple):
    """The state of an AdaptiveClipSumQuery between two rounds: clip norm, noise and metrics.

    Attributes:
      clip: The clip norm.
      mechanism: The state of the mechanism.
      released_metrics: (k,) float64: the private metrics that the last round released, NaN before
        the first one; an empty tuple without metrics.
    """

    clip: ClipState
    mechanism: NoiseState
    released_metrics: Any


class _AdaptiveParams(NamedTuple):
    """The two norms that clients need to clip an update and to clip the vector with it.

    Attributes:
      clip_norm: float64 scalar: the round's clip norm.
      vector_norm: float64 scalar: the norm that their vectors are clipped to.
    """

    clip_norm: Any
    vector_norm: Any


class AdaptiveClipSumQuery(tfp.SumAggregationDPQuery):
    """A DPQuery that clips records to an adaptive norm, sums them and adds correlated noise.

    In round t the result is the sum of the clipped records plus row t of
    ``z_delta * c_t * sens(C) * C^-1 Z``, up to roundings. A record with a NaN or infinite entry
    counts as zero, and its indicator as well. The query is pure, as MatrixFactorizationSumQuery is:
    a round that is run again from the same state has the same clip norm and the same noise.
    """

    def __init__(
        self, mechanism: MatrixFactorizationSumQuery, specs: Any, options: Options
    ) -> None:
        """Creates the query around the query of the joint vectors.

        Args:
          mechanism: The query of the vectors (``MatrixFactorizationSumQuery.of_options``).
          specs: A structure of tf.TensorSpec: the records' floating-point tensors, of known
            shapes. With metrics, a record has it as ``update``, and ``metrics`` by name.
          options: The options of the aggregator, which split the noise.

        Raises:
          TypeError: If a tensor is not floating point.
        """
        assert options.rule is not None
        assert options.split is not None
        self.mechanism, self.structure = mechanism, specs
        self._specs = _checked_specs(specs)
        self._clip, self._split, self._metrics = options.rule, options.split, options.metrics
        self._clients = options.clients_per_round

    def initial_global_state(self) -> _AdaptiveState:
        """Returns the state before the first round, with the initial clip norm."""
        norm = tf.constant(self._clip.initial_norm, tf.float64)
        return _AdaptiveState(
            ClipState(
                norm=norm,
                released_norm=norm,
                released_fraction=tf.constant(float("nan"), tf.float64),
                fraction_sum=tf.zeros([], tf.float64),
                num_fractions=tf.zeros([], tf.int64),
            ),
            self.mechanism.initial_global_state(),
            ()
            if self._metrics is None
            else tf.fill([len(self._metrics.metrics)], tf.constant(float("nan"), tf.float64)),
        )

    def derive_sample_params(self, global_state: _AdaptiveState) -> _AdaptiveParams:
        """Returns the clip norm of the round and the norm of joint vectors, for clients."""
        vector_norm = self.mechanism.derive_sample_params(global_state.mechanism)
        return _AdaptiveParams(global_state.clip.norm, vector_norm)

    def initial_sample_state(self, template: Any = None) -> SampleState:
        """Returns the sum of no joint vectors; see MatrixFactorizationSumQuery."""
        if template is None:
            template = self.structure
        elif self._metrics is not None:
            template = template["update"]
        further = _vector_specs(self.structure, self._metrics)[1:]
        return self.mechanism.initial_sample_state((template, *further))

    def preprocess_record(self, params: _AdaptiveParams, record: Any) -> SampleState:
        """Returns a client's joint vector in steps: record, weighted indicator and metrics."""
        update = record if self._metrics is None else record["update"]
        tensors = _tensors_of(update, self.structure)
        clipped, indicator = _clip_with_indicator(tensors, params.clip_norm)
        vector: tuple[Any, ...] = (clipped, indicator * self._split.indicator_weight)
        if self._metrics is not None:
            # If the update is not finite, the client counts as absent, and its metrics become zero
            # too.
            is_there = tf.cast(tf.not_equal(indicator, 0.0), tf.float64)
            bounded = [
                _bounded(record["metrics"][each.name], each) for each in self._metrics.metrics
            ]
            vector = (*vector, tf.stack(bounded) * is_there * self._split.metric_weight)
        return self.mechanism.preprocess_record(params.vector_norm, vector)

    def get_noised_result(
        self, sample_state: SampleState, global_state: _AdaptiveState
    ) -> tuple[Any, _AdaptiveState, dp_accounting.DpEvent]:
        """Returns the noisy sum of a round, the next state and a DpEvent.

        The next state has the clip norm of the next round.
        """
        norm = global_state.clip.norm
        # Noise and sum are both in units of this round's clip norm, which was known before the
        # round.
        per_indicator = 1.0 / (self._split.indicator_weight * self._clients)
        scales: list[tf.Tensor | float] = [*(norm for _ in self._specs), per_indicator]
        scales += [] if self._metrics is None else [1.0]
        released, mechanism = self.mechanism.scaled_result(
            sample_state, global_state.mechanism, scales
        )
        records, indicators, *metrics = released
        narrowed = [
            tf.cast(record, dtype)
            for record, dtype in zip(
                tf.nest.flatten(records), TensorNoise.layout_of(self._specs).dtypes, strict=True
            )
        ]
        result = tf.nest.pack_sequence_as(sample_state.steps[0], narrowed)
        fraction = adaptive_clip.INDICATOR_WITHIN + indicators
        state = _AdaptiveState(
            self._next(global_state.clip, fraction),
            mechanism,
            self._means(metrics[0]) if metrics else global_state.released_metrics,
        )
        return result, state, dp_accounting.UnsupportedDpEvent()

    def _means(self, sums: tf.Tensor) -> tf.Tensor:
        """Returns the released metrics, (k,), from the noisy sums of clients' clipped metrics."""
        assert self._metrics is not None
        middles = [metric.middle for metric in self._metrics.metrics]
        ranges = [metric.range for metric in self._metrics.metrics]
        return middles + sums * ranges / (self._split.metric_weight * self._clients)

    def _next(self, clip: ClipState, fraction: tf.Tensor) -> ClipState:
        """Returns the next state of the clip norm: ``AdaptiveClip.next_norm`` as a graph."""
        period = self._clip.update_period
        total, number = clip.fraction_sum + fraction, clip.num_fractions + 1
        is_due = tf.equal(number, period)
        # The error uses a product, because TensorFlow's optimizer turns such a quotient into one.
        error = total * (1.0 / period) - self._clip.target_unclipped_quantile
        smallest, largest = self._clip.bounds
        most = tf.constant(self._clip.largest_exponent, tf.float64)
        exponent = tf.minimum(tf.maximum(-self._clip.learning_rate * error, -most), most)
        moved = clip.norm * self._clip.exponential(exponent)
        moved = tf.minimum(tf.maximum(moved, smallest), largest)
        return ClipState(
            norm=tf.where(is_due, moved, clip.norm),
            released_norm=clip.norm,
            released_fraction=fraction,
            fraction_sum=tf.where(is_due, tf.zeros_like(total), total),
            num_fractions=tf.where(is_due, tf.zeros_like(number), number),
        )

    def derive_metrics(self, global_state: _AdaptiveState) -> collections.OrderedDict[str, Any]:
        """Returns the last round's clip norm and unclipped fraction, the next norm, and metrics."""
        found = collections.OrderedDict(
            **self.mechanism.derive_metrics(global_state.mechanism),
            clip_norm=global_state.clip.released_norm,
            unclipped_fraction=global_state.clip.released_fraction,
            next_clip_norm=global_state.clip.norm,
        )
        if self._metrics is not None:
            found["private_metrics"] = collections.OrderedDict(
                (metric.name, global_state.released_metrics[position])
                for position, metric in enumerate(self._metrics.metrics)
            )
        return found


Query: TypeAlias = MatrixFactorizationSumQuery | AdaptiveClipSumQuery


def _bounded(value: Any, metric: BoundedMetric) -> tf.Tensor:
    """Maps a metric to [-1/2, 1/2]: its distance from the middle of its range, over the range."""
    wide = tf.cast(value, tf.float64)
    clipped = tf.clip_by_value(wide, metric.smallest, metric.largest)
    return tf.where(
        tf.math.is_finite(wide), (clipped - metric.middle) / metric.range, tf.zeros_like(wide)
    )


def _vector_specs(specs: Any, metrics: PrivateMetrics | None = None) -> tuple[Any, ...]:
    """Returns the specs of a joint vector: a record in float64, a scalar indicator, and metrics.

    Args:
      specs: A structure of tf.TensorSpec, of known shapes.
      metrics: The private metrics, which are a vector; None for none.

    Raises:
      TypeError: If a tensor is not floating point.
      ValueError: If a shape is not known.
    """
    _checked_specs(specs)
    wide = tf.nest.map_structure(lambda spec: tf.TensorSpec(spec.shape, tf.float64), specs)
    of_vector = (wide, tf.TensorSpec([], tf.float64))
    if metrics is None:
        return of_vector
    return (*of_vector, tf.TensorSpec([len(metrics.metrics)], tf.float64))
