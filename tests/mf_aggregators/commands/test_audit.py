"""mf-audit as scripts use it."""

import functools
import importlib.util
import math
import pathlib
from typing import Any

import numpy as np
import pytest

from mf_aggregators import checkpoints, factorizations, workloads
from mf_aggregators.commands import audit, command_line
from mf_aggregators.kernel import integers
from mf_aggregators.mechanism import Mechanism
from mf_aggregators.participation import (
    BallsInBins,
    FixedSizeSampling,
    MinSeparation,
    PoissonSampling,
    SamplingScheme,
)
from tests import console_commands

_FIELDS = {
    "mechanism",
    "num_rounds",
    "participation",
    "noise_multiplier",
    "delta",
    "epsilon",
    "epsilon_lower_bound",
    "epsilon_lower_bound_any_mechanism",
    "ratio",
    "epsilon_of_a_perfect_attack",
    "exceeded",
    "canaries",
    "false_alarm_rate",
    "seconds",
}

_call = functools.partial(console_commands.call, "mf-audit")


@pytest.mark.parametrize("backend", [pytest.param("tff", marks=pytest.mark.long), "numpy"])
@pytest.mark.usefixtures("_runs_in_this_process")
def test_a_script_gets_one_json_object_and_status_0(backend: str) -> None:
    """An intact mechanism: a false alarm, and another status, with probability 1e-6 at most."""
    ended = _call(
        f"--backend={backend}",
        "--mechanism=identity",
        "--num_rounds=3",
        "--canaries=500",
        "--false_alarm_rate=1e-6",
        "--format=json",
    )
    fields = ended.fields()
    assert fields.keys() >= _FIELDS
    assert fields["backend"] == backend
    assert fields["exceeded"] is False
    assert 0.0 < fields["epsilon_lower_bound"] < fields["epsilon"]
    assert fields["ratio"] == fields["epsilon_lower_bound"] / fields["epsilon"]
    assert fields["epsilon"] < fields["epsilon_of_a_perfect_attack"] < math.inf
    assert (fields["canaries"], fields["false_alarm_rate"]) == (500, 1e-6)
    # No terminal, and so no bar.
    assert "\r" not in ended.errors
    assert "Traceback" not in ended.errors


@pytest.mark.long
@pytest.mark.usefixtures("_runs_in_this_process")
def test_a_violated_claim_fails_a_script(monkeypatch: pytest.MonkeyPatch) -> None:
    intact = integers.clip_to_grid

    def four_times(*given: Any) -> Any:
        return [np.multiply(each, 4, out=each) for each in intact(*given)]

    monkeypatch.setattr(integers, "clip_to_grid", four_times)
    arguments = ["--mechanism=tree", "--num_rounds=3", "--decoder=full", "--canaries=500"]
    out = _call("--backend=numpy", *arguments).done(1)
    assert "VIOLATED" in out
    assert "No violation" not in out


@pytest.mark.short_cases(1)
@pytest.mark.parametrize("storage", ["state", "disk"])
@pytest.mark.usefixtures("_runs_in_this_process")
def test_a_checkpoint_is_audited_under_its_schema_and_storage(
    tmp_path: pathlib.Path, storage: str
) -> None:
    """A false alarm with probability 1e-6 at most."""
    workload, schema = workloads.Workload("prefix_sum", 6), MinSeparation(3)
    factorization = factorizations.banded(workload.matrix(), 3, participation=schema)
    checkpoints.save(
        factorization, tmp_path / "c", workload=workload.to_dict(), participation=schema
    )
    fields = _call(
        "--backend=numpy",
        f"--checkpoint={tmp_path / 'c'}",
        "--target_epsilon=15",
        "--delta=1e-5",
        "--canaries=500",
        "--false_alarm_rate=1e-6",
        f"--noise_storage={storage}",
        "--format=json",
    ).fields()
    assert fields["mechanism"] == "banded"
    assert fields["participation"] == str(schema)
    assert fields["epsilon"] == pytest.approx(15.0)
    assert fields["delta"] == 1e-5
    assert len(fields["audited_rounds"].split()) == 2
    # About 80 %, with a standard deviation of 2 %.
    assert fields["ratio"] > 0.65


@pytest.mark.usefixtures("_runs_in_this_process")
def test_an_audit_that_proves_little_says_so() -> None:
    little = ("--num_rounds=2", "--noise_multiplier=4", "--canaries=100")
    assert "reached only" in _call("--backend=numpy", "--mechanism=identity", *little).done()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--mechanism or --checkpoint is required"),
        (["--mechanism=identity", "--checkpoint=c"], "--checkpoint and --mechanism exclude"),
        (["--checkpoint=nowhere"], "--checkpoint: nowhere/factorization.json cannot be read"),
        (["--checkpoint=nowhere", "--num_rounds=4"], "--num_rounds is set by the checkpoint"),
        (["--mechanism=identity", "--num_rounds=5000"], "at most 4096"),
        (["--mechanism=identity", "--num_rounds=2000", "--adaptive_clip"], "at most 1024"),
        (["--mechanism=blt", "--separation=3", "--max_participations=9"], "at most 3 fit"),
        (["--mechanism=identity", "--target_epsilon=500", "--canaries=50"], "cannot refute"),
        (["--mechanism=identity", "--false_alarm_rate=1.5"], "found 1.5"),
    ],
)
@pytest.mark.usefixtures("_runs_in_this_process")
def test_bad_input_is_one_clear_line_and_status_2(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert _call(*arguments).refused(message).startswith("mf-audit: ")


def test_without_tensorflow_federated_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    _call("--mechanism=identity", "--backend=tff").refused(
        "needs tensorflow_federated, which is not installed", "quickstart.py setup"
    )


def test_without_tensorflow_federated_it_runs_in_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: None if name.startswith("tensorflow") else found(name),
    )
    small = ("--mechanism=identity", "--num_rounds=2", "--canaries=100", "--format=json")
    assert _call(*small).fields()["backend"] == "numpy"


def test_a_fault_of_the_program_is_no_violated_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*unused: Any, **also_unused: Any) -> Any:
        raise ZeroDivisionError("float division by zero")

    monkeypatch.setattr(audit.audit, "audit", fail)
    status, out, err = _call("--mechanism=identity")
    assert (status, out) == (70, "")
    assert err.count("\n") == 1
    assert "ZeroDivisionError: float division by zero (test_audit.py, line" in err
    assert "Traceback" not in err


def _saved(directory: pathlib.Path, scheme: SamplingScheme) -> str:
    banded = factorizations.banded(scheme.num_rounds, num_bands=2)
    Mechanism(banded, scheme, 0.5).save(directory)
    return f"--checkpoint={directory}"


def test_the_noise_of_a_mechanism_is_its_own_whatever_participation_is_asked_for(
    tmp_path: pathlib.Path,
) -> None:
    matrix = factorizations.banded(6, num_bands=2)
    Mechanism(matrix, MinSeparation(2), 0.5).save(tmp_path)

    def audited(*words: str) -> Mechanism:
        values = command_line.flags_of(audit._define_flags)
        values(["mf-audit", f"--checkpoint={tmp_path}", *words])
        return audit._audited(values)

    assert audited() == Mechanism(matrix, MinSeparation(2), 0.5)
    # The sensitivity of three columns of norm one, two rounds apart, is sqrt(3) of one.
    once = audited("--participation=single")
    assert once.noise_multiplier == pytest.approx(0.5 * 3.0**0.5)
    assert audited("--noise_multiplier=2").noise_multiplier == 2.0


@pytest.mark.usefixtures("_runs_in_this_process")
def test_a_mechanism_of_drawn_clients_is_audited_as_they_are_drawn(tmp_path: pathlib.Path) -> None:
    saved = _saved(tmp_path / "poisson", PoissonSampling(2, 2, 100, 25))
    fields = _call(
        saved,
        "--backend=numpy",
        "--canaries=100",
        "--delta=0.02",
        "--format=json",
        "--noise_multiplier=0.7",
    ).fields()
    assert fields["participation"] == "poisson sampling of 25 of 100 clients"
    assert fields["noise_multiplier"] == 0.7
    stated = PoissonSampling(2, 2, 100, 25).epsilon(0.7, 0.02)
    assert fields["epsilon_at_delta_0.02"] == pytest.approx(stated, rel=1e-9)
    assert fields["epsilon_lower_bound_at_delta_0.02"] <= stated
    assert not fields["exceeded"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--adaptive_clip"], "--participation"),
        (["--target_epsilon=8"], "--noise_multiplier"),
    ],
)
def test_what_drawn_clients_are_not_audited_for_is_refused(
    arguments: list[str], message: str, tmp_path: pathlib.Path
) -> None:
    saved = _saved(tmp_path / "bins", BallsInBins(4, 2, 40, 10, 4))
    _call(saved, *arguments).refused(message)


def test_draws_that_depend_on_each_other_are_not_audited(tmp_path: pathlib.Path) -> None:
    saved = _saved(tmp_path / "subsets", FixedSizeSampling(4, 2, 40, 10))
    _call(saved).refused("fixed_size", "--participation")
