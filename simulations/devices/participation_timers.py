"""Participation timers: which clients may join a round, under a participation schema.

Each device remembers when it last took part and how often, and joins only if its timer
allows it; no server could break the schema by asking. Time is counted in rounds, which
enforces a separation, or in seconds by the device's own clock, as in production, from which
a separation follows that is known only afterwards.

The memories of all devices stand in arrays that are changed in place: a round costs what the
devices in it cost, of millions.
"""

import dataclasses
import heapq
import math

import numpy as np

from mf_aggregators import validation
from mf_aggregators.participation import Participation

BYTES_PER_DEVICE = 13
_MOST_PARTICIPATIONS = np.iinfo(np.int32).max


@dataclasses.dataclass(frozen=True)
class WallClockTimer:
    """A timer by the device's clock: no participation within a time after an upload.

    Attributes:
      seconds: The time, above zero.

    Raises:
      ValueError: If the time is out of its range.
    """

    seconds: float

    def __post_init__(self) -> None:
        validation.positive_number(self.seconds, "the seconds of a timer")


class DeviceTimers:
    """The timers of many devices, changed in place.

    Time is any number that never decreases: the round, or seconds. Memory is BYTES_PER_DEVICE
    for each. What each call costs depends on the devices that it is about and on the timers
    that have run out since the last one, not on the number of devices.
    """

    def __init__(
        self, num_devices: int, period: float, limit: int | None = None, exactly: bool = False
    ) -> None:
        """Creates the timers of devices that never took part.

        Args:
          num_devices: How many.
          period: How long a timer runs, above zero.
          limit: The most participations of a device; None for no limit.
          exactly: A device may take part again only at the very moment at which its timer
            has run out, as in a fixed order of epochs.
        """
        self._period = period
        self._limit = limit
        self._exactly = exactly
        self._participations = np.zeros(num_devices, dtype=np.int32)
        # When each timer runs out: minus infinity before the first participation, and
        # infinity where there will be no other.
        self._ends = np.full(num_devices, -math.inf)
        self._eligible = np.ones(num_devices, dtype=bool)
        self._num_eligible = num_devices
        # By when they run out, devices whose timers were started. An entry is void if the
        # device's timer was changed after it.
        self._queue: list[tuple[float, int, np.ndarray]] = []
        self._num_queued = 0
        # Devices that may take part now and, if ``exactly``, never after.
        self._due: list[tuple[float, np.ndarray]] = []

    @classmethod
    def by_rounds(cls, num_devices: int, participation: Participation) -> "DeviceTimers":
        """Creates timers that count rounds and enforce a schema.

        Args:
          num_devices: How many.
          participation: The schema.
        """
        # A device that takes part once has no second participation to wait for.
        separation = participation.separation_in(1)
        return cls(num_devices, separation, participation.limit, participation.is_evenly_spaced)

    @property
    def num_eligible(self) -> int:
        """How many devices may take part at the time of the last :meth:`advance`."""
        return self._num_eligible

    def allow(self, devices: np.ndarray) -> np.ndarray:
        """Returns which of some devices may take part at the time of the last :meth:`advance`.

        Args:
          devices: (m,) int64, any order, repeats allowed.

        Returns:
          (m,) bool.
        """
        return self._eligible[devices]

    def eligible(self) -> np.ndarray:
        """Returns (num_devices,) bool, a view that later calls change: see :meth:`allow`."""
        view = self._eligible.view()
        view.flags.writeable = False
        return view

    def advance(self, now: float) -> None:
        """Lets time pass.

        Args:
          now: The time, not earlier than before.
        """
        while self._due and self._due[0][0] < now:
            end, devices = self._due.pop(0)
            self._stop_for_good(devices[self._ends[devices] == end])
        while self._queue and self._queue[0][0] <= now:
            end, _, devices = heapq.heappop(self._queue)
            devices = devices[(self._ends[devices] == end) & ~self._eligible[devices]]
            if self._exactly:
                if end < now:
                    self._stop_for_good(devices)
                    continue
                self._due.append((end, devices))
            self._eligible[devices] = True
            self._num_eligible += len(devices)

    def record(self, devices: np.ndarray, now: float) -> None:
        """Counts a participation of some devices and starts their timers.

        Args:
          devices: (m,) int64, each at most once.
          now: When the timers start.
        """
        self._participations[devices] += 1
        self._start(devices, now)

    def lose_history(self, devices: np.ndarray, latest: float, most: int) -> None:
        """Makes devices that lost their history assume the worst of it.

        Call :meth:`advance` afterwards: what they assume may be long past.

        Args:
          devices: (m,) int64, each at most once.
          latest: The latest time at which they can have taken part.
          most: The most participations that they can have had.
        """
        if self._exactly and self._limit is not None:
            # Nobody knows which moment would be theirs.
            most = self._limit
        self._participations[devices] = min(most, _MOST_PARTICIPATIONS)
        self._start(devices, latest)

    def reset(self, devices: np.ndarray) -> None:
        """Makes some devices as if they had never taken part.

        Args:
          devices: (m,) int64, each at most once.
        """
        self._num_eligible += len(devices) - int(np.count_nonzero(self._eligible[devices]))
        self._eligible[devices] = True
        self._participations[devices] = 0
        self._ends[devices] = -math.inf

    def _start(self, devices: np.ndarray, now: float) -> None:
        self._num_eligible -= int(np.count_nonzero(self._eligible[devices]))
        self._eligible[devices] = False
        if self._limit is not None:
            spent = self._participations[devices] >= self._limit
            self._ends[devices[spent]] = math.inf
            devices = devices[~spent]
        end = now + self._period
        self._ends[devices] = end
        if len(devices):
            heapq.heappush(self._queue, (end, self._num_queued, devices))
            self._num_queued += 1

    def _stop_for_good(self, devices: np.ndarray) -> None:
        self._num_eligible -= int(np.count_nonzero(self._eligible[devices]))
        self._eligible[devices] = False
        self._ends[devices] = math.inf
