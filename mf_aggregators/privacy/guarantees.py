"""Claims and guarantees of mechanisms and parts of clients, attackers' rates, stopping rules.

``kernel.claim.check`` proves every guarantee. This module makes claims from factorizations and
participations, and turns guarantees into fields and words. ``kernel.ledger`` makes the observed
guarantees.
"""

import bisect
import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

import numpy as np
from dp_accounting import dp_event

from mf_aggregators import accounting, inputs
from mf_aggregators.kernel import claim, numbers
from mf_aggregators.kernel.claim import ONLY_IF, Basis, Claim, Guarantee, Limit, Pattern
from mf_aggregators.kernel.ledger import ObservedParticipation
from mf_aggregators.kernel.numbers import FloatArray, IntArray, rounded_up
from mf_aggregators.kernel.rows import BandedNoise, strategy_of
from mf_aggregators.kernel.sensitivity import Schema, Unit
from mf_aggregators.participation import Participation, SamplingScheme
from mf_aggregators.privacy.ledgers import Ledger, LedgerError

# Relative rounding error of a product of floats and an exponential.
_ROUNDING = 1e-12
# The exponential of a larger number overflows.
_LARGEST_EXPONENT = 700.0
# Every statement has the true positive rates at these false positive rates.
_FALSE_POSITIVE_RATES = (0.01, 0.001)
# For more rounds than this, the Gram matrix takes more than half a gigabyte.
_MOST_ROUNDS_OF_GRAM = 8192
# How many entries of the Gram matrix are read together; this bounds the memory.
_ENTRIES_AT_A_TIME = 1 << 24
# The share of the noise multiplier that is reserved for errors of a computed C, which are far
# smaller.
_ERRORS_OF_C = 2e-11
# The assumption of a guarantee that follows from a ledger, as a field of JSON objects.
INDEPENDENCE: Mapping[str, str] = {
    "participation_independent_of_releases": f"An observed guarantee holds {ONLY_IF}."
}


def scheme_of(guarantee: Guarantee) -> SamplingScheme | None:
    """Returns the sampling scheme that amplifies a guarantee; None without amplification.

    Args:
      guarantee: The guarantee.
    """
    draws = guarantee.claim.taking_part
    if isinstance(draws, (Schema, Unit, Pattern, Limit)):
        return None
    return SamplingScheme.of_draws(draws)


def of_part(guarantee: Guarantee) -> Guarantee:
    """Returns the guarantee of a part of a client's data, without amplification.

    Args:
      guarantee: The guarantee of whole clients: see :func:`part_of_client`.
    """
    whole = guarantee.without_draws() if guarantee.is_amplified else guarantee.claim
    return claim.check(dataclasses.replace(whole, sigma=0.5 * whole.sigma, epsilon=None))


def part_of_client(guarantee: Guarantee) -> dict[str, float | None]:
    """Returns the guarantee of a part of a client's data: an example, or one of several people.

    With the part of its data and without it, the client sends updates within the clip norm, which
    are at most two clip norms apart. So all of its participations together change C x by at most
    twice the sensitivity, also after rounding and with adaptive clip norms
    (docs/privacy-proofs.md).

    Args:
      guarantee: The guarantee of whole clients.

    Returns:
      ``noise_multiplier``, half of the unamplified noise multiplier of whole clients; the
      ``epsilon`` that follows at the guarantee's ``delta``, or infinity if this is too little noise
      to state one. If the guarantee of whole clients is amplified, applying it twice gives
      ``amplified_epsilon``, twice its epsilon, at ``amplified_delta``, its delta times 1 +
      e^epsilon. Both are None without amplification, or if ``amplified_delta`` is no delta.
    """
    half = of_part(guarantee)
    amplified_epsilon, amplified_delta = None, None
    has_noise = math.isfinite(half.noise_multiplier)
    # The guarantee is applied twice: to remove the client, and to add it without the part.
    if has_noise and guarantee.is_amplified and guarantee.epsilon <= _LARGEST_EXPONENT:
        delta = guarantee.delta * (1.0 + math.exp(guarantee.epsilon)) * (1.0 + _ROUNDING)
        if delta < 1.0:
            amplified_epsilon, amplified_delta = 2.0 * guarantee.epsilon, delta
    return {
        "noise_multiplier": half.noise_multiplier,
        "epsilon": half.epsilon,
        "delta": half.delta,
        "amplified_epsilon": amplified_epsilon,
        "amplified_delta": amplified_delta,
    }


def event(guarantee: Guarantee) -> dp_event.DpEvent:
    """Returns a run as an event of dp-accounting: see ``Mechanism.event``.

    Args:
      guarantee: The guarantee of the run.
    """
    if guarantee.run is not None:
        return accounting.event(guarantee.run)
    if math.isinf(guarantee.noise_multiplier):
        return dp_event.NoOpDpEvent()
    return accounting.event(guarantee.noise_multiplier)


def of_noise(noise_multiplier: float, delta: float) -> Guarantee:
    """Returns the guarantee of a noise multiplier; its epsilon and rho hold for any matrix.

    Epsilon and rho depend only on the noise multiplier, so the guarantee is that of one
    participation with the identity matrix.

    Args:
      noise_multiplier: Relative to the sensitivity of C; zero for no noise.
      delta: Above 0 and below 1.

    Raises:
      ValueError: If an argument is out of its range.
    """
    multiplier = numbers.non_negative_number(noise_multiplier, "noise_multiplier")
    return claim.check(Claim(BandedNoise(1), Schema(1, 1), multiplier, delta))


def keeps_plan(plan: Participation, participation: ObservedParticipation) -> bool:
    """Returns whether a schema or scheme allows the observed participations.

    Args:
      plan: The schema, or the scheme of a data sampler.
      participation: The observed participations. For a sampling scheme, their ``keeps_sampling`` is
        returned.
    """
    if plan.is_sampled:
        return participation.keeps_sampling is True
    return participation.keeps(plan.as_schema())


def num_outside_schema(schema: Schema, participations: IntArray, separations: IntArray) -> int:
    """Returns the number of clients that took part in rounds that a schema forbids.

    Args:
      schema: The schema.
      participations: (r,): for each client that took part at least twice, the number of times.
      separations: (sum of participations - r,): the rounds between consecutive participations of
        these clients, client by client.
    """
    if not len(participations):
        return 0
    # All clients at once, because there may be millions.
    starts = np.cumsum(participations - 1) - (participations - 1)
    ends_of = (np.minimum.reduceat(separations, starts), np.maximum.reduceat(separations, starts))
    patterns, clients = np.unique([participations, *ends_of], axis=1, return_counts=True)
    return sum(
        int(number)
        for pattern, number in zip(patterns.T.tolist(), clients, strict=True)
        if not schema.allows_separations(*pattern)
    )


def true_positive_rate(
    guarantee: Guarantee, false_positive_rate: float | FloatArray
) -> float | FloatArray:
    """Returns the highest true positive rate that an attacker can have.

    Args:
      guarantee: The guarantee.
      false_positive_rate: From 0 to 1, or an array of them; others raise a ValueError.

    Returns:
      A rate of the argument's shape; 1 where epsilon is infinite.
    """
    multiplier = 0.0 if math.isinf(guarantee.epsilon) else guarantee.noise_multiplier
    if guarantee.run is None or multiplier == 0.0:
        return accounting.true_positive_rate(multiplier, false_positive_rate)
    return accounting.true_positive_rate(
        guarantee.run,
        false_positive_rate,
        guarantees=[(guarantee.epsilon, guarantee.delta)],
    )


def rates(guarantee: Guarantee | None, prefix: str = "") -> dict[str, float | None]:
    """Returns the true positive rates that a report states, from 0 to 1, as its fields.

    Args:
      guarantee: The guarantee; None if none is stated.
      prefix: A prefix for the names of fields, such as ``true_positive_rate_at_0.01``.

    Returns:
      The rates at false positive rates of 1 % and 0.1 %; None without a guarantee.
    """
    found: list[float | None] = [None] * len(_FALSE_POSITIVE_RATES)
    if guarantee is not None:
        found = np.asarray(true_positive_rate(guarantee, np.array(_FALSE_POSITIVE_RATES))).tolist()
    names = (f"{prefix}true_positive_rate_at_{rate:g}" for rate in _FALSE_POSITIVE_RATES)
    return dict(zip(names, found, strict=True))


def rates_in_brief(guarantee: Guarantee) -> str:
    """Returns a short text with the true positive rates of a guarantee.

    Args:
      guarantee: The guarantee.
    """
    return " and ".join(
        f"{_percent(most or 0.0)} at a false positive rate of {100.0 * rate:g} %"
        for rate, most in zip(_FALSE_POSITIVE_RATES, rates(guarantee).values(), strict=True)
    )


def _percent(rate: float) -> str:
    """A rate from 0 to 1 in percent, rounded up."""
    # The product may be rounded down.
    value = 100.0 * rate
    return f"{rounded_up(value if rate == 1.0 else math.nextafter(value, math.inf), '.5g')} %"


@dataclasses.dataclass(frozen=True)
class LeastProtected:
    """The least protected client of a ledger, or the least protected person.

    Attributes:
      name: The name of the client or person.
      rounds: The rounds in which it took part, from 0; for a person, each round once for each of
        its clients in it.
      guarantee: The guarantee that follows from these rounds, without amplification. It holds only
        if participation did not depend on released models or on data.

    Raises:
      ValueError: If an attribute is of another type.
    """

    name: str
    rounds: tuple[int, ...]
    guarantee: Guarantee

    def __post_init__(self) -> None:
        inputs.check_types(self)

    @classmethod
    def of(
        cls, plan: Guarantee, ledger: Ledger, people: Mapping[str, Sequence[str]] | None = None
    ) -> "LeastProtected | None":
        """Returns the client, or person, with the largest sensitivity for its own rounds.

        One client's contributions in the rounds of a pattern change C x by at most
        ``sqrt(sum |X[i, j]|)`` over i, j in the pattern, with X = C^T C (BandMF Eq. 5 for a schema
        with only this pattern). The bound is exact if all these entries can be made positive by a
        choice of signs. So the client's epsilon is at most that of
        ``ObservedParticipation.guarantee``, which covers every pattern of the observed separation
        and number of participations.

        All clients of a person are zeroed together (``kernel.sensitivity``). A client that several
        people share counts twice for each of them: with and without one person's part, its update
        may be two clip norms apart.

        Args:
          plan: The planned guarantee, which determines the noise.
          ledger: A complete ledger.
          people: The clients of each person; None to find the least protected client.

        Returns:
          The client or person (the first one, if several have the same sensitivity); None if no
          client took part, or for more than 8,192 rounds, whose Gram matrix would be too large.

        Raises:
          LedgerError: If a client of the ledger belongs to no person.
        """
        rounds_of = dict(zip(ledger.client_ids, ledger.rounds_of_clients, strict=True))
        basis, num_rounds = Basis.LEDGER, ledger.num_rounds
        if people is not None:
            # Rounds of a person are sorted, and a round is repeated for each client in it.
            rounds_of, basis = _rounds_of_people(ledger, people), Basis.PEOPLE
        by_count: dict[int, list[str]] = {}
        for name, rounds in rounds_of.items():
            if len(rounds):
                by_count.setdefault(len(rounds), []).append(name)
        if not by_count or num_rounds > _MOST_ROUNDS_OF_GRAM:
            return None
        # Rows of C for rounds that were not released are left out.
        leading = strategy_of(plan.claim.rows, num_rounds).columns(tuple(range(num_rounds)))
        magnitudes = np.abs(leading.T @ leading)
        moves: dict[str, float] = {}
        for names in by_count.values():
            squared = _squared(magnitudes, np.stack([rounds_of[name] for name in names]))
            moves.update(zip(names, np.sqrt(squared).tolist(), strict=True))
        worst = max(rounds_of, key=lambda name: moves.get(name, -1.0))
        pattern = tuple(rounds_of[worst].tolist())
        own = plan.without_draws(taking_part=Pattern(pattern), num_rounds=num_rounds, basis=basis)
        return cls(worst, pattern, claim.check(own))


def _rounds_of_people(ledger: Ledger, people: Mapping[str, Sequence[str]]) -> dict[str, IntArray]:
    """The sorted rounds of each person: a round once for each client in it, or twice if shared."""
    weights, rounds = _weights(people), ledger.by_name()
    if strangers := rounds.keys() - weights.keys():
        number = f"{len(strangers)} of {len(rounds)} clients that took part"
        raise LedgerError(f"{number} have no person: give each client a line with its person.")
    return {
        person: np.sort(
            [i for each in own for i in rounds.get(each, ()) for _ in range(weights[each])]
        )
        for person, own in people.items()
    }


def most_clients(people: Mapping[str, Sequence[str]]) -> int:
    """Returns the most clients of one person; a client that people share counts as two.

    Args:
      people: The clients of each person.
    """
    weights = _weights(people)
    return max(sum(weights[each] for each in own) for own in people.values())


def _weights(people: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """By how many clip norms a client can move a sum: 1, or 2 if several people share it."""
    found: dict[str, int] = {}
    for clients in people.values():
        found |= {each: 2 if each in found else 1 for each in clients}
    return found


def _squared(magnitudes: FloatArray, patterns: IntArray) -> FloatArray:
    """For (N, c) patterns, the sum of |X| over all pairs of rounds of each pattern."""
    at_a_time = max(1, _ENTRIES_AT_A_TIME // patterns.shape[1] ** 2)
    chunks = np.split(patterns, range(at_a_time, len(patterns), at_a_time))
    return np.concatenate(
        [
            magnitudes[chunk[:, :, np.newaxis], chunk[:, np.newaxis, :]].sum(axis=(1, 2))
            for chunk in chunks
        ]
    )


@dataclasses.dataclass(frozen=True)
class StoppingRule:
    """Ends a run before the round with which its epsilon would exceed a limit.

    Use it when a run may continue as long as its epsilon, at the planned delta, is within a limit.

    The rule is fixed before the first round. Before each round it looks only at who took part in
    the rounds so far and who would take part in the next one: if all these rounds together would
    have an epsilon above the limit, the next round does not take place.

    Statement: for any reason and time at which the run ends, its released rounds are (limit,
    delta)-DP. Clients may decide from released models whether to take part, because the limit was
    fixed before the first round. The observed epsilon of a run that the rule ended may be smaller,
    but holds only if participation did not depend on released models or on data.

    Proof. Before each round that took place, the rule found that the noise multiplier, relative to
    the sensitivity of the leading rows of C under the observed participations, was at least that of
    the limit. So the vector by which one client moves the released rows of C x, in units of the
    noise, has a norm of at most one over the noise multiplier of the limit in every run. The
    privacy loss of Gaussian noise is then at most that of one Gaussian mechanism with this noise
    multiplier, even if this vector depends on earlier releases (docs/privacy-proofs.md, section 4).
    A run that ends sooner, for any reason, releases only some of these rounds, which is
    post-processing.

    If a data sampler draws the clients, the draws are secret, and the rule does not look at them:
    it allows the largest number of rounds whose amplified epsilon is within the limit, which
    follows from the plan alone. With min-separation sampling and balls in bins, any part of a run
    has the epsilon of all rounds, so a smaller limit allows no round, and any other limit allows
    all rounds.

    Attributes:
      plan: The planned guarantee (``Mechanism.guarantee``), which determines the noise.
      epsilon: The limit on epsilon.

    Raises:
      ValueError: If the limit is not above zero, there is no noise, or the first round alone
        would exceed it.

    Example:
      >>> import mf_aggregators as mfa
      >>> timers = mfa.participation.MinSeparation(separation=4)
      >>> matrix = mfa.factorizations.banded(16, num_bands=4)
      >>> mechanism = mfa.calibrate(matrix, timers, epsilon=8.0, delta=1e-6)
      >>> rule = mfa.privacy.guarantees.StoppingRule(mechanism.guarantee(1e-6), epsilon=6.0)
      >>> few, many = (mechanism.observed([["ada"]] * rounds).participation for rounds in (1, 16))
      >>> rule.allows(few), rule.allows(many)
      (True, False)
    """

    plan: Guarantee
    epsilon: float

    def __post_init__(self) -> None:
        numbers.positive_number(self.epsilon, "the epsilon to stop at")
        inputs.check_types(self, "plan")
        if self.plan.noise_multiplier == 0.0:
            raise ValueError("a run without noise has no epsilon: leave out the limit.")
        first = ObservedParticipation(1, 1, None, 1, self.plan.is_amplified or None)
        if not self.allows(first):
            alone = rounded_up(first.guarantee(self.plan).epsilon, ".6g")
            raise ValueError(
                f"no round could take place: the first round has epsilon {alone}, above the limit "
                f"of {inputs.in_full(self.epsilon)}. Raise the limit, or use more noise."
            )

    @functools.cached_property
    def guarantee(self) -> Guarantee:
        """The guarantee of every run under the rule, never worse than the limit.

        For timers: the guarantee of the smallest noise multiplier (and so the largest sensitivity)
        that the rule allows. It does not depend on the planned participation (``is_by_rule``). For
        a sampler: the guarantee of the largest number of rounds that the rule allows.
        """
        if self.plan.is_amplified:
            return _sampled_rounds(self._most_rounds).guarantee(self.plan)
        # Reserve a share for errors of a computed C, if the limit allows it.
        enough = accounting.noise_multiplier(self.epsilon, self.plan.delta)
        less = self._with(enough * (1.0 - 2.0 * _ERRORS_OF_C))
        return less if less.epsilon <= self.epsilon else self._with(enough)

    def _with(self, noise_multiplier: float) -> Guarantee:
        """The guarantee of a rule that allows noise multipliers down to the given one."""
        plan = self.plan.claim
        limit = Limit(plan.sigma / noise_multiplier)
        ruled = dataclasses.replace(plan, taking_part=limit, epsilon=None, basis=Basis.RULE)
        return claim.check(ruled)

    def allows(self, participation: ObservedParticipation) -> bool:
        """Returns whether the next round may be released.

        Args:
          participation: The observed participations of all rounds so far and of the next one. For a
            sampled run, ``keeps_sampling`` says whether the sampler drew them.

        Returns:
          False if the run has to end before the next round.

        Raises:
          ValueError: If there are more rounds than the plan has.
        """
        if self.plan.is_amplified:
            is_drawn = participation.keeps_sampling is True
            return is_drawn and participation.num_rounds <= self._most_rounds
        # Noise multipliers are compared, not epsilons, so that the rounds are part of the
        # guarantee's Gaussian mechanism, and its event composes with others.
        guarantee = participation.guarantee(self.plan)
        least = self.guarantee.noise_multiplier
        return guarantee.noise_multiplier >= least * (1.0 + _ERRORS_OF_C)

    @functools.cached_property
    def _most_rounds(self) -> int:
        """The largest number of rounds of a sampled run within the limit; 0 if one exceeds it."""
        # Epsilon does not fall with further rounds. If a bound on it did, this would find fewer
        # rounds; their epsilon is checked.
        rounds = range(1, self.plan.num_rounds + 1)
        return bisect.bisect_right(
            rounds, self.epsilon, key=lambda n: _sampled_rounds(n).guarantee(self.plan).epsilon
        )


def _sampled_rounds(num_rounds: int) -> ObservedParticipation:
    # An amplified guarantee does not depend on which clients were drawn.
    return ObservedParticipation(num_rounds, 0, None, 0, keeps_sampling=True)
