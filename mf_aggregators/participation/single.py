"""Single participation: each client takes part at most once."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import ClassVar

import numpy as np

from mf_aggregators.kernel import validation
from mf_aggregators.kernel.arrays import FloatArray
from mf_aggregators.participation.kinds import Participation, own


@own
@dataclasses.dataclass(frozen=True)
class SingleParticipation(Participation):
    """Each client takes part in at most one round."""

    name: ClassVar[str] = "single"

    @property
    def limit(self) -> int:
        """One participation."""
        return 1

    def separation_in(self, num_rounds: int) -> int:
        """Returns n: no client returns."""
        return validation.positive_integer(num_rounds, "num_rounds")

    def allows_separations(
        self, participations: int, smallest: int | None, largest: int | None
    ) -> bool:
        """Returns whether nobody returned."""
        return participations <= 1 or smallest is None

    def largest_sum(self, weights: FloatArray) -> float:
        """Returns the largest weight."""
        return float(np.max(weights))

    def _returning_patterns(self, num_rounds: int, most: int) -> Iterator[tuple[int, ...]]:
        # Nobody returns.
        del num_rounds, most
        return iter(())

    def run_flags(self) -> Mapping[str, int | str | None]:
        """Returns the flags of timers that let nobody return, by name."""
        return {"max_participations": 1}

    def __str__(self) -> str:
        return "at most one participation"
