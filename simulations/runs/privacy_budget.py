"""The privacy budget that a run has spent after its first rounds.

The noise is scaled to the sensitivity of C for all n rounds. What the first t rounds have
released depends on the leading t rows of C alone, whose sensitivity is smaller: the same
noise is a larger multiple of it, and the guarantee of these t releases a better one. It grows
with every round and meets the planned guarantee with the last.

This is for curves of a run. A run that stops early keeps its planned guarantee, unless
neither the data nor what was released had a part in the decision to stop.
"""

import math

from mf_aggregators import accounting, validation
from mf_aggregators.factorizations import Factorization
from mf_aggregators.participation import Participation, SamplingScheme, check
from mf_aggregators.privacy import guarantees
from mf_aggregators.privacy.guarantees import Guarantee, RealisedParticipation

# A curve of about this many points is smooth enough.
_POINTS = 100


class PrivacyBudget:
    """The epsilon of the first t rounds of a run, computed when asked for and kept.

    It is computed for every ``every``-th round, and a round between two of them counts as
    the later one. So it is never below the epsilon of the exact sensitivity, for the
    releases of fewer rounds are part of those of more. It never falls, and it is the planned
    epsilon at the last round and never above: where the sensitivity is known as an
    upper bound only, which need not grow with the rounds, the largest so far holds. Under secret
    coins and with balls in bins it is the epsilon without amplification, or the planned one where
    that is smaller.

    Attributes:
      planned: The guarantee of all rounds.
      every: How many rounds apart epsilon is computed.
    """

    def __init__(
        self,
        factorization: Factorization,
        plan: Participation | SamplingScheme,
        noise_multiplier: float,
        delta: float,
        every: int | None = None,
    ) -> None:
        """Prepares the budget of a run; only the planned guarantee is computed at once.

        Args:
          factorization: What makes the noise.
          plan: The participation schema that the run enforces, or the scheme by which a data
            sampler draws every batch; then the guarantee is amplified, and that of fewer
            rounds is for the same probability of being drawn.
          noise_multiplier: Relative to the sensitivity of C under the schema, or to the
            largest column norm of C with a sampling scheme; zero for no noise.
          delta: Above 0 and below 1; at least 1e-12 with a sampling scheme.
          every: How many rounds apart epsilon is computed; None for a hundredth of
            the rounds, rounded down, but at least 1.

        Raises:
          TypeError: If the plan is neither a schema nor a scheme.
          ValueError: If a number is out of its range, or C does not fit the scheme.
        """
        if isinstance(plan, SamplingScheme):
            self.planned = guarantees.sampled(factorization, plan, noise_multiplier, delta)
        else:
            self.planned = guarantees.planned(factorization, check(plan), noise_multiplier, delta)
        rounds = factorization.num_rounds
        self.every = validation.positive_integer(
            max(1, rounds // _POINTS) if every is None else every, "every"
        )
        self._factorization = factorization
        # The epsilons of the multiples of ``every``, from 0 on; the last entry may be that of the
        # last round.
        self._spent = [0.0]

    def spent(self, rounds: int) -> float:
        """Returns the epsilon of the releases of the first rounds, at the planned delta.

        Args:
          rounds: How many rounds were released, 0 to n.

        Returns:
          Epsilon: 0 before the first round, infinity after it if there is no noise.

        Raises:
          ValueError: If there are more rounds than the factorization has, or fewer than 0.
        """
        rounds = validation.integer_at_least(rounds, 0, "rounds")
        last = self._factorization.num_rounds
        if rounds > last:
            raise ValueError(
                f"rounds must be at most {last}, the rounds of the factorization, found {rounds}."
            )
        if rounds == last:
            return self.planned.epsilon
        point = -(-rounds // self.every)
        while len(self._spent) <= point:
            following = min(len(self._spent) * self.every, last)
            epsilon = min(self._epsilon_of_first(following), self.planned.epsilon)
            self._spent.append(max(self._spent[-1], epsilon))
        return self._spent[point]

    def _epsilon_of_first(self, rounds: int) -> float:
        plan = self.planned
        if math.isinf(plan.epsilon):
            return math.inf
        if plan.sampling is not None and plan.sampling.of_first(rounds) is not None:
            return _sampled_prefix(plan, self._factorization, rounds).epsilon
        # To certify an epsilon takes minutes. Of schemes without parts, the planned one and that
        # without amplification are bounds of fewer rounds too.
        bound = self._factorization.sensitivity_of_first(rounds, plan.participation)
        multiplier = plan.noise_multiplier * plan.sensitivity / bound.value
        try:
            return accounting.epsilon(multiplier, plan.delta)
        except accounting.TailError:
            return math.inf


def _sampled_prefix(plan: Guarantee, factorization: Factorization, rounds: int) -> Guarantee:
    # Who was drawn plays no part in an amplified guarantee.
    nobody = RealisedParticipation(rounds, 0, None, 0, keeps_sampling=True)
    return guarantees.realised(plan, factorization, nobody)
