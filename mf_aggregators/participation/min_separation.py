"""Min separation: a timer on each device keeps its participations apart."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

from mf_aggregators.kernel import validation
from mf_aggregators.kernel.schemas import Schema
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

    def as_schema(self) -> Schema:
        """Returns the schema as numbers, for the kernel."""
        return Schema(self.max_participations, self.separation)

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
