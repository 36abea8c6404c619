"""Reads runs from disk for statements: the stated run, and other runs on the same clients.

Training commands write run directories. The statement of a run follows from the files in its
directory, and both the run and a verifier make it with the functions of this module.
"""

import contextlib
import dataclasses
import hashlib
import hmac
import inspect
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from dp_accounting import dp_event

from mf_aggregators import accounting, checkpoints, inputs, mechanism, random_streams
from mf_aggregators.adaptive_clip import AdaptiveClip, NoiseSplit
from mf_aggregators.audit.run_audit import Canaries, RunAudit
from mf_aggregators.checkpoints import CONFIG_FILE, RUN_CHECKPOINT, STATEMENT_FILE
from mf_aggregators.commands.command_line import CommandError, check_choice, naming, resolved_path
from mf_aggregators.kernel import composition, numbers
from mf_aggregators.kernel.claim import Guarantee
from mf_aggregators.kernel.composition import EpsilonDeltaDpEvent
from mf_aggregators.kernel.ledger import ObservedParticipation
from mf_aggregators.mechanism import Mechanism
from mf_aggregators.noise.places import SumsEvidence
from mf_aggregators.observed import Observed
from mf_aggregators.participation import SamplingScheme
from mf_aggregators.participation.certificate_search import Certification
from mf_aggregators.privacy import guarantees, ledgers, statement_file, statements
from mf_aggregators.privacy.guarantees import StoppingRule
from mf_aggregators.privacy.statements import Evidence, RunFacts, Statement
from mf_aggregators.private_metrics import PrivateMetrics, noise_split

# An object of JSON.
Document: TypeAlias = Mapping[str, object]
# The format of a file of other runs. A format that older programs cannot read gets another number.
FORMAT = "mf_aggregators other runs 1"
# The kinds of events in a file of other runs, and the types of their attributes (an event is an
# object).
_KINDS = ("NoOp", "NonPrivate", "Gaussian", "Laplace", "PoissonSampled", "SelfComposed", "Composed")
_ATTRIBUTES: Mapping[str, type] = {
    **{"noise_multiplier": float, "sampling_probability": float},
    **{"count": int, "event": dict, "events": list},
}
# The entry of config.json for a round that a stopping rule refused: the indices of its clients in
# the ledger, and the number of rounds before it.
REFUSED = "refused_by_rule"
# Further files of a run directory.
_SEED_FILE = "checkpoints/sampling_seed.json"
_METRICS_FILE, _MODEL_FILE, _AUDIT = "metrics.csv", "final_model.npz", "audit"
_NOISE = "noise"
# Large files are read in pieces of this size.
_BYTES_AT_ONCE = 1 << 20
_RECORDED = "recorded by the command that trains"
# The value of --clip_norm for an adaptive clip norm.
ADAPTIVE = "adaptive"
# A value of --sampling: clients take part whenever their participation timers allow it.
TIMERS = "timers"
# A value of --after_history_loss: a client that lost its history joins as if it were new.
REJOIN = "rejoin"
# The flags of an adaptive clip norm, with the names of its parameters.
OF_ADAPTIVE: Mapping[str, str] = {
    "clip_initial_norm": "initial_norm",
    "clip_quantile": "target_unclipped_quantile",
    "clip_learning_rate": "learning_rate",
    "clip_smallest_norm": "smallest_norm",
    "clip_largest_norm": "largest_norm",
    "clip_count_stddev": "clipped_count_stddev",
    "clip_update_period": "update_period",
}
# Default of --largest_loss: the logarithm of some 22,000 words.
LARGEST_LOSS = 10.0
# Default of --largest_examples: most devices do not have more examples.
LARGEST_EXAMPLES = 1000

# The entry of config.json with the SHA-256 of the initial weights.
_INITIAL_WEIGHTS = "initial_weights_sha256"
_SIMULATION = (
    "One program simulates the clients, their timers and the server: clients are parts of a data "
    "set, which may be data of people. No device has enforced anything or taken part."
)
_SECURE_SIMULATION = (
    "The secure sum is simulated as well: that program has seen the update of every client."
)


@dataclasses.dataclass(frozen=True)
class Others:
    """Other runs on the same clients.

    Attributes:
      events: The events of the runs, by their names.
      files: The files from which these events follow.
      file: The file that names the runs, relative to the statement's folder; empty if directories
        name them.
    """

    events: Mapping[str, dp_event.DpEvent]
    files: tuple[pathlib.Path, ...]
    file: str = ""

    @classmethod
    def named(
        cls,
        text: str | None,
        folder: pathlib.Path,
        delta: float,
        own_seed: pathlib.Path | None = None,
    ) -> "Others | None":
        """Returns the other runs that --other_runs names; None without the flag.

        Args:
          text: The value of the flag: a .json file, or directories with commas between them. The
            file is an object with ``format`` (:data:`FORMAT`), ``unit`` ("client"), ``adjacency``
            ("zero-out" or "add-or-remove") and ``runs``, a list of objects with ``name``,
            ``source`` and one of: ``epsilon`` and ``delta``, two numbers; ``event``, an event of
            dp-accounting as an object with ``kind`` and the attributes of its class;
            ``statement``, the JSON file of a statement, from the folder of the file, whose stated
            guarantee counts. Other keys, repeated keys, and values of another type are refused.
          folder: The statement's folder, to which paths in the statement are relative.
          delta: For which worst cases are found.
          own_seed: As for :meth:`events_of`.

        Raises:
          CommandError: If a run is named twice or cannot be read, or two runs have the same seed.
        """
        if text is None:
            return None
        if not text.endswith(".json"):
            paths = directories_of(text)
            names = [os.path.relpath(each, folder) for each in paths]
            events = cls.events_of(paths, delta, own_seed)
            files = tuple(file for each in paths for file in files_of(each))
            return cls(dict(zip(names, events, strict=True)), files)
        with naming("other_runs"):
            path = pathlib.Path(resolved_path(text))
            try:
                runs = _runs_of(inputs.parsed_json(path.read_text("utf-8"), is_strict=True))
                found = {name: _event(each, path.parent) for name, each in runs.items()}
            except ValueError as error:
                raise ValueError(f"{path} is not a file of other runs: {error}") from error
        more = [path.parent / str(run["statement"]) for run in runs.values() if "statement" in run]
        _check_seeds([own_seed, *(seed for _, seed in found.values())])
        by_name = {name: event for name, (event, _) in found.items()}
        return cls(by_name, (path, *more), os.path.relpath(path, folder))

    @staticmethod
    def events_of(
        directories: Sequence[pathlib.Path], delta: float, own_seed: pathlib.Path | None = None
    ) -> list[dp_event.DpEvent]:
        """Returns the events of runs on disk; refuses runs that drew with the same seed.

        Args:
          directories: The directories, each as for :func:`_event_of`.
          delta: For which worst cases are found.
          own_seed: The file with the sampler's seed of the run with which they are composed; the
            file may be missing. None if the run has no sampler.

        Raises:
          CommandError: If a directory cannot be read, or two samplers have the same seed: their
            runs drew the same clients, so their amplified guarantees do not compose.
        """
        _check_seeds([own_seed, *(each / _SEED_FILE for each in directories)])
        return [_event_of(each, delta) for each in directories]

    def in_statement(self, statement: Statement) -> Statement:
        """Returns the statement with the composed guarantee of its run and these other runs.

        Raises:
          CommandError: If the runs cannot be composed.
        """
        with naming("other_runs"):
            return statement.with_other_runs(self.events, self.file)


def _runs_of(given: object) -> dict[str, dict[str, object]]:
    """The runs in a file of other runs, by name and source; ValueError for another format."""
    contents = _checked(given, format=str, unit=str, adjacency=str, runs=list)
    head = (contents["format"], contents["unit"], contents["adjacency"])
    if head not in [(FORMAT, "client", each) for each in ("zero-out", "add-or-remove")]:
        raise ValueError(
            f'it needs format {FORMAT!r}, unit "client" and adjacency "zero-out" or "add-or-remove"'
        )
    found = []
    for each in inputs.part(contents, list, "runs"):
        values: dict[str, type] = {"epsilon": float, "delta": float}
        for name, kind in (("statement", str), ("event", dict)):
            if isinstance(each, dict) and name in each:
                values = {name: kind}
        found.append(_checked(each, name=str, source=str, **values))
        for name in ("name", "source"):
            inputs.check_words(each[name], name)
    runs = {f"{each['name']} ({each['source']})": each for each in found}
    # Different runs could get the same label, and one of them would be lost.
    distinct = min(len(runs), len({each["name"] for each in runs.values()}))
    if not 0 < distinct == len(found):
        raise ValueError("it needs at least one run, and each name must be unique")
    return runs


def _checked(given: object, **types: type) -> dict[str, object]:
    """The value; raises ValueError unless it is an object of these keys and types of values."""
    # bool is not accepted as a number, but int is accepted as a float.
    found = given if isinstance(given, dict) else {}
    if found.keys() != types.keys() or any(
        type(found[name]) is not kind and (kind is not float or type(found[name]) is not int)
        for name, kind in types.items()
    ):
        keys = ", ".join(f"{name} ({kind.__name__})" for name, kind in types.items())
        raise ValueError(f"expected an object with {keys}, found {numbers.shown(given)}")
    return found


def _event_of_json(given: object) -> dp_event.DpEvent:
    """Makes an event of dp-accounting from its JSON object; ValueError for an unknown event."""
    kind = given.get("kind") if isinstance(given, dict) else None
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ValueError(f"an event is an object whose kind is one of {', '.join(_KINDS)}")
    made: type[dp_event.DpEvent] = getattr(dp_event, f"{kind}DpEvent")
    types = {name: _ATTRIBUTES[name] for name in inspect.signature(made).parameters}
    checked = _checked(given, kind=str, **types)
    values = {name: checked[name] for name in types}
    if "event" in values:
        values["event"] = _event_of_json(values["event"])
    if "events" in values:
        values["events"] = list(map(_event_of_json, inputs.part(values, list, "events")))
    if "count" in values:
        numbers.positive_integer(values["count"], "count")
    event = made(**values)
    if kind == "Laplace" and event.noise_multiplier > 0.0:
        # Privacy losses of a very large epsilon would fill the memory.
        EpsilonDeltaDpEvent(1.0 / event.noise_multiplier, 0.0)
    if not types.keys() & {"count", "events"}:
        # Refuses numbers out of range, and sampling of other events than noise.
        composition.composed_epsilon([event], 0.5)
    return event


def _event(run: Document, folder: pathlib.Path) -> tuple[dp_event.DpEvent, pathlib.Path | None]:
    """The event of a run in a file of other runs, and the path of its sampler's seed, if any.

    A statement becomes a Gaussian event, or an (epsilon, delta) event if its guarantee is
    amplified.
    """
    if "event" in run:
        return _event_of_json(run["event"]), None
    if "statement" not in run:
        return EpsilonDeltaDpEvent(run["epsilon"], run["delta"]), None
    file = folder / inputs.part(run, str, "statement")
    document = statement_file.read(file)
    headline = inputs.part(document, dict, "headline")
    stated = document[headline["guarantee"]]
    if not (document["is_private"] and isinstance(stated, dict)) or headline["epsilon"] is None:
        raise ValueError(f"{file} states no guarantee")
    epsilon, delta = float(headline["epsilon"]), float(headline["delta"])
    if stated["sampling"] is None:
        # If a document contradicts itself, the number that claims less counts.
        noise = accounting.noise_multiplier(epsilon, delta)
        return dp_event.GaussianDpEvent(min(noise, float(stated["noise_multiplier"] or 0))), None
    # All keyed hashes of a statement have the same key.
    keys = {file.parent / key for key in inputs.part(document, dict, "key_files").values()}
    return EpsilonDeltaDpEvent(epsilon, delta), next(iter(keys), None)


def directories_of(text: str | None) -> list[pathlib.Path]:
    """Returns the directories that --other_runs names; none if it names a .json file.

    Args:
      text: The value of the flag; None if it was not given.

    Raises:
      CommandError: If a directory is named twice, or a name is empty.
    """
    if text is None or text.endswith(".json"):
        return []
    with naming("other_runs"):
        paths = [resolved_path(each.strip()) for each in text.split(",")]
    # Two paths may lead to the same directory through a link.
    distinct = min(len(set(map(os.path.realpath, paths))), len(set(map(os.path.abspath, paths))))
    check_choice(distinct == len(paths), f"--other_runs={text} has a directory twice: drop one.")
    return list(map(pathlib.Path, paths))


def files_of(directory: pathlib.Path) -> list[pathlib.Path]:
    """Returns the files on which a run's guarantee depends, or those of a checkpoint."""
    matrix = directory / RUN_CHECKPOINT if checkpoints.is_run(directory) else directory
    names = (STATEMENT_FILE, CONFIG_FILE, ledgers.FILE_OF_RUN)
    beside = [directory / name for name in names]
    return [file for file in [*sorted(matrix.glob("*")), *beside] if file.is_file()]


def hashed(
    files: Iterable[pathlib.Path], folder: pathlib.Path, own_seed: pathlib.Path | None
) -> tuple[dict[str, str], dict[str, str]]:
    """Returns ``files`` and ``key_files`` of ``statements.Evidence``.

    A ledger of drawn clients gets a keyed hash (HMAC-SHA-256), because with a plain SHA-256 every
    reader could confirm a guess of the draws. The key is the file with the sampler's seed: that of
    the stated run or, if it has none, that of the ledger's run. If both files are gone, the ledger
    is left out. Copies of these files with other names are left out as well.

    Args:
      files: The files. The hash of a directory covers the names and hashes of the files in it.
      folder: The statement's folder, to which names are relative.
      own_seed: The file with the sampler's seed of the stated run; None if it has none.

    Raises:
      OSError: If one cannot be read.
    """
    files = list(dict.fromkeys(files))
    keys = {
        file: file.parent / _SEED_FILE if own_seed is None else own_seed
        for file in files
        if ledgers.is_of_drawn_clients(file)
    }
    secrets = {_hash(each) for pair in keys.items() for each in pair if each.is_file()}
    found: dict[str, str] = {}
    key_files: dict[str, str] = {}
    for file in files:
        name = os.path.relpath(file, folder)
        if file in keys and keys[file].is_file():
            found[name] = _hash(file, keys[file].read_bytes())
            key_files[name] = os.path.relpath(keys[file], folder)
        elif not secrets or _hash(file) not in secrets:
            found[name] = _hash(file)
    return found, key_files


def differences(document: Document, folder: pathlib.Path) -> list[str]:
    """Returns sentences that name missing or changed files of a statement.

    Args:
      document: The statement.
      folder: Its folder.

    Raises:
      OSError: If one cannot be read.
    """
    found, key_files = [], inputs.part(document, dict, "key_files")
    for name, digest in inputs.part(document, dict, "files").items():
        key_file = key_files.get(name)
        missing = [each for each in (key_file, name) if each and not _is_kept(folder / each)]
        key = None if key_file is None or missing else (folder / key_file).read_bytes()
        if missing:
            found.append(f"{missing[0]} is not there.")
        elif _hash(folder / name, key) != digest:
            kind = "SHA-256" if key is None else "HMAC"
            found.append(f"{name} is another file: its {kind} is not that of the statement.")
    return found


def _is_kept(path: pathlib.Path) -> bool:
    """Whether a path is a file or a directory (reading a pipe or a device may never end)."""
    return path.is_file() or path.is_dir()


def _hash(path: pathlib.Path, key: bytes | None = None) -> str:
    if path.is_dir():
        files = (
            f"{each.name} {_hash(each)}\n" for each in sorted(path.iterdir()) if _is_kept(each)
        )
        return hashlib.sha256("".join(files).encode()).hexdigest()
    h: hashlib._Hash | hmac.HMAC = hashlib.sha256() if key is None else hmac.new(key, b"", "sha256")
    with path.open("rb") as file:
        while piece := file.read(_BYTES_AT_ONCE):
            h.update(piece)
    return h.hexdigest()


def _event_of(directory: pathlib.Path, delta: float) -> dp_event.DpEvent:
    """Returns the event of a run on disk, for composition.

    Args:
      directory: A saved mechanism (``Mechanism.save``), or a run directory. A run that kept its
        plan counts with its planned guarantee, any other run with its worst case.
      delta: The delta for which the worst case is computed.

    Raises:
      CommandError: If the directory is neither of these, cannot be read, or is a run without its
        ledger.
    """
    is_saved = (directory / checkpoints.MECHANISM_FILE).exists()
    check_choice(
        is_saved or (directory / ledgers.FILE_OF_RUN).exists(),
        f"--other_runs={directory} is neither of Mechanism.save nor a run with its ledger "
        f"{ledgers.FILE_OF_RUN}: restore the ledger, or name the run's statement in a .json file.",
    )
    try:
        of_run = mechanism.load(directory)
        found = None if is_saved else _observed(directory, of_run)
        if found is None or found.keeps_participation:
            return of_run.event()
        return guarantees.event(found.worst_case(delta))
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError, OSError) as error:
        raise CommandError(f"--other_runs={directory} cannot be read: {error}") from error


def _check_seeds(files: Iterable[pathlib.Path | None]) -> None:
    """Raises CommandError if two existing files have the same sampler's seed."""
    found: dict[int, pathlib.Path] = {}
    for file in files:
        if file is None or not file.is_file():
            continue
        with naming("other_runs"):
            seed = random_streams.load_seed(file)
        check_choice(
            seed not in found,
            f"--other_runs: {file} and {found.get(seed)} hold the same seed: these runs drew the "
            "same clients, so that their amplified guarantees cannot be composed.",
        )
        found[seed] = file


def round_counts(folder: pathlib.Path, ledger: ledgers.Ledger) -> list[int] | None:
    """Returns the number of clients summed in each round; None if there is no ledger file.

    A run writes its ledger before each release, so for rounds without a number of clients in the
    metrics, the ledger gives the number.

    Args:
      folder: The directory of the run.
      ledger: The run's ledger, if no scheme drew its clients.

    Raises:
      ValueError: If a file cannot be read.
    """
    if not (folder / ledgers.FILE_OF_RUN).exists():
        return None
    counts = [len(cohort) for cohort in ledger.cohorts()]
    # Canaries of an audited run were summed as well, but are not in the ledger.
    flags = inputs.part(_json_of(folder / CONFIG_FILE), dict, "flags")
    if (folder / _METRICS_FILE).exists() and flags.get("audit_canaries") is None:
        text = (folder / _METRICS_FILE).read_text(encoding="utf-8", errors="replace")
        header, *lines = text.splitlines() or [""]
        for line in lines:
            # Fields of metrics.csv contain no commas or quotes.
            row = dict(zip(header.split(","), line.split(","), strict=False))
            number, updates = row.get("round") or "", row.get("num_updates") or ""
            # A private number of clients has noise, so it is not an integer, and is skipped.
            if number.isdecimal() and updates.isdecimal() and 0 < int(number) <= len(counts):
                counts[int(number) - 1] = int(updates)
    return counts


def planned(
    config: Document,
    of_run: Mechanism,
    *,
    population: int,
    told: Document,
    num_alike_names: int = 0,
) -> Statement:
    """Returns the statement of a training run that has not ended.

    Args:
      config: What ``config.json`` holds.
      of_run: The mechanism of the run, with the noise that is really added.
      population: The number of clients.
      told: The facts that people state (``statements.TOLD``); empty texts for facts that are not
        stated.
      num_alike_names: The number of clients with a name that looks like another client's.

    Raises:
      KeyError: If the configuration lacks a flag.
      ValueError: If something in it is out of its range.
    """
    flags = inputs.part(config, dict, "flags")
    facts = _facts(config, of_run, population, told, num_alike_names)
    certification = None if of_run.sampling is None else Certification.default(show_progress=True)
    statement = of_run.statement(facts, flags["delta"], certification=certification)
    limit, canaries = flags["stop_at_epsilon"], flags.get("audit_canaries")
    return dataclasses.replace(
        statement,
        represented=_represented(config, of_run),
        stopping_rule=None if limit is None else StoppingRule(statement.plan, limit),
        audit=None if canaries is None else RunAudit.of_statement(canaries, None),
        date=statements.today(),
    )


def ended(
    statement: Statement,
    folder: pathlib.Path,
    config: Document,
    observed: Observed,
    audit: RunAudit | None = None,
) -> Statement:
    """Adds the findings of a run's ledger and canaries to its statement.

    Args:
      statement: What :func:`planned` returned.
      folder: The run directory.
      config: What ``config.json`` holds.
      observed: The comparison of the ledger with the mechanism.
      audit: The result of the canaries; None to compute it from the files, if the run has ended.

    Raises:
      ValueError: If a file of the audit cannot be read.
    """
    assert observed.ledger is not None
    is_complete = observed.ledger.num_rounds == statement.plan.num_rounds
    measured = f"measured from {ledgers.FILE_OF_RUN}"
    facts = dataclasses.replace(
        statement.facts,
        num_alike_names=observed.num_alike_names,
        is_finished=True if is_complete else None,
        origins={**statement.facts.origins, "population": measured, "is_finished": measured},
    )
    found = observed.completed(dataclasses.replace(statement, facts=facts))
    by_rule = found.keeps_rule and _is_refused(found.stopping_rule, config, observed)
    number = inputs.part(config, dict, "flags").get("audit_canaries")
    if number is not None and (is_complete or by_rule):
        audit = audit or _audit_of(folder, config, observed, statement.plan)
        found = dataclasses.replace(found, audit=RunAudit.of_statement(number, audit))
    return dataclasses.replace(found, ended_by_rule=by_rule)


def with_evidence(
    statement: Statement,
    folder: pathlib.Path,
    of_run: Mechanism,
    others: Others | None,
    recorded: SumsEvidence | None = None,
) -> Statement:
    """Adds other runs, and the hashes of the run's files, to a statement.

    Args:
      statement: What :func:`planned` or :func:`ended` returned.
      folder: The run directory.
      of_run: The mechanism of the run.
      others: Other runs on the same clients; None if the user named none.
      recorded: ``num_sums`` and ``record_sha256`` of ``statements.Evidence``, if the secret noise
        directory with the record of sums is gone; None if they are not known.

    Raises:
      CommandError: If the other runs cannot be composed.
      OSError: If a file cannot be read.
    """
    if others is not None:
        statement = others.in_statement(statement)
    if statement.observed_participation is None:
        # The run has not ended: its next rounds change the files, so they are not hashed.
        return dataclasses.replace(statement, evidence=Evidence())
    names = [CONFIG_FILE, _MODEL_FILE, ledgers.FILE_OF_RUN]
    if of_run.sampling is None:
        names.append(_METRICS_FILE)
    if statement.audit is not None and statement.audit["right"] is not None:
        names.append(_AUDIT)
    files = [*sorted((folder / RUN_CHECKPOINT).glob("*")), *(folder / name for name in names)]
    kept = [*(file for file in files if file.exists()), *(others.files if others else ())]
    found = hashed(kept, folder, None if of_run.sampling is None else folder / _SEED_FILE)
    if (folder / _NOISE).exists():
        recorded = {}
        # A record of other noise is ignored.
        with contextlib.suppress(ValueError):
            recorded = Evidence.recorded(of_run, folder / _NOISE)
    counts = "the command that trains"
    made_from = Evidence(*found, ledger=ledgers.FILE_OF_RUN, counts=counts, **recorded or {})
    return dataclasses.replace(statement, evidence=made_from)


def made_again(folder: pathlib.Path, document: Document) -> tuple[Statement, list[str]]:
    """Makes the statement of a run again from its files, and finds contradictions.

    Args:
      folder: The directory.
      document: The contents of ``privacy.json``. Its plan is compared with ``config.json``. Apart
        from the plan, only facts that people stated are taken from it.

    Returns:
      The statement, and sentences that name contradictions.

    Raises:
      KeyError: If an entry of the files is missing.
      TypeError: If an entry of the files has another type.
      ValueError: If a file cannot be read, or the files do not fit together.
    """
    config = _json_of(folder / CONFIG_FILE)
    matrix, described = checkpoints.load_with_description(folder)
    plan, differing = checkpoints.plan_of_run(document, config, described)
    of_run = Mechanism.from_dict(plan, matrix)
    contradictions = [
        f"{name} is {stated!r} in the statement, and {found!r} in the files of the run."
        for name, stated, found in differing
    ]
    facts, seen = inputs.part(document, dict, "facts"), None
    population = facts["population"]["value"]
    num_alike = inputs.part(document, int, "participation", "num_alike_names")
    if (folder / ledgers.FILE_OF_RUN).exists():
        seen = _observed(folder, of_run)
        assert seen.ledger is not None
        population, num_alike = len(seen.ledger.client_ids), seen.num_alike_names
    statement = planned(
        config,
        of_run,
        population=population,
        told={name: facts[name]["value"] or "" for name in statements.TOLD},
        num_alike_names=num_alike,
    )
    if inputs.part(document, dict, "participation")["observed"] is not None:
        if seen is None:
            raise ValueError(f"{ledgers.FILE_OF_RUN} is not there")
        statement = ended(statement, folder, config, seen)
    elif seen is not None and seen.keeps_participation is False:
        # The run has not ended, or was killed.
        contradictions.append(f"{ledgers.FILE_OF_RUN} breaks the plan, which is not stated.")
    named, others = document["other_runs"], None
    if isinstance(named, dict):
        names = [named["file"]] if named["file"] else named["names"]
        text = ",".join(str(folder / name) for name in names)
        others = Others.named(text, folder, statement.plan.delta, folder / _SEED_FILE)
    noise = inputs.part(document, dict, "noise")
    sums = SumsEvidence(num_sums=noise["recorded_sums"], record_sha256=noise["record_sha256"])
    return with_evidence(statement, folder, of_run, others, sums), contradictions


def _is_refused(rule: StoppingRule | None, config: Document, observed: Observed) -> bool:
    """Whether a stopping rule refused the round after the last one."""
    ledger, recorded = observed.ledger, config.get(REFUSED)
    if rule is None or ledger is None or ledger.num_rounds == rule.plan.num_rounds:
        return False
    rounds = ledger.num_rounds + 1
    if rule.plan.is_amplified:
        return not rule.allows(ObservedParticipation(rounds, 0, None, 0, keeps_sampling=True))
    if not isinstance(recorded, dict) or recorded["released_rounds"] != ledger.num_rounds:
        return False
    cohort, refused = set(recorded["clients"]), [ledger.num_rounds]
    of_clients = enumerate(ledger.rounds_of_clients)
    with_it = [[*own.tolist(), *(refused if i in cohort else ())] for i, own in of_clients]
    return not rule.allows(ObservedParticipation.of(with_it, rounds))


def _audit_of(folder: pathlib.Path, config: Document, seen: Observed, plan: Guarantee) -> RunAudit:
    flags, of_run = inputs.part(config, dict, "flags"), seen.mechanism
    seed, size = (inputs.part(config, int, name) for name in ("cohort_seed", "num_parameters"))
    canaries = Canaries.drawn(seed, flags["audit_canaries"], size, of_run.num_rounds)
    return canaries.audit(
        folder / _AUDIT,
        of_run,
        num_rounds=seen.participation.num_rounds,
        contribution=float(flags["clip_norm"]) / RunFlags(flags).cohort(),
        delta=plan.delta,
        epsilon=plan.epsilon,
    )


def _represented(config: Document, of_run: Mechanism) -> dict[str, object] | None:
    """The fact of the larger cohort that the clients of a simulation represent, if any."""
    flags = inputs.part(config, dict, "flags")
    clients, multiplier = flags["clients_per_round"], flags["noise_multiplier"]
    share = RunFlags(flags).cohort() / clients
    if share == 1.0:
        return None
    if of_run.extends is not None:
        multiplier = of_run.noise_multiplier / share
    larger = Mechanism.of_one_schema(of_run.factorization, of_run.noise_reference, multiplier)
    fewest = of_run.noise_reference.smallest_population(of_run.num_rounds, clients)
    described = statements.described(larger.guarantee(flags["delta"]))
    return {"clients_per_round": clients, "population": fewest, "planned": described}


def _observed(folder: pathlib.Path, of_run: Mechanism) -> Observed:
    """Compares a run's ledger with its mechanism, using the sampler's seed if it is kept."""
    ledger = ledgers.load(folder / ledgers.FILE_OF_RUN)
    seed = None
    if of_run.sampling is not None:
        # A test run with a fixed seed has the seed in its configuration.
        seed = inputs.part(_json_of(folder / CONFIG_FILE), dict, "flags")["seed"]
        if (folder / _SEED_FILE).exists():
            seed = random_streams.load_seed(folder / _SEED_FILE)
    return of_run.observed(ledger, round_counts=round_counts(folder, ledger), sampling_seed=seed)


def _json_of(path: pathlib.Path) -> dict[str, object]:
    contents = inputs.parsed_json(path.read_text(encoding="utf-8"))
    if not isinstance(contents, dict):
        raise ValueError(f"{path} holds {numbers.shown(contents)}, which is not a JSON object.")
    return contents


@dataclasses.dataclass(frozen=True)
class RunFlags:
    """The flags of a training run.

    Attributes:
      given: The values of flags by name. Runs of earlier versions have no flag for broken timers.
    """

    given: Document

    def clip(self) -> float | AdaptiveClip:
        """Returns the clip norm: a number, or an ``AdaptiveClip``."""
        return self.adaptive_clip() or float(str(self.given["clip_norm"]))

    def cohort(self) -> int:
        """Returns the clients in a round; if few simulate a larger cohort, their number."""
        return inputs.part(self.given["simulated_clients"] or self.given["clients_per_round"], int)

    def adaptive_clip(self) -> AdaptiveClip | None:
        """Returns how the clip norm adapts; None for a constant clip norm.

        Raises:
          ValueError: If a parameter is out of its range.
        """
        flags = self.given
        if flags["clip_norm"] != ADAPTIVE:
            return None
        given = {name: flags[flag] for flag, name in OF_ADAPTIVE.items() if flags[flag] is not None}
        if (stddev := given.get("clipped_count_stddev")) is not None:
            # With fewer simulated clients, the count gets less noise, so that the fraction has the
            # same.
            share = self.cohort() / inputs.part(flags["clients_per_round"], int)
            given["clipped_count_stddev"] = share * numbers.number(stddev, "clip_count_stddev")
        return AdaptiveClip(**given)  # type: ignore[arg-type]  # The class checks them.

    def private_metrics(self) -> PrivateMetrics | None:
        """Returns the private metrics of training; None if the run has none."""
        if not self.given["private_metrics"]:
            return None
        # The size of a batch is no secret under timers, but a secret if a sampler draws the batch.
        return PrivateMetrics.of_training(
            numbers.number(self.given["largest_loss"] or LARGEST_LOSS, "largest_loss"),
            numbers.number(self.given["largest_examples"] or LARGEST_EXAMPLES, "largest_examples"),
            counts_clients=self.given["sampling"] != TIMERS,
        )

    def noise_split(self, mechanism: Mechanism) -> NoiseSplit | None:
        """Returns how noise is split between updates, indicators and metrics; None if not split.

        Raises:
          ValueError: If the clipped count has too little noise.
        """
        clip, metrics = self.clip(), self.private_metrics()
        if metrics is None and not isinstance(clip, AdaptiveClip):
            return None
        multipliers = [each.noise_multiplier for each in mechanism.horizons]
        return noise_split(clip, metrics, self.cohort(), multipliers)

    def forgets(self) -> bool:
        """Returns whether clients that lost their history take part as if they were new."""
        lost, broken = self.given["history_loss_probability"], self.given.get("broken_timers", 0.0)
        loses = numbers.number(lost, "lost") > 0.0 and self.given["after_history_loss"] == REJOIN
        return loses or numbers.number(broken, "broken_timers") > 0.0


def _facts(
    config: Document, of_run: Mechanism, population: int, told: Document, num_alike_names: int
) -> RunFacts:
    """The facts of a run from its configuration and mechanism, and the facts that people state."""
    flags, scheme = inputs.part(config, dict, "flags"), of_run.sampling
    of_flags = RunFlags(flags)
    is_secure = bool(flags["secure_aggregation"])
    measured = ("clients_per_round", "clip_norm", "seed_is_fixed", "aggregator")
    recorded = ("population", "period", *(() if flags["public_data"] else ("public_data",)))
    return RunFacts(
        mechanism=statements.name_of(of_run),
        population=population,
        clients_per_round=of_flags.cohort(),
        clip=of_flags.clip(),
        public_data=_public_data(config),
        enforcement=_enforcement(scheme, flags["timer_hours"], forgets=of_flags.forgets()),
        split=of_flags.noise_split(of_run),
        metrics=of_flags.private_metrics(),
        seed_is_fixed=flags["seed"] is not None,
        aggregator=f"mf_aggregators {inputs.part(config, str, 'versions', 'mf-aggregators')}",
        secure_sums=is_secure,
        simulation=(_SIMULATION, _SECURE_SIMULATION)[: 1 + is_secure],
        has_run_directory=True,
        num_alike_names=num_alike_names,
        origins={
            **dict.fromkeys(measured, f"read from {CONFIG_FILE}"),
            **dict.fromkeys(recorded, _RECORDED),
            **dict.fromkeys(("enforcement", "secure_sums"), "simulated"),
        },
        **told,  # type: ignore[arg-type]  # TOLD names texts alone.
    )


def _public_data(config: Document) -> str:
    """The public data that were used, in the words of the user."""
    flags, sha256 = inputs.part(config, dict, "flags"), config.get(_INITIAL_WEIGHTS)
    text = "not stated, which does not mean that there were none"
    if flags["public_data"] is not None:
        text = flags["public_data"].strip().rstrip(".")
    if sha256 is not None:
        text += f". Training began with the weights of a file (SHA-256 {sha256})"
        text += "; nobody checked what they were trained on"
    return text


def _enforcement(scheme: SamplingScheme | None, timer_hours: float | None, *, forgets: bool) -> str:
    """Returns sentences that say how a simulation keeps its clients to the schema.

    Args:
      scheme: The scheme that draws clients; None for timers.
      timer_hours: The hours of timers by the wall clock; None for timers by rounds.
      forgets: Whether clients that lost their history take part as if they were new.
    """
    if scheme is not None and not scheme.has_groups:
        return "It draws for each client as its device would, and keeps secret who took part."
    if scheme is not None:
        return "The server draws every batch itself and keeps secret who was drawn."
    text = "A timer of each client counts rounds, and no client is selected before it ends."
    if timer_hours is not None:
        text = (
            f"A timer of each client runs for {inputs.in_full(timer_hours)} "
            f"{'hour' if timer_hours == 1.0 else 'hours'}. That as many rounds pass in that time "
            "is assumed, not enforced. What was observed is said below."
        )
    if forgets:
        text += (
            " Clients that lost the history of their participations joined again as new ones, "
            "which breaks the schema."
        )
    return text
