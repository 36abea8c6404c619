"""Repeated runs, against textbooks, brute force, closed forms and dp-accounting's composition."""

import dataclasses
import itertools
import math
import pathlib
import statistics
from typing import Any

import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from mf_aggregators import (
    Mechanism,
    accounting,
    checkpoints,
    factorizations,
)
from mf_aggregators.kernel import gaussian, numbers
from mf_aggregators.participation import sampling_scheme
from mf_aggregators.privacy.guarantees import INDEPENDENCE
from simulations.comparison import repeated_runs, run_comparisons
from simulations.comparison.repeated_runs import FinishedRun
from simulations.comparison.run_comparisons import Row
from tests.examples import examples
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


_SIZES: dict[str, Any] = {
    "num_rounds": 12,
    "num_bands": 2,
    "population": 200,
    "clients_per_round": 10,
}


def _run(
    multiplier: float | None, epsilon: float | None, sampling: str | None = None
) -> FinishedRun:
    scheme = None if sampling is None else sampling_scheme(sampling, **_SIZES)
    delta = None if epsilon is None else 1e-4
    return FinishedRun(0.5, 12, epsilon, delta, 1.0, multiplier, scheme)


@pytest.mark.parametrize(("target", "together"), [(8.0, 43.3), (4.0, 19.3)])
def test_the_twelve_runs_of_the_readme(target: float, together: float) -> None:
    multiplier = accounting.noise_multiplier(target, 1e-4)
    runs = [_run(multiplier, target)] * 12 + [_run(None, None)] * 3
    found = run_comparisons.composition(runs)
    assert found.private_runs == 12
    assert found.other_runs == 3
    assert found.delta == 1e-4
    assert found.epsilon == pytest.approx(together, abs=0.05)
    one = accounting.noise_multiplier(target, 1e-4) / math.sqrt(12)
    assert found.epsilon == pytest.approx(gaussian.exact_epsilon(one, 1e-4), rel=1e-6)
    text = run_comparisons.composition_line(found)
    shown = numbers.rounded_up(found.epsilon or 0.0)
    assert f"All 12 private runs together, on the same clients: ({shown}, 0.0001)-DP" in text
    assert "is promised nothing" in text


@given(st.lists(st.floats(0.6, 9.0), min_size=2, max_size=7))
@settings(deadline=None, max_examples=examples(30))
def test_gaussian_mechanisms_compose_to_one(multipliers: list[float]) -> None:
    runs = [_run(each, accounting.epsilon(each, 1e-4)) for each in multipliers]
    found = run_comparisons.composition(runs)
    one = 1.0 / math.sqrt(sum(each**-2 for each in multipliers))
    exact = gaussian.exact_epsilon(one, 1e-4)
    assert found.epsilon is not None
    assert exact - 1e-9 <= found.epsilon <= exact * (1.0 + 1e-5) + 1e-9
    assert found.epsilon >= max(run.epsilon for run in runs if run.epsilon is not None) - 1e-9


def test_runs_that_cannot_be_composed_are_said_to_be() -> None:
    # What drawing the noise costs is no small part of that.
    run = dataclasses.replace(_run(0.9, 5.0), delta=1e-15)
    found = run_comparisons.composition([run] * 4 + [_run(None, None)])
    assert found.epsilon is None
    assert found.reason is not None
    assert run_comparisons.composition_line(found) == (
        f"No guarantee of all 4 private runs together can be stated: {found.reason}"
    )


@pytest.mark.parametrize("sampling", [None, *["poisson", "fixed_size", "shuffling"]])
def test_runs_that_do_not_say_their_noise_are_not_composed(sampling: str | None) -> None:
    """What a noise multiplier would be from epsilon alone was amplified once more."""
    found = run_comparisons.composition([_run(None, 0.358, sampling)] * 2)
    assert found.private_runs == 2
    assert found.epsilon is None
    assert "does not say its noise multiplier" in run_comparisons.composition_line(found)
    # One that says it does not make up for another.
    mixed = run_comparisons.composition(
        [_run(None, 0.358, sampling), _run(2.0, accounting.epsilon(2.0, 1e-4))]
    )
    assert mixed.epsilon is None
    assert run_comparisons.composition([_run(None, 0.358, sampling)]).epsilon == 0.358


@pytest.mark.parametrize("sampling", [None, "poisson"])
def test_runs_whose_noise_does_not_give_what_they_state_are_not_composed(
    sampling: str | None,
) -> None:
    found = run_comparisons.composition([_run(3.0, 9.0, sampling)] * 3)
    assert found.epsilon is None
    assert "states epsilon 9 at delta 0.0001, and its noise multiplier 3" in (found.reason or "")


@pytest.mark.short_cases(1)
@pytest.mark.parametrize(
    "drawn", [((2.0, None), (2.5, "poisson")), ((1.5, "poisson"), (3.0, "shuffling"))]
)
def test_together_runs_are_never_better_than_one_of_them(
    drawn: tuple[tuple[float, str | None], ...],
) -> None:
    runs = []
    for multiplier, sampling in drawn:
        stated = (
            accounting.epsilon(multiplier, 1e-4)
            if sampling is None
            else sampling_scheme(sampling, **_SIZES).epsilon(multiplier, 1e-4)
        )
        runs.append(_run(multiplier, stated, sampling))
    found = run_comparisons.composition(runs)
    assert found.epsilon is not None
    assert found.epsilon >= max(run.epsilon or 0.0 for run in runs) * (1.0 - 1e-2)


def test_a_result_without_its_sampling_does_not_say_its_noise() -> None:
    planned = {"epsilon": 1.0, "delta": 1e-4, "noise_multiplier": 2.0, "sampling": None}
    result = {
        "test_accuracy": 0.5,
        "rounds": 12,
        "privacy": {"is_private": True, "keeps_plan": True, "planned": planned},
    }
    assert repeated_runs._finished(result, 1.0).noise_multiplier == 2.0
    del planned["sampling"]
    assert repeated_runs._finished(result, 1.0).noise_multiplier is None


@pytest.mark.parametrize(("keeps_plan", "epsilon"), [(True, 1.0), (False, 9.0), (None, 9.0)])
def test_a_plan_counts_if_it_is_known_to_be_kept(keeps_plan: bool | None, epsilon: float) -> None:
    planned = {"epsilon": 1.0, "delta": 1e-4, "noise_multiplier": 2.0, "sampling": None}
    privacy: dict[str, Any] = {"is_private": True, "keeps_plan": keeps_plan, "planned": planned}
    privacy["earned"] = {**planned, "epsilon": 9.0, **INDEPENDENCE}
    result = {"test_accuracy": 0.5, "rounds": 12, "privacy": privacy}
    finished = repeated_runs._finished(result, 1.0)
    assert finished.epsilon == epsilon
    assert finished.is_observed == (keeps_plan is not True)


@pytest.mark.long
def test_sampled_runs_compose_with_others() -> None:
    runs = [_run(0.9, 2.0, "poisson")] * 2 + [_run(2.0, 1.5)]
    found = run_comparisons.composition(runs)
    sampled = sampling_scheme("poisson", **_SIZES).event(0.9)
    events = [sampled] * 2 + [accounting.event(2.0)]
    assert found.epsilon == pytest.approx(accounting.composed_epsilon(events, 1e-4), rel=1e-3)
    unamplified = 1.0 / math.sqrt(2 * 6 / 0.9**2 + 1 / 2.0**2)
    assert found.epsilon is not None
    assert found.epsilon < 0.9 * gaussian.exact_epsilon(unamplified, 1e-4)


@pytest.mark.long
@pytest.mark.short_cases(1)
@pytest.mark.parametrize("sampling", ["fixed_size", "truncated_poisson", "random_allocation"])
def test_all_drawn_runs_enter_amplified(sampling: str) -> None:
    scheme = sampling_scheme(sampling, **_SIZES)
    found = run_comparisons.composition([_run(1.9, 0.2, sampling)] * 2).epsilon
    assert found is not None
    # As the rounds of both are rounds of one run; two cycles that end early reveal a little more
    # than a whole one and a part.
    exact = dataclasses.replace(scheme, num_rounds=2 * scheme.num_rounds).epsilon(1.9, 1e-4)
    more = 1.06 if sampling == "random_allocation" else 1.005
    assert exact * (1.0 - 1e-5) <= found <= more * exact
    # A client is in at most so many rounds, whose rows no other of its rounds changes.
    one = 1.9 / math.sqrt(2 * scheme.most_participations())
    assert found < 0.9 * gaussian.exact_epsilon(one, 1e-4)


@pytest.mark.short_cases(1)
@pytest.mark.parametrize("num_bands", [4, 12])
def test_clients_that_draw_for_themselves_enter_amplified_with_their_checkpoint(
    num_bands: int, tmp_path: pathlib.Path
) -> None:
    """Also where participations share rows, of which nothing is stated without the matrix."""
    scheme = sampling_scheme(
        "balls_in_bins",
        num_rounds=12,
        num_bands=num_bands,
        population=100,
        clients_per_round=10,
        separation=10,
    )
    factorization = factorizations.banded(12, num_bands=num_bands)
    checkpoints.save(factorization, tmp_path / "factorization")
    run = dataclasses.replace(_run(3.0, 0.2), sampling=scheme)
    kept = dataclasses.replace(run, checkpoint=tmp_path / "factorization")
    found = run_comparisons.composition([kept] * 2 + [_run(8.0, 0.1)]).epsilon
    mechanism = Mechanism(factorization, scheme, 3.0)
    events = [mechanism.event()] * 2 + [accounting.event(8.0)]
    assert found == accounting.composed_epsilon(events, 1e-4)
    without = [accounting.event(mechanism.event().noise_multiplier)] * 2 + events[2:]
    assert found < 0.8 * accounting.composed_epsilon(without, 1e-4)
    gone = dataclasses.replace(run, checkpoint=tmp_path / "nothing")
    alone = run_comparisons.composition([gone] * 2 + [_run(8.0, 0.1)])
    assert (alone.epsilon is None) == (num_bands > 10)
    assert alone.epsilon is None or alone.epsilon > 1.2 * found


def test_what_is_said_of_one_run_and_of_none() -> None:
    one = run_comparisons.composition([_run(1.0, accounting.epsilon(1.0, 1e-4))])
    assert one.epsilon == accounting.epsilon(1.0, 1e-4)
    assert run_comparisons.composition_line(one).startswith("The one private run: (")
    none = run_comparisons.composition([_run(None, None)])
    assert none.epsilon is None
    assert run_comparisons.composition_line(none) == "No run is private."
