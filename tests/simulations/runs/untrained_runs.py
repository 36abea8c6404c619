"""Directories of runs as training leaves them, without any training."""

import json
import pathlib

import numpy as np
from absl import flags

from mf_aggregators.audit.run_audit import RunAudit
from mf_aggregators.commands import stated_runs
from mf_aggregators.privacy.statements import Statement
from simulations.devices import device_behaviour
from simulations.examples.digits import COMMAND
from simulations.runs import run_command, run_config
from simulations.runs.run_directory import ParticipationLedger, RunDirectory
from simulations.runs.run_plan import Run
from simulations.runs.run_reports import RunStatements
from tests import console_commands
from tests.simulations.parsed_flags import values_of

CLIENTS = 143
BANDED = ("--mechanism=banded", "--num_bands=3")
TIMERS = (*BANDED, "--clients_per_round=5", "--separation=4", "--target_epsilon=4")
BY_THE_CLOCK = (*TIMERS, "--timer=wall_clock", "--timer_hours=1")
DRAWN = (*BANDED, "--clients_per_round=9", "--sampling=poisson")
# Cohorts of which five clients are in two rounds in a row.
BROKEN_PLAN = [[0, 1, 2, 3, 4]] * 2 + [[5 * index + i for i in range(5)] for index in range(2, 12)]


def parse_flags(*arguments: str) -> flags.FlagValues:
    """The flags of a run on digits, of twelve rounds unless a checkpoint has others."""
    has_rounds = any(each.startswith("--checkpoint=") for each in arguments)
    return values_of(COMMAND, *([] if has_rounds else ["--num_rounds=12"]), *arguments)


def begin_run(path: pathlib.Path, *arguments: str) -> Run:
    """Begins a run in a directory, or goes on with the one that is there."""
    values = parse_flags(*arguments)
    config = run_config.of_flags(values, COMMAND)
    behaviour = device_behaviour.of_flags(values)
    run_command._check_other_runs(config, RunDirectory(path))
    begun = RunDirectory(path).read_config()
    if begun is None:
        return run_command.begin(config, COMMAND, RunDirectory(path), behaviour)
    return run_command.resume(begun, config, COMMAND, RunDirectory(path), behaviour)


def leave_run(
    path: pathlib.Path,
    *arguments: str,
    cohorts: list[list[int]] | None = None,
    rounds: int = 12,
    refused: list[int] | None = None,
    audit: RunAudit | None = None,
) -> Statement:
    """Leaves a run's directory as training does, but for its states; returns its statement.

    A stopping rule has refused the round after the last one with the clients ``refused``.
    """
    run = begin_run(path, *arguments)
    names = tuple(f"writer {index}" for index in range(CLIENTS))
    ledger = ParticipationLedger(names, sampling=run.mechanism.sampling)
    statements = RunStatements(run)
    ledger.save(run.directory.ledger)
    config = run.directory.read_config() or {}
    run.directory.write_json("config.json", {"num_parameters": 6, **config})
    statements.before(ledger)
    for index in range(rounds):
        if run.sampler is not None:
            cohort = run.sampler.draw(index)
        else:
            cohort = np.array(
                cohorts[index] if cohorts else [(5 * index + i) % CLIENTS for i in range(5)]
            )
        ledger = ledger.with_round(cohort)
    ledger.save(run.directory.ledger)
    run.directory.save_model(["w"], [np.arange(6.0, dtype=np.float32)])
    if refused is not None:
        record = {"released_rounds": rounds, "clients": refused}
        config = {**(run.directory.read_config() or {}), stated_runs.REFUSED: record}
        run.directory.write_json("config.json", config)
    return statements.after(ledger, audit)


def verify(path: pathlib.Path) -> list[str]:
    """What mf-report --verify finds wrong with the statement in a directory."""
    ended = console_commands.call("mf-report", f"--verify={path / 'PRIVACY.md'}", "--format=json")
    assert ended.status in (0, 1), ended.errors
    found: list[str] = json.loads(ended.printed)["differences"]
    assert (ended.status == 0) == (not found)
    return found


def edit(path: pathlib.Path, old: str, new: str) -> None:
    """Replaces words that a file has."""
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
