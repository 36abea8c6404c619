"""Files of CIFAR-10's two versions, with images of the tests' own."""

import pathlib
import pickle

import numpy as np

NAMES = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")


def batches(size: int, seed: int = 0) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Returns (size, 3072) uint8 pixels, channel by channel, and (size,) labels, by file.

    The mean of a channel depends on the class, so that there is something to learn.
    """
    generator = np.random.default_rng(seed)
    found = {}
    for name in NAMES:
        labels = generator.integers(0, 10, size)
        means = 40 + 20 * np.stack([labels, 9 - labels, (3 * labels) % 10], axis=1)
        noise = generator.integers(-30, 31, (size, 3, 1024))
        pixels = np.clip(means[:, :, np.newaxis] + noise, 0, 255).astype(np.uint8)
        found[name] = pixels.reshape(size, -1), labels
    return found


def write_binary(directory: pathlib.Path, size: int, seed: int = 0) -> pathlib.Path:
    """Writes the binary version; returns the directory."""
    directory.mkdir()
    for name, (pixels, labels) in batches(size, seed).items():
        records = np.concatenate([labels.astype(np.uint8)[:, np.newaxis], pixels], axis=1)
        (directory / f"{name}.bin").write_bytes(records.tobytes())
    return directory


def write_pickled(directory: pathlib.Path, size: int, seed: int = 0) -> pathlib.Path:
    """Writes the version that Keras downloads; returns the directory."""
    directory.mkdir()
    for name, (pixels, labels) in batches(size, seed).items():
        contents = {b"data": pixels, b"labels": [int(label) for label in labels]}
        (directory / name).write_bytes(pickle.dumps(contents, protocol=2))
    return directory
