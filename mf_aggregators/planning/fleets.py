"""Finds separations and numbers of participations with which a fleet has enough devices.

A plan states a schema: participations of one device are at least b rounds apart, and at most k.
Timers on the devices enforce it, and a round starves if timers leave too few devices. Dropouts,
uploads that are not summed, and abandoned attempts need more devices or also start timers. So if
the population is just large enough for a separation without these, a run ends early. A fleet
*survives* a schema if it reaches the last round.

``Fleet.survives`` simulates a fleet by counts: devices that took part equally often are
exchangeable, so a round draws only how many devices of each count upload. ``Fleet.choose`` finds
the surviving pairs (b, k) with the least noise. No guarantee depends on this module: timers enforce
the schema for any behaviour of devices.
"""

import bisect
import collections
import dataclasses
import functools
import math
from collections.abc import Callable

import numpy as np
from scipy import signal, special, stats

from mf_aggregators import inputs
from mf_aggregators.kernel import numbers
from mf_aggregators.kernel.ledger import TimedRounds
from mf_aggregators.kernel.numbers import BoolArray, FloatArray, IntArray
from mf_aggregators.participation import MinSeparation

# The share of dropouts that a plan assumes by default.
DROPOUT = 0.1
_MINUTES_A_DAY = 24.0 * 60.0
# The number of simulations that estimate a probability of survival.
_SIMULATIONS = 100
# If a round takes more attempts than this, the simulated fleet has ended.
_MOST_ATTEMPTS = 100
# The probability of survival at the margins that a plan prints.
_LEAST_OF_MARGINS = 0.86
# The cost of timers in a failed attempt, relative to those in a summed one.
_COST_OF_FAILURE = 10.0
# A search for the largest number tries this many numbers of a range.
_STEPS = 64
# NumPy draws without replacement from fewer than 10^9 devices.
_MOST_DEVICES = 10**9 - 1
# Above this number (counts of participations times rounds), a search takes minutes.
_MOST_KINDS = 100_000
# About how many limits k above the smallest one are tried.
_MORE = 4
# The most limits k for which the largest separation is searched separately.
_MOST_TRIED = 6


@dataclasses.dataclass(frozen=True)
class Pair:
    """A separation and a limit on participations that a fleet survives, with their noise.

    Attributes:
      participation: Separation and limit; without a limit if that needs no more noise.
      noise: The rmse of prefix sums at noise multiplier 1 with a banded square root under this
        schema. It is used to rank pairs; the plan then finds better matrices.
    """

    participation: MinSeparation
    noise: float


@dataclasses.dataclass(frozen=True)
class Margins:
    """How far single properties of a fleet may change until the schema just survives.

    Attributes:
      population: The smallest number of devices.
      dropout: The largest probability of a dropout, with the same over-selection.
      longest_minutes: With timers of hours: the minutes of a round above which participations come
        closer than the schema.
      shortest_minutes: With timers of hours: the minutes below which rounds starve.
      pause_hours: With timers of hours: the longest pause that keeps the separation.
    """

    population: int
    dropout: float
    longest_minutes: float | None = None
    shortest_minutes: float | None = None
    pause_hours: float | None = None


@dataclasses.dataclass(frozen=True)
class Fleet:
    """The behaviour of the devices of a run and of their server.

    Attributes:
      population: The devices m.
      clients_per_round: The uploads B that a round sums.
      dropout: The probability that a selected device does not upload, on average over rounds.
      over_selection: Selected devices divided by needed uploads, at least 1. None for the number
        with which the fewest timers start for each summed round.
      returning: The probability that a device whose timer has run out is available in a round.
      absent_rounds: The rounds after which half of the devices whose timers have run out are
        available again, also while the server waits; 0 if all are available at once.
      spread: The standard deviation of the dropout probability between rounds, divided by the
        smaller one of ``dropout`` and 1 - ``dropout`` (devices drop out together). Below 1.
      persistence: The probability that an attempt has the same dropout probability as the attempt
        before (bad hours last). At least 0 and below 1.
      retry_rounds: How long a server waits if it found too few devices, in rounds of time; only
        with ``absent_rounds``.
      interruptions: The probability that an attempt is abandoned after its devices have uploaded
        (because the server restarts, for example). Below 1.
      timer_hours: The hours that timers count; None for timers that count rounds.
      round_minutes: The minutes of a round; only with ``timer_hours``.
      peak_hours: The hours of each day in which rounds take place; only with ``timer_hours``.
      slower: The share by which rounds may take longer than ``round_minutes`` while the separation
        still holds; only with ``timer_hours``.

    Raises:
      ValueError: If a value is out of its range, or timer_hours is given without round_minutes.
    """

    population: int
    clients_per_round: int
    dropout: float = DROPOUT
    over_selection: float | None = None
    returning: float = 1.0
    absent_rounds: float = 0.0
    retry_rounds: float = 1.0
    spread: float = 0.25
    persistence: float = 0.8
    interruptions: float = 0.01
    timer_hours: float | None = None
    round_minutes: float | None = None
    peak_hours: float = 24.0
    slower: float = 0.1

    def __post_init__(self) -> None:
        numbers.positive_integer(self.population, "population")
        numbers.positive_integer(self.clients_per_round, "clients_per_round")
        if self.population > _MOST_DEVICES:
            raise ValueError(f"population must be at most {_MOST_DEVICES} devices.")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout must be at least 0 and below 1, found {self.dropout}.")
        if self.over_selection is not None and not 1.0 <= self.over_selection < math.inf:
            raise ValueError(f"over_selection must be at least 1, found {self.over_selection}.")
        if (self.over_selection or 1.0) * self.clients_per_round > _MOST_DEVICES:
            raise ValueError(f"a round must select at most {_MOST_DEVICES} devices.")
        if not 0.0 < self.returning <= 1.0:
            raise ValueError(f"returning must be above 0 and at most 1, found {self.returning}.")
        for name in ("spread", "persistence", "interruptions"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"{name} must be at least 0 and below 1.")
        if (self.timer_hours is None) != (self.round_minutes is None):
            raise ValueError("timer_hours and round_minutes go together: give both or neither.")
        if self.timer_hours is not None:
            numbers.positive_number(self.timer_hours, "timer_hours")
            numbers.positive_number(self.round_minutes, "round_minutes")
        if not 0.0 < self.peak_hours <= 24.0:
            raise ValueError(f"peak_hours must be above 0 and at most 24, found {self.peak_hours}.")
        numbers.non_negative_number(self.slower, "slower")
        numbers.non_negative_number(self.absent_rounds, "absent_rounds")
        if not 0.0 < self.retry_rounds <= _MOST_DEVICES:
            raise ValueError(f"retry_rounds must be above 0, and at most {_MOST_DEVICES}.")

    @property
    def selected(self) -> int:
        """The number of devices that a round selects if enough are available."""
        return math.ceil(round(self.selected_per_upload * self.clients_per_round, 6))

    @property
    def selected_per_upload(self) -> float:
        """The given over-selection, or that of ``least_selected`` rounded up to 0.01."""
        if self.over_selection is not None:
            return self.over_selection
        return math.ceil(100.0 * self.least_selected / self.clients_per_round) / 100.0

    @functools.cached_property
    def least_selected(self) -> int:
        """The number of selected devices with which the fewest timers start for each summed round.

        Failed attempts come in sequence, and timers that count rounds do not advance during them,
        so each failed attempt counts as ten.
        """
        least = self.clients_per_round
        if self.dropout == 0.0:
            return least
        most = math.ceil(min(4.0 * least / (1.0 - self.dropout), 1e15)) + 20
        tried = np.unique(np.linspace(least, most, 400).astype(int))
        with np.errstate(divide="ignore"):
            failures = 1.0 / self.chances_of_attempts(tried) - 1.0
        return int(tried[np.argmin(tried * (1.0 + _COST_OF_FAILURE * failures))])

    def chances_of_attempts(self, selected: IntArray) -> FloatArray:
        """Returns the probabilities that an attempt finds enough uploads.

        Args:
          selected: (m,) int64: numbers of selected devices.

        Returns:
          (m,) float64.
        """
        dropouts, weights = np.array([self.dropout]), np.ones(1)
        if self.dropout > 0.0 and self.spread > 0.0:
            # The trapezoidal rule over normal quantiles of the beta distribution. The sum of a
            # beta-binomial distribution would take minutes for millions of devices.
            places = np.linspace(-8.0, 8.0, 2001)
            weights = stats.norm.pdf(places) * (places[1] - places[0])
            dropouts = stats.beta.ppf(stats.norm.cdf(places), *_beta(dropouts, self.spread))
        most = np.asarray(selected, dtype=np.float64)[:, np.newaxis] - self.clients_per_round
        chances = special.betainc(self.clients_per_round, most + 1.0, 1.0 - dropouts) @ weights
        return np.asarray(np.minimum(chances, 1.0))

    def draws(self, means: FloatArray, generator: np.random.Generator) -> FloatArray:
        """Draws probabilities of a round, beta distributed around their means (``spread``).

        Args:
          means: float64 of any shape, from 0 to 1.
          generator: The source of randomness.

        Returns:
          float64 of the same shape.
        """
        if self.spread == 0.0:
            return means
        with np.errstate(divide="ignore", invalid="ignore"):
            drawn = generator.beta(*np.nan_to_num(_beta(means, self.spread), nan=1.0, posinf=1.0))
        return np.where((means == 0.0) | (means == 1.0), means, drawn)

    def laws(self) -> tuple["Fleet", ...]:
        """Returns two fleets: devices are away independently, or for some rounds after timers."""
        independent = dataclasses.replace(self, absent_rounds=0.0)
        if self.absent_rounds == 0.0:
            return (independent,)
        return dataclasses.replace(self, returning=1.0), independent

    def starts(self, number: int, slower: float = 0.0) -> FloatArray:
        """Returns the start times of rounds, which follow one another in the peak hours.

        Args:
          number: The number of rounds.
          slower: The share by which rounds take longer than ``round_minutes``.

        Returns:
          (number,) float64: minutes.
        """
        minutes = numbers.positive_number(self.round_minutes, "round_minutes") * (1.0 + slower)
        a_day = max(1, math.floor(min(60.0 * self.peak_hours / minutes + 1e-9, 1e15)))
        index = np.arange(number)
        if self.peak_hours == 24.0:
            starts: FloatArray = minutes * index
        else:
            starts = max(_MINUTES_A_DAY, minutes) * (index // a_day) + minutes * (index % a_day)
        return starts

    def separation_of_hours(self, num_rounds: int, pause_hours: float = 0.0) -> int:
        """Returns the separation in rounds that timers of hours enforce with slower rounds.

        The timer counts from the request of a round. ``kernel.ledger.TimedRounds`` finds the
        closest rounds of one device for the times of these rounds, which pause outside of the peak
        hours.

        Args:
          num_rounds: The rounds n.
          pause_hours: The hours of a pause after half of the rounds.

        Returns:
          The separation in rounds.
        """
        starts = 60.0 * self.starts(num_rounds, self.slower)
        starts[num_rounds // 2 :] += 3600.0 * pause_hours
        minutes = numbers.positive_number(self.round_minutes, "round_minutes")
        hours = numbers.positive_number(self.timer_hours, "timer_hours")
        ends = starts + 60.0 * minutes * (1.0 + self.slower)
        found = TimedRounds(starts, ends, timer_hours=hours).participation().separation
        return num_rounds if found is None else found

    def survives(
        self,
        num_rounds: int,
        participation: MinSeparation,
        *,
        least: float = 0.95,
        seed: int = 0,
    ) -> bool:
        """Whether a fleet with timers reaches its last round, by simulation.

        The fleet has to survive both models of absence: each device is available with the
        probability ``returning`` in each round; or each device stays away for about
        ``absent_rounds`` after its timer and is then available.

        With timers that count rounds, a fleet ends when the timers leave fewer devices than a round
        needs. With timers of hours, it ends when so many attempts failed that participations came
        closer than the schema allows.

        Args:
          num_rounds: The rounds n.
          participation: The separation b and the most participations k.
          least: The required probability of survival, above 0 and below 1.
          seed: Of all that is drawn.

        Returns:
          Whether at least this share of 100 simulated fleets survives, in both models.
        """
        most = math.floor((1.0 - least) * _SIMULATIONS + 1e-9)
        for law in self.laws():
            state = _Fleets(law, num_rounds, participation, _SIMULATIONS, seed)
            while state.goes_on() and np.count_nonzero(~state.alive) <= most:
                state.step()
            if np.count_nonzero(state.rounds < num_rounds) > most:
                return False
        return True

    def ends(
        self, num_rounds: int, participation: MinSeparation, simulations: int, seed: int = 0
    ) -> IntArray:
        """Simulates fleets, and returns how many rounds each of them completes.

        Args:
          num_rounds: The rounds n.
          participation: The separation b and the most participations k.
          simulations: The number of fleets.
          seed: Of all that is drawn.

        Returns:
          (simulations,) int64: ``num_rounds`` for a fleet that survives.
        """
        state = _Fleets(self, num_rounds, participation, simulations, seed)
        while state.goes_on():
            state.step()
        return state.rounds

    def choose(
        self,
        num_rounds: int,
        *,
        least: float = 0.95,
        max_participations: int | None = None,
        may_extend_to: int | None = None,
    ) -> tuple[Pair, ...]:
        """Finds the schemas with the least noise that a fleet survives.

        It finds the largest surviving separation without a limit on participations, and the
        smallest limit that survives with this separation. For smaller limits, it finds the largest
        surviving separations, as long as they need less noise than the first pair. A smaller limit
        leaves fewer devices for the last rounds.

        Args:
          num_rounds: The rounds n.
          least: The required probability of survival, above 0 and below 1.
          max_participations: The only limit to try; None for all.
          may_extend_to: The rounds after an extension, which the fleet has to survive as well, with
            a limit that fits into ``num_rounds`` or without a limit. None for no extension.

        Returns:
          The pairs, by increasing noise.

        Raises:
          ValueError: If no separation survives. The message names a population that would survive.
        """
        fixed = dataclasses.replace(self, over_selection=self.selected_per_upload)
        rounds = max(num_rounds, may_extend_to or 0)

        def survive(most: int | None, separation: int) -> bool:
            return fixed.survives(rounds, MinSeparation(separation, most), least=least)

        def is_worse(most: int, separation: int) -> bool:
            return noise_of(num_rounds, MinSeparation(separation, most)) > first_noise

        high = self.population // self.clients_per_round
        if self.timer_hours is not None:
            high = self.separation_of_hours(rounds)
        high = min(num_rounds, high)
        separation = high
        if not high or not survive(max_participations, high):
            separation = largest(1, high - 1, functools.partial(survive, max_participations))
        if separation == 0:
            raise ValueError(_starving(fixed, num_rounds, least, max_participations))
        schemas = [MinSeparation(separation, max_participations)]
        fits = schemas[0].most_participations(num_rounds)
        if max_participations is None and may_extend_to is None and fits * rounds <= _MOST_KINDS:
            least_most = math.ceil(num_rounds * self.clients_per_round / self.population)

            def fewest(apart: int) -> int:
                # The fewest participations that survive, to 1/64 of the range; fits if none do.
                return -largest(-fits + 1, -least_most, lambda k: survive(-k, apart)) or fits

            # With timers of hours, the simulation does not depend on the separation.
            most = fewest(separation if self.timer_hours is None else 1)
            more = range(most, fits, max(1, (fits - most) // _MORE))
            schemas += [MinSeparation(separation, each) for each in more]
            if self.timer_hours is not None:
                least_most = most
            elif separation > 1 and (fewer := fewest(separation - 1)) < most:
                # The largest separation may survive only without a limit.
                separation, most = separation - 1, fewer
                schemas.append(MinSeparation(separation, most))
            first_noise = noise_of(num_rounds, schemas[0])
            for fewer in range(most - 1, max(least_most, most - _MOST_TRIED) - 1, -1):
                low = 1 + largest(1, separation, functools.partial(is_worse, fewer))
                separation = largest(low, separation, functools.partial(survive, fewer))
                if separation < low:
                    break
                schemas.append(MinSeparation(separation, fewer))
        pairs = [Pair(schema, noise_of(num_rounds, schema)) for schema in schemas]
        return tuple(sorted(pairs, key=lambda pair: pair.noise))

    def margins(self, num_rounds: int, participation: MinSeparation) -> Margins:
        """Finds how far single properties of a fleet may change, to about 1 %.

        Args:
          num_rounds: The rounds n.
          participation: A schema that the fleet survives.

        Returns:
          The limits of each property.
        """
        fixed = dataclasses.replace(self, over_selection=self.selected_per_upload)

        def survive(
            population: int = self.population,
            dropout: float = self.dropout,
            minutes: float | None = self.round_minutes,
        ) -> bool:
            other = dataclasses.replace(
                fixed, population=population, dropout=dropout, round_minutes=minutes
            )
            return other.survives(num_rounds, participation, least=_LEAST_OF_MARGINS)

        population = math.ceil(
            _nearest(0.0, self.population, lambda x: x >= 1.0 and survive(population=math.ceil(x)))
        )
        dropout = _nearest(
            max(0.99, 0.5 + 0.5 * self.dropout), self.dropout, lambda x: survive(dropout=x)
        )
        if self.timer_hours is None:
            return Margins(population, dropout)
        minutes, hours = float(self.round_minutes or 0.0), self.timer_hours
        at_speed = dataclasses.replace(fixed, slower=0.0)

        def keeps(minutes: float, pause_hours: float = 0.0) -> bool:
            other = dataclasses.replace(at_speed, round_minutes=minutes)
            return other.separation_of_hours(num_rounds, pause_hours) >= participation.separation

        return Margins(
            population,
            dropout,
            longest_minutes=_nearest(60.0 * hours / participation.separation, minutes, keeps, 20),
            shortest_minutes=_nearest(0.0, minutes, lambda x: x > 0.0 and survive(minutes=x)),
            pause_hours=_nearest(hours, 0.0, lambda pause: keeps(minutes, pause), 20),
        )


def _beta(mean: FloatArray, spread: float) -> tuple[FloatArray, FloatArray]:
    """The parameters of the beta distribution of a mean and a spread."""
    total = mean * (1.0 - mean) / (spread * np.minimum(mean, 1.0 - mean)) ** 2 - 1.0
    return mean * total, (1.0 - mean) * total


class _Fleets:
    """Several simulated fleets, as counts of devices that took part equally often."""

    def __init__(
        self, fleet: Fleet, num_rounds: int, schema: MinSeparation, simulations: int, seed: int
    ) -> None:
        self._fleet, self._num_rounds = fleet, num_rounds
        self._separation, self._most = schema.separation, schema.max_participations
        if self._most is not None:
            self._most = min(self._most, num_rounds)
        inputs.check_rounds(num_rounds, 16.0, "a simulation of fleets")
        self._generator = np.random.default_rng(seed)
        # (simulations,): the dropout probability in the last attempt.
        self._dropout = fleet.draws(np.full(simulations, fleet.dropout), self._generator)
        self._selected = fleet.selected
        self._by_hours = fleet.timer_hours is not None
        # (k, simulations): the numbers of devices that may take part and did so 0, 1, ... times.
        self._eligible = np.zeros((self._most or 1, simulations), dtype=np.int64)
        self._eligible[0] = fleet.population
        # (k, simulations): the numbers of devices in _eligible that are still away after their
        # timers.
        self._away = np.zeros_like(self._eligible)
        # (simulations,): the time, in rounds, between this attempt and the one before.
        self._passed = np.ones(simulations)
        # (simulations,): the time, in rounds; and when timers of each round would run out if all
        # attempts after it were summed.
        self._time = np.zeros(simulations)
        self._due = collections.deque[FloatArray](maxlen=min(schema.separation, num_rounds) + 1)
        self._waiting: dict[int, IntArray] = {}
        self._slot = 0
        self.alive = np.ones(simulations, dtype=bool)
        self.rounds = np.zeros(simulations, dtype=np.int64)
        if fleet.timer_hours is None:
            self._free = np.arange(num_rounds) + schema.separation
            return
        # Failed attempts take as long as a round.
        starts = fleet.starts(2 * num_rounds + 100)
        ends = starts + float(fleet.round_minutes or 0.0)
        # Devices count hours from the upload; a guarantee has to count from the request.
        self._free = np.searchsorted(starts, ends + 60.0 * fleet.timer_hours)
        self._asked = np.searchsorted(ends, starts + 60.0 * fleet.timer_hours)
        # The rounds that were summed before each attempt, from the first unchecked attempt on.
        self._before = collections.deque[IntArray]()
        self._checked = 0

    def goes_on(self) -> bool:
        """Whether some fleet has not ended."""
        return self._slot < len(self._free) and bool(np.any(self._needed()))

    def step(self) -> None:
        """Runs the next round of all fleets; with timers of hours, the next attempt."""
        slot, needed = self._slot, self._needed()
        returned = self._waiting.pop(slot, 0)
        self._eligible += returned
        self._due.append(self._time + self._separation)
        if self._fleet.absent_rounds > 0.0:
            # Devices come back while the server waits, and timers of rounds stand still.
            due = self._time if self._by_hours else self._due[0]
            late = np.maximum(0.0, self._time - due)
            self._away += self._generator.binomial(
                returned, 0.5 ** (late / self._fleet.absent_rounds)
            )
        started = np.zeros_like(self._eligible)
        before = self.rounds.copy()
        for _ in range(1 if self._by_hours else _MOST_ATTEMPTS):
            needed = self._attempt(needed, started)
            if not np.any(needed):
                break
        if self._by_hours:
            self._check_separation(before)
        else:
            self.alive &= ~needed
        if self._most is not None:
            # Devices that have taken part k times are not counted any more.
            started = np.concatenate([np.zeros_like(started[:1]), started[:-1]])
        at = int(self._free[slot])
        self._waiting[at] = self._waiting.get(at, 0) + started
        self._slot += 1

    def _needed(self) -> BoolArray:
        return self.alive & (self.rounds < self._num_rounds)

    def _attempt(self, needed: BoolArray, started: IntArray) -> BoolArray:
        """Runs an attempt in the fleets that need one; returns which fleets need another one."""
        fleet, generator, kinds = self._fleet, self._generator, self._eligible
        if fleet.absent_rounds > 0.0:
            back = 1.0 - 0.5 ** (self._passed / fleet.absent_rounds)
            self._away -= needed * generator.binomial(self._away, back)
        total = np.sum(kinds, axis=0)
        if not self._by_hours:
            # Timers that count rounds do not run out between attempts of a round.
            starving = needed & (total < fleet.clients_per_round)
            self.alive &= ~starving
            needed = needed & ~starving
        lasts = generator.random(len(total)) < fleet.persistence
        fresh = fleet.draws(np.full(len(total), fleet.dropout), generator)
        self._dropout = np.where(lasts, self._dropout, fresh)
        left = total - np.sum(self._away, axis=0)
        available = generator.binomial(left, fleet.returning)
        is_enough = needed & (available >= fleet.clients_per_round)
        self._passed = np.where(needed & ~is_enough, fleet.retry_rounds, 1.0)
        self._time = self._time + needed * self._passed
        found = np.where(is_enough, np.minimum(available, self._selected), 0)
        uploads = generator.binomial(found, 1.0 - self._dropout)
        summed = needed & (uploads >= fleet.clients_per_round)
        summed &= generator.random(len(total)) >= fleet.interruptions
        for kind in np.flatnonzero(np.any(kinds, axis=1)):
            here = kinds[kind] - self._away[kind]
            left = left - here
            taken = generator.hypergeometric(here, left, uploads) if np.any(left) else uploads
            uploads = uploads - taken
            started[kind] += taken
            kinds[kind] -= taken
        self.rounds += summed
        return needed & ~summed

    def _check_separation(self, before: IntArray) -> None:
        """Ends fleets in which a device may have taken part in rounds that are too close."""
        self._before.append(before)
        while self._checked < self._slot and self._asked[self._checked] <= self._slot:
            now = self._before[int(self._asked[self._checked]) - self._checked]
            then = self._before.popleft()
            is_round = self._before[0] > then
            has_ended = now >= self._num_rounds
            self.alive &= ~is_round | has_ended | (now - then >= self._separation)
            self._checked += 1


def largest(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """Returns the largest number that passes a test, to within 1/64 of a range; 0 if none passes.

    Args:
      low: The least number to try.
      high: The largest number to try.
      holds: The test: if it holds for a number, it holds for all smaller ones.
    """
    step = max(1, (high - low) // _STEPS)
    found = bisect.bisect_left(range(low, high + 1, step), True, key=lambda each: not holds(each))
    return low + step * (found - 1) if found else 0


def noise_of(num_rounds: int, participation: MinSeparation) -> float:
    """Returns the rmse of prefix sums with the best banded square root for a schema.

    Args:
      num_rounds: The rounds n.
      participation: The separation b and the most participations.

    Returns:
      The root mean squared error at noise multiplier 1: a Toeplitz matrix of the first h
      coefficients of (1 - x)^(-1/2), whose sensitivity for h <= b is that of participations as
      close as they may be (BandMF, Thm. 2), for the best of h = 1, 2, 4, ... and b.
    """
    separation = min(participation.separation, num_rounds)
    times = participation.most_participations(num_rounds)
    powers = (2**power for power in range(separation.bit_length()) if 2**power < separation)
    noise = min(_noise_of_bands(num_rounds, bands) for bands in (*powers, separation))
    return math.sqrt(times) * noise


@functools.lru_cache(maxsize=4096)
def _noise_of_bands(num_rounds: int, bands: int) -> float:
    """The rmse of prefix sums with a banded square root if each client takes part once."""
    index = np.arange(1.0, bands)
    strategy = np.concatenate([[1.0], np.cumprod((index - 0.5) / index)])
    # Row i of the decoder consists of the first i + 1 of these coefficients.
    decoder = signal.lfilter([1.0], strategy, np.ones(num_rounds))
    mean_square = float(np.mean(np.cumsum(np.square(decoder))))
    return math.sqrt(float(strategy @ strategy) * mean_square)


def _nearest(fails: float, holds: float, test: Callable[[float], bool], steps: int = 7) -> float:
    """The number nearest to ``fails`` for which a test holds, by bisection from ``holds``."""
    for _ in range(steps):
        middle = 0.5 * (fails + holds)
        fails, holds = (fails, middle) if test(middle) else (middle, holds)
    return holds


def _starving(fleet: Fleet, num_rounds: int, least: float, max_participations: int | None) -> str:
    """The error message if no separation survives, with a population that would survive."""
    schema = MinSeparation(1, max_participations)
    best = dataclasses.replace(fleet, over_selection=None)
    population, advice = fleet.population, ""
    if fleet.selected < best.least_selected:
        advice = f"an over-selection of {best.selected_per_upload:g}, "
    while not advice and 2 * population <= _MOST_DEVICES:
        population *= 2
        other = dataclasses.replace(fleet, population=population)
        if other.survives(num_rounds, schema, least=least):
            advice = f"{population} devices, "
    return (
        f"no separation leaves enough clients for {num_rounds} rounds of {fleet.clients_per_round} "
        f"with {fleet.population} devices, {100 * fleet.dropout:g} % dropouts and {fleet.selected} "
        f"selected: use {advice}fewer clients per round or fewer rounds."
    )
