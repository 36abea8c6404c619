"""The statistics of repeated runs, against textbooks and brute force."""

import itertools
import math
import statistics
from typing import Any

import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from simulations.comparison import run_comparisons
from simulations.comparison.repeated_runs import FinishedRun
from simulations.comparison.run_comparisons import Row
from tests.refusals import refuses


def _finished(accuracy: float, epsilon: float | None = 8.0, **others: Any) -> FinishedRun:
    delta = None if epsilon is None else 1e-4
    fields: dict[str, Any] = {"rounds": 9, "delta": delta, "seconds": 1.0, **others}
    return FinishedRun(test_accuracy=accuracy, epsilon=epsilon, **fields)


@given(
    st.lists(st.floats(0.0, 1.0), min_size=2, max_size=7),
    st.lists(st.floats(0.0, 1e6) | st.none(), min_size=7, max_size=7),
)
@settings(deadline=None)
def test_rows_are_the_textbook_statistics(
    accuracies: list[float], seconds: list[float | None]
) -> None:
    runs = [
        _finished(accuracy, seconds=second)
        for accuracy, second in zip(accuracies, seconds, strict=False)
    ]
    (row,) = run_comparisons.summarise({"blt": runs})
    assert row.repetitions == len(accuracies)
    assert row.test_accuracy_mean == pytest.approx(statistics.fmean(accuracies), abs=1e-12)
    assert (row.test_accuracy_min, row.test_accuracy_max) == (min(accuracies), max(accuracies))
    assert row.test_accuracy_half_width is not None
    # By the distribution function: the interval has 95 % of the probability.
    error = statistics.stdev(accuracies) / math.sqrt(len(accuracies))
    if error > 1e-9:
        tail = scipy.stats.t.cdf(-row.test_accuracy_half_width / error, len(accuracies) - 1)
        assert tail == pytest.approx(0.025, rel=1e-6)
    else:
        assert row.test_accuracy_half_width == pytest.approx(0.0, abs=1e-6)
    known = [second for second in seconds[: len(accuracies)] if second is not None]
    assert row.seconds_mean == (pytest.approx(statistics.fmean(known)) if known else None)


def test_rows_state_the_weakest_guarantee() -> None:
    rows = run_comparisons.summarise(
        {
            "tree": [_finished(0.1, 8.0), _finished(0.1, 8.001), _finished(0.1, 7.999)],
            "blt": [_finished(0.2, 8.0), _finished(0.2, None)],
        }
    )
    assert [(row.mechanism, row.epsilon, row.delta) for row in rows] == [
        ("blt", None, None),
        ("tree", 8.001, 1e-4),
    ]
    with refuses("blt"):
        run_comparisons.summarise({"blt": []})


@given(st.lists(st.tuples(st.integers(0, 50), st.none() | st.integers(0, 20)), max_size=6))
def test_separated_rows_have_disjoint_intervals(numbers: list[tuple[int, int | None]]) -> None:
    rows = [
        Row(str(place), 2, mean, width, mean, mean, None, None, None)
        for place, (mean, width) in enumerate(numbers)
    ]
    points = {
        str(place): set(range(mean - width, mean + width + 1))
        for place, (mean, width) in enumerate(numbers)
        if width is not None
    }
    expected = {
        (one, other)
        for one, other in itertools.permutations(points, 2)
        if points[one].isdisjoint(points[other]) and max(points[one]) > max(points[other])
    }
    found = run_comparisons.separated(rows)
    assert len(found) == len(expected)
    assert set(found) == expected


def test_runs_without_privacy_are_on_top() -> None:
    rows = run_comparisons.summarise(
        {
            "tree": [_finished(0.1, 8.0)],
            "blt": [_finished(0.3, 8.0)],
            "none": [_finished(0.2, None)],
        }
    )
    assert [row.mechanism for row in rows] == ["none", "blt", "tree"]


@pytest.mark.parametrize(
    ("runs", "reason"),
    [
        ((_finished(0.1), _finished(0.2, 8.0079), _finished(0.3, None)), None),
        ((_finished(0.1, None), _finished(0.2, None)), None),
        ((_finished(0.1), _finished(0.2, 8.0081)), "epsilons from 8 to 8.0081"),
        ((_finished(0.1), _finished(0.2, 7.99)), "epsilons from 7.99 to 8"),
        ((_finished(0.1), _finished(0.2, delta=1e-5)), "deltas from 1e-05 to 0.0001"),
        ((_finished(0.1), _finished(0.2, None, rounds=8)), "from 8 to 9 rounds"),
    ],
)
def test_what_is_unfair(runs: tuple[FinishedRun, ...], reason: str | None) -> None:
    # In one mechanism or in several, it makes no difference.
    for found in (
        run_comparisons.unfairness({"blt": runs}),
        run_comparisons.unfairness({str(place): [run] for place, run in enumerate(runs)}),
    ):
        assert (found is None) == (reason is None)
        assert reason is None or (found is not None and reason in found)
