"""A federated run of any task, from its flags to its privacy statement.

What is checked before anything is written: flags, data, mechanism and directory. What a run
leaves behind is a directory that says everything about it; started again with the same flags,
a run goes on where it was.
"""

import dataclasses
import datetime
import math
import pathlib
import secrets
import sys
from typing import Any, NoReturn

from absl import flags

from mf_aggregators import checkpoints, printed_guarantees
from mf_aggregators.commands import command_line, output_paths
from mf_aggregators.commands.command_line import CommandError
from mf_aggregators.noise import NOISE_FORMAT
from mf_aggregators.participation import sampling_schemes
from mf_aggregators.privacy import attackers
from mf_aggregators.privacy.guarantees import Guarantee
from mf_aggregators.privacy.statement import PrivacyStatement
from mf_aggregators.progress_bars import ProgressBar
from mf_aggregators.tff import noise_directory
from simulations.devices import available_clients, device_flags, device_populations
from simulations.devices.availability import Trace
from simulations.devices.device_populations import DeviceBehaviour
from simulations.runs import (
    round_records,
    run_config,
    run_designs,
    run_directory,
    run_extensions,
    sampled_runs,
)
from simulations.runs.round_records import ParticipationLedger
from simulations.runs.run_config import RunConfig
from simulations.runs.run_designs import RunDesign
from simulations.runs.run_directory import RunDirectory
from simulations.runs.run_extensions import Begun, EarlierPlan
from simulations.runs.run_setting import RunSetting
from simulations.runs.run_statements import RunStatements
from simulations.training.federated_task import TaskCommand, TaskData
from simulations.workers import quiet, worker_addresses


def run(command: TaskCommand) -> NoReturn:
    """Is the entry point of a command that runs a task: parses flags, runs, and exits.

    Args:
      command: The command.
    """
    sys.exit(
        command_line.run(
            command.description,
            lambda values: run_config.define_flags(values, command),
            lambda values: main(values, command),
        )
    )


def main(values: flags.FlagValues, command: TaskCommand) -> int | None:
    """Plans, trains, and states the guarantee.

    Args:
      values: The flags.
      command: Whose flags they are.

    Returns:
      The exit status, None for success.

    Raises:
      ValueError: For flags, data or a directory that it cannot work with.
      OSError: If a file cannot be read or written.
    """
    # Building a data set may load TensorFlow already.
    quiet.prepare_environment()
    options = run_config.of_flags(values, command)
    behaviour = device_flags.behaviour(values)
    _check_behaviour(options, behaviour)
    workers = None if options.workers is None else worker_addresses.parse(options.workers)
    command_line.check_extra("a training run")
    if values.noise_directory:
        output_paths.check_name(values.noise_directory, "noise_directory")
        output_paths.check_directory(values.noise_directory, "noise_directory")
    directory = RunDirectory(
        values.output_dir or f"runs/{datetime.datetime.now().strftime('%Y-%m-%d_%H-%M-%S')}"
    )
    output_paths.check_name(directory.path, "output_dir")
    with directory.locked():
        setting = _prepared(values, command, options, behaviour, directory)
        return _train(values, command, setting, workers)


def _prepared(
    values: flags.FlagValues,
    command: TaskCommand,
    options: RunConfig,
    behaviour: DeviceBehaviour,
    directory: RunDirectory,
) -> RunSetting:
    """Plans a run and fills its directory, or checks that the directory is of the same run."""
    old = directory.read_config()
    if old is not None:
        directory.settle_factorization(old)
        options = _with_noise_of(old.get("flags", {}), options)
        _check_same_run(old, options, directory, command)
        round_records.check_metrics(directory.path / run_directory.METRICS_FILE)
    data = command.open_data(options)
    if isinstance(behaviour.availability, Trace):
        device_populations.check_trace(behaviour.availability, data.num_clients)
    # One factorization for all rounds of a run, whatever becomes of where it came from.
    own = directory.factorization if directory.factorization.exists() else None
    design = run_designs.make(
        options,
        data,
        command.defaults(values)["max_bands"],
        own,
        None if old is None else old.get("noise_multiplier"),
        None if old is None else _begun(old, options, data, directory),
    )
    noise_path = pathlib.Path(values.noise_directory or directory.noise)
    if values.noise_directory or noise_path.exists():
        # If it is unfit, this is said before anything is written or TensorFlow is loaded. The
        # default one of a new run cannot be, and is made by the aggregator.
        noise_directory.open_directory(noise_path)
    if old is None:
        seed = secrets.randbits(64) if options.seed is None else options.seed
        directory.create(_config(command, design, seed), only_for_owner=design.sampling is not None)
    else:
        seed = old["cohort_seed"]
        _say(command, f"resuming the run in {directory.path}")
        if run_extensions.is_asked_for(old["flags"], options):
            _check_ledger(directory)
            directory.fix_data(data.fingerprint())
            _extend(command, design, directory, old)
            old = directory.read_config()
    _fix_factorization(design, directory, old, own)
    if old is not None:
        _check_ledger(directory)
    directory.fix_data(data.fingerprint())
    sampler = None
    if design.sampling is not None:
        sampler = sampled_runs.sampler_of(design.sampling, directory, design.options.seed)
        if behaviour != DeviceBehaviour():
            sampler = available_clients.among(
                sampler, behaviour.availability, seed, behaviour.round_seconds
            )
            behaviour = DeviceBehaviour()
    return RunSetting(design, seed, directory, noise_path, behaviour, sampler)


def _train(
    values: flags.FlagValues,
    command: TaskCommand,
    setting: RunSetting,
    workers: tuple[str, ...] | None,
) -> int | None:
    design, directory = setting.design, setting.directory
    _say(command, "starting TensorFlow Federated")
    # What TensorFlow Federated needs is imported only after the flags were found good.
    from simulations.runs import federated_training
    from simulations.workers import remote_workers

    quiet.end_workers_at_exit()
    if workers is not None:
        remote_workers.use(workers)
    elif design.options.secure_aggregation:
        federated_training.simulate_secure_sums()
    statements = RunStatements(design, setting.behaviour, directory, setting.sampler)
    with quiet.stop_requests("stopping after this round; Ctrl-C again stops at once") as stop:
        try:
            task = design.data.load(setting.seed)
            outcome = federated_training.train(setting, task, statements, stop)
        except BaseException:
            statements.after_failure()
            raise
    if outcome.stopped_by_rule or outcome.num_rounds == design.options.num_rounds:
        directory.delete_noise_rows()
    statement = statements.after(outcome.ledger, outcome.stopped_by_rule)
    federated_training.draw_figure(design, directory, statement.plan.epsilon)
    norms = federated_training.clip_norms(design, directory)
    privacy = statement.to_dict(name_clients=design.options.name_clients)
    _print_outcome(values, command, directory, statement, privacy, outcome, norms)
    if outcome.message:
        _say(command, outcome.message)
    if outcome.message and not outcome.stopped_by_rule:
        return command_line.BAD_INPUT
    return command_line.INTERRUPTED if outcome.interrupted else None


def _check_behaviour(options: RunConfig, behaviour: DeviceBehaviour) -> None:
    sampling = options.sampling
    if sampling != sampled_runs.TIMERS and sampling_schemes()[sampling].has_groups:
        command_line.check_choice(
            behaviour == DeviceBehaviour(),
            f"--sampling={sampling} is for a data centre, where no device has a behaviour: "
            "leave out --availability, --timer and their like, or use "
            f"--sampling={sampled_runs.TIMERS}.",
        )
    elif sampling != sampled_runs.TIMERS:
        only_absent = DeviceBehaviour(
            availability=behaviour.availability, round_seconds=behaviour.round_seconds
        )
        command_line.check_choice(
            behaviour == only_absent,
            f"--sampling={sampling} knows of --availability and --round_minutes alone: leave out "
            "--timer, --over_selection, lost uploads and histories and their like, or use "
            f"--sampling={sampled_runs.TIMERS}.",
        )
    command_line.check_choice(
        behaviour.timer is None or options.separation is not None,
        "--timer=wall_clock needs --separation, the rounds that the noise is planned for: "
        "simulate-participation finds what the timers give.",
    )


def _with_noise_of(old: dict[str, Any], options: RunConfig) -> RunConfig:
    """Options with the noise that a run began with, if it is for the same target.

    What a target needs may be computed anew, in the last digits, by another version.
    """
    target, begun_with = options.target_epsilon, old.get("noise_multiplier")
    if target is None or begun_with is None or old.get("target_epsilon") is None:
        return options
    if old["target_epsilon"] != target and not run_extensions.is_asked_for(old, options):
        return options
    return dataclasses.replace(options, noise_multiplier=begun_with)


def _begun(
    old: dict[str, Any], options: RunConfig, data: TaskData, directory: RunDirectory
) -> Begun | None:
    """What a run has fixed, if it was extended before or is to be now."""
    plans = run_extensions.plans_of(old, directory)
    if run_extensions.is_asked_for(old.get("flags", {}), options):
        _check_ledger(directory)
        flags = old["flags"]
        before = dataclasses.replace(
            options,
            num_rounds=flags["num_rounds"],
            max_participations=flags.get("max_participations"),
        )
        released = (
            ParticipationLedger.load(directory.ledger).num_rounds
            if directory.ledger.exists()
            else 0
        )
        schema = run_designs.participation_of(before, data)
        plans = (*plans, EarlierPlan(before.num_rounds, released, schema))
    return run_extensions.begun(old, plans, options.noise_storage) if plans else None


def _extend(
    command: TaskCommand, design: RunDesign, directory: RunDirectory, old: dict[str, Any]
) -> None:
    """Makes the larger plan the one that counts: by one write of the configuration.

    The statement on disk stays that of the plan before until the run begins to go on, and holds as
    long: nothing that the smaller plan does not cover is released before that.
    """
    assert design.begun is not None
    checkpoints.save(
        design.factorization, directory.extended_factorization, participation=design.participation
    )
    config = run_extensions.with_extension(
        old,
        design.options.of_the_run(),
        design.begun.plans,
        directory.extended_factorization_sha256(),
    )
    directory.write_json(run_directory.CONFIG_FILE, config)
    directory.settle_factorization(config)
    # Rows of the whole have files of their own, and are made again.
    directory.delete_noise_rows()
    before, guarantee = design.earlier_plans[-1], design.planned_guarantee()
    _say(
        command,
        f"extended from {before.num_rounds} to {design.options.num_rounds} rounds: "
        f"{stated_privacy(before)} becomes {stated_privacy(guarantee)}",
    )


def _check_same_run(
    old: dict[str, Any], options: RunConfig, directory: RunDirectory, command: TaskCommand
) -> None:
    if old.get("command", command.name) != command.name:
        raise CommandError(
            f"{directory.path} holds a run of {old['command']}: resume it with that command, or "
            "choose another --output_dir."
        )
    if old.get("versions") != run_directory.versions():
        raise CommandError(
            f"{directory.path} holds a run of other versions of its packages (see "
            f"{run_directory.CONFIG_FILE}): go on with those, or start a new run."
        )
    if old.get("noise_format", 1) != NOISE_FORMAT:
        raise CommandError(
            f"{directory.path} holds a run that was begun with the noise of version 0.5.0, which "
            "this version does not make: go on with that version, or start a new run."
        )
    old_flags = {**run_config.NEW_SINCE_VERSION_0_5_0, **old.get("flags", {})}
    new_flags = options.of_the_run()
    if run_extensions.is_asked_for(old_flags, new_flags):
        old_flags = run_extensions.comparable(old_flags, new_flags)
    run_directory.check_same_flags(old_flags, new_flags, directory.path)


def _fix_factorization(
    design: RunDesign,
    directory: RunDirectory,
    old: dict[str, Any] | None,
    own: pathlib.Path | None,
) -> None:
    """Keeps the matrix of a new run, and checks that of an old one."""
    if own is None:
        if directory.states.exists():
            raise CommandError(
                f"{directory.factorization} is missing: without its matrix no round can follow "
                "those of this run. Restore it, or start a new run."
            )
        checkpoints.save(
            design.factorization, directory.factorization, participation=design.participation
        )
    matrix = directory.factorization_sha256()
    if old is None or "factorization_sha256" not in old:
        config = directory.read_config() or {}
        directory.write_json(run_directory.CONFIG_FILE, {**config, "factorization_sha256": matrix})
    elif old["factorization_sha256"] != matrix:
        raise CommandError(
            f"{directory.factorization} is not the matrix that the run in {directory.path} began "
            "with: restore it, or start a new run."
        )


def _check_ledger(directory: RunDirectory) -> None:
    """Refuses to go on with a run that began and has no ledger."""
    if directory.ledger.exists():
        return
    if directory.has_states():
        raise CommandError(
            f"{directory.path} has states and no {run_directory.LEDGER_FILE}: without it nobody "
            "knows who took part, and no further round is safe. Restore it from a copy, or start a "
            "new run and account for both."
        )
    if directory.has_begun():
        raise CommandError(
            f"{directory.path} is of a run that began, and has no {run_directory.LEDGER_FILE} nor "
            "states to go on from: other noise for these rounds would be a second release. Restore "
            "both, or start a new run and account for both."
        )


def _config(command: TaskCommand, design: RunDesign, cohort_seed: int) -> dict[str, Any]:
    kept = design.options.of_the_run()
    noise_seed = (
        "noise: 128 secret bits from the operating system, held in checkpoints/ alone; its "
        "rows, if they go to disk, in the noise directory, which is as secret as checkpoints/; "
    )
    clients = "cohorts, devices, data order and initial weights: cohort_seed"
    config: dict[str, Any] = {
        "command": command.name,
        "flags": kept,
        "cohort_seed": cohort_seed,
    }
    if design.sampling is not None:
        config["sampling"] = design.sampling.to_dict()
        config["noise_multiplier"] = design.noise_multiplier
        clients = (
            "clients of each round: 128 other secret bits in checkpoints/ alone, and "
            "participation.npz, which lists these clients, is as secret; data order and initial "
            "weights: cohort_seed"
        )
    if kept["seed"] is not None:
        noise_seed, clients = "", "everything, noise included, follows from --seed: for tests only"
    return {
        **config,
        "seeds_policy": noise_seed + clients,
        "noise_format": NOISE_FORMAT,
        "versions": run_directory.versions(),
    }


def _print_outcome(
    values: flags.FlagValues,
    command: TaskCommand,
    directory: RunDirectory,
    statement: PrivacyStatement,
    privacy: dict[str, Any],
    outcome: Any,
    clip_norms: dict[str, float] | None,
) -> None:
    rounds = outcome.num_rounds
    guarantee = statement.stated
    fields = {
        "output_dir": str(directory.path),
        "rounds": rounds,
        "test_accuracy": outcome.test_accuracy,
        "untrained_accuracy": outcome.untrained_accuracy,
        **outcome.facts,
        "num_parameters": outcome.num_parameters,
        **({} if clip_norms is None else {"clip_norms": clip_norms}),
        "privacy": privacy,
    }
    lines = [
        ("rounds", f"{rounds} of {statement.plan.num_rounds}"),
        ("test accuracy", percent(outcome.test_accuracy)),
        ("untrained model", percent(outcome.untrained_accuracy)),
        *command.outcome_lines(outcome.facts),
        *([] if clip_norms is None else [("clip norm", _moved(clip_norms))]),
        ("privacy", stated_privacy(guarantee)),
        *_attacker_lines(guarantee),
        ("statement", str(directory.path / run_directory.STATEMENT_FILE)),
        ("figure", str(directory.path / run_directory.FIGURE_FILE)),
    ]
    warnings = [f"warning: {warning}" for warning in statement.warnings]
    text = "\n".join(["", *warnings, command_line.table(lines)])
    command_line.print_result(values, fields, text)


def _moved(norms: dict[str, float]) -> str:
    """How a clip norm moved and what it cost, for a person to read."""
    return (
        f"{norms['first']:.3g} at first, {norms['last']:.3g} at last, within "
        f"{norms['smallest']:.3g} and {norms['largest']:.3g}; running sums have the noise of a "
        f"constant {norms['equivalent']:.3g}, of which {100.0 * norms['drift_cost']:.1f} % is what "
        "the drift cost"
    )


def stated_privacy(guarantee: Guarantee) -> str:
    """Returns a run's guarantee for a person to read, rounded up."""
    if not math.isfinite(guarantee.epsilon):
        return "none: this run is not private"
    numbers = printed_guarantees.pair(guarantee.epsilon, guarantee.delta, ".3f")
    return f"{numbers}-DP for each client"


def _attacker_lines(guarantee: Guarantee) -> list[tuple[str, str]]:
    """What an attacker can do, for a person to read; nothing for a run that is not private."""
    if not math.isfinite(guarantee.epsilon):
        return []
    return [("attacker", attackers.line(guarantee.attacker()))]


def percent(accuracy: float | None) -> str | None:
    """Returns an accuracy for a person to read; None for None."""
    return None if accuracy is None else f"{100 * accuracy:.2f} %"


def _say(command: TaskCommand, message: str) -> None:
    ProgressBar.write(f"{command.name}: {message}", file=sys.stderr)
