"""Nuclear norms of matrices."""

import numpy as np
import scipy.linalg

from mf_aggregators.kernel.numbers import FloatArray


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
