"""Fixed epoch order: a data centre goes through its data in the same order each epoch."""

import dataclasses
from collections.abc import Iterator
from typing import ClassVar

import numpy as np

from mf_aggregators.kernel import validation
from mf_aggregators.kernel.arrays import FloatArray
from mf_aggregators.participation.kinds import Participation, own


@own
@dataclasses.dataclass(frozen=True)
class FixedEpochOrder(Participation):
    """(k, b)-participation: at most k participations, adjacent ones exactly b rounds apart.

    The schema of a data centre that goes through its data in one fixed order, once
    an epoch (Choquette-Choo et al., Multi-epoch MF; BandMF Sec. 2).

    Attributes:
      epochs: The most participations k, at least 1.
      separation: The rounds b between adjacent participations, at least 1.

    Raises:
      ValueError: If an attribute is not a positive integer.
    """

    epochs: int
    separation: int

    name: ClassVar[str] = "fixed_epoch"
    is_evenly_spaced: ClassVar[bool] = True

    def __post_init__(self) -> None:
        validation.set_positive_integers(self, "epochs", "separation")

    @property
    def limit(self) -> int:
        """The epochs k."""
        return self.epochs

    def separation_in(self, num_rounds: int) -> int:
        """Returns b, whatever n is."""
        validation.positive_integer(num_rounds, "num_rounds")
        return self.separation

    def allows_separations(
        self, participations: int, smallest: int | None, largest: int | None
    ) -> bool:
        """Returns whether all participations were b rounds apart, and at most k."""
        if participations <= 1 or smallest is None:
            return True
        return smallest == largest == self.separation and participations <= self.epochs

    def largest_sum(self, weights: FloatArray) -> float:
        """Returns the largest sum of weights b rounds apart."""
        num_rounds = len(weights)
        most = self.most_participations(num_rounds)
        return max(
            float(np.sum(weights[start :: self.separation][:most]))
            for start in maximal_starts(num_rounds, self.separation, most)
        )

    def _returning_patterns(self, num_rounds: int, most: int) -> Iterator[tuple[int, ...]]:
        for start in maximal_starts(num_rounds, self.separation, most):
            yield tuple(range(start, num_rounds, self.separation))[:most]

    def factorize_flags(self) -> str:
        """Returns the flags that name the schema to ``mf-factorize`` and ``mf-report``."""
        return (
            f"{super().factorize_flags()} --separation={self.separation} "
            f"--max_participations={self.epochs}"
        )

    def condition(self, sampler: str | None = None) -> str:
        """Returns who has to go through all clients, after "only if"."""
        del sampler
        times = "once" if self.epochs == 1 else f"{self.epochs} times at most"
        return (
            "a data centre goes through all clients in one fixed order of "
            f"{self.separation} batches, each client in one of them, {times}: batch i + "
            f"{self.separation} has the clients of batch i. No draw has to be secret. A random "
            "order, or devices that decide themselves when they take part, have a weaker guarantee."
        )

    def __str__(self) -> str:
        return (
            f"at most {self.epochs} participations, adjacent ones exactly "
            f"{self.separation} round{'' if self.separation == 1 else 's'} apart"
        )


def maximal_starts(num_rounds: int, separation: int, most: int) -> range:
    """Returns the first rounds of the (k, b)-participation patterns that no other one contains.

    A pattern that starts at round b or later and has no room for all its participations
    lies within the one that starts b rounds earlier.

    Args:
      num_rounds: n.
      separation: b.
      most: The most participations k.
    """
    full = num_rounds - (most - 1) * separation
    return range(max(full, min(separation, num_rounds)))
