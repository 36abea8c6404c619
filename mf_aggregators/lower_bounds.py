r"""Lower bounds on the error of every factorization of a workload.

**The dual.** Let one client contribute s_i in round i: a random vector, none of whose values a
schema forbids, with |s_i| <= 1, and let V = E[s s^T]. A strategy matrix C of sensitivity one has
E |C s|^2 <= 1, which is tr(V X) <= 1 for X = C^T C. With 2 tr((A V A^T)^1/2) <= tr(A^T A X^-1) +
tr(t V X) / t for the best t, the matrix form of 2 (a v)^1/2 <= a / x + v x, the squared total error
of every factorization is at least

    tr((A V A^T)^1/2)^2 = ||A L||_*^2,   V = L L^T,   ||.||_* the sum of singular values.

If contributions are vectors, and not numbers, a sensitivity is no smaller. For weights w >= 0 on
rounds, of sum one, the same with diag(w)^1/2 A bounds the weighted mean of the variances of rounds,
and the largest of them is no smaller than that mean.

All such V are mixtures of s s^T for signs s on a pattern. They are all there is: the least of
tr(A^T A X^-1) under s^T X s <= 1 for all of these s is a convex problem with an inner point, so
that its dual has no gap, and its dual is the largest ||A L||_*^2 over these mixtures.

**Equal weights.** With independent signs V is diagonal: V[i, i] is how often round i is taken part
in. With all V[i, i] = 1 / c the bound is ||A||_* / c^1/2, for single participation (c = n) that of
Denisov et al. Prop. C.1. For the prefix sum it is log(n) / pi + 0.70 in the mean over rounds, which
is the lower bound of Henzinger, Kalinin and Upadhyay (2025). Patterns that hold every round with
the same probability 1 / c have at most k rounds, and at most one of any b in a row; so c is at
least n / k and b. For participations at least b rounds apart c = max(b, n / k) is reached: lay unit
intervals for the rounds on a line, wrap it around a circle of circumference c, and take a random
point of the circle. It is hit by at most ceil(n / c) <= k intervals, and by no two of rounds i < j
fewer than b apart: these would need j + 1 - i > c >= b. (With intervals of length V[i, i] the same
shows which diagonals are possible: those with sums of at most one over any b rounds, and of at most
k over all.)

**Signs that follow one another.** Independent signs leave out that sums of contributions matter: by
far the better bounds have signs that are alike in successive participations. Here s is a Markov
chain: it begins in round i with probability p_i, goes on from i to j with probability P_ij, where
j - i >= b (or j - i = b), ends otherwise or after k participations, and its sign stays, on average,
by r_ij: E[s_j / s_i] = r_ij. With Q_ij = P_ij r_ij and d_m the distribution of participation m,

    V[i, j] = sum_m d_m[i] sum_(l <= k - m) (Q^l)[i, j]   for i <= j.

L-BFGS searches for the best p, P, r (and w). Whatever it finds has a bound that holds.

**Cells.** For many rounds one chain goes over n' cells of m rounds each, and a client takes part in
the same place of each of its cells: cells b' apart, m b' >= b, are rounds b apart. V is then the
Kronecker product V' x I / m, V' = L' L'^T for the chain of cells. Let S, C be symmetric (m, m) with
S^2 + C^2 = I. For contractions Y and Z, S Y S + C Z C is one as well, and ||M||_* is the largest
tr(M^T Z) over contractions, so that for S and C in each cell

    m^1/2 ||A L||_* >= ||(I x S) A (I x S) (L' x I)||_* + ||(I x C) A (I x C) (L' x I)||_*.

S is zero but for polynomials of a degree below r, with orthonormal ones as eigenvectors: the first
term has n' r rows. Its eigenvalues fall gradually from one, at degrees 0 and 1, to zero, because T,
the prefix sum of a cell, takes a polynomial to neighbouring degrees: C and S part few of these. For
the prefix sum A = I x T + N x 1 1^T with C 1 = 0, so that the second term is ||C T C||_* ||L'||_*.
It is bounded in the same way by smaller cells: no number of rounds is too large. For learning
rates that differ within a cell, contributions are as much smaller than one as makes them even.
Rounds after the last cell have rows and no contributions. Of other workloads the second term is
left out, or, for few rounds, S is I.

**Rounding.** Each product of matrices loses what rounding may have added, and the total of the
chain's probabilities is raised: entries of V are off by n eps (V[i, i] V[j, j])^1/2, at most, and
diag(V) is the V of independent signs, so that tr(X V) of what is computed is at most 1 + n^2 eps.
"""

import dataclasses
import functools

import numpy as np
import scipy.linalg
import scipy.optimize

from mf_aggregators import workloads
from mf_aggregators.kernel import numbers
from mf_aggregators.kernel.numbers import FloatArray, IntArray
from mf_aggregators.linear_algebra import nuclear_norm_from_below, solved
from mf_aggregators.participation import Participation, check
from mf_aggregators.workloads import AnyWorkload, Workload

_EPS = float(np.finfo(np.float64).eps)
# The most rounds of a dense matrix with computed singular values: for more, they take minutes.
_MOST_ROUNDS_OF_SINGULAR_VALUES = 5000
# The most rounds for which singular values of A L are affordable, in addition to those of A.
_MOST_ROUNDS_OF_DENSE_BOUND = 512
# The most rounds for which columns of A are computed from a banded inverse, by solving.
_MOST_ROUNDS_BY_COLUMNS = 1 << 17
# The number of terms of the closed form that are summed at a time, which bounds memory.
_TERMS_AT_A_TIME = 1 << 20
_ROUNDING_OF_CLOSED_FORM = 1e-14
# The relative rounding error of the sum of a cell's singular values, which sums over all its rounds
# make.
_ROUNDING_OF_CELLS = 1e-8
# The most rounds for which each round is a cell of its own, if clients return, and if they do not
# or no cells fit; and the fewest and the most cells for more rounds.
_MOST_SINGLE_ROUNDS, _MOST_ROUNDS_WITHOUT_RETURN = 64, 160
_FEWEST_CELLS, _MOST_CELLS = 24, 44
# The number of polynomials on each cell, in the search for the Markov chain of participations and
# in the final bound for many rounds.
_MODES_OF_SEARCH, _MODES = 3, 10
# The most rounds of a cell for which the local norm is computed directly; the number of smaller
# cells that a larger cell is divided into; and the polynomials on each smaller cell.
_ROUNDS_OF_SMALLEST_CELL, _CELLS_OF_A_CELL, _MODES_OF_SMALLER_CELLS = 448, 16, 24
_MOST_EVALUATIONS = 80
_EVALUATIONS_TIMES_PARTICIPATIONS = 1500
# This share of the diagonal of V is added to it, which keeps V positive definite.
_SHARE_OF_DIAGONAL = 1e-10

# The start of a search: logarithms of the odds of a next participation after exactly b rounds, and
# after more.
_ODDS_OF_LEAST_GAP, _ODDS_OF_LARGER_GAPS, _FALL_OF_ODDS = 4.0, 2.0, 2.0
_FIRST_SIGN, _FIRST_LOG_OF_LATER_STARTS = 0.7, -4.0


@dataclasses.dataclass(frozen=True)
class LowerBound:
    """A lower bound on any factorization's error, at sensitivity 1 and noise multiplier 1.

    Attributes:
      total_error: The bound on the root of the sum of all rounds' variances.
      rmse: The bound on the root mean square of errors over rounds.
      max_error: The bound on the root of the largest variance of a round.
    """

    total_error: float
    rmse: float
    max_error: float


def compute(
    workload: object, participation: Participation, *, maximum: bool = True
) -> LowerBound | None:
    """Computes the best lower bound on the error of any factorization that several duals give.

    Use it when a plan asks how much a better matrix could still gain.

    Args:
      workload: A, an (n, n) lower-triangular array, a ``workloads.Workload``, or an int n for the
        prefix sum of n rounds.
      participation: The participation schema.
      maximum: Whether to search for a bound on the worst round as well, which takes as long again.
        Otherwise ``max_error`` is only the bound on the root mean square.

    Returns:
      The bound; None for an array of more than 5,000 rounds whose inverse has many bands.

    Raises:
      ValueError: If the workload is not square, finite, lower triangular and of full rank.

    Example:
      >>> import mf_aggregators as mfa
      >>> once = mfa.participation.SingleParticipation()
      >>> workload = mfa.workloads.prefix_sum(64)
      >>> bound = mfa.lower_bounds.compute(workload, once)
      >>> round(bound.rmse, 3), round(bound.max_error, 3)
      (2.1, 2.111)
    """
    check(participation)
    workload = workloads.checked(workload)
    if isinstance(workload, Workload):
        return _of_description(workload, participation, maximum)
    num_rounds = workload.num_rounds
    if np.array_equal(workload.matrix(), np.tri(num_rounds)):
        return _of_description(Workload("prefix_sum", num_rounds), participation, maximum)
    return _best(workload, participation, maximum)


# Bounds are cached, because plans and reports ask for the same ones repeatedly.
@functools.lru_cache(maxsize=64)
def _of_description(
    workload: Workload, participation: Participation, maximum: bool
) -> LowerBound | None:
    return _best(workload, participation, maximum)


def _best(workload: AnyWorkload, participation: Participation, maximum: bool) -> LowerBound | None:
    """Returns the best of the bounds by equal weights and by Markov chains of participations."""
    num_rounds = workload.num_rounds
    if workload.is_prefix_sum:
        nuclear_norm = _prefix_sum_nuclear_norm(num_rounds)
    elif num_rounds > _MOST_ROUNDS_OF_SINGULAR_VALUES:
        nuclear_norm = 0.0
    else:
        nuclear_norm = nuclear_norm_from_below(workload.matrix())
    rmse = nuclear_norm / np.sqrt(_equal_weights(participation, num_rounds) * num_rounds)
    max_error = rmse
    size = _size_of_cells(participation, num_rounds)
    coarse = None if size is None else _Cells.of(workload, size, _MODES_OF_SEARCH)
    if size is not None and coarse is not None:
        cells = coarse
        if size > 1:
            modes = size if num_rounds <= _MOST_ROUNDS_OF_DENSE_BOUND else _MODES
            fine = _Cells.of(workload, size, modes)
            assert fine is not None
            cells = fine
        chain = _Chain.under(participation, num_rounds, size)
        found = chain.start()
        for is_maximum in (False, True) if maximum else (False,):
            found = _search(coarse, chain, found, is_maximum)
            weights = found.row_weights() if is_maximum else np.ones(chain.num_cells)
            bound = cells.bound(chain.moments(found).second, weights, chain.most)
            max_error = max(max_error, bound)
            rmse = rmse if is_maximum else max(rmse, bound)
    if not rmse > 0.0:
        return None
    return LowerBound(float(rmse * np.sqrt(num_rounds)), float(rmse), float(max_error))


def _prefix_sum_nuclear_norm(num_rounds: int) -> float:
    """Returns the sum of the singular values of the prefix-sum matrix, by their closed form.

    The result is made smaller by a factor of 1 - 1e-14, more than rounding may have added. The
    singular values are 1 / (2 sin((2 j - 1) pi / (4 n + 2))), j = 1, ..., n (Denisov et al. Prop.
    C.1).

    Args:
      num_rounds: n.

    Returns:
      The nuclear norm.

    Raises:
      ValueError: If ``num_rounds`` is not a positive integer.
    """
    num_rounds = numbers.positive_integer(num_rounds, "num_rounds")
    total = 0.0
    for first in range(1, num_rounds + 1, _TERMS_AT_A_TIME):
        j = np.arange(first, min(first + _TERMS_AT_A_TIME, num_rounds + 1))
        total += float(np.sum(0.5 / np.sin((2.0 * j - 1.0) * np.pi / (4.0 * num_rounds + 2.0))))
    return total * (1.0 - _ROUNDING_OF_CLOSED_FORM)


def _equal_weights(participation: Participation, num_rounds: int) -> float:
    """Returns the least c for which some random pattern has each round with probability 1 / c.

    If participations are exactly b apart, a class of s rounds (equal modulo b) is split into ceil(s
    / k) patterns: groups of k consecutive rounds, and one group of the rest.
    """
    most = participation.most_participations(num_rounds)
    if most == 1:
        return float(num_rounds)
    separation = participation.separation_in(num_rounds)
    if _allows_larger_gaps(participation, num_rounds):
        return max(float(separation), num_rounds / most)
    shorter, longer_classes = divmod(num_rounds, separation)
    classes_of = {shorter + 1: longer_classes, shorter: separation - longer_classes}
    return float(sum(count * -(-size // most) for size, count in classes_of.items()))


def _size_of_cells(participation: Participation, num_rounds: int) -> int | None:
    """Returns the number of rounds of a cell; None if no number fits the schema.

    The number balances three aims: few cells, few rounds that are left at the end, and a separation
    that is close to a whole number of cells.
    """
    returns = participation.most_participations(num_rounds) > 1
    if num_rounds <= (_MOST_SINGLE_ROUNDS if returns else _MOST_ROUNDS_WITHOUT_RETURN):
        return 1
    sizes = np.arange(-(-num_rounds // (_MOST_CELLS + 1)), num_rounds // _FEWEST_CELLS + 1)
    loss = (num_rounds % sizes) / num_rounds
    if returns:
        separation = participation.separation_in(num_rounds)
        loss = loss + sizes * -(-separation // sizes) / separation
        if not _allows_larger_gaps(participation, num_rounds):
            sizes, loss = sizes[separation % sizes == 0], loss[separation % sizes == 0]
            if not len(sizes):
                return 1 if num_rounds <= _MOST_ROUNDS_WITHOUT_RETURN else None
    return int(sizes[np.argmin(loss)])


def _allows_larger_gaps(participation: Participation, num_rounds: int) -> bool:
    """Whether participations may be any number of rounds apart, from the separation on."""
    most = participation.most_participations(num_rounds)
    separation = participation.separation_in(num_rounds)
    return participation.as_schema().allows_separations(most, separation, num_rounds - 1)


@dataclasses.dataclass(frozen=True, eq=False)
class _Parameters:
    """The parameters of a Markov chain of participations that a search varies.

    Attributes:
      starts: (n',) logarithms of the odds that the chain begins in each cell.
      moves: (moves,) logarithms of the odds of each move from one cell to another.
      signs: (moves,) inverse hyperbolic tangents of r, the mean ratio of successive signs.
      rows: (n',) logarithms of the weights of rounds, by cells.
    """

    starts: FloatArray
    moves: FloatArray
    signs: FloatArray
    rows: FloatArray

    def packed(self) -> FloatArray:
        """Returns all parameters in one vector."""
        return np.concatenate([self.starts, self.moves, self.signs, self.rows])

    def row_weights(self) -> FloatArray:
        """Returns the (n',) weights of the rounds of each cell, relative to the largest."""
        return np.asarray(np.exp(self.rows - np.max(self.rows)))


@dataclasses.dataclass(frozen=True, eq=False)
class _Moments:
    """The second moments V' of a chain of participations, and the numbers for derivatives.

    Attributes:
      second: V', (n', n').
      starts: (n',) the probabilities p of the first cell.
      moves: (n', n') the probabilities P of moves between cells.
      signs: (n', n') r, the mean ratio of the signs before and after each move.
      sums: For l = 0, ..., k - 1, the sum of Q^0, ..., Q^l.
      visits: For each participation, (n',) the probability that it is in each cell.
    """

    second: FloatArray
    starts: FloatArray
    moves: FloatArray
    signs: FloatArray
    sums: list[FloatArray]
    visits: list[FloatArray]


@dataclasses.dataclass(frozen=True, eq=False)
class _Chain:
    """The set of Markov chains of signed participations that a schema allows on cells.

    A chain begins in cell i with probability p_i, moves from i to j with probability P_ij, and
    otherwise ends. Its sign stays, on average, by r_ij.

    Attributes:
      gaps: (n', n') the number of cells from one cell to a later one that may follow it; 0 for
        other pairs.
      separation: The least distance of two participations, in cells.
      most: The most participations of a client.
    """

    gaps: IntArray
    separation: int
    most: int

    @property
    def num_cells(self) -> int:
        """The number n' of cells."""
        return len(self.gaps)

    @classmethod
    def under(cls, participation: Participation, num_rounds: int, size: int) -> "_Chain":
        """Returns the set of chains that a participation schema allows.

        Args:
          participation: The schema.
          num_rounds: n.
          size: The number of rounds of a cell.
        """
        count = num_rounds // size
        separation = -(-participation.separation_in(num_rounds) // size)
        most = min(participation.most_participations(num_rounds), -(-count // separation))
        gaps = np.maximum(np.arange(count) - np.arange(count)[:, np.newaxis], 0)
        if most == 1:
            gaps = np.zeros_like(gaps)
        elif _allows_larger_gaps(participation, num_rounds):
            gaps = np.where(gaps >= separation, gaps, 0)
        else:
            gaps = np.where(gaps == separation, gaps, 0)
        return cls(gaps, separation, most)

    def start(self) -> _Parameters:
        """Returns the parameters at which a search for the best chain begins."""
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
        return _Parameters(starts, odds, signs, np.zeros(self.num_cells))

    def unpacked(self, packed: FloatArray) -> _Parameters:
        """Returns the parameters that a vector of their values holds.

        Args:
          packed: The vector: starts, moves, signs and weights of rounds, one after another.
        """
        moves = int(np.count_nonzero(self.gaps))
        ends = np.cumsum([self.num_cells, moves, moves])
        return _Parameters(*np.split(packed, ends))

    def moments(self, parameters: _Parameters) -> _Moments:
        """Returns the second moments V' of the chain with given parameters.

        Args:
          parameters: The parameters of the chain.
        """
        there = self.gaps > 0
        starts = np.exp(parameters.starts - np.max(parameters.starts))
        starts /= np.sum(starts)
        moves, signs = np.zeros(self.gaps.shape), np.zeros(self.gaps.shape)
        signs[there] = np.tanh(parameters.signs)
        logs = np.full(self.gaps.shape, -np.inf)
        logs[there] = parameters.moves
        # In the same unit, the odds of ending the chain are one.
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

    def slopes(self, moments: _Moments, by_second: FloatArray) -> _Parameters:
        """Returns a function's derivatives by a chain's parameters; those by row weights are zero.

        Args:
          moments: The moments of the chain.
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
        return _Parameters(by_starts, by_odds, by_tanh, np.zeros(self.num_cells))


@dataclasses.dataclass(frozen=True, eq=False)
class _Cells:
    """A workload on cells of rounds, restricted to a few polynomials on each cell.

    Attributes:
      num_rounds: n.
      size: The number m of rounds of a cell.
      compressed: (rows, n', r) U^T A U by cells and modes of columns; each row belongs to a mode of
        a cell, or to a round after the last cell.
      row_cells: (rows,) the cell that a row takes its weight from.
      rates: (n',) factors of columns.
      local: A lower bound on ||C T C||_* of a cell; 0 if none is known.
      scale: The number that the other attributes are divided by.
      roundings: The number of eps by which entries may be off, relative to the largest entry.
    """

    num_rounds: int
    size: int
    compressed: FloatArray
    row_cells: IntArray
    rates: FloatArray
    local: float
    scale: float
    roundings: float

    @classmethod
    def of(cls, workload: AnyWorkload, size: int, modes: int) -> "_Cells | None":
        """Returns a workload on cells; None for an array of too many rounds.

        Args:
          workload: A.
          size: m.
          modes: r.
        """
        num_rounds = workload.num_rounds
        count, modes = num_rounds // size, min(size, modes)
        rest = num_rounds - count * size
        basis = np.eye(size) if modes == size else _polynomials(size, modes)
        seen, unseen = _shares(size, modes)
        rates = None
        is_described = isinstance(workload, Workload)
        bands = workload.inverse_bands() if is_described else None
        is_small = num_rounds <= _MOST_ROUNDS_OF_DENSE_BOUND
        most = _MOST_ROUNDS_OF_SINGULAR_VALUES if bands is None else _MOST_ROUNDS_BY_COLUMNS
        roundings = float(num_rounds)
        if not is_small and bands is not None and _has_rates(bands):
            rates = np.min((1.0 / bands[: count * size, 0]).reshape(count, size), axis=1)
        if rates is not None:
            # For each row of a cell: the sums of all earlier cells, and the block of its own cell.
            sums = np.sum(basis, axis=0)
            blocks = (
                np.tri(count, k=-1)[:, np.newaxis, :, np.newaxis]
                * np.outer(sums, sums)[:, np.newaxis]
            )
            own = basis.T @ np.cumsum(basis, axis=0)
            blocks[np.arange(count), :, np.arange(count)] = own
            rows = blocks.reshape(count * modes, count, modes)
            last = np.sqrt(rest) * np.tile(sums, (1, count, 1))
            local = 0.0 if modes == size else _local_norm(size, unseen)
        elif is_small or num_rounds <= most:
            is_dense, found = is_small or bands is None, []
            matrix = workload.matrix() if is_dense else np.empty(0)
            for cell in range(count):
                here = slice(cell * size, (cell + 1) * size)
                if bands is None or is_dense:
                    columns = matrix[:, here] @ basis
                else:
                    columns = np.zeros((num_rounds, modes))
                    columns[here] = basis
                    columns = solved(bands, columns)
                found.append(_by_modes(columns[:, np.newaxis], basis))
            rows, last = (np.concatenate(parts, axis=1) for parts in zip(*found, strict=True))
            rates, local = np.ones(count), 0.0
            if bands is not None and not is_dense:
                growth = workload.largest_entry() * np.max(np.sum(np.abs(bands), axis=1))
                roundings += float(growth) * num_rounds**1.5
        else:
            return None
        row_cells = np.append(np.repeat(np.arange(count), modes), np.full(len(last), count - 1))
        rows = rows * np.tile(seen, count)[:, np.newaxis, np.newaxis]
        compressed = np.concatenate([rows, last]) * seen
        largest, highest = float(np.max(np.abs(compressed))), float(np.max(rates))
        return cls(
            num_rounds=num_rounds,
            size=size,
            compressed=compressed / largest,
            row_cells=row_cells,
            rates=rates / highest,
            local=local / largest,
            scale=largest * highest,
            roundings=roundings,
        )

    def rounds_of(self) -> FloatArray:
        """Returns (n',) the number of rounds that take their weight from each cell."""
        rounds = np.full(len(self.rates), float(self.size))
        rounds[-1] += self.num_rounds - self.size * len(rounds)
        return rounds

    def factor(
        self, second: FloatArray, weights: FloatArray
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Returns L', the matrix A L (rows, n' r), and the matrix of the local part.

        Args:
          second: V', (n', n') second moments.
          weights: (n',) the weight of each cell's rounds.
        """
        factor = np.linalg.cholesky(second)
        scaled = self.rates[:, np.newaxis] * factor
        product = _times_factor(self.compressed, scaled)
        product *= np.sqrt(weights[self.row_cells])[:, np.newaxis]
        return factor, product, np.asarray(np.sqrt(weights)[:, np.newaxis] * scaled)

    def bound(self, second: FloatArray, weights: FloatArray, most: int) -> float:
        """Returns a lower bound on the root of the weighted mean of the rounds' variances.

        Args:
          second: V', the second moments of contributions.
          weights: (n',) the weight of each cell's rounds, not negative.
          most: The most participations of a client.

        Returns:
          The bound; 0 if V' is not definite.
        """
        count = len(second)
        second = second + np.diag(_SHARE_OF_DIAGONAL * np.diagonal(second))
        total = 1.0 + _SHARE_OF_DIAGONAL + 16.0 * count * (count + most**2) * _EPS
        try:
            factor, product, local = self.factor(second, weights)
        except np.linalg.LinAlgError:
            return 0.0
        magnitudes = _times_factor(
            np.abs(self.compressed), np.abs(self.rates[:, np.newaxis] * factor)
        )
        magnitudes *= np.sqrt(weights[self.row_cells])[:, np.newaxis]
        rows, columns = product.shape
        terms = rows + columns + (columns // count) * self.roundings
        rounding = 8.0 * terms * _EPS * np.sqrt(min(rows, columns)) * np.linalg.norm(magnitudes)
        norm = nuclear_norm_from_below(product) - float(rounding)
        if self.local > 0.0:
            rounding = 8.0 * count**1.5 * _EPS * np.linalg.norm(local)
            norm += self.local * max(nuclear_norm_from_below(local) - float(rounding), 0.0)
        sum_of_weights = float(weights @ self.rounds_of()) * (1.0 + count * _EPS)
        # Written so that NaN gives the bound 0.
        root = norm / np.sqrt(self.size * total * sum_of_weights) if norm > 0.0 else 0.0
        return float(self.scale * root)


def _has_rates(bands: FloatArray) -> bool:
    """Whether A[i, j] is a rate of column j for all i >= j, judged by bands of the inverse."""
    return bands.shape[1] == 2 and bool(
        np.all(bands[:, 0] > 0.0) and np.all(bands[1:, 0] == -bands[1:, 1])
    )


def _by_modes(columns: FloatArray, basis: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Returns columns of A U as rows by modes of cells, and the rows after the last cell.

    Args:
      columns: (n, cells, r).
      basis: (m, r).
    """
    size, modes = basis.shape
    end = len(columns) // size * size
    by_cell = columns[:end].reshape(-1, size, columns.shape[1] * modes)
    rows = np.einsum("us,cuj->csj", basis, by_cell)
    return rows.reshape(-1, *columns.shape[1:]), columns[end:]


def _times_factor(rows: FloatArray, factor: FloatArray) -> FloatArray:
    """Returns rows by cells and modes times L' x I, as (rows, n' r)."""
    return np.tensordot(rows, factor, (1, 0)).swapaxes(1, 2).reshape(len(rows), -1)


def _polynomials(size: int, modes: int) -> FloatArray:
    """Returns (m, r) orthonormal polynomials on m points, the first of them constant."""
    points = (2.0 * np.arange(size) + 1.0) / size - 1.0
    columns = [np.ones(size), points]
    for degree in range(2, modes):
        # Legendre's polynomials are nearly orthogonal on these points; the QR decomposition does
        # the rest.
        share = (degree - 1.0) / degree
        columns.append((1.0 + share) * points * columns[-1] - share * columns[-2])
    return np.asarray(np.linalg.qr(np.column_stack(columns[:modes]))[0])


def _shares(size: int, modes: int) -> tuple[FloatArray, FloatArray]:
    """Returns the (r,) eigenvalues of S and of C for the polynomials of each degree.

    For constants, and for linear polynomials if there are higher ones, S has the eigenvalue 1. If
    the polynomials span a whole cell, all eigenvalues of S are 1.
    """
    if modes == size:
        return np.ones(modes), np.zeros(modes)
    angles = 0.5 * np.pi * np.maximum(np.arange(modes) - 1.0, 0.0) / max(modes - 1.0, 1.0)
    return np.cos(angles), np.sin(angles)


def _local_norm(size: int, unseen: FloatArray) -> float:
    """Returns a lower bound on ||C T C||_* for the prefix sum T of a cell.

    Args:
      size: m.
      unseen: (r,) eigenvalues of C for polynomials of a degree below r; all other eigenvalues are
        1.
    """
    modes = len(unseen)
    basis, change = _polynomials(size, modes), 1.0 - unseen
    if size <= _ROUNDS_OF_SMALLEST_CELL:
        others = np.eye(size) - (basis * change) @ basis.T
        found = nuclear_norm_from_below(others @ np.cumsum(others, axis=0))
        return found * (1.0 - _ROUNDING_OF_CELLS)
    # Functions on a large cell are split into polynomials on each of some smaller cells, and the
    # rest.
    count = _CELLS_OF_A_CELL
    smaller = size // count
    part = _polynomials(smaller, _MODES_OF_SMALLER_CELLS)
    sums = np.sum(part, axis=0)
    blocks = np.kron(np.tri(count, k=-1), np.outer(sums, sums))
    blocks += np.kron(np.eye(count), part.T @ np.cumsum(part, axis=0))

    def on_parts(columns: FloatArray) -> FloatArray:
        by_part = columns[: count * smaller].reshape(count, smaller, -1)
        return np.asarray(np.einsum("us,cuj->csj", part, by_part).reshape(len(blocks), -1))

    ahead, back = np.cumsum(basis, axis=0), np.cumsum(basis[::-1], axis=0)[::-1]
    seen = on_parts(basis) * change
    between = blocks - seen @ on_parts(back).T - on_parts(ahead) @ seen.T
    between += seen @ (basis.T @ ahead) @ seen.T
    found = nuclear_norm_from_below(between) * (1.0 - _ROUNDING_OF_CELLS)
    return float(found) + count * _local_norm(smaller, np.zeros(_MODES_OF_SMALLER_CELLS))


def _search(cells: _Cells, chain: _Chain, start: _Parameters, is_maximum: bool) -> _Parameters:
    """Searches for the chain and weights with the best bound, and returns their parameters."""
    rounds = cells.rounds_of()

    def negative_log_bound(packed: FloatArray) -> tuple[float, FloatArray]:
        parameters = chain.unpacked(packed)
        moments = chain.moments(parameters)
        weights = parameters.row_weights() if is_maximum else np.ones(chain.num_cells)
        second = moments.second + np.diag(_SHARE_OF_DIAGONAL * np.diagonal(moments.second))
        scales = (1.0, cells.local)
        try:
            factor, *matrices = cells.factor(second, weights)
            # A step that is too long may lead to numbers beyond floats.
            spectra = [
                np.linalg.eigh(each.T @ each) if scale > 0.0 else (np.empty(0), each)
                for each, scale in zip(matrices, scales, strict=True)
            ]
        except np.linalg.LinAlgError:
            return np.inf, np.zeros_like(packed)
        norm, by_rows = 0.0, np.zeros(chain.num_cells)
        roots = np.zeros(second.shape)
        row_cells = (cells.row_cells, np.arange(chain.num_cells))
        for matrix, spectrum, scale, rows in zip(matrices, spectra, scales, row_cells, strict=True):
            if scale > 0.0:
                squares, vectors = spectrum
                values = np.sqrt(np.maximum(squares, _EPS * squares[-1]))
                norm += scale * float(np.sum(values))
                errors = np.square(matrix @ vectors) @ (1.0 / values)
                by_rows += scale * np.bincount(rows, errors, chain.num_cells)
                half = (vectors * np.sqrt(values)).reshape(chain.num_cells, -1)
                roots += scale * (half @ half.T)
        half = scipy.linalg.solve_triangular(factor, roots, lower=True, trans="T")
        by_second = scipy.linalg.solve_triangular(factor, half.T, lower=True, trans="T") / norm
        slopes = chain.slopes(moments, by_second)
        value, by_weights = -2.0 * np.log(norm), np.zeros(chain.num_cells)
        if is_maximum:
            total = float(weights @ rounds)
            value += float(np.log(total))
            by_weights = by_rows / norm - weights * rounds / total
        slopes = dataclasses.replace(slopes, rows=by_weights)
        return value, -slopes.packed()

    most = _EVALUATIONS_TIMES_PARTICIPATIONS // chain.most
    found = scipy.optimize.minimize(
        negative_log_bound,
        start.packed(),
        jac=True,
        method="L-BFGS-B",
        options={
            "maxfun": max(min(_MOST_EVALUATIONS, most), 10),
            "maxcor": 20,
            "ftol": 1e-9,
            "gtol": 1e-9,
        },
    )
    return chain.unpacked(found.x)
