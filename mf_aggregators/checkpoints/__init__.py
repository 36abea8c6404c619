"""Factorizations on disk: the library's own checkpoints, and matrices published elsewhere.

A checkpoint is a directory with two files: ``factorization.json`` describes the factorization, and
``arrays.npz`` has its arrays. It is written atomically. A file that is missing, truncated, altered
or of a newer format is refused, and the stated sensitivity is compared with that of the matrix.

Directories of published matrices (``mf_aggregators.checkpoints.published_matrices``) and of
training runs, which contain a checkpoint, can be read as well. Claims of the kernel have another
format (``mf_aggregators.checkpoints.claim_file``).
"""

import contextlib
import hashlib
import io
import json
import math
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from typing import IO

import numpy as np

from mf_aggregators import atomic_files, catalogue, inputs, version, workloads
from mf_aggregators.checkpoints import published_matrices
from mf_aggregators.factorizations import Factorization
from mf_aggregators.kernel import numbers
from mf_aggregators.kernel.numbers import Error, RealArray, rounded_up
from mf_aggregators.participation import Participation, SingleParticipation

# The number of the format that is written, which is the newest that can be read.
_FORMAT_VERSION = 1
# The name of the file that describes a checkpoint.
_DESCRIPTION_FILE = "factorization.json"
# The name of the file with a checkpoint's arrays.
_ARRAYS_FILE = "arrays.npz"
# The name of the file with the description of a ``Mechanism``, in a checkpoint.
MECHANISM_FILE = "mechanism.json"

# The name of the checkpoint in the directory of a training run.
RUN_CHECKPOINT = "factorization"
# The name of the statement (JSON) in the directory of a training run.
STATEMENT_FILE = "privacy.json"
# The name of the configuration in the directory of a training run.
CONFIG_FILE = "config.json"

# Relative tolerance for recomputed sensitivities and noise multipliers, because other libraries and
# versions round differently.
_SENSITIVITY_TOLERANCE = 1e-9
# A version before 3.0 states at most this times the sensitivity of this version.
LARGEST_EARLIER_BOUND = 1.5


class CheckpointError(Error, ValueError):
    """A checkpoint cannot be read or written; the message names the file and the reason.

    Use it when a program reads checkpoints that may be missing or damaged.

    Example:
      >>> import mf_aggregators as mfa
      >>> try:
      ...     mfa.checkpoints.load("nowhere")
      ... except mfa.checkpoints.CheckpointError as error:
      ...     print(str(error).partition(":")[0])
      nowhere/factorization.json cannot be read
    """


@contextlib.contextmanager
def _reading(path: pathlib.Path, more: str = "") -> Iterator[None]:
    """Turns errors while a file is read, or its contents are used, into a CheckpointError."""
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.{more}") from error
    except RecursionError:
        raise CheckpointError(f"{path} is broken: its JSON is nested too deeply.") from None
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error).rstrip(".")
        raise CheckpointError(f"{path} is broken: {reason}.") from error


def _parsed(text: str) -> dict[str, object]:
    """The object of a JSON text; in :func:`_reading`, for one that is nested too deeply."""
    return inputs.part(json.loads(text), dict)  # noqa: TID251


def archived_arrays(file: str | os.PathLike[str] | IO[bytes]) -> dict[str, RealArray]:
    """Returns the arrays of an ``.npz`` file by name, in the order in which they were written.

    Args:
      file: Its path, or the open file.

    Raises:
      OSError: If it cannot be read.
      ValueError: If it is damaged, or is no such file.
    """
    try:
        with np.load(file, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except OSError:
        raise
    except Exception as error:
        # NumPy's reader raises many types for a damaged archive.
        reason = str(error) or type(error).__name__
        raise ValueError(f"the archive of arrays is damaged ({reason})") from error


def save(
    factorization: Factorization,
    directory: str | os.PathLike[str],
    *,
    workload: Mapping[str, object] | None = None,
    participation: Participation | None = None,
    overwrite: bool = True,
    mechanism: Mapping[str, object] | None = None,
) -> None:
    """Writes the checkpoint of a factorization.

    Use it when a matrix took long to compute, or when a command should read it.

    Args:
      factorization: The factorization to save.
      directory: The directory to create; its parents are created as well.
      workload: The description of the workload for which the checkpoint states errors, as for
        ``Workload.described``; the prefix sum by default.
      participation: The schema for which the checkpoint states errors; by default the schema for
        which the factorization was optimised, or single participation.
      overwrite: Whether an existing checkpoint may be replaced.
      mechanism: The result of ``Mechanism.to_dict``, which is written to a file of its own; the
        description gets the file's SHA-256. None for no mechanism.

    Raises:
      CheckpointError: If ``directory`` exists and is not a checkpoint, or is one that may not be
        replaced, or cannot be written.
      ValueError: If the workload is not valid.

    Example:
      >>> import pathlib, tempfile
      >>> import mf_aggregators as mfa
      >>> directory = pathlib.Path(tempfile.mkdtemp()) / "banded"
      >>> matrix = mfa.factorizations.banded(mfa.workloads.prefix_sum(8), num_bands=2)
      >>> mfa.checkpoints.save(matrix, directory)
      >>> sorted(path.name for path in directory.iterdir())
      ['arrays.npz', 'factorization.json']
      >>> mfa.checkpoints.load(directory)
      <banded factorization for 8 rounds>
    """
    target = pathlib.Path(directory)
    description = _describe(
        Factorization.check_own(factorization),
        dict(workload or {"name": "prefix_sum"}),
        participation or factorization.participation or SingleParticipation(),
    )
    buffer = io.BytesIO()
    np.savez(buffer, **factorization.arrays())
    arrays = buffer.getvalue()
    description["arrays_sha256"] = hashlib.sha256(arrays).hexdigest()
    texts: dict[str, str] = {}
    if mechanism is not None:
        text = json.dumps({**_versions(), **mechanism}, indent=2) + "\n"
        texts[MECHANISM_FILE] = text
        description["beside_sha256"] = {
            MECHANISM_FILE: hashlib.sha256(text.encode("utf-8")).hexdigest()
        }
    description["description_sha256"] = _hash_of(description)
    texts[_DESCRIPTION_FILE] = json.dumps(description, indent=2) + "\n"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        check_destination(target, overwrite)
        staging = pathlib.Path(
            tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".partial", dir=target.parent)
        )
        try:
            # A subdirectory gets the usual permissions; the temporary directory itself is private.
            written = staging / "checkpoint"
            written.mkdir()
            atomic_files.write(written / _ARRAYS_FILE, arrays)
            for name, text in texts.items():
                atomic_files.write(written / name, text)
            _move_into_place(written, target)
            atomic_files.synchronise(target.parent)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    except OSError as error:
        raise CheckpointError(f"{target} cannot be written: {error.strerror}.") from error


def check_destination(directory: str | os.PathLike[str], overwrite: bool = True) -> None:
    """Checks that a checkpoint may be written to a directory.

    Args:
      directory: The directory of the checkpoint.
      overwrite: Whether it may replace another checkpoint.

    Raises:
      CheckpointError: If the directory exists and is neither empty nor a checkpoint, or is a
        checkpoint that may not be replaced.
      OSError: If the directory cannot be read.
    """
    target = pathlib.Path(directory)
    if not os.path.lexists(target):
        return
    if not _is_replaceable(target):
        raise CheckpointError(f"{target} exists and is not a checkpoint: choose another directory.")
    if not overwrite and any(target.iterdir()):
        raise CheckpointError(
            f"{target} holds a checkpoint already: choose another directory, or replace it by "
            "--overwrite (overwrite=True in Python)."
        )


def load(directory: str | os.PathLike[str]) -> Factorization:
    """Loads a factorization from a checkpoint.

    Use it when you read a matrix that ``mf-factorize``, a training run or ``save`` wrote.

    Args:
      directory: A directory that :func:`save` wrote, the directory of a training run, or one with
        published matrices.

    Returns:
      The factorization.

    Raises:
      CheckpointError: If a file is missing, truncated, altered or of a newer format, if the matrix
        has another sensitivity than the checkpoint states, or if published matrices are not a
        factorization of a workload.

    Example:
      >>> import pathlib, tempfile
      >>> import mf_aggregators as mfa
      >>> directory = pathlib.Path(tempfile.mkdtemp()) / "blt"
      >>> mfa.checkpoints.save(mfa.factorizations.blt(32, num_buffers=2), directory)
      >>> mfa.checkpoints.load(directory)
      <blt factorization for 32 rounds>
    """
    path = pathlib.Path(directory)
    published = _load_published(path)
    return load_with_description(path)[0] if published is None else published[0]


def load_with_description(
    directory: str | os.PathLike[str],
) -> tuple[Factorization, dict[str, object]]:
    """Reads a checkpoint together with the contents of its ``factorization.json``.

    Args:
      directory: A directory as for :func:`load`. For published matrices, the description is made
        here, for their workload and single participation.

    Returns:
      The factorization and the description.

    Raises:
      CheckpointError: As :func:`load` does.
    """
    path = pathlib.Path(directory)
    if (published := _load_published(path)) is not None:
        factorization, workload = published
        described = _describe(factorization, workload.to_dict(), SingleParticipation())
        return factorization, described
    if is_run(path):
        path /= RUN_CHECKPOINT
    description_path, arrays_path = path / _DESCRIPTION_FILE, path / _ARRAYS_FILE
    more = " A checkpoint is a directory made by mf-factorize or mf_aggregators.checkpoints.save."
    with _reading(description_path, more):
        description = json.loads(description_path.read_text(encoding="utf-8"))  # noqa: TID251
        _check_version(description_path, description["format_version"])
        stated_hash = description["arrays_sha256"]
    with _reading(arrays_path):
        contents = arrays_path.read_bytes()
        if hashlib.sha256(contents).hexdigest() != stated_hash:
            raise CheckpointError(
                f"{arrays_path} is truncated or altered: its SHA-256 is not the one in "
                f"{_DESCRIPTION_FILE}."
            )
        archived = archived_arrays(io.BytesIO(contents))
        arrays = {name: np.asarray(array, np.float64) for name, array in archived.items()}
    with _reading(description_path):
        parameters, errors = description["parameters"], description["errors"]
        if not isinstance(parameters, dict):
            raise ValueError("its parameters are not a JSON object")
        if not isinstance(errors["workload"], dict):
            raise ValueError("its workload is not a JSON object")
        stated = description["optimised_for"]
        name = str(description["mechanism"])
        if name not in catalogue.ENTRIES:
            # Earlier versions let other packages name mechanisms; the parameters name their
            # structure.
            name = str(parameters.get("structure", name))
        entry = catalogue.ENTRIES.get(name) or catalogue.entry(name)
        factorization = entry.factorization.from_arrays(
            description["num_rounds"],
            arrays,
            participation=None if stated is None else Participation.from_dict(stated),
            optimality_gap=description["optimality_gap"],
            parameters=parameters,
        )
        schema = Participation.from_dict(errors["participation"])
        stated_sensitivity = float(errors["sensitivity"])
        is_older = _is_older(description)
    found = factorization.sensitivity(schema).value
    _check_sensitivity(description_path, stated_sensitivity, found, is_older)
    # The hash is checked last, because an error of a field says more. Checkpoints of the first
    # release have none.
    stated_hash = description.get("description_sha256")
    if stated_hash is not None and stated_hash != _hash_of(description):
        raise CheckpointError(
            f"{description_path} was altered: its contents do not have the SHA-256 that it states."
        )
    return factorization, description


def load_with_mechanism(
    directory: str | os.PathLike[str],
) -> tuple[Factorization, dict[str, object], pathlib.Path]:
    """Reads a checkpoint together with the description of its ``Mechanism``.

    Args:
      directory: A directory that ``Mechanism.save`` wrote, or the directory of a training run.

    Returns:
      The factorization, the description of the mechanism for ``Mechanism.from_dict``, and the file
      with this description.

    Raises:
      CheckpointError: As :func:`load` raises it; or if no file describes a mechanism, this file is
        broken, altered or of a newer format, or the noise of a run came from a fixed seed. For a
        run, a change is found only if ``config.json`` or the matrix contradicts it.
    """
    is_of_run = is_run(directory)
    path = pathlib.Path(directory) / (STATEMENT_FILE if is_of_run else MECHANISM_FILE)
    factorization, description = load_with_description(directory)
    if not is_of_run and not path.exists():
        raise CheckpointError(
            f"{directory} holds only a factorization, without participation and noise multiplier: "
            "read it with mf_aggregators.checkpoints.load, and make a Mechanism of it."
        )
    with _reading(path, " A run writes it after its first round." if is_of_run else ""):
        text = path.read_text(encoding="utf-8")
        contents = json.loads(text)  # noqa: TID251
        if is_of_run:
            described = _described_by_statement(contents)
            _check_statement(path, contents, factorization, description)
            _check_configuration(path.with_name(CONFIG_FILE), contents, description)
        else:
            beside = description.get("beside_sha256")
            stated = beside.get(MECHANISM_FILE) if isinstance(beside, dict) else None
            if hashlib.sha256(text.encode("utf-8")).hexdigest() != stated:
                raise ValueError("it was altered, or belongs to another checkpoint")
            _check_version(path, contents["format_version"])
            horizons, sigma, errors = (
                contents["horizons"],
                contents.get("sigma"),
                description["errors"],
            )
            if sigma is None and isinstance(errors, dict):
                # Version 2.0.0 drew noise by the sensitivity that it states.
                sigma = float(horizons[-1]["noise_multiplier"]) * float(errors["sensitivity"])
            described = {"horizons": horizons, "sigma": sigma}
    return factorization, described, path


def _described_by_statement(contents: Mapping[str, object]) -> dict[str, object]:
    """The planned mechanism in a run's statement, as a description for ``Mechanism.from_dict``.

    The statement may be of an earlier version. Each horizon also gets its stated epsilon and delta.
    """
    plans = [*inputs.part(contents.get("earlier_plans", []), list), contents["planned"]]
    if "noise" in contents:
        # Noise multipliers in the plans of statements are rounded, so these are used instead.
        noise, sigma = inputs.part(contents["noise"], dict), None
        multipliers = [float(each) for each in noise["noise_multipliers"]]
    else:
        # The noise of 2.0.0 follows from the sensitivity that it states.
        multipliers = [plan["noise_multiplier"] for plan in plans]
        sigmas = [plan["noise_multiplier"] * plan["sensitivity"] for plan in plans]
        sigma = sigmas[-1]
        if sigma > (1.0 + _SENSITIVITY_TOLERANCE) * min(sigmas):
            raise ValueError("its extended plan has more noise than the plans before")
    return {
        "sigma": sigma,
        "horizons": [
            {
                "num_rounds": plan["num_rounds"],
                "participation": plan["sampling"] or _schema_of(plan),
                "noise_multiplier": multiplier,
                "epsilon": None if plan["epsilon"] is None else float(plan["epsilon"]),
                "delta": float(plan["delta"]),
            }
            for plan, multiplier in zip(plans, multipliers, strict=True)
        ],
    }


def _schema_of(plan: Mapping[str, object]) -> object:
    """The schema of a plan in a statement of this or an earlier version."""
    return plan["schema"] if "schema" in plan else plan["participation"]


def plan_of_run(
    contents: Mapping[str, object], config: Mapping[str, object], description: Mapping[str, object]
) -> tuple[dict[str, object], list[tuple[str, object, object]]]:
    """Returns the plan in a run's statement, and contradictions by the run's other files.

    Args:
      contents: The contents of ``privacy.json``.
      config: The contents of ``config.json``.
      description: The contents of ``factorization.json`` of the run's matrix.

    Returns:
      The planned mechanism, for ``Mechanism.from_dict``; and by name the values that differ, as
      stated and as in the other files.

    Raises:
      KeyError: If an entry is missing.
      TypeError: If an entry has another type.
      ValueError: If a noise multiplier is not a number.
      ZeroDivisionError: If there are no clients.
    """
    flags, plan = (inputs.part(each, dict) for each in (config["flags"], contents["planned"]))
    earlier, extends = contents.get("earlier_plans", []), config.get("extends", [])
    described = _described_by_statement(contents)
    horizons = inputs.part(described, list, "horizons")
    multipliers = [each["noise_multiplier"] for each in horizons]
    pairs: dict[str, tuple[object, object]] = {
        "earlier_plans": (_horizons(earlier), _horizons(extends))
    }
    if plan["sampling"] is None:
        made_for = inputs.part(description["errors"], dict)["participation"]
        pairs["participation"] = _as_proved(_schema_of(plan)), _as_proved(made_for)
        # The flag is the noise multiplier before extensions; the others follow from the matrix. An
        # estimate simulates fewer clients, and scales the multiplier.
        noise, asked = multipliers[0], flags["noise_multiplier"]
        clients = flags["clients_per_round"]
        share = (flags["simulated_clients"] or clients) / clients
        added = None if asked is None else asked * share
    else:
        pairs["sampling"] = plan["sampling"], config.get("sampling")
        # The noise multiplier for a target epsilon is not a flag, but in the configuration.
        noise, added = multipliers[-1], config.get("noise_multiplier")
    given = math.nan if added is None else numbers.number(added, "noise_multiplier")
    if not math.isclose(noise, given, rel_tol=_SENSITIVITY_TOLERANCE):
        pairs["noise_multiplier"] = noise, added
    return described, [(name, *both) for name, both in pairs.items() if both[0] != both[1]]


def _horizons(plans: object) -> list[dict[str, object]]:
    return [
        {"num_rounds": each["num_rounds"], "participation": _as_proved(_schema_of(each))}
        for each in inputs.part(plans, list)
    ]


def _schema_from(described: object) -> Participation:
    """The schema of a description in a file."""
    return Participation.from_dict(inputs.part(described, dict))


def _as_proved(described: object) -> dict[str, object]:
    """A schema in the form that a guarantee uses, because a schema may have two descriptions."""
    schema = _schema_from(described).as_schema()
    return Participation.of_schema(schema).to_dict()


def is_run(directory: str | os.PathLike[str]) -> bool:
    """Returns whether a directory is a training run's, with a checkpoint in it.

    Args:
      directory: The directory, which need not be there.
    """
    path = pathlib.Path(directory)
    in_it = path / RUN_CHECKPOINT / _DESCRIPTION_FILE
    return not (path / _DESCRIPTION_FILE).exists() and in_it.exists()


def _load_published(path: pathlib.Path) -> tuple[Factorization, workloads.Workload] | None:
    # If the directory also has a checkpoint of this library, that one is used.
    if (path / _DESCRIPTION_FILE).exists():
        return None
    try:
        return published_matrices.load(path)
    except ValueError as error:
        raise CheckpointError(str(error)) from error


def _describe(
    factorization: Factorization, workload: Mapping[str, object], schema: Participation
) -> dict[str, object]:
    described = workloads.Workload.described(workload, factorization.num_rounds)
    errors = factorization.errors(described, schema)
    return {
        **_versions(),
        "mechanism": factorization.mechanism,
        "num_rounds": factorization.num_rounds,
        "parameters": dict(factorization.parameters),
        "optimised_for": (
            None if factorization.participation is None else factorization.participation.to_dict()
        ),
        "optimality_gap": factorization.optimality_gap,
        "errors": {
            "workload": dict(workload),
            "participation": schema.to_dict(),
            "sensitivity": errors.sensitivity.value,
            "sensitivity_is_exact": errors.sensitivity.is_exact,
            **errors.to_dict(),
        },
    }


def _check_sensitivity(
    path: pathlib.Path, stated: float, found: float, is_older: bool = False
) -> None:
    # Earlier versions state larger bounds for some matrices, such as online trees.
    most = LARGEST_EARLIER_BOUND if is_older else 1.0 + _SENSITIVITY_TOLERANCE
    # The comparison is negated so that NaN is refused, too.
    if not (1.0 - _SENSITIVITY_TOLERANCE) * found <= stated <= most * found:
        raise CheckpointError(
            f"{path} states a sensitivity of {stated}, and the matrix beside it has {found}: one "
            "of both was altered, is of another checkpoint, or was written by a faulty program."
        )


def _check_statement(
    path: pathlib.Path,
    contents: Mapping[str, object],
    factorization: Factorization,
    description: Mapping[str, object],
) -> None:
    """Checks that a run's statement is about this matrix, and that the seed was secret."""
    is_older = "noise_seed_is_fixed" in contents
    if is_older:
        seed_is_fixed = contents["noise_seed_is_fixed"]
    else:
        seed_is_fixed = inputs.part(contents["facts"], dict)["seed_is_fixed"]["value"]
    if seed_is_fixed is not False:
        raise CheckpointError(
            f"{path.parent} is a run whose noise came from a fixed seed: it has no guarantee."
        )
    planned = inputs.part(contents["planned"], dict)
    schema = SingleParticipation() if planned["sampling"] else _schema_from(_schema_of(planned))
    stated, found = float(planned["sensitivity"]), factorization.sensitivity(schema).value
    # This version states the sensitivity rounded up to six digits.
    if is_older or rounded_up(found, ".6g") != planned["sensitivity"]:
        _check_sensitivity(path, stated, found, is_older)
    if is_older:
        # Versions before 3.0 drew noise by the sensitivity that both files state.
        beside = float(inputs.part(description["errors"], dict)["sensitivity"])
        _check_sensitivity(path, stated, beside)


def _check_configuration(
    path: pathlib.Path, contents: Mapping[str, object], description: Mapping[str, object]
) -> None:
    """Checks that a run's statement agrees with its configuration, if there is one."""
    if not path.exists():
        return
    with _reading(path):
        config = _parsed(path.read_text(encoding="utf-8"))
        _, found = plan_of_run(contents, config, description)
        if inputs.part(config["flags"], dict)["seed"] is not None:
            found.append(("noise_seed_is_fixed", False, True))
    for name, stated, asked in found:
        raise CheckpointError(
            f"{path.with_name(STATEMENT_FILE)} states {name} {json.dumps(stated)}, and the run's "
            f"other files have {json.dumps(asked)}: one of them was altered, or is of another run."
        )


def _versions() -> dict[str, object]:
    return {"format_version": _FORMAT_VERSION, "library_version": version.__version__}


def _is_older(contents: Mapping[str, object]) -> bool:
    """Returns whether a version before 3.0 wrote the contents of a file."""
    return int(str(contents.get("library_version", 0)).partition(".")[0]) < 3


def _check_version(path: pathlib.Path, found: int) -> None:
    if found > _FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format version {found}, newer than {_FORMAT_VERSION}, the newest that "
            f"mf_aggregators {version.__version__} reads: update mf_aggregators."
        )


def _hash_of(description: Mapping[str, object]) -> str:
    """The SHA-256 of a description without its hash."""
    rest = {name: value for name, value in description.items() if name != "description_sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _is_replaceable(target: pathlib.Path) -> bool:
    """Returns whether a path is a checkpoint, intact or damaged, or an empty directory."""
    if not target.is_dir():
        return False
    files = {_DESCRIPTION_FILE, _ARRAYS_FILE, MECHANISM_FILE}
    return {entry.name for entry in target.iterdir()} <= files


def _move_into_place(staging: pathlib.Path, target: pathlib.Path) -> None:
    if not target.exists():
        staging.rename(target)
        return
    # A directory cannot be replaced in one step: the old one is moved aside first, and moved back
    # if the new one cannot be moved into place.
    aside = staging.with_suffix(".replaced")
    target.rename(aside)
    try:
        staging.rename(target)
    except OSError:
        aside.rename(target)
        raise
    shutil.rmtree(aside, ignore_errors=True)
