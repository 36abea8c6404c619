"""Flags that describe participation schemas, workloads and privacy targets."""

import pathlib
import warnings
from typing import Any

import numpy as np
from absl import flags

from mf_aggregators import accounting, workloads
from mf_aggregators.commands.command_line import CommandError, check_choice
from mf_aggregators.commands.flag_groups import FlagGroup
from mf_aggregators.factorizations import Factorization
from mf_aggregators.participation import (
    FixedEpochOrder,
    MinSeparation,
    Participation,
    SingleParticipation,
)
from mf_aggregators.workloads import Workload


def define_participation(values: flags.FlagValues) -> None:
    """Defines --participation, --separation and --max_participations."""
    group = FlagGroup(values, "Participation")
    group.integer(
        "separation",
        "The separation b: two participations i, j of one client satisfy |i - j| >= b.",
    )
    group.integer(
        "max_participations",
        "The most participations k of one client. Default: as many as fit.",
    )
    group.choice(
        "participation",
        ["single", "fixed_epoch", "min_sep"],
        "How often one client takes part: once, in rounds exactly --separation apart, or in "
        "rounds at least --separation apart. Default: min_sep where --separation is given.",
    )


def participation(values: flags.FlagValues) -> Participation | None:
    """Returns the schema that the flags describe, or None if they describe none.

    Raises:
      CommandError: If the flags contradict one another.
    """
    kind = values.participation
    if kind is None:
        if values.separation is None:
            check_choice(
                values.max_participations is None,
                "--max_participations needs --separation (1 for no limit on how soon a client "
                "returns).",
            )
            return None
        kind = "min_sep"
    if kind == "single":
        check_choice(
            values.separation is None and values.max_participations is None,
            "--participation=single takes neither --separation nor --max_participations.",
        )
        return SingleParticipation()
    check_choice(values.separation is not None, f"--participation={kind} needs --separation.")
    if kind == "min_sep":
        return MinSeparation(values.separation, values.max_participations)
    check_choice(
        values.max_participations is not None,
        "--participation=fixed_epoch needs --max_participations, the number of epochs.",
    )
    return FixedEpochOrder(values.max_participations, values.separation)


def define_workload(values: flags.FlagValues) -> None:
    """Defines --workload, --momentum and --learning_rates."""
    group = FlagGroup(values, "Training")
    group.choice(
        "workload",
        ["prefix_sum", "momentum_sgd"],
        "What the noisy sums are used for: SGD, or SGD with momentum and learning rates. "
        "Default: prefix_sum, or what the checkpoint was made for.",
    )
    group.number("momentum", "The momentum of --workload=momentum_sgd. Default: 0.9.")
    group.string(
        "learning_rates",
        "A text file of one learning rate for each round, for --workload=momentum_sgd. "
        "Default: 1 in every round.",
    )


def workload_description(values: flags.FlagValues) -> dict[str, Any] | None:
    """Returns the workload that the flags describe, or None if they describe none.

    Raises:
      CommandError: If the flags contradict one another, or the file of learning rates
        cannot be read.
    """
    if values.workload != "momentum_sgd":
        check_choice(
            values.momentum is None and values.learning_rates is None,
            "--momentum and --learning_rates belong to --workload=momentum_sgd.",
        )
        return None if values.workload is None else {"name": "prefix_sum"}
    return {
        "name": "momentum_sgd",
        "momentum": 0.9 if values.momentum is None else values.momentum,
        "learning_rates": (
            None if values.learning_rates is None else _learning_rates(values.learning_rates)
        ),
    }


def gap_for(
    factorization: Factorization, workload: Workload, participation: Participation
) -> float | None:
    """Returns the certified gap if it is about this workload and schema, else None."""
    gap = factorization.optimality_gap
    if gap is None or not factorization.certifies(participation):
        return None
    own = factorization.parameters.get("workload")
    return gap if own == workloads.fingerprint(workload.matrix()) else None


def define_privacy(values: flags.FlagValues) -> None:
    """Defines --noise_multiplier, --target_epsilon and --delta."""
    group = FlagGroup(values, "Privacy")
    group.number("target_epsilon", "The epsilon that the least sufficient noise is found for.")
    group.number("delta", "The delta of the guarantee.", 1e-6)
    group.number(
        "noise_multiplier",
        "The noise, in place of --target_epsilon: the standard deviation of Z over (clip norm "
        "times the sensitivity of C).",
    )


def noise_multiplier(values: flags.FlagValues) -> float | None:
    """Returns the noise multiplier that the flags ask for, or None if they ask for none.

    Raises:
      CommandError: If both a noise multiplier and an epsilon are given.
      ValueError: If a value is out of its range.
    """
    check_choice(
        values.noise_multiplier is None or values.target_epsilon is None,
        "--noise_multiplier and --target_epsilon exclude each other: give one.",
    )
    if values.target_epsilon is not None:
        return accounting.noise_multiplier(values.target_epsilon, values.delta)
    if values.noise_multiplier is not None:
        # Also refuses what is negative or not finite, and a bad delta.
        accounting.epsilon(values.noise_multiplier, values.delta)
    return values.noise_multiplier


def _learning_rates(file_name: str) -> list[float]:
    path = pathlib.Path(file_name)
    try:
        with warnings.catch_warnings():
            # NumPy warns of a file without numbers; their count is checked later.
            warnings.simplefilter("ignore", UserWarning)
            rates = np.loadtxt(path, dtype=np.float64, ndmin=1)
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise CommandError(
            f"--learning_rates={file_name} cannot be read as numbers, one a line: {error}"
        ) from None
    check_choice(
        rates.ndim == 1 and rates.size > 0,
        f"--learning_rates={file_name} must hold one number on each line, found an array of shape "
        f"{rates.shape}.",
    )
    return [float(rate) for rate in rates]
