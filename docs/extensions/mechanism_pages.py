"""Lists the mechanisms of the catalogue, and completes the page of each with its options.

The list is written into ``docs/mechanisms/index.md``. A mechanism that has no page, or a page that
has no mechanism, is a warning of Sphinx, and so an error of the build.
"""

import pathlib
from typing import Any

from mf_aggregators import catalogue

_DIRECTORY = pathlib.Path(__file__).resolve().parent.parent / "mechanisms"


def index() -> str:
    """Returns the list of mechanisms as Markdown."""
    known = catalogue.entries()
    rows = [f"| [`{name}`]({name}.md) | {each.summary} |" for name, each in known.items()]
    return "\n".join(
        [
            "# A page for each mechanism",
            "",
            "[Which mechanism?](../mechanisms.md) compares them.",
            "",
            "| mechanism | what it is |",
            "| --- | --- |",
            *rows,
            "",
            ":::{toctree}",
            ":hidden:",
            "",
            *known,
            ":::",
            "",
        ]
    )


def options(name: str) -> str:
    """Returns the options of a mechanism as a section in Markdown.

    Args:
      name: The mechanism.
    """
    found = catalogue.entry(name).options
    if not found:
        return "\n## Options\n\nIt has none.\n"
    lines = ["", "## Options", ""]
    for option in found:
        choices = ", ".join(f"`{choice}`" for choice in option.choices)
        sentences = [
            option.meaning,
            f"One of {choices}." if choices else "",
            f"Default: {option.described_default()}." if option.described_default() else "",
        ]
        lines += [f"`--{option.name}`", f": {' '.join(filter(None, sentences))}", ""]
    return "\n".join(lines)


def write(directory: pathlib.Path = _DIRECTORY) -> None:
    """Writes the list.

    Args:
      directory: Where to.
    """
    path, content = directory / "index.md", index()
    if not path.is_file() or path.read_text(encoding="utf-8") != content:
        path.write_text(content, encoding="utf-8")


def _add_options(app: Any, document: str, source: list[str]) -> None:
    folder, _, name = document.rpartition("/")
    if folder == _DIRECTORY.name and name != "index":
        source[0] += options(name)


def setup(app: Any) -> dict[str, bool]:
    """Writes the list before Sphinx looks for sources, and options as it reads pages."""
    app.connect("builder-inited", lambda app: write())
    app.connect("source-read", _add_options)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
