"""Noise multipliers for a target, conversions of approximate zCDP, and events of dp-accounting.

No guarantee rests on these: :mod:`mf_aggregators.kernel.gaussian` has the epsilon of a noise
multiplier, which decides.
"""

import functools
import math
from collections.abc import Callable

import scipy.optimize
from dp_accounting import dp_event
from dp_accounting.pld.privacy_loss_mechanism import GaussianPrivacyLoss

from mf_aggregators.kernel import gaussian, losses, numbers
from mf_aggregators.kernel.draws_of_clients import (
    LEAST_NOISE_MULTIPLIER,
    AllParticipations,
    Groups,
    RandomAllocation,
    Shuffling,
)
from mf_aggregators.kernel.gaussian import DEFAULT_NUM_COORDINATES, TailError, underflow_is_zero

# The search is between these; outside, epsilon is far from any use.
_SMALLEST_NOISE_MULTIPLIER = 1e-3
_LARGEST_NOISE_MULTIPLIER = 1e8
# The first search for a noise multiplier of groups is coarse: the factor of its intervals, and the
# relative step of random allocation.
_COARSER, _COARSE_STEP = 10.0, 0.1
# The first relative step to a larger noise multiplier if the stated epsilon is too large.
_RELATIVE_STEP = 1e-6
# The excess, in a search, of a noise multiplier that cannot be accounted for.
_REFUSED = 1e6
# A noise multiplier may lose this part of itself on its way to the place of its epsilon.
_ROUNDING = 1e-14


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
    # The squared norms of disjoint participations add up.
    spread = math.sqrt(disjoint_participations)

    def exact_excess(log_multiplier: float) -> float:
        return float(
            GaussianPrivacyLoss(math.exp(log_multiplier)).get_delta_for_epsilon(target) - delta
        )

    def excess(log_multiplier: float) -> float:
        sigma = math.exp(log_multiplier)
        try:
            left = gaussian.delta_left(delta, sigma * spread, num_coordinates)
        except TailError:
            return 1.0
        return float(GaussianPrivacyLoss(sigma).get_delta_for_epsilon(target) - left)

    def found(log_multiplier: float) -> float:
        try:
            # The epsilon that is stated, with its margin, has to hold also for a noise multiplier
            # that was rounded down. If epsilon is tiny, rounding may make it larger at more noise.
            sigma = math.exp(log_multiplier)
            return max(
                gaussian.epsilon(
                    each,
                    delta,
                    num_coordinates=num_coordinates,
                    disjoint_participations=disjoint_participations,
                )
                for each in (sigma, sigma * (1.0 - _ROUNDING))
            )
        except TailError:
            return math.inf

    low, high = math.log(_SMALLEST_NOISE_MULTIPLIER), math.log(_LARGEST_NOISE_MULTIPLIER)
    if exact_excess(low) <= 0.0 or exact_excess(high) > 0.0 or found(high) > target:
        # If delta is too small for any noise, that is the reason.
        gaussian.delta_left(delta, _LARGEST_NOISE_MULTIPLIER * spread, num_coordinates)
        raise ValueError(
            f"no noise multiplier between {_SMALLEST_NOISE_MULTIPLIER:g} and "
            f"{_LARGEST_NOISE_MULTIPLIER:g} gives epsilon {target:g} at delta {delta:g}."
        )
    root = scipy.optimize.brentq(excess, low, high, xtol=1e-13, rtol=1e-13) + 1e-11
    # Where epsilon is tiny, the curve itself carries rounding: err on the side of noise.
    if target * (1.0 - 1e-6) <= found(root + 1e-10) <= target:
        return math.exp(root + 1e-10)
    # For a large epsilon, none is stated at so little noise: find the least noise that has one.
    below = scipy.optimize.brentq(exact_excess, low, high, xtol=1e-13, rtol=1e-13)
    root, step = below, 1e-9
    while found(root) > target:
        below, root, step = root, min(root + step, high), 4.0 * step
    while root - below > 1e-9:
        middle = 0.5 * (below + root)
        below, root = (below, middle) if found(middle) <= target else (middle, root)
    return math.exp(root)


def unamplified_noise_multiplier(
    together: AllParticipations, epsilon: float, delta: float, num_coordinates: int
) -> float:
    """Returns the noise multiplier that suffices against an adversary who knows all draws.

    Args:
      together: All participations of a client.
      epsilon: Above 0.
      delta: Above 0 and below 1.
      num_coordinates: As in :func:`epsilon`.

    Returns:
      The noise multiplier, relative to the largest column norm of C.
    """
    alone = noise_multiplier(
        epsilon,
        delta,
        num_coordinates=num_coordinates,
        disjoint_participations=together.disjoint,
    )
    return alone * together.norm


@underflow_is_zero
def noise_multiplier_of_groups(
    draws: Groups, epsilon: float, delta: float, num_coordinates: int = DEFAULT_NUM_COORDINATES
) -> float:
    """Returns the least noise multiplier for an epsilon of a run that draws from losses.

    The epsilon that is stated of it, with a grid of its own, is never above the target.

    Args:
      draws: How clients are drawn.
      epsilon: Above 0.
      delta: Below 1, and at least 1e-12 and 4e-15 times the compositions.
      num_coordinates: As in :func:`epsilon`.

    Returns:
      The noise multiplier, relative to the largest column norm of C.

    Raises:
      ValueError: If delta is out of its range, or no noise multiplier gives the target.
    """
    losses.safe_delta(delta, draws.most_participations)
    # A noise multiplier that suffices without amplification always suffices.
    enough = unamplified_noise_multiplier(draws.together, epsilon, delta, num_coordinates)
    found = _searched(draws, epsilon, delta, enough, num_coordinates)

    def is_met(sigma: float) -> bool:
        try:
            stated = losses.epsilon(draws, sigma, delta, num_coordinates=num_coordinates)
        except TailError:
            return False
        return stated <= epsilon

    step = _RELATIVE_STEP
    while found < enough and not is_met(found):
        found = min(found * (1.0 + step), enough)
        step *= 2.0
    return found


def _searched(
    draws: Groups, target: float, delta: float, enough: float, num_coordinates: int
) -> float:
    """A noise multiplier that may suffice, at most one that does without amplification."""
    smallest = functools.partial(_smallest, draws, delta, num_coordinates)
    if isinstance(draws, Shuffling):

        def excess(sigma: float, left: float) -> float:
            # Infinite values have no place in a search for a root.
            return min(losses.amplified_epsilon(draws, sigma, left), _REFUSED) - target

        return smallest(excess, enough, 1.5)
    if isinstance(draws, RandomAllocation):
        coarse, fine = _COARSE_STEP, losses.RELATIVE_STEP
    elif draws.sampling_probability >= 1.0:
        return enough
    else:
        # Fine intervals take time if there is little noise: they only polish.
        fine = losses.interval_for(target)
        coarse = _COARSER * fine

    def log_excess(resolution: float, sigma: float, left: float) -> float:
        composed = losses.composed_losses(draws, sigma, resolution)
        return math.log(max(losses.delta_of(composed, target), 1e-30) / left)

    near = smallest(functools.partial(log_excess, coarse), enough, 1.5)
    return smallest(functools.partial(log_excess, fine), near, 1.001)


def _smallest(
    draws: Groups,
    delta: float,
    num_coordinates: int,
    excess: Callable[[float, float], float],
    enough: float,
    factor: float,
) -> float:
    """Returns the least noise multiplier without an excess, at most ``enough``.

    Args:
      draws: How clients are drawn.
      delta: The delta of the guarantee.
      num_coordinates: Parameters times rounds.
      excess: Of a noise multiplier, and of what is left of delta; it falls with noise.
      enough: What is returned if the excess is positive there already, or it is below the least
        noise multiplier.
      factor: The first steps of the search, above 1.

    Returns:
      The noise multiplier, to a relative error of 1e-6 on the side of more noise.
    """

    @functools.cache
    def known(log_sigma: float) -> float:
        sigma = math.exp(log_sigma)
        try:
            left = losses.delta_left(draws, sigma, delta, num_coordinates)
        except TailError:
            return _REFUSED
        return excess(sigma, left)

    # Less noise has no amplified epsilon: a search across this limit would creep up to it.
    least_accounted = max(
        LEAST_NOISE_MULTIPLIER, draws.largest_move * gaussian.LEAST_NOISE_MULTIPLIER
    )
    least, high = math.log(least_accounted * (1.0 + 1e-12)), math.log(enough)
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


def epsilon_of_zcdp(
    rho: float,
    delta: float,
    *,
    num_coordinates: int = DEFAULT_NUM_COORDINATES,
    zcdp_delta: float | None = None,
) -> float:
    """Returns the epsilon of an unamplified run that is (rho, delta0)-approximate zCDP.

    But for delta0, such a run is a Gaussian mechanism. So this is its own epsilon, at what delta0
    leaves of delta, and not the larger one that holds for everything that is approximate zCDP.

    Args:
      rho: Above 0.
      delta: Above 0 and below 1.
      num_coordinates: As in :func:`epsilon`.
      zcdp_delta: The delta0, at least that of ``num_coordinates``, which is charged in any case;
        None for that one.

    Returns:
      An epsilon >= 0.

    Raises:
      ValueError: As :func:`epsilon` does, or if delta0 leaves nothing of delta.
    """
    sigma = noise_multiplier_of_zcdp(rho)
    delta = numbers.delta(delta)
    left = gaussian.delta_left(delta, sigma, num_coordinates)
    if zcdp_delta is not None:
        left = min(left, delta - numbers.non_negative_number(zcdp_delta, "zcdp_delta"))
        if left <= 0.0:
            raise ValueError(
                f"a zcdp_delta of {zcdp_delta:g} leaves nothing of delta, {delta:g}: use a larger "
                "delta."
            )
    return gaussian.exact_epsilon(sigma, left)


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
