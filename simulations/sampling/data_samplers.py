"""Data samplers: the batches of a data centre, by the sampling schemes of banded mechanisms.

A sampler splits the population into as many parts as C has bands, and draws the batch of
round i, counted from 0, from part i modulo that number (BandMF Alg. 2 and 6). Which
client is in which part, and every batch, are functions of (scheme, seed, round) alone, so
that a run that is resumed draws the batches that the uninterrupted run would have drawn.

Privacy amplification holds only towards those who do not know the batches, and the seed
tells them all. It must come from :func:`secret_seed`, serve one run, and stay as secret as
the seed of the noise; so must whatever lists the batches, a run's ledger above all. No
population whose devices decide themselves when to take part may be described as sampled.
"""

import dataclasses
import secrets

import numpy as np

from mf_aggregators.accounting import sampling_schemes
from mf_aggregators.accounting.sampling_schemes import (
    FixedSizeSampling,
    PoissonSampling,
    SamplingScheme,
    Shuffling,
)
from simulations.sampling import cohorts
from simulations.sampling.cohorts import Stream

# The second coordinate of all generators here.
_PARTITION, _ROUND, _PASS = 0, 1, 2
# NumPy's seed sequences mix as many bits, and Philox has a key of as many.
_SEED_BITS = 128


@dataclasses.dataclass(frozen=True, eq=False)
class DataSampler:
    """A scheme and a seed, with the partition that follows from them; see :func:`create`.

    Attributes:
      scheme: How batches are drawn.
      seed: What they are drawn from.
      order: (population,) int64: all clients in random order. Each part is a slice of it.
    """

    scheme: SamplingScheme
    seed: int = dataclasses.field(repr=False)
    order: np.ndarray = dataclasses.field(repr=False)

    def part_of_round(self, round_index: int) -> np.ndarray:
        """Returns the clients that may be in the batch of a round.

        Args:
          round_index: The round, from 0.

        Returns:
          int64 indices of clients, in random order.

        Raises:
          ValueError: If the scheme has no such round.
        """
        scheme = self.scheme
        if not 0 <= round_index < scheme.num_rounds:
            raise ValueError(
                f"round {round_index} is not one of the {scheme.num_rounds} rounds, from 0, of "
                "the sampling scheme."
            )
        return self.order[sampling_schemes.part_slice(scheme, round_index % scheme.num_bands)]

    def draw(self, round_index: int) -> np.ndarray:
        """Draws the batch of a round.

        Args:
          round_index: The round, from 0.

        Returns:
          Increasing int64 indices of clients. A Poisson sample may be empty: such a round
          is released as any other, with its own noise.

        Raises:
          ValueError: If the scheme has no such round.
        """
        part, scheme = self.part_of_round(round_index), self.scheme
        if isinstance(scheme, Shuffling):
            # All batches of a pass come from one shuffle.
            visit = round_index // scheme.num_bands
            number, batch = divmod(visit, scheme.batches_per_pass)
            generator = cohorts.generator_of(
                self.seed, Stream.BATCHES, _PASS, round_index % scheme.num_bands, number
            )
            size = scheme.clients_per_round
            chosen = generator.permutation(part)[batch * size : (batch + 1) * size]
        else:
            generator = cohorts.generator_of(self.seed, Stream.BATCHES, _ROUND, round_index)
            if isinstance(scheme, PoissonSampling):
                # A random number has 53 bits: the probability is q to within 2^-53.
                chosen = part[generator.random(len(part)) < scheme.sampling_probability]
            else:
                chosen = generator.choice(
                    part, scheme.clients_per_round, replace=False, shuffle=False
                )
        return np.sort(chosen)


def create(scheme: SamplingScheme, seed: int) -> DataSampler:
    """Creates the sampler of a run, and splits its population.

    Args:
      scheme: How batches are drawn.
      seed: Any non-negative integer, the same for all rounds of one run and for no other
        run; :func:`secret_seed` makes one.

    Returns:
      The sampler. It takes 8 bytes for each client.

    Raises:
      TypeError: If ``scheme`` is none of ``mf_aggregators.accounting.sampling_schemes``.
      ValueError: If the seed is negative.
    """
    if not isinstance(scheme, (PoissonSampling, FixedSizeSampling, Shuffling)):
        raise TypeError(
            "scheme must be a PoissonSampling, FixedSizeSampling or Shuffling of "
            f"mf_aggregators.accounting.sampling_schemes, found {scheme!r}."
        )
    if seed < 0:
        raise ValueError("the seed of a data sampler must not be negative.")
    order = cohorts.generator_of(seed, Stream.BATCHES, _PARTITION).permutation(scheme.population)
    order.flags.writeable = False
    return DataSampler(scheme, seed, order)


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


def secret_seed() -> int:
    """Returns 128 fresh secret bits from the operating system."""
    return secrets.randbits(_SEED_BITS)
