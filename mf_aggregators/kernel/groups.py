r"""Epsilon of a run that draws from one group of the clients after the other.

``draws_of_clients`` says why a run composes from queries to one group. For Poisson, truncated
Poisson and fixed-size sampling these are composed rounds; for random allocation,
composed cycles (``cycles``); for shuffling a bound on one pass is composed.

**Shuffling.** Feldman, McMillan and Talwar (2021), Thm 3.1 and 3.8, bound a pass over a group in
which each batch is a mechanism on one client of a uniformly random order. In each batch one place
is singled out, the same for the whole pass and the one where the client is. Given everybody else,
the clients at these places are in uniformly random order, and each batch is a mechanism on one of
them. Replacing one client changes a batch by twice what zeroing it does.

No epsilon is above that without amplification: of a Gaussian mechanism with as many participations
as the scheme allows. The batches must stay secret: an adversary who knows them sees a run that was
not sampled. That noise is drawn from tables costs a small part of delta (``gaussian``), once for
the whole run, whichever theorem is used for real normal numbers.

**Rounds.** The divergences of one round are those of a Gaussian sum over a random batch. It has
sensitivity 1 and noise of standard deviation s, of real normal numbers.

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
from dp_accounting.pld import common as pld_common
from dp_accounting.pld import privacy_loss_distribution
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

from mf_aggregators.kernel import cycles, draws_of_clients, gaussian, validation
from mf_aggregators.kernel import losses as grids
from mf_aggregators.kernel.arrays import FloatArray, IntArray
from mf_aggregators.kernel.draws_of_clients import (
    LEAST_NOISE_MULTIPLIER,
    FixedSize,
    Groups,
    Poisson,
    RandomAllocation,
    Shuffling,
    TruncatedPoisson,
)
from mf_aggregators.kernel.gaussian import DEFAULT_NUM_COORDINATES, TailError, underflow_is_zero
from mf_aggregators.kernel.losses import composition_rounding, epsilon_of

# Privacy losses are rounded to a grid of this interval times epsilon, within bounds. The rounding
# errs on the side of privacy.
_RELATIVE_INTERVAL = 1e-4
LARGEST_INTERVAL, SMALLEST_INTERVAL = 1e-3, 1e-7
# The grid has no more points than this, however fine an interval is asked for.
_MOST_POINTS = 500_000
# Points of a grid of losses of shuffling, its standard deviations beyond the mean, and the deltas
# of the pairs that the losses follow from.
_POINTS, _DEVIATIONS = 600, 8.0
_DELTAS = tuple(float(delta) for delta in np.geomspace(1e-9, 0.3, 8))
# Points of the grid of local deltas over which the bound of shuffling is minimised.
_LOCAL_DELTAS = 24
# Upper bound on the relative error of floats in a binomial probability.
_ROUNDING_OF_TAILS = 1e-9


@underflow_is_zero
def epsilon(
    draws: Groups, sigma: float, delta: float, *, num_coordinates: int = DEFAULT_NUM_COORDINATES
) -> float:
    """Returns the epsilon of a run.

    Args:
      draws: How clients are drawn.
      sigma: The noise multiplier, relative to the largest column norm of C; at least 0.
      delta: Below 1, and at least 1e-12 and 4e-15 times the compositions.
      num_coordinates: Parameters times rounds.

    Raises:
      TailError: As ``gaussian.epsilon`` does.
      TypeError: If the draws are none of ``draws_of_clients``.
      ValueError: If sigma or delta is out of its range.
    """
    draws = draws_of_clients.check(draws, Groups)
    sigma = validation.non_negative_number(sigma, "sigma")
    grids.safe_delta(delta, draws.most_participations)
    found, refused = draws_of_clients.unamplified(draws.together, sigma, delta, num_coordinates)
    if found > 0.0 and sigma >= LEAST_NOISE_MULTIPLIER:
        try:
            left = delta_left(draws, sigma, delta, num_coordinates)
            found = min(found, amplified_epsilon(draws, sigma, left))
        except TailError:
            # Too little of delta is left.
            pass
    # A client that is seldom drawn seldom shows: the amplified epsilon may still exist.
    if refused is not None and math.isinf(found):
        raise refused
    return found


def delta_left(draws: Groups, sigma: float, delta: float, num_coordinates: int) -> float:
    """Returns the part of delta that is left for real normal numbers; arguments as above.

    Raises:
      TailError: If too little is left.
    """
    left = gaussian.delta_left(delta, sigma / draws.largest_move, num_coordinates)
    # Each share is compared with the whole: the next delta that is refused for one of them is
    # refused without amplification, too, and none loses its amplification before.
    return left - composition_rounding(draws.most_participations)


def amplified_epsilon(draws: Groups, sigma: float, delta: float) -> float:
    """Returns the amplified epsilon for noise of real normal numbers.

    Args:
      draws: How clients are drawn.
      sigma: The noise multiplier, relative to the largest column norm of C; at least 0.1.
      delta: Above 0 and below 1, less what composing loses.

    Returns:
      The epsilon; infinity if nothing is proved.
    """
    if isinstance(draws, Shuffling):
        return _shuffled_epsilon(draws, sigma, delta)
    if isinstance(draws, RandomAllocation):
        return epsilon_of(composed_losses(draws, sigma, cycles.RELATIVE_STEP), delta)
    interval = LARGEST_INTERVAL
    while True:
        found = epsilon_of(composed_losses(draws, sigma, interval), delta)
        needed = interval_for(found)
        if interval <= 2.0 * max(needed, _finest_interval(sigma)):
            return found
        interval = needed


def composed_losses(
    draws: Poisson | TruncatedPoisson | FixedSize | RandomAllocation,
    sigma: float,
    resolution: float,
) -> PrivacyLossDistribution:
    """Returns the privacy losses of a whole run, for real normal numbers.

    Args:
      draws: How clients are drawn.
      sigma: The noise multiplier, relative to the largest column norm of C; at least 0.1.
      resolution: For composed rounds, the interval of the grid of losses, which is larger for
        little noise; for random allocation, its step relative to the spread of losses.
    """
    if isinstance(draws, RandomAllocation):
        step = cycles.step_of_grid(sigma, draws.rounds_of_cycle, resolution)
        return cycles.losses_of_cycles(draws.rounds_of_cycle, draws.rounds_of_group, sigma, step)
    losses = losses_of_round(draws, sigma, max(resolution, _finest_interval(sigma)))
    return losses.self_compose(draws.most_participations)


def losses_of_round(
    draws: Poisson | TruncatedPoisson | FixedSize, sigma: float, interval: float
) -> PrivacyLossDistribution:
    """Returns the privacy losses of one round, for real normal numbers.

    Args:
      draws: How clients are drawn.
      sigma: The noise multiplier, relative to the largest column norm of C; above zero.
      interval: Losses are multiples of it.
    """
    q, most = draws.sampling_probability, grids.largest_loss(sigma)
    if isinstance(draws, Poisson):
        # Losses of a sample are smaller.
        epsilons = grids.grid_to(math.log1p(q * math.expm1(min(most, 700.0))), interval)
        return grids.of_divergences(interval, *poisson_divergences(sigma, q, epsilons))
    epsilons = grids.grid_to(most, interval)
    if isinstance(draws, FixedSize):
        with_client = divergence_with(sigma, q, epsilons)
        without_client = divergence_without(sigma, q, epsilons)
        return grids.of_divergences(interval, with_client, without_client)
    # A group has one of two sizes. No client's divergences are above the larger ones.
    smaller, rest = divmod(draws.population, draws.num_bands)
    found = np.max(
        [
            truncated_divergences(sigma, q, size, draws.largest_batch, epsilons)
            for size in {smaller, smaller + min(rest, 1)}
        ],
        axis=0,
    )
    return grids.of_divergences(interval, *found)


@underflow_is_zero
def losses(draws: Groups, sigma: float, interval: float) -> PrivacyLossDistribution:
    """Returns the privacy losses of a run for real normal numbers, to be composed with others.

    Losses of shuffling follow from eight pairs (epsilon, delta) and from the Gaussian mechanism
    without amplification.

    Args:
      draws: How clients are drawn.
      sigma: The noise multiplier, relative to the largest column norm of C; at least 0.1.
      interval: What losses are multiples of.

    Raises:
      TypeError: If the draws are none of ``draws_of_clients``.
    """
    draws = draws_of_clients.check(draws, Groups)
    if isinstance(draws, Poisson | FixedSize | TruncatedPoisson):
        found, most = losses_of_round(draws, sigma, interval), draws.most_participations
        return found if most == 1 else found.self_compose(most)
    if isinstance(draws, RandomAllocation):
        # A finer grid than they need takes long: some multiple of the interval.
        step = cycles.step_of_grid(sigma, draws.rounds_of_cycle)
        multiple = max(math.floor(step / interval), 1)
        found = cycles.losses_of_cycles(
            draws.rounds_of_cycle, draws.rounds_of_group, sigma, multiple * interval
        )
        return cycles.on_finer_grid(found, multiple, interval)
    alone = sigma / draws.together.norm
    pairs = shuffled_pairs(draws, sigma, DEFAULT_NUM_COORDINATES)
    if not pairs:
        return grids.gaussian_losses(alone, interval)
    steps = grids.steps_to(0.5 / alone**2 + _DEVIATIONS / alone, interval, _POINTS)
    bounds = gaussian.exact_deltas(alone, steps * interval)
    for least, delta in pairs:
        holds = steps * interval >= least
        bounds[holds] = np.minimum(bounds[holds], delta)
    return grids.connected_losses(interval, steps, bounds, bounds)


def shuffled_pairs(
    draws: Shuffling, sigma: float, num_coordinates: int
) -> tuple[tuple[float, float], ...]:
    """Returns pairs (epsilon, delta) that hold of a shuffled run with the noise of integers.

    Args:
      draws: How clients are drawn.
      sigma: The noise multiplier, relative to the largest column norm of C.
      num_coordinates: Parameters times rounds.
    """
    pairs = []
    for delta in _DELTAS:
        try:
            pairs.append((epsilon(draws, sigma, delta, num_coordinates=num_coordinates), delta))
        except TailError:
            continue
    return tuple(pairs)


def interval_for(epsilon: float) -> float:
    """Returns the interval of the grid of losses for an epsilon."""
    return min(LARGEST_INTERVAL, max(SMALLEST_INTERVAL, _RELATIVE_INTERVAL * epsilon))


def _finest_interval(sigma: float) -> float:
    """The interval that puts the largest losses at the end of the largest grid."""
    return (0.5 / sigma**2 + 12.0 / sigma) / _MOST_POINTS


def _shuffled_epsilon(draws: Shuffling, sigma: float, delta: float) -> float:
    """The least epsilon over how delta is shared; infinity if nothing is proved."""
    passes, count = draws.most_participations, draws.rounds_of_cycle
    # Composition needs a share of delta of its own.
    pass_delta = delta if passes == 1 else 0.5 * delta / passes
    best = math.inf
    for share in np.geomspace(1e-6, 0.25, _LOCAL_DELTAS):
        local_delta = share * pass_delta / count
        # Replacing one client changes a batch by twice what zeroing it does.
        local_epsilon = gaussian.exact_epsilon(sigma / 2.0, local_delta)
        bound = _clones(local_epsilon, local_delta, count, 0.5 * pass_delta)
        if bound is not None and bound[1] <= pass_delta:
            best = min(best, bound[0])
    if passes == 1 or math.isinf(best):
        return best
    losses = privacy_loss_distribution.from_privacy_parameters(
        pld_common.DifferentialPrivacyParameters(best, pass_delta),
        value_discretization_interval=interval_for(best),
    )
    return epsilon_of(losses.self_compose(passes), delta)


def _clones(
    local_epsilon: float, local_delta: float, count: int, delta: float
) -> tuple[float, float] | None:
    """Feldman, McMillan and Talwar, Thm 3.1 and 3.8: the (epsilon, delta) of a shuffled pass.

    Returns None if the theorem's condition on the local epsilon does not hold.
    """
    most = math.log(max(count / (16.0 * math.log(2.0 / delta)), 1e-300))
    if local_epsilon > most:
        return None
    grown = math.exp(local_epsilon)
    amplified = math.log1p(
        (grown - 1.0)
        / (grown + 1.0)
        * (8.0 * math.sqrt(grown * math.log(4.0 / delta) / count) + 8.0 * grown / count)
    )
    failure = delta + (math.exp(amplified) + 1.0) * (1.0 + 0.5 / grown) * count * local_delta
    return amplified, failure


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
    r = min(stays / cut * (1.0 + _ROUNDING_OF_TAILS), q)
    # The weights of both add up to a little more than 1.
    whole, cut = min(1.0 - cut + _ROUNDING_OF_TAILS, 1.0), cut * (1.0 + _ROUNDING_OF_TAILS)
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
