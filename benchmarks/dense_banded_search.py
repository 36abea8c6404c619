"""The search for the best banded matrix of prefix sums as version 0.5.0 had it: a baseline.

It works with dense matrices: an evaluation takes O(n^2 b) operations, and a certificate O(n^3).
"""

import contextlib
import dataclasses

import numpy as np
import scipy.linalg
import scipy.optimize

from mf_aggregators.linear_algebra.banded_matrices import (
    column_sums,
    matrix_from_bands,
    spread_columns,
)

# Rows that one matrix product or triangular solve treats together.
_BLOCK = 128
# Evaluations between two looks at the certificate.
_EVALUATIONS_BETWEEN_CERTIFICATES = 25
_SAFE_SHARE = 0.9
_MOST_HALVINGS = 10


class _ConvergedError(Exception):
    """The gap is reached."""


@dataclasses.dataclass
class DenseBandedSearch:
    """L-BFGS over the entries of C, columns of norm one.

    Attributes:
      num_bands: b.
      relative_gap: The certified gap at which the search ends.
      workload: A, (n, n).
      evaluations: How many there were.
      gap: The estimated gap at the end.
      best_error: The least squared error.
    """

    num_bands: int
    relative_gap: float
    workload: np.ndarray
    evaluations: int = 0
    gap: float = np.inf
    best_error: float = np.inf

    def run(self, start: np.ndarray) -> None:
        """Searches from (n, b) bands."""
        in_band = np.tri(len(start), self.num_bands, dtype=bool)
        best = start

        def log_error(entries: np.ndarray) -> tuple[float, np.ndarray]:
            nonlocal best
            bands = np.zeros(start.shape)
            bands[in_band] = entries
            squared_norms = column_sums(np.square(bands))
            norms = spread_columns(np.sqrt(squared_norms), self.num_bands)
            norms[~in_band] = 1.0
            scaled = bands / norms
            strategy = matrix_from_bands(scaled)
            decoder_t = _solve_transposed(strategy, self.num_bands, self.workload.T)
            error = float(np.sum(np.square(decoder_t)))
            weighted_t = _solve(strategy, self.num_bands, decoder_t)
            slope = -2.0 * _band_of_product(decoder_t, weighted_t, self.num_bands)
            along = column_sums(slope * scaled)
            slope = slope / norms - bands * spread_columns(along / squared_norms, self.num_bands)
            self.evaluations += 1
            if error < self.best_error:
                self.best_error, best = error, scaled
            if self.evaluations % _EVALUATIONS_BETWEEN_CERTIFICATES == 0:
                self.gap = min(self.gap, self.best_error / self._bound(best) - 1.0)
                if self.gap <= _SAFE_SHARE * self.relative_gap:
                    raise _ConvergedError
            return float(np.log(error)), slope[in_band] / error

        with contextlib.suppress(_ConvergedError):
            scipy.optimize.minimize(
                log_error,
                start[in_band],
                jac=True,
                method="L-BFGS-B",
                options={"maxcor": 10, "maxiter": 1000, "maxfun": 1000, "ftol": 1e-15, "gtol": 0.0},
            )

    def _bound(self, bands: np.ndarray) -> float:
        """The dual of the problem at a matrix: tr((A V A^T)^1/2)^2 / tr(V)."""
        strategy = matrix_from_bands(bands)
        decoder_t = _solve_transposed(strategy, self.num_bands, self.workload.T)
        weighted_t = _solve(strategy, self.num_bands, decoder_t)
        dual = weighted_t @ weighted_t.T
        diagonal = np.diagonal(dual).copy()
        within_band = np.tri(len(dual), k=self.num_bands - 1, dtype=bool)
        dual[within_band & within_band.T] = 0.0
        factor = np.diag(np.sqrt(diagonal))
        for _ in range(_MOST_HALVINGS):
            np.fill_diagonal(dual, diagonal)
            try:
                factor = scipy.linalg.cholesky(dual, lower=True, check_finite=False)
                break
            except np.linalg.LinAlgError:
                dual *= 0.5
        product = self.workload @ factor
        spectrum = np.linalg.eigvalsh(product.T @ product)
        root_sum = float(np.sum(np.sqrt(np.maximum(spectrum, 0.0))))
        return root_sum**2 / float(np.sum(diagonal))


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
