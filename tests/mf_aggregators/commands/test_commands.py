"""mf-factorize and mf-report as scripts use them."""

import importlib.util
import json
import math
import pathlib
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from absl import flags

import mf_aggregators as mfa
from mf_aggregators import accounting, checkpoints, factorizations, participation, workloads
from mf_aggregators.commands import command_line, factorize, report
from mf_aggregators.commands.flag_groups import FlagGroup
from mf_aggregators.participation import MinSeparation
from tests.refusals import refuses


def _call(
    capsys: pytest.CaptureFixture[str], command: str, *arguments: str
) -> tuple[int, str, str]:
    module = {"mf-factorize": factorize, "mf-report": report}[command]
    status = command_line.run(
        module.__doc__ or "", module.define_flags, module.main, [command, *arguments]
    )
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def _made(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    output = str(tmp_path / "checkpoint")
    defaults = () if arguments else ("--mechanism=banded", "--num_rounds=24", "--separation=6")
    status, _, _ = _call(capsys, "mf-factorize", *defaults, *arguments, f"--output={output}")
    assert status == 0
    return output


_FACTORIZE_FIELDS = {
    "mechanism",
    "num_rounds",
    "sensitivity",
    "total_error",
    "rmse",
    "max_error",
    "optimality_gap",
    "seconds",
}
_REPORT_FIELDS = {
    "sensitivity_is_exact",
    "noise_multiplier",
    "zcdp_rho",
    "zcdp_delta",
    "epsilon",
    "delta",
    "noise_state_floats_per_parameter",
}


@pytest.mark.parametrize("mechanism", ["identity", "optimal", "banded"])
def test_factorize_prints_one_json_object(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], mechanism: str
) -> None:
    bands = ["--num_bands=4"] if mechanism == "banded" else []
    status, out, _ = _call(
        capsys,
        "mf-factorize",
        f"--mechanism={mechanism}",
        "--num_rounds=16",
        f"--output={tmp_path / 'c'}",
        "--format=json",
        *bands,
    )
    assert status == 0
    fields = json.loads(out)
    assert fields.keys() >= _FACTORIZE_FIELDS
    assert fields["mechanism"] == mechanism
    assert (tmp_path / "c" / "factorization.json").exists()


@pytest.mark.parametrize(
    ("noise", "expected"),
    [
        ("--noise_multiplier=0.8", 0.8),
        ("--target_epsilon=6", accounting.noise_multiplier(6.0, 1e-5)),
        # 1 / sqrt(2 rho).
        ("--target_rho=0.5", 1.0),
    ],
)
def test_factorize_with_noise_saves_a_mechanism(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], noise: str, expected: float
) -> None:
    of_matrix = ("--mechanism=banded", "--num_rounds=8", "--num_bands=2", "--separation=3")
    of_workload = ("--workload=momentum_sgd", "--momentum=0.5")
    given = (*of_matrix, *of_workload, "--delta=1e-5", "--format=json", noise)
    output = f"--output={tmp_path / 'saved'}"
    status, out, err = _call(capsys, "mf-factorize", *given, output)
    assert status == 0, err
    fields = json.loads(out)
    mechanism = mfa.load(tmp_path / "saved")
    assert mechanism.participation == MinSeparation(3)
    assert mechanism.noise_multiplier == pytest.approx(expected, rel=1e-12)
    assert fields["noise_multiplier"] == mechanism.noise_multiplier
    assert fields["epsilon"] == accounting.epsilon(mechanism.noise_multiplier, 1e-5)
    # A report of it needs neither noise nor schema, and has the errors of its workload.
    report = ("mf-report", f"--checkpoint={tmp_path / 'saved'}", "--delta=1e-5", "--format=json")
    reported = json.loads(_call(capsys, *report)[1])
    names = ("noise_multiplier", "epsilon", "rmse", "sensitivity", "participation")
    assert [reported[name] for name in names] == [fields[name] for name in names]
    assert reported["workload"] == "momentum_sgd"


def test_report_agrees_with_factorize_and_adds_privacy(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = _made(tmp_path, capsys)
    status, out, _ = _call(
        capsys, "mf-report", f"--checkpoint={checkpoint}", "--target_epsilon=8", "--format=json"
    )
    assert status == 0
    fields = json.loads(out)
    assert fields.keys() >= _FACTORIZE_FIELDS | _REPORT_FIELDS
    assert fields["sensitivity"] == pytest.approx(2.0)
    assert fields["optimality_gap"] <= 1e-5
    assert fields["sensitivity_is_exact"] is True
    assert fields["noise_multiplier"] == pytest.approx(0.65294, rel=2e-5)
    assert fields["epsilon"] == pytest.approx(8.0)
    assert fields["noise_state_floats_per_parameter"] == 5


def test_report_of_a_target_of_rho(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """BandMF App. K.1: rho 0.52 gives epsilon 6.69 at delta 1e-10."""
    checkpoint = _made(tmp_path, capsys)
    page = tmp_path / "report.html"
    _, out, _ = _call(
        capsys,
        *("mf-report", f"--checkpoint={checkpoint}", "--target_rho=0.52", "--delta=1e-7"),
        *(f"--report={page}", "--format=json"),
    )
    fields = json.loads(out)
    assert fields["zcdp_rho"] <= 0.52
    assert fields["zcdp_rho"] == pytest.approx(0.52, rel=1e-15)
    assert round(fields["epsilon_at_delta_1e-10"], 2) == 6.69
    for delta in (1e-5, 1e-6, 1e-8):
        found = accounting.epsilon(fields["noise_multiplier"], delta)
        assert fields[f"epsilon_at_delta_{delta:g}"] == found
    text = page.read_text(encoding="utf-8")
    assert "rho (approximate zCDP)" in text
    # Of the plan: the four deltas and that of the flags.
    assert text.count('<th scope="row">planned</th>') == 5


def test_report_under_another_schema(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = _made(tmp_path, capsys)
    _, out, _ = _call(
        capsys, "mf-report", f"--checkpoint={checkpoint}", "--separation=2", "--format=json"
    )
    fields = json.loads(out)
    # The certificate is for the schema that the matrix was made for.
    assert fields["optimality_gap"] is None
    assert fields["sensitivity_is_exact"] is False
    assert fields["sensitivity"] > 2.0


def test_report_of_momentum_with_learning_rates(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rates = np.linspace(1.0, 0.1, 12)
    # As a spreadsheet saves it, with a byte order mark in front.
    np.savetxt(tmp_path / "rates.txt", rates, encoding="utf-8-sig")
    checkpoint = _made(
        tmp_path,
        capsys,
        "--mechanism=optimal",
        "--num_rounds=12",
        "--workload=momentum_sgd",
        "--momentum=0.5",
        f"--learning_rates={tmp_path / 'rates.txt'}",
    )
    _, out, _ = _call(capsys, "mf-report", f"--checkpoint={checkpoint}", "--format=json")
    factorization = checkpoints.load(checkpoint)
    workload = workloads.momentum_sgd(12, 0.5, rates)
    assert json.loads(out)["rmse"] == pytest.approx(factorization.rmse(workload, MinSeparation(12)))


@pytest.mark.parametrize(
    ("flags", "description"),
    [
        (
            ["--weight_decay=0.25", "--average_last=3"],
            {"name": "momentum_sgd", "weight_decay": 0.25, "average_last": 3},
        ),
        (["--average_decay=0.5"], {"name": "momentum_sgd", "average_decay": 0.5}),
        (
            ["--workload=toeplitz", "--first_column=numbers.txt"],
            {"name": "toeplitz", "first_column": [1.0, 0.5, 0.25]},
        ),
    ],
    ids=["decay and mean", "moving average", "coefficients"],
)
def test_every_workload_can_be_named_by_flags(
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    flags: list[str],
    description: dict[str, Any],
) -> None:
    monkeypatch.chdir(tmp_path)
    np.savetxt("numbers.txt", [1.0, 0.5, 0.25])
    checkpoint = _made(
        tmp_path,
        capsys,
        "--mechanism=banded",
        "--num_bands=2",
        "--num_rounds=3",
        "--separation=3",
        "--workload=momentum_sgd",
        *flags,
    )
    _, out, _ = _call(capsys, "mf-report", f"--checkpoint={checkpoint}", "--format=json")
    matrix = workloads.describe(description, 3).matrix()
    expected = checkpoints.load(checkpoint).rmse(matrix, MinSeparation(3))
    assert json.loads(out)["rmse"] == pytest.approx(expected)
    # What a report is told counts in place of what the checkpoint was made for.
    _, out, _ = _call(
        capsys, "mf-report", f"--checkpoint={checkpoint}", "--workload=prefix_sum", "--format=json"
    )
    assert json.loads(out)["rmse"] != pytest.approx(expected)


def test_report_draws_a_figure(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = _made(tmp_path, capsys)
    figure = tmp_path / "figure.png"
    status, _, _ = _call(capsys, "mf-report", f"--checkpoint={checkpoint}", f"--figure={figure}")
    assert status == 0
    assert figure.read_bytes().startswith(b"\x89PNG")


@pytest.mark.long
def test_report_writes_a_trade_off_curve(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint, curve = _made(tmp_path, capsys), tmp_path / "curve.json"
    flags = [f"--checkpoint={checkpoint}", "--delta=1e-5", f"--trade_off={curve}"]
    for noise, message in (("", "--trade_off needs"), ("--noise_multiplier=0", "noise_multiplier")):
        status, out, err = _call(capsys, "mf-report", *flags, *([noise] if noise else []))
        assert (status, out) == (2, "")
        assert message in err
        assert not curve.exists()
    noise = "--noise_multiplier=2"
    status, out, _ = _call(capsys, "mf-report", *flags, noise, "--format=json")
    fields = json.loads(out)
    assert (status, fields["trade_off"]) == (0, str(curve))
    found = json.loads(curve.read_text())
    # Its false positive rates are among those of the curve of the guarantee.
    rate = np.interp(0.01, found["false_positive_rate"], found["false_negative_rate"])
    assert 1.0 - rate == pytest.approx(fields["true_positive_rate_at_0.01"], abs=1e-3)
    status, _, err = _call(capsys, "mf-report", *flags, noise)
    assert status == 2
    assert "--overwrite" in err
    status, _, _ = _call(capsys, "mf-report", *flags, noise, "--overwrite")
    assert status == 0


def test_no_noise_is_null_in_json_and_never_nan(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = _made(tmp_path, capsys)
    _, out, _ = _call(
        capsys, "mf-report", f"--checkpoint={checkpoint}", "--noise_multiplier=0", "--format=json"
    )
    fields = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert fields["epsilon"] is None
    assert not math.isnan(fields["rmse"])


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        ("mf-factorize", [], "--mechanism, --num_rounds and --output are required"),
        ("mf-factorize", ["--mechanism=magic"], "--mechanism=magic"),
        ("mf-factorize", ["--mechanism=identity", "--num_rounds=0"], "num_rounds"),
        ("mf-factorize", ["--mechanism=identity", "--num_rounds=ten"], "ten"),
        ("mf-factorize", ["--mechanism=identity", "--num_rounds=5", "--num_bands=2"], "belongs"),
        ("mf-factorize", ["--mechanism=banded", "--num_rounds=5"], "needs --num_bands"),
        ("mf-factorize", ["--mechanism=banded", "--num_rounds=5", "--num_bands=6"], "at most"),
        ("mf-factorize", ["--mechanism=optimal", "--num_rounds=5", "--separation=2"], "single"),
        ("mf-factorize", ["--mechanism=optimal", "--num_rounds=5", "--momentum=0.9"], "belong"),
        (
            "mf-factorize",
            ["--mechanism=optimal", "--num_rounds=5", "--workload=momentum_sgd", "--momentum=1"],
            "momentum must be",
        ),
        (
            "mf-factorize",
            [
                "--mechanism=optimal",
                "--num_rounds=5",
                "--workload=momentum_sgd",
                "--learning_rates=nowhere.txt",
            ],
            "nowhere.txt",
        ),
        (
            "mf-factorize",
            ["--mechanism=optimal", "--num_rounds=5", "--workload=toeplitz"],
            "--first_column",
        ),
        (
            "mf-factorize",
            ["--mechanism=optimal", "--num_rounds=5", "--first_column=x"],
            "--workload=toeplitz",
        ),
        (
            "mf-factorize",
            ["--mechanism=optimal", "--num_rounds=5", "--weight_decay=0.1"],
            "--workload=momentum_sgd",
        ),
        ("mf-factorize", ["--num_rounds=5", "--participation=min_sep"], "needs --separation"),
        ("mf-factorize", ["--num_rounds=5", "--max_participations=2"], "needs --separation"),
        ("mf-factorize", ["--num_rounds=5", "--target_epsilon=8"], "--separation or --partic"),
        ("mf-factorize", ["--num_rounds=5", "--separation=2", "--delta=0.1"], "--delta belongs"),
        (
            "mf-factorize",
            ["--num_rounds=5", "--separation=2", "--target_epsilon=8", "--noise_multiplier=1"],
            "exclude each other",
        ),
        (
            "mf-factorize",
            ["--num_rounds=5", "--separation=2", "--noise_multiplier=nan"],
            "--noise_multiplier",
        ),
        ("mf-factorize", ["something"], "unexpected argument"),
        ("mf-factorize", ["--nonsense=1"], "nonsense"),
        ("mf-report", [], "--checkpoint or --verify is required"),
        (
            "mf-report",
            ["--checkpoint=./nowhere"],
            "--checkpoint: nowhere/factorization.json cannot be read",
        ),
        ("mf-report", ["--checkpoint=nowhere", "--figure=x.jpg"], ".png"),
        ("mf-report", ["--checkpoint=nowhere", "--trade_off=x.csv"], ".json"),
    ],
)
def test_bad_input_is_one_clear_line_and_status_2(
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    if command == "mf-factorize" and arguments:
        arguments = [*arguments, "--output=c"]
        if not any(argument.startswith("--mechanism") for argument in arguments):
            arguments.append("--mechanism=identity")
    status, out, err = _call(capsys, command, *arguments)
    assert status == 2
    assert out == ""
    line = err.strip().splitlines()[-1]
    assert line.startswith(f"{command}: ")
    assert message in line
    assert "Traceback" not in err
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target_epsilon=0"], "--target_epsilon must be above zero"),
        (["--target_epsilon=1e30"], "--target_epsilon: no noise multiplier"),
        (["--target_epsilon=1", "--noise_multiplier=1"], "exclude each other"),
        (["--model=a", "--model=b"], "--model is given twice, and the first one would be lost"),
        (["--target_epsilon=1", "--target_rho=1"], "exclude each other"),
        (["--target_rho=0"], "--target_rho must be above zero"),
        (["--target_rho=nan"], "--target_rho must be finite"),
        (["--target_rho=1e-320"], "--target_rho"),
        (["--target_rho=1e9"], "--target_rho=1e+09 is too large"),
        (["--target_rho=100"], "--target_rho: so little noise"),
        (["--target_rho=1e308"], "--target_rho=1e+308 is too large"),
        (["--noise_multiplier=-1"], "--noise_multiplier must not be negative"),
        (["--noise_multiplier=0.1"], "--noise_multiplier: so little noise"),
        (["--noise_multiplier=1e-9"], "--noise_multiplier=1e-09 is too small"),
        (["--noise_multiplier=1", "--delta=1"], "--delta must be above 0"),
        (["--target_epsilon=8", "--delta=1e-14"], "Use a larger delta"),
        (["--participation=single", "--separation=3"], "neither"),
        (["--participation=fixed_epoch", "--separation=3"], "--max_participations"),
    ],
)
def test_bad_report_flags(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    checkpoint = _made(tmp_path, capsys)
    status, out, err = _call(capsys, "mf-report", f"--checkpoint={checkpoint}", *arguments)
    assert (status, out) == (2, "")
    assert message in err
    assert len(err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("delta must be finite.", "--delta must be finite."),
        ("rounds=3 is above 2.", "--rounds=3 is above 2."),
        ("folder is of another run: choose --first.", "folder is of another run: choose --first."),
        # What was not given, or is no parameter, is not named.
        ("epsilon must be finite.", "epsilon must be finite."),
        ("delta is too large.", "delta is too large."),
        ("folder/a.csv, line 1: x", "--first: folder/a.csv, line 1: x"),
        ("folder: x", "--second: folder: x"),
        ("folder/b.csv: x", "--second: folder/b.csv: x"),
        ("folders: x", "folders: x"),
        ("d.bin cannot be read", "--others: d.bin cannot be read"),
        ("word cannot be read", "word cannot be read"),
    ],
)
def test_a_message_of_the_library_gets_the_flag_that_it_is_about(
    capsys: pytest.CaptureFixture[str], message: str, line: str
) -> None:
    def define(values: flags.FlagValues) -> None:
        group = FlagGroup(values, "Things")
        group.number("delta", "A number.")
        group.number("epsilon", "A number.", 1.0)
        group.integer("rounds", "An integer.")
        group.path("first", "A file.")
        group.path("second", "A folder.")
        group.path("unused", "A file.", "word")
        group.repeated_paths("others", "Files.")
        group.string("text", "A text.")

    def main(values: flags.FlagValues) -> None:
        raise ValueError(message)

    given = ("--delta=1", "--rounds=3", "--first=./folder/a.csv", "--second=folder/")
    words = ["program", *given, "--others=c", "--others=d.bin", "--text=word"]
    assert command_line.run("", define, main, words) == 2
    assert capsys.readouterr().err == f"program: {line}\n"


def test_a_figure_makes_no_folder_and_replaces_nothing_unless_asked(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = _made(tmp_path, capsys)
    mine = tmp_path / "mine.png"
    mine.write_text("mine")
    for place, message in (
        (mine, "is there already: replace it by --overwrite"),
        (tmp_path / "new" / "figure.png", "is in no directory that exists: make it"),
        (pathlib.Path(checkpoint) / "figure.png", "is not apart from the checkpoint"),
    ):
        status, out, err = _call(
            capsys, "mf-report", f"--checkpoint={checkpoint}", f"--figure={place}"
        )
        assert (status, out) == (2, "")
        assert f"--figure={place} {message}" in err
    assert mine.read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "mine.png"]
    status, _, err = _call(
        capsys, "mf-report", f"--checkpoint={checkpoint}", f"--figure={mine}", "--overwrite"
    )
    assert status == 0, err
    assert mine.read_bytes().startswith(b"\x89PNG")


# A command line of each mechanism, beside the number of rounds, and the flags it takes.
_MECHANISMS: dict[str, tuple[list[str], set[str]]] = {
    "identity": ([], set()),
    "tree": (["--decoder=full"], {"decoder"}),
    "optimal": (
        ["--participation=fixed_epoch", "--separation=4", "--max_participations=3"],
        {"equal_column_norms", "pattern_entries", "relative_gap", "error"},
    ),
    "banded": (
        ["--separation=4", "--max_participations=2", "--error=max"],
        {"num_bands", "equal_column_norms", "relative_gap", "error"},
    ),
    "toeplitz": (
        ["--num_bands=4", "--equal_column_norms", "--separation=4"],
        {"num_bands", "equal_column_norms", "coefficients", "error"},
    ),
    "blt": (["--num_buffers=2", "--error=max"], {"num_buffers", "accuracy", "error"}),
    "banded_inverse": (
        ["--num_bands=3", "--coefficients=square_root"],
        {"num_bands", "coefficients", "error"},
    ),
    "structured": (
        ["--num_diagonals=2", "--rank=2"],
        {"num_diagonals", "rank", "base_checkpoint"},
    ),
}
_VALUES = {
    "decoder": "online",
    "equal_column_norms": "true",
    "pattern_entries": "any",
    "relative_gap": "0.001",
    "num_bands": "2",
    "coefficients": "square_root",
    "error": "mean",
    "num_buffers": "1",
    "accuracy": "0.01",
    "num_diagonals": "1",
    "rank": "1",
    "base_checkpoint": "somewhere",
}


@pytest.mark.long
@pytest.mark.short_cases(1)
@pytest.mark.parametrize(("accuracy", "num_buffers"), [("0.1", 1), ("1e-6", 2)])
def test_blt_chooses_its_buffers(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], accuracy: str, num_buffers: int
) -> None:
    status, _, err = _call(
        capsys,
        "mf-factorize",
        *("--mechanism=blt", "--num_rounds=8", f"--accuracy={accuracy}"),
        f"--output={tmp_path / 'c'}",
    )
    assert status == 0, err
    parameters = checkpoints.load(tmp_path / "c").parameters
    assert (parameters["num_buffers"], parameters["accuracy"]) == (num_buffers, float(accuracy))


def test_an_error_may_be_a_file_of_weights(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "weights.txt"
    weights = np.geomspace(1.0, 4.0, 8)
    np.savetxt(file, weights)
    common = ("mf-factorize", "--num_rounds=8", f"--output={tmp_path / 'c'}", "--format=json")
    status, out, err = _call(
        capsys, *common, "--mechanism=banded", "--num_bands=3", f"--error={file}"
    )
    assert status == 0, err
    fields = json.loads(out)
    found = checkpoints.load(tmp_path / "c")
    wanted = factorizations.banded(8, 3, error=np.loadtxt(file))
    assert found.has_same_matrix(wanted)
    assert wanted.participation is not None
    rows = wanted.per_round_variance(8, wanted.participation)
    assert fields["weighted_error"] == pytest.approx(np.sqrt(np.average(rows, weights=weights)))
    np.savetxt(file, weights[1:])
    for error, message in (
        (file, "(7,)"),
        (tmp_path / "none", "cannot be read as mean, max or a file of numbers"),
        (tmp_path, "cannot be read as mean, max or a file of numbers"),
    ):
        status, out, err = _call(
            capsys, *common, "--mechanism=optimal", f"--error={error}", "--overwrite"
        )
        assert (status, out) == (2, "")
        assert message in err
        assert len(err.strip().splitlines()) == 1


@pytest.mark.parametrize("mechanism", _MECHANISMS)
def test_every_mechanism_is_made_reported_and_loaded(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], mechanism: str
) -> None:
    status, out, err = _call(
        capsys,
        "mf-factorize",
        f"--mechanism={mechanism}",
        "--num_rounds=12",
        f"--output={tmp_path / 'c'}",
        "--format=json",
        *_MECHANISMS[mechanism][0],
    )
    assert status == 0, err
    fields = json.loads(out)
    assert fields.keys() >= _FACTORIZE_FIELDS
    assert (fields["mechanism"], fields["num_rounds"]) == (mechanism, 12)
    assert (fields["optimality_gap"] is None) == (mechanism not in ("optimal", "banded"))
    assert "warning" not in err
    status, out, _ = _call(capsys, "mf-report", f"--checkpoint={tmp_path / 'c'}", "--format=json")
    assert status == 0
    reported = json.loads(out)
    assert reported.keys() >= _FACTORIZE_FIELDS | _REPORT_FIELDS
    for name in _FACTORIZE_FIELDS - {"seconds"}:
        assert reported[name] == pytest.approx(fields[name]), name
    assert reported["rmse"] >= reported["rmse_lower_bound"]
    assert reported["max_error"] >= reported["max_error_lower_bound"]
    assert reported["sensitivity_is_exact"] is True
    factorization, description = checkpoints.load_with_description(tmp_path / "c")
    schema = participation.from_dict(description["errors"]["participation"])
    assert str(schema) == fields["participation"]
    assert factorization.rmse(workloads.prefix_sum(12), schema) == pytest.approx(fields["rmse"])


@pytest.mark.parametrize("mechanism", ["optimal", "banded"])
@pytest.mark.parametrize(("error", "named"), [("mean", None), ("max", "max_error")])
def test_a_gap_says_which_error_it_is_of(
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
    mechanism: str,
    error: str,
    named: str | None,
) -> None:
    checkpoint, own = tmp_path / "c", ["--num_bands=12"] if mechanism == "banded" else []
    status, out, err = _call(
        capsys,
        *("mf-factorize", f"--mechanism={mechanism}", "--num_rounds=12", f"--error={error}"),
        *(f"--output={checkpoint}", "--format=json", *own),
    )
    assert status == 0, err
    made = json.loads(out)
    _, out, _ = _call(capsys, "mf-report", f"--checkpoint={checkpoint}", "--format=json")
    reported = json.loads(out)
    for fields in (made, reported):
        assert fields.get("optimality_gap_of") == named
        # It is of that error: no other matrix of the class has so much less of it.
        others = (factorizations.optimal(12), factorizations.optimal(12, error="max"))
        for other in others:
            least = fields[named or "rmse"] ** 2 / (1.0 + fields["optimality_gap"])
            errors = other.errors(12, participation.SingleParticipation()).to_dict()
            assert errors[named or "rmse"] ** 2 >= least
    # Of another schema, nothing is certified.
    _, out, _ = _call(
        capsys, "mf-report", f"--checkpoint={checkpoint}", "--separation=2", "--format=json"
    )
    assert json.loads(out)["optimality_gap"] is None
    assert "optimality_gap_of" not in json.loads(out)


@pytest.mark.parametrize("mechanism", _MECHANISMS)
def test_flags_of_other_mechanisms_are_refused(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], mechanism: str
) -> None:
    arguments, own = _MECHANISMS[mechanism]
    for flag in _VALUES.keys() - own:
        status, out, err = _call(
            capsys,
            "mf-factorize",
            f"--mechanism={mechanism}",
            "--num_rounds=12",
            f"--output={tmp_path / 'c'}",
            f"--{flag}={_VALUES[flag]}",
            *arguments,
        )
        assert (status, out) == (2, ""), flag
        assert len(err.strip().splitlines()) == 1
        assert f"--{flag} belongs to" in err
        assert f"not to --mechanism={mechanism}" in err
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mechanism=banded"], "--num_bands or --separation"),
        (["--mechanism=blt", "--accuracy=-1"], "accuracy"),
        (["--mechanism=banded_inverse"], "--num_bands"),
        (["--mechanism=structured", "--rank=1"], "--num_diagonals"),
        (["--mechanism=structured", "--num_diagonals=1"], "--rank"),
        (["--mechanism=structured", "--num_diagonals=1", "--rank=1", "--base_checkpoint=x"], "x/"),
        (["--mechanism=optimal", "--participation=fixed_epoch", "--separation=2"], "--max_part"),
        (["--mechanism=optimal", "--relative_gap=nan"], "relative_gap"),
        (["--mechanism=toeplitz", "--num_bands=13"], "num_bands"),
        (["--mechanism=banded_inverse", "--num_bands=0"], "num_bands"),
        (["--mechanism=blt", "--num_buffers=9"], "num_buffers"),
        (["--mechanism=tree", "--decoder=best"], "decoder"),
        (["--mechanism=identity", "--separation=4", "--max_participations=4"], "at most 3 fit"),
        (
            ["--mechanism=structured", "--num_diagonals=1", "--rank=1", "--separation=4"],
            "--base_checkpoint",
        ),
        (["--mechanism=structured", "--num_diagonals=0", "--rank=1"], "--num_diagonals must be"),
    ],
)
def test_missing_and_impossible_flags_are_refused(
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    status, out, err = _call(capsys, "mf-factorize", "--num_rounds=12", "--output=c", *arguments)
    assert (status, out) == (2, "")
    assert message in err.strip().splitlines()[-1]
    assert "Traceback" not in err
    assert not (tmp_path / "c").exists()


@pytest.mark.short_cases(3)
@pytest.mark.parametrize(
    "arguments",
    [
        ["--mechanism=identity"],
        ["--mechanism=tree"],
        ["--mechanism=tree", "--decoder=full"],
        ["--mechanism=toeplitz", "--num_bands=8", "--coefficients=square_root"],
        ["--mechanism=toeplitz", "--num_bands=4", "--coefficients=square_root",
         "--equal_column_norms"],
        ["--mechanism=blt", "--num_buffers=2"],
        ["--mechanism=banded_inverse", "--num_bands=4", "--coefficients=square_root"],
    ],
    ids=lambda arguments: " ".join(arguments),
)  # fmt: skip
def test_a_hundred_thousand_rounds_need_no_dense_matrix(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    status, out, err = _call(
        capsys,
        "mf-factorize",
        "--num_rounds=100000",
        f"--output={tmp_path / 'c'}",
        "--format=json",
        *arguments,
    )
    assert status == 0, err
    fields = json.loads(out)
    assert fields["rmse"] >= fields["rmse_lower_bound"]
    assert fields["max_error"] >= fields["max_error_lower_bound"] >= fields["rmse_lower_bound"]
    # Independent noise has the error of half of all rounds, far above what correlation gives.
    independent = math.sqrt(100001 / 2)
    if "--mechanism=identity" in arguments:
        assert fields["rmse"] == pytest.approx(independent, rel=1e-9)
    else:
        assert fields["rmse"] < 0.6 * independent
    status, out, _ = _call(
        capsys,
        "mf-report",
        f"--checkpoint={tmp_path / 'c'}",
        "--target_epsilon=8",
        "--format=json",
    )
    assert status == 0
    assert json.loads(out)["rmse"] == pytest.approx(fields["rmse"], rel=1e-12)
    assert sum(path.stat().st_size for path in (tmp_path / "c").iterdir()) < 10_000


@pytest.mark.parametrize(
    "arguments",
    [
        ["--mechanism=optimal"],
        ["--mechanism=structured", "--num_diagonals=4", "--rank=2"],
        ["--mechanism=tree", "--workload=momentum_sgd"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_dense_matrices_that_do_not_fit_are_refused(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    status, out, err = _call(
        capsys,
        "mf-factorize",
        "--num_rounds=1000000",
        f"--output={tmp_path / 'c'}",
        *arguments,
    )
    assert (status, out) == (2, "")
    assert len(err.strip().splitlines()) == 1
    assert "1000000 rounds" in err
    assert "memory" in err or "dense matrix" in err
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("contents", ["", "1 2\n3 4\n"])
def test_a_file_that_holds_no_learning_rates_is_one_clear_line(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], contents: str
) -> None:
    rates = tmp_path / "rates.txt"
    rates.write_text(contents)
    status, out, err = _call(
        capsys,
        "mf-factorize",
        "--mechanism=identity",
        "--num_rounds=4",
        f"--output={tmp_path / 'c'}",
        "--workload=momentum_sgd",
        f"--learning_rates={rates}",
    )
    assert (status, out) == (2, "")
    assert len(err.strip().splitlines()) == 1
    assert "one number on each line" in err


def test_a_certificate_is_reported_for_its_own_schema_alone(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Free column norms are the best for fixed epochs, whatever schema was asked for."""
    checkpoint = _made(
        tmp_path,
        capsys,
        "--mechanism=banded",
        "--num_rounds=30",
        "--separation=5",
        "--max_participations=4",
        "--noequal_column_norms",
        "--relative_gap=1e-2",
    )
    schema = ["--participation=fixed_epoch", "--separation=5", "--max_participations=4"]
    _, out, _ = _call(capsys, "mf-report", f"--checkpoint={checkpoint}", *schema, "--format=json")
    fields = json.loads(out)
    assert fields["sensitivity"] == pytest.approx(1.0)
    assert fields["optimality_gap"] <= 1e-2
    _, out, _ = _call(
        capsys, "mf-report", f"--checkpoint={checkpoint}", "--separation=6", "--format=json"
    )
    assert json.loads(out)["optimality_gap"] is None


def test_a_certificate_is_not_reported_for_the_schema_of_the_errors(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = _made(
        tmp_path,
        capsys,
        "--mechanism=banded",
        "--num_rounds=30",
        "--separation=5",
        "--max_participations=4",
        "--noequal_column_norms",
        "--relative_gap=1e-2",
    )
    _, out, _ = _call(capsys, "mf-report", f"--checkpoint={checkpoint}", "--format=json")
    fields = json.loads(out)
    assert fields["participation"] == str(MinSeparation(5, 4))
    assert fields["sensitivity"] > 1.01
    assert fields["optimality_gap"] is None


def test_help_lists_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = _call(capsys, "mf-factorize", "--helpfull")
    assert status == 0
    for flag in ("mechanism", "num_rounds", "output", "format", "learning_rates", "separation"):
        assert f"--{flag}:" in out


@pytest.mark.parametrize("module", ["factorize", "report"])
def test_commands_run_as_modules(module: str) -> None:
    finished = subprocess.run(
        [sys.executable, "-m", f"mf_aggregators.commands.{module}", "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "Flags:" in finished.stdout
    assert finished.stderr == ""


@pytest.mark.parametrize(
    ("installed", "missing"),
    [
        ({"tensorflow_federated", "tensorflow_privacy", "tensorflow", "psutil"}, None),
        ({"tensorflow_federated", "tensorflow", "psutil"}, "tensorflow_privacy"),
        ({"tensorflow_privacy", "tensorflow", "psutil"}, "tensorflow_federated"),
    ],
)
def test_a_missing_package_of_the_extra_is_named(
    installed: set[str], missing: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name in installed or None)
    if missing is None:
        command_line.check_extra("a run")
        return
    with refuses(missing, error=command_line.CommandError):
        command_line.check_extra("a run")
