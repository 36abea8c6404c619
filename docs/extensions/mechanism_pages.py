"""Lists the mechanisms of the catalogue, and completes the page of each.

The page's own cell makes the mechanism. A cell that draws the mechanism is added below, and a list
of its options at the end of the page.

The list is written into ``docs/mechanisms/index.md``. A mechanism that has no page, or a page that
has no mechanism, is a warning of Sphinx, and so an error of the build.
"""

import pathlib
from typing import TYPE_CHECKING

from mf_aggregators import catalogue

if TYPE_CHECKING:
    from sphinx.application import Sphinx

# The beginning of the last line in the cell of a page, which has made ``factorization`` before and
# names the picture here.
_END_OF_CELL = "\nmatrix, title = "
# A notebook cell that draws a mechanism and compares it with others.
_PICTURE = """
```{{code-cell}} ipython3
:tags: [hide-input]
:mystnb: {{image: {{alt: "The matrix, and errors by round beside other mechanisms."}}}}

import matplotlib.pyplot as plt
import numpy as np

figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
mfa.figures.heat_map(figure, left, matrix, title=title)
curves = {{"{name}": factorization, **others}}
rounds = np.arange(1, num_rounds + 1)
errors = {{
    name: np.sqrt(each.per_round_variance(workload, participation))
    for name, each in curves.items()
}}
mfa.figures.lines(
    right,
    {{name: (rounds, values) for name, values in errors.items()}},
    title="Error of the running sum",
    x="round",
    y="at sensitivity 1 and noise multiplier 1",
)
for name, each in curves.items():
    print(f"{{name:12}} rmse {{each.rmse(workload, participation):.3f}}")
sensitivity = factorization.sensitivity(participation)
kind = "exact" if sensitivity.is_exact else "an upper bound"
print(f"sensitivity {{sensitivity.value:.4f}}, {{kind}}")
```
"""
_DIRECTORY = pathlib.Path(__file__).resolve().parent.parent / "mechanisms"


def index() -> str:
    """Returns the list of all mechanisms as Markdown."""
    known = catalogue.ENTRIES
    rows = [f"| [`{name}`]({name}.md) | {each.summary} |" for name, each in known.items()]
    return "\n".join(
        [
            "# All mechanisms",
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


def with_picture(name: str, text: str) -> str:
    """Returns the text of a mechanism's page, with a cell added that draws the mechanism.

    Args:
      name: The mechanism.
      text: The page.

    Raises:
      ValueError: If the page's cell does not end with the line that the picture needs.
    """
    before, end_of_cell, after = text.partition(_END_OF_CELL)
    line, fence, rest = after.partition("\n```\n")
    if not fence or "\n" in line:
        raise ValueError(f"the cell of {name}.md must end with a line {_END_OF_CELL.strip()!r} ...")
    return "".join((before, end_of_cell, line, fence, _PICTURE.format(name=name), rest))


def options(name: str) -> str:
    """Returns the options of a mechanism as a section in Markdown.

    Args:
      name: The mechanism.
    """
    found = catalogue.entry(name).options
    if not found:
        return "\n## Options\n\nIt has none.\n"
    lines = ["", "## Options", ""]
    for each, (takes, meaning) in found.items():
        words = takes if isinstance(takes, tuple) else ()
        choices = f"One of {', '.join(f'`{word}`' for word in words)}. " if words else ""
        lines += [f"`--{each}`", f": {choices}{meaning}", ""]
    return "\n".join(lines)


def write(directory: pathlib.Path = _DIRECTORY) -> None:
    """Writes the list of mechanisms to its page.

    Args:
      directory: Where the page goes.
    """
    path, content = directory / "index.md", index()
    if not path.is_file() or path.read_text(encoding="utf-8") != content:
        path.write_text(content, encoding="utf-8")


def _add_options(app: "Sphinx", document: str, source: list[str]) -> None:
    folder, _, name = document.rpartition("/")
    if folder == _DIRECTORY.name and name != "index":
        source[0] = with_picture(name, source[0]) + options(name)


def setup(app: "Sphinx") -> dict[str, bool]:
    """Sphinx extension that writes the list of mechanisms, and completes their pages when read."""
    app.connect("builder-inited", lambda app: write())
    app.connect("source-read", _add_options)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
