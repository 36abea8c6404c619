"""Factorizations of matrices that are given as arrays."""

from typing import Any

import numpy as np

from mf_aggregators import inputs, memory
from mf_aggregators.factorizations import noise_rows
from mf_aggregators.factorizations.banded import BandedFactorization
from mf_aggregators.factorizations.optimal import DenseFactorization
from mf_aggregators.factorizations.toeplitz import ToeplitzFactorization
from mf_aggregators.kernel import numbers
from mf_aggregators.linear_algebra.banded_matrices import bands_of_matrix, lower_bands

# The largest share of the noise multiplier that errors of the computed inverse may take.
_TOLERANCE = 1e-8
# C, the identity, the rows of its inverse, and a product.
_BYTES_PER_ENTRY = 5 * 8


def from_matrix(C: Any) -> BandedFactorization | DenseFactorization:
    """Makes a factorization of any strategy matrix.

    Sensitivity and errors are computed from C. Its rows of noise are checked: if E = C N - I for
    the computed inverse N, the encoded stream is hidden by C N Z = (I + E) Z, which is at least as
    much noise as (1 - ||E||) Z. It takes O(n^3) operations.

    Args:
      C: (n, n) floats, finite, lower triangular, without a zero on the diagonal.

    Returns:
      A factorization of a float64 copy, which states no optimality gap: banded if C has fewer than
      n bands, else dense; the noise of a dense one draws all earlier rows of Z in each round.

    Raises:
      ValueError: If C is not as said, or ||E|| is above 1e-8 (Frobenius norm).

    Example:
      >>> import mf_aggregators as mfa
      >>> made = mfa.factorizations.from_matrix([[1, 0], [0.5, 1]])
      >>> round(made.sensitivity(mfa.participation.SingleParticipation()).value ** 2, 6)
      1.25
    """
    matrix = inputs.lower_triangular(C, "the strategy matrix")
    rounds = len(matrix)
    memory.check_rounds(rounds, _BYTES_PER_ENTRY * rounds, "the check of a dense matrix")
    bands = lower_bands(matrix) or rounds
    made: BandedFactorization | DenseFactorization = DenseFactorization(matrix)
    if bands < rounds:
        made = BandedFactorization(bands_of_matrix(matrix, bands))
    with np.errstate(all="ignore"):
        product = made.strategy_matrix() @ noise_rows.apply(made.noise_recursion(), np.eye(rounds))
        difference = float(np.linalg.norm(product - np.eye(rounds)))
    # Written so that NaN does not pass.
    if not difference <= _TOLERANCE:
        raise ValueError(
            "the strategy matrix is too close to singular for floats: C times its computed inverse "
            f"differs from the identity by {difference:.2g} (Frobenius norm), and at most "
            f"{_TOLERANCE:g} is allowed."
        )
    return made


def from_bands(bands: Any) -> BandedFactorization:
    """Makes a factorization of any banded strategy matrix, without an (n, n) array.

    Args:
      bands: (n, b) floats, finite, with ``bands[i, t] = C[i, i - t]``, zero where i < t, and no
        zero on the diagonal ``bands[:, 0]``.

    Returns:
      A factorization of a float64 copy, which states no optimality gap.

    Raises:
      ValueError: If the bands are not as said, or the inverse of C is too large for floats.
    """
    made = BandedFactorization(bands)
    with np.errstate(all="ignore"):
        is_invertible = np.all(np.isfinite(made.squared_decoder_rows(made.num_rounds)))
    if not is_invertible:
        raise ValueError("the inverse of the strategy matrix is too large for floats.")
    return made


def from_coefficients(c: Any) -> ToeplitzFactorization:
    """Makes a factorization of any lower-triangular Toeplitz strategy matrix.

    Args:
      c: (n,) floats, finite: the first column of C, whose first entry is not zero. Zeros at its end
        are no bands.

    Returns:
      A factorization for n rounds of a float64 copy, which states no optimality gap.

    Raises:
      ValueError: If the coefficients are not as said, or C or its inverse is too large or too small
        for floats.
    """
    column = numbers.real_array(c, "coefficients")
    if column.ndim == 1 and np.any(column):
        return ToeplitzFactorization(len(column), np.trim_zeros(column, "b"))
    return ToeplitzFactorization(max(1, column.size), column)
