"""Claims of differential privacy, and :func:`check`, the only maker of a guarantee.

A claim says how much noise is drawn, how its rows follow from one another, and in which rounds one
client may take part. It holds numbers and arrays alone. :func:`check` believes nothing else: it
computes C from the rows, bounds its sensitivity, takes what the drawn noise costs off delta, and
returns the epsilon that follows, with the assumptions that it rests on.

Noise is absolute in a claim: sigma is the standard deviation of Z in units of the largest L2 norm
of the vector that a client adds to a round. The noise multiplier that users type and read is sigma
over the sensitivity of C. Adjacency is zero-out: neighbouring data sets differ in one client, whose
contributions are replaced by zero vectors in every round that it takes part in.

Python lets code reach into any object: ``object.__setattr__`` makes a false guarantee, as writing
its text by hand does. What is refused here are all other ways: constructors, copies with changed
attributes, subclasses and pickles. A process that needs a guarantee of another one sends its claim.
"""

import dataclasses
import enum
import itertools
import math
from collections.abc import Mapping
from typing import NoReturn, TypeAlias, TypeVar, final

from mf_aggregators.kernel import losses, numbers, sensitivity
from mf_aggregators.kernel.certificate import Certificate, check_certificate
from mf_aggregators.kernel.losses import Draws, InGroups, SampledRun, StrategyColumns
from mf_aggregators.kernel.numbers import NotProved
from mf_aggregators.kernel.rows import NoiseRecursion, check_rounds
from mf_aggregators.kernel.sensitivity import Schema, Sensitivity, Unit

# Relative tolerance for a claimed epsilon, which may have lost digits in a file.
_ROUNDING = 1e-9
# The largest relative excess of an epsilon that a statement gives over the epsilon that is proved.
_SLACK_OF_STATEMENTS = 1e-5
# Errors of C up to this share of the sensitivity are not charged: the drawn noise is larger than
# sigma by a share of 3e-8 (``kernel.integers``), which covers them. A Gaussian epsilon is also
# rounded up by 1e-11 of itself; rho is not.
_NEGLIGIBLE = 1e-12
# The largest error of C, relative to its largest column norm, with which a certificate is accepted.
# A certificate does not charge for this error, which is covered because the drawn noise is larger
# than sigma by a share of 3e-8 (``integers``).
_LARGEST_ERROR_OF_COLUMNS = 1e-8


class Assumption(enum.Enum):
    """A condition of a guarantee that no computation shows; its enum value is its name in JSON."""

    PARTICIPATION = "clients_keep_participation"
    SECRET_DRAWS = "draws_are_secret"
    COMPLETE_LEDGER = "ledger_is_complete"
    INDEPENDENCE = "participation_independent_of_releases"
    PEOPLE = "all_clients_of_a_person_are_counted"
    STOPPING_RULE = "run_ends_by_rule"
    SERVER = "server_sums_and_keeps_seed"
    RANDOMNESS = "randomness_is_good"

    @property
    def sentence(self) -> str:
        """The condition as a sentence."""
        return _SENTENCES[self]


_SENTENCES = {
    Assumption.PARTICIPATION: "Every client keeps to the stated participation.",
    Assumption.SECRET_DRAWS: "Clients are drawn as stated, and nobody learns which ones.",
    Assumption.COMPLETE_LEDGER: "The ledger has every participation of every client.",
    Assumption.INDEPENDENCE: "Participation did not depend on released models or on data.",
    Assumption.PEOPLE: "No person has other clients than those that are counted.",
    Assumption.STOPPING_RULE: "The server releases no round that the stopping rule forbids.",
    Assumption.SERVER: (
        "The server adds this library's noise to the sum of clipped updates and keeps its seed."
    ),
    Assumption.RANDOMNESS: "The seed of the noise comes from a good source of randomness.",
}


# The condition of a guarantee that follows from a ledger, worded as the end of a sentence.
ONLY_IF = "only if participation did not depend on released models or on data"


class Basis(enum.Enum):
    """The reason why participation is as claimed; its value is the assumptions it rests on."""

    PLAN = (Assumption.PARTICIPATION,)
    DRAWS = (Assumption.SECRET_DRAWS,)
    LEDGER = (Assumption.COMPLETE_LEDGER, Assumption.INDEPENDENCE)
    PEOPLE = (Assumption.COMPLETE_LEDGER, Assumption.INDEPENDENCE, Assumption.PEOPLE)
    RULE = (Assumption.COMPLETE_LEDGER, Assumption.STOPPING_RULE)


@final
@dataclasses.dataclass(frozen=True)
class Pattern:
    """The rounds of one client, or of all clients of one person, for a guarantee of these alone.

    Attributes:
      rounds: The rounds, counted from 0, never decreasing: a round appears once for each client of
        the person that takes part in it.
    """

    rounds: tuple[int, ...]

    def __str__(self) -> str:
        rounds = ", ".join(str(i) for i in self.rounds)
        return f"participation in rounds {rounds}" if self.rounds else "no participation"

    def __post_init__(self) -> None:
        rounds = tuple(numbers.non_negative_integer(i, "each of rounds") for i in self.rounds)
        if any(later < earlier for earlier, later in itertools.pairwise(rounds)):
            raise ValueError(f"rounds must not decrease, found {numbers.shown(rounds)}.")
        object.__setattr__(self, "rounds", rounds)


@final
@dataclasses.dataclass(frozen=True)
class Limit:
    """Any participation for which the sensitivity of the released rounds is within a bound.

    Attributes:
      sensitivity: The bound, above 0, in units of C.
    """

    sensitivity: float

    def __post_init__(self) -> None:
        numbers.set_checked(self, sensitivity=numbers.positive_number)


# How clients take part: any client or a larger unit by a schema, one client by its rounds, any
# participation within a limit, or clients that are drawn.
TakingPart: TypeAlias = Schema | Unit | Pattern | Limit | Draws
_BASES: Mapping[type, tuple[Basis, ...]] = {
    Schema: (Basis.PLAN, Basis.LEDGER),
    Unit: (Basis.PLAN,),
    Pattern: (Basis.LEDGER, Basis.PEOPLE),
    Limit: (Basis.RULE,),
}


@final
@dataclasses.dataclass(frozen=True, eq=False)
class Claim:
    """The claim that a run with noise of a given size is (epsilon, delta)-DP.

    Attributes:
      rows: How the rows of noise C^-1 Z follow from Z, in one of the kernel's own classes.
      taking_part: In which rounds one client takes part, or how clients are drawn.
      sigma: The standard deviation of Z, at least 0, in units of the clip norm.
      delta: Above 0 and below 1.
      epsilon: The claimed epsilon; None to take the one that is proved.
      num_rounds: How many rows were or will be released; None for all.
      basis: The reason why participation is as claimed; None for a plan, or for draws.
      num_coordinates: The most numbers that are drawn in all rounds together: parameters times
        rounds.
      certificate: A proof by Monte Carlo of an epsilon of clients who draw their rounds for
        themselves; None for none.

    Raises:
      TypeError: If an attribute is of another type, or the basis does not fit the participation.
      ValueError: If a number is out of its range.
    """

    rows: NoiseRecursion
    taking_part: TakingPart
    sigma: float
    delta: float
    epsilon: float | None = None
    num_rounds: int | None = None
    basis: Basis | None = None
    num_coordinates: int = sensitivity.DEFAULT_NUM_COORDINATES
    certificate: Certificate | None = None

    def __post_init__(self) -> None:
        kind = type(self.taking_part)
        possible = _BASES.get(kind, (Basis.DRAWS,))
        basis = possible[0] if self.basis is None else self.basis
        if basis not in possible:
            raise TypeError(f"a claim of {kind.__name__} cannot rest on {basis!r}.")
        object.__setattr__(self, "basis", basis)
        if isinstance(self.taking_part, Pattern) and basis is not Basis.PEOPLE:
            rounds = self.taking_part.rounds
            if len(set(rounds)) < len(rounds):
                found = numbers.shown(rounds)
                raise ValueError(f"{found} are those of several clients: use the basis PEOPLE.")
        if kind not in _BASES:
            # This refuses draws of other classes than those of the kernel.
            draws = losses.checked_draws(self.taking_part)  # type: ignore[type-var]
            object.__setattr__(self, "taking_part", draws)
        elif self.certificate is not None:
            raise TypeError("a certificate belongs to clients who draw their rounds.")
        # A guarantee before the first round is for no client and no rounds: nothing was released.
        is_of_nobody = self.taking_part == Pattern(())
        numbers.set_checked(
            self,
            sigma=numbers.non_negative_number,
            delta=numbers.delta,
            epsilon=numbers.epsilon,
            num_coordinates=numbers.positive_integer,
            num_rounds=numbers.non_negative_integer if is_of_nobody else numbers.positive_integer,
        )

    @property
    def noise_digest(self) -> bytes:
        """Returns 32 bytes that identify the noise: rows and sigma, bit for bit, and nothing else.

        Claims of the first rounds of a run, of one client, or of an observed schema are about the
        noise of the whole run, and have its digest.
        """
        return self.rows.fingerprint([self.sigma])


_Kind = TypeVar("_Kind", bound="Sealed")


class Sealed:
    """Base class of values that only the kernel makes: no subclasses, changes or pickles."""

    __slots__ = ()

    def __new__(cls: type[_Kind], *arguments: object, **options: object) -> _Kind:
        """Raises TypeError, because only the kernel makes a value of this class."""
        raise TypeError(f"only the kernel makes a {cls.__name__}, from a claim.")

    def __init_subclass__(cls) -> None:
        if cls.__bases__ != (Sealed,):
            raise TypeError(f"{cls.__bases__[0].__name__} has no subclasses.")

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"{name} of a {type(self).__name__} cannot be set.")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"{name} of a {type(self).__name__} cannot be deleted.")

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} is not pickled: send its claim, and check that again."
        )

    def __copy__(self: _Kind) -> _Kind:
        return self

    def __deepcopy__(self: _Kind, memo: object) -> _Kind:
        return self


def made(kind: type[_Kind], values: Mapping[str, object]) -> _Kind:
    """Returns an object of a sealed class, made of values that the caller has proved or computed.

    Args:
      kind: The sealed class.
      values: The attributes of the object by name.
    """
    found = object.__new__(kind)
    for name, value in values.items():
        object.__setattr__(found, name, value)
    return found


@final
@dataclasses.dataclass(init=False, repr=False, slots=True, eq=False)
class Guarantee(Sealed):
    """A proved claim: (epsilon, delta)-DP under zero-out adjacency, for each client.

    :func:`check` alone makes a guarantee. Two guarantees are equal if their numbers are, and the
    ways in which clients take part.

    Attributes:
      claim: The claim, with the proved epsilon and the number of released rounds.
      sensitivity: The sensitivity of C under the claim; its largest column norm if clients are
        drawn.
      noise_multiplier: sigma over the sensitivity.
      epsilon: The epsilon; infinity if there is too little noise for any.
      delta: The delta that epsilon is for.
      rho: The rho of (rho, delta0)-approximate zCDP of all participations of a client, without
        amplification; infinity if there is too little noise.
      zcdp_delta: The delta0 of this zCDP; 0 if rho is 0 or infinite.
      run: The run with drawn clients, at the noise multiplier; None where nobody is drawn.
      assumptions: What the guarantee rests on.
    """

    claim: Claim
    sensitivity: Sensitivity
    noise_multiplier: float
    epsilon: float
    delta: float
    rho: float
    zcdp_delta: float
    run: SampledRun | None
    assumptions: tuple[Assumption, ...]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Guarantee) and self._values() == other._values()

    def __hash__(self) -> int:
        return hash(self._values())

    def _values(self) -> tuple[object, ...]:
        how = self.claim.taking_part, self.claim.basis, self.claim.num_rounds, self.assumptions
        sizes = self.sensitivity.value, self.noise_multiplier, self.epsilon, self.delta
        return (*how, *sizes)

    def __repr__(self) -> str:
        return f"<({self.epsilon!r}, {self.delta!r})-DP of {self.claim.taking_part!r}>"

    def __str__(self) -> str:
        taking_part = self.claim.taking_part
        who = taking_part.who if isinstance(taking_part, Unit) else "each client"
        stated = f"{numbers.stated_pair(self.epsilon, self.delta)} for {who}"
        ifs = " ".join(each.sentence for each in self.assumptions)
        if self.is_by_rule:
            return f"{stated}, by a stopping rule\nif: {ifs}"
        rounds = numbers.counted(self.num_rounds, "round")
        secret = ", if nobody learns who was drawn" if self.is_amplified else ""
        only_if = f", {ONLY_IF}" if self.is_observed else ""
        return f"{stated} over {rounds}: {taking_part}{secret}{only_if}\nif: {ifs}"

    @property
    def sigma(self) -> float:
        """The standard deviation of Z, in units of the clip norm."""
        return self.claim.sigma

    @property
    def noise_digest(self) -> bytes:
        """The 32 bytes that identify the noise of the releases that the guarantee is about."""
        return self.claim.noise_digest

    @property
    def num_rounds(self) -> int:
        """The number of rounds that were released, or will be, under the guarantee."""
        return self.claim.num_rounds or 0

    @property
    def is_amplified(self) -> bool:
        """Whether the guarantee rests on secret draws of clients."""
        return Assumption.SECRET_DRAWS in self.assumptions

    @property
    def is_observed(self) -> bool:
        """Whether the guarantee needs participation that did not depend on releases or data."""
        return Assumption.INDEPENDENCE in self.assumptions

    @property
    def is_by_rule(self) -> bool:
        """Whether the guarantee holds because a stopping rule ends the run."""
        return Assumption.STOPPING_RULE in self.assumptions

    def at(self, delta: float, sigma: float | None = None) -> "Guarantee":
        """Returns the guarantee of the same run at another delta or sigma, without a certificate.

        If clients keep to a schema, the sensitivity that was proved is used again: rows and schema
        do not change.

        Args:
          delta: Above 0 and below 1.
          sigma: At least 0, in the unit of ``Claim.sigma``; None for that of the run.

        Raises:
          ValueError: If one is out of its range.
        """
        sized = self.claim if sigma is None else dataclasses.replace(self.claim, sigma=sigma)
        claim = dataclasses.replace(sized, epsilon=None, certificate=None, delta=delta)
        if isinstance(claim.taking_part, Schema):
            return _proved(claim, self.sensitivity, None)
        return check(claim)

    @property
    def schema(self) -> Schema:
        """The schema that clients keep to: that of a plan, or of all draws that a scheme may make.

        Raises:
          ValueError: If the guarantee is for another unit, for the rounds of one client, or by a
            rule.
        """
        taking_part = self.claim.taking_part
        if isinstance(taking_part, Unit | Pattern | Limit):
            raise ValueError(f"a plan is for a schema or for draws, found {taking_part!r}.")
        return taking_part if isinstance(taking_part, Schema) else taking_part.schema

    def without_draws(self, **changes: object) -> Claim:
        """Returns the claim of the same run against an adversary who knows all draws of clients.

        Args:
          **changes: Attributes of the claim to change: ``num_rounds`` of a run that ended early, or
            ``taking_part`` and ``basis`` for an observed ledger or for another unit.
        """
        without = {"taking_part": self.schema, "basis": None, "epsilon": None, "certificate": None}
        return Claim(**(vars(self.claim) | without | changes))

    def prove(self, epsilon: float | None) -> None:
        """Proves an epsilon that a statement gives for this run, at the guarantee's delta.

        Args:
          epsilon: The epsilon of the statement; None if it gives none, because there is too little
            noise.

        Raises:
          NotProved: If the stated epsilon is below the proved one, or more than 1e-5 of that above
            it, which means that the statement is about another run.
        """
        stated = math.inf if epsilon is None else numbers.epsilon(epsilon)
        check(dataclasses.replace(self.claim, epsilon=stated))
        if stated > self.epsilon * (1.0 + _SLACK_OF_STATEMENTS):
            proved = f"{self.epsilon!r} is proved at delta {self.delta!r}"
            raise NotProved(f"epsilon {stated!r} is claimed, and {proved}: it is of another run.")


def claim_of(given: Claim | Guarantee) -> Claim:
    """Returns the given claim, or the claim of the given guarantee.

    Args:
      given: The claim, or the guarantee. The claim is made anew, so that its constructor checks its
        numbers.

    Raises:
      TypeError: If the argument is neither a claim nor a guarantee.
    """
    claim = given.claim if type(given) is Guarantee else given
    if type(claim) is not Claim:
        raise TypeError(f"a Claim is needed, found {numbers.shown(claim)}.")
    return dataclasses.replace(claim)


def check(claim: Claim) -> Guarantee:
    """Proves a claim of differential privacy, and returns the guarantee.

    Args:
      claim: The claim that is to be proved.

    Returns:
      The guarantee, with the epsilon that was proved: infinity if there is too little noise for
      any and none is claimed.

    Raises:
      NotProved: If the claimed epsilon is smaller than the proved one, the rows are of a class that
        is not the kernel's, their C is not known, or the draws do not fit the rows. It is a
        ValueError.
      TypeError: If the argument is not a claim.
    """
    claim = claim_of(claim)
    rows, taking_part = claim.rows, claim.taking_part
    check_rounds(rows, claim.num_rounds or 0)
    rounds = rows.num_rounds if claim.num_rounds is None else claim.num_rounds
    run = None
    if isinstance(taking_part, Schema | Unit):
        bound = sensitivity.of_rows(rows, rounds, taking_part)
    elif taking_part == Pattern(()):
        bound = Sensitivity(0.0, is_exact=True, theorem="nobody took part")
    elif isinstance(taking_part, Pattern):
        bound = sensitivity.of_pattern(rows, rounds, taking_part.rounds)
    elif isinstance(taking_part, Limit):
        bound = Sensitivity(taking_part.sensitivity, is_exact=False, theorem="stopping rule")
    else:
        bound, columns = _bound_of_draws(rows, taking_part, rounds)
        run = SampledRun(taking_part, claim.sigma / bound.value, columns)
    return _proved(dataclasses.replace(claim, num_rounds=rounds), bound, run)


def _proved(claim: Claim, bound: Sensitivity, run: SampledRun | None) -> Guarantee:
    """Proves a claim from a known bound of its sensitivity, or raises NotProved."""
    taking_part = claim.taking_part
    # If a client never takes part, the released sums do not depend on it.
    multiplier = claim.sigma / bound.value if bound.value else math.inf
    # An error of the computed C lowers the noise multiplier that epsilon is computed for, but not
    # the one that is shown.
    left = multiplier
    if bound.error > _NEGLIGIBLE * bound.value:
        left = claim.sigma / (bound.value + bound.error)
    proved = _epsilon(claim, run, left)
    if claim.epsilon is not None and not proved <= claim.epsilon * (1.0 + _ROUNDING):
        claimed = f"epsilon {claim.epsilon!r} at delta {claim.delta!r}"
        raise NotProved(f"{claimed} is claimed, and {proved!r} is proved: use more noise.")
    has_several = isinstance(taking_part, Unit) and taking_part.num_clients > 1
    people = (Assumption.PEOPLE,) * has_several
    needed: tuple[Assumption, ...] = claim.basis.value if claim.basis else ()
    values = {
        "claim": dataclasses.replace(claim, epsilon=proved),
        "sensitivity": bound,
        "noise_multiplier": multiplier,
        "epsilon": proved,
        "delta": claim.delta,
        **_zcdp(claim, run, left),
        "run": run,
        "assumptions": (*needed, *people, Assumption.SERVER, Assumption.RANDOMNESS),
    }
    return made(Guarantee, values)


def _bound_of_draws(
    rows: NoiseRecursion, draws: Draws, num_rounds: int
) -> tuple[Sensitivity, StrategyColumns | None]:
    """Returns the largest column norm of C, if its rounds and bands fit the draws (BandMF Thm 4).

    If clients draw for themselves, also returns C with the roundings of its rows.
    """
    if draws.num_rounds < num_rounds:
        raise NotProved(f"clients are drawn for {draws.num_rounds} rounds, not {num_rounds}.")
    has_groups = isinstance(draws, InGroups)
    if not has_groups:
        # A certificate is for all rounds. The epsilon of fewer rounds is computed from the same C.
        num_rounds = draws.num_rounds
    bound = sensitivity.of_rows(rows, num_rounds, Schema(1, 1))
    # The entries of a column of C, and the roundings of a row, reach at most this number of rows.
    reach = min(rows.reach, num_rounds)
    if reach > draws.num_bands:
        most = f"at most {draws.num_bands} (BandMF Thm 4)"
        raise NotProved(f"rows of noise reach over {reach} rows, and these draws need {most}.")
    if has_groups:
        return bound, None
    if not bound.error <= _LARGEST_ERROR_OF_COLUMNS * bound.value:
        raise NotProved("C is too inexact for a certificate: its rows are nearly singular.")
    return bound, StrategyColumns.of(rows, num_rounds)


def _epsilon(claim: Claim, run: SampledRun | None, left: float) -> float:
    """Returns the epsilon at the noise multiplier that is left after the error of C is charged."""
    delta, coordinates, proved = claim.delta, claim.num_coordinates, math.inf
    if left == math.inf:
        return 0.0
    try:
        if run is None:
            return sensitivity.epsilon(left, delta, num_coordinates=coordinates)
        if claim.certificate is not None:
            if not check_certificate(claim.certificate, run, delta, coordinates):
                raise NotProved("the certificate does not prove its epsilon.")
            proved = claim.certificate.epsilon
        return min(dataclasses.replace(run, sigma=left).epsilon(delta, coordinates), proved)
    except sensitivity.TailError:
        return math.inf


def _zcdp(claim: Claim, run: SampledRun | None, left: float) -> dict[str, float]:
    """Returns rho and delta0 of approximate zCDP, against an adversary who knows all draws."""
    if left == math.inf:
        return {"rho": 0.0, "zcdp_delta": 0.0}
    norm, disjoint = (1.0, 1) if run is None else (run.norm_of_all, run.disjoint_participations)
    given = {"num_coordinates": claim.num_coordinates, "disjoint_participations": disjoint}
    multiplier = left / norm
    try:
        delta = sensitivity.zcdp_delta(multiplier, **given)
        return {"rho": sensitivity.zcdp_rho(multiplier), "zcdp_delta": delta}
    except sensitivity.TailError:
        return {"rho": math.inf, "zcdp_delta": 0.0}
