"""Claims about several runs together: adaptive composition of dominating losses.

Runs compose adaptively, and the product of pairs that dominate them dominates the composition
(``losses``), also for runs that are under way at the same time. :func:`check_composed` computes the
epsilon of the product, for clients who may be in all runs.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, final

from dp_accounting import dp_event as dp_events
from dp_accounting.pld import pld_privacy_accountant
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

from mf_aggregators.kernel import gaussian, sampled_runs, validation
from mf_aggregators.kernel.claim import Assumption, Sealed, made
from mf_aggregators.kernel.errors import NotProved
from mf_aggregators.kernel.gaussian import DEFAULT_NUM_COORDINATES, underflow_is_zero
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
# A claimed epsilon may lack digits that a file has lost.
_ROUNDING = 1e-9

_WITH_NOISE = (dp_events.GaussianDpEvent, dp_events.LaplaceDpEvent)
_WITHOUT = (dp_events.NoOpDpEvent, dp_events.NonPrivateDpEvent)


@final
@dataclasses.dataclass(frozen=True)
class Part:
    """One mechanism of a composition, and how often it is composed.

    Attributes:
      mechanism: A run whose clients are drawn; or a Gaussian or Laplace event of dp-accounting,
        also with Poisson sampling, or one without any noise or release. Noise of Gaussian events is
        drawn by the kernel.
      count: How often it is composed.
      num_runs: The runs that draw noise: fewer than ``count`` if it is one of several rounds.

    Raises:
      ValueError: If a number is out of its range, or the mechanism is of another class.
    """

    mechanism: SampledRun | dp_events.DpEvent
    count: int = 1
    num_runs: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "mechanism", _checked(self.mechanism))
        validation.set_positive_integers(self, "count", "num_runs")


@final
@dataclasses.dataclass(frozen=True)
class Composed:
    """The claim that several runs together are (epsilon, delta)-DP.

    Runs whose clients are drawn have to draw independently of one another.

    Attributes:
      parts: What is composed.
      delta: Below 1, and at least 1e-12 and 4e-15 times the compositions.
      epsilon: The claimed epsilon; None to take the one that is proved.
      num_coordinates: The most numbers that one run draws: parameters times rounds.
      seed: What samples follow from that bound losses of clients who draw for themselves. It is
        chosen before anything is known of its result.

    Raises:
      TypeError: If a part is none.
      ValueError: If a number is out of its range.
    """

    parts: tuple[Part, ...]
    delta: float
    epsilon: float | None = None
    num_coordinates: int = DEFAULT_NUM_COORDINATES
    seed: int = 0

    def __post_init__(self) -> None:
        if {*map(type, self.parts)} - {Part}:
            raise TypeError(f"parts must be of Part, found {validation.shown(self.parts)}.")
        object.__setattr__(self, "parts", tuple(map(dataclasses.replace, self.parts)))
        object.__setattr__(self, "delta", validation.delta(self.delta))
        if self.epsilon is not None:
            object.__setattr__(self, "epsilon", validation.epsilon(self.epsilon))
        validation.set_positive_integers(self, "num_coordinates")
        object.__setattr__(self, "seed", validation.integer_at_least(self.seed, 0, "seed"))


@final
class ComposedGuarantee(Sealed):
    """A proved claim of several runs together, which :func:`check_composed` alone makes.

    Attributes:
      claim: The claim, with the proved epsilon.
      epsilon: The epsilon; infinity if one part has no noise.
      delta: The delta that epsilon is for.
      assumptions: What the guarantee rests on.
    """

    __slots__ = ("assumptions", "claim", "delta", "epsilon")

    claim: Composed
    epsilon: float
    delta: float
    assumptions: tuple[Assumption, ...]


@underflow_is_zero
def check_composed(claim: Composed) -> ComposedGuarantee:
    """Proves a claim of several runs together.

    Args:
      claim: The claim.

    Returns:
      The guarantee, with the epsilon that was proved. Runs whose clients are drawn are amplified,
      unless all are better without.

    Raises:
      NotProved: If the claimed epsilon is smaller than the proved one.
      TailError: As in ``gaussian.epsilon``.
      TypeError: If it is no claim.
      ValueError: If delta is too small for so many compositions.
    """
    if type(claim) is not Composed:
        raise TypeError(f"check_composed takes a Composed, found {validation.shown(claim)}.")
    claim = dataclasses.replace(claim)
    found = _epsilon(claim)
    if claim.epsilon is not None and not found <= claim.epsilon * (1.0 + _ROUNDING):
        raise NotProved(f"the claim is epsilon {claim.epsilon!r}, and {found!r} is proved.")
    sampled = (SampledRun, dp_events.PoissonSampledDpEvent)
    is_drawn = any(isinstance(part.mechanism, sampled) for part in claim.parts)
    drawn = (Assumption.SECRET_DRAWS,) * is_drawn
    values = {
        "claim": dataclasses.replace(claim, epsilon=found),
        "epsilon": found,
        "delta": claim.delta,
        "assumptions": (Assumption.RUNS, *drawn, Assumption.SERVER, Assumption.RANDOMNESS),
    }
    return made(ComposedGuarantee, values)


def _epsilon(claim: Composed) -> float:
    delta, parts = claim.delta, claim.parts
    compositions = sum(
        part.count * part.mechanism.compositions
        if isinstance(part.mechanism, SampledRun)
        else part.count
        for part in parts
    )
    safe_delta(delta, compositions)
    # Before losses are composed, which takes long for little noise.
    smallest = min((_noise_of_part(part.mechanism) for part in parts), default=math.inf)
    if smallest < math.inf:
        # Each part is compared with the whole of delta.
        numbers = sum(part.num_runs for part in parts) * claim.num_coordinates
        delta = gaussian.delta_left(delta, smallest, numbers)
    delta -= composition_rounding(compositions)
    delta *= 1.0 - min(_ROUNDING_OF_DOTS / INTERVAL * compositions, 0.5)
    runs = [
        (part.mechanism, part.count) for part in parts if isinstance(part.mechanism, SampledRun)
    ]
    found = math.inf
    if runs and all(run.noise_multiplier > 0.0 for run, _ in runs):
        # Losses are infinite with this probability: delta pays for it where epsilon is found.
        failure = _FAILURE_SHARE * delta / (_COMPOSITIONS * sum(count for _, count in runs))
        approximation = Approximation(INTERVAL, failure, _LEVEL_SHARE * delta, claim.seed)
        losses = {run: sampled_runs.losses(run, approximation) for run in {run for run, _ in runs}}
        found = _composed(parts, losses, delta)
        # The unamplified composition has at least the epsilon of these runs alone.
        squares = sum(count * run.noise_multiplier**-2 for run, count in runs)
        if squares > 0.0 and found <= gaussian.exact_epsilon(squares**-0.5, delta):
            return found
    return min(found, _composed(parts, {}, delta))


def _composed(
    parts: tuple[Part, ...], losses: Mapping[SampledRun, PrivacyLossDistribution], delta: float
) -> float:
    """The epsilon of all parts; runs without losses are Gaussian mechanisms."""
    accountant = pld_privacy_accountant.PLDAccountant(value_discretization_interval=INTERVAL)
    for part in parts:
        event = part.mechanism
        if isinstance(event, SampledRun) and event in losses:
            together = losses[event].self_compose(part.count)
            accountant._pld = accountant._pld.compose(together)
            continue
        if isinstance(event, SampledRun):
            event = _checked(dp_events.GaussianDpEvent(event.noise_multiplier))
        accountant.compose(event, part.count)
    return math.inf if accountant._contains_non_dp_event else epsilon_of(accountant._pld, delta)


def _checked(mechanism: Any) -> Any:
    """A mechanism made anew of numbers, with no more noise than dp-accounting's arithmetic bears.

    Raises:
      ValueError: If it is of another class, or a number is out of its range.
    """
    kind = type(mechanism)
    if kind is SampledRun:
        return dataclasses.replace(mechanism)
    if kind in _WITHOUT:
        return mechanism
    if kind in _WITH_NOISE:
        noise = validation.non_negative_number(
            mechanism.noise_multiplier, f"the noise_multiplier of a {kind.__name__}"
        )
        return kind(min(noise, gaussian.LARGEST_NOISE_MULTIPLIER_ACCOUNTED))
    if kind is dp_events.PoissonSampledDpEvent and type(mechanism.event) in _WITH_NOISE:
        share = validation.fraction(
            mechanism.sampling_probability, f"the sampling_probability of a {kind.__name__}"
        )
        return kind(share, _checked(mechanism.event))
    raise ValueError(
        f"{validation.shown(mechanism)} is no SampledRun, and no event that is composed where a "
        "client is added or removed, or its updates are zeroed: compose what Mechanism.event and "
        "SamplingScheme.event return, or Gaussian and Laplace events, also with Poisson sampling."
    )


def _noise_of_part(mechanism: SampledRun | dp_events.DpEvent) -> float:
    """The noise multiplier of the largest shift of one row; infinity if nothing is drawn."""
    if isinstance(mechanism, SampledRun):
        return mechanism.part_noise_multiplier or math.inf
    is_sampled = isinstance(mechanism, dp_events.PoissonSampledDpEvent)
    inner = mechanism.event if is_sampled else mechanism
    if isinstance(inner, dp_events.GaussianDpEvent) and inner.noise_multiplier > 0.0:
        return float(inner.noise_multiplier)
    return math.inf
