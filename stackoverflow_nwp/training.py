"""Training of the next-word task under a mechanism, with metrics and evaluations."""

import dataclasses
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf
import tensorflow_federated as tff
import tqdm

import mf_aggregators as mfa
from mf_aggregators.dp_query import FixedSeedWarning
from mf_aggregators.factorizations import Factorization
from mf_aggregators.participation import Participation
from simulations import training_loop
from simulations.cohorts import TooFewEligibleClientsError
from simulations.data_samplers import DataSampler
from simulations.participation_ledger import ParticipationLedger
from simulations.quiet import StopRequest
from simulations.run_directory import MetricsLog, RunDirectory
from simulations.state_store import StateStore
from simulations.training_loop import FederatedRun
from stackoverflow_nwp import datasets
from stackoverflow_nwp.task import ACCURACY, ClientDatasets, NextWordTask, all_sentences

_COLUMNS = (
    "train_loss",
    "train_accuracy",
    "heldout_loss",
    "heldout_accuracy",
    "eligible_clients",
    "seconds",
)
_HELDOUT_SENTENCES = 2_000
_TEST_SENTENCES = 20_000
_COUNTED_SENTENCES = 50_000


@dataclasses.dataclass(frozen=True)
class TrainingOptions:
    """Model, optimizers and sizes of a run; the names are those of the flags."""

    vocab_size: int
    sequence_length: int
    embedding_size: int
    lstm_size: int
    shared_embedding: bool
    num_rounds: int
    clients_per_round: int
    sentences_per_client: int
    batch_size: int
    client_epochs: int
    client_optimizer: str
    client_learning_rate: float
    server_learning_rate: float
    server_momentum: float
    server_cooldown: float
    clip_norm: float
    evaluate_every: int
    noise_storage: str
    noise_source: str
    seed: int | None

    @classmethod
    def from_flags(cls, options: Mapping[str, Any]) -> "TrainingOptions":
        """Returns the options among all flags of a run."""
        return cls(**{field.name: options[field.name] for field in dataclasses.fields(cls)})

    @property
    def task(self) -> NextWordTask:
        """The task of these sizes."""
        return NextWordTask(
            self.vocab_size,
            self.sequence_length,
            self.embedding_size,
            self.lstm_size,
            self.shared_embedding,
        )


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a run ended with.

    Attributes:
      ledger: Of all released rounds.
      num_rounds: The rounds that the final model comes after; fewer than those of the
        ledger if the run went back to an older state and was interrupted before it caught up.
      interrupted: Whether it stopped before its last round.
      message: Why, if not on request.
      test_accuracy: Of the final model, on test clients; None if interrupted.
      untrained_accuracy: Of the initial model.
      most_frequent_word: Of the training clients.
      most_frequent_word_accuracy: Of always predicting that word.
      num_parameters: Of the model.
    """

    ledger: ParticipationLedger
    num_rounds: int
    interrupted: bool
    message: str
    test_accuracy: float | None
    untrained_accuracy: float
    most_frequent_word: str
    most_frequent_word_accuracy: float
    num_parameters: int


def train(
    options: TrainingOptions,
    text: datasets.FederatedText,
    participation: Participation,
    factorization: Factorization,
    noise_multiplier: float,
    cohort_seed: int,
    directory: RunDirectory,
    noise_directory: str | os.PathLike[str],
    stop: StopRequest,
    sampler: DataSampler | None = None,
) -> Outcome:
    """Runs the rounds that are left of a run, and evaluates the model.

    Args:
      options: Sizes and optimizers.
      text: The data set.
      participation: The schema that the noise is scaled to and, unless there is a sampler,
        the timers enforce.
      factorization: What makes the noise.
      noise_multiplier: Relative to the sensitivity under the schema.
      cohort_seed: Of cohorts under timers, data order and initial weights.
      directory: Where states, ledger and metrics go.
      noise_directory: Where noise rows go, if they go to disk.
      stop: Checked between rounds.
      sampler: What draws the clients of each round in place of timers.

    Returns:
      What the run ended with.

    Raises:
      ValueError: If the data set is too small, or what is saved cannot be resumed.
    """
    task = options.task
    words = text.vocabulary(options.vocab_size)
    splits = {
        split: text.client_tokens(split, words, options.sequence_length)
        for split in ("train", "heldout", "test")
    }
    heldout = all_sentences(splits["heldout"], _HELDOUT_SENTENCES, cohort_seed)
    test = all_sentences(splits["test"], _TEST_SENTENCES, cohort_seed)
    counted = all_sentences(splits["train"], _COUNTED_SENTENCES, cohort_seed)

    tf.keras.utils.set_random_seed(cohort_seed % 2**32)
    model = task.keras_model()
    initial_weights = model.get_weights()
    untrained = task.evaluate(initial_weights, test)
    word, word_accuracy = task.constant_accuracy(counted, test)

    process = _process(options, participation, factorization, noise_multiplier, noise_directory)
    weights = tff.learning.models.ModelWeights(initial_weights, [])
    run = FederatedRun(
        process=process,
        initial_state=process.set_model_weights(process.initialize(), weights),
        participation=participation,
        num_rounds=options.num_rounds,
        clients_per_round=options.clients_per_round,
        client_ids=tuple(splits["train"].client_ids),
        client_dataset=ClientDatasets(
            splits["train"],
            options.sentences_per_client,
            options.batch_size,
            options.client_epochs,
            cohort_seed,
        ),
        seed=cohort_seed,
        sampler=sampler,
    )
    store = StateStore(directory.states, directory.ledger)
    progress = training_loop.start(run, store)
    state, number, ledger = progress.state, progress.num_rounds, progress.ledger
    metrics_log = MetricsLog(directory, _COLUMNS, number)
    writer = tf.summary.create_file_writer(os.fspath(directory.tensorboard))
    message, interrupted = "", False
    bar = tqdm.tqdm(
        total=options.num_rounds,
        initial=number,
        desc="training",
        unit="round",
        file=sys.stderr,
    )
    try:
        for finished in training_loop.rounds(run, store, progress, stop):
            state, number, ledger = finished.state, finished.index + 1, finished.ledger
            row = {
                "eligible_clients": finished.num_eligible,
                "seconds": finished.seconds,
            }
            # Of a round without clients TFF's metrics are 0, and mean nothing.
            if len(ledger.cohorts[finished.index]):
                trained = finished.metrics["client_work"]["train"]
                row.update(
                    train_loss=float(trained["loss"]), train_accuracy=float(trained[ACCURACY])
                )
            if number % options.evaluate_every == 0 or number == options.num_rounds:
                values = task.evaluate(process.get_model_weights(state).trainable, heldout)
                row.update(heldout_loss=values["loss"], heldout_accuracy=values[ACCURACY])
                bar.set_postfix_str(f"accuracy {100 * values[ACCURACY]:.2f} %", refresh=False)
            metrics_log.append(number, row)
            with writer.as_default(step=number):
                for name, value in row.items():
                    tf.summary.scalar(name, value)
            bar.update()
    except TooFewEligibleClientsError as error:
        message = f"stopped: {error}"
    except KeyboardInterrupt:
        interrupted = True
    finally:
        bar.close()
        writer.close()
    interrupted = interrupted or (stop.is_set and number < options.num_rounds)
    accuracy = None
    if not interrupted:
        accuracy = task.evaluate(process.get_model_weights(state).trainable, test)[ACCURACY]
    return Outcome(
        ledger=ledger,
        num_rounds=number,
        interrupted=interrupted,
        message=message,
        test_accuracy=accuracy,
        untrained_accuracy=untrained[ACCURACY],
        most_frequent_word=words[word - 1],
        most_frequent_word_accuracy=word_accuracy,
        num_parameters=sum(weight.size for weight in initial_weights),
    )


def _process(
    options: TrainingOptions,
    participation: Participation,
    factorization: Factorization,
    noise_multiplier: float,
    noise_directory: str | os.PathLike[str],
) -> tff.learning.templates.LearningProcess:
    build_client: Any = {
        "adam": tff.learning.optimizers.build_adam,
        "sgd": tff.learning.optimizers.build_sgdm,
    }[options.client_optimizer]
    aggregator = mfa.mf_dp_aggregator(
        factorization,
        participation=participation,
        noise_multiplier=noise_multiplier,
        clip_norm=options.clip_norm,
        clients_per_round=options.clients_per_round,
        seed=options.seed,
        noise_storage=options.noise_storage,
        noise_directory=noise_directory,
        noise_source=options.noise_source,
    )
    server_optimizer = tff.learning.optimizers.schedule_learning_rate(
        tff.learning.optimizers.build_sgdm(options.server_learning_rate, options.server_momentum),
        _cooldown(options.server_learning_rate, options.num_rounds, options.server_cooldown),
    )
    with warnings.catch_warnings():
        # A fixed seed is the user's choice, and the privacy statement says so.
        warnings.simplefilter("ignore", FixedSeedWarning)
        return tff.learning.algorithms.build_unweighted_fed_avg(
            options.task.model_fn(),
            client_optimizer_fn=build_client(options.client_learning_rate),
            server_optimizer_fn=server_optimizer,
            model_aggregator=aggregator,
            # The default loop is a dataset.reduce, which TFF's worker optimises anew for every
            # client of every round: several times the seconds per round for a small model
            # (benchmarks/client_loop.py).
            loop_implementation=tff.learning.LoopImplementation.DATASET_ITERATOR,
        )


def _cooldown(rate: float, num_rounds: int, share: float) -> Callable[[tf.Tensor], tf.Tensor]:
    """A constant rate that falls linearly to its 20th part over the last rounds (BandMF App. I)."""
    length = max(1.0, share * num_rounds)

    def rate_of_round(round_index: tf.Tensor) -> tf.Tensor:
        left = (num_rounds - tf.cast(round_index, tf.float32)) / length
        return rate * tf.clip_by_value(left, 0.05, 1.0)

    return rate_of_round
