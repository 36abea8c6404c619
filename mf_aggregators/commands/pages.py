"""Pages and figures of commands: panels that several draw, and a result as one HTML page.

A page is made from one of the ``templates``: that has the text and the order, and a command gives
it numbers and figures, all of which is escaped. This imports matplotlib, which takes a second:
commands import it once they draw.
"""

import base64
import dataclasses
import io
import pathlib
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from absl import flags
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mf_aggregators import atomic_files, figures, version
from mf_aggregators.commands.command_line import CommandError
from mf_aggregators.factorizations import Factorization
from mf_aggregators.kernel.claim import Guarantee
from mf_aggregators.privacy import attackers

# Width and height of a panel.
INCHES = (5.4, 4.2)
# Above this, a panel shows the first column of C instead of the whole matrix.
_MOST_ROUNDS_DRAWN = 4096
# False positive rates of the trade-off curves, on a logarithmic axis.
_LEAST_RATE_DRAWN, _RATES_DRAWN = 1e-4, 121
_TEMPLATES = pathlib.Path(__file__).with_name("templates")


@dataclasses.dataclass(frozen=True)
class Picture:
    """A figure with its caption.

    Attributes:
      figure: The figure.
      caption: What it shows, below it; also what a reader hears who does not see it.
    """

    figure: Figure
    caption: str


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
      template: As :func:`_text` takes it, and what follows.
      title: Of the page.
      pictures: Its figures.
      **context: What else the template names.

    Raises:
      CommandError: If it cannot be written.
    """
    given = [values[name].serialize() for name in values if values[name].present]
    contents = _text(
        template, title=title, command=shlex.join([program, *given]), pictures=pictures, **context
    )
    target = pathlib.Path(values.report)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # Names of files may not be Unicode.
        atomic_files.write_text(target, contents.encode("utf-8", "backslashreplace").decode())
    except OSError as error:
        raise CommandError(f"--report={target} cannot be written: {error.strerror}.") from error


def _text(
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
    # A figure alone needs no templates.
    import jinja2

    drawn = {
        name: [{"source": _as_data(each.figure), "caption": each.caption} for each in row]
        for name, row in pictures.items()
    }
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
        version=version.__version__,
    )


def _as_data(figure: Figure) -> str:
    """The address of an image that is part of the page."""
    buffer = io.BytesIO()
    figures.save(figure, buffer, "svg")
    return f"data:image/svg+xml;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def one_panel(height: float = INCHES[1]) -> tuple[Figure, Axes]:
    """Returns a figure of one panel, and the panel.

    Args:
      height: In inches.
    """
    figure, ((axes,),) = figures.panels(1, 1, (INCHES[0], height))
    return figure, axes


def draw_by_round(
    axes: Axes, variances: Mapping[str, np.ndarray], *, title: str, logarithmic: str = ""
) -> None:
    """Draws standard deviations by round.

    Args:
      axes: The panel.
      variances: (num_rounds,) floats by name.
      title: Above the panel.
      logarithmic: Which axes are logarithmic.
    """
    figures.lines(
        axes,
        {
            name: (np.arange(1, len(of_rounds) + 1), np.sqrt(of_rounds))
            for name, of_rounds in variances.items()
        },
        title=title,
        x="round",
        y="standard deviation",
        logarithmic=logarithmic,
    )


def draw_matrix(figure: Figure, axes: Axes, factorization: Factorization) -> None:
    """Draws the strategy matrix, or its first column for many rounds.

    Args:
      figure: The figure.
      axes: The panel.
      factorization: Has the matrix.
    """
    num_rounds = factorization.num_rounds
    if num_rounds <= _MOST_ROUNDS_DRAWN:
        magnitudes = np.sqrt(np.abs(factorization.strategy_matrix()))
        figures.heat_map(figure, axes, magnitudes, title="Strategy matrix C (root of magnitudes)")
        return
    first = np.zeros(num_rounds)
    first[0] = 1.0
    column = np.abs(factorization.encode(first))[:num_rounds]
    figures.lines(
        axes,
        {factorization.mechanism: (np.arange(1, num_rounds + 1), column)},
        title="First column of C (magnitudes)",
        x="row",
        y="magnitude",
        logarithmic="xy",
        with_legend=False,
    )


def draw_trade_offs(axes: Axes, stated: Mapping[str, Guarantee]) -> None:
    """Draws the highest true positive rates of an attacker over false positive rates.

    Args:
      axes: The panel.
      stated: The guarantees, by name.
    """
    rates = np.geomspace(_LEAST_RATE_DRAWN, 1.0, _RATES_DRAWN)
    curves = {
        name: (rates, np.asarray(attackers.true_positive_rate(guarantee, rates)))
        for name, guarantee in stated.items()
    }
    figures.lines(
        axes,
        {**curves, "guessing": (rates, rates)},
        title="What an attacker can do",
        x="false positive rate",
        y="highest true positive rate",
        logarithmic="xy",
    )
