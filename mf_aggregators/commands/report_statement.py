"""The privacy statement that mf-report writes of a run, and how it is verified.

A statement is a Markdown file with a JSON file beside it. That holds the numbers, the SHA-256 of
every file that they were made from, and the flags that make both again: whoever has the files finds
out whether one letter of the statement is another.
"""

import hashlib
import json
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from absl import flags

from mf_aggregators import atomic_files, inputs
from mf_aggregators.audit import one_run
from mf_aggregators.checkpoints import STATEMENT_FILE
from mf_aggregators.commands import evidence, facts_of_runs, output_paths, stated_runs
from mf_aggregators.commands.command_line import CommandError, FlagGroup, check_choice
from mf_aggregators.commands.report_contents import LedgerReport
from mf_aggregators.kernel import numbers
from mf_aggregators.privacy import ledgers
from mf_aggregators.privacy.provenance import Provenance
from mf_aggregators.privacy.statement import PrivacyStatement, RunFacts

# Of the JSON file. A change that older programs cannot read raises it.
FORMAT = 1

# What a statement cannot do without. Nobody but the user knows it.
_REQUIRED = ("public_data", "enforcement", "population", "clients_per_round", "clip_norm")
# The flags that make a statement, by whether they are paths.
_PATHS = (
    *("checkpoint", "ledger", "round_counts", "round_times", "sampling_seed"),
    *("learning_rates", "first_column"),
)
_REPEATED = "evidence"
# What a statement repeats as it is.
_WORDS = ("public_data", "enforcement", "responsible", "model", "period", "custody")
# Directories with commas between them.
_OTHER_RUNS = "other_runs"
# What is in a statement alone.
_FACTS = (*("population", "clip_norm", *_WORDS, "secure_aggregation", _REPEATED, _OTHER_RUNS),)
# The flags that have no part in it.
_OF_OUTPUT = frozenset(
    {"statement", "verify", "figure", "trade_off", "report", "overwrite", "format"}
    | {"name_clients", "flagfile"}
)
_YES, _NO = "yes", "no"
# Said of a file that no statement may list.
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
    group.string(
        "public_data",
        "What was used besides the clients' data, in a few words, as none, or what the model was "
        "pre-trained on.",
    )
    group.string(
        "enforcement",
        "What made clients keep to the participation of the plan, as a sentence. What nobody "
        "checked is not to be asserted.",
    )
    group.integer("population", "The number of clients that cohorts were drawn from.")
    group.number("clip_norm", "The L2 norm that each update was clipped to.")
    group.string("responsible", "Who answers for the run.")
    group.string("model", "The model and its version.")
    group.string("period", "The first and the last day of the run.")
    group.string(
        "custody",
        "Who holds the noise seed, the state of the run and the ledger, and when they are "
        "destroyed, as a sentence.",
    )
    group.choice("secure_aggregation", (_YES, _NO), "Whether the server saw sums of updates alone.")
    group.repeated_paths(
        _REPEATED,
        "A further file whose SHA-256 the statement lists, as a configuration or the final model.",
    )
    group.string(_OTHER_RUNS, stated_runs.MEANING_OF_OTHER_RUNS)
    group.path(
        "verify",
        "A statement that --statement wrote, with its .json file beside it, or the PRIVACY.md of a "
        "training run in its directory: every hash and every number is made again from the files "
        "and compared. Exit status 1 if anything differs.",
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
    numbers.positive_integer(values.population, "--population")
    numbers.positive_number(values.clip_norm, "--clip_norm")
    check_choice(
        values.clients_per_round <= values.population,
        f"--clients_per_round={values.clients_per_round} is more than "
        f"--population={values.population}.",
    )
    for path in files_written(values) if writes else ():
        output_paths.check_parent(path, "statement")
        output_paths.check_apart(path, "statement", values.checkpoint)
        output_paths.check_file(path, "statement", values.overwrite)
    for path in values[_REPEATED].value:
        check_choice(os.path.isfile(path), f"--{_REPEATED}={path} is no file.")
        check_choice(
            values.sampling_seed is not None or not ledgers.is_of_drawn_clients(path),
            f"--{_REPEATED}={path} {_DRAWN}",
        )
    others = stated_runs.other_runs(values[_OTHER_RUNS].value)
    stated_runs.events_of(others, values.delta, _seed_file(values))


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
    named: dict[str, list[str | pathlib.Path]] = {
        name: [values[name].value] for name in _PATHS if values[name].value is not None
    }
    others = stated_runs.other_runs(values[_OTHER_RUNS].value)
    return {
        **named,
        _REPEATED: values[_REPEATED].value,
        _OTHER_RUNS: [file for each in others for file in stated_runs.files_of(each)],
    }


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
    statement = _statement(
        values, found, factorization, pathlib.Path(values.statement).parent, evidence.today()
    )
    markdown = statement.to_markdown()
    data = {
        "format": FORMAT,
        "flags": _flags_of(values, pathlib.Path(values.statement).parent),
        "markdown_sha256": hashlib.sha256(markdown.encode()).hexdigest(),
        "statement": statement.to_dict(),
    }
    atomic_files.write_text(values.statement, markdown)
    atomic_files.write_text(_data_file(values.statement), json.dumps(data, indent=2) + "\n")
    return {"statement": values.statement, "statement_data": str(_data_file(values.statement))}


def verify(
    path: str, made_again: Callable[[list[str]], tuple[flags.FlagValues, LedgerReport, str]]
) -> list[str]:
    """Returns what differs between a statement and what its files give.

    Args:
      path: The Markdown file.
      made_again: Computes what a list of flags of mf-report asks for: the parsed flags, what
        follows from the ledger, and the name of what makes the noise.

    Returns:
      Sentences; empty if every hash, number and letter is the same.

    Raises:
      CommandError: If the statement cannot be read.
    """
    folder = pathlib.Path(path).parent
    if _is_of_run_directory(path):
        return _differences_of_run(path)
    data = _read(path)
    stated = _provenance(data["statement"], _data_file(path))
    differing = evidence.differences(stated, folder)
    if hashlib.sha256(_text(path).encode()).hexdigest() != data["markdown_sha256"]:
        differing.append(f"{path} is not the text that was written.")
    if differing:
        return differing
    values, found, factorization = made_again(_arguments(data["flags"], folder))
    statement = _statement(values, found, factorization, folder, stated.date)
    return _differing_statements(path, data["statement"], statement)


def _is_of_run_directory(path: str) -> bool:
    """Whether a training run wrote a statement, whose data has another name."""
    beside = pathlib.Path(path).parent / STATEMENT_FILE
    return not _data_file(path).exists() and beside.exists()


def _differences_of_run(path: str) -> list[str]:
    """What differs between the statement of a run directory and what its files give."""
    folder = pathlib.Path(path).parent
    file = folder / STATEMENT_FILE
    contents = _parsed(file)
    canaries, audit = contents.pop("audit_canaries", None), contents.pop("audit", None)
    try:
        differing = evidence.differences(_provenance(contents, file), folder)
        if differing:
            return differing
        statement = stated_runs.made_again(folder, contents)
        differing = stated_runs.contradictions(folder, contents, statement)
        more, of_audit = _of_audit(canaries, audit)
        # Which client was protected least is named if its run was asked to.
        worst = contents["worst_client"]
        has_name = worst is not None and "client_id" in worst
        return [
            *differing,
            *of_audit,
            *_differing_statements(path, contents, statement, name_clients=has_name, more=more),
        ]
    except (AttributeError, KeyError, TypeError, OverflowError) as error:
        raise CommandError(f"{file} is not what a training run of this version writes.") from error


def _of_audit(canaries: int | None, audit: Mapping[str, Any] | None) -> tuple[str, list[str]]:
    """What a statement says of canaries, and which numbers of them contradict one another.

    What was released along canaries is not read again here.
    """
    if canaries is None:
        return "", []
    found = None if audit is None else one_run.RunAudit.from_dict(audit)
    again = None if found is None else found.to_dict()
    differing = [
        f"{name} of the audit is {earlier!r} in the statement, and {now!r} by its other numbers."
        for name, earlier, now in stated_runs.differences(audit, again)
    ]
    return one_run.point_of_statement(canaries, found), differing


def _differing_statements(
    path: str,
    before: Mapping[str, Any],
    statement: PrivacyStatement,
    *,
    name_clients: bool = False,
    more: str = "",
) -> list[str]:
    """What differs between the data and the text of a statement and one that was made again.

    Args:
      path: The text.
      before: The data.
      statement: The one that was made again.
      name_clients: Whether it names the client that was protected least.
      more: What follows its text.
    """
    again = inputs.parsed_json(json.dumps(statement.to_dict(name_clients=name_clients)))
    differing = []
    version = before.get("library_version")
    if again["library_version"] != version:
        differing.append(
            f"it was made by version {version}, and this is {again['library_version']}."
        )
    differing += [
        f"{name} is {earlier!r} in the statement, and {now!r} by its files."
        for name, earlier, now in stated_runs.differences(dict(before), again)
        if name != "library_version"
    ]
    # The kernel compares the epsilons once more.
    for name, guarantee in () if differing else statement.named_guarantees.items():
        guarantee.prove(before[name]["epsilon"])
    # Data have texts without their line ends.
    if not differing and (statement.to_markdown() + more).split() != _text(path).split():
        differing.append(f"{path} is not the text that its numbers give.")
    return differing


def _provenance(contents: Mapping[str, Any], file: pathlib.Path) -> Provenance:
    """What a statement says of its files, or a line about what is none."""
    try:
        return Provenance.from_dict(contents["provenance"])
    except (AttributeError, KeyError, TypeError) as error:
        raise CommandError(
            f"{file} is not what this version of mf-report --statement or a run writes."
        ) from error


def _statement(
    values: flags.FlagValues,
    found: LedgerReport,
    factorization: str,
    folder: pathlib.Path,
    date: str,
) -> PrivacyStatement:
    secure = values.secure_aggregation
    ledger = found.observed.ledger
    others = stated_runs.other_runs(values[_OTHER_RUNS].value)
    listed = [*_files(values), *(file for each in others for file in stated_runs.files_of(each))]
    secret: tuple[tuple[str, str], ...] = ()
    secrets: tuple[pathlib.Path, ...] = ()
    # Who was drawn is a secret, in other runs as well, and so is what would confirm a guess of it.
    drawn = [file for file in listed if ledgers.is_of_drawn_clients(file)]
    if ledger is not None and ledger.sampling is not None:
        secrets = (pathlib.Path(values.ledger), pathlib.Path(values.sampling_seed))
        secret = evidence.hashes(secrets[:1], folder, secrets[1])
        secret += evidence.hashes(drawn, folder, secrets[1], secrets=secrets)
    elif drawn:
        raise CommandError(f"{drawn[0]} {_DRAWN}")
    listed = [file for file in listed if file not in drawn]
    facts = RunFacts(
        mechanism=facts_of_runs.in_words(factorization, found.plan.num_rounds),
        num_clients=values.population,
        clients_per_round=values.clients_per_round,
        clip_norm=values.clip_norm,
        noise_seed_is_fixed=False,
        public_data=values.public_data,
        enforcement=values.enforcement,
        num_alike_names=found.observed.num_alike_names,
        provenance=Provenance(
            responsible=values.responsible or "",
            model=values.model or "",
            period=values.period or "",
            custody=values.custody or "",
            secure_aggregation=None if secure is None else secure == _YES,
            files=(*evidence.hashes(listed, folder, secrets=secrets), *secret),
            date=date,
            secret_files=tuple(name for name, _ in secret),
            key_file=os.path.relpath(values.sampling_seed, folder) if secret else "",
        ),
    )
    mechanism = found.observed.mechanism
    planned = mechanism.statement(facts, values.delta, plan=found.plan)
    statement = found.observed.completed(planned)
    return stated_runs.with_other_runs(statement, others, folder, _seed_file(values))


def _seed_file(values: flags.FlagValues) -> pathlib.Path | None:
    return None if values.sampling_seed is None else pathlib.Path(values.sampling_seed)


def _files(values: flags.FlagValues) -> Iterator[pathlib.Path]:
    for name in _PATHS:
        if name in values and values[name].value:
            path = pathlib.Path(values[name].value)
            if path.is_dir():
                yield from stated_runs.files_of(path)
            elif path.is_file():
                yield path
    yield from map(pathlib.Path, values[_REPEATED].value)


def _flags_of(values: flags.FlagValues, folder: pathlib.Path) -> dict[str, Any]:
    """The flags that make a statement again; paths are from its folder."""
    found: dict[str, Any] = {}
    for name in values:
        flag = values[name]
        if name in _OF_OUTPUT or not flag.present or flag.value in (None, []):
            continue
        if name == _REPEATED:
            found[name] = [os.path.relpath(each, folder) for each in flag.value]
        elif name == _OTHER_RUNS:
            found[name] = [
                os.path.relpath(each, folder) for each in stated_runs.other_runs(flag.value)
            ]
        elif name in _PATHS:
            found[name] = os.path.relpath(flag.value, folder)
        else:
            found[name] = flag.value
    return dict(sorted(found.items()))


def _arguments(given: Mapping[str, Any], folder: pathlib.Path) -> list[str]:
    """The flags of a statement as a command takes them."""
    words = []
    for name, value in given.items():
        if name in _OF_OUTPUT:
            raise CommandError(f"the flags of a statement cannot have --{name}.")
        try:
            if name == _REPEATED:
                words += [f"--{name}={folder / each}" for each in value]
            elif name == _OTHER_RUNS:
                words.append(f"--{name}={','.join(str(folder / each) for each in value)}")
            elif name in _PATHS:
                words.append(f"--{name}={folder / value}")
            elif isinstance(value, list):
                words.append(f"--{name}={','.join(map(str, value))}")
            else:
                words.append(f"--{name}={value}")
        except TypeError as error:
            raise CommandError(
                f"the flags of a statement cannot have --{name} as {numbers.shown(value)}."
            ) from error
    # All that check_flags asks for, and no file is written.
    return [*words, f"--statement={folder / 'statement.md'}"]


def _read(path: str) -> dict[str, Any]:
    file = _data_file(path)
    data = _parsed(file)
    try:
        fields = (data["format"], data["flags"], data["markdown_sha256"], data["statement"])
    except (KeyError, TypeError) as error:
        raise CommandError(f"{file} is not what mf-report --statement writes.") from error
    check_choice(
        fields[0] == FORMAT and all(isinstance(each, dict) for each in (fields[1], fields[3])),
        f"{file} has another format than {FORMAT}: verify it by the version that wrote it.",
    )
    return data


def _parsed(file: pathlib.Path) -> dict[str, Any]:
    try:
        data: dict[str, Any] = inputs.parsed_json(file.read_text(encoding="utf-8"))
        if not isinstance(data, dict):
            raise ValueError("it is no JSON object")
    except OSError as error:
        raise CommandError(f"{file} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise CommandError(f"{file} holds no statement: {error}.") from error
    return data


def _text(path: str) -> str:
    try:
        return pathlib.Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"{path} cannot be read: {error}") from error


def _data_file(path: str) -> pathlib.Path:
    return pathlib.Path(path).with_suffix(".json")
