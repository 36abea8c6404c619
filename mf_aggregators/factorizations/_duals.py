r"""The dual of the least total squared error under (k, b)-participation, and its search.

The problem (BandMF Problem 1; Choquette-Choo et al., multi-epoch MF): minimise
tr(A^T A X^-1) over positive definite X = C^T C with sum_{i, j in p} |X[i, j]| <= 1 for
every pattern p (the squared sensitivity of BandMF Eq. 5).

Patterns are the classes of rounds modulo b: a client that takes part in a round may take part in
every other one of its class. (``optimal`` widens a schema of fewer participations.)

Its dual: for a positive semi-definite V that is zero between classes, with V[i, i] = v_c for all
rounds of class c, |V[i, j]| is at most v_c, so that tr(V X) <= sum_c v_c for every feasible X, and

  tr(A^T A X^-1) >= tr(A^T A X^-1) + tr(V X) - sum_c v_c >= 2 tr((A V A^T)^1/2) - sum_c v_c.

The best multiple of V gives tr((A V A^T)^1/2)^2 / sum_c v_c. The bound is concave in V,
with equality for X V X = A^T A: one square root gives the bound, its gradient and a nearly
feasible X. V is block diagonal over the classes, so that the dual has about n k / 2 variables
instead of the n^2 / 2 of X. At the optimum X[i, j] = 0 for rounds of one class, because V = X^-1
A^T A X^-1 is not singular.

With equal column norms X[i, i] = 1 / k, and V[i, i] is free as well.

V is s_i^1/2 R[i, j] s_j^1/2 with R = L L^T of a lower-triangular L with rows of norm one: no V on
the way is infeasible.

**Its roots.** With V = L L^T, what is needed is the trace of (L^T A^T A L)^1/2 and its blocks for
the classes. Where D = A^-1 has w bands, as for prefix sums and momentum, the matrix is the inverse
of H = L^-1 D D^T L^-T. D D^T joins rounds that are fewer than w apart, which are in neighbouring
classes, or in the last and the first ones. Two classes at a time, one from each end, make H block
tridiagonal, with blocks of 2 (w - 1) K rounds if classes have K rounds. The blocks of H^-1/2 then
take O(n w^2 K^2) operations in place of the n^3 of an eigendecomposition.

**One participation** is k = 1 with classes of one round, and V diagonal: the bound is Eq. 8 of
Denisov et al., and its maximum belongs to the fixed point of their Thm 3.2. If D has two bands, as
for the prefix sum and SGD with learning rates, H itself is tridiagonal: its eigenvectors take
O(n^2) operations (Dhillon's multiple relatively robust representations, LAPACK's stemr). The
singular values of A L are one over those of the bidiagonal L^-1 D, which are eigenvalues of the
tridiagonal matrix of Golub and Kahan of twice the size. The condition number of that is the one of
A, and not its square.

**The central path** is for the least largest, or weighted, error of a round. With weights w on
rounds and multipliers V of patterns, both of total one, the bound is the square of f = tr((W^1/2 A
V A^T W^1/2)^1/2), which is jointly concave in w and V. V is linear in free variables z. Where f is
largest, some of the weights, or V, may be singular. So what is maximised is

  2 log f + m (sum_i log w_i + log det V),

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

**Roots.** For H^-1/2, or its diagonal blocks, the integral x^-1/2 = (2 / pi) int_0^inf dt / (x +
t^2) is summed by the trapezoidal rule, after a change of variables that makes it converge fastest
between two bounds on x (Hale, Higham and Trefethen, *Computing A^alpha, log(A), and related matrix
functions by contour integrals*, 2008, method 3): x^-1/2 is sum_j weights[j] / (x + shifts[j]) to
within a relative error that falls exponentially with the number of shifts, of which 44 suffice for
13 digits and a condition number of 1e10. Each (H + shift I)^-1 takes one elimination from the first
block to the last one, and one way back.
"""

import dataclasses
import functools
from collections.abc import Iterator

import numpy as np
import scipy.linalg
import scipy.special

from mf_aggregators.factorizations.searches import PatternLayout, weighted, weighted_inverse
from mf_aggregators.kernel.numbers import FloatArray, IntArray
from mf_aggregators.linear_algebra import nuclear_norm_from_below

# The fewest blocks, and the fewest rounds for classes of one round, with which block tridiagonal
# roots are faster than one large matrix.
_LEAST_BLOCKS, _LEAST_SINGLE_ROUNDS = 24, 512
# The largest condition number of H for its roots: rounding changes eigenvalues by a share of the
# largest, and the roots depend on the least.
_LARGEST_CONDITION = 1e13
# The barrier m of the central path: its first value is this share over n; it falls by a factor once
# steps are short; and its last value is this share of the gap that is to be certified, over the
# number of logarithms.
_FIRST_BARRIER, _FALL_OF_BARRIER, _LAST_BARRIER = 0.1, 0.2, 0.3
# A point counts as near the central path if its step's squared length, over n times the barrier, is
# below this.
_NEAR_PATH = 0.1
# The first barrier, relative to the last one, if a good start is known.
_BARRIER_NEAR_OPTIMUM = 10.0
# A step goes at most this share of the way to a singular V or to a weight of zero: longer steps
# lose the path.
_SHARE_OF_WALL = 0.6
# The quadrature over the logarithm of x: the step between points, how far it reaches beyond both
# ends, and the least singular value that it covers, relative to the barrier.
_STEP_OF_QUADRATURE, _BEFORE, _BEYOND, _BESIDE_BARRIER = 1.2, 5.0, 2.0, 1e-2
_TINY = 1e-300
_MOST_STEPS = 100
# Rounds with a smaller weight than this, relative to the largest, are left out of the bound.
_LEAST_WEIGHT = 1e-18
# The step and the limit of the number of shifts in a root, the largest condition number, the number
# of points at which errors are measured, and the accepted error.
_MORE_SHIFTS = 4
_MOST_SHIFTS = 100
_LARGEST_CONDITION_OF_ROOTS = 1e15
_POINTS = 400
_RELATIVE_ERROR = 1e-13
# Elliptic functions are sums of hyperbolic ones over these images; further images are below
# rounding.
_IMAGES = np.arange(-16, 17)


@dataclasses.dataclass(frozen=True, eq=False)
class _PatternRoot:
    """The root R = (L^T A^T A L)^1/2 of the dual, as far as it was computed.

    Attributes:
      trace: The trace of R.
      blocks: (b, K, K) blocks of R for the classes; entries for missing rounds are not defined.
      half: (n, n) Y with Y Y^T = R, rounds by class; None if it was not computed.
      rows: (n,) diagonal of (A L L^T A^T)^1/2; None if it was not computed.
    """

    trace: float
    blocks: FloatArray
    half: FloatArray | None
    rows: FloatArray | None = None


class _PatternSpectra:
    """Computes the dual's roots R for one workload, by dense matrices, for any structure.

    Attributes:
      has_cheap_roots: Whether the blocks of a root take much less time than the whole root.
    """

    has_cheap_roots = False

    def __init__(self, workload: FloatArray, layout: PatternLayout) -> None:
        """Arranges the columns of A by class of rounds.

        Args:
          workload: A, an (n, n) lower-triangular array.
          layout: The classes.
        """
        self._layout = layout
        self._by_class = workload[:, layout.order]

    @functools.cached_property
    def _gram(self) -> FloatArray:
        """The Gram matrix A^T A, rounds by class."""
        return np.asarray(self._by_class.T @ self._by_class)

    def root(self, factors: FloatArray, row_weights: FloatArray | None = None) -> _PatternRoot:
        """Returns the root R for diag(w)^1/2 A, by one eigendecomposition.

        Args:
          factors: (b, K, K) lower-triangular blocks of L, with the identity's entries for missing
            rounds.
          row_weights: (n,) weights w of the rounds, above zero; None for ones, and then ``rows`` is
            None.
        """
        roots, half, left = self._decomposed(factors, row_weights)
        rows = None if left is None else np.square(left) @ roots
        half *= np.sqrt(roots)
        vectors = self._layout.rows_by_class(half)
        if self._layout.positions == 1:
            blocks = np.einsum("bij,bij->bi", vectors, vectors)[:, np.newaxis]
        else:
            blocks = np.matmul(vectors, vectors.transpose(0, 2, 1))
        return _PatternRoot(float(np.sum(roots)), blocks, half, rows)

    def _decomposed(
        self, factors: FloatArray, row_weights: FloatArray | None
    ) -> tuple[FloatArray, FloatArray, FloatArray | None]:
        """Returns singular values and right vectors of diag(w)^1/2 A L; with w, left ones too."""
        if row_weights is None:
            left = self._layout.blocks_times(factors.transpose(0, 2, 1), self._gram)
            gram = self._layout.times_blocks(left, factors)
        else:
            product = self._product(factors, row_weights)
            gram = product.T @ product
        values, vectors = scipy.linalg.eigh(
            gram, driver="evd", overwrite_a=True, check_finite=False
        )
        roots = np.sqrt(np.maximum(values, np.finfo(np.float64).eps * values[-1]))
        return roots, vectors, None if row_weights is None else product @ vectors / roots

    def _product(self, factors: FloatArray, row_weights: FloatArray | None) -> FloatArray:
        """Returns the (n, n) matrix diag(w)^1/2 A L, with its columns by class."""
        return self._layout.times_blocks(weighted(self._by_class, row_weights), factors)

    def nuclear_norm(self, factors: FloatArray, row_weights: FloatArray | None) -> float:
        """Returns a lower bound on the nuclear norm of diag(w)^1/2 A L, rounding included.

        Args:
          factors: L, as for :meth:`root`.
          row_weights: The weights, as for :meth:`root`.
        """
        return nuclear_norm_from_below(self._product(factors, row_weights))

    def whole(self, root: _PatternRoot, factors: FloatArray) -> FloatArray:
        """Returns the whole (n, n) matrix R, rounds by class.

        Args:
          root: The root as far as it was computed.
          factors: The L that the root belongs to.
        """
        assert root.half is not None
        return root.half @ root.half.T


class _TridiagonalSpectra(_PatternSpectra):
    """Roots of the dual for one participation, if A^-1 has one or two bands: H is tridiagonal."""

    def __init__(
        self, workload: FloatArray, inverse_bands: FloatArray, layout: PatternLayout
    ) -> None:
        """Keeps the bands of D = A^-1.

        Args:
          workload: A, an (n, n) lower-triangular array.
          inverse_bands: (n, 2), or (n, 1), of D = A^-1.
          layout: The classes, each of one round.
        """
        super().__init__(workload, layout)
        self._bands = np.zeros((len(workload), 2))
        self._bands[:, : inverse_bands.shape[1]] = inverse_bands

    def _scaled(
        self, factors: FloatArray, row_weights: FloatArray | None
    ) -> tuple[FloatArray, FloatArray]:
        """Returns the diagonal of L^-1 D, and the entries below the diagonal."""
        bands = weighted_inverse(self._bands, row_weights) / factors[:, 0]
        return bands[:, 0], bands[1:, 1]

    def _decomposed(
        self, factors: FloatArray, row_weights: FloatArray | None
    ) -> tuple[FloatArray, FloatArray, FloatArray | None]:
        on, below = self._scaled(factors, row_weights)
        diagonal = np.square(on)
        diagonal[1:] += np.square(below)
        inverses, vectors = scipy.linalg.eigh_tridiagonal(
            diagonal, on[:-1] * below, check_finite=False
        )
        floor = np.finfo(np.float64).tiny / np.finfo(np.float64).eps
        roots = 1.0 / np.sqrt(np.maximum(inverses, floor))
        if row_weights is None:
            return roots, vectors, None
        left = vectors * on[:, np.newaxis]
        left[:-1] += vectors[1:] * below[:, np.newaxis]
        return roots, vectors, left * roots

    def nuclear_norm(self, factors: FloatArray, row_weights: FloatArray | None) -> float:
        """Returns a lower bound on the nuclear norm of diag(w)^1/2 A L."""
        on, below = self._scaled(factors, row_weights)
        size, off_diagonal = 2 * len(on), np.empty(2 * len(on) - 1)
        off_diagonal[0::2], off_diagonal[1::2] = np.abs(on), np.abs(below)
        values = scipy.linalg.eigvalsh_tridiagonal(
            np.zeros(size), off_diagonal, check_finite=False, lapack_driver="sterf"
        )[len(on) :]
        rounding = size * np.finfo(np.float64).eps * values[-1]
        return float(np.sum(1.0 / (np.maximum(values, 0.0) + rounding)))


class _BandedPatternSpectra(_PatternSpectra):
    """Roots of the dual for a workload with an inverse of few bands: H is block tridiagonal."""

    has_cheap_roots = True

    def __init__(
        self, workload: FloatArray, inverse_bands: FloatArray, layout: PatternLayout
    ) -> None:
        """Computes the blocks of D D^T between classes, and folds classes into pairs.

        Args:
          workload: A, an (n, n) lower-triangular array.
          inverse_bands: (n, w) bands of D = A^-1, as ``Workload.inverse_bands`` returns them.
          layout: The classes, of which there are enough for :meth:`is_faster`.
        """
        super().__init__(workload, layout)
        columns = layout.rows_by_class(workload.T[layout.order])
        self._gram_blocks = np.matmul(columns, columns.transpose(0, 2, 1))
        self._joints = _joints(inverse_bands, layout)
        # One block contains the classes c and b - 1 - c.
        classes = np.arange(layout.separation)
        folded = np.minimum(classes, layout.separation - 1 - classes)
        is_later = classes > layout.separation - 1 - classes
        block, within = np.divmod(folded, len(self._joints) - 1)
        self._block, self._place = block, 2 * within + is_later

    @staticmethod
    def is_faster(num_inverse_bands: int, layout: PatternLayout) -> bool:
        """Returns whether roots by blocks are faster than roots by one large matrix."""
        reach = num_inverse_bands - 1
        least = max(2 * reach * _LEAST_BLOCKS, _LEAST_SINGLE_ROUNDS if layout.positions == 1 else 0)
        return reach > 0 and layout.separation >= least

    def root(self, factors: FloatArray, row_weights: FloatArray | None = None) -> _PatternRoot:
        """Returns the root by blocks, or by a dense matrix with weights or an ill-conditioned H."""
        if row_weights is not None:
            return super().root(factors, row_weights)
        diagonal, above, least = self._blocks(factors)
        # Written so that NaN counts as ill-conditioned.
        if not _largest_row_sum(diagonal, above) <= _LARGEST_CONDITION * least:
            return super().root(factors)
        folded = _inverse_root_blocks(diagonal, above, least)
        count, positions = len(folded), self._layout.positions
        by_place = folded.reshape(count, -1, positions, folded.shape[1] // positions, positions)
        blocks = by_place[self._block, self._place, :, self._place]
        diagonals = np.diagonal(blocks, axis1=1, axis2=2)
        return _PatternRoot(float(np.sum(diagonals[self._layout.exists])), blocks, None)

    def whole(self, root: _PatternRoot, factors: FloatArray) -> FloatArray:
        """Returns the whole root R."""
        if root.half is not None:
            return super().whole(root, factors)
        diagonal, above, least = self._blocks(factors)
        folded = _inverse_root(diagonal, above, least)
        positions = self._layout.positions
        of_class = self._block * diagonal.shape[1] + self._place * positions
        rows = (of_class[:, np.newaxis] + np.arange(positions))[self._layout.exists]
        return folded[np.ix_(rows, rows)]

    def _blocks(self, factors: FloatArray) -> tuple[FloatArray, FloatArray, float]:
        """Returns H as diagonal blocks and blocks to their right, and a bound on its eigenvalues.

        The blocks have shapes (B, s, s) and (B - 1, s, s). The lower bound on the least eigenvalue
        is the inverse of the trace of L^T A^T A L.
        """
        least = 1.0 / float(np.sum(np.matmul(self._gram_blocks, factors) * factors))
        inverse_factors = np.linalg.inv(factors)
        separation, positions = self._layout.separation, self._layout.positions
        num_blocks, places = int(np.max(self._block)) + 1, 2 * (len(self._joints) - 1)
        shape = (num_blocks, places, places, positions, positions)
        diagonal, above = np.zeros(shape), np.zeros((num_blocks - 1, *shape[1:]))
        # A block with fewer classes than places is filled up with rows of the identity.
        diagonal[:, np.arange(places), np.arange(places)] = np.eye(positions)
        classes = np.arange(separation)
        for lag, joints in enumerate(self._joints):
            later = (classes + lag) % separation
            joined = inverse_factors @ joints @ inverse_factors[later].transpose(0, 2, 1)
            for first, second, blocks in (
                (classes, later, joined),
                (later, classes, joined.transpose(0, 2, 1)),
            ):
                places_of_both = self._place[first], self._place[second]
                step = self._block[second] - self._block[first]
                for target, distance in ((diagonal, 0), (above, 1)):
                    here = step == distance
                    at = self._block[first][here], *(place[here] for place in places_of_both)
                    target[at] = blocks[here]
        size = places * positions
        return (
            diagonal.transpose(0, 1, 3, 2, 4).reshape(-1, size, size),
            above.transpose(0, 1, 3, 2, 4).reshape(-1, size, size),
            least,
        )


def _spectra_of(
    workload: FloatArray, inverse_bands: FloatArray | None, layout: PatternLayout
) -> _PatternSpectra:
    """Returns the fastest way to compute roots for a workload.

    Args:
      workload: A, an (n, n) lower-triangular array.
      inverse_bands: (n, w) bands of A^-1; None if it has many.
      layout: The classes of rounds.
    """
    if inverse_bands is None:
        return _PatternSpectra(workload, layout)
    if layout.positions == 1 and inverse_bands.shape[1] <= 2:
        return _TridiagonalSpectra(workload, inverse_bands, layout)
    if _BandedPatternSpectra.is_faster(inverse_bands.shape[1], layout):
        return _BandedPatternSpectra(workload, inverse_bands, layout)
    return _PatternSpectra(workload, layout)


def _joints(inverse_bands: FloatArray, layout: PatternLayout) -> FloatArray:
    """Returns the (w, b, K, K) blocks of D D^T between class c and the class t later.

    Rows of missing rounds are rows of the identity.
    """
    num_rounds, width = inverse_bands.shape
    separation, positions = layout.separation, layout.positions
    joints = np.zeros((width, separation, positions, positions))
    rounds, exists = layout.rounds, layout.exists
    for lag in range(width):
        # The products are (D D^T)[i, i + lag], summed over the columns in which both rows have
        # entries.
        products = np.zeros(num_rounds)
        later = num_rounds - lag
        for t in range(width - lag):
            products[:later] += inverse_bands[:later, t] * inverse_bands[lag:, t + lag]
        classes, places = np.nonzero(exists & (rounds + lag < num_rounds))
        # The class after the last one is the first class, one position later.
        later_places = places + (classes + lag) // separation
        joints[lag, classes, places, later_places] = products[rounds[classes, places]]
    classes, places = np.nonzero(~exists)
    joints[0, classes, places, places] = 1.0
    return joints


class _MultiplierCone:
    """The multipliers V as a linear function of free variables z: weights, then other entries.

    Attributes:
      layout: The classes of rounds.
      equal_norms: Whether X[i, i] is the same for all rounds. If it is, each round has a weight
        V[i, i]; otherwise each class has one.
      rows: (N,) row indices of the entries of V that may be other than zero, rounds by class; the n
        entries of the diagonal come first.
      columns: (N,) column indices of these entries.
      num_weights: The number of weights.
      cost_of_weight: tr(V X) is at most the sum of the weights times this number.
      costs: (m,): tr(V X) is at most ``costs @ z``.
    """

    def __init__(self, layout: PatternLayout, equal_norms: bool) -> None:
        """Lists the entries of V that may be other than zero.

        Args:
          layout: The classes.
          equal_norms: Whether columns have equal norms.
        """
        self.layout, self.equal_norms = layout, equal_norms
        exists, diagonal = layout.exists, np.arange(layout.num_rounds)
        by_class = np.full(exists.shape, -1)
        by_class[exists] = diagonal
        pairs = [by_class[:, ends] for ends in np.tril_indices(layout.positions, -1)]
        both = (pairs[0] >= 0) & (pairs[1] >= 0)
        self.rows, self.columns = (np.append(diagonal, ends[both]) for ends in pairs)
        # The rounds of a class are adjacent in this order, so a class begins at its first round.
        self._starts = diagonal if equal_norms else by_class[:, 0]
        self.num_weights = len(self._starts)
        self.cost_of_weight = 1.0 / layout.positions if equal_norms else 1.0
        self.costs = np.zeros(self.num_weights + len(self.rows) - len(diagonal))
        self.costs[: self.num_weights] = self.cost_of_weight

    def entries(self, free: FloatArray) -> FloatArray:
        """Returns the (N,) listed entries of V.

        Args:
          free: (m,) z, the free variables.
        """
        sizes = np.diff(self._starts, append=self.layout.num_rounds)
        diagonal = np.repeat(free[: self.num_weights], sizes)
        return np.concatenate([diagonal, free[self.num_weights :]])

    def gathered(self, slopes: FloatArray) -> FloatArray:
        """Returns (m, ...) slopes by z from slopes by entries: the adjoint of :meth:`entries`.

        Args:
          slopes: (N, ...) slopes by the entries.
        """
        num_rounds = self.layout.num_rounds
        by_weights = np.add.reduceat(slopes[:num_rounds], self._starts)
        return np.concatenate([by_weights, slopes[num_rounds:]])

    def roots_of_diagonal(self, free: FloatArray) -> FloatArray:
        """Returns (N - n,) roots of V[i, i] V[j, j], for the entries of V off the diagonal.

        Args:
          free: (m,) z, of which only the weights are used.
        """
        num_rounds = self.layout.num_rounds
        diagonal = self.entries(free)[:num_rounds]
        rows, columns = self.rows[num_rounds:], self.columns[num_rounds:]
        return np.asarray(np.sqrt(diagonal[rows] * diagonal[columns]))

    def blocks(self, free: FloatArray) -> FloatArray:
        """Returns (b, K, K) blocks of V, with ones on the diagonal for missing rounds.

        Args:
          free: (m,) z, the free variables.
        """
        layout = self.layout
        blocks = np.tile(np.eye(layout.positions), (layout.separation, 1, 1))
        classes, positions = np.nonzero(layout.exists)
        entries, classes = self.entries(free), classes[self.rows]
        rows, columns = positions[self.rows], positions[self.columns]
        blocks[classes, rows, columns] = blocks[classes, columns, rows] = entries
        return blocks

    def whole(self, blocks: FloatArray) -> FloatArray:
        """Returns an (n, n) block diagonal matrix, rounds by class, from (b, K, K) blocks."""
        return self.layout.times_blocks(np.eye(self.layout.num_rounds), blocks)


@dataclasses.dataclass(frozen=True, eq=False)
class Evaluation:
    """The dual bound at one V = L L^T, with its gradient.

    Attributes:
      estimated_bound: The lower bound on the squared error, which rounding may have raised.
      gram_blocks: (b, K, K) blocks of X for the classes; entries for missing rounds are not
        defined.
      factors: (b, K, K) blocks of L.
      root: (L^T A^T A L)^1/2, as far as it was computed.
      weights: (b, 1) weights of classes, or (b, K) of positions.
      correlations: (b, pairs) entries V[i, j] / (V[i, i] V[j, j])^1/2.
      row_weights: (n,) weights w of the rounds, for the maximum; None for the mean.
    """

    estimated_bound: float
    gram_blocks: FloatArray
    factors: FloatArray
    root: _PatternRoot
    weights: FloatArray
    correlations: FloatArray
    row_weights: FloatArray | None = None

    @property
    def distance(self) -> float:
        """A measure of how far X is from feasible, of the order of the gap for one participation.

        It is the mean squared deviation of diag X from one. For the largest error, half of the
        excess of the largest error over the weighted mean of the errors is added.
        """
        weights, trace = self.weights[:, 0], self.root.trace
        deviations = self.gram_blocks[:, 0, 0] * (np.sum(weights) / trace) - 1.0
        distance = float(np.average(np.square(deviations), weights=weights))
        if self.row_weights is not None and self.root.rows is not None:
            errors = self.root.rows / self.row_weights * (np.sum(self.row_weights) / trace)
            distance += 0.5 * (float(np.max(errors)) - 1.0)
        return distance


class MultiEpochDual:
    """The dual bound on the squared error of one workload, for matrices with given classes.

    Attributes:
      cone: V as a function of its weights and entries off the diagonal.
      weights_mask: Which weights exist, (b, 1) of classes or, with equal column norms, (b, K) of
        positions.
      pairs: Rows and columns, each (pairs,), of the pairs of positions of a class.
      pair_exists: (b, pairs): whether both positions of a pair are rounds.
      has_cheap_roots: Whether an evaluation takes much less time than a whole matrix X.
    """

    def __init__(
        self,
        workload: FloatArray,
        inverse_bands: FloatArray | None,
        layout: PatternLayout,
        *,
        equal_column_norms: bool,
    ) -> None:
        """Prepares the computation of roots for a workload.

        Args:
          workload: A, an (n, n) lower-triangular array.
          inverse_bands: The (n, w) bands of A^-1; None if it has many.
          layout: The classes of rounds.
          equal_column_norms: Whether columns of C have equal norms.
        """
        self._layout = layout
        self.cone = _MultiplierCone(layout, equal_column_norms)
        exists = layout.exists
        self.weights_mask = exists if equal_column_norms else exists[:, :1]
        self.pairs = np.tril_indices(layout.positions, -1)
        self.pair_exists = exists[:, self.pairs[0]] & exists[:, self.pairs[1]]
        self._spectra = _spectra_of(workload, inverse_bands, layout)
        self.has_cheap_roots = self._spectra.has_cheap_roots

    def _correlation_blocks(self, correlations: FloatArray) -> FloatArray:
        """Returns (b, K, K) blocks of the correlation matrix R from its (b, pairs) entries."""
        rows, columns = self.pairs
        blocks = np.tile(np.eye(self._layout.positions), (len(correlations), 1, 1))
        blocks[:, rows, columns] = blocks[:, columns, rows] = correlations
        return blocks

    def _roots(self, weights: FloatArray) -> FloatArray:
        """Returns (b, K) roots of the diagonal of V; ones for missing rounds."""
        return np.where(self._layout.exists, np.sqrt(weights), 1.0)

    def correlations(self, rows: FloatArray) -> FloatArray:
        """Returns (b, pairs) entries of the correlation matrix R = L L^T."""
        correlations = np.matmul(rows, rows.transpose(0, 2, 1))
        return np.asarray(correlations[:, self.pairs[0], self.pairs[1]])

    def factors(self, base: FloatArray, entries: FloatArray) -> FloatArray:
        """Returns (b, K, K) L_0 (I + E) from (b, pairs) entries of E, before rows are scaled."""
        factors = np.tile(np.eye(self._layout.positions), (len(entries), 1, 1))
        factors[:, self.pairs[0], self.pairs[1]] = entries
        return np.asarray(np.matmul(base, factors))

    def at(
        self, weights: FloatArray, correlations: FloatArray, row_weights: FloatArray | None = None
    ) -> Evaluation:
        """Returns the bound at a V and its gradient by V: the blocks of X with X V X = A^T A.

        If there are weights on rows, the bound is that of diag(w)^1/2 A divided by the sum of w.
        """
        roots = self._roots(weights)
        multipliers = self._correlation_blocks(correlations) * roots[:, np.newaxis]
        factors = np.linalg.cholesky(multipliers * roots[:, :, np.newaxis])
        # With V = L L^T, the trace of R = (L^T A^T A L)^1/2 is that of (A V A^T)^1/2.
        root = self._spectra.root(factors, row_weights)
        # The blocks of X are those of L^-T R L^-1.
        inverse_factors = np.linalg.inv(factors)
        gram_blocks = np.matmul(
            np.matmul(inverse_factors.transpose(0, 2, 1), root.blocks), inverse_factors
        )
        return Evaluation(
            estimated_bound=root.trace**2 / self._total(weights, row_weights),
            gram_blocks=gram_blocks,
            factors=factors,
            root=root,
            weights=weights,
            correlations=correlations,
            row_weights=row_weights,
        )

    def _total(self, weights: FloatArray, row_weights: FloatArray | None) -> float:
        """Returns an upper bound on tr(V X), times the sum of the row weights w."""
        total = self.cone.cost_of_weight * float(np.sum(weights))
        return total * (1.0 if row_weights is None else float(np.sum(row_weights)))

    def bound_from_below(self, evaluation: Evaluation) -> float:
        """Returns a lower bound on the squared error, rounding included, by singular values."""
        norm = self._spectra.nuclear_norm(evaluation.factors, evaluation.row_weights)
        return norm**2 / self._total(evaluation.weights, evaluation.row_weights)

    def by_weights(self, evaluation: Evaluation) -> FloatArray:
        """Returns the derivative of 2 tr(R) by the weights."""
        exists, roots = self._layout.exists, self._roots(evaluation.weights)
        both = exists[:, np.newaxis] & exists[:, :, np.newaxis]
        slopes = evaluation.gram_blocks * self._correlation_blocks(evaluation.correlations)
        # Since V[i, j] = R[i, j] (s_i s_j)^1/2, half of each pair's slope belongs to each of its
        # rounds.
        by_diagonal = np.sum(np.where(both, slopes, 0.0) * roots[:, np.newaxis], axis=2) / roots
        if self.cone.equal_norms:
            return np.asarray(by_diagonal)
        return np.asarray(np.sum(by_diagonal, axis=1, keepdims=True))

    def by_correlations(self, evaluation: Evaluation) -> FloatArray:
        """Returns the derivative of 2 tr(R) by the correlations, (b, pairs)."""
        rows, columns = self.pairs
        roots = self._roots(evaluation.weights)
        slopes = evaluation.gram_blocks[:, rows, columns] * roots[:, rows] * roots[:, columns]
        return np.asarray(2.0 * slopes)

    def by_entries(
        self, base: FloatArray, slope: FloatArray, rows: FloatArray, norms: FloatArray
    ) -> FloatArray:
        """Returns the derivative by the entries of E, from the derivative by the correlations."""
        symmetric = np.zeros_like(rows)
        symmetric[:, self.pairs[0], self.pairs[1]] = slope
        symmetric += symmetric.transpose(0, 2, 1)
        by_rows = np.matmul(symmetric, rows)
        by_rows -= rows * np.sum(by_rows * rows, axis=2, keepdims=True)
        by_rows = np.matmul(base.transpose(0, 2, 1), by_rows / norms)
        return np.where(self.pair_exists, by_rows[:, self.pairs[0], self.pairs[1]], 0.0)

    def gram_matrix(self, evaluation: Evaluation, *, by_class: bool = True) -> FloatArray:
        """Returns X in the order of rounds, with zeros between rounds of one class.

        It is feasible once it is scaled. With ``by_class``, rounds are divided by the sums of their
        classes first.
        """
        layout = self._layout
        scaled = np.linalg.inv(evaluation.factors)
        if by_class:
            exists = layout.exists[:, np.newaxis] & layout.exists[:, :, np.newaxis]
            sums = np.sum(np.abs(evaluation.gram_blocks), axis=(1, 2), where=exists)
            scaled /= np.sqrt(sums)[:, np.newaxis, np.newaxis]
        root = self._spectra.whole(evaluation.root, evaluation.factors)
        product = layout.times_blocks(layout.blocks_times(scaled.transpose(0, 2, 1), root), scaled)
        gram = np.empty(product.shape)
        gram[np.ix_(layout.order, layout.order)] = product
        classes, pairs = np.nonzero(self.pair_exists)
        rows, columns = (layout.rounds[classes, ends[pairs]] for ends in self.pairs)
        gram[rows, columns] = gram[columns, rows] = 0.0
        return gram


@dataclasses.dataclass(frozen=True, eq=False)
class PathPoint:
    """A point near the central path: weights w, multipliers V and a singular value decomposition.

    Attributes:
      barrier: The barrier m.
      row_weights: (r,) weights w of the rounds that count; over all rounds the sum is one.
      free: (m,) z, of total one.
      factors: (b, K, K) blocks of L, V = L L^T.
      inverse_factors: (b, K, K) blocks of L^-1.
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
        """The lower bound on the squared error, which rounding may have raised."""
        return self.root_sum**2


class CentralPath:
    """Follows the central path of one workload to the optimum of the dual.

    Attributes:
      cone: The multipliers V as a function of free variables.
      free_rows: Whether the weights of rounds are free.
    """

    def __init__(
        self,
        workload: FloatArray,
        cone: _MultiplierCone,
        row_weights: FloatArray | None,
        relative_gap: float,
    ) -> None:
        """Prepares the path.

        Args:
          workload: A, an (n, n) array.
          cone: The multipliers V as a function of free variables.
          row_weights: (n,) weights of the rounds, not negative; None for the maximum.
          relative_gap: The gap that is to be certified.
        """
        num_rounds = len(workload)
        self.cone, self.free_rows = cone, row_weights is None
        row_weights = np.ones(num_rounds) if row_weights is None else row_weights
        # Rounds of negligible weight are left out of the bound.
        counts = row_weights > _LEAST_WEIGHT * np.max(row_weights)
        self._row_weights = row_weights[counts] / np.sum(row_weights)
        self._by_class = workload[np.ix_(counts, cone.layout.order)]
        logarithms = num_rounds + num_rounds * self.free_rows
        self._last_barrier = _LAST_BARRIER * relative_gap / logarithms

    def points(self, point: PathPoint | None = None) -> Iterator[PathPoint]:
        """Yields points of the path that approach the optimum, until rounding stops the steps.

        Args:
          point: The first point; None for that of :meth:`start`.
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
        """Returns the first point of the path from a start that is known to be good.

        Args:
          row_weights: (n,) w.
          free: (m,) z.

        Raises:
          LinAlgError: If V is not positive definite.
        """
        return self.at(_BARRIER_NEAR_OPTIMUM * self._last_barrier, row_weights, free)

    def start(self) -> PathPoint:
        """Returns the usual first point of the path, at which V is diagonal."""
        cone = self.cone
        free = (cone.costs > 0.0) / np.sum(cone.costs)
        barrier = max(_FIRST_BARRIER / cone.layout.num_rounds, self._last_barrier)
        return self.at(barrier, self._row_weights, free)

    def at(self, barrier: float, row_weights: FloatArray, free: FloatArray) -> PathPoint:
        """Returns the point with given barrier, weights of rounds and free variables.

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
        """Returns a lower bound on the squared error at a point, rounding included.

        Args:
          point: Any point.
        """
        product = self.cone.layout.times_blocks(
            weighted(self._by_class, point.row_weights), point.factors
        )
        total = float(self.cone.costs @ point.free)
        if self.free_rows:
            total *= float(np.sum(point.row_weights))
        return nuclear_norm_from_below(product) ** 2 / total

    def gram_matrix(self, point: PathPoint) -> FloatArray:
        """Returns the (n, n) matrix X of a point, which is feasible once it is scaled.

        Args:
          point: A point near the path.
        """
        cone, layout = self.cone, self.cone.layout
        inverses = _inverses(point)
        by_class = (point.dual * point.values) @ point.dual.T
        by_class += point.barrier * cone.whole(inverses)
        num_rounds = len(by_class)
        diagonal = np.diagonal(by_class).copy()
        rows, columns = cone.rows[num_rounds:], cone.columns[num_rounds:]
        magnitudes = np.abs(by_class[rows, columns])
        by_class[rows, columns] = by_class[columns, rows] = 0.0
        for ends in (rows, columns):
            diagonal += np.bincount(ends, magnitudes, num_rounds)
        if cone.equal_norms:
            by_class /= np.max(diagonal)
            diagonal = np.ones(num_rounds)
        else:
            # The diagonal gets the part of the sensitivity that is left over.
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
        """Returns the point after one step of Newton's method.

        Args:
          point: The point to step from.

        Raises:
          LinAlgError: If rounding leaves no step.
        """
        cone, num_rounds = self.cone, self.cone.layout.num_rounds
        curvature, slope = self._curvature(point)
        rows = num_rounds if self.free_rows else 0
        # Steps keep the totals of w and of z.
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
        # Missing rounds do not change.
        change[~cone.layout.exists] = 0.0
        relative = point.inverse_factors @ change @ point.inverse_factors.transpose(0, 2, 1)
        most = max(
            float(-np.min(np.linalg.eigvalsh(relative))),
            float(-np.min(by_rows, initial=0.0)),
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
        """Returns the negated Hessian and the slope, by relative changes of free w, and by z."""
        cone, barrier, values = self.cone, point.barrier, point.values
        num_rounds = len(point.dual)
        rows, columns = cone.rows, cone.columns
        # A diagonal entry stands for both triangles of a symmetric change, so it counts half.
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
        slope = cone.gathered(2.0 * halves * gram[rows, columns])
        by_free = cone.gathered(cone.gathered(by_entries).T)
        if not self.free_rows:
            return by_free, slope
        by_rows[np.diag_indices(num_rounds)] += barrier
        of_both = cone.gathered((between * halves).T).T
        curvature = np.block([[by_rows, of_both], [of_both.T, by_free]])
        roots = np.square(point.left) @ values
        return curvature, np.concatenate([roots + barrier, slope])


def _inverses(point: PathPoint) -> FloatArray:
    """Returns (b, K, K) blocks of V^-1."""
    inverse_factors = point.inverse_factors
    return np.asarray(np.matmul(inverse_factors.transpose(0, 2, 1), inverse_factors))


def _pair_products(matrix: FloatArray, rows: IntArray, columns: IntArray) -> FloatArray:
    """Returns (N, N) M[i, k] M[j, l] + M[i, l] M[j, k] for pairs (i, j) and (k, l)."""
    of_rows, of_columns = matrix[rows], matrix[columns]
    products = of_rows[:, rows] * of_columns[:, columns]
    products += of_rows[:, columns] * of_columns[:, rows]
    return np.asarray(products)


def _inverse_square_root(least: float, largest: float) -> tuple[FloatArray, FloatArray]:
    """Returns (m,) shifts and weights of a sum of fractions that approximates x^-1/2.

    The sum of weights[j] / (x + shifts[j]) has the fewest terms with a relative error of at most
    1e-13 for x between two bounds; near the limit of the condition number, 1e15, rounding may leave
    an error of 1e-12.

    Raises:
      ValueError: If the bounds are not positive, or too far apart.
    """
    if not (0.0 < least <= largest < np.inf and largest <= _LARGEST_CONDITION_OF_ROOTS * least):
        raise ValueError(
            "the bounds must be positive, finite and by at most a factor of "
            f"{_LARGEST_CONDITION_OF_ROOTS:g} apart, found {least} and {largest}."
        )
    # With equal bounds, a quarter period of the elliptic functions (``ellipk(1)``) is infinite. A
    # smaller ratio fits a wider range.
    ratio = min(least / largest, 0.5)
    points = np.geomspace(least, largest, _POINTS)
    quarter, dual_quarter = scipy.special.ellipkm1(ratio), scipy.special.ellipk(ratio)
    scale = np.pi / (2.0 * dual_quarter)
    for count in range(_MORE_SHIFTS, _MOST_SHIFTS + 1, _MORE_SHIFTS):
        u = (np.arange(count) + 0.5) * quarter / count
        terms = scale / np.cosh(scale * (u[:, np.newaxis] - 2.0 * quarter * _IMAGES))
        # These are Jacobi's functions of parameter 1 - ratio, for which the series by the nome is
        # slow.
        dn = np.sum(terms, axis=1)
        cn = np.sum(terms * (-1.0) ** _IMAGES, axis=1) / np.sqrt(1.0 - ratio)
        shifts = least * (1.0 / cn**2 - 1.0)
        weights = 2.0 * quarter * np.sqrt(least) / (np.pi * count) * dn / cn**2
        found = np.sum(weights / (points[:, np.newaxis] + shifts), axis=1)
        if np.max(np.abs(found * np.sqrt(points) - 1.0)) <= _RELATIVE_ERROR:
            break
    return shifts, weights


def _eliminated(
    diagonal: FloatArray, above: FloatArray, least: float
) -> tuple[FloatArray, FloatArray]:
    """Returns weights of shifts, and inverse Schur complements (B, m, s, s) of H + shift I."""
    shifts, weights = _inverse_square_root(least, max(_largest_row_sum(diagonal, above), least))
    shifted = shifts[:, np.newaxis, np.newaxis] * np.eye(diagonal.shape[1])
    inverses = np.empty((len(diagonal), *shifted.shape))
    inverses[0] = np.linalg.inv(diagonal[0] + shifted)
    for k in range(1, len(diagonal)):
        carried = above[k - 1].T @ (inverses[k - 1] @ above[k - 1])
        inverses[k] = np.linalg.inv(diagonal[k] + shifted - carried)
    return weights, inverses


def _inverse_root_blocks(diagonal: FloatArray, above: FloatArray, least: float) -> FloatArray:
    """Returns the diagonal blocks of H^-1/2 for a block tridiagonal H.

    Args:
      diagonal: (B, s, s) diagonal blocks of H, symmetric and positive definite.
      above: (B - 1, s, s) blocks to their right.
      least: A lower bound, above zero, on the eigenvalues of H.

    Returns:
      (B, s, s).

    Raises:
      ValueError: If ``least`` is not positive, or H too ill-conditioned.
    """
    weights, inverses = _eliminated(diagonal, above, least)
    blocks, found = np.empty_like(diagonal), inverses[-1]
    blocks[-1] = np.tensordot(weights, found, 1)
    for k in range(len(diagonal) - 2, -1, -1):
        back = inverses[k] @ above[k]
        found = inverses[k] + back @ found @ back.transpose(0, 2, 1)
        blocks[k] = np.tensordot(weights, found, 1)
    return blocks


def _inverse_root(diagonal: FloatArray, above: FloatArray, least: float) -> FloatArray:
    """Returns the whole matrix H^-1/2 for a block tridiagonal H.

    It takes O(s (B s)^2) operations for each shift.

    Args:
      diagonal: As in :func:`_inverse_root_blocks`.
      above: As in :func:`_inverse_root_blocks`.
      least: As in :func:`_inverse_root_blocks`.

    Returns:
      (B s, B s), symmetric.

    Raises:
      ValueError: As :func:`_inverse_root_blocks` raises it.
    """
    weights, inverses = _eliminated(diagonal, above, least)
    size = diagonal.shape[1]
    root = np.empty((len(diagonal) * size,) * 2)
    # The loop computes rows of the inverses from the diagonal on, from the last block to the first.
    rows = inverses[-1]
    for k in range(len(diagonal) - 1, -1, -1):
        here = slice(k * size, (k + 1) * size)
        if k + 1 < len(diagonal):
            back = inverses[k] @ above[k]
            after = -(back @ rows)
            own = inverses[k] - after[:, :, :size] @ back.transpose(0, 2, 1)
            rows = np.concatenate([own, after], axis=2)
        root[here, k * size :] = np.tensordot(weights, rows, 1)
        root[k * size :, here] = root[here, k * size :].T
    return root


def _largest_row_sum(diagonal: FloatArray, above: FloatArray) -> float:
    """Returns the largest sum of magnitudes of a row of H: no eigenvalue is larger.

    Args:
      diagonal: (B, s, s) diagonal blocks of H.
      above: (B - 1, s, s) blocks to their right.
    """
    sums = np.sum(np.abs(diagonal), axis=2)
    sums[:-1] += np.sum(np.abs(above), axis=2)
    sums[1:] += np.sum(np.abs(above), axis=1)
    return float(np.max(sums))
