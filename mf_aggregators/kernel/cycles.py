r"""Privacy losses of random allocation: one random round of every cycle, drawn afresh.

The rounds that draw from one group of the clients are split into cycles of t rounds, one after the
other. In each cycle every client of the group is in one of the t rounds, each as likely, whatever
happened before (arXiv 2502.08202, 2602.17284). Every client takes part once in every cycle.

With the theorem of ``dominating_pairs``, S being one round of each cycle, the run is
dominated by P and Q of |C|. Rounds of one group are at least as far apart as C has bands, so that
their columns share no rows, and Kahane's inequality lets every column have the norm 1. So P and Q
are products over cycles, each of

    P = (1 / t) sum_i N(e_i, s^2 I)   from   Q = N(0, s^2 I)   in t dimensions,

whose ratio is L = (1 / t) sum_i exp((y_i - 1/2) / s^2): under Q, the mean of t independent
log-normal numbers of mean 1. In a last cycle of which only the first r rounds take place, t - r of
these numbers are 1: a client in none of those rounds adds nothing.

**Exact to a grid, on the safe side.** Both divergences of a cycle, E_Q (L - a)_+ and
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

**k out of t rounds.** A client in a uniformly random subset of k of t rounds is one in a round of
each of k parts of the rounds: put the rounds into a random order, split it into k parts of
floor(t / k) or ceil(t / k) rounds, and draw one round of each part. The rounds drawn are a
uniformly random subset, and the parts depend on nothing. So, by joint convexity, the divergences
are at most those of k cycles of so many rounds: :func:`losses_of_cycle` has them.
"""

import dataclasses
import functools
import math

import numpy as np
import scipy.special
from dp_accounting.pld.pld_pmf import DensePLDPmf
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

from mf_aggregators.kernel.arrays import FloatArray

# The step of the grid, relative to the standard deviation of log L, and its bounds.
RELATIVE_STEP = 0.03
_SMALLEST_STEP, _LARGEST_STEP = 2e-5, 5e-3
# Log-normal numbers are capped at this number of standard deviations.
_DEVIATIONS = 8.8
# The part of a sum that is capped, or moved to zero.
_NEGLIGIBLE = 1e-18
# Upper bound on the error of floats in all masses of one cycle, for each of its rounds.
_ROUNDING = 1e-14


# Curves and searches ask for the same losses again.
@functools.lru_cache(maxsize=4)
def losses_of_cycles(
    rounds_of_cycle: int, num_rounds: int, sigma: float, step: float
) -> PrivacyLossDistribution:
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
        each = losses_of_cycle(sigma, rounds_of_cycle, rounds_of_cycle, step)
        parts.append(each.self_compose(whole))
    if rest:
        parts.append(losses_of_cycle(sigma, rounds_of_cycle, rest, step))
    return functools.reduce(PrivacyLossDistribution.compose, parts)


def step_of_grid(sigma: float, rounds_of_cycle: int, relative_step: float = RELATIVE_STEP) -> float:
    """Returns the step of the grid of losses of one cycle.

    Args:
      sigma: The noise multiplier, above zero.
      rounds_of_cycle: t.
      relative_step: The step, relative to the standard deviation of log L.
    """
    variance = math.expm1(min(sigma**-2, 500.0)) / rounds_of_cycle
    step = relative_step * math.sqrt(math.log1p(variance))
    return min(max(step, _SMALLEST_STEP), _LARGEST_STEP)


def losses_of_cycle(
    sigma: float, rounds_of_cycle: int, num_rounds: int, step: float
) -> PrivacyLossDistribution:
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
    rounding = _ROUNDING * rounds_of_cycle
    last = total.first + len(total.masses) - 1
    with_client, without_client = total.masses * total.points(), total.masses[::-1].copy()
    return PrivacyLossDistribution(
        DensePLDPmf(step, total.first, with_client, total.capped + rounding, True),
        DensePLDPmf(step, -last, without_client, total.zero + rounding, True),
    )


def on_finer_grid(
    losses: PrivacyLossDistribution, multiple: int, interval: float
) -> PrivacyLossDistribution:
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
    first = math.floor((center - _DEVIATIONS * deviation) / step)
    last = math.ceil((shifted + _DEVIATIONS * deviation) / step)
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
        np.searchsorted(np.cumsum(means[::-1]), _NEGLIGIBLE * points[0] + _NEGLIGIBLE)
    )
    last = max(last, 1)
    begin = min(int(np.searchsorted(np.cumsum(found.masses), _NEGLIGIBLE)), last - 1)
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
