"""Canary clients: their rounds, their data, and the audit of a real run."""

import dataclasses
import pathlib
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mf_aggregators.audit import run_audit
from mf_aggregators.commands import command_line
from mf_aggregators.participation import (
    FixedEpochOrder,
    MinSeparation,
    Participation,
    SingleParticipation,
)
from mf_aggregators.tff.processes import StopRequest
from simulations.examples.digits import COMMAND
from simulations.runs import (
    canary_clients,
    run_command,
    run_reports,
    trainer,
)
from simulations.runs.canary_clients import CanaryClients
from simulations.runs.run_command import RunDirectory
from simulations.runs.run_config import RunConfig
from simulations.runs.run_plan import Run
from simulations.runs.run_reports import RunStatements
from simulations.training.federated_task import FederatedTask
from tests import console_commands
from tests.refusals import refuses
from tests.simulations.parsed_flags import config_of

_ROUNDS, _CANARIES = 2, 150


def _options(*arguments: str) -> RunConfig:
    return config_of(COMMAND, f"--audit_canaries={_CANARIES}", *arguments)


def _run(path: pathlib.Path, *arguments: str) -> Run:
    options = _options(
        f"--num_rounds={_ROUNDS}", "--mechanism=identity", "--separation=2", *arguments
    )
    data = COMMAND.open_data(options)
    directory = RunDirectory(path)
    return run_command.run_plan.plan(options, data, directory, seed=1)


def _weights() -> tuple[np.ndarray, ...]:
    return np.zeros((64, 10), np.float32), np.zeros(10, np.float32)


@pytest.mark.parametrize(
    ("participation", "num_rounds", "most"),
    [
        (MinSeparation(5, 3), 20, 3),
        (MinSeparation(5), 20, 4),
        (FixedEpochOrder(3, 4), 12, 3),
        (SingleParticipation(), 7, 1),
    ],
)
def test_canaries_keep_the_schema_and_take_part_in_every_round(
    participation: Participation, num_rounds: int, most: int
) -> None:
    joins = run_audit.Canaries.takes_part(participation, num_rounds, 60)
    assert joins.shape == (num_rounds, 60)
    assert np.all(np.any(joins, axis=1))
    counts = np.sum(joins, axis=0)
    assert np.max(counts) == most
    for canary in range(60):
        rounds = np.flatnonzero(joins[:, canary])
        apart = np.diff(rounds)
        # As soon as the timers allow.
        assert np.all(apart == participation.separation_in(num_rounds))
        if counts[canary] < most:
            assert rounds[-1] + participation.separation_in(num_rounds) >= num_rounds


def test_a_round_has_the_cohort_and_the_canaries_that_are_in(tmp_path: pathlib.Path) -> None:
    import tensorflow as tf

    run = _run(tmp_path)
    clients = CanaryClients(run, _weights())
    drawn = run_audit.Canaries.drawn(1, _CANARIES, 650, _ROUNDS)
    joins = run_audit.Canaries.takes_part(run.mechanism.noise_reference, _ROUNDS, _CANARIES)
    batches = [tf.data.Dataset.range(3) for _ in range(4)]
    for index in range(_ROUNDS):
        data = clients.client_data(batches, index)
        who = np.flatnonzero(joins[index] & drawn.is_included)
        assert 0 < len(who) < np.sum(joins[index])
        assert len(data) == 4 + len(who) <= canary_clients.largest_cohort(run)
        assert [len(list(each["batches"])) for each in data] == [3] * 4 + [0] * len(who)
        assert not any(list(each["canary"]) for each in data[:4])
        for canary, each in zip(who, data[4:], strict=True):
            ((coordinates, entries),) = each["canary"].as_numpy_iterator()
            np.testing.assert_array_equal(coordinates, drawn.coordinates[canary])
            # Ten clip norms, which the run has to clip.
            assert np.linalg.norm(entries) == pytest.approx(10.0 * float(run.config.clip_norm))


def test_canaries_stay_below_the_norm_that_zeroes_or_are_refused(tmp_path: pathlib.Path) -> None:
    import tensorflow as tf

    low = CanaryClients(_run(tmp_path, "--zeroing_norm=0.31"), _weights())
    data = low.client_data([tf.data.Dataset.range(1)], 0)
    ((_, entries),) = data[-1]["canary"].as_numpy_iterator()
    assert 0.3 <= np.max(np.abs(entries)) < 0.31
    with refuses("--zeroing_norm", "canaries"):
        CanaryClients(_run(tmp_path, "--zeroing_norm=0.3"), _weights())


@dataclasses.dataclass(frozen=True)
class _Audited:
    run: Run
    task: FederatedTask
    outcome: Any


@pytest.fixture(scope="module")
def audited(tmp_path_factory: pytest.TempPathFactory) -> _Audited:
    """A whole run in TFF, of a fixed seed: its bounds are the same every time."""
    run = _run(tmp_path_factory.mktemp("audited"), "--seed=3")
    task = run.data.load(1)
    outcome = trainer.train(run, task, RunStatements(run), StopRequest())
    return _Audited(run, task, outcome)


@pytest.mark.long
def test_a_real_run_is_not_refuted_and_reaches_half_of_epsilon_8(audited: _Audited) -> None:
    found = audited.outcome.audit
    assert not found.is_refuted
    assert found.epsilon == pytest.approx(8.0, rel=1e-3)
    assert 4.0 <= found.epsilon_lower_bound < 8.0
    assert found.noise.share == pytest.approx(1.0, abs=0.2)


def _claiming(audited: _Audited, **changes: Any) -> CanaryClients:
    mechanism = dataclasses.replace(audited.run.mechanism, **changes)
    run = dataclasses.replace(audited.run, mechanism=mechanism)
    return CanaryClients(run, audited.task.initial_weights)


@pytest.mark.long
def test_a_run_with_half_of_the_noise_that_it_claims_is_refuted(audited: _Audited) -> None:
    doubled = 2.0 * audited.run.mechanism.noise_multiplier
    found = _claiming(audited, noise_multiplier=doubled).audit(_ROUNDS)
    assert found.is_refuted
    assert found.noise.p_value < run_audit.FALSE_ALARM_RATE
    assert found.noise.share == pytest.approx(0.5, abs=0.1)
    assert found.mu_lower_bound > found.mu


def _use_a_row_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second round has the row of Z of the first."""
    import tensorflow as tf

    from mf_aggregators.tff import graph_check
    from mf_aggregators.tff.tensor_rows import SegmentRows

    intact = SegmentRows.of_z

    def faulty(self: Any, tile: Any, row: Any, number: Any) -> Any:
        return intact(self, tile, tf.where(tf.equal(row, 1), tf.zeros_like(row), row), number)

    monkeypatch.setattr(SegmentRows, "of_z", faulty)
    # Which would refuse these graphs.
    monkeypatch.setattr(graph_check, "check", lambda query: None)


def _ignore_timers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is in the run takes part in all of its rounds."""
    monkeypatch.setattr(
        run_audit, "takes_part", lambda _, rounds, number: np.ones((rounds, number), bool)
    )


@pytest.mark.long_cases(1)
@pytest.mark.long
@pytest.mark.parametrize("fault", [_use_a_row_twice, _ignore_timers])
def test_a_real_run_that_is_broken_is_refuted(
    fault: Callable[[pytest.MonkeyPatch], None],
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fault(monkeypatch)
    # Clients that hardly learn: what they send alike in all rounds would hide some of canaries.
    arguments = ("--num_rounds=4", "--separation=4", "--client_learning_rate=1e-6")
    run = _run(tmp_path, "--seed=3", *arguments)
    outcome = trainer.train(run, run.data.load(1), RunStatements(run), StopRequest())
    found = outcome.audit
    assert found is not None
    assert found.is_refuted
    if fault is _use_a_row_twice:
        assert found.noise.weakest_round == 2
        assert found.noise.share < 0.4
        assert found.noise.p_value < run_audit.FALSE_ALARM_RATE
    else:
        assert found.mu_lower_bound > found.mu
        assert found.epsilon_lower_bound > found.epsilon
        assert found.noise.p_value > 0.01


@pytest.mark.long
def test_a_record_that_is_missing_or_of_another_run_is_refused(
    audited: _Audited, tmp_path: pathlib.Path
) -> None:
    directory = RunDirectory(tmp_path)
    clients = CanaryClients(
        dataclasses.replace(audited.run, directory=directory), audited.task.initial_weights
    )
    with refuses("round_1.npy", "restore"):
        clients.audit(_ROUNDS)
    directory.audit.mkdir()
    np.save(directory.audit / "round_1.npy", np.zeros(7))
    with refuses("round_1.npy", "restore"):
        clients.audit(1)
    header = (directory.audit / "round_1.npy").read_bytes().replace(b"}", b"{")
    (directory.audit / "round_1.npy").write_bytes(header)
    with refuses("round_1.npy", "restore"):
        clients.audit(1)
    (directory.audit / "round_1.npy").write_bytes(b"")
    with refuses("round_1.npy", "restore"):
        clients.audit(1)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--sampling=poisson", "--num_bands=2"], "--sampling"),
        (["--clip_norm=adaptive"], "--clip_norm"),
        (["--mechanism=none"], "noise"),
        (["--audit_canaries=20"], "--audit_canaries"),
        ([f"--audit_canaries={2**70}"], "--audit_canaries"),
        (["--simulated_clients=1", "--noise_multiplier=0.6"], "--audit_canaries"),
    ],
)
def test_what_cannot_be_audited_is_refused(arguments: list[str], named: str) -> None:
    assert _options()["audit_canaries"] == _CANARIES
    with refuses(named):
        _options(*arguments)


def _refuted(run: Run) -> Any:
    noise, is_included = np.random.default_rng(0), np.tile([True, False], _CANARIES // 2)
    # Of one round, with next to no noise.
    released = noise.normal(size=(1, 2 * _CANARIES)) + np.pad(9.0 * is_included, (0, _CANARIES))
    audit = run_audit.RunAudit.of(
        released,
        np.ones((1, _CANARIES), bool),
        is_included,
        np.diag([0.01]),
        contribution=9.0,
        noise_multiplier=run.mechanism.noise_multiplier,
        delta=run.config.delta,
        epsilon=run.guarantee.epsilon,
    )
    assert audit.is_refuted
    return audit


@pytest.mark.long
def test_a_refuted_run_says_so_and_ends_with_1(
    audited: _Audited, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = dataclasses.replace(audited.outcome, audit=_refuted(audited.run))
    monkeypatch.setattr(trainer, "train", lambda *_: outcome)
    monkeypatch.setattr(run_reports, "draw_figure", lambda *_: None)
    path = tmp_path / "run"
    arguments = [
        *(f"--output_dir={path}", f"--audit_canaries={_CANARIES}", f"--num_rounds={_ROUNDS}"),
        *("--mechanism=identity", "--separation=2"),
    ]
    out = console_commands.call("run-digits", *arguments).done(command_line.REFUTED)
    assert "the claim is REFUTED" in out
    directory = RunDirectory(path)
    statement = " ".join((path / "PRIVACY.md").read_text().split())
    assert f"audited by {_CANARIES} canaries" in statement
    assert f"{_CANARIES} of {_CANARIES} coins were guessed right" in statement
    assert re.search(r"round, 1, had (0\.9|1)\S* % of its noise", statement)
    assert '"is_refuted": true' in (path / "privacy.json").read_text()
    begun = directory.read_config()
    assert begun is not None
    with refuses("--audit_canaries", "extended"):
        options = _options(*arguments[:1], "--num_rounds=4", *arguments[3:])
        run_command.resume(begun, options, COMMAND, directory, audited.run.behaviour)
