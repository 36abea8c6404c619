"""Metrics of the rounds of a run: what is measured or released, where it goes, and its figure."""

import csv
import math
import os
import sys
import types
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from mf_aggregators import atomic_files, figures, private_metrics
from mf_aggregators.factorizations import clip_drift
from mf_aggregators.progress_bars import ProgressBar
from simulations.runs import run_directory, run_figures
from simulations.runs.planned_runs import Run
from simulations.runs.round_records import MetricsLog
from simulations.runs.run_directory import RunDirectory
from simulations.runs.run_statements import PrivacyBudget, RunStatements
from simulations.runs.training_loop import Round
from simulations.training import private_aggregation
from simulations.training.federated_task import HELDOUT, FederatedTask

_MEASURED = (
    "update_norm",
    "max_update_norm",
    "clipped_fraction",
    "zeroed_fraction",
    "non_finite_updates",
    "released_norm",
)
# The releases on a clip norm that adapts; empty for a constant one.
_OF_ADAPTIVE_CLIP = ("clip_norm", "unclipped_fraction")
# The columns of metrics that are released with noise, and their names as clients measure them.
_OF_PRIVATE_METRICS = types.MappingProxyType(
    {
        "train_loss": private_metrics.LOSS,
        "train_accuracy": private_metrics.ACCURACY,
        "examples_per_client": private_metrics.EXAMPLES,
        "num_updates": private_metrics.COUNT,
    }
)
_STDDEV = "_stddev"
# In a figure, released metrics are means of this share of all rounds.
_WINDOWS_OF_A_RUN = 20
_OF_DEVICES = ("eligible_clients", "available_clients", "selected_clients", "attempts")
_OF_EPSILON = ("epsilon_spent", "epsilon_planned")
_COLUMNS = (
    *("train_loss", "train_accuracy", "heldout_loss", "heldout_accuracy"),
    *(*_MEASURED, "noise_norm", *_OF_ADAPTIVE_CLIP, "num_updates", "clients_per_round"),
    *(*_OF_DEVICES, *_OF_EPSILON, "seconds"),
)
# Columns that follow from clients' data only by releases with noise. The seconds of a round are
# left out: they depend on the data as well.
_COLUMNS_OF_PRIVATE_METRICS = (
    *("train_loss", f"train_loss{_STDDEV}", "train_accuracy", f"train_accuracy{_STDDEV}"),
    *("heldout_loss", "heldout_accuracy", "clipped_fraction", f"clipped_fraction{_STDDEV}"),
    *("examples_per_client", f"examples_per_client{_STDDEV}", "released_norm", "noise_norm"),
    *(*_OF_ADAPTIVE_CLIP, f"unclipped_fraction{_STDDEV}", "num_updates", f"num_updates{_STDDEV}"),
    *("clients_per_round", *_OF_DEVICES, *_OF_EPSILON),
)


class MetricsOutputs:
    """Where the metrics of rounds go: ``metrics.csv``, TensorBoard's files and a progress bar."""

    def __init__(
        self, directory: RunDirectory, num_rounds: int, finished: int, *, is_private: bool
    ) -> None:
        columns = _COLUMNS_OF_PRIVATE_METRICS if is_private else _COLUMNS
        self._log = MetricsLog(directory, columns, finished)
        self._writer = tf.summary.create_file_writer(os.fspath(directory.tensorboard))
        self._bar = ProgressBar(
            total=num_rounds, initial=finished, desc="training", unit="round", file=sys.stderr
        )

    def append(self, number: int, row: Mapping[str, float | int]) -> None:
        """Writes the row of a round, counted from 1."""
        if "heldout_accuracy" in row:
            accuracy = f"accuracy {100 * row['heldout_accuracy']:.2f} %"
            self._bar.set_postfix_str(accuracy, refresh=False)
        self._log.append(number, row)
        with self._writer.as_default(step=number):
            for name, value in row.items():
                if math.isfinite(value):
                    tf.summary.scalar(name, value)
        self._bar.update()

    def close(self) -> None:
        """Closes the bar and TensorBoard's file."""
        self._bar.close()
        self._writer.close()


def evaluated(
    process: tff.learning.templates.LearningProcess, task: FederatedTask, state: Any, split: str
) -> Mapping[str, float]:
    """Returns loss and accuracy of the model of a state on a split of the task."""
    return task.evaluate(process.get_model_weights(state).trainable, split)


class RoundMetrics:
    """The metrics of finished rounds, as rows of ``metrics.csv``."""

    def __init__(
        self,
        run: Run,
        task: FederatedTask,
        process: tff.learning.templates.LearningProcess,
        statements: RunStatements,
    ) -> None:
        self._run = run
        self._task = task
        self._process = process
        self._statements = statements
        split, mechanism = run.noise_split, run.mechanism
        # If the clip norm adapts, this is in units of clip norms.
        self._noise_norms = private_aggregation.expected_noise_norm(
            mechanism.factorization,
            mechanism.schema,
            mechanism.noise_multiplier if split is None else split.update_noise_multiplier,
            float(run.config.clip_norm) if run.config.adaptive_clip is None else 1.0,
            run.config.cohort,
            task.num_parameters,
        )
        self._stddevs = _stddevs_of_metrics(run)
        self._budget = PrivacyBudget(mechanism, run.config.delta)

    def of(self, finished: Round) -> dict[str, float | int]:
        """Returns the metrics of a round."""
        measured = finished.metrics["aggregator"]
        clip = private_aggregation.released_clip(measured)
        # A constant norm has a fraction as well, where metrics are released.
        is_adaptive = self._run.config.adaptive_clip is not None
        row: dict[str, float | int] = {
            "noise_norm": float(self._noise_norms[finished.index])
            * (clip["clip_norm"] if is_adaptive else 1.0),
            "epsilon_spent": self._epsilon_spent(finished),
            "epsilon_planned": self._budget.planned.epsilon,
            "clients_per_round": self._run.config.cohort,
        }
        if is_adaptive:
            row.update({name: clip[name] for name in _OF_ADAPTIVE_CLIP})
        if self._run.private_metrics is None:
            row.update(self._measured(finished))
        else:
            row.update(self._released(finished))
        options, number = self._run.config, finished.index + 1
        if number % options.evaluate_every == 0 or number == options.num_rounds:
            values = evaluated(self._process, self._task, finished.state, HELDOUT)
            row.update(heldout_loss=values["loss"], heldout_accuracy=values["accuracy"])
        return row

    def _measured(self, finished: Round) -> dict[str, float | int]:
        """Measurements of clients, without noise."""
        measured = finished.metrics["aggregator"]
        row: dict[str, float | int] = {
            "eligible_clients": finished.num_eligible,
            "seconds": finished.seconds,
        }
        if finished.devices is not None:
            row.update(_of_devices(finished.devices))
        if self._run.config.secure_aggregation:
            return row
        row["released_norm"] = float(measured["released_norm"])
        # The number of updates that were summed; the sum is divided by another number.
        row["num_updates"] = int(measured["num_updates"])
        # In a round without clients TFF's metrics are 0, and mean nothing.
        if len(finished.ledger.cohorts[finished.index]):
            trained = finished.metrics["client_work"]["train"]
            row["train_loss"] = float(trained["loss"])
            row["train_accuracy"] = float(trained[self._task.accuracy])
            row.update({name: float(measured[name]) for name in _MEASURED if name in measured})
        return row

    def _released(self, finished: Round) -> dict[str, float | int]:
        """Releases with noise, and metrics that follow from no data."""
        measured = finished.metrics["aggregator"]
        found = private_aggregation.released_metrics(measured)
        cohort = self._run.config.cohort
        row: dict[str, float | int] = {"released_norm": float(measured["released_norm"])}
        for column, name in _OF_PRIVATE_METRICS.items():
            if name in found:
                row[column] = found[name]
        if private_metrics.COUNT in found:
            row["num_updates"] *= cohort
        else:
            # Who takes part is no secret where timers decide.
            row["num_updates"] = len(finished.ledger.cohorts[finished.index])
        if self._run.config.adaptive_clip is None:
            fraction = private_aggregation.released_clip(measured)["unclipped_fraction"]
            row["clipped_fraction"] = 1.0 - fraction
        for column, stddevs in self._stddevs.items():
            row[f"{column}{_STDDEV}"] = float(stddevs[finished.index])
        if finished.devices is not None:
            # Under timers, who might have taken part is no secret. Drawn clients have no devices.
            row["eligible_clients"] = finished.num_eligible
            row.update(_of_devices(finished.devices))
        return row

    def _epsilon_spent(self, finished: Round) -> float:
        """All rounds that were released count, also if the run went back to an older state."""
        broken = self._statements.after_round(finished.ledger)
        if broken is not None:
            return broken.stated.epsilon
        return self._budget.spent(finished.ledger.num_rounds)


def _of_devices(devices: Any) -> dict[str, float | int]:
    """The metrics of the devices that a round asked."""
    return {
        "available_clients": devices.num_available,
        "selected_clients": devices.num_selected,
        "attempts": devices.attempts,
    }


def _stddevs_of_metrics(run: Run) -> dict[str, np.ndarray]:
    """The standard deviations, (n,), of the noise in released metrics, by column of the mean."""
    metrics, split = run.private_metrics, run.noise_split
    if metrics is None:
        return {}
    assert split is not None
    mechanism, cohort = run.mechanism, run.config.cohort

    def of(stddev: float, scale: float) -> np.ndarray:
        return private_aggregation.expected_noise_norm(
            mechanism.factorization, mechanism.schema, stddev, scale, cohort, 1
        )

    ranges = {metric.name: metric.range for metric in metrics.metrics}
    found = {
        column: of(split.metric_stddev, ranges[name] * (cohort if column == "num_updates" else 1))
        for column, name in _OF_PRIVATE_METRICS.items()
        if name in ranges
    }
    of_clip = "clipped_fraction" if run.config.adaptive_clip is None else "unclipped_fraction"
    found[of_clip] = of(split.clipped_count_stddev, 1.0)
    return found


def draw_figure(run: Run, planned_epsilon: float) -> None:
    """Draws the figure of a run from the metrics in its directory."""
    config, mechanism, clip = run.config, run.mechanism, run.config.adaptive_clip
    levels = {
        "clients": ("clients per round", config.cohort),
        "epsilon": ("planned", planned_epsilon),
    }
    if clip is None:
        levels["L2 norm of updates"] = ("clip norm", float(config.clip_norm))
    else:
        levels["within the clip norm, %"] = ("target", 100.0 * clip.target_unclipped_quantile)
    figure = run_figures.draw(
        _rows(run.directory),
        f"{mechanism.factorization.mechanism if mechanism.noise_multiplier else 'no noise'}, "
        f"{config.num_rounds} rounds of {config.cohort} clients",
        levels,
        config.delta,
        max(1, config.num_rounds // _WINDOWS_OF_A_RUN) if config.private_metrics else None,
    )
    with atomic_files.writing(run.directory.path / run_directory.FIGURE_FILE) as file:
        figures.save(figure, file, "png")


def _rows(directory: RunDirectory) -> list[dict[str, str]]:
    """The rows of the metrics of a run."""
    with (directory.path / run_directory.METRICS_FILE).open(newline="") as file:
        return list(csv.DictReader(file))


def clip_norms(run: Run) -> dict[str, float] | None:
    """Returns the course of a clip norm and its cost: all of it follows from private releases.

    Returns:
      The ``first``, ``last``, ``smallest`` and ``largest`` norm of the rounds, the ``equivalent``
      constant norm with the same noise in running sums of updates, and the ``drift_cost``, what
      correlated noise lost by the drift (``factorizations.clip_drift``). None for a constant
      norm, before the first round, and where a round's row was lost.

    Raises:
      OSError: If the metrics cannot be read.
    """
    if run.config.adaptive_clip is None:
        return None
    norms = run_figures.column(_rows(run.directory), "clip_norm")
    if not len(norms) or not np.all(np.isfinite(norms)):
        return None
    drift = clip_drift.measure(run.mechanism.factorization, norms)
    return {
        "first": float(norms[0]),
        "last": float(norms[-1]),
        "smallest": float(np.min(norms)),
        "largest": float(np.max(norms)),
        "equivalent": drift.equivalent_norm,
        "drift_cost": drift.cost,
    }
