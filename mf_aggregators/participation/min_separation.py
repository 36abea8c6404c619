"""Min separation: a timer on each device keeps its participations apart."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import ClassVar

import numpy as np

from mf_aggregators.kernel import validation
from mf_aggregators.kernel.arrays import FloatArray
from mf_aggregators.participation.kinds import Participation, own


@own
@dataclasses.dataclass(frozen=True)
class MinSeparation(Participation):
    """b-min-sep-participation: any two participations at least b rounds apart (BandMF, Def. 1).

    The schema that a timer on each device enforces.

    Attributes:
      separation: The least distance b of two participations: rounds i and j of one client
        satisfy |i - j| >= b. 1 allows every round.
      max_participations: The most participations k of one client; None for as many
        as fit into the rounds.

    Raises:
      ValueError: If an attribute is not a positive integer.
    """

    separation: int
    max_participations: int | None = None

    name: ClassVar[str] = "min_sep"

    def __post_init__(self) -> None:
        validation.set_positive_integers(self, "separation")
        if self.max_participations is not None:
            validation.set_positive_integers(self, "max_participations")

    @property
    def limit(self) -> int | None:
        """The most participations k; None for as many as fit."""
        return self.max_participations

    def separation_in(self, num_rounds: int) -> int:
        """Returns b, whatever n is."""
        validation.positive_integer(num_rounds, "num_rounds")
        return self.separation

    def allows_separations(
        self, participations: int, smallest: int | None, largest: int | None
    ) -> bool:
        """Returns whether all participations were at least b rounds apart, and at most k."""
        if participations <= 1 or smallest is None:
            return True
        limit = self.max_participations
        return smallest >= self.separation and (limit is None or participations <= limit)

    def largest_sum(self, weights: FloatArray) -> float:
        """Returns the largest sum of weights at least b rounds apart (BandMF Alg. 3)."""
        return largest_pattern_sum(weights, self.separation, self.most_participations(len(weights)))

    def _returning_patterns(self, num_rounds: int, most: int) -> Iterator[tuple[int, ...]]:
        yield from _spread_patterns((), False, self.separation, most, num_rounds)

    def factorize_flags(self) -> str:
        """Returns the flags that name the schema to ``mf-factorize`` and ``mf-report``."""
        limit = self.max_participations
        most = "" if limit is None else f" --max_participations={limit}"
        return f"{super().factorize_flags()} --separation={self.separation}{most}"

    def run_flags(self) -> Mapping[str, int | str | None]:
        """Returns the flags of the timers, by name."""
        return {"separation": self.separation, "max_participations": self.max_participations}

    def __str__(self) -> str:
        limit = (
            "participations"
            if self.max_participations is None
            else f"at most {self.max_participations} participations"
        )
        apart = f"{self.separation} round{'' if self.separation == 1 else 's'} apart"
        return f"{limit} at least {apart}"


def largest_pattern_sum(values: FloatArray, separation: int, most: int) -> float:
    """BandMF Alg. 3: the largest sum of non-negative numbers over a min-separation pattern.

    F[i], the largest sums over at most 0, 1, ..., k rounds from round i on, follow from F[i + 1]
    and F[i + b], so that b of them are kept: O(n k) operations and O(n) memory.

    Args:
      values: (n,) non-negative numbers.
      separation: b.
      most: The most rounds of a pattern k, at least 1.

    Returns:
      The largest sum over at most ``most`` rounds at least b apart.
    """
    num_rounds = len(values)
    if most >= -(-num_rounds // separation):
        # The number of participations limits nothing.
        unlimited = [0.0] * (num_rounds + separation)
        for i, value in zip(range(num_rounds - 1, -1, -1), values[::-1].tolist(), strict=True):
            unlimited[i] = max(value + unlimited[i + separation], unlimited[i + 1])
        return unlimited[0]
    kept = np.zeros((separation, most + 1))
    sums, taken = np.zeros(most + 1), np.empty(most)
    for i, value in zip(range(num_rounds - 1, -1, -1), values[::-1].tolist(), strict=True):
        of_round = kept[i % separation]
        np.add(of_round[:-1], value, out=taken)
        np.maximum(taken, sums[1:], out=sums[1:])
        of_round[:] = sums
    return float(sums[most])


def _spread_patterns(
    rounds: tuple[int, ...], has_room: bool, separation: int, most: int, num_rounds: int
) -> Iterator[tuple[int, ...]]:
    """The maximal min-separation patterns that begin with ``rounds``.

    ``has_room`` says whether another round fits before the last of them: then only
    patterns of as many rounds as allowed are maximal.
    """
    earliest = rounds[-1] + separation if rounds else 0
    if len(rounds) == most or earliest >= num_rounds:
        if len(rounds) == most or not has_room:
            yield rounds
        return
    for i in range(earliest, num_rounds):
        with_room = has_room or i >= earliest + separation
        fitting = 1 + (num_rounds - 1 - i) // separation
        if with_room and len(rounds) + fitting < most:
            break
        yield from _spread_patterns((*rounds, i), with_room, separation, most, num_rounds)
