"""Whom a scheme draws: the clients of each round, from the integers of a claim and a secret seed.

The probability that an epsilon is computed of and the coins that are flipped come from the same
integers. Streams of random numbers are those of version 1.0: a run that is resumed draws what it
would have drawn.
"""

from typing import Any, NoReturn

import numpy as np

from mf_aggregators.kernel import draws_of_clients, validation
from mf_aggregators.kernel.arrays import IntArray
from mf_aggregators.kernel.draws_of_clients import (
    BallsInBins,
    Draws,
    FixedSize,
    InSecret,
    MinSeparation,
    RandomAllocation,
    Shuffling,
    TruncatedPoisson,
)

# The first coordinate of all streams of a sampler, and what follows: the order of all clients that
# groups are slices of; the batch of a round; the shuffle of a pass over a group; when timers first
# run out; who joins in a round; the bin of each client; who stays in a batch that is cut; which
# round of a cycle each client is in.
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


class Cohorts:
    """The clients that a scheme draws from a seed, in all rounds of a run.

    All draws are functions of (draws, seed, round) alone, so that a run that is resumed draws what
    the uninterrupted run would have drawn.

    Attributes:
      draws: How clients are drawn.
      seed: What they are drawn from; as secret as the seed of the noise, and of one run alone.
    """

    __slots__ = ("_num_eligible", "_of_rounds", "_order", "draws", "seed")

    _num_eligible: list[int]
    _of_rounds: list[IntArray]
    _order: IntArray
    draws: Draws
    seed: int

    def __init__(self, draws: Draws, seed: int) -> None:
        """Draws what all rounds have in common.

        Args:
          draws: How clients are drawn.
          seed: Any integer of at least 0.

        Raises:
          TypeError: If the draws are of another class than the kernel's.
          ValueError: If the seed is no integer of at least 0.
        """
        draws = draws_of_clients.check(draws)
        seed = validation.integer_at_least(seed, 0, "the seed of a sampler")
        order: IntArray = np.arange(draws.population)
        of_rounds: list[IntArray] = []
        num_eligible: list[int] = []
        if isinstance(draws, MinSeparation):
            of_rounds, num_eligible = _under_timers(draws, seed)
        elif isinstance(draws, BallsInBins):
            bins = generator_of(seed, BATCHES, _BINS).integers(
                draws.separation, size=draws.population
            )
            of_rounds = [np.flatnonzero(bins == i) for i in range(draws.separation)]
            num_eligible = [draws.population] * draws.separation
        else:
            order = generator_of(seed, BATCHES, _PARTITION).permutation(draws.population)
        for each in (order, *of_rounds):
            each.flags.writeable = False
        values = (num_eligible, of_rounds, order, draws, seed)
        for name, value in zip(Cohorts.__slots__, values, strict=True):
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"{name} of a {type(self).__name__} cannot be set.")

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
        group = self.group_of_round(round_index)
        if isinstance(self.draws, InSecret):
            return self._of_rounds[round_index % len(self._of_rounds)]
        return np.sort(_batch(self.draws, group, self.seed, round_index))

    def num_eligible(self, round_index: int) -> int:
        """Returns how many clients might have been in the batch of a round.

        Args:
          round_index: The round, from 0.

        Raises:
          ValueError: If the scheme has no such round.
        """
        group = self.group_of_round(round_index)
        if isinstance(self.draws, InSecret):
            return self._num_eligible[round_index % len(self._num_eligible)]
        return len(group)

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
            raise ValueError(
                f"round {round_index} is not one of the {self.draws.num_rounds} rounds, from 0, "
                "of the sampling scheme."
            )
        if isinstance(self.draws, InSecret):
            return self._order
        return self._order[self.draws.group_slice(round_index % self.draws.num_bands)]


def _batch(draws: draws_of_clients.Groups, group: IntArray, seed: int, round_index: int) -> Any:
    """The clients of a group that a round draws, in any order."""
    turn, number = divmod(round_index, draws.num_bands)
    size = draws.clients_per_round
    if isinstance(draws, Shuffling):
        cycle, place = divmod(turn, draws.rounds_of_cycle)
        shuffled = generator_of(seed, BATCHES, _PASS, number, cycle).permutation(group)
        return shuffled[place * size : (place + 1) * size]
    if isinstance(draws, RandomAllocation):
        cycle, place = divmod(turn, draws.rounds_of_cycle)
        generator = generator_of(seed, BATCHES, _ALLOCATION, number, cycle)
        return group[generator.integers(draws.rounds_of_cycle, size=len(group)) == place]
    generator = generator_of(seed, BATCHES, _ROUND, round_index)
    if isinstance(draws, FixedSize):
        return generator.choice(group, size, replace=False, shuffle=False)
    # A random number has 53 bits: the probability is q to within 2^-53.
    came = group[generator.random(len(group)) < draws.sampling_probability]
    if isinstance(draws, TruncatedPoisson) and len(came) > draws.largest_batch:
        cut = generator_of(seed, BATCHES, _CUT, round_index)
        return cut.choice(came, draws.largest_batch, replace=False, shuffle=False)
    return came


def _under_timers(draws: MinSeparation, seed: int) -> tuple[list[IntArray], list[int]]:
    """Who joins in each round, and how many were free to: timers are played from round 0 on."""
    p = draws.joining_probability
    free_at_first = 1.0 / (1.0 + (draws.separation - 1) * p)
    waits = np.full(draws.separation, p * free_at_first)
    waits[0] = free_at_first
    generator = generator_of(seed, BATCHES, _FIRST_WAITS)
    free_from = generator.choice(draws.separation, size=draws.population, p=waits)
    cohorts: list[IntArray] = []
    num_free: list[int] = []
    for index in range(draws.num_rounds):
        free = np.flatnonzero(free_from <= index)
        # A random number has 53 bits: the probability is p to within 2^-53.
        coins = generator_of(seed, BATCHES, _JOINS, index).random(len(free))
        joined = free[coins < p]
        free_from[joined] = index + draws.separation
        cohorts.append(joined)
        num_free.append(len(free))
    return cohorts, num_free
