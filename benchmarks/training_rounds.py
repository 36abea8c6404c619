r"""Seconds per round at the papers' model size, beside TFF's own loop with dp_aggregator.

  python benchmarks/training_rounds.py --clients=20 --rounds=4 --mechanisms=blt

The baseline is ``tff.learning`` with ``tff.learning.dp_aggregator`` (independent noise), the
papers' LSTM and the same clients; the others are the process of a run: zeroing, clipping,
measurements and correlated noise. Rounds of all processes take turns, and the medians of those
after the first are compared. Clients' data is made anew for every round, and timed apart.
"""

import pathlib
import statistics
import sys
import tempfile
import time
from typing import Any

from absl import flags

import mf_aggregators as mfa
from mf_aggregators.commands import command_line
from simulations import quiet

_BASELINE = "dp_aggregator"


def define_flags(values: flags.FlagValues) -> None:
    """Defines the flags of the benchmark."""
    flags.DEFINE_integer("clients", 20, "Clients per round.", flag_values=values)
    flags.DEFINE_integer("sentences", 50, "Sentences of a client.", flag_values=values)
    flags.DEFINE_integer("rounds", 4, "Rounds of each process.", flag_values=values)
    flags.DEFINE_integer("num_rounds", 2052, "Rounds that there is noise for.", flag_values=values)
    flags.DEFINE_list(
        "mechanisms", ["identity", "blt"], "identity, blt, banded or tree.", flag_values=values
    )


def main(values: flags.FlagValues) -> None:
    """Times all processes in turn and prints a table."""
    quiet.prepare_environment()
    import numpy as np
    import tensorflow as tf
    import tensorflow_federated as tff

    from simulations import private_aggregation
    from stackoverflow_nwp import settings
    from stackoverflow_nwp.task import NextWordTask

    quiet.end_workers_at_exit()
    paper = settings.PAPER
    task = NextWordTask(paper.vocab_size, 20, paper.embedding_size, paper.lstm_size, False)
    generator = np.random.default_rng(0)
    sentences = [
        generator.integers(1, paper.vocab_size, (values.sentences, 21)).astype(np.int32)
        for _ in range(values.clients)
    ]

    def dataset(rows: np.ndarray) -> tf.data.Dataset:
        pairs = tf.data.Dataset.from_tensor_slices((rows[:, :-1], rows[:, 1:]))
        return pairs.batch(paper.batch_size)

    def process(aggregator: Any) -> tff.learning.templates.LearningProcess:
        return tff.learning.algorithms.build_unweighted_fed_avg(
            task.model_fn(),
            tff.learning.optimizers.build_sgdm(paper.client_learning_rate),
            tff.learning.optimizers.build_sgdm(1.0, paper.server_momentum),
            model_aggregator=aggregator,
            loop_implementation=tff.learning.LoopImplementation.DATASET_ITERATOR,
        )

    schema = mfa.participation.MinSeparation(max(1, values.num_rounds // 6))
    with tempfile.TemporaryDirectory() as directory:
        processes = {
            # An unweighted factory: its clipping norm is fixed by the noise multiplier's scale.
            _BASELINE: process(tff.learning.dp_aggregator(1.0, float(values.clients)))
        }
        for mechanism in values.mechanisms:
            noise = pathlib.Path(directory) / mechanism
            noise.mkdir(mode=0o700)
            processes[mechanism] = process(
                private_aggregation.aggregator(
                    _factorization(mechanism, values.num_rounds, schema),
                    participation=schema,
                    noise_multiplier=1.0,
                    clip_norm=1.0,
                    clients_per_round=values.clients,
                    zeroing_norm=1.0,
                    noise_directory=noise,
                )
            )
        states = {name: process.initialize() for name, process in processes.items()}
        seconds: dict[str, list[float]] = {name: [] for name in processes}
        of_data = []
        for _ in range(values.rounds):
            for name, process_of_name in processes.items():
                start = time.perf_counter()
                data = [dataset(rows) for rows in sentences]
                made = time.perf_counter()
                states[name] = process_of_name.next(states[name], data).state
                of_data.append(made - start)
                seconds[name].append(time.perf_counter() - made)
    medians = {name: statistics.median(found[1:]) for name, found in seconds.items()}
    fields = {f"{name}_seconds": median for name, median in medians.items()}
    for name in values.mechanisms:
        fields[f"{name}_ratio"] = medians[name] / medians[_BASELINE]
    fields["data_seconds"] = statistics.median(of_data)
    command_line.print_result(values, fields, command_line.table(list(fields.items())))


def _factorization(
    mechanism: str, num_rounds: int, schema: mfa.participation.Participation
) -> mfa.factorizations.Factorization:
    if mechanism == "identity":
        return mfa.factorizations.identity(num_rounds)
    if mechanism == "tree":
        return mfa.factorizations.tree_aggregation(num_rounds)
    if mechanism == "blt":
        return mfa.factorizations.blt(num_rounds, 4, schema)
    command_line.check_choice(
        mechanism == "banded", f"--mechanisms knows no {mechanism}: identity, blt, banded, tree."
    )
    workload = mfa.workloads.prefix_sum(num_rounds)
    return mfa.factorizations.banded(workload, num_rounds // 6, participation=schema)


if __name__ == "__main__":
    sys.exit(command_line.run(__doc__ or "", define_flags, main))
