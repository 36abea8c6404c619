"""The search for the least squared error under (k, b)-participation, with a certificate.

:mod:`mf_aggregators.factorizations._multi_epoch_dual` has the problem and its dual, which L-BFGS
maximises over the weights of patterns and the entries of V. Each V gives a nearly feasible X, which
scaled to be feasible has the certified error.

Where every class of rounds is one pattern, and wherever V[i, j] is free, entries are those of the
correlations of V. For many participations rounds of one class can be so strongly correlated that a
search from V diagonal goes astray. Another one then starts from a banded matrix
(:mod:`mf_aggregators.factorizations._multi_epoch`), with L = L_0 (I + E), its rows scaled,
where L_0 is that of the start and E is strictly lower triangular: around a good start the Hessian
in E hardly depends on these correlations.

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
from typing import Any

import numpy as np
import scipy.linalg
import scipy.optimize

from mf_aggregators import sensitivity as sensitivities
from mf_aggregators.factorizations._central_path import CentralPath, PathPoint
from mf_aggregators.factorizations._multi_epoch_dual import (
    Evaluation,
    MultiEpochDual,
    PatternEntries,
)
from mf_aggregators.factorizations._patterns import PatternLayout
from mf_aggregators.factorizations._round_errors import RoundError, weighted, weighted_inverse
from mf_aggregators.factorizations.banded import banded
from mf_aggregators.factorizations.convergence import (
    Converged,
    NotConvergedWarning,
    ObjectiveBySlopes,
    gap_above,
    minimise,
    with_walls,
)
from mf_aggregators.kernel.numbers import BoolArray, FloatArray
from mf_aggregators.linear_algebra.matrix_roots import (
    lower_triangular_factor,
    nuclear_norm_from_below,
)
from mf_aggregators.participation import FixedEpochOrder, Participation
from mf_aggregators.progress_bars import ProgressBar

# The relative gap of the banded matrix: a start need not be near its own optimum.
_GAP_OF_BANDS = 1e-2
# Evaluations between two certificates, each of which costs about as much as one.
_EVALUATIONS_BETWEEN_CERTIFICATES = 8
_LARGEST_CHANGE_OF_LOG = 12.0
# The variables up to which Hessians along the central path are affordable.
_MOST_VARIABLES = 4000
# The fewest classes of rounds of a path that begins with an optimum of fewer, and how many of them
# become one.
_CLASSES_OF_COARSEST, _CLASSES_PER_COARSER_CLASS = 40, 2
# How many evaluations L-BFGS has for weights of rounds before it is left for the path.
_EVALUATIONS_BEFORE_PATH = 100
# From so many participations on, a search from V diagonal may go astray: it is left if it is as
# far off as this after so many evaluations, or has taken half of those that there are.
_MANY_PARTICIPATIONS = 12
_EVALUATIONS_TO_COME_NEAR = 24
_FAR = 0.1
# The evaluations that the search for a banded start may always have where A^-1 has few bands:
# they take O(n b^2) operations, beside the n^3 of a matrix X.
_CHEAP_EVALUATIONS = 1000
# The estimated gap at which a search ends, relative to the gap that is to be certified.
_SAFE_SHARE = 0.9
# The share of the mean beside the maximum, relative to the gap that is to be certified: where the
# weights of rounds vanish, X would be nearly singular. It costs a part of itself.
_SHARE_OF_MEAN, _MOST_OF_MEAN = 0.5, 0.1
# Larger shares that a search begins with, and its most evaluations with each. It ends once another
# search with the last share takes fewer evaluations than the third number.
_SHARES_OF_MEAN, _EVALUATIONS_OF_SHARE, _FEWEST_EVALUATIONS = (0.1, 0.01), 80, 5


@dataclasses.dataclass(frozen=True, eq=False)
class _Variables:
    """The variables of L-BFGS: logarithms of weights v, and entries of V or of its correlations.

    Both are scaled. In y = sqrt(v) log(v) the Hessian hardly depends on the spread of v; the
    scale of an entry is that of the largest weight of its class.

    Attributes:
      weights_mask: Which weights there are, (b, W) for patterns or (b, K) for positions.
      pair_exists: (b, pairs): which entries there are.
      scale: The scales of the logarithms of weights, in a row.
      pair_scale: Those of the entries.
    """

    weights_mask: BoolArray
    pair_exists: BoolArray
    scale: FloatArray
    pair_scale: FloatArray

    @classmethod
    def around(
        cls, weights_mask: BoolArray, pair_exists: BoolArray, log_weights: FloatArray
    ) -> "_Variables":
        """Returns the variables for a search that starts from logarithms of weights."""
        scale = np.exp(0.5 * (log_weights - np.max(log_weights)))
        by_class = np.zeros(weights_mask.shape)
        by_class[weights_mask] = scale
        largest = np.max(by_class, axis=1, keepdims=True)
        pair_scale = np.broadcast_to(largest, pair_exists.shape)[pair_exists]
        return cls(weights_mask, pair_exists, scale, pair_scale)

    def packed(self, log_weights: FloatArray, entries: FloatArray) -> FloatArray:
        """Returns the variables of logarithms of weights, in a row, and (b, pairs) entries."""
        scaled_entries = entries[self.pair_exists] * self.pair_scale
        return np.concatenate([log_weights * self.scale, scaled_entries])

    def unpacked(self, free: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Returns the weights and the (b, pairs) entries, zero where there are none."""
        weights, entries = np.zeros(self.weights_mask.shape), np.zeros(self.pair_exists.shape)
        weights[self.weights_mask] = np.exp(free[: len(self.scale)] / self.scale)
        entries[self.pair_exists] = free[len(self.scale) :] / self.pair_scale
        return weights, entries

    def gradient(self, by_log_weights: FloatArray, by_entries: FloatArray) -> FloatArray:
        """Returns the gradient by the variables, from those by log-weights and by entries."""
        by_scaled_entries = by_entries[self.pair_exists] / self.pair_scale
        return np.concatenate([by_log_weights[self.weights_mask] / self.scale, by_scaled_entries])


class _GoneAstrayError(Exception):
    """A search is too far from the optimum to go on."""


class DualSearch:
    """A search that maximises a lower bound on the error, with the best matrix so far.

    Attributes:
      evaluations: How often the bound was evaluated.
      progress: The bar.
      strategy_matrix: The best C so far, (n, n); empty before the first certificate.
    """

    def __init__(
        self,
        error: RoundError,
        relative_gap: float,
        max_evaluations: int,
        name: str,
        show_progress: bool,
    ) -> None:
        """Begins without a matrix.

        Args:
          error: What is minimised.
          relative_gap: The relative gap at which the search ends.
          max_evaluations: The number of evaluations after which the search ends anyway.
          name: The name of the search, for a progress bar.
          show_progress: Whether to show a progress bar on standard error.
        """
        self._error = error
        self._relative_gap = relative_gap
        self._max_evaluations = max_evaluations
        self._show_progress = show_progress
        self.progress = ProgressBar(desc=name, unit=" evaluations", disable=not show_progress)
        self.evaluations = 0
        # The best lower bound, up to rounding, and the point of the path that it is from.
        self._estimated_bound = 0.0
        self._best_on_path: tuple[CentralPath, PathPoint] | None = None
        self._squared_error = np.inf
        self.strategy_matrix = np.empty(0)

    def _count(self) -> None:
        self.evaluations += 1
        self.progress.update()

    def _end_if_near(self, bound: float, share: float) -> float:
        """Shows and returns the gap to a bound, and raises Converged if it is small enough."""
        gap = float(self._squared_error / bound - 1.0)
        self.progress.set_postfix_str(f"relative gap {gap:.1e}")
        if gap <= share * self._relative_gap:
            raise Converged
        return gap

    def _follow(self, path: CentralPath, share: float, first: PathPoint | None = None) -> None:
        """Follows the central path, where weights of some rounds may vanish at the optimum.

        Args:
          path: The path.
          share: The gap at which the search ends, relative to the one that is to be certified.
          first: The point to begin with; None for the path's own.

        Raises:
          Converged: If the target is reached.
        """
        for point in path.points(first):
            self._count()
            if point.estimated_bound > self._estimated_bound:
                self._estimated_bound, self._best_on_path = point.estimated_bound, (path, point)
            with contextlib.suppress(np.linalg.LinAlgError):
                self._keep(lower_triangular_factor(path.gram_matrix(point)))
            self._end_if_near(self._estimated_bound, share)
            if self.evaluations >= self._max_evaluations:
                return

    def _bound_on_path(self) -> float:
        """The best lower bound of the path, in spite of rounding; 0 where there is none."""
        if self._best_on_path is None:
            return 0.0
        path, point = self._best_on_path
        return path.bound_from_below(point)

    def _keep(self, strategy: FloatArray) -> None:
        """Keeps a matrix, scaled to be feasible, if its error is the best."""
        raise NotImplementedError


class MultiEpochSearch(DualSearch):
    """L-BFGS over the dual, with the best certified matrix so far."""

    def __init__(
        self,
        workload: FloatArray,
        inverse_bands: FloatArray | None,
        participation: Participation,
        *,
        equal_column_norms: bool,
        pattern_entries: PatternEntries,
        error: RoundError,
        relative_gap: float,
        max_evaluations: int,
        show_progress: bool,
    ) -> None:
        """Prepares a search.

        Args:
          workload: A, an (n, n) lower-triangular array.
          inverse_bands: The (n, w) bands of A^-1; None if it has many.
          participation: As the further arguments, those of ``optimal``.
          equal_column_norms: See there.
          pattern_entries: See there.
          error: What is minimised.
          relative_gap: See there.
          max_evaluations: See there.
          show_progress: See there.
        """
        name = "(k, b)-participation"
        super().__init__(error, relative_gap, max_evaluations, name, show_progress)
        num_rounds = workload.shape[0]
        self._workload = workload
        # The workload with the weights of a mean; the maximum has weights that are searched for.
        self._weighted = weighted(workload, error.raised)
        if inverse_bands is not None:
            inverse_bands = weighted_inverse(inverse_bands, error.raised)
        self._inverse_bands = inverse_bands
        self._participation = participation
        self._layout = PatternLayout(
            num_rounds,
            participation.separation_in(num_rounds),
            participation.most_participations(num_rounds),
        )
        self._equal_column_norms = equal_column_norms
        self._options: dict[str, Any] = {
            "equal_column_norms": equal_column_norms,
            "pattern_entries": pattern_entries,
            "relative_gap": relative_gap,
            "max_evaluations": max_evaluations,
            "show_progress": show_progress,
        }
        self._is_maximum = error.is_maximum
        # Logarithms of the (n,) weights of rounds, and the share of the mean in the error.
        self._log_rows = np.zeros(num_rounds)
        self._share_of_mean = min(_SHARE_OF_MEAN * relative_gap, _MOST_OF_MEAN)
        self._dual = MultiEpochDual(
            self._weighted,
            None if error.is_maximum else inverse_bands,
            self._layout,
            equal_column_norms=equal_column_norms,
            pattern_entries=pattern_entries,
        )
        # L_0 of V's correlations.
        self._base = np.tile(np.eye(self._layout.positions), (self._layout.separation, 1, 1))
        self._leaves_if_far = False
        self._next_certificate = _EVALUATIONS_BETWEEN_CERTIFICATES
        if self._dual.has_cheap_roots:
            self._next_certificate *= 2
        self._best: Evaluation | None = None

    def run(self) -> None:
        """Searches until the target is certified (raises Converged) or no progress is made."""
        if self._error.has_vanishing_weights:
            self._run_on_path()
            return
        if self._is_maximum:
            if self._dual.cone().size + self._layout.num_rounds <= _MOST_VARIABLES:
                self._run_on_path()
            else:
                self._run_by_shares()
            return
        if self._error.weights is None or self._dual.cone().size > _MOST_VARIABLES:
            self._run_for_mean()
            return
        budget = self._max_evaluations
        self._max_evaluations = min(budget, _EVALUATIONS_BEFORE_PATH)
        self._run_for_mean()
        self._max_evaluations = budget
        self._certify_best()
        if self._estimated_gap() > _SAFE_SHARE * self._relative_gap:
            self._run_on_path()

    def _run_on_path(self) -> None:
        """Follows the central path, where weights of rounds may vanish at the optimum."""
        path = CentralPath(
            self._workload, self._dual.cone(), self._error.weights, self._relative_gap
        )
        self._follow(path, _SAFE_SHARE, self._start_from_fewer(path))

    def _start_from_fewer(self, path: CentralPath) -> PathPoint | None:
        """The optimum of half of the classes, for the maximum of prefix sums; or None."""
        layout, bands = self._layout, self._inverse_bands
        if not self._is_maximum or layout.separation < _CLASSES_OF_COARSEST or bands is None:
            return None
        if bands.shape[1] != 2 or np.ptp(bands[:, 0]) > 0.0 or np.ptp(bands[1:, 1]) > 0.0:
            return None
        fewer = layout.fewer(_CLASSES_PER_COARSER_CLASS)
        inverse = np.eye(fewer.num_rounds) * bands[0, 0]
        inverse += np.eye(fewer.num_rounds, k=-1) * bands[1, 1]
        known = MultiEpochSearch(
            np.linalg.inv(inverse),
            bands[: fewer.num_rounds],
            FixedEpochOrder(fewer.most, fewer.separation),
            error=RoundError(fewer.num_rounds, None, True),
            **self._options,
        )
        with known.progress, contextlib.suppress(Converged):
            known._run_on_path()
        self.evaluations += known.evaluations
        assert known._best_on_path is not None
        _, point = known._best_on_path
        return refined_start(point, known._dual, fewer, path, self._dual, layout)

    def _run_for_mean(self) -> None:
        layout = self._layout
        if layout.most < _MANY_PARTICIPATIONS or layout.positions > layout.most:
            # V of a banded matrix, cut to patterns, is definite only if these are whole classes.
            self._run_from_diagonal()
            return
        budget, self._leaves_if_far = self._max_evaluations, True
        self._max_evaluations = -(-budget // 2)
        with contextlib.suppress(_GoneAstrayError):
            self._run_from_diagonal()
        self._max_evaluations, self._leaves_if_far = budget - self.evaluations, False
        self._certify_best()
        if self._max_evaluations > 0 and self._estimated_gap() > _SAFE_SHARE * self._relative_gap:
            self._run_from_bands()

    def _run_by_shares(self) -> None:
        """Searches for the maximum with falling shares of the mean, each from the one before.

        Variables are scaled anew each time, and V's correlations are those of the start.
        """
        budget, last = self._max_evaluations, self._share_of_mean
        shares = [share for share in _SHARES_OF_MEAN if share > last]
        for share in itertools.chain(shares, itertools.repeat(last)):
            self._share_of_mean, before, best = share, self.evaluations, self._best
            self._max_evaluations = budget - before
            if share > last:
                self._max_evaluations = min(self._max_evaluations, _EVALUATIONS_OF_SHARE)
            if self._max_evaluations <= 0:
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
        max_evaluations = self._max_evaluations
        if self._inverse_bands is not None:
            max_evaluations = max(max_evaluations, _CHEAP_EVALUATIONS)
        strategy, blocks = banded_start(
            self._weighted,
            self._participation,
            self._layout,
            equal_column_norms=self._equal_column_norms,
            max_evaluations=max_evaluations,
            show_progress=self._show_progress,
        )
        self._keep(strategy)
        weights = np.diagonal(blocks, axis1=1, axis2=2)
        roots = np.sqrt(weights)
        if not self._equal_column_norms:
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
        weights_mask, diagonal = self._dual.weights_mask, np.zeros(self._dual.pair_exists.shape)
        row_weights = np.exp(self._log_rows) if self._is_maximum else None
        first = self._evaluate(weights_mask.astype(np.float64), diagonal, row_weights)
        if first.root.rows is not None:
            self._log_rows = np.log(first.root.rows)
        # One step of the fixed-point iteration, which at V diagonal is that of phi.
        ones = np.ones(weights_mask.shape)
        start = np.log(self._dual.by_weights(first, diagonal, ones)[weights_mask])
        self._run_from(start, diagonal)
        if not self._dual.by_correlations:
            # The bounds on V may have stopped the search early.
            self._certify_best()
            if self._estimated_gap() > _SAFE_SHARE * self._relative_gap:
                self._run_from(*self._from_orthogonal())

    def _run_from(self, start: FloatArray, entries_at_start: FloatArray) -> None:
        """Searches from logarithms of weights and entries of V or of its correlations."""
        variables = _Variables.around(self._dual.weights_mask, self._dual.pair_exists, start)
        log_rows = self._log_rows if self._is_maximum else np.empty(0)
        row_scale = np.exp(0.5 * (log_rows - np.max(log_rows, initial=-np.inf)))
        rows = len(log_rows)

        def packed(log_weights: FloatArray, entries: FloatArray, change: float) -> FloatArray:
            others = variables.packed(log_weights + change, entries)
            return np.concatenate([(log_rows + change) * row_scale, others])

        def negative_log_bound(free: FloatArray) -> tuple[float, FloatArray]:
            value, by_log_rows, by_log_weights, by_entries = self._negative_log_bound(
                np.exp(free[:rows] / row_scale), *variables.unpacked(free[rows:])
            )
            gradient = variables.gradient(by_log_weights, by_entries)
            return value, np.concatenate([by_log_rows / row_scale, gradient])

        least, largest = self._dual.bounds_of_entries
        bounds = (
            packed(start, np.full_like(entries_at_start, least), -_LARGEST_CHANGE_OF_LOG),
            packed(start, np.full_like(entries_at_start, largest), _LARGEST_CHANGE_OF_LOG),
        )
        objective = ObjectiveBySlopes(negative_log_bound)
        minimise(
            with_walls(objective),
            packed(start, entries_at_start, 0.0),
            max_evaluations=self._max_evaluations,
            corrections=30,
            least_change=0.0,
            bounds=scipy.optimize.Bounds(*bounds),
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
        total, root_sum = float(np.sum(weights)), evaluation.root_sum
        by_weights = self._dual.by_weights(evaluation, ratios, weights)
        by_entries = self._dual.by_ratios(evaluation, weights)
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
        changes = {
            "equal_column_norms": False,
            "pattern_entries": "orthogonal",
            "max_evaluations": self._max_evaluations,
        }
        easier = MultiEpochSearch(
            self._weighted,
            self._inverse_bands,
            self._participation,
            error=RoundError(self._layout.num_rounds, None, self._is_maximum),
            **{**self._options, **changes},
        )
        with easier.progress, contextlib.suppress(Converged):
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
        """Returns the relative gap of the best matrix, with a lower bound that is certain.

        The bound at the best V = L L^T is computed anew from the singular values of A L.
        """
        bound, best = self._bound_on_path(), self._best
        if best is not None:
            self._certify_best()
            workload = weighted(self._weighted[:, self._layout.order], best.row_weights)
            root_sum = nuclear_norm_from_below(self._layout.times_blocks(workload, best.factors))
            total = self._dual.total(best.weights)
            if best.row_weights is not None:
                total *= float(np.sum(best.row_weights))
            bound = max(bound, root_sum**2 / total)
        return gap_above(self._squared_error, bound)

    def _certify_best(self) -> None:
        assert self._best is not None
        if not np.isfinite(self._squared_error) or self._estimated_gap() > self._relative_gap:
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
        if self.evaluations >= self._next_certificate:
            self._certify(self._best)
            self._next_certificate = self.evaluations + _EVALUATIONS_BETWEEN_CERTIFICATES
            if self._dual.has_cheap_roots:
                # A certificate costs as much as many evaluations.
                self._next_certificate += self.evaluations // 2
            gap = self._end_if_near(self._best.estimated_bound, _SAFE_SHARE)
            is_late = self.evaluations >= _EVALUATIONS_TO_COME_NEAR
            if self._leaves_if_far and is_late and gap > _FAR:
                raise _GoneAstrayError
        return evaluation

    def _certify(self, evaluation: Evaluation) -> None:
        """Keeps C of X(V), scaled to be feasible, if its error is the best.

        The error is that of the matrix itself, by a triangular solve and with the
        sensitivity computed from it, so that nothing of the search enters it.
        """
        gram = self._dual.gram_matrix(evaluation)
        if self._equal_column_norms and self._is_maximum:
            # A larger X has no larger error, and columns that are scaled may have.
            gram /= np.max(np.diagonal(gram))
            np.fill_diagonal(gram, 1.0)
        self._keep(_factor_towards_diagonal(gram))

    def _keep(self, strategy: FloatArray) -> None:
        """Keeps C, scaled to sensitivity one, if its error is the best."""
        if self._equal_column_norms:
            strategy /= np.linalg.norm(strategy, axis=0)
        decoder = scipy.linalg.solve_triangular(
            strategy, self._workload.T, lower=True, trans="T", check_finite=False
        )
        bound = sensitivities.compute(strategy, self._participation).value
        squared_error = bound**2 * self._error.of_rows(np.sum(np.square(decoder), axis=0))
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
    while True:
        try:
            return lower_triangular_factor(gram)
        except np.linalg.LinAlgError:
            gram *= 0.5
            np.fill_diagonal(gram, diagonal)


def banded_start(
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
        warnings.simplefilter("ignore", NotConvergedWarning)
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


def refined_start(
    point: PathPoint,
    known: MultiEpochDual,
    fewer: PatternLayout,
    path: CentralPath,
    dual: MultiEpochDual,
    layout: PatternLayout,
) -> PathPoint | None:
    """Returns a start from a point of fewer rounds; None if V would not be positive definite.

    Args:
      point: Near the optimum of fewer rounds, for the maximum.
      known: The dual that it belongs to.
      fewer: Its layout, as ``layout.fewer`` returns it.
      path: That of all rounds.
      dual: Its dual.
      layout: Its layout.
    """
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
    row_weights = layout.refined(fewer.by_position(np.log(point.row_weights)), fewer)
    try:
        return path.near_optimum(np.exp(layout.by_round(row_weights)), free)
    except np.linalg.LinAlgError:
        return None
