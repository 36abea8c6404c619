"""Labelled images in memory, without TensorFlow."""

import dataclasses
import hashlib
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


def outcome_lines(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns what the result of a run says of its images, from the facts of ``image_task``."""
    return [
        ("training images", f"{facts['num_examples']:,}"),
        (
            f"always {facts['most_frequent_class']}",
            f"{100 * facts['most_frequent_class_accuracy']:.2f} %",
        ),
    ]
