"""L2 sensitivity of a strategy matrix C under a participation schema.

The sensitivity is the largest change, in Frobenius norm, of C x when one client's
contributions, of L2 norm at most one each, are replaced by zero in every round of
one participation pattern of the schema (zero-out adjacency; BandMF Eq. 2). It is
for contributions of any dimension.

With X = C^T C and a pattern pi, the sum of |X[i, j]| over i, j in pi bounds the
square of that change (BandMF Prop. E.1) and is reached where contributions of equal
direction and suitable signs make every term non-negative. These statements apply; which of them
does is decided from the entries of a dense or banded matrix, and the last one serves factorizations
that are made of Toeplitz coefficients:

* single participation: the largest column norm, always exact;
* (k, b)-participation: every pattern is enumerated (BandMF Eq. 5);
* min-separation b with a b-banded X: columns of one pattern are orthogonal, so a
  dynamic program over squared column norms is exact (BandMF Thm 2, Alg. 5);
* min-separation b otherwise: an upper bound (BandMF Thm 3, Alg. 4);
* Toeplitz matrices of non-negative coefficients that do not increase from lag b on: the
  pattern 0, b, 2 b, ... is the worst (Kalinin and Lampert, Thm 2), so no search is needed;
  any other Toeplitz matrix is bounded by way of one.

Squares are carried throughout and one square root is taken at the very end.
"""

from typing import Any

import numpy as np

from mf_aggregators.kernel import validation
from mf_aggregators.kernel.arrays import FloatArray, IntArray
from mf_aggregators.kernel.schemas import Schema
from mf_aggregators.linear_algebra import power_series
from mf_aggregators.participation import (
    Participation,
    SingleParticipation,
    check,
)

# Rows of X treated at a time by the upper bound: bounds its memory at n x k x this.
_ROWS_AT_A_TIME = 256
_COLUMNS_AT_A_TIME = 256
# Entries of X, relative to its diagonal, that may be rounding errors of a product.
_ROUNDING_OF_GRAM = 1e-14
# Deviations from a non-increasing sequence, relative to its largest entry, that count as
# rounding of computed coefficients. The value is that of the non-increasing sequence.
_TOEPLITZ_ROUNDING = 1e-13


class Sensitivity(float):
    """A sensitivity: a float that knows whether it is exact or an upper bound.

    Attributes:
      value: The sensitivity, a plain float.
      is_exact: True if the value is reached by some neighbouring pair of inputs,
        False if it is an upper bound.
      theorem: The statement that gives the value.
    """

    is_exact: bool
    theorem: str

    def __new__(cls, value: float, *, is_exact: bool, theorem: str) -> "Sensitivity":
        """Creates a sensitivity of ``value``."""
        self = super().__new__(cls, value)
        self.is_exact = is_exact
        self.theorem = theorem
        return self

    @property
    def value(self) -> float:
        """The sensitivity as a plain float."""
        return float(self)

    def times(self, factor: float) -> "Sensitivity":
        """Returns the sensitivity of a matrix that is ``factor`` > 0 times as large.

        Args:
          factor: Above zero.
        """
        return Sensitivity(float(self) * factor, is_exact=self.is_exact, theorem=self.theorem)

    def __getnewargs_ex__(self) -> tuple[tuple[float], dict[str, Any]]:
        return (float(self),), {"is_exact": self.is_exact, "theorem": self.theorem}

    def __repr__(self) -> str:
        return f"Sensitivity({float(self)!r}, is_exact={self.is_exact}, theorem={self.theorem!r})"


def compute(strategy_matrix: Any, participation: Participation) -> Sensitivity:
    """Computes the sensitivity of a strategy matrix under a participation schema.

    Args:
      strategy_matrix: C, an array of shape (m, n) for n rounds; m = n for square
        factorizations, larger for trees.
      participation: The schema.

    Returns:
      The sensitivity under unit clipping and zero-out adjacency.

    Raises:
      ValueError: If C is not a finite two-dimensional array with a column for
        each round.
      TypeError: If ``participation`` is not a participation schema.

    Example:
      >>> import mf_aggregators as mfa
      >>> timers = mfa.participation.MinSeparation(separation=2)
      >>> strategy = [[1.0, 0.0, 0.0], [0.5, 1.0, 0.0], [0.0, 0.5, 1.0]]
      >>> found = mfa.sensitivity.compute(strategy, timers)
      >>> round(found.value, 3), found.is_exact
      (1.5, True)
    """
    check(participation)
    strategy = validation.real_array(strategy_matrix, "the strategy matrix")
    if strategy.ndim != 2 or 0 in strategy.shape:
        raise ValueError(
            f"the strategy matrix must be two-dimensional, found an array of shape "
            f"{strategy.shape}."
        )
    # Squares of very large or small entries would over- or underflow.
    largest = max(float(np.max(strategy)), -float(np.min(strategy)))
    if not np.isfinite(largest):
        raise ValueError("the strategy matrix must be finite, found NaN or infinite entries.")
    if largest == 0.0:
        return Sensitivity(0.0, is_exact=True, theorem="zero matrix")
    return _of_unit_scale(strategy / largest, participation).times(largest)


def _of_unit_scale(strategy: FloatArray, participation: Participation) -> Sensitivity:
    squared_norms = np.einsum("ij,ij->j", strategy, strategy)
    if participation.most_participations(strategy.shape[1]) == 1:
        # Also every schema under which no client can return, whatever its name.
        return from_column_norms(squared_norms, SingleParticipation(), num_bands=None)
    num_bands, separation = lower_bands(strategy), participation.separation_in(strategy.shape[1])
    if num_bands is None:
        gram = strategy.T @ strategy
    elif not participation.is_evenly_spaced and num_bands <= separation:
        return from_column_norms(squared_norms, participation, num_bands=num_bands)
    else:
        gram = _gram_of_triangular(strategy, separation)
    # The Gram product may turn an exactly zero product into a rounding error; the
    # diagonal is taken from the same sums as everywhere else.
    np.fill_diagonal(gram, squared_norms)
    return from_gram_matrix(gram, participation)


def _gram_of_triangular(strategy: FloatArray, separation: int) -> FloatArray:
    """C^T C of a lower-triangular C, where both participations of a client can be.

    Products with zeros are left out, and so are all entries closer to the diagonal than the
    separation, which no pattern holds: they stay zero.
    """
    num_rounds = len(strategy)
    gram = np.zeros((num_rounds, num_rounds))
    for first in range(0, num_rounds, _COLUMNS_AT_A_TIME):
        end = min(first + _COLUMNS_AT_A_TIME, num_rounds)
        through = max(end - separation, 0)
        columns = slice(first, end)
        gram[columns, :through] = strategy[first:, columns].T @ strategy[first:, :through]
        gram[:through, columns] = gram[columns, :through].T
    return gram


def from_column_norms(
    squared_column_norms: Any, participation: Participation, num_bands: int | None
) -> Sensitivity:
    """Computes a sensitivity from squared column norms, where those determine it.

    This serves structured mechanisms, which need no dense matrix for it.

    Args:
      squared_column_norms: The n squared column norms of C.
      participation: SingleParticipation, or a MinSeparation or FixedEpochOrder whose
        separation is at least ``num_bands``.
      num_bands: The number of bands of C: C[i, j] = 0 for i - j >= num_bands. None
        where it does not matter, that is where nobody participates twice.

    Returns:
      The exact sensitivity.

    Raises:
      ValueError: If the columns of one pattern need not be orthogonal, so that the
        norms alone give no exact value (the hypothesis of BandMF Thm 2).
    """
    squared_norms = np.asarray(squared_column_norms, dtype=np.float64)
    num_rounds = squared_norms.shape[0]
    if participation.most_participations(num_rounds) == 1:
        return Sensitivity(
            float(np.sqrt(np.max(squared_norms))),
            is_exact=True,
            theorem="largest column norm (Denisov et al. Thm 4.1)",
        )
    separation = participation.separation_in(num_rounds)
    if num_bands is None or num_bands > separation:
        raise ValueError(
            f"column norms give no exact sensitivity under {participation} for a matrix of "
            f"{num_bands} bands: at most {separation} bands would be needed "
            "(BandMF Thm 2)."
        )
    theorem = (
        "enumeration of patterns (BandMF Eq. 5)"
        if participation.is_evenly_spaced
        else "banded matrix (BandMF Thm 2, Alg. 5)"
    )
    squared = participation.as_schema().largest_sum(squared_norms)
    return Sensitivity(float(np.sqrt(squared)), is_exact=True, theorem=theorem)


def from_toeplitz_coefficients(
    coefficients: Any, num_rounds: int, participation: Participation
) -> Sensitivity:
    """Computes the sensitivity of a lower-triangular Toeplitz matrix, in O(n) memory.

    For non-negative coefficients c that do not increase from lag b on, the worst pattern
    starts at round 0 and takes part every b rounds. With participations p_1 < p_2 < ...,
    p_j is at least (j - 1) b and p_j - p_i at least (j - i) b, and
    ``X[p_i, p_j] = sum_t c_t c_(t + p_j - p_i)`` over t < n - p_j only grows if p_j and
    p_j - p_i become smaller: the second factor is at a lag of b or more for i < j, and for
    i = j the sum has more terms.

    Where c does not decrease, the second factor is at most e_(t + (j - i) b), with
    e_t = max |c_s| over s >= t, which gives an upper bound. Columns of a matrix of at most
    b bands are orthogonal within a pattern, and their norms decide, whatever c is.

    Args:
      coefficients: (m,) the first column, m <= n; zeros follow.
      num_rounds: n.
      participation: The schema.

    Returns:
      The sensitivity, exact or an upper bound.

    Raises:
      ValueError: If the coefficients are not a finite vector of 1 to n entries.
    """
    check(participation)
    num_rounds = validation.positive_integer(num_rounds, "num_rounds")
    series = validation.real_array(coefficients, "coefficients")
    if series.ndim != 1 or not 1 <= series.shape[0] <= num_rounds:
        raise ValueError(
            f"coefficients must be a vector of 1 to {num_rounds} entries, found an array of "
            f"shape {series.shape}."
        )
    if not np.all(np.isfinite(series)):
        raise ValueError("the coefficients must be finite, found NaN or infinite entries.")
    largest = float(np.max(np.abs(series)))
    if largest == 0.0:
        return Sensitivity(0.0, is_exact=True, theorem="zero matrix")
    return _of_unit_coefficients(series / largest, num_rounds, participation).times(largest)


def _of_unit_coefficients(
    series: FloatArray, num_rounds: int, participation: Participation
) -> Sensitivity:
    most = participation.most_participations(num_rounds)
    if most == 1:
        value = float(np.linalg.norm(series))
        theorem = "largest column norm (Denisov et al. Thm 4.1)"
        return Sensitivity(value, is_exact=True, theorem=theorem)
    separation = participation.separation_in(num_rounds)
    if np.trim_zeros(series, "b").shape[0] <= separation:
        # The norms of columns fall from the first to the last.
        norms = power_series.truncated_column_norms(series, num_rounds)
        value = float(np.sqrt(np.sum(norms[::separation][:most])))
        theorem = "banded matrix (BandMF Thm 2, Alg. 5)"
        return Sensitivity(value, is_exact=True, theorem=theorem)
    magnitudes = np.abs(series)
    envelope = magnitudes.copy()
    envelope[separation:] = np.maximum.accumulate(magnitudes[separation:][::-1])[::-1]
    theorem = "non-increasing Toeplitz coefficients (Kalinin and Lampert, Thm 2)"
    padded_envelope = power_series.padded(envelope, num_rounds)
    if _have_one_sign(series) and np.all(envelope - magnitudes <= _TOEPLITZ_ROUNDING):
        value = float(np.linalg.norm(pattern_sum(padded_envelope, separation, most)))
        return Sensitivity(value, is_exact=True, theorem=theorem)
    padded = power_series.padded(magnitudes, num_rounds)
    value = _toeplitz_bound(padded, padded_envelope, separation, most)
    return Sensitivity(value, is_exact=False, theorem=f"upper bound by {theorem}")


def _have_one_sign(series: FloatArray) -> bool:
    return bool(np.all(series >= -_TOEPLITZ_ROUNDING) or np.all(series <= _TOEPLITZ_ROUNDING))


def _toeplitz_bound(
    magnitudes: FloatArray, envelope: FloatArray, separation: int, most: int
) -> float:
    """The bound of :func:`from_toeplitz_coefficients`, in O(n).

    Twice the sum over i < j of sum_s |c|_(s - (j - 1) b) e_(s - (i - 1) b), plus the squared
    norms of the columns. With s = r b + o, the inner sum is one over rows a < a' of tables
    of b columns, both within the k rows up to r, of |c| in row a times e in row a'.
    """
    num_rounds = len(magnitudes)
    products = _pairs_within_windows(
        _table(magnitudes, separation), _table(envelope, separation), most
    )
    norms = power_series.truncated_column_norms(magnitudes, num_rounds)
    cross = float(np.sum(products.ravel()[:num_rounds]))
    squared = float(np.sum(norms[::separation][:most])) + 2.0 * cross
    # All terms are non-negative, so that rounding is relative to the sum itself.
    rounding = 8.0 * (np.log2(num_rounds + 1.0) + most) * np.finfo(np.float64).eps
    return float(np.sqrt(squared * (1.0 + rounding)))


def _table(column: FloatArray, separation: int) -> FloatArray:
    """The (ceil(n / b), b) table whose rows are a vector's entries, zeros at its end."""
    table = np.zeros((-(-len(column) // separation), separation))
    table.ravel()[: len(column)] = column
    return table


def _in_blocks(table: FloatArray, rows: int) -> FloatArray:
    """The (blocks, rows, b) view of a table filled up with zeros."""
    blocks = -(-len(table) // rows)
    filled = np.zeros((blocks * rows, table.shape[1]))
    filled[: len(table)] = table
    return filled.reshape(blocks, rows, -1)


def _running(blocks: FloatArray) -> FloatArray:
    return np.cumsum(blocks, axis=1)


def _running_back(blocks: FloatArray) -> FloatArray:
    return np.asarray(np.cumsum(blocks[:, ::-1], axis=1)[:, ::-1])


def _window_sums(table: FloatArray, most: int) -> FloatArray:
    """For each row, the sum of it and the k - 1 rows before it, without differences.

    A window reaches from within one block of k rows into the next: the end of the one
    and the beginning of the other are running sums, of non-negative terms where the
    table's are, so that nothing cancels.
    """
    blocks = _in_blocks(table, most)
    sums = _running(blocks)
    sums[1:, :-1] += _running_back(blocks)[:-1, 1:]
    return sums.reshape(-1, table.shape[1])[: len(table)]


def _pairs_within_windows(first: FloatArray, second: FloatArray, most: int) -> FloatArray:
    """For each row r, the sum of first[a] second[a'] over r - k < a < a' <= r.

    As in :func:`_window_sums`, a window reaches from within one block of k rows into the next:
    both rows of a pair are in the later block, or both in the earlier one, or one in each.
    """
    ours, theirs = _in_blocks(first, most), _in_blocks(second, most)
    ours_before, theirs_after = np.zeros_like(ours), np.zeros_like(theirs)
    ours_before[:, 1:] = _running(ours)[:, :-1]
    theirs_after[:, :-1] = _running_back(theirs)[:, 1:]
    pairs = _running(theirs * ours_before)
    pairs[1:, :-1] += _running_back(ours * theirs_after)[:-1, 1:]
    pairs[1:, :-1] += _running_back(ours)[:-1, 1:] * _running(theirs)[1:, :-1]
    return pairs.reshape(-1, first.shape[1])[: len(first)]


def pattern_sum(column: FloatArray, separation: int, most: int) -> FloatArray:
    """Returns the sum of a Toeplitz matrix's columns 0, b, 2 b, ..., k of them.

    Args:
      column: (n,) the first column.
      separation: b.
      most: k, with (k - 1) b < n.

    Returns:
      (n,): entry t is the sum of ``column[t - j b]`` over j < k with j b <= t.
    """
    sums = _window_sums(_table(column, separation), most)
    return sums.ravel()[: column.shape[0]]


def pattern_sum_adjoint(values: FloatArray, separation: int, most: int) -> FloatArray:
    """Returns the adjoint of :func:`pattern_sum`: entry t sums ``values[t + j b]`` over j < k.

    Args:
      values: (n,) floats.
      separation: The separation b.
      most: The number k of participations.
    """
    sums = _window_sums(_table(values, separation)[::-1], most)[::-1]
    return sums.ravel()[: values.shape[0]]


def from_gram_matrix(gram_matrix: Any, participation: Participation) -> Sensitivity:
    """Computes a sensitivity from X = C^T C.

    Args:
      gram_matrix: X, an (n, n) symmetric positive semi-definite array.
      participation: The schema.

    Returns:
      The sensitivity, exact or an upper bound as the module's text says.

    Raises:
      ValueError: If X is not square and finite.
    """
    gram = validation.square_matrix(gram_matrix, "the Gram matrix")
    num_rounds = gram.shape[0]
    most = participation.most_participations(num_rounds)
    if most == 1:
        return from_column_norms(np.diagonal(gram), SingleParticipation(), num_bands=None)
    separation = participation.separation_in(num_rounds)
    if participation.is_evenly_spaced:
        return _enumerated(gram, separation, most)
    if _gram_bands(gram) <= separation:
        return from_column_norms(np.diagonal(gram), participation, num_bands=separation)
    return _min_separation_bound(gram, separation, most)


def _enumerated(gram: FloatArray, separation: int, most: int) -> Sensitivity:
    """BandMF Eq. 5 over the maximal patterns of (k, b)-participation."""
    best, best_pattern = -1.0, gram[:0, :0]
    for start in Schema(most, separation, is_even=True).starts_in(len(gram)):
        stop = start + separation * most
        pattern = gram[start:stop:separation, start:stop:separation]
        total = float(np.sum(np.abs(pattern)))
        if total > best:
            best, best_pattern = total, pattern
    return Sensitivity(
        float(np.sqrt(best)),
        is_exact=is_reached(best_pattern),
        theorem="enumeration of patterns (BandMF Eq. 5)",
    )


def _min_separation_bound(gram: FloatArray, separation: int, most: int) -> Sensitivity:
    """BandMF Thm 3: an upper bound for any X, the smaller of two.

    The sum over a pattern pi of |X[i, j]| is the sum over i in pi of r_i(pi), the sum
    of row i over pi. Algorithm 4 bounds r_i(pi) by its maximum over all patterns; here
    the maximum runs over the patterns that contain i, which is no larger and is a bound
    for the same reason. The square of the largest sum of column norms over a pattern
    is a bound by the triangle inequality.
    """
    num_rounds = gram.shape[0]
    row_bounds = np.empty(num_rounds)
    for first in range(0, num_rounds, _ROWS_AT_A_TIME):
        rows = np.arange(first, min(first + _ROWS_AT_A_TIME, num_rounds))
        row_bounds[rows] = _row_sums_through_diagonal(np.abs(gram[rows]), rows, separation, most)
    return from_row_bounds(row_bounds, np.diagonal(gram), separation, most)


def from_row_bounds(
    row_bounds: FloatArray, squared_norms: FloatArray, separation: int, most: int
) -> Sensitivity:
    """Returns the smaller of two upper bounds: by rows of X (BandMF Thm 3), and by column norms.

    Args:
      row_bounds: (n,) for each row of |X|, at least its largest sum over a pattern that holds it.
      squared_norms: (n,) of the columns of C.
      separation: b.
      most: The most participations k.
    """
    squared = Schema(most, separation).largest_sum(row_bounds)
    by_norms = Schema(most, separation).largest_sum(np.sqrt(squared_norms))
    return Sensitivity(
        float(min(np.sqrt(squared), by_norms)),
        is_exact=False,
        theorem="upper bound for any matrix (BandMF Thm 3)",
    )


def _row_sums_through_diagonal(
    magnitudes: FloatArray, rows: IntArray, separation: int, most: int
) -> FloatArray:
    """For each row i, the largest sum of its entries over a pattern that contains i."""
    count, num_rounds = magnitudes.shape
    within = np.arange(count)
    # Nothing between what may follow the first of the rows and precede the last matters.
    start, stop = min(rows[0] + separation, num_rounds), max(rows[-1] - separation + 1, 0)
    following = _largest_sums(
        magnitudes[:, start:], np.minimum(within, num_rounds - start), separation, most - 1
    )
    preceding = _largest_sums(
        magnitudes[:, :stop][:, ::-1], np.minimum(within[::-1], stop), separation, most - 1
    )
    # A pattern through i has m participations after it and most - 1 - m before it.
    return np.asarray(magnitudes[within, rows] + np.max(following + preceding[::-1], axis=0))


def _largest_sums(vectors: FloatArray, starts: IntArray, separation: int, most: int) -> FloatArray:
    """Returns F[m, p]: the largest sum over at most m entries of vector p, at or after its start.

    "At most" and not "exactly": F[m] >= F[m - 1] holds by induction, because every level begins
    from zeros and taking nothing is always allowed.
    """
    count, length = vectors.shape
    followed = max(length - separation, 0)
    fitting = min(most, -(-length // separation))
    columns = np.ascontiguousarray(vectors.T)
    # From each position on; the last row is for what begins behind the end.
    sums, table = np.zeros((most + 1, count)), np.zeros((length + 1, count))
    for participations in range(1, fitting + 1):
        table[:followed] = table[length - followed : length]
        table[followed:] = 0.0
        table[:length] += columns
        for i in range(length - 1, -1, -1):
            np.maximum(table[i], table[i + 1], out=table[i])
        sums[participations] = table[starts, np.arange(count)]
    # No more than those fit.
    sums[fitting + 1 :] = sums[fitting]
    return sums


def is_reached(pattern: FloatArray) -> bool:
    """Returns whether sum |X[i, j]| is reached.

    It is if signs s exist with s_i s_j X[i, j] >= 0 for all i, j: then contributions s_i u, with
    one unit vector u, change C x by exactly the bound. Signs are spread along the non-zero entries
    from each connected group's first round. Entries of the size of rounding errors have no sign.

    Args:
      pattern: (k, k), X in the rounds of a pattern.
    """
    count = pattern.shape[0]
    rounding = _ROUNDING_OF_GRAM * np.max(np.diagonal(pattern))
    pattern = np.where(np.abs(pattern) <= rounding, 0.0, pattern)
    signs = np.zeros(count)
    for first in range(count):
        if signs[first] != 0:
            continue
        signs[first] = 1.0
        waiting = [first]
        while waiting:
            i = waiting.pop()
            implied = signs[i] * np.sign(pattern[i])
            fresh = np.flatnonzero((implied != 0) & (signs == 0))
            signs[fresh] = implied[fresh]
            waiting.extend(int(j) for j in fresh)
    return bool(np.all(signs[:, np.newaxis] * pattern * signs >= 0))


def lower_bands(strategy: FloatArray) -> int | None:
    """The least b with C[i, j] = 0 wherever i - j >= b, or None unless C is lower triangular.

    Only a lower- (or upper-) triangular C of b bands has a b-banded C^T C: a symmetric
    one has up to 2 b - 1 bands.

    Args:
      strategy: (n, n) floats.

    Returns:
      The number of bands.
    """
    if strategy.shape[0] != strategy.shape[1]:
        return None
    below, above = _reaches(strategy)
    return None if above else below + 1


def _gram_bands(gram: FloatArray) -> int:
    """The least b with X[i, j] = 0 wherever |i - j| >= b, on either side of the diagonal."""
    return max(_reaches(gram)) + 1


def _reaches(matrix: FloatArray) -> tuple[int, int]:
    """How far entries that are not zero lie below the diagonal of (n, n) floats, and above it."""
    is_there = matrix != 0.0
    rounds = np.arange(len(matrix))
    first = np.argmax(is_there, axis=1)
    last = rounds[-1] - np.argmax(is_there[:, ::-1], axis=1)
    # A row without an entry has neither a first nor a last one.
    is_any = np.any(is_there, axis=1)
    below, above = np.where(is_any, rounds - first, 0), np.where(is_any, last - rounds, 0)
    return max(int(np.max(below)), 0), max(int(np.max(above)), 0)
