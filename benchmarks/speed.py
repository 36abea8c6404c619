r"""Compares the library's speed with limits of the machine; makes the table in docs/production.md.

  python benchmarks/speed.py
  python benchmarks/speed.py --only=certificate,ledger
  python benchmarks/speed.py --tff

Limits are measured in the same run: one vector of float32 normals (N), and the bytes that a work
has to move at the pace of a copy of memory. Beside them stand the works in NumPy, with the compiled
functions (the extra ``fast``), and JAX's normal numbers where JAX is installed. Times are medians
of processors, of all threads; ``--format=json`` has those of the clock too. Rows on disk have the
round that takes longest as well. ``--tff`` adds rounds of ``benchmarks/training_rounds.py``.
``--whole_round`` runs one round of all clients of a server in place of the table.
"""

import contextlib
import functools
import importlib.metadata
import itertools
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TypeAlias

import numpy as np
from absl import flags

import mf_aggregators as mfa
from mf_aggregators.commands import command_line
from mf_aggregators.kernel import draws, integers
from mf_aggregators.kernel.numbers import IntArray
from mf_aggregators.noise import fast_tiles
from mf_aggregators.privacy import ledgers

# The seconds of a work, or why it was not timed.
_Times: TypeAlias = dict[str, float] | str
_Work: TypeAlias = Callable[[draws.Engine], object]
_MECHANISMS: dict[str, Callable[[int], mfa.factorizations.Factorization]] = {
    "identity": mfa.factorizations.identity,
    "blt 4": lambda n: mfa.factorizations.blt(n, num_buffers=4),
    "banded 64": lambda n: mfa.factorizations.toeplitz(n, num_bands=64),
}
_ROUNDS = 320
_WORKS = ("row", "clip", "recursion", "release", "disk", "ledger", "certificate")


def define_flags(values: flags.FlagValues) -> None:
    """Defines the flags of the benchmark."""
    integer = flags.DEFINE_integer
    integer("num_parameters", 12_000_000, "Parameters.", flag_values=values)
    integer("num_parameters_of_mechanisms", 4_000_000, "Those of releases.", flag_values=values)
    integer("num_parameters_on_disk", 1_000_000, "Those of rows on disk.", flag_values=values)
    integer("num_lines", 1_000_000, "Lines of a ledger.", flag_values=values)
    integer("num_rounds", 2052, "Rounds of a certificate.", flag_values=values)
    integer("clients_per_round", 6_500, "Clients that seconds are stated for.", flag_values=values)
    integer("repeats", 5, "Runs that a median is of.", flag_values=values)
    flags.DEFINE_list("only", list(_WORKS), "Which works.", flag_values=values)
    flags.DEFINE_bool("tff", False, "Rounds in TFF as well.", flag_values=values)
    flags.DEFINE_bool("whole_round", False, "Run one round of all clients.", flag_values=values)


def main(values: flags.FlagValues) -> None:
    """Measures the works and their limits, and prints a table."""
    if values.whole_round:
        _print_whole_round(values)
        return
    known = set(values.only) <= {*_WORKS}
    command_line.check_choice(known, f"--only names works among {', '.join(_WORKS)}.")
    before, size = os.getloadavg()[0], values.num_parameters
    source, target = np.ones(size, np.float32), np.ones(size, np.float32)
    generator = np.random.default_rng()
    normals = _median(values, lambda: generator.standard_normal(out=target, dtype="f4"))
    copy = _median(values, lambda: np.copyto(target, source))
    rows: list[dict[str, object]] = []
    lines_of_works = []
    with contextlib.ExitStack() as stack:
        for name, work, entries, moved, repeats in _works(values, stack):
            times, limits = {"numpy": _with(values, work, repeats, fast=False)}, {}
            if entries:
                times["compiled"] = _with(values, work, repeats, fast=True)
                limits["normals"] = normals["processor"] * entries / size
                limits["memory"] = copy["processor"] * entries * moved / (8 * size)
            rows.append({"work": name, **times, **limits})
            lines_of_works.append((name, _line(times, limits)))
            print(f"{name}: {lines_of_works[-1][1]}", file=sys.stderr, flush=True)
    peers = {"JAX: normals": _normals_of_jax(values), "jax_privacy": _jax_privacy()}
    cores, after, pace = len(os.sched_getaffinity(0)), os.getloadavg()[0], copy["processor"]
    fields = {
        "cores": cores,
        "load": [before, after],
        "normals": normals,
        "gigabytes_per_second": 8e-9 * size / pace,
        "rows": rows,
        "peers": peers,
    }
    lines = [("N, float32 normals", f"{_shown(normals)}, {size} parameters")]
    lines += [("memory", f"{8e-9 * size / pace:.1f} GB/s, read and written")]
    lines += [*lines_of_works, *((name, _shown(found)) for name, found in peers.items())]
    if values.tff:
        lines.append(("TFF", _rounds_of_tff()))
    text = f"{command_line.table(lines)}\n\n{cores} cores, load {before:.1f} before and "
    command_line.print_result(values, fields, f"{text}{after:.1f} after.")


def _line(times: Mapping[str, _Times], limits: Mapping[str, float]) -> str:
    """Returns a line of the table: a work's times, and how many times its limits they are."""
    found = [f"NumPy {_shown(times['numpy'])}"]
    if "compiled" in times:
        found += [f"compiled {_shown(times['compiled'])}", f"limit {1e3 * limits['memory']:.1f} ms"]
        for kind, seconds in times.items():
            if not isinstance(seconds, str):
                spent = seconds["processor"]
                ratios = spent / limits["normals"], spent / limits["memory"]
                found.append(f"{kind} {ratios[0]:.2f} N, {ratios[1]:.1f} limits")
    return ";  ".join(found)


def _shown(found: _Times) -> str:
    if isinstance(found, str):
        return found
    most = f" (at most {1e3 * found['most']:.0f})" if found["most"] > 2 * found["processor"] else ""
    return f"{1e3 * found['processor']:.1f} ms{most}"


def _median(
    values: flags.FlagValues, work: Callable[[], object], repeats: int = 0
) -> dict[str, float]:
    """Returns medians of a work's processor and clock seconds, after a warm-up."""
    if repeats != 1:
        work()
    found = []
    for _ in range(repeats or values.repeats):
        begin = time.perf_counter(), time.process_time()
        work()
        found.append((time.process_time() - begin[1], time.perf_counter() - begin[0]))
    processor, clock = zip(*found, strict=True)
    medians = {"processor": statistics.median(processor), "seconds": statistics.median(clock)}
    return {**medians, "most": max(processor)}


def _with(values: flags.FlagValues, work: _Work, repeats: int, fast: bool) -> _Times:
    """Times a work, with or without the compiled functions."""
    os.environ["NUMBA_DISABLE_JIT"] = "0" if fast else "1"
    fast_tiles.load.cache_clear()
    functions = fast_tiles.load()
    if fast and not functions:
        return "not installed (the extra fast)"
    engine = draws.Engine(None, *functions)
    return _median(values, lambda: work(engine), repeats)


def _works(
    values: flags.FlagValues, stack: contextlib.ExitStack
) -> Iterator[tuple[str, _Work, int, int, int]]:
    """Yields works to measure, with how many entries each goes over and bytes moved per entry.

    A work takes an engine. The number of entries is 0 if the work has no compiled functions. The
    last number is how often the work is timed, if that differs from the flags.
    """
    size, few = values.num_parameters, values.num_parameters_of_mechanisms
    update = np.random.default_rng().standard_normal(size, np.float32)
    seed = draws.fresh_seed()[0]
    total = np.zeros(size, np.int64)
    steps: list[IntArray] = [np.empty(size, np.int64)]

    def row(engine: draws.Engine) -> None:
        draws.integers(seed, 1, 0, size, engine)

    def clip(engine: draws.Engine) -> None:
        integers.clip_to_grid([update], 1.0, integers.STEPS_PER_CLIP_NORM, steps, engine)
        np.add(total, steps[0], out=total)

    def recursion(name: str, of: int) -> _Work:
        rows = integers.IntegerRows.of(_MECHANISMS[name](_ROUNDS).noise_recursion())
        vectors, earlier = rows.recursion.num_state_vectors, rows.recursion.num_earlier_rows
        kept = *np.ones((vectors, of)), *np.ones((earlier, of), np.int32)
        z = np.ones(of, np.int64)
        return lambda engine: rows.next_row(64, kept, z, engine)

    def release(name: str, of: int, directory: str | None = None) -> _Work:
        found = _rounds(name, update[:of], directory)
        return lambda _: found()

    def certificate(_: draws.Engine) -> None:
        bands, separation = min(32, values.num_rounds // 6), values.num_rounds // 6
        found = mfa.factorizations.toeplitz(values.num_rounds, num_bands=bands)
        scheme = mfa.participation.MinSeparationSampling(
            values.num_rounds, bands, 342_477, 100, separation
        )
        certification = mfa.participation.Certification()
        mfa.calibrate(found, scheme, epsilon=2.0, delta=1e-6, certification=certification)

    on_disk = values.num_parameters_on_disk
    for kind in values.only:
        if kind == "row":
            yield "row of exact noise, one thread", row, size, 8, 0
        elif kind == "clip":
            yield "clip, round and add an update, one thread", clip, size, 20, 0
        elif kind == "recursion":
            yield "recursion of blt 4, one thread", recursion("blt 4", size), size, 84, 0
            name = f"recursion of banded 64, {few} parameters, one thread"
            yield name, recursion("banded 64", few), few, 276, 0
        elif kind == "release":
            for name in _MECHANISMS:
                yield f"release of {few} parameters, {name}", release(name, few), few, 24, 0
        elif kind == "disk":
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            work = release("banded 64", on_disk, folder)
            # This release is timed 64 times, for all rows of a block.
            yield f"release of {on_disk} parameters, banded 64 on disk", work, on_disk, 24, 64
        elif kind == "ledger":
            path = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory())) / "ledger.csv"
            permuted = np.random.default_rng(0).permutation(values.num_lines)
            lines = (f"client-{each // 5},{each % 5}\n" for each in permuted.tolist())
            path.write_text("".join(lines))
            yield f"ledger of {values.num_lines} lines", functools.partial(_load, path), 0, 0, 0
        else:
            name = f"certified noise multiplier for {values.num_rounds} rounds"
            yield name, certificate, 0, 0, 1


def _load(path: pathlib.Path, _: draws.Engine) -> None:
    ledgers.load(path, 5)


def _normals_of_jax(values: flags.FlagValues) -> _Times:
    try:
        import jax
    except ImportError:
        return "not installed"
    key, size = jax.random.PRNGKey(0), (values.num_parameters,)
    return _median(values, lambda: jax.random.normal(key, size).block_until_ready())


def _jax_privacy() -> str:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        version = importlib.metadata.version("jax-privacy")
        return f"{version} is installed: its noise is JAX's normals, combined"
    return "not installed: it needs Python 3.12 and another NumPy than TFF"


def _rounds_of_tff() -> str:
    program = pathlib.Path(__file__).with_name("training_rounds.py")
    options = "--clients=100", "--sentences=1", "--rounds=3", "--noise_storage=state"
    which = "--mechanisms=identity,blt,passed_state"
    found = subprocess.run(
        [sys.executable, program, *options, which], capture_output=True, text=True, check=True
    )
    ratios = [line for line in found.stdout.splitlines() if "cpu_seconds_ratio " in line]
    return "; ".join(" ".join(line.split()) for line in ratios)


def _print_whole_round(values: flags.FlagValues) -> None:
    """Runs one round of all clients; prints its time, its memory and the machine's load."""
    size, clients, generator = (
        values.num_parameters,
        values.clients_per_round,
        np.random.default_rng(),
    )
    # Only one update is in memory at a time; three arrays in turn stand for the updates that
    # arrive.
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


def _rounds(mechanism: str, update: np.ndarray, directory: str | None) -> Callable[[], None]:
    """Returns a function that runs the next round of a run, without clients, at each call."""
    factorization = _MECHANISMS[mechanism](_ROUNDS)
    once = mfa.participation.SingleParticipation()
    aggregator = mfa.Aggregator(
        mfa.Mechanism(factorization, once, 1.0),
        clip_norm=1.0,
        clients_per_round=1,
        template=update,
        noise_storage="disk" if directory else "state",
        noise_directory=directory,
    )
    state = aggregator.initialize()

    def work() -> None:
        nonlocal state
        state, _ = aggregator.next(state, [])

    os.environ["NUMBA_DISABLE_JIT"] = "0"
    fast_tiles.load.cache_clear()
    # Run 64 rounds first for bands: a row of banded noise depends on the 63 rows before it.
    for _ in range(64 if mechanism.startswith("banded") else 1):
        work()
    return work


if __name__ == "__main__":
    sys.exit(command_line.run(__doc__ or "", define_flags, main))
