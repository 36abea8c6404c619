"""What Poisson sampling, fixed-size sampling and shuffling share: groups of clients, in turn.

The clients are split into as many groups as C has bands, and round i draws from group i modulo that
number alone (BandMF Alg. 2 and 6), so that the participations of a client change different rows of
C x (BandMF Thm 4). A data centre can do that.
"""

import abc
import dataclasses
import math
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from dp_accounting.pld import privacy_loss_distribution

from mf_aggregators.accounting.noise_failure import DEFAULT_NUM_COORDINATES
from mf_aggregators.participation import amplification
from mf_aggregators.participation.fixed_epoch_order import FixedEpochOrder
from mf_aggregators.participation.monte_carlo.certificates import Amplified, Certification
from mf_aggregators.participation.schemes import (
    LEAST_PROBABILITY,
    Sampler,
    SamplingScheme,
    counted,
    probability_of,
)
from mf_aggregators.sampling import random_streams
from mf_aggregators.sampling.random_streams import Draw, Stream

_TOGETHER = """\
Each participation of a client is one Gaussian mechanism on the rounds that it changes,
     which are those of no other participation of that client."""


@dataclasses.dataclass(frozen=True)
class CyclicGroups(SamplingScheme):
    """Schemes that draw from one group of the clients after the other."""

    has_groups: ClassVar[bool] = True
    # How many clip norms a client may move a sum by: twice one where it replaces another one.
    largest_move: ClassVar[float] = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_bands * self.clients_per_round > self.population:
            raise ValueError(
                f"a population of {self.population} is too small for {self.num_bands} groups of "
                f"at least {self.clients_per_round} clients, one group for each band: "
                f"{self.num_bands * self.clients_per_round} are needed. Use fewer bands (at most "
                f"{self.population // self.clients_per_round}) or fewer clients per round."
            )

    @classmethod
    def of_sizes(
        cls,
        num_rounds: int,
        num_bands: int,
        population: int,
        clients_per_round: int,
        separation: int | None = None,
    ) -> "CyclicGroups":
        """Returns the scheme of some sizes; it takes no separation."""
        if separation is not None:
            raise ValueError(
                f"the sampling scheme {cls.name!r} takes no separation, found {separation}: its "
                "groups are as many as there are bands."
            )
        return cls(num_rounds, num_bands, population, clients_per_round)

    @property
    def rounds_of_group(self) -> int:
        """The most rounds ceil(n / b) that draw from one group."""
        return math.ceil(self.num_rounds / self.num_bands)

    def schema(self) -> FixedEpochOrder:
        """Returns the schema of the rounds that draw from one group."""
        return FixedEpochOrder(self.rounds_of_group, self.num_bands)

    def of_first(self, num_rounds: int) -> SamplingScheme:
        """Returns the scheme of the first rounds, with the same probabilities."""
        return dataclasses.replace(self, num_rounds=max(num_rounds, self.num_bands))

    # Accounting.

    @abc.abstractmethod
    def amplified_epsilon(self, sigma: float, delta: float) -> float:
        """Returns the amplified epsilon of noise of real normal numbers.

        Args:
          sigma: The noise multiplier, relative to the largest column norm of C.
          delta: The delta of the guarantee.
        """

    def searched(self, target: float, delta: float, enough: float, num_coordinates: int) -> float:
        """Returns the noise multiplier that a search finds, at most one that suffices.

        Args:
          target: The epsilon that is to hold.
          delta: The delta of the guarantee.
          enough: A noise multiplier that suffices without amplification.
          num_coordinates: Parameters times rounds.
        """
        return amplification.searched_by_epsilons(self, target, delta, enough, num_coordinates)

    def amplified(
        self,
        sigma: float,
        delta: float,
        columns: np.ndarray | None,
        certification: Certification,
        num_coordinates: int = DEFAULT_NUM_COORDINATES,
    ) -> Amplified:
        """Returns the epsilon of a run; it needs no columns and no certificate."""
        del columns, certification
        epsilon = amplification.epsilon_of_groups(self, sigma, delta, num_coordinates)
        return Amplified(epsilon, None)

    def calibrated(
        self,
        target: float,
        delta: float,
        columns: np.ndarray | None,
        certification: Certification,
        num_coordinates: int = DEFAULT_NUM_COORDINATES,
    ) -> float:
        """Returns the least noise multiplier for an epsilon."""
        del columns, certification
        return amplification.noise_multiplier_of_groups(self, target, delta, num_coordinates)

    def curve(self, sigma: float, num_coordinates: int) -> tuple[tuple[float, float], ...]:
        """Returns pairs (epsilon, delta) that hold."""
        return amplification.curve_of_epsilons(self, sigma, num_coordinates)

    @abc.abstractmethod
    def group_slice(self, group: int) -> slice:
        """Returns which places of a random order of all clients are a group.

        Args:
          group: The group, from 0.
        """

    def size_of_group(self, group: int) -> int:
        """Returns how many clients a group has.

        Args:
          group: The group, from 0.
        """
        places = self.group_slice(group)
        return int(places.stop - places.start)

    def sampler(self, seed: int) -> "GroupSampler":
        """Creates the sampler of a run, of 8 bytes for each client."""
        return GroupSampler(self, seed)

    @abc.abstractmethod
    def draw_from(self, group: np.ndarray, seed: int, round_index: int) -> np.ndarray:
        """Returns the clients of a group that a round draws, in any order.

        Args:
          group: The clients of the round's group, in a random order.
          seed: The secret seed.
          round_index: The round, from 0.
        """

    def _deviation_of_rounds(self, cohorts: Sequence[np.ndarray]) -> str | None:
        groups, last = np.full(self.population, -1), np.full(self.population, -1)
        for index, cohort in enumerate(cohorts):
            group = index % self.num_bands
            if np.any((groups[cohort] != -1) & (groups[cohort] != group)):
                return (
                    f"a client of round {index + 1} also took part in a round of another group of "
                    "the population"
                )
            found = self._deviation_of_round(index, last[cohort])
            if found is not None:
                return found
            groups[cohort], last[cohort] = group, index
        sizes = np.bincount(groups[groups >= 0], minlength=self.num_bands)
        for group, size in enumerate(sizes):
            if size > self.size_of_group(group):
                return f"more clients took part in the rounds of group {group + 1} than it can have"
        return self._improbable(groups, cohorts) if cohorts else None

    def _deviation_of_round(self, index: int, last: np.ndarray) -> str | None:
        """Why a round cannot follow the last rounds of its clients, -1 for none."""
        del index, last
        return None

    @abc.abstractmethod
    def _improbable(self, groups: np.ndarray, cohorts: Sequence[np.ndarray]) -> str | None:
        """What has more participations than draws give.

        Args:
          groups: (m,) the group of each client; -1 where it is not known.
          cohorts: The clients of each round, at least one.
        """

    def _too_often(
        self, groups: np.ndarray, cohorts: Sequence[np.ndarray], probability: float
    ) -> str | None:
        """A client with more participations than independent draws give."""
        counts = np.bincount(np.concatenate(cohorts), minlength=self.population)
        # Rounds that draw from each client's group; clients never drawn have no known one.
        bands = self.num_bands
        rounds = (len(cohorts) - np.maximum(groups, 0) + bands - 1) // bands
        too_often = probability_of(counts, rounds, probability) * self.population
        if not np.any(too_often < LEAST_PROBABILITY):
            return None
        worst = int(np.argmin(too_often))
        return (
            f"a client took part in {counts[worst]} of {rounds[worst]} rounds that draw from its "
            "group, more than chance gives"
        )

    @property
    def label(self) -> str:
        """What tables say of the mechanism."""
        return "amplified"

    def condition(self, sampler: str | None = None) -> str:
        """Returns who has to draw the batches."""
        return (
            "a data centre draws every batch itself, round i by draw(i) of the sampler "
            f"{sampler}, whose seed and draws stay secret for ever. Devices that decide "
            "themselves when they take part have a much weaker guarantee."
        )

    @abc.abstractmethod
    def _draw_words(self) -> str:
        """Whom a round draws, as the end of a sentence."""

    def assumption_words(self) -> str:
        """Returns what the guarantee assumes of the draws."""
        return (
            f"Sampling: the population is split into {counted(self.num_bands, 'group')}, as many "
            f"as C has bands, and round i draws from group i modulo {self.num_bands} alone, "
            f"{self._draw_words()} The server draws every batch itself, keeps who was drawn "
            "secret, and every client that was drawn takes part."
        )

    def together_words(self) -> str:
        """Returns what all rounds together are, as a mechanism."""
        return _TOGETHER


@dataclasses.dataclass(frozen=True)
class ComposedGroups(CyclicGroups):
    """Schemes whose draws of one group are independent, and compose."""

    @property
    @abc.abstractmethod
    def sampling_probability(self) -> float:
        """The probability that a client of a round's group is drawn."""

    @abc.abstractmethod
    def loss_of_one(
        self, sigma: float, interval: float
    ) -> privacy_loss_distribution.PrivacyLossDistribution:
        """Returns the privacy loss of one round, for real normal numbers.

        Args:
          sigma: The noise multiplier.
          interval: What the losses of the grid are multiples of.
        """

    def amplified_epsilon(self, sigma: float, delta: float) -> float:
        """Returns the epsilon of composed rounds."""
        return amplification.composed_epsilon(self, sigma, delta)

    def searched(self, target: float, delta: float, enough: float, num_coordinates: int) -> float:
        """Returns the noise multiplier that a search by privacy losses finds."""
        return amplification.searched_by_losses(self, target, delta, enough, num_coordinates)

    def curve(self, sigma: float, num_coordinates: int) -> tuple[tuple[float, float], ...]:
        """Returns pairs (epsilon, delta) of the composed rounds."""
        return amplification.composed_curve(self, sigma, num_coordinates)


@dataclasses.dataclass(frozen=True, eq=False)
class GroupSampler(Sampler):
    """Batches of one group after the other.

    Attributes:
      scheme: How batches are drawn.
      order: (population,) int64: all clients in random order. Each group is a slice of it.
    """

    scheme: CyclicGroups
    order: np.ndarray = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        order = random_streams.generator_of(self.seed, Stream.BATCHES, Draw.PARTITION).permutation(
            self.scheme.population
        )
        order.flags.writeable = False
        object.__setattr__(self, "order", order)

    def group_of_round(self, round_index: int) -> np.ndarray:
        """Returns the group of the population that a round draws from.

        Args:
          round_index: The round, from 0.

        Returns:
          int64 indices of clients, in random order.

        Raises:
          ValueError: If the scheme has no such round.
        """
        self._check_round(round_index)
        return self.order[self.scheme.group_slice(round_index % self.scheme.num_bands)]

    def _num_eligible(self, round_index: int) -> int:
        return len(self.group_of_round(round_index))

    def _draw(self, round_index: int) -> np.ndarray:
        group = self.group_of_round(round_index)
        return np.sort(self.scheme.draw_from(group, self.seed, round_index))
