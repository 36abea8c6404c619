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

import gzip
import math
import pathlib
import zlib
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
from simulations.training.federated_task import Images

SHAPE = (28, 28, 1)
NUM_CLASSES = 10
# The directory in which Debian's package dataset-fashion-mnist puts the data set.
DEBIAN_DIRECTORY = pathlib.Path("/usr/share/datasets/fashion-mnist")
NUM_TRAINING_IMAGES = 60_000

# The code of unsigned bytes as the type of numbers, in MNIST's file format.
_UNSIGNED_BYTES = 8
# Defaults of run-fashion-mnist for the flags of a training run. Delta is the default of
# run-cifar10.
_COMMON: Mapping[str, object] = {
    **COMMON_DEFAULTS,
    "num_rounds": 60,
    "server_momentum": 0.9,
    "server_cooldown": 0.25,
    "evaluate_every": 15,
    "delta": 1e-5,
}
_SINGLE_IMAGES: Mapping[str, object] = {
    **_COMMON,
    **OF_SINGLE_IMAGES,
    "clients_per_round": 100,
    "client_learning_rate": 1.0,
    "server_learning_rate": 0.2,
    "clip_norm": 1.0,
}
_GROUPS: Mapping[str, object] = {
    **_COMMON,
    "clients_per_round": 50,
    "batch_size": 10,
    "client_epochs": 1,
    "client_learning_rate": 0.1,
    "server_learning_rate": 0.5,
    "clip_norm": 0.5,
}


def load(directory: pathlib.Path | None) -> tuple[Images, Images]:
    """Returns the training images and the test images of Fashion-MNIST.

    Fashion-MNIST (Xiao, Rasul and Vollgraf, 2017): 60,000 training and 10,000 test images.

    Debian's package dataset-fashion-mnist, torchvision (FashionMNIST/raw) and Keras have the same
    files, as they are or compressed. Each is an array in the format of MNIST: two zero bytes, the
    type of its numbers, the number of its dimensions, each dimension in four bytes, the first byte
    first, and then the numbers.

    Args:
      directory: Where the four files are, train-images-idx3-ubyte and so on, as they are or with
        the ending .gz; None for Debian's directory if it is there, or else for what Keras
        downloads, which it keeps in ~/.keras/datasets.

    Returns:
      Images with (m, 28, 28, 1) uint8 pixels and (m,) int32 labels, in the order of the files.

    Raises:
      ValueError: If a file is missing, damaged or of another format, or the download fails.
    """
    if directory is None and DEBIAN_DIRECTORY.is_dir():
        directory = DEBIAN_DIRECTORY
    if directory is None:
        return downloaded(
            "fashion_mnist",
            "Fashion-MNIST",
            SHAPE,
            "Debian and Ubuntu have it as the package dataset-fashion-mnist; --data_dir reads its "
            "files from any directory.",
        )
    return _read(directory, "train"), _read(directory, "t10k")


def _read(directory: pathlib.Path, split: str) -> Images:
    pixels = _array(_path(directory, f"{split}-images-idx3-ubyte"), SHAPE[:2])
    path = _path(directory, f"{split}-labels-idx1-ubyte")
    labels = _array(path, ())
    if len(labels) != len(pixels):
        raise ValueError(
            f"{path} has {len(labels)} labels, and there are {len(pixels)} images: copy both files "
            "again from one data set."
        )
    labels = checked_labels(labels, NUM_CLASSES, "Fashion-MNIST", path)
    return Images(pixels[..., np.newaxis], labels)


def _path(directory: pathlib.Path, name: str) -> pathlib.Path:
    for candidate in (directory / name, directory / f"{name}.gz"):
        if candidate.is_file():
            return candidate
    raise ValueError(
        f"{directory} has no file {name} or {name}.gz: --data_dir must be the directory with "
        f"Fashion-MNIST's four files, such as {DEBIAN_DIRECTORY}."
    )


def _array(path: pathlib.Path, shape: tuple[int, ...]) -> np.ndarray:
    """Reads an array of bytes from a file in MNIST's format; each of its entries has ``shape``."""
    try:
        contents = path.read_bytes()
        contents = gzip.decompress(contents) if path.suffix == ".gz" else contents
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path} cannot be read ({error}): copy it again.") from error
    begin = bytes((0, 0, _UNSIGNED_BYTES, 1 + len(shape)))
    numbers = np.frombuffer(contents, np.uint8, offset=min(len(contents), 8 + 4 * len(shape)))
    size = len(numbers) // math.prod(shape)
    header = begin + np.array([size, *shape], ">u4").tobytes()
    if not size or not contents.startswith(header) or len(numbers) != size * math.prod(shape):
        raise ValueError(
            f"{path} is not an array of {' x '.join(['m', *map(str, shape)])} bytes in MNIST's "
            "format: it is damaged, or of another data set. Copy it again."
        )
    return numbers.reshape(size, *shape)


def keras_model() -> Any:
    """Returns a convolutional network of 26,010 parameters.

    It is the network of Papernot et al., *Tempered Sigmoid Activations for Deep Learning with
    Differential Privacy* (2021), for images of this size, with the hyperbolic tangents that they
    found best under clipping: the paper that the network for CIFAR-10 is from.
    """
    import tensorflow as tf

    inputs = outputs = tf.keras.Input(SHAPE)
    for filters, width, padding in ((16, 8, "same"), (32, 4, "valid")):
        outputs = tf.keras.layers.Conv2D(
            filters, width, strides=2, padding=padding, activation="tanh"
        )(outputs)
        outputs = tf.keras.layers.MaxPooling2D(2, strides=1)(outputs)
    outputs = tf.keras.layers.Dense(32, activation="tanh")(tf.keras.layers.Flatten()(outputs))
    return tf.keras.Model(inputs, tf.keras.layers.Dense(NUM_CLASSES)(outputs))


COMMAND = task_command(
    name="run-fashion-mnist",
    description=__doc__,
    data_set="Fashion-MNIST",
    directory_flag=(
        "data_dir",
        "The directory of Fashion-MNIST's four files (train-images-idx3-ubyte and so on, or the "
        f"same with .gz). Default: {DEBIAN_DIRECTORY} if it is there; else Keras downloads "
        "the data set into ~/.keras/datasets.",
    ),
    size=NUM_TRAINING_IMAGES,
    read=load,
    keras_model=keras_model,
    single_images=_SINGLE_IMAGES,
    groups=_GROUPS,
)


def run() -> NoReturn:
    """Entry point of the console command."""
    run_command.run(COMMAND)


if __name__ == "__main__":
    run()
