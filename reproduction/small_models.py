"""Compares mechanisms by test accuracy with models that are small enough for a hundred runs.

The papers train on data that has to be downloaded, for days. A linear model on fixed features is
trained by ``mfa.Aggregator`` in seconds, so that there are runs enough for narrow intervals. The
tasks are in ``fashion_mnist`` and ``shakespeare``.
"""

import dataclasses
import functools
import json
import math
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np

import mf_aggregators as mfa
from mf_aggregators import accounting, atomic_files, inputs, participation, planning
from mf_aggregators.factorizations import Factorization
from mf_aggregators.participation import (
    MinSeparation,
    Participation,
    PoissonSampling,
)
from mf_aggregators.privacy.ledgers import Ledger
from reproduction import best_bands
from reproduction.experiment import (
    BANDMF,
    Drawing,
    Experiment,
    Outcome,
    Row,
    Workspace,
    for_drawing,
    with_interval,
)
from simulations.comparison import run_comparisons

_CLIP_NORM = 1.0
_MOMENTUM = 0.9
# The share of rounds at the end over which the learning rate falls to zero.
_COOLDOWN = 0.4
# Learning rates are tuned for BandMF at this epsilon.
_TUNED_EPSILON = 8.0
# The slope of BandMF App. I: log(best learning rate) over log(effective RMSE).
_RATE_SLOPE = -0.95
_EPSILONS = (1.0, 2.0, 4.0, 8.0)
_BUFFERS = 5

_IDENTITY, _TREE, _BLT, _BANDED = "DP-SGD", "Optimal TreeAgg", "BLT", "BandMF"
_SAMPLED_IDENTITY, _SAMPLED_BANDED = "DP-SGD, amplified", "BandMF, amplified"
_MECHANISMS = (_IDENTITY, _TREE, _BLT, _BANDED, _SAMPLED_IDENTITY, _SAMPLED_BANDED)
_NO_NOISE = "without noise"
# Pairs of mechanisms of which the papers find the first more accurate: in BandMF Fig. 5 (a) and
# Denisov et al. Fig. 2 without amplification, in BandMF Fig. 1 with amplification.
_PAPERS_ORDER = (
    (_TREE, _IDENTITY),
    (_BANDED, _IDENTITY),
    (_BANDED, _TREE),
    (_SAMPLED_BANDED, _SAMPLED_IDENTITY),
    (_SAMPLED_BANDED, _BANDED),
)


class Clients(Protocol):
    """The clients of a task, with the data that its models are evaluated on."""

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the model's weights: inputs, classes."""

    @property
    def share_of_most_frequent(self) -> float:
        """The test accuracy of always saying the most frequent class of training data."""

    def updates(self, weights: np.ndarray, cohort: np.ndarray) -> np.ndarray:
        """Returns the (m, inputs, classes) float32 gradients of the clients at (m,) places."""

    def heldout_accuracy(self, weights: np.ndarray) -> float:
        """Returns the accuracy that learning rates are chosen by."""

    def test_accuracy(self, weights: np.ndarray) -> float:
        """Returns the accuracy on test data, which chooses nothing."""


@dataclasses.dataclass(frozen=True)
class Task:
    """Task for a small model: a data set, its linear model and how it is trained.

    Attributes:
      name: The data set's name, as ``--dataset`` spells it.
      client: A word for a client, as image or role.
      population: The number of clients, a multiple of the cohort.
      cohort: Clients of a round.
      epochs: How often each client takes part, always at the same distance in rounds.
      delta: Of the guarantee.
      tuned_rate: The server's learning rate for BandMF at epsilon 8, the best of a grid on held-out
        data.
      model: A noun phrase for readers that says which model is trained.
      public_data: For statements: what was not protected.
      load: Reads the clients; a ValueError says what to do without them.
    """

    name: str
    client: str
    population: int
    cohort: int
    epochs: int
    delta: float
    tuned_rate: float
    model: str
    public_data: str
    load: Callable[[], Clients]

    @property
    def schema(self) -> MinSeparation:
        """The participation schema: each client once an epoch, in the same order."""
        return MinSeparation(self.population // self.cohort, self.epochs)

    @property
    def num_rounds(self) -> int:
        """The number of rounds of a run."""
        return self.schema.separation * self.epochs


def experiment(task: Task, title: str) -> Experiment:
    """Returns the experiment that trains and compares all mechanisms on a task.

    Args:
      task: The task, whose name is the experiment's too.
      title: What the experiment shows, in one line.
    """
    source = f"{BANDMF}, Figs. 1 and 5 (a); Denisov et al., Fig. 2"
    run = functools.partial(compare, task)
    return Experiment(task.name, source, title, run, {task.name: _EPSILONS})


def residuals(scores: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Returns the gradients of examples' cross-entropies with respect to the classes' scores.

    Args:
      scores: (..., c) floats.
      labels: (...) integers below c.

    Returns:
      (..., c), of the dtype of the scores: the softmax, less one at the label.
    """
    found = np.exp(scores - np.max(scores, axis=-1, keepdims=True))
    found /= np.sum(found, axis=-1, keepdims=True)
    places = labels[..., np.newaxis]
    np.put_along_axis(found, places, np.take_along_axis(found, places, axis=-1) - 1, axis=-1)
    return found


@dataclasses.dataclass(frozen=True)
class _Configuration:
    """One mechanism at one privacy target, of those that are compared.

    Attributes:
      label: One of ``_MECHANISMS``, or ``_NO_NOISE``.
      epsilon: The target at the task's delta; infinite without noise.
      mechanism: The mechanism of its runs, which their guarantee is about.
      effective_rmse: BandMF Eq. 11: RMSE times noise multiplier over clients per round.
    """

    label: str
    epsilon: float
    mechanism: mfa.Mechanism
    effective_rmse: float

    @property
    def is_private(self) -> bool:
        """Whether the configuration adds noise."""
        return self.mechanism.noise_multiplier > 0.0

    def directory(self, parent: pathlib.Path) -> pathlib.Path:
        """Returns the directory of the configuration's runs."""
        words = "".join(letter if letter.isalnum() else " " for letter in self.label.lower())
        epsilon = f"_epsilon_{self.epsilon:g}" if self.is_private else ""
        return parent / f"{'_'.join(words.split())}{epsilon}"


def _configuration(task: Task, label: str, epsilon: float, workspace: Workspace) -> _Configuration:
    schema: Participation = task.schema
    matrix: Factorization
    if label in (_SAMPLED_IDENTITY, _SAMPLED_BANDED):
        is_banded = label == _SAMPLED_BANDED
        choice = best_bands.best(
            best_bands.compare(
                epsilon,
                task.delta,
                num_rounds=task.num_rounds,
                population=task.population,
                clients_per_round=task.cohort,
                candidates=planning.powers_of_two(task.schema.separation) if is_banded else [1],
                cache_directory=workspace.cache_directory,
            )
        )
        schema = PoissonSampling(task.num_rounds, choice.num_bands, task.population, task.cohort)
        # For DP-SGD there is one band, and this matrix is the identity.
        matrix = best_bands.banded_matrix(
            task.num_rounds, choice.num_bands, workspace.cache_directory
        )
        error = choice.effective_rmse
    else:
        matrix = _matrix(task, label, workspace)
        multiplier = accounting.noise_multiplier(epsilon, task.delta)
        error = matrix.rmse(task.num_rounds, task.schema) * multiplier / task.cohort
    mechanism = mfa.calibrate(matrix, schema, epsilon=epsilon, delta=task.delta)
    return _Configuration(label, epsilon, mechanism, error)


def _matrix(task: Task, label: str, workspace: Workspace) -> Factorization:
    if label == _IDENTITY:
        return mfa.factorizations.identity(task.num_rounds)
    if label == _TREE:
        return mfa.factorizations.tree_aggregation(task.num_rounds, "full")
    if label == _BLT:
        return mfa.factorizations.blt(task.num_rounds, _BUFFERS, task.schema)
    return workspace.banded(task.num_rounds, task.schema.separation, task.schema)


def _without_noise(task: Task) -> _Configuration:
    """Returns the configuration that trains without noise, to compare private ones with."""
    matrix = mfa.factorizations.identity(task.num_rounds)
    return _Configuration(_NO_NOISE, math.inf, mfa.Mechanism(matrix, task.schema, 0.0), 0.0)


def _learning_rate(task: Task, error: float, tuned_error: float) -> float:
    """Returns a configuration's learning rate, by BandMF's power law, at most the tuned rate."""
    return task.tuned_rate * (max(error, tuned_error) / tuned_error) ** _RATE_SLOPE


def _in_order(task: Task, repetition: int) -> Callable[[int], np.ndarray]:
    """Returns a function from rounds to cohorts, in a random order that each epoch repeats."""
    order = np.random.default_rng(repetition).permutation(task.population)

    def cohort(i: int) -> np.ndarray:
        first = i % task.schema.separation * task.cohort
        return order[first : first + task.cohort]

    return cohort


def _train(
    task: Task, configuration: _Configuration, rate: float, repetition: int, clients: Clients
) -> dict[str, object]:
    """Trains a model once; returns its accuracies, and the statement of the observed run."""
    start = time.process_time()
    mechanism = configuration.mechanism
    weights = np.zeros(clients.shape, np.float32)
    momentum = np.zeros_like(weights)
    aggregator = mfa.Aggregator(
        mechanism,
        _CLIP_NORM,
        task.cohort,
        template=weights,
        allow_no_noise=not configuration.is_private,
    )
    state = aggregator.initialize()
    rounds_of: list[list[int]] = [[] for _ in range(task.population)]
    sampler = None
    if mechanism.sampling is not None:
        sampler = mechanism.sampling.sampler(participation.secret_seed())
    cohort_of = _in_order(task, repetition) if sampler is None else sampler.draw
    for i in range(task.num_rounds):
        cohort = cohort_of(i)
        for client in cohort:
            rounds_of[client].append(i)
        state, released = aggregator.next(state, clients.updates(weights, cohort))
        momentum = _MOMENTUM * momentum + released
        left = (task.num_rounds - i) / (_COOLDOWN * task.num_rounds)
        weights = weights - np.float32(rate * min(1.0, left)) * momentum
    result: dict[str, object] = {
        "heldout_accuracy": clients.heldout_accuracy(weights),
        "test_accuracy": clients.test_accuracy(weights),
        "share_of_most_frequent": clients.share_of_most_frequent,
        "processor_seconds": time.process_time() - start,
    }
    if configuration.is_private:
        digits = len(str(task.population))
        ledger = Ledger(
            tuple(f"{task.client}-{place:0{digits}}" for place in range(task.population)),
            tuple(np.asarray(rounds, np.int64) for rounds in rounds_of),
            task.num_rounds,
            mechanism.sampling,
        )
        result["privacy"] = aggregator.statement(
            ledger,
            population=task.population,
            public_data=task.public_data,
            enforcement=f"The program that trains chooses the {task.client}s of each round.",
            state=state,
            delta=task.delta,
            sampling_seed=None if sampler is None else sampler.seed,
            simulation=f"Parts of a data set stand for {task.client}s on one machine.",
        ).to_dict()
    return result


@dataclasses.dataclass(frozen=True)
class _Runs:
    """The results of a configuration's runs.

    Attributes:
      configuration: The configuration.
      accuracies: (repetitions,) float64: test accuracies in percent.
      processor_seconds: The processor time of each run's training.
      epsilons: The epsilon of each run under its observed participation; none without noise.
    """

    configuration: _Configuration
    accuracies: np.ndarray
    processor_seconds: tuple[float, ...]
    epsilons: tuple[float, ...]

    @property
    def label(self) -> str:
        """The name of the mechanism of these runs."""
        return " ".join(reversed(self.configuration.label.split(", ")))

    @property
    def mean(self) -> float:
        """The mean test accuracy."""
        return float(np.mean(self.accuracies))

    @property
    def half_width(self) -> float | None:
        """Half the width of Student's 95 % interval around the mean; None for one run."""
        if len(self.accuracies) < 2:
            return None
        return float(run_comparisons.half_widths(self.accuracies))

    def said(self) -> str:
        """Returns the mean accuracy with its 95 % interval, as text."""
        return with_interval(self.mean, self.half_width)

    def is_above(self, other: "_Runs") -> bool:
        """Whether the interval of these runs is above another's, without overlap."""
        half, others = self.half_width, other.half_width
        return half is not None and others is not None and self.mean - half > other.mean + others


def _result(
    task: Task,
    configuration: _Configuration,
    rate: float,
    repetition: int,
    parent: pathlib.Path,
    clients: Callable[[], Clients],
) -> Mapping[str, object]:
    """Returns the result of a run; trains the run if its file is missing."""
    directory = configuration.directory(parent) / f"run_{repetition}"
    path = directory / "result.json"
    asked = {"learning_rate": rate, "noise": configuration.mechanism.noise_multiplier}
    if path.is_file():
        found = inputs.part(inputs.parsed_json(path.read_text(encoding="utf-8")), dict)
        if found["asked"] == asked:
            return found
    result = {**_train(task, configuration, rate, repetition, clients()), "asked": asked}
    directory.mkdir(parents=True, exist_ok=True)
    privacy = result.pop("privacy", None)
    if privacy is not None:
        result["epsilon"] = float(inputs.part(privacy, dict)["headline"]["epsilon"])
        atomic_files.write(directory / "privacy.json", json.dumps(privacy, indent=1))
    atomic_files.write(path, json.dumps(result))
    return result


def compare(task: Task, workspace: Workspace) -> Outcome:
    """Trains all mechanisms at the chosen targets, and compares their test accuracies.

    Args:
      task: The task that models are trained on.
      workspace: Where matrices and runs are stored.

    Returns:
      A row for each mechanism and target and two to compare with, the order that intervals support,
      and accuracies over epsilon.

    Raises:
      ValueError: If there is no directory for runs, or the data cannot be read.
    """
    place = workspace.training
    if place is None:
        raise ValueError("a training comparison needs a directory for its runs.")
    clients = functools.cache(task.load)
    tuned = _configuration(task, _BANDED, _TUNED_EPSILON, workspace).effective_rmse

    def results_of(configurations: Sequence[_Configuration]) -> list[list[Mapping[str, object]]]:
        found: list[list[Mapping[str, object]]] = [[] for _ in configurations]
        for repetition in range(1, place.repetitions + 1):
            for configuration, results in zip(configurations, found, strict=True):
                rate = _learning_rate(task, configuration.effective_rmse, tuned)
                results.append(
                    _result(task, configuration, rate, repetition, place.directory, clients)
                )
        return found

    by_target: dict[float, list[_Runs]] = {}
    for epsilon in _EPSILONS if place.targets is None else place.targets:
        private = [_configuration(task, label, epsilon, workspace) for label in _MECHANISMS]
        by_target[epsilon] = list(map(_runs, private, results_of(private)))
    without = _without_noise(task)
    (of_noiseless,) = results_of([without])
    noiseless = _runs(without, of_noiseless)
    every = [runs for of_target in by_target.values() for runs in of_target]
    return Outcome(
        (
            *map(_row, every),
            _row(noiseless),
            Row(
                "the most frequent class of training data, always",
                "test accuracy, %",
                None,
                100.0 * inputs.part(of_noiseless[0], float, "share_of_most_frequent"),
            ),
        ),
        _drawing(task, every, noiseless),
        (
            *(_order(epsilon, of_target) for epsilon, of_target in by_target.items()),
            _about(task, every),
        ),
    )


def _runs(configuration: _Configuration, results: Sequence[Mapping[str, object]]) -> _Runs:
    return _Runs(
        configuration,
        np.array([100.0 * inputs.part(each, float, "test_accuracy") for each in results]),
        tuple(inputs.part(each, float, "processor_seconds") for each in results),
        tuple(inputs.part(each, float, "epsilon") for each in results if configuration.is_private),
    )


def _row(runs: _Runs) -> Row:
    epsilon = f"epsilon {runs.configuration.epsilon:g}, " if runs.epsilons else ""
    return Row(
        f"{epsilon}{runs.configuration.label}",
        f"test accuracy, %, {len(runs.accuracies)} runs",
        None,
        runs.mean,
        runs.said(),
    )


def _order(epsilon: float, runs: Sequence[_Runs]) -> str:
    """Returns a sentence on the order of mechanisms that intervals support."""
    in_order = sorted(runs, key=lambda each: -each.mean)
    said = []
    for each in in_order:
        lower = [other.label for other in in_order if each.is_above(other)]
        if lower:
            said.append(f"{each.label} is above {', '.join(lower)}")
    if not said:
        return f"Epsilon {epsilon:g}. Intervals of all mechanisms overlap, and no order is claimed."
    return (
        f"Epsilon {epsilon:g}. By intervals that do not overlap: {'; '.join(said)}. "
        f"{_papers_order(runs)}"
    )


def _papers_order(runs: Sequence[_Runs]) -> str:
    """Returns a sentence on which of the papers' orders of two mechanisms our runs confirm."""
    of_label = {each.configuration.label: each for each in runs}
    found: dict[str, list[str]] = {"agree": [], "disagree": [], "cannot be told apart": []}
    for higher, lower in _PAPERS_ORDER:
        if higher in of_label and lower in of_label:
            one, other = of_label[higher], of_label[lower]
            verdict = "disagree" if other.is_above(one) else "cannot be told apart"
            verdict = "agree" if one.is_above(other) else verdict
            found[verdict].append(f"{one.label} above {other.label}")
    return (
        "Of the papers' order, "
        + "; ".join(f"{verdict}: {', '.join(pairs) or 'none'}" for verdict, pairs in found.items())
        + "."
    )


def _about(task: Task, every: Sequence[_Runs]) -> str:
    seconds = [each for runs in every for each in runs.processor_seconds]
    epsilons = [each / runs.configuration.epsilon for runs in every for each in runs.epsilons]
    return (
        f"{task.num_rounds} rounds of {task.cohort} of {task.population} {task.client}s at delta "
        f"{task.delta:g}: {task.epochs} epochs, or {task.client}s drawn at random where amplified. "
        f"{task.model}, clip norm 1, momentum {_MOMENTUM:g}. The server's learning rate was tuned "
        f"for BandMF at epsilon {_TUNED_EPSILON:g} ({task.tuned_rate:g}, by held-out data); others "
        "have that rate times the power of the ratio of effective RMSEs that BandMF App. I fits on "
        "StackOverflow, at most that rate. Noise and sampled cohorts come from secret seeds. Each "
        f"run's privacy.json states an epsilon of at most {max(epsilons):.6g} times what was asked "
        f"for. {len(seconds)} private runs, of {min(seconds):.1f} to {max(seconds):.1f} seconds."
    )


def _drawing(task: Task, every: Sequence[_Runs], noiseless: _Runs) -> Drawing:
    of_label: dict[str, list[_Runs]] = {}
    for runs in every:
        of_label.setdefault(runs.configuration.label, []).append(runs)
    return Drawing(
        "accuracies by epsilon",
        {
            "data_set": task.name,
            "without_noise": noiseless.mean,
            "mechanisms": [
                {
                    "label": label,
                    "epsilons": [each.configuration.epsilon for each in own],
                    "means": for_drawing([each.mean for each in own]),
                    "half_widths": [each.half_width for each in own],
                }
                for label, own in of_label.items()
            ],
        },
    )
