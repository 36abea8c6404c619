"""Orders the pages of the site so that notebooks run in parallel.

Sphinx reads consecutive pages in one process, and pages of a folder are consecutive: those of
``tutorials``, which compute for longest, would wait for one another. Here pages are dealt out to
the processes instead, first those that start TensorFlow Federated.
"""

import pathlib
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sphinx.application import Sphinx
    from sphinx.environment import BuildEnvironment

# Text by which a page that starts TensorFlow Federated is recognised.
_FEDERATED = re.compile(r"^import tensorflow_federated|\baudit\.audit\(", re.MULTILINE)


def seconds(text: str) -> int:
    """Estimates how long a page computes, to order pages by.

    Args:
      text: The page's Markdown.
    """
    if "{code-cell}" not in text:
        return 0
    return 30 if _FEDERATED.search(text) else 5


def dealt(pages: Sequence[str], sizes: Sequence[int]) -> list[str]:
    """Deals pages out to parts, so that each part gets about as many of the long ones.

    Args:
      pages: The pages, those that take longest first.
      sizes: How many consecutive pages each part has.
    """
    parts: list[list[str]] = [[] for _ in sizes]
    place = 0
    for page in pages:
        while len(parts[place % len(parts)]) == sizes[place % len(parts)]:
            place += 1
        parts[place % len(parts)].append(page)
        place += 1
    return [page for part in parts for page in part]


def _deal(app: "Sphinx", environment: "BuildEnvironment", names: list[str]) -> None:
    from sphinx.util.parallel import make_chunks

    paths = {name: pathlib.Path(environment.doc2path(name)) for name in names}
    longest_first = sorted(names, key=lambda name: -seconds(paths[name].read_text("utf-8")))
    names[:] = dealt(longest_first, [len(part) for part in make_chunks(names, app.parallel)])


def setup(app: "Sphinx") -> dict[str, bool]:
    """Sphinx extension that orders the pages before Sphinx reads them."""
    app.connect("env-before-read-docs", _deal)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
