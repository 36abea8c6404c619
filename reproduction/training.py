"""Trains the configurations of comparisons, and reports their results."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

from reproduction import configurations as kinds
from reproduction import training_tables
from reproduction.banded_errors import PAPER as BANDMF
from reproduction.configurations import Configuration, Setting
from reproduction.experiment import (
    Drawing,
    Experiment,
    Outcome,
    Row,
    TrainingPlace,
    Workspace,
    for_drawing,
)
from simulations.comparison import repeated_runs, run_comparisons
from simulations.comparison.repeated_runs import FinishedRun, RepeatedRun

_DENISOV = "Denisov et al.: Improved DP for SGD on Adaptive Streams"

_FIXED_ORDER = (
    "Multi-epoch MF in a fixed order has the noise that its epsilon needs if every client takes "
    "part exactly b rounds after the last time, as the paper has it. Its runs here are under "
    "timers, which promise at least b rounds: their guarantee is weaker, and their own statements "
    "say so."
)


@dataclasses.dataclass(frozen=True)
class Trained:
    """The configurations of a comparison after training.

    Attributes:
      configurations: Those of the chosen targets, in the order of their definition.
      setting: The task and its size.
      runs: What was run for each configuration, repetition by repetition.
      finished: The results of these runs, by configuration and in the same order.
      statistics: The test accuracies of each configuration over its runs.
    """

    configurations: tuple[Configuration, ...]
    setting: Setting
    runs: Mapping[Configuration, Sequence[RepeatedRun]]
    finished: Mapping[Configuration, Sequence[FinishedRun]]
    statistics: Mapping[Configuration, run_comparisons.Row]


def train(
    configurations_of: Callable[[str], tuple[Configuration, ...]],
    settings: Mapping[str, Setting],
    workspace: Workspace,
) -> Trained:
    """Trains the configurations of the chosen targets, and resumes unfinished runs.

    Args:
      configurations_of: Returns a comparison's configurations for a data set.
      settings: The setting of each data set.
      workspace: Where matrices and runs are stored.

    Returns:
      The configurations with their runs.

    Raises:
      ValueError: If the workspace has no directory for runs.
      KeyboardInterrupt: If a run was interrupted.
      CommandError: If a run failed.
    """
    place = _place(workspace)
    setting = settings[place.dataset]
    configurations = [
        each
        for each in configurations_of(place.dataset)
        if place.targets is None or each.epsilon in place.targets
    ]
    variants = {each: kinds.variant_of(each, setting, place, workspace) for each in configurations}
    runs = repeated_runs.planned(
        place.directory / setting.name, setting.command, list(variants.values()), place.repetitions
    )
    finished = repeated_runs.run_all("reproduce-paper", runs, place.parallel_runs)
    if finished is None:
        raise KeyboardInterrupt
    of_configuration = {
        each: [run for run in runs if run.variant == variant] for each, variant in variants.items()
    }
    found = {each: [finished[run] for run in of_each] for each, of_each in of_configuration.items()}
    by_name = run_comparisons.summarise({each.name: of_one for each, of_one in found.items()})
    rows = {row.mechanism: row for row in by_name}
    return Trained(
        tuple(configurations),
        setting,
        of_configuration,
        found,
        {each: rows[each.name] for each in configurations},
    )


def _place(workspace: Workspace) -> TrainingPlace:
    if workspace.training is None:
        raise ValueError("a training comparison needs a directory for its runs.")
    return workspace.training


def untrained(
    configurations_of: Callable[[str], tuple[Configuration, ...]], workspace: Workspace
) -> tuple[str, ...]:
    """Returns which configurations were not trained because of --targets.

    Args:
      configurations_of: Returns a comparison's configurations for a data set.
      workspace: Whose training place has the targets.

    Returns:
      One sentence or two, or nothing if all were trained.
    """
    place = _place(workspace)
    if place.targets is None:
        return ()
    every = {each.epsilon for each in configurations_of(place.dataset)}
    missing = ", ".join(f"{epsilon:g}" for epsilon in sorted(every - set(place.targets)))
    if not missing:
        return ()
    return (
        f"Not trained here: the configurations of epsilon {missing}. Without --targets, all "
        "are trained together.",
    )


def by_target(configurations: Sequence[Configuration]) -> dict[float, list[Configuration]]:
    """Returns the configurations of each privacy target, which alone can be compared.

    Args:
      configurations: The configurations.

    Returns:
      By epsilon, in increasing order, its configurations in their order.
    """
    targets = sorted({each.epsilon for each in configurations})
    return {
        epsilon: [each for each in configurations if each.epsilon == epsilon] for epsilon in targets
    }


def order(configurations: Sequence[Configuration], trained: Trained) -> str:
    """Returns the order of test accuracies that intervals support.

    Args:
      configurations: Those of one target, of mechanisms that differ.
      trained: What has them.
    """
    rows = [
        dataclasses.replace(trained.statistics[each], mechanism=each.label)
        for each in configurations
    ]
    why = run_comparisons.unfairness(
        {
            each.name: trained.finished[each]
            for each in configurations
            # Their own statements are for timers, under which their noise is worth less.
            if each.kind != kinds.MULTI_EPOCH_FIXED_ORDER
        }
    )
    pairs = [] if why is not None else run_comparisons.separated(rows)
    return run_comparisons.separation_line(rows, pairs, why)


def test_accuracy_row(configuration: Configuration, trained: Trained) -> Row:
    """Returns the mean test accuracy of a configuration, with the interval as its reason.

    Args:
      configuration: The configuration.
      trained: What has it.
    """
    found = trained.statistics[configuration]
    mean, half = 100.0 * found.test_accuracy_mean, found.test_accuracy_half_width
    reason = f"{mean:.2f}" + ("" if half is None else f" ± {100.0 * half:.2f} (95 %)")
    claim, holds = None, None
    if configuration.printed is not None and trained.setting.dataset != kinds.STACKOVERFLOW:
        reason += f"; the paper, on StackOverflow: {configuration.printed}"
    elif configuration.printed is not None:
        # A mean of few runs has no digits to compare.
        claim = f"{configuration.printed}; it holds if our 95 % interval has it"
        holds = half is not None and abs(float(configuration.printed) - mean) <= 100.0 * half
    return Row(
        f"epsilon {configuration.epsilon:g}, {configuration.label}",
        f"test accuracy, %, {found.repetitions} runs",
        None,
        mean,
        reason,
        claim,
        holds,
    )


def about(trained: Trained) -> str:
    """Describes the training, and how it differs from the papers'.

    Args:
      trained: The configurations.
    """
    setting = trained.setting
    if setting.dataset == kinds.STACKOVERFLOW:
        return (
            "At the papers' size, with the papers' learning rates. Single-epoch MF has 166 clients "
            "a round for 2,052 rounds; 167, which BandMF prints, would be more than there are. The "
            "threshold of zeroing is not printed; it is 1 for BandMF."
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


def times(trained: Trained) -> str:
    """Returns how long all runs took, those included that had finished before.

    Args:
      trained: The configurations.
    """
    finished = [run for of_configuration in trained.finished.values() for run in of_configuration]
    minutes = [run.seconds / 60.0 for run in finished if run.seconds is not None]
    said = f"{len(finished)} runs"
    if minutes:
        said += f", of {min(minutes):.1f} to {max(minutes):.1f} minutes each"
        said += f", {sum(minutes):.0f} together; with --parallel_runs above 1, they overlap"
    if len(minutes) < len(finished):
        said += f" (cut off and resumed, and not counted: {len(finished) - len(minutes)})"
    return f"{said}."


def compare(
    workspace: Workspace,
    configurations_of: Callable[[str], tuple[Configuration, ...]],
    settings: Mapping[str, Setting],
) -> Outcome:
    """Trains configurations and compares their test accuracies.

    Args:
      workspace: Where matrices and runs are stored.
      configurations_of: Returns its configurations for a data set.
      settings: The setting of each data set.

    Returns:
      A row for each configuration, the order that intervals support at each target, and what the
      figure shows: test accuracies, and held-out accuracy by round.

    Raises:
      KeyboardInterrupt: If a run was interrupted.
      CommandError: If a run failed.
    """
    trained = train(configurations_of, settings, workspace)
    rows = tuple(test_accuracy_row(each, trained) for each in trained.configurations)
    notes = [
        f"Epsilon {epsilon:g}. {order(of_epsilon, trained)}"
        for epsilon, of_epsilon in by_target(trained.configurations).items()
    ]
    if any(each.kind == kinds.MULTI_EPOCH_FIXED_ORDER for each in trained.configurations):
        notes.append(_FIXED_ORDER)
    return Outcome(
        rows,
        _drawing(trained),
        (
            *notes,
            *untrained(configurations_of, workspace),
            about(trained),
            times(trained),
        ),
    )


def _drawing(trained: Trained) -> Drawing:
    found = []
    for each in trained.configurations:
        curve = run_comparisons.mean_accuracy([run.directory for run in trained.runs[each]])
        statistics = trained.statistics[each]
        half_width = statistics.test_accuracy_half_width
        found.append(
            {
                "label": each.label,
                "epsilon": each.epsilon,
                "mean": 100.0 * statistics.test_accuracy_mean,
                "half_width": None if half_width is None else 100.0 * half_width,
                "rounds": curve.rounds.astype(int).tolist(),
                "held_out": for_drawing(100.0 * curve.mean),
            }
        )
    return Drawing("trained configurations", {"configurations": found})


def targets_of(
    configurations_of: Callable[[str], tuple[Configuration, ...]], settings: Mapping[str, Setting]
) -> dict[str, tuple[float, ...]]:
    """Returns the epsilons of a comparison's configurations by data set."""
    return {
        dataset: tuple(sorted({each.epsilon for each in configurations_of(dataset)}))
        for dataset in settings
    }


def _comparison(
    name: str,
    source: str,
    title: str,
    configurations_of: Callable[[str], tuple[Configuration, ...]],
    settings: Mapping[str, Setting],
) -> Experiment:
    run = functools.partial(compare, configurations_of=configurations_of, settings=settings)
    return Experiment(name, source, title, run, targets_of(configurations_of, settings))


EXPERIMENTS = (
    _comparison(
        "denisov-figure-2",
        f"{_DENISOV}, Fig. 2",
        "Next-word prediction in a single pass, constant learning rates",
        training_tables.denisov_figure_2,
        kinds.SINGLE_PASS,
    ),
    _comparison(
        "denisov-figure-3",
        f"{_DENISOV}, Figs. 3 and 6",
        "Learning-rate schedules and momentum, inside of the mechanism or after it",
        training_tables.denisov_figure_3,
        kinds.SINGLE_PASS,
    ),
    _comparison(
        "bandmf-figure-1a",
        f"{BANDMF}, Figs. 1 (a) and 10 (CIFAR-10)",
        "Single images as clients, with sampled batches",
        training_tables.figure_1a,
        kinds.CENTRALISED,
    ),
    _comparison(
        "bandmf-figure-1b",
        f"{BANDMF}, Fig. 1 (b)",
        "Next-word prediction with sampled batches",
        training_tables.figure_1b,
        kinds.RETURNING,
    ),
    _comparison(
        "bandmf-figure-5a",
        f"{BANDMF}, Figs. 5 (a) and 12",
        "Next-word prediction across devices: test accuracy and convergence",
        training_tables.figure_5a,
        kinds.RETURNING,
    ),
)
