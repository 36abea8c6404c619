"""Matrices as figures show them: each entry as one of 255 levels, in few bytes of text."""

import base64
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

_MOST = 127


def encode(matrix: np.ndarray) -> dict[str, Any]:
    """Returns a matrix by levels of its largest magnitude.

    Args:
      matrix: (rows, columns) finite floats.

    Returns:
      What :func:`decode` takes, JSON-able; entries are off by at most 1/254 of the largest.
    """
    largest = float(np.max(np.abs(matrix))) or 1.0
    levels = np.round(matrix / largest * _MOST).astype(np.int8)
    text = base64.b64encode(zlib.compress(levels.tobytes(), 9)).decode("ascii")
    return {"shape": list(matrix.shape), "largest": largest, "levels": text}


def decode(encoded: Mapping[str, Any]) -> np.ndarray:
    """Returns the matrix of what :func:`encode` returned.

    Args:
      encoded: The shape, the largest magnitude, and levels of one byte, deflated, in base64.

    Returns:
      (rows, columns) float64.
    """
    levels = np.frombuffer(zlib.decompress(base64.b64decode(encoded["levels"])), np.int8)
    matrix: np.ndarray = levels.reshape(encoded["shape"]) * (encoded["largest"] / _MOST)
    return matrix
