"""Noise multipliers for a target, and unamplified runs as events of dp-accounting.

No guarantee rests on these: :mod:`mf_aggregators.kernel.gaussian` has the epsilon of a noise
multiplier, which decides.
"""

import functools
import math
from collections.abc import Callable

import scipy.optimize
from dp_accounting import dp_event

from mf_aggregators.kernel import gaussian, losses, numbers
from mf_aggregators.kernel.draws_of_clients import (
    LEAST_NOISE_MULTIPLIER,
    Groups,
    RandomAllocation,
    Shuffling,
)
from mf_aggregators.kernel.gaussian import (
    DEFAULT_NUM_COORDINATES,
    AllParticipations,
    TailError,
    underflow_is_zero,
)

# The search is between these; outside, epsilon is far from any use.
_SMALLEST_NOISE_MULTIPLIER = 1e-3
_LARGEST_NOISE_MULTIPLIER = 1e8
# The first search for a noise multiplier of groups is coarse: the factor of its intervals, and the
# relative step of random allocation. The second search begins with a small factor.
_COARSER, _COARSE_STEP, _FINE_STEP = 10.0, 0.1, 1.001
# The excess, in a search, of a noise multiplier that cannot be accounted for, and the smallest
# epsilon of which a logarithm is taken.
_REFUSED, _LEAST_EPSILON = 1e3, 1e-300
# A noise multiplier may lose this part of itself on its way to the place of its epsilon.
_ROUNDING = 1e-14
# A factor to a noise multiplier that is accounted for.
_JUST_ABOVE = 1.0 + 1e-12


def noise_multiplier(
    epsilon: float,
    delta: float,
    *,
    num_coordinates: int = DEFAULT_NUM_COORDINATES,
    disjoint_participations: int = 1,
) -> float:
    """Returns the smallest noise multiplier for a target, the inverse of :func:`epsilon`.

    Args:
      epsilon: Above 0.
      delta: Above 0 and below 1.
      num_coordinates: As in :func:`epsilon`.
      disjoint_participations: As there.

    Returns:
      The noise multiplier, relative to the sensitivity of C under its participation
      schema. For a large epsilon it is the smallest for which an epsilon is stated, and that
      one is smaller.

    Raises:
      TailError: If delta is too small for so many numbers: a ValueError.
      ValueError: If an argument is out of its range, or no noise multiplier between
        0.001 and 10^8 gives the target.

    Example:
      >>> import mf_aggregators as mfa
      >>> round(mfa.accounting.noise_multiplier(epsilon=8.0, delta=1e-6), 4)
      0.6529
    """
    return _noise_multiplier(
        numbers.positive_number(epsilon, "epsilon"),
        numbers.delta(delta),
        numbers.positive_integer(num_coordinates, "num_coordinates"),
        numbers.positive_integer(disjoint_participations, "disjoint_participations"),
    )


# Plans and comparisons ask for the same targets again and again.
@functools.lru_cache(maxsize=256)
@underflow_is_zero
def _noise_multiplier(
    target: float, delta: float, num_coordinates: int, disjoint_participations: int
) -> float:
    def excess(sigma: float) -> float:
        try:
            # The stated epsilon has to hold also for a noise multiplier that was rounded down. If
            # epsilon is tiny, rounding may make it larger at more noise.
            stated = max(
                gaussian.epsilon(
                    each,
                    delta,
                    num_coordinates=num_coordinates,
                    disjoint_participations=disjoint_participations,
                )
                for each in (sigma, sigma * (1.0 - _ROUNDING))
            )
        except TailError:
            return _REFUSED
        return math.log(max(stated, _LEAST_EPSILON) / target)

    spread = math.sqrt(disjoint_participations)
    # If delta is too small for any noise, that is the reason.
    gaussian.delta_left(delta, _LARGEST_NOISE_MULTIPLIER * spread, num_coordinates)
    least = gaussian.LEAST_NOISE_MULTIPLIER / spread * _JUST_ABOVE
    least = max(least, _SMALLEST_NOISE_MULTIPLIER)
    # A loss is 1 / 2 sigma^2 + z / sigma for a normal z, which is above this root next to never.
    root = math.sqrt(-2.0 * math.log(delta))
    enough = max(0.5 * (root + math.sqrt(root**2 + 2.0 * target)) / target, least)
    if enough > _LARGEST_NOISE_MULTIPLIER or excess(enough) > 0.0:
        enough = _LARGEST_NOISE_MULTIPLIER
    is_too_large = gaussian.exact_epsilon(_SMALLEST_NOISE_MULTIPLIER, delta) <= target
    if is_too_large or excess(enough) > 0.0:
        raise ValueError(
            f"no noise multiplier between {_SMALLEST_NOISE_MULTIPLIER:g} and "
            f"{_LARGEST_NOISE_MULTIPLIER:g} gives epsilon {target:g} at delta {delta:g}."
        )
    return least_noise(excess, enough, least, tolerance=1e-13)


def least_noise(
    excess: Callable[[float], float],
    enough: float,
    least: float,
    *,
    first_step: float = 1.5,
    largest_step: float = 2.5,
    tolerance: float = 5e-7,
) -> float:
    """Returns the least noise multiplier without an excess, by a search downwards.

    Args:
      excess: Of a noise multiplier: positive if it does not suffice. It falls with noise.
      enough: The largest noise multiplier, which is returned if a smaller one does not suffice.
      least: The smallest one that is tried.
      first_step: The first factor of the search, above 1. Factors grow.
      largest_step: The largest factor.
      tolerance: The relative error of the result, on the side of more noise.
    """

    @functools.cache
    def known(log_sigma: float) -> float:
        return excess(math.exp(log_sigma))

    if enough <= least:
        return enough
    last, high = math.log(least), math.log(enough)
    low, step = high, math.log(first_step)
    while low > last:
        low = max(last, low - step)
        if known(low) > 0.0:
            break
        high, step = low, min(2.0 * step, math.log(largest_step))
    else:
        return min(math.exp(high), enough)
    if high == math.log(enough) and excess(enough) > 0.0:
        return enough
    root = scipy.optimize.brentq(known, low, high, xtol=tolerance, rtol=1e-15)
    step = tolerance
    while known(root) > 0.0:
        root, step = min(root + step, high), 2.0 * step
    return min(math.exp(root), enough)


def unamplified_noise_multiplier(
    together: AllParticipations, epsilon: float, delta: float
) -> float:
    """Returns the noise multiplier that suffices against an adversary who knows all draws.

    Args:
      together: All participations of a client.
      epsilon: Above 0.
      delta: Above 0 and below 1.

    Returns:
      The noise multiplier, relative to the largest column norm of C.
    """
    alone = noise_multiplier(epsilon, delta, disjoint_participations=together.disjoint)
    return alone * together.norm


@underflow_is_zero
def noise_multiplier_of_groups(draws: Groups, epsilon: float, delta: float) -> float:
    """Returns the least noise multiplier for an epsilon of a run that draws from groups.

    The epsilon that is stated of it, with a grid of its own, is never above the target.

    Args:
      draws: How clients are drawn.
      epsilon: Above 0.
      delta: Below 1, and at least 1e-12 and 4e-15 times the compositions.

    Returns:
      The noise multiplier, relative to the largest column norm of C.

    Raises:
      ValueError: If delta is out of its range, or no noise multiplier gives the target.
    """
    losses.safe_delta(delta, draws.most_participations)
    enough = unamplified_noise_multiplier(draws.together, epsilon, delta)
    # Less noise has no amplified epsilon.
    least = max(LEAST_NOISE_MULTIPLIER, draws.largest_move * gaussian.LEAST_NOISE_MULTIPLIER)
    least *= _JUST_ABOVE

    @functools.cache
    def excess(sigma: float, resolution: float | None = None) -> float:
        try:
            if resolution is None:
                stated = losses.epsilon(draws, sigma, delta)
            else:
                left = losses.delta_left(draws, sigma, delta, DEFAULT_NUM_COORDINATES)
                composed = losses.composed_losses(draws, sigma, resolution)  # type: ignore[arg-type]
                stated = losses.epsilon_of(composed, left)
        except TailError:
            return _REFUSED
        return math.log(max(stated, _LEAST_EPSILON) / epsilon)

    if isinstance(draws, Shuffling):
        return least_noise(excess, enough, least)
    # Fine grids take time: the coarse one comes first.
    is_cycle = isinstance(draws, RandomAllocation)
    coarse = _COARSE_STEP if is_cycle else _COARSER * losses.interval_for(epsilon)
    near = least_noise(functools.partial(excess, resolution=coarse), enough, least, tolerance=1e-4)
    found, step = least_noise(excess, near, least, first_step=_FINE_STEP), 1e-6
    while found < enough and excess(found) > 0.0:
        found, step = min(found * (1.0 + step), enough), 2.0 * step
    return found


def noise_multiplier_of_zcdp(rho: float) -> float:
    """Returns the noise multiplier of an unamplified run of a rho, the inverse of zcdp_rho.

    Args:
      rho: Above 0.

    Returns:
      1 / sqrt(2 rho), rounded so that ``zcdp_rho`` is not above rho; infinity for a rho so small
      that no float is large enough.

    Raises:
      ValueError: If rho is not above zero and finite.
    """
    sigma = math.sqrt(0.5 / numbers.positive_number(rho, "rho"))
    while math.isfinite(sigma) and gaussian.zcdp_rho(sigma) > rho:
        sigma = math.nextafter(sigma, math.inf)
    return sigma


def event(noise_multiplier: float) -> dp_event.DpEvent:
    """Returns an unamplified run as an event of dp-accounting, to be composed with others.

    Args:
      noise_multiplier: Relative to the sensitivity of C under its participation schema.

    Returns:
      A Gaussian event: one for the whole run, whatever its matrix and rounds. Its
      adjacency is zero-out, for which accountants of adding or removing one client, and
      of ``REPLACE_SPECIAL``, are right.

    Raises:
      ValueError: If the noise multiplier is negative or not finite.
    """
    return dp_event.GaussianDpEvent(
        numbers.non_negative_number(noise_multiplier, "noise_multiplier")
    )
