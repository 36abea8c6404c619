r"""Certified privacy of random participation, by Monte Carlo tests.

A certificate says that a run, whose dominating pair (P, Q) ``distributions`` has, is
(epsilon, delta)-DP. It begins as a *candidate*, in which all that its test needs is fixed before
the test draws anything: the numbers of samples, the bet, and the seed. The test draws and answers
yes or no. If the candidate is false, one of two hockey-stick divergences is too large, and the test
of that one answers yes with at most the candidate's failure probability beta. What all attempts may
fail with, and those for the other noise multipliers of a search, is taken from delta before: both
divergences are tested to be below what is left. So delta covers that the test fails, over the
random numbers that it draws. Anybody can repeat the test.

**P from Q.** With an output from (P/Q)^a Q / Z, Z = E_Q (P/Q)^a (``importance_sampling``), and its
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

**What an attacker can do** depends on the divergence of P from Q at small epsilons, where it is not
small, and averages over outputs from P itself (a = 1), which are between 0 and 1, bound it closely.

What is tried before there is a candidate (``search``) has random numbers of its own. The random
numbers of a test follow from the seed and from all that is certified, so that none are used twice.
A seed that was chosen by its result proves nothing.
"""

import concurrent.futures
import dataclasses
import hashlib
import itertools
import json
import math
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import scipy.optimize
import scipy.special
import scipy.stats

from mf_aggregators.kernel import validation
from mf_aggregators.kernel.arrays import FloatArray, IntArray
from mf_aggregators.kernel.dominating_pairs import DominatingPair
from mf_aggregators.kernel.errors import Error
from mf_aggregators.kernel.importance_sampling import ImportanceSampler, SamplerOfQ
from mf_aggregators.progress_bars import ProgressBar

_BATCH = 1024
# What rounding may do to a loss, many times over.
ROUNDING = 1e-9
# The failure probability of all attempts together, as a share of delta.
FAILURE_SHARE = 0.01
ATTEMPTS = 4
# So many mechanisms share it as well, where a search for a noise multiplier takes the first that
# is proved to reach its target, or the best of several is chosen.
MECHANISMS = 16
# Bets stay this far inside of what keeps wealth positive.
_MARGIN = 1e-6
# More than what the root of a divergence is off by.
_ERROR_OF_ROOT = 1e-11


class MechanismBudgetError(Error, ValueError):
    """One result takes tests of more mechanisms than share its failure probability."""


@dataclasses.dataclass(eq=False)
class MechanismBudget:
    """How many mechanisms may still be tested on the way to one result.

    Attributes:
      left: How many. Each test takes one, and :meth:`take` takes a part.
    """

    left: int = MECHANISMS

    def __post_init__(self) -> None:
        if not 0 <= self.left <= MECHANISMS:
            raise MechanismBudgetError(
                f"delta pays for tests of 0 to {MECHANISMS} mechanisms, found {self.left}."
            )

    def take(self, mechanisms: int = 1) -> "MechanismBudget":
        """Takes a part out of the budget and returns it.

        Args:
          mechanisms: The size of the part. All of it counts as used, tested or not.

        Raises:
          MechanismBudgetError: If fewer are left.
        """
        if mechanisms > self.left:
            raise MechanismBudgetError(
                f"one result takes Monte Carlo tests of more mechanisms than the {MECHANISMS} that "
                "its delta pays for: compare fewer of them."
            )
        part = MechanismBudget(mechanisms)
        self.left -= mechanisms
        return part


@dataclasses.dataclass(frozen=True)
class Certificate:
    """That a run is (epsilon, delta)-DP, and how that is tested; a candidate until it is.

    Attributes:
      epsilon: Of the guarantee.
      delta: Of the guarantee, for noise of real normal numbers.
      attempt: Which of ``ATTEMPTS`` candidates of one delta this is, from 0.
      order: a, the Renyi order of the importance sampling.
      num_samples: The samples N for P from Q; 0 where Renyi DP of order a suffices.
      bet: The bet w of the test martingale.
      num_untilted: The samples of Q for Q from P.
      thresholds: t_0 and t_1 for the extrapolation.
      seed: What random numbers follow from, with all of the above.
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

    @property
    def failure_probability(self) -> float:
        """The probability beta that a false candidate passes its test."""
        return failure_probability(self.delta)

    @property
    def largest_divergence(self) -> float:
        """What both divergences are tested to be below: delta less beta of all attempts."""
        return tested_delta(self.delta)

    def to_dict(self) -> dict[str, Any]:
        """Returns a JSON-able mapping that :func:`from_dict` takes back."""
        return {
            **dataclasses.asdict(self),
            "thresholds": list(self.thresholds),
            "failure_probability": self.failure_probability,
        }


@dataclasses.dataclass(frozen=True)
class Certification:
    """How epsilons are certified.

    Attributes:
      seed: What all random numbers follow from. Choose it before anything is known of its
        result.
      max_samples: The most samples of a test; as many as take minutes by default.
      directory: Where certificates are kept, to be proved again; None for nowhere.
      show_progress: Whether to show progress bars on standard error.
      budget: The mechanisms that may be tested. If one of several results is chosen, give all
        their calls the same budget; None makes each call a result of its own.

    Raises:
      ValueError: If the seed is no integer of at least 0, or ``max_samples`` none of at least 1,
        or another attribute is of another type.
    """

    seed: int = 0
    max_samples: int | None = None
    directory: pathlib.Path | None = None
    show_progress: bool = False
    budget: MechanismBudget | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "seed", validation.integer_at_least(self.seed, 0, "seed"))
        if self.max_samples is not None:
            validation.set_positive_integers(self, "max_samples")
        validation.check_types(self)


@dataclasses.dataclass(frozen=True)
class Amplified:
    """An amplified epsilon, and what proves it.

    Attributes:
      epsilon: Of the run, for noise as it is drawn.
      certificate: Its certificate; None where there is none, or nothing is amplified.
    """

    epsilon: float
    certificate: Certificate | None


def from_dict(description: Mapping[str, Any]) -> Certificate:
    """Returns the certificate that ``to_dict`` described.

    Raises:
      ValueError: If it describes none: a number is missing, is none, or is not finite.
    """
    try:
        values = {field.name: description[field.name] for field in dataclasses.fields(Certificate)}
        low, high = values.pop("thresholds")
        for name in ("epsilon", "delta", "bet"):
            values[name] = _finite(values[name])
        for name, value in values.items():
            if type(value) is not (float if name in ("epsilon", "delta", "bet") else int):
                raise TypeError(name)
        return Certificate(**values, thresholds=(_finite(low), _finite(high)))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{validation.shown(description)} describes no certificate.") from error


def _finite(value: Any) -> float:
    """A number of JSON as a float."""
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError(value)
    return float(value)


def is_proved(
    pair: DominatingPair, certificate: Certificate, *, show_progress: bool = False
) -> bool:
    """Tests a certificate.

    Args:
      pair: What dominates the run.
      certificate: The candidate, or what is to be proved again.
      show_progress: Whether to show a progress bar on standard error.

    Returns:
      Whether it is proved. Over random seeds, a false one passes with probability at most beta.
    """
    total = certificate.num_samples + certificate.num_untilted
    with ProgressBar(total=total, desc="certificate", disable=not show_progress) as bar:
        return _p_from_q_is_small(pair, certificate, bar) and _q_from_p_is_small(
            pair, certificate, bar
        )


def divergences(
    pair: DominatingPair, epsilons: Sequence[float], *, num_samples: int, failure: float, seed: int
) -> tuple[tuple[float, float], ...]:
    """Returns upper bounds on the hockey-stick divergence of P from Q, for noise of real numbers.

    Args:
      pair: What dominates the run.
      epsilons: Where the divergence is asked for.
      num_samples: How many outputs are drawn from P.
      failure: The probability that any of the bounds does not hold, over what is drawn. It is
        added to each of them.
      seed: What random numbers follow from. Choose it before anything is known of the result.

    Returns:
      Pairs of an epsilon and the bound, at most 1.
    """
    sampler = ImportanceSampler(pair, 1)

    def sums(losses: FloatArray) -> list[float]:
        return [float(np.sum(terms(losses, 0.0, 1, epsilon))) for epsilon in epsilons]

    key = key_of(pair, None, f"divergences of P from Q, seed {seed}")
    means = np.sum(list(in_batches(sampler, key, num_samples, sums)), axis=0) / num_samples
    each = failure / len(epsilons)
    return tuple(
        (epsilon, min(upper_mean(float(mean), num_samples, each) + failure, 1.0))
        for epsilon, mean in zip(epsilons, means, strict=True)
    )


def failure_probability(delta: float) -> float:
    """Returns the probability beta with which a false candidate of a delta passes its test."""
    return FAILURE_SHARE * delta / (ATTEMPTS * MECHANISMS)


def tested_delta(delta: float) -> float:
    """Returns what divergences are tested to be below, for a certificate of a delta."""
    return delta * (1.0 - FAILURE_SHARE)


def _p_from_q_is_small(pair: DominatingPair, certificate: Certificate, bar: Any) -> bool:
    """Whether the divergence of P from Q is proved: the loss of taking part."""
    sampler = ImportanceSampler(pair, certificate.order)
    largest = largest_term(sampler.log_mgf, certificate.order, certificate.epsilon)
    if largest <= certificate.largest_divergence:
        return True
    if not 0.0 < certificate.bet < 1.0 / (largest - certificate.largest_divergence):
        return False

    def wealth(losses: FloatArray) -> float:
        values = terms(losses, sampler.log_mgf, certificate.order, certificate.epsilon)
        return log_wealth(values, certificate.largest_divergence, certificate.bet)

    key = key_of(pair, certificate, "P from Q")
    grown = itertools.accumulate(in_batches(sampler, key, certificate.num_samples, wealth, bar))
    needed = -math.log(certificate.failure_probability)
    return any(log_wealth_so_far >= needed for log_wealth_so_far in grown)


def _q_from_p_is_small(pair: DominatingPair, certificate: Certificate, bar: Any) -> bool:
    """Whether the divergence of Q from P is proved: the loss of not taking part."""
    if certificate.epsilon == 0.0:
        # Both divergences are the total variation distance, which was tested before.
        return True
    low, high = certificate.thresholds
    if not low < high:
        return False

    def counts(losses: FloatArray) -> IntArray:
        # Losses near a threshold are counted against the candidate, and so is NaN.
        return np.array([np.sum(~(losses > low + ROUNDING)), np.sum(losses <= high - ROUNDING)])

    key = key_of(pair, certificate, "Q from P")
    found = in_batches(SamplerOfQ(pair), key, certificate.num_untilted, counts, bar)
    low_count, high_count = np.sum(list(found), axis=0)
    tail = lower_tail(
        int(low_count),
        int(high_count),
        certificate.num_untilted,
        certificate.thresholds,
        certificate.failure_probability,
    )
    return tail.divergence(certificate.epsilon - ROUNDING) <= certificate.largest_divergence


def largest_term(log_mgf: float, order: int, epsilon: float) -> float:
    """Returns M: what Renyi DP of an order gives for delta, which may be more than 1.

    Args:
      log_mgf: log E_Q (P/Q)^a.
      order: a.
      epsilon: Where delta is asked for.
    """
    if order == 1:
        return 1.0 + ROUNDING
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
    above = losses - (epsilon - ROUNDING)
    shares = -np.expm1(-np.maximum(above, 0.0))
    return np.asarray(
        shares * np.exp(np.minimum(log_mgf - (order - 1) * (losses - ROUNDING), 700.0))
    )


def key_of(pair: DominatingPair, certificate: Certificate | None, purpose: str) -> int:
    """Returns a number that tells pairs, certificates and purposes apart.

    Args:
      pair: What dominates the run.
      certificate: What is tested; None where samples are drawn for something else.
      purpose: What they are drawn for.
    """
    digest = hashlib.sha256(purpose.encode())
    digest.update(np.ascontiguousarray(pair.columns, dtype="<f8").tobytes())
    described = {
        **pair.description(),
        # Random numbers follow from this name: it never changes.
        "claim": None if certificate is None else certificate.to_dict(),
    }
    digest.update(json.dumps(described, sort_keys=True).encode())
    return int.from_bytes(digest.digest(), "big")


def in_batches(
    sampler: ImportanceSampler | SamplerOfQ,
    key: int,
    count: int,
    summary: Callable[[FloatArray], Any],
    bar: Any = None,
) -> Iterator[Any]:
    """Draws losses and yields what a function makes of each batch, in their order.

    Every batch has a generator of its own, so that results do not depend on how many are drawn at
    a time. A caller that stops iterating draws no more.
    """

    def one(batch: int) -> Any:
        size = min(_BATCH, count - batch * _BATCH)
        rng = np.random.Generator(np.random.Philox(np.random.SeedSequence((key, batch))))
        return size, summary(sampler.log_ratios(rng, size))

    workers = os.cpu_count() or 1
    pool = concurrent.futures.ThreadPoolExecutor(max_workers=min(workers, 8))
    try:
        for size, value in pool.map(one, range(-(-count // _BATCH))):
            if bar is not None:
                bar.update(size)
            yield value
    finally:
        pool.shutdown(cancel_futures=True)


def best_bet(terms: FloatArray, mean: float, largest: float) -> tuple[float, float]:
    """Returns the bet of the test martingale that grows fastest for samples like the given ones.

    Args:
      terms: Samples of T, between 0 and ``largest``.
      mean: m, that the mean is to be shown to be below; less than ``largest``.
      largest: M.

    Returns:
      The bet w, and how much the logarithm of wealth grows with a sample; zeros if the mean of
      the given samples is not below m.
    """
    if float(np.mean(terms)) >= mean:
        return 0.0, 0.0
    most = (1.0 - _MARGIN) / (largest - mean)
    gains = mean - terms

    def loss(share: float) -> float:
        return -float(np.mean(np.log1p(share * most * gains)))

    found = scipy.optimize.minimize_scalar(loss, bounds=(0.0, 1.0), method="bounded")
    return float(found.x) * most, max(-float(found.fun), 0.0)


def log_wealth(terms: FloatArray, mean: float, bet: float) -> float:
    """Returns the logarithm of the wealth of the test martingale.

    Args:
      terms: The samples of T, at least zero and below mean + 1 / bet.
      mean: m, that the mean is to be shown to be below.
      bet: w.
    """
    return float(np.sum(np.log1p(bet * (mean - terms))))


def upper_probability(count: int, samples: int, failure: float) -> float:
    """Returns an upper bound of a probability, by Clopper and Pearson.

    Args:
      count: In how many samples it happened.
      samples: Of how many.
      failure: The probability that the bound does not hold.
    """
    if count >= samples:
        return 1.0
    return float(scipy.stats.beta.isf(failure, count + 1, samples - count))


def upper_mean(mean: float, samples: int, failure: float) -> float:
    """Returns an upper bound of a mean, by Chernoff and Hoeffding.

    Independent samples between 0 and 1 of the mean m have an average of at most x < m with a
    probability of at most exp(-N KL(x, m)), KL(x, m) being the divergence of Bernoulli
    distributions (Hoeffding 1963, Thm 1).

    Args:
      mean: The average of the samples, from 0 to 1.
      samples: How many, N.
      failure: The probability that the bound does not hold.
    """
    most = -math.log(failure) / samples

    def excess(candidate: float) -> float:
        divergence = float(scipy.special.rel_entr(mean, candidate))
        return divergence + float(scipy.special.rel_entr(1.0 - mean, 1.0 - candidate)) - most

    if mean >= 1.0 or excess(1.0 - _ERROR_OF_ROOT) <= 0.0:
        return 1.0
    return float(scipy.optimize.brentq(excess, mean, 1.0 - _ERROR_OF_ROOT)) + _ERROR_OF_ROOT


def lower_probability(count: int, samples: int, failure: float) -> float:
    """Returns a lower bound of a probability; arguments as of :func:`upper_probability`."""
    if count <= 0:
        return 0.0
    return float(scipy.stats.beta.ppf(failure, count, samples - count + 1))


@dataclasses.dataclass(frozen=True)
class LowerTail:
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
        less = math.exp(
            min(
                -at * width + 0.5 * width**2 + float(scipy.special.log_ndtr(at - width)),
                0.0,
            )
        )
        return min(max(whole - less, 0.0) + 1e-12 * whole, whole)


def lower_tail(
    low_count: int,
    high_count: int,
    samples: int,
    thresholds: tuple[float, float],
    failure: float,
) -> LowerTail:
    """Returns a bound of the lower tail of a convex function L of normal numbers.

    Args:
      low_count: The samples of L that are at most t_0.
      high_count: Those that are at most t_1.
      samples: The number of samples.
      thresholds: t_0 and t_1, in increasing order, fixed before the samples were drawn.
      failure: The probability that the bound does not hold.
    """
    low, high = thresholds
    above = float(scipy.special.ndtri(upper_probability(low_count, samples, 0.5 * failure)))
    below = float(scipy.special.ndtri(lower_probability(high_count, samples, 0.5 * failure)))
    slope = (below - above) / (high - low)
    return LowerTail(low, above, max(slope, 0.0) if math.isfinite(slope) else 0.0)
