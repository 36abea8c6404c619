"""Participations that the times of rounds allow, where nobody knows who took part.

Devices have a timer of H hours, and the server knows when its rounds started and ended. What
follows holds for every device, whatever it did, under three conditions:

1. A device that is summed in round i asked for its model at a time a_i not before the round's start
   s_i, and its upload arrived at a time not after the round's end e_i. A round that starts at no
   recorded time starts when the one before has ended, on whose model it depends. Uploads that are
   late are discarded.
2. The timer runs at least from that request to the next one that the device accepts. It may start
   later, as with the upload: then it lasts longer. By the server's clock the two are at least
   T = H (1 - drift) - margin apart: the device's clock is too fast by no more than the drift, and
   the margin covers by how much clocks were set and the server's clocks differ.
3. Where devices count their participations, none of them does more often than that.

So a device that is summed in rounds i < j has s_i + T <= a_i + T <= a_j <= e_j. (It is asked in the
order of rounds: starts and ends never decrease, so a_j + T <= a_i would give s_i + T <= e_i, and
such rounds are refused.) Hence j is at least next(i), the first round with e_j >= s_i + T, and the
separation is the least next(i) - i. A device is summed most often as follows: t_1 = s_0, j_1 = 0;
then j_(m+1) is the first round with e_j >= t_m + T, and t_(m+1) the later one of t_m + T and its
start. By induction every device's m-th request and round are no earlier than t_m and j_m. Both are
attained: by a device that asks and uploads at s_i, and again as late as it has to; and by one that
asks at t_1, t_2, ...

A round of T or longer could have one device twice. No guarantee covers that: it is refused.
"""

import dataclasses
import math

import numpy as np

from mf_aggregators.kernel import validation
from mf_aggregators.kernel.arrays import FloatArray, IntArray
from mf_aggregators.kernel.ledger import ObservedParticipation
from mf_aggregators.kernel.numbers import in_full

# By what share a device's clock may be too fast: more than a minute a day.
DEFAULT_CLOCK_DRIFT = 0.001
# By how much a timer may be too short besides.
DEFAULT_CLOCK_MARGIN_MINUTES = 10.0

_SECONDS_PER_HOUR = 3600.0
_TICKS_PER_SECOND = 1_000_000
# Of a time as a double, of its product with the ticks, and of sums: towards a shorter timer.
_ROUNDING_TICKS = 4
# More is no time in seconds; ticks up to here are integers that doubles have.
_LARGEST_SECONDS = 4.0e9
# More than any two times are apart: a longer timer allows as little.
_LONGEST_TIMER = 4.0 * _LARGEST_SECONDS


@dataclasses.dataclass(frozen=True, eq=False)
class TimedRounds:
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
    """

    starts: FloatArray
    ends: FloatArray
    timer_hours: float
    clock_drift: float = DEFAULT_CLOCK_DRIFT
    clock_margin_minutes: float = DEFAULT_CLOCK_MARGIN_MINUTES
    max_participations: int | None = None

    def __post_init__(self) -> None:
        for name in ("starts", "ends"):
            times = validation.real_array(getattr(self, name), name)
            if times.ndim != 1 or not len(times):
                raise ValueError(f"{name} must have one time for each round.")
            # Written so that NaN does not pass.
            if not np.all(np.abs(times) <= _LARGEST_SECONDS):
                raise ValueError(
                    f"{name} must be finite and in seconds, of Unix or since any other time."
                )
            if np.any(np.diff(times) < 0.0):
                late = int(np.argmax(np.diff(times) < 0.0)) + 1
                raise ValueError(
                    f"{name} must never decrease, and that of round {late} is before that of the "
                    "round before it: rounds are numbered in the order in which they took place."
                )
            object.__setattr__(self, name, times)
        if self.starts.shape != self.ends.shape:
            raise ValueError(
                f"there are {len(self.starts)} starts and {len(self.ends)} ends: each round has "
                "one of both."
            )
        if np.any(self.ends < self.starts):
            early = int(np.argmax(self.ends < self.starts))
            raise ValueError(f"round {early} ends before it starts.")
        validation.positive_number(self.timer_hours, "timer_hours")
        if validation.non_negative_number(self.clock_drift, "clock_drift") >= 1.0:
            raise ValueError(f"clock_drift must be below 1, found {self.clock_drift}.")
        validation.non_negative_number(self.clock_margin_minutes, "clock_margin_minutes")
        if self.max_participations is not None:
            validation.set_positive_integers(self, "max_participations")
        if self._timer_ticks() <= 0:
            raise ValueError(
                f"a timer_hours of {in_full(self.timer_hours)} leaves nothing after a clock_drift "
                f"of {in_full(self.clock_drift)} and a clock_margin_minutes of "
                f"{in_full(self.clock_margin_minutes)}."
            )
        starts, ends = self._ticks()
        longest = int(np.argmax(ends - starts))
        if ends[longest] - starts[longest] >= self._timer_ticks():
            raise ValueError(
                f"round {longest} lasted {(self.ends - self.starts)[longest] / 3600.0:.3g} hours, "
                f"and timer_hours of {in_full(self.timer_hours)} with its margins is no longer: a "
                "device may have been in it twice, which no guarantee covers. Give the time at "
                "which the round really started."
            )

    @property
    def num_rounds(self) -> int:
        """How many rounds were released."""
        return len(self.ends)

    def next_rounds(self) -> IntArray:
        """Returns (n,) int64: for each round the first one that a device of it can be in again.

        It is n where there is none.
        """
        starts, ends = self._ticks()
        return np.searchsorted(ends, starts + self._timer_ticks(), side="left")

    def participation(self) -> ObservedParticipation:
        """Returns the closest and the most participations of one device that were possible."""
        following, rounds = self.next_rounds(), self.num_rounds
        returning = np.flatnonzero(following < rounds)
        (starts, ends), timer = self._ticks(), self._timer_ticks()
        most, asked = 0, int(starts[0])
        while (at := int(np.searchsorted(ends, asked))) < rounds:
            most, asked = most + 1, max(asked, int(starts[at])) + timer
        if self.max_participations is not None:
            most = min(most, self.max_participations)
        distances = following[returning] - returning
        return ObservedParticipation(
            rounds,
            None,
            int(np.min(distances)) if most > 1 else None,
            most,
        )

    def _ticks(self) -> tuple[IntArray, IntArray]:
        """Starts rounded down and ends rounded up, as integers, whose sums are exact."""
        starts = np.floor(self.starts * _TICKS_PER_SECOND).astype(np.int64)
        ends = np.ceil(self.ends * _TICKS_PER_SECOND).astype(np.int64)
        return starts, ends

    def _timer_ticks(self) -> int:
        # Both are cut, since products may overflow. A margin as long as the timer leaves nothing.
        seconds = min(self.timer_hours * _SECONDS_PER_HOUR, _LONGEST_TIMER)
        seconds *= 1.0 - self.clock_drift
        seconds -= min(60.0 * self.clock_margin_minutes, _LONGEST_TIMER)
        return math.floor(seconds * _TICKS_PER_SECOND) - _ROUNDING_TICKS
