r"""Privacy losses on a grid: their format, their rounding, and bounds that they follow from.

Losses, composition and the format are dp-accounting's. Its masses of a grid are differences of
deltas, divided by the interval: floats lose 1e-16 over the interval there. Its epsilons add up a
million masses in turn, at losses that are themselves sums of intervals. Here both err on the side
of privacy.

**Dominating losses.** A run is dominated by a pair (P, Q) if its hockey-stick divergences with a
client from without it are at most those of P from Q, at every epsilon, negative ones included.
Runs compose adaptively, and their pairs' product dominates the composition (Zhu, Dong and Wang,
2022, Thm 10), also where they are under way at the same time (Vadhan and Zhang, 2023). A pair is
described by its *profile* h(alpha), the divergence at alpha = e^epsilon: convex, falling, 1 at
alpha = 0.

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

**Bounds that may fail.** If bounds hold but for a probability beta over random numbers, losses
are infinite with probability beta, and else those of the bounds. Composed with a pair of the
profile d, they have the profile beta + (1 - beta) d: the profile of the bounds if these hold, and
1 if they fail. So delta pays, once for each run, and of several runs 1 - prod (1 - beta_i), if
their random numbers are independent.
"""

import dataclasses
import fractions
import itertools
import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from dp_accounting.pld import pld_pmf, privacy_loss_distribution
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

from mf_aggregators.kernel import gaussian, validation
from mf_aggregators.kernel.arrays import FloatArray, IntArray, underflow_is_zero

# Upper bound on the rounding error of one mass, in spacings of floats.
_ROUNDINGS = 8
# Upper bound on the relative rounding error of sums by halves and of exponentials.
_ROUNDING_OF_SUMS = 2e-14
# dp-accounting composes by Fourier transforms, whose rounding is not on the side of privacy:
# masses are off by about 2e-16 for each composition, summed over the grid. Ten times that is
# taken off delta, and a delta that is not well above it is refused.
_ROUNDING_PER_COMPOSITION = 2e-15
_SMALLEST_DELTA = 1e-12
# Standard deviations of a Gaussian mechanism's loss on each side of its grid's middle.
_GAUSSIAN_DEVIATIONS = 10.0
# Gaps between the points of a grid grow with this power, less one.
_POWER_OF_STEPS = 1.5
# Losses of a run in few numbers, and the rounding error of sums of masses.
_COARSE_POINTS, _LARGEST_LOSS, _TAIL = 160, 2000.0, 1e-13

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


# dp-accounting ships no types.
class DenseLosses(pld_pmf.DensePLDPmf):  # type: ignore[misc]
    """dp-accounting's losses on a grid, with deltas and epsilons that are rounded up."""

    @classmethod
    def of(cls, losses: pld_pmf.PLDPmf) -> "DenseLosses":
        """Returns the same losses."""
        dense = losses.to_dense_pmf()
        return cls(
            dense._discretization,
            dense._lower_loss,
            np.asarray(dense._probs),
            dense._infinity_mass,
            dense._pessimistic_estimate,
        )

    @classmethod
    @underflow_is_zero
    def of_deltas(cls, interval: float, first: int, deltas: FloatArray) -> "DenseLosses":
        """Returns losses that dominate a pair, by its deltas (Doroshenko et al. 2022, Alg. 1).

        Args:
          interval: The distance of neighbouring losses, which are multiples of it.
          first: The first multiple.
          deltas: The hockey-stick divergences at the multiples from the first one on, which do not
            rise. At least two.

        Returns:
          Losses whose masses are at least those of exact arithmetic on these deltas.
        """
        # If long floats are no longer than doubles, masses are raised by a little more.
        wide = np.asarray(deltas, np.longdouble)
        falls, width = -np.diff(wide), np.expm1(np.longdouble(interval))
        # The chords before and behind each multiple; the first and the last multiple have one each.
        before = np.concatenate([[0.0], falls * np.exp(np.longdouble(interval)) / width])
        behind = np.concatenate([falls / width, [0.0]])
        exact = before - behind
        exact[0] += 1.0 - wide[0]
        raised = exact + _ROUNDINGS * np.finfo(np.longdouble).eps * (before + behind + 1.0)
        masses = np.maximum(raised, 0.0).astype(np.float64) * (1.0 + 2.0 * np.finfo(float).eps)
        return cls(interval, first, masses, float(deltas[-1]), True)

    def self_compose(self, num_times: int, tail_mass_truncation: float = 1e-15) -> "DenseLosses":
        """Returns the losses of ``num_times`` independent outputs."""
        return self.of(super().self_compose(num_times, tail_mass_truncation))

    def compose(self, other: pld_pmf.PLDPmf, tail_mass_truncation: float = 1e-15) -> "DenseLosses":
        """Returns the losses of an output of each."""
        return self.of(super().compose(other, tail_mass_truncation))

    @underflow_is_zero
    def get_delta_for_epsilon(self, epsilon: float | Sequence[float]) -> float | list[float]:
        """Returns the delta of one epsilon, the hockey-stick divergence, or of each of several."""
        if isinstance(epsilon, Sequence):
            return [self._delta(each) for each in epsilon]
        return self._delta(epsilon)

    @underflow_is_zero
    def get_epsilon_for_delta(self, delta: float) -> float:
        """Returns the least epsilon of a delta, rounded up; infinity if there is none."""
        if self._infinity_mass > delta:
            return math.inf
        losses = self._losses()
        low, high = int(np.searchsorted(losses, 0.0, side="right")) - 1, self.size - 1
        if high <= low or self._delta(0.0) <= delta:
            return 0.0
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._delta(losses[middle]) > delta else (low, middle)
        # Up to this loss, delta is the mass from here to infinity, less e^epsilon times a sum.
        above = self._probs[high:]
        together = float(np.sum(above * np.exp(losses[high] - losses[high:])))
        excess = float(self._infinity_mass) + float(np.sum(above)) - delta
        ratio = excess / together if together > 0.0 else 1.0
        # A loss is a rounded product.
        rounding = 4.0 * np.finfo(float).eps * (1.0 + losses[-1])
        found = losses[high] + math.log(min(max(ratio, math.exp(-self._discretization)), 1.0))
        found = max(found, 0.0) + rounding
        while self._delta(found) > delta and math.isfinite(found):
            found, rounding = found + rounding, 2.0 * rounding
        return float(found)

    def _losses(self) -> FloatArray:
        return np.asarray((np.arange(self.size) + self._lower_loss) * self._discretization)

    def _delta(self, epsilon: float) -> float:
        losses = self._losses()
        first = int(np.searchsorted(losses, epsilon, side="right"))
        finite = float(np.sum(-np.expm1(epsilon - losses[first:]) * self._probs[first:]))
        return float(self._infinity_mass) + finite * (1.0 + _ROUNDING_OF_SUMS)


def of_dp_accounting(
    losses: PrivacyLossDistribution,
) -> PrivacyLossDistribution:
    """Returns the same losses in dp-accounting's own classes, which compose with no others.

    Args:
      losses: Dense ones.
    """
    return PrivacyLossDistribution(
        *(
            pld_pmf.DensePLDPmf(
                each._discretization,
                each._lower_loss,
                each._probs,
                each._infinity_mass,
                each._pessimistic_estimate,
            )
            for each in (losses._pmf_remove, losses._pmf_add)
        )
    )


def epsilon_of(losses: PrivacyLossDistribution, delta: float) -> float:
    """Returns the epsilon of losses in both directions, rounded up.

    Args:
      losses: Pessimistic ones.
      delta: Above 0 and below 1.
    """
    return max(
        DenseLosses.of(each).get_epsilon_for_delta(delta)
        for each in (losses._pmf_remove, losses._pmf_add)
    )


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
