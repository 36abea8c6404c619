"""The error of a Toeplitz factorization by its coefficients, and the search for the best ones.

For a Toeplitz workload A, row i of B = A C^-1 has the squared norm b_0^2 + ... + b_i^2,
where b(x) = a(x) / c(x): the running sum of the coefficients of C^-1 for the prefix sum,
and for momentum beta with constant learning rates the running sum with
1 / (1 - beta x) applied to it. So, at noise multiplier 1,

* the mean squared error is sens(C)^2 sum_t (1 - t / n) b_t^2,
* the maximal squared error, that of the last round, is sens(C)^2 sum_t b_t^2,

and with non-increasing coefficients, or no more bands than the separation, sens(C) is
the norm of the columns 0, b, 2 b, ... summed (``sensitivity.from_toeplitz_coefficients``),
respectively of their norms.

**The search.** Where b coefficients are at most the separation, columns of one client are
orthogonal, and L-BFGS runs over all coefficients but the first. Where they overlap, the sensitivity
is known for non-negative coefficients that do not increase from lag b on (after Kalinin and
Lampert, Thm 2), and those before, and the decrements of the others, are bounded.
"""

import dataclasses
from typing import Any, Literal

import numpy as np
import scipy.signal

from mf_aggregators import memory, validation, workloads
from mf_aggregators import participation as participations
from mf_aggregators import sensitivity as sensitivities
from mf_aggregators.arrays import FloatArray
from mf_aggregators.factorizations.convergence import (
    Objective,
    is_stationary,
    minimise,
    warn_unless_stationary,
)
from mf_aggregators.linear_algebra import power_series
from mf_aggregators.participation import Participation
from mf_aggregators.progress_bars import ProgressBar
from mf_aggregators.workloads import Workload

# What is minimised: the mean of the squared errors of all rounds, or the largest.
ErrorMeasure = Literal["mean", "max"]
_USE_ANOTHER = (
    "use banded or optimal, or optimise for constant ones and have the schedule as post-processing."
)
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
    rounds = validation.positive_integer(num_rounds, "num_rounds")
    memory.check_rounds(rounds, _BYTES_PER_ROUND, what)
    return rounds


def check_workload(num_rounds: Any, workload: Any, what: str) -> tuple[int, float]:
    """Returns the rounds and the momentum of what Toeplitz coefficients are optimised for.

    Args:
      num_rounds: n, or the workload in its place; None where the other argument says it.
      workload: A ``workloads.Workload``, an (n, n) array or an int; None for the prefix sum of
        the rounds, or where the other argument is the workload.
      what: What is to be made, for a message about memory.

    Returns:
      n, and beta as :func:`check_momentum` returns it.

    Raises:
      ValueError: If there are two workloads or none, n is not above zero, the rounds of both
        arguments differ, or Toeplitz coefficients cannot be optimised for the workload.
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
        workload = _described(workload)
    if num_rounds is None and workload is not None:
        num_rounds = workload.num_rounds
    rounds = check_rounds(num_rounds, what)
    return rounds, check_momentum(workload, rounds)


def _described(matrix: Any) -> Workload:
    """The workload of an array: a multiple of the prefix sum, or of one of constant momentum."""
    matrix = validation.lower_triangular(matrix, "the workload")
    num_rounds, rate = len(matrix), float(matrix[0, 0])
    momentum = 0.0 if num_rounds == 1 else float(matrix[1, 0]) / rate - 1.0
    for beta in (round(momentum, _DIGITS_OF_MOMENTUM), momentum):
        if not 0.0 <= beta < 1.0:
            continue
        found = Workload("momentum_sgd", num_rounds, beta) if beta else None
        found = found or Workload("prefix_sum", num_rounds)
        if np.allclose(matrix / rate, found.matrix(), rtol=_ROUNDING_OF_WORKLOAD, atol=0.0):
            return found
    raise ValueError(
        f"the workload, an array of shape {matrix.shape}, is no multiple of the prefix sum or of "
        f"momentum with constant learning rates: {_USE_ANOTHER}"
    )


def check_measure(error: str) -> ErrorMeasure:
    """Returns ``error``, or raises ValueError unless it is ``mean`` or ``max``."""
    if error not in ("mean", "max"):
        raise ValueError(f"error must be 'mean' or 'max', found {validation.shown(error)}.")
    return "mean" if error == "mean" else "max"


def check_momentum(workload: Workload | None, num_rounds: int) -> float:
    """Returns the momentum of a workload that Toeplitz coefficients can be optimised for.

    Args:
      workload: The workload; None for the prefix sum.
      num_rounds: n.

    Returns:
      beta: 0 for the prefix sum.

    Raises:
      TypeError: If it is not a ``workloads.Workload``.
      ValueError: If it is for other rounds, or its learning rates change.
    """
    if workload is None:
        return 0.0
    if not isinstance(workload, Workload):
        raise TypeError(
            "workload must be a workloads.Workload, such as workloads.Workload('momentum_sgd', "
            f"num_rounds, momentum=0.9), found {type(workload).__name__}."
        )
    if workload.num_rounds != num_rounds:
        raise ValueError(
            f"the workload is for {workload.num_rounds} rounds, and num_rounds is {num_rounds}."
        )
    momentum = workload.constant_momentum()
    if momentum is None:
        raise ValueError(
            "toeplitz, blt and banded_inverse can be optimised for prefix sums and for momentum "
            f"with constant learning rates, and these learning rates change: {_USE_ANOTHER}"
        )
    return momentum


def parameters_of(momentum: float) -> dict[str, Any]:
    """Returns what a factorization's parameters say of its workload: nothing for prefix sums."""
    return {"momentum": momentum} if momentum else {}


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
        total = sensitivities.pattern_sum(column, self.separation, self.most)
        # The adjoint of summing shifted copies is summing copies shifted the other way.
        gradient = sensitivities.pattern_sum_adjoint(total, self.separation, self.most)
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
    num_bands = validation.positive_integer(num_bands, "num_bands")
    if num_bands > num_rounds:
        raise ValueError(f"num_bands must be at most num_rounds, {num_rounds}, found {num_bands}.")
    return num_bands


def optimised(
    start: FloatArray,
    pattern: PatternOfRounds,
    error: ErrorMeasure,
    momentum: float,
    max_evaluations: int,
    show_progress: bool,
) -> FloatArray:
    """Returns the coefficients of least error.

    Args:
      start: (b,) coefficients to begin with, the first above zero.
      pattern: The rounds n, and the participations of a client.
      error: Which error, ``mean`` or ``max``.
      momentum: That of the workload; zero for prefix sums.
      max_evaluations: The most evaluations of the error.
      show_progress: Whether to show a bar on standard error.

    Returns:
      (b,) coefficients, the first of them one; with a NotConvergedWarning if the search stopped
      before its slope vanished.
    """
    log_error = _log_error_of(pattern, error, momentum, len(start))
    with ProgressBar(
        desc=f"Toeplitz, {len(start)} bands", unit=" evaluations", disable=not show_progress
    ) as progress:
        if len(start) <= pattern.separation:
            return _minimise_free(log_error, start, max_evaluations, progress)
        return _minimise_falling(log_error, start, pattern.separation, max_evaluations, progress)


def continued(
    released: FloatArray,
    pattern: PatternOfRounds,
    error: ErrorMeasure,
    momentum: float,
    is_optimised: bool,
) -> FloatArray:
    """Returns coefficients of all rounds of a pattern that begin with those that were released.

    They go on as those of the square root do. Where no client comes twice they are optimised from
    there; otherwise they would have to stay non-increasing, and are left as they are.

    Args:
      released: The coefficients of the plan that is extended.
      pattern: The rounds n of the whole, and the participations of a client.
      error: Which error, ``mean`` or ``max``.
      momentum: That of the workload; zero for prefix sums.
      is_optimised: Whether those of the plan were optimised, and further ones may be.

    Returns:
      (n,) coefficients.
    """
    num_rounds, head = pattern.num_rounds, len(released)
    root = power_series.square_root_coefficients(num_rounds, momentum)
    series = np.concatenate([released, root[head:] * (released[-1] / root[head - 1])])
    if not is_optimised or num_rounds > pattern.separation:
        return np.asarray(series)
    log_error = _log_error_of(pattern, error, momentum, num_rounds)

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
    pattern: PatternOfRounds, error: ErrorMeasure, momentum: float, num_bands: int
) -> Objective:
    """The logarithm of the squared error of coefficients, with its slope."""
    weights = error_weights(pattern.num_rounds, error)
    orthogonal = num_bands <= pattern.separation

    def log_error(series: FloatArray) -> tuple[float, FloatArray]:
        if orthogonal:
            squared_sensitivity, by_sensitivity = pattern.sum_of_squared_norms(series)
        else:
            column = power_series.padded(series, pattern.num_rounds)
            squared_sensitivity, by_sensitivity = pattern.squared_sensitivity(column)
            by_sensitivity = by_sensitivity[:num_bands]
        squared_rows, by_rows = squared_rows_by_strategy(series, weights, momentum)
        gradient = by_sensitivity / squared_sensitivity + by_rows / squared_rows
        return float(np.log(squared_sensitivity) + np.log(squared_rows)), gradient

    return log_error


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
