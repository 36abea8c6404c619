"""mf-plan as scripts and people use it."""

import json
import math
import pathlib
import shlex

import numpy as np
import pytest

import mf_aggregators as mfa
from mf_aggregators.participation import MinSeparation
from tests.mf_aggregators.commands.small_plans import (
    DRAWN_BY_POISSON,
    SETTING,
    arguments_of,
    call_plan,
    fields_of_plan,
    file_of_weights,
    options_of_run,
    run_factorize,
    run_lines,
)

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


@pytest.mark.parametrize("arguments", [(), DRAWN_BY_POISSON], ids=["timers", "sampling"])
def test_one_json_object_with_the_fields_of_the_contract(
    cache: str, arguments: tuple[str, ...]
) -> None:
    fields = fields_of_plan(cache, *arguments)
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


def test_a_table_for_an_error_begins_with_it(cache: str, tmp_path: pathlib.Path) -> None:
    few = (*SETTING, cache, "--separation=4", "--mechanisms=identity,toeplitz,banded")
    weights = file_of_weights(tmp_path, 12)
    for error, column, unit in (
        ("mean", "effective RMSE", "RMSE"),
        ("max", "worst round", "max error"),
        (weights, "weighted", "weighted error"),
    ):
        out = call_plan(*few, f"--error={error}").done()
        lines = out.splitlines()
        (at,) = (i for i, line in enumerate(lines) if line.startswith("  mechanism  "))
        names = [name.strip() for name in lines[at].split("  ") if name.strip()]
        assert names[1] == column
        assert names[names.index("noise mult.") - 1] == unit
        assert {"effective RMSE", "worst round"} <= set(names)
        assert (shlex.quote(error) in lines[at - 2]) == (error != "mean")
        fields = json.loads(call_plan(*few, f"--error={error}", "--format=json")[1])
        errors = [each["effective_error"] for each in fields["candidates"]]
        rows = [line[2:].rsplit(maxsplit=len(names) - 1) for line in lines[at + 1 :]]
        written = [float(row[1]) for row in rows[: len(errors)]]
        assert written == pytest.approx(errors, rel=1e-3)


def test_a_table_that_names_what_is_infeasible(cache: str) -> None:
    status, out, err = call_plan(
        *SETTING, "--separation=4", "--noise_memory_gb=1e-5", cache, "--format=text"
    )
    assert status == 0
    lines = out.splitlines()
    assert lines[0] == (
        "12 rounds of 10 clients, 40 clients with timers: participations at least 4 rounds apart"
    )
    assert lines[2] == "at most 1e-05 GB of noise between rounds (--noise_memory_gb)"
    header, *rows = lines[4 : lines.index("", 4)]
    assert "effective RMSE" in header
    assert [row[:2] for row in rows].count("* ") == 1
    assert max(len(line) for line in [*lines[:3], header, *rows]) <= 130
    # The last two columns end where their titles end.
    assert len({len(row) for row in [header, *rows]}) == 1
    assert "  banded 4 keeps more noise than allowed; at most 3 bands fit" in lines
    assert any(line.startswith("Recommended: ") for line in lines)
    assert "To run it:" in lines
    # Progress is shown, elsewhere.
    assert "toeplitz 3" in err
    assert "mf-plan: compared" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target_epsilon=1e9"], "--target_epsilon: no noise multiplier between"),
        (["--target_rho=1"], "--target_epsilon and --target_rho exclude each other"),
        (["--delta=0.1"], "not below 1 / 40 clients"),
        (["--separation=5"], "50 are needed"),
        (["--population=9"], "--clients_per_round=10 is more than --population=9"),
        (["--sampling=poisson", "--separation=4"], "--separation and --max_participations are"),
        (
            ["--mechanisms=blt", "--mechanisms=banded,tree"],
            "count: write --mechanisms=blt,banded,tree",
        ),
        (["something"], "unexpected argument"),
        (["--error=/dev/null"], "--error=/dev/null must hold one number on each line"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_clear_line(cache: str, arguments: list[str], message: str) -> None:
    err = call_plan(*SETTING, cache, *arguments).refused()
    # What progress draws over itself ends with a line of its own.
    *progress, last = err.strip().splitlines()
    assert message in last
    assert last.startswith("mf-plan: ")
    assert all("done" in line for line in progress)


def test_matrices_of_ones_own_are_compared(cache: str, tmp_path: pathlib.Path) -> None:
    matrices = {
        "bands": np.eye(12) + 0.6 * np.eye(12, k=-1) + 0.4 * np.eye(12, k=-2),
        "dense": np.tril(np.exp(-0.3 * np.abs(np.subtract.outer(range(12), range(12))))),
    }
    for name, matrix in matrices.items():
        mfa.checkpoints.save(mfa.factorizations.from_matrix(matrix), tmp_path / name)
    own = f"--checkpoint={','.join(str(tmp_path / name) for name in matrices)}"
    few = (cache, "--mechanisms=identity", own)
    fields = fields_of_plan(*few, "--separation=4")
    found = {each["options"].get("checkpoint"): each for each in fields["candidates"]}
    for name, matrix in matrices.items():
        rows = np.tri(12) @ np.linalg.inv(matrix)
        sensitivity = mfa.sensitivity.compute(matrix, MinSeparation(4)).value
        rmse = sensitivity * np.linalg.norm(rows) / math.sqrt(12)
        assert found[str(tmp_path / name)]["rmse"] == pytest.approx(rmse)
    (chosen,) = (each for each in fields["candidates"] if each["recommended"])
    mechanism = run_lines(fields["commands"][-1])["mechanism"]
    name = pathlib.Path(chosen["options"]["checkpoint"]).name
    np.testing.assert_allclose(mechanism.factorization.strategy_matrix(), matrices[name])
    assert mechanism.noise_reference == MinSeparation(4)
    assert mechanism.noise_multiplier == chosen["noise_multiplier"]

    # Where clients are drawn, bands amplify, and a matrix of as many bands as rounds does not fit.
    drawn = fields_of_plan(*few, "--sampling=poisson")
    assert [each["num_bands"] for each in drawn["candidates"]] == [3, 1]
    assert [each["mechanism"] for each in drawn["infeasible"]] == [f"checkpoint {tmp_path}/dense"]
    mechanism = run_lines(drawn["commands"][-1])["mechanism"]
    assert mechanism.sampling.to_dict() == drawn["candidates"][0]["sampling"]
    assert mechanism.guarantee(1.5e-6).epsilon <= 7.123456789
    call_plan(*SETTING, own, "--num_rounds=11").refused(
        f"--checkpoint={tmp_path / 'bands'} is for 12 rounds, and --num_rounds=11"
    )


def test_a_target_of_rho(
    cache: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = [each for each in SETTING if not each.startswith("--target_epsilon")]
    given += ["--target_rho=0.02", "--mechanisms=blt", cache, "--format=json"]
    fields = call_plan(*given).fields()
    assert fields["target_rho"] == 0.02
    updates = fields["clients_seconds_per_round"] / fields["model_size"]
    assert updates == pytest.approx(10 * 5.5e-9)
    # 1 / sqrt(2 rho) = 5.
    assert fields["target_epsilon"] == mfa.accounting.epsilon(5.0, 1.5e-6)
    (chosen,) = (candidate for candidate in fields["candidates"] if candidate["recommended"])
    assert chosen["noise_multiplier"] == pytest.approx(5.0, rel=1e-15)
    make, run, aggregator = fields["commands"]
    run_factorize(shlex.split(make))
    options = options_of_run(shlex.split(run))
    assert (options["target_rho"], options["target_epsilon"]) == (None, None)
    mechanism = mfa.load(arguments_of(aggregator)[0])
    assert options["noise_multiplier"] == chosen["noise_multiplier"] == mechanism.noise_multiplier
    assert mfa.accounting.zcdp_rho(chosen["noise_multiplier"]) <= 0.02

    call_plan(*given, "--sampling=any").refused("--sampling takes only --target_epsilon")


_WITHOUT_TARGET = tuple(each for each in SETTING if not each.startswith("--target_epsilon"))


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--noise_multiplier=0", "has an epsilon of inf"),
        ("--noise_multiplier=0.01", "stated for so little noise"),
        ("--noise_multiplier=1e9", "has an epsilon of 0 "),
        ("--sampling=poisson --noise_multiplier=1", "every mechanism has an epsilon of its own"),
    ],
)
def test_a_noise_multiplier_without_an_epsilon_is_refused(
    cache: str, argument: str, message: str
) -> None:
    call_plan(*_WITHOUT_TARGET, cache, *argument.split()).refused(message)


@pytest.mark.long
def test_some_mechanisms_in_some_time(cache: str, tmp_path: pathlib.Path) -> None:
    few = (cache, "--separation=4", "--mechanisms=blt,identity")
    fields = fields_of_plan(*few, "--time_limit=0")
    assert {each["mechanism"] for each in fields["candidates"]} == {"blt", "identity"}
    assert (fields["skipped"], fields["time_limit"]) == ([], None)
    assert fields_of_plan(*few)["time_limit"] == 50.0
    assert fields_of_plan(cache, *DRAWN_BY_POISSON)["time_limit"] is None

    late = (f"--cache_dir={tmp_path}", "--separation=3", "--time_limit=1e-9")
    both = (*late, "--mechanisms=banded,identity")
    fields = fields_of_plan(*both)
    assert fields["recommended"] == "identity"
    assert [each["mechanism"] for each in fields["skipped"]] == ["banded 3"]
    status, out, err = call_plan(*SETTING, *both)
    assert status == 0
    assert "Skipped for lack of time" in out
    assert "mf-plan: skipped banded 3: it was not begun within the time limit" in err
    call_plan(*SETTING, *late, "--mechanisms=banded").refused(
        "no mechanism that fits was computed within 1e-09 s", has_begun=True
    )
    call_plan(*SETTING, "--mechanisms=blt,bands").refused(
        "there is no mechanism 'bands', only identity, tree"
    )
