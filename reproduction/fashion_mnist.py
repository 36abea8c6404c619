"""Test accuracy on Fashion-MNIST by mechanism and epsilon: BandMF's and Denisov's figures on it.

The papers train on data that has to be downloaded, for days. Here a linear model on fixed features
of an image, the histograms of its gradients, is trained by ``mfa.Aggregator`` in a second a hundred
rounds, so that there are runs enough for narrow intervals. Each image is a client.
"""

import dataclasses
import functools
import json
import math
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import scipy.stats

import mf_aggregators as mfa
from mf_aggregators import accounting, atomic_files, participation, planning, validation
from mf_aggregators.factorizations import Factorization
from mf_aggregators.participation import (
    MinSeparation,
    Participation,
    PoissonSampling,
    Sampler,
)
from mf_aggregators.planning import band_choice
from mf_aggregators.privacy.ledgers import Ledger
from mf_aggregators.privacy.statement import RunFacts
from reproduction import matrices
from reproduction.banded_errors import PAPER
from reproduction.experiment import Drawing, Experiment, Outcome, Row, Workspace, for_drawing
from simulations.examples.fashion_mnist_classification import data
from simulations.examples.labelled_images import Images

DATASET = "fashion-mnist"

# Two epochs: an image comes back 120 rounds later, and never again.
_NUM_ROUNDS, _COHORT, _POPULATION = 240, 500, 60_000
_SCHEMA = MinSeparation(_POPULATION // _COHORT, 2)
# Below 60,000^-1.1 = 5.56e-6, which the package correlated-noise-mechanism has on these images.
_DELTA = 5.5e-6
_CLIP_NORM = 1.0
_MOMENTUM = 0.9
# The share of rounds at the end over which the learning rate falls to zero.
_COOLDOWN = 0.4
# For BandMF at epsilon 8, the best of 5, 8.5, 14.5, 24.6 and 41.8 on held-out images, by three runs
# of each.
_TUNED_RATE = 24.6
# BandMF App. I: the logarithm of the best rate falls by this times that of the effective RMSE.
_RATE_SLOPE = -0.95
_EPSILONS = (1.0, 2.0, 4.0, 8.0)
_BUFFERS = 5
_EVALUATE_EVERY = 20
_CONFIDENCE = 0.95
# The first test images, which choose the learning rate; accuracies are of the others.
_NUM_HELDOUT = 2_000

# Of the features: the pixels of a cell's side, the directions that gradients are told apart by, and
# the norm of an image's features.
_CELL, _DIRECTIONS, _NORM = 7, 8, 3.0

_IDENTITY, _TREE, _BLT, _BANDED = "DP-SGD", "Optimal TreeAgg", "BLT", "BandMF"
_SAMPLED_IDENTITY, _SAMPLED_BANDED = "DP-SGD, amplified", "BandMF, amplified"
_MECHANISMS = (_IDENTITY, _TREE, _BLT, _BANDED, _SAMPLED_IDENTITY, _SAMPLED_BANDED)


def features(pixels: np.ndarray) -> np.ndarray:
    """Returns the fixed features of images: histograms of oriented gradients, and brightness.

    Args:
      pixels: (m, 28, 28, 1) uint8.

    Returns:
      (m, 145) float32: for each cell of 7 x 7 pixels the square roots of the gradients' magnitudes
      in eight directions (Dalal and Triggs, 2005) and of its brightness, all of an image scaled to
      one norm, and a one.
    """
    image = pixels[..., 0].astype(np.float32) / np.float32(255.0)
    padded = np.pad(image, ((0, 0), (1, 1), (1, 1)))
    across = padded[:, 1:-1, 2:] - padded[:, 1:-1, :-2]
    down = padded[:, 2:, 1:-1] - padded[:, :-2, 1:-1]
    magnitudes = np.hypot(across, down)
    directions = np.arctan2(down, across) / np.pi * _DIRECTIONS % _DIRECTIONS
    lower = np.floor(directions)
    share = directions - lower
    maps = [
        magnitudes
        * (
            (lower % _DIRECTIONS == each) * (1 - share)
            + ((lower + 1) % _DIRECTIONS == each) * share
        )
        for each in range(_DIRECTIONS)
    ]
    cells = len(image), 28 // _CELL, _CELL, 28 // _CELL, _CELL
    sums = np.stack([each.reshape(cells).sum((2, 4)) for each in (*maps, 0.5 * image)], axis=-1)
    found = np.sqrt(sums).reshape(len(image), -1)
    # A black image has no gradients.
    norms = np.maximum(np.linalg.norm(found, axis=1, keepdims=True), np.float32(1e-6))
    return np.hstack([_NORM * found / norms, np.ones_like(norms)]).astype(np.float32)


def _labelled_features(images: Images) -> Images:
    parts = [
        features(images.pixels[first : first + 5_000]) for first in range(0, len(images), 5_000)
    ]
    return Images(np.concatenate(parts), images.labels)


@dataclasses.dataclass(frozen=True)
class _Configuration:
    """A mechanism at a privacy target.

    Attributes:
      label: One of ``_MECHANISMS``.
      epsilon: The target at ``_DELTA``.
      mechanism: What the guarantee of its runs is about.
      effective_rmse: BandMF Eq. 11: RMSE times noise multiplier over clients per round.
    """

    label: str
    epsilon: float
    mechanism: mfa.Mechanism
    effective_rmse: float

    def directory(self, parent: pathlib.Path) -> pathlib.Path:
        """Where its runs are."""
        words = "".join(letter if letter.isalnum() else " " for letter in self.label.lower())
        return parent / f"{'_'.join(words.split())}_epsilon_{self.epsilon:g}"


def _configuration(label: str, epsilon: float, workspace: Workspace) -> _Configuration:
    schema: Participation = _SCHEMA
    matrix: Factorization
    if label in (_SAMPLED_IDENTITY, _SAMPLED_BANDED):
        is_banded = label == _SAMPLED_BANDED
        choice = band_choice.best(
            band_choice.compare(
                epsilon,
                _DELTA,
                num_rounds=_NUM_ROUNDS,
                population=_POPULATION,
                clients_per_round=_COHORT,
                candidates=planning.powers_of_two(_SCHEMA.separation) if is_banded else [1],
                cache_directory=workspace.cache_directory,
            )
        )
        schema = PoissonSampling(_NUM_ROUNDS, choice.num_bands, _POPULATION, _COHORT)
        # Of one band, the identity.
        matrix = band_choice.banded_matrix(_NUM_ROUNDS, choice.num_bands, workspace.cache_directory)
        error = choice.effective_rmse
    else:
        matrix = _matrix(label, workspace)
        multiplier = accounting.noise_multiplier(epsilon, _DELTA)
        error = matrix.rmse(_NUM_ROUNDS, _SCHEMA) * multiplier / _COHORT
    mechanism = mfa.calibrate(matrix, schema, epsilon=epsilon, delta=_DELTA)
    return _Configuration(label, epsilon, mechanism, error)


def _matrix(label: str, workspace: Workspace) -> Factorization:
    if label == _IDENTITY:
        return mfa.factorizations.identity(_NUM_ROUNDS)
    if label == _TREE:
        return mfa.factorizations.tree_aggregation(_NUM_ROUNDS, "full")
    if label == _BLT:
        return mfa.factorizations.blt(_NUM_ROUNDS, _BUFFERS, _SCHEMA)
    return matrices.banded(workspace, _NUM_ROUNDS, _SCHEMA.separation, _SCHEMA)


def _learning_rate(error: float, tuned_error: float) -> float:
    """The tuned rate by the power law, at most the tuned one: the rule of all comparisons here."""
    return _TUNED_RATE * min(1.0, (error / tuned_error) ** _RATE_SLOPE)


def _in_order(repetition: int) -> Callable[[int], np.ndarray]:
    """The images of a round, of an order that comes again after an epoch."""
    order = np.random.default_rng(repetition).permutation(_POPULATION)

    def cohort(i: int) -> np.ndarray:
        first = i % _SCHEMA.separation * _COHORT
        return order[first : first + _COHORT]

    return cohort


def gradients(weights: np.ndarray, inputs: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Returns the gradient of each example's cross-entropy, of a linear model.

    Args:
      weights: (d, c) float32.
      inputs: (m, d) float32.
      labels: (m,) integers below c.

    Returns:
      (m, d, c) float32.
    """
    scores = inputs @ weights
    scores = np.exp(scores - np.max(scores, axis=1, keepdims=True))
    scores /= np.sum(scores, axis=1, keepdims=True)
    scores[np.arange(len(labels)), labels] -= 1
    return inputs[:, :, np.newaxis] * scores[:, np.newaxis, :]


def _accuracy(weights: np.ndarray, images: Images) -> float:
    return float(np.mean(np.argmax(images.pixels @ weights, axis=1) == images.labels))


def _train(
    configuration: _Configuration, rate: float, repetition: int, train: Images, test: Images
) -> Mapping[str, Any]:
    """Trains once; returns accuracies, and the statement of what was observed."""
    start = time.process_time()
    mechanism = configuration.mechanism
    weights = np.zeros((train.pixels.shape[1], data.NUM_CLASSES), np.float32)
    momentum = np.zeros_like(weights)
    aggregator = mfa.Aggregator(mechanism, _CLIP_NORM, _COHORT, template=weights)
    state = aggregator.initialize()
    rounds_of: list[list[int]] = [[] for _ in range(_POPULATION)]
    heldout, rest = test[:_NUM_HELDOUT], test[_NUM_HELDOUT:]
    curve = []
    sampler = None
    if mechanism.sampling is not None:
        sampler = mechanism.sampling.sampler(participation.secret_seed())
    cohort_of = _in_order(repetition) if sampler is None else sampler.draw
    for i in range(_NUM_ROUNDS):
        cohort = cohort_of(i)
        for client in cohort:
            rounds_of[client].append(i)
        updates = gradients(weights, train.pixels[cohort], train.labels[cohort])
        state, released = aggregator.next(state, updates)
        momentum = _MOMENTUM * momentum + released
        left = (_NUM_ROUNDS - i) / (_COOLDOWN * _NUM_ROUNDS)
        weights = weights - np.float32(rate * min(1.0, left)) * momentum
        if (i + 1) % _EVALUATE_EVERY == 0:
            curve.append(_accuracy(weights, heldout))
    return {
        "heldout": curve,
        "test_accuracy": _accuracy(weights, rest),
        "processor_seconds": time.process_time() - start,
        "privacy": _statement(configuration, rounds_of, sampler),
    }


def _statement(
    configuration: _Configuration, rounds_of: Sequence[Sequence[int]], sampler: Sampler | None
) -> Any:
    mechanism = configuration.mechanism
    digits = len(str(_POPULATION))
    ledger = Ledger(
        tuple(f"image-{place:0{digits}}" for place in range(_POPULATION)),
        tuple(np.asarray(rounds, np.int64) for rounds in rounds_of),
        _NUM_ROUNDS,
        mechanism.sampling,
    )
    facts = RunFacts(
        mechanism=f"{configuration.label}, {_NUM_ROUNDS} rounds",
        num_clients=_POPULATION,
        clients_per_round=_COHORT,
        clip_norm=_CLIP_NORM,
        noise_seed_is_fixed=False,
        public_data="none: the features of an image are a fixed function of it",
        enforcement="The program that trains chooses the images of each round.",
    )
    return mechanism.observed(ledger, sampler=sampler).statement(facts, _DELTA).to_dict()


@dataclasses.dataclass(frozen=True)
class _Runs:
    """The runs of a configuration.

    Attributes:
      configuration: The configuration.
      accuracies: (repetitions,) float64: test accuracies in percent.
      heldout: Held-out accuracies by round, in percent, the mean over runs.
      processor_seconds: What training took, of each run.
      epsilons: What each run's statement says of what was observed.
    """

    configuration: _Configuration
    accuracies: np.ndarray
    heldout: np.ndarray
    processor_seconds: tuple[float, ...]
    epsilons: tuple[float, ...]

    @property
    def mean(self) -> float:
        """The mean test accuracy."""
        return float(np.mean(self.accuracies))

    @property
    def half_width(self) -> float | None:
        """Half the width of the 95 % interval of Student's t around it; None for one run."""
        number = len(self.accuracies)
        if number < 2:
            return None
        quantile = scipy.stats.t.ppf(0.5 + _CONFIDENCE / 2, number - 1)
        return float(quantile * np.std(self.accuracies, ddof=1) / math.sqrt(number))

    def said(self) -> str:
        """Both, with the probability of the interval."""
        half = self.half_width
        return f"{self.mean:.2f}" + ("" if half is None else f" ± {half:.2f} (95 %)")

    def is_above(self, other: "_Runs") -> bool:
        """Whether its interval is above the other's, without overlap."""
        half, others = self.half_width, other.half_width
        return half is not None and others is not None and self.mean - half > other.mean + others


def _result(
    configuration: _Configuration,
    rate: float,
    repetition: int,
    parent: pathlib.Path,
    images: Callable[[], tuple[Images, Images]],
) -> Mapping[str, Any]:
    """The result of a run, which is trained unless its file is there."""
    directory = configuration.directory(parent) / f"run_{repetition}"
    path = directory / "result.json"
    asked = {"learning_rate": rate, "noise": configuration.mechanism.noise_multiplier}
    if path.is_file():
        found: Mapping[str, Any] = validation.parsed_json(path.read_text(encoding="utf-8"))
        if found["asked"] == asked:
            return found
    result = {**_train(configuration, rate, repetition, *images()), "asked": asked}
    directory.mkdir(parents=True, exist_ok=True)
    privacy = result.pop("privacy")
    result["epsilon"] = privacy["earned"]["epsilon"]
    atomic_files.write_text(directory / "privacy.json", json.dumps(privacy, indent=1))
    atomic_files.write_text(path, json.dumps(result))
    return result


def _runs(configuration: _Configuration, results: Sequence[Mapping[str, Any]]) -> _Runs:
    return _Runs(
        configuration,
        np.array([100.0 * each["test_accuracy"] for each in results]),
        100.0 * np.mean([each["heldout"] for each in results], axis=0),
        tuple(each["processor_seconds"] for each in results),
        tuple(each["epsilon"] for each in results),
    )


def compare(workspace: Workspace) -> Outcome:
    """Trains all mechanisms at the chosen targets, and compares their test accuracies.

    Args:
      workspace: Where matrices and runs are stored.

    Returns:
      A row for each mechanism and target, the order that intervals support, and the curves.

    Raises:
      ValueError: If there is no directory for runs, or Fashion-MNIST cannot be read.
    """
    place = workspace.training
    if place is None:
        raise ValueError("a training comparison needs a directory for its runs.")

    @functools.cache
    def images() -> tuple[Images, Images]:
        train, test = data.load(data.find_directory(None))
        if len(train) != _POPULATION:
            raise ValueError(f"Fashion-MNIST has {_POPULATION} images, found {len(train)}.")
        return _labelled_features(train), _labelled_features(test)

    tuned = _configuration(_BANDED, 8.0, workspace).effective_rmse
    by_target: dict[float, list[_Runs]] = {}
    for epsilon in _EPSILONS if place.targets is None else place.targets:
        configurations = [_configuration(label, epsilon, workspace) for label in _MECHANISMS]
        found: list[list[Mapping[str, Any]]] = [[] for _ in configurations]
        for repetition in range(1, place.repetitions + 1):
            for configuration, results in zip(configurations, found, strict=True):
                rate = _learning_rate(configuration.effective_rmse, tuned)
                results.append(_result(configuration, rate, repetition, place.directory, images))
        by_target[epsilon] = [
            _runs(configuration, results)
            for configuration, results in zip(configurations, found, strict=True)
        ]
    every = [runs for of_target in by_target.values() for runs in of_target]
    return Outcome(
        tuple(map(_row, every)),
        _drawing(every),
        (
            *(_order(epsilon, of_target) for epsilon, of_target in by_target.items()),
            _about(every),
        ),
    )


def _row(runs: _Runs) -> Row:
    return Row(
        f"epsilon {runs.configuration.epsilon:g}, {runs.configuration.label}",
        f"test accuracy, %, {len(runs.accuracies)} runs",
        None,
        runs.mean,
        runs.said(),
    )


def _order(epsilon: float, runs: Sequence[_Runs]) -> str:
    """What intervals support at a target: each mechanism, and what it is above."""
    in_order = sorted(runs, key=lambda each: -each.mean)
    said = []
    for each in in_order:
        lower = [other.configuration.label for other in in_order if each.is_above(other)]
        if lower:
            said.append(f"{each.configuration.label} is above {', '.join(lower)}")
    if not said:
        return f"Epsilon {epsilon:g}. Intervals of all mechanisms overlap, and no order is claimed."
    return f"Epsilon {epsilon:g}. By intervals that do not overlap: {'; '.join(said)}."


def _about(every: Sequence[_Runs]) -> str:
    seconds = [each for runs in every for each in runs.processor_seconds]
    epsilons = [each / runs.configuration.epsilon for runs in every for each in runs.epsilons]
    return (
        f"{_NUM_ROUNDS} rounds of {_COHORT} of {_POPULATION} images at delta {_DELTA:g}: two "
        "epochs, or batches drawn at random where amplified. Logistic regression of 1,450 "
        "parameters on fixed features, weights that start at zero, clip norm 1, momentum "
        f"{_MOMENTUM:g}. The server's learning rate was tuned for BandMF at epsilon 8 "
        f"({_TUNED_RATE:g}, by held-out images); others have that rate times the power of the "
        "ratio of effective RMSEs that BandMF App. I fits on StackOverflow, at most that rate. "
        "Runs of number r have the order of images that NumPy's generator of seed r gives; noise "
        "and sampled batches come from secret seeds. Each run's privacy.json is beside its result; "
        f"its epsilon is at most {max(epsilons):.6g} times what was asked for. {len(seconds)} "
        f"runs, of {min(seconds):.0f} to {max(seconds):.0f} seconds of one processor."
    )


def _drawing(every: Sequence[_Runs]) -> Drawing:
    rounds = list(range(_EVALUATE_EVERY, _NUM_ROUNDS + 1, _EVALUATE_EVERY))
    return Drawing(
        "trained configurations",
        {
            "configurations": [
                {
                    "label": runs.configuration.label,
                    "epsilon": runs.configuration.epsilon,
                    "mean": runs.mean,
                    "half_width": runs.half_width,
                    "rounds": rounds,
                    "held_out": for_drawing(runs.heldout),
                }
                for runs in every
            ]
        },
    )


EXPERIMENTS = (
    Experiment(
        "fashion-mnist",
        f"{PAPER}, Figs. 1 (a) and 5 (a); Denisov et al., Fig. 2",
        "Fashion-MNIST in place of the papers' data, six mechanisms",
        compare,
        {DATASET: _EPSILONS},
    ),
)
