"""Whom a sampling scheme draws from a secret seed, and whether chance gives what a ledger shows."""

import abc
import dataclasses
from collections.abc import Sequence

import numpy as np

from mf_aggregators import inputs
from mf_aggregators.kernel import validation
from mf_aggregators.kernel.arrays import IntArray
from mf_aggregators.kernel.batches import binomial_tail
from mf_aggregators.participation.schemes import SamplingScheme, nth_round

# What a scheme draws with a smaller probability counts as drawn in another way. A run by the scheme
# fails each of three checks with at most this probability.
LEAST_PROBABILITY = 1e-12


@dataclasses.dataclass(frozen=True, eq=False)
class Sampler(abc.ABC):
    """A scheme and a seed, and whom they draw in all rounds; ``scheme.sampler(seed)``.

    All draws are functions of (scheme, seed, round) alone, so that a run that is resumed draws what
    the uninterrupted run would have drawn.

    Privacy amplification holds only towards those who do not know who was drawn, and the seed
    tells it all. It must come from ``participation.secret_seed``, serve one run, and stay as
    secret as the seed of the noise; so must whatever lists the batches, a run's ledger above all.
    No population whose devices decide themselves when to take part may be described as sampled,
    unless they decide by the secret coins of a scheme.

    Attributes:
      scheme: How clients are drawn.
      seed: What they are drawn from.

    Raises:
      ValueError: If the seed is no integer of at least 0, or the scheme is of another type.
    """

    scheme: SamplingScheme
    seed: int = dataclasses.field(repr=False)

    def __post_init__(self) -> None:
        inputs.check_types(self, "scheme")
        validation.integer_at_least(self.seed, 0, "the seed of a sampler")

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
        self._check_round(round_index)
        return self._draw(round_index)

    def num_eligible(self, round_index: int) -> int:
        """Returns how many clients might have been in the batch of a round.

        Args:
          round_index: The round, from 0.

        Raises:
          ValueError: If the scheme has no such round.
        """
        self._check_round(round_index)
        return self._num_eligible(round_index)

    def deviation(
        self, num_clients: int, cohorts: Sequence[IntArray], *, may_be_absent: bool = False
    ) -> str | None:
        """Returns how the first rounds of a run differ from what is drawn, or None.

        Args:
          num_clients: As in :meth:`SamplingScheme.deviation`.
          cohorts: As there.
          may_be_absent: Whether clients that were drawn may be missing, as those that could not be
            asked are: only where the scheme ``covers_absences``.

        Returns:
          The first difference, as the end of a sentence that names no client.
        """
        found = self.scheme.deviation(num_clients, cohorts)
        if found is not None:
            return found
        for index, cohort in enumerate(cohorts):
            drawn = self.draw(index)
            if may_be_absent:
                if not np.all(np.isin(cohort, drawn)):
                    return (
                        f"a client of {nth_round(index)} is not one of those that the sampler draws"
                    )
            elif not np.array_equal(cohort, drawn):
                return f"the clients of {nth_round(index)} are not those that the sampler draws"
        return None

    def num_absent(self, cohorts: Sequence[IntArray]) -> int:
        """Returns how many participations that are drawn the first rounds of a run lack.

        Args:
          cohorts: As in :meth:`SamplingScheme.deviation`.
        """
        return sum(
            len(np.setdiff1d(self.draw(index), cohort)) for index, cohort in enumerate(cohorts)
        )

    @abc.abstractmethod
    def _draw(self, round_index: int) -> IntArray:
        """The batch of a round of the scheme."""

    def _num_eligible(self, round_index: int) -> int:
        """How many clients might be in it: all, by default."""
        del round_index
        return self.scheme.population

    def _check_round(self, round_index: int) -> None:
        if not 0 <= round_index < self.scheme.num_rounds:
            raise ValueError(
                f"round {round_index} is not one of the {self.scheme.num_rounds} rounds, from 0, "
                "of the sampling scheme."
            )


def too_large(
    sizes: IntArray, drawn_from: IntArray, probability: float, expected: int
) -> str | None:
    """Returns which round has more clients than independent draws give, or None.

    Args:
      sizes: (rounds,) the clients of each round.
      drawn_from: (rounds,) how many could have been drawn.
      probability: That each of them is drawn.
      expected: The clients that are expected in a round.
    """
    too_many = binomial_tail(sizes, drawn_from, probability) * len(sizes)
    if not np.any(too_many < LEAST_PROBABILITY):
        return None
    worst = int(np.argmin(too_many))
    return (
        f"{nth_round(worst)} had {sizes[worst]} clients, more than chance gives where "
        f"{expected} are expected"
    )
