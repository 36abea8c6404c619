r"""Measures the seconds and memory of simulated device populations, for each availability model.

  python benchmarks/device_populations.py --devices=10000000 --rounds=2000

Each line is a process of its own, whose peak memory is the largest resident set since its
start, imports and the creation of the population included. The baseline asks every device in
every round, in the plainest NumPy; it is timed for a few rounds and extrapolated.
"""

import concurrent.futures
import functools
import multiprocessing
import resource
import sys
import time
from collections.abc import Callable
from typing import ParamSpec

import numpy as np
from absl import flags

from mf_aggregators import random_streams
from mf_aggregators.commands import command_line
from mf_aggregators.participation import MinSeparation
from simulations.devices.device_behaviour import (
    Always,
    Availability,
    DeviceBehaviour,
    Diurnal,
    Independent,
    Trace,
)
from simulations.devices.device_populations import DevicePopulation

_DAY = 86400.0
_SEED = 1
_P = ParamSpec("_P")
# The failures of devices that all lines of the table but the first simulate.
_disturbed = functools.partial(
    DeviceBehaviour,
    over_selection=1.3,
    dropout_probability=0.1,
    upload_loss_probability=0.02,
    history_loss_probability=1e-5,
)


def define_flags(values: flags.FlagValues) -> None:
    """Defines the flags of the benchmark."""
    flags.DEFINE_integer("devices", 10_000_000, "The population.", flag_values=values)
    flags.DEFINE_integer("rounds", 2000, "Rounds.", flag_values=values)
    flags.DEFINE_integer("clients_per_round", 1000, "The cohort size.", flag_values=values)
    flags.DEFINE_integer("separation", 300, "The timers' rounds.", flag_values=values)
    flags.DEFINE_integer(
        "baseline_rounds", 3, "Rounds of the baseline that are timed.", flag_values=values
    )
    flags.DEFINE_list("only", [], "The lines to run; default: all.", flag_values=values)


def main(values: flags.FlagValues) -> None:
    """Times all simulations and prints a table with a line for each."""
    names = values.only or list(_behaviours(10))
    rows: list[dict[str, object]] = []
    for name in names:
        sizes = (values.devices, values.clients_per_round, values.separation)
        row = _in_own_process(_time, name, *sizes, values.rounds)
        baseline = _in_own_process(_time_baseline, name, *sizes, values.baseline_rounds)
        row["baseline_seconds"] = baseline["seconds"] / values.baseline_rounds * values.rounds
        row["baseline_gigabytes"] = baseline["gigabytes"]
        row["times_faster"] = row["baseline_seconds"] / row["seconds"]
        rows.append({"population": name, **row})
        print(", ".join(f"{key} {each}" for key, each in rows[-1].items()), file=sys.stderr)
    table = [
        (
            str(row["population"]),
            f"{row['seconds']:7.1f} s  {row['gigabytes']:5.2f} GB   baseline "
            f"{row['baseline_seconds']:7.0f} s  {row['baseline_gigabytes']:5.2f} GB   "
            f"{row['times_faster']:6.1f} times faster",
        )
        for row in rows
    ]
    command_line.print_result(values, {"rows": rows}, command_line.table(table))


def _behaviours(num_devices: int) -> dict[str, DeviceBehaviour]:
    one_zone = Diurnal(utc_offsets=(-5.0,))
    return {
        "undisturbed": DeviceBehaviour(),
        "always": _disturbed(Always()),
        "independent 5 %": _disturbed(Independent(0.05)),
        "diurnal world": _disturbed(Diurnal()),
        "diurnal one zone": _disturbed(one_zone),
        "diurnal wall clock": _disturbed(Diurnal(), timer_hours=72.0),
        "trace": _disturbed(_trace(num_devices)),
    }


def _trace(num_devices: int) -> Availability:
    """Returns a trace in which each device is available for one span in every day."""
    generator = np.random.default_rng(_SEED)
    starts = generator.uniform(0.0, 0.8 * _DAY, num_devices)
    ends = starts + generator.uniform(0.01, 0.2, num_devices) * _DAY
    return Trace(np.arange(num_devices), starts, ends, period_seconds=_DAY)


def _behaviour(name: str, num_devices: int) -> DeviceBehaviour:
    # Only the line on traces makes a trace of all devices, which is expensive.
    return _behaviours(num_devices if name == "trace" else 10)[name]


def _time(name: str, devices: int, clients: int, separation: int, rounds: int) -> dict[str, float]:
    behaviour = _behaviour(name, devices)
    start = time.perf_counter()
    population = DevicePopulation(devices, MinSeparation(separation), clients, behaviour, _SEED)
    attempts = sum(population.next_round().attempts for _ in range(rounds))
    return {
        "seconds": time.perf_counter() - start,
        "gigabytes": _peak_gigabytes(),
        "attempts": attempts,
    }


def _time_baseline(
    name: str, devices: int, clients: int, separation: int, rounds: int
) -> dict[str, float]:
    behaviour = _behaviour(name, devices)
    everyone = np.arange(devices)
    last_round = np.full(devices, -separation, dtype=np.int64)
    start = time.perf_counter()
    for index in range(rounds):
        seconds = 6 * 3600.0 + index * behaviour.round_seconds
        available = behaviour.availability.available(everyone, seconds, index, _SEED)
        joining = np.flatnonzero(available & (index - last_round >= separation))
        generator = random_streams.generator_of(_SEED, index)
        cohort = generator.choice(joining, size=clients, replace=False)
        last_round[cohort] = index
    return {"seconds": time.perf_counter() - start, "gigabytes": _peak_gigabytes()}


def _peak_gigabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def _in_own_process(
    function: Callable[_P, dict[str, float]], *arguments: _P.args, **options: _P.kwargs
) -> dict[str, float]:
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, *arguments, **options).result()


if __name__ == "__main__":
    sys.exit(command_line.run(__doc__ or "", define_flags, main))
