r"""Measures time, memory and disk of a noise row, against a normal vector and dp_aggregator.

  python benchmarks/noise.py
  python benchmarks/noise.py --only=blt-disk,banded_342-disk --plot=noise.png
  python benchmarks/noise.py --only=identity-state,blt-disk --tff
  python benchmarks/noise.py --against=../version-0.5.0

Each mechanism and storage runs in a process of its own. "Alone" times a row of noise, and in
the same process, between the rows, one standard normal vector of that size from the same
generator: the ratio of the medians counts, because clocks are noisy. With --tff, full
rounds of the aggregator with 10 clients are timed in TensorFlow Federated, in turn with
rounds of tff.learning.dp_aggregator. Memory is the peak of all processes, clients' updates
and TensorFlow itself included. --against=DIR measures each mechanism in another checkout of
this repository as well, right after this one. benchmarks/speed.py has rounds in NumPy.

Rows on disk are timed for a full block in a steady state, so that all of a round is in it:
reading the row, and the share of the next block. The dense matrix's rows cost more from block
to block; its block is the one in the middle of the run, whose mean is that of all rows, the
cost being linear in the row.
"""

import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from absl import flags

from mf_aggregators import inputs, participation
from mf_aggregators.commands import command_line
from mf_aggregators.factorizations import (
    BandedFactorization,
    DenseFactorization,
    Factorization,
    banded_inverse,
    blt,
    identity,
    tree_aggregation,
)
from mf_aggregators.kernel.rows import BandedNoise, Blocks, NoiseRecursion
from mf_aggregators.linear_algebra import square_root_bands
from mf_aggregators.tff import processes

_Fields: TypeAlias = dict[str, object]

_SEPARATION = 342


def _banded(num_rounds: int, num_bands: int) -> Factorization:
    # Bands are not optimised, because the cost of a noise row does not depend on their values.
    return BandedFactorization(square_root_bands(num_rounds, min(num_bands, num_rounds)))


_MECHANISMS: dict[str, Callable[[int], Factorization]] = {
    "identity": identity,
    "tree": tree_aggregation,
    "blt": lambda n: blt(n, 4, participation.MinSeparation(min(_SEPARATION, n))),
    "banded_16": lambda n: _banded(n, 16),
    "banded_64": lambda n: _banded(n, 64),
    "banded_342": lambda n: _banded(n, 342),
    "banded_inverse_16": lambda n: banded_inverse(n, min(16, n), coefficients="square_root"),
    "banded_inverse_64": lambda n: banded_inverse(n, min(64, n), coefficients="square_root"),
    "dense": lambda n: DenseFactorization(_banded(n, n).strategy_matrix()),
}
_DEFAULT = (
    "identity-state",
    "blt-state",
    "blt-disk",
    "tree-disk",
    "banded_64-disk",
    "banded_342-disk",
    "banded_inverse_16-disk",
    "banded_inverse_64-disk",
    "dense-disk",
)


def define_flags(values: flags.FlagValues) -> None:
    """Defines the flags of the benchmark."""
    integer, string = flags.DEFINE_integer, flags.DEFINE_string
    integer("num_parameters", 4_050_748, "Parameters d.", flag_values=values)
    integer("num_rounds", 2052, "Rounds n of the mechanisms.", flag_values=values)
    integer("rounds", 0, "Rounds to time; 0 for a block, or 16 with --tff.", flag_values=values)
    integer("clients", 10, "Clients of a round with --tff.", flag_values=values)
    flags.DEFINE_list(
        "only",
        list(_DEFAULT),
        f"Mechanisms ({', '.join(_MECHANISMS)}) with their storage, as in blt-disk.",
        flag_values=values,
    )
    flags.DEFINE_bool("tff", False, "Full rounds in TFF, not noise alone.", flag_values=values)
    string("noise_directory", None, "Where files go; default temporary.", flag_values=values)
    string("plot", None, "A PNG file to write.", flag_values=values)
    string("against", None, "A checkout to time beside this one.", flag_values=values)
    string("measure", None, "One mechanism, in this process; prints JSON.", flag_values=values)


def main(values: flags.FlagValues) -> None:
    """Times the noise rows of all mechanisms and prints a table."""
    for name in [values.measure] if values.measure else values.only:
        mechanism, _, storage = name.rpartition("-")
        command_line.check_choice(
            mechanism in _MECHANISMS and storage in ("state", "disk"),
            f"--only must name mechanisms among {', '.join(_MECHANISMS)}, each followed by -state "
            f"or -disk, found {name}.",
        )
    if values.measure:
        measured = (_measure_in_tff if values.tff else _measure_alone)(values)
        print(json.dumps(measured), flush=True)
        return
    rows = []
    for name in values.only:
        rows.append(_in_own_process(name, values, pathlib.Path(__file__).resolve().parent.parent))
        if values.against:
            other = _in_own_process(name, values, pathlib.Path(values.against).resolve())
            rows[-1] |= {f"against_{field}": value for field, value in other.items()}
    baseline = _baseline(values.tff)
    lines = [
        (
            inputs.part(row, str, "name"),
            f"{row['milliseconds']:8.1f} ms   {row['ratio']:5.2f} of {baseline} "
            f"({row['baseline_milliseconds']:.1f} ms), mean {row['mean_ratio']:5.2f}   "
            f"memory {row['memory_gb']:.2f} GB   disk {row['disk_gb']:.2f} GB   "
            f"start {row['start_seconds']:.1f} s, first round {row['first_seconds']:.1f} s"
            + _beside(row, values.tff),
        )
        for row in rows
    ]
    if values.plot:
        _plot(rows, baseline, values)
    command_line.print_result(
        values, {"baseline": baseline, "rows": rows}, command_line.table(lines)
    )


def _beside(row: _Fields, is_tff: bool) -> str:
    """Returns the times of the other checkout, if --against names one.

    In TFF both versions are compared with dp_aggregator, which is the same in both, because the
    load of the machine may change between their processes.
    """
    if "against_milliseconds" not in row:
        return ""
    quantity = "ratio" if is_tff else "milliseconds"
    times = inputs.part(row, float, quantity) / inputs.part(row, float, f"against_{quantity}")
    return (
        f"   {times:5.2f} times the other version ({row['against_milliseconds']:.1f} ms, "
        f"{row['against_ratio']:.2f} of {_baseline(is_tff)}, {row['against_memory_gb']:.2f} GB)"
    )


def _baseline(is_tff: bool) -> str:
    return "dp_aggregator" if is_tff else "one normal vector"


def _in_own_process(name: str, values: flags.FlagValues, checkout: pathlib.Path) -> _Fields:
    passed = ("num_parameters", "num_rounds", "rounds", "clients")
    with tempfile.TemporaryDirectory(dir=values.noise_directory) as directory:
        command = [
            sys.executable,
            os.fspath(checkout / "benchmarks" / "noise.py"),
            f"--measure={name}",
            f"--noise_directory={directory}",
            f"--tff={values.tff}",
            *(f"--{flag}={values[flag].value}" for flag in passed),
        ]
        environment = {**os.environ, "PYTHONPATH": os.fspath(checkout)}
        finished = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, check=True, env=environment
        )
    print(f"{name}: done", file=sys.stderr, flush=True)
    return {"name": name, **json.loads(finished.stdout.splitlines()[-1])}


def _measure_alone(values: flags.FlagValues) -> _Fields:
    processes.prepare_environment()
    import tensorflow as tf

    from mf_aggregators.kernel.claim import Claim, Pattern
    from mf_aggregators.kernel.integers import IntegerRows
    from mf_aggregators.noise import NoiseStorage
    from mf_aggregators.tff import dp_query
    from mf_aggregators.tff.tensor_rows import RowsInState, TensorNoise

    recursion = _recursion(values)
    specs = (tf.TensorSpec((values.num_parameters,), tf.float32),)
    seed = tf.constant(np.frombuffer(os.urandom(16), np.int64))
    begin = time.perf_counter()
    claim = Claim(recursion, Pattern((0,)), 1.0, 0.5)
    noise = dp_query.NoiseParts.of(
        [claim],
        1.0,
        specs,
        storage=NoiseStorage(values.measure.rpartition("-")[2]),
        directory=values.noise_directory,
    ).noise
    state = noise.initial_state(seed, seed)
    step = tf.function(lambda state: noise.next_row(state), autograph=False)
    step.get_concrete_function(state)
    start_seconds = time.perf_counter() - begin
    # The baseline is a row of independent noise, which is one standard normal vector.
    plain = TensorNoise(RowsInState(IntegerRows.of(BandedNoise(values.num_rounds))), specs)
    draw = tf.function(lambda state: plain.next_row(state)[0], autograph=False)
    plain_state = plain.initial_state(seed, seed)
    draw(plain_state)

    def advance(state: object) -> tuple[float, float, object]:
        begin = time.perf_counter()
        state = step(state)[-1]
        between = time.perf_counter()
        draw(plain_state)
        return between - begin, time.perf_counter() - between, state

    def at(index: int) -> object:
        return state._replace(round_index=tf.constant(index, tf.int64))

    with _PeakMemory() as memory:
        measured = _timed(values, recursion, advance, at, state)
    return _summary(measured, start_seconds, memory, values)


def _measure_in_tff(values: flags.FlagValues) -> _Fields:
    processes.prepare_environment()
    import tensorflow_federated as tff

    import mf_aggregators as mfa

    processes.end_workers_at_exit()
    mechanism, _, storage = values.measure.rpartition("-")
    value_type = tff.to_type(tff.TensorType(np.float32, [values.num_parameters]))
    generator = np.random.default_rng()
    updates = [
        generator.normal(size=values.num_parameters).astype(np.float32)
        for _ in range(values.clients)
    ]
    recursion = _recursion(values)
    begin = time.perf_counter()
    process = mfa.mf_dp_aggregator(
        _MECHANISMS[mechanism](values.num_rounds),
        participation=participation.SingleParticipation(),
        noise_multiplier=1.0,
        clip_norm=1.0,
        clients_per_round=values.clients,
        noise_storage=storage,
        noise_directory=values.noise_directory,
    ).create(value_type)
    state = process.initialize()
    start_seconds = time.perf_counter() - begin
    # The noise multiplier is 0.05 times the cohort, because dp_aggregator has a lower limit that
    # grows with it.
    plain = tff.learning.dp_aggregator(0.05 * values.clients, values.clients).create(value_type)
    plain_state = plain.next(plain.initialize(), updates).state

    def advance(state: object) -> tuple[float, float, object]:
        begin = time.perf_counter()
        state = process.next(state, updates).state
        between = time.perf_counter()
        plain.next(plain_state, updates)
        return between - begin, time.perf_counter() - between, state

    def at(index: int) -> object:
        (noise,) = processes.states_in(state)
        return noise._replace(round_index=np.int64(index)).put_into(state)

    with _PeakMemory() as memory:
        measured = _timed(values, recursion, advance, at, state)
    return _summary(measured, start_seconds, memory, values)


def _recursion(values: flags.FlagValues) -> NoiseRecursion:
    mechanism = values.measure.rpartition("-")[0]
    return _MECHANISMS[mechanism](values.num_rounds).noise_recursion()


def _timed(
    values: flags.FlagValues,
    recursion: NoiseRecursion,
    advance: Callable[[object], tuple[float, float, object]],
    at: Callable[[int], object],
    state: object,
) -> tuple[float, list[float], list[float]]:
    """Returns the seconds of the first round, and of steady-state rounds with their baseline."""
    blocks = Blocks.of(recursion)
    grows = values.measure.startswith("dense")
    first, _, state = advance(state)
    ours: list[float] = []
    theirs: list[float] = []

    def run(state: object, rounds: int, keep: bool) -> object:
        for _ in range(rounds):
            seconds, baseline, state = advance(state)
            if keep:
                ours.append(seconds)
                theirs.append(baseline)
        return state

    if values.measure.endswith("-disk"):
        # Time a block in a steady state; for a dense matrix the block in the middle of the run,
        # where a row has the mean cost. The first round there makes missing rows, and is not timed.
        largest_block = int(np.max(np.diff(blocks.starts)))
        steady = recursion.num_earlier_rows + largest_block
        middle = values.num_rounds // 2
        block = (
            np.searchsorted(blocks.starts, middle if grows else min(steady, middle), "right") - 1
        )
        # Begin at the block's first round, because each round of a block also makes a share of the
        # next block.
        place = int(blocks.starts[block])
        state = run(at(place), 1, keep=False)
        rounds = values.rounds or (16 if values.tff else largest_block)
        run(state, min(rounds, values.num_rounds - place - 1), keep=True)
    else:
        state = run(state, 3, keep=False)
        run(state, min(values.rounds or 20, values.num_rounds - 4), keep=True)
    return first, ours, theirs


def _summary(
    measured: tuple[float, list[float], list[float]],
    start_seconds: float,
    memory: "_PeakMemory",
    values: flags.FlagValues,
) -> _Fields:
    first, of_rounds, of_baseline = measured
    ours, theirs = statistics.median(of_rounds), statistics.median(of_baseline)
    directory = pathlib.Path(values.noise_directory)
    disk = sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())
    return {
        "milliseconds": 1e3 * ours,
        "mean_milliseconds": 1e3 * statistics.fmean(of_rounds),
        "most_milliseconds": 1e3 * max(of_rounds),
        "baseline_milliseconds": 1e3 * theirs,
        "ratio": ours / theirs,
        "mean_ratio": statistics.fmean(of_rounds) / theirs,
        "memory_gb": memory.peak_bytes / 1e9,
        "disk_gb": disk / 1e9,
        "start_seconds": start_seconds,
        "first_seconds": first,
        "rounds_timed": len(of_rounds),
    }


class _PeakMemory:
    """Samples the resident memory of this process and its children, and keeps the peak."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> "_PeakMemory":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _sample(self) -> None:
        import psutil

        own = psutil.Process()
        while not self._ended.wait(0.05):
            total = 0
            for process in [own, *own.children(recursive=True)]:
                try:
                    total += process.memory_info().rss
                except psutil.NoSuchProcess:
                    continue
            self.peak_bytes = max(self.peak_bytes, total)


def _plot(rows: list[_Fields], baseline: str, values: flags.FlagValues) -> None:
    from mf_aggregators import figures

    names = [inputs.part(row, str, "name") for row in rows]
    figure, (panels,) = figures.panels(1, 3, (4.0, names), sharey=True)
    columns = (
        ("mean_ratio", "time of a round", f"over {baseline}"),
        ("memory_gb", "memory, all processes", "GB"),
        ("disk_gb", "disk", "GB"),
    )
    for axes, (quantity, title, unit) in zip(panels, columns, strict=True):
        figures.bars(
            axes,
            names,
            [inputs.part(row, float, quantity) for row in rows],
            title=title,
            x=unit,
        )
    panels[0].axvline(1.0, color="black", linewidth=0.8, zorder=0.9)
    figures.heading(figure, f"{values.num_parameters:,} parameters, {values.num_rounds:,} rounds")
    figures.save(figure, values.plot)


if __name__ == "__main__":
    sys.exit(command_line.run(__doc__ or "", define_flags, main))
