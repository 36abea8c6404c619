"""Runs whose directory lacks a file, or has something else in its place: what their owner reads."""

import pathlib

import numpy as np
import pytest

from simulations.comparison import run_comparisons
from simulations.runs import run_directory
from simulations.runs.run_directory import (
    MetricsLog,
    ParticipationLedger,
    RunDirectory,
    RunDirectoryError,
)
from tests import console_commands
from tests.refusals import refuses

_METRICS = b"round,loss\r\n1,2.5\r\n"


@pytest.fixture
def run(tmp_path: pathlib.Path, _training_is_cut_off: None) -> RunDirectory:
    """A run of one round, as its directory shows it; training itself is cut off."""
    directory = RunDirectory(tmp_path / "run")
    assert "training begins" in _resumed(directory)
    (directory.states / "round_0").mkdir()
    (directory.states / "round_1").mkdir()
    ParticipationLedger(("a", "b"), (np.array([0]),)).save(directory.ledger)
    (directory.path / run_directory.METRICS_FILE).write_bytes(_METRICS)
    assert "training begins" in _resumed(directory)
    return directory


def _resumed(directory: RunDirectory, *flags: str) -> str:
    """What the command says when it is told to go on."""
    ended = console_commands.call(
        "run-digits",
        f"--output_dir={directory.path}",
        "--num_rounds=4",
        *(flags or ["--mechanism=identity"]),
    )
    assert ended.status == 2
    assert ended.printed == ""
    return ended.errors


def test_a_missing_ledger_beside_states_is_what_is_missing(run: RunDirectory) -> None:
    run.ledger.unlink()
    said = _resumed(run)
    assert "has states and no participation.npz" in said


def test_a_missing_ledger_without_states_is_said_to_lack_both(run: RunDirectory) -> None:
    run.ledger.unlink()
    for name in ("round_0", "round_1"):
        (run.states / name).rmdir()
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
    assert "training begins" in _resumed(run)


@pytest.mark.usefixtures("_training_is_cut_off")
def test_the_directory_of_drawn_clients_that_is_open_to_others_is_refused(
    tmp_path: pathlib.Path,
) -> None:
    directory = RunDirectory(tmp_path / "run")
    sampled = ("--mechanism=banded", "--num_bands=2", "--sampling=poisson", "--target_epsilon=8")
    assert "training begins" in _resumed(directory, *sampled)
    ParticipationLedger(("a", "b")).save(directory.ledger)
    directory.path.chmod(0o750)
    said = _resumed(directory, *sampled)
    assert "who was drawn" in said
    assert f"chmod 700 {directory.path}" in said
    directory.path.chmod(0o700)
    assert "training begins" in _resumed(directory, *sampled)


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
    assert "metrics.csv is no file of metrics" in said
    assert "delete it" in said
    # Nobody but its owner takes it away.
    assert path.read_bytes() == garbage
    for read in (
        lambda: MetricsLog(run, ["loss"], 1),
        lambda: run_comparisons.mean_accuracy([run.path]),
    ):
        with refuses("metrics", error=RunDirectoryError):
            read()
    path.unlink()
    assert "training begins" in _resumed(run)


def test_what_a_loss_of_power_leaves_of_metrics_is_no_fault(run: RunDirectory) -> None:
    for cut in range(len(_METRICS) + 1):
        for left in (_METRICS[:cut], b"\0" * cut, _METRICS[:cut] + b"\0" * 20):
            (run.path / run_directory.METRICS_FILE).write_bytes(left)
            run_directory.check_metrics(run.path / run_directory.METRICS_FILE)
