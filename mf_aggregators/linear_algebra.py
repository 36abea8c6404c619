r"""Arithmetic of banded matrices, of Toeplitz matrices as power series, and of singular values.

**Power series.** The (n, n) lower-triangular Toeplitz matrix with first column c is multiplication
by c(x) = sum_t c_t x^t modulo x^n: products of matrices are products of series, and the inverse
matrix is the reciprocal series. All of it takes O(n) memory.

**Banded matrices** take O(n b) memory: their products, and what noise of C^-1 costs.

:class:`BandedMatrix` has any shape of band. Lower-triangular matrices come by their bands,
``bands[i, t] = M[i, i - t]``.

For a lower-triangular C with b bands and independent normal z, the noise is y = C^-1 z, and a
workload A makes a = A y of it. The squared error ||A C^-1||_F^2 is the sum of the variances of a.
Where A^-1 has w bands, (y, a) is a Markov chain: with rounds in blocks of s >= b - 1, w - 1,

    y_k = N_k z_k - V_k y_(k-1),        a_k = P_k y_k + R_k e_(k-1),

N_k the inverse of the block C_kk, V_k = N_k C_(k,k-1), P_k the inverse of the block of A^-1, and
e the last w - 1 entries of a block of a, which are all that later blocks need of it, by their
differences of order 0 to w - 2: entries of sums of sums are so alike that their covariances would
leave few digits of those. Forwards, covariances follow from those of the block before:

    Cov(y_k) = N_k N_k^T + V_k Cov(y_(k-1)) V_k^T.

Backwards, W_k is the quadratic form in (y_k, e_(k-1)) that all of a from block k on costs in the
absence of more noise; it follows from W_(k+1) in the same way. Both are sums of positive
semi-definite terms, so that nothing cancels however long the run is. From y_k changing by
-N_k (dC_kk y_k + dC_(k,k-1) y_(k-1)) follows the slope of the squared error,

    d / dC_kk = -2 N_k^T (W_yy Cov(y_k) + W_ye Cov(e_(k-1), y_k)),

and likewise for C_(k,k-1). With X = C^T C, M = Cov(a, y) is A X^-1, and what the dual of the
search for C needs, V = X^-1 A^T A X^-1 = M^T M, is split at block k:

    V_kk = Q_k + (Cov(y_k, .)) W_k (Cov(., y_k)),   Q_k = V_k (Q_(k-1) + M_(k-1)^T M_(k-1)) V_k^T

with M_k = Cov(a_k, y_k), where a of earlier blocks comes in by Q. These are block versions of
selected inversion (Takahashi, Fagan and Chen, 1973): entries of an inverse within the band of a
matrix, without any other. A workload whose inverse has too many bands is one block, A its P.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator

import numpy as np
import scipy.fft
import scipy.linalg
import scipy.signal
from numpy.lib.stride_tricks import as_strided
from scipy.linalg.lapack import dtbtrs, dtrtri

from mf_aggregators.kernel.numbers import FloatArray

# The fewest rows of a tile in a product of banded matrices, and the number of tiles across a band.
_LEAST_ROWS, _TILES_OF_BAND = 64, 8
# The fewest rounds of a block: smaller ones would take less arithmetic, but more calls.
_LEAST_BLOCK = 24
# The most coefficients for which a reciprocal is computed by recursion; for more, fast Fourier
# transforms are faster.
_LONGEST_RECURSION = 4096


@dataclasses.dataclass(frozen=True, eq=False)
class BandedMatrix:
    """A square matrix M with M[i, j] = 0 unless -lower <= j - i <= upper.

    Attributes:
      lower: The number of diagonals below the main one.
      upper: The number of diagonals above the main one.
      rows: (n, lower + upper + 1) float64 with ``rows[i, t] = M[i, i - lower + t]``, zero where the
        matrix has no such column.
    """

    lower: int
    upper: int
    rows: FloatArray

    @classmethod
    def lower_triangular(cls, bands: FloatArray) -> "BandedMatrix":
        """Returns the lower-triangular matrix with given bands.

        Args:
          bands: (n, b) with ``bands[i, t] = M[i, i - t]``, zero where i < t.
        """
        return cls(bands.shape[1] - 1, 0, np.ascontiguousarray(bands[:, ::-1]))

    @classmethod
    def symmetric(cls, bands: FloatArray) -> "BandedMatrix":
        """Returns the symmetric matrix with given bands on and below the diagonal.

        Args:
          bands: As for :meth:`lower_triangular`.
        """
        below = cls.lower_triangular(bands)
        above = below.transposed()
        return cls(
            below.lower, below.lower, np.concatenate([below.rows, above.rows[:, 1:]], axis=1)
        )

    @property
    def diagonal(self) -> FloatArray:
        """The main diagonal, (n,): a view that can be written to."""
        return self.rows[:, self.lower]

    def transposed(self) -> "BandedMatrix":
        """Returns the transposed matrix M^T."""
        num_rounds, width = self.rows.shape
        rows = np.zeros_like(self.rows)
        for t in range(width):
            # The entry M[i, i + offset] is M^T[i + offset, i].
            offset = t - self.lower
            below, above = max(offset, 0), max(-offset, 0)
            count = max(num_rounds - abs(offset), 0)
            rows[below : below + count, width - 1 - t] = self.rows[above : above + count, t]
        return BandedMatrix(self.upper, self.lower, rows)

    def times(self, other: "BandedMatrix") -> "BandedMatrix":
        """Returns the product with another banded matrix.

        Args:
          other: A banded matrix of the same size.
        """
        num_rounds, width = self.rows.shape
        lower, upper = self.lower + other.lower, self.upper + other.upper
        rows = np.empty((num_rounds, lower + upper + 1))
        # Small tiles have few zeros from outside of the bands, and large tiles take fewer calls.
        size = max(_LEAST_ROWS, min(width, other.rows.shape[1]) // _TILES_OF_BAND)
        for start in range(0, num_rounds, size):
            count = min(size, num_rounds - start)
            left = self.dense_rows(start, start + count)
            product = np.zeros((count, count + lower + upper))
            for inner in range(0, left.shape[1], size):
                end = min(inner + size, left.shape[1])
                right = other.dense_rows(start - self.lower + inner, start - self.lower + end)
                product[:, inner : inner + right.shape[1]] += left[:, inner:end] @ right
            rows[start : start + count] = _diagonals(product, count, rows.shape[1])
        return BandedMatrix(lower, upper, rows)

    def narrowed(self, lower: int, upper: int) -> "BandedMatrix":
        """Returns the matrix with its outermost diagonals removed.

        Args:
          lower: The number of diagonals below the main one that stay, at most all.
          upper: The number of diagonals above the main one that stay.
        """
        first = self.lower - lower
        return BandedMatrix(lower, upper, self.rows[:, first : first + lower + upper + 1].copy())

    def dense_rows(self, start: int, stop: int) -> FloatArray:
        """Returns rows ``start`` to ``stop - 1`` as a dense array, with all columns of their bands.

        The columns are start - lower to stop - 1 + upper.

        Args:
          start: The first row; rows and columns outside of the matrix are zero.
          stop: The row after the last.
        """
        count, (num_rounds, width) = stop - start, self.rows.shape
        dense = np.zeros((count, count + width - 1))
        first, last = max(start, 0), min(stop, num_rounds)
        if first < last:
            inside = dense[first - start :, first - start :]
            _diagonals(inside, last - first, width)[...] = self.rows[first:last]
        return dense

    def squared_norm(self) -> float:
        """Returns the sum of the squares of all entries of the matrix."""
        return float(np.vdot(self.rows, self.rows))

    def largest_row_sum(self) -> float:
        """Returns the largest sum of magnitudes of a row: the operator norm for maximum norms."""
        return float(np.max(np.sum(np.abs(self.rows), axis=1)))


def _diagonals(dense: FloatArray, count: int, width: int) -> FloatArray:
    """Returns a view of ``width`` entries of each row, one column further right in each row."""
    of_row, of_column = dense.strides
    return as_strided(dense, shape=(count, width), strides=(of_row + of_column, of_column))


def square_root_bands(num_rounds: int, num_bands: int) -> FloatArray:
    """Returns the bands of the prefix sum's Toeplitz square root.

    Args:
      num_rounds: n.
      num_bands: b.
    """
    coefficients = square_root_coefficients(num_bands)
    return np.where(np.tri(num_rounds, num_bands, dtype=bool), coefficients, 0.0)


def solved(bands: FloatArray, right: FloatArray, transposed: bool = False) -> FloatArray:
    """Solves M x = y or M^T x = y for a lower-triangular matrix M with given bands.

    Args:
      bands: (n, b) with ``bands[i, t] = M[i, i - t]``.
      right: (n, m) y.
      transposed: Whether M is transposed.

    Returns:
      (n, m) x; NaN if M is singular.
    """
    below = by_columns(bands[:, : len(bands)])
    solution, failed = dtbtrs(below, right, uplo="L", trans="T" if transposed else "N")
    return np.full(right.shape, np.nan) if failed else np.asarray(solution)


def by_columns(bands: FloatArray) -> FloatArray:
    """Returns bands in LAPACK's form, in which the entries of a diagonal are sorted by columns.

    Args:
      bands: (n, b) with ``bands[i, t] = M[i, i - t]``.

    Returns:
      (b, n) with M[j + t, j] in row t and column j, zero where the matrix has no such row.
    """
    below = np.zeros(bands.shape[::-1])
    for t in range(len(below)):
        below[t, : len(bands) - t] = bands[t:, t]
    return below


def column_sums(bands: FloatArray) -> FloatArray:
    """Returns the (n,) column sums of a lower-triangular matrix with given bands.

    Args:
      bands: (n, b) bands of the matrix.
    """
    num_rounds, num_bands = bands.shape
    sums = np.zeros(num_rounds)
    for t in range(num_bands):
        sums[: num_rounds - t] += bands[t:, t]
    return sums


def spread_columns(values: FloatArray, num_bands: int) -> FloatArray:
    """Returns the bands of a matrix that has ``values[j]`` in all entries of column j's band.

    Args:
      values: (n,).
      num_bands: b.
    """
    padded = np.concatenate([np.zeros(num_bands - 1), values])
    return np.lib.stride_tricks.sliding_window_view(padded, num_bands)[:, ::-1]


@dataclasses.dataclass(frozen=True, eq=False)
class _Block:
    """A block of rounds of a workload, as the matrices that it applies to the noise.

    Attributes:
      own: (s, s) P; zero in rows after the last round.
      carried: (s, r) R.
      next_own: (r, s) the linear map from y of this block to e of this block.
      next_carried: (r, r) the linear map from e of the block before to e of this block.
    """

    own: FloatArray
    carried: FloatArray
    next_own: FloatArray
    next_carried: FloatArray

    @functools.cached_property
    def squares(self) -> tuple[FloatArray, FloatArray, FloatArray]:
        """The products P^T P, P^T R and R^T R of the block's matrices."""
        return self.weighted_squares(np.ones(len(self.own)))

    def weighted_squares(self, weights: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Returns the weighted products P^T W P, P^T W R and R^T W R of the block's matrices.

        Args:
          weights: (s,) the diagonal of W.
        """
        own = self.own.T * weights
        return own @ self.own, own @ self.carried, (self.carried.T * weights) @ self.carried


@dataclasses.dataclass(frozen=True, eq=False)
class WorkloadBlocks:
    """A workload that is divided into blocks of rounds, with the matrices of each block.

    Attributes:
      num_rounds: The number of rounds n.
      size: The number of rounds s of a block; the last block may have fewer.
      num_carried: The number r of combinations of entries of a that a block passes to the next
        block.
      blocks: The blocks; equal blocks are the same object.
    """

    num_rounds: int
    size: int
    num_carried: int
    blocks: tuple[_Block, ...]

    @classmethod
    def of_inverse(
        cls, inverse_bands: FloatArray, num_bands: int, weights: FloatArray | None = None
    ) -> "WorkloadBlocks":
        """Returns a workload in blocks, from the bands of its inverse.

        Args:
          inverse_bands: (n, w) of A^-1, ``inverse_bands[i, t] = A^-1[i, i - t]``; the diagonal has
            no zero.
          num_bands: The bands b of strategy matrices.
          weights: (n,) w if the workload is diag(w)^1/2 times another workload with rows that
            change less from one to the next; None for ones.
        """
        num_rounds, width = inverse_bands.shape
        roots = np.ones(num_rounds) if weights is None else np.sqrt(weights)
        carried = width - 1
        size = _block_size(num_rounds, max(num_bands - 1, carried))
        count = -(-num_rounds // size)
        matrices = _blocks_of(inverse_bands, size)
        differences = _differences(carried)
        # With its entries in reverse order, the matrix of differences is its own inverse.
        undone = differences[:, ::-1][::-1]
        known: dict[bytes, _Block] = {}
        blocks = []
        for k in range(count):
            rounds = min(size, num_rounds - k * size)
            # The key covers the rounds that e depends on, before this block and in it.
            first, last = max(k * size - carried, 0), k * size + rounds
            key = inverse_bands[first:last].tobytes() + roots[first:last].tobytes()
            if k == 0 or key not in known:
                own = _inverse(matrices[k, :, size:])
                own[rounds:] = 0.0
                reach = matrices[k, :, size - carried : size]
                if k:
                    reach = (reach * roots[first : k * size]) @ undone
                carried_in = -own @ reach
                # The last block has no next one, so it passes nothing on; it may have fewer rounds
                # than e.
                to_next = np.zeros((carried, size))
                if k + 1 < count:
                    to_next[:, size - carried :] = differences / roots[last - carried : last]
                known[key] = _Block(own, carried_in, to_next @ own, to_next @ carried_in)
            blocks.append(known[key])
        return cls(num_rounds, size, carried, tuple(blocks))

    @classmethod
    def of_matrix(cls, workload: FloatArray) -> "WorkloadBlocks":
        """Returns any workload as one single block.

        Args:
          workload: A, an (n, n) lower-triangular array.
        """
        num_rounds = len(workload)
        none = np.empty((num_rounds, 0))
        return cls(num_rounds, num_rounds, 0, (_Block(workload, none, none.T, none[:0]),))

    def largest_condition(self, inverse_bands: FloatArray) -> float:
        """Returns an upper bound on the largest condition number of a diagonal block of A.

        The condition number is that for the maximum norm.

        Args:
          inverse_bands: The bands from which the blocks were made.
        """
        sums = np.sum(np.abs(inverse_bands), axis=1)
        found = 0.0
        for k, block in enumerate(self.blocks):
            own = float(np.max(np.sum(np.abs(block.own), axis=1)))
            found = max(found, own * float(np.max(sums[k * self.size : (k + 1) * self.size])))
        return found


class BandedCovariances:
    """The covariances of a banded strategy matrix's noise, and the errors and slopes from them.

    Attributes:
      squared_error: The squared error ||A C^-1||_F^2; infinite or NaN if it is beyond floats.
    """

    def __init__(self, bands: FloatArray, workload: WorkloadBlocks) -> None:
        """Computes the covariances block by block, from the first block to the last.

        Args:
          bands: (n, b) of C, ``bands[i, t] = C[i, i - t]``, zero where i < t, with a diagonal
            without zeros, b at most s + 1.
          workload: A.
        """
        self._shape = bands.shape
        self._workload = workload
        size, carried = workload.size, workload.num_carried
        matrices = _blocks_of(bands, size)
        count = len(matrices)
        inverses = np.empty((count, size, size))
        for k in range(count):
            inverses[k] = _inverse(matrices[k, :, size:])
        self._inverses = inverses
        self._block_norms = np.max(np.sum(np.abs(matrices[:, :, size:]), axis=2), axis=1)
        self._transitions = inverses @ matrices[:, :, :size]
        self._noise = inverses @ inverses.transpose(0, 2, 1)
        # This is V_k Cov(y_(k-1)); its negative is Cov(y_k, y_(k-1)).
        self._moved = np.zeros_like(inverses)
        # The three arrays are covariances of e_(k-1): with y_k, with itself, and with y_(k-1),
        # which slopes need.
        self._with_carried = np.zeros((count, size, carried))
        self._carried = np.zeros((count, carried, carried))
        self._before = np.zeros((count, size, carried))
        covariance, error = np.empty((size, size)), 0.0
        for k, block in enumerate(workload.blocks):
            if k:
                transition = self._transitions[k]
                np.matmul(transition, self._noise[k - 1], out=self._moved[k])
                np.matmul(self._moved[k], transition.T, out=covariance)
                self._noise[k] += covariance
                self._carry(k, workload.blocks[k - 1])
            square, mixed, carried_square = block.squares
            error += float(np.vdot(square, self._noise[k]))
            if carried:
                error += 2.0 * float(np.vdot(mixed, self._with_carried[k]))
                error += float(np.vdot(carried_square, self._carried[k]))
        self.squared_error = error

    def _carry(self, k: int, before: _Block) -> None:
        """Computes the covariances of e_(k-1) from the covariances of block k - 1."""
        carried = self._workload.num_carried
        if not carried:
            return
        own, reach = before.next_own, before.next_carried
        of_noise, joint = self._noise[k - 1], self._with_carried[k - 1]
        with_noise = of_noise @ own.T + joint @ reach.T
        crossed = own @ joint @ reach.T
        self._before[k] = with_noise
        self._with_carried[k] = -self._transitions[k] @ with_noise
        self._carried[k] = own @ of_noise @ own.T + crossed + crossed.T
        self._carried[k] += reach @ self._carried[k - 1] @ reach.T

    def largest_condition(self) -> float:
        """Returns the largest condition number of a diagonal block of C, in the maximum norm."""
        sums = np.max(np.sum(np.abs(self._inverses), axis=2), axis=1)
        return float(np.max(sums * self._block_norms))

    def squared_rows(self) -> FloatArray:
        """Returns the (n,) variances of the released sums a: squared row norms of A C^-1."""
        rows = np.empty((len(self._noise), self._workload.size))
        for k, block in enumerate(self._workload.blocks):
            rows[k] = np.einsum("ij,ij->i", block.own @ self._noise[k], block.own)
            if self._workload.num_carried:
                crossed = block.own @ self._with_carried[k]
                rows[k] += 2.0 * np.einsum("ij,ij->i", crossed, block.carried)
                square = block.carried @ self._carried[k]
                rows[k] += np.einsum("ij,ij->i", square, block.carried)
        return rows.ravel()[: self._shape[0]]

    def slope(self, weights: FloatArray | None = None) -> FloatArray:
        """Returns the (n, b) bands of the squared error's derivative by the entries of C.

        Args:
          weights: (n,) weights of rounds, for the derivative of the weighted sum of their
            variances; None for ones.
        """
        size = self._workload.size
        slopes = np.empty((len(self._noise), size, 2 * size))
        for k, of_noise, mixed, _ in self._costs(weights):
            weighted = -2.0 * self._inverses[k].T @ of_noise
            by_carried = -2.0 * self._inverses[k].T @ mixed
            slopes[k, :, size:] = weighted @ self._noise[k] + by_carried @ self._with_carried[k].T
            slopes[k, :, :size] = by_carried @ self._before[k].T - weighted @ self._moved[k]
        return _bands_of(slopes, *self._shape)

    def curvatures(self, weights: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Returns two vectors that approximate the squared error's second derivatives by C.

        The second derivative by C[i, j] is twice the product of (B^T W B)[i, i] and (X^-1)[j, j],
        plus further terms that are left out.

        Args:
          weights: (n,) weights of rounds.

        Returns:
          The diagonals of B^T W B and of X^-1, (n,) each.
        """
        of_rows = np.empty(self._noise.shape[:2])
        for k, of_noise, _, _ in self._costs(weights):
            inverse = self._inverses[k]
            of_rows[k] = np.einsum("ij,ij->j", of_noise @ inverse, inverse)
        of_columns = np.diagonal(self._noise, axis1=1, axis2=2)
        num_rounds = self._shape[0]
        return of_rows.ravel()[:num_rounds], of_columns.ravel()[:num_rounds]

    def dual_band(self) -> FloatArray:
        """Returns the (n, b) bands of X^-1 A^T A X^-1 for X = C^T C, which the dual needs."""
        size = self._workload.size
        duals = np.empty((len(self._noise), size, 2 * size))
        for k, of_noise, mixed, of_carried in self._costs():
            noise, joint = self._noise[k], self._with_carried[k]
            weighted = noise @ of_noise + joint @ mixed.T
            by_carried = noise @ mixed + joint @ of_carried
            duals[k, :, size:] = weighted @ noise + by_carried @ joint.T
            duals[k, :, :size] = by_carried @ self._before[k].T - weighted @ self._moved[k]
        earlier = np.zeros((size, size))
        for k, block in enumerate(self._workload.blocks):
            if k:
                transition = self._transitions[k]
                moved = transition @ earlier
                duals[k, :, :size] -= moved
                earlier = moved @ transition.T
                duals[k, :, size:] += earlier
            of_block = block.own @ self._noise[k] + block.carried @ self._with_carried[k].T
            earlier = earlier + of_block.T @ of_block
        return _bands_of(duals, *self._shape)

    def _costs(
        self, weights: FloatArray | None = None
    ) -> Iterator[tuple[int, FloatArray, FloatArray, FloatArray]]:
        """Yields the quadratic forms W_k, from the last block to the first: k, W_yy, W_ye, W_ee."""
        carried, (count, size, _) = self._workload.num_carried, self._noise.shape
        of_blocks = np.zeros((count, size))
        if weights is not None:
            of_blocks.ravel()[: len(weights)] = weights
        for k in range(count - 1, -1, -1):
            block = self._workload.blocks[k]
            squares = block.squares if weights is None else block.weighted_squares(of_blocks[k])
            if k + 1 == count:
                of_noise, mixed, of_carried = squares
            else:
                # The form in (y_k, e_k), after block k, becomes one in (y_k, e_(k-1)).
                transition = self._transitions[k + 1]
                of_noise = squares[0] + transition.T @ of_noise @ transition
                if carried:
                    own, reach = block.next_own, block.next_carried
                    half = -transition.T @ mixed
                    crossed = half @ own
                    of_noise += crossed + crossed.T + own.T @ of_carried @ own
                    mixed = squares[1] + (half + own.T @ of_carried) @ reach
                    of_carried = squares[2] + reach.T @ of_carried @ reach
            yield k, of_noise, mixed, of_carried


def _differences(count: int) -> FloatArray:
    """Returns an (m, m) matrix for differences of order 0 to m - 1, up to the last entry."""
    found = np.zeros((count, count))
    for order in range(count):
        for back in range(order + 1):
            found[order, count - 1 - back] = (-1.0) ** back * math.comb(order, back)
    return found


def _block_size(num_rounds: int, least: int) -> int:
    """Returns the number of rounds of a block, at least ``least``, for blocks of about one size."""
    count = max(1, num_rounds // max(least, _LEAST_BLOCK))
    return -(-num_rounds // count)


def _blocks_of(bands: FloatArray, size: int) -> FloatArray:
    """Returns each block's rows, in the columns of the block before and its own.

    The shape is (blocks, s, 2 s). Rows after the last round are rows of the identity.
    """
    num_rounds, width = bands.shape
    count = -(-num_rounds // size)
    filled = np.zeros((count * size, width))
    filled[:num_rounds] = bands
    filled[num_rounds:, 0] = 1.0
    blocks = np.zeros((count, size, 2 * size))
    _block_diagonals(blocks, width)[...] = filled.reshape(count, size, width)[:, :, ::-1]
    return blocks


def _bands_of(blocks: FloatArray, num_rounds: int, width: int) -> FloatArray:
    """Returns the (n, width) bands of blocks from :func:`_blocks_of`; entries outside are zero."""
    bands = _block_diagonals(blocks, width)[:, :, ::-1].reshape(-1, width)[:num_rounds].copy()
    first = min(width, num_rounds)
    bands[:first] *= np.tri(first, width)
    return bands


def _block_diagonals(blocks: FloatArray, width: int) -> FloatArray:
    """Returns a view of the last ``width`` entries of each row, up to the diagonal."""
    count, size, _ = blocks.shape
    of_block, of_row, of_column = blocks.strides
    return as_strided(
        blocks[:, :, size - width + 1 :],
        shape=(count, size, width),
        strides=(of_block, of_row + of_column, of_column),
    )


def _inverse(lower: FloatArray) -> FloatArray:
    """Returns the inverse of a lower-triangular matrix."""
    # LAPACK reads a matrix that is stored by rows as its transpose.
    inverse, _ = dtrtri(lower.T, lower=0)
    return np.asarray(np.ascontiguousarray(np.triu(inverse).T))


def square_root_coefficients(
    num_coefficients: int, momentum: float = 0.0, *, inverse: bool = False
) -> FloatArray:
    """Returns the coefficients of ((1 - x) (1 - beta x))^(-1/2): 1, 1/2, 3/8, ... for beta 0.

    The Toeplitz matrix C with these coefficients is the square root of the prefix sum, C C = A
    (Fichtenberger, Henzinger and Upadhyay; Henzinger, Upadhyay and Upadhyay), and of
    momentum SGD's workload with constant learning rates (Kalinin and Lampert).

    Args:
      num_coefficients: The number of coefficients, at least 1.
      momentum: beta, at least 0 and below 1.
      inverse: Whether to return the reciprocal's coefficients: 1, -1/2, -1/8, ... for beta 0.

    Returns:
      (num_coefficients,) float64.
    """
    lags = np.arange(1, num_coefficients)
    factors = (2.0 * lags - (3.0 if inverse else 1.0)) / (2.0 * lags)
    series = np.concatenate([[1.0], np.cumprod(factors)])
    return _times_itself_at(series, momentum)


def _times_itself_at(series: FloatArray, momentum: float) -> FloatArray:
    """Returns the product of a series f(x) and f(beta x), for the momentum beta."""
    if momentum == 0.0:
        return series
    return product_of_series(series, series * momentum ** np.arange(len(series)), len(series))


def product_of_series(left: FloatArray, right: FloatArray, length: int) -> FloatArray:
    """Returns the first ``length`` coefficients of a product of series, zero after the last one."""
    left, right = left[:length], right[:length]
    if min(len(left), len(right)) <= 32:
        full = np.convolve(left, right)
    else:
        size = scipy.fft.next_fast_len(len(left) + len(right) - 1, real=True)
        spectrum = scipy.fft.rfft(left, size, workers=-1) * scipy.fft.rfft(right, size, workers=-1)
        full = scipy.fft.irfft(spectrum, size, workers=-1)[: len(left) + len(right) - 1]
    return padded(full, length)


def correlation(values: FloatArray, series: FloatArray, length: int) -> FloatArray:
    """Returns sum_t values[t] series[t - j] for j below ``length``: a product's adjoint."""
    count = len(values)
    return product_of_series(values[::-1], series, count)[::-1][:length]


def reciprocal_series(series: FloatArray, length: int) -> FloatArray:
    """Returns the first ``length`` coefficients of the reciprocal series 1 / c(x).

    Args:
      series: c, with c_0 not zero.
      length: The number of coefficients.

    Returns:
      (length,) float64.
    """
    if length <= _LONGEST_RECURSION:
        impulse = np.zeros(length)
        impulse[0] = 1.0
        return np.asarray(scipy.signal.lfilter([1.0], series[:length], impulse))
    # Newton's iteration y <- y (2 - c y) doubles the number of correct coefficients.
    inverse = reciprocal_series(series, _LONGEST_RECURSION)
    while len(inverse) < length:
        count = min(2 * len(inverse), length)
        residual = product_of_series(series, inverse, count)
        residual[0] -= 1.0
        inverse = padded(inverse, count) - product_of_series(inverse, residual, count)
    return inverse


def padded(series: FloatArray, length: int) -> FloatArray:
    """Returns the series with ``length`` coefficients, cut off or filled with zeros."""
    if len(series) >= length:
        return series[:length].copy()
    return np.concatenate([series, np.zeros(length - len(series))])


def nuclear_norm_from_below(matrix: FloatArray) -> float:
    """Returns a lower bound on the sum of singular values that holds in spite of rounding.

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
