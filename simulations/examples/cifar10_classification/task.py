"""CIFAR-10 as a federated task: every training image is a client."""

import numpy as np
import tensorflow as tf

from simulations.examples.cifar10_classification import data
from simulations.examples.image_classification import image_task
from simulations.examples.labelled_images import Images
from simulations.training.federated_task import FederatedTask
from simulations.training.task_parts import batches

# The share of the test images that is evaluated as a model is trained; no others are seen before
# training has ended. The papers have no such split, and train with all training images.
_HELDOUT_SHARE = 0.2
_NUM_BLOCKS = 3


def federated_task(train: Images, test: Images, seed: int) -> FederatedTask:
    """Returns the task.

    Args:
      train: The training images, (m, 32, 32, 3) uint8 pixels.
      test: The test images, at least two.
      seed: Seed for drawing the initial weights.
    """
    digits = len(str(len(train)))
    names = [f"{place:0{digits}}" for place in range(len(train))]

    def client_dataset(client_id: str, round_index: int) -> tf.data.Dataset:
        del round_index
        image = train[int(client_id) : int(client_id) + 1]
        slices = (data.as_input(image.pixels), image.labels)
        return batches(tf.data.Dataset.from_tensor_slices(slices), batch_size=1, epochs=1)

    prepared = Images(data.as_input(test.pixels), test.labels)
    num_heldout = max(1, round(_HELDOUT_SHARE * len(test)))
    return image_task(
        names,
        client_dataset,
        keras_model,
        _initial_weights(seed),
        train.labels,
        prepared[:num_heldout],
        prepared[num_heldout:],
        facts={"num_heldout": num_heldout},
    )


def keras_model() -> tf.keras.Model:
    """Returns a convolutional network of 550,570 parameters, as private training often has it.

    Three blocks of two convolutions of 3x3 and a maximum over 2x2, with 32, 64 and 128 filters,
    and a dense layer of 128: the network of Papernot et al., *Tempered Sigmoid Activations for
    Deep Learning with Differential Privacy* (2021), with rectified linear units. BandMF says
    only that its experiment follows earlier work.
    """
    inputs = outputs = tf.keras.Input(data.SHAPE)
    for block in range(_NUM_BLOCKS):
        for _ in range(2):
            outputs = tf.keras.layers.Conv2D(
                32 * 2**block, 3, padding="same", activation="relu", kernel_initializer="he_normal"
            )(outputs)
        outputs = tf.keras.layers.MaxPooling2D(2)(outputs)
    outputs = tf.keras.layers.Flatten()(outputs)
    outputs = tf.keras.layers.Dense(128, activation="relu", kernel_initializer="he_normal")(outputs)
    return tf.keras.Model(inputs, tf.keras.layers.Dense(data.NUM_CLASSES)(outputs))


def _initial_weights(seed: int) -> list[np.ndarray]:
    tf.keras.utils.set_random_seed(seed % 2**32)
    weights: list[np.ndarray] = keras_model().get_weights()
    return weights
