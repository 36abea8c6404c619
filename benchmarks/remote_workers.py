r"""Measures the seconds per round in one process, and with one and two TFF workers.

  python benchmarks/remote_workers.py --clients=40
  python benchmarks/remote_workers.py --workers=10.0.0.5:8000,10.0.0.6:8000

Without --workers, two are started on this machine, at 127.0.0.1 and 127.0.0.2: they share its
processors, so that the figures show what dividing a round costs, and not what it gains. The
task is a next-word model under a banded mechanism, its noise on disk; ways take turns, round
by round, each from its own state. Prints medians over the rounds after the first, which
builds the graphs, their ratios to one process, and the largest difference of the models.
"""

import contextlib
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator

from absl import flags

from mf_aggregators.commands import command_line
from mf_aggregators.tff import processes
from simulations.workers import worker_addresses

_PORTS = (18411, 18412)


def define_flags(values: flags.FlagValues) -> None:
    """Defines the flags of the benchmark."""
    flags.DEFINE_integer("clients", 40, "Clients per round.", flag_values=values)
    flags.DEFINE_integer("rounds", 6, "Rounds of each way.", flag_values=values)
    flags.DEFINE_integer("vocab_size", 2000, "Words of the model.", flag_values=values)
    flags.DEFINE_string(
        "workers",
        None,
        "Running workers, host:port,...; two are started if not given.",
        flag_values=values,
    )


def main(values: flags.FlagValues) -> None:
    """Times rounds in all ways and prints a table."""
    command_line.check_choice(values.rounds >= 2, "--rounds must be at least 2.")
    processes.prepare_environment()
    given = worker_addresses.parse(values.workers) if values.workers else None
    processes.end_workers_at_exit()
    with contextlib.nullcontext(given) if given else _started() as addresses:
        fields = _measured(values, addresses)
    command_line.print_result(values, fields, command_line.table(list(fields.items())))


@contextlib.contextmanager
def _started() -> Iterator[tuple[str, ...]]:
    """Starts two workers on this machine, and ends them when they are not needed any more."""
    processes = [
        subprocess.Popen([sys.executable, "-m", "simulations.start_worker", f"--port={port}"])
        for port in _PORTS
    ]
    try:
        yield tuple(f"127.0.0.{i + 1}:{port}" for i, port in enumerate(_PORTS))
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()


def _measured(values: flags.FlagValues, addresses: tuple[str, ...]) -> dict[str, float]:
    import numpy as np
    import tensorflow as tf
    import tensorflow_federated as tff

    import mf_aggregators as mfa
    from simulations.workers import remote_workers
    from stackoverflow_nwp.task import NextWordTask

    task = NextWordTask(values.vocab_size, 20, 96, 96, False)
    generator = np.random.default_rng(0)

    def client() -> tf.data.Dataset:
        rows = generator.integers(1, values.vocab_size, (40, 21)).astype(np.int32)
        return tf.data.Dataset.from_tensor_slices((rows[:, :-1], rows[:, 1:])).batch(8)

    timeouts = remote_workers.Timeouts(seconds_to_connect=60.0)
    contexts: dict[str, tff.framework.SyncContext] = {
        "one_process": tff.framework.get_context_stack().current,
        **{
            f"{number}_remote": remote_workers.connect(addresses[:number], timeouts)
            for number in sorted({1, len(addresses)})
        },
    }
    # All ways have the same noise, so that their final models can be compared.
    with tempfile.TemporaryDirectory() as directory, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        process = tff.learning.algorithms.build_unweighted_fed_avg(
            task.model_fn(),
            tff.learning.optimizers.build_sgdm(0.1),
            model_aggregator=mfa.mf_dp_aggregator(
                mfa.factorizations.banded(mfa.workloads.prefix_sum(values.rounds), 2),
                participation=mfa.participation.MinSeparation(2),
                noise_multiplier=0.1,
                clip_norm=1.0,
                clients_per_round=values.clients,
                seed=1,
                noise_storage="disk",
                noise_directory=directory,
            ),
            loop_implementation=tff.learning.LoopImplementation.DATASET_ITERATOR,
        )
        # All ways begin with the same state, because initial weights are random.
        start = process.initialize()
        states = dict.fromkeys(contexts, start)
        seconds: dict[str, list[float]] = {way: [] for way in contexts}
        for _ in range(values.rounds):
            data = [client() for _ in range(values.clients)]
            for way, context in contexts.items():
                begin = time.perf_counter()
                with tff.framework.get_context_stack().install(context):
                    states[way] = process.next(states[way], data).state
                seconds[way].append(time.perf_counter() - begin)
        models = {way: process.get_model_weights(states[way]).trainable for way in contexts}
    fields: dict[str, float] = {"parameters": sum(weight.size for weight in models["one_process"])}
    medians = {way: statistics.median(values[1:]) for way, values in seconds.items()}
    for way in contexts:
        fields[f"{way}_seconds"] = medians[way]
    for way in [way for way in contexts if way != "one_process"]:
        fields[f"{way}_ratio"] = medians[way] / medians["one_process"]
        fields[f"{way}_difference"] = max(
            float(np.max(np.abs(one - other)))
            for one, other in zip(models["one_process"], models[way], strict=True)
        )
    return fields


if __name__ == "__main__":
    sys.exit(command_line.run(__doc__ or "", define_flags, main))
