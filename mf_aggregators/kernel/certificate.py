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
"""

import dataclasses
import functools
import hashlib
import itertools
import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.special
import scipy.stats

from mf_aggregators.kernel import gaussian
from mf_aggregators.kernel.dominating_pairs import (
    LOSS_ROUNDING,
    DominatingPair,
    ImportanceSampler,
    dominating_pair,
)
from mf_aggregators.kernel.draws_of_clients import SampledRun
from mf_aggregators.kernel.gaussian import DEFAULT_NUM_COORDINATES
from mf_aggregators.kernel.numbers import FloatArray, IntArray

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
        and certificate.order in pair.orders
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
    epsilon, delta = certificate.epsilon, certificate.largest_divergence
    largest = sampler.largest_term(epsilon)
    if largest <= delta:
        return True
    if not 0.0 < certificate.bet < 1.0 / (largest - delta):
        return False

    def wealth(losses: FloatArray) -> float:
        return _log_wealth(sampler.terms(losses, epsilon), delta, certificate.bet)

    key = _key_of(pair, certificate, "P from Q")
    grown = sampler.batches(key, certificate.num_samples, wealth, advance)
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
        return np.array(
            [np.sum(~(losses > low + LOSS_ROUNDING)), np.sum(losses <= high - LOSS_ROUNDING)]
        )

    key = _key_of(pair, certificate, "Q from P")
    sampler, samples = ImportanceSampler(pair, 0), certificate.num_untilted
    found = np.sum(list(sampler.batches(key, samples, counts, advance)), axis=0)
    tail = lower_tail(
        int(found[0]), int(found[1]), samples, (low, high), certificate.failure_probability
    )
    return tail.divergence(certificate.epsilon - LOSS_ROUNDING) <= certificate.largest_divergence


def _log_wealth(terms: FloatArray, mean: float, bet: float) -> float:
    """Returns the logarithm of the wealth of the test martingale.

    Args:
      terms: The samples of T, at least zero and below mean + 1 / bet.
      mean: m, that the mean is to be shown to be below.
      bet: w.
    """
    return float(np.sum(np.log1p(bet * (mean - terms))))


def _key_of(pair: DominatingPair, certificate: Certificate, purpose: str) -> int:
    """Returns a number that tells pairs, certificates and purposes apart.

    Args:
      pair: What dominates the run.
      certificate: What is tested.
      purpose: What samples are drawn for.
    """
    digest = hashlib.sha256(purpose.encode())
    digest.update(np.ascontiguousarray(pair.columns, dtype="<f8").tobytes())
    # Random numbers follow from this name: it never changes.
    described = {**pair.description(), "claim": certificate.to_dict()}
    digest.update(json.dumps(described, sort_keys=True).encode())
    return int.from_bytes(digest.digest(), "big")


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
