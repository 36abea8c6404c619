"""The user's cache directory, and cached values as JSON: everything in it can be computed again."""

import hashlib
import json
import os
import pathlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from mf_aggregators import atomic_files, inputs

_Value = TypeVar("_Value")


class CacheWarning(UserWarning):
    """An entry of a cache could not be used or written; its value was computed."""


def directory() -> pathlib.Path:
    """Returns ``mf_aggregators`` in the user's cache directory.

    Returns:
      A path in ``$XDG_CACHE_HOME`` where that is absolute, else in ``~/.cache``.

    Raises:
      OSError: If there is no home directory, as in containers that run under any user id.
    """
    found = find()
    if found is None:
        raise OSError(
            "there is no home directory to keep files in: set HOME, or XDG_CACHE_HOME, or name a "
            "directory by --cache_dir."
        )
    return found


def find(name: str = "") -> pathlib.Path | None:
    """Returns a folder of :func:`directory`, or None if there is no home directory.

    Args:
      name: The folder; the whole directory by default.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification has relative paths ignored.
    if os.path.isabs(base):
        return pathlib.Path(base) / "mf_aggregators" / name
    try:
        return pathlib.Path.home() / ".cache" / "mf_aggregators" / name
    except RuntimeError:
        return None


def digest(contents: Mapping[str, Any]) -> str:
    """Returns the SHA-256 of a JSON-able mapping, in hexadecimal."""
    return hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()


def fetch(
    entry: pathlib.Path | None,
    description: Mapping[str, Any],
    compute: Callable[[], _Value],
    *,
    field: str,
    to_json: Callable[[_Value], Any],
    from_json: Callable[[Any], _Value],
) -> _Value:
    """Returns a cached value, or computes and caches it.

    An entry is written whole or not at all. One that is damaged, or is for something else, is
    computed again.

    Args:
      entry: The file; None for no cache.
      description: Everything that the value follows from, JSON-able; the file says it too.
      compute: Computes the value.
      field: The name of the value in the file.
      to_json: Makes something JSON-able of it.
      from_json: Makes it from that again; raises a ValueError for what must not be used.

    Returns:
      The value. With a CacheWarning, it was computed because its entry cannot be used, or it could
      not be cached.
    """
    if entry is None:
        return compute()
    # Unlike Path.exists, this does not raise where the cache may not be read.
    if os.path.exists(entry):
        try:
            contents = inputs.parsed_json(entry.read_text(encoding="utf-8"))
            stated = contents.pop("sha256")
            if contents["description"] != description or stated != digest(contents):
                raise ValueError("its checksum or its description differs")
            return from_json(contents[field])
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            warn(f"{entry} is damaged ({error}). It is computed again.")
    value = compute()
    contents = {"description": description, field: to_json(value)}
    text = json.dumps({**contents, "sha256": digest(contents)}) + "\n"
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        atomic_files.write_text(entry, text)
    except OSError as error:
        warn(
            f"{entry} cannot be written: {error.strerror}. Its value is used without being cached."
        )
    return value


def warn(message: str) -> None:
    """Gives a CacheWarning, as from the caller of the function that found its reason."""
    warnings.warn(message, CacheWarning, stacklevel=3)
