"""The search for the best banded strategy matrix as version 0.5.0 had it, with dense matrices.

A baseline: each evaluation takes O(n^2 b) operations, and each certificate O(n^3).
"""

import numpy as np
import scipy.linalg
import tqdm

from mf_aggregators.factorizations import band_algebra
from mf_aggregators.factorizations.band_constraints import ColumnConstraint
from mf_aggregators.factorizations.convergence import Converged, minimise
from mf_aggregators.noise import recursions
from mf_aggregators.nuclear_norm import nuclear_norm_from_below

# Rows that one matrix product or triangular solve treats together.
_BLOCK = 128
# Evaluations between two looks at the certificate, which costs about ten of them.
_EVALUATIONS_BETWEEN_CERTIFICATES = 25
# The estimated gap at which a search ends, relative to the gap that is to be certified.
_SAFE_SHARE = 0.9
# How often entries of a dual that is not positive definite are halved.
_MOST_HALVINGS = 10


class DenseBandedSearch:
    """L-BFGS over the entries of C, with the best matrix and bound so far."""

    def __init__(
        self,
        workload: np.ndarray,
        constraint: ColumnConstraint,
        relative_gap: float,
        max_evaluations: int,
        show_progress: bool,
    ) -> None:
        """Begins without a matrix.

        Args:
          workload: (n, n) float64.
          constraint: What the columns have to keep, and the number of bands.
          relative_gap: The relative gap at which the search ends.
          max_evaluations: The number of evaluations after which the search ends anyway.
          show_progress: Whether to show a bar on standard error.
        """
        num_bands = constraint.num_bands
        self._workload = workload
        self._constraint = constraint
        self._sharpness = constraint.sharpness[0]
        self._num_bands = num_bands
        self._relative_gap = relative_gap
        self._max_evaluations = max_evaluations
        self.progress = tqdm.tqdm(
            desc=f"{num_bands} bands", unit=" evaluations", disable=not show_progress
        )
        self.evaluations = 0
        self._best_error = np.inf
        self.best_bands = np.empty(0)
        self._estimated_bound = 0.0
        self._dual = workload, 1.0
        self._certified_error = np.inf
        in_band = np.tri(workload.shape[0], num_bands, dtype=bool)
        # bands[i, t] exists for t <= i: the first rows are shorter than the band.
        self._in_band = in_band

    def run(self, start: np.ndarray) -> None:
        """Searches until no progress is made.

        Args:
          start: (n, b) bands.

        Raises:
          Converged: When the target is certified.
        """
        entries = start[self._in_band]
        for sharpness in self._constraint.sharpness:
            self._sharpness = sharpness
            remaining = self._max_evaluations - self.evaluations
            if remaining <= 0:
                return
            entries = minimise(
                self._log_error,
                entries,
                max_evaluations=remaining,
                corrections=10,
                least_change=1e-15,
            ).x

    def consider(self, bands: np.ndarray) -> None:
        """Keeps a matrix as it is, scaled to sensitivity one, if its error is the best.

        Args:
          bands: (n, b) of the matrix.
        """
        squared = self._constraint.squared_sensitivity(band_algebra.column_sums(np.square(bands)))
        strategy = recursions.matrix_from_bands(bands)
        decoder_t = _solve_transposed(strategy, self._num_bands, self._workload.T)
        self._keep(bands, squared, float(np.sum(np.square(decoder_t))))

    def _keep(self, bands: np.ndarray, squared_sensitivity: float, error: float) -> None:
        if error * squared_sensitivity < self._best_error:
            self._best_error = error * squared_sensitivity
            self.best_bands = bands / np.sqrt(squared_sensitivity)

    def certified_gap(self) -> float:
        """Returns the relative gap of the best matrix, with a lower bound that is certain."""
        self._estimated_gap()
        product, total = self._dual
        root_sum = nuclear_norm_from_below(product)
        return max(self._best_error * total / root_sum**2 - 1.0, 0.0)

    def _estimated_gap(self) -> float:
        if self._certified_error > self._best_error:
            self._certify()
        return self._best_error / self._estimated_bound - 1.0

    def _log_error(self, entries: np.ndarray) -> tuple[float, np.ndarray]:
        bands = np.zeros(self._in_band.shape)
        bands[self._in_band] = entries
        squared_norms = band_algebra.column_sums(np.square(bands))
        norms = np.sqrt(self._constraint.scales(squared_norms, self._sharpness))
        scaled = band_algebra.divide_columns(bands, norms)
        strategy = recursions.matrix_from_bands(scaled)
        # B = A C^-1 and W = A X^-1 = B C^-T; the derivative of ||B||^2 by C is
        # -2 B^T B C^-T = -2 B^T W, of which the entries within the band are needed.
        decoder_t = _solve_transposed(strategy, self._num_bands, self._workload.T)
        error = float(np.sum(np.square(decoder_t)))
        weighted_t = _solve(strategy, self._num_bands, decoder_t)
        slope = -2.0 * _band_of_product(decoder_t, weighted_t, self._num_bands)
        # The chain rule through the scaling of columns.
        along = band_algebra.column_sums(slope * scaled)
        by_norms = self._constraint.by_squared_norms(along, squared_norms, self._sharpness)
        slope = band_algebra.divide_columns(slope, norms)
        slope -= bands * band_algebra.spread_columns(by_norms, self._num_bands)

        self.evaluations += 1
        self.progress.update()
        # The squared sensitivity is at most one, and one where the scales are exact.
        squared = self._constraint.squared_sensitivity(band_algebra.column_sums(np.square(scaled)))
        self._keep(scaled, squared, error)
        if self.evaluations % _EVALUATIONS_BETWEEN_CERTIFICATES == 0:
            gap = self._estimated_gap()
            self.progress.set_postfix_str(f"relative gap {gap:.1e}")
            if gap <= _SAFE_SHARE * self._relative_gap:
                raise Converged
        return float(np.log(error)), slope[self._in_band] / error

    def _certify(self) -> None:
        """Raises the lower bound by the dual of the problem at the best matrix.

        With equal norms: for symmetric positive semi-definite V with V[i, j] = 0 for
        0 < |i - j| < b and any feasible X, tr(V X) = tr(V), so that tr(A^T A X^-1) =
        tr(A^T A X^-1) + tr(V X) - tr(V) >= 2 tr((A V A^T)^1/2) - tr(V), the matrix form of
        2 sqrt(a v) <= a / x + v x; the best multiple of V gives
        tr((A V A^T)^1/2)^2 / tr(V). At the optimum V is X^-1 A^T A X^-1, whose entries
        within the band vanish because the gradient does.
        With pattern weights w, V[i, i] the sum of those of the patterns that hold i,
        tr(V X) is at most the sum of w, which takes the place of tr(V).
        """
        strategy = recursions.matrix_from_bands(self.best_bands)
        decoder_t = _solve_transposed(strategy, self._num_bands, self._workload.T)
        weighted_t = _solve(strategy, self._num_bands, decoder_t)
        dual = weighted_t @ weighted_t.T
        diagonal, total = self._constraint.dual_diagonal(np.diagonal(dual).copy())
        num_rounds = dual.shape[0]
        within_band = np.tri(num_rounds, k=self._num_bands - 1, dtype=bool)
        within_band &= within_band.T
        dual[within_band] = 0.0
        factor = np.diag(np.sqrt(diagonal))
        for _ in range(_MOST_HALVINGS):
            np.fill_diagonal(dual, diagonal)
            try:
                factor = scipy.linalg.cholesky(dual, lower=True, check_finite=False)
                break
            except np.linalg.LinAlgError:
                dual *= 0.5
        product = self._workload @ factor
        # Roots of eigenvalues are cheaper than singular values, and good enough to go on.
        spectrum = np.linalg.eigvalsh(product.T @ product)
        estimate = float(np.sum(np.sqrt(np.maximum(spectrum, 0.0)))) ** 2 / total
        if estimate > self._estimated_bound:
            self._estimated_bound, self._dual = estimate, (product, total)
        self._certified_error = self._best_error


def _solve_transposed(strategy: np.ndarray, num_bands: int, upper: np.ndarray) -> np.ndarray:
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


def _solve(strategy: np.ndarray, num_bands: int, right_side: np.ndarray) -> np.ndarray:
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


def _band_of_product(left: np.ndarray, right: np.ndarray, num_bands: int) -> np.ndarray:
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
