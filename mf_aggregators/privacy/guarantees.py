"""Guarantees of mechanisms: planned, drawn, observed, and in words.

``kernel.claim.check`` proves them all. Here stand the claims that follow from factorizations and
participations, and the mappings and words of a guarantee. The guarantees of ledgers are those of
``kernel.ledger``.
"""

import bisect
import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

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
# e to more than this overflows.
_LARGEST_EXPONENT = 700.0
# The false positive rates that every statement has a true positive rate for.
_FALSE_POSITIVE_RATES = (0.01, 0.001)
# The Gram matrix of more rounds than this takes more than half a gigabyte.
_MOST_ROUNDS_OF_GRAM = 8192
# Entries of the Gram matrix that are looked up together: bounds the memory.
_ENTRIES_AT_A_TIME = 1 << 24
# The share of the noise multiplier that errors of a computed C may take: many times over.
_ERRORS_OF_C = 2e-11
# The assumption of a guarantee that follows from a ledger, as a field of JSON objects.
INDEPENDENCE: Mapping[str, str] = {
    "participation_independent_of_releases": f"An observed guarantee holds {ONLY_IF}."
}


def scheme_of(guarantee: Guarantee) -> SamplingScheme | None:
    """Returns how clients are drawn, where that amplifies a guarantee; None for others.

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


def part_of_client(guarantee: Guarantee) -> dict[str, Any]:
    """Returns the guarantee of a part of a client's data: an example, or one of several people.

    With or without the part, the client sends an update within the clip norm, and these two are up
    to two clip norms apart. So all of its participations change C x by up to twice what the noise
    multiplier is relative to, also after rounding and where clip norms adapt
    (docs/privacy-proofs.md).

    Args:
      guarantee: The guarantee of whole clients.

    Returns:
      ``noise_multiplier``, half of that of whole clients, without amplification; the ``epsilon``
      that follows at their ``delta``, infinity where that is too little noise to state one; and,
      where the guarantee of whole clients is amplified, what follows from applying it twice:
      ``amplified_epsilon``, twice its epsilon, at ``amplified_delta``, its delta times
      1 + e^epsilon. Both are None where nothing is amplified, or nothing follows.
    """
    half = of_part(guarantee)
    amplified_epsilon, amplified_delta = None, None
    has_noise = math.isfinite(half.noise_multiplier)
    # Two guarantees in a row: with the part, without the client, without the part.
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
    """Returns a guarantee with the epsilon and rho that a noise multiplier has for any matrix.

    They are those of the identity, and depend on the noise multiplier alone: the guarantee is for a
    single participation.

    Args:
      noise_multiplier: Relative to the sensitivity of C; zero for none.
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
      participation: The observed participations. Of a scheme, their ``keeps_sampling`` says it.
    """
    if plan.is_sampled:
        return participation.keeps_sampling is True
    return participation.keeps(plan.as_schema())


def num_outside_schema(schema: Schema, participations: IntArray, separations: IntArray) -> int:
    """Returns how many clients took part in rounds that a schema forbids.

    Args:
      schema: The schema.
      participations: (r,): of each client that took part at least twice, how often it did.
      separations: (sum of participations - r,): the rounds from each of its participations
        to the next, of one client after the other.
    """
    if not len(participations):
        return 0
    # At once, as there may be millions.
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
    """Returns the true positive rates that are stated, from 0 to 1, as fields of a report.

    Args:
      guarantee: The guarantee; None where none is stated.
      prefix: What the names begin with, before ``true_positive_rate_at_0.01`` and its like.

    Returns:
      A rate for each of 1 % and 0.1 %, in their order; None without a guarantee.
    """
    found: list[float | None] = [None] * len(_FALSE_POSITIVE_RATES)
    if guarantee is not None:
        found = np.asarray(true_positive_rate(guarantee, np.array(_FALSE_POSITIVE_RATES))).tolist()
    names = (f"{prefix}true_positive_rate_at_{rate:g}" for rate in _FALSE_POSITIVE_RATES)
    return dict(zip(names, found, strict=True))


def rates_in_brief(guarantee: Guarantee) -> str:
    """Returns the true positive rates that are stated, in a few words.

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
    """The client or the person of a ledger who is protected least.

    Attributes:
      name: Who it is.
      rounds: The rounds that it took part in, from 0; of a person, one for each client.
      guarantee: What holds for it by these rounds, without amplification. It holds only if
        participation did not depend on released models or on data.

    Raises:
      ValueError: If an attribute is of another type.
    """

    name: str
    rounds: tuple[int, ...]
    guarantee: Guarantee

    def __post_init__(self) -> None:
        inputs.check_types(self)


def least_protected(
    plan: Guarantee, ledger: Ledger, people: Mapping[str, Sequence[str]] | None = None
) -> LeastProtected | None:
    """Returns the client with the largest sensitivity for its own rounds, or the person.

    One client's contributions in the rounds of a pattern change it by at most
    ``sqrt(sum |X[i, j]|)`` over i, j in the pattern, with X = C^T C (BandMF Eq. 5 for a schema of
    this one pattern), and by exactly that where the signs of the entries fit together. So its
    epsilon is at most that of ``ObservedParticipation.guarantee``, for every pattern of the
    observed separation and number of participations.

    All clients of a person are zeroed together (``kernel.sensitivity``). A client that several
    people share counts twice for each of them: with and without one person's part, its update may
    be two clip norms apart.

    Args:
      plan: What fixes the noise.
      ledger: A complete ledger of who took part.
      people: The clients of each person; None for the client.

    Returns:
      The client or person, the first of several; None if nobody took part, or for more than 8,192
      rounds, whose Gram matrix would not fit into memory.

    Raises:
      LedgerError: If a client of the ledger is nobody's.
    """
    if people is not None:
        of_people = _rounds_of_people(ledger, people)
        return _least_protected(plan, of_people, ledger.num_rounds, Basis.PEOPLE)
    of_clients = dict(zip(ledger.client_ids, ledger.rounds_of_clients, strict=True))
    return _least_protected(plan, of_clients, ledger.num_rounds, Basis.LEDGER)


def _rounds_of_people(ledger: Ledger, people: Mapping[str, Sequence[str]]) -> dict[str, IntArray]:
    """The increasing rounds of each person's clients, each as often as clients count for it."""
    weights, rounds = _weights(people), ledger.by_name()
    if strangers := rounds.keys() - weights.keys():
        number = f"{len(strangers)} of {len(rounds)} clients that took part"
        raise LedgerError(f"{number} are nobody's: give each client a line with its person.")
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
    """How many clip norms a client counts for: 1, or 2 if several people share it."""
    found: dict[str, int] = {}
    for clients in people.values():
        found |= {each: 2 if each in found else 1 for each in clients}
    return found


def _least_protected(
    plan: Guarantee, rounds_of: Mapping[str, IntArray], num_rounds: int, basis: Basis
) -> LeastProtected | None:
    """The client or person with the largest sensitivity, the first of several.

    The rounds of a person increase, and one stands there once for each client.
    """
    by_count: dict[int, list[str]] = {}
    for name, rounds in rounds_of.items():
        if len(rounds):
            by_count.setdefault(len(rounds), []).append(name)
    if not by_count or num_rounds > _MOST_ROUNDS_OF_GRAM:
        return None
    # Leave out the rows of C of later rounds.
    leading = strategy_of(plan.claim.rows, num_rounds).columns(tuple(range(num_rounds)))
    magnitudes = np.abs(leading.T @ leading)
    moves: dict[str, float] = {}
    for names in by_count.values():
        squared = _squared(magnitudes, np.stack([rounds_of[name] for name in names]))
        moves.update(zip(names, np.sqrt(squared).tolist(), strict=True))
    worst = max(rounds_of, key=lambda name: moves.get(name, -1.0))
    pattern = tuple(rounds_of[worst].tolist())
    own = plan.without_draws(taking_part=Pattern(pattern), num_rounds=num_rounds, basis=basis)
    return LeastProtected(worst, pattern, claim.check(own))


def _squared(magnitudes: FloatArray, patterns: IntArray) -> FloatArray:
    """For (N, c) patterns, the sums of |X| over all pairs of each."""
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
    """Ends a run before the next round would exceed an epsilon at the planned delta.

    Use it when a run may go on as long as its epsilon is within a limit.

    The rule is fixed before the first round. Before each round it looks at who took part in the
    rounds so far and who would take part in the next one, and at nothing else: if all these rounds
    together would have an epsilon above the limit, the next round does not take place.

    Statement: whatever ends the run, and whenever, the rounds that it released are (limit,
    delta)-DP. Clients may decide from released models whether to take part: the limit is fixed
    before the first round. The observed epsilon of a run that the rule ended is not fixed. It may
    be smaller, and holds only if participation did not depend on released models or on data.

    Proof. Before each round that it let happen, the rule found the noise multiplier, relative to
    the sensitivity of the leading rows of C under the observed participations, to be at least that
    of the limit. So the vector by which one client moves the released rows of C x, in units of the
    noise, has a norm of at most one over the multiplier of the limit in every run. The privacy loss
    of Gaussian noise is then at most that of one Gaussian mechanism of this multiplier, also where
    these moves follow from earlier releases (docs/privacy-proofs.md, section 4). A run that ends
    sooner, for any reason, released a part of these rounds: that is post-processing.

    Where a data sampler draws the clients, who was drawn is hidden and no part of the rule. The
    number t follows from the plan alone: it is the most rounds whose amplified epsilon is within
    the limit. With min-separation sampling and balls in bins, any part of a run is stated with the
    epsilon of all rounds, so that a limit below it allows no round, and any other one allows all of
    them.

    Attributes:
      plan: What ``Mechanism.guarantee`` returned; it fixes the noise.
      epsilon: The limit.

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
            raise ValueError("a run without noise has no epsilon to stop at: leave the limit out.")
        first = ObservedParticipation(1, 1, None, 1, self.plan.is_amplified or None)
        if not self.allows(first):
            alone = rounded_up(first.guarantee(self.plan).epsilon, ".6g")
            raise ValueError(
                f"no round could take place: the first ones have epsilon {alone}, more than the "
                f"limit of {inputs.in_full(self.epsilon)}. Raise the limit, or use more noise."
            )

    @functools.cached_property
    def guarantee(self) -> Guarantee:
        """The guarantee of every run under the rule, never worse than the limit.

        For timers: a Gaussian mechanism of the smallest noise multiplier that the rule allows,
        for the largest sensitivity that leaves. It does not depend on the planned participation
        (``is_by_rule``). For a sampler, the guarantee of the most rounds that the rule allows.
        """
        if self.plan.is_amplified:
            return _sampled_rounds(self._most_rounds).guarantee(self.plan)
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
            is_drawn = participation.keeps_sampling is True
            return is_drawn and participation.num_rounds <= self._most_rounds
        # Compare noise multipliers, and not epsilons: the rounds are then a part of the Gaussian
        # mechanism of the guarantee, and its event composes with others.
        guarantee = participation.guarantee(self.plan)
        least = self.guarantee.noise_multiplier
        return guarantee.noise_multiplier >= least * (1.0 + _ERRORS_OF_C)

    @functools.cached_property
    def _most_rounds(self) -> int:
        """The most rounds of a sampled run that are within the limit; 0 if one is too many."""
        # Epsilon does not fall with further rounds. Where a bound did, fewer than the most would
        # be found, and those that are found are checked themselves.
        rounds = range(1, self.plan.num_rounds + 1)
        return bisect.bisect_right(
            rounds, self.epsilon, key=lambda n: _sampled_rounds(n).guarantee(self.plan).epsilon
        )


def _sampled_rounds(num_rounds: int) -> ObservedParticipation:
    # Who was drawn plays no part in an amplified guarantee.
    return ObservedParticipation(num_rounds, 0, None, 0, keeps_sampling=True)
