"""What min-separation sampling and balls in bins share: clients draw for themselves.

No client has to know what another one does, and there are no groups. The rounds of each client are
``separation`` or more apart, at least as many as C has bands.
"""

import abc
import dataclasses
import math
from collections.abc import Sequence
from typing import ClassVar, TypeVar

import numpy as np

from mf_aggregators import validation
from mf_aggregators.accounting.participation_laws import ParticipationLaw
from mf_aggregators.participation import random_participation
from mf_aggregators.participation.random_participation import Amplified, Certification
from mf_aggregators.participation.schemes import SamplingScheme, too_large

_TOGETHER = """\
All rounds together are one mechanism, whose noise is that of a Gaussian one and whose
     mean depends on the secret rounds of each client, also with updates that depend on earlier
     rounds."""

SECRET_OF_CLIENTS = (
    "Neither the data nor what was released has a part in that, and nobody who sees what was "
    "released learns who took part. A client that cannot be asked in such a round contributes "
    "nothing to it; for its later rounds that makes no difference, and none of them has a part in "
    "whether it can be asked. Rounds of too many or too few clients are released as all others, "
    "and their sums are divided by the same number."
)

_Self = TypeVar("_Self", bound="SeparatedScheme")


@dataclasses.dataclass(frozen=True)
class SeparatedScheme(SamplingScheme):
    """Schemes without groups, in which each client's rounds are some number of rounds apart.

    Attributes:
      separation: Two participations i and j of one client satisfy |i - j| >= separation; at
        least num_bands, so that they change different rows of C x.
    """

    separation: int

    depends_on_matrix: ClassVar[bool] = True
    covers_absences: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        validation.set_positive_integers(self, "separation")
        if self.separation < self.num_bands:
            raise ValueError(
                f"a separation of {self.separation} is below the {self.num_bands} bands: the rows "
                "that two participations of a client change would overlap. Use a separation of at "
                "least num_bands, or fewer bands."
            )
        if self.separation * self.clients_per_round > self.population:
            raise ValueError(
                f"a population of {self.population} is too small for {self.clients_per_round} "
                f"clients per round that take part at most once in {self.separation} rounds: "
                f"{self.separation * self.clients_per_round} are needed. Use a smaller separation "
                f"(at most {self.population // self.clients_per_round}) or fewer clients per round."
            )

    @classmethod
    def of_sizes(
        cls: type[_Self],
        num_rounds: int,
        num_bands: int,
        population: int,
        clients_per_round: int,
        separation: int | None = None,
    ) -> _Self:
        """Returns the scheme of some sizes, with its default separation where that is None."""
        if separation is None:
            separation = cls._default_separation(num_bands, population, clients_per_round)
        return cls(num_rounds, num_bands, population, clients_per_round, separation)

    @classmethod
    def _default_separation(cls, num_bands: int, population: int, clients_per_round: int) -> int:
        del population, clients_per_round
        return num_bands

    # Accounting.

    @abc.abstractmethod
    def law(self) -> ParticipationLaw:
        """Returns the distribution of a client's rounds."""

    def amplified(
        self,
        sigma: float,
        delta: float,
        columns: np.ndarray | None,
        certification: Certification,
        num_coordinates: int,
    ) -> Amplified:
        """Returns the certified epsilon of a run."""
        return random_participation.amplified(
            self, sigma, validation.delta(delta), columns, certification, num_coordinates
        )

    def calibrated(
        self,
        target: float,
        delta: float,
        columns: np.ndarray | None,
        certification: Certification,
        num_coordinates: int,
    ) -> float:
        """Returns a noise multiplier whose certified epsilon is at most a target."""
        return random_participation.noise_multiplier(
            self, target, validation.delta(delta), columns, certification, num_coordinates
        )

    def estimated(
        self,
        target: float,
        delta: float,
        columns: np.ndarray | None,
        certification: Certification,
    ) -> float:
        """Returns about the noise multiplier of a target, fast and without a proof."""
        return random_participation.estimated_noise_multiplier(
            self, target, delta, columns, certification, is_rough=True
        )

    def log_moments(
        self, sigma: float, columns: np.ndarray | None, num_coordinates: int
    ) -> tuple[tuple[int, float], ...]:
        """Returns Renyi orders and log-moments of the dominating pair, exactly."""
        return random_participation.log_moments(self, sigma, columns, num_coordinates)

    def divergences(
        self, sigma: float, columns: np.ndarray | None, seed: int, num_coordinates: int
    ) -> tuple[tuple[float, float], ...]:
        """Returns epsilons and bounds on the hockey-stick divergence."""
        return random_participation.divergences(self, sigma, columns, seed, num_coordinates)

    @property
    def _rounds_of_client(self) -> int:
        return math.ceil(self.num_rounds / self.separation)

    def run_flags(self) -> str:
        """Returns the flags of commands that train."""
        return f"{super().run_flags()} --separation={self.separation}"

    def together_words(self) -> str:
        """Returns what all rounds together are, as a mechanism."""
        return _TOGETHER

    def deviation_of_bins(self, cohorts: Sequence[np.ndarray]) -> str | None:
        """Returns why clients cannot each have a bin of rounds, independent and as likely.

        Args:
          cohorts: For each round the increasing indices of its clients.
        """
        bins = np.full(self.population, -1)
        for index, cohort in enumerate(cohorts):
            number = index % self.separation
            if np.any((bins[cohort] != -1) & (bins[cohort] != number)):
                return f"a client of round {index + 1} also took part in a round of another bin"
            bins[cohort] = number
        if not cohorts:
            return None
        sizes = np.bincount(bins[bins >= 0], minlength=self.separation)
        clients = np.full(self.separation, self.population)
        return too_large(sizes, clients, 1.0 / self.separation, self.clients_per_round)
