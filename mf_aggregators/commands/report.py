r"""mf-report: what a checkpoint is, how good it is, and what privacy it gives.

Examples:
  mf-report --checkpoint=banded_342 --separation=342 --max_participations=6 \
    --target_epsilon=8 --delta=1e-6 --figure=banded_342.png
  mf-report --checkpoint=run --delta=1e-4 --ledger=run/participation.npz
  mf-report --checkpoint=banded_342 --separation=342 --noise_multiplier=0.9 --delta=1e-10 \
    --round_times=rounds.csv --timer_hours=48 --timer_max_participations=6
  mf-report --checkpoint=run --delta=1e-4 --extend_to=3000
  mf-report --checkpoint=run --delta=1e-4 --ledger=run/participation.npz \
    --sampling_seed=run/checkpoints/sampling_seed.json
  # A privacy statement for a run that was trained anywhere, and its verification:
  mf-report --checkpoint=banded_25 --separation=25 --noise_multiplier=0.54 --delta=1e-6 \
    --ledger=rounds.csv --statement=PRIVACY.md --public_data=none --population=100000 \
    --clients_per_round=1000 --clip_norm=1 --enforcement="Each device keeps a timer."
  mf-report --verify=PRIVACY.md
"""

import dataclasses
import pathlib
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from absl import flags

from mf_aggregators import checkpoints, inputs, memory, random_streams
from mf_aggregators.commands import (
    command_line,
    mechanism_flags,
    registry,
    report_contents,
    report_statement,
    stated_runs,
)
from mf_aggregators.commands.command_line import FlagGroup, check_choice
from mf_aggregators.commands.report_contents import LedgerReport, Subject
from mf_aggregators.kernel import ledger as ledgers_of_kernel
from mf_aggregators.kernel import numbers
from mf_aggregators.kernel.claim import Guarantee
from mf_aggregators.kernel.rows import NoiseRecursion
from mf_aggregators.mechanism import Mechanism
from mf_aggregators.noise import costs
from mf_aggregators.participation import SingleParticipation
from mf_aggregators.privacy import guarantees, ledgers
from mf_aggregators.privacy.ledgers import Ledger
from mf_aggregators.privacy.round_times import RoundTimes

# Flags that need another one, and the reason.
_NEEDS: Mapping[str, tuple[str, str]] = {
    "sampling_seed": ("ledger", "whose draws it checks"),
    "round_counts": ("ledger", "whose rows are compared with the counts"),
    "people": ("ledger", "whose clients it names"),
    "round_times": ("timer_hours", "which devices kept"),
    "timer_hours": ("round_times", "whose devices have timers"),
    "clock_drift": ("round_times", "whose devices have clocks"),
    "clock_margin_minutes": ("round_times", "whose devices have clocks"),
    "timer_max_participations": ("round_times", "whose devices count"),
    "registry": ("statement or --verify", "whose statement the record is of"),
}
_POSITIVE = ("model_size", "clients_per_round", "released_rounds", "extend_to", "id_window")
_HAS_NOISE = "a --checkpoint that has it (the directory of a run or of a Mechanism)"
# Flags that --verify takes as well.
_WITH_VERIFY = frozenset({"verify", "registry", "overwrite", "format", "flagfile"})


def define_flags(values: flags.FlagValues) -> None:
    """Defines the flags of mf-report."""
    FlagGroup(values, "Mechanism").path(
        "checkpoint",
        "The checkpoint directory to report on, or the directory of a training run. A run, and the "
        "checkpoint of a Mechanism, has participation and noise of its own, unless flags name "
        "others. Required, but with --verify.",
    )
    command_line.require(values, "checkpoint", "verify")
    mechanism_flags.define_privacy(values)
    mechanism_flags.define_participation(values)
    _define_ledger(values)
    mechanism_flags.define_workload(values)
    group = FlagGroup(values, "Training")
    group.integer(
        "clients_per_round",
        "The cohort size, which adds the effective RMSE (BandMF Eq. 11) to a noise multiplier. "
        "The cohort size of a --ledger is compared with it.",
    )
    group.integer(
        "model_size",
        "The number of parameters of a model, which adds what a round's noise costs for it.",
    )
    group.integer(
        "extend_to",
        "More rounds, for which a run under the checkpoint's matrix might go on with the noise "
        "that it has. Adds the guarantee and the error of the extended horizon, and the error of "
        "the same mechanism planned for so many rounds.",
    )
    report_statement.define_flags(values)
    group = FlagGroup(values, "Output")
    group.path(
        "figure",
        "A PNG file to write, with the error by round, the matrix and, with a noise multiplier, "
        "what an attacker can do.",
    )
    command_line.define_overwrite(values, "--figure, --registry and --statement")
    group.boolean(
        "name_clients",
        "Whether the report names the client of --ledger that was protected least, with its "
        "rounds.",
        False,
    )


def _define_ledger(values: flags.FlagValues) -> None:
    """Defines the flags of ledgers and of times of rounds."""
    group = FlagGroup(
        values,
        "Participation",
        {
            "clock_drift": f"Default: {ledgers_of_kernel.DEFAULT_CLOCK_DRIFT:g}.",
            "clock_margin_minutes": (
                f"Default: {ledgers_of_kernel.DEFAULT_CLOCK_MARGIN_MINUTES:g}."
            ),
            "timer_max_participations": "Default: they do not count.",
        },
    )
    group.path(
        "ledger",
        "A ledger of who took part in which round: the participation.npz of a run, or a text file "
        "(UTF-8) with a client, a comma and a round from 0 on each line. Its first line may be a "
        "heading: client, user or device before the comma, and round after it. The report then has "
        "the guarantee that follows from it, and the amplified one where a data sampler drew the "
        "batches.",
    )
    group.path(
        "round_counts",
        "How many clients each round of --ledger summed, by the server's own count: a .json list, "
        "or a text file with one number on each line. Without it, and if the ledger has other "
        "numbers, nothing better than the plan is stated. A training run has its own counts.",
    )
    group.path(
        "sampling_seed",
        "The file with the secret seed of the data sampler that drew the batches of --ledger: "
        "checkpoints/sampling_seed.json of a run. Every draw is compared with the ledger.",
    )
    group.integer(
        "released_rounds",
        "How many rounds the run of a text --ledger released. Default: all of the checkpoint.",
    )
    group.integer(
        "id_window",
        "The rounds after which client ids change. The report then has the guarantee of a client "
        "in a window of so many rounds, and that of a device in all windows, whose timer starts "
        "again in each.",
    )
    group.path(
        "people",
        "Whose clients are whose, for --ledger: a text file (UTF-8) with a person, a comma and a "
        "client on each line. The report then has the guarantee of the person that is protected "
        "least.",
    )
    group.path(
        "round_times",
        "In place of --ledger, where nobody knows who took part: when each round took place, as a "
        "text file (UTF-8) of round,start,end lines, or of start,TIME for the first round and "
        "round,end lines. Rounds count from 0; times are dates with a UTC offset, such as "
        "2026-03-01T04:00:00Z, or seconds since 1970.",
    )
    group.number(
        "timer_hours",
        "The hours for which devices accept no request after one that they took part on, for "
        "--round_times.",
    )
    group.number(
        "clock_drift",
        "By what share of the time devices' clocks may be too fast, for --round_times.",
    )
    group.number(
        "clock_margin_minutes",
        "By how many minutes a timer may be too short because clocks were set or differ, for "
        "--round_times.",
    )
    group.integer(
        "timer_max_participations",
        "The most participations that devices count and allow, for --round_times.",
    )


@memory.limited()
def main(values: flags.FlagValues) -> int:
    """Reads, computes and reports; returns the exit status."""
    if values.verify is not None:
        return _verify(values)
    _check_flags(values)
    start = time.monotonic()
    subject = report_contents.read(values)
    _check_noise(values, subject)
    found = _found(values, subject)
    if found is not None and found.observed.mechanism.sampling is not None:
        # The ledger says how clients were drawn, and the matrix may say otherwise.
        subject = dataclasses.replace(subject, drawn=found.observed.mechanism)
    mechanism, drawn = subject.mechanism, None
    fields = subject.error_fields()
    fields |= subject.guarantee_fields(values.delta, values.clients_per_round)
    if values.model_size is not None:
        if mechanism is not None and mechanism.noise_multiplier:
            rounds = max(subject.factorization.num_rounds, values.extend_to or 0)
            inputs.check_charged(values.model_size, rounds)
        fields |= _costs(subject.factorization.noise_recursion(), values.model_size)
    if values.extend_to is not None:
        fields |= subject.extension_fields(values.extend_to, values.delta, values.model_size)
    stated = {} if mechanism is None else {"planned": mechanism.guarantee(values.delta)}
    if found is not None:
        fields |= found.fields(name_clients=values.name_clients)
        stated = found.guarantees()
    elif subject.drawn is not None:
        drawn = _certified(subject.drawn, values.delta)
        fields |= report_contents.sampling_fields(drawn)
        stated = {"amplified": drawn}
    of_run = mechanism if found is None else found.observed.mechanism
    others = report_contents.units_of(values, of_run, found)
    fields |= others.fields
    is_broken = found is not None and found.keeps_plan is False
    said = report_contents.paragraphs(subject, values.delta, found, drawn, others)
    # Importing matplotlib takes a second.
    if values.figure is not None:
        from mf_aggregators.commands import report_figure

        report_figure.save_figure(subject, stated, is_broken, pathlib.Path(values.figure))
        fields["figure"] = values.figure
    if values.statement is not None and found is not None:
        fields |= report_statement.write(values, found, subject.factorization.mechanism)
        fields |= registry.write(values, fields["statement_data"])
    fields["seconds"] = time.monotonic() - start
    warnings = [each for each in said if each.startswith("WARNING")]
    table = command_line.table(list(fields.items()))
    text = "\n\n".join([*warnings, table, *said[len(warnings) :]])
    command_line.print_result(values, fields, text)
    return command_line.REFUTED if is_broken else command_line.DONE


def _certified(mechanism: Mechanism, delta: float) -> Guarantee:
    certification = guarantees.default_certification(show_progress=True)
    return mechanism.guarantee(delta, certification=certification)


def _check_noise(values: flags.FlagValues, subject: Subject) -> None:
    """Refuses flags that need noise where none is known."""
    for name in ("ledger", "round_times", "clients_per_round"):
        targets = "" if name.startswith(("ledger", "round")) else ", --target_epsilon, --target_rho"
        check_choice(
            values[name].value is None or subject.mechanism is not None,
            f"--{name} needs the noise of the run: "
            + (
                "that of the checkpoint is for its own participation, so leave out the flags that "
                "name another, or give --noise_multiplier."
                if subject.has_own
                else f"--noise_multiplier{targets} or {_HAS_NOISE}."
            ),
        )


def _found(values: flags.FlagValues, subject: Subject) -> LedgerReport | None:
    """The findings of the ledger or of the times of rounds, if there are any."""
    mechanism = subject.drawn or subject.mechanism
    if mechanism is None:
        return None
    if values.round_times is not None:
        with command_line.naming("round_times"):
            times = _round_times(values)
            seen = mechanism.observed(times)
        return LedgerReport(mechanism.guarantee(values.delta), seen, times)
    if values.ledger is None:
        return None
    ledger = ledgers.load(values.ledger, values.released_rounds or mechanism.num_rounds)
    _check_ledger(values, subject, ledger)
    seed = _sampling_seed(values, subject, ledger)
    with command_line.naming("round_counts"):
        counts: Sequence[int] | None = ledgers.round_counts(values.round_counts)
    if counts is None and checkpoints.is_run(values.checkpoint):
        counts = stated_runs.round_counts(pathlib.Path(values.checkpoint), ledger)
    with command_line.naming("ledger" if values.released_rounds is None else "released_rounds"):
        if ledger.sampling is not None and not subject.has_own:
            # Relative to one participation, as schemes have it.
            matrix = mechanism.factorization
            own, once = (
                matrix.sensitivity(each).value for each in (mechanism.schema, SingleParticipation())
            )
            multiplier = mechanism.noise_multiplier * (own / once)
            mechanism = Mechanism(matrix, ledger.sampling, multiplier)
        seen = mechanism.observed(
            ledger,
            round_counts=counts,
            clients_per_round=values.clients_per_round,
            sampling_seed=seed,
        )
    return LedgerReport(_certified(mechanism, values.delta), seen)


def _check_ledger(values: flags.FlagValues, subject: Subject, ledger: Ledger) -> None:
    """Checks a ledger against flags, the checkpoint, and the run directory if that is one."""
    check_choice(
        values.population is None or len(ledger.client_ids) <= values.population,
        f"--population={values.population} is less than the {len(ledger.client_ids)} clients in "
        f"{values.ledger}.",
    )
    check_choice(
        ledger.sampling is None
        or subject.has_own
        or subject.schema.most_participations(subject.factorization.num_rounds) == 1
        or mechanism_flags.participation(values) is not None,
        f"the clients of {values.ledger} were sampled, and the checkpoint is for another schema: "
        f"{subject.schema}. Use --participation=single if the noise multiplier is relative to one "
        "participation, as in the privacy.json of a sampled run, or else the flags of that schema.",
    )
    path = pathlib.Path(values.checkpoint) / ledgers.FILE_OF_RUN
    if checkpoints.is_run(values.checkpoint) and path.exists():
        check_choice(
            ledger.has_same_rounds(ledgers.load(path, ledger.num_rounds)),
            f"--ledger={values.ledger} is not that of the run, which is {path}: give it, or the "
            "checkpoint of another run.",
        )


def made_again(words: list[str]) -> tuple[flags.FlagValues, LedgerReport, str]:
    """Returns the flags and the findings that make a statement.

    Args:
      words: The flags of mf-report that make it.

    Returns:
      The parsed flags, what follows from the ledger, and the name of what makes the noise.

    Raises:
      CommandError: If the flags are of no statement.
      ValueError: If a flag or a file is broken.
    """
    values = command_line.flags_of(define_flags)
    values(["mf-report", *words], known_only=False)
    _check_flags(values, writes=False)
    subject = report_contents.read(values)
    found = _found(values, subject)
    check_choice(found is not None, "the statement was made of no ledger with noise.")
    assert found is not None
    return values, found, subject.factorization.mechanism


def _verify(values: flags.FlagValues) -> int:
    """Makes a statement again from its files, and compares."""
    given = [name for name in values if values[name].present and name not in _WITH_VERIFY]
    check_choice(
        not given, f"--verify takes all else from the statement: leave out --{', --'.join(given)}."
    )
    check_choice(
        values.verify.endswith(".md"), f"--verify must name a .md file, found {values.verify}."
    )
    _check_output(values, "registry", ".yaml")
    with command_line.naming("verify"):
        fields, text = report_statement.verify(values.verify, made_again)
    if fields["is_verified"]:
        fields |= registry.write(values, report_statement.data_of(values.verify))
    command_line.print_result(values, fields, text)
    return command_line.DONE if fields["is_verified"] else command_line.REFUTED


def _check_output(values: flags.FlagValues, name: str, ending: str) -> None:
    """Checks a file that is to be written."""
    path = values[name].value
    if path is None:
        return
    check_choice(path.endswith(ending), f"--{name} must name a {ending} file, found {path}.")
    command_line.check_output(path, name, values.overwrite, values.checkpoint)


def _check_flags(values: flags.FlagValues, *, writes: bool = True) -> None:
    is_given = {name: values[name].value not in (None, []) for name in values}
    for name in _POSITIVE:
        if is_given[name]:
            numbers.positive_integer(values[name].value, f"--{name}")
    for name, (other, why) in _NEEDS.items():
        check_choice(
            not is_given[name] or is_given[other.partition(" ")[0]],
            f"--{name} needs --{other}, {why}.",
        )
    check_choice(
        not is_given["released_rounds"]
        or (is_given["ledger"] and not ledgers.is_archive(values.ledger)),
        "--released_rounds belongs to a text --ledger: the participation.npz of a run states how "
        "many rounds it released.",
    )
    check_choice(
        not (is_given["ledger"] and is_given["round_times"]),
        "--ledger and --round_times exclude each other: a ledger has who took part in each round.",
    )
    for name in ("ledger", "round_times"):
        # A target would be met by other noise than the run had.
        targets = [each for each in ("target_epsilon", "target_rho") if is_given[each]]
        check_choice(
            not is_given[name] or not targets,
            f"--{name} is of a run that took place: give the noise that it had, by "
            f"--noise_multiplier or {_HAS_NOISE}, in place of --{''.join(targets[:1])}.",
        )
    if is_given["figure"]:
        command_line.check_extra("--figure", ("matplotlib",))
    outputs = {"figure": ".png", "registry": ".yaml"}
    for name, ending in outputs.items():
        _check_output(values, name, ending)
    report_statement.check_flags(values, writes=writes)
    command_line.check_distinct(
        {
            **{name: [values[name].value] for name in outputs if is_given[name]},
            "statement": report_statement.files_written(values),
        },
        report_statement.files_read(values),
    )


def _round_times(values: flags.FlagValues) -> RoundTimes:
    given = {
        name: values[name].value
        for name in ("clock_drift", "clock_margin_minutes")
        if values[name].value is not None
    }
    return RoundTimes.load(
        values.round_times,
        values.timer_hours,
        max_participations=values.timer_max_participations,
        **given,
    )


def _sampling_seed(values: flags.FlagValues, subject: Subject, ledger: Ledger) -> int | None:
    if values.sampling_seed is None:
        check_choice(
            values.statement is None or (ledger.sampling is None and subject.drawn is None),
            "--statement needs --sampling_seed for batches that a sampler drew: nothing else shows "
            "that it did.",
        )
        return None
    check_choice(
        ledger.sampling is not None,
        f"--sampling_seed needs a ledger that names the scheme of its draws, and {values.ledger} "
        "does not: give the participation.npz of a run that samples.",
    )
    return random_streams.load_seed(values.sampling_seed)


def run(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status.

    Args:
      argv: The command line with the program's name first; that of the process by default.
    """
    return command_line.run(__doc__ or "", define_flags, main, argv)


def _costs(recursion: NoiseRecursion, model_size: int) -> dict[str, Any]:
    """The costs of a round's noise for a float32 model, with the storage that is chosen for it."""
    cost = costs.choose(recursion, model_size)
    return {
        "model_size": model_size,
        "noise_storage": cost.storage.value,
        "noise_state_gb": cost.state_bytes / 1e9,
        "noise_disk_gb": cost.disk_bytes / 1e9,
        "noise_memory_gb": cost.memory_bytes / 1e9,
        "noise_seconds_per_round": cost.seconds_per_round,
    }


if __name__ == "__main__":
    sys.exit(run())
