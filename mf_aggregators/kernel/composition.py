"""Privacy accounting of several runs together: adaptive composition of dominating losses.

Runs compose adaptively, and the product of pairs that dominate them dominates the composition
(``losses``), also for runs that are under way at the same time.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from dp_accounting import dp_event as dp_events
from dp_accounting.pld import pld_privacy_accountant
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

from mf_aggregators.kernel import gaussian, sampled_runs, validation
from mf_aggregators.kernel.arrays import underflow_is_zero
from mf_aggregators.kernel.draws_of_clients import FixedSize, Poisson
from mf_aggregators.kernel.gaussian import DEFAULT_NUM_COORDINATES
from mf_aggregators.kernel.losses import Approximation, composition_rounding, epsilon_of, safe_delta
from mf_aggregators.kernel.sampled_runs import SampledRun

# The rounding error of dp-accounting's connected dots: relative to delta, times the interval.
_ROUNDING_OF_DOTS = 1e-15
# Losses are multiples of it: that of dp-accounting's accountants.
INTERVAL = 1e-4
# The failure probability of bounds by samples, as a share of delta: for as many compositions that
# one is chosen from.
_FAILURE_SHARE, _COMPOSITIONS = 0.01, 16
# The share of delta down to which the bounds of one of several runs are close.
_LEVEL_SHARE = 0.1


@dataclasses.dataclass(frozen=True)
class SampledRunDpEvent(dp_events.GaussianDpEvent):  # type: ignore[misc]
    """A run whose clients are drawn, as an event of dp-accounting.

    Accountants of dp-accounting see the Gaussian mechanism without amplification, which bounds the
    run. :func:`composed_epsilon` uses the run itself.

    Attributes:
      noise_multiplier: Of all participations of a client, against whoever knows their rounds.
      run: The run; None for nothing but the Gaussian mechanism.
    """

    noise_multiplier: float
    run: SampledRun | None = None


@dataclasses.dataclass(frozen=True)
class FixedSizeRoundDpEvent(dp_events.SampledWithoutReplacementDpEvent):  # type: ignore[misc]
    """A round with a batch of a fixed size, as an event of dp-accounting.

    Its accountants take it for sampling without replacement, and so refuse it but where a client is
    replaced by another one. :func:`composed_epsilon` knows its losses where a client is zeroed.

    Attributes:
      source_dataset_size: The clients of the group.
      sample_size: The clients of the batch.
      event: The noise, with the noise multiplier for replacing a client.
      run: The round as a run of its own; None if clients are only replaced.
    """

    source_dataset_size: int
    sample_size: int
    event: dp_events.DpEvent
    run: SampledRun | None = None


def event(run: SampledRun) -> dp_events.DpEvent:
    """Returns a run whose clients are drawn as an event of dp-accounting.

    Args:
      run: The run.

    Returns:
      For Poisson sampling the composed sampled Gaussian of BandMF App. F.3; for fixed sizes
      composed rounds, with half the noise multiplier for replacing a client; for other schemes an
      event that has the run, if it is amplified.
    """
    draws = run.draws
    if isinstance(draws, Poisson):
        sampled = dp_events.PoissonSampledDpEvent(
            draws.sampling_probability, dp_events.GaussianDpEvent(run.sigma)
        )
        return dp_events.SelfComposedDpEvent(sampled, draws.most_participations)
    if isinstance(draws, FixedSize):
        one = dataclasses.replace(draws, num_rounds=draws.num_bands)
        sampled = FixedSizeRoundDpEvent(
            draws.group_size,
            draws.clients_per_round,
            dp_events.GaussianDpEvent(run.sigma / 2.0),
            SampledRun(one, run.sigma),
        )
        return dp_events.SelfComposedDpEvent(sampled, draws.most_participations)
    if run.is_amplified:
        return SampledRunDpEvent(run.noise_multiplier, run)
    return dp_events.GaussianDpEvent(run.noise_multiplier)


@underflow_is_zero
def composed_epsilon(
    events: Iterable[dp_events.DpEvent],
    delta: float,
    *,
    num_coordinates: int = DEFAULT_NUM_COORDINATES,
    seed: int = 0,
) -> float:
    """Returns the epsilon of several runs together, for clients who may be in all of them.

    Runs whose clients are drawn have to draw independently: two samplers with one seed draw the
    same clients, and their runs together tell more than is returned.

    Args:
      events: What ``Mechanism.event``, :func:`event` and ``SamplingScheme.event`` returned, or any
        other event that dp-accounting's privacy loss distributions know where a client is added or
        removed; all Gaussian ones are taken for ones whose noise is drawn here.
      delta: Below 1, and at least 1e-12 and 4e-15 times the compositions. Where clients draw for
        themselves, it pays for the failure probability of samples, a sixteenth of a hundredth of
        it, so that up to 16 compositions may be compared.
      num_coordinates: Parameters times rounds, of the largest run.
      seed: What the samples follow from that bound the losses of clients who draw for themselves.
        Choose it before anything is known of its result.

    Returns:
      The epsilon of the composition; infinity if one event has no noise. Runs whose clients are
      drawn are amplified, unless all are better without.

    Raises:
      TailError: As in ``gaussian.epsilon``.
      ValueError: If delta is out of its range, or an event cannot be composed so.
    """
    composed = dp_events.ComposedDpEvent(list(events))
    compositions = _compositions(composed)
    safe_delta(delta, compositions)
    unamplified = _without_amplification(composed)
    if not pld_privacy_accountant.PLDAccountant().supports(unamplified):
        raise ValueError(
            f"{composed} cannot be composed where a client is added or removed, or its updates are "
            "zeroed: compose what Mechanism.event and SamplingScheme.event return, and events that "
            "dp-accounting's PLDAccountant takes for this relation."
        )
    # Before losses are composed, which takes long for little noise.
    smallest = _smallest_noise_multiplier(composed)
    if smallest < math.inf:
        # Each part is compared with the whole of delta.
        delta = gaussian.delta_left(delta, smallest, _runs(composed) * num_coordinates)
    delta -= composition_rounding(compositions)
    delta *= 1.0 - min(_ROUNDING_OF_DOTS / INTERVAL * compositions, 0.5)
    runs = list(_sampled_runs(composed))
    found = math.inf
    if runs and all(run.noise_multiplier > 0.0 for run in runs):
        # Losses are infinite with this probability: delta pays for it where epsilon is found.
        failure = _FAILURE_SHARE * delta / (_COMPOSITIONS * len(runs))
        approximation = Approximation(INTERVAL, failure, _LEVEL_SHARE * delta, seed)
        losses = {run: sampled_runs.losses(run, approximation) for run in set(runs)}
        found = float(_Accountant(losses).compose(composed).get_epsilon(delta))
        # What is unamplified has at least the epsilon of these runs alone.
        squares = sum(run.noise_multiplier**-2 for run in runs)
        if squares > 0.0 and found <= gaussian.exact_epsilon(squares**-0.5, delta):
            return found
    return min(found, float(_Accountant({}).compose(unamplified).get_epsilon(delta)))


# dp-accounting ships no types.
class _Accountant(pld_privacy_accountant.PLDAccountant):  # type: ignore[misc]
    """dp-accounting's accountant, with the losses of sampled runs."""

    def __init__(self, losses: Mapping[SampledRun, PrivacyLossDistribution]) -> None:
        super().__init__(value_discretization_interval=INTERVAL)
        self._losses = losses

    def get_epsilon(self, target_delta: float) -> float:
        """Returns the epsilon of all events, rounded up."""
        if self._contains_non_dp_event:
            return math.inf
        return epsilon_of(self._pld, target_delta)

    def _maybe_compose(self, event: dp_events.DpEvent, count: int, do_compose: bool) -> Any:
        run = _run_of(event)
        if run is None:
            return super()._maybe_compose(_accounted(event), count, do_compose)
        if do_compose:
            losses = self._losses[run].self_compose(count)
            self._pld: PrivacyLossDistribution = self._pld.compose(losses)
        return None


def _run_of(event: dp_events.DpEvent) -> SampledRun | None:
    """The run whose losses are known, if an event is that of one."""
    run = event.run if isinstance(event, SampledRunDpEvent | FixedSizeRoundDpEvent) else None
    if run is not None and type(run) is not SampledRun:
        raise ValueError(
            f"the run of an event must be a SampledRun, found {validation.shown(run)}."
        )
    return run


def _without_amplification(event: dp_events.DpEvent) -> dp_events.DpEvent:
    """An event in which runs whose clients are drawn are Gaussian mechanisms."""
    run = _run_of(event)
    if run is not None:
        return _accounted(dp_events.GaussianDpEvent(run.noise_multiplier))
    if isinstance(event, dp_events.ComposedDpEvent):
        return dp_events.ComposedDpEvent([_without_amplification(each) for each in event.events])
    if isinstance(event, dp_events.SelfComposedDpEvent):
        return dp_events.SelfComposedDpEvent(_without_amplification(event.event), event.count)
    return _accounted(event)


def _accounted(event: dp_events.DpEvent) -> dp_events.DpEvent:
    """A Gaussian mechanism with no more noise than dp-accounting's arithmetic bears."""
    if not isinstance(event, dp_events.GaussianDpEvent):
        return event
    most = gaussian.LARGEST_NOISE_MULTIPLIER_ACCOUNTED
    return dp_events.GaussianDpEvent(min(event.noise_multiplier, most))


def _sampled_runs(event: dp_events.DpEvent) -> Iterator[SampledRun]:
    """The runs whose losses are known, each as often as it is composed."""
    run = _run_of(event)
    if run is not None:
        yield run
    elif isinstance(event, dp_events.ComposedDpEvent):
        for each in event.events:
            yield from _sampled_runs(each)
    elif isinstance(event, dp_events.SelfComposedDpEvent):
        yield from list(_sampled_runs(event.event)) * int(event.count)


def _smallest_noise_multiplier(event: dp_events.DpEvent) -> float:
    """Of the Gaussian events that have noise; infinity if there are none."""
    run = _run_of(event)
    if run is not None:
        return run.part_noise_multiplier or math.inf
    if isinstance(event, dp_events.ComposedDpEvent):
        return min(map(_smallest_noise_multiplier, event.events), default=math.inf)
    if isinstance(event, dp_events.SelfComposedDpEvent | dp_events.PoissonSampledDpEvent):
        return _smallest_noise_multiplier(event.event)
    if isinstance(event, dp_events.GaussianDpEvent) and event.noise_multiplier > 0.0:
        return float(event.noise_multiplier)
    return math.inf


def _runs(event: dp_events.DpEvent) -> int:
    """How many runs an event is of; the rounds of a sampled one are composed in a run."""
    if _run_of(event) is not None:
        return 1
    if isinstance(event, dp_events.ComposedDpEvent):
        return sum(map(_runs, event.events))
    if isinstance(event, dp_events.SelfComposedDpEvent):
        is_sampled = isinstance(
            event.event, dp_events.PoissonSampledDpEvent | FixedSizeRoundDpEvent
        )
        return 1 if is_sampled else int(event.count) * _runs(event.event)
    return 1


def _compositions(event: dp_events.DpEvent) -> int:
    """How many mechanisms an event composes; raises ValueError if its numbers are wrong."""
    run = _run_of(event)
    if run is not None:
        return run.compositions
    kind = type(event).__name__
    if isinstance(event, dp_events.SelfComposedDpEvent):
        count = validation.positive_integer(event.count, f"the count of a {kind}")
        return count * _compositions(event.event)
    if isinstance(event, dp_events.GaussianDpEvent | dp_events.LaplaceDpEvent):
        name = f"the noise_multiplier of a {kind}"
        validation.non_negative_number(event.noise_multiplier, name)
    if isinstance(event, dp_events.PoissonSampledDpEvent):
        validation.fraction(event.sampling_probability, f"the sampling_probability of a {kind}")
        return _compositions(event.event)
    if isinstance(event, dp_events.ComposedDpEvent):
        return sum(_compositions(each) for each in event.events)
    return 1
