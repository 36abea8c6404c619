r"""The search for the banded strategy matrix of least mean error, in O(n b^2) operations.

L-BFGS runs over the entries of C before its columns are scaled to keep the constraint. Error and
slope come from :mod:`mf_aggregators.linear_algebra.banded_matrices`, and
:mod:`mf_aggregators.factorizations._band_certificate` says how far the best matrix is from the
optimum at most.

Bounds on the mean with any weights of rounds bound the maximum from below
(:mod:`mf_aggregators.factorizations._round_errors`), so that each pair of a matrix and of weights
for which it is nearly best has a certified gap.

**Turns.** Multipliers w_i and errors e'_i of a point before give the convex function

    sum_i w_i e'_i (1 + ((e_i / e'_i)^c_i - 1) / c_i)

of X, whose slope is that of a mean with weights w_i (e_i / e'_i)^(c_i - 1). A turn of few steps
lowers it; its weights, times a power of e_i over their mean, are the next w: a method of
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

**Where turns fail**, as for some arrays, (s / c) log(sum_i u_i exp(c e_i / s)) is minimised, a
convex function of X near the largest error, for multipliers u of sum one and the scale s of the
errors. Its slope is that of a mean with weights u_i exp(c e_i / s) over their sum. The exponential
method of multipliers (Tseng and Bertsekas, 1993) takes them for the next u: it converges for any c,
faster for larger ones.
"""

import collections
import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import TypeVar

import numpy as np
from scipy.linalg.lapack import dpbtrf

from mf_aggregators import workloads
from mf_aggregators.factorizations._band_certificate import (
    BandedWorkload,
    lower_bound,
    lower_bound_by_last_rounds,
)
from mf_aggregators.factorizations._patterns import ColumnNorms
from mf_aggregators.factorizations._round_errors import RoundError, raised_to_floor
from mf_aggregators.factorizations.convergence import Converged, CurvaturePairs, gap_above, minimise
from mf_aggregators.kernel.numbers import FloatArray, IntArray
from mf_aggregators.linear_algebra import power_series
from mf_aggregators.linear_algebra.banded_matrices import (
    BandedCovariances,
    BandedMatrix,
    column_sums,
    spread_columns,
    square_root_bands,
)
from mf_aggregators.progress_bars import ProgressBar
from mf_aggregators.workloads import Workload

_Searched = TypeVar("_Searched", bound="BandedSearch")
# Evaluations before the first look at the certificate, which costs about five of them, and the
# fewest and the most between two looks.
_FIRST_CERTIFICATE = 50
_FEWEST_BETWEEN_CERTIFICATES, _MOST_BETWEEN_CERTIFICATES = 10, 25
# The gap at which a search ends, relative to the gap that is to be certified.
_SAFE_SHARE = 0.9
# The most rounds for which vectors of all of them are made, in n^2 b operations: at the end of a
# search, and at each look.
_MOST_ROUNDS_OF_VECTORS, _MOST_ROUNDS_IN_BETWEEN = 4096, 512
# Powers of the weights of a row and of a column, and of a lag, that an entry's variable is scaled
# by: those that took the fewest steps of many tried. For equal norms and prefix sums they take a
# quarter fewer than columns alone, at (rounds, bands) = (1026, 171), (2052, 64), (4096, 32) and
# (10,000, 16); with momentum or norms that differ they take more.
_POWERS, _POWERS_FOR_PREFIX_SUMS = (0.0, -0.375, 0.0), (-0.6, 0.2, 0.1)
# Least weight of a round, relative to the largest, in the scales of the variables.
_LEAST_WEIGHT = 1e-4
# The change of entries of C that estimates the curvature, relative to the largest entry.
_SMALL_STEP = 1e-5
# The length of the first step, relative to C, if the error is not convex along it.
_CAUTIOUS_STEP = 1e-2
# In place of the logarithm of an error beyond floats.
_LARGEST_LOG = 1e3
# The share of the mean that is added to the maximum, relative to the gap that is to be certified:
# if the weights of rounds vanish, the search does not converge without it. It costs a part of
# itself. The first share is for the first turns, the second for later ones.
_SHARES_OF_MEAN, _FIRST_TURNS = (3.0, 0.5), 13
_MOST_OF_MEAN = 0.1
# The largest logarithm of a power of errors.
_LARGEST_POWER = 600.0
# Pairs of steps and slopes that L-BFGS keeps.
_CORRECTIONS = 20
# Exponents c of a round of mean weight, their power of weights, and the least and the largest.
_EXPONENT, _POWER_OF_WEIGHTS, _EXPONENTS_BETWEEN = 9.0, -0.35, (5.0, 60.0)
# Factors of the exponents of errors between turns; the second is for many blocks, where errors
# swing more.
_RELAXATIONS = 1.1, 0.7
# The largest change of the logarithm of a weight between turns.
_LARGEST_CHANGE_OF_LOG = 1.5
# The share of the gap that raised weights may take; its least value, relative to the distance of
# the maximum from the mean (the second one with many blocks); and its largest value.
_SHARE_OF_FLOOR, _FLOORS_BY_DISTANCE, _MOST_FOR_FLOOR = 0.5, (0.2, 0.03), 0.03
# Steps of the first turn, and the fewest and the most of each other one.
_STEPS_OF_FIRST_TURN, _FEWEST_STEPS, _MOST_STEPS = 15, 3, 6
# The most steps of a turn at a small distance, relative to the gap that is asked for. Errors of
# rounds swing otherwise, and the certificate wants a matrix that is nearly the best for its
# weights.
_MOST_STEPS_NEARBY, _NEARBY = 20, 1.1
# A turn ends once the expected decrease of a step is below this, relative to the error of the
# weights; the first turn at the other number.
_SHARE_OF_STEP, _STEP_OF_FIRST_TURN = 0.05, 1e-4
# The shares of evaluations for turns: for changing rates and for constant ones.
_SHARES_OF_TURNS = 1.0 / 3.0, 2.0 / 3.0
# Turns without a step that end a search.
_MOST_IDLE_TURNS = 100
# The numbers of turns to take means of X over, and the largest distance of the maximum above the
# mean at which they are tried.
_TURNS_OF_MEANS, _NEAR_ENOUGH_FOR_MEANS = (6, 16, 48), 0.06
# The first looks at the certificate, and evaluations between two.
_SAFE_DISTANCE, _BETWEEN_LOOKS = 0.97, 10
# The gap at which the search ends, relative to the target: that of the best matrix is stated.
_SAFE_SHARE_OF_MAXIMUM = 0.98
# Sufficient decrease of a line search, its first step without curvature, and its shortest one.
_SUFFICIENT, _FIRST_STEP, _SHORTEST_STEP, _LEAST_DECREASE = 1e-4, 0.5, 1e-8, 1e-14
# Exponents of the means of exponentials that replace the maximum, in turn, and evaluations at each.
# Larger ones converge in fewer turns, and each is harder to minimise.
_EXPONENTIALS = (8.0, *[16.0] * 6, *[24.0] * 40)
_EXPONENTIALS_BEFORE = (16.0, 16.0)
_EVALUATIONS_OF_EXPONENTIAL = 60
# The fewest bands of a search that begins with half of them, and the most blocks of b rounds of one
# that does not begin with half of these.
_FEWEST_BANDS, _MOST_BLOCKS = 12, 16
# The most evaluations of a search with half the blocks, times these.
_EVALUATIONS_OF_BLOCKS = 64_000
# The last blocks, with the weights that give the bound, and their most rounds: a few arrays have
# the square of these. The largest distance of the maximum from the mean at which the bound is
# computed, relative to the gap that is to be certified, and the evaluations between two
# computations.
_LAST_BLOCKS, _MOST_LAST_ROUNDS = 128, 8192
_DISTANCE_FOR_LAST_BLOCKS, _BETWEEN_LOOKS_AT_LAST_BLOCKS = 1.1, 150


@dataclasses.dataclass(frozen=True, eq=False)
class _Strategy:
    """Bands of C in a search, before and after they are scaled to keep the constraint.

    Attributes:
      bands: (n, b) before scaling.
      squared_norms: (n,) of its columns.
      norms: (n,) what they are divided by.
      scaled: (n, b).
      covariances: Those of the scaled ones.
    """

    bands: FloatArray
    squared_norms: FloatArray
    norms: FloatArray
    scaled: FloatArray
    covariances: BandedCovariances

    @functools.cached_property
    def rows(self) -> FloatArray:
        """(n,) errors of rounds."""
        return self.covariances.squared_rows()


@dataclasses.dataclass(eq=False)
class BandedSearch:
    """L-BFGS over the entries of C, with the best matrix and bound so far.

    Attributes:
      workload: A, known by its name or an (n, n) lower-triangular array of full rank.
      constraint: A limit on the norms of columns, and the number of bands.
      error: The error that is minimised.
      relative_gap: The relative gap at which the search ends.
      max_evaluations: The number of evaluations after which the search ends anyway.
      show_progress: Whether to show a bar on standard error.
      evaluations: How often the error was evaluated.
      best_bands: (n, b) of the best matrix, of sensitivity one.
      multipliers: (n,) weights of rounds, for the maximum.
      bound: A lower bound on the squared error of any matrix.
    """

    workload: Workload | FloatArray
    constraint: ColumnNorms
    error: RoundError
    relative_gap: float
    max_evaluations: int
    show_progress: bool
    evaluations: int = dataclasses.field(default=0, init=False)
    bound: float = dataclasses.field(default=0.0, init=False)

    # Pairs of steps and slopes that L-BFGS keeps.
    _corrections = 10

    def __post_init__(self) -> None:
        self._num_bands = self.constraint.num_bands
        self._prepared = BandedWorkload.of(self.workload, self._num_bands, self.error.raised)
        self._sharpness = self.constraint.sharpness[0]
        self._progress = ProgressBar(
            desc=f"{self._num_bands} bands",
            unit=" evaluations",
            disable=not self.show_progress,
        )
        self.multipliers = np.full(self.error.num_rounds, 1.0 / self.error.num_rounds)
        self.best_bands = np.empty(0)
        # The errors of the best matrix, and of the matrices that both bounds were found for.
        self._best_error = self._certified_error = self._error_by_vectors = np.inf
        # The gap at the last look at the certificate, and when that was and the next one is.
        self._gap, self._looked_at, self._next_certificate = np.inf, 0, _FIRST_CERTIFICATE

    def finished(self: _Searched, start: FloatArray) -> _Searched:
        """Returns the search itself, after it ended, and closes the bar.

        Args:
          start: (n, b) bands; their matrix is kept if no better one is found.
        """
        squared = self.constraint.squared_sensitivity(column_sums(np.square(start)))
        covariances = BandedCovariances(start, self._prepared.blocks)
        self._keep(start, squared, self._measured(covariances)[0])
        with self._progress, contextlib.suppress(Converged):
            self.run(start)
        return self

    def run(self, start: FloatArray) -> None:
        """Searches until no progress is made.

        Args:
          start: (n, b) bands.

        Raises:
          Converged: When the target is certified.
        """
        for sharpness in self.constraint.sharpness:
            self._sharpness = sharpness
            remaining = self.max_evaluations - self.evaluations
            if remaining <= 0:
                return
            start = self._descend(start, remaining)

    def _keep(self, bands: FloatArray, squared_sensitivity: float, error: float) -> None:
        if error * squared_sensitivity < self._best_error:
            self._best_error = error * squared_sensitivity
            self.best_bands = bands / np.sqrt(squared_sensitivity)

    def certified_gap(self) -> float:
        """Returns the relative gap of the best matrix; infinite if nothing is certified."""
        return self._certified_gap(_MOST_ROUNDS_OF_VECTORS)

    def _certified_gap(self, most_rounds_of_vectors: int) -> float:
        if self._certified_error > self._best_error:
            bound = lower_bound(self.best_bands, self._prepared, self.constraint)
            self.bound, self._certified_error = max(self.bound, bound), self._best_error
        num_rounds = len(self.best_bands)
        is_far = gap_above(self._best_error, self.bound) > _SAFE_SHARE * self.relative_gap
        is_new = self._error_by_vectors > self._best_error
        if is_far and is_new and num_rounds <= most_rounds_of_vectors:
            # The mean of equal weights is the sum over n.
            bound = num_rounds * self._bound_by_last(
                self.best_bands, np.ones(num_rounds), num_rounds
            )
            self.bound, self._error_by_vectors = max(self.bound, bound), self._best_error
        return gap_above(self._best_error, self.bound)

    def _bound_by_last(self, bands: FloatArray, weights: FloatArray, num_last: int) -> float:
        return lower_bound_by_last_rounds(bands, self._prepared, self.constraint, weights, num_last)

    def _descend(self, bands: FloatArray, max_evaluations: int) -> FloatArray:
        """Minimises from some bands on, and returns where that ended.

        Entries matter more the more their round does for the error, by the diagonal of the dual:
        in variables that are larger by a power of it, the search takes fewer steps. The optimiser's
        first step has length one, and is made the one that the curvature along the gradient
        suggests.
        """
        in_band = np.tri(len(bands), self._num_bands, dtype=bool)
        _, slope, weights = self._log_error(bands)
        scales = self._scales_of_variables(bands, weights)
        direction = slope * scales
        length = float(np.linalg.norm(direction))
        if not length > 0.0:
            return bands
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

        found = minimise(
            log_error,
            bands[in_band] / scales[in_band],
            max_evaluations=max_evaluations,
            corrections=self._corrections,
            least_change=1e-15,
        ).x
        entries = np.zeros(bands.shape)
        entries[in_band] = found
        return np.asarray(entries * scales)

    def _scales_of_variables(self, bands: FloatArray, weights: FloatArray) -> FloatArray:
        """(n, b): what entries of C are over variables, from (n,) weights of its columns."""
        weights = np.maximum(weights, _LEAST_WEIGHT * np.max(weights))
        is_prefix_sum = self._prepared.inverse_bands.shape[1] == 2
        of_rows, of_columns, of_lags = (
            _POWERS_FOR_PREFIX_SUMS if is_prefix_sum and self.constraint.are_equal else _POWERS
        )
        scales = spread_columns(weights**of_columns, self._num_bands)
        lags = np.arange(1.0, self._num_bands + 1.0)
        return np.asarray(scales * np.outer(weights**of_rows, lags**of_lags))

    def _measured(self, covariances: BandedCovariances) -> tuple[float, float, FloatArray | None]:
        """The error of a matrix, the value to minimise, and its slope by the errors of rounds."""
        return covariances.squared_error, covariances.squared_error, None

    def _strategy(self, bands: FloatArray) -> _Strategy:
        """The strategy of (n, b) bands before scaling."""
        squared_norms = column_sums(np.square(bands))
        norms = np.sqrt(self.constraint.scales(squared_norms, self._sharpness))
        scaled = bands * spread_columns(1.0 / norms, self._num_bands)
        covariances = BandedCovariances(scaled, self._prepared.blocks)
        return _Strategy(bands, squared_norms, norms, scaled, covariances)

    def _count(self, strategy: _Strategy, error: float) -> None:
        """Notes an evaluation, and keeps the matrix if its error is the best; NaN is not."""
        self.evaluations += 1
        self._progress.update()
        # The squared sensitivity is at most one, and one where the scales are exact.
        squared = self.constraint.squared_sensitivity(column_sums(np.square(strategy.scaled)))
        self._keep(strategy.scaled, squared, error)

    def _slope(
        self, strategy: _Strategy, weights: FloatArray | None
    ) -> tuple[FloatArray, FloatArray]:
        """The (n, b) slope by bands of a sum of errors of rounds, and (n,) the scaled columns'.

        The latter are products of each scaled column with its slope.
        """
        slope = strategy.covariances.slope(weights)
        along = column_sums(slope * strategy.scaled)
        by_norms = self.constraint.by_squared_norms(along, strategy.squared_norms, self._sharpness)
        slope = slope * spread_columns(1.0 / strategy.norms, self._num_bands)
        slope -= strategy.bands * spread_columns(by_norms, self._num_bands)
        return slope, along

    def _log_error(self, bands: FloatArray) -> tuple[float, FloatArray, FloatArray]:
        """The logarithm of the error, its (n, b) slope, and (n,) weights of the columns."""
        with np.errstate(all="ignore"):
            strategy = self._strategy(bands)
            measured, error, weights = self._measured(strategy.covariances)
            if not 0.0 < error < np.inf:
                measured, slope = np.nan, np.full(bands.shape, np.nan)
            else:
                slope, along = self._slope(strategy, weights)
                slope /= error
        self._count(strategy, measured)
        if not np.all(np.isfinite(slope)):
            # The line search takes a shorter step.
            return _LARGEST_LOG, np.zeros(bands.shape), np.ones(len(bands))
        # -along / 2 is (X V)_jj; V_jj X_jj is its largest part.
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
        # The time until the target is reached, if the gap falls as fast as before.
        wait = float(_FEWEST_BETWEEN_CERTIFICATES)
        if self._gap < before < np.inf:
            wait = since * np.log(self._gap / target) / np.log(before / self._gap)
        elif before < np.inf:
            wait = float(_MOST_BETWEEN_CERTIFICATES)
        wait = np.clip(wait, _FEWEST_BETWEEN_CERTIFICATES, _MOST_BETWEEN_CERTIFICATES)
        self._next_certificate = self.evaluations + int(np.ceil(wait))


@dataclasses.dataclass(eq=False)
class WorstRoundSearch(BandedSearch):
    """The search for the maximum, with the best matrix and bound so far."""

    _corrections = _CORRECTIONS

    def __post_init__(self) -> None:
        super().__post_init__()
        num_rounds = self.error.num_rounds
        # Prefix sums may come as an array too: their structure makes searches faster.
        prefix_sum = Workload("prefix_sum", num_rounds)
        known = prefix_sum.inverse_bands()
        if known is not None and np.array_equal(self._prepared.inverse_bands, known):
            self.workload = prefix_sum
        self._is_prefix_sum = workloads.is_prefix_sum(self.workload)
        # Whether the last blocks of b rounds have nearly all of the weight: for prefix sums.
        self._has_many_blocks = self._is_prefix_sum and num_rounds // self._num_bands > _MOST_BLOCKS
        # The (n,) exponents of errors over those of a point before.
        self._exponents = self._errors_before = np.ones(num_rounds)
        # The bands of X of the last turns.
        self._grams: collections.deque[FloatArray] = collections.deque(maxlen=max(_TURNS_OF_MEANS))
        # The parameters of means of exponentials.
        self._share_of_mean, self._exponent, self._scale = 0.0, 1.0, 0.0

    def run(self, start: FloatArray) -> None:
        """Searches until no progress is made.

        Args:
          start: (n, b) bands.

        Raises:
          Converged: When the target is certified.
        """
        bands, sharpnesses = start, self.constraint.sharpness
        if len(sharpnesses) == 1:
            named = self.workload if isinstance(self.workload, Workload) else None
            is_constant = named is not None and named.constant_momentum() is not None
            share = _SHARES_OF_TURNS[is_constant]
            most = round(share * (self.max_evaluations - self.evaluations))
            bands = self._lower_maximum(self._start_of_fewer_rounds(bands), most)
        for sharpness in sharpnesses:
            self._sharpness, is_last = sharpness, sharpness == sharpnesses[-1]
            for turn, exponent in enumerate(_EXPONENTIALS if is_last else _EXPONENTIALS_BEFORE):
                share = _SHARES_OF_MEAN[turn >= _FIRST_TURNS]
                self._share_of_mean = min(share * self.relative_gap, _MOST_OF_MEAN)
                remaining = self.max_evaluations - self.evaluations
                if remaining <= 0:
                    return
                self._exponent = exponent
                bands = self._descend(bands, min(remaining, _EVALUATIONS_OF_EXPONENTIAL))
                self.multipliers = self._weights_of(bands)
                self._end_if_certified()

    def certified_gap(self) -> float:
        """Returns the relative gap of the best matrix; infinite if nothing is certified."""
        return gap_above(self._best_error, self.bound)

    def _start_of_fewer_rounds(self, bands: FloatArray) -> FloatArray:
        """The (n, b) bands to begin with, and multipliers: for prefix sums from fewer rounds."""
        num_rounds, num_bands = bands.shape
        if not (self._is_prefix_sum and self.constraint.are_equal):
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
        search = WorstRoundSearch(
            Workload("prefix_sum", rounds),
            ColumnNorms.equal(rounds, fewer),
            RoundError.of("max", rounds),
            self.relative_gap,
            most,
            self.show_progress,
        ).finished(square_root_bands(rounds, fewer))
        if surplus > 0:
            places, shares = _with_more_blocks(rounds, num_rounds, num_bands)
            weights, bands = search.multipliers[places] * shares, search.best_bands[places]
            # Each block of b rounds that comes before others adds at least one.
            self.bound = max(self.bound, search.bound + surplus)
        else:
            among = _places((rounds, fewer), (num_rounds, num_bands))
            weights = np.exp(_interpolated(np.log(search.multipliers), among))
            bands = _with_more_bands(search.best_bands, among, num_bands)
        self.multipliers = weights / np.sum(weights)
        return bands

    def _measured(self, covariances: BandedCovariances) -> tuple[float, float, FloatArray | None]:
        """The largest error, its smooth substitute, and the slope of that by errors of rounds."""
        rows = covariances.squared_rows()
        largest = float(np.max(rows))
        self._scale = self._scale or largest
        value, weights = self._soft_maximum(rows)
        return largest, value, weights

    def _look_at_certificate(self) -> None:
        """Does nothing: bounds are for weights that a turn ends with."""

    def _scales_of_variables(self, bands: FloatArray, weights: FloatArray) -> FloatArray:
        """(n, b): one over the roots of what second derivatives by entries are like."""
        strategy = self._strategy(bands)
        rows, columns = strategy.covariances.curvatures(self._soft_maximum(strategy.rows)[1])
        scales = spread_columns((columns / strategy.norms**2) ** -0.5, self._num_bands)
        return rows[:, np.newaxis] ** -0.5 * scales

    def _weights_of(self, bands: FloatArray) -> FloatArray:
        """The (n,) next multipliers: the weights that the bands minimise the mean for.

        These also give a bound on the maximum, which is kept.
        """
        strategy = self._strategy(bands)
        weights = self._soft_maximum(strategy.rows)[1]
        self._raise_bound(strategy.scaled, weights)
        # Multipliers belong to the scale that they were found with.
        self._scale = float(np.max(strategy.rows))
        return weights

    def _soft_maximum(self, rows: FloatArray) -> tuple[float, FloatArray]:
        """A smooth substitute for the largest error, and its slope: (n,) weights of sum one."""
        largest = float(np.max(rows))
        powers = self._exponent * (rows - largest) / self._scale
        shares = self.multipliers * np.exp(np.maximum(powers, -_LARGEST_LOG))
        total = float(np.sum(shares))
        value = largest + self._scale * float(np.log(total)) / self._exponent
        even = self._share_of_mean
        value = (1.0 - even) * value + even * float(np.mean(rows))
        return value, (1.0 - even) * shares / total + even / len(rows)

    def _lower_maximum(self, bands: FloatArray, max_evaluations: int) -> FloatArray:
        """Minimises the largest error from some bands on, and returns where that ended.

        Raises:
          Converged: When the target is certified.
        """
        last, next_look = self.evaluations + max_evaluations, 0
        reach, between = _SAFE_DISTANCE, _BETWEEN_LOOKS
        if self._has_many_blocks:
            reach, between = _DISTANCE_FOR_LAST_BLOCKS, _BETWEEN_LOOKS_AT_LAST_BLOCKS
        pairs = CurvaturePairs(_CORRECTIONS)
        step_before, steps = _STEP_OF_FIRST_TURN, _STEPS_OF_FIRST_TURN
        point, idle = self._evaluated(bands), 0
        while point is not None and self.evaluations < last and idle <= _MOST_IDLE_TURNS:
            before = self.evaluations
            point, decrease = self._turn(point, pairs, step_before, min(steps, last - before))
            # Weights may change still where the matrix does not, at no cost.
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
            powers = _RELAXATIONS[self._has_many_blocks] * _exponents_for(weights) * logs
            weights *= np.exp(np.clip(powers, -_LARGEST_CHANGE_OF_LOG, _LARGEST_CHANGE_OF_LOG))
            off = largest / mean - 1.0
            by_distance = _FLOORS_BY_DISTANCE[self._has_many_blocks] * off
            budget = max(self.relative_gap, min(_MOST_FOR_FLOOR, by_distance))
            weights = raised_to_floor(
                weights / np.sum(weights), 1.0 - rows / largest, _SHARE_OF_FLOOR * budget
            )
            self.multipliers = weights / np.sum(weights)
            self._exponents = _exponents_for(self.multipliers)
            self._errors_before = rows
            steps = _MOST_STEPS_NEARBY if is_nearby else _MOST_STEPS
        if point is None:
            return bands
        weights = self._mean_of_powers(point.rows)[1]
        self._raise_bound(point.scaled, weights / np.sum(weights))
        self._end_if_certified()
        return point.bands

    def _consider_means(self, scaled: FloatArray, distance: float) -> None:
        """Keeps the matrix of a mean of the last X, if its largest error is the best."""
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
        self, point: _Strategy, pairs: CurvaturePairs, least: float, most: int
    ) -> tuple[_Strategy, float]:
        """Takes a few steps with the same multipliers; returns the last decrease expected."""
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
                # The minimum of the parabola, within limits.
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
        """The strategy of bands before scaling; None beyond floats."""
        with np.errstate(all="ignore"):
            strategy = self._strategy(bands)
            is_finite = np.all(np.isfinite(strategy.rows)) and np.all(strategy.rows > 0.0)
        self._count(strategy, float(np.max(strategy.rows)) if is_finite else np.nan)
        return strategy if is_finite else None

    def _log_of_maximum(self, strategy: _Strategy) -> tuple[float, FloatArray]:
        """The logarithm of the largest error, smoothed, and its (n, b) slope by bands."""
        value, weights = self._mean_of_powers(strategy.rows)
        with np.errstate(all="ignore"):
            slope, _ = self._slope(strategy, weights)
        return float(np.log(value)), slope / value

    def _mean_of_powers(self, rows: FloatArray) -> tuple[float, FloatArray]:
        """A substitute for the largest error, and its slope by the (n,) errors, the weights."""
        logs = self._exponents * np.log(rows / self._errors_before)
        powers = np.exp(np.minimum(logs, _LARGEST_POWER))
        parts = self.multipliers * self._errors_before
        value = float(np.sum(parts * (1.0 + (powers - 1.0) / self._exponents)))
        return value, np.asarray(parts * powers / rows)

    def _raise_bound(self, scaled: FloatArray, weights: FloatArray) -> None:
        """Keeps the better bound that a matrix and weights give, if it is the best.

        It bounds the maximum by the mean with some weights, for which the matrix is nearly best.
        """
        squared = self.constraint.squared_sensitivity(column_sums(np.square(scaled)))
        bands = scaled / np.sqrt(squared)
        if not self._has_many_blocks:
            workload = BandedWorkload.of(self.workload, self._num_bands, weights)
            self.bound = max(self.bound, lower_bound(bands, workload, self.constraint))
        if not self._is_certified:
            last = self._num_bands * max(1, min(_LAST_BLOCKS, _MOST_LAST_ROUNDS // self._num_bands))
            self.bound = max(self.bound, self._bound_by_last(bands, weights, last))

    @property
    def _is_certified(self) -> bool:
        """Whether the best matrix is near enough to the bound."""
        return self.certified_gap() <= _SAFE_SHARE_OF_MAXIMUM * self.relative_gap

    def _end_if_certified(self) -> None:
        self._gap = self.certified_gap()
        self._progress.set_postfix_str(f"relative gap {self._gap:.1e}")
        if self._is_certified:
            raise Converged


def _exponents_for(weights: FloatArray) -> FloatArray:
    """The (n,) exponents c of errors for (n,) weights of rounds, of sum one."""
    exponents = _EXPONENT * (len(weights) * weights) ** _POWER_OF_WEIGHTS
    return np.clip(exponents, *_EXPONENTS_BETWEEN)


def _metric(weights: FloatArray, bands: FloatArray) -> Callable[[FloatArray], FloatArray]:
    """From slopes by C to steps: dC = Y C within the (n, b) bands, (n,) weights for rows of Y."""
    strategy = BandedMatrix.lower_triangular(bands)
    transposed = strategy.transposed()

    def metric(slope: FloatArray) -> FloatArray:
        by_rows = _product_within(slope, transposed) * weights[:, np.newaxis]
        return _product_within(by_rows, strategy)

    return metric


def _product_within(bands: FloatArray, other: BandedMatrix) -> FloatArray:
    """(n, b): the bands of a product, of as many bands as the lower-triangular left matrix has."""
    product = BandedMatrix.lower_triangular(bands).times(other)
    return np.ascontiguousarray(product.narrowed(bands.shape[1] - 1, 0).rows[:, ::-1])


def _places(fewer: tuple[int, int], more: tuple[int, int]) -> FloatArray:
    """(n,) places of rounds among fewer, b rounds by b rounds, from (rounds, bands) of both."""
    (few, few_bands), (many, bands) = fewer, more
    rounds = np.arange(many)
    first = rounds - rounds % bands
    # The last of these may be shorter; it has a place of its own, if there is one.
    start = np.minimum(first // bands * few_bands, few - 1)
    size = np.minimum(few_bands, few - start)
    places = start + (rounds - first + 0.5) * size / np.minimum(bands, many - first) - 0.5
    return np.asarray(np.clip(places, start, start + size - 1))


def _with_more_bands(bands: FloatArray, places: FloatArray, num_bands: int) -> FloatArray:
    """(n, b) bands at places of rounds: ratios to those of the square root are interpolated."""
    few_bands = bands.shape[1]
    ratios = bands / power_series.square_root_coefficients(few_bands)
    # There are no entries before the first column: those of the row go on.
    for i in range(few_bands):
        ratios[i, i + 1 :] = ratios[i, i]
    lags = (np.arange(num_bands) + 0.5) * few_bands / num_bands - 0.5
    ratios = _interpolated(ratios.T, np.clip(lags, 0, few_bands - 1)).T
    return _interpolated(ratios, places) * square_root_bands(len(places), num_bands)


def _interpolated(values: FloatArray, places: FloatArray) -> FloatArray:
    """(m, ...) between the (n, ...) values, at (m,) places from 0 to n - 1."""
    before = np.floor(places).astype(int)
    share = (places - before).reshape(-1, *[1] * (values.ndim - 1))
    after = np.minimum(before + 1, len(values) - 1)
    return np.asarray((1.0 - share) * values[before] + share * values[after])


def _with_more_blocks(few: int, many: int, num_bands: int) -> tuple[IntArray, FloatArray]:
    """The (n,) round of fewer for each of many, and the (n,) factors of their weights.

    Both begin and end alike, and a block of b rounds in the middle is repeated. Weights fall as the
    squared number of blocks until the end.
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
    """(n, b): the bands of C^T C."""
    strategy = BandedMatrix.lower_triangular(bands)
    gram = strategy.transposed().times(strategy).narrowed(bands.shape[1] - 1, 0)
    return np.ascontiguousarray(gram.rows[:, ::-1])


def _strategy_bands(gram: FloatArray) -> FloatArray | None:
    """(n, b): the bands of the C with C^T C = X; None if X is not positive definite."""
    # With rounds in reverse order it is the transposed of the Cholesky factor.
    factor, failed = dpbtrf(np.ascontiguousarray(gram[::-1].T), lower=1)
    return None if failed else np.ascontiguousarray(factor.T[::-1])
