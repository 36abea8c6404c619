"""The comparison on Fashion-MNIST: features, gradients, cohorts, and a small whole one."""

import dataclasses
import json
import pathlib

import numpy as np
import pytest

from mf_aggregators.participation import MinSeparation
from reproduction import fashion_mnist
from reproduction.experiment import TrainingPlace, Workspace
from tests.refusals import refuses
from tests.simulations.examples.fashion_mnist_classification import fashion_mnist_files


def test_features_are_histograms_of_gradients() -> None:
    """A ramp to the right: all gradients point that way, but for the border of zeros."""
    image = np.zeros((1, 28, 28, 1), np.uint8)
    image[0, :, :, 0] = 9 * np.arange(28)
    found = fashion_mnist.features(image)
    assert found.shape == (1, 145)
    assert found.dtype == np.float32
    assert found[0, -1] == 1.0
    assert np.linalg.norm(found[0, :-1]) == pytest.approx(3.0, rel=1e-5)
    cells = found[0, :-1].reshape(4, 4, 9)
    assert np.all(cells[1:3, 1:3, 1:8] < 1e-6)
    # 49 pixels with a difference of 18 / 255 to the right, and half of the brightness.
    brightness = 0.5 * np.sum(9 * np.arange(7, 14) / 255) * 7
    ratio = np.sqrt(49 * 18 / 255 / brightness)
    assert cells[1, 1, 0] / cells[1, 1, 8] == pytest.approx(ratio, rel=1e-4)
    # Turned by a right angle, it is the middle direction of eight.
    turned = fashion_mnist.features(image.transpose(0, 2, 1, 3))[0, :-1].reshape(4, 4, 9)
    np.testing.assert_allclose(turned[1:3, 1:3, 4], cells[1:3, 1:3, 0].T, rtol=1e-4)
    assert np.all(fashion_mnist.features(np.zeros((1, 28, 28, 1), np.uint8))[0, :-1] == 0.0)


def test_gradients_are_those_of_the_cross_entropy() -> None:
    generator = np.random.default_rng(0)
    inputs, weights = generator.normal(size=(3, 4)), generator.normal(size=(4, 5))
    labels = np.array([4, 0, 2])

    def loss(at: np.ndarray, example: int) -> float:
        scores = inputs[example] @ at
        return float(np.log(np.sum(np.exp(scores))) - scores[labels[example]])

    found = fashion_mnist.gradients(weights, inputs, labels)
    for example in range(3):
        for place in np.ndindex(4, 5):
            step = np.zeros((4, 5))
            step[place] = 1e-5
            slope = (loss(weights + step, example) - loss(weights - step, example)) / 2e-5
            assert found[example][place] == pytest.approx(slope, abs=1e-8)


@pytest.mark.parametrize("number", [4, pytest.param(6, marks=pytest.mark.long)])
def test_a_small_comparison(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """60 images, 6 rounds of 20, each image twice: every file, and what ledgers show.

    The first four mechanisms are not amplified, and need no search.
    """
    for name, value in (
        ("_MECHANISMS", fashion_mnist._MECHANISMS[:number]),
        *(("_NUM_ROUNDS", 6), ("_COHORT", 20), ("_POPULATION", 60), ("_DELTA", 1e-3)),
        *(("_SCHEMA", MinSeparation(3, 2)), ("_NUM_HELDOUT", 8), ("_EVALUATE_EVERY", 2)),
        ("_BUFFERS", 1),
    ):
        monkeypatch.setattr(fashion_mnist, name, value)
    directory = fashion_mnist_files.write(tmp_path / "files", 60, 20)
    monkeypatch.setattr(fashion_mnist.data, "find_directory", lambda given: directory)
    place = TrainingPlace(tmp_path / "runs", fashion_mnist.DATASET, 2, targets=(8.0,))
    (experiment,) = fashion_mnist.EXPERIMENTS
    workspace = Workspace(tmp_path / "cache", training=place)
    outcome = experiment.run(workspace)
    assert [row.row for row in outcome.rows] == [
        f"epsilon 8, {label}" for label in fashion_mnist._MECHANISMS
    ]
    results = sorted((tmp_path / "runs").rglob("result.json"))
    assert len(results) == 2 * len(outcome.rows)
    for path in results:
        result = json.loads(path.read_text())
        assert result["epsilon"] <= 8.0
        # A search for the noise of a sampling scheme ends a little below.
        assert result["epsilon"] == pytest.approx(8.0, rel=1e-3)
        privacy = json.loads(path.with_name("privacy.json").read_text())
        assert privacy["status"] == "finished"
        assert privacy["keeps_plan"] is True
        is_sampled = "amplified" in path.parent.parent.name
        assert (privacy["planned"]["sampling"] is not None) == is_sampled
        if not is_sampled:
            kept = privacy["realised_participation"]
            assert (kept["separation"], kept["max_participations"]) == (3, 2)
    accuracies = [
        json.loads(path.read_text())["test_accuracy"] for path in results if "blt" in str(path)
    ]
    (row,) = [row for row in outcome.rows if row.row.endswith("BLT")]
    assert row.ours == pytest.approx(100 * np.mean(accuracies))
    # Nothing is trained again.
    before = {path: path.read_bytes() for path in results}
    again = experiment.run(workspace)
    assert again.rows == outcome.rows
    assert {path: path.read_bytes() for path in results} == before
    # What was asked for otherwise is trained anew.
    first = results[0]
    first.write_text(first.read_text().replace('"noise": ', '"noise": 1'))
    experiment.run(workspace)
    assert json.loads(first.read_text())["asked"] == json.loads(before[first])["asked"]
    monkeypatch.setattr(fashion_mnist, "_POPULATION", 80)
    with refuses("80", "60"):
        experiment.run(
            dataclasses.replace(
                workspace, training=dataclasses.replace(place, directory=tmp_path / "new")
            )
        )


def test_a_learning_rate_falls_with_the_error_and_is_at_most_the_tuned_one() -> None:
    tuned = fashion_mnist._TUNED_RATE
    assert fashion_mnist._learning_rate(2.0, 1.0) == pytest.approx(tuned * 2.0**-0.95)
    assert fashion_mnist._learning_rate(0.5, 1.0) == tuned


def test_what_intervals_support() -> None:
    def runs(label: str, *accuracies: float) -> fashion_mnist._Runs:
        configuration = fashion_mnist._Configuration(label, 8.0, None, 1.0)  # type: ignore[arg-type]
        return fashion_mnist._Runs(configuration, np.array(accuracies), np.zeros(1), (1.0,), (8.0,))

    one, other, third = runs("one", 80, 81), runs("other", 40, 41), runs("third", 39, 43)
    # Student's t of one degree of freedom: 12.7 standard errors, of which one is 0.5.
    assert one.half_width == pytest.approx(12.7062 * 0.5, rel=1e-5)
    assert runs("single", 80).half_width is None
    said = fashion_mnist._order(8.0, [third, other, one])
    assert said.endswith("one is above third, other.") or said.endswith("one is above other.")
    assert "no order" in fashion_mnist._order(8.0, [third, other])
