"""Makes pages of the site from the source files that documents link to.

A link such as ``[the planner](../mf_aggregators/planning/planner.py)`` leads to the file where a
document is read in the repository. On the site it leads to a page with the file's code.
"""

import pathlib
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from docutils import nodes
    from sphinx.application import Sphinx

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
_DOCUMENTS = ROOT / "docs"
_FOLDER = "source"
_LINK = re.compile(r"\]\(([^)#\s]+\.py)\)")


def linked() -> list[str]:
    """Returns the source files that documents link to, as paths from the root of the repository.

    Raises:
      FileNotFoundError: If one of these files does not exist.
    """
    found = set()
    for document in sorted(_DOCUMENTS.rglob("*.md")):
        for link in _LINK.findall(document.read_text(encoding="utf-8")):
            file = (document.parent / link).resolve()
            if not file.is_file():
                raise FileNotFoundError(f"{document}: there is no {link}")
            found.add(file.relative_to(ROOT).as_posix())
    return sorted(found)


def page_of(file: str) -> str:
    """Returns the name of the page that shows a source file."""
    return f"{_FOLDER}/{file.removesuffix('.py')}"


def _link_to_pages(app: "Sphinx", document: "nodes.document") -> None:
    """Lets links to source files lead to their pages, before Sphinx makes downloads of them."""
    from docutils import nodes
    from sphinx import addnodes

    here = app.env.docname
    for node in list(document.findall(addnodes.download_reference)):
        file = (_DOCUMENTS / here).parent.joinpath(node["reftarget"]).resolve()
        if file.suffix == ".py" and file.is_relative_to(ROOT):
            page = page_of(file.relative_to(ROOT).as_posix())
            url = app.builder.get_relative_uri(here, page)
            node.replace_self(nodes.reference("", "", *node.children, refuri=url))


def _pages(app: "Sphinx") -> Iterator[tuple[str, dict[str, object], str]]:
    if app.builder.format != "html":
        return
    for file in linked():
        code = (ROOT / file).read_text(encoding="utf-8")
        body = app.builder.highlighter.highlight_block(code, "python", linenos=False)
        yield page_of(file), {"title": file, "body": f"<h1>{file}</h1>{body}"}, "page.html"


def setup(app: "Sphinx") -> dict[str, bool]:
    """Sphinx extension that adds pages of source files."""
    # Priority 100 runs before Sphinx's collector of downloads, which has priority 500.
    app.connect("doctree-read", _link_to_pages, priority=100)
    app.connect("html-collect-pages", _pages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
