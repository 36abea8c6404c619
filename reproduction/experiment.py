"""What an experiment is: something a paper printed or drew, and how it is computed again."""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import matplotlib.figure

from mf_aggregators import factorization_cache, workloads
from mf_aggregators.factorizations import Factorization
from reproduction import printed_values

AGREES = "agrees"
DIFFERS = "differs"
NOT_PRINTED = "not printed"


@dataclasses.dataclass(frozen=True)
class Row:
    """One number, beside the printed one.

    Attributes:
      experiment: The experiment's name.
      row: Where in the table or figure: its row, or its curve and point.
      quantity: What the number is, with its unit where it has one.
      printed: The printed digits, see ``printed_values``; None where the paper prints none.
      ours: What was computed.
      reason: For a number that differs, why; for one that was not printed, what it shows.
    """

    experiment: str
    row: str
    quantity: str
    printed: str | None
    ours: float
    reason: str | None = None

    @property
    def verdict(self) -> str:
        """``agrees`` to the printed digits, ``differs``, or ``not printed``."""
        if self.printed is None:
            return NOT_PRINTED
        agrees = printed_values.parse(self.printed).agrees(self.ours)
        return AGREES if agrees else DIFFERS

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

    def to_dict(self) -> dict[str, Any]:
        """Returns the row as ``--format=json`` has it."""
        return {
            "experiment": self.experiment,
            "row": self.row,
            "quantity": self.quantity,
            "paper": self.paper,
            "ours": self.ours,
            "printed": self.printed,
            "verdict": self.verdict,
            "relative_difference": self.relative_difference,
            "reason": None if self.verdict == AGREES else self.reason,
        }


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What an experiment has found.

    Attributes:
      rows: The numbers.
      figure: The figure, drawn and not yet saved.
      notes: What a reader has to know beyond the rows, a sentence or more each.
    """

    rows: tuple[Row, ...]
    figure: matplotlib.figure.Figure
    notes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class TrainingPlace:
    """Where and how comparisons train.

    Attributes:
      directory: Where runs go; what is there is resumed.
      dataset: ``docstrings``, scaled down, or ``stackoverflow`` at the papers' size.
      repetitions: Runs of each arm.
      workers: ``host:port,...`` of TFF worker processes; None for this machine alone.
    """

    directory: pathlib.Path
    dataset: str = "docstrings"
    repetitions: int = 3
    workers: str | None = None


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
      trains: Whether it trains, for hours, and needs TensorFlow Federated.
    """

    name: str
    source: str
    title: str
    run: Callable[[Workspace], Outcome]
    trains: bool = False


def prefix_sum(num_rounds: int) -> workloads.Workload:
    """Returns the prefix-sum workload by name, whose errors structured mechanisms have directly.

    Args:
      num_rounds: n.

    Returns:
      The workload.
    """
    return workloads.Workload("prefix_sum", num_rounds)
