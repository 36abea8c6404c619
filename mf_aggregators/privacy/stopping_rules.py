"""Rules that end a run before it exceeds an epsilon.

The rule is fixed before the first round. Before each round it looks at who took part in the
rounds so far and who would take part in the next one, and at nothing else: if all these rounds
together would have an epsilon above the limit, the next round does not take place.

Statement: whatever ends the run, and whenever, the rounds that it released are (limit, delta)-DP.
Clients may decide from released models whether to take part: the limit is fixed before the first
round. The observed epsilon of a run that the rule ended is not fixed. It may be smaller, and holds
only if participation did not depend on released models or on data.

Proof. Before each round that it let happen, the rule found the noise multiplier, relative to the
sensitivity of the leading rows of C under the observed participations, to be at least that of the
limit. So the vector by which one client moves the released rows of C x, in units of the noise, has
a norm of at most one over the multiplier of the limit in every run. The privacy loss of Gaussian
noise is then at most that of one Gaussian mechanism of this multiplier, also where these moves
follow from earlier releases (docs/privacy-proofs.md, section 4). A run that ends sooner, for
any reason, released a part of these rounds: that is post-processing.

Where a data sampler draws the clients, who was drawn is hidden and no part of the rule. The
number t follows from the plan alone: it is the most rounds whose amplified epsilon is within the
limit. With min-separation sampling and balls in bins, any part of a run is stated with the epsilon
of all rounds, so that a limit below it allows no round, and any other one allows all of them.
"""

import bisect
import dataclasses
import functools

from mf_aggregators import accounting, inputs
from mf_aggregators.kernel import claim, numbers
from mf_aggregators.kernel.claim import Basis, Guarantee, Limit
from mf_aggregators.kernel.numbers import in_full, rounded_up
from mf_aggregators.privacy import guarantees
from mf_aggregators.privacy.guarantees import ObservedParticipation

# The share of the noise multiplier that errors of a computed C may take: many times over.
_ERRORS_OF_C = 2e-11


@dataclasses.dataclass(frozen=True)
class StoppingRule:
    """Ends a run before the next round would exceed an epsilon at the planned delta.

    Attributes:
      plan: What ``Mechanism.guarantee`` returned; it fixes the noise.
      epsilon: The limit.

    Raises:
      ValueError: If the limit is not above zero, there is no noise, or the first round alone
        would exceed it.
    """

    plan: Guarantee
    epsilon: float

    def __post_init__(self) -> None:
        numbers.positive_number(self.epsilon, "the epsilon to stop at")
        inputs.check_types(self, "plan")
        if self.plan.noise_multiplier == 0.0:
            raise ValueError("a run without noise has no epsilon to stop at: leave the limit out.")
        keeps_sampling = None if not self.plan.is_amplified else True
        first = ObservedParticipation(1, 1, None, 1, keeps_sampling)
        if not self.allows(first):
            alone = guarantees.observed(self.plan, first)
            rounds = "one round alone has"
            if self.plan.claim.columns is not None:
                rounds = (
                    "where clients draw for themselves, a part of a run has that of all rounds,"
                )
            raise ValueError(
                f"{rounds} epsilon {rounded_up(alone.epsilon, '.6g')}, more than the limit of "
                f"{in_full(self.epsilon)}: "
                "no round could take place. Raise the limit, or use more noise."
            )

    @functools.cached_property
    def guarantee(self) -> Guarantee:
        """The guarantee of every run under the rule, never worse than the limit.

        For timers: a Gaussian mechanism of the smallest noise multiplier that the rule allows,
        for the largest sensitivity that leaves. It does not depend on the planned participation
        (``is_by_rule``). For a sampler, the guarantee of the most rounds that the rule allows.
        """
        if self.plan.is_amplified:
            return guarantees.observed(self.plan, _sampled_rounds(self._most_rounds))
        # Leave room for errors of a computed C, if the limit allows it.
        enough = accounting.noise_multiplier(self.epsilon, self.plan.delta)
        less = self._with(enough * (1.0 - 2.0 * _ERRORS_OF_C))
        return less if less.epsilon <= self.epsilon else self._with(enough)

    def _with(self, noise_multiplier: float) -> Guarantee:
        """The guarantee of a rule that allows so small a noise multiplier, and no smaller one."""
        plan = self.plan.claim
        limit = Limit(plan.sigma / noise_multiplier)
        ruled = dataclasses.replace(plan, taking_part=limit, epsilon=None, basis=Basis.RULE)
        return claim.check(ruled)

    def allows(self, participation: ObservedParticipation) -> bool:
        """Returns whether rounds may be released, the last of which is the next one.

        Args:
          participation: The observed participations of all rounds, with those of the next one. Of
            a run whose batches a sampler draws, ``keeps_sampling`` says that it drew these.

        Returns:
          False if the run has to end before the last of these rounds.

        Raises:
          ValueError: If there are more rounds than the plan has.
        """
        if self.plan.is_amplified:
            return (
                participation.keeps_sampling is True
                and participation.num_rounds <= self._most_rounds
            )
        # Compare noise multipliers, and not epsilons: the rounds are then a part of the Gaussian
        # mechanism of the guarantee, and its event composes with others.
        guarantee = guarantees.observed(self.plan, participation)
        least = self.guarantee.noise_multiplier
        return guarantee.noise_multiplier >= least * (1.0 + _ERRORS_OF_C)

    @functools.cached_property
    def _most_rounds(self) -> int:
        """The most rounds of a sampled run that are within the limit; 0 if one is too many."""
        # Epsilon does not fall with further rounds. Where a bound did, fewer than the most would
        # be found, and those that are found are checked themselves.
        rounds = range(1, self.plan.num_rounds + 1)
        return bisect.bisect_right(rounds, self.epsilon, key=self._epsilon_of)

    def _epsilon_of(self, num_rounds: int) -> float:
        return guarantees.observed(self.plan, _sampled_rounds(num_rounds)).epsilon


def _sampled_rounds(num_rounds: int) -> ObservedParticipation:
    # Who was drawn plays no part in an amplified guarantee.
    return ObservedParticipation(num_rounds, 0, None, 0, keeps_sampling=True)
