"""Dense factorizations, and the one of least squared error, with a certificate.

With X = C^T C the problem is: minimise tr(A^T A X^-1) over positive definite X with
diagonal one (Denisov et al. Eq. 4). Its solution belongs to the fixed point of
``phi(v) = diag(sqrt(V^1/2 A^T A V^1/2))``, V = diag(v) (Thm 3.2), and every v > 0
gives a lower bound on the smallest error (Eq. 8). That bound is a concave function of
v whose gradient, phi(v) / v - 1, vanishes at the fixed point, so the fixed point is
found as its maximum: iterating phi is gradient ascent of fixed step, and L-BFGS from
the same evaluations needs a third of them, fewer still for momentum workloads.

Each evaluation is an eigendecomposition (:mod:`mf_aggregators.factorizations.optimal`).
Where A^-1 has two bands the search starts from the optimum of a fourth of the rounds.

**The largest error** of a round is bounded from below by every mean with weights w on rounds, that
is by the bound for diag(w)^1/2 A: the squared nuclear norm of diag(w)^1/2 A V^1/2 over sum(v)
sum(w), which is jointly concave in both. Its slope by the logarithm of w_i is that by v's, for the
left singular vectors, and vanishes where all errors that count are equal.

What is needed is the eigendecomposition of V^1/2 A^T A V^1/2. For a workload whose inverse D has
two bands, as the prefix sum and SGD with learning rates have, the inverse V^-1/2 D D^T V^-1/2 is
tridiagonal: its eigenvalues and eigenvectors take O(n^2) operations (Dhillon's multiple relatively
robust representations, LAPACK's stemr), where those of a dense matrix take O(n^3). Inverses of
three bands, as of momentum, would have to be brought to tridiagonal form first, and the
eigenvectors back, in O(n^3) as well: nothing is gained there.

A certificate needs the singular values of A V^1/2, which are one over those of the bidiagonal
V^-1/2 D. They are eigenvalues of the tridiagonal matrix of Golub and Kahan of twice the size, whose
condition number is that of A and not its square.
"""

import contextlib
import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import scipy.linalg

from mf_aggregators import inputs, memory, workloads
from mf_aggregators.factorizations import noise_rows
from mf_aggregators.factorizations._central_path import CentralPath, MultiplierCone
from mf_aggregators.factorizations._multi_epoch import DualSearch, MultiEpochSearch
from mf_aggregators.factorizations._multi_epoch_dual import PatternEntries, bounded_entries
from mf_aggregators.factorizations._round_errors import (
    RoundError,
    RoundWeights,
    weighted,
    weighted_inverse,
)
from mf_aggregators.factorizations.banded import BandedFactorization
from mf_aggregators.factorizations.convergence import (
    Converged,
    ObjectiveBySlopes,
    gap_above,
    minimise,
    warn_unless_reached,
)
from mf_aggregators.factorizations.factorization import Factorization, squared_rows_by_inverse
from mf_aggregators.kernel import numbers
from mf_aggregators.kernel.numbers import FloatArray
from mf_aggregators.kernel.rows import WindowNoise, dense_rows
from mf_aggregators.linear_algebra import matrix_roots
from mf_aggregators.linear_algebra.banded_matrices import bands_of_matrix, lower_bands
from mf_aggregators.linear_algebra.matrix_roots import lower_triangular_factor
from mf_aggregators.participation import (
    Participation,
    SingleParticipation,
    check_fits,
)
from mf_aggregators.workloads import Workload

# How far log(v) may move from the start: keeps exp() finite in a line search.
_LARGEST_CHANGE_OF_LOG = 12.0
# The estimated gap at which a search ends, relative to the gap that is to be certified.
_SAFE_SHARE = 0.99
# The optimiser's first step relative to one of the fixed-point iteration.
_FIRST_STEP = 1.5
_SHORTEST_STEP = 1e-12
_TINY = 1e-300
# How many evaluations L-BFGS has, for other errors than the mean, before it is left for the path.
_EVALUATIONS_BEFORE_PATH = 60
# The first estimate of gaps over distances from feasible matrices.
_GAP_OVER_DISTANCE = 2.0
# The gap of the optimum of fewer rounds that a search starts from.
_GAP_OF_START = 1e-4
# The largest share of the noise multiplier that errors of a given matrix's computed inverse may
# take.
_TOLERANCE_OF_INVERSE = 1e-8
# C, the identity, the rows of its inverse, and a product.
_BYTES_OF_CHECK = 5 * 8


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class DenseFactorization(Factorization):
    """Any lower-triangular, invertible strategy matrix; a checkpoint holds its lower triangle.

    Attributes:
      matrix: C, (n, n), read-only.

    Raises:
      ValueError: If the matrix is not square, finite, lower triangular and invertible.
    """

    mechanism = "optimal"
    reason = "its rows are optimised together, and those of the first rounds would be others"

    matrix: FloatArray

    def __post_init__(self) -> None:
        super().__post_init__()
        matrix = inputs.lower_triangular(self.matrix, "the strategy matrix").copy()
        self._set(matrix=matrix, num_rounds=len(matrix))

    def strategy_matrix(self) -> FloatArray:
        """Returns C, read-only."""
        return self.matrix

    def noise_recursion(self) -> WindowNoise:
        """Returns the recursion over all earlier rows of Z."""
        inverse = scipy.linalg.solve_triangular(
            self.matrix, np.eye(self.num_rounds), lower=True, check_finite=False
        )
        return dense_rows(inverse)

    def _squared_rows(self, workload: Workload | FloatArray) -> FloatArray | None:
        is_named = isinstance(workload, Workload)
        return squared_rows_by_inverse(self.matrix, workload) if is_named else None

    def arrays(self) -> dict[str, FloatArray]:
        """Returns the lower triangle of C, row by row."""
        # Row by row: indices of the triangle would take as much memory as three matrices.
        rows = [row[: i + 1] for i, row in enumerate(self.matrix)]
        return {"lower_triangle": np.concatenate(rows)}

    @classmethod
    def from_arrays(
        cls, num_rounds: int, arrays: Mapping[str, FloatArray], **attributes: Any
    ) -> "DenseFactorization":
        """Rebuilds the factorization; see the base class."""
        triangle = arrays["lower_triangle"]
        if triangle.shape != (num_rounds * (num_rounds + 1) // 2,):
            raise ValueError(
                f"lower_triangle has shape {triangle.shape}, which is not that of a matrix for "
                f"{num_rounds} rounds"
            )
        matrix = np.zeros((num_rounds, num_rounds))
        start = 0
        for i in range(num_rounds):
            matrix[i, : i + 1] = triangle[start : start + i + 1]
            start += i + 1
        return cls(matrix, **attributes)


def optimal(
    workload: Any,
    participation: Participation | None = None,
    *,
    error: RoundWeights = "mean",
    equal_column_norms: bool = False,
    pattern_entries: PatternEntries = "any",
    relative_gap: float | None = None,
    max_evaluations: int | None = None,
    show_progress: bool = False,
) -> DenseFactorization:
    """Computes the factorization of least squared error: in the mean, or as asked for.

    For the mean, under single participation that is the fixed point of Denisov et al. Thm 3.2,
    whose columns have equal norms. Under (k, b)-participation it is the solution of BandMF
    Problem 1.

    Args:
      workload: A, an (n, n) lower-triangular array of full rank, a ``workloads.Workload``, or an
        int n for the prefix sum of n rounds.
      participation: The schema to optimise for: SingleParticipation, the default, or
        FixedEpochOrder.
      error: What to minimise: the ``mean`` squared error over rounds, its ``max``, or the mean with
        (n,) weights on rounds, none below zero, as an array.
      equal_column_norms: For clients that return: whether the columns of C must have
        equal norms; columns of one pattern are orthogonal then.
      pattern_entries: For clients that return: what X[i, j] may be for two rounds i != j
        of one pattern, ``any`` (the sensitivity counts its magnitude), ``non_negative``
        or ``orthogonal`` (zero), as multi-epoch MF restricts it.
      relative_gap: Stop when the squared error is certified to be within this fraction of the
        smallest possible one; default 1e-6, and for clients that return 5e-6, or 1e-3 for ``max``.
      max_evaluations: Give up after this many evaluations of the lower bound; default 300, and
        2000 for other errors than the mean.
      show_progress: Whether to show a progress bar on standard error.

    Returns:
      A factorization of sensitivity one and the certified gap as its
      ``optimality_gap``. If the gap was not reached, the best found, with its gap
      and a NotConvergedWarning.

    Raises:
      ValueError: If the workload is not square, finite, lower triangular and of full
        rank, the schema is MinSeparation and lets a client take part more than once, or
        it names more participations than fit.

    Example:
      >>> import mf_aggregators as mfa
      >>> workload = mfa.workloads.prefix_sum(64)
      >>> best = mfa.factorizations.optimal(workload)
      >>> round(best.rmse(workload, mfa.participation.SingleParticipation()), 3)
      2.1
      >>> best.optimality_gap < 1e-6
      True
    """
    workload = workloads.checked(workload)
    num_rounds = workloads.rounds_of(workload)
    memory.check_rounds(num_rounds, 4 * 8 * num_rounds, "the optimal factorization")
    participation = check_fits(
        SingleParticipation() if participation is None else participation, num_rounds
    )
    measure = RoundError.of(error, num_rounds)
    pattern_entries = bounded_entries(pattern_entries)
    returns = participation.most_participations(num_rounds) > 1
    if returns and not participation.is_evenly_spaced:
        raise ValueError(
            "optimal solves for single participation and for participations exactly b rounds "
            f"apart (FixedEpochOrder), found {participation}; for clients that return after at "
            "least b rounds, use banded with at most b bands."
        )
    if relative_gap is None:
        relative_gap = (1e-3 if measure.is_maximum else 5e-6) if returns else 1e-6
    relative_gap = numbers.positive_number(relative_gap, "relative_gap")
    if max_evaluations is None:
        max_evaluations = 300 if measure.is_mean else 2000
    max_evaluations = numbers.positive_integer(max_evaluations, "max_evaluations")

    search: _Search | MultiEpochSearch
    if returns:
        matrix = workloads.matrix_of(workload)
        # A factor on the workload changes nothing but the range of numbers.
        largest = np.max(np.abs(matrix))
        inverse_bands = workloads.inverse_bands(workload)
        search = MultiEpochSearch(
            matrix / largest,
            None if inverse_bands is None else inverse_bands * largest,
            participation,
            equal_column_norms=equal_column_norms,
            pattern_entries=pattern_entries,
            error=measure,
            relative_gap=relative_gap,
            max_evaluations=max_evaluations,
            show_progress=show_progress,
        )
    else:
        spectra = spectra_of(workload)
        search = _Search(spectra, measure, relative_gap, max_evaluations, show_progress)
    gap = np.inf
    try:
        # Eigenvalues of a nearly singular matrix may not converge.
        with contextlib.suppress(np.linalg.LinAlgError):
            with contextlib.suppress(Converged):
                search.run()
            gap = search.certified_gap()
    finally:
        search.progress.close()
    if not search.strategy_matrix.size:
        raise ValueError(
            "the workload is too ill-conditioned to be factorized in double precision: its "
            "smallest singular value is lost in the rounding of its largest."
        )
    warn_unless_reached(gap, relative_gap, search.evaluations)
    factorization = DenseFactorization(
        search.strategy_matrix,
        participation=participation,
        parameters={
            **measure.parameters(),
            "relative_gap": relative_gap,
            "equal_column_norms": equal_column_norms or not returns,
            "pattern_entries": "orthogonal" if equal_column_norms else pattern_entries,
            "workload": workloads.fingerprint(workload),
        },
    )
    return dataclasses.replace(factorization, optimality_gap=gap if np.isfinite(gap) else None)


def from_matrix(C: Any) -> BandedFactorization | DenseFactorization:
    """Makes a factorization of any strategy matrix.

    Sensitivity and errors are computed from C. Its rows of noise are checked: if E = C N - I for
    the computed inverse N, the encoded stream is hidden by C N Z = (I + E) Z, which is at least as
    much noise as (1 - ||E||) Z. It takes O(n^3) operations.

    Args:
      C: (n, n) floats, finite, lower triangular, without a zero on the diagonal.

    Returns:
      A factorization of a float64 copy, which states no optimality gap: banded if C has fewer than
      n bands, else dense; the noise of a dense one draws all earlier rows of Z in each round.

    Raises:
      ValueError: If C is not as said, or ||E|| is above 1e-8 (Frobenius norm).

    Example:
      >>> import mf_aggregators as mfa
      >>> made = mfa.factorizations.from_matrix([[1, 0], [0.5, 1]])
      >>> round(made.sensitivity(mfa.participation.SingleParticipation()).value ** 2, 6)
      1.25
    """
    matrix = inputs.lower_triangular(C, "the strategy matrix")
    rounds = len(matrix)
    memory.check_rounds(rounds, _BYTES_OF_CHECK * rounds, "the check of a dense matrix")
    bands = lower_bands(matrix) or rounds
    made: BandedFactorization | DenseFactorization = DenseFactorization(matrix)
    if bands < rounds:
        made = BandedFactorization(bands_of_matrix(matrix, bands))
    with np.errstate(all="ignore"):
        product = made.strategy_matrix() @ noise_rows.apply(made.noise_recursion(), np.eye(rounds))
        difference = float(np.linalg.norm(product - np.eye(rounds)))
    # Written so that NaN does not pass.
    if not difference <= _TOLERANCE_OF_INVERSE:
        raise ValueError(
            "the strategy matrix is too close to singular for floats: C times its computed inverse "
            f"differs from the identity by {difference:.2g} (Frobenius norm), and at most "
            f"{_TOLERANCE_OF_INVERSE:g} is allowed."
        )
    return made


# The most rounds of a search that does not start from fewer.
_ROUNDS_OF_COARSEST = 256
_ROUNDS_PER_COARSER_ROUND = 4


class WorkloadSpectra:
    """A workload over its largest entry, and its spectra, here by dense matrices.

    Attributes:
      num_rounds: The number of rounds n.
    """

    def __init__(self, workload: FloatArray) -> None:
        """Computes A^T A.

        Args:
          workload: A, an (n, n) lower-triangular array.
        """
        self.num_rounds = len(workload)
        # A factor on the workload changes nothing but the range of numbers.
        self._workload = workload / np.max(np.abs(workload))
        self._gram = self._workload.T @ self._workload

    def workload(self) -> FloatArray:
        """Returns A, (n, n)."""
        return np.asarray(self._workload)

    def gram_diagonal(self) -> FloatArray:
        """Returns the (n,) diagonal of A^T A."""
        return np.diagonal(self._gram)

    def decomposition(self, v: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Returns eigenvalues and eigenvectors of V^1/2 A^T A V^1/2.

        Args:
          v: (n,) the diagonal of V, above zero.

        Returns:
          (n,) eigenvalues, what rounding made non-positive being set to rounding, and the (n, n)
          eigenvectors, which the caller may overwrite.
        """
        root_v = np.sqrt(v)
        eigenvalues, eigenvectors = np.linalg.eigh(self._gram * root_v * root_v[:, np.newaxis])
        floor = np.finfo(np.float64).eps * eigenvalues[-1]
        return np.maximum(eigenvalues, floor), eigenvectors

    def safe_eigenvalues(self, eigenvalues: FloatArray) -> FloatArray:
        """Returns (n,) lower bounds on eigenvalues, in spite of rounding.

        It adds once in the product A^T A, and once in its eigenvalues.
        """
        rounding = 2.0 * self.num_rounds * np.finfo(np.float64).eps * np.max(eigenvalues)
        return np.maximum(eigenvalues - rounding, 0.0)

    def nuclear_norm_from_below(self, v: FloatArray) -> float:
        """Returns a lower bound on the sum of the singular values of A V^1/2, rounding included."""
        return matrix_roots.nuclear_norm_from_below(self._workload * np.sqrt(v))

    def squared_rows(self, strategy: FloatArray) -> FloatArray:
        """Returns the (n,) squared norms of the rows of A C^-1, C an (n, n) triangle."""
        decoder = scipy.linalg.solve_triangular(
            strategy, self._workload.T, lower=True, trans="T", check_finite=False
        )
        return np.asarray(np.sum(np.square(decoder), axis=0))

    def weighted(self, weights: FloatArray | None) -> "WorkloadSpectra":
        """Returns the spectra of diag(w)^1/2 A.

        Args:
          weights: (n,) above zero; None for ones.
        """
        if weights is None:
            return self
        found = copy.copy(self)
        found._workload = weighted(self._workload, weights)
        found._gram = found._workload.T @ found._workload
        return found

    def left_vectors(
        self, v: FloatArray, eigenvalues: FloatArray, eigenvectors: FloatArray
    ) -> FloatArray:
        """Returns the (n, n) left singular vectors of A V^1/2, in columns.

        Args:
          v: (n,) the diagonal of V, above zero.
          eigenvalues: (n,) of V^1/2 A^T A V^1/2.
          eigenvectors: (n, n) of the same.
        """
        vectors = (self._workload * np.sqrt(v)) @ eigenvectors
        return np.asarray(vectors / np.sqrt(eigenvalues))

    def coarser(self) -> "WorkloadSpectra | None":
        """Returns the spectra of a similar workload of fewer rounds; None if there is none."""
        return None


class TridiagonalSpectra(WorkloadSpectra):
    """The spectra of a workload with an inverse of one or two bands."""

    def __init__(self, inverse_bands: FloatArray) -> None:
        """Keeps D.

        Args:
          inverse_bands: (n, 2), or (n, 1), with ``inverse_bands[i, t] = D[i, i - t]``.
        """
        self.num_rounds = len(inverse_bands)
        # A diagonal workload has one band.
        self._bands = np.zeros((self.num_rounds, 2))
        self._bands[:, : inverse_bands.shape[1]] = inverse_bands
        self._diagonal, self._below = self._bands[:, 0], self._bands[1:, 1]

    def workload(self) -> FloatArray:
        """Returns A."""
        bands = np.stack([self._diagonal, np.append(self._below, 0.0)])
        return np.asarray(
            scipy.linalg.solve_banded((1, 0), bands, np.eye(self.num_rounds), check_finite=False)
        )

    def gram_diagonal(self) -> FloatArray:
        """Returns the diagonal of A^T A, by the columns of A from the last one on."""
        # Column j of A: 1 / D[j, j] in row j, and after that a multiple of column j + 1.
        squares = np.empty(self.num_rounds)
        later = 0.0
        for j in range(self.num_rounds - 1, -1, -1):
            if j + 1 < self.num_rounds:
                later *= self._below[j] ** 2
            later = (1.0 + later) / self._diagonal[j] ** 2
            squares[j] = later
        return squares

    def decomposition(self, v: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Returns eigenvalues and eigenvectors."""
        scales = 1.0 / np.sqrt(v)
        diagonal = np.square(self._diagonal * scales)
        diagonal[1:] += np.square(self._below * scales[1:])
        off_diagonal = self._diagonal[:-1] * self._below * scales[:-1] * scales[1:]
        inverses, eigenvectors = scipy.linalg.eigh_tridiagonal(
            diagonal, off_diagonal, check_finite=False
        )
        floor = np.finfo(np.float64).tiny / np.finfo(np.float64).eps
        return 1.0 / np.maximum(inverses, floor), eigenvectors

    def safe_eigenvalues(self, eigenvalues: FloatArray) -> FloatArray:
        """Less rounding: their inverses are off by n units of the largest of them, at most."""
        inverses = 1.0 / eigenvalues
        rounding = 2.0 * self.num_rounds * np.finfo(np.float64).eps * np.max(inverses)
        return np.asarray(1.0 / (inverses + rounding))

    def nuclear_norm_from_below(self, v: FloatArray) -> float:
        """Returns the sum of the singular values of A V^1/2."""
        scales = 1.0 / np.sqrt(v)
        off_diagonal = np.empty(2 * self.num_rounds - 1)
        off_diagonal[0::2] = self._diagonal * scales
        off_diagonal[1::2] = self._below * scales[1:]
        values = scipy.linalg.eigvalsh_tridiagonal(
            np.zeros(2 * self.num_rounds),
            np.abs(off_diagonal),
            check_finite=False,
            lapack_driver="sterf",
        )[self.num_rounds :]
        rounding = 2.0 * self.num_rounds * np.finfo(np.float64).eps * values[-1]
        return float(np.sum(1.0 / (np.maximum(values, 0.0) + rounding)))

    def squared_rows(self, strategy: FloatArray) -> FloatArray:
        """Returns the squared norms of the rows of B, from those of C^-1."""
        found = squared_rows_by_inverse(strategy, self._bands)
        assert found is not None
        return found

    def weighted(self, weights: FloatArray | None) -> "TridiagonalSpectra":
        """Returns the spectra of diag(w)^1/2 A."""
        if weights is None:
            return self
        return TridiagonalSpectra(weighted_inverse(self._bands, weights))

    def left_vectors(
        self, v: FloatArray, eigenvalues: FloatArray, eigenvectors: FloatArray
    ) -> FloatArray:
        """Returns the left singular vectors, by a product with the transposed inverse."""
        scaled = eigenvectors / np.sqrt(v)[:, np.newaxis]
        vectors = scaled * self._diagonal[:, np.newaxis]
        vectors[:-1] += scaled[1:] * self._below[:, np.newaxis]
        return np.asarray(vectors * np.sqrt(eigenvalues))

    def coarser(self) -> "WorkloadSpectra | None":
        """Returns the spectra of a prefix sum of a fourth of the rounds, if that is one."""
        if self.num_rounds <= _ROUNDS_OF_COARSEST:
            return None
        if np.ptp(self._diagonal) > 0.0 or np.ptp(self._below) > 0.0:
            return None
        return TridiagonalSpectra(self._bands[: self.num_rounds // _ROUNDS_PER_COARSER_ROUND])


def spectra_of(workload: Workload | FloatArray) -> WorkloadSpectra:
    """Returns the spectra of a workload over its largest entry.

    Args:
      workload: A, known by its name or an (n, n) lower-triangular array of full rank.
    """
    bands = workloads.inverse_bands(workload)
    if bands is not None and bands.shape[1] <= 2:
        return TridiagonalSpectra(bands * workloads.largest_entry(workload))
    return WorkloadSpectra(workloads.matrix_of(workload))


@dataclasses.dataclass(frozen=True, eq=False)
class _Evaluation:
    """The bound at one v, and one w for the largest error.

    Attributes:
      weights: (1, n) v, or (2, n) v and w.
      roots: phi(v) and the diagonal of (A V A^T)^1/2, A weighted with w, in the same shape.
    """

    weights: FloatArray
    roots: FloatArray

    @property
    def row_weights(self) -> FloatArray | None:
        """(n,) w; None for the mean."""
        return self.weights[1] if len(self.weights) > 1 else None

    @property
    def total(self) -> float:
        """The product of the sums of v and w."""
        return float(np.prod(np.sum(self.weights, axis=1)))

    @property
    def estimated_bound(self) -> float:
        """Eq. 8 at the best multiple of v, up to the rounding of eigenvalues.

        tr(V (2 X(v) - I)) = 2 sum(phi) - sum(v); for s v it is 2 sqrt(s) sum(phi) -
        s sum(v), which is largest, sum(phi)^2 / sum(v), at sqrt(s) = sum(phi) / sum(v).
        """
        return float(np.sum(self.roots[0]) ** 2 / self.total)

    @property
    def distance_from_feasible(self) -> float:
        """Of the order of the gap: mean squared deviation of diag X(v) = phi / v from one.

        For the largest error, half of what the largest of the ratios for w is above one as well.
        """
        sums = np.sum(self.weights, axis=1, keepdims=True)
        ratios = self.roots / self.weights * (sums / np.sum(self.roots[0]))
        distance = float(np.sum(self.weights[0] * (ratios[0] - 1.0) ** 2) / sums[0, 0])
        if len(ratios) > 1:
            distance += (float(np.max(ratios[1])) - 1.0) / _GAP_OVER_DISTANCE
        return distance


class _Search(DualSearch):
    """Maximises the lower bound of Eq. 8 and keeps the best certified matrix."""

    def __init__(
        self,
        spectra: WorkloadSpectra,
        error: RoundError,
        relative_gap: float,
        max_evaluations: int,
        show_progress: bool,
    ) -> None:
        super().__init__(error, relative_gap, max_evaluations, "fixed point", show_progress)
        # The plain workload, and the one with the weights of a mean.
        self._spectra, self._weighted = spectra, spectra.weighted(error.raised)
        self._safe_bound = 0.0
        self._best: _Evaluation | None = None
        self._closest: _Evaluation | None = None
        self._gap_over_distance = _GAP_OVER_DISTANCE

    def run(self) -> None:
        """Searches until the target is certified (raises Converged) or no progress is made."""
        if not self._error.has_vanishing_weights:
            self._ascend()
        if not self._error.is_mean:
            cone = MultiplierCone.of_columns(self._spectra.num_rounds)
            workload, weights = self._spectra.workload(), self._error.weights
            path = CentralPath(workload, cone, weights, self._relative_gap)
            self._follow(path, _SAFE_SHARE)

    def _ascend(self) -> None:
        """Maximises the bound by L-BFGS, from v that are all of a size."""
        start = np.log(self._evaluate(self._first_weights()).roots)
        first = self._evaluate(np.exp(start))
        # In y = sqrt(v) log(v) the bound's Hessian at the fixed point has a condition
        # number that does not depend on the spread of v. The optimiser's first step has
        # length one: that of a step a little longer than log(phi(v) / v).
        scale = np.exp(0.5 * (start - np.max(start, axis=1, keepdims=True)))
        step = np.log(first.roots) - start
        step -= np.average(step, weights=first.weights, axis=1)[:, np.newaxis]
        scale /= max(_FIRST_STEP * float(np.linalg.norm(scale * step)), _SHORTEST_STEP)
        # Bounds passed to the optimiser would change its first step.
        least, largest = start - _LARGEST_CHANGE_OF_LOG, start + _LARGEST_CHANGE_OF_LOG
        known = [first]

        def negative_log_bound(y: FloatArray) -> tuple[float, FloatArray]:
            # The optimiser begins at the start, which has been evaluated.
            logs = np.clip(y.reshape(scale.shape) / scale, least, largest)
            evaluation = known.pop() if known else self._evaluate(np.exp(logs))
            sum_of_roots = np.sum(evaluation.roots[0])
            sums = np.sum(evaluation.weights, axis=1, keepdims=True)
            gradient = (evaluation.roots / sum_of_roots - evaluation.weights / sums) / scale
            value = float(np.sum(np.log(sums))) - 2.0 * float(np.log(sum_of_roots))
            return value, -gradient.ravel()

        max_evaluations = self._max_evaluations
        if not self._error.is_mean:
            max_evaluations = min(max_evaluations, _EVALUATIONS_BEFORE_PATH)
        if not self._error.is_maximum:
            minimise(
                negative_log_bound,
                (start * scale).ravel(),
                max_evaluations=max_evaluations,
                corrections=30,
                least_change=1e-16,
            )
            return
        # The largest error is off by slopes that remain, and the bound by their squares only.
        objective = ObjectiveBySlopes(negative_log_bound)
        minimise(
            objective,
            (start * scale).ravel(),
            max_evaluations=max_evaluations,
            corrections=30,
            least_change=0.0,
            callback=objective.accept,
        )

    def _first_weights(self) -> FloatArray:
        """Where the search starts: the roots of the diagonal of A^T A, or a coarser optimum."""
        coarser = self._weighted.coarser()
        if coarser is None:
            first = np.sqrt(self._weighted.gram_diagonal())
            return np.stack([first, np.ones_like(first)] if self._error.is_maximum else [first])
        fewer = RoundError(coarser.num_rounds, None, self._error.is_maximum)
        search = _Search(coarser, fewer, _GAP_OF_START, self._max_evaluations, self._show_progress)
        with contextlib.suppress(Converged):
            search.run()
        search.progress.close()
        assert search._best is not None
        # Positions of rounds from the last one on, where v changes fastest.
        rounds = self._spectra.num_rounds
        positions = (np.arange(rounds) + 0.5) / rounds
        known = (np.arange(fewer.num_rounds) + 0.5) / fewer.num_rounds
        return np.exp([np.interp(positions, known, np.log(each)) for each in search._best.weights])

    def certified_gap(self) -> float:
        """Returns the relative gap of the best matrix, with a lower bound that is certain.

        Where eigenvalues are too inaccurate to certify the target, the bound at the best v
        is computed anew from the singular values of A V^1/2.
        """
        is_far = not np.isfinite(self._squared_error) or self._estimated_gap() > self._relative_gap
        if is_far and self._closest is not None:
            spectra = self._weighted.weighted(self._closest.row_weights)
            self._certify(self._closest, *spectra.decomposition(self._closest.weights[0]))
        bound = max(self._safe_bound, self._bound_on_path())
        if self._best is not None and self._squared_error > bound * (1.0 + self._relative_gap):
            spectra = self._weighted.weighted(self._best.row_weights)
            root_sum = spectra.nuclear_norm_from_below(self._best.weights[0])
            bound = max(bound, root_sum**2 / self._best.total)
        return gap_above(self._squared_error, bound)

    def _estimated_gap(self) -> float:
        return self._squared_error / self._estimated_bound - 1.0

    def _evaluate(self, weights: FloatArray) -> _Evaluation:
        v, row_weights = weights[0], weights[1] if len(weights) > 1 else None
        spectra = self._weighted.weighted(row_weights)
        eigenvalues, eigenvectors = spectra.decomposition(v)
        roots = [np.einsum("ij,ij,j->i", eigenvectors, eigenvectors, np.sqrt(eigenvalues))]
        if row_weights is not None:
            vectors = spectra.left_vectors(v, eigenvalues, eigenvectors)
            roots.append(np.einsum("ij,ij,j->i", vectors, vectors, np.sqrt(eigenvalues)))
        evaluation = _Evaluation(weights, np.stack(roots))
        self._count()
        if evaluation.estimated_bound > self._estimated_bound:
            self._estimated_bound, self._best = evaluation.estimated_bound, evaluation
        safe_sum = np.sum(np.sqrt(spectra.safe_eigenvalues(eigenvalues)))
        self._safe_bound = max(self._safe_bound, float(safe_sum**2 / evaluation.total))
        distance = evaluation.distance_from_feasible
        if self._closest is None or distance < self._closest.distance_from_feasible:
            self._closest = evaluation
        # Certifying costs a factorization of its own, so it waits until it may succeed.
        if self._gap_over_distance * distance <= self._relative_gap:
            self._certify(evaluation, eigenvalues, eigenvectors)
            self._gap_over_distance = max(
                _GAP_OVER_DISTANCE,
                _SAFE_SHARE * self._estimated_gap() / (distance + _TINY),
            )
            self._end_if_near(self._estimated_bound, _SAFE_SHARE)
        return evaluation

    def _certify(
        self, evaluation: _Evaluation, eigenvalues: FloatArray, eigenvectors: FloatArray
    ) -> None:
        """Keeps C of X(v) (Eq. 6), its columns scaled to norm one, if its error is the best.

        The error is that of the matrix itself, so that no error of the eigendecomposition enters
        the certificate. The eigenvectors are overwritten.
        """
        half = eigenvectors
        half *= eigenvalues**0.25
        half /= np.sqrt(evaluation.weights[0])[:, np.newaxis]
        gram = half @ half.T
        if not self._error.is_mean:
            # A larger X has no larger error. Where the weights of rounds vanish, it is far smaller
            # than one on the diagonal, and columns that are scaled may have a larger error.
            gram /= np.max(np.diagonal(gram))
            np.fill_diagonal(gram, 1.0)
        try:
            strategy = lower_triangular_factor(gram)
        except np.linalg.LinAlgError:
            return
        self._keep(strategy)

    def _keep(self, strategy: FloatArray) -> None:
        """Keeps C, its columns scaled to norm one, if its error is the best."""
        strategy /= np.linalg.norm(strategy, axis=0)
        squared_error = self._error.of_rows(self._spectra.squared_rows(strategy))
        if squared_error < self._squared_error:
            self._squared_error = squared_error
            self.strategy_matrix = strategy
