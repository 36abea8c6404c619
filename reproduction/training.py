"""Training comparisons of the papers: their arms, and what is said of their results."""

import functools
from collections.abc import Callable, Mapping

from reproduction import arms as kinds
from reproduction import best_learning_rates, trained_arms, training_tables
from reproduction.arms import Arm, Setting
from reproduction.banded_errors import PAPER as BANDMF
from reproduction.experiment import Drawing, Experiment, Outcome, Workspace, for_drawing
from reproduction.trained_arms import TrainedArms
from simulations.comparison import run_comparisons

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
      settings: The setting of each data set.
      workspace: Where matrices and runs are kept.

    Returns:
      A row for each arm, the order that intervals support at each target, and what the
      figure shows: test accuracies, and held-out accuracy by round.

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
        _drawing(trained),
        (
            *notes,
            *trained_arms.left_out(name, arms_of, workspace),
            trained_arms.about(trained),
            trained_arms.times(trained),
        ),
    )


def _drawing(trained: TrainedArms) -> Drawing:
    found = []
    for arm in trained.arms:
        curve = run_comparisons.mean_accuracy([run.directory for run in trained.runs[arm]])
        statistics = trained.statistics[arm]
        half_width = statistics.test_accuracy_half_width
        found.append(
            {
                "label": arm.label,
                "epsilon": arm.epsilon,
                "mean": 100.0 * statistics.test_accuracy_mean,
                "half_width": None if half_width is None else 100.0 * half_width,
                "rounds": curve.rounds.astype(int).tolist(),
                "held_out": for_drawing(100.0 * curve.mean),
            }
        )
    return Drawing("trained arms", {"arms": found})


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
