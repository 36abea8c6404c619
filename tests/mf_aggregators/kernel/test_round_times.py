"""Rounds that one device can be in by its timer: against all that it can do, at whole seconds."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mf_aggregators.kernel.round_times import TimedRounds
from tests.examples import examples
from tests.refusals import refuses

_HOUR = 3600.0


@st.composite
def _times(draw: st.DrawFn, most_rounds: int = 9) -> tuple[np.ndarray, np.ndarray]:
    """Starts and ends in whole seconds, rounds that overlap among them."""
    number = draw(st.integers(1, most_rounds))
    gaps = st.lists(st.integers(0, 4), min_size=number, max_size=number)
    starts = np.cumsum(draw(gaps)).astype(float)
    ends = np.maximum.accumulate(starts + np.array(draw(gaps), float))
    return starts, ends


def _patterns(starts: np.ndarray, ends: np.ndarray, seconds: float) -> list[tuple[int, ...]]:
    """All sets of rounds that one device can be summed in, by what it does at which second.

    It asks at whole seconds in the course of a round, and not sooner than its timer allows.
    """
    found: set[tuple[int, ...]] = {()}
    waiting: list[tuple[tuple[int, ...], float]] = [((), -np.inf)]
    while waiting:
        rounds, allowed = waiting.pop()
        for following in range(len(starts)):
            if following in rounds:
                continue
            for asked in np.arange(starts[following], ends[following] + 1.0):
                if asked >= allowed:
                    pattern = tuple(sorted((*rounds, following)))
                    found.add(pattern)
                    waiting.append((pattern, asked + seconds))
                    break
    return sorted(found)


@given(_times(), st.integers(1, 12), st.none() | st.integers(1, 3))
@example((np.array([0.0, 4.0, 6.0]), np.array([0.0, 4.0, 6.0])), 3, None)
@settings(deadline=None, max_examples=examples(100))
def test_times_allow_what_some_device_can_do_and_no_more(
    times: tuple[np.ndarray, np.ndarray], seconds: int, most: int | None
) -> None:
    """Against the enumeration of all that one device can do, of any round it likes first."""
    starts, ends = times
    if np.max(ends - starts) >= seconds:
        with refuses("timer_hours"):
            TimedRounds(starts, ends, seconds / _HOUR, 0.0, 0.0)
        return
    found = TimedRounds(starts, ends, seconds / _HOUR, 0.0, 0.0, most).participation()
    patterns = [each for each in _patterns(starts, ends, seconds) if len(each) <= (most or 99)]
    distances = [j - i for each in patterns for i, j in itertools.pairwise(each)]
    assert found.separation == min(distances, default=None)
    assert found.max_participations == max(map(len, patterns))
    assert (found.num_rounds, found.num_clients) == (len(starts), None)


@pytest.mark.parametrize(
    ("named", "changes"),
    [
        ("starts", {"starts": np.array([0.0, 20.0, 10.0])}),
        ("ends", {"ends": np.array([20.0, 10.0, 30.0])}),
        ("ends", {"ends": np.array([10.0, 20.0])}),
        ("ends", {"ends": np.array([10.0, 20.0, np.nan])}),
        ("ends", {"ends": np.array([10.0, 20.0, 4.1e9])}),
        ("round 2", {"ends": np.array([10.0, 20.0, 20.0]), "starts": np.array([0.0, 1.0, 21.0])}),
        ("starts", {"starts": np.empty(0), "ends": np.empty(0)}),
        ("timer_hours", {"timer_hours": 0.0}),
        ("timer_hours", {"timer_hours": 0.1}),
        ("timer_hours", {"timer_hours": np.inf}),
        ("timer_hours", {"ends": np.array([10.0, 20.0, 2 * _HOUR])}),
        ("clock_drift", {"clock_drift": 1.0}),
        ("clock_drift", {"clock_drift": -0.1}),
        ("clock_margin_minutes", {"clock_margin_minutes": -1.0}),
        ("clock_margin_minutes", {"clock_margin_minutes": 60.0}),
        ("max_participations", {"max_participations": 0}),
    ],
)
def test_what_is_out_of_range_is_refused(named: str, changes: dict[str, object]) -> None:
    times = TimedRounds(np.array([0.0, 10.0, 20.0]), np.array([10.0, 20.0, 30.0]), 1.0)
    with refuses(named):
        dataclasses.replace(times, **changes)  # type: ignore[arg-type]


def test_drift_and_margin_shorten_the_timer() -> None:
    """By hand: 10 hours less 1 % and 6 minutes are 9.8 hours."""
    ends = np.array([0.5, 9.7, 9.8, 20.0]) * _HOUR
    starts = np.array([0.0, 0.5, 9.7, 9.8]) * _HOUR
    with refuses("round 3", "timer_hours"):
        TimedRounds(starts, ends, 10.0, 0.01, 6.0)
    starts[3] = 19.9 * _HOUR
    times = TimedRounds(starts, ends, 10.0, 0.01, 6.0)
    assert list(times.next_rounds()) == [2, 3, 3, 4]
    assert dataclasses.replace(times, clock_margin_minutes=5.0).next_rounds()[0] == 3
    assert dataclasses.replace(times, clock_drift=0.009).next_rounds()[0] == 3


def test_times_are_rounded_by_four_microseconds() -> None:
    """Towards a shorter timer, so that floats hide no participation."""
    for early, following in ((4e-6, 1), (5e-6, 2)):
        ends = np.array([1.0, _HOUR - early])
        assert (
            TimedRounds(np.array([0.0, 3590.0]), ends, 1.0, 0.0, 0.0).next_rounds()[0] == following
        )


def test_clocks_differ_by_default() -> None:
    times = TimedRounds(np.array([0.0]), np.array([1.0]), 1.0)
    assert (times.clock_drift, times.clock_margin_minutes) == (0.001, 10.0)
