r"""Importance sampling: outputs drawn where privacy losses are large.

The sampling distribution of a Renyi order a is (P/Q)^a Q / E_Q (P/Q)^a, with the P and Q of
``distributions``. P/Q is a sum over participations S of products. For an integer order a,
(P/Q)^a is a sum over a participations S_1, ..., S_a, the *replicas*, and with v_S the sum of the
columns in S,

    (P/Q)^a Q = sum pi(S_1) ... pi(S_a) exp(sum_{k < l} <v_{S_k}, v_{S_l}> / sigma^2)
                N(v_{S_1} + ... + v_{S_a}, sigma^2 I).

So an output is drawn exactly: first the replicas, by the weights in front of the normal
distribution, then normal numbers. The weights add up to E_Q (P/Q)^a, the moment generating
function of the loss log P/Q under Q at a, which is the exponential of a - 1 times the Renyi
divergence of order a.

For min-separation sampling the replicas are a Markov chain. Columns of C that are b or more rounds
apart are orthogonal, and so the chain needs to know only how many rounds each replica has to wait.
Let one replica be free in round t, and let the others wait r_2, ..., r_a rounds. V_t(r) is the
expected product of the factors exp(<c_i, c_j> / sigma^2) of all pairs of participations from round
t on, those in round t or later with those before included. Backwards in t, with F free replicas of
which m join:

    V_t(r) = sum_m (F choose m) p^m (1 - p)^(F - m) V_{t'}(r')
             exp((m sum_{waiting} <c_t, c_{t + r - b}> + m (m - 1) / 2 |c_t|^2) / sigma^2)

where t' is the next round in which a replica is free. A replica that waits r rounds in round t took
part in round t + r - b, and in none of the run where that is negative.

For balls in bins, the replicas are a tuple of bins, and all tuples are enumerated.
"""

import functools
import itertools
import math

import numpy as np

from mf_aggregators.kernel import dominating_pairs as distributions
from mf_aggregators.kernel.arrays import FloatArray, IntArray
from mf_aggregators.kernel.dominating_pairs import (
    BallsInBinsRounds,
    DominatingPair,
    MinSeparationRounds,
    RoundsDistribution,
)

# Entries of the tables of one order: 130 MB.
_MOST_ENTRIES = 8_000_000
# Pairs, and longer tuples, of first waits or bins that are enumerated.
_MOST_PAIRS, _MOST_TUPLES = 4_000_000, 300_000
LARGEST_ORDER = 8


class SamplerOfQ:
    """Draws losses of outputs without the client: of Q itself, the Renyi order 0."""

    def __init__(self, pair: DominatingPair) -> None:
        self._pair = pair

    def log_ratios(self, rng: np.random.Generator, count: int) -> FloatArray:
        """As :meth:`ImportanceSampler.log_ratios`."""
        outputs = rng.standard_normal((self._pair.num_outputs, count))
        outputs *= self._pair.sigma
        return self._pair.log_ratios(outputs)


class ImportanceSampler:
    """Draws losses of outputs from (P/Q)^a Q / E_Q (P/Q)^a, for an integer a.

    Attributes:
      order: The Renyi order a, at least 1; order 1 is P.
      log_mgf: log E_Q (P/Q)^a, the log moment generating function of the loss under Q at a.
    """

    def __init__(self, pair: DominatingPair, order: int) -> None:
        self.order = order
        self._pair = pair
        self._replicas = _replicas_of(pair.rounds, pair, order)
        self.log_mgf = self._replicas.log_mgf

    def log_ratios(self, rng: np.random.Generator, count: int) -> FloatArray:
        """Draws outputs and returns their log P/Q.

        Args:
          rng: Where random numbers come from.
          count: m, the number of outputs.

        Returns:
          (m,), independent.
        """
        pair = self._pair
        outputs = self._replicas.draw(rng, count)
        noise = rng.standard_normal(outputs.shape)
        noise *= pair.sigma
        outputs += noise
        return pair.log_ratios(outputs)


def possible_orders(pair: DominatingPair) -> list[int]:
    """Returns the Renyi orders whose tables are small enough, from 1 on."""
    orders = []
    separation = pair.rounds.separation
    for order in range(1, LARGEST_ORDER + 1):
        if separation**order > (_MOST_PAIRS if order <= 2 else _MOST_TUPLES):
            break
        states = math.comb(separation + order - 2, order - 1)
        if pair.rounds.has_timer and states * (pair.columns.shape[0] + 1) > _MOST_ENTRIES:
            break
        orders.append(order)
    return orders


class _Bins:
    """Replicas that are each in one bin."""

    def __init__(self, client: BallsInBinsRounds, pair: DominatingPair, order: int) -> None:
        bins = client.separation
        self._vectors = pair.products.times(np.eye(bins))
        gram = self._vectors.T @ self._vectors / pair.sigma**2
        shape = (bins,) * order
        exponents = np.zeros(shape)
        for k, other in itertools.combinations(range(order), 2):
            axes = [1] * order
            axes[k] = axes[other] = bins
            exponents = exponents + gram.reshape(axes)
        self._shape = shape
        largest = float(np.max(exponents))
        self._cumulative = np.cumsum(np.exp(exponents - largest).ravel())
        self.log_mgf = largest + math.log(self._cumulative[-1]) - order * math.log(bins)

    def draw(self, rng: np.random.Generator, count: int) -> FloatArray:
        """Returns the sums of the vectors of the replicas' bins, (num_outputs, count)."""
        tuples = _categorical(rng, self._cumulative, count)
        first, *others = np.unravel_index(tuples, self._shape)
        total = np.take(self._vectors, first, axis=1)
        for bins in others:
            total += np.take(self._vectors, bins, axis=1)
        return total


class _Chains:
    """Replicas that join at random where their timers allow it."""

    def __init__(self, client: MinSeparationRounds, pair: DominatingPair, order: int) -> None:
        self._order, self._separation = order, client.separation
        self._products = pair.products
        self._rounds, bands = pair.columns.shape
        gram = distributions.gram_bands(pair.columns) / pair.sigma**2
        # By how long a replica waits: r, with its participation separation - r rounds before.
        self._pairs = np.zeros((self._rounds, self._separation + 1))
        waits = self._separation - np.arange(1, bands)
        self._pairs[:, waits] = gram[:, 1:]
        self._norms = gram[:, 0]
        self._states = _States(order, self._separation)
        self._stay = 1.0 - client.probability
        self._join = client.probability
        with np.errstate(over="ignore", invalid="ignore"):
            self._values, self._hazards = self._backward()
            self._set_start(client)
        # Chains are moved on by candidates of the largest probability that somebody joins.
        self._largest_hazard = float(np.max(self._hazards)) if self._rounds else 0.0

    def _backward(self) -> tuple[FloatArray, FloatArray]:
        """The (n + b, states) values V_t, and the probability that somebody joins in round t."""
        states = self._states
        values = np.ones((self._rounds + self._separation + 1, states.count))
        hazards = np.zeros((self._rounds, states.count))
        for t in range(self._rounds - 1, -1, -1):
            terms = self._terms(t, np.arange(states.count), values)
            values[t] = np.sum(terms, axis=0)
            hazards[t] = np.sum(terms[1:], axis=0) / values[t]
        return values, hazards

    def _terms(self, t: int | IntArray, state: IntArray, values: FloatArray) -> FloatArray:
        """The (order + 1, ...) terms of V_t, by how many free replicas join."""
        states = self._states
        free = states.free[state]
        waiting = states.waits[state]
        pair_sums = np.sum(self._pairs[np.asarray(t)[..., None], waiting] * (waiting > 0), axis=-1)
        terms = np.zeros((self._order + 1, len(state)))
        for joining in range(self._order + 1):
            weight = (
                states.binomials[free, joining]
                * self._join**joining
                * self._stay ** np.maximum(free - joining, 0)
            )
            exponent = joining * pair_sums + joining * (joining - 1) / 2 * self._norms[t]
            later, following = states.after[joining, state], states.following[joining, state]
            terms[joining] = np.where(
                weight > 0.0, weight * np.exp(exponent) * values[t + later, following], 0.0
            )
        return terms

    def _set_start(self, client: MinSeparationRounds) -> None:
        first = client.first_free_probabilities()
        waits = np.nonzero(first)[0]
        grids = np.meshgrid(*([waits] * self._order), indexing="ij")
        tuples = np.stack([grid.ravel() for grid in grids], axis=-1)
        weights = np.prod(first[tuples], axis=-1)
        start = np.min(tuples, axis=-1)
        weights = weights * self._values[start, self._states.index(tuples - start[:, None])]
        self._start_tuples = tuples
        self._start_cumulative = np.cumsum(weights)
        with np.errstate(divide="ignore"):
            self.log_mgf = float(np.log(self._start_cumulative[-1]))

    def draw(self, rng: np.random.Generator, count: int) -> FloatArray:
        """Returns the sums of the columns of the replicas' rounds, (n, count)."""
        total = np.zeros((self._rounds, count))
        free_at = self._start_tuples[_categorical(rng, self._start_cumulative, count)].copy()
        now = np.min(free_at, axis=1) - 1
        who = np.arange(count)
        while len(who):
            # The next round in which somebody may join, if a coin with the chain's own
            # probability over the largest one says so.
            waited = rng.geometric(self._largest_hazard, len(who))
            # Of a tiny probability, the largest integer, to which none can be added.
            now = np.maximum(now + np.minimum(waited, self._rounds + 1), 0)
            goes_on = now < self._rounds
            who, now, free_at = who[goes_on], now[goes_on], free_at[goes_on]
            uniform = rng.random(len(who))
            waits = np.maximum(free_at - now[:, None], 0)
            may_join = np.min(waits, axis=1) == 0
            state = self._states.index(np.where(may_join[:, None], waits, 0))
            chosen = may_join & (uniform * self._largest_hazard < self._hazards[now, state])
            rows = np.nonzero(chosen)[0]
            if len(rows):
                terms = self._terms(now[rows], state[rows], self._values)[1:]
                sums = np.cumsum(terms, axis=0)
                joining = 1 + np.sum(rng.random(len(rows)) * sums[-1] >= sums, axis=0)
                joining = np.minimum(joining, self._states.free[state[rows]])
                total[now[rows], who[rows]] += joining
                # Replicas are alike: whichever of the free ones join.
                order = np.argsort(waits[rows], axis=1, kind="stable")
                ranks = np.argsort(order, axis=1, kind="stable")
                joins = ranks < joining[:, None]
                free_at[rows] = np.where(
                    joins, (now[rows] + self._separation)[:, None], free_at[rows]
                )
        return self._products.times(total)


class _States:
    """The waits of all replicas but one that is free, in increasing order.

    Attributes:
      count: The number of states.
      waits: (count, order - 1) int.
      free: (count,) how many replicas are free, the one included.
      binomials: (order + 1, order + 1) of binomial coefficients.
      after: (order + 1, count) rounds until the next one in which a replica is free, by how many
        replicas join.
      following: (order + 1, count) the state there; 0 where so many cannot join.
    """

    def __init__(self, order: int, separation: int) -> None:
        others = order - 1
        tuples = list(itertools.combinations_with_replacement(range(separation), others))
        self.count = len(tuples)
        self.waits = np.array(tuples, dtype=np.intp).reshape(self.count, others)
        self._powers = separation ** np.arange(others - 1, -1, -1, dtype=np.intp)
        self._lookup = np.zeros(separation**others, dtype=np.intp)
        self._lookup[self.waits @ self._powers] = np.arange(self.count)
        self.free = 1 + np.sum(self.waits == 0, axis=1)
        self.binomials = np.array(
            [[math.comb(i, j) for j in range(order + 1)] for i in range(order + 1)], dtype=float
        )
        everybody = np.concatenate([np.zeros((self.count, 1), dtype=np.intp), self.waits], axis=1)
        self.after = np.zeros((order + 1, self.count), dtype=np.intp)
        self.following = np.zeros((order + 1, self.count), dtype=np.intp)
        for joining in range(order + 1):
            waits = everybody.copy()
            waits[:, :joining] = separation
            can = joining <= self.free
            # One that stays is free in the next round.
            after = np.where(joining < self.free, 1, np.min(waits, axis=1))
            waits = np.maximum(waits - after[:, None], 0)
            self.after[joining] = np.where(can, after, 0)
            self.following[joining] = np.where(can, self.index(np.where(can[:, None], waits, 0)), 0)

    def index(self, waits: IntArray) -> IntArray:
        """Returns the states of waits of all replicas, (..., order), of which one is 0."""
        ordered = np.sort(waits, axis=-1)[..., 1:]
        return np.asarray(self._lookup[ordered @ self._powers])


@functools.singledispatch
def _replicas_of(client: RoundsDistribution, pair: DominatingPair, order: int) -> _Chains | _Bins:
    """The replicas of a Renyi order, by how a client's rounds are distributed."""
    del pair, order
    raise TypeError(f"no outputs are drawn for {client!r}.")


_replicas_of.register(MinSeparationRounds, _Chains)
_replicas_of.register(BallsInBinsRounds, _Bins)


def _categorical(rng: np.random.Generator, cumulative: FloatArray, count: int) -> IntArray:
    """Indices with probabilities by cumulative sums of weights."""
    found = np.searchsorted(cumulative, rng.random(count) * cumulative[-1], side="right")
    return np.asarray(np.minimum(found, len(cumulative) - 1))
