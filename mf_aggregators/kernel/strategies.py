"""Strategy matrices C of the rows that are drawn: Y = C^-1 Z, computed from the rows alone.

Every kind of rows gives C as data, with a bound on its errors:

* **Bands**: C is what the rows are defined by. Column scales take a few roundings.
* **State spaces**: C Y = Z is a state space with the same state vectors, which follow from Y alone:
  ``Z[i] = (Y[i] - outputs . S) / gains``. Each state vector is a product of decays and one
  feedback, so that an entry of C is a sum of m products of at most i - j + 2 factors, and floats
  change it by at most gamma_(i - j + m + 4) times the sum of their magnitudes (gamma_k =
  k u / (1 - k u), u = 2^-53; Higham, Accuracy and Stability of Numerical Algorithms, Ch. 3).
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
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import scipy.fft
from scipy.linalg.lapack import dtrtri

from mf_aggregators.kernel import validation
from mf_aggregators.kernel.arrays import FloatArray
from mf_aggregators.kernel.errors import NotProved
from mf_aggregators.kernel.rows import (
    BandedNoise,
    DenseNoise,
    NoiseRecursion,
    StateSpaceNoise,
    WindowNoise,
)

# The largest errors of C beside its largest column norm. ``claim.check`` takes them off the noise.
_LARGEST_ERROR = 1e-6
# Entries of an inverse that are rounding errors of a zero, beside the largest one.
_ROUNDING_OF_ZEROS = 1e-13
# Magnitudes whose squares and products are within floats.
_LEAST, _LARGEST = 1e-100, 1e100
_ROUNDOFF = 2.0**-53
_MOST_ENTRIES_OF_BANDS = 1 << 26
# Matrices of n x n numbers that C of dense rows and its sensitivity take, rows included.
_DENSE_MATRICES = 6
_ROWS_AT_A_TIME = 512


@dataclasses.dataclass(frozen=True, eq=False)
class Dense:
    """C as an array.

    Attributes:
      matrix: (n, n) float64, lower triangular.
      error: At least the norms of the columns of C minus ``matrix``.
    """

    matrix: FloatArray
    error: float


@dataclasses.dataclass(frozen=True, eq=False)
class Bands:
    """C with few bands.

    Attributes:
      bands: (n, b) float64 with ``bands[i, t] = C[i, i - t]``, zero where i < t.
      error: At least the norms of the columns of C minus that matrix.
    """

    bands: FloatArray
    error: float


@dataclasses.dataclass(frozen=True, eq=False)
class Coefficients:
    """C = T D, T lower triangular and Toeplitz, D diagonal.

    Attributes:
      coefficients: (m,) float64: the first column of T, m at most n; zeros follow.
      num_rounds: n.
      error: At least the norms of the columns of C minus that matrix.
      column_scales: (n,) float64: the diagonal of D; None for ones.
    """

    coefficients: FloatArray
    num_rounds: int
    error: float
    column_scales: FloatArray | None = None


Strategy: TypeAlias = Dense | Bands | Coefficients


def strategy(rows: NoiseRecursion, num_rounds: int) -> Strategy:
    """Returns C of the first rounds, from the rows that are drawn in them.

    Args:
      rows: The rows, of one of the kernel's own classes.
      num_rounds: How many of their rounds: all, or those of a run that stopped early.

    Raises:
      NotProved: If the rows are of another class, if C or its errors are too large for a
        proof, or if there are too many rounds for one.
    """
    num_rounds = validation.positive_integer(num_rounds, "num_rounds")
    check_rounds(rows, num_rounds)
    with np.errstate(all="ignore"):
        diagonal = rows.diagonal[:num_rounds]
        if not np.all(np.isfinite(diagonal) & (diagonal != 0.0)):
            raise NotProved("the diagonal of C^-1 has a zero, or C has one: there is no inverse.")
        found, size = _OF_KIND[type(rows)](rows, num_rounds)
    # Comparisons are written so that NaN does not pass.
    if not (_LEAST <= size <= _LARGEST and found.error <= _LARGEST_ERROR * size):
        raise NotProved(
            f"the strategy matrix of these rows is not known: its columns have norms of {size:g} "
            f"and errors of {found.error:g}, so that the rows are nearly singular."
        )
    return found


def check_rounds(rows: NoiseRecursion, num_rounds: int) -> None:
    """Raises NotProved unless rows are of the kernel's own classes and of so many rounds.

    Args:
      rows: The rows.
      num_rounds: How many of their rounds are used.
    """
    if type(rows) not in _OF_KIND:
        raise NotProved(f"rows must be of the kernel's own classes, found {type(rows)}.")
    if num_rounds > rows.num_rounds:
        raise NotProved(f"the rows are of {rows.num_rounds} rounds, and not {num_rounds}.")


def num_bands(found: Strategy) -> int:
    """Returns the least b with C[i, j] = 0 for i - j >= b.

    Args:
      found: C.
    """
    if isinstance(found, Dense):
        is_entry = found.matrix != 0.0
        return int(np.max(np.arange(len(is_entry)) - np.argmax(is_entry, axis=1))) + 1
    entries = found.coefficients if isinstance(found, Coefficients) else np.any(found.bands, axis=0)
    return int(np.flatnonzero(entries)[-1]) + 1


def compact_columns(found: Strategy, width: int) -> FloatArray:
    """Returns the first entries of each column of C from its diagonal on, (n, width) float64.

    Args:
      found: C.
      width: The entries of each column, at least one; those below the last round are zero.
    """
    num_rounds = _num_rounds(found)
    made = np.zeros((num_rounds, width))
    for j in range(num_rounds):
        entries = _column(found, j)[:width]
        made[j, : len(entries)] = entries
    return made


def columns(found: Strategy, rounds: tuple[int, ...]) -> FloatArray:
    """Returns columns of C as (n, m) float64.

    Args:
      found: C.
      rounds: The m columns, from 0.
    """
    made = np.zeros((_num_rounds(found), len(rounds)))
    for place, j in enumerate(rounds):
        entries = _column(found, j)
        made[j : j + len(entries), place] = entries
    return made


def _num_rounds(found: Strategy) -> int:
    if isinstance(found, Coefficients):
        return found.num_rounds
    return len(found.matrix if isinstance(found, Dense) else found.bands)


def _column(found: Strategy, j: int) -> FloatArray:
    """Column j of C from its diagonal on, without the zeros below its bands."""
    if isinstance(found, Dense):
        return found.matrix[j:, j]
    if isinstance(found, Bands):
        lags = np.arange(min(found.bands.shape[1], len(found.bands) - j))
        return np.asarray(found.bands[j + lags, lags])
    scale = 1.0 if found.column_scales is None else found.column_scales[j]
    return np.asarray(scale * found.coefficients[: found.num_rounds - j])


def _of_bands(rows: BandedNoise, num_rounds: int) -> tuple[Strategy, float]:
    return _scaled(rows.bands[:num_rounds, :num_rounds], rows.row_scales, num_rounds, 0.0)


def _of_state_space(rows: StateSpaceNoise, num_rounds: int) -> tuple[Strategy, float]:
    phases, vectors = rows.phases[:num_rounds], rows.num_state_vectors
    outputs = -rows.outputs / rows.gains[:, np.newaxis]
    keeps_places = np.array_equal(rows.sources[phases[0]], np.arange(vectors))
    if np.all(phases == phases[0]) and keeps_places:
        phase = phases[0]
        weights = outputs[phase] * rows.feedbacks[phase]
        # Powers are within four units in the last place.
        powers = rows.decays[phase][:, np.newaxis] ** np.arange(num_rounds - 1)
        first = 1.0 / rows.gains[phase : phase + 1]
        coefficients = np.concatenate([first, weights @ powers])
        sizes = float(np.linalg.norm(np.append(first, np.abs(weights) @ np.abs(powers))))
        error = _gamma(vectors + 12) * sizes
        found = Coefficients(coefficients, num_rounds, error)
        return found, float(np.linalg.norm(coefficients))
    _check_dense(num_rounds)
    matrix, states = np.diag(1.0 / rows.gains[phases]), np.zeros((vectors, num_rounds))
    squares = np.square(np.diagonal(matrix))
    for i, phase in enumerate(phases):
        before = states[:, :i]
        matrix[i, :i] = outputs[phase] @ before
        squares[:i] += np.square(np.abs(outputs[phase]) @ np.abs(before))
        states[:, :i] = rows.decays[phase][:, np.newaxis] * before[rows.sources[phase]]
        states[:, i] = rows.feedbacks[phase]
    error = _gamma(num_rounds + vectors + 8) * float(np.sqrt(np.max(squares)))
    return Dense(matrix, error), _largest_column(matrix)


def _of_window(rows: WindowNoise, num_rounds: int) -> tuple[Strategy, float]:
    window, rank = rows.window[:num_rounds, :num_rounds], rows.num_state_vectors
    scales = np.ones(num_rounds) if rows.row_scales is None else rows.row_scales[:num_rounds]
    if len(window) == 1 and not rank:
        series = window[0]
        coefficients = _reciprocal(series, num_rounds)
        residual = _residual_of_series(coefficients, series)
        error = _error(residual) * float(np.linalg.norm(coefficients))
        return _scaled(coefficients[np.newaxis], rows.row_scales, num_rounds, error)
    _check_dense(num_rounds)
    length = rows.window_length
    lags = np.subtract.outer(np.arange(num_rounds), np.arange(num_rounds))
    # As in the class's definition, where beta has the rows of Z up to i - length + 1.
    inside = (lags >= 0) & (lags < length)
    windows = np.broadcast_to(window, (num_rounds, window.shape[1]))
    of_window = np.take_along_axis(windows, np.where(inside, lags, 0), axis=1) * inside
    left, right = rows.left[:num_rounds], rows.right[:num_rounds].T
    leaves = lags >= length - 1
    noising = scales[:, np.newaxis] * (of_window + (left @ right) * leaves)
    sizes = np.abs(of_window) + (np.abs(left) @ np.abs(right)) * leaves
    return _inverted(noising, np.abs(scales)[:, np.newaxis] * sizes, rank + 3)


def _of_dense(rows: DenseNoise, num_rounds: int) -> tuple[Strategy, float]:
    _check_dense(num_rounds)
    noising = rows.inverse[:num_rounds, :num_rounds]
    return _inverted(noising, np.abs(noising), 0)


_OF_KIND: dict[type, Callable[[Any, int], tuple[Strategy, float]]] = {
    BandedNoise: _of_bands,
    StateSpaceNoise: _of_state_space,
    WindowNoise: _of_window,
    DenseNoise: _of_dense,
}


def _scaled(
    bands: FloatArray, row_scales: FloatArray | None, num_rounds: int, error: float
) -> tuple[Strategy, float]:
    """C = T D from the bands of T, the diagonal of D^-1, and what bounds the errors of T.

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
        return Coefficients(bands[0], num_rounds, error, scales), size
    if scales is not None:
        columns = np.arange(num_rounds)[:, np.newaxis] - np.arange(bands.shape[1])
        bands = np.where(columns >= 0, bands * scales[np.maximum(columns, 0)], 0.0)
        size = _largest_column_of_bands(bands)
    return Bands(bands, error), size


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
    return Dense(matrix, error), largest


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
