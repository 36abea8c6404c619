"""Regret of a matrix if the separation is another one than it was made for.

A separation is planned before anybody knows how far apart participations will be. A matrix that
was made for another one still has a guarantee: its noise is scaled to its sensitivity under the
separation that holds. What it loses is accuracy, and its regret is how much more error it has than
the best matrix that was made for that separation, both with the noise of the same target (Dvijotham
et al. 2024, arXiv 2408.08868, compare mechanisms for user-level privacy so, by separations between
participations).
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from mf_aggregators.participation import MinSeparation
from mf_aggregators.planning.plans import Candidate, Plan


@dataclasses.dataclass(frozen=True)
class Regret:
    """A matrix under several separations.

    Attributes:
      candidate: The mechanism, as it was planned for one separation.
      made_for: The separations whose plans have this very matrix, increasing.
      errors: Its effective error under each separation of the comparison, with the noise that the
        target needs there.
      regrets: Each of them over the least effective error of a plan for that separation, less one.
        Below zero if no matrix that was made for it is as good.
    """

    candidate: Candidate
    made_for: tuple[int, ...]
    errors: tuple[float, ...]
    regrets: tuple[float, ...]

    @property
    def worst(self) -> float:
        """The largest regret."""
        return max(self.regrets)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Matrices for several separations, under each of these.

    Attributes:
      separations: The separations, increasing.
      best: The candidate of least effective error of the plan for each.
      matrices: All candidates of the plans, by increasing worst regret.
    """

    separations: tuple[int, ...]
    best: tuple[Candidate, ...]
    matrices: tuple[Regret, ...]

    def to_dict(self) -> dict[str, Any]:
        """Returns the comparison, JSON-able, with candidates by their names."""
        return {
            "separations": list(self.separations),
            "best": [
                {"mechanism": each.name, "effective_error": each.effective_error}
                for each in self.best
            ],
            "matrices": [
                {
                    "mechanism": each.candidate.kind,
                    "name": each.candidate.name,
                    "made_for": list(each.made_for),
                    "effective_errors": list(each.errors),
                    "regrets": list(each.regrets),
                }
                for each in self.matrices
            ],
        }


def compare(plans: Sequence[Plan]) -> Comparison:
    """Compares the matrices of plans that differ in nothing but the separation.

    Args:
      plans: Plans for timers, one for each separation.

    Returns:
      The comparison.

    Raises:
      ValueError: If a plan is not for timers by a least separation, there is none, or two are for
        the same separation.
    """
    by_schema: dict[MinSeparation, Plan] = {}
    for plan in plans:
        schema = plan.setting.participation
        if not isinstance(schema, MinSeparation) or schema.separation in {
            each.separation for each in by_schema
        }:
            raise ValueError("plans for timers are compared, each with another least separation.")
        by_schema[schema] = plan
    if not by_schema:
        raise ValueError("there is no plan to compare.")
    schemas = sorted(by_schema, key=lambda each: each.separation)
    separations = tuple(each.separation for each in schemas)
    best = tuple(by_schema[each].candidates[0] for each in schemas)
    found: dict[tuple[str, tuple[float, ...]], Regret] = {}
    for schema in schemas:
        for candidate in by_schema[schema].candidates:
            if not math.isfinite(candidate.effective_error):
                continue
            errors = _errors(candidate, schemas)
            regrets = tuple(
                error / least.effective_error - 1.0
                for error, least in zip(errors, best, strict=True)
            )
            # A matrix that depends on no schema is the same for all of them.
            key = candidate.name, tuple(float(f"{error:.12g}") for error in errors)
            known = found.get(key)
            made_for = (*(() if known is None else known.made_for), schema.separation)
            found[key] = Regret(candidate, made_for, errors, regrets)
    matrices = sorted(found.values(), key=lambda each: each.worst)
    return Comparison(separations, best, tuple(matrices))


def _errors(candidate: Candidate, schemas: Sequence[MinSeparation]) -> tuple[float, ...]:
    """The effective error of a candidate under each schema: it goes as the sensitivity does."""
    mechanism = candidate.mechanism
    own = mechanism.factorization.sensitivity(mechanism.schema).value
    return tuple(
        candidate.effective_error * (mechanism.factorization.sensitivity(schema).value / own)
        for schema in schemas
    )
