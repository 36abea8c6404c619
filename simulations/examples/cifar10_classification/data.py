"""CIFAR-10 (Krizhevsky, 2009): 50,000 training and 10,000 test images of ten classes.

Keras downloads the data set. Machines without a network read its binary version from a
directory: records of one byte for the class and 3,072 for the pixels, all red ones, then all
green and all blue ones, each the rows of a 32x32 image one after the other.
"""

import pathlib

import numpy as np

from simulations.examples.labelled_images import Images, checked_labels, concatenated, downloaded

SHAPE = (32, 32, 3)
NUM_CLASSES = 10
NUM_TRAINING_IMAGES = 50_000

_TRAIN_FILES = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
_TEST_FILE = "test_batch.bin"
_RECORD_BYTES = 1 + 3 * 32 * 32


def load(directory: pathlib.Path | None) -> tuple[Images, Images]:
    """Returns the training and the test images.

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
            "On a machine without a network, unpack cifar-10-binary.tar.gz, and name its directory "
            "by --cifar10_dir.",
        )
    train = concatenated([_read(directory / name) for name in _TRAIN_FILES])
    return train, _read(directory / _TEST_FILE)


def _read(path: pathlib.Path) -> Images:
    try:
        contents = np.fromfile(path, np.uint8)
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read ({error.strerror}): --cifar10_dir is the directory "
            "cifar-10-batches-bin of CIFAR-10's binary version."
        ) from error
    if not len(contents) or len(contents) % _RECORD_BYTES:
        raise ValueError(
            f"{path} has {len(contents)} bytes, which are no whole records of {_RECORD_BYTES}: "
            "copy it again from CIFAR-10's binary version."
        )
    records = contents.reshape(-1, _RECORD_BYTES)
    labels = checked_labels(records[:, 0], NUM_CLASSES, "CIFAR-10", path)
    pixels = records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return Images(np.ascontiguousarray(pixels), labels)
