"""The columns of a banded strategy matrix, which accounting by likelihood ratios needs.

Column i of a lower-triangular C of b bands is zero outside of rows i to i + b - 1. It is held as
row i of an array of n rows and b columns: ``columns[i, k] = C[i + k, i]``.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from mf_aggregators import validation


def of_matrix(strategy_matrix: Any, num_bands: int) -> np.ndarray:
    """Returns the columns of a strategy matrix.

    Args:
      strategy_matrix: (n, n), C, lower triangular.
      num_bands: b, at least the bands of C, at most n.

    Returns:
      (n, b) float64.

    Raises:
      ValueError: If C is not a square, finite, lower-triangular matrix of at most b bands.
    """
    matrix = validation.lower_triangular(strategy_matrix, "strategy_matrix")
    num_rounds = matrix.shape[0]
    num_bands = min(validation.positive_integer(num_bands, "num_bands"), num_rounds)
    columns = np.zeros((num_rounds, num_bands))
    for i in range(num_rounds):
        height = min(num_bands, num_rounds - i)
        columns[i, :height] = matrix[i : i + height, i]
        if np.any(matrix[i + height :, i]):
            raise ValueError(
                f"strategy_matrix must have at most {num_bands} bands, found an entry of column "
                f"{i} below them."
            )
    return columns


def of_encoder(
    encode: Callable[[np.ndarray], np.ndarray], num_rounds: int, num_bands: int
) -> np.ndarray:
    """Returns the columns of a strategy matrix that is known by its products.

    Args:
      encode: Takes an (n, b + 1) array x and returns C x. C is lower triangular and has at most
        b bands, which the caller knows; here it is only made likely.
      num_rounds: n.
      num_bands: b, 1 to n.

    Returns:
      (n, b) float64.

    Raises:
      ValueError: If a product shows more bands, or entries that are not finite.
    """
    rounds = np.arange(num_rounds)
    # Columns that are b apart have no rows in common, so that one product shows all of them.
    # Another product, with random numbers, tells whether there is anything beyond.
    probes = np.zeros((num_rounds, num_bands + 1))
    probes[rounds, rounds % num_bands] = 1.0
    probes[:, num_bands] = np.random.default_rng(0).uniform(1.0, 2.0, num_rounds)
    products = np.asarray(encode(probes), dtype=np.float64)
    if products.shape != probes.shape or not np.all(np.isfinite(products)):
        raise ValueError("the strategy matrix must be square, with finite entries.")
    rows = rounds[:, None] + np.arange(num_bands)
    inside = rows < num_rounds
    columns = np.where(
        inside, products[np.minimum(rows, num_rounds - 1), (rounds % num_bands)[:, None]], 0.0
    )
    expected = np.zeros(num_rounds)
    np.add.at(expected, rows[inside], (columns * probes[:, num_bands, None])[inside])
    scale = np.max(np.abs(products), initial=0.0)
    if np.max(np.abs(expected - products[:, num_bands]), initial=0.0) > 1e-9 * scale:
        raise ValueError(
            f"the strategy matrix has more than {num_bands} bands, or is not lower triangular."
        )
    return columns


def leading(columns: np.ndarray, num_rounds: int) -> np.ndarray:
    """Returns the columns of the leading rows and columns of a matrix.

    Args:
      columns: (n, b), of C.
      num_rounds: How many rows and columns are left, 1 to n.
    """
    num_bands = min(columns.shape[1], num_rounds)
    rows = np.arange(num_rounds)[:, None] + np.arange(num_bands)
    return np.where(rows < num_rounds, columns[:num_rounds, :num_bands], 0.0)


def normalised(columns: np.ndarray) -> np.ndarray:
    """Returns the columns of |C| over the largest norm of a column.

    Args:
      columns: (n, b), of C.

    Raises:
      ValueError: If all columns are zero, or an entry is not finite.
    """
    absolute = np.abs(columns)
    largest_entry = float(np.max(absolute))
    if not 0.0 < largest_entry < np.inf:
        raise ValueError("the strategy matrix must not be zero, and its entries must be finite.")
    # By a power of two, which rounds nothing: squares of the entries might be beyond floats.
    absolute = np.ldexp(absolute, -int(np.frexp(largest_entry)[1]))
    return np.asarray(absolute / np.sqrt(np.max(np.sum(absolute**2, axis=1))))


def gram_bands(columns: np.ndarray) -> np.ndarray:
    """Returns inner products of columns: ``bands[i, t]`` is that of columns i and i - t.

    Args:
      columns: (n, b).

    Returns:
      (n, b), zero where i < t.
    """
    num_rounds, num_bands = columns.shape
    bands = np.zeros((num_rounds, num_bands))
    for t in range(num_bands):
        later, earlier = columns[t:, : num_bands - t], columns[: num_rounds - t, t:]
        bands[t:, t] = np.einsum("ik,ik->i", later, earlier)
    return bands


class BandedProducts:
    """Products with C and with its transpose, as dense products of blocks.

    Args:
      columns: (n, b), of C.
    """

    def __init__(self, columns: np.ndarray) -> None:
        self._num_rounds, self._num_bands = columns.shape
        self._blocks: list[tuple[slice, slice, np.ndarray]] = []
        size = max(32, self._num_bands)
        for start in range(0, self._num_rounds, size):
            stop = min(start + size, self._num_rounds)
            last = min(stop + self._num_bands - 1, self._num_rounds)
            block = np.zeros((last - start, stop - start))
            for i in range(start, stop):
                height = min(self._num_bands, self._num_rounds - i)
                block[i - start : i - start + height, i - start] = columns[i, :height]
            self._blocks.append((slice(start, stop), slice(start, last), block))

    def times(self, x: np.ndarray) -> np.ndarray:
        """Returns C x.

        Args:
          x: (n, m).
        """
        product = np.zeros_like(x)
        for inner, outer, block in self._blocks:
            product[outer] += block @ x[inner]
        return product

    def transposed_times(self, y: np.ndarray) -> np.ndarray:
        """Returns C^T y.

        Args:
          y: (n, m).
        """
        product = np.empty_like(y)
        for inner, outer, block in self._blocks:
            np.matmul(block.T, y[outer], out=product[inner])
        return product
