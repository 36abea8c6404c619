"""Defines an experiment, a table or figure of a paper to be computed again, and its results."""

import base64
import dataclasses
import decimal
import math
import pathlib
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from mf_aggregators import factorizations, inputs, workloads
from mf_aggregators.factorizations import Factorization
from mf_aggregators.participation import Participation, SingleParticipation
from mf_aggregators.planning import planner

BANDMF = "Choquette-Choo et al.: (Amplified) Banded Matrix Factorization"
DENISOV = "Denisov et al.: Improved DP for SGD on Adaptive Streams"
MCMAHAN = "McMahan, Rush, Thakurta: Private Online Prefix Sums"

# The data of a figure, as JSON-able values.
Data: TypeAlias = Mapping[str, object]

AGREES = "agrees"
DIFFERS = "differs"
HOLDS = "holds"
FAILS = "fails"
NOT_PRINTED = "not printed"

_UNEXPLAINED = "not explained"

# Matches a printed number, or a printed bound on a number.
_PATTERN = re.compile(r"(<=|>=)?\s*(-?\d+(?:\.\d+)?(?:e-?\d+)?)")
# A relative tolerance for half of the last digit, which is not exact in float64.
_SLACK = 1e-9


@dataclasses.dataclass(frozen=True)
class PrintedValue:
    """Number as a paper prints it, with the precision of its digits; or a printed bound.

    Attributes:
      relation: ``=``, ``<=`` or ``>=``: how the computed number must compare with it.
      value: The number.
      half_digit: Half a unit of its last printed digit.
    """

    relation: str
    value: float
    half_digit: float

    def agrees(self, computed: float) -> bool:
        """Returns whether a number rounds to the printed digits, or keeps the printed bound.

        Args:
          computed: The number; NaN agrees with nothing.

        Returns:
          Whether it is the same; for a bound, whether it is not beyond it by more than
          half a digit.
        """
        reach = self.half_digit * (1.0 + _SLACK)
        above, below = computed - self.value <= reach, self.value - computed <= reach
        return {"=": above and below, "<=": above, ">=": below}[self.relation]


def parse_printed(text: str) -> PrintedValue:
    """Parses a number or a bound, as a paper prints it.

    Args:
      text: A decimal number with the digits that were printed, after ``<=`` or ``>=`` if
        what was printed is a bound.

    Returns:
      The value.

    Raises:
      ValueError: If the text is neither a number nor a bound.
    """
    match = _PATTERN.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"a printed value must be a decimal number, found {text!r}.")
    number = decimal.Decimal(match[2])
    half_digit = 0.5 * 10.0 ** int(number.as_tuple().exponent)
    return PrintedValue(match[1] or "=", float(number), half_digit)


@dataclasses.dataclass(frozen=True)
class Row:
    """One computed number, with the number that the paper prints, or its claim in words.

    Attributes:
      row: Where in the table or figure: its row, or its curve and point.
      quantity: What the number is, with its unit where it has one.
      printed: The printed digits, see :func:`parse_printed`; None where the paper prints none.
      ours: The computed number.
      reason: For a number that differs, why; for one that was not printed, what it shows.
      claim: What the paper says, in our words, where it prints no number.
      holds: Whether our number is as the claim says.
      experiment: The experiment's name, which the command fills in.
    """

    row: str
    quantity: str
    printed: str | None
    ours: float
    reason: str | None = None
    claim: str | None = None
    holds: bool | None = None
    experiment: str = ""

    @property
    def verdict(self) -> str:
        """The verdict of comparing our number with the paper's number or claim, if there is one."""
        if self.printed is not None:
            agrees = parse_printed(self.printed).agrees(self.ours)
            return AGREES if agrees else DIFFERS
        if self.claim is not None:
            return HOLDS if self.holds else FAILS
        return NOT_PRINTED

    @property
    def paper(self) -> float | None:
        """The number that the paper prints."""
        return None if self.printed is None else parse_printed(self.printed).value

    @property
    def relative_difference(self) -> float | None:
        """The relative difference (ours - paper) / paper; None if nothing or zero is printed."""
        return (self.ours - self.paper) / self.paper if self.paper else None

    @property
    def explanation(self) -> str | None:
        """The paper's claim, and the remark on a number that differs or was not printed."""
        words = []
        if self.claim is not None:
            words.append(f"the paper says: {self.claim}")
        if self.verdict == DIFFERS:
            words.append(self.reason or _UNEXPLAINED)
        elif self.reason is not None and self.verdict != AGREES:
            words.append(self.reason)
        return "; ".join(words) or None

    def to_dict(self) -> dict[str, object]:
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
    """The data of an experiment's figure, which ``drawings`` draws.

    Attributes:
      kind: Which figure it is, by the names of ``drawings``.
      data: The data that the figure shows, JSON-able.
    """

    kind: str
    data: Data


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Outcome of an experiment: its numbers, the data of its figure, and notes.

    Attributes:
      rows: The numbers.
      drawing: The data of the experiment's figure.
      notes: Remarks for readers, a sentence or more each.
    """

    rows: tuple[Row, ...]
    drawing: Drawing
    notes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class TrainingPlace:
    """Where and how training comparisons run: directory, data set, repetitions, workers, targets.

    Attributes:
      directory: Where runs go; runs that are there already are resumed.
      dataset: ``docstrings``, scaled down, or ``stackoverflow`` or ``cifar10`` at the papers'
        size.
      repetitions: Runs of each configuration.
      workers: ``host:port,...`` of TFF worker processes; None for this machine alone.
      targets: The epsilons whose configurations are trained; None for all.
    """

    directory: pathlib.Path
    dataset: str = "docstrings"
    repetitions: int = 3
    workers: str | None = None
    targets: tuple[float, ...] | None = None


@dataclasses.dataclass(frozen=True)
class Workspace:
    """The caches of results that take long to compute.

    Attributes:
      cache_directory: The cache of factorizations and noise multipliers; None for no cache.
      show_progress: Whether to show progress bars on standard error.
      training: Where comparisons train; None for an experiment that does not.
    """

    cache_directory: pathlib.Path | None = None
    show_progress: bool = False
    training: TrainingPlace | None = None

    def factorization(
        self, description: Mapping[str, object], compute: Callable[[], Factorization]
    ) -> Factorization:
        """Returns a factorization from the cache, or computes and caches it.

        Args:
          description: Everything that it follows from, see ``planner.fetch``.
          compute: Computes it.

        Returns:
          The factorization. One that is damaged in the cache is computed again, with a
          ``atomic_files.CacheWarning``.
        """
        return planner.fetch(self.cache_directory, description, compute)

    def optimum(
        self,
        workload: np.ndarray,
        participation: Participation | None = None,
        equal_column_norms: bool = False,
        max_evaluations: int = 300,
    ) -> Factorization:
        """Returns the dense optimum for a workload and schema.

        Args:
          workload: A, an (n, n) lower-triangular array.
          participation: SingleParticipation, the default, or FixedEpochOrder.
          equal_column_norms: Whether the columns of C have to have equal norms.
          max_evaluations: After how many evaluations the search gives up; the factorization says
            how far it came.

        Returns:
          The factorization, its squared error within 1e-6 of the least (Denisov et al. Thm 3.2),
          and within 5e-4 for clients that return (BandMF Problem 1).
        """
        schema = SingleParticipation() if participation is None else participation
        returns = schema.most_participations(len(workload)) > 1
        gap = _RELATIVE_GAP_OF_RETURNS if returns else _RELATIVE_GAP
        return self.factorization(
            {
                "mechanism": "optimal",
                "num_rounds": len(workload),
                "participation": str(schema),
                "relative_gap": gap,
                "equal_column_norms": equal_column_norms or not returns,
                "max_evaluations": max_evaluations,
                "workload": workloads.checked(workload).fingerprint(),
            },
            lambda: factorizations.optimal(
                workload,
                schema,
                equal_column_norms=equal_column_norms,
                relative_gap=gap,
                max_evaluations=max_evaluations,
                show_progress=self.show_progress,
            ),
        )

    def banded(
        self,
        num_rounds: int,
        num_bands: int,
        participation: Participation,
        equal_column_norms: bool = True,
    ) -> Factorization:
        """Returns the banded optimum for the prefix sum.

        Args:
          num_rounds: n.
          num_bands: The number of bands.
          participation: The schema.
          equal_column_norms: Whether the columns of C have to have equal norms.

        Returns:
          The factorization, its squared error within 5e-4 of the least of that many bands.
        """
        return self.factorization(
            {
                "mechanism": "banded",
                "num_rounds": num_rounds,
                "num_bands": num_bands,
                "participation": str(participation),
                "relative_gap": _RELATIVE_GAP_OF_RETURNS,
                "equal_column_norms": equal_column_norms,
            },
            lambda: factorizations.banded(
                workloads.prefix_sum(num_rounds),
                num_bands,
                equal_column_norms,
                participation,
                relative_gap=_RELATIVE_GAP_OF_RETURNS,
                show_progress=self.show_progress,
            ),
        )

    def structured(self, optimal: Factorization, num_diagonals: int, rank: int) -> Factorization:
        """Returns the structured approximation of an optimal factorization.

        Args:
          optimal: The factorization.
          num_diagonals: h, the diagonals of its decoder that stay.
          rank: r, of what approximates the rest.
        """
        return self.factorization(
            {
                "mechanism": "structured",
                "num_rounds": optimal.num_rounds,
                "num_diagonals": num_diagonals,
                "rank": rank,
                "of": optimal.parameters,
            },
            lambda: factorizations.structured(
                optimal, num_diagonals, rank, show_progress=self.show_progress
            ),
        )


@dataclasses.dataclass(frozen=True)
class Experiment:
    """A table or figure of a paper.

    Attributes:
      name: The experiment's name, as ``--only`` spells it.
      source: The paper and the place in it.
      title: What the table or figure shows, in one line.
      run: Computes it.
      targets: What it can be trained on, for hours, and the epsilons of its configurations there;
        none for an experiment on numbers.
    """

    name: str
    source: str
    title: str
    run: Callable[[Workspace], Outcome]
    targets: Mapping[str, tuple[float, ...]] = dataclasses.field(default_factory=dict)


def for_drawing(values: Sequence[float] | np.ndarray) -> list[float]:
    """Returns numbers rounded to six digits, which is enough for a figure.

    Args:
      values: (m,) numbers.
    """
    return [float(f"{value:.6g}") for value in values]


def with_interval(mean: float, half_width: float | None) -> str:
    """Returns a mean in percent with its 95 % interval, for readers.

    Args:
      mean: The mean of runs.
      half_width: Half the width of the interval; None or NaN for a single run, which has none.
    """
    has_interval = half_width is not None and not math.isnan(half_width)
    return f"{mean:.2f}" + (f" ± {half_width:.2f} (95 %)" if has_interval else "")


# Certified relative gaps of squared errors, far below the papers' printed digits: these are four or
# more for single participation, and three for clients that return.
_RELATIVE_GAP = 1e-6
_RELATIVE_GAP_OF_RETURNS = 5e-4
# A result stores each matrix entry as one of 255 levels, -127 to 127, to take few bytes of text.
_MOST_LEVEL = 127


def encode_levels(matrix: np.ndarray) -> Data:
    """Encodes a matrix compactly, each entry as a multiple of 1/127 of the largest magnitude.

    Args:
      matrix: (rows, columns) finite floats.

    Returns:
      What :func:`decode_levels` takes, JSON-able; entries are off by at most 1/254 of the largest.
    """
    largest = float(np.max(np.abs(matrix))) or 1.0
    levels = np.round(matrix / largest * _MOST_LEVEL).astype(np.int8)
    text = base64.b64encode(zlib.compress(levels.tobytes(), 9)).decode("ascii")
    return {"shape": list(matrix.shape), "largest": largest, "levels": text}


def decode_levels(encoded: Data) -> np.ndarray:
    """Decodes a matrix that :func:`encode_levels` encoded.

    Args:
      encoded: The shape, the largest magnitude, and levels of one byte, deflated, in base64.

    Returns:
      (rows, columns) float64.
    """
    text, largest = inputs.part(encoded, str, "levels"), inputs.part(encoded, float, "largest")
    levels = np.frombuffer(zlib.decompress(base64.b64decode(text)), np.int8)
    return levels.reshape(inputs.part(encoded, list, "shape")) * (largest / _MOST_LEVEL)
