"""Whom a sampling scheme draws from a secret seed, and whether chance gives what a ledger shows."""

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from mf_aggregators.kernel import validation
from mf_aggregators.kernel.arrays import IntArray
from mf_aggregators.kernel.batches import binomial_tail
from mf_aggregators.participation.schemes import (
    SamplingScheme,
    UnamplifiedScheme,
    accounted,
    nth_round,
)

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
        validation.check_types(self, "scheme")
        validation.integer_at_least(self.seed, 0, "the seed of a sampler")

    def draw(self, round_index: int) -> IntArray:
        """Draws the batch of a round.

        Args:
          round_index: The round, from 0.

        Returns:
          Increasing int64 indices of clients. A batch may be empty where sizes are random: such
          a round is released as any other, with its own noise.

        Raises:
          ValueError: If the scheme has no such round, or what is drawn are no increasing indices of
            clients of the population.
        """
        self._check_round(round_index)
        drawn = self._draw(round_index)
        problem = self._problem_of(drawn)
        if problem is not None:
            raise ValueError(
                f"draw({round_index}) of the sampling scheme {self.scheme.name} has {problem}, and "
                f"must have increasing integers, each of another client of the "
                f"population of {self.scheme.population}."
            )
        return drawn.astype(np.int64, copy=False)

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

    def _problem_of(self, drawn: Any) -> str | None:
        """What is wrong with a batch, as what it has; names no client."""
        if not isinstance(drawn, np.ndarray):
            return f"no array but {type(drawn).__name__}"
        if drawn.ndim != 1 or drawn.dtype.kind not in "iu":
            return f"an array of {drawn.dtype} of shape {drawn.shape}"
        if not len(drawn):
            return None
        if drawn.min() < 0 or drawn.max() >= self.scheme.population:
            return "a client outside of the population"
        # Compared, for differences of unsigned integers are never negative.
        if np.all(drawn[1:] > drawn[:-1]):
            return None
        ordered = np.sort(drawn)
        is_twice = np.any(ordered[1:] == ordered[:-1])
        return "a client twice" if is_twice else "clients that are not in increasing order"

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


@dataclasses.dataclass(frozen=True, eq=False)
class _OtherSampler(Sampler):
    """Draws of another package's sampler, which are checked as the library's own are."""

    drawing: Sampler = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        assert isinstance(self.scheme, UnamplifiedScheme)
        made = self.scheme.sampler(self.seed)
        if not isinstance(made, Sampler) or made.scheme != self.scheme.scheme:
            raise ValueError(
                f"sampler(seed) of the sampling scheme {self.scheme.name} returned "
                f"{validation.shown(made)}: return a participation.Sampler of this scheme."
            )
        object.__setattr__(self, "drawing", made)

    def _draw(self, round_index: int) -> IntArray:
        try:
            return self.drawing._draw(round_index)
        except Exception as error:
            raise ValueError(
                f"draw({round_index}) of the sampling scheme {self.scheme.name} failed: "
                f"{type(error).__name__}: {error}"
            ) from error


def sampler_of(scheme: SamplingScheme, seed: int) -> Sampler:
    """Returns the sampler of a scheme; draws of another package's sampler are checked.

    Args:
      scheme: How clients are drawn.
      seed: What they are drawn from.

    Raises:
      ValueError: If the scheme of another package makes none, or one that draws by another scheme;
        or the seed is negative.
    """
    scheme = accounted(scheme)
    is_other = isinstance(scheme, UnamplifiedScheme)
    return _OtherSampler(scheme, seed) if is_other else scheme.sampler(seed)


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
