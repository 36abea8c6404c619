"""Labelled images in memory, without TensorFlow unless Keras downloads them."""

import dataclasses
import hashlib
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class Images:
    """Labelled images.

    Attributes:
      pixels: (m, ...) array, images of one shape.
      labels: (m,) array of integers, the classes from 0.
    """

    pixels: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, chosen: slice | np.ndarray) -> "Images":
        """Returns some of the images, by a slice or by their places."""
        return Images(self.pixels[chosen], self.labels[chosen])

    def fingerprint(self) -> str:
        """Returns the SHA-256 of pixels and labels, in hexadecimal digits."""
        digest = hashlib.sha256()
        for array in (self.pixels, self.labels):
            digest.update(f"{array.dtype.str}{array.shape}".encode())
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()


def concatenated(parts: Sequence[Images]) -> Images:
    """Returns all images of the parts, at least one, as one."""
    return Images(
        np.concatenate([part.pixels for part in parts]),
        np.concatenate([part.labels for part in parts]),
    )


def as_input(pixels: np.ndarray) -> np.ndarray:
    """Returns uint8 pixels as a model takes them: float32 in [-1, 1]."""
    return (pixels.astype(np.float32) - 127.5) / np.float32(127.5)


def checked_labels(
    labels: np.ndarray, num_classes: int, data_set: str, path: pathlib.Path
) -> np.ndarray:
    """Returns the labels of a file as int32.

    Raises:
      ValueError: If one is not from 0 to ``num_classes`` - 1.
    """
    if np.max(labels) >= num_classes:
        raise ValueError(
            f"{path} has the class {np.max(labels)}, and {data_set}'s are 0 to {num_classes - 1}: "
            "it is damaged, or is of another data set."
        )
    return labels.astype(np.int32)


def downloaded(
    module: str, data_set: str, shape: tuple[int, ...], advice: str
) -> tuple[Images, Images]:
    """Returns the training and the test images that Keras downloads.

    Args:
      module: The module of ``keras.datasets`` that has them.
      data_set: Their name, for messages.
      shape: The shape of an image.
      advice: What to do on a machine without a network: a sentence.

    Raises:
      ValueError: If the download fails.
    """
    import tensorflow as tf

    try:
        parts = getattr(tf.keras.datasets, module).load_data()
    except Exception as error:
        # Keras raises a bare Exception for a failed download, and others for damaged files.
        reason = str(error).strip() or type(error).__name__
        raise ValueError(
            f"{data_set} could not be downloaded or read by Keras ({reason.splitlines()[-1]}). "
            f"{advice} If files of an earlier download in ~/.keras/datasets are damaged, delete "
            "them."
        ) from error
    train, test = (
        Images(pixels.reshape(-1, *shape), labels.reshape(-1).astype(np.int32))
        for pixels, labels in parts
    )
    return train, test


def outcome_lines(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns what the result of a run says of its images, from the facts of ``image_task``."""
    return [
        ("training images", f"{facts['num_examples']:,}"),
        (
            f"always {facts['most_frequent_class']}",
            f"{100 * facts['most_frequent_class_accuracy']:.2f} %",
        ),
    ]
