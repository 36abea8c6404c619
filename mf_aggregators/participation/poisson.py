"""Poisson sampling: each client of a round's group joins by a coin of its own.

So the queries to one group are Poisson-sampled Gaussian mechanisms, composed by dp-accounting's
privacy loss distributions. Zero-out is adding or removing one client here, since who does not join
and who joins with zeros add the same to the sum.

dp-accounting inverts the privacy loss, and adds up a delta, one number at a time, in Python, which
takes most of the time of a sampled run's epsilon. Here all numbers are taken at once; the grid,
what is rounded up and the composition are dp-accounting's.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from dp_accounting import dp_event
from dp_accounting.pld import privacy_loss_distribution, privacy_loss_mechanism
from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType

from mf_aggregators import random_streams
from mf_aggregators.kernel.arrays import FloatArray, IntArray
from mf_aggregators.kernel.losses import DenseLosses
from mf_aggregators.participation.cyclic_groups import ComposedGroups
from mf_aggregators.participation.kinds import own
from mf_aggregators.participation.sampled_runs import SampledRun
from mf_aggregators.participation.samplers import LEAST_PROBABILITY, probability_of, too_large
from mf_aggregators.printed_guarantees import rounded_up
from mf_aggregators.random_streams import Draw, Stream


@own
@dataclasses.dataclass(frozen=True)
class PoissonSampling(ComposedGroups):
    """Each client of a round's group joins independently with probability B b / m (Cor. F.1).

    The groups have floor(m / b) or ceil(m / b) clients; batches vary in size around B.

    Attributes:
      num_rounds: The rounds n.
      num_bands: The bands b of C.
      population: The clients m.
      clients_per_round: The clients B of a round, in expectation.
    """

    name: ClassVar[str] = "poisson"
    largest_move: ClassVar[float] = 1.0

    @property
    def sampling_probability(self) -> float:
        """The probability q = B b / m that a client of a round's group joins."""
        return self.clients_per_round * self.num_bands / self.population

    def group_slice(self, group: int) -> slice:
        """Returns the places of a group: the groups leave nobody out."""
        return slice(
            group * self.population // self.num_bands,
            (group + 1) * self.population // self.num_bands,
        )

    def draw_from(self, group: IntArray, seed: int, round_index: int) -> IntArray:
        """Returns whose coins come up heads."""
        generator = random_streams.generator_of(seed, Stream.BATCHES, Draw.ROUND, round_index)
        # A random number has 53 bits: the probability is q to within 2^-53.
        return group[generator.random(len(group)) < self.sampling_probability]

    def _batch_size(self) -> int | None:
        return None if self.sampling_probability < 1.0 else self.clients_per_round

    def _improbable(self, groups: IntArray, cohorts: Sequence[IntArray]) -> str | None:
        probability = self.sampling_probability
        drawn_from = np.array([self.size_of_group(i % self.num_bands) for i in range(len(cohorts))])
        sizes = np.array([len(cohort) for cohort in cohorts])
        found = too_large(sizes, drawn_from, probability, self.clients_per_round)
        if found is not None:
            return found
        if probability_of(sizes.sum(), drawn_from.sum(), probability) < LEAST_PROBABILITY:
            return (
                f"its rounds had {sizes.mean():.4g} clients on average, more than chance gives "
                f"where {self.clients_per_round} are expected"
            )
        return self._too_often(groups, cohorts, probability)

    @staticmethod
    def loss_distribution(
        sigma: float, sampling_probability: float, interval: float
    ) -> privacy_loss_distribution.PrivacyLossDistribution:
        """Returns the privacy loss of a Gaussian sum of sensitivity 1 over a Poisson sample.

        Its losses are rounded so that no epsilon is too small (Doroshenko et al. 2022, Alg. 1).
        ``compose`` takes dp-accounting's dense ones; theirs does not take these.

        Args:
          sigma: The standard deviation of the noise, above zero.
          sampling_probability: The probability that a client is drawn, in (0, 1].
          interval: What the losses of the grid are multiples of, above zero.
        """
        losses = functools.partial(_losses, sigma, sampling_probability, interval)
        remove = losses(AdjacencyType.REMOVE)
        if sampling_probability == 1.0:
            return privacy_loss_distribution.PrivacyLossDistribution(remove)
        return privacy_loss_distribution.PrivacyLossDistribution(remove, losses(AdjacencyType.ADD))

    @staticmethod
    def losses_below(
        sigma: float, sampling_probability: float, interval: float
    ) -> privacy_loss_distribution.PrivacyLossDistribution:
        """Returns losses of a Poisson sample that are rounded down."""
        found: privacy_loss_distribution.PrivacyLossDistribution = (
            privacy_loss_distribution.from_gaussian_mechanism(
                sigma,
                pessimistic_estimate=False,
                value_discretization_interval=interval,
                sampling_prob=sampling_probability,
            )
        )
        return found

    def event_of(self, run: SampledRun) -> dp_event.DpEvent:
        """Returns the composed Poisson-sampled Gaussian mechanism."""
        sampled = dp_event.PoissonSampledDpEvent(
            self.sampling_probability, dp_event.GaussianDpEvent(run.sigma)
        )
        return dp_event.SelfComposedDpEvent(sampled, self.most_participations())

    def accounting_words(self) -> str:
        """Returns how the amplified guarantee is computed."""
        return (
            "Amplification by sampling for banded matrices (BandMF Thm 4, Cor. F.1): the privacy "
            "loss distribution of composed Poisson-sampled Gaussian mechanisms, by dp-accounting."
        )

    def _draw_words(self) -> str:
        return f"each client with probability {rounded_up(self.sampling_probability, '.6g')}."


# dp-accounting ships no types.
class SampledGaussianLoss(privacy_loss_mechanism.GaussianPrivacyLoss):  # type: ignore[misc]
    """dp-accounting's Gaussian mechanism on a sample, with deltas of many epsilons at once.

    Arguments are those of dp-accounting's class. Newer versions of it know that a client may be
    replaced by another one; here a client is added or removed, and that raises a ValueError.
    """

    def __init__(self, sigma: float, **options: Any) -> None:
        super().__init__(sigma, **options)
        if self.adjacency_type not in (AdjacencyType.ADD, AdjacencyType.REMOVE):
            raise ValueError(
                f"adjacency_type must be ADD or REMOVE, found {self.adjacency_type.value}."
            )
        self._sigma = sigma

    def get_delta_for_epsilon(self, epsilon: float | list[float] | FloatArray) -> FloatArray:
        """Returns the deltas of epsilons (the hockey-stick divergences), of their shape.

        Args:
          epsilon: Epsilons, also negative ones.
        """
        epsilons = np.asarray(epsilon, dtype=np.float64)
        cutoffs = self._largest_outputs(epsilons)
        deltas = self.mu_upper_cdf(cutoffs) - np.exp(epsilons + self.mu_lower_log_cdf(cutoffs))
        # An output of any size has at least this loss.
        is_always = np.isposinf(cutoffs)
        deltas[is_always] = -np.expm1(epsilons[is_always])
        deltas[np.isneginf(cutoffs)] = 0.0
        return np.asarray(np.clip(deltas, 0.0, 1.0))

    def _largest_outputs(self, losses: FloatArray) -> FloatArray:
        """The largest outputs whose privacy loss is at least the given ones."""
        sign = -1.0 if self.adjacency_type == AdjacencyType.ADD else 1.0
        if self.sampling_prob == 1.0:
            unsampled = losses
        else:
            # The loss l of a sample is sign log(1 - q + q exp(sign u)) for the loss u without
            # sampling, so that sign u = sign l - log q + log(1 - (1 - q) exp(-sign l)).
            rest = -np.expm1(math.log1p(-self.sampling_prob) - sign * losses)
            with np.errstate(divide="ignore"):
                logarithm = np.log(np.maximum(rest, 0.0))
            unsampled = losses + sign * (logarithm - math.log(self.sampling_prob))
        # Without sampling, and at sensitivity 1, the loss of an output x is (1/2 - x) / sigma^2
        # where a client is added, and (-1/2 - x) / sigma^2 where it is removed.
        return np.asarray(
            -sign * 0.5 * self.sensitivity - unsampled * (self._sigma**2) / self.sensitivity
        )


def _losses(
    sigma: float, sampling_probability: float, interval: float, adjacency: AdjacencyType
) -> DenseLosses:
    loss = SampledGaussianLoss(
        sigma, sensitivity=1.0, sampling_prob=sampling_probability, adjacency_type=adjacency
    )
    bounds = loss.connect_dots_bounds()
    lower = math.floor(bounds.epsilon_lower / interval)
    upper = math.ceil(bounds.epsilon_upper / interval)
    deltas = loss.get_delta_for_epsilon(np.arange(lower, upper + 1) * interval)
    # Rounding may let a delta be larger than an earlier one. Versions of dp-accounting refuse that,
    # or make it smaller, which is not on the side of privacy.
    deltas = np.maximum.accumulate(deltas[::-1])[::-1]
    return DenseLosses.of_deltas(interval, lower, deltas)
