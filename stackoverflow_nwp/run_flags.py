"""The flags of run-stackoverflow, and what they say once defaults are filled in."""

import dataclasses
from typing import Any

from absl import flags

from mf_aggregators import accounting, validation
from mf_aggregators.commands.command_line import check_choice
from mf_aggregators.noise_storage import NoiseStorage
from mf_aggregators.random_words import NoiseSource
from simulations import run_directory
from stackoverflow_nwp import datasets, sampled_runs, settings

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
# Flags that change nothing about a run, and may differ when it is resumed.
NOT_OF_THE_RUN = ("format", "output_dir", "cache_dir", "noise_directory")
# What runs had that were started before there were these flags.
OF_OLDER_RUNS = {"noise_storage": "auto", "noise_source": "philox", "sampling": sampled_runs.TIMERS}


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
    flags.DEFINE_enum(
        "sampling",
        sampled_runs.TIMERS,
        list(sampled_runs.names()),
        sampled_runs.HELP,
        flag_values=values,
    )
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


def options_of(values: flags.FlagValues) -> dict[str, Any]:
    """Returns every flag with its default for the data set, checked one by one.

    With a data sampler, the noise multiplier for a target epsilon depends on the population
    as well, and stays None.

    Args:
      values: The flags as they were given.

    Returns:
      Values by name.

    Raises:
      CommandError: If flags exclude each other.
      ValueError: If a flag is out of its range.
    """
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
    sampled_runs.check_flags(options)
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
        sufficient = accounting.noise_multiplier(target, options["delta"])
        if options["sampling"] == sampled_runs.TIMERS:
            options["noise_multiplier"] = sufficient
    if options["noise_multiplier"] is not None:
        accounting.epsilon(options["noise_multiplier"], options["delta"])
    return options
