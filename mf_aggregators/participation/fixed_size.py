r"""Fixed-size sampling: a random subset of a round's group, of the same size in every round.

A batch is a uniformly random subset of B of the m clients of a group, and q = B / m. Zeroing one
client does not make the batch smaller: where the client is drawn, another one is not. So the
distribution of the sum without the client is a mixture as well, and this is not Poisson sampling.

Draw A, a random subset of B - 1 of the other clients, and another client J of those that are left.
With probability q the batch is A and the client, otherwise it is A and J; this is a uniformly
random subset. Given A and J, and taking the sum over A off, outputs have the distributions

    P = (1 - q) N(w, s^2 I) + q N(u, s^2 I)    and    Q = (1 - q) N(w, s^2 I) + q N(0, s^2 I)

with the update u of the client and w of J, both of norm at most 1. By joint convexity of
hockey-stick divergences, those of the whole are at most the largest ones over u and w.

**P from Q.** For eps >= 0 and k = (1 - q) (e^eps - 1) / q, the divergence is q times the mean,
under N(0, s^2 I), of F(x, y) = (x - e^eps - k y)_+ at x = exp(<u, z> / s^2 - |u|^2 / 2 s^2) and the
same y of w. F is convex with a mixed derivative that is not positive. By Gaussian interpolation, as
in Kahane's inequality (1985), the mean does not decrease where |u| or |w| grows or <u, w> falls. So
it is largest at w = -u, |u| = 1: (1 - q) N(-1, s^2) + q N(1, s^2) from
(1 - q) N(-1, s^2) + q N(0, s^2).

**Q from P.** Likewise F(x, y) = (1 - e^eps x - k y)_+, whose mixed derivative is not negative. The
mean is largest at w = u, |u| = 1: (1 - q) N(1, s^2) + q N(0, s^2) from N(1, s^2), which by symmetry
is the divergence of a Poisson sample from nothing.

Both are attained, where all other clients have one update. For e^eps = a < 1, the divergence of P
from Q is 1 - a + a times that of Q from P at 1 / a. The largest divergences at all a together are
those of a pair of distributions again (Zhu, Dong and Wang, 2022, Prop. 10), which is what is
composed.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import scipy.special
from dp_accounting import dp_event
from dp_accounting.pld import privacy_loss_distribution

from mf_aggregators import random_streams
from mf_aggregators.kernel.arrays import FloatArray, IntArray
from mf_aggregators.kernel.composition import FixedSizeRoundDpEvent, connected_losses
from mf_aggregators.kernel.losses import DenseLosses
from mf_aggregators.participation.cyclic_groups import ComposedGroups
from mf_aggregators.participation.kinds import own
from mf_aggregators.participation.sampled_runs import SampledRun
from mf_aggregators.random_streams import Draw, Stream

# Losses beyond so many standard deviations, or with less than this in all, count as infinite.
_DEVIATIONS = 9.0
# Points of a grid of losses from below, which is exact arithmetic.
_MOST_POINTS_BELOW = 10_000
_NEGLIGIBLE = 1e-20


@own
@dataclasses.dataclass(frozen=True)
class FixedSizeSampling(ComposedGroups):
    """Exactly B clients of a round's group, a uniformly random subset each time (Algorithm 2).

    All groups have floor(m / b) clients; up to b - 1 clients never take part.

    Attributes:
      num_rounds: The rounds n.
      num_bands: The bands b of C.
      population: The clients m.
      clients_per_round: The clients B of a round.
    """

    name: ClassVar[str] = "fixed_size"
    has_random_sizes: ClassVar[bool] = False
    is_dominated: ClassVar[bool] = True

    @property
    def group_size(self) -> int:
        """The clients floor(m / b) of each group."""
        return self.population // self.num_bands

    @property
    def sampling_probability(self) -> float:
        """The probability B / floor(m / b) that a client of a round's group is drawn."""
        return self.clients_per_round / self.group_size

    def group_slice(self, group: int) -> slice:
        """Returns the places of a group."""
        return slice(group * self.group_size, (group + 1) * self.group_size)

    def draw_from(self, group: IntArray, seed: int, round_index: int) -> IntArray:
        """Returns a random subset."""
        generator = random_streams.generator_of(seed, Stream.BATCHES, Draw.ROUND, round_index)
        return generator.choice(group, self.clients_per_round, replace=False, shuffle=False)

    def _improbable(self, groups: IntArray, cohorts: Sequence[IntArray]) -> str | None:
        return self._too_often(groups, cohorts, self.sampling_probability)

    @staticmethod
    def loss_distribution(
        sigma: float, sampling_probability: float, interval: float
    ) -> privacy_loss_distribution.PrivacyLossDistribution:
        """Returns the privacy loss of a Gaussian sum of sensitivity 1 over a random subset.

        Its losses are rounded so that no epsilon is too small (Doroshenko et al. 2022, Alg. 1).

        Args:
          sigma: The standard deviation of the noise, above zero.
          sampling_probability: The share q = B / m of a group that is in a batch, in (0, 1].
          interval: What the losses of the grid are multiples of, above zero.
        """
        epsilons = grid_of_epsilons(sigma, interval)
        taking_part = divergence_with(sigma, sampling_probability, epsilons)
        zeroed = divergence_without(sigma, sampling_probability, epsilons)
        return losses_of_divergences(interval, epsilons, taking_part, zeroed)

    @staticmethod
    def losses_below(
        sigma: float, sampling_probability: float, interval: float
    ) -> privacy_loss_distribution.PrivacyLossDistribution:
        """Returns losses of a round that follow from the same divergences, from below."""
        most = math.ceil((0.5 / sigma**2 + _DEVIATIONS / sigma) / interval)
        steps = np.arange(0, most + 1, max(most // _MOST_POINTS_BELOW, 1))
        return connected_losses(
            interval,
            steps,
            divergence_with(sigma, sampling_probability, steps * interval),
            divergence_without(sigma, sampling_probability, steps * interval),
            is_pessimistic=False,
        )

    def event_of(self, run: SampledRun) -> dp_event.DpEvent:
        """Returns composed sampling without replacement, with half the noise multiplier."""
        one = dataclasses.replace(self, num_rounds=self.num_bands)
        sampled = FixedSizeRoundDpEvent(
            self.group_size,
            self.clients_per_round,
            dp_event.GaussianDpEvent(run.sigma / 2.0),
            dataclasses.replace(run, scheme=one),
        )
        return dp_event.SelfComposedDpEvent(sampled, self.most_participations())

    def accounting_words(self) -> str:
        """Returns how the amplified guarantee is computed."""
        return (
            "Amplification by sampling for banded matrices (BandMF Thm 4): the privacy loss "
            "distribution of composed Gaussian mechanisms on batches sampled without replacement, "
            "by dp-accounting."
        )

    def _draw_words(self) -> str:
        return f"a uniformly random subset of {self.clients_per_round} of its {self.group_size}."


def grid_of_epsilons(sigma: float, interval: float) -> FloatArray:
    """Returns multiples of an interval from 0, up to the largest loss that counts.

    Args:
      sigma: As in :func:`loss_distribution`.
      interval: Above zero.
    """
    largest = 0.5 / sigma**2 + _DEVIATIONS / sigma
    return np.asarray(np.arange(0, math.ceil(largest / interval) + 1) * interval)


def losses_of_divergences(
    interval: float, epsilons: FloatArray, taking_part: FloatArray, zeroed: FloatArray
) -> privacy_loss_distribution.PrivacyLossDistribution:
    """Returns the privacy loss of a pair by its divergences in both directions.

    Args:
      interval: That of the grid.
      epsilons: What :func:`grid_of_epsilons` returned.
      taking_part: The divergences of outputs with a client from those without, at the epsilons.
      zeroed: Those of outputs without the client from those with it.
    """
    return privacy_loss_distribution.PrivacyLossDistribution(
        _losses(interval, epsilons, taking_part, zeroed),
        _losses(interval, epsilons, zeroed, taking_part),
    )


def divergence_with(sigma: float, sampling_probability: float, epsilons: FloatArray) -> FloatArray:
    """Returns the largest divergences of outputs with a client from those without.

    Args:
      sigma: As in :func:`loss_distribution`.
      sampling_probability: As there.
      epsilons: At least 0, of any shape.
    """
    q, variance = sampling_probability, sigma**2
    factor = np.exp(epsilons)
    weight = (1.0 - q) * np.expm1(epsilons) / q
    # Where P is larger is y > y*: with s = exp(y / s^2) and h = exp(-1 / 2 s^2), it is
    # h s - e^eps - k h / s > 0.
    log_half = -0.5 / variance
    root = np.sqrt(factor**2 + 4.0 * weight * math.exp(2.0 * log_half))
    cutoff = variance * (np.log(0.5 * (factor + root)) - log_half)
    upper = scipy.special.ndtr
    return np.asarray(
        np.clip(
            q
            * (
                upper((1.0 - cutoff) / sigma)
                - factor * upper(-cutoff / sigma)
                - weight * upper((-1.0 - cutoff) / sigma)
            ),
            0.0,
            1.0,
        )
    )


def divergence_without(
    sigma: float, sampling_probability: float, epsilons: FloatArray
) -> FloatArray:
    """Returns the largest divergences of outputs without a client from those with it.

    Arguments are those of :func:`divergence_with`.
    """
    q, variance = sampling_probability, sigma**2
    # (1 - q) + q exp((y - 1/2) / s^2) > e^eps.
    with np.errstate(divide="ignore"):
        cutoff = variance * np.log((np.exp(epsilons) - (1.0 - q)) / q) + 0.5
    upper = scipy.special.ndtr
    return np.asarray(
        np.clip(
            q * upper((1.0 - cutoff) / sigma)
            + (1.0 - q - np.exp(epsilons)) * upper(-cutoff / sigma),
            0.0,
            1.0,
        )
    )


def _losses(
    interval: float, epsilons: FloatArray, forward: FloatArray, backward: FloatArray
) -> DenseLosses:
    """Losses of a pair by its divergences at epsilons >= 0 and, the other way, below."""
    highest = max(int(np.count_nonzero(forward > _NEGLIGIBLE)), 1)
    lowest = max(int(np.count_nonzero(backward > _NEGLIGIBLE)), 1)
    ratios = np.exp(-epsilons[lowest:0:-1])
    below = 1.0 - ratios + ratios * backward[lowest:0:-1]
    deltas = np.minimum.accumulate(np.concatenate([below, forward[: highest + 1]]))
    return DenseLosses.of_deltas(interval, -len(below), deltas)
