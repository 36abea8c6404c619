r"""run-stackoverflow: one federated training run of next-word prediction, private or not.

Without flags it trains a small model on the docstrings of the installed packages, under a
banded matrix-factorization mechanism with participation timers, and writes the guarantee
that the run earned. Run again with the same --output_dir, it resumes.

Examples:
  run-stackoverflow --output_dir=runs/banded
  run-stackoverflow --output_dir=runs/independent --mechanism=identity
  run-stackoverflow --output_dir=runs/not_private --mechanism=none
  run-stackoverflow --output_dir=runs/mine --dataset=my_text.sqlite --target_epsilon=4
  run-stackoverflow --output_dir=runs/sampled --sampling=poisson --num_bands=4
"""

import dataclasses
import datetime
import importlib.metadata
import math
import pathlib
import platform
import secrets
import sys
from typing import Any

import tqdm
from absl import flags

from mf_aggregators import checkpoints, guarantees, noise_directory, version
from mf_aggregators.commands import command_line
from mf_aggregators.commands.command_line import CommandError
from mf_aggregators.participation_records import ParticipationRecord
from mf_aggregators.privacy_statement import PrivacyStatement, RunFacts
from simulations import quiet, run_directory
from simulations.data_samplers import DataSampler
from simulations.participation_ledger import ParticipationLedger
from simulations.run_directory import RunDirectory
from stackoverflow_nwp import run_flags, run_plans, sampled_runs

_PACKAGES = (
    "tensorflow-federated",
    "tensorflow",
    "tensorflow-privacy",
    "dp-accounting",
    "numpy",
)


def main(values: flags.FlagValues) -> int | None:
    """Plans, trains, and states the guarantee."""
    # Building a data set may load TensorFlow already.
    quiet.prepare_environment()
    options = run_flags.options_of(values)
    directory = RunDirectory(
        values.output_dir or f"runs/{datetime.datetime.now().strftime('%Y-%m-%d_%H-%M-%S')}"
    )
    old = directory.read_config()
    kept = {name: value for name, value in options.items() if name not in run_flags.NOT_OF_THE_RUN}
    if old is not None:
        old_flags = {**run_flags.OF_OLDER_RUNS, **old.get("flags", {})}
        run_directory.check_same_flags(old_flags, kept, directory.path)
        cohort_seed = old["cohort_seed"]
    else:
        cohort_seed = secrets.randbits(64) if options["seed"] is None else options["seed"]
    if old is not None and old.get("versions") != _versions():
        raise CommandError(
            f"{directory.path} holds a run of other versions of its packages (see "
            f"{run_directory.CONFIG_FILE}): go on with those, or start a new run."
        )
    noise_path = pathlib.Path(values.noise_directory or directory.noise)
    # One factorization for all rounds of a run, whatever becomes of where it came from.
    own = directory.factorization if directory.factorization.exists() else None
    own_noise_multiplier = None if old is None else old.get("noise_multiplier")
    plan = run_plans.make(options, values.cache_dir, own, own_noise_multiplier)
    fingerprint = plan.text.fingerprint()
    if values.noise_directory or noise_path.exists():
        # If it is unfit, this is said before anything is written or TensorFlow is loaded. The
        # default one of a new run cannot be, and is made by the aggregator.
        noise_directory.open_directory(noise_path)
    if old is None:
        config = _config(kept, cohort_seed, fingerprint, plan)
        directory.create(config, only_for_owner=plan.scheme is not None)
    elif old.get("dataset_sha256") != fingerprint:
        raise CommandError(
            f"{plan.text.path} has changed since the run in {directory.path} began, and no run can "
            "go on with other data under the same noise: start a new one."
        )
    else:
        _say(f"resuming the run in {directory.path}")

    if own is None:
        if directory.states.exists():
            raise CommandError(
                f"{directory.factorization} is missing: without its matrix no round can follow "
                "those of this run. Restore it, or start a new run."
            )
        checkpoints.save(
            plan.factorization, directory.factorization, participation=plan.participation
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
    if old is not None and not directory.ledger.exists() and directory.has_metrics():
        raise CommandError(
            f"{directory.path} has results of rounds and neither {run_directory.LEDGER_FILE} nor "
            "states to go on from: other noise for these rounds would be a second release. Restore "
            "both, or start a new run and account for both."
        )
    sampler = None
    if plan.scheme is not None:
        sampler = sampled_runs.sampler_of(plan.scheme, directory, options["seed"])
    _say("starting TensorFlow Federated")
    try:
        import tensorflow_federated  # noqa: F401
    except ImportError as error:
        raise CommandError(
            f"TensorFlow Federated cannot be imported ({error}): see Installing in README.md."
        ) from error
    # What TensorFlow Federated needs is imported only after the flags were found good.
    from stackoverflow_nwp import training

    quiet.end_workers_at_exit()
    statement = _statement(plan)
    _write_statement(directory, statement)
    with quiet.stop_requests("stopping after this round; Ctrl-C again stops at once") as stop:
        outcome = training.train(
            training.TrainingOptions.from_flags(plan.options),
            plan.text,
            plan.participation,
            plan.factorization,
            plan.noise_multiplier,
            cohort_seed,
            directory,
            noise_path,
            stop,
            sampler,
        )
    if outcome.num_rounds == plan.options["num_rounds"]:
        directory.delete_noise_rows()
    statement = _realised(plan, statement, outcome.ledger, sampler)
    _write_statement(directory, statement)
    _print_outcome(values, directory, plan, statement, outcome)
    if outcome.message:
        _say(outcome.message)
        return command_line.BAD_INPUT
    return command_line.INTERRUPTED if outcome.interrupted else None


def run() -> None:
    """Entry point of the console command."""
    sys.exit(command_line.run(__doc__ or "", run_flags.define_flags, main))


def _config(
    kept: dict[str, Any], cohort_seed: int, fingerprint: str, plan: run_plans.Plan
) -> dict[str, Any]:
    noise = (
        "noise: 128 secret bits from the operating system, held in checkpoints/ alone; its "
        "rows, if they go to disk, in the noise directory, which is as secret as checkpoints/; "
    )
    clients = "cohorts, data order and initial weights: cohort_seed"
    config: dict[str, Any] = {
        "flags": kept,
        "cohort_seed": cohort_seed,
        "dataset_sha256": fingerprint,
    }
    if plan.scheme is not None:
        config["sampling"] = plan.scheme.to_dict()
        config["noise_multiplier"] = plan.noise_multiplier
        clients = (
            "clients of each round: 128 other secret bits in checkpoints/ alone, and "
            "participation.npz, which lists these clients, is as secret; data order and initial "
            "weights: cohort_seed"
        )
    if kept["seed"] is not None:
        noise, clients = "", "everything, noise included, follows from --seed: for tests only"
    return {**config, "seeds_policy": noise + clients, "versions": _versions()}


def _versions() -> dict[str, str]:
    versions = {"mf-aggregators": version.__version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return versions


def _statement(plan: run_plans.Plan) -> PrivacyStatement:
    options = plan.options
    factorization, noise_multiplier = plan.factorization, plan.noise_multiplier
    if plan.scheme is None:
        guarantee = guarantees.planned(
            factorization, plan.participation, noise_multiplier, options["delta"]
        )
    else:
        guarantee = guarantees.sampled(
            factorization, plan.scheme, noise_multiplier, options["delta"]
        )
    return PrivacyStatement(
        facts=RunFacts(
            mechanism=(
                "None: clipping without noise"
                if noise_multiplier == 0.0
                else f"{factorization.mechanism.capitalize()} matrix factorization for "
                f"{factorization.num_rounds} rounds"
            ),
            num_clients=plan.text.splits["train"].clients,
            clients_per_round=options["clients_per_round"],
            clip_norm=options["clip_norm"],
            noise_seed_is_fixed=options["seed"] is not None,
        ),
        plan=dataclasses.replace(guarantee, num_rounds=options["num_rounds"]),
    )


def _realised(
    plan: run_plans.Plan,
    statement: PrivacyStatement,
    ledger: ParticipationLedger,
    sampler: DataSampler | None,
) -> PrivacyStatement:
    took_place = (
        guarantees.realised_participation(ledger.rounds_of_clients(), ledger.num_rounds)
        if sampler is None
        else sampled_runs.took_place(sampler, ledger)
    )
    record = ParticipationRecord(
        ledger.client_ids, tuple(ledger.rounds_of_clients()), ledger.num_rounds
    )
    planned = statement.plan
    keeps_plan = guarantees.keeps_plan(planned.sampling or planned.participation, took_place)
    return dataclasses.replace(
        statement,
        took_place=took_place,
        widened=(
            None if keeps_plan else guarantees.widened(planned, plan.factorization, took_place)
        ),
        realised=guarantees.realised(statement.plan, plan.factorization, took_place),
        # Of a sampled run, who was drawn is a secret that the statement must not tell.
        worst_client=(
            None
            if took_place.keeps_sampling
            else guarantees.worst_client(statement.plan, plan.factorization, record)
        ),
    )


def _write_statement(directory: RunDirectory, statement: PrivacyStatement) -> None:
    directory.write_json(run_directory.PRIVACY_FILE, statement.to_dict())
    directory.write_text(run_directory.STATEMENT_FILE, statement.to_markdown())


def _print_outcome(
    values: flags.FlagValues,
    directory: RunDirectory,
    plan: run_plans.Plan,
    statement: PrivacyStatement,
    outcome: Any,
) -> None:
    rounds = outcome.num_rounds
    guarantee = statement.earned
    fields = {
        "output_dir": str(directory.path),
        "rounds": rounds,
        "test_accuracy": outcome.test_accuracy,
        "untrained_accuracy": outcome.untrained_accuracy,
        "most_frequent_word": outcome.most_frequent_word,
        "most_frequent_word_accuracy": outcome.most_frequent_word_accuracy,
        "num_parameters": outcome.num_parameters,
        "privacy": statement.to_dict(),
    }
    if math.isfinite(guarantee.epsilon):
        earned = f"({guarantee.epsilon:.3f}, {guarantee.delta:g})-DP for each client"
    else:
        earned = "none: this run is not private"
    lines = [
        ("rounds", f"{rounds} of {plan.options['num_rounds']}"),
        ("test accuracy", _percent(outcome.test_accuracy)),
        ("untrained model", _percent(outcome.untrained_accuracy)),
        (
            f"always {outcome.most_frequent_word!r}",
            _percent(outcome.most_frequent_word_accuracy),
        ),
        ("privacy earned", earned),
        ("statement", str(directory.path / run_directory.STATEMENT_FILE)),
    ]
    text = "\n" + command_line.table(lines)
    for warning in statement.warnings:
        text += f"\nwarning: {warning}"
    command_line.print_result(values, fields, text)


def _percent(accuracy: float | None) -> str | None:
    return None if accuracy is None else f"{100 * accuracy:.2f} %"


def _say(message: str) -> None:
    tqdm.tqdm.write(f"run-stackoverflow: {message}", file=sys.stderr)


if __name__ == "__main__":
    run()
