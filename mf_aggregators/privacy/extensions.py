"""Runs that go on after the last round that they were planned for: what the whole guarantees.

A factorization for more rounds (``Factorization.extended``) has a strategy matrix C' whose leading
part is C. Whoever releases the rows of C^-1 Z and goes on with those of C'^-1 Z, for the same Z,
has run the mechanism of C' from its first round on. The standard deviation of Z stays what it was:
sigma s with sigma the noise multiplier of the first plan and s its sensitivity. So the whole has
the noise multiplier sigma s / s', with s' the sensitivity of C' under the participations that the
whole allows, and less what the roundings of more rounds take (``noise.integer_rows``).

A run may be extended more than once. Each of its horizons let clients take part by a schema of its
own, and each has to allow what the one before it allowed (``participation.check_extended``): then
the whole allows all that took place under any of them.

It is the guarantee of all rounds, also where what was released had a part in the decision to go
on: docs/privacy-proofs.md says why.
"""

import dataclasses

from mf_aggregators import participation as participations
from mf_aggregators import validation
from mf_aggregators.factorizations import Factorization
from mf_aggregators.noise import costs
from mf_aggregators.noise.costs import Blocks, NoiseStorage
from mf_aggregators.noise.integer_rows import DEFAULT_LARGEST_COHORT, IntegerRows, Rounding
from mf_aggregators.noise.recursions import NoiseRecursion
from mf_aggregators.participation import Participation

# That no whole is stated to have more noise than there is, but for the last bits of its number.
_TOLERANCE = 1e-12


@dataclasses.dataclass(frozen=True)
class FirstPlan:
    """What a run began with that was extended since.

    Attributes:
      participation: The schema of the first horizon.
      noise_multiplier: The standard deviation of Z over (clip norm times the sensitivity of C under
        that schema).
      later_participations: For a run that is extended again: the schemas of the horizons between
        the first one and the whole, in their order; one for each of ``Factorization.plans`` but
        the first.

    Raises:
      TypeError: If a participation is no schema.
      ValueError: If the noise multiplier is negative or not finite.
    """

    participation: Participation
    noise_multiplier: float
    later_participations: tuple[Participation, ...] = ()

    def __post_init__(self) -> None:
        participations.check(self.participation)
        validation.non_negative_number(self.noise_multiplier, "noise_multiplier")
        # A list is as good, and a frozen object holds none.
        object.__setattr__(self, "later_participations", tuple(self.later_participations))
        for schema in self.later_participations:
            participations.check(schema)


def horizons(factorization: Factorization, first: FirstPlan) -> dict[int, Participation]:
    """Returns the schema of each horizon that was extended, by its number of rounds.

    Args:
      factorization: What the run goes on with: an extension.
      first: What it began with, and the schemas since.

    Raises:
      ValueError: If the factorization extends none, or other numbers of schemas are given than it
        extends horizons.
    """
    _first_factorization(factorization)
    schemas = (first.participation, *first.later_participations)
    if len(schemas) != len(factorization.plans):
        raise ValueError(
            f"the factorization extends horizons of {_listed(factorization.plans)} rounds, and the "
            f"schemas of {len(schemas)} are given: name that of each, in FirstPlan(participation, "
            "noise_multiplier, later_participations). What any of them allowed has to enter the "
            "guarantee of the whole."
        )
    return dict(zip(factorization.plans, schemas, strict=True))


def first_recursion(factorization: Factorization, first: FirstPlan) -> NoiseRecursion:
    """Returns the recursion that a run began with, of the C of sensitivity one.

    Args:
      factorization: What the run goes on with: an extension.
      first: What it began with.

    Raises:
      ValueError: If the factorization extends none.
    """
    return (
        _first_factorization(factorization)
        .noise_recursion()
        .scaled_to_sensitivity_one(_first_sensitivity(factorization, first))
    )


def recursion(factorization: Factorization, first: FirstPlan) -> NoiseRecursion:
    """Returns the recursion of the whole, in the scale of :func:`first_recursion`.

    Args:
      factorization: What the run goes on with: an extension.
      first: What it began with.

    Raises:
      ValueError: If the factorization extends none.
    """
    return factorization.noise_recursion().scaled_to_sensitivity_one(
        _first_sensitivity(factorization, first)
    )


def noise_multiplier(
    factorization: Factorization,
    participation: Participation,
    first: FirstPlan,
    *,
    num_parameters: int | None = None,
    largest_cohort: int | None = None,
    storage: NoiseStorage = NoiseStorage.AUTO,
) -> float:
    """Returns the noise multiplier of a whole run that was extended.

    Args:
      factorization: What the run goes on with: an extension.
      participation: The schema of the whole.
      first: What it began with, and the schemas of all horizons since.
      num_parameters: The numbers of a row of noise; None leaves out what roundings take.
      largest_cohort: The most updates in a sum; None for as many as ``mf_dp_aggregator`` allows.
      storage: Where the noise of earlier rounds is kept; AUTO chooses as for the first plan.

    Returns:
      The standard deviation of Z over (clip norm times the sensitivity of C' under the schema of
      the whole), as real arithmetic would need it for the same guarantee; 0 without noise.

    Raises:
      ValueError: If the factorization extends none; the schema of a horizon is missing; one forbids
        what the one before it allowed, so that the run may have broken it already; or roundings
        take too much.
    """
    participations.check_extended(horizons(factorization, first), participation)
    multiplier = first.noise_multiplier
    if multiplier == 0.0:
        return 0.0
    if num_parameters is not None:
        cohort = DEFAULT_LARGEST_COHORT if largest_cohort is None else largest_cohort
        multiplier = _covered(factorization, first, num_parameters, cohort, storage)
    ratio = _first_sensitivity(factorization, first)
    ratio /= factorization.sensitivity(participation).value
    return multiplier * ratio


def check_stated(stated: float, found: float) -> None:
    """Raises ValueError if a whole is stated to have more noise than there is.

    Args:
      stated: The noise multiplier that is stated for the whole.
      found: What :func:`noise_multiplier` returned.
    """
    if stated > found * (1.0 + _TOLERANCE):
        raise ValueError(
            f"the whole run is stated to have the noise multiplier {stated!r}, and its noise, "
            f"which stays what it was, has {found!r} for the rounds and participations of the "
            "whole: state that one, or less."
        )


def _covered(
    factorization: Factorization,
    first: FirstPlan,
    num_parameters: int,
    largest_cohort: int,
    storage: NoiseStorage,
) -> float:
    """The noise multiplier of the first plan less what the roundings of more rounds take."""
    began_with = first_recursion(factorization, first)
    whole = recursion(factorization, first)
    if storage is NoiseStorage.AUTO:
        storage = costs.choose(began_with, num_parameters).storage
    blocks = Blocks.of(whole, factorization.plans) if storage is NoiseStorage.DISK else None
    rounding = Rounding.of(IntegerRows.continuing(began_with, whole), blocks)
    drawn = rounding.enlarged(
        first.noise_multiplier,
        clip_norm=1.0,
        num_parameters=num_parameters,
        largest_cohort=largest_cohort,
    )
    covered = rounding.covered(
        drawn, clip_norm=1.0, num_parameters=num_parameters, largest_cohort=largest_cohort
    )
    return min(first.noise_multiplier, covered)


def _listed(numbers: tuple[int, ...]) -> str:
    return " and ".join(map(str, numbers))


def _first_factorization(factorization: Factorization) -> Factorization:
    if not factorization.plans:
        raise ValueError(
            f"this {factorization.mechanism} factorization extends none: a run that was extended "
            "goes on with what Factorization.extended returns."
        )
    return factorization.of_plan(factorization.plans[0])


def _first_sensitivity(factorization: Factorization, first: FirstPlan) -> float:
    return _first_factorization(factorization).sensitivity(first.participation).value
