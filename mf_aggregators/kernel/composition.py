r"""Privacy accounting of several runs together, and what composition by Fourier transforms loses.

**Dominating losses.** A run is dominated by a pair (P, Q) if its hockey-stick divergences with a
client from without it are at most those of P from Q, at every epsilon, negative ones included.
Runs compose adaptively, and their pairs' product dominates the composition (Zhu, Dong and Wang,
2022, Thm 10), also where they are under way at the same time (Vadhan and Zhang, 2023). What is
needed of a pair is its *profile* h(alpha), the divergence at alpha = e^epsilon: convex, falling,
1 at alpha = 0.

**From bounds to losses.** Let h be at most v_i at increasing alpha_i > 0. Then h is at most the
largest convex function below the points (0, 1) and (alpha_i, v_i), v_i being made non-increasing,
and constant behind the last one: a convex h lies below each chord of points that are above it, and
below the largest convex function under all of them. That function is the profile of a pair of its
own, which dominates (*connect the dots*, Doroshenko et al., 2022): with s_i the slope behind
alpha_i, Q has the mass s_i - s_(i-1) where P / Q is alpha_i, P has alpha_i times that, and the mass
v_last where Q has none. Negative epsilons need no bounds of their own: with h' the profile of Q
from P, h(alpha) = 1 - alpha + alpha h'(1 / alpha).

For a pair that is dominated by the run's, let l_i be lower bounds. As h falls, it is at least
l_(i+1) between alpha_i and alpha_(i+1), and below 1, where h(alpha) + alpha - 1 does not fall, at
least 1 - alpha and the last of its bounds. The largest convex function below all that is a profile.

**Bounds that may fail.** Where bounds hold but for a probability beta over random numbers, losses
are infinite with probability beta, and else those of the bounds. Composed with a pair of the
profile d, they have the profile beta + (1 - beta) d: what holds if the bounds do, and else
everything is lost. So delta pays, once for each run, and of several runs 1 - prod (1 - beta_i),
whose random numbers are independent.
"""

import dataclasses
import fractions
import itertools
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any, Protocol, TypeAlias

import numpy as np
from dp_accounting import dp_event as dp_events
from dp_accounting.pld import pld_privacy_accountant, privacy_loss_distribution
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

from mf_aggregators.kernel import gaussian, validation
from mf_aggregators.kernel.arrays import FloatArray, IntArray, underflow_is_zero
from mf_aggregators.kernel.gaussian import DEFAULT_NUM_COORDINATES
from mf_aggregators.kernel.losses import DenseLosses, epsilon_of, of_dp_accounting

# dp-accounting composes by Fourier transforms, whose rounding is not on the side of privacy:
# masses are off by about 2e-16 for each composition, summed over the grid. Ten times that is
# taken off delta, and a delta that is not well above it is refused.
_ROUNDING_PER_COMPOSITION = 2e-15
_SMALLEST_DELTA = 1e-12
# The rounding error of dp-accounting's connected dots: relative to delta, times the interval.
_ROUNDING_OF_DOTS = 1e-15
# Standard deviations of a Gaussian mechanism's loss on each side of its grid's middle.
_GAUSSIAN_DEVIATIONS = 10.0
# What losses are multiples of: that of dp-accounting's accountants.
INTERVAL = 1e-4
# The failure probability of bounds by samples, as a share of delta: for as many compositions that
# one is chosen from.
_FAILURE_SHARE, _COMPOSITIONS = 0.01, 16
# Gaps between the points of a grid grow with this power, less one.
_POWER_OF_STEPS = 1.5
# Losses of a run in few numbers, and what sums of masses may be off by.
_COARSE_POINTS, _LARGEST_LOSS, _TAIL = 160, 2000.0, 1e-13
# Of delta: down to which divergence the bounds of one of several runs are close.
_LEVEL_SHARE = 0.1


# A multiple of the interval, e to it, and the profile there.
_Point: TypeAlias = tuple[int, fractions.Fraction, fractions.Fraction]


@dataclasses.dataclass(frozen=True)
class Approximation:
    """How privacy losses of a run are rounded, and bounded where samples bound them.

    Attributes:
      interval: What they are multiples of.
      is_pessimistic: Whether they dominate the run; otherwise they are dominated by what dominates
        it.
      failure: Where samples bound losses, the probability that bounds do not hold. Losses that
        dominate are infinite with it besides.
      level: Down to which divergence bounds are close.
      seed: What random numbers follow from.
    """

    interval: float
    is_pessimistic: bool = True
    failure: float = 1e-9
    level: float = 1e-6
    seed: int = 0


class SampledRun(Hashable, Protocol):
    """A run whose clients are drawn, and of which losses that dominate it are known."""

    @property
    def noise_multiplier(self) -> float:
        """That of all participations of a client, towards who knows the rounds."""

    @property
    def part_noise_multiplier(self) -> float:
        """The noise multiplier of the largest shift of one row."""

    @property
    def compositions(self) -> int:
        """How many mechanisms its losses are composed of, at most."""

    def losses(self, approximation: Approximation) -> PrivacyLossDistribution:
        """Returns losses that dominate the run, for real normal numbers.

        Args:
          approximation: How losses are rounded; it is pessimistic.
        """


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
        approximation = Approximation(INTERVAL, True, failure, _LEVEL_SHARE * delta, seed)
        losses = {run: run.losses(approximation) for run in set(runs)}
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
    return event.run if isinstance(event, SampledRunDpEvent | FixedSizeRoundDpEvent) else None


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


def connected_losses(
    interval: float,
    steps: IntArray,
    with_client: FloatArray,
    without_client: FloatArray,
    *,
    is_pessimistic: bool = True,
) -> PrivacyLossDistribution:
    """Returns losses that follow from bounds on both divergences: see the module.

    Args:
      interval: What losses are multiples of.
      steps: (J,) the multiples at which there are bounds: 0, and larger ones in increasing order.
      with_client: (J,) bounds on the divergence with a client from without it.
      without_client: (J,) those of the other direction.
      is_pessimistic: Whether bounds are upper ones, and losses dominate; otherwise bounds are lower
        ones, and losses are dominated.
    """
    bounds = [np.clip(each, 0.0, 1.0) for each in (with_client, without_client)]
    # Divergences fall in epsilon: an upper bound holds for later steps, a lower one for earlier.
    if is_pessimistic:
        bounds = [np.minimum.accumulate(each) for each in bounds]
    else:
        bounds = [np.maximum.accumulate(each[::-1])[::-1] for each in bounds]
    remove, add = (
        _masses(interval, steps, forward, backward, is_pessimistic)
        for forward, backward in (bounds, bounds[::-1])
    )
    found: PrivacyLossDistribution = PrivacyLossDistribution.create_from_rounded_probability(
        remove[0],
        remove[1],
        interval,
        is_pessimistic,
        rounded_probability_mass_function_add=add[0],
        infinity_mass_add=add[1],
        symmetric=False,
    )
    return found


def _masses(
    interval: float,
    steps: IntArray,
    forward: FloatArray,
    backward: FloatArray,
    is_pessimistic: bool,
) -> tuple[dict[int, float], float]:
    """The mass of each multiple, and that of infinity, from bounds in both directions."""
    exact, ratios = fractions.Fraction, [fractions.Fraction(math.exp(s * interval)) for s in steps]
    ahead = [exact(float(value)) for value in forward]
    # At 1 / ratio, the profile less what that of no loss is there.
    behind = [exact(float(value)) / ratio for value, ratio in zip(backward, ratios, strict=True)]
    if not is_pessimistic:
        # Between two of them, the profile is at least the lower one.
        ahead, behind = [*ahead[1:], exact(0)], [*behind[1:], exact(0)]
    points = [
        (-int(step), 1 / ratio, 1 - 1 / ratio + value)
        for step, ratio, value in zip(steps[:0:-1], ratios[:0:-1], behind[:0:-1], strict=True)
    ]
    points.append((0, exact(1), min(ahead[0], behind[0])))
    points += [
        (int(step), ratio, value)
        for step, ratio, value in zip(steps[1:], ratios[1:], ahead[1:], strict=True)
    ]
    hull = [(0, exact(0), exact(1))]
    for step, ratio, value in points:
        lowest = min(value, hull[-1][2])
        while len(hull) > 1 and _is_above(hull[-2], hull[-1], (step, ratio, lowest)):
            hull.pop()
        hull.append((step, ratio, lowest))
    slopes = [(b[2] - a[2]) / (b[1] - a[1]) for a, b in itertools.pairwise(hull)] + [exact(0)]
    masses = {
        vertex[0]: float(vertex[1] * (after - before))
        for vertex, before, after in zip(hull[1:], slopes[:-1], slopes[1:], strict=True)
    }
    return masses, float(hull[-1][2])


def _is_above(left: _Point, middle: _Point, right: _Point) -> bool:
    """Whether a point is on or above the line through two others."""
    rise, run = right[2] - left[2], right[1] - left[1]
    return (middle[2] - left[2]) * run >= rise * (middle[1] - left[1])


@underflow_is_zero
def gaussian_losses(
    noise_multiplier: float, interval: float, *, is_pessimistic: bool = True
) -> PrivacyLossDistribution:
    """Returns losses of the Gaussian mechanism, rounded up or down.

    Args:
      noise_multiplier: sigma, above zero.
      interval: What losses are multiples of.
      is_pessimistic: Whether they dominate; otherwise they are dominated.
    """
    if is_pessimistic:
        middle, spread = 0.5 / noise_multiplier**2, _GAUSSIAN_DEVIATIONS / noise_multiplier
        first = math.floor((middle - spread) / interval)
        steps = np.arange(first, math.ceil((middle + spread) / interval) + 1)
        deltas = gaussian.exact_deltas(noise_multiplier, steps * interval)
        deltas = np.maximum.accumulate(deltas[::-1])[::-1]
        losses = DenseLosses.of_deltas(interval, first, deltas)
        return of_dp_accounting(PrivacyLossDistribution(losses))
    found: PrivacyLossDistribution = privacy_loss_distribution.from_gaussian_mechanism(
        noise_multiplier, pessimistic_estimate=False, value_discretization_interval=interval
    )
    return found


def steps_to(most: float, interval: float, points: int) -> IntArray:
    """Returns multiples of an interval from 0 on, with larger and larger gaps.

    Args:
      most: The last one is so large, or by less than the interval larger.
      interval: What they are multiples of.
      points: About how many.
    """
    shares = (np.arange(points + 1) / points) ** _POWER_OF_STEPS
    return np.asarray(np.unique(np.ceil(shares * most / interval).astype(np.int64)))


@underflow_is_zero
def coarser_losses(losses: PrivacyLossDistribution, interval: float) -> PrivacyLossDistribution:
    """Returns losses of a few hundred values that dominate the given ones.

    Args:
      losses: Pessimistic ones.
      interval: What they are multiples of.
    """
    largest = [_COARSE_POINTS * interval]
    while largest[-1] < _LARGEST_LOSS:
        largest.append(2.0 * largest[-1])
    # One call for all of them takes no longer than for one.
    with np.errstate(over="ignore", invalid="ignore"):
        *deltas, lost = losses.get_delta_for_epsilon([*largest, math.inf])
    # Beyond the largest float, deltas are no numbers.
    small = (each for each, delta in zip(largest, deltas, strict=True) if not delta > lost + _TAIL)
    most = next(small, largest[-1])
    steps = steps_to(most, interval, _COARSE_POINTS)
    bounds = [
        np.asarray(each.get_delta_for_epsilon(list(steps * interval))) + _TAIL
        for each in (losses._pmf_remove, losses._pmf_add)
    ]
    return connected_losses(interval, steps, *bounds)


def description_of(losses: PrivacyLossDistribution, interval: float) -> dict[str, Any]:
    """Returns a JSON-able mapping: the arguments of dp-accounting's function that makes losses.

    Args:
      losses: Pessimistic ones, of few values.
      interval: What they are multiples of.

    Returns:
      What ``create_from_rounded_probability`` of dp-accounting's ``PrivacyLossDistribution`` takes;
      the multiples in its mappings are texts in JSON, and have to be made integers.
    """
    described: dict[str, Any] = {"value_discretization_interval": interval}
    for pmf, suffix in ((losses._pmf_remove, ""), (losses._pmf_add, "_add")):
        described[f"rounded_probability_mass_function{suffix}"] = dict(_masses_of(pmf))
        described[f"infinity_mass{suffix}"] = float(pmf._infinity_mass)
    return {**described, "pessimistic_estimate": True, "symmetric": False}


@underflow_is_zero
def rates_of(
    losses: PrivacyLossDistribution, interval: float
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Returns the trade-off curve of losses: false positive rates, and the least false negative.

    A test says "with the client" from some loss on (Neyman and Pearson, 1933). Its false positive
    rate is the mass of Q from there on, and its false negative rate the mass of P before. Tests
    between two of these are mixtures, so that between points the curve is straight.

    Args:
      losses: Pessimistic ones, of few values.
      interval: What they are multiples of.
    """
    masses = sorted(_masses_of(losses._pmf_remove), reverse=True)
    positive, found = 0.0, float(losses._pmf_remove._infinity_mass)
    rates = [(positive, 1.0 - found)]
    for step, mass in masses:
        positive, found = positive + mass * math.exp(-step * interval), found + mass
        rates.append((min(positive, 1.0), max(1.0 - found - _TAIL, 0.0)))
    rates.append((1.0, 0.0))
    false_positives, false_negatives = zip(*rates, strict=True)
    return false_positives, false_negatives


def _masses_of(pmf: Any) -> list[tuple[int, float]]:
    """The values of losses that have a mass, as multiples of the interval, and their masses."""
    dense = pmf.to_dense_pmf()
    probabilities = np.asarray(dense._probs)
    return [
        (int(dense._lower_loss + at), float(probabilities[at]))
        for at in np.flatnonzero(probabilities > 0.0)
    ]


def with_infinite_losses(
    losses: PrivacyLossDistribution, probability: float, interval: float
) -> PrivacyLossDistribution:
    """Returns losses that are infinite with a probability, and else the given ones.

    Args:
      losses: The losses, which dominate.
      probability: The probability.
      interval: What losses are multiples of.
    """
    one: PrivacyLossDistribution = PrivacyLossDistribution.create_from_rounded_probability(
        {0: 1.0 - probability}, probability, interval
    )
    return losses.compose(one)


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
