"""Lets each kind of TensorFlow graph be compared with the kernel once in a run of the tests.

The library compares the graphs of every new process, which takes seconds of a processor, and tests
create hundreds of processes of a few kinds. ``test_graph_check.py`` is about the comparison and
has the library's own.
"""

import hashlib
import os
import pathlib
import sys
from typing import Any

# The directory in which all processes of a run of the tests note what they have compared.
_DIRECTORY = "MF_AGGREGATORS_COMPARED_GRAPHS"
_GRAPH_CHECK = "mf_aggregators.tff.graph_check"


def begin(directory: pathlib.Path) -> None:
    """Says where all processes of a run of the tests note what they have compared.

    Args:
      directory: Made if it is missing.
    """
    directory.mkdir(exist_ok=True)
    os.environ[_DIRECTORY] = str(directory)


def compare_kinds_once(is_wanted: bool = True) -> None:
    """Leaves the comparison out for kinds that were compared, once the library is imported.

    Args:
      is_wanted: False to restore the library's own comparison.
    """
    graph_check: Any = sys.modules.get(_GRAPH_CHECK)
    if graph_check is None or _DIRECTORY not in os.environ:
        return
    whole = getattr(graph_check.check, "whole", graph_check.check)

    def check(query: Any) -> None:
        name = hashlib.sha256(_kind(query).encode()).hexdigest()
        note = pathlib.Path(os.environ[_DIRECTORY], name)
        if not note.exists():
            whole(query)
            note.touch()

    check.whole = whole  # type: ignore[attr-defined]
    graph_check.check = check if is_wanted else whole


def _kind(query: Any) -> str:
    """The choices that decide which operations the graphs of a query have."""
    parts = query.mechanism.parts if hasattr(query, "mechanism") else query.parts
    release, noise = parts.release, parts.noise
    recursion = release.rows.recursion.normalised
    kind = (
        type(query).__name__,
        type(recursion).__name__,
        recursion.num_earlier_rows > 0,
        recursion.num_state_vectors > 0,
        len(release.horizons) - 1,
        type(noise.store).__name__,
        sorted({spec.dtype.name for spec in noise.specs}),
        parts.record is not None,
        release.sums.is_secure,
    )
    return repr(kind)
