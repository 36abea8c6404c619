"""Draws the figures of experiments from their results.

No experiment imports this, so that a change here makes no number void.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence

import matplotlib.axes
import matplotlib.figure
import numpy as np

from mf_aggregators import figures, inputs
from reproduction.experiment import Data, Drawing, decode_levels
from simulations.runs import run_reports

# The most training curves in one panel; more of them are shown in several panels.
_MOST_CURVES = 6


def draw(drawing: Drawing) -> matplotlib.figure.Figure:
    """Draws the figure of an experiment from its data.

    Args:
      drawing: The kind and the data of the figure.

    Returns:
      The figure, not yet saved.

    Raises:
      ValueError: If there is no such kind of figure.
    """
    if drawing.kind not in _KINDS:
        raise ValueError(f"the kind of figure {drawing.kind!r} is unknown.")
    return _KINDS[drawing.kind](drawing.data)


def _one_panel(
    inches: tuple[float, float] = (6.4, 4.2),
) -> tuple[matplotlib.figure.Figure, matplotlib.axes.Axes]:
    figure, ((axes,),) = figures.panels(1, 1, inches)
    return figure, axes


# Figures with one panel of curves, by kind: the entries of the data with places and values, the
# title, the labels of both axes, and the logarithmic axes.
_CURVES = {
    "rmse by rounds": (
        *("rounds", "rmse", "RMSE of prefix sums, single participation"),
        *("rounds n", "RMSE at sensitivity 1", "x"),
    ),
    "epsilons": (
        *("noise_multipliers", None, "Epsilon at delta {delta} (Tables 3 and 4)"),
        *("noise multiplier", "epsilon", "xy"),
    ),
    "rmse by epochs": (
        *("epochs", "rmse", "RMSE of the mean at epsilon 1, n = {num_rounds}"),
        *("epochs", "RMSE, relative to one example of all", "xy"),
    ),
    "ratios by epsilon": (
        *("epsilons", "ratios", "RMSE of the best BandMF over another's, n = {num_rounds}"),
        *("epsilon", "ratio", "x"),
    ),
    "noise multipliers": (
        *("epsilons", "noise_multipliers", "Noise multipliers of {table}, delta {delta}"),
        *("epsilon", "noise multiplier", "xy"),
    ),
}


def _curves(kind: str, data: Data) -> matplotlib.figure.Figure:
    over, values, title, x, y, logarithmic = _CURVES[kind]
    curves = (
        inputs.part(data, dict, values)
        if values
        else {
            "printed": data["printed"],
            "exact (privacy loss distribution)": data["exact"],
        }
    )
    words = {"delta": _delta(data)} if "delta" in data else {}
    places, is_ratio = inputs.part(data, list, over), kind == "ratios by epsilon"
    figure, axes = _one_panel()
    figures.lines(
        axes,
        {name: (places, each) for name, each in curves.items()},
        title=title.format(**{**data, **words}),
        x=x,
        y=y,
        logarithmic=logarithmic,
        places=None if is_ratio else places,
        levels={"the same RMSE": 1.0} if is_ratio else None,
    )
    return figure


def _delta(data: Data) -> str:
    return run_reports.scientific(inputs.part(data, float, "delta"))


def _variances_by_round(data: Data) -> matplotlib.figure.Figure:
    panels = inputs.part(data, dict, "panels")
    figure, (row,) = figures.panels(1, len(panels), (8.0 if len(panels) == 1 else 5.6, 4.2))
    chosen = figures.styles([name for curves in panels.values() for name in curves])
    for axes, (title, curves) in zip(row, panels.items(), strict=True):
        figures.lines(
            axes,
            {name: (np.arange(1, len(v) + 1), v) for name, v in curves.items()},
            title=title,
            x="round",
            y="variance at sensitivity 1",
            # Lines are solid, because these variances jump from round to round.
            own_styles={name: {**each, "linestyle": "-"} for name, each in chosen.items()},
        )
        axes.set_ylim(bottom=0.0)
    return figure


def _losses_by_time(data: Data) -> matplotlib.figure.Figure:
    figure, axes = _one_panel((7.0, 4.2))
    courses = inputs.part(data, dict, "courses")
    styles = figures.styles(list(courses))
    figures.lines(
        axes,
        {name: (course["seconds"], course["above_least"]) for name, course in courses.items()},
        # Lines have no markers, because each method has another number of points.
        own_styles={name: {**style, "marker": ""} for name, style in styles.items()},
        title=f"Loss of Eq. 2 above the least, prefix sum, n = {data['num_rounds']}",
        x="seconds",
        y="loss / least loss − 1",
        logarithmic="y",
    )
    return figure


def _entries(data: Data) -> matplotlib.figure.Figure:
    figure, grid = figures.panels(3, 2, (4.4, 3.3))
    for column, (label, matrix) in enumerate(inputs.part(data, dict, "matrices").items()):
        for row, (name, words) in enumerate(
            (
                ("entries", f"{label}: entries over {data['largest']:.2f}"),
                ("ranks", f"{label}: ranks of magnitudes"),
            )
        ):
            axes = grid[row, column]
            values = decode_levels(matrix[name])
            figures.heat_map(figure, axes, values, title=words, limit=1.0)
        axes = grid[2, column]
        edges, counts = np.array(matrix["logarithms"]), np.array(matrix["counts"])
        axes.bar(edges[:-1], counts, np.diff(edges), align="edge", color="#0b61b0")
        figures.describe(
            axes, title=f"{label}: magnitudes", x="log10 of the magnitude", y="entries"
        )
    figure.align_ylabels(grid[2])
    return figure


def _errors_over_the_least(data: Data) -> matplotlib.figure.Figure:
    names, every = inputs.part(data, list, "mechanisms"), inputs.part(data, dict, "errors")
    figure, (row,) = figures.panels(1, len(every), (4.8, names), sharey=True)
    for axes, (label, errors) in zip(row, every.items(), strict=True):
        figures.bars(
            axes,
            names,
            errors,
            title=label,
            x="RMSE over the least",
            form=".2f",
        )
    figures.heading(figure, f"RMSE over the least, n = {data['num_rounds']}")
    return figure


def _strategies(data: Data) -> matplotlib.figure.Figure:
    found = inputs.part(data, dict, "matrices")
    figure, grid = figures.panels(-(-len(found) // 2), 4, (2.6, 2.75))
    for place, (label, matrices) in enumerate(found.items()):
        for offset, (name, levels) in enumerate(matrices.items()):
            figures.heat_map(
                figure,
                grid[place // 2, 2 * (place % 2) + offset],
                decode_levels(levels),
                title=f"{label}\n{name}",
                bar=False,
            )
    figures.heading(
        figure, f"n = {data['num_rounds']}; red is above zero and blue below, each by its largest"
    )
    return figure


def _tree(data: Data) -> matplotlib.figure.Figure:
    found = inputs.part(data, dict, "matrices")
    figure, (row,) = figures.panels(1, len(found), (6.0, 3.4))
    for axes, (title, levels) in zip(row, found.items(), strict=True):
        matrix = decode_levels(levels)
        figures.heat_map(figure, axes, matrix, title=f"{title}, n = {data['num_rounds']}")
    return figure


def _grid(
    data: Data, values: np.ndarray, form: str, title: str, bar: str, reach: tuple[float, float]
) -> matplotlib.figure.Figure:
    """Draws a grid of values by privacy target and epochs, coloured by the value's logarithm.

    Colours diverge around a value of one if ``reach`` has values on both sides of one.
    """
    rows, columns = values.shape
    figure, axes = _one_panel((1.9 + 0.52 * columns, 1.4 + 0.34 * rows))
    colours = "viridis" if reach[0] == 0.0 else "RdBu"
    logarithms = np.log2(values)
    image = axes.imshow(logarithms, cmap=colours, vmin=reach[0], vmax=reach[1], aspect="auto")
    for (row, column), value in np.ndenumerate(logarithms):
        axes.text(
            column,
            row,
            form.format(values[row, column]),
            ha="center",
            va="center",
            fontsize=8,
            color=_text_colour(image.cmap(image.norm(value))),
        )
    axes.set_xticks(range(columns), [*map(str, inputs.part(data, list, "epochs"))])
    axes.set_yticks(range(rows), [f"{each:g}" for each in inputs.part(data, list, "epsilons")])
    axes.grid(False)
    figures.describe(axes, title=title, x="epochs", y="epsilon")
    figure.colorbar(image, ax=axes, shrink=0.9, label=bar)
    return figure


def _text_colour(background: Sequence[float]) -> str:
    """Returns black or white as text colour, the one with the larger contrast (WCAG 2.1)."""
    parts = np.asarray(background[:3], float)
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    luminance = float(linear @ (0.2126, 0.7152, 0.0722))
    return "black" if (luminance + 0.05) ** 2 > 0.05 * 1.05 else "white"


def _best_bands(data: Data) -> matplotlib.figure.Figure:
    n = inputs.part(data, int, "num_rounds")
    title = f"Best number of bands, n = {n}, delta {_delta(data)}"
    return _grid(
        data, np.array(data["bands"]), "{}", title, "log2 of the number", (0.0, math.log2(n))
    )


def _ratios_of_rmse(data: Data) -> matplotlib.figure.Figure:
    ratios = np.array(data["ratios"])
    reach = float(np.max(np.abs(np.log2(ratios))))
    title = f"RMSE of DP-SGD over {data['against']}, n = {data['num_rounds']}"
    return _grid(data, ratios, "{:.2f}", title, "log2 of the ratio", (-reach, reach))


def _epsilons_of_rho(data: Data) -> matplotlib.figure.Figure:
    curves = inputs.part(data, dict, "curves")
    figure, (row,) = figures.panels(1, len(curves), (4.6, 3.6))
    for axes, (name, curve) in zip(row, curves.items(), strict=True):
        figures.lines(
            axes,
            {name: (curve["rho"], curve["epsilon"])},
            title="all that round to that rho",
            x="rho",
            y="epsilon",
            levels={"printed": curve["printed"]},
        )
    figures.heading(figure, f"Epsilon at delta {_delta(data)} of a rho, real normal noise")
    return figure


def _trained(data: Data) -> matplotlib.figure.Figure:
    configurations = inputs.part(data, list, "configurations")
    targets = sorted({each["epsilon"] for each in configurations})
    chosen = _styles_of_configurations([each["label"] for each in configurations])
    of_targets = {
        target: [each for each in configurations if each["epsilon"] == target] for target in targets
    }
    by_round = [
        (target, group, own)
        for target, of_target in of_targets.items()
        for group, own in _groups([each for each in of_target if each.get("rounds")])
    ]
    most = max(len(of_target) for of_target in of_targets.values())
    names = [each["label"] for each in configurations[:most]]
    figure, places = run_reports.panels(len(targets) + len(by_round), (6.6, names))
    for axes, (target, of_target) in zip(places, of_targets.items(), strict=False):
        for place, each in enumerate(of_target):
            style = chosen[each["label"]]
            axes.errorbar(
                [each["mean"]],
                [place],
                xerr=None if each["half_width"] is None else [each["half_width"]],
                color=style["color"],
                marker=style["marker"],
                markersize=5,
                capsize=3,
            )
        figures.describe(
            axes,
            rows=[each["label"] for each in of_target],
            title=f"After training, epsilon {target:g}",
            x="test accuracy, %, with 95 % intervals",
        )
    for axes, (target, group, own) in zip(places[len(targets) :], by_round, strict=False):
        figures.lines(
            axes,
            {
                inputs.part(each, str, "label"): (
                    inputs.part(each, list, "rounds"),
                    inputs.part(each, list, "held_out"),
                )
                for each in own
            },
            title=f"By round, epsilon {target:g}{group}",
            x="round",
            y="held-out accuracy, %",
            own_styles=chosen,
        )
    return figure


def _accuracies_by_epsilon(data: Data) -> matplotlib.figure.Figure:
    figure, axes = _one_panel((7.4, 4.4))
    mechanisms = inputs.part(data, list, "mechanisms")
    chosen = figures.styles([each["label"] for each in mechanisms])
    every = sorted({epsilon for each in mechanisms for epsilon in each["epsilons"]})
    figures.lines(
        axes,
        _with_intervals(
            axes,
            [
                (each, _beside(each["epsilons"], place, len(mechanisms)))
                for place, each in enumerate(mechanisms)
            ],
            chosen,
        ),
        title=inputs.part(data, str, "data_set"),
        x="epsilon",
        y="test accuracy, %, with 95 % intervals",
        logarithmic="x",
        places=every,
        levels={"without noise": inputs.part(data, float, "without_noise")},
        own_styles=chosen,
    )
    return figure


def _with_intervals(
    axes: matplotlib.axes.Axes,
    mechanisms: Sequence[tuple[Data, Sequence[float]]],
    chosen: Mapping[str, Mapping[str, object]],
) -> dict[str, tuple[Sequence[float], Sequence[float]]]:
    """Draws each mechanism's intervals at its places; returns the curves of mean accuracies."""
    curves: dict[str, tuple[Sequence[float], Sequence[float]]] = {}
    for each, places in mechanisms:
        widths = [width or 0.0 for width in inputs.part(each, list, "half_widths")]
        label, means = inputs.part(each, str, "label"), inputs.part(each, list, "means")
        curves[label] = places, means
        colour = chosen[label]["color"]
        axes.errorbar(places, means, widths, color=colour, linestyle="", capsize=3)
    return curves


def _beside(epsilons: Sequence[float], place: int, number: int) -> list[float]:
    """Returns a curve's epsilons, shifted a little so that intervals do not hide each other."""
    return [epsilon * 1.03 ** (place - (number - 1) / 2) for epsilon in epsilons]


def _styles_of_configurations(labels: Sequence[str]) -> dict[str, dict[str, object]]:
    """Returns line styles by label; if there are many labels, schedules do not affect the style.

    Configurations that differ in their schedules alone then look alike, but share no panel.
    """
    if len(set(labels)) <= _MOST_CURVES:
        return figures.styles(labels)
    mechanisms = {label: label.partition(", ")[0] for label in labels}
    of_mechanisms = figures.styles(list(mechanisms.values()))
    return {label: of_mechanisms[mechanism] for label, mechanism in mechanisms.items()}


def _groups(
    configurations: Sequence[Data],
) -> list[tuple[str, list[Data]]]:
    """Divides configurations among panels, by schedule if there are many of them."""
    if len(configurations) <= _MOST_CURVES:
        return [("", list(configurations))] if configurations else []
    found: dict[str, list[Data]] = {}
    for each in configurations:
        found.setdefault(inputs.part(each, str, "label").partition(", ")[2], []).append(each)
    return [
        (f", {schedule or 'constant rate'}", own[start : start + _MOST_CURVES])
        for schedule, own in found.items()
        for start in range(0, len(own), _MOST_CURVES)
    ]


def _learning_rates(data: Data) -> matplotlib.figure.Figure:
    mechanisms = inputs.part(data, list, "mechanisms")
    targets = sorted({each["epsilon"] for each in mechanisms})
    chosen = figures.styles([each["label"] for each in mechanisms])
    quantities = list(mechanisms[0]["errors"])
    best = [each["rates"][int(np.argmax(each["means"]))] for each in mechanisms]
    figure, places = run_reports.panels(len(quantities) + len(targets), (5.0, 3.9))
    for axes, quantity in zip(places, quantities, strict=False):
        errors = np.array([each["errors"][quantity] for each in mechanisms])
        curves: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        styles: dict[str, dict[str, object]] = {}
        for label, style in chosen.items():
            own = [place for place, each in enumerate(mechanisms) if each["label"] == label]
            curves[label] = errors[own], np.array(best)[own]
            styles[label] = {**style, "linestyle": ""}
        figures.lines(
            axes,
            curves,
            title="Best rate by error",
            x=quantity,
            y="best server learning rate",
            logarithmic="xy",
            own_styles=styles,
        )
    for axes, target in zip(places[len(quantities) :], targets, strict=False):
        of_target = [(each, each["rates"]) for each in mechanisms if each["epsilon"] == target]
        figures.lines(
            axes,
            _with_intervals(axes, of_target, chosen),
            title=f"After training, epsilon {target:g}, with 95 % intervals",
            x="server learning rate",
            y="held-out accuracy, %",
            logarithmic="x",
            own_styles=chosen,
        )
    return figure


_KINDS: Mapping[str, Callable[[Data], matplotlib.figure.Figure]] = {
    **{kind: functools.partial(_curves, kind) for kind in _CURVES},
    "variances by round": _variances_by_round,
    "losses by time": _losses_by_time,
    "entries": _entries,
    "errors over the least": _errors_over_the_least,
    "strategies": _strategies,
    "tree": _tree,
    "best bands": _best_bands,
    "ratios of RMSE": _ratios_of_rmse,
    "epsilons of rho": _epsilons_of_rho,
    "trained configurations": _trained,
    "learning rates": _learning_rates,
    "accuracies by epsilon": _accuracies_by_epsilon,
}
