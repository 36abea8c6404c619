"""The privacy guarantee of a run: as planned, and as observed.

A plan names a participation schema, and the noise is scaled to the sensitivity of C under it.
A run that kept its plan has the planned guarantee, also if clients decided from released models
whether to take part. The participations that were observed define a schema of their own, by their
separations and their largest number per client, and the same noise is measured against the
sensitivity under that one. The observed guarantee may be the better one, and holds only if
participation did not depend on released models or on data (docs/privacy-proofs.md, section 4). A
run that broke its plan has only the observed guarantee.
"""

import dataclasses
import math
import types
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from dp_accounting import dp_event

from mf_aggregators import accounting, caches, catalogue, inputs, memory
from mf_aggregators.factorizations import Factorization
from mf_aggregators.kernel import claim, integer_rows, validation
from mf_aggregators.kernel.arrays import IntArray
from mf_aggregators.kernel.claim import ONLY_IF, Basis, Claim, Guarantee, Limit, Pattern
from mf_aggregators.kernel.dominating_pairs import LARGEST_ROUNDING, StrategyColumns
from mf_aggregators.kernel.gaussian import DEFAULT_NUM_COORDINATES
from mf_aggregators.kernel.schemas import Schema
from mf_aggregators.participation import (
    FixedEpochOrder,
    MinSeparation,
    Participation,
    SamplingScheme,
    SingleParticipation,
    accounted,
    of_draws,
    of_schema,
)
from mf_aggregators.participation.monte_carlo import search
from mf_aggregators.participation.monte_carlo.certification import Certification
from mf_aggregators.participation.monte_carlo.columns import columns_of_encoder
from mf_aggregators.privacy import attackers

# Relative rounding error of a product of floats and an exponential.
_ROUNDING = 1e-12
# e to more than this overflows.
_LARGEST_EXPONENT = 700.0
# Arrays of (n, n) that columns without bands are found with.
_ARRAYS_OF_COLUMNS = 6
# Steps of Z. Accounting charges what roundings move; more than these would be half of the noise.
_MOST_ROUNDING = 1024.0
# Results of :func:`_largest_rounding`: a plan asks several times for each factorization.
_ROUNDINGS: weakref.WeakKeyDictionary[Factorization, float] = weakref.WeakKeyDictionary()
# The assumption of a guarantee that follows from a ledger, as a field of JSON objects.
INDEPENDENCE: Mapping[str, str] = types.MappingProxyType(
    {"participation_independent_of_releases": f"An observed guarantee holds {ONLY_IF}."}
)


@dataclasses.dataclass(frozen=True)
class PartOfClient:
    """What holds for a part of a client's data: an example, or one of several people who share it.

    With or without the part, the client sends an update within the clip norm, and these two are up
    to two clip norms apart. So all of its participations change C x by up to twice what the noise
    multiplier is relative to, also after rounding and where clip norms adapt
    (docs/privacy-proofs.md).

    Attributes:
      noise_multiplier: Half of that of whole clients, without amplification.
      epsilon: The epsilon that follows; infinity where that is too little noise to state one.
      delta: The delta that it is for, that of whole clients.
      amplified_epsilon: Where the guarantee of whole clients is amplified, what follows from
        applying it twice: twice its epsilon. None where nothing is amplified, or nothing follows.
      amplified_delta: The delta that it is for: that of whole clients times 1 + e^epsilon.
    """

    noise_multiplier: float
    epsilon: float
    delta: float
    amplified_epsilon: float | None = None
    amplified_delta: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Returns a JSON-able mapping; what is infinite, for lack of noise, becomes None."""
        return {
            **dataclasses.asdict(self),
            "noise_multiplier": _finite_or_none(self.noise_multiplier),
            "epsilon": _finite_or_none(self.epsilon),
        }


def participation_of(guarantee: Guarantee) -> Participation:
    """Returns the participation that a guarantee is for; where clients are drawn, of every draw.

    Args:
      guarantee: The guarantee, by a plan or a ledger and not by a stopping rule.
    """
    if guarantee.claim.taking_part == Pattern(()):
        return SingleParticipation()
    return of_schema(_schema_of(guarantee))


def scheme_of(guarantee: Guarantee) -> SamplingScheme | None:
    """Returns how clients are drawn, where that amplifies a guarantee; None for others.

    Args:
      guarantee: The guarantee.
    """
    draws = guarantee.claim.taking_part
    return None if isinstance(draws, (Schema, Pattern, Limit)) else of_draws(draws)


def independence(guarantee: Guarantee) -> Mapping[str, str]:
    """Returns the assumption of an observed guarantee as a field; none for others.

    Args:
      guarantee: The guarantee.
    """
    return INDEPENDENCE if guarantee.is_observed else {}


def only_if(guarantee: Guarantee) -> str:
    """Returns the assumption of an observed guarantee, after a comma; nothing for others.

    Args:
      guarantee: The guarantee.
    """
    return f", {ONLY_IF}" if guarantee.is_observed else ""


def part_of_client(guarantee: Guarantee) -> PartOfClient:
    """Returns the guarantee of a part of a client's data, at the same delta.

    Args:
      guarantee: The guarantee of whole clients.
    """
    whole = _without_draws(guarantee) if guarantee.is_amplified else guarantee.claim
    half = claim.check(dataclasses.replace(whole, sigma=0.5 * whole.sigma, epsilon=None))
    part = PartOfClient(half.noise_multiplier, half.epsilon, half.delta)
    if math.isinf(half.noise_multiplier):
        return part
    # Without the part, and before that without the client: a triangle of two guarantees.
    if not guarantee.is_amplified or guarantee.epsilon > _LARGEST_EXPONENT:
        return part
    delta = guarantee.delta * (1.0 + math.exp(guarantee.epsilon)) * (1.0 + _ROUNDING)
    if delta >= 1.0:
        return part
    return dataclasses.replace(
        part, amplified_epsilon=2.0 * guarantee.epsilon, amplified_delta=delta
    )


def event(guarantee: Guarantee) -> dp_event.DpEvent:
    """Returns a run as an event of dp-accounting: see ``Mechanism.event``.

    Args:
      guarantee: The guarantee of the run.
    """
    scheme = scheme_of(guarantee)
    if scheme is not None:
        return scheme.event_of(guarantee.noise_multiplier, guarantee.claim.columns)
    if math.isinf(guarantee.noise_multiplier):
        return dp_event.NoOpDpEvent()
    return accounting.event(guarantee.noise_multiplier)


def to_dict(guarantee: Guarantee) -> dict[str, Any]:
    """Returns a JSON-able mapping; infinite numbers, for lack of noise, become None.

    Args:
      guarantee: The guarantee.
    """
    scheme, certificate = scheme_of(guarantee), guarantee.claim.certificate
    return {
        "participation": (
            {"schema": "stopping_rule"}
            if guarantee.is_by_rule
            else participation_of(guarantee).to_dict()
        ),
        "num_rounds": guarantee.num_rounds,
        "sensitivity": guarantee.sensitivity.value,
        "sensitivity_is_exact": guarantee.sensitivity.is_exact,
        "noise_multiplier": _finite_or_none(guarantee.noise_multiplier),
        "zcdp_rho": _finite_or_none(guarantee.rho),
        "zcdp_delta": guarantee.zcdp_delta if math.isfinite(guarantee.rho) else None,
        "epsilon": _finite_or_none(guarantee.epsilon),
        "delta": guarantee.delta,
        **attackers.rates(guarantee),
        "sampling": None if scheme is None else scheme.to_dict(),
        "certificate": None if certificate is None else certificate.to_dict(),
        "assumptions": {each.value: each.sentence for each in guarantee.assumptions},
        **independence(guarantee),
    }


@dataclasses.dataclass(frozen=True)
class ObservedParticipation:
    """The participations that were observed, over all clients.

    Attributes:
      num_rounds: The number of rounds that were released.
      num_clients: How many clients took part at all; None if that is not known.
      separation: The smallest distance |i - j| between two participations of one
        client; None if none took part twice.
      max_participations: The largest number of participations of one client.
      keeps_sampling: Whether a data sampler drew every batch by its scheme; None where none
        was planned, or nobody checked: only whoever holds the sampler's seed can find out.
      largest_separation: The largest distance between adjacent participations of one client;
        None if none took part twice, or if it is not known.
      conditions: Under which conditions it follows, as sentences, where nobody saw who took part
        (``round_times``); None for a ledger.
      gap: Why the ledger is not shown to be complete (``ledgers.gap``); None if it is, and for
        times.

    Raises:
      ValueError: If a number is no integer of its range, a client took part more than once and no
        separation is given, or so many participations do not fit into the rounds.
    """

    num_rounds: int
    num_clients: int | None
    separation: int | None
    max_participations: int
    keeps_sampling: bool | None = None
    largest_separation: int | None = None
    conditions: str | None = None
    gap: str | None = None

    def __post_init__(self) -> None:
        for name, least in (("num_rounds", 0), ("max_participations", 0)):
            found = validation.integer_at_least(getattr(self, name), least, name)
            object.__setattr__(self, name, found)
        for name, least in (("num_clients", 0), ("separation", 1), ("largest_separation", 1)):
            if getattr(self, name) is not None:
                found = validation.integer_at_least(getattr(self, name), least, name)
                object.__setattr__(self, name, found)
        inputs.check_types(self)
        if self.separation is None and self.max_participations > 1:
            raise ValueError(
                f"a client took part {self.max_participations} times: give the separation, which "
                "is 1 where it is not known."
            )
        # A schema that has no room for them would count fewer participations.
        if self.max_participations > 1 and self.separation is not None:
            least = (self.max_participations - 1) * self.separation + 1
            if self.num_rounds < least:
                raise ValueError(
                    f"{self.max_participations} participations {self.separation} rounds apart need "
                    f"{least} rounds, and num_rounds is {self.num_rounds}."
                )
            if self.largest_separation is not None and self.largest_separation < self.separation:
                raise ValueError(
                    f"largest_separation, {self.largest_separation}, is below the smallest, "
                    f"{self.separation}."
                )

    def to_dict(self) -> dict[str, Any]:
        """Returns a JSON-able mapping; who was drawn by a sampler is a secret and not in it."""
        if self.keeps_sampling:
            return {"num_rounds": self.num_rounds, "keeps_sampling": True}
        return {
            "num_rounds": self.num_rounds,
            "num_clients": self.num_clients,
            "separation": self.separation,
            "largest_separation": self.largest_separation,
            "max_participations": self.max_participations,
            "keeps_sampling": self.keeps_sampling,
            **({} if self.conditions is None else {"conditions": self.conditions}),
            **({} if self.gap is None else {"ledger_gap": self.gap}),
        }

    def schema(self) -> Participation:
        """Returns the narrowest schema of these separations and number of participations."""
        if self.separation is None:
            return SingleParticipation()
        if self.separation == self.largest_separation:
            return FixedEpochOrder(self.max_participations, self.separation)
        return MinSeparation(self.separation, self.max_participations)


def observed_participation(
    rounds_of_clients: Iterable[Sequence[int] | IntArray], num_rounds: int
) -> ObservedParticipation:
    """Measures the participations that a ledger shows.

    Args:
      rounds_of_clients: For each client, the rounds that it took part in, from 0,
        increasing.
      num_rounds: The number of rounds that were released.

    Returns:
      The smallest and the largest separation, and the largest count.

    Raises:
      ValueError: If a client's rounds are not increasing or not among the rounds
        that were released: such a ledger cannot be trusted.
    """
    num_rounds = validation.integer_at_least(num_rounds, 0, "num_rounds")
    of_clients = [np.asarray(rounds, dtype=np.int64) for rounds in rounds_of_clients if len(rounds)]
    if not of_clients:
        return ObservedParticipation(num_rounds, 0, None, 0, largest_separation=None)
    # At once: a run may ask for hundreds of thousands of clients in every round.
    sizes = np.array([len(rounds) for rounds in of_clients])
    together = np.concatenate(of_clients)
    clients = np.repeat(np.arange(len(sizes)), sizes)
    is_out = (together < 0) | (together >= num_rounds)
    if np.any(is_out):
        rounds = of_clients[clients[np.argmax(is_out)]]
        raise ValueError(
            f"a client took part in rounds {rounds[0]} to {rounds[-1]}, counted from 0, and "
            f"{num_rounds} rounds were released: the ledger is broken."
        )
    is_of_one = clients[1:] == clients[:-1]
    separations = np.diff(together)[is_of_one]
    if np.any(separations <= 0):
        earlier = np.flatnonzero(is_of_one)[np.argmax(separations <= 0)]
        raise ValueError(
            f"a client took part in round {together[earlier]} and then in round "
            f"{together[earlier + 1]}, counted from 0: the ledger is broken."
        )
    return ObservedParticipation(
        num_rounds,
        len(of_clients),
        int(separations.min()) if len(separations) else None,
        int(sizes.max()),
        largest_separation=int(separations.max()) if len(separations) else None,
    )


def planned(
    factorization: Factorization,
    participation: Participation,
    noise_multiplier: float,
    delta: float,
    most: float | None = None,
) -> Guarantee:
    """Returns the guarantee of a run that keeps its participation schema.

    Args:
      factorization: What makes the noise.
      participation: The schema that the run will enforce.
      noise_multiplier: Relative to the sensitivity under that schema; zero for none.
      delta: Above 0 and below 1.
      most: The standard deviation of the noise that is drawn, in clip norms, where it may be less;
        None where it follows from the noise multiplier.

    Returns:
      The guarantee for all rounds of the factorization; its epsilon is infinite for so little
      noise that none is stated.

    Raises:
      ValueError: If the noise multiplier or delta is out of its range.
    """
    bound = catalogue.check_own(factorization).sensitivity(participation).value
    sigma = validation.non_negative_number(noise_multiplier, "noise_multiplier") * bound
    return claim.check(
        Claim(
            factorization.noise_recursion(),
            participation.as_schema(),
            sigma if most is None else min(sigma, most),
            delta,
        )
    )


def sampled(
    factorization: Factorization,
    scheme: SamplingScheme,
    noise_multiplier: float,
    delta: float,
    *,
    certification: Certification | None = None,
) -> Guarantee:
    """Returns the amplified guarantee of a run whose clients take part by a scheme.

    For schemes with groups it is that of BandMF Thm 4; for the others, Monte Carlo certifies it
    (``participation.monte_carlo``).

    Args:
      factorization: What makes the noise: lower triangular, of at most the scheme's bands.
      scheme: How every batch is drawn, for the rounds of the factorization.
      noise_multiplier: Relative to the largest column norm of C; zero for none.
      delta: At least 1e-12 and below 1.
      certification: How an epsilon is certified for schemes without groups; by default with seed
        0, cached for the user.

    Returns:
      The guarantee for all rounds.

    Raises:
      ValueError: If the theorem's hypotheses do not hold, see :func:`check_bands`; or an argument
        is out of its range.
    """
    scheme = accounted(scheme)
    _check_structure(catalogue.check_own(factorization), scheme)
    draws = scheme.as_draws()
    bound = factorization.sensitivity(SingleParticipation()).value
    columns = columns_of(factorization, scheme)
    certification = certification or default_certification()
    multiplier = validation.non_negative_number(noise_multiplier, "noise_multiplier")
    whole = Claim(
        factorization.noise_recursion(), draws, multiplier * bound, delta, columns=columns
    )
    if columns is not None:
        # What the kernel divides, so that a certificate is for the same number.
        multiplier = claim.check(whole).noise_multiplier
    found = scheme.amplified(multiplier, delta, columns, certification, DEFAULT_NUM_COORDINATES)
    return claim.check(dataclasses.replace(whole, certificate=found.certificate))


def default_certification(*, show_progress: bool = False) -> Certification:
    """Returns how epsilons are certified for schemes without groups: seed 0, in the user's cache.

    Args:
      show_progress: Whether to show progress bars on standard error.
    """
    return Certification(directory=caches.find(search.FOLDER), show_progress=show_progress)


def columns_of(factorization: Factorization, scheme: SamplingScheme) -> StrategyColumns | None:
    """Returns the columns of C that an amplified guarantee depends on, and what roundings move.

    Args:
      factorization: C, lower triangular of at most the scheme's bands. Of a tree, the columns are
        those of the square matrix whose inverse makes its rows of noise, and none is longer than
        those of C (``tree_aggregation``), which noise is scaled to.
      scheme: How clients take part.

    Returns:
      The columns, for schemes without groups; None for others.

    Raises:
      ValueError: If roundings move more than is accounted for.
    """
    if not scheme.depends_on_matrix:
        return None
    num_bands = factorization.streamed_bands() or factorization.num_rounds
    entries = columns_of_encoder(factorization.encode_streamed, factorization.num_rounds, num_bands)
    rounding = max(LARGEST_ROUNDING, _largest_rounding(factorization))
    if factorization.strategy_bands() is not None:
        return StrategyColumns(entries, rounding)
    norm = factorization.sensitivity(SingleParticipation()).value
    return StrategyColumns(entries, rounding, norm)


def check_bands(factorization: Factorization, scheme: SamplingScheme) -> None:
    """Raises ValueError unless C is lower triangular, of the scheme's rounds and at most its bands.

    Rows of noise must follow from the b - 1 rows of noise before as well, unless b is all rounds.
    Where they follow from earlier rows of Z, or from a state, the roundings of a participation stay
    in all later rows (``kernel.integer_rows``), not in b alone.

    Args:
      factorization: C.
      scheme: How clients take part.
    """
    _check_structure(factorization, scheme)
    if scheme.depends_on_matrix:
        _largest_rounding(factorization)


def _check_structure(factorization: Factorization, scheme: SamplingScheme) -> None:
    """Checks all that :func:`check_bands` does, except the size of roundings."""
    num_rounds = factorization.num_rounds
    if scheme.num_rounds != num_rounds:
        raise ValueError(
            f"the sampling scheme is for {scheme.num_rounds} rounds, and the factorization for "
            f"{num_rounds}."
        )
    if scheme.shares_rows:
        memory.check_rounds(num_rounds, _ARRAYS_OF_COLUMNS * 8 * num_rounds, "the columns of C")
    bands = (
        factorization.streamed_bands()
        if scheme.depends_on_matrix
        else factorization.strategy_bands()
    )
    if bands is None or bands > scheme.num_bands:
        found = "is not square and lower triangular" if bands is None else f"has {bands} bands"
        raise ValueError(
            f"the strategy matrix of {factorization.mechanism} {found}: amplification by sampling "
            f"needs a lower-triangular matrix of at most {scheme.num_bands} bands (BandMF Thm 4)."
        )
    recursion = factorization.noise_recursion()
    reaches_far = (
        recursion.draws_earlier_rows_of_z
        or recursion.num_state_vectors > 0
        or recursion.num_earlier_rows >= bands
    )
    if reaches_far and bands < num_rounds:
        raise ValueError(
            f"the noise of {factorization.mechanism} is made from rows of Z or of noise that lie "
            f"further back than its {bands} bands, and so would its roundings reach: for "
            "amplification by sampling, use a banded mechanism with bands for at most half of the "
            "rounds."
        )


def observed(
    plan: Guarantee, factorization: Factorization, participation: ObservedParticipation
) -> Guarantee:
    """Returns the guarantee that follows from the observed participations.

    Rows of C after the last released round were never released, so the sensitivity is
    that of the leading part of C. Unless a data sampler drew the participations, the guarantee
    holds only if they did not depend on released models or on data.

    Args:
      plan: What :func:`planned` or :func:`sampled` returned for the run; it fixes the noise.
      factorization: What made the noise.
      participation: The observed participations.

    Returns:
      The guarantee for the rounds that were released; epsilon 0 if there were none. With
      min-separation sampling and balls in bins it is that of all rounds.

    Raises:
      ValueError: If more rounds were released than the factorization has.
    """
    rounds = participation.num_rounds
    if rounds > factorization.num_rounds:
        raise ValueError(
            f"{rounds} rounds were released, and the factorization is for "
            f"{factorization.num_rounds}: the noise of some rounds cannot have come from it."
        )
    scheme = scheme_of(plan)
    if scheme is not None and participation.keeps_sampling and rounds >= 1:
        # Clients are drawn with the probability of the plan, however early the run ended; those
        # that were never drawn are covered too.
        first = dataclasses.replace(plan.claim, epsilon=None, num_rounds=rounds)
        fewer = scheme.of_first(rounds)
        # Else fewer rounds are post-processing of all. Another certificate would take minutes.
        if fewer is not None:
            first = dataclasses.replace(first, taking_part=fewer.as_draws())
        return claim.check(first)
    if participation.max_participations == 0:
        return claim.check(observed_claim(plan, Pattern(()), rounds))
    return claim.check(observed_claim(plan, participation.schema().as_schema(), rounds))


def of_first_rounds(plan: Guarantee, num_rounds: int) -> Guarantee:
    """Returns the guarantee of the first rounds of a plan, without amplification.

    Args:
      plan: The plan.
      num_rounds: The rounds that were released, at least 1.
    """
    return claim.check(dataclasses.replace(_without_draws(plan), num_rounds=num_rounds))


def _without_draws(plan: Guarantee) -> Claim:
    """The claim of a plan against an adversary who knows all draws."""
    return dataclasses.replace(
        plan.claim,
        taking_part=_schema_of(plan),
        epsilon=None,
        basis=None,
        columns=None,
        certificate=None,
    )


def worst_case(
    plan: Guarantee, factorization: Factorization, participation: ObservedParticipation
) -> Guarantee:
    """Returns the guarantee of a run that broke its plan, however it went on.

    It is for all rounds of the factorization, the smaller of the planned and the observed
    separation and the larger number of participations, without amplification. So it is never
    better than the planned one. It holds only if participation did not depend on released models
    or on data.

    Args:
      plan: What was planned; it fixes the noise.
      factorization: What made the noise.
      participation: The observed participations so far.

    Returns:
      The guarantee.
    """
    rounds = factorization.num_rounds
    schema = _schema_of(plan)
    planned_separation = rounds if schema == Schema(1, 1) else schema.separation
    most = max(schema.most_in(rounds), participation.max_participations, 1)
    widened = Schema(most, min(planned_separation, participation.separation or rounds))
    return claim.check(observed_claim(plan, widened, rounds))


def _schema_of(plan: Guarantee) -> Schema:
    """The schema of a plan; of all draws that a scheme may make."""
    taking_part = plan.claim.taking_part
    if isinstance(taking_part, (Pattern, Limit)):
        raise ValueError(f"a plan is for a schema or for draws, found {taking_part}.")
    return taking_part if isinstance(taking_part, Schema) else taking_part.schema


def observed_claim(plan: Guarantee, taking_part: Schema | Pattern, num_rounds: int) -> Claim:
    """Returns the claim that a ledger supports, of the noise of a plan.

    Args:
      plan: The plan.
      taking_part: The participation that the ledger shows.
      num_rounds: The rounds that were released.
    """
    return dataclasses.replace(
        _without_draws(plan), taking_part=taking_part, num_rounds=num_rounds, basis=Basis.LEDGER
    )


def keeps_plan(plan: Participation, participation: ObservedParticipation) -> bool:
    """Returns whether a schema or scheme allows the observed participations.

    Args:
      plan: The schema, or the scheme of a data sampler.
      participation: The observed participations. Of a scheme, their ``keeps_sampling`` says it.
    """
    if plan.is_sampled:
        return participation.keeps_sampling is True
    return plan.as_schema().allows_separations(
        participation.max_participations, participation.separation, participation.largest_separation
    )


def num_outside_schema(plan: Participation, participations: IntArray, separations: IntArray) -> int:
    """Returns how many clients took part in rounds that a schema forbids.

    Args:
      plan: The schema.
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
    schema = plan.as_schema()
    return sum(
        int(number)
        for pattern, number in zip(patterns.T.tolist(), clients, strict=True)
        if not schema.allows_separations(*pattern)
    )


def _largest_rounding(factorization: Factorization) -> float:
    """By how many steps of Z roundings that depend on one client move a number of a row, at most.

    Raises:
      ValueError: If that is not much less than the noise.
    """
    if factorization in _ROUNDINGS:
        return _ROUNDINGS[factorization]
    moved = integer_rows.largest_rounding(factorization.noise_recursion())
    # Written so that NaN does not pass.
    if not moved <= _MOST_ROUNDING:
        raise ValueError(
            f"the noise of {factorization.mechanism} may be rounded by {moved:.2g} steps, and at "
            f"most {_MOST_ROUNDING:g} are accounted for where clients draw for themselves: use a "
            "banded mechanism, or a matrix that is better conditioned."
        )
    _ROUNDINGS[factorization] = moved
    return moved


def _finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None
