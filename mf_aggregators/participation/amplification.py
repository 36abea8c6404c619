r"""Privacy amplification by sampling for banded mechanisms (BandMF Thm 4, Cor. F.1 and F.2).

Where batches were drawn by one of the schemes of ``mf_aggregators.participation``, a
client is in rounds of one group alone, b or more rounds apart, and each of its
participations changes other rows of C x: rows j to j + b - 1, for a lower-triangular C of
b bands. So a run is no more revealing than k = ceil(n / b) adaptive queries to one group,
each a Gaussian mechanism whose sensitivity is the largest column norm of C, run on the
batches that the scheme draws. The noise multiplier is relative to that norm everywhere
here, and adjacency is zero-out: neighbouring populations differ in one client, who takes
part in the same rounds with zero vectors.

What the k queries reveal is computed for each scheme:

* Poisson sampling: the Poisson-sampled Gaussian mechanism composed k times, by
  dp-accounting's privacy loss distributions. Zero-out is adding or removing one client
  here, since who does not join and who joins with zeros add the same to the sum.
* Fixed-size subsets: the dominating pair of one query, which ``fixed_size_gaussian`` proves,
  composed in the same way. It is not that of Poisson sampling: where the client is drawn,
  another one is not.
* Shuffling: Feldman, McMillan and Talwar (2021), Thm 3.1 and 3.8, for each pass over a
  group, and the composition of passes. In each batch one place is singled out, the same
  for the whole pass and the one where the client is; given everybody else, the clients at
  these places are in uniformly random order, and each batch is a mechanism on one of
  them.

* Min-separation sampling and balls in bins have no groups: ``separated``.

None is ever more than the guarantee without amplification: that of a Gaussian mechanism
with as many participations as the scheme allows. The batches must stay secret: who knows
them sees a run that was not sampled.

That noise is drawn from tables costs a small part of delta (``noise_failure``), once for the whole
run, whichever theorem is used for real normal numbers.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import scipy.optimize
from dp_accounting.pld import privacy_loss_distribution

from mf_aggregators.accounting import gaussian, noise_failure
from mf_aggregators.accounting.composition import composition_rounding, safe_delta
from mf_aggregators.accounting.noise_failure import TailError

if TYPE_CHECKING:
    from mf_aggregators.participation.cyclic_groups import ComposedGroups, CyclicGroups

# Privacy losses are rounded to a grid of this interval times epsilon, within bounds. The
# rounding errs on the side of privacy.
_RELATIVE_INTERVAL = 1e-4
_LARGEST_INTERVAL = 1e-3
_SMALLEST_INTERVAL = 1e-7

# With less noise nothing is claimed to be amplified: a client that is drawn shows itself, and
# the grid of its privacy losses grows without bound.
LEAST_NOISE_MULTIPLIER = 0.1

# A first search for a noise multiplier takes intervals so many times as large.
_COARSER = 10.0

# The grid has no more points than this, whatever is asked for.
_MOST_POINTS = 500_000

# Deltas at which a curve of pairs is computed for schemes without a fast one.
_DELTAS = tuple(float(delta) for delta in np.geomspace(1e-9, 0.3, 8))
# Epsilons at which a fast one is computed, up to where its delta is next to nothing.
_NUM_EPSILONS = 120
_LEAST_DELTA_OF_CURVE = 1e-11
_MOST_DOUBLINGS = 24
# The grid of losses, relative to the spread of the sum of all losses.
_INTERVAL_OF_SPREAD = 5e-3

# The first step from a noise multiplier whose stated epsilon is above its target.
_RELATIVE_STEP = 1e-6

# The excess, in a search, of a noise multiplier that cannot be accounted for.
_REFUSED = 1e6


def epsilon_of_groups(
    scheme: "CyclicGroups", sigma: float, delta: float, num_coordinates: int
) -> float:
    """Returns the epsilon of a run by groups: that of ``SamplingScheme.epsilon``.

    Args:
      scheme: How clients come into batches.
      sigma: The noise multiplier, relative to the largest column norm of C; at least 0.
      delta: Below 1, and at least 1e-12 and 4e-15 times the compositions.
      num_coordinates: Parameters times rounds.

    Raises:
      TailError: As in ``gaussian.epsilon``.
      ValueError: If delta is out of its range.
    """
    safe_delta(delta, scheme.most_participations())
    unamplified, refused = math.inf, None
    try:
        unamplified = gaussian.epsilon(
            sigma / math.sqrt(scheme.most_participations()),
            delta,
            num_coordinates=num_coordinates,
            disjoint_participations=scheme.most_participations(),
        )
    except TailError as error:
        # Who is seldom drawn seldom shows: the amplified one may be accounted for all the same.
        refused = error
    if unamplified == 0.0 or sigma < LEAST_NOISE_MULTIPLIER:
        found = unamplified
    else:
        found = min(unamplified, _amplified(scheme, sigma, delta, num_coordinates))
    if refused is not None and math.isinf(found):
        raise refused
    return found


def _amplified(scheme: "CyclicGroups", sigma: float, delta: float, num_coordinates: int) -> float:
    """The amplified epsilon; infinity if too little of delta is left."""
    accounting = _Accounting(scheme, sigma, num_coordinates)
    try:
        return accounting.epsilon(accounting.delta_left(delta))
    except TailError:
        return math.inf


def noise_multiplier_of_groups(
    scheme: "CyclicGroups", target: float, delta: float, num_coordinates: int
) -> float:
    """Returns the least noise multiplier of groups.

    The epsilon that is stated of it, with a grid of its own, is never above the target. Arguments
    are those of :func:`epsilon_of_groups`, and the target epsilon.
    """
    safe_delta(delta, scheme.most_participations())
    # What suffices without amplification always suffices.
    enough = gaussian.noise_multiplier(
        target,
        delta,
        num_coordinates=num_coordinates,
        disjoint_participations=scheme.most_participations(),
    ) * math.sqrt(scheme.most_participations())
    found = scheme.searched(target, delta, enough, num_coordinates)
    step = _RELATIVE_STEP
    while found < enough and not _is_met(scheme, found, target, delta, num_coordinates):
        found = min(found * (1.0 + step), enough)
        step *= 2.0
    return found


def _is_met(
    scheme: "CyclicGroups", sigma: float, target: float, delta: float, num_coordinates: int
) -> bool:
    try:
        return epsilon_of_groups(scheme, sigma, delta, num_coordinates) <= target
    except TailError:
        return False


def searched_by_losses(
    scheme: "ComposedGroups", target: float, delta: float, enough: float, num_coordinates: int
) -> float:
    """Returns what a search by the privacy losses of a run finds.

    Args:
      scheme: How clients come into batches.
      target: The epsilon.
      delta: The delta of the guarantee.
      enough: A noise multiplier that is known to suffice, the most that is returned.
      num_coordinates: Parameters times rounds.
    """
    if scheme.sampling_probability >= 1.0:
        return enough
    # Fine intervals take time where there is little noise: they only polish.
    interval = interval_for(target)
    coarse = _composed_excess(scheme, target, delta, _COARSER * interval, num_coordinates)
    least = _least_accounted(scheme)
    near = _smallest(coarse, enough, 1.5, least)
    fine = _composed_excess(scheme, target, delta, interval, num_coordinates)
    return _smallest(fine, near, 1.001, least)


def searched_by_epsilons(
    scheme: "CyclicGroups", target: float, delta: float, enough: float, num_coordinates: int
) -> float:
    """Returns what a search by epsilons finds; arguments as of :func:`searched_by_losses`."""

    def excess(log_sigma: float) -> float:
        accounting = _Accounting(scheme, math.exp(log_sigma), num_coordinates)
        try:
            left = accounting.delta_left(delta)
        except TailError:
            return _REFUSED
        # Infinite values have no place in a search for a root.
        return min(accounting.epsilon(left), _REFUSED) - target

    return _smallest(excess, enough, 1.5, _least_accounted(scheme))


@dataclasses.dataclass(frozen=True)
class _Accounting:
    """The accounting of one scheme for one noise multiplier.

    Attributes:
      scheme: How batches are drawn.
      sigma: The noise multiplier, relative to the largest column norm of C.
      num_coordinates: Parameters times rounds.
    """

    scheme: "CyclicGroups"
    sigma: float
    num_coordinates: int

    def epsilon(self, delta: float) -> float:
        """The amplified epsilon of real normal numbers."""
        return self.scheme.amplified_epsilon(self.sigma, delta)

    def delta_left(self, delta: float) -> float:
        """What of a stated delta is left for real normal numbers; TailError if it is too little."""
        left = noise_failure.delta_left(
            delta, self.sigma / self.scheme.largest_move, self.num_coordinates
        )
        # Each part is compared with the whole: the next delta that is refused for one of them is
        # refused without amplification, too, and none loses its amplification before.
        return left - composition_rounding(self.scheme.most_participations())


def _least_accounted(scheme: "CyclicGroups") -> float:
    """The least noise multiplier of which anything amplified is stated."""
    least = scheme.largest_move * noise_failure.LEAST_NOISE_MULTIPLIER
    return max(LEAST_NOISE_MULTIPLIER, least)


def _smallest(
    excess: Callable[[float], float], enough: float, factor: float, least_multiplier: float
) -> float:
    """Returns the least noise multiplier with excess(log(sigma)) <= 0, at most ``enough``.

    Args:
      excess: A decreasing function, not defined below the least noise multiplier.
      enough: What is returned if the excess is positive there already, or it is below the
        least noise multiplier.
      factor: The first steps of the search, above 1.
      least_multiplier: None below is tried.

    Returns:
      The noise multiplier, to a relative error of 1e-6 on the side of more noise.
    """
    known = functools.lru_cache(maxsize=None)(excess)
    # A search across the least one that is accounted for would creep up to it.
    least, high = math.log(least_multiplier * (1.0 + 1e-12)), math.log(enough)
    if high <= least or known(high) > 0.0:
        return enough
    step = math.log(factor)
    low = max(least, high - step)
    while known(low) <= 0.0:
        if low == least:
            return math.exp(least)
        # Never far below the root: accounting for little noise takes long.
        high, step = low, min(2.0 * step, math.log(2.5))
        low = max(least, high - step)
    root = scipy.optimize.brentq(known, low, high, xtol=5e-7, rtol=1e-9)
    step = 5e-7
    while known(root) > 0.0:
        root, step = min(root + step, high), 2.0 * step
    return math.exp(root)


def interval_for(epsilon: float) -> float:
    """Returns the interval of the grid of losses that an epsilon is computed with."""
    return min(_LARGEST_INTERVAL, max(_SMALLEST_INTERVAL, _RELATIVE_INTERVAL * epsilon))


def _finest_interval(sigma: float) -> float:
    """The interval that puts the largest losses at the end of the largest grid."""
    return (0.5 / sigma**2 + 12.0 / sigma) / _MOST_POINTS


def _composed_excess(
    scheme: "ComposedGroups",
    target: float,
    delta: float,
    interval: float,
    num_coordinates: int,
) -> Callable[[float], float]:
    def excess(log_sigma: float) -> float:
        sigma = math.exp(log_sigma)
        try:
            left = _Accounting(scheme, sigma, num_coordinates).delta_left(delta)
        except TailError:
            return _REFUSED
        loss = composed_loss(scheme, sigma, interval)
        return math.log(max(float(loss.get_delta_for_epsilon(target)), 1e-30) / left)

    return excess


def composed_loss(
    scheme: "ComposedGroups", sigma: float, interval: float
) -> privacy_loss_distribution.PrivacyLossDistribution:
    """Returns the privacy loss of a whole run, for real normal numbers.

    Args:
      scheme: How batches are drawn.
      sigma: The noise multiplier, relative to the largest column norm of C; at least 0.1.
      interval: What the losses of the grid are multiples of; larger where there is little noise.
    """
    grid = max(interval, _finest_interval(sigma))
    return scheme.loss_of_one(sigma, grid).self_compose(scheme.most_participations())


def composed_epsilon(scheme: "ComposedGroups", sigma: float, delta: float) -> float:
    """Returns the epsilon of composed rounds, for real normal numbers."""
    interval = _LARGEST_INTERVAL
    while True:
        found = float(composed_loss(scheme, sigma, interval).get_epsilon_for_delta(delta))
        needed = interval_for(found)
        if interval <= 2.0 * max(needed, _finest_interval(sigma)):
            return found
        interval = needed


def composed_curve(
    scheme: "ComposedGroups", sigma: float, num_coordinates: int
) -> tuple[tuple[float, float], ...]:
    """Returns pairs (epsilon, delta) that hold, by the privacy losses of a run."""
    try:
        failure = noise_failure.failure_probability(sigma / scheme.largest_move, num_coordinates)
    except TailError:
        return ()
    count = scheme.most_participations()
    failure += composition_rounding(count)
    spread = scheme.sampling_probability * math.sqrt(count) / sigma
    interval = min(max(_INTERVAL_OF_SPREAD * spread, _SMALLEST_INTERVAL), _LARGEST_INTERVAL)
    loss = composed_loss(scheme, sigma, interval)
    most = spread
    for _ in range(_MOST_DOUBLINGS):
        if loss.get_delta_for_epsilon(most) < _LEAST_DELTA_OF_CURVE:
            break
        most *= 2.0
    epsilons = np.linspace(0.0, most, _NUM_EPSILONS)
    deltas = (float(loss.get_delta_for_epsilon(float(epsilon))) for epsilon in epsilons)
    return tuple(
        (float(epsilon), min(delta + failure, 1.0))
        for epsilon, delta in zip(epsilons, deltas, strict=True)
    )


def curve_of_epsilons(
    scheme: "CyclicGroups", sigma: float, num_coordinates: int
) -> tuple[tuple[float, float], ...]:
    """Returns pairs (epsilon, delta) that hold, by the epsilons of some deltas."""
    pairs = []
    for delta in _DELTAS:
        try:
            epsilon = epsilon_of_groups(scheme, sigma, delta, num_coordinates)
        except TailError:
            continue
        pairs.append((epsilon, delta))
    return tuple(pairs)
