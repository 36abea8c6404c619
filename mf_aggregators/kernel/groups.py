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

import functools
import math
from collections.abc import Callable

import numpy as np
from dp_accounting.pld import common as pld_common
from dp_accounting.pld import privacy_loss_distribution
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

from mf_aggregators.kernel import batches, cycles, draws_of_clients, gaussian, validation
from mf_aggregators.kernel.arrays import underflow_is_zero
from mf_aggregators.kernel.draws_of_clients import (
    FixedSize,
    Groups,
    Poisson,
    RandomAllocation,
    Shuffling,
    TruncatedPoisson,
)
from mf_aggregators.kernel.gaussian import DEFAULT_NUM_COORDINATES, TailError
from mf_aggregators.kernel.losses import (
    Approximation,
    composition_rounding,
    connected_losses,
    epsilon_of,
    gaussian_losses,
    of_dp_accounting,
    safe_delta,
    steps_to,
)

# With less noise nothing is amplified: a client that is drawn shows itself, and the grid of its
# privacy losses grows without bound.
LEAST_NOISE_MULTIPLIER = 0.1
# With more noise an attacker guesses, whatever the sampling.
LARGEST_NOISE_MULTIPLIER = 1e8

# Privacy losses are rounded to a grid of this interval times epsilon, within bounds. The rounding
# errs on the side of privacy.
_RELATIVE_INTERVAL = 1e-4
_LARGEST_INTERVAL, _SMALLEST_INTERVAL = 1e-3, 1e-7
# The grid has no more points than this, however fine an interval is asked for.
_MOST_POINTS = 500_000
# Points of a grid of losses of shuffling, and its standard deviations beyond the mean.
_POINTS, _DEVIATIONS = 600, 8.0
# Points of the grid of local deltas over which the bound of shuffling is minimised.
_LOCAL_DELTAS = 24

# Deltas at which the curve of shuffling is computed.
_DELTAS = tuple(float(delta) for delta in np.geomspace(1e-9, 0.3, 8))
# Epsilons of other curves, up to where delta is next to nothing.
_NUM_EPSILONS = 120
_LEAST_DELTA_OF_CURVE = 1e-11
_MOST_DOUBLINGS = 24
# The grid of losses, relative to the spread of the sum of all losses.
_INTERVAL_OF_SPREAD = 5e-3


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
    draws = draws_of_clients.check(draws)
    sigma = validation.non_negative_number(sigma, "sigma")
    safe_delta(delta, draws.most_participations)
    together, refused = draws.together, None
    try:
        found = gaussian.epsilon(
            sigma / together.norm,
            delta,
            num_coordinates=num_coordinates,
            disjoint_participations=together.disjoint,
        )
    except TailError as error:
        found, refused = math.inf, error
    if found > 0.0 and sigma >= LEAST_NOISE_MULTIPLIER:
        try:
            left = delta_left(draws, sigma, delta, num_coordinates)
            found = min(found, amplified_epsilon(draws, sigma, left))
        except TailError:
            # Too little of delta is left.
            pass
    # A client that is seldom drawn seldom shows: the amplified epsilon may exist all the same.
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
        losses = composed_losses(draws, sigma, cycles.RELATIVE_STEP)
        return float(losses.get_epsilon_for_delta(delta))
    interval = _LARGEST_INTERVAL
    while True:
        found = float(composed_losses(draws, sigma, interval).get_epsilon_for_delta(delta))
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
    probability = draws.sampling_probability
    if isinstance(draws, Poisson):
        return batches.poisson_losses(sigma, probability, interval)
    if isinstance(draws, FixedSize):
        return batches.fixed_size_losses(sigma, probability, interval)
    smaller, rest = divmod(draws.population, draws.num_bands)
    sizes = {smaller, smaller + min(rest, 1)}
    return batches.truncated_losses(sigma, probability, sizes, draws.largest_batch, interval)


@underflow_is_zero
def losses(draws: Groups, sigma: float, approximation: Approximation) -> PrivacyLossDistribution:
    """Returns the privacy losses of a run for real normal numbers, to be composed with others.

    Losses of shuffling follow from the pairs of :func:`curve` and from the Gaussian mechanism
    without amplification.

    Args:
      draws: How clients are drawn.
      sigma: The noise multiplier, relative to the largest column norm of C; at least 0.1.
      approximation: The rounding of losses.

    Returns:
      Losses on the grid of the approximation, whose parts are dp-accounting's ``DensePLDPmf``.

    Raises:
      TypeError: If the draws are none of ``draws_of_clients``.
      ValueError: If losses from below are asked for and none are known.
    """
    draws, interval = draws_of_clients.check(draws), approximation.interval
    most = draws.most_participations
    if isinstance(draws, Poisson | FixedSize | TruncatedPoisson):
        if approximation.is_pessimistic:
            found = losses_of_round(draws, sigma, interval)
        elif isinstance(draws, Poisson):
            found = batches.poisson_losses_below(sigma, draws.sampling_probability, interval)
        elif isinstance(draws, FixedSize):
            found = batches.fixed_size_losses_below(sigma, draws.sampling_probability, interval)
        else:
            raise nothing_from_below(draws)
        return of_dp_accounting(found if most == 1 else found.self_compose(most))
    if not approximation.is_pessimistic:
        raise nothing_from_below(draws)
    if isinstance(draws, RandomAllocation):
        # A finer grid than they need takes long: some multiple of the interval.
        step = cycles.step_of_grid(sigma, draws.rounds_of_cycle)
        multiple = max(math.floor(step / interval), 1)
        found = cycles.losses_of_cycles(
            draws.rounds_of_cycle, draws.rounds_of_group, sigma, multiple * interval
        )
        finer = (
            cycles.losses_on_finer_grid(each, multiple, interval)
            for each in (found._pmf_remove, found._pmf_add)
        )
        return of_dp_accounting(PrivacyLossDistribution(*finer))
    alone = sigma / draws.together.norm
    pairs = curve(draws, sigma, DEFAULT_NUM_COORDINATES)
    if not pairs:
        return gaussian_losses(alone, interval)
    steps = steps_to(0.5 / alone**2 + _DEVIATIONS / alone, interval, _POINTS)
    bounds = gaussian.exact_deltas(alone, steps * interval)
    for least, delta in pairs:
        holds = steps * interval >= least
        bounds[holds] = np.minimum(bounds[holds], delta)
    return connected_losses(interval, steps, bounds, bounds)


def nothing_from_below(draws: object) -> ValueError:
    """Returns the error that nothing bounds the privacy losses of a run from below."""
    return ValueError(
        f"nothing bounds the privacy losses of {type(draws).__name__} from below here: ask for "
        "pessimistic ones."
    )


def interval_for(epsilon: float) -> float:
    """Returns the interval of the grid of losses for an epsilon."""
    return min(_LARGEST_INTERVAL, max(_SMALLEST_INTERVAL, _RELATIVE_INTERVAL * epsilon))


# Statements ask for the same curve again and again.
@functools.lru_cache(maxsize=64)
@underflow_is_zero
def curve(draws: Groups, sigma: float, num_coordinates: int) -> tuple[tuple[float, float], ...]:
    """Returns pairs (epsilon, delta) that hold.

    Between pairs nothing is known: with a hundred of them, of deltas from 1 to 1e-12, an attacker
    that they allow is close to the true one, with a dozen it is not. Deltas include what integers
    cost (``gaussian.failure_probability``).

    Args:
      draws: How clients are drawn.
      sigma: The noise multiplier, relative to the largest column norm of C.
      num_coordinates: Parameters times rounds.

    Returns:
      The pairs; none for less noise than is amplified.
    """
    draws = draws_of_clients.check(draws)
    if sigma < LEAST_NOISE_MULTIPLIER:
        return ()
    if isinstance(draws, Shuffling):
        pairs = []
        for delta in _DELTAS:
            try:
                found = epsilon(draws, sigma, delta, num_coordinates=num_coordinates)
            except TailError:
                continue
            pairs.append((found, delta))
        return tuple(pairs)
    cycles_or_rounds = draws.most_participations
    if isinstance(draws, RandomAllocation):
        spread = math.sqrt(cycles_or_rounds / draws.rounds_of_cycle) / sigma
        resolution = cycles.RELATIVE_STEP
    else:
        spread = draws.sampling_probability * math.sqrt(cycles_or_rounds) / sigma
        resolution = min(max(_INTERVAL_OF_SPREAD * spread, _SMALLEST_INTERVAL), _LARGEST_INTERVAL)
    losses = functools.partial(composed_losses, draws, sigma, resolution)
    return _pairs_of(draws, losses, sigma, spread, num_coordinates)


def _pairs_of(
    draws: Groups,
    losses: Callable[[], PrivacyLossDistribution],
    sigma: float,
    spread: float,
    num_coordinates: int,
) -> tuple[tuple[float, float], ...]:
    """The pairs (epsilon, delta) of losses whose standard deviation is about ``spread``."""
    try:
        failure = gaussian.failure_probability(sigma / draws.largest_move, num_coordinates)
    except TailError:
        return ()
    failure += composition_rounding(draws.most_participations)
    loss, most = losses(), spread
    for _ in range(_MOST_DOUBLINGS):
        if loss.get_delta_for_epsilon(most) < _LEAST_DELTA_OF_CURVE:
            break
        most *= 2.0
    return tuple(
        (each, min(float(loss.get_delta_for_epsilon(each)) + failure, 1.0))
        for each in map(float, np.linspace(0.0, most, _NUM_EPSILONS))
    )


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
