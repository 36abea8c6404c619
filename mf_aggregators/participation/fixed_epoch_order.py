"""Fixed epoch order: a data centre goes through its data in the same order each epoch."""

import dataclasses
from typing import ClassVar

from mf_aggregators.kernel import validation
from mf_aggregators.kernel.schemas import Schema
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

    def as_schema(self) -> Schema:
        """Returns the schema as numbers, for the kernel."""
        return Schema(self.epochs, self.separation, is_even=True)

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
