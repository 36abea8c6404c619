"""mf-report of a checkpoint: errors, privacy, and figures."""

import json
import math
import pathlib

import numpy as np
import pytest

from mf_aggregators import accounting, checkpoints, workloads
from mf_aggregators.participation import MinSeparation
from tests import console_commands


def _made(folder: pathlib.Path, *arguments: str) -> str:
    output = str(folder / "checkpoint")
    console_commands.call("mf-factorize", *arguments, f"--output={output}").done()
    return output


def _report(checkpoint: str, *flags: str) -> console_commands.Ended:
    return console_commands.call("mf-report", f"--checkpoint={checkpoint}", *flags)


@pytest.fixture(scope="module")
def certified(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of a banded matrix, which no test changes."""
    path = tmp_path_factory.mktemp("made")
    return _made(path, "--mechanism=banded", "--num_rounds=24", "--separation=6")


def test_report_agrees_with_factorize_and_adds_privacy(certified: str) -> None:
    fields = _report(certified, "--target_epsilon=8", "--format=json").fields()
    assert fields["sensitivity"] == pytest.approx(2.0)
    assert fields["optimality_gap"] <= 1e-5
    assert fields["sensitivity_is_exact"] is True
    assert fields["noise_multiplier"] == pytest.approx(0.65294, rel=2e-5)
    assert fields["epsilon"] == pytest.approx(8.0)
    assert fields["noise_state_floats_per_parameter"] == 5


def test_report_of_a_target_of_rho(certified: str) -> None:
    """BandMF App. K.1: rho 0.52 gives epsilon 6.69 at delta 1e-10."""
    fields = _report(certified, "--target_rho=0.52", "--delta=1e-7", "--format=json").fields()
    assert fields["zcdp_rho"] <= 0.52
    assert fields["zcdp_rho"] == pytest.approx(0.52, rel=1e-15)
    assert round(accounting.epsilon(fields["noise_multiplier"], 1e-10), 2) == 6.69


def test_report_of_momentum_with_learning_rates(tmp_path: pathlib.Path) -> None:
    rates = np.linspace(1.0, 0.1, 12)
    # As a spreadsheet saves it, with a byte order mark in front.
    np.savetxt(tmp_path / "rates.txt", rates, encoding="utf-8-sig")
    checkpoint = _made(
        tmp_path,
        "--mechanism=optimal",
        "--num_rounds=12",
        "--workload=momentum_sgd",
        "--momentum=0.5",
        f"--learning_rates={tmp_path / 'rates.txt'}",
    )
    fields = _report(checkpoint, "--format=json").fields()
    factorization = checkpoints.load(checkpoint)
    workload = workloads.momentum_sgd(12, 0.5, rates)
    assert fields["rmse"] == pytest.approx(factorization.rmse(workload, MinSeparation(12)))


def test_no_noise_is_null_in_json_and_never_nan(certified: str) -> None:
    _, out, _ = _report(certified, "--noise_multiplier=0", "--format=json")
    fields = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert fields["epsilon"] is None
    assert not math.isnan(fields["rmse"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target_epsilon=0"], "--target_epsilon must be above zero"),
        (["--target_epsilon=1", "--noise_multiplier=1"], "exclude each other"),
        (["--model=a", "--model=b"], "--model is given twice, and only the last one would count"),
        (["--target_rho=1e9"], "--target_rho=1e+09 is too large"),
        (["--noise_multiplier=-1"], "--noise_multiplier must not be negative"),
        (["--noise_multiplier=1e-9"], "--noise_multiplier=1e-09 is too small"),
        (["--noise_multiplier=1", "--delta=1"], "--delta must be above 0"),
        (["--target_epsilon=8", "--delta=1e-14"], "use a larger delta"),
        (["--participation=single", "--separation=3"], "neither"),
        (["--figure=x.jpg"], ".png"),
    ],
)
def test_bad_report_flags(certified: str, arguments: list[str], message: str) -> None:
    _report(certified, *arguments).refused(message)


def test_a_figure_makes_no_folder_and_replaces_nothing_unless_asked(
    tmp_path: pathlib.Path, certified: str
) -> None:
    mine = tmp_path / "mine.png"
    mine.write_text("mine")
    for place, message in (
        (mine, "exists already: replace it by --overwrite"),
        (tmp_path / "new" / "figure.png", "does not exist: make it"),
        (pathlib.Path(certified) / "figure.png", "overlaps with the checkpoint"),
    ):
        _report(certified, f"--figure={place}").refused(f"--figure={place} {message}")
    assert mine.read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.png"]
    new = tmp_path / "new.png"
    for flags in ([f"--figure={new}"], [f"--figure={mine}", "--overwrite"]):
        _report(certified, *flags).done()
    for place in (new, mine):
        assert place.read_bytes().startswith(b"\x89PNG")


def test_a_certificate_is_reported_for_its_own_schema_alone(tmp_path: pathlib.Path) -> None:
    """Free column norms are the best for fixed epochs, whatever schema was asked for."""
    checkpoint = _made(
        tmp_path,
        "--mechanism=banded",
        "--num_rounds=30",
        "--separation=5",
        "--max_participations=6",
        "--noequal_column_norms",
        "--relative_gap=1e-2",
    )
    schema = ["--participation=fixed_epoch", "--separation=5", "--max_participations=6"]
    fields = _report(checkpoint, *schema, "--format=json").fields()
    assert fields["sensitivity"] == pytest.approx(1.0)
    assert fields["optimality_gap"] <= 1e-2
    assert _report(checkpoint, "--separation=6", "--format=json").fields()["optimality_gap"] is None
    # Not for the schema of the errors either, which is the one that was asked for.
    fields = _report(checkpoint, "--format=json").fields()
    assert fields["participation"] == str(MinSeparation(5, 6))
    assert fields["sensitivity"] > 1.01
    assert fields["optimality_gap"] is None
