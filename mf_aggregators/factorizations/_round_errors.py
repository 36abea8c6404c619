r"""The error of the rounds that a search minimises, and its lower bounds.

For weights w on the rounds, none below zero and of sum one, the error is the sum of w_i e_i, where
e_i = (A X^-1 A^T)_ii is the variance of round i: the mean error of the workload diag(w)^1/2 A. Its
inverse has as many bands as that of A.

**The maximum.** Of all w, the largest such error is that of the worst round. For every w,

    max_i e_i(X) >= sum_i w_i e_i(X) >= min over X of sum_i w_i e_i(X),

so that every lower bound on the weighted mean bounds the maximum from below as well. The best w
closes the gap, as e_i is convex in X and the weights form a compact set (Sion's theorem).

**Rounds of weight zero.** Without them the workload has no inverse. They count with a small weight,
w' in the place of w, and the root of the least error is a norm of the workload: it is the largest
nuclear norm of diag(w)^1/2 A L over L L^T of sum one. So the triangle inequality bounds it from
below by that for w' less that for the weights (w'_i^1/2 - w_i^1/2)^2, which is at most the root of
the error of any matrix for those weights.
"""

import dataclasses
from typing import Any, Literal, TypeAlias

import numpy as np

from mf_aggregators.kernel import numbers
from mf_aggregators.kernel.numbers import FloatArray

# The argument ``error`` of searches.
RoundWeights: TypeAlias = Literal["mean", "max"] | FloatArray

# The least weight of a round, relative to the largest.
_LEAST_WEIGHT = 1e-8
# Raising a weight costs this at least, so that no floor is above all bounds.
_LEAST_COST = 1e-4


@dataclasses.dataclass(frozen=True, eq=False)
class RoundError:
    """An error of the rounds.

    Attributes:
      num_rounds: n.
      weights: (n,) of sum one; None for the maximum and the plain sum.
      is_maximum: Whether it is the maximum.
    """

    num_rounds: int
    weights: FloatArray | None
    is_maximum: bool

    @classmethod
    def of(cls, error: Any, num_rounds: int) -> "RoundError":
        """Returns the error that an argument stands for.

        Args:
          error: ``mean``, ``max``, or (n,) weights, none below zero and one above.
          num_rounds: n.

        Returns:
          The error; equal weights are the mean.

        Raises:
          ValueError: If it is none of these.
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
                "error must hold finite weights, none below zero and one above, found "
                f"{float(np.min(weights))} to {largest}."
            )
        if np.ptp(weights) == 0.0:
            return cls(num_rounds, None, False)
        shares = weights / largest
        return cls(num_rounds, shares / np.sum(shares), False)

    @property
    def raised(self) -> FloatArray | None:
        """(n,): the weights, none of them zero; None where there are none."""
        if self.weights is None:
            return None
        return np.asarray(np.maximum(self.weights, _LEAST_WEIGHT * np.max(self.weights)))

    @property
    def lag_weights(self) -> FloatArray:
        """(n,) w: for a Toeplitz B with coefficients b_t, the error is the sum of w_t b_t^2.

        For prefix sums, no row of such a B has a larger norm than the last.
        """
        if self.is_maximum:
            return np.ones(self.num_rounds)
        if self.weights is None:
            return 1.0 - np.arange(self.num_rounds) / self.num_rounds
        return np.asarray(np.cumsum(self.weights[::-1])[::-1])

    @property
    def is_mean(self) -> bool:
        """Whether it is the plain mean."""
        return self.weights is None and not self.is_maximum

    @property
    def has_vanishing_weights(self) -> bool:
        """Whether some weights are zero, or far below the largest."""
        raised = self.raised
        if raised is None or self.weights is None:
            return False
        return not np.array_equal(raised, self.weights)

    def of_rows(self, squared_rows: FloatArray) -> float:
        """Returns the error of rounds; the sum for the mean.

        Args:
          squared_rows: (n,) the variances of the rounds.
        """
        if self.is_maximum:
            return float(np.max(squared_rows))
        if self.weights is None:
            return float(np.sum(squared_rows))
        return float(self.weights @ squared_rows)

    def parameters(self) -> dict[str, Any]:
        """Returns the parameters of a factorization that state the error; none for the mean."""
        if self.is_maximum:
            return {"error": "max"}
        if self.weights is None:
            return {}
        return {"error": "weights", "weights": self.weights.tolist()}


def raised_to_floor(weights: FloatArray, costs: FloatArray, budget: float) -> FloatArray:
    """Returns weights of which the smallest are raised to the highest floor that may be paid for.

    Args:
      weights: (n,) above zero.
      costs: (n,) of raising each weight by one, none below zero.
      budget: What raising all of them may cost.
    """
    order = np.argsort(weights)
    ascending, costs = weights[order], np.maximum(costs[order], _LEAST_COST)
    # The floor that uses up the budget, for each number of weights that are raised to it.
    floors = (budget + np.cumsum(ascending * costs)) / np.cumsum(costs)
    raised = int(np.argmax(floors <= np.append(ascending[1:], np.inf)))
    return np.asarray(np.maximum(weights, floors[raised]))


def weighted(matrix: FloatArray, weights: FloatArray | None) -> FloatArray:
    """Returns diag(w)^1/2 A.

    Args:
      matrix: A, (n, n).
      weights: (n,) above zero; None for ones.
    """
    if weights is None:
        return matrix
    return np.asarray(matrix * np.sqrt(weights)[:, np.newaxis])


def weighted_inverse(bands: FloatArray, weights: FloatArray | None) -> FloatArray:
    """Returns the (n, w) bands of A^-1 diag(w)^-1/2.

    Args:
      bands: Those of A^-1, ``bands[i, t] = A^-1[i, i - t]``.
      weights: (n,) above zero; None for ones.
    """
    if weights is None:
        return bands
    scales, scaled = 1.0 / np.sqrt(weights), bands.copy()
    for t in range(bands.shape[1]):
        scaled[t:, t] *= scales[: len(bands) - t]
    return scaled
