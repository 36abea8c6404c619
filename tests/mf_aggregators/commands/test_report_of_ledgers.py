"""mf-report --ledger: the guarantee of what took place."""

import json
import math
import pathlib

import pytest

from mf_aggregators import accounting, checkpoints, workloads
from mf_aggregators.commands import command_line, report
from mf_aggregators.factorizations import banded
from mf_aggregators.participation import MinSeparation

_PLANNED = ("--separation=4", "--max_participations=3", "--noise_multiplier=0.9", "--delta=1e-5")


@pytest.fixture
def checkpoint(tmp_path: pathlib.Path) -> pathlib.Path:
    factorization = banded(workloads.prefix_sum(12), 4)
    checkpoints.save(factorization, tmp_path / "banded", participation=MinSeparation(4, 3))
    return tmp_path / "banded"


def _call(
    capsys: pytest.CaptureFixture[str], checkpoint: pathlib.Path, *arguments: str
) -> tuple[int, str, str]:
    status = command_line.run(
        report.__doc__ or "",
        report.define_flags,
        report.main,
        ["mf-report", f"--checkpoint={checkpoint}", *_PLANNED, *arguments],
    )
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def _ledger(tmp_path: pathlib.Path, lines: str) -> str:
    file = tmp_path / "rounds.csv"
    file.write_text(lines)
    return f"--ledger={file}"


def test_a_run_that_kept_its_plan(
    tmp_path: pathlib.Path, checkpoint: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = _ledger(tmp_path, "ada,0\nada,4\nada,8\nbo,3\nbo,11\n")
    status, out, _ = _call(capsys, checkpoint, ledger, "--format=json")
    fields = json.loads(out)
    assert status == 0
    assert fields["keeps_plan"] is True
    assert fields["realised_separation"] == 4
    assert fields["realised_max_participations"] == 3
    assert fields["realised_sensitivity_is_exact"] is True
    assert fields["realised_epsilon"] == pytest.approx(fields["epsilon"])
    assert fields["widened_epsilon"] is None
    assert fields["worst_client"] == "ada"
    assert fields["worst_client_rounds"] == [0, 4, 8]
    # Columns of norm one, four rounds apart and so orthogonal.
    assert fields["worst_client_sensitivity"] == pytest.approx(math.sqrt(3))


def test_a_run_that_broke_its_plan(
    tmp_path: pathlib.Path, checkpoint: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = _ledger(tmp_path, "ada,0\nada,4\nada,8\nbo,3\nbo,5\ncy,11\n")
    status, out, _ = _call(capsys, checkpoint, ledger)
    assert status == 0
    assert "WARNING: the ledger breaks the schema" in out
    status, out, _ = _call(capsys, checkpoint, ledger, "--format=json")
    fields = json.loads(out)
    assert fields["keeps_plan"] is False
    assert fields["realised_sensitivity_is_exact"] is False
    assert fields["widened_epsilon"] >= fields["realised_epsilon"] > fields["epsilon"]
    assert fields["realised_epsilon"] == pytest.approx(
        accounting.epsilon(fields["realised_noise_multiplier"], 1e-5)
    )


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("ada,0\nada,0\n", "broken"),
        ("ada,12\n", "12 rounds were released"),
        ("ada\n", "line 1"),
    ],
)
def test_ledgers_that_cannot_be_true_are_refused(
    tmp_path: pathlib.Path,
    checkpoint: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
    lines: str,
    message: str,
) -> None:
    status, out, error = _call(capsys, checkpoint, _ledger(tmp_path, lines))
    assert status == 2
    assert out == ""
    assert message in error
    assert len(error.strip().splitlines()) == 1


def test_rounds_without_the_client_count_as_released(
    tmp_path: pathlib.Path, checkpoint: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a client contributed in round 0 is in the noise-hidden sums of rounds 1 to 3 too."""
    ledger = _ledger(tmp_path, "ada,0\n")
    _, out, _ = _call(capsys, checkpoint, ledger, "--format=json")
    fields = json.loads(out)
    assert fields["realised_num_rounds"] == 12
    assert fields["realised_sensitivity"] == pytest.approx(1.0)
    _, out, _ = _call(capsys, checkpoint, ledger, "--released_rounds=1", "--format=json")
    assert json.loads(out)["realised_sensitivity"] < 0.99
    _, out, _ = _call(capsys, checkpoint, ledger, "--released_rounds=1")
    assert "Only 1 of 12 rounds were released" in out


def test_the_effective_error_is_that_of_the_average(
    checkpoint: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """BandMF Eq. 11: rmse times noise multiplier over clients per round."""
    _, out, _ = _call(capsys, checkpoint, "--clients_per_round=50", "--format=json")
    fields = json.loads(out)
    assert fields["effective_rmse"] == pytest.approx(fields["rmse"] * 0.9 / 50)
    _, out, _ = _call(capsys, checkpoint, "--format=json")
    assert json.loads(out)["effective_rmse"] is None
