"""Files in the format of MNIST, with images of the tests' own."""

import gzip
import pathlib

import numpy as np

IMAGES, LABELS = "images-idx3-ubyte", "labels-idx1-ubyte"


def arrays(size: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Returns (size, 28, 28) uint8 pixels and (size,) uint8 labels, from 0 to 9.

    The brightness of an image depends on its class, so that there is something to learn.
    """
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, 10, size).astype(np.uint8)
    noise = generator.integers(0, 60, (size, 28, 28))
    return (20 * labels[:, np.newaxis, np.newaxis] + noise % 56).astype(np.uint8), labels


def idx(array: np.ndarray) -> bytes:
    """Returns an array of bytes in that format."""
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    return bytes([0, 0, 8, array.ndim]) + sizes + array.tobytes()


def write(
    directory: pathlib.Path, num_train: int, num_test: int, compressed: bool = True
) -> pathlib.Path:
    """Writes the four files, with .gz or without; returns the directory."""
    directory.mkdir(parents=True)
    for split, size, seed in (("train", num_train, 0), ("t10k", num_test, 1)):
        for what, array in zip((IMAGES, LABELS), arrays(size, seed), strict=True):
            contents = idx(array)
            if compressed:
                (directory / f"{split}-{what}.gz").write_bytes(gzip.compress(contents))
            else:
                (directory / f"{split}-{what}").write_bytes(contents)
    return directory
