"""Matrices by their bands: bands[i, t] = M[i, i - t], and what searches compute with them."""

import numpy as np
import scipy.linalg

from mf_aggregators import power_series

# Rows that one matrix product or triangular solve treats together.
_BLOCK = 128


def square_root_bands(num_rounds: int, num_bands: int) -> np.ndarray:
    """Returns the bands of the Toeplitz square root of the prefix sum.

    Args:
      num_rounds: n.
      num_bands: b.
    """
    coefficients = power_series.square_root_coefficients(num_bands)
    return np.where(np.tri(num_rounds, num_bands, dtype=bool), coefficients, 0.0)


def column_sums(bands: np.ndarray) -> np.ndarray:
    """Returns the (n,) sums over the rows of a matrix, for each column.

    Args:
      bands: (n, b) of the matrix.
    """
    num_rounds, num_bands = bands.shape
    sums = np.zeros(num_rounds)
    for t in range(num_bands):
        sums[: num_rounds - t] += bands[t:, t]
    return sums


def spread_columns(values: np.ndarray, num_bands: int) -> np.ndarray:
    """Returns the bands of the matrix whose column j holds ``values[j]`` within the band.

    Args:
      values: (n,).
      num_bands: b.
    """
    bands = np.zeros((values.shape[0], num_bands))
    for t in range(num_bands):
        bands[t:, t] = values[: values.shape[0] - t]
    return bands


def divide_columns(bands: np.ndarray, divisors: np.ndarray) -> np.ndarray:
    """Returns the bands of a matrix with its columns divided.

    Args:
      bands: (n, b) of the matrix.
      divisors: (n,) of its columns.
    """
    return bands * spread_columns(1.0 / divisors, bands.shape[1])


def solve_transposed(strategy: np.ndarray, num_bands: int, upper: np.ndarray) -> np.ndarray:
    """Returns C^-T M for a banded lower-triangular C and an upper-triangular M.

    Args:
      strategy: (n, n), C.
      num_bands: b.
      upper: (n, n), M.
    """
    num_rounds = strategy.shape[0]
    solution = np.zeros_like(upper, order="C")
    for start in range((num_rounds - 1) // _BLOCK * _BLOCK, -1, -_BLOCK):
        stop = min(start + _BLOCK, num_rounds)
        reach = min(stop + num_bands - 1, num_rounds)
        # Row i of the solution, like row i of M, is zero before column i.
        right_side = upper[start:stop, start:].copy()
        right_side[:, stop - start :] -= (
            strategy[stop:reach, start:stop].T @ solution[stop:reach, stop:]
        )
        solution[start:stop, start:] = scipy.linalg.solve_triangular(
            strategy[start:stop, start:stop],
            right_side,
            lower=True,
            trans="T",
            check_finite=False,
        )
    return solution


def solve(strategy: np.ndarray, num_bands: int, right_side: np.ndarray) -> np.ndarray:
    """Returns C^-1 M for a banded lower-triangular C.

    Args:
      strategy: (n, n), C.
      num_bands: b.
      right_side: (n, m), M.
    """
    num_rounds = strategy.shape[0]
    solution = np.empty_like(right_side)
    for start in range(0, num_rounds, _BLOCK):
        stop = min(start + _BLOCK, num_rounds)
        reach = max(0, start - num_bands + 1)
        block = right_side[start:stop] - strategy[start:stop, reach:start] @ solution[reach:start]
        solution[start:stop] = scipy.linalg.solve_triangular(
            strategy[start:stop, start:stop], block, lower=True, check_finite=False
        )
    return solution


def band_of_product(left: np.ndarray, right: np.ndarray, num_bands: int) -> np.ndarray:
    """Returns the bands of L R^T on and below the diagonal, for an upper-triangular L.

    Args:
      left: (n, n), L.
      right: (n, n), R.
      num_bands: b.
    """
    num_rounds = left.shape[0]
    bands = np.zeros((num_rounds, num_bands))
    for start in range(0, num_rounds, _BLOCK):
        stop = min(start + _BLOCK, num_rounds)
        first = max(0, start - num_bands + 1)
        block = left[start:stop, start:] @ right[first:stop, start:].T
        rows = np.arange(start, stop)[:, np.newaxis]
        lags = np.arange(num_bands)
        columns = rows - lags
        inside = columns >= 0
        taken = block[rows - start, np.maximum(columns, first) - first]
        bands[start:stop] = np.where(inside, taken, 0.0)
    return bands
