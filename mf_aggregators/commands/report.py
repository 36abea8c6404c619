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
  mf-report --checkpoint=banded_342 --target_epsilon=8 --delta=1e-6 --trade_off=curve.json
"""

import dataclasses
import json
import math
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any

from absl import flags

from mf_aggregators import atomic_files, checkpoints, inputs, memory, random_streams
from mf_aggregators.commands import (
    command_line,
    mechanism_flags,
    output_paths,
    registry,
    report_contents,
    report_statement,
    report_units,
    stated_runs,
)
from mf_aggregators.commands.command_line import FlagGroup
from mf_aggregators.commands.report_contents import LedgerReport, Subject
from mf_aggregators.kernel import ledger, numbers
from mf_aggregators.kernel.claim import Guarantee
from mf_aggregators.kernel.rows import NoiseRecursion
from mf_aggregators.mechanism import Mechanism
from mf_aggregators.noise import costs
from mf_aggregators.privacy import attackers, guarantees, ledgers
from mf_aggregators.privacy.ledgers import Ledger
from mf_aggregators.privacy.round_times import RoundTimes

# What says of a run that it took place.
_OF_RUNS = ("ledger", "round_times")
_HAS_NOISE = "a --checkpoint that has it (the directory of a run or of a Mechanism)"
# What may be given beside --verify.
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
    group = FlagGroup(values, "Participation")
    group.path(
        "ledger",
        "A ledger of who took part in which round: the participation.npz of a run, or a text file "
        "(UTF-8) with a client, a comma and a round from 0 on each line. Its first line may be a "
        f"heading: {_headings()}. A line of any other form is refused. The report then has the "
        "guarantee that follows from it, and the amplified one where a data sampler drew the "
        "batches.",
    )
    group.path(
        "round_counts",
        "How many clients each round of --ledger summed, by the server's own count: a .json list, "
        "or a text file with one number on each line, in the order of rounds. Without it, and if "
        "the ledger has other numbers, lines may be missing, and nothing better than the plan is "
        "stated. The directory of a training run has its own counts.",
    )
    group.path(
        "sampling_seed",
        "The file with the secret seed of the data sampler that drew the batches of --ledger: "
        "checkpoints/sampling_seed.json of a run. Every draw is compared with the ledger. "
        "Without it the report says what holds if the ledger is right, and for whoever knows who "
        "was drawn.",
    )
    group.integer(
        "released_rounds",
        "How many rounds the run of a text --ledger released. Default: all of the checkpoint.",
    )
    report_units.define_flags(values)
    _define_round_times(values)
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
        "that it has. Adds what guarantee and error of the extended horizon would be, beside the "
        "error of the same mechanism planned for so many rounds. The participation flags are for "
        "both.",
    )
    report_statement.define_flags(values)
    registry.define_flag(values)
    FlagGroup(values, "Output").path(
        "figure",
        "A PNG file to write, with the error by round, the matrix and, with a noise multiplier, "
        "what an attacker can do.",
    )
    FlagGroup(values, "Output").path(
        "trade_off",
        "A JSON file to write, with the trade-off curve of f-differential privacy: the least false "
        "negative rate of an attacker at false positive rates, and the same guarantee as a privacy "
        "loss distribution of dp-accounting. It is that of the plan, amplified where the sampler "
        "of a --ledger is. --figure draws the curve.",
    )
    output_paths.define_report(
        values,
        "the same as pictures, epsilon over noise, what the noise costs, all numbers, and what "
        "uses the checkpoint.",
    )
    output_paths.define_overwrite(
        values, "--figure, --trade_off, --report, --registry and --statement"
    )
    FlagGroup(values, "Output").boolean(
        "name_clients",
        "Whether the report names the client of --ledger that was protected least, with its "
        "rounds.",
        False,
    )


def _define_round_times(values: flags.FlagValues) -> None:
    group = FlagGroup(
        values,
        "Participation",
        {
            "clock_drift": f"Default: {ledger.DEFAULT_CLOCK_DRIFT:g}.",
            "clock_margin_minutes": f"Default: {ledger.DEFAULT_CLOCK_MARGIN_MINUTES:g}.",
            "timer_max_participations": "Default: they do not count.",
        },
    )
    group.path(
        "round_times",
        "In the place of --ledger, where nobody knows who took part: when each round took place, "
        "as a text file (UTF-8) of round,start,end lines, or of start,TIME for the first round and "
        "round,end lines. Rounds count from 0; times are dates with a UTC offset, such as "
        "2026-03-01T04:00:00Z, or seconds since 1970. The report then has the guarantee of all "
        "participations that --timer_hours allowed.",
    )
    group.number(
        "timer_hours",
        "The hours for which devices accept no request after one that they took part on. Required "
        "with --round_times.",
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


def _headings() -> str:
    *clients, last = ledgers.HEADINGS_OF_CLIENTS
    rounds = " or ".join(ledgers.HEADINGS_OF_ROUNDS)
    return f"{', '.join(clients)} or {last} before the comma, and {rounds} after it"


@memory.limited()
def main(values: flags.FlagValues) -> int:
    """Reads, computes and reports; returns the exit status."""
    if values.verify is not None:
        return _verify(values)
    _check_flags(values)
    start = time.monotonic()
    subject = report_contents.read(values)
    factorization, mechanism = subject.factorization, subject.mechanism
    for name in ("ledger", "round_times", "clients_per_round", "trade_off"):
        targets = "" if name in _OF_RUNS else ", --target_epsilon or --target_rho"
        is_hidden = checkpoints.has_mechanism(values.checkpoint)
        command_line.check_choice(
            getattr(values, name) is None or mechanism is not None,
            f"--{name} needs the noise of the run: "
            + (
                "that of the checkpoint is for its own participation, so leave out the flags that "
                "name another, or give --noise_multiplier."
                if is_hidden
                else f"--noise_multiplier{targets}, or {_HAS_NOISE}."
            ),
        )
    found = _found(values, subject)
    if found is not None and found.observed.mechanism.sampling is not None:
        # Whatever the matrix was made for, the ledger says how clients were drawn.
        subject = dataclasses.replace(subject, drawn=found.observed.mechanism)
    fields = subject.error_fields()
    fields |= subject.guarantee_fields(values.delta, values.clients_per_round)
    if values.model_size is not None:
        if mechanism is not None and mechanism.noise_multiplier:
            rounds = max(factorization.num_rounds, values.extend_to or 0)
            inputs.check_charged(values.model_size, rounds)
        fields |= _costs(factorization.noise_recursion(), values.model_size)
    if values.extend_to is not None:
        fields |= subject.extension_fields(values.extend_to, values.delta, values.model_size)
    stated = {} if mechanism is None else {"planned": mechanism.guarantee(values.delta)}
    drawn = None
    if found is None and subject.drawn is not None:
        certification = guarantees.default_certification(show_progress=True)
        drawn = subject.drawn.guarantee(values.delta, certification=certification)
        fields |= report_contents.sampling_fields(drawn)
        stated = {"amplified": drawn}
    if found is not None:
        fields |= found.fields(name_clients=values.name_clients)
        stated = found.guarantees()
    is_broken = found is not None and found.keeps_plan is False
    warnings = [] if found is None else found.warnings()
    of_run = mechanism if found is None else found.observed.mechanism
    of_units, about_units = report_units.fields_and_sentences(values, of_run, found)
    fields |= of_units
    said = _sentences(subject, values.delta, found, drawn)
    sentences = [*said, *about_units, *subject.notes()]
    # What draws takes a second to import, which these flags alone need.
    if values.figure is not None:
        from mf_aggregators.commands import report_page

        report_page.save_figure(subject, stated, is_broken, pathlib.Path(values.figure))
        fields["figure"] = values.figure
    if values.trade_off is not None:
        of = subject.drawn or mechanism if found is None else found.observed.mechanism
        fields["trade_off"] = _written_trade_off(of, is_broken, values.trade_off)
    if values.report is not None:
        fields["report"] = values.report
    if values.statement is not None and found is not None:
        fields |= report_statement.write(values, found, factorization.mechanism)
        fields |= registry.write(values, fields["statement_data"])
    fields["seconds"] = time.monotonic() - start
    if values.report is not None:
        from mf_aggregators.commands import report_page

        report_page.write(subject, stated, fields, [*warnings, *sentences], is_broken, values)
    text = "\n\n".join([*warnings, command_line.table(list(fields.items())), *sentences])
    command_line.print_result(values, fields, text)
    return command_line.REFUTED if is_broken else command_line.DONE


def _found(values: flags.FlagValues, subject: Subject) -> LedgerReport | None:
    """What follows from the ledger or from the times of rounds, if there are any."""
    mechanism = subject.mechanism
    if mechanism is None:
        return None
    if values.round_times is not None:
        times = _round_times(values)
        with command_line.naming("round_times"):
            return LedgerReport.of_times(subject.drawn or mechanism, times, values.delta)
    if values.ledger is None:
        return None
    ledger = ledgers.load(values.ledger, values.released_rounds or mechanism.num_rounds)
    command_line.check_choice(
        values.population is None or len(ledger.client_ids) <= values.population,
        f"--population={values.population} is less than the {len(ledger.client_ids)} clients in "
        f"{values.ledger}.",
    )
    _check_reference(values, subject, ledger)
    _check_rounds(values, ledger)
    seed = _sampling_seed(values, ledger)
    command_line.check_choice(
        values.statement is None
        or (ledger.sampling is None and subject.drawn is None)
        or seed is not None,
        "--statement needs --sampling_seed for batches that a sampler drew: nothing else shows "
        "that it did.",
    )
    with command_line.naming("round_counts"):
        counts: Sequence[int] | None = ledgers.round_counts(values.round_counts)
    if counts is None and checkpoints.is_run(values.checkpoint):
        counts = stated_runs.round_counts(pathlib.Path(values.checkpoint), ledger)
    with command_line.naming("ledger" if values.released_rounds is None else "released_rounds"):
        return LedgerReport.of(
            subject,
            ledger,
            values.delta,
            seed,
            round_counts=counts,
            clients_per_round=values.clients_per_round,
        )


def _check_rounds(values: flags.FlagValues, ledger: Ledger) -> None:
    """Checks a ledger against that of the run directory, if the checkpoint is one."""
    path = pathlib.Path(values.checkpoint) / ledgers.FILE_OF_RUN
    if checkpoints.is_run(values.checkpoint) and path.exists():
        own = ledgers.load(path, ledger.num_rounds)
        command_line.check_choice(
            ledger.has_same_rounds(own),
            f"--ledger={values.ledger} is not that of the run, which is {path}: give it, or the "
            "checkpoint of another run.",
        )


def made_again(words: list[str]) -> tuple[flags.FlagValues, LedgerReport, str]:
    """Returns what a statement is made of.

    Args:
      words: Flags of mf-report, those of a statement among them.

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
    command_line.check_choice(found is not None, "the statement was made of no ledger with noise.")
    assert found is not None
    return values, found, subject.factorization.mechanism


def _verify(values: flags.FlagValues) -> int:
    """Makes a statement again from its files, and compares."""
    given = [name for name in values if values[name].present and name not in _WITH_VERIFY]
    command_line.check_choice(
        not given, f"--verify takes all else from the statement: leave out --{', --'.join(given)}."
    )

    command_line.check_choice(
        values.verify.endswith(".md"), f"--verify must name a .md file, found {values.verify}."
    )
    registry.check_flag(values)
    with command_line.naming("verify"):
        fields, text = report_statement.verify(values.verify, made_again)
    if fields["is_verified"]:
        fields |= registry.write(values, report_statement.data_of(values.verify))
    command_line.print_result(values, fields, text)
    return command_line.DONE if fields["is_verified"] else command_line.REFUTED


def _written_trade_off(mechanism: Mechanism | None, is_broken: bool, path: str) -> str | None:
    """Writes the trade-off curve of a plan, and returns the path; None of one that was broken."""
    if is_broken or mechanism is None:
        return None
    text = json.dumps(mechanism.trade_off_curve(), indent=2, allow_nan=False) + "\n"
    try:
        atomic_files.write_text(path, text)
    except OSError as error:
        raise command_line.CommandError(
            f"--trade_off={path} cannot be written: {error.strerror}."
        ) from error
    return path


def _check_flags(values: flags.FlagValues, *, writes: bool = True) -> None:
    command_line.check_choice(
        values.figure is None or values.figure.endswith(".png"),
        f"--figure must name a .png file, found {values.figure}.",
    )
    for name in (
        "model_size",
        "clients_per_round",
        "released_rounds",
        "extend_to",
        "timer_max_participations",
    ):
        if getattr(values, name) is not None:
            numbers.positive_integer(getattr(values, name), f"--{name}")
    command_line.check_choice(
        values.released_rounds is None
        or (values.ledger is not None and not ledgers.is_archive(values.ledger)),
        "--released_rounds belongs to a text --ledger: the participation.npz of a run states how "
        "many rounds it released.",
    )
    command_line.check_choice(
        values.ledger is None or values.round_times is None,
        "--ledger and --round_times exclude each other: a ledger has who took part in each round.",
    )
    for name in _OF_RUNS:
        # A target is met anew for whatever is declared: less noise than the run had, or more.
        command_line.check_choice(
            values[name].value is None
            or (values.target_epsilon is None and values.target_rho is None),
            f"--{name} is of a run that took place: give the noise that it had, by "
            f"--noise_multiplier or {_HAS_NOISE}, in place of "
            f"--{'target_rho' if values.target_epsilon is None else 'target_epsilon'}.",
        )
    command_line.check_choice(
        (values.round_times is None) == (values.timer_hours is None),
        "--timer_hours belongs to --round_times, which needs it.",
    )
    for name in ("clock_drift", "clock_margin_minutes", "timer_max_participations"):
        command_line.check_choice(
            getattr(values, name) is None or values.round_times is not None,
            f"--{name} belongs to --round_times.",
        )
    command_line.check_choice(
        values.sampling_seed is None or values.ledger is not None,
        "--sampling_seed needs --ledger, whose draws it checks.",
    )
    command_line.check_choice(
        values.round_counts is None or values.ledger is not None,
        "--round_counts needs --ledger, whose rows are compared with the counts.",
    )
    report_units.check_flags(values)
    if values.figure is not None:
        command_line.check_extra("--figure", ("matplotlib",))
        output_paths.check_parent(values.figure, "figure")
        output_paths.check_apart(values.figure, "figure", values.checkpoint)
        output_paths.check_file(values.figure, "figure", values.overwrite)
    if values.trade_off is not None:
        command_line.check_choice(
            values.trade_off.endswith(".json"),
            f"--trade_off must name a .json file, found {values.trade_off}.",
        )
        output_paths.check_parent(values.trade_off, "trade_off")
        output_paths.check_apart(values.trade_off, "trade_off", values.checkpoint)
        output_paths.check_file(values.trade_off, "trade_off", values.overwrite)
    output_paths.check_report(values, values.checkpoint)
    report_statement.check_flags(values, writes=writes)
    registry.check_flag(values)
    named = ("figure", "trade_off", "report", "registry")
    output_paths.check_distinct(
        {
            **{name: [values[name].value] for name in named if values[name].value is not None},
            "statement": report_statement.files_written(values),
        },
        report_statement.files_read(values),
    )


def _check_reference(values: flags.FlagValues, subject: Subject, ledger: Ledger) -> None:
    """Asks what the noise of sampled clients is relative to, where a checkpoint says otherwise."""
    rounds = subject.factorization.num_rounds
    command_line.check_choice(
        ledger.sampling is None
        or subject.has_own
        or subject.schema.most_participations(rounds) == 1
        or mechanism_flags.participation(values) is not None,
        f"the clients of {values.ledger} were sampled, and the checkpoint is for another schema: "
        f"{subject.schema}. Use --participation=single if the noise multiplier is relative to one "
        "participation, as in the privacy.json of a sampled run, or else the flags of that schema.",
    )


def _round_times(values: flags.FlagValues) -> RoundTimes:
    numbers.positive_number(values.timer_hours, "--timer_hours")
    drift, margin = values.clock_drift, values.clock_margin_minutes
    command_line.check_choice(
        drift is None or 0.0 <= drift < 1.0,
        f"--clock_drift must be at least 0 and below 1, found {drift}.",
    )
    if margin is not None:
        numbers.non_negative_number(margin, "--clock_margin_minutes")
    given = {
        name: getattr(values, name)
        for name in ("clock_drift", "clock_margin_minutes")
        if getattr(values, name) is not None
    }
    return RoundTimes.load(
        values.round_times,
        values.timer_hours,
        max_participations=values.timer_max_participations,
        **given,
    )


def _sampling_seed(values: flags.FlagValues, ledger: Ledger) -> int | None:
    if values.sampling_seed is None:
        return None
    command_line.check_choice(
        ledger.sampling is not None,
        f"--sampling_seed needs a ledger that names the scheme of its draws, and {values.ledger} "
        "does not: give the participation.npz of a run that samples.",
    )
    return random_streams.load_seed(values.sampling_seed)


def _sentences(
    subject: Subject, delta: float, found: LedgerReport | None, drawn: Guarantee | None
) -> list[str]:
    """In words, what guarantee is stated; nothing where a warning has said it."""
    mechanism = subject.mechanism
    if drawn is not None:
        condition = ", if the scheme draws every batch"
        return [report_contents.drawn_sentences(drawn, condition)]
    if mechanism is None:
        return ["--noise_multiplier, --target_epsilon or --target_rho adds the privacy guarantee."]
    if found is not None and found.keeps_plan is False:
        return []
    sentences = []
    planned = mechanism.guarantee(delta)
    if math.isfinite(planned.epsilon) and (found is None or not found.plan.is_amplified):
        sentences.append(
            f"Whoever observes all {mechanism.num_rounds} rounds learns about one client at most "
            f"what {numbers.pair(planned.epsilon, delta)}-DP allows (zero-out "
            f"adjacency), if every client keeps to: {subject.schema}. "
            f"{attackers.rates_sentence(attackers.rates(planned))}"
        )
    if found is not None:
        sentences.append(found.sentences())
    return sentences


def run() -> None:
    """Entry point of the console command."""
    sys.exit(command_line.run(__doc__ or "", define_flags, main))


def _costs(recursion: NoiseRecursion, model_size: int) -> dict[str, Any]:
    """What a round's noise costs for a float32 model, with the storage that is chosen for it."""
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
    run()
