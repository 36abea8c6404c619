"""Tries plans in simulated fleets, where each device has habits that the plan does not know.

Plans know fleets by their averages alone. A plan for each of some random fleets is tried in two
simulators. In that of ``simulate-participation``, dropouts are independent. In the other simulator,
each device is awake in its own window of the day; devices drop out together for hours, and return
after delays with a heavy tail. A plan is told the mean of dropouts and of available devices, the
median of the delays and how long the server waits, but not their distributions.

A plan should survive, and have little more noise than needed. "Needed" is the least noise of a grid
of all pairs of a separation and a number of participations, among those that survive in 95 % of the
simulations. A plan has to survive in both simulators, so it is fairly compared only with pairs that
do. How often the best pair for the first simulator survives the other one says what a plan made
with its exact law would do there. (Pairs found by 100 simulations of both exact laws were within
5 % of the best in 38 of 39 fleets: what plans lose beyond that, they lose because they know
averages alone, and little of it is the luck of the best pair.)

Example:
  .venv/bin/python benchmarks/fleets.py --fleets=200
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import math
import sys
from collections.abc import Callable

import numpy as np
from absl import flags

from mf_aggregators.commands import command_line
from mf_aggregators.participation import MinSeparation
from mf_aggregators.planning import fleets
from mf_aggregators.planning.fleets import Fleet
from simulations.devices.device_behaviour import DeviceBehaviour, Independent
from simulations.devices.device_populations import DevicePopulation

# The probability with which a pair must survive, and the most noise that a plan may have, relative
# to that of the best pair.
_LEAST, _ABOVE = 0.95, 1.05
_HOUR = 60.0
# Minutes between an attempt that found too few devices and the next attempt, and of the longest
# wait.
_RETRY = 10.0
_LONGEST_WAIT = 7 * 24 * _HOUR


def _course(
    generator: np.random.Generator,
    num_rounds: int,
    separation: int,
    most: int,
    server: tuple[int, int, int, float],
    habits: tuple[float, float, float, float],
) -> tuple[int, list[float]]:
    """Simulates a run; returns the number of rounds and the shares of devices found."""
    devices, clients, wanted, dropout = server
    awake_hours, delay_hours, persistence, round_minutes = habits
    # The window of each device begins at a random time of the same two hours.
    wakes = generator.uniform(0.0, 2.0, devices)
    last = np.full(devices, -num_rounds)
    times = np.zeros(devices, np.int64)
    back = np.zeros(devices)
    minutes, mood, waited = 2.0 * _HOUR, 0.0, 0.0
    shares = [0.0 for _ in range(0)]
    index = 0
    may_join = np.arange(devices)
    while index < num_rounds and waited < _LONGEST_WAIT and len(may_join) >= clients:
        since_waking = minutes / _HOUR % 24.0 - wakes[may_join]
        is_awake = np.where(since_waking < 0.0, since_waking + 24.0, since_waking) < awake_hours
        found = may_join[is_awake & (back[may_join] <= minutes)]
        if len(found) < clients:
            minutes += _RETRY
            waited += _RETRY
            continue
        shares.append(len(found) / len(may_join))
        # Dropouts are correlated from round to round.
        mood = persistence * mood + math.sqrt(1.0 - persistence**2) * generator.standard_normal()
        chance = dropout * min(2.0, max(0.0, 1.0 + 0.25 * mood))
        number = min(wanted, len(found))
        # Select devices by the first steps of a shuffle.
        for place, draw in enumerate(generator.random(number)):
            other = place + int(draw * (len(found) - place))
            found[place], found[other] = found[other], found[place]
        uploads = found[:number][generator.random(number) >= chance]
        minutes += round_minutes
        last[uploads] = index
        times[uploads] += 1
        delays = delay_hours * np.exp(generator.standard_normal(len(uploads)))
        back[uploads] = minutes + separation * round_minutes + _HOUR * delays
        if len(uploads) >= clients:
            index, waited = index + 1, 0.0
        may_join = np.flatnonzero((index - last >= separation) & (times < most))
    return index, shares


@dataclasses.dataclass(frozen=True)
class OtherFleet:
    """Random fleet of devices with habits that differ from the planner's model.

    Attributes:
      planned: The facts that a plan is told: population, cohort, averages, the median of the rounds
        that devices are away for, over-selection, the server's retries.
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
        """Draws a random fleet, and measures the share of available devices in it."""
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
        absent = _HOUR * found.delay_hours / found.round_minutes
        told = dataclasses.replace(
            planned,
            returning=mean,
            absent_rounds=absent,
            retry_rounds=_RETRY / found.round_minutes,
        )
        return dataclasses.replace(found, planned=told)

    def survives(self, num_rounds: int, schema: MinSeparation, seed: int) -> bool:
        """Returns whether all rounds take place under timers that enforce the schema."""
        return self.run(num_rounds, schema, seed)[0]

    def run(self, num_rounds: int, schema: MinSeparation, seed: int) -> tuple[bool, list[float]]:
        """Returns whether all rounds take place, and the share of devices found by each attempt."""
        fleet, generator = self.planned, np.random.default_rng([seed, 7])
        most = num_rounds if schema.max_participations is None else schema.max_participations
        index, shares = _course(
            generator,
            num_rounds,
            schema.separation,
            most,
            (fleet.population, fleet.clients_per_round, fleet.selected, fleet.dropout),
            (self.awake_hours, self.delay_hours, self.persistence, self.round_minutes),
        )
        return index == num_rounds, shares


def compile_course() -> None:
    """Compiles the simulator of fleets with habits if Numba is installed; results stay the same."""
    global _course
    with contextlib.suppress(ModuleNotFoundError):
        import numba

        _course = numba.njit(_course)


def survives_alone(other: OtherFleet, num_rounds: int, schema: MinSeparation, seed: int) -> bool:
    """Returns whether all rounds take place if devices drop out independently of each other."""
    fleet = other.planned
    behaviour = DeviceBehaviour(
        Independent(fleet.returning),
        over_selection=fleet.selected_per_upload,
        dropout_probability=fleet.dropout,
    )
    population = DevicePopulation(
        fleet.population, schema, fleet.clients_per_round, behaviour, seed
    )
    return population.starves(num_rounds)[0] is None


def survives_together(other: OtherFleet, num_rounds: int, schema: MinSeparation, seed: int) -> bool:
    """Returns whether all rounds take place in the simulator where devices drop out together."""
    return other.survives(num_rounds, schema, seed)


_SIMULATORS = {"alone": survives_alone, "together": survives_together}


def survive_alone(other: OtherFleet, num_rounds: int, schema: MinSeparation) -> bool:
    """Returns whether 95 % of fleets survive independent dropouts, simulated by counts."""
    fleet = dataclasses.replace(other.planned, spread=0.0, interruptions=0.0, absent_rounds=0.0)
    return fleet.survives(num_rounds, schema, least=_LEAST)


def share_together(
    other: OtherFleet, num_rounds: int, schema: MinSeparation, simulations: int
) -> float:
    """Returns the share of simulations that survive; stops once it is surely below 0.95."""
    failures = 0
    for seed in range(simulations):
        failures += not survives_together(other, num_rounds, schema, seed)
        if failures > (1.0 - _LEAST) * simulations:
            return _LEAST * (1.0 - failures / (seed + 1))
    return 1.0 - failures / simulations


def best_pair(
    num_rounds: int, fleet: Fleet, start: int | None, survive: Callable[[MinSeparation], bool]
) -> MinSeparation | None:
    """Returns the surviving pair (separation, participations) with the least noise, or None.

    Args:
      num_rounds: The rounds n.
      fleet: The fleet.
      start: The number of participations to try first. No result depends on it.
      survive: Whether a pair survives: if it does, one of a smaller separation does.
    """
    found, least = None, math.inf
    high = min(num_rounds, fleet.population // fleet.clients_per_round)
    numbers = range(math.ceil(num_rounds / high), num_rounds + 1)
    for most in sorted(numbers, key=lambda each: each != start):
        low = 1
        while low <= high and fleets.noise_of(num_rounds, MinSeparation(low, most)) >= least:
            low += 1
        if low > high or not survive(MinSeparation(low, most)):
            if most >= math.ceil(num_rounds / min(low, high)) and most != start:
                # All participations that fit are allowed already: a larger number changes nothing.
                break
            continue
        beyond = high + 1
        while beyond - low > 1:
            middle = (low + beyond) // 2
            low, beyond = (
                (middle, beyond) if survive(MinSeparation(middle, most)) else (low, middle)
            )
        found = MinSeparation(low, most)
        least = fleets.noise_of(num_rounds, found)
    return found


def tried(index: int, simulations: int) -> dict[str, object]:
    """Makes a plan for a random fleet, and returns how it does in both simulators.

    Args:
      index: The fleet.
      simulations: How many runs of the other simulator decide whether a pair survives.

    Returns:
      Whether the plan is refused (and whether it should not be), whether it survives once in each
      simulator, its noise over that of the best pairs that survive, and whether the best pair for
      the first simulator survives in the other one.
    """
    generator = np.random.default_rng([index, 3])
    other = OtherFleet.random(generator)
    num_rounds = int(generator.integers(30, 120))

    @functools.cache
    def alone(schema: MinSeparation) -> bool:
        return survive_alone(other, num_rounds, schema)

    @functools.cache
    def together(schema: MinSeparation) -> bool:
        return share_together(other, num_rounds, schema, simulations) >= _LEAST

    tests: dict[str, Callable[[MinSeparation], bool]] = {
        "alone": alone,
        "together": together,
        "both": lambda each: alone(each) and together(each),
    }
    found: dict[str, object] = {"index": index, "num_rounds": num_rounds, "fleet": other.planned}
    try:
        plan = other.planned.choose(num_rounds)[0]
    except ValueError:
        return found | {"wrongly": tests["both"](MinSeparation(1))}
    found["plan"] = plan.participation
    for name, run in _SIMULATORS.items():
        found[f"survives {name}"] = run(other, num_rounds, plan.participation, 10**6 + index)
    bests: dict[str, MinSeparation | None] = {}
    for name, test in tests.items():
        best = best_pair(num_rounds, other.planned, plan.participation.max_participations, test)
        bests[name] = found[f"best {name}"] = best
        noise = math.inf if best is None else fleets.noise_of(num_rounds, best)
        found[f"noise {name}"] = plan.noise / noise
    best = bests["alone"]
    found["best alone survives together"] = best is not None and together(best)
    return found


def define_flags(values: flags.FlagValues) -> None:
    """Defines the flags of the benchmark."""
    integer = flags.DEFINE_integer
    integer("fleets", 200, "How many random fleets.", lower_bound=1, flag_values=values)
    integer("first", 0, "The first of them.", lower_bound=0, flag_values=values)
    integer("processes", 2, "Side by side.", lower_bound=1, flag_values=values)
    integer("simulations", 40, "Of the other simulator, for a pair.", 20, flag_values=values)


def main(values: flags.FlagValues) -> None:
    """Plans and simulates for many fleets, and prints the shares of plans that do well."""
    results = []
    indices = range(values.first, values.first + values.fleets)
    with concurrent.futures.ProcessPoolExecutor(values.processes, None, compile_course) as pool:
        for result in pool.map(tried, indices, itertools.repeat(values.simulations)):
            results.append(result)
            print(result, file=sys.stderr, flush=True)
    planned = [each for each in results if "plan" in each]
    lines = [
        ("fleets, planned", f"{len(results)}, {len(planned)}"),
        ("refused wrongly", str(sum(bool(each.get("wrongly")) for each in results))),
    ]
    for name in _SIMULATORS:
        alive = np.mean([bool(each[f"survives {name}"]) for each in planned])
        lines.append((f"survive where devices drop out {name}", f"{100 * alive:.1f} %"))
    for name in (*_SIMULATORS, "both"):
        ratios = np.array([each[f"noise {name}"] for each in planned])
        near = np.mean(ratios <= _ABOVE)
        above = 100 * (np.median(ratios) - 1)
        text = f"{100 * near:.1f} % within 5 %; median {above:+.1f} %, largest {np.max(ratios):.2f}"
        lines.append((f"noise over the best that survives {name}", text))
    share = np.mean([bool(each["best alone survives together"]) for each in planned])
    lines.append(("best alone, survive where they do together", f"{100 * share:.1f} %"))
    command_line.print_result(values, {"rows": lines}, command_line.table(lines))


if __name__ == "__main__":
    sys.exit(command_line.run(__doc__ or "", define_flags, main))
