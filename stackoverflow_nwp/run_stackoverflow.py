r"""run-stackoverflow: one federated training run of next-word prediction, private or not.

Without flags it trains a small model on the docstrings of the installed packages, under a
banded matrix-factorization mechanism with participation timers, and writes the guarantee
that the run earned. Run again with the same --output_dir, it resumes.

Examples:
  run-stackoverflow --output_dir=runs/banded
  run-stackoverflow --output_dir=runs/independent --mechanism=identity
  run-stackoverflow --output_dir=runs/not_private --mechanism=none
  run-stackoverflow --output_dir=runs/mine --dataset=my_text.sqlite --target_epsilon=4
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

from mf_aggregators import (
    accounting,
    checkpoints,
    factorizations,
    guarantees,
    noise_directory,
    validation,
    version,
    workloads,
)
from mf_aggregators.commands import command_line
from mf_aggregators.commands.command_line import CommandError, check_choice
from mf_aggregators.factorizations import Factorization
from mf_aggregators.noise_storage import NoiseStorage
from mf_aggregators.participation import MinSeparation
from mf_aggregators.privacy_statement import PrivacyStatement, RunFacts
from mf_aggregators.random_words import NoiseSource
from simulations import cohorts, quiet, run_directory
from simulations.participation_ledger import ParticipationLedger
from simulations.run_directory import RunDirectory
from stackoverflow_nwp import datasets, settings

_MECHANISMS = (
    "banded",
    "toeplitz",
    "blt",
    "banded_inverse",
    "tree",
    "identity",
    "optimal",
    "none",
)
# Without --num_buffers and --num_bands.
_BUFFERS, _BANDS_OF_INVERSE = 4, 16
_COUNTS = (
    "num_rounds",
    "clients_per_round",
    "vocab_size",
    "sequence_length",
    "embedding_size",
    "lstm_size",
    "sentences_per_client",
    "batch_size",
    "client_epochs",
    "evaluate_every",
)
_PACKAGES = (
    "tensorflow-federated",
    "tensorflow",
    "tensorflow-privacy",
    "dp-accounting",
    "numpy",
)
# Flags that change nothing about a run, and may differ when it is resumed.
_NOT_OF_THE_RUN = ("format", "output_dir", "cache_dir", "noise_directory")
# What runs had that were started before there were these flags.
_OF_OLDER_RUNS = {"noise_storage": "auto", "noise_source": "philox"}


def define_flags(values: flags.FlagValues) -> None:
    """Defines the flags of run-stackoverflow."""
    string, integer, real = flags.DEFINE_string, flags.DEFINE_integer, flags.DEFINE_float
    string("output_dir", None, "The run's directory; default runs/<time>.", flag_values=values)
    string(
        "dataset",
        datasets.DOCSTRINGS,
        "docstrings (made from the installed packages, once), stackoverflow (TFF's, a download of "
        "3 GB), or a .sqlite file in its format (make-text-dataset makes one).",
        flag_values=values,
    )
    string("cache_dir", None, "Where data sets are kept; default ~/.cache.", flag_values=values)
    flags.DEFINE_enum(
        "mechanism",
        "banded",
        list(_MECHANISMS),
        "The noise: a matrix factorization (banded, toeplitz, blt, banded_inverse, tree, or the "
        "dense optimum for single participation), independent (identity), or none (the same "
        "training and clipping without noise).",
        flag_values=values,
    )
    string("checkpoint", None, "A checkpoint to use in place of --mechanism.", flag_values=values)
    real("target_epsilon", None, "Epsilon of the planned guarantee.", flag_values=values)
    real("noise_multiplier", None, "In place of --target_epsilon.", flag_values=values)
    real("delta", None, "Delta of the guarantee; below 1 / clients.", flag_values=values)
    real("clip_norm", None, "L2 norm that each update is clipped to.", flag_values=values)
    integer("num_rounds", None, "Rounds of training.", flag_values=values)
    integer("clients_per_round", None, "Clients in each round.", flag_values=values)
    integer(
        "separation",
        None,
        "Rounds b between two participations i, j of one client: |i - j| >= b. Default: as many "
        "as the population allows.",
        flag_values=values,
    )
    integer(
        "max_participations",
        None,
        "The most participations of one client; default: as many as fit.",
        flag_values=values,
    )
    integer(
        "num_bands",
        None,
        "Bands of C, by default the separation, or of its inverse (banded_inverse), by default 16.",
        flag_values=values,
    )
    integer("num_buffers", None, "Buffers of blt; default 4.", flag_values=values)
    integer("vocab_size", None, "Words in the vocabulary.", flag_values=values)
    integer("sequence_length", 20, "Words of a sentence to predict.", flag_values=values)
    integer("embedding_size", None, "Size of the embedding.", flag_values=values)
    integer("lstm_size", None, "Units of the LSTM.", flag_values=values)
    flags.DEFINE_bool(
        "shared_embedding", False, "Whether logits use the input embedding.", flag_values=values
    )
    integer("sentences_per_client", None, "Sentences of a client in a round.", flag_values=values)
    integer("batch_size", None, "Sentences in a local step.", flag_values=values)
    integer("client_epochs", 1, "Passes of a client over its sentences.", flag_values=values)
    flags.DEFINE_enum(
        "client_optimizer", None, ["sgd", "adam"], "The client's optimizer.", flag_values=values
    )
    real("client_learning_rate", None, "Learning rate of the clients.", flag_values=values)
    real("server_learning_rate", None, "Learning rate of the server.", flag_values=values)
    real("server_momentum", None, "Momentum of the server.", flag_values=values)
    real(
        "server_cooldown",
        None,
        "Share of the rounds, the last ones, in which the server's rate falls to 5 %.",
        flag_values=values,
    )
    integer("evaluate_every", None, "Rounds between evaluations.", flag_values=values)
    flags.DEFINE_enum(
        "noise_storage",
        "auto",
        [storage.value for storage in NoiseStorage],
        "Where the noise of earlier rounds is kept: in the server's state, on disk (in "
        "--noise_directory), or in the cheaper one that fits.",
        flag_values=values,
    )
    flags.DEFINE_enum(
        "noise_source",
        "philox",
        [source.value for source in NoiseSource],
        "What the noise's random bits come from: TensorFlow's generator, or AES-256 by OpenSSL, "
        "which is slower.",
        flag_values=values,
    )
    string(
        "noise_directory",
        None,
        "Where noise rows go if they go to disk, and a record of what noise was added to; default "
        f"{run_directory.NOISE_DIRECTORY} in --output_dir. It must be private (mode 0700) and on "
        "the machine of TFF's worker. It is a cache, and another one may be used to resume: if it "
        "is deleted, the rows are made again and the record begins anew.",
        flag_values=values,
    )
    integer(
        "seed",
        None,
        "For tests: makes the run repeatable, noise included, which voids its guarantee.",
        flag_values=values,
    )


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a run does, all defaults filled in and checked, before TensorFlow is loaded.

    Attributes:
      options: Every flag by name, with its default for the data set.
      text: The data set.
      participation: The schema that the timers enforce.
      factorization: What makes the noise.
      noise_multiplier: Relative to the sensitivity under the schema; 0 for none.
    """

    options: dict[str, Any]
    text: datasets.FederatedText
    participation: MinSeparation
    factorization: Factorization
    noise_multiplier: float


def main(values: flags.FlagValues) -> int | None:
    """Plans, trains, and states the guarantee."""
    # Building a data set may load TensorFlow already.
    quiet.prepare_environment()
    options = _options(values)
    directory = RunDirectory(
        values.output_dir or f"runs/{datetime.datetime.now().strftime('%Y-%m-%d_%H-%M-%S')}"
    )
    old = directory.read_config()
    kept = {name: value for name, value in options.items() if name not in _NOT_OF_THE_RUN}
    if old is not None:
        old_flags = {**_OF_OLDER_RUNS, **old.get("flags", {})}
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
    plan = _plan(options, values.cache_dir, own)
    fingerprint = plan.text.fingerprint()
    if values.noise_directory or noise_path.exists():
        # If it is unfit, this is said before anything is written or TensorFlow is loaded. The
        # default one of a new run cannot be, and is made by the aggregator.
        noise_directory.open_directory(noise_path)
    if old is None:
        directory.create(_config(kept, cohort_seed, fingerprint))
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
        )
    if outcome.num_rounds == plan.options["num_rounds"]:
        directory.delete_noise_rows()
    statement = _realised(plan, statement, outcome.ledger)
    _write_statement(directory, statement)
    _print_outcome(values, directory, plan, statement, outcome)
    if outcome.message:
        _say(outcome.message)
        return command_line.BAD_INPUT
    return command_line.INTERRUPTED if outcome.interrupted else None


def run() -> None:
    """Entry point of the console command."""
    sys.exit(command_line.run(__doc__ or "", define_flags, main))


def _options(values: flags.FlagValues) -> dict[str, Any]:
    """Returns every flag with its default for the data set, checked one by one."""
    options: dict[str, Any] = {
        name: values[name].value for name in values if not name.startswith("flagfile")
    }
    defaults = dataclasses.asdict(settings.for_dataset(values.dataset))
    for name, default in defaults.items():
        if name in options and options[name] is None and name != "target_epsilon":
            options[name] = default
    for name in _COUNTS:
        validation.positive_integer(options[name], f"--{name}")
    for name in ("separation", "max_participations", "num_bands", "num_buffers"):
        if options[name] is not None:
            validation.positive_integer(options[name], f"--{name}")
    for name in ("clip_norm", "client_learning_rate", "server_learning_rate"):
        validation.positive_number(options[name], f"--{name}")
    check_choice(0.0 <= options["server_momentum"] < 1.0, "--server_momentum must be in [0, 1).")
    check_choice(0.0 <= options["server_cooldown"] <= 1.0, "--server_cooldown must be in [0, 1].")
    if options["seed"] is not None:
        validation.integer_at_least(options["seed"], 0, "--seed")
    is_private = options["mechanism"] != "none" or options["checkpoint"] is not None
    check_choice(
        options["checkpoint"] is None or options["num_bands"] is None,
        "--num_bands and --checkpoint exclude each other: the checkpoint has its bands.",
    )
    check_choice(
        options["num_buffers"] is None
        or (options["mechanism"] == "blt" and options["checkpoint"] is None),
        "--num_buffers belongs to --mechanism=blt.",
    )
    check_choice(
        options["noise_multiplier"] is None or options["target_epsilon"] is None,
        "--noise_multiplier and --target_epsilon exclude each other: give one.",
    )
    if not is_private:
        check_choice(
            options["noise_multiplier"] is None and options["target_epsilon"] is None,
            "--mechanism=none adds no noise: it takes neither --noise_multiplier nor "
            "--target_epsilon.",
        )
        options["noise_multiplier"] = 0.0
    elif options["noise_multiplier"] is None:
        target = options["target_epsilon"]
        target = defaults["target_epsilon"] if target is None else target
        options["target_epsilon"] = target
        options["noise_multiplier"] = accounting.noise_multiplier(target, options["delta"])
    accounting.epsilon(options["noise_multiplier"], options["delta"])
    return options


def _plan(options: dict[str, Any], cache_dir: str | None, own: pathlib.Path | None) -> Plan:
    cohort, num_rounds = options["clients_per_round"], options["num_rounds"]
    text = datasets.load(options["dataset"], cache_dir, min_train_clients=cohort)
    # Refuses a vocabulary that the text cannot fill before anything is written.
    text.vocabulary(options["vocab_size"])
    num_clients = text.splits["train"].clients
    check_choice(
        options["delta"] < 1.0 / num_clients,
        f"--delta={options['delta']:g} is not below 1 / {num_clients} clients: a mechanism that "
        "publishes one client's data outright would satisfy it.",
    )
    separation = options["separation"] or min(num_rounds, num_clients // cohort)
    participation = MinSeparation(separation, options["max_participations"])
    cohorts.check_feasible(
        num_clients,
        cohort,
        separation,
        participation.most_participations(num_rounds),
        num_rounds,
    )
    factorization = _factorization(options, participation) if own is None else checkpoints.load(own)
    return Plan(options, text, participation, factorization, options["noise_multiplier"])


def _factorization(options: dict[str, Any], participation: MinSeparation) -> Factorization:
    num_rounds, mechanism = options["num_rounds"], options["mechanism"]
    if options["checkpoint"] is not None:
        factorization = checkpoints.load(options["checkpoint"])
        check_choice(
            factorization.num_rounds == num_rounds,
            f"--checkpoint={options['checkpoint']} is for {factorization.num_rounds} rounds, and "
            f"--num_rounds is {num_rounds}: noise for other rounds than those of the run would "
            "be too much or too little. Make the two equal.",
        )
        return factorization
    if mechanism in ("identity", "none"):
        return factorizations.identity(num_rounds)
    workload = workloads.prefix_sum(num_rounds)
    if mechanism == "optimal":
        return factorizations.optimal(workload, show_progress=True)
    if mechanism == "tree":
        return factorizations.tree_aggregation(num_rounds)
    if mechanism == "blt":
        return factorizations.blt(
            num_rounds, options["num_buffers"] or _BUFFERS, participation, show_progress=True
        )
    if mechanism == "banded_inverse":
        num_bands = options["num_bands"] or min(_BANDS_OF_INVERSE, num_rounds)
        return factorizations.banded_inverse(
            num_rounds, num_bands, participation, show_progress=True
        )
    most_bands = settings.for_dataset(options["dataset"]).max_bands
    num_bands = options["num_bands"] or min(participation.separation, num_rounds, most_bands)
    if mechanism == "toeplitz":
        return factorizations.toeplitz(num_rounds, num_bands, participation, show_progress=True)
    return factorizations.banded(
        workload, num_bands, participation=participation, show_progress=True
    )


def _config(kept: dict[str, Any], cohort_seed: int, fingerprint: str) -> dict[str, Any]:
    return {
        "flags": kept,
        "cohort_seed": cohort_seed,
        "dataset_sha256": fingerprint,
        "seeds_policy": (
            "noise: 128 secret bits from the operating system, held in checkpoints/ alone; its "
            "rows, if they go to disk, in the noise directory, which is as secret as checkpoints/; "
            "cohorts, data order and initial weights: cohort_seed"
            if kept["seed"] is None
            else "everything, noise included, follows from --seed: for tests only"
        ),
        "versions": _versions(),
    }


def _versions() -> dict[str, str]:
    versions = {"mf-aggregators": version.__version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return versions


def _statement(plan: Plan) -> PrivacyStatement:
    options = plan.options
    factorization = plan.factorization
    return PrivacyStatement(
        facts=RunFacts(
            mechanism=(
                "None: clipping without noise"
                if plan.noise_multiplier == 0.0
                else f"{factorization.mechanism.capitalize()} matrix factorization for "
                f"{factorization.num_rounds} rounds"
            ),
            num_clients=plan.text.splits["train"].clients,
            clients_per_round=options["clients_per_round"],
            clip_norm=options["clip_norm"],
            noise_seed_is_fixed=options["seed"] is not None,
        ),
        plan=dataclasses.replace(
            guarantees.planned(
                factorization, plan.participation, plan.noise_multiplier, options["delta"]
            ),
            num_rounds=options["num_rounds"],
        ),
    )


def _realised(
    plan: Plan, statement: PrivacyStatement, ledger: ParticipationLedger
) -> PrivacyStatement:
    took_place = guarantees.realised_participation(ledger.rounds_of_clients(), ledger.num_rounds)
    return dataclasses.replace(
        statement,
        took_place=took_place,
        realised=guarantees.realised(statement.plan, plan.factorization, took_place),
    )


def _write_statement(directory: RunDirectory, statement: PrivacyStatement) -> None:
    directory.write_json(run_directory.PRIVACY_FILE, statement.to_dict())
    directory.write_text(run_directory.STATEMENT_FILE, statement.to_markdown())


def _print_outcome(
    values: flags.FlagValues,
    directory: RunDirectory,
    plan: Plan,
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
