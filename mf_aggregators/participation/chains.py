"""Markov chains of participations with signs: their second moments bound errors from below.

A chain begins in round i with probability p_i, goes on from i to j with probability P_ij and ends
otherwise; its sign stays, on average, by r_ij. ``lower_bounds`` says what its second moments V are
for, and that rounds may be cells of rounds.
"""

import dataclasses

import numpy as np

from mf_aggregators.kernel.numbers import FloatArray, IntArray
from mf_aggregators.participation import Participation

# The start: logarithms of odds to go on after b rounds, and after more.
_ODDS_OF_LEAST_GAP, _ODDS_OF_LARGER_GAPS, _FALL_OF_ODDS = 4.0, 2.0, 2.0
_FIRST_SIGN, _FIRST_LOG_OF_LATER_STARTS = 0.7, -4.0


@dataclasses.dataclass(frozen=True, eq=False)
class Parameters:
    """Parameters that a search for a chain varies.

    Attributes:
      starts: (n',) logarithms of the odds to begin in a cell.
      moves: (moves,) logarithms of the odds to go on from one cell to another.
      signs: (moves,) inverse hyperbolic tangents of r.
      rows: (n',) logarithms of weights of rounds.
    """

    starts: FloatArray
    moves: FloatArray
    signs: FloatArray
    rows: FloatArray

    def packed(self) -> FloatArray:
        """Returns all of them in a row."""
        return np.concatenate([self.starts, self.moves, self.signs, self.rows])

    def row_weights(self) -> FloatArray:
        """Returns the (n',) weights of rounds, relative to the largest."""
        return np.asarray(np.exp(self.rows - np.max(self.rows)))


@dataclasses.dataclass(frozen=True, eq=False)
class _Moments:
    """The second moments V' of a chain, and the numbers that their derivatives need.

    Attributes:
      second: V', (n', n').
      starts: (n',) p.
      moves: (n', n') P.
      signs: (n', n') r.
      sums: For l = 0, ..., k - 1, the sum of Q^0, ..., Q^l.
      visits: For each participation, (n',) how probable it is in a cell.
    """

    second: FloatArray
    starts: FloatArray
    moves: FloatArray
    signs: FloatArray
    sums: list[FloatArray]
    visits: list[FloatArray]


@dataclasses.dataclass(frozen=True, eq=False)
class Chain:
    """Which chains of participations there are.

    Attributes:
      gaps: (n', n') cells from one to another, where that may follow; 0 elsewhere.
      separation: The least distance of two participations, in cells.
      most: The most participations.
    """

    gaps: IntArray
    separation: int
    most: int

    @property
    def num_cells(self) -> int:
        """The cells n'."""
        return len(self.gaps)

    @classmethod
    def under(cls, participation: Participation, num_rounds: int, size: int) -> "Chain":
        """Returns the chains that a schema allows.

        Args:
          participation: The schema.
          num_rounds: n.
          size: The rounds of a cell.
        """
        count = num_rounds // size
        separation = -(-participation.separation_in(num_rounds) // size)
        most = min(participation.most_participations(num_rounds), -(-count // separation))
        gaps = np.maximum(np.arange(count) - np.arange(count)[:, np.newaxis], 0)
        if most == 1:
            gaps = np.zeros_like(gaps)
        elif allows_larger_gaps(participation, num_rounds):
            gaps = np.where(gaps >= separation, gaps, 0)
        else:
            gaps = np.where(gaps == separation, gaps, 0)
        return cls(gaps, separation, most)

    def start(self) -> Parameters:
        """Returns where a search begins."""
        gaps = self.gaps[self.gaps > 0]
        excess = (gaps - self.separation) / self.separation
        fewer = np.log(max(self.separation / 4.0, 1.0))
        odds = np.where(
            excess == 0.0, _ODDS_OF_LEAST_GAP, _ODDS_OF_LARGER_GAPS - fewer - _FALL_OF_ODDS * excess
        )
        starts = np.zeros(self.num_cells)
        if self.most > 1:
            starts[self.separation :] = _FIRST_LOG_OF_LATER_STARTS
        signs = np.full(len(gaps), _FIRST_SIGN)
        return Parameters(starts, odds, signs, np.zeros(self.num_cells))

    def unpacked(self, packed: FloatArray) -> Parameters:
        """Returns the parameters that a row of them stands for."""
        moves = int(np.count_nonzero(self.gaps))
        ends = np.cumsum([self.num_cells, moves, moves])
        return Parameters(*np.split(packed, ends))

    def moments(self, parameters: Parameters) -> _Moments:
        """Returns the second moments."""
        there = self.gaps > 0
        starts = np.exp(parameters.starts - np.max(parameters.starts))
        starts /= np.sum(starts)
        moves, signs = np.zeros(self.gaps.shape), np.zeros(self.gaps.shape)
        signs[there] = np.tanh(parameters.signs)
        logs = np.full(self.gaps.shape, -np.inf)
        logs[there] = parameters.moves
        # To end has odds of one.
        largest = np.maximum(np.max(logs, axis=1, keepdims=True), 0.0)
        moves = np.exp(logs - largest)
        moves /= np.sum(moves, axis=1, keepdims=True) + np.exp(-largest)
        signed, identity = moves * signs, np.eye(self.num_cells)
        sums, visits = [identity], [starts]
        for _ in range(self.most - 1):
            sums.append(identity + signed @ sums[-1])
            visits.append(moves.T @ visits[-1])
        upper = np.zeros(self.gaps.shape)
        for visit, after in zip(visits, reversed(sums), strict=True):
            upper += visit[:, np.newaxis] * after
        second = np.triu(upper) + np.triu(upper, 1).T
        return _Moments(second, starts, moves, signs, sums, visits)

    def slopes(self, moments: _Moments, by_second: FloatArray) -> Parameters:
        """Returns the derivatives by parameters, those of weights of rounds left out.

        Args:
          moments: The moments.
          by_second: (n', n') symmetric G of a function whose derivative is tr(G dV').
        """
        most, signed = self.most, moments.moves * moments.signs
        diagonal = np.diagonal(by_second)
        by_visits = [
            2.0 * np.sum(by_second * after, axis=1) - diagonal for after in reversed(moments.sums)
        ]
        by_signed, by_sums = np.zeros_like(signed), np.zeros_like(signed)
        for power in range(most - 1, 0, -1):
            by_sums += 2.0 * moments.visits[most - 1 - power][:, np.newaxis] * by_second
            by_signed += by_sums @ moments.sums[power - 1].T
            by_sums = signed.T @ by_sums
        by_moves, by_visit = by_signed * moments.signs, by_visits[-1]
        for participation in range(most - 1, 0, -1):
            by_moves += np.outer(moments.visits[participation - 1], by_visit)
            by_visit = by_visits[participation - 1] + moments.moves @ by_visit
        there = self.gaps > 0
        mean = np.sum(by_moves * moments.moves, axis=1, keepdims=True)
        by_odds = (moments.moves * (by_moves - mean))[there]
        by_tanh = (by_signed * moments.moves * (1.0 - moments.signs**2))[there]
        by_starts = moments.starts * (by_visit - moments.starts @ by_visit)
        return Parameters(by_starts, by_odds, by_tanh, np.zeros(self.num_cells))


def allows_larger_gaps(participation: Participation, num_rounds: int) -> bool:
    """Returns whether participations may be further apart than the separation, by any rounds."""
    most = participation.most_participations(num_rounds)
    separation = participation.separation_in(num_rounds)
    return participation.as_schema().allows_separations(most, separation, num_rounds - 1)
