"""The times of rounds and the timers of devices: the text files of times, and the conditions.

``kernel.ledger`` says what follows from them where nobody knows who took part.
"""

import dataclasses
import datetime
import os
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from mf_aggregators.kernel import numbers
from mf_aggregators.kernel.ledger import ObservedParticipation, TimedRounds
from mf_aggregators.kernel.numbers import in_full
from mf_aggregators.privacy import ledgers
from mf_aggregators.privacy.ledgers import LedgerError

# Plain numbers are seconds of Unix, from 2001 to 2049: no minutes, milliseconds or digits of dates.
_UNIX_SECONDS = (1.0e9, 2.5e9)
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc)

_HEADINGS = {("round", "end"), ("round", "start", "end")}
_SECONDS = re.compile(r"[0-9]+(\.[0-9]+)?")


class RoundTimes(TimedRounds):
    """When rounds started and ended, and the timers that devices had.

    Attributes:
      starts: (n,) float64: seconds, when the first device can have been given a round's model. They
        never decrease.
      ends: (n,) float64: seconds by the same clock, when the last upload can have been summed. They
        never decrease, and no round ends before it starts.
      timer_hours: How long a device waits from a request that it takes part on, or from its upload,
        until it accepts another one.
      clock_drift: By what share devices' clocks may be too fast, from 0 and below 1.
      clock_margin_minutes: By how much the timer may be too short besides: clocks that are set, and
        clocks of the server that differ.
      max_participations: The most participations that devices count and allow; None if they do
        not count.

    Raises:
      ValueError: If an attribute is out of its range, times are out of order, drift and margin
        leave nothing of the timer, or a round lasted as long as what they leave.

    Example:
      >>> import numpy as np
      >>> from mf_aggregators.privacy.round_times import RoundTimes
      >>> ends = 600.0 * np.arange(1, 1001)  # a week of rounds of ten minutes
      >>> times = RoundTimes(ends - 600.0, ends, timer_hours=48.0, clock_margin_minutes=5.0)
      >>> found = times.participation()
      >>> found.separation, found.max_participations
      (287, 4)
    """

    @classmethod
    def load(cls, path: str | os.PathLike[str], timer_hours: float, **options: Any) -> "RoundTimes":
        """Reads the times of rounds from a text file.

        Args:
          path: A text file in UTF-8. Either all lines are ``round,start,end``; or the first is
            ``start,TIME``, when the first round started, and the others are ``round,end``. Rounds
            count from 0 without gaps. A time is a date with a UTC offset, such as
            ``2026-03-01T04:00:00Z``, or a number of seconds since 1970, the same for all lines. A
            heading, ``round,end`` or ``round,start,end``, and empty lines mean nothing.
          timer_hours: As the class has it.
          **options: Further attributes of the class.

        Returns:
          The times of all rounds that were released.

        Raises:
          LedgerError: If the file cannot be read, or a line has another form; with its number.
          ValueError: As the class raises it.
        """
        starts, ends = _times_of(path)
        try:
            return cls(np.array(starts), np.array(ends), timer_hours, **options)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    def participation(self) -> ObservedParticipation:
        """Returns the closest and the most participations of one device that were possible."""
        return dataclasses.replace(super().participation(), conditions=self.conditions())

    def conditions(self) -> str:
        """Returns under which conditions it holds, as sentences."""
        most = self.max_participations
        often = "once" if most == 1 else f"{most} times"
        counted = "" if most is None else f", and takes part at most {often}"
        return (
            "This holds if each device accepts no request within "
            f"{in_full(self.timer_hours)} hours of one that it took part on, by a clock that is "
            f"too fast by at most {in_full(self.clock_drift, 100)} % and "
            f"{in_full(self.clock_margin_minutes)} minutes{counted}; and if an upload is summed "
            "only between the start and the end of the round that it was made for. A device that "
            "is installed again counts from 0, and is another client unless it waits for its timer "
            "first."
        )

    def to_dict(self) -> dict[str, float | int | None]:
        """Returns the timer and its assumed errors, JSON-able."""
        return {
            "timer_hours": self.timer_hours,
            "clock_drift": self.clock_drift,
            "clock_margin_minutes": self.clock_margin_minutes,
            "timer_max_participations": self.max_participations,
        }


def _times_of(path: str | os.PathLike[str]) -> tuple[list[float], list[float]]:
    """Returns starts and ends of rounds."""
    starts: list[float] = []
    ends: list[float] = []
    kinds: set[tuple[int, bool]] = set()

    def add(_number: int, fields: Sequence[str]) -> None:
        times = [_time(field) for field in fields[1:]]
        kinds.update((len(fields), is_date) for _, is_date in times)
        if len(kinds) > 1:
            raise LedgerError(
                "it has more or fewer fields than the first line, or some times are dates and "
                "others are seconds."
            )
        first, last = times[0][0], times[-1][0]
        if len(fields) == 2 and not starts:
            if fields[0].lower() != "start":
                raise LedgerError(
                    "expected start,TIME before the first round: nothing else says when that one "
                    "started."
                )
            starts.append(first)
            return
        if ledgers.round_of(fields[0]) != len(ends):
            raise LedgerError(
                f"expected round {len(ends)}, found {numbers.shown(fields[0])}: rounds count from "
                "0, and each has one line."
            )
        if len(fields) == 3 or ends:
            starts.append(first if len(fields) == 3 else ends[-1])
        ends.append(last)

    ledgers.read_lines(path, add, _HEADINGS, "a round and its times", widths=(2, 3))
    if not ends:
        raise LedgerError(f"{path} holds no round.")
    return starts, ends


def _time(text: str) -> tuple[float, bool]:
    """Returns seconds, and whether they were written as a date."""
    if _SECONDS.fullmatch(text):
        seconds = float(text)
        if not _UNIX_SECONDS[0] <= seconds <= _UNIX_SECONDS[1]:
            raise LedgerError(
                f"{numbers.shown(text)} is no time in seconds since 1970: write these, or dates "
                "such as 2026-03-01T04:00:00Z."
            )
        return seconds, False
    date = f"{text[:-1]}+00:00" if text[-1:] in ("Z", "z") else text
    try:
        found = datetime.datetime.fromisoformat(date)
    except ValueError:
        raise LedgerError(
            f"{numbers.shown(text)} is no time: write seconds, or a date such as "
            "2026-03-01T04:00:00Z."
        ) from None
    if found.tzinfo is None:
        raise LedgerError(
            f"{numbers.shown(text)} has no UTC offset, and some times of the clock come twice "
            "a year: write it as UTC, with a Z at its end."
        )
    return (found - _EPOCH).total_seconds(), True
