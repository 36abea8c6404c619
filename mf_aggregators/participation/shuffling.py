"""Shuffling: batches are cut from a shuffled list of a round's group."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np

from mf_aggregators.kernel import draws_of_clients
from mf_aggregators.kernel.draws_of_clients import Groups
from mf_aggregators.kernel.numbers import IntArray
from mf_aggregators.participation.cyclic_groups import CyclicGroups
from mf_aggregators.participation.schemes import nth_round


@dataclasses.dataclass(frozen=True)
class Shuffling(CyclicGroups):
    """A round's group is shuffled and cut into batches of B, afresh whenever it is used up.

    As in Cor. F.2 each pass over a group shows every client of it once. The groups have a
    multiple of B clients, floor(m / (b B)) B; fewer than b B clients never take part.

    Attributes:
      num_rounds: The rounds n.
      num_bands: The bands b of C.
      population: The clients m.
      clients_per_round: The clients B of a round.
    """

    name: ClassVar[str] = "shuffling"
    has_random_sizes: ClassVar[bool] = False
    is_dominated: ClassVar[bool] = True
    _kind: ClassVar[Callable[..., Groups]] = draws_of_clients.Shuffling

    @property
    def batches_per_pass(self) -> int:
        """The batches floor(m / (b B)) of one pass over a group."""
        return self.population // (self.num_bands * self.clients_per_round)

    def most_participations(self, num_rounds: int | None = None) -> int:
        """Returns the passes over a group, in each of which a client is once."""
        return math.ceil(super().most_participations(num_rounds) / self.batches_per_pass)

    def _deviation_of_round(self, index: int, last: IntArray) -> str | None:
        before = last[last >= 0] // self.num_bands // self.batches_per_pass
        if np.any(before == index // self.num_bands // self.batches_per_pass):
            return f"a client of {nth_round(index)} took part twice in one pass over its group"
        return None

    def _improbable(self, groups: IntArray, cohorts: Sequence[IntArray]) -> None:
        """Nothing else: a pass has every client at most once."""

    def accounting_words(self) -> str:
        """Returns how the amplified guarantee is computed."""
        return (
            "Amplification by shuffling for banded matrices (BandMF Thm 4, Cor. F.2), by "
            "Feldman, McMillan and Talwar (2021), Thm 3.8, or no amplification where that is "
            "better."
        )

    def _draw_words(self) -> str:
        return (
            f"the next batch of {self.clients_per_round} of a shuffled list of all its "
            f"{self.size_of_group(0)}, shuffled afresh for each pass."
        )
