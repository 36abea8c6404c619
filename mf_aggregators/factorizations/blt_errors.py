"""The error of a BLT factorization of the prefix sum in closed form, with its gradient.

With decays d of C and e of C^-1 that interlace, in distances y = 1 - d and z = 1 - e,

* c_0 = 1 and c_t = sum_m w_m d_m^(t-1), w_m = prod_j (z_j - y_m) / prod_{j != m} (y_j - y_m),
* b_t, the running sum of C^-1's coefficients, is beta + sum_m g_m e_m^t, with
  beta = prod_m y_m / z_m and g_m = -w'_m / z_m for the weights w' of C^-1,

where all w, g and beta are positive. The sensitivity sums c_t over a pattern 0, b, 2 b, ...:
a sum of powers within each stretch of b rounds. Sums of squares of such sums are geometric
series in products of decays, so that the error costs the number of stretches and not of
rounds, and nothing cancels.
"""

import numpy as np

from mf_aggregators.factorizations.toeplitz_errors import ErrorMeasure, PatternOfRounds

# An imaginary step of a complex-step derivative: exact to rounding, however small.
_STEP = 1e-100
# Stretches times the 2 m variables, above which closed forms would take much memory.
LARGEST = 1 << 22
# Below this exponent a weighted geometric series is summed by its Taylor series.
_SMALL_EXPONENT = 1e-4


def log_squared_error(
    distances: np.ndarray, pattern: PatternOfRounds, error: ErrorMeasure
) -> tuple[float, np.ndarray]:
    """Returns the logarithm of sens(C)^2 times the squared error, and its gradient.

    Args:
      distances: (2 m,) increasing distances y_1, z_1, y_2, z_2, ..., all above 0 and below 1.
      pattern: The pattern that gives the sensitivity.
      error: Which squared error: ``mean`` over rounds, or ``max``.

    Returns:
      The value and a (2 m,) gradient.
    """
    count = len(distances)
    perturbed = distances + 1j * _STEP * np.eye(count)
    ours, inverse = perturbed[:, 0::2], perturbed[:, 1::2]
    squared_sensitivity = _squared_sensitivity(ours, _weights(ours, inverse), pattern)
    squared_rows = _squared_rows(ours, inverse, pattern.num_rounds, error)
    logs = np.log(squared_sensitivity.real) + np.log(squared_rows.real)
    gradient = squared_sensitivity.imag / squared_sensitivity.real
    gradient += squared_rows.imag / squared_rows.real
    return float(logs[0]), gradient / _STEP


def _weights(poles: np.ndarray, zeros: np.ndarray) -> np.ndarray:
    """(p, m) weights of the decays 1 - poles, from (p, m) distances."""
    ratios = zeros[:, np.newaxis, :] - poles[:, :, np.newaxis]
    between = poles[:, np.newaxis, :] - poles[:, :, np.newaxis]
    diagonal = np.arange(poles.shape[1])
    between[:, diagonal, diagonal] = 1.0
    return np.prod(ratios / between, axis=2)


def _squared_sensitivity(
    distances: np.ndarray, weights: np.ndarray, pattern: PatternOfRounds
) -> np.ndarray:
    """(p,) squared norms of the pattern's columns, summed, for (p, m) decays of C."""
    separation, most = pattern.separation, pattern.most
    starts = np.arange(0, pattern.num_rounds, separation)
    stretch = np.arange(len(starts))
    lengths = np.minimum(separation, pattern.num_rounds - starts)
    logs = _log1p(-distances)[:, :, np.newaxis]
    weighted = weights[:, :, np.newaxis]

    def powers(first: np.ndarray, last: np.ndarray, shift: int) -> np.ndarray:
        """The sums of d^(i b + shift) over i from first to last, (p, m, stretches)."""
        series = _geometric(separation * logs, last - first + 1)
        return np.exp((first * separation + shift) * logs) * series

    # In stretch r, lags are (r - j) b + o for up to k participations j, offset o < b.
    earliest = np.maximum(0, stretch - most + 1)
    # At offset 0 the lag 0 of a participation in this round has coefficient one.
    at_start = np.sum(weighted * powers(np.maximum(earliest, 1), stretch, -1), axis=1)
    at_start = at_start + (stretch < most)
    amplitudes = weighted * powers(earliest, stretch, 0)
    total = np.sum(np.square(at_start), axis=1)
    decays = logs[:, :, 0]
    for m in range(distances.shape[1]):
        for other in range(m, distances.shape[1]):
            series = _geometric((decays[:, m] + decays[:, other])[:, np.newaxis], lengths - 1)
            products = amplitudes[:, m] * amplitudes[:, other] * series
            total = total + (1.0 if m == other else 2.0) * np.sum(products, axis=1)
    return np.asarray(total)


def _squared_rows(
    ours: np.ndarray, inverse: np.ndarray, num_rounds: int, error: ErrorMeasure
) -> np.ndarray:
    """(p,) weighted sums of b_t^2 over rounds."""
    constant = np.prod(ours / inverse, axis=1)[:, np.newaxis]
    amplitudes = np.concatenate([constant, -_weights(inverse, ours) / inverse], axis=1)
    logs = np.concatenate([np.zeros_like(constant), _log1p(-inverse)], axis=1)
    pairs = logs[:, :, np.newaxis] + logs[:, np.newaxis]
    if error == "max":
        series = _geometric(pairs, np.asarray(num_rounds))
    else:
        series = _weighted_geometric(pairs, num_rounds)
    return np.einsum("pi,pij,pj->p", amplitudes, series, amplitudes)


def _geometric(logs: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The sums of exp(t log) over t from 0 to counts - 1; logs are zero or negative."""
    safe = np.where(logs == 0.0, -1.0, logs)
    return np.where(logs == 0.0, counts, _expm1(counts * safe) / _expm1(safe))


def _weighted_geometric(logs: np.ndarray, num_rounds: int) -> np.ndarray:
    """The sums of (1 - t / n) exp(t log) over t from 0 to n - 1."""
    n = float(num_rounds)
    small = np.abs(logs.real) * n < _SMALL_EXPONENT
    safe = np.where(small, -1.0, logs)
    series = _expm1(n * safe) / _expm1(safe)
    # (n - q S) / (n (1 - q)) for q = exp(log) and S = (1 - q^n) / (1 - q).
    closed = (n - np.exp(safe) * series) / (-n * _expm1(safe))
    moments = [(n + 1.0) / 2.0, (n - 1.0) * (n + 1.0) / 6.0, (n - 1.0) * n * (n + 1.0) / 12.0]
    taylor = moments[0] + logs * moments[1] + np.square(logs) * moments[2] / 2.0
    return np.where(small, taylor, closed)


# NumPy's complex log1p and expm1 lose the digits that these keep; imaginary parts are
# infinitesimal here.
def _log1p(z: np.ndarray) -> np.ndarray:
    return np.log1p(z.real) + 1j * z.imag / (1.0 + z.real)


def _expm1(z: np.ndarray) -> np.ndarray:
    return np.expm1(z.real) + 1j * np.exp(z.real) * z.imag
