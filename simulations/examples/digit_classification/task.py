"""The digits as a federated task: clients, a model, an evaluation."""

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from simulations.examples.digit_classification import data
from simulations.examples.image_classification import image_task
from simulations.examples.labelled_images import Images
from simulations.training.federated_task import FederatedTask
from simulations.training.task_parts import client_datasets


def federated_task(
    forms: tuple[Images, ...], examples_per_client: int, batch_size: int, epochs: int, seed: int
) -> FederatedTask:
    """Returns the task.

    Args:
      forms: What ``data.load`` returned.
      examples_per_client: The most images of a client.
      batch_size: Images in a local step.
      epochs: How often a client goes through its images.
      seed: Seed for the order of a client's images in a round. Initial weights are zero.
    """
    clients = data.clients(forms, examples_per_client)
    client_data = tff.simulation.datasets.TestClientData(
        {name: (images.pixels, images.labels) for name, images in clients.items()}
    )
    return image_task(
        client_data.client_ids,
        client_datasets(client_data, batch_size, epochs, None, seed),
        keras_model,
        keras_model().get_weights(),
        np.concatenate([images.labels for images in clients.values()]),
        data.heldout(forms),
        data.test(forms),
        facts={},
    )


def keras_model() -> tf.keras.Model:
    """Returns multinomial logistic regression that starts from zero: 650 parameters."""
    inputs = tf.keras.Input((data.NUM_PIXELS,))
    logits = tf.keras.layers.Dense(data.NUM_CLASSES, kernel_initializer="zeros")(inputs)
    return tf.keras.Model(inputs, logits)
