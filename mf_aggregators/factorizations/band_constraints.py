"""What limits the columns of a banded strategy matrix: equal norms, or sums over patterns."""

import dataclasses
from typing import Protocol

import numpy as np
import scipy.optimize

from mf_aggregators.factorizations.pattern_layout import PatternLayout


class ColumnConstraint(Protocol):
    """A limit on the norms of the columns of C, which any C is scaled to."""

    @property
    def num_bands(self) -> int:
        """The bands b of C."""

    @property
    def sharpness(self) -> tuple[float, ...]:
        """The exponents p of p-norms in place of maxima, to try in turn."""

    def scales(self, squared_norms: np.ndarray, sharpness: float) -> np.ndarray:
        """Returns (n,): what each column of C is divided by, squared.

        Args:
          squared_norms: (n,) of the columns before.
          sharpness: The exponent p.
        """

    def by_squared_norms(
        self, along: np.ndarray, squared_norms: np.ndarray, sharpness: float
    ) -> np.ndarray:
        """Returns (n,): the part of the slope that changes the scales, a multiple of each column.

        Args:
          along: (n,) products of each scaled column with its slope.
          squared_norms: (n,) of the columns before scaling.
          sharpness: The exponent p.
        """

    def squared_sensitivity(self, squared_norms: np.ndarray) -> float:
        """Returns the largest squared norm that a participation pattern can reach.

        Args:
          squared_norms: (n,) of the columns.
        """

    def dual_diagonal(self, diagonal: np.ndarray) -> tuple[np.ndarray, float]:
        """Returns (n,), a diagonal of V that the constraint allows, and the sum of its weights.

        Args:
          diagonal: (n,) that it should be close to.
        """


@dataclasses.dataclass(frozen=True)
class EqualNorms:
    """Columns of norm one."""

    num_bands: int
    sharpness: tuple[float, ...] = (1.0,)

    def scales(self, squared_norms: np.ndarray, sharpness: float) -> np.ndarray:
        """Returns what each column of C is divided by, squared."""
        return squared_norms

    def by_squared_norms(
        self, along: np.ndarray, squared_norms: np.ndarray, sharpness: float
    ) -> np.ndarray:
        """Returns the part of the slope that changes the scales: a multiple of each column."""
        return along / squared_norms

    def squared_sensitivity(self, squared_norms: np.ndarray) -> float:
        """Returns the largest squared norm."""
        return float(np.max(squared_norms))

    def dual_diagonal(self, diagonal: np.ndarray) -> tuple[np.ndarray, float]:
        """Returns a diagonal of V that the constraint allows, and the sum of its weights."""
        return diagonal, float(np.sum(diagonal))


@dataclasses.dataclass(frozen=True)
class PatternNorms:
    """Squared column norms that sum to at most one over every pattern of (k, b)-participation.

    A column's squared scale is the largest sum over the patterns that hold it, for
    which the p-norm of the sums, no smaller and smooth, stands in. Where no two patterns
    share a round, it is the one sum itself.
    """

    num_bands: int
    layout: PatternLayout

    @property
    def sharpness(self) -> tuple[float, ...]:
        """The exponents p to try in turn."""
        return (
            (1.0,) if self.layout.positions == self.layout.most else (16.0, 128.0, 1024.0, 8192.0)
        )

    def scales(self, squared_norms: np.ndarray, sharpness: float) -> np.ndarray:
        """Returns what each column of C is divided by, squared."""
        layout = self.layout
        sums = layout.sums(layout.by_position(squared_norms))
        tightest = layout.tightest(sums)
        # Shares of the largest sum, at most one, whose powers stay in range.
        shares = np.where(layout.held, sums[:, np.newaxis] / tightest[:, :, np.newaxis], 0.0)
        norms = np.sum(shares**sharpness, axis=2) ** (1.0 / sharpness)
        return layout.by_round(tightest * norms)

    def by_squared_norms(
        self, along: np.ndarray, squared_norms: np.ndarray, sharpness: float
    ) -> np.ndarray:
        """Returns the part of the slope that changes the scales: a multiple of each column."""
        layout = self.layout
        sums = layout.sums(layout.by_position(squared_norms))
        scales = layout.by_position(self.scales(squared_norms, sharpness))
        scales[~layout.exists] = 1.0
        shares = np.where(layout.held, sums[:, np.newaxis] / scales[:, :, np.newaxis], 0.0)
        powers = np.where(layout.held, shares ** (sharpness - 1.0), 0.0)
        by_pattern = np.sum((layout.by_position(along) / scales)[:, :, np.newaxis] * powers, axis=1)
        return layout.by_round(layout.cover(by_pattern))

    def squared_sensitivity(self, squared_norms: np.ndarray) -> float:
        """Returns the largest sum over a pattern: columns of one are orthogonal."""
        return float(np.max(self.layout.sums(self.layout.by_position(squared_norms))))

    def dual_diagonal(self, diagonal: np.ndarray) -> tuple[np.ndarray, float]:
        """Returns a diagonal of V that the constraint allows, and the sum of its weights.

        V[i, i] must be the sum of weights of the patterns that hold round i; the closest
        such diagonal, in relative terms, is taken.
        """
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
