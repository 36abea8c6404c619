"""Training comparisons of the papers: their arms, and what is said of their results."""

import functools
from collections.abc import Callable, Mapping, Sequence

import matplotlib.axes
import matplotlib.figure
import matplotlib.ticker

from reproduction import arms as kinds
from reproduction import best_learning_rates, figures, trained_arms, training_tables
from reproduction.arms import Arm, Setting
from reproduction.banded_errors import PAPER as BANDMF
from reproduction.experiment import Experiment, Outcome, Workspace
from reproduction.trained_arms import TrainedArms
from simulations import run_comparisons

_PANELS_OF_A_ROW = 3
# matplotlib's cycle has so many colours; mechanisms after these have other lines and markers.
_COLOURS = 10
# A legend of more lines would hide curves, and stands beside them.
_LINES_OF_A_LEGEND_INSIDE = 6
_DENISOV = "Denisov et al.: Improved DP for SGD on Adaptive Streams"

_FIXED_ORDER = (
    "Multi-epoch MF in a fixed order has the noise that its epsilon needs if every client takes "
    "part exactly b rounds after the last time, as the paper has it. Its runs here are under "
    "timers, which promise at least b rounds: what they earn is weaker, and their own statements "
    "say so."
)


def compare(
    name: str,
    arms_of: Callable[[str], tuple[Arm, ...]],
    settings: Mapping[str, Setting],
    workspace: Workspace,
) -> Outcome:
    """Trains arms and compares their test accuracies.

    Args:
      name: The experiment's name.
      arms_of: Returns its arms for a data set.
      settings: By data set.
      workspace: Where matrices and runs are kept.

    Returns:
      A row for each arm, the order that intervals support at each target, and a figure:
      accuracy by epsilon, and by round at each target.

    Raises:
      KeyboardInterrupt: If a run was interrupted.
      CommandError: If a run failed.
    """
    trained = trained_arms.train(arms_of, settings, workspace)
    rows = tuple(trained_arms.test_accuracy_row(name, arm, trained) for arm in trained.arms)
    notes = [
        f"Epsilon {epsilon:g}. {trained_arms.order(of_epsilon, trained)}"
        for epsilon, of_epsilon in trained_arms.by_target(trained.arms).items()
    ]
    if any(arm.kind == kinds.MULTI_EPOCH_FIXED_ORDER for arm in trained.arms):
        notes.append(_FIXED_ORDER)
    return Outcome(
        rows,
        _figure(trained),
        (
            *notes,
            *trained_arms.left_out(name, arms_of, workspace),
            trained_arms.about(trained),
            trained_arms.times(trained),
        ),
    )


def _figure(trained: TrainedArms) -> matplotlib.figure.Figure:
    targets = sorted({arm.epsilon for arm in trained.arms})
    num_rows = -(-(1 + len(targets)) // _PANELS_OF_A_ROW)
    num_columns = min(1 + len(targets), _PANELS_OF_A_ROW)
    figure, grid = figures.panels(num_rows, num_columns, (5.0, 4.0))
    left, *others = grid.ravel()
    if len(targets) == 1:
        _draw_by_mechanism(left, trained)
    else:
        _draw_by_epsilon(left, trained)
    for axes in others[len(targets) :]:
        axes.set_axis_off()
    places = {label: place for place, label in enumerate(_labels(trained))}
    for epsilon, axes in zip(targets, others, strict=False):
        for arm in trained.arms:
            if arm.epsilon == epsilon:
                curve = run_comparisons.mean_accuracy([run.directory for run in trained.runs[arm]])
                colour, line, _ = _style(places[arm.label])
                axes.plot(curve.rounds, 100.0 * curve.mean, line, color=colour, label=arm.label)
        title = f"By round, epsilon {epsilon:g}"
        axes.set(xlabel="round", ylabel="held-out accuracy, %", title=title)
        if len(places) > _LINES_OF_A_LEGEND_INSIDE:
            axes.legend(fontsize="x-small", loc="center left", bbox_to_anchor=(1.0, 0.5))
        else:
            axes.legend(fontsize="x-small")
    for axes in (left, *others[: len(targets)]):
        axes.grid(True, alpha=0.3)
    return figure


def _labels(trained: TrainedArms) -> tuple[str, ...]:
    """The mechanisms, each once, in the order of their arms."""
    return tuple(dict.fromkeys(arm.label for arm in trained.arms))


def _style(place: int) -> tuple[str, str, str]:
    """The colour, line and marker of a mechanism: the same in all panels, and no other's."""
    line, marker = ("-", "o") if place < _COLOURS else ("--", "s")
    return f"C{place % _COLOURS}", line, marker


def _draw_by_epsilon(axes: matplotlib.axes.Axes, trained: TrainedArms) -> None:
    """Test accuracies of each mechanism over the targets."""
    targets = sorted({arm.epsilon for arm in trained.arms})
    labels = _labels(trained)
    # Side by side: intervals on top of each other would be seen as one.
    step = (targets[-1] / targets[0]) ** 0.015
    for place, label in enumerate(labels):
        own = [arm for arm in trained.arms if arm.label == label]
        moved = step ** (place - (len(labels) - 1) / 2)
        _draw_intervals(axes, [arm.epsilon * moved for arm in own], own, trained, place)
    axes.set(xscale="log", xlabel="epsilon", ylabel="test accuracy, %", title="After training")
    axes.set_xticks(targets, [f"{epsilon:g}" for epsilon in targets])
    axes.xaxis.set_minor_locator(matplotlib.ticker.NullLocator())


def _draw_by_mechanism(axes: matplotlib.axes.Axes, trained: TrainedArms) -> None:
    """Test accuracies at the only target, side by side in the colours of the curves."""
    for place, arm in enumerate(trained.arms):
        _draw_intervals(axes, [place], [arm], trained, place)
    axes.set_xticks(
        range(len(trained.arms)), [arm.label for arm in trained.arms], rotation=30, ha="right"
    )
    title = f"After training, epsilon {trained.arms[0].epsilon:g}"
    axes.set(ylabel="test accuracy, %", title=title)


def _draw_intervals(
    axes: matplotlib.axes.Axes,
    positions: Sequence[float],
    arms: Sequence[Arm],
    trained: TrainedArms,
    place: int,
) -> None:
    """Means and 95 % intervals of a mechanism, in its style."""
    found = [trained.statistics[arm] for arm in arms]
    colour, line, marker = _style(place)
    axes.errorbar(
        positions,
        [100.0 * row.test_accuracy_mean for row in found],
        yerr=[100.0 * (row.test_accuracy_half_width or 0.0) for row in found],
        color=colour,
        linestyle=line,
        marker=marker,
        capsize=3,
    )


def _targets(
    arms_of: Callable[[str], tuple[Arm, ...]], settings: Mapping[str, Setting]
) -> dict[str, tuple[float, ...]]:
    return {
        dataset: tuple(sorted({arm.epsilon for arm in arms_of(dataset)})) for dataset in settings
    }


def experiments() -> tuple[Experiment, ...]:
    """Returns the training comparisons."""

    def comparison(
        name: str,
        source: str,
        title: str,
        arms_of: Callable[[str], tuple[Arm, ...]],
        settings: Mapping[str, Setting],
    ) -> Experiment:
        run = functools.partial(compare, name, arms_of, settings)
        return Experiment(name, source, title, run, _targets(arms_of, settings))

    return (
        comparison(
            "denisov-figure-2",
            f"{_DENISOV}, Fig. 2",
            "Next-word prediction in a single pass, constant learning rates",
            training_tables.arms_of_denisov_2,
            kinds.SINGLE_PASS,
        ),
        comparison(
            "denisov-figure-3",
            f"{_DENISOV}, Figs. 3 and 6",
            "Learning-rate schedules and momentum, inside of the mechanism or after it",
            training_tables.arms_of_denisov_3,
            kinds.SINGLE_PASS,
        ),
        comparison(
            "bandmf-figure-1a",
            f"{BANDMF}, Figs. 1 (a) and 10 (CIFAR-10)",
            "Single images as clients, with sampled batches",
            training_tables.arms_of_figure_1a,
            kinds.CENTRALISED,
        ),
        comparison(
            "bandmf-figure-1b",
            f"{BANDMF}, Fig. 1 (b)",
            "Next-word prediction with sampled batches",
            training_tables.arms_of_figure_1b,
            kinds.RETURNING,
        ),
        comparison(
            "bandmf-figure-5a",
            f"{BANDMF}, Figs. 5 (a) and 12",
            "Next-word prediction across devices: test accuracy and convergence",
            training_tables.arms_of_figure_5a,
            kinds.RETURNING,
        ),
        Experiment(
            "bandmf-figure-11",
            f"{BANDMF}, Fig. 11",
            "The best server learning rate by two effective RMSEs",
            functools.partial(best_learning_rates.best_of_grid, "bandmf-figure-11"),
            _targets(training_tables.arms_of_figure_11, kinds.RETURNING),
        ),
    )
