"""Which builders of ``tff.learning`` take the aggregator, and what else leaves the clients then.

``docs/builders.md`` has the table. All tests share one start of TensorFlow Federated.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

import mf_aggregators as mfa
from mf_aggregators.participation import MinSeparation
from mf_aggregators.tff import client_sums, processes
from mf_aggregators.tff.client_sums import UnnoisedSumError
from tests.refusals import refuses

pytestmark = pytest.mark.long

_ALGORITHMS = tff.learning.algorithms
_LOOP = {"loop_implementation": tff.learning.LoopImplementation.DATASET_ITERATOR}
_METRICS = {"loss", "num_examples", "num_batches"}


def _aggregator(noise_multiplier: float = 1.0, seed: int = 3) -> Any:
    return mfa.mf_dp_aggregator(
        mfa.factorizations.banded(mfa.workloads.prefix_sum(4), 2),
        participation=MinSeparation(2),
        noise_multiplier=noise_multiplier,
        clip_norm=1.0,
        clients_per_round=2,
        seed=seed,
        allow_no_noise=noise_multiplier == 0.0,
    )


def _weighted(**changes: Any) -> Any:
    return tff.aggregators.as_weighted_aggregator(_aggregator(**changes))


def _sgd() -> Any:
    return tff.learning.optimizers.build_sgdm(0.1)


class _Counting(tf.keras.layers.Layer):
    """Has an integer and a float that are no weights to train."""

    def build(self, input_shape: Any) -> None:
        """Makes both."""
        self.seen = self.add_weight("seen", (), tf.int32, "zeros", trainable=False)
        self.mean = self.add_weight("mean", (3,), tf.float32, "zeros", trainable=False)

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        """Counts batches, and returns the input."""
        self.seen.assign_add(1)
        self.mean.assign(0.5 * self.mean + 0.5 * tf.reduce_mean(inputs, axis=0))
        return inputs


def _model_fn(*layers: Callable[[], Any]) -> Callable[[], Any]:
    def build() -> Any:
        inputs = tf.keras.Input((3,))
        outputs = inputs
        for layer in layers:
            outputs = layer()(outputs)
        outputs = tf.keras.layers.Dense(1, kernel_initializer="zeros")(outputs)
        return tff.learning.models.from_keras_model(
            tf.keras.Model(inputs, outputs),
            loss=tf.keras.losses.MeanSquaredError(),
            input_spec=(tf.TensorSpec([None, 3]), tf.TensorSpec([None, 1])),
        )

    return build


def _recon_model_fn() -> Any:
    inputs = tf.keras.Input((3,))
    shared = tf.keras.layers.Dense(2, kernel_initializer="ones")
    own = tf.keras.layers.Dense(1, kernel_initializer="ones")
    model = tf.keras.Model(inputs, own(shared(inputs)))
    return tff.learning.models.ReconstructionModel.from_keras_model_and_layers(
        keras_model=model,
        global_layers=[shared],
        local_layers=[own],
        input_spec=(tf.TensorSpec([None, 3]), tf.TensorSpec([None, 1])),
    )


_LINEAR = _model_fn()
# Each builder with aggregators of a noise multiplier wherever it takes one.
_BUILDERS: dict[str, Callable[[float], Any]] = {
    "build_unweighted_fed_avg": lambda noise: _ALGORITHMS.build_unweighted_fed_avg(
        _LINEAR, _sgd(), model_aggregator=_aggregator(noise), **_LOOP
    ),
    "build_weighted_fed_avg": lambda noise: _ALGORITHMS.build_weighted_fed_avg(
        _LINEAR, _sgd(), model_aggregator=_weighted(noise_multiplier=noise), **_LOOP
    ),
    "build_weighted_fed_avg_with_optimizer_schedule": lambda noise: (
        _ALGORITHMS.build_weighted_fed_avg_with_optimizer_schedule(
            _LINEAR,
            lambda round_number: 0.1,
            tff.learning.optimizers.build_sgdm,
            model_aggregator=_weighted(noise_multiplier=noise),
            **_LOOP,
        )
    ),
    "build_unweighted_fed_prox": lambda noise: _ALGORITHMS.build_unweighted_fed_prox(
        _LINEAR, 0.1, _sgd(), model_aggregator=_aggregator(noise), **_LOOP
    ),
    "build_weighted_fed_prox": lambda noise: _ALGORITHMS.build_weighted_fed_prox(
        _LINEAR, 0.1, _sgd(), model_aggregator=_weighted(noise_multiplier=noise), **_LOOP
    ),
    "build_fed_sgd": lambda noise: _ALGORITHMS.build_fed_sgd(
        _LINEAR, model_aggregator=_weighted(noise_multiplier=noise), **_LOOP
    ),
    "build_unweighted_mime_lite": lambda noise: _ALGORITHMS.build_unweighted_mime_lite(
        _LINEAR,
        _sgd(),
        model_aggregator=_aggregator(noise),
        full_gradient_aggregator=_aggregator(noise, seed=4),
        **_LOOP,
    ),
    "build_weighted_mime_lite": lambda noise: _ALGORITHMS.build_weighted_mime_lite(
        _LINEAR,
        _sgd(),
        model_aggregator=_weighted(noise_multiplier=noise),
        full_gradient_aggregator=_weighted(noise_multiplier=noise, seed=4),
        **_LOOP,
    ),
    "build_fed_recon": lambda noise: _ALGORITHMS.build_fed_recon(
        _recon_model_fn,
        loss_fn=tf.keras.losses.MeanSquaredError,
        client_weighting=tff.learning.ClientWeighting.UNIFORM,
        model_aggregator_factory=_aggregator(noise),
    ),
}
_TWO_SUMS = ("build_unweighted_mime_lite", "build_weighted_mime_lite")


def _built(build: Callable[..., Any], *arguments: Any) -> Any:
    return build(*arguments)


def _data() -> list[Any]:
    generator = np.random.default_rng(0)
    return [
        tf.data.Dataset.from_tensor_slices(
            (
                generator.normal(size=(4 + client, 3)).astype(np.float32),
                generator.normal(size=(4 + client, 1)).astype(np.float32),
            )
        ).batch(4)
        for client in range(2)
    ]


def _after_two_rounds(process: Any) -> tuple[np.ndarray, Any]:
    """The model's trainable weights as one vector, and the last state."""
    state = process.initialize()
    for _ in range(2):
        state = process.next(state, _data()).state
    trainable = process.get_model_weights(state).trainable
    flat = [np.ravel(np.asarray(each)) for each in tf.nest.flatten(trainable)]
    return np.concatenate(flat), state


def _unnoised(process: Any) -> list[set[str]]:
    """The names of what is summed without noise, in each sum."""
    return [
        {each.name.split("/")[0] for each in found.tensors}
        for found in client_sums.of(process.next)
        if not found.is_noised
    ]


@pytest.mark.long_cases(1)
@pytest.mark.parametrize("name", _BUILDERS)
def test_a_builder_takes_the_aggregator_for_two_rounds(name: str) -> None:
    """Its model differs from the one without noise by noise, and nothing else is released."""
    private = _built(_BUILDERS[name], 1.0)
    noised, state = _after_two_rounds(private)
    silent, _ = _after_two_rounds(_built(_BUILDERS[name], 0.0))
    assert np.all(np.isfinite(noised))
    # A noise multiplier of one, divided by two clients: far from what is rounded.
    assert np.linalg.norm(noised - silent) > 1e-3
    number = 2 if name in _TWO_SUMS else 1
    assert processes.participations_in(state) == (MinSeparation(2),) * number
    client_sums.check(private.next)
    assert sum(each.is_noised for each in client_sums.of(private.next)) == number
    # Besides, there are the metrics.
    (metrics,) = _unnoised(private)
    assert metrics <= {*_METRICS, "num_examples_total", "num_batches_total"}


@pytest.mark.parametrize("weighted", [False, True])
def test_mime_lite_with_the_aggregator_in_one_place_alone_is_refused(weighted: bool) -> None:
    build = (
        _ALGORITHMS.build_weighted_mime_lite if weighted else _ALGORITHMS.build_unweighted_mime_lite
    )
    aggregator = _weighted() if weighted else _aggregator()
    process = _built(lambda: build(_LINEAR, _sgd(), model_aggregator=aggregator))
    # It looks private, because its state has noise.
    state = process.initialize()
    assert processes.participations_in(state) == (MinSeparation(2),)
    with refuses("full_gradient_aggregator", error=UnnoisedSumError):
        client_sums.check(process.next)
    with refuses("full_gradient_aggregator", error=UnnoisedSumError):
        process.next(state, _data())
    # The gradient, the number of examples or clients that it is divided by, and metrics.
    assert len(_unnoised(process)) == 3


def test_state_that_is_not_trained_stays_on_the_clients() -> None:
    """Integers and moving averages are no part of an update."""
    model_fn = _model_fn(_Counting, tf.keras.layers.BatchNormalization)
    process = _built(
        lambda: _ALGORITHMS.build_unweighted_fed_avg(
            model_fn, _sgd(), model_aggregator=_aggregator(), **_LOOP
        )
    )
    _, state = _after_two_rounds(process)
    before = process.get_model_weights(process.initialize())
    after = process.get_model_weights(state)
    assert {np.asarray(each).dtype.name for each in before.non_trainable} == {"int32", "float32"}
    for one, other in zip(before.non_trainable, after.non_trainable, strict=True):
        np.testing.assert_array_equal(one, other)
    assert not np.array_equal(before.trainable[-2], after.trainable[-2])
    (noised,) = (each for each in client_sums.of(process.next) if each.is_noised)
    # With the number of records, and the least step that they can add up to.
    assert len(noised.tensors) == len(before.trainable) + 2


def test_clusters_take_it_for_sums() -> None:
    """Sums of points and their numbers are one update; dividing it by one leaves it a sum."""
    aggregator = mfa.mf_dp_aggregator(
        mfa.factorizations.identity(4),
        participation=MinSeparation(2),
        noise_multiplier=1.0,
        clip_norm=4.0,
        clients_per_round=1,
        seed=3,
    )
    process = _built(lambda: _ALGORITHMS.build_fed_kmeans(2, (3,), sum_aggregator=aggregator))
    points = [data.unbatch().map(lambda x, y: x) for data in _data()]
    state = process.initialize()
    for _ in range(2):
        state = process.next(state, points).state
    assert np.all(np.isfinite(process.get_model_weights(state)))
    assert processes.participations_in(state) == (MinSeparation(2),)
    client_sums.check(process.next)
    assert _unnoised(process) == [{"num_examples"}]
