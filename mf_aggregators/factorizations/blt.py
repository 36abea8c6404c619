"""Buffered linear Toeplitz (BLT) factorizations: correlated noise from a few vectors of state.

The coefficients of C are c_0 = 1 and c_t = sum_m w_m d_m^(t-1), so that its generating
function is rational, c(x) = prod_m (1 - e_m x) / (1 - d_m x), and so is that of C^-1, with
the decays d and e exchanged (McMahan, Xu and Zhang, "A hassle-free algorithm for private
learning in practice"; Dvijotham, McMahan, Pillutla, Steinke and Thakurta, "Efficient and
near-optimal noise generation for streaming differential privacy").

All matrices here interlace, 1 > d_1 > e_1 > d_2 > e_2 > ... > e_m > -1, which makes all weights of
C positive and all weights of C^-1 negative. So the sums below lose no digits by cancellation, and
the coefficients of C are non-negative and non-increasing, which makes the sensitivity exact.

With decays d of C and e of C^-1 that interlace, in distances y = 1 - d and z = 1 - e,

* c_0 = 1 and c_t = sum_m w_m d_m^(t-1), w_m = prod_j (z_j - y_m) / prod_{j != m} (y_j - y_m),
* b_t, the running sum of C^-1's coefficients, is beta + sum_m g_m e_m^t, with
  beta = prod_m y_m / z_m and g_m = -w'_m / z_m for the weights w' of C^-1,

where all w, g and beta are positive. The sensitivity sums c_t over a pattern 0, b, 2 b, ...:
a sum of powers within each stretch of b rounds. Sums of squares of such sums are geometric series
in products of decays. So the time for an error depends on the number of stretches, not of rounds.

**Changing learning rates.** The noise has few states, and so has training: a sequence of stages,
A = F_q ... F_1. With the coefficients g of C^-1, let y_i = z_i + sum_l v_l u^l_(i-1) with
u^l_i = d_l u^l_(i-1) + z_i, and x^0 = y, x^b_i = p^b_i x^b_(i-1) + h^b_i x^(b-1)_i for the stages
b = 1, ..., q. Then the squared norm e_i of row i of B is Var(x^q_i). With c_ab and f_ab the
covariances of x^a_i with x^b_i and with x^b_(i-1),

    f_ab = p^a c_ab(i-1) + h^a f_(a-1)b,    c_ab = p^b f_ab + h^b c_a(b-1),

which starts from c_00 = Var(y_i), a running sum of g_t^2, and f_0b = sum_l v_l s^b_l(i-1). There
s^b_l is the covariance of x^b_i with u^l_i: s^0_l is a running sum of g_t d_l^t, and

    s^b_l(i) = d_l p^b_i s^b_l(i-1) + h^b_i s^(b-1)_l(i).

Everything is linear in c_00 and f_0b, so that weights of e_i become weights of these, once for all
C. Transposed recursions take them back to g_t d_l^t, and one more for each to slopes by d_l.

**Scales.** With C = P T D, s the norms of the columns of P T and nu = P^-2 (``_scaled``), training
with the momentum beta and the learning rates eta is

    u^l_i = d_l u^l_(i-1) + z_i,    y_i = z_i + sum_l v_l u^l_(i-1),    Var(z_i) = nu_i,
    w_i = beta w_(i-1) + s_i y_i,   x_i = x_(i-1) + eta_i w_i,

and row i of B has the squared norm Var(x_i), which follows from covariances in O(n m^2):

    of u^l and u^k      U^lk_i = d_l d_k U^lk_(i-1) + nu_i
    of u^l and y        r^l_i = nu_i + d_l sum_k v_k U^lk_(i-1)
    of y                V_i = nu_i + v^T U_(i-1) v
    of u^l and w        q^l_i = beta d_l q^l_(i-1) + s_i r^l_i
    of u^l and x        p^l_i = d_l p^l_(i-1) + eta_i q^l_i
    of w                W_i = beta^2 W_(i-1) + 2 beta s_i v^T q_(i-1) + s_i^2 V_i
    of x_(i-1) and w_i  K_i = beta G_(i-1) + s_i v^T p_(i-1)
    of x_i and w_i      G_i = K_i + eta_i W_i

with Var(x_i) = Var(x_(i-1)) + 2 eta_i K_i + eta_i^2 W_i. Slopes follow from the same recursions,
transposed.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np
import scipy.linalg
import scipy.optimize
import scipy.signal
from scipy.linalg.lapack import dtbtrs

from mf_aggregators.factorizations._decoder_rows import DecoderRows
from mf_aggregators.factorizations._scaled import MOST_ROUNDS, ScaledToeplitz
from mf_aggregators.factorizations.searches import (
    NotConvergedWarning,
    Objective,
    RoundError,
    RoundWeights,
    minimise,
    progress_bar,
)
from mf_aggregators.factorizations.toeplitz import PatternOfRounds, Problem
from mf_aggregators.kernel import numbers
from mf_aggregators.kernel.numbers import ComplexArray, FloatArray, IntArray
from mf_aggregators.kernel.rows import StateSpaceNoise
from mf_aggregators.participation import Participation
from mf_aggregators.progress_bars import ProgressBar
from mf_aggregators.workloads import AnyWorkload, Recursion, Workload

# How many starting points for one more buffer are refined by a search.
_STARTS_FOLLOWED = 3
# A refinement ends when a step reduces the logarithm of the error by less than the first number;
# the refinement of the best candidate, by less than the second.
_LEAST_CHANGES = 1e-9, 1e-13
# The smallest and the largest logarithm of the ratio of neighbouring distances in a search.
_CLOSEST, _FARTHEST = 1e-9, 20.0
# Stands for the logarithm of the error of invalid decays.
_INFEASIBLE = 1e3
# The imaginary step of complex-step derivatives, which are exact up to rounding.
_STEP = 1e-100
# The most rounds for which sums over all of them are faster than the closed form.
_MOST_ROUNDS_OF_SUMS = 4096
# Above this number of stretches times 2 m variables, closed forms would take too much memory.
_LARGEST_CLOSED_FORM = 1 << 22
# Below this exponent a weighted geometric series is summed by its Taylor series.
_SMALL_EXPONENT = 1e-4
_MOST_BUFFERS = 8
_ROUNDING = 1e-14


@dataclasses.dataclass(frozen=True, eq=False)
class _States:
    """The state-space form of C^-1, or the gradient of a function by its numbers.

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


_Numbers = TypeVar("_Numbers", FloatArray, ComplexArray)
# Covariances by the pair of stages between which they are.
_Pairs: TypeAlias = dict[tuple[int, int], FloatArray]
# A function from C^-1 to a weighted sum of e, with its gradient.
_StateObjective: TypeAlias = Callable[[_States], tuple[float, _States]]


class _StateRows(DecoderRows["_States"]):
    """The squared norms of the rows of B if C^-1 has few states, in O(n m) operations."""

    def __init__(self, recursions: Sequence[Recursion]) -> None:
        """Stores the stages.

        Args:
          recursions: The stages of the workload, at least one.
        """
        self._stages = tuple(recursions)
        self.num_rounds = len(self._stages[0].kept)

    def squared(self, states: _States) -> FloatArray:
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

    def weighing(self, weights: FloatArray) -> _StateObjective:
        """Returns the function sum_i w_i e_i of the states, with its gradient.

        Args:
          weights: (n,) w.
        """
        return functools.partial(self._weighted, sources=self._sources(weights))

    def _sources(self, weights: FloatArray) -> tuple[FloatArray, ...]:
        """The (n,) weights of c_00 and of f_01, ..., f_0q that follow from weights of e."""
        last = len(self._stages)
        same: _Pairs = {
            (a, b): np.zeros(self.num_rounds) for b in range(last + 1) for a in range(b + 1)
        }
        same[last, last] = weights.copy()
        found: dict[int, FloatArray] = {}
        for b in range(last, 0, -1):
            stage, before = self._stages[b - 1], np.zeros(self.num_rounds)
            # The transposed steps of _propagated, in reverse order.
            for a in range(b, 0, -1):
                other = self._stages[a - 1]
                same[a, b] += _earlier(other.kept * before)
                added = _solved_transposed(stage.kept * other.kept, same[a, b])
                before = other.added * before + stage.kept * other.added * added
                same[min(a, b - 1), max(a, b - 1)] += stage.added * added
            found[b] = before + stage.kept * same[0, b]
            same[0, b - 1] += stage.added * same[0, b]
        return (same[0, 0], *(found[b] for b in range(1, last + 1)))

    def _weighted(self, states: _States, sources: tuple[FloatArray, ...]) -> tuple[float, _States]:
        """The weighted sum and its gradient, from the results of :meth:`_sources`."""
        noising, powers = states.noising, states.powers
        tails = np.cumsum(sources[0][::-1])[::-1]
        by_noising = 2.0 * noising * tails
        value = 0.5 * float(by_noising @ noising)
        by_weights, by_decays = np.empty(len(powers)), np.empty(len(powers))
        lags = np.arange(1.0, len(noising))
        for each, (weight, decay) in enumerate(zip(states.weights, states.decays, strict=True)):
            # The weights of the covariances with u^l, and their derivatives by d_l.
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
        return value, _States(by_noising, by_weights, by_decays)


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


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class BltFactorization(ScaledToeplitz):
    """A BLT factorization: coefficients of C are sums of ``num_buffers`` decaying powers.

    Its generating function is c(x) = prod_m (1 - e_m x) / (1 - d_m x). With scales, T has this
    generating function instead, and C = P T D has columns of norm one.

    Attributes:
      num_rounds: n.
      buffer_decays: (m,) decays d of C, decreasing, read-only.
      inverse_decays: (m,) decays e of C^-1, read-only, with
        1 > d_1 >= e_1 > d_2 >= ... >= e_m > -1; a pair of equal decays has no effect.

    Raises:
      ValueError: If the decays do not interlace, or the coefficients of C are not non-increasing
        (the sensitivity would not be known), or as for :class:`ScaledToeplitz`.
    """

    mechanism = "blt"
    _described_as = "the BLT matrix"
    can_extend = True

    buffer_decays: FloatArray
    inverse_decays: FloatArray

    def __post_init__(self) -> None:
        super().__post_init__()
        decays = numbers.real_array(self.buffer_decays, "buffer_decays").copy()
        inverse = numbers.real_array(self.inverse_decays, "inverse_decays").copy()
        if decays.ndim != 1 or decays.shape != inverse.shape or not len(decays):
            raise ValueError(
                "buffer_decays and inverse_decays must be vectors of one length, found shapes "
                f"{decays.shape} and {inverse.shape}."
            )
        # Written so that NaN does not pass.
        if not (_interlace(decays, inverse) and decays[0] < 1.0 and inverse[-1] > -1.0):
            raise ValueError(
                "the decays must interlace, 1 > buffer_decays[0] >= inverse_decays[0] > "
                "buffer_decays[1] >= ... > -1: otherwise no sensitivity is known."
            )
        # Rounding may make a sum of one slightly larger; the margin of the sensitivity covers this.
        if np.sum(_partial_fractions(decays, inverse)) > 1.0 + _ROUNDING or decays[-1] < 0.0:
            raise ValueError(
                "the coefficients of the strategy matrix must be non-negative and non-increasing: "
                "otherwise no sensitivity is known."
            )
        self._set(buffer_decays=decays, inverse_decays=inverse)

    @property
    def num_buffers(self) -> int:
        """The number of buffers m: vectors of state in C and in C^-1."""
        return len(self.buffer_decays)

    @property
    def output_scales(self) -> FloatArray:
        """The (m,) positive weights of C's decays."""
        return np.asarray(_partial_fractions(self.buffer_decays, self.inverse_decays))

    @property
    def inverse_output_scales(self) -> FloatArray:
        """The (m,) negative weights of C^-1's decays."""
        return np.asarray(_partial_fractions(self.inverse_decays, self.buffer_decays))

    @np.errstate(under="ignore")
    def strategy_coefficients(self) -> FloatArray:
        """Returns the first column of C, or of T if there are scales, (n,) float64."""
        return _coefficients_of(self.buffer_decays, self.output_scales, self.num_rounds)

    @np.errstate(under="ignore")
    def noising_coefficients(self) -> FloatArray:
        """Returns the first column of C^-1, or of T^-1, (n,) float64."""
        return _coefficients_of(self.inverse_decays, self.inverse_output_scales, self.num_rounds)

    @np.errstate(under="ignore")
    def _squared_rows(self, workload: AnyWorkload) -> FloatArray | None:
        """Takes O(n) operations and memory for a named workload."""
        recursions = _changing_recursions(workload) if isinstance(workload, Workload) else None
        if recursions is None or self.row_scales is not None:
            return super()._squared_rows(workload)
        noising, weights = self.noising_coefficients(), self.inverse_output_scales
        return _StateRows(recursions).squared(_States(noising, weights, self.inverse_decays))

    def _decoder_squares(
        self, momentum: float, rates: FloatArray, nu: FloatArray, norms: FloatArray
    ) -> "_ScaledSquares":
        states = self.inverse_decays, self.inverse_output_scales
        return _ScaledSquares(states, momentum, rates, nu, norms)

    def _inner_rows(self) -> StateSpaceNoise:
        """The recursion over ``num_buffers`` vectors, the buffers of T: T Y = Z."""
        count = self.num_buffers
        return StateSpaceNoise(
            phases=np.zeros(self.num_rounds, np.int64),
            gains=np.ones(1),
            outputs=-self.output_scales[np.newaxis],
            sources=np.arange(count)[np.newaxis],
            decays=self.buffer_decays[np.newaxis].copy(),
            feedbacks=np.ones((1, count)),
        )


class _ScaledSquares:
    """The squared norms of the rows of B with scales, and their gradients, in O(n m^2)."""

    def __init__(
        self,
        states: tuple[FloatArray, FloatArray],
        momentum: float,
        rates: FloatArray,
        nu: FloatArray,
        norms: FloatArray,
    ) -> None:
        """Runs the recursions.

        Args:
          states: The decays d and the weights v of T^-1, (m,) each.
          momentum: beta.
          rates: (n,) eta.
          nu: (n,) the squares of the diagonal of P^-1.
          norms: (n,) s, those of the columns of P T.
        """
        self._states, self._momentum, self._rates, self._norms = states, momentum, rates, norms
        (decays, weights), beta, m = states, momentum, len(states[0])
        # Covariances in the previous round.
        self._of_y, self._with_y = nu.copy(), [nu.copy() for _ in range(m)]
        for i in range(m):
            for j in range(i + 1):
                covariance = _later(_filtered(decays[i] * decays[j], nu))
                self._of_y += (1.0 + (i != j)) * weights[i] * weights[j] * covariance
                self._with_y[i] += decays[i] * weights[j] * covariance
                if i != j:
                    self._with_y[j] += decays[j] * weights[i] * covariance
        self._w_and_y, self._x_and_y = np.zeros((2, len(nu)))
        for decay, weight, with_y in zip(decays, weights, self._with_y, strict=True):
            with_w = _filtered(beta * decay, norms * with_y)
            self._w_and_y += weight * _later(with_w)
            self._x_and_y += weight * _later(_filtered(decay, rates * with_w))
        added = 2.0 * beta * norms * self._w_and_y + np.square(norms) * self._of_y
        of_w = _filtered(beta * beta, added)
        moved = norms * self._x_and_y
        before = _later(_filtered(beta, moved + rates * of_w))
        crossed = beta * before + moved
        self.squared = np.cumsum(rates * (2.0 * crossed + rates * of_w))

    def slopes(self, weights: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Returns the gradient of sum_i w_i Var(x_i): by nu, and by s.

        Args:
          weights: (n,) w.
        """
        (decays, own), beta = self._states, self._momentum
        rates, norms = self._rates, self._norms
        tails = np.cumsum(weights[::-1])[::-1]
        by_crossed = _filtered_back(beta, 2.0 * rates * tails)
        by_w = rates * rates * tails + rates * beta * _earlier(by_crossed)
        by_w = _filtered_back(beta * beta, by_w)
        by_y, by_w_and_y = np.square(norms) * by_w, 2.0 * beta * norms * by_w
        by_x_and_y = norms * by_crossed
        by_norms = by_w * (2.0 * beta * self._w_and_y + 2.0 * norms * self._of_y)
        by_norms += by_crossed * self._x_and_y
        by_nu, by_with_y = by_y.copy(), []
        for decay, weight, with_y in zip(decays, own, self._with_y, strict=True):
            by_x = _filtered_back(decay, weight * _earlier(by_x_and_y))
            by_q = rates * by_x + weight * _earlier(by_w_and_y)
            by_q = _filtered_back(beta * decay, by_q)
            by_norms += by_q * with_y
            by_with_y.append(norms * by_q)
            by_nu += by_with_y[-1]
        for i in range(len(decays)):
            for j in range(i + 1):
                # U is symmetric, so an entry off the diagonal counts twice.
                pairs = [(i, j)] if i == j else [(i, j), (j, i)]
                direct = len(pairs) * own[i] * own[j] * by_y
                for a, b in pairs:
                    direct = direct + decays[a] * own[b] * by_with_y[a]
                by_nu += _filtered_back(decays[i] * decays[j], _earlier(direct))
        return by_nu, by_norms


def _filtered(kept: float, added: FloatArray) -> FloatArray:
    """x_i = kept x_(i-1) + added_i."""
    return np.asarray(scipy.signal.lfilter([1.0], [1.0, -kept], added))


def _filtered_back(kept: float, added: FloatArray) -> FloatArray:
    """x_i = kept x_(i+1) + added_i."""
    return np.asarray(_filtered(kept, added[::-1])[::-1])


@np.errstate(under="ignore")
def blt(
    workload: object,
    num_buffers: int | None = None,
    participation: Participation | None = None,
    *,
    accuracy: float = 0.01,
    equal_column_norms: bool = False,
    error: RoundWeights = "mean",
    max_evaluations: int = 2000,
    show_progress: bool = False,
) -> BltFactorization:
    """Computes a BLT factorization of a workload, in O(n) memory.

    Use it when memory for noise is scarce: each buffer takes one vector as long as the model.

    The search runs over logarithms of the 2 m decays' distances from one, in a form that always
    interlaces. The search for m buffers starts from the best m - 1 buffers with one more pair of
    decays at different places, so more buffers are never worse.

    Args:
      workload: What to optimise for: an int n for the prefix sum of n rounds, a
        ``workloads.Workload``, or the (n, n) array of one. If rates change, each evaluation takes
        O(n) time.
      num_buffers: The number of buffers m, 1 to 8. None for the smallest number whose error (root
        of the mean or maximum) is at most ``accuracy`` above that of 8 buffers.
      participation: The schema to optimise for; SingleParticipation by default.
      accuracy: If ``num_buffers`` is None: the share, at least 0, by which the error may exceed
        that of 8 buffers.
      equal_column_norms: Whether rows and columns are scaled, C = P T D, so that all columns have
        norm one. For one participation, this has less error with the same buffers, close to the
        least error of all matrices. The run cannot be extended.
      error: What to minimise: the ``mean`` squared error over rounds, its ``max``, or the sum with
        (n,) weights of the rounds, none below zero. A maximum that may be of any round is
        approached by norms, to a fraction of a percent.
      max_evaluations: Give up a search after this many evaluations of the error.
      show_progress: Whether to show a progress bar on standard error.

    Returns:
      The factorization. If the last search stopped before its gradient vanished, the
      best decays found, with a NotConvergedWarning.

    Raises:
      ValueError: If an argument is out of its range, the workload is not a named one, or the
        schema's participations do not fit into the rounds.

    Example:
      >>> import mf_aggregators as mfa
      >>> timers = mfa.participation.MinSeparation(separation=16)
      >>> buffered = mfa.factorizations.blt(64, num_buffers=2, participation=timers)
      >>> round(buffered.rmse(mfa.workloads.prefix_sum(64), timers), 2)
      4.92
    """
    accuracy = numbers.non_negative_number(accuracy, "accuracy")
    if num_buffers is not None:
        num_buffers = numbers.positive_integer(num_buffers, "num_buffers")
        if num_buffers > _MOST_BUFFERS:
            raise ValueError(f"num_buffers must be at most {_MOST_BUFFERS}, found {num_buffers}.")
    problem = Problem.of(workload, participation, error, max_evaluations, "the BLT matrix")
    name = f"{num_buffers or _MOST_BUFFERS} buffers"
    with progress_bar(name, show=show_progress) as progress:
        found = _Search(problem, problem.nearest_constant, progress).levels()
        if not problem.has_constant_rates:
            found = _Search(problem, problem.named, progress).levels(found)
        levels = list(itertools.islice(found, num_buffers or _MOST_BUFFERS))
    parameters = problem.parameters()
    level = levels[-1]
    if num_buffers is None:
        parameters["accuracy"] = accuracy
        # Logarithms of squared errors.
        highest = level.log_error + 2.0 * np.log1p(accuracy)
        level = next(each for each in levels if each.log_error <= highest)
    NotConvergedWarning.unless_stationary(level.result)
    decays, rounds = 1.0 - level.distances, problem.pattern.num_rounds
    buffers = len(decays) // 2
    made = BltFactorization(
        rounds,
        decays[0::2],
        decays[1::2],
        participation=problem.participation,
        parameters={"num_buffers": buffers, **parameters},
    )
    if not equal_column_norms:
        return made
    shorter = None
    if rounds > MOST_ROUNDS and problem.error.weights is None:
        fewer = dataclasses.replace(problem.nearest_constant, num_rounds=MOST_ROUNDS)
        kind: RoundWeights = "max" if problem.error.is_maximum else "mean"
        shorter = blt(fewer, buffers, error=kind, equal_column_norms=True)
    return made.scaled(problem, shorter)


class _Level(NamedTuple):
    """The result of a search for a number of buffers m.

    Attributes:
      distances: (2 m,) increasing distances.
      result: The result of SciPy's optimiser.
      log_error: The logarithm of the squared error.
    """

    distances: FloatArray
    result: scipy.optimize.OptimizeResult
    log_error: float


def _steps(distances: FloatArray) -> FloatArray:
    """Logarithms of the logarithms of the ratios of neighbouring distances, within bounds."""
    ratios = np.diff(-np.log(distances)[::-1], prepend=0.0)[::-1]
    return np.asarray(np.log(np.clip(ratios, _CLOSEST, _FARTHEST)))


def _distances(steps: FloatArray) -> FloatArray:
    """The distances of :func:`_steps`."""
    return np.asarray(np.exp(-np.cumsum(np.exp(steps)[::-1])[::-1]))


class _Search:
    """The search for distances y = 1 - decay, in the order d_1, e_1, d_2, e_2, ..."""

    def __init__(self, problem: Problem, workload: Workload, progress: ProgressBar) -> None:
        self._objectives = _log_errors(workload, problem.error)
        self._pattern = problem.pattern
        self._momentum = problem.momentum
        self._max_evaluations = problem.max_evaluations
        self._progress = progress
        # A decay with a smaller distance from one is constant over all rounds, up to rounding.
        self._least_distance = 1e-3 / float(problem.pattern.num_rounds) ** 2

    def levels(self, others: Iterator[_Level] | None = None) -> Iterator[_Level]:
        """Yields the best increasing distances found for 1 buffer, 2, and so on.

        Args:
          others: The levels of another search, from which this search starts as well.
        """
        slow = 1.0 / (self._pattern.num_rounds + 1.0)
        starts = [[slow, slow**0.5], [slow**0.5, slow**0.25], [0.3, 0.9], [1e-4 * slow, 0.05]]
        if self._momentum:
            # The square root of the workload has its second pole at the momentum.
            fast = 1.0 - self._momentum
            starts += [[slow, max(2.0 * slow, fast)], [slow, max(2.0 * slow, fast**0.5)]]
        refined = [self._refined(np.array(start)) for start in starts]
        best = self._best([*refined, *self._from(others)])
        while True:
            yield best
            found = best.distances
            candidates = sorted(_with_one_more_pair(found), key=lambda y: self._log_error(y)[0])
            # If clients return, a decay close to one, a constant in C, may be best.
            candidates.insert(0, np.concatenate([found[0] * np.array([1e-4, 5e-2]), found]))
            refined = [self._refined(start) for start in candidates[: 1 + _STARTS_FOLLOWED]]
            # The same matrix with one more pair of decays, which cancel each other.
            refined += self._from(others)
            idle = _with_idle_pair(found)
            best = self._best([*refined, _Level(idle, best.result, self._log_error(idle)[0])])

    def _from(self, others: Iterator[_Level] | None) -> list[_Level]:
        """The next level of another search, and the result of a search from it."""
        if others is None:
            return []
        other = next(others)
        own = _Level(other.distances, other.result, self._log_error(other.distances)[0])
        return [self._refined(other.distances), own]

    def _best(self, candidates: list[_Level]) -> _Level:
        """The best candidate after a longer search from it, which ends at smaller steps."""
        best = min(candidates, key=lambda level: level.log_error)
        last = self._refined(best.distances, _LEAST_CHANGES[1])
        return min(last, best, key=lambda level: level.log_error)

    def _refined(self, distances: FloatArray, least_change: float = _LEAST_CHANGES[0]) -> _Level:
        """Runs L-BFGS from given distances 1 - decay, for one objective after another.

        It runs over the logarithms of the logarithms of the ratios of neighbouring distances.
        """
        for objective in self._objectives:

            def function(
                free: FloatArray, objective: Objective = objective
            ) -> tuple[float, FloatArray]:
                steps = np.exp(free)
                candidate = _distances(free)
                candidates = np.maximum(candidate, self._least_distance)
                value, gradient = self._log_error(candidates, objective)
                if not np.isfinite(value):
                    return _INFEASIBLE, np.zeros_like(free)
                gradient = np.where(candidate > self._least_distance, gradient * candidate, 0.0)
                return value, -np.cumsum(gradient) * steps

            result = minimise(
                function,
                _steps(distances),
                bounds=[(np.log(_CLOSEST), np.log(_FARTHEST))] * len(distances),
                max_evaluations=self._max_evaluations,
                corrections=40,
                least_change=least_change,
                least_slope=1e-9,
            )
            distances = np.maximum(_distances(result.x), self._least_distance)
        return _Level(distances, result, self._log_error(distances)[0])

    def _log_error(
        self, distances: FloatArray, objective: Objective | None = None
    ) -> tuple[float, FloatArray]:
        """The logarithm of the squared error and its gradient by the distances.

        By default, of the last objective.
        """
        self._progress.update()
        decays = 1.0 - distances
        if not _interlace(decays[0::2], decays[1::2]) or decays[0] >= 1.0:
            return np.inf, np.zeros_like(distances)
        of_rows, by_rows = (objective or self._objectives[-1])(distances)
        of_pattern, by_pattern = _log_squared_sensitivity(distances, self._pattern)
        return of_rows + of_pattern, by_rows + by_pattern


def _log_squared_sensitivity(
    distances: FloatArray, pattern: PatternOfRounds
) -> tuple[float, FloatArray]:
    """Returns the logarithm of sens(C)^2, and its gradient.

    Args:
      distances: (2 m,) increasing distances y_1, z_1, y_2, z_2, ..., all above 0 and below 1.
      pattern: The pattern that gives the sensitivity.

    Returns:
      The value and a (2 m,) gradient.
    """
    stretches = -(-pattern.num_rounds // pattern.separation)
    is_long = pattern.num_rounds > _MOST_ROUNDS_OF_SUMS
    if is_long and stretches * len(distances) <= _LARGEST_CLOSED_FORM:
        ours, inverse = _perturbed(distances)
        return _logarithm(_squared_sensitivity(ours, _weights(ours, inverse), pattern))
    own, other = 1.0 - distances[0::2], 1.0 - distances[1::2]
    column = _coefficients_of(own, _partial_fractions(own, other), pattern.num_rounds)
    squared, by_column = pattern.squared_sensitivity(column)
    return float(np.log(squared)), -_along_decays(distances, column, by_column) / squared


def _log_squared_rows(
    distances: FloatArray, num_rounds: int, is_maximum: bool
) -> tuple[float, FloatArray]:
    """Returns the logarithm of an error of the rows of B for the prefix sum.

    Args:
      distances: As :func:`_log_squared_sensitivity` takes them.
      num_rounds: n.
      is_maximum: Whether the error is the maximum over rounds instead of the mean.

    Returns:
      The value and a (2 m,) gradient.
    """
    ours, inverse = _perturbed(distances)
    return _logarithm(_squared_rows(ours, inverse, num_rounds, is_maximum))


def _log_errors(workload: Workload, error: RoundError) -> list[Objective]:
    """Returns the objectives that a search minimises in turn: logarithms of errors.

    Args:
      workload: A.
      error: The error of the rows of B.
    """
    num_rounds = workload.num_rounds
    if workload.is_prefix_sum and error.weights is None:
        closed = functools.partial(
            _log_squared_rows, num_rounds=num_rounds, is_maximum=error.is_maximum
        )
        return [closed]
    recursions = _changing_recursions(workload)
    objectives: tuple[_StateObjective, ...]
    if recursions is None:
        series = DecoderRows.of(workload).objectives(error)
        objectives = tuple(functools.partial(_of_series, objective=each) for each in series)
    else:
        objectives = _StateRows(recursions).objectives(error)
    return [
        functools.partial(_log_rows, objective=each, num_rounds=num_rounds) for each in objectives
    ]


def _changing_recursions(workload: Workload) -> tuple[Recursion, ...] | None:
    """The recursions of a workload, or None if it is Toeplitz."""
    return workload.recursions() if workload.coefficients() is None else None


def _of_series(states: "_States", objective: Objective) -> tuple[float, "_States"]:
    """Turns an objective of the coefficients of C^-1 into one of its states."""
    value, slope = objective(states.noising)
    none = np.zeros(len(states.decays))
    return value, _States(slope, none, none)


def _log_rows(
    distances: FloatArray, objective: _StateObjective, num_rounds: int
) -> tuple[float, FloatArray]:
    """The logarithm of an objective of the states of C^-1, as a function of the distances."""
    ours, inverse = 1.0 - distances[0::2], 1.0 - distances[1::2]
    weights = _partial_fractions(inverse, ours)
    noising = _coefficients_of(inverse, weights, num_rounds)
    squared, slopes = objective(_States(noising, weights, inverse))
    if not squared > 0.0:
        return np.inf, np.zeros_like(distances)
    gradient = _along_decays(distances, noising, slopes.noising)
    if np.any(slopes.weights):
        by_weights = _weights(*_perturbed(distances)[::-1]).imag @ slopes.weights
        gradient += by_weights / _STEP
    # A distance is one minus the decay.
    gradient[1::2] -= slopes.decays
    return float(np.log(squared)), gradient / squared


def _perturbed(distances: FloatArray) -> tuple[ComplexArray, ComplexArray]:
    """(2 m, m) distances of C and of C^-1: in row i, distance i has an imaginary step."""
    perturbed = distances + 1j * _STEP * np.eye(len(distances))
    return perturbed[:, 0::2], perturbed[:, 1::2]


def _logarithm(values: ComplexArray) -> tuple[float, FloatArray]:
    """The logarithm of values at perturbed distances, and its gradient."""
    return float(np.log(values.real[0])), values.imag / values.real / _STEP


def _along_decays(distances: FloatArray, series: FloatArray, slope: FloatArray) -> FloatArray:
    """The gradient by the distances of a function of C^-1's coefficients, from its gradient.

    For a function of the coefficients of C, the sign is the opposite.
    """
    gradient = np.empty_like(distances)
    for j, distance in enumerate(distances):
        # d log c^-1(x) / d d_m = -x / (1 - d_m x), and with the other sign for e_m.
        along = slope @ scipy.signal.lfilter([0.0, 1.0], [1.0, distance - 1.0], series)
        gradient[j] = -along if j % 2 else along
    return gradient


def _with_one_more_pair(distances: FloatArray) -> Iterator[FloatArray]:
    """Yields the distances with two more, between any two neighbours or before the first."""
    logs = np.concatenate([[np.log(distances[0]) - 3.0], np.log(distances), [0.0]])
    for i in range(len(logs) - 1):
        below, above = logs[i], logs[i + 1]
        pair = [below + (above - below) / 3.0, below + (above - below) * 2.0 / 3.0]
        yield np.exp(np.concatenate([logs[1 : i + 1], pair, logs[i + 1 : -1]]))


def _with_idle_pair(distances: FloatArray) -> FloatArray:
    """The distances with a pair of equal ones, which has no effect."""
    between = (1.0 + distances[-1]) / 2.0
    return np.concatenate([distances, [between, between]])


def _interlace(decays: FloatArray, inverse_decays: FloatArray) -> bool:
    """Whether d_1 >= e_1 > d_2 >= e_2 > ..."""
    return bool(np.all(decays >= inverse_decays) and np.all(inverse_decays[:-1] > decays[1:]))


def _partial_fractions(poles: _Numbers, zeros: _Numbers) -> _Numbers:
    """Weights w with prod (1 - zeros x) / (1 - poles x) = 1 + sum w x / (1 - poles x).

    For interlacing (..., m) numbers, all factors have one sign and differences of neighbours are
    exact, so the weights are accurate even if decays are very close.
    """
    between = poles[..., :, np.newaxis] - poles[..., np.newaxis, :]
    diagonal = np.arange(poles.shape[-1])
    between[..., diagonal, diagonal] = 1.0
    quotients = (poles[..., :, np.newaxis] - zeros[..., np.newaxis, :]) / between
    return np.asarray(np.prod(quotients, axis=-1))


def _coefficients_of(decays: FloatArray, weights: FloatArray, num_rounds: int) -> FloatArray:
    """1, and sum_m weights[m] decays[m]^(t - 1) for t = 1, ..., n - 1."""
    series = np.empty(num_rounds)
    series[0] = 1.0
    series[1:] = 0.0
    # Powers of all lags are products of a power for the block and a power within the block.
    block = max(1, int(np.sqrt(num_rounds)))
    within, starts = np.arange(block), np.arange(0, num_rounds - 1, block)
    for decay, weight in zip(decays, weights, strict=True):
        powers = np.multiply.outer(weight * decay**starts, decay**within)
        series[1:] += powers.ravel()[: num_rounds - 1]
    return series


def _weights(poles: ComplexArray, zeros: ComplexArray) -> ComplexArray:
    """(p, m) weights of the decays 1 - poles, from (p, m) distances."""
    return np.asarray(-_partial_fractions(poles, zeros))


def _squared_sensitivity(
    distances: ComplexArray, weights: ComplexArray, pattern: PatternOfRounds
) -> ComplexArray:
    """(p,) squared norms of the pattern's columns, summed, for (p, m) decays of C."""
    separation, most = pattern.separation, pattern.most
    starts = np.arange(0, pattern.num_rounds, separation)
    stretch = np.arange(len(starts))
    decays = _log1p(-distances)
    logs = decays[:, :, np.newaxis]
    weighted = weights[:, :, np.newaxis]

    def powers(first: IntArray, last: IntArray, shift: int) -> ComplexArray:
        """The sums of d^(i b + shift) over i from first to last, (p, m, stretches)."""
        series = _geometric(separation * logs, last - first + 1)
        return np.exp((first * separation + shift) * logs) * series

    # In stretch r, lags are (r - j) b + o for up to k participations j, offset o < b.
    earliest = np.maximum(0, stretch - most + 1)
    # At offset 0, the participation of this round has lag 0 and so coefficient one.
    at_start = np.sum(weighted * powers(np.maximum(earliest, 1), stretch, -1), axis=1)
    at_start = at_start + (stretch < most)
    amplitudes = weighted * powers(earliest, stretch, 0)
    total = np.sum(np.square(at_start), axis=1)
    pairs = decays[:, :, np.newaxis] + decays[:, np.newaxis]
    # All stretches except the last one have length b.
    rest = pattern.num_rounds - starts[-1]
    for those, length in ((np.s_[:-1], separation), (np.s_[-1:], rest)):
        products = amplitudes[..., those] @ amplitudes[..., those].swapaxes(1, 2)
        total = total + np.sum(products * _geometric(pairs, np.asarray(length - 1)), axis=(1, 2))
    return np.asarray(total)


def _squared_rows(
    ours: ComplexArray, inverse: ComplexArray, num_rounds: int, is_maximum: bool
) -> ComplexArray:
    """(p,) weighted sums of b_t^2 over rounds."""
    constant = np.prod(ours / inverse, axis=1)[:, np.newaxis]
    amplitudes = np.concatenate([constant, -_weights(inverse, ours) / inverse], axis=1)
    logs = np.concatenate([np.zeros_like(constant), _log1p(-inverse)], axis=1)
    pairs = logs[:, :, np.newaxis] + logs[:, np.newaxis]
    if is_maximum:
        series = _geometric(pairs, np.asarray(num_rounds))
    else:
        series = _weighted_geometric(pairs, num_rounds)
    return np.asarray(np.einsum("pi,pij,pj->p", amplitudes, series, amplitudes))


def _geometric(logs: ComplexArray, counts: IntArray) -> ComplexArray:
    """The sums of exp(t log) over t from 0 to counts - 1; logs are zero or negative."""
    is_one = logs == 0.0
    safe = np.where(is_one, -1.0, logs)
    return np.where(is_one, counts, _expm1(counts * safe) / _expm1(safe))


def _weighted_geometric(logs: ComplexArray, num_rounds: int) -> ComplexArray:
    """The sums of (1 - t / n) exp(t log) over t from 0 to n - 1."""
    n = float(num_rounds)
    small = np.abs(logs.real) * n < _SMALL_EXPONENT
    safe: ComplexArray = np.where(small, -1.0, logs)
    scaled: ComplexArray = n * safe
    series = _expm1(scaled) / _expm1(safe)
    # (n - q S) / (n (1 - q)) for q = exp(log) and S = (1 - q^n) / (1 - q).
    closed = (n - np.exp(safe) * series) / (-n * _expm1(safe))
    moments = [(n + 1.0) / 2.0, (n - 1.0) * (n + 1.0) / 6.0, (n - 1.0) * n * (n + 1.0) / 12.0]
    taylor = moments[0] + logs * moments[1] + np.square(logs) * moments[2] / 2.0
    return np.where(small, taylor, closed)


# NumPy's complex log1p and expm1 lose digits that the following functions keep; imaginary parts are
# infinitesimal here.
def _log1p(z: ComplexArray) -> ComplexArray:
    found = np.empty_like(z)
    found.real, found.imag = np.log1p(z.real), z.imag / (1.0 + z.real)
    return found


def _expm1(z: ComplexArray) -> ComplexArray:
    found = np.empty_like(z)
    found.real, found.imag = np.expm1(z.real), np.exp(z.real) * z.imag
    return found
