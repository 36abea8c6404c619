"""mf-factorize as scripts use it: what it makes, what it prints of it, and what it refuses."""

import functools
import pathlib

import numpy as np
import pytest

import mf_aggregators as mfa
from mf_aggregators import accounting, checkpoints, factorizations, inputs, workloads
from mf_aggregators.participation import MinSeparation, Participation, SingleParticipation
from tests import console_commands

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
    tmp_path: pathlib.Path, noise: str, expected: float
) -> None:
    of_matrix = ("--mechanism=banded", "--num_rounds=8", "--num_bands=2", "--separation=3")
    of_workload = ("--workload=momentum_sgd", "--momentum=0.5")
    given = (*of_matrix, *of_workload, "--delta=1e-5", "--format=json", noise)
    output = f"--output={tmp_path / 'saved'}"
    fields = console_commands.call("mf-factorize", *given, output).fields()
    mechanism = mfa.load(tmp_path / "saved")
    assert mechanism.participation == MinSeparation(3)
    assert mechanism.noise_multiplier == pytest.approx(expected, rel=1e-12)
    assert fields["noise_multiplier"] == mechanism.noise_multiplier
    assert fields["epsilon"] == mechanism.guarantee(1e-5).epsilon
    # A report of it needs neither noise nor schema, and has the errors of its workload.
    report = ("mf-report", f"--checkpoint={tmp_path / 'saved'}", "--delta=1e-5", "--format=json")
    reported = console_commands.call(*report).fields()
    names = ("noise_multiplier", "epsilon", "rmse", "sensitivity", "participation")
    assert [reported[name] for name in names] == [fields[name] for name in names]
    assert reported["workload"] == "momentum_sgd"


# A command line of each mechanism, beside the number of rounds, and the flags it takes.
_MECHANISMS: dict[str, tuple[list[str], set[str]]] = {
    "identity": ([], set()),
    "tree": (["--decoder=full"], {"decoder"}),
    "optimal": (
        ["--participation=fixed_epoch", "--separation=4", "--max_participations=3"],
        {"equal_column_norms", "relative_gap", "error"},
    ),
    "banded": (
        ["--separation=4", "--max_participations=2", "--error=max"],
        {"num_bands", "equal_column_norms", "relative_gap", "error"},
    ),
    "toeplitz": (
        ["--num_bands=4", "--equal_column_norms", "--separation=4"],
        {"num_bands", "equal_column_norms", "coefficients", "error"},
    ),
    "blt": (
        ["--num_buffers=2", "--error=max"],
        {"num_buffers", "accuracy", "equal_column_norms", "error"},
    ),
    "banded_inverse": (
        ["--num_bands=3", "--coefficients=square_root"],
        {"num_bands", "coefficients", "equal_column_norms", "error"},
    ),
    "structured": (
        ["--num_diagonals=2", "--rank=2"],
        {"num_diagonals", "rank", "base_checkpoint"},
    ),
}
_VALUES = {
    "decoder": "online",
    "equal_column_norms": "true",
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


def test_an_error_may_be_a_file_of_weights(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "weights.txt"
    weights = np.geomspace(1.0, 4.0, 8)
    np.savetxt(file, weights)
    common = ("mf-factorize", "--num_rounds=8", f"--output={tmp_path / 'c'}", "--format=json")
    fields = console_commands.call(
        *common, "--mechanism=banded", "--num_bands=3", f"--error={file}"
    ).fields()
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
        console_commands.call(
            *common, "--mechanism=optimal", f"--error={error}", "--overwrite"
        ).refused(message)


@pytest.mark.parametrize("mechanism", _MECHANISMS)
def test_every_mechanism_is_made_reported_and_loaded(
    tmp_path: pathlib.Path, mechanism: str
) -> None:
    given = (f"--mechanism={mechanism}", "--num_rounds=12", f"--output={tmp_path / 'c'}")
    ended = console_commands.call(
        "mf-factorize", *given, "--format=json", *_MECHANISMS[mechanism][0]
    )
    fields = ended.fields()
    assert fields.keys() >= _FACTORIZE_FIELDS
    assert (fields["mechanism"], fields["num_rounds"]) == (mechanism, 12)
    assert (fields["optimality_gap"] is None) == (mechanism not in ("optimal", "banded"))
    assert "warning" not in ended.errors
    reported = console_commands.call(
        "mf-report", f"--checkpoint={tmp_path / 'c'}", "--format=json"
    ).fields()
    assert reported.keys() >= _FACTORIZE_FIELDS | _REPORT_FIELDS
    for name in _FACTORIZE_FIELDS - {"seconds"}:
        assert reported[name] == pytest.approx(fields[name]), name
    assert reported["rmse"] >= reported["rmse_lower_bound"]
    assert reported["max_error"] >= reported["max_error_lower_bound"]
    assert reported["sensitivity_is_exact"] is True
    factorization, description = checkpoints.load_with_description(tmp_path / "c")
    schema = Participation.from_dict(inputs.part(description, dict, "errors", "participation"))
    assert str(schema) == fields["participation"]
    assert factorization.rmse(workloads.prefix_sum(12), schema) == pytest.approx(fields["rmse"])


@pytest.mark.parametrize("mechanism", ["optimal", "banded"])
@pytest.mark.parametrize(("error", "named"), [("mean", None), ("max", "max_error")])
def test_a_gap_says_which_error_it_is_of(
    tmp_path: pathlib.Path,
    mechanism: str,
    error: str,
    named: str | None,
) -> None:
    checkpoint, own = tmp_path / "c", ["--num_bands=12"] if mechanism == "banded" else []
    made = console_commands.call(
        *("mf-factorize", f"--mechanism={mechanism}", "--num_rounds=12", f"--error={error}"),
        *(f"--output={checkpoint}", "--format=json", *own),
    ).fields()
    report = functools.partial(
        console_commands.call, "mf-report", f"--checkpoint={checkpoint}", "--format=json"
    )
    for fields in (made, report().fields()):
        assert fields.get("optimality_gap_of") == named
        # It is of that error: no other matrix of the class has so much less of it.
        others = (factorizations.optimal(12), factorizations.optimal(12, error="max"))
        for other in others:
            least = fields[named or "rmse"] ** 2 / (1.0 + fields["optimality_gap"])
            errors = other.errors(12, SingleParticipation()).to_dict()
            assert errors[named or "rmse"] ** 2 >= least
    # Of another schema, nothing is certified.
    of_two = report("--separation=2").fields()
    assert of_two["optimality_gap"] is None
    assert "optimality_gap_of" not in of_two


@pytest.mark.parametrize("mechanism", _MECHANISMS)
def test_flags_of_other_mechanisms_are_refused(tmp_path: pathlib.Path, mechanism: str) -> None:
    arguments, own = _MECHANISMS[mechanism]
    for flag in _VALUES.keys() - own:
        console_commands.call(
            "mf-factorize",
            f"--mechanism={mechanism}",
            "--num_rounds=12",
            f"--output={tmp_path / 'c'}",
            f"--{flag}={_VALUES[flag]}",
            *arguments,
        ).refused(f"--{flag} belongs to", f"not to --mechanism={mechanism}")
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "--mechanism, --num_rounds and --output are required"),
        ("--mechanism=banded", "--num_bands or --separation"),
        ("--mechanism=optimal --separation=2", "single"),
        ("--momentum=0.5", "--workload=momentum_sgd"),
        ("--participation=min_sep", "needs --separation"),
        ("--target_epsilon=8", "--separation or --partic"),
        ("--mechanism=structured --rank=1", "--num_diagonals"),
        ("--mechanism=structured --num_diagonals=1 --rank=1 --base_checkpoint=x", "x/"),
        ("--mechanism=structured --num_diagonals=1 --rank=1 --separation=4", "FixedEpochOrder"),
        ("--mechanism=optimal --participation=fixed_epoch --separation=2", "--max_part"),
        ("--separation=4 --max_participations=4", "at most 3 fit"),
    ],
)
def test_missing_and_impossible_flags_are_refused(
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: str,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    needed = "--mechanism=identity --num_rounds=12 --output=c" if arguments else ""
    given = (*needed.split(), *arguments.split())
    ended = console_commands.call("mf-factorize", *given)
    assert ended.refused(message, has_begun=True).startswith("mf-factorize: ")
    assert "Traceback" not in ended.errors
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--mechanism=optimal"],
        ["--mechanism=tree", "--workload=momentum_sgd"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_dense_matrices_that_do_not_fit_are_refused(
    tmp_path: pathlib.Path, arguments: list[str]
) -> None:
    given = ("--num_rounds=1000000", f"--output={tmp_path / 'c'}", *arguments)
    line = console_commands.call("mf-factorize", *given).refused("1000000 rounds")
    assert "memory" in line or "dense matrix" in line
    assert not (tmp_path / "c").exists()
