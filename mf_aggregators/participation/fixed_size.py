"""Fixed-size sampling: a random subset of a round's group, of the same size in every round."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import ClassVar

from mf_aggregators.kernel.draws_of_clients import FixedSize, Groups
from mf_aggregators.kernel.numbers import IntArray
from mf_aggregators.participation.cyclic_groups import CyclicGroups


@dataclasses.dataclass(frozen=True)
class FixedSizeSampling(CyclicGroups):
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
    _kind: ClassVar[Callable[..., Groups]] = FixedSize

    @property
    def sampling_probability(self) -> float:
        """The probability B / floor(m / b) that a client of a round's group is drawn."""
        return self.as_draws().sampling_probability

    def _improbable(self, groups: IntArray, cohorts: Sequence[IntArray]) -> str | None:
        return self._too_often(groups, cohorts, self.sampling_probability)

    def accounting_words(self) -> str:
        """Returns how the amplified guarantee is computed."""
        return (
            "Amplification by sampling for banded matrices (BandMF Thm 4): the privacy loss "
            "distribution of composed Gaussian mechanisms on batches sampled without replacement, "
            "by dp-accounting."
        )

    def _draw_words(self) -> str:
        size = self.size_of_group(0)
        return f"a uniformly random subset of {self.clients_per_round} of its {size}."
