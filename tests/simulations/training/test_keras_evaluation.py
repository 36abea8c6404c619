"""Evaluations of one model, before and after tff.learning made others in its graphs."""

import os

import numpy as np

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import tensorflow as tf
import tensorflow_federated as tff

from simulations.training.keras_evaluation import KerasEvaluation


def _model() -> tf.keras.Model:
    inputs = tf.keras.Input((3,))
    return tf.keras.Model(inputs, tf.keras.layers.Dense(1)(inputs))


def _learning_model() -> tff.learning.models.VariableModel:
    return tff.learning.models.from_keras_model(
        _model(),
        loss=tf.keras.losses.MeanSquaredError(),
        input_spec=(tf.TensorSpec([None, 3]), tf.TensorSpec([None, 1])),
    )


def test_each_evaluation_is_of_its_own_weights_and_examples() -> None:
    made = []

    def compiled() -> tf.keras.Model:
        model = _model()
        model.compile(loss="mse", metrics=["mae"])
        made.append(model)
        return model

    evaluate = KerasEvaluation(compiled)
    generator = np.random.default_rng(0)
    for number in range(4):
        if number == 2:
            tff.learning.algorithms.build_unweighted_fed_avg(
                _learning_model,
                client_optimizer_fn=tff.learning.optimizers.build_sgdm(learning_rate=0.1),
            )
        kernel, bias = generator.normal(size=(3, 1)), generator.normal(size=1)
        inputs = generator.normal(size=(50 + number, 3))
        targets = generator.normal(size=(50 + number, 1))
        errors = inputs @ kernel + bias - targets
        found = evaluate([kernel, bias], inputs, targets, batch_size=16)
        assert found.keys() == {"loss", "mae"}
        np.testing.assert_allclose(found["loss"], np.mean(errors**2), rtol=1e-5)
        np.testing.assert_allclose(found["mae"], np.mean(np.abs(errors)), rtol=1e-5)
    assert len(made) == 1
