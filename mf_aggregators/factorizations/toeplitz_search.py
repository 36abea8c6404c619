"""The search for the coefficients of a Toeplitz strategy matrix of least error.

Where b coefficients are at most the separation, columns of one client are orthogonal, and L-BFGS
runs over all coefficients but the first. Where they overlap, the sensitivity is known for
non-increasing coefficients alone (Kalinin and Lampert, Thm 2), and their decrements are bounded.
"""

import numpy as np

from mf_aggregators.factorizations.convergence import Objective, minimise, warn_unless_stationary
from mf_aggregators.factorizations.toeplitz_errors import (
    ErrorMeasure,
    PatternOfRounds,
    error_weights,
    squared_rows_by_strategy,
)
from mf_aggregators.linear_algebra import power_series
from mf_aggregators.progress_bars import ProgressBar

# Of the search for the coefficients that an extension adds.
_EVALUATIONS_OF_EXTENSION = 500


def optimised(
    start: np.ndarray,
    pattern: PatternOfRounds,
    error: ErrorMeasure,
    momentum: float,
    max_evaluations: int,
    show_progress: bool,
) -> np.ndarray:
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
        return _minimise_non_increasing(log_error, start, max_evaluations, progress)


def continued(
    released: np.ndarray,
    pattern: PatternOfRounds,
    error: ErrorMeasure,
    momentum: float,
    is_optimised: bool,
) -> np.ndarray:
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
        return series
    log_error = _log_error_of(pattern, error, momentum, num_rounds)

    def of_tail(tail: np.ndarray) -> tuple[float, np.ndarray]:
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

    def log_error(series: np.ndarray) -> tuple[float, np.ndarray]:
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
    objective: Objective, start: np.ndarray, max_evaluations: int, progress: "ProgressBar"
) -> np.ndarray:
    """L-BFGS over c_1, c_2, ... with c_0 = 1: the error does not depend on the scale of C."""
    start = start / start[0]
    # A step too far makes errors so large that a line search would interpolate from them
    # to no step at all: it is told a value that is bad enough.
    with np.errstate(over="ignore", invalid="ignore"):
        bad = objective(start)[0] + 1.0

    def function(free: np.ndarray) -> tuple[float, np.ndarray]:
        progress.update()
        with np.errstate(over="ignore", invalid="ignore"):
            value, gradient = objective(np.concatenate([[1.0], free]))
        if not (value < bad and np.all(np.isfinite(gradient))):
            return bad, np.zeros_like(free)
        return value, gradient[1:]

    result = _minimise(function, start[1:], max_evaluations, None)
    return np.concatenate([[1.0], result])


def _minimise_non_increasing(
    objective: Objective, start: np.ndarray, max_evaluations: int, progress: "ProgressBar"
) -> np.ndarray:
    """L-BFGS-B over the decrements of c, which must not be negative."""

    def series(decrements: np.ndarray) -> np.ndarray:
        return np.cumsum(decrements[::-1])[::-1]

    def function(decrements: np.ndarray) -> tuple[float, np.ndarray]:
        progress.update()
        value, gradient = objective(series(decrements))
        return value, np.cumsum(gradient)

    first = np.append(start[:-1] - start[1:], start[-1])
    found = series(_minimise(function, first, max_evaluations, (0.0, None)))
    return found / found[0]


def _minimise(
    function: Objective,
    start: np.ndarray,
    max_evaluations: int,
    bounds: tuple[float, float | None] | None,
) -> np.ndarray:
    result = minimise(
        function,
        start,
        bounds=None if bounds is None else [bounds] * len(start),
        max_evaluations=max_evaluations,
        corrections=20,
        least_change=1e-13,
    )
    scale = np.full(len(result.x), np.linalg.norm(result.x))
    if bounds is not None:
        scale = np.where((result.x > bounds[0]) | (result.jac < 0.0), scale, 0.0)
    warn_unless_stationary(result, scale)
    return np.asarray(result.x)
