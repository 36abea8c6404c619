"""From a Gram matrix X to the lower-triangular C with C^T C = X."""

import numpy as np
import scipy.linalg


def lower_triangular_factor(gram_matrix: np.ndarray) -> np.ndarray:
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
