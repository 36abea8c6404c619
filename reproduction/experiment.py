"""What an experiment is: something a paper printed or drew, and how it is computed again."""

import dataclasses
import math
import pathlib
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mf_aggregators import workloads
from mf_aggregators.checkpoints import factorization_cache
from mf_aggregators.factorizations import Factorization
from reproduction import printed_values

AGREES = "agrees"
DIFFERS = "differs"
HOLDS = "holds"
FAILS = "fails"
NOT_PRINTED = "not printed"

_UNEXPLAINED = "not explained"


@dataclasses.dataclass(frozen=True)
class Row:
    """One number, beside the printed one or what the paper says of it in words.

    Attributes:
      experiment: The experiment's name.
      row: Where in the table or figure: its row, or its curve and point.
      quantity: What the number is, with its unit where it has one.
      printed: The printed digits, see ``printed_values``; None where the paper prints none.
      ours: What was computed.
      reason: For a number that differs, why; for one that was not printed, what it shows.
      claim: What the paper says, in our words, where it prints no number.
      holds: Whether ours is as the claim says.
    """

    experiment: str
    row: str
    quantity: str
    printed: str | None
    ours: float
    reason: str | None = None
    claim: str | None = None
    holds: bool | None = None

    @property
    def verdict(self) -> str:
        """The verdict on the printed number or on the claim in words, or that there is neither."""
        if self.printed is not None:
            agrees = printed_values.parse(self.printed).agrees(self.ours)
            return AGREES if agrees else DIFFERS
        if self.claim is not None:
            return HOLDS if self.holds else FAILS
        return NOT_PRINTED

    @property
    def paper(self) -> float | None:
        """The printed number."""
        return None if self.printed is None else printed_values.parse(self.printed).value

    @property
    def relative_difference(self) -> float | None:
        """(ours - paper) / paper; None where nothing, or zero, was printed."""
        if self.printed is None:
            return None
        return printed_values.parse(self.printed).relative_difference(self.ours)

    @property
    def explanation(self) -> str | None:
        """The claim, and why a number differs or what one that was not printed shows."""
        words = []
        if self.claim is not None:
            words.append(f"the paper says: {self.claim}")
        if self.verdict == DIFFERS:
            words.append(self.reason or _UNEXPLAINED)
        elif self.reason is not None and self.verdict != AGREES:
            words.append(self.reason)
        return "; ".join(words) or None

    def to_dict(self) -> dict[str, Any]:
        """Returns the row as ``--format=json`` has it; a number that is not finite is None."""
        return {
            "experiment": self.experiment,
            "row": self.row,
            "quantity": self.quantity,
            "paper": self.paper,
            "ours": self.ours if math.isfinite(self.ours) else None,
            "printed": self.printed,
            "verdict": self.verdict,
            "relative_difference": self.relative_difference,
            "reason": self.explanation,
        }


@dataclasses.dataclass(frozen=True)
class Drawing:
    """What a figure shows. How it is drawn is no part of an experiment: ``drawings`` does it.

    Attributes:
      kind: Which figure it is, by the names of ``drawings``.
      data: What it shows, JSON-able.
    """

    kind: str
    data: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What an experiment has found.

    Attributes:
      rows: The numbers.
      drawing: What its figure shows.
      notes: What a reader has to know beyond the rows, a sentence or more each.
    """

    rows: tuple[Row, ...]
    drawing: Drawing
    notes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class TrainingPlace:
    """Where and how comparisons train.

    Attributes:
      directory: Where runs go; what is there is resumed.
      dataset: ``docstrings``, scaled down, or ``stackoverflow`` or ``cifar10`` at the papers'
        size.
      repetitions: Runs of each arm.
      workers: ``host:port,...`` of TFF worker processes; None for this machine alone.
      targets: The epsilons whose arms are trained; None for all.
      parallel_runs: How many runs train at a time.
    """

    directory: pathlib.Path
    dataset: str = "docstrings"
    repetitions: int = 3
    workers: str | None = None
    targets: tuple[float, ...] | None = None
    parallel_runs: int = 1


@dataclasses.dataclass(frozen=True)
class Workspace:
    """Where an experiment keeps and finds what takes long.

    Attributes:
      cache_directory: Factorizations and noise multipliers of any run; None for none.
      show_progress: Whether to show progress bars on standard error.
      training: Where comparisons train; None for an experiment that does not.
    """

    cache_directory: pathlib.Path | None = None
    show_progress: bool = False
    training: TrainingPlace | None = None

    def factorization(
        self, description: Mapping[str, Any], compute: Callable[[], Factorization]
    ) -> Factorization:
        """Returns a factorization from the cache, or computes and keeps it.

        Args:
          description: Everything that it follows from, see ``factorization_cache.fetch``.
          compute: Computes it.

        Returns:
          The factorization. One that is damaged in the cache is computed again, with a
          ``FactorizationCacheWarning``.
        """
        return factorization_cache.fetch(self.cache_directory, description, compute)


@dataclasses.dataclass(frozen=True)
class Experiment:
    """A table or figure of a paper.

    Attributes:
      name: As ``--only`` spells it.
      source: The paper and the place in it.
      title: What it shows, one line.
      run: Computes it.
      targets: What it can be trained on, for hours, and the epsilons of its arms there; none for
        an experiment on numbers.
    """

    name: str
    source: str
    title: str
    run: Callable[[Workspace], Outcome]
    targets: Mapping[str, tuple[float, ...]] = dataclasses.field(
        default_factory=lambda: types.MappingProxyType({})
    )


def for_drawing(values: Sequence[float] | np.ndarray) -> list[float]:
    """Returns numbers with the six digits that no figure shows more of.

    Args:
      values: (m,) numbers.
    """
    return [float(f"{value:.6g}") for value in values]


def prefix_sum(num_rounds: int) -> workloads.Workload:
    """Returns the prefix-sum workload by name, whose errors structured mechanisms have directly.

    Args:
      num_rounds: n.

    Returns:
      The workload.
    """
    return workloads.Workload("prefix_sum", num_rounds)
