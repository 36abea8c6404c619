"""Dense factorizations, and the factorization with the least squared error, with a certificate.

With X = C^T C the problem is: minimise tr(A^T A X^-1) over positive definite X with diagonal one
(Denisov et al. Eq. 4), or, if clients return, with X of sensitivity one (BandMF Problem 1).

**The search.** :mod:`mf_aggregators.factorizations._duals` has the problem and its dual, which
L-BFGS maximises over the weights of patterns and the entries of V. Each V gives a nearly feasible
X, which is scaled to be feasible; its error is then certified.

The variables are the correlations of V. For many participations, rounds of one class can be so
strongly correlated that a search from a diagonal V fails. A second search then starts from a banded
matrix, with L = L_0 (I + E), its rows scaled, where L_0 is that of the start and E is strictly
lower triangular: around a good start the Hessian in E hardly depends on these correlations.

**One participation** is k = 1: V is diagonal. In y = v^1/2 log v the Hessian at the optimum has a
condition number that does not depend on the spread of v, and -1.5 times the gradient is a step a
little longer than one of the fixed-point iteration phi (Denisov et al. Thm 3.2), of which L-BFGS
needs a third of the evaluations.

**The largest error** of a round is at least any mean with weights w on rounds, and the bound for
diag(w)^1/2 A is jointly concave in w and V: both are searched for together, along the central path
(:mod:`mf_aggregators.factorizations._duals`). For one participation L-BFGS is tried first,
which finds weights that are far from zero.

**Many participations.** A matrix of b bands has X[i, j] = 0 for rounds b apart and more, which is
feasible under (k, b)-participation and, for many participations, near the optimum (BandMF Sec. 4).
At the optimum V = X^-1 A^T A X^-1, so that this V of the banded X, cut to the classes of rounds
modulo b, is near the solution of the dual.

**Many rounds.** For prefix sums weights and correlations hardly depend on n at the same share of a
class of one length: those of fewer classes are interpolated.
"""

import contextlib
import dataclasses
import warnings
from collections.abc import Mapping

import numpy as np
import scipy.linalg
import scipy.optimize

from mf_aggregators import inputs, workloads
from mf_aggregators.factorizations import noise_rows
from mf_aggregators.factorizations._duals import CentralPath, Evaluation, MultiEpochDual, PathPoint
from mf_aggregators.factorizations.banded import banded
from mf_aggregators.factorizations.factorization import (
    BandedFactorization,
    Factorization,
    bands_of_matrix,
    squared_rows_by_inverse,
)
from mf_aggregators.factorizations.noise_rows import dense_rows
from mf_aggregators.factorizations.searches import (
    Converged,
    NotConvergedWarning,
    Objective,
    PatternLayout,
    RoundError,
    RoundWeights,
    gap_above,
    minimise,
    progress_bar,
    weighted,
    weighted_inverse,
)
from mf_aggregators.kernel import numbers
from mf_aggregators.kernel.numbers import FloatArray
from mf_aggregators.kernel.rows import Strategy, WindowNoise
from mf_aggregators.kernel.sensitivity import of_strategy
from mf_aggregators.participation import FixedEpochOrder, Participation, SingleParticipation, check
from mf_aggregators.workloads import AnyWorkload, Workload

# The largest allowed error of the computed inverse of a given matrix, as a share of the noise.
_TOLERANCE_OF_INVERSE = 1e-8
# The bytes per entry of the arrays in the check of a given matrix: C, the identity, its inverse,
# and a product.
_BYTES_OF_CHECK = 5 * 8
# The relative gap of the banded matrix that a search starts from; this start need not be optimal.
_GAP_OF_BANDS = 1e-2
# The evaluations between two certificates; a certificate costs about as much as an evaluation.
_EVALUATIONS_BETWEEN_CERTIFICATES = 8
_LARGEST_CHANGE_OF_LOG = 12.0
# The most variables for which the central path follows an L-BFGS search that ended near the
# optimum.
_MOST_VARIABLES = 4000
# The most variables of a central path: a Hessian of this size takes a gigabyte.
_MOST_VARIABLES_OF_PATH = 10_000
# The fewest classes of rounds of a path that begins with an optimum for half of the classes.
_CLASSES_OF_COARSEST = 40
# The evaluations of L-BFGS for weights of rounds before the search switches to the path.
_EVALUATIONS_BEFORE_PATH = 100
# With this many participations, a search from a diagonal V may fail: it is stopped if its gap is
# this large after these evaluations, or if it has used half of its evaluations.
_MANY_PARTICIPATIONS = 12
_EVALUATIONS_TO_COME_NEAR = 24
_FAR = 0.1
# The evaluations that the search for a banded start may always have if A^-1 has few bands: they
# take O(n b^2) operations, and a matrix X takes n^3.
_CHEAP_EVALUATIONS = 1000
# The estimated gap at which a search ends, as a share of the gap that is to be certified; the
# second one is for one participation.
_SAFE_SHARE, _SAFE_SHARE_OF_SINGLE = 0.9, 0.99
# For one participation: the most rounds of a prefix sum without a search for fewer rounds first,
# and the gap of that search; the first estimate of the quotient of gap and distance from
# feasibility; and the number of evaluations that L-BFGS has for other errors than the mean, before
# the path.
_ROUNDS_OF_COARSEST, _GAP_OF_START = 256, 1e-4
_GAP_OVER_DISTANCE, _TINY = 2.0, 1e-300
_EVALUATIONS_OF_SINGLE = 60
# The first step of a search, relative to a step of the fixed-point iteration: the second is for
# many participations, where a longer step can leave correlations of nearly one, from which the
# search does not come back. The last is the most times that X is moved half way to its diagonal.
_FIRST_STEP, _FIRST_STEP_OF_MANY, _MOST_HALVINGS = 1.5, 0.5, 60
# A change of an objective up to this is computed from slopes; the objective is a logarithm.
_SMALL_CHANGE = 1e-6


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class DenseFactorization(Factorization):
    """A factorization with any lower-triangular, invertible strategy matrix.

    Attributes:
      matrix: C, (n, n), read-only.

    Raises:
      ValueError: If the matrix is not square, finite, lower triangular and invertible.
    """

    mechanism = "optimal"
    has_dense_rows = True
    reason = "all rows are optimised together: more rounds change the first rows"

    matrix: FloatArray

    def __post_init__(self) -> None:
        super().__post_init__()
        matrix = inputs.lower_triangular(self.matrix, "the strategy matrix").copy()
        self._set(matrix=matrix, num_rounds=len(matrix))

    def strategy_matrix(self) -> FloatArray:
        """Returns the strategy matrix C as a read-only (n, n) array."""
        return self.matrix

    def noise_recursion(self) -> WindowNoise:
        """Returns the noise recursion, in which each row combines all earlier rows of Z."""
        inverse = scipy.linalg.solve_triangular(
            self.matrix, np.eye(self.num_rounds), lower=True, check_finite=False
        )
        return dense_rows(inverse)

    def _squared_rows(self, workload: AnyWorkload) -> FloatArray | None:
        if not isinstance(workload, Workload):
            return None
        return squared_rows_by_inverse(self.matrix, workload.inverse_bands())

    def arrays(self) -> dict[str, FloatArray]:
        """Returns the lower triangle of C, row by row, as the arrays to save."""
        # A list of rows is used, because indices of the triangle would take as much memory as three
        # matrices.
        rows = [row[: i + 1] for i, row in enumerate(self.matrix)]
        return {"lower_triangle": np.concatenate(rows)}

    @classmethod
    def from_arrays(
        cls, num_rounds: int, arrays: Mapping[str, FloatArray], **attributes: object
    ) -> "DenseFactorization":
        """Makes the factorization from its arrays; see the base class."""
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
        # The constructor checks its arguments.
        return cls(matrix, **attributes)  # type: ignore[arg-type]


def optimal(
    workload: object,
    participation: Participation | None = None,
    *,
    error: RoundWeights = "mean",
    equal_column_norms: bool = False,
    relative_gap: float | None = None,
    max_evaluations: int | None = None,
    show_progress: bool = False,
) -> DenseFactorization:
    """Computes the factorization with the least squared error (mean, maximum or weighted).

    Use it when you want the least error of all matrices, for up to a few thousand rounds.

    For the mean error and single participation, it is the fixed point of Denisov et al. Thm 3.2,
    whose columns have equal norms. Under (k, b)-participation it is the solution of BandMF Problem
    1.

    Args:
      workload: A, an (n, n) lower-triangular array of full rank, a ``workloads.Workload``, or an
        int n for the prefix sum of n rounds.
      participation: The schema to optimise for: SingleParticipation, the default, or
        FixedEpochOrder. If a FixedEpochOrder allows fewer participations than fit, the matrix is
        optimised for as many as fit, and ``participation`` of the result says so.
      error: What to minimise: the ``mean`` squared error over rounds, its ``max``, or the mean with
        (n,) weights on rounds, none below zero, as an array.
      equal_column_norms: For clients that return: whether the columns of C must have
        equal norms; columns of one class of rounds are orthogonal then.
      relative_gap: Stop when the squared error is certified to be within this fraction of the
        smallest possible one; default 1e-6, and for clients that return 5e-6, or 1e-3 for ``max``.
      max_evaluations: Give up after this many evaluations of the lower bound; default 300, and
        2000 for other errors than the mean.
      show_progress: Whether to show a progress bar on standard error.

    Returns:
      A factorization of sensitivity one with its certified ``optimality_gap``. If the required gap
      was not reached, the best matrix found, with its gap and a NotConvergedWarning.

    Raises:
      ValueError: If the workload is not square, finite, lower triangular and of full
        rank, if the schema is MinSeparation and allows several participations, or if its
        participations do not fit into the rounds.

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
    num_rounds = workload.num_rounds
    inputs.check_rounds(num_rounds, 4 * 8 * num_rounds, "the optimal factorization")
    participation = check(
        SingleParticipation() if participation is None else participation, num_rounds
    )
    measure = RoundError.of(error, num_rounds)
    returns = participation.most_participations(num_rounds) > 1
    if returns and not participation.is_evenly_spaced:
        raise ValueError(
            "optimal solves for single participation and for participations exactly b rounds "
            f"apart (FixedEpochOrder), found {participation}; for clients that return after at "
            "least b rounds, use banded with at most b bands."
        )
    if returns:
        separation = participation.separation_in(num_rounds)
        participation = FixedEpochOrder(-(-num_rounds // separation), separation)
    if relative_gap is None:
        relative_gap = (1e-3 if measure.is_maximum else 5e-6) if returns else 1e-6
    relative_gap = numbers.positive_number(relative_gap, "relative_gap")
    if max_evaluations is None:
        max_evaluations = 300 if measure.is_mean else 2000
    max_evaluations = numbers.positive_integer(max_evaluations, "max_evaluations")

    matrix = workload.matrix()
    # The workload is scaled to keep numbers within the range of floats.
    largest = np.max(np.abs(matrix))
    inverse_bands = workload.inverse_bands()
    search = _OptimumSearch(
        matrix / largest,
        None if inverse_bands is None else inverse_bands * largest,
        participation,
        equal_column_norms=equal_column_norms,
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
    NotConvergedWarning.unless_reached(gap, relative_gap, search.evaluations)
    factorization = DenseFactorization(
        search.strategy_matrix,
        participation=participation,
        parameters={
            **measure.parameters(),
            "relative_gap": relative_gap,
            "equal_column_norms": equal_column_norms or not returns,
            "workload": workload.fingerprint(),
        },
    )
    return dataclasses.replace(factorization, optimality_gap=gap if np.isfinite(gap) else None)


def from_matrix(C: object) -> BandedFactorization | DenseFactorization:
    """Makes a factorization of a given strategy matrix.

    Use it when another program has computed a dense C.

    Sensitivity and errors are computed from C. Its computed inverse N is checked: with E = C N - I,
    the noise N Z protects C x by C N Z = (I + E) Z, which is at least as much noise as (1 - ||E||)
    Z. It takes O(n^3) operations.

    Args:
      C: (n, n) floats, finite, lower triangular, without a zero on the diagonal.

    Returns:
      A factorization of a float64 copy, without an optimality gap: banded if C has fewer than n
        bands, otherwise dense. The noise of a dense one draws all earlier rows of Z in each round.

    Raises:
      ValueError: If C does not have this form, or ||E|| is above 1e-8 (Frobenius norm).

    Example:
      >>> import mf_aggregators as mfa
      >>> made = mfa.factorizations.from_matrix([[1, 0], [0.5, 1]])
      >>> round(made.sensitivity(mfa.participation.SingleParticipation()).value ** 2, 6)
      1.25
    """
    matrix = inputs.lower_triangular(C, "the strategy matrix")
    rounds = len(matrix)
    inputs.check_rounds(rounds, _BYTES_OF_CHECK * rounds, "the check of a dense matrix")
    bands = Strategy(matrix, rounds, is_dense=True).num_bands
    made: BandedFactorization | DenseFactorization = DenseFactorization(matrix)
    if bands < rounds:
        made = BandedFactorization(bands_of_matrix(matrix, bands))
    with np.errstate(all="ignore"):
        product = made.strategy_matrix() @ noise_rows.apply(made.noise_recursion(), np.eye(rounds))
        difference = float(np.linalg.norm(product - np.eye(rounds)))
    # The comparison is negated so that NaN is refused, too.
    if not difference <= _TOLERANCE_OF_INVERSE:
        raise ValueError(
            "the strategy matrix is too close to singular for floats: C times its computed inverse "
            f"differs from the identity by {difference:.2g} (Frobenius norm), and at most "
            f"{_TOLERANCE_OF_INVERSE:g} is allowed."
        )
    return made


@dataclasses.dataclass(frozen=True, eq=False)
class _Point:
    """A point of a search, with variables (m,), value, value for the optimiser, and gradient."""

    free: FloatArray
    value: float
    shown: float
    gradient: FloatArray


class _ObjectiveBySlopes:
    """An objective that computes small changes from gradients, which are more accurate.

    Near the iterate that a line search starts from, the change of the value is the mean of the two
    directional derivatives along the step. For quadratic objectives it is exact, and conditions on
    such values are the approximate Wolfe conditions of Hager and Zhang (*A new conjugate gradient
    method with guaranteed descent and an efficient line search*, 2005). This matters because the
    error of the result depends on the remaining gradient, but the error of the value only on its
    square.
    """

    def __init__(self, objective: Objective) -> None:
        """Begins without any evaluation.

        Args:
          objective: A function that returns the logarithm of a bound or of an error.
        """
        self._objective = objective
        self._iterate: _Point | None = None
        self._last: _Point | None = None

    def __call__(self, free: FloatArray) -> tuple[float, FloatArray]:
        """Returns the value minus that of the first evaluation, and the (m,) gradient.

        Args:
          free: (m,) variables.
        """
        value, gradient = self._objective(free)
        # The values that the optimiser sees begin at zero, where floats have the finest resolution.
        shown, start = 0.0, self._iterate
        if start is not None and abs(value - start.value) <= _SMALL_CHANGE:
            mean_slope = 0.5 * (gradient + start.gradient)
            shown = start.shown + float(mean_slope @ (free - start.free))
        elif start is not None:
            shown = start.shown + value - start.value
        self._last = _Point(free.copy(), value, shown, gradient)
        if start is None:
            self._iterate = self._last
        return shown, gradient

    def accept(self, _: FloatArray) -> None:
        """Marks the last point as an iterate, from which the next line search starts."""
        self._iterate = self._last


def _with_walls(objective: Objective) -> Objective:
    """Returns the objective with a finite, high value where the original raises LinAlgError.

    The line search then has to come back, and interpolates from this value: it is above the value
    of the last point by the change that the last slope predicts.

    Args:
      objective: The original objective, which must not raise at the first point.
    """
    accepted: list[tuple[FloatArray, float, FloatArray]] = []

    def function(free: FloatArray) -> tuple[float, FloatArray]:
        try:
            value, gradient = objective(free)
        except np.linalg.LinAlgError:
            if not accepted:
                raise
            last, value, gradient = accepted[-1]
            return value + abs(float(gradient @ (free - last))), -gradient
        accepted[:] = [(free.copy(), value, gradient)]
        return value, gradient

    return function


class _GoneAstrayError(Exception):
    """Raised if a search is too far from the optimum to continue."""


@dataclasses.dataclass(eq=False)
class _OptimumSearch:
    """Search for the optimal dense matrix: L-BFGS over the dual, with the best matrix so far.

    Attributes:
      workload: A, an (n, n) lower-triangular array.
      inverse_bands: The (n, w) bands of A^-1; None if it has many.
      participation: As in ``optimal``.
      equal_column_norms: As in ``optimal``; always True for one participation.
      error: The error that is minimised.
      relative_gap: As in ``optimal``.
      max_evaluations: As in ``optimal``.
      show_progress: As in ``optimal``.
      evaluations: The number of evaluations of the bound so far.
      progress: The progress bar.
      strategy_matrix: The best C so far, (n, n); empty before the first certificate.
    """

    workload: FloatArray
    inverse_bands: FloatArray | None
    participation: Participation
    equal_column_norms: bool
    error: RoundError
    relative_gap: float
    max_evaluations: int
    show_progress: bool
    evaluations: int = dataclasses.field(default=0, init=False)

    def __post_init__(self) -> None:
        self.progress = progress_bar("optimum", show=self.show_progress)
        self.strategy_matrix = np.empty(0)
        self._squared_error = np.inf
        # The best lower bound that the central path gave, which rounding may have raised, and its
        # point.
        self._bound_of_path = 0.0
        self._best_on_path: tuple[CentralPath, PathPoint] | None = None
        # The workload with the weights of a mean error; for the maximum, the search varies weights.
        error, num_rounds = self.error, len(self.workload)
        self._weighted, self._weighted_bands = weighted(self.workload, error.raised), None
        if self.inverse_bands is not None:
            self._weighted_bands = weighted_inverse(self.inverse_bands, error.raised)
        most = self.participation.most_participations(num_rounds)
        self._is_single, self._is_maximum = most == 1, error.is_maximum
        separation = num_rounds if most == 1 else self.participation.separation_in(num_rounds)
        self._layout = PatternLayout(num_rounds, separation)
        self._has_many_participations = self._layout.positions >= _MANY_PARTICIPATIONS
        self.equal_column_norms = self.equal_column_norms or self._is_single
        # The logarithms of the (n,) weights of rounds, for the maximum.
        self._log_rows = np.zeros(num_rounds)
        self._safe_share = _SAFE_SHARE_OF_SINGLE if self._is_single else _SAFE_SHARE
        self._dual = MultiEpochDual(
            self._weighted,
            self._weighted_bands,
            self._layout,
            equal_column_norms=self.equal_column_norms,
        )
        # The number of evaluations at which the current part of the search ends.
        self._budget = self.max_evaluations
        # The factor L_0 of the correlations of V, from which the search starts.
        self._base = np.tile(np.eye(self._layout.positions), (self._layout.separation, 1, 1))
        self._leaves_if_far = False
        self._next_certificate = _EVALUATIONS_BETWEEN_CERTIFICATES * (
            1 + self._dual.has_cheap_roots
        )
        self._gap_over_distance = _GAP_OVER_DISTANCE
        self._best: Evaluation | None = None

    def run(self) -> None:
        """Searches until the target is certified or no progress is made.

        Raises:
          Converged: When the target is certified.
          ValueError: If the error takes the central path, and it has too many variables.
        """
        returns_to_worst = self._is_maximum and not self._is_single
        size = len(self._dual.cone.costs) + self._layout.num_rounds * self._is_maximum
        if self.error.has_vanishing_weights or returns_to_worst:
            if size > _MOST_VARIABLES_OF_PATH:
                raise ValueError(
                    f"optimal with this error needs {size} variables for {self._layout.num_rounds} "
                    f"rounds and {self._layout.positions} participations, and at most "
                    f"{_MOST_VARIABLES_OF_PATH} are allowed: use banded."
                )
            self._run_on_path()
            return
        is_affordable = self._is_single or size <= _MOST_VARIABLES
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
        """Searches along the central path, on which no weight of a round becomes zero."""
        path = CentralPath(self.workload, self._dual.cone, self.error.weights, self.relative_gap)
        for point in path.points(self._start_of_path(path)):
            self._count()
            if point.estimated_bound > self._bound_of_path:
                self._bound_of_path, self._best_on_path = point.estimated_bound, (path, point)
            with contextlib.suppress(np.linalg.LinAlgError):
                self._keep(_lower_triangular_factor(path.gram_matrix(point)))
            self._end_if_near(self._bound_of_path)
            if self.evaluations >= self._budget:
                return

    def _fewer_rounds(self, factor: int) -> "tuple[_OptimumSearch, PatternLayout] | None":
        """Runs the search for a prefix sum of fewer rounds; returns None for other workloads."""
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
            participation=FixedEpochOrder(fewer.positions, fewer.separation),
            error=RoundError(fewer.num_rounds, None, self._is_maximum),
            relative_gap=_GAP_OF_START if self._is_single else self.relative_gap,
        )
        with search.progress, contextlib.suppress(Converged):
            search.run()
        return search, fewer

    def _start_of_path(self, path: CentralPath) -> PathPoint | None:
        """Returns a start of the path from half of the classes' optimum; None if there is none."""
        is_large = self._layout.separation >= _CLASSES_OF_COARSEST and not self._is_single
        found = self._fewer_rounds(2) if self._is_maximum and is_large else None
        if found is None:
            return None
        search, fewer = found
        self.evaluations += search.evaluations
        assert search._best_on_path is not None
        _, point = search._best_on_path
        layout, dual, known = self._layout, self._dual, search._dual
        num_weights = known.cone.num_weights
        weights, entries = np.zeros(known.weights_mask.shape), np.zeros(known.pair_exists.shape)
        weights[known.weights_mask] = np.log(point.free[:num_weights])
        roots = known.cone.roots_of_diagonal(point.free)
        entries[known.pair_exists] = point.free[num_weights:] / roots
        free, num_weights = np.zeros(len(dual.cone.costs)), dual.cone.num_weights
        free[:num_weights] = np.exp(layout.refined(weights, fewer)[dual.weights_mask])
        free[num_weights:] = layout.refined(entries, fewer)[dual.pair_exists]
        free[num_weights:] *= dual.cone.roots_of_diagonal(free)
        row_weights = self._refined_rows(np.log(point.row_weights), fewer)
        try:
            return path.near_optimum(np.exp(row_weights), free)
        except np.linalg.LinAlgError:
            # If V is not positive definite, the path has its usual start.
            return None

    def _refined_rows(self, values: FloatArray, fewer: PatternLayout) -> FloatArray:
        """Interpolates (n,) values of rounds from values of fewer rounds."""
        return self._layout.by_round(self._layout.refined(fewer.by_position(values), fewer))

    def _run_for_mean(self) -> None:
        if not self._has_many_participations:
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

    def _run_from_bands(self) -> None:
        """Searches from a banded matrix, if its V is positive definite in spite of rounding."""
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
            # Each class has one pattern, and so one weight for all its rounds.
            exists = self._layout.exists
            weights = np.sum(weights * exists, axis=1, keepdims=True)
            weights = weights / np.sum(exists, axis=1, keepdims=True)
        start = np.log(weights[self._dual.weights_mask])
        try:
            self._base = np.linalg.cholesky(
                blocks / (roots[:, :, np.newaxis] * roots[:, np.newaxis])
            )
            self._run_from(start)
        except np.linalg.LinAlgError:
            # The start cannot be evaluated, because V is too nearly singular.
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
        # The start is one step of the fixed-point iteration, which for a diagonal V is that of phi.
        self._run_from(np.log((self._dual.by_weights(first) * weights)[mask]))

    def _first_weights(self) -> FloatArray:
        """Returns (n,) weights v for one participation, from diag A^T A or from fewer rounds."""
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

    def _run_from(self, start: FloatArray) -> None:
        """Searches from given logarithms of weights and from E = 0."""
        mask, exists = self._dual.weights_mask, self._dual.pair_exists
        log_rows = self._log_rows if self._is_maximum else np.empty(0)
        first_step = _FIRST_STEP_OF_MANY if self._has_many_participations else _FIRST_STEP
        scale, by_class = _scales(start, first_step), np.zeros(mask.shape)
        by_class[mask] = scale
        # An entry of E has the scale of the largest weight of its class.
        largest = np.broadcast_to(np.max(by_class, axis=1, keepdims=True), exists.shape)
        scales = np.concatenate([_scales(log_rows, first_step), scale, largest[exists]])
        ends = np.cumsum([len(log_rows), len(start)])

        def negative_log_bound(free: FloatArray) -> tuple[float, FloatArray]:
            rows, logs, some = np.split(free / scales, ends)
            weights, entries = np.zeros(mask.shape), np.zeros(exists.shape)
            weights[mask], entries[exists] = np.exp(logs), some
            value, *slopes = self._negative_log_bound(np.exp(rows), weights, entries)
            by_rows, by_weights, by_entries = slopes
            slope = np.concatenate([by_rows, by_weights[mask], by_entries[exists]])
            return value, slope / scales

        first = np.concatenate([log_rows, start, np.zeros(len(scales) - ends[1])]) * scales
        reach = np.repeat([_LARGEST_CHANGE_OF_LOG, np.inf], [ends[1], len(scales) - ends[1]])
        reach *= scales
        objective = _ObjectiveBySlopes(negative_log_bound)
        minimise(
            _with_walls(objective),
            first,
            max_evaluations=self._budget,
            corrections=30,
            least_change=0.0,
            bounds=scipy.optimize.Bounds(first - reach, first + reach),
            callback=objective.accept,
        )

    def _negative_log_bound(
        self, free_rows: FloatArray, weights: FloatArray, entries: FloatArray
    ) -> tuple[float, FloatArray, FloatArray, FloatArray]:
        """Returns the negative logarithm of the dual bound, with its derivatives.

        The bound is tr((A V A^T)^1/2)^2 / sum_p v_p.

        Args:
          free_rows: (n,) weights u of rounds for the maximum; none for the mean.
          weights: The weights v.
          entries: (b, pairs) entries of E.

        Returns:
          The value, and its derivatives by logarithms of both weights and by entries.
        """
        factors = self._dual.factors(self._base, entries)
        norms = np.linalg.norm(factors, axis=2, keepdims=True)
        rows = factors / norms
        row_weights = free_rows if self._is_maximum else None
        evaluation = self._evaluate(weights, self._dual.correlations(rows), row_weights)
        total, root_sum = float(np.sum(weights)), evaluation.root.trace
        by_weights = self._dual.by_weights(evaluation)
        by_correlations = self._dual.by_correlations(evaluation)
        by_entries = self._dual.by_entries(self._base, by_correlations, rows, norms)
        value, by_rows = float(np.log(total) - 2.0 * np.log(root_sum)), np.empty(0)
        if evaluation.root.rows is not None:
            sum_of_rows = float(np.sum(free_rows))
            value += float(np.log(sum_of_rows))
            by_rows = free_rows / sum_of_rows - evaluation.root.rows / root_sum
        return (
            value,
            by_rows,
            weights / total - by_weights * weights / root_sum,
            -by_entries / root_sum,
        )

    def certified_gap(self) -> float:
        """Returns the relative gap of the best matrix, by a lower bound that is certain."""
        bound = 0.0
        if self._best_on_path is not None:
            path, point = self._best_on_path
            bound = path.bound_from_below(point)
        if self._best is not None:
            self._certify_best()
            if gap_above(self._squared_error, bound) > self.relative_gap:
                bound = max(bound, self._dual.bound_from_below(self._best))
        return gap_above(self._squared_error, bound)

    def _certify_best(self) -> None:
        assert self._best is not None
        if not np.isfinite(self._squared_error) or self._estimated_gap() > self.relative_gap:
            self._certify(self._best)

    def _estimated_gap(self) -> float:
        assert self._best is not None
        return self._squared_error / self._best.estimated_bound - 1.0

    def _evaluate(
        self, weights: FloatArray, correlations: FloatArray, row_weights: FloatArray | None
    ) -> Evaluation:
        """Evaluates the dual, keeps the best V, and sometimes certifies its matrix.

        Raises:
          LinAlgError: If V is not positive definite.
          Converged: If the target is certified.
          _GoneAstrayError: If the search is far from the optimum, and is to be left then.
        """
        evaluation = self._dual.at(weights, correlations, row_weights)
        self._count()
        if self._best is None or evaluation.estimated_bound > self._best.estimated_bound:
            self._best = evaluation
        if self._is_single:
            # A certificate costs as much as an evaluation, so it waits until it is likely to
            # succeed.
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
                # With roots by blocks, a certificate costs as much as many evaluations.
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
        """Shows and returns the gap to a bound; raises Converged if the gap is small enough."""
        gap = float(self._squared_error / bound - 1.0)
        self.progress.set_postfix_str(f"relative gap {gap:.1e}")
        if gap <= self._safe_share * self.relative_gap:
            raise Converged
        return gap

    def _certify(self, evaluation: Evaluation) -> None:
        """Keeps the C of X(V), scaled to be feasible, if its error is the best so far.

        The error is that of the matrix itself, by a triangular solve, with the sensitivity that
        follows from the matrix: no number of the search is used.
        """
        is_raised = self.equal_column_norms and not self.error.is_mean
        gram = self._dual.gram_matrix(evaluation, by_class=not is_raised)
        if is_raised:
            # The diagonal of X is raised to one, which makes no error larger; scaling columns
            # might.
            gram /= np.max(np.diagonal(gram))
            np.fill_diagonal(gram, 1.0)
        self._keep(_factor_towards_diagonal(gram))

    def _keep(self, strategy: FloatArray) -> None:
        """Keeps a matrix C, scaled to sensitivity one, if its error is the best so far."""
        if self.equal_column_norms:
            strategy /= np.linalg.norm(strategy, axis=0)
        bands = self.inverse_bands
        rows = None if bands is None else squared_rows_by_inverse(strategy, bands)
        if rows is None:
            decoder = scipy.linalg.solve_triangular(
                strategy, self.workload.T, lower=True, trans="T", check_finite=False
            )
            rows = np.sum(np.square(decoder), axis=0)
        dense = Strategy(strategy, strategy.shape[1], is_dense=True)
        bound = of_strategy(dense, self.participation.as_schema()).value
        squared_error = bound**2 * self.error.of_rows(rows)
        if squared_error < self._squared_error:
            self._squared_error = squared_error
            self.strategy_matrix = strategy / bound


def _factor_towards_diagonal(gram: FloatArray) -> FloatArray:
    """Returns the C of X or, if X is not positive definite, of an X that is closer to diag X."""
    diagonal = np.diagonal(gram).copy()
    for _ in range(_MOST_HALVINGS):
        with contextlib.suppress(np.linalg.LinAlgError):
            return _lower_triangular_factor(gram)
        gram *= 0.5
        np.fill_diagonal(gram, diagonal)
    raise np.linalg.LinAlgError("X is not finite.")


def _scales(logs: FloatArray, first_step: float) -> FloatArray:
    """Returns scales of logarithms of weights with which -gradient is a good first step."""
    shares = np.exp(logs - np.max(logs, initial=-np.inf))
    return np.asarray(np.sqrt(shares / (first_step * np.sum(shares))))


def _banded_start(
    workload: FloatArray,
    participation: Participation,
    layout: PatternLayout,
    *,
    equal_column_norms: bool,
    max_evaluations: int,
    show_progress: bool,
) -> tuple[FloatArray, FloatArray]:
    """Returns a feasible banded matrix, and the V that would belong to it at the optimum.

    Args:
      workload: A, an (n, n) lower-triangular array.
      participation: The participation schema.
      layout: The classes of rounds, each of which is one pattern.
      equal_column_norms: Whether columns of C must have equal norms.
      max_evaluations: The most evaluations of the search for the banded matrix.
      show_progress: Whether to show a progress bar on standard error.

    Returns:
      (n, n) C of sensitivity one, and (b, K, K) blocks of V, with the identity's entries for
      missing rounds. Rounding may have made V indefinite.
    """
    with warnings.catch_warnings():
        # The search may stop before its target without a warning, since the matrix is only a start.
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
    # The rows of A X^-1 = A C^-1 C^-T are computed by two triangular solves for its transpose.
    half = scipy.linalg.solve_triangular(strategy, workload.T, lower=True, trans="T")
    half = scipy.linalg.solve_triangular(strategy, half, lower=True)
    rounds, exists = layout.rounds, layout.exists
    blocks = np.tile(np.eye(layout.positions), (layout.separation, 1, 1))
    for of_class, there, block in zip(rounds, exists, blocks, strict=True):
        rows = half[of_class[there]]
        block[np.ix_(there, there)] = rows @ rows.T
    return strategy, blocks


def _lower_triangular_factor(gram_matrix: FloatArray) -> FloatArray:
    """Returns the lower-triangular C with C^T C = X and a positive diagonal.

    A Cholesky factor L of X satisfies L L^T = X, which is the wrong side. With J the
    matrix that reverses the order of rounds, J X J = L L^T gives C = J L^T J: lower
    triangular, and C^T C = J L L^T J = X. Where X is b-banded so is L, and with it C
    (BandMF Prop. 4.1).

    Args:
      gram_matrix: X, an (n, n) symmetric positive definite array.

    Returns:
      C, an (n, n) float64 array.

    Raises:
      np.linalg.LinAlgError: If X is not positive definite.
    """
    factor = scipy.linalg.cholesky(gram_matrix[::-1, ::-1], lower=True, check_finite=False)
    return np.ascontiguousarray(factor.T[::-1, ::-1])
