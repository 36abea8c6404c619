r"""Privacy losses of one round of a sampled run: a Gaussian sum over a random batch.

The sum has sensitivity 1 and noise of standard deviation s. Losses are for real normal numbers, and
rounded so that no epsilon is too small (Doroshenko et al. 2022, Alg. 1).

**Poisson sampling.** Each client joins by a coin of its own. Zeroing a client is adding or removing
it here: a client that does not join and one that joins with zeros add the same to the sum.
dp-accounting inverts the privacy loss, and adds up a delta, one number at a time, in Python. Here
all numbers are taken at once; the grid, the rounding and the composition are dp-accounting's.

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

import functools
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import scipy.special
from dp_accounting.pld import privacy_loss_distribution, privacy_loss_mechanism
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType

from mf_aggregators.kernel.arrays import FloatArray, IntArray
from mf_aggregators.kernel.losses import DenseLosses, connected_losses

# Losses beyond so many standard deviations, or with less than this in all, count as infinite.
_DEVIATIONS = 9.0
_NEGLIGIBLE = 1e-20
# Points of a grid of losses from below, which is exact arithmetic.
_MOST_POINTS_BELOW = 10_000
# More than what floats err by in a binomial probability, relative to it.
_ROUNDING = 1e-9


def poisson_losses(
    sigma: float, sampling_probability: float, interval: float
) -> PrivacyLossDistribution:
    """Returns the privacy losses of a round of Poisson sampling.

    ``compose`` takes dp-accounting's dense losses; theirs does not take these.

    Args:
      sigma: The standard deviation s of the noise, above zero.
      sampling_probability: The probability q that a client joins, in (0, 1].
      interval: Losses are multiples of it; above zero.
    """
    losses = functools.partial(_poisson_losses, sigma, sampling_probability, interval)
    remove = losses(AdjacencyType.REMOVE)
    if sampling_probability == 1.0:
        return PrivacyLossDistribution(remove)
    return PrivacyLossDistribution(remove, losses(AdjacencyType.ADD))


def poisson_losses_below(
    sigma: float, sampling_probability: float, interval: float
) -> PrivacyLossDistribution:
    """Returns losses of a Poisson sample that are rounded down; as :func:`poisson_losses`."""
    found: PrivacyLossDistribution = privacy_loss_distribution.from_gaussian_mechanism(
        sigma,
        pessimistic_estimate=False,
        value_discretization_interval=interval,
        sampling_prob=sampling_probability,
    )
    return found


def fixed_size_losses(
    sigma: float, sampling_probability: float, interval: float
) -> PrivacyLossDistribution:
    """Returns the privacy losses of a round of a fixed size.

    Args:
      sigma: The standard deviation s of the noise, above zero.
      sampling_probability: The share q = B / m of a group that is in a batch, in (0, 1].
      interval: Losses are multiples of it; above zero.
    """
    epsilons = _grid_of_epsilons(sigma, interval)
    with_client = divergence_with(sigma, sampling_probability, epsilons)
    without_client = divergence_without(sigma, sampling_probability, epsilons)
    return _losses_of_divergences(interval, epsilons, with_client, without_client)


def fixed_size_losses_below(
    sigma: float, sampling_probability: float, interval: float
) -> PrivacyLossDistribution:
    """Returns losses that those of a fixed size dominate; as :func:`fixed_size_losses`."""
    most = math.ceil((0.5 / sigma**2 + _DEVIATIONS / sigma) / interval)
    steps = np.arange(0, most + 1, max(most // _MOST_POINTS_BELOW, 1))
    return connected_losses(
        interval,
        steps,
        divergence_with(sigma, sampling_probability, steps * interval),
        divergence_without(sigma, sampling_probability, steps * interval),
        is_pessimistic=False,
    )


def truncated_losses(
    sigma: float,
    sampling_probability: float,
    group_sizes: Iterable[int],
    largest_batch: int,
    interval: float,
) -> PrivacyLossDistribution:
    """Returns the privacy losses of a round of truncated Poisson sampling.

    Args:
      sigma: The standard deviation s of the noise, above zero.
      sampling_probability: The probability q that a client comes, in (0, 1].
      group_sizes: The sizes N of groups: losses hold for clients of each.
      largest_batch: The most clients L of a batch.
      interval: Losses are multiples of it; above zero.
    """
    epsilons = _grid_of_epsilons(sigma, interval)
    with_client, without_client = np.zeros_like(epsilons), np.zeros_like(epsilons)
    for size in group_sizes:
        found = truncated_divergences(sigma, sampling_probability, size, largest_batch, epsilons)
        with_client = np.maximum(with_client, found[0])
        without_client = np.maximum(without_client, found[1])
    return _losses_of_divergences(interval, epsilons, with_client, without_client)


def divergence_with(sigma: float, sampling_probability: float, epsilons: FloatArray) -> FloatArray:
    """Returns the largest divergences of outputs with a client from those without.

    Args:
      sigma: The standard deviation s of the noise, above zero.
      sampling_probability: q, in (0, 1].
      epsilons: At least 0, of any shape.
    """
    q, variance = sampling_probability, sigma**2
    factor = np.exp(epsilons)
    weight = (1.0 - q) * np.expm1(epsilons) / q
    # Where P is larger is y > y*: with s = exp(y / s^2) and h = exp(-1 / 2 s^2), it is
    # h s - e^eps - k h / s > 0.
    log_half = -0.5 / variance
    root = np.sqrt(factor**2 + 4.0 * weight * math.exp(2.0 * log_half))
    cutoff = variance * (np.log(0.5 * (factor + root)) - log_half)
    upper = scipy.special.ndtr
    return np.asarray(
        np.clip(
            q
            * (
                upper((1.0 - cutoff) / sigma)
                - factor * upper(-cutoff / sigma)
                - weight * upper((-1.0 - cutoff) / sigma)
            ),
            0.0,
            1.0,
        )
    )


def divergence_without(
    sigma: float, sampling_probability: float, epsilons: FloatArray
) -> FloatArray:
    """Returns the largest divergences of outputs without a client from those with it.

    Arguments are those of :func:`divergence_with`.
    """
    q, variance = sampling_probability, sigma**2
    # (1 - q) + q exp((y - 1/2) / s^2) > e^eps.
    with np.errstate(divide="ignore"):
        cutoff = variance * np.log((np.exp(epsilons) - (1.0 - q)) / q) + 0.5
    upper = scipy.special.ndtr
    return np.asarray(
        np.clip(
            q * upper((1.0 - cutoff) / sigma)
            + (1.0 - q - np.exp(epsilons)) * upper(-cutoff / sigma),
            0.0,
            1.0,
        )
    )


def truncated_divergences(
    sigma: float,
    sampling_probability: float,
    group_size: int,
    largest_batch: int,
    epsilons: FloatArray,
) -> tuple[FloatArray, FloatArray]:
    """Returns bounds on the divergences of one round, with a client from without, and back.

    Args:
      sigma: The noise multiplier, above zero.
      sampling_probability: The probability q that a client of the group comes, in (0, 1].
      group_size: The clients N of the group.
      largest_batch: The most clients L of a batch.
      epsilons: At least 0, of any shape.

    Returns:
      Two arrays of that shape.
    """
    q = sampling_probability
    # The divergences of (1 - q) N(0, s^2) + q N(1, s^2) from N(0, s^2): for a fixed size, those of
    # outputs without the client.
    with_client = divergence_without(sigma, q, epsilons)
    without_client = _poisson_without(sigma, q, epsilons)
    if group_size <= largest_batch:
        return with_client, without_client
    cut = float(binomial_tail(largest_batch, group_size - 1, q))
    if cut == 0.0:
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


def _poisson_without(sigma: float, q: float, epsilons: FloatArray) -> FloatArray:
    """The divergences of N(0, s^2) from (1 - q) N(0, s^2) + q N(1, s^2)."""
    factor = np.exp(epsilons)
    rest = 1.0 - (1.0 - q) * factor
    # Outputs below the cutoff are more probable without the client.
    with np.errstate(divide="ignore"):
        cutoff = sigma**2 * np.log(np.maximum(rest, 0.0) / (q * factor)) + 0.5
    below = scipy.special.ndtr
    found = rest * below(cutoff / sigma) - q * factor * below((cutoff - 1.0) / sigma)
    return np.asarray(np.clip(np.where(rest > 0.0, found, 0.0), 0.0, 1.0))


def _grid_of_epsilons(sigma: float, interval: float) -> FloatArray:
    """Returns multiples of an interval from 0, up to the largest loss that counts.

    Args:
      sigma: The standard deviation s of the noise, above zero.
      interval: Above zero.
    """
    largest = 0.5 / sigma**2 + _DEVIATIONS / sigma
    return np.asarray(np.arange(0, math.ceil(largest / interval) + 1) * interval)


def _losses_of_divergences(
    interval: float, epsilons: FloatArray, with_client: FloatArray, without_client: FloatArray
) -> PrivacyLossDistribution:
    """Returns the privacy loss of a pair by its divergences in both directions.

    Args:
      interval: That of the grid.
      epsilons: Multiples of it from 0.
      with_client: The divergences of outputs with a client from those without, at the epsilons.
      without_client: Those of outputs without the client from those with it.
    """
    return PrivacyLossDistribution(
        _side_of(interval, epsilons, with_client, without_client),
        _side_of(interval, epsilons, without_client, with_client),
    )


def _side_of(
    interval: float, epsilons: FloatArray, forward: FloatArray, backward: FloatArray
) -> DenseLosses:
    """Losses of a pair by its divergences at epsilons >= 0 and, the other way, below."""
    highest = max(int(np.count_nonzero(forward > _NEGLIGIBLE)), 1)
    lowest = max(int(np.count_nonzero(backward > _NEGLIGIBLE)), 1)
    ratios = np.exp(-epsilons[lowest:0:-1])
    below = 1.0 - ratios + ratios * backward[lowest:0:-1]
    deltas = np.minimum.accumulate(np.concatenate([below, forward[: highest + 1]]))
    return DenseLosses.of_deltas(interval, -len(below), deltas)


# dp-accounting ships no types.
class SampledGaussianLoss(privacy_loss_mechanism.GaussianPrivacyLoss):  # type: ignore[misc]
    """dp-accounting's Gaussian mechanism on a sample, with deltas of many epsilons at once.

    Arguments are those of dp-accounting's class. Newer versions of it know that a client may be
    replaced by another one; here a client is added or removed, and that raises a ValueError.
    """

    def __init__(self, sigma: float, **options: Any) -> None:
        super().__init__(sigma, **options)
        if self.adjacency_type not in (AdjacencyType.ADD, AdjacencyType.REMOVE):
            raise ValueError(
                f"adjacency_type must be ADD or REMOVE, found {self.adjacency_type.value}."
            )
        self._sigma = sigma

    def get_delta_for_epsilon(self, epsilon: float | list[float] | FloatArray) -> FloatArray:
        """Returns the deltas of epsilons (the hockey-stick divergences), of their shape.

        Args:
          epsilon: Epsilons, also negative ones.
        """
        epsilons = np.asarray(epsilon, dtype=np.float64)
        cutoffs = self._largest_outputs(epsilons)
        deltas = self.mu_upper_cdf(cutoffs) - np.exp(epsilons + self.mu_lower_log_cdf(cutoffs))
        # An output of any size has at least this loss.
        is_always = np.isposinf(cutoffs)
        deltas[is_always] = -np.expm1(epsilons[is_always])
        deltas[np.isneginf(cutoffs)] = 0.0
        return np.asarray(np.clip(deltas, 0.0, 1.0))

    def _largest_outputs(self, losses: FloatArray) -> FloatArray:
        """The largest outputs whose privacy loss is at least the given ones."""
        sign = -1.0 if self.adjacency_type == AdjacencyType.ADD else 1.0
        if self.sampling_prob == 1.0:
            unsampled = losses
        else:
            # The loss l of a sample is sign log(1 - q + q exp(sign u)) for the loss u without
            # sampling, so that sign u = sign l - log q + log(1 - (1 - q) exp(-sign l)).
            rest = -np.expm1(math.log1p(-self.sampling_prob) - sign * losses)
            with np.errstate(divide="ignore"):
                logarithm = np.log(np.maximum(rest, 0.0))
            unsampled = losses + sign * (logarithm - math.log(self.sampling_prob))
        # Without sampling, and at sensitivity 1, the loss of an output x is (1/2 - x) / sigma^2
        # where a client is added, and (-1/2 - x) / sigma^2 where it is removed.
        return np.asarray(
            -sign * 0.5 * self.sensitivity - unsampled * (self._sigma**2) / self.sensitivity
        )


def _poisson_losses(
    sigma: float, sampling_probability: float, interval: float, adjacency: AdjacencyType
) -> DenseLosses:
    loss = SampledGaussianLoss(
        sigma, sensitivity=1.0, sampling_prob=sampling_probability, adjacency_type=adjacency
    )
    bounds = loss.connect_dots_bounds()
    lower = math.floor(bounds.epsilon_lower / interval)
    upper = math.ceil(bounds.epsilon_upper / interval)
    deltas = loss.get_delta_for_epsilon(np.arange(lower, upper + 1) * interval)
    # Rounding may let a delta be larger than an earlier one. Versions of dp-accounting refuse that,
    # or make it smaller, which is not on the side of privacy.
    deltas = np.maximum.accumulate(deltas[::-1])[::-1]
    return DenseLosses.of_deltas(interval, lower, deltas)
