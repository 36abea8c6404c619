"""Training comparisons of the papers: their arms, and what is said of their results."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import matplotlib.axes
import matplotlib.axis
import matplotlib.figure
import matplotlib.ticker
import numpy as np

from reproduction import arms as kinds
from reproduction import figures, training_tables
from reproduction.arms import Arm, Setting
from reproduction.banded_errors import PAPER as BANDMF
from reproduction.experiment import Experiment, Outcome, Row, TrainingPlace, Workspace
from simulations import repeated_runs, run_comparisons
from simulations.repeated_runs import FinishedRun, RepeatedRun

_PROGRAM = "reproduce-paper"
_PANELS_OF_A_ROW = 3
# matplotlib's cycle has so many colours; mechanisms after these have other lines and markers.
_COLOURS = 10
# A legend of more lines would hide curves, and stands beside them.
_LINES_OF_A_LEGEND_INSIDE = 6
# What errors of BandMF Fig. 11 are of: its left and its right half.
_OF_SUMS, _OF_UPDATES = "effective RMSE of prefix sums", "effective RMSE of updates"
_DENISOV = "Denisov et al.: Improved DP for SGD on Adaptive Streams"

_FIXED_ORDER = (
    "Multi-epoch MF in a fixed order has the noise that its epsilon needs if every client takes "
    "part exactly b rounds after the last time, as the paper has it. Its runs here are under "
    "timers, which promise at least b rounds: what they earn is weaker, and their own statements "
    "say so."
)


@dataclasses.dataclass(frozen=True)
class _Trained:
    """The arms of a comparison after training."""

    arms: tuple[Arm, ...]
    setting: Setting
    runs: Mapping[Arm, Sequence[RepeatedRun]]
    finished: Mapping[Arm, Sequence[FinishedRun]]
    statistics: Mapping[Arm, run_comparisons.Row]


def _train(arms: Sequence[Arm], settings: Mapping[str, Setting], workspace: Workspace) -> _Trained:
    place = _place(workspace)
    setting = settings[place.dataset]
    if place.targets is not None:
        arms = [arm for arm in arms if arm.epsilon in place.targets]
    variants = {arm: kinds.variant_of(arm, setting, place, workspace) for arm in arms}
    runs = repeated_runs.planned(
        place.directory / setting.name, setting.command, list(variants.values()), place.repetitions
    )
    finished = repeated_runs.run_all(_PROGRAM, runs, place.parallel_runs)
    if finished is None:
        raise KeyboardInterrupt
    of_arm = {
        arm: [run for run in runs if run.variant == variant] for arm, variant in variants.items()
    }
    found = {arm: [finished[run] for run in runs_of_arm] for arm, runs_of_arm in of_arm.items()}
    by_name = run_comparisons.summarise({arm.name: of_one for arm, of_one in found.items()})
    rows = {row.mechanism: row for row in by_name}
    return _Trained(tuple(arms), setting, of_arm, found, {arm: rows[arm.name] for arm in arms})


def _place(workspace: Workspace) -> TrainingPlace:
    if workspace.training is None:
        raise ValueError("a training comparison needs a place for its runs.")
    return workspace.training


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
    trained = _train(arms_of(_place(workspace).dataset), settings, workspace)
    rows = tuple(_row(name, arm, trained) for arm in trained.arms)
    notes = [
        f"Epsilon {epsilon:g}. {_order(trained, epsilon)}"
        for epsilon in sorted({arm.epsilon for arm in trained.arms})
    ]
    if any(arm.kind == kinds.MULTI_EPOCH_FIXED_ORDER for arm in trained.arms):
        notes.append(_FIXED_ORDER)
    return Outcome(
        rows,
        _figure(trained),
        (*notes, *_left_out(name, arms_of, workspace), _about(trained), _times(trained)),
    )


def _left_out(
    name: str, arms_of: Callable[[str], tuple[Arm, ...]], workspace: Workspace
) -> tuple[str, ...]:
    """What a reader misses where only arms of some targets were trained."""
    place = _place(workspace)
    if place.targets is None:
        return ()
    every = {arm.epsilon for arm in arms_of(place.dataset)}
    missing = ", ".join(f"{epsilon:g}" for epsilon in sorted(every - set(place.targets)))
    if not missing:
        return ()
    return (
        f"Not trained here: the arms of epsilon {missing}. Without --targets, {name} trains them "
        "too, and puts all together.",
    )


def _order(trained: _Trained, epsilon: float) -> str:
    """The order that intervals support at a target."""
    of_epsilon = [arm for arm in trained.arms if arm.epsilon == epsilon]
    rows = [dataclasses.replace(trained.statistics[arm], mechanism=arm.label) for arm in of_epsilon]
    why = run_comparisons.unfairness(
        {
            arm.name: trained.finished[arm]
            for arm in of_epsilon
            # Their own statements are for timers, under which their noise is worth less.
            if arm.kind != kinds.MULTI_EPOCH_FIXED_ORDER
        }
    )
    pairs = [] if why is not None else run_comparisons.separated(rows)
    return run_comparisons.separation_line(rows, pairs, why)


def _row(name: str, arm: Arm, trained: _Trained) -> Row:
    found = trained.statistics[arm]
    mean, half = 100.0 * found.test_accuracy_mean, found.test_accuracy_half_width
    reason = f"{mean:.2f}" + ("" if half is None else f" ± {100.0 * half:.2f} (95 %)")
    claim, holds = None, None
    if arm.printed is not None and trained.setting.dataset != kinds.STACKOVERFLOW:
        reason += f"; the paper, on StackOverflow: {arm.printed}"
    elif arm.printed is not None:
        # A mean of few runs has no digits to compare.
        claim = f"{arm.printed}; it holds if our 95 % interval has it"
        holds = half is not None and abs(float(arm.printed) - mean) <= 100.0 * half
    return Row(
        name,
        f"epsilon {arm.epsilon:g}, {arm.label}",
        f"test accuracy, %, {found.repetitions} runs",
        None,
        mean,
        reason,
        claim,
        holds,
    )


def _about(trained: _Trained) -> str:
    setting = trained.setting
    if setting.dataset == kinds.STACKOVERFLOW:
        return (
            "At the papers' size, with the papers' learning rates, or for Fig. 11 with these and "
            "one step of their grid below and above. Single-epoch MF has 166 clients a round for "
            "2,052 rounds; 167, which BandMF prints, would be more than there are. The threshold "
            "of zeroing is not printed; it is 1 for BandMF."
        )
    if setting.dataset == kinds.CIFAR10:
        return (
            "At the paper's size. It prints neither delta nor network nor learning rates: they are "
            "those of run-cifar10, with the power law of BandMF App. I from BandMF at epsilon 8 to "
            "the others, at most that rate; DP-SGD has no momentum, as in App. H, and for that a "
            "rate 20 times as large."
        )
    others = (
        "logistic regression, no momentum, weights that start at zero"
        if setting.dataset == "digits"
        else f"momentum {setting.momentum:g}, other clipping, client rates and schedules than the "
        "papers' (run-stackoverflow --help has them), no zeroing"
    )
    return (
        f"Scaled down: {setting.num_rounds} rounds on {setting.population} clients of the "
        f"{setting.dataset} data at delta {setting.delta:g}, "
        f"{trained.setting.clients_per_round} a round "
        f"({setting.clients_of_single_pass} where no client comes back); {others}. The server's "
        "learning rate was tuned for BandMF at epsilon 8; others have that rate times the power of "
        "the ratio of effective RMSEs that BandMF App. I fits on StackOverflow, at most that rate. "
        "Intervals are Student's t for the mean over runs with noise and cohorts of their own."
    )


def _times(trained: _Trained) -> str:
    """How long runs took: what an experiment took last says nothing of runs from before."""
    finished = [run for of_arm in trained.finished.values() for run in of_arm]
    minutes = [run.seconds / 60.0 for run in finished if run.seconds is not None]
    said = f"{len(finished)} runs"
    if minutes:
        said += f", of {min(minutes):.1f} to {max(minutes):.1f} minutes each"
        said += f", {sum(minutes):.0f} together; with --parallel_runs above 1, they overlap"
    if len(minutes) < len(finished):
        said += f" (cut off and resumed, and not counted: {len(finished) - len(minutes)})"
    return f"{said}."


def _figure(trained: _Trained) -> matplotlib.figure.Figure:
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


def _labels(trained: _Trained) -> tuple[str, ...]:
    """The mechanisms, each once, in the order of their arms."""
    return tuple(dict.fromkeys(arm.label for arm in trained.arms))


def _style(place: int) -> tuple[str, str, str]:
    """The colour, line and marker of a mechanism: the same in all panels, and no other's."""
    line, marker = ("-", "o") if place < _COLOURS else ("--", "s")
    return f"C{place % _COLOURS}", line, marker


def _draw_by_epsilon(axes: matplotlib.axes.Axes, trained: _Trained) -> None:
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


def _draw_by_mechanism(axes: matplotlib.axes.Axes, trained: _Trained) -> None:
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
    trained: _Trained,
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


def _plain_ticks(axis: matplotlib.axis.Axis) -> None:
    """Few numbers on a logarithmic axis of less than a decade, without powers of ten."""
    axis.set_major_locator(matplotlib.ticker.LogLocator(subs=(1.0, 1.5, 2.0, 3.0, 5.0, 7.0)))
    axis.set_major_formatter(matplotlib.ticker.StrMethodFormatter("{x:g}"))
    axis.set_minor_locator(matplotlib.ticker.NullLocator())


def learning_rates(name: str, workspace: Workspace) -> Outcome:
    """Finds the best of three learning rates for each arm, and fits them to effective RMSEs.

    Args:
      name: The experiment's name.
      workspace: Where matrices and runs are kept.

    Returns:
      The best rate of each arm, and the slope of BandMF App. I's fit.

    Raises:
      KeyboardInterrupt: If a run was interrupted.
      CommandError: If a run failed.
    """
    trained = _train(
        training_tables.arms_of_figure_11(_place(workspace).dataset), kinds.RETURNING, workspace
    )
    best: dict[tuple[float, str], Arm] = {}
    for arm in trained.arms:
        key = (arm.epsilon, arm.label)
        if key not in best or _heldout(trained, arm) > _heldout(trained, best[key]):
            best[key] = arm
    rates = np.array(
        [kinds.learning_rate(arm, trained.setting, workspace) for arm in best.values()]
    )
    # The two halves of the figure.
    errors = {
        name: np.array(
            [
                kinds.effective_rmse(arm, trained.setting, workspace, workload)
                for arm in best.values()
            ]
        )
        for name, workload in (
            (_OF_SUMS, None),
            (_OF_UPDATES, np.eye(trained.setting.num_rounds)),
        )
    }
    fits = {name: np.polyfit(np.log(of_name), np.log(rates), 1) for name, of_name in errors.items()}
    rows = [
        Row(
            name,
            "all mechanisms and targets",
            f"slope of log(best server learning rate) by log({_OF_SUMS})",
            None,
            float(fits[_OF_SUMS][0]),
            "the paper, on StackOverflow: -0.95; the grid here is three rates around the paper's, "
            "or around what that very rule gives, and cannot move the slope far",
        ),
        Row(
            name,
            "all mechanisms and targets",
            f"slope of log(best server learning rate) by log({_OF_UPDATES})",
            None,
            float(fits[_OF_UPDATES][0]),
        ),
        *(
            Row(
                name,
                f"epsilon {epsilon:g}, {label}",
                "best server learning rate of three",
                None,
                kinds.learning_rate(arm, trained.setting, workspace),
                f"held-out accuracy {100.0 * _heldout(trained, arm):.2f} %",
            )
            for (epsilon, label), arm in best.items()
        ),
    ]
    figure, (panels,) = figures.panels(1, 2)
    for axes, (quantity, of_quantity) in zip(panels, errors.items(), strict=True):
        for label in dict.fromkeys(label for _, label in best):
            places = [place for place, (_, other) in enumerate(best) if other == label]
            axes.scatter(of_quantity[places], rates[places], label=label)
        slope, offset = fits[quantity]
        ends = np.array([np.min(of_quantity), np.max(of_quantity)])
        axes.plot(ends, np.exp(offset) * ends**slope, color="black", linewidth=0.8)
        axes.set(
            xscale="log",
            yscale="log",
            xlabel=quantity,
            ylabel="best server learning rate",
            title=f"Slope {slope:.2f}",
        )
        _plain_ticks(axes.xaxis)
        _plain_ticks(axes.yaxis)
        axes.legend()
    left_out = _left_out(name, training_tables.arms_of_figure_11, workspace)
    return Outcome(tuple(rows), figure, (*left_out, _about(trained), _times(trained)))


def _heldout(trained: _Trained, arm: Arm) -> float:
    """The mean held-out accuracy after training: test data choose nothing."""
    curve = run_comparisons.mean_accuracy([run.directory for run in trained.runs[arm]])
    return float(curve.mean[-1])


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
            functools.partial(learning_rates, "bandmf-figure-11"),
            _targets(training_tables.arms_of_figure_11, kinds.RETURNING),
        ),
    )
