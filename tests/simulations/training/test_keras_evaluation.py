"""Evaluations of one model, before and after tff.learning made others in its graphs."""

import os
from collections.abc import Callable

import numpy as np
import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import tensorflow as tf
import tensorflow_federated as tff

from simulations.training.keras_evaluation import KerasEvaluation


def _dense() -> tf.keras.Model:
    inputs = tf.keras.Input((3,))
    return tf.keras.Model(inputs, tf.keras.layers.Dense(1)(inputs))


def _convolutional() -> tf.keras.Model:
    """The same function of the same weights."""
    inputs = tf.keras.Input((3,))
    outputs = tf.keras.layers.Conv1D(1, 3)(tf.keras.layers.Reshape((3, 1))(inputs))
    return tf.keras.Model(inputs, tf.keras.layers.Flatten()(outputs))


@pytest.mark.parametrize("model", [_dense, _convolutional])
def test_each_evaluation_is_of_its_own_weights_and_examples(
    model: Callable[[], tf.keras.Model],
) -> None:
    made = []

    def compiled() -> tf.keras.Model:
        made.append(model())
        made[-1].compile(loss="mse", metrics=["mae"])
        return made[-1]

    def learning_model() -> tff.learning.models.VariableModel:
        return tff.learning.models.from_keras_model(
            model(),
            loss=tf.keras.losses.MeanSquaredError(),
            input_spec=(tf.TensorSpec([None, 3]), tf.TensorSpec([None, 1])),
        )

    evaluate, shape = KerasEvaluation(compiled), model().weights[0].shape
    generator = np.random.default_rng(0)
    for number in range(4):
        if number == 2:
            tff.learning.algorithms.build_unweighted_fed_avg(
                learning_model,
                client_optimizer_fn=tff.learning.optimizers.build_sgdm(learning_rate=0.1),
            )
        kernel, bias = generator.normal(size=(3, 1)), generator.normal(size=1)
        inputs = generator.normal(size=(50 + number, 3))
        targets = generator.normal(size=(50 + number, 1))
        errors = inputs @ kernel + bias - targets
        found = evaluate([kernel.reshape(shape), bias], inputs, targets, batch_size=16)
        assert found.keys() == {"loss", "mae"}
        np.testing.assert_allclose(found["loss"], np.mean(errors**2), rtol=1e-5)
        np.testing.assert_allclose(found["mae"], np.mean(np.abs(errors)), rtol=1e-5)
    # An evaluation is traced once: only the first model was ever evaluated.
    assert [each.test_function is not None for each in made] == [True] + [False] * (len(made) - 1)
