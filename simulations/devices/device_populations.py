"""Simulates which devices of a population take part in each round of a federated run.

A server that starts a round meets the devices that are available just then, selects some
more of them than it needs among those whose timers allow it, loses some before they upload
and some uploads on the way, and sums the first ones that arrive. A device starts its timer
when it uploads, because it cannot know what became of the upload; the timer of a device
whose update was not summed runs as well. (Bonawitz et al. 2019, Towards Federated Learning at
Scale, Sec. 2 and 3, describe the protocol; the participation timers are those of MF-DP-FTRL.) An
attempt at a round that is abandoned releases nothing, and the timers of its devices run on.

What counts towards a guarantee is a participation whose upload was summed. Timers by rounds
enforce a schema whatever the devices do. Timers by the wall clock enforce a time, and the
separation in rounds is what it turns out to be.
"""

import collections
import dataclasses
import itertools
import math

import numpy as np

from mf_aggregators import inputs, random_streams
from mf_aggregators import participation as participations
from mf_aggregators.kernel import numbers
from mf_aggregators.kernel.numbers import Error, counted
from mf_aggregators.participation import Participation
from mf_aggregators.random_streams import Stream
from simulations.devices.device_behaviour import REJOIN, DeviceBehaviour

# Memory for each device: its timer takes 13 bytes, and its place among the candidates for a cohort
# 8.
_BYTES_PER_DEVICE = 21
_MOST_PARTICIPATIONS = np.iinfo(np.int32).max
# The second coordinate of each random generator in this file, so that their draws are independent.
_SELECTION = 0
_HISTORY = 1
_BROKEN = 2

# How many devices are asked for their availability at once: few enough for a processor's cache.
_BLOCK = 2**16
# If devices are drawn one by one, at most this share of the population; beyond it, asking every
# device costs no more.
_MOST_DRAWN = 0.25
_MOST_GROWTH = 8

# The counters of DeviceRound for uploads of selected devices that are not summed, in the order of
# the steps of a round.
_NOT_SUMMED = ("num_dropped_out", "num_uploads_lost", "num_uploads_late", "num_discarded")

_ADVICE = (
    "Use fewer clients per round, a larger over-selection, a smaller separation or a shorter "
    "timer, more participations per client, more or later attempts, or fewer rounds."
)


class TooFewEligibleClientsError(Error, ValueError):
    """Fewer clients may join a round than its cohort needs; the message has advice.

    Attributes:
      found: The finding, as a sentence.
      to_go_on: The flags with which this round may still take place; empty if there are none.
    """

    def __init__(self, found: str, to_go_on: str) -> None:
        """Creates the error from the finding and the flags that allow the round to take place."""
        super().__init__(f"{found} {_ADVICE}")
        self.found, self.to_go_on = found, to_go_on


@dataclasses.dataclass(frozen=True, eq=False)
class DeviceRound:
    """Record of one simulated round: its cohort, times and attempts, and counts of devices.

    ``num_selected`` is the size of the cohort and the four numbers after it together; they are
    summed over the attempts.

    Attributes:
      round_index: The round, from 0.
      cohort: (clients,) int64: increasing, the devices whose uploads were summed. As many as the
        clients per round, or fewer, down to the fewest uploads that close a round.
      start_seconds: When its last attempt, which succeeded, started; since the first attempt
        of the first round.
      attempts: How often the server started the round.
      num_eligible: How many devices' timers allowed them to join the last attempt. Exact.
      num_available: How many of these were available then: exact if ``available_is_exact``,
        or else estimated from those that were asked.
      available_is_exact: Whether ``num_available`` is exact.
      num_selected: The number of devices that were selected.
      num_dropped_out: Selected devices that gave up before they uploaded.
      num_uploads_lost: Selected devices whose upload did not arrive.
      num_uploads_late: Selected devices whose upload arrived after the attempt.
      num_discarded: Selected devices whose upload arrived in time and was not summed, because
        enough others had arrived before, or in an attempt that was abandoned.
      num_abandoned: Attempts that devices were selected for, and of which nothing was released.
    """

    round_index: int
    cohort: np.ndarray
    start_seconds: float
    attempts: int
    num_eligible: int
    num_available: int
    available_is_exact: bool = True
    num_selected: int = 0
    num_dropped_out: int = 0
    num_uploads_lost: int = 0
    num_uploads_late: int = 0
    num_discarded: int = 0
    num_abandoned: int = 0


class DeviceTimers:
    """Participation timers of many devices, with each device's participations; changed in place.

    Time is any number that never decreases: the round, or seconds. Memory is 13 bytes
    for each. What each call costs depends on the devices that it is about and on the timers
    that have run out since the last one, not on the number of devices.
    """

    def __init__(self, num_devices: int, period: float, limit: int | None = None) -> None:
        """Creates the timers of devices that never took part.

        Args:
          num_devices: How many.
          period: How long a timer runs, above zero.
          limit: The most participations of a device; None for no limit.
        """
        self._period = period
        self._limit = limit
        self._participations = np.zeros(num_devices, dtype=np.int32)
        # When each device's timer runs out: minus infinity before its first participation, and
        # infinity if it may not take part again.
        self._ends = np.full(num_devices, -math.inf)
        self._eligible = np.ones(num_devices, dtype=bool)
        self._num_eligible = num_devices
        # A queue of (time, devices with timers that end at that time), in the order of times. An
        # entry is void for a device if its timer was changed later.
        self._queue: collections.deque[tuple[float, np.ndarray]] = collections.deque()

    @classmethod
    def by_rounds(cls, num_devices: int, participation: Participation) -> "DeviceTimers":
        """Creates timers that count rounds and enforce a schema."""
        # If devices take part once only, no timer has to run: any period does.
        separation = participation.separation_in(1)
        return cls(num_devices, separation, participation.limit)

    @property
    def num_eligible(self) -> int:
        """The number of devices that timers allow to take part, at the time last set."""
        return self._num_eligible

    def allow(self, devices: np.ndarray) -> np.ndarray:
        """Returns (m,) bool, which of (m,) devices their timers allow to take part now."""
        return self._eligible[devices]

    def eligible(self) -> np.ndarray:
        """Returns :meth:`allow` of all devices, (num_devices,) bool; later calls change it."""
        view = self._eligible.view()
        view.flags.writeable = False
        return view

    def advance(self, now: float) -> None:
        """Sets the time of the timers to ``now``, which may not be earlier than the time before."""
        while self._queue and self._queue[0][0] <= now:
            end, devices = self._queue.popleft()
            devices = devices[(self._ends[devices] == end) & ~self._eligible[devices]]
            self._eligible[devices] = True
            self._num_eligible += len(devices)

    def record(self, devices: np.ndarray, now: float) -> None:
        """Counts a participation of (m,) devices, each at most once, and starts their timers."""
        self._participations[devices] += 1
        self._start(devices, now)

    def lose_history(self, devices: np.ndarray, latest: float, most: int) -> None:
        """Makes devices that forgot their participations assume that they took part last and most.

        Call :meth:`advance` afterwards: what they assume may be long past.

        Args:
          devices: (m,) int64, each at most once.
          latest: The latest time at which they can have taken part.
          most: The most participations that they can have had.
        """
        self._participations[devices] = min(most, _MOST_PARTICIPATIONS)
        self._start(devices, latest)

    def reset(self, devices: np.ndarray) -> None:
        """Resets the timers of (m,) devices, as if these had never taken part."""
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
            self._queue.append((end, devices))


class DevicePopulation:
    """Simulated population of devices, which yields who takes part in each round of a run.

    Changed in place by each round, for speed. What a round draws is a function of the seed,
    the round, the attempt and the rounds before: a population that was created with the same
    arguments and has run the same number of rounds is in the same state.
    """

    def __init__(
        self,
        num_devices: int,
        participation: Participation,
        clients_per_round: int,
        behaviour: DeviceBehaviour | None = None,
        seed: int = 0,
    ) -> None:
        """Creates a population of devices before the first round.

        Args:
          num_devices: The population.
          participation: What timers by rounds enforce. Timers by the wall clock take the most
            participations of a device from it, and nothing else.
          clients_per_round: How many uploads a round needs: it is closed with them.
          behaviour: What the devices do; nothing goes wrong by default.
          seed: Any non-negative integer.

        Raises:
          ValueError: If an argument is out of its range, rounds are closed with more uploads than
            they need, the schema is one of exact distances, or a trace names a device that does
            not exist.
        """
        behaviour = DeviceBehaviour() if behaviour is None else behaviour
        self._num_devices = numbers.positive_integer(num_devices, "num_devices")
        inputs.check_memory(
            _BYTES_PER_DEVICE * self._num_devices,
            f"a population of {self._num_devices} devices",
            "use a smaller population",
        )
        self._participation = participations.check(participation)
        self._clients_per_round = numbers.positive_integer(clients_per_round, "clients_per_round")
        self._behaviour = behaviour
        self._fewest = behaviour.fewest_uploads(self._clients_per_round)
        self._seed = numbers.integer_at_least(seed, 0, "seed")
        self._round_index = 0
        # When the next round starts, in seconds since the first attempt of the first round.
        self.seconds = 0.0
        if participation.is_evenly_spaced:
            raise ValueError("timers enforce only a least separation: use MinSeparation.")
        if behaviour.timer_seconds is None:
            self._timers = DeviceTimers.by_rounds(num_devices, participation)
        else:
            self._timers = DeviceTimers(num_devices, behaviour.timer_seconds, participation.limit)
        behaviour.availability.check_population(num_devices)
        # The devices with broken timers: an (r,) int64 array of increasing device numbers.
        self.broken = np.empty(0, np.int64)
        if behaviour.broken_timers > 0.0:
            number = max(1, round(behaviour.broken_timers * self._num_devices))
            generator = random_streams.generator_of(self._seed, Stream.DEVICES, _BROKEN)
            self.broken = generator.choice(self._num_devices, size=number, replace=False)
            self.broken.sort()

    def change(self, behaviour: DeviceBehaviour) -> None:
        """Changes the server's behaviour from the next round on; that of devices stays.

        Args:
          behaviour: The new behaviour; only flags of ``device_behaviour.MAY_CHANGE`` may differ.

        Raises:
          ValueError: If rounds would be closed with more uploads than they need.
        """
        self._fewest = behaviour.fewest_uploads(self._clients_per_round)
        self._behaviour = behaviour

    def follow(self, cohort: np.ndarray) -> bool:
        """Repeats a round with the cohort that it had, and returns whether that is possible.

        Undisturbed devices (:attr:`DeviceBehaviour.is_undisturbed`) remember nothing but the
        cohort, and the given cohort is taken without a draw. For other devices the round is drawn
        again. If the given cohort differs from the drawn one, it is a cohort of another population;
        this population is of no further use then.
        """
        if self._behaviour.is_undisturbed:
            self._timers.advance(self._round_index)
            self._timers.record(np.asarray(cohort, dtype=np.int64), self._round_index)
            self._finish_round(self.seconds)
            return True
        try:
            return np.array_equal(self.next_round().cohort, cohort)
        except TooFewEligibleClientsError:
            return False

    def next_round(self) -> DeviceRound:
        """Simulates the next round and returns its record, with the cohort.

        Raises:
          TooFewEligibleClientsError: If the timers leave too few devices, or no attempt
            ended with enough uploads. The population is of no further use.
        """
        if self._behaviour.is_undisturbed:
            return self._undisturbed_round()
        index, behaviour = self._round_index, self._behaviour
        self._lose_histories()
        self._timers.advance(self._now(self.seconds))
        lost = dict.fromkeys(_NOT_SUMMED, 0)
        selected = abandoned = 0
        num_available, is_exact = 0, True
        for attempt in range(behaviour.max_attempts):
            seconds = self.seconds + attempt * behaviour.retry_seconds
            self._timers.advance(self._now(seconds))
            num_eligible = self._timers.num_eligible
            if num_eligible < self._fewest and behaviour.timer_seconds is None:
                # If timers count rounds, none runs out during a round: further attempts cannot
                # help.
                raise self._too_few(1, num_eligible, is_final=True)
            generator = random_streams.generator_of(
                self._seed, Stream.DEVICES, _SELECTION, index, attempt
            )
            devices, num_available, is_exact = self._select(generator, seconds)
            if len(devices) < self._fewest:
                continue
            selected += len(devices)
            uploading = _kept(devices, behaviour.dropout_probability, generator)
            self._timers.record(
                self._working(uploading), self._now(seconds + behaviour.round_seconds)
            )
            received = _kept(uploading, behaviour.upload_loss_probability, generator)
            in_time = _kept(received, behaviour.late_upload_probability, generator)
            gives_up = behaviour.abandonment_probability
            is_abandoned = len(in_time) < self._fewest or (
                gives_up > 0.0 and generator.random() < gives_up
            )
            # The devices are in random order, so the first ones of the list are a random choice of
            # those that uploaded in time.
            cohort = np.sort(in_time[: 0 if is_abandoned else self._clients_per_round])
            steps = [devices, uploading, received, in_time, cohort]
            for name, (before, after) in zip(lost, itertools.pairwise(steps), strict=True):
                lost[name] += len(before) - len(after)
            if is_abandoned:
                abandoned += 1
                continue
            self._finish_round(seconds)
            return DeviceRound(
                round_index=index,
                cohort=cohort,
                start_seconds=seconds,
                attempts=attempt + 1,
                num_eligible=num_eligible,
                num_available=num_available,
                available_is_exact=is_exact,
                num_selected=selected,
                num_abandoned=abandoned,
                **lost,
            )
        eligible = self._timers.num_eligible
        raise self._too_few(behaviour.max_attempts, min(num_available, eligible))

    def starves(
        self, num_rounds: int
    ) -> tuple[TooFewEligibleClientsError | None, tuple[np.ndarray, ...]]:
        """Runs a number of rounds, and stops at the first round that finds too few devices.

        Returns:
          The refusal, None if all rounds took place, and the cohorts of those that did.
        """
        cohorts: list[np.ndarray] = []
        try:
            for _ in range(num_rounds):
                cohorts.append(self.next_round().cohort)
        except TooFewEligibleClientsError as error:
            return error, tuple(cohorts)
        return None, tuple(cohorts)

    def _undisturbed_round(self) -> DeviceRound:
        index, start = self._round_index, self.seconds
        self._timers.advance(index)
        num_eligible = self._timers.num_eligible
        cohort = draw_cohort(self._timers.eligible(), self._clients_per_round, self._seed, index)
        self._timers.record(cohort, index)
        self._finish_round(start)
        return DeviceRound(
            index, cohort, start, 1, num_eligible, num_eligible, num_selected=len(cohort)
        )

    def _finish_round(self, start_seconds: float) -> None:
        self._round_index += 1
        self.seconds = start_seconds + self._behaviour.round_seconds

    def _now(self, seconds: float) -> float:
        """Returns the time in the timers' unit: rounds, or seconds for timers by the wall clock."""
        return self._round_index if self._behaviour.timer_seconds is None else seconds

    def _lose_histories(self) -> None:
        """Lets some devices forget their participations, before each round but the first."""
        index, behaviour = self._round_index, self._behaviour
        if behaviour.history_loss_probability == 0.0 or index == 0:
            return
        generator = random_streams.generator_of(self._seed, Stream.DEVICES, _HISTORY, index)
        number = generator.binomial(self._num_devices, behaviour.history_loss_probability)
        devices = generator.choice(self._num_devices, size=number, replace=False, shuffle=False)
        self._timers.advance(self._now(self.seconds))
        if behaviour.after_history_loss == REJOIN:
            self._timers.reset(devices)
            return
        if behaviour.timer_seconds is None:
            schema = self._participation
            latest: float = index - 1
            most = schema.most_participations(index)
        else:
            latest = self.seconds
            # The first upload came at the end of the first round. The 1e-9 covers rounding: a
            # larger number of participations is the safe assumption.
            since_first = self.seconds - behaviour.round_seconds
            most = math.floor(since_first / behaviour.timer_seconds + 1e-9) + 1
        self._timers.lose_history(self._working(devices), latest, most)

    def _working(self, devices: np.ndarray) -> np.ndarray:
        """Returns those of some devices with working timers; only these remember participations."""
        if not len(self.broken):
            return devices
        places = np.searchsorted(self.broken, devices)
        return devices[self.broken.take(places, mode="clip") != devices]

    def _select(
        self, generator: np.random.Generator, seconds: float
    ) -> tuple[np.ndarray, int, bool]:
        """Selects devices uniformly among those that are available and that their timers allow.

        Returns the selected devices in random order, how many could have joined, and whether that
        number is exact.
        """
        behaviour = self._behaviour
        num_eligible = self._timers.num_eligible
        # The server selects at most all devices.
        wanted = math.ceil(
            min(self._clients_per_round * behaviour.over_selection, self._num_devices)
        )
        always = behaviour.availability.is_always
        possible = behaviour.availability.is_possible(seconds)
        if num_eligible < self._fewest or not possible:
            return np.empty(0, np.int64), 0, not possible
        # Draw devices with replacement, and keep each device that can join once. The first
        # ``wanted`` of them are a uniform choice without replacement, however many devices can
        # join.
        budget = int(_MOST_DRAWN * self._num_devices)
        found = np.empty(0, dtype=np.int64)
        drawn, joining, batch = 0, 0, 2 * wanted
        while len(found) < wanted:
            if drawn + batch > budget:
                # Beginning again biases nothing: the decision depends on how many of the drawn
                # devices can join, not on which ones.
                return self._select_of_all(generator, seconds, wanted)
            draws = generator.integers(0, self._num_devices, size=batch)
            good = draws[self._can_join(draws, seconds)]
            drawn, joining = drawn + batch, joining + len(good)
            found = _first_occurrences(np.concatenate([found, good]))
            expected = (wanted - len(found)) * drawn / max(joining, 1)
            # The next batch is limited, because an estimate from few draws of how many more are
            # needed is poor.
            batch = min(math.ceil(1.25 * expected) + 16, _MOST_GROWTH * drawn)
        estimate = round(self._num_devices * joining / drawn)
        num_available = num_eligible if always else min(max(estimate, wanted), num_eligible)
        return found[:wanted], num_available, always

    def _select_of_all(
        self, generator: np.random.Generator, seconds: float, wanted: int
    ) -> tuple[np.ndarray, int, bool]:
        parts = []
        for begin in range(0, self._num_devices, _BLOCK):
            devices = np.arange(begin, min(begin + _BLOCK, self._num_devices))
            parts.append(devices[self._can_join(devices, seconds)])
        can_join = np.concatenate(parts)
        size = min(wanted, len(can_join))
        return generator.choice(can_join, size=size, replace=False), len(can_join), True

    def _can_join(self, devices: np.ndarray, seconds: float) -> np.ndarray:
        """Returns (m,) bool, True for devices that are available and allowed by their timers."""
        allowed = self._timers.allow(devices)
        if not self._behaviour.availability.is_always:
            asked = np.flatnonzero(allowed)
            allowed[asked] = self._behaviour.availability.available(
                devices[asked], seconds, self._round_index, self._seed
            )
        return allowed

    def _too_few(
        self, attempts: int, num_available: int, is_final: bool = False
    ) -> TooFewEligibleClientsError:
        """Returns the error for a round with too few devices, with counts and advice."""
        behaviour = self._behaviour
        arriving = behaviour.arriving
        uploads = min(num_available, self._fewest)
        if uploads and arriving < 1.0:
            # The advice is half of the mean number of uploads, which leaves room for chance.
            uploads = max(1, int(uploads * arriving / 2))
        flags = f"--minimum_uploads={uploads} " if uploads else ""
        # More attempts are not advised if the timers alone leave too few devices: they change
        # nothing.
        flags += "" if is_final else f"--max_attempts={2 * behaviour.max_attempts}"
        return TooFewEligibleClientsError(
            f"round {self._round_index + 1} needs {self._fewest} uploads and found fewer in "
            f"{counted(attempts, 'attempt')}: the participation timers allow "
            f"{self._timers.num_eligible} of {self._num_devices} clients, and {num_available} of "
            "these were available.",
            flags.strip(),
        )


def _kept(
    devices: np.ndarray, loss_probability: float, generator: np.random.Generator
) -> np.ndarray:
    if loss_probability == 0.0:
        return devices
    return devices[generator.random(len(devices)) >= loss_probability]


def _first_occurrences(devices: np.ndarray) -> np.ndarray:
    """Returns the devices of a list without repeats, in the order in which they first occur."""
    _, first = np.unique(devices, return_index=True)
    return devices[np.sort(first)]


def draw_cohort(
    eligible: np.ndarray, clients_per_round: int, seed: int, round_index: int
) -> np.ndarray:
    """Draws a cohort of distinct clients uniformly among all that their timers allow to join.

    The cohort is a function of the arguments alone. So a resumed run draws the same cohorts as the
    uninterrupted run, and adds each noise row to the same sum.

    Args:
      eligible: (num_clients,) bool.
      clients_per_round: How many clients take part.
      seed: Any non-negative integer; the same for all rounds of a run.
      round_index: The round, from 0.

    Returns:
      (clients_per_round,) int64: increasing indices of clients.

    Raises:
      TooFewEligibleClientsError: If fewer clients are eligible. The timers are never
        bent to fill a cohort: the sensitivity, and with it the guarantee, rests on them.
    """
    candidates = np.flatnonzero(eligible)
    if len(candidates) < clients_per_round:
        raise TooFewEligibleClientsError(
            f"round {round_index + 1} needs {clients_per_round} clients, and the participation "
            f"timers allow {len(candidates)} of {len(eligible)}.",
            f"--minimum_uploads={len(candidates)}" if len(candidates) else "",
        )
    generator = random_streams.generator_of(seed, round_index)
    ranks = generator.choice(len(candidates), size=clients_per_round, replace=False)
    return candidates[np.sort(ranks)]
