r"""The search for the banded strategy matrix of least mean error, in O(n b^2) operations.

L-BFGS runs over the entries of C before its columns are scaled to keep the constraint. Error and
slope come from :mod:`mf_aggregators.linear_algebra.banded_matrices`, and
:mod:`mf_aggregators.factorizations._band_certificate` says how far the best matrix is from the
optimum at most.
"""

import numpy as np

from mf_aggregators.factorizations._band_certificate import (
    BandedWorkload,
    lower_bound,
    lower_bound_by_last_rounds,
)
from mf_aggregators.factorizations._patterns import ColumnConstraint, EqualNorms
from mf_aggregators.factorizations._round_errors import RoundError
from mf_aggregators.factorizations.convergence import Converged, gap_above, minimise
from mf_aggregators.kernel.numbers import FloatArray
from mf_aggregators.linear_algebra.banded_matrices import (
    BandedCovariances,
    column_sums,
    divide_columns,
    spread_columns,
)
from mf_aggregators.progress_bars import ProgressBar
from mf_aggregators.workloads import Workload

# Evaluations before the first look at the certificate, which costs about five of them, and the
# fewest and the most between two looks.
_FIRST_CERTIFICATE = 50
_FEWEST_BETWEEN_CERTIFICATES, _MOST_BETWEEN_CERTIFICATES = 10, 25
# The gap at which a search ends, relative to the gap that is to be certified.
_SAFE_SHARE = 0.9
# The most rounds for which vectors of all of them are made, in n^2 b operations: at the end of a
# search, and at each look.
_MOST_ROUNDS_OF_VECTORS, _MOST_ROUNDS_IN_BETWEEN = 4096, 512
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
    """L-BFGS over the entries of C, with the best matrix and bound so far.

    Attributes:
      evaluations: How often the error was evaluated.
      best_bands: (n, b) of the best matrix, of sensitivity one.
      multipliers: (n,) weights of rounds, for the maximum.
      progress: The bar.
    """

    # Pairs of steps and slopes that L-BFGS keeps.
    _corrections = 10

    def __init__(
        self,
        workload: Workload | FloatArray,
        constraint: ColumnConstraint,
        error: RoundError,
        relative_gap: float,
        max_evaluations: int,
        show_progress: bool,
    ) -> None:
        """Begins without a matrix.

        Args:
          workload: A, known by its name or an (n, n) lower-triangular array of full rank.
          constraint: What the columns have to keep, and the number of bands.
          error: What is minimised.
          relative_gap: The relative gap at which the search ends.
          max_evaluations: The number of evaluations after which the search ends anyway.
          show_progress: Whether to show a bar on standard error.
        """
        self._named = workload
        self._workload = BandedWorkload.of(workload, constraint.num_bands, error.raised)
        self._constraint = constraint
        self._sharpness = constraint.sharpness[0]
        self._num_bands = constraint.num_bands
        self._relative_gap = relative_gap
        self._max_evaluations = max_evaluations
        self.progress = ProgressBar(
            desc=f"{self._num_bands} bands", unit=" evaluations", disable=not show_progress
        )
        self.multipliers = np.full(error.num_rounds, 1.0 / error.num_rounds)
        self.evaluations = 0
        self._best_error = np.inf
        self.best_bands = np.empty(0)
        self._bound = 0.0
        # The errors of the matrices that both bounds were found for.
        self._certified_error = self._error_by_vectors = np.inf
        # The gap at the last look at the certificate, and when that was and the next one is.
        self._gap, self._looked_at, self._next_certificate = np.inf, 0, _FIRST_CERTIFICATE

    def run(self, start: FloatArray) -> None:
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

    def consider(self, bands: FloatArray) -> None:
        """Keeps a matrix as it is, scaled to sensitivity one, if its error is the best.

        Args:
          bands: (n, b) of the matrix.
        """
        squared = self._constraint.squared_sensitivity(column_sums(np.square(bands)))
        covariances = BandedCovariances(bands, self._workload.blocks)
        self._keep(bands, squared, self._measured(covariances)[0])

    def _keep(self, bands: FloatArray, squared_sensitivity: float, error: float) -> None:
        if error * squared_sensitivity < self._best_error:
            self._best_error = error * squared_sensitivity
            self.best_bands = bands / np.sqrt(squared_sensitivity)

    def certified_gap(self) -> float:
        """Returns the relative gap of the best matrix; infinite if nothing is certified."""
        return self._certified_gap(_MOST_ROUNDS_OF_VECTORS)

    def _certified_gap(self, most_rounds_of_vectors: int) -> float:
        bands, workload = self.best_bands, self._workload
        if self._certified_error > self._best_error:
            self._bound = max(self._bound, lower_bound(bands, workload, self._constraint))
            self._certified_error = self._best_error
        gap, num_rounds = gap_above(self._best_error, self._bound), len(bands)
        is_far = gap > _SAFE_SHARE * self._relative_gap
        is_new = self._error_by_vectors > self._best_error
        if is_far and is_new and num_rounds <= most_rounds_of_vectors:
            # The mean of equal weights is the sum over n.
            bound = num_rounds * lower_bound_by_last_rounds(
                bands, workload, self._constraint, np.ones(num_rounds), num_rounds
            )
            self._bound = max(self._bound, bound)
            self._error_by_vectors = self._best_error
        return gap_above(self._best_error, self._bound)

    def _descend(self, bands: FloatArray, max_evaluations: int) -> FloatArray:
        """Minimises from some bands on, and returns where that ended.

        Entries matter more the more their round does for the error, by the diagonal of the dual:
        in variables that are larger by a power of it, the search takes fewer steps. The optimiser's
        first step has length one, and is made the one that the curvature along the gradient
        suggests.
        """
        in_band = np.tri(len(bands), self._num_bands, dtype=bool)
        _, slope, weights = self._log_error(bands)
        scales = self._scales_of_variables(bands, weights)
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

        def log_error(variables: FloatArray) -> tuple[float, FloatArray]:
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
            corrections=self._corrections,
            least_change=1e-15,
        ).x
        entries = np.zeros(bands.shape)
        entries[in_band] = found
        return np.asarray(entries * scales)

    def _scales_of_variables(self, bands: FloatArray, weights: FloatArray) -> FloatArray:
        """(n, b): what entries of C are over variables, from (n,) weights of its columns."""
        weights = np.maximum(weights, _LEAST_WEIGHT * np.max(weights))
        is_prefix_sum = self._workload.inverse_bands.shape[1] == 2
        has_equal_norms = isinstance(self._constraint, EqualNorms)
        of_rows, of_columns, of_lags = (
            _POWERS_FOR_PREFIX_SUMS if is_prefix_sum and has_equal_norms else _POWERS
        )
        scales = spread_columns(weights**of_columns, self._num_bands)
        lags = np.arange(1.0, self._num_bands + 1.0)
        return np.asarray(scales * np.outer(weights**of_rows, lags**of_lags))

    def _measured(self, covariances: BandedCovariances) -> tuple[float, float, FloatArray | None]:
        """The error of a matrix, what is minimised for it, and its slope by those of rounds."""
        return covariances.squared_error, covariances.squared_error, None

    def _log_error(self, bands: FloatArray) -> tuple[float, FloatArray, FloatArray]:
        """The logarithm of the error, its (n, b) slope, and (n,) weights of the columns."""
        with np.errstate(all="ignore"):
            squared_norms = column_sums(np.square(bands))
            norms = np.sqrt(self._constraint.scales(squared_norms, self._sharpness))
            scaled = divide_columns(bands, norms)
            covariances = BandedCovariances(scaled, self._workload.blocks)
            measured, error, weights = self._measured(covariances)
            slope = (
                covariances.slope(weights) if np.isfinite(error) else np.full(bands.shape, np.nan)
            )
            along = column_sums(slope * scaled)
            slope = self._by_entries(slope, along, bands, squared_norms, norms)
            slope /= error
        self.evaluations += 1
        self.progress.update()
        if not (0.0 < error < np.inf and np.all(np.isfinite(slope))):
            # The line search takes a shorter step.
            return _LARGEST_LOG, np.zeros(bands.shape), np.ones(len(bands))
        # The squared sensitivity is at most one, and one where the scales are exact.
        squared = self._constraint.squared_sensitivity(column_sums(np.square(scaled)))
        self._keep(scaled, squared, measured)
        # -along / 2 is (X V)_jj, whose largest part is V_jj X_jj.
        return float(np.log(error)), slope, np.maximum(-0.5 * along / norms**2, 0.0)

    def _by_entries(
        self,
        slope: FloatArray,
        along: FloatArray,
        bands: FloatArray,
        squared_norms: FloatArray,
        norms: FloatArray,
    ) -> FloatArray:
        """The chain rule through the scaling of columns."""
        by_norms = self._constraint.by_squared_norms(along, squared_norms, self._sharpness)
        slope = divide_columns(slope, norms)
        slope -= bands * spread_columns(by_norms, self._num_bands)
        return slope

    def _look_at_certificate(self) -> None:
        if self.evaluations < self._next_certificate:
            return
        before, since = self._gap, self.evaluations - self._looked_at
        self._looked_at = self.evaluations
        self._gap = self._certified_gap(_MOST_ROUNDS_IN_BETWEEN)
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
