"""Checks a built site for broken links, missing names and texts, and files loaded from elsewhere.

    python -m docs.extensions.site_checks docs/_build/html

The exit status is 1 if something is wrong, and a line for each fault is on standard error.
"""

import html.parser
import pathlib
import re
import sys
import urllib.parse
import zlib
from collections.abc import Iterable, Iterator

from docs.extensions import command_pages, reference_pages

# Tags and attributes with targets that a browser loads while it shows a page.
_LOADED = {
    ("img", "src"),
    ("link", "href"),
    ("script", "src"),
    ("source", "src"),
    ("iframe", "src"),
}
_INVENTORY_LINE = re.compile(r"(?P<name>\S+)\s+(?P<role>\S+)\s+-?\d+\s+\S+\s+.*")


class _Page(html.parser.HTMLParser):
    """Parses a page: collects its references, and the places in it that others may refer to."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.wordless: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        """Records the references and names in one tag."""
        relation = dict(attributes).get("rel")
        if tag == "img":
            words, source = (dict(attributes).get(name) or "" for name in ("alt", "src"))
            # An image of a notebook without alternative text has its path in that place.
            if words in ("", source):
                self.wordless.append(source)
        for name, value in attributes:
            if value is None:
                continue
            if name == "id" or (tag == "a" and name == "name"):
                self.targets.add(value)
            elif (tag, name) in _LOADED and relation not in ("canonical", "index", "search"):
                self.loaded.append(value)
            if name in ("href", "src"):
                self.links.append(value)


def inventory(site: pathlib.Path) -> set[str]:
    """Returns the Python names in the inventory of a built site.

    Args:
      site: The folder of the site.

    Raises:
      ValueError: If the site's inventory is not in the format that Sphinx writes.
    """
    content = (site / "objects.inv").read_bytes()
    *head, packed = content.split(b"\n", 4)
    if head[0] != b"# Sphinx inventory version 2":
        raise ValueError(f"{site / 'objects.inv'} is no inventory of version 2")
    found = set()
    for line in zlib.decompress(packed).decode().splitlines():
        match = _INVENTORY_LINE.fullmatch(line)
        if match and match["role"].startswith("py:"):
            found.add(match["name"])
    return found


def faults(site: pathlib.Path, public: Iterable[str], commands: Iterable[str]) -> Iterator[str]:
    """Yields the faults of a built site, a line of text for each.

    Args:
      site: The folder of the site.
      public: The dotted names that have to be in the site's inventory.
      commands: The commands that have to have a page.
    """
    missing = set(public) - inventory(site)
    yield from (f"{name} is public and not in the inventory" for name in sorted(missing))
    for command in commands:
        if not (site / "commands" / f"{command}.html").is_file():
            yield f"{command} has no page"
    pages: dict[pathlib.Path, _Page] = {}
    for path in sorted(site.rglob("*.html")):
        pages[path] = _Page()
        pages[path].feed(path.read_text(encoding="utf-8"))
    for path, page in pages.items():
        where = path.relative_to(site)
        for url in page.loaded:
            if urllib.parse.urlsplit(url).netloc:
                yield f"{where} loads {url}"
        yield from (f"{where} has no alternative text for {url}" for url in page.wordless)
        for url in page.links:
            parts = urllib.parse.urlsplit(url)
            if parts.scheme or parts.netloc:
                continue
            name = urllib.parse.unquote(parts.path)
            target = (path.parent / name).resolve() if name else path
            if not target.exists():
                yield f"{where} links to {url}, which is not there"
            elif target in pages and parts.fragment:
                fragment = urllib.parse.unquote(parts.fragment)
                if fragment not in pages[target].targets:
                    yield f"{where} links to {url}, which has no such place"


def public_names() -> list[str]:
    """Returns the dotted names of all public modules, functions, classes and constants."""
    return [
        name
        for page in reference_pages.pages()
        for name in (page.module, *(f"{page.module}.{each}" for each in page.names))
    ]


def main(site: pathlib.Path) -> int:
    """Prints the faults of a built site, and returns the exit status."""
    found = list(faults(site.resolve(), public_names(), command_pages.names()))
    for fault in found:
        print(fault, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1])))
