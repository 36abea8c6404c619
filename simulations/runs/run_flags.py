"""The flags of every federated run, and what they say once defaults are filled in."""

import dataclasses
import re
from typing import Any

from absl import flags

from mf_aggregators import accounting, validation
from mf_aggregators.commands import mechanism_flags
from mf_aggregators.commands.command_line import CommandError, check_choice
from simulations.devices import device_flags
from simulations.runs import run_options, sampled_runs
from simulations.runs.run_options import ADAPTIVE, NOT_PRIVATE, PREFIX_SUM, TRAINING, RunOptions
from simulations.training.federated_task import TaskCommand


def define_flags(values: flags.FlagValues, command: TaskCommand) -> None:
    """Defines the flags of a command that runs a task.

    Args:
      values: Where they are defined.
      command: The command.
    """
    command.define_flags(values)
    texts = command.default_texts
    subjects = ["Data", "Training", "Mechanism", "Privacy", "Participation"]
    run_options.define(values, subjects, texts)
    device_flags.define(values)
    run_options.define(values, ["Noise", "Output"], texts)
    mechanism_flags.define_options(values, for_runs=True)


def options_of(values: flags.FlagValues, command: TaskCommand) -> RunOptions:
    """Returns every option with its default for the task, checked one by one.

    With a data sampler, the noise multiplier for a target epsilon depends on the population
    as well, and stays None.

    Args:
      values: The flags as they were given.
      command: Whose flags they are.

    Returns:
      The options.

    Raises:
      CommandError: If flags exclude each other.
      TypeError: If the command has no default for a flag that needs one.
      ValueError: If a flag is out of its range.
    """
    given: dict[str, Any] = {
        name: values[name].value for name in values if not name.startswith("flagfile")
    }
    defaults = command.defaults(values)
    needed = run_options.NEED_DEFAULTS | {"target_epsilon", "max_bands"}
    if missing := needed - set(defaults):
        raise TypeError(
            f"the defaults of {command.name} must have {', '.join(sorted(missing))} as well."
        )
    for name, default in defaults.items():
        if name in given and given[name] is None and name != "target_epsilon":
            given[name] = default
    given["clip_norm"] = _clip_norm(given["clip_norm"])
    options = run_options.of_values(given)
    _check_numbers(options)
    command.check_flags(options)
    _check_clip(options)
    _check_mechanism(options)
    _check_simulated_clients(options)
    check_choice(
        not options.secure_aggregation or options.workers is None,
        "--secure_aggregation and --workers exclude each other: a secure sum is one of all "
        "clients, and no worker may see that of its own.",
    )
    check_choice(
        options.stop_at_epsilon is None or options.simulated_clients is None,
        "--stop_at_epsilon and --simulated_clients exclude each other: the limit is for what a run "
        "really releases, and one whose clients stand for more has too little noise for it.",
    )
    sampled_runs.check_flags(options)
    return _with_noise_multiplier(options, defaults["target_epsilon"])


def _check_numbers(options: RunOptions) -> None:
    for name in run_options.POSITIVE_INTEGERS:
        if options[name] is not None:
            validation.positive_integer(options[name], f"--{name}")
    for name in run_options.POSITIVE_NUMBERS:
        if options[name] is not None:
            validation.positive_number(options[name], f"--{name}")
    check_choice(0.0 <= options.server_momentum < 1.0, "--server_momentum must be in [0, 1).")
    for name in run_options.SHARES:
        check_choice(0.0 <= options[name] <= 1.0, f"--{name} must be in [0, 1].")
    check_choice(
        options.server_warmup + options.server_cooldown <= 1.0,
        "--server_warmup and --server_cooldown are shares of the rounds and must not overlap: "
        "their sum is above 1.",
    )
    if options.seed is not None:
        validation.integer_at_least(options.seed, 0, "--seed")


def _clip_norm(value: float | str) -> float | str:
    """The value of a flag that takes a number or a word."""
    if value == ADAPTIVE:
        return value
    try:
        try:
            value = float(value)
        except ValueError:
            raise ValueError(f"--clip_norm must be a number, found {value!r}.") from None
        return validation.positive_number(value, "--clip_norm")
    except ValueError as error:
        raise CommandError(f"{error} It is a number, or {ADAPTIVE}.") from None


def _check_clip(options: RunOptions) -> None:
    if options.clip_norm != ADAPTIVE:
        for flag in run_options.OF_ADAPTIVE:
            check_choice(
                options[flag] is None,
                f"--{flag} belongs to --clip_norm={ADAPTIVE}: leave it out, or clip adaptively.",
            )
    try:
        _ = options.clip
    except ValueError as error:
        text = str(error)
        for flag, name in run_options.OF_ADAPTIVE.items():
            text = re.sub(rf"\b{name}\b", f"--{flag}", text)
        raise CommandError(text) from None


def _check_mechanism(options: RunOptions) -> None:
    has_checkpoint = options.checkpoint is not None
    names = mechanism_flags.option_names(for_runs=True)
    for name in names if has_checkpoint else ():
        check_choice(
            options[name] is None,
            f"--{name} and --checkpoint exclude each other: the checkpoint has its own.",
        )
    mechanism_flags.check_options(options, options.mechanism, for_runs=True)
    any_workload = run_options.mechanisms_of_any_workload()
    check_choice(
        options.workload == PREFIX_SUM
        or (options.mechanism in any_workload and not has_checkpoint),
        f"--workload={TRAINING} needs --mechanism={' or '.join(any_workload)}: the other "
        "mechanisms are optimised for sums alone, and a checkpoint has its workload.",
    )


def _check_simulated_clients(options: RunOptions) -> None:
    simulated = options.simulated_clients
    if simulated is None:
        return
    check_choice(
        simulated <= options.clients_per_round,
        f"--simulated_clients={simulated} stand for fewer clients, "
        f"--clients_per_round={options.clients_per_round}: give at most as many.",
    )
    check_choice(
        options.sampling == sampled_runs.TIMERS,
        "--simulated_clients belongs to --sampling=timers: a data sampler draws its own batches.",
    )


def _with_noise_multiplier(options: RunOptions, default_epsilon: float) -> RunOptions:
    """The options with the noise that a target needs, where the population has no say in it."""
    multiplier, target = options.noise_multiplier, options.target_epsilon
    check_choice(
        multiplier is None or target is None,
        "--noise_multiplier and --target_epsilon exclude each other: give one.",
    )
    if options.mechanism == NOT_PRIVATE and options.checkpoint is None:
        check_choice(
            multiplier is None and target is None,
            f"--mechanism={NOT_PRIVATE} adds no noise: it takes neither --noise_multiplier nor "
            "--target_epsilon.",
        )
        multiplier = 0.0
    elif multiplier is None:
        target = default_epsilon if target is None else target
        sufficient = accounting.noise_multiplier(target, options.delta)
        if options.sampling == sampled_runs.TIMERS:
            multiplier = sufficient
    if multiplier is not None:
        accounting.epsilon(multiplier, options.delta)
    return dataclasses.replace(options, noise_multiplier=multiplier, target_epsilon=target)
