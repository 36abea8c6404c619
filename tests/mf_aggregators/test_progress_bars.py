"""Progress on a terminal and elsewhere."""

import io
import sys

import pytest

from mf_aggregators import progress_bars
from mf_aggregators.progress_bars import ProgressBar


class _Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class _Full(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    """The clock of lines and bars, and no line yet."""
    clock = _Clock()
    monkeypatch.setattr(progress_bars.time, "monotonic", clock)
    monkeypatch.setattr(progress_bars._PlainLines, "_due", None)
    return clock


def _work(clock: _Clock, stream: io.StringIO, seconds: int, **options: object) -> None:
    """A bar that is told of a step each second."""
    with ProgressBar(file=stream, **options) as bar:
        # Its own clock goes with the other one.
        bar._time = clock
        bar.start_t = bar.last_print_t = clock.now
        for _ in range(seconds):
            clock.now += 1.0
            bar.update()


def test_elsewhere_than_on_a_terminal_a_line_is_printed_every_thirty_seconds(
    clock: _Clock,
) -> None:
    stream = io.StringIO()
    _work(clock, stream, 100, total=200, desc="training", unit="round")
    assert stream.getvalue() == (
        "training: 30 of 200, 00:30 so far, about 02:50 left\n"
        "training: 60 of 200, 01:00 so far, about 02:20 left\n"
        "training: 90 of 200, 01:30 so far, about 01:50 left\n"
    )


def test_bars_share_the_thirty_seconds(clock: _Clock) -> None:
    stream = io.StringIO()
    for number in range(9):
        _work(clock, stream, 10, desc=f"bar {number}", unit=" evaluations")
    assert stream.getvalue().splitlines() == [
        "bar 2: 10 evaluations, 00:10 so far",
        "bar 5: 10 evaluations, 00:10 so far",
        "bar 8: 10 evaluations, 00:10 so far",
    ]


def test_a_line_has_what_was_added_to_it_and_sizes_are_short(clock: _Clock) -> None:
    stream = io.StringIO()
    with ProgressBar(file=stream, total=4e9, unit="B", unit_scale=True, desc="hashing") as bar:
        bar.set_postfix_str("loss 3", refresh=False)
        clock.now += 31.0
        bar.n = 2_500_000_000
        bar.refresh()
    line = stream.getvalue().splitlines()[0]
    assert line.startswith("hashing: 2.50G of 4.00G, ")
    assert line.endswith(", loss 3")


def test_short_work_prints_nothing_elsewhere_than_on_a_terminal(clock: _Clock) -> None:
    stream = io.StringIO()
    _work(clock, stream, 20, total=20)
    ProgressBar.write("said", file=stream)
    assert stream.getvalue() == "said\n"


def test_a_terminal_has_a_bar(clock: _Clock) -> None:
    stream = _Terminal()
    _work(clock, stream, 3, total=3, desc="training")
    assert "\rtraining: 100%|" in stream.getvalue()


def test_work_goes_on_without_a_standard_error(
    clock: _Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = io.StringIO()
    closed.close()
    for stream in (None, closed, _Full()):
        monkeypatch.setattr(sys, "stderr", stream)
        with ProgressBar(range(3)) as bar:
            for _ in bar:
                clock.now += 100.0
                bar.refresh()
