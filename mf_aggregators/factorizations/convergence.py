"""How solvers minimise, and say that they have, or have not, reached their target."""

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import scipy.optimize
from scipy.linalg.blas import daxpy, ddot

from mf_aggregators.kernel.numbers import FloatArray
from mf_aggregators.progress_bars import ProgressBar

# From (m,) variables to a value and its (m,) gradient.
Objective: TypeAlias = Callable[[FloatArray], tuple[float, FloatArray]]

# Relative change of the squared error that the remaining slope may stand for.
_FLAT = 1e-2
# Rounding takes less than this off a gap.
_ROUNDING_OF_GAPS = 1e-9
# Changes of an objective, which is a logarithm, up to this follow from slopes.
_SMALL_CHANGE = 1e-6
# How often a search that came to a halt starts again from where it is.
_MOST_STARTS = 10
# The least cosine between a step and a change of the slope: below it curvature is rounding.
_LEAST_COSINE = 1e-10


class NotConvergedWarning(UserWarning):
    """A solver stopped before its target; it returns its best result, with its true gap."""


class Converged(Exception):  # noqa: N818 - a signal that ends a search, not an error.
    """Raised by an objective to end a SciPy optimiser once the target is reached."""


def minimise(
    function: Objective,
    start: FloatArray,
    *,
    max_evaluations: int,
    corrections: int,
    least_change: float,
    least_slope: float = 0.0,
    bounds: Any = None,
    callback: Callable[[FloatArray], None] | None = None,
) -> Any:
    """Minimises a function with its gradient by SciPy's L-BFGS-B.

    Args:
      function: Takes (m,) variables and returns the value and its (m,) gradient.
      start: (m,) variables.
      max_evaluations: The most iterations, and about the most evaluations.
      corrections: How many steps the approximate Hessian is made of.
      least_change: The search ends once a step changes the value by less, relative to it.
      least_slope: It ends once no entry of the projected gradient is above this.
      bounds: As SciPy takes them; None for none.
      callback: Called with the (m,) variables of each iterate, which were evaluated last.

    Returns:
      What ``scipy.optimize.minimize`` returns.
    """
    return scipy.optimize.minimize(
        function,
        start,
        jac=True,
        method="L-BFGS-B",
        bounds=bounds,
        callback=callback,
        options={
            "maxcor": corrections,
            "maxiter": max_evaluations,
            "maxfun": max_evaluations,
            "ftol": least_change,
            "gtol": least_slope,
        },
    )


def minimise_with_restarts(
    objective: Objective,
    start: FloatArray,
    *,
    max_evaluations: int,
    least_change: float,
    progress: ProgressBar,
    is_free: bool = True,
) -> Any:
    """Minimises a logarithm that may overflow, by several searches one after another.

    A step too far makes errors so large that a line search would interpolate from them to no step
    at all: it is told a value that is bad enough. Near bounds, steps may come to nothing before
    slopes do: a new start forgets them.

    Args:
      objective: Takes (m,) variables and returns the value and its (m,) gradient.
      start: (m,) variables.
      max_evaluations: About the most evaluations.
      least_change: As :func:`minimise` takes it.
      progress: Shows evaluations.
      is_free: Whether variables may be negative.

    Returns:
      What :func:`minimise` returns, with the ``scale`` of the variables.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        bad = objective(start)[0] + 1.0

    def function(free: FloatArray) -> tuple[float, FloatArray]:
        progress.update()
        with np.errstate(over="ignore", invalid="ignore"):
            value, gradient = objective(free)
        if not (value < bad and np.all(np.isfinite(gradient))):
            return bad, np.zeros_like(free)
        return value, gradient

    evaluations = 0
    for _ in range(_MOST_STARTS):
        result = minimise(
            function,
            start,
            bounds=None if is_free else [(0.0, None)] * len(start),
            max_evaluations=max_evaluations - evaluations,
            corrections=20,
            least_change=least_change,
        )
        start, evaluations = result.x, evaluations + result.nfev
        result.scale = np.full(len(start), np.linalg.norm(start))
        if not is_free:
            result.scale *= (start > 0.0) | (result.jac < 0.0)
        if _is_stationary(result) or evaluations >= max_evaluations:
            break
    return result


class CurvaturePairs:
    """The last steps of a search and the changes of slopes along them, for L-BFGS.

    Pairs may stay while the objective changes a little, which SciPy's optimiser does not allow.
    """

    def __init__(self, most: int) -> None:
        """Begins without pairs.

        Args:
          most: How many are kept.
        """
        self._most = most
        self._pairs: list[tuple[FloatArray, FloatArray, float]] = []
        self._shape: tuple[int, ...] = ()

    def __len__(self) -> int:
        """The number of pairs."""
        return len(self._pairs)

    def add(self, step: FloatArray, change: FloatArray) -> None:
        """Keeps a pair if the slope grows along the step.

        Args:
          step: Of any shape.
          change: Of the slope, of the same shape.
        """
        self._shape = step.shape
        product = float(np.vdot(step, change))
        if product > _LEAST_COSINE * float(np.linalg.norm(step) * np.linalg.norm(change)):
            pair = step.ravel(), change.ravel(), product
            self._pairs = [*self._pairs, pair][-self._most :]

    def scale(self, metric: Callable[[FloatArray], FloatArray]) -> float:
        """Returns the factor that makes a metric right along the last step; 1 before any.

        Args:
          metric: As :meth:`step` takes it.
        """
        if not self._pairs:
            return 1.0
        _, change, product = self._pairs[-1]
        return product / float(np.vdot(change, metric(change.reshape(self._shape))))

    def step(self, slope: FloatArray, metric: Callable[[FloatArray], FloatArray]) -> FloatArray:
        """Returns the step of L-BFGS by its two loops (Nocedal and Wright, Alg. 7.4).

        Args:
          slope: Of the shape of steps.
          metric: Takes slopes to steps, a symmetric positive definite map: the inverse Hessian
            before any pair.
        """
        rest, along = slope.ravel().copy(), []
        for step, change, product in reversed(self._pairs):
            along.append(float(ddot(step, rest)) / product)
            rest = daxpy(change, rest, a=-along[-1])
        found = metric(rest.reshape(slope.shape)).ravel()
        for step, change, product in self._pairs:
            found = daxpy(step, found, a=along.pop() - float(ddot(change, found)) / product)
        return np.asarray(-found.reshape(slope.shape))


@dataclasses.dataclass(frozen=True, eq=False)
class _Point:
    """A point of a search: (m,) variables, the value, that which is shown, and the gradient."""

    free: FloatArray
    value: float
    shown: float
    gradient: FloatArray


class ObjectiveBySlopes:
    """An objective that computes small changes from slopes, which rounding hides less.

    Near the iterate that a line search starts from, the change of the value is the mean of both
    slopes along the step. For quadratic objectives it is exact, and conditions on such values are
    the approximate Wolfe conditions of Hager and Zhang (*A new conjugate gradient method with
    guaranteed descent and an efficient line search*, 2005). That matters where what is
    wanted is off by the slopes that remain, and the value by their squares only.
    """

    def __init__(self, objective: Objective) -> None:
        """Begins before the first evaluation.

        Args:
          objective: The logarithm of a bound or an error.
        """
        self._objective = objective
        self._iterate: _Point | None = None
        self._last: _Point | None = None

    def __call__(self, free: FloatArray) -> tuple[float, FloatArray]:
        """Returns the value less that of the first evaluation, and the (m,) gradient.

        Args:
          free: (m,) variables.
        """
        value, gradient = self._objective(free)
        # Shown values begin at zero, where floats are densest.
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
        """Notes that the last point is an iterate: the start of the next line search."""
        self._iterate = self._last


def with_walls(objective: Objective) -> Objective:
    """Returns the objective with a value where it raises LinAlgError.

    The line search has to come back, and interpolates from this value: as high above the last
    point as that was steep.

    Args:
      objective: It must not raise at the first point.
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


def gap_above(error: float, bound: float) -> float:
    """Returns how far an error is above a lower bound, relative to that.

    Args:
      error: The squared error of a matrix.
      bound: What no matrix of its class is below, rounded down.

    Returns:
      At least 0; infinite where the bound says nothing, or is above the error by more than
      rounding: then it is none.
    """
    if not bound > 0.0:
        return float(np.inf)
    gap = error / bound - 1.0
    return float(np.inf) if gap < -_ROUNDING_OF_GAPS else max(gap, 0.0)


def warn_unless_reached(gap: float, target: float, evaluations: int) -> None:
    """Warns the caller of a solver if its certified relative gap is above its target.

    Args:
      gap: The certified relative gap of what is returned.
      target: The gap that was asked for.
      evaluations: How many evaluations the solver made.
    """
    # Written so that NaN is no success.
    if not gap <= target:
        warnings.warn(
            f"the optimiser stopped at a certified relative gap of {gap:.1e}, not the "
            f"{target:.1e} asked for, after {evaluations} evaluations; the factorization states "
            "its gap.",
            NotConvergedWarning,
            stacklevel=3,
        )


def _is_stationary(result: Any) -> bool:
    """Whether a SciPy optimiser ended because the gradient had vanished.

    The ``scale`` of the result says how much the variables may matter: their magnitudes, and zero
    for those that a bound holds. The default is one, for variables that are logarithms.
    """
    # The objective is a logarithm: how much of it the remaining slope may stand for.
    remaining = float(np.linalg.norm(result.jac * result.get("scale", 1.0)))
    # SciPy's L-BFGS-B: 1 for its limits on iterations and evaluations.
    return bool(result.status != 1 and remaining < _FLAT)


def warn_unless_stationary(result: Any) -> None:
    """Warns the caller of a solver if its SciPy optimiser stopped before the gradient vanished.

    Args:
      result: What a search for logarithms returned, with the ``scale`` of its variables or without.
    """
    if not _is_stationary(result):
        warnings.warn(
            f"the optimiser stopped before it converged, after {result.nfev} evaluations "
            f"({result.message}); the factorization is the best that it found.",
            NotConvergedWarning,
            stacklevel=3,
        )
