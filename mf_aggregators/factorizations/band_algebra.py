"""Matrices by their bands: bands[i, t] = M[i, i - t], and what searches compute with them."""

import numpy as np

from mf_aggregators.linear_algebra import power_series


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
