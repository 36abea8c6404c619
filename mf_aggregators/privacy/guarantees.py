"""Guarantees of mechanisms: planned, drawn, observed, and in words.

``kernel.claim.check`` proves them all. Here stand the claims that follow from factorizations and
participations, and the mappings and words of a guarantee. The guarantees of ledgers are those of
``kernel.ledger``.
"""

import dataclasses
import math
import types
from collections.abc import Mapping

import numpy as np
from dp_accounting import dp_event

from mf_aggregators import accounting
from mf_aggregators.factorizations import Factorization
from mf_aggregators.kernel import claim, numbers
from mf_aggregators.kernel.claim import ONLY_IF, Claim, Guarantee, Limit, Pattern
from mf_aggregators.kernel.ledger import (
    ObservedParticipation,
    observed,
    observed_participation,
    schema_of,
    without_draws,
    worst_case,
)
from mf_aggregators.kernel.numbers import IntArray
from mf_aggregators.kernel.rows import independent_rows
from mf_aggregators.kernel.schemas import Schema, Unit
from mf_aggregators.participation import (
    Participation,
    SamplingScheme,
    SingleParticipation,
    of_draws,
    of_schema,
)
from mf_aggregators.participation.certificate_search import default_certification

# Names of other modules that belong to guarantees.
__all__ = [
    "ObservedParticipation",
    "default_certification",
    "observed",
    "observed_participation",
    "worst_case",
]


# Relative rounding error of a product of floats and an exponential.
_ROUNDING = 1e-12
# e to more than this overflows.
_LARGEST_EXPONENT = 700.0
# The assumption of a guarantee that follows from a ledger, as a field of JSON objects.
INDEPENDENCE: Mapping[str, str] = types.MappingProxyType(
    {"participation_independent_of_releases": f"An observed guarantee holds {ONLY_IF}."}
)


@dataclasses.dataclass(frozen=True)
class PartOfClient:
    """The guarantee of a part of a client's data: an example, or one of several people.

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


def participation_of(guarantee: Guarantee) -> Participation:
    """Returns the participation that a guarantee is for; where clients are drawn, of every draw.

    Args:
      guarantee: The guarantee, by a plan or a ledger and not by a stopping rule.
    """
    if guarantee.claim.taking_part == Pattern(()):
        return SingleParticipation()
    return of_schema(schema_of(guarantee))


def scheme_of(guarantee: Guarantee) -> SamplingScheme | None:
    """Returns how clients are drawn, where that amplifies a guarantee; None for others.

    Args:
      guarantee: The guarantee.
    """
    draws = guarantee.claim.taking_part
    return None if isinstance(draws, (Schema, Unit, Pattern, Limit)) else of_draws(draws)


def part_of_client(guarantee: Guarantee) -> PartOfClient:
    """Returns the guarantee of a part of a client's data, at the same delta.

    Args:
      guarantee: The guarantee of whole clients.
    """
    whole = without_draws(guarantee) if guarantee.is_amplified else guarantee.claim
    half = claim.check(dataclasses.replace(whole, sigma=0.5 * whole.sigma, epsilon=None))
    part = PartOfClient(half.noise_multiplier, half.epsilon, half.delta)
    if math.isinf(half.noise_multiplier):
        return part
    # Two guarantees in a row: with the part, without the client, without the part.
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
        run = scheme.run(guarantee.noise_multiplier, guarantee.claim.columns)
        return accounting.event(run)
    if math.isinf(guarantee.noise_multiplier):
        return dp_event.NoOpDpEvent()
    return accounting.event(guarantee.noise_multiplier)


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
    bound = factorization.sensitivity(participation).value
    sigma = numbers.non_negative_number(noise_multiplier, "noise_multiplier") * bound
    return claim.check(
        Claim(
            factorization.noise_recursion(),
            participation.as_schema(),
            sigma if most is None else min(sigma, most),
            delta,
        )
    )


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
    return claim.check(Claim(independent_rows(1), Schema(1, 1), multiplier, delta))


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
