"""What a browser finds in a page, and what is wrong with it."""

import collections
import dataclasses
import html.parser
import pathlib
import re

_VOID = {"meta", "link", "br", "hr", "img", "input", "wbr"}
_OF_OTHERS = re.compile(r"https?:|//|@import|\burl\((?!#|data:)")
# Namespaces are names, and nothing is loaded from them; the page has none all the same.
_REFERENCES = {"href", "src", "xlink:href", "action", "data", "poster", "srcset"}


@dataclasses.dataclass
class Page:
    """A page as it was read.

    Attributes:
      faults: What is wrong with it.
      text: All that a reader sees, in a line.
      paragraphs: The texts of paragraphs.
      conditions: The texts of the paragraphs that stand out.
      tables: The cells of every table, row by row, with the names of columns.
      marked: The rows that stand out, likewise.
      commands: What the buttons copy.
      captions: The captions of figures.
    """

    faults: list[str] = dataclasses.field(default_factory=list)
    text: str = ""
    paragraphs: list[str] = dataclasses.field(default_factory=list)
    conditions: list[str] = dataclasses.field(default_factory=list)
    tables: list[list[list[str]]] = dataclasses.field(default_factory=list)
    marked: list[list[str]] = dataclasses.field(default_factory=list)
    commands: list[str] = dataclasses.field(default_factory=list)
    captions: list[str] = dataclasses.field(default_factory=list)


def read(path: pathlib.Path) -> Page:
    """Reads a page; its faults are empty if it is a good one."""
    reader = _Reader()
    reader.feed(path.read_text(encoding="utf-8"))
    reader.close()
    return reader.finish()


class _Reader(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self._page = Page()
        self._open: list[tuple[str, dict[str, str]]] = []
        self._ids: collections.Counter[str] = collections.Counter()
        self._referred: set[str] = set()
        self._styles = ""
        self._used: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self._attributes(tag, given)
        if tag not in _VOID:
            self._open.append((tag, given))
        page = self._page
        if tag == "table":
            page.tables.append([])
            box = self._open[-2][1]
            if box.get("class") != "table" or not box.get("aria-label") or "tabindex" not in box:
                page.faults.append("a table is in no box that scrolls")
        elif tag == "tr":
            page.tables[-1].append([])
        elif tag in ("td", "th"):
            page.tables[-1][-1].append("")
        elif tag in ("p", "code", "figcaption"):
            lists = {"p": page.paragraphs, "code": page.commands, "figcaption": page.captions}
            lists[tag].append("")
        elif tag == "img" and not given.get("alt"):
            page.faults.append("a figure says nothing to who does not see it")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in _VOID and not self._is_in("svg"):
            self._page.faults.append(f"<{tag}/> is no element of HTML")
        self._attributes(tag, {name: value or "" for name, value in attrs})

    def handle_endtag(self, tag: str) -> None:
        if not self._open or self._open[-1][0] != tag:
            self._page.faults.append(f"</{tag}> ends nothing")
            return
        _, given = self._open.pop()
        page = self._page
        if tag == "tr" and given.get("class") == "marked":
            page.marked.append(page.tables[-1][-1])
        if tag == "p" and given.get("class") == "condition":
            page.conditions.append(page.paragraphs[-1])

    def handle_data(self, data: str) -> None:
        page = self._page
        if self._is_in("style"):
            self._styles += data
            return
        if self._is_in("script"):
            if _OF_OTHERS.search(data):
                page.faults.append("a script names another place")
            return
        page.text += data
        for tag, lists in (
            ("p", page.paragraphs),
            ("code", page.commands),
            ("figcaption", page.captions),
        ):
            if self._is_in(tag):
                lists[-1] += data
        if self._is_in("td") or self._is_in("th"):
            page.tables[-1][-1][-1] += data

    def finish(self) -> Page:
        """What is wrong with the page as a whole."""
        page = self._page
        page.faults += [f"<{tag}> has no end" for tag, _ in self._open]
        page.faults += [
            f"{number} parts are {name}" for name, number in self._ids.items() if number > 1
        ]
        page.faults += [f"nothing is {name}" for name in sorted(self._referred - set(self._ids))]
        if _OF_OTHERS.search(self._styles):
            page.faults.append("a style names another file")
        in_the_dark = self._styles.rpartition("prefers-color-scheme: dark")[2]
        page.faults += [
            f"{name} has no colour in the dark"
            for name in sorted(self._used)
            if f"{name}:" not in in_the_dark
        ]
        return page

    def _attributes(self, tag: str, given: dict[str, str]) -> None:
        if "id" in given:
            self._ids[given["id"]] += 1
        for name, value in given.items():
            if name in _REFERENCES:
                if value.startswith("#"):
                    self._referred.add(value[1:])
                elif not value.startswith("data:"):
                    self._page.faults.append(f"<{tag}> refers to {value}")
            elif _OF_OTHERS.search(value):
                self._page.faults.append(f"<{tag}> names {value}")
            if name.startswith("on"):
                self._page.faults.append(f"<{tag}> has a script")
            self._referred.update(re.findall(r"url\(#([^)]+)\)", value))
            self._used.update(re.findall(r"var\((--[\w-]+)", value))

    def _is_in(self, tag: str) -> bool:
        return any(tag == other for other, _ in self._open)
