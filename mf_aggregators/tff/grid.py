"""Updates as integers, as ``kernel.integers`` says, in TensorFlow graphs.

TFF adds them up in 64 bits in the open, or modulo a power of two by a secure sum.
"""

import contextlib
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from mf_aggregators.kernel import integers
from mf_aggregators.kernel.draws import TILE
from mf_aggregators.tff import compatibility


def clip_to_grid(record: Any, clip_norm: tf.Tensor, steps_per_clip_norm: int) -> Any:
    """Scales a structure of tensors to a norm of at most ``clip_norm``, in quantization steps.

    Entries are rounded to the nearest step; where the norm would then exceed the clip norm, they
    are rounded towards zero instead, which never lengthens an update. The sum of squares that
    decides it is one of integers.

    Args:
      record: A structure of floating-point tensors of known shapes.
      clip_norm: A scalar above zero; the step is ``clip_norm / steps_per_clip_norm``.
      steps_per_clip_norm: Steps in a clip norm, at most
        ``kernel.integers.STEPS_PER_CLIP_NORM``.

    Returns:
      The structure as int64 tensors, in steps, whose squares add up to at most
      ``steps_per_clip_norm ** 2``; all zeros if any entry is NaN or infinite.
    """
    steps = tf.constant(steps_per_clip_norm, tf.float64)
    scaled, _, _ = _clipped(record, clip_norm, steps)
    nearest = [tf.cast(tf.round(tensor), tf.int64) for tensor in scaled]

    def towards_zero() -> list[tf.Tensor]:
        # Less than the limit by more than all roundings of floats on the way here.
        return [tf.cast(tensor * (1.0 - integers.MARGIN), tf.int64) for tensor in scaled]

    most = tf.constant(steps_per_clip_norm**2, tf.int64)
    rounded = tf.cond(_sum_of_squares(nearest) <= most, lambda: nearest, towards_zero)
    # Nothing is left to the sizes of roundings: what exceeds the norm all the same is zero.
    kept = tf.cast(_sum_of_squares(rounded) <= most, tf.int64)
    return tf.nest.pack_sequence_as(record, [tensor * kept for tensor in rounded])


def narrowed(steps: Any) -> Any:
    """Returns steps of one update in int32, which holds all that :func:`clip_to_grid` returns.

    Args:
      steps: A structure of int64 tensors.
    """
    return tf.nest.map_structure(lambda tensor: tf.cast(tensor, tf.int32), steps)


def clip_with_indicator(record: Any, clip_norm: tf.Tensor) -> tuple[Any, tf.Tensor]:
    """Returns a clipped record over its clip norm, and its clipped-count indicator.

    Args:
      record: A structure of floating-point tensors.
      clip_norm: A scalar above zero.

    Returns:
      The structure as float64 tensors, of an L2 norm of at most 1 but for errors of floats, and a
      float64 scalar: 1/2 if the record's norm was at most ``clip_norm``, and -1/2 otherwise. All
      zeros, the indicator as well, if any entry is NaN or infinite.
    """
    scaled, is_within, is_finite = _clipped(record, clip_norm, tf.ones([], tf.float64))
    side = tf.where(is_within, tf.constant(0.5, tf.float64), tf.constant(-0.5, tf.float64))
    indicator = tf.where(is_finite, side, tf.zeros([], tf.float64))
    return tf.nest.pack_sequence_as(record, scaled), indicator


def _clipped(
    record: Any, clip_norm: tf.Tensor, unit_norm: tf.Tensor
) -> tuple[list[tf.Tensor], tf.Tensor, tf.Tensor]:
    """Float64 tensors with clip norms as ``unit_norm``; was it within the norm, and finite?"""
    wide = [tf.cast(tensor, tf.float64) for tensor in tf.nest.flatten(record)]
    in_units, norm_in_units, unit, is_finite = _norm(wide)
    limit = tf.cast(clip_norm, tf.float64)
    # A record that is not above the clip norm keeps its length.
    is_within = unit * norm_in_units <= limit
    scale = tf.where(
        is_within, unit * (unit_norm / limit), unit_norm / tf.maximum(norm_in_units, 1.0)
    )
    return [tensor * scale for tensor in in_units], is_within, is_finite


def _norm(wide: list[tf.Tensor]) -> tuple[list[tf.Tensor], tf.Tensor, tf.Tensor, tf.Tensor]:
    """Tensors over their largest magnitude, the L2 norm of that, the magnitude, all finite?

    So norms neither overflow nor underflow. All zeros if an entry is not finite.
    """
    with_entries = [tensor for tensor in wide if tensor.shape.num_elements() != 0]
    zero, one = tf.zeros([], tf.float64), tf.ones([], tf.float64)
    if not with_entries:
        return wide, zero, one, tf.constant(True)
    largest = tf.reduce_max(tf.stack([tf.reduce_max(tf.abs(tensor)) for tensor in with_entries]))
    is_finite = tf.reduce_all(
        tf.stack([tf.reduce_all(tf.math.is_finite(tensor)) for tensor in with_entries])
    )
    unit = tf.where(is_finite & (largest > integers.LEAST_UNIT), largest, one)
    in_units = [tf.where(is_finite, tensor / unit, tf.zeros_like(tensor)) for tensor in wide]
    # As integers: a sum of floats would depend on how threads share it out.
    units = integers.units_of_squares(sum(tensor.shape.num_elements() for tensor in in_units))
    squares = tf.add_n([_sum_of_units(tensor, units) for tensor in in_units])
    return in_units, tf.sqrt(tf.cast(squares, tf.float64) / units), unit, is_finite


def _sum_of_units(tensor: tf.Tensor, units: float) -> tf.Tensor:
    """The sum of a tensor's squares, each rounded up to an integer after ``units`` times it."""

    def of(entries: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(tf.cast(tf.math.ceil(tf.square(entries) * units), tf.int64))

    size = tensor.shape.num_elements()
    if size <= TILE:
        return of(tensor)
    # A tile at a time, in a processor's cache: all at once takes three times as long.
    flat = tf.reshape(tensor, [-1])
    _, total = tf.while_loop(
        lambda start, _: start < size,
        lambda start, total: (start + TILE, total + of(flat[start : start + TILE])),
        (tf.constant(0), tf.zeros([], tf.int64)),
        parallel_iterations=1,
    )
    return total


def _sum_of_squares(tensors: list[tf.Tensor]) -> tf.Tensor:
    if not tensors:
        return tf.zeros([], tf.int64)
    return tf.add_n([tf.reduce_sum(tf.square(tensor)) for tensor in tensors])


class IntegerSumFactory(tff.aggregators.UnweightedAggregationFactory):
    """Adds up structures of int32 and int64 tensors in int64, without a state.

    What a client sends has 32 bits then, as a float32 has.
    TFF's ``SumFactory`` adds up in the type of what clients send. The sum here does not depend on
    its order either, or on the number of machines.
    """

    def create(self, value_type: Any) -> tff.templates.AggregationProcess:
        """Returns the process for values of a type; see the base class.

        Args:
          value_type: A structure of integer tensors of known shapes.

        Raises:
          TypeError: As :func:`specs_of` does.
        """
        specs = specs_of(value_type)

        @tff.tensorflow.computation
        def zero() -> Any:
            return tf.nest.map_structure(lambda spec: tf.zeros(spec.shape, tf.int64), specs)

        sum_type = zero.type_signature.result

        @tff.tensorflow.computation(sum_type, value_type)
        def accumulate(total: Any, value: Any) -> Any:
            wide = tf.nest.map_structure(lambda tensor: tf.cast(tensor, tf.int64), value)
            return tf.nest.map_structure(tf.add, total, wide)

        @tff.tensorflow.computation(sum_type, sum_type)
        def merge(total: Any, other: Any) -> Any:
            return tf.nest.map_structure(tf.add, total, other)

        @tff.tensorflow.computation(sum_type)
        def report(total: Any) -> Any:
            return total

        @compatibility.federated_computation
        def initialize() -> Any:
            return compatibility.federated_value((), compatibility.SERVER)

        @compatibility.federated_computation(
            initialize.type_signature.result,
            compatibility.FederatedType(value_type, compatibility.CLIENTS),
        )
        def next_fn(state: Any, value: Any) -> Any:
            total = compatibility.federated_aggregate(value, zero(), accumulate, merge, report)
            measurements = compatibility.federated_value((), compatibility.SERVER)
            return tff.templates.MeasuredProcessOutput(state, total, measurements)

        return tff.templates.AggregationProcess(initialize, next_fn)


class SecureIntegerSumFactory(tff.aggregators.UnweightedAggregationFactory):
    """Adds up structures of int64 tensors by TFF's secure sum modulo 2^bits, without a state.

    The result is the sum itself if it is within (-2^(bits - 1), 2^(bits - 1)); what wraps around
    on the way wraps back. A power of two because it divides 2^64: TFF's simulation of a secure sum
    adds up in int64 and reduces afterwards, which is wrong for another modulus where the sum
    leaves int64.
    """

    def __init__(self, bits: int) -> None:
        """Creates the factory.

        Args:
          bits: The width of the integers, the sign included: 2 to 62.
        """
        # As int64, because TFF takes a Python integer below 2^31 for an int32, and then cannot
        # reduce the clients' int64 by it.
        self._modulus = np.int64(1 << bits)

    def create(self, value_type: Any) -> tff.templates.AggregationProcess:
        """Returns the process for values of a type; see the base class.

        Args:
          value_type: A structure of int64 tensors.
        """
        modular = tff.aggregators.SecureModularSumFactory(self._modulus).create(value_type)
        modulus = self._modulus

        def signed(residue: tf.Tensor) -> tf.Tensor:
            return tf.where(residue >= modulus // 2, residue - modulus, residue)

        @tff.tensorflow.computation(modular.next.type_signature.result.result.member)
        def with_signs(residues: Any) -> Any:
            return tf.nest.map_structure(signed, residues)

        @compatibility.federated_computation(
            modular.initialize.type_signature.result,
            compatibility.FederatedType(value_type, compatibility.CLIENTS),
        )
        def next_fn(state: Any, value: Any) -> Any:
            output = modular.next(state, value)
            total = compatibility.federated_map(with_signs, output.result)
            return tff.templates.MeasuredProcessOutput(output.state, total, output.measurements)

        return tff.templates.AggregationProcess(modular.initialize, next_fn)


def specs_of(value_type: Any) -> Any:
    """Returns the tensors of a type, as a structure of tf.TensorSpec.

    Args:
      value_type: What a factory is to aggregate.

    Raises:
      TypeError: If it is no type of tensors in Python containers: of federated values, functions,
        sequences, or a structure without a container.
    """
    is_struct = isinstance(value_type, compatibility.StructType)
    if not is_struct or getattr(value_type, "python_container", None) is not None:
        with contextlib.suppress(TypeError, ValueError):
            return compatibility.type_to_tf_tensor_specs(value_type)
    raise TypeError(
        "a factory takes tensors in Python containers, as tff.types.to_type makes their type of, "
        f"found the type {value_type}."
    )
