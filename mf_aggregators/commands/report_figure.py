"""Figure of mf-report: the error by round, the matrix, and what an attacker can do.

This imports matplotlib, which takes a second: mf-report imports it once it draws.
"""

import pathlib
from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mf_aggregators import figures
from mf_aggregators.commands import command_line
from mf_aggregators.commands.report_contents import Subject
from mf_aggregators.factorizations import Factorization
from mf_aggregators.kernel.claim import Guarantee
from mf_aggregators.privacy import attackers

# Width and height of a panel.
_INCHES = (5.4, 4.2)
# Above this, a panel shows the first column of C instead of the whole matrix.
_MOST_ROUNDS_DRAWN = 4096
# False positive rates of the trade-off curves, on a logarithmic axis.
_LEAST_RATE_DRAWN, _RATES_DRAWN = 1e-4, 121


def save_figure(
    subject: Subject, stated: Mapping[str, Guarantee], is_broken: bool, path: pathlib.Path
) -> None:
    """Draws a report as a PNG file.

    Args:
      subject: What it is about.
      stated: The guarantees whose trade-off curves are drawn, by name.
      is_broken: Whether a ledger breaks the plan.
      path: The file.

    Raises:
      CommandError: If it cannot be written.
    """
    factorization = subject.factorization
    figure, (axes,) = figures.panels(1, 3 if stated else 2, _INCHES)
    figures.lines(
        axes[0],
        {
            name: (np.arange(1, len(of_rounds) + 1), np.sqrt(of_rounds))
            for name, of_rounds in subject.variances().items()
        },
        title="Output at noise multiplier 1",
        x="round",
        y="standard deviation",
    )
    _draw_matrix(figure, axes[1], factorization)
    if stated:
        _draw_trade_offs(axes[2], stated)
    schema = f"NOT kept: {subject.schema}" if is_broken else str(subject.schema)
    figures.heading(figure, f"{factorization.mechanism}, n = {factorization.num_rounds}: {schema}")
    with command_line.naming("figure"):
        figures.save(figure, str(path))


def _draw_matrix(figure: Figure, axes: Axes, factorization: Factorization) -> None:
    """Draws the strategy matrix, or its first column for many rounds."""
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


def _draw_trade_offs(axes: Axes, stated: Mapping[str, Guarantee]) -> None:
    """Draws the highest true positive rates of an attacker over false positive rates."""
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
