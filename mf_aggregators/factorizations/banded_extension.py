r"""Further rows for a banded strategy matrix whose first rows are fixed.

Rows of C that were used do not change. What is free is every entry in a later row: whole columns
from the first new round on, and the lower ends of the last b - 1 columns, which ended with the
plan. New columns get the norm that the old ones have. An old column can only become longer, which
takes of the guarantee; where it stays as it is, no later row of the noise takes anything back of
the noise of its round. Between the two, the squared norm of each of these columns may grow by at
most a share of what it was. A client has at most one participation in b - 1 rounds, so that the
share raises the squared sensitivity of k participations by a k-th of it.

The best share of a few is chosen by the error of a simple matrix, and then L-BFGS runs over all
free entries, for the squared error at that share and at none: new columns are scaled to their norm,
and ends of old ones are r v / sqrt(1 + |v|^2), which no v makes longer than r. Error and slope come
from ``linear_algebra.banded_matrices``, in O(n b^2) operations.
"""

import functools

import numpy as np

from mf_aggregators.factorizations import banded_sensitivity
from mf_aggregators.factorizations.banded_workloads import BandedWorkload
from mf_aggregators.factorizations.convergence import minimise
from mf_aggregators.linear_algebra.banded_matrices import (
    BandedCovariances,
    column_sums,
    spread_columns,
    square_root_bands,
)
from mf_aggregators.participation import Participation
from mf_aggregators.workloads import Workload

# By which share the squared norm of a column that ended with the plan may grow.
_SHARES = (0.0, 0.05, 0.1, 0.2, 0.4, 0.7, 1.0)
_MOST_EVALUATIONS = 200
_LEAST_CHANGE = 1e-9
# In place of the logarithm of an error beyond floats.
_LARGEST_LOG = 1e3


def extended(bands: np.ndarray, workload: Workload, participation: Participation) -> np.ndarray:
    """Returns the bands of a matrix for more rounds whose first rows are given.

    Args:
      bands: (n, b) of the rows that stay, ``bands[i, t] = C[i, i - t]``.
      workload: The workload of the whole, for m > n rounds, which names that number.
      participation: The schema of the whole.

    Returns:
      (m, b), whose first n rows are those that were given.
    """
    prepared = BandedWorkload.of(workload, bands.shape[1])
    rows = _Rows(bands, workload.num_rounds)
    start = rows.start()

    def squared_error(free: np.ndarray, share: float) -> float:
        made = rows.of(free, share)
        error = BandedCovariances(made, prepared.blocks).squared_error
        return error * banded_sensitivity.compute(made, participation).value ** 2

    def log_error(free: np.ndarray, share: float) -> tuple[float, np.ndarray]:
        with np.errstate(all="ignore"):
            covariances = BandedCovariances(rows.of(free, share), prepared.blocks)
            error = covariances.squared_error
            slope = covariances.slope() if np.isfinite(error) else np.full(rows.shape, np.nan)
            slope = rows.by_free(free, share, slope) / error
        if not (0.0 < error < np.inf and np.all(np.isfinite(slope))):
            # The line search takes a shorter step.
            return _LARGEST_LOG, np.zeros(free.shape)
        return float(np.log(error)), slope

    share = min(_SHARES, key=lambda share: squared_error(start, share))
    found = [(start, share)]
    for tried in {0.0, share}:
        result = minimise(
            functools.partial(log_error, share=tried),
            start,
            max_evaluations=_MOST_EVALUATIONS,
            corrections=10,
            least_change=_LEAST_CHANGE,
        )
        found.append((np.asarray(result.x), tried))
    # Longer ends of old columns have made the sensitivity larger as well.
    return rows.of(*min(found, key=lambda each: squared_error(*each)))


class _Rows:
    """The matrix as a function of its free entries."""

    def __init__(self, bands: np.ndarray, num_rounds: int) -> None:
        self._released = bands
        released, num_bands = bands.shape
        self.shape = (num_rounds, num_bands)
        squared_norms = column_sums(np.square(bands))
        # Whole columns of C; the others are shorter where norms are not equal.
        whole = squared_norms[: max(1, released - num_bands + 1)]
        self._norm = float(np.sqrt(np.mean(whole)))
        self._is_free = np.zeros(self.shape, dtype=bool)
        self._is_free[released:] = np.tri(num_rounds, num_bands, dtype=bool)[released:]
        self._is_new = np.arange(num_rounds) >= released
        # What a share of the squared norm is, of old columns.
        self._radii = np.zeros(num_rounds)
        self._radii[:released] = np.sqrt(squared_norms)

    def start(self) -> np.ndarray:
        """The free entries of the Toeplitz square root of the prefix sum."""
        return square_root_bands(*self.shape)[self._is_free]

    def of(self, free: np.ndarray, share: float) -> np.ndarray:
        """Returns the (m, b) bands of the matrix.

        Args:
          free: The free entries, before columns are scaled.
          share: By which the squared norms of old columns may grow.
        """
        entries, scales, _ = self._scaled(free, share)
        bands = entries * spread_columns(scales, self.shape[1])
        bands[: len(self._released)] = self._released
        return bands

    def by_free(self, free: np.ndarray, share: float, slope: np.ndarray) -> np.ndarray:
        """Returns the slope by the free entries, from the (m, b) slope by the matrix."""
        entries, scales, squares = self._scaled(free, share)
        slope = np.where(self._is_free, slope, 0.0)
        along = column_sums(entries * slope)
        # Of 1 / |v|, and of 1 / sqrt(1 + |v|^2).
        divisors = np.where(self._is_new, squares, 1.0 + squares)
        inner = slope - entries * spread_columns(along / divisors, self.shape[1])
        return (inner * spread_columns(scales, self.shape[1]))[self._is_free]

    def _scaled(self, free: np.ndarray, share: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The entries, what multiplies the columns, and the squared norms of the entries."""
        entries = np.zeros(self.shape)
        entries[self._is_free] = free
        squares = column_sums(np.square(entries))
        new = self._norm / np.sqrt(np.where(self._is_new, squares, 1.0))
        old = np.sqrt(share) * self._radii / np.sqrt(1.0 + squares)
        return entries, np.where(self._is_new, new, old), squares
