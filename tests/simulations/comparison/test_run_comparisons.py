"""Repeated runs, against textbooks, brute force, scipy's tests and the kernel."""

import dataclasses
import itertools
import json
import math
import pathlib
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from mf_aggregators import Mechanism, accounting, factorizations
from mf_aggregators.kernel import numbers, sensitivity
from mf_aggregators.kernel.claim import ONLY_IF
from mf_aggregators.participation import MinSeparation, sampling_scheme
from simulations.comparison import repeated_runs, run_comparisons
from simulations.comparison.repeated_runs import FinishedRun, RepeatedRun, Variant
from simulations.comparison.run_comparisons import Row
from simulations.runs.run_directory import ParticipationLedger


def _finished(accuracy: float, epsilon: float | None = 8.0, **others: Any) -> FinishedRun:
    delta = None if epsilon is None else 1e-4
    fields: dict[str, Any] = {"rounds": 9, "delta": delta, "seconds": 1.0, **others}
    return FinishedRun(test_accuracy=accuracy, epsilon=epsilon, **fields)


@given(
    st.lists(st.floats(0.0, 1.0), min_size=2, max_size=7),
    st.lists(st.floats(0.0, 1e6) | st.none(), min_size=7, max_size=7),
)
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


def _saved(path: pathlib.Path, mechanism: Mechanism) -> FinishedRun:
    """A finished run of a mechanism, with what composes it in its directory."""
    mechanism.save(path)
    epsilon = mechanism.guarantee(1e-4).epsilon
    return _finished(0.5, epsilon, directory=path)


@pytest.mark.short_cases(1)
@pytest.mark.parametrize(("target", "together"), [(4.0, 19.3), (8.0, 43.3)])
def test_the_twelve_runs_of_the_readme(
    target: float, together: float, tmp_path: pathlib.Path
) -> None:
    multiplier = accounting.noise_multiplier(target, 1e-4)
    mechanism = Mechanism(factorizations.identity(4), MinSeparation(2), multiplier)
    runs = [_saved(tmp_path / str(number), mechanism) for number in range(12)]
    found = run_comparisons.composition([*runs, *[_finished(0.5, None)] * 3])
    assert (found.private_runs, found.other_runs, found.delta) == (12, 3, 1e-4)
    assert found.epsilon == pytest.approx(together, abs=0.05)
    exact = sensitivity.exact_epsilon(multiplier / math.sqrt(12), 1e-4)
    assert found.epsilon == pytest.approx(exact, rel=1e-6)
    text = run_comparisons.composition_line(found)
    shown = numbers.rounded_up(found.epsilon or 0.0)
    assert f"All 12 private runs together, on the same clients: ({shown}, 0.0001)-DP" in text
    assert "Nothing is guaranteed" in text


def test_sampled_runs_compose_amplified_with_others(tmp_path: pathlib.Path) -> None:
    sizes = {"num_rounds": 12, "num_bands": 2, "population": 200, "clients_per_round": 10}
    banded = factorizations.banded(12, num_bands=2)
    drawn = Mechanism(banded, sampling_scheme("poisson", **sizes), 0.9)
    timed = Mechanism(banded, MinSeparation(2, 1), 2.0)
    runs = [_saved(tmp_path / str(place), each) for place, each in enumerate((drawn, drawn, timed))]
    found = run_comparisons.composition(runs)
    events = [drawn.event(), drawn.event(), accounting.event(2.0)]
    assert found.epsilon == accounting.composed_epsilon(events, 1e-4)
    unamplified = 1.0 / math.sqrt(2 * 6 / 0.9**2 + 1 / 2.0**2)
    assert found.epsilon < 0.9 * sensitivity.exact_epsilon(unamplified, 1e-4)
    assert found.epsilon >= max(run.epsilon or 0.0 for run in runs)


def test_runs_that_cannot_be_composed_are_said_to_be(tmp_path: pathlib.Path) -> None:
    mechanism = Mechanism(factorizations.identity(4), MinSeparation(2), 2.0)
    one = _saved(tmp_path / "one", mechanism)
    gone = dataclasses.replace(one, directory=tmp_path / "gone")
    found = run_comparisons.composition([one, gone])
    assert (found.private_runs, found.epsilon) == (2, None)
    line = run_comparisons.composition_line(found)
    assert line.startswith("All 2 private runs together have no guarantee: ")
    assert "gone" in line


@pytest.mark.parametrize(("keeps_plan", "epsilon"), [(True, 1.0), (False, 9.0), (None, 9.0)])
def test_a_plan_counts_if_it_is_known_to_be_kept(keeps_plan: bool | None, epsilon: float) -> None:
    planned = {"epsilon": "1", "delta": "0.0001"}
    privacy: dict[str, Any] = {
        "is_private": True,
        "keeps_plan": keeps_plan,
        "headline": {"guarantee": "observed"},
        "planned": {**planned, "only_if": None},
        "observed": {**planned, "epsilon": "9", "only_if": ONLY_IF},
    }
    result = {"test_accuracy": 0.5, "rounds": 12, "privacy": privacy}
    finished = repeated_runs._finished(result, 1.0, pathlib.Path())
    assert finished.epsilon == epsilon
    assert finished.is_observed == (keeps_plan is not True)


@given(
    st.integers(2, 6).flatmap(
        lambda size: st.lists(
            st.lists(st.integers(0, 1000), min_size=size, max_size=size), min_size=2, max_size=4
        )
    )
)
@settings(max_examples=30)
def test_intervals_are_those_of_the_paired_test_and_hold_together(
    thousandths: list[list[int]],
) -> None:
    accuracies = {
        f"m{place}": [each / 1000 for each in values] for place, values in enumerate(thousandths)
    }
    pairs = run_comparisons.paired_differences(accuracies)
    number = len(accuracies) * (len(accuracies) - 1) // 2
    assert len({frozenset((pair.higher, pair.lower)) for pair in pairs}) == number == len(pairs)
    for pair in pairs:
        higher, lower = accuracies[pair.higher], accuracies[pair.lower]
        assert pair.mean == pytest.approx(max(0.0, np.mean(higher) - np.mean(lower)), abs=1e-12)
        assert pair.repetitions == len(higher)
        if len({round(1000 * (a - b)) for a, b in zip(higher, lower, strict=True)}) == 1:
            assert pair.half_width is None
            assert not pair.is_apart
            continue
        test = scipy.stats.ttest_rel(higher, lower)
        # The end of the interval is the mean that the test just does not reject.
        assert pair.half_width is not None
        end = scipy.stats.ttest_1samp(np.subtract(higher, lower), pair.mean - pair.half_width)
        assert end.pvalue == pytest.approx(0.05 / number, rel=1e-6)
        assert pair.p_value == pytest.approx(test.pvalue, rel=1e-7)
        # What is claimed is what the test finds at its share of 5 %.
        assert pair.is_apart == (test.pvalue < 0.05 / number)


_Change = Callable[[pathlib.Path], None]


def _ledger(path: pathlib.Path, last: int = 3) -> None:
    cohorts = (np.array([0, 1]), np.array([2, last]))
    ParticipationLedger(("a", "b", "c", "d", "e"), cohorts).save(path / "participation.npz")


def _config(path: pathlib.Path, seed: int | None) -> None:
    (path / "config.json").write_text(json.dumps({"cohort_seed": seed}))


def _nothing(path: pathlib.Path) -> None:
    pass


@pytest.mark.parametrize(
    ("change", "model", "reason"),
    [
        (_nothing, "one", None),
        (lambda path: _ledger(path, last=4), "one", "blt_2 and tree_2 had different clients"),
        (lambda path: _config(path, 3), "one", "blt_2 and tree_2 had different cohort seeds"),
        (lambda path: _config(path, None), "one", "blt_2 and tree_2 had different cohort seeds"),
        (_nothing, "two", "blt_2 and tree_2 had different initial weights"),
        (_nothing, None, "the result of tree_2 does not name its initial weights"),
        (lambda path: (path / "participation.npz").unlink(), "one", "participation.npz"),
        (lambda path: (path / "config.json").write_text("{"), "one", "config.json cannot be read"),
    ],
)
def test_runs_are_pairs_by_what_they_did(
    tmp_path: pathlib.Path, change: _Change, model: str | None, reason: str | None
) -> None:
    finished = {}
    for repetition in (1, 2):
        for name in ("blt", "tree"):
            run = RepeatedRun(tmp_path, "run-digits", Variant(name, name), repetition)
            run.directory.mkdir()
            # Repetitions differ from one another.
            _ledger(run.directory, last=5 - repetition)
            _config(run.directory, repetition)
            first = "one" if repetition == 2 else "other"
            finished[run] = FinishedRun(0.5, 2, 8.0, 1e-4, 1.0, initial_model=first)
    run = next(each for each in finished if each.name == "tree_2")
    finished[run] = FinishedRun(0.5, 2, 8.0, 1e-4, 1.0, initial_model=model)
    change(run.directory)
    found = run_comparisons.why_not_paired(finished)
    assert found is None if reason is None else found is not None and reason in found


def test_the_mean_over_seeds_has_students_interval() -> None:
    values = np.random.default_rng(2).normal(size=(5, 4))
    means, half_widths = np.mean(values, axis=0), run_comparisons.half_widths(values)
    for place, (mean, half_width) in enumerate(zip(means, half_widths, strict=True)):
        # The test just rejects a mean at an end of the interval.
        for end in (mean - half_width, mean + half_width):
            found = scipy.stats.ttest_1samp(values[:, place], end)
            assert found.pvalue == pytest.approx(0.05)
    assert np.all(np.isnan(run_comparisons.half_widths(values[:1])))
