"""Kinds of participation by their names, and the rules that all schemas keep."""

import dataclasses
import itertools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from mf_aggregators.kernel import numbers
from mf_aggregators.kernel.draws_of_clients import Draws
from mf_aggregators.participation.kinds import (
    FixedEpochOrder,
    MinSeparation,
    Participation,
    SingleParticipation,
    check,
)
from mf_aggregators.participation.schemes import (
    BallsInBins,
    FixedSizeSampling,
    MinSeparationSampling,
    PoissonSampling,
    RandomAllocation,
    SamplingScheme,
    Shuffling,
    TruncatedPoissonSampling,
)

_SCHEMAS: Mapping[str, type[Participation]] = MappingProxyType(
    {
        SingleParticipation.name: SingleParticipation,
        FixedEpochOrder.name: FixedEpochOrder,
        MinSeparation.name: MinSeparation,
    }
)
_KINDS: tuple[type[SamplingScheme], ...] = (
    PoissonSampling,
    FixedSizeSampling,
    Shuffling,
    MinSeparationSampling,
    BallsInBins,
    TruncatedPoissonSampling,
    RandomAllocation,
)
_SCHEMES = MappingProxyType({each.name: each for each in _KINDS})


def sampling_schemes() -> Mapping[str, type[SamplingScheme]]:
    """Returns all sampling schemes by name."""
    return _SCHEMES


def accounted(scheme: Any) -> SamplingScheme:
    """Returns a copy of one of the library's sampling schemes, made anew from its fields.

    Args:
      scheme: The scheme.

    Raises:
      TypeError: If it is of another class than :func:`sampling_schemes` has.
      ValueError: If its sizes do not fit one another.
    """
    if type(scheme) not in _KINDS:
        raise TypeError(
            f"a sampling scheme must be one of mf_aggregators.participation, and of no subclass, "
            f"found {numbers.shown(scheme)}. For draws of your own, give a schema that they "
            "keep, such as MinSeparation."
        )
    found: SamplingScheme = dataclasses.replace(scheme)
    return found


def sampling_scheme(
    name: str,
    *,
    num_rounds: int,
    num_bands: int,
    population: int,
    clients_per_round: int,
    separation: int | None = None,
    largest_batch: int | None = None,
) -> SamplingScheme:
    """Returns a sampling scheme by its name.

    Args:
      name: The name of a scheme.
      num_rounds: The rounds n.
      num_bands: The bands b of C, 1 to n.
      population: The clients m, at least B b; for ``balls_in_bins`` at least B times the bins.
      clients_per_round: The batch size B, expected or exact.
      separation: For ``min_separation``, the least distance of two participations of a
        client, at least b and b by default. For ``balls_in_bins``, the number of bins,
        floor(m / B) by default. None for the others.
      largest_batch: For ``truncated_poisson``, the most clients of a round, by default what a
        round exceeds with a probability of at most 1e-6. None for the others.

    Returns:
      The scheme.

    Raises:
      ValueError: If the name is unknown, or the sizes do not fit one another.
    """
    if name not in _SCHEMES:
        raise ValueError(
            f"the sampling scheme {numbers.shown(name)} is not one of {', '.join(_SCHEMES)}."
        )
    return _SCHEMES[name].of_sizes(
        num_rounds, num_bands, population, clients_per_round, separation, largest_batch
    )


def sampling_from_dict(description: Any) -> SamplingScheme:
    """Returns the scheme that ``SamplingScheme.to_dict`` described.

    Args:
      description: The mapping.

    Returns:
      The scheme.

    Raises:
      ValueError: If it describes none.
    """
    try:
        return sampling_scheme(**description)
    except TypeError as error:
        raise ValueError(f"{numbers.shown(description)} describes no sampling scheme.") from error


def of_draws(draws: Draws) -> SamplingScheme:
    """Returns the scheme that ``SamplingScheme.as_draws`` has turned into integers.

    Args:
      draws: The integers.
    """
    return _SCHEMES[draws.name](*dataclasses.astuple(draws))


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
    """Checks that each horizon of a run that was extended allows what the one before it allowed.

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
