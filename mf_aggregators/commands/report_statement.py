"""The privacy statement that mf-report writes of a run, and how it is made again.

A statement is a Markdown file with a JSON file beside it. That holds the numbers, the SHA-256 of
every file that they were made from, and the flags that make both again.
"""

import dataclasses
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from absl import flags

from mf_aggregators.checkpoints import STATEMENT_FILE
from mf_aggregators.commands import command_line, stated_runs
from mf_aggregators.commands.command_line import CommandError, FlagGroup, check_choice
from mf_aggregators.commands.report_contents import LedgerReport
from mf_aggregators.kernel import numbers
from mf_aggregators.privacy import ledgers, own_runs, statement_file, statements
from mf_aggregators.privacy.statements import WORDS, Evidence, RunFacts, Statement

# Facts that every statement needs from the user.
_REQUIRED = ("public_data", "enforcement", "population", "clients_per_round", "clip_norm")
# The flags that name files which a statement is made from.
_PATHS = (
    *("checkpoint", "ledger", "round_times", "round_counts", "sampling_seed"),
    *("learning_rates", "first_column"),
)
_EVIDENCE, _OTHER_RUNS = "evidence", "other_runs"
_YES_OR_NO: Mapping[str | None, bool | None] = {"yes": True, "no": False, None: None}
# Words that a statement repeats as they are, with the help of their flags.
_WORDS: Mapping[str, str] = {
    "public_data": "What was used besides the clients' data, in a few words, as none, or what the "
    "model was pre-trained on.",
    "enforcement": "What made clients keep to the participation of the plan, as a sentence. What "
    "nobody checked is not to be asserted.",
    "responsible": "Who answers for the run.",
    "signer": "The name under which the statement is signed, as the list of signers has it.",
    "model": "The model and its version.",
    "period": "The first and the last day of the run.",
    "custody": "Who holds the noise seed, the state of the run and the ledger, and when they are "
    "destroyed, as a sentence.",
    "simulation": "What was simulated, as a sentence. Default: it is the statement of a real run.",
}
# Flags that only a statement has.
_FACTS = (
    *("population", "clip_norm", *_WORDS, "secure_aggregation", "finished"),
    *(_EVIDENCE, _OTHER_RUNS),
)
# Flags that a statement does not depend on.
_OF_OUTPUT = frozenset(
    {"statement", "verify", "figure", "registry", "overwrite", "format"}
    | {"name_clients", "flagfile", "id_window", "people"}
)
# The end of a refusal of a file.
_DRAWN = (
    "is the ledger of a run whose clients were drawn, and its hash would confirm a guess of who "
    "they were: leave it out, or name that run by --other_runs."
)


def define_flags(values: flags.FlagValues) -> None:
    """Defines the flags of statements.

    Args:
      values: Where they are defined.
    """
    group = FlagGroup(values, "Statement")
    group.path(
        "statement",
        "A .md file to write: the privacy statement of a run that was trained anywhere, by its "
        "--ledger or its --round_times. The same as data, with the SHA-256 of all files, goes into "
        "a .json file beside it. Needs --public_data, --enforcement, --population, "
        "--clients_per_round and --clip_norm: nobody but you knows them.",
    )
    group.integer("population", "The number of clients that cohorts were drawn from.")
    group.number("clip_norm", "The L2 norm that each update was clipped to.")
    for name, meaning in _WORDS.items():
        group.string(name, meaning)
    group.choice(
        "secure_aggregation", ("yes", "no"), "Whether the server saw sums of updates alone."
    )
    group.choice("finished", ("yes", "no"), "Whether the run has ended for good.")
    group.repeated_paths(
        _EVIDENCE,
        "A further file whose SHA-256 the statement lists, as a configuration or the final model.",
    )
    group.string(
        _OTHER_RUNS,
        "Other runs on the same clients: a .json with pairs of epsilon and delta, events of "
        "dp-accounting or statements (docs/composition.md); or directories of training runs or of "
        "Mechanism.save, with commas between. The statement has the guarantee of all together.",
    )
    group.path(
        "verify",
        "A statement that --statement wrote, with its .json file beside it, or the PRIVACY.md of a "
        "training run in its directory. Both files are made again from the files that they name, "
        "and compared. Exit status 1 if anything differs.",
    )
    group.path(
        "registry",
        "A .yaml file to write, with --statement or --verify: a draft of a record of the statement "
        "for OpenDP's registry of deployments of differential privacy. A person completes it.",
    )


def check_flags(values: flags.FlagValues, *, writes: bool = True) -> None:
    """Checks the flags of a statement before anything is computed for it.

    Args:
      values: The parsed flags of mf-report.
      writes: Whether it is written, and not made again for a comparison.

    Raises:
      CommandError: If one is missing, or what is to be written cannot be.
      ValueError: If a number is out of its range.
    """
    if values.statement is None:
        given = [name for name in _FACTS if values[name].value not in (None, [])]
        check_choice(not given, f"--{given[0] if given else ''} needs --statement, which it is in.")
        return
    missing = [f"--{name}" for name in _REQUIRED if values[name].value in (None, "")]
    if values.ledger is None and values.round_times is None:
        missing.insert(0, "--ledger or --round_times")
    check_choice(
        not missing, f"--statement needs {', '.join(missing)}: what nobody said is not asserted."
    )
    check_choice(
        values.statement.endswith(".md"), f"--statement must name a .md file: {values.statement}."
    )
    for name in _WORDS:
        stated_runs.check_words(values[name].value, name)
    numbers.positive_number(values.clip_norm, "--clip_norm")
    _facts(values)
    for path in files_written(values) if writes else ():
        command_line.check_output(path, "statement", values.overwrite, values.checkpoint)
    for name, paths in _paths(values).items():
        for path in paths:
            # A pipe can be read once: a statement could not be made from it again.
            is_kept = os.path.isfile(path) or (name == "checkpoint" and os.path.isdir(path))
            check_choice(
                is_kept or (name != _EVIDENCE and not os.path.exists(path)),
                f"--{name}={path} is no file.",
            )
    for path in values[_EVIDENCE].value:
        check_choice(
            values.sampling_seed is not None or not ledgers.is_of_drawn_clients(path),
            f"--{_EVIDENCE}={path} {_DRAWN}",
        )
    _others(values, pathlib.Path())


def files_written(values: flags.FlagValues) -> tuple[str | pathlib.Path, ...]:
    """Returns the files that a statement is written to.

    Args:
      values: The parsed flags of mf-report.
    """
    return () if values.statement is None else (values.statement, _data_file(values.statement))


def files_read(values: flags.FlagValues) -> dict[str, list[str | pathlib.Path]]:
    """Returns the files that a report is made from, by the flag that names them.

    Args:
      values: The parsed flags of mf-report, with a checkpoint.
    """
    others = _others(values, pathlib.Path())
    return {**_paths(values), _OTHER_RUNS: [] if others is None else [*others.files]}


def write(values: flags.FlagValues, found: LedgerReport, factorization: str) -> dict[str, Any]:
    """Writes a statement and its JSON form.

    Args:
      values: The parsed and checked flags of mf-report.
      found: What follows from the ledger.
      factorization: The name of what makes the noise.

    Returns:
      The fields of the report that name what was written.

    Raises:
      OSError: If a file cannot be read or written.
    """
    path, data = values.statement, _data_file(values.statement)
    statement = _statement(values, found, factorization, pathlib.Path(path).parent)
    statement_file.write(statement.to_dict(), path, data)
    return {"statement": path, "statement_data": str(data)}


def verify(
    path: str, made_again: Callable[[list[str]], tuple[flags.FlagValues, LedgerReport, str]]
) -> tuple[dict[str, Any], str]:
    """Makes a statement again from its files, and compares.

    Args:
      path: The Markdown file.
      made_again: Computes what a list of flags of mf-report asks for: the parsed flags, what
        follows from the ledger, and the name of what makes the noise.

    Returns:
      The fields of the report, and the report in words.

    Raises:
      CommandError: If the statement cannot be read.
    """
    folder, document = pathlib.Path(path).parent, statement_file.read(data_of(path))
    differing, notes = stated_runs.differences(document, folder), []
    if not differing:
        statement, differing = _made_again(document, folder, made_again)
        statement = dataclasses.replace(statement, date=document["date"])
        worst = document["worst_client"]
        # Which client was protected least is named if its run was asked to.
        is_named = worst is not None and worst["client_id"] is not None
        found = statement_file.compare(document, statement, name_clients=is_named)
        differing, notes = [*differing, *found[0]], found[1]
    # Data that do not follow from files need not have a text.
    if not differing and _text(path) != statement_file.render(document).encode():
        differing.append(f"{path} is not the text that its data give.")
    told = statement_file.told(document)
    fields = {
        "statement": path,
        "is_verified": not differing,
        "notes": notes,
        "differences": differing,
        "told": told,
    }
    result = (
        f"{path} does NOT follow from its files:"
        if differing
        else (f"{path} follows from its files: text and data were made again.")
    )
    lines = [f"- {name}: {value}" for name, value in told.items() if value]
    words = "Nothing can check what people and clocks have said:"
    return fields, "\n".join([*notes, result, *(f"- {e}" for e in differing), words, *lines])


def data_of(path: str) -> pathlib.Path:
    """Returns the JSON file of a statement.

    Args:
      path: The Markdown file.
    """
    file = _data_file(path)
    of_run = file.with_name(STATEMENT_FILE)
    return of_run if not file.exists() and of_run.exists() else file


def _made_again(
    document: Mapping[str, Any],
    folder: pathlib.Path,
    made_again: Callable[[list[str]], tuple[flags.FlagValues, LedgerReport, str]],
) -> tuple[Statement, list[str]]:
    if document["flags"] is not None:
        values, found, factorization = made_again(_arguments(document["flags"], folder))
        return _statement(values, found, factorization, folder), []
    try:
        return stated_runs.made_again(folder, document)
    except (AttributeError, KeyError, TypeError, OverflowError, OSError) as error:
        raise CommandError(
            f"{folder} does not have what a training run of this version writes: {error}."
        ) from error


def _statement(
    values: flags.FlagValues, found: LedgerReport, factorization: str, folder: pathlib.Path
) -> Statement:
    own_seed = None if values.sampling_seed is None else pathlib.Path(values.sampling_seed)
    others = _others(values, folder)
    facts = dataclasses.replace(
        _facts(values),
        mechanism=own_runs.in_words(factorization, found.plan.num_rounds),
        num_alike_names=found.observed.num_alike_names,
    )
    planned = found.observed.mechanism.statement(facts, values.delta, plan=found.plan)
    statement = found.observed.completed(planned)
    if others is not None:
        statement = others.in_statement(statement)
    made_from = Evidence(
        *stated_runs.hashed(_files(values, others), folder, own_seed),
        flags=_flags_of(values, folder),
        counts="the counts of the server",
    )
    return dataclasses.replace(statement, evidence=made_from, date=statements.today())


def _facts(values: flags.FlagValues) -> RunFacts:
    """The facts that flags tell."""
    words: dict[str, Any] = {name: values[name].value or "" for name in WORDS}
    return RunFacts(
        mechanism="",
        population=values.population,
        clients_per_round=values.clients_per_round,
        clip=values.clip_norm,
        **words,
        secure_sums=_YES_OR_NO[values.secure_aggregation],
        is_finished=_YES_OR_NO[values.finished],
        simulation=(values.simulation,) if values.simulation else (),
    )


def _others(values: flags.FlagValues, folder: pathlib.Path) -> stated_runs.Others | None:
    seed = None if values.sampling_seed is None else pathlib.Path(values.sampling_seed)
    return stated_runs.others_of(values[_OTHER_RUNS].value, folder, values.delta, seed)


def _paths(values: flags.FlagValues) -> dict[str, list[str | pathlib.Path]]:
    """The paths that flags name, by the flag."""
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


def _flags_of(values: flags.FlagValues, folder: pathlib.Path) -> dict[str, Any]:
    """The flags that make a statement again; paths are from its folder."""
    found: dict[str, Any] = {}
    for name in sorted(values):
        flag = values[name]
        # A default that has a say in the guarantee is written down as well.
        is_given = flag.present or name == "delta"
        if name in _OF_OUTPUT or not is_given or flag.value in (None, []):
            continue
        if name == _EVIDENCE:
            found[name] = [os.path.relpath(each, folder) for each in flag.value]
        elif name == _OTHER_RUNS:
            paths = stated_runs.directories_of(flag.value) or [flag.value]
            found[name] = [os.path.relpath(each, folder) for each in paths]
        elif name in _PATHS:
            found[name] = os.path.relpath(flag.value, folder)
        else:
            found[name] = str(flag.value)
    return found


def _arguments(given: Mapping[str, Any], folder: pathlib.Path) -> list[str]:
    """The flags of a statement as a command takes them."""
    words = []
    for name, value in given.items():
        check_choice(
            name not in _OF_OUTPUT
            and isinstance(value, list) == (name in (_EVIDENCE, _OTHER_RUNS)),
            f"the flags of a statement cannot have --{name} as {numbers.shown(value)}.",
        )
        if name == _EVIDENCE:
            words += [f"--{name}={folder / each}" for each in value]
        elif name == _OTHER_RUNS:
            words.append(f"--{name}={','.join(str(folder / each) for each in value)}")
        elif name in _PATHS:
            words.append(f"--{name}={folder / value}")
        else:
            words.append(f"--{name}={value}")
    # All that check_flags asks for, and no file is written.
    return [*words, f"--statement={folder / 'statement.md'}"]


def _text(path: str) -> bytes:
    try:
        return pathlib.Path(path).read_bytes()
    except OSError as error:
        raise CommandError(f"{path} cannot be read: {error.strerror}.") from error


def _data_file(path: str) -> pathlib.Path:
    return pathlib.Path(path).with_suffix(".json")
