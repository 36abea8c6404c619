"""Solutions of many small positive definite systems at once.

LAPACK takes one matrix at a time, and most of the time of a small one is that of the call. Here
each step of the factorization is one of all matrices.
"""

import numpy as np


def solve(matrices: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Solves one symmetric positive definite system for each of a stack of matrices.

    Args:
      matrices: (n, k, k) float64; only the lower triangles are read.
      columns: (n, k) float64.

    Returns:
      (n, k): x[i] with ``matrices[i] @ x[i] = columns[i]``.

    Raises:
      LinAlgError: If a matrix is not positive definite.
    """
    # The stack is the last axis, along which all operations run.
    lower = np.array(np.moveaxis(matrices, 0, -1), order="C")
    solution = np.array(columns.T, order="C")
    size = len(solution)
    for j in range(size):
        row = lower[j, :j]
        pivot = lower[j, j] - np.einsum("pn,pn->n", row, row)
        if not np.all(pivot > 0.0):
            raise np.linalg.LinAlgError("a matrix of the stack is not positive definite.")
        root = np.sqrt(pivot)
        lower[j, j] = root
        below = slice(j + 1, size)
        lower[below, j] -= np.einsum("ipn,pn->in", lower[below, :j], row)
        lower[below, j] /= root
        solution[j] = (solution[j] - np.einsum("pn,pn->n", row, solution[:j])) / root
    for j in reversed(range(size)):
        below = slice(j + 1, size)
        known = np.einsum("pn,pn->n", lower[below, j], solution[below])
        solution[j] = (solution[j] - known) / lower[j, j]
    return solution.T
