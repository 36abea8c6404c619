"""The network for CIFAR-10."""

import tensorflow as tf

from simulations.examples.cifar10_classification import data

_NUM_BLOCKS = 3


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
