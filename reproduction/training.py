"""Training comparisons of the papers: their arms, and what is said of their results."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import matplotlib.figure
import numpy as np

from reproduction import arms as kinds
from reproduction import figures
from reproduction.arms import Arm, Setting
from reproduction.banded_errors import PAPER as BANDMF
from reproduction.experiment import Experiment, Outcome, Row, TrainingPlace, Workspace
from simulations import repeated_runs, run_comparisons
from simulations.repeated_runs import FinishedRun, RepeatedRun

_PROGRAM = "reproduce-paper"
_DENISOV = "Denisov et al.: Improved DP for SGD on Adaptive Streams"

# Privacy targets of scaled-down comparisons: those where noise decides, and does not forbid.
_SMALL_TARGETS = (2.0, 8.0)
_SMALL_TARGETS_OF_SINGLE_PASS = (3.7, 18.9)

# BandMF Table 4: the server's rate and the test accuracy in percent, by epsilon 1, 2, 4, 8, 16.
_TARGETS = (1.0, 2.0, 4.0, 8.0, 16.0)
_FIGURE_5A: Mapping[tuple[str, str], tuple[tuple[float, str | None], ...]] = {
    ("DP-SGD", kinds.IDENTITY): (
        (0.0244, "16.69"),
        (0.0414, "18.42"),
        (0.0704, "19.81"),
        (0.1197, "21.08"),
        (0.3460, "22.26"),
    ),
    ("Single-epoch MF", kinds.SINGLE_EPOCH): (
        (0.1197, "20.44"),
        (0.2035, "21.70"),
        (0.3460, "22.90"),
        (0.5882, "23.88"),
        (1.0000, "24.62"),
    ),
    ("Optimal TreeAgg", kinds.TREE_FULL): (
        (0.2035, "21.25"),
        (0.3460, "22.59"),
        (0.5882, "23.62"),
        (1.0000, "24.45"),
        (1.7000, "25.14"),
    ),
    ("Multi-epoch MF", kinds.MULTI_EPOCH): (
        (0.2035, "21.92"),
        (0.3460, "23.04"),
        (0.5882, "24.02"),
        (1.0000, None),
        (1.7000, "25.33"),
    ),
    ("BandMF", kinds.BANDED): (
        (0.2035, "22.05"),
        (0.5882, "23.19"),
        (1.0000, "24.16"),
        (1.0000, "24.88"),
        (1.7000, "25.41"),
    ),
}
# BandMF Table 5, likewise, and the bands of BandMF: at epsilon 16 all of them, without
# amplification, which is multi-epoch MF.
_FIGURE_1B: Mapping[tuple[str, str], tuple[tuple[float, str], ...]] = {
    ("DP-SGD, amplified", kinds.AMPLIFIED_IDENTITY): (
        (0.3460, "22.22"),
        (0.3460, "22.62"),
        (0.3460, "22.94"),
        (0.5882, "23.30"),
        (0.5882, "23.61"),
    ),
    ("Multi-epoch MF, fixed order", kinds.MULTI_EPOCH_FIXED_ORDER): (
        (0.2035, "22.10"),
        (0.3460, "23.24"),
        (0.5882, "24.16"),
        (1.0000, "24.88"),
        (1.7000, "25.43"),
    ),
    ("BandMF, amplified", kinds.AMPLIFIED_BANDED): (
        (0.3460, "22.83"),
        (0.5882, "23.71"),
        (1.0000, "24.42"),
        (1.7000, "24.99"),
    ),
}
_BANDS_OF_1B = (9, 18, 32, 64)
# Denisov et al. Table 4: the server's and the clients' rates and momentum, by epsilon.
_EPSILONS_OF_DENISOV = (18.9, 8.2, 3.7, 1.7, 0.8)
_NOISE_MULTIPLIERS = (0.341, 0.682, 1.364, 2.728, 5.456)
_DENISOV_2: Mapping[tuple[str, str], tuple[tuple[float, float, float], ...]] = {
    ("Honaker Full", kinds.TREE_FULL): (
        (0.5, 1.0, 0.95),
        (0.25, 1.0, 0.95),
        (0.25, 1.0, 0.9),
        (0.25, 0.5, 0.9),
        (0.25, 0.5, 0.0),
    ),
    ("Honaker Online", kinds.TREE_ONLINE): (
        (0.25, 1.0, 0.95),
        (0.25, 1.0, 0.9),
        (0.25, 0.5, 0.9),
        (0.25, 1.0, 0.0),
        (0.25, 0.5, 0.0),
    ),
    ("Opt Prefix Sum", kinds.SINGLE_EPOCH): (
        (0.5, 1.0, 0.95),
        (0.25, 0.5, 0.95),
        (0.25, 1.0, 0.9),
        (0.25, 0.5, 0.9),
        (0.5, 0.5, 0.0),
    ),
    ("Optimal M = BC", kinds.TRAINING_OPTIMUM): (
        (1.0, 1.0, 0.9),
        (0.25, 1.0, 0.95),
        (0.25, 0.5, 0.9),
        (0.25, 0.5, 0.9),
        (0.5, 0.5, 0.0),
    ),
}
_FIXED_ORDER = (
    "Multi-epoch MF in a fixed order has the noise that its epsilon needs if every client takes "
    "part exactly b rounds after the last time, as the paper has it. Its runs here are under "
    "timers, which promise at least b rounds: what they earn is weaker, and their own statements "
    "say so."
)
# BandMF's grid of rates has this base; one step down and up from each arm's rate.
_RATE_BASE = 1.7


def arms_of_figure_5a(dataset: str) -> tuple[Arm, ...]:
    """Returns the arms of BandMF Fig. 5 (a): clients that come back, without amplification.

    Args:
      dataset: ``docstrings`` or ``stackoverflow``.
    """
    return tuple(
        Arm(label, kind, epsilon, *cells[_TARGETS.index(epsilon)])
        for epsilon in _targets(dataset)
        for (label, kind), cells in _FIGURE_5A.items()
    )


def arms_of_figure_1b(dataset: str) -> tuple[Arm, ...]:
    """Returns the arms of BandMF Fig. 1 (b): batches that are sampled.

    Args:
      dataset: ``docstrings`` or ``stackoverflow``.
    """
    arms = []
    for epsilon in _targets(dataset):
        place = _TARGETS.index(epsilon)
        for (label, kind), cells in _FIGURE_1B.items():
            if place < len(cells):
                bands = _BANDS_OF_1B[place] if kind == kinds.AMPLIFIED_BANDED else None
                arms.append(Arm(label, kind, epsilon, *cells[place], paper_bands=bands))
    return tuple(arms)


def _targets(dataset: str) -> tuple[float, ...]:
    return _TARGETS if dataset == kinds.STACKOVERFLOW else _SMALL_TARGETS


def arms_of_figure_1a(dataset: str) -> tuple[Arm, ...]:
    """Returns the arms of BandMF Figs. 1 (a) and 10: single examples, sampled.

    Args:
      dataset: ``docstrings``, for which scikit-learn's digits stand.
    """
    del dataset
    return tuple(
        Arm(label, kind, epsilon, 1.0) for epsilon in _SMALL_TARGETS for label, kind in _FIGURE_1B
    )


def arms_of_figure_11(dataset: str) -> tuple[Arm, ...]:
    """Returns the arms of BandMF Fig. 11: those of Fig. 5 (a) at three learning rates each.

    Args:
      dataset: ``docstrings`` or ``stackoverflow``.
    """
    return tuple(
        dataclasses.replace(arm, printed=None, rate_factor=_RATE_BASE**step)
        for arm in arms_of_figure_5a(dataset)
        if arm.kind in (kinds.IDENTITY, kinds.TREE_FULL, kinds.BANDED)
        for step in (-1, 0, 1)
    )


def arms_of_denisov_2(dataset: str) -> tuple[Arm, ...]:
    """Returns the arms of Denisov et al. Fig. 2: a single pass at constant learning rates.

    Args:
      dataset: ``docstrings`` or ``stackoverflow``.
    """
    is_paper_size = dataset == kinds.STACKOVERFLOW
    targets = _EPSILONS_OF_DENISOV if is_paper_size else _SMALL_TARGETS_OF_SINGLE_PASS
    found = []
    for epsilon in targets:
        place = _EPSILONS_OF_DENISOV.index(epsilon)
        for (label, kind), cells in _DENISOV_2.items():
            server, client, momentum = cells[place]
            found.append(
                Arm(
                    label,
                    kind,
                    epsilon,
                    server,
                    paper_flags=(
                        f"--client_learning_rate={client:g}",
                        f"--server_momentum={momentum:g}",
                    ),
                    paper_noise_multiplier=_NOISE_MULTIPLIERS[place],
                )
            )
    return tuple(found)


def arms_of_denisov_3(dataset: str) -> tuple[Arm, ...]:
    """Returns the arms of Denisov et al. Figs. 3 and 6: schedules at epsilon 18.9.

    Args:
      dataset: ``docstrings`` or ``stackoverflow``.
    """
    shared = ("--client_learning_rate=1", "--server_momentum=0.95")
    schedules = {
        "decay": ("--server_cooldown=0.25", "--cooldown=drop"),
        "cool-down": ("--server_cooldown=0.25", "--cooldown=linear"),
    }
    # Constant rates are those of Fig. 2, and the same runs.
    found = [arm for arm in arms_of_denisov_2(dataset) if arm.epsilon == _EPSILONS_OF_DENISOV[0]]

    def add(label: str, kind: str, schedule: str, more: tuple[str, ...] = ()) -> None:
        found.append(
            Arm(
                label,
                kind,
                _EPSILONS_OF_DENISOV[0],
                0.5,
                flags=schedules[schedule],
                paper_flags=(*shared, *more),
                paper_noise_multiplier=_NOISE_MULTIPLIERS[0],
            )
        )

    for schedule in schedules:
        for label, kind in _DENISOV_2:
            add(f"{label}, {schedule}", kind, schedule)
    if dataset == kinds.STACKOVERFLOW:
        # As many clients as there are for one pass; the paper does not say of which mechanisms.
        for label, kind in list(_DENISOV_2)[2:]:
            more = ("--clients_per_round=167",)
            add(f"{label}, cool-down, 167 clients", kind, "cool-down", more)
    return tuple(found)


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
    variants = {arm: kinds.variant_of(arm, setting, place, workspace) for arm in arms}
    runs = repeated_runs.planned(
        place.directory / setting.name, setting.command, list(variants.values()), place.repetitions
    )
    finished = repeated_runs.run_all(_PROGRAM, runs)
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
      accuracy by epsilon, and by round at the largest.

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
    return Outcome(rows, _figure(trained), (*notes, _about(trained)))


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
            "At the papers' size, with the papers' learning rates. Single-epoch MF has 166 clients "
            "a round for 2,052 rounds; 167, which BandMF prints, would be more than there are. The "
            "threshold of zeroing is not printed; it is 1 for BandMF."
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


def _figure(trained: _Trained) -> matplotlib.figure.Figure:
    figure, ((left, right),) = figures.panels(1, 2, (5.6, 4.0))
    for label in dict.fromkeys(arm.label for arm in trained.arms):
        own = [arm for arm in trained.arms if arm.label == label]
        found = [trained.statistics[arm] for arm in own]
        left.errorbar(
            [arm.epsilon for arm in own],
            [100.0 * row.test_accuracy_mean for row in found],
            yerr=[100.0 * (row.test_accuracy_half_width or 0.0) for row in found],
            marker="o",
            capsize=3,
            label=label,
        )
    left.set(xscale="log", xlabel="epsilon", ylabel="test accuracy, %", title="After training")
    largest = max(arm.epsilon for arm in trained.arms)
    for arm in trained.arms:
        if arm.epsilon == largest:
            curve = run_comparisons.mean_accuracy([run.directory for run in trained.runs[arm]])
            right.plot(curve.rounds, 100.0 * curve.mean, label=arm.label)
    right.set(xlabel="round", ylabel="held-out accuracy, %", title=f"By round, epsilon {largest:g}")
    for axes in (left, right):
        axes.grid(True, alpha=0.3)
    right.legend(fontsize="x-small")
    return figure


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
    trained = _train(arms_of_figure_11(_place(workspace).dataset), kinds.RETURNING, workspace)
    best: dict[tuple[float, str], Arm] = {}
    for arm in trained.arms:
        key = (arm.epsilon, arm.label)
        if key not in best or _heldout(trained, arm) > _heldout(trained, best[key]):
            best[key] = arm
    points = [
        (
            kinds.effective_rmse(arm, trained.setting, workspace),
            kinds.learning_rate(arm, trained.setting, workspace),
        )
        for arm in best.values()
    ]
    errors, rates = np.array(points).T
    slope, offset = np.polyfit(np.log(errors), np.log(rates), 1)
    rows = [
        Row(
            name,
            "all mechanisms and targets",
            "slope of log(best server learning rate) by log(effective RMSE)",
            None,
            float(slope),
            "the paper, on StackOverflow: -0.95; the grid here is three rates around the paper's, "
            "or around what that very rule gives, and cannot move the slope far",
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
    figure, ((axes,),) = figures.panels(1, 1)
    for label in dict.fromkeys(label for _, label in best):
        of_label = [place for place, (_, other) in enumerate(best) if other == label]
        axes.scatter(errors[of_label], rates[of_label], label=label)
    ends = np.array([np.min(errors), np.max(errors)])
    axes.plot(ends, np.exp(offset) * ends**slope, color="black", linewidth=0.8)
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="effective RMSE",
        ylabel="best server learning rate",
        title=f"Slope {slope:.2f}",
    )
    axes.legend()
    return Outcome(tuple(rows), figure, (_about(trained),))


def _heldout(trained: _Trained, arm: Arm) -> float:
    """The mean held-out accuracy after training: test data choose nothing."""
    curve = run_comparisons.mean_accuracy([run.directory for run in trained.runs[arm]])
    return float(curve.mean[-1])


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
        return Experiment(name, source, title, run, tuple(settings))

    return (
        comparison(
            "denisov-figure-2",
            f"{_DENISOV}, Fig. 2",
            "Next-word prediction in a single pass, constant learning rates",
            arms_of_denisov_2,
            kinds.SINGLE_PASS,
        ),
        comparison(
            "denisov-figure-3",
            f"{_DENISOV}, Figs. 3 and 6",
            "Learning-rate schedules and momentum, inside of the mechanism or after it",
            arms_of_denisov_3,
            kinds.SINGLE_PASS,
        ),
        comparison(
            "bandmf-figure-1a",
            f"{BANDMF}, Figs. 1 (a) and 10 (CIFAR-10)",
            "A stand-in: scikit-learn's digits, each image a client, with sampled batches",
            arms_of_figure_1a,
            kinds.CENTRALISED,
        ),
        comparison(
            "bandmf-figure-1b",
            f"{BANDMF}, Fig. 1 (b)",
            "Next-word prediction with sampled batches",
            arms_of_figure_1b,
            kinds.RETURNING,
        ),
        comparison(
            "bandmf-figure-5a",
            f"{BANDMF}, Figs. 5 (a) and 12 (the largest epsilon)",
            "Next-word prediction across devices: test accuracy and convergence",
            arms_of_figure_5a,
            kinds.RETURNING,
        ),
        Experiment(
            "bandmf-figure-11",
            f"{BANDMF}, Fig. 11",
            "The best server learning rate by the effective RMSE",
            functools.partial(learning_rates, "bandmf-figure-11"),
            kinds.DATASETS,
        ),
    )
