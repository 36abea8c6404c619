"""How epsilons are certified: seeds, samples, and how many mechanisms one result may test."""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

from mf_aggregators import inputs
from mf_aggregators.kernel import validation
from mf_aggregators.kernel.certificate import MECHANISMS, Certificate
from mf_aggregators.kernel.errors import Error


class MechanismBudgetError(Error, ValueError):
    """One result takes tests of more mechanisms than share its failure probability."""


@dataclasses.dataclass(eq=False)
class MechanismBudget:
    """How many mechanisms may still be tested on the way to one result.

    Attributes:
      left: How many. Each test takes one, and :meth:`take` takes a part.
    """

    left: int = MECHANISMS

    def __post_init__(self) -> None:
        if not 0 <= self.left <= MECHANISMS:
            raise MechanismBudgetError(
                f"delta pays for tests of 0 to {MECHANISMS} mechanisms, found {self.left}."
            )

    def take(self, mechanisms: int = 1) -> "MechanismBudget":
        """Takes a part out of the budget and returns it.

        Args:
          mechanisms: The size of the part. All of it counts as used, tested or not.

        Raises:
          MechanismBudgetError: If fewer are left.
        """
        if mechanisms > self.left:
            raise MechanismBudgetError(
                f"one result takes Monte Carlo tests of more mechanisms than the {MECHANISMS} that "
                "its delta pays for: compare fewer of them."
            )
        part = MechanismBudget(mechanisms)
        self.left -= mechanisms
        return part


@dataclasses.dataclass(frozen=True)
class Certification:
    """How epsilons are certified.

    Attributes:
      seed: What all random numbers follow from. Choose it before anything is known of its
        result.
      max_samples: The most samples of a test; as many as take minutes by default.
      directory: Where certificates are kept, to be proved again; None for nowhere.
      show_progress: Whether to show progress bars on standard error.
      budget: The mechanisms that may be tested. If one of several results is chosen, give all
        their calls the same budget; None makes each call a result of its own.

    Raises:
      ValueError: If the seed is no integer of at least 0, or ``max_samples`` none of at least 1,
        or another attribute is of another type.
    """

    seed: int = 0
    max_samples: int | None = None
    directory: pathlib.Path | None = None
    show_progress: bool = False
    budget: MechanismBudget | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "seed", validation.integer_at_least(self.seed, 0, "seed"))
        if self.max_samples is not None:
            validation.set_positive_integers(self, "max_samples")
        inputs.check_types(self)


@dataclasses.dataclass(frozen=True)
class Amplified:
    """An amplified epsilon, and what proves it.

    Attributes:
      epsilon: Of the run, for noise as it is drawn.
      certificate: Its certificate; None where there is none, or nothing is amplified.
    """

    epsilon: float
    certificate: Certificate | None


def from_dict(description: Mapping[str, Any]) -> Certificate:
    """Returns the certificate that ``Certificate.to_dict`` described.

    Raises:
      ValueError: If it describes none: a number is missing, is none, or is not finite.
    """
    try:
        values = {field.name: description[field.name] for field in dataclasses.fields(Certificate)}
        low, high = values["thresholds"]
        values["thresholds"] = (_real(low), _real(high))
        for name in ("epsilon", "delta", "bet"):
            values[name] = _real(values[name])
        return Certificate(**values)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{validation.shown(description)} describes no certificate.") from error


def _real(value: Any) -> Any:
    """Returns a number of JSON as a float; anything else as it is."""
    return float(value) if type(value) is int else value
