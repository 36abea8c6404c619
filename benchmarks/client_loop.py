r"""Measures the milliseconds per client of federated averaging with TFF's two client loops.

  python benchmarks/client_loop.py --clients=60

tff.learning's default loop is a dataset.reduce, whose function TFF's worker optimises anew
for every client; the iterator loop is part of a graph that is optimised once. The model is
that of the default run. Prints the ratio of the medians over the rounds after the first.
"""

import statistics
import sys
import time

from absl import flags

from mf_aggregators.commands import command_line
from mf_aggregators.tff import processes


def define_flags(values: flags.FlagValues) -> None:
    """Defines the flags of the benchmark."""
    flags.DEFINE_integer("clients", 40, "Clients per round.", flag_values=values)
    flags.DEFINE_integer("rounds", 4, "Rounds of each loop.", flag_values=values)


def main(values: flags.FlagValues) -> None:
    """Times both client loops of TFF and prints a table."""
    processes.prepare_environment()
    import numpy as np
    import tensorflow as tf
    import tensorflow_federated as tff

    from stackoverflow_nwp import run_stackoverflow
    from stackoverflow_nwp.task import NextWordTask

    processes.end_workers_at_exit()
    small = run_stackoverflow.SMALL
    task = NextWordTask(small.vocab_size, 20, small.embedding_size, small.lstm_size, False)
    generator = np.random.default_rng(0)

    def client() -> tf.data.Dataset:
        rows = generator.integers(1, small.vocab_size, (40, 21)).astype(np.int32)
        dataset = tf.data.Dataset.from_tensor_slices((rows[:, :-1], rows[:, 1:]))
        return dataset.batch(small.batch_size)

    fields: dict[str, float] = {}
    for loop in tff.learning.LoopImplementation:
        process = tff.learning.algorithms.build_unweighted_fed_avg(
            task.model_fn(),
            tff.learning.optimizers.build_sgdm(small.client_learning_rate),
            loop_implementation=loop,
        )
        state, seconds = process.initialize(), []
        for _ in range(values.rounds):
            data = [client() for _ in range(values.clients)]
            start = time.perf_counter()
            state = process.next(state, data).state
            seconds.append(time.perf_counter() - start)
        median = statistics.median(seconds[1:])
        fields[f"{loop.name.lower()}_ms_per_client"] = 1000.0 * median / values.clients
    fields["ratio"] = (
        fields["dataset_iterator_ms_per_client"] / fields["dataset_reduce_ms_per_client"]
    )
    command_line.print_result(values, fields, command_line.table(list(fields.items())))


if __name__ == "__main__":
    sys.exit(command_line.run(__doc__ or "", define_flags, main))
