"""Buffered linear Toeplitz (BLT) factorizations: correlated noise from a few vectors of state.

The coefficients of C are c_0 = 1 and c_t = sum_m w_m d_m^(t-1), so that its generating
function is rational, c(x) = prod_m (1 - e_m x) / (1 - d_m x), and so is that of C^-1, with
the decays d and e exchanged (McMahan, Xu and Zhang, "A hassle-free algorithm for private
learning in practice"; Dvijotham, McMahan, Pillutla, Steinke and Thakurta, "Efficient and
near-optimal noise generation for streaming differential privacy").

All matrices here interlace, 1 > d_1 > e_1 > d_2 > e_2 > ... > e_m > -1, which makes all
weights of C positive and all weights of C^-1 negative: no sum below cancels, and the
coefficients of C are non-negative and non-increasing, so that its sensitivity is exact.

**The error in closed form.** With decays d of C and e of C^-1 that interlace, in distances y = 1 -
d and z = 1 - e,

* c_0 = 1 and c_t = sum_m w_m d_m^(t-1), w_m = prod_j (z_j - y_m) / prod_{j != m} (y_j - y_m),
* b_t, the running sum of C^-1's coefficients, is beta + sum_m g_m e_m^t, with
  beta = prod_m y_m / z_m and g_m = -w'_m / z_m for the weights w' of C^-1,

where all w, g and beta are positive. The sensitivity sums c_t over a pattern 0, b, 2 b, ...:
a sum of powers within each stretch of b rounds. Sums of squares of such sums are geometric
series in products of decays, so that the error costs the number of stretches and not of
rounds, and nothing cancels.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import scipy.linalg
import scipy.signal

from mf_aggregators import validation
from mf_aggregators.arrays import ComplexArray, FloatArray, IntArray
from mf_aggregators.factorizations import _decoder_rows
from mf_aggregators.factorizations._decoder_rows import StateObjective, StateRows, States
from mf_aggregators.factorizations._round_errors import RoundError, RoundWeights
from mf_aggregators.factorizations._toeplitz_search import (
    ErrorMeasure,
    PatternOfRounds,
    check_training,
    error_weights,
    is_plain,
    measure_of,
    parameters_for,
    with_momentum,
)
from mf_aggregators.factorizations.convergence import minimise, warn_unless_stationary
from mf_aggregators.factorizations.toeplitz import ToeplitzStructure
from mf_aggregators.noise.recursions import StateSpaceNoise
from mf_aggregators.participation import Participation, SingleParticipation, check_fits
from mf_aggregators.progress_bars import ProgressBar
from mf_aggregators.workloads import Workload

MOST_BUFFERS = 8
_ROUNDING = 1e-14
# How many of the places where one more buffer can start are followed to the end.
_STARTS_FOLLOWED = 3
# Logarithms of the least and the largest ratio of neighbouring distances in a search.
_CLOSEST, _FARTHEST = 1e-9, 20.0
# A logarithm of an error that no decays have.
_INFEASIBLE = 1e3
# An imaginary step of a complex-step derivative: exact to rounding, however small.
_STEP = 1e-100
# Stretches times the 2 m variables, above which closed forms would take much memory.
_LARGEST_CLOSED_FORM = 1 << 22
# Below this exponent a weighted geometric series is summed by its Taylor series.
_SMALL_EXPONENT = 1e-4


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class BltFactorization(ToeplitzStructure):
    """C is Toeplitz with coefficients that are a sum of ``num_buffers`` decaying powers.

    Its generating function is c(x) = prod_m (1 - e_m x) / (1 - d_m x).

    Attributes:
      num_rounds: n.
      buffer_decays: (m,) decays d of C, decreasing, read-only.
      inverse_decays: (m,) decays e of C^-1, read-only, with
        1 > d_1 >= e_1 > d_2 >= ... >= e_m > -1; a pair of equal decays has no effect.

    Raises:
      ValueError: If the decays do not interlace, or the coefficients of C are not
        non-increasing: its sensitivity would not be known.
    """

    mechanism = "blt"
    _described_as = "the BLT matrix"
    goes_on = "with the same decays"

    buffer_decays: FloatArray
    inverse_decays: FloatArray

    def __post_init__(self) -> None:
        super().__post_init__()
        decays = validation.real_array(self.buffer_decays, "buffer_decays").copy()
        inverse = validation.real_array(self.inverse_decays, "inverse_decays").copy()
        if decays.ndim != 1 or decays.shape != inverse.shape or not len(decays):
            raise ValueError(
                "buffer_decays and inverse_decays must be vectors of one length, found shapes "
                f"{decays.shape} and {inverse.shape}."
            )
        # Written so that NaN does not pass.
        if not (_interlace(decays, inverse) and decays[0] < 1.0 and inverse[-1] > -1.0):
            raise ValueError(
                "the decays must interlace, 1 > buffer_decays[0] >= inverse_decays[0] > "
                "buffer_decays[1] >= ... > -1: the sensitivity is known only then."
            )
        # Rounding may add to a sum of one; the sensitivity counts for more than that.
        if np.sum(_partial_fractions(decays, inverse)) > 1.0 + _ROUNDING or decays[-1] < 0.0:
            raise ValueError(
                "the coefficients of the strategy matrix must be non-negative and "
                "non-increasing: the sensitivity is known only then."
            )
        self._set(buffer_decays=decays, inverse_decays=inverse)

    @classmethod
    def from_output_scales(
        cls, num_rounds: int, buffer_decays: Any, output_scales: Any, **attributes: Any
    ) -> "BltFactorization":
        """Creates the factorization with c_t = sum_m output_scales[m] buffer_decays[m]^(t-1).

        Args:
          num_rounds: n.
          buffer_decays: (m,) different decays in [0, 1).
          output_scales: (m,) positive weights of sum at most one.
          **attributes: Those of the base class.

        Returns:
          The factorization; the decays of C^-1 are the eigenvalues of the matrix
          diag(d) - sqrt(w) sqrt(w)^T.

        Raises:
          ValueError: If the coefficients of C would not be non-negative and non-increasing.
        """
        decays = validation.real_array(buffer_decays, "buffer_decays")
        scales = validation.real_array(output_scales, "output_scales")
        if decays.ndim != 1 or decays.shape != scales.shape:
            raise ValueError(
                "buffer_decays and output_scales must be vectors of one length, found shapes "
                f"{decays.shape} and {scales.shape}."
            )
        if not np.all(scales > 0.0) or not np.all(np.isfinite(decays)):
            raise ValueError("output_scales must be above zero and all decays finite.")
        order = np.argsort(-decays)
        decays, roots = decays[order], np.sqrt(scales[order])
        inverse = scipy.linalg.eigvalsh(np.diag(decays) - np.outer(roots, roots))[::-1]
        return cls(num_rounds, decays, inverse, **attributes)

    @property
    def num_buffers(self) -> int:
        """The number of buffers m: vectors of state in C and in C^-1."""
        return len(self.buffer_decays)

    @property
    def output_scales(self) -> FloatArray:
        """The (m,) positive weights of C's decays."""
        return _partial_fractions(self.buffer_decays, self.inverse_decays)

    @property
    def inverse_output_scales(self) -> FloatArray:
        """The (m,) negative weights of C^-1's decays."""
        return _partial_fractions(self.inverse_decays, self.buffer_decays)

    def strategy_coefficients(self) -> FloatArray:
        """Returns the first column of C, (n,) float64."""
        return _coefficients(self.buffer_decays, self.output_scales, self.num_rounds)

    def noising_coefficients(self) -> FloatArray:
        """Returns the first column of C^-1, (n,) float64."""
        return _coefficients(self.inverse_decays, self.inverse_output_scales, self.num_rounds)

    def _squared_rows(self, workload: Workload) -> FloatArray:
        recursions = workload.recursions()
        if recursions is None or workload.coefficients() is not None:
            return super()._squared_rows(workload)
        noising, weights = self.noising_coefficients(), self.inverse_output_scales
        return StateRows(recursions).squared(States(noising, weights, self.inverse_decays))

    def noise_recursion(self) -> StateSpaceNoise:
        """Returns the recursion over ``num_buffers`` vectors, the buffers of C: C Y = Z."""
        count = self.num_buffers
        return StateSpaceNoise(
            phases=np.zeros(self.num_rounds, np.int64),
            gains=np.ones(1),
            outputs=-self.output_scales[np.newaxis],
            sources=np.arange(count)[np.newaxis],
            decays=self.buffer_decays[np.newaxis].copy(),
            feedbacks=np.ones((1, count)),
        )

    def _encode(self, x: FloatArray) -> FloatArray:
        """Streams C x with the buffers of C."""
        product = np.empty_like(x)
        buffers = np.zeros((self.num_buffers, *x.shape[1:]))
        decays = self.buffer_decays.reshape((-1,) + (1,) * (x.ndim - 1))
        weights = self.output_scales
        for i, row in enumerate(x):
            product[i] = row + np.tensordot(weights, buffers, axes=1)
            buffers *= decays
            buffers += row
        return product

    def _extended(
        self,
        num_rounds: int,
        participation: Participation,
        workload: Workload,
        parameters: dict[str, Any],
    ) -> "BltFactorization":
        del workload
        return BltFactorization(
            num_rounds,
            self.buffer_decays,
            self.inverse_decays,
            participation=participation,
            parameters=parameters,
        )

    def _of_first_rounds(self, num_rounds: int, parameters: dict[str, Any]) -> "BltFactorization":
        return BltFactorization(
            num_rounds,
            self.buffer_decays,
            self.inverse_decays,
            participation=self.participation,
            parameters=parameters,
        )


def blt(
    num_rounds: Any = None,
    num_buffers: int | None = None,
    participation: Participation | None = None,
    *,
    accuracy: float = 0.01,
    error: RoundWeights = "mean",
    workload: Any = None,
    max_evaluations: int = 2000,
    show_progress: bool = False,
) -> BltFactorization:
    """Computes a BLT factorization of a workload, in O(n) memory.

    The 2 m decays are searched over their logarithmic distances from one, for which
    interlacing is no constraint. The search for m buffers starts from the best m - 1,
    with one more pair of decays between any two, so that more buffers are not worse.

    Args:
      num_rounds: n, for the prefix sum of n rounds; or the workload itself, as ``workload``.
      num_buffers: The number of buffers m, 1 to 8. None: the fewest whose error, the root of the
        mean or the maximum, is at most ``accuracy`` above that of 8 buffers.
      participation: The schema to optimise for; SingleParticipation by default.
      accuracy: How far the error may be above that of 8 buffers, relative to it, at least 0. It
        holds where ``num_buffers`` is None.
      error: What to minimise: the ``mean`` squared error over rounds, its ``max``, or the sum with
        (n,) weights of the rounds, none below zero. A maximum that may be of any round is
        approached by norms, to a fraction of a percent.
      workload: What to optimise for: the prefix sum, which is the default, or another, a
        ``workloads.Workload`` or an (n, n) array that is Toeplitz or has learning rates. Each
        evaluation then takes O(n) time, but for means of several of the last iterates O(n^2).
      max_evaluations: Give up a search after this many evaluations of the error.
      show_progress: Whether to show a progress bar on standard error.

    Returns:
      The factorization. If the last search stopped before its gradient vanished, the
      best decays found, with a NotConvergedWarning.

    Raises:
      ValueError: If an argument is out of its range, the workload is another or given twice, or
        the schema names more participations than fit.

    Example:
      >>> import mf_aggregators as mfa
      >>> timers = mfa.participation.MinSeparation(separation=16)
      >>> buffered = mfa.factorizations.blt(64, num_buffers=2, participation=timers)
      >>> round(buffered.rmse(mfa.workloads.prefix_sum(64), timers), 2)
      4.92
    """
    num_rounds, workload = check_training(num_rounds, workload, "the BLT matrix")
    accuracy = validation.non_negative_number(accuracy, "accuracy")
    if num_buffers is not None:
        num_buffers = validation.positive_integer(num_buffers, "num_buffers")
        if num_buffers > MOST_BUFFERS:
            raise ValueError(f"num_buffers must be at most {MOST_BUFFERS}, found {num_buffers}.")
    participation = check_fits(
        SingleParticipation() if participation is None else participation, num_rounds
    )
    measure = RoundError.of(error, num_rounds)
    max_evaluations = validation.positive_integer(max_evaluations, "max_evaluations")
    pattern = PatternOfRounds.of(participation, num_rounds)
    with ProgressBar(
        desc=f"{num_buffers or MOST_BUFFERS} buffers",
        unit=" evaluations",
        disable=not show_progress,
    ) as progress:
        momentum = workload.momentum if workload.name == "momentum_sgd" else 0.0
        search = _Search(pattern, measure_of(measure), max_evaluations, progress, momentum)
        found = search.levels()
        if not is_plain(workload, measure):
            objectives = _decoder_rows.state_objectives(workload, measure)
            other = _Search(
                pattern, measure_of(measure), max_evaluations, progress, momentum, objectives
            )
            found = other.levels(found)
        levels = list(itertools.islice(found, num_buffers or MOST_BUFFERS))
    parameters: dict[str, Any] = {
        "error": measure.parameters().get("error", "mean"),
        **parameters_for(workload, measure),
    }
    level = levels[-1]
    if num_buffers is None:
        parameters["accuracy"] = accuracy
        # Logarithms of squared errors.
        highest = level.log_error + 2.0 * np.log1p(accuracy)
        level = next(each for each in levels if each.log_error <= highest)
    warn_unless_stationary(level.result)
    decays = 1.0 - level.distances
    return BltFactorization(
        num_rounds,
        decays[0::2],
        decays[1::2],
        participation=participation,
        parameters={"num_buffers": len(decays) // 2, **parameters},
    )


class _Level(NamedTuple):
    """What a search found for a number of buffers m.

    Attributes:
      distances: (2 m,) increasing distances.
      result: How SciPy's optimiser ended.
      log_error: The logarithm of the squared error.
    """

    distances: FloatArray
    result: Any
    log_error: float


class _Search:
    """The search for distances y = 1 - decay, in the order d_1, e_1, d_2, e_2, ..."""

    def __init__(
        self,
        pattern: PatternOfRounds,
        error: ErrorMeasure,
        max_evaluations: int,
        progress: "ProgressBar",
        momentum: float = 0.0,
        objectives: tuple[StateObjective, ...] = (),
    ) -> None:
        """Prepares a search.

        Args:
          pattern: The rounds n, and the participations of a client.
          error: Which error of constant learning rates.
          max_evaluations: The most evaluations of each refinement.
          progress: The bar.
          momentum: That of the workload; zero for prefix sums.
          objectives: What is minimised, one after another, for another workload or error.
        """
        self._objectives = objectives
        self._pattern = pattern
        self._error = error
        self._momentum = momentum
        self._max_evaluations = max_evaluations
        self._progress = progress
        # Closer to one, a decay is a constant for all that its rounds can tell.
        self._least_distance = 1e-3 / float(pattern.num_rounds) ** 2

    def levels(self, others: Iterator[_Level] | None = None) -> Iterator[_Level]:
        """Yields the best increasing distances found for 1 buffer, 2, and so on.

        Args:
          others: The levels of another search, which this one starts from as well.
        """
        slow = 1.0 / (self._pattern.num_rounds + 1.0)
        starts = [[slow, slow**0.5], [slow**0.5, slow**0.25], [0.3, 0.9], [1e-4 * slow, 0.05]]
        if self._momentum:
            # The square root of the workload has its other pole at the momentum.
            fast = 1.0 - self._momentum
            starts += [[slow, max(2.0 * slow, fast)], [slow, max(2.0 * slow, fast**0.5)]]
        refined = [self._refined(np.array(start)) for start in starts]
        best = self._best([*refined, *self._from(others)])
        while True:
            yield best
            found = best.distances
            candidates = sorted(_with_one_more_pair(found), key=lambda y: self._log_error(y)[0])
            # Where clients return, a decay close to one, a constant in C, may be best.
            candidates.insert(0, np.concatenate([found[0] * np.array([1e-4, 5e-2]), found]))
            refined = [self._refined(start) for start in candidates[: 1 + _STARTS_FOLLOWED]]
            # The same matrix with one more pair of decays that cancel.
            refined += self._from(others)
            best = self._best([*refined, (_with_idle_pair(found), best.result)])

    def _from(self, others: Iterator[_Level] | None) -> list[tuple[FloatArray, Any]]:
        """What is found from the next level of another search, and that level itself."""
        if others is None:
            return []
        level = next(others)
        return [self._refined(level.distances), (level.distances, level.result)]

    def _best(self, candidates: list[tuple[FloatArray, Any]]) -> _Level:
        levels = [_Level(found, result, self._log_error(found)[0]) for found, result in candidates]
        return min(levels, key=lambda level: level.log_error)

    def _refined(self, distances: FloatArray) -> tuple[FloatArray, Any]:
        """What is found from some distances for one objective after another."""
        result = None
        for objective in self._objectives or (None,):
            distances, result = self._refined_for(distances, objective)
        return distances, result

    def _refined_for(
        self, distances: FloatArray, objective: StateObjective | None
    ) -> tuple[FloatArray, Any]:
        """L-BFGS from some distances, over the logarithms of their ratios' logarithms."""

        def function(free: FloatArray) -> tuple[float, FloatArray]:
            steps = np.exp(free)
            candidate = np.exp(-np.cumsum(steps[::-1])[::-1])
            candidates = np.maximum(candidate, self._least_distance)
            value, gradient = self._log_error(candidates, objective)
            if not np.isfinite(value):
                return _INFEASIBLE, np.zeros_like(free)
            gradient = np.where(candidate > self._least_distance, gradient * candidate, 0.0)
            return value, -np.cumsum(gradient) * steps

        ratios = np.diff(-np.log(distances)[::-1], prepend=0.0)[::-1]
        result = minimise(
            function,
            np.log(np.clip(ratios, _CLOSEST, _FARTHEST)),
            bounds=[(np.log(_CLOSEST), np.log(_FARTHEST))] * len(distances),
            max_evaluations=self._max_evaluations,
            corrections=40,
            least_change=1e-13,
            least_slope=1e-9,
        )
        found = np.exp(-np.cumsum(np.exp(result.x)[::-1])[::-1])
        return np.maximum(found, self._least_distance), result

    def _log_error(
        self, distances: FloatArray, objective: StateObjective | None = None
    ) -> tuple[float, FloatArray]:
        """The logarithm of the squared error and its gradient by the distances.

        By default it is that of the last objective.
        """
        if self._objectives and objective is None:
            objective = self._objectives[-1]
        self._progress.update()
        decays = 1.0 - distances
        if not _interlace(decays[0::2], decays[1::2]) or decays[0] >= 1.0:
            return np.inf, np.zeros_like(distances)
        stretches = -(-self._pattern.num_rounds // self._pattern.separation)
        has_closed_form = stretches * len(distances) <= _LARGEST_CLOSED_FORM
        if objective is not None:
            return self._log_error_by_states(distances, objective, has_closed_form)
        # The closed form is that of prefix sums.
        if not self._momentum and has_closed_form:
            return log_squared_error(distances, self._pattern, self._error)
        return self._log_error_by_rounds(distances)

    def _log_error_by_states(
        self, distances: FloatArray, objective: StateObjective, has_closed_form: bool
    ) -> tuple[float, FloatArray]:
        """The same for any workload, by the states of C^-1."""
        num_rounds = self._pattern.num_rounds
        ours, inverse = 1.0 - distances[0::2], 1.0 - distances[1::2]
        weights = _partial_fractions(inverse, ours)
        noising = _coefficients(inverse, weights, num_rounds)
        squared_rows, slopes = objective(States(noising, weights, inverse))
        if not squared_rows > 0.0:
            return np.inf, np.zeros_like(distances)
        gradient = _along_decays(distances, noising, slopes.by_noising)
        perturbed = distances + 1j * _STEP * np.eye(len(distances))
        gradient += (
            _weights(perturbed[:, 1::2], perturbed[:, 0::2]).imag @ slopes.by_weights / _STEP
        )
        # A distance is one minus the decay.
        gradient[1::2] -= slopes.by_decays
        gradient /= squared_rows
        if has_closed_form:
            of_pattern = _squared_sensitivity(
                perturbed[:, 0::2], _weights(perturbed[:, 0::2], perturbed[:, 1::2]), self._pattern
            )
            squared_sensitivity = float(of_pattern.real[0])
            gradient += of_pattern.imag / of_pattern.real / _STEP
        else:
            column = _coefficients(ours, _partial_fractions(ours, inverse), num_rounds)
            squared_sensitivity, by_column = self._pattern.squared_sensitivity(column)
            gradient -= _along_decays(distances, column, by_column) / squared_sensitivity
        return float(np.log(squared_sensitivity) + np.log(squared_rows)), gradient

    def _log_error_by_rounds(self, distances: FloatArray) -> tuple[float, FloatArray]:
        """The same from all coefficients: for momentum, and clients who return every round."""
        num_rounds = self._pattern.num_rounds
        weights = error_weights(num_rounds, self._error)
        decays = 1.0 - distances
        ours, inverse = decays[0::2], decays[1::2]
        column = _coefficients(ours, _partial_fractions(ours, inverse), num_rounds)
        noising = _coefficients(inverse, _partial_fractions(inverse, ours), num_rounds)
        decoder = with_momentum(np.cumsum(noising), self._momentum)
        squared_sensitivity, by_column = self._pattern.squared_sensitivity(column)
        squared_rows = float(weights @ np.square(decoder))
        by_decoder = 2.0 * weights * decoder
        gradient = np.empty_like(distances)
        for j, decay in enumerate(decays):
            # d log c(x) / d d_m = x / (1 - d_m x), and with the other sign for e_m and for
            # the inverse; a distance is one minus the decay.
            taps = [0.0, 1.0], [1.0, -decay]
            along = by_column @ scipy.signal.lfilter(*taps, column) / squared_sensitivity
            along -= by_decoder @ scipy.signal.lfilter(*taps, decoder) / squared_rows
            gradient[j] = along if j % 2 else -along
        return float(np.log(squared_sensitivity) + np.log(squared_rows)), gradient


def _along_decays(distances: FloatArray, series: FloatArray, slope: FloatArray) -> FloatArray:
    """How a function of the coefficients of C^-1 changes with the distances, by its (n,) slope.

    For those of C it is the opposite.
    """
    gradient = np.empty_like(distances)
    for j, distance in enumerate(distances):
        # d log c^-1(x) / d d_m = -x / (1 - d_m x), and with the other sign for e_m.
        along = slope @ scipy.signal.lfilter([0.0, 1.0], [1.0, distance - 1.0], series)
        gradient[j] = -along if j % 2 else along
    return gradient


def _with_one_more_pair(distances: FloatArray) -> Iterator[FloatArray]:
    """The distances with two more between any two neighbours, or before the first."""
    logs = np.concatenate([[np.log(distances[0]) - 3.0], np.log(distances), [0.0]])
    for i in range(len(logs) - 1):
        below, above = logs[i], logs[i + 1]
        pair = [below + (above - below) / 3.0, below + (above - below) * 2.0 / 3.0]
        yield np.exp(np.concatenate([logs[1 : i + 1], pair, logs[i + 1 : -1]]))


def _with_idle_pair(distances: FloatArray) -> FloatArray:
    """The distances with a pair of equal ones, which has no effect."""
    between = (1.0 + distances[-1]) / 2.0
    return np.concatenate([distances, [between, between]])


def _interlace(decays: FloatArray, inverse_decays: FloatArray) -> bool:
    """Whether d_1 >= e_1 > d_2 >= e_2 > ..."""
    return bool(np.all(decays >= inverse_decays) and np.all(inverse_decays[:-1] > decays[1:]))


def _partial_fractions(poles: FloatArray, zeros: FloatArray) -> FloatArray:
    """Weights w with prod (1 - zeros x) / (1 - poles x) = 1 + sum w x / (1 - poles x).

    For interlacing numbers every factor is of one sign and differences of neighbours are
    exact, so that the weights are accurate however close the decays are.
    """
    with_zeros = poles[:, np.newaxis] - zeros
    between = poles[:, np.newaxis] - poles
    np.fill_diagonal(between, 1.0)
    ratios = with_zeros / between
    return np.asarray(np.prod(ratios, axis=1))


def _coefficients(decays: FloatArray, weights: FloatArray, num_rounds: int) -> FloatArray:
    """1, and sum_m weights[m] decays[m]^(t - 1) for t = 1, ..., n - 1."""
    series = np.empty(num_rounds)
    series[0] = 1.0
    series[1:] = 0.0
    # Powers of all lags as an outer product of those of blocks and those within a block.
    block = max(1, int(np.sqrt(num_rounds)))
    within, starts = np.arange(block), np.arange(0, num_rounds - 1, block)
    for decay, weight in zip(decays, weights, strict=True):
        powers = np.multiply.outer(weight * decay**starts, decay**within)
        series[1:] += powers.ravel()[: num_rounds - 1]
    return series


def log_squared_error(
    distances: FloatArray, pattern: PatternOfRounds, error: ErrorMeasure
) -> tuple[float, FloatArray]:
    """Returns the logarithm of sens(C)^2 times the squared error, and its gradient.

    Args:
      distances: (2 m,) increasing distances y_1, z_1, y_2, z_2, ..., all above 0 and below 1.
      pattern: The pattern that gives the sensitivity.
      error: Which squared error: ``mean`` over rounds, or ``max``.

    Returns:
      The value and a (2 m,) gradient.
    """
    count = len(distances)
    perturbed = distances + 1j * _STEP * np.eye(count)
    ours, inverse = perturbed[:, 0::2], perturbed[:, 1::2]
    squared_sensitivity = _squared_sensitivity(ours, _weights(ours, inverse), pattern)
    squared_rows = _squared_rows(ours, inverse, pattern.num_rounds, error)
    logs = np.log(squared_sensitivity.real) + np.log(squared_rows.real)
    gradient = squared_sensitivity.imag / squared_sensitivity.real
    gradient += squared_rows.imag / squared_rows.real
    return float(logs[0]), gradient / _STEP


def _weights(poles: ComplexArray, zeros: ComplexArray) -> ComplexArray:
    """(p, m) weights of the decays 1 - poles, from (p, m) distances."""
    ratios = zeros[:, np.newaxis, :] - poles[:, :, np.newaxis]
    between = poles[:, np.newaxis, :] - poles[:, :, np.newaxis]
    diagonal = np.arange(poles.shape[1])
    between[:, diagonal, diagonal] = 1.0
    return np.asarray(np.prod(ratios / between, axis=2))


def _squared_sensitivity(
    distances: ComplexArray, weights: ComplexArray, pattern: PatternOfRounds
) -> ComplexArray:
    """(p,) squared norms of the pattern's columns, summed, for (p, m) decays of C."""
    separation, most = pattern.separation, pattern.most
    starts = np.arange(0, pattern.num_rounds, separation)
    stretch = np.arange(len(starts))
    lengths = np.minimum(separation, pattern.num_rounds - starts)
    logs = _log1p(-distances)[:, :, np.newaxis]
    weighted = weights[:, :, np.newaxis]

    def powers(first: IntArray, last: IntArray, shift: int) -> ComplexArray:
        """The sums of d^(i b + shift) over i from first to last, (p, m, stretches)."""
        series = _geometric(separation * logs, last - first + 1)
        return np.exp((first * separation + shift) * logs) * series

    # In stretch r, lags are (r - j) b + o for up to k participations j, offset o < b.
    earliest = np.maximum(0, stretch - most + 1)
    # At offset 0 the lag 0 of a participation in this round has coefficient one.
    at_start = np.sum(weighted * powers(np.maximum(earliest, 1), stretch, -1), axis=1)
    at_start = at_start + (stretch < most)
    amplitudes = weighted * powers(earliest, stretch, 0)
    total = np.sum(np.square(at_start), axis=1)
    decays = logs[:, :, 0]
    for m in range(distances.shape[1]):
        for other in range(m, distances.shape[1]):
            series = _geometric((decays[:, m] + decays[:, other])[:, np.newaxis], lengths - 1)
            products = amplitudes[:, m] * amplitudes[:, other] * series
            total = total + (1.0 if m == other else 2.0) * np.sum(products, axis=1)
    return np.asarray(total)


def _squared_rows(
    ours: ComplexArray, inverse: ComplexArray, num_rounds: int, error: ErrorMeasure
) -> ComplexArray:
    """(p,) weighted sums of b_t^2 over rounds."""
    constant = np.prod(ours / inverse, axis=1)[:, np.newaxis]
    amplitudes = np.concatenate([constant, -_weights(inverse, ours) / inverse], axis=1)
    logs = np.concatenate([np.zeros_like(constant), _log1p(-inverse)], axis=1)
    pairs = logs[:, :, np.newaxis] + logs[:, np.newaxis]
    if error == "max":
        series = _geometric(pairs, np.asarray(num_rounds))
    else:
        series = _weighted_geometric(pairs, num_rounds)
    return np.asarray(np.einsum("pi,pij,pj->p", amplitudes, series, amplitudes))


def _geometric(logs: ComplexArray, counts: IntArray) -> ComplexArray:
    """The sums of exp(t log) over t from 0 to counts - 1; logs are zero or negative."""
    safe = np.where(logs == 0.0, -1.0, logs)
    return np.where(logs == 0.0, counts, _expm1(counts * safe) / _expm1(safe))


def _weighted_geometric(logs: ComplexArray, num_rounds: int) -> ComplexArray:
    """The sums of (1 - t / n) exp(t log) over t from 0 to n - 1."""
    n = float(num_rounds)
    small = np.abs(logs.real) * n < _SMALL_EXPONENT
    safe: ComplexArray = np.where(small, -1.0, logs)
    scaled: ComplexArray = n * safe
    series = _expm1(scaled) / _expm1(safe)
    # (n - q S) / (n (1 - q)) for q = exp(log) and S = (1 - q^n) / (1 - q).
    closed = (n - np.exp(safe) * series) / (-n * _expm1(safe))
    moments = [(n + 1.0) / 2.0, (n - 1.0) * (n + 1.0) / 6.0, (n - 1.0) * n * (n + 1.0) / 12.0]
    taylor = moments[0] + logs * moments[1] + np.square(logs) * moments[2] / 2.0
    return np.where(small, taylor, closed)


# NumPy's complex log1p and expm1 lose the digits that these keep; imaginary parts are
# infinitesimal here.
def _log1p(z: ComplexArray) -> ComplexArray:
    return np.asarray(np.log1p(z.real) + 1j * z.imag / (1.0 + z.real), np.complex128)


def _expm1(z: ComplexArray) -> ComplexArray:
    return np.asarray(np.expm1(z.real) + 1j * np.exp(z.real) * z.imag, np.complex128)
