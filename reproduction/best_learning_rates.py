"""The best server learning rate of a grid for each mechanism, by its errors: BandMF Fig. 11."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from reproduction import configurations as kinds
from reproduction import training, training_tables
from reproduction.banded_errors import PAPER
from reproduction.configurations import Configuration
from reproduction.experiment import Drawing, Experiment, Outcome, Row, Workspace
from reproduction.training import Trained
from simulations.comparison import run_comparisons

# The two kinds of errors: the left half of the paper's figure, and the right half.
_OF_SUMS, _OF_UPDATES = "effective RMSE of prefix sums", "effective RMSE of updates"


@dataclasses.dataclass(frozen=True)
class _Rate:
    """The results of one learning rate.

    Attributes:
      configuration: The configuration that has it.
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

    def said(self) -> str:
        return f"{self.mean:.2f}" + (
            "" if np.isnan(self.half_width) else f" ± {self.half_width:.2f}"
        )

    def is_apart_from(self, other: "_Rate") -> bool:
        """Whether intervals do not overlap; single runs have none, and never are."""
        return bool(abs(self.mean - other.mean) > self.half_width + other.half_width)


@dataclasses.dataclass(frozen=True)
class _Tuned:
    """A mechanism at one privacy target.

    Attributes:
      epsilon: The target.
      label: The mechanism.
      rates: The rates that were tried, in increasing order.
      error_of_sums: Its effective RMSE of prefix sums.
      error_of_updates: Its effective RMSE of updates.
    """

    epsilon: float
    label: str
    rates: tuple[_Rate, ...]
    error_of_sums: float
    error_of_updates: float

    def best(self) -> _Rate:
        """The first of the best."""
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
    configurations_of = training_tables.figure_11
    trained = training.train(configurations_of, kinds.RETURNING, workspace)
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
        *(training.test_accuracy_row(configuration, trained) for configuration in best),
        *(_accuracy_row(each, rate) for each in tuned for rate in each.rates),
    ]
    return Outcome(
        tuple(rows),
        _drawing(tuned),
        (
            *(
                f"Epsilon {epsilon:g}, test accuracy of each at its best rate. "
                f"{training.order(of_epsilon, trained)}"
                for epsilon, of_epsilon in training.by_target(best).items()
            ),
            *training.untrained(configurations_of, workspace),
            training.about(trained),
            f"Here that learning rate of each mechanism is multiplied by {factors}.",
            training.times(trained),
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
        # They differ in their learning rates alone, not in their errors.
        of_sums = kinds.effective_rmse(grid[0], trained.setting, workspace)
        of_updates = kinds.effective_rmse(grid[0], trained.setting, workspace, updates)
        ordered = tuple(sorted(rates, key=lambda rate: rate.rate))
        found.append(_Tuned(epsilon, label, ordered, of_sums, of_updates))
    return tuple(found)


def _rate(configuration: Configuration, trained: Trained, workspace: Workspace) -> _Rate:
    directories = [run.directory for run in trained.runs[configuration]]
    curve = run_comparisons.mean_accuracy(directories)
    return _Rate(
        configuration,
        kinds.learning_rate(configuration, trained.setting, workspace),
        len(directories),
        100.0 * float(curve.mean[-1]),
        100.0 * float(curve.half_width[-1]),
    )


def _slope_row(quantity: str, errors: np.ndarray, tuned: Sequence[_Tuned]) -> Row:
    """The slope of log(rate) by log(error)."""
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
        rate.said() + ("" if np.isnan(rate.half_width) else " (95 %)"),
    )


def _drawing(tuned: Sequence[_Tuned]) -> Drawing:
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
    Experiment(
        "bandmf-figure-11",
        f"{PAPER}, Fig. 11",
        "The best server learning rate by two effective RMSEs",
        best_of_grid,
        training.targets_of(training_tables.figure_11, kinds.RETURNING),
    ),
)
