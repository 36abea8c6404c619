"""Figure of mf-report: errors by round, the strategy matrix, and what an attacker can do.

This imports matplotlib, which takes a second: mf-report imports it once it draws.
"""

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes

from mf_aggregators import factorizations, figures
from mf_aggregators.commands import command_line
from mf_aggregators.commands.report_contents import Subject
from mf_aggregators.kernel.claim import Guarantee
from mf_aggregators.privacy import guarantees

# Width and height of a panel.
_INCHES = (5.4, 4.2)
# A matrix of more rounds is not drawn.
_MOST_ROUNDS_DRAWN = 4096
# False positive rates of the trade-off curves, on a logarithmic axis.
_LEAST_RATE_DRAWN, _RATES_DRAWN = 1e-4, 121


def save(subject: Subject, stated: Mapping[str, Guarantee], is_broken: bool, path: str) -> None:
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
    has_matrix = factorization.num_rounds <= _MOST_ROUNDS_DRAWN
    figure, (axes,) = figures.panels(1, 1 + has_matrix + bool(stated), _INCHES)
    independent = factorizations.identity(factorization.num_rounds)
    variances = {
        factorization.mechanism: subject.errors.per_round_variance,
        "independent noise": independent.per_round_variance(subject.workload, subject.schema),
    }
    rounds = np.arange(1, factorization.num_rounds + 1)
    figures.lines(
        axes[0],
        {name: (rounds, np.sqrt(of_rounds)) for name, of_rounds in variances.items()},
        title="Output at noise multiplier 1",
        x="round",
        y="standard deviation",
    )
    if has_matrix:
        magnitudes = np.sqrt(np.abs(factorization.strategy_matrix()))
        figures.heat_map(figure, axes[1], magnitudes, title="Roots of magnitudes of C")
    if stated:
        _draw_trade_offs(axes[-1], stated)
    schema = f"NOT kept: {subject.schema}" if is_broken else str(subject.schema)
    figures.heading(figure, f"{factorization.mechanism}, n = {factorization.num_rounds}: {schema}")
    with command_line.naming("figure"):
        figures.save(figure, path)


def _draw_trade_offs(axes: Axes, stated: Mapping[str, Guarantee]) -> None:
    """Draws the highest true positive rates of an attacker over false positive rates."""
    rates = np.geomspace(_LEAST_RATE_DRAWN, 1.0, _RATES_DRAWN)
    curves = {
        name: (rates, np.asarray(guarantees.true_positive_rate(guarantee, rates)))
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
