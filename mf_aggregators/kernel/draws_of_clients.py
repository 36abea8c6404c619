"""Sampling schemes with groups as integers: a closed list, one frozen dataclass each.

The clients are split into as many groups as C has bands b, and round i draws from group i modulo b
alone (BandMF Alg. 2 and 6), in secret. A client is in rounds of one group alone, b or more rounds
apart, and each of its participations changes other rows of C x: rows j to j + b - 1, for a
lower-triangular C of b bands. A run is no more revealing than ceil(n / b) adaptive queries to one
group, each a Gaussian mechanism whose sensitivity is the largest column norm of C, run on the
batches that the scheme draws (BandMF Thm 4, Cor. F.1 and F.2).

Adjacency is zero-out: neighbouring populations differ in one client, who is drawn for the same
rounds with zero vectors. Noise multipliers are relative to the largest column norm of C.
"""

import dataclasses
import math
from typing import ClassVar, TypeAlias, final

from mf_aggregators.kernel import validation
from mf_aggregators.kernel.schemas import Schema


@dataclasses.dataclass(frozen=True)
class AllParticipations:
    """All participations of a client together, against an adversary who knows their rounds.

    Attributes:
      norm: Their sensitivity over the largest column norm of C.
      disjoint: Their number, if each changes rows of C x of its own, by one norm; otherwise 1.
    """

    norm: float = 1.0
    disjoint: int = 1

    @property
    def largest_part(self) -> float:
        """Upper bound on the shift of one row, over the largest column norm of C."""
        return self.norm / math.sqrt(self.disjoint)


@dataclasses.dataclass(frozen=True)
class _Groups:
    """Sizes of a scheme that draws from one group of the clients after the other.

    Attributes:
      name: The name of the scheme.
      num_rounds: The rounds n.
      num_bands: The bands b of C, and the groups.
      population: The clients m.
      clients_per_round: The clients B of a round, expected or exact.

    Raises:
      ValueError: If a size is no positive integer, or there are fewer than b B clients.
    """

    num_rounds: int
    num_bands: int
    population: int
    clients_per_round: int

    name: ClassVar[str]
    # The most that zeroing one client moves the sum of a round, in clip norms: two if the client
    # takes the place of another one.
    largest_move: ClassVar[float] = 2.0

    def __post_init__(self) -> None:
        validation.set_positive_integers(self, *(each.name for each in dataclasses.fields(self)))
        if self.num_bands * self.clients_per_round > self.population:
            raise ValueError(
                f"a population of {self.population} is too small for {self.num_bands} groups of "
                f"at least {self.clients_per_round} clients, one group for each band: "
                f"{self.num_bands * self.clients_per_round} are needed. Use fewer bands (at most "
                f"{self.population // self.clients_per_round}) or fewer clients per round."
            )

    def __str__(self) -> str:
        return f"{self.name} sampling of {self.clients_per_round} of {self.population} clients"

    @property
    def schema(self) -> Schema:
        """The schema that every draw keeps: the rounds that draw from one group."""
        return Schema(self.rounds_of_group, self.num_bands, is_even=True)

    @property
    def rounds_of_group(self) -> int:
        """The most rounds ceil(n / b) that draw from one group."""
        return math.ceil(self.num_rounds / self.num_bands)

    @property
    def most_participations(self) -> int:
        """The most participations of one client."""
        return self.rounds_of_group

    @property
    def together(self) -> AllParticipations:
        """All participations of a client: no two of them change the same row of C x."""
        return AllParticipations(math.sqrt(self.most_participations), self.most_participations)


@dataclasses.dataclass(frozen=True)
class _Coins(_Groups):
    """Schemes whose clients join by coins; groups have floor(m / b) or ceil(m / b) clients."""

    @property
    def sampling_probability(self) -> float:
        """The probability q = B b / m that a client of a round's group joins."""
        return self.clients_per_round * self.num_bands / self.population


@final
@dataclasses.dataclass(frozen=True)
class Poisson(_Coins):
    """Each client of a round's group joins independently with probability B b / m (Cor. F.1)."""

    name: ClassVar[str] = "poisson"
    largest_move: ClassVar[float] = 1.0


@final
@dataclasses.dataclass(frozen=True)
class TruncatedPoisson(_Coins):
    """Poisson sampling; of more than ``largest_batch`` clients a random subset stays."""

    name: ClassVar[str] = "truncated_poisson"
    largest_batch: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.largest_batch < self.clients_per_round:
            raise ValueError(
                f"a largest batch of {self.largest_batch} is below the {self.clients_per_round} "
                "clients that are expected in a round. Use a largest batch of at least "
                "clients_per_round, or fewer clients per round."
            )


@final
@dataclasses.dataclass(frozen=True)
class FixedSize(_Groups):
    """Exactly B of the floor(m / b) clients of a round's group, a random subset each time."""

    name: ClassVar[str] = "fixed_size"

    @property
    def group_size(self) -> int:
        """The clients floor(m / b) of each group."""
        return self.population // self.num_bands

    @property
    def sampling_probability(self) -> float:
        """The probability B / floor(m / b) that a client of a round's group is drawn."""
        return self.clients_per_round / self.group_size


@dataclasses.dataclass(frozen=True)
class _Cycles(_Groups):
    """Schemes in which each client of a group takes part once in every cycle of its rounds."""

    @property
    def rounds_of_cycle(self) -> int:
        """The rounds t = floor(m / (b B)) of a group in one cycle."""
        return self.population // (self.num_bands * self.clients_per_round)

    @property
    def most_participations(self) -> int:
        """The cycles of a group that n rounds begin."""
        return math.ceil(self.rounds_of_group / self.rounds_of_cycle)

    @property
    def group_size(self) -> int:
        """The clients t B of each group."""
        return self.rounds_of_cycle * self.clients_per_round


@final
@dataclasses.dataclass(frozen=True)
class Shuffling(_Cycles):
    """A group is shuffled and cut into batches of B, afresh for each cycle (Cor. F.2)."""

    name: ClassVar[str] = "shuffling"


@final
@dataclasses.dataclass(frozen=True)
class RandomAllocation(_Cycles):
    """Each client of a group is in one round of every cycle, uniform and independent."""

    name: ClassVar[str] = "random_allocation"
    largest_move: ClassVar[float] = 1.0


Groups: TypeAlias = Poisson | TruncatedPoisson | FixedSize | Shuffling | RandomAllocation
_KINDS = (Poisson, TruncatedPoisson, FixedSize, Shuffling, RandomAllocation)


def check(draws: Groups) -> Groups:
    """Returns draws, made anew from their integers.

    Args:
      draws: One of this module's classes.

    Raises:
      TypeError: If it is of another class, or of a subclass.
    """
    if type(draws) not in _KINDS:
        names = ", ".join(kind.__name__ for kind in _KINDS)
        raise TypeError(f"draws must be one of {names}, found {validation.shown(draws)}.")
    return dataclasses.replace(draws)
