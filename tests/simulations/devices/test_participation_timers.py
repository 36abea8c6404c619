"""Timers: no client ever breaks its schema, whoever is drawn."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mf_aggregators.participation import (
    MinSeparation,
    Participation,
    SingleParticipation,
)
from simulations.devices.device_populations import DeviceTimers
from tests.examples import examples
from tests.mf_aggregators import brute_force

_SCHEMAS = st.one_of(
    st.just(SingleParticipation()),
    st.builds(MinSeparation, st.integers(1, 5), st.one_of(st.none(), st.integers(1, 4))),
)


@given(
    _SCHEMAS, st.integers(1, 10), st.integers(0, 2**32 - 1), st.floats(0.1, 1.0), st.floats(0, 0.5)
)
@settings(deadline=None, max_examples=examples(300))
def test_timers_in_place_allow_what_the_schema_allows(
    schema: Participation, num_rounds: int, seed: int, share: float, loss: float
) -> None:
    """Every device against all patterns: of all its rounds, and of those that it remembers.

    With losses of history, after which devices wait: no pattern of all rounds is ever broken.
    Without any, nobody is kept out without reason.
    """
    generator = np.random.default_rng(seed)
    num_devices = 6
    timers = DeviceTimers.by_rounds(num_devices, schema)
    histories: list[tuple[int, ...]] = [()] * num_devices
    allowed = set(brute_force.patterns(schema, num_rounds)) | {()}
    losses = 0
    for round_index in range(num_rounds):
        timers.advance(round_index)
        lost = np.flatnonzero(generator.random(num_devices) < loss)
        if round_index and len(lost):
            losses += len(lost)
            most = schema.most_participations(round_index)
            timers.lose_history(lost, round_index - 1, most)
            timers.advance(round_index)
        eligible = timers.eligible().copy()
        assert timers.num_eligible == np.count_nonzero(eligible)
        np.testing.assert_array_equal(timers.allow(np.arange(num_devices)[::-1]), eligible[::-1])
        for device in range(num_devices):
            possible = (*histories[device], round_index) in allowed
            assert not eligible[device] or possible
            if not losses:
                assert eligible[device] == possible
        joining = np.flatnonzero(eligible & (generator.random(num_devices) < share))
        for device in joining:
            histories[device] = (*histories[device], round_index)
        timers.record(joining, round_index)
        assert not np.any(timers.allow(joining))
    assert set(histories) <= allowed


def test_the_wait_after_a_loss_is_no_longer_than_needed() -> None:
    """Lost before round 4, with 3 rounds between: the last time may have been round 3."""
    timers = DeviceTimers.by_rounds(2, MinSeparation(3, 3))
    timers.lose_history(np.array([1]), latest=3, most=2)
    found = []
    for round_index in range(4, 9):
        timers.advance(round_index)
        found.append(bool(timers.allow(np.array([1]))[0]))
    assert found == [False, False, True, True, True]
    timers.record(np.array([1]), 8)
    timers.advance(1000)
    # Two assumed participations and one of its own.
    assert list(timers.eligible()) == [True, False]
    assert timers.num_eligible == 1


@given(
    st.lists(st.tuples(st.floats(0.0, 5.0), st.integers(0, 2**6 - 1)), max_size=12),
    st.floats(0.1, 12.0),
    st.none() | st.integers(1, 3),
)
@settings(deadline=None, max_examples=examples(300))
def test_wall_clock_timers_count_seconds(
    steps: list[tuple[float, int]], period: float, limit: int | None
) -> None:
    """Any devices that may, at any moments, whose timers start somewhat later."""
    timers, now = DeviceTimers(6, period, limit), 0.0
    starts: list[list[float]] = [[] for _ in range(6)]
    for wait, some in steps:
        now += wait
        timers.advance(now)
        expected = [
            not since or (now >= since[-1] + period and (limit is None or len(since) < limit))
            for since in starts
        ]
        assert list(timers.eligible()) == expected
        assert timers.num_eligible == sum(expected)
        joining = [device for device in range(6) if expected[device] and some >> device & 1]
        for device in joining:
            starts[device].append(now + 0.25)
        timers.record(np.array(joining, np.int64), now + 0.25)
