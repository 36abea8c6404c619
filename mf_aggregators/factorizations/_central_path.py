r"""Newton's method for the dual of the least largest, or weighted, error of a round.

With weights w on rounds and multipliers V of patterns, both of total one, the bound is the square
of f = tr((W^1/2 A V A^T W^1/2)^1/2), which is jointly concave in w and V. V is linear in free
variables z (:mod:`mf_aggregators.factorizations._multi_epoch_dual`), and some linear forms g_l of
z are above zero. Where f is largest, some of the weights, or V, may be singular. So what is
maximised is

  2 log f + m (sum_i log w_i + log det V + sum_l log g_l(z)),

for falling m: the central path, along which nothing becomes singular. The weights of rounds are
those of an error that is given, or free for the maximum.

**The matrix.** With X V X = A^T W A and a total of the singular values of one, the slopes of f by V
are those blocks of X that classes of rounds have. On the path, these and m V^-1 sum to what a
feasible matrix has: patterns are orthogonal, or columns have equal norms. So X + m V^-1 is the
matrix, no worse than X, and feasible to the order of the distance from the path. Its errors are one
plus n m for rounds, less m / w_i. Rounds of weight zero need nothing else: m V^-1 is not singular.
An entry r that has to be zero is set to zero, and its magnitude added to the diagonal of both
rounds, which adds |r| times a square. No such change makes a larger error.

**Newton's method.** Let U s Q^T be the singular value decomposition of W^1/2 A L, s over its sum,
V = L L^T, and Y = L^-T Q. For changes diag(d) of log W, and of V by E, minus the second derivative
of 2 f is

  sum_kl t_kl (U^T diag(d) U - Y^T E Y)_kl^2,  t_kl = s_k s_l / (s_k + s_l).

With 1 / (s_k + s_l) as the integral of exp(-x (s_k + s_l)), summed at a few x, it is made of
products of entries of three matrices for each x.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np
import scipy.linalg
import scipy.sparse

from mf_aggregators.factorizations._patterns import PatternLayout
from mf_aggregators.factorizations._round_errors import weighted
from mf_aggregators.kernel.numbers import FloatArray, IntArray
from mf_aggregators.linear_algebra import matrix_roots

# The barrier m begins with this share over n, falls by a factor once steps are short, and ends with
# this share of the gap that is to be certified, over the number of logarithms.
_FIRST_BARRIER, _FALL_OF_BARRIER, _LAST_BARRIER = 0.1, 0.2, 0.3
# Squared lengths of steps, relative to n, of a point that is near the path.
_NEAR_PATH = 0.1
# The barrier, relative to the last one, to begin with where a good start is known.
_BARRIER_NEAR_OPTIMUM = 10.0
# How far steps go towards a singular V or a weight of zero: further ones lose the path.
_SHARE_OF_WALL = 0.6
# The quadrature in logarithms: the step between points, and how far it reaches beyond either end;
# and the least singular value that it covers, relative to the barrier.
_STEP_OF_QUADRATURE, _BEFORE, _BEYOND, _BESIDE_BARRIER = 1.2, 5.0, 2.0, 1e-2
_TINY = 1e-300
_MOST_STEPS = 100
# The least weight of a round that counts, relative to the largest.
_LEAST_WEIGHT = 1e-18


@dataclasses.dataclass(frozen=True, eq=False)
class MultiplierCone:
    """Which multipliers V there are, as linear forms of free variables z.

    Attributes:
      layout: The classes of rounds.
      rows: (N,) of the entries of V that may be other than zero, rounds by class; the n entries of
        the diagonal are the first.
      columns: (N,), the same for columns.
      spread: (N, m) sparse: V[rows, columns] is ``spread @ z``.
      walls: (q, m) sparse: what is above zero, beside V, is ``walls @ z``.
      costs: (m,): the most that tr(V X) can be is ``costs @ z``.
      may_be_positive: Whether X[i, j] may be above zero for the entries off the diagonal.
      may_be_negative: Whether it may be below zero.
      equal_norms: Whether X[i, i] is the same for all rounds.
    """

    layout: PatternLayout
    rows: IntArray
    columns: IntArray
    spread: scipy.sparse.csr_array
    walls: scipy.sparse.csr_array
    costs: FloatArray
    may_be_positive: bool
    may_be_negative: bool
    equal_norms: bool

    def roots_of_diagonal(self, free: FloatArray) -> FloatArray:
        """Returns (N - n,) roots of V[i, i] V[j, j] for the entries off the diagonal.

        Args:
          free: (m,) z, of which weights alone count.
        """
        num_rounds = self.layout.num_rounds
        diagonal = (self.spread @ free)[:num_rounds]
        rows, columns = self.rows[num_rounds:], self.columns[num_rounds:]
        return np.asarray(np.sqrt(diagonal[rows] * diagonal[columns]))

    @property
    def size(self) -> int:
        """The number of free variables."""
        return len(self.costs)

    def blocks(self, free: FloatArray) -> FloatArray:
        """Returns (b, K, K) blocks of V, ones on the diagonal where no round is.

        Args:
          free: (m,) z.
        """
        layout = self.layout
        blocks = np.tile(np.eye(layout.positions), (layout.separation, 1, 1))
        classes, positions = np.nonzero(layout.exists)
        entries = self.spread @ free
        rows, columns = positions[self.rows], positions[self.columns]
        blocks[classes[self.rows], rows, columns] = entries
        blocks[classes[self.rows], columns, rows] = entries
        return blocks

    def whole(self, blocks: FloatArray) -> FloatArray:
        """Returns an (n, n) block diagonal matrix, rounds by class, from (b, K, K) blocks."""
        return self.layout.times_blocks(np.eye(self.layout.num_rounds), blocks)


@dataclasses.dataclass(frozen=True, eq=False)
class PathPoint:
    """A point near the path.

    Attributes:
      barrier: m.
      row_weights: (r,) w, of the rounds that count; of all rounds the sum is one.
      free: (m,) z, of total one.
      factors: (b, K, K) blocks of L, V = L L^T.
      inverse_factors: Those of L^-1.
      root_sum: f.
      left: (r, r) U.
      values: (r,) singular values s over their sum.
      dual: (n, r) Y.
    """

    barrier: float
    row_weights: FloatArray
    free: FloatArray
    factors: FloatArray
    inverse_factors: FloatArray
    root_sum: float
    left: FloatArray
    values: FloatArray
    dual: FloatArray

    @property
    def estimated_bound(self) -> float:
        """The lower bound on the squared error, up to rounding."""
        return self.root_sum**2


class CentralPath:
    """The path of one workload.

    Attributes:
      cone: The multipliers that there are.
      free_rows: Whether the weights of rounds are free.
    """

    def __init__(
        self,
        workload: FloatArray,
        cone: MultiplierCone,
        row_weights: FloatArray | None,
        relative_gap: float,
    ) -> None:
        """Begins.

        Args:
          workload: A, an (n, n) array.
          cone: The multipliers that there are.
          row_weights: (n,) weights of the rounds, none below zero; None for the maximum.
          relative_gap: The gap that is to be certified.
        """
        num_rounds = len(workload)
        self.cone, self.free_rows = cone, row_weights is None
        row_weights = np.ones(num_rounds) if row_weights is None else row_weights
        # Rounds of next to no weight are left out of the bound.
        counts = row_weights > _LEAST_WEIGHT * np.max(row_weights)
        self._row_weights = row_weights[counts] / np.sum(row_weights)
        self._by_class = workload[np.ix_(counts, cone.layout.order)]
        logarithms = num_rounds + cone.walls.shape[0] + num_rounds * self.free_rows
        self._last_barrier = _LAST_BARRIER * relative_gap / logarithms

    def points(self, point: PathPoint | None = None) -> Iterator[PathPoint]:
        """Yields points, nearer and nearer to the optimum, as far as rounding allows.

        Args:
          point: The first one; None for :meth:`start`.
        """
        point = self.start() if point is None else point
        yield point
        for _ in range(_MOST_STEPS):
            try:
                point = self.after(point)
            except np.linalg.LinAlgError:
                return
            yield point

    def near_optimum(self, row_weights: FloatArray, free: FloatArray) -> PathPoint:
        """Returns the point to begin with where a good one is known.

        Args:
          row_weights: (n,) w.
          free: (m,) z.

        Raises:
          LinAlgError: If V is not positive definite.
        """
        return self.at(_BARRIER_NEAR_OPTIMUM * self._last_barrier, row_weights, free)

    def start(self) -> PathPoint:
        """Returns the point to begin with, V diagonal."""
        cone = self.cone
        # The first variables are weights.
        is_weight = cone.costs > 0.0
        free = is_weight / np.sum(cone.costs)
        barrier = max(_FIRST_BARRIER / cone.layout.num_rounds, self._last_barrier)
        return self.at(barrier, self._row_weights, free)

    def at(self, barrier: float, row_weights: FloatArray, free: FloatArray) -> PathPoint:
        """Returns a point.

        Args:
          barrier: m.
          row_weights: (r,) w, above zero.
          free: (m,) z.

        Raises:
          LinAlgError: If V is not positive definite.
        """
        layout = self.cone.layout
        if self.free_rows:
            row_weights = row_weights / np.sum(row_weights)
        free = free / (self.cone.costs @ free)
        factors = np.linalg.cholesky(self.cone.blocks(free))
        inverse_factors = np.linalg.inv(factors)
        product = layout.times_blocks(weighted(self._by_class, row_weights), factors)
        left, values, right = scipy.linalg.svd(
            product, full_matrices=False, overwrite_a=True, check_finite=False
        )
        root_sum = float(np.sum(values))
        return PathPoint(
            barrier=barrier,
            row_weights=row_weights,
            free=free,
            factors=factors,
            inverse_factors=inverse_factors,
            root_sum=root_sum,
            left=left,
            values=values / root_sum,
            dual=layout.blocks_times(inverse_factors.transpose(0, 2, 1), right.T),
        )

    def bound_from_below(self, point: PathPoint) -> float:
        """Returns the lower bound on the squared error, in spite of rounding.

        Args:
          point: Any.
        """
        product = self.cone.layout.times_blocks(
            weighted(self._by_class, point.row_weights), point.factors
        )
        total = float(self.cone.costs @ point.free)
        if self.free_rows:
            total *= float(np.sum(point.row_weights))
        return matrix_roots.nuclear_norm_from_below(product) ** 2 / total

    def gram_matrix(self, point: PathPoint) -> FloatArray:
        """Returns (n, n) X of a matrix that is feasible once it is scaled.

        Args:
          point: Near the path.
        """
        cone, layout = self.cone, self.cone.layout
        inverses = _inverses(point)
        by_class = (point.dual * point.values) @ point.dual.T
        by_class += point.barrier * cone.whole(inverses)
        num_rounds = len(by_class)
        diagonal = np.diagonal(by_class).copy()
        rows, columns = cone.rows[num_rounds:], cone.columns[num_rounds:]
        entries = by_class[rows, columns]
        allowed = np.clip(
            entries,
            -np.inf if cone.may_be_negative else 0.0,
            np.inf if cone.may_be_positive else 0.0,
        )
        by_class[rows, columns] = by_class[columns, rows] = allowed
        for ends in (rows, columns):
            diagonal += np.bincount(ends, np.abs(entries - allowed), num_rounds)
        if cone.equal_norms:
            by_class /= np.max(diagonal)
            diagonal = np.ones(num_rounds)
        elif layout.positions == layout.most:
            # The diagonal takes the rest of the sensitivity.
            exists = layout.exists
            table = np.zeros(exists.shape)
            table[exists] = diagonal
            sums = np.sum(table, axis=1, keepdims=True)
            table += (np.max(sums) - sums) / np.sum(exists, axis=1, keepdims=True)
            diagonal = table[exists]
        np.fill_diagonal(by_class, diagonal)
        gram = np.empty(by_class.shape)
        gram[np.ix_(layout.order, layout.order)] = by_class
        return gram

    def after(self, point: PathPoint) -> PathPoint:
        """Returns the next point, by a step of Newton's method.

        Args:
          point: Where to step from.

        Raises:
          LinAlgError: If rounding leaves no step.
        """
        cone, num_rounds = self.cone, self.cone.layout.num_rounds
        curvature, slope = self._curvature(point)
        rows = num_rounds if self.free_rows else 0
        # Steps keep both totals.
        totals = np.zeros((len(slope), 1 + self.free_rows))
        totals[:rows, 0], totals[rows:, -1] = point.row_weights[:rows], cone.costs
        scales = 1.0 / np.sqrt(np.diagonal(curvature))
        solved = scales[:, np.newaxis] * scipy.linalg.solve(
            curvature * scales * scales[:, np.newaxis],
            np.column_stack([slope, totals]) * scales[:, np.newaxis],
            assume_a="pos",
            check_finite=False,
        )
        multipliers = np.linalg.solve(totals.T @ solved[:, 1:], totals.T @ solved[:, 0])
        step = solved[:, 0] - solved[:, 1:] @ multipliers
        by_rows, by_free = step[:rows], step[rows:]
        change = cone.blocks(by_free)
        # No round is no change.
        change[~cone.layout.exists] = 0.0
        relative = point.inverse_factors @ change @ point.inverse_factors.transpose(0, 2, 1)
        most = max(
            float(-np.min(np.linalg.eigvalsh(relative))),
            float(-np.min(by_rows, initial=0.0)),
            float(-np.min((cone.walls @ by_free) / (cone.walls @ point.free), initial=0.0)),
        )
        share = min(1.0, _SHARE_OF_WALL / max(most, _TINY))
        row_weights = point.row_weights
        if self.free_rows:
            row_weights = row_weights * (1.0 + share * by_rows)
        barrier = point.barrier
        if float(step @ (curvature @ step)) < _NEAR_PATH * num_rounds * barrier:
            barrier = max(_FALL_OF_BARRIER * barrier, self._last_barrier)
        return self.at(barrier, row_weights, point.free + share * by_free)

    def _curvature(self, point: PathPoint) -> tuple[FloatArray, FloatArray]:
        """Minus the Hessian, and the slope, by relative changes of w, if free, and by z."""
        cone, barrier, values = self.cone, point.barrier, point.values
        num_rounds = len(point.dual)
        rows, columns = cone.rows, cone.columns
        # The diagonal's share of a symmetric change by both triangles.
        halves = np.where(rows == columns, 0.5, 1.0)
        by_entries = np.zeros((len(rows),) * 2)
        between, by_rows = np.zeros((num_rounds, len(rows))), np.zeros((num_rounds,) * 2)
        largest = float(np.max(values))
        least = max(float(np.min(values)), _BESIDE_BARRIER * barrier)
        logs = np.arange(-np.log(largest) - _BEFORE, -np.log(least) + _BEYOND, _STEP_OF_QUADRATURE)
        for x in np.exp(logs):
            scales = values * np.exp(-x * values)
            weight = float(x) * _STEP_OF_QUADRATURE
            scaled = point.dual * scales
            by_entries += weight * _pair_products(scaled @ point.dual.T, rows, columns)
            if self.free_rows:
                mixed = point.left @ scaled.T
                between -= (2.0 * weight) * mixed[:, rows] * mixed[:, columns]
                by_rows += weight * np.square((point.left * scales) @ point.left.T)
        inverse = cone.whole(_inverses(point))
        by_entries += barrier * _pair_products(inverse, rows, columns)
        by_entries *= 2.0 * np.outer(halves, halves)
        gram = (point.dual * values) @ point.dual.T + barrier * inverse
        spread, walls = cone.spread, cone.walls
        slope = spread.T @ (2.0 * halves * gram[rows, columns])
        by_free = spread.T @ (spread.T @ by_entries).T
        if walls.shape[0]:
            relative = scipy.sparse.csr_array(
                walls.multiply((1.0 / (walls @ point.free))[:, np.newaxis])
            )
            slope += barrier * relative.sum(axis=0)
            by_free += barrier * (relative.T @ relative).toarray()
        if not self.free_rows:
            return by_free, slope
        by_rows[np.diag_indices(num_rounds)] += barrier
        of_both = (spread.T @ (between * halves).T).T
        curvature = np.block([[by_rows, of_both], [of_both.T, by_free]])
        roots = np.square(point.left) @ values
        return curvature, np.concatenate([roots + barrier, slope])


def _inverses(point: PathPoint) -> FloatArray:
    """(b, K, K) blocks of V^-1."""
    inverse_factors = point.inverse_factors
    return np.asarray(np.matmul(inverse_factors.transpose(0, 2, 1), inverse_factors))


def _pair_products(matrix: FloatArray, rows: IntArray, columns: IntArray) -> FloatArray:
    """(N, N): M[i, k] M[j, l] + M[i, l] M[j, k] for pairs (i, j) and (k, l)."""
    of_rows, of_columns = matrix[rows], matrix[columns]
    products = of_rows[:, rows] * of_columns[:, columns]
    products += of_rows[:, columns] * of_columns[:, rows]
    return np.asarray(products)
