"""What repeated runs show: accuracies with intervals, which are apart, and privacy together."""

import csv
import dataclasses
import functools
import itertools
import math
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import scipy.stats
from dp_accounting import dp_event

from mf_aggregators import Mechanism, accounting, checkpoints
from mf_aggregators.kernel import numbers
from mf_aggregators.kernel.numbers import rounded_up
from mf_aggregators.participation import SamplingScheme
from simulations.comparison.repeated_runs import FinishedRun
from simulations.runs import round_records, run_directory

if TYPE_CHECKING:
    # matplotlib is imported when something is drawn.
    from simulations.runs import run_figures

CONFIDENCE = 0.95

_EPSILON_TOLERANCE = 1e-3
# Epsilons of privacy loss distributions, whose grids differ, may be so far apart.
_COMPOSITION_TOLERANCE = 1e-2


@dataclasses.dataclass(frozen=True)
class Row:
    """The repetitions of one mechanism.

    Attributes:
      mechanism: The mechanism.
      repetitions: How many runs there are.
      test_accuracy_mean: The mean of their test accuracies, fractions.
      test_accuracy_half_width: Half the width of the 95 % interval of Student's t around the
        mean, for accuracies that are normally distributed over runs; None for a single run.
      test_accuracy_min: The smallest.
      test_accuracy_max: The largest.
      epsilon: The largest epsilon of a run; None if one of them is not private.
      delta: The largest delta of a run; None if one of them is not private.
      seconds_mean: The mean wall time of the runs that were never resumed; None if there
        is none.
    """

    mechanism: str
    repetitions: int
    test_accuracy_mean: float
    test_accuracy_half_width: float | None
    test_accuracy_min: float
    test_accuracy_max: float
    epsilon: float | None
    delta: float | None
    seconds_mean: float | None


@dataclasses.dataclass(frozen=True)
class Composition:
    """All private runs of a comparison, which train on the same clients.

    Attributes:
      private_runs: How many they are.
      other_runs: The other runs, which guarantee nothing.
      epsilon: The epsilon of the private runs together, for a client that may be in all of
        them; None without private runs, and where none can be stated.
      delta: The delta that this epsilon is for, the largest of a run; None without private runs.
      reason: Why no epsilon of private runs can be stated; None if one is, or there are none.
    """

    private_runs: int
    other_runs: int
    epsilon: float | None
    delta: float | None
    reason: str | None = None


def summarise(runs: Mapping[str, Sequence[FinishedRun]]) -> tuple[Row, ...]:
    """Summarises repeated runs, by mechanism.

    Returns:
      A row for each mechanism: those that are not private first, for what privacy is compared
      with, and then the highest mean test accuracy first.

    Raises:
      ValueError: If a mechanism has no run.
    """
    rows = [_row(mechanism, finished) for mechanism, finished in runs.items()]
    return tuple(sorted(rows, key=lambda row: (row.epsilon is not None, -row.test_accuracy_mean)))


def _row(mechanism: str, runs: Sequence[FinishedRun]) -> Row:
    if not runs:
        raise ValueError(f"there must be at least one run of {mechanism}.")
    accuracies = np.array([run.test_accuracy for run in runs], dtype=np.float64)
    half_width = None
    if len(runs) > 1:
        quantile = scipy.stats.t.ppf(0.5 + CONFIDENCE / 2.0, len(runs) - 1)
        half_width = float(quantile * np.std(accuracies, ddof=1) / math.sqrt(len(runs)))
    seconds = [run.seconds for run in runs if run.seconds is not None]
    return Row(
        mechanism=mechanism,
        repetitions=len(runs),
        test_accuracy_mean=float(np.mean(accuracies)),
        test_accuracy_half_width=half_width,
        test_accuracy_min=float(np.min(accuracies)),
        test_accuracy_max=float(np.max(accuracies)),
        epsilon=_largest([run.epsilon for run in runs]),
        delta=_largest([run.delta for run in runs]),
        seconds_mean=float(np.mean(seconds)) if seconds else None,
    )


def _largest(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return max(known) if len(known) == len(values) else None


def separated(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Returns the pairs of mechanisms whose intervals do not overlap, the higher first.

    Pairs are in the order of their means. Single runs have no interval, and are in none.
    """
    known = [row for row in rows if row.test_accuracy_half_width is not None]
    known.sort(key=lambda row: -row.test_accuracy_mean)
    return [
        (higher.mechanism, lower.mechanism)
        for higher, lower in itertools.combinations(known, 2)
        if higher.test_accuracy_mean - (higher.test_accuracy_half_width or 0.0)
        > lower.test_accuracy_mean + (lower.test_accuracy_half_width or 0.0)
    ]


def unfairness(runs: Mapping[str, Sequence[FinishedRun]]) -> str | None:
    """Returns why accuracies of these runs say nothing of their mechanisms, or None.

    They do not if the private runs have epsilons that differ by more than 0.1 %, or other deltas,
    or some run has another number of rounds.
    """
    every = [run for of_mechanism in runs.values() for run in of_mechanism]
    epsilons = [run.epsilon for run in every if run.epsilon is not None]
    if epsilons and max(epsilons) > (1.0 + _EPSILON_TOLERANCE) * min(epsilons):
        return (
            f"the private runs have epsilons from {rounded_up(min(epsilons), '.5g')} to "
            f"{rounded_up(max(epsilons), '.5g')}, "
            "and less noise is more accurate under any mechanism."
        )
    deltas = sorted({run.delta for run in every if run.delta is not None})
    if len(deltas) > 1:
        return (
            f"the private runs have deltas from {rounded_up(deltas[0], '.6g')} to "
            f"{rounded_up(deltas[-1], '.6g')}."
        )
    rounds = sorted({run.rounds for run in every})
    if len(rounds) > 1:
        return f"the runs have from {rounds[0]} to {rounds[-1]} rounds."
    return None


def separation_line(rows: Sequence[Row], pairs: Sequence[tuple[str, str]], why: str | None) -> str:
    """Returns one sentence on the order that intervals support.

    ``pairs`` is what :func:`separated` returned for the rows, and ``why`` what :func:`unfairness`
    did.
    """
    if why is not None:
        return f"This comparison is not fair, and claims no order: {why}"
    if len(rows) == 1:
        return "A single mechanism is compared with nothing."
    if any(row.test_accuracy_half_width is None for row in rows):
        return "Single runs have no interval, and no order is claimed."
    if not pairs:
        return "Intervals of all mechanisms overlap, and no order is claimed."
    listed = ", ".join(f"{higher} above {lower}" for higher, lower in pairs)
    return f"With non-overlapping intervals: {listed}."


def composition(runs: Iterable[FinishedRun]) -> Composition:
    """Returns the guarantee of all private runs together.

    Unamplified runs are Gaussian mechanisms, and together one of them
    (``accounting.composed_gaussian_epsilon``). Where some are amplified, all are composed by
    privacy loss distributions (``accounting.composed_epsilon``): Poisson-sampled ones as what they
    are, those of clients that draw for themselves by samples, with the matrix of the run's
    checkpoint, and all others without amplification. A run that broke its plan enters with what may
    be stated of it. Where the result of a run does not say its noise multiplier and its sampling,
    or these do not give what it states, no guarantee is stated, and the reason is.

    Args:
      runs: The runs.
    """
    every = list(runs)
    private = [run for run in every if run.epsilon is not None]
    others = len(every) - len(private)
    if not private:
        return Composition(0, others, None, None)
    delta = max(run.delta for run in private if run.delta is not None)
    if len(private) == 1:
        return Composition(1, others, private[0].epsilon, delta)
    try:
        sigmas = [_checked_noise_multiplier(run) for run in private]
        schemes = [run.sampling for run in private]
        if all(scheme is None for scheme in schemes):
            epsilon = accounting.composed_gaussian_epsilon(sigmas, delta)
        else:
            events = [_event(run, sigma) for run, sigma in zip(private, sigmas, strict=True)]
            epsilon = accounting.composed_epsilon(events, delta)
    except ValueError as error:
        # What was trained for hours is tabulated all the same.
        return Composition(len(private), others, None, delta, str(error))
    return Composition(len(private), others, epsilon, delta)


def composition_line(found: Composition) -> str:
    """Returns what holds for a client of all runs, epsilon and delta rounded up."""
    if found.private_runs == 0:
        return "No run is private."
    if found.epsilon is None or found.delta is None:
        return (
            f"No guarantee of all {found.private_runs} private runs together can be stated: "
            f"{found.reason}"
        )
    pair = numbers.pair(found.epsilon, found.delta)
    if found.private_runs == 1:
        text = f"The one private run: {pair}-DP for each client."
    else:
        text = (
            f"All {found.private_runs} private runs together, on the same clients: {pair}-DP for "
            "each client."
        )
    if found.other_runs:
        text += " Whoever sees the runs that are not private, too, is promised nothing."
    return text


def _checked_noise_multiplier(run: FinishedRun) -> float:
    """The noise multiplier of a private run, if that gives at least what the run states.

    Raises:
      ValueError: If it does not, or is not known, so that the run cannot be composed.
    """
    assert run.epsilon is not None
    assert run.delta is not None
    sigma = run.noise_multiplier
    if sigma is None:
        # Its epsilon alone does not tell: that of a sampled run is one of other noise.
        raise ValueError(
            "the result of a run, perhaps of an older version, does not say its noise multiplier "
            "and how its clients were sampled: run it again to compose it."
        )
    mechanism = _mechanism(run, sigma)
    alone = (
        _epsilon(sigma, run.sampling, run.delta)
        if mechanism is None
        else accounting.exact_epsilon(mechanism.event().noise_multiplier, run.delta)
    )
    if alone < (1.0 - _COMPOSITION_TOLERANCE) * run.epsilon:
        raise ValueError(
            f"the result of a run states epsilon {rounded_up(run.epsilon, '.6g')} at delta "
            f"{rounded_up(run.delta, '.6g')}, and its noise multiplier {sigma!r} alone would give "
            f"{rounded_up(alone, '.6g')}: it is of another kind of "
            "guarantee, which cannot be composed."
        )
    return sigma


# Repetitions state the same, and what it takes is slow for some schemes.
@functools.lru_cache
def _epsilon(sigma: float, scheme: SamplingScheme | None, delta: float) -> float:
    if scheme is None:
        return accounting.exact_epsilon(sigma, delta)
    if scheme.has_groups:
        return scheme.epsilon(sigma, delta)
    if scheme.shares_rows:
        raise ValueError(
            "participations of balls in bins share rows here, and the checkpoint of the run, whose "
            "matrix composing them takes, is not there any more."
        )
    # Without amplification: each participation of a client changes rows of its own.
    return accounting.exact_epsilon(sigma / scheme.all_participations(None).norm, delta)


def _mechanism(run: FinishedRun, sigma: float) -> Mechanism | None:
    """What made a run of clients that draw for themselves; None without its checkpoint."""
    scheme, checkpoint = run.sampling, run.checkpoint
    if scheme is None or scheme.has_groups or checkpoint is None:
        return None
    return _saved_mechanism(checkpoint, scheme, sigma) if checkpoint.is_dir() else None


# Of each run, its noise is checked before it is composed.
@functools.lru_cache
def _saved_mechanism(checkpoint: pathlib.Path, scheme: SamplingScheme, sigma: float) -> Mechanism:
    return Mechanism(checkpoints.load(checkpoint), scheme, sigma)


def _event(run: FinishedRun, sigma: float) -> dp_event.DpEvent:
    """A run as it is composed with others: amplified where that can be told."""
    scheme, mechanism = run.sampling, _mechanism(run, sigma)
    if mechanism is not None:
        return mechanism.event()
    if scheme is None:
        return accounting.event(sigma)
    if scheme.has_groups:
        return scheme.event(sigma)
    together = scheme.all_participations(None)
    return dp_event.SelfComposedDpEvent(
        accounting.event(sigma / together.largest_part), together.disjoint
    )


def to_markdown(rows: Sequence[Row]) -> str:
    """Returns a Markdown table whose columns are aligned, for people to read as it is."""

    def text(value: float | None, form: str, factor: float = 1.0) -> str:
        return "-" if value is None else form.format(factor * value)

    header = "mechanism,test accuracy,95 % interval,min,max,epsilon,delta,runs,minutes"
    cells = [
        [
            row.mechanism,
            text(row.test_accuracy_mean, "{:.2f} %", 100.0),
            text(row.test_accuracy_half_width, "± {:.2f} %", 100.0),
            text(row.test_accuracy_min, "{:.2f} %", 100.0),
            text(row.test_accuracy_max, "{:.2f} %", 100.0),
            "-" if row.epsilon is None else rounded_up(row.epsilon, ".3f"),
            "-" if row.delta is None else rounded_up(row.delta, ".6g"),
            str(row.repetitions),
            text(row.seconds_mean, "{:.1f}", 1.0 / 60.0),
        ]
        for row in rows
    ]
    return aligned([header.split(","), *cells])


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Returns a Markdown table of a heading and rows: names at the left, numbers at the right."""
    first, *others = (max(map(len, column)) for column in zip(*rows, strict=True))
    rule = ["-" * first, *("-" * (width - 1) + ":" for width in others)]
    lines = []
    for name, *cells in (rows[0], rule, *rows[1:]):
        right = [text.rjust(width) for text, width in zip(cells, others, strict=True)]
        lines.append(f"| {' | '.join([name.ljust(first), *right])} |")
    return "\n".join(lines)


def draw(
    directories: Mapping[str, Sequence[pathlib.Path]],
    rows: Sequence[Row],
    path: pathlib.Path,
    title: str,
) -> list[str]:
    """Draws test accuracies, and held-out accuracy by round, means with intervals.

    Args:
      directories: By mechanism, the directories of its runs.
      rows: What :func:`summarise` returned for them, in the order of the figure.
      path: The PNG file; nothing is left there if there is nothing to draw.
      title: The title above the figure.

    Returns:
      The mechanisms that are left out, because no round has a held-out accuracy in all their runs.

    Raises:
      OSError: If a file cannot be read or written.
    """
    from mf_aggregators import figures
    from simulations.runs import run_figures

    curves = {row.mechanism: mean_accuracy(directories[row.mechanism]) for row in rows}
    drawn = {name: curve for name, curve in curves.items() if len(curve.rounds)}
    path.unlink(missing_ok=True)
    if drawn:
        accuracies = [
            figures.Interval(
                row.mechanism,
                100.0 * row.test_accuracy_mean,
                None
                if row.test_accuracy_half_width is None
                else 100.0 * row.test_accuracy_half_width,
                100.0 * row.test_accuracy_min,
                100.0 * row.test_accuracy_max,
            )
            for row in rows
        ]
        run_figures.compare(drawn, path, title=title, accuracies=accuracies)
    return [name for name in curves if name not in drawn]


def mean_accuracy(directories: Sequence[pathlib.Path]) -> "run_figures.MeanCurve":
    """Returns the mean held-out accuracy by round over the runs of these directories.

    Raises:
      OSError: If a file cannot be read.
      RunDirectoryError: If one holds no metrics.
    """
    from simulations.runs import run_figures

    return run_figures.mean_curve([_metrics(directory) for directory in directories])


def _metrics(directory: pathlib.Path) -> list[dict[str, str]]:
    path = directory / run_directory.METRICS_FILE
    round_records.check_metrics(path)
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        return list(csv.DictReader(file))
