"""Populations that behave like devices: who takes part in each round of a federated run.

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

# Timers take 13 bytes, and the list of candidates for a cohort 8.
_BYTES_PER_DEVICE = 21
_MOST_PARTICIPATIONS = np.iinfo(np.int32).max
# The second coordinate of all generators here.
_SELECTION = 0
_HISTORY = 1
_BROKEN = 2

# The number of devices that are asked at once: they fit into a processor's cache.
_BLOCK = 2**16
# Above this share of the population, draws cost as much as asking every device.
_MOST_DRAWN = 0.25
_MOST_GROWTH = 8

# The fates of selected devices that are not summed, in this order.
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
        """Takes the finding and the flags; the advice is for runs that have not begun."""
        super().__init__(f"{found} {_ADVICE}")
        self.found, self.to_go_on = found, to_go_on


@dataclasses.dataclass(frozen=True, eq=False)
class DeviceRound:
    """How a round took place.

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
      available_is_exact: Whether it is.
      num_selected: Selected devices.
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
    """The timers of many devices: when each last took part, and how often. Changed in place.

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
        # When each timer runs out: minus infinity before the first participation, and
        # infinity where there will be no other.
        self._ends = np.full(num_devices, -math.inf)
        self._eligible = np.ones(num_devices, dtype=bool)
        self._num_eligible = num_devices
        # Running timers with their devices, by the time at which they end, which never decreases.
        # An entry is void if the device's timer was changed after it.
        self._queue: collections.deque[tuple[float, np.ndarray]] = collections.deque()

    @classmethod
    def by_rounds(cls, num_devices: int, participation: Participation) -> "DeviceTimers":
        """Creates timers that count rounds and enforce a schema."""
        # A device that takes part once has no second participation to wait for.
        separation = participation.separation_in(1)
        return cls(num_devices, separation, participation.limit)

    @property
    def num_eligible(self) -> int:
        """How many devices may take part at the time of the last :meth:`advance`."""
        return self._num_eligible

    def allow(self, devices: np.ndarray) -> np.ndarray:
        """Returns (m,) bool: which of (m,) devices may take part at the time last set."""
        return self._eligible[devices]

    def eligible(self) -> np.ndarray:
        """Returns (num_devices,) bool: what :meth:`allow` says, a view that later calls change."""
        view = self._eligible.view()
        view.flags.writeable = False
        return view

    def advance(self, now: float) -> None:
        """Lets time pass up to ``now``, which is not earlier than before."""
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
        """Makes devices that lost their history assume the worst of it.

        Call :meth:`advance` afterwards: what they assume may be long past.

        Args:
          devices: (m,) int64, each at most once.
          latest: The latest time at which they can have taken part.
          most: The most participations that they can have had.
        """
        self._participations[devices] = min(most, _MOST_PARTICIPATIONS)
        self._start(devices, latest)

    def reset(self, devices: np.ndarray) -> None:
        """Makes (m,) devices, each at most once, as if they had never taken part."""
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
    """The devices of a run, round by round.

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
        """Creates the devices before the first round.

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
            "use a smaller one",
        )
        self._participation = participations.check(participation)
        self._clients_per_round = numbers.positive_integer(clients_per_round, "clients_per_round")
        self._behaviour = behaviour
        self._fewest = behaviour.fewest_uploads(self._clients_per_round)
        self._seed = numbers.integer_at_least(seed, 0, "seed")
        self._round_index = 0
        # When the next round starts, since the first attempt of the first one.
        self.seconds = 0.0
        if participation.is_evenly_spaced:
            raise ValueError(
                "timers enforce a least separation, and no exact one: use MinSeparation."
            )
        if behaviour.timer_seconds is None:
            self._timers = DeviceTimers.by_rounds(num_devices, participation)
        else:
            self._timers = DeviceTimers(num_devices, behaviour.timer_seconds, participation.limit)
        behaviour.availability.check_population(num_devices)
        # (r,) int64: the devices with broken timers, increasing.
        self.broken = np.empty(0, np.int64)
        if behaviour.broken_timers > 0.0:
            number = max(1, round(behaviour.broken_timers * self._num_devices))
            generator = random_streams.generator_of(self._seed, Stream.DEVICES, _BROKEN)
            self.broken = generator.choice(self._num_devices, size=number, replace=False)
            self.broken.sort()

    def change(self, behaviour: DeviceBehaviour) -> None:
        """Changes how the server acts from the next round on.

        Args:
          behaviour: The new behaviour; only flags of ``device_behaviour.MAY_CHANGE`` may differ.

        Raises:
          ValueError: If rounds would be closed with more uploads than they need.
        """
        self._fewest = behaviour.fewest_uploads(self._clients_per_round)
        self._behaviour = behaviour

    def follow(self, cohort: np.ndarray) -> bool:
        """Runs the next round as it took place before, and returns whether that could be.

        Undisturbed devices (:attr:`DeviceBehaviour.is_undisturbed`) remember nothing but the
        cohort, which is taken as it is. For others the round is drawn again; a cohort that differs
        from the one drawn is of another population, and this one is of no use then.
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
        """Runs the next round.

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
                # No timer runs out within a round.
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
            # They are in random order: any of those that uploaded may have been the first.
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
        """Runs rounds until one finds too few devices.

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
        """The time by which the timers count."""
        return self._round_index if self._behaviour.timer_seconds is None else seconds

    def _lose_histories(self) -> None:
        """Makes devices forget, before the round; before the first there is nothing to forget."""
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
            # The first upload came at the end of the first round. More is safe, for rounding.
            since_first = self.seconds - behaviour.round_seconds
            most = math.floor(since_first / behaviour.timer_seconds + 1e-9) + 1
        self._timers.lose_history(self._working(devices), latest, most)

    def _working(self, devices: np.ndarray) -> np.ndarray:
        """The devices with working timers among some: no other ever has a history."""
        if not len(self.broken):
            return devices
        places = np.searchsorted(self.broken, devices)
        return devices[self.broken.take(places, mode="clip") != devices]

    def _select(
        self, generator: np.random.Generator, seconds: float
    ) -> tuple[np.ndarray, int, bool]:
        """Selects uniformly among available devices that their timers allow to join.

        Returns the selected devices in random order, how many could have joined, and whether that
        number is exact.
        """
        behaviour = self._behaviour
        num_eligible = self._timers.num_eligible
        # More than all devices are all of them.
        wanted = math.ceil(
            min(self._clients_per_round * behaviour.over_selection, self._num_devices)
        )
        always = behaviour.availability.is_always
        possible = behaviour.availability.is_possible(seconds)
        if num_eligible < self._fewest or not possible:
            return np.empty(0, np.int64), 0, not possible
        # Devices drawn with replacement, of which those that can join are kept once: the first
        # ones of them are a uniform choice without replacement, however many can join.
        budget = int(_MOST_DRAWN * self._num_devices)
        found = np.empty(0, dtype=np.int64)
        drawn, joining, batch = 0, 0, 2 * wanted
        while len(found) < wanted:
            if drawn + batch > budget:
                # The draws so far told how many can join, not which ones: nothing is biased by
                # beginning again.
                return self._select_of_all(generator, seconds, wanted)
            draws = generator.integers(0, self._num_devices, size=batch)
            good = draws[self._can_join(draws, seconds)]
            drawn, joining = drawn + batch, joining + len(good)
            found = _first_occurrences(np.concatenate([found, good]))
            expected = (wanted - len(found)) * drawn / max(joining, 1)
            # Few draws tell little of how many more are needed.
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
        """Returns (m,) bool: which devices are available and allowed by their timers."""
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
        """The refusal of a round: how many clients its timers allowed, and were available."""
        behaviour = self._behaviour
        arriving = behaviour.arriving
        uploads = min(num_available, self._fewest)
        if uploads and arriving < 1.0:
            # Half of the mean leaves room for chance.
            uploads = max(1, int(uploads * arriving / 2))
        flags = f"--minimum_uploads={uploads} " if uploads else ""
        # Further attempts change nothing where the timers alone leave too few.
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
    """The devices without repeats, in the order in which they first occur."""
    _, first = np.unique(devices, return_index=True)
    return devices[np.sort(first)]


def draw_cohort(
    eligible: np.ndarray, clients_per_round: int, seed: int, round_index: int
) -> np.ndarray:
    """Draws a cohort uniformly among the eligible clients, without replacement.

    It is a function of (seed, round, who is eligible) alone, so that a run that is resumed draws
    what the uninterrupted run would have drawn: the same participations and uses of noise rows.

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
