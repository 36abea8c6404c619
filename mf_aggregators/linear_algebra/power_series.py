"""Lower-triangular Toeplitz matrices as power series.

The (n, n) lower-triangular Toeplitz matrix with first column c is multiplication by
c(x) = sum_t c_t x^t modulo x^n: products of matrices are products of series, and the
inverse matrix is the reciprocal series. Everything here needs O(n) memory.
"""

import numpy as np
import scipy.fft
import scipy.signal

from mf_aggregators.kernel.numbers import FloatArray

# Above this length, fast Fourier transforms beat the recursion for reciprocals.
_LONGEST_RECURSION = 4096


def square_root_coefficients(
    num_coefficients: int, momentum: float = 0.0, *, inverse: bool = False
) -> FloatArray:
    """Returns the coefficients of ((1 - x) (1 - beta x))^(-1/2): 1, 1/2, 3/8, ... for beta 0.

    The Toeplitz matrix C with these is the square root of the prefix sum, C C = A
    (Fichtenberger, Henzinger and Upadhyay; Henzinger, Upadhyay and Upadhyay), and of
    momentum SGD's workload with constant learning rates (Kalinin and Lampert).

    Args:
      num_coefficients: How many, at least 1.
      momentum: beta, at least 0 and below 1.
      inverse: Whether they are those of the reciprocal: 1, -1/2, -1/8, ... for beta 0.

    Returns:
      (num_coefficients,) float64.
    """
    lags = np.arange(1, num_coefficients)
    factors = (2.0 * lags - (3.0 if inverse else 1.0)) / (2.0 * lags)
    series = np.concatenate([[1.0], np.cumprod(factors)])
    return _times_itself_at(series, momentum)


def _times_itself_at(series: FloatArray, momentum: float) -> FloatArray:
    """The series times itself at beta x."""
    if momentum == 0.0:
        return series
    return product(series, series * momentum ** np.arange(len(series)), len(series))


def product(left: FloatArray, right: FloatArray, length: int) -> FloatArray:
    """Returns the first ``length`` coefficients of a product, zero where there are fewer."""
    left, right = left[:length], right[:length]
    if min(len(left), len(right)) <= 32:
        full = np.convolve(left, right)
    else:
        size = scipy.fft.next_fast_len(len(left) + len(right) - 1, real=True)
        spectrum = scipy.fft.rfft(left, size, workers=-1) * scipy.fft.rfft(right, size, workers=-1)
        full = scipy.fft.irfft(spectrum, size, workers=-1)[: len(left) + len(right) - 1]
    return padded(full, length)


def correlation(values: FloatArray, series: FloatArray, length: int) -> FloatArray:
    """Returns sum_t values[t] series[t - j] for j below ``length``: the adjoint of a product."""
    count = len(values)
    return product(values[::-1], series, count)[::-1][:length]


def reciprocal(series: FloatArray, length: int) -> FloatArray:
    """Returns the first ``length`` coefficients of 1 / c(x).

    Args:
      series: c, with c_0 not zero.
      length: How many coefficients.

    Returns:
      (length,) float64.
    """
    if length <= _LONGEST_RECURSION:
        impulse = np.zeros(length)
        impulse[0] = 1.0
        return np.asarray(scipy.signal.lfilter([1.0], series[:length], impulse))
    # Newton's iteration y <- y (2 - c y) doubles the number of right coefficients.
    inverse = reciprocal(series, _LONGEST_RECURSION)
    while len(inverse) < length:
        count = min(2 * len(inverse), length)
        residual = product(series, inverse, count)
        residual[0] -= 1.0
        inverse = padded(inverse, count) - product(inverse, residual, count)
    return inverse


def padded(series: FloatArray, length: int) -> FloatArray:
    """Returns the series cut or filled with zeros to ``length`` coefficients."""
    if len(series) >= length:
        return series[:length].copy()
    return np.concatenate([series, np.zeros(length - len(series))])
