"""Poisson sampling: each client of a round's group joins by a coin of its own."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np

from mf_aggregators.kernel import draws_of_clients
from mf_aggregators.kernel.draws_of_clients import Groups
from mf_aggregators.kernel.groups import binomial_tail
from mf_aggregators.kernel.numbers import IntArray, rounded_up
from mf_aggregators.participation.cyclic_groups import CyclicGroups
from mf_aggregators.participation.schemes import LEAST_PROBABILITY, too_large


@dataclasses.dataclass(frozen=True)
class PoissonSampling(CyclicGroups):
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
    _kind: ClassVar[Callable[..., Groups]] = draws_of_clients.Poisson

    @property
    def sampling_probability(self) -> float:
        """The probability q = B b / m that a client of a round's group joins."""
        return self.as_draws().sampling_probability

    def _batch_size(self) -> int | None:
        return None if self.sampling_probability < 1.0 else self.clients_per_round

    def _improbable(self, groups: IntArray, cohorts: Sequence[IntArray]) -> str | None:
        probability = self.sampling_probability
        drawn_from = np.array([self.size_of_group(i % self.num_bands) for i in range(len(cohorts))])
        sizes = np.array([len(cohort) for cohort in cohorts])
        found = too_large(sizes, drawn_from, probability, self.clients_per_round)
        if found is not None:
            return found
        if binomial_tail(sizes.sum(), drawn_from.sum(), probability) < LEAST_PROBABILITY:
            return (
                f"its rounds had {sizes.mean():.4g} clients on average, more than chance gives "
                f"where {self.clients_per_round} are expected"
            )
        return self._too_often(groups, cohorts, probability)

    def accounting_words(self) -> str:
        """Returns how the amplified guarantee is computed."""
        return (
            "Amplification by sampling for banded matrices (BandMF Thm 4, Cor. F.1): the privacy "
            "loss distribution of composed Poisson-sampled Gaussian mechanisms, by dp-accounting."
        )

    def _draw_words(self) -> str:
        return f"each client with probability {rounded_up(self.sampling_probability, '.6g')}."
