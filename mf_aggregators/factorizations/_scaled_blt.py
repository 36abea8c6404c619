r"""Errors and gradients of a BLT matrix whose rows and columns are scaled: C = P T D.

T is a BLT matrix, P a positive diagonal matrix, and D divides each column of P T by its norm. The
noise is D^-1 T^-1 (P^-1 Z), which takes the buffers of T and two factors a round. A Toeplitz matrix
alone has columns whose norms fall towards the last round, and rows of B whose norms rise; the
scales make up for both. For prefix sums and one participation, C is within a fraction of a percent
of the best of all matrices.

**Scales.** log P is linear between knots, whose distances from the first and from the last round
are 0, 1, 3, 7, and so on: P changes fast at both ends and slowly between. So a few knots serve any
number of rounds, and those of fewer rounds are a start for more.

**Errors.** With s the norms of the columns of P T and nu = P^-2, training is

    u^l_i = d_l u^l_(i-1) + z_i,    y_i = z_i + sum_l v_l u^l_(i-1),    Var(z_i) = nu_i,
    w_i = beta w_(i-1) + s_i y_i,   x_i = x_(i-1) + eta_i w_i,

for the decays d and weights v of T^-1, the momentum beta and the learning rates eta. Row i of B has
the squared norm Var(x_i), which follows from covariances by recursions in O(n m^2):

    of u^l and u^k      U^lk_i = d_l d_k U^lk_(i-1) + nu_i
    of u^l and y        r^l_i = nu_i + d_l sum_k v_k U^lk_(i-1)
    of y                V_i = nu_i + v^T U_(i-1) v
    of u^l and w        q^l_i = beta d_l q^l_(i-1) + s_i r^l_i
    of u^l and x        p^l_i = d_l p^l_(i-1) + eta_i q^l_i
    of w                W_i = beta^2 W_(i-1) + 2 beta s_i v^T q_(i-1) + s_i^2 V_i
    of x_(i-1) and w_i  K_i = beta G_(i-1) + s_i v^T p_(i-1)
    of x_i and w_i      G_i = K_i + eta_i W_i

and Var(x_i) = Var(x_(i-1)) + 2 eta_i K_i + eta_i^2 W_i.

The gradient comes from the same recursions, transposed.
"""

import dataclasses

import numpy as np
import scipy.signal

from mf_aggregators.factorizations.searches import RoundError
from mf_aggregators.factorizations.toeplitz import PatternOfRounds
from mf_aggregators.kernel.numbers import FloatArray, IntArray
from mf_aggregators.linear_algebra import power_series
from mf_aggregators.workloads import Workload


@dataclasses.dataclass(frozen=True, eq=False)
class States:
    """The coefficients of a BLT matrix T, and the states of T^-1.

    Attributes:
      strategy: (n,) the first column of T.
      decays: (m,) d.
      weights: (m,) v.
    """

    strategy: FloatArray
    decays: FloatArray
    weights: FloatArray


@dataclasses.dataclass(frozen=True, eq=False)
class Training:
    """Momentum SGD: the momentum beta and the (n,) learning rates eta."""

    momentum: float
    rates: FloatArray

    @classmethod
    def of(cls, workload: Workload) -> "Training":
        """Returns the training of a workload that is known by its name."""
        stages = workload.recursions()
        return cls(float(stages[0].kept[0]) if len(stages) > 1 else 0.0, stages[-1].added)


def knots(num_rounds: int) -> IntArray:
    """Returns the rounds of the knots of log P, increasing.

    Args:
      num_rounds: n.
    """
    distances = 2 ** np.arange(num_rounds.bit_length()) - 1
    distances = distances[distances < (num_rounds + 1) // 2]
    return np.asarray(np.unique(np.concatenate([distances, num_rounds - 1 - distances])))


def row_scales(logs: FloatArray, num_rounds: int) -> FloatArray:
    """Returns the (n,) diagonal of P from its logarithms at the knots.

    Args:
      logs: One for each knot.
      num_rounds: n.
    """
    return np.asarray(np.exp(np.interp(np.arange(num_rounds), knots(num_rounds), logs)))


def column_norms(strategy: FloatArray, scales: FloatArray) -> FloatArray:
    """Returns the (n,) norms of the columns of P T.

    Args:
      strategy: (n,) the first column of T.
      scales: (n,) the diagonal of P.
    """
    squares = power_series.correlation(np.square(scales), np.square(strategy), len(scales))
    return np.asarray(np.sqrt(squares))


class Rows:
    """The squared norms of the rows of B, and their gradient."""

    def __init__(
        self, states: States, training: Training, scales: FloatArray, norms: FloatArray
    ) -> None:
        """Runs the recursions.

        Args:
          states: T^-1.
          training: The workload.
          scales: (n,) the diagonal of P.
          norms: (n,) s, those of the columns of P T.
        """
        self._states, self._training, self._norms = states, training, norms
        decays, weights = states.decays, states.weights
        beta, rates, m = training.momentum, training.rates, len(decays)
        self._nu = nu = 1.0 / np.square(scales)
        # Covariances of the round before.
        self._of_states = {
            (i, j): _later(_recursion(decays[i] * decays[j], nu))
            for i in range(m)
            for j in range(i + 1)
        }
        self._of_y, self._with_y = nu.copy(), [nu.copy() for _ in range(m)]
        for (i, j), covariance in self._of_states.items():
            self._of_y += (1.0 + (i != j)) * weights[i] * weights[j] * covariance
            self._with_y[i] += decays[i] * weights[j] * covariance
            if i != j:
                self._with_y[j] += decays[j] * weights[i] * covariance
        self._with_w, self._with_x = np.empty((m, len(nu))), np.empty((m, len(nu)))
        for i, decay in enumerate(decays):
            with_w = _recursion(beta * decay, norms * self._with_y[i])
            self._with_w[i] = _later(with_w)
            self._with_x[i] = _later(_recursion(decay, rates * with_w))
        self._w_and_y = np.einsum("i,ij->j", weights, self._with_w)
        self._x_and_y = np.einsum("i,ij->j", weights, self._with_x)
        added = 2.0 * beta * norms * self._w_and_y + np.square(norms) * self._of_y
        of_w = _recursion(beta * beta, added)
        # G_i = beta G_(i-1) + s_i (x_and_y)_i + eta_i W_i.
        moved = norms * self._x_and_y
        before = _later(_recursion(beta, moved + rates * of_w))
        crossed = beta * before + moved
        self.squared = np.cumsum(rates * (2.0 * crossed + rates * of_w))

    def slopes(self, weights: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
        """Returns the gradient of sum_i w_i Var(x_i): by nu, s, d and v.

        Args:
          weights: (n,) w.
        """
        decays, own = self._states.decays, self._states.weights
        beta, rates, norms = self._training.momentum, self._training.rates, self._norms
        tails = np.cumsum(weights[::-1])[::-1]
        by_crossed = _transposed(beta, 2.0 * rates * tails)
        by_w = _transposed(beta * beta, rates * rates * tails + rates * beta * _earlier(by_crossed))
        by_y, by_w_and_y = np.square(norms) * by_w, 2.0 * beta * norms * by_w
        by_x_and_y = norms * by_crossed
        by_norms = by_w * (2.0 * beta * self._w_and_y + 2.0 * norms * self._of_y)
        by_norms += by_crossed * self._x_and_y
        by_nu, by_decays, by_weights = by_y.copy(), np.zeros(len(own)), np.zeros(len(own))
        by_with_y = []
        for i, (decay, weight) in enumerate(zip(decays, own, strict=True)):
            by_x = _transposed(decay, weight * _earlier(by_x_and_y))
            by_q = _transposed(beta * decay, rates * by_x + weight * _earlier(by_w_and_y))
            by_norms += by_q * self._with_y[i]
            by_with_y.append(norms * by_q)
            by_nu += by_with_y[i]
            by_decays[i] += by_x @ self._with_x[i] + beta * (by_q @ self._with_w[i])
            by_weights[i] += by_x_and_y @ self._with_x[i] + by_w_and_y @ self._with_w[i]
        for (i, j), covariance in self._of_states.items():
            # Entries of U stand for two.
            pairs = [(i, j)] if i == j else [(i, j), (j, i)]
            direct = len(pairs) * own[i] * own[j] * by_y
            of_y = len(pairs) * float(by_y @ covariance)
            by_weights[i] += of_y * own[j]
            by_weights[j] += of_y * own[i]
            for a, b in pairs:
                direct = direct + decays[a] * own[b] * by_with_y[a]
                along = float(by_with_y[a] @ covariance)
                by_decays[a] += own[b] * along
                by_weights[b] += decays[a] * along
            carried = _transposed(decays[i] * decays[j], _earlier(direct))
            by_nu += carried
            along = float(carried @ covariance)
            by_decays[i] += along * decays[j]
            by_decays[j] += along * decays[i]
        return by_nu, by_norms, by_decays, by_weights


@dataclasses.dataclass(frozen=True, eq=False)
class Slopes:
    """The gradient of a logarithm: by the coefficients of T, by d, v and the knots of log P."""

    strategy: FloatArray
    decays: FloatArray
    weights: FloatArray
    logs: FloatArray


def log_error(
    states: States,
    logs: FloatArray,
    training: Training,
    pattern: PatternOfRounds,
    error: RoundError,
    order: float | None,
) -> tuple[float, Slopes]:
    """Returns the logarithm of the squared error of C = P T D, and its gradient.

    Args:
      states: T and T^-1.
      logs: The logarithms of P at its knots.
      training: The workload.
      pattern: The pattern whose columns, summed, stand for the sensitivity.
      error: The error of the rounds.
      order: That of the norm that stands for the maximum; None for a mean.
    """
    n, strategy = pattern.num_rounds, states.strategy
    scales = row_scales(logs, n)
    norms = column_norms(strategy, scales)
    rows = Rows(states, training, scales, norms)
    squared = rows.squared
    weights = np.full(n, 1.0 / n) if error.weights is None else error.weights
    value = float(weights @ squared)
    if order is not None:
        largest = float(np.max(squared))
        powers = (squared / largest) ** (order - 1.0)
        total = float(powers @ squared) / largest
        value, weights = largest * total ** (1.0 / order), powers * total ** (1.0 / order - 1.0)
    by_nu, by_norms, by_decays, by_weights = (each / value for each in rows.slopes(weights))
    by_scales = -2.0 * by_nu / scales**3
    by_strategy = np.zeros(n)
    log_sensitivity = 0.0
    if pattern.most > 1:
        squared_sensitivity, gradients = _squared_sensitivity(strategy, scales, norms, pattern)
        log_sensitivity = float(np.log(squared_sensitivity))
        added = [each / squared_sensitivity for each in gradients]
        by_strategy, by_scales, by_norms = (
            one + other
            for one, other in zip((by_strategy, by_scales, by_norms), added, strict=True)
        )
    # s^2 is a correlation of P^2 with the squares of T.
    by_squares = by_norms / (2.0 * norms)
    by_scales += 2.0 * scales * power_series.product(by_squares, np.square(strategy), n)
    by_strategy += 2.0 * strategy * power_series.correlation(np.square(scales), by_squares, n)
    slopes = Slopes(by_strategy, by_decays, by_weights, _at_knots(by_scales * scales))
    return float(np.log(value)) + log_sensitivity, slopes


def _squared_sensitivity(
    strategy: FloatArray, scales: FloatArray, norms: FloatArray, pattern: PatternOfRounds
) -> tuple[float, tuple[FloatArray, FloatArray, FloatArray]]:
    """||sum of the columns 0, b, 2 b, ...||^2, and its gradient by T, P and s."""
    n = len(strategy)
    starts = range(0, n, pattern.separation)[: pattern.most]
    summed = np.zeros(n)
    for start in starts:
        summed[start:] += strategy[: n - start] / norms[start]
    by_sum = 2.0 * np.square(scales) * summed
    by_strategy, by_norms = np.zeros(n), np.zeros(n)
    for start in starts:
        by_strategy[: n - start] += by_sum[start:] / norms[start]
        by_norms[start] = -float(by_sum[start:] @ strategy[: n - start]) / norms[start] ** 2
    value = 0.5 * float(by_sum @ summed)
    return value, (by_strategy, 2.0 * scales * np.square(summed), by_norms)


def _at_knots(values: FloatArray) -> FloatArray:
    """The transpose of the interpolation between knots."""
    places = knots(len(values))
    if len(places) == 1:
        return np.array([np.sum(values)])
    rounds = np.arange(len(values))
    after = np.clip(np.searchsorted(places, rounds, side="right"), 1, len(places) - 1)
    share = (rounds - places[after - 1]) / (places[after] - places[after - 1])
    before = np.bincount(after - 1, values * (1.0 - share), len(places))
    return np.asarray(before + np.bincount(after, values * share, len(places)), np.float64)


def refined_logs(logs: FloatArray, num_rounds: int) -> FloatArray:
    """Returns logarithms at the knots of more rounds, by the distance from the nearer end.

    Args:
      logs: Those at the knots of fewer rounds.
      num_rounds: n.
    """
    places = knots(num_rounds)
    half = len(logs) // 2
    middle = np.full(max(0, len(places) - len(logs)), 0.5 * (logs[half - 1] + logs[half]))
    return np.asarray(np.concatenate([logs[:half], middle, logs[half:]])[: len(places)])


def _recursion(kept: float, added: FloatArray) -> FloatArray:
    """x_i = kept x_(i-1) + added_i."""
    return np.asarray(scipy.signal.lfilter([1.0], [1.0, -kept], added))


def _transposed(kept: float, added: FloatArray) -> FloatArray:
    """x_i = kept x_(i+1) + added_i."""
    return np.asarray(_recursion(kept, added[::-1])[::-1])


def _later(values: FloatArray) -> FloatArray:
    """The entry before each."""
    return np.concatenate([[0.0], values[:-1]])


def _earlier(values: FloatArray) -> FloatArray:
    """The entry after each."""
    return np.concatenate([values[1:], [0.0]])
