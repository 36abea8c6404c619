"""Kinds of participation by their names, and the rules that all schemas keep.

Another package registers a :class:`~mf_aggregators.participation.SamplingScheme` by an entry point
of the group ``mf_aggregators.sampling_schemes``, whose name is the scheme's.
"""

import functools
import importlib.metadata
import itertools
import warnings
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from mf_aggregators.kernel import validation
from mf_aggregators.kernel.errors import NotInstalledError
from mf_aggregators.participation.balls_in_bins import BallsInBins
from mf_aggregators.participation.fixed_epoch_order import FixedEpochOrder
from mf_aggregators.participation.fixed_size import FixedSizeSampling
from mf_aggregators.participation.kinds import Participation, check
from mf_aggregators.participation.min_separation import MinSeparation
from mf_aggregators.participation.min_separation_sampling import MinSeparationSampling
from mf_aggregators.participation.poisson import PoissonSampling
from mf_aggregators.participation.random_allocation import RandomAllocation
from mf_aggregators.participation.schemes import SamplingScheme, accounted
from mf_aggregators.participation.shuffling import Shuffling
from mf_aggregators.participation.single import SingleParticipation
from mf_aggregators.participation.truncated_poisson import TruncatedPoissonSampling

# The group of entry points that other packages register sampling schemes in.
GROUP = "mf_aggregators.sampling_schemes"

_SCHEMAS: Mapping[str, type[Participation]] = MappingProxyType(
    {
        SingleParticipation.name: SingleParticipation,
        FixedEpochOrder.name: FixedEpochOrder,
        MinSeparation.name: MinSeparation,
    }
)
_OWN_SCHEMES: tuple[type[SamplingScheme], ...] = (
    PoissonSampling,
    FixedSizeSampling,
    Shuffling,
    MinSeparationSampling,
    BallsInBins,
    TruncatedPoissonSampling,
    RandomAllocation,
)


class SchemeWarning(UserWarning):
    """A sampling scheme of another package cannot be offered; the message says why."""


@functools.cache
def sampling_schemes() -> Mapping[str, type[SamplingScheme]]:
    """Returns all sampling schemes by name: the library's own, then those of other packages.

    Warns:
      SchemeWarning: If one of another package is not offered, and why.
    """
    found = {scheme.name: scheme for scheme in _OWN_SCHEMES}
    entry_points = importlib.metadata.entry_points(group=GROUP)
    for entry_point in sorted(entry_points, key=lambda each: (each.name, each.value)):
        try:
            scheme = entry_point.load()
            if not (isinstance(scheme, type) and issubclass(scheme, SamplingScheme)):
                raise TypeError("it is no subclass of mf_aggregators.participation.SamplingScheme")
            if scheme.name != entry_point.name or scheme.name in found:
                raise ValueError(
                    f"its name {scheme.name!r} must be that of the entry point, and new"
                )
        except Exception as error:
            # Whatever is wrong with another package, the library's own schemes remain.
            warnings.warn(
                f"the sampling scheme {entry_point.name} of {entry_point.value} is not offered: "
                f"{error}.",
                SchemeWarning,
                stacklevel=2,
            )
            continue
        found[scheme.name] = scheme
    return MappingProxyType(found)


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
      name: The name of a scheme of this library or of an installed package.
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
      NotInstalledError: If the name is unknown, a ValueError.
      ValueError: If the sizes do not fit one another.
    """
    schemes = sampling_schemes()
    if name not in schemes:
        raise NotInstalledError(
            f"the sampling scheme {validation.shown(name)} is not one of {', '.join(schemes)}: "
            f"install the package that registers it as one of {GROUP}."
        )
    # Schemes of other packages may know of no largest batch.
    given = {} if largest_batch is None else {"largest_batch": largest_batch}
    made = schemes[name].of_sizes(
        num_rounds, num_bands, population, clients_per_round, separation, **given
    )
    return accounted(made)


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
        raise ValueError(
            f"{validation.shown(description)} describes no sampling scheme."
        ) from error


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
