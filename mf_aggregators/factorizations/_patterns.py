"""The patterns of (k, b)-participation, and their constraints on the columns of a matrix.

Patterns are windows over the classes of rounds modulo b. A constraint on columns is equal norms, or
a limit on the sums of squared norms over each pattern.
"""

import dataclasses

import numpy as np
import scipy.optimize

from mf_aggregators.kernel.numbers import BoolArray, FloatArray, IntArray


@dataclasses.dataclass(frozen=True)
class PatternLayout:
    """Rounds by class modulo b: position a of class c is round c + a b, if that is below n.

    A maximal pattern is ``most`` positions in a row of one class, or a whole class that
    has no more; pattern w of class c starts at position w.

    Attributes:
      num_rounds: n.
      separation: b.
      most: k, at most ceil(n / b).
    """

    num_rounds: int
    separation: int
    most: int

    @property
    def positions(self) -> int:
        """The number of positions K of the longest class."""
        return -(-self.num_rounds // self.separation)

    @property
    def rounds(self) -> IntArray:
        """(b, K) int rounds; those of n and more do not exist."""
        classes = np.arange(self.separation)[:, np.newaxis]
        return classes + self.separation * np.arange(self.positions)

    @property
    def exists(self) -> BoolArray:
        """(b, K) bool: which positions are rounds."""
        return self.rounds < self.num_rounds

    @property
    def order(self) -> IntArray:
        """(n,) int: the rounds by class."""
        return np.asarray(self.rounds[self.exists])

    @property
    def windows(self) -> BoolArray:
        """(b, W) bool: which patterns are maximal patterns of a class."""
        starts = np.arange(self.positions - self.most + 1)
        sizes = np.sum(self.exists, axis=1, keepdims=True)
        return np.asarray((starts + self.most <= sizes) | ((starts == 0) & (sizes < self.most)))

    @property
    def held(self) -> BoolArray:
        """(b, K, W) bool: which positions each maximal pattern holds."""
        positions = np.arange(self.positions)[:, np.newaxis]
        starts = np.arange(self.positions - self.most + 1)
        holds = (positions >= starts) & (positions < starts + self.most)
        return np.asarray(holds & self.windows[:, np.newaxis] & self.exists[:, :, np.newaxis])

    def by_position(self, values: FloatArray) -> FloatArray:
        """Returns (b, K) values of (n,) rounds, zero where there is no round."""
        table = np.zeros((self.separation, self.positions))
        rounds = self.rounds
        exists = self.exists
        table[exists] = values[rounds[exists]]
        return table

    def by_round(self, table: FloatArray) -> FloatArray:
        """Returns (n,) values of (b, K) positions."""
        values = np.empty(self.num_rounds)
        exists = self.exists
        values[self.rounds[exists]] = table[exists]
        return values

    def rows_by_class(self, matrix: FloatArray) -> FloatArray:
        """Returns (b, K, m) rows of an (n, m) matrix by class, zero where there is no round."""
        shape = (self.separation, self.positions, matrix.shape[1])
        if shape[0] * shape[1] == self.num_rounds:
            return matrix.reshape(shape)
        padded = np.zeros(shape)
        padded[self.exists] = matrix
        return padded

    def blocks_times(self, blocks: FloatArray, matrix: FloatArray) -> FloatArray:
        """Returns (n, m): (b, K, K) diagonal blocks times an (n, m) matrix, rows by class."""
        times = np.multiply if self.positions == 1 else np.matmul
        product = times(blocks, self.rows_by_class(matrix)).reshape(-1, matrix.shape[1])
        is_full = len(product) == self.num_rounds
        return np.asarray(product if is_full else product[self.exists.ravel()])

    def times_blocks(self, matrix: FloatArray, blocks: FloatArray) -> FloatArray:
        """Returns (m, n): an (m, n) matrix, columns by class, times (b, K, K) diagonal blocks."""
        return self.blocks_times(blocks.transpose(0, 2, 1), matrix.T).T

    @property
    def classes_by_length(self) -> tuple[int, int]:
        """The number of classes with all positions, which come first, and with one less."""
        full = self.num_rounds - self.separation * (self.positions - 1)
        return full, self.separation - full

    def fewer(self, factor: int) -> "PatternLayout":
        """Returns the layout of as many positions and fewer classes of each length.

        Args:
          factor: How many classes become one.
        """
        full, short = (max(count // factor, min(count, 1)) for count in self.classes_by_length)
        separation = full + short
        return PatternLayout(separation * (self.positions - 1) + full, separation, self.most)

    def refined(self, table: FloatArray, fewer: "PatternLayout") -> FloatArray:
        """Returns a (b, m) table between the classes of a (b', m) one.

        Args:
          table: By the classes of ``fewer``.
          fewer: A layout as :meth:`fewer` returns it.
        """
        found, start, start_of_fewer = np.empty((self.separation, table.shape[1])), 0, 0
        for count, known in zip(self.classes_by_length, fewer.classes_by_length, strict=True):
            places = (np.arange(count) + 0.5) / max(count, 1)
            known_places = (np.arange(known) + 0.5) / max(known, 1)
            for column in range(table.shape[1] if count else 0):
                values = table[start_of_fewer : start_of_fewer + known, column]
                found[start : start + count, column] = np.interp(places, known_places, values)
            start, start_of_fewer = start + count, start_of_fewer + known
        return found

    def sums(self, table: FloatArray) -> FloatArray:
        """Returns (b, W) sums over each pattern of (b, K) values, zero where there is none."""
        sums = np.concatenate([np.zeros((len(table), 1)), np.cumsum(table, axis=1)], axis=1)
        starts = np.arange(self.positions - self.most + 1)
        return np.where(self.windows, sums[:, starts + self.most] - sums[:, starts], 0.0)

    def cover(self, values: FloatArray) -> FloatArray:
        """Returns (b, K) sums over the patterns that hold a position of (b, W) values."""
        positions = np.arange(self.positions)
        return self._sums_over(values, *self._holding(positions, positions))

    def cover_pairs(self, values: FloatArray) -> FloatArray:
        """Returns (b, K, K) sums over the patterns that hold both positions of (b, W) values."""
        positions = np.arange(self.positions)
        holding = self._holding(
            np.minimum(positions[:, np.newaxis], positions),
            np.maximum(positions[:, np.newaxis], positions),
        )
        return self._sums_over(values, *holding)

    def pair_sums(self, blocks: FloatArray) -> FloatArray:
        """Returns (b, W) sums over both positions in each pattern of (b, K, K) blocks."""
        starts = np.arange(self.positions - self.most + 1)
        stops = starts + self.most
        table = np.zeros((len(blocks), self.positions + 1, self.positions + 1))
        table[:, 1:, 1:] = np.cumsum(np.cumsum(blocks, axis=1), axis=2)
        return np.asarray(
            table[:, stops, stops]
            - table[:, starts, stops]
            - table[:, stops, starts]
            + table[:, starts, starts]
        )

    def tightest(self, sums: FloatArray) -> FloatArray:
        """Returns (b, K): the largest of (b, W) values over the patterns that hold a position.

        One where there is no round.
        """
        largest = np.max(np.where(self.held, sums[:, np.newaxis], 0.0), axis=2)
        return np.where(self.exists, largest, 1.0)

    @staticmethod
    def _sums_over(values: FloatArray, first: IntArray, last: IntArray) -> FloatArray:
        """Sums of (b, W) values over ranges of patterns, first to before last."""
        sums = np.concatenate([np.zeros((len(values), 1)), np.cumsum(values, axis=1)], axis=1)
        return np.asarray(sums[:, last] - sums[:, first])

    def _holding(self, low: IntArray, high: IntArray) -> tuple[IntArray, IntArray]:
        """The range of patterns, first to before last, that hold positions low to high."""
        count = self.positions - self.most + 1
        first = np.maximum(0, high - self.most + 1)
        return first, np.maximum(np.minimum(low, count - 1) + 1, first)


@dataclasses.dataclass(frozen=True)
class ColumnNorms:
    """The constraint on squared column norms: at most one in sum over every pattern.

    A column's squared scale is the largest sum over the patterns that hold it, for
    which the p-norm of the sums, no smaller and smooth, stands in. Where no two patterns
    share a round, it is the one sum itself. Patterns of one round make all norms equal.

    Attributes:
      num_bands: The bands b of C.
      layout: The patterns.
    """

    num_bands: int
    layout: PatternLayout

    @classmethod
    def equal(cls, num_rounds: int, num_bands: int) -> "ColumnNorms":
        """Returns the constraint that all columns have norm one."""
        return cls(num_bands, PatternLayout(num_rounds, num_rounds, 1))

    @property
    def are_equal(self) -> bool:
        """Whether each pattern has one round."""
        return self.layout.positions == 1

    @property
    def sharpness(self) -> tuple[float, ...]:
        """The exponents p of p-norms that replace maxima, to try in turn."""
        is_one_sum = self.layout.positions == self.layout.most
        return (1.0,) if is_one_sum else (16.0, 128.0, 1024.0, 8192.0)

    def scales(self, squared_norms: FloatArray, sharpness: float) -> FloatArray:
        """Returns (n,) squares of the scales that divide the columns of C.

        Args:
          squared_norms: (n,) of the columns before.
          sharpness: The exponent p.
        """
        if self.are_equal:
            return squared_norms
        layout = self.layout
        sums = layout.sums(layout.by_position(squared_norms))
        tightest = layout.tightest(sums)
        # Shares of the largest sum are at most one, so that their powers stay in range.
        shares = np.where(layout.held, sums[:, np.newaxis] / tightest[:, :, np.newaxis], 0.0)
        norms = np.sum(shares**sharpness, axis=2) ** (1.0 / sharpness)
        return layout.by_round(tightest * norms)

    def by_squared_norms(
        self, along: FloatArray, squared_norms: FloatArray, sharpness: float
    ) -> FloatArray:
        """Returns (n,): the part of the slope that changes the scales, a multiple of each column.

        Args:
          along: (n,) products of each scaled column with its slope.
          squared_norms: (n,) of the columns before scaling.
          sharpness: The exponent p.
        """
        if self.are_equal:
            return along / squared_norms
        layout = self.layout
        sums = layout.sums(layout.by_position(squared_norms))
        scales = layout.by_position(self.scales(squared_norms, sharpness))
        scales[~layout.exists] = 1.0
        shares = np.where(layout.held, sums[:, np.newaxis] / scales[:, :, np.newaxis], 0.0)
        powers = np.where(layout.held, shares ** (sharpness - 1.0), 0.0)
        by_pattern = np.sum((layout.by_position(along) / scales)[:, :, np.newaxis] * powers, axis=1)
        return layout.by_round(layout.cover(by_pattern))

    def squared_sensitivity(self, squared_norms: FloatArray) -> float:
        """Returns the largest sum of (n,) squared norms over a pattern, of orthogonal columns."""
        if self.are_equal:
            return float(np.max(squared_norms))
        return float(np.max(self.layout.sums(self.layout.by_position(squared_norms))))

    def dual_diagonal(self, diagonal: FloatArray) -> tuple[FloatArray, float]:
        """Returns (n,), a diagonal of V that the constraint allows, and the sum of its weights.

        V[i, i] must be the sum of weights of the patterns that hold round i; the closest
        such diagonal to a given one, in relative terms, is taken.
        """
        if self.are_equal:
            return diagonal, float(np.sum(diagonal))
        layout = self.layout
        table, weights = layout.by_position(diagonal), np.zeros(layout.windows.shape)
        for row, exists, windows, held, found in zip(
            table, layout.exists, layout.windows, layout.held, weights, strict=True
        ):
            target = row[exists]
            holds = held[np.ix_(exists, windows)]
            relative = holds / target[:, np.newaxis]
            try:
                found[windows], _ = scipy.optimize.nnls(relative, np.ones(len(target)))
            except RuntimeError:
                # It ran out of iterations; any non-negative weights give a bound.
                solution, *_ = np.linalg.lstsq(relative, np.ones(len(target)), rcond=None)
                found[windows] = np.maximum(solution, 0.0)
        return layout.by_round(layout.cover(weights)), float(np.sum(weights))
