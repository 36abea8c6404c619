"""C with few bands: rows of Y = C^-1 Z by forward substitution (BandMF Sec. 2, Alg. 9).

From C Y = Z, ``C[i, i] Y[i] = Z[i] - sum_{t=1}^{b-1} C[i, i - t] Y[i - t]``.
"""

import abc
import dataclasses

import numpy as np
import scipy.linalg

from mf_aggregators.arrays import FloatArray, RealArray
from mf_aggregators.linear_algebra.banded_matrices import BandedCovariances, WorkloadBlocks
from mf_aggregators.noise.recursions.recursion import NoiseRecursion

# With many bands, what is kept is large, and a block of rows is to add little to it.
_MANY_EARLIER_ROWS = 128
_FEWEST_ROWS_PER_BLOCK = 24
_EARLIER_ROWS_PER_ROW_OF_BLOCK = 14


class SubstitutionNoise(NoiseRecursion):
    """Row i follows from row i of Z and the b - 1 rows before it, kept in a ring."""

    @property
    @abc.abstractmethod
    def table(self) -> FloatArray:
        """(n, b) float64 of C[i, i - t] for row i and lag t; (1, b) if all rows have the same."""

    def _check_bands(self) -> None:
        """Raises ValueError for a new recursion without a round or without a diagonal."""
        if not self.num_rounds or not self.num_bands:
            raise ValueError(f"{type(self).__name__} must have at least a round and a band.")

    @property
    def num_bands(self) -> int:
        """The number of bands b."""
        return int(self.table.shape[1])

    def weights(self, round_index: int) -> FloatArray:
        """Returns the (b,) entries C[i, i], C[i, i - 1], ... of row i."""
        table = self.table
        return np.asarray(table[round_index if len(table) > 1 else 0])

    @property
    def num_earlier_rows(self) -> int:
        """The rows before a row that it follows from, b - 1."""
        return self.num_bands - 1

    @property
    def rows_per_block(self) -> int:
        """The most rows that are worth making at once."""
        earlier = self.num_earlier_rows
        if earlier < _MANY_EARLIER_ROWS:
            return super().rows_per_block
        return max(_FEWEST_ROWS_PER_BLOCK, earlier // _EARLIER_ROWS_PER_ROW_OF_BLOCK)

    def earlier(self, i: int, history: RealArray) -> FloatArray:
        """Substitutes the rows in the ring, whose slot j mod (b - 1) holds row j."""
        slots = self.num_earlier_rows
        if not slots:
            return np.zeros(history.shape[1:])
        lags = (i - 1 - np.arange(slots)) % slots + 1
        # Slots that no earlier round has filled count for nothing.
        weights = np.where(lags <= i, self.weights(i)[lags], 0.0)
        return -np.tensordot(weights, history, axes=1)

    def following(
        self, i: int, history: RealArray, row_of_z: RealArray, row: RealArray
    ) -> RealArray:
        """Keeps the row in place of the oldest one."""
        if self.num_earlier_rows:
            history[i % self.num_earlier_rows] = row
        return history

    def block_transition(self, start: int, end: int) -> FloatArray:
        """The entries of C off its diagonal, for the rows before the block and its own."""
        size, num_earlier = end - start, min(self.num_earlier_rows, start)
        matrix = np.zeros((size, num_earlier + size))
        for row in range(size):
            last = num_earlier + row
            lags = min(self.num_bands, last + 1)
            matrix[row, last - lags + 1 : last] = -self.weights(start + row)[1:lags][::-1]
        return matrix


@dataclasses.dataclass(frozen=True, eq=False)
class BandedNoise(SubstitutionNoise):
    """C has few bands.

    Attributes:
      bands: (n, b) float64 with ``bands[i, t] = C[i, i - t]``; entries where i < t become zero.
    """

    bands: FloatArray

    def __post_init__(self) -> None:
        self._freeze("bands", (None, None))
        self._check_bands()
        self._clear_lags_before_first_round("bands")

    @property
    def num_rounds(self) -> int:
        """The number of rounds n."""
        return int(self.bands.shape[0])

    @property
    def table(self) -> FloatArray:
        """The bands."""
        return self.bands

    @property
    def diagonal(self) -> FloatArray:
        """One over the diagonal of C, (n,) float64."""
        return 1.0 / self.bands[:, 0]

    def divided_by(self, divisor: float) -> NoiseRecursion:
        """Returns the recursion of C / divisor."""
        return BandedNoise(self.bands / divisor)

    def row_norms(self) -> FloatArray:
        """Returns the (n,) L2 norms of the rows of C^-1, in O(n b^2) operations."""
        identity = WorkloadBlocks.identity(self.num_rounds, self.num_bands)
        with np.errstate(all="ignore"):
            squares = BandedCovariances(self.bands, identity).squared_rows()
            # Beyond floats means beyond everything that is compared with it.
            return np.where(squares < np.inf, np.sqrt(squares), np.inf)

    def _with_unit_diagonal(self) -> NoiseRecursion:
        columns = np.arange(self.num_rounds)[:, np.newaxis] - np.arange(self.num_bands)
        return BandedNoise(self.bands / self.bands[np.maximum(columns, 0), 0])

    def noising_matrix(self) -> FloatArray:
        """Returns C^-1 as a dense (n, n) float64 array."""
        dense = matrix_from_bands(self.bands)
        identity = np.eye(self.num_rounds)
        inverse = scipy.linalg.solve_triangular(dense, identity, lower=True, check_finite=False)
        return np.asarray(inverse)


@dataclasses.dataclass(frozen=True, eq=False)
class ToeplitzNoise(SubstitutionNoise):
    """C = T D with T a banded Toeplitz matrix and D diagonal: BandedNoise in b + n numbers.

    With U = T^-1 Z, row i of the noise is ``row_scales[i] * U[i]``, and U follows by
    forward substitution with the same coefficients in every round.

    Attributes:
      num_rounds: n.
      coefficients: (b,) float64: the first column of T; ``coefficients[0]`` is not zero, and those
        of more lags than there are rounds become zero.
      row_scales: (n,) float64: the diagonal of D^-1; None for ones.
    """

    num_rounds: int
    coefficients: FloatArray
    row_scales: FloatArray | None = None

    def __post_init__(self) -> None:
        self._freeze_num_rounds(self.num_rounds)
        self._freeze("coefficients", (None,))
        self._check_bands()
        if self.row_scales is not None:
            self._freeze("row_scales", (self.num_rounds,))
        self._clear_lags_before_first_round("coefficients")

    @property
    def table(self) -> FloatArray:
        """The coefficients, (1, b)."""
        return self.coefficients[np.newaxis]

    @property
    def diagonal(self) -> FloatArray:
        """The row scales over the first coefficient, (n,) float64."""
        scales = np.ones(self.num_rounds) if self.row_scales is None else self.row_scales
        return np.asarray(scales / self.coefficients[0])

    @property
    def is_toeplitz(self) -> bool:
        """Always: the rows over the diagonal are those of T^-1 Z, but for a factor."""
        return True

    def divided_by(self, divisor: float) -> NoiseRecursion:
        """Returns the recursion of C / divisor."""
        return dataclasses.replace(self, coefficients=self.coefficients / divisor)

    def _with_unit_diagonal(self) -> NoiseRecursion:
        return ToeplitzNoise(self.num_rounds, self.coefficients / self.coefficients[0])

    def block_signature(self, start: int, end: int) -> object:
        """Blocks of one size with as many earlier rows have the same weights."""
        return end - start, min(self.num_earlier_rows, start)


def matrix_from_bands(bands: FloatArray) -> FloatArray:
    """Returns the dense lower-triangular C with ``C[i, i - t] = bands[i, t]``."""
    num_rounds, num_bands = bands.shape
    dense = np.zeros((num_rounds, num_rounds))
    for t in range(num_bands):
        rows = np.arange(t, num_rounds)
        dense[rows, rows - t] = bands[t:, t]
    return dense


def bands_of_matrix(matrix: FloatArray, num_bands: int) -> FloatArray:
    """Returns (n, b) ``bands[i, t] = matrix[i, i - t]``, zero where i < t."""
    num_rounds = matrix.shape[0]
    bands = np.zeros((num_rounds, num_bands))
    for t in range(num_bands):
        bands[t:, t] = np.diagonal(matrix, -t)
    return bands
