"""The flags of every federated run, and what they say once defaults are filled in."""

from typing import Any

from absl import flags

from mf_aggregators import accounting, validation
from mf_aggregators.commands.command_line import check_choice
from mf_aggregators.commands.flag_groups import FlagGroup
from mf_aggregators.noise.costs import NoiseStorage
from mf_aggregators.noise.random_words import NoiseSource
from simulations.devices import device_flags
from simulations.runs import run_directory, sampled_runs
from simulations.training.federated_task import TaskCommand

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
PREFIX_SUM, TRAINING = "prefix_sum", "training"
# Mechanisms whose matrices can be optimised for any workload.
_ANY_WORKLOAD = ("banded", "optimal")
_COUNTS = (
    "num_rounds",
    "clients_per_round",
    "batch_size",
    "client_epochs",
    "evaluate_every",
)
_OPTIONAL_COUNTS = (
    "separation",
    "max_participations",
    "num_bands",
    "num_buffers",
    "simulated_clients",
)
# What only a task can know.
_NEED_DEFAULTS = {
    *_COUNTS,
    "client_optimizer",
    "client_learning_rate",
    "server_learning_rate",
    "server_momentum",
    "server_warmup",
    "server_cooldown",
    "clip_norm",
    "target_epsilon",
    "delta",
    "max_bands",
}
# Flags that change nothing about a run, and may differ when it is resumed.
NOT_OF_THE_RUN = ("format", "output_dir", "cache_dir", "noise_directory", "workers")


def define_flags(values: flags.FlagValues, command: TaskCommand) -> None:
    """Defines the flags of a command that runs a task.

    Args:
      values: Where they are defined.
      command: The command.
    """
    command.define_flags(values)

    def group(title: str) -> FlagGroup:
        return FlagGroup(values, title, command.default_texts)

    group("Data").string("cache_dir", "Where data sets are kept. Default: ~/.cache.")
    _define_training(group("Training"))
    _define_mechanism(group("Mechanism"))
    _define_privacy(group("Privacy"))
    _define_participation(group("Participation"))
    device_flags.define(values)
    _define_noise(group("Noise"))
    group("Output").string("output_dir", "The run's directory. Default: runs/<time>.")


def _define_training(group: FlagGroup) -> None:
    group.integer("num_rounds", "The rounds of training.")
    group.integer("clients_per_round", "The number of clients in each round.")
    group.number("server_learning_rate", "The learning rate of the server.")
    group.number("client_learning_rate", "The learning rate of the clients.")
    group.integer("client_epochs", "How often a client goes through its examples of a round.")
    group.integer("batch_size", "The number of examples in a local step.")
    group.choice("client_optimizer", ["sgd", "adam"], "The optimizer of the clients.")
    group.number("server_momentum", "The momentum of the server.")
    group.number(
        "server_warmup",
        "The share of the rounds, the first ones, in which the server's rate rises from 5 % "
        "(BandMF: 0.15).",
    )
    group.number(
        "server_cooldown",
        "The share of the rounds, the last ones, in which the server's rate falls to 5 % "
        "(BandMF: 0.25).",
    )
    group.choice(
        "cooldown",
        ["linear", "drop"],
        "How the server's rate falls: linearly to 5 %, or at once to 15 % (both in Denisov et al. "
        "Sec. 5).",
        "linear",
    )
    group.integer("evaluate_every", "The number of rounds between evaluations.")
    group.string(
        "workers",
        "The addresses host:port,... of TFF worker processes that train the clients, each started "
        "by start-tff-worker. Default: one process that the run starts on this machine.",
    )
    group.integer(
        "seed",
        "A seed for tests, which makes the run repeatable, noise included, and voids its "
        "guarantee. Default: secret random bits.",
    )


def _define_mechanism(group: FlagGroup) -> None:
    group.choice(
        "mechanism",
        _MECHANISMS,
        "The noise: correlated by a matrix factorization (optimal is the dense optimum for single "
        "participation), independent (identity), or none at all with the same training and "
        "clipping.",
        "banded",
    )
    group.integer(
        "num_bands",
        "The bands of C, or of its inverse (banded_inverse). Default: the separation for C, and "
        "16 for its inverse.",
    )
    group.integer("num_buffers", "The buffers of blt. Default: 4.")
    group.string("checkpoint", "A checkpoint directory to use in place of --mechanism.")
    group.choice(
        "workload",
        [PREFIX_SUM, TRAINING],
        "What the mechanism's matrix is optimised for: sums of updates, with momentum and "
        "learning rates as post-processing, or this very training, with both inside the mechanism "
        "(Denisov et al., Prop. 4.2; --mechanism=banded or optimal).",
        PREFIX_SUM,
    )


def _define_privacy(group: FlagGroup) -> None:
    group.number("target_epsilon", "The epsilon of the planned guarantee.")
    group.number("delta", "The delta of the guarantee, which is to be below 1 / clients.")
    group.number("clip_norm", "The L2 norm that each update is clipped to.")
    group.number(
        "noise_multiplier",
        "The noise, in place of --target_epsilon: the standard deviation of Z over (clip norm "
        "times the sensitivity of C).",
    )
    group.number(
        "zeroing_norm",
        "The L-infinity norm above which an update is replaced by zero.",
    )
    group.integer(
        "simulated_clients",
        "For estimates of accuracy: this many clients stand for --clients_per_round, with the "
        "noise scaled down in proportion (BandMF App. I). Such a run itself has the weaker "
        "guarantee of the smaller noise, and its statement says both.",
    )


def _define_participation(group: FlagGroup) -> None:
    group.choice("sampling", sampled_runs.names(), sampled_runs.HELP, sampled_runs.TIMERS)
    group.integer(
        "separation",
        "The separation b: two participations i, j of one client satisfy |i - j| >= b. "
        "Default: the largest that the population allows.",
    )
    group.integer(
        "max_participations",
        "The most participations of one client. Default: as many as fit.",
    )


def _define_noise(group: FlagGroup) -> None:
    group.choice(
        "noise_storage",
        [storage.value for storage in NoiseStorage],
        "Where the noise of earlier rounds is kept: in the server's state, on disk (in "
        "--noise_directory), or in the cheaper one that fits.",
        "auto",
    )
    group.string(
        "noise_directory",
        "Where noise rows go if they go to disk, and a record of what noise was added to. It must "
        "be private (mode 0700) and on the machine of TFF's worker. It is a cache, and another "
        "one may be used to resume: if it is deleted, the rows are made again and the record "
        f"begins anew. Default: {run_directory.NOISE_DIRECTORY} in --output_dir.",
    )
    group.choice(
        "noise_source",
        [source.value for source in NoiseSource],
        "What the noise's random bits come from: TensorFlow's generator, or AES-256 by OpenSSL, "
        "which is slower.",
        "philox",
    )


def options_of(values: flags.FlagValues, command: TaskCommand) -> dict[str, Any]:
    """Returns every flag with its default for the task, checked one by one.

    With a data sampler, the noise multiplier for a target epsilon depends on the population
    as well, and stays None.

    Args:
      values: The flags as they were given.
      command: Whose flags they are.

    Returns:
      Values by name.

    Raises:
      CommandError: If flags exclude each other.
      TypeError: If the command has no default for a flag that needs one.
      ValueError: If a flag is out of its range.
    """
    options: dict[str, Any] = {
        name: values[name].value for name in values if not name.startswith("flagfile")
    }
    defaults = command.defaults(values)
    if missing := _NEED_DEFAULTS - set(defaults):
        raise TypeError(
            f"the defaults of {command.name} must have {', '.join(sorted(missing))} as well."
        )
    for name, default in defaults.items():
        if name in options and options[name] is None and name != "target_epsilon":
            options[name] = default
    for name in _COUNTS:
        validation.positive_integer(options[name], f"--{name}")
    for name in _OPTIONAL_COUNTS:
        if options[name] is not None:
            validation.positive_integer(options[name], f"--{name}")
    for name in ("clip_norm", "client_learning_rate", "server_learning_rate"):
        validation.positive_number(options[name], f"--{name}")
    if options["zeroing_norm"] is not None:
        validation.positive_number(options["zeroing_norm"], "--zeroing_norm")
    check_choice(0.0 <= options["server_momentum"] < 1.0, "--server_momentum must be in [0, 1).")
    for name in ("server_warmup", "server_cooldown"):
        check_choice(0.0 <= options[name] <= 1.0, f"--{name} must be in [0, 1].")
    check_choice(
        options["server_warmup"] + options["server_cooldown"] <= 1.0,
        "--server_warmup and --server_cooldown are shares of the rounds and must not overlap: "
        "their sum is above 1.",
    )
    if options["seed"] is not None:
        validation.integer_at_least(options["seed"], 0, "--seed")
    command.check_flags(options)
    _check_mechanism(options)
    _check_simulated_clients(options)
    sampled_runs.check_flags(options)
    _fill_in_noise_multiplier(options, defaults["target_epsilon"])
    return options


def _check_mechanism(options: dict[str, Any]) -> None:
    has_checkpoint = options["checkpoint"] is not None
    check_choice(
        not has_checkpoint or options["num_bands"] is None,
        "--num_bands and --checkpoint exclude each other: the checkpoint has its bands.",
    )
    check_choice(
        options["num_buffers"] is None or (options["mechanism"] == "blt" and not has_checkpoint),
        "--num_buffers belongs to --mechanism=blt.",
    )
    check_choice(
        options["workload"] == PREFIX_SUM
        or (options["mechanism"] in _ANY_WORKLOAD and not has_checkpoint),
        f"--workload={TRAINING} needs --mechanism={' or '.join(_ANY_WORKLOAD)}: the other "
        "mechanisms are optimised for sums alone, and a checkpoint has its workload.",
    )


def _check_simulated_clients(options: dict[str, Any]) -> None:
    simulated = options["simulated_clients"]
    if simulated is None:
        return
    check_choice(
        simulated <= options["clients_per_round"],
        f"--simulated_clients={simulated} stand for fewer clients, "
        f"--clients_per_round={options['clients_per_round']}: give at most as many.",
    )
    check_choice(
        options["sampling"] == sampled_runs.TIMERS,
        "--simulated_clients belongs to --sampling=timers: a data sampler draws its own batches.",
    )


def _fill_in_noise_multiplier(options: dict[str, Any], default_epsilon: float) -> None:
    check_choice(
        options["noise_multiplier"] is None or options["target_epsilon"] is None,
        "--noise_multiplier and --target_epsilon exclude each other: give one.",
    )
    if options["mechanism"] == "none" and options["checkpoint"] is None:
        check_choice(
            options["noise_multiplier"] is None and options["target_epsilon"] is None,
            "--mechanism=none adds no noise: it takes neither --noise_multiplier nor "
            "--target_epsilon.",
        )
        options["noise_multiplier"] = 0.0
    elif options["noise_multiplier"] is None:
        target = options["target_epsilon"]
        target = default_epsilon if target is None else target
        options["target_epsilon"] = target
        sufficient = accounting.noise_multiplier(target, options["delta"])
        if options["sampling"] == sampled_runs.TIMERS:
            options["noise_multiplier"] = sufficient
    if options["noise_multiplier"] is not None:
        accounting.epsilon(options["noise_multiplier"], options["delta"])
