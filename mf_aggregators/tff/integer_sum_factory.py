"""Sums of clients' integers: in 64 bits in the open, or modulo a power of two by a secure sum."""

import contextlib
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from mf_aggregators.tff import compatibility


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
