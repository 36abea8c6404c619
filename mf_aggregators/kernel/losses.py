r"""Privacy losses on a grid: their format, their rounding, and bounds that they follow from.

Losses, composition and the format are dp-accounting's. Its masses of a grid are differences of
deltas, divided by the interval: floats lose 1e-16 over the interval there. Its epsilons add up a
million masses in turn, at losses that are themselves sums of intervals. Here both err on the side
of privacy (:func:`_of_divergences`, :func:`epsilon_of`).

**Dominating losses.** A run is dominated by a pair (P, Q) if its hockey-stick divergences with a
client from without it are at most those of P from Q, at every epsilon, negative ones included.
Runs compose adaptively, and their pairs' product dominates the composition (Zhu, Dong and Wang,
2022, Thm 10), also where they are under way at the same time (Vadhan and Zhang, 2023). A pair is
described by its *profile* h(alpha), the divergence at alpha = e^epsilon: convex, falling, 1 at
alpha = 0.

**Runs that draw from one group of the clients after the other.** ``draws_of_clients`` says why a
run composes from queries to one group. For Poisson, truncated Poisson and fixed-size sampling these
are composed rounds; for random allocation, composed cycles; for shuffling a bound on one pass is
composed.

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

**Random allocation.** The rounds that draw from one group are split into cycles of t rounds, one
after the other. In each cycle every client of the group is in one of the t rounds, each as likely,
whatever happened before (arXiv 2502.08202, 2602.17284). Every client takes part once in every
cycle.

With the theorem of ``certificate``, S being one round of each cycle, the run is
dominated by P and Q of |C|. Rounds of one group are at least as far apart as C has bands, so that
their columns share no rows, and Kahane's inequality lets every column have the norm 1. So P and Q
are products over cycles, each of

    P = (1 / t) sum_i N(e_i, s^2 I)   from   Q = N(0, s^2 I)   in t dimensions,

whose ratio is L = (1 / t) sum_i exp((y_i - 1/2) / s^2): under Q, the mean of t independent
log-normal numbers of mean 1. In a last cycle of which only the first r rounds take place, t - r of
these numbers are 1: a client in none of those rounds adds nothing.

*Exact to a grid, on the safe side.* Both divergences of a cycle, E_Q (L - a)_+ and
E_Q (1 - a L)_+, are means of convex functions of L. Moving a number between two points of a grid
to one of the two, at random and with its mean kept, makes no mean of a convex function of it
smaller, nor one of its sum with independent numbers. So the distribution of L is computed
on a geometric grid: that of one log-normal number by its masses and means between points, that of
a sum by those of its two parts, moved to the grid each time. The mean is kept, so that the result
is a pair of distributions again, Q' and P' = L' Q', which dominates, and whose losses are on the
grid of log L'. What is above the last point is capped: by E_Q (L - cap)_+ P' has less mass, which
counts as an infinite loss. No divergence is off by more than the grid's resolution squared.

Sums of numbers on a grid e^(r k): the sum of points k and k - d is e^(r k) (1 + e^(-r d)), between
the points k + j and k + j + 1 with j = floor(log(1 + e^(-r d)) / r). All d of the same j are summed
at once, by differences of cumulated masses and means: log(2) / r terms in the place of all pairs.

*k out of t rounds.* A client in a uniformly random subset of k of t rounds is one in a round of
each of k parts of the rounds: put the rounds into a random order, split it into k parts of
floor(t / k) or ceil(t / k) rounds, and draw one round of each part. The rounds drawn are a
uniformly random subset, and the parts depend on nothing. So, by joint convexity, the divergences
are at most those of k cycles of so many rounds: :func:`_losses_of_cycle` has them.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
import scipy.special
from dp_accounting.pld import common as pld_common
from dp_accounting.pld import privacy_loss_distribution
from dp_accounting.pld.pld_pmf import DensePLDPmf
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

from mf_aggregators.kernel import draws_of_clients, gaussian, numbers
from mf_aggregators.kernel.draws_of_clients import (
    LEAST_NOISE_MULTIPLIER,
    FixedSize,
    Groups,
    Poisson,
    RandomAllocation,
    SampledRun,
    Shuffling,
    TruncatedPoisson,
)
from mf_aggregators.kernel.gaussian import DEFAULT_NUM_COORDINATES, TailError
from mf_aggregators.kernel.numbers import FloatArray, IntArray

_Losses: TypeAlias = PrivacyLossDistribution
# Schemes whose rounds or cycles are composed.
_Composed: TypeAlias = Poisson | TruncatedPoisson | FixedSize | RandomAllocation
# Hockey-stick divergences of outputs with a client from those without it, and back.
_Divergences: TypeAlias = tuple[FloatArray, FloatArray]
# Upper bound on the rounding error of one mass, in spacings of floats.
_ROUNDINGS = 8
# Upper bound on the relative rounding error of sums by halves and of exponentials.
_ROUNDING_OF_SUMS = 2e-14
# dp-accounting composes by Fourier transforms. Their rounding is not on the side of privacy:
# masses are off by about 2e-16 for each composition, summed over the grid. Ten times that is
# taken off delta, and a delta that is not well above it is refused.
_ROUNDING_PER_COMPOSITION = 2e-15
_SMALLEST_DELTA = 1e-12
# Losses count as infinite beyond this number of standard deviations, or if all have less mass.
_DEVIATIONS = 9.0
_NEGLIGIBLE = 1e-20


@np.errstate(under="ignore")
def _of_divergences(
    interval: float, with_client: FloatArray, without_client: FloatArray
) -> _Losses:
    """Returns losses that dominate a pair, by its divergences (Doroshenko et al. 2022, Alg. 1).

    Args:
      interval: The distance of neighbouring losses, which are multiples of it.
      with_client: (J,) the hockey-stick divergences of outputs with a client from those without, at
        the multiples 0 to J - 1 of the interval. At least two.
      without_client: (J,) those of outputs without the client from those with it.

    Returns:
      Losses whose masses are at least those of exact arithmetic on these divergences.
    """
    return PrivacyLossDistribution(
        _one_direction(interval, with_client, without_client),
        _one_direction(interval, without_client, with_client),
    )


def _one_direction(interval: float, forward: FloatArray, backward: FloatArray) -> Any:
    """The masses of a pair by its divergences at epsilons >= 0 and, the other way, below."""
    highest = max(int(np.count_nonzero(forward > _NEGLIGIBLE)), 1)
    lowest = max(int(np.count_nonzero(backward > _NEGLIGIBLE)), 1)
    negative = -interval * np.arange(len(backward))[lowest:0:-1]
    below = np.exp(negative) * backward[lowest:0:-1] - np.expm1(negative)
    # Rounding may let a delta be larger than an earlier one, which is then raised.
    deltas = np.concatenate([below, forward[: highest + 1]])
    deltas = np.maximum.accumulate(deltas[::-1])[::-1]
    # If long floats are no longer than doubles, masses are raised by a little more.
    wide = np.asarray(deltas, np.longdouble)
    falls, width = -np.diff(wide), np.expm1(np.longdouble(interval))
    # The chords before and behind each multiple; the first and the last multiple have one each.
    before = np.concatenate([[0.0], falls * np.exp(np.longdouble(interval)) / width])
    behind = np.concatenate([falls / width, [0.0]])
    exact = before - behind
    exact[0] += 1.0 - wide[0]
    raised = exact + _ROUNDINGS * np.finfo(np.longdouble).eps * (before + behind + 1.0)
    masses = np.maximum(raised, 0.0).astype(np.float64) * (1.0 + 2.0 * np.finfo(float).eps)
    return DensePLDPmf(interval, -len(below), masses, float(deltas[-1]), True)


@np.errstate(under="ignore")
def delta_of(losses: _Losses, epsilon: float) -> float:
    """Returns the larger hockey-stick divergence of both directions, rounded up.

    Args:
      losses: Pessimistic ones.
      epsilon: Of any sign.
    """
    return max(_delta(*each, epsilon) for each in _directions(losses))


@np.errstate(under="ignore")
def epsilon_of(losses: _Losses, delta: float) -> float:
    """Returns the least epsilon of losses in both directions, rounded up; infinity for none.

    Args:
      losses: Pessimistic ones.
      delta: Above 0 and below 1.
    """
    return max(_epsilon(*each, delta) for each in _directions(losses))


def _directions(losses: _Losses) -> Iterator[tuple[FloatArray, FloatArray, float]]:
    """Yields the losses of each direction, their masses, and that of infinity."""
    # One, if both directions are equal.
    for pmf in {id(each): each for each in (losses._pmf_remove, losses._pmf_add)}.values():
        dense = pmf.to_dense_pmf()
        multiples = (np.arange(dense.size) + dense._lower_loss) * dense._discretization
        yield multiples, np.asarray(dense._probs), float(dense._infinity_mass)


def _delta(losses: FloatArray, masses: FloatArray, infinite: float, epsilon: float) -> float:
    first = int(np.searchsorted(losses, epsilon, side="right"))
    finite = float(np.sum(-np.expm1(epsilon - losses[first:]) * masses[first:]))
    return infinite + finite * (1.0 + _ROUNDING_OF_SUMS)


def _epsilon(losses: FloatArray, masses: FloatArray, infinite: float, delta: float) -> float:
    if infinite > delta:
        return math.inf
    low, high = int(np.searchsorted(losses, 0.0, side="right")) - 1, len(losses) - 1
    if high <= low or _delta(losses, masses, infinite, 0.0) <= delta:
        return 0.0
    while high - low > 1:
        middle = (low + high) // 2
        is_below = _delta(losses, masses, infinite, float(losses[middle])) > delta
        low, high = (middle, high) if is_below else (low, middle)
    # Up to this loss, delta is the mass from here to infinity, less e^epsilon times a sum.
    above = masses[high:]
    together = float(np.sum(above * np.exp(losses[high] - losses[high:])))
    ratio = (infinite + float(np.sum(above)) - delta) / together if together > 0.0 else 1.0
    # A loss is a rounded product.
    rounding = 4.0 * np.finfo(float).eps * (1.0 + losses[-1])
    found = losses[high] + math.log(min(max(ratio, math.exp(losses[0] - losses[1])), 1.0))
    found = max(found, 0.0) + rounding
    while _delta(losses, masses, infinite, found) > delta and math.isfinite(found):
        found, rounding = found + rounding, 2.0 * rounding
    return float(found)


def gaussian_losses(noise_multiplier: float, interval: float) -> _Losses:
    """Returns losses of the Gaussian mechanism, rounded up.

    Args:
      noise_multiplier: sigma, above zero.
      interval: What losses are multiples of.
    """
    epsilons = _grid_to(_largest_loss(noise_multiplier), interval)
    deltas = gaussian.exact_deltas(noise_multiplier, epsilons)
    return _of_divergences(interval, deltas, deltas)


def losses_of_pair(epsilon: float, delta: float, interval: float) -> _Losses:
    """Returns losses that dominate every (epsilon, delta)-DP mechanism, rounded up.

    Args:
      epsilon: At least 0.
      delta: At least 0 and below 1.
      interval: What losses are multiples of.
    """
    parameters = pld_common.DifferentialPrivacyParameters(epsilon, delta)
    return privacy_loss_distribution.from_privacy_parameters(parameters, interval)


def _largest_loss(sigma: float) -> float:
    """The largest loss that counts of a Gaussian mechanism of a noise multiplier."""
    return 0.5 / sigma**2 + _DEVIATIONS / sigma


def _grid_to(most: float, interval: float) -> FloatArray:
    """Returns all multiples of an interval from 0 up to a number, or to the next one."""
    return np.asarray(np.arange(max(math.ceil(most / interval), 1) + 1) * interval)


def safe_delta(delta: float, compositions: int) -> float:
    """Returns delta less the rounding of composition by Fourier transforms.

    Args:
      delta: The delta of the guarantee.
      compositions: How many mechanisms are composed.

    Returns:
      A delta below the given one, for which epsilon is to be found.

    Raises:
      ValueError: If delta is not between 0 and 1, or so small that rounding is no small part
        of it.
    """
    delta = numbers.delta(delta)
    rounding = composition_rounding(compositions)
    smallest = max(_SMALLEST_DELTA, 2.0 * rounding)
    if delta < smallest:
        composed = f"a composition of {compositions} mechanisms"
        raise ValueError(f"delta must be at least {smallest:.3g} for {composed}, found {delta:g}.")
    return delta - rounding


def composition_rounding(compositions: int) -> float:
    """Returns the part of delta that composition by Fourier transforms may lose to rounding.

    Args:
      compositions: How many mechanisms are composed.
    """
    return _ROUNDING_PER_COMPOSITION * compositions


# Privacy losses are rounded to a grid of this interval times epsilon, within bounds. The rounding
# errs on the side of privacy.
_RELATIVE_INTERVAL = 1e-4
_LARGEST_INTERVAL, _SMALLEST_INTERVAL = 1e-3, 1e-7
# The grid has no more points than this, however fine an interval is asked for.
_MOST_POINTS = 500_000
# Points of the grid of local deltas over which the bound of shuffling is minimised.
_LOCAL_DELTAS = 24
# Upper bound on the relative error of floats in a binomial probability.
_ROUNDING_OF_TAILS = 1e-9


@np.errstate(under="ignore")
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
    sigma = numbers.non_negative_number(sigma, "sigma")
    safe_delta(delta, draws.most_participations)
    found, refused = gaussian.unamplified(draws.together, sigma, delta, num_coordinates)
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
        return epsilon_of(composed_losses(draws, sigma, RELATIVE_STEP), delta)
    interval = _LARGEST_INTERVAL
    while True:
        found = epsilon_of(composed_losses(draws, sigma, interval), delta)
        needed = interval_for(found)
        if interval <= 2.0 * max(needed, _finest_interval(sigma)):
            return found
        interval = needed


def composed_losses(draws: _Composed, sigma: float, resolution: float) -> _Losses:
    """Returns the privacy losses of a whole run, for real normal numbers.

    Args:
      draws: How clients are drawn.
      sigma: The noise multiplier, relative to the largest column norm of C; at least 0.1.
      resolution: For composed rounds, the interval of the grid of losses, which is larger for
        little noise; for random allocation, its step relative to the spread of losses.
    """
    interval = max(resolution, _finest_interval(sigma))
    if isinstance(draws, RandomAllocation):
        interval = _step_of_grid(sigma, draws.rounds_of_cycle, resolution)
    return _losses_on_grid(draws, sigma, interval)


def _losses_on_grid(draws: _Composed, sigma: float, interval: float) -> _Losses:
    """Returns the losses of a whole run, as multiples of an interval; arguments as above."""
    if isinstance(draws, RandomAllocation):
        return _losses_of_cycles(draws.rounds_of_cycle, draws.rounds_of_group, sigma, interval)
    one, most = _losses_of_round(draws, sigma, interval), draws.most_participations
    return one if most == 1 else one.self_compose(most)


def _losses_of_round(
    draws: Poisson | TruncatedPoisson | FixedSize, sigma: float, interval: float
) -> _Losses:
    """Returns the privacy losses of one round, for real normal numbers.

    Args:
      draws: How clients are drawn.
      sigma: The noise multiplier, relative to the largest column norm of C; above zero.
      interval: Losses are multiples of it.
    """
    q, most = draws.sampling_probability, _largest_loss(sigma)
    if isinstance(draws, Poisson):
        # Losses of a sample are smaller.
        most = math.log1p(q * math.expm1(min(most, 700.0)))
    epsilons = _grid_to(most, interval)
    if isinstance(draws, Poisson):
        found = _poisson_divergences(sigma, q, epsilons)
    elif isinstance(draws, FixedSize):
        found = _fixed_divergences(sigma, q, epsilons)
    else:
        # A group has one of two sizes. No client's divergences are above the larger ones.
        smaller, rest = divmod(draws.population, draws.num_bands)
        sizes, largest = {smaller, smaller + min(rest, 1)}, draws.largest_batch
        each = [_truncated_divergences(sigma, q, size, largest, epsilons) for size in sizes]
        found = np.max(each, axis=0)
    return _of_divergences(interval, *found)


@np.errstate(under="ignore")
def losses_of_run(run: SampledRun, interval: float) -> _Losses:
    """Returns the privacy losses of a run for real normal numbers, to be composed with others.

    Shuffled runs and those of clients who draw for themselves have those of the Gaussian mechanism
    of all their participations, which nothing amplifies.

    Args:
      run: The run.
      interval: What losses are multiples of.
    """
    draws: Any = run.draws
    if not run.composes_amplified:
        return gaussian_losses(run.noise_multiplier, interval)
    multiple = 1
    if isinstance(draws, RandomAllocation):
        # A finer grid than they need takes long: some multiple of the interval.
        multiple = max(math.floor(_step_of_grid(run.sigma, draws.rounds_of_cycle) / interval), 1)
    found = _losses_on_grid(draws, run.sigma, multiple * interval)
    return found if multiple == 1 else _on_finer_grid(found, multiple, interval)


def interval_for(epsilon: float) -> float:
    """Returns the interval of the grid of losses for an epsilon."""
    return min(_LARGEST_INTERVAL, max(_SMALLEST_INTERVAL, _RELATIVE_INTERVAL * epsilon))


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
        # Replacing one client changes a batch by twice as much as zeroing it.
        local_epsilon = gaussian.exact_epsilon(sigma / 2.0, local_delta)
        bound = _clones(local_epsilon, local_delta, count, 0.5 * pass_delta)
        if bound is not None and bound[1] <= pass_delta:
            best = min(best, bound[0])
    if passes == 1 or math.isinf(best):
        return best
    losses = losses_of_pair(best, pass_delta, interval_for(best))
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


def _fixed_divergences(sigma: float, q: float, epsilons: FloatArray) -> _Divergences:
    """Returns both divergences of a fixed size; arguments as of the two functions below."""
    return _divergence_with(sigma, q, epsilons), _divergence_without(sigma, q, epsilons)


def _divergence_with(sigma: float, q: float, epsilons: FloatArray) -> FloatArray:
    """Returns the divergences of a fixed size, of outputs with a client from those without.

    Args:
      sigma: The standard deviation s of the noise, above zero.
      q: The share B / m of a group that is in a batch, in (0, 1].
      epsilons: At least 0, of any shape.
    """
    variance, factor = sigma**2, np.exp(epsilons)
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


def _divergence_without(sigma: float, q: float, epsilons: FloatArray) -> FloatArray:
    """Returns the divergences of a fixed size, of outputs without a client from those with it.

    Arguments are those of :func:`_divergence_with`.
    """
    grown = np.expm1(epsilons)
    # (1 - q) + q exp((y - 1/2) / s^2) > e^eps.
    cutoff = sigma**2 * np.log1p(grown / q) + 0.5
    upper = scipy.special.ndtr
    found = q * upper((1.0 - cutoff) / sigma) - (q + grown) * upper(-cutoff / sigma)
    return np.asarray(np.clip(found, 0.0, 1.0))


def _poisson_divergences(sigma: float, q: float, epsilons: FloatArray) -> _Divergences:
    """Returns the divergences of a Poisson sample, with a client from without, and back.

    Args:
      sigma: The standard deviation s of the noise, above zero.
      q: The probability that a client joins, in (0, 1].
      epsilons: At least 0, of any shape.

    Returns:
      Two arrays of that shape.
    """
    rest = q - (1.0 - q) * np.expm1(epsilons)
    # Outputs below the cutoff are more probable without the client.
    with np.errstate(divide="ignore"):
        cutoff = sigma**2 * (np.log(np.maximum(rest, 0.0) / q) - epsilons) + 0.5
    below = scipy.special.ndtr
    found = rest * below(cutoff / sigma)
    found -= q * np.exp(epsilons) * below((cutoff - 1.0) / sigma)
    without = np.clip(np.where(rest > 0.0, found, 0.0), 0.0, 1.0)
    # The divergence with the client is that of a fixed size without it.
    return _divergence_without(sigma, q, epsilons), without


def _truncated_divergences(
    sigma: float, q: float, group_size: int, largest_batch: int, epsilons: FloatArray
) -> _Divergences:
    """Returns bounds on the divergences of a truncated batch, with a client from without, and back.

    Args:
      sigma: The standard deviation s of the noise, above zero.
      q: The probability that a client of the group comes, in (0, 1].
      group_size: The clients N of the group.
      largest_batch: The most clients L of a batch.
      epsilons: At least 0, of any shape.

    Returns:
      Two arrays of that shape.
    """
    with_client, without_client = _poisson_divergences(sigma, q, epsilons)
    cut = float(binomial_tail(largest_batch, group_size - 1, q))
    if group_size <= largest_batch or cut == 0.0:
        return with_client, without_client
    # A cut batch has the client with the probability r. Divergences do not fall where r grows.
    stays = largest_batch / group_size * float(binomial_tail(largest_batch + 1, group_size, q))
    r = min(stays / cut * (1.0 + _ROUNDING_OF_TAILS), q)
    # The weights of both add up to a little more than 1.
    whole, cut = min(1.0 - cut + _ROUNDING_OF_TAILS, 1.0), cut * (1.0 + _ROUNDING_OF_TAILS)
    kept, replaced = _fixed_divergences(sigma, r, epsilons)
    return whole * with_client + cut * kept, whole * without_client + cut * replaced


def binomial_tail(count: int | IntArray, trials: int | IntArray, probability: float) -> FloatArray:
    """Returns the probability that at least ``count`` of independent trials succeed.

    Args:
      count: How many, at least 1.
      trials: How many trials.
      probability: The probability that one succeeds.

    Returns:
      An incomplete beta function, of the shape of both.
    """
    fails = np.maximum(trials - count, 0) + 1
    return np.asarray(scipy.special.betainc(count, fails, probability))


# The step of the grid, relative to the standard deviation of log L, and its bounds.
RELATIVE_STEP = 0.03
_SMALLEST_STEP, _LARGEST_STEP = 2e-5, 5e-3
# Log-normal numbers are capped at this number of standard deviations.
_DEVIATIONS_OF_LOG_NORMAL = 8.8
# The part of a sum that is capped, or moved to zero.
_NEGLIGIBLE_PART = 1e-18
# Upper bound on the error of floats in all masses of one cycle, for each of its rounds.
_ROUNDING_OF_CYCLES = 1e-14


# Curves and searches ask for the same losses again.
@functools.lru_cache(maxsize=4)
def _losses_of_cycles(rounds_of_cycle: int, num_rounds: int, sigma: float, step: float) -> _Losses:
    """Returns the privacy losses of all cycles that some rounds begin, for real normal numbers.

    Args:
      rounds_of_cycle: The rounds t of which a client is in one.
      num_rounds: The rounds of the group.
      sigma: The noise multiplier, above zero.
      step: The step of the grid, above zero.
    """
    whole, rest = divmod(num_rounds, rounds_of_cycle)
    parts = []
    if whole:
        each = _losses_of_cycle(sigma, rounds_of_cycle, rounds_of_cycle, step)
        parts.append(each.self_compose(whole))
    if rest:
        parts.append(_losses_of_cycle(sigma, rounds_of_cycle, rest, step))
    return functools.reduce(PrivacyLossDistribution.compose, parts)


def _step_of_grid(
    sigma: float, rounds_of_cycle: int, relative_step: float = RELATIVE_STEP
) -> float:
    """Returns the step of the grid of losses of one cycle.

    Args:
      sigma: The noise multiplier, above zero.
      rounds_of_cycle: t.
      relative_step: The step, relative to the standard deviation of log L.
    """
    variance = math.expm1(min(sigma**-2, 500.0)) / rounds_of_cycle
    step = relative_step * math.sqrt(math.log1p(variance))
    return min(max(step, _SMALLEST_STEP), _LARGEST_STEP)


def _losses_of_cycle(sigma: float, rounds_of_cycle: int, num_rounds: int, step: float) -> _Losses:
    """Returns the privacy loss of one cycle, for real normal numbers.

    Args:
      sigma: The noise multiplier, above zero.
      rounds_of_cycle: The rounds t of which a client is in one.
      num_rounds: The first rounds of the cycle that take place, 1 to t.
      step: The step of the grid, above zero.
    """
    total = _sum_of(_log_normal(sigma, rounds_of_cycle, step), num_rounds)
    if num_rounds < rounds_of_cycle:
        total = _sum(total, _number(1.0 - num_rounds / rounds_of_cycle, step))
    rounding = _ROUNDING_OF_CYCLES * rounds_of_cycle
    last = total.first + len(total.masses) - 1
    with_client, without_client = total.masses * total.points(), total.masses[::-1].copy()
    return PrivacyLossDistribution(
        DensePLDPmf(step, total.first, with_client, total.capped + rounding, True),
        DensePLDPmf(step, -last, without_client, total.zero + rounding, True),
    )


def _on_finer_grid(losses: _Losses, multiple: int, interval: float) -> _Losses:
    """Returns the same losses as multiples of an interval.

    Args:
      losses: Those of cycles, of multiples of so many times the interval.
      multiple: How many times, at least 1.
      interval: Above zero.
    """
    finer = []
    for dense in (losses._pmf_remove, losses._pmf_add):
        masses = np.zeros((dense.size - 1) * multiple + 1)
        masses[::multiple] = dense._probs
        first, infinite = dense._lower_loss * multiple, dense._infinity_mass
        finer.append(DensePLDPmf(interval, first, masses, infinite, True))
    return PrivacyLossDistribution(*finer)


@dataclasses.dataclass(frozen=True, eq=False)
class _Grid:
    """A distribution on zero and on the points exp(step k), k = first, first + 1, ...

    Attributes:
      first: The k of the first mass.
      masses: (g,) of the points.
      zero: The mass of zero.
      capped: By how much its mean is below that of what it dominates.
      step: Of the grid.
    """

    first: int
    masses: FloatArray
    zero: float
    capped: float
    step: float

    def points(self) -> FloatArray:
        """Returns the (g,) points."""
        numbers = self.first + np.arange(len(self.masses))
        return np.asarray(np.exp(numbers * self.step))


def _log_normal(sigma: float, rounds: int, step: float) -> _Grid:
    """exp((y - 1/2) / s^2) / t for y of N(0, s^2), of mean 1 / t."""
    deviation, shift = 1.0 / sigma, math.log(rounds)
    center, shifted = -0.5 / sigma**2 - shift, 0.5 / sigma**2 - shift
    first = math.floor((center - _DEVIATIONS_OF_LOG_NORMAL * deviation) / step)
    last = math.ceil((shifted + _DEVIATIONS_OF_LOG_NORMAL * deviation) / step)
    logs = np.arange(first, last + 1) * step
    points = np.exp(logs)
    # Masses between points under Q, and, of the mean, under the normal number shifted by 1.
    between = _normal_masses((logs - center) / deviation)
    means = _normal_masses((logs - shifted) / deviation) / rounds
    # Relative to the lower point: in [0, expm1(step)] but for rounding.
    share = (means / points[:-1] - between) / math.expm1(step)
    share = np.clip(share, 0.0, between)
    masses = np.zeros(len(points))
    masses[:-1] += between - share
    masses[1:] += share
    # Below the first point: to zero and that point. Above the last: to it.
    ends = np.array([logs[0] - center, logs[0] - shifted, center - logs[-1], shifted - logs[-1]])
    below, mean_below, above, mean_above = map(float, scipy.special.ndtr(ends / deviation))
    kept = min(mean_below / rounds / points[0], below)
    masses[0] += kept
    masses[-1] += above
    capped = max(mean_above / rounds - above * float(points[-1]), 0.0)
    return _Grid(first, masses, below - kept, capped, step)


def _normal_masses(edges: FloatArray) -> FloatArray:
    """The masses of N(0, 1) between increasing edges, exact in both tails."""
    lower, upper = scipy.special.ndtr(edges), scipy.special.ndtr(-edges)
    return np.where(edges[1:] > 0.0, upper[:-1] - upper[1:], lower[1:] - lower[:-1])


def _number(value: float, step: float) -> _Grid:
    """A number that is known, between two points of the grid."""
    first = math.floor(math.log(value) / step)
    share = (value * math.exp(-first * step) - 1.0) / math.expm1(step)
    share = min(max(share, 0.0), 1.0)
    return _Grid(first, np.array([1.0 - share, share]), 0.0, 0.0, step)


def _sum_of(one: _Grid, count: int) -> _Grid:
    """The sum of independent numbers of one distribution, by doubling."""
    if count == 1:
        return one
    half = _sum_of(one, count // 2)
    doubled = _sum(half, half)
    return _sum(doubled, one) if count % 2 else doubled


def _sum(one: _Grid, other: _Grid) -> _Grid:
    """A distribution that dominates the sum of two independent numbers."""
    step = one.step
    most = math.ceil(math.log(2.0) / step) + 2
    first = min(one.first, other.first)
    last = max(one.first + len(one.masses), other.first + len(other.masses)) + most
    masses = np.zeros(last - first)
    # Equal points once, and every pair of different points in both orders.
    _add_pairs(masses, first, one, other, 0)
    _add_pairs(masses, first, other, one, 1)
    for each, rest in ((one, other), (other, one)):
        begin = each.first - first
        masses[begin : begin + len(each.masses)] += rest.zero * each.masses
    found = _Grid(first, masses, one.zero * other.zero, one.capped + other.capped, step)
    return _trimmed(found)


def _add_pairs(masses: FloatArray, first: int, larger: _Grid, smaller: _Grid, nearest: int) -> None:
    """Adds the sums of pairs of points that are ``nearest`` or more steps apart.

    All d of a range [d0, d1] have the same jump j. Let M be the mass of the smaller points, and T
    the sum of their masses times their points, over the larger point. Of the mass M,
    (T - (e^(r j) - 1) M) / (e^(r j) (e^r - 1)) goes to the jump j + 1, and the rest to j.
    """
    step = larger.step
    # From here on the sum is below the next point.
    farthest = math.ceil(-math.log(math.expm1(step)) / step) + 1 if step < math.log(2.0) else 1
    # No points are farther apart than this.
    farthest = min(farthest, larger.first + len(larger.masses) - smaller.first)
    if farthest < nearest:
        return
    distances = np.arange(nearest, farthest + 1)
    jumps = np.floor(np.log1p(np.exp(-distances * step)) / step).astype(np.int64)
    starts = np.flatnonzero(np.diff(jumps, prepend=jumps[0] + 1))
    points = smaller.points()
    count = len(larger.masses)
    width = int(distances[-1])
    places = np.clip(
        np.arange(larger.first - smaller.first - width, larger.first - smaller.first + count + 1),
        0,
        len(points),
    )
    cumulated = np.concatenate([[0.0], np.cumsum(smaller.masses)])[places]
    means = np.concatenate([[0.0], np.cumsum(smaller.masses * points)])[places]
    weights = larger.masses
    over = weights / larger.points()
    begin = larger.first - first
    for index, start in enumerate(starts):
        closest, jump = int(distances[start]), int(jumps[start])
        high = slice(width - closest + 1, width - closest + 1 + count)
        mass, mean = cumulated[high], means[high]
        if index + 1 < len(starts):
            after = int(distances[starts[index + 1]])
            low = slice(width - after + 1, width - after + 1 + count)
            mass, mean = mass - cumulated[low], mean - means[low]
        mass = weights * mass
        factor = math.exp(jump * step)
        moved = (over * mean - math.expm1(jump * step) * mass) / (factor * math.expm1(step))
        moved = np.clip(moved, 0.0, mass)
        masses[begin + jump : begin + jump + count] += mass - moved
        masses[begin + jump + 1 : begin + jump + 1 + count] += moved


def _trimmed(found: _Grid) -> _Grid:
    """Without points of next to no mass at both ends."""
    points = found.points()
    means = found.masses * points
    count = len(points)
    # The mean above each point, from the last one on; and the masses below, from the first one on.
    last = count - int(
        np.searchsorted(np.cumsum(means[::-1]), _NEGLIGIBLE_PART * points[0] + _NEGLIGIBLE_PART)
    )
    last = max(last, 1)
    begin = min(int(np.searchsorted(np.cumsum(found.masses), _NEGLIGIBLE_PART)), last - 1)
    masses = found.masses[begin:last].copy()
    above, below = float(np.sum(found.masses[last:])), float(np.sum(found.masses[:begin]))
    capped = float(np.sum(means[last:])) - above * float(points[last - 1])
    masses[-1] += above
    kept = min(float(np.sum(means[:begin])) / float(points[begin]), below)
    masses[0] += kept
    return dataclasses.replace(
        found,
        first=found.first + begin,
        masses=masses,
        zero=found.zero + below - kept,
        capped=found.capped + max(capped, 0.0),
    )
