"""The dual of the least total squared error under (k, b)-participation.

The problem (BandMF Problem 1; Choquette-Choo et al., multi-epoch MF): minimise
tr(A^T A X^-1) over positive definite X = C^T C with sum_{i, j in p} |X[i, j]| <= 1 for
every pattern p (the squared sensitivity of BandMF Eq. 5).

Its dual: for weights v_p >= 0 and a positive semi-definite V with V[i, i] = s[i, i] and
|V[i, j]| <= s[i, j], where s[i, j] is the sum of v_p over the patterns that hold both i
and j (so V is zero where there is none), tr(V X) <= sum_p v_p for every feasible X, and

  tr(A^T A X^-1) >= tr(A^T A X^-1) + tr(V X) - sum_p v_p >= 2 tr((A V A^T)^1/2) - sum_p v_p.

The best multiple of V gives tr((A V A^T)^1/2)^2 / sum_p v_p. The bound is concave in V,
with equality for X V X = A^T A: one square root gives the bound, its gradient and a nearly
feasible X. V is block diagonal over the classes of rounds modulo b, so that the dual has about
n k / 2 variables instead of the n^2 / 2 of X.

The variants that the literature uses only change the range of V[i, j], i != j: X[i, j] >= 0
within patterns allows any V[i, j] <= s[i, j], and X[i, j] = 0 any V[i, j] at all. Equal
column norms are taken together with X[i, j] = 0 within patterns, as in the papers: then
X[i, i] = 1 / k, and V[i, i] is free as well.

Where every class is one pattern (n <= k b), the bound on |V[i, j]| follows from V being
positive semi-definite, so that the three variants have one optimum: X[i, j] = 0 there,
because V = X^-1 A^T A X^-1 is not singular. There, and wherever V[i, j] is free, V is
s[i, i]^1/2 R[i, j] s[j, j]^1/2 with R = L L^T of a lower-triangular L with rows of norm one:
no V on the way is infeasible.

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
"""

import dataclasses
import functools
from typing import Literal

import numpy as np
import scipy.linalg
import scipy.sparse

from mf_aggregators.factorizations._central_path import MultiplierCone
from mf_aggregators.factorizations._patterns import PatternLayout
from mf_aggregators.factorizations._round_errors import weighted, weighted_inverse
from mf_aggregators.kernel.numbers import FloatArray
from mf_aggregators.linear_algebra import matrix_roots

# The fewest blocks, and the fewest rounds in classes of one, that are faster than one large matrix.
_LEAST_BLOCKS, _LEAST_SINGLE_ROUNDS = 24, 512
# Eigenvalues of H are off by rounding of the largest of them, and roots follow from the least.
_LARGEST_CONDITION = 1e13
PatternEntries = Literal["any", "non_negative", "orthogonal"]
# The least and the largest V[i, j] / s[i, j], i != j, for each range of X[i, j].
_BOUNDS_OF_RATIOS: dict[PatternEntries, tuple[float, float]] = {
    "any": (-1.0, 1.0),
    "non_negative": (-np.inf, 1.0),
    "orthogonal": (-np.inf, np.inf),
}
# Multipliers this close to their bound are taken to be at it.
_AT_BOUND = 1e-6


@dataclasses.dataclass(frozen=True, eq=False)
class _PatternRoot:
    """The root R of L^T A^T A L.

    Attributes:
      trace: Its trace.
      blocks: (b, K, K) blocks of the classes; entries of no round are not defined.
      half: (n, n) Y with Y Y^T = R, rounds by class; None where that was not computed.
      rows: (n,) diagonal of (A L L^T A^T)^1/2; None where that was not computed.
    """

    trace: float
    blocks: FloatArray
    half: FloatArray | None
    rows: FloatArray | None = None


class _PatternSpectra:
    """Computes the roots for one workload, here of any kind by dense matrices.

    Attributes:
      has_cheap_roots: Whether a root by blocks takes much less time than a whole one.
    """

    has_cheap_roots = False

    def __init__(self, workload: FloatArray, layout: PatternLayout) -> None:
        """Arranges A by class.

        Args:
          workload: A, an (n, n) lower-triangular array.
          layout: The classes.
        """
        self._layout = layout
        self._by_class = workload[:, layout.order]

    @functools.cached_property
    def _gram(self) -> FloatArray:
        """A^T A."""
        return np.asarray(self._by_class.T @ self._by_class)

    def root(self, factors: FloatArray, row_weights: FloatArray | None = None) -> _PatternRoot:
        """Returns the root for diag(w)^1/2 A, here by one eigendecomposition.

        Args:
          factors: (b, K, K) lower-triangular blocks of L, the identity's where no round is.
          row_weights: (n,) w of the rounds, above zero; None for ones, and for no ``rows``.
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
        """Singular values and right vectors of diag(w)^1/2 A L; left ones for weights."""
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
        """(n, n) diag(w)^1/2 A L, columns by class."""
        return self._layout.times_blocks(weighted(self._by_class, row_weights), factors)

    def nuclear_norm(self, factors: FloatArray, row_weights: FloatArray | None) -> float:
        """Returns a lower bound on the nuclear norm of diag(w)^1/2 A L, in spite of rounding.

        Args:
          factors: L, as for :meth:`root`.
          row_weights: The same.
        """
        return matrix_roots.nuclear_norm_from_below(self._product(factors, row_weights))

    def whole(self, root: _PatternRoot, factors: FloatArray) -> FloatArray:
        """Returns (n, n) R, rounds by class.

        Args:
          root: What is known of it.
          factors: The L that it belongs to.
        """
        assert root.half is not None
        return root.half @ root.half.T


class _TridiagonalSpectra(_PatternSpectra):
    """The spectra for one participation and a workload with an inverse of one or two bands."""

    def __init__(
        self, workload: FloatArray, inverse_bands: FloatArray, layout: PatternLayout
    ) -> None:
        """Keeps D.

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
        """The diagonal of L^-1 D, and the entries below it."""
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
        """Returns a lower bound on the nuclear norm."""
        on, below = self._scaled(factors, row_weights)
        size, off_diagonal = 2 * len(on), np.empty(2 * len(on) - 1)
        off_diagonal[0::2], off_diagonal[1::2] = np.abs(on), np.abs(below)
        values = scipy.linalg.eigvalsh_tridiagonal(
            np.zeros(size), off_diagonal, check_finite=False, lapack_driver="sterf"
        )[len(on) :]
        rounding = size * np.finfo(np.float64).eps * values[-1]
        return float(np.sum(1.0 / (np.maximum(values, 0.0) + rounding)))


class _BandedPatternSpectra(_PatternSpectra):
    """The spectra for a workload with an inverse of few bands."""

    has_cheap_roots = True

    def __init__(
        self, workload: FloatArray, inverse_bands: FloatArray, layout: PatternLayout
    ) -> None:
        """Arranges D D^T.

        Args:
          workload: A, an (n, n) lower-triangular array.
          inverse_bands: (n, w) bands of D = A^-1, as :func:`mf_aggregators.workloads.inverse_bands`
            returns them.
          layout: The classes, of which there are enough for :meth:`is_faster`.
        """
        super().__init__(workload, layout)
        columns = layout.rows_by_class(workload.T[layout.order])
        self._gram_blocks = np.matmul(columns, columns.transpose(0, 2, 1))
        self._joints = _joints(inverse_bands, layout)
        # Class c is folded onto class b - 1 - c.
        classes = np.arange(layout.separation)
        folded = np.minimum(classes, layout.separation - 1 - classes)
        is_later = classes > layout.separation - 1 - classes
        block, within = np.divmod(folded, len(self._joints) - 1)
        self._block, self._place = block, 2 * within + is_later

    @staticmethod
    def is_faster(num_inverse_bands: int, layout: PatternLayout) -> bool:
        """Returns whether the blocks are small enough to be faster than one large matrix."""
        reach = num_inverse_bands - 1
        least = max(2 * reach * _LEAST_BLOCKS, _LEAST_SINGLE_ROUNDS if layout.positions == 1 else 0)
        return reach > 0 and layout.separation >= least

    def root(self, factors: FloatArray, row_weights: FloatArray | None = None) -> _PatternRoot:
        """Returns the root without its half, unless there are weights or H is ill-conditioned."""
        if row_weights is not None:
            return super().root(factors, row_weights)
        diagonal, above, least = self._blocks(factors)
        # Written so that NaN is ill-conditioned.
        if not matrix_roots.largest_row_sum(diagonal, above) <= _LARGEST_CONDITION * least:
            return super().root(factors)
        folded = matrix_roots.inverse_root_blocks(diagonal, above, least)
        count, positions = len(folded), self._layout.positions
        by_place = folded.reshape(count, -1, positions, folded.shape[1] // positions, positions)
        blocks = by_place[self._block, self._place, :, self._place]
        diagonals = np.diagonal(blocks, axis1=1, axis2=2)
        return _PatternRoot(float(np.sum(diagonals[self._layout.exists])), blocks, None)

    def whole(self, root: _PatternRoot, factors: FloatArray) -> FloatArray:
        """Returns R."""
        if root.half is not None:
            return super().whole(root, factors)
        diagonal, above, least = self._blocks(factors)
        folded = matrix_roots.inverse_root(diagonal, above, least)
        positions = self._layout.positions
        of_class = self._block * diagonal.shape[1] + self._place * positions
        rows = (of_class[:, np.newaxis] + np.arange(positions))[self._layout.exists]
        return folded[np.ix_(rows, rows)]

    def _blocks(self, factors: FloatArray) -> tuple[FloatArray, FloatArray, float]:
        """H: (B, s, s) diagonal blocks, (B - 1, s, s) to their right, and its least eigenvalue.

        The latter is bounded from below by the inverse of the trace of L^T A^T A L.
        """
        least = 1.0 / float(np.sum(np.matmul(self._gram_blocks, factors) * factors))
        inverse_factors = np.linalg.inv(factors)
        separation, positions = self._layout.separation, self._layout.positions
        num_blocks, places = int(np.max(self._block)) + 1, 2 * (len(self._joints) - 1)
        shape = (num_blocks, places, places, positions, positions)
        diagonal, above = np.zeros(shape), np.zeros((num_blocks - 1, *shape[1:]))
        # A block with fewer classes has rows of the identity.
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
    """Returns the spectra that are fastest.

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
    """(w, b, K, K): D D^T between class c and the class t later, by t and c.

    Rows of no round are those of the identity.
    """
    num_rounds, width = inverse_bands.shape
    separation, positions = layout.separation, layout.positions
    joints = np.zeros((width, separation, positions, positions))
    rounds, exists = layout.rounds, layout.exists
    for lag in range(width):
        # (D D^T)[i, i + lag], of the columns that both rows have entries in.
        products = np.zeros(num_rounds)
        later = num_rounds - lag
        for t in range(width - lag):
            products[:later] += inverse_bands[:later, t] * inverse_bands[lag:, t + lag]
        classes, places = np.nonzero(exists & (rounds + lag < num_rounds))
        # After the last class comes the first one, a position later.
        later_places = places + (classes + lag) // separation
        joints[lag, classes, places, later_places] = products[rounds[classes, places]]
    classes, places = np.nonzero(~exists)
    joints[0, classes, places, places] = 1.0
    return joints


@dataclasses.dataclass(frozen=True, eq=False)
class Evaluation:
    """The dual at one V = L L^T.

    Attributes:
      estimated_bound: The lower bound on the squared error, up to rounding.
      gram_blocks: (b, K, K) blocks of X for the classes; entries of no round are not defined.
      factors: (b, K, K) blocks of L.
      root: (L^T A^T A L)^1/2, as far as it is known.
      weights: (b, W) for patterns, or (b, K) for positions.
      ratios: (b, pairs) ratios V[i, j] / s[i, j].
      row_weights: (n,) w of the rounds, for the maximum; None for the mean.
    """

    estimated_bound: float
    gram_blocks: FloatArray
    factors: FloatArray
    root: _PatternRoot
    weights: FloatArray
    ratios: FloatArray
    row_weights: FloatArray | None = None

    @property
    def distance(self) -> float:
        """Of the order of the gap for one participation: how far X is from feasible.

        The mean squared deviation of diag X from one, and for the largest error also half of the
        excess of the largest error over their weighted mean.
        """
        weights, trace = self.weights[:, 0], self.root.trace
        deviations = self.gram_blocks[:, 0, 0] * (np.sum(weights) / trace) - 1.0
        distance = float(np.average(np.square(deviations), weights=weights))
        if self.row_weights is not None and self.root.rows is not None:
            errors = self.root.rows / self.row_weights * (np.sum(self.row_weights) / trace)
            distance += 0.5 * (float(np.max(errors)) - 1.0)
        return distance


class MultiEpochDual:
    """The dual bound on the squared error of one workload, for one class of matrices.

    Attributes:
      weights_mask: Which weights there are, (b, W) for patterns or, with equal column norms,
        (b, K) for positions.
      by_correlations: Whether V is given by correlations R and scales, or entry by entry.
      bounds_of_entries: The least and the largest ratio V[i, j] / s[i, j].
      pairs: Rows and columns, each (pairs,) of positions that some pattern holds both of.
      pair_exists: (b, pairs): whether both are rounds.
      has_cheap_roots: Whether an evaluation takes much less time than a whole matrix X.
    """

    def __init__(
        self,
        workload: FloatArray,
        inverse_bands: FloatArray | None,
        layout: PatternLayout,
        *,
        equal_column_norms: bool,
        pattern_entries: PatternEntries,
    ) -> None:
        """Prepares the roots.

        Args:
          workload: A, an (n, n) lower-triangular array.
          inverse_bands: The (n, w) bands of A^-1; None if it has many.
          layout: The classes of rounds and their patterns.
          equal_column_norms: Whether columns of C have equal norms, and X[i, j] = 0 in patterns.
          pattern_entries: The range of X[i, j] in patterns otherwise.
        """
        self._layout = layout
        self._equal_column_norms = equal_column_norms
        entries = "orthogonal" if equal_column_norms else pattern_entries
        self.by_correlations = entries == "orthogonal" or layout.positions == layout.most
        self.bounds_of_entries = _BOUNDS_OF_RATIOS[
            "orthogonal" if self.by_correlations else entries
        ]
        self.weights_mask = layout.exists if equal_column_norms else layout.windows
        rows, columns = np.tril_indices(layout.positions, -1)
        within = rows - columns < layout.most
        self.pairs = rows[within], columns[within]
        exists = layout.exists
        self.pair_exists = exists[:, self.pairs[0]] & exists[:, self.pairs[1]]
        self._spectra = _spectra_of(workload, inverse_bands, layout)
        self.has_cheap_roots = self._spectra.has_cheap_roots

    def cone(self) -> MultiplierCone:
        """Returns V as linear forms of the weights and of the entries off the diagonal."""
        layout = self._layout
        exists, num_rounds = layout.exists, layout.num_rounds
        by_class = np.full(exists.shape, -1)
        by_class[exists] = np.arange(num_rounds)
        rows, columns = (by_class[:, ends][self.pair_exists] for ends in self.pairs)
        num_pairs = len(rows)
        pairs = scipy.sparse.eye(num_pairs)
        bounds = self.bounds_of_entries
        if self._equal_column_norms:
            spread = scipy.sparse.eye(num_rounds + num_pairs)
            num_weights, walls = num_rounds, scipy.sparse.csr_array((0, num_rounds + num_pairs))
        else:
            # The additions of each weight to the diagonal, and to the bounds of pairs.
            classes, windows = np.nonzero(self.weights_mask)
            num_weights = len(classes)
            held = layout.held[classes, :, windows]
            of_class = classes[:, np.newaxis] == np.arange(layout.separation)
            cover = scipy.sparse.csr_array(
                (of_class[:, :, np.newaxis] & held[:, np.newaxis])[:, exists].T.astype(np.float64)
            )
            held_pairs = held[:, self.pairs[0]] & held[:, self.pairs[1]]
            both = (of_class[:, :, np.newaxis] & held_pairs[:, np.newaxis])[:, self.pair_exists]
            scales = scipy.sparse.csr_array(both.T.astype(np.float64))
            spread = scipy.sparse.block_diag([cover, pairs])
            rows_of_walls = [
                scipy.sparse.hstack([scales, sign * pairs])
                for sign, bound in zip((1.0, -1.0), bounds, strict=True)
                if np.isfinite(bound)
            ]
            if layout.positions > layout.most:
                weights = scipy.sparse.eye(num_weights, num_weights + num_pairs)
                rows_of_walls.append(weights)
            walls = scipy.sparse.vstack(
                [scipy.sparse.csr_array((0, num_weights + num_pairs)), *rows_of_walls]
            )
        costs = np.zeros(num_weights + num_pairs)
        costs[:num_weights] = self.total(np.ones(1))
        diagonal = np.arange(num_rounds)
        return MultiplierCone(
            layout=layout,
            rows=np.concatenate([diagonal, rows]),
            columns=np.concatenate([diagonal, columns]),
            spread=scipy.sparse.csr_array(spread),
            walls=scipy.sparse.csr_array(walls),
            costs=costs,
            may_be_positive=bool(np.isfinite(bounds[1])),
            may_be_negative=bool(np.isfinite(bounds[0])),
            equal_norms=self._equal_column_norms,
        )

    def total(self, weights: FloatArray) -> float:
        """An upper bound on tr(V X): with equal norms, X[i, i] = 1 / k."""
        share = 1.0 / self._layout.most if self._equal_column_norms else 1.0
        return share * float(np.sum(weights))

    def multiplier_blocks(self, weights: FloatArray, ratios: FloatArray) -> FloatArray:
        """(b, K, K) blocks of V; ones on the diagonal of rounds that do not exist."""
        blocks = self.scales(weights)
        rows, columns = self.pairs
        off = blocks[:, rows, columns] * ratios
        diagonal = np.where(self._layout.exists, np.diagonal(blocks, axis1=1, axis2=2), 1.0)
        blocks = np.zeros_like(blocks)
        positions = np.arange(self._layout.positions)
        blocks[:, positions, positions] = diagonal
        blocks[:, rows, columns] = off
        blocks[:, columns, rows] = off
        return blocks

    def scales(self, weights: FloatArray) -> FloatArray:
        """(b, K, K): what V[i, j] is a ratio of, and V[i, i] itself on the diagonal."""
        if self.by_correlations:
            roots = np.sqrt(self._diagonal(weights))
            return np.asarray(roots[:, :, np.newaxis] * roots[:, np.newaxis])
        return self._layout.cover_pairs(weights)

    def _diagonal(self, weights: FloatArray) -> FloatArray:
        """(b, K) diagonal of V."""
        return weights if self._equal_column_norms else self._layout.cover(weights)

    def correlations(self, rows: FloatArray) -> FloatArray:
        """(b, pairs) entries of R = L L^T."""
        correlations = np.matmul(rows, rows.transpose(0, 2, 1))
        return np.asarray(correlations[:, self.pairs[0], self.pairs[1]])

    def factors(self, base: FloatArray, entries: FloatArray) -> FloatArray:
        """(b, K, K) L_0 (I + E), before its rows are scaled, from (b, pairs) entries of E."""
        factors = np.tile(np.eye(self._layout.positions), (len(entries), 1, 1))
        factors[:, self.pairs[0], self.pairs[1]] = entries
        return np.asarray(np.matmul(base, factors))

    def by_entries(
        self, base: FloatArray, by_ratios: FloatArray, rows: FloatArray, norms: FloatArray
    ) -> FloatArray:
        """The derivative by E's entries, from that by R's, L's rows and their norms before."""
        symmetric = np.zeros_like(rows)
        symmetric[:, self.pairs[0], self.pairs[1]] = by_ratios
        symmetric += symmetric.transpose(0, 2, 1)
        slope = np.matmul(symmetric, rows)
        slope -= rows * np.sum(slope * rows, axis=2, keepdims=True)
        slope = np.matmul(base.transpose(0, 2, 1), slope / norms)
        return np.where(self.pair_exists, slope[:, self.pairs[0], self.pairs[1]], 0.0)

    def at(
        self, weights: FloatArray, ratios: FloatArray, row_weights: FloatArray | None = None
    ) -> Evaluation:
        """The bound and its gradient by V, which are the blocks of X with X V X = A^T A.

        With weights on rows, those of diag(w)^1/2 A, whose bound is divided by the sum of w.
        """
        factors = np.linalg.cholesky(self.multiplier_blocks(weights, ratios))
        # With V = L L^T, the trace of R = (L^T A^T A L)^1/2 is that of (A V A^T)^1/2.
        root = self._spectra.root(factors, row_weights)
        # X = L^-T R L^-1.
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
            ratios=ratios,
            row_weights=row_weights,
        )

    def _total(self, weights: FloatArray, row_weights: FloatArray | None) -> float:
        return self.total(weights) * (1.0 if row_weights is None else float(np.sum(row_weights)))

    def bound_from_below(self, evaluation: Evaluation) -> float:
        """The lower bound on the squared error, in spite of rounding: by singular values of A L."""
        norm = self._spectra.nuclear_norm(evaluation.factors, evaluation.row_weights)
        return norm**2 / self._total(evaluation.weights, evaluation.row_weights)

    def by_weights(self, evaluation: Evaluation) -> FloatArray:
        """The derivative of 2 tr(R) by the weights: X summed with the slopes of V."""
        rows, columns = self.pairs
        slopes = np.zeros_like(evaluation.gram_blocks)
        diagonal = np.diagonal(evaluation.gram_blocks, axis1=1, axis2=2)
        off = evaluation.gram_blocks[:, rows, columns] * evaluation.ratios
        positions = np.arange(self._layout.positions)
        slopes[:, positions, positions] = np.where(self._layout.exists, diagonal, 0.0)
        slopes[:, rows, columns] = slopes[:, columns, rows] = off
        if not self.by_correlations:
            return self._layout.pair_sums(slopes)
        # V[i, j] = ratio sqrt(s_i s_j): half of each pair for each of its ends.
        roots = np.sqrt(self._diagonal(evaluation.weights))
        spread = slopes * roots[:, np.newaxis]
        by_diagonal: FloatArray = np.sum(spread, axis=2) / np.where(roots > 0.0, roots, 1.0)
        return by_diagonal if self._equal_column_norms else self._layout.sums(by_diagonal)

    def by_ratios(self, evaluation: Evaluation) -> FloatArray:
        """The derivative of 2 tr(R) by the ratios V[i, j] / s[i, j], (b, pairs)."""
        rows, columns = self.pairs
        entries = evaluation.gram_blocks[:, rows, columns]
        return 2.0 * entries * self.scales(evaluation.weights)[:, rows, columns]

    def gram_matrix(self, evaluation: Evaluation, *, by_pattern: bool = True) -> FloatArray:
        """X in the order of rounds, feasible once it is scaled, and zero where it has to be.

        Rounds are scaled by the tightest of their patterns, or not.
        """
        layout = self._layout
        scaled = np.linalg.inv(evaluation.factors)
        if by_pattern:
            exists = layout.exists[:, np.newaxis] & layout.exists[:, :, np.newaxis]
            magnitudes: FloatArray = np.abs(evaluation.gram_blocks)
            sums = layout.pair_sums(magnitudes * exists)
            scaled /= np.sqrt(layout.tightest(sums))[:, np.newaxis]
        root = self._spectra.whole(evaluation.root, evaluation.factors)
        by_class = layout.times_blocks(layout.blocks_times(scaled.transpose(0, 2, 1), root), scaled)
        gram = np.empty(by_class.shape)
        gram[np.ix_(layout.order, layout.order)] = by_class
        # Complementary slackness: off its bounds, a multiplier's entry of X is zero.
        least, largest = self.bounds_of_entries
        interior = (evaluation.ratios > least + _AT_BOUND) & (
            evaluation.ratios < largest - _AT_BOUND
        )
        classes, pairs = np.nonzero(interior & self.pair_exists)
        rows = layout.rounds[classes, self.pairs[0][pairs]]
        columns = layout.rounds[classes, self.pairs[1][pairs]]
        gram[rows, columns] = gram[columns, rows] = 0.0
        return gram
