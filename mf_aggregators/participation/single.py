"""Single participation: each client takes part at most once."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

from mf_aggregators.kernel.schemas import Schema
from mf_aggregators.participation.kinds import Participation, own


@own
@dataclasses.dataclass(frozen=True)
class SingleParticipation(Participation):
    """Each client takes part in at most one round."""

    name: ClassVar[str] = "single"

    def as_schema(self) -> Schema:
        """Returns the schema as numbers, for the kernel."""
        return Schema(1, 1)

    def run_flags(self) -> Mapping[str, int | str | None]:
        """Returns the flags of timers that let nobody return, by name."""
        return {"max_participations": 1}

    def __str__(self) -> str:
        return "at most one participation"
