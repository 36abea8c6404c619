"""Figures of runs: what is on their axes, and that they are files."""

import csv
import io
import math
from typing import Any

import matplotlib.figure
import pytest

from simulations.runs import run_figures


def _rows(num_rounds: int = 12) -> list[dict[str, str]]:
    """Rows as csv.DictReader gives them, with evaluations in every third round."""
    text = io.StringIO()
    names = [
        "round",
        "train_loss",
        "train_accuracy",
        "heldout_loss",
        "heldout_accuracy",
        "eligible_clients",
        "available_clients",
        "seconds",
        "update_norm",
        "max_update_norm",
        "clipped_fraction",
        "zeroed_fraction",
        "noise_norm",
        "released_norm",
        "epsilon_spent",
    ]
    writer = csv.DictWriter(text, names, restval="")
    writer.writeheader()
    for number in range(1, num_rounds + 1):
        row: dict[str, Any] = dict.fromkeys(names, number + 0.5)
        row.update(round=number, train_accuracy=number / 100, clipped_fraction=number / 20)
        row.update(zeroed_fraction=0.0, epsilon_spent=number / 2)
        if number % 3:
            del row["heldout_loss"], row["heldout_accuracy"]
        else:
            row["heldout_accuracy"] = number / 50
        writer.writerow(row)
    text.seek(0)
    return list(csv.DictReader(text))


def _axes(figure: matplotlib.figure.Figure) -> dict[str, Any]:
    return {axes.get_ylabel(): axes for axes in figure.axes if axes.axison}


def _lines(axes: Any) -> dict[str, Any]:
    return {
        line.get_label(): (list(line.get_xdata()), list(line.get_ydata()))
        for line in axes.get_lines()
    }


def test_a_run_has_all_panels_with_its_numbers() -> None:
    figure = run_figures.draw(
        _rows(),
        "banded",
        {
            "L2 norm of updates": ("clip norm", 1.5),
            "epsilon": ("planned", 8.0),
            "clients": ("clients per round", 3.0),
        },
        delta=1e-4,
    )
    axes = _axes(figure)
    assert list(axes) == [
        "accuracy, %",
        "loss",
        "L2 norm of updates",
        "of the updates, %",
        "L2 norm of a round",
        "clients",
        "epsilon at delta 0.0001",
    ]
    rounds = list(range(1, 13))
    accuracy = _lines(axes["accuracy, %"])
    assert accuracy["training"] == (rounds, pytest.approx(rounds))
    # A line goes straight across rounds without an evaluation.
    assert accuracy["held out"] == ([3, 6, 9, 12], pytest.approx([6, 12, 18, 24]))
    assert set(_lines(axes["loss"])) == {"training", "held out"}
    norms = _lines(axes["L2 norm of updates"])
    assert norms["mean; largest (the same)"][1] == pytest.approx(
        [number + 0.5 for number in rounds]
    )
    assert norms["clip norm"][1] == [1.5, 1.5]
    shares = _lines(axes["of the updates, %"])
    assert shares["clipped"] == (rounds, pytest.approx([5 * number for number in rounds]))
    assert shares["zeroed"][1] == pytest.approx([0.0] * 12)
    assert set(_lines(axes["L2 norm of a round"])) == {"noise in it; released mean (the same)"}
    assert set(_lines(axes["clients"])) == {
        "free by the timer; available of these (the same)",
        "clients per round",
    }
    epsilon = _lines(axes["epsilon at delta 0.0001"])
    assert epsilon["spent"] == (rounds, pytest.approx([number / 2 for number in rounds]))
    assert epsilon["planned"][1] == [8.0, 8.0]
    assert figure.get_suptitle() == "banded"


def test_a_clip_norm_that_adapts_is_a_curve_and_said_to_be_a_private_release() -> None:
    rows = [
        {**row, "clip_norm": str(0.1 * i), "unclipped_fraction": str(0.2 * i)}
        for i, row in enumerate(_rows(3), start=1)
    ]
    axes = _axes(run_figures.draw(rows, "banded", {"within the clip norm, %": ("target", 50.0)}))
    norm = _lines(axes["L2 norm of updates"])["clip norm (a private release)"]
    assert norm == ([1, 2, 3], pytest.approx([0.1, 0.2, 0.3]))
    within = _lines(axes["within the clip norm, %"])
    assert within["a private release"][1] == pytest.approx([20.0, 40.0, 60.0])
    assert within["target"][1] == [50.0, 50.0]


def test_released_metrics_are_means_of_a_window_and_said_to_be_a_private_release() -> None:
    axes = _axes(run_figures.draw(_rows(5), "banded", released_window=3))
    accuracy = _lines(axes["accuracy, %"])
    # Of 1 to 5 %: fewer of them at the beginning.
    assert accuracy["training (a private release, mean of 3)"] == (
        [1, 2, 3, 4, 5],
        pytest.approx([1.0, 1.5, 2.0, 3.0, 4.0]),
    )
    assert accuracy["held out"][1] == pytest.approx([6.0])
    axes = _axes(run_figures.draw(_rows(2), "banded", released_window=1))
    shares = _lines(axes["of the updates, %"])
    assert shares["clipped (a private release)"][1] == pytest.approx([5.0, 10.0])


def test_panels_without_data_are_left_out() -> None:
    rows: list[dict[str, Any]] = [
        {"round": 1, "train_loss": 2.0},
        {"round": 2, "train_loss": "", "update_norm": None},
    ]
    figure = run_figures.draw(
        rows, "", {"L2 norm of updates": ("clip norm", 1.0), "epsilon": ("planned", math.inf)}
    )
    assert list(_axes(figure)) == ["loss"]
    spent = [{"round": 1, "epsilon_spent": 1.0}]
    figure = run_figures.draw(spent, "", {"epsilon": ("planned", math.inf)})
    assert set(_lines(_axes(figure)["epsilon"])) == {"spent"}


@pytest.mark.parametrize("rows", [[], [{"round": "1"}], [{"round": "1", "train_loss": "nan"}]])
def test_a_run_without_metrics_says_so(rows: list[dict[str, str]]) -> None:
    figure = run_figures.draw(rows, "")
    assert [text.get_text() for text in figure.axes[0].texts] == ["no metrics"]
