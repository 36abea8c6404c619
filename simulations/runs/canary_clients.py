"""Canary clients in a real run, by which it is audited.

A canary is a client of the simulation whose whole data is one update. It goes the way of all other
updates: clipped, summed, noised, by the run's own code, in rounds that the run's own timers allow.
Canaries come in addition to the cohort, half of them on average, and what sums are divided by stays
as it is. What each round released is kept along the directions of
:class:`mf_aggregators.audit.run_audit.Canaries`, in the run's directory, before the round counts.
"""

import collections
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from mf_aggregators.audit.run_audit import Canaries, RunAudit
from simulations.runs.run_plan import Run

# A canary's update has an L2 norm of this many clip norms, unless zeroing allows less: an audit
# then shows missing or wrong clipping.
_EXCESS = 10.0
# A canary's largest entry over the zeroing threshold: below 1, so that rounding cannot zero its
# update.
_BELOW_ZEROING = 0.99
_BYTES_PER_NUMBER = 8
# Names of the two parts of a client's data (its batches, its canary update), and of the
# aggregator's measurement with the released update.
_BATCHES, _UPDATE, _RELEASED = "batches", "canary", "released_update"


class CanaryClients:
    """The canary clients of one run, with their data and the record of the run's releases."""

    def __init__(self, run: Run, initial_weights: Sequence[np.ndarray]) -> None:
        """Draws the canary clients of a run, with their updates.

        Args:
          run: The run, with ``audit_canaries``.
          initial_weights: The initial weights of the model; only their shapes count.

        Raises:
          ValueError: If the model is too small, or zeroing would remove the canaries' updates.
        """
        config = run.config
        self._mechanism, self._config, self._guarantee = run.mechanism, config, run.guarantee
        self._directory = run.directory.audit
        self._clip_norm = float(config.clip_norm)
        size = sum(int(weight.size) for weight in initial_weights)
        self._canaries = Canaries.drawn(
            run.seed, int(config.audit_canaries or 0), size, config.num_rounds
        )
        self._takes_part = Canaries.takes_part(
            run.mechanism.noise_reference, config.num_rounds, self._canaries.number
        )
        self._norm = _EXCESS * self._clip_norm
        if config.zeroing_norm is not None:
            block = math.sqrt(self._canaries.signs.shape[1])
            self._norm = min(self._norm, _BELOW_ZEROING * config.zeroing_norm * block)
        if self._norm < self._clip_norm:
            raise ValueError(
                f"--zeroing_norm={config.zeroing_norm:g} would zero the updates of canaries, whose "
                "norm lies in few coordinates: use fewer canaries or a larger norm."
            )
        self._shapes = [weight.shape for weight in initial_weights]
        self._no_update = self._update(0).take(0)

    def client_data(self, batches: Sequence[Any], index: int) -> list[Any]:
        """Returns the data of all clients in a round, those of the cohort and its canaries.

        Args:
          batches: The data set of each client of the cohort.
          index: The round, from 0.
        """
        canaries = np.flatnonzero(self._takes_part[index] & self._canaries.is_included)
        nothing = batches[0].take(0)
        return [
            *(_client(each, self._no_update) for each in batches),
            *(_client(nothing, self._update(canary)) for canary in canaries),
        ]

    def record(self, index: int, metrics: Any) -> None:
        """Records the release of a round for the audit, before the round counts as released.

        Raises:
          OSError: If the record cannot be written.
        """
        released = metrics["aggregator"][_RELEASED]
        flat = np.concatenate([np.ravel(each) for each in released])
        self._canaries.record(self._directory, index, flat)

    def learning_process(
        self,
        model_fn: Any,
        client_optimizer: Any,
        server_optimizer: Any,
        aggregator: tff.aggregators.UnweightedAggregationFactory,
        metrics_aggregator: Any,
        loop_implementation: Any,
    ) -> tff.learning.templates.LearningProcess:
        """Returns federated averaging on the data of :meth:`client_data`.

        It is ``tff.learning.algorithms.build_unweighted_fed_avg`` with these arguments and two
        differences: a client whose data are an update sends this update, and the metrics have the
        released update.
        """
        initial = tff.tensorflow.computation(
            lambda: tff.learning.models.ModelWeights.from_model(model_fn())
        )
        weights_type = initial.type_signature.result
        work = tff.learning.templates.build_model_delta_client_work(
            model_fn,
            client_optimizer,
            client_weighting=tff.learning.ClientWeighting.UNIFORM,
            metrics_aggregator=metrics_aggregator,
            loop_implementation=loop_implementation,
        )
        measured = tff.aggregators.add_measurements(
            aggregator, server_measurement_fn=_released_update
        )
        return tff.learning.templates.compose_learning_process(
            initial,
            tff.learning.templates.build_broadcast_process(weights_type),
            self._client_work(work),
            tff.aggregators.as_weighted_aggregator(measured).create(
                weights_type.trainable, tff.TensorType(np.float32)
            ),
            tff.learning.templates.build_apply_optimizer_finalizer(server_optimizer, weights_type),
        )

    def _client_work(
        self, work: tff.learning.templates.ClientWorkProcess
    ) -> tff.learning.templates.ClientWorkProcess:
        """Returns client work that adds a canary's update, if there is one, to its data's."""
        state, weights, batches = work.next.type_signature.parameter
        update = work.next.type_signature.result.result.member.update
        block = self._canaries.coordinates.shape[1:]
        canary = tff.SequenceType(
            (tff.TensorType(np.int64, block), tff.TensorType(np.float32, block))
        )
        data = tff.FederatedType(_client(batches.member, canary), tff.CLIENTS)

        @tff.tensorflow.computation(update, canary)
        def with_canary(update: Any, canary: Any) -> Any:
            sizes = [math.prod(shape) for shape in self._shapes]
            added = canary.reduce(
                tf.zeros([sum(sizes)]),
                lambda total, each: tf.tensor_scatter_nd_add(total, each[0][:, None], each[1]),
            )
            parts = iter(zip(tf.split(added, sizes), self._shapes, strict=True))

            def add(tensor: tf.Tensor) -> tf.Tensor:
                part, shape = next(parts)
                return tensor + tf.cast(tf.reshape(part, shape), tensor.dtype)

            return tf.nest.map_structure(add, update)

        @tff.federated_computation(state, weights, data)
        def next_round(state: Any, weights: Any, data: Any) -> Any:
            output = work.next(state, weights, data[_BATCHES])
            updates = tff.federated_map(with_canary, (output.result.update, data[_UPDATE]))
            result = tff.learning.templates.ClientResult(updates, output.result.update_weight)
            return tff.templates.MeasuredProcessOutput(
                output.state, tff.federated_zip(result), output.measurements
            )

        return tff.learning.templates.ClientWorkProcess(
            work.initialize,
            next_round,
            get_hparams_fn=work.get_hparams,
            set_hparams_fn=work.set_hparams,
        )

    def audit(self, num_rounds: int) -> RunAudit:
        """Returns the result of auditing the releases of the run's first rounds.

        Args:
          num_rounds: The rounds that were released.

        Raises:
          ValueError: If a round's record is missing or the run released what is not finite.
        """
        return self._canaries.audit(
            self._directory,
            self._mechanism,
            num_rounds=num_rounds,
            contribution=self._clip_norm / self._config.cohort,
            delta=self._config.delta,
            epsilon=self._guarantee.epsilon,
        )

    def _update(self, canary: int) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensors(self._canaries.update(canary, self._norm))


def _client(batches: Any, update: Any) -> collections.OrderedDict[str, Any]:
    return collections.OrderedDict([(_BATCHES, batches), (_UPDATE, update)])


def _released_update(mean: Any) -> Any:
    @tff.tensorflow.computation(mean.type_signature.member)
    def named(value: Any) -> Any:
        return collections.OrderedDict([(_RELEASED, value)])

    return tff.federated_map(named, mean)


def largest_cohort(run: Run) -> int:
    """Returns the largest number of clients in a round if all canaries take part in the run."""
    joins = Canaries.takes_part(
        run.mechanism.noise_reference, run.config.num_rounds, run.config.audit_canaries or 0
    )
    return run.config.cohort + int(np.max(np.sum(joins, axis=1)))
