"""Participation schemas: in which sets of rounds one client may take part.

All schemas use one convention (BandMF, Def. 1): a separation of b means that any
two participations i, j of one client satisfy ``|i - j| >= b``, so that b = 1 is no
limit. Earlier DP-FTRL texts count the rounds strictly between two participations,
which is b - 1.

A schema is not a sampling scheme (``mf_aggregators.accounting.sampling_schemes``): it names the
sets of rounds, however they come about, and a scheme is a rule by which a server draws at random.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping
from typing import Any, TypeAlias

from mf_aggregators import validation


@dataclasses.dataclass(frozen=True)
class SingleParticipation:
    """Each client takes part in at most one round."""

    def most_participations(self, num_rounds: int) -> int:
        """Returns the most rounds of ``num_rounds`` that one client can take part in: 1.

        Args:
          num_rounds: The number of rounds n.
        """
        validation.positive_integer(num_rounds, "num_rounds")
        return 1

    def __str__(self) -> str:
        return "at most one participation"


@dataclasses.dataclass(frozen=True)
class FixedEpochOrder:
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

    def __post_init__(self) -> None:
        validation.set_positive_integers(self, "epochs", "separation")

    def most_participations(self, num_rounds: int) -> int:
        """Returns the most rounds of ``num_rounds`` that one client can take part in.

        Args:
          num_rounds: The number of rounds n.
        """
        return _most_that_fit(num_rounds, self.separation, self.epochs)

    def __str__(self) -> str:
        return (
            f"at most {self.epochs} participations, adjacent ones exactly "
            f"{self.separation} rounds apart"
        )


@dataclasses.dataclass(frozen=True)
class MinSeparation:
    """b-min-sep-participation: any two participations at least b rounds apart (BandMF, Def. 1).

    The schema that a timer on each device enforces.

    Attributes:
      separation: The least number of rounds b between two participations, at least
        1; 1 is no limit.
      max_participations: The most participations k of one client; None for as many
        as fit into the rounds.

    Raises:
      ValueError: If an attribute is not a positive integer.
    """

    separation: int
    max_participations: int | None = None

    def __post_init__(self) -> None:
        validation.set_positive_integers(self, "separation")
        if self.max_participations is not None:
            validation.set_positive_integers(self, "max_participations")

    def most_participations(self, num_rounds: int) -> int:
        """Returns the most rounds of ``num_rounds`` that one client can take part in.

        Args:
          num_rounds: The number of rounds n.
        """
        return _most_that_fit(num_rounds, self.separation, self.max_participations)

    def __str__(self) -> str:
        limit = (
            "participations"
            if self.max_participations is None
            else f"at most {self.max_participations} participations"
        )
        return f"{limit} at least {self.separation} rounds apart"


# Any schema.
Participation: TypeAlias = SingleParticipation | FixedEpochOrder | MinSeparation

_NAMES = {
    "single": SingleParticipation,
    "fixed_epoch": FixedEpochOrder,
    "min_sep": MinSeparation,
}


def check(participation: Any) -> Participation:
    """Returns ``participation``, or raises TypeError unless it is one of the three schemas.

    Args:
      participation: What was given for a schema.

    Raises:
      TypeError: If it is none.
    """
    if not isinstance(participation, tuple(_NAMES.values())):
        raise TypeError(
            "participation must be a SingleParticipation, FixedEpochOrder or MinSeparation "
            f"of mf_aggregators.participation, found {validation.shown(participation)}."
        )
    return participation


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
    check(participation)
    if isinstance(participation, SingleParticipation):
        return participation
    named = (
        participation.epochs
        if isinstance(participation, FixedEpochOrder)
        else participation.max_participations
    )
    fitting = _most_that_fit(num_rounds, participation.separation, None)
    if named is not None and named > fitting:
        raise ValueError(
            f"{named} participations {participation.separation} rounds apart need "
            f"{(named - 1) * participation.separation + 1} rounds, and there are {num_rounds}: "
            f"at most {fitting} fit."
        )
    return participation


def allows(wider: Participation, narrower: Participation, num_rounds: int) -> bool:
    """Returns whether clients who keep to one schema keep to another one, too.

    Args:
      wider: The schema that is asked about, for example that of the noise.
      narrower: The schema that clients keep to.
      num_rounds: n; only participations in these rounds count.

    Returns:
      Whether ``wider`` allows every pattern that ``narrower`` allows.

    Raises:
      TypeError: If one of them is no schema.
      ValueError: If ``num_rounds`` is not a positive integer.
    """
    check(wider)
    most = check(narrower).most_participations(num_rounds)
    if most == 1:
        return True
    if isinstance(wider, SingleParticipation) or wider.most_participations(num_rounds) < most:
        return False
    assert not isinstance(narrower, SingleParticipation)
    if isinstance(wider, MinSeparation):
        return narrower.separation >= wider.separation
    # Where only two participations fit, and these are the first and the last round, a least
    # separation is an exact one.
    is_exact = isinstance(narrower, FixedEpochOrder) or num_rounds == narrower.separation + 1
    return is_exact and narrower.separation == wider.separation


def check_extended(earlier: Mapping[int, Participation], whole: Participation) -> None:
    """Checks that each horizon of a run that was extended allows what the one before it allowed.

    Then the whole allows whatever clients did who kept the timer in force in each round: a timer
    looks at all earlier rounds of its client, so that by induction over the horizons, these and
    the next one together keep the schema of the horizon that the round belongs to.

    Args:
      earlier: The schema of each horizon that was extended, by its number of rounds.
      whole: The schema of the whole run.

    Raises:
      TypeError: If one of them is no schema.
      ValueError: If a horizon forbids what the one before it allowed, so that the run may have
        broken it already; or a number of rounds is not a positive integer.
    """
    schemas = [*sorted(earlier.items()), (None, check(whole))]
    for (num_rounds, before), (following, after) in itertools.pairwise(schemas):
        assert num_rounds is not None
        if not allows(after, before, num_rounds):
            name = "the whole" if following is None else f"the horizon of {following} rounds"
            raise ValueError(
                f"the horizon of {num_rounds} rounds allows {before}, and {name} {after}: what "
                f"took place already may be more than {name} allows. Keep the separation, and at "
                "least as many participations."
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
    separation = 1 if isinstance(participation, SingleParticipation) else participation.separation
    within_timer = min(separation, num_rounds)
    if within_timer * clients_per_round > population:
        raise ValueError(
            f"{population} clients cannot fill rounds of {clients_per_round} with {separation} "
            f"rounds between participations: {within_timer * clients_per_round} would be needed. "
            f"Use at most {max(1, population // within_timer)} clients per round or a separation "
            f"of at most {max(1, population // clients_per_round)}."
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
    separation = 1 if isinstance(participation, SingleParticipation) else participation.separation
    within_timers = min(separation, num_rounds) * clients_per_round
    return max(within_timers, -(-num_rounds * clients_per_round // most))


def to_dict(participation: Participation) -> dict[str, Any]:
    """Returns a JSON-able description: ``schema`` and the schema's attributes.

    Args:
      participation: The schema.
    """
    check(participation)
    name = next(name for name, schema in _NAMES.items() if isinstance(participation, schema))
    return {"schema": name, **dataclasses.asdict(participation)}


def from_dict(description: Mapping[str, Any]) -> Participation:
    """Returns the schema that :func:`to_dict` described.

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
    if name not in _NAMES:
        raise ValueError(
            f"a participation schema must be one of {', '.join(_NAMES)}, found {name!r}."
        )
    try:
        return _NAMES[name](**attributes)
    except TypeError as error:
        raise ValueError(f"participation schema {name}: {error}.") from None


def _most_that_fit(num_rounds: int, separation: int, limit: int | None) -> int:
    validation.positive_integer(num_rounds, "num_rounds")
    fitting = math.ceil(num_rounds / separation)
    return fitting if limit is None else min(fitting, limit)
