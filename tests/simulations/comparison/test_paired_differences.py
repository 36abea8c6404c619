"""Paired comparisons, against scipy's paired test, simulation and runs that are no pairs."""

import json
import math
import pathlib
from collections.abc import Callable

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from simulations.comparison import paired_differences
from simulations.comparison.paired_differences import PairedDifference
from simulations.comparison.repeated_runs import FinishedRun, RepeatedRun, Variant
from simulations.runs.round_records import ParticipationLedger


@given(
    st.integers(2, 6).flatmap(
        lambda size: st.lists(
            st.lists(st.integers(0, 1000), min_size=size, max_size=size), min_size=2, max_size=4
        )
    )
)
@settings(deadline=None, max_examples=30)
def test_intervals_are_those_of_the_paired_test_and_hold_together(
    thousandths: list[list[int]],
) -> None:
    accuracies = {
        f"m{place}": [each / 1000 for each in values] for place, values in enumerate(thousandths)
    }
    pairs = paired_differences.differences(accuracies)
    number = len(accuracies) * (len(accuracies) - 1) // 2
    assert len({frozenset((pair.higher, pair.lower)) for pair in pairs}) == number == len(pairs)
    for pair in pairs:
        higher, lower = accuracies[pair.higher], accuracies[pair.lower]
        assert pair.mean == pytest.approx(max(0.0, np.mean(higher) - np.mean(lower)), abs=1e-12)
        assert pair.repetitions == len(higher)
        if len({round(1000 * (a - b)) for a, b in zip(higher, lower, strict=True)}) == 1:
            assert (pair.half_width, pair.power, pair.needed) == (None, None, None)
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


@pytest.mark.parametrize(
    ("deviation", "repetitions", "level"),
    [(0.005, 3, 0.05), (0.005, 5, 0.05), (0.004, 4, 0.005), (0.02, 10, 0.05)],
)
def test_power_is_how_often_the_test_finds_one_point(
    deviation: float, repetitions: int, level: float
) -> None:
    """Each of eight checks fails by chance with less than 1e-6: five standard deviations."""
    generator = np.random.default_rng(3)
    trials = 40_000
    for truth in (0.01, 0.0):
        drawn = generator.normal(truth, deviation, (trials, repetitions))
        found = np.mean(scipy.stats.ttest_1samp(drawn, 0.0, axis=1).pvalue < level)
        stated = paired_differences.power(deviation, repetitions, level, truth)
        error = math.sqrt(stated * (1.0 - stated) / trials)
        assert abs(found - stated) < 5.0 * error
        if truth == 0.0:
            assert stated == pytest.approx(level, rel=1e-6)


def test_power_of_a_large_or_a_tiny_deviation() -> None:
    assert paired_differences.power(1e-6, 3, 0.05) == 1.0
    assert paired_differences.power(10.0, 3, 0.05) == pytest.approx(0.05, rel=1e-4)


@pytest.mark.parametrize(("deviation", "level"), [(0.004, 0.05), (0.01, 0.05), (0.01, 0.005)])
def test_the_repetitions_that_are_needed_are_the_fewest(deviation: float, level: float) -> None:
    expected = next(
        number
        for number in range(2, 1001)
        if paired_differences.power(deviation, number, level) >= 0.8
    )
    assert paired_differences.needed_repetitions(deviation, level) == expected
    # Of many, the test is that of a known deviation (a textbook's formula).
    many = paired_differences.needed_repetitions(0.1, 0.05)
    # Those that the quick start prints.
    assert paired_differences.power(0.005, 3, 0.05) == pytest.approx(0.47, abs=0.005)
    assert paired_differences.power(0.005, 5, 0.05) == pytest.approx(0.91, abs=0.005)
    assert paired_differences.needed_repetitions(0.005, 0.05 / 10) == 8
    normal = scipy.stats.norm.isf(0.025) + scipy.stats.norm.isf(0.2)
    assert many == pytest.approx((10.0 * normal) ** 2, rel=0.01)
    assert paired_differences.needed_repetitions(0.2, 0.05) is None


def _pair(
    power: float | None, half_width: float | None = 0.02, needed: int | None = 7
) -> PairedDifference:
    return PairedDifference("blt", "tree", 3, 0.015, half_width, 0.04, power, needed)


def test_what_is_said_of_pairs() -> None:
    claim, seen = paired_differences.lines([_pair(0.12), _pair(0.8, 0.01)], None)
    assert claim.endswith("hold together with 95 %: blt above tree.")
    assert seen == (
        "A true difference of one point would have been seen with a probability of 12 % to 80 %, "
        "depending on the pair."
    )
    claim, seen = paired_differences.lines([_pair(0.12)], None)
    assert claim.endswith("no order is claimed.")
    assert seen.endswith("with a probability of 12 %.")
    (line,) = paired_differences.lines([_pair(None, None, None)], None)
    assert "nobody knows how they vary" in line
    assert paired_differences.lines([], "because.") == ["Runs are not compared in pairs: because."]
    table = paired_differences.to_markdown(
        [_pair(0.12), _pair(0.01, 0.5, None), _pair(None, None, None)]
    )
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    assert cells[2:] == [
        ["blt - tree", "1.50", "± 2.00", "12 %", "7"],
        ["blt - tree", "1.50", "± 50.00", "1 %", "over 1000"],
        ["blt - tree", "1.50", "-", "-", "-"],
    ]


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
        (_nothing, None, "the result of tree_2 does not say what weights it began with"),
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
    found = paired_differences.why_not_paired(finished)
    assert found is None if reason is None else found is not None and reason in found
