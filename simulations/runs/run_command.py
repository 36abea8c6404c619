"""Runs federated training of any task, from the command's flags to the privacy statement.

A run is new (:func:`begin`), is resumed (:func:`resume`), or is resumed for more rounds than it was
planned for (:func:`extend`). Flags, data, mechanism and directory are checked before anything is
written. Everything that a run leaves behind is in its directory; started again with the same flags,
it goes on where it was.

The same command with more ``--num_rounds`` extends a run. ``config.json`` then has the flags of the
whole, and below ``extends`` the horizons before, each with the rounds that were released when the
run was extended. It is replaced in one step, from which on the larger horizon counts: a process
that is killed before it has extended nothing, and after it only the larger one goes on.
"""

import dataclasses
import datetime
import math
import os
import pathlib
import secrets
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, NoReturn

from absl import flags

from mf_aggregators import checkpoints, inputs, random_streams
from mf_aggregators.commands import command_line, stated_runs
from mf_aggregators.commands.command_line import CommandError
from mf_aggregators.kernel import numbers
from mf_aggregators.kernel.claim import Guarantee
from mf_aggregators.noise import NOISE_FORMAT, places
from mf_aggregators.participation import SCHEMES, Sampler, SamplingScheme
from mf_aggregators.privacy import guarantees, statement_file
from mf_aggregators.privacy.statements import Statement, today
from mf_aggregators.progress_bars import ProgressBar
from mf_aggregators.tff import processes
from simulations.devices import device_behaviour
from simulations.devices.device_behaviour import DeviceBehaviour
from simulations.runs import run_config, run_directory, run_plan
from simulations.runs.run_config import TIMERS, RunConfig
from simulations.runs.run_directory import (
    Horizon,
    ParticipationLedger,
    RunDirectory,
    RunDirectoryError,
)
from simulations.runs.run_plan import Run
from simulations.training.federated_task import TaskCommand, TaskData
from simulations.workers import worker_addresses

if TYPE_CHECKING:
    from simulations.runs.trainer import Outcome

# The entry of config.json with the separation that was found for a run without --separation.
_FOUND_SEPARATION = "found_separation"
# The flags that ask for a privacy guarantee, from which the noise follows.
_TARGETS = ("target_epsilon", "target_rho")


def run(command: TaskCommand) -> NoReturn:
    """Parses the flags of a training command, runs the training, and exits."""
    sys.exit(
        command_line.run(
            command.description,
            lambda values: run_config.define_flags(values, command),
            lambda values: main(values, command),
        )
    )


def main(values: flags.FlagValues, command: TaskCommand) -> int | None:
    """Plans a run, trains, and states its privacy guarantee.

    Returns:
      The exit status, None for success.

    Raises:
      ValueError: For flags, data or a directory that it cannot work with.
      OSError: If a file cannot be read or written.
    """
    # Prepare the environment first: TensorFlow reads it when it loads, which building a data set
    # may already cause.
    processes.prepare_environment()
    config = run_config.of_flags(values, command)
    behaviour = device_behaviour.of_flags(values)
    _check_behaviour(config, behaviour)
    with command_line.naming("workers"):
        workers = None if config.workers is None else worker_addresses.parse(config.workers)
    command_line.check_extra("a training run")
    if values.noise_directory:
        command_line.check_directory(values.noise_directory, "noise_directory")
    directory = RunDirectory(
        values.output_dir or f"runs/{datetime.datetime.now().strftime('%Y-%m-%d_%H-%M-%S')}"
    )
    command_line.check_directory(directory.path, "output_dir")
    _check_other_runs(config, directory)
    with directory.locked():
        begun = directory.read_config()
        if begun is None:
            planned = begin(config, command, directory, behaviour)
        else:
            planned = resume(begun, config, command, directory, behaviour)
        return _train(values, command, planned, workers)


def begin(
    config: RunConfig, command: TaskCommand, directory: RunDirectory, behaviour: DeviceBehaviour
) -> Run:
    """Plans a new run and fills its directory.

    Args:
      config: The configuration that the flags ask for.
      command: The command that the run belongs to.
      directory: The directory, which holds nothing yet.
      behaviour: The behaviour of the clients' devices.

    Raises:
      ValueError: If flags, data and devices do not fit one another.
      OSError: If the directory cannot be written.
    """
    data = command.open_data(config)
    behaviour.availability.check_population(data.num_clients)
    given = config.seed if config.cohort_seed is None else config.cohort_seed
    seed = secrets.randbits(64) if given is None else given
    found = run_plan.with_separation(config, data, behaviour, seed)
    run = run_plan.plan(found, data, directory, seed=seed, behaviour=behaviour)
    run_plan.check_devices(run)
    _check_secrets(run)
    # The fingerprint is computed here, so that unreadable data are found before anything is
    # written.
    fingerprint = data.fingerprint()
    described = _description(run, command)
    described[_FOUND_SEPARATION] = None if config.separation else found.separation
    directory.create(described, only_for_owner=run.mechanism.sampling is not None)
    _keep_matrix(run, None)
    directory.fix_data(fingerprint)
    return _with_sampler(run)


def resume(
    begun: Mapping[str, object],
    config: RunConfig,
    command: TaskCommand,
    directory: RunDirectory,
    behaviour: DeviceBehaviour,
) -> Run:
    """Plans the continuation of a run, after a check that the directory holds the same run.

    With more rounds than before, the run is extended. ``begun`` is the ``config.json`` of its
    directory; the other arguments are those of :func:`begin`.

    Raises:
      ValueError: If the run cannot go on with these flags, data or devices.
      OSError: If the directory cannot be written.
    """
    directory.settle_factorization(begun)
    old_flags = inputs.part(begun.get("flags", {}), dict)
    config = _with_noise_of(old_flags, config)
    if config.separation is None:
        config = dataclasses.replace(
            config, separation=inputs.part(begun, dict).get(_FOUND_SEPARATION)
        )
    _check_same_run(begun, config, directory, command)
    seed = begun.get("cohort_seed")
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise RunDirectoryError(
            f"{directory.path / run_directory.CONFIG_FILE} has no cohort_seed, which the cohorts "
            "of this run need: restore it, or start a new run and account for both."
        )
    run_directory.check_metrics(directory.path / run_directory.METRICS_FILE)
    if directory.states.exists() and not directory.factorization.exists():
        raise CommandError(
            f"{directory.factorization} is missing, and further rounds need its matrix. Restore "
            "it, or start a new run."
        )
    data = command.open_data(config)
    behaviour.availability.check_population(data.num_clients)
    is_longer = _is_longer(old_flags, config)
    command_line.check_choice(
        not is_longer or config.audit_canaries is None,
        "a run with --audit_canaries cannot be extended: its canaries are drawn for all rounds.",
    )
    _check_ledger(directory)
    horizons = run_directory.horizons_of(begun, directory)
    if is_longer:
        horizons = (*horizons, _horizon_before(old_flags, config, data, directory))
    run = run_plan.plan(
        config,
        data,
        directory,
        seed=seed,
        behaviour=behaviour,
        begun=begun,
        horizons=horizons,
    )
    _check_secrets(run)
    _say(command, f"resuming the run in {directory.path}")
    begun, run = _with_changes(begun, run, command)
    if is_longer:
        begun = extend(run, command, begun)
    elif begun["flags"] != config.of_the_run():
        begun = {**begun, "flags": config.of_the_run()}
        directory.write_json(run_directory.CONFIG_FILE, begun)
    _keep_matrix(run, begun)
    directory.fix_data(data.fingerprint())
    return _with_sampler(run)


def extend(run: Run, command: TaskCommand, begun: Mapping[str, object]) -> dict[str, object]:
    """Extends a run to more rounds by one write of its configuration, which it returns.

    The privacy statement on disk stays that of the smaller horizon until the run goes on, and is
    true until then: before that, nothing is released that the smaller horizon does not cover.

    Args:
      run: The run with all its rounds, those of the larger horizon included.
      command: The command that the run belongs to.
      begun: The ``config.json`` of the horizon before.

    Raises:
      ValueError: If the data are not those that the run began with.
      OSError: If the directory cannot be written.
    """
    directory, mechanism = run.directory, run.mechanism
    assert mechanism.extends is not None
    directory.fix_data(run.data.fingerprint())
    _save_matrix(run, directory.extended_factorization)
    config = {
        **begun,
        "flags": run.config.of_the_run(),
        run_directory.EXTENDS: [horizon.to_dict() for horizon in run.horizons],
        "factorization_sha256": run_directory.matrix_sha256(directory.extended_factorization),
    }
    directory.write_json(run_directory.CONFIG_FILE, config)
    directory.settle_factorization(config)
    # Noise rows on disk are deleted: those of the larger horizon have other files, and are computed
    # again.
    directory.delete_noise_rows()
    before = mechanism.extends.guarantee(run.config.delta)
    _say(
        command,
        f"extended from {mechanism.extends.num_rounds} to {mechanism.num_rounds} rounds: "
        f"{stated_privacy(before)} becomes {stated_privacy(run.guarantee)}",
    )
    return config


def _train(
    values: flags.FlagValues, command: TaskCommand, run: Run, workers: tuple[str, ...] | None
) -> int | None:
    directory = run.directory
    _say(command, "starting TensorFlow Federated")
    # TensorFlow Federated and matplotlib are imported here, so that flags are checked before they
    # load.
    from simulations.runs import run_reports, trainer

    processes.end_workers_at_exit()
    if workers is not None:
        from simulations.workers import remote_workers

        remote_workers.use(workers)
    elif run.config.secure_aggregation:
        trainer.simulate_secure_sums()
    processes.start_worker()
    statements = run_reports.RunStatements(run)
    with processes.stop_requests("stopping after this round; Ctrl-C again stops at once") as stop:
        try:
            task = run.data.load(run.seed)
            outcome = trainer.train(run, task, statements, stop)
        except BaseException:
            statements.after_failure()
            raise
    if outcome.stopped_by_rule or outcome.num_rounds == run.config.num_rounds:
        directory.delete_noise_rows()
    statement = statements.after(outcome.ledger, outcome.audit)
    run_reports.draw_figure(run, statement.plan.epsilon)
    _print_outcome(values, command, directory, statement, outcome)
    if outcome.message:
        _say(command, outcome.message)
    if outcome.message and not outcome.stopped_by_rule:
        return command_line.BAD_INPUT
    if outcome.audit is not None and outcome.audit.is_refuted:
        return command_line.REFUTED
    return command_line.INTERRUPTED if outcome.interrupted else None


def _check_behaviour(config: RunConfig, behaviour: DeviceBehaviour) -> None:
    sampling = config.sampling
    if sampling != TIMERS:
        allowed = DeviceBehaviour()
        if not SCHEMES[sampling].has_groups:
            allowed = DeviceBehaviour(behaviour.availability, round_minutes=behaviour.round_minutes)
        command_line.check_choice(
            behaviour == allowed,
            f"--sampling={sampling} takes at most --availability and --round_minutes of the flags "
            "of devices, and neither if clients are in groups: leave out the others, or use "
            f"--sampling={TIMERS}.",
        )
    behaviour.fewest_uploads(config.cohort)
    command_line.check_choice(
        behaviour.timer_hours is None or config.separation is not None,
        "--timer=wall_clock needs --separation; simulate-participation suggests one.",
    )


def _check_other_runs(config: RunConfig, directory: RunDirectory) -> None:
    """Checks, before hours of training, that the guarantees of --other_runs can be composed."""
    for other in stated_runs.directories_of(config.other_runs):
        command_line.check_choice(
            os.path.realpath(other) != os.path.realpath(directory.path),
            f"--other_runs={other} is the run itself: name only other runs.",
        )
    stated_runs.Others.named(
        config.other_runs, directory.path, config.delta, directory.sampling_seed
    )


def _check_secrets(run: Run) -> None:
    """Checks that the files with the run's secrets are private, before anything is written.

    The default noise directory of a new run is not checked: the aggregator creates it, private.
    """
    directory = run.directory
    if directory.states.exists():
        places.check_private(directory.states, "the directory of states")
    if run.mechanism.sampling is not None and directory.ledger.exists():
        places.check_private(
            directory.path, "the directory of a sampled run", "could learn who was drawn"
        )
    if run.config.noise_directory or run.noise_directory.exists():
        places.open_directory(run.noise_directory)


def _with_sampler(run: Run) -> Run:
    """Returns the run with its sampler, which leaves out clients that are not available."""
    scheme, behaviour = run.mechanism.sampling, run.behaviour
    if scheme is None:
        return run
    sampler = sampler_of(scheme, run.directory, run.config.seed)
    if behaviour != DeviceBehaviour():
        sampler = device_behaviour.AvailableClients(
            sampler, behaviour.availability, run.seed, behaviour.round_seconds
        )
    return dataclasses.replace(run, sampler=sampler, behaviour=DeviceBehaviour())


def sampler_of(scheme: SamplingScheme, directory: RunDirectory, fixed_seed: int | None) -> Sampler:
    """Returns the sampler that draws a run's clients, from the secret seed in its directory.

    This seed differs from the seed of data order and initial weights, of which an adversary who has
    the initial model could find 32 bits by trial. The sampler's seed is stored with the saved
    states, which are as secret.

    Args:
      scheme: How clients are drawn.
      directory: The run's directory; the seed of a new run is made and saved there.
      fixed_seed: A seed in place of a secret one, for tests.

    Raises:
      CommandError: If the seed of rounds that were released is lost or damaged: other draws
        would not be of the same partition.
      OSError: If the seed cannot be saved.
    """
    if fixed_seed is not None:
        return scheme.sampler(fixed_seed)
    path = directory.sampling_seed
    if path.exists():
        try:
            return scheme.sampler(random_streams.load_seed(path))
        except ValueError as error:
            raise CommandError(
                f"{path} cannot be read: restore it, or start a new run and account for both."
            ) from error
    if directory.ledger.exists():
        raise CommandError(
            f"{path} is missing, and the draws of the next rounds need it. Restore it, or start a "
            "new run and account for both."
        )
    seed = random_streams.secret_seed()
    directory.states.mkdir(parents=True, exist_ok=True, mode=0o700)
    random_streams.save_seed(seed, path)
    return scheme.sampler(seed)


def _with_noise_of(old: Mapping[str, object], config: RunConfig) -> RunConfig:
    """Returns the configuration with the noise that the run began with, if its target is the same.

    Another version may compute a noise multiplier for this target that differs in the last digits.
    """
    begun_with = old.get("noise_multiplier")
    if begun_with is None:
        return config
    begun_with = numbers.non_negative_number(begun_with, "noise_multiplier of config.json")
    for name in _TARGETS:
        target, before = config[name], old.get(name)
        if None not in (target, before) and (target == before or _is_longer(old, config)):
            return dataclasses.replace(config, noise_multiplier=begun_with)
    return config


def _is_longer(old: Mapping[str, object], config: Mapping[str, object]) -> bool:
    """Whether the flags ask for more rounds than the run was begun with."""
    before = old.get("num_rounds")
    return isinstance(before, int) and inputs.part(config["num_rounds"], int) > before


def _horizon_before(
    old: dict, config: RunConfig, data: TaskData, directory: RunDirectory
) -> Horizon:
    """Returns the horizon that a run was begun with, before it is extended."""
    before = dataclasses.replace(
        config, num_rounds=old["num_rounds"], max_participations=old.get("max_participations")
    )
    return Horizon(
        before.num_rounds, _released_rounds(directory), run_plan.participation_of(before, data)
    )


def _released_rounds(directory: RunDirectory) -> int:
    if not directory.ledger.exists():
        return 0
    return ParticipationLedger.load(directory.ledger).num_rounds


def _with_changes(
    begun: Mapping[str, object], run: Run, command: TaskCommand
) -> tuple[Mapping[str, object], Run]:
    """Returns configuration and run, with the flag values of earlier rounds recorded."""
    known = inputs.part(begun, dict)
    old, new, behaviour = known["flags"], run.config.of_the_run(), run.behaviour
    changed = {name: old.get(name) for name in run_config.MAY_CHANGE if old.get(name) != new[name]}
    changes = {**known.get(run_directory.CHANGED, {})}
    if changed:
        released = _released_rounds(run.directory)
        # If a flag changes twice after the same round, the value before the first change is the one
        # that earlier rounds had.
        changes[str(released)] = {**changed, **changes.get(str(released), {})}
        begun = {**begun, run_directory.CHANGED: changes}
        names = ", ".join(f"--{name}" for name in changed)
        _say(command, f"from round {released + 1} on, with new values of {names}")
    earlier = {}
    for rounds, flags_before in reversed(changes.items()):
        names_of_devices = {*device_behaviour.MAY_CHANGE} & {*flags_before}
        before = {name: flags_before[name] for name in names_of_devices}
        behaviour = dataclasses.replace(behaviour, **before)
        earlier[int(rounds)] = behaviour
    return begun, dataclasses.replace(run, earlier_behaviours=earlier)


def _check_same_run(
    begun: Mapping[str, object], config: RunConfig, directory: RunDirectory, command: TaskCommand
) -> None:
    if begun.get("command", command.name) != command.name:
        raise CommandError(
            f"{directory.path} holds a run of {begun['command']}: resume it with that command, or "
            "choose another --output_dir."
        )
    if begun.get("versions") != run_directory.versions():
        raise CommandError(
            f"{directory.path} holds a run with other versions of packages (see "
            f"{run_directory.CONFIG_FILE}): use those versions, or start a new run."
        )
    noise_format = begun.get("noise_format", 1)
    if noise_format != NOISE_FORMAT:
        raise CommandError(
            f"{directory.path} holds a run whose noise has format {noise_format}, and this version "
            f"makes {NOISE_FORMAT}: use the version that began it, or start a new run."
        )
    old, new = dict(inputs.part(begun.get("flags", {}), dict)), config.of_the_run()
    old |= {name: new[name] for name in run_config.MAY_CHANGE if name in old}
    if _is_longer(old, new):
        # An extended run may also change its rounds, most participations and target, but no other
        # flag: earlier rounds were drawn, clipped and noised with those.
        old["num_rounds"] = new["num_rounds"]
        most, more = old.get("max_participations"), new["max_participations"]
        if most is not None and (more is None or more >= most):
            old["max_participations"] = more
        # A target may change only if the run had one: a run with a given noise multiplier keeps
        # that.
        for name in _TARGETS:
            if None not in (old.get(name), new[name]):
                old[name] = new[name]
    run_directory.check_same_flags(old, new, directory.path)


def _save_matrix(run: Run, path: pathlib.Path) -> None:
    mechanism, workload = run.mechanism, run.workload.to_dict()
    checkpoints.save(
        mechanism.factorization, path, workload=workload, participation=mechanism.noise_reference
    )


def _keep_matrix(run: Run, begun: Mapping[str, object] | None) -> None:
    """Saves the factorization of a new run, and checks the saved one of a resumed run."""
    directory = run.directory
    if not directory.factorization.exists():
        _save_matrix(run, directory.factorization)
    matrix = run_directory.matrix_sha256(directory.factorization)
    known = (begun or {}).get("factorization_sha256")
    if known is None and not directory.ledger.exists():
        directory.record(factorization_sha256=matrix)
    elif known != matrix:
        raise CommandError(
            f"{directory.factorization} is not the matrix that the run in {directory.path} began "
            "with: restore it, or start a new run."
        )


def _check_ledger(directory: RunDirectory) -> None:
    """Raises CommandError if a run has begun and its participation ledger is missing."""
    if directory.ledger.exists():
        return
    if directory.has_states() or directory.has_begun():
        left = "states" if directory.has_states() else "neither states"
        joined = "and no" if directory.has_states() else "nor"
        raise CommandError(
            f"{directory.path} is the directory of a run that began, and has {left} {joined} "
            f"{run_directory.LEDGER_FILE}: its participations are unknown, and new noise for its "
            "rounds would be a second release. Restore it from a copy, or start a new run and "
            "account for both."
        )


def _description(run: Run, command: TaskCommand) -> dict[str, object]:
    """Returns the contents of ``config.json`` for a new run."""
    kept, sampling = run.config.of_the_run(), run.mechanism.sampling
    policy = "noise: 128 secret bits from the operating system, held in checkpoints/ alone; "
    config: dict[str, object] = {}
    if sampling is None:
        policy += "cohorts, devices, data order and initial weights: cohort_seed"
    else:
        policy += (
            "clients of each round: 128 other secret bits there, and participation.npz is as "
            "secret; data order and initial weights: cohort_seed"
        )
        noise = run.mechanism.noise_multiplier
        config = {"sampling": sampling.to_dict(), "noise_multiplier": noise}
    if kept["seed"] is not None:
        policy = "everything, noise included, follows from --seed: for tests only"
    return {
        "command": command.name,
        "flags": kept,
        run_directory.BEGUN: today(),
        "cohort_seed": run.seed,
        **config,
        "seeds_policy": policy,
        "noise_format": NOISE_FORMAT,
        "versions": run_directory.versions(),
    }


def _print_outcome(
    values: flags.FlagValues,
    command: TaskCommand,
    directory: RunDirectory,
    statement: Statement,
    outcome: "Outcome",
) -> None:
    rounds, guarantee, privacy = outcome.num_rounds, statement.stated, statement.to_dict()
    attacker = f"finds at most {guarantees.rates_in_brief(guarantee)}"
    fields = {
        "output_dir": str(directory.path),
        "rounds": rounds,
        "test_accuracy": outcome.test_accuracy,
        "untrained_accuracy": outcome.untrained_accuracy,
        "initial_model": outcome.initial_model,
        **outcome.facts,
        "num_parameters": outcome.num_parameters,
        "privacy": privacy,
    }
    lines = [
        ("rounds", f"{rounds} of {statement.plan.num_rounds}"),
        ("test accuracy", percent(outcome.test_accuracy)),
        ("untrained model", percent(outcome.untrained_accuracy)),
        *(command.outcome_lines(outcome.facts) if outcome.facts else []),
        ("privacy", stated_privacy(guarantee)),
        *([("attacker", attacker)] if math.isfinite(guarantee.epsilon) else []),
        *([] if outcome.audit is None else [("audit", str(outcome.audit))]),
        ("statement", str(directory.path / run_directory.STATEMENT_FILE)),
        ("figure", str(directory.path / run_directory.FIGURE_FILE)),
    ]
    warnings = [
        f"warning: {warning}" for warning in statement_file.warnings(statement_file.render(privacy))
    ]
    text = "\n".join(["", *warnings, command_line.table(lines)])
    command_line.print_result(values, fields, text)


def stated_privacy(guarantee: Guarantee) -> str:
    """Returns a run's guarantee as text for a person, with epsilon and delta rounded up.

    Args:
      guarantee: The guarantee of every client.
    """
    if math.isfinite(guarantee.epsilon):
        stated = numbers.pair(guarantee.epsilon, guarantee.delta, ".3f")
        return f"{stated}-DP for each client"
    return "none that holds for every client"


def percent(accuracy: float | None) -> str | None:
    """Returns an accuracy as text in percent; None for None."""
    return None if accuracy is None else f"{100 * accuracy:.2f} %"


def _say(command: TaskCommand, message: str) -> None:
    ProgressBar.write(f"{command.name}: {message}", file=sys.stderr)
