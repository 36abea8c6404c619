"""Truncated Poisson sampling: a batch that would be larger than a largest size is cut."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

from mf_aggregators.kernel.draws_of_clients import Groups, TruncatedPoisson
from mf_aggregators.kernel.groups import binomial_tail
from mf_aggregators.kernel.numbers import IntArray
from mf_aggregators.participation.poisson import PoissonSampling
from mf_aggregators.participation.schemes import nth_round

# By default a batch is cut with at most this probability, which costs next to no noise.
_PROBABILITY_OF_CUT = 1e-6


@dataclasses.dataclass(frozen=True)
class TruncatedPoissonSampling(PoissonSampling):
    """Poisson sampling whose batches have a largest size: of more, a random subset stays.

    Attributes:
      num_rounds: The rounds n.
      num_bands: The bands b of C.
      population: The clients m.
      clients_per_round: The clients B of a round, in expectation before batches are cut.
      largest_batch: The most clients L of a round, at least B.
    """

    largest_batch: int

    name: ClassVar[str] = "truncated_poisson"
    takes_largest_batch: ClassVar[bool] = True
    largest_move: ClassVar[float] = 2.0
    _kind: ClassVar[Callable[..., Groups]] = TruncatedPoisson

    @classmethod
    def _default(
        cls, num_rounds: int, num_bands: int, population: int, clients_per_round: int
    ) -> int:
        """The least batch that a round exceeds with a probability of at most 1e-6."""
        # Without a largest batch it is Poisson sampling, which checks the other sizes.
        poisson = PoissonSampling(num_rounds, num_bands, population, clients_per_round)
        return _seldom_exceeded(
            max(poisson.size_of_group(group) for group in range(num_bands)),
            poisson.sampling_probability,
            clients_per_round,
        )

    @property
    def label(self) -> str:
        """What tables say of the mechanism."""
        return f"{super().label}, at most {self.largest_batch}"

    @property
    def largest_cohort(self) -> int:
        """The most clients of a round."""
        return self.largest_batch

    def _improbable(self, groups: IntArray, cohorts: Sequence[IntArray]) -> str | None:
        for index, cohort in enumerate(cohorts):
            if len(cohort) > self.largest_batch:
                return (
                    f"{nth_round(index)} had {len(cohort)} clients, more than the largest batch of "
                    f"{self.largest_batch}"
                )
        # Whoever stays came: there are no more of them than without a largest batch.
        return super()._improbable(groups, cohorts)

    def condition(self, sampler: str | None = None) -> str:
        """Returns who has to do what for the guarantee to hold, after "only if"."""
        return (
            f"{super().condition(sampler)} No batch has more than {self.largest_batch} clients: "
            "of more, a random subset is drawn by the same sampler."
        )

    def run_flags(self) -> Mapping[str, int | str | None]:
        """Returns the flags of commands that train, by name."""
        return {**super().run_flags(), "largest_batch": self.largest_batch}

    def accounting_words(self) -> str:
        """Returns how the amplified guarantee is computed."""
        return (
            "Amplification by sampling for banded matrices (BandMF Thm 4, Cor. F.1): composed "
            "privacy loss distributions of Gaussian mechanisms on truncated Poisson samples "
            "(arXiv 2508.15089, here for zeros in the place of a client)."
        )

    def _draw_words(self) -> str:
        return (
            f"{super()._draw_words().rstrip('.')}; of more than {self.largest_batch} that come so, "
            f"a uniformly random subset of {self.largest_batch} stays."
        )


def _seldom_exceeded(group_size: int, probability: float, expected: int) -> int:
    """The least size, at least the expected one, that is seldom exceeded."""
    low, high = expected, max(group_size, expected)
    while low < high:
        middle = (low + high) // 2
        if float(binomial_tail(middle + 1, group_size, probability)) <= _PROBABILITY_OF_CUT:
            high = middle
        else:
            low = middle + 1
    return low
