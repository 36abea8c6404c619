"""A result as one HTML page, from the templates of this folder: ``page.html`` says what it has.

A template has the text and the order of a page; a command gives it numbers and figures. All that it
gives is escaped.
"""

import dataclasses
import itertools
import pathlib
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from absl import flags

from mf_aggregators import atomic_files, version
from mf_aggregators.commands import output_paths
from mf_aggregators.commands.command_line import CommandError, check_choice, check_extra
from mf_aggregators.commands.flag_groups import FlagGroup

if TYPE_CHECKING:
    import matplotlib.figure

_FLAG = "report"
_SUFFIX = ".html"
_TEMPLATES = pathlib.Path(__file__).with_name("templates")
# What draws takes a second to import, and need not be installed where no page is written.
_PACKAGES = ("jinja2", "matplotlib")


@dataclasses.dataclass(frozen=True)
class Picture:
    """A figure with its caption.

    Attributes:
      figure: The figure.
      caption: What it shows, below it; also what a reader hears who does not see it.
    """

    figure: "matplotlib.figure.Figure"
    caption: str


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
        already and may not be replaced, or that is in the checkpoint, or if a package is missing.
    """
    path = values.report
    if path is None:
        return
    check_extra(f"--{_FLAG}", _PACKAGES)
    check_choice(path.endswith(_SUFFIX), f"--{_FLAG} must name an {_SUFFIX} file, found {path}.")
    if checkpoint is not None:
        output_paths.check_apart(path, _FLAG, checkpoint)
    output_paths.check_file(path, _FLAG, values.overwrite)


def write(
    program: str,
    values: flags.FlagValues,
    template: str,
    *,
    title: str,
    pictures: Mapping[str, Sequence[Picture]],
    **context: Any,
) -> None:
    """Writes a page, whole or not at all.

    Args:
      program: The name of the command, which the page shows with the flags that were given.
      values: The parsed flags; ``report`` is the file, whose missing parents are made.
      template: As :func:`text` takes it, and what follows.
      title: Of the page.
      pictures: Its figures.
      **context: What else the template names.

    Raises:
      CommandError: If it cannot be written.
    """
    given = [values[name].serialize() for name in values if values[name].present]
    contents = text(
        template, title=title, command=shlex.join([program, *given]), pictures=pictures, **context
    )
    target = pathlib.Path(values.report)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # Names of files may be no Unicode text.
        atomic_files.write_text(target, contents.encode("utf-8", "backslashreplace").decode())
    except OSError as error:
        raise CommandError(f"--{_FLAG}={target} cannot be written: {error.strerror}.") from error


def text(
    template: str,
    *,
    title: str,
    command: str,
    pictures: Mapping[str, Sequence[Picture]],
    **context: Any,
) -> str:
    """Returns a page.

    Args:
      template: A file of the folder ``templates``.
      title: Of the page.
      command: What made it.
      pictures: Its figures, by where the template has them.
      **context: What else the template names; nothing that it names may be missing.
    """
    import jinja2

    from mf_aggregators import figures

    colours: dict[str, str] = {}
    drawn: dict[str, list[dict[str, str]]] = {}
    number = itertools.count(1)
    for name, row in pictures.items():
        drawn[name] = []
        for picture in row:
            svg = figures.inline_svg(picture.figure, f"figure-{next(number)}", picture.caption)
            colours.update(svg.colours_in_the_dark)
            drawn[name].append({"element": svg.element, "caption": picture.caption})
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["words"] = lambda words: filter(None, re.split(r"(\s+)", words))
    return environment.get_template(template).render(
        context,
        title=title,
        command=command,
        pictures=drawn,
        colours_in_the_dark=colours,
        version=version.__version__,
    )
