"""Tables and sentences that compare repeated training runs by accuracy and privacy.

In a repetition, runs of all mechanisms have the same cohorts, data order and initial weights; each
has noise of its own. What cohorts, data order and initial weights contribute to an accuracy is
taken to be the same for two mechanisms, and cancels in the difference of their accuracies. Over
repetitions, differences are taken to be independent and normally distributed.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import scipy.stats

from mf_aggregators import accounting
from mf_aggregators.commands import stated_runs
from mf_aggregators.kernel import numbers
from mf_aggregators.kernel.numbers import rounded_up
from simulations.comparison.repeated_runs import FinishedRun, RepeatedRun
from simulations.runs.run_directory import ParticipationLedger, RunDirectory

CONFIDENCE = 0.95

_EPSILON_TOLERANCE = 1e-3
# Accuracies with a standard deviation below this are equal: they differ by rounding only.
_NO_DEVIATION = 1e-9


@dataclasses.dataclass(frozen=True)
class Row:
    """Row of the comparison's table: the results of one mechanism over its repetitions.

    Attributes:
      mechanism: The mechanism.
      repetitions: The number of runs.
      test_accuracy_mean: The mean of their test accuracies, fractions.
      test_accuracy_half_width: Half the width of the 95 % interval of Student's t around the
        mean, for accuracies that are normally distributed over runs; None for a single run.
      test_accuracy_min: The smallest of their test accuracies.
      test_accuracy_max: The largest of their test accuracies.
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
class PairedDifference:
    """Difference of the test accuracies of two mechanisms, paired by repetition.

    Attributes:
      higher: The mechanism of the higher mean.
      lower: The mechanism of the lower mean.
      repetitions: The number of pairs of runs.
      mean: The mean difference, a fraction, not negative.
      half_width: Half the width of its interval of Student's t. The intervals of all pairs of a
        comparison hold together with 95 % (Bonferroni). None for a single difference, and if all
        differences are equal: then it is unknown how much they vary.
      p_value: The p-value of the two-sided paired t-test of this pair alone; None as
        ``half_width``.
    """

    higher: str
    lower: str
    repetitions: int
    mean: float
    half_width: float | None = None
    p_value: float | None = None

    @property
    def is_apart(self) -> bool:
        """Whether the interval of the mean difference excludes zero."""
        return self.half_width is not None and self.mean > self.half_width


@dataclasses.dataclass(frozen=True)
class Composition:
    """The guarantee of all private runs of a comparison together: they train on the same clients.

    Attributes:
      private_runs: The number of private runs.
      other_runs: The number of the other runs, which guarantee nothing.
      epsilon: The epsilon of the private runs together, for a client that may be in all of
        them; None without private runs, and where none can be stated.
      delta: The delta of this epsilon, the largest of a run; None without private runs.
      reason: Why no epsilon of private runs can be stated; None if one is, or there are none.
    """

    private_runs: int
    other_runs: int
    epsilon: float | None
    delta: float | None
    reason: str | None = None


def half_widths(values: np.ndarray, level: float = 1.0 - CONFIDENCE) -> np.ndarray:
    """Returns half the widths of Student's t intervals around the means of values over runs.

    Args:
      values: (m, ...) float64: of m runs, at least one.
      level: The probability that an interval does not have the true mean, in (0, 1).

    Returns:
      An array of the shape of ``values`` without its first axis; NaN for a single run.
    """
    if len(values) < 2:
        return np.full(np.shape(values)[1:], math.nan)
    deviations = np.std(values, axis=0, ddof=1) / math.sqrt(len(values))
    return np.asarray(scipy.stats.t.isf(level / 2.0, len(values) - 1) * deviations)


def summarise(runs: Mapping[str, Sequence[FinishedRun]]) -> tuple[Row, ...]:
    """Returns one row of the table for each mechanism, from its repeated runs (at least one each).

    Returns:
      A row for each mechanism: first those that are not private, with which privacy is compared,
      and then the highest mean test accuracy first.
    """
    rows = [_row(mechanism, finished) for mechanism, finished in runs.items()]
    return tuple(sorted(rows, key=lambda row: (row.epsilon is not None, -row.test_accuracy_mean)))


def _row(mechanism: str, runs: Sequence[FinishedRun]) -> Row:
    accuracies = np.array([run.test_accuracy for run in runs], dtype=np.float64)
    seconds = [run.seconds for run in runs if run.seconds is not None]
    return Row(
        mechanism=mechanism,
        repetitions=len(runs),
        test_accuracy_mean=float(np.mean(accuracies)),
        test_accuracy_half_width=float(half_widths(accuracies)) if len(runs) > 1 else None,
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
    """Returns the pairs of mechanisms with disjoint accuracy intervals, the better one first.

    Pairs are in the order of their means. A mechanism with a single run has no interval, and is in
    no pair.
    """
    known = [
        (row.mechanism, row.test_accuracy_mean, row.test_accuracy_half_width)
        for row in sorted(rows, key=lambda row: -row.test_accuracy_mean)
        if row.test_accuracy_half_width is not None
    ]
    return [
        (higher, lower)
        for (higher, above, half), (lower, below, other) in itertools.combinations(known, 2)
        if above - half > below + other
    ]


def unfairness(runs: Mapping[str, Sequence[FinishedRun]]) -> str | None:
    """Returns the reason why these runs' accuracies are no fair comparison of mechanisms, or None.

    The comparison is unfair if the private runs have epsilons that differ by more than 0.1 % or
    different deltas, or if the runs differ in their number of rounds.
    """
    every = [run for of_mechanism in runs.values() for run in of_mechanism]
    epsilons = [run.epsilon for run in every if run.epsilon is not None]
    if epsilons and max(epsilons) > (1.0 + _EPSILON_TOLERANCE) * min(epsilons):
        return (
            f"the private runs have epsilons from {rounded_up(min(epsilons), '.5g')} to "
            f"{rounded_up(max(epsilons), '.5g')}, and less noise makes any mechanism more accurate."
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
    """Returns one sentence: which mechanisms the intervals show to be more accurate than which.

    Args:
      rows: The mechanisms.
      pairs: The result of :func:`separated` for them.
      why: The result of :func:`unfairness`.
    """
    if why is not None:
        return f"This comparison is not fair, and claims no order: {why}"
    if len(rows) == 1:
        return "There is only one mechanism, and no comparison."
    if any(row.test_accuracy_half_width is None for row in rows):
        return "Single runs have no interval, and no order is claimed."
    if not pairs:
        return "Intervals of all mechanisms overlap, and no order is claimed."
    listed = ", ".join(f"{higher} above {lower}" for higher, lower in pairs)
    return f"With non-overlapping intervals: {listed}."


def paired_differences(accuracies: Mapping[str, Sequence[float]]) -> tuple[PairedDifference, ...]:
    """Returns the paired difference of all pairs of mechanisms, those with higher means first.

    Args:
      accuracies: By mechanism, the test accuracies of its repetitions, in the same order and as
        many for each.
    """
    arrays = {name: np.asarray(values, np.float64) for name, values in accuracies.items()}
    names = sorted(arrays, key=lambda name: -float(np.mean(arrays[name])))
    pairs = list(itertools.combinations(names, 2))
    level = (1.0 - CONFIDENCE) / max(1, len(pairs))
    found = []
    for higher, lower in pairs:
        differences = arrays[higher] - arrays[lower]
        number = len(differences)
        pair = PairedDifference(higher, lower, number, max(0.0, float(np.mean(differences))))
        deviation = float(np.std(differences, ddof=1)) if number > 1 else 0.0
        if deviation >= _NO_DEVIATION:
            pair = dataclasses.replace(
                pair,
                half_width=float(half_widths(differences, level)),
                p_value=float(scipy.stats.ttest_1samp(differences, 0.0).pvalue),
            )
        found.append(pair)
    return tuple(found)


def why_not_paired(finished: Mapping[RepeatedRun, FinishedRun]) -> str | None:
    """Returns the reason why runs of one repetition cannot be compared as pairs, or None.

    Runs are pairs if they have the same cohort seed, the same participations in their ledgers and
    the same initial weights.
    """
    first: dict[int, tuple[RepeatedRun, tuple[object, ...]]] = {}
    for run, result in finished.items():
        if result.initial_model is None:
            return f"the result of {run.name} does not name its initial weights."
        try:
            config = RunDirectory(run.directory).read_config() or {}
            clients = ParticipationLedger.load(RunDirectory(run.directory).ledger).digest()
        except ValueError as error:
            return str(error)
        # The cohort seed is compared because it alone determines the order of each client's data.
        found = (config.get("cohort_seed"), clients, result.initial_model)
        other, same = first.setdefault(run.repetition, (run, found))
        for what, mine, others in zip(
            ("cohort seeds", "clients in their rounds", "initial weights"), found, same, strict=True
        ):
            if mine != others or mine is None:
                return f"{other.name} and {run.name} had different {what}."
    return None


def lines_on_pairs(pairs: Sequence[PairedDifference], why: str | None) -> list[str]:
    """Returns sentences on the paired differences of accuracy in a comparison.

    Args:
      pairs: The result of :func:`paired_differences`.
      why: The result of :func:`why_not_paired`.
    """
    if why is not None:
        return [f"Runs are not compared in pairs: {why}"]
    if all(pair.half_width is None for pair in pairs):
        return ["Differences are the same in all repetitions, so that they have no interval."]
    apart = [f"{pair.higher} above {pair.lower}" for pair in pairs if pair.is_apart]
    claim = ", ".join(apart) if apart else "no order is claimed"
    return [
        "By differences of runs with the same clients and initial weights (95 % intervals for all "
        f"pairs together): {claim}.",
    ]


def composition(runs: Iterable[FinishedRun]) -> Composition:
    """Returns the guarantee of all private runs together, as the kernel proves it.

    Each run is composed as what its directory shows (``stated_runs.Others.events_of``): the planned
    mechanism, or the worst case of its ledger if that broke the plan.
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
        events = stated_runs.Others.events_of([run.directory for run in private], delta)
        epsilon = accounting.composed_epsilon(events, delta)
    except ValueError as error:
        # No error is raised, so that accuracies are tabulated: they took hours of training.
        return Composition(len(private), others, None, delta, str(error))
    return Composition(len(private), others, epsilon, delta)


def composition_line(found: Composition) -> str:
    """Returns a sentence on the guarantee of a client who is in all runs; epsilon is rounded up."""
    if found.private_runs == 0:
        return "No run is private."
    if found.epsilon is None or found.delta is None:
        return f"All {found.private_runs} private runs together have no guarantee: {found.reason}"
    pair = numbers.pair(found.epsilon, found.delta)
    if found.private_runs == 1:
        text = f"The one private run: {pair}-DP for each client."
    else:
        text = (
            f"All {found.private_runs} private runs together, on the same clients: {pair}-DP for "
            "each client."
        )
    if found.other_runs:
        text += " Nothing is guaranteed against an observer of the runs that are not private."
    return text


def to_markdown(rows: Sequence[Row]) -> str:
    """Returns a Markdown table with aligned columns and one row for each mechanism."""
    header = "mechanism,test accuracy,95 % interval,min,max,epsilon,delta,runs,minutes"
    cells = [
        [
            row.mechanism,
            _text(row.test_accuracy_mean, "{:.2f} %", 100.0),
            _text(row.test_accuracy_half_width, "± {:.2f} %", 100.0),
            _text(row.test_accuracy_min, "{:.2f} %", 100.0),
            _text(row.test_accuracy_max, "{:.2f} %", 100.0),
            "-" if row.epsilon is None else rounded_up(row.epsilon, ".3f"),
            "-" if row.delta is None else rounded_up(row.delta, ".6g"),
            str(row.repetitions),
            _text(row.seconds_mean, "{:.1f}", 1.0 / 60.0),
        ]
        for row in rows
    ]
    return _aligned([header.split(","), *cells])


def pairs_to_markdown(pairs: Sequence[PairedDifference]) -> str:
    """Returns an aligned Markdown table of accuracy differences in percentage points."""
    header = "difference,points,interval"
    cells = [
        [
            f"{pair.higher} - {pair.lower}",
            f"{100.0 * pair.mean:.2f}",
            _text(pair.half_width, "± {:.2f}", 100.0),
        ]
        for pair in pairs
    ]
    return _aligned([header.split(","), *cells])


def _text(value: float | None, form: str, factor: float = 1.0) -> str:
    return "-" if value is None else form.format(factor * value)


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    """Returns a Markdown table from a heading and rows; names are aligned left, numbers right."""
    first, *others = (max(map(len, column)) for column in zip(*rows, strict=True))
    rule = ["-" * first, *("-" * (width - 1) + ":" for width in others)]
    lines = []
    for name, *cells in (rows[0], rule, *rows[1:]):
        right = [text.rjust(width) for text, width in zip(cells, others, strict=True)]
        lines.append(f"| {' | '.join([name.ljust(first), *right])} |")
    return "\n".join(lines)
