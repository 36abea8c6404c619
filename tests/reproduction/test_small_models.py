"""Comparisons of mechanisms on a toy: training against plain NumPy, and a small whole one."""

import dataclasses
import functools
import json
import pathlib

import numpy as np
import pytest

import mf_aggregators as mfa
from mf_aggregators import inputs
from reproduction import small_models
from reproduction.experiment import TrainingPlace, Workspace


class _Toy:
    """60 clients of one example each, of two classes that a line separates."""

    shape = 3, 2
    share_of_most_frequent = 0.25

    def __init__(self) -> None:
        generator = np.random.default_rng(0)
        self.inputs = generator.normal(size=(60, 3)).astype(np.float32)
        self.labels = (self.inputs[:, 0] > 0).astype(np.int64)
        self.calls: list[tuple[np.ndarray, np.ndarray]] = []

    def updates(self, weights: np.ndarray, cohort: np.ndarray) -> np.ndarray:
        self.calls.append((weights, cohort))
        found = small_models.residuals(self.inputs[cohort] @ weights, self.labels[cohort])
        # Some are clipped, and others are not.
        return np.asarray(self.inputs[cohort][:, :, np.newaxis] * found[:, np.newaxis])

    def heldout_accuracy(self, weights: np.ndarray) -> float:
        return float(np.mean(np.argmax(self.inputs @ weights, axis=1) == self.labels))

    test_accuracy = heldout_accuracy


_TASK = small_models.Task(
    name="toy",
    client="point",
    population=60,
    cohort=20,
    epochs=2,
    delta=1e-3,
    tuned_rate=0.5,
    model="A line",
    public_data="none",
    load=_Toy,
)


def test_residuals_are_gradients_of_the_cross_entropy() -> None:
    scores = np.random.default_rng(0).normal(size=(2, 3, 5))
    labels = np.array([[4, 0, 2], [1, 1, 3]])

    def loss(at: np.ndarray) -> float:
        picked = np.take_along_axis(at, labels[..., np.newaxis], axis=-1)
        return float(np.sum(np.log(np.sum(np.exp(at), axis=-1))) - np.sum(picked))

    found = small_models.residuals(scores, labels)
    for place in np.ndindex(scores.shape):
        step = np.zeros_like(scores)
        step[place] = 1e-5
        slope = (loss(scores + step) - loss(scores - step)) / 2e-5
        assert found[place] == pytest.approx(slope, abs=1e-8)


def test_a_run_without_noise_is_clipped_descent_with_momentum() -> None:
    """The weights of each round, and who is in it, beside a loop in plain NumPy."""
    toy = _Toy()
    result = small_models._train(_TASK, small_models._without_noise(_TASK), 0.5, 7, toy)
    order = np.random.default_rng(7).permutation(60)
    weights, momentum = np.zeros((3, 2)), np.zeros((3, 2))
    # The rate falls to zero over the last two fifths of six rounds.
    rates = [0.5, 0.5, 0.5, 0.5, 0.5 * 2 / 2.4, 0.5 * 1 / 2.4]
    calls = list(toy.calls)
    assert len(calls) == 6
    for i, (before, cohort) in enumerate(calls):
        np.testing.assert_allclose(before, weights, atol=1e-5)
        np.testing.assert_array_equal(cohort, order[20 * (i % 3) :][:20])
        total = np.zeros((3, 2))
        norms = []
        for gradient in toy.updates(weights, cohort):
            norms.append(np.linalg.norm(gradient))
            total += gradient / max(1.0, norms[-1])
        assert i > 0 or min(norms) < 1.0 < max(norms)
        momentum = 0.9 * momentum + total / 20
        weights = weights - rates[i] * momentum
    assert result["test_accuracy"] == toy.test_accuracy(weights) > 0.9
    assert "privacy" not in result


@pytest.mark.parametrize("number", [4, pytest.param(6, marks=pytest.mark.long)])
def test_a_small_comparison(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """6 rounds of 20 of 60, each client twice: every file, and what ledgers show.

    The first four mechanisms are not amplified, and need no search.
    """
    monkeypatch.setattr(small_models, "_MECHANISMS", small_models._MECHANISMS[:number])
    monkeypatch.setattr(small_models, "_BUFFERS", 1)
    place = TrainingPlace(tmp_path / "runs", "toy", 2, targets=(8.0,))
    workspace = Workspace(tmp_path / "cache", training=place)
    run = functools.partial(small_models.compare, _TASK, workspace)
    outcome = run()
    assert [row.row for row in outcome.rows] == [
        *(f"epsilon 8, {label}" for label in small_models._MECHANISMS),
        "without noise",
        "the most frequent class of training data, always",
    ]
    assert outcome.rows[-1].ours == 25.0
    results = sorted((tmp_path / "runs").rglob("result.json"))
    assert len(results) == 2 * (number + 1)
    for path in results:
        result = json.loads(path.read_text())
        if path.parent.parent.name == "without_noise":
            assert "epsilon" not in result
            assert not path.with_name("privacy.json").exists()
            continue
        assert result["epsilon"] <= 8.0
        # A search for the noise of a sampling scheme ends a little below.
        assert result["epsilon"] == pytest.approx(8.0, rel=1e-3)
        privacy = json.loads(path.with_name("privacy.json").read_text())
        assert (privacy["status"], privacy["keeps_plan"]) == ("finished", True)
        is_sampled = "amplified" in path.parent.parent.name
        assert (privacy["planned"]["sampling"] is not None) == is_sampled
        if not is_sampled:
            kept = privacy["participation"]["observed"]
            assert (kept["separation"], kept["max_participations"]) == (3, 2)
    of_blt = [path for path in results if "blt" in str(path)]
    accuracies = [json.loads(path.read_text())["test_accuracy"] for path in of_blt]
    (row,) = [row for row in outcome.rows if row.row.endswith("BLT")]
    assert row.ours == pytest.approx(100 * np.mean(accuracies))
    mechanisms = inputs.part(outcome.drawing.data, list, "mechanisms")
    (shown,) = [each for each in mechanisms if each["label"] == "BLT"]
    assert (shown["epsilons"], shown["means"]) == ([8.0], [pytest.approx(row.ours, rel=1e-5)])
    # Nothing is trained again, nor read.
    before = {path: path.read_bytes() for path in results}
    unread = dataclasses.replace(_TASK, load=lambda: pytest.fail("the data was read"))
    assert small_models.compare(unread, workspace).rows == outcome.rows
    assert {path: path.read_bytes() for path in results} == before
    # What was asked for otherwise is trained anew.
    first = results[0]
    first.write_text(first.read_text().replace('"noise": ', '"noise": 1'))
    run()
    assert json.loads(first.read_text())["asked"] == json.loads(before[first])["asked"]


def _runs(label: str, *accuracies: float) -> small_models._Runs:
    mechanism = mfa.Mechanism(mfa.factorizations.identity(6), _TASK.schema, 1.0)
    configuration = small_models._Configuration(label, 8.0, mechanism, 1.0)
    return small_models._Runs(configuration, np.array(accuracies), (1.0,), (8.0,))


def test_which_of_the_papers_pairs_agree() -> None:
    runs = [
        _runs("DP-SGD", 50, 50.1),
        _runs("Optimal TreeAgg", 80, 80.1),
        _runs("BandMF", 80, 80.2),
        _runs("DP-SGD, amplified", 70, 70.1),
        _runs("BandMF, amplified", 60, 60.1),
    ]
    assert small_models._order(8.0, runs).endswith(
        "Of the papers' order, agree: Optimal TreeAgg above DP-SGD, BandMF above DP-SGD; disagree: "
        "amplified BandMF above amplified DP-SGD, amplified BandMF above BandMF; cannot be told "
        "apart: BandMF above Optimal TreeAgg."
    )
