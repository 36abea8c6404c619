"""Every figure as a critical reader sees it: of the committed results and of odd ones."""

import json
import math
import pathlib

import matplotlib.colors
import matplotlib.figure
import numpy as np
import pytest

from mf_aggregators import figures
from mf_aggregators.commands import factorize, report
from reproduction import drawings
from reproduction.experiment import Drawing
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


# Reports.


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
    status = report.run(words)
    assert status == 0, capsys.readouterr().err
    (figure,) = drawn
    assert figure_checks.faults(figure) == []
    # The curve of the mechanism has the root mean square that the report prints.
    heights = np.asarray(figure.axes[0].get_lines()[0].get_ydata(), float)
    assert f"{math.sqrt(np.mean(heights**2)):.6g}" in capsys.readouterr().out
