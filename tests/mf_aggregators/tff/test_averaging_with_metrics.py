"""Federated averaging with private metrics, beside TensorFlow Federated's own."""

import warnings
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

import mf_aggregators as mfa
from mf_aggregators.participation import MinSeparation
from mf_aggregators.private_metrics import PrivateMetrics
from mf_aggregators.tff import averaging_with_metrics, client_sums
from tests.refusals import refuses

_METRICS = PrivateMetrics.of_training(6.0, 4, counts_clients=True)
_ACCURACY = "mean_absolute_error"


def _model_fn() -> tff.learning.models.VariableModel:
    inputs = tf.keras.Input((2,))
    outputs = tf.keras.layers.Dense(1, kernel_initializer="zeros")(inputs)
    return tff.learning.models.from_keras_model(
        tf.keras.Model(inputs, outputs),
        loss=tf.keras.losses.MeanSquaredError(),
        metrics=[tf.keras.metrics.MeanAbsoluteError()],
        input_spec=(tf.TensorSpec((None, 2)), tf.TensorSpec((None, 1))),
    )


def _data(targets: list[float]) -> tf.data.Dataset:
    """One batch of examples for which an untrained model is off by the targets, twice."""
    x = np.full((len(targets), 2), 0.1, np.float32)
    y = np.array(targets, np.float32)[:, np.newaxis]
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(4)


def _aggregator(metrics: PrivateMetrics | None, noise_multiplier: float = 0.0, **more: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return mfa.mf_dp_aggregator(
            mfa.factorizations.banded(4, 2),
            participation=MinSeparation(2),
            noise_multiplier=noise_multiplier,
            clip_norm=0.02,
            clients_per_round=4,
            allow_no_noise=True,
            metrics=metrics,
            **more,
        )


def _process(accuracy: str = _ACCURACY, **changes: Any) -> tff.learning.templates.LearningProcess:
    zeroing_norm = changes.pop("zeroing_norm", None)
    return averaging_with_metrics.learning_process(
        _model_fn,
        client_optimizer=tff.learning.optimizers.build_sgdm(0.01),
        server_optimizer=tff.learning.optimizers.build_sgdm(1.0),
        aggregator=_aggregator(_METRICS, **changes),
        accuracy=accuracy,
        client_epochs=2,
        zeroing_norm=zeroing_norm,
    )


def _weights(process: Any, state: Any) -> np.ndarray:
    trainable = process.get_model_weights(state).trainable
    return np.concatenate([np.ravel(each) for each in trainable])


@pytest.mark.long
def test_it_trains_as_federated_averaging_does_and_measures_what_clients_do() -> None:
    process = _process()
    plain = tff.learning.algorithms.build_unweighted_fed_avg(
        _model_fn,
        tff.learning.optimizers.build_sgdm(0.01),
        model_aggregator=_aggregator(None),
    )
    # An update above the clip norm, one within it, and a client without an example.
    targets: list[list[float]] = [[1.0, 3.0, 1.0], [0.5], []]
    state, other = process.initialize(), plain.initialize()
    data = [_data(each) for each in targets]
    output = process.next(state, data)
    np.testing.assert_allclose(
        _weights(process, output.state), _weights(plain, plain.next(other, data).state), rtol=1e-6
    )
    measured = output.metrics["aggregator"]["dp_query_metrics"]
    found = {name: float(value) for name, value in measured["private_metrics"].items()}
    # Four clients were expected. One did not come, and of one nothing is measured: both count in
    # the middle. Losses are 11 / 3 and 1 / 4; an error of 5 / 3 counts as 1; two epochs.
    assert found["loss"] == pytest.approx((11 / 3 + 1 / 4 + 3.0 + 3.0) / 4)
    assert found["accuracy"] == pytest.approx((1.0 + 0.5 + 0.5 + 0.5) / 4)
    assert found["examples"] == pytest.approx((3 / 2 + 1 / 2 + 0.0 + 2.0) / 4)
    assert found["count"] == pytest.approx(3 / 4)
    assert float(measured["unclipped_fraction"]) == pytest.approx((0.0 + 1.0 + 1.0 + 0.5) / 4)
    assert output.metrics["client_work"] == ()


@pytest.mark.short_cases(1)
@pytest.mark.parametrize("bits", [None, 32])
def test_one_sum_with_noise_is_all_that_leaves_the_clients(bits: int | None) -> None:
    process = _process(noise_multiplier=1.0, secure_aggregation_bits=bits)
    (only,) = client_sums.of(process.next)
    assert only.is_noised
    client_sums.check(process.next)
    if bits is not None:
        tff.test.assert_not_contains_unsecure_aggregation(process.next)


@pytest.mark.long
def test_large_updates_are_zero_and_their_metrics_count() -> None:
    process = _process(zeroing_norm=0.03)
    output = process.next(process.initialize(), [_data([2.0]), _data([1.0])])
    measured = output.metrics["aggregator"]["dp_query_metrics"]
    found = {name: float(value) for name, value in measured["private_metrics"].items()}
    assert found["loss"] == pytest.approx((4.0 + 1.0 + 3.0 + 3.0) / 4)
    # Gradients of the bias are 0.04 and 0.02 times the learning rate's share: one is zeroed.
    bias = _weights(process, output.state)[-1]
    assert bias == pytest.approx(0.02 / np.hypot(1.0, np.hypot(0.1, 0.1)) / 4, rel=1e-5)


def test_a_model_without_the_metric_is_refused() -> None:
    with refuses("without hits"):
        _process(accuracy="hits")
