"""Losses of runs with drawn clients, and claims about several runs together.

Runs compose adaptively, and the product of pairs that dominate them dominates the composition
(``losses``), also for runs that are under way at the same time. :func:`check_composed` computes the
epsilon of the product, for clients who may be in all runs.

Losses of schemes with groups are computed (``losses``). Losses of clients who draw for themselves
follow from bounds by samples on both divergences of the pair that dominates the run
(``certificate``). They are infinite with the probability that these bounds fail.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, final

import numpy as np
from dp_accounting import dp_event as dp_events
from dp_accounting.pld import common as pld_common
from dp_accounting.pld import pld_privacy_accountant, privacy_loss_distribution
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

from mf_aggregators.kernel import certificate, dominating_pairs, gaussian, numbers
from mf_aggregators.kernel.claim import Assumption, Sealed, made
from mf_aggregators.kernel.draws_of_clients import (
    InGroups,
    SampledRun,
)
from mf_aggregators.kernel.gaussian import DEFAULT_NUM_COORDINATES, underflow_is_zero
from mf_aggregators.kernel.losses import (
    Approximation,
    composition_rounding,
    connected_losses,
    epsilon_of,
    gaussian_losses,
    losses_of_groups,
    safe_delta,
    steps_to,
    with_infinite_losses,
)
from mf_aggregators.kernel.numbers import FloatArray, NotProved

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

# Epsilons at which losses are bounded: from 0, with larger and larger gaps, up to where a bound is
# a share of the level down to which bounds are close.
_POINTS = 160
_SHARE_OF_TAIL, _LARGEST_EPSILON, _HALVINGS = 1e-3, 500.0, 12
# A pair with a larger epsilon has millions of losses, and promises nothing that is worth stating.
_LARGEST_EPSILON_OF_PAIR = 100.0

_WITH_NOISE = (dp_events.GaussianDpEvent, dp_events.LaplaceDpEvent)
_WITHOUT = (dp_events.NoOpDpEvent, dp_events.NonPrivateDpEvent)


@final
@dataclasses.dataclass(frozen=True)
class EpsilonDeltaDpEvent(dp_events.DpEvent):  # type: ignore[misc]
    """A mechanism of which nothing is known but that it is (epsilon, delta)-DP.

    Neighbours differ in one client that is zeroed, added or removed, in both directions. Its losses
    dominate every such mechanism (Kairouz, Oh and Viswanath, 2015, Thm 3.3).

    Attributes:
      epsilon: At most 100.
      delta: At least 0 and below 1. A composition has no epsilon at a smaller delta.

    Raises:
      ValueError: If a number is out of its range.
    """

    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        numbers.set_checked(self, epsilon=numbers.epsilon)
        if self.delta != 0.0:
            numbers.set_checked(self, delta=numbers.delta)
        if not self.epsilon <= _LARGEST_EPSILON_OF_PAIR:
            most, found = _LARGEST_EPSILON_OF_PAIR, self.epsilon
            raise ValueError(f"epsilon is composed up to {most:g}, found {found:g}.")


@final
@dataclasses.dataclass(frozen=True)
class Part:
    """One mechanism of a composition, and how often it is composed.

    Attributes:
      mechanism: A run whose clients are drawn; a pair of epsilon and delta; or a Gaussian or
        Laplace event of dp-accounting, also with Poisson sampling, or one without any noise or
        release. Noise of Gaussian events is drawn by the kernel.
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
        numbers.set_positive_integers(self, "count", "num_runs")


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
            raise TypeError(f"parts must be of Part, found {numbers.shown(self.parts)}.")
        object.__setattr__(self, "parts", tuple(map(dataclasses.replace, self.parts)))
        numbers.set_checked(
            self,
            delta=numbers.delta,
            epsilon=numbers.epsilon,
            num_coordinates=numbers.positive_integer,
            seed=numbers.non_negative_integer,
        )


@final
@dataclasses.dataclass(init=False, eq=False, repr=False, slots=True)
class ComposedGuarantee(Sealed):
    """A proved claim of several runs together, which :func:`check_composed` alone makes.

    Attributes:
      claim: The claim, with the proved epsilon.
      epsilon: The epsilon; infinity if one part has no noise.
      delta: The delta that epsilon is for.
      assumptions: What the guarantee rests on.
    """

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
        raise TypeError(f"check_composed takes a Composed, found {numbers.shown(claim)}.")
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
        part.count * part.mechanism.draws.most_participations
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
        losses = {run: losses_of_run(run, approximation) for run in {run for run, _ in runs}}
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
        if isinstance(event, EpsilonDeltaDpEvent):
            pair = pld_common.DifferentialPrivacyParameters(event.epsilon, event.delta)
            of_pair = privacy_loss_distribution.from_privacy_parameters(pair, INTERVAL)
            accountant._pld = accountant._pld.compose(of_pair.self_compose(part.count))
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
    if kind in (SampledRun, EpsilonDeltaDpEvent):
        return dataclasses.replace(mechanism)
    if kind in _WITHOUT:
        return mechanism
    if kind in _WITH_NOISE:
        noise = numbers.non_negative_number(
            mechanism.noise_multiplier, f"the noise_multiplier of a {kind.__name__}"
        )
        return kind(min(noise, gaussian.LARGEST_NOISE_MULTIPLIER_ACCOUNTED))
    if kind is dp_events.PoissonSampledDpEvent and type(mechanism.event) in _WITH_NOISE:
        share = numbers.fraction(
            mechanism.sampling_probability, f"the sampling_probability of a {kind.__name__}"
        )
        return kind(share, _checked(mechanism.event))
    raise ValueError(
        f"{numbers.shown(mechanism)} is not composed where a client is added or removed, or its "
        "updates are zeroed: give what Mechanism.event returns, Gaussian and Laplace events, also "
        "with Poisson sampling, or an EpsilonDeltaDpEvent."
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


def losses_of_run(run: SampledRun, approximation: Approximation) -> PrivacyLossDistribution:
    """Returns losses that dominate a run, for real normal numbers, unless samples mislead.

    Args:
      run: The run.
      approximation: The grid, and how samples bound losses.
    """
    if not run.is_amplified:
        return gaussian_losses(run.noise_multiplier, approximation.interval)
    if isinstance(run.draws, InGroups):
        return losses_of_groups(run.draws, run.sigma, approximation.interval)
    return _bounded_losses(run, approximation)


# Compositions ask for the same losses again and again.
@functools.lru_cache(maxsize=16)
def _bounded_losses(run: SampledRun, approximation: Approximation) -> PrivacyLossDistribution:
    interval, level = approximation.interval, approximation.level
    pair = dominating_pairs.dominating_pair(run)
    profile = certificate.Profile(pair, approximation.failure, level, seed=approximation.seed)

    def without_samples(epsilons: FloatArray) -> FloatArray:
        unamplified = gaussian.exact_deltas(run.noise_multiplier, epsilons)
        return np.minimum(profile.renyi_bounds(epsilons), unamplified)

    steps = steps_to(_last_epsilon(without_samples, _SHARE_OF_TAIL * level), interval, _POINTS)
    unamplified = gaussian.exact_deltas(run.noise_multiplier, steps * interval)
    bounds = [np.minimum(each, unamplified) for each in profile.upper(steps * interval)]
    connected = connected_losses(interval, steps, *bounds)
    return with_infinite_losses(connected, approximation.failure, interval)


def _last_epsilon(bound: Callable[[FloatArray], FloatArray], tail: float) -> float:
    """An epsilon at which a bound that falls is below a tail, and not far beyond."""
    low, high = 0.0, 1.0
    while bound(np.array([high]))[0] > tail and high < _LARGEST_EPSILON:
        low, high = high, 2.0 * high
    for _ in range(_HALVINGS):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if bound(np.array([middle]))[0] > tail else (low, middle)
    return high
