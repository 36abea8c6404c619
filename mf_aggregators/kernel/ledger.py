"""Ledgers as numbers: the participations that a ledger shows, its completeness, and guarantees.

A plan names a participation schema, and its noise is scaled to the sensitivity of C under it. A run
that kept its plan has the planned guarantee, also if clients decided from released models whether
to take part. The participations that were observed define a schema of their own, by their
separations and their largest number per client, and the same noise is measured against the
sensitivity under that one. The observed guarantee may be the better one, and holds only if
participation did not depend on released models or on data (docs/privacy-proofs.md, section 4). A
run that broke its plan has only the observed guarantee.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence

import numpy as np

from mf_aggregators.kernel import numbers
from mf_aggregators.kernel.claim import Basis, Guarantee, Pattern, check
from mf_aggregators.kernel.losses import InGroups
from mf_aggregators.kernel.numbers import FloatArray, IntArray
from mf_aggregators.kernel.sensitivity import Schema

# The gap of a ledger without a server's own counts of clients, as the end of a sentence.
NO_COUNTS = "nobody gave the number of clients of each round, by the server's own count"


@dataclasses.dataclass(frozen=True)
class ObservedParticipation:
    """The numbers of participations that a ledger or round times show, over all clients.

    Attributes:
      num_rounds: The number of rounds that were released.
      num_clients: The number of clients who took part at all; None if it is not known.
      separation: The smallest distance |i - j| between two participations of one client; None if no
        client took part twice.
      max_participations: The largest number of participations of one client.
      keeps_sampling: Whether a data sampler drew every batch by its scheme; None if no sampling was
        planned, or nobody checked: only the holder of the sampler's seed can.
      largest_separation: The largest distance between adjacent participations of one client; None
        if no client took part twice, or if it is not known.
      conditions: The conditions, as sentences, under which these numbers follow from round times
        (``TimedRounds``); None for a ledger.
      gap: The reason why the ledger is not shown to be complete (:func:`gap`); None if it is shown,
        and for round times.

    Raises:
      ValueError: If a number is not an integer in its range, another attribute is of a wrong type,
        a client took part more than once and no separation is given, or the participations do not
        fit into the rounds.
    """

    num_rounds: int
    num_clients: int | None
    separation: int | None
    max_participations: int
    keeps_sampling: bool | None = None
    largest_separation: int | None = None
    conditions: str | None = None
    gap: str | None = None

    def __post_init__(self) -> None:
        counts = dict.fromkeys(("num_rounds", "max_participations"), numbers.non_negative_integer)
        positive = dict.fromkeys(("separation", "largest_separation"), numbers.positive_integer)
        numbers.set_checked(self, **counts, **positive, num_clients=numbers.non_negative_integer)
        for name, kind in (("keeps_sampling", bool), ("conditions", str), ("gap", str)):
            value = getattr(self, name)
            if value is not None and type(value) is not kind:
                raise ValueError(f"{name} must be a {kind.__name__}, found {numbers.shown(value)}.")
        most, separation = self.max_participations, self.separation
        if most <= 1:
            return
        if separation is None:
            raise ValueError("several participations need a separation: give 1 if it is unknown.")
        # Refused, because a schema would then count fewer participations than were observed.
        if self.num_rounds <= (most - 1) * separation:
            seen = f"{most} participations {separation} rounds apart"
            raise ValueError(f"{seen} need more rounds than num_rounds, {self.num_rounds}.")
        if self.largest_separation is not None and self.largest_separation < separation:
            raise ValueError(f"largest_separation must be at least separation, {separation}.")

    @classmethod
    def of(
        cls, rounds_of_clients: Iterable[Sequence[int] | IntArray], num_rounds: int
    ) -> "ObservedParticipation":
        """Returns the numbers of the participations that a ledger shows.

        Args:
          rounds_of_clients: For each client, the rounds that it took part in, from 0,
            increasing.
          num_rounds: The number of rounds that were released.

        Returns:
          The numbers: the smallest and the largest separation, and the largest count.

        Raises:
          ValueError: If the rounds of a client are not increasing, or not among the released
            rounds: a ledger with such rounds cannot be trusted.
        """
        num_rounds = numbers.integer_at_least(num_rounds, 0, "num_rounds")
        of_clients = [np.asarray(each, np.int64) for each in rounds_of_clients if len(each)]
        # All clients are checked in one array, because there may be hundreds of thousands in each
        # round.
        sizes = np.array([len(rounds) for rounds in of_clients], np.int64)
        together = np.concatenate([np.empty(0, np.int64), *of_clients])
        clients = np.repeat(np.arange(len(sizes)), sizes)
        is_of_one, separations = clients[1:] == clients[:-1], np.diff(together)
        is_wrong = (together < 0) | (together >= num_rounds)
        is_wrong[1:] |= is_of_one & (separations <= 0)
        if np.any(is_wrong):
            rounds = numbers.shown(of_clients[clients[np.argmax(is_wrong)]].tolist())
            found = f"rounds {rounds} of a client do not increase below {num_rounds}, from 0"
            raise ValueError(f"{found}: the ledger is broken.")
        separations = separations[is_of_one]
        ends = (int(end(separations)) if len(separations) else None for end in (np.min, np.max))
        (smallest, largest), most = ends, int(np.max(sizes, initial=0))
        return cls(num_rounds, len(of_clients), smallest, most, largest_separation=largest)

    @property
    def schema(self) -> Schema:
        """The narrowest schema that allows these separations and this number of participations."""
        if self.separation is None:
            return Schema(1, 1)
        is_even = self.separation == self.largest_separation
        return Schema(self.max_participations, self.separation, is_even=is_even)

    def keeps(self, schema: Schema) -> bool:
        """Returns whether a schema allows the observed participations.

        Args:
          schema: The participation schema.
        """
        return schema.allows_separations(
            self.max_participations, self.separation, self.largest_separation
        )

    def guarantee(self, plan: Guarantee) -> Guarantee:
        """Returns the guarantee that follows from the observed participations.

        Rows of C after the last released round were never released, so the sensitivity is
        that of the leading part of C. Unless a data sampler drew the participations, the guarantee
        holds only if they did not depend on released models or on data.

        Args:
          plan: The planned guarantee of the run; it fixes the noise.

        Returns:
          The guarantee for the rounds that were released; epsilon 0 if there were none. With
          min-separation sampling and balls in bins it is that of all rounds.

        Raises:
          NotProved: If more rounds were released than there are rows of noise: a ValueError.
        """
        rounds, draws = self.num_rounds, plan.claim.taking_part
        if plan.is_amplified and self.keeps_sampling and rounds >= 1:
            # The clients were drawn with the plan's probability, even if the run ended early.
            # Clients that were never drawn are covered too.
            first = dataclasses.replace(plan.claim, epsilon=None, num_rounds=rounds)
            # Groups are accounted for with fewer rounds. For other schemes the guarantee of all
            # rounds is kept: fewer rounds are post-processing, and another certificate would take
            # minutes.
            if isinstance(draws, InGroups):
                fewer = dataclasses.replace(draws, num_rounds=max(rounds, draws.num_bands))
                first = dataclasses.replace(first, taking_part=fewer)
            return check(first)
        nobody = self.max_participations == 0
        taking_part = Pattern(()) if nobody else self.schema
        shown = plan.without_draws(taking_part=taking_part, num_rounds=rounds, basis=Basis.LEDGER)
        return check(shown)

    def worst_case(self, plan: Guarantee) -> Guarantee:
        """Returns a guarantee that covers every continuation of a run that broke its plan.

        It is for all rounds, with the smaller one of the planned and the observed separation and
        the larger one of the numbers of participations, and without amplification. So it is never
        better than the planned guarantee. It holds only if participation did not depend on released
        models or on data.

        Args:
          plan: The planned guarantee of the run; it fixes the noise.
        """
        rounds, schema = plan.claim.rows.num_rounds, plan.schema
        planned_separation = rounds if schema == Schema(1, 1) else schema.separation
        most = max(schema.most_in(rounds), self.max_participations, 1)
        widened = Schema(most, min(planned_separation, self.separation or rounds))
        return check(plan.without_draws(taking_part=widened, num_rounds=rounds, basis=Basis.LEDGER))

    def to_dict(self) -> dict[str, object]:
        """Returns a JSON-able mapping; which clients a sampler drew is secret and left out."""
        if self.keeps_sampling:
            return {"num_rounds": self.num_rounds, "keeps_sampling": True}
        found = dataclasses.asdict(self)
        others = {"conditions": found.pop("conditions"), "ledger_gap": found.pop("gap")}
        return found | {name: each for name, each in others.items() if each is not None}


def gap(
    rounds_of_clients: Iterable[IntArray],
    num_rounds: int,
    counts: Sequence[int] | None,
    clients_per_round: float | None = None,
) -> str | None:
    """Returns the reason why a ledger is not shown to be complete, as the end of a sentence.

    Args:
      rounds_of_clients: As in :meth:`ObservedParticipation.of`.
      num_rounds: The number of rounds that were released.
      counts: The number of clients that each round summed, by the server's own count; None if it is
        not known.
      clients_per_round: The claimed cohort size of the run; None if none is claimed.

    Returns:
      The reason; None if the ledger has as many rows for each round as the server counted, and the
      mean cohort size is between half and twice the claimed one.
    """
    rounds = np.concatenate([np.empty(0, np.int64), *rounds_of_clients])
    rows = np.bincount(rounds, minlength=num_rounds)
    if counts is not None and len(counts) != len(rows):
        return f"it has {len(rows)} rounds, and the server counted {len(counts)}"
    if counts is not None and len(differing := np.flatnonzero(rows != counts)):
        at, number = differing[0], f"{len(differing)} of its {len(rows)} rounds"
        such = f"such as round {at}, counted from 0, with {rows[at]} rows for {counts[at]} clients"
        return f"{number} have other numbers of clients than the server counted, {such}"
    if clients_per_round is not None and len(rows):
        mean = float(rows.mean())
        if not 0.5 * clients_per_round <= mean <= 2.0 * clients_per_round:
            said = f"the run is said to have had {clients_per_round:g} clients a round"
            return f"its rounds have {mean:.6g} rows on average, and {said}"
    return NO_COUNTS if counts is None else None


# The share by which a device's clock may run too fast: more than a minute a day.
DEFAULT_CLOCK_DRIFT = 0.001
# The time by which a timer may be too short, in addition to the clock's drift.
DEFAULT_CLOCK_MARGIN_MINUTES = 10.0

_SECONDS_PER_HOUR = 3600.0
_TICKS_PER_SECOND = 1_000_000
# Upper bound on the rounding errors of times, products and sums; the timer is shortened by it.
_ROUNDING_TICKS = 4
# The largest time in seconds that is accepted; ticks up to this time are exact as doubles.
_LARGEST_SECONDS = 4.0e9
# Longer timers are cut to this time, which is more than the distance of any two accepted times.
_LONGEST_TIMER = 4.0 * _LARGEST_SECONDS


@dataclasses.dataclass(frozen=True, eq=False)
class TimedRounds:
    """Start and end times of rounds, and the timers of devices: they bound the participations.

    Devices have a timer of H hours, and the server knows when its rounds started and ended. What
    follows holds for every device, whatever it did, under three conditions:

    1. A device that is summed in round i asked for its model at a time a_i not before the round's
       start s_i, and its upload arrived at a time not after the round's end e_i. A round that
       starts at no recorded time starts when the one before has ended, on whose model it depends.
       Uploads that are late are discarded.
    2. The timer runs at least from that request to the next one that the device accepts. It may
       start later, as with the upload: then it lasts longer. By the server's clock the two are at
       least T = H (1 - drift) - margin apart: the device's clock is too fast by no more than the
       drift, and the margin covers by how much clocks were set and the server's clocks differ.
    3. Where devices count their participations, none of them does more often than that.

    So a device that is summed in rounds i < j has s_i + T <= a_i + T <= a_j <= e_j. (It is asked in
    the order of rounds: starts and ends never decrease, so a_j + T <= a_i would give s_i + T <=
    e_i, and such rounds are refused.) Hence j is at least next(i), the first round with e_j >= s_i
    + T, and the separation is the least next(i) - i. A device is summed most often as follows: t_1
    = s_0, j_1 = 0; then j_(m+1) is the first round with e_j >= t_m + T, and t_(m+1) the later one
    of t_m + T and its start. By induction every device's m-th request and round are no earlier than
    t_m and j_m. Both are attained: by a device that asks and uploads at s_i, and again as late as
    it has to; and by one that asks at t_1, t_2, ...

    A round of T or longer could have one device twice. No guarantee covers that: it is refused.

    Attributes:
      starts: (n,) float64: seconds, when the first device can have been given a round's model. They
        never decrease.
      ends: (n,) float64: seconds by the same clock, when the last upload can have been summed. They
        never decrease, and no round ends before it starts.
      timer_hours: The time in hours from a device's request that it takes part on, or from its
        upload, until the device accepts another request.
      clock_drift: The share by which devices' clocks may be too fast, from 0 and below 1.
      clock_margin_minutes: The time by which the timer may be too short in addition: clocks that
        are set, and clocks of the server that differ.
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
            times = numbers.real_array(getattr(self, name), name)
            # Written so that NaN is refused.
            if times.ndim != 1 or not len(times) or not np.all(np.abs(times) <= _LARGEST_SECONDS):
                raise ValueError(f"{name} must have one finite time in seconds for each round.")
            if np.any(np.diff(times) < 0.0):
                late = int(np.argmax(np.diff(times) < 0.0)) + 1
                raise ValueError(f"{name} must never decrease, as they do in round {late}.")
            object.__setattr__(self, name, times)
        if self.starts.shape != self.ends.shape:
            raise ValueError(f"there are {len(self.starts)} starts and {len(self.ends)} ends.")
        if np.any(self.ends < self.starts):
            early = int(np.argmax(self.ends < self.starts))
            raise ValueError(f"round {early} ends before it starts.")
        numbers.set_checked(
            self,
            timer_hours=numbers.positive_number,
            clock_drift=numbers.fraction,
            clock_margin_minutes=numbers.non_negative_number,
            max_participations=numbers.positive_integer,
        )
        starts, ends, timer = self._ticks
        if timer <= 0:
            raise ValueError("clock_drift and clock_margin_minutes must leave part of timer_hours.")
        longest = int(np.argmax(ends - starts))
        if ends[longest] - starts[longest] >= timer:
            hours = (self.ends - self.starts)[longest] / _SECONDS_PER_HOUR
            raise ValueError(
                f"round {longest} lasted {hours:.3g} hours, at least as long as timer_hours with "
                "its margins: a device may have been in it twice. Give the time of its real start."
            )

    @property
    def num_rounds(self) -> int:
        """The number of rounds that were released."""
        return len(self.ends)

    def participation(self) -> ObservedParticipation:
        """Returns the closest and the most participations of one device that the times allow."""
        following, rounds = self._next_rounds(), self.num_rounds
        returning = np.flatnonzero(following < rounds)
        starts, ends, timer = self._ticks
        most, asked = 0, int(starts[0])
        while (at := int(np.searchsorted(ends, asked))) < rounds:
            most, asked = most + 1, max(asked, int(starts[at])) + timer
        most = min(most, self.max_participations or most)
        closest = int(np.min(following[returning] - returning)) if most > 1 else None
        return ObservedParticipation(rounds, None, closest, most)

    def _next_rounds(self) -> IntArray:
        """Returns for each round the next round that one of its devices can be in; n for none."""
        starts, ends, timer = self._ticks
        return np.searchsorted(ends, starts + timer, side="left")

    @functools.cached_property
    def _ticks(self) -> tuple[IntArray, IntArray, int]:
        """Starts and timer rounded down and ends rounded up, as integers: their sums are exact."""
        starts = np.floor(self.starts * _TICKS_PER_SECOND).astype(np.int64)
        ends = np.ceil(self.ends * _TICKS_PER_SECOND).astype(np.int64)
        # The timer and the margin are both cut, because their products may overflow. A margin of at
        # least the timer leaves nothing of the timer.
        seconds = min(self.timer_hours * _SECONDS_PER_HOUR, _LONGEST_TIMER)
        seconds *= 1.0 - self.clock_drift
        seconds -= min(60.0 * self.clock_margin_minutes, _LONGEST_TIMER)
        return starts, ends, math.floor(seconds * _TICKS_PER_SECOND) - _ROUNDING_TICKS
