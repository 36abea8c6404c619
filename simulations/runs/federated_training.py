"""The training of a federated run of any task: process, rounds, metrics and evaluations."""

import collections
import dataclasses
import hashlib
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow_federated as tff

from mf_aggregators.audit.one_run import RunAudit
from mf_aggregators.commands import command_line, facts_of_runs, stated_runs
from mf_aggregators.noise import FixedSeedWarning, NoiseStorage, costs
from mf_aggregators.progress_bars import ProgressBar
from mf_aggregators.tff import averaging_with_metrics
from mf_aggregators.tff.processes import StopRequest
from simulations.devices.device_populations import TooFewEligibleClientsError
from simulations.runs import canary_clients, run_directory, training_loop
from simulations.runs.canary_clients import CanaryClients
from simulations.runs.planned_runs import Run
from simulations.runs.round_metrics import MetricsOutputs, RoundMetrics, evaluated
from simulations.runs.round_records import ParticipationLedger
from simulations.runs.run_directory import RunDirectory
from simulations.runs.run_statements import RunStatements
from simulations.runs.state_store import Progress, StateStore
from simulations.runs.training_loop import FederatedRun, Round, StoppedByRuleError
from simulations.training import (
    learning_rate_schedules,
    model_parts,
    private_aggregation,
    weights_files,
)
from simulations.training.federated_task import TEST, FederatedTask
from simulations.workers.worker_addresses import WorkerLostError

_SECURE_AGGREGATION_BITS = 32
# The default loop is a dataset.reduce, which TFF's worker optimises anew for every client of every
# round: several times the seconds per round for a small model (benchmarks/client_loop.py).
_LOOP = tff.learning.LoopImplementation.DATASET_ITERATOR


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of a run.

    Attributes:
      ledger: The ledger of all released rounds.
      num_rounds: The rounds that the final model comes after; fewer than those of the
        ledger if the run went back to an older state and was interrupted before it caught up.
      interrupted: Whether it stopped before its last round.
      message: Why it stopped, if not on request.
      stopped_by_rule: Whether its stopping rule has ended it.
      test_accuracy: The accuracy of the final model on test clients; None if interrupted.
      untrained_accuracy: The accuracy of the initial model on test clients.
      initial_model: The SHA-256 of its trained weights, in hexadecimal digits.
      num_parameters: The number of parameters of the model.
      facts: What the task says besides; nothing with private metrics.
      audit: What the canaries found; None without any, or before the run's end.
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
    facts: Mapping[str, Any]
    audit: RunAudit | None


def simulate_secure_sums() -> None:
    """Lets TFF simulate secure sums on this machine from now on; its usual context refuses them.

    That protects nobody: it shows what a server with a secure protocol would compute.
    """
    tff.backends.test.set_sync_test_cpp_execution_context()


def train(run: Run, task: FederatedTask, statements: RunStatements, stop: StopRequest) -> Outcome:
    """Runs the rounds that are left of a run, and evaluates the model.

    Args:
      run: The run.
      task: Its clients and model.
      statements: Written as the run begins, and after a round that broke the plan.
      stop: Checked between rounds.

    Raises:
      ValueError: If what is saved cannot be resumed, or a worker is lost.
      OSError: If a state cannot be saved.
    """
    _check_clients(run, task)
    names = model_parts.weight_names(task.model_fn)
    task = _begun(run, task)
    # An extension needs it before the model is loaded.
    _record(run.directory, num_parameters=task.num_parameters)
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
        # Who would have been drawn is a secret.
        if run.sampler is None:
            clients = {"released_rounds": last.num_rounds, "clients": error.cohort.tolist()}
            _record(run.directory, **{stated_runs.REFUSED: clients})
    except TooFewEligibleClientsError as error:
        to_go_on = "The run ends here: its timers let nobody join a further round."
        if error.to_go_on:
            to_go_on = f"To go on, run the same command with {error.to_go_on} in addition."
        message = f"stopped: {error.found} {to_go_on}"
    except WorkerLostError as error:
        message = f"stopped: {error}"
    except KeyboardInterrupt:
        interrupted = True
    finally:
        outputs.close()
    weights = process.get_model_weights(last.state).trainable
    weights_files.save(run.directory.final_model, names, task.all_weights(list(weights)))
    is_at_its_end = stopped_by_rule or last.num_rounds == run.config.num_rounds
    interrupted = interrupted or (stop.is_set and not is_at_its_end)
    return Outcome(
        ledger=last.ledger,
        num_rounds=last.num_rounds,
        interrupted=interrupted,
        message=message,
        stopped_by_rule=stopped_by_rule,
        test_accuracy=(
            None if interrupted else evaluated(process, task, last.state, TEST)["accuracy"]
        ),
        untrained_accuracy=untrained_accuracy,
        initial_model=_sha256(task.initial_weights),
        num_parameters=task.num_parameters,
        # Counts of the clients' data, and baselines that follow from them.
        facts={} if run.config.private_metrics else task.facts,
        audit=(
            federated.canaries.audit(last.num_rounds)
            if federated.canaries is not None and is_at_its_end
            else None
        ),
    )


def _abandoned(finished: Round) -> str:
    """A sentence on the abandoned attempts at a round; empty if there were none."""
    devices = finished.devices
    if devices is None or not devices.num_abandoned:
        return ""
    number = devices.num_abandoned
    attempts = "1 attempt was" if number == 1 else f"{number} attempts were"
    return (
        f"round {finished.index + 1}: {attempts} abandoned before its sum, with too few uploads or "
        "by the server. They used no noise, and the timers of their devices run."
    )


def _begun(run: Run, task: FederatedTask) -> FederatedTask:
    """The task, as the run begins with it: its first weights, and the part that is trained."""
    config = run.config
    try:
        if config.initial_weights is not None:
            known = (run.directory.read_config() or {}).get(facts_of_runs.INITIAL_WEIGHTS)
            with command_line.naming("initial_weights"):
                task = model_parts.beginning_with(task, config.initial_weights, known)
        if config.layers is None:
            return task
        with command_line.naming("trainable_layers"):
            return model_parts.training_only(task, config.layers)
    except ValueError as error:
        raise weights_files.ModelError(str(error)) from error


def _check_clients(run: Run, task: FederatedTask) -> None:
    if len(task.client_ids) != run.data.num_clients:
        raise ValueError(
            f"the task has {len(task.client_ids)} clients, and its num_clients, with which the run "
            f"was planned, is {run.data.num_clients}: make the two equal."
        )


def _record(directory: RunDirectory, **entries: Any) -> None:
    """Adds entries to the configuration of a run."""
    config = directory.read_config() or {}
    if {**config, **entries} != config:
        directory.write_json(run_directory.CONFIG_FILE, {**config, **entries})


def _untrained_accuracy(task: FederatedTask) -> float:
    """The accuracy of the initial model on test clients."""
    untrained = task.evaluate(task.initial_weights, TEST)
    if missing := {"loss", "accuracy"} - set(untrained):
        raise ValueError(
            f"the task's evaluate must return loss and accuracy: {', '.join(sorted(missing))} is "
            "missing."
        )
    return untrained["accuracy"]


def _sha256(weights: Sequence[np.ndarray]) -> str:
    digest = hashlib.sha256()
    for weight in weights:
        # Shape and type too, so that no number can move from one weight to the next unseen.
        digest.update(f"{weight.dtype.str}{weight.shape}".encode())
        digest.update(np.ascontiguousarray(weight).tobytes())
    return digest.hexdigest()


def _federated_run(run: Run, task: FederatedTask) -> FederatedRun:
    """The learning process of a run with the task's initial model, and its clients."""
    storage = noise_storage_of(run, task.num_parameters)
    canaries = None
    if run.config.audit_canaries is not None:
        canaries = CanaryClients(run, task.initial_weights)
    process = learning_process(run, task, storage, canaries)
    if not run.config.secure_aggregation and not run.config.private_metrics:
        _check_metrics(process, task.accuracy)
    weights = tff.learning.models.ModelWeights(
        list(task.initial_weights), list(task.frozen_weights.values())
    )
    return FederatedRun(
        process=process,
        initial_state=process.set_model_weights(process.initialize(), weights),
        participation=run.mechanism.schema,
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
    """Returns where a run keeps its noise: for all its rounds where its first one kept it.

    What ``auto`` chooses may change from version to version, and a saved state can only be read by
    a run with the same storage, so that the choice is written to ``config.json``.

    Args:
      run: The run, new or begun.
      num_parameters: The number of parameters that are trained.

    Returns:
      ``state`` or ``disk``; ``auto`` where there is no noise to keep.
    """
    asked, directory = run.config.noise_storage, run.directory
    if asked != NoiseStorage.AUTO.value or run.mechanism.noise_multiplier == 0.0:
        return asked
    config = directory.read_config() or {}
    chosen: str | None = config.get("noise_storage")
    if chosen is None:
        recursion = run.mechanism.factorization.noise_recursion()
        chosen = costs.choose(recursion, num_parameters).storage.value
        directory.write_json(run_directory.CONFIG_FILE, {**config, "noise_storage": chosen})
    return chosen


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
    """Returns federated averaging with the run's optimizers, clipping and noise.

    The clients take local steps and the server is SGD with momentum on their noisy mean (FedAvgM;
    BandMF App. I), at a rate that follows a schedule. Whether momentum and schedule are inside the
    mechanism is a matter of its matrix alone.

    Args:
      run: The run.
      task: Its model.
      storage: Where noise is kept: ``state``, ``disk`` or ``auto``.
      canaries: The clients that audit the run, whose data clients' data are then; None for none.

    Raises:
      ValueError: If the noise's state is too large for where it is to be kept.
    """
    options, released = run.config, run.private_metrics
    build_client: Any = {
        "adam": tff.learning.optimizers.build_adam,
        "sgd": tff.learning.optimizers.build_sgdm,
    }[options.client_optimizer]
    aggregator = private_aggregation.aggregator(
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
        # Who asks for a run without noise gets a statement that says so.
        allow_no_noise=True,
    )
    metrics = _no_metrics if options.secure_aggregation else tff.learning.metrics.sum_then_finalize
    rate, momentum = options.server_learning_rate, options.server_momentum
    server_optimizer = tff.learning.optimizers.schedule_learning_rate(
        tff.learning.optimizers.build_sgdm(rate, momentum),
        learning_rate_schedules.rate_of_round(run.server_rates),
    )
    with warnings.catch_warnings():
        # A fixed seed is the user's choice, and the privacy statement says so.
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
    """The most clients that a secure sum of a run may have; None for the cohort."""
    if run.config.audit_canaries is not None:
        return canary_clients.largest_cohort(run)
    # A sampler draws as many as chance will have it.
    return run.data.num_clients if run.mechanism.sampling is not None else None


def _no_metrics(finalizers: Any) -> Any:
    """Metrics of training that measure nothing, so that no sum is in the open."""
    del finalizers

    @tff.federated_computation
    def nothing(unfinalized: Any) -> Any:
        del unfinalized
        return tff.federated_value(collections.OrderedDict(is_measured=False), tff.SERVER)

    return nothing
