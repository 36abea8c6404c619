r"""Privacy losses that the pair of a run dominates: no delta of them is above the pair's.

They show how much of an epsilon rounding and samples may have taken. No guarantee rests on them.

Let h be the profile of a pair, as in ``kernel.losses``, and l_i lower bounds at increasing
alpha_i >= 1. As h falls, it is at least l_(i+1) between alpha_i and alpha_(i+1), and below 1, where
h(alpha) + alpha - 1 does not fall, at least 1 - alpha and the last of its bounds. The largest
convex function below all that is a profile.

**A bound on a mean from below.** As in ``kernel.losses``, for terms between 0 and M and a bet w,
V(m) = prod_i (1 + w (T_i - m)) falls in m and has the expectation 1 at the mean mu. For m <= 1 / w
it is not negative, and mu <= M. So the m with V(m) = 1 / beta is below mu but for a probability of
beta.
"""

import fractions
import itertools
import math

import numpy as np
from dp_accounting.pld import privacy_loss_distribution
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

from mf_aggregators.kernel import certificate, composition, losses
from mf_aggregators.kernel.certificate import ROUNDING
from mf_aggregators.kernel.draws_of_clients import (
    FixedSize,
    InSecret,
    Poisson,
    SampledRun,
)
from mf_aggregators.kernel.losses import Approximation
from mf_aggregators.kernel.numbers import FloatArray, IntArray

# Points of a grid of losses.
_MOST_POINTS, _POINTS = 10_000, 400


def losses_of_run(run: SampledRun, approximation: Approximation) -> PrivacyLossDistribution:
    """Returns losses that the pair of a run dominates, unless samples mislead.

    Args:
      run: The run.
      approximation: The grid, and how samples bound losses.

    Raises:
      ValueError: If none are known.
    """
    draws, interval = run.draws, approximation.interval
    if run.is_amplified and isinstance(draws, Poisson):
        one = gaussian(run.sigma, interval, draws.sampling_probability)
    elif run.is_amplified and isinstance(draws, FixedSize):
        one = _of_fixed_size(run.sigma, draws.sampling_probability, interval)
    elif run.is_amplified and isinstance(draws, InSecret):
        profile, steps = composition.profile_of(run, approximation, _POINTS)
        # Terms are rounded up: a little larger epsilons undo it.
        failure = approximation.failure / (2 * len(steps))
        means = profile.means(steps * interval + 4.0 * ROUNDING, failure, lower_mean)
        return connected_losses(interval, steps, *means)
    else:
        raise ValueError(
            f"nothing bounds the privacy losses of {type(draws).__name__} from below here: ask for "
            "pessimistic ones."
        )
    return one if run.compositions == 1 else one.self_compose(run.compositions)


def gaussian(
    sigma: float, interval: float, sampling_probability: float = 1.0
) -> PrivacyLossDistribution:
    """Returns losses of the Gaussian mechanism on a Poisson sample, rounded down.

    Args:
      sigma: The noise multiplier, above zero.
      interval: What losses are multiples of.
      sampling_probability: The probability that a client joins, in (0, 1].
    """
    found: PrivacyLossDistribution = privacy_loss_distribution.from_gaussian_mechanism(
        sigma,
        pessimistic_estimate=False,
        value_discretization_interval=interval,
        sampling_prob=sampling_probability,
    )
    return found


def _of_fixed_size(sigma: float, share: float, interval: float) -> PrivacyLossDistribution:
    most = math.ceil(losses.largest_loss(sigma) / interval)
    steps = np.arange(0, most + 1, max(most // _MOST_POINTS, 1))
    return connected_losses(
        interval,
        steps,
        losses.divergence_with(sigma, share, steps * interval),
        losses.divergence_without(sigma, share, steps * interval),
    )


def connected_losses(
    interval: float, steps: IntArray, with_client: FloatArray, without_client: FloatArray
) -> PrivacyLossDistribution:
    """Returns losses that follow from lower bounds on both divergences.

    Args:
      interval: What losses are multiples of.
      steps: (J,) the multiples at which there are bounds: 0, and larger ones in increasing order.
      with_client: (J,) lower bounds on the divergence with a client from without it.
      without_client: (J,) those of the other direction.
    """
    exact = fractions.Fraction
    ratios = [exact(math.exp(step * interval)) for step in steps]
    # Divergences fall in epsilon: a lower bound holds for earlier steps.
    one, other = (
        [exact(float(each)) for each in itertools.accumulate(np.clip(bounds, 0.0, 1.0)[::-1], max)]
        for bounds in (with_client, without_client)
    )
    sides = []
    for ahead, back in ((one[::-1], other[::-1]), (other[::-1], one[::-1])):
        behind = [value / ratio for value, ratio in zip(back, ratios, strict=True)]
        # Between two of them, the profile is at least the lower one.
        shifted = [*ahead[1:], exact(0)], [*behind[1:], exact(0)]
        sides.append(losses.below_points(interval, steps, *shifted, is_pessimistic=False))
    return PrivacyLossDistribution(*sides)


def lower_mean(terms: FloatArray, count: int, largest: float, bet: float, failure: float) -> float:
    """Returns a lower bound of a mean; arguments as of ``certificate.upper_mean``."""
    goal = -math.log(failure) + 1e-9 * count * bet * largest
    found = certificate.root(-terms, count, bet, goal, 0.0)
    return max(-found * (1.0 - 2.0 * certificate.ERROR_OF_ROOT) - 1e-9 * largest, 0.0)
