"""Fashion-MNIST (Xiao, Rasul and Vollgraf, 2017): 60,000 training and 10,000 test images.

The files are the same wherever they come from: Debian's package dataset-fashion-mnist, torchvision
(FashionMNIST/raw) and Keras have them, as they are or compressed. Each is an array in the format of
MNIST: two zero bytes, the type of its numbers, the number of its dimensions, each dimension in four
bytes, the first byte first, and then the numbers.
"""

import gzip
import math
import pathlib
import zlib

import numpy as np

from simulations.examples.labelled_images import Images, checked_labels, downloaded

SHAPE = (28, 28, 1)
NUM_CLASSES = 10
# The directory of Debian's package.
DEBIAN_DIRECTORY = pathlib.Path("/usr/share/datasets/fashion-mnist")
NUM_TRAINING_IMAGES = 60_000

# The type of unsigned bytes, in the format of MNIST.
_UNSIGNED_BYTES = 8


def load(directory: pathlib.Path | None) -> tuple[Images, Images]:
    """Returns the training and the test images.

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
        f"{directory} has no file {name} or {name}.gz: --data_dir is the directory with "
        f"Fashion-MNIST's four files, such as {DEBIAN_DIRECTORY}, torchvision's FashionMNIST/raw "
        "or ~/.keras/datasets/fashion-mnist."
    )


def _array(path: pathlib.Path, shape: tuple[int, ...]) -> np.ndarray:
    """Reads an array of bytes whose entries along the first axis have a shape."""
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
            f"{path} is no array of {' x '.join(['m', *map(str, shape)])} bytes in MNIST's format: "
            "it is damaged, or of another data set. Copy it again."
        )
    return numbers.reshape(size, *shape)
