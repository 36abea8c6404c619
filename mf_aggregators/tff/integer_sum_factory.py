"""Sums of clients' integers in 64 bits: what a client sends has 32 bits, as a float32 has."""

from typing import Any

import tensorflow as tf
import tensorflow_federated as tff

from mf_aggregators.tff import compatibility


class IntegerSumFactory(tff.aggregators.UnweightedAggregationFactory):
    """Adds up structures of int32 and int64 tensors in int64, without a state.

    TFF's ``SumFactory`` adds up in the type of what clients send. The sum here does not depend on
    its order either, or on the number of machines.
    """

    def create(self, value_type: Any) -> tff.templates.AggregationProcess:
        """Returns the process for values of a type; see the base class.

        Args:
          value_type: A structure of integer tensors of known shapes.
        """
        specs = compatibility.type_to_tf_tensor_specs(value_type)

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
