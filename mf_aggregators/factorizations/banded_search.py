"""The search for the best banded strategy matrix, with its certificate, in O(n b^2) operations.

L-BFGS runs over the entries of C before its columns are scaled to keep the constraint. Error and
slope come from ``linear_algebra.banded_matrices``. Its lower bound is the dual of the
problem. With equal norms: for symmetric positive semi-definite V with V[i, j] = 0 for
0 < |i - j| < b and any feasible X, tr(V X) = tr(V), so that tr(A^T A X^-1) = tr(A^T A X^-1) +
tr(V X) - tr(V) >= 2 tr((A V A^T)^1/2) - tr(V), the matrix form of 2 sqrt(a v) <= a / x + v x; the
best multiple of V gives tr((A V A^T)^1/2)^2 / tr(V). At the optimum V is X^-1 A^T A X^-1, whose
entries within the band vanish because the gradient does. With pattern weights w, V[i, i] the sum
of those of the patterns that hold i, tr(V X) is at most the sum of w, which takes the place of
tr(V). :mod:`mf_aggregators.factorizations.band_certificate` bounds the trace from bands alone.
"""

import numpy as np

from mf_aggregators.factorizations import band_certificate
from mf_aggregators.factorizations.band_constraints import ColumnConstraint, EqualNorms
from mf_aggregators.factorizations.banded_workloads import BandedWorkload
from mf_aggregators.factorizations.convergence import Converged, minimise
from mf_aggregators.linear_algebra.banded_matrices import (
    BandedCovariances,
    column_sums,
    divide_columns,
    spread_columns,
)
from mf_aggregators.progress_bars import ProgressBar

# Evaluations before the first look at the certificate, which costs about five of them, and the
# fewest and the most between two looks.
_FIRST_CERTIFICATE = 50
_FEWEST_BETWEEN_CERTIFICATES, _MOST_BETWEEN_CERTIFICATES = 10, 25
# The gap at which a search ends, relative to the gap that is to be certified.
_SAFE_SHARE = 0.9
# Powers of the weights of a row and of a column, and of a lag, that an entry's variable is scaled
# by: those that took the fewest steps of many tried. For equal norms and prefix sums they take a
# quarter fewer than columns alone, at (rounds, bands) = (1026, 171), (2052, 64), (4096, 32) and
# (10,000, 16); with momentum or norms that differ they take more.
_POWERS, _POWERS_FOR_PREFIX_SUMS = (0.0, -0.375, 0.0), (-0.6, 0.2, 0.1)
# Least weight of a round, relative to the largest, in the scales of the variables.
_LEAST_WEIGHT = 1e-4
# Of entries of C: by so much they move for an estimate of the curvature.
_SMALL_STEP = 1e-5
# The length of the first step, if the error is not convex along it, beside that of C.
_CAUTIOUS_STEP = 1e-2
# In place of the logarithm of an error beyond floats.
_LARGEST_LOG = 1e3


class BandedSearch:
    """L-BFGS over the entries of C, with the best matrix and bound so far."""

    def __init__(
        self,
        workload: BandedWorkload,
        constraint: ColumnConstraint,
        relative_gap: float,
        max_evaluations: int,
        show_progress: bool,
    ) -> None:
        """Begins without a matrix.

        Args:
          workload: A, in blocks for matrices of as many bands as the constraint has.
          constraint: What the columns have to keep, and the number of bands.
          relative_gap: The relative gap at which the search ends.
          max_evaluations: The number of evaluations after which the search ends anyway.
          show_progress: Whether to show a bar on standard error.
        """
        self._workload = workload
        self._constraint = constraint
        self._sharpness = constraint.sharpness[0]
        self._num_bands = constraint.num_bands
        self._relative_gap = relative_gap
        self._max_evaluations = max_evaluations
        self.progress = ProgressBar(
            desc=f"{self._num_bands} bands", unit=" evaluations", disable=not show_progress
        )
        self.evaluations = 0
        self._best_error = np.inf
        self.best_bands = np.empty(0)
        self._bound = 0.0
        self._certified_error = np.inf
        # The gap at the last look at the certificate, and when that was and the next one is.
        self._gap, self._looked_at, self._next_certificate = np.inf, 0, _FIRST_CERTIFICATE

    def run(self, start: np.ndarray) -> None:
        """Searches until no progress is made.

        Args:
          start: (n, b) bands.

        Raises:
          Converged: When the target is certified.
        """
        bands = start
        for sharpness in self._constraint.sharpness:
            self._sharpness = sharpness
            remaining = self._max_evaluations - self.evaluations
            if remaining <= 0:
                return
            bands = self._descend(bands, remaining)

    def consider(self, bands: np.ndarray) -> None:
        """Keeps a matrix as it is, scaled to sensitivity one, if its error is the best.

        Args:
          bands: (n, b) of the matrix.
        """
        squared = self._constraint.squared_sensitivity(column_sums(np.square(bands)))
        error = BandedCovariances(bands, self._workload.blocks).squared_error
        self._keep(bands, squared, error)

    def _keep(self, bands: np.ndarray, squared_sensitivity: float, error: float) -> None:
        if error * squared_sensitivity < self._best_error:
            self._best_error = error * squared_sensitivity
            self.best_bands = bands / np.sqrt(squared_sensitivity)

    def certified_gap(self) -> float:
        """Returns the relative gap of the best matrix; infinite if nothing is certified."""
        if self._certified_error > self._best_error:
            bound = band_certificate.lower_bound(self.best_bands, self._workload, self._constraint)
            self._bound = max(self._bound, bound)
            self._certified_error = self._best_error
        if self._bound <= 0.0:
            return float(np.inf)
        return max(self._best_error / self._bound - 1.0, 0.0)

    def _descend(self, bands: np.ndarray, max_evaluations: int) -> np.ndarray:
        """Minimises from some bands on, and returns where that ended.

        Entries matter more the more their round does for the error, by the diagonal of the dual:
        in variables that are larger by a power of it, the search takes fewer steps. The optimiser's
        first step has length one, and is made the one that the curvature along the gradient
        suggests.
        """
        in_band = np.tri(len(bands), self._num_bands, dtype=bool)
        _, slope, weights = self._log_error(bands)
        weights = np.maximum(weights, _LEAST_WEIGHT * np.max(weights))
        is_prefix_sum = self._workload.inverse_bands.shape[1] == 2
        has_equal_norms = isinstance(self._constraint, EqualNorms)
        of_rows, of_columns, of_lags = (
            _POWERS_FOR_PREFIX_SUMS if is_prefix_sum and has_equal_norms else _POWERS
        )
        scales = spread_columns(weights**of_columns, self._num_bands)
        scales *= np.outer(weights**of_rows, np.arange(1.0, self._num_bands + 1.0) ** of_lags)
        direction = slope * scales
        length = float(np.linalg.norm(direction))
        if not length > 0.0:
            return bands
        move = direction * scales
        move *= _SMALL_STEP * np.max(np.abs(bands)) / np.max(np.abs(move))
        _, moved, _ = self._log_error(bands - move)
        share = float(np.max(np.abs(move)) / np.max(np.abs(direction * scales)))
        curvature = float(np.vdot(direction, direction - moved * scales)) / (share * length**2)
        step = length / curvature if curvature > 0.0 else np.inf
        largest = float(np.linalg.norm(bands[in_band] / scales[in_band]))
        step = step if step <= largest else _CAUTIOUS_STEP * largest
        scales = scales * step

        def log_error(variables: np.ndarray) -> tuple[float, np.ndarray]:
            entries = np.zeros(bands.shape)
            entries[in_band] = variables
            entries *= scales
            value, slope, _ = self._log_error(entries)
            self._look_at_certificate()
            return value, (slope * scales)[in_band]

        found = minimise(
            log_error,
            bands[in_band] / scales[in_band],
            max_evaluations=max_evaluations,
            corrections=10,
            least_change=1e-15,
        ).x
        entries = np.zeros(bands.shape)
        entries[in_band] = found
        return np.asarray(entries * scales)

    def _log_error(self, bands: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
        """The logarithm of the error, its (n, b) slope, and (n,) weights of the columns."""
        with np.errstate(all="ignore"):
            squared_norms = column_sums(np.square(bands))
            norms = np.sqrt(self._constraint.scales(squared_norms, self._sharpness))
            scaled = divide_columns(bands, norms)
            covariances = BandedCovariances(scaled, self._workload.blocks)
            error = covariances.squared_error
            slope = covariances.slope() if np.isfinite(error) else np.full(bands.shape, np.nan)
            # The chain rule through the scaling of columns.
            along = column_sums(slope * scaled)
            by_norms = self._constraint.by_squared_norms(along, squared_norms, self._sharpness)
            slope = divide_columns(slope, norms)
            slope -= bands * spread_columns(by_norms, self._num_bands)
            slope /= error
        self.evaluations += 1
        self.progress.update()
        if not (0.0 < error < np.inf and np.all(np.isfinite(slope))):
            # The line search takes a shorter step.
            return _LARGEST_LOG, np.zeros(bands.shape), np.ones(len(bands))
        # The squared sensitivity is at most one, and one where the scales are exact.
        squared = self._constraint.squared_sensitivity(column_sums(np.square(scaled)))
        self._keep(scaled, squared, error)
        # -along / 2 is (X V)_jj, whose largest part is V_jj X_jj.
        return float(np.log(error)), slope, np.maximum(-0.5 * along / norms**2, 0.0)

    def _look_at_certificate(self) -> None:
        if self.evaluations < self._next_certificate:
            return
        before, since = self._gap, self.evaluations - self._looked_at
        self._gap, self._looked_at = self.certified_gap(), self.evaluations
        self.progress.set_postfix_str(f"relative gap {self._gap:.1e}")
        target = _SAFE_SHARE * self._relative_gap
        if self._gap <= target:
            raise Converged
        # When the target is reached if the gap goes on to fall as fast.
        wait = float(_FEWEST_BETWEEN_CERTIFICATES)
        if self._gap < before < np.inf:
            wait = since * np.log(self._gap / target) / np.log(before / self._gap)
        elif before < np.inf:
            wait = float(_MOST_BETWEEN_CERTIFICATES)
        wait = np.clip(wait, _FEWEST_BETWEEN_CERTIFICATES, _MOST_BETWEEN_CERTIFICATES)
        self._next_certificate = self.evaluations + int(np.ceil(wait))
