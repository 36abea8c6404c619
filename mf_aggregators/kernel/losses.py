r"""Privacy losses on a grid: their format, their rounding, and bounds that they follow from.

Losses, composition and the format are dp-accounting's. Its masses of a grid are differences of
deltas, divided by the interval: floats lose 1e-16 over the interval there. Its epsilons add up a
million masses in turn, at losses that are themselves sums of intervals. Here both err on the side
of privacy (:func:`of_divergences`, :func:`epsilon_of`).

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
from dp_accounting.pld import pld_pmf
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

from mf_aggregators.kernel import gaussian, numbers
from mf_aggregators.kernel.gaussian import underflow_is_zero
from mf_aggregators.kernel.numbers import FloatArray, IntArray

# Upper bound on the rounding error of one mass, in spacings of floats.
_ROUNDINGS = 8
# Upper bound on the relative rounding error of sums by halves and of exponentials.
_ROUNDING_OF_SUMS = 2e-14
# dp-accounting composes by Fourier transforms, whose rounding is not on the side of privacy:
# masses are off by about 2e-16 for each composition, summed over the grid. Ten times that is
# taken off delta, and a delta that is not well above it is refused.
_ROUNDING_PER_COMPOSITION = 2e-15
_SMALLEST_DELTA = 1e-12
# Losses count as infinite beyond this number of standard deviations, or if all have less mass.
DEVIATIONS = 9.0
_NEGLIGIBLE = 1e-20
# Gaps between the points of a grid grow with this power, less one.
_POWER_OF_STEPS = 1.5

# A multiple of the interval, e to it, and the profile there.
_Point: TypeAlias = tuple[int, fractions.Fraction, fractions.Fraction]


@dataclasses.dataclass(frozen=True)
class Approximation:
    """The grid of the privacy losses of a run, and how samples bound them.

    Attributes:
      interval: What losses are multiples of.
      failure: Where samples bound losses, the probability that bounds do not hold. Losses are
        infinite with it besides.
      level: Down to which divergence bounds are close.
      seed: What random numbers follow from.
    """

    interval: float
    failure: float = 1e-9
    level: float = 1e-6
    seed: int = 0


@underflow_is_zero
def of_divergences(
    interval: float, with_client: FloatArray, without_client: FloatArray
) -> PrivacyLossDistribution:
    """Returns losses that dominate a pair, by its divergences (Doroshenko et al. 2022, Alg. 1).

    Args:
      interval: The distance of neighbouring losses, which are multiples of it.
      with_client: (J,) the hockey-stick divergences of outputs with a client from those without, at
        the multiples 0 to J - 1 of the interval. At least two.
      without_client: (J,) those of outputs without the client from those with it.

    Returns:
      Losses whose masses are at least those of exact arithmetic on these divergences.
    """
    return PrivacyLossDistribution(
        _one_direction(interval, with_client, without_client),
        _one_direction(interval, without_client, with_client),
    )


def _one_direction(interval: float, forward: FloatArray, backward: FloatArray) -> Any:
    """The masses of a pair by its divergences at epsilons >= 0 and, the other way, below."""
    highest = max(int(np.count_nonzero(forward > _NEGLIGIBLE)), 1)
    lowest = max(int(np.count_nonzero(backward > _NEGLIGIBLE)), 1)
    negative = -interval * np.arange(len(backward))[lowest:0:-1]
    below = np.exp(negative) * backward[lowest:0:-1] - np.expm1(negative)
    # Rounding may let a delta be larger than an earlier one, which is then raised.
    deltas = np.concatenate([below, forward[: highest + 1]])
    deltas = np.maximum.accumulate(deltas[::-1])[::-1]
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
    return pld_pmf.DensePLDPmf(interval, -len(below), masses, float(deltas[-1]), True)


@underflow_is_zero
def delta_of(losses: PrivacyLossDistribution, epsilon: float) -> float:
    """Returns the larger hockey-stick divergence of both directions, rounded up.

    Args:
      losses: Pessimistic ones.
      epsilon: Of any sign.
    """
    return max(_delta(*_masses_of(each), epsilon) for each in _directions(losses))


@underflow_is_zero
def epsilon_of(losses: PrivacyLossDistribution, delta: float) -> float:
    """Returns the least epsilon of losses in both directions, rounded up; infinity for none.

    Args:
      losses: Pessimistic ones.
      delta: Above 0 and below 1.
    """
    return max(_epsilon(*_masses_of(each), delta) for each in _directions(losses))


def _directions(losses: PrivacyLossDistribution) -> tuple[Any, ...]:
    one, other = losses._pmf_remove, losses._pmf_add
    return (one,) if one is other else (one, other)


def _masses_of(pmf: Any) -> tuple[FloatArray, FloatArray, float]:
    """The losses of one direction, their masses, and that of infinity."""
    dense = pmf.to_dense_pmf()
    losses = (np.arange(dense.size) + dense._lower_loss) * dense._discretization
    return losses, np.asarray(dense._probs), float(dense._infinity_mass)


def _delta(losses: FloatArray, masses: FloatArray, infinite: float, epsilon: float) -> float:
    first = int(np.searchsorted(losses, epsilon, side="right"))
    finite = float(np.sum(-np.expm1(epsilon - losses[first:]) * masses[first:]))
    return infinite + finite * (1.0 + _ROUNDING_OF_SUMS)


def _epsilon(losses: FloatArray, masses: FloatArray, infinite: float, delta: float) -> float:
    if infinite > delta:
        return math.inf
    low, high = int(np.searchsorted(losses, 0.0, side="right")) - 1, len(losses) - 1
    if high <= low or _delta(losses, masses, infinite, 0.0) <= delta:
        return 0.0
    while high - low > 1:
        middle = (low + high) // 2
        is_below = _delta(losses, masses, infinite, float(losses[middle])) > delta
        low, high = (middle, high) if is_below else (low, middle)
    # Up to this loss, delta is the mass from here to infinity, less e^epsilon times a sum.
    above = masses[high:]
    together = float(np.sum(above * np.exp(losses[high] - losses[high:])))
    ratio = (infinite + float(np.sum(above)) - delta) / together if together > 0.0 else 1.0
    # A loss is a rounded product.
    rounding = 4.0 * np.finfo(float).eps * (1.0 + losses[-1])
    found = losses[high] + math.log(min(max(ratio, math.exp(losses[0] - losses[1])), 1.0))
    found = max(found, 0.0) + rounding
    while _delta(losses, masses, infinite, found) > delta and math.isfinite(found):
        found, rounding = found + rounding, 2.0 * rounding
    return float(found)


def connected_losses(
    interval: float, steps: IntArray, with_client: FloatArray, without_client: FloatArray
) -> PrivacyLossDistribution:
    """Returns losses that follow from bounds on both divergences: see the module.

    Args:
      interval: What losses are multiples of.
      steps: (J,) the multiples at which there are bounds: 0, and larger ones in increasing order.
      with_client: (J,) upper bounds on the divergence with a client from without it.
      without_client: (J,) those of the other direction.
    """
    exact = fractions.Fraction
    # Divergences fall in epsilon, so that a bound holds for later steps.
    one, other = (
        [exact(float(each)) for each in np.minimum.accumulate(np.clip(bounds, 0.0, 1.0))]
        for bounds in (with_client, without_client)
    )
    ratios = [exact(math.exp(step * interval)) for step in steps]
    return PrivacyLossDistribution(
        *(
            below_points(
                interval, steps, ahead, [b / ratio for b, ratio in zip(back, ratios, strict=True)]
            )
            for ahead, back in ((one, other), (other, one))
        )
    )


def below_points(
    interval: float,
    steps: IntArray,
    ahead: Sequence[fractions.Fraction],
    behind: Sequence[fractions.Fraction],
    *,
    is_pessimistic: bool = True,
) -> Any:
    """Returns the masses of the largest convex profile below some points, for one direction.

    Args:
      interval: What losses are multiples of.
      steps: (J,) multiples: 0, and larger ones in increasing order.
      ahead: (J,) the profile's points at e^epsilon, for the epsilons of the steps.
      behind: (J,) the points at e^-epsilon, less 1 - e^-epsilon.
      is_pessimistic: What the masses say of their rounding.
    """
    exact, ratios = fractions.Fraction, [fractions.Fraction(math.exp(s * interval)) for s in steps]
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
    return pld_pmf.create_pmf(masses, interval, float(hull[-1][2]), is_pessimistic)


def _is_above(left: _Point, middle: _Point, right: _Point) -> bool:
    """Whether a point is on or above the line through two others."""
    rise, run = right[2] - left[2], right[1] - left[1]
    return (middle[2] - left[2]) * run >= rise * (middle[1] - left[1])


def gaussian_losses(noise_multiplier: float, interval: float) -> PrivacyLossDistribution:
    """Returns losses of the Gaussian mechanism, rounded up.

    Args:
      noise_multiplier: sigma, above zero.
      interval: What losses are multiples of.
    """
    epsilons = grid_to(largest_loss(noise_multiplier), interval)
    deltas = gaussian.exact_deltas(noise_multiplier, epsilons)
    return of_divergences(interval, deltas, deltas)


def largest_loss(sigma: float) -> float:
    """Returns the largest loss that counts of a Gaussian mechanism of a noise multiplier."""
    return 0.5 / sigma**2 + DEVIATIONS / sigma


def grid_to(most: float, interval: float) -> FloatArray:
    """Returns all multiples of an interval from 0 up to a number, or to the next one."""
    return np.asarray(np.arange(max(math.ceil(most / interval), 1) + 1) * interval)


def steps_to(most: float, interval: float, points: int) -> IntArray:
    """Returns multiples of an interval from 0 on, with larger and larger gaps.

    Args:
      most: The last one is so large, or by less than the interval larger.
      interval: What they are multiples of.
      points: About how many.
    """
    shares = (np.arange(points + 1) / points) ** _POWER_OF_STEPS
    return np.asarray(np.unique(np.ceil(shares * most / interval).astype(np.int64)))


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
    """Returns delta less the rounding of composition by Fourier transforms.

    Args:
      delta: The delta of the guarantee.
      compositions: How many mechanisms are composed.

    Returns:
      A delta below the given one, for which epsilon is to be found.

    Raises:
      ValueError: If delta is not between 0 and 1, or so small that rounding is no small part
        of it.
    """
    delta = numbers.delta(delta)
    rounding = composition_rounding(compositions)
    smallest = max(_SMALLEST_DELTA, 2.0 * rounding)
    if delta < smallest:
        raise ValueError(
            f"delta must be at least {smallest:.3g} for a composition of {compositions} "
            f"mechanisms, which is computed by Fourier transforms, found {delta:g}."
        )
    return delta - rounding


def composition_rounding(compositions: int) -> float:
    """Returns the part of delta that composition by Fourier transforms may lose to rounding.

    Args:
      compositions: How many mechanisms are composed.
    """
    return _ROUNDING_PER_COMPOSITION * compositions
