"""Fleets of devices with names and habits, which plans know by their averages alone.

Devices are awake in a window of the day of their own, drop out together for hours, and return after
delays with a heavy tail. Nothing of it is in the model that plans are made with.
"""

import dataclasses
import math

import numpy as np

from mf_aggregators.participation import MinSeparation
from mf_aggregators.planning.fleets import Fleet

_HOUR = 60.0
# Minutes from an attempt that found too few devices to the next one, and of the longest wait.
_RETRY = 10.0
_LONGEST_WAIT = 7 * 24 * _HOUR


@dataclasses.dataclass(frozen=True)
class OtherFleet:
    """A fleet whose habits differ from those of the plan's model.

    Attributes:
      planned: What a plan is told: population, cohort, averages, over-selection.
      awake_hours: The hours of a day in which a device can be asked.
      delay_hours: The median of the time that a device is away after its timer has run out.
      persistence: The correlation of the dropouts of one round with those of the next.
      round_minutes: The minutes of a round.
    """

    planned: Fleet
    awake_hours: float
    delay_hours: float
    persistence: float
    round_minutes: float

    @classmethod
    def random(cls, generator: np.random.Generator) -> "OtherFleet":
        """Draws a fleet, and measures which share of its devices is available, as an operator."""
        clients = int(generator.integers(10, 60))
        planned = Fleet(
            int(clients * generator.uniform(4.0, 60.0)),
            clients,
            dropout=float(generator.uniform(0.0, 0.3)),
        )
        planned = dataclasses.replace(planned, over_selection=planned.selected / clients)
        found = cls(
            planned,
            awake_hours=float(generator.uniform(8.0, 16.0)),
            delay_hours=float(generator.uniform(0.0, 2.0)),
            persistence=float(generator.uniform(0.0, 0.9)),
            round_minutes=float(generator.uniform(5.0, 30.0)),
        )
        pilot = MinSeparation(max(1, planned.population // clients // 2))
        _, shares = found.run(40, pilot, int(generator.integers(2**31)))
        mean = float(np.mean(shares)) if shares else 1.0
        return dataclasses.replace(found, planned=dataclasses.replace(planned, returning=mean))

    def survives(self, num_rounds: int, schema: MinSeparation, seed: int) -> bool:
        """Whether all rounds take place while timers that count rounds enforce the schema."""
        return self.run(num_rounds, schema, seed)[0]

    def run(self, num_rounds: int, schema: MinSeparation, seed: int) -> tuple[bool, list[float]]:
        """Whether all rounds take place, and the share of devices found by each attempt."""
        generator = np.random.default_rng([seed, 7])
        fleet, devices = self.planned, self.planned.population
        # The evening comes within two hours for all.
        wakes = generator.uniform(0.0, 2.0, devices)
        last = np.full(devices, -num_rounds)
        times = np.zeros(devices, dtype=int)
        back = np.zeros(devices)
        most = num_rounds if schema.max_participations is None else schema.max_participations
        minutes, mood, waited = 2.0 * _HOUR, 0.0, 0.0
        shares: list[float] = []
        index = 0
        while index < num_rounds and waited < _LONGEST_WAIT:
            may_join = (index - last >= schema.separation) & (times < most)
            eligible = int(np.count_nonzero(may_join))
            if eligible < fleet.clients_per_round:
                return False, shares
            is_awake = (minutes / _HOUR - wakes) % 24.0 < self.awake_hours
            found = np.flatnonzero(may_join & is_awake & (back <= minutes))
            if len(found) < fleet.clients_per_round:
                minutes += _RETRY
                waited += _RETRY
                continue
            shares.append(len(found) / eligible)
            # Dropouts of one round resemble those of the round before.
            fresh = math.sqrt(1.0 - self.persistence**2) * generator.standard_normal()
            mood = self.persistence * mood + fresh
            dropout = fleet.dropout * min(2.0, max(0.0, 1.0 + 0.25 * mood))
            selected = generator.permutation(found)[: fleet.selected]
            uploads = selected[generator.random(len(selected)) >= dropout]
            minutes += self.round_minutes
            last[uploads] = index
            times[uploads] += 1
            delays = self.delay_hours * np.exp(generator.standard_normal(len(uploads)))
            timer = schema.separation * self.round_minutes
            back[uploads] = minutes + timer + _HOUR * delays
            if len(uploads) >= fleet.clients_per_round:
                index, waited = index + 1, 0.0
        return index == num_rounds, shares
