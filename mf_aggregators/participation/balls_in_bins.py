"""Balls in bins: each client takes part in one secret round of every cycle."""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from mf_aggregators.kernel import draws_of_clients, numbers
from mf_aggregators.kernel.numbers import IntArray, counted
from mf_aggregators.participation.separated import SECRET_OF_CLIENTS, SeparatedScheme


@dataclasses.dataclass(frozen=True)
class BallsInBins(SeparatedScheme):
    """Each client is put once into one of ``separation`` bins at random (arXiv 2410.06266).

    It takes part in every round i with i modulo separation equal to its bin. Every client takes
    part, and m / separation of them in every round on average. So that this is B but for the
    remainder of a division, either separation is floor(m / B) or B is floor(m / separation).

    Attributes:
      num_rounds: The rounds n.
      num_bands: The bands b of C.
      population: The clients m.
      clients_per_round: The clients B of a round, in expectation.
      separation: The number of bins. It may be below num_bands: then participations of a client
        share rows of C x.
    """

    name: ClassVar[str] = "balls_in_bins"
    takes_any_matrix: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if (
            self.population // self.clients_per_round != self.separation
            and self.population // self.separation != self.clients_per_round
        ):
            raise ValueError(
                f"a population of {self.population} in {self.separation} bins has "
                f"{self.population / self.separation:.6g} clients in a round, not "
                f"{self.clients_per_round}. Use "
                f"a separation of {self.population // self.clients_per_round}, or "
                f"{self.population // self.separation} clients per round."
            )

    @classmethod
    def _default(
        cls, num_rounds: int, num_bands: int, population: int, clients_per_round: int
    ) -> int:
        positive = numbers.positive_integer(clients_per_round, "clients_per_round")
        return max(numbers.positive_integer(population, "population") // positive, 1)

    def as_draws(self) -> draws_of_clients.BallsInBins:
        """Returns the scheme as the integers that the kernel takes."""
        return draws_of_clients.BallsInBins(*dataclasses.astuple(self))

    def _deviation_of_rounds(self, cohorts: Sequence[IntArray]) -> str | None:
        return self.deviation_of_bins(cohorts)

    @property
    def label(self) -> str:
        """What tables say of the mechanism."""
        return f"{self.separation} bins"

    def condition(self, sampler: str | None = None) -> str:
        """Returns what every client has to do."""
        return (
            f"every client is in one of {self.separation} bins, drawn once, uniformly, "
            "independently of all others, and takes part in round i exactly if i modulo "
            f"{self.separation} is its bin. The bins stay secret for ever. In a simulation that is "
            f"what {sampler} draws."
        )

    def accounting_words(self) -> str:
        """Returns how the amplified guarantee is computed."""
        return (
            "Amplification by balls in bins (one secret round of each cycle, arXiv 2410.06266): an "
            "upper bound on delta that is certified by Monte Carlo, whose failure probability is "
            "part of delta."
        )

    def assumption_words(self) -> str:
        """Returns what the guarantee assumes of bins."""
        return (
            f"Balls in bins: every client is put into one of {counted(self.separation, 'bin')}, "
            "each as likely as the others, independently of all others, and takes part in all "
            f"rounds i with i modulo {self.separation} equal to its bin. {SECRET_OF_CLIENTS}"
        )
