r"""Upper bound on a banded strategy matrix's gap to the best one, in O(n b^2) operations.

**The bound** is the dual of the problem. With equal norms: for symmetric positive semi-definite V
with V[i, j] = 0 for 0 < |i - j| < b and any feasible X, tr(V X) = tr(V), so that tr(A^T A X^-1) =
tr(A^T A X^-1) + tr(V X) - tr(V) >= 2 tr((A V A^T)^1/2) - tr(V), the matrix form of 2 sqrt(a v) <= a
/ x + v x; the best multiple of V gives tr((A V A^T)^1/2)^2 / tr(V). At the optimum V is X^-1 A^T A
X^-1, whose entries within the band vanish because the gradient does. With pattern weights w, V[i,
i] the sum of those of the patterns that hold i, tr(V X) is at most the sum of w, which takes the
place of tr(V).

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

**By the last rounds.** Where many rounds have little weight, V0 is nearly singular, and all of this
says little. Another V needs no inverse. For unit vectors q_i with q_i^T q_j = 0 where
0 < |i - j| < b, and numbers d_i, V[i, j] = d_i d_j q_i^T q_j is zero within the band off the
diagonal, and has the root Y with columns d_i q_i. For the columns a_i of A and any feasible X,

    tr(A X^-1 A^T) >= 2 tr(Y^T A) - tr(V X) >= 2 sum_i d_i q_i^T a_i - w,

where d_i^2 is a diagonal that the constraint allows, with weights of sum w. The best multiple of d
gives (sum_i d_i q_i^T a_i)^2 / w, and with equal norms d_i = q_i^T a_i: the bound is the sum of
(q_i^T a_i)^2. Near the optimum the columns of A X^-1 are nearly orthogonal, and each is made so to
the b - 1 before it. If A stands for diag(w)^(1/2) A with weights for the last N >= b rounds alone,
these vectors have N entries. In columns before those rounds q_i is q_(i+b), as any b in a row are
then the same b vectors in another order. For prefix sums and N = b, the best such bound is
n / b - 1 more than the least maximum of b rounds.

**Rounding.** Every matrix here is a sum of positive semi-definite terms or a product of few bands.
The entries of V0 and F are taken to be off by 8 n_s u kappa, relative to the root of the product of
diagonal entries: n_s is the length of inner products, u the unit roundoff and kappa the sum of the
largest condition numbers of diagonal blocks of C and of A. This follows the usual forward bounds of
triangular inverses; it is not proven to the last constant, and the tests compare it with
computations in many digits. Where rates change by decades from round to round, covariances of
blocks are off by more: twice the largest difference of a few rounds' errors from those by
substitution is added. What it adds to E goes into all terms.
"""

import dataclasses

import numpy as np
import scipy.ndimage
from scipy.linalg.lapack import dpbtrf, dtrtri

from mf_aggregators.factorizations.factorization import bands_of_matrix
from mf_aggregators.factorizations.searches import PatternLayout, weighted, weighted_inverse
from mf_aggregators.kernel.numbers import FloatArray
from mf_aggregators.linear_algebra import (
    BandedCovariances,
    BandedMatrix,
    WorkloadBlocks,
    by_columns,
    solved,
)
from mf_aggregators.workloads import AnyWorkload

_ROUNDOFF = 2.0**-53
_ROUNDING = 8.0
# The values of eps for which a Cholesky factorization is tried.
_EPSILONS = (0.1, 0.5, 1.0)
# Rows of K^T E K with a larger sum of magnitudes than this: around them the diagonal of V is raised
# first.
_LARGE = 0.5
# The shares of the increase for diagonal dominance that are tried: a smaller share costs less of
# the bound.
_SHARES_OF_DOMINANCE = (0.05, 0.2, 1.0)
# The number of rounds for which errors are computed in a second way, for comparison.
_ROUNDS_COMPARED = 8
# The number of times that each vector is made orthogonal to the ones before it: twice is enough.
_PASSES = 2
# The number of rounds before the weighted rounds, in bands, that are used to compute the first
# vectors.
_BANDS_BEFORE = 4


@dataclasses.dataclass(frozen=True, eq=False)
class BandedWorkload:
    """A workload divided by its largest entry, in blocks and with the bands of its inverse.

    Attributes:
      blocks: The workload in blocks of rounds.
      inverse_bands: (n, w) bands of A^-1; w is n if it is not banded.
      condition: The largest condition number, for maximum norms, of a diagonal block of A.
    """

    blocks: WorkloadBlocks
    inverse_bands: FloatArray
    condition: float

    @classmethod
    def of(
        cls, workload: AnyWorkload, num_bands: int, weights: FloatArray | None = None
    ) -> "BandedWorkload":
        """Returns a workload in the form that certificates need.

        Args:
          workload: A, known by its name or an (n, n) lower-triangular array of full rank.
          num_bands: The bands b of strategy matrices.
          weights: (n,) w of the rounds, above zero, for diag(w)^1/2 A; None for ones.
        """
        largest = workload.largest_entry()
        inverse_bands = workload.inverse_bands()
        if inverse_bands is not None:
            inverse_bands = weighted_inverse(inverse_bands * largest, weights)
            blocks = WorkloadBlocks.of_inverse(inverse_bands, num_bands, weights)
            return cls(blocks, inverse_bands, blocks.largest_condition(inverse_bands))
        matrix = workload.matrix()
        scaled = weighted(matrix / largest, weights)
        inverse, _ = dtrtri(scaled.T, lower=0)
        inverse = np.tril(inverse.T)
        condition = np.linalg.norm(scaled, np.inf) * np.linalg.norm(inverse, np.inf)
        blocks = WorkloadBlocks.of_matrix(scaled)
        return cls(blocks, bands_of_matrix(inverse, len(inverse)), float(condition))

    def lower_bound(self, bands: FloatArray, layout: PatternLayout) -> float:
        """Returns a lower bound on the squared error of any feasible matrix.

        Args:
          bands: (n, b) of a C of sensitivity one.
          layout: The classes of rounds: the squared norms of the columns of a class sum to at most
            one.

        Returns:
          The bound; 0 if none is known, because C is too ill-conditioned, or too far from the
          optimum.
        """
        with np.errstate(all="ignore"):
            point = _Point(bands, self)
            if not point.is_finite:
                return 0.0
            raised, rows = np.zeros(len(bands)), np.ones(len(bands), dtype=bool)
            for share in (*_SHARES_OF_DOMINANCE, None, None):
                diagonal = point.dual.diagonal + raised
                if not np.all(np.isfinite(diagonal)):
                    return 0.0
                allowed, total = layout.dual_diagonal(diagonal)
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
                    reach = 4 * removed.lower + 1
                    rows = scipy.ndimage.maximum_filter1d(is_large, reach, mode="constant")
                raised = np.where(rows, share * dominating, 0.0)
            return 0.0

    def lower_bound_by_last_rounds(
        self,
        bands: FloatArray,
        layout: PatternLayout,
        weights: FloatArray,
        num_last: int,
    ) -> float:
        """Bounds the largest squared error of a round from below, for all feasible matrices.

        The bound follows from the last rounds. The workload must have no weights of its own.

        Args:
          bands: (n, b) of a C that is nearly the best for the weights.
          layout: The classes of rounds: the squared norms of the columns of a class sum to at most
            one.
          weights: (n,) weights of the rounds, above zero.
          num_last: N, the number of the last rounds with weights that count, at least b; a few more
            rounds are used.

        Returns:
          The bound; 0 if none is known, because C or A is too ill-conditioned.
        """
        num_rounds, num_bands = bands.shape
        size = min(num_last, num_rounds)
        # The rounds before the last ones are a whole number of bands, like the pattern of their
        # weights.
        size += (num_rounds - size) % num_bands
        window = min(size + _BANDS_BEFORE * num_bands, num_rounds)
        roots = np.sqrt(weights[-size:] / np.sum(weights[-size:]))
        with np.errstate(all="ignore"):
            # The rows of this array are the columns of the weighted workload for these rounds.
            columns = solved(self.inverse_bands[-window:], np.eye(window)[:, -size:], True)
            near = solved(bands[-window:], columns, True)
            near = solved(bands[-window:], near)[-size:] * roots
            columns = columns[-size:] * roots
            units, loss = _orthogonal_in_turn(near, num_bands)
            products = np.einsum("ij,ij->i", units, columns)
            earlier = np.zeros((num_rounds, num_bands))
            earlier[num_rounds - size :] = (units[:num_bands] * roots).T
            rounds = np.arange(num_rounds - size)
            earlier = solved(self.inverse_bands, earlier, True)
            earlier = earlier[rounds, (rounds - len(rounds)) % num_bands]
            products = np.concatenate([earlier, products])
            diagonal = np.square(products)
            # Every round gets a small weight, because weights may be those of patterns, which must
            # not be zero.
            diagonal += np.finfo(float).tiny + _ROUNDOFF**2 * np.max(diagonal)
            if not (np.all(np.isfinite(diagonal)) and np.isfinite(loss)):
                return 0.0
            allowed, total = layout.dual_diagonal(diagonal)
            bound = float(np.sqrt(allowed) @ np.abs(products)) ** 2 / total
        # The rounding covers products that are not quite zero, which change tr(V X) because |X_ij|
        # <= 1, and the errors of products.
        rounding = 2 * num_bands * (loss + size * _ROUNDOFF)
        rounding += _ROUNDING * _ROUNDOFF * (size + num_rounds) * _condition(self.inverse_bands)
        bound *= 1.0 - rounding
        return bound if bound > 0.0 else 0.0


class _Point:
    """A feasible matrix, with the numbers that all attempts to compute a bound share.

    Attributes:
      squared_error: F.
      strategy: C.
      gram: X.
      root: K.
      dual: V0 within the band.
      rounding: The largest relative error of the entries of V0 and of F.
      entry_errors: (n,) r: an entry of V0 is off by r_i r_j at most.
      row_errors: (n,) the sums of r_i r_j over the entries of each row within the band.
      strategy_norm: An upper bound on the operator norm of C.
      root_norm: An upper bound on the operator norm of K.
    """

    def __init__(self, bands: FloatArray, workload: BandedWorkload) -> None:
        covariances = BandedCovariances(bands, workload.blocks)
        self.squared_error = covariances.squared_error
        self.strategy = BandedMatrix.lower_triangular(bands)
        self.gram = self.strategy.transposed().times(self.strategy)
        self.root = self.gram.times(BandedMatrix.lower_triangular(workload.inverse_bands))
        self.dual = BandedMatrix.symmetric(covariances.dual_band())
        inner = workload.blocks.size + len(workload.blocks.blocks)
        condition = covariances.largest_condition() + workload.condition
        self.rounding = _ROUNDING * _ROUNDOFF * inner * condition
        rows = covariances.squared_rows()
        self.rounding += 2.0 * _difference_of_rows(bands, workload, rows)
        self.entry_errors = np.sqrt(self.rounding * self.dual.diagonal)
        products = _outer(self.entry_errors, self.dual.lower, self.dual.upper)
        self.row_errors = np.sum(products, axis=1) * (1.0 + products.shape[1] * _ROUNDOFF)
        self.strategy_norm, self.root_norm = (
            _operator_norm(self.strategy),
            _operator_norm(self.root),
        )

    @property
    def is_finite(self) -> bool:
        """Whether all numbers of the point are within the range of floats."""
        return bool(
            np.isfinite(self.squared_error)
            and np.isfinite(self.rounding)
            and np.all(np.isfinite(self.dual.rows))
            and np.all(self.dual.diagonal > 0.0)
        )


def _orthogonal_in_turn(rows: FloatArray, num_bands: int) -> tuple[FloatArray, float]:
    """Returns (n, m) unit rows, each orthogonal to the b - 1 before, and the largest product.

    The product is infinite if a row is zero or not finite.
    """
    units, loss = np.zeros_like(rows), 0.0
    for i, unit in enumerate(rows):
        before = units[max(0, i - num_bands + 1) : i]
        for _ in range(_PASSES):
            unit = unit - (before @ unit) @ before
            unit = unit / np.sqrt(unit @ unit)
        if not np.all(np.isfinite(unit)):
            return units, np.inf
        loss = max(loss, float(np.max(np.abs(before @ unit), initial=0.0)))
        units[i] = unit
    return units, loss


def _condition(inverse_bands: FloatArray) -> float:
    """Returns the condition number of A, for maximum norms, or an upper bound on it."""
    sums = np.abs(solved(inverse_bands, np.ones((len(inverse_bands), 1))))
    return float(np.max(sums)) * float(np.max(np.sum(np.abs(inverse_bands), axis=1)))


def _difference_of_rows(
    bands: FloatArray, workload: BandedWorkload, squared_rows: FloatArray
) -> float:
    """Returns the largest relative difference of a few rounds' errors to those by substitution."""
    num_rounds = len(bands)
    picks = np.unique(np.linspace(0, num_rounds - 1, _ROUNDS_COMPARED).astype(int))
    unit = np.zeros((num_rounds, len(picks)))
    unit[picks, np.arange(len(picks))] = 1.0
    rows = solved(bands, solved(workload.inverse_bands, unit, True), True)
    return float(np.max(np.abs(squared_rows[picks] / np.sum(np.square(rows), axis=0) - 1.0)))


def _bound(
    point: _Point, removed: BandedMatrix, half: BandedMatrix, total: float, epsilon: float
) -> float:
    """Returns the bound for an E <= epsilon V0, with K^T E given."""
    width = removed.rows.shape[1]
    errors = point.entry_errors
    # The errors are |tr(X dE)|, and the Frobenius norm of K^T dE C^T with the rounding of the
    # product.
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
    # F may be off in two places: in the trace here, and in the error that is compared with the
    # bound.
    trace -= 0.5 * off_by + 2.0 * point.rounding * point.squared_error
    return float(max(trace, 0.0) ** 2 / (total * (1.0 + point.rounding)))


def _epsilon(point: _Point, removed: BandedMatrix, product: BandedMatrix) -> float | None:
    """Returns an eps with E <= eps V0, of a few that are tried; None if E <= V0 is not shown."""
    if np.all(_off_diagonal_sums(removed) + point.row_errors + removed.diagonal <= 0.0):
        return 0.0
    # The slack is the error of K^T E K that errors of E and of the products make.
    slack = point.root_norm**2 * (
        float(np.max(point.row_errors))
        + 4 * removed.rows.shape[1] * _ROUNDOFF * removed.largest_row_sum()
    )
    norm = product.largest_row_sum() + slack
    if norm <= _EPSILONS[0]:
        return norm
    reach = min(product.lower, len(product.rows) - 1)
    below = by_columns(-product.rows[:, product.lower - reach : product.lower + 1][:, ::-1])
    for epsilon in _EPSILONS:
        shifted = below.copy()
        largest = epsilon + float(np.max(below[0]))
        shifted[0] += epsilon - slack - 2.0 * (reach + 2) ** 2 * _ROUNDOFF * largest
        if dpbtrf(shifted, lower=1, overwrite_ab=1)[1] == 0:
            return epsilon
    return None


def _removed(dual: BandedMatrix, allowed: FloatArray) -> BandedMatrix:
    """Returns E: V0 within the band, minus the diagonal that the constraint allows."""
    rows = dual.rows.copy()
    rows[:, dual.lower] -= allowed
    return BandedMatrix(dual.lower, dual.upper, rows)


def _off_diagonal_sums(matrix: BandedMatrix) -> FloatArray:
    """Returns (n,) sums of the magnitudes off the diagonal, for each row."""
    return np.asarray(np.sum(np.abs(matrix.rows), axis=1) - np.abs(matrix.diagonal))


def _outer(values: FloatArray, lower: int, upper: int) -> FloatArray:
    """Returns the rows of a banded matrix with the entries v_i v_j."""
    padded = np.concatenate([np.zeros(lower), values, np.zeros(upper)])
    windows = np.lib.stride_tricks.sliding_window_view(padded, lower + upper + 1)
    return np.asarray(values[:, np.newaxis] * windows)


def _operator_norm(matrix: BandedMatrix) -> float:
    """Bounds the operator norm from above, by the largest sums of rows and of columns."""
    return float(np.sqrt(matrix.largest_row_sum() * matrix.transposed().largest_row_sum()))
