"""What every way to take part in a run answers, whatever kind it is.

Timers and fixed orders name sets of rounds in which one client may take part, however they come
about. A sampling scheme is a random rule by which clients take part, and amplifies a guarantee
towards whoever does not know the draws (``schemes``).

One convention holds throughout (BandMF, Def. 1): a separation of b means that any two
participations i, j of one client satisfy ``|i - j| >= b``, so that b = 1 allows every round.
Earlier DP-FTRL texts count the rounds strictly between two participations, which is b - 1.
"""

import abc
import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar, cast

from mf_aggregators.kernel import validation
from mf_aggregators.kernel.schemas import Schema

# The classes whose guarantees are computed here.
_OWN: set[type] = set()
_Kind = TypeVar("_Kind")


@dataclasses.dataclass(frozen=True)
class Participation(abc.ABC):
    """A participation schema: in which sets of rounds one client may take part.

    Subclasses are frozen dataclasses, one a file. Sampling schemes are schemas as well, of the
    sets of rounds that they may draw.

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

    @property
    def limit(self) -> int | None:
        """The most participations that the schema names; None for as many as fit."""
        return self.as_schema().most

    def separation_in(self, num_rounds: int) -> int:
        """Returns the least distance b of two participations; n where no client returns.

        Args:
          num_rounds: The number of rounds n.
        """
        num_rounds = validation.positive_integer(num_rounds, "num_rounds")
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


def own(kind: type[_Kind]) -> type[_Kind]:
    """Marks a class whose guarantees the library computes: a class decorator.

    Args:
      kind: The class.
    """
    _OWN.add(kind)
    return kind


def is_own(participation: Any) -> bool:
    """Returns whether something is a schema or scheme of the library, and of no subclass.

    Args:
      participation: Anything.
    """
    return type(participation) in _OWN


def refused_subclass(participation: Any) -> None:
    """Raises TypeError if something is of a subclass of the library's schemas and schemes.

    Args:
      participation: Anything.
    """
    kind = type(participation)
    for base in kind.__mro__[1:]:
        if base in _OWN and kind not in _OWN:
            raise TypeError(
                f"{kind.__qualname__} is a subclass of {base.__name__}, whose guarantee would be "
                f"stated for it: use {base.__name__} itself, or subclass "
                "participation.SamplingScheme, which is accounted for by its schema alone."
            )


def check(participation: Any) -> Participation:
    """Returns ``participation``, or raises TypeError unless it is a schema without sampling.

    Args:
      participation: What was given for a schema.

    Raises:
      TypeError: If it is none of the library's classes, or has attributes beside their fields.
    """
    refused_subclass(participation)
    if not is_own(participation) or participation.is_sampled:
        raise TypeError(
            "participation must be a SingleParticipation, FixedEpochOrder or MinSeparation "
            f"of mf_aggregators.participation, found {validation.shown(participation)}."
        )
    names = {field.name for field in dataclasses.fields(participation)}
    if not vars(participation).keys() <= names:
        raise TypeError(
            f"{validation.shown(participation)} has attributes of its own: make it anew."
        )
    return cast(Participation, participation)


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
