"""Noise rows of all rounds in real arithmetic, for inspection and for errors of training.

Runs draw integer rows instead (``kernel.integers``).
"""

import numpy as np
import scipy.linalg

from mf_aggregators.kernel import noising_matrices
from mf_aggregators.kernel.numbers import FloatArray
from mf_aggregators.kernel.rows import BandedNoise, DenseNoise, NoiseRecursion
from mf_aggregators.linear_algebra.banded_matrices import matrix_from_bands


def apply(recursion: NoiseRecursion, z: FloatArray) -> FloatArray:
    """Returns C^-1 Z for a whole Z of shape (n, ...), row by row, in real arithmetic.

    It is computed in float64 and has the dtype of Z, or float32 for integers.

    Args:
      recursion: The noising matrix.
      z: Z, of at most as many rows as there are rounds.

    Raises:
      ValueError: If there are more rows of Z than rounds.
    """
    z = np.asarray(z)
    if len(z):
        recursion.check_has_round(len(z) - 1)
    rows = np.empty(z.shape, np.result_type(z.dtype, np.float32))
    normalised, diagonal = recursion.normalised, recursion.diagonal
    history = recursion.initial_state(z.shape[1:]).history
    for i in range(len(z)):
        row_of_z = np.array(z[i], np.float64)
        row = row_of_z + normalised.earlier(i, history)
        history = normalised.following(i, history, row_of_z, row)
        rows[i] = diagonal[i] * row
    return rows


def dense(recursion: NoiseRecursion) -> FloatArray:
    """Returns C^-1 as an (n, n) float64 array.

    Args:
      recursion: The noising matrix.
    """
    if isinstance(recursion, DenseNoise):
        return recursion.inverse
    identity = np.eye(recursion.num_rounds)
    if isinstance(recursion, BandedNoise):
        width = min(recursion.bands.shape[1], len(identity))
        bands = np.broadcast_to(recursion.bands[:, :width], (len(identity), width))
        scales = 1.0 if recursion.row_scales is None else recursion.row_scales[:, np.newaxis]
        return np.asarray(
            scales
            * scipy.linalg.solve_triangular(
                matrix_from_bands(bands), identity, lower=True, check_finite=False
            )
        )
    return np.tril(apply(recursion, identity))


def row_norms(recursion: NoiseRecursion) -> FloatArray:
    """Returns the (n,) L2 norms of the rows of C^-1.

    Args:
      recursion: The noising matrix.
    """
    return np.asarray(np.abs(recursion.diagonal) * noising_matrices.row_norms(recursion.normalised))
