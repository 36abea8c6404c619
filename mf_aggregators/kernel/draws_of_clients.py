"""Sampling schemes as integers, the columns of C, and runs with randomly drawn clients, as data.

The schemes are a closed list, one frozen dataclass each.

**Groups.** The clients are split into as many groups as C has bands b, and round i draws from group
i modulo b alone (BandMF Alg. 2 and 6), in secret. A client is in rounds of one group alone, b or
more rounds apart, and each of its participations changes other rows of C x: rows j to j + b - 1,
for a lower-triangular C of b bands. A run is no more revealing than ceil(n / b) adaptive queries to
one group, each a Gaussian mechanism whose sensitivity is the largest column norm of C, run on the
batches that the scheme draws (BandMF Thm 4, Cor. F.1 and F.2).

**Secret rounds.** With min-separation sampling and balls in bins, each client draws its own rounds,
a separation or more apart (``certificate``).

Adjacency is zero-out: neighbouring populations differ in one client, who is drawn for the same
rounds with zero vectors. Noise multipliers are relative to the largest column norm of C.
"""

import dataclasses
import functools
import math
from typing import Any, ClassVar, TypeAlias, TypeVar, final, get_args

import numpy as np

from mf_aggregators.kernel import gaussian, numbers
from mf_aggregators.kernel.gaussian import AllParticipations
from mf_aggregators.kernel.numbers import FloatArray, IntArray
from mf_aggregators.kernel.sensitivity import Schema

# With less noise nothing is amplified: a client that is drawn shows itself, and the grid of its
# privacy losses grows without bound.
LEAST_NOISE_MULTIPLIER = 0.1
# With more noise an attacker guesses, with or without sampling.
_LARGEST_NOISE_MULTIPLIER = 1e8
# Steps of Z by which roundings may move one number of a row: 1 and twice the error of floats, times
# the largest sum of a row of C where rows follow from earlier rows of Z.
LARGEST_ROUNDING = 4.0
# More than the error of floats in a norm, relative to it.
_ROUNDING_OF_NORMS = 1e-9


@dataclasses.dataclass(frozen=True)
class AnyDraws:
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
        numbers.set_positive_integers(self, *(each.name for each in dataclasses.fields(self)))
        needed, most = self.distance * self.clients_per_round, self.population
        if needed > most:
            raise ValueError(
                f"a population of {most} is too small, {needed} are needed: use {self._remedy} "
                f"(at most {most // self.clients_per_round}) or fewer clients per round."
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
class InGroups(AnyDraws):
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
class _Coins(InGroups):
    """Schemes in which clients join by coins: groups have floor(m / b) or ceil(m / b) clients."""

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
            least = f"clients_per_round, {self.clients_per_round}"
            raise ValueError(f"largest_batch must be at least {least}, found {self.largest_batch}.")


@final
@dataclasses.dataclass(frozen=True)
class FixedSize(InGroups):
    """Exactly B of the floor(m / b) clients of a round's group, a random subset each time."""

    name: ClassVar[str] = "fixed_size"


@dataclasses.dataclass(frozen=True)
class _Cycles(InGroups):
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
class _InSecret(AnyDraws):
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
class MinSeparation(_InSecret):
    """Min-separation sampling: clients join with a secret coin when their timers allow it."""

    name: ClassVar[str] = "min_separation"
    is_even: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shares_rows:
            least = f"num_bands, {self.num_bands}"
            raise ValueError(f"separation must be at least {least}, found {self.separation}.")

    @property
    def joining_probability(self) -> float:
        """The probability that a client joins when its timer allows it."""
        others = self.clients_per_round * (self.separation - 1)
        return self.clients_per_round / (self.population - others)


@final
@dataclasses.dataclass(frozen=True)
class BallsInBins(_InSecret):
    """Balls in bins: a client's rounds equal its secret bin, modulo the separation."""

    name: ClassVar[str] = "balls_in_bins"


Groups: TypeAlias = Poisson | TruncatedPoisson | FixedSize | Shuffling | RandomAllocation
SecretRounds: TypeAlias = MinSeparation | BallsInBins
Draws: TypeAlias = Groups | SecretRounds
_Kind = TypeVar("_Kind", bound=AnyDraws)


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
        raise TypeError(f"draws must be one of {names}, found {numbers.shown(draws)}.")
    return dataclasses.replace(draws)


@dataclasses.dataclass(frozen=True)
class StrategyColumns:
    """The compact columns of C, and how far roundings move a row.

    Two are equal if their numbers are, bit for bit.

    Attributes:
      entries: (n, b) float64, the compact columns of C, of which it keeps a copy.
      rounding: How many steps of Z the roundings of one coordinate of a row move it at most, as far
        as they depend on one client. A claim compares it with that of the rows
        (``integers.largest_rounding``).
      norm: The norm that noise multipliers are relative to, at least the norm of every column; None
        for the largest norm of a column.

    Raises:
      ValueError: If an attribute is of another shape, or a number is out of its range.
    """

    entries: FloatArray = dataclasses.field(compare=False)
    rounding: float = LARGEST_ROUNDING
    norm: float | None = None
    _digest: bytes = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        entries = np.array(self.entries, np.float64, order="C")
        if entries.ndim != 2:
            raise ValueError(f"entries must have shape (n, b), found {entries.shape}.")
        # No flag makes it writeable again.
        object.__setattr__(self, "entries", np.asarray(entries.data.toreadonly()))
        object.__setattr__(self, "_digest", numbers.digest("columns", [entries]))
        checks = {"rounding": numbers.non_negative_number, "norm": numbers.positive_number}
        numbers.set_checked(self, **checks)

    def __reduce__(self) -> Any:
        # Copies and pickles are made by the constructor, with the digest of their entries.
        return StrategyColumns, (self.entries, self.rounding, self.norm)

    def scaled(self) -> FloatArray:
        """Returns the (n, b) columns of |C| over the norm that noise multipliers are relative to.

        Raises:
          ValueError: If all columns are zero, an entry is not finite, or a column is longer than
            that norm.
        """
        entries = _normalised(self.entries)
        if self.norm is None:
            return entries
        share = float(np.max(np.linalg.norm(self.entries, axis=1))) / self.norm
        if not share <= 1.0 + _ROUNDING_OF_NORMS:
            raise ValueError(f"a column of C is {share:.6g} of the norm that noise is relative to.")
        return entries * min(share, 1.0)


def sums_of_bins(columns: FloatArray, num_bins: int) -> FloatArray:
    """Returns the (n, num_bins) sums of the columns of each bin.

    Args:
      columns: (n, b).
      num_bins: Rounds that are equal modulo this number are in one bin.
    """
    num_rounds, num_bands = columns.shape
    sums = np.zeros((num_rounds, num_bins))
    for i in range(num_rounds):
        height = min(num_bands, num_rounds - i)
        sums[i : i + height, i % num_bins] += columns[i, :height]
    return sums


def _normalised(columns: FloatArray) -> FloatArray:
    """Returns the columns of |C| over the largest norm of a column.

    Args:
      columns: (n, b), of C.

    Raises:
      ValueError: If all columns are zero, or an entry is not finite.
    """
    absolute = np.abs(columns)
    largest_entry = float(np.max(absolute))
    if not 0.0 < largest_entry < np.inf:
        raise ValueError("the strategy matrix must not be zero, and its entries must be finite.")
    # A division by a power of two rounds nothing: squares of the entries might be beyond floats.
    absolute = np.ldexp(absolute, -int(np.frexp(largest_entry)[1]))
    return np.asarray(absolute / np.sqrt(np.max(np.sum(absolute**2, axis=1))))


@dataclasses.dataclass(frozen=True)
class SampledRun:
    """A run with randomly drawn clients.

    Attributes:
      draws: How clients are drawn.
      sigma: The noise multiplier, relative to the largest column norm of C.
      columns: C and its roundings, for clients who draw for themselves; None for groups.

    Raises:
      TypeError: If the draws or columns are of other classes than the kernel's.
      ValueError: If sigma is negative or not finite, or sizes do not fit one another.
    """

    draws: Draws
    sigma: float
    columns: StrategyColumns | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "draws", check(self.draws))
        if isinstance(self.draws, InGroups):
            object.__setattr__(self, "columns", None)
        elif type(self.columns) is not StrategyColumns:
            found = numbers.shown(self.columns)
            raise TypeError(f"columns must be StrategyColumns, found {found}.")
        numbers.set_checked(self, sigma=numbers.non_negative_number)

    @functools.cached_property
    def together(self) -> AllParticipations:
        """All participations of a client, against an adversary who knows their rounds."""
        draws = self.draws
        if isinstance(draws, BallsInBins) and draws.shares_rows:
            assert self.columns is not None
            # The longest sum of the columns of |C| in one bin.
            sums = sums_of_bins(self.columns.scaled(), draws.separation)
            longest = math.sqrt(float(np.max(np.sum(sums**2, axis=0))))
            return AllParticipations(longest * (1.0 + _ROUNDING_OF_NORMS))
        return draws.together

    @property
    def noise_multiplier(self) -> float:
        """The noise multiplier of all participations, for an adversary who knows their rounds."""
        return self.sigma / self.together.norm

    @property
    def part_noise_multiplier(self) -> float:
        """The noise multiplier of the largest shift of one row."""
        part = self.sigma / self.together.largest_part
        return min(part, self._amplified_part) if self.is_amplified else part

    @property
    def is_amplified(self) -> bool:
        """Whether its losses are those against an adversary who does not know the rounds."""
        return is_accounted(self.sigma) and self._amplified_part >= gaussian.LEAST_NOISE_MULTIPLIER

    @property
    def composes_amplified(self) -> bool:
        """Whether its losses are known; others compose as the Gaussian mechanism of all rounds."""
        is_known = isinstance(self.draws, InGroups) and not isinstance(self.draws, Shuffling)
        return self.is_amplified and is_known

    @property
    def _amplified_part(self) -> float:
        return self.sigma / max(self.together.largest_part, self.draws.largest_move)


def is_accounted(sigma: float) -> bool:
    """Returns whether a noise multiplier is amplified at all.

    Args:
      sigma: The noise multiplier, relative to the largest column norm of C.
    """
    return LEAST_NOISE_MULTIPLIER <= sigma <= _LARGEST_NOISE_MULTIPLIER


# The first coordinate of a sampler's streams, and the second ones: of the order of clients in
# groups, the batch of a round, the shuffle of a pass over a group, the first waits of timers, coins
# of a round, bins of clients, cuts of batches, and rounds of clients in a cycle.
BATCHES = 3
_PARTITION, _ROUND, _PASS, _FIRST_WAITS, _JOINS, _BINS, _CUT, _ALLOCATION = range(8)


def generator_of(seed: int, *coordinates: int) -> np.random.Generator:
    """Returns a random generator that is a function of a seed and coordinates alone.

    Args:
      seed: Any non-negative integer.
      *coordinates: Non-negative integers: a ``random_streams.Stream`` and at least one more, or,
        for a cohort, the round alone.

    Returns:
      The generator; other coordinates give independent ones.
    """
    sequence = np.random.SeedSequence(entropy=seed, spawn_key=coordinates)
    return np.random.Generator(np.random.Philox(sequence))


@dataclasses.dataclass(frozen=True, eq=False)
class Cohorts:
    """The clients that a scheme draws from a seed, in all rounds of a run.

    The coins have the probabilities that the epsilon is computed of: both follow from the same
    integers. All draws are functions of (draws, seed, round) alone, the same since version 1.0, so
    that a run that is resumed draws the clients of the uninterrupted run.

    Attributes:
      draws: How clients are drawn.
      seed: What they are drawn from, at least 0; as secret as the seed of the noise, and of one run
        alone.

    Raises:
      TypeError: If the draws are of another class than the kernel's.
      ValueError: If the seed is no integer of at least 0.
    """

    draws: Draws
    seed: int = dataclasses.field(repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "draws", check(self.draws))
        numbers.set_checked(self, seed=numbers.non_negative_integer)

    @functools.cached_property
    def _order(self) -> IntArray:
        """The order of all clients that groups are slices of."""
        order: IntArray = np.arange(self.draws.population)
        if isinstance(self.draws, InGroups):
            order = generator_of(self.seed, BATCHES, _PARTITION).permutation(len(order))
        order.flags.writeable = False
        return order

    @functools.cached_property
    def _secret_rounds(self) -> list[tuple[IntArray, int]]:
        """Who joins in each round, and how many might, of clients who draw for themselves."""
        draws = self.draws
        if isinstance(draws, MinSeparation):
            return _under_timers(draws, self.seed)
        bins, most = generator_of(self.seed, BATCHES, _BINS), draws.population
        drawn = bins.integers(draws.distance, size=most)
        return [(np.flatnonzero(drawn == i), most) for i in range(draws.distance)]

    def draw(self, round_index: int) -> IntArray:
        """Draws the batch of a round.

        Args:
          round_index: The round, from 0.

        Returns:
          Increasing int64 indices of clients. A batch may be empty where sizes are random: such
          a round is released as any other, with its own noise.

        Raises:
          ValueError: If the scheme has no such round.
        """
        return self._drawn(round_index)[0]

    def num_eligible(self, round_index: int) -> int:
        """Returns how many clients might have been in the batch of a round.

        Args:
          round_index: The round, from 0.

        Raises:
          ValueError: If the scheme has no such round.
        """
        return self._drawn(round_index)[1]

    def _drawn(self, round_index: int) -> tuple[IntArray, int]:
        group = self.group_of_round(round_index)
        if isinstance(self.draws, _InSecret):
            batch, number = self._secret_rounds[round_index % len(self._secret_rounds)]
            return batch.copy(), number
        return np.sort(_batch(self.draws, group, self.seed, round_index)), len(group)

    def group_of_round(self, round_index: int) -> IntArray:
        """Returns the group of the population that a round draws from; all without groups.

        Args:
          round_index: The round, from 0.

        Returns:
          int64 indices of clients, of a group in random order.

        Raises:
          ValueError: If the scheme has no such round.
        """
        if not 0 <= round_index < self.draws.num_rounds:
            most = self.draws.num_rounds
            raise ValueError(f"round {round_index} is not one of the scheme's {most}, from 0.")
        if isinstance(self.draws, _InSecret):
            return self._order
        return self._order[self.draws.group_slice(round_index % self.draws.num_bands)]


def _batch(draws: Groups, group: IntArray, seed: int, round_index: int) -> Any:
    """The clients of a group that a round draws, in any order."""
    turn, number = divmod(round_index, draws.num_bands)
    size = draws.clients_per_round
    if isinstance(draws, _Cycles):
        cycle, place = divmod(turn, draws.rounds_of_cycle)
    if isinstance(draws, Shuffling):
        shuffled = generator_of(seed, BATCHES, _PASS, number, cycle).permutation(group)
        return shuffled[place * size : (place + 1) * size]
    if isinstance(draws, RandomAllocation):
        generator = generator_of(seed, BATCHES, _ALLOCATION, number, cycle)
        return group[generator.integers(draws.rounds_of_cycle, size=len(group)) == place]
    generator = generator_of(seed, BATCHES, _ROUND, round_index)
    if isinstance(draws, FixedSize):
        return generator.choice(group, size, replace=False, shuffle=False)
    assert isinstance(draws, Poisson | TruncatedPoisson), draws
    # A random number has 53 bits: the probability is q to within 2^-53.
    came = group[generator.random(len(group)) < draws.sampling_probability]
    if isinstance(draws, TruncatedPoisson) and len(came) > draws.largest_batch:
        cut = generator_of(seed, BATCHES, _CUT, round_index)
        return cut.choice(came, draws.largest_batch, replace=False, shuffle=False)
    return came


def _under_timers(draws: MinSeparation, seed: int) -> list[tuple[IntArray, int]]:
    """Who joins in each round, and how many were free to: timers are played from round 0 on."""
    p = draws.joining_probability
    free_at_first = 1.0 / (1.0 + (draws.separation - 1) * p)
    waits = np.full(draws.separation, p * free_at_first)
    waits[0] = free_at_first
    generator = generator_of(seed, BATCHES, _FIRST_WAITS)
    free_from = generator.choice(draws.separation, size=draws.population, p=waits)
    cohorts: list[tuple[IntArray, int]] = []
    for index in range(draws.num_rounds):
        free = np.flatnonzero(free_from <= index)
        # A random number has 53 bits: the probability is p to within 2^-53.
        coins = generator_of(seed, BATCHES, _JOINS, index).random(len(free))
        joined = free[coins < p]
        free_from[joined] = index + draws.separation
        cohorts.append((joined, len(free)))
    return cohorts
