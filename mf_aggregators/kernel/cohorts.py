"""Draws the clients of each round, for every sampling scheme, from a seed."""

import dataclasses
import functools

import numpy as np

from mf_aggregators.kernel import losses, numbers
from mf_aggregators.kernel.draws import generator_of
from mf_aggregators.kernel.numbers import IntArray

# The first coordinate of all random streams of a sampler, and the second coordinates of the single
# streams: the order of clients in groups, the batch of a round, the shuffle of a pass over a group,
# the first waits of timers, the coins of a round, the bins of clients, the truncation of batches,
# and the rounds of clients in a cycle.
BATCHES = 3
_PARTITION, _ROUND, _PASS, _FIRST_WAITS, _JOINS, _BINS, _CUT, _ALLOCATION = range(8)


@dataclasses.dataclass(frozen=True, eq=False)
class Cohorts:
    """The clients that a sampling scheme draws from a seed, in all rounds of a run.

    The coins have the probabilities that epsilon is computed from, because both follow from the
    same integers. All draws are functions of (draws, seed, round) alone, the same since version
    1.0, so that a run that is resumed draws the clients of the uninterrupted run.

    Attributes:
      draws: How clients are drawn.
      seed: The seed of all draws, at least 0; as secret as the seed of the noise, and of one run
        alone.

    Raises:
      TypeError: If the draws are of another class than the kernel's.
      ValueError: If the seed is no integer of at least 0.
    """

    draws: losses.Draws
    seed: int = dataclasses.field(repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "draws", losses.checked_draws(self.draws))
        numbers.set_checked(self, seed=numbers.non_negative_integer)

    @functools.cached_property
    def _order(self) -> IntArray:
        """All clients in a random order, of which the groups are slices."""
        order: IntArray = np.arange(self.draws.population)
        if isinstance(self.draws, losses.InGroups):
            order = generator_of(self.seed, BATCHES, _PARTITION).permutation(len(order))
        order.flags.writeable = False
        return order

    @functools.cached_property
    def _secret_rounds(self) -> list[tuple[IntArray, int]]:
        """The clients who join in each round by their own draws, and how many might have."""
        draws = self.draws
        if isinstance(draws, losses.MinSeparation):
            return _under_timers(draws, self.seed)
        bins, most = generator_of(self.seed, BATCHES, _BINS), draws.population
        drawn = bins.integers(draws.distance, size=most)
        return [(np.flatnonzero(drawn == i), most) for i in range(draws.distance)]

    def draw(self, round_index: int) -> IntArray:
        """Draws the batch of a round: the clients who take part in it.

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
        if not isinstance(self.draws, losses.InGroups):
            batch, number = self._secret_rounds[round_index % len(self._secret_rounds)]
            return batch.copy(), number
        return np.sort(_batch(self.draws, group, self.seed, round_index)), len(group)

    def group_of_round(self, round_index: int) -> IntArray:
        """Returns the group of clients that a round draws from; all clients if there are no groups.

        Args:
          round_index: The round, from 0.

        Returns:
          int64 indices of clients, of a group in random order.

        Raises:
          ValueError: If the scheme has no such round.
        """
        if not 0 <= round_index < self.draws.num_rounds:
            most = self.draws.num_rounds
            raise ValueError(f"round_index must be in range({most}), found {round_index}.")
        if not isinstance(self.draws, losses.InGroups):
            return self._order
        return self._order[self.draws.group_slice(round_index % self.draws.num_bands)]


def _batch(draws: losses.Groups, group: IntArray, seed: int, round_index: int) -> IntArray:
    """Returns the clients of a group that a round draws, in any order."""
    turn, number = divmod(round_index, draws.num_bands)
    size = draws.clients_per_round
    if isinstance(draws, losses.Shuffling | losses.RandomAllocation):
        cycle, place = divmod(turn, draws.rounds_of_cycle)
    if isinstance(draws, losses.Shuffling):
        shuffled = generator_of(seed, BATCHES, _PASS, number, cycle).permutation(group)
        return shuffled[place * size : (place + 1) * size]
    if isinstance(draws, losses.RandomAllocation):
        generator = generator_of(seed, BATCHES, _ALLOCATION, number, cycle)
        return np.array(group[generator.integers(draws.rounds_of_cycle, size=len(group)) == place])
    generator = generator_of(seed, BATCHES, _ROUND, round_index)
    if isinstance(draws, losses.FixedSize):
        return generator.choice(group, size, replace=False, shuffle=False)
    assert isinstance(draws, losses.Poisson | losses.TruncatedPoisson), draws
    # A random number is a multiple of 2^-53, so that the probability of joining is q to within
    # 2^-53.
    came = group[generator.random(len(group)) < draws.sampling_probability]
    if isinstance(draws, losses.TruncatedPoisson) and len(came) > draws.largest_batch:
        cut = generator_of(seed, BATCHES, _CUT, round_index)
        return cut.choice(came, draws.largest_batch, replace=False, shuffle=False)
    return came


def _under_timers(draws: losses.MinSeparation, seed: int) -> list[tuple[IntArray, int]]:
    """Returns the clients who join in each round, and how many timers allowed it."""
    p = draws.joining_probability
    free_at_first = 1.0 / (1.0 + (draws.separation - 1) * p)
    waits = np.full(draws.separation, p * free_at_first)
    waits[0] = free_at_first
    generator = generator_of(seed, BATCHES, _FIRST_WAITS)
    free_from = generator.choice(draws.separation, size=draws.population, p=waits)
    cohorts: list[tuple[IntArray, int]] = []
    for index in range(draws.num_rounds):
        free = np.flatnonzero(free_from <= index)
        # A random number is a multiple of 2^-53, so that the probability of joining is p to within
        # 2^-53.
        coins = generator_of(seed, BATCHES, _JOINS, index).random(len(free))
        joined = free[coins < p]
        free_from[joined] = index + draws.separation
        cohorts.append((joined, len(free)))
    return cohorts
