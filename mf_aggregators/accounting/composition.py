"""Privacy accounting of several runs together, and what composition by Fourier transforms loses."""

import math
from collections.abc import Iterable

from dp_accounting import dp_event as dp_events
from dp_accounting.pld import pld_privacy_accountant

from mf_aggregators import validation
from mf_aggregators.accounting import gaussian
from mf_aggregators.accounting.gaussian import DEFAULT_NUM_COORDINATES

# dp-accounting composes by Fourier transforms, whose rounding is not on the side of privacy:
# masses are off by about 2e-16 for each composition, summed over the grid. Ten times that is
# taken off delta, and a delta that is not well above it is refused.
_ROUNDING_PER_COMPOSITION = 2e-15
_SMALLEST_DELTA = 1e-12


def composed_epsilon(
    events: Iterable[dp_events.DpEvent],
    delta: float,
    *,
    num_coordinates: int = DEFAULT_NUM_COORDINATES,
) -> float:
    """Returns the epsilon of several runs together, for clients who may be in all of them.

    Args:
      events: What :func:`event` and ``SamplingScheme.event`` returned, or any other event
        that dp-accounting's privacy loss distributions know; all Gaussian ones are taken
        for ones whose noise is drawn here.
      delta: Below 1, and at least 1e-12 and 4e-15 times the compositions.
      num_coordinates: Parameters times rounds, of the largest run.

    Returns:
      The epsilon of the composition; infinity if one event has no noise.

    Raises:
      TailError: As in ``gaussian.epsilon``.
      ValueError: If delta is out of its range, or an event cannot be composed so.
    """
    composed = dp_events.ComposedDpEvent(list(events))
    compositions = _compositions(composed)
    safe_delta(delta, compositions)
    if not pld_privacy_accountant.PLDAccountant().supports(composed):
        raise ValueError(
            f"{composed} cannot be composed by privacy loss distributions; compose such events "
            "with dp_accounting.rdp.RdpAccountant."
        )
    # Before losses are composed, which takes long for little noise.
    smallest = _smallest_noise_multiplier(composed)
    if smallest < math.inf:
        # Each part is compared with the whole of delta.
        delta = gaussian.delta_left(delta, smallest, _runs(composed) * num_coordinates)
    delta -= composition_rounding(compositions)
    accountant = pld_privacy_accountant.PLDAccountant().compose(composed)
    return float(accountant.get_epsilon(delta))


def _smallest_noise_multiplier(event: dp_events.DpEvent) -> float:
    """Of the Gaussian events that have noise; infinity if there are none."""
    if isinstance(event, dp_events.ComposedDpEvent):
        return min(map(_smallest_noise_multiplier, event.events), default=math.inf)
    if isinstance(event, dp_events.SelfComposedDpEvent | dp_events.PoissonSampledDpEvent):
        return _smallest_noise_multiplier(event.event)
    if isinstance(event, dp_events.GaussianDpEvent) and event.noise_multiplier > 0.0:
        return float(event.noise_multiplier)
    return math.inf


def _runs(event: dp_events.DpEvent) -> int:
    """How many runs an event is of; the rounds of a sampled one are composed in a run."""
    if isinstance(event, dp_events.ComposedDpEvent):
        return sum(map(_runs, event.events))
    if isinstance(event, dp_events.SelfComposedDpEvent):
        is_sampled = isinstance(event.event, dp_events.PoissonSampledDpEvent)
        return 1 if is_sampled else int(event.count) * _runs(event.event)
    return 1


def _compositions(event: dp_events.DpEvent) -> int:
    """How many mechanisms an event composes."""
    if isinstance(event, dp_events.SelfComposedDpEvent):
        return int(event.count) * _compositions(event.event)
    if isinstance(event, dp_events.ComposedDpEvent):
        return sum(_compositions(each) for each in event.events)
    return 1


def safe_delta(delta: float, compositions: int) -> float:
    """Returns delta less what composition by Fourier transforms may lose to rounding.

    Args:
      delta: The delta of the guarantee.
      compositions: How many mechanisms are composed.

    Returns:
      A delta below the given one, for which epsilon is to be found.

    Raises:
      ValueError: If delta is not between 0 and 1, or so small that rounding is no small part
        of it.
    """
    delta = validation.delta(delta)
    rounding = composition_rounding(compositions)
    smallest = max(_SMALLEST_DELTA, 2.0 * rounding)
    if delta < smallest:
        raise ValueError(
            f"delta must be at least {smallest:.3g} for a composition of {compositions} "
            f"mechanisms, which is computed by Fourier transforms, found {delta:g}."
        )
    return delta - rounding


def composition_rounding(compositions: int) -> float:
    """Returns what of a delta composition by Fourier transforms may lose to rounding.

    Args:
      compositions: How many mechanisms are composed.
    """
    return _ROUNDING_PER_COMPOSITION * compositions
