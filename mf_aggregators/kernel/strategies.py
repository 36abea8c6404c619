"""Strategy matrices C of the rows that are drawn: Y = C^-1 Z, computed from the rows alone.

Every kind of rows gives C as data, with a bound on its errors:

* **Bands**: C is what the rows are defined by. Column scales take a few roundings.
* **State spaces**: C Y = Z is a state space with the same state vectors, which follow from Y alone:
  ``Z[i] = (Y[i] - outputs . S) / gains``. Each state vector is a product of decays and one
  feedback, so that an entry of C is a sum of m products of at most i - j + 2 factors, and floats
  change it by at most gamma_(i - j + m + 4) times the sum of their magnitudes (gamma_k =
  k u / (1 - k u), u = 2^-53; Higham, Accuracy and Stability of Numerical Algorithms, Ch. 3).
  Numbers of normalised rows, which are what is drawn, have up to four roundings more.
* **All others**: C is the inverse of N, the noising matrix, by a triangular solve, or by the
  reciprocal of a power series if N is Toeplitz. The computed matrix M is believed only because of
  its *left residual* E = M N - I. With e >= ||E||_2 and e < 1, M = (I + E) C, so that

      C - M = -E C = -E (I + E)^-1 M,      ||column j of (C - M)|| <= e / (1 - e) ||column j of M||.

  The computed product P of M and N has errors of at most gamma_(n + 1) |M| |N|, entry by entry, in
  whichever order terms are summed (Higham, Sec. 3.5), so that e = ||P - I||_F + gamma_(n + 1)
  || |M| |N| ||_2. The norm of a non-negative matrix is at most the square root of its largest row
  sum times its largest column sum; both take products with a vector.
* **Power series.** A Toeplitz matrix has at most the sum of the magnitudes of its first column as
  its norm. The product p of two series a and b is computed by Fourier transforms of N = 2^L points,
  in numbers of 64 bits with roundoff v where the processor has them. A transform has a relative
  error of at most t = 16 L v in L2 norm (Higham, Thm 24.2, for twiddle factors of errors of a few
  v), and no entry of it is larger than the sum of magnitudes. So the L2 error of p is at most
  t (||a||_1 ||b||_2 + 2 ||a||_2 ||b||_1): of the transform of b, and of the transform of a and the
  one back with the roundings of the products. Its L1 norm is at most sqrt(n) times that.

All of these are proofs, and none is a sample. ``Strategy.error`` bounds the norms of the columns
of C - M. It adds at most k ``error`` to the sensitivity under a schema of at most k participations:
for contributions x_j of norm at most one, ||sum_j (C - M)_j x_j^T||_F <= sum_j ||(C - M)_j||.

The leading part of C is the inverse of the leading part of N, because both are lower triangular:
it is what a run that stopped early has released.
"""

import dataclasses
import os
from typing import Any

import numpy as np
import scipy.fft
from scipy.linalg.lapack import dtrtri

from mf_aggregators.kernel import numbers
from mf_aggregators.kernel.numbers import FloatArray, NotProved
from mf_aggregators.kernel.rows import (
    BandedNoise,
    NoiseRecursion,
    StateSpaceNoise,
    WindowNoise,
    check_rounds,
    is_toeplitz,
)

# The largest errors of C, relative to its largest column norm. ``claim.check`` charges them.
_LARGEST_ERROR = 1e-6
# Entries of an inverse that are rounding errors of a zero, relative to the norm of their column.
_ROUNDING_OF_ZEROS = 1e-13
# Squares and products of magnitudes between these are within floats.
_LEAST, _LARGEST = 1e-100, 1e100
_ROUNDOFF = 2.0**-53
_MOST_ENTRIES_OF_BANDS = 1 << 26
# Matrices of n x n numbers that C of dense rows and its sensitivity take, rows included.
_DENSE_MATRICES = 6
_ROWS_AT_A_TIME = 512


@dataclasses.dataclass(frozen=True, eq=False)
class Strategy:
    """C as data: lower triangular, with few bands, or Toeplitz times a diagonal matrix.

    Attributes:
      entries: If ``is_dense``, C as (n, n) float64. Otherwise (n, b) bands with ``entries[i, t] =
        C[i, i - t]``, zero where i < t; or (1, m) for C = T D with these coefficients of T.
      num_rounds: n.
      error: At least the norms of the columns of C minus that matrix.
      is_dense: Whether entries are those of a matrix.
      column_scales: (n,) float64: the diagonal of D of a Toeplitz T; None for ones.
    """

    entries: FloatArray
    num_rounds: int
    error: float
    is_dense: bool = False
    column_scales: FloatArray | None = None


def strategy(rows: NoiseRecursion, num_rounds: int) -> Strategy:
    """Returns C of the first rounds, from the rows that are drawn in them.

    Args:
      rows: The rows, of one of the kernel's own classes.
      num_rounds: How many of their rounds: all, or those of a run that stopped early.

    Raises:
      NotProved: If the rows are of another class, if C or its errors are too large for a
        proof, or if there are too many rounds for one.
    """
    num_rounds = numbers.positive_integer(num_rounds, "num_rounds")
    check_rounds(rows, num_rounds)
    with np.errstate(all="ignore"):
        diagonal = rows.diagonal[:num_rounds]
        if not np.all(np.isfinite(diagonal) & (diagonal != 0.0)):
            raise NotProved("the diagonal of C^-1 has a zero, or C has one: there is no inverse.")
        try:
            found, size = _of_kind(rows, num_rounds)
        except ValueError as error:  # Normalised rows have numbers beyond floats.
            raise NotProved(str(error)) from error
    # Comparisons are written so that NaN does not pass.
    if not (_LEAST <= size <= _LARGEST and found.error <= _LARGEST_ERROR * size):
        raise NotProved(
            f"the strategy matrix of these rows is not known: its columns have norms of {size:g} "
            f"and errors of {found.error:g}, so that the rows are nearly singular."
        )
    return found


def num_bands(found: Strategy) -> int:
    """Returns the least b with C[i, j] = 0 for i - j >= b.

    Args:
      found: C.
    """
    if found.is_dense:
        is_entry = found.entries != 0.0
        return int(np.max(np.arange(len(is_entry)) - np.argmax(is_entry, axis=1))) + 1
    return int(np.flatnonzero(np.any(found.entries, axis=0))[-1]) + 1


def compact_columns(found: Strategy, width: int) -> FloatArray:
    """Returns the first entries of each column of C from its diagonal on, (n, width) float64.

    Args:
      found: C.
      width: The entries of each column, at least one; those below the last round are zero.
    """
    made = np.zeros((found.num_rounds, width))
    for j in range(found.num_rounds):
        entries = _column(found, j)[:width]
        made[j, : len(entries)] = entries
    return made


def columns(found: Strategy, rounds: tuple[int, ...]) -> FloatArray:
    """Returns columns of C as (n, m) float64.

    Args:
      found: C.
      rounds: The m columns, from 0.
    """
    made = np.zeros((found.num_rounds, len(rounds)))
    for place, j in enumerate(rounds):
        entries = _column(found, j)
        made[j : j + len(entries), place] = entries
    return made


def _column(found: Strategy, j: int) -> FloatArray:
    """Column j of C from its diagonal on, without the zeros below its bands."""
    if found.is_dense:
        return found.entries[j:, j]
    lags = np.arange(min(found.entries.shape[1], found.num_rounds - j))
    scale = 1.0 if found.column_scales is None else found.column_scales[j]
    return np.asarray(scale * found.entries[j + lags if len(found.entries) > 1 else 0, lags])


def _of_kind(rows: NoiseRecursion, num_rounds: int) -> tuple[Strategy, float]:
    """C and its largest column norm."""
    if isinstance(rows, BandedNoise):
        return _scaled(rows.bands[:num_rounds, :num_rounds], rows.row_scales, num_rounds, 0.0)
    unit, vectors = rows.normalised, rows.num_state_vectors
    if isinstance(rows, WindowNoise) and is_toeplitz(unit):
        series = rows.window[0, :num_rounds]
        coefficients = _reciprocal(series, num_rounds)
        residual = _residual_of_series(coefficients, series)
        error = _error(residual) * float(np.linalg.norm(coefficients))
        return _scaled(coefficients[np.newaxis], rows.row_scales, num_rounds, error)
    if isinstance(unit, StateSpaceNoise):
        phases = unit.phases[:num_rounds]
        phase = phases[0]
        keeps_places = np.array_equal(unit.sources[phase], np.arange(vectors))
        if np.all(phases == phase) and keeps_places:
            weights = unit.outputs[phase] * unit.feedbacks[phase]
            # Powers are within four units in the last place.
            powers = unit.decays[phase][:, np.newaxis] ** np.arange(num_rounds - 1)
            coefficients = np.append(1.0, -weights @ powers) / rows.diagonal[0]
            sizes = np.append(1.0, np.abs(weights) @ np.abs(powers)) / rows.diagonal[0]
            error = _gamma(vectors + 14) * float(np.linalg.norm(sizes))
            found = Strategy(coefficients[np.newaxis], num_rounds, error)
            return found, float(np.linalg.norm(coefficients))
    return _of_transition(rows, num_rounds)


def _of_transition(rows: NoiseRecursion, num_rounds: int) -> tuple[Strategy, float]:
    """Dense C from the weights of all rows together, for rows of Z or for earlier rows."""
    _check_dense(num_rounds)
    unit: Any = rows.normalised
    diagonal, one = rows.diagonal[:num_rounds], np.diag_indices(num_rounds)
    vectors = rows.num_state_vectors

    def weights(of: NoiseRecursion) -> FloatArray:
        return of.transition(0, num_rounds)[:num_rounds, vectors:]

    matrix = weights(unit)
    matrix[one] = 1.0
    sizes = np.abs(matrix)
    if vectors:
        # Sums of the magnitudes of the terms of each entry.
        arrays = {name: np.abs(each) for name, each in vars(unit).items() if np.ndim(each)}
        magnitudes: Any = dataclasses.replace(unit, **arrays)
        sizes = weights(magnitudes)
        sizes[one] = magnitudes.diagonal[:num_rounds]
    if rows.draws_earlier_rows_of_z:
        scales = diagonal[:, np.newaxis]
        return _inverted(matrix * scales, sizes * np.abs(scales), vectors + 8)
    # N Y = Z for rows that follow from earlier ones.
    matrix = (2.0 * np.eye(num_rounds) - matrix) / diagonal
    error = _gamma(num_rounds + vectors + 12) * _largest_column(sizes / diagonal)
    return Strategy(matrix, num_rounds, error, is_dense=True), _largest_column(matrix)


def _scaled(
    bands: FloatArray, row_scales: FloatArray | None, num_rounds: int, error: float
) -> tuple[Strategy, float]:
    """C = T D from the bands of T, the diagonal of D^-1, and a bound on the errors of T.

    Bands are (n, b), or (1, b) for a Toeplitz T.
    """
    is_toeplitz = len(bands) == 1
    size = float(np.linalg.norm(bands)) if is_toeplitz else _largest_column_of_bands(bands)
    scales = None
    if row_scales is not None:
        scales = 1.0 / row_scales[:num_rounds]
        largest = float(np.max(np.abs(scales)))
        error, size = (error + _gamma(4) * size) * largest, size * largest
    is_long = num_rounds * bands.shape[1] > _MOST_ENTRIES_OF_BANDS
    if is_toeplitz and (scales is None or is_long):
        return Strategy(bands, num_rounds, error, column_scales=scales), size
    if scales is not None:
        columns = np.arange(num_rounds)[:, np.newaxis] - np.arange(bands.shape[1])
        bands = np.where(columns >= 0, bands * scales[np.maximum(columns, 0)], 0.0)
        size = _largest_column_of_bands(bands)
    return Strategy(bands, num_rounds, error), size


def _inverted(noising: FloatArray, sizes: FloatArray, terms: int) -> tuple[Strategy, float]:
    """C from N, with ``sizes`` >= |N| and N known to within gamma_terms of them."""
    num_rounds = len(noising)
    # LAPACK reads the transposed of a matrix that is stored by rows.
    matrix = dtrtri(noising.T, lower=0)[0].T
    squared, by_rows = 0.0, 0.0
    squares, sums, row_sums = np.zeros(num_rounds), np.zeros(num_rounds), np.sum(sizes, axis=1)
    for first in range(0, num_rounds, _ROWS_AT_A_TIME):
        rows = matrix[first : first + _ROWS_AT_A_TIME]
        stop = first + len(rows)
        product = rows[:, :stop] @ noising[:stop, :stop]
        product[:, first:][np.diag_indices(len(rows))] -= 1.0
        squared += float(np.sum(np.square(product)))
        magnitudes = np.abs(rows)
        by_rows = max(by_rows, float(np.max(magnitudes @ row_sums)))
        sums += np.sum(magnitudes, axis=0)
        squares += np.sum(np.square(magnitudes), axis=0)
    roundings = _gamma(num_rounds + terms + 1) * np.sqrt(by_rows * np.max(sums @ sizes))
    residual = float(np.sqrt(squared) + roundings)
    # Zeros of C say how many bands it has, and its inverse's inverse has roundings there.
    norms, dropped = np.sqrt(squares), np.zeros(num_rounds)
    for first in range(0, num_rounds, _ROWS_AT_A_TIME):
        rows = matrix[first : first + _ROWS_AT_A_TIME]
        is_rounding = np.abs(rows) <= _ROUNDING_OF_ZEROS * norms
        dropped += np.sum(np.square(rows * is_rounding), axis=0)
        rows[is_rounding] = 0.0
    largest = float(np.max(norms))
    error = _error(residual) * largest + float(np.sqrt(np.max(dropped)))
    return Strategy(matrix, num_rounds, error, is_dense=True), largest


def _reciprocal(series: FloatArray, num_rounds: int) -> FloatArray:
    """The first n coefficients of one over a power series, by Newton's iteration."""
    wide = series.astype(np.longdouble)
    found = 1.0 / wide[:1]
    while len(found) < num_rounds:
        length = min(2 * len(found), num_rounds)
        correction = _product(found, _product(found, wide[:length], length), length)
        found = 2.0 * np.append(found, np.zeros(length - len(found))) - correction
    return np.asarray(found, np.float64)


def _residual_of_series(coefficients: FloatArray, series: FloatArray) -> float:
    """At least the sum of magnitudes of a product's first n coefficients, but for a one."""
    num_rounds = len(coefficients)
    product = _product(coefficients, series, num_rounds)
    product[0] -= 1.0
    one, other = (np.sum(np.abs(each)) for each in (coefficients, series))
    sizes = one * np.linalg.norm(series) + 2.0 * np.linalg.norm(coefficients) * other
    levels = (num_rounds + len(series)).bit_length()
    roundoff = 16.0 * levels * float(np.finfo(np.longdouble).eps) / 2.0
    return float(np.sum(np.abs(product)) + np.sqrt(num_rounds) * roundoff * sizes)


def _product(first: FloatArray, second: FloatArray, length: int) -> FloatArray:
    """The first coefficients of the product of two power series."""
    points = 1 << (len(first) + len(second) - 1).bit_length()
    wide = (each.astype(np.longdouble) for each in (first, second))
    one, other = (scipy.fft.rfft(each, points) for each in wide)
    found = scipy.fft.irfft(one * other, points)[:length]
    return np.append(found, np.zeros(length - len(found), np.longdouble))


def _error(residual: float) -> float:
    """Returns e / (1 - e), with one percent for the roundings of e itself."""
    return 1.01 * residual / (1.0 - 1.01 * residual) if residual < 0.5 else np.inf


def _gamma(operations: int) -> float:
    return operations * _ROUNDOFF / (1.0 - operations * _ROUNDOFF)


def _largest_column(matrix: FloatArray) -> float:
    return float(np.max(np.linalg.norm(matrix, axis=0)))


def _largest_column_of_bands(bands: FloatArray) -> float:
    squares = np.zeros(len(bands))
    for lag in range(bands.shape[1]):
        squares[: len(bands) - lag] += np.square(bands[lag:, lag])
    return float(np.sqrt(np.max(squares)))


def _check_dense(num_rounds: int) -> None:
    """Raises NotProved for matrices that the machine has no memory for."""
    if not hasattr(os, "sysconf"):
        return
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    needed = 8 * _DENSE_MATRICES * num_rounds**2
    if needed > memory:
        raise NotProved(
            f"the strategy matrix of {num_rounds} rounds takes {needed / 1e9:.3g} GB of memory, "
            f"and the machine has {memory / 1e9:.3g} GB: use fewer rounds or other rows."
        )
