"""Roots of matrices: triangular factors, nuclear norms, and H^-1/2 of a block tridiagonal H.

For H^-1/2, or its diagonal blocks, the integral x^-1/2 = (2 / pi) int_0^inf dt / (x + t^2) is
summed by the trapezoidal rule, after a change of variables that makes it converge fastest between
two bounds on x (Hale, Higham and Trefethen, *Computing A^alpha, log(A), and related matrix
functions by contour integrals*, 2008, method 3): x^-1/2 is sum_j weights[j] / (x + shifts[j]) to
within a relative error that falls exponentially with the number of shifts, of which 44 suffice for
13 digits and a condition number of 1e10. Each (H + shift I)^-1 takes one elimination from the first
block to the last one, and one way back.
"""

import numpy as np
import scipy.linalg
import scipy.special

from mf_aggregators.kernel.numbers import FloatArray

# Steps and limits of the number of shifts, and the points at which errors are measured.
_MORE_SHIFTS = 4
_MOST_SHIFTS = 100
_LARGEST_CONDITION = 1e15
_POINTS = 400
_RELATIVE_ERROR = 1e-13
# Elliptic functions as sums of hyperbolic ones: further images are below rounding.
_IMAGES = np.arange(-16, 17)


def lower_triangular_factor(gram_matrix: FloatArray) -> FloatArray:
    """Returns the lower-triangular C with C^T C = X and a positive diagonal.

    A Cholesky factor L of X satisfies L L^T = X, which is the wrong side. With J the
    matrix that reverses the order of rounds, J X J = L L^T gives C = J L^T J: lower
    triangular, and C^T C = J L L^T J = X. Where X is b-banded so is L, and with it C
    (BandMF Prop. 4.1).

    Args:
      gram_matrix: X, an (n, n) symmetric positive definite array.

    Returns:
      C, an (n, n) float64 array.

    Raises:
      np.linalg.LinAlgError: If X is not positive definite.
    """
    factor = scipy.linalg.cholesky(gram_matrix[::-1, ::-1], lower=True, check_finite=False)
    return np.ascontiguousarray(factor.T[::-1, ::-1])


def nuclear_norm_from_below(matrix: FloatArray) -> float:
    """Returns a lower bound on the sum of singular values, in spite of rounding.

    A computed singular value is within about max(m, n) eps of the largest one from the true one.
    Roots of computed eigenvalues of the Gram matrix would be off by the root of that:
    for the prefix sum at n = 4096, by 3e-6 of the sum.

    Args:
      matrix: (m, n) float64.

    Returns:
      A lower bound on the nuclear norm.
    """
    values = scipy.linalg.svdvals(matrix, check_finite=False)
    rounding = max(matrix.shape) * np.finfo(np.float64).eps * values[0]
    return float(np.sum(np.maximum(values - rounding, 0.0)))


def _inverse_square_root(least: float, largest: float) -> tuple[FloatArray, FloatArray]:
    """Shifts and weights, (m,) above zero, of x^-1/2 as the sum of weights[j] / (x + shifts[j]).

    It has the fewest terms whose relative error is at most 1e-13 for x between two bounds; near the
    limit of the condition number, 1e15, rounding may leave 1e-12.

    Raises:
      ValueError: If the bounds are not positive, or too far apart.
    """
    if not (0.0 < least <= largest < np.inf and largest <= _LARGEST_CONDITION * least):
        raise ValueError(
            "the bounds must be positive, finite and by at most a factor of "
            f"{_LARGEST_CONDITION:g} apart, found {least} and {largest}."
        )
    # Equal bounds would make the period infinite.
    ratio = min(least / largest, 0.5)
    points = np.geomspace(least, largest, _POINTS)
    quarter, dual_quarter = scipy.special.ellipkm1(ratio), scipy.special.ellipk(ratio)
    scale = np.pi / (2.0 * dual_quarter)
    for count in range(_MORE_SHIFTS, _MOST_SHIFTS + 1, _MORE_SHIFTS):
        u = (np.arange(count) + 0.5) * quarter / count
        terms = scale / np.cosh(scale * (u[:, np.newaxis] - 2.0 * quarter * _IMAGES))
        # Jacobi's functions of parameter 1 - ratio, which the series by the nome is slow for.
        dn = np.sum(terms, axis=1)
        cn = np.sum(terms * (-1.0) ** _IMAGES, axis=1) / np.sqrt(1.0 - ratio)
        shifts = least * (1.0 / cn**2 - 1.0)
        weights = 2.0 * quarter * np.sqrt(least) / (np.pi * count) * dn / cn**2
        found = np.sum(weights / (points[:, np.newaxis] + shifts), axis=1)
        if np.max(np.abs(found * np.sqrt(points) - 1.0)) <= _RELATIVE_ERROR:
            break
    return shifts, weights


def _eliminated(
    diagonal: FloatArray, above: FloatArray, least: float
) -> tuple[FloatArray, FloatArray]:
    """Weights of shifts, and (B, m, s, s) inverses of the Schur complements of H + shift I."""
    shifts, weights = _inverse_square_root(least, max(largest_row_sum(diagonal, above), least))
    shifted = shifts[:, np.newaxis, np.newaxis] * np.eye(diagonal.shape[1])
    inverses = np.empty((len(diagonal), *shifted.shape))
    inverses[0] = np.linalg.inv(diagonal[0] + shifted)
    for k in range(1, len(diagonal)):
        carried = above[k - 1].T @ (inverses[k - 1] @ above[k - 1])
        inverses[k] = np.linalg.inv(diagonal[k] + shifted - carried)
    return weights, inverses


def inverse_root_blocks(diagonal: FloatArray, above: FloatArray, least: float) -> FloatArray:
    """Returns the diagonal blocks of H^-1/2.

    Args:
      diagonal: (B, s, s) diagonal blocks of H, symmetric and positive definite.
      above: (B - 1, s, s) blocks to their right.
      least: A lower bound, above zero, on the eigenvalues of H.

    Returns:
      (B, s, s).

    Raises:
      ValueError: If ``least`` is not positive, or H too ill-conditioned.
    """
    weights, inverses = _eliminated(diagonal, above, least)
    blocks, found = np.empty_like(diagonal), inverses[-1]
    blocks[-1] = np.tensordot(weights, found, 1)
    for k in range(len(diagonal) - 2, -1, -1):
        back = inverses[k] @ above[k]
        found = inverses[k] + back @ found @ back.transpose(0, 2, 1)
        blocks[k] = np.tensordot(weights, found, 1)
    return blocks


def inverse_root(diagonal: FloatArray, above: FloatArray, least: float) -> FloatArray:
    """Returns all of H^-1/2, in O(s (B s)^2) operations for each shift.

    Args:
      diagonal: As :func:`inverse_root_blocks` takes it.
      above: The same.
      least: The same.

    Returns:
      (B s, B s), symmetric.

    Raises:
      ValueError: As there.
    """
    weights, inverses = _eliminated(diagonal, above, least)
    size = diagonal.shape[1]
    root = np.empty((len(diagonal) * size,) * 2)
    # Rows of the inverses from the diagonal on, of one block after another from the last one up.
    rows = inverses[-1]
    for k in range(len(diagonal) - 1, -1, -1):
        here = slice(k * size, (k + 1) * size)
        if k + 1 < len(diagonal):
            back = inverses[k] @ above[k]
            after = -(back @ rows)
            own = inverses[k] - after[:, :, :size] @ back.transpose(0, 2, 1)
            rows = np.concatenate([own, after], axis=2)
        root[here, k * size :] = np.tensordot(weights, rows, 1)
        root[k * size :, here] = root[here, k * size :].T
    return root


def largest_row_sum(diagonal: FloatArray, above: FloatArray) -> float:
    """Returns the largest sum of magnitudes of a row of H, which no eigenvalue exceeds.

    Args:
      diagonal: (B, s, s) diagonal blocks of H.
      above: (B - 1, s, s) blocks to their right.
    """
    sums = np.sum(np.abs(diagonal), axis=2)
    sums[:-1] += np.sum(np.abs(above), axis=2)
    sums[1:] += np.sum(np.abs(above), axis=1)
    return float(np.max(sums))
