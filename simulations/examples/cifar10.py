r"""run-cifar10: one training run of CIFAR-10 with single images as clients, private or not.

The papers' centralised setting (BandMF Sec. 5 and App. H): 20 epochs over 50,000 images in
batches of 500, with a guarantee for each image. --sampling=poisson draws the batches as the
papers account for them; without it no image is used again within 100 rounds, and nothing is
amplified. With --num_clients the images belong to clients that prefer some classes. At that size
it is for machines with many cores, and for --workers. Run again with the same --output_dir, it
resumes.

Examples:
  run-cifar10 --output_dir=runs/cifar10 --sampling=poisson --num_bands=32
  run-cifar10 --output_dir=runs/cifar10_sgd --sampling=poisson --mechanism=identity \
    --server_momentum=0 --server_learning_rate=2
  run-cifar10 --output_dir=runs/small --cifar10_dir=cifar-10-batches-bin --num_rounds=20 \
    --clients_per_round=50
"""

import pathlib
from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np

from simulations.examples.images import (
    COMMON_DEFAULTS,
    OF_SINGLE_IMAGES,
    checked_labels,
    downloaded,
    task_command,
)
from simulations.runs import run_command
from simulations.training.federated_task import Images, concatenated

SHAPE = (32, 32, 3)
NUM_CLASSES = 10
NUM_TRAINING_IMAGES = 50_000

_TRAIN_FILES = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
_TEST_FILE = "test_batch.bin"
_RECORD_BYTES = 1 + 3 * 32 * 32
# The papers print no learning rate of the server: the one here is our own.
_DEFAULTS: Mapping[str, object] = {
    **COMMON_DEFAULTS,
    **OF_SINGLE_IMAGES,
    "client_learning_rate": 1.0,
    "server_learning_rate": 0.1,
    "server_momentum": 0.95,
    "server_cooldown": 0.25,
    "evaluate_every": 50,
    "delta": 1e-5,
    "num_rounds": 2000,
    "clients_per_round": 500,
    "clip_norm": 1.0,
}


def load(directory: pathlib.Path | None) -> tuple[Images, Images]:
    """Returns the training images and the test images of CIFAR-10.

    CIFAR-10 (Krizhevsky, 2009): 50,000 training and 10,000 test images of ten classes.

    Keras downloads the data set. Machines without a network read its binary version from a
    directory: records of one byte for the class and 3,072 for the pixels, all red ones, then all
    green and all blue ones, each the rows of a 32x32 image one after the other.

    Args:
      directory: Where the files of the binary version are, data_batch_1.bin to data_batch_5.bin
        and test_batch.bin, with any number of images each; None for what Keras downloads, which it
        keeps in ~/.keras/datasets.

    Returns:
      Images with (m, 32, 32, 3) uint8 pixels and (m,) int32 labels, in the order of the files,
      which is the same for both versions.

    Raises:
      ValueError: If a file is missing or damaged, or the download fails.
    """
    if directory is None:
        return downloaded(
            "cifar10",
            "CIFAR-10",
            SHAPE,
            "On a machine without a network, unpack cifar-10-binary.tar.gz, and give its directory "
            "as --cifar10_dir.",
        )
    train = concatenated([_read(directory / name) for name in _TRAIN_FILES])
    return train, _read(directory / _TEST_FILE)


def _read(path: pathlib.Path) -> Images:
    try:
        contents = np.fromfile(path, np.uint8)
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read ({error.strerror}): --cifar10_dir must be the directory "
            "cifar-10-batches-bin of CIFAR-10's binary version."
        ) from error
    if not len(contents) or len(contents) % _RECORD_BYTES:
        raise ValueError(
            f"{path} has {len(contents)} bytes, which are not whole records of {_RECORD_BYTES}: "
            "copy it again from CIFAR-10's binary version."
        )
    records = contents.reshape(-1, _RECORD_BYTES)
    labels = checked_labels(records[:, 0], NUM_CLASSES, "CIFAR-10", path)
    pixels = records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return Images(np.ascontiguousarray(pixels), labels)


def keras_model() -> Any:
    """Returns a convolutional network of 550,570 parameters, a usual one in private training.

    Three blocks of two convolutions of 3x3 and a maximum over 2x2, with 32, 64 and 128 filters,
    and a dense layer of 128: the network of Papernot et al., *Tempered Sigmoid Activations for
    Deep Learning with Differential Privacy* (2021), with rectified linear units. BandMF says
    only that its experiment follows earlier work.
    """
    import tensorflow as tf

    inputs = outputs = tf.keras.Input(SHAPE)
    for filters in (32, 64, 128):
        for _ in range(2):
            outputs = tf.keras.layers.Conv2D(
                filters, 3, padding="same", activation="relu", kernel_initializer="he_normal"
            )(outputs)
        outputs = tf.keras.layers.MaxPooling2D(2)(outputs)
    outputs = tf.keras.layers.Flatten()(outputs)
    outputs = tf.keras.layers.Dense(128, activation="relu", kernel_initializer="he_normal")(outputs)
    return tf.keras.Model(inputs, tf.keras.layers.Dense(NUM_CLASSES)(outputs))


COMMAND = task_command(
    name="run-cifar10",
    description=__doc__,
    data_set="CIFAR-10",
    directory_flag=(
        "cifar10_dir",
        "The directory of CIFAR-10's binary version (data_batch_1.bin, ..., test_batch.bin). "
        "Default: Keras downloads the data set into ~/.keras/datasets.",
    ),
    size=NUM_TRAINING_IMAGES,
    read=load,
    keras_model=keras_model,
    single_images=_DEFAULTS,
    groups=_DEFAULTS,
)


def run() -> NoReturn:
    """Entry point of the console command."""
    run_command.run(COMMAND)


if __name__ == "__main__":
    run()
