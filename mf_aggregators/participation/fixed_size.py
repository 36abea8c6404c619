"""Fixed-size sampling: a random subset of a round's group, of the same size in every round."""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from dp_accounting import dp_event
from dp_accounting.pld import privacy_loss_distribution

from mf_aggregators.accounting import fixed_size_gaussian
from mf_aggregators.participation.cyclic_groups import ComposedGroups
from mf_aggregators.sampling import random_streams
from mf_aggregators.sampling.random_streams import Draw, Stream


@dataclasses.dataclass(frozen=True)
class FixedSizeSampling(ComposedGroups):
    """Exactly B clients of a round's group, a uniformly random subset each time (Alg. 2).

    All groups have floor(m / b) clients; up to b - 1 clients never take part.

    Attributes:
      num_rounds: The rounds n.
      num_bands: The bands b of C.
      population: The clients m.
      clients_per_round: The clients B of a round.
    """

    name: ClassVar[str] = "fixed_size"
    has_random_sizes: ClassVar[bool] = False

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

    def draw_from(self, group: np.ndarray, seed: int, round_index: int) -> np.ndarray:
        """Returns a random subset."""
        generator = random_streams.generator_of(seed, Stream.BATCHES, Draw.ROUND, round_index)
        return generator.choice(group, self.clients_per_round, replace=False, shuffle=False)

    def _improbable(self, groups: np.ndarray, cohorts: Sequence[np.ndarray]) -> str | None:
        return self._too_often(groups, cohorts, self.sampling_probability)

    def loss_of_one(
        self, sigma: float, interval: float
    ) -> privacy_loss_distribution.PrivacyLossDistribution:
        """Returns the privacy loss of one round, for real normal numbers."""
        return fixed_size_gaussian.loss_distribution(sigma, self.sampling_probability, interval)

    def event_of(self, sigma: float) -> dp_event.DpEvent:
        """Returns composed sampling without replacement, with half the noise multiplier."""
        sampled = dp_event.SampledWithoutReplacementDpEvent(
            self.group_size, self.clients_per_round, dp_event.GaussianDpEvent(sigma / 2.0)
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
