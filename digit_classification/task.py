"""The digits as a federated task: clients, a model, an evaluation."""

import functools
from collections.abc import Mapping, Sequence

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from digit_classification import data
from digit_classification.data import Images
from simulations.client_data import client_datasets
from simulations.federated_task import HELDOUT, TEST, FederatedTask

ACCURACY = "accuracy"


def federated_task(
    forms: tuple[Images, ...], examples_per_client: int, batch_size: int, epochs: int, seed: int
) -> FederatedTask:
    """Returns the task.

    Args:
      forms: What ``data.load`` returned.
      examples_per_client: The most images of a client.
      batch_size: Images in a local step.
      epochs: How often a client goes through its images.
      seed: Of the order of a client's images in a round. Initial weights are zero.
    """
    clients = data.clients(forms, examples_per_client)
    client_data = tff.simulation.datasets.TestClientData(
        {name: (images.pixels, images.labels) for name, images in clients.items()}
    )
    splits = {HELDOUT: data.heldout(forms), TEST: data.test(forms)}
    train_labels = np.concatenate([images.labels for images in clients.values()])
    digit = int(np.argmax(np.bincount(train_labels)))
    return FederatedTask(
        client_ids=tuple(client_data.client_ids),
        client_dataset=client_datasets(client_data, batch_size, epochs, None, seed),
        model_fn=model_fn,
        initial_weights=tuple(keras_model().get_weights()),
        evaluate=functools.partial(_evaluate, splits),
        accuracy=ACCURACY,
        facts={
            "num_examples": len(train_labels),
            "most_frequent_digit": digit,
            "most_frequent_digit_accuracy": float(np.mean(splits[TEST].labels == digit)),
        },
    )


def keras_model() -> tf.keras.Model:
    """Returns multinomial logistic regression that starts from zero: 650 parameters."""
    inputs = tf.keras.Input((data.NUM_PIXELS,))
    logits = tf.keras.layers.Dense(data.NUM_CLASSES, kernel_initializer="zeros")(inputs)
    return tf.keras.Model(inputs, logits)


def model_fn() -> tff.learning.models.VariableModel:
    """Returns the model as ``tff.learning`` needs it."""
    return tff.learning.models.from_keras_model(
        keras_model(),
        loss=_loss(),
        input_spec=(
            tf.TensorSpec((None, data.NUM_PIXELS), tf.float32),
            tf.TensorSpec((None,), tf.int32),
        ),
        metrics=[_accuracy()],
    )


def _evaluate(
    splits: Mapping[str, Images], weights: Sequence[np.ndarray], split: str
) -> Mapping[str, float]:
    # A Keras model does not survive that tff.learning builds others inside its graphs,
    # so each evaluation makes its own.
    model = keras_model()
    model.set_weights(list(weights))
    model.compile(loss=_loss(), metrics=[_accuracy()])
    images = splits[split]
    values = model.evaluate(images.pixels, images.labels, verbose=0, return_dict=True)
    return {name: float(value) for name, value in values.items()}


def _loss() -> tf.keras.losses.Loss:
    return tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def _accuracy() -> tf.keras.metrics.Metric:
    return tf.keras.metrics.SparseCategoricalAccuracy(name=ACCURACY)
