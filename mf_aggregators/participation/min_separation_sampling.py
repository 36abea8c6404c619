"""Min-separation sampling: each client whose timer allows it joins with a secret coin."""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from mf_aggregators.kernel import draws_of_clients
from mf_aggregators.kernel.groups import binomial_tail
from mf_aggregators.kernel.numbers import IntArray, counted, rounded_up
from mf_aggregators.participation.schemes import LEAST_PROBABILITY, nth_round, too_large
from mf_aggregators.participation.separated import SECRET_OF_CLIENTS, SeparatedScheme


@dataclasses.dataclass(frozen=True)
class MinSeparationSampling(SeparatedScheme):
    """Each client whose timer allows it joins with a secret coin (b-min-sep, arXiv 2602.09338).

    A client that joined is not free to join again for separation - 1 rounds. In every round in
    which it is free, it joins with probability p, whatever happened before. Before round 0
    timers are in their stationary state: a client is free in round 0 with
    ``probability_free_at_first``, and for each of i = 1, ..., separation - 1 it is first free in
    round i with ``probability_of_first_wait``. So clients_per_round clients join in every round
    on average.

    Attributes:
      num_rounds: The rounds n.
      num_bands: The bands b of C.
      population: The clients m.
      clients_per_round: The clients B of a round, in expectation.
      separation: Participations of a client are so many rounds apart; at least num_bands.
    """

    name: ClassVar[str] = "min_separation"

    @property
    def joining_probability(self) -> float:
        """The probability p = B / (m - B (separation - 1)) of the coin of a free client."""
        return self.as_draws().joining_probability

    @property
    def probability_free_at_first(self) -> float:
        """The probability 1 / (1 + (separation - 1) p) that a client is free in round 0."""
        return 1.0 / (1.0 + (self.separation - 1) * self.joining_probability)

    @property
    def probability_of_first_wait(self) -> float:
        """The probability p / (1 + (separation - 1) p) of being free first in one given round.

        It is the same for each of the rounds 1 to separation - 1.
        """
        return self.joining_probability * self.probability_free_at_first

    def as_draws(self) -> draws_of_clients.MinSeparation:
        """Returns the scheme as the integers that the kernel takes."""
        return draws_of_clients.MinSeparation(*dataclasses.astuple(self))

    def _deviation_of_rounds(self, cohorts: Sequence[IntArray]) -> str | None:
        if self.joining_probability == 1.0:
            # With a coin that always comes up heads, the round of the first participation is a bin.
            return self.deviation_of_bins(cohorts)
        last = np.full(self.population, -self.separation)
        counts = np.zeros(self.population, np.int64)
        for index, cohort in enumerate(cohorts):
            if np.any(index - last[cohort] < self.separation):
                return (
                    f"a client of {nth_round(index)} took part less than {self.separation} rounds "
                    "before"
                )
            last[cohort] = index
            counts[cohort] += 1
        if not cohorts:
            return None
        # In any one round, clients take part independently of each other.
        rate = self.clients_per_round / self.population
        sizes = np.array([len(cohort) for cohort in cohorts])
        clients = np.full(len(sizes), self.population)
        found = too_large(sizes, clients, rate, self.clients_per_round)
        return found or self._too_often(counts, len(cohorts))

    def _too_often(self, counts: IntArray, num_rounds: int) -> str | None:
        """Says if a client, or all together, took part more often than coins make likely.

        A client with k participations had k coins that came up heads, and k - 1 waits of b - 1
        rounds without a coin, so that it had at most n - (k - 1) (b - 1) coins. For all clients
        together, put their coins in a row: how many there are is random, but at most m n, and the
        heads among any fixed number of them are binomial. Hence the factor m n.
        """
        coins = num_rounds - np.maximum(counts - 1, 0) * (self.separation - 1)
        probability = self.joining_probability
        too_often = binomial_tail(counts, coins, probability) * self.population
        if np.any(too_often < LEAST_PROBABILITY):
            worst = int(np.argmin(too_often))
            return (
                f"a client took part in {counts[worst]} of {num_rounds} rounds, more than chance "
                "gives"
            )
        every = binomial_tail(counts.sum(), coins.sum(), probability)
        if every * num_rounds * self.population < LEAST_PROBABILITY:
            return (
                f"its rounds had {counts.sum() / num_rounds:.4g} clients on average, more than "
                f"chance gives where {self.clients_per_round} are expected"
            )
        return None

    @property
    def label(self) -> str:
        """What tables say of the mechanism."""
        return f"b-min-sep {self.separation}"

    def condition(self, sampler: str | None = None) -> str:
        """Returns what every client has to do."""
        return (
            "every client flips a secret coin in each round in which its timer allows it, at least "
            f"{self.separation} rounds after it last took part, and takes part with probability "
            f"{self.joining_probability!r}, whatever happened before, and if its timer begins as "
            "if it had done so for ever. Who took part stays secret for ever. In a simulation that "
            f"is what {sampler} draws. A device flips its coin every round, even offline, and its "
            "timer starts if the coin says so."
        )

    def accounting_words(self) -> str:
        """Returns how the amplified guarantee is computed."""
        return (
            "Amplification by min-separation sampling (b-min-sep, secret coins under timers, "
            "arXiv 2602.09338): an upper bound on delta that is certified by Monte Carlo, whose "
            "failure probability is part of delta."
        )

    def assumption_words(self) -> str:
        """Returns what the guarantee assumes of coins and timers."""
        return (
            f"Min-separation sampling: a client that took part is not free for the next "
            f"{counted(self.separation - 1, 'round')}. In every round in which it is free, it "
            f"takes part with probability {rounded_up(self.joining_probability, '.6g')}, by a "
            f"secret coin of its own. In round 0 it is free with probability "
            f"{rounded_up(self.probability_free_at_first, '.6g')}, or else first in one of the "
            f"rounds 1 to {self.separation - 1}, each of which is as likely. {SECRET_OF_CLIENTS}"
        )
