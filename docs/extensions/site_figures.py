"""Draws the figures of the site.

    python -m docs.extensions.site_figures

Numbers in them come from the library. Files go to ``docs/_static/figures/``. Panels are as wide as
a phone, their background is the page's, and dark pages invert their lightness.

A page shows one of them by ``:::{drawn} noise``, with the words that it has here for a reader who
does not see it.
"""

import io
import pathlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import matplotlib
import matplotlib.figure
import matplotlib.patches
import numpy as np

import mf_aggregators as mfa
from docs.extensions import mechanism_figures
from mf_aggregators import figures
from mf_aggregators.participation import MinSeparation
from simulations.devices import device_behaviour
from simulations.devices.device_populations import DevicePopulation, DeviceRound

if TYPE_CHECKING:
    from sphinx.application import Sphinx

DIRECTORY = pathlib.Path(__file__).resolve().parent.parent / "_static" / "figures"

# Rounds, separation, participations and guarantee of the run in the README's code.
NUM_ROUNDS, SEPARATION, MAX_PARTICIPATIONS = 200, 25, 8
EPSILON, DELTA = 8.0, 1e-4
# The number of rounds over which the figure's first panel follows one draw of noise.
ROUNDS_OF_A_DRAW = 12
# The seed of the noise draws in the second panel of the figure.
_SEED = 4

# The devices, rounds and separation of the figure of timers.
DEVICES, ROUNDS_OF_DEVICES, SEPARATION_OF_DEVICES = 8, 24, 6
# The figure of one noise row: its round, from 0, and the bands and rounds of its matrix.
ROW, ROW_BANDS, ROW_ROUNDS = 3, 8, 32
# The figure of an attacker: the epsilons of its curves, and the false positive rates that are
# marked.
EPSILONS = (8.0, 2.0)
MARKED_RATES = (1e-3, 1e-2)
_RATES = np.logspace(-4.0, 0.0, 121)
# The fleet of the figure of a day: devices in Europe, and rounds of ten minutes.
FLEET, FLEET_CLIENTS, TIMER_HOURS = 20_000, 100, 20.0
_FLEET_BEHAVIOUR = device_behaviour.DeviceBehaviour(
    availability=device_behaviour.Diurnal(utc_offsets=(0.0, 1.0, 2.0)),
    timer_hours=TIMER_HOURS,
    round_minutes=10.0,
    retry_minutes=10.0,
)
_DAY_SECONDS = 86_400.0

# Width of a panel in inches, so that its text has the size of a phone's own text.
_WIDTH = 4.0
_CORRELATED, _INDEPENDENT, _THIRD = (
    each["color"] for each in figures.styles(["banded", "identity", "tree"]).values()
)
_GREY = "#595959"
_PALE = "#d9d9d9"
# The place, among the stations on a noise row's way, of the one that is released.
_RELEASED = 3


def noise() -> matplotlib.figure.Figure:
    """Draws one noise draw's share in each round, and the noise in the model by round."""
    figure, ((above,), (below,)) = figures.panels(2, 1, (_WIDTH, 2.1), height_ratios=(2, 3))
    correlated, independent = mechanisms()
    column = noise_rows(correlated)[:ROUNDS_OF_A_DRAW, 0]
    above.bar(np.arange(1, ROUNDS_OF_A_DRAW + 1), column / column[0], color=_CORRELATED)
    above.axhline(0.0, color=_GREY, linewidth=0.8)
    figures.describe(above, title="A draw of noise is taken back", x="round")
    rounds = np.arange(1, NUM_ROUNDS + 1)
    z = np.random.default_rng(_SEED).normal(size=NUM_ROUNDS)
    for mechanism, colour, label in (
        (independent, _INDEPENDENT, "independent"),
        (correlated, _CORRELATED, "correlated"),
    ):
        deviation = noise_in_model(mechanism)
        below.fill_between(rounds, -deviation, deviation, color=colour, alpha=0.25, linewidth=0)
        below.plot(rounds, np.cumsum(noise_rows(mechanism) @ z), color=colour, label=label)
    figures.describe(
        below,
        title=f"Noise in the model, epsilon {EPSILON:g} each",
        x="round",
        y="clip norms",
        with_legend=True,
    )
    return figure


def mechanisms() -> tuple[mfa.Mechanism, mfa.Mechanism]:
    """Returns the README's mechanism, and one of independent noise with the same guarantee."""
    timers = MinSeparation(SEPARATION, MAX_PARTICIPATIONS)
    correlated = mfa.factorizations.banded(NUM_ROUNDS, num_bands=SEPARATION)
    independent = mfa.factorizations.identity(NUM_ROUNDS)
    first, second = (
        mfa.calibrate(each, timers, epsilon=EPSILON, delta=DELTA)
        for each in (correlated, independent)
    )
    return first, second


def noise_rows(mechanism: mfa.Mechanism) -> np.ndarray:
    """Returns the (n, n) matrix from standard normal draws to rounds' noise, in clip norms."""
    sensitivity = mechanism.factorization.sensitivity(mechanism.noise_reference).value
    deviation = mechanism.noise_multiplier * sensitivity
    return deviation * np.asarray(mechanism.factorization.noising_matrix())


def noise_in_model(mechanism: mfa.Mechanism) -> np.ndarray:
    """Returns the (n,) standard deviations of the summed noise up to each round, in clip norms."""
    workload = mfa.workloads.prefix_sum(mechanism.num_rounds)
    variance = mechanism.factorization.per_round_variance(workload, mechanism.noise_reference)
    return mechanism.noise_multiplier * np.sqrt(np.asarray(variance))


def separation() -> matplotlib.figure.Figure:
    """Draws which devices take part in each round, and how long their timers then run."""
    figure, ((axes,),) = figures.panels(1, 1, (_WIDTH, 2.6))
    for round_index, devices in enumerate(cohorts()):
        for device in devices:
            axes.barh(device, SEPARATION_OF_DEVICES - 1, 0.5, round_index + 1.5, color=_PALE)
            axes.plot([round_index + 1], [device], "o", markersize=6, color=_CORRELATED)
    axes.set_xlim(0.3, ROUNDS_OF_DEVICES + 0.7)
    axes.set_yticks(range(DEVICES), [f"device {number}" for number in range(1, DEVICES + 1)])
    axes.invert_yaxis()
    axes.grid(False, axis="y")
    figures.describe(axes, title=f"At least {SEPARATION_OF_DEVICES} rounds apart", x="round")
    return figure


def cohorts() -> list[np.ndarray]:
    """Returns the devices that take part in each round of the figure of timers."""
    timers = MinSeparation(SEPARATION_OF_DEVICES, None)
    population = DevicePopulation(DEVICES, timers, clients_per_round=1, seed=1)
    return [population.next_round().cohort for _ in range(ROUNDS_OF_DEVICES)]


def row() -> matplotlib.figure.Figure:
    """Draws how a round's noise row is made, and the sum that the row is added to."""
    figure, ((axes,),) = figures.panels(1, 1, (_WIDTH, 4.3))
    axes.axis("off")
    axes.set_xlim(0.0, 1.0)
    axes.set_ylim(0.0, 1.0)
    terms = " ".join(
        f"{'+' if weight >= 0 else '−'} {abs(weight):.2f} z{_subscript(number + 1)}"
        for number, weight in reversed([*enumerate(row_of_noise())])
    )
    stations = (
        ("A secret seed", f"draws z{_subscript(ROW + 1)}, and again what earlier rounds drew"),
        (f"Row {ROW + 1} of the noise", terms.removeprefix("+ ")),
        ("Sum of the cohort's updates", "clipped, and whole numbers on a grid"),
        ("Released: sum and noise", "all that anybody sees of the round"),
        ("The model moves", "by what was released over the size of the cohort"),
    )
    gap = 1.0 / len(stations)
    for place, (name, words) in enumerate(stations):
        top = 1.0 - gap * place
        axes.add_patch(
            matplotlib.patches.FancyBboxPatch(
                (0.03, top - 0.72 * gap),
                0.94,
                0.66 * gap,
                boxstyle="round,pad=0,rounding_size=0.03",
                facecolor="none",
                edgecolor=_INDEPENDENT if place == _RELEASED else _CORRELATED,
                linewidth=1.4,
            )
        )
        axes.text(0.5, top - 0.25 * gap, name, ha="center", va="center", weight="bold")
        axes.text(0.5, top - 0.53 * gap, words, ha="center", va="center", fontsize=9)
        if place:
            axes.annotate(
                "",
                (0.5, top - 0.06 * gap),
                (0.5, top + 0.28 * gap),
                arrowprops={"arrowstyle": "->", "color": _GREY, "shrinkA": 0, "shrinkB": 0},
            )
    return figure


def row_of_noise() -> np.ndarray:
    """Returns the weights of the draws up to round ROW in that round's noise."""
    matrix = mfa.factorizations.banded(ROW_ROUNDS, num_bands=ROW_BANDS)
    weights = np.asarray(matrix.noising_matrix())[ROW, : ROW + 1]
    return np.asarray(weights / weights[ROW])


def attacker() -> matplotlib.figure.Figure:
    """Draws an attacker's highest true positive rate over the false positive rate."""
    figure, ((axes,),) = figures.panels(1, 1, (_WIDTH, 2.8))
    for epsilon, colour in zip(EPSILONS, (_CORRELATED, _THIRD), strict=True):
        axes.plot(
            100.0 * _RATES,
            100.0 * rates_of_attacker(epsilon, _RATES),
            color=colour,
            label=f"epsilon {epsilon:g}",
        )
        marked = 100.0 * rates_of_attacker(epsilon, np.array(MARKED_RATES))
        axes.plot(100.0 * np.array(MARKED_RATES), marked, "o", color=colour)
    axes.plot(100.0 * _RATES, 100.0 * _RATES, color=_GREY, linestyle="--", label="guessing")
    axes.set_xscale("log")
    axes.set_xlim(0.03, 100.0)
    figures.describe(
        axes,
        title="Clients that an attacker finds",
        x="false positives, %",
        y="true positives, %",
        with_legend=True,
    )
    return figure


def rates_of_attacker(epsilon: float, false_positive_rates: np.ndarray) -> np.ndarray:
    """Returns an attacker's highest true positive rates against a run without amplification."""
    noise_multiplier = mfa.accounting.noise_multiplier(epsilon, DELTA)
    found = mfa.accounting.true_positive_rate(noise_multiplier, false_positive_rates)
    return np.asarray(found)


def fleet() -> matplotlib.figure.Figure:
    """Draws how many devices of a fleet are available over a day, and when rounds take place."""
    figure, ((axes,),) = figures.panels(1, 1, (_WIDTH, 2.8))
    hours = np.arange(0.0, 24.0, 0.25)
    axes.fill_between(hours, 0.0, available(hours), color=_PALE, label="charging and idle")
    rounds = rounds_of_a_day()
    axes.plot(
        [each.start_seconds / 3600.0 % 24.0 for each in rounds],
        [each.num_available for each in rounds],
        "o",
        markersize=3,
        color=_CORRELATED,
        label="and timer run out: a round",
    )
    axes.set_xlim(0.0, 24.0)
    axes.set_ylim(bottom=0.0)
    axes.set_xticks(range(0, 25, 4))
    figures.describe(
        axes,
        title=f"A day of {FLEET:,} devices",
        x="hour of the day (UTC)",
        y="devices",
        with_legend=True,
    )
    return figure


def available(hours: np.ndarray) -> np.ndarray:
    """Returns how many devices of the fleet are available at given hours of its third day."""
    devices = np.arange(FLEET)
    seconds = 2.0 * _DAY_SECONDS + 3600.0 * hours
    behaviour = _FLEET_BEHAVIOUR.availability
    return np.array([np.sum(behaviour.available(devices, each, 0, 0)) for each in seconds])


def rounds_of_a_day() -> list[DeviceRound]:
    """Returns the rounds of the fleet's third day, when timers have run out and started again."""
    timers = MinSeparation(1, None)
    population = DevicePopulation(FLEET, timers, FLEET_CLIENTS, _FLEET_BEHAVIOUR)
    found = []
    while population.seconds < 3.0 * _DAY_SECONDS:
        found.append(population.next_round())
    return [each for each in found if 2.0 <= each.start_seconds / _DAY_SECONDS < 3.0]


def _subscript(number: int) -> str:
    return "".join("₀₁₂₃₄₅₆₇₈₉"[int(digit)] for digit in str(number))


# Figures by name, each with its alternative text for readers who do not see it.
FIGURES: Mapping[str, tuple[Callable[[], matplotlib.figure.Figure], str]] = {
    "noise": (
        noise,
        "A draw of noise is added in one round and mostly taken back in the next ones. So the sum "
        "of correlated noise in the model stays small, while that of independent noise grows.",
    ),
    "separation": (
        separation,
        "Eight devices over 24 rounds: a dot takes part in a round, and a bar waits for five more.",
    ),
    "row": (
        row,
        "From a secret seed to a row of noise, to the sum of clipped updates, to what is released, "
        "to the model.",
    ),
    "attacker": (
        attacker,
        "Curves of an attacker at epsilon 8 and 2: the rate of clients found over the rate of "
        "others that are taken for them, above the line of guessing.",
    ),
    "fleet": (
        fleet,
        "Over a day, the number of devices that are charging and idle rises at night; rounds take "
        "place while enough of them have a timer that has run out.",
    ),
    **mechanism_figures.FIGURES,
}


def svg(name: str) -> str:
    """Returns a figure as SVG, reproducibly and with text drawn as outlines.

    Args:
      name: One of ``FIGURES``.
    """
    figure = FIGURES[name][0]()
    figure.patch.set_visible(False)
    for axes in figure.axes:
        axes.patch.set_visible(False)
    buffer = io.BytesIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", metadata=nothing)
    return buffer.getvalue().decode()


def image(name: str) -> dict[str, object]:
    """Returns the file name and the alternative text of a figure.

    Args:
      name: One of ``FIGURES``.

    Raises:
      ValueError: If there is no figure of this name.
    """
    if name not in FIGURES:
        raise ValueError(f"there is no figure {name!r}: {', '.join(FIGURES)}")
    place = f"/{DIRECTORY.parent.name}/{DIRECTORY.name}/{name}.svg"
    return {"uri": place, "alt": FIGURES[name][1], "classes": ["figure"]}


def setup(app: "Sphinx") -> dict[str, bool]:
    """Sphinx extension that adds the directive ``drawn`` for figures."""
    # Import here, because tests draw figures without the packages that build the site.
    from docutils import nodes
    from docutils.parsers.rst import Directive

    class Drawn(Directive):
        required_arguments = 1

        def run(self) -> list[nodes.Node]:
            try:
                return [nodes.image(**image(self.arguments[0]))]
            except ValueError as error:
                raise self.error(str(error)) from error

    app.add_directive("drawn", Drawn)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def main() -> None:
    """Writes the files of all figures."""
    DIRECTORY.mkdir(exist_ok=True)
    for name in FIGURES:
        (DIRECTORY / f"{name}.svg").write_text(svg(name), encoding="utf-8")


if __name__ == "__main__":
    main()
