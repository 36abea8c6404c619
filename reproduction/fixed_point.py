"""The optimum of prefix sums as its papers computed it: iterates of phi, and where they end.

McMahan, Rush and Thakurta, Eq. 12 and footnote 3; Denisov et al., Thm 3.2.
"""

import dataclasses

import numpy as np

# McMahan et al., footnote 3: iterates end where phi changes them by less, relative to their norm.
_TOLERANCE = 1e-5
# Step and margin of the trapezoidal rule for x^(-1/2), in the logarithm of the shift: its error is
# of the order exp(-pi^2 / step) and exp(-margin), relative to x^(-1/2).
_STEP = 0.3
_MARGIN = 32.0


@dataclasses.dataclass(frozen=True, eq=False)
class Iterates:
    """What iterating phi came by.

    Attributes:
      total_errors: (steps,) float64: the total error of X(v) at sensitivity 1, which is the
        largest column norm of C, for each iterate v.
      changes: (steps,) float64: |phi(v) - v| / |v|.
    """

    total_errors: np.ndarray
    changes: np.ndarray

    def first_with(self, total_error: float) -> int | None:
        """Returns the first step whose error is at most that; None if there is none."""
        reached = np.flatnonzero(self.total_errors <= total_error)
        return int(reached[0]) if len(reached) else None


def iterate(num_rounds: int, seed: int = 0) -> Iterates:
    """Iterates phi for prefix sums by the paper's rule, from a random vector.

    Args:
      num_rounds: n.
      seed: Seed for the vector that the iteration starts from, uniform on (0, 1).

    Returns:
      All iterates, of which the last is the first that phi changes by less than 1e-5.
    """
    v = np.random.default_rng(seed).uniform(size=num_rounds)
    errors: list[float] = []
    changes: list[float] = []
    while not changes or changes[-1] >= _TOLERANCE:
        image = phi(v)
        # tr(A^T A X(v)^-1) is the sum of phi, and X(v) has the diagonal phi / v.
        errors.append(float(np.sqrt(np.sum(image) * np.max(image / v))))
        changes.append(float(np.linalg.norm(image - v) / np.linalg.norm(v)))
        v = image
    return Iterates(np.array(errors), np.array(changes))


def phi(v: np.ndarray) -> np.ndarray:
    """Evaluates phi, the diagonal of (V^1/2 A^T A V^1/2)^1/2, for the prefix-sum workload A.

    A^T A has a tridiagonal inverse, so that this is the diagonal of T^(-1/2) for a tridiagonal
    T, and x^(-1/2) = 2/pi times the integral over all t > 0 of 1 / (x + t^2): a sum of inverses
    of shifted tridiagonal matrices, whose diagonals take O(n) each.

    Args:
      v: (n,) float64, positive.

    Returns:
      phi(v), (n,) float64.
    """
    diagonal = np.full(len(v), 2.0)
    diagonal[0] = 1.0
    diagonal /= v
    squared = 1.0 / (v[1:] * v[:-1])
    # Gershgorin, and the trace of T^-1 = V^1/2 A^T A V^1/2.
    largest = 4.0 / np.min(v)
    least = 1.0 / float(np.sum(v * np.arange(len(v), 0, -1.0)))
    logarithms = np.arange(
        0.5 * np.log(least) - _MARGIN, 0.5 * np.log(largest) + _MARGIN + _STEP, _STEP
    )
    shifts = np.exp(2.0 * logarithms)
    weights = 2.0 / np.pi * _STEP * np.exp(logarithms)
    forward = np.empty((len(v), len(shifts)))
    backward = np.empty_like(forward)
    forward[0] = diagonal[0] + shifts
    backward[-1] = diagonal[-1] + shifts
    for row in range(1, len(v)):
        forward[row] = diagonal[row] + shifts - squared[row - 1] / forward[row - 1]
        opposite = len(v) - 1 - row
        backward[opposite] = (
            diagonal[opposite] + shifts - squared[opposite] / backward[opposite + 1]
        )
    inverses = 1.0 / (forward + backward - (diagonal[:, np.newaxis] + shifts))
    found: np.ndarray = inverses @ weights
    return found
