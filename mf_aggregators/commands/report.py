r"""mf-report: describes a checkpoint with its errors and guarantee, and makes statements.

Examples:
  mf-report --checkpoint=banded_342 --separation=342 --max_participations=6 \
    --target_epsilon=8 --delta=1e-6 --figure=banded_342.png
  mf-report --checkpoint=run --delta=1e-4 --ledger=run/participation.npz
  mf-report --checkpoint=banded_342 --separation=342 --noise_multiplier=0.9 --delta=1e-10 \
    --round_times=rounds.csv --timer_hours=48 --timer_max_participations=6
  mf-report --checkpoint=run --delta=1e-4 --ledger=run/participation.npz \
    --sampling_seed=run/checkpoints/sampling_seed.json
  # A privacy statement for a run that was trained anywhere, and its verification:
  mf-report --checkpoint=banded_25 --separation=25 --noise_multiplier=0.54 --delta=1e-6 \
    --ledger=rounds.csv --statement=PRIVACY.md --public_data=none --population=100000 \
    --clients_per_round=1000 --clip_norm=1 --enforcement="Each device keeps a timer."
  mf-report --verify=PRIVACY.md
"""

import dataclasses
import os
import pathlib
import sys
import time
from collections.abc import Iterator, Mapping, Sequence

from absl import flags

from mf_aggregators import inputs
from mf_aggregators.checkpoints import STATEMENT_FILE
from mf_aggregators.commands import (
    command_line,
    mechanism_flags,
    registry,
    report_contents,
    stated_runs,
)
from mf_aggregators.commands.command_line import CommandError, FlagGroup, check_choice
from mf_aggregators.commands.report_contents import Report
from mf_aggregators.kernel import numbers
from mf_aggregators.kernel.ledger import DEFAULT_CLOCK_DRIFT, DEFAULT_CLOCK_MARGIN_MINUTES
from mf_aggregators.privacy import ledgers, statement_file, statements
from mf_aggregators.privacy.statements import WORDS, Evidence, RunFacts, Statement

# For each of these flags, another flag that it needs, and the reason.
_NEEDS: Mapping[str, tuple[str, str]] = {
    "sampling_seed": ("ledger", "whose draws it checks"),
    "people": ("ledger", "whose clients it names"),
    "round_counts": ("ledger", "whose rows are compared with the counts"),
    "round_times": ("timer_hours", "which devices kept"),
    "timer_hours": ("round_times", "whose devices have timers"),
    "clock_drift": ("round_times", "whose devices have clocks"),
    "clock_margin_minutes": ("round_times", "whose devices have clocks"),
    "timer_max_participations": ("round_times", "whose devices limit participations"),
    "registry": ("statement or --verify", "from which the record is made"),
}
# Flags that may be given with --verify.
_WITH_VERIFY = frozenset({"verify", "registry", "overwrite", "format", "flagfile"})
# The facts that the user has to give for every statement.
_REQUIRED = ("public_data", "enforcement", "population", "clients_per_round", "clip_norm")
_EVIDENCE, _OTHERS = "evidence", "other_runs"
_YES_OR_NO: Mapping[str | None, bool | None] = {"yes": True, "no": False, None: None}
# Flags with texts that a statement repeats, and their help texts.
_WORDS: Mapping[str, str] = {
    "public_data": "Other data that was used besides that of the clients, in a few words, or none.",
    "enforcement": "How clients were made to keep to the planned participation, as a sentence.",
    "responsible": "The person or organisation that answers for the run.",
    "signer": "The name under which the statement is signed, as the list of signers has it.",
    "model": "The model and its version.",
    "period": "The first and the last day of the run, in words.",
    "custody": "Who holds seed, state and ledger, and when they are destroyed, as a sentence.",
    "simulation": "The simulated parts of the run, as a sentence. Default: none, a real run.",
}
# The flags for ledgers and for times of rounds, with their help texts.
_LEDGER_FILES: Mapping[str, str] = {
    "ledger": "The participations of clients: the participation.npz of a run, or a text file "
    "(UTF-8) of client,round lines. Rounds count from 0. Adds the guarantee that follows.",
    "round_counts": "The number of clients that the server summed in each round of --ledger: a "
    "text file, one number on each line. A run has its own. Without it, no guarantee better than "
    "the plan is stated.",
    "sampling_seed": "The file with the secret seed of the data sampler that drew the batches of "
    "--ledger: checkpoints/sampling_seed.json of a run. Every draw is compared with the ledger.",
    "people": "The person of each client of --ledger: a text file (UTF-8) of person,client lines. "
    "Adds the guarantee of the least protected person.",
    "round_times": "In place of --ledger, if nobody knows who took part: the times of the rounds, "
    "a text file (UTF-8) of round,start,end lines. Rounds count from 0; times are dates with a UTC "
    "offset, such as 2026-03-01T04:00:00Z, or seconds since 1970.",
}
_LEDGER_INTEGERS: Mapping[str, str] = {
    "released_rounds": "The number of rounds that the run of a text --ledger released. Default: "
    "all rounds of the checkpoint.",
    "id_window": "The number of rounds after which client ids change. Adds the guarantee of a "
    "client in one window of that length, and that of a device in all windows.",
    "timer_max_participations": "For --round_times: the most participations that each device "
    "allows itself. Default: no limit.",
}
_LEDGER_NUMBERS: Mapping[str, str] = {
    "timer_hours": "For --round_times: the hours for which a device accepts no request after one "
    "in which it took part.",
    "clock_drift": "For --round_times: the share by which clocks of devices may be too fast. "
    f"Default: {DEFAULT_CLOCK_DRIFT:g}.",
    "clock_margin_minutes": "For --round_times: the minutes by which a timer may be too short "
    f"because clocks were set or differ. Default: {DEFAULT_CLOCK_MARGIN_MINUTES:g}.",
}
# The allowed endings of output files, by flag.
_ENDINGS = {"figure": (".png",), "registry": (".yaml",), "statement": (".md", ".json")}
# The flags for files from which a statement is made.
_PATHS = ("checkpoint", *_LEDGER_FILES, "learning_rates")
# Flags that may be given only with --statement.
_FACTS = ("population", "clip_norm", *_WORDS, "secure_aggregation", "finished", _EVIDENCE, _OTHERS)
# Flags on which a statement does not depend.
_OF_OUTPUT = frozenset({"statement", "figure", *_WITH_VERIFY})


def _define_flags(values: flags.FlagValues) -> None:
    """Defines the flags of mf-report."""
    group = FlagGroup(values, "Mechanism")
    group.path(
        "checkpoint",
        "The checkpoint or training run to report on. Its own participation and noise, if it has "
        "them, apply unless flags give others. Required, except with --verify.",
    )
    mechanism_flags.define(values, "privacy", "participation")
    _define_ledger(values)
    mechanism_flags.define(values, "workload")
    group = FlagGroup(values, "Training")
    meaning = "The planned number of clients in a round, which is compared with the --ledger."
    group.integer("clients_per_round", meaning, lower_bound=1)
    _define_statement(values)
    group = FlagGroup(values, "Output")
    group.path(
        "figure",
        "A PNG file to write: the error by round, the matrix and, with a noise multiplier, the "
        "true positive rates that an attacker can reach.",
    )
    group.overwrite("--figure, --registry and --statement")
    group.require("checkpoint", "verify")


def _define_ledger(values: flags.FlagValues) -> None:
    """Defines the flags of ledgers and of times of rounds."""
    group = FlagGroup(values, "Participation")
    for name, meaning in _LEDGER_FILES.items():
        group.path(name, meaning)
    for name, meaning in _LEDGER_INTEGERS.items():
        group.integer(name, meaning, lower_bound=1)
    for name, meaning in _LEDGER_NUMBERS.items():
        group.number(name, meaning)


def _define_statement(values: flags.FlagValues) -> None:
    """Defines the flags of statements."""
    group = FlagGroup(values, "Statement")
    group.path(
        "statement",
        "A .md file to write, the privacy statement of any run, with a .json file of its data "
        f"beside it. Needs --ledger or --round_times, and --{', --'.join(_REQUIRED)}.",
    )
    group.integer("population", "The number of clients from which cohorts were selected.")
    group.number("clip_norm", "The L2 norm that each update was clipped to.")
    for name, meaning in _WORDS.items():
        group.string(name, meaning)
    group.choice("secure_aggregation", ("yes", "no"), "Whether the server saw only sums.")
    group.choice("finished", ("yes", "no"), "Whether no further round will follow.")
    group.repeated_paths(_EVIDENCE, "Another file to list with its SHA-256: the final model, say.")
    group.string(
        _OTHERS,
        "Other runs on the same clients, to compose with: a .json of pairs, events or statements "
        "(docs/statements.md), or directories of runs or of Mechanism.save, separated by commas.",
    )
    group.path(
        "verify",
        "A statement to verify: one of --statement, or the PRIVACY.md of a run. It is made again "
        "from the files that it names, and compared. The exit status is 1 if anything differs.",
    )
    group.path(
        "registry",
        "With --statement or --verify: a .yaml file to write, a draft of the statement's record "
        "for OpenDP's registry of deployments of differential privacy, for a person to complete.",
    )


@inputs.limited_memory()
def _main(values: flags.FlagValues) -> int:
    """Reads, computes and reports; returns the exit status."""
    if values.verify is not None:
        return _verify(values)
    _check_flags(values)
    start = time.monotonic()
    report = Report.read(values)
    fields, said = report.fields(), report.paragraphs()
    if values.figure is not None:
        report.draw(values.figure)
        fields["figure"] = values.figure
    if values.statement is not None and report.found is not None:
        data = _data_file(values.statement)
        _statement(values, report, data.parent).write(values.statement, data)
        fields |= {"statement": values.statement, "statement_data": str(data)}
        fields |= registry.write(values, data)
    fields["seconds"] = time.monotonic() - start
    warnings = [each for each in said if each.startswith("WARNING")]
    table = command_line.table(list(fields.items()))
    text = "\n\n".join([*warnings, table, *said[len(warnings) :]])
    command_line.print_result(values, fields, text)
    return command_line.REFUTED if report.is_broken else command_line.DONE


def _verify(values: flags.FlagValues) -> int:
    """Makes a statement again from its files, compares it, and returns the exit status."""
    given = ", ".join(f"--{x}" for x in values if values[x].present and x not in _WITH_VERIFY)
    check_choice(not given, f"--verify takes all else from the statement: leave out {given}.")
    is_text = values.verify.endswith(".md")
    check_choice(is_text, f"--verify must name a .md file, found {values.verify}.")
    if values.registry is not None:
        command_line.check_output(values.registry, "registry", values.overwrite, ending=".yaml")
    with command_line.naming("verify"):
        fields, text = verify(values.verify)
    if fields["is_verified"]:
        fields |= registry.write(values, _data_of(values.verify))
    command_line.print_result(values, fields, text)
    return command_line.DONE if fields["is_verified"] else command_line.REFUTED


def _check_flags(values: flags.FlagValues, *, writes: bool = True) -> None:
    is_given = {name: values[name].value not in (None, []) for name in values}
    needs = {**_NEEDS, **dict.fromkeys(_FACTS, ("statement", "which contains it"))}
    for name, (other, why) in needs.items():
        has_other = is_given[other.partition(" ")[0]]
        check_choice(has_other or not is_given[name], f"--{name} needs --{other}, {why}.")
    check_choice(
        not is_given["released_rounds"]
        or (is_given["ledger"] and not values.ledger.lower().endswith(".npz")),
        "--released_rounds needs a --ledger in text: an archive has its own number of rounds.",
    )
    took_place = " and --".join(each for each in ("ledger", "round_times") if is_given[each])
    check_choice(" " not in took_place, f"--{took_place} exclude each other: give one of them.")
    # A target would give the noise that reaches it, not the noise that the run had.
    targets = [each for each in ("target_epsilon", "target_rho") if is_given[each]]
    check_choice(
        not targets or not took_place,
        f"--{took_place} describes a run that took place: give the noise of that run, by "
        f"--noise_multiplier or {report_contents.HAS_NOISE}, in place of --{''.join(targets[:1])}.",
    )
    if is_given["figure"]:
        command_line.check_extra("--figure", ("matplotlib",))
    _check_statement(values)
    written = {name: [values[name].value] for name in _ENDINGS if is_given[name]}
    if is_given["statement"]:
        written["statement"].append(_data_file(values.statement))
    for name, paths in written.items() if writes else ():
        for path, ending in zip(paths, _ENDINGS[name], strict=True):
            command_line.check_output(path, name, values.overwrite, values.checkpoint, ending)
    others = _others(values, pathlib.Path())
    read = _paths(values) | {_OTHERS: [] if others is None else [*others.files]}
    command_line.check_distinct(written, read)


def _check_statement(values: flags.FlagValues) -> None:
    """Checks the flags of a statement before anything is computed for it."""
    if values.statement is None:
        return
    missing = [f"--{name}" for name in _REQUIRED if values[name].value in (None, "")]
    if values.ledger is None and values.round_times is None:
        missing.insert(0, "--ledger or --round_times")
    check_choice(
        not missing, f"--statement needs {', '.join(missing)}: these facts have no default."
    )
    numbers.positive_number(values.clip_norm, "--clip_norm")
    _facts(values)
    for name, paths in _paths(values).items():
        for path in paths:
            # A pipe can be read only once, so the statement could not be made again from it.
            is_kept = os.path.isfile(path) or (name == "checkpoint" and os.path.isdir(path))
            check_choice(is_kept, f"--{name}={path} is not a regular file.")
    for path in values[_EVIDENCE].value:
        check_choice(
            values.sampling_seed is not None or not ledgers.is_of_drawn_clients(path),
            f"--{_EVIDENCE}={path} is the ledger of a run with sampled clients, and its hash could "
            "confirm a guess of the draws: leave it out, or name the run by --other_runs.",
        )


def verify(path: str) -> tuple[dict[str, object], str]:
    """Makes a statement again from its files, and compares it with the given one.

    Args:
      path: The Markdown file.

    Returns:
      The fields of the report, and the report in words.

    Raises:
      CommandError: If the statement cannot be read.
    """
    file, document = pathlib.Path(path), statement_file.read(_data_of(path))
    folder = file.parent
    differing, notes = stated_runs.differences(document, folder), []
    if not differing:
        statement, differing = _made_again(document, folder)
        statement = dataclasses.replace(statement, date=inputs.part(document, str, "date"))
        found = statement_file.compare(document, statement.to_dict(), statement.proved)
        differing, notes = [*differing, *found[0]], found[1]
    # If the data do not follow from the files, the text is not compared.
    if not differing and file.read_bytes() != statement_file.render(document).encode():
        differing.append(f"{path} is not the text that follows from its data.")
    told = statement_file.told(document)
    fields = {"statement": path, "is_verified": not differing, "notes": notes}
    fields |= {"differences": differing, "told": told}
    verdict = "follows from its files: text and data were made again."
    result = f"{path} {'does NOT follow from its files:' if differing else verdict}"
    lines = [f"- {name}: {value}" for name, value in told.items() if value not in (None, "")]
    words = "The following was stated by people or clocks, and cannot be checked:"
    return fields, "\n".join([*notes, result, *(f"- {e}" for e in differing), words, *lines])


def _data_of(path: str) -> pathlib.Path:
    """The path of a statement's JSON file."""
    file = _data_file(path)
    of_run = file.with_name(STATEMENT_FILE)
    return of_run if not file.exists() and of_run.exists() else file


def _made_again(document: dict[str, object], folder: pathlib.Path) -> tuple[Statement, list[str]]:
    """The statement that follows from a document's files, and contradictions between the files."""
    try:
        if document["flags"] is None:
            is_kept = inputs.part(document, bool, "has_run_directory")
            check_choice(is_kept, "the statement was made in Python, and names no files to check.")
            return stated_runs.made_again(folder, document)
        values = command_line.flags_of(_define_flags)
        values(["mf-report", *_arguments(document["flags"], folder)], known_only=False)
        check_choice(values.checkpoint is not None, "the flags of the statement lack --checkpoint.")
        _check_flags(values, writes=False)
        report = Report.read(values)
        check_choice(report.found is not None, "the statement's ledger or noise is missing.")
        return _statement(values, report, folder), []
    except (AttributeError, KeyError, TypeError, OverflowError, OSError) as error:
        said = f"{folder} lacks a file or an entry from which the statement was made: {error}."
        raise CommandError(said) from error


def _statement(values: flags.FlagValues, report: Report, folder: pathlib.Path) -> Statement:
    assert report.found is not None
    own_seed = None if values.sampling_seed is None else pathlib.Path(values.sampling_seed)
    others, observed = _others(values, folder), report.found.observed
    name, num_alike = statements.name_of(observed.mechanism), observed.num_alike_names
    facts = dataclasses.replace(_facts(values), mechanism=name, num_alike_names=num_alike)
    planned = observed.mechanism.statement(facts, values.delta, plan=report.found.plan)
    statement = observed.completed(planned)
    if others is not None:
        statement = others.in_statement(statement)
    files = stated_runs.hashed(_files(values, others), folder, own_seed)
    given, counts = _flags_of(values, folder), "the counts of the server"
    evidence, today = Evidence(*files, flags=given, counts=counts), statements.today()
    stated = tuple(each for each in report.units.values() if each is not None)
    return dataclasses.replace(statement, units=stated, evidence=evidence, date=today)


def _facts(values: flags.FlagValues) -> RunFacts:
    """The facts that the user gave by flags."""
    return RunFacts(
        mechanism="",
        population=values.population,
        clients_per_round=values.clients_per_round,
        clip=values.clip_norm,
        # Texts alone.
        **{name: values[name].value or "" for name in WORDS},  # type: ignore[arg-type]
        secure_sums=_YES_OR_NO[values.secure_aggregation],
        is_finished=_YES_OR_NO[values.finished],
        simulation=(values.simulation,) if values.simulation else (),
    )


def _others(values: flags.FlagValues, folder: pathlib.Path) -> stated_runs.Others | None:
    seed = None if values.sampling_seed is None else pathlib.Path(values.sampling_seed)
    return stated_runs.Others.named(values[_OTHERS].value, folder, values.delta, seed)


def _paths(values: flags.FlagValues) -> dict[str, list[str | pathlib.Path]]:
    """The paths that the user gave, by flag."""
    given = {name: values[name].value for name in _PATHS if values[name].value is not None}
    return {**{name: [path] for name, path in given.items()}, _EVIDENCE: values[_EVIDENCE].value}


def _files(values: flags.FlagValues, others: stated_runs.Others | None) -> Iterator[pathlib.Path]:
    for name, paths in _paths(values).items():
        for path in map(pathlib.Path, paths):
            if path.is_dir():
                yield from stated_runs.files_of(path)
            elif name != "sampling_seed":
                yield path
    yield from () if others is None else others.files


def _flags_of(values: flags.FlagValues, folder: pathlib.Path) -> dict[str, object]:
    """The flags that make a statement again, with paths relative to the statement's folder."""
    found: dict[str, object] = {}
    for name in sorted(values):
        value = values[name].value
        # The guarantee depends on the default of delta, so it is written down as well.
        is_given = values[name].present or name == "delta"
        if name in _OF_OUTPUT or not is_given or value in (None, []):
            continue
        if name == _OTHERS:
            value = stated_runs.directories_of(value) or [value]
        if isinstance(value, list):
            found[name] = [os.path.relpath(each, folder) for each in value]
        else:
            found[name] = os.path.relpath(value, folder) if name in _PATHS else str(value)
    return found


def _arguments(given: object, folder: pathlib.Path) -> list[str]:
    """The flags of a statement as arguments of the command line."""
    words = []
    for name, value in inputs.part(given, dict).items():
        check_choice(
            name not in _OF_OUTPUT and isinstance(value, list) == (name in (_EVIDENCE, _OTHERS)),
            f"the flags of a statement cannot have --{name} as {numbers.shown(value)}.",
        )
        texts = value if isinstance(value, list) else [value]
        if name in (*_PATHS, _EVIDENCE, _OTHERS):
            texts = [str(folder / each) for each in texts]
        # Each other flag is given once, with its values separated by commas.
        texts = texts if name == _EVIDENCE else [",".join(texts)]
        words += [f"--{name}={each}" for each in texts]
    # The path passes the checks of _check_flags; no file is written there.
    return [*words, f"--statement={folder / 'statement.md'}"]


def _data_file(path: str) -> pathlib.Path:
    return pathlib.Path(path).with_suffix(".json")


def run(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status.

    Args:
      argv: The command line with the program's name first; that of the process by default.
    """
    return command_line.run(__doc__ or "", _define_flags, _main, argv)


if __name__ == "__main__":
    sys.exit(run())
