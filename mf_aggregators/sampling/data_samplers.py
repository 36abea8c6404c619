r"""Data samplers: who takes part in each round of a run, by a sampling scheme and a secret seed.

For schemes with parts, a sampler splits the population into as many parts as C has bands, and
draws the batch of round i, counted from 0, from part i modulo that number (BandMF Alg. 2 and
6). For coins under timers, it plays every client's timer and coin: each client that is free in a
round joins with probability p, and is free again ``separation`` rounds later. For balls in bins, it
puts each client into a bin.

All draws are functions of (scheme, seed, round) alone, so that a run that is resumed draws what the
uninterrupted run would have drawn. Timers and coins are played from round 0 on for that.

Privacy amplification holds only towards those who do not know who was drawn, and the seed
tells it all. It must come from ``sampling_seeds.secret_seed``, serve one run, and stay as secret
as the seed of the noise; so must whatever lists the batches, a run's ledger above all. No
population whose devices decide themselves when to take part may be described as sampled, unless
they decide by the secret coins of a scheme.
"""

import abc
import dataclasses

import numpy as np

from mf_aggregators import validation
from mf_aggregators.accounting import sampling_schemes
from mf_aggregators.accounting.sampling_schemes import (
    BallsInBins,
    FixedSizeSampling,
    MinSeparationSampling,
    PartScheme,
    PoissonSampling,
    SamplingScheme,
    Shuffling,
)
from mf_aggregators.sampling import random_streams
from mf_aggregators.sampling.random_streams import Stream

# The second coordinate of all generators here.
_PARTITION, _ROUND, _PASS, _FIRST_WAITS, _COINS, _BINS = range(6)


@dataclasses.dataclass(frozen=True, eq=False)
class DataSampler(abc.ABC):
    """A scheme and a seed, and what follows from them for all rounds; see :func:`create`.

    Attributes:
      scheme: How clients are drawn.
      seed: What they are drawn from.
    """

    scheme: SamplingScheme
    seed: int = dataclasses.field(repr=False)

    def draw(self, round_index: int) -> np.ndarray:
        """Draws the batch of a round.

        Args:
          round_index: The round, from 0.

        Returns:
          Increasing int64 indices of clients. A batch may be empty where sizes are random: such
          a round is released as any other, with its own noise.

        Raises:
          ValueError: If the scheme has no such round.
        """
        self._check_round(round_index)
        return self._draw(round_index)

    def num_eligible(self, round_index: int) -> int:
        """Returns how many clients might have been in the batch of a round.

        Args:
          round_index: The round, from 0.

        Returns:
          The clients of the round's part; under timers those that are free; of balls in bins all.

        Raises:
          ValueError: If the scheme has no such round.
        """
        self._check_round(round_index)
        return self._num_eligible(round_index)

    def part_of_round(self, round_index: int) -> np.ndarray:
        """Returns the part of the population that a round draws from.

        Args:
          round_index: The round, from 0.

        Returns:
          int64 indices of clients, in random order.

        Raises:
          ValueError: If the scheme has no such round, or no parts.
        """
        del round_index
        raise ValueError(f"the sampling scheme {self.scheme.name!r} has no parts.")

    @abc.abstractmethod
    def _draw(self, round_index: int) -> np.ndarray:
        """The batch of a round of the scheme."""

    @abc.abstractmethod
    def _num_eligible(self, round_index: int) -> int:
        """How many clients might be in it."""

    def _check_round(self, round_index: int) -> None:
        if not 0 <= round_index < self.scheme.num_rounds:
            raise ValueError(
                f"round {round_index} is not one of the {self.scheme.num_rounds} rounds, from 0, "
                "of the sampling scheme."
            )


@dataclasses.dataclass(frozen=True, eq=False)
class _PartSampler(DataSampler):
    """Batches of one part after the other.

    Attributes:
      scheme: How batches are drawn.
      order: (population,) int64: all clients in random order. Each part is a slice of it.
    """

    scheme: PartScheme
    order: np.ndarray = dataclasses.field(repr=False)

    def part_of_round(self, round_index: int) -> np.ndarray:
        self._check_round(round_index)
        return self.order[
            sampling_schemes.part_slice(self.scheme, round_index % self.scheme.num_bands)
        ]

    def _num_eligible(self, round_index: int) -> int:
        return len(self.part_of_round(round_index))

    def _draw(self, round_index: int) -> np.ndarray:
        part, scheme = self.part_of_round(round_index), self.scheme
        if isinstance(scheme, Shuffling):
            # All batches of a pass come from one shuffle.
            visit = round_index // scheme.num_bands
            number, batch = divmod(visit, scheme.batches_per_pass)
            generator = random_streams.generator_of(
                self.seed, Stream.BATCHES, _PASS, round_index % scheme.num_bands, number
            )
            size = scheme.clients_per_round
            chosen = generator.permutation(part)[batch * size : (batch + 1) * size]
        else:
            generator = random_streams.generator_of(self.seed, Stream.BATCHES, _ROUND, round_index)
            if isinstance(scheme, PoissonSampling):
                # A random number has 53 bits: the probability is q to within 2^-53.
                chosen = part[generator.random(len(part)) < scheme.sampling_probability]
            else:
                chosen = generator.choice(
                    part, scheme.clients_per_round, replace=False, shuffle=False
                )
        return np.sort(chosen)


@dataclasses.dataclass(frozen=True, eq=False)
class _CoinSampler(DataSampler):
    """Who joined by a coin under a timer.

    Attributes:
      cohorts: For each round the increasing indices of the clients that joined.
      num_free: For each round, how many clients were free to join.
    """

    cohorts: tuple[np.ndarray, ...] = dataclasses.field(repr=False)
    num_free: tuple[int, ...] = dataclasses.field(repr=False)

    def _draw(self, round_index: int) -> np.ndarray:
        return self.cohorts[round_index]

    def _num_eligible(self, round_index: int) -> int:
        return self.num_free[round_index]


@dataclasses.dataclass(frozen=True, eq=False)
class _BinSampler(DataSampler):
    """Who is in which bin.

    Attributes:
      scheme: How bins are drawn.
      bins: (population,) int64: the bin of each client.
    """

    scheme: BallsInBins
    bins: np.ndarray = dataclasses.field(repr=False)

    def _draw(self, round_index: int) -> np.ndarray:
        return np.flatnonzero(self.bins == round_index % self.scheme.separation)

    def _num_eligible(self, round_index: int) -> int:
        return self.scheme.population


def create(scheme: SamplingScheme, seed: int) -> DataSampler:
    """Creates the sampler of a run, and draws what all of its rounds have in common.

    Args:
      scheme: How clients are drawn.
      seed: Any non-negative integer, the same for all rounds of one run and for no other
        run; ``sampling_seeds.secret_seed`` makes one.

    Returns:
      The sampler. It takes 8 bytes for each client, or, for coins under timers, for each
      participation of the whole run, whose rounds are all drawn at once.

    Raises:
      TypeError: If ``scheme`` is none of ``mf_aggregators.accounting.sampling_schemes``.
      ValueError: If the seed is negative.
    """
    if seed < 0:
        raise ValueError("the seed of a data sampler must not be negative.")
    if isinstance(scheme, MinSeparationSampling):
        return _CoinSampler(scheme, seed, *_played(scheme, seed))
    if isinstance(scheme, BallsInBins):
        generator = random_streams.generator_of(seed, Stream.BATCHES, _BINS)
        bins = generator.integers(scheme.separation, size=scheme.population)
        bins.flags.writeable = False
        return _BinSampler(scheme, seed, bins)
    if not isinstance(scheme, (PoissonSampling, FixedSizeSampling, Shuffling)):
        raise TypeError(
            "scheme must be one of the schemes of "
            f"mf_aggregators.accounting.sampling_schemes, found {validation.shown(scheme)}."
        )
    order = random_streams.generator_of(seed, Stream.BATCHES, _PARTITION).permutation(
        scheme.population
    )
    order.flags.writeable = False
    return _PartSampler(scheme, seed, order)


def draw(scheme: SamplingScheme, seed: int, round_index: int) -> np.ndarray:
    """Draws the batch of one round; for all rounds of a run :func:`create` is faster.

    Args:
      scheme: How batches are drawn.
      seed: The same for all rounds of a run; see :func:`create`.
      round_index: The round, from 0.

    Returns:
      Increasing int64 indices of clients.

    Raises:
      TypeError: If ``scheme`` is none of ``mf_aggregators.accounting.sampling_schemes``.
      ValueError: If the seed is negative or the scheme has no such round.
    """
    return create(scheme, seed).draw(round_index)


def _played(
    scheme: MinSeparationSampling, seed: int
) -> tuple[tuple[np.ndarray, ...], tuple[int, ...]]:
    """Plays all timers and coins: for each round who joined, and how many were free."""
    law = np.full(scheme.separation, scheme.probability_of_first_wait)
    law[0] = scheme.probability_free_at_first
    generator = random_streams.generator_of(seed, Stream.BATCHES, _FIRST_WAITS)
    free_from = generator.choice(scheme.separation, size=scheme.population, p=law)
    cohorts, num_free = [], []
    for index in range(scheme.num_rounds):
        free = np.flatnonzero(free_from <= index)
        coins = random_streams.generator_of(seed, Stream.BATCHES, _COINS, index).random(len(free))
        # A random number has 53 bits: the probability is p to within 2^-53.
        joined = free[coins < scheme.joining_probability]
        free_from[joined] = index + scheme.separation
        joined.flags.writeable = False
        cohorts.append(joined)
        num_free.append(len(free))
    return tuple(cohorts), tuple(num_free)
