"""The factorization of least total squared error under (k, b)-participation, with a certificate.

The problem (BandMF Problem 1; Choquette-Choo et al., multi-epoch MF): minimise
tr(A^T A X^-1) over positive definite X = C^T C with sum_{i, j in p} |X[i, j]| <= 1 for
every pattern p (the squared sensitivity of BandMF Eq. 5).

Its dual: for weights v_p >= 0 and a positive semi-definite V with V[i, i] = s[i, i] and
|V[i, j]| <= s[i, j], where s[i, j] is the sum of v_p over the patterns that hold both i
and j (so V is zero where there is none), tr(V X) <= sum_p v_p for every feasible X, and

  tr(A^T A X^-1) >= tr(A^T A X^-1) + tr(V X) - sum_p v_p >= 2 tr((A V A^T)^1/2) - sum_p v_p.

The best multiple of V gives tr((A V A^T)^1/2)^2 / sum_p v_p. The bound is concave in V,
with equality for X V X = A^T A: one eigendecomposition gives the bound, its gradient and
a nearly feasible X, which scaled to be feasible has the certified error. V is block
diagonal over the classes of rounds modulo b, so that the dual has about n k / 2
variables instead of the n^2 / 2 of X.

The variants that the literature uses only change the range of V[i, j], i != j: X[i, j] >= 0
within patterns allows any V[i, j] <= s[i, j], and X[i, j] = 0 any V[i, j] at all. Equal
column norms are taken together with X[i, j] = 0 within patterns, as in the papers: then
X[i, i] = 1 / k, and V[i, i] is free as well.

Where every class is one pattern (n <= k b), the bound on |V[i, j]| follows from V being
positive semi-definite, so that the three variants have one optimum: X[i, j] = 0 there,
because V = X^-1 A^T A X^-1 is not singular. There, and wherever V[i, j] is free, V is
s[i, i]^1/2 R[i, j] s[j, j]^1/2 with R = L L^T of a lower-triangular L with rows of norm one:
no V on the way is infeasible. For many participations rounds of one class can be so strongly
correlated that a search from V diagonal goes astray. Another one then starts from a banded
matrix, with L = L_0 (I + E), its rows scaled, where L_0 is that of the start and E is strictly
lower triangular: around a good start the Hessian in E hardly depends on these correlations.
"""

import contextlib
import dataclasses
from typing import Any, Literal

import numpy as np
import scipy.linalg
import scipy.optimize
import tqdm

from mf_aggregators import sensitivity as sensitivities
from mf_aggregators.factorizations import pattern_spectra
from mf_aggregators.factorizations.convergence import (
    Converged,
    ObjectiveBySlopes,
    minimise,
    with_walls,
)
from mf_aggregators.factorizations.gram import lower_triangular_factor
from mf_aggregators.factorizations.multi_epoch_start import banded_start
from mf_aggregators.factorizations.pattern_layout import PatternLayout
from mf_aggregators.factorizations.pattern_spectra import PatternRoot
from mf_aggregators.linear_algebra.nuclear_norm import nuclear_norm_from_below
from mf_aggregators.participation import FixedEpochOrder

PatternEntries = Literal["any", "non_negative", "orthogonal"]

# The least and the largest V[i, j] / s[i, j], i != j, for each range of X[i, j].
_BOUNDS_OF_RATIOS: dict[PatternEntries, tuple[float, float]] = {
    "any": (-1.0, 1.0),
    "non_negative": (-np.inf, 1.0),
    "orthogonal": (-np.inf, np.inf),
}

# Evaluations between two certificates, each of which costs about as much as one.
_EVALUATIONS_BETWEEN_CERTIFICATES = 8
# Multipliers this close to their bound are taken to be at it.
_AT_BOUND = 1e-6
_LARGEST_CHANGE_OF_LOG = 12.0
# From so many participations on, a search from V diagonal may go astray: it is left if it is as
# far off as this after so many evaluations, or has taken half of those that there are.
_MANY_PARTICIPATIONS = 12
_EVALUATIONS_TO_COME_NEAR = 24
_FAR = 0.1
# The estimated gap at which a search ends, relative to the gap that is to be certified.
_SAFE_SHARE = 0.9


@dataclasses.dataclass(frozen=True, eq=False)
class _Evaluation:
    """The dual at one V, and what follows from its eigendecomposition."""

    root_sum: float
    estimated_bound: float
    gram_blocks: np.ndarray
    factors: np.ndarray
    root: PatternRoot
    weights: np.ndarray
    ratios: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class _Variables:
    """What L-BFGS varies: logarithms of weights v, and entries of V or of its correlations.

    Both are scaled. In y = sqrt(v) log(v) the Hessian hardly depends on the spread of v; the
    scale of an entry is that of the largest weight of its class.

    Attributes:
      weights_mask: Which weights there are, (b, W) for patterns or (b, K) for positions.
      pair_exists: (b, pairs): which entries there are.
      scale: The scales of the logarithms of weights, in a row.
      pair_scale: Those of the entries.
    """

    weights_mask: np.ndarray
    pair_exists: np.ndarray
    scale: np.ndarray
    pair_scale: np.ndarray

    @classmethod
    def around(
        cls, weights_mask: np.ndarray, pair_exists: np.ndarray, log_weights: np.ndarray
    ) -> "_Variables":
        """Returns the variables for a search that starts from logarithms of weights."""
        scale = np.exp(0.5 * (log_weights - np.max(log_weights)))
        by_class = np.zeros(weights_mask.shape)
        by_class[weights_mask] = scale
        largest = np.max(by_class, axis=1, keepdims=True)
        pair_scale = np.broadcast_to(largest, pair_exists.shape)[pair_exists]
        return cls(weights_mask, pair_exists, scale, pair_scale)

    def packed(self, log_weights: np.ndarray, entries: np.ndarray) -> np.ndarray:
        """Returns the variables of logarithms of weights, in a row, and (b, pairs) entries."""
        scaled_entries = entries[self.pair_exists] * self.pair_scale
        return np.concatenate([log_weights * self.scale, scaled_entries])

    def unpacked(self, free: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the weights and the (b, pairs) entries, zero where there are none."""
        weights, entries = np.zeros(self.weights_mask.shape), np.zeros(self.pair_exists.shape)
        weights[self.weights_mask] = np.exp(free[: len(self.scale)] / self.scale)
        entries[self.pair_exists] = free[len(self.scale) :] / self.pair_scale
        return weights, entries

    def gradient(self, by_log_weights: np.ndarray, by_entries: np.ndarray) -> np.ndarray:
        """Returns the gradient by the variables from that by what they stand for."""
        by_scaled_entries = by_entries[self.pair_exists] / self.pair_scale
        return np.concatenate([by_log_weights[self.weights_mask] / self.scale, by_scaled_entries])


class _GoneAstrayError(Exception):
    """A search is too far from the optimum to go on."""


class MultiEpochSearch:
    """L-BFGS over the dual, with the best certified matrix so far.

    Attributes:
      evaluations: How many eigendecompositions were made.
      strategy_matrix: The best C so far, (n, n); empty before the first certificate.
    """

    def __init__(
        self,
        workload: np.ndarray,
        inverse_bands: np.ndarray | None,
        participation: FixedEpochOrder,
        *,
        equal_column_norms: bool,
        pattern_entries: PatternEntries,
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
          relative_gap: See there.
          max_evaluations: See there.
          show_progress: See there.
        """
        num_rounds = workload.shape[0]
        self._workload, self._inverse_bands = workload, inverse_bands
        self._participation = participation
        self._layout = PatternLayout(
            num_rounds, participation.separation, participation.most_participations(num_rounds)
        )
        self._equal_column_norms = equal_column_norms
        self._pattern_entries = "orthogonal" if equal_column_norms else pattern_entries
        self._relative_gap = relative_gap
        self._max_evaluations = max_evaluations
        self.progress = tqdm.tqdm(
            desc="(k, b)-participation", unit=" evaluations", disable=not show_progress
        )
        layout = self._layout
        # Whether V is searched as correlations R and scales, or entry by entry in bounds.
        self._by_correlations = (
            self._pattern_entries == "orthogonal" or layout.positions == layout.most
        )
        self._bounds_of_entries = _BOUNDS_OF_RATIOS[
            "orthogonal" if self._by_correlations else self._pattern_entries
        ]
        self._spectra = pattern_spectra.of(workload, inverse_bands, layout)
        # Pairs of positions that some pattern holds.
        rows, columns = np.tril_indices(layout.positions, -1)
        within = rows - columns < layout.most
        self._pairs = rows[within], columns[within]
        exists = layout.exists
        self._pair_exists = exists[:, self._pairs[0]] & exists[:, self._pairs[1]]
        # L_0 of V's correlations.
        self._base = np.tile(np.eye(layout.positions), (layout.separation, 1, 1))
        self._leaves_if_far = False
        self.evaluations = 0
        self._next_certificate = _EVALUATIONS_BETWEEN_CERTIFICATES
        if self._spectra.has_cheap_roots:
            self._next_certificate *= 2
        self._squared_error = np.inf
        self._best: _Evaluation | None = None
        self.strategy_matrix = np.empty(0)

    def run(self) -> None:
        """Searches until the target is certified (raises Converged) or no progress is made."""
        weights_mask = self._layout.exists if self._equal_column_norms else self._layout.windows
        layout = self._layout
        if layout.most < _MANY_PARTICIPATIONS or layout.positions > layout.most:
            # V of a banded matrix, cut to patterns, is definite only if these are whole classes.
            self._run_from_diagonal(weights_mask)
            return
        budget, self._leaves_if_far = self._max_evaluations, True
        self._max_evaluations = -(-budget // 2)
        with contextlib.suppress(_GoneAstrayError):
            self._run_from_diagonal(weights_mask)
        self._max_evaluations, self._leaves_if_far = budget - self.evaluations, False
        self._certify_best()
        if self._max_evaluations > 0 and self._estimated_gap() > _SAFE_SHARE * self._relative_gap:
            self._run_from_bands(weights_mask)

    def _run_from_bands(self, weights_mask: np.ndarray) -> None:
        """Searches from a banded matrix, unless rounding leaves no V there that is definite."""
        start = banded_start(
            self._workload,
            self._participation,
            self._layout,
            equal_column_norms=self._equal_column_norms,
            max_evaluations=self._max_evaluations,
            show_progress=not self.progress.disable,
        )
        self._keep(start.strategy_matrix)
        if start.correlation_factors is None:
            return
        weights = start.diagonal
        if not self._equal_column_norms:
            # One pattern in each class, and one weight.
            exists = self._layout.exists
            weights = np.sum(weights * exists, axis=1, keepdims=True)
            weights /= np.sum(exists, axis=1, keepdims=True)
        self._base = start.correlation_factors
        try:
            self._run_from(
                weights_mask, np.log(weights[weights_mask]), np.zeros(self._pair_exists.shape)
            )
        except np.linalg.LinAlgError:
            # So nearly singular that the start itself cannot be evaluated.
            return

    def _run_from_diagonal(self, weights_mask: np.ndarray) -> None:
        diagonal = np.zeros(self._pair_exists.shape)
        first = self._evaluate(weights_mask.astype(np.float64), diagonal)
        # One step of the fixed-point iteration, which at V diagonal is that of phi.
        ones = np.ones(weights_mask.shape)
        start = np.log(self._by_weights(first, diagonal, ones)[weights_mask])
        self._run_from(weights_mask, start, diagonal)
        if not self._by_correlations:
            # The bounds on V may have stopped the search early.
            self._certify_best()
            if self._estimated_gap() > _SAFE_SHARE * self._relative_gap:
                self._run_from(weights_mask, *self._from_orthogonal(weights_mask))

    def _run_from(
        self, weights_mask: np.ndarray, start: np.ndarray, entries_at_start: np.ndarray
    ) -> None:
        """Searches from logarithms of weights and entries of V or of its correlations."""
        variables = _Variables.around(weights_mask, self._pair_exists, start)

        def negative_log_bound(free: np.ndarray) -> tuple[float, np.ndarray]:
            value, by_log_weights, by_entries = self._negative_log_bound(*variables.unpacked(free))
            return value, variables.gradient(by_log_weights, by_entries)

        least, largest = self._bounds_of_entries
        bounds = (
            variables.packed(start - _LARGEST_CHANGE_OF_LOG, np.full_like(entries_at_start, least)),
            variables.packed(
                start + _LARGEST_CHANGE_OF_LOG, np.full_like(entries_at_start, largest)
            ),
        )
        objective = ObjectiveBySlopes(negative_log_bound)
        minimise(
            with_walls(objective),
            variables.packed(start, entries_at_start),
            max_evaluations=self._max_evaluations,
            corrections=30,
            least_change=0.0,
            bounds=scipy.optimize.Bounds(*bounds),
            callback=objective.accept,
        )

    def _negative_log_bound(
        self, weights: np.ndarray, entries: np.ndarray
    ) -> tuple[float, np.ndarray, np.ndarray]:
        """Minus the logarithm of the bound tr((A V A^T)^1/2)^2 / sum_p v_p, and its derivatives.

        Args:
          weights: The weights v.
          entries: (b, pairs) ratios V[i, j] / s[i, j], or the entries of E.

        Returns:
          The value, and its derivatives by logarithms of weights and by entries.
        """
        if self._by_correlations:
            factors = self._factors(entries)
            norms = np.linalg.norm(factors, axis=2, keepdims=True)
            rows = factors / norms
            ratios = self._correlations(rows)
        else:
            ratios = entries
        evaluation = self._evaluate(weights, ratios)
        total, root_sum = float(np.sum(weights)), evaluation.root_sum
        by_weights = self._by_weights(evaluation, ratios, weights)
        by_entries = self._by_ratios(evaluation, weights)
        if self._by_correlations:
            by_entries = self._by_entries(by_entries, rows, norms)
        return (
            float(np.log(total) - 2.0 * np.log(root_sum)),
            weights / total - by_weights * weights / root_sum,
            -by_entries / root_sum,
        )

    def _from_orthogonal(self, weights_mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Solves the problem with X[i, j] = 0 within patterns, and starts from there.

        Its matrices are feasible here, and its dual has no bounds to run into. Returns the
        logarithms of the weights and the ratios V[i, j] / s[i, j], cut to their bounds.
        """
        easier = MultiEpochSearch(
            self._workload,
            self._inverse_bands,
            self._participation,
            equal_column_norms=False,
            pattern_entries="orthogonal",
            relative_gap=self._relative_gap,
            max_evaluations=self._max_evaluations,
            show_progress=not self.progress.disable,
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
        rows, columns = self._pairs
        scales = self._scales(best.weights)[:, rows, columns]
        entries = best.ratios * easier._scales(best.weights)[:, rows, columns]
        ratios = np.where(self._pair_exists, entries / np.where(scales > 0.0, scales, 1.0), 0.0)
        ratios = np.clip(ratios, -1.0, 1.0)
        while not _is_positive_definite(self._multiplier_blocks(best.weights, ratios)):
            ratios *= 0.9
        return np.log(best.weights[weights_mask]), ratios

    def certified_gap(self) -> float:
        """Returns the relative gap of the best matrix, with a lower bound that is certain.

        The bound at the best V = L L^T is computed anew from the singular values of A L.
        """
        best = self._best
        assert best is not None
        self._certify_best()
        factors = np.linalg.cholesky(self._multiplier_blocks(best.weights, best.ratios))
        product = self._layout.times_blocks(self._workload[:, self._layout.order], factors)
        root_sum = nuclear_norm_from_below(product)
        return max(self._squared_error * self._total(best.weights) / root_sum**2 - 1.0, 0.0)

    def _certify_best(self) -> None:
        assert self._best is not None
        if not np.isfinite(self._squared_error) or self._estimated_gap() > self._relative_gap:
            self._certify(self._best)

    def _estimated_gap(self) -> float:
        assert self._best is not None
        return self._squared_error / self._best.estimated_bound - 1.0

    def _total(self, weights: np.ndarray) -> float:
        """What tr(V X) is at most: with equal norms, X[i, i] = 1 / k."""
        share = 1.0 / self._layout.most if self._equal_column_norms else 1.0
        return share * float(np.sum(weights))

    def _multiplier_blocks(self, weights: np.ndarray, ratios: np.ndarray) -> np.ndarray:
        """(b, K, K) blocks of V; ones on the diagonal of rounds that do not exist."""
        blocks = self._scales(weights)
        rows, columns = self._pairs
        off = blocks[:, rows, columns] * ratios
        diagonal = np.where(self._layout.exists, np.diagonal(blocks, axis1=1, axis2=2), 1.0)
        blocks = np.zeros_like(blocks)
        positions = np.arange(self._layout.positions)
        blocks[:, positions, positions] = diagonal
        blocks[:, rows, columns] = off
        blocks[:, columns, rows] = off
        return blocks

    def _scales(self, weights: np.ndarray) -> np.ndarray:
        """(b, K, K): what V[i, j] is a ratio of, and V[i, i] itself on the diagonal."""
        if self._by_correlations:
            roots = np.sqrt(self._diagonal(weights))
            return roots[:, :, np.newaxis] * roots[:, np.newaxis]
        return self._layout.cover_pairs(weights)

    def _diagonal(self, weights: np.ndarray) -> np.ndarray:
        """(b, K) diagonal of V."""
        return weights if self._equal_column_norms else self._layout.cover(weights)

    def _correlations(self, rows: np.ndarray) -> np.ndarray:
        """(b, pairs) entries of R = L L^T."""
        correlations = np.matmul(rows, rows.transpose(0, 2, 1))
        return correlations[:, self._pairs[0], self._pairs[1]]

    def _factors(self, entries: np.ndarray) -> np.ndarray:
        """(b, K, K) L_0 (I + E), before its rows are scaled, from (b, pairs) entries of E."""
        factors = np.tile(np.eye(self._layout.positions), (len(entries), 1, 1))
        factors[:, self._pairs[0], self._pairs[1]] = entries
        return np.matmul(self._base, factors)

    def _by_entries(self, by_ratios: np.ndarray, rows: np.ndarray, norms: np.ndarray) -> np.ndarray:
        """The derivative by E's entries, from that by R's, L's rows and their norms before."""
        symmetric = np.zeros_like(rows)
        symmetric[:, self._pairs[0], self._pairs[1]] = by_ratios
        symmetric += symmetric.transpose(0, 2, 1)
        slope = np.matmul(symmetric, rows)
        slope -= rows * np.sum(slope * rows, axis=2, keepdims=True)
        slope = np.matmul(self._base.transpose(0, 2, 1), slope / norms)
        return np.where(self._pair_exists, slope[:, self._pairs[0], self._pairs[1]], 0.0)

    def _evaluate(self, weights: np.ndarray, ratios: np.ndarray) -> _Evaluation:
        """Evaluates the dual, keeps the best V, and from time to time certifies its matrix.

        Raises:
          LinAlgError: If V is not positive definite.
          Converged: If the target is certified.
          _GoneAstrayError: If the search is to be left where it is far off, and is.
        """
        evaluation = self._dual(weights, ratios)
        self.evaluations += 1
        self.progress.update()
        if self._best is None or evaluation.estimated_bound > self._best.estimated_bound:
            self._best = evaluation
        if self.evaluations >= self._next_certificate:
            self._certify(self._best)
            self._next_certificate = self.evaluations + _EVALUATIONS_BETWEEN_CERTIFICATES
            if self._spectra.has_cheap_roots:
                # A certificate costs as much as many evaluations.
                self._next_certificate += self.evaluations // 2
            self._end_if_near_or_astray()
        return evaluation

    def _end_if_near_or_astray(self) -> None:
        gap = self._estimated_gap()
        self.progress.set_postfix_str(f"relative gap {gap:.1e}")
        if gap <= _SAFE_SHARE * self._relative_gap:
            raise Converged
        is_late = self.evaluations >= _EVALUATIONS_TO_COME_NEAR
        if self._leaves_if_far and is_late and gap > _FAR:
            raise _GoneAstrayError

    def _dual(self, weights: np.ndarray, ratios: np.ndarray) -> _Evaluation:
        """The bound and its gradient by V, which are the blocks of X with X V X = A^T A."""
        factors = np.linalg.cholesky(self._multiplier_blocks(weights, ratios))
        # With V = L L^T, the trace of R = (L^T A^T A L)^1/2 is that of (A V A^T)^1/2.
        root = self._spectra.root(factors)
        # X = L^-T R L^-1.
        inverse_factors = np.linalg.inv(factors)
        gram_blocks = np.matmul(
            np.matmul(inverse_factors.transpose(0, 2, 1), root.blocks), inverse_factors
        )
        return _Evaluation(
            root_sum=root.trace,
            estimated_bound=root.trace**2 / self._total(weights),
            gram_blocks=gram_blocks,
            factors=factors,
            root=root,
            weights=weights,
            ratios=ratios,
        )

    def _by_weights(
        self, evaluation: _Evaluation, ratios: np.ndarray, weights: np.ndarray
    ) -> np.ndarray:
        """The derivative of 2 root_sum by the weights: X summed with the slopes of V."""
        rows, columns = self._pairs
        slopes = np.zeros_like(evaluation.gram_blocks)
        diagonal = np.diagonal(evaluation.gram_blocks, axis1=1, axis2=2)
        off = evaluation.gram_blocks[:, rows, columns] * ratios
        positions = np.arange(self._layout.positions)
        slopes[:, positions, positions] = np.where(self._layout.exists, diagonal, 0.0)
        slopes[:, rows, columns] = slopes[:, columns, rows] = off
        if not self._by_correlations:
            return self._layout.pair_sums(slopes)
        # V[i, j] = ratio sqrt(s_i s_j): half of each pair for each of its ends.
        roots = np.sqrt(self._diagonal(weights))
        spread = slopes * roots[:, np.newaxis]
        by_diagonal = np.sum(spread, axis=2) / np.where(roots > 0.0, roots, 1.0)
        return by_diagonal if self._equal_column_norms else self._layout.sums(by_diagonal)

    def _by_ratios(self, evaluation: _Evaluation, weights: np.ndarray) -> np.ndarray:
        """The derivative of 2 root_sum by the ratios V[i, j] / s[i, j], (b, pairs)."""
        rows, columns = self._pairs
        entries = evaluation.gram_blocks[:, rows, columns]
        return 2.0 * entries * self._scales(weights)[:, rows, columns]

    def _certify(self, evaluation: _Evaluation) -> None:
        """Keeps C of X(V), scaled to be feasible, if its error is the best.

        The error is that of the matrix itself, by a triangular solve and with the
        sensitivity computed from it, so that nothing of the search enters it.
        """
        strategy = _factor_towards_diagonal(self._gram_matrix(evaluation))
        if self._equal_column_norms:
            strategy /= np.linalg.norm(strategy, axis=0)
        self._keep(strategy)

    def _keep(self, strategy: np.ndarray) -> None:
        """Keeps C, scaled to sensitivity one, if its error is the best."""
        decoder = scipy.linalg.solve_triangular(
            strategy, self._workload.T, lower=True, trans="T", check_finite=False
        )
        bound = sensitivities.compute(strategy, self._participation).value
        squared_error = bound**2 * float(np.sum(np.square(decoder)))
        if squared_error < self._squared_error:
            self._squared_error = squared_error
            self.strategy_matrix = strategy / bound

    def _gram_matrix(self, evaluation: _Evaluation) -> np.ndarray:
        """X in the order of rounds, scaled by classes and with X[i, j] = 0 where it should be."""
        layout = self._layout
        # A round's scale is that of the tightest of its patterns, which makes X feasible.
        sums = layout.pair_sums(
            np.abs(evaluation.gram_blocks)
            * (layout.exists[:, np.newaxis] & layout.exists[:, :, np.newaxis])
        )
        tightest = layout.tightest(sums)
        scaled = np.linalg.inv(evaluation.factors) / np.sqrt(tightest)[:, np.newaxis]
        root = self._spectra.whole(evaluation.root, evaluation.factors)
        by_class = layout.times_blocks(layout.blocks_times(scaled.transpose(0, 2, 1), root), scaled)
        gram = np.empty(by_class.shape)
        gram[np.ix_(layout.order, layout.order)] = by_class
        # Complementary slackness: off its bounds, a multiplier's entry of X is zero.
        least, largest = self._bounds_of_entries
        interior = (evaluation.ratios > least + _AT_BOUND) & (
            evaluation.ratios < largest - _AT_BOUND
        )
        classes, pairs = np.nonzero(interior & self._pair_exists)
        rows = layout.rounds[classes, self._pairs[0][pairs]]
        columns = layout.rounds[classes, self._pairs[1][pairs]]
        gram[rows, columns] = gram[columns, rows] = 0.0
        return gram


def _is_positive_definite(blocks: np.ndarray) -> bool:
    try:
        np.linalg.cholesky(blocks)
    except np.linalg.LinAlgError:
        return False
    return True


def _factor_towards_diagonal(gram: np.ndarray) -> np.ndarray:
    """C of X, or, if far from the optimum X is not positive definite, of X nearer to diag X."""
    diagonal = np.diagonal(gram).copy()
    while True:
        try:
            return lower_triangular_factor(gram)
        except np.linalg.LinAlgError:
            gram *= 0.5
            np.fill_diagonal(gram, diagonal)


def bounded_entries(pattern_entries: Any) -> PatternEntries:
    """Returns ``pattern_entries``, or raises ValueError unless it is one of the variants."""
    if pattern_entries not in ("any", "non_negative", "orthogonal"):
        raise ValueError(
            "pattern_entries must be 'any', 'non_negative' or 'orthogonal', found "
            f"{pattern_entries!r}."
        )
    checked: PatternEntries = pattern_entries
    return checked
