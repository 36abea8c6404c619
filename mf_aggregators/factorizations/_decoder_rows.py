"""The rows of B = A C^-1 for a Toeplitz C^-1 and any workload.

Row i of B has the squared norm e_i, which is quadratic in the coefficients g of C^-1. A search
needs sum_i w_i e_i for some weights w of the rounds, and its slope by g.

* For a Toeplitz workload B is Toeplitz: e_i is a running sum of the squares of a(x) g(x).
* Training is a sequence of stages, A = F_q ... F_1 (``Workload.stages``). Column j of B are the
  stages applied to g, shifted down by j; the transposed stages, applied to w times that, are what
  the slope sums up. Columns come in blocks: O(n^2) operations.
* Where all stages are recursions, it takes O(n^1.5) operations and floats (times a logarithm).
* Where C^-1 has few states as well, it takes O(n) of both for each state.

**Recursions.** Rounds come in blocks of m, about n^0.5. With the rows U_k of the Toeplitz matrix of
g, block k of B is P_k U_k + R_k S_k, where S_k has the last row of each stage before the block, and
S_(k+1) is a combination of rows of U_k and S_k. Products with U_k are convolutions. The sum over
rounds is that of

    tr(P^T w P U U^T) + 2 tr(P^T w R S U^T) + tr(R^T w R S S^T).

The first is a quadratic form of g with m bands, as entries of U U^T are running sums of products
g_t g_(t+d), and the slopes of the others go through the blocks backwards.

**Few states.** Let y_i = z_i + sum_l v_l u^l_(i-1) with u^l_i = d_l u^l_(i-1) + z_i, and
x^0 = y, x^b_i = p^b_i x^b_(i-1) + h^b_i x^(b-1)_i for the stages b = 1, ..., q. Then e_i is
Var(x^q_i). With c_ab and f_ab the covariances of x^a_i with x^b_i and with x^b_(i-1),

    f_ab = p^a c_ab(i-1) + h^a f_(a-1)b,    c_ab = p^b f_ab + h^b c_a(b-1),

which starts from c_00 = Var(y_i), a running sum of g_t^2, and f_0b = sum_l v_l s^b_l(i-1). There
s^b_l is the covariance of x^b_i with u^l_i: s^0_l is a running sum of g_t d_l^t, and

    s^b_l(i) = d_l p^b_i s^b_l(i-1) + h^b_i s^(b-1)_l(i).

Everything is linear in c_00 and f_0b, so that weights of e_i become weights of these, once for all
C. Transposed recursions take them back to g_t d_l^t, and one more for each to slopes by d_l.

**Few bands.** With C^-1 = sum_t x_t S^t over t < p, where S^t moves rows down by t, row i of B is
sum_t x_t A_i S^t for row A_i of A. So its squared norm is x^T R_i x, with

    R_i[s, t] = sum_(j >= 0) A[i, j + s] A[i, j + t]
              = L_i(s - t) - sum_(m = 1..t) A[i, s - m] A[i, t - m]    for s >= t,

where L_i(d) = sum_(a >= 0) A[i, a + d] A[i, a]. Rows of weighted sums of R_i, of gradients R_i x
and of norms all follow from the (n, p) numbers L_i(d) and the first p - 1 columns of A.

If A^-1 has few bands, so that A_i = sum_k f_k A_(i-k) + g e_i, products of shifted rows follow
from those of the rows before, and nothing of the size of A is needed.

**The worst row.** The logarithm of the largest norm is the least s above all l_i = log x^T R_i x.
A barrier mu takes the minimum of s - mu sum_i log(s - l_i) over s in its place, which is smooth in
x and for one s: there sum_i mu / (s - l_i) = 1, and these terms are weights of the rows. That s is
at most n mu above the largest l_i.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, TypeAlias

import numpy as np
import scipy.fft
import scipy.linalg
import scipy.signal
from scipy.linalg.lapack import dtbtrs

from mf_aggregators import workloads
from mf_aggregators.factorizations._round_errors import RoundError
from mf_aggregators.factorizations.convergence import Objective
from mf_aggregators.kernel.numbers import ComplexArray, FloatArray, IntArray
from mf_aggregators.linear_algebra import power_series
from mf_aggregators.workloads import Recursion, Stage, Workload

# The most numbers of rows in memory, if each is used once.
_NUMBERS_AT_A_TIME = 1 << 20
_ROWS_AT_A_TIME = 4096
# Relative to the largest multiplier of a row.
_LEAST_MULTIPLIER = 1e-6
_STEPS_OF_BOUND, _ROUNDING_OF_BOUND = 50, 1e-13
# Columns of B that are there at a time.
_COLUMNS_AT_A_TIME = 512
# Above this many rounds, O(n^2) operations for each evaluation take minutes, or O(n^1.5) memory is
# gigabytes.
_MOST_ROUNDS_OF_COLUMNS, _MOST_ROUNDS = 1 << 13, 1 << 16

# The orders of the norms that take the place of a maximum. The last is at most 0.4 % above it for
# 2,052 rounds.
_ORDERS = (16.0, 128.0, 2048.0)

# Names of the covariances by their stages.
_Pairs: TypeAlias = dict[tuple[int, int], FloatArray]


class DecoderRows:
    """The squared norms of the rows of B = A C^-1 by the coefficients of C^-1.

    Attributes:
      num_rounds: The number of rounds n.
      is_increasing: Whether no row of B is shorter than the one before, whatever C^-1 is.
    """

    is_increasing = False

    def __init__(self, num_rounds: int) -> None:
        self.num_rounds = num_rounds

    def squared(self, noising: FloatArray) -> FloatArray:
        """Returns e, (n,).

        Args:
          noising: (n,) g.
        """
        raise NotImplementedError

    def weighing(self, weights: FloatArray) -> Objective:
        """Returns the function of (n,) g that is sum_i w_i e_i, with its (n,) slope.

        Args:
          weights: (n,) w.
        """
        raise NotImplementedError


def of(workload: Workload) -> DecoderRows:
    """Returns the rows for a workload.

    Args:
      workload: A.

    Raises:
      ValueError: If it is not Toeplitz and has so many rounds that O(n^2) operations would take
        minutes.
    """
    coefficients = workload.coefficients()
    if coefficients is not None:
        return _ToeplitzRows(workload, coefficients)
    recursions = workload.recursions()
    most = _MOST_ROUNDS_OF_COLUMNS if recursions is None else _MOST_ROUNDS
    _check_rounds(workload.num_rounds, most)
    if recursions is not None:
        return _RecursionRows(recursions)
    return _StagedRows(workload.stages(), workload.num_rounds)


def _check_rounds(num_rounds: int, most: int) -> None:
    if num_rounds > most:
        raise ValueError(
            f"errors of a Toeplitz matrix would take long for {num_rounds} rounds of a workload "
            f"that changes with the rounds, above {most}: use blt or banded."
        )


class _ToeplitzRows(DecoderRows):
    """Those of a Toeplitz workload."""

    is_increasing = True

    def __init__(self, workload: Workload, coefficients: FloatArray) -> None:
        super().__init__(len(coefficients))
        self._coefficients = coefficients
        # Filters take fewer operations than products of series.
        recursions = workload.recursions() or ()
        self._filters = recursions if all(each.is_constant for each in recursions) else ()

    def squared(self, noising: FloatArray) -> FloatArray:
        return np.cumsum(np.square(self._decoder(noising)))

    def weighing(self, weights: FloatArray) -> Objective:
        # A coefficient is in all rows from its lag on.
        tails = 2.0 * np.cumsum(weights[::-1])[::-1]

        def weighted(noising: FloatArray) -> tuple[float, FloatArray]:
            decoder = self._decoder(noising)
            slope = tails * decoder
            return 0.5 * float(slope @ decoder), self._decoder(slope[::-1])[::-1]

        return weighted

    def _decoder(self, noising: FloatArray) -> FloatArray:
        """The coefficients of a(x) times those of a series."""
        if self._filters:
            return _filtered(self._filters, noising)
        return power_series.product(self._coefficients, noising, self.num_rounds)


class _StagedRows(DecoderRows):
    """Those of stages, by the columns of B."""

    def __init__(self, stages: Sequence[Stage], num_rounds: int) -> None:
        super().__init__(num_rounds)
        self._blocks = [
            (start, [stage.from_round(start) for stage in stages])
            for start in range(0, num_rounds, _COLUMNS_AT_A_TIME)
        ]

    def squared(self, noising: FloatArray) -> FloatArray:
        squares = np.zeros(self.num_rounds)
        for start, stages in self._blocks:
            columns = _applied(stages, noising[: self.num_rounds - start])
            squares[start:] += np.einsum("ij,ij->i", columns, columns)
        return squares

    def weighing(self, weights: FloatArray) -> Objective:
        def weighted(noising: FloatArray) -> tuple[float, FloatArray]:
            value, slope = 0.0, np.zeros(self.num_rounds)
            for start, stages in self._blocks:
                columns = _applied(stages, noising[: self.num_rounds - start])
                own = weights[start:]
                value += float(own @ np.einsum("ij,ij->i", columns, columns))
                columns *= 2.0 * own[:, np.newaxis]
                for stage in reversed(stages):
                    columns = stage.transposed(columns)
                slope[: len(columns)] += _diagonal_sums(columns)
            return value, slope

        return weighted


class _RecursionRows(DecoderRows):
    """Those of recursions, by blocks of rounds."""

    def __init__(self, recursions: Sequence[Recursion]) -> None:
        super().__init__(len(recursions[0].kept))
        left = list(recursions)
        # The first stages, if they do not change, make another series of g.
        self._filters: list[Recursion] = []
        while left and left[0].is_constant:
            self._filters.append(left.pop(0))
        self._size = size = 1 << max(4, int(np.ceil(np.log2(2.0 * np.sqrt(self.num_rounds)))))
        self._count = count = -(-self.num_rounds // size)
        self._length = scipy.fft.next_fast_len(2 * count * size, real=True)
        stages, carried = len(left), np.arange(len(left))
        blocks = np.zeros((count, size, size + stages))
        blocks[:, :, :size] = np.eye(size)
        last = np.empty((count, stages, size + stages))
        for b, stage in enumerate(left):
            kept, added = (self._in_blocks(each) for each in (stage.kept, stage.added))
            blocks *= added[:, :, np.newaxis]
            blocks[:, 0, size + carried[b]] += kept[:, 0]
            for i in range(1, size):
                blocks[:, i] += kept[:, i, np.newaxis] * blocks[:, i - 1]
            last[:, b] = blocks[:, -1]
        self._own, self._carried = blocks[:, :, :size].copy(), blocks[:, :, size:].copy()
        self._last_own, self._last_carried = last[:, :, :size].copy(), last[:, :, size:].copy()

    def _in_blocks(self, values: FloatArray) -> FloatArray:
        """(n,) values by blocks, with zeros behind them."""
        longer = power_series.padded(values, self._count * self._size)
        return longer.reshape(self._count, self._size)

    def squared(self, noising: FloatArray) -> FloatArray:
        size = self._size
        series = _filtered(self._filters, noising)
        longer, spectrum = self._spectrum(series)
        grams = np.empty((self._count, size, size))
        for lag in range(size):
            sums = np.cumsum(longer[lag:] * longer[: len(longer) - lag])
            entries = self._in_blocks(sums)[:, : size - lag]
            rows = np.arange(size - lag)
            grams[:, rows, rows + lag] = grams[:, rows + lag, rows] = entries
        squares = np.einsum("kij,kij->ki", self._own @ grams, self._own)
        for k, state in enumerate(self._states(spectrum)):
            transformed = scipy.fft.rfft(state, self._length)
            products = scipy.fft.irfft(transformed * spectrum, self._length)
            crossed = self._own[k] @ products[:, k * size : (k + 1) * size].T
            carried = self._carried[k]
            squares[k] += 2.0 * np.einsum("ij,ij->i", crossed, carried)
            squares[k] += np.einsum("ij,ij->i", carried @ (state @ state.T), carried)
        return np.asarray(squares.ravel()[: self.num_rounds])

    def weighing(self, weights: FloatArray) -> Objective:
        size, rounds = self._size, self._count * self._size
        weighted_own = self._own * self._in_blocks(weights)[:, :, np.newaxis]
        own_squares = weighted_own.transpose(0, 2, 1) @ self._own
        mixed = self._carried.transpose(0, 2, 1) @ weighted_own
        weighted_carried = self._carried * self._in_blocks(weights)[:, :, np.newaxis]
        squares = weighted_carried.transpose(0, 2, 1) @ self._carried
        form = np.zeros((size, self._count, size))
        for lag in range(size):
            form[lag, :, : size - lag] = np.diagonal(own_squares, lag, 1, 2)
        form = form.reshape(size, rounds)
        np.cumsum(form[:, ::-1], axis=1, out=form[:, ::-1])

        def weighted(noising: FloatArray) -> tuple[float, FloatArray]:
            series = _filtered(self._filters, noising)
            longer, spectrum = self._spectrum(series)
            slope = form[0] * longer
            for lag in range(1, size):
                slope[:-lag] += form[lag, :-lag] * longer[lag:]
                slope[lag:] += form[lag, :-lag] * longer[:-lag]
            states = list(self._states(spectrum))
            # The slopes by the states, from the last block to the first.
            by_state, total = np.zeros_like(states[0]), np.zeros(len(spectrum), np.complex128)
            for k in range(self._count - 1, 0, -1):
                state, own = states[k], self._placed(mixed[k], k)
                total += np.sum(own * np.conj(scipy.fft.rfft(state, self._length)), axis=0)
                if k + 1 < self._count:
                    later = np.conj(scipy.fft.rfft(by_state, self._length))
                    total += np.sum(self._placed(self._last_own[k], k) * later, axis=0)
                moved = self._correlated(own, spectrum, k * size)
                by_state = squares[k] @ state + self._last_carried[k].T @ by_state + moved
            if self._count > 1:
                later = np.conj(scipy.fft.rfft(by_state, self._length))
                total += np.sum(self._placed(self._last_own[0], 0) * later, axis=0)
            slope += scipy.fft.irfft(total, self._length)[:rounds]
            slope = 2.0 * slope[: self.num_rounds]
            return 0.5 * float(slope @ series), _filtered(self._filters, slope[::-1])[::-1]

        return weighted

    def _spectrum(self, series: FloatArray) -> tuple[FloatArray, ComplexArray]:
        """The series with zeros behind it, and its transform."""
        longer = power_series.padded(series, self._count * self._size)
        return longer, scipy.fft.rfft(longer, self._length)

    def _states(self, spectrum: ComplexArray) -> Iterator[FloatArray]:
        """S_k of each block, (q, n)."""
        state = np.zeros((self._last_own.shape[1], self._count * self._size))
        for k in range(self._count):
            yield state
            added = self._correlated(
                self._placed(self._last_own[k], k), spectrum, (k + 1) * self._size
            )
            state = self._last_carried[k] @ state + added

    def _placed(self, values: FloatArray, k: int) -> ComplexArray:
        """The transform of (q, m) values in the rounds of block k."""
        longer = np.zeros((len(values), self._count * self._size))
        longer[:, k * self._size : (k + 1) * self._size] = values
        return np.asarray(scipy.fft.rfft(longer, self._length))

    def _correlated(self, placed: ComplexArray, spectrum: ComplexArray, rounds: int) -> FloatArray:
        """The combinations of rows of the Toeplitz matrix, up to a round."""
        found = scipy.fft.irfft(placed * np.conj(spectrum), self._length)
        found = found[:, : self._count * self._size]
        found[:, rounds:] = 0.0
        return np.asarray(found)


def _filtered(filters: Sequence[Recursion], series: FloatArray) -> FloatArray:
    """An (n,) series after recursions that do not change, one after another."""
    for stage in filters:
        taps = [stage.added[0]], [1.0, -stage.kept[-1]]
        series = np.asarray(scipy.signal.lfilter(*taps, series))
    return series


def _applied(stages: Sequence[Stage], series: FloatArray) -> FloatArray:
    """The first columns of the product of stages and the Toeplitz matrix of (r,) coefficients."""
    count = min(_COLUMNS_AT_A_TIME, len(series))
    longer = np.concatenate([np.zeros(count - 1), series])
    columns = np.lib.stride_tricks.sliding_window_view(longer, count)[:, ::-1]
    for stage in stages:
        columns = stage.applied(columns)
    return columns


def _diagonal_sums(columns: FloatArray) -> FloatArray:
    """The sums over c of entries (a + c, c), for each row a."""
    rows, count = columns.shape
    sums = np.zeros(rows + count - 1)
    for i in range(rows):
        sums[i : i + count] += columns[i, ::-1]
    return np.asarray(sums[count - 1 :])


@dataclasses.dataclass(frozen=True, eq=False)
class States:
    """C^-1 by its states.

    Attributes:
      noising: (n,) g_0 = 1 and g_t = sum_l v_l d_l^(t-1).
      weights: (m,) v.
      decays: (m,) d, of magnitude below one.
    """

    noising: FloatArray
    weights: FloatArray
    decays: FloatArray

    @property
    def powers(self) -> FloatArray:
        """(m, n): d_l^t."""
        return np.asarray(self.decays[:, np.newaxis] ** np.arange(len(self.noising)))


@dataclasses.dataclass(frozen=True, eq=False)
class StateSlopes:
    """How a weighted sum of e changes with C^-1, each with the others held.

    Attributes:
      by_noising: (n,) by g.
      by_weights: (m,) by v.
      by_decays: (m,) by d.
    """

    by_noising: FloatArray
    by_weights: FloatArray
    by_decays: FloatArray


# From C^-1 by its states to a weighted sum of e, and its slopes.
StateObjective: TypeAlias = Callable[[States], tuple[float, StateSlopes]]


class StateRows:
    """The squared norms of the rows of B where C^-1 has few states, in O(n m) operations."""

    is_increasing = False

    def __init__(self, recursions: Sequence[Recursion]) -> None:
        """Notes the stages.

        Args:
          recursions: The stages of the workload, at least one.
        """
        self._stages = tuple(recursions)
        self.num_rounds = len(self._stages[0].kept)

    def squared(self, states: States) -> FloatArray:
        """Returns e, (n,).

        Args:
          states: C^-1.
        """
        stages = range(1, len(self._stages) + 1)
        sources = {b: np.zeros(self.num_rounds) for b in stages}
        products = states.noising * states.powers
        for weight, decay, product in zip(states.weights, states.decays, products, strict=True):
            covariance = np.cumsum(product)
            for b in stages:
                stage = self._stages[b - 1]
                covariance = _solved(decay * stage.kept, stage.added * covariance)
                sources[b][1:] += weight * covariance[:-1]
        return self._propagated(np.cumsum(np.square(states.noising)), sources)

    def _propagated(self, variance: FloatArray, sources: dict[int, FloatArray]) -> FloatArray:
        """The variances of the last stage from c_00 and f_0b."""
        same: _Pairs = {(0, 0): variance}
        for b, stage in enumerate(self._stages, 1):
            before = sources[b]
            same[0, b] = stage.kept * before + stage.added * same[0, b - 1]
            for a in range(1, b + 1):
                other = self._stages[a - 1]
                added = stage.kept * other.added * before
                added += stage.added * same[min(a, b - 1), max(a, b - 1)]
                same[a, b] = _solved(stage.kept * other.kept, added)
                before = other.kept * _later(same[a, b]) + other.added * before
        last = len(self._stages)
        return same[last, last]

    def weighing(self, weights: FloatArray) -> StateObjective:
        """Returns the function of states that is sum_i w_i e_i, with its slopes.

        Args:
          weights: (n,) w.
        """
        return functools.partial(self._weighted, sources=self._sources(weights))

    def _sources(self, weights: FloatArray) -> tuple[FloatArray, ...]:
        """The (n,) weights of c_00 and of f_01, ..., f_0q that weights of e become."""
        last = len(self._stages)
        same: _Pairs = {
            (a, b): np.zeros(self.num_rounds) for b in range(last + 1) for a in range(b + 1)
        }
        same[last, last] = weights.copy()
        found: dict[int, FloatArray] = {}
        for b in range(last, 0, -1):
            stage, before = self._stages[b - 1], np.zeros(self.num_rounds)
            # The lines of _propagated, backwards.
            for a in range(b, 0, -1):
                other = self._stages[a - 1]
                same[a, b] += _earlier(other.kept * before)
                added = _solved_transposed(stage.kept * other.kept, same[a, b])
                before = other.added * before + stage.kept * other.added * added
                same[min(a, b - 1), max(a, b - 1)] += stage.added * added
            found[b] = before + stage.kept * same[0, b]
            same[0, b - 1] += stage.added * same[0, b]
        return (same[0, 0], *(found[b] for b in range(1, last + 1)))

    def _weighted(
        self, states: States, sources: tuple[FloatArray, ...]
    ) -> tuple[float, StateSlopes]:
        """The weighted sum and its slopes, from the results of :meth:`_sources`."""
        noising, powers = states.noising, states.powers
        tails = np.cumsum(sources[0][::-1])[::-1]
        by_noising = 2.0 * noising * tails
        value = 0.5 * float(by_noising @ noising)
        by_weights, by_decays = np.empty(len(powers)), np.empty(len(powers))
        lags = np.arange(1.0, len(noising))
        for each, (weight, decay) in enumerate(zip(states.weights, states.decays, strict=True)):
            # The weights of the covariances with u^l, and how they change with d_l.
            carried, changed = np.zeros(len(noising)), np.zeros(len(noising))
            for stage, source in zip(self._stages[::-1], sources[:0:-1], strict=True):
                later = _earlier(source)
                solved = _solved_transposed(decay * stage.kept, carried + later)
                moved = _earlier(stage.kept * solved)
                changed = stage.added * _solved_transposed(decay * stage.kept, changed + moved)
                carried = stage.added * solved
            tails, changed_tails = (np.cumsum(some[::-1])[::-1] for some in (carried, changed))
            along = tails * powers[each]
            by_noising += weight * along
            by_weights[each] = noising @ along
            value += weight * by_weights[each]
            slope = changed_tails @ (noising * powers[each])
            slope += (tails[1:] * noising[1:]) @ (lags * powers[each, :-1])
            by_decays[each] = weight * slope
        return value, StateSlopes(by_noising, by_weights, by_decays)


def _solved(kept: FloatArray, added: FloatArray) -> FloatArray:
    """Solves x_i = kept_i x_(i-1) + added_i."""
    return _substituted(kept, added, "N")


def _solved_transposed(kept: FloatArray, added: FloatArray) -> FloatArray:
    """Solves x_i = kept_(i+1) x_(i+1) + added_i."""
    return _substituted(kept, added, "T")


def _substituted(kept: FloatArray, added: FloatArray, transposed: str) -> FloatArray:
    bands = np.zeros((2, len(added)))
    bands[0] = 1.0
    bands[1, :-1] = -kept[1:]
    found, _ = dtbtrs(bands, added, uplo="L", trans=transposed, diag="U")
    return np.asarray(found).reshape(len(added))


def _later(values: FloatArray) -> FloatArray:
    """The entry before each."""
    return np.append(0.0, values[:-1])


def _earlier(values: FloatArray) -> FloatArray:
    """The entry after each: the transpose of :func:`_later`."""
    return np.append(values[1:], 0.0)


def objectives(rows: DecoderRows | StateRows, error: RoundError) -> tuple[Any, ...]:
    """Returns the functions of C^-1 to be minimised one after another for an error.

    Args:
      rows: B, by (n,) coefficients of C^-1 or by its states.
      error: The error.

    Returns:
      The error itself, or for a maximum that may be of any round, norms of rising order: each from
      C^-1 to a value and its slopes.
    """
    n = rows.num_rounds
    if not error.is_maximum:
        return (rows.weighing(np.full(n, 1.0 / n) if error.weights is None else error.weights),)
    if rows.is_increasing:
        return (rows.weighing(np.eye(1, n, n - 1)[0]),)

    def norm(noising: Any, order: float) -> tuple[float, Any]:
        value, shares = smooth_maximum(rows.squared(noising), order)
        return value, rows.weighing(shares)(noising)[1]

    return tuple(functools.partial(norm, order=order) for order in _ORDERS)


def state_objectives(workload: Workload, error: RoundError) -> tuple[StateObjective, ...]:
    """Returns the functions of states to be minimised one after another for an error.

    Args:
      workload: A.
      error: The error.
    """
    recursions = workload.recursions()
    if recursions is None or workload.coefficients() is not None:
        return tuple(_of_series(each) for each in objectives(of(workload), error))
    return objectives(StateRows(recursions), error)


def _of_series(objective: Objective) -> StateObjective:
    def of_states(states: States) -> tuple[float, StateSlopes]:
        value, slope = objective(states.noising)
        none = np.zeros(len(states.decays))
        return value, StateSlopes(slope, none, none)

    return of_states


def smooth_maximum(squared: FloatArray, exponent: float) -> tuple[float, FloatArray]:
    """Returns the norm of order p of e, which is at least the maximum, and its slope.

    Args:
      squared: (n,) e, none below zero and one above.
      exponent: p.

    Returns:
      The value, at most n^(1/p) times the maximum, and (n,) weights w with sum_i w_i e_i the value.
    """
    largest = float(np.max(squared))
    powers = (squared / largest) ** (exponent - 1.0)
    total = float(powers @ squared) / largest
    return largest * total ** (1.0 / exponent), powers * total ** (1.0 / exponent - 1.0)


@dataclasses.dataclass(frozen=True, eq=False)
class RowsByLags:
    """The numbers that determine the squared norms of some rows of B.

    Attributes:
      lags: (rows, p) L_i(d), the products of row i of A with itself moved by d.
      head: (rows, p - 1) the first columns of A.
    """

    lags: FloatArray
    head: FloatArray

    @classmethod
    def of(cls, workload: Workload | FloatArray, num_bands: int) -> "RowsByLags":
        """Returns those of all n rows.

        Args:
          workload: A, known by its name, or (n, n) and lower triangular.
          num_bands: p, at most n.
        """
        if isinstance(workload, Workload):
            column = workload.coefficients()
            bands = workloads.inverse_bands(workload)
            if column is not None:
                return cls._of_toeplitz(column, num_bands)
            if bands is not None:
                return next(_by_recursion(bands, num_bands, workload.num_rounds))
            workload = workload.matrix()
        num_rounds = len(workload)
        lags = [
            np.einsum("ij,ij->i", workload[:, lag:], workload[:, : num_rounds - lag])
            for lag in range(num_bands)
        ]
        return cls(np.stack(lags, axis=1), workload[:, : num_bands - 1].copy())

    @classmethod
    def _of_toeplitz(cls, column: FloatArray, num_bands: int) -> "RowsByLags":
        """Returns those of the Toeplitz workload with the first column (n,)."""
        num_rounds = len(column)
        lags = np.zeros((num_rounds, num_bands))
        head = np.zeros((num_rounds, num_bands - 1))
        for lag in range(num_bands):
            lags[lag:, lag] = np.cumsum(column[lag:] * column[: num_rounds - lag])
        for j in range(num_bands - 1):
            head[j:, j] = column[: num_rounds - j]
        return cls(lags, head)

    def gram(self, weights: FloatArray) -> FloatArray:
        """Returns the sum of w_i R_i, (p, p).

        Args:
          weights: (rows,) w.
        """
        of_head = self.head.T @ (weights[:, np.newaxis] * self.head)
        total = scipy.linalg.toeplitz(weights @ self.lags)
        missing = np.zeros_like(total)
        for t in range(1, len(total)):
            missing[t, 1:] = missing[t - 1, :-1] + of_head[t - 1]
        return np.asarray(total - missing)

    def squares(self, noising: FloatArray) -> FloatArray:
        """Returns the (rows,) squared norms x^T R_i x.

        Args:
          noising: (p,) x.
        """
        own = np.correlate(noising, noising, "full")[len(noising) - 1 :]
        own[1:] *= 2.0
        before = self.head @ _shifted(noising)
        return np.asarray(self.lags @ own - np.einsum("ij,ij->i", before, before))

    def slopes(self, noising: FloatArray) -> FloatArray:
        """Returns the (rows, p) products R_i x, halves of the gradients of the squared norms.

        Args:
          noising: (p,) x.
        """
        size = len(noising)
        by_lag = scipy.linalg.hankel(noising)
        by_lag[1:] += scipy.linalg.toeplitz(noising, np.zeros(size)).T[1:]
        total = self.lags @ by_lag
        if size > 1:
            before = self.head @ _shifted(noising)
            total[:, 1:] -= scipy.signal.fftconvolve(self.head, before, axes=1)[:, : size - 1]
        return np.asarray(total)


class MeanOfRows:
    """The logarithm of a weighted sum of squared norms."""

    def __init__(self, gram: FloatArray) -> None:
        """Takes the (p, p) quadratic form of the sum."""
        self._gram = gram

    def logarithm(self, noising: FloatArray, barrier: float) -> float:
        """Returns the value for (p,) coefficients of C^-1; it does not depend on the barrier."""
        del barrier
        return float(np.log(noising @ self._gram @ noising))

    def derivatives(self, noising: FloatArray, barrier: float) -> tuple[FloatArray, FloatArray]:
        """Returns its (p,) gradient and (p, p) second derivatives."""
        del barrier
        along = self._gram @ noising
        square = noising @ along
        gradient = 2.0 * along / square
        return gradient, 2.0 * self._gram / square - np.outer(gradient, gradient)


class WorstOfRows:
    """The logarithm of the largest squared norm, smoothed by a barrier."""

    def __init__(self, rows: RowsByLags) -> None:
        """Takes all n rows."""
        self._rows = rows

    def logarithm(self, noising: FloatArray, barrier: float) -> float:
        """Returns the smoothed value for (p,) coefficients of C^-1.

        Args:
          noising: x.
          barrier: mu.
        """
        logs = np.log(self._rows.squares(noising))
        below = _below_bound(logs, barrier)
        return float(logs[0] + below[0] - barrier * np.sum(np.log(below)))

    def derivatives(self, noising: FloatArray, barrier: float) -> tuple[FloatArray, FloatArray]:
        """Returns its (p,) gradient and (p, p) second derivatives."""
        squares = self._rows.squares(noising)
        multipliers = barrier / _below_bound(np.log(squares), barrier)
        bends = np.square(multipliers) / barrier
        # Rows far below the largest do not bend it, and there are many.
        matter = multipliers > _LEAST_MULTIPLIER * np.max(multipliers)
        rows = RowsByLags(self._rows.lags[matter], self._rows.head[matter])
        slopes = 2.0 * rows.slopes(noising) / squares[matter, np.newaxis]
        bends, changes = bends[matter], (bends - multipliers)[matter]
        total = 2.0 * self._rows.gram(multipliers / squares)
        gradient = total @ noising
        total += (slopes * changes[:, np.newaxis]).T @ slopes
        of_bound = bends @ slopes
        return gradient, total - np.outer(of_bound, of_bound) / np.sum(bends)


@dataclasses.dataclass(frozen=True, eq=False)
class RowsOfConstantRates:
    """The error of the rows of a Toeplitz B.

    Attributes:
      workload: A, of constant learning rates.
      error: Which error of the rounds.
      is_sum: Whether the error is a weighted sum, of which :meth:`weighted` knows.
    """

    is_sum: ClassVar[bool] = True

    workload: Workload
    error: RoundError

    @functools.cached_property
    def _objective(self) -> Objective:
        objective: Objective = objectives(of(self.workload), self.error)[0]
        return objective

    def squared(self, noising: FloatArray) -> float:
        """Returns the mean or weighted sum of the squared norms, or their maximum."""
        return self.weighted(noising)[0]

    def weighted(self, noising: FloatArray) -> tuple[float, FloatArray]:
        """Returns the same, and its (p,) gradient by the (p,) coefficients of C^-1."""
        value, slope = self._objective(power_series.padded(noising, self.workload.num_rounds))
        return value, slope[: len(noising)]

    def of_bands(self, num_bands: int) -> MeanOfRows:
        """Returns the quadratic form of the coefficients of C^-1."""
        column, weights = self.workload.coefficients(), self.error.lag_weights
        assert column is not None
        return MeanOfRows(gram_of_shifts(column, weights, np.arange(len(column)), num_bands, 0.0))


@dataclasses.dataclass(frozen=True, eq=False)
class RowsOfAnyRates:
    """Rows of B for any workload.

    Attributes:
      rows: Of as many bands as there is memory for; more are zero.
      error: Which error of the rounds.
    """

    rows: RowsByLags
    error: RoundError

    @property
    def num_bands(self) -> int:
        """The number of bands p."""
        return self.rows.lags.shape[1]

    @property
    def is_sum(self) -> bool:
        """Whether it is no maximum."""
        return not self.error.is_maximum

    def squared(self, noising: FloatArray) -> float:
        """Returns the mean or weighted sum of the squared norms, or their maximum."""
        return self.error.of_rows(self.rows.squares(noising[: self.num_bands]))

    def weighted(self, noising: FloatArray) -> tuple[float, FloatArray]:
        """Returns the weighted sum, and its (p,) gradient by the (p,) coefficients of C^-1."""
        gradient = 2.0 * self._gram @ noising
        return 0.5 * float(noising @ gradient), gradient

    @functools.cached_property
    def _gram(self) -> FloatArray:
        weights = self.error.weights
        return self.rows.gram(np.ones(len(self.rows.lags)) if weights is None else weights)

    def of_bands(self, num_bands: int) -> MeanOfRows | WorstOfRows:
        """Returns the same for at most as many bands."""
        if not self.error.is_maximum:
            return MeanOfRows(self._gram[:num_bands, :num_bands])
        rows = self.rows
        return WorstOfRows(RowsByLags(rows.lags[:, :num_bands], rows.head[:, : num_bands - 1]))


# The other factor of the error, besides the sensitivity.
Rows: TypeAlias = RowsOfConstantRates | RowsOfAnyRates


def gram_of_shifts(
    series: FloatArray, weights: FloatArray, rows: IntArray, num_bands: int, before: float
) -> FloatArray:
    """The (p, p) sums over ``rows`` t of weights[t] series[t - j] series[t - k].

    Args:
      series: (n,); ``before`` is its entry -1, and earlier ones are zero.
      weights: (n,).
      rows: Those of n whose weights are not zero.
      num_bands: p, at least 2.
      before: What stands before the first entry.
    """
    longer = np.concatenate([np.zeros(num_bands - 2), [before], series])
    windows = np.lib.stride_tricks.sliding_window_view(longer, num_bands)
    total = np.zeros((num_bands, num_bands))
    for start in range(0, len(rows), _ROWS_AT_A_TIME):
        chosen = rows[start : start + _ROWS_AT_A_TIME]
        weighted = np.sqrt(weights[chosen])[:, np.newaxis] * windows[chosen]
        total += weighted.T @ weighted
    return total[::-1, ::-1]


def _below_bound(logs: FloatArray, barrier: float) -> FloatArray:
    """The (n,) s - l_i, for the s with sum_i mu / (s - l_i) = 1."""
    below = float(np.max(logs)) - logs
    above = barrier
    # Newton's method on the reciprocal of the sum, which is concave: from below, and monotone.
    for _ in range(_STEPS_OF_BOUND):
        terms = barrier / (below + above)
        total = float(np.sum(terms))
        above += (total - 1.0) * total * barrier / float(np.sum(np.square(terms)))
        if total - 1.0 <= _ROUNDING_OF_BOUND:
            break
    return below + above


def squared_rows(inverse_bands: FloatArray, noising: FloatArray) -> FloatArray:
    """Returns the (n,) squared norms of the rows of B, in O(n + p) memory.

    Args:
      inverse_bands: (n, w) the bands of A^-1, ``inverse_bands[i, t] = A^-1[i, i - t]``.
      noising: (p,) the coefficients of C^-1.
    """
    size = len(noising)
    parts = _by_recursion(inverse_bands, size, max(1, _NUMBERS_AT_A_TIME // size))
    return np.concatenate([part.squares(noising) for part in parts])


def _shifted(noising: FloatArray) -> FloatArray:
    """(p - 1, p - 1): what entries of A's first columns are times in columns -1, -2, ... of B."""
    return np.asarray(scipy.linalg.hankel(noising[1:]))


def _by_recursion(bands: FloatArray, num_bands: int, at_a_time: int) -> Iterator[RowsByLags]:
    """Blocks of rows, from the (n, w) bands of A^-1."""
    num_rounds, width = bands.shape
    factors = -bands[:, 1:] / bands[:, :1]
    gains = 1.0 / bands[:, 0]
    known, lags = width - 1, 2 * num_bands - 1
    # Of the last w - 1 rows, the last one first: products of row k with row l moved by -p + 1 to
    # p - 1, entries from the diagonal to the left, and first entries.
    products = np.zeros((known, known, lags))
    near = np.zeros((known, num_bands + known))
    heads = np.zeros((known, num_bands - 1))
    for start in range(0, num_rounds, at_a_time):
        stop = min(num_rounds, start + at_a_time)
        block = RowsByLags(
            np.empty((stop - start, num_bands)), np.empty((stop - start, num_bands - 1))
        )
        for i in range(start, stop):
            factor, gain = factors[i], gains[i]
            # Row k has its entry of column i - d at near[k, d - 1 - k].
            with_earlier = (factor @ products.reshape(known, known * lags)).reshape(known, lags)
            for k in range(known):
                after = min(num_bands + k, lags)
                with_earlier[k, after:] += gain * near[k, : lags - after]
            entries = np.zeros(num_bands + known)
            entries[0] = gain
            for k in range(known):
                entries[k + 1 :] += factor[k] * near[k, : num_bands + known - k - 1]
            with_itself = factor @ with_earlier[:, num_bands - 1 :: -1] + gain * entries[:num_bands]
            head = factor @ heads
            if i < num_bands - 1:
                head[i] += gain
            block.lags[i - start] = with_itself
            block.head[i - start] = head
            if known:
                products[1:, 1:] = products[:-1, :-1].copy()
                # Symmetric in the lag to the last bit: rounding that is not would grow.
                products[0, 0, num_bands - 1 :] = with_itself
                products[0, 0, : num_bands - 1] = with_itself[:0:-1]
                products[0, 1:] = with_earlier[:-1]
                products[1:, 0] = with_earlier[:-1, ::-1]
                near = np.concatenate([entries[np.newaxis], near[:-1]])
                heads = np.concatenate([head[np.newaxis], heads[:-1]])
        yield block
