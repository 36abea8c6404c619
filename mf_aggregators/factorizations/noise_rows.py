"""Noise rows C^-1 Z of all rounds in real arithmetic, for inspection and for errors of training.

Runs draw integer rows instead (``kernel.integers``).
"""

import numpy as np

from mf_aggregators.kernel.numbers import FloatArray
from mf_aggregators.kernel.rows import NoiseRecursion, WindowNoise

# The number of rows that are computed together.
_ROWS_AT_A_TIME = 64


def apply(recursion: NoiseRecursion, z: FloatArray) -> FloatArray:
    """Returns the noise C^-1 Z for a whole Z of shape (n, ...), in real arithmetic.

    The noise is computed in float64 and has the dtype of Z, or float32 if Z has integers.

    Args:
      recursion: The noising matrix.
      z: Z, of at most as many rows as there are rounds.

    Raises:
      ValueError: If there are more rows of Z than rounds.
    """
    z = np.asarray(z)
    if len(z) > recursion.num_rounds:
        raise ValueError(
            f"the mechanism has noise for {recursion.num_rounds} rounds, and {len(z)} rows of Z "
            "were given: use a factorization for more rounds."
        )
    unit, wide = recursion.normalised, np.asarray(z, np.float64)
    rows, vectors = np.empty(z.shape), np.zeros((unit.num_state_vectors, *z.shape[1:]))
    for start in range(0, len(z), _ROWS_AT_A_TIME):
        end = min(start + _ROWS_AT_A_TIME, len(z))
        known = [rows[max(0, start - unit.num_earlier_rows) : start], vectors]
        if unit.draws_earlier_rows_of_z:
            known = [vectors, wide[unit.first_row_of_z(start) : start]]
        block = np.concatenate([*known, wide[start:end]])
        made = np.tensordot(unit.linear_map(start, end), block, axes=1)
        rows[start:end], vectors = made[: end - start], made[end - start :]
    scales = recursion.diagonal[: len(z)].reshape(-1, *(1,) * (z.ndim - 1))
    return np.asarray(scales * rows, np.result_type(z.dtype, np.float32))


def dense(recursion: NoiseRecursion) -> FloatArray:
    """Returns the dense noising matrix C^-1 as an (n, n) float64 array.

    Args:
      recursion: The noising matrix.
    """
    rounds, unit = recursion.num_rounds, recursion.normalised
    rows = unit.linear_map(0, rounds)[:rounds, unit.num_state_vectors :]
    return np.asarray(recursion.diagonal[:, np.newaxis] * np.tril(rows))


def dense_rows(inverse: FloatArray) -> WindowNoise:
    """Returns the noising matrix of a dense C: each row combines all earlier rows of Z.

    Args:
      inverse: C^-1, (n, n) float64, lower triangular; entries above the diagonal are ignored.

    Raises:
      ValueError: If the array is not square, or an entry is not finite.
    """
    matrix = np.array(inverse, np.float64)
    num_rounds = len(matrix)
    if matrix.shape != (num_rounds, num_rounds):
        raise ValueError(f"the inverse of C must be square, found shape {matrix.shape}.")
    lags = np.subtract.outer(np.arange(num_rounds), np.arange(num_rounds))
    window = np.take_along_axis(matrix, np.maximum(lags, 0), axis=1)
    none = np.zeros((num_rounds, 0))
    return WindowNoise(num_rounds, window, none, none)
