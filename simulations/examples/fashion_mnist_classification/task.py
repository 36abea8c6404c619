"""The network for Fashion-MNIST."""

import tensorflow as tf

from simulations.examples.fashion_mnist_classification import data


def keras_model() -> tf.keras.Model:
    """Returns a convolutional network of 26,010 parameters.

    It is the network of Papernot et al., *Tempered Sigmoid Activations for Deep Learning with
    Differential Privacy* (2021), for images of this size, with the hyperbolic tangents that they
    found best under clipping: the paper that the network for CIFAR-10 is from.
    """
    inputs = outputs = tf.keras.Input(data.SHAPE)
    for filters, width, padding in ((16, 8, "same"), (32, 4, "valid")):
        outputs = tf.keras.layers.Conv2D(
            filters, width, strides=2, padding=padding, activation="tanh"
        )(outputs)
        outputs = tf.keras.layers.MaxPooling2D(2, strides=1)(outputs)
    outputs = tf.keras.layers.Dense(32, activation="tanh")(tf.keras.layers.Flatten()(outputs))
    return tf.keras.Model(inputs, tf.keras.layers.Dense(data.NUM_CLASSES)(outputs))
