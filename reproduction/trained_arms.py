"""The arms of a comparison, trained: their runs, what they took, and how they differ from print."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from reproduction import arms as kinds
from reproduction.arms import Arm, Setting
from reproduction.experiment import Row, TrainingPlace, Workspace
from simulations.comparison import repeated_runs, run_comparisons
from simulations.comparison.repeated_runs import FinishedRun, RepeatedRun

_PROGRAM = "reproduce-paper"


@dataclasses.dataclass(frozen=True)
class TrainedArms:
    """The arms of a comparison after training.

    Attributes:
      arms: Those of the chosen targets, in the order of their definition.
      setting: The task and its size.
      runs: What was run for each arm, repetition by repetition.
      finished: What came of these runs, by arm and in the same order.
      statistics: The test accuracies of each arm over its runs.
    """

    arms: tuple[Arm, ...]
    setting: Setting
    runs: Mapping[Arm, Sequence[RepeatedRun]]
    finished: Mapping[Arm, Sequence[FinishedRun]]
    statistics: Mapping[Arm, run_comparisons.Row]


def train(
    arms_of: Callable[[str], tuple[Arm, ...]],
    settings: Mapping[str, Setting],
    workspace: Workspace,
) -> TrainedArms:
    """Trains the arms of the chosen targets, or goes on with those that are not finished.

    Args:
      arms_of: Returns a comparison's arms for a data set.
      settings: The setting of each data set.
      workspace: Where matrices and runs are kept.

    Returns:
      The arms with their runs.

    Raises:
      ValueError: If the workspace has no place for runs.
      KeyboardInterrupt: If a run was interrupted.
      CommandError: If a run failed.
    """
    place = _place(workspace)
    setting = settings[place.dataset]
    arms = [
        arm
        for arm in arms_of(place.dataset)
        if place.targets is None or arm.epsilon in place.targets
    ]
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
    return TrainedArms(tuple(arms), setting, of_arm, found, {arm: rows[arm.name] for arm in arms})


def _place(workspace: Workspace) -> TrainingPlace:
    if workspace.training is None:
        raise ValueError("a training comparison needs a place for its runs.")
    return workspace.training


def left_out(
    name: str, arms_of: Callable[[str], tuple[Arm, ...]], workspace: Workspace
) -> tuple[str, ...]:
    """Returns what a reader misses where only arms of some targets were trained.

    Args:
      name: The experiment's name.
      arms_of: Returns its arms for a data set.
      workspace: Whose training place has the targets.

    Returns:
      One sentence or two, or nothing if all were trained.
    """
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


def by_target(arms: Sequence[Arm]) -> dict[float, list[Arm]]:
    """Returns the arms of each privacy target, which alone can be compared.

    Args:
      arms: The arms.

    Returns:
      By epsilon, in increasing order, its arms in their order.
    """
    targets = sorted({arm.epsilon for arm in arms})
    return {epsilon: [arm for arm in arms if arm.epsilon == epsilon] for epsilon in targets}


def order(arms: Sequence[Arm], trained: TrainedArms) -> str:
    """Returns the order of test accuracies that intervals support.

    Args:
      arms: Those of one target, of mechanisms that differ.
      trained: What has them.
    """
    rows = [dataclasses.replace(trained.statistics[arm], mechanism=arm.label) for arm in arms]
    why = run_comparisons.unfairness(
        {
            arm.name: trained.finished[arm]
            for arm in arms
            # Their own statements are for timers, under which their noise is worth less.
            if arm.kind != kinds.MULTI_EPOCH_FIXED_ORDER
        }
    )
    pairs = [] if why is not None else run_comparisons.separated(rows)
    return run_comparisons.separation_line(rows, pairs, why)


def test_accuracy_row(name: str, arm: Arm, trained: TrainedArms) -> Row:
    """Returns the mean test accuracy of an arm over its runs, with the interval as its reason.

    Args:
      name: The experiment's name.
      arm: The arm.
      trained: What has it.
    """
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


def about(trained: TrainedArms) -> str:
    """Returns what was trained, and how that differs from the papers.

    Args:
      trained: The arms.
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


def times(trained: TrainedArms) -> str:
    """Returns how long runs took: an experiment's own seconds do not have runs from before.

    Args:
      trained: The arms.
    """
    finished = [run for of_arm in trained.finished.values() for run in of_arm]
    minutes = [run.seconds / 60.0 for run in finished if run.seconds is not None]
    said = f"{len(finished)} runs"
    if minutes:
        said += f", of {min(minutes):.1f} to {max(minutes):.1f} minutes each"
        said += f", {sum(minutes):.0f} together; with --parallel_runs above 1, they overlap"
    if len(minutes) < len(finished):
        said += f" (cut off and resumed, and not counted: {len(finished) - len(minutes)})"
    return f"{said}."
