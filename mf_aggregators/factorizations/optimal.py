"""Dense factorizations, and the one of least squared error, with a certificate.

With X = C^T C the problem is: minimise tr(A^T A X^-1) over positive definite X with diagonal one
(Denisov et al. Eq. 4), or, if clients return, with X of sensitivity one (BandMF Problem 1).
:mod:`mf_aggregators.factorizations._multi_epoch` searches, and
:mod:`mf_aggregators.factorizations._multi_epoch_dual` has the lower bounds.
"""

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import scipy.linalg

from mf_aggregators import inputs, memory, workloads
from mf_aggregators.factorizations import noise_rows
from mf_aggregators.factorizations._multi_epoch import OptimumSearch
from mf_aggregators.factorizations._multi_epoch_dual import PatternEntries
from mf_aggregators.factorizations._round_errors import RoundError, RoundWeights
from mf_aggregators.factorizations.banded import BandedFactorization
from mf_aggregators.factorizations.convergence import Converged, warn_unless_reached
from mf_aggregators.factorizations.factorization import Factorization, squared_rows_by_inverse
from mf_aggregators.kernel import numbers
from mf_aggregators.kernel.numbers import FloatArray
from mf_aggregators.kernel.rows import WindowNoise, dense_rows
from mf_aggregators.linear_algebra.banded_matrices import bands_of_matrix, lower_bands
from mf_aggregators.participation import Participation, SingleParticipation, check_fits
from mf_aggregators.workloads import Workload

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
    if pattern_entries not in ("any", "non_negative", "orthogonal"):
        raise ValueError(
            "pattern_entries must be 'any', 'non_negative' or 'orthogonal', found "
            f"{numbers.shown(pattern_entries)}."
        )
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

    matrix = workloads.matrix_of(workload)
    # A factor on the workload changes nothing but the range of numbers.
    largest = np.max(np.abs(matrix))
    inverse_bands = workloads.inverse_bands(workload)
    search = OptimumSearch(
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
