"""Trains the configurations that are compared, and reports their accuracies."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from reproduction import configurations as kinds
from reproduction.configurations import Configuration, Setting
from reproduction.experiment import (
    BANDMF,
    DENISOV,
    Drawing,
    Experiment,
    Outcome,
    Row,
    Workspace,
    for_drawing,
    with_interval,
)
from simulations.comparison import repeated_runs, run_comparisons
from simulations.comparison.repeated_runs import FinishedRun, RepeatedRun
from simulations.runs import run_directory

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
      configurations: The configurations of the chosen targets, in the order of their definition.
      setting: The task and its size.
      runs: The runs of each configuration, repetition by repetition.
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
    place = workspace.training
    if place is None:
        raise ValueError("a training comparison needs a directory for its runs.")
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
    finished = repeated_runs.run_all("reproduce-paper", runs)
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


def by_target(configurations: Sequence[Configuration]) -> dict[float, list[Configuration]]:
    """Groups configurations by privacy target: only those of one target can be compared.

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
    """Returns a sentence on the order of configurations' test accuracies that intervals support.

    Args:
      configurations: Configurations of different mechanisms for one target.
      trained: A trained comparison that has these configurations.
    """
    found = trained.statistics
    rows = [dataclasses.replace(found[each], mechanism=each.label) for each in configurations]
    why = run_comparisons.unfairness(
        {
            each.name: trained.finished[each]
            for each in configurations
            # Runs for a fixed order are left out of the check for equal epsilons: their statements
            # are for timers, for which the same noise gives a larger epsilon.
            if each.kind != kinds.MULTI_EPOCH_FIXED_ORDER
        }
    )
    pairs = [] if why is not None else run_comparisons.separated(rows)
    return run_comparisons.separation_line(rows, pairs, why)


def test_accuracy_row(configuration: Configuration, trained: Trained) -> Row:
    """Returns the mean test accuracy of a configuration, with the interval as its reason.

    Args:
      configuration: The configuration.
      trained: A trained comparison that has this configuration.
    """
    found = trained.statistics[configuration]
    mean, half = 100.0 * found.test_accuracy_mean, found.test_accuracy_half_width
    reason = with_interval(mean, half and 100.0 * half)
    claim, holds = None, None
    if configuration.printed is not None and trained.setting.dataset != kinds.STACKOVERFLOW:
        reason += f"; the paper, on StackOverflow: {configuration.printed}"
    elif configuration.printed is not None:
        # The printed accuracy is compared as a claim: a mean of few runs is too imprecise to
        # compare digits.
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
    """Returns sentences on the training and how it differs from the papers' training.

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
    return Outcome(rows, _drawing(trained), (*notes, about(trained)))


def _drawing(trained: Trained) -> Drawing:
    found = []
    for each in trained.configurations:
        rounds, means, _ = _mean_accuracy(trained.runs[each])
        statistics = trained.statistics[each]
        half_width = statistics.test_accuracy_half_width
        found.append(
            {
                "label": each.label,
                "epsilon": each.epsilon,
                "mean": 100.0 * statistics.test_accuracy_mean,
                "half_width": None if half_width is None else 100.0 * half_width,
                "rounds": rounds.astype(int).tolist(),
                "held_out": for_drawing(100.0 * means),
            }
        )
    return Drawing("trained configurations", {"configurations": found})


def _mean_accuracy(repeated: Sequence[RepeatedRun]) -> tuple[np.ndarray, ...]:
    """Returns rounds with a held-out accuracy in all runs, its mean and interval half-widths."""
    runs = []
    for run in repeated:
        file = run.directory / run_directory.METRICS_FILE
        found = np.atleast_1d(np.genfromtxt(file, delimiter=",", names=True))
        known = found[np.isfinite(found["heldout_accuracy"])]
        runs.append(dict(zip(known["round"], known["heldout_accuracy"], strict=True)))
    rounds = sorted(set(runs[0]).intersection(*runs[1:]))
    values = np.array([[each[number] for number in rounds] for each in runs])
    return np.array(rounds), np.mean(values, axis=0), run_comparisons.half_widths(values)


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


# The two kinds of errors that BandMF Fig. 11 fits learning rates to, in its left and its right
# half.
_OF_SUMS, _OF_UPDATES = "effective RMSE of prefix sums", "effective RMSE of updates"


@dataclasses.dataclass(frozen=True)
class _Rate:
    """The results of one configuration at one learning rate.

    Attributes:
      configuration: The configuration with this learning rate.
      rate: The server learning rate.
      num_runs: The number of repetitions.
      mean: The mean held-out accuracy after training, in percent: test data choose nothing.
      half_width: Half the width of the 95 % interval of Student's t around the mean; NaN for a
        single run.
    """

    configuration: Configuration
    rate: float
    num_runs: int
    mean: float
    half_width: float

    def is_apart_from(self, other: "_Rate") -> bool:
        """Whether the interval of this rate is disjoint from another's; False for single runs."""
        return bool(abs(self.mean - other.mean) > self.half_width + other.half_width)


@dataclasses.dataclass(frozen=True)
class _Tuned:
    """A mechanism at one privacy target, with the learning rates that were tried.

    Attributes:
      epsilon: The target.
      label: The mechanism.
      rates: The rates that were tried, in increasing order.
      error_of_sums: The mechanism's effective RMSE of prefix sums.
      error_of_updates: The mechanism's effective RMSE of updates.
    """

    epsilon: float
    label: str
    rates: tuple[_Rate, ...]
    error_of_sums: float
    error_of_updates: float

    def best(self) -> _Rate:
        """Returns the learning rate with the highest accuracy, the first if several have it."""
        return max(self.rates, key=lambda rate: rate.mean)


def best_of_grid(workspace: Workspace) -> Outcome:
    """Finds the best of a few learning rates of each mechanism, and fits them to effective RMSEs.

    Args:
      workspace: Where matrices and runs are stored.

    Returns:
      The slopes of BandMF App. I's fit; for each mechanism the best rate, what intervals say of
      the others, and its test accuracy; the held-out accuracy at each rate; and the order of
      mechanisms at their best rates that intervals support.

    Raises:
      KeyboardInterrupt: If a run was interrupted.
      CommandError: If a run failed.
    """
    configurations_of = kinds.figure_11
    trained = train(configurations_of, kinds.RETURNING, workspace)
    tuned = _tuned(trained, workspace)
    best = [each.best().configuration for each in tuned]
    factors = ", ".join(
        f"{factor:.3g}"
        for factor in sorted(
            {configuration.rate_factor for configuration in trained.configurations}
        )
    )
    errors = {
        _OF_SUMS: np.array([each.error_of_sums for each in tuned]),
        _OF_UPDATES: np.array([each.error_of_updates for each in tuned]),
    }
    rows = [
        *(_slope_row(quantity, of_quantity, tuned) for quantity, of_quantity in errors.items()),
        *map(_best_row, tuned),
        *(test_accuracy_row(configuration, trained) for configuration in best),
        *(_accuracy_row(each, rate) for each in tuned for rate in each.rates),
    ]
    return Outcome(
        tuple(rows),
        _drawing_of_rates(tuned),
        (
            *(
                f"Epsilon {epsilon:g}, test accuracy of each at its best rate. "
                f"{order(of_epsilon, trained)}"
                for epsilon, of_epsilon in by_target(best).items()
            ),
            about(trained),
            f"Here that learning rate of each mechanism is multiplied by {factors}.",
        ),
    )


def _tuned(trained: Trained, workspace: Workspace) -> tuple[_Tuned, ...]:
    grids: dict[tuple[float, str], list[Configuration]] = {}
    for configuration in trained.configurations:
        grids.setdefault((configuration.epsilon, configuration.label), []).append(configuration)
    updates = np.eye(trained.setting.num_rounds)
    found = []
    for (epsilon, label), grid in grids.items():
        rates = [_rate(configuration, trained, workspace) for configuration in grid]
        # The errors of the first configuration are those of all: they differ only in learning
        # rates.
        of_sums = kinds.effective_rmse(grid[0], trained.setting, workspace)
        of_updates = kinds.effective_rmse(grid[0], trained.setting, workspace, updates)
        ordered = tuple(sorted(rates, key=lambda rate: rate.rate))
        found.append(_Tuned(epsilon, label, ordered, of_sums, of_updates))
    return tuple(found)


def _rate(configuration: Configuration, trained: Trained, workspace: Workspace) -> _Rate:
    runs = trained.runs[configuration]
    _, means, half_widths = _mean_accuracy(runs)
    return _Rate(
        configuration,
        kinds.learning_rate(configuration, trained.setting, workspace),
        len(runs),
        100.0 * float(means[-1]),
        100.0 * float(half_widths[-1]),
    )


def _slope_row(quantity: str, errors: np.ndarray, tuned: Sequence[_Tuned]) -> Row:
    """Returns a row with the slope of log(learning rate) over log(error)."""
    best = np.log([each.best().rate for each in tuned])
    reason = (
        "the paper, on StackOverflow: -0.95; the grid here is a few rates around the paper's, or "
        "around what that very rule gives, and cannot move the slope far"
    )
    return Row(
        "all mechanisms and targets",
        f"slope of log(best server learning rate) by log({quantity})",
        None,
        float(np.polyfit(np.log(errors), best, 1)[0]),
        reason if quantity == _OF_SUMS else None,
    )


def _best_row(tuned: _Tuned) -> Row:
    best = tuned.best()
    others = [rate for rate in tuned.rates if rate is not best]
    near = [f"{rate.rate:.3g}" for rate in others if not best.is_apart_from(rate)]
    if np.isnan(best.half_width):
        reasons = ["of single runs, which have no interval: another may be as good"]
    elif near:
        reasons = [f"intervals of held-out accuracy overlap with those of {', '.join(near)}"]
    else:
        reasons = ["intervals of held-out accuracy are apart from those of the others"]
    if best is tuned.rates[-1]:
        reasons.append("the largest of its grid, and a larger one may be better")
    elif best is tuned.rates[0]:
        reasons.append("the smallest of its grid, and a smaller one may be better")
    return Row(
        f"epsilon {tuned.epsilon:g}, {tuned.label}",
        "best server learning rate of its grid",
        None,
        best.rate,
        "; ".join(reasons),
    )


def _accuracy_row(tuned: _Tuned, rate: _Rate) -> Row:
    return Row(
        f"epsilon {tuned.epsilon:g}, {tuned.label}, learning rate {rate.rate:.3g}",
        f"held-out accuracy, %, {rate.num_runs} runs",
        None,
        rate.mean,
        with_interval(rate.mean, rate.half_width),
    )


def _drawing_of_rates(tuned: Sequence[_Tuned]) -> Drawing:
    found = [
        {
            "label": each.label,
            "epsilon": each.epsilon,
            "errors": {_OF_SUMS: each.error_of_sums, _OF_UPDATES: each.error_of_updates},
            "rates": [rate.rate for rate in each.rates],
            "means": [rate.mean for rate in each.rates],
            "half_widths": [
                None if np.isnan(rate.half_width) else rate.half_width for rate in each.rates
            ],
        }
        for each in tuned
    ]
    return Drawing("learning rates", {"mechanisms": found})


EXPERIMENTS = (
    _comparison(
        "denisov-figure-2",
        f"{DENISOV}, Fig. 2",
        "Next-word prediction in a single pass, constant learning rates",
        kinds.denisov_figure_2,
        kinds.SINGLE_PASS,
    ),
    _comparison(
        "denisov-figure-3",
        f"{DENISOV}, Figs. 3 and 6",
        "Learning-rate schedules and momentum, inside of the mechanism or after it",
        kinds.denisov_figure_3,
        kinds.SINGLE_PASS,
    ),
    _comparison(
        "bandmf-figure-1a",
        f"{BANDMF}, Figs. 1 (a) and 10 (CIFAR-10)",
        "Single images as clients, with sampled batches",
        kinds.figure_1a,
        kinds.CENTRALISED,
    ),
    _comparison(
        "bandmf-figure-1b",
        f"{BANDMF}, Fig. 1 (b)",
        "Next-word prediction with sampled batches",
        kinds.figure_1b,
        kinds.RETURNING,
    ),
    _comparison(
        "bandmf-figure-5a",
        f"{BANDMF}, Figs. 5 (a) and 12",
        "Next-word prediction across devices: test accuracy and convergence",
        kinds.figure_5a,
        kinds.RETURNING,
    ),
    Experiment(
        "bandmf-figure-11",
        f"{BANDMF}, Fig. 11",
        "The best server learning rate by two effective RMSEs",
        best_of_grid,
        targets_of(kinds.figure_11, kinds.RETURNING),
    ),
)
