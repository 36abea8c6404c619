r"""run-fashion-mnist: one training run of Fashion-MNIST, private or not.

By default every image is a client, as in a data centre that protects single examples, and no
image is used twice. With --num_clients the images belong to clients that prefer some classes, by a
Dirichlet split, and clients are protected. Run again with the same --output_dir, it resumes.

Examples:
  run-fashion-mnist --output_dir=runs/fashion
  run-fashion-mnist --output_dir=runs/sampled --sampling=poisson --num_bands=4
  run-fashion-mnist --output_dir=runs/federated --num_clients=3000 --concentration=0.3
  run-fashion-mnist --output_dir=runs/mine --data_dir=data/FashionMNIST/raw
"""

from collections.abc import Mapping
from typing import Any, NoReturn

from simulations.examples.fashion_mnist_classification import data
from simulations.examples.image_clients import task_command
from simulations.runs import federated_runs

# What a run uses where its flags do not say otherwise. Delta is that of run-cifar10.
_COMMON: Mapping[str, Any] = {
    "client_optimizer": "sgd",
    "server_momentum": 0.9,
    "server_warmup": 0.0,
    "server_cooldown": 0.25,
    "evaluate_every": 15,
    "target_epsilon": 8.0,
    "delta": 1e-5,
    "max_bands": 64,
}
_SINGLE_IMAGES: Mapping[str, Any] = {
    **_COMMON,
    "num_rounds": 60,
    "clients_per_round": 100,
    "batch_size": 1,
    "client_epochs": 1,
    "client_learning_rate": 1.0,
    "server_learning_rate": 0.2,
    "clip_norm": 1.0,
}
_GROUPS: Mapping[str, Any] = {
    **_COMMON,
    "num_rounds": 60,
    "clients_per_round": 50,
    "batch_size": 10,
    "client_epochs": 1,
    "client_learning_rate": 0.1,
    "server_learning_rate": 0.5,
    "clip_norm": 0.5,
}


def keras_model() -> Any:
    """Returns a convolutional network of 26,010 parameters.

    It is the network of Papernot et al., *Tempered Sigmoid Activations for Deep Learning with
    Differential Privacy* (2021), for images of this size, with the hyperbolic tangents that they
    found best under clipping: the paper that the network for CIFAR-10 is from.
    """
    import tensorflow as tf

    inputs = outputs = tf.keras.Input(data.SHAPE)
    for filters, width, padding in ((16, 8, "same"), (32, 4, "valid")):
        outputs = tf.keras.layers.Conv2D(
            filters, width, strides=2, padding=padding, activation="tanh"
        )(outputs)
        outputs = tf.keras.layers.MaxPooling2D(2, strides=1)(outputs)
    outputs = tf.keras.layers.Dense(32, activation="tanh")(tf.keras.layers.Flatten()(outputs))
    return tf.keras.Model(inputs, tf.keras.layers.Dense(data.NUM_CLASSES)(outputs))


COMMAND = task_command(
    name="run-fashion-mnist",
    description=__doc__,
    data_set="Fashion-MNIST",
    directory_flag=(
        "data_dir",
        "The directory of Fashion-MNIST's four files (train-images-idx3-ubyte and so on, or the "
        f"same with .gz). Default: {data.DEBIAN_DIRECTORY} if it is there; else Keras downloads "
        "the data set into ~/.keras/datasets.",
    ),
    size=data.NUM_TRAINING_IMAGES,
    read=data.load,
    keras_model=keras_model,
    single_images=_SINGLE_IMAGES,
    groups=_GROUPS,
)


def run() -> NoReturn:
    """Entry point of the console command."""
    federated_runs.run(COMMAND)


if __name__ == "__main__":
    run()
