"""Availability: the models against one device and one moment at a time, and their statistics.

Statistical tests use fixed seeds. Each refuses a correct model with a probability of at most
1e-4 over the choice of its seed.
"""

import dataclasses
import pathlib
from typing import Any

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from mf_aggregators.participation import BallsInBins, MinSeparationSampling
from simulations.devices import device_behaviour
from simulations.devices.device_behaviour import (
    Always,
    Availability,
    AvailableClients,
    Diurnal,
    Independent,
    Trace,
    TraceError,
)
from tests.examples import examples
from tests.refusals import refuses

_FALSE_ALARM = 1e-4
_MASK = 2**64 - 1
_STEP = 0x9E3779B97F4A7C15
_SEEDS = st.integers(0, 2**128 - 1)


def _finalised(state: int) -> int:
    """SplitMix64's output of a state, in integers of Python."""
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)


def _scalar_uniform(seed: int, purpose: int, device: int, *coordinates: int) -> float:
    sequence = np.random.SeedSequence(seed, spawn_key=(purpose,))
    key = int(sequence.generate_state(1, np.uint64)[0])
    state = _finalised((key + device * _STEP) & _MASK)
    for coordinate in coordinates:
        state = _finalised(((state ^ ((coordinate * _STEP) & _MASK)) + _STEP) & _MASK)
    return (state >> 11) / 2.0**53


def test_the_scalar_hash_is_splitmix64() -> None:
    """The first outputs of its reference implementation for the seed 1234567."""
    outputs = [_finalised((1234567 + (i + 1) * _STEP) & _MASK) for i in range(3)]
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@given(
    _SEEDS,
    st.integers(0, 9),
    st.lists(st.integers(0, 2**62), min_size=1, max_size=5),
    st.lists(st.integers(0, _MASK), max_size=3),
)
def test_uniform_numbers_are_those_of_one_device_at_a_time(
    seed: int, purpose: int, devices: list[int], coordinates: list[int]
) -> None:
    found = device_behaviour.uniform(seed, purpose, np.array(devices), *coordinates)
    expected = [_scalar_uniform(seed, purpose, device, *coordinates) for device in devices]
    assert list(found) == expected


def test_independent_devices_have_their_probability_at_each_time() -> None:
    model, devices = Independent(0.3), np.arange(100_000)
    moments = [(0.0, 0), (300.0, 1), (600.0, 1), (600.0, 2)]
    found = [model.available(devices, seconds, index, 5) for seconds, index in moments]
    for available in found:
        test = scipy.stats.binomtest(int(np.sum(available)), len(devices), 0.3)
        assert test.pvalue > _FALSE_ALARM / 10
    for i in range(len(moments)):
        for j in range(i):
            both = int(np.sum(found[i] & found[j]))
            test = scipy.stats.binomtest(both, len(devices), 0.09)
            assert test.pvalue > _FALSE_ALARM / 10
    assert np.array_equal(found[1], model.available(devices, 300.0, 1, 5))
    assert not np.array_equal(found[1], model.available(devices, 300.0, 1, 6))
    assert np.all(Independent(1.0).available(devices, 0.0, 0, 0))


def _diurnals() -> st.SearchStrategy[Diurnal]:
    @st.composite
    def draw_one(draw: st.DrawFn) -> Diurnal:
        hours = st.floats(-12.0, 14.0)
        offsets = tuple(draw(st.lists(hours, min_size=1, max_size=4)))
        weights = st.tuples(*[st.floats(0.1, 3.0)] * len(offsets))
        shortest = draw(st.floats(0.1, 24.0))
        return Diurnal(
            utc_offsets=offsets,
            utc_weights=draw(st.none() | weights),
            window_start_hour=draw(st.floats(0.0, 23.9)),
            window_spread_hours=draw(st.floats(0.0, 12.0)),
            shortest_window_hours=shortest,
            longest_window_hours=draw(st.floats(shortest, 24.0)),
            nightly_probability=draw(st.floats(0.1, 1.0)),
        )

    return draw_one()


def _scalar_diurnal(model: Diurnal, device: int, seconds: float, seed: int) -> bool | None:
    """One night after the other, until one holds the moment; None at the edge of a window."""
    weights = model.utc_weights or (1.0,) * len(model.utc_offsets)
    number, zone = _scalar_uniform(seed, 1, device), 0
    while zone < len(weights) - 1 and number >= sum(weights[: zone + 1]) / sum(weights):
        zone += 1
    start = model.window_start_hour - model.utc_offsets[zone]
    start += model.window_spread_hours * (2.0 * _scalar_uniform(seed, 2, device) - 1.0)
    length = model.shortest_window_hours
    length += (model.longest_window_hours - model.shortest_window_hours) * _scalar_uniform(
        seed, 3, device
    )
    for night in range(-3, int(seconds // 86400) + 3):
        since = seconds - 3600.0 * start - 86400.0 * night
        if min(abs(since), abs(since - 3600.0 * length)) < 1e-3:
            return None
        if 0.0 <= since < min(3600.0 * length, 86400.0):
            return _scalar_uniform(seed, 4, device, night % 2**64) < model.nightly_probability
    return False


@given(_diurnals(), st.floats(0.0, 1e6), _SEEDS)
@settings(deadline=None, max_examples=examples(200))
def test_diurnal_devices_are_those_of_one_device_at_a_time(
    model: Diurnal, seconds: float, seed: int
) -> None:
    found = model.available(np.arange(40), seconds, 0, seed)
    for device in range(40):
        expected = _scalar_diurnal(model, device, seconds, seed)
        assert expected is None or found[device] == expected


@given(_diurnals(), st.floats(0.0, 1e6), _SEEDS)
@settings(deadline=None, max_examples=examples(200))
def test_nobody_is_available_when_that_is_said_to_be_impossible(
    model: Diurnal, seconds: float, seed: int
) -> None:
    if not model.is_possible(seconds):
        assert not np.any(model.available(np.arange(2000), seconds, 0, seed))


_SPANS = st.lists(
    st.tuples(st.integers(0, 4), st.integers(0, 20), st.integers(1, 8)), min_size=1, max_size=25
)


@given(_SPANS, st.integers(0, 70), st.sampled_from([None, 28.0, 40.0]))
@settings(deadline=None, max_examples=examples(300))
def test_a_trace_is_the_union_of_its_spans(
    spans: list[tuple[int, int, int]], moment: int, period: float | None
) -> None:
    table = np.array(spans)
    trace = Trace(table[:, 0], table[:, 1], table[:, 1] + table[:, 2], period)
    within = moment if period is None else moment % period
    devices = [4, 0, 1, 6, 2, 3, 0]
    expected = [
        any(device == d and start <= within < start + length for d, start, length in spans)
        for device in devices
    ]
    assert list(trace.available(np.array(devices), float(moment), 0, 0)) == expected
    if any(expected):
        assert trace.is_possible(float(moment))
    assert trace.largest_device == max(device for device, _, _ in spans)


@pytest.mark.parametrize("kind", ["text", "heading", "marked", "npz", "NPZ"])
def test_traces_are_read(tmp_path: pathlib.Path, kind: str) -> None:
    path = tmp_path / (f"trace.{kind}" if kind.lower() == "npz" else "trace.csv")
    if kind.lower() == "npz":
        with path.open("wb") as file:
            np.savez(file, device=[2, 0], start_seconds=[1.5, 0.0], end_seconds=[3.0, 2.0])
    else:
        heading = "device,start_seconds,end_seconds\n" if kind == "heading" else ""
        # A spreadsheet saves the file with a byte order mark in front.
        encoding = "utf-8-sig" if kind == "marked" else "utf-8"
        path.write_text(f"{heading}2,1.5,3\n0,0,2\n", encoding=encoding)
    trace = Trace.load(path)
    assert trace.largest_device == 2
    assert list(trace.available(np.arange(3), 1.5, 0, 0)) == [True, False, True]
    assert list(trace.available(np.arange(3), 2.5, 0, 0)) == [False, False, True]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "span"),
        ("0,1\n", "2 columns"),
        ("0,1,2\n0,x,2\n", "cannot be used as a trace of device,start_seconds,end_seconds"),
        ("0,1,2\n3,4,4\n", "span 2 of the trace is 4 to 4 of device 3"),
        ("0.5,1,2\n", "whole numbers"),
        ("-1,1,2\n", "whole numbers"),
        ("1,nan,2\n", "finite"),
        ("1,3,11\n", "period"),
    ],
)
def test_bad_traces_are_refused(tmp_path: pathlib.Path, text: str, named: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with refuses(str(path), named, error=TraceError):
        Trace.load(path, period_seconds=10.0)


@pytest.mark.parametrize(
    ("build", "arguments"),
    [
        (Independent, {"available_probability": 0.0}),
        (Diurnal, {"utc_offsets": (15.0,)}),
        (Diurnal, {"utc_weights": (1.0,)}),
        (Diurnal, {"utc_offsets": (1.0,), "utc_weights": (0.0,)}),
        (Diurnal, {"window_start_hour": 24.1}),
        (Diurnal, {"shortest_window_hours": 0.0}),
        (Diurnal, {"longest_window_hours": 3.0}),
    ],
)
def test_bad_models_are_refused(build: type[Any], arguments: dict[str, Any]) -> None:
    with refuses([*arguments][-1]):
        build(**arguments)


_SCHEMES: list[MinSeparationSampling | BallsInBins] = [
    MinSeparationSampling(40, 3, 6500, 500, 4),
    BallsInBins(40, 3, 6500, 1625, 4),
]


@dataclasses.dataclass(frozen=True)
class _Recorded(Availability):
    """Even devices are available after the first ten rounds; what is asked is kept."""

    asked: list[tuple[float, int, int]]

    def available(
        self, devices: np.ndarray, seconds: float, round_index: int, seed: int
    ) -> np.ndarray:
        self.asked.append((seconds, round_index, seed))
        return (devices % 2 == 0) & (round_index >= 10)


@pytest.mark.parametrize("scheme", _SCHEMES, ids=str)
def test_absences_do_not_move_later_rounds(scheme: MinSeparationSampling | BallsInBins) -> None:
    """A timer starts in every round that its coin says, whoever could be asked in it."""
    sampler = scheme.sampler(3)
    availability: Availability = _Recorded([])
    available = AvailableClients(sampler, availability, 8, 300.0)
    assert available.scheme == scheme
    for index in range(scheme.num_rounds):
        drawn = sampler.draw(index)
        expected = drawn[drawn % 2 == 0] if index >= 10 else drawn[:0]
        np.testing.assert_array_equal(available.draw(index), expected)
        assert available.num_eligible(index) == sampler.num_eligible(index)
    assert isinstance(availability, _Recorded)
    assert availability.asked == [(300.0 * index, index, 8) for index in range(40)]


@pytest.mark.parametrize("scheme", _SCHEMES, ids=str)
def test_each_drawn_client_is_there_with_the_probability_of_availability(
    scheme: MinSeparationSampling | BallsInBins,
) -> None:
    """A binomial test of all rounds, which a correct sampler fails for 1e-4 of all seeds."""
    sampler = scheme.sampler(3)
    available = AvailableClients(sampler, Independent(0.7), 9, 300.0)
    there = sum(len(available.draw(index)) for index in range(40))
    drawn = sum(len(sampler.draw(index)) for index in range(40))
    assert scipy.stats.binomtest(there, drawn, 0.7).pvalue > _FALSE_ALARM
    again = AvailableClients(scheme.sampler(3), Independent(0.7), 9, 300.0)
    np.testing.assert_array_equal(again.draw(7), available.draw(7))


@pytest.mark.parametrize("scheme", _SCHEMES, ids=str)
def test_ledgers_with_absences_are_those_of_the_scheme(
    scheme: MinSeparationSampling | BallsInBins,
) -> None:
    sampler = scheme.sampler(4)
    available = AvailableClients(sampler, Independent(0.5), 9, 300.0)
    cohorts = [available.draw(index) for index in range(40)]
    assert available.deviation(6500, cohorts) is None
    found = sampler.deviation(6500, cohorts)
    assert found == "the clients of round 1 (counted from 1) are not those that the sampler draws"
    assert sampler.deviation(6500, cohorts, may_be_absent=True) is None
    everybody = AvailableClients(sampler, Always(), 9, 300.0)
    np.testing.assert_array_equal(everybody.draw(5), sampler.draw(5))
