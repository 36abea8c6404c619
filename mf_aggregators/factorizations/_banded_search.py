r"""The search for the best banded strategy matrix and its certificate, in O(n b^2) operations.

L-BFGS runs over the entries of C before its columns are scaled to keep the constraint. Error and
slope come from :mod:`mf_aggregators.linear_algebra.banded_matrices`. Its lower bound is the dual of
the problem. With equal norms: for symmetric positive semi-definite V with V[i, j] = 0 for 0 < |i -
j| < b and any feasible X, tr(V X) = tr(V), so that tr(A^T A X^-1) = tr(A^T A X^-1) + tr(V X) -
tr(V) >= 2 tr((A V A^T)^1/2) - tr(V), the matrix form of 2 sqrt(a v) <= a / x + v x; the best
multiple of V gives tr((A V A^T)^1/2)^2 / tr(V). At the optimum V is X^-1 A^T A X^-1, whose entries
within the band vanish because the gradient does. With pattern weights w, V[i, i] the sum of those
of the patterns that hold i, tr(V X) is at most the sum of w, which takes the place of tr(V).

**The certificate** says how far a matrix is from the best one, at most, from bands alone. Let X =
C^T C for a C of sensitivity one, S = A X^-1 A^T, F = tr(S) the squared error, and V0 = X^-1 A^T A
X^-1. Every symmetric positive semi-definite V that is zero within the band, off the diagonal, and
whose diagonal the constraint allows with weights of sum w, bounds the squared error of every
feasible matrix from below by (tr (A V A^T)^(1/2))^2 / w. Near the optimum V0 is nearly such a
matrix. With E = V0 - V, which is banded, this module bounds the root's trace from what bands alone
tell.

**First order.** Because A V0 A^T = S^2, the root's trace is that of (S^2 - P)^(1/2), P = A E A^T.
If E <= eps V0 in the Loewner order for an eps <= 1, then V >= 0, and also
R_t = S^2 - t P >= (1 - t eps) S^2 for 0 <= t <= 1.

**Second order.** Let g(t) = tr R_t^(1/2). Then g(0) = F and g'(0) = -tr(S^-1 P) / 2 = -tr(X E) / 2.
In a basis of eigenvectors of R_t^(1/2), with eigenvalues r_i > 0, the second derivative of the
trace of a root is

    -g''(t) = sum_ij P_ij^2 / (2 r_i r_j (r_i + r_j)) <= tr(R_t^-1 P R_t^(-1/2) P) / 4,

since 1 / (r_i + r_j) is at most (1 / r_i + 1 / r_j) / 4. Inverses and inverse roots reverse the
order, and tr(Y P Z P) grows with Y and with Z, so that the right-hand side is at most
(1 - t eps)^(-3/2) q / 4 with

    q = tr(S^-2 P S^-1 P) = tr(V0^-1 E X E) = ||K^T E C^T||_F^2,      K = X A^-1,  V0^-1 = K K^T.

Taylor's formula with the integral of (1 - t) (1 - t eps)^(-3/2), 2 / (1 + (1 - eps)^(1/2))^2, gives

    tr (A V A^T)^(1/2) >= F - tr(X E) / 2 - q / (2 (1 + (1 - eps)^(1/2))^2).

All of it is banded if A^-1 is, and E <= eps V0 means that eps I - K^T E K is positive
semi-definite: one banded Cholesky factorization decides. The gap that follows is of second order
in E. If E <= 0, then V >= V0, the trace is at least F as well, and the better of both counts.

**Where V is not positive semi-definite** at its first few steps of a search, the diagonal of V is
raised: by shares of sum_j |E_ij| in rows around which K^T E K is large, and, failing that, by all
of it in all rows, after which E <= 0 by diagonal dominance.

**The maximum of prefix sums with equal norms.** Multipliers w_i and errors e'_i of a point before
give the convex function (sum_i w_i e'_i (e_i / e'_i)^c)^(1/c) of X, whose slope is that of a mean
with weights w_i (e_i / e'_i)^(c - 1). A turn of few steps lowers it; its weights, times a power of
e_i over their mean, are the next w: a method of multipliers with some over-relaxation. Rounds whose
errors stay below the maximum would have weights near zero, and make V0 singular. As many small ones
as a part of the gap pays for are raised to one floor: a weight phi costs phi (1 - e_i / max e) of
the bound. The mean with any weights has the certificate above, which bounds the maximum of every
matrix from below as well.

**Its metric.** Of a change dC = Y C of the strategy, the first-order change of A C^-1 is -A C^-1 Y.
So Y is measured by the diagonal of (A C^-1)^T W A C^-1, by rows. L-BFGS starts from the inverse of
that, restricted to bands on both sides; pairs stay from turn to turn. For weights over several
orders of magnitude it takes a third of the steps that diagonal scales of entries do.

**Any other maximum.** Of the errors e_i of the rounds, (s / c) log(sum_i u_i exp(c e_i / s)) is
minimised, a convex function of X near the largest error, for multipliers u of sum one and the
scale s of the errors. Its slope is that of a mean with weights w_i, u_i exp(c e_i / s) over their
sum. The exponential method of multipliers (Tseng and Bertsekas, 1993) takes them for the next u: it
converges for any c, faster for larger ones. The mean with weights w has the certificate above,
which bounds the maximum of every matrix from below as well.

**Rounding.** Every matrix here is a sum of positive semi-definite terms or a product of few bands.
The entries of V0 and F are taken to be off by 8 n_s u kappa, relative to the root of the product of
diagonal entries: n_s is the length of inner products, u the unit roundoff and kappa the sum of the
largest condition numbers of diagonal blocks of C and of A. This follows the usual forward bounds of
triangular inverses; it is not proven to the last constant, and the tests compare it with
computations in many digits. What it adds to E goes into all terms.
"""

import dataclasses
import functools

import numpy as np
from scipy.linalg.lapack import dpbtrf, dtrtri

from mf_aggregators import workloads
from mf_aggregators.arrays import BoolArray, FloatArray, IntArray
from mf_aggregators.factorizations._patterns import ColumnConstraint, EqualNorms
from mf_aggregators.factorizations._round_errors import (
    RoundError,
    raised_to_floor,
    weighted,
    weighted_inverse,
)
from mf_aggregators.factorizations.convergence import (
    Converged,
    CurvaturePairs,
    gap_above,
    minimise,
)
from mf_aggregators.linear_algebra.banded_matrices import (
    BandedCovariances,
    BandedMatrix,
    WorkloadBlocks,
    column_sums,
    divide_columns,
    spread_columns,
)
from mf_aggregators.noise import recursions
from mf_aggregators.progress_bars import ProgressBar
from mf_aggregators.workloads import Workload

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
_ROUNDOFF = 2.0**-53
_ROUNDING = 8.0
# The share of the mean beside the maximum, relative to the gap that is to be certified: where the
# weights of rounds vanish, the search would not converge. It costs a part of itself.
# It is the first one for so many turns, and then the second.
_SHARES_OF_MEAN, _FIRST_TURNS = (3.0, 0.5), 13
_MOST_OF_MEAN = 0.1
# Pairs of steps and slopes that L-BFGS keeps.
_CORRECTIONS, _CORRECTIONS_FOR_MAXIMUM = 10, 20
# For the maximum: the exponent c, and the power of errors between turns. Of many tried, these took
# the fewest evaluations; any from 5 to 13 take at most half as many again.
_EXPONENT, _POWER = 9.0, 10.0
# By how much logarithms of weights change between turns at most.
_LARGEST_CHANGE_OF_LOG = 1.5
# The share of the gap that raised weights may take, and what it is at least, relative to how far
# the maximum is above the mean, and at most.
_SHARE_OF_FLOOR, _FLOOR_BY_DISTANCE, _MOST_FOR_FLOOR = 0.5, 0.2, 0.03
# Steps of the first turn, and the fewest and the most of each other one.
_STEPS_OF_FIRST_TURN, _FEWEST_STEPS, _MOST_STEPS = 15, 6, 12
# A turn ends where the decrease that is expected of a step is below this, relative to what the
# weights are off by; the first at the other.
_SHARE_OF_STEP, _STEP_OF_FIRST_TURN = 0.05, 1e-4
# One of so many shares of the evaluations is for short turns.
_SHARES_OF_EVALUATIONS = 3
# Turns without a step that end a search.
_MOST_IDLE_TURNS = 100
# The first looks at the certificate, and evaluations between two.
_SAFE_DISTANCE, _BETWEEN_LOOKS = 0.95, 10
# The gap at which the search ends, relative to the target: that of the best matrix is stated.
_SAFE_SHARE_OF_MAXIMUM = 0.98
# Sufficient decrease of a line search, its first step without curvature, and its shortest one.
_SUFFICIENT, _FIRST_STEP, _SHORTEST_STEP, _LEAST_DECREASE = 1e-4, 0.5, 1e-8, 1e-14
# Of the means of exponentials in the place of the maximum, in turn, and the evaluations at each.
# Larger ones converge in fewer turns, and each is harder to minimise.
_EXPONENTS = (8.0, *[16.0] * 6, *[24.0] * 40)
_EXPONENTS_BEFORE = (16.0, 16.0)
_EVALUATIONS_OF_EXPONENT = 60
# Values of eps that a Cholesky factorization is tried with.
_EPSILONS = (0.1, 0.5, 1.0)
# Row sums of K^T E K around which the diagonal of V is raised first.
_LARGE = 0.5
# By how much, of what dominance takes: less costs less of the bound, if it is enough.
_SHARES_OF_DOMINANCE = (0.05, 0.2, 1.0)


@dataclasses.dataclass(frozen=True, eq=False)
class BandedWorkload:
    """A workload over its largest entry.

    Attributes:
      blocks: In blocks of rounds.
      inverse_bands: (n, w) of A^-1; w is n where it is not banded.
      condition: The largest condition number, for maxima, of a diagonal block of A.
    """

    blocks: WorkloadBlocks
    inverse_bands: FloatArray
    condition: float

    @classmethod
    def of(
        cls, workload: Workload | FloatArray, num_bands: int, weights: FloatArray | None = None
    ) -> "BandedWorkload":
        """Returns a workload.

        Args:
          workload: A, known by its name or an (n, n) lower-triangular array of full rank.
          num_bands: The bands b of strategy matrices.
          weights: (n,) w of the rounds, above zero, for diag(w)^1/2 A; None for ones.
        """
        largest = workloads.largest_entry(workload)
        inverse_bands = workloads.inverse_bands(workload)
        if inverse_bands is not None:
            inverse_bands = weighted_inverse(inverse_bands * largest, weights)
            blocks = WorkloadBlocks.of_inverse(inverse_bands, num_bands)
            return cls(blocks, inverse_bands, blocks.largest_condition(inverse_bands))
        matrix = workload.matrix() if isinstance(workload, Workload) else workload
        scaled = weighted(matrix / largest, weights)
        inverse, _ = dtrtri(scaled.T, lower=0)
        inverse = np.tril(inverse.T)
        condition = np.linalg.norm(scaled, np.inf) * np.linalg.norm(inverse, np.inf)
        blocks = WorkloadBlocks.of_matrix(scaled)
        return cls(blocks, recursions.bands_of_matrix(inverse, len(inverse)), float(condition))


class BandedSearch:
    """L-BFGS over the entries of C, with the best matrix and bound so far.

    Attributes:
      evaluations: How often the error was evaluated.
      best_bands: (n, b) of the best matrix, of sensitivity one.
      multipliers: (n,) weights of rounds, for the maximum.
    """

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
        self._is_maximum = error.is_maximum
        # Of the power mean that stands for the maximum; and the errors that they belong to.
        self.multipliers = np.full(error.num_rounds, 1.0 / error.num_rounds)
        self._errors_before = np.ones(error.num_rounds)
        # Whether turns of few steps are enough: for the maximum of prefix sums with equal norms.
        self._has_short_turns = (
            isinstance(constraint, EqualNorms)
            and isinstance(workload, Workload)
            and workload.constant_momentum() == 0.0
        )
        self._share_of_mean = 0.0
        self._exponent, self._scale = 1.0, 0.0
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
            if not self._is_maximum:
                bands = self._descend(bands, remaining)
                continue
            if self._has_short_turns:
                # What that leaves is for the other search, from where it ended.
                bands = self._lower_maximum(bands, -(-remaining // _SHARES_OF_EVALUATIONS))
            is_last = sharpness == self._constraint.sharpness[-1]
            for turn, exponent in enumerate(_EXPONENTS if is_last else _EXPONENTS_BEFORE):
                share = _SHARES_OF_MEAN[turn >= _FIRST_TURNS]
                self._share_of_mean = min(share * self._relative_gap, _MOST_OF_MEAN)
                remaining = self._max_evaluations - self.evaluations
                if remaining <= 0:
                    return
                self._exponent = exponent
                bands = self._descend(bands, min(remaining, _EVALUATIONS_OF_EXPONENT))
                self.multipliers = self._weights_of(bands)
                self._gap = self.certified_gap()
                self.progress.set_postfix_str(f"relative gap {self._gap:.1e}")
                if self._gap <= _SAFE_SHARE * self._relative_gap:
                    raise Converged

    def _scales(self, bands: FloatArray) -> FloatArray:
        """(n, b): one over the roots of what second derivatives by entries are like."""
        norms = np.sqrt(self._constraint.scales(column_sums(np.square(bands)), self._sharpness))
        covariances = BandedCovariances(divide_columns(bands, norms), self._workload.blocks)
        weights = self._soft_maximum(covariances.squared_rows())[1]
        rows, columns = covariances.curvatures(weights)
        columns = columns / norms**2
        rows, columns = (each**-0.5 for each in (rows, columns))
        return rows[:, np.newaxis] * spread_columns(columns, self._num_bands)

    def _weights_of(self, bands: FloatArray) -> FloatArray:
        """The (n,) next multipliers: the weights that the bands minimise the mean for.

        These also give a bound on the maximum, which is kept.
        """
        squared_norms = column_sums(np.square(bands))
        norms = np.sqrt(self._constraint.scales(squared_norms, self._sharpness))
        scaled = divide_columns(bands, norms)
        rows = BandedCovariances(scaled, self._workload.blocks).squared_rows()
        weights = self._soft_maximum(rows)[1]
        workload = BandedWorkload.of(self._named, self._num_bands, weights)
        squared = self._constraint.squared_sensitivity(column_sums(np.square(scaled)))
        bound = lower_bound(scaled / np.sqrt(squared), workload, self._constraint)
        self._bound = max(self._bound, bound)
        # Multipliers belong to the scale that they were found with.
        self._scale = float(np.max(rows))
        return weights

    def _soft_maximum(self, rows: FloatArray) -> tuple[float, FloatArray]:
        """What stands for the largest error, and its slope: (n,) weights of sum one."""
        largest = float(np.max(rows))
        powers = self._exponent * (rows - largest) / self._scale
        shares = self.multipliers * np.exp(np.maximum(powers, -_LARGEST_LOG))
        total = float(np.sum(shares))
        value = largest + self._scale * float(np.log(total)) / self._exponent
        even = self._share_of_mean
        value = (1.0 - even) * value + even * float(np.mean(rows))
        return value, (1.0 - even) * shares / total + even / len(rows)

    def _lower_maximum(self, bands: FloatArray, max_evaluations: int) -> FloatArray:
        """Minimises the largest error from some bands on, and returns where that ended.

        Raises:
          Converged: When the target is certified.
        """
        last, next_look = self.evaluations + max_evaluations, 0
        pairs = CurvaturePairs(_CORRECTIONS_FOR_MAXIMUM)
        step_before, steps, fewest = _STEP_OF_FIRST_TURN, _STEPS_OF_FIRST_TURN, _FEWEST_STEPS
        point, idle = self._evaluated(bands), 0
        while point is not None and self.evaluations < last:
            before = self.evaluations
            point, decrease = self._turn(
                point, pairs, step_before, fewest, min(steps, last - before)
            )
            rows, weights = point.rows, self._power_mean(point.rows)[1]
            weights = weights / np.sum(weights)
            mean, largest = float(weights @ rows), float(np.max(rows))
            distance = largest / mean - 1.0
            is_near = distance < _SAFE_DISTANCE * self._relative_gap
            if is_near and self.evaluations >= next_look:
                next_look = self.evaluations + _BETWEEN_LOOKS
                self._look_at_bound(point.scaled, weights)
            elif not is_near:
                self.progress.set_postfix_str(f"worst round {distance:.1e} above the mean")
            # Weights may change still where the matrix does not, at no cost.
            idle = idle + 1 if self.evaluations == before else 0
            if idle > _MOST_IDLE_TURNS:
                break
            powers = np.log(rows / mean)
            off_by = 2.0 * float(weights @ np.square(powers))
            step_before = _SHARE_OF_STEP * (min(step_before, decrease) if is_near else off_by)
            powers = np.clip(_POWER * powers, -_LARGEST_CHANGE_OF_LOG, _LARGEST_CHANGE_OF_LOG)
            weights = weights * np.exp(powers)
            budget = max(self._relative_gap, min(_MOST_FOR_FLOOR, _FLOOR_BY_DISTANCE * distance))
            weights = raised_to_floor(
                weights / np.sum(weights), 1.0 - rows / largest, _SHARE_OF_FLOOR * budget
            )
            self.multipliers = weights / np.sum(weights)
            self._errors_before, self._exponent, steps = rows, _EXPONENT, _MOST_STEPS
        if point is None:
            return bands
        weights = self._power_mean(point.rows)[1]
        self._look_at_bound(point.scaled, weights / np.sum(weights))
        return point.bands

    def _turn(
        self, point: "_Strategy", pairs: CurvaturePairs, least: float, fewest: int, most: int
    ) -> tuple["_Strategy", float]:
        """Takes a few steps with the same multipliers; returns the last decrease expected."""
        value, slope = self._log_of_maximum(point)
        _, weights = self._power_mean(point.rows)
        metric = _Metric(1.0 / point.covariances.curvatures(weights)[0], point.bands)
        scale = pairs.scale(metric.times)
        decrease = 0.0
        for taken in range(most):
            step = pairs.step(slope, lambda rest: scale * metric.times(rest))
            along = float(np.vdot(slope, step))
            decrease = -0.5 * along
            if not decrease > 0.0 or (decrease < least and taken >= fewest):
                break
            length = 1.0 if len(pairs) else _FIRST_STEP
            while True:
                moved = self._evaluated(point.bands + length * step)
                new = np.inf
                if moved is not None:
                    new, new_slope = self._log_of_maximum(moved)
                if new <= value + _SUFFICIENT * length * along + _LEAST_DECREASE:
                    break
                # The minimum of the parabola, within limits.
                excess = new - value - length * along
                shorter = -0.5 * length * along / excess if np.isfinite(excess) else 0.0
                length *= min(0.5, max(0.1, shorter))
                if length < _SHORTEST_STEP:
                    return point, decrease
            assert moved is not None
            pairs.add(length * step, new_slope - slope)
            point, value, slope = moved, new, new_slope
        return point, decrease

    def _evaluated(self, bands: FloatArray) -> "_Strategy | None":
        """The strategy of bands before scaling, and its covariances; None beyond floats."""
        with np.errstate(all="ignore"):
            squared_norms = column_sums(np.square(bands))
            norms = np.sqrt(self._constraint.scales(squared_norms, self._sharpness))
            scaled = divide_columns(bands, norms)
            covariances = BandedCovariances(scaled, self._workload.blocks)
            rows = covariances.squared_rows()
        self.evaluations += 1
        self.progress.update()
        if not (np.all(np.isfinite(rows)) and np.all(rows > 0.0)):
            return None
        squared = self._constraint.squared_sensitivity(column_sums(np.square(scaled)))
        self._keep(scaled, squared, float(np.max(rows)))
        return _Strategy(bands, squared_norms, norms, scaled, covariances, rows)

    def _log_of_maximum(self, strategy: "_Strategy") -> tuple[float, FloatArray]:
        """The logarithm of what stands for the largest error, and its (n, b) slope by bands."""
        value, weights = self._power_mean(strategy.rows)
        with np.errstate(all="ignore"):
            slope = strategy.covariances.slope(weights)
        return float(np.log(value)), self._by_entries(strategy, slope) / value

    def _by_entries(self, strategy: "_Strategy", slope: FloatArray) -> FloatArray:
        """The chain rule through the scaling of columns."""
        along = column_sums(slope * strategy.scaled)
        by_norms = self._constraint.by_squared_norms(along, strategy.squared_norms, self._sharpness)
        slope = divide_columns(slope, strategy.norms)
        return np.asarray(slope - strategy.bands * spread_columns(by_norms, self._num_bands))

    def _power_mean(self, rows: FloatArray) -> tuple[float, FloatArray]:
        """What stands for the largest error, and its slope by the (n,) errors, the weights."""
        logs = np.log(rows / self._errors_before)
        parts = np.log(self.multipliers * self._errors_before)
        powers = parts + self._exponent * logs
        largest = float(np.max(powers))
        total = float(np.log(np.sum(np.exp(powers - largest)))) + largest
        # Of a mean of errors that are all as before, that mean.
        whole = float(np.sum(np.exp(parts)))
        value = np.exp((total - np.log(whole)) / self._exponent) * whole
        slope = value * np.exp(powers - total) / rows
        return float(value), np.asarray(slope)

    def _look_at_bound(self, scaled: FloatArray, weights: FloatArray) -> None:
        """Bounds the maximum by the mean with some weights, for which a matrix is nearly best."""
        squared = self._constraint.squared_sensitivity(column_sums(np.square(scaled)))
        workload = BandedWorkload.of(self._named, self._num_bands, weights)
        bound = lower_bound(scaled / np.sqrt(squared), workload, self._constraint)
        self._bound = max(self._bound, bound)
        self._gap = self.certified_gap()
        self.progress.set_postfix_str(f"relative gap {self._gap:.1e}")
        if self._gap <= _SAFE_SHARE_OF_MAXIMUM * self._relative_gap:
            raise Converged

    def consider(self, bands: FloatArray) -> None:
        """Keeps a matrix as it is, scaled to sensitivity one, if its error is the best.

        Args:
          bands: (n, b) of the matrix.
        """
        squared = self._constraint.squared_sensitivity(column_sums(np.square(bands)))
        covariances = BandedCovariances(bands, self._workload.blocks)
        error = covariances.squared_error
        if self._is_maximum:
            error = float(np.max(covariances.squared_rows()))
        self._keep(bands, squared, error)

    def _keep(self, bands: FloatArray, squared_sensitivity: float, error: float) -> None:
        if error * squared_sensitivity < self._best_error:
            self._best_error = error * squared_sensitivity
            self.best_bands = bands / np.sqrt(squared_sensitivity)

    def certified_gap(self) -> float:
        """Returns the relative gap of the best matrix; infinite if nothing is certified."""
        if self._certified_error > self._best_error and not self._is_maximum:
            bound = lower_bound(self.best_bands, self._workload, self._constraint)
            self._bound = max(self._bound, bound)
            self._certified_error = self._best_error
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
        weights = np.maximum(weights, _LEAST_WEIGHT * np.max(weights))
        is_prefix_sum = self._workload.inverse_bands.shape[1] == 2
        has_equal_norms = isinstance(self._constraint, EqualNorms)
        of_rows, of_columns, of_lags = (
            _POWERS_FOR_PREFIX_SUMS if is_prefix_sum and has_equal_norms else _POWERS
        )
        scales = spread_columns(weights**of_columns, self._num_bands)
        scales *= np.outer(weights**of_rows, np.arange(1.0, self._num_bands + 1.0) ** of_lags)
        if self._is_maximum:
            scales = self._scales(bands)
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
            corrections=_CORRECTIONS_FOR_MAXIMUM if self._is_maximum else _CORRECTIONS,
            least_change=1e-15,
        ).x
        entries = np.zeros(bands.shape)
        entries[in_band] = found
        return np.asarray(entries * scales)

    def _log_error(self, bands: FloatArray) -> tuple[float, FloatArray, FloatArray]:
        """The logarithm of the error, its (n, b) slope, and (n,) weights of the columns."""
        with np.errstate(all="ignore"):
            squared_norms = column_sums(np.square(bands))
            norms = np.sqrt(self._constraint.scales(squared_norms, self._sharpness))
            scaled = divide_columns(bands, norms)
            covariances = BandedCovariances(scaled, self._workload.blocks)
            error, largest, weights = covariances.squared_error, np.inf, None
            if self._is_maximum:
                rows = covariances.squared_rows()
                largest = float(np.max(rows))
                self._scale = self._scale or largest
                error, weights = self._soft_maximum(rows)
            slope = (
                covariances.slope(weights) if np.isfinite(error) else np.full(bands.shape, np.nan)
            )
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
        self._keep(scaled, squared, largest if self._is_maximum else error)
        # -along / 2 is (X V)_jj, whose largest part is V_jj X_jj.
        return float(np.log(error)), slope, np.maximum(-0.5 * along / norms**2, 0.0)

    def _look_at_certificate(self) -> None:
        if self._is_maximum or self.evaluations < self._next_certificate:
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


@dataclasses.dataclass(frozen=True, eq=False)
class _Strategy:
    """Bands of C as they are searched, scaled to keep the constraint, and what follows from them.

    Attributes:
      bands: (n, b) before scaling.
      squared_norms: (n,) of its columns.
      norms: (n,) what they are divided by.
      scaled: (n, b).
      covariances: Those of the scaled ones.
      rows: (n,) errors of rounds.
    """

    bands: FloatArray
    squared_norms: FloatArray
    norms: FloatArray
    scaled: FloatArray
    covariances: BandedCovariances
    rows: FloatArray


class _Metric:
    """From slopes by C to steps: dC = Y C within the band, Y weighted by rows."""

    def __init__(self, weights: FloatArray, bands: FloatArray) -> None:
        """Takes the (n,) weights of the rows of Y Y^T, and the (n, b) bands of C."""
        self._weights = weights[:, np.newaxis]
        self._strategy = BandedMatrix.lower_triangular(bands)
        self._transposed = self._strategy.transposed()

    def times(self, slope: FloatArray) -> FloatArray:
        """Returns (n, b): the metric times an (n, b) slope."""
        return self._within(self._within(slope, self._transposed) * self._weights, self._strategy)

    @staticmethod
    def _within(bands: FloatArray, other: BandedMatrix) -> FloatArray:
        product = BandedMatrix.lower_triangular(bands).times(other)
        narrow = product.narrowed(bands.shape[1] - 1, 0)
        return np.ascontiguousarray(narrow.rows[:, ::-1])


@dataclasses.dataclass(frozen=True, eq=False)
class _Point:
    """A feasible matrix, and what all attempts to bound from it share.

    Attributes:
      squared_error: F.
      strategy: C.
      gram: X.
      root: K.
      dual: V0 within the band.
      rounding: What entries of V0 and F may be off by, relative to them.
    """

    squared_error: float
    strategy: BandedMatrix
    gram: BandedMatrix
    root: BandedMatrix
    dual: BandedMatrix
    rounding: float

    @classmethod
    def of(cls, bands: FloatArray, workload: BandedWorkload) -> "_Point":
        """Computes it for the (n, b) bands of C."""
        covariances = BandedCovariances(bands, workload.blocks)
        strategy = BandedMatrix.lower_triangular(bands)
        gram = strategy.transposed().times(strategy)
        inner = workload.blocks.size + len(workload.blocks.blocks)
        condition = covariances.largest_condition() + workload.condition
        return cls(
            covariances.squared_error,
            strategy,
            gram,
            gram.times(BandedMatrix.lower_triangular(workload.inverse_bands)),
            BandedMatrix.symmetric(covariances.dual_band()),
            _ROUNDING * _ROUNDOFF * inner * condition,
        )

    @property
    def is_finite(self) -> bool:
        """Whether the matrix is within the range of floats."""
        return bool(
            np.isfinite(self.squared_error)
            and np.isfinite(self.rounding)
            and np.all(np.isfinite(self.dual.rows))
            and np.all(self.dual.diagonal > 0.0)
        )

    @functools.cached_property
    def entry_errors(self) -> FloatArray:
        """(n,) r: an entry of V0 is off by r_i r_j at most."""
        return np.asarray(np.sqrt(self.rounding * self.dual.diagonal))

    @functools.cached_property
    def row_errors(self) -> FloatArray:
        """(n,): the sums of r_i r_j over the entries of each row within the band."""
        errors = self.entry_errors
        sums = np.concatenate([[0.0], np.cumsum(errors)])
        first, last = _neighbours(len(errors), self.dual.lower)
        return np.asarray(errors * (sums[last] - sums[first] + _ROUNDOFF * sums[-1]))

    @functools.cached_property
    def strategy_norm(self) -> float:
        """At least the operator norm of C."""
        return _operator_norm(self.strategy)

    @functools.cached_property
    def root_norm(self) -> float:
        """At least the operator norm of K."""
        return _operator_norm(self.root)


def lower_bound(bands: FloatArray, workload: BandedWorkload, constraint: ColumnConstraint) -> float:
    """Returns what no feasible matrix's squared error is below.

    Args:
      bands: (n, b) of a C of sensitivity one.
      workload: A.
      constraint: What the columns of C keep.

    Returns:
      The bound; 0 if nothing is known, because C is too ill-conditioned, or too far from the
      optimum for a constraint on patterns.
    """
    with np.errstate(all="ignore"):
        point = _Point.of(bands, workload)
        if not point.is_finite:
            return 0.0
        raised, rows = np.zeros(len(bands)), np.ones(len(bands), dtype=bool)
        for share in (*_SHARES_OF_DOMINANCE, None, None):
            diagonal = point.dual.diagonal + raised
            if not np.all(np.isfinite(diagonal)):
                return 0.0
            allowed, total = constraint.dual_diagonal(diagonal)
            removed = _removed(point.dual, allowed)
            half = point.root.transposed().times(removed)
            product = half.times(point.root)
            epsilon = _epsilon(point, removed, product)
            if epsilon is not None:
                bound = _bound(point, removed, half, total, epsilon)
                if bound > 0.0:
                    return bound
            dominating = _off_diagonal_sums(removed) + 2.0 * point.row_errors
            if share is None:
                raised = dominating
                continue
            if not np.any(raised):
                is_large = np.sum(np.abs(product.rows), axis=1) > _LARGE
                rows = _spread(is_large, 2 * removed.lower)
            raised = np.where(rows, share * dominating, 0.0)
        return 0.0


def _bound(
    point: _Point, removed: BandedMatrix, half: BandedMatrix, total: float, epsilon: float
) -> float:
    """The bound of an E <= epsilon V0, K^T E being given."""
    width = removed.rows.shape[1]
    errors = point.entry_errors
    # |tr(X dE)|, and the Frobenius norm of K^T dE C^T with what rounding adds to the product.
    off_by = float(
        np.vdot(np.abs(point.gram.rows), _outer(errors, point.gram.lower, point.gram.upper))
    )
    change = np.sqrt(width * float(np.sum(errors**4)))
    change += 2 * width * _ROUNDOFF * np.sqrt(removed.squared_norm())
    remainder = np.sqrt(half.times(point.strategy.transposed()).squared_norm())
    remainder = (remainder + point.root_norm * point.strategy_norm * change) ** 2
    linear = float(np.vdot(point.gram.rows, removed.rows))
    trace = point.squared_error - 0.5 * linear
    trace -= remainder / (2.0 * (1.0 + np.sqrt(1.0 - epsilon)) ** 2)
    if epsilon == 0.0:
        trace = max(trace, point.squared_error)
    # F may be off on both sides: here, and in the error that is compared with the bound.
    trace -= 0.5 * off_by + 2.0 * point.rounding * point.squared_error
    return float(max(trace, 0.0) ** 2 / (total * (1.0 + point.rounding)))


def _epsilon(point: _Point, removed: BandedMatrix, product: BandedMatrix) -> float | None:
    """An eps of a few with E <= eps V0, or None if not even E <= V0 can be shown."""
    if np.all(_off_diagonal_sums(removed) + point.row_errors + removed.diagonal <= 0.0):
        return 0.0
    # What K^T E K may be off by, from errors of E and from the products.
    slack = point.root_norm**2 * (
        float(np.max(point.row_errors))
        + 4 * removed.rows.shape[1] * _ROUNDOFF * removed.largest_row_sum()
    )
    norm = product.largest_row_sum() + slack
    if norm <= _EPSILONS[0]:
        return norm
    reach = min(product.lower, len(product.rows) - 1)
    below = np.zeros((reach + 1, len(product.rows)))
    for t in range(reach + 1):
        # LAPACK's lower form has the entries of a diagonal by their columns.
        below[t, : below.shape[1] - t] = -product.rows[t:, product.lower - t]
    for epsilon in _EPSILONS:
        shifted = below.copy()
        largest = epsilon + float(np.max(below[0]))
        shifted[0] += epsilon - slack - 2.0 * (reach + 2) ** 2 * _ROUNDOFF * largest
        if dpbtrf(shifted, lower=1, overwrite_ab=1)[1] == 0:
            return epsilon
    return None


def _removed(dual: BandedMatrix, allowed: FloatArray) -> BandedMatrix:
    """E: all of V0 within the band, but for a diagonal that is allowed."""
    rows = dual.rows.copy()
    rows[:, dual.lower] -= allowed
    return BandedMatrix(dual.lower, dual.upper, rows)


def _off_diagonal_sums(matrix: BandedMatrix) -> FloatArray:
    """(n,): the sums of magnitudes off the diagonal of each row."""
    return np.asarray(np.sum(np.abs(matrix.rows), axis=1) - np.abs(matrix.diagonal))


def _outer(values: FloatArray, lower: int, upper: int) -> FloatArray:
    """The rows of a banded matrix of v_i v_j."""
    padded = np.concatenate([np.zeros(lower), values, np.zeros(upper)])
    windows = np.lib.stride_tricks.sliding_window_view(padded, lower + upper + 1)
    return np.asarray(values[:, np.newaxis] * windows)


def _operator_norm(matrix: BandedMatrix) -> float:
    """At least the operator norm: the root of the largest sums of rows and of columns."""
    return float(np.sqrt(matrix.largest_row_sum() * matrix.transposed().largest_row_sum()))


def _neighbours(num_rounds: int, reach: int) -> tuple[IntArray, IntArray]:
    """The first round within reach of each, and the one after the last."""
    rounds = np.arange(num_rounds)
    return np.maximum(rounds - reach, 0), np.minimum(rounds + reach + 1, num_rounds)


def _spread(chosen: BoolArray, reach: int) -> BoolArray:
    """Which rounds have a chosen one within reach."""
    counts = np.concatenate([[0], np.cumsum(chosen)])
    first, last = _neighbours(len(chosen), reach)
    return np.asarray(counts[last] > counts[first])
