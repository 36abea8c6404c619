"""mf-plan as scripts and people use it."""

import ast
import json
import math
import pathlib
import shlex
import subprocess
import sys
from typing import Any

import pytest
from absl import flags

import mf_aggregators as mfa
from mf_aggregators import checkpoints
from mf_aggregators.commands import command_line, factorize, plan
from simulations import run_flags, run_plans, sampled_runs
from stackoverflow_nwp import run_stackoverflow

_SETTING = (
    "--num_rounds=12",
    "--population=40",
    "--clients_per_round=10",
    "--target_epsilon=7.123456789",
    "--delta=1.5e-6",
    "--model_size=1000",
)
# As many parts as batches, for which there is a closed form and no search.
_SAMPLING = ("--sampling=poisson", "--num_rounds=4")
_CANDIDATE_FIELDS = {
    "mechanism",
    "num_bands",
    "rmse",
    "noise_multiplier",
    "effective_rmse",
    "memory_gb",
    "seconds_per_round",
    "rmse_over_lower_bound",
    "server_learning_rate",
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"--cache_dir={tmp_path_factory.mktemp('cache')}"


def _call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = command_line.run(
        plan.__doc__ or "", plan.define_flags, plan.main, ["mf-plan", *arguments]
    )
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def _planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    status, out, err = _call(capsys, *_SETTING, *arguments, "--format=json")
    assert status == 0, err
    assert len(out.splitlines()) == 1
    fields: dict[str, Any] = json.loads(out)
    return fields


@pytest.mark.parametrize("arguments", [(), _SAMPLING], ids=["timers", "sampling"])
def test_one_json_object_with_the_fields_of_the_contract(
    capsys: pytest.CaptureFixture[str], cache: str, arguments: tuple[str, ...]
) -> None:
    fields = _planned(capsys, cache, *arguments)
    candidates = fields["candidates"]
    for candidate in candidates:
        assert candidate.keys() >= _CANDIDATE_FIELDS
        assert candidate["effective_rmse"] == pytest.approx(
            candidate["rmse"] * candidate["noise_multiplier"] / 10
        )
    errors = [candidate["effective_rmse"] for candidate in candidates]
    assert errors == sorted(errors)
    (chosen,) = (candidate for candidate in candidates if candidate["recommended"])
    assert fields["recommended"] == chosen["mechanism"]
    assert fields["recommended_num_bands"] == chosen["num_bands"]


def _factorize(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    status = command_line.run("", factorize.define_flags, factorize.main, words)
    assert status == 0, capsys.readouterr().err
    capsys.readouterr()


def _options(words: list[str]) -> dict[str, Any]:
    values = flags.FlagValues()
    flags.DEFINE_enum("format", "text", ["text", "json"], "", flag_values=values)
    command = run_stackoverflow.command()
    run_flags.define_flags(values, command)
    assert len(values(words, known_only=False)) == 1
    return run_flags.options_of(values, command)


def _arguments(expression: str) -> tuple[Any, dict[str, Any]]:
    """The arguments of mfa.mf_dp_aggregator(...), evaluated as a user's program would."""
    call = ast.parse(expression, mode="eval").body
    assert isinstance(call, ast.Call)
    assert ast.unparse(call.func) == "mfa.mf_dp_aggregator"

    def value(node: ast.expr) -> Any:
        return eval(compile(ast.Expression(node), "printed", "eval"), {"mfa": mfa})

    assert len(call.args) == 1
    named = {str(keyword.arg): value(keyword.value) for keyword in call.keywords}
    return value(call.args[0]), named


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--separation=3", "--max_participations=4"),
        ("--separation=1",),
        ("--num_rounds=4",),
        ("--separation=4", "--noise_memory_gb=0"),
        ("--separation=4", "--noise_memory_gb=1e-5"),
        _SAMPLING,
        ("--sampling=fixed_size", "--num_rounds=1"),
        ("--sampling=shuffling", "--num_rounds=8"),
    ],
    ids=" ".join,
)
def test_printed_commands_run(
    capsys: pytest.CaptureFixture[str],
    cache: str,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
) -> None:
    monkeypatch.chdir(tmp_path)
    fields = _planned(capsys, cache, *arguments)
    (chosen,) = (candidate for candidate in fields["candidates"] if candidate["recommended"])
    make, *run, aggregator = fields["commands"]

    words = shlex.split(make)
    assert words[0] == "mf-factorize"
    _factorize(capsys, words)
    directory, named = _arguments(aggregator)
    matrix = checkpoints.load(directory)
    workload = mfa.workloads.prefix_sum(matrix.num_rounds)
    # What is made is what was compared, up to the gap that the plan is content with.
    assert matrix.rmse(workload, named["participation"]) == pytest.approx(chosen["rmse"], rel=1e-3)
    assert named["noise_multiplier"] == chosen["noise_multiplier"]
    assert (named["clip_norm"], named["clients_per_round"]) == (1.0, 10)

    if not run:
        assert not chosen["amplified"]
        assert isinstance(named["participation"], mfa.participation.FixedEpochOrder)
        return
    words = shlex.split(run[0])
    assert words[0] == "run-stackoverflow"
    options = _options(words)
    # The guarantee is that of the plan, to the last digit.
    assert (options["target_epsilon"], options["delta"]) == (7.123456789, 1.5e-6)
    assert options["server_learning_rate"] == pytest.approx(
        chosen["server_learning_rate"], rel=1e-3
    )
    loaded = run_plans._loaded(options)
    if chosen["amplified"]:
        scheme = sampled_runs.scheme_of(options, 40, loaded)
        assert (scheme.name, scheme.num_bands) == (fields["sampling"], chosen["num_bands"])
        found = sampled_runs.noise_multiplier(options, scheme)
    else:
        schema = mfa.participation.MinSeparation(
            options["separation"], options["max_participations"]
        )
        assert schema == named["participation"]
        found = options["noise_multiplier"]
    assert found == pytest.approx(chosen["noise_multiplier"], rel=1e-6)


def test_the_aggregator_is_made(
    capsys: pytest.CaptureFixture[str], cache: str, tmp_path: pathlib.Path
) -> None:
    output = tmp_path / "it's a plan"
    fields = _planned(capsys, cache, f"--output={output}")
    *run, aggregator = fields["commands"]
    # What --output wrote needs no mf-factorize.
    assert [shlex.split(command)[0] for command in run] == ["run-stackoverflow"]
    assert shlex.split(run[0])[1] == f"--checkpoint={output}"
    program = (
        f"import mf_aggregators as mfa\nfactory = {aggregator}\n"
        "print(repr(factory.noise_multiplier), factory.factorization.num_rounds)"
    )
    finished = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300
    )
    assert finished.returncode == 0, finished.stderr
    multiplier, rounds = finished.stdout.split()
    assert float(multiplier) == fields["candidates"][0]["noise_multiplier"]
    assert int(rounds) == 12


def test_a_table_that_names_what_is_left_out(
    capsys: pytest.CaptureFixture[str], cache: str
) -> None:
    status, out, err = _call(
        capsys, *_SETTING, "--separation=4", "--noise_memory_gb=1e-5", cache, "--format=text"
    )
    assert status == 0
    lines = out.splitlines()
    assert lines[0] == (
        "12 rounds of 10 clients, 40 clients with timers: participations at least 4 rounds apart"
    )
    header, *rows = lines[3 : lines.index("", 3)]
    assert "effective RMSE" in header
    assert [row[:2] for row in rows].count("* ") == 1
    assert max(len(line) for line in [*lines[:3], header, *rows]) <= 130
    # The last two columns end where their titles end.
    assert len({len(row) for row in [header, *rows]}) == 1
    assert "  banded 4 keeps more noise than allowed; bands that fit: 3" in lines
    assert any(line.startswith("Recommended: ") for line in lines)
    assert "To run it:" in lines
    # Progress is shown, elsewhere.
    assert "toeplitz 3" in err
    assert "mf-plan: compared" in err


def test_a_cache_that_cannot_be_written_is_said_and_does_no_harm(
    capsys: pytest.CaptureFixture[str], cache: str, tmp_path: pathlib.Path
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    small = ("--num_rounds=3", "--format=json", "--population=30", "--separation=3")
    status, out, err = _call(capsys, *_SETTING, *small, f"--cache_dir={file}")
    assert status == 0
    assert "warning" in err
    assert "without being kept" in err
    assert json.loads(out) == json.loads(_call(capsys, *_SETTING, *small, cache)[1])


def test_a_script_gets_the_same_twice(cache: str) -> None:
    command = [sys.executable, "-m", "mf_aggregators.commands.plan", *_SETTING, "--format=json"]
    first, second = (
        subprocess.run([*command, cache], capture_output=True, text=True, timeout=300)
        for _ in range(2)
    )
    assert first.returncode == second.returncode == 0, first.stderr
    assert first.stdout == second.stdout
    assert math.isfinite(json.loads(first.stdout)["candidates"][-1]["effective_rmse"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target_epsilon=0"], "--target_epsilon must be above zero"),
        (["--target_epsilon=-1"], "--target_epsilon must be above zero"),
        (["--target_epsilon=nan"], "--target_epsilon must be finite"),
        (["--target_epsilon=inf"], "--target_epsilon must be finite"),
        (["--target_epsilon=1e9"], "no noise multiplier between"),
        (["--delta=1"], "delta must be above 0 and below 1"),
        (["--delta=0"], "delta must be above 0 and below 1"),
        (["--delta=0.1"], "not below 1 / 40 clients"),
        (["--separation=13"], "--separation=13 is more than --num_rounds=12"),
        (["--separation=5"], "50 would be needed"),
        (["--separation=0"], "--separation must be at least 1"),
        (["--separation=4", "--max_participations=4"], "at most 3 fit"),
        (["--max_participations=1"], "120 participations"),
        (["--max_participations=0"], "max_participations must be at least 1"),
        (["--population=9"], "--clients_per_round=10 is more than --population=9"),
        (["--population=9", "--sampling=poisson"], "is more than --population=9"),
        (["--population=0"], "--population must be at least 1"),
        (["--num_rounds=0"], "--num_rounds must be at least 1"),
        (["--clients_per_round=0"], "--clients_per_round must be at least 1"),
        (["--model_size=0"], "--model_size must be at least 1"),
        (["--model_size=many"], "model_size"),
        (["--noise_memory_gb=-1"], "--noise_memory_gb must not be negative"),
        (["--noise_memory_gb=nan"], "--noise_memory_gb must be finite"),
        (["--sampling=poisson", "--separation=4"], "--sampling is for a data centre"),
        (["--sampling=cyclic"], "sampling"),
        (["--sampling=poisson", "--delta=1e-13"], "at least 1e-12"),
        (["--unknown=1"], "unknown"),
        (["something"], "unexpected argument"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_clear_line(
    capsys: pytest.CaptureFixture[str], cache: str, arguments: list[str], message: str
) -> None:
    status, out, err = _call(capsys, *_SETTING, cache, *arguments)
    assert (status, out) == (2, "")
    # What progress draws over itself ends with a line of its own.
    *progress, last = err.strip().splitlines()
    assert message in last
    assert last.startswith("mf-plan: ")
    assert all("done" in line for line in progress)


@pytest.mark.parametrize("name", [each.split("=")[0] for each in _SETTING if "delta" not in each])
def test_what_a_plan_needs_is_asked_for(capsys: pytest.CaptureFixture[str], name: str) -> None:
    given = [each for each in _SETTING if not each.startswith(name)]
    status, out, err = _call(capsys, *given)
    assert (status, out) == (2, "")
    assert err.strip() == f"mf-plan: {name} is required."


def test_an_output_that_cannot_be_written_is_one_line(
    capsys: pytest.CaptureFixture[str], cache: str, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    status, out, err = _call(capsys, *_SETTING, cache, f"--output={tmp_path}")
    assert (status, out) == (2, "")
    assert "is not a checkpoint" in err.strip().splitlines()[-1]
    assert (tmp_path / "notes.txt").read_text() == "mine"
