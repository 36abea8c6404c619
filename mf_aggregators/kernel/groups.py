"""Epsilon of a run that draws from one group of the clients after the other.

``draws_of_clients`` says why a run composes from queries to one group. For Poisson, truncated
Poisson and fixed-size sampling these are composed rounds (``batches``); for random allocation,
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
"""

import math

import numpy as np
from dp_accounting.pld import common as pld_common
from dp_accounting.pld import privacy_loss_distribution
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

from mf_aggregators.kernel import batches, cycles, draws_of_clients, gaussian, validation
from mf_aggregators.kernel import losses as grids
from mf_aggregators.kernel.draws_of_clients import (
    AllParticipations,
    FixedSize,
    Groups,
    Poisson,
    RandomAllocation,
    Shuffling,
    TruncatedPoisson,
)
from mf_aggregators.kernel.gaussian import DEFAULT_NUM_COORDINATES, TailError, underflow_is_zero
from mf_aggregators.kernel.losses import composition_rounding, epsilon_of

# With less noise nothing is amplified: a client that is drawn shows itself, and the grid of its
# privacy losses grows without bound.
LEAST_NOISE_MULTIPLIER = 0.1
# With more noise an attacker guesses, with or without sampling.
LARGEST_NOISE_MULTIPLIER = 1e8

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
    found, refused = unamplified(draws.together, sigma, delta, num_coordinates)
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


def unamplified(
    together: AllParticipations, sigma: float, delta: float, num_coordinates: int
) -> tuple[float, TailError | None]:
    """Returns the epsilon against an adversary who knows all draws, or infinity and the error.

    Args:
      together: All participations of a client.
      sigma: The noise multiplier, relative to the largest column norm of C.
      delta: Above 0 and below 1.
      num_coordinates: Parameters times rounds.
    """
    try:
        found = gaussian.epsilon(
            sigma / together.norm,
            delta,
            num_coordinates=num_coordinates,
            disjoint_participations=together.disjoint,
        )
    except TailError as error:
        return math.inf, error
    return found, None


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
        return grids.of_divergences(interval, *batches.poisson_divergences(sigma, q, epsilons))
    epsilons = grids.grid_to(most, interval)
    if isinstance(draws, FixedSize):
        with_client = batches.divergence_with(sigma, q, epsilons)
        without_client = batches.divergence_without(sigma, q, epsilons)
        return grids.of_divergences(interval, with_client, without_client)
    # A group has one of two sizes. No client's divergences are above the larger ones.
    smaller, rest = divmod(draws.population, draws.num_bands)
    found = np.max(
        [
            batches.truncated_divergences(sigma, q, size, draws.largest_batch, epsilons)
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
