"""How near a server in NumPy is to what its machine can do.

The limits are measured in the same run: one vector of float32 normals (N) and a copy of memory.
Beside them stand the parts of a round of ``mfa.Aggregator`` with and without the compiled function
(the extra ``fast``), JAX's normal numbers where JAX is installed, and whole rounds, from which the
seconds for more clients follow. Times are medians, of the clock and of all threads' processors;
ratios are of the latter. ``--whole_round`` runs one round of all clients in place of it.
"""

import itertools
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from absl import flags

import mf_aggregators as mfa
from mf_aggregators.commands import command_line
from mf_aggregators.kernel import draws, integers
from mf_aggregators.noise import fast_tiles

_MECHANISMS: dict[str, Callable[[int], Any]] = {
    "identity": mfa.factorizations.identity,
    "blt 4": lambda n: mfa.factorizations.blt(n, num_buffers=4),
    "banded 64": lambda n: mfa.factorizations.banded(n, 64),
}
_ROUNDS = 80


def define_flags(values: flags.FlagValues) -> None:
    """Defines the flags of the benchmark."""
    integer = flags.DEFINE_integer
    integer("num_parameters", 12_000_000, "Parameters.", flag_values=values)
    integer("num_parameters_of_mechanisms", 4_000_000, "Those of whole rounds.", flag_values=values)
    integer("clients", 10, "Clients of a timed round.", flag_values=values)
    integer("clients_per_round", 6_500, "Clients that seconds are stated for.", flag_values=values)
    integer("repeats", 5, "Runs that a median is of.", flag_values=values)
    flags.DEFINE_bool("whole_round", False, "Run one round of all clients.", flag_values=values)


def main(values: flags.FlagValues) -> None:
    """Measures, and prints a table."""
    if values.whole_round:
        _print_whole_round(values)
        return
    rows: list[dict[str, Any]] = []
    for name, seconds, of_processor, size in _measured(values):
        # Processor time: that of the clock depends on other work of the machine.
        limit = rows[0]["processor"] * size / values.num_parameters if rows else of_processor
        ratio = of_processor / limit
        rows.append({"work": name, "seconds": seconds, "processor": of_processor, "vectors": ratio})
        print(f"{name}: done", file=sys.stderr, flush=True)
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    spent = {row["work"]: row["processor"] for row in rows}
    one = (spent["round of some clients"] - spent["round without clients"]) / values.clients
    whole = one * values.clients_per_round + spent["round without clients"]
    fields = {"cores": cores, "load": load, "rows": rows, "processor_seconds_of_round": whole}
    lines = [
        (
            row["work"],
            f"{1e3 * row['seconds']:8.1f} ms   {1e3 * row['processor']:8.1f} ms of processors   "
            f"{row['vectors']:6.2f} N",
        )
        for row in rows
    ]
    text = (
        f"{command_line.table(lines)}\n\nA round of {values.clients_per_round} clients takes "
        f"{whole:.0f} s of processors. {cores} cores, load {load:.1f}."
    )
    command_line.print_result(values, fields, text)


def _print_whole_round(values: flags.FlagValues) -> None:
    """Runs a round of all clients and prints its time, memory and the machine's load."""
    size, clients, generator = (
        values.num_parameters,
        values.clients_per_round,
        np.random.default_rng(),
    )
    # One update is in memory at a time; a few arrays stand for those that arrive.
    arriving = [generator.standard_normal(size, np.float32) for _ in range(3)]
    mechanism = mfa.Mechanism(
        mfa.factorizations.blt(_ROUNDS, 4), mfa.participation.SingleParticipation(), 1.0
    )
    aggregator = mfa.Aggregator(
        mechanism, clip_norm=1.0, clients_per_round=clients, template=arriving[0]
    )
    state, load = aggregator.initialize(), os.getloadavg()[0]
    begin = time.perf_counter(), time.process_time()
    aggregator.next(state, itertools.islice(itertools.cycle(arriving), clients))
    fields = {
        "clients": clients,
        "num_parameters": size,
        "seconds": time.perf_counter() - begin[0],
        "processor": time.process_time() - begin[1],
        "memory_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
        "cores": len(os.sched_getaffinity(0)),
        "load_before": load,
        "load": os.getloadavg()[0],
    }
    text = (
        f"A round of {clients} clients and {size} parameters, BLT with 4 buffers: "
        f"{fields['seconds']:.1f} s, {fields['processor']:.1f} s of processors, at most "
        f"{fields['memory_gb']:.2f} GB. {fields['cores']} cores, load {load:.1f} before, "
        f"{fields['load']:.1f} after."
    )
    command_line.print_result(values, fields, text)


def _measured(values: flags.FlagValues) -> Iterator[tuple[str, float, float, int]]:
    """Yields names, seconds, processor seconds and coordinates; the first is the limit N."""
    size, generator = values.num_parameters, np.random.default_rng()

    def timed(name: str, work: Callable[[], Any], of: int = size) -> tuple[str, float, float, int]:
        work()
        found = []
        for _ in range(values.repeats):
            begin = time.perf_counter(), time.process_time()
            work()
            found.append((time.perf_counter() - begin[0], time.process_time() - begin[1]))
        wall, processor = (statistics.median(each) for each in zip(*found, strict=True))
        return name, wall, processor, of

    update = generator.standard_normal(size, np.float32)
    other = np.empty_like(update)
    yield timed("N: float32 normals", lambda: generator.standard_normal(out=other, dtype="f4"))
    yield timed("copy of a float32 vector", lambda: np.copyto(other, update))
    try:
        import jax

        key = jax.random.PRNGKey(0)
        yield timed(
            "JAX: float32 normals", lambda: jax.random.normal(key, (size,)).block_until_ready()
        )
    except ImportError:
        pass
    seed = draws.fresh_seed()[0]
    yield timed("row of noise, NumPy, one thread", lambda: draws.integers(seed, 1, 0, size))
    if (fill_tile := fast_tiles.load()) is not None:
        compiled = draws.Engine(fill_tile=fill_tile)
        yield timed(
            "row of noise, Numba, one thread", lambda: draws.integers(seed, 1, 0, size, compiled)
        )
    record: list[Any] = [np.empty(size, np.int64)]
    total = np.zeros(size, np.int64)

    def clip_and_add() -> None:
        integers.clip_to_grid([update], 1.0, integers.STEPS_PER_CLIP_NORM, record)
        np.add(total, record[0], out=total)

    yield timed("clip, round and add an update, one thread", clip_and_add)
    runs = {"round without clients": ("identity", size, 0)}
    runs["round of some clients"] = ("identity", size, values.clients)
    few = values.num_parameters_of_mechanisms
    runs |= {
        f"round without clients, {few} parameters, {name}": (name, few, 0) for name in _MECHANISMS
    }
    for name, (mechanism, of, clients) in runs.items():
        yield timed(name, _rounds(mechanism, update[:of], clients), of)


def _rounds(mechanism: str, update: Any, clients: int) -> Callable[[], None]:
    """Returns what runs a round after those that it ran before."""
    factorization = _MECHANISMS[mechanism](_ROUNDS)
    once = mfa.participation.SingleParticipation()
    aggregator = mfa.Aggregator(
        mfa.Mechanism(factorization, once, 1.0),
        clip_norm=1.0,
        clients_per_round=max(clients, 1),
        template=update,
    )
    state = aggregator.initialize()

    def work() -> None:
        nonlocal state
        state, _ = aggregator.next(state, [update] * clients)

    # The rows of banded noise follow from those of 63 rounds.
    for _ in range(64 if mechanism.startswith("banded") else 1):
        work()
    return work


if __name__ == "__main__":
    sys.exit(command_line.run(__doc__ or "", define_flags, main))
