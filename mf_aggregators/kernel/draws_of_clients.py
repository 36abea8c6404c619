"""Sampling schemes as integers: a closed list, one frozen dataclass each.

**Groups.** The clients are split into as many groups as C has bands b, and round i draws from group
i modulo b alone (BandMF Alg. 2 and 6), in secret. A client is in rounds of one group alone, b or
more rounds apart, and each of its participations changes other rows of C x: rows j to j + b - 1,
for a lower-triangular C of b bands. A run is no more revealing than ceil(n / b) adaptive queries to
one group, each a Gaussian mechanism whose sensitivity is the largest column norm of C, run on the
batches that the scheme draws (BandMF Thm 4, Cor. F.1 and F.2).

**Secret rounds.** With min-separation sampling and balls in bins, each client draws its own rounds,
a separation or more apart (``dominating_pairs``).

Adjacency is zero-out: neighbouring populations differ in one client, who is drawn for the same
rounds with zero vectors. Noise multipliers are relative to the largest column norm of C.
"""

import dataclasses
import math
from typing import Any, ClassVar, TypeAlias, TypeVar, final, get_args

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
class _Draws:
    """Sizes of a scheme.

    Attributes:
      name: The name of the scheme.
      is_even: Whether a client's rounds are exactly, and not at least, so many rounds apart.
      num_rounds: The rounds n.
      num_bands: The most bands b of C; the number of groups, if there are groups.
      population: The clients m.
      clients_per_round: The clients B of a round, expected or exact.

    Raises:
      ValueError: If a size is no positive integer, or there are too few clients.
    """

    num_rounds: int
    num_bands: int
    population: int
    clients_per_round: int

    name: ClassVar[str]
    is_even: ClassVar[bool] = True
    # The most that zeroing one client moves the sum of a round, in clip norms: two if the client
    # takes the place of another one.
    largest_move: ClassVar[float] = 1.0
    _remedy: ClassVar[str] = "fewer bands"

    def __post_init__(self) -> None:
        validation.set_positive_integers(self, *(each.name for each in dataclasses.fields(self)))
        needed = self.distance * self.clients_per_round
        if needed > self.population:
            raise ValueError(
                f"a population of {self.population} is too small for {self.clients_per_round} "
                f"clients per round that are in at most one of {self.distance} rounds: {needed} "
                f"are needed. Use {self._remedy} (at most "
                f"{self.population // self.clients_per_round}) or fewer clients per round."
            )

    def __str__(self) -> str:
        return f"{self.name} sampling of {self.clients_per_round} of {self.population} clients"

    @property
    def distance(self) -> int:
        """The least number of rounds from one participation of a client to the next."""
        return self.num_bands

    @property
    def rounds_of_group(self) -> int:
        """The most rounds that a client can be in, which are ``distance`` or more apart."""
        return math.ceil(self.num_rounds / self.distance)

    @property
    def most_participations(self) -> int:
        """The most participations of one client."""
        return self.rounds_of_group

    @property
    def schema(self) -> Schema:
        """The schema that every draw keeps."""
        return Schema(self.rounds_of_group, self.distance, is_even=self.is_even)

    @property
    def together(self) -> AllParticipations:
        """All participations of a client, if no two of them change the same row of C x."""
        return AllParticipations(math.sqrt(self.most_participations), self.most_participations)


@dataclasses.dataclass(frozen=True)
class _Groups(_Draws):
    """Sizes of a scheme that draws from one group of the clients after the other."""

    largest_move: ClassVar[float] = 2.0

    @property
    def group_size(self) -> int:
        """The clients floor(m / b) of each group."""
        return self.population // self.num_bands

    @property
    def sampling_probability(self) -> float:
        """The probability B over the group's size that a client is in a round of its group."""
        return self.clients_per_round / self.group_size

    def group_slice(self, group: int) -> slice:
        """Returns which places of a random order of all clients are a group.

        Args:
          group: The group, from 0.
        """
        return slice(group * self.group_size, (group + 1) * self.group_size)


@dataclasses.dataclass(frozen=True)
class _Coins(_Groups):
    """Schemes whose clients join by coins; groups have floor(m / b) or ceil(m / b) clients."""

    @property
    def sampling_probability(self) -> float:
        """The probability q = B b / m that a client of a round's group joins."""
        return self.clients_per_round * self.num_bands / self.population

    def group_slice(self, group: int) -> slice:
        """Returns the places of a group: the groups leave nobody out."""
        m, b = self.population, self.num_bands
        return slice(group * m // b, (group + 1) * m // b)


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


@dataclasses.dataclass(frozen=True)
class _SecretRounds(_Draws):
    """Sizes of a scheme without groups.

    The roundings of a participation stay within ``num_bands`` rows, which a claim about the rows
    binds.

    Attributes:
      separation: Two participations of a client are at least so many rounds apart.
    """

    separation: int

    _remedy: ClassVar[str] = "a smaller separation"

    @property
    def distance(self) -> int:
        """The least number of rounds from one participation of a client to the next."""
        return self.separation

    @property
    def shares_rows(self) -> bool:
        """Whether two participations of a client may change the same row of C x."""
        return self.separation < self.num_bands


@final
@dataclasses.dataclass(frozen=True)
class MinSeparation(_SecretRounds):
    """Min-separation sampling: clients join with a secret coin when their timers allow it."""

    name: ClassVar[str] = "min_separation"
    is_even: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shares_rows:
            raise ValueError(
                f"a separation of {self.separation} is below the {self.num_bands} bands: the rows "
                "that two participations of a client change would overlap. Use a separation of at "
                "least num_bands, or fewer bands."
            )

    @property
    def joining_probability(self) -> float:
        """The probability that a client joins when its timer allows it."""
        others = self.clients_per_round * (self.separation - 1)
        return self.clients_per_round / (self.population - others)


@final
@dataclasses.dataclass(frozen=True)
class BallsInBins(_SecretRounds):
    """Balls in bins: a client's rounds equal its secret bin, modulo the separation."""

    name: ClassVar[str] = "balls_in_bins"


Groups: TypeAlias = Poisson | TruncatedPoisson | FixedSize | Shuffling | RandomAllocation
SecretRounds: TypeAlias = MinSeparation | BallsInBins
Draws: TypeAlias = Groups | SecretRounds
_Kind = TypeVar("_Kind", bound=_Draws)


def check(draws: _Kind, kinds: Any = Draws) -> _Kind:
    """Returns draws, made anew from their integers.

    Args:
      draws: One of this module's classes.
      kinds: Which ones: ``Draws``, ``Groups`` or ``SecretRounds``.

    Raises:
      TypeError: If it is of another class, or of a subclass.
    """
    if type(draws) not in get_args(kinds):
        names = ", ".join(kind.__name__ for kind in get_args(kinds))
        raise TypeError(f"draws must be one of {names}, found {validation.shown(draws)}.")
    return dataclasses.replace(draws)
