"""Participation schemas, and the interface that they share with sampling schemes.

Timers and fixed orders name sets of rounds in which one client may take part, however they come
about. A sampling scheme is a random rule by which clients take part, and amplifies a guarantee
towards whoever does not know the draws (``schemes``).

One convention holds throughout (BandMF, Def. 1): a separation of b means that any two
participations i, j of one client satisfy ``|i - j| >= b``, so that b = 1 allows every round.
Earlier DP-FTRL texts count the rounds strictly between two participations, which is b - 1.
"""

import abc
import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from mf_aggregators.kernel import numbers
from mf_aggregators.kernel.schemas import Schema


@dataclasses.dataclass(frozen=True)
class Participation(abc.ABC):
    """A participation schema: in which sets of rounds one client may take part.

    Sampling schemes are schemas as well, of the sets of rounds that they may draw.

    Attributes:
      name: The kind's name in JSON and in flags.
      is_sampled: Whether clients take part by a random rule, so that the guarantee is amplified.
      is_evenly_spaced: Whether adjacent participations are exactly ``separation`` rounds apart.
    """

    name: ClassVar[str]
    is_sampled: ClassVar[bool] = False
    is_evenly_spaced: ClassVar[bool] = False

    @abc.abstractmethod
    def as_schema(self) -> Schema:
        """Returns the schema as numbers, for the kernel."""

    def __str__(self) -> str:
        return str(self.as_schema())

    @property
    def limit(self) -> int | None:
        """The most participations that the schema names; None for as many as fit."""
        return self.as_schema().most

    def separation_in(self, num_rounds: int) -> int:
        """Returns the least distance b of two participations; n where no client returns.

        Args:
          num_rounds: The number of rounds n.
        """
        num_rounds = numbers.positive_integer(num_rounds, "num_rounds")
        schema = self.as_schema()
        return num_rounds if schema == Schema(1, 1) else schema.separation

    def most_participations(self, num_rounds: int) -> int:
        """Returns the most rounds of ``num_rounds`` that one client can take part in.

        Args:
          num_rounds: The number of rounds n.
        """
        return self.as_schema().most_in(num_rounds)

    def allows(self, narrower: "Participation", num_rounds: int) -> bool:
        """Returns whether clients who keep to another schema keep to this one, too.

        Args:
          narrower: The schema that clients keep to.
          num_rounds: n; only participations in these rounds count.

        Raises:
          TypeError: If ``narrower`` is no schema.
          ValueError: If ``num_rounds`` is not a positive integer.
        """
        return self.as_schema().allows(check(narrower).as_schema(), num_rounds)

    def factorize_flags(self) -> str:
        """Returns the flags that name the schema to ``mf-factorize`` and ``mf-report``."""
        return f"--participation={self.name}"

    def run_flags(self) -> Mapping[str, int | str | None] | None:
        """Returns flags of commands that train, by name; None where these cannot enforce it."""
        return None

    def condition(self, sampler: str | None = None) -> str:
        """Returns who has to do what for the guarantee to hold, after "only if".

        Args:
          sampler: For a sampling scheme, the Python expression of the sampler.
        """
        del sampler
        return (
            f"timers enforce {self} on every device: that is yours to do (docs/devices.md says "
            "how)."
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns a JSON-able mapping that ``participation.from_dict`` takes back."""
        return {"schema": self.name, **dataclasses.asdict(self)}


@dataclasses.dataclass(frozen=True)
class SingleParticipation(Participation):
    """Each client takes part in at most one round."""

    name: ClassVar[str] = "single"

    def as_schema(self) -> Schema:
        """Returns the schema as numbers, for the kernel."""
        return Schema(1, 1)

    def run_flags(self) -> Mapping[str, int | str | None]:
        """Returns the flags of timers that let each client take part once, by name."""
        return {"max_participations": 1}


@dataclasses.dataclass(frozen=True)
class FixedEpochOrder(Participation):
    """(k, b)-participation: at most k participations, adjacent ones exactly b rounds apart.

    The schema of a data centre that goes through its data in one fixed order, once
    an epoch (Choquette-Choo et al., Multi-epoch MF; BandMF Sec. 2).

    Attributes:
      epochs: The most participations k, at least 1.
      separation: The rounds b between adjacent participations, at least 1.

    Raises:
      ValueError: If an attribute is not a positive integer.
    """

    epochs: int
    separation: int

    name: ClassVar[str] = "fixed_epoch"
    is_evenly_spaced: ClassVar[bool] = True

    def __post_init__(self) -> None:
        numbers.set_positive_integers(self, "epochs", "separation")

    def as_schema(self) -> Schema:
        """Returns the schema as numbers, for the kernel."""
        return Schema(self.epochs, self.separation, is_even=True)

    def factorize_flags(self) -> str:
        """Returns the flags that name the schema to ``mf-factorize`` and ``mf-report``."""
        return (
            f"{super().factorize_flags()} --separation={self.separation} "
            f"--max_participations={self.epochs}"
        )

    def condition(self, sampler: str | None = None) -> str:
        """Returns who has to go through all clients, after "only if"."""
        del sampler
        times = "once" if self.epochs == 1 else f"{self.epochs} times at most"
        return (
            "a data centre goes through all clients in one fixed order of "
            f"{self.separation} batches, each client in one of them, {times}: batch i + "
            f"{self.separation} has the clients of batch i. No draw has to be secret. A random "
            "order, or devices that decide themselves when they take part, have a weaker guarantee."
        )


@dataclasses.dataclass(frozen=True)
class MinSeparation(Participation):
    """b-min-sep-participation: any two participations at least b rounds apart (BandMF, Def. 1).

    The schema that a timer on each device enforces.

    Attributes:
      separation: The least distance b of two participations: rounds i and j of one client
        satisfy |i - j| >= b. 1 allows every round.
      max_participations: The most participations k of one client; None for as many
        as fit into the rounds.

    Raises:
      ValueError: If an attribute is not a positive integer.
    """

    separation: int
    max_participations: int | None = None

    name: ClassVar[str] = "min_sep"

    def __post_init__(self) -> None:
        numbers.set_positive_integers(self, "separation")
        if self.max_participations is not None:
            numbers.set_positive_integers(self, "max_participations")

    def as_schema(self) -> Schema:
        """Returns the schema as numbers, for the kernel."""
        return Schema(self.max_participations, self.separation)

    def factorize_flags(self) -> str:
        """Returns the flags that name the schema to ``mf-factorize`` and ``mf-report``."""
        limit = self.max_participations
        most = "" if limit is None else f" --max_participations={limit}"
        return f"{super().factorize_flags()} --separation={self.separation}{most}"

    def run_flags(self) -> Mapping[str, int | str | None]:
        """Returns the flags of the timers, by name."""
        return {"separation": self.separation, "max_participations": self.max_participations}


_SCHEMAS: Mapping[str, type[Participation]] = MappingProxyType(
    {
        SingleParticipation.name: SingleParticipation,
        FixedEpochOrder.name: FixedEpochOrder,
        MinSeparation.name: MinSeparation,
    }
)


def of_schema(schema: Schema) -> Participation:
    """Returns the participation that ``as_schema`` has turned into numbers.

    Args:
      schema: The numbers; of (k, b)-participation they name the most participations.
    """
    if schema == Schema(1, 1):
        return SingleParticipation()
    if schema.is_even:
        assert schema.most is not None
        return FixedEpochOrder(schema.most, schema.separation)
    return MinSeparation(schema.separation, schema.most)


def check(participation: Any) -> Participation:
    """Returns a copy of a schema without sampling, made anew from its fields.

    Args:
      participation: What was given for a schema.

    Raises:
      TypeError: If it is of another class than these three.
    """
    if type(participation) not in (SingleParticipation, FixedEpochOrder, MinSeparation):
        raise TypeError(
            "participation must be a SingleParticipation, FixedEpochOrder or MinSeparation "
            f"of mf_aggregators.participation, found {numbers.shown(participation)}."
        )
    found: Participation = dataclasses.replace(participation)
    return found


def check_fits(participation: Any, num_rounds: int) -> Participation:
    """Returns ``participation`` if all participations that it names fit into the rounds.

    What optimises for a schema asks for this: a matrix for participations that cannot
    take place is for another number of rounds than its user has in mind.

    Args:
      participation: A schema.
      num_rounds: n.

    Returns:
      The schema.

    Raises:
      TypeError: If it is no schema.
      ValueError: If it names more participations than fit.
    """
    schema = check(participation)
    separation = schema.separation_in(num_rounds)
    fitting, limit = math.ceil(num_rounds / separation), schema.limit
    if limit is not None and limit > fitting:
        raise ValueError(
            f"{limit} participations {separation} rounds apart need "
            f"{(limit - 1) * separation + 1} rounds, and there are {num_rounds}: "
            f"at most {fitting} fit."
        )
    return schema


def from_dict(description: Mapping[str, Any]) -> Participation:
    """Returns the schema that ``Participation.to_dict`` described.

    Args:
      description: A mapping with ``schema`` (``single``, ``fixed_epoch`` or
        ``min_sep``) and that schema's attributes.

    Returns:
      The schema.

    Raises:
      ValueError: If the description names no schema, or its attributes are not
        those of the schema.
    """
    attributes = dict(description)
    name = attributes.pop("schema", None)
    if name not in _SCHEMAS:
        raise ValueError(
            f"a participation schema must be one of {', '.join(_SCHEMAS)}, found {name!r}."
        )
    try:
        return _SCHEMAS[name](**attributes)
    except TypeError as error:
        raise ValueError(f"participation schema {name}: {error}.") from None


def check_extended(earlier: Mapping[int, Participation], whole: Participation) -> None:
    """Checks that each horizon of an extended run allows all participations of the one before.

    Then the extended horizon allows whatever clients did who kept the timer in force in each round:
    a timer looks at all earlier rounds of its client, so that by induction over the horizons, these
    and the next one together keep the schema of the horizon that the round belongs to.

    Args:
      earlier: The schema of each horizon that was extended, by its number of rounds.
      whole: The schema of the extended horizon.

    Raises:
      TypeError: If one of them is no schema.
      ValueError: If a horizon forbids what the one before it allowed, so that the run may have
        broken it already; or a number of rounds is not a positive integer.
    """
    schemas = [*sorted(earlier.items()), (None, check(whole))]
    for (num_rounds, before), (following, after) in itertools.pairwise(schemas):
        assert num_rounds is not None
        if not check(after).allows(before, num_rounds):
            name = "extended horizon" if following is None else f"horizon of {following} rounds"
            raise ValueError(
                f"the horizon of {num_rounds} rounds allows {before}, and the {name} {after}: what "
                f"took place already may be more than the {name} allows. Keep the separation, and "
                "at least as many participations."
            )


def check_population(
    participation: Participation, num_rounds: int, population: int, clients_per_round: int
) -> None:
    """Checks that a population can fill the rounds under participation timers.

    A client that took part in one of the last ``separation - 1`` rounds, or as often as it
    may, cannot join. In the worst case all places of those rounds went to different
    clients, so a round is certain to be filled if the clients outnumber ``separation``
    cohorts; and n cohorts need as many places as clients have participations. With as many
    participations as fit this is sufficient; with fewer, a late round may still find too
    few clients.

    Args:
      participation: The schema that the timers enforce.
      num_rounds: n.
      population: The number of clients m.
      clients_per_round: The cohort size B.

    Raises:
      ValueError: If some round cannot be filled whoever is drawn.
    """
    most = check(participation).most_participations(num_rounds)
    separation = participation.separation_in(num_rounds)
    within_timer = min(separation, num_rounds)
    if within_timer * clients_per_round > population:
        raise ValueError(
            f"{population} clients cannot fill rounds of {clients_per_round} with participations "
            f"{separation} rounds apart: {within_timer * clients_per_round} would be needed. Use "
            f"at most {max(1, population // within_timer)} clients per round or a separation of at "
            f"most {max(1, population // clients_per_round)}."
        )
    if num_rounds * clients_per_round > population * most:
        raise ValueError(
            f"{num_rounds} rounds of {clients_per_round} clients need "
            f"{num_rounds * clients_per_round} participations, and {population} clients of at "
            f"most {most} each have {population * most}. Use fewer rounds, fewer clients per "
            "round or more participations per client."
        )


def smallest_population(
    participation: Participation, num_rounds: int, clients_per_round: int
) -> int:
    """Returns the fewest clients that :func:`check_population` accepts.

    Args:
      participation: The schema that the timers enforce.
      num_rounds: n.
      clients_per_round: The cohort size B.
    """
    most = check(participation).most_participations(num_rounds)
    within_timers = min(participation.separation_in(num_rounds), num_rounds) * clients_per_round
    return max(within_timers, -(-num_rounds * clients_per_round // most))


def maximal_patterns(schema: Schema, num_rounds: int) -> Iterator[tuple[int, ...]]:
    """Yields the patterns to which no round can be added, in ascending order of rounds.

    Every pattern of the schema is a subset of one of them.

    Args:
      schema: The schema.
      num_rounds: n.

    Yields:
      Ascending rounds.
    """
    most, separation = schema.most_in(num_rounds), schema.separation_in(num_rounds)
    if schema.is_even:
        for start in schema.starts_in(num_rounds):
            yield tuple(range(start, num_rounds, separation))[:most]
    else:
        yield from _spread_patterns((), False, separation, most, num_rounds)


def _spread_patterns(
    rounds: tuple[int, ...], has_room: bool, separation: int, most: int, num_rounds: int
) -> Iterator[tuple[int, ...]]:
    """Yields the maximal patterns of a least separation that begin with ``rounds``.

    ``has_room`` says whether another round fits before the last of ``rounds``: then only patterns
    of k rounds are maximal.
    """
    earliest = rounds[-1] + separation if rounds else 0
    if len(rounds) == most or earliest >= num_rounds:
        if len(rounds) == most or not has_room:
            yield rounds
        return
    for i in range(earliest, num_rounds):
        with_room = has_room or i >= earliest + separation
        fitting = 1 + (num_rounds - 1 - i) // separation
        if with_room and len(rounds) + fitting < most:
            break
        yield from _spread_patterns((*rounds, i), with_room, separation, most, num_rounds)
