"""Draws figures of the site that compare mechanisms by matrices, noise and errors in plans.

``site_figures`` writes these figures, with all others.
"""

import pathlib
import re
from collections.abc import Callable, Mapping

import matplotlib.axes
import matplotlib.figure
import numpy as np

import mf_aggregators as mfa
from mf_aggregators import figures
from mf_aggregators.participation import MinSeparation

# Rounds and separation of the drawn matrices: small enough for single entries to be seen.
ROUNDS_OF_MATRICES, SEPARATION_OF_MATRICES = 16, 4
# Rounds, separation and guarantee of the mechanisms with drawn noise: those of the README's run.
NUM_ROUNDS, SEPARATION = 200, 25
EPSILON, DELTA = 8.0, 1e-4
_PLANNING = pathlib.Path(__file__).resolve().parent.parent / "planning.md"
# Rows of the table in ``planning.md``, each with who draws the participations.
WAYS = {
    "banded 16, b-min-sep 16": "each device, a coin",
    "banded 25, 25 bins": "each device, one bin",
    "optimal, fixed epochs": "nobody: fixed order",
    "banded 8, 1 of 3 rounds": "data centre, allocation",
    "banded 25, amplified": "data centre, Poisson",
    "banded 25": "nobody: timers",
}
# Width of a panel in inches, so that its text has the size of a phone's own text.
_WIDTH = 4.0
_MATRICES_IN_A_ROW = 3
# Area, in squared points, of the square that stands for a matrix's largest entry.
_LARGEST_SQUARE = 20.0


def factorizations(num_rounds: int, separation: int) -> dict[str, mfa.factorizations.Factorization]:
    """Returns a factorization of each mechanism that the figures show, under timers.

    Args:
      num_rounds: The horizon.
      separation: The separation that timers enforce.
    """
    timers = MinSeparation(separation)
    made = mfa.factorizations
    return {
        "identity": made.identity(num_rounds),
        "tree full": made.tree_aggregation(num_rounds, decoder="full"),
        "banded": made.banded(num_rounds, num_bands=separation),
        "toeplitz": made.toeplitz(num_rounds, separation, participation=timers),
        "blt": made.blt(num_rounds, 2, participation=timers),
        "banded_inverse": made.banded_inverse(num_rounds, separation, participation=timers),
    }


def mechanisms() -> matplotlib.figure.Figure:
    """Draws the matrix C of each mechanism, and the noise in the model by round."""
    small = factorizations(ROUNDS_OF_MATRICES, SEPARATION_OF_MATRICES)
    num_rows = len(small) // _MATRICES_IN_A_ROW
    panel = (_WIDTH / _MATRICES_IN_A_ROW, 1.6)
    figure, panels = figures.panels(num_rows + 2, _MATRICES_IN_A_ROW, panel)
    for axes, (name, each) in zip(panels.flat, small.items(), strict=False):
        _draw_entries(axes, np.asarray(each.strategy_matrix()), name)
    grid = panels[0, 0].get_gridspec()
    for axes in panels[num_rows:].flat:
        axes.remove()
    below = figure.add_subplot(grid[num_rows:, :])
    rounds = np.arange(1, NUM_ROUNDS + 1)
    chosen = factorizations(NUM_ROUNDS, SEPARATION)
    figures.lines(
        below,
        {name: (rounds, noise_in_model(each)) for name, each in chosen.items()},
        title=f"Noise in the model, epsilon {EPSILON:g} each",
        x="round",
        y="clip norms",
        logarithmic="y",
    )
    return figure


def noise_in_model(factorization: mfa.factorizations.Factorization) -> np.ndarray:
    """Returns the (n,) standard deviations of the summed noise up to each round, in clip norms."""
    timers = MinSeparation(SEPARATION)
    mechanism = mfa.calibrate(factorization, timers, epsilon=EPSILON, delta=DELTA)
    variance = factorization.per_round_variance(mfa.workloads.prefix_sum(NUM_ROUNDS), timers)
    return mechanism.noise_multiplier * np.sqrt(np.asarray(variance))


def _draw_entries(axes: matplotlib.axes.Axes, matrix: np.ndarray, name: str) -> None:
    rows, columns = np.nonzero(np.abs(matrix) > 1e-3 * np.max(np.abs(matrix)))
    sizes = np.abs(matrix[rows, columns]) / np.max(np.abs(matrix))
    colour, sizes = figures.styles([name])[name]["color"], _LARGEST_SQUARE * sizes
    axes.scatter(columns, rows, s=sizes, marker="s", color=colour, linewidth=0)
    axes.set_xlim(-1.0, matrix.shape[1])
    axes.set_ylim(matrix.shape[0], -1.0)
    axes.set(xticks=[], yticks=[])
    axes.grid(False)
    axes.set_title(name, fontsize=9)


def plan() -> matplotlib.figure.Figure:
    """Draws effective errors of mechanisms under timers, and of all ways to take part."""
    by_mechanism, by_way = errors_under_timers(), errors_by_way()
    figure, ((above,), (below,)) = figures.panels(2, 1, (_WIDTH, 2.4))
    figures.bars(
        above, list(by_mechanism), list(by_mechanism.values()), title="Under timers, by mechanism"
    )
    figures.bars(
        below,
        list(by_way),
        list(by_way.values()),
        title="The best of each way to take part, by who draws",
        x="effective RMSE: noise in the model after a round",
    )
    # Fix the layout after the first time: with names this long, each repetition moves panels a
    # little further.
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    return figure


def errors_under_timers() -> dict[str, float]:
    """Reads effective errors under timers from the first plan in ``planning.md``."""
    text = _PLANNING.read_text(encoding="utf-8").partition("effective RMSE  worst round")[2]
    rows = re.findall(r"^[* ] (\w[\w ]*?) {2,}([\d.]+) ", text.partition("\n\n")[0], re.MULTILINE)
    return {name: float(value) for name, value in rows}


def errors_by_way() -> dict[str, float]:
    """Reads the effective errors of ``WAYS`` from the table in ``planning.md``."""
    text = _PLANNING.read_text(encoding="utf-8").partition("\n## All ways")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| \**([\w, -]+?)\** \| ~?([\d.]+) \|", text, re.MULTILINE))
    return {who: float(rows[name]) for name, who in WAYS.items()}


# Figures by name, each with its alternative text for readers who do not see it.
FIGURES: Mapping[str, tuple[Callable[[], matplotlib.figure.Figure], str]] = {
    "mechanisms": (
        mechanisms,
        "The entries of the strategy matrices of six mechanisms, and the noise in the model by "
        "round: independent noise grows most, that of a banded matrix least.",
    ),
    "plan": (
        plan,
        "Bars of the effective RMSE: under timers a banded matrix has the least and independent "
        "noise three times as much; of the ways to take part, secret coins of devices have least.",
    ),
}
