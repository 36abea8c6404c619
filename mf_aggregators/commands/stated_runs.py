"""Runs on disk that a statement rests on: the run of a directory, and others on its clients.

A run directory is what the commands that train write. Its statement follows from its matrix, its
ledger and the noise multiplier in its ``privacy.json``, and here it is made again from them.
"""

import csv
import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dp_accounting import dp_event

from mf_aggregators import accounting, checkpoints, inputs, mechanism, participation, random_streams
from mf_aggregators.checkpoints import CONFIG_FILE, RUN_CHECKPOINT, STATEMENT_FILE
from mf_aggregators.commands import facts_of_runs
from mf_aggregators.commands.command_line import CommandError, check_choice, resolved_path
from mf_aggregators.factorizations import Factorization
from mf_aggregators.kernel import numbers
from mf_aggregators.mechanism import Mechanism
from mf_aggregators.observed import Observed
from mf_aggregators.privacy import guarantees, ledgers
from mf_aggregators.privacy.statement import PrivacyStatement, Represented, RunFacts
from mf_aggregators.privacy.stopping_rules import StoppingRule

# The help of a flag that names other runs.
MEANING_OF_OTHER_RUNS = (
    "Other runs on the same clients, as directories with commas between them: those of training "
    "runs, or what Mechanism.save wrote. The statement has the guarantee of all together."
)
# Further files of a run directory.
_SEED_FILE = "checkpoints/sampling_seed.json"
_METRICS_FILE = "metrics.csv"
# Where a configuration has the SHA-256 of the weights that training began with.
_INITIAL_WEIGHTS = "initial_weights_sha256"


def check_words(text: str | None, flag: str) -> None:
    """Checks words that a statement repeats: they can be read, and begin no line of their own.

    Args:
      text: The value of a flag; None if it was not given.
      flag: Its name.

    Raises:
      CommandError: If there are none, or they have line ends or characters that nobody sees.
    """
    check_choice(
        text is None or (bool(text.strip()) and text.isprintable()),
        f"--{flag} takes words in one line, found {numbers.shown(text)}.",
    )


def other_runs(text: str | None) -> list[pathlib.Path]:
    """Returns the directories that a flag names, with commas between them.

    Args:
      text: The value of the flag; None if it was not given.

    Raises:
      CommandError: If one is named twice, or not at all.
    """
    if text is None:
        return []
    try:
        found = [pathlib.Path(resolved_path(each.strip())) for each in text.split(",")]
    except ValueError as error:
        raise CommandError(f"--other_runs={text}: {error}") from error
    places = list(map(os.path.realpath, found))
    twice = [path for path, place in zip(found, places, strict=True) if places.count(place) > 1]
    check_choice(not twice, f"--other_runs names {twice[0] if twice else ''} twice: once each.")
    return found


def files_of(directory: pathlib.Path) -> list[pathlib.Path]:
    """Returns the files that show what a run released, or of a checkpoint, without secret ones."""
    matrix = directory / RUN_CHECKPOINT if checkpoints.is_run(directory) else directory
    beside = [directory / name for name in (STATEMENT_FILE, CONFIG_FILE)]
    found = [file for file in [*sorted(matrix.glob("*")), *beside] if file.is_file()]
    return [file for file in found if not ledgers.is_of_drawn_clients(file)]


def event_of(directory: pathlib.Path, delta: float) -> dp_event.DpEvent:
    """Returns a run on disk as an event, to be composed with others.

    Args:
      directory: What ``Mechanism.save`` wrote, or a run directory. One that kept its plan, or is
        under way, counts as planned; any other one as its worst case. Without a ledger, what its
        statement says of the plan decides, but for drawn clients, which nobody can check then.
      delta: For which the worst case is found.

    Raises:
      CommandError: If it is neither, or cannot be read, or its clients were drawn and its ledger
        is gone.
    """
    try:
        if (directory / checkpoints.MECHANISM_FILE).exists():
            return mechanism.load(directory).event()
        if (directory / STATEMENT_FILE).exists():
            return _event_of_run(directory, delta)
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError, OSError) as error:
        raise CommandError(f"--other_runs={directory} cannot be read: {error}") from error
    raise CommandError(
        f"--other_runs={directory} is neither the directory of a run, with its {STATEMENT_FILE}, "
        "nor what Mechanism.save writes."
    )


def events_of(
    directories: Sequence[pathlib.Path], delta: float, own_seed: pathlib.Path | None = None
) -> list[dp_event.DpEvent]:
    """Returns runs on disk as events, whose clients were drawn independently.

    Args:
      directories: What :func:`event_of` takes.
      delta: For which worst cases are found.
      own_seed: The file with the seed of the sampler of the run that they are composed with; it
        need not be there. None where there is none.

    Raises:
      CommandError: If one cannot be read, or two samplers have the same seed: their runs drew the
        same clients, and amplification does not hold of both together.
    """
    events = [event_of(each, delta) for each in directories]
    found: dict[int, pathlib.Path] = {}
    for file in ([] if own_seed is None else [own_seed]) + [
        each / _SEED_FILE for each in directories
    ]:
        if not file.is_file():
            continue
        try:
            seed = random_streams.load_seed(file)
        except random_streams.SeedError as error:
            raise CommandError(f"--other_runs: {error}") from error
        check_choice(
            seed not in found,
            f"--other_runs: {file} and {found.get(seed)} hold the same seed: these runs drew the "
            "same clients, and what amplifies each of them does not hold of both together.",
        )
        found[seed] = file
    return events


def round_counts(folder: pathlib.Path, ledger: ledgers.Ledger) -> list[int] | None:
    """Returns how many clients each round of a training run summed; None for another ledger.

    A run writes its ledger before each release, so the ledger itself is the count for rounds
    without a number of clients in the metrics.

    Args:
      folder: The directory of the run.
      ledger: Its ledger, whose clients were not drawn.

    Raises:
      ValueError: If a file cannot be read.
    """
    if not (folder / ledgers.FILE_OF_RUN).exists():
        return None
    counts = [len(cohort) for cohort in ledger.cohorts()]
    # Canaries that audit a run were summed as well, and are in no ledger.
    has_canaries = _json_of(folder / CONFIG_FILE)["flags"].get("audit_canaries") is not None
    if (folder / _METRICS_FILE).exists() and not has_canaries:
        text = (folder / _METRICS_FILE).read_text(encoding="utf-8", errors="replace")
        for row in csv.DictReader(text.replace("\0", "").splitlines()):
            number, updates = row.get("round") or "", row.get("num_updates") or ""
            # The released number of drawn clients has noise, so it is no integer.
            if number.isdecimal() and updates.isdecimal() and 0 < int(number) <= len(counts):
                counts[int(number) - 1] = int(updates)
    return counts


def with_other_runs(
    statement: PrivacyStatement,
    directories: Sequence[pathlib.Path],
    folder: pathlib.Path,
    own_seed: pathlib.Path | None,
) -> PrivacyStatement:
    """Returns a statement with what holds of its run and others together.

    Args:
      statement: The statement of a run.
      directories: Where the others are; if there are none, the statement stays as it is.
      folder: From which they are named in the statement.
      own_seed: As :func:`events_of` takes it.

    Raises:
      CommandError: If one cannot be read, or they cannot be composed.
    """
    if not directories:
        return statement
    names = [os.path.relpath(each, folder) for each in directories]
    events = events_of(directories, statement.plan.delta, own_seed)
    try:
        return statement.with_other_runs(dict(zip(names, events, strict=True)))
    except ValueError as error:
        raise CommandError(f"--other_runs cannot be composed: {error}") from error


def made_again(folder: pathlib.Path, contents: Mapping[str, Any]) -> PrivacyStatement:
    """Returns the statement of a run directory, made from its files.

    Args:
      folder: The directory.
      contents: What ``privacy.json`` holds: facts, and which noise there was.

    Raises:
      KeyError: If something is missing in them.
      TypeError: If something in them is of another type.
      ValueError: If a file cannot be read, or they do not fit together.
    """
    of_run = _mechanism_of(contents, checkpoints.load(folder))
    planned, represents = contents["planned"], contents["represents"]
    delta, rule = planned["delta"], contents["stopping_rule"]
    certification = guarantees.default_certification(show_progress=True)
    statement = of_run.statement(RunFacts.from_dict(contents), delta, certification=certification)
    if represents is not None:
        represents = Represented(
            represents["clients_per_round"],
            represents["num_clients"],
            guarantees.planned(
                of_run.factorization,
                of_run.schema,
                represents["planned"]["noise_multiplier"],
                delta,
            ),
        )
    if rule is not None:
        rule = StoppingRule(statement.plan, rule["stop_at_epsilon"])
    statement = dataclasses.replace(statement, represented=represents, stopping_rule=rule)
    if contents["realised_participation"] is not None:
        observed = _observed(folder, of_run)
        facts = dataclasses.replace(statement.facts, num_alike_names=observed.num_alike_names)
        statement = dataclasses.replace(
            observed.completed(dataclasses.replace(statement, facts=facts)),
            stopped_by_rule=rule is not None and contents["stopping_rule"]["ended_the_run"],
        )
    others = contents["other_runs"]
    names = [] if others is None else others["names"]
    directories = [folder / name for name in names]
    return with_other_runs(statement, directories, folder, folder / _SEED_FILE)


def contradictions(
    folder: pathlib.Path, contents: Mapping[str, Any], statement: PrivacyStatement
) -> list[str]:
    """Returns in which facts a statement is not that of the configuration beside it.

    Args:
      folder: The run directory.
      contents: What ``privacy.json`` holds.
      statement: The statement that :func:`made_again` made of it.

    Raises:
      KeyError: If the configuration lacks what every run has.
      ValueError: If it cannot be read.
    """
    config = _json_of(folder / CONFIG_FILE)
    flags = config["flags"]
    matrix, described = checkpoints.load_with_description(folder)
    facts, of_run = statement.facts, _mechanism_of(contents, matrix)
    said: dict[str, tuple[Any, Any]] = {
        "delta": (statement.plan.delta, flags["delta"]),
        "secure_aggregation": (
            facts.provenance.secure_aggregation,
            flags["secure_aggregation"],
        ),
        "stop_at_epsilon": (
            None if statement.stopping_rule is None else statement.stopping_rule.epsilon,
            flags["stop_at_epsilon"],
        ),
    }
    broken = []
    if statement.observed_participation is not None:
        population = len(ledgers.load_archive(folder / ledgers.FILE_OF_RUN).client_ids)
        said["num_clients"] = (facts.num_clients, population)
    elif (
        # A run that is under way, or was killed.
        (folder / ledgers.FILE_OF_RUN).exists()
        and _observed(folder, of_run).keeps_participation is False
    ):
        broken.append(f"{ledgers.FILE_OF_RUN} breaks the plan, and the statement does not say so.")
    differing = [(name, *both) for name, both in said.items() if both[0] != both[1]]
    differing += checkpoints.contradictions_of_plan(contents, config, described)
    differing += _differing_facts(facts, config, of_run)
    differing += differences(*_represented(statement, flags, of_run), "represents")
    return broken + [
        f"{name} is {stated!r} in the statement, and {found!r} in the files of the run."
        for name, stated, found in differing
    ]


def differences(before: Any, now: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yields the names of all values that differ, and the values.

    Args:
      before: JSON-able.
      now: The same, made again.
      name: What to call them; their keys follow after dots.
    """
    if isinstance(before, dict) and isinstance(now, dict):
        for key in sorted({*before, *now}):
            yield from differences(
                before.get(key), now.get(key), f"{name}.{key}" if name else str(key)
            )
    elif isinstance(before, float) and isinstance(now, float):
        # Of another processor, last digits may be others.
        if not math.isclose(before, now, rel_tol=1e-9):
            yield name, before, now
    elif before != now:
        yield name, before, now


def _represented(
    statement: PrivacyStatement, flags: Mapping[str, Any], of_run: Mechanism
) -> tuple[dict[str, float] | None, dict[str, float] | None]:
    """The larger cohort that the clients of a run stand for: as stated, and by its flags."""
    stated = statement.represented
    clients, multiplier = flags["clients_per_round"], flags["noise_multiplier"]
    share = facts_of_runs.cohort(flags) / clients
    if statement.earlier_plans:
        multiplier = of_run.noise_multiplier / share
    rounds = of_run.num_rounds
    found = {
        "clients_per_round": clients,
        "num_clients": participation.smallest_population(of_run.schema, rounds, clients),
        "noise_multiplier": multiplier,
    }
    said = None
    if stated is not None:
        said = {
            "clients_per_round": stated.clients_per_round,
            "num_clients": stated.num_clients,
            "noise_multiplier": stated.guarantee.noise_multiplier,
        }
    return said, None if share == 1.0 else found


def _differing_facts(
    facts: RunFacts, config: Mapping[str, Any], of_run: Mechanism
) -> Iterator[tuple[str, Any, Any]]:
    """Yields which facts are not those of a configuration."""
    flags, stated = config["flags"], dataclasses.asdict(facts)
    behaviour = {
        "timer_hours": flags["timer_hours"],
        "forgets": facts_of_runs.forgets(flags),
    }
    found = facts_of_runs.of_configuration(flags, of_run)
    again = dataclasses.asdict(dataclasses.replace(facts, **found))
    again["enforcement"] = facts_of_runs.enforcement(of_run.sampling, **behaviour)
    words, sha256 = facts_of_runs.public_data(flags), config.get(_INITIAL_WEIGHTS)
    begins = " ".join(f"{words}. Training began with the weights of".split())
    said = " ".join(facts.public_data.split())
    if sha256 is None:
        again["public_data"] = words
    elif not (said.startswith(begins) and sha256 in said):
        # The name of the file is not in the configuration.
        again["public_data"] = f"{begins} a file (SHA-256 {sha256})"
    for each in (stated, again):
        # Lines have other ends in the data.
        each |= {name: " ".join(each[name].split()) for name in ("enforcement", "public_data")}
    yield from differences(stated, again)


def _mechanism_of(contents: Mapping[str, Any], matrix: Factorization) -> Mechanism:
    return Mechanism.from_dict(checkpoints.described_by_statement(contents), matrix)


def _event_of_run(directory: pathlib.Path, delta: float) -> dp_event.DpEvent:
    contents = _json_of(directory / STATEMENT_FILE)
    check_choice(
        contents["noise_seed_is_fixed"] is False,
        f"--other_runs={directory} is a run whose noise came from a fixed seed: it has no "
        "guarantee to be composed.",
    )
    of_run = mechanism.load(directory)
    if not (directory / ledgers.FILE_OF_RUN).exists():
        return _event_without_ledger(directory, of_run, contents)
    observed = _observed(directory, of_run)
    if observed.keeps_participation:
        return of_run.event()
    return guarantees.event(observed.worst_case(delta))


def _event_without_ledger(
    directory: pathlib.Path, of_run: Mechanism, contents: Mapping[str, Any]
) -> dp_event.DpEvent:
    """What the statement of a run says that it counts as, whose ledger was destroyed."""
    if contents["widened"] is not None:
        # Without amplification: a Gaussian mechanism, of this noise multiplier.
        return accounting.event(contents["widened"]["noise_multiplier"])
    # A run under way keeps its plan while its statement does not say otherwise. Who was drawn can
    # be checked by nobody, also where a run was killed before its statement had a word on it.
    keeps_plan = contents["realised_participation"] is None or contents["keeps_plan"] is True
    check_choice(
        of_run.sampling is None and keeps_plan,
        f"--other_runs={directory} has no {ledgers.FILE_OF_RUN}, without which nobody can tell "
        "whether it kept its plan: bring the ledger of the run.",
    )
    return of_run.event()


def _observed(folder: pathlib.Path, of_run: Mechanism) -> Observed:
    """What the ledger of a run directory shows; of a sampled one, with its seed if that is kept."""
    ledger = ledgers.load_archive(folder / ledgers.FILE_OF_RUN)
    seed = None
    if of_run.sampling is not None:
        # That of a run for tests is in its configuration.
        seed = _json_of(folder / CONFIG_FILE)["flags"]["seed"]
        if (folder / _SEED_FILE).exists():
            seed = random_streams.load_seed(folder / _SEED_FILE)
    return of_run.observed(ledger, round_counts=round_counts(folder, ledger), sampling_seed=seed)


def _json_of(path: pathlib.Path) -> dict[str, Any]:
    contents = inputs.parsed_json(path.read_text(encoding="utf-8"))
    if not isinstance(contents, dict):
        raise ValueError(f"{path} holds {json.dumps(contents)[:40]}, which is no object.")
    return contents
