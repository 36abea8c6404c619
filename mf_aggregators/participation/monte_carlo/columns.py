"""Compact columns of a strategy matrix, from the matrix or from its products."""

from collections.abc import Callable
from typing import Any

import numpy as np

from mf_aggregators import inputs
from mf_aggregators.kernel import validation
from mf_aggregators.kernel.arrays import FloatArray
from mf_aggregators.kernel.draws_of_clients import LARGEST_ROUNDING, StrategyColumns

# More than 1 and twice what floats err by in a row.
_MOST_OF_A_STEP = 1.5


def of_any_noise(entries: FloatArray) -> StrategyColumns:
    """Returns columns with what roundings move where rows may follow from rows of Z.

    Args:
      entries: (n, b), none of the diagonal zero.
    """
    shares = np.abs(entries / entries[:, :1])
    sums = np.zeros(len(shares))
    for lag in range(shares.shape[1]):
        sums[lag:] += shares[: len(shares) - lag, lag]
    return StrategyColumns(entries, max(LARGEST_ROUNDING, _MOST_OF_A_STEP * float(np.max(sums))))


def columns_of_matrix(strategy_matrix: Any, num_bands: int) -> FloatArray:
    """Returns the compact columns of a strategy matrix.

    Args:
      strategy_matrix: (n, n), C, lower triangular.
      num_bands: b, at least the bands of C, at most n.

    Returns:
      (n, b) float64.

    Raises:
      ValueError: If C is not a square, finite, lower-triangular matrix of at most b bands.
    """
    matrix = inputs.lower_triangular(strategy_matrix, "strategy_matrix")
    num_bands = min(validation.positive_integer(num_bands, "num_bands"), len(matrix))
    below = np.flatnonzero(np.any(np.tril(matrix, -num_bands), axis=0))
    if len(below):
        raise ValueError(
            f"strategy_matrix must have at most {num_bands} bands, found an entry of column "
            f"{below[0]} below them."
        )
    rounds = np.arange(len(matrix))[:, None]
    padded = np.pad(matrix, ((0, num_bands), (0, 0)))
    return np.asarray(padded[rounds + np.arange(num_bands), rounds])


def columns_of_encoder(
    encode: Callable[[FloatArray], FloatArray], num_rounds: int, num_bands: int
) -> FloatArray:
    """Returns the compact columns of a strategy matrix that is known by its products.

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
