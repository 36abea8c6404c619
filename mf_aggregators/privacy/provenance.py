"""What nobody can compute of a run: who answers for it, when it was, and what else its clients did.

What nobody said is stated to be not stated.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from mf_aggregators import inputs
from mf_aggregators.kernel import numbers

# Where a statement has no word on a point.
_NOT_STATED = "not stated."
_SECURE_AGGREGATION: Mapping[bool | None, str] = {
    None: _NOT_STATED,
    True: "yes: the server saw sums of updates, and no client's own.",
    False: "no: the server saw every client's clipped update.",
}


@dataclasses.dataclass(frozen=True)
class Provenance:
    """Who stands behind a statement, and what it was made from; nothing is checked but files.

    Attributes:
      responsible: Who answers for the run; empty where nobody said.
      model: The model and its version; empty where nobody said.
      period: The first and the last day of the run; empty where nobody said.
      custody: Who holds the noise seed, the state and the ledger, and when they are destroyed, as a
        sentence; empty where nobody said.
      secure_aggregation: Whether the server saw sums alone; None where nobody said.
      files: Names of files and their SHA-256 in hexadecimal, in the order in which they are listed.
      date: The day on which the statement was made; empty where nobody said.
      secret_files: Which of the files tell a secret that the guarantee rests on: in the place of
        their SHA-256 stands an HMAC-SHA-256, whose key is the file ``key_file``.
      key_file: That file; empty where there are none.

    Raises:
      ValueError: If an attribute is of another type.
    """

    responsible: str = ""
    model: str = ""
    period: str = ""
    custody: str = ""
    secure_aggregation: bool | None = None
    files: tuple[tuple[str, str], ...] = ()
    date: str = ""
    secret_files: tuple[str, ...] = ()
    key_file: str = ""

    def __post_init__(self) -> None:
        inputs.check_types(self)

    def to_dict(self) -> dict[str, Any]:
        """Returns a JSON-able mapping."""
        return {
            **dataclasses.asdict(self),
            "files": dict(self.files),
            "secret_files": list(self.secret_files),
        }

    @classmethod
    def from_dict(cls, contents: Mapping[str, Any]) -> "Provenance":
        """Returns what :meth:`to_dict` described.

        Args:
          contents: The mapping.

        Raises:
          KeyError: If an attribute is missing.
          TypeError: If the mapping has another attribute.
          ValueError: If an attribute is of another type.
        """
        lists = {
            "files": tuple(contents["files"].items()),
            "secret_files": tuple(contents["secret_files"]),
        }
        return cls(**{**contents, **lists})

    def to_markdown(self) -> str:
        """Returns the points of a list, indented by three spaces."""
        points = [
            f"*Responsible.* {self.responsible or _NOT_STATED}",
            f"*Model and version.* {self.model or _NOT_STATED}",
            f"*Period of the run.* {self.period or _NOT_STATED}",
            f"*Date of this statement.* {self.date or _NOT_STATED}",
            "*Custody and destruction of the noise seed, the state and the ledger.* "
            f"{self.custody or _NOT_STATED}",
            f"*Secure aggregation.* {_SECURE_AGGREGATION[self.secure_aggregation]}",
        ]
        lines = [f"   - {point}\n" for point in points]
        if self.files:
            lines.append("   - *Made from these files*, by SHA-256:\n")
            lines += [
                f"     - `{name}` {digest}"
                + (f" (an HMAC keyed by `{self.key_file}`)" if name in self.secret_files else "")
                + "\n"
                for name, digest in self.files
            ]
        return "".join(lines)


@dataclasses.dataclass(frozen=True)
class OtherRuns:
    """What holds of a run and other ones together, for clients that were in all of them.

    Attributes:
      names: The other runs, as a reader finds them.
      epsilon: Of all together; infinity if one of them has no guarantee.
      delta: The delta that it is for.

    Raises:
      ValueError: If an attribute is of another type, or out of its range.
    """

    names: tuple[str, ...]
    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        inputs.check_types(self, "names")
        numbers.epsilon(self.epsilon)
        numbers.delta(self.delta)

    def to_dict(self) -> dict[str, Any]:
        """Returns a JSON-able mapping; an infinite epsilon becomes None."""
        epsilon = self.epsilon if math.isfinite(self.epsilon) else None
        return {"names": list(self.names), "epsilon": epsilon, "delta": self.delta}


def in_words(runs: OtherRuns | None) -> str:
    """Returns what is stated of other runs on the same clients, in whole sentences.

    Args:
      runs: What is known of them; None where nobody said.
    """
    if runs is None:
        return (
            "Not stated. Each further run on these clients adds to what can be found\n"
            "     out about them; runs that tried settings out are such runs."
        )
    names = ", ".join(f"`{name}`" for name in runs.names)
    together = (
        f"what they\n     released together satisfies "
        f"{numbers.pair(runs.epsilon, runs.delta)}-DP,\n     if each of them keeps what "
        "its own statement assumes"
        if math.isfinite(runs.epsilon)
        else "there is no\n     guarantee for all of them together"
    )
    return (
        f"For clients that were in this run and in {names},\n"
        f"     {together}.\n"
        "     Runs that are not named here are not counted."
    )
