"""BLT factorizations with given weights of their buffers."""

from typing import Any

import numpy as np
import scipy.linalg

from mf_aggregators.factorizations import BltFactorization


def blt_of_scales(num_rounds: int, buffer_decays: Any, output_scales: Any) -> BltFactorization:
    """Returns the factorization with c_t = sum_m output_scales[m] buffer_decays[m]^(t-1).

    Args:
      num_rounds: n.
      buffer_decays: (m,) different decays in [0, 1).
      output_scales: (m,) positive weights of sum at most one.

    Returns:
      The factorization; the decays of C^-1 are the eigenvalues of diag(d) - sqrt(w) sqrt(w)^T.
    """
    decays, scales = np.asarray(buffer_decays, float), np.asarray(output_scales, float)
    order = np.argsort(-decays)
    decays, roots = decays[order], np.sqrt(scales[order])
    inverse = scipy.linalg.eigvalsh(np.diag(decays) - np.outer(roots, roots))[::-1]
    return BltFactorization(num_rounds, decays, inverse)
