"""The error of a Toeplitz factorization of the prefix sum as a function of its coefficients.

For the prefix sum A, row i of B = A C^-1 has the squared norm b_0^2 + ... + b_i^2, where
b is the running sum of the coefficients of C^-1. So, at noise multiplier 1,

* the mean squared error is sens(C)^2 sum_t (1 - t / n) b_t^2,
* the maximal squared error, that of the last round, is sens(C)^2 sum_t b_t^2,

and with non-increasing coefficients, or no more bands than the separation, sens(C) is
the norm of the columns 0, b, 2 b, ... summed (``sensitivity.from_toeplitz_coefficients``),
respectively of their norms.
"""

import dataclasses
from typing import Literal

import numpy as np

from mf_aggregators import participation as participations
from mf_aggregators import power_series, validation
from mf_aggregators import sensitivity as sensitivities
from mf_aggregators.participation import Participation, SingleParticipation

ErrorMeasure = Literal["mean", "max"]


def check_measure(error: str) -> ErrorMeasure:
    """Returns ``error``, or raises ValueError unless it is ``mean`` or ``max``."""
    if error not in ("mean", "max"):
        raise ValueError(f"error must be 'mean' or 'max', found {error!r}.")
    return "mean" if error == "mean" else "max"


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
        if most == 1 or isinstance(participation, SingleParticipation):
            return cls(num_rounds, num_rounds, 1)
        return cls(num_rounds, participation.separation, most)

    def squared_sensitivity(self, column: np.ndarray) -> tuple[float, np.ndarray]:
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

    def sum_of_squared_norms(self, column: np.ndarray) -> tuple[float, np.ndarray]:
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


def error_weights(num_rounds: int, error: ErrorMeasure) -> np.ndarray:
    """Returns (n,) weights w with the squared error sens^2 sum_t w_t b_t^2."""
    if error == "max":
        return np.ones(num_rounds)
    return 1.0 - np.arange(num_rounds) / num_rounds


def squared_rows_by_strategy(
    coefficients: np.ndarray, weights: np.ndarray
) -> tuple[float, np.ndarray]:
    """Returns sum_t w_t b_t^2 and its gradient by the coefficients of C.

    Args:
      coefficients: (m,) the first entries of C's first column; zeros follow.
      weights: (n,) as :func:`error_weights` returns them.

    Returns:
      The value and an (m,) gradient.
    """
    num_rounds = len(weights)
    inverse = power_series.reciprocal(coefficients, num_rounds)
    decoder = np.cumsum(inverse)
    slope = 2.0 * weights * decoder
    # b(x) = 1 / ((1 - x) c(x)), so a change of c_j changes b by -x^j b(x) / c(x).
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
