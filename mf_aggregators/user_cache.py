"""The user's cache directory: what can be computed or fetched again."""

import os
import pathlib

from mf_aggregators.errors import Error


class NoHomeError(Error, OSError):
    """This user has no home directory, and no other place for a cache is named."""


def directory() -> pathlib.Path:
    """Returns ``mf_aggregators`` in the user's cache directory.

    Returns:
      A path in ``$XDG_CACHE_HOME`` where that is absolute, else in ``~/.cache``.

    Raises:
      NoHomeError: If there is no home directory, as in containers that run under any user id.
    """
    found = find()
    if found is None:
        raise NoHomeError(
            "there is no home directory to keep files in: set HOME, or XDG_CACHE_HOME, or name a "
            "directory by --cache_dir."
        )
    return found


def find() -> pathlib.Path | None:
    """Returns what :func:`directory` does, or None if there is no home directory."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification has relative paths ignored.
    if os.path.isabs(base):
        return pathlib.Path(base) / "mf_aggregators"
    try:
        return pathlib.Path.home() / ".cache" / "mf_aggregators"
    except RuntimeError:
        return None
