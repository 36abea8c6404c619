"""Banded matrices of any shape of band, in O(n b) memory, and their products in O(n b^2)."""

import dataclasses

import numpy as np
from numpy.lib.stride_tricks import as_strided

# Rows of a tile of a product: at least so many, and a band is so many tiles wide.
_LEAST_ROWS, _TILES_OF_BAND = 64, 8


@dataclasses.dataclass(frozen=True, eq=False)
class BandedMatrix:
    """A square matrix M with M[i, j] = 0 unless -lower <= j - i <= upper.

    Attributes:
      lower: The diagonals below the main one.
      upper: The diagonals above it.
      rows: (n, lower + upper + 1) float64 with ``rows[i, t] = M[i, i - lower + t]``, zero where
        there is no such column.
    """

    lower: int
    upper: int
    rows: np.ndarray

    @classmethod
    def lower_triangular(cls, bands: np.ndarray) -> "BandedMatrix":
        """Returns the matrix of bands as they are stored elsewhere.

        Args:
          bands: (n, b) with ``bands[i, t] = M[i, i - t]``, zero where i < t.
        """
        return cls(bands.shape[1] - 1, 0, np.ascontiguousarray(bands[:, ::-1]))

    @classmethod
    def symmetric(cls, bands: np.ndarray) -> "BandedMatrix":
        """Returns the symmetric matrix of which bands on and below the diagonal are given.

        Args:
          bands: As for :meth:`lower_triangular`.
        """
        below = cls.lower_triangular(bands)
        above = below.transposed()
        return cls(
            below.lower, below.lower, np.concatenate([below.rows, above.rows[:, 1:]], axis=1)
        )

    @property
    def diagonal(self) -> np.ndarray:
        """(n,): the main diagonal, a view."""
        return self.rows[:, self.lower]

    def transposed(self) -> "BandedMatrix":
        """Returns M^T."""
        num_rounds, width = self.rows.shape
        rows = np.zeros_like(self.rows)
        for t in range(width):
            # M[i, i + offset] is M^T[i + offset, i].
            offset = t - self.lower
            below, above = max(offset, 0), max(-offset, 0)
            count = max(num_rounds - abs(offset), 0)
            rows[below : below + count, width - 1 - t] = self.rows[above : above + count, t]
        return BandedMatrix(self.upper, self.lower, rows)

    def times(self, other: "BandedMatrix") -> "BandedMatrix":
        """Returns the product with another banded matrix.

        Args:
          other: Of the same size.
        """
        num_rounds, width = self.rows.shape
        lower, upper = self.lower + other.lower, self.upper + other.upper
        rows = np.empty((num_rounds, lower + upper + 1))
        # Small tiles hold few zeros from outside of the bands, large ones take fewer calls.
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
        """Returns the matrix without its outer diagonals.

        Args:
          lower: How many are kept below the main diagonal, at most those that there are.
          upper: How many are kept above it.
        """
        first = self.lower - lower
        return BandedMatrix(lower, upper, self.rows[:, first : first + lower + upper + 1].copy())

    def dense_rows(self, start: int, stop: int) -> np.ndarray:
        """Returns rows ``start`` to ``stop - 1`` with columns start - lower to stop - 1 + upper.

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
        """Returns the sum of the squares of all entries."""
        return float(np.vdot(self.rows, self.rows))

    def largest_row_sum(self) -> float:
        """Returns the largest sum of magnitudes of a row: the operator norm for maxima."""
        return float(np.max(np.sum(np.abs(self.rows), axis=1)))


def _diagonals(dense: np.ndarray, count: int, width: int) -> np.ndarray:
    """A view of ``width`` entries of each row, from a column that moves on with the rows."""
    of_row, of_column = dense.strides
    return as_strided(dense, shape=(count, width), strides=(of_row + of_column, of_column))
