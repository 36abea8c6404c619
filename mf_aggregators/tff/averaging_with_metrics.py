"""Federated averaging with bounded metrics of clients and their updates in one private sum.

``tff.learning.algorithms.build_unweighted_fed_avg`` adds metrics up beside the aggregator, without
noise. Here they are a part of what the aggregator gets, and nothing else of the clients leaves
them: local training is TFF's own, and so are the broadcast and the server's optimizer.
"""

import collections
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff
from tensorflow_federated.python.learning.templates import model_delta_client_work

from mf_aggregators.private_metrics import ACCURACY, COUNT, EXAMPLES, LOSS


def learning_process(
    model_fn: Callable[[], tff.learning.models.VariableModel],
    *,
    client_optimizer: tff.learning.optimizers.Optimizer,
    server_optimizer: tff.learning.optimizers.Optimizer,
    aggregator: tff.aggregators.UnweightedAggregationFactory,
    accuracy: str,
    client_epochs: int,
    zeroing_norm: float | None = None,
    loop_implementation: tff.learning.LoopImplementation = (
        tff.learning.LoopImplementation.DATASET_ITERATOR
    ),
) -> tff.learning.templates.LearningProcess:
    """Returns federated averaging with private metrics.

    Args:
      model_fn: What ``tff.learning`` builds its model from.
      client_optimizer: The optimizer of the clients.
      server_optimizer: The optimizer of the server.
      aggregator: ``mf_dp_aggregator`` with metrics of ``PrivateMetrics.of_training``.
      accuracy: The name of the metric of ``model_fn`` that is the accuracy.
      client_epochs: How often a client goes through its examples of a round, which count once.
      zeroing_norm: The largest magnitude that an entry of an update may have; an update with a
        larger one is replaced by zeros. None for no zeroing.
      loop_implementation: How TFF writes the local training.

    Returns:
      The process. Its metrics have those of the aggregator, and of the clients nothing.

    Raises:
      ValueError: If the model has no such metric, or as the aggregator does.
    """
    with tf.Graph().as_default():
        model = model_fn()
        finalizers = model.metric_finalizers()
        weights_type = tff.learning.models.weights_type_from_model(model)
        input_type = tff.SequenceType(tff.types.tensorflow_to_type(model.input_spec))
    if missing := {LOSS, accuracy} - set(finalizers):
        raise ValueError(
            f"the model's metrics are {', '.join(finalizers)}, without "
            f"{' and '.join(sorted(missing))}: model_fn must have a loss, and a metric with the "
            "name of the task's accuracy."
        )

    @tff.tensorflow.computation
    def initial_weights() -> Any:
        return tff.learning.models.ModelWeights.from_model(model_fn())

    @tff.tensorflow.computation(weights_type, input_type)
    def train(weights: Any, data: Any) -> Any:
        update = model_delta_client_work.build_model_delta_update_with_tff_optimizer(
            model_fn,
            # With this weighting, the weight of an update is the client's number of examples.
            weighting=tff.learning.ClientWeighting.NUM_EXAMPLES,
            loop_implementation=loop_implementation,
        )
        result, measured = update(client_optimizer, weights, data)
        # If a client has no examples or its update is not finite, TFF has no metrics of it.
        is_measured = result.update_weight > 0.0
        nothing = tf.constant(float("nan"), tf.float32)
        metrics = collections.OrderedDict(
            (
                name,
                tf.where(is_measured, tf.cast(finalizers[of](measured[of]), tf.float32), nothing),
            )
            for name, of in ((LOSS, LOSS), (ACCURACY, accuracy))
        )
        metrics[EXAMPLES] = result.update_weight / client_epochs
        metrics[COUNT] = tf.ones([], tf.float32)
        return tff.learning.templates.ClientResult(
            update=collections.OrderedDict(
                update=_zeroed(result.update, zeroing_norm), metrics=metrics
            ),
            update_weight=tf.ones([], tf.float32),
        )

    @tff.federated_computation
    def initialize() -> Any:
        return tff.federated_value((), tff.SERVER)

    @tff.federated_computation(
        initialize.type_signature.result,
        tff.FederatedType(weights_type, tff.CLIENTS),
        tff.FederatedType(input_type, tff.CLIENTS),
    )
    def next_fn(state: Any, weights: Any, data: Any) -> Any:
        trained = tff.federated_map(train, (weights, data))
        return tff.templates.MeasuredProcessOutput(
            state, trained, tff.federated_value((), tff.SERVER)
        )

    record_type = train.type_signature.result.update
    return tff.learning.templates.compose_learning_process(
        initial_weights,
        tff.learning.templates.build_broadcast_process(weights_type),
        tff.learning.templates.ClientWorkProcess(initialize, next_fn),
        tff.aggregators.as_weighted_aggregator(aggregator).create(
            record_type, tff.TensorType(np.float32)
        ),
        tff.learning.templates.build_apply_optimizer_finalizer(server_optimizer, weights_type),
    )


def _zeroed(update: Any, zeroing_norm: float | None) -> Any:
    """Returns an update, or zeros if the magnitude of one of its entries is too large."""
    if zeroing_norm is None:
        return update
    limit, flat = tf.constant(zeroing_norm, tf.float32), tf.nest.flatten(update)
    are_small = [tf.reduce_all(tf.cast(tf.abs(tensor), tf.float32) <= limit) for tensor in flat]
    is_small = tf.reduce_all(tf.stack(are_small))
    return tf.nest.map_structure(
        lambda tensor: tf.where(is_small, tensor, tf.zeros_like(tensor)), update
    )
