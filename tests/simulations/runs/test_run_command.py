"""Runs that go on, up to where training begins: which flags may change, and broken files."""

import errno
import json
import math
import pathlib
import re
import shlex
import types
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mf_aggregators.tff import processes
from simulations.runs import run_command, run_directory, run_reports
from simulations.runs.run_directory import (
    ParticipationLedger,
    RunDirectory,
    RunDirectoryError,
)
from simulations.runs.run_reports import MetricsLog
from tests import console_commands
from tests.examples import examples
from tests.refusals import refuses
from tests.simulations.small_disks import files_of_at_most

_BEGINS = "training begins"
_FLAGS = ("--num_rounds=6", "--clients_per_round=5", "--separation=2", "--mechanism=identity")


@pytest.fixture
def run(tmp_path: pathlib.Path, _training_is_cut_off: None) -> RunDirectory:
    """A run of two rounds, as its directory shows it; training itself is cut off."""
    directory = RunDirectory(tmp_path / "run")
    assert _BEGINS in _resumed(directory)
    (directory.states / "round_2").mkdir()
    cohorts = (np.arange(5), np.arange(5, 10))
    names = tuple(f"client {number}" for number in range(143))
    ParticipationLedger(names, cohorts).save(directory.ledger)
    return directory


def _resumed(directory: RunDirectory, *flags: str, usual: Sequence[str] = _FLAGS) -> str:
    """What the command says when it is told to go on."""
    given = (f"--output_dir={directory.path}", *usual, *flags)
    ended = console_commands.call("run-digits", *given)
    ended.refused(has_begun=True)
    return ended.errors


def _config(directory: RunDirectory) -> dict[str, object]:
    found: dict[str, object] = json.loads((directory.path / "config.json").read_text())
    return found


def test_flags_that_no_guarantee_rests_on_may_change(run: RunDirectory) -> None:
    before = _config(run)
    old = before["flags"]
    assert isinstance(old, dict)
    changes = {
        "minimum_uploads": 3,
        "over_selection": 1.5,
        "retry_minutes": 20.0,
        "max_attempts": 7,
        "evaluate_every": 2,
    }
    given = [f"--{name}={value}" for name, value in changes.items()]
    said = _resumed(run, *given)
    assert _BEGINS in said
    assert "from round 3 on, with new values of --minimum_uploads, --over_selection," in said
    recorded = {"changed_flags": {"2": {name: old[name] for name in changes}}}
    assert _config(run) == {**before, "flags": {**old, **changes}, **recorded}
    # Repeated, nothing changes. Back again is a change as well, and round 2 keeps its first flags.
    assert "from round" not in _resumed(run, *given)
    assert "from round 3 on, with new values of --max_attempts" in _resumed(run, *given[:3])
    assert _config(run)["changed_flags"] == recorded["changed_flags"]


def test_a_run_that_is_extended_may_change_flags_too(run: RunDirectory) -> None:
    config = _config(run)
    (run.path / "config.json").write_text(json.dumps({**config, "num_parameters": 650}))
    flags = ("--num_rounds=8", "--minimum_uploads=4", "--target_epsilon=50")
    assert _BEGINS in _resumed(run, *flags)
    config = _config(run)
    assert config["changed_flags"] == {"2": {"minimum_uploads": None}}
    assert "extends" in config
    assert "from round" not in _resumed(run, *flags)


@pytest.mark.parametrize(
    "flags",
    [
        ["--clip_norm=0.5"],
        ["--clients_per_round=6", "--seed=3"],
        ["--noise_multiplier=3"],
        ["--target_rho=1"],
        ["--target_epsilon=3"],
        ["--private_metrics"],
        ["--separation=3", "--max_participations=2", "--dropout_probability=0.1"],
        ["--num_rounds=5"],
        ["--client_optimizer=adam", "--zeroing_norm=2"],
    ],
)
def test_other_flags_are_refused_by_a_line_that_can_be_followed(
    run: RunDirectory, flags: list[str]
) -> None:
    before = _config(run)
    said = _resumed(run, *flags)
    assert "with other flags" in said
    given = re.search(r"give ((?:--\S+ ?)+)", said)
    left_out = re.search(r"leave out ((?:--\S+ ?)+)", said)
    advised = shlex.split(given[1].replace(";", "")) if given else []
    unwanted = shlex.split(left_out[1].replace(";", "")) if left_out else []
    assert advised or unwanted
    kept = [flag for flag in flags if flag.partition("=")[0] not in unwanted]
    assert _BEGINS in _resumed(run, *kept, *advised)
    assert _config(run) == before


def test_a_full_disk_is_named_with_what_to_do(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after the last round, where the weights and the statement are written."""

    def write(*unused: object) -> NoReturn:
        with files_of_at_most(100):
            run.save_model(["w"], [np.zeros(1000)])
        raise AssertionError("there was room")

    monkeypatch.setattr(run_command, "_train", write)
    # What the kernel says of this file is said of all files of a full disk.
    monkeypatch.setattr(errno, "ENOSPC", errno.EFBIG)
    said = _resumed(run)
    assert f"{run.final_model}: File too large. Free space, and run the same command again." in said
    assert "Errno" not in said


_JUNK: list[object] = [None, True, -1, 1.5, math.inf, 10**30, "x", "", [], [[]], [1], {}, {"a": 1}]


def _places(value: object, *path: object) -> list[tuple[object, ...]]:
    """The paths to all parts of a JSON value, but for the whole."""
    items = value.items() if isinstance(value, dict) else enumerate(value)  # type: ignore[arg-type]
    found: list[tuple[object, ...]] = []
    for name, part in items:
        found.append((*path, name))
        if isinstance(part, dict | list):
            found += _places(part, *path, name)
    return found


@settings(
    max_examples=examples(60),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_a_broken_configuration_is_refused_in_a_line(
    run: RunDirectory, data: st.DataObject
) -> None:
    """With any part of it missing, or another thing in its place: no status is 70."""
    file = run.path / "config.json"
    flags = ("--num_rounds=8", "--evaluate_every=3", "--over_selection=2", "--target_epsilon=50")
    if "extends" not in _config(run):
        file.write_text(json.dumps({**_config(run), "num_parameters": 650}))
        assert _BEGINS in _resumed(run, *flags)
    whole = file.read_text()
    config = json.loads(whole)
    # Most entries are flags, and one of them stands for the others.
    places = [each for each in _places(config) if each[:1] != ("flags",) or len(each) == 1]
    *path, last = data.draw(st.sampled_from([*places, ("flags", "noise_multiplier")]))
    part = config
    for name in path:
        part = part[name]
    del part[last]
    if data.draw(st.booleans()) and isinstance(part, dict):
        part[last] = data.draw(st.sampled_from(_JUNK))
    file.write_text(json.dumps(config))
    try:
        said = _resumed(run, *flags)
    finally:
        file.write_text(whole)
    assert "internal error" not in said
    assert len(said.splitlines()[-1]) < 2000
    if [*path, last] == ["cohort_seed"]:
        assert "cohort_seed" in said or _BEGINS in said


def test_signals_are_requests_only_once_the_worker_has_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Until then there is no round that a request could wait for."""
    calls: list[str] = []

    def stop_requests(message: str) -> Any:
        calls.append("requests")
        raise KeyboardInterrupt

    monkeypatch.setattr(processes, "end_workers_at_exit", lambda: calls.append("ends at exit"))
    monkeypatch.setattr(processes, "start_worker", lambda: calls.append("started"))
    monkeypatch.setattr(processes, "stop_requests", stop_requests)
    monkeypatch.setattr(run_reports, "RunStatements", lambda run: None)
    run: Any = types.SimpleNamespace(
        directory=None, config=types.SimpleNamespace(secure_aggregation=False)
    )
    command: Any = types.SimpleNamespace(name="run-digits")
    with pytest.raises(KeyboardInterrupt):
        run_command._train(Any, command, run, None)
    assert calls == ["ends at exit", "started", "requests"]


# Runs whose directory lacks a file, or has something else in its place: what their owner reads.


_METRICS = b"round,loss\r\n1,2.5\r\n"


def test_a_missing_ledger_beside_states_is_what_is_missing(run: RunDirectory) -> None:
    run.ledger.unlink()
    said = _resumed(run)
    assert "has states and no participation.npz" in said


def test_a_missing_ledger_without_states_is_said_to_lack_both(run: RunDirectory) -> None:
    run.ledger.unlink()
    (run.states / "round_2").rmdir()
    (run.path / run_directory.METRICS_FILE).write_bytes(_METRICS)
    assert "has neither states nor participation.npz" in _resumed(run)


@pytest.mark.parametrize("name", ["checkpoints", "noise"])
def test_a_directory_with_secrets_that_is_open_to_others_is_refused(
    run: RunDirectory, name: str
) -> None:
    """As a copy leaves it: a run that goes on would put more secrets there."""
    secret = run.path / name
    secret.mkdir(mode=0o700, exist_ok=True)
    secret.chmod(0o755)
    assert f"chmod 700 {secret}" in _resumed(run)
    secret.chmod(0o700)
    assert _BEGINS in _resumed(run)


@pytest.mark.usefixtures("_training_is_cut_off")
def test_the_directory_of_drawn_clients_that_is_open_to_others_is_refused(
    tmp_path: pathlib.Path,
) -> None:
    directory = RunDirectory(tmp_path / "run")
    usual = ["--num_rounds=4", "--mechanism=banded", "--num_bands=2", "--sampling=poisson"]
    assert _BEGINS in _resumed(directory, usual=usual)
    ParticipationLedger(("a", "b")).save(directory.ledger)
    directory.path.chmod(0o750)
    said = _resumed(directory, usual=usual)
    assert "who was drawn" in said
    assert f"chmod 700 {directory.path}" in said
    directory.path.chmod(0o700)
    assert _BEGINS in _resumed(directory, usual=usual)


_GARBAGE = [
    b"garbage",
    b"garbage\n",
    b"\xff\xfe\x00garbage\n1,2\n",
    b"loss,round\r\n2.5,1\r\n",
    b"1,2.5\r\n",
    b"\n1,2.5\n" + _METRICS,
    b"rounds,loss\n1,2.5\n",
]


@pytest.mark.parametrize("garbage", _GARBAGE)
def test_metrics_that_are_garbage_are_refused(run: RunDirectory, garbage: bytes) -> None:
    path = run.path / run_directory.METRICS_FILE
    path.write_bytes(garbage)
    said = _resumed(run)
    assert "metrics.csv is not a file of metrics" in said
    assert "delete it" in said
    # Nobody but its owner takes it away.
    assert path.read_bytes() == garbage
    with refuses("metrics", error=RunDirectoryError):
        MetricsLog(run, ["loss"], 1)
    path.unlink()
    assert _BEGINS in _resumed(run)


def test_what_a_loss_of_power_leaves_of_metrics_is_no_fault(run: RunDirectory) -> None:
    for cut in range(len(_METRICS) + 1):
        for left in (_METRICS[:cut], b"\0" * cut, _METRICS[:cut] + b"\0" * 20):
            (run.path / run_directory.METRICS_FILE).write_bytes(left)
            run_directory.check_metrics(run.path / run_directory.METRICS_FILE)
