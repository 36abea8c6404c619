"""A directory of what was computed before, for what compares many factorizations.

An entry is a checkpoint, or the noise multiplier that a scheme needs, under a name made of what it
was computed from.
"""

import importlib.metadata
import math
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from mf_aggregators import caches, version
from mf_aggregators.checkpoints import format
from mf_aggregators.factorizations import Factorization

# The folder of the user's cache directory that factorizations are cached in by default.
FOLDER = "factorizations"


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
    """Returns a cached factorization, or computes and caches it.

    Args:
      directory: The cache; None for none.
      description: Everything that the factorization follows from, JSON-able: the mechanism,
        ``num_rounds`` and its options. The library's version is added, since another one may
        compute better.
      compute: Computes it.

    Returns:
      The factorization. With a ``caches.CacheWarning``, it was computed because its entry is
      damaged, or it could not be cached.
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
        caches.warn(f"{problem} It is computed again.")
    factorization = compute()
    try:
        format.save(factorization, entry, participation=factorization.participation)
    except (format.CheckpointError, OSError) as error:
        caches.warn(f"{error} The factorization is used without being cached.")
    return factorization


def fetch_number(
    directory: pathlib.Path | None,
    description: Mapping[str, Any],
    compute: Callable[[], float],
    is_believed: Callable[[float], bool] = lambda number: True,
) -> float:
    """Returns a cached number above zero, or computes and caches it.

    Args:
      directory: The cache; None for none.
      description: Everything that the number follows from, JSON-able. The versions of the
        library and of dp-accounting are added.
      compute: Computes it.
      is_believed: Returns whether a number of the cache, which anybody may have written, may be
        used. A guarantee must not rest on one without a check.

    Returns:
      The number, the same to the last bit from the cache. With a ``caches.CacheWarning``, as
      :func:`fetch`.
    """
    if directory is None:
        return compute()

    def believed(value: Any) -> float:
        if not isinstance(value, float) or not math.isfinite(value) or value <= 0.0:
            raise ValueError(f"{value!r} is no finite number above zero")
        if not is_believed(value):
            raise ValueError(f"{value!r} does not keep the target")
        return value

    described = {
        **description,
        "dp_accounting_version": importlib.metadata.version("dp-accounting"),
    }
    return caches.fetch(
        directory / f"{_name(described)}.json",
        described,
        compute,
        field="number",
        to_json=float,
        from_json=believed,
    )


def _is_described(factorization: Factorization, description: Mapping[str, Any]) -> bool:
    stated = {
        # What says nothing of its error is made for the mean, and is asked for likewise.
        "error": "mean",
        **factorization.parameters,
        "mechanism": factorization.mechanism,
        "num_rounds": factorization.num_rounds,
    }
    wanted = {"error": "mean", **description}
    return all(stated.get(name, value) == value for name, value in wanted.items())


def _name(description: Mapping[str, Any]) -> str:
    digest = caches.digest({**description, "library_version": version.__version__})[:20]
    return f"{description.get('mechanism', 'factorization')}-{digest}"
