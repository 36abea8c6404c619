"""The search for the decays of BLT factorizations, and their error in closed form.

With decays d of C and e of C^-1 that interlace, in distances y = 1 - d and z = 1 - e,

* c_0 = 1 and c_t = sum_m w_m d_m^(t-1), w_m = prod_j (z_j - y_m) / prod_{j != m} (y_j - y_m),
* b_t, the running sum of C^-1's coefficients, is beta + sum_m g_m e_m^t, with
  beta = prod_m y_m / z_m and g_m = -w'_m / z_m for the weights w' of C^-1,

where all w, g and beta are positive. The sensitivity sums c_t over a pattern 0, b, 2 b, ...:
a sum of powers within each stretch of b rounds. Sums of squares of such sums are geometric
series in products of decays, so that the error costs the number of stretches and not of
rounds, and nothing cancels.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import scipy.linalg
import scipy.signal

from mf_aggregators.factorizations._decoder_rows import StateObjective, States
from mf_aggregators.factorizations._toeplitz_search import (
    ErrorMeasure,
    PatternOfRounds,
    error_weights,
    with_momentum,
)
from mf_aggregators.factorizations.convergence import minimise
from mf_aggregators.kernel.numbers import ComplexArray, FloatArray, IntArray
from mf_aggregators.progress_bars import ProgressBar

# How many of the places where one more buffer can start are followed.
_STARTS_FOLLOWED = 3
# A refinement ends where steps take less than this off the logarithm of the error; that of the best
# of several at the second.
_LEAST_CHANGES = 1e-9, 1e-13
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


class Level(NamedTuple):
    """What a search found for a number of buffers m.

    Attributes:
      distances: (2 m,) increasing distances.
      result: How SciPy's optimiser ended.
      log_error: The logarithm of the squared error.
    """

    distances: FloatArray
    result: Any
    log_error: float


class BltSearch:
    """The search for distances y = 1 - decay, in the order d_1, e_1, d_2, e_2, ..."""

    def __init__(
        self,
        pattern: PatternOfRounds,
        error: ErrorMeasure,
        max_evaluations: int,
        progress: ProgressBar,
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

    def levels(self, others: Iterator[Level] | None = None) -> Iterator[Level]:
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

    def _from(self, others: Iterator[Level] | None) -> list[tuple[FloatArray, Any]]:
        """What is found from the next level of another search, and that level itself."""
        if others is None:
            return []
        level = next(others)
        return [self._refined(level.distances), (level.distances, level.result)]

    def _best(self, candidates: list[tuple[FloatArray, Any]]) -> Level:
        """The best of some, and what is found from it until hardly anything changes."""
        found = [self._level(*candidate) for candidate in candidates]
        best = min(found, key=lambda level: level.log_error)
        last = self._level(*self._refined(best.distances, _LEAST_CHANGES[1]))
        return min(last, best, key=lambda level: level.log_error)

    def _level(self, distances: FloatArray, result: Any) -> Level:
        return Level(distances, result, self._log_error(distances)[0])

    def _refined(
        self, distances: FloatArray, least_change: float = _LEAST_CHANGES[0]
    ) -> tuple[FloatArray, Any]:
        """What is found from some distances for one objective after another."""
        result = None
        for objective in self._objectives or (None,):
            distances, result = self._refined_for(distances, objective, least_change)
        return distances, result

    def _refined_for(
        self, distances: FloatArray, objective: StateObjective | None, least_change: float
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
            least_change=least_change,
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
        if not interlace(decays[0::2], decays[1::2]) or decays[0] >= 1.0:
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
        weights = partial_fractions(inverse, ours)
        noising = coefficients_of(inverse, weights, num_rounds)
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
            column = coefficients_of(ours, partial_fractions(ours, inverse), num_rounds)
            squared_sensitivity, by_column = self._pattern.squared_sensitivity(column)
            gradient -= _along_decays(distances, column, by_column) / squared_sensitivity
        return float(np.log(squared_sensitivity) + np.log(squared_rows)), gradient

    def _log_error_by_rounds(self, distances: FloatArray) -> tuple[float, FloatArray]:
        """The same from all coefficients: for momentum, and clients who return every round."""
        num_rounds = self._pattern.num_rounds
        weights = error_weights(num_rounds, self._error)
        decays = 1.0 - distances
        ours, inverse = decays[0::2], decays[1::2]
        column = coefficients_of(ours, partial_fractions(ours, inverse), num_rounds)
        noising = coefficients_of(inverse, partial_fractions(inverse, ours), num_rounds)
        decoder = with_momentum(np.cumsum(noising), self._momentum)
        squared_sensitivity, by_column = self._pattern.squared_sensitivity(column)
        squared_rows = float(weights @ np.square(decoder))
        gradient = _along_decays(distances, decoder, 2.0 * weights * decoder) / squared_rows
        gradient -= _along_decays(distances, column, by_column) / squared_sensitivity
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


def interlace(decays: FloatArray, inverse_decays: FloatArray) -> bool:
    """Whether d_1 >= e_1 > d_2 >= e_2 > ..."""
    return bool(np.all(decays >= inverse_decays) and np.all(inverse_decays[:-1] > decays[1:]))


def partial_fractions(poles: FloatArray, zeros: FloatArray) -> FloatArray:
    """Weights w with prod (1 - zeros x) / (1 - poles x) = 1 + sum w x / (1 - poles x).

    For interlacing numbers every factor is of one sign and differences of neighbours are
    exact, so that the weights are accurate however close the decays are.
    """
    with_zeros = poles[:, np.newaxis] - zeros
    between = poles[:, np.newaxis] - poles
    np.fill_diagonal(between, 1.0)
    ratios = with_zeros / between
    return np.asarray(np.prod(ratios, axis=1))


def coefficients_of(decays: FloatArray, weights: FloatArray, num_rounds: int) -> FloatArray:
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
    decays = _log1p(-distances)
    logs = decays[:, :, np.newaxis]
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
    pairs = decays[:, :, np.newaxis] + decays[:, np.newaxis]
    # All stretches but the last are as long.
    rest = pattern.num_rounds - starts[-1]
    for those, length in ((np.s_[:-1], separation), (np.s_[-1:], rest)):
        products = amplitudes[..., those] @ amplitudes[..., those].swapaxes(1, 2)
        total = total + np.sum(products * _geometric(pairs, np.asarray(length - 1)), axis=(1, 2))
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
    is_one = logs == 0.0
    safe = np.where(is_one, -1.0, logs)
    return np.where(is_one, counts, _expm1(counts * safe) / _expm1(safe))


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
    found = np.empty_like(z)
    found.real, found.imag = np.log1p(z.real), z.imag / (1.0 + z.real)
    return found


def _expm1(z: ComplexArray) -> ComplexArray:
    found = np.empty_like(z)
    found.real, found.imag = np.expm1(z.real), np.exp(z.real) * z.imag
    return found
