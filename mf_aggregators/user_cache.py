"""The user's cache directory: what can be computed or fetched again."""

import os
import pathlib


def directory() -> pathlib.Path:
    """Returns ``mf_aggregators`` in the user's cache directory.

    Returns:
      A path in ``$XDG_CACHE_HOME`` where that is absolute, else in ``~/.cache``.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification has relative paths ignored.
    root = pathlib.Path(base) if os.path.isabs(base) else pathlib.Path.home() / ".cache"
    return root / "mf_aggregators"
