"""Computes the optimal factorization by the methods of the papers that introduced it.

Denisov et al. App. E.4 compares three methods by their loss over time. Their problem is Eq. 4:
minimise tr(A^T A X^-1) over positive definite X with diagonal one. All start from X(v) of Eq. 6 at
v = 1, its diagonal scaled to one. McMahan, Rush and Thakurta (Eq. 12, footnote 3; Denisov et al.,
Thm 3.2) iterate phi for prefix sums, in O(n) memory.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator

import numpy as np
import scipy.linalg

# Armijo's rule: a step is accepted if the loss falls by at least this share of the fall that the
# slope predicts.
_SUFFICIENT = 0.1
_SHORTER = 0.5
_MOST_HALVINGS = 40
# The most steps, and the tolerance, of conjugate gradients in the search for each Newton direction.
_MOST_DIRECTION_STEPS = 5
_DIRECTION_TOLERANCE = 1e-4
# The iteration ends when phi changes the vector by less than this, relative to its norm (McMahan et
# al., footnote 3).
_CHANGE_TOLERANCE = 1e-5
# Step and margin of the trapezoidal rule for the integral of x^(-1/2), in the logarithm of the
# shift. The rule's error is of the order exp(-pi^2 / step) and exp(-margin), relative to x^(-1/2).
_SHIFT_STEP = 0.3
_SHIFT_MARGIN = 32.0


@dataclasses.dataclass(frozen=True, eq=False)
class Course:
    """Course of one method's search: the loss after each step, and its time.

    Attributes:
      seconds: (steps + 1,) float64, since its start.
      losses: (steps + 1,) float64: tr(A^T A X^-1) of the best feasible X so far.
    """

    seconds: np.ndarray
    losses: np.ndarray

    def seconds_until(self, loss: float) -> float:
        """Returns the seconds until the method reached a loss; infinity if it did not."""
        reached = np.flatnonzero(self.losses <= loss)
        return float(self.seconds[reached[0]]) if len(reached) else float("inf")


def run(
    workload: np.ndarray, method: str, target: float, most_seconds: float, most_steps: int = 10_000
) -> Course:
    """Runs one method of search for the optimal factorization.

    Args:
      workload: A, (n, n) float64 lower triangular of full rank.
      method: ``fixed point`` (iterates of phi, Thm 3.2), ``gradient descent`` or ``Newton
        direction`` (directions by conjugate gradients), both with an Armijo search.
      target: The loss at which it ends.
      most_seconds: The time after which it ends, at the end of a step.
      most_steps: The steps after which it ends.

    Returns:
      The course of the search.
    """
    gram = workload.T @ workload
    steps = _METHODS[method](gram)
    start = time.perf_counter()
    seconds: list[float] = []
    losses: list[float] = []
    for loss in steps:
        seconds.append(time.perf_counter() - start)
        losses.append(min(loss, losses[-1]) if losses else loss)
        if losses[-1] <= target or seconds[-1] > most_seconds or len(losses) > most_steps:
            break
    return Course(np.array(seconds), np.array(losses))


def _fixed_point(gram: np.ndarray) -> Iterator[float]:
    v = np.ones(len(gram))
    while True:
        eigenvalues, vectors = _eigenpairs(gram, v)
        phi = np.square(vectors) @ np.sqrt(eigenvalues)
        # X(v) = V^-1/2 T V^-1/2 has the diagonal phi / v; it is scaled so that its diagonal is one.
        half = vectors / eigenvalues**0.25 * np.sqrt(phi)[:, np.newaxis]
        yield float(np.sum(gram * (half @ half.T)))
        v = phi


def _eigenpairs(gram: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the eigenpairs of V^1/2 A^T A V^1/2; its square root T has the diagonal phi(v)."""
    root_v = np.sqrt(v)
    eigenvalues, vectors = np.linalg.eigh(gram * root_v * root_v[:, np.newaxis])
    return np.maximum(eigenvalues, np.finfo(np.float64).eps * eigenvalues[-1]), vectors


def _start(gram: np.ndarray) -> np.ndarray:
    eigenvalues, vectors = _eigenpairs(gram, np.ones(len(gram)))
    half = vectors * eigenvalues**0.25
    root = half @ half.T
    scale = 1.0 / np.sqrt(np.diagonal(root))
    matrix: np.ndarray = root * scale * scale[:, np.newaxis]
    return matrix


def _inverse(x: np.ndarray) -> np.ndarray | None:
    """Returns the inverse of X, or None if X is not positive definite."""
    factor, failed = scipy.linalg.lapack.dpotrf(x, lower=1)
    if failed:
        return None
    inverse, failed = scipy.linalg.lapack.dpotri(factor, lower=1)
    if failed:
        return None
    lower = np.tril(inverse)
    symmetric: np.ndarray = lower + np.tril(lower, -1).T
    return symmetric


def _descend(
    gram: np.ndarray, direction_of: Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]
) -> Iterator[float]:
    """Minimises the loss along directions with zero diagonals, which keep X's diagonal."""
    x = _start(gram)
    inverse = _inverse(x)
    assert inverse is not None
    loss = float(np.sum(gram * inverse))
    yield loss
    step = 1.0
    while True:
        middle = inverse @ gram @ inverse
        slope = _without_diagonal(-middle)
        direction = direction_of(slope, inverse, middle)
        promised = float(np.sum(slope * direction))
        # Begin with twice the last accepted step, so that it need not be halved many times in each
        # search.
        step = min(1.0, 2.0 * step) if direction_of is _newton else 2.0 * step
        for _ in range(_MOST_HALVINGS):
            candidate = x + step * direction
            new_inverse = _inverse(candidate)
            if new_inverse is not None:
                new_loss = float(np.sum(gram * new_inverse))
                if new_loss <= loss + _SUFFICIENT * step * promised:
                    break
            step *= _SHORTER
        else:
            return
        x, inverse, loss = candidate, new_inverse, new_loss
        yield loss


def _newton(slope: np.ndarray, inverse: np.ndarray, middle: np.ndarray) -> np.ndarray:
    """Returns an approximate Newton direction, by a few conjugate-gradient steps.

    They solve H[D] = -slope for D of zero diagonal, with H[D] = X^-1 D M + M D X^-1.
    """
    direction = np.zeros_like(slope)
    residual = -slope
    search = residual
    squared = first = float(np.sum(np.square(residual)))
    for _ in range(_MOST_DIRECTION_STEPS):
        product = inverse @ search @ middle
        product = _without_diagonal(product + product.T)
        length = squared / float(np.sum(search * product))
        direction = direction + length * search
        residual = residual - length * product
        remaining = float(np.sum(np.square(residual)))
        if remaining <= _DIRECTION_TOLERANCE**2 * first:
            break
        search = residual + remaining / squared * search
        squared = remaining
    return direction


def _without_diagonal(matrix: np.ndarray) -> np.ndarray:
    matrix = matrix.copy()
    np.fill_diagonal(matrix, 0.0)
    return matrix


_METHODS: dict[str, Callable[[np.ndarray], Iterator[float]]] = {
    "fixed point": _fixed_point,
    "Newton direction": functools.partial(_descend, direction_of=_newton),
    "gradient descent": functools.partial(_descend, direction_of=lambda slope, *_: -slope),
}
METHODS = tuple(_METHODS)


@dataclasses.dataclass(frozen=True, eq=False)
class Iterates:
    """The iterates of the fixed-point iteration v = phi(v), with errors and changes.

    Attributes:
      total_errors: (steps,) float64: the total error of X(v) at sensitivity 1, which is the
        largest column norm of C, for each iterate v.
      changes: (steps,) float64: |phi(v) - v| / |v|.
    """

    total_errors: np.ndarray
    changes: np.ndarray

    def first_with(self, total_error: float) -> int | None:
        """Returns the first step with at most this total error; None if there is none."""
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
    while not changes or changes[-1] >= _CHANGE_TOLERANCE:
        image = phi(v)
        # The total error follows from phi: tr(A^T A X(v)^-1) is the sum of phi(v), and X(v) has the
        # diagonal phi(v) / v.
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
    # Bounds on the eigenvalues of T: the largest by Gershgorin's theorem, the least by the trace of
    # T^-1 = V^1/2 A^T A V^1/2.
    largest = 4.0 / np.min(v)
    least = 1.0 / float(np.sum(v * np.arange(len(v), 0, -1.0)))
    logarithms = np.arange(
        0.5 * np.log(least) - _SHIFT_MARGIN,
        0.5 * np.log(largest) + _SHIFT_MARGIN + _SHIFT_STEP,
        _SHIFT_STEP,
    )
    shifts = np.exp(2.0 * logarithms)
    weights = 2.0 / np.pi * _SHIFT_STEP * np.exp(logarithms)
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
