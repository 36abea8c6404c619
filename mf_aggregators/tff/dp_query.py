"""A tensorflow-privacy DPQuery that adds the noise of a matrix factorization to sums."""

import collections
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import dp_accounting
import numpy as np
import tensorflow as tf

from mf_aggregators import inputs
from mf_aggregators.kernel import draws, numbers
from mf_aggregators.kernel.claim import Claim, Pattern
from mf_aggregators.kernel.draws import TILE
from mf_aggregators.kernel.integers import IntegerSums
from mf_aggregators.kernel.numbers import FloatArray
from mf_aggregators.kernel.rows import NoiseRecursion
from mf_aggregators.noise.costs import NoiseStorage
from mf_aggregators.participation import Participation
from mf_aggregators.tff import (
    compatibility,
    declared_participation,
    grid,
    processes,
    tensor_streams,
)
from mf_aggregators.tff.declared_participation import DeclaredParticipation
from mf_aggregators.tff.tensor_streams import NoiseOptions, NoiseParts

# What is released does not depend on the delta of a claim.
_ANY_DELTA = 0.5


class GlobalState(NamedTuple):
    """The state of a MatrixFactorizationSumQuery between rounds.

    Attributes:
      l2_norm_clip: float64 scalar: the clip norm.
      noise: The state of the noise stream.
      participation: The schema that the noise is scaled to; no round changes it.
    """

    l2_norm_clip: Any
    noise: tensor_streams.NoiseState
    participation: DeclaredParticipation


class SampleState(NamedTuple):
    """The sum of a round's records so far, in integers: in any order, it is the same.

    Attributes:
      steps: The structure of the records, int64: the sum of their entries, in quantization steps.
      num_records: int64 scalar.
      least_steps: int64 scalar: the least entry that so many records can add up to. It wraps
        around wherever another entry could.
    """

    steps: Any
    num_records: Any
    least_steps: Any


class MatrixFactorizationSumQuery(compatibility.SumAggregationDPQuery):
    """Clips records, sums them and adds row i of ``noise_stddev * C^-1 Z`` in round i.

    Each record is clipped to an L2 norm of ``l2_norm_clip`` over all its tensors and rounded to
    multiples of a quantization step (``grid``); a record with a NaN or infinite entry counts as
    zero. Sums are of integers, so that no single record can move the sum by more than the clip
    norm, whatever the others are (MF-DP-FTRL: BandMF Alg. 1).

    It composes with the queries of tensorflow-privacy and with
    ``tff.aggregators.DifferentiallyPrivateFactory``: records may be Python numbers and arrays as
    well, and preprocessed records and their sums alike are of int64. What adds them up has to
    keep integers, as TFF's ``SumFactory`` does; a sum that may have wrapped around is refused.
    Results have the dtypes of the records, but for half precision, in which a sum may overflow:
    there they are of float32, to be divided before they are cast.

    The query is pure: its state says which round is next, and a round that is run again
    from the same state adds the same noise. It therefore must not be run again on other
    records, since the difference of the two sums would be free of noise; with a noise
    directory, that fails.

    A graph that would hold the state as a constant is refused where the graph shows it. A function
    that another tf.function calls cannot see that its caller holds the state: there, only a noise
    directory makes the repeated row fail.
    """

    def __init__(
        self,
        recursion: NoiseRecursion | None,
        specs: Any,
        *,
        l2_norm_clip: float | None = None,
        noise_stddev: float | None = None,
        seed: int | None = None,
        noise: NoiseParts | None = None,
        participation: Participation | None = None,
        sums: IntegerSums | None = None,
    ) -> None:
        """Creates the query, by ``noise`` or by the numbers that it is made of.

        Args:
          recursion: How the rows of C^-1 Z follow from one another. None where ``noise`` has them,
            and then the clip norm, the standard deviation and the grid as well.
          specs: A structure of tf.TensorSpec: the records' floating-point tensors, of
            known shapes.
          l2_norm_clip: The clip norm, above zero.
          noise_stddev: The standard deviation of Z: noise multiplier x clip norm x
            sensitivity of C. Zero adds no noise. Z has a little more, by which the roundings
            of integers take nothing of the noise multiplier (``kernel.integers``).
          seed: For tests only: an integer that all noise follows from. None draws 128
            bits from the operating system.
          noise: The rows of noise and the record of what they were added to, as
            ``tensor_streams.make`` returns them for these tensors. None keeps rows in the state.
            The query itself starts no thread and writes no file.
          participation: The schema that the noise is scaled to, for the state to tell; None
            declares none.
          sums: The grid that records are rounded to, and the most records of a sum; None for
            multiples of the clip norm over 2^30, of which 2^22 are added up.

        Raises:
          TypeError: If a tensor is not floating point.
          ValueError: If a shape is not known, a number is out of its range, the noise state
            would be too large to be passed between TFF's processes, ``noise`` is for other
            tensors or beside numbers, the grid is too coarse for records of this size, or
            roundings would take a tenth of the noise, or there are more than 2^40 numbers of
            noise in all rounds together, which is what guarantees are stated for.
        """
        self._structure, self._specs = specs, checked_specs(specs)
        self._participation = declared_participation.declare(participation)
        parts = recursion, l2_norm_clip, noise_stddev, sums
        if noise is None:
            if recursion is None or l2_norm_clip is None:
                raise ValueError("a query needs noise=, or recursion and l2_norm_clip.")
            norm = inputs.of_float32(l2_norm_clip, "l2_norm_clip")
            stddev = numbers.non_negative_number(noise_stddev, "noise_stddev")
            if stddev > 0.0:
                inputs.of_float32(stddev, "noise_stddev")
            # What is released does not depend on who takes part.
            claim = Claim(recursion, Pattern((0,)), stddev / norm, _ANY_DELTA)
            label, options = repr(self._participation), NoiseOptions(NoiseStorage.STATE)
            noise = tensor_streams.make([claim], norm, self._specs, options, sums=sums, label=label)
        elif noise.noise.specs != self._specs or any(each is not None for each in parts):
            raise ValueError("noise must be made for the tensors of the query, with its numbers.")
        self.parts, self.release = noise, noise.release
        self._noise, self._record = noise.noise, noise.record
        self._noise_stddev = self.release.stddev
        self._unit = self.release.norm / self.release.sums.steps_per_clip_norm
        self._fixed_seed = inputs.seed_of(seed)
        self._seed, self._stream = draws.fresh_seed()

    @property
    def num_rounds(self) -> int:
        """How many rounds there is noise for."""
        return self._noise.recursion.num_rounds

    @property
    def fingerprints(self) -> tuple[int, ...]:
        """The fingerprints of the states that the query accepts, its own last."""
        return self._noise.fingerprints

    def initial_global_state(self) -> GlobalState:
        """Returns the state before the first round, with a fresh seed unless it is fixed."""
        if self._fixed_seed is None:
            # The secret comes from the operating system, when the query is made. A graph
            # may start several runs, and no two may share their noise: each start adds
            # what the graph can draw by itself.
            seed = _different_each_time(tf.constant(self._seed))
        else:
            seed = tf.constant(self._fixed_seed)
        stream = _different_each_time(tf.constant(self._stream))
        return GlobalState(
            l2_norm_clip=tf.constant(self.release.norm, tf.float64),
            noise=self._noise.initial_state(seed, stream),
            participation=self._declared(),
        )

    def _declared(self) -> DeclaredParticipation:
        return DeclaredParticipation(
            *(tf.constant(number, tf.int64) for number in self._participation)
        )

    def derive_sample_params(self, global_state: GlobalState) -> tf.Tensor:
        """Returns the clip norm, which clients need."""
        return global_state.l2_norm_clip

    def initial_sample_state(self, template: Any = None) -> SampleState:
        """Returns the sum of no records.

        Args:
          template: A record, or its tf.TensorSpecs; None for the structure that the query is for.

        Raises:
          ValueError: If it has other tensors or names than the records of the query.
        """
        template = self._structure if template is None else template
        _check_leaves(inputs.named_leaves(template), self._structure)
        zeros = [tf.zeros(spec.shape, tf.int64) for spec in self._specs]
        zero = tf.zeros([], tf.int64)
        return SampleState(tf.nest.pack_sequence_as(template, zeros), zero, zero)

    def preprocess_record(self, params: tf.Tensor, record: Any) -> SampleState:
        """Clips one client's record, in steps; a record that is not finite becomes zero.

        Raises:
          TypeError: If the record holds anything but numbers and plain tensors and arrays of them.
          ValueError: If it has other tensors, names or containers than the query is for. A sum
            would broadcast a smaller one, beyond the clip norm.
        """
        tensors = tensors_of(record, self._structure)
        steps_per_clip_norm = self.release.sums.steps_per_clip_norm
        steps = grid.clip_to_grid(tensors, params, steps_per_clip_norm)
        least = tf.constant(-steps_per_clip_norm, tf.int64)
        return SampleState(steps, tf.ones([], tf.int64), least)

    def get_noised_result(
        self, sample_state: SampleState, global_state: GlobalState
    ) -> tuple[Any, GlobalState, dp_accounting.DpEvent]:
        """Returns the sum plus the round's noise, the next state and a DpEvent.

        The guarantee is one of all rounds together, so a single round's event is not
        supported for composition; see ``mf_aggregators.privacy.guarantees``. Running the graph
        fails with InvalidArgumentError for more records than a sum may have, and if the sum could
        have wrapped around.

        Raises:
          TypeError: If the sum is not one of int64.
          ValueError: If it has other tensors than the records of the query, or a graph would hold
            the state as a constant.
        """
        scales = [1.0] * len(self._specs)
        return self.scaled_result(sample_state, global_state, scales)

    def scaled_result(
        self,
        sample_state: SampleState,
        global_state: GlobalState,
        scales: Sequence[tf.Tensor | float],
    ) -> tuple[Any, GlobalState, dp_accounting.DpEvent]:
        """Returns what :meth:`get_noised_result` does, times numbers that were known before.

        Args:
          sample_state: The sum.
          global_state: The state.
          scales: A float64 scalar for each tensor; a Python number where it is a constant.

        Raises:
          TypeError: As there.
          ValueError: As there.
        """
        noise_state = global_state.noise
        _check_not_frozen(noise_state)
        noise, step, next_noise_state = self._noise.next_row(noise_state, self._noise_stddev)
        steps_of_rounds = self.release.rows.steps * self._noise_stddev
        units = np.full(self.num_rounds, self._unit)

        def of_this_round(numbers: FloatArray) -> tf.Tensor:
            return tensor_streams.of_round(numbers, next_noise_state.round_index - 1)

        def scaled(number: tf.Tensor, numbers: FloatArray, scale: tf.Tensor | float) -> tf.Tensor:
            return number * scale if tf.is_tensor(scale) else of_this_round(numbers * scale)

        unit = of_this_round(units)
        sums = self._checked_sums(sample_state)
        if not self.release.has_noise:
            # Depends on the round's check, as the noise would.
            with tf.control_dependencies([next_noise_state.round_index]):
                noised = [
                    tf.cast(
                        tf.cast(steps, tf.float64) * scaled(unit, units, scale),
                        tensor_streams.noise_dtype(spec.dtype),
                    )
                    for steps, spec, scale in zip(sums, self._specs, scales, strict=True)
                ]
        else:
            if self._record is not None:
                varying = {id(scale): scale for scale in scales if tf.is_tensor(scale)}
                of_sums = [unit, step, *varying.values()]
                place = (noise_state.seed, noise_state.stream, noise_state.round_index)
                sums = self._record.check(*place, sums, of_sums)
            released_steps = [scaled(step, steps_of_rounds, scale) for scale in scales]
            noised = [
                _released(steps, unit, row, step, released, tensor_streams.noise_dtype(spec.dtype))
                for steps, row, spec, released in zip(
                    sums, noise, self._specs, released_steps, strict=True
                )
            ]
        result = tf.nest.pack_sequence_as(sample_state.steps, noised)
        # The state of a run that was extended becomes one of the whole run.
        next_state = global_state._replace(noise=next_noise_state, participation=self._declared())
        return result, next_state, dp_accounting.UnsupportedDpEvent()

    def spent(self, state: tensor_streams.NoiseState) -> tensor_streams.NoiseState:
        """Returns the noise state after a round whose row is never released from now on.

        Raises:
          tf.errors.InvalidArgumentError: If the state is of another process, or no round is left.
        """
        _, _, following = self._noise.next_row(state)
        if self._record is not None:
            self._record.spend(state.stream, state.round_index)
        return following

    def _checked_sums(self, sample_state: SampleState) -> list[tf.Tensor]:
        """The sums in steps, once they are seen to be of few enough records not to overflow."""
        for total in tf.nest.flatten(sample_state):
            if total.dtype != tf.int64:
                raise TypeError(
                    f"sums of records must be of int64, found {total.dtype.name}: add records up "
                    "with a sum that keeps integers, such as tff.aggregators.SumFactory."
                )
        _check_leaves(inputs.named_leaves(sample_state.steps), self._structure)
        largest_cohort = self.release.sums.largest_cohort
        are_few = tf.debugging.assert_less_equal(
            sample_state.num_records,
            tf.constant(largest_cohort, tf.int64),
            message=processes.refusal(
                f"More than {largest_cohort} clients reported, and the integers that "
                "their updates are summed in could overflow: nothing is released of this round."
            ),
        )
        is_whole = tf.debugging.assert_equal(
            sample_state.least_steps,
            -self.release.sums.steps_per_clip_norm * sample_state.num_records,
            message=processes.refusal(
                "The clients' integers were not added up as they are: a sum that is modular, "
                "bounded or scaled may have wrapped around, and nothing is released of this round. "
                "Use secure_aggregation_bits= of the aggregator, or tff.aggregators.SumFactory."
            ),
        )
        checks = [check for check in (are_few, is_whole) if check is not None]
        with tf.control_dependencies(checks):
            return [tf.identity(steps) for steps in tf.nest.flatten(sample_state.steps)]

    def derive_metrics(self, global_state: GlobalState) -> collections.OrderedDict[str, tf.Tensor]:
        """Returns the number of rounds that have been released; never the seed or noise."""
        return collections.OrderedDict(rounds_released=global_state.noise.round_index)


def checked_specs(specs: Any) -> tuple[tf.TensorSpec, ...]:
    """Returns the tensors of a structure of tf.TensorSpec.

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
                "only floating-point tensors can be clipped and noised, found a tensor of "
                f"{spec.dtype.name} and shape {spec.shape}: leave it out, or convert it to "
                "float32."
            )
        if not spec.shape.is_fully_defined():
            raise ValueError(f"tensors must have a known shape, found {spec.shape}.")
    return flat


def tensors_of(record: Any, specs: Any) -> Any:
    """Returns a record as tensors, in its own structure.

    Args:
      record: A structure of tensors, arrays and Python numbers; what is no tensor gets the dtype
        of its spec.
      specs: A structure of the tf.TensorSpecs that it has to have.

    Raises:
      TypeError: If it holds anything but numbers and plain tensors and arrays of them.
      ValueError: If it has other tensors, names or containers.
    """
    named = inputs.named_leaves(record)
    for path, leaf in named:
        if not (isinstance(leaf, int) or inputs.is_plain(leaf)):
            raise TypeError(inputs.not_plain(leaf, path))
    _check_leaves(named, specs)
    pairs = zip(named, tf.nest.flatten(specs), strict=True)
    return inputs.in_structure(record, [_tensor_of(leaf, spec) for (_, leaf), spec in pairs])


def _tensor_of(leaf: Any, spec: tf.TensorSpec) -> tf.Tensor:
    tensor = tf.convert_to_tensor(leaf, None if tf.is_tensor(leaf) else spec.dtype)
    if not (tensor.dtype.is_floating or tensor.dtype.is_integer):
        raise TypeError(f"records must be of numbers, found a tensor of {tensor.dtype.name}.")
    # A shape that is not known while the graph is traced is checked when it runs.
    return tensor if tensor.shape == spec.shape else tf.ensure_shape(tensor, spec.shape)


def _shape_of(leaf: Any) -> tf.TensorShape:
    """The shape of a tensor, a tf.TensorSpec, an array or a Python number."""
    return tf.TensorShape(leaf.shape if hasattr(leaf, "shape") else np.shape(leaf))


def _check_leaves(named: list[tuple[str, Any]], specs: Any) -> None:
    """Raises ValueError unless leaves have the paths and shapes of a structure of specs."""
    expected = [(path, spec.shape) for path, spec in inputs.named_leaves(specs)]
    found = [(path, _shape_of(leaf)) for path, leaf in named]
    inputs.check_same(expected, found, lambda one, other: bool(one.is_compatible_with(other)))


def _check_not_frozen(state: tensor_streams.NoiseState) -> None:
    """Raises ValueError if the graph that is being built holds the state as a constant."""
    for part in () if tf.executing_eagerly() else (state.round_index, *state.history):
        if not isinstance(part, tf.Variable) and tf.get_static_value(part) is not None:
            raise ValueError(
                "a graph would hold the state of the query as a constant, and release the same "
                "row of noise whenever it runs: pass the state to the tf.function as an argument "
                "and return the next one, or run eagerly (Keras: compile(run_eagerly=True))."
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
      released_step: What a step of the row stands for in the result.
      dtype: The type of the result.
    """

    def add(sums: tf.Tensor, row: tf.Tensor) -> tf.Tensor:
        # All that follows is a function of these integers, whatever it rounds.
        of_sums = tf.cast(tf.round(tf.cast(sums, tf.float64) * unit / step), tf.int64)
        released = of_sums + tf.cast(row, tf.int64)
        return tf.cast(tf.cast(released, tf.float64) * released_step, dtype)

    return _map_tiles(add, dtype, sums, row)


def _different_each_time(integers: tf.Tensor) -> tf.Tensor:
    """Two integers mixed with others at each execution of the graph."""
    # Also where TensorFlow's operations are to be deterministic, which refuses all others.
    drawn = tf.raw_ops.NonDeterministicInts(shape=[2], dtype=tf.int64)
    return tf.bitwise.bitwise_xor(integers, drawn)


def _map_tiles(
    function: Callable[..., tf.Tensor], dtype: tf.DType, *tensors: tf.Tensor
) -> tf.Tensor:
    """Returns an elementwise function of tensors of one shape, without temporaries of their size.

    Args:
      function: Takes tiles of the tensors, (count,) each, and returns (count,) entries.
      dtype: The type of what it returns.
      *tensors: Tensors of one shape, which is known.

    Returns:
      A tensor of that shape.
    """
    shape = tensors[0].shape
    flat = [tf.reshape(tensor, [-1]) for tensor in tensors]
    size = shape.num_elements()
    if size <= TILE:
        return tf.reshape(function(*flat), shape)
    count = -(-size // TILE)

    def add_tile(number: tf.Tensor, tiles: tf.TensorArray) -> tuple[tf.Tensor, tf.TensorArray]:
        start = number * TILE
        tile = function(*(tensor[start : start + TILE] for tensor in flat))
        return number + 1, tiles.write(number, tile)

    _, tiles = tf.while_loop(
        lambda number, _: number < count,
        add_tile,
        (tf.constant(0), tf.TensorArray(dtype, count, infer_shape=False, element_shape=[None])),
        parallel_iterations=1,
    )
    return tf.reshape(tiles.concat(), shape)
