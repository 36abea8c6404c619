r"""Measures seconds per round at the papers' model size, against TFF without privacy.

  python benchmarks/training_rounds.py --clients=20 --rounds=4 --mechanisms=blt
  python benchmarks/training_rounds.py --clients=100 --sentences=1 --mechanisms=blt,passed_state \
    --noise_storage=state

The baseline is ``tff.learning`` with a plain mean, the papers' LSTM and the same clients; the
others are the process of a run: zeroing, clipping, measurements and correlated noise.
``dp_aggregator`` is TFF's own, and ``passed_state`` a plain mean with a state of the size of BLT's
that nothing changes: what TFF takes for it. Rounds of all processes take turns, each turn begins
with another one, and those after the first turn count. A ratio is the median over the turns of the
time of a process over that of the baseline in the same turn, with the quartiles; CPU seconds, of
this process and TFF's worker, depend less on what else the machine does. Clients' data is made
anew for every round, and timed apart. What the mechanism costs is best seen with one local step
(``--sentences=16``), and then compared with a client of the papers' 16 steps (``--sentences=256``),
whose rounds vary by more than that.
"""

import os
import pathlib
import sys
import tempfile
import time
from typing import TYPE_CHECKING

import numpy as np
import psutil
from absl import flags

import mf_aggregators as mfa
from mf_aggregators.commands import command_line
from mf_aggregators.kernel.draws import TILE
from mf_aggregators.tff import processes

if TYPE_CHECKING:
    import tensorflow_federated as tff

_BASELINE = "no_privacy"
_BUFFERS = 4
# There is little noise, so that all processes train alike. Large noise saturates the gates of a
# model; its gradients are then denormal numbers, with which processors are slow.
_NOISE_MULTIPLIER = 1e-4


def define_flags(values: flags.FlagValues) -> None:
    """Defines the flags of the benchmark."""
    flags.DEFINE_integer("clients", 20, "Clients per round.", flag_values=values)
    flags.DEFINE_integer("sentences", 50, "Sentences of a client.", flag_values=values)
    flags.DEFINE_integer("rounds", 8, "Rounds of each process.", flag_values=values)
    flags.DEFINE_integer("num_rounds", 2052, "Rounds that there is noise for.", flag_values=values)
    flags.DEFINE_integer("vocab_size", 10_000, "Words that are predicted.", flag_values=values)
    flags.DEFINE_integer("embedding_size", 96, "Of the model.", flag_values=values)
    flags.DEFINE_integer("lstm_size", 670, "Of the model.", flag_values=values)
    known = "identity, blt, banded, tree, dp_aggregator or passed_state."
    flags.DEFINE_list("mechanisms", ["identity", "blt"], known, flag_values=values)
    flags.DEFINE_string("noise_storage", "auto", "Of the mechanisms.", flag_values=values)


def main(values: flags.FlagValues) -> None:
    """Times rounds of all processes in turn and prints a table."""
    processes.prepare_environment()
    import tensorflow as tf
    import tensorflow_federated as tff

    from simulations.training import training_parts
    from stackoverflow_nwp import run_stackoverflow
    from stackoverflow_nwp.task import NextWordTask

    processes.end_workers_at_exit()
    paper = run_stackoverflow.PAPER
    task = NextWordTask(
        values.vocab_size, 20, values.embedding_size, values.lstm_size, shared_embedding=False
    )
    generator = np.random.default_rng(0)
    sentences = [
        generator.integers(1, values.vocab_size, (values.sentences, 21)).astype(np.int32)
        for _ in range(values.clients)
    ]

    def dataset(rows: np.ndarray) -> tf.data.Dataset:
        pairs = tf.data.Dataset.from_tensor_slices((rows[:, :-1], rows[:, 1:]))
        return pairs.batch(paper.batch_size)

    def process(
        aggregator: tff.aggregators.UnweightedAggregationFactory,
    ) -> tff.learning.templates.LearningProcess:
        return tff.learning.algorithms.build_unweighted_fed_avg(
            task.model_fn(),
            tff.learning.optimizers.build_sgdm(paper.client_learning_rate),
            tff.learning.optimizers.build_sgdm(1.0, paper.server_momentum),
            model_aggregator=aggregator,
            loop_implementation=tff.learning.LoopImplementation.DATASET_ITERATOR,
        )

    schema = mfa.participation.MinSeparation(max(1, values.num_rounds // 6))
    with tempfile.TemporaryDirectory() as directory:
        plain = tff.aggregators.UnweightedMeanFactory()
        timed = {_BASELINE: process(plain)}
        of_tff = {
            "dp_aggregator": lambda: tff.learning.dp_aggregator(
                _NOISE_MULTIPLIER, float(values.clients)
            ),
            "passed_state": lambda: _passed_state(plain),
        }
        for mechanism in values.mechanisms:
            if mechanism in of_tff:
                timed[mechanism] = process(of_tff[mechanism]())
                continue
            noise = pathlib.Path(directory) / mechanism
            noise.mkdir(mode=0o700)
            timed[mechanism] = process(
                training_parts.aggregator(
                    _factorization(mechanism, values.num_rounds, schema),
                    participation=schema,
                    noise_multiplier=_NOISE_MULTIPLIER,
                    clip_norm=1.0,
                    clients_per_round=values.clients,
                    zeroing_norm=1.0,
                    noise_storage=values.noise_storage,
                    noise_directory=noise,
                )
            )
        states = {name: process.initialize() for name, process in timed.items()}
        names = list(timed)
        # The wall-clock seconds and the CPU seconds, each by process and turn.
        seconds, cpu = np.zeros((2, len(names), values.rounds))
        of_data = np.zeros_like(seconds)
        for turn in range(values.rounds):
            for place in np.roll(np.arange(len(names)), -turn):
                start = time.perf_counter()
                data = [dataset(rows) for rows in sentences]
                begin, begin_cpu = time.perf_counter(), _cpu_seconds()
                output = timed[names[place]].next(states[names[place]], data)
                states[names[place]] = output.state
                seconds[place, turn] = time.perf_counter() - begin
                cpu[place, turn] = _cpu_seconds() - begin_cpu
                of_data[place, turn] = begin - start
                spent = f"{names[place]}: {cpu[place, turn]:.1f} CPU seconds in turn {turn}"
                print(spent, file=sys.stderr, flush=True)
    fields = _fields(names, seconds[:, 1:], cpu[:, 1:])
    fields["data_seconds"] = float(np.median(of_data))
    fields["load"] = os.getloadavg()[0]
    command_line.print_result(values, fields, command_line.table(list(fields.items())))


def _passed_state(
    plain: "tff.aggregators.UnweightedAggregationFactory",
) -> "tff.aggregators.UnweightedAggregationFactory":
    """Returns a mean that passes an unused state on, of the size of BLT noise's state."""
    import tensorflow as tf
    import tensorflow_federated as tff

    from mf_aggregators.tff.tensor_rows import TensorNoise

    class Passing(tff.aggregators.UnweightedAggregationFactory):
        def create(self, value_type: tff.Type) -> tff.templates.AggregationProcess:
            mean = plain.create(value_type)
            kinds = tff.structure.flatten(value_type)
            specs = tuple(tf.TensorSpec(kind.shape, kind.dtype) for kind in kinds)
            sizes = [
                (each.num_tiles, _BUFFERS, min(each.size, TILE))
                for each in TensorNoise.layout_of(specs).segments
            ]

            @tff.tensorflow.computation
            def start() -> processes.NoiseState:
                zero, two = tf.zeros([], tf.int64), tf.zeros([2], tf.int64)
                history = tuple(tf.zeros(size, tf.float64) for size in sizes)
                return processes.NoiseState(zero, zero, two, two, tf.zeros([3], tf.int64), history)

            @tff.tensorflow.computation
            def following(state: processes.NoiseState) -> processes.NoiseState:
                return state._replace(round_index=state.round_index + 1)

            @tff.federated_computation
            def initialize() -> tff.Value:
                return tff.federated_eval(start, tff.SERVER)

            @tff.federated_computation(
                initialize.type_signature.result, tff.FederatedType(value_type, tff.CLIENTS)
            )
            def advance(state: tff.Value, values: tff.Value) -> tff.templates.MeasuredProcessOutput:
                found = mean.next(mean.initialize(), values)
                after = tff.federated_map(following, state)
                return tff.templates.MeasuredProcessOutput(after, found.result, found.measurements)

            return tff.templates.AggregationProcess(initialize, advance)

    return Passing()


def _cpu_seconds() -> float:
    """Returns the CPU time of this process and of all processes that it started."""
    this = psutil.Process()
    times = [process.cpu_times() for process in (this, *this.children(recursive=True))]
    return sum(time.user + time.system for time in times)


def _fields(
    names: list[str], seconds: np.ndarray, cpu: np.ndarray
) -> dict[str, float | list[float]]:
    fields: dict[str, float | list[float]] = {}
    for kind, found in (("seconds", seconds), ("cpu_seconds", cpu)):
        for name, times in zip(names, found, strict=True):
            fields[f"{name}_{kind}"] = float(np.median(times))
        for name, times in zip(names[1:], found[1:], strict=True):
            low, middle, high = np.quantile(times / found[0], (0.25, 0.5, 0.75))
            fields[f"{name}_{kind}_ratio"] = float(middle)
            fields[f"{name}_{kind}_ratio_quartiles"] = [float(low), float(high)]
    return fields


def _factorization(
    mechanism: str, num_rounds: int, schema: mfa.participation.Participation
) -> mfa.factorizations.Factorization:
    if mechanism == "identity":
        return mfa.factorizations.identity(num_rounds)
    if mechanism == "tree":
        return mfa.factorizations.tree_aggregation(num_rounds)
    if mechanism == "blt":
        return mfa.factorizations.blt(num_rounds, _BUFFERS, schema)
    command_line.check_choice(
        mechanism == "banded", f"--mechanisms knows no {mechanism}: identity, blt, banded, tree."
    )
    workload = mfa.workloads.prefix_sum(num_rounds)
    return mfa.factorizations.banded(workload, num_rounds // 6, participation=schema)


if __name__ == "__main__":
    sys.exit(command_line.run(__doc__ or "", define_flags, main))
