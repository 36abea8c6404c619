"""A result as one HTML page: paragraphs, pictures, tables, and commands to copy.

A page is one file that needs no other: figures are elements of it, and a policy in its head keeps
browsers from loading anything. It follows the reader's choice of light or dark. On a narrow screen,
pictures stand below each other, and a wide table scrolls in its own box. All text is escaped. The
only script copies commands; where scripts do not run, its buttons are not shown.
"""

import dataclasses
import html
import itertools
import os
import pathlib
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from absl import flags

from mf_aggregators import atomic_files, version
from mf_aggregators.commands import output_paths
from mf_aggregators.commands.command_line import CommandError, check_choice
from mf_aggregators.commands.flag_groups import FlagGroup

_FLAG = "report"
_SUFFIX = ".html"


@dataclasses.dataclass(frozen=True)
class Paragraph:
    """Sentences.

    Attributes:
      text: The sentences.
      is_condition: Whether a guarantee depends on what they say, so that nobody may miss it.
    """

    text: str
    is_condition: bool = False


@dataclasses.dataclass(frozen=True)
class Picture:
    """A figure with its caption.

    Attributes:
      figure: A ``matplotlib.figure.Figure``.
      caption: What it shows, below it; also what a reader hears who does not see it.
    """

    figure: Any
    caption: str


@dataclasses.dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
      name: What it is a table of.
      columns: The names of the columns.
      rows: The texts of the cells. Those of more than two columns are aligned like numbers; two
        columns are names with values of any kind.
      marked: The row that stands out, if any.
    """

    name: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    marked: int | None = None


@dataclasses.dataclass(frozen=True)
class Commands:
    """Lines to type, which a button copies.

    Attributes:
      text: The lines.
    """

    text: str


Part: TypeAlias = Paragraph | Picture | Table | Commands


@dataclasses.dataclass(frozen=True)
class Section:
    """A part of a page with a title.

    Attributes:
      title: The title.
      parts: What stands below it. Pictures in a row stand beside each other where there is room.
    """

    title: str
    parts: Sequence[Part]


def define_report(values: flags.FlagValues, meaning: str) -> None:
    """Defines --report.

    Args:
      values: Where it is defined.
      meaning: What the page has: the end of a sentence that begins with "An .html file to write".
    """
    FlagGroup(values, "Output").path(
        _FLAG, f"An {_SUFFIX} file to write: one page that needs no other file, with {meaning}"
    )


def check_report(values: flags.FlagValues, checkpoint: str | None) -> None:
    """Checks --report before anything is computed for it.

    Args:
      values: The parsed flags, with ``overwrite``.
      checkpoint: The directory of a checkpoint that the command reads or writes, if any.

    Raises:
      CommandError: If it names no .html file, or one that cannot be written, that is there
        already and may not be replaced, or that is in the checkpoint.
    """
    path = values.report
    if path is None:
        return
    check_choice(path.endswith(_SUFFIX), f"--{_FLAG} must name an {_SUFFIX} file, found {path}.")
    if checkpoint is not None:
        output_paths.check_apart(path, _FLAG, checkpoint)
    output_paths.check_file(path, _FLAG, values.overwrite)


def write(path: str | os.PathLike[str], title: str, sections: Sequence[Section]) -> None:
    """Writes a page, whole or not at all.

    Args:
      path: What --report names; missing parents are made.
      title: Of the page.
      sections: The first has no need of a title of its own: it stands below the page's.

    Raises:
      CommandError: If it cannot be written.
    """
    # Names of files may be no Unicode text.
    contents = text(title, sections).encode("utf-8", "backslashreplace").decode("utf-8")
    target = pathlib.Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        atomic_files.write_text(target, contents)
    except OSError as error:
        raise CommandError(f"--{_FLAG}={path} cannot be written: {error.strerror}.") from error


def text(title: str, sections: Sequence[Section]) -> str:
    """Returns a page.

    Args:
      title: Of the page.
      sections: As :func:`write` takes them.
    """
    page = _Page()
    body = [line for section in sections for line in page.section(section)]
    styles = _STYLE + _colours(page.colours_in_the_dark)
    lines = [
        "<!DOCTYPE html>",
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        f'<meta name="generator" content="mf_aggregators {version.__version__}">',
        f"<title>{html.escape(title)}</title>",
        f"<style>\n{styles}\n</style>",
        "</head>",
        "<body>",
        "<main>",
        f"<h1>{html.escape(title)}</h1>",
        *body,
        f"<footer>Made by mf_aggregators {version.__version__}.</footer>",
        "</main>",
        f"<script>\n{_SCRIPT}\n</script>",
        "</body>",
        "</html>",
    ]
    return "\n".join(lines) + "\n"


def how_it_was_made(program: str, values: flags.FlagValues) -> Section:
    """Returns the command that a page comes from.

    Args:
      program: Its name.
      values: The parsed flags, of which those that were given are shown.
    """
    given = [values[name].serialize() for name in values if values[name].present]
    return Section("How this page was made", [Commands(shlex.join([program, *given]))])


class _Page:
    """Parts as lines of HTML; the figures of one page have names of their own."""

    def __init__(self) -> None:
        self.colours_in_the_dark: dict[str, str] = {}
        self._num_figures = 0

    def section(self, section: Section) -> Iterator[str]:
        yield "<section>"
        if section.title:
            yield f"<h2>{html.escape(section.title)}</h2>"
        for is_row, parts in itertools.groupby(
            section.parts, lambda part: isinstance(part, Picture)
        ):
            lines = [line for part in parts for line in self._part(part)]
            yield from ['<div class="pictures">', *lines, "</div>"] if is_row else lines
        yield "</section>"

    def _part(self, part: Part) -> Iterator[str]:
        if isinstance(part, Paragraph):
            kind = ' class="condition"' if part.is_condition else ""
            yield f"<p{kind}>{html.escape(part.text)}</p>"
        elif isinstance(part, Picture):
            yield from self._picture(part)
        elif isinstance(part, Table):
            yield from _table(part)
        else:
            yield '<div class="commands">'
            yield '<button type="button" class="copy" hidden>Copy</button>'
            yield f"<pre><code>{_words(part.text)}</code></pre>"
            yield "</div>"

    def _picture(self, picture: Picture) -> Iterator[str]:
        # matplotlib takes a second to import, which pages alone need.
        from mf_aggregators import figures

        self._num_figures += 1
        drawn = figures.inline_svg(picture.figure, f"figure-{self._num_figures}", picture.caption)
        self.colours_in_the_dark.update(drawn.colours_in_the_dark)
        yield "<figure>"
        yield drawn.element
        yield f"<figcaption>{html.escape(picture.caption)}</figcaption>"
        yield "</figure>"


def _words(text: str) -> str:
    """Words in elements of their own, which browsers do not break at the hyphens of flags."""
    return "".join(
        part if part.isspace() else f"<span>{html.escape(part)}</span>"
        for part in re.split(r"(\s+)", text)
        if part
    )


def _table(table: Table) -> Iterator[str]:
    # Whoever has no mouse scrolls what has the focus.
    name = html.escape(table.name)
    yield f'<div class="table" role="region" aria-label="{name}" tabindex="0">'
    has_names = len(table.columns) == 2
    yield '<table class="values">' if has_names else "<table>"
    columns = "".join(f'<th scope="col">{html.escape(each)}</th>' for each in table.columns)
    yield f"<thead><tr>{columns}</tr></thead>"
    yield "<tbody>"
    for place, (first, *others) in enumerate(table.rows):
        first = html.escape(first)
        if has_names:
            # Long ones are broken at their underscores.
            first = first.replace("_", "_<wbr>")
        kind = ' class="marked"' if place == table.marked else ""
        cells = "".join(f"<td>{html.escape(each)}</td>" for each in others)
        yield f'<tr{kind}><th scope="row">{first}</th>{cells}</tr>'
    yield "</tbody>"
    yield "</table>"
    yield "</div>"


def _colours(in_the_dark: Mapping[str, str]) -> str:
    """The custom properties of figures' colours, for the dark."""
    properties = "".join(
        f"--colour-{colour.removeprefix('#')}: {dark}; " for colour, dark in in_the_dark.items()
    )
    return f"\n@media screen and (prefers-color-scheme: dark) {{\n:root {{ {properties}}}\n}}"


# Nothing is loaded, from nowhere; images are in the page itself.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"

_STYLE = """
:root {
  --background: #ffffff; --text: #1b1f24; --faint: #59636e; --line: #d0d7de;
  --raised: #f6f8fa; --marked: #e8f1fb; --edge: #0b61b0;
  color-scheme: light dark;
}
@media screen and (prefers-color-scheme: dark) {
  :root {
    --background: #15181c; --text: #e6e8eb; --faint: #a3abb4; --line: #3a4149;
    --raised: #1e2329; --marked: #1c2d42; --edge: #4fa5f4;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--background); color: var(--text);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif;
}
main { max-width: 76rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0.5rem 0 1rem; }
h2 { font-size: 1.2rem; margin: 2rem 0 0.5rem; }
p { max-width: 50rem; margin: 0.5rem 0; overflow-wrap: anywhere; }
.condition {
  border-left: 4px solid var(--edge); background: var(--marked); padding: 0.6rem 0.9rem;
}
.pictures {
  display: grid; gap: 1rem; margin: 1rem 0;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 23rem), 1fr));
}
.pictures:has(> :nth-child(2):nth-last-child(odd)) {
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 30rem), 1fr));
}
figure { margin: 0; min-width: 0; }
svg { display: block; width: 100%; height: auto; }
svg * { stroke-linejoin: round; stroke-linecap: butt; }
figcaption { color: var(--faint); font-size: 0.875rem; }
.table {
  overflow-x: auto; width: fit-content; max-width: 100%; margin: 1rem 0;
  border: 1px solid var(--line);
}
table { border-collapse: collapse; font-size: 0.875rem; }
th, td { padding: 0.35rem 0.7rem; text-align: right; white-space: nowrap; }
th:first-child { text-align: left; }
thead th { border-bottom: 1px solid var(--line); background: var(--raised); }
tbody th { font-weight: normal; }
.values :is(th, td) { text-align: left; white-space: normal; }
.values td { min-width: 8rem; overflow-wrap: anywhere; }
tbody tr + tr > * { border-top: 1px solid var(--line); }
.marked > * { background: var(--marked); font-weight: bold; }
.commands { position: relative; margin: 0.75rem 0; }
pre {
  margin: 0; padding: 0.75rem; border: 1px solid var(--line); background: var(--raised);
  font: 0.8125rem/1.5 ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace;
  white-space: pre-wrap; overflow-wrap: anywhere;
}
code span { display: inline-block; max-width: 100%; }
.copy {
  float: right; margin: 0.4rem; font: inherit; font-size: 0.8125rem; padding: 0.15rem 0.6rem;
  color: var(--text); background: var(--background); border: 1px solid var(--line);
  cursor: pointer;
}
footer { margin: 2rem 0 0.5rem; color: var(--faint); font-size: 0.875rem; }
""".strip()

# Where the clipboard is out of reach, the commands are selected, for the reader to copy.
_SCRIPT = """
for (const button of document.querySelectorAll("button.copy")) {
  const code = button.parentElement.querySelector("code");
  const select = () => {
    getSelection().selectAllChildren(code);
    button.textContent = "Selected";
  };
  button.hidden = false;
  button.addEventListener("click", () => {
    if (!navigator.clipboard) { select(); return; }
    navigator.clipboard.writeText(code.textContent).then(
      () => { button.textContent = "Copied"; }, select);
  });
}
""".strip()
