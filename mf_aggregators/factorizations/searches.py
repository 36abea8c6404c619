r"""Code that the searches for matrices share: errors over rounds, classes of rounds, minimisers.

**Errors.** For weights w on the rounds, none below zero and of sum one, the error is the sum of w_i
e_i, where e_i = (A X^-1 A^T)_ii is the variance of round i: the mean error of the workload
diag(w)^1/2 A. Its inverse has as many bands as that of A.

**The maximum.** The error of the worst round is the largest such error over all w. For every w,

    max_i e_i(X) >= sum_i w_i e_i(X) >= min over X of sum_i w_i e_i(X),

so every lower bound on the weighted mean is also a lower bound on the maximum. For the best w both
sides are equal, because e_i is convex in X and the weights form a compact set (Sion's theorem).

**Classes.** A client takes part in rounds of one class (equal modulo b). If the columns of a class
are orthogonal, the squared sensitivity is the largest sum of their squared norms. With classes of
one round, all columns have equal norms.
"""

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

import numpy as np
import scipy.optimize
import tqdm

from mf_aggregators.kernel import numbers
from mf_aggregators.kernel.numbers import BoolArray, FloatArray, IntArray
from mf_aggregators.progress_bars import ProgressBar

# An objective: a function from (m,) variables to a value and its (m,) gradient.
Objective: TypeAlias = Callable[[FloatArray], tuple[float, FloatArray]]

# A search has converged if following its remaining gradient would change the squared error by at
# most this share.
_FLAT = 1e-2
# A relative gap is changed by rounding errors by less than this.
_ROUNDING_OF_GAPS = 1e-9
# The most times that a search which stopped making progress is started again from its result.
_MOST_STARTS = 10

# The type of the argument ``error`` of searches: a name, or (n,) weights of rounds.
RoundWeights: TypeAlias = Literal["mean", "max"] | FloatArray

# The least weight of a round in a search, relative to the largest weight.
_LEAST_WEIGHT = 1e-8


@dataclasses.dataclass(frozen=True, eq=False)
class RoundError:
    """An error over rounds that a search minimises: the mean, the maximum, or a weighted mean.

    Attributes:
      num_rounds: n.
      weights: (n,) weights of sum one; None for the maximum and for the mean.
      is_maximum: Whether the error is the maximum.
    """

    num_rounds: int
    weights: FloatArray | None
    is_maximum: bool

    @classmethod
    def of(cls, error: object, num_rounds: int) -> "RoundError":
        """Returns the error over rounds that the argument ``error`` of a search stands for.

        Args:
          error: ``mean``, ``max``, or (n,) non-negative weights, not all zero.
          num_rounds: n.

        Returns:
          The error; equal weights are the mean.

        Raises:
          ValueError: If the argument is none of these.
        """
        if isinstance(error, str):
            if error not in ("mean", "max"):
                raise ValueError(
                    "error must be 'mean', 'max' or an array of weights of the rounds, found "
                    f"{numbers.shown(error)}."
                )
            return cls(num_rounds, None, error == "max")
        weights = numbers.real_array(error, "error")
        if weights.shape != (num_rounds,):
            raise ValueError(
                f"error must hold one weight for each of the {num_rounds} rounds, found an array "
                f"of shape {weights.shape}."
            )
        largest = float(np.max(weights))
        if not (np.all(np.isfinite(weights)) and np.all(weights >= 0.0) and largest > 0.0):
            raise ValueError(
                "error must hold finite weights of at least zero, not all zero, found "
                f"{float(np.min(weights))} to {largest}."
            )
        if np.ptp(weights) == 0.0:
            return cls(num_rounds, None, False)
        shares = weights / largest
        return cls(num_rounds, shares / np.sum(shares), False)

    @property
    def raised(self) -> FloatArray | None:
        """(n,): the weights, raised to at least 1e-8 of the largest; None without weights."""
        if self.weights is None:
            return None
        return np.asarray(np.maximum(self.weights, _LEAST_WEIGHT * np.max(self.weights)))

    @property
    def lag_weights(self) -> FloatArray:
        """(n,) w: for a Toeplitz B with coefficients b_t, the error is the sum of w_t b_t^2.

        For the maximum, this is the last row, whose norm is the largest.
        """
        if self.is_maximum:
            return np.ones(self.num_rounds)
        if self.weights is None:
            return 1.0 - np.arange(self.num_rounds) / self.num_rounds
        return np.asarray(np.cumsum(self.weights[::-1])[::-1])

    @property
    def is_mean(self) -> bool:
        """Whether the error is the mean with equal weights."""
        return self.weights is None and not self.is_maximum

    @property
    def has_vanishing_weights(self) -> bool:
        """Whether some weights of rounds are zero, or far below the largest weight."""
        raised = self.raised
        if raised is None or self.weights is None:
            return False
        return not np.array_equal(raised, self.weights)

    def of_rows(self, squared_rows: FloatArray) -> float:
        """Returns the error for given variances of rounds; for the mean, their sum.

        Args:
          squared_rows: (n,) the variances of the rounds.
        """
        if self.is_maximum:
            return float(np.max(squared_rows))
        if self.weights is None:
            return float(np.sum(squared_rows))
        return float(self.weights @ squared_rows)

    def weighed(self, squared_rows: FloatArray, order: float | None) -> tuple[float, FloatArray]:
        """Returns the error and its gradient for given variances; for the maximum, those of a norm.

        Args:
          squared_rows: (n,) the variances of the rounds.
          order: The order of the norm; None for the mean or weighted error.

        Returns:
          The value and its (n,) gradient.
        """
        if order is None:
            shares = np.full(self.num_rounds, 1.0 / self.num_rounds)
            weights = shares if self.weights is None else self.weights
            return float(weights @ squared_rows), weights
        largest = float(np.max(squared_rows))
        powers = (squared_rows / largest) ** (order - 1.0)
        total = float(powers @ squared_rows) / largest
        return largest * total ** (1.0 / order), powers * total ** (1.0 / order - 1.0)

    def parameters(self) -> dict[str, object]:
        """Returns the error as parameters of a factorization; empty for the mean."""
        if self.is_maximum:
            return {"error": "max"}
        if self.weights is None:
            return {}
        return {"error": "weights", "weights": self.weights.tolist()}


def weighted(matrix: FloatArray, weights: FloatArray | None) -> FloatArray:
    """Returns diag(w)^1/2 A: a workload with weights on its rounds.

    Args:
      matrix: A, (n, n).
      weights: (n,) above zero; None for ones.
    """
    if weights is None:
        return matrix
    return np.asarray(matrix * np.sqrt(weights)[:, np.newaxis])


def weighted_inverse(bands: FloatArray, weights: FloatArray | None) -> FloatArray:
    """Returns the (n, w) bands of A^-1 diag(w)^-1/2, the inverse of a weighted workload.

    Args:
      bands: The bands of A^-1, ``bands[i, t] = A^-1[i, i - t]``.
      weights: (n,) above zero; None for ones.
    """
    if weights is None:
        return bands
    scales, scaled = 1.0 / np.sqrt(weights), bands.copy()
    for t in range(bands.shape[1]):
        scaled[t:, t] *= scales[: len(bands) - t]
    return scaled


@dataclasses.dataclass(frozen=True)
class PatternLayout:
    """The arrangement of rounds by class modulo b, and by position in the class.

    Position a of class c is round c + a b, if that is below n.

    Attributes:
      num_rounds: n.
      separation: b, at most n; n for one participation.
    """

    num_rounds: int
    separation: int

    @property
    def positions(self) -> int:
        """The number K of rounds of the longest class."""
        return -(-self.num_rounds // self.separation)

    @property
    def rounds(self) -> IntArray:
        """The (b, K) rounds of all classes; those of n and more do not exist."""
        classes = np.arange(self.separation)[:, np.newaxis]
        return classes + self.separation * np.arange(self.positions)

    @property
    def exists(self) -> BoolArray:
        """(b, K) bool: which positions are rounds."""
        return self.rounds < self.num_rounds

    @property
    def order(self) -> IntArray:
        """(n,) int: the rounds by class."""
        return np.asarray(self.rounds[self.exists])

    def by_position(self, values: FloatArray) -> FloatArray:
        """Arranges (n,) values of rounds as (b, K) by class and position, with zeros elsewhere."""
        table = np.zeros((self.separation, self.positions))
        table[self.exists] = values[self.order]
        return table

    def by_round(self, table: FloatArray) -> FloatArray:
        """Arranges (b, K) values by class and position as (n,) values of rounds."""
        values = np.empty(self.num_rounds)
        values[self.order] = table[self.exists]
        return values

    def totals(self, values: FloatArray) -> FloatArray:
        """Returns (n,): for each round, the sum of (n,) values over the round's class."""
        if self.positions == 1:
            return values
        sums = np.sum(self.by_position(values), axis=1)
        return np.resize(sums, self.num_rounds)

    def dual_diagonal(self, diagonal: FloatArray) -> tuple[FloatArray, float]:
        """Returns an (n,) diagonal of V that is equal within classes, and the largest tr(V X).

        The largest tr(V X) is over X of sensitivity one. The diagonal is the one closest to the
        given positive ``diagonal``, in relative terms.
        """
        allowed = self.totals(1.0 / diagonal) / self.totals(1.0 / np.square(diagonal))
        if self.positions == 1:
            allowed = diagonal
        return allowed, float(np.sum(allowed[: self.separation]))

    def rows_by_class(self, matrix: FloatArray) -> FloatArray:
        """Returns (b, K, m) rows of an (n, m) matrix by class, zero for missing rounds."""
        shape = (self.separation, self.positions, matrix.shape[1])
        if shape[0] * shape[1] == self.num_rounds:
            return matrix.reshape(shape)
        padded = np.zeros(shape)
        padded[self.exists] = matrix
        return padded

    def blocks_times(self, blocks: FloatArray, matrix: FloatArray) -> FloatArray:
        """Returns (n, m): (b, K, K) diagonal blocks times an (n, m) matrix, rows by class."""
        times = np.multiply if self.positions == 1 else np.matmul
        product = times(blocks, self.rows_by_class(matrix)).reshape(-1, matrix.shape[1])
        is_full = len(product) == self.num_rounds
        return np.asarray(product if is_full else product[self.exists.ravel()])

    def times_blocks(self, matrix: FloatArray, blocks: FloatArray) -> FloatArray:
        """Returns (m, n): an (m, n) matrix, columns by class, times (b, K, K) diagonal blocks."""
        return self.blocks_times(blocks.transpose(0, 2, 1), matrix.T).T

    @property
    def _classes_by_length(self) -> tuple[int, int]:
        """The number of classes with K rounds, which come first, and of those with K - 1 rounds."""
        full = self.num_rounds - self.separation * (self.positions - 1)
        return full, self.separation - full

    def fewer(self, factor: int) -> "PatternLayout":
        """Returns a layout with as many positions, and with fewer classes of each length.

        Args:
          factor: The number by which the number of classes is divided.
        """
        full, short = (max(count // factor, min(count, 1)) for count in self._classes_by_length)
        separation = full + short
        return PatternLayout(separation * (self.positions - 1) + full, separation)

    def refined(self, table: FloatArray, fewer: "PatternLayout") -> FloatArray:
        """Interpolates a (b', m) table for fewer classes to a (b, m) table for these classes.

        Args:
          table: The table for the classes of ``fewer``.
          fewer: The layout that :meth:`fewer` returned.
        """
        found, start, start_of_fewer = np.empty((self.separation, table.shape[1])), 0, 0
        for count, known in zip(self._classes_by_length, fewer._classes_by_length, strict=True):
            places = (np.arange(count) + 0.5) / max(count, 1)
            known_places = (np.arange(known) + 0.5) / max(known, 1)
            for column in range(table.shape[1] if count else 0):
                values = table[start_of_fewer : start_of_fewer + known, column]
                found[start : start + count, column] = np.interp(places, known_places, values)
            start, start_of_fewer = start + count, start_of_fewer + known
        return found


class NotConvergedWarning(UserWarning):
    """Warning that a search stopped before its target; the gap of its result is certified."""

    @classmethod
    def unless_reached(cls, gap: float, target: float, evaluations: int) -> None:
        """Warns the caller of a search if the certified relative gap is above its target.

        Args:
          gap: The certified relative gap of the result.
          target: The requested gap.
          evaluations: The number of evaluations of the search.
        """
        # The comparison is negated so that NaN counts as a failure.
        if not gap <= target:
            warnings.warn(
                f"the optimiser stopped at a certified relative gap of {gap:.1e}, not the "
                f"{target:.1e} asked for, after {evaluations} evaluations; the factorization "
                "states its gap.",
                cls,
                stacklevel=3,
            )

    @classmethod
    def unless_stationary(cls, result: scipy.optimize.OptimizeResult) -> None:
        """Warns the caller of a search if SciPy's optimiser stopped before the gradient vanished.

        Args:
          result: What a search for logarithms returned, with the ``scale`` of its variables or
            without.
        """
        if not _is_stationary(result):
            warnings.warn(
                f"the optimiser stopped before it converged, after {result.nfev} evaluations "
                f"({result.message}); the factorization is the best that it found.",
                cls,
                stacklevel=3,
            )


class Converged(Exception):  # noqa: N818 - a signal that ends a search, not an error.
    """Raised by an objective to end SciPy's optimiser when the target is reached."""


def progress_bar(
    name: str, *, show: bool, unit: str = " evaluations", total: int | None = None
) -> ProgressBar:
    """Returns the progress bar of a search; it does nothing unless ``show`` is true.

    Args:
      name: The name of the search.
      show: Whether the bar is shown.
      unit: The unit that it counts, after a space.
      total: The largest count; None if it is not known.
    """
    kind: type[ProgressBar] = ProgressBar if show else tqdm.tqdm
    return kind(desc=name, unit=unit, total=total, disable=not show)


def minimise(
    function: Objective,
    start: FloatArray,
    *,
    max_evaluations: int,
    corrections: int,
    least_change: float,
    least_slope: float = 0.0,
    bounds: Sequence[tuple[float, float | None]] | None = None,
    callback: Callable[[FloatArray], None] | None = None,
) -> scipy.optimize.OptimizeResult:
    """Minimises a function with its gradient by SciPy's L-BFGS-B.

    Args:
      function: A function from (m,) variables to the value and its (m,) gradient.
      start: (m,) variables.
      max_evaluations: The most iterations, and about the most evaluations.
      corrections: The number of steps from which the approximate Hessian is made.
      least_change: The search ends when a step changes the value by a smaller share than this.
      least_slope: The search ends when no entry of the projected gradient is above this.
      bounds: Bounds on the variables, as for SciPy; None for none.
      callback: Called after each iteration with its (m,) variables.

    Returns:
      The result of ``scipy.optimize.minimize``.
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
) -> scipy.optimize.OptimizeResult:
    """Minimises the logarithm of an error that may overflow, by several searches in turn.

    A step that is too long may give an error so large that the line search would interpolate to no
    step at all; it gets a smaller bad value instead. Near bounds, steps may become tiny before the
    gradient vanishes; a new start then makes progress.

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


def gap_above(error: float, bound: float) -> float:
    """Returns the relative excess of an error over a lower bound.

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


def _is_stationary(result: scipy.optimize.OptimizeResult) -> bool:
    """Whether a SciPy optimiser ended because the gradient was negligible.

    The ``scale`` of the result says how much the variables may matter: their magnitudes, and zero
    for those that a bound holds. The default is one, for variables that are logarithms.
    """
    # The objective is a logarithm, so this is the relative change that the remaining slope stands
    # for.
    remaining = float(np.linalg.norm(result.jac * result.get("scale", 1.0)))
    # Status 1 of SciPy's L-BFGS-B is for its limits on iterations and evaluations.
    return bool(result.status != 1 and remaining < _FLAT)


def check_bands(num_bands: int | None, num_rounds: int, default: int = 1) -> int:
    """Returns the number of bands, or raises ValueError unless it is between 1 and n."""
    if num_bands is None:
        return default
    num_bands = numbers.positive_integer(num_bands, "num_bands")
    if num_bands > num_rounds:
        raise ValueError(f"num_bands must be at most num_rounds, {num_rounds}, found {num_bands}.")
    return num_bands
