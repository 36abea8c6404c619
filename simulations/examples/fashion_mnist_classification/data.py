"""Fashion-MNIST (Xiao, Rasul and Vollgraf, 2017): 60,000 training and 10,000 test images.

The files are the same wherever they come from: Debian's package dataset-fashion-mnist, torchvision
(FashionMNIST/raw) and Keras have them, as they are or compressed. Each is an array in the format of
MNIST: two zero bytes, the type of its numbers, the number of its dimensions, each dimension in four
bytes, the first byte first, and then the numbers.
"""

import contextlib
import gzip
import math
import pathlib
import zlib
from collections.abc import Iterator
from typing import BinaryIO

import numpy as np

from simulations.examples.labelled_images import Images, checked_labels, downloaded

SHAPE = (28, 28, 1)
NUM_CLASSES = 10
# Where Debian's package has the files.
DEBIAN_DIRECTORY = pathlib.Path("/usr/share/datasets/fashion-mnist")
# The size of the data set that Keras downloads.
NUM_TRAINING_IMAGES = 60_000

_TRAIN, _TEST = "train", "t10k"
_IMAGES, _LABELS = "images-idx3-ubyte", "labels-idx1-ubyte"
# Unsigned bytes, in the format of MNIST.
_UNSIGNED_BYTES = 8
_FEWEST_TEST_IMAGES = 2
# More than any file of this format has; a damaged header may say anything.
_MOST_IMAGES = 10_000_000


def find_directory(given: pathlib.Path | None) -> pathlib.Path | None:
    """Returns where the files are; None for what Keras downloads.

    Args:
      given: The directory that was asked for; None for Debian's, if it is there.
    """
    if given is not None:
        return given
    return DEBIAN_DIRECTORY if DEBIAN_DIRECTORY.is_dir() else None


def num_training_images(directory: pathlib.Path | None) -> int:
    """Returns how many training images there are, without reading or downloading them.

    Args:
      directory: What :func:`load` takes.

    Raises:
      ValueError: If a file is missing or has no such array, or there is one test image.
    """
    if directory is None:
        return NUM_TRAINING_IMAGES
    number = _number(directory, _TRAIN)
    if _number(directory, _TEST) < _FEWEST_TEST_IMAGES:
        raise ValueError(
            f"{directory} has one test image, and evaluations need two: one is held out."
        )
    return number


def load(directory: pathlib.Path | None) -> tuple[Images, Images]:
    """Returns the training and the test images.

    Args:
      directory: Where the four files are, train-images-idx3-ubyte and so on, as they are or with
        the ending .gz; None for what Keras downloads, which it keeps in ~/.keras/datasets.

    Returns:
      Images with (m, 28, 28, 1) uint8 pixels and (m,) int32 labels, in the order of the files.

    Raises:
      ValueError: If a file is missing, damaged or of another format, or the download fails.
    """
    if directory is None:
        return downloaded(
            "fashion_mnist",
            "Fashion-MNIST",
            SHAPE,
            "Debian and Ubuntu have it as the package dataset-fashion-mnist; --data_dir reads its "
            "files from any directory.",
        )
    return _read(directory, _TRAIN), _read(directory, _TEST)


def _read(directory: pathlib.Path, split: str) -> Images:
    pixels = _array(_path(directory, split, _IMAGES), 3)
    path = _path(directory, split, _LABELS)
    labels = _array(path, 1)
    if len(labels) != len(pixels):
        raise ValueError(
            f"{path} has {len(labels)} labels, and there are {len(pixels)} images: copy both files "
            "again from one data set."
        )
    labels = checked_labels(labels, NUM_CLASSES, "Fashion-MNIST", path)
    return Images(pixels[..., np.newaxis], labels)


def _number(directory: pathlib.Path, split: str) -> int:
    path = _path(directory, split, _IMAGES)
    with _open(path) as file:
        return _dimensions(file, path, 3)[0]


def _path(directory: pathlib.Path, split: str, what: str) -> pathlib.Path:
    name = f"{split}-{what}"
    for candidate in (directory / name, directory / f"{name}.gz"):
        if candidate.is_file():
            return candidate
    raise ValueError(
        f"{directory} has no file {name} or {name}.gz: --data_dir is the directory with "
        f"Fashion-MNIST's four files, such as {DEBIAN_DIRECTORY}, torchvision's FashionMNIST/raw "
        "or ~/.keras/datasets/fashion-mnist."
    )


@contextlib.contextmanager
def _open(path: pathlib.Path) -> Iterator[BinaryIO]:
    try:
        if path.suffix == ".gz":
            with gzip.open(path) as unpacked:
                yield unpacked  # type: ignore[misc]
        else:
            with path.open("rb") as file:
                yield file
    except (OSError, EOFError, zlib.error) as error:
        # Of a file that is cut short, compressed in another way, or may not be read.
        raise ValueError(f"{path} cannot be read ({error}): copy it again.") from error


def _dimensions(file: BinaryIO, path: pathlib.Path, number: int) -> tuple[int, ...]:
    """The dimensions in the header of an array of bytes, checked."""
    header = file.read(4 + 4 * number)
    expected = bytes((0, 0, _UNSIGNED_BYTES, number))
    if header[:4] != expected or len(header) < 4 + 4 * number:
        raise ValueError(
            f"{path} begins with {header[:4].hex() or 'nothing'}, where an array of {number} "
            f"dimensions has {expected.hex()}: it is damaged, or is of another format than MNIST's."
        )
    found = tuple(int(size) for size in np.frombuffer(header[4:], ">u4"))
    if not 0 < found[0] <= _MOST_IMAGES or found[1:] != SHAPE[: number - 1]:
        raise ValueError(
            f"{path} has an array of {' x '.join(map(str, found))}, and Fashion-MNIST's images are "
            f"28 x 28: it is damaged, or is of another data set."
        )
    return found


def _array(path: pathlib.Path, number: int) -> np.ndarray:
    with _open(path) as file:
        dimensions = _dimensions(file, path, number)
        size = math.prod(dimensions)
        # A byte more, to see whether there are more, and no file's worth of them.
        contents = file.read(size + 1)
    if len(contents) != size:
        raise ValueError(
            f"{path} has {'more' if len(contents) > size else 'fewer'} than the {size} numbers "
            "that its header says: copy it again."
        )
    return np.frombuffer(contents, np.uint8).reshape(dimensions)
