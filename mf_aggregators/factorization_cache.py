"""A directory of factorizations that were computed before, for what compares many of them.

An entry is a checkpoint under a name made of what it was computed from. Entries are written
whole or not at all, and a damaged one is computed again.
"""

import hashlib
import json
import pathlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from mf_aggregators import checkpoints, user_cache, version
from mf_aggregators.factorizations import Factorization


class FactorizationCacheWarning(UserWarning):
    """An entry of the cache could not be used or written; the factorization was computed."""


def default_directory() -> pathlib.Path:
    """Returns where factorizations are kept unless another place is chosen."""
    return user_cache.directory() / "factorizations"


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
    if entry.exists():
        try:
            found = checkpoints.load(entry)
            if found.mechanism == description.get("mechanism", found.mechanism):
                return found
            problem = f"{entry} holds another mechanism"
        except checkpoints.CheckpointError as error:
            problem = str(error)
        warnings.warn(f"{problem} It is computed again.", FactorizationCacheWarning, stacklevel=2)
    factorization = compute()
    try:
        checkpoints.save(factorization, entry, participation=factorization.participation)
    except (checkpoints.CheckpointError, OSError) as error:
        warnings.warn(
            f"{error} The factorization is used without being kept.",
            FactorizationCacheWarning,
            stacklevel=2,
        )
    return factorization


def _name(description: Mapping[str, Any]) -> str:
    text = json.dumps({**description, "library_version": version.__version__}, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:20]
    return f"{description.get('mechanism', 'factorization')}-{digest}"
