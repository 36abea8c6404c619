"""Random allocation: each client takes part in one random round of every cycle, drawn afresh."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np

from mf_aggregators.kernel import draws_of_clients
from mf_aggregators.kernel.draws_of_clients import Groups
from mf_aggregators.kernel.numbers import IntArray
from mf_aggregators.participation.cyclic_groups import CyclicGroups
from mf_aggregators.participation.schemes import nth_round, too_large


@dataclasses.dataclass(frozen=True)
class RandomAllocation(CyclicGroups):
    """Each client of a group is in one secret round of every cycle of its group's rounds.

    A cycle has t = floor(m / (b B)) rounds, and a group t B clients, so that B clients are in a
    round on average; fewer than b B clients never take part.

    Attributes:
      num_rounds: The rounds n.
      num_bands: The bands b of C.
      population: The clients m.
      clients_per_round: The clients B of a round, in expectation.
    """

    name: ClassVar[str] = "random_allocation"
    largest_move: ClassVar[float] = 1.0
    _kind: ClassVar[Callable[..., Groups]] = draws_of_clients.RandomAllocation

    @property
    def rounds_of_cycle(self) -> int:
        """The rounds t of a group in one cycle."""
        return self.population // (self.num_bands * self.clients_per_round)

    def most_participations(self, num_rounds: int | None = None) -> int:
        """Returns the cycles of a group, in each of which a client is once."""
        return math.ceil(super().most_participations(num_rounds) / self.rounds_of_cycle)

    def _cycle_of(self, round_index: int) -> int:
        return round_index // self.num_bands // self.rounds_of_cycle

    def _deviation_of_round(self, index: int, last: IntArray) -> str | None:
        before = last[last >= 0] // self.num_bands // self.rounds_of_cycle
        if np.any(before == self._cycle_of(index)):
            return f"a client of {nth_round(index)} took part twice in one cycle of its group"
        return None

    def _improbable(self, groups: IntArray, cohorts: Sequence[IntArray]) -> str | None:
        """A cycle that left somebody out, or a round that is too large for chance."""
        sizes = np.array([len(cohort) for cohort in cohorts])
        bands, rounds = self.num_bands, self.rounds_of_cycle
        for group in range(bands):
            of_group = sizes[group::bands]
            whole = of_group[: len(of_group) // rounds * rounds].reshape(-1, rounds)
            if np.any(whole.sum(axis=1) != self.size_of_group(group)):
                return "a client is in no round of a whole cycle of its group"
        drawn_from = np.array([self.size_of_group(i % bands) for i in range(len(cohorts))])
        return too_large(sizes, drawn_from, 1.0 / rounds, self.clients_per_round)

    @property
    def label(self) -> str:
        """What tables say of the mechanism."""
        return f"1 of {self.rounds_of_cycle} rounds"

    def condition(self, sampler: str | None = None) -> str:
        """Returns who has to do what for the guarantee to hold, after "only if"."""
        return (
            f"{super().condition(sampler)} Every client is in one random round of each cycle of "
            f"{self.rounds_of_cycle} of its group, drawn afresh for each cycle."
        )

    def accounting_words(self) -> str:
        """Returns how the amplified guarantee is computed."""
        return (
            "Amplification by random allocation (one of t rounds, arXiv 2602.17284) for banded "
            "matrices: the distribution of the privacy loss of a cycle, on a grid whose rounding "
            "is on the side of privacy, composed by dp-accounting."
        )

    def _draw_words(self) -> str:
        return (
            f"whose clients are each in one of the {self.rounds_of_cycle} rounds of a cycle of the "
            "group, uniformly at random, independently of all others and of other cycles."
        )
