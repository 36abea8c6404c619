r"""Divergences of one round of a sampled run: a Gaussian sum over a random batch.

The sum has sensitivity 1 and noise of standard deviation s, of real normal numbers.

**Poisson sampling.** Each client joins by a coin of its own. Zeroing a client is adding or removing
it here: a client that does not join and one that joins with zeros add the same to the sum. So P is
(1 - q) N(0, s^2) + q N(1, s^2), and Q is N(0, s^2).

**Fixed size.** A batch is a uniformly random subset of B of the m clients of a group, and
q = B / m. Zeroing one client does not make the batch smaller: if the client is drawn, another one
is not. So the distribution of the sum without the client is a mixture as well.

Draw A, a random subset of B - 1 of the other clients, and another client J of those that are left.
With probability q the batch is A and the client, otherwise it is A and J; this is a uniformly
random subset. Given A and J, and taking the sum over A off, outputs have the distributions

    P = (1 - q) N(w, s^2 I) + q N(u, s^2 I)    and    Q = (1 - q) N(w, s^2 I) + q N(0, s^2 I)

with the update u of the client and w of J, both of norm at most 1. By joint convexity of
hockey-stick divergences, those of the whole are at most the largest ones over u and w.

*P from Q.* For eps >= 0 and k = (1 - q) (e^eps - 1) / q, the divergence is q times the mean,
under N(0, s^2 I), of F(x, y) = (x - e^eps - k y)_+ at x = exp(<u, z> / s^2 - |u|^2 / 2 s^2) and the
same y of w. F is convex with a mixed derivative that is not positive. By Gaussian interpolation, as
in Kahane's inequality (1985), the mean does not decrease where |u| or |w| grows or <u, w> falls. So
it is largest at w = -u, |u| = 1: (1 - q) N(-1, s^2) + q N(1, s^2) from
(1 - q) N(-1, s^2) + q N(0, s^2).

*Q from P.* Likewise F(x, y) = (1 - e^eps x - k y)_+, whose mixed derivative is not negative. The
mean is largest at w = u, |u| = 1: (1 - q) N(1, s^2) + q N(0, s^2) from N(1, s^2), which by symmetry
is the divergence of a Poisson sample from nothing.

Both are attained, if all other clients have one update. For e^eps = a < 1, the divergence of P
from Q is 1 - a + a times that of Q from P at 1 / a. The largest divergences at all a together are
those of a pair of distributions again (Zhu, Dong and Wang, 2022, Prop. 10), and this pair is
composed.

**Truncated Poisson.** Each client of a group of N comes with probability q, by a coin of its own.
If more than a largest size L come, a uniformly random subset of L of them stays (arXiv 2411.04205,
2508.15089). As with fixed sizes, a client in a cut batch has taken the place of another one.

Fix one client, and put the N - 1 others into a uniformly random order. The K others that come are
the first K of that order, where K is binomially distributed, and independent of the order and of
the client's coin. Let v_j be the sum of the first j of them.

* K < L: nothing is cut. The sum is v_K, and the client's update u on top with probability q.
* K >= L: the batch is the first L of the order, or else the first L - 1 and the client, who stays
  with probability L / (K + 1) if it came.

Given the order, and K < L or that the batch is cut, outputs have the distributions, with the client
and with zeros in its place,

    (1 - q) N(v_K) + q N(v_K + u)              and  N(v_K),
    (1 - r) N(v_L) + r N(v_{L-1} + u)          and  (1 - r) N(v_L) + r N(v_{L-1}),

where r is the mean of q L / (K + 1) over K >= L: the order does not depend on K, so that the
distributions of a cut batch are these two mixtures, whatever K is. The first pair is that of a
Poisson sample. The second one is that of a fixed size, with r in the place of B / m and the update
w = v_L - v_{L-1} of another client. By joint convexity, the divergences of a round are at most

    (1 - c) (those of a Poisson sample, with q)  +  c (those of a fixed size, with r),

c = P(K >= L). With binomial numbers, c = P(Bin(N - 1, q) >= L) and
c r = (L / N) P(Bin(N, q) > L), as q / (K + 1) P(K) = P(Bin(N, q) = K + 1) / N.

Groups have one of two sizes if m is no multiple of b. No client's divergences are above the larger
ones of the two, which are those of a pair again: the largest of two convex functions is convex.

jax_privacy takes a replacement, of the sensitivity 2, for the second pair, which is no less. Adding
P(K >= L) of all rounds to delta would be valid as well, and is more than that.
"""

import math

import numpy as np
import scipy.special

from mf_aggregators.kernel.arrays import FloatArray, IntArray

# Upper bound on the relative error of floats in a binomial probability.
_ROUNDING = 1e-9


def divergence_with(sigma: float, sampling_probability: float, epsilons: FloatArray) -> FloatArray:
    """Returns the divergences of a fixed size, of outputs with a client from those without.

    Args:
      sigma: The standard deviation s of the noise, above zero.
      sampling_probability: The share q = B / m of a group that is in a batch, in (0, 1].
      epsilons: At least 0, of any shape.
    """
    q, variance = sampling_probability, sigma**2
    factor = np.exp(epsilons)
    weight = (1.0 - q) * np.expm1(epsilons) / q
    # P is larger for y > y*: with s = exp(y / s^2) and h = exp(-1 / 2 s^2), it is
    # h s - e^eps - k h / s > 0.
    log_half = -0.5 / variance
    root = np.sqrt(factor**2 + 4.0 * weight * math.exp(2.0 * log_half))
    cutoff = variance * (np.log(0.5 * (factor + root)) - log_half)
    upper = scipy.special.ndtr
    found = upper((1.0 - cutoff) / sigma) - factor * upper(-cutoff / sigma)
    found -= weight * upper((-1.0 - cutoff) / sigma)
    return np.asarray(np.clip(q * found, 0.0, 1.0))


def divergence_without(
    sigma: float, sampling_probability: float, epsilons: FloatArray
) -> FloatArray:
    """Returns the divergences of a fixed size, of outputs without a client from those with it.

    Arguments are those of :func:`divergence_with`.
    """
    q, grown = sampling_probability, np.expm1(epsilons)
    # (1 - q) + q exp((y - 1/2) / s^2) > e^eps.
    cutoff = sigma**2 * np.log1p(grown / q) + 0.5
    upper = scipy.special.ndtr
    found = q * upper((1.0 - cutoff) / sigma) - (q + grown) * upper(-cutoff / sigma)
    return np.asarray(np.clip(found, 0.0, 1.0))


def poisson_divergences(
    sigma: float, sampling_probability: float, epsilons: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Returns the divergences of a Poisson sample, with a client from without, and back.

    Args:
      sigma: The standard deviation s of the noise, above zero.
      sampling_probability: The probability q that a client joins, in (0, 1].
      epsilons: At least 0, of any shape.

    Returns:
      Two arrays of that shape.
    """
    q = sampling_probability
    rest = q - (1.0 - q) * np.expm1(epsilons)
    # Outputs below the cutoff are more probable without the client.
    with np.errstate(divide="ignore"):
        cutoff = sigma**2 * (np.log(np.maximum(rest, 0.0) / q) - epsilons) + 0.5
    below = scipy.special.ndtr
    found = rest * below(cutoff / sigma)
    found -= q * np.exp(epsilons) * below((cutoff - 1.0) / sigma)
    without = np.clip(np.where(rest > 0.0, found, 0.0), 0.0, 1.0)
    # The divergence with the client is that of a fixed size without it.
    return divergence_without(sigma, q, epsilons), without


def truncated_divergences(
    sigma: float,
    sampling_probability: float,
    group_size: int,
    largest_batch: int,
    epsilons: FloatArray,
) -> tuple[FloatArray, FloatArray]:
    """Returns bounds on the divergences of a truncated batch, with a client from without, and back.

    Args:
      sigma: The standard deviation s of the noise, above zero.
      sampling_probability: The probability q that a client of the group comes, in (0, 1].
      group_size: The clients N of the group.
      largest_batch: The most clients L of a batch.
      epsilons: At least 0, of any shape.

    Returns:
      Two arrays of that shape.
    """
    q = sampling_probability
    with_client, without_client = poisson_divergences(sigma, q, epsilons)
    cut = float(binomial_tail(largest_batch, group_size - 1, q))
    if group_size <= largest_batch or cut == 0.0:
        return with_client, without_client
    # A cut batch has the client with the probability r. Divergences do not fall where r grows.
    stays = largest_batch / group_size * float(binomial_tail(largest_batch + 1, group_size, q))
    r = min(stays / cut * (1.0 + _ROUNDING), q)
    # The weights of both add up to a little more than 1.
    whole, cut = min(1.0 - cut + _ROUNDING, 1.0), cut * (1.0 + _ROUNDING)
    return (
        whole * with_client + cut * divergence_with(sigma, r, epsilons),
        whole * without_client + cut * divergence_without(sigma, r, epsilons),
    )


def binomial_tail(count: int | IntArray, trials: int | IntArray, probability: float) -> FloatArray:
    """Returns the probability that at least ``count`` of independent trials succeed.

    Args:
      count: How many.
      trials: How many trials.
      probability: The probability that one succeeds.

    Returns:
      An incomplete beta function, of the shape of both.
    """
    at_least_one = np.maximum(count, 1)
    fails = np.maximum(trials - at_least_one, 0) + 1
    tail = scipy.special.betainc(at_least_one, fails, probability)
    return np.where(np.asarray(count) > 0, tail, 1.0)
