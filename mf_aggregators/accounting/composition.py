"""Runs as events of dp-accounting, and the epsilon of several events together.

``kernel.composition`` proves it. Here events are taken apart into what it takes: runs and their
numbers.
"""

import dataclasses
from collections.abc import Iterable, Iterator

from dp_accounting import dp_event as dp_events

from mf_aggregators.kernel import composition, numbers
from mf_aggregators.kernel.composition import Composed, Part
from mf_aggregators.kernel.draws_of_clients import Poisson, SampledRun
from mf_aggregators.kernel.gaussian import DEFAULT_NUM_COORDINATES


@dataclasses.dataclass(frozen=True)
class SampledRunDpEvent(dp_events.GaussianDpEvent):  # type: ignore[misc]
    """A run with drawn clients, as an event of dp-accounting.

    Accountants of dp-accounting see the Gaussian mechanism without amplification, which bounds the
    run. :func:`composed_epsilon` uses the run itself.

    Attributes:
      noise_multiplier: Of all participations of a client, against whoever knows their rounds.
      run: The run; None for nothing but the Gaussian mechanism.
    """

    noise_multiplier: float
    run: SampledRun | None = None


def event(run: SampledRun) -> dp_events.DpEvent:
    """Returns a run with drawn clients as an event of dp-accounting.

    Args:
      run: The run.

    Returns:
      For Poisson sampling the composed sampled Gaussian of BandMF App. F.3; for other schemes an
      event that has the run, if it is amplified.
    """
    draws = run.draws
    if isinstance(draws, Poisson):
        sampled = dp_events.PoissonSampledDpEvent(
            draws.sampling_probability, dp_events.GaussianDpEvent(run.sigma)
        )
        return dp_events.SelfComposedDpEvent(sampled, draws.most_participations)
    if run.is_amplified:
        return SampledRunDpEvent(run.noise_multiplier, run)
    return dp_events.GaussianDpEvent(run.noise_multiplier)


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
      events: What ``Mechanism.event``, :func:`event` and ``SamplingScheme.event`` returned, or
        Gaussian and Laplace events of dp-accounting, also with Poisson sampling, where a client is
        added or removed; all Gaussian ones are taken for ones whose noise is drawn here.
      delta: Below 1, and at least 1e-12 and 4e-15 times the compositions. Where clients draw for
        themselves, it pays for the failure probability of samples, a sixteenth of a hundredth of
        it, so that up to 16 compositions may be compared.
      num_coordinates: Parameters times rounds, of the largest run.
      seed: What the samples follow from that bound the losses of clients who draw for themselves.
        Choose it before anything is known of its result.

    Returns:
      The epsilon that the kernel proves of the composition (``kernel.composition``); infinity if
      one event has no noise. Runs whose clients are drawn are amplified, unless all are better
      without.

    Raises:
      TailError: As in ``gaussian.epsilon``.
      ValueError: If delta is out of its range, or an event cannot be composed so.
    """
    parts = tuple(_parts(dp_events.ComposedDpEvent(list(events)), 1, 1))
    claim = Composed(parts, delta, num_coordinates=num_coordinates, seed=seed)
    return composition.check_composed(claim).epsilon


def _parts(event: dp_events.DpEvent, count: int, num_runs: int) -> Iterator[Part]:
    """The parts of an event that is composed ``count`` times, in ``num_runs`` runs."""
    if isinstance(event, dp_events.ComposedDpEvent):
        for each in event.events:
            yield from _parts(each, count, num_runs)
    elif isinstance(event, dp_events.SelfComposedDpEvent):
        of_event = f"the count of a {type(event).__name__}"
        times = numbers.positive_integer(event.count, of_event)
        # The rounds of a sampled run are composed in one run.
        is_run = isinstance(event.event, dp_events.PoissonSampledDpEvent)
        yield from _parts(event.event, count * times, num_runs if is_run else num_runs * times)
    elif isinstance(event, SampledRunDpEvent) and event.run is not None:
        yield Part(event.run, count, num_runs)
    elif isinstance(event, SampledRunDpEvent):
        yield Part(dp_events.GaussianDpEvent(event.noise_multiplier), count, num_runs)
    else:
        yield Part(event, count, num_runs)
