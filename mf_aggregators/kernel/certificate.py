r"""Certified privacy of random participation: Monte Carlo tests of what a search proposes.

A certificate says that a run, whose dominating pair (P, Q) ``dominating_pairs`` has, is
(epsilon, delta)-DP. A search outside of the kernel proposes it as data. All that its test needs is
fixed in it before the test draws anything: the numbers of samples, the bet, and the seed. The test
draws and answers yes or no. If the certificate is false, one of two hockey-stick divergences is too
large, and the test of that one answers yes with at most the failure probability beta. What all
attempts may fail with, and those for the other noise multipliers of a search, is taken from delta
before: both divergences are tested to be below what is left. So delta covers that the test fails,
over the random numbers that it draws. Anybody can repeat the test.

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

**Bounds by samples.** A certificate proves one epsilon. A composition with other runs takes the
whole profile: h(e^epsilon), the hockey-stick divergence of P from Q, and that of Q from P, for the
pair (P, Q) of ``dominating_pairs``. :class:`Profile` bounds both at all epsilons of a grid at once,
but for a failure probability beta over the random numbers that are drawn. Each of the bounds may
fail with an equal share of beta, so that by the union bound all of them hold with probability 1 -
beta. They may share samples: a union bound asks for no independence.

*A bound on a mean.* Let T_1, ..., T_N be independent numbers between 0 and M with the mean mu,
and let the bet 0 < w <= 1 / M be fixed before they are drawn. The wealth
W(m) = prod_i (1 + w (m - T_i)) is not negative for any m >= 0, increases in m, and W(mu) has the
expectation 1. By Markov's inequality W(mu) < 1 / beta but for a probability of beta. So the m with
W(m) = 1 / beta is above mu. In the same way V(m) = prod_i (1 + w (T_i - m)), which decreases,
bounds mu from below: for m <= 1 / w it is not negative, and mu <= M.

*P from Q*: the terms T of ``certificate`` for outputs of a Renyi order a, which are between 0
and M_a(epsilon). For each epsilon, the order is the one of the least M_a, which no sample has a
part in. M_a itself is a bound that needs no samples, for a > 1.

*Q from P*: the terms max(0, 1 - e^(epsilon + L)) for outputs of Q, between 0 and 1. Below what
samples show, Ehrhard's inequality bounds them: one :class:`certificate._LowerTail` holds at all
epsilons together. Its thresholds come from tuning samples, which have random numbers of their own,
as have bets.

No divergence is above that without amplification either: whoever knows S sees a Gaussian mechanism
of the norm of its columns, and divergences of mixtures are no larger than the largest of their
parts.
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
from typing import Any

import numpy as np
import scipy.special
import scipy.stats

from mf_aggregators.kernel import gaussian
from mf_aggregators.kernel.dominating_pairs import (
    DominatingPair,
    ImportanceSampler,
    dominating_pair,
    possible_orders,
)
from mf_aggregators.kernel.draws_of_clients import SampledRun
from mf_aggregators.kernel.gaussian import DEFAULT_NUM_COORDINATES
from mf_aggregators.kernel.numbers import FloatArray, IntArray

_BATCH = 1024
# More than the rounding error of a loss, many times over.
_ROUNDING = 1e-9
# The failure probability of all attempts together, as a share of delta.
_FAILURE_SHARE = 0.01
ATTEMPTS = 4
# Runs that share it as well, because a search for a noise multiplier takes the first that is proved
# to reach its target, or the best of several is chosen.
MECHANISMS = 16


@dataclasses.dataclass(frozen=True)
class Certificate:
    """That a run is (epsilon, delta)-DP, and how that is tested; a candidate until it is.

    Attributes:
      epsilon: Of the guarantee, at least 0.
      delta: Of the guarantee, for noise of real normal numbers.
      attempt: Which of ``ATTEMPTS`` candidates of one delta this is, from 0.
      order: a, the Renyi order of the importance sampling.
      num_samples: The samples N for P from Q; 0 where Renyi DP of order a suffices.
      bet: The bet w of the test martingale.
      num_untilted: The samples of Q for Q from P.
      thresholds: t_0 and t_1 for the extrapolation.
      seed: The random numbers follow from it, with all of the above.

    Raises:
      TypeError: If a number is not exactly a float or an int, as it should be.
      ValueError: If a number is not finite or negative where it cannot be, or delta is not between
        0 and 1.
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
        low, high = self.thresholds
        floats = (self.epsilon, self.delta, self.bet, low, high)
        integers = (self.attempt, self.order, self.num_samples, self.num_untilted, self.seed)
        types = type(self.thresholds), {*map(type, floats)}, {*map(type, integers)}
        if types != (tuple, {float}, {int}):
            raise TypeError("a number of a certificate is not exactly a float or an int")
        known = all(map(math.isfinite, floats)) and 0.0 < self.delta < 1.0
        if not known or min(*integers, self.epsilon, self.bet) < 0:
            raise ValueError("a number of a certificate is out of its range")

    @property
    def failure_probability(self) -> float:
        """The probability beta that a false candidate passes its test."""
        return failure_probability(self.delta)

    @property
    def largest_divergence(self) -> float:
        """The bound that both divergences are tested for: delta less beta of all attempts."""
        return tested_delta(self.delta)

    def to_dict(self) -> dict[str, Any]:
        """Returns a JSON-able mapping."""
        return {
            **dataclasses.asdict(self),
            "thresholds": list(self.thresholds),
            "failure_probability": self.failure_probability,
        }


def check_certificate(
    certificate: Certificate,
    run: SampledRun,
    delta: float,
    num_coordinates: int = DEFAULT_NUM_COORDINATES,
    *,
    advance: Callable[[int], object] | None = None,
) -> bool:
    """Returns whether a certificate proves that a run is (certificate.epsilon, delta)-DP.

    Over the random numbers that are drawn, a false one passes with at most its failure probability.
    What was proved is not tested again in the same process.

    Args:
      certificate: The proposal.
      run: The run. The number that roundings may move a row of noise by is taken as it is given.
      delta: Of the guarantee, for noise as it is drawn: certificate.delta and the failure
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
    # Made anew, so that its numbers are those that its constructor has checked.
    run = dataclasses.replace(run)
    return _proves(certificate, run, delta, num_coordinates, _Progress(advance))


@dataclasses.dataclass(frozen=True)
class _Progress:
    """A callback for progress; all are equal, as no proof depends on them."""

    advance: Callable[[int], object] | None = dataclasses.field(compare=False)


# A search tests its proposal, and the claim of the proposal is tested again.
@functools.lru_cache(maxsize=64)
def _proves(
    certificate: Certificate,
    run: SampledRun,
    delta: float,
    num_coordinates: int,
    progress: _Progress,
) -> bool:
    pair, part = dominating_pair(run, num_coordinates), run.sigma / run.together.largest_part
    return (
        certificate.delta <= gaussian.delta_left(delta, part, num_coordinates)
        and certificate.attempt < ATTEMPTS
        and certificate.order in possible_orders(pair)
        and is_proved(pair, certificate, progress.advance)
    )


def is_proved(
    pair: DominatingPair,
    certificate: Certificate,
    advance: Callable[[int], object] | None = None,
) -> bool:
    """Returns whether the test of a certificate passes for a pair and noise of real numbers.

    Args:
      pair: What dominates the run.
      certificate: The candidate, or what is to be proved again.
      advance: As in :func:`check_certificate`.
    """
    return _p_from_q_is_small(pair, certificate, advance) and _q_from_p_is_small(
        pair, certificate, advance
    )


def failure_probability(delta: float) -> float:
    """Returns the probability beta with which a false candidate of a delta passes its test."""
    return _FAILURE_SHARE * delta / (ATTEMPTS * MECHANISMS)


def tested_delta(delta: float) -> float:
    """Returns the bound that divergences are tested for, in a certificate of a delta."""
    return delta * (1.0 - _FAILURE_SHARE)


def _p_from_q_is_small(
    pair: DominatingPair, certificate: Certificate, advance: Callable[[int], object] | None
) -> bool:
    """Whether the divergence of P from Q is proved: the loss of taking part."""
    sampler = ImportanceSampler(pair, certificate.order)
    order, epsilon, delta = certificate.order, certificate.epsilon, certificate.largest_divergence
    largest = largest_term(sampler.log_mgf, order, epsilon)
    if largest <= delta:
        return True
    if not 0.0 < certificate.bet < 1.0 / (largest - delta):
        return False

    def wealth(losses: FloatArray) -> float:
        return _log_wealth(terms(losses, sampler.log_mgf, order, epsilon), delta, certificate.bet)

    key = _key_of(pair, certificate, "P from Q")
    grown = in_batches(sampler, key, certificate.num_samples, wealth, advance)
    needed = -math.log(certificate.failure_probability)
    return any(wealth_so_far >= needed for wealth_so_far in itertools.accumulate(grown))


def _q_from_p_is_small(
    pair: DominatingPair, certificate: Certificate, advance: Callable[[int], object] | None
) -> bool:
    """Whether the divergence of Q from P is proved: the loss of not taking part."""
    if certificate.epsilon == 0.0:
        # Both divergences are the total variation distance, which was tested before.
        return True
    low, high = certificate.thresholds
    if not low < high or not certificate.num_untilted:
        return False

    def counts(losses: FloatArray) -> IntArray:
        # Losses near a threshold are counted against the candidate, and so is NaN.
        return np.array([np.sum(~(losses > low + _ROUNDING)), np.sum(losses <= high - _ROUNDING)])

    key = _key_of(pair, certificate, "Q from P")
    sampler, samples = ImportanceSampler(pair, 0), certificate.num_untilted
    found = np.sum(list(in_batches(sampler, key, samples, counts, advance)), axis=0)
    tail = lower_tail(
        int(found[0]), int(found[1]), samples, (low, high), certificate.failure_probability
    )
    return tail.divergence(certificate.epsilon - _ROUNDING) <= certificate.largest_divergence


def largest_term(log_mgf: float, order: int, epsilon: float) -> float:
    """Returns M: what Renyi DP of an order gives for delta, which may be more than 1.

    Args:
      log_mgf: log E_Q (P/Q)^a.
      order: a.
      epsilon: Where delta is asked for.
    """
    if order == 1:
        return 1.0 + _ROUNDING
    exponent = log_mgf - (order - 1) * epsilon
    exponent += (order - 1) * math.log(order - 1) - order * math.log(order)
    return math.exp(min(exponent, 700.0)) * (1.0 + 1e-6)


def terms(losses: FloatArray, log_mgf: float, order: int, epsilon: float) -> FloatArray:
    """Returns T of losses, rounded up.

    Args:
      losses: (m,) log P/Q of outputs that were drawn at a Renyi order a.
      log_mgf: log E_Q (P/Q)^a.
      order: a.
      epsilon: Where the divergence is asked for.
    """
    above = losses - (epsilon - _ROUNDING)
    shares = -np.expm1(-np.maximum(above, 0.0))
    return np.asarray(
        shares * np.exp(np.minimum(log_mgf - (order - 1) * (losses - _ROUNDING), 700.0))
    )


def _log_wealth(terms: FloatArray, mean: float, bet: float) -> float:
    """Returns the logarithm of the wealth of the test martingale.

    Args:
      terms: The samples of T, at least zero and below mean + 1 / bet.
      mean: m, that the mean is to be shown to be below.
      bet: w.
    """
    return float(np.sum(np.log1p(bet * (mean - terms))))


def _key_of(pair: DominatingPair, certificate: Certificate | None, purpose: str) -> int:
    """Returns a number that tells pairs, certificates and purposes apart.

    Args:
      pair: What dominates the run.
      certificate: What is tested; None where samples are drawn for something else.
      purpose: What they are drawn for.
    """
    digest = hashlib.sha256(purpose.encode())
    digest.update(np.ascontiguousarray(pair.columns, dtype="<f8").tobytes())
    # Random numbers follow from this name: it never changes.
    claim = None if certificate is None else certificate.to_dict()
    digest.update(json.dumps({**pair.description(), "claim": claim}, sort_keys=True).encode())
    return int.from_bytes(digest.digest(), "big")


def in_batches(
    sampler: ImportanceSampler,
    key: int,
    count: int,
    summary: Callable[[FloatArray], Any],
    advance: Callable[[int], object] | None = None,
) -> Iterator[Any]:
    """Draws losses and yields a summary of each batch, in their order.

    Every batch has a generator of its own, so that results do not depend on how many are drawn at
    a time. If the iteration ends early, no more are drawn.
    """

    def one(batch: int) -> Any:
        size = min(_BATCH, count - batch * _BATCH)
        rng = np.random.Generator(np.random.Philox(np.random.SeedSequence((key, batch))))
        return size, summary(sampler.log_ratios(rng, size))

    pool = concurrent.futures.ThreadPoolExecutor(max_workers=min(os.cpu_count() or 1, 8))
    try:
        for size, value in pool.map(one, range(-(-count // _BATCH))):
            if advance is not None:
                advance(size)
            yield value
    finally:
        pool.shutdown(cancel_futures=True)


def _upper_probability(count: int, samples: int, failure: float) -> float:
    """Returns an upper bound of a probability, by Clopper and Pearson.

    Args:
      count: In how many samples it happened.
      samples: Of how many.
      failure: The probability that the bound does not hold.
    """
    if count >= samples:
        return 1.0
    return float(scipy.stats.beta.isf(failure, count + 1, samples - count))


def _lower_probability(count: int, samples: int, failure: float) -> float:
    """Returns a lower bound of a probability; arguments as of :func:`_upper_probability`."""
    if count <= 0:
        return 0.0
    return float(scipy.stats.beta.ppf(failure, count, samples - count + 1))


@dataclasses.dataclass(frozen=True)
class _LowerTail:
    """Pr[L <= t] <= Phi(quantile - slope (threshold - t)) for t <= threshold.

    Attributes:
      threshold: t_0.
      quantile: An upper bound of psi(t_0).
      slope: A lower bound of the slope of psi below t_0, not negative.
    """

    threshold: float
    quantile: float
    slope: float

    def divergence(self, epsilon: float) -> float:
        """Returns an upper bound of E max(0, 1 - exp(epsilon + L)).

        Args:
          epsilon: At least -t_0; for a smaller one the bound is 1.
        """
        if -epsilon > self.threshold:
            return 1.0
        at = self.quantile - self.slope * (self.threshold + epsilon)
        whole = float(scipy.special.ndtr(at))
        if self.slope <= 0.0:
            return whole
        # With Pr[L <= t] = Phi(a - s (-epsilon - t)), it is Phi(a) less E[exp((G - a) / s); G < a].
        width = 1.0 / self.slope
        log_less = -at * width + 0.5 * width**2 + float(scipy.special.log_ndtr(at - width))
        return min(max(whole - math.exp(min(log_less, 0.0)), 0.0) + 1e-12 * whole, whole)


def lower_tail(
    low_count: int,
    high_count: int,
    samples: int,
    thresholds: tuple[float, float],
    failure: float,
) -> _LowerTail:
    """Returns a bound of the lower tail of a convex function L of normal numbers.

    Args:
      low_count: The samples of L that are at most t_0.
      high_count: Those that are at most t_1.
      samples: The number of samples.
      thresholds: t_0 and t_1, in increasing order, fixed before the samples were drawn.
      failure: The probability that the bound does not hold.
    """
    low, high = thresholds
    above = float(scipy.special.ndtri(_upper_probability(low_count, samples, 0.5 * failure)))
    below = float(scipy.special.ndtri(_lower_probability(high_count, samples, 0.5 * failure)))
    slope = (below - above) / (high - low)
    return _LowerTail(low, above, max(slope, 0.0) if math.isfinite(slope) else 0.0)


# The least samples of each order and of Q, more if few of them count, and tuning samples.
_FEWEST_SAMPLES, _TUNING = 2**16, 2**12
_MOST_SAMPLES, _MOST_NUMBERS = 2**20, 400_000_000
# Samples, over log(1 / beta) M over the divergence.
_FACTOR = 4.0
_TUNING_OF_Q, _SAMPLES_OF_Q = 2**14, 2**18
# Shares of samples of Q that are below a lower threshold, and below the higher one.
_LOW_SHARES, _HIGH_SHARE = (2**-10, 2**-7, 2**-4), 2**-2
# More than the solver's error, relative to a bound.
_ERROR_OF_ROOT = 1e-6
_MOST_STEPS = 60


class Profile:
    """Both divergences of a pair at a grid of epsilons, bounded by samples."""

    def __init__(
        self,
        pair: DominatingPair,
        failure: float,
        level: float,
        *,
        seed: int = 0,
        samples: int | None = None,
    ) -> None:
        """Makes the samplers of all orders.

        Args:
          pair: What dominates the run.
          failure: The probability that one of the bounds of a call does not hold, above 0.
          level: Down to which divergence bounds are to be close; below, they hold as well.
          seed: What random numbers follow from. Choose it before anything is known of the result.
          samples: How many outputs are drawn of each order; None for as many as are needed, if they
            take no more than a minute.
        """
        self._pair, self._failure, self._level, self._seed = pair, failure, level, seed
        self._samples = samples
        self._samplers = [
            each
            for each in (ImportanceSampler(pair, order) for order in possible_orders(pair))
            if math.isfinite(each.log_mgf)
        ]
        self._drawn: dict[tuple[int, str], FloatArray] = {}

    def renyi_bounds(self, epsilons: FloatArray) -> FloatArray:
        """Returns upper bounds on the divergence of P from Q, from exact moments alone.

        Args:
          epsilons: At least 0, (J,).
        """
        found = np.ones(len(epsilons))
        for sampler in self._samplers:
            if sampler.order > 1:
                found = np.minimum(found, _largest_terms(sampler, epsilons))
        return found

    def upper(self, epsilons: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Returns upper bounds on both divergences, of P from Q and of Q from P.

        Args:
          epsilons: At least 0, (J,).
        """
        each = self._failure / (2 * len(epsilons) + len(_LOW_SHARES))
        with_client, without_client = self._of_p(epsilons, each), self._of_q(epsilons, each)
        with_client = np.minimum(with_client, self.renyi_bounds(epsilons))
        for tail in self._tails(each):
            bounds = [tail.divergence(epsilon - _ROUNDING) for epsilon in epsilons]
            without_client = np.minimum(without_client, bounds)
        return np.minimum(with_client, 1.0), np.minimum(without_client, 1.0)

    def _of_p(self, epsilons: FloatArray, failure: float) -> FloatArray:
        """Bounds on the divergence of P from Q, by terms of the order that suits each epsilon."""
        largest = np.array([_largest_terms(each, epsilons) for each in self._samplers])
        best = np.argmin(largest, axis=0)
        found = np.zeros(len(epsilons))
        for index in np.unique(best):
            sampler, chosen = self._samplers[index], np.flatnonzero(best == index)
            tuning = self._losses(sampler, "tuning", _TUNING)
            terms_of = functools.partial(_terms_of_p, sampler=sampler)
            count = self._needed(
                epsilons[chosen], largest[index, chosen], tuning, terms_of, failure
            )
            losses = self._losses(sampler, "profile", count)
            for at in chosen:
                epsilon, most = float(epsilons[at]), float(largest[index, at])
                bet = _bet(terms_of(tuning, epsilon), len(tuning), most, count, failure)
                found[at] = _upper_mean(terms_of(losses, epsilon), count, most, bet, failure)
        return found

    def _needed(
        self,
        epsilons: FloatArray,
        largest: FloatArray,
        tuning: FloatArray,
        terms_of: Callable[..., FloatArray],
        failure: float,
    ) -> int:
        """How many samples bound divergences closely: about log(1 / beta) M / divergence."""
        ratio = 0.0
        for epsilon, most in zip(epsilons, largest, strict=True):
            # Below the level, M is enough.
            if most >= self._level:
                mean = float(np.sum(terms_of(tuning, float(epsilon)))) / len(tuning)
                ratio = max(ratio, most / max(mean, self._level))
        return self._within(-_FACTOR * math.log(failure) * ratio)

    def _within(self, count: float) -> int:
        """A number of samples that does not take too long."""
        if self._samples is not None:
            return self._samples
        most = min(_MOST_SAMPLES, _MOST_NUMBERS // self._pair.products.num_outputs)
        return max(min(math.ceil(count), most), _FEWEST_SAMPLES)

    def _of_q(self, epsilons: FloatArray, failure: float) -> FloatArray:
        """Bounds on the divergence of Q from P."""
        tuning, losses = self._of_outputs_without()
        found = np.zeros(len(epsilons))
        for at, each in enumerate(epsilons):
            epsilon = float(each)
            bet = _bet(_terms_of_q(tuning, epsilon), len(tuning), 1.0, len(losses), failure)
            found[at] = _upper_mean(_terms_of_q(losses, epsilon), len(losses), 1.0, bet, failure)
        return found

    def _of_outputs_without(self) -> tuple[FloatArray, FloatArray]:
        """Losses of outputs of Q: tuning samples, and others."""
        sampler = ImportanceSampler(self._pair, 0)
        tuning = self._losses(sampler, "tuning", _TUNING_OF_Q)
        return tuning, self._losses(sampler, "profile", self._within(_SAMPLES_OF_Q))

    def _tails(self, failure: float) -> list[_LowerTail]:
        """Bounds on the lower tail of losses of Q, each of which may fail with the probability."""
        tuning, losses = self._of_outputs_without()
        high = float(tuning[int(_HIGH_SHARE * len(tuning))])
        found = []
        for share in _LOW_SHARES:
            low = float(tuning[int(share * len(tuning))])
            if low < high:
                # Losses near a threshold are counted on the side of a larger bound.
                counts = (
                    int(np.searchsorted(losses, low + _ROUNDING, side="right")),
                    int(np.searchsorted(losses, high - _ROUNDING, side="right")),
                )
                found.append(lower_tail(*counts, len(losses), (low, high), failure))
        return found

    def _losses(self, sampler: ImportanceSampler, purpose: str, count: int) -> FloatArray:
        """Losses of outputs of an order, in increasing order."""
        order = sampler.order
        if (order, purpose) not in self._drawn:
            key = _key_of(self._pair, None, f"{purpose} of order {order}, seed {self._seed}")
            drawn = in_batches(sampler, key, count, lambda losses: losses)
            self._drawn[order, purpose] = np.sort(np.concatenate(list(drawn)))
        return self._drawn[order, purpose]


def _terms_of_p(losses: FloatArray, epsilon: float, sampler: ImportanceSampler) -> FloatArray:
    """The terms of increasing losses that are not zero."""
    above = losses[np.searchsorted(losses, epsilon - 2.0 * _ROUNDING) :]
    return terms(above, sampler.log_mgf, sampler.order, epsilon)


def _terms_of_q(losses: FloatArray, epsilon: float) -> FloatArray:
    """The terms of increasing losses that are not zero, rounded up."""
    highest = _ROUNDING - epsilon
    return np.asarray(-np.expm1(losses[: np.searchsorted(losses, highest)] - highest))


def _largest_terms(sampler: ImportanceSampler, epsilons: FloatArray) -> FloatArray:
    return np.array([largest_term(sampler.log_mgf, sampler.order, each) for each in epsilons])


def _bet(tuning: FloatArray, num_tuning: int, largest: float, count: int, failure: float) -> float:
    """A bet for ``count`` samples like the tuning samples, of which only some are not zero."""
    # One more sample counts as the largest term.
    mean = float(np.sum(tuning)) / num_tuning
    variance = (float(np.sum(tuning**2)) + largest**2) / num_tuning - mean**2
    best = math.sqrt(-2.0 * math.log(failure) / (count * max(variance, 1e-12 * largest**2)))
    return min(best, 0.9 / largest)


def _upper_mean(terms: FloatArray, count: int, largest: float, bet: float, failure: float) -> float:
    """An upper bound of a mean of samples between 0 and a largest one.

    The logarithm of the wealth is concave in the mean and grows, and no more than its linear part.
    So Newton's steps from where that has the goal end below the root, each above the last.

    Args:
      terms: Those of the samples that are not zero.
      count: How many samples there are.
      largest: M.
      bet: w, above 0 and below 1 / M.
      failure: The probability that the bound does not hold.
    """
    # The goal is raised by more than the rounding of the wealth.
    goal = -math.log(failure) + 1e-9 * count * bet * largest
    rest = count - len(terms)
    found = float(np.sum(terms)) / count + goal / (count * bet)
    for _ in range(_MOST_STEPS):
        if found >= largest:
            break
        growth = bet * (found - terms)
        wealth = float(np.sum(np.log1p(growth))) + rest * math.log1p(bet * found)
        slope = bet * (float(np.sum(1.0 / (1.0 + growth))) + rest / (1.0 + bet * found))
        step = (goal - wealth) / slope
        found += step
        if abs(step) <= _ERROR_OF_ROOT * abs(found):
            return min(found * (1.0 + 2.0 * _ERROR_OF_ROOT), largest)
    return largest
