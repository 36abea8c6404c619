"""The error of a Toeplitz factorization by its coefficients, and the search for the best ones.

For a Toeplitz workload A, row i of B = A C^-1 has the squared norm b_0^2 + ... + b_i^2,
where b(x) = a(x) / c(x): the running sum of the coefficients of C^-1 for the prefix sum,
and for momentum beta with constant learning rates the running sum with
1 / (1 - beta x) applied to it. So, at noise multiplier 1,

* the mean squared error is sens(C)^2 sum_t (1 - t / n) b_t^2,
* the maximal squared error, that of the last round, is sens(C)^2 sum_t b_t^2,

and with non-increasing coefficients, or no more bands than the separation, sens(C) is
the norm of the columns 0, b, 2 b, ... summed (``kernel.sensitivity.toeplitz_bound``),
respectively of their norms.

**The search.** Where b coefficients are at most the separation, columns of one client are
orthogonal, and L-BFGS runs over all coefficients but the first. Where they overlap, the sensitivity
is known for non-negative coefficients that do not increase from lag b on (after Kalinin and
Lampert, Thm 2), and those before, and the decrements of the others, are bounded.
"""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import scipy.signal

from mf_aggregators import inputs, memory, workloads
from mf_aggregators import participation as participations
from mf_aggregators.factorizations import _decoder_rows
from mf_aggregators.factorizations._round_errors import RoundError
from mf_aggregators.factorizations.convergence import (
    NotConvergedWarning,
    Objective,
    is_stationary,
    minimise,
    warn_unless_stationary,
)
from mf_aggregators.kernel import numbers, schemas
from mf_aggregators.kernel.numbers import FloatArray
from mf_aggregators.linear_algebra import power_series
from mf_aggregators.participation import Participation
from mf_aggregators.progress_bars import ProgressBar
from mf_aggregators.workloads import Workload

# What is minimised: the mean of the squared errors of all rounds, or the largest.
ErrorMeasure = Literal["mean", "max"]
# From (m,) coefficients of C to a weighted sum of the squared rows of B, and its (m,) slope.
SquaredRows: TypeAlias = Callable[[FloatArray], tuple[float, FloatArray]]
# A lower estimate, for errors and sensitivity as well.
_BYTES_PER_ROUND = 64
# How far an array's entries may be from those of a workload that is known by its name.
_ROUNDING_OF_WORKLOAD = 1e-9
_DIGITS_OF_MOMENTUM = 12
# Of the search for the coefficients that an extension adds.
_EVALUATIONS_OF_EXTENSION = 500
# How often a search that came to a halt starts again from where it is.
_MOST_STARTS = 10


def check_rounds(num_rounds: int, what: str) -> int:
    """Returns n, or raises an error unless it is at least 1 and there is memory for ``what``."""
    rounds = numbers.positive_integer(num_rounds, "num_rounds")
    memory.check_rounds(rounds, _BYTES_PER_ROUND, what)
    return rounds


def check_training(num_rounds: Any, workload: Any, what: str) -> tuple[int, Workload]:
    """Returns the rounds and the workload that a Toeplitz matrix is optimised for.

    Args:
      num_rounds: n, or the workload in its place; None where the other argument says it.
      workload: A ``workloads.Workload``, an (n, n) array or an int; None for the prefix sum of
        the rounds, or where the other argument is the workload.
      what: What is to be made, for a message about memory.

    Returns:
      n, and the workload.

    Raises:
      TypeError: If it is no workload.
      ValueError: If there are two workloads or none, n is not above zero, the rounds of both
        arguments differ, or an array is neither Toeplitz nor that of momentum with learning rates.
      InsufficientMemoryError: If there is too little memory.
    """
    is_number = num_rounds is not None and np.ndim(num_rounds) == 0
    if not (num_rounds is None or is_number) or isinstance(num_rounds, Workload):
        if workload is not None:
            raise ValueError(
                "there are two workloads, the first argument and workload=: give one of them."
            )
        num_rounds, workload = None, num_rounds
    workload = workloads.resolve(workload)
    if workload is not None and not isinstance(workload, Workload):
        workload = _described_training(workload)
    if num_rounds is None and workload is not None:
        num_rounds = workload.num_rounds
    rounds = check_rounds(num_rounds, what)
    if workload is None:
        workload = Workload("prefix_sum", rounds)
    if workload.num_rounds != rounds:
        raise ValueError(
            f"the workload is for {workload.num_rounds} rounds, and num_rounds is {rounds}."
        )
    return rounds, workload


def _described_training(matrix: Any) -> Workload:
    """The workload of an array: Toeplitz, or of momentum with any learning rates."""
    matrix = inputs.lower_triangular(matrix, "the workload")
    known = of_constant_rates(matrix)
    if known is not None:
        return known
    column, diagonal = matrix[:, 0], np.diagonal(matrix)
    candidates = [Workload("toeplitz", len(matrix), first_column=tuple(column))]
    with np.errstate(all="ignore"):
        momentum = 0.0 if len(matrix) == 1 else (column[1] - column[0]) / diagonal[1]
    for beta in (round(momentum, _DIGITS_OF_MOMENTUM), momentum):
        if np.all(diagonal > 0.0) and 0.0 <= beta < 1.0:
            rates = tuple(diagonal)
            candidates.append(Workload("momentum_sgd", len(matrix), float(beta), rates))
    for found in candidates:
        if np.allclose(matrix, found.matrix(), rtol=_ROUNDING_OF_WORKLOAD, atol=0.0):
            return found
    raise ValueError(
        f"the workload, an array of shape {matrix.shape}, is neither Toeplitz nor that of momentum "
        "with learning rates: give it as a workloads.Workload, or use banded or optimal."
    )


def of_constant_rates(matrix: FloatArray) -> Workload | None:
    """Returns the workload of constant learning rates that an array is a multiple of, if any.

    Args:
      matrix: A, (n, n) and lower triangular.
    """
    num_rounds, rate = len(matrix), float(matrix[0, 0])
    momentum = 0.0 if num_rounds == 1 else float(matrix[1, 0]) / rate - 1.0
    for beta in (round(momentum, _DIGITS_OF_MOMENTUM), momentum):
        if not 0.0 <= beta < 1.0:
            continue
        found = Workload("momentum_sgd", num_rounds, beta) if beta else None
        found = found or Workload("prefix_sum", num_rounds)
        if np.allclose(matrix / rate, found.matrix(), rtol=_ROUNDING_OF_WORKLOAD, atol=0.0):
            return found
    return None


def parameters_of(momentum: float) -> dict[str, Any]:
    """Returns what a factorization's parameters say of its workload: nothing for prefix sums."""
    return {"momentum": momentum} if momentum else {}


def parameters_for(workload: Workload, measure: RoundError) -> dict[str, Any]:
    """Returns what a factorization's parameters say of its workload and its error, beside its name.

    Args:
      workload: What the factorization was optimised for.
      measure: The error that was minimised.
    """
    momentum = workload.constant_momentum()
    stated = parameters_of(_momentum_of(workload))
    if momentum is None:
        stated["workload"] = workloads.fingerprint(workload)
    if measure.weights is not None:
        stated["weights"] = measure.parameters()["weights"]
    return stated


def is_plain(workload: Workload, measure: RoundError) -> bool:
    """Returns whether a search is that for constant learning rates and a common error.

    Args:
      workload: What is optimised for.
      measure: The error.
    """
    return workload.constant_momentum() is not None and measure.weights is None


def measure_of(measure: RoundError) -> ErrorMeasure:
    """Returns the error of constant learning rates that is most like another.

    Args:
      measure: The other.
    """
    return "max" if measure.is_maximum else "mean"


def _momentum_of(workload: Workload) -> float:
    return workload.momentum if workload.name == "momentum_sgd" else 0.0


def with_momentum(sums: FloatArray, momentum: float) -> FloatArray:
    """Returns the coefficients of s(x) / (1 - beta x): (n,) for (n,) running sums s."""
    if momentum == 0.0:
        return sums
    return np.asarray(scipy.signal.lfilter([1.0], [1.0, -momentum], sums))


def with_momentum_adjoint(values: FloatArray, momentum: float) -> FloatArray:
    """Returns the adjoint of :func:`with_momentum` applied to (n,) values."""
    return with_momentum(values[::-1], momentum)[::-1]


@dataclasses.dataclass(frozen=True)
class PatternOfRounds:
    """The worst pattern of a schema for non-increasing coefficients: rounds 0, b, 2 b, ...

    Attributes:
      num_rounds: n.
      separation: b; n where nobody returns.
      most: The number of participations.
    """

    num_rounds: int
    separation: int
    most: int

    @classmethod
    def of(cls, participation: Participation, num_rounds: int) -> "PatternOfRounds":
        """Returns the pattern of a schema for ``num_rounds`` rounds."""
        participations.check(participation)
        most = participation.most_participations(num_rounds)
        if most == 1:
            return cls(num_rounds, num_rounds, 1)
        return cls(num_rounds, participation.separation_in(num_rounds), most)

    def squared_sensitivity(self, column: FloatArray) -> tuple[float, FloatArray]:
        """Returns the squared norm of the pattern's columns summed, and its gradient.

        Args:
          column: (n,) the first column of C.

        Returns:
          The value and an (n,) gradient by ``column``.
        """
        total = schemas.pattern_sum(column, self.separation, self.most)
        # The adjoint of summing shifted copies is summing copies shifted the other way.
        gradient = schemas.pattern_sum_adjoint(total, self.separation, self.most)
        return float(total @ total), 2.0 * gradient

    def sum_of_squared_norms(self, column: FloatArray) -> tuple[float, FloatArray]:
        """Returns the sum of the squared norms of the pattern's columns, and its gradient.

        Their squared sum is the same where the columns are orthogonal, whatever the signs.

        Args:
          column: (m,) the first column of C, m at most b.

        Returns:
          The value and an (m,) gradient.
        """
        starts = np.arange(self.most) * self.separation
        # Entry t of a column that starts at round s is there if s + t < n.
        copies = np.searchsorted(starts, self.num_rounds - np.arange(len(column)), side="left")
        weights = copies.astype(np.float64)
        return float(weights @ np.square(column)), 2.0 * weights * column


def error_weights(num_rounds: int, error: ErrorMeasure) -> FloatArray:
    """Returns (n,) weights w with the squared error sens^2 sum_t w_t b_t^2."""
    if error == "max":
        return np.ones(num_rounds)
    return 1.0 - np.arange(num_rounds) / num_rounds


def squared_rows_by_strategy(
    coefficients: FloatArray, weights: FloatArray, momentum: float = 0.0
) -> tuple[float, FloatArray]:
    """Returns sum_t w_t b_t^2 and its gradient by the coefficients of C.

    Args:
      coefficients: (m,) the first entries of C's first column; zeros follow.
      weights: (n,) as :func:`error_weights` returns them.
      momentum: beta of the workload.

    Returns:
      The value and an (m,) gradient.
    """
    num_rounds = len(weights)
    inverse = power_series.reciprocal(coefficients, num_rounds)
    decoder = with_momentum(np.cumsum(inverse), momentum)
    slope = 2.0 * weights * decoder
    # b(x) = a(x) / c(x), so a change of c_j changes b by -x^j b(x) / c(x).
    response = power_series.product(decoder, inverse, num_rounds)
    gradient = -power_series.correlation(slope, response, len(coefficients))
    return float(weights @ np.square(decoder)), gradient


def check_bands(num_bands: int | None, num_rounds: int, default: int) -> int:
    """Returns the number of bands, or raises ValueError unless it is between 1 and n."""
    if num_bands is None:
        return default
    num_bands = numbers.positive_integer(num_bands, "num_bands")
    if num_bands > num_rounds:
        raise ValueError(f"num_bands must be at most num_rounds, {num_rounds}, found {num_bands}.")
    return num_bands


def plain_squared_rows(num_rounds: int, error: ErrorMeasure, momentum: float) -> SquaredRows:
    """Returns the squared rows of constant learning rates by the coefficients of C.

    Args:
      num_rounds: n.
      error: Which error, ``mean`` or ``max``.
      momentum: That of the workload; zero for prefix sums.
    """
    weights = error_weights(num_rounds, error)
    return functools.partial(squared_rows_by_strategy, weights=weights, momentum=momentum)


def _by_strategy(objective: Objective, num_rounds: int) -> SquaredRows:
    """A function of the coefficients of C^-1 as one of those of C."""

    def squared_rows(coefficients: FloatArray) -> tuple[float, FloatArray]:
        inverse = power_series.reciprocal(coefficients, num_rounds)
        value, slope = objective(inverse)
        # A change of c_j changes 1 / c(x) by -x^j / c(x)^2.
        response = power_series.product(inverse, inverse, num_rounds)
        return value, -power_series.correlation(slope, response, len(coefficients))

    return squared_rows


def optimised(
    start: FloatArray,
    pattern: PatternOfRounds,
    squared_rows: Sequence[SquaredRows],
    max_evaluations: int,
    show_progress: bool,
) -> FloatArray:
    """Returns the coefficients of least error.

    Args:
      start: (b,) coefficients to begin with, the first above zero.
      pattern: The rounds n, and the participations of a client.
      squared_rows: What to minimise, one after another, times the squared sensitivity.
      max_evaluations: The most evaluations of each.
      show_progress: Whether to show a bar on standard error.

    Returns:
      (b,) coefficients, the first of them one; with a NotConvergedWarning if the last search
      stopped before its slope vanished.
    """
    with ProgressBar(
        desc=f"Toeplitz, {len(start)} bands", unit=" evaluations", disable=not show_progress
    ) as progress:
        for each in squared_rows:
            log_error = _log_error_of(pattern, each, len(start))
            with warnings.catch_warnings():
                if each is not squared_rows[-1]:
                    warnings.simplefilter("ignore", NotConvergedWarning)
                if len(start) <= pattern.separation:
                    start = _minimise_free(log_error, start, max_evaluations, progress)
                else:
                    start = _minimise_falling(
                        log_error, start, pattern.separation, max_evaluations, progress
                    )
    return start


def optimised_for(
    workload: Workload,
    measure: RoundError,
    num_bands: int,
    pattern: PatternOfRounds,
    max_evaluations: int,
    show_progress: bool,
) -> FloatArray:
    """Returns the coefficients of least error for any workload that is known by its name.

    The search starts at the optimum for constant learning rates, and is never worse than that.

    Args:
      workload: A.
      measure: The error.
      num_bands: b.
      pattern: The rounds n, and the participations of a client.
      max_evaluations: The most evaluations of a search.
      show_progress: Whether to show a bar on standard error.

    Returns:
      (b,) coefficients.
    """
    num_rounds, momentum = workload.num_rounds, _momentum_of(workload)
    rows = _decoder_rows.of(workload)
    plain = plain_squared_rows(num_rounds, measure_of(measure), momentum)
    root = power_series.square_root_coefficients(num_bands, momentum)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotConvergedWarning)
        starts = [optimised(root, pattern, (plain,), max_evaluations, show_progress)]
    column = workload.coefficients()
    if column is not None and column[0] > 0.0 and num_bands <= pattern.separation:
        own = power_series.square_root(column, num_bands)
        starts += [own / own[0]] if np.all(np.isfinite(own)) else []

    def squared_error(series: FloatArray) -> float:
        with np.errstate(over="ignore", invalid="ignore"):
            squared = rows.squared(power_series.reciprocal(series, num_rounds))
            value = _squared_sensitivity(series, pattern)[0]
            value *= measure.of_rows(squared)
        return value if np.isfinite(value) else np.inf

    best = min(starts, key=squared_error)
    searched = [_by_strategy(each, num_rounds) for each in _decoder_rows.objectives(rows, measure)]
    found = optimised(best, pattern, searched, max_evaluations, show_progress)
    return min([found, best], key=squared_error)


def continued(
    released: FloatArray,
    pattern: PatternOfRounds,
    measure: RoundError,
    workload: Workload,
    is_optimised: bool,
) -> FloatArray:
    """Returns coefficients of all rounds of a pattern that begin with those that were released.

    They go on as those of the square root do. Where no client comes twice they are optimised from
    there; otherwise they would have to stay non-increasing, and are left as they are.

    Args:
      released: The coefficients of the plan that is extended.
      pattern: The rounds n of the whole, and the participations of a client.
      measure: Which error.
      workload: What further coefficients are optimised for.
      is_optimised: Whether those of the plan were optimised, and further ones may be.

    Returns:
      (n,) coefficients.
    """
    num_rounds, head = pattern.num_rounds, len(released)
    root = power_series.square_root_coefficients(num_rounds, _momentum_of(workload))
    series = np.concatenate([released, root[head:] * (released[-1] / root[head - 1])])
    if not is_optimised or num_rounds > pattern.separation:
        return np.asarray(series)
    if is_plain(workload, measure):
        momentum = _momentum_of(workload)
        squared_rows = plain_squared_rows(num_rounds, measure_of(measure), momentum)
    else:
        searched = _decoder_rows.objectives(_decoder_rows.of(workload), measure)
        squared_rows = _by_strategy(searched[-1], num_rounds)
    log_error = _log_error_of(pattern, squared_rows, num_rounds)

    def of_tail(tail: FloatArray) -> tuple[float, FloatArray]:
        value, gradient = log_error(np.concatenate([released, tail]))
        return value, gradient[head:]

    found = minimise(
        of_tail,
        series[head:],
        max_evaluations=_EVALUATIONS_OF_EXTENSION,
        corrections=20,
        least_change=1e-13,
    )
    return np.concatenate([released, found.x])


def _log_error_of(
    pattern: PatternOfRounds, squared_rows_of: SquaredRows, num_bands: int
) -> Objective:
    """The logarithm of the squared error of coefficients, with its slope."""

    def log_error(series: FloatArray) -> tuple[float, FloatArray]:
        squared_sensitivity, by_sensitivity = _squared_sensitivity(series, pattern)
        squared_rows, by_rows = squared_rows_of(series)
        gradient = by_sensitivity[:num_bands] / squared_sensitivity + by_rows / squared_rows
        return float(np.log(squared_sensitivity) + np.log(squared_rows)), gradient

    return log_error


def _squared_sensitivity(series: FloatArray, pattern: PatternOfRounds) -> tuple[float, FloatArray]:
    """The squared sensitivity of (b,) coefficients, and its slope by them or by more."""
    if len(series) <= pattern.separation:
        return pattern.sum_of_squared_norms(series)
    return pattern.squared_sensitivity(power_series.padded(series, pattern.num_rounds))


def _minimise_free(
    objective: Objective, start: FloatArray, max_evaluations: int, progress: "ProgressBar"
) -> FloatArray:
    """L-BFGS over c_1, c_2, ... with c_0 = 1: the error does not depend on the scale of C."""
    start = start / start[0]
    function = _with_first_of_one(objective, start, progress)
    return np.append(1.0, _minimise(function, start[1:], max_evaluations, None))


def _minimise_falling(
    objective: Objective,
    start: FloatArray,
    separation: int,
    max_evaluations: int,
    progress: "ProgressBar",
) -> FloatArray:
    """L-BFGS-B over c_1, ... before lag b and the decrements from there on: all at least zero."""
    start = start / start[0]
    before = separation - 1
    one_by_one = _with_first_of_one(objective, start, progress)

    def series(free: FloatArray) -> FloatArray:
        return np.append(free[:before], np.cumsum(free[before:][::-1])[::-1])

    def function(free: FloatArray) -> tuple[float, FloatArray]:
        value, gradient = one_by_one(series(free))
        return value, np.append(gradient[:before], np.cumsum(gradient[before:]))

    tail = start[separation:]
    first = np.concatenate([start[1:separation], tail[:-1] - tail[1:], tail[-1:]])
    return np.append(1.0, series(_minimise(function, first, max_evaluations, (0.0, None))))


def _with_first_of_one(
    objective: Objective, start: FloatArray, progress: "ProgressBar"
) -> Objective:
    """The objective of c_1, c_2, ... with c_0 = 1, and a wall where errors are far too large."""
    # A step too far makes errors so large that a line search would interpolate from them
    # to no step at all: it is told a value that is bad enough.
    with np.errstate(over="ignore", invalid="ignore"):
        bad = objective(start)[0] + 1.0

    def function(free: FloatArray) -> tuple[float, FloatArray]:
        progress.update()
        with np.errstate(over="ignore", invalid="ignore"):
            value, gradient = objective(np.append(1.0, free))
        if not (value < bad and np.all(np.isfinite(gradient))):
            return bad, np.zeros_like(free)
        return value, gradient[1:]

    return function


def _minimise(
    function: Objective,
    start: FloatArray,
    max_evaluations: int,
    bounds: tuple[float, float | None] | None,
) -> FloatArray:
    evaluations = 0
    for _ in range(_MOST_STARTS):
        result = minimise(
            function,
            start,
            bounds=None if bounds is None else [bounds] * len(start),
            max_evaluations=max_evaluations - evaluations,
            corrections=20,
            least_change=1e-13,
        )
        evaluations += result.nfev
        scale = np.full(len(result.x), np.linalg.norm(result.x))
        if bounds is not None:
            scale = np.where((result.x > bounds[0]) | (result.jac < 0.0), scale, 0.0)
        # Near bounds, steps may come to nothing before slopes do: a new start forgets them.
        if is_stationary(result, scale) or evaluations >= max_evaluations:
            break
        start = result.x
    warn_unless_stationary(result, scale)
    return np.asarray(result.x)
