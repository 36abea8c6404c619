r"""Bounds on both divergences of a dominating pair at many epsilons, by one set of samples.

A certificate proves one epsilon. What composes with other runs is the whole *privacy profile*:
h(e^epsilon), the hockey-stick divergence of P from Q, and that of Q from P, for the pair (P, Q) of
``dominating_pairs``. Here both are bounded at all epsilons of a grid at once, but for a failure
probability beta over the random numbers that are drawn. Each of the bounds may fail with an equal
share of beta, so that by the union bound all of them hold with probability 1 - beta.
They may share samples: a union bound asks for no independence.

**A bound on a mean.** Let T_1, ..., T_N be independent numbers between 0 and M with the mean mu,
and let the bet 0 < w <= 1 / M be fixed before they are drawn. The wealth
W(m) = prod_i (1 + w (m - T_i)) is not negative for any m >= 0, increases in m, and W(mu) has the
expectation 1. By Markov's inequality W(mu) < 1 / beta but for a probability of beta. So the m with
W(m) = 1 / beta is above mu. In the same way V(m) = prod_i (1 + w (T_i - m)), which decreases,
bounds mu from below: for m <= 1 / w it is not negative, and mu <= M.

**P from Q**: the terms T of ``certificates`` for outputs of a Renyi order a, which are between 0
and M_a(epsilon). For each epsilon, the order is the one of the least M_a, which no sample has a
part in. M_a itself is a bound that needs no samples, for a > 1.

**Q from P**: the terms max(0, 1 - e^(epsilon + L)) for outputs of Q, between 0 and 1. Below what
samples show, Ehrhard's inequality bounds them: one :class:`certificate.LowerTail` holds at all
epsilons together. Its thresholds come from tuning samples, which have random numbers of their own,
as have bets.

No divergence is above that without amplification either: whoever knows S sees a Gaussian mechanism
of the norm of its columns, and divergences of mixtures are no larger than the largest of their
parts.
"""

import functools
import math
from collections.abc import Callable

import numpy as np

from mf_aggregators.kernel import certificate as certificates
from mf_aggregators.kernel.arrays import FloatArray
from mf_aggregators.kernel.certificate import ROUNDING
from mf_aggregators.kernel.dominating_pairs import (
    DominatingPair,
    ImportanceSampler,
    possible_orders,
)

# Samples of each order and of Q: so many at least, and more where few of them count.
_FEWEST_SAMPLES, _TUNING = 2**16, 2**12
_MOST_SAMPLES, _MOST_NUMBERS = 2**20, 400_000_000
# Samples, over log(1 / beta) M over the divergence.
_FACTOR = 4.0
_TUNING_OF_Q, _SAMPLES_OF_Q = 2**14, 2**18
# Shares of samples of Q that are below a lower threshold, and below the higher one.
_LOW_SHARES, _HIGH_SHARE = (2**-10, 2**-7, 2**-4), 2**-2
# More than the solver's error, relative to a bound.
ERROR_OF_ROOT = 1e-6
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
        with_client, without_client = self.means(epsilons, each, upper_mean)
        with_client = np.minimum(with_client, self.renyi_bounds(epsilons))
        for tail in self._tails(each):
            bounds = [tail.divergence(epsilon - ROUNDING) for epsilon in epsilons]
            without_client = np.minimum(without_client, bounds)
        return np.minimum(with_client, 1.0), np.minimum(without_client, 1.0)

    def means(
        self, epsilons: FloatArray, failure: float, bound: Callable[..., float]
    ) -> tuple[FloatArray, FloatArray]:
        """Returns bounds on the means of terms, for P from Q and for Q from P.

        Args:
          epsilons: At least 0, (J,).
          failure: The probability that one of the 2 J bounds does not hold.
          bound: :func:`upper_mean`, or a function of the same arguments.
        """
        return self._of_p(epsilons, failure, bound), self._of_q(epsilons, failure, bound)

    def _of_p(
        self, epsilons: FloatArray, failure: float, bound: Callable[..., float]
    ) -> FloatArray:
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
                found[at] = bound(terms_of(losses, epsilon), count, most, bet, failure)
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

    def _of_q(
        self, epsilons: FloatArray, failure: float, bound: Callable[..., float]
    ) -> FloatArray:
        """Bounds on the divergence of Q from P."""
        tuning, losses = self._of_outputs_without()
        found = np.zeros(len(epsilons))
        for at, each in enumerate(epsilons):
            epsilon = float(each)
            bet = _bet(_terms_of_q(tuning, epsilon), len(tuning), 1.0, len(losses), failure)
            found[at] = bound(_terms_of_q(losses, epsilon), len(losses), 1.0, bet, failure)
        return found

    def _of_outputs_without(self) -> tuple[FloatArray, FloatArray]:
        """Losses of outputs of Q: tuning samples, and others."""
        sampler = ImportanceSampler(self._pair, 0)
        tuning = self._losses(sampler, "tuning", _TUNING_OF_Q)
        return tuning, self._losses(sampler, "profile", self._within(_SAMPLES_OF_Q))

    def _tails(self, failure: float) -> list[certificates.LowerTail]:
        """Bounds on the lower tail of losses of Q, each of which may fail with the probability."""
        tuning, losses = self._of_outputs_without()
        high = float(tuning[int(_HIGH_SHARE * len(tuning))])
        found = []
        for share in _LOW_SHARES:
            low = float(tuning[int(share * len(tuning))])
            if low < high:
                # Losses near a threshold are counted on the side of a larger bound.
                counts = (
                    int(np.searchsorted(losses, low + ROUNDING, side="right")),
                    int(np.searchsorted(losses, high - ROUNDING, side="right")),
                )
                found.append(certificates.lower_tail(*counts, len(losses), (low, high), failure))
        return found

    def _losses(self, sampler: ImportanceSampler, purpose: str, count: int) -> FloatArray:
        """Losses of outputs of an order, in increasing order."""
        order = sampler.order
        if (order, purpose) not in self._drawn:
            key = certificates.key_of(
                self._pair, None, f"{purpose} of order {order}, seed {self._seed}"
            )
            drawn = certificates.in_batches(sampler, key, count, lambda losses: losses)
            self._drawn[order, purpose] = np.sort(np.concatenate(list(drawn)))
        return self._drawn[order, purpose]


def _terms_of_p(losses: FloatArray, epsilon: float, sampler: ImportanceSampler) -> FloatArray:
    """The terms of increasing losses that are not zero."""
    above = losses[np.searchsorted(losses, epsilon - 2.0 * ROUNDING) :]
    return certificates.terms(above, sampler.log_mgf, sampler.order, epsilon)


def _terms_of_q(losses: FloatArray, epsilon: float) -> FloatArray:
    """The terms of increasing losses that are not zero, rounded up."""
    highest = ROUNDING - epsilon
    return np.asarray(-np.expm1(losses[: np.searchsorted(losses, highest)] - highest))


def _largest_terms(sampler: ImportanceSampler, epsilons: FloatArray) -> FloatArray:
    return np.array(
        [certificates.largest_term(sampler.log_mgf, sampler.order, each) for each in epsilons]
    )


def _bet(tuning: FloatArray, num_tuning: int, largest: float, count: int, failure: float) -> float:
    """A bet for ``count`` samples like the tuning samples, of which only some are not zero."""
    # One more sample counts as the largest term.
    mean = float(np.sum(tuning)) / num_tuning
    variance = (float(np.sum(tuning**2)) + largest**2) / num_tuning - mean**2
    best = math.sqrt(-2.0 * math.log(failure) / (count * max(variance, 1e-12 * largest**2)))
    return min(best, 0.9 / largest)


def upper_mean(terms: FloatArray, count: int, largest: float, bet: float, failure: float) -> float:
    """Returns an upper bound of a mean of samples between 0 and a largest one.

    Args:
      terms: Those of the samples that are not zero.
      count: How many samples there are.
      largest: M.
      bet: w, above 0 and below 1 / M.
      failure: The probability that the bound does not hold.
    """
    # The goal is raised by more than the rounding of the wealth.
    goal = -math.log(failure) + 1e-9 * count * bet * largest
    found = root(terms, count, bet, goal, largest)
    return min(found * (1.0 + 2.0 * ERROR_OF_ROOT), largest)


def root(terms: FloatArray, count: int, bet: float, goal: float, most: float) -> float:
    """Returns the m at which the logarithm of the wealth is a number, or ``most`` if that is less.

    It is concave and grows, and no more than its linear part. So Newton's steps from where that has
    the number end below the root, each above the last.
    """
    rest = count - len(terms)
    found = float(np.sum(terms)) / count + goal / (count * bet)
    for _ in range(_MOST_STEPS):
        if found >= most:
            break
        growth = bet * (found - terms)
        wealth = float(np.sum(np.log1p(growth))) + rest * math.log1p(bet * found)
        slope = bet * (float(np.sum(1.0 / (1.0 + growth))) + rest / (1.0 + bet * found))
        step = (goal - wealth) / slope
        found += step
        if abs(step) <= ERROR_OF_ROOT * abs(found):
            return min(found, most)
    return most
