"""Trains a federated run of any task, with its rounds, metrics and evaluations."""

import collections
import dataclasses
import math
import os
import sys
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from mf_aggregators import private_metrics
from mf_aggregators.audit.run_audit import RunAudit
from mf_aggregators.commands import stated_runs
from mf_aggregators.noise import FixedSeedWarning, NoiseStorage, places
from mf_aggregators.progress_bars import ProgressBar
from mf_aggregators.tff import averaging_with_metrics
from mf_aggregators.tff.processes import StopRequest
from simulations.devices.device_populations import TooFewEligibleClientsError
from simulations.runs import canary_clients, training_loop
from simulations.runs.canary_clients import CanaryClients
from simulations.runs.run_directory import ParticipationLedger, RunDirectory
from simulations.runs.run_plan import Run
from simulations.runs.run_reports import MetricsLog, PrivacyBudget, RunStatements
from simulations.runs.training_loop import (
    FederatedRun,
    Progress,
    Round,
    StateStore,
    StoppedByRuleError,
)
from simulations.training import training_parts
from simulations.training.federated_task import HELDOUT, TEST, FederatedTask, sha256_of
from simulations.workers.worker_addresses import WorkerLostError

_SECURE_AGGREGATION_BITS = 32
# TFF's default loop over a client's batches is a dataset.reduce, which its worker optimises anew
# for every client in every round. For a small model, a round then takes several times as long
# (benchmarks/client_loop.py).
_LOOP = tff.learning.LoopImplementation.DATASET_ITERATOR


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Outcome of a training run: its ledger, accuracies and why it ended.

    Attributes:
      ledger: The participation ledger of all released rounds.
      num_rounds: The rounds that the final model comes after; fewer than those of the
        ledger if the run went back to an older state and was interrupted before it caught up.
      interrupted: Whether the run stopped before its last round.
      message: Why it stopped, if not on request.
      stopped_by_rule: Whether the run's stopping rule ended it.
      test_accuracy: The accuracy of the final model on test clients; None if interrupted.
      untrained_accuracy: The accuracy of the initial model on test clients.
      initial_model: The SHA-256 of its trained weights, in hexadecimal digits.
      num_parameters: The number of parameters of the model.
      facts: Further facts that the task reports; empty with private metrics.
      audit: The result of the audit by canaries; None without canaries, or before the run's end.
    """

    ledger: ParticipationLedger
    num_rounds: int
    interrupted: bool
    message: str
    stopped_by_rule: bool
    test_accuracy: float | None
    untrained_accuracy: float
    initial_model: str
    num_parameters: int
    facts: Mapping[str, object]
    audit: RunAudit | None


def simulate_secure_sums() -> None:
    """Sets a TFF context that simulates secure sums, which TFF's usual context refuses.

    A simulated secure sum protects nobody: it shows what a server with a secure protocol would
    compute.
    """
    tff.backends.test.set_sync_test_cpp_execution_context()


def train(run: Run, task: FederatedTask, statements: RunStatements, stop: StopRequest) -> Outcome:
    """Runs the remaining rounds of a run, and evaluates its model.

    Args:
      run: The run.
      task: The clients and the model of the run.
      statements: The run's privacy statements, written as the run begins, and after a round that
        broke the plan.
      stop: Checked between rounds.

    Raises:
      ValueError: If what is saved cannot be resumed, or a worker is lost.
      OSError: If a state cannot be saved.
    """
    if len(task.client_ids) != run.data.num_clients:
        raise ValueError(
            f"the task has {len(task.client_ids)} clients, and its num_clients, with which the run "
            f"was planned, is {run.data.num_clients}: make the two equal."
        )
    names = _weight_names(task)
    # The number of parameters is recorded, because an extension of the run needs it before it loads
    # the model.
    run.directory.record(num_parameters=task.num_parameters)
    untrained_accuracy = _untrained_accuracy(task)
    federated = _federated_run(run, task)
    process = federated.process
    store = StateStore(run.directory.states, run.directory.ledger)
    progress = training_loop.start(federated, store)
    statements.before(progress.ledger)
    rows = RoundMetrics(run, task, process, statements)
    outputs = MetricsOutputs(
        run.directory,
        run.config.num_rounds,
        progress.num_rounds,
        is_private=run.config.private_metrics,
    )
    last, message, interrupted, stopped_by_rule = progress, "", False, False
    try:
        for finished in training_loop.rounds(federated, store, progress, stop):
            last = Progress(finished.state, finished.index + 1, finished.ledger)
            if abandoned := _abandoned(finished):
                ProgressBar.write(abandoned, file=sys.stderr)
            outputs.append(last.num_rounds, rows.of(finished))
    except StoppedByRuleError as error:
        message, stopped_by_rule = str(error), True
        # The clients of the refused round are recorded only under timers: a sampler's draws are
        # secret.
        if run.sampler is None:
            clients = {"released_rounds": last.num_rounds, "clients": error.cohort.tolist()}
            run.directory.record(**{stated_runs.REFUSED: clients})
    except TooFewEligibleClientsError as error:
        advice = "The run ends here: its timers allow no further round."
        if error.to_go_on:
            advice = f"To continue, run the same command with {error.to_go_on} added."
        message = f"stopped: {error.found} {advice}"
    except WorkerLostError as error:
        message = f"stopped: {error}"
    except KeyboardInterrupt:
        interrupted = True
    finally:
        outputs.close()
    weights = process.get_model_weights(last.state)
    run.directory.save_model(names, [*weights.trainable, *weights.non_trainable])
    is_at_its_end = stopped_by_rule or last.num_rounds == run.config.num_rounds
    interrupted = interrupted or (stop.is_set and not is_at_its_end)
    return Outcome(
        ledger=last.ledger,
        num_rounds=last.num_rounds,
        interrupted=interrupted,
        message=message,
        stopped_by_rule=stopped_by_rule,
        test_accuracy=(None if interrupted else task.evaluate(weights.trainable, TEST)["accuracy"]),
        untrained_accuracy=untrained_accuracy,
        initial_model=sha256_of(task.initial_weights),
        num_parameters=task.num_parameters,
        # Private metrics leave the task's facts out: they are counts of the clients' data, and
        # baselines computed from these.
        facts={} if run.config.private_metrics else task.facts,
        audit=(
            federated.canaries.audit(last.num_rounds)
            if federated.canaries is not None and is_at_its_end
            else None
        ),
    )


def _abandoned(finished: Round) -> str:
    """Returns a sentence on how many attempts at a round were abandoned; empty if none were."""
    devices = finished.devices
    if devices is None or not devices.num_abandoned:
        return ""
    number = devices.num_abandoned
    attempts = "1 attempt was" if number == 1 else f"{number} attempts were"
    return (
        f"round {finished.index + 1}: {attempts} abandoned before a sum was made, for too few "
        "uploads or by the server. They used no noise; the timers of their devices run."
    )


def _weight_names(task: FederatedTask) -> tuple[str, ...]:
    """Returns the names of a model's weights as ``layer/weight``, the trainable ones first.

    Names are those of the first model that a program makes: Keras numbers the layers of later
    models on.
    """
    with tf.Graph().as_default():
        model = task.model_fn()
    variables = (*model.trainable_variables, *model.non_trainable_variables)
    return tuple(variable.name.partition(":")[0] for variable in variables)


def _untrained_accuracy(task: FederatedTask) -> float:
    """Returns the accuracy of the initial model on test clients."""
    untrained = task.evaluate(task.initial_weights, TEST)
    if missing := {"loss", "accuracy"} - set(untrained):
        raise ValueError(
            f"the task's evaluate must return loss and accuracy: {', '.join(sorted(missing))} "
            "missing."
        )
    return untrained["accuracy"]


def _federated_run(run: Run, task: FederatedTask) -> FederatedRun:
    """Returns the definition of a run's rounds: learning process, initial model and clients."""
    storage = noise_storage_of(run, task.num_parameters)
    canaries = None
    if run.config.audit_canaries is not None:
        canaries = CanaryClients(run, task.initial_weights)
    process = learning_process(run, task, storage, canaries)
    if not run.config.secure_aggregation and not run.config.private_metrics:
        _check_metrics(process, task.accuracy)
    first = process.initialize()
    weights = tff.learning.models.ModelWeights(
        list(task.initial_weights), process.get_model_weights(first).non_trainable
    )
    return FederatedRun(
        process=process,
        initial_state=process.set_model_weights(first, weights),
        participation=run.mechanism.noise_reference,
        num_rounds=run.config.num_rounds,
        clients_per_round=run.config.cohort,
        client_ids=task.client_ids,
        client_dataset=task.client_dataset,
        seed=run.seed,
        sampler=run.sampler,
        behaviour=run.behaviour,
        earlier_behaviours=run.earlier_behaviours,
        stopping_rule=run.stopping_rule,
        earlier_participations=run.mechanism.earlier_participations,
        canaries=canaries,
    )


def noise_storage_of(run: Run, num_parameters: int) -> str:
    """Returns where a run keeps the noise of earlier rounds, which is the same for all its rounds.

    What ``auto`` chooses may change from version to version, and a saved state can only be read by
    a run with the same storage, so that the choice is written to ``config.json``.

    Args:
      run: The run, new or begun.
      num_parameters: The number of parameters that are trained.

    Returns:
      ``state`` or ``disk``; ``auto`` only if the run adds no noise.
    """
    asked, directory = run.config.noise_storage, run.directory
    if asked != NoiseStorage.AUTO.value or run.mechanism.noise_multiplier == 0.0:
        return asked
    chosen = (directory.read_config() or {}).get("noise_storage")
    if chosen is None:
        recursion = run.mechanism.factorization.noise_recursion()
        chosen = places.NoiseCost.of_run([recursion], num_parameters).storage.value
        directory.record(noise_storage=chosen)
    return str(chosen)


def _check_metrics(process: tff.learning.templates.LearningProcess, accuracy: str) -> None:
    metrics = process.next.type_signature.result["metrics"].member["client_work"]["train"]
    names = tff.structure.name_list(metrics)
    if missing := {"loss", accuracy} - set(names):
        raise ValueError(
            f"the model's metrics of a round are {', '.join(names)}, without "
            f"{' and '.join(sorted(missing))}: model_fn must have a loss and the task's accuracy."
        )


def learning_process(
    run: Run, task: FederatedTask, storage: str, canaries: CanaryClients | None = None
) -> tff.learning.templates.LearningProcess:
    """Returns the TFF process of federated averaging with a run's optimizers, clipping and noise.

    The clients take local steps and the server is SGD with momentum on their noisy mean (FedAvgM;
    BandMF App. I), at a rate that follows a schedule. Whether momentum and schedule are inside the
    mechanism is a matter of its matrix alone.

    Args:
      run: The run.
      task: The task, which has the model.
      storage: Where the noise of earlier rounds is kept: ``state``, ``disk`` or ``auto``.
      canaries: The canary clients that audit the run; None for none. With canaries, the process
        takes data from :meth:`CanaryClients.client_data`.

    Raises:
      ValueError: If the noise of earlier rounds is too large for ``storage``.
    """
    options, released = run.config, run.private_metrics
    build_client: Any = {
        "adam": tff.learning.optimizers.build_adam,
        "sgd": tff.learning.optimizers.build_sgdm,
    }[options.client_optimizer]
    aggregator = training_parts.aggregator(
        run.mechanism,
        clip_norm=run.config.clip,
        clients_per_round=run.config.cohort,
        zeroing_norm=options.zeroing_norm if released is None else None,
        measure=not options.secure_aggregation,
        metrics=released,
        seed=options.seed,
        noise_storage=storage,
        noise_directory=run.noise_directory,
        secure_aggregation_bits=_SECURE_AGGREGATION_BITS if options.secure_aggregation else None,
        largest_cohort=_largest_cohort(run) if options.secure_aggregation else None,
        # A run without noise is allowed: its privacy statement says that it guarantees nothing.
        allow_no_noise=True,
    )
    metrics = _no_metrics if options.secure_aggregation else tff.learning.metrics.sum_then_finalize
    rate, momentum = options.server_learning_rate, options.server_momentum
    server_optimizer = tff.learning.optimizers.schedule_learning_rate(
        tff.learning.optimizers.build_sgdm(rate, momentum),
        training_parts.rate_of_round(run.server_rates),
    )
    with warnings.catch_warnings():
        # No warning of a fixed seed: it is the user's choice, and the privacy statement names it.
        warnings.simplefilter("ignore", FixedSeedWarning)
        client_optimizer = build_client(options.client_learning_rate)
        if canaries is not None:
            return canaries.learning_process(
                task.model_fn, client_optimizer, server_optimizer, aggregator, metrics, _LOOP
            )
        if released is not None:
            return averaging_with_metrics.learning_process(
                task.model_fn,
                client_optimizer=client_optimizer,
                server_optimizer=server_optimizer,
                aggregator=aggregator,
                accuracy=task.accuracy,
                client_epochs=options.client_epochs,
                zeroing_norm=options.zeroing_norm,
            )
        return tff.learning.algorithms.build_unweighted_fed_avg(
            task.model_fn,
            client_optimizer_fn=client_optimizer,
            server_optimizer_fn=server_optimizer,
            model_aggregator=aggregator,
            loop_implementation=_LOOP,
            metrics_aggregator=metrics,
        )


def _largest_cohort(run: Run) -> int | None:
    """Returns the most clients in a secure sum; None if it is the number of clients per round."""
    if run.config.audit_canaries is not None:
        return canary_clients.largest_cohort(run)
    # A sampler may draw any number of clients, up to the whole population.
    return run.data.num_clients if run.mechanism.sampling is not None else None


def _no_metrics(finalizers: Any) -> Any:
    """Returns an aggregation of training metrics that sums and measures nothing."""
    del finalizers

    @tff.federated_computation
    def nothing(unfinalized: Any) -> Any:
        del unfinalized
        return tff.federated_value(collections.OrderedDict(is_measured=False), tff.SERVER)

    return nothing


_MEASURED = (
    "update_norm",
    "max_update_norm",
    "clipped_fraction",
    "zeroed_fraction",
    "non_finite_updates",
    "released_norm",
)
# The columns of metrics.csv on an adaptive clip norm; empty cells for a constant one.
_OF_ADAPTIVE_CLIP = ("clip_norm", "unclipped_fraction")
# The columns of metrics that are released with noise, and the name of each in private_metrics.
_OF_PRIVATE_METRICS = {
    "train_loss": private_metrics.LOSS,
    "train_accuracy": private_metrics.ACCURACY,
    "examples_per_client": private_metrics.EXAMPLES,
    "num_updates": private_metrics.COUNT,
}
_STDDEV = "_stddev"
_OF_DEVICES = ("eligible_clients", "available_clients", "selected_clients", "attempts")
_OF_EPSILON = ("epsilon_spent", "epsilon_planned")
_COLUMNS = (
    *("train_loss", "train_accuracy", "heldout_loss", "heldout_accuracy"),
    *(*_MEASURED, "noise_norm", *_OF_ADAPTIVE_CLIP, "num_updates", "clients_per_round"),
    *(*_OF_DEVICES, *_OF_EPSILON, "seconds"),
)
# The columns of metrics.csv with --private_metrics: they depend on clients' training data only
# through releases with noise. The seconds of a round depend on the data directly, and are left out.
_COLUMNS_OF_PRIVATE_METRICS = (
    *("train_loss", f"train_loss{_STDDEV}", "train_accuracy", f"train_accuracy{_STDDEV}"),
    *("heldout_loss", "heldout_accuracy", "clipped_fraction", f"clipped_fraction{_STDDEV}"),
    *("examples_per_client", f"examples_per_client{_STDDEV}", "released_norm", "noise_norm"),
    *(*_OF_ADAPTIVE_CLIP, f"unclipped_fraction{_STDDEV}", "num_updates", f"num_updates{_STDDEV}"),
    *("clients_per_round", *_OF_DEVICES, *_OF_EPSILON),
)


class MetricsOutputs:
    """Writes rounds' metrics to ``metrics.csv``, TensorBoard's files and a progress bar."""

    def __init__(
        self, directory: RunDirectory, num_rounds: int, finished: int, *, is_private: bool
    ) -> None:
        columns = _COLUMNS_OF_PRIVATE_METRICS if is_private else _COLUMNS
        self._log = MetricsLog(directory, columns, finished)
        self._writer = tf.summary.create_file_writer(os.fspath(directory.tensorboard))
        self._bar = ProgressBar(
            total=num_rounds, initial=finished, desc="training", unit="round", file=sys.stderr
        )

    def append(self, number: int, row: Mapping[str, float | int]) -> None:
        """Writes the metrics of round ``number``, counted from 1, to all outputs."""
        if "heldout_accuracy" in row:
            accuracy = f"accuracy {100 * row['heldout_accuracy']:.2f} %"
            self._bar.set_postfix_str(accuracy, refresh=False)
        self._log.append(number, row)
        with self._writer.as_default(step=number):
            for name, value in row.items():
                if math.isfinite(value):
                    tf.summary.scalar(name, value)
        self._bar.update()

    def close(self) -> None:
        """Closes the progress bar and TensorBoard's file."""
        self._bar.close()
        self._writer.close()


class RoundMetrics:
    """Computes the metrics of finished rounds, as rows of ``metrics.csv``."""

    def __init__(
        self,
        run: Run,
        task: FederatedTask,
        process: tff.learning.templates.LearningProcess,
        statements: RunStatements,
    ) -> None:
        self._run = run
        self._task = task
        self._process = process
        self._statements = statements
        split, mechanism = run.noise_split, run.mechanism
        # The norms of the noise are in units of the clip norm if that adapts.
        self._noise_norms = training_parts.expected_noise_norm(
            mechanism.factorization,
            mechanism.noise_reference,
            mechanism.noise_multiplier if split is None else split.update_noise_multiplier,
            float(run.config.clip_norm) if run.config.adaptive_clip is None else 1.0,
            run.config.cohort,
            task.num_parameters,
        )
        self._stddevs = _stddevs_of_metrics(run)
        self._budget = PrivacyBudget(mechanism, run.config.delta)

    def of(self, finished: Round) -> dict[str, float | int]:
        """Returns the metrics of one finished round, by column of ``metrics.csv``."""
        measured = finished.metrics["aggregator"]
        clip = training_parts.released_clip(measured)
        # Private metrics release the fraction of clipped updates for a constant clip norm as well:
        # released_clip is then not empty.
        is_adaptive = self._run.config.adaptive_clip is not None
        row: dict[str, float | int] = {
            "noise_norm": float(self._noise_norms[finished.index])
            * (clip["clip_norm"] if is_adaptive else 1.0),
            "epsilon_spent": self._epsilon_spent(finished),
            "epsilon_planned": self._budget.planned.epsilon,
            "clients_per_round": self._run.config.cohort,
        }
        if is_adaptive:
            row.update({name: clip[name] for name in _OF_ADAPTIVE_CLIP})
        is_private = self._run.private_metrics is not None
        row.update(self._released(finished) if is_private else self._measured(finished))
        row.update(self._of_devices(finished, is_private))
        options, number = self._run.config, finished.index + 1
        if number % options.evaluate_every == 0 or number == options.num_rounds:
            weights = self._process.get_model_weights(finished.state).trainable
            values = self._task.evaluate(weights, HELDOUT)
            row.update(heldout_loss=values["loss"], heldout_accuracy=values["accuracy"])
        return row

    @staticmethod
    def _of_devices(finished: Round, is_private: bool) -> dict[str, float | int]:
        """Returns the counts of devices in a round, which are no secret where timers decide."""
        devices = finished.devices
        # For clients that a sampler draws, no devices are simulated.
        row: dict[str, float | int] = {}
        if devices is not None or not is_private:
            row["eligible_clients"] = finished.num_eligible
        if devices is not None:
            row["available_clients"] = devices.num_available
            row["selected_clients"] = devices.num_selected
            row["attempts"] = devices.attempts
        return row

    def _measured(self, finished: Round) -> dict[str, float | int]:
        """Returns the exact measurements of a round's updates, which have no noise."""
        measured = finished.metrics["aggregator"]
        row: dict[str, float | int] = {"seconds": finished.seconds}
        if self._run.config.secure_aggregation:
            return row
        row["released_norm"] = float(measured["released_norm"])
        # This is the number of updates in the sum, which is divided by --clients_per_round
        # nevertheless.
        row["num_updates"] = int(measured["num_updates"])
        # Leave TFF's training metrics out in a round without clients, where they are 0 without
        # meaning.
        if len(finished.ledger.cohorts[finished.index]):
            trained = finished.metrics["client_work"]["train"]
            row["train_loss"] = float(trained["loss"])
            row["train_accuracy"] = float(trained[self._task.accuracy])
            row.update({name: float(measured[name]) for name in _MEASURED if name in measured})
        return row

    def _released(self, finished: Round) -> dict[str, float | int]:
        """Returns metrics that are released with noise or do not depend on clients' data."""
        measured = finished.metrics["aggregator"]
        found = training_parts.released_metrics(measured)
        cohort = self._run.config.cohort
        row: dict[str, float | int] = {"released_norm": float(measured["released_norm"])}
        for column, name in _OF_PRIVATE_METRICS.items():
            if name in found:
                row[column] = found[name]
        if private_metrics.COUNT in found:
            row["num_updates"] *= cohort
        else:
            # The number of clients is exact here: where timers decide, who takes part is no secret.
            row["num_updates"] = len(finished.ledger.cohorts[finished.index])
        if self._run.config.adaptive_clip is None:
            fraction = training_parts.released_clip(measured)["unclipped_fraction"]
            row["clipped_fraction"] = 1.0 - fraction
        for column, stddevs in self._stddevs.items():
            row[f"{column}{_STDDEV}"] = float(stddevs[finished.index])
        return row

    def _epsilon_spent(self, finished: Round) -> float:
        """Returns the epsilon spent by all released rounds, those after an older state included."""
        broken = self._statements.after_round(finished.ledger)
        if broken is not None:
            return broken.stated.epsilon
        return self._budget.spent(finished.ledger.num_rounds)


def _stddevs_of_metrics(run: Run) -> dict[str, np.ndarray]:
    """Returns the (n,) standard deviations of the noise in each released metric, by its column."""
    metrics, split = run.private_metrics, run.noise_split
    if metrics is None:
        return {}
    assert split is not None
    mechanism, cohort = run.mechanism, run.config.cohort

    def of(stddev: float, scale: float) -> np.ndarray:
        return training_parts.expected_noise_norm(
            mechanism.factorization, mechanism.noise_reference, stddev, scale, cohort, 1
        )

    ranges = {metric.name: metric.range for metric in metrics.metrics}
    found = {
        column: of(split.metric_stddev, ranges[name] * (cohort if column == "num_updates" else 1))
        for column, name in _OF_PRIVATE_METRICS.items()
        if name in ranges
    }
    of_clip = "clipped_fraction" if run.config.adaptive_clip is None else "unclipped_fraction"
    found[of_clip] = of(split.clipped_count_stddev, 1.0)
    return found
