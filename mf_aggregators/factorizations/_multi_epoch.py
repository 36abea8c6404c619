"""The search for the least squared error of any matrix, with a certificate.

:mod:`mf_aggregators.factorizations._multi_epoch_dual` has the problem and its dual, which L-BFGS
maximises over the weights of patterns and the entries of V. Each V gives a nearly feasible X, which
scaled to be feasible has the certified error.

Where every class of rounds is one pattern, and wherever V[i, j] is free, entries are those of the
correlations of V. For many participations rounds of one class can be so strongly correlated that a
search from V diagonal goes astray. Another one then starts from a banded matrix
(:mod:`mf_aggregators.factorizations._multi_epoch`), with L = L_0 (I + E), its rows scaled,
where L_0 is that of the start and E is strictly lower triangular: around a good start the Hessian
in E hardly depends on these correlations.

**One participation** is k = 1: V is diagonal. In y = v^1/2 log v the Hessian at the optimum has a
condition number that does not depend on the spread of v, and -1.5 times the gradient is a step a
little longer than one of the fixed-point iteration phi (Denisov et al. Thm 3.2), of which L-BFGS
needs a third of the evaluations.

**The largest error** of a round is at least any mean with weights w on rounds, and the bound for
diag(w)^1/2 A is jointly concave in w and V: both are searched for together, along the central path
(:mod:`mf_aggregators.factorizations._central_path`) while its Hessians are affordable. Where they
are not, L-BFGS does, and a share of the mean that stays in the error keeps w from zero, where X
would be singular.

**Many participations.** A matrix of b bands has X[i, j] = 0 for rounds b apart and more, which is
feasible under (k, b)-participation and, for many participations, near the optimum (BandMF Sec. 4).
At the optimum V = X^-1 A^T A X^-1, so that this V of the banded X, cut to the classes of rounds
modulo b, is near the solution of the dual.

**Many rounds.** For prefix sums weights and correlations hardly depend on n at the same share of a
class of one length: those of fewer classes are interpolated.
"""

import contextlib
import dataclasses
import itertools
import warnings

import numpy as np
import scipy.linalg
import scipy.optimize

from mf_aggregators import sensitivity as sensitivities
from mf_aggregators.factorizations import convergence
from mf_aggregators.factorizations._central_path import CentralPath, PathPoint
from mf_aggregators.factorizations._multi_epoch_dual import (
    Evaluation,
    MultiEpochDual,
    PatternEntries,
)
from mf_aggregators.factorizations._patterns import PatternLayout
from mf_aggregators.factorizations._round_errors import RoundError, weighted, weighted_inverse
from mf_aggregators.factorizations.banded import banded
from mf_aggregators.factorizations.factorization import squared_rows_by_inverse
from mf_aggregators.kernel.numbers import FloatArray
from mf_aggregators.linear_algebra.matrix_roots import lower_triangular_factor
from mf_aggregators.participation import FixedEpochOrder, Participation
from mf_aggregators.progress_bars import ProgressBar

# The relative gap of the banded matrix: a start need not be near its own optimum.
_GAP_OF_BANDS = 1e-2
# Evaluations between two certificates, each of which costs about as much as one.
_EVALUATIONS_BETWEEN_CERTIFICATES = 8
_LARGEST_CHANGE_OF_LOG = 12.0
# The variables up to which Hessians along the central path are affordable.
_MOST_VARIABLES = 4000
# The fewest classes of rounds of a path that begins with an optimum of half of them.
_CLASSES_OF_COARSEST = 40
# How many evaluations L-BFGS has for weights of rounds before it is left for the path.
_EVALUATIONS_BEFORE_PATH = 100
# With this many participations a search from V diagonal may go astray: it is left if its gap is
# this large after these evaluations, or if it has taken half of the budget.
_MANY_PARTICIPATIONS = 12
_EVALUATIONS_TO_COME_NEAR = 24
_FAR = 0.1
# The evaluations that the search for a banded start may always have if A^-1 has few bands: they
# take O(n b^2) operations, and a matrix X takes n^3.
_CHEAP_EVALUATIONS = 1000
# The estimated gap at which a search ends, relative to the gap that is to be certified.
_SAFE_SHARE, _SAFE_SHARE_OF_SINGLE = 0.9, 0.99
# For one participation: the most rounds of a prefix sum that is not searched for from fewer, and
# the gap of these; the first estimate of gaps over distances from feasible matrices; and how many
# evaluations L-BFGS has, for other errors than the mean, before it is left for the path.
_ROUNDS_OF_COARSEST, _GAP_OF_START = 256, 1e-4
_GAP_OVER_DISTANCE, _TINY = 2.0, 1e-300
_EVALUATIONS_OF_SINGLE = 60
# The first step relative to one of the fixed-point iteration, and how often X comes half the way to
# its diagonal.
_FIRST_STEP, _MOST_HALVINGS = 1.5, 60
# The share of the mean that is added to the maximum, relative to the gap that is to be certified:
# if the weights of rounds vanish, X is nearly singular without it. It costs a part of itself.
_SHARE_OF_MEAN, _MOST_OF_MEAN = 0.5, 0.1
# Larger shares that a search begins with, and its most evaluations with each. It ends once another
# search with the last share takes fewer evaluations than the third number.
_SHARES_OF_MEAN, _EVALUATIONS_OF_SHARE, _FEWEST_EVALUATIONS = (0.1, 0.01), 80, 5


class _GoneAstrayError(Exception):
    """A search is too far from the optimum to go on."""


@dataclasses.dataclass(eq=False)
class OptimumSearch:
    """L-BFGS over the dual, with the best certified matrix so far.

    Attributes:
      workload: A, an (n, n) lower-triangular array.
      inverse_bands: The (n, w) bands of A^-1; None if it has many.
      participation: As the further ones, an argument of ``optimal``.
      equal_column_norms: See there; always for one participation.
      pattern_entries: See there.
      error: The error that is minimised.
      relative_gap: See there.
      max_evaluations: See there.
      show_progress: See there.
      evaluations: How often the bound was evaluated.
      progress: The bar.
      strategy_matrix: The best C so far, (n, n); empty before the first certificate.
    """

    workload: FloatArray
    inverse_bands: FloatArray | None
    participation: Participation
    equal_column_norms: bool
    pattern_entries: PatternEntries
    error: RoundError
    relative_gap: float
    max_evaluations: int
    show_progress: bool
    evaluations: int = dataclasses.field(default=0, init=False)

    def __post_init__(self) -> None:
        self.progress = ProgressBar(
            desc="optimum", unit=" evaluations", disable=not self.show_progress
        )
        self.strategy_matrix = np.empty(0)
        self._squared_error = np.inf
        # The best lower bound of the path, up to rounding, and the point that it is from.
        self._bound_of_path = 0.0
        self._best_on_path: tuple[CentralPath, PathPoint] | None = None
        # The workload with the weights of a mean; the maximum has weights that are searched for.
        error, num_rounds = self.error, len(self.workload)
        self._weighted, self._weighted_bands = weighted(self.workload, error.raised), None
        if self.inverse_bands is not None:
            self._weighted_bands = weighted_inverse(self.inverse_bands, error.raised)
        most = self.participation.most_participations(num_rounds)
        self._is_single, self._is_maximum = most == 1, error.is_maximum
        separation = num_rounds if most == 1 else self.participation.separation_in(num_rounds)
        self._layout = PatternLayout(num_rounds, separation, most)
        self.equal_column_norms = self.equal_column_norms or self._is_single
        # Logarithms of the (n,) weights of rounds, and the share of the mean in the error.
        self._log_rows = np.zeros(num_rounds)
        self._share_of_mean = min(_SHARE_OF_MEAN * self.relative_gap, _MOST_OF_MEAN)
        self._safe_share = _SAFE_SHARE
        if self._is_single:
            self._share_of_mean, self._safe_share = 0.0, _SAFE_SHARE_OF_SINGLE
        self._dual = MultiEpochDual(
            self._weighted,
            None if self._is_maximum and not self._is_single else self._weighted_bands,
            self._layout,
            equal_column_norms=self.equal_column_norms,
            pattern_entries=self.pattern_entries,
        )
        # The evaluations that a part of the search may still end with.
        self._budget = self.max_evaluations
        # L_0 of V's correlations.
        self._base = np.tile(np.eye(self._layout.positions), (self._layout.separation, 1, 1))
        self._leaves_if_far = False
        self._next_certificate = _EVALUATIONS_BETWEEN_CERTIFICATES * (
            1 + self._dual.has_cheap_roots
        )
        self._gap_over_distance = _GAP_OVER_DISTANCE
        self._best: Evaluation | None = None

    def run(self) -> None:
        """Searches until the target is certified (raises Converged) or no progress is made."""
        if self.error.has_vanishing_weights:
            self._run_on_path()
            return
        size = self._dual.cone().size + self._layout.num_rounds * self._is_maximum
        is_affordable = self._is_single or size <= _MOST_VARIABLES
        if self._is_maximum and not self._is_single:
            (self._run_on_path if is_affordable else self._run_by_shares)()
            return
        budget, has_path = self._budget, is_affordable and not self.error.is_mean
        if has_path:
            most = _EVALUATIONS_OF_SINGLE if self._is_single else _EVALUATIONS_BEFORE_PATH
            self._budget = min(budget, most)
        self._run_for_mean()
        self._budget = budget
        if has_path:
            self._certify_best()
            if self._estimated_gap() > self._safe_share * self.relative_gap:
                self._run_on_path()

    def _run_on_path(self) -> None:
        """Follows the central path, where weights of rounds may vanish at the optimum."""
        path = CentralPath(self.workload, self._dual.cone(), self.error.weights, self.relative_gap)
        for point in path.points(self._start_of_path(path)):
            self._count()
            if point.estimated_bound > self._bound_of_path:
                self._bound_of_path, self._best_on_path = point.estimated_bound, (path, point)
            with contextlib.suppress(np.linalg.LinAlgError):
                self._keep(lower_triangular_factor(path.gram_matrix(point)))
            self._end_if_near(self._bound_of_path)
            if self.evaluations >= self._budget:
                return

    def _fewer_rounds(self, factor: int) -> "tuple[OptimumSearch, PatternLayout] | None":
        """The ended search for a prefix sum of fewer rounds, and its layout; None for others."""
        bands = self._weighted_bands
        if bands is None or bands.shape[1] != 2 or np.ptp(bands[:, 0]) or np.ptp(bands[1:, 1]):
            return None
        fewer = self._layout.fewer(factor)
        inverse = np.eye(fewer.num_rounds) * bands[0, 0]
        inverse += np.eye(fewer.num_rounds, k=-1) * bands[1, 1]
        search = dataclasses.replace(
            self,
            workload=np.linalg.inv(inverse),
            inverse_bands=bands[: fewer.num_rounds],
            participation=FixedEpochOrder(fewer.most, fewer.separation),
            error=RoundError(fewer.num_rounds, None, self._is_maximum),
            relative_gap=_GAP_OF_START if self._is_single else self.relative_gap,
        )
        with search.progress, contextlib.suppress(convergence.Converged):
            search.run()
        return search, fewer

    def _start_of_path(self, path: CentralPath) -> PathPoint | None:
        """A start from the optimum of half of the classes, for the maximum; or None."""
        is_large = self._layout.separation >= _CLASSES_OF_COARSEST and not self._is_single
        found = self._fewer_rounds(2) if self._is_maximum and is_large else None
        if found is None:
            return None
        search, fewer = found
        self.evaluations += search.evaluations
        assert search._best_on_path is not None
        _, point = search._best_on_path
        layout, dual, known = self._layout, self._dual, search._dual
        # Variables are weights first, and then entries off the diagonal, both by class.
        num_weights = int(np.sum(known.weights_mask))
        weights, ratios = np.zeros(known.weights_mask.shape), np.zeros(known.pair_exists.shape)
        weights[known.weights_mask] = np.log(point.free[:num_weights])
        roots = known.cone().roots_of_diagonal(point.free)
        ratios[known.pair_exists] = point.free[num_weights:] / roots
        free, num_weights = np.zeros(path.cone.size), int(np.sum(dual.weights_mask))
        free[:num_weights] = np.exp(layout.refined(weights, fewer)[dual.weights_mask])
        free[num_weights:] = layout.refined(ratios, fewer)[dual.pair_exists]
        free[num_weights:] *= path.cone.roots_of_diagonal(free)
        row_weights = self._refined_rows(np.log(point.row_weights), fewer)
        try:
            return path.near_optimum(np.exp(row_weights), free)
        except np.linalg.LinAlgError:
            # V would not be positive definite.
            return None

    def _refined_rows(self, values: FloatArray, fewer: PatternLayout) -> FloatArray:
        """(n,) values of rounds between those of fewer rounds."""
        return self._layout.by_round(self._layout.refined(fewer.by_position(values), fewer))

    def _run_for_mean(self) -> None:
        layout = self._layout
        if layout.most < _MANY_PARTICIPATIONS or layout.positions > layout.most:
            # V of a banded matrix, cut to patterns, is definite only if these are whole classes.
            self._run_from_diagonal()
            return
        budget, self._leaves_if_far = self._budget, True
        self._budget = -(-budget // 2)
        with contextlib.suppress(_GoneAstrayError):
            self._run_from_diagonal()
        self._budget, self._leaves_if_far = budget - self.evaluations, False
        self._certify_best()
        if self._budget > 0 and self._estimated_gap() > self._safe_share * self.relative_gap:
            self._run_from_bands()

    def _run_by_shares(self) -> None:
        """Searches for the maximum with falling shares of the mean, each from the one before.

        Variables are scaled anew each time, and V's correlations are those of the start.
        """
        budget, last = self._budget, self._share_of_mean
        shares = [share for share in _SHARES_OF_MEAN if share > last]
        for share in itertools.chain(shares, itertools.repeat(last)):
            self._share_of_mean, before, best = share, self.evaluations, self._best
            self._budget = budget - before
            if share > last:
                self._budget = min(self._budget, _EVALUATIONS_OF_SHARE)
            if self._budget <= 0:
                return
            if best is None:
                self._run_from_diagonal()
                continue
            assert best.row_weights is not None
            self._log_rows, entries = np.log(best.row_weights), best.ratios
            if self._dual.by_correlations:
                self._base = best.factors / np.linalg.norm(best.factors, axis=2, keepdims=True)
                entries = np.zeros(best.ratios.shape)
            try:
                self._run_from(np.log(best.weights[self._dual.weights_mask]), entries)
            except np.linalg.LinAlgError:
                # V is too nearly singular to evaluate the start.
                return
            if share == last and self.evaluations < before + _FEWEST_EVALUATIONS:
                return

    def _run_from_bands(self) -> None:
        """Searches from a banded matrix, unless rounding leaves no V there that is definite."""
        max_evaluations = self._budget
        if self._weighted_bands is not None:
            max_evaluations = max(max_evaluations, _CHEAP_EVALUATIONS)
        strategy, blocks = _banded_start(
            self._weighted,
            self.participation,
            self._layout,
            equal_column_norms=self.equal_column_norms,
            max_evaluations=max_evaluations,
            show_progress=self.show_progress,
        )
        self._keep(strategy)
        weights = np.diagonal(blocks, axis1=1, axis2=2)
        roots = np.sqrt(weights)
        if not self.equal_column_norms:
            # One pattern in each class, and one weight.
            exists = self._layout.exists
            weights = np.sum(weights * exists, axis=1, keepdims=True)
            weights = weights / np.sum(exists, axis=1, keepdims=True)
        start = np.log(weights[self._dual.weights_mask])
        try:
            self._base = np.linalg.cholesky(
                blocks / (roots[:, :, np.newaxis] * roots[:, np.newaxis])
            )
            self._run_from(start, np.zeros(self._dual.pair_exists.shape))
        except np.linalg.LinAlgError:
            # V is too nearly singular to evaluate the start.
            return

    def _run_from_diagonal(self) -> None:
        mask, diagonal = self._dual.weights_mask, np.zeros(self._dual.pair_exists.shape)
        weights = mask.astype(np.float64)
        if self._is_single:
            weights[:, 0] = self._first_weights()
        row_weights = np.exp(self._log_rows) if self._is_maximum else None
        first = self._evaluate(weights, diagonal, row_weights)
        if first.root.rows is not None:
            self._log_rows = np.log(first.root.rows)
        # One step of the fixed-point iteration, which at V diagonal is that of phi.
        self._run_from(np.log((self._dual.by_weights(first) * weights)[mask]), diagonal)
        if not self._dual.by_correlations:
            # The bounds on V may have stopped the search early.
            self._certify_best()
            if self._estimated_gap() > self._safe_share * self.relative_gap:
                self._run_from(*self._from_orthogonal())

    def _first_weights(self) -> FloatArray:
        """(n,) v for one participation: roots of diag A^T A, or those of fewer rounds."""
        is_large = self._layout.num_rounds > _ROUNDS_OF_COARSEST
        found = self._fewer_rounds(4) if is_large else None
        if found is None:
            return np.asarray(np.sqrt(np.sum(np.square(self._weighted), axis=0)))
        search, fewer = found
        best, self._gap_over_distance = search._best, search._gap_over_distance
        assert best is not None
        if best.row_weights is not None:
            self._log_rows = self._refined_rows(np.log(best.row_weights), fewer)
        return np.asarray(np.exp(self._layout.refined(np.log(best.weights), fewer)[:, 0]))

    def _run_from(self, start: FloatArray, entries_at_start: FloatArray) -> None:
        """Searches from logarithms of weights and entries of V or of its correlations."""
        mask, exists = self._dual.weights_mask, self._dual.pair_exists
        log_rows = self._log_rows if self._is_maximum else np.empty(0)
        scale, by_class = _scales(start), np.zeros(mask.shape)
        by_class[mask] = scale
        # The scale of an entry is that of the largest weight of its class.
        largest = np.broadcast_to(np.max(by_class, axis=1, keepdims=True), exists.shape)
        scales = np.concatenate([_scales(log_rows), scale, largest[exists]])
        ends = np.cumsum([len(log_rows), len(start)])

        def packed(entries: FloatArray, change: float) -> FloatArray:
            logs = np.concatenate([log_rows, start]) + change
            return np.asarray(np.concatenate([logs, entries[exists]]) * scales)

        def negative_log_bound(free: FloatArray) -> tuple[float, FloatArray]:
            rows, logs, some = np.split(free / scales, ends)
            weights, entries = np.zeros(mask.shape), np.zeros(exists.shape)
            weights[mask], entries[exists] = np.exp(logs), some
            value, *slopes = self._negative_log_bound(np.exp(rows), weights, entries)
            by_rows, by_weights, by_entries = slopes
            slope = np.concatenate([by_rows, by_weights[mask], by_entries[exists]])
            return value, slope / scales

        least, highest = (
            packed(np.full(exists.shape, bound), sign * _LARGEST_CHANGE_OF_LOG)
            for bound, sign in zip(self._dual.bounds_of_entries, (-1.0, 1.0), strict=True)
        )
        objective = convergence.ObjectiveBySlopes(negative_log_bound)
        convergence.minimise(
            convergence.with_walls(objective),
            packed(entries_at_start, 0.0),
            max_evaluations=self._budget,
            corrections=30,
            least_change=0.0,
            bounds=scipy.optimize.Bounds(least, highest),
            callback=objective.accept,
        )

    def _negative_log_bound(
        self, free_rows: FloatArray, weights: FloatArray, entries: FloatArray
    ) -> tuple[float, FloatArray, FloatArray, FloatArray]:
        """Minus the logarithm of the bound tr((A V A^T)^1/2)^2 / sum_p v_p, and its derivatives.

        Args:
          free_rows: (n,) weights u of rounds for the maximum; none for the mean.
          weights: The weights v.
          entries: (b, pairs) ratios V[i, j] / s[i, j], or the entries of E.

        Returns:
          The value, and its derivatives by logarithms of both weights and by entries.
        """
        row_weights = None
        if self._is_maximum:
            even = self._share_of_mean * float(np.mean(free_rows))
            row_weights = (1.0 - self._share_of_mean) * free_rows + even
        if self._dual.by_correlations:
            factors = self._dual.factors(self._base, entries)
            norms = np.linalg.norm(factors, axis=2, keepdims=True)
            rows = factors / norms
            ratios = self._dual.correlations(rows)
        else:
            ratios = entries
        evaluation = self._evaluate(weights, ratios, row_weights)
        total, root_sum = float(np.sum(weights)), evaluation.root.trace
        by_weights = self._dual.by_weights(evaluation)
        by_entries = self._dual.by_ratios(evaluation)
        if self._dual.by_correlations:
            by_entries = self._dual.by_entries(self._base, by_entries, rows, norms)
        value, by_rows = float(np.log(total) - 2.0 * np.log(root_sum)), np.empty(0)
        if evaluation.root.rows is not None:
            assert row_weights is not None
            errors = evaluation.root.rows / row_weights / root_sum
            mixed = (1.0 - self._share_of_mean) * errors + self._share_of_mean * np.mean(errors)
            sum_of_rows = float(np.sum(free_rows))
            value += float(np.log(sum_of_rows))
            by_rows = free_rows * (1.0 / sum_of_rows - mixed)
        return (
            value,
            by_rows,
            weights / total - by_weights * weights / root_sum,
            -by_entries / root_sum,
        )

    def _from_orthogonal(self) -> tuple[FloatArray, FloatArray]:
        """Solves the problem with X[i, j] = 0 within patterns, and starts from there.

        Its matrices are feasible here, and its dual has no bounds to run into. Returns the
        logarithms of the weights and the ratios V[i, j] / s[i, j], cut to their bounds.
        """
        easier = dataclasses.replace(
            self,
            workload=self._weighted,
            inverse_bands=self._weighted_bands,
            equal_column_norms=False,
            pattern_entries="orthogonal",
            error=RoundError(self._layout.num_rounds, None, self._is_maximum),
            max_evaluations=self._budget,
        )
        with easier.progress, contextlib.suppress(convergence.Converged):
            easier.run()
        easier.certified_gap()
        self.evaluations += easier.evaluations
        if easier._squared_error < self._squared_error:
            self.strategy_matrix = easier.strategy_matrix
            self._squared_error = easier._squared_error
        best = easier._best
        assert best is not None
        self._log_rows = easier._log_rows
        if best.row_weights is not None:
            self._log_rows = np.log(best.row_weights)
        rows, columns = self._dual.pairs
        scales = self._dual.scales(best.weights)[:, rows, columns]
        entries = best.ratios * easier._dual.scales(best.weights)[:, rows, columns]
        ratios = np.where(
            self._dual.pair_exists, entries / np.where(scales > 0.0, scales, 1.0), 0.0
        )
        ratios = np.clip(ratios, -1.0, 1.0)
        while not _is_positive_definite(self._dual.multiplier_blocks(best.weights, ratios)):
            ratios *= 0.9
        return np.log(best.weights[self._dual.weights_mask]), ratios

    def certified_gap(self) -> float:
        """Returns the relative gap of the best matrix, with a lower bound that is certain."""
        bound = 0.0
        if self._best_on_path is not None:
            path, point = self._best_on_path
            bound = path.bound_from_below(point)
        if self._best is not None:
            self._certify_best()
            if convergence.gap_above(self._squared_error, bound) > self.relative_gap:
                bound = max(bound, self._dual.bound_from_below(self._best))
        return convergence.gap_above(self._squared_error, bound)

    def _certify_best(self) -> None:
        assert self._best is not None
        if not np.isfinite(self._squared_error) or self._estimated_gap() > self.relative_gap:
            self._certify(self._best)

    def _estimated_gap(self) -> float:
        assert self._best is not None
        return self._squared_error / self._best.estimated_bound - 1.0

    def _evaluate(
        self, weights: FloatArray, ratios: FloatArray, row_weights: FloatArray | None = None
    ) -> Evaluation:
        """Evaluates the dual, keeps the best V, and from time to time certifies its matrix.

        Raises:
          LinAlgError: If V is not positive definite.
          Converged: If the target is certified.
          _GoneAstrayError: If the search is to be left where it is far off, and is.
        """
        evaluation = self._dual.at(weights, ratios, row_weights)
        self._count()
        if self._best is None or evaluation.estimated_bound > self._best.estimated_bound:
            self._best = evaluation
        if self._is_single:
            # A certificate costs as much as an evaluation, so it waits until it may succeed.
            distance = evaluation.distance
            if self._gap_over_distance * distance <= self.relative_gap:
                self._certify(evaluation)
                gap = self._safe_share * self._estimated_gap() / (distance + _TINY)
                self._gap_over_distance = max(_GAP_OVER_DISTANCE, gap)
                self._end_if_near(self._best.estimated_bound)
        elif self.evaluations >= self._next_certificate:
            self._certify(self._best)
            self._next_certificate = self.evaluations + _EVALUATIONS_BETWEEN_CERTIFICATES
            if self._dual.has_cheap_roots:
                # A certificate costs as much as many evaluations.
                self._next_certificate += self.evaluations // 2
            gap = self._end_if_near(self._best.estimated_bound)
            is_late = self.evaluations >= _EVALUATIONS_TO_COME_NEAR
            if self._leaves_if_far and is_late and gap > _FAR:
                raise _GoneAstrayError
        return evaluation

    def _count(self) -> None:
        self.evaluations += 1
        self.progress.update()

    def _end_if_near(self, bound: float) -> float:
        """Shows and returns the gap to a bound, and raises Converged if it is small enough."""
        gap = float(self._squared_error / bound - 1.0)
        self.progress.set_postfix_str(f"relative gap {gap:.1e}")
        if gap <= self._safe_share * self.relative_gap:
            raise convergence.Converged
        return gap

    def _certify(self, evaluation: Evaluation) -> None:
        """Keeps C of X(V), scaled to be feasible, if its error is the best.

        The error is that of the matrix itself, by a triangular solve and with the
        sensitivity computed from it, so that nothing of the search enters it.
        """
        is_raised = self.equal_column_norms and not self.error.is_mean
        gram = self._dual.gram_matrix(evaluation, by_pattern=not is_raised)
        if is_raised:
            # A larger X has no larger error, and columns that are scaled may have.
            gram /= np.max(np.diagonal(gram))
            np.fill_diagonal(gram, 1.0)
        self._keep(_factor_towards_diagonal(gram))

    def _keep(self, strategy: FloatArray) -> None:
        """Keeps C, scaled to sensitivity one, if its error is the best."""
        if self.equal_column_norms:
            strategy /= np.linalg.norm(strategy, axis=0)
        bands = self.inverse_bands
        rows = None if bands is None else squared_rows_by_inverse(strategy, bands)
        if rows is None:
            decoder = scipy.linalg.solve_triangular(
                strategy, self.workload.T, lower=True, trans="T", check_finite=False
            )
            rows = np.sum(np.square(decoder), axis=0)
        bound = sensitivities.compute(strategy, self.participation).value
        squared_error = bound**2 * self.error.of_rows(rows)
        if squared_error < self._squared_error:
            self._squared_error = squared_error
            self.strategy_matrix = strategy / bound


def _is_positive_definite(blocks: FloatArray) -> bool:
    try:
        np.linalg.cholesky(blocks)
    except np.linalg.LinAlgError:
        return False
    return True


def _factor_towards_diagonal(gram: FloatArray) -> FloatArray:
    """C of X, or, if far from the optimum X is not positive definite, of X nearer to diag X."""
    diagonal = np.diagonal(gram).copy()
    for _ in range(_MOST_HALVINGS):
        with contextlib.suppress(np.linalg.LinAlgError):
            return lower_triangular_factor(gram)
        gram *= 0.5
        np.fill_diagonal(gram, diagonal)
    raise np.linalg.LinAlgError("X is not finite.")


def _scales(logs: FloatArray) -> FloatArray:
    """The scales of logarithms of weights, in which -gradient is a good first step."""
    shares = np.exp(logs - np.max(logs, initial=-np.inf))
    return np.asarray(np.sqrt(shares / (_FIRST_STEP * np.sum(shares))))


def _banded_start(
    workload: FloatArray,
    participation: Participation,
    layout: PatternLayout,
    *,
    equal_column_norms: bool,
    max_evaluations: int,
    show_progress: bool,
) -> tuple[FloatArray, FloatArray]:
    """Returns a feasible matrix, and the multipliers V that would go with it at the optimum.

    Args:
      workload: A, an (n, n) lower-triangular array.
      participation: The schema.
      layout: Its classes of rounds, each of which is one pattern.
      equal_column_norms: Whether columns of C must have equal norms.
      max_evaluations: The most evaluations of the search for the banded matrix.
      show_progress: Whether to show a progress bar on standard error.

    Returns:
      (n, n) C of sensitivity one, and (b, K, K) blocks of V, those of the identity where there is
      no round. Rounding may have made V indefinite.
    """
    with warnings.catch_warnings():
        # A start need not reach its target.
        warnings.simplefilter("ignore", convergence.NotConvergedWarning)
        matrix = banded(
            workload,
            layout.separation,
            equal_column_norms,
            participation,
            relative_gap=_GAP_OF_BANDS,
            max_evaluations=max_evaluations,
            show_progress=show_progress,
        )
    strategy = matrix.strategy_matrix() / matrix.sensitivity(participation).value
    # A X^-1 = A C^-1 C^-T, by two triangular solves for its transpose.
    half = scipy.linalg.solve_triangular(strategy, workload.T, lower=True, trans="T")
    half = scipy.linalg.solve_triangular(strategy, half, lower=True)
    rounds, exists = layout.rounds, layout.exists
    blocks = np.tile(np.eye(layout.positions), (layout.separation, 1, 1))
    for of_class, there, block in zip(rounds, exists, blocks, strict=True):
        rows = half[of_class[there]]
        block[np.ix_(there, there)] = rows @ rows.T
    return strategy, blocks
