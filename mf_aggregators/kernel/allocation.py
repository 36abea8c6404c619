r"""Privacy losses of random allocation, computed as sums of log-normal numbers on a geometric grid.

The rounds that draw from one group are split into cycles of t rounds, one after the other. In each
cycle every client of the group is in one of the t rounds, each as likely, whatever happened before
(arXiv 2502.08202, 2602.17284). Every client takes part once in every cycle.

With the theorem of ``certificate``, S being one round of each cycle, the run is dominated by P and
Q of |C|. Rounds of one group are at least as far apart as C has bands, so that their columns share
no rows, and Kahane's inequality lets every column have the norm 1. So P and Q are products over
cycles, each of

    P = (1 / t) sum_i N(e_i, s^2 I)   from   Q = N(0, s^2 I)   in t dimensions,

whose ratio is L = (1 / t) sum_i exp((y_i - 1/2) / s^2): under Q, the mean of t independent
log-normal numbers of mean 1. In a last cycle of which only the first r rounds take place, t - r of
these numbers are 1: a client in none of those rounds adds nothing.

*Exact to a grid, on the safe side.* Both divergences of a cycle, E_Q (L - a)_+ and
E_Q (1 - a L)_+, are means of convex functions of L. Moving a number between two points of a grid to
one of the two, at random and with its mean kept, makes no mean of a convex function of it smaller,
nor one of its sum with independent numbers. So the distribution of L is computed on a geometric
grid: that of one log-normal number by its masses and means between points, that of a sum by those
of its two parts, moved to the grid each time. The mean is kept, so that the result is a pair of
distributions again, Q' and P' = L' Q', which dominates, and whose losses are on the grid of log L'.
No divergence is off by more than the grid's resolution squared.

*Both ends are dropped.* Where a number is beyond the ends of its grid, L' is 0. So L' <= L, and

    (L - a)_+ <= (L' - a)_+ + (L - L')   and   (1 - a L)_+ <= (1 - a L')_+.

P' then has less mass than 1, by E_Q (L - L'), and Q' has less outside of L' = 0. What is missing of
each counts as an infinite loss.

Sums of numbers on a grid e^(r k): the sum of points k and k - d is e^(r k) (1 + e^(-r d)), between
the points k + j and k + j + 1 with j = floor(log(1 + e^(-r d)) / r). All d of the same j are summed
at once, by differences of cumulated masses and means: log(2) / r terms in the place of all pairs.

*k out of t rounds.* A client in a uniformly random subset of k of t rounds is one in a round of
each of k parts of the rounds: put the rounds into a random order, split it into k parts of
floor(t / k) or ceil(t / k) rounds, and draw one round of each part. The rounds drawn are a
uniformly random subset, and the parts depend on nothing. So, by joint convexity, the divergences
are at most those of k cycles of floor(t / k) or ceil(t / k) rounds: :func:`_losses_of_cycle`
computes the losses of one cycle.
"""

import functools
import math
from typing import NamedTuple

import numpy as np
import scipy.special
from dp_accounting.pld.pld_pmf import DensePLDPmf, create_pmf
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

from mf_aggregators.kernel.numbers import FloatArray

# The step of the grid, relative to the standard deviation of log L, and the least and the largest
# step.
_RELATIVE_STEP = 0.03
_SMALLEST_STEP, _LARGEST_STEP = 2e-5, 5e-3
# A log-normal number counts as zero if its logarithm is more than this many standard deviations
# from the mean.
_DEVIATIONS = 8.8
# The share of a sum's mass at its lower end, and of its mean at its upper end, that is dropped.
_NEGLIGIBLE_PART = 1e-18
# Upper bound on the floating-point error of all masses of one cycle, divided by the rounds of a
# cycle.
_ROUNDING = 1e-14


class _Grid(NamedTuple):
    """A distribution on zero and on the points exp(k * step) for k = first, first + 1, ...

    Attributes:
      first: The k of the first point.
      masses: (g,) probabilities of the points; zero has the rest.
      step: The difference of the logarithms of neighbouring points.
    """

    first: int
    masses: FloatArray
    step: float

    def points(self) -> FloatArray:
        """Returns the (g,) points of the grid, which are exp(k * step)."""
        return np.asarray(np.exp((self.first + np.arange(len(self.masses))) * self.step))


@np.errstate(under="ignore")
def losses_of_cycles(
    rounds_of_cycle: int,
    num_rounds: int,
    sigma: float,
    *,
    coarser: float = 1.0,
    interval: float | None = None,
) -> PrivacyLossDistribution:
    """Returns the privacy losses of all cycles of a group, the last incomplete one included.

    Args:
      rounds_of_cycle: The rounds t of a cycle; each client takes part in one of them.
      num_rounds: The number of rounds that draw from the group.
      sigma: The noise multiplier, above zero.
      coarser: The factor by which the step of the grid is larger than usual.
      interval: Losses are rounded to multiples of this number; None for the step of the grid.
    """
    step = _step_of_grid(sigma, rounds_of_cycle, coarser)
    if interval is None:
        return _composed(rounds_of_cycle, num_rounds, sigma, step)
    # A grid as fine as the interval would take long: the step is the largest multiple of the
    # interval that is not above the usual step.
    multiple = max(math.floor(step / interval), 1)
    found = _composed(rounds_of_cycle, num_rounds, sigma, multiple * interval)
    finer = []
    for dense in (found._pmf_remove, found._pmf_add):
        places = (dense._lower_loss + np.arange(dense.size)) * multiple
        masses = dict(zip(places.tolist(), dense._probs.tolist(), strict=True))
        finer.append(create_pmf(masses, interval, dense._infinity_mass, True))
    return PrivacyLossDistribution(*finer)


def _step_of_grid(sigma: float, rounds_of_cycle: int, coarser: float = 1.0) -> float:
    variance = math.expm1(min(sigma**-2, 500.0)) / rounds_of_cycle
    step = coarser * _RELATIVE_STEP * math.sqrt(math.log1p(variance))
    return min(max(step, _SMALLEST_STEP), _LARGEST_STEP)


# The same losses are cached, because curves and searches for noise ask for them repeatedly.
@functools.lru_cache(maxsize=4)
def _composed(
    rounds_of_cycle: int, num_rounds: int, sigma: float, step: float
) -> PrivacyLossDistribution:
    whole, rest = divmod(num_rounds, rounds_of_cycle)
    parts = []
    if whole:
        each = _losses_of_cycle(sigma, rounds_of_cycle, rounds_of_cycle, step)
        parts.append(each.self_compose(whole))
    if rest:
        parts.append(_losses_of_cycle(sigma, rounds_of_cycle, rest, step))
    return functools.reduce(PrivacyLossDistribution.compose, parts)


def _losses_of_cycle(
    sigma: float, rounds_of_cycle: int, num_rounds: int, step: float
) -> PrivacyLossDistribution:
    """Returns the losses of one cycle of which only the first ``num_rounds`` rounds take place."""
    total = _sum_of(_log_normal(sigma, rounds_of_cycle, step), num_rounds)
    if num_rounds < rounds_of_cycle:
        total = _sum(total, _number(1.0 - num_rounds / rounds_of_cycle, step))
    last = total.first + len(total.masses) - 1
    directions = []
    for first, masses in (
        (total.first, total.masses * total.points()),
        (-last, total.masses[::-1]),
    ):
        missing = max(1.0 - float(np.sum(masses)), 0.0)
        infinite = missing + _ROUNDING * rounds_of_cycle
        directions.append(DensePLDPmf(step, first, masses.copy(), infinite, True))
    return PrivacyLossDistribution(*directions)


def _log_normal(sigma: float, rounds: int, step: float) -> _Grid:
    """The distribution of exp((y - 1/2) / s^2) / t, of mean 1 / t, for y from N(0, s^2)."""
    deviation, shift = 1.0 / sigma, math.log(rounds)
    center, shifted = -0.5 / sigma**2 - shift, 0.5 / sigma**2 - shift
    first = math.floor((center - _DEVIATIONS * deviation) / step)
    last = math.ceil((shifted + _DEVIATIONS * deviation) / step)
    logs = np.arange(first, last + 1) * step
    # ``between`` are the masses between neighbouring points under Q; ``means`` are the shares of
    # the mean, which are the masses for y from N(1, s^2), divided by t.
    between = _normal_masses((logs - center) / deviation)
    means = _normal_masses((logs - shifted) / deviation) / rounds
    # The share of each mass that moves to the upper point, so that the mean is kept: between 0 and
    # the mass, but for rounding.
    share = np.clip((means / np.exp(logs[:-1]) - between) / math.expm1(step), 0.0, between)
    return _Grid(first, np.append(between - share, 0.0) + np.append(0.0, share), step)


def _normal_masses(edges: FloatArray) -> FloatArray:
    """The probabilities of N(0, 1) between increasing edges, accurate in both tails."""
    lower, upper = scipy.special.ndtr(edges), scipy.special.ndtr(-edges)
    return np.where(edges[1:] > 0.0, upper[:-1] - upper[1:], lower[1:] - lower[:-1])


def _number(value: float, step: float) -> _Grid:
    """The distribution of a constant, as a mixture of its two neighbours on the grid."""
    first = math.floor(math.log(value) / step)
    share = (value * math.exp(-first * step) - 1.0) / math.expm1(step)
    share = min(max(share, 0.0), 1.0)
    return _Grid(first, np.array([1.0 - share, share]), step)


def _sum_of(one: _Grid, count: int) -> _Grid:
    """A distribution that dominates the sum of independent numbers of one distribution."""
    if count == 1:
        return one
    half = _sum_of(one, count // 2)
    doubled = _sum(half, half)
    return _sum(doubled, one) if count % 2 else doubled


def _sum(one: _Grid, other: _Grid) -> _Grid:
    """A distribution that dominates the sum of two independent numbers, or 0 if one is 0."""
    most = math.ceil(math.log(2.0) / one.step) + 2
    first = min(one.first, other.first)
    last = max(one.first + len(one.masses), other.first + len(other.masses)) + most
    masses = np.zeros(last - first)
    # Pairs of equal points are added once, and pairs of different points in both orders.
    _add_pairs(masses, first, one, other, 0)
    _add_pairs(masses, first, other, one, 1)
    found = _Grid(first, masses, one.step)
    # Points are cut at the lower end where their masses, and at the upper end where their shares of
    # the mean, add up to a negligible part.
    means = masses * found.points()
    above = np.cumsum(means[::-1])[::-1]
    begin = int(np.searchsorted(np.cumsum(masses), _NEGLIGIBLE_PART))
    end = int(np.count_nonzero(above > _NEGLIGIBLE_PART * above[0]))
    return _Grid(first + begin, masses[begin:end], one.step)


def _add_pairs(masses: FloatArray, first: int, larger: _Grid, smaller: _Grid, nearest: int) -> None:
    """Adds the sums of pairs of points that are ``nearest`` or more steps of the grid apart.

    All d of a range [d0, d1] have the same jump j. Let M be the mass of the smaller points, and T
    the sum of their masses times their points, over the larger point. Of the mass M,
    (T - (e^(r j) - 1) M) / (e^(r j) (e^r - 1)) goes to the jump j + 1, and the rest to j.
    """
    step, count = larger.step, len(larger.masses)
    # If two points are farther apart than this, their sum is below the point after the larger one.
    farthest = math.ceil(-math.log(math.expm1(step)) / step) + 1
    # No two points of the grids are farther apart than this.
    farthest = min(farthest, larger.first + count - smaller.first)
    if farthest < nearest:
        return
    distances = np.arange(nearest, farthest + 1)
    jumps = np.floor(np.log1p(np.exp(-distances * step)) / step).astype(np.int64)
    starts = np.flatnonzero(np.diff(jumps, prepend=jumps[0] + 1))
    places = np.arange(-farthest, count + 1) + larger.first - smaller.first
    places = np.clip(places, 0, len(smaller.masses))
    # Cumulated masses and means at each place, after zeros for places below the first point.
    masses_to, means_to = (
        np.append(np.zeros(count), np.append(0.0, np.cumsum(each))[places])
        for each in (smaller.masses, smaller.masses * smaller.points())
    )
    weights, over = larger.masses, larger.masses / larger.points()
    ends = count + farthest - distances[starts] + 1
    for jump, high, low in zip(jumps[starts].tolist(), ends, [*ends[1:], 0], strict=True):
        mass = weights * (masses_to[high : high + count] - masses_to[low : low + count])
        mean = over * (means_to[high : high + count] - means_to[low : low + count])
        moved = mean - math.expm1(jump * step) * mass
        moved = np.clip(moved / (math.exp(jump * step) * math.expm1(step)), 0.0, mass)
        begin = larger.first - first + jump
        masses[begin : begin + count] += mass - moved
        masses[begin + 1 : begin + 1 + count] += moved
