"""Paired comparisons: mechanisms that trained with the same clients from the same weights.

In a repetition, runs of all mechanisms have the same cohorts, data order and initial weights, and
noise of their own. What these add to an accuracy is the same for two mechanisms, and leaves their
difference. Over repetitions, differences are taken to be independent and normally distributed.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import scipy.stats

from simulations.comparison.repeated_runs import FinishedRun, RepeatedRun
from simulations.comparison.run_comparisons import CONFIDENCE, aligned
from simulations.runs.round_records import ParticipationLedger
from simulations.runs.run_directory import RunDirectory

# The difference of test accuracies whose power is stated: one point.
ONE_POINT = 0.01
# The power that a number of repetitions is found for, as is usual.
USUAL_POWER = 0.8
# Nobody trains more often, and the search ends.
_MOST_REPETITIONS = 1000
# Standard deviations of accuracies below this are rounding of equal ones.
_NO_DEVIATION = 1e-9


@dataclasses.dataclass(frozen=True)
class PairedDifference:
    """The difference of test accuracies of two mechanisms over repetitions.

    Attributes:
      higher: The mechanism of the higher mean.
      lower: The other one.
      repetitions: How many pairs of runs there are.
      mean: The mean difference, a fraction, not negative.
      half_width: Half the width of its interval of Student's t. The intervals of all pairs of a
        comparison hold together with 95 % (Bonferroni). None where all differences are equal, or
        there is only one, so that nobody knows how they vary.
      p_value: That of the two-sided paired t-test of this pair alone; None as ``half_width``.
      power: The probability that the interval excludes zero, if the true difference is one point
        and differences vary as they did; None as ``half_width``.
      needed: The fewest repetitions whose power is 80 %; None if that is more than 1,000, or as
        ``half_width``.
    """

    higher: str
    lower: str
    repetitions: int
    mean: float
    half_width: float | None
    p_value: float | None
    power: float | None
    needed: int | None

    @property
    def is_apart(self) -> bool:
        """Whether the interval excludes zero."""
        return self.half_width is not None and self.mean > self.half_width


def power(
    deviation: float, repetitions: Any, level: float, difference: float = ONE_POINT
) -> np.ndarray:
    """Returns the power of the two-sided paired t-test, by the noncentral t distribution.

    Args:
      deviation: The standard deviation of a difference, above zero.
      repetitions: The number of pairs, at least 2; or an array of such numbers.
      level: The probability of a false alarm, in (0, 1).
      difference: The true difference.

    Returns:
      An array of the shape of ``repetitions``.
    """
    freedom = np.asarray(repetitions) - 1
    threshold = scipy.stats.t.ppf(1.0 - level / 2.0, freedom)
    shift = difference * np.sqrt(repetitions) / deviation
    found = scipy.stats.nct.sf(threshold, freedom, shift)
    found += scipy.stats.nct.cdf(-threshold, freedom, shift)
    return np.minimum(found, 1.0)


def needed_repetitions(deviation: float, level: float) -> int | None:
    """Returns the fewest repetitions with 80 % of :func:`power`; None if more than 1,000."""
    numbers = np.arange(2, _MOST_REPETITIONS + 1)
    enough = numbers[power(deviation, numbers, level) >= USUAL_POWER]
    return int(enough[0]) if len(enough) else None


def differences(accuracies: Mapping[str, Sequence[float]]) -> tuple[PairedDifference, ...]:
    """Compares all pairs of mechanisms, in the order of their means, the highest first.

    Args:
      accuracies: By mechanism, the test accuracies of its repetitions, in the same order and as
        many for each.
    """
    arrays = {name: np.asarray(values, np.float64) for name, values in accuracies.items()}
    names = sorted(arrays, key=lambda name: -float(np.mean(arrays[name])))
    pairs = list(itertools.combinations(names, 2))
    level = (1.0 - CONFIDENCE) / max(1, len(pairs))
    return tuple(
        _difference(higher, lower, arrays[higher] - arrays[lower], level) for higher, lower in pairs
    )


def _difference(higher: str, lower: str, found: np.ndarray, level: float) -> PairedDifference:
    number, mean = len(found), max(0.0, float(np.mean(found)))
    deviation = float(np.std(found, ddof=1)) if number > 1 else 0.0
    if deviation < _NO_DEVIATION:
        return PairedDifference(higher, lower, number, mean, None, None, None, None)
    error = deviation / math.sqrt(number)
    quantile = float(scipy.stats.t.ppf(1.0 - level / 2.0, number - 1))
    return PairedDifference(
        higher=higher,
        lower=lower,
        repetitions=number,
        mean=mean,
        half_width=quantile * error,
        p_value=float(2.0 * scipy.stats.t.sf(mean / error, number - 1)),
        power=float(power(deviation, number, level)),
        needed=needed_repetitions(deviation, level),
    )


def why_not_paired(finished: Mapping[RepeatedRun, FinishedRun]) -> str | None:
    """Returns why runs of a repetition are no pairs, or None if they are.

    That they are is not taken from their flags, but from what they did: the participations in their
    ledgers, and the weights that they began with.
    """
    first: dict[int, tuple[RepeatedRun, tuple[object, ...]]] = {}
    for run, result in finished.items():
        if result.initial_model is None:
            return f"the result of {run.name} does not say what weights it began with."
        try:
            config = RunDirectory(run.directory).read_config() or {}
            clients = ParticipationLedger.load(RunDirectory(run.directory).ledger).digest()
        except ValueError as error:
            return str(error)
        # The order in which clients go through their data follows from the seed alone.
        found = (config.get("cohort_seed"), clients, result.initial_model)
        other, same = first.setdefault(run.repetition, (run, found))
        for what, mine, others in zip(
            ("cohort seeds", "clients in their rounds", "initial weights"), found, same, strict=True
        ):
            if mine != others or mine is None:
                return f"{other.name} and {run.name} had different {what}."
    return None


def lines(pairs: Sequence[PairedDifference], why: str | None) -> list[str]:
    """Returns what pairs show, in sentences.

    Args:
      pairs: What :func:`differences` returned.
      why: What :func:`why_not_paired` did.
    """
    if why is not None:
        return [f"Runs are not compared in pairs: {why}"]
    known = [pair.power for pair in pairs if pair.power is not None]
    if not known:
        return ["Differences are the same in all repetitions: nobody knows how they vary."]
    apart = [f"{pair.higher} above {pair.lower}" for pair in pairs if pair.is_apart]
    claim = ", ".join(apart) if apart else "no order is claimed"
    least, most = (f"{100.0 * each:.0f} %" for each in (min(known), max(known)))
    between = least if least == most else f"{least} to {most}, depending on the pair"
    return [
        "By differences of runs with the same clients and initial weights, whose intervals hold "
        f"together with 95 %: {claim}.",
        f"A true difference of one point would have been seen with a probability of {between}.",
    ]


def to_markdown(pairs: Sequence[PairedDifference]) -> str:
    """Returns a Markdown table of the differences, in points, for people to read as it is."""
    rows = [["difference", "points", "interval", "sees one point", "runs for 80 %"]]
    for pair in pairs:
        needed = str(pair.needed or f"over {_MOST_REPETITIONS}")
        rows.append(
            [
                f"{pair.higher} - {pair.lower}",
                f"{100.0 * pair.mean:.2f}",
                "-" if pair.half_width is None else f"± {100.0 * pair.half_width:.2f}",
                "-" if pair.power is None else f"{100.0 * pair.power:.0f} %",
                "-" if pair.power is None else needed,
            ]
        )
    return aligned(rows)
