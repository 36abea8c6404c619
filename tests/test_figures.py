"""Every figure as a critical reader sees it: of the committed results and of odd ones."""

import itertools
import json
import math
import pathlib
import re
from typing import Any

import matplotlib.colors
import matplotlib.figure
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mf_aggregators import figures
from mf_aggregators.commands import command_line, factorize, report
from reproduction import drawings
from reproduction.experiment import Drawing
from simulations.runs import run_figures
from tests import figure_checks
from tests.refusals import refuses

_DOCS = pathlib.Path(__file__).parents[1] / "docs"
_RESULTS = sorted((_DOCS / "reproduction").glob("*.json"))
_LONG = "a mechanism whose name goes on for much longer than anyone would have thought, number"


# Figures of the documentation.


@pytest.mark.short_cases(6)
@pytest.mark.parametrize("path", _RESULTS, ids=lambda path: path.stem)
def test_figures_of_the_committed_results(path: pathlib.Path) -> None:
    drawing = Drawing(**json.loads(path.read_text(encoding="utf-8"))["drawing"])
    assert figure_checks.faults(drawings.draw(drawing)) == []


def test_there_is_a_result_for_every_kind_of_figure() -> None:
    kinds = {json.loads(path.read_text(encoding="utf-8"))["drawing"]["kind"] for path in _RESULTS}
    assert kinds == set(drawings._KINDS)
    with refuses("'nothing'"):
        drawings.draw(Drawing("nothing", {}))


@given(st.tuples(*[st.floats(0.0, 1.0)] * 3))
def test_text_in_cells_can_be_read(background: tuple[float, float, float]) -> None:
    """The root of 21 is the contrast that the better of black and white has at least."""
    text = matplotlib.colors.to_rgb(drawings._text_colour(background))
    assert figure_checks.contrast(text, background) >= 4.5


# Experiments with other results.


def _configurations(
    names: list[str], epsilons: list[float], with_curves: bool, half_width: float | None
) -> Drawing:
    rng = np.random.default_rng(len(names))
    found: list[dict[str, Any]] = []
    for epsilon, (place, name) in itertools.product(epsilons, enumerate(names)):
        curve = np.cumsum(rng.uniform(0.0, 2.0, 10)) + place
        each = {"label": name, "epsilon": epsilon, "mean": curve[-1], "half_width": half_width}
        if with_curves:
            each.update(rounds=list(range(10, 101, 10)), held_out=curve.tolist())
        found.append(each)
    return Drawing("trained configurations", {"configurations": found})


@pytest.mark.long_cases(2)
@pytest.mark.short_cases(1)
@pytest.mark.parametrize(
    ("epsilons", "half_width"),
    [pytest.param([8.0], None, marks=pytest.mark.long), ([0.001, 2.0, 18.9], 3.0)],
    ids=["one", "three"],
)
@pytest.mark.parametrize(
    "names",
    [
        ["DP-SGD", "BandMF"],
        [
            f"{name}{schedule}"
            for schedule in ("", ", decay", ", cool-down")
            for name in ("Honaker Full", "Honaker Online", "Opt Prefix Sum", "Optimal M = BC")
        ],
        pytest.param([f"{_LONG} {place}" for place in range(12)], marks=pytest.mark.long),
    ],
    ids=["two", "twelve", "long"],
)
def test_figures_of_trained_configurations(
    names: list[str], epsilons: list[float], half_width: float | None
) -> None:
    for with_curves in (True, False):
        figure = drawings.draw(_configurations(names, epsilons, with_curves, half_width))
        assert figure_checks.faults(figure) == []
        shown = {label.get_text() for label in figure.axes[0].get_yticklabels()}
        assert {re.sub(r"\s+", " ", text) for text in shown} == set(names)
        by_round = [axes for axes in figure.axes if axes.get_xlabel() == "round"]
        assert sum(len(axes.get_lines()) for axes in by_round) == (
            len(names) * len(epsilons) if with_curves else 0
        )


# Runs and comparisons.


def _metrics(num_rounds: int, scale: float, is_private: bool, has_others: bool) -> list[dict]:
    rng = np.random.default_rng(num_rounds)
    rows = []
    for number in range(1, num_rounds + 1):
        row = {
            "round": number,
            "train_loss": scale * (1.0 + 5.0 / number),
            "train_accuracy": 0.2 - 0.2 / number,
            "heldout_loss": scale * (1.1 + 5.0 / number) if number % 3 == 0 else "",
            "heldout_accuracy": 0.19 - 0.2 / number if number % 3 == 0 else "",
            "eligible_clients": 2511 if number < 25 else 100,
            "update_norm": scale * rng.uniform(1.0, 2.0),
            "max_update_norm": scale * rng.uniform(3.0, 9.0),
            "released_norm": scale / math.sqrt(number),
        }
        if is_private:
            row.update(
                clipped_fraction=rng.uniform(0.5, 0.7),
                zeroed_fraction=0.0,
                noise_norm=0.9999 * scale / math.sqrt(number),
                epsilon_spent=8.0 * math.sqrt(number / num_rounds),
            )
        if has_others:
            row["available_clients"] = row["eligible_clients"]
        rows.append(row)
    return rows


@pytest.mark.short_cases(2)
@pytest.mark.parametrize(
    ("num_rounds", "scale", "is_private"),
    [(1, 1.0, True), (3, 1e-9, False), (3, 3e12, True), (200, 1.0, True), (10_000, 1.0, False)],
)
def test_figures_of_runs(num_rounds: int, scale: float, is_private: bool) -> None:
    figure = run_figures.draw(
        _metrics(num_rounds, scale, is_private, num_rounds > 3),
        f"{_LONG} {_LONG} 1",
        {
            "L2 norm of updates": ("clip norm", 1.2 * scale),
            "epsilon": ("planned", 8.0 if is_private else math.inf),
            "clients": ("clients per round", 100.0),
        },
        1e-6 if is_private else None,
    )
    assert figure_checks.faults(figure) == []
    # No second axis: what is on a panel is read off at its left.
    assert len({tuple(np.round(axes.get_position().bounds, 6)) for axes in figure.axes}) == len(
        figure.axes
    )


@pytest.mark.short_cases(1)
@pytest.mark.parametrize(
    "flags",
    [
        ["--mechanism=identity", "--num_rounds=3"],
        ["--mechanism=banded", "--num_rounds=40", "--num_bands=8", "--separation=8"],
        ["--mechanism=blt", "--num_rounds=4000", "--num_buffers=2", "--separation=1000"],
    ],
    ids=["identity", "banded", "blt"],
)
def test_the_figure_of_a_report(
    flags: list[str],
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    drawn: list[matplotlib.figure.Figure] = []
    monkeypatch.setattr(figures, "save", lambda figure, file: drawn.append(figure))
    out = tmp_path / "checkpoint"
    of_report = [flag for flag in flags if flag.startswith("--separation")]
    assert factorize.run(["mf-factorize", *flags, f"--output={out}"]) == 0
    words = ["mf-report", f"--checkpoint={out}", f"--figure={tmp_path}/a.png", *of_report]
    status = command_line.run("", report.define_flags, report.main, words)
    assert status == 0, capsys.readouterr().err
    (figure,) = drawn
    assert figure_checks.faults(figure) == []
    # The curve of the mechanism has the root mean square that the report prints.
    heights = np.asarray(figure.axes[0].get_lines()[0].get_ydata(), float)
    assert f"{math.sqrt(np.mean(heights**2)):.6g}" in capsys.readouterr().out
