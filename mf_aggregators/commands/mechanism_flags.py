"""Flags that describe mechanisms, participation schemas, workloads and privacy targets."""

import functools
import math
import pathlib
import warnings
from collections.abc import Callable, Mapping

import numpy as np
from absl import flags

from mf_aggregators import accounting, catalogue, checkpoints, inputs
from mf_aggregators import mechanism as mechanisms
from mf_aggregators.commands.command_line import CommandError, FlagGroup, check_choice, naming
from mf_aggregators.factorizations import Factorization
from mf_aggregators.kernel import numbers
from mf_aggregators.kernel.numbers import FloatArray
from mf_aggregators.mechanism import Mechanism
from mf_aggregators.participation import (
    FixedEpochOrder,
    MinSeparation,
    Participation,
    SingleParticipation,
)
from mf_aggregators.privacy import guarantees
from mf_aggregators.workloads import Workload

# For each of these flags, the workload of which it is a parameter.
_WORKLOADS_OF_FLAGS: Mapping[str, str] = {
    **dict.fromkeys(["momentum", "learning_rates"], "momentum_sgd"),
}
# The values of ``--mechanism`` in training commands.
MECHANISMS_OF_RUNS = tuple(
    name for name, mechanism in catalogue.ENTRIES.items() if mechanism.for_runs is not None
)
# The field of the error that the optimality gap is about, if it is not the mean error.
_CERTIFIED_ERRORS: Mapping[str, str] = {"max": "max_error", "weights": "weighted_error"}


def define(values: flags.FlagValues, *subjects: str) -> None:
    """Defines the flags of some subjects.

    Args:
      values: Where flags are defined.
      *subjects: ``options`` (of mechanisms), ``options_of_runs`` (of mechanisms in training
        commands), ``workload``, ``participation`` or ``privacy``.
    """
    for subject in subjects:
        _SUBJECTS[subject](values)


def _define_options(values: flags.FlagValues, *, for_runs: bool = False) -> None:
    """Defines a flag for each option of the mechanisms that a command offers."""
    group = FlagGroup(values, "Mechanism")
    for name, takers in _options(for_runs=for_runs).items():
        takes, meaning = catalogue.entry(takers[0]).options[name]
        meaning = f"For {', '.join(takers)}. {meaning}"
        if isinstance(takes, tuple):
            group.choice(name, takes, meaning)
        elif takes is int:
            group.integer(name, meaning)
        elif takes is float:
            group.number(name, meaning)
        elif takes is bool:
            group.boolean(name, meaning)
        else:
            # The value of --error may also be the path of a file.
            group.path(name, meaning)


def given_options(
    given: Mapping[str, object], mechanism: str | None, *, for_runs: bool = False
) -> dict[str, object]:
    """Returns the options of a mechanism that were given, with checkpoints loaded.

    Args:
      given: The values of flags by name; None for flags that were not given.
      mechanism: The mechanism; None for a checkpoint, which takes no options.
      for_runs: Whether the command trains.

    Returns:
      The options by name.

    Raises:
      CheckpointError: If a checkpoint cannot be read.
      CommandError: If an option belongs to other mechanisms, or a file of weights cannot be read.
      ValueError: If an option is too small.
    """
    known = None if mechanism is None else catalogue.ENTRIES.get(mechanism)
    # A given number of bands is accepted if the mechanism has this number by default.
    bands = None if known is None else known.num_bands({})
    _check_options(given, mechanism, bands, for_runs=for_runs)
    options = () if known is None else known.options
    found = {name: given[name] for name in options if given.get(name) is not None}
    if "base_checkpoint" in found:
        found["base_checkpoint"] = checkpoints.load(inputs.part(found, str, "base_checkpoint"))
    if "error" in found:
        found["error"] = round_error(inputs.part(found, str, "error"))
    return found


def _check_options(
    given: Mapping[str, object], mechanism: str | None, bands: int | None, *, for_runs: bool
) -> None:
    """Raises an error if an option belongs to other mechanisms, or is too small."""
    for name, takers in _options(for_runs=for_runs).items():
        value = given.get(name)
        if value is None or (name == "num_bands" and value == bands):
            continue
        check_choice(
            mechanism in takers,
            f"--{name} belongs to --mechanism={'|'.join(takers)}"
            + ("." if mechanism is None else f", not to --mechanism={mechanism}."),
        )
        if name in catalogue.OPTIONS_OF_RUNS:
            numbers.positive_integer(value, f"--{name}")


def round_error(given: str) -> str | tuple[float, ...]:
    """Returns the error that ``--error`` names.

    Args:
      given: ``mean``, ``max``, or a text file with one weight for each round.

    Returns:
      ``mean`` or ``max``, or the n weights, which are not checked.

    Raises:
      CommandError: If the file cannot be read.
    """
    if given in ("mean", "max"):
        return given
    return tuple(_numbers(given, "error", "mean, max or a file of ").tolist())


def _options(*, for_runs: bool) -> dict[str, list[str]]:
    """The options for which a command has flags, each with the mechanisms that take it."""
    found: dict[str, list[str]] = {}
    for name in MECHANISMS_OF_RUNS if for_runs else catalogue.ENTRIES:
        for option in catalogue.entry(name).options:
            if option in catalogue.OPTIONS_OF_RUNS or not for_runs:
                found.setdefault(option, []).append(name)
    return found


def _define_participation(values: flags.FlagValues) -> None:
    """Defines --participation, --separation and --max_participations."""
    group = FlagGroup(values, "Participation")
    group.integer(
        "separation",
        "The separation b: two participations i, j of one client satisfy |i - j| >= b.",
    )
    group.integer(
        "max_participations",
        "The most participations k of one client. Default: as many as fit into the rounds.",
    )
    group.choice(
        "participation",
        ["single", "fixed_epoch", "min_sep"],
        "How often one client takes part: once (single), in rounds exactly --separation apart "
        "(fixed_epoch), or at least --separation apart (min_sep). Default: min_sep if --separation "
        "is given, else the schema of the mechanism.",
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
                "--max_participations needs --separation (1 if clients may return at once).",
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


def saved_mechanism(checkpoint: str | None) -> Mechanism | None:
    """Returns the ``Mechanism`` of a checkpoint; None if it has only a matrix, or without one.

    Args:
      checkpoint: The value of --checkpoint.

    Raises:
      CheckpointError: If it cannot be read.
    """
    if checkpoint is None:
        return None
    beside = pathlib.Path(checkpoint) / checkpoints.MECHANISM_FILE
    is_saved = beside.exists() or checkpoints.is_run(checkpoint)
    return mechanisms.load(checkpoint) if is_saved else None


def noise_under(saved: Mechanism, schema: Participation) -> float:
    """Returns the noise multiplier of a ``Mechanism``'s noise relative to another schema.

    Args:
      saved: The mechanism.
      schema: The other schema. The larger its sensitivity, the smaller the noise multiplier of the
        same noise.
    """
    own = saved.factorization.sensitivity(saved.noise_reference).value
    return saved.noise_multiplier * (own / saved.factorization.sensitivity(schema).value)


def check_is_saved(
    saved: Mechanism, checkpoint: str, participation: Participation, noise_multiplier: float
) -> None:
    """Checks that participation and noise are those of the ``Mechanism`` of a checkpoint.

    Args:
      saved: The mechanism.
      checkpoint: The value of --checkpoint.
      participation: The participation that follows from flags and data.
      noise_multiplier: The noise multiplier that follows from flags.

    Raises:
      CommandError: If one of them differs.
    """
    own, num_rounds = saved.participation, saved.num_rounds
    is_same = participation == own or (
        not (participation.is_sampled or own.is_sampled)
        and participation.allows(own, num_rounds)
        and own.allows(participation, num_rounds)
    )
    check_choice(
        is_same,
        f"--checkpoint={checkpoint} is a Mechanism for {own}, and flags or data are for "
        f"{participation}: leave out the flags that the Mechanism has itself, or make another one.",
    )
    check_choice(
        noise_multiplier == saved.noise_multiplier,
        f"--checkpoint={checkpoint} is a Mechanism with the noise multiplier "
        f"{saved.noise_multiplier!r}, and flags give {noise_multiplier!r}: leave these out.",
    )


def _define_workload(values: flags.FlagValues) -> None:
    """Defines --workload and the flags of its parameters."""
    group = FlagGroup(values, "Training")
    group.choice(
        "workload",
        ["prefix_sum", "momentum_sgd"],
        "The use of the noisy sums: SGD, or SGD with momentum and learning rates. Default: that of "
        "the checkpoint, otherwise prefix_sum.",
    )
    group.number("momentum", "The momentum of --workload=momentum_sgd. Default: 0.9.")
    group.path(
        "learning_rates",
        "For --workload=momentum_sgd: a text file with one learning rate on each line, for each "
        "round. Default: 1 in every round.",
    )


def workload_description(values: flags.FlagValues) -> dict[str, object] | None:
    """Returns the workload that the flags describe, or None if they describe none.

    Raises:
      CommandError: If the flags contradict one another, or the file of learning rates
        cannot be read.
    """
    given = {
        flag: values[flag].value for flag in _WORKLOADS_OF_FLAGS if values[flag].value is not None
    }
    for flag in given:
        workload = _WORKLOADS_OF_FLAGS[flag]
        check_choice(values.workload == workload, f"--{flag} belongs to --workload={workload}.")
    if "learning_rates" in given:
        given["learning_rates"] = _numbers(given["learning_rates"], "learning_rates").tolist()
    if values.workload == "momentum_sgd":
        return {"name": "momentum_sgd", "momentum": 0.9, "learning_rates": None, **given}
    return None if values.workload is None else {"name": values.workload}


def gap_fields(
    factorization: Factorization, workload: Workload, participation: Participation
) -> dict[str, object]:
    """Returns the field ``optimality_gap``, and the name of its error if this is not the mean.

    The gap is None unless it is certified for the workload and the schema.
    """
    gap = factorization.optimality_gap
    own = factorization.parameters.get("workload")
    if not (factorization.gap_holds_for(participation) and workload.has_fingerprint(own)):
        gap = None
    error = _CERTIFIED_ERRORS.get(str(factorization.parameters.get("error")))
    is_named = gap is not None and error is not None
    return {"optimality_gap": gap} | ({"optimality_gap_of": error} if is_named else {})


def _define_privacy(values: flags.FlagValues) -> None:
    """Defines --noise_multiplier, --target_epsilon, --target_rho and --delta."""
    group = FlagGroup(values, "Privacy")
    group.number("target_epsilon", "The target epsilon: the least noise that reaches it is used.")
    group.number(
        "target_rho",
        "In place of --target_epsilon: the target rho of approximate zero-concentrated "
        "differential privacy. Sampling does not amplify it.",
    )
    group.number("delta", "The delta of the guarantee.", 1e-6)
    group.number(
        "noise_multiplier",
        "In place of a target: the standard deviation of Z, divided by the clip norm and by the "
        "sensitivity of C under the participation.",
    )


def noise_multiplier(values: flags.FlagValues) -> float | None:
    """Returns the noise multiplier that the flags ask for, or None if they ask for none.

    Args:
      values: The parsed flags, or another object with values of the flags of noise.

    Raises:
      CommandError: If more than one of noise multiplier, epsilon and rho is given, if no noise
        multiplier reaches the target, or if there is too little noise to state an epsilon.
      ValueError: If a value is out of its range.
    """
    names = ("noise_multiplier", "target_epsilon", "target_rho")
    given = [name for name in names if getattr(values, name) is not None]
    listed = " and ".join(f"--{name}" for name in given)
    check_choice(len(given) < 2, f"{listed} exclude each other: give one.")
    if not given:
        return None
    (name,) = given
    value = getattr(values, name)
    if name == "noise_multiplier":
        multiplier = numbers.non_negative_number(value, listed)
    elif name == "target_epsilon":
        target, delta = numbers.positive_number(value, listed), numbers.delta(values.delta)
        with naming(name):
            return accounting.noise_multiplier(target, delta)
    else:
        multiplier = accounting.noise_multiplier_of_zcdp(numbers.positive_number(value, listed))
        check_choice(
            math.isfinite(multiplier),
            f"{listed}={value:g} is too small: no float is as large as its noise multiplier.",
        )
    delta = numbers.delta(values.delta)
    epsilon = guarantees.of_noise(multiplier, delta).epsilon
    has_stated = name == "noise_multiplier"
    check_choice(
        math.isfinite(epsilon) or (has_stated and multiplier == 0.0),
        f"{listed}={value:g} is too {'small' if has_stated else 'large'}: no epsilon can be stated "
        f"for so little noise.{' Use more, or 0 for none.' if has_stated else ''}",
    )
    return multiplier


def _numbers(file_name: str, flag: str, what: str = "") -> FloatArray:
    path = pathlib.Path(file_name)
    try:
        with warnings.catch_warnings():
            # NumPy warns if a file has no numbers; the number of values is checked later.
            warnings.simplefilter("ignore", UserWarning)
            found: FloatArray = np.loadtxt(path, dtype=np.float64, ndmin=1, encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise CommandError(
            f"--{flag}={file_name} cannot be read as {what}numbers, one a line: {error}"
        ) from None
    check_choice(
        found.ndim == 1 and found.size > 0,
        f"--{flag}={file_name} must hold one number on each line, found an array of shape "
        f"{found.shape}.",
    )
    return found


_SUBJECTS: Mapping[str, Callable[[flags.FlagValues], None]] = {
    "options": _define_options,
    "options_of_runs": functools.partial(_define_options, for_runs=True),
    "workload": _define_workload,
    "participation": _define_participation,
    "privacy": _define_privacy,
}
