"""Bounds on the divergence of P from Q at small epsilons: what an attacker can do.

There the divergence is not small, and averages over outputs from P itself (a = 1), which are
between 0 and 1, bound it closely. No epsilon of a guarantee rests on these bounds.
"""

import math
from collections.abc import Sequence

import numpy as np
import scipy.optimize
import scipy.special

from mf_aggregators.kernel import certificate as certificates
from mf_aggregators.kernel.arrays import FloatArray
from mf_aggregators.kernel.dominating_pairs import DominatingPair, ImportanceSampler

# More than the error of a root of a divergence.
_ERROR_OF_DIVERGENCE = 1e-11


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
        return [float(np.sum(certificates.terms(losses, 0.0, 1, epsilon))) for epsilon in epsilons]

    key = certificates.key_of(pair, None, f"divergences of P from Q, seed {seed}")
    drawn = list(certificates.in_batches(sampler, key, num_samples, sums))
    means = np.sum(drawn, axis=0) / num_samples
    each = failure / len(epsilons)
    return tuple(
        (epsilon, min(upper_mean(float(mean), num_samples, each) + failure, 1.0))
        for epsilon, mean in zip(epsilons, means, strict=True)
    )


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

    error = _ERROR_OF_DIVERGENCE
    if mean >= 1.0 or excess(1.0 - error) <= 0.0:
        return 1.0
    return float(scipy.optimize.brentq(excess, mean, 1.0 - error)) + error
