r"""Certified privacy of random participation: Monte Carlo tests of certificates from a search.

A certificate says that a run is (epsilon, delta)-DP. A search outside of the kernel proposes it as
data, and the test draws outputs of the pair (P, Q) that dominates the run (below). All that the
test needs is fixed in the certificate before it draws anything: the numbers of samples, the bet,
and the seed. The test answers yes or no. If the certificate is false, one of two hockey-stick
divergences is too large, and the test of that one answers yes with at most the failure probability
beta. What all attempts may fail with, and those for the other noise multipliers of a search, is
taken from delta before: both divergences are tested to be below what is left. So delta covers that
the test fails, over the random numbers that it draws. Anybody can repeat the test.

**P from Q.** With an output from (P/Q)^a Q / Z, Z = E_Q (P/Q)^a (``ImportanceSampler``), and its
loss L = log P/Q, the term T = Z max(0, 1 - e^(epsilon - L)) e^(-(a - 1) L) has the mean
E_P max(0, 1 - e^(epsilon - L)), the divergence. It is at most
M = Z e^(-(a - 1) epsilon) (a - 1)^(a - 1) / a^a, which is what Renyi DP of order a alone would give
for delta. So a few times log(1 / beta) M / delta samples suffice.

That the mean mu is below m, which is delta or less, is shown by a *test martingale*. Let
T_1, ..., T_N be independent samples, and the bet 0 <= w < 1 / (M - m) be fixed before they are
drawn. The wealth prod_i (1 + w (m - T_i)) is not negative, and where mu >= m each factor has an
expectation of at most 1 + w (m - mu) <= 1, whatever the factors before it are. By Ville's
inequality (1939) the wealth is ever 1 / beta or more with probability at most beta. So a wealth of
1 / beta shows that mu < m, but for a probability of beta, and the test ends with the batch that
reaches it. (Waudby-Smith and Ramdas, 2024, have the method in general.)

**Q from P.** Under Q, L is a convex function of independent normal numbers, because it is the
logarithm of a sum of exponentials of linear functions. By Ehrhard's inequality (1983, for convex
sets), psi(t) = Phi^-1(Pr[L <= t]) is concave. So below t_0 < t_1, it lies below the line through
(t_0, psi(t_0)) and (t_1, psi(t_1)). An upper bound of psi(t_0) and a lower bound of psi(t_1), from
counts of samples (Clopper and Pearson, 1934), bound the whole lower tail of L. At epsilon 0 both
divergences are one number, the total variation distance, and the first test is enough.

**Seeds.** The random numbers of a test follow from the seed, the attempt and all else that is
certified, so that none are used twice. Delta pays for ``ATTEMPTS`` certificates of one run, which
are numbered, and for ``MECHANISMS`` runs. A seed that was chosen by its result proves nothing: the
claim names the seed, and has to fix it before anything is known of a result.

**The pair.** A client who draws for itself takes part in a random set S of rounds, whose
distribution pi depends on no data and is known, while S itself is secret. With c_i the columns of
C, scaled to norms of at most 1, the outputs have the distribution
P = sum_S pi(S) N(sum_{i in S} c_i, sigma^2 I) with the client, and Q = N(0, sigma^2 I) without
it. This module has log P/Q at given outputs, exactly, for two pi.

**This pair dominates**, for adaptive updates of any dimension as well and in both directions, where
the entries of C are not negative; otherwise the pair of |C| does. More precisely:

*Theorem.* Let C be lower triangular. In round i the server picks, from all that was released
before round i, vectors u_i(S) with norms of at most 1, of any dimension, and releases row i of
sum_{j in S, j <= i} C_ij u_j(S) + sigma Z_i; u_j(S) may depend on S as far as it lies before j.
Then for every convex f with f(x) = O(x), the f-divergence of the outputs with the client from
those without is at most E_Q f(P/Q) for the scalar pair of |C|. So are both hockey-stick
divergences: f(x) = (x - e^eps)_+ and f(x) = (1 - e^eps x)_+.

*Proof.* Given the outputs up to row i, let w_S be pi(S) times the likelihood ratio of S so far,
and let W_i(w) be E f(sum_S w_S E_S), with E_S = exp(G_S - Var G_S / 2) and centred Gaussians G of
the covariances K_i(S, T) = sum_{r >= i} m_r(S) m_r(T) / sigma^2, m_r(S) = sum_{j in S} |C_rj|.
Claim: whatever the server does from row i on, the divergence is at most W_i(w). It holds behind
the last row. If it holds behind row i, then the divergence from row i on is at most the mean of
W_{i+1}(w_S exp(H_S - Var H_S / 2)), H_S = <sum_{j in S} C_ij u_j(S), Z_i> / sigma, because
under Q the released row is sigma Z_i. That is W for covariances K_{i+1} + Cov(H). By
Cauchy-Schwarz, Cov(H_S, H_T) <= m_i(S) m_i(T) / sigma^2, and by Kahane's convexity inequality
(1985), the mean of a convex f of a sum with non-negative weights of exponentials E_S does not
decrease where covariances grow. So the bound is W_i(w). At the first row it is E_Q f(P/Q).
Other clients only add what the server knows: their participation is independent of S. QED.

*Rounding.* Released rows are integers. What a client's participations change in row i is off by
what roundings move, a vector e_i(S) of norm r_i(S) at most: r_i(S) is zero before the first round
of S. It may depend on S and on all that was released before, as the u_j do. So the theorem holds
with m_i(S) + r_i(S) in the place of m_i(S): the shift of row i has no larger a norm.

Nothing in the proof needs bands, nor that the columns of S share no rows.

**Balls in bins** (arXiv 2410.06266): S is one of a few bins, as likely as the others, and m_S is
one vector for each. With e_S = exp((<m_S, y> - |m_S|^2 / 2) / sigma^2), P/Q is the mean of e_S over
the bins, for any lower-triangular C. It depends on y only through the products <m_S, y>, which are
normal numbers, so that a run of n rounds has no more dimensions than there are bins: turned by an
orthogonal matrix, all m_S lie in the first coordinates (``_vectors_of_bins``).

**Min-separation sampling** (arXiv 2602.09338) has too many S for that. Participations of a client
are ``separation`` b or more rounds apart. Where C has at most b bands, the squared norm of
sum_{i in S} c_i is the sum of squared norms, and P/Q a sum over S of products of
e_i = exp((<c_i, y> - |c_i|^2 / 2) / sigma^2): f_i = (1 - p) f_{i+1} + p e_i f_{i+b}, and 1 behind
the last round. P/Q is f_0 from a cold start, and
(f_0 + p sum_{i=1}^{b-1} f_i) / (1 + (b - 1) p) where timers are in their stationary state.

C is held as its *compact columns*. Column i of a lower-triangular C of b bands is zero outside of
rows i to i + b - 1, and is row i of an array of n rows and b columns: ``columns[i, k] =
C[i + k, i]``.

**Importance sampling**: outputs drawn where privacy losses are large.
The sampling distribution of a Renyi order a is (P/Q)^a Q / E_Q (P/Q)^a, with the P and Q of
above. P/Q is a sum over participations S of products. For an integer order a,
(P/Q)^a is a sum over a participations S_1, ..., S_a, the *replicas*, and with v_S the sum of the
columns in S,

    (P/Q)^a Q = sum pi(S_1) ... pi(S_a) exp(sum_{k < l} <v_{S_k}, v_{S_l}> / sigma^2)
                N(v_{S_1} + ... + v_{S_a}, sigma^2 I).

So an output is drawn exactly: first the replicas, by the weights in front of the normal
distribution, then normal numbers. The weights add up to E_Q (P/Q)^a, the moment generating
function of the loss log P/Q under Q at a, which is the exponential of a - 1 times the Renyi
divergence of order a.

For min-separation sampling, the replicas S_1, ..., S_a together are a Markov chain over rounds.
Columns of C that are b or more rounds apart are orthogonal, and so the chain needs to know only how
many rounds each replica has to wait. Let one replica be free in round t, and let the others wait
r_2, ..., r_a rounds. V_t(r) is the expected product of the factors exp(<c_i, c_j> / sigma^2) of all
pairs of participations from round t on, those in round t or later with those before included.
Backwards in t, with F free replicas of which m join:

    V_t(r) = sum_m (F choose m) p^m (1 - p)^(F - m) V_{t'}(r')
             exp((m sum_{waiting} <c_t, c_{t + r - b}> + m (m - 1) / 2 |c_t|^2) / sigma^2)

where t' is the next round in which a replica is free. A replica that waits r rounds in round t took
part in round t + r - b, and in none of the run where that is negative.

For balls in bins, the replicas are a tuple of bins, and all tuples are enumerated.
"""

import concurrent.futures
import dataclasses
import functools
import hashlib
import itertools
import json
import math
import os
from collections.abc import Callable, Iterator
from typing import ClassVar, TypeAlias, TypeVar

import numpy as np
import scipy.special
import scipy.stats
from numpy.lib.stride_tricks import sliding_window_view

from mf_aggregators.kernel import losses, numbers, sensitivity
from mf_aggregators.kernel.draws import STEP
from mf_aggregators.kernel.losses import MinSeparation, SampledRun
from mf_aggregators.kernel.numbers import FloatArray, IntArray

# The failure probability of all attempts for one run together, as a share of delta.
_FAILURE_SHARE = 0.01
ATTEMPTS = 4
# The number of runs that share this failure probability: a search for a noise multiplier takes the
# first run that is proved to reach its target, or the best of several runs is chosen.
MECHANISMS = 16
# Upper bound on the rounding error of a privacy loss, with a wide margin.
LOSS_ROUNDING = 1e-9
# The number of privacy losses that are drawn at a time.
_BATCH = 1024
# Products are computed as they are while all numbers are between these two, and otherwise by
# logarithms.
_SMALLEST, _LARGEST = 1e-250, 1e250
# Limits for the tables of one Renyi order: the entries of a table (130 MB), the tuples of up to
# three first waits or bins, and the tuples of more than three.
_MOST_ENTRIES, _MOST_TRIPLES, _MOST_TUPLES = 8_000_000, 4_000_000, 300_000
_LARGEST_ORDER = 8


# A callback for progress; its argument is the number of outputs that were drawn.
_Advance: TypeAlias = Callable[[int], object] | None
_Each = TypeVar("_Each")
_Replicas: TypeAlias = "_BinReplicas | _TimerReplicas"


@dataclasses.dataclass(frozen=True)
class _MinSeparationRounds:
    """Distribution of the rounds of a client that joins by a coin when its timer allows it.

    Attributes:
      probability: p, the probability of the coin, in (0, 1].
      separation: b: a client that joined may join again b rounds later. Timers begin in their
        stationary state.
    """

    probability: float
    separation: int

    # This name never changes, because random numbers and cached certificates depend on it.
    stream_name: ClassVar[str] = "CoinsUnderTimers"

    def first_free_probabilities(self) -> FloatArray:
        """Returns (b,) probabilities of the first round in which a client may join."""
        first = np.full(self.separation, self.probability)
        first[0] = 1.0
        return np.asarray(first / (1.0 + np.sum(first[1:])))

    def log_ratios(self, log_exponentials: FloatArray) -> FloatArray:
        """Returns the logarithms of the likelihood ratio P/Q at m outputs, (m,).

        Args:
          log_exponentials: (n, m) log e_i of the outputs.
        """
        n, m = log_exponentials.shape
        p, first = self.probability, self.first_free_probabilities()
        values = np.ones((n + self.separation, m))
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            joined = np.exp(log_exponentials)
            joined *= p
            for i in range(n - 1, -1, -1):
                joined[i] *= values[i + self.separation]
                np.multiply(values[i + 1], 1.0 - p, out=values[i])
                values[i] += joined[i]
            if np.min(values) > _SMALLEST and np.max(values) < _LARGEST:
                return np.asarray(np.log(first @ values[: self.separation]))
        stay, join = math.log1p(-p) if p < 1.0 else -math.inf, math.log(p)
        logs = np.zeros((n + self.separation, m))
        for i in range(n - 1, -1, -1):
            joined = join + log_exponentials[i] + logs[i + self.separation]
            logs[i] = np.logaddexp(stay + logs[i + 1], joined)
        return _log_sum(np.log(first)[:, None] + logs[: self.separation])


@dataclasses.dataclass(frozen=True)
class _BallsInBinsRounds:
    """Distribution of a client's rounds in balls in bins: those that equal its bin modulo b.

    Attributes:
      separation: The number of bins b.
    """

    separation: int

    # This name never changes, because random numbers and cached certificates depend on it.
    stream_name: ClassVar[str] = "OneBin"

    def log_ratios(self, log_exponentials: FloatArray) -> FloatArray:
        """Returns (m,) log P/Q at m outputs, from (b, m) log e_S of all bins."""
        return _log_sum(log_exponentials) - math.log(self.separation)


_RoundsDistribution: TypeAlias = _MinSeparationRounds | _BallsInBinsRounds


@dataclasses.dataclass(frozen=True)
class DominatingPair:
    """The pair (P, Q) that dominates a run: a scaled matrix, noise, and the distribution of rounds.

    Attributes:
      columns: (n, b), as ``StrategyColumns.scaled`` returns them: those of |C|.
      sigma: The noise multiplier relative to the largest column norm.
      rounds: The distribution of a client's rounds; with timers, of a separation of at least b.
      rounding: How far roundings may move any row from a client's first round on, beyond what
        ``columns`` has; for balls in bins alone.
    """

    columns: FloatArray
    sigma: float
    rounds: _RoundsDistribution
    rounding: float = 0.0

    @property
    def has_timers(self) -> bool:
        """Whether clients have timers: after a participation they wait, and then may join again."""
        return type(self.rounds) is _MinSeparationRounds

    @property
    def orders(self) -> list[int]:
        """The Renyi orders from 1 on that have small enough tables."""
        separation, entries = self.rounds.separation, len(self.columns) + 1

        def fits(order: int) -> bool:
            states = math.comb(separation + order - 2, order - 1) if self.has_timers else 0
            tuples = _MOST_TRIPLES if order <= 3 else _MOST_TUPLES
            return separation**order <= tuples and states * entries <= _MOST_ENTRIES

        return list(itertools.takewhile(fits, range(1, _LARGEST_ORDER + 1)))

    @functools.cached_property
    def blocks(self) -> list[tuple[int, FloatArray]]:
        """The vectors that P/Q depends on, as dense blocks, each with its first row.

        The blocks have all vectors, in their order, and all rows that are not zero.
        """
        if self.has_timers:
            return _blocks_of_columns(self.columns)
        return [(0, _vectors_of_bins(self.columns, self.rounds.separation, self.rounding))]

    @property
    def num_outputs(self) -> int:
        """The length of one output: the number of rows of all vectors."""
        start, block = self.blocks[-1]
        return start + len(block)

    def log_ratios(self, outputs: FloatArray) -> FloatArray:
        """Returns (m,) log P/Q at ``outputs``, a (num_outputs, m) array of m outputs."""
        sizes = np.cumsum([block.shape[1] for _, block in self.blocks])
        exponents = np.empty((sizes[-1], outputs.shape[1]))
        for part, (start, block) in zip(np.split(exponents, sizes[:-1]), self.blocks, strict=True):
            np.matmul(block.T, outputs[start : start + len(block)], out=part)
            part -= 0.5 * np.sum(block**2, axis=0)[:, None]
            part /= self.sigma**2
        return self.rounds.log_ratios(exponents)

    def description(self) -> dict[str, object]:
        """Returns a JSON-able mapping that differs between pairs with the same columns."""
        more = {"is_stationary": True} if self.has_timers else {}
        return {
            "shape": list(self.columns.shape),
            "sigma": self.sigma,
            # These names never change, because random numbers and cached certificates depend on
            # them.
            "law": [self.rounds.stream_name, {**dataclasses.asdict(self.rounds), **more}],
            **({"rounding": self.rounding} if self.rounding else {}),
        }


def dominating_pair(
    run: SampledRun, num_coordinates: int = sensitivity.DEFAULT_NUM_COORDINATES
) -> DominatingPair:
    """Returns the pair (P, Q) that dominates a run, with C enlarged by the rounding of rows.

    The theorem above has shifts of sum |C_ij| in row i. The roundings add a vector to each row
    whose norm is at most sqrt(d) times the steps that they move one number by. If participations
    share no rows, roundings reach num_bands rows from a participation on, as if all entries of the
    bands were larger by that norm.

    Args:
      run: A run of clients who draw for themselves.
      num_coordinates: Parameters times rounds.

    Raises:
      TypeError: If clients are drawn in groups.
      ValueError: If the columns do not fit the scheme.
    """
    draws, columns, sigma = run.draws, run.columns, run.sigma
    if isinstance(draws, losses.InGroups) or columns is None:
        raise TypeError(f"draws must be one of clients who draw for themselves, found {draws!r}.")
    num_rounds, num_bands = columns.entries.shape
    if num_rounds != draws.num_rounds or num_bands > draws.num_bands:
        most = f"{draws.num_rounds} rounds and {draws.num_bands} bands"
        raise ValueError(f"a scheme of {most} cannot have a C of {num_rounds} and {num_bands}.")
    rounds: _RoundsDistribution = _BallsInBinsRounds(draws.separation)
    if isinstance(draws, MinSeparation):
        rounds = _MinSeparationRounds(draws.joining_probability, draws.separation)
    entries = columns.scaled()
    rounding = sigma * columns.rounding * STEP * math.sqrt(num_coordinates / num_rounds)
    if not draws.shares_rows:
        rows = np.arange(num_rounds)[:, None] + np.arange(num_bands)
        entries, rounding = np.where(rows < num_rounds, entries + rounding, 0.0), 0.0
    return DominatingPair(entries, sigma, rounds, rounding)


def _blocks_of_columns(columns: FloatArray) -> list[tuple[int, FloatArray]]:
    """Returns the columns of a banded C as dense blocks, each with the index of its first row."""
    num_rounds, bands = columns.shape
    # Half of a wide block is zeros, and many narrow blocks are slow.
    size, blocks = max(32, min(bands, 96)), []
    for start in range(0, num_rounds, size):
        part = columns[start : start + size]
        inner = np.arange(len(part))[:, None]
        block = np.zeros((len(part) + bands - 1, len(part)))
        block[inner + np.arange(bands), inner] = part
        blocks.append((start, block[: num_rounds - start]))
    return blocks


def _vectors_of_bins(columns: FloatArray, num_bins: int, rounding: float = 0.0) -> FloatArray:
    """Returns the m_S of all bins, rotated so that they have as few coordinates as there are bins.

    Args:
      columns: (n, b) compact columns of |C|.
      num_bins: The number of bins.
      rounding: A number that is added to each row from the first round of a bin on.
    """
    vectors = losses.sums_of_bins(columns, num_bins)
    vectors += rounding * np.tri(len(vectors), num_bins)
    return np.asarray(np.linalg.qr(vectors)[1])


class ImportanceSampler:
    """Draws outputs from (P/Q)^a Q / E_Q (P/Q)^a, a an integer, and returns their losses.

    Attributes:
      order: The Renyi order a, at least 0; order 1 is P, and order 0 is Q.
      log_mgf: log E_Q (P/Q)^a, the log moment generating function of the loss under Q at a.
    """

    def __init__(self, pair: DominatingPair, order: int) -> None:
        self.order, self._pair = order, pair
        of: type[_Replicas] = _TimerReplicas if pair.has_timers else _BinReplicas
        self._replicas = of(pair, order) if order else None
        self.log_mgf: float = self._replicas.log_mgf if self._replicas else 0.0

    def log_ratios(self, rng: np.random.Generator, count: int) -> FloatArray:
        """Draws independent outputs and returns the logarithm of P/Q at each of them.

        Args:
          rng: The source of random numbers.
          count: The number m of outputs.

        Returns:
          (m,) log P/Q.
        """
        shifts: FloatArray | float = self._replicas.draw(rng, count) if self._replicas else 0.0
        outputs = rng.standard_normal((self._pair.num_outputs, count))
        outputs *= self._pair.sigma
        outputs += shifts
        return self._pair.log_ratios(outputs)

    def batches(
        self, key: int, count: int, summary: Callable[[FloatArray], _Each], advance: _Advance = None
    ) -> Iterator[_Each]:
        """Draws privacy losses in batches and yields a summary of each batch, in order.

        Every batch has a random generator of its own, so that results do not depend on the number
        of threads. If the iteration ends early, no further batches are drawn.

        Args:
          key: The integer that all random numbers follow from.
          count: The number of losses that are drawn.
          summary: A function of the losses of a batch.
          advance: Called with the number of losses after each batch.
        """

        def one(batch: int) -> tuple[int, _Each]:
            size = min(_BATCH, count - batch * _BATCH)
            rng = np.random.Generator(np.random.Philox(np.random.SeedSequence((key, batch))))
            return size, summary(self.log_ratios(rng, size))

        # If the iteration is closed early, the batches that have not begun are cancelled.
        with concurrent.futures.ThreadPoolExecutor(min(os.cpu_count() or 1, 8)) as pool:
            for size, value in pool.map(one, range(-(-count // _BATCH))):
                if advance is not None:
                    advance(size)
                yield value

    def largest_term(self, epsilon: float) -> float:
        """Returns M: what Renyi DP of the order gives for delta, which may be more than 1.

        Args:
          epsilon: Where delta is asked for.
        """
        a = self.order
        if a == 1:
            return 1.0 + LOSS_ROUNDING
        exponent = self.log_mgf - (a - 1) * epsilon
        exponent += (a - 1) * math.log(a - 1) - a * math.log(a)
        return math.exp(min(exponent, 700.0)) * (1.0 + 1e-6)

    def terms(self, losses: FloatArray, epsilon: float) -> FloatArray:
        """Returns the term T of the module's docstring for each loss, rounded up.

        Args:
          losses: (m,) log P/Q of outputs that were drawn at the order ``self.order``.
          epsilon: The epsilon of the divergence.
        """
        shares = -np.expm1(-np.maximum(losses - (epsilon - LOSS_ROUNDING), 0.0))
        exponents = self.log_mgf - (self.order - 1) * (losses - LOSS_ROUNDING)
        return np.asarray(shares * np.exp(np.minimum(exponents, 700.0)))


class _BinReplicas:
    """Draws the replicas of importance sampling for balls in bins, each in one bin."""

    def __init__(self, pair: DominatingPair, order: int) -> None:
        ((_, self._vectors),) = pair.blocks
        bins = self._vectors.shape[1]
        gram = self._vectors.T @ self._vectors / pair.sigma**2
        self._tuples = np.indices((bins,) * order, np.int32).reshape(order, -1)
        exponents = np.zeros(bins**order)
        for first, second in itertools.combinations(self._tuples, 2):
            exponents += gram[first, second]
        largest = float(np.max(exponents))
        self._cumulative = np.cumsum(np.exp(exponents - largest))
        self.log_mgf: float = largest + math.log(self._cumulative[-1]) - order * math.log(bins)

    def draw(self, rng: np.random.Generator, count: int) -> FloatArray:
        """Returns, for each of ``count`` draws, the sum of the vectors of the replicas' bins."""
        chosen = self._tuples[:, _categorical(rng, self._cumulative, count)]
        return np.asarray(sum(np.take(self._vectors, bins, axis=1) for bins in chosen))


class _TimerReplicas:
    """Draws the replicas of importance sampling for min-separation, as a Markov chain.

    A state of the chain is the increasing waits of all replicas but one, which is free to join.
    """

    def __init__(self, pair: DominatingPair, order: int) -> None:
        assert isinstance(pair.rounds, _MinSeparationRounds)
        p, self._separation = pair.rounds.probability, pair.rounds.separation
        self._order, self._columns = order, pair.columns
        self._rounds, bands = pair.columns.shape
        # The table of <c_t, c_{t + r - b}> / sigma^2 by the round t and the wait r. At r = b the
        # entry is the squared norm of c_t.
        self._pairs = np.zeros((self._rounds, self._separation + 1))
        for t in range(bands):
            later, earlier = pair.columns[t:, : bands - t], pair.columns[: self._rounds - t, t:]
            self._pairs[t:, self._separation - t] = np.einsum("ik,ik->i", later, earlier)
        self._pairs /= pair.sigma**2
        self._set_states(p)
        states = np.arange(len(self._waits))
        self._values = np.ones((self._rounds + self._separation + 1, len(states)))
        self._hazards = np.zeros((self._rounds, len(states)))
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            for t in range(self._rounds - 1, -1, -1):
                terms = self._terms(t, states)
                self._values[t] = np.sum(terms, axis=0)
                self._hazards[t] = np.sum(terms[1:], axis=0) / self._values[t]
            # The first waits of all replicas, as tuples, and the cumulated weights of the tuples.
            tuples = np.indices((self._separation,) * order, np.int32).reshape(order, -1).T
            weights = np.prod(pair.rounds.first_free_probabilities()[tuples], axis=-1)
            start = np.min(tuples, axis=-1)
            weights = weights * self._values[start, self._index(tuples - start[:, None])]
            self._first_waits, self._cumulative = tuples, np.cumsum(weights)
            self.log_mgf: float = float(np.log(self._cumulative[-1]))

    def _set_states(self, probability: float) -> None:
        """Tabulates weights, times and next states by state and number of joining replicas."""
        others = self._order - 1
        tuples = list(itertools.combinations_with_replacement(range(self._separation), others))
        self._waits = np.array(tuples, dtype=np.intp).reshape(len(tuples), others)
        self._powers = self._separation ** np.arange(others - 1, -1, -1, dtype=np.intp)
        self._lookup = np.zeros(self._separation**others, dtype=np.intp)
        self._lookup[self._waits @ self._powers] = np.arange(len(tuples))
        self._free = 1 + np.sum(self._waits == 0, axis=1)
        joining = np.arange(self._order + 1)[:, None]
        staying = np.maximum(self._free - joining, 0)
        # The weight is zero if the number of joining replicas is larger than that of free ones.
        self._weights = scipy.special.binom(self._free, joining) * probability**joining
        self._weights *= (1.0 - probability) ** staying
        waits = np.pad(self._waits, ((0, 0), (1, 0)))
        waits = np.where(np.arange(self._order) < joining[:, None], self._separation, waits)
        self._after = np.maximum(np.min(waits, axis=2), 1)
        self._following = self._index(np.maximum(waits - self._after[:, :, None], 0))

    def _index(self, waits: IntArray) -> IntArray:
        """Returns the state indices for the replicas' waits, (..., order), one of which is 0."""
        return np.asarray(self._lookup[np.sort(waits, axis=-1)[..., 1:] @ self._powers])

    def _terms(self, t: int | IntArray, state: IntArray) -> FloatArray:
        """Returns (order + 1, len(state)) terms of V_t, one for each number of joining replicas."""
        pair_sums = np.sum(self._pairs[np.asarray(t)[..., None], self._waits[state]], axis=-1)
        joining = np.arange(self._order + 1)[:, None]
        exponents = joining * pair_sums
        exponents += joining * (joining - 1) / 2 * self._pairs[t, self._separation]
        weights = self._weights[:, state]
        values = self._values[t + self._after[:, state], self._following[:, state]]
        return np.where(weights > 0.0, weights * np.exp(exponents) * values, 0.0)

    def draw(self, rng: np.random.Generator, count: int) -> FloatArray:
        """Draws the replicas' rounds and returns the (n, count) sums of their columns of C."""
        bands = self._columns.shape[1]
        # One row for each output, so that a column of C is added to neighbouring numbers in memory.
        total = np.zeros((count, self._rounds + bands))
        parts = sliding_window_view(total, bands, axis=1, writeable=True)
        free_at = self._first_waits[_categorical(rng, self._cumulative, count)]
        who, now = np.arange(count), np.min(free_at, axis=1) - 1
        largest_hazard = float(np.max(self._hazards))
        while len(who):
            # Thinning: rounds are proposed with the largest of all joining probabilities, and a
            # proposed round is accepted with the quotient of the chain's own probability and the
            # largest one.
            waited = rng.geometric(largest_hazard, len(who))
            # If the probability is tiny, ``geometric`` returns the largest integer, and adding to
            # it would overflow.
            now = np.maximum(now + np.minimum(waited, self._rounds + 1), 0)
            goes_on = now < self._rounds
            who, now, free_at = who[goes_on], now[goes_on], free_at[goes_on]
            uniform = rng.random(len(who))
            waits = np.maximum(free_at - now[:, None], 0)
            may_join = np.min(waits, axis=1) == 0
            state = self._index(np.where(may_join[:, None], waits, 0))
            rows = np.flatnonzero(may_join & (uniform * largest_hazard < self._hazards[now, state]))
            sums = np.cumsum(self._terms(now[rows], state[rows])[1:], axis=0)
            joining = 1 + np.sum(rng.random(len(rows)) * sums[-1] >= sums, axis=0)
            joining = np.minimum(joining, self._free[state[rows]])
            parts[who[rows], now[rows]] += joining[:, None] * self._columns[now[rows]]
            # Replicas are exchangeable, so the first of the free replicas are those that join.
            is_free = waits[rows] == 0
            joins = is_free & (np.cumsum(is_free, axis=1) <= joining[:, None])
            free_at[rows] = np.where(joins, (now[rows] + self._separation)[:, None], free_at[rows])
        return total[:, : self._rounds].T


def _log_sum(logs: FloatArray) -> FloatArray:
    """Returns the logarithm of the sum of exponentials along the first axis, without overflow."""
    largest = np.max(logs, axis=0)
    shares = logs - largest
    return np.asarray(largest + np.log(np.sum(np.exp(shares, out=shares), axis=0)))


def _categorical(rng: np.random.Generator, cumulative: FloatArray, count: int) -> IntArray:
    """Draws indices with probabilities in proportion to weights, given their cumulative sums."""
    found = np.searchsorted(cumulative, rng.random(count) * cumulative[-1], side="right")
    return np.asarray(np.minimum(found, len(cumulative) - 1))


@dataclasses.dataclass(frozen=True)
class Certificate:
    """A claim that a run is (epsilon, delta)-DP, with the Monte Carlo test that can prove it.

    Attributes:
      epsilon: The epsilon of the guarantee, at least 0.
      delta: The delta of the guarantee, for noise of real normal numbers.
      attempt: The number of this candidate, from 0 to ``ATTEMPTS`` - 1, among those for one delta.
      order: a, the Renyi order of the importance sampling.
      num_samples: The number N of samples in the test of P from Q; 0 where Renyi DP of order a
        suffices.
      bet: The bet w of the test martingale.
      num_untilted: The number of samples from Q in the test of Q from P.
      thresholds: t_0 and t_1 for the extrapolation.
      seed: The seed of the test: random numbers follow from it and from all numbers above.

    Raises:
      ValueError: If a value is not a number, not finite, or negative where it cannot be, or delta
        is not between 0 and 1.
    """

    epsilon: float
    delta: float
    attempt: int
    order: int
    num_samples: int
    bet: float
    num_untilted: int
    thresholds: tuple[float, float]
    seed: int

    def __post_init__(self) -> None:
        floats = dict.fromkeys(("epsilon", "bet"), numbers.non_negative_number)
        names = ("attempt", "order", "num_samples", "num_untilted", "seed")
        integers = dict.fromkeys(names, numbers.non_negative_integer)
        numbers.set_checked(self, delta=numbers.delta, **floats, **integers)
        low, high = (numbers.finite_number(each, "thresholds") for each in self.thresholds)
        object.__setattr__(self, "thresholds", (low, high))

    def to_dict(self) -> dict[str, object]:
        """Returns a JSON-able mapping, with the probability that a false certificate passes."""
        return {
            **dataclasses.asdict(self),
            "thresholds": list(self.thresholds),
            "failure_probability": shares_of(self.delta)[1],
        }


def check_certificate(
    certificate: Certificate,
    run: SampledRun,
    delta: float,
    num_coordinates: int = sensitivity.DEFAULT_NUM_COORDINATES,
    *,
    advance: _Advance = None,
) -> bool:
    """Returns whether a certificate proves that a run is (certificate.epsilon, delta)-DP.

    A false certificate passes with at most its failure probability, over the random numbers that
    are drawn. The result of a test is cached: the same test does not run again in this process.

    Args:
      certificate: The proposed certificate.
      run: The run. The number of steps by which roundings may move a row of noise is taken as it is
        given.
      delta: The delta of the guarantee, for noise as it is drawn: certificate.delta and the failure
        probability of the noise are at most this.
      num_coordinates: Parameters times rounds, at most.
      advance: Called with the number of outputs that were drawn after each batch.

    Raises:
      TypeError: If an argument is not exactly of its type, or clients are drawn in groups.
      ValueError: If the columns do not fit the scheme, or delta is out of its range; TailError if
        there is too little noise.
    """
    types = [type(each) for each in (certificate, run, delta, num_coordinates)]
    if types != [Certificate, SampledRun, float, int]:
        raise TypeError("a certificate is checked for data of the kernel's own types")
    # The run is made anew, so that its numbers are those that its constructor has checked.
    run = dataclasses.replace(run)
    return _proves(certificate, run, delta, num_coordinates, _Progress(advance))


@dataclasses.dataclass(frozen=True)
class _Progress:
    """A callback for progress; all instances are equal, because no proof depends on one."""

    advance: _Advance = dataclasses.field(compare=False)


# Tests are cached: a search tests its own proposal, and ``claim.check`` tests the same one again.
@functools.lru_cache(maxsize=64)
def _proves(
    certificate: Certificate, run: SampledRun, delta: float, coordinates: int, progress: _Progress
) -> bool:
    pair = dominating_pair(run, coordinates)
    return (
        certificate.delta <= sensitivity.delta_left(delta, run.amplified_part, coordinates)
        and certificate.attempt < ATTEMPTS
        and certificate.order in pair.orders
        and is_proved(pair, certificate, progress.advance)
    )


def is_proved(pair: DominatingPair, certificate: Certificate, advance: _Advance = None) -> bool:
    """Returns whether a certificate passes both of its tests, for a pair and real normal noise.

    Args:
      pair: The pair (P, Q) that dominates the run.
      certificate: The certificate that is tested.
      advance: As in :func:`check_certificate`.
    """
    tests = _p_from_q_is_small, _q_from_p_is_small
    return all(test(pair, certificate, advance) for test in tests)


def shares_of(delta: float) -> tuple[float, float]:
    """Returns how a delta is divided between the divergences and the failure probability of tests.

    Args:
      delta: The delta of a certificate.

    Returns:
      The largest divergence that passes the tests, which is delta less the failure probability of
      all attempts. And beta, the probability that a false certificate passes its test.
    """
    return delta * (1.0 - _FAILURE_SHARE), _FAILURE_SHARE * delta / (ATTEMPTS * MECHANISMS)


def _p_from_q_is_small(pair: DominatingPair, certificate: Certificate, advance: _Advance) -> bool:
    """Whether the divergence of P from Q is proved to be small: the loss of taking part."""
    sampler = ImportanceSampler(pair, certificate.order)
    epsilon, (delta, failure) = certificate.epsilon, shares_of(certificate.delta)
    largest = sampler.largest_term(epsilon)
    if largest <= delta:
        return True
    if not 0.0 < certificate.bet < 1.0 / (largest - delta):
        return False

    def wealth(losses: FloatArray) -> float:
        return _log_wealth(sampler.terms(losses, epsilon), delta, certificate.bet)

    key = _key_of(pair, certificate, "P from Q")
    grown = sampler.batches(key, certificate.num_samples, wealth, advance)
    return any(so_far >= -math.log(failure) for so_far in itertools.accumulate(grown))


def _q_from_p_is_small(pair: DominatingPair, certificate: Certificate, advance: _Advance) -> bool:
    """Whether the divergence of Q from P is proved to be small: the loss of not taking part."""
    if certificate.epsilon == 0.0:
        # At epsilon 0 both divergences are the total variation distance, which the other test
        # bounds.
        return True
    low, high = certificate.thresholds
    if not low < high or not certificate.num_untilted:
        return False

    def counts(losses: FloatArray) -> IntArray:
        # A loss near a threshold, or NaN, is counted so that the certificate is less likely to
        # pass.
        below = [~(losses > low + LOSS_ROUNDING), losses <= high - LOSS_ROUNDING]
        return np.asarray(np.sum(below, axis=1))

    key = _key_of(pair, certificate, "Q from P")
    sampler, samples = ImportanceSampler(pair, 0), certificate.num_untilted
    found = np.sum(list(sampler.batches(key, samples, counts, advance)), axis=0)
    largest, failure = shares_of(certificate.delta)
    epsilon = certificate.epsilon - LOSS_ROUNDING
    return divergence_of_counts(found, samples, (low, high), epsilon, failure) <= largest


def _log_wealth(terms: FloatArray, mean: float, bet: float) -> float:
    """Returns the logarithm of the wealth of the test martingale.

    Args:
      terms: The samples of T, at least zero and below mean + 1 / bet.
      mean: m. The test is to show that the mean of T is below m.
      bet: w.
    """
    return float(np.sum(np.log1p(bet * (mean - terms))))


def _key_of(pair: DominatingPair, certificate: Certificate, purpose: str) -> int:
    """Returns the key of random numbers, which differs for each pair, certificate and purpose.

    Args:
      pair: The pair that dominates the run.
      certificate: The certificate that is tested.
      purpose: The name of the test that samples are drawn for.
    """
    columns = np.ascontiguousarray(pair.columns, dtype="<f8").tobytes()
    # This name never changes, because random numbers depend on it.
    described = {**pair.description(), "claim": certificate.to_dict()}
    whole = purpose.encode() + columns + json.dumps(described, sort_keys=True).encode()
    return int.from_bytes(hashlib.sha256(whole).digest(), "big")


def _bounds_of_probability(count: int, samples: int, failure: float) -> tuple[float, float]:
    """Returns a lower and an upper bound of a probability, by the method of Clopper and Pearson.

    Args:
      count: The number of samples in which the event happened.
      samples: The number of all samples.
      failure: The probability that one of the bounds does not hold; twice that for both.
    """
    lower = scipy.stats.beta.ppf(failure, count, samples - count + 1) if count > 0 else 0.0
    is_all = count >= samples
    upper = 1.0 if is_all else scipy.stats.beta.isf(failure, count + 1, samples - count)
    return float(lower), float(upper)


def divergence_of_counts(
    counts: IntArray, samples: int, thresholds: tuple[float, float], epsilon: float, failure: float
) -> float:
    """Bounds E max(0, 1 - exp(epsilon + L)) from above, from counts of samples of the loss L.

    L is a convex function of normal numbers.

    Args:
      counts: (2,), the samples of L that are at most t_0, and those that are at most t_1.
      samples: The number of samples.
      thresholds: t_0 and t_1, in increasing order, fixed before the samples were drawn.
      epsilon: At least -t_0; for a smaller one the bound is 1.
      failure: The probability that the bound does not hold.
    """
    low, high = thresholds
    _, upper = _bounds_of_probability(int(counts[0]), samples, 0.5 * failure)
    lower, _ = _bounds_of_probability(int(counts[1]), samples, 0.5 * failure)
    above, below = (float(scipy.special.ndtri(each)) for each in (upper, lower))
    slope = (below - above) / (high - low)
    slope = max(slope, 0.0) if math.isfinite(slope) else 0.0
    return _divergence_of_tail(low, above, slope, epsilon)


def _divergence_of_tail(threshold: float, quantile: float, slope: float, epsilon: float) -> float:
    """Returns the divergence bound that follows from a Gaussian bound of the tail of L.

    For t <= threshold, Pr[L <= t] is at most Phi(quantile - slope (threshold - t)).

    Args:
      threshold: t_0.
      quantile: An upper bound of psi(t_0).
      slope: A lower bound of the slope of psi below t_0, not negative.
      epsilon: As in :func:`divergence_of_counts`.
    """
    if -epsilon > threshold:
        return 1.0
    at = quantile - slope * (threshold + epsilon)
    whole = float(scipy.special.ndtr(at))
    if slope <= 0.0:
        return whole
    # If Pr[L <= t] = Phi(a - s (-epsilon - t)), the mean is Phi(a) - E[exp((G - a) / s); G < a] for
    # a normal number G.
    width = 1.0 / slope
    log_less = -at * width + 0.5 * width**2 + float(scipy.special.log_ndtr(at - width))
    return min(max(whole - math.exp(min(log_less, 0.0)), 0.0) + 1e-12 * whole, whole)
