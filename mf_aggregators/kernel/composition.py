"""The epsilon of several runs together, as events of dp-accounting.

Runs compose adaptively, and the product of pairs that dominate them dominates the composition
(``losses``), also for runs that are under way at the same time. :func:`composed_epsilon` computes
the epsilon of the product, for clients who may be in all runs.

Poisson sampling, truncated or not, batches of a fixed size and random allocation compose amplified.
Shuffled runs and those of clients who draw for themselves are Gaussian mechanisms here. A pair of
epsilon and delta that is proved of one of them composes as an :class:`EpsilonDeltaDpEvent`.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import TypeAlias, final

import numpy as np
from dp_accounting import dp_event as dp_events
from dp_accounting.pld import pld_privacy_accountant, privacy_loss_distribution
from dp_accounting.pld.common import DifferentialPrivacyParameters

from mf_aggregators.kernel import losses, numbers, sensitivity
from mf_aggregators.kernel.losses import SampledRun

# The rounding error of dp-accounting's connect-the-dots method, as a share of delta times the
# interval.
_ROUNDING_OF_DOTS = 1e-15
# Privacy losses are multiples of this number, the default of dp-accounting's accountants.
INTERVAL = 1e-4
# The largest epsilon of an (epsilon, delta) pair that is composed: a larger one has millions of
# losses, and no guarantee worth stating follows from it.
_LARGEST_EPSILON_OF_PAIR = 100.0

_WITH_NOISE = (dp_events.GaussianDpEvent, dp_events.LaplaceDpEvent)
_WITHOUT = (dp_events.NoOpDpEvent, dp_events.NonPrivateDpEvent)


@final
@dataclasses.dataclass(frozen=True)
class SampledRunDpEvent(dp_events.GaussianDpEvent):  # type: ignore[misc]
    """A run with drawn clients, as an event of dp-accounting.

    Accountants of dp-accounting see the Gaussian mechanism without amplification, which bounds the
    run. :func:`composed_epsilon` uses the run itself.

    Attributes:
      noise_multiplier: The noise multiplier of all participations of a client, against an adversary
        who knows their rounds.
      run: The run; None for nothing but the Gaussian mechanism.
    """

    noise_multiplier: float
    run: SampledRun | None = None


@final
@dataclasses.dataclass(frozen=True)
class EpsilonDeltaDpEvent(dp_events.DpEvent):  # type: ignore[misc]
    """A mechanism that is known to be (epsilon, delta)-DP for one pair, and no more.

    Use it when another program, of which only such a pair is known, saw the same clients.

    Neighbours differ in one client that is zeroed, added or removed, in both directions. The losses
    of this event dominate those of every (epsilon, delta)-DP mechanism (Kairouz, Oh and Viswanath,
    2015, Thm 3.3).

    Attributes:
      epsilon: At most 100.
      delta: At least 0 and below 1. A composition has no epsilon at a smaller delta.

    Raises:
      ValueError: If a number is out of its range.

    Example:
      >>> import mf_aggregators as mfa
      >>> other = mfa.accounting.EpsilonDeltaDpEvent(epsilon=1.0, delta=1e-7)
      >>> runs = [mfa.accounting.event(2.0), other]
      >>> round(mfa.accounting.composed_epsilon(runs, delta=1e-6), 3)
      3.232
    """

    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        numbers.set_checked(self, epsilon=numbers.epsilon)
        if self.delta != 0.0:
            numbers.set_checked(self, delta=numbers.delta)
        if not self.epsilon <= _LARGEST_EPSILON_OF_PAIR:
            most, found = _LARGEST_EPSILON_OF_PAIR, self.epsilon
            raise ValueError(f"a composed epsilon must be at most {most:g}, found {found:g}.")


_PLD: TypeAlias = privacy_loss_distribution.PrivacyLossDistribution
# A mechanism, the number of times that it is composed, and the number of runs that draw noise for
# it, which is smaller if the mechanism is one of several rounds of a run.
_Part: TypeAlias = tuple[dp_events.DpEvent, int, int]


@np.errstate(under="ignore")
def composed_epsilon(
    events: Iterable[dp_events.DpEvent],
    delta: float,
    *,
    num_coordinates: int = sensitivity.DEFAULT_NUM_COORDINATES,
) -> float:
    """Returns the epsilon of several runs together, for clients who may be in all of them.

    Use it when the same clients were in several runs.

    The epsilon holds if each event is true of its run, and if runs draw noise and clients
    independently: two samplers with one seed draw the same clients, and their runs together reveal
    more than the returned epsilon says.

    Args:
      events: What ``Mechanism.event`` and ``accounting.event`` returned, pairs of epsilon and
        delta, or Gaussian and Laplace events of dp-accounting, also with Poisson sampling, where a
        client is added or removed; all Gaussian ones are taken for ones whose noise is drawn here.
      delta: Below 1, and at least 1e-12 and 4e-15 times the compositions.
      num_coordinates: Parameters times rounds, of the largest run.

    Returns:
      The epsilon; infinity if one event has no noise. Runs from groups of clients are amplified,
      but for shuffled ones, unless all are better without.

    Raises:
      TailError: As in ``sensitivity.epsilon``.
      ValueError: If delta is out of its range or too small for so many compositions, or an event
        cannot be composed so.

    Example:
      >>> import mf_aggregators as mfa
      >>> runs = [mfa.accounting.event(noise_multiplier) for noise_multiplier in (1.0, 2.0)]
      >>> round(mfa.accounting.composed_epsilon(runs, delta=1e-6), 3)
      5.551
    """
    parts = list(_parts(dp_events.ComposedDpEvent(list(events)), 1, 1))
    coordinates = numbers.positive_integer(num_coordinates, "num_coordinates")
    runs = [(event.run, count) for event, count, _ in parts if hasattr(event, "run")]
    compositions = sum(count for _, count, _ in parts)
    compositions += sum(count * (run.draws.most_participations - 1) for run, count in runs)
    # This check comes before losses are composed, because little noise makes composing slow.
    smallest = min((_noise_of(event) for event, *_ in parts), default=1.0)
    num_numbers = max(sum(num_runs for *_, num_runs in parts), 1) * coordinates
    delta = sensitivity.delta_left(delta, min(smallest, 1.0), num_numbers, compositions)
    delta = numbers.delta(delta * (1.0 - _ROUNDING_OF_DOTS / INTERVAL * compositions), "delta left")
    found = math.inf
    if runs and all(run.noise_multiplier > 0.0 for run, _ in runs):
        amplified = {run for run, _ in runs if run.composes_amplified}
        found = _composed(parts, {run: run.losses(INTERVAL) for run in amplified}, delta)
        # If the sampled runs alone, without amplification, have at least this epsilon, the
        # composition of all events without amplification cannot have a smaller one.
        squares = sum(count * run.noise_multiplier**-2 for run, count in runs)
        if squares > 0.0 and found <= sensitivity.exact_epsilon(squares**-0.5, delta):
            return found
    return min(found, _composed(parts, {}, delta))


def _composed(parts: list[_Part], amplified: dict[SampledRun | None, _PLD], delta: float) -> float:
    """Returns the epsilon of all parts; a run without given losses is a Gaussian mechanism."""
    accountant = pld_privacy_accountant.PLDAccountant(value_discretization_interval=INTERVAL)
    for event, count, _ in parts:
        known = amplified.get(getattr(event, "run", None))
        if isinstance(event, EpsilonDeltaDpEvent):
            pair = DifferentialPrivacyParameters(event.epsilon, event.delta)
            known = privacy_loss_distribution.from_privacy_parameters(pair, INTERVAL)
        if known is None:
            accountant.compose(event, count)
        else:
            accountant._pld = accountant._pld.compose(known.self_compose(count))
    if accountant._contains_non_dp_event:
        return math.inf
    return losses.epsilon_of(accountant._pld, delta)


def _parts(event: dp_events.DpEvent, count: int, num_runs: int) -> Iterator[_Part]:
    """Yields the parts of an event that is composed ``count`` times, in ``num_runs`` runs."""
    if isinstance(event, dp_events.ComposedDpEvent):
        for each in event.events:
            yield from _parts(each, count, num_runs)
    elif isinstance(event, dp_events.SelfComposedDpEvent):
        of_event = f"the count of a {type(event).__name__}"
        times = numbers.positive_integer(event.count, of_event)
        # All rounds of a Poisson-sampled mechanism belong to one run.
        is_run = isinstance(event.event, dp_events.PoissonSampledDpEvent)
        yield from _parts(event.event, count * times, num_runs if is_run else num_runs * times)
    else:
        yield _checked(event), count, num_runs


def _checked(event: dp_events.DpEvent) -> dp_events.DpEvent:
    """Returns the mechanism made anew, with no more noise than dp-accounting can compute with.

    Raises:
      ValueError: If it is of another class, or a number is out of its range.
    """
    kind = type(event)
    if kind is SampledRunDpEvent and event.run is None:
        kind = dp_events.GaussianDpEvent
    elif kind is SampledRunDpEvent and type(event.run) is SampledRun:
        # The event's own noise multiplier is ignored: the run determines it.
        run = dataclasses.replace(event.run)
        largest = sensitivity.LARGEST_NOISE_MULTIPLIER_ACCOUNTED
        return SampledRunDpEvent(min(run.noise_multiplier, largest), run)
    if kind is EpsilonDeltaDpEvent:
        return dataclasses.replace(event)
    if kind in _WITHOUT:
        return event
    if kind in _WITH_NOISE:
        name = f"the noise_multiplier of a {kind.__name__}"
        noise = numbers.non_negative_number(event.noise_multiplier, name)
        return kind(min(noise, sensitivity.LARGEST_NOISE_MULTIPLIER_ACCOUNTED))
    if kind is dp_events.PoissonSampledDpEvent and type(event.event) in _WITH_NOISE:
        name = f"the sampling_probability of a {kind.__name__}"
        share = numbers.fraction(event.sampling_probability, name)
        return kind(share, _checked(event.event))
    raise ValueError(
        f"{numbers.shown(event)} cannot be composed for clients that are added or removed, or "
        "whose updates are zeroed: give events of Mechanism.event, Gaussian and Laplace events, "
        "also with Poisson sampling, or an EpsilonDeltaDpEvent."
    )


def _noise_of(event: dp_events.DpEvent) -> float:
    """Returns the noise multiplier of the largest shift of one row; infinity without noise."""
    if hasattr(event, "run"):
        return event.run.part_noise_multiplier or math.inf
    inner = event.event if isinstance(event, dp_events.PoissonSampledDpEvent) else event
    is_gaussian = isinstance(inner, dp_events.GaussianDpEvent)
    return (inner.noise_multiplier if is_gaussian else 0.0) or math.inf
