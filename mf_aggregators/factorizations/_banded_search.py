r"""Search for the banded strategy matrix with the least error, in O(n b^2) operations.

L-BFGS runs over the entries of C before its columns are scaled to keep the constraint. Error and
slope come from :mod:`mf_aggregators.linear_algebra`, and
:mod:`mf_aggregators.factorizations._band_certificate` says how far the best matrix is from the
optimum at most.

Bounds on the mean with any weights of rounds bound the maximum from below
(:mod:`mf_aggregators.factorizations.searches`), so that each pair of a matrix and of weights
for which it is nearly best has a certified gap.

**Turns.** Multipliers w_i and the errors e'_i of an earlier point give this convex function:

    sum_i w_i e'_i (1 + ((e_i / e'_i)^c_i - 1) / c_i)

Its slope in X is that of a mean with weights w_i (e_i / e'_i)^(c_i - 1). A turn of few steps
lowers the function; its weights, times a power of e_i over their mean, are the next w: a method of
multipliers with some over-relaxation. The smaller w_i is, the less the matrix changes where it
changes by a factor. So c_i, and the power, is larger there, as w_i^-0.35. Rounds whose errors
stay below the maximum would have weights near zero, and make the dual of the certificate singular.
As many small ones as a part of the gap pays for are raised to one floor: a weight phi costs phi (1
- e_i / max e) of the bound.

**Means of several turns.** Errors of rounds with small weights overshoot from turn to turn. They
are convex in X, so that those of the mean of the last few X are below the means of theirs, and the
largest of them far below. X has few bands and norms that are allowed, as all of them have, and so
has the mean.

**Fewer rounds.** In rounds over bands, the best weights and matrices of different sizes are alike:
between two multiples of b, weights and entries over those of the square root change little. The
search begins with those of half the bands. Where there are many blocks of b rounds, it begins with
those of half the blocks, of which the middle one is repeated: each block adds one to the largest
error and more, but 1 / m^2 more alone in the middle of m blocks. So the bound for half the blocks,
and one for each other block, is a bound as well. As the last blocks have nearly all of the weight,
they give another.

**Its metric.** Of a change dC = Y C of the strategy, the first-order change of A C^-1 is -A C^-1 Y.
So Y is measured by the diagonal of (A C^-1)^T W A C^-1, by rows. L-BFGS starts from the inverse of
that, restricted to bands on both sides; pairs stay from turn to turn.

**Late turns.** If errors still swing after a third of the evaluations, as they do where rates
change, c is the same for all rounds, turns take more steps, and each weight gets a small share of
the mean in place of a floor: the exponential method of multipliers (Tseng and Bertsekas, 1993).
"""

import collections
import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import TypeVar

import numpy as np
from scipy.linalg.blas import daxpy, ddot
from scipy.linalg.lapack import dpbtrf

from mf_aggregators import linear_algebra
from mf_aggregators.factorizations._band_certificate import BandedWorkload
from mf_aggregators.factorizations.searches import (
    Converged,
    PatternLayout,
    RoundError,
    gap_above,
    minimise,
    progress_bar,
)
from mf_aggregators.kernel.numbers import FloatArray, IntArray
from mf_aggregators.linear_algebra import (
    BandedCovariances,
    BandedMatrix,
    column_sums,
    spread_columns,
    square_root_bands,
)
from mf_aggregators.workloads import AnyWorkload, Workload

_Searched = TypeVar("_Searched", bound="_BandedSearch")
# The number of evaluations before the first certificate, which costs about five evaluations, and
# the fewest and the most evaluations between two certificates.
_FIRST_CERTIFICATE = 50
_FEWEST_BETWEEN_CERTIFICATES, _MOST_BETWEEN_CERTIFICATES = 10, 25
# The search ends at this share of the gap that is to be certified.
_SAFE_SHARE = 0.9
# The most rounds for which certificates use vectors over all rounds, which take n^2 b operations:
# at the end of a search, and between evaluations.
_MOST_ROUNDS_OF_VECTORS, _MOST_ROUNDS_IN_BETWEEN = 4096, 512
# Powers of the weights of a row and of a column, and of a lag, by which the variable of an entry is
# scaled: of many powers that were tried, these took the fewest steps. For equal norms and prefix
# sums, _POWERS_FOR_PREFIX_SUMS takes a quarter fewer steps than _POWERS, at (rounds, bands) =
# (1026, 171), (2052, 64), (4096, 32) and (10,000, 16); with momentum or unequal norms, more.
_POWERS, _POWERS_FOR_PREFIX_SUMS = (0.0, -0.375, 0.0), (-0.6, 0.2, 0.1)
# The least weight of a column, relative to the largest, in the scales of the variables.
_LEAST_WEIGHT = 1e-4
# The change of entries of C by which curvature is estimated, relative to the largest entry.
_SMALL_STEP = 1e-5
# The length of the first step, relative to C, if the error is not convex along the step.
_CAUTIOUS_STEP = 1e-2
# The value of the objective if the error is beyond floats.
_LARGEST_LOG = 1e3
# The largest logarithm of a power of errors that is computed.
_LARGEST_POWER = 600.0
# The number of pairs of steps and slope changes that L-BFGS keeps.
_CORRECTIONS = 20
# The exponent c of a round of mean weight, the power of weights in other exponents, and their
# limits.
_EXPONENT, _POWER_OF_WEIGHTS, _EXPONENTS_BETWEEN = 9.0, -0.35, (5.0, 60.0)
# Factors of the powers by which weights change between turns; the second one is for many blocks,
# where errors swing more.
_RELAXATIONS = 1.1, 0.7
# The largest change of the logarithm of a weight between two turns.
_LARGEST_CHANGE_OF_LOG = 1.5
# Raising small weights of rounds may cost this share of a budget. The budget is the gap that is to
# be certified or, if that is more, a multiple of the distance of the maximum from the mean (the
# second one with many blocks), up to the last number.
_SHARE_OF_FLOOR, _FLOORS_BY_DISTANCE, _MOST_FOR_FLOOR = 0.5, (0.2, 0.03), 0.03
# The number of steps of the first turn, and the fewest and the most steps of later turns.
_STEPS_OF_FIRST_TURN, _FEWEST_STEPS, _MOST_STEPS = 15, 3, 6
# The most steps of a turn close to the target, and the distance that counts as close, relative to
# the target. With fewer steps errors of rounds would swing, and the certificate needs a matrix that
# is nearly the best for its weights.
_MOST_STEPS_NEARBY, _NEARBY = 20, 1.1
# A turn ends when the expected relative decrease of a step is below this share of the distance of
# the weights from their optimum (``off_by``); the first turn ends at the second number.
_SHARE_OF_STEP, _STEP_OF_FIRST_TURN = 0.05, 1e-4
# Turns are late after this share of the evaluations. Then their exponent c and their most steps are
# these, and weights get this share of their mean, relative to the gap that is to be certified.
_LATE, _LATE_EXPONENT, _MOST_LATE_STEPS, _LATE_SHARE_OF_MEAN = 1.0 / 3.0, 16.0, 60, 0.5
# The number of turns without a step after which the search ends.
_MOST_IDLE_TURNS = 100
# The numbers of turns over which means of X are taken, and the largest distance of the maximum
# above the mean at which such means are tried.
_TURNS_OF_MEANS, _NEAR_ENOUGH_FOR_MEANS = (6, 16, 48), 0.06
# Certificates are computed when the distance is below this share of the target, and at most once in
# this number of evaluations.
_SAFE_DISTANCE, _BETWEEN_LOOKS = 0.97, 10
# The search for the maximum ends at this share of the gap that is to be certified, since the gap of
# the best matrix is stated.
_SAFE_SHARE_OF_MAXIMUM = 0.98
# Line search: the share of the expected decrease that suffices, the first step without curvature,
# the shortest step, and the increase that counts as rounding.
_SUFFICIENT, _FIRST_STEP, _SHORTEST_STEP, _LEAST_DECREASE = 1e-4, 0.5, 1e-8, 1e-14
# The fewest bands with which a search begins from a search with half the bands, and the most blocks
# of b rounds without a search of half the blocks.
_FEWEST_BANDS, _MOST_BLOCKS = 12, 16
# The most evaluations of a search with half the blocks, times the number of its blocks.
_EVALUATIONS_OF_BLOCKS = 64_000
# The number of last blocks, and of their rounds, with weights that give the bound by last rounds: a
# few arrays have the square of the rounds. Then the largest distance of the maximum from the mean
# at which this bound is computed, relative to the gap that is to be certified, and the evaluations
# between two of these bounds.
_LAST_BLOCKS, _MOST_LAST_ROUNDS = 128, 8192
_DISTANCE_FOR_LAST_BLOCKS, _BETWEEN_LOOKS_AT_LAST_BLOCKS = 1.1, 150
# The least cost of raising a weight by one, so that the floor of weights has a limit.
_LEAST_COST = 1e-4
# The least cosine between a step and the change of the slope: a smaller one is only rounding.
_LEAST_COSINE = 1e-10


@dataclasses.dataclass(frozen=True, eq=False)
class _Strategy:
    """A strategy matrix in a search, before and after its columns are scaled to the constraint.

    Attributes:
      bands: (n, b) bands before scaling.
      norms: (n,) numbers by which the columns are divided.
      scaled: (n, b) bands after scaling.
      covariances: The covariances of the scaled matrix's noise.
    """

    bands: FloatArray
    norms: FloatArray
    scaled: FloatArray
    covariances: BandedCovariances

    @functools.cached_property
    def rows(self) -> FloatArray:
        """The (n,) squared errors of the rounds."""
        return self.covariances.squared_rows()


@dataclasses.dataclass(eq=False)
class _BandedSearch:
    """Search for the least mean error: L-BFGS over the entries of C, with the best bound so far.

    Attributes:
      workload: A, known by its name or an (n, n) lower-triangular array of full rank.
      layout: The classes of rounds: the squared norms of the columns of a class sum to at most one.
      num_bands: b.
      error: The error that is minimised.
      relative_gap: The relative gap at which the search ends.
      max_evaluations: The number of evaluations after which the search ends anyway.
      show_progress: Whether to show a bar on standard error.
      evaluations: The number of evaluations of the error so far.
      best_bands: (n, b) bands of the best matrix, of sensitivity one.
      multipliers: (n,) weights of rounds, for the maximum.
      bound: A lower bound on the squared error of any feasible matrix.
    """

    workload: AnyWorkload
    layout: PatternLayout
    num_bands: int
    error: RoundError
    relative_gap: float
    max_evaluations: int
    show_progress: bool
    evaluations: int = dataclasses.field(default=0, init=False)
    bound: float = dataclasses.field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self._prepared = BandedWorkload.of(self.workload, self.num_bands, self.error.weights)
        self._progress = progress_bar(f"{self.num_bands} bands", show=self.show_progress)
        self.multipliers = np.full(self.error.num_rounds, 1.0 / self.error.num_rounds)
        self.best_bands = np.empty(0)
        # The error of the best matrix, and of the matrices for which both kinds of bounds were
        # computed last.
        self._best_error = self._certified_error = self._error_by_vectors = np.inf
        # The gap at the last certificate, the evaluation of that certificate, and that of the next
        # one.
        self._gap, self._looked_at, self._next_certificate = np.inf, 0, _FIRST_CERTIFICATE

    def finished(self: _Searched, start: FloatArray) -> _Searched:
        """Runs the search, closes its progress bar and returns the search.

        Args:
          start: (n, b) bands; their matrix is kept if no better one is found.
        """
        covariances = BandedCovariances(start, self._prepared.blocks)
        self._keep(start, self._error_of(covariances))
        with self._progress, contextlib.suppress(Converged):
            self.run(start)
        return self

    def run(self, bands: FloatArray) -> None:
        """Searches until the target is certified or no progress is made.

        Args:
          bands: (n, b) bands to begin with.

        Raises:
          Converged: When the target is certified.
        """
        # Entries of rounds that contribute more to the error, by the diagonal of the dual, matter
        # more. The search takes fewer steps if variables are scaled by a power of that. The
        # optimiser's first step has length one, so variables are also scaled to make it the step
        # that the curvature along the gradient suggests.
        in_band = np.tri(len(bands), self.num_bands, dtype=bool)
        _, slope, weights = self._log_error(bands)
        scales = self._scales_of_variables(bands, weights)
        direction = slope * scales
        length = float(np.linalg.norm(direction))
        if not length > 0.0:
            return
        move = direction * scales
        move *= _SMALL_STEP * np.max(np.abs(bands)) / np.max(np.abs(move))
        _, moved, _ = self._log_error(bands - move)
        share = float(np.max(np.abs(move)) / np.max(np.abs(direction * scales)))
        curvature = float(np.vdot(direction, direction - moved * scales)) / (share * length**2)
        step = length / curvature if curvature > 0.0 else np.inf
        largest = float(np.linalg.norm(bands[in_band] / scales[in_band]))
        step = step if step <= largest else _CAUTIOUS_STEP * largest
        scales = scales * step

        def log_error(variables: FloatArray) -> tuple[float, FloatArray]:
            entries = np.zeros(bands.shape)
            entries[in_band] = variables
            entries *= scales
            value, slope, _ = self._log_error(entries)
            self._look_at_certificate()
            return value, (slope * scales)[in_band]

        minimise(
            log_error,
            bands[in_band] / scales[in_band],
            max_evaluations=self.max_evaluations - self.evaluations,
            corrections=10,
            least_change=1e-15,
        )

    def _keep(self, bands: FloatArray, error: float) -> None:
        """Keeps (n, b) bands, scaled to sensitivity one, if their error is the best so far."""
        squared = self._squared_sensitivity(bands)
        if error * squared < self._best_error:
            self._best_error = error * squared
            self.best_bands = bands / np.sqrt(squared)

    def _squared_sensitivity(self, bands: FloatArray) -> float:
        """Returns the largest sum of squared column norms over a class of rounds."""
        return float(np.max(self.layout.totals(column_sums(np.square(bands)))))

    def certified_gap(self) -> float:
        """Returns the certified relative gap of the best matrix; infinite if there is none."""
        return self._certified_gap(_MOST_ROUNDS_OF_VECTORS)

    def _certified_gap(self, most_rounds_of_vectors: int) -> float:
        if self._certified_error > self._best_error:
            bound = self._prepared.lower_bound(self.best_bands, self.layout)
            self.bound, self._certified_error = max(self.bound, bound), self._best_error
        num_rounds = len(self.best_bands)
        is_far = gap_above(self._best_error, self.bound) > _SAFE_SHARE * self.relative_gap
        is_new = self._error_by_vectors > self._best_error
        if is_far and is_new and num_rounds <= most_rounds_of_vectors:
            # For the sum over rounds, the bound on the mean with equal weights is multiplied by n.
            bound = num_rounds * self._bound_by_last(
                self.best_bands, np.ones(num_rounds), num_rounds
            )
            self.bound, self._error_by_vectors = max(self.bound, bound), self._best_error
        return gap_above(self._best_error, self.bound)

    def _bound_by_last(self, bands: FloatArray, weights: FloatArray, num_last: int) -> float:
        return self._prepared.lower_bound_by_last_rounds(bands, self.layout, weights, num_last)

    def _scales_of_variables(self, bands: FloatArray, weights: FloatArray) -> FloatArray:
        """Returns (n, b) scales: entries of C over the search's variables."""
        weights = np.maximum(weights, _LEAST_WEIGHT * np.max(weights))
        is_prefix_sum = self._prepared.inverse_bands.shape[1] == 2
        of_rows, of_columns, of_lags = (
            _POWERS_FOR_PREFIX_SUMS if is_prefix_sum and self.layout.positions == 1 else _POWERS
        )
        scales = spread_columns(weights**of_columns, self.num_bands)
        lags = np.arange(1.0, self.num_bands + 1.0)
        return np.asarray(scales * np.outer(weights**of_rows, lags**of_lags))

    def _error_of(self, covariances: BandedCovariances) -> float:
        """Returns the error that is minimised, from the covariances of a matrix."""
        return covariances.squared_error

    def _strategy(self, bands: FloatArray) -> _Strategy:
        """Returns the strategy with given (n, b) bands before scaling."""
        squared_norms = column_sums(np.square(bands))
        norms = np.sqrt(self.layout.totals(squared_norms))
        scaled = bands * spread_columns(1.0 / norms, self.num_bands)
        covariances = BandedCovariances(scaled, self._prepared.blocks)
        return _Strategy(bands, norms, scaled, covariances)

    def _count(self, strategy: _Strategy, error: float) -> None:
        """Counts an evaluation, and keeps its matrix if the error is the best so far."""
        self.evaluations += 1
        self._progress.update()
        self._keep(strategy.scaled, error)

    def _slope(
        self, strategy: _Strategy, weights: FloatArray | None
    ) -> tuple[FloatArray, FloatArray]:
        """Returns the (n, b) slope of a weighted sum of errors, and (n,) slopes along columns.

        The latter are the products of each scaled column with its slope.
        """
        slope = strategy.covariances.slope(weights)
        along = column_sums(slope * strategy.scaled)
        by_norms = self.layout.totals(along) / strategy.norms**2
        slope = slope * spread_columns(1.0 / strategy.norms, self.num_bands)
        slope -= strategy.bands * spread_columns(by_norms, self.num_bands)
        return slope, along

    def _log_error(self, bands: FloatArray) -> tuple[float, FloatArray, FloatArray]:
        """Returns the error's logarithm, its (n, b) slope, and (n,) weights of columns."""
        with np.errstate(all="ignore"):
            strategy = self._strategy(bands)
            error, slope = strategy.covariances.squared_error, np.full(bands.shape, np.nan)
            if 0.0 < error < np.inf:
                slope, along = self._slope(strategy, None)
                slope /= error
        self._count(strategy, error)
        if not np.all(np.isfinite(slope)):
            # The returned value makes the line search take a shorter step.
            return _LARGEST_LOG, np.zeros(bands.shape), np.ones(len(bands))
        # The number -along / 2 is (X V)_jj, of which V_jj X_jj is the largest part.
        return float(np.log(error)), slope, np.maximum(-0.5 * along / strategy.norms**2, 0.0)

    def _look_at_certificate(self) -> None:
        if self.evaluations < self._next_certificate:
            return
        before, since = self._gap, self.evaluations - self._looked_at
        self._looked_at = self.evaluations
        self._gap = self._certified_gap(_MOST_ROUNDS_IN_BETWEEN)
        self._progress.set_postfix_str(f"relative gap {self._gap:.1e}")
        target = _SAFE_SHARE * self.relative_gap
        if self._gap <= target:
            raise Converged
        # The wait is the number of evaluations until the target, if the gap falls as fast as
        # before.
        wait = float(_FEWEST_BETWEEN_CERTIFICATES)
        if self._gap < before < np.inf:
            wait = since * np.log(self._gap / target) / np.log(before / self._gap)
        elif before < np.inf:
            wait = float(_MOST_BETWEEN_CERTIFICATES)
        wait = np.clip(wait, _FEWEST_BETWEEN_CERTIFICATES, _MOST_BETWEEN_CERTIFICATES)
        self._next_certificate = self.evaluations + int(np.ceil(wait))


class _CurvaturePairs:
    """The last steps of a search and the slope changes along them, from which L-BFGS steps.

    Pairs may be kept while the objective changes a little, which SciPy's optimiser does not allow.
    """

    def __init__(self, most: int) -> None:
        """Begins with no pairs.

        Args:
          most: The number of pairs that are kept.
        """
        self._most = most
        self._pairs: list[tuple[FloatArray, FloatArray, float]] = []
        self._shape: tuple[int, ...] = ()

    def __len__(self) -> int:
        """The number of pairs that are kept now."""
        return len(self._pairs)

    def add(self, step: FloatArray, change: FloatArray) -> None:
        """Keeps a pair of a step and a slope change, if the slope grows along the step.

        Args:
          step: The step, of any shape.
          change: The change of the slope, of the same shape.
        """
        self._shape = step.shape
        product = float(np.vdot(step, change))
        if product > _LEAST_COSINE * float(np.linalg.norm(step) * np.linalg.norm(change)):
            pair = step.ravel(), change.ravel(), product
            self._pairs = [*self._pairs, pair][-self._most :]

    def scale(self, metric: Callable[[FloatArray], FloatArray]) -> float:
        """Returns the factor that makes a metric exact along the last step; 1 without a step.

        Args:
          metric: As in :meth:`step`.
        """
        if not self._pairs:
            return 1.0
        _, change, product = self._pairs[-1]
        return product / float(np.vdot(change, metric(change.reshape(self._shape))))

    def step(self, slope: FloatArray, metric: Callable[[FloatArray], FloatArray]) -> FloatArray:
        """Returns the L-BFGS step by the two-loop recursion of Nocedal and Wright.

        Args:
          slope: The slope, of the shape of steps.
          metric: A symmetric positive definite map from slopes to steps: the inverse Hessian before
            there is any pair.
        """
        rest, along = slope.ravel().copy(), []
        for step, change, product in reversed(self._pairs):
            along.append(float(ddot(step, rest)) / product)
            rest = daxpy(change, rest, a=-along[-1])
        found = metric(rest.reshape(slope.shape)).ravel()
        for step, change, product in self._pairs:
            found = daxpy(step, found, a=along.pop() - float(ddot(change, found)) / product)
        return np.asarray(-found.reshape(slope.shape))


@dataclasses.dataclass(eq=False)
class _WorstRoundSearch(_BandedSearch):
    """Search for the least maximum over rounds, by turns that change the weights of rounds."""

    def __post_init__(self) -> None:
        super().__post_init__()
        num_rounds = self.error.num_rounds
        # A prefix sum that came as an array is recognised, because its structure makes searches
        # faster.
        prefix_sum = Workload("prefix_sum", num_rounds)
        known = prefix_sum.inverse_bands()
        if known is not None and np.array_equal(self._prepared.inverse_bands, known):
            self.workload = prefix_sum
        self._is_prefix_sum = self.workload.is_prefix_sum
        # With many blocks of a prefix sum, the last blocks of b rounds have nearly all of the
        # weight.
        self._has_many_blocks = self._is_prefix_sum and num_rounds // self.num_bands > _MOST_BLOCKS
        # The (n,) exponents of error ratios, and the errors of the last turn's end.
        self._exponents = self._errors_before = np.ones(num_rounds)
        # The bands of X of the last turns, of which means are taken.
        self._grams: collections.deque[FloatArray] = collections.deque(maxlen=max(_TURNS_OF_MEANS))

    def run(self, bands: FloatArray) -> None:
        """Searches by turns until the target is certified or no progress is made.

        Args:
          bands: (n, b) bands to begin with.

        Raises:
          Converged: When the target is certified.
        """
        bands = self._start_of_fewer_rounds(bands)
        last, next_look = self.max_evaluations, 0
        late_from = self.evaluations + _LATE * (last - self.evaluations)
        reach, between = _SAFE_DISTANCE, _BETWEEN_LOOKS
        if self._has_many_blocks:
            reach, between = _DISTANCE_FOR_LAST_BLOCKS, _BETWEEN_LOOKS_AT_LAST_BLOCKS
        pairs = _CurvaturePairs(_CORRECTIONS)
        step_before, steps = _STEP_OF_FIRST_TURN, _STEPS_OF_FIRST_TURN
        point, idle = self._evaluated(bands), 0
        while point is not None and self.evaluations < last and idle <= _MOST_IDLE_TURNS:
            before = self.evaluations
            point, decrease = self._turn(point, pairs, step_before, min(steps, last - before))
            # Turns without an evaluation are allowed: weights may still change where the matrix
            # does not.
            idle = idle + 1 if self.evaluations == before else 0
            rows, weights = point.rows, self._mean_of_powers(point.rows)[1]
            weights = weights / np.sum(weights)
            mean, largest = float(weights @ rows), float(np.max(rows))
            self._consider_means(point.scaled, largest / mean - 1.0)
            distance = self._best_error / mean - 1.0
            is_near = distance < reach * self.relative_gap
            if is_near and self.evaluations >= next_look:
                next_look = self.evaluations + between
                self._raise_bound(point.scaled, weights)
            if is_near:
                self._end_if_certified()
            else:
                self._progress.set_postfix_str(f"worst round {distance:.1e} above the mean")
            logs = np.log(rows / mean)
            off_by = 2.0 * float(weights @ np.square(logs))
            is_nearby = distance < _NEARBY * self.relative_gap
            step_before = _SHARE_OF_STEP * (min(step_before, decrease) if is_nearby else off_by)
            is_late = self.evaluations >= late_from
            powers = _RELAXATIONS[self._has_many_blocks] * _exponents_for(weights, is_late) * logs
            weights *= np.exp(np.clip(powers, -_LARGEST_CHANGE_OF_LOG, _LARGEST_CHANGE_OF_LOG))
            weights /= np.sum(weights)
            if is_late:
                weights += _LATE_SHARE_OF_MEAN * self.relative_gap / len(weights)
            else:
                off = largest / mean - 1.0
                by_distance = _FLOORS_BY_DISTANCE[self._has_many_blocks] * off
                budget = max(self.relative_gap, min(_MOST_FOR_FLOOR, by_distance))
                costs = 1.0 - rows / largest
                weights = _raised_to_floor(weights, costs, _SHARE_OF_FLOOR * budget)
            self.multipliers = weights / np.sum(weights)
            self._exponents = _exponents_for(self.multipliers, is_late)
            self._errors_before = rows
            steps = _MOST_LATE_STEPS if is_late else _MOST_STEPS
            steps = _MOST_STEPS_NEARBY if is_nearby else steps
        if point is None:
            return
        weights = self._mean_of_powers(point.rows)[1]
        self._raise_bound(point.scaled, weights / np.sum(weights))
        self._end_if_certified()

    def certified_gap(self) -> float:
        """Returns the certified relative gap of the best matrix; infinite if there is none."""
        return gap_above(self._best_error, self.bound)

    def _start_of_fewer_rounds(self, bands: FloatArray) -> FloatArray:
        """Returns (n, b) bands to begin with, and sets multipliers, from fewer rounds' search."""
        num_rounds, num_bands = bands.shape
        if not (self._is_prefix_sum and self.layout.positions == 1):
            return bands
        half, most = -(-num_bands // 2), self.max_evaluations
        surplus = num_rounds // num_bands // 2 if self._has_many_blocks else 0
        if surplus > 0:
            rounds, fewer = num_rounds - surplus * num_bands, num_bands
            most = min(most, _EVALUATIONS_OF_BLOCKS // (rounds // num_bands) + 1)
        elif half >= _FEWEST_BANDS:
            rounds, fewer = max(round(num_rounds * half / num_bands), half + 1), half
        else:
            return bands
        search = _WorstRoundSearch(
            Workload("prefix_sum", rounds),
            PatternLayout(rounds, rounds),
            fewer,
            RoundError.of("max", rounds),
            self.relative_gap,
            most,
            self.show_progress,
        ).finished(square_root_bands(rounds, fewer))
        if surplus > 0:
            places, shares = _with_more_blocks(rounds, num_rounds, num_bands)
            weights, bands = search.multipliers[places] * shares, search.best_bands[places]
            # Each added block of b rounds raises the largest error of any matrix by at least one.
            self.bound = max(self.bound, search.bound + surplus)
        else:
            among = _places((rounds, fewer), (num_rounds, num_bands))
            weights = np.exp(_interpolated(np.log(search.multipliers), among))
            bands = _with_more_bands(search.best_bands, among, num_bands)
        self.multipliers = weights / np.sum(weights)
        return bands

    def _error_of(self, covariances: BandedCovariances) -> float:
        """Returns the largest squared error of a round, from covariances."""
        return float(np.max(covariances.squared_rows()))

    def _consider_means(self, scaled: FloatArray, distance: float) -> None:
        """Tries means of the last X, and keeps a matrix with the best largest error so far."""
        if distance > _NEAR_ENOUGH_FOR_MEANS:
            self._grams.clear()
            return
        self._grams.append(_gram_bands(scaled))
        for count in _TURNS_OF_MEANS:
            if len(self._grams) >= count:
                mean = sum(list(self._grams)[-count:]) / count
                bands = _strategy_bands(np.asarray(mean))
                if bands is not None:
                    self._evaluated(bands)

    def _turn(
        self, point: _Strategy, pairs: _CurvaturePairs, least: float, most: int
    ) -> tuple[_Strategy, float]:
        """Takes a few steps with fixed multipliers; returns the point and the expected decrease."""
        value, slope = self._log_of_maximum(point)
        _, weights = self._mean_of_powers(point.rows)
        metric = _metric(1.0 / point.covariances.curvatures(weights)[0], point.bands)
        scale = pairs.scale(metric)
        decrease = 0.0
        for taken in range(most):
            step = pairs.step(slope, lambda rest: scale * metric(rest))
            along = float(np.vdot(slope, step))
            decrease = -0.5 * along
            if not decrease > 0.0 or (decrease < least and taken >= _FEWEST_STEPS):
                break
            length = 1.0 if len(pairs) else _FIRST_STEP
            while True:
                moved = self._evaluated(point.bands + length * step)
                new = np.inf
                if moved is not None:
                    new, new_slope = self._log_of_maximum(moved)
                if new <= value + _SUFFICIENT * length * along + _LEAST_DECREASE:
                    break
                # The next length is the minimum of a parabola, within limits.
                excess = new - value - length * along
                shorter = -0.5 * length * along / excess if np.isfinite(excess) else 0.0
                length *= min(0.5, max(0.1, shorter))
                if length < _SHORTEST_STEP:
                    return point, decrease
            assert moved is not None
            pairs.add(length * step, new_slope - slope)
            point, value, slope = moved, new, new_slope
        return point, decrease

    def _evaluated(self, bands: FloatArray) -> _Strategy | None:
        """Evaluates bands and returns their strategy; None if errors are beyond floats."""
        with np.errstate(all="ignore"):
            strategy = self._strategy(bands)
            is_finite = np.all(np.isfinite(strategy.rows)) and np.all(strategy.rows > 0.0)
        self._count(strategy, float(np.max(strategy.rows)) if is_finite else np.nan)
        return strategy if is_finite else None

    def _log_of_maximum(self, strategy: _Strategy) -> tuple[float, FloatArray]:
        """Returns the logarithm of the smoothed largest error, and its (n, b) slope."""
        value, weights = self._mean_of_powers(strategy.rows)
        with np.errstate(all="ignore"):
            slope, _ = self._slope(strategy, weights)
        return float(np.log(value)), slope / value

    def _mean_of_powers(self, rows: FloatArray) -> tuple[float, FloatArray]:
        """Returns a smooth substitute for the largest error, and its (n,) slope by the errors."""
        logs = self._exponents * np.log(rows / self._errors_before)
        powers = np.exp(np.minimum(logs, _LARGEST_POWER))
        parts = self.multipliers * self._errors_before
        value = float(np.sum(parts * (1.0 + (powers - 1.0) / self._exponents)))
        return value, np.asarray(parts * powers / rows)

    def _raise_bound(self, scaled: FloatArray, weights: FloatArray) -> None:
        """Computes a bound from a matrix and weights, and keeps it if it is the best so far.

        The bound on the mean with these weights, for which the matrix is nearly best, bounds the
        maximum.
        """
        bands = scaled / np.sqrt(self._squared_sensitivity(scaled))
        if not self._has_many_blocks:
            workload = BandedWorkload.of(self.workload, self.num_bands, weights)
            self.bound = max(self.bound, workload.lower_bound(bands, self.layout))
        if not self._is_certified:
            last = self.num_bands * max(1, min(_LAST_BLOCKS, _MOST_LAST_ROUNDS // self.num_bands))
            self.bound = max(self.bound, self._bound_by_last(bands, weights, last))

    @property
    def _is_certified(self) -> bool:
        """Whether the certified gap of the best matrix is small enough to end the search."""
        return self.certified_gap() <= _SAFE_SHARE_OF_MAXIMUM * self.relative_gap

    def _end_if_certified(self) -> None:
        self._gap = self.certified_gap()
        self._progress.set_postfix_str(f"relative gap {self._gap:.1e}")
        if self._is_certified:
            raise Converged


def search(
    workload: AnyWorkload,
    layout: PatternLayout,
    num_bands: int,
    error: RoundError,
    *,
    relative_gap: float,
    max_evaluations: int,
    show_progress: bool,
) -> tuple[FloatArray, float, int]:
    """Searches for the banded C with the least error, from the prefix sum's square root on.

    Args:
      workload: A.
      layout: The classes of rounds: the squared norms of the columns of a class sum to at most one.
      num_bands: b.
      error: The error that is minimised.
      relative_gap: The relative gap at which the search ends.
      max_evaluations: The number of evaluations after which the search ends anyway.
      show_progress: Whether to show a bar on standard error.

    Returns:
      (n, b) bands of the best matrix, of sensitivity one; its certified relative gap, which may be
      infinite; and the number of evaluations of the error.
    """
    kind = _WorstRoundSearch if error.is_maximum else _BandedSearch
    found = kind(workload, layout, num_bands, error, relative_gap, max_evaluations, show_progress)
    found = found.finished(square_root_bands(error.num_rounds, num_bands))
    return found.best_bands, found.certified_gap(), found.evaluations


def _raised_to_floor(weights: FloatArray, costs: FloatArray, budget: float) -> FloatArray:
    """Raises the smallest weights to one floor, the highest that a budget pays for.

    Args:
      weights: (n,) above zero.
      costs: (n,) costs of raising each weight by one, not negative.
      budget: The most that raising all weights may cost.
    """
    order = np.argsort(weights)
    ascending, costs = weights[order], np.maximum(costs[order], _LEAST_COST)
    # For each number of smallest weights, the floor at which raising them uses up the budget.
    floors = (budget + np.cumsum(ascending * costs)) / np.cumsum(costs)
    raised = int(np.argmax(floors <= np.append(ascending[1:], np.inf)))
    return np.asarray(np.maximum(weights, floors[raised]))


def _exponents_for(weights: FloatArray, is_late: bool) -> FloatArray:
    """Returns the (n,) exponents c of rounds, from their (n,) weights of sum one."""
    if is_late:
        return np.full(len(weights), _LATE_EXPONENT)
    exponents = _EXPONENT * (len(weights) * weights) ** _POWER_OF_WEIGHTS
    return np.clip(exponents, *_EXPONENTS_BETWEEN)


def _metric(weights: FloatArray, bands: FloatArray) -> Callable[[FloatArray], FloatArray]:
    """Returns a function from slopes by C to steps dC = Y C, with weights for the rows of Y."""
    strategy = BandedMatrix.lower_triangular(bands)
    transposed = strategy.transposed()

    def metric(slope: FloatArray) -> FloatArray:
        by_rows = _product_within(slope, transposed) * weights[:, np.newaxis]
        return _product_within(by_rows, strategy)

    return metric


def _product_within(bands: FloatArray, other: BandedMatrix) -> FloatArray:
    """Returns (n, b): the bands of a product, of as many bands as its left factor."""
    product = BandedMatrix.lower_triangular(bands).times(other)
    return np.ascontiguousarray(product.narrowed(bands.shape[1] - 1, 0).rows[:, ::-1])


def _places(fewer: tuple[int, int], more: tuple[int, int]) -> FloatArray:
    """Returns (n,) places of many rounds among fewer, which correspond block by block."""
    (few, few_bands), (many, bands) = fewer, more
    rounds = np.arange(many)
    first = rounds - rounds % bands
    # The last block may be shorter; if it exists among the fewer rounds, it has places of its own.
    start = np.minimum(first // bands * few_bands, few - 1)
    size = np.minimum(few_bands, few - start)
    places = start + (rounds - first + 0.5) * size / np.minimum(bands, many - first) - 0.5
    return np.asarray(np.clip(places, start, start + size - 1))


def _with_more_bands(bands: FloatArray, places: FloatArray, num_bands: int) -> FloatArray:
    """Returns (n, b) bands, by interpolating ratios to the bands of the square root."""
    few_bands = bands.shape[1]
    ratios = bands / linear_algebra.square_root_coefficients(few_bands)
    # Row i has no entries before column 0, so the row's last ratio is repeated.
    for i in range(few_bands):
        ratios[i, i + 1 :] = ratios[i, i]
    lags = (np.arange(num_bands) + 0.5) * few_bands / num_bands - 0.5
    ratios = _interpolated(ratios.T, np.clip(lags, 0, few_bands - 1)).T
    return _interpolated(ratios, places) * square_root_bands(len(places), num_bands)


def _interpolated(values: FloatArray, places: FloatArray) -> FloatArray:
    """Interpolates (n, ...) values at (m,) places from 0 to n - 1, as (m, ...)."""
    before = np.floor(places).astype(int)
    share = (places - before).reshape(-1, *[1] * (values.ndim - 1))
    after = np.minimum(before + 1, len(values) - 1)
    return np.asarray((1.0 - share) * values[before] + share * values[after])


def _with_more_blocks(few: int, many: int, num_bands: int) -> tuple[IntArray, FloatArray]:
    """Returns for each of many rounds the one of fewer rounds, and the factor of its weight.

    Both runs begin and end alike, and a block of b rounds in the middle is repeated. Weights fall
    with the square of the number of blocks until the end.
    """
    rounds, added = np.arange(many), many - few
    start = few // num_bands // 2 * num_bands
    places = np.where(rounds < start + added, start + (rounds - start) % num_bands, rounds - added)
    places = np.where(rounds < start, rounds, places)
    blocks, blocks_before = (
        (size - 1 - at) // num_bands + 1 for size, at in ((many, rounds), (few, places))
    )
    return places, np.square(blocks_before / blocks)


def _gram_bands(bands: FloatArray) -> FloatArray:
    """Returns (n, b): the bands of the Gram matrix C^T C."""
    strategy = BandedMatrix.lower_triangular(bands)
    gram = strategy.transposed().times(strategy).narrowed(bands.shape[1] - 1, 0)
    return np.ascontiguousarray(gram.rows[:, ::-1])


def _strategy_bands(gram: FloatArray) -> FloatArray | None:
    """Returns the (n, b) bands of the C with C^T C = X; None if X is not positive definite."""
    # With rounds in reverse order, C is the transposed Cholesky factor of X.
    factor, failed = dpbtrf(np.ascontiguousarray(gram[::-1].T), lower=1)
    return None if failed else np.ascontiguousarray(factor.T[::-1])
