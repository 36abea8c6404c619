"""The pages of mf-plan and mf-report: the numbers of the JSON, and what a reader must not miss."""

import json
import math
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import matplotlib.figure
import numpy as np
import pytest

import mf_aggregators as mfa
from mf_aggregators import checkpoints, factorizations, workloads
from mf_aggregators.commands import command_line, pages, plan, report
from mf_aggregators.participation import MinSeparation
from tests import figure_checks, page_checks
from tests.page_checks import Page

_PLAN = (
    "--num_rounds=12",
    "--population=40",
    "--clients_per_round=10",
    "--target_epsilon=7.123456789",
    "--delta=1.5e-3",
    "--model_size=1000",
)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[matplotlib.figure.Figure]:
    """The figures of the pages that a test makes."""
    found: list[matplotlib.figure.Figure] = []
    as_data = pages._as_data

    def record(figure: matplotlib.figure.Figure) -> str:
        found.append(figure)
        return as_data(figure)

    monkeypatch.setattr(pages, "_as_data", record)
    return found


def _call(
    capsys: pytest.CaptureFixture[str], command: Any, program: str, *arguments: str
) -> dict[str, Any]:
    status = command_line.run(
        "", command.define_flags, command.main, [program, *arguments, "--format=json"]
    )
    captured = capsys.readouterr()
    fields: dict[str, Any] = json.loads(captured.out)
    assert status == (1 if fields.get("keeps_plan") is False else 0), captured.err
    return fields


def _planned(
    capsys: pytest.CaptureFixture[str], path: pathlib.Path, *arguments: str
) -> tuple[dict[str, Any], Page]:
    fields = _call(capsys, plan, "mf-plan", *_PLAN, *arguments, f"--report={path}")
    return fields, page_checks.read(path)


def _lines(figure: matplotlib.figure.Figure) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    return {
        str(line.get_label()): (
            np.asarray(line.get_xdata(), float),
            np.asarray(line.get_ydata(), float),
        )
        for line in figure.axes[0].get_lines()
    }


def _lengths(figure: matplotlib.figure.Figure) -> list[float]:
    bars: list[Any] = list(figure.axes[0].patches)
    return [float(bar.get_width()) for bar in bars]


def _numbers(texts: Sequence[str]) -> list[float]:
    return [float(text.removeprefix("~")) for text in texts]


@pytest.mark.long_cases(2)
@pytest.mark.long
@pytest.mark.short_cases(1)
@pytest.mark.parametrize(
    "arguments",
    [
        ("--separation=4",),
        pytest.param(("--separation=4", "--noise_memory_gb=1e-5"), marks=pytest.mark.long),
        pytest.param(("--sampling=fixed_size", "--num_rounds=4"), marks=pytest.mark.long),
        ("--sampling=balls_in_bins", "--num_rounds=6"),
    ],
    ids=" ".join,
)
def test_the_page_of_a_plan_has_the_numbers_of_its_json(
    capsys: pytest.CaptureFixture[str],
    cache: str,
    tmp_path: pathlib.Path,
    drawn: list[matplotlib.figure.Figure],
    arguments: tuple[str, ...],
) -> None:
    fields, page = _planned(capsys, tmp_path / "plan.html", *arguments, cache)
    assert page.faults == []
    assert [fault for figure in drawn for fault in figure_checks.faults(figure)] == []
    candidates = fields["candidates"]
    (chosen,) = (candidate for candidate in candidates if candidate["recommended"])

    ((columns, *rows),) = page.tables
    assert len(rows) == len(candidates)
    for name, field in (
        ("effective RMSE", "effective_rmse"),
        ("worst round", "max_effective_error"),
        ("RMSE", "rmse"),
        ("noise GB", "memory_gb"),
        ("disk GB", "disk_gb"),
        ("s/round", "seconds_per_round"),
    ):
        place = columns.index(name)
        written = _numbers([row[place] for row in rows])
        np.testing.assert_allclose(written, [each[field] for each in candidates], rtol=0.05)
    assert page.marked == [rows[candidates.index(chosen)]]
    assert all(
        row[0].startswith(each["mechanism"]) for row, each in zip(rows, candidates, strict=True)
    )
    assert f"Recommended: {fields['reason']}" in page.paragraphs
    for each in fields["infeasible"]:
        assert f"Infeasible: {each['mechanism']} {each['reason']}." in page.paragraphs

    # Nobody may miss what the guarantee depends on, and everything can be copied.
    assert page.conditions == [fields["steps"][-1]["notes"][0]]
    assert "only if" in page.conditions[0]
    *steps, made = page.commands
    for text, step in zip(steps, fields["steps"], strict=True):
        assert text.endswith(step["command"])
        above = text.removesuffix(step["command"]).splitlines()
        assert " ".join(line.removeprefix("# ") for line in above) == " ".join(step["notes"])
    assert made.startswith("mf-plan --num_rounds=")

    rate = fields["true_positive_rate_at_0.01"]
    (printed,) = re.findall(r"at most ([0-9.]+) % at a false positive rate of 1 %", page.text)
    assert rate <= float(printed) / 100.0 <= 1.001 * rate
    assert 0.01 < rate < math.exp(7.123456789) * 0.01 + 1.5e-3
    assert ("~" in page.text) == any(each["is_estimate"] for each in candidates)


@pytest.mark.long
def test_curves_of_a_plan_are_those_of_its_candidates(
    capsys: pytest.CaptureFixture[str],
    cache: str,
    tmp_path: pathlib.Path,
    drawn: list[matplotlib.figure.Figure],
) -> None:
    fields, _ = _planned(capsys, tmp_path / "plan.html", "--separation=4", cache)
    (chosen,) = (each for each in fields["candidates"] if each["recommended"])
    errors, by_round = drawn
    name = f"banded {chosen['num_bands']}"
    assert chosen["mechanism"] == "banded"

    assert _lengths(errors) == [each["effective_rmse"] for each in fields["candidates"]]
    names = [label.get_text() for label in errors.axes[0].get_yticklabels()]
    assert f"{name} (recommended)" in [each.replace("\n", " ") for each in names]

    rounds, deviations = _lines(by_round)[name]
    np.testing.assert_array_equal(rounds, np.arange(1, 13))
    assert math.sqrt(np.mean(deviations**2)) == pytest.approx(chosen["effective_rmse"])
    assert np.max(deviations) == pytest.approx(chosen["max_effective_error"])
    assert "identity" in _lines(by_round)


def _checkpoint(tmp_path: pathlib.Path) -> str:
    factorization = factorizations.banded(workloads.prefix_sum(12), 4)
    checkpoints.save(factorization, tmp_path / "checkpoint", participation=MinSeparation(4, 3))
    return str(tmp_path / "checkpoint")


def _reported(
    capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path, *arguments: str
) -> tuple[dict[str, Any], Page]:
    path = tmp_path / "report.html"
    checkpoint = _checkpoint(tmp_path)
    fields = _call(
        capsys, report, "mf-report", f"--checkpoint={checkpoint}", *arguments, f"--report={path}"
    )
    return fields, page_checks.read(path)


@pytest.mark.long
@pytest.mark.short_cases(1)
@pytest.mark.parametrize("ledger", [None, "kept", "broken"])
def test_the_page_of_a_report_has_the_numbers_of_its_json(
    capsys: pytest.CaptureFixture[str],
    tmp_path: pathlib.Path,
    drawn: list[matplotlib.figure.Figure],
    ledger: str | None,
) -> None:
    arguments = ["--noise_multiplier=0.7", "--delta=1e-5", "--model_size=1000"]
    if ledger is not None:
        rounds = [0, 4, 8] if ledger == "kept" else [0, 1, 2]
        (tmp_path / "ledger.csv").write_text("".join(f"<ada>,{each}\n" for each in rounds))
        arguments.append(f"--ledger={tmp_path / 'ledger.csv'}")
    fields, page = _reported(capsys, tmp_path, *arguments)
    assert page.faults == []
    assert [fault for figure in drawn for fault in figure_checks.faults(figure)] == []
    ((_, *rows),) = page.tables
    assert [name for name, _ in rows] == list(fields)
    for name, written in rows:
        assert written == command_line.readable(name, fields[name])
    assert any("zero-out adjacency" in each for each in page.conditions)
    is_warning = [each.startswith("WARNING") for each in page.conditions]
    assert is_warning == [ledger == "broken", *([False] * (len(is_warning) - 1))]
    assert (len(page.commands) == 2) == (ledger is None)
    if ledger is None:
        assert "clients_per_round=None" in page.commands[0]
        assert "A template" in page.commands[0]
        program: dict[str, Any] = {"mfa": mfa}
        exec(page.commands[0].splitlines()[-2], program)
        matrix = checkpoints.load(tmp_path / "checkpoint")
        assert program["mechanism"] == mfa.Mechanism(matrix, MinSeparation(4, 3), 0.7)
    else:
        assert fields["worst_client"] is None
        assert "ada" not in page.text


@pytest.mark.parametrize("of_flags", [(), ("--noise_multiplier=0.9",)])
def test_the_page_of_a_saved_mechanism_has_the_lines_that_load_it(
    capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path, of_flags: tuple[str, ...]
) -> None:
    """Unless flags name other noise than it has."""
    matrix, directory = factorizations.blt(6, 1), tmp_path / "saved"
    extended = mfa.Mechanism(matrix, MinSeparation(3), 0.7).extended(9)
    extended.save(directory)
    path = tmp_path / "report.html"
    flags = (f"--checkpoint={directory}", "--delta=1e-5", f"--report={path}", *of_flags)
    _call(capsys, report, "mf-report", *flags)
    line = page_checks.read(path).commands[0].splitlines()[-2]
    found: dict[str, Any] = {"mfa": mfa}
    exec(line, found)
    if not of_flags:
        assert line == f"mechanism = mfa.load({str(directory)!r})"
        assert found["mechanism"] == extended
    assert found["mechanism"].noise_multiplier == (0.9 if of_flags else extended.noise_multiplier)


def test_a_report_without_noise_states_no_guarantee(
    capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    _, page = _reported(capsys, tmp_path)
    assert page.faults == []
    (condition,) = page.conditions
    assert "--noise_multiplier, --target_epsilon or --target_rho adds" in condition
    assert "attacker" not in page.text
    assert len(page.commands) == 1


@pytest.mark.parametrize(("command", "program"), [(plan, "mf-plan"), (report, "mf-report")])
def test_pages_are_checked_before_anything_is_computed(
    capsys: pytest.CaptureFixture[str],
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    command: Any,
    program: str,
) -> None:
    old = tmp_path / "old.html"
    old.write_text("old")
    monkeypatch.setattr(checkpoints, "load_with_description", None)
    monkeypatch.setattr(plan.planning, "make", None)
    checkpoint = tmp_path / "checkpoint"
    flags: tuple[str, ...] = (*_PLAN, f"--output={checkpoint}")
    if program == "mf-report":
        flags = (f"--checkpoint={checkpoint}",)
    for path, message in (
        (tmp_path / "page.pdf", "--report must name an .html file"),
        (old, "is there already: replace it by --overwrite"),
        # No checkpoint is replaced that holds other files.
        (checkpoint / "page.html", "is not apart from the checkpoint"),
    ):
        status = command_line.run(
            "", command.define_flags, command.main, [program, *flags, f"--report={path}"]
        )
        captured = capsys.readouterr()
        assert status == 2
        assert message in captured.err
        assert captured.err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["old.html"]
    assert old.read_text() == "old"


def test_a_page_is_replaced_on_request(
    capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    (tmp_path / "report.html").write_text("old")
    _, page = _reported(capsys, tmp_path, "--overwrite")
    assert page.faults == []
