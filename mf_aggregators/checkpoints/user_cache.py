"""The user's cache directory, by the name that it has in versions up to 0.5.0."""

import pathlib

from mf_aggregators import user_cache


def directory() -> pathlib.Path:
    """Returns ``mf_aggregators`` in the user's cache directory (``mf_aggregators.user_cache``)."""
    return user_cache.directory()
