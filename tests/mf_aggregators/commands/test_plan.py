"""mf-plan as scripts and people use it."""

import ast
import dataclasses
import itertools
import json
import math
import pathlib
import re
import shlex
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest
from absl import flags
from dp_accounting.pld.privacy_loss_mechanism import GaussianPrivacyLoss

import mf_aggregators as mfa
from mf_aggregators import checkpoints, planning
from mf_aggregators.catalogue.built_in import BandedEntry
from mf_aggregators.commands import command_line, factorize, plan, plan_separations, plan_text
from mf_aggregators.participation import MinSeparation, Sampler, sampling_from_dict
from mf_aggregators.printed_guarantees import pair
from simulations.runs import planned_runs, run_config
from simulations.runs.run_config import RunConfig
from stackoverflow_nwp import datasets, federated_text, run_stackoverflow
from stackoverflow_nwp.federated_text import Example
from tests import page_checks
from tests.simulations.command_processes import CommandServer

_SETTING = (
    "--num_rounds=12",
    "--population=40",
    "--clients_per_round=10",
    "--target_epsilon=7.123456789",
    "--delta=1.5e-6",
    "--model_size=1000",
)
# As many groups as batches, for which there is a closed form and no search.
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
        # What it asks: of timers, of one order, or of the sampler that draws by the row's scheme.
        unsampled = "one fixed order" if arguments else "timers"
        scheme = candidate["sampling"]
        asked = unsampled if scheme is None else f"num_bands={scheme['num_bands']},"
        assert asked in candidate["condition"]
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


def _options(words: list[str]) -> RunConfig:
    """What a run would do, with every default filled in, for a file in a template's place."""
    words = [word.replace(plan_text.PLACEHOLDER, "mine.sqlite") for word in words]
    values = flags.FlagValues()
    flags.DEFINE_enum("format", "text", ["text", "json"], "", flag_values=values)
    command = run_stackoverflow.command()
    run_config.define_flags(values, command)
    assert len(values(words, known_only=False)) == 1
    return run_config.of_flags(values, command)


def _arguments(lines: str) -> tuple[str, dict[str, Any]]:
    """The directory of mfa.load(...), and the arguments of mfa.mf_dp_aggregator(mechanism, ...)."""
    load, make = ast.parse(lines).body
    assert isinstance(load, ast.Assign)
    assert isinstance(load.value, ast.Call)
    assert ast.unparse(load.value.func) == "mfa.load"
    (directory,) = map(ast.literal_eval, load.value.args)
    assert isinstance(make, ast.Assign)
    call = make.value
    assert isinstance(call, ast.Call)
    assert ast.unparse(call.func) == "mfa.mf_dp_aggregator"
    assert [ast.unparse(each) for each in (*load.targets, *call.args)] == ["mechanism"] * 2
    named = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    # What a guarantee is about is in the mechanism alone.
    assert named.keys() <= {"clip_norm", "clients_per_round", "noise_storage"}
    return directory, named


def _run_lines(lines: str) -> dict[str, Any]:
    """What a user's program has after the printed lines."""
    found: dict[str, Any] = {"mfa": mfa}
    exec(lines, found)
    return found


@pytest.mark.short_cases(3)
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
    if chosen["amplified"]:
        assert words[0] == "mf-plan"
        assert _call(capsys, *words[1:], cache)[0] == 0
    else:
        assert words[0] == "mf-factorize"
        _factorize(capsys, words)
    directory, named = _arguments(aggregator)
    mechanism = mfa.load(directory)
    workload = mfa.workloads.prefix_sum(mechanism.num_rounds)
    # What is made is what was compared, up to the gap that the plan is content with.
    found = mechanism.factorization.rmse(workload, mechanism.schema)
    assert found == pytest.approx(chosen["rmse"], rel=1e-3)
    assert mechanism.noise_multiplier == chosen["noise_multiplier"]
    assert str(mechanism.schema) == chosen["participation"]
    scheme = mechanism.sampling
    assert (None if scheme is None else scheme.to_dict()) == chosen["sampling"]
    assert mechanism.guarantee(1.5e-6).epsilon <= 7.123456789
    assert (named["clip_norm"], named["clients_per_round"]) == (1.0, 10)
    assert [step["command"] for step in fields["steps"][:-1]] == [make, *run]
    assert [step["is_template"] for step in fields["steps"]] == [False, *(True for _ in run), False]

    if not run:
        assert not chosen["amplified"]
        assert isinstance(mechanism.schema, mfa.participation.FixedEpochOrder)
        return
    words = shlex.split(run[0])
    assert words[0] == "run-stackoverflow"
    options = _options(words)
    # The guarantee is that of the plan, to the last digit, and nothing says it twice.
    assert options["noise_multiplier"] == mechanism.noise_multiplier
    assert (options["target_epsilon"], options["delta"]) == (None, 1.5e-6)
    said = {word.partition("=")[0] for word in words[1:]}
    assert said <= {"--dataset", "--checkpoint", "--clients_per_round", "--delta"}
    assert options["clients_per_round"] == 10
    # Nobody knows the best rates for somebody's data: none is printed, and it is said.
    assert "--dataset=YOUR_DATASET" in words
    assert not any("learning_rate" in word for word in words)
    assert "A template" in fields["steps"][1]["notes"][0]
    loaded, _ = planned_runs._loaded(options)
    if chosen["amplified"]:
        scheme = planned_runs.scheme_of(options, 40, loaded)
        assert (scheme.name, scheme.num_bands) == (fields["sampling"], chosen["num_bands"])
        assert scheme == mechanism.sampling
    else:
        schema = mfa.participation.MinSeparation(
            options["separation"], options["max_participations"]
        )
        assert schema == mechanism.schema


def test_a_plan_of_drawn_clients_writes_their_scheme(
    capsys: pytest.CaptureFixture[str],
    cache: str,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No matrix has it, so that the printed command is the plan's own."""
    monkeypatch.chdir(tmp_path)
    fields = _planned(capsys, cache, *_SAMPLING, "--mechanisms=identity")
    (chosen,) = (each for each in fields["candidates"] if each["recommended"])
    make, _, aggregator = fields["commands"]
    assert shlex.split(make)[0] == "mf-plan"
    assert _call(capsys, *shlex.split(make)[1:], cache)[0] == 0
    made = _run_lines(aggregator)
    mechanism = made["aggregator"].mechanism
    assert mechanism.sampling == sampling_from_dict(chosen["sampling"])
    assert mechanism.noise_multiplier == chosen["noise_multiplier"]
    assert mechanism.guarantee(1.5e-6).epsilon == pytest.approx(7.123456789, rel=1e-6)


def _weights(tmp_path: pathlib.Path, num_rounds: int) -> str:
    path = tmp_path / "their weights.txt"
    path.write_text("".join(f"{2.0 ** (i / 8)}\n" for i in range(num_rounds)))
    return str(path)


@pytest.mark.short_cases(1)
@pytest.mark.parametrize(
    "arguments",
    [
        ("--error=max",),
        ("--error=WEIGHTS",),
        ("--error=WEIGHTS", "--num_rounds=4"),
        ("--error=max", "--num_rounds=24", "--mechanisms=structured"),
        ("--error=max", "--sampling=poisson", "--mechanisms=banded"),
        pytest.param(
            ("--error=max", "--num_rounds=8", "--sampling=balls_in_bins", "--delta=1e-3"),
            marks=pytest.mark.long,
        ),
    ],
    ids=" ".join,
)
def test_printed_commands_make_the_very_matrix_of_an_error(
    capsys: pytest.CaptureFixture[str],
    cache: str,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
) -> None:
    monkeypatch.chdir(tmp_path)
    error = arguments[0].removeprefix("--error=")
    if error == "WEIGHTS":
        rounds = 4 if "--num_rounds=4" in arguments else 12
        error = _weights(tmp_path, rounds)
        arguments = (f"--error={error}", *arguments[1:])
    own = _planned(capsys, cache, *arguments, "--output=own")
    fields = _planned(capsys, cache, *arguments)
    assert fields["candidates"] == own["candidates"]
    assert fields["error"] == error
    (chosen,) = (candidate for candidate in fields["candidates"] if candidate["recommended"])
    assert chosen["mechanism"] == "structured" or chosen["options"]["error"] == error
    made = checkpoints.load("own")
    *commands, aggregator = fields["commands"]
    for command in commands:
        words = shlex.split(command)
        if words[0] == "mf-factorize":
            _factorize(capsys, words)
        elif words[0] == "mf-plan":
            status, _, err = _call(capsys, *words[1:], f"--cache_dir={tmp_path / 'new'}")
            assert status == 0, err
    found = mfa.load(_arguments(aggregator)[0])
    assert found == mfa.load("own")
    # A matrix for the mean is another one.
    of_mean = _planned(capsys, cache, *arguments[1:], "--output=of_mean")
    assert of_mean["error"] == "mean"
    assert not checkpoints.load("of_mean").has_same_matrix(made)
    assert _run_lines(aggregator)["aggregator"].mechanism == found
    assert found.factorization.has_same_matrix(made)
    assert found.noise_multiplier == chosen["noise_multiplier"]
    errors = made.errors(mfa.workloads.prefix_sum(made.num_rounds), found.schema)
    assert chosen["max_error"] == pytest.approx(errors.max_error, rel=1e-12)
    sought = errors.max_error
    if error != "max":
        weights = [float(line) for line in pathlib.Path(error).read_text().split()]
        sought = math.sqrt(
            sum(w * e for w, e in zip(weights, errors.per_round_variance, strict=True))
            / sum(weights)
        )
    assert chosen["effective_error"] == pytest.approx(
        sought * chosen["noise_multiplier"] / 10, rel=1e-12
    )


def test_a_table_for_an_error_begins_with_it(
    capsys: pytest.CaptureFixture[str], cache: str, tmp_path: pathlib.Path
) -> None:
    few = (*_SETTING, cache, "--separation=4", "--mechanisms=identity,toeplitz,banded")
    weights = _weights(tmp_path, 12)
    for error, column, unit in (
        ("mean", "effective RMSE", "RMSE"),
        ("max", "worst round", "max error"),
        (weights, "weighted", "weighted error"),
    ):
        status, out, err = _call(capsys, *few, f"--error={error}")
        assert status == 0, err
        lines = out.splitlines()
        (at,) = (i for i, line in enumerate(lines) if line.startswith("  mechanism  "))
        names = [name.strip() for name in lines[at].split("  ") if name.strip()]
        assert names[1] == column
        assert names[names.index("noise mult.") - 1] == unit
        assert {"effective RMSE", "worst round"} <= set(names)
        assert (shlex.quote(error) in lines[at - 2]) == (error != "mean")
        fields = json.loads(_call(capsys, *few, f"--error={error}", "--format=json")[1])
        errors = [each["effective_error"] for each in fields["candidates"]]
        rows = [line[2:].rsplit(maxsplit=len(names) - 1) for line in lines[at + 1 :]]
        written = [float(row[1]) for row in rows[: len(errors)]]
        assert written == pytest.approx(errors, rel=1e-3)


@pytest.mark.long
@pytest.mark.short_cases(1)
@pytest.mark.parametrize(
    ("sampling", "condition"),
    [
        ("min_separation", r"flips a secret coin .* with probability (0\.\d+|1\.0), whatever"),
        ("balls_in_bins", r"is in one of 4 bins, drawn once, uniformly, independently"),
    ],
)
def test_plans_of_clients_that_draw_for_themselves(
    capsys: pytest.CaptureFixture[str],
    cache: str,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    sampling: str,
    condition: str,
) -> None:
    """The plan itself writes the certified matrix; the aggregator says what must draw."""
    monkeypatch.chdir(tmp_path)
    arguments = (f"--sampling={sampling}", "--num_rounds=6", "--delta=1e-3")
    fields = _planned(capsys, cache, *arguments)
    (chosen,) = (candidate for candidate in fields["candidates"] if candidate["recommended"])
    assert not chosen["is_estimate"]
    again, run, aggregator = (step["command"] for step in fields["steps"])
    words = shlex.split(again)
    assert words[0] == "mf-plan"
    status, out, err = _call(capsys, *words[1:], cache, "--format=json")
    assert status == 0, err
    assert json.loads(out)["recommended"] == fields["recommended"]
    mechanism = mfa.load(_arguments(aggregator)[0])
    scheme = sampling_from_dict(chosen["sampling"])
    assert mechanism.sampling == scheme
    assert scheme.name == sampling
    options = _options(shlex.split(run))
    assert planned_runs.scheme_of(options, 40, mechanism.factorization) == scheme
    assert options["noise_multiplier"] == mechanism.noise_multiplier
    stated = mechanism.guarantee(1e-3)
    assert stated.epsilon <= 7.123456789
    (note,) = (note for note in fields["steps"][-1]["notes"] if "only if" in note)
    assert re.search(condition, note)
    assert f"mfa.participation.{scheme!r}" in fields["steps"][-1]["sampler"]
    status, out, err = _call(capsys, *_SETTING, *arguments, cache)
    assert status == 0, err
    marked = [line for line in out.splitlines() if "~" in line]
    assert any("rough estimates, which no guarantee may be stated of" in line for line in marked)
    assert not any(line.startswith("*") for line in marked)


def test_the_aggregator_is_made(
    capsys: pytest.CaptureFixture[str], cache: str, tmp_path: pathlib.Path
) -> None:
    output = tmp_path / "it's a plan"
    fields = _planned(capsys, cache, f"--output={output}")
    *run, aggregator = fields["commands"]
    # What --output wrote needs no mf-factorize.
    assert [shlex.split(command)[0] for command in run] == ["run-stackoverflow"]
    assert shlex.split(run[0])[2] == f"--checkpoint={output}"
    made = _run_lines(aggregator)
    assert made["aggregator"].mechanism == made["mechanism"] == mfa.load(output)
    assert made["mechanism"].noise_multiplier == fields["candidates"][0]["noise_multiplier"]
    assert made["mechanism"].num_rounds == 12


def test_a_table_that_names_what_is_infeasible(
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
    assert lines[2] == (
        "at most 1e-05 GB of noise between rounds, and at most 100 GB of files (--noise_disk_gb)"
    )
    header, *rows = lines[4 : lines.index("", 4)]
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
    assert "without being cached" in err
    assert json.loads(out) == json.loads(_call(capsys, *_SETTING, *small, cache)[1])


@pytest.mark.long
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
        (["--target_epsilon=1e9"], "--target_epsilon: no noise multiplier between"),
        (["--target_rho=1"], "--target_epsilon and --target_rho exclude each other"),
        (["--noise_multiplier=1"], "--noise_multiplier and --target_epsilon exclude each other"),
        (["--delta=1"], "--delta must be above 0 and below 1"),
        (["--delta=1e-13"], "--target_epsilon: the noise of"),
        (["--delta=0.1"], "not below 1 / 40 clients"),
        (["--separation=13"], "--separation=13 is more than --num_rounds=12"),
        (["--separation=5"], "50 would be needed"),
        (["--separation=0"], "--separation must be at least 1"),
        (["--separation=4", "--max_participations=4"], "at most 3 fit"),
        (["--max_participations=1"], "120 participations"),
        (["--max_participations=0"], "--max_participations must be at least 1"),
        (["--population=9"], "--clients_per_round=10 is more than --population=9"),
        (["--population=9", "--sampling=poisson"], "is more than --population=9"),
        (["--population=0"], "--population must be at least 1"),
        (["--num_rounds=0"], "--num_rounds must be at least 1"),
        (["--clients_per_round=0"], "--clients_per_round must be at least 1"),
        (["--model_size=0"], "--model_size must be at least 1"),
        (["--model_size=many"], "model_size"),
        (["--noise_memory_gb=-1"], "--noise_memory_gb must not be negative"),
        (["--noise_memory_gb=1e308"], "--noise_memory_gb must be finite"),
        (["--noise_disk_gb=-1"], "--noise_disk_gb must not be negative"),
        (["--noise_disk_gb=nan"], "--noise_disk_gb must be finite"),
        (["--sampling=poisson", "--separation=4"], "--separation and --max_participations are for"),
        (["--sampling=cyclic"], "sampling"),
        (["--sampling=poisson", "--delta=1e-13"], "at least 1e-12"),
        (["--separations=2,many"], "--separations takes whole numbers with commas between them"),
        (["--separations="], "--separations names no separation"),
        (
            ["--mechanisms=blt", "--mechanisms=banded,tree"],
            "lost: write --mechanisms=blt,banded,tree",
        ),
        (["--separations=0"], "a number of --separations must be at least 1"),
        (["--separations=13"], "--separations=13 is more than --num_rounds=12"),
        (["--separations=5"], "--separations=5: "),
        (["--separations=2", "--sampling=poisson"], "--separations is for devices with timers"),
        (["--unknown=1"], "unknown"),
        (["something"], "unexpected argument"),
        (["--error=worst"], "--error=worst cannot be read as mean, max or a file of numbers"),
        (["--error=/dev/null"], "--error=/dev/null must hold one number on each line"),
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


@pytest.mark.long
def test_regrets_of_further_separations(
    capsys: pytest.CaptureFixture[str], cache: str, tmp_path: pathlib.Path
) -> None:
    page = tmp_path / "plan.html"
    mechanisms = "--mechanisms=banded,identity"
    arguments = (cache, mechanisms, "--separation=4", "--max_participations=3")
    fields = _planned(capsys, *arguments, "--separations=2,3,4", f"--report={page}")
    found = fields["separations"]
    assert found["separations"] == [2, 3, 4]
    # What is best for the first of them, by a plan of its own.
    alone = _planned(capsys, cache, mechanisms, "--separation=2", "--max_participations=3")
    assert alone["separations"] is None
    best = alone["candidates"][0]["effective_rmse"]
    assert found["best"][0]["effective_error"] == pytest.approx(best, rel=1e-12)
    planned = {each["mechanism"] for each in fields["candidates"]}
    assert planned == {each["mechanism"] for each in found["matrices"]}
    for each in found["matrices"]:
        for regret, error, best in zip(
            each["regrets"], each["effective_errors"], found["best"], strict=True
        ):
            assert regret == pytest.approx(error / best["effective_error"] - 1.0)
    status, text, _ = _call(capsys, *_SETTING, *arguments, "--separations=2,3")
    assert status == 0
    least = found["matrices"][0]
    said = f"{least['name']}, made for {least['made_for'][0]}"
    assert said in " ".join(text.split())
    assert "If the separation turns out otherwise" in page.read_text()
    assert page_checks.read(page).faults == []
    for each in found["matrices"]:
        row = [f"{100.0 * regret:+.1f} %" for regret in each["regrets"]]
        lines = [line for line in text.splitlines() if line.split()[:1] == [each["mechanism"]]]
        assert any(re.split(r"\s{2,}", line)[-3:] == row for line in lines)
        assert all(one in page.read_text() for one in row)


def test_separations_share_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_separations.time, "monotonic", lambda: 100.0)
    assert plan_separations.share_of(None, 3) is None
    assert plan_separations.share_of(130.0, 3) == 10.0
    assert plan_separations.share_of(130.0, 1) == 30.0
    # A plan without time would be refused as one.
    assert plan_separations.share_of(90.0, 2) == 1.0


def test_a_separation_without_a_plan_is_left_out() -> None:
    said: list[str] = []

    def make(setting: planning.Setting, limit: float | None) -> planning.Plan:
        raise ValueError("no mechanism that fits was computed")

    setting = planning.Setting(12, 120, 10, MinSeparation(3), None, 8.0, 1e-6, 1000)
    assert plan_separations.plans_of([setting], make, None, said.append) == []
    assert said[-1].endswith("is left out: no mechanism that fits was computed")


@pytest.mark.parametrize("name", [each.split("=")[0] for each in _SETTING[:4]])
def test_what_a_plan_needs_is_asked_for(capsys: pytest.CaptureFixture[str], name: str) -> None:
    given = [each for each in _SETTING if not each.startswith(name)]
    status, out, err = _call(capsys, *given)
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    one_of_three = "--target_epsilon or --target_rho or --noise_multiplier"
    asked = one_of_three if name == "--target_epsilon" else name
    assert err.startswith(f"mf-plan: {asked} is required. Usage: mf-plan --num_rounds=INTEGER ")


def test_a_target_of_rho(
    capsys: pytest.CaptureFixture[str],
    cache: str,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    given = [each for each in _SETTING if not each.startswith("--target_epsilon")]
    given += ["--target_rho=0.02", "--mechanisms=blt", cache, "--format=json"]
    status, out, err = _call(capsys, *given)
    assert status == 0, err
    fields = json.loads(out)
    assert fields["target_rho"] == 0.02
    # 1 / sqrt(2 rho) = 5.
    assert fields["target_epsilon"] == mfa.accounting.epsilon(5.0, 1.5e-6)
    (chosen,) = (candidate for candidate in fields["candidates"] if candidate["recommended"])
    assert chosen["noise_multiplier"] == pytest.approx(5.0, rel=1e-15)
    make, run, aggregator = fields["commands"]
    _factorize(capsys, shlex.split(make))
    options = _options(shlex.split(run))
    assert (options["target_rho"], options["target_epsilon"]) == (None, None)
    mechanism = mfa.load(_arguments(aggregator)[0])
    assert options["noise_multiplier"] == chosen["noise_multiplier"] == mechanism.noise_multiplier
    assert mfa.accounting.zcdp_rho(chosen["noise_multiplier"]) <= 0.02

    status, _, err = _call(capsys, *given, "--sampling=any")
    assert status == 2
    assert "--target_rho is for devices with timers" in err
    with pytest.raises(ValueError, match="sampling does not amplify rho"):
        planning.Setting(12, 40, 10, None, "poisson", 1.0, 1e-6, 1000, rho=0.02)
    with pytest.raises(ValueError, match="is not that of rho"):
        planning.Setting(12, 40, 10, MinSeparation(4), None, 1.0, 1e-6, 1000, rho=0.02)


_WITHOUT_TARGET = tuple(each for each in _SETTING if not each.startswith("--target_epsilon"))


def test_the_epsilon_of_a_noise_multiplier(
    capsys: pytest.CaptureFixture[str],
    cache: str,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    given = (*_WITHOUT_TARGET, "--noise_multiplier=0.7", "--mechanisms=banded,identity", cache)
    status, out, err = _call(capsys, *given, "--format=json", "--output=mine")
    assert status == 0, err
    fields = json.loads(out)
    assert (fields["noise_multiplier"], fields["target_rho"]) == (0.7, None)
    assert {each["noise_multiplier"] for each in fields["candidates"]} == {0.7}
    assert {each["mechanism"] for each in fields["candidates"]} == {"banded", "identity"}
    # What dp-accounting has for the rows of noise that a run adds, and for the most that a device
    # of participations 4 rounds apart can change.
    c = np.linalg.inv(mfa.load("mine").noise_recursion().noising_matrix())
    patterns = [each for k in (1, 2, 3) for each in itertools.combinations(range(12), k)]
    apart = [list(each) for each in patterns if min(np.diff(each), default=4) >= 4]
    sensitivity = max(np.linalg.norm(c[:, each].sum(axis=1)) for each in apart)
    epsilon = fields["target_epsilon"]
    delta = GaussianPrivacyLoss(0.7, sensitivity=sensitivity).get_delta_for_epsilon(epsilon)
    assert 0.999999 * 1.5e-6 < delta <= 1.5e-6
    status, out, _ = _call(capsys, *given)
    assert status == 0
    printed = pair(epsilon, 1.5e-6, ".6g")
    assert f"noise multiplier 0.7 of every mechanism, which is {printed}-DP" in out
    # The command that is printed makes the same.
    (make,) = (line.strip() for line in out.splitlines() if "mf-factorize" in line)
    words = shlex.split(make)
    _factorize(capsys, words)
    (directory,) = (each.split("=")[1] for each in words if each.startswith("--output="))
    assert mfa.load(directory) == mfa.load("mine")

    with pytest.raises(ValueError, match="for timers alone"):
        planning.Setting(12, 40, 10, None, "poisson", 1.0, 1e-6, 1000, noise_multiplier=1.0)
    timers = MinSeparation(4)
    with pytest.raises(ValueError, match="is not that of noise multiplier"):
        planning.Setting(12, 40, 10, timers, None, 1.0, 1e-6, 1000, noise_multiplier=1.0)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--noise_multiplier=0", "has an epsilon of inf"),
        ("--noise_multiplier=-1", "--noise_multiplier must not be negative"),
        ("--noise_multiplier=nan", "--noise_multiplier must be finite"),
        ("--noise_multiplier=0.01", "--noise_multiplier: so little noise"),
        ("--noise_multiplier=1e9", "has an epsilon of 0 "),
        ("--target_rho=1e-30", "has an epsilon of 0 "),
        ("--sampling=poisson --noise_multiplier=1", "every mechanism has an epsilon of its own"),
    ],
)
def test_a_noise_multiplier_without_an_epsilon_is_refused(
    capsys: pytest.CaptureFixture[str], cache: str, argument: str, message: str
) -> None:
    status, out, err = _call(capsys, *_WITHOUT_TARGET, cache, *argument.split())
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert message in err


def test_an_output_that_cannot_be_written_is_one_line(
    capsys: pytest.CaptureFixture[str], cache: str, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    status, out, err = _call(capsys, *_SETTING, cache, f"--output={tmp_path}")
    assert (status, out) == (2, "")
    assert "is not a checkpoint" in err.strip().splitlines()[-1]
    assert (tmp_path / "notes.txt").read_text() == "mine"


def _known(
    capsys: pytest.CaptureFixture[str], cache: str, recipe: plan_text.TrainingRecipe
) -> dict[str, Any]:
    """A plan of two rounds for a known population, which takes no time."""
    return _planned(
        capsys, cache, "--num_rounds=2", "--delta=1e-6", f"--population={recipe.population}"
    )


def test_recipes_are_those_of_the_runs() -> None:
    known = {
        run_stackoverflow.SMALL: datasets.DOCSTRINGS,
        run_stackoverflow.PAPER: datasets.STACKOVERFLOW,
    }
    for own, dataset in known.items():
        recipe = plan_text.recipe_of(dataset, 1)
        assert recipe is not None
        assert (recipe.dataset, recipe.clip_norm) == (dataset, own.clip_norm)
        assert recipe.population is not None
        assert plan_text.recipe_of(None, recipe.population) == recipe
    assert plan_text.recipe_of(None, 2510) is None
    own_file = plan_text.recipe_of("mine.sqlite", 342_477)
    assert own_file is not None
    assert own_file.clip_norm == _options(["run-stackoverflow", "--dataset=mine.sqlite"]).clip_norm


def test_the_embedded_data_are_trained_on_as_the_default_run_does(
    capsys: pytest.CaptureFixture[str], cache: str, tmp_path: pathlib.Path
) -> None:
    """Flag for flag: the plan's mechanism, clients and delta, and nothing else."""
    fields = _planned(capsys, cache, "--population=2511", f"--output={tmp_path / 'made'}")
    (run,) = (step for step in fields["steps"] if step["command"].startswith("run-stackoverflow"))
    assert not run["is_template"]
    assert fields["dataset"] == "docstrings"
    printed = _options(shlex.split(run["command"]))
    default = _options(["run-stackoverflow"])
    differing = {name for name in default if printed[name] != default[name]}
    assert differing == {
        "checkpoint",
        "separation",
        "num_rounds",
        "clients_per_round",
        "target_epsilon",
        "delta",
        "noise_multiplier",
    }
    _, named = _arguments(fields["commands"][-1])
    assert named["clip_norm"] == default["clip_norm"]


def test_stackoverflow_is_trained_on_by_the_papers_recipe(
    capsys: pytest.CaptureFixture[str], cache: str
) -> None:
    recipe = plan_text.recipe_of("stackoverflow", 342_477)
    assert recipe is not None
    fields = _known(capsys, cache, recipe)
    (chosen,) = (candidate for candidate in fields["candidates"] if candidate["recommended"])
    step = fields["steps"][1]
    options = _options(shlex.split(step["command"]))
    assert not step["is_template"]
    assert options["dataset"] == "stackoverflow"
    for name in ("server_momentum", "clip_norm", "client_learning_rate", "lstm_size"):
        assert options[name] == getattr(run_stackoverflow.PAPER, name)
    assert options["server_learning_rate"] == pytest.approx(
        chosen["server_learning_rate"], rel=1e-3
    )


def test_only_stackoverflow_has_a_column_of_learning_rates(
    capsys: pytest.CaptureFixture[str], cache: str
) -> None:
    small = ("--num_rounds=2", "--delta=1e-6", "--population=342477", cache)
    assert "server rate" in _call(capsys, *_SETTING, *small)[1]
    assert "server rate" not in _call(capsys, *_SETTING, *small, "--dataset=mine.sqlite")[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dataset=stackoverflow", "--population=342478"], "more than the 342477"),
        (["--dataset=reddit"], "or the path of a .sqlite file"),
        (["--dataset="], "--dataset=: it names no path"),
    ],
)
def test_data_sets_that_are_not_there_are_refused(
    capsys: pytest.CaptureFixture[str], cache: str, arguments: list[str], message: str
) -> None:
    status, out, err = _call(capsys, *_SETTING, "--delta=1e-6", cache, *arguments)
    assert (status, out) == (2, "")
    assert message in err


def test_a_template_is_marked_above_its_command(
    capsys: pytest.CaptureFixture[str], cache: str
) -> None:
    status, out, _ = _call(capsys, *_SETTING, cache)
    assert status == 0
    lines = out.splitlines()
    (at,) = (i for i, line in enumerate(lines) if line.startswith("  run-stackoverflow "))
    notes = lines[lines.index("", at - 6) + 1 : at] if "" in lines[at - 6 : at] else lines[:at]
    assert notes[0].startswith("  # A template: ")
    assert all(line.startswith("  # ") and len(line) <= 102 for line in notes)


@pytest.mark.short_cases(1)
@pytest.mark.parametrize(
    ("arguments", "phrases"),
    [
        (("--separation=3",), ("timers", "at least 3 rounds apart", "every device")),
        # As many groups as batches: nothing is amplified.
        (_SAMPLING, ("all clients in one fixed order of 4 batches", "once")),
        (
            ("--sampling=poisson", "--num_rounds=12", "--population=30"),
            ("all clients in one fixed order of 3 batches", "4 times at most"),
        ),
    ],
    ids=lambda value: " ".join(value),
)
def test_what_the_guarantee_depends_on_stands_with_the_aggregator(
    capsys: pytest.CaptureFixture[str],
    cache: str,
    arguments: tuple[str, ...],
    phrases: tuple[str, ...],
) -> None:
    fields = _planned(capsys, cache, *arguments)
    status, text, _ = _call(capsys, *_SETTING, *arguments, cache)
    assert status == 0
    lines = text.splitlines()
    (at,) = (i for i, line in enumerate(lines) if line.startswith("  mechanism = mfa.load("))
    first = max(i for i in range(at) if not lines[i])
    above = lines[first + 1 : at]
    assert all(line.startswith("  # ") for line in above)
    printed = " ".join(line.removeprefix("  # ") for line in above)
    # A script that takes the command alone, and one that reads the steps, see it as well.
    for said in (printed, fields["commands"][-1], " ".join(fields["steps"][-1]["notes"])):
        for phrase in ("(7.12346, 1.5e-06)-DP only if", *phrases):
            assert phrase in said
    _arguments(fields["commands"][-1])


@pytest.mark.long
@pytest.mark.short_cases(1)
@pytest.mark.parametrize("sampling", ["poisson", "fixed_size", "shuffling"])
def test_an_amplified_guarantee_names_the_sampler_that_has_to_draw(
    cache: str, sampling: str
) -> None:
    """The sampler is evaluated as printed, and is of the scheme that was amplified."""
    import simulations

    plan_of_four_rounds = planning.make(
        planning.Setting(
            num_rounds=4,
            population=45,
            clients_per_round=10,
            participation=None,
            sampling=sampling,
            epsilon=7.1234511,
            delta=1e-6,
            model_size=1000,
        ),
        cache_directory=pathlib.Path(cache.removeprefix("--cache_dir=")),
    )
    amplified = [
        each for each in plan_of_four_rounds.candidates if each.mechanism.sampling is not None
    ]
    assert len(amplified) == 3
    for candidate in amplified:
        chosen = dataclasses.replace(plan_of_four_rounds, recommended=candidate)
        step = plan_text.steps_of(chosen, None, "directory", True)[-1]
        assert step.sampler is not None
        sampler = eval(step.sampler, {"mfa": mfa, "simulations": simulations})
        assert isinstance(sampler, Sampler)
        assert sampler.scheme == candidate.mechanism.sampling
        again = eval(step.sampler, {"mfa": mfa, "simulations": simulations})
        assert sampler.seed != again.seed
        (alone,) = plan_text.commands_of([step])
        for said in (alone, " ".join(line.removeprefix("# ") for line in step.lines())):
            # Rounded up.
            assert "(7.12346, 1e-06)-DP only if a data centre draws every batch" in said
            assert step.sampler in said
            assert "stay secret" in said
        _arguments(alone)


@pytest.mark.long_cases(1)
@pytest.mark.long
@pytest.mark.parametrize("error", ["mean", "max"])
def test_printed_commands_train(
    commands: CommandServer,
    capsys: pytest.CaptureFixture[str],
    cache: str,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    error: str,
) -> None:
    """Two rounds on a file of 40 clients, as printed but for a model that is smaller still."""
    monkeypatch.chdir(tmp_path)
    sentence = "the model returns a list of values ."
    examples = [
        Example(f"{split}_{client}", split, sentence)
        for split, clients in (("train", 40), ("heldout", 2), ("test", 2))
        for client in range(clients)
    ]
    federated_text.write(tmp_path / "mine.sqlite", examples)
    fields = _planned(capsys, cache, "--num_rounds=2", "--dataset=mine.sqlite", f"--error={error}")
    make, train, _ = fields["commands"]
    assert not any(step["is_template"] for step in fields["steps"])
    _factorize(capsys, shlex.split(make))
    smaller = ["--vocab_size=6", "--embedding_size=2", "--lstm_size=2", "--format=json"]
    name, *words = shlex.split(train)
    assert name == "run-stackoverflow"
    arguments = [*words, *smaller, f"--cache_dir={tmp_path}"]
    status, printed, errors = commands.start(
        "stackoverflow_nwp.run_stackoverflow", *arguments, directory=tmp_path
    ).wait()
    assert status == 0, errors
    result = json.loads(printed)
    assert result["rounds"] == 2
    assert result["privacy"]["planned"]["epsilon"] <= 7.123456789


@pytest.mark.long
def test_an_approximation_is_printed_with_what_it_approximates(
    capsys: pytest.CaptureFixture[str],
    cache: str,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    # 16 rows of noise for 120 rounds, where clients return after 40.
    sizes = ("--num_rounds=120", "--population=400", "--noise_memory_gb=6.4e-5")
    fields = _planned(capsys, cache, *sizes)
    assert fields["recommended"] == "structured"
    (chosen,) = (candidate for candidate in fields["candidates"] if candidate["recommended"])
    base, own, run, aggregator = fields["commands"]
    for command in (base, own):
        _factorize(capsys, shlex.split(command))
    directory, _ = _arguments(aggregator)
    assert f"--checkpoint={directory}" in shlex.split(run)
    made = mfa.load(directory)
    found = made.factorization.rmse(mfa.workloads.prefix_sum(120), made.schema)
    assert found == pytest.approx(chosen["rmse"], rel=2e-3)


def test_noise_that_may_not_use_the_disk_is_kept_in_the_state(
    capsys: pytest.CaptureFixture[str], cache: str
) -> None:
    # So large that files would take less time than the state.
    sizes = ("--separation=4", "--model_size=300000")
    forced = _planned(capsys, cache, *sizes, "--noise_disk_gb=0")
    assert forced["noise_disk_gb"] == 0.0
    assert all(candidate["disk_gb"] == 0.0 for candidate in forced["candidates"])
    _, run, aggregator = forced["commands"]
    assert "--noise_storage=state" in shlex.split(run)
    assert _arguments(aggregator)[1]["noise_storage"] == "state"
    free = _planned(capsys, cache, *sizes)
    assert free["noise_disk_gb"] == 100.0
    assert any(candidate["disk_gb"] > 0.0 for candidate in free["candidates"])
    assert not any("noise_storage" in command for command in free["commands"])


def test_progress_counts_mechanisms_and_seconds_and_says_what_is_cached(
    capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    arguments = (*_SETTING, "--separation=4", f"--cache_dir={tmp_path}")
    first, second = (_call(capsys, *arguments)[2].splitlines() for _ in range(2))
    *lines, last = first
    total = len(lines)
    assert [
        line.split(": ", 2)[2].startswith(f"{i} of {total} done, ") for i, line in enumerate(lines)
    ] == [True] * total
    assert all(" s so far" in line for line in lines)
    assert not any("cached" in line for line in lines)
    assert last.startswith(f"mf-plan: compared {total} mechanisms in ")
    assert f"are cached in {tmp_path}: the next plan" in last
    assert sum("cached by an earlier plan" in line for line in second[:-1]) > total / 2


@pytest.mark.parametrize("form", ["text", "json"])
def test_an_interrupt_loses_nothing_that_is_finished(
    capsys: pytest.CaptureFixture[str], cache: str, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    arguments = (*_SETTING, "--separation=4", cache, f"--format={form}")
    begin = plan._Progress.begin

    def interrupted(progress: plan._Progress, name: str) -> None:
        begin(progress, name)
        if name.startswith("toeplitz"):
            raise KeyboardInterrupt

    monkeypatch.setattr(plan._Progress, "begin", interrupted)
    status, out, err = _call(capsys, *arguments)
    assert status == 130
    assert "mf-plan: interrupted in toeplitz 4: " in err
    assert "the same command goes on there" in err
    finished = {"identity", "tree", "blt", "banded_inverse"}
    if form == "json":
        fields = json.loads(out)
        assert fields["interrupted"] is True
        assert fields["recommended"] is None
        assert {each["mechanism"] for each in fields["candidates"]} == finished
    else:
        assert all(f"\n {name} " in out for name in finished)
        assert "Interrupted: the others are not compared." in out


@pytest.mark.long
def test_some_mechanisms_in_some_time(
    capsys: pytest.CaptureFixture[str],
    cache: str,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    few = (cache, "--separation=4", "--mechanisms=blt,identity")
    fields = _planned(capsys, *few, "--time_limit=0")
    assert {each["mechanism"] for each in fields["candidates"]} == {"blt", "identity"}
    assert (fields["skipped"], fields["time_limit"]) == ([], None)
    assert _planned(capsys, *few)["time_limit"] == 50.0
    assert _planned(capsys, cache, *_SAMPLING)["time_limit"] is None

    def never(*_: object) -> None:
        while True:
            time.sleep(0.01)

    monkeypatch.setattr(BandedEntry, "build", never)
    slow = (f"--cache_dir={tmp_path}", "--separation=3", "--time_limit=1.5")
    both = (*slow, "--mechanisms=banded,identity")
    fields = _planned(capsys, *both)
    assert fields["recommended"] == "identity"
    assert [each["mechanism"] for each in fields["skipped"]] == ["banded 3"]
    status, out, err = _call(capsys, *_SETTING, *both)
    assert status == 0
    assert "Skipped for lack of time" in out
    assert "mf-plan: skipped banded 3: it was not done when the time had passed" in err
    status, _, err = _call(capsys, *_SETTING, *slow, "--mechanisms=banded")
    assert status == 2
    assert "no mechanism that fits was computed within 1.5 s" in err
    for flag, message in (
        ("--mechanisms=blt,bands", "--mechanisms knows identity, tree"),
        ("--mechanisms=", "--mechanisms names no mechanism"),
        ("--time_limit=-1", "--time_limit must not be negative"),
    ):
        status, _, err = _call(capsys, *_SETTING, flag)
        assert status == 2
        assert message in err


def test_progress_says_how_long_a_long_computation_takes(
    capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    setting = planning.Setting(2052, 342_000, 1000, MinSeparation(342), None, 8.0, 1e-6, 1000)
    progress = plan._Progress(planning.computations(setting, cache_directory=tmp_path))
    progress.begin("blt 4")
    progress.begin("banded 342")
    short, long = capsys.readouterr().err.splitlines()
    assert "takes" not in short
    assert ", takes about " in long
    assert long.endswith(" s on two idle cores")
