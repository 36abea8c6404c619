"""Training comparisons: what is handed to runs, and what is said of their results.

The runs are those of a small program in the place of the next-word command.
"""

import dataclasses
import json
import pathlib
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

import mf_aggregators as mfa
from mf_aggregators.commands import command_line
from mf_aggregators.participation import FixedEpochOrder, MinSeparation, SingleParticipation
from reproduction import configurations, reproduce_paper, training_tables
from reproduction.band_choice import BandChoice
from reproduction.experiment import TrainingPlace, Workspace
from simulations.comparison.repeated_runs import Variant
from simulations.examples import cifar10, digits
from simulations.runs import planned_runs
from simulations.runs.planned_runs import Run
from simulations.runs.run_directory import RunDirectory
from stackoverflow_nwp import run_stackoverflow
from tests.simulations.parsed_flags import config_of

_RUN = """
import json, os, pathlib, sys, time

flags = dict(flag[2:].partition("=")[::2] for flag in sys.argv[1:])
directory = pathlib.Path(flags["output_dir"])
directory.mkdir(parents=True, exist_ok=True)
(directory / "config.json").write_text("{}")
if directory.name == "run":
    time.sleep(60)
with (directory.parent / "started.jsonl").open("a") as file:
    file.write(json.dumps([directory.name, flags]) + "\\n")
if (directory.parent / "interrupt").exists():
    sys.exit(130)
configuration, _, repetition = directory.name.rpartition("_")
order = ["dp_sgd", "single_epoch_mf", "optimal_treeagg", "multi_epoch_mf", "bandmf"]
mechanism = configuration.partition("_epsilon")[0]
accuracy = 0.1 + 0.02 * (order.index(mechanism) if mechanism in order else 5)
# What a run under timers earns with noise that is not for timers.
epsilon = float(flags.get("target_epsilon", 20.0))
accuracy += 0.001 * int(repetition) + 0.01 * epsilon
(directory / "metrics.csv").write_text(f"round,heldout_accuracy\\n1,0.01\\n2,{accuracy}\\n")
guarantee = {
    "epsilon": str(epsilon), "delta": flags["delta"], "sampling": None, "noise_multiplier": None,
    "only_if": None,
}
print(json.dumps({
    "rounds": int(flags["num_rounds"]),
    "test_accuracy": accuracy,
    "privacy": {
        "is_private": True, "keeps_plan": True, "planned": guarantee,
        "noise": {"noise_multipliers": [None]},
    },
}))
"""


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """Searches for noise multipliers take seconds each, and tests share them."""
    return Workspace(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def workplace(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    package = tmp_path / "stackoverflow_nwp"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "run_stackoverflow.py").write_text(_RUN)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _call(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    only = () if any(each.startswith("--only=") for each in arguments) else ("bandmf-figure-5a",)
    status = command_line.run(
        "",
        reproduce_paper.define_flags,
        reproduce_paper.main,
        ["reproduce-paper", *(f"--only={each}" for each in only), "--output_dir=out", *arguments],
    )
    return status, *capfd.readouterr()


def _started(directory: pathlib.Path) -> list[tuple[str, dict[str, str]]]:
    lines = (directory / "started.jsonl").read_text().splitlines()
    return [tuple(json.loads(line)) for line in lines]


@pytest.mark.long
def test_a_comparison_of_five_mechanisms(
    workplace: pathlib.Path, capfd: pytest.CaptureFixture[str]
) -> None:
    runs = workplace / "out" / "runs_docstrings" / "returning"
    status, out, err = _call(capfd, "--repetitions=2", "--cache_dir=cache", "--format=json")
    assert status == 0, err
    rows = json.loads(out)["rows"]
    assert len(rows) == 10
    by_row = {row["row"]: row for row in rows}
    best = by_row["epsilon 8, BandMF"]
    assert best["ours"] == pytest.approx(100.0 * statistics.fmean([0.261, 0.262]))
    # Printed numbers are of another data set.
    assert best["paper"] is None
    assert "the paper, on StackOverflow: 24.88" in best["reason"]
    report = (workplace / "out" / "report.md").read_text()
    # The half-width for two runs is 12.7 times half of their difference: 0.6 %, and
    # configurations are 2 % apart.
    assert "With non-overlapping intervals: BandMF above Multi-epoch MF, BandMF above" in report
    assert "Single-epoch MF above DP-SGD." in report
    seconds = [
        json.loads((runs / f"{name}.json").read_text())["seconds"] for name, _ in _started(runs)
    ]
    assert f"20 runs, of {min(seconds) / 60.0:.1f} to {max(seconds) / 60.0:.1f} min" in report
    assert f", {sum(seconds) / 60.0:.0f} together" in report

    started = _started(runs)
    assert len(started) == 20
    # Repetition by repetition, so that a stop leaves as many of each.
    assert [name.rpartition("_")[2] for name, _ in started] == ["1"] * 10 + ["2"] * 10
    flags = dict(started)
    banded, single = flags["bandmf_epsilon_8_1"], flags["single_epoch_mf_epsilon_8_1"]
    assert (banded["clients_per_round"], banded["separation"]) == ("100", "25")
    assert (single["clients_per_round"], single["separation"]) == ("25", "100")
    # Where runs find their matrices, whatever their current directory.
    matrices = {
        name: mfa.checkpoints.load(of_name["checkpoint"]) for name, of_name in flags.items()
    }
    assert all(pathlib.Path(of_name["checkpoint"]).is_absolute() for of_name in flags.values())
    assert matrices["dp_sgd_epsilon_2_1"].mechanism == "identity"
    assert matrices["optimal_treeagg_epsilon_2_1"].mechanism == "tree"
    assert matrices["bandmf_epsilon_2_1"].strategy_bands() == 25
    assert matrices["single_epoch_mf_epsilon_2_1"].participation == SingleParticipation()
    multi_epoch = matrices["multi_epoch_mf_epsilon_2_1"]
    assert multi_epoch.participation == FixedEpochOrder(4, 25)
    # More noise, a smaller rate: DP-SGD has the largest error of those in which clients return.
    rates = {name: float(of_name["server_learning_rate"]) for name, of_name in flags.items()}
    assert rates["bandmf_epsilon_8_1"] == 1.5
    assert rates["dp_sgd_epsilon_8_1"] < rates["optimal_treeagg_epsilon_8_1"] <= 1.5
    assert rates["dp_sgd_epsilon_2_1"] < rates["dp_sgd_epsilon_8_1"]

    # Once more: nothing is run.
    status, again, err = _call(capfd, "--repetitions=2", "--cache_dir=cache", "--format=json")
    assert status == 0, err
    assert json.loads(again)["rows"] == rows
    assert len(_started(runs)) == 20


@pytest.mark.long
def test_sampled_configurations_have_the_bands_of_least_error(
    tmp_path: pathlib.Path, workspace: Workspace
) -> None:
    place, setting = TrainingPlace(tmp_path), configurations.RETURNING["docstrings"]
    by_name = {
        configuration.name: configuration
        for configuration in training_tables.figure_1b("docstrings")
    }
    banded = by_name["bandmf_amplified_epsilon_2"]
    choice = configurations.num_bands(banded, setting, workspace)
    alone = configurations.num_bands(by_name["dp_sgd_amplified_epsilon_2"], setting, workspace)
    assert 1 == alone.num_bands < choice.num_bands <= 25
    assert choice.effective_rmse < alone.effective_rmse
    variant = configurations.variant_of(banded, setting, place, workspace)
    flags = dict(flag[2:].split("=", 1) for flag in variant.flags)
    assert flags["sampling"] == "poisson"
    assert "separation" not in flags
    assert mfa.checkpoints.load(flags["checkpoint"]).strategy_bands() == choice.num_bands


def test_sampled_images_at_the_papers_size_have_momentum_but_for_dp_sgd(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = configurations.CENTRALISED["cifar10"]
    # 20 epochs, of which the fixed order takes one in every 100 rounds.
    assert setting.num_rounds * setting.clients_per_round == 20 * setting.population
    assert setting.separation * setting.clients_per_round == setting.population
    monkeypatch.setattr(configurations, "num_bands", lambda *_: BandChoice(8, 1.0, 1.0, 1.0))
    monkeypatch.setattr(configurations, "matrix_of", lambda *_: mfa.factorizations.identity(2000))
    definition = training_tables.figure_1a("cifar10")
    assert len({configuration.name for configuration in definition}) == len(definition) == 21
    for configuration in definition:
        variant = configurations.variant_of(
            configuration, setting, TrainingPlace(tmp_path, "cifar10"), Workspace()
        )
        mechanism = f"--mechanism={variant.mechanism}"
        options = config_of(cifar10.COMMAND, mechanism, *variant.flags)
        is_sgd = configuration.kind == configurations.AMPLIFIED_IDENTITY
        assert options["server_momentum"] == (0.0 if is_sgd else 0.95)
        if configuration.kind != configurations.MULTI_EPOCH_FIXED_ORDER:
            assert options["sampling"] == "poisson"
            # Errors are equal here, and so is how far a gradient moves the model in the end.
            moved = options["server_learning_rate"] / (1.0 - options["server_momentum"])
            assert moved == pytest.approx(2.0)


@dataclasses.dataclass(frozen=True)
class _Population:
    """The number of clients of a data set, without its data."""

    num_clients: int
    name: str = "a population"


_DEFINITIONS = (
    (training_tables.figure_1a, configurations.CENTRALISED),
    (training_tables.figure_1b, configurations.RETURNING),
    (training_tables.figure_5a, configurations.RETURNING),
    (training_tables.figure_11, configurations.RETURNING),
    (training_tables.denisov_figure_2, configurations.SINGLE_PASS),
    (training_tables.denisov_figure_3, configurations.SINGLE_PASS),
)


def _plan(variant: Variant, setting: configurations.Setting) -> Run | None:
    """What a run itself makes of its flags; None if it would have to search for its noise."""
    command = digits.COMMAND if setting.dataset == "digits" else run_stackoverflow.command()
    options = config_of(command, f"--mechanism={variant.mechanism}", *variant.flags)
    if options["sampling"] != "timers":
        return None
    data: Any = _Population(setting.population)
    return planned_runs.plan(options, data, RunDirectory("not written"), setting.separation)


@pytest.mark.short_cases(2)
@pytest.mark.parametrize(
    ("definition", "settings"), [pair for pair in _DEFINITIONS if "stackoverflow" in pair[1]]
)
def test_runs_take_the_flags_of_their_configurations_at_the_papers_size(
    definition: Callable[[str], tuple[configurations.Configuration, ...]],
    settings: Mapping[str, configurations.Setting],
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The matrices here cost nothing, and have bands as those that sampling needs."""
    setting = settings["stackoverflow"]
    choice = BandChoice(8, 1.0, 1.0, 1.0)
    monkeypatch.setattr(configurations, "num_bands", lambda *_: choice)
    monkeypatch.setattr(
        configurations, "matrix_of", lambda *_: mfa.factorizations.identity(setting.num_rounds)
    )
    monkeypatch.setattr(
        mfa.catalogue.Entry,
        "build",
        lambda *_, **__: mfa.factorizations.identity(setting.num_rounds),
    )
    for configuration in definition("stackoverflow"):
        place = TrainingPlace(tmp_path, "stackoverflow", 1, "10.0.0.5:8000")
        variant = configurations.variant_of(configuration, setting, place, Workspace())
        plan = _plan(variant, setting)
        if plan is None:
            continue
        if configuration.kind == configurations.MULTI_EPOCH_FIXED_ORDER:
            assert plan.noise_multiplier > 0.0
        elif configuration.paper_noise_multiplier is None:
            found = mfa.accounting.epsilon(plan.noise_multiplier, setting.delta)
            assert found == pytest.approx(configuration.epsilon, rel=1e-4)
        else:
            assert plan.noise_multiplier == configuration.paper_noise_multiplier
        assert plan.config["workers"] == "10.0.0.5:8000"
        if "167" in configuration.label:
            assert plan.config["clients_per_round"] == 167


def _slope_by_definition(
    best: Mapping[tuple[float, str], float], rmse: Mapping[str, float]
) -> float:
    """The slope of log(rate) by log(RMSE times noise multiplier over clients), by least squares."""
    errors = [
        rmse[label] * mfa.accounting.noise_multiplier(epsilon, 1e-4) / 100.0
        for epsilon, label in best
    ]
    covariance = np.cov(np.log(errors), np.log(list(best.values())))
    return float(covariance[0, 1] / covariance[0, 0])


@pytest.mark.long_cases(1)
@pytest.mark.long
@pytest.mark.parametrize("spread", [pytest.param(0.0, marks=pytest.mark.long), 0.02])
def test_the_best_rates_are_fitted_to_both_errors(
    spread: float,
    workplace: pathlib.Path,
    workspace: Workspace,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A stand-in whose accuracy is largest near a rate, and in each repetition near another."""
    peak = "accuracy -= 0.2 * abs(math.log(float(flags['server_learning_rate']) / 0.7))"
    wave = f"accuracy += {spread} * (-1) ** (int(repetition) + len(configuration))"
    (workplace / "stackoverflow_nwp" / "run_stackoverflow.py").write_text(
        _RUN.replace("import json", "import math, json").replace(
            '(directory / "metrics.csv")', f'{peak}\n{wave}\n(directory / "metrics.csv")'
        )
    )

    def rows_of(num_repetitions: int) -> dict[tuple[str, str], dict[str, Any]]:
        status, out, err = _call(
            capfd,
            "--only=bandmf-figure-11",
            f"--repetitions={num_repetitions}",
            f"--cache_dir={workspace.cache_directory}",
            "--format=json",
        )
        assert status == 0, err
        return {(row["row"], row["quantity"]): row for row in json.loads(out)["rows"]}

    rows = rows_of(2)
    setting = configurations.RETURNING["docstrings"]
    definition = training_tables.figure_11("docstrings")

    def accuracy(
        configuration: configurations.Configuration, rate: float, repetition: int
    ) -> float:
        order = {"DP-SGD": 0, "Optimal TreeAgg": 2, "BandMF": 4}
        # Rates are handed over with four digits.
        return (
            0.1
            + 0.02 * order[configuration.label]
            + 0.001 * repetition
            + 0.01 * configuration.epsilon
            - 0.2 * abs(np.log(float(f"{rate:.4g}") / 0.7))
            + spread * (-1) ** (repetition + len(configuration.name))
        )

    by_mechanism: dict[tuple[float, str], dict[float, list[float]]] = {}
    for configuration in definition:
        rate = configurations.learning_rate(configuration, setting, workspace)
        of_rate = [accuracy(configuration, rate, repetition) for repetition in (1, 2)]
        by_mechanism.setdefault((configuration.epsilon, configuration.label), {})[rate] = of_rate
    report = (workplace / "out" / "report.md").read_text()
    assert "is multiplied by 0.588, 1, 1.7, 2.89." in report
    best: dict[tuple[float, str], float] = {}
    intervals: dict[tuple[float, str], tuple[float, float]] = {}
    for (epsilon, label), grid in by_mechanism.items():
        row = f"epsilon {epsilon:g}, {label}"
        best[epsilon, label] = max(grid, key=lambda rate: sum(grid[rate]))
        found = rows[row, "best server learning rate of its grid"]
        assert found["ours"] == pytest.approx(best[epsilon, label])
        # Student's t of two values: 12.706 times half of their difference.
        means = {rate: statistics.fmean(of_rate) for rate, of_rate in grid.items()}
        half = {rate: 6.3531 * abs(one - two) for rate, (one, two) in grid.items()}
        chosen = best[epsilon, label]
        tested = rows[row, "test accuracy, %, 2 runs"]
        # The stand-in says the same of test data.
        intervals[epsilon, label] = (means[chosen], half[chosen])
        assert tested["ours"] == pytest.approx(100.0 * means[chosen])
        near = [
            f"{rate:.3g}"
            for rate in sorted(grid)
            if rate != chosen and means[chosen] - means[rate] <= half[chosen] + half[rate]
        ]
        # Where runs are far from each other, intervals are wide.
        assert near or not spread
        expected = f"overlap with those of {', '.join(near)}" if near else "are apart from"
        assert expected in found["reason"]
        assert ("a larger one may be better" in found["reason"]) == (chosen == max(grid))
        assert ("a smaller one may be better" in found["reason"]) == (chosen == min(grid))
    for epsilon in (2.0, 8.0):
        _, _, after = report.partition(f"Epsilon {epsilon:g}, test accuracy of each at its best")
        mean, half_width = intervals[epsilon, "BandMF"]
        of_sgd, half_width_of_sgd = intervals[epsilon, "DP-SGD"]
        is_above = mean - half_width > of_sgd + half_width_of_sgd
        assert is_above == (not spread)
        assert ("BandMF above DP-SGD" in after.partition("\n")[0]) == is_above
    matrices = {
        "DP-SGD": mfa.factorizations.identity(100),
        "Optimal TreeAgg": mfa.factorizations.tree_aggregation(100, "full"),
        "BandMF": mfa.factorizations.banded(
            mfa.workloads.prefix_sum(100),
            25,
            participation=FixedEpochOrder(4, 25),
            relative_gap=5e-4,
        ),
    }
    for quantity, workload in (("prefix sums", np.tri(100)), ("updates", np.eye(100))):
        name = f"slope of log(best server learning rate) by log(effective RMSE of {quantity})"
        of_slope = rows["all mechanisms and targets", name]
        rmse = {label: each.rmse(workload, MinSeparation(25)) for label, each in matrices.items()}
        assert of_slope["ours"] == pytest.approx(_slope_by_definition(best, rmse), rel=1e-3)
    for (_, quantity), single in rows_of(1).items():
        assert "±" not in (single["reason"] or "")
        if quantity == "best server learning rate of its grid":
            assert "of single runs, which have no interval" in single["reason"]


@pytest.mark.long
def test_noise_for_a_fixed_order_is_said_to_be_weaker_under_timers(
    workplace: pathlib.Path, workspace: Workspace, capfd: pytest.CaptureFixture[str]
) -> None:
    status, _, err = _call(
        capfd,
        "--only=bandmf-figure-1b",
        "--repetitions=1",
        f"--cache_dir={workspace.cache_directory}",
    )
    assert status == 0, err
    report = (workplace / "out" / "report.md").read_text()
    assert "their guarantee is weaker" in report
    # Its other epsilon does not make the comparison of the others unfair.
    assert "not fair" not in report
    status, _, err = _call(
        capfd,
        "--only=bandmf-figure-5a",
        "--repetitions=1",
        f"--cache_dir={workspace.cache_directory}",
    )
    assert status == 0, err
    report = (workplace / "out" / "report.md").read_text()
    assert "their guarantee is weaker" not in report.partition("## bandmf-figure-5a")[2]
