"""Files of model weights: what a run begins with, and what it leaves. No TensorFlow.

A run's final model is a ``.npz`` file of its weights by position, with their names. Keras files are
read elsewhere, by the model that they are for (``simulations/training/model_parts.py``).
"""

import hashlib
import io
import os
import pathlib
from collections.abc import Sequence

import numpy as np

from mf_aggregators import atomic_files, inputs
from mf_aggregators.kernel.numbers import Error

# The weights of a run that has ended, in its directory.
FINAL_MODEL_FILE = "final_model.npz"
# Files that Keras writes: a model in its newer format, or weights or a model in HDF5.
KERAS_SUFFIXES = (".keras", ".h5", ".hdf5")
_SUFFIX = ".npz"
_NAMES = "names"
# A file of many gigabytes is read in pieces.
_BYTES_AT_ONCE = 1 << 20


class ModelError(Error, ValueError):
    """Weights or layers that were asked for, and that the model shows to be wrong."""


def find(path: str | os.PathLike[str]) -> pathlib.Path:
    """Returns the file of weights that a path stands for: itself, or the one of a run's directory.

    Args:
      path: A Keras file, a ``.npz`` file as :func:`save` writes it, or the directory of a run.

    Raises:
      ValueError: If there is none.
    """
    file = pathlib.Path(path)
    if file.is_dir():
        file = file / FINAL_MODEL_FILE
        if not file.is_file():
            raise ValueError(
                f"{path} has no {FINAL_MODEL_FILE}, which a run writes when it ends: name "
                "the directory of a run that has ended, or a file of weights."
            )
    if not file.is_file():
        raise ValueError(f"{path} is no file of weights and no directory of a run.")
    if file.suffix not in (_SUFFIX, *KERAS_SUFFIXES):
        raise ValueError(
            f"{path} is no file of weights by its name: it has to end in "
            f"{', '.join(KERAS_SUFFIXES)} or {_SUFFIX}."
        )
    return file


def sha256(path: str | os.PathLike[str]) -> str:
    """Returns the SHA-256, in hexadecimal digits, of the file that a path stands for.

    Args:
      path: As :func:`find` takes it.

    Raises:
      ValueError: If there is no such file, or it cannot be read.
    """
    file = find(path)
    try:
        return file_sha256(file)
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}.") from None


def file_sha256(path: pathlib.Path) -> str:
    """Returns the SHA-256 of any file, in hexadecimal digits, read in pieces.

    Raises:
      OSError: If it cannot be read.
    """
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BYTES_AT_ONCE):
            digest.update(block)
    return digest.hexdigest()


def save(path: str | os.PathLike[str], names: Sequence[str], weights: Sequence[np.ndarray]) -> None:
    """Writes weights, whole or not at all.

    Args:
      path: The file.
      names: One for each weight.
      weights: The arrays, in the model's order.

    Raises:
      OSError: If it cannot be written.
    """
    arrays = {f"weight_{number}": array for number, array in enumerate(weights)}
    archive = io.BytesIO()
    np.savez(archive, **{_NAMES: np.array(names, np.str_)}, **arrays)
    atomic_files.write_bytes(path, archive.getbuffer())


def load(path: str | os.PathLike[str]) -> tuple[tuple[str, ...], list[np.ndarray]]:
    """Reads a file of :func:`save`.

    Returns:
      The names and the weights.

    Raises:
      ValueError: If the file cannot be read.
    """
    try:
        archive = inputs.archived_arrays(path)
        names = tuple(str(name) for name in archive[_NAMES])
        weights = [archive[f"weight_{number}"] for number in range(len(names))]
    except (OSError, KeyError, TypeError, ValueError):
        raise ValueError(f"{path} is no whole file of a run's final model.") from None
    return names, weights
