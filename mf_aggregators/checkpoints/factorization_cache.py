"""A directory of what was computed before, for what compares many factorizations.

An entry is a checkpoint, or the noise multiplier that a scheme needs, under a name made of
what it was computed from. Entries are written whole or not at all, and a damaged one is
computed again.
"""

import hashlib
import importlib.metadata
import json
import math
import os
import pathlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from mf_aggregators import atomic_files, user_cache, validation, version
from mf_aggregators.checkpoints import format
from mf_aggregators.factorizations import Factorization


class FactorizationCacheWarning(UserWarning):
    """An entry of the cache could not be used or written; what it is for was computed."""


def default_directory() -> pathlib.Path | None:
    """Returns where factorizations are kept unless another place is chosen.

    None stands for nowhere: the user has no home directory.
    """
    cache = user_cache.find()
    return None if cache is None else cache / "factorizations"


def holds(directory: pathlib.Path | None, description: Mapping[str, Any]) -> bool:
    """Returns whether the cache has an entry, which may be damaged.

    Args:
      directory: The cache; None for none.
      description: As :func:`fetch` takes it.
    """
    return directory is not None and os.path.exists(directory / _name(description))


def fetch(
    directory: pathlib.Path | None,
    description: Mapping[str, Any],
    compute: Callable[[], Factorization],
) -> Factorization:
    """Returns a factorization from the cache, or computes and keeps it.

    Args:
      directory: The cache; None for none.
      description: Everything that the factorization follows from, JSON-able: the
        mechanism, ``num_rounds`` and its options. The library's version is added, since
        another one may compute better.
      compute: Computes it.

    Returns:
      The factorization. With a FactorizationCacheWarning, it was computed because its
      entry is damaged, or could not be kept.
    """
    if directory is None:
        return compute()
    entry = directory / _name(description)
    # Unlike Path.exists, this does not raise where the cache may not be read.
    if os.path.exists(entry):
        try:
            found = format.load(entry)
            if _is_described(found, description):
                return found
            problem = f"{entry} holds another factorization."
        except format.CheckpointError as error:
            problem = str(error)
        warnings.warn(f"{problem} It is computed again.", FactorizationCacheWarning, stacklevel=2)
    factorization = compute()
    try:
        format.save(factorization, entry, participation=factorization.participation)
    except (format.CheckpointError, OSError) as error:
        warnings.warn(
            f"{error} The factorization is used without being kept.",
            FactorizationCacheWarning,
            stacklevel=2,
        )
    return factorization


def fetch_number(
    directory: pathlib.Path | None, description: Mapping[str, Any], compute: Callable[[], float]
) -> float:
    """Returns a number above zero from the cache, or computes and keeps it.

    Args:
      directory: The cache; None for none.
      description: Everything that the number follows from, JSON-able. The versions of the
        library and of dp-accounting are added.
      compute: Computes it.

    Returns:
      The number, the same to the last bit from the cache. With a FactorizationCacheWarning,
      as :func:`fetch`.
    """
    if directory is None:
        return compute()
    described = {
        **description,
        "dp_accounting_version": importlib.metadata.version("dp-accounting"),
    }
    entry = directory / f"{_name(described)}.json"
    if os.path.exists(entry):
        found = _read_number(entry, described)
        if found is not None:
            return found
        warnings.warn(
            f"{entry} is damaged. It is computed again.", FactorizationCacheWarning, stacklevel=2
        )
    number = compute()
    contents = {"description": described, "number": number}
    text = json.dumps({**contents, "sha256": _digest(contents)}) + "\n"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        atomic_files.write_text(entry, text)
    except OSError as error:
        warnings.warn(
            f"{entry} cannot be written: {error.strerror}. The number is used without being kept.",
            FactorizationCacheWarning,
            stacklevel=2,
        )
    return number


def _is_described(factorization: Factorization, description: Mapping[str, Any]) -> bool:
    stated = {
        **factorization.parameters,
        "mechanism": factorization.mechanism,
        "num_rounds": factorization.num_rounds,
    }
    return all(stated.get(name, value) == value for name, value in description.items())


def _read_number(entry: pathlib.Path, description: Mapping[str, Any]) -> float | None:
    """The number of an entry, or None if it is not whole or is for something else."""
    try:
        contents = validation.parsed_json(entry.read_text(encoding="utf-8"))
        stated = contents.pop("sha256")
        number = contents["number"]
    except (OSError, ValueError, AttributeError, KeyError, TypeError):
        return None
    is_number = isinstance(number, float) and math.isfinite(number) and number > 0.0
    intact = contents == {"description": dict(description), "number": number}
    return number if is_number and intact and stated == _digest(contents) else None


def _digest(contents: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()


def _name(description: Mapping[str, Any]) -> str:
    text = json.dumps({**description, "library_version": version.__version__}, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:20]
    return f"{description.get('mechanism', 'factorization')}-{digest}"
