r"""Bounds on means that hold with a stated probability, for finitely many samples.

**Betting.** Let T_1, ..., T_N be independent samples of a mean mu, between 0 and M. For a mean m
and a bet 0 <= w < 1 / (M - m), both fixed before the samples are drawn, the wealth
prod_i (1 + w (m - T_i)) is not negative, and where mu >= m its expectation is at most
(1 + w (m - mu))^N <= 1. By Markov's inequality it is 1 / beta or more with probability at most
beta. So a wealth of 1 / beta shows that mu < m, but for a probability of beta. (Waudby-Smith and
Ramdas, 2024, have the method in general.)

**Extrapolation.** Let L be a convex function of independent normal numbers. By Ehrhard's
inequality (1983, for convex sets), psi(t) = Phi^-1(Pr[L <= t]) is concave. So below t_0 < t_1, it
lies below the line through (t_0, psi(t_0)) and (t_1, psi(t_1)). An upper bound of psi(t_0) and a
lower bound of psi(t_1), from counts of samples (Clopper and Pearson, 1934), bound the whole lower
tail of L.
"""

import dataclasses
import math

import numpy as np
import scipy.optimize
import scipy.special
import scipy.stats

# Bets stay this far inside of what keeps wealth positive.
_MARGIN = 1e-6
# More than what the root of a divergence is off by.
_ERROR_OF_ROOT = 1e-11


def best_bet(terms: np.ndarray, mean: float, largest: float) -> tuple[float, float]:
    """Returns the bet of the fastest growth of wealth for samples like the given ones.

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


def log_wealth(terms: np.ndarray, mean: float, bet: float) -> float:
    """Returns the logarithm of the wealth of a bet that the mean is below ``mean``.

    Args:
      terms: The samples of T, at least zero and below mean + 1 / bet.
      mean: m.
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
    probability of at most exp(-N KL(x, m)), KL(x, m) being the divergence of Bernoulli laws
    (Hoeffding 1963, Thm 1).

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
