"""Runs that go on after their last round: what they release and state, and what a kill leaves.

A kill ends a forked process with SIGKILL at its n-th step on the run's files, for every n.
"""

import csv
import itertools
import json
import math
import os
import pathlib
import shutil
import signal
import sys
from typing import Any

import numpy as np
import pytest

from mf_aggregators import accounting, checkpoints
from mf_aggregators.kernel.numbers import rounded_up
from mf_aggregators.participation import MinSeparation
from simulations.examples import digits
from simulations.runs import run_directory, run_plan
from simulations.runs.run_directory import Horizon, ParticipationLedger, RunDirectory
from tests import console_commands
from tests.mf_aggregators import brute_force
from tests.simulations.command_processes import CommandServer
from tests.simulations.parsed_flags import config_of

# Of the two storages of whole runs, the one in the state.
pytestmark = pytest.mark.long_cases(1)

_MODULE = "simulations.examples.digits"
_BEFORE, _WHOLE = 6, 9
_ARGUMENTS = ("--mechanism=banded", "--num_bands=2", "--separation=2", "--clients_per_round=20")
_NOISE = ("--noise_multiplier=1.5", "--server_cooldown=0.5")


def _arguments(path: pathlib.Path, rounds: int, *more: str) -> list[str]:
    has_mechanism = any(each.startswith("--mechanism") for each in more)
    has_noise = any("target_" in each or "noise_multiplier=" in each for each in more)
    return [
        f"--output_dir={path}",
        f"--num_rounds={rounds}",
        "--format=json",
        *(() if has_mechanism else _ARGUMENTS),
        *(() if has_noise else _NOISE),
        *more,
    ]


def _call(path: pathlib.Path, rounds: int, *more: str) -> console_commands.Ended:
    return console_commands.call("run-digits", *_arguments(path, rounds, *more))


def _config(path: pathlib.Path) -> dict[str, Any]:
    return dict(json.loads((path / run_directory.CONFIG_FILE).read_text()))


# Whole runs.


# Long: the rows of an extended run are compared by tests of the aggregator in the short test.
@pytest.fixture(
    scope="module",
    params=[pytest.param(storage, marks=pytest.mark.long) for storage in ("state", "disk")],
)
def runs(
    request: pytest.FixtureRequest,
    commands: CommandServer,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, pathlib.Path]:
    """A run of few rounds; extended from its last state; and from the state before that one."""
    root = tmp_path_factory.mktemp("runs")
    found = {name: root / name for name in ("before", "extended", "from an older state")}
    more = ("--seed=4", f"--noise_storage={request.param}")
    status, _, errors = commands.start(_MODULE, *_arguments(found["before"], _BEFORE, *more)).wait()
    assert status == 0, errors
    for name in ("extended", "from an older state"):
        shutil.copytree(found["before"], found[name])
    shutil.rmtree(found["from an older state"] / "checkpoints" / f"round_{_BEFORE}")
    processes = [
        commands.start(_MODULE, *_arguments(found[name], _WHOLE, *more))
        for name in ("extended", "from an older state")
    ]
    for process in processes:
        status, _, errors = process.wait()
        assert status == 0, errors
        assert f"extended from {_BEFORE} to {_WHOLE} rounds" in errors
    return found


def _state(path: pathlib.Path, version: int) -> dict[str, np.ndarray]:
    import tensorflow as tf

    reader = tf.train.load_checkpoint(
        str(path / "checkpoints" / f"round_{version}" / "variables" / "variables")
    )
    return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}


def test_no_released_row_changes(runs: dict[str, pathlib.Path]) -> None:
    """Released again under the larger plan, the last round of the smaller one is the same."""
    for version in (_WHOLE - 1, _WHOLE):
        ours, theirs = (_state(runs[name], version) for name in ("extended", "from an older state"))
        assert set(ours) == set(theirs)
        for name, value in ours.items():
            np.testing.assert_array_equal(value, theirs[name])
    before, *after = (
        ParticipationLedger.load(runs[name] / run_directory.LEDGER_FILE)
        for name in ("before", "extended", "from an older state")
    )
    for ledger in after:
        assert ledger.num_rounds == _WHOLE
        assert ledger.first_rounds(_BEFORE).digest() == before.digest()
    rows = [
        list(csv.DictReader((runs[name] / run_directory.METRICS_FILE).open()))
        for name in ("before", "extended")
    ]
    for earlier, later in zip(rows[0], rows[1][:_BEFORE], strict=True):
        assert earlier["released_norm"] == later["released_norm"]


def test_the_statement_is_that_of_the_whole(runs: dict[str, pathlib.Path]) -> None:
    path = runs["extended"]
    stated = json.loads((path / run_directory.PRIVACY_FILE).read_text())
    whole = checkpoints.load(path / "factorization")
    before = checkpoints.load(runs["before"] / "factorization")
    assert (whole.num_rounds, whole.horizons) == (_WHOLE, (_BEFORE,))
    # From the matrices alone: three participations fit before, and five of the whole.
    first, second = (
        math.sqrt(
            max(
                float(np.sum(np.square(made.strategy_matrix())[:, pattern]))
                for pattern in brute_force.patterns(MinSeparation(2), made.num_rounds)
            )
        )
        for made in (before, whole)
    )
    assert first == pytest.approx(math.sqrt(3))
    assert second >= math.sqrt(5) * (1.0 - 1e-12)
    planned = stated["planned"]
    assert planned["num_rounds"] == _WHOLE
    assert float(planned["sensitivity"]) == pytest.approx(second, rel=1e-5)
    # What rounding takes of 650 parameters is far less than what is compared here.
    began_with, multiplier = map(float, stated["noise"]["noise_multipliers"])
    assert multiplier <= 1.5 * first / second
    assert multiplier == pytest.approx(1.5 * first / second, rel=1e-6)
    epsilon = accounting.epsilon(multiplier, 1e-4)
    assert planned["epsilon"] == rounded_up(epsilon, ".6g")
    assert epsilon > accounting.epsilon(1.5, 1e-4)
    (earlier,) = stated["earlier_plans"]
    assert earlier["num_rounds"] == _BEFORE
    assert began_with == pytest.approx(1.5, rel=1e-12)
    assert earlier["epsilon"] == rounded_up(accounting.epsilon(1.5, 1e-4), ".6g")
    # The noise is what it was: noise multiplier times sensitivity, whatever is measured by.
    for guarantee in (planned, stated["observed"], earlier):
        scale = float(guarantee["noise_multiplier"]) * float(guarantee["sensitivity"])
        assert scale == pytest.approx(1.5 * first, rel=2e-5)
    text = (path / run_directory.STATEMENT_FILE).read_text()
    assert "planned before the run was extended" in " ".join(text.split())
    ledger = ParticipationLedger.load(path / run_directory.LEDGER_FILE)
    assert stated["participation"]["observed"]["max_participations"] == max(
        len(rounds) for rounds in ledger.rounds_of_clients()
    )
    assert _config(path)["extends"] == [Horizon(_BEFORE, _BEFORE, MinSeparation(2)).to_dict()]


# Kills, without training.


@pytest.fixture
def begun(tmp_path: pathlib.Path, _training_is_cut_off: None) -> pathlib.Path:
    """A run of six rounds that were released, as its directory shows it; training is cut off."""
    return _made(tmp_path / "run")


def _made(path: pathlib.Path, *more: str) -> pathlib.Path:
    assert "training begins" in _call(path, _BEFORE, *more).errors
    directory = RunDirectory(path)
    config = {**_config(path), "num_parameters": 650, "noise_storage": "state"}
    directory.write_json(run_directory.CONFIG_FILE, config)
    (directory.states / f"round_{_BEFORE}").mkdir()
    cohorts = tuple(np.array([index]) for index in range(_BEFORE))
    ParticipationLedger(("a", "b", "c", "d", "e", "f"), cohorts).save(directory.ledger)
    return path


_WRITES = ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "shutil.rmtree")


def _killed_at(path: pathlib.Path, step: int) -> bool:
    """Extends a run in a process that is killed at a step; returns whether it came so far."""
    child = os.fork()
    if child == 0:
        seen = itertools.count()
        place = os.fspath(path)

        def end_at_step(event: str, arguments: tuple[Any, ...]) -> None:
            is_write = event in _WRITES or (
                event == "open" and bool(arguments[2] & (os.O_WRONLY | os.O_RDWR))
            )
            if not is_write or place not in os.fsdecode(str(arguments[0])):
                return
            if next(seen) == step:
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            sys.addaudithook(end_at_step)
            _call(path, _WHOLE)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def _check_what_a_kill_left(path: pathlib.Path, copy: pathlib.Path) -> bool:
    """Whether the larger plan counts; the command of the plan that counts goes on."""
    is_extended = _config(path)["flags"]["num_rounds"] == _WHOLE
    shutil.copytree(path, copy)
    ended = _call(copy, _BEFORE)
    if is_extended:
        assert "other flags: to resume it, give --num_rounds=9;" in ended.errors
    else:
        assert "training begins" in ended.errors
        assert _loaded(copy).num_rounds == _BEFORE
        assert not (copy / "factorization.extended").exists()
    assert "training begins" in _call(path, _WHOLE).errors
    config, factorization = _config(path), _loaded(path)
    assert (factorization.num_rounds, factorization.horizons) == (_WHOLE, (_BEFORE,))
    assert config["factorization_sha256"] == run_directory.matrix_sha256(
        RunDirectory(path).factorization
    )
    assert [plan["num_rounds"] for plan in config["extends"]] == [_BEFORE]
    assert not (path / "factorization.extended").exists()
    assert not [each.name for each in path.iterdir() if each.name.startswith(".factorization.e")]
    return is_extended


def _loaded(path: pathlib.Path) -> Any:
    return checkpoints.load(path / "factorization")


@pytest.mark.long
def test_a_kill_leaves_the_old_plan_or_the_new_one(
    begun: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    left = []
    for step in itertools.count():
        path = tmp_path / f"killed-{step}"
        shutil.copytree(begun, path)
        if not _killed_at(path, step):
            break
        left.append(_check_what_a_kill_left(path, tmp_path / f"copy-{step}"))
    # Each of both was left, and never the old one after the new one.
    assert left == sorted(left)
    assert {False, True} == set(left)


def test_a_matrix_that_neither_plan_names_stays_where_it_is(begun: pathlib.Path) -> None:
    directory = RunDirectory(begun)
    shutil.copytree(directory.factorization, directory.extended_factorization)
    description = directory.factorization / "factorization.json"
    description.write_text(description.read_text().replace('"banded"', '"identity"'))
    config = {**_config(begun), "factorization_sha256": "0" * 64}
    directory.settle_factorization(config)
    assert directory.extended_factorization.exists()


# What is refused.


def test_every_plan_of_a_run_that_was_extended_twice_counts(begun: pathlib.Path) -> None:
    """A plan in the middle that let clients come back sooner, and one that is not named."""
    for rounds in (7, 12):
        assert "training begins" in _call(begun, rounds).errors
    directory, config = RunDirectory(begun), _config(begun)
    first, middle = config["extends"]
    sooner = {**middle, "participation": {**middle["participation"], "separation": 1}}
    for plans, message in (
        ([first, sooner], "the horizon of 7 rounds allows participations at least 1 round apart"),
        ([first], "extends horizons of [6, 7] rounds, and config.json says"),
        ([first, middle, {**middle, "num_rounds": 9}], "config.json says [6, 7, 9]"),
    ):
        directory.write_json(run_directory.CONFIG_FILE, {**config, "extends": plans})
        _call(begun, 12).refused(message)
    directory.write_json(run_directory.CONFIG_FILE, config)
    assert "training begins" in _call(begun, 12).errors


@pytest.mark.usefixtures("_training_is_cut_off")
def test_a_run_whose_clients_are_sampled_cannot_be_extended(tmp_path: pathlib.Path) -> None:
    options = ("--mechanism=identity", "--sampling=poisson", "--clients_per_round=5")
    path = _made(tmp_path / "sampled", *options)
    assert "--sampling=poisson cannot be extended" in _call(path, _WHOLE, *options).errors


@pytest.mark.usefixtures("_training_is_cut_off")
def test_a_target_is_a_promise(tmp_path: pathlib.Path) -> None:
    options = (*_ARGUMENTS, "--target_epsilon=3")
    path = _made(tmp_path / "target", *options)
    said = _call(path, _WHOLE, *options).errors
    assert "above --target_epsilon=3: give a larger target" in said
    assert _config(path)["flags"]["num_rounds"] == _BEFORE
    needed = said.split("rounds epsilon ")[1].split(",")[0]
    for target in (needed, needed):
        more = (*_ARGUMENTS, f"--target_epsilon={target}")
        assert "training begins" in _call(path, _WHOLE, *more).errors
    flags = _config(path)["flags"]
    assert flags["target_epsilon"] == float(needed)
    # The noise is that of the first target.
    assert flags["noise_multiplier"] == accounting.noise_multiplier(3.0, 1e-4)


def test_released_rounds_keep_their_learning_rates() -> None:
    plans = [Horizon(4, 3, MinSeparation(2)), Horizon(6, 5, MinSeparation(2))]
    falls = ("--server_warmup=0", "--server_cooldown=0.5", "--server_learning_rate=1")
    schedule = run_plan.Schedule(cooldown_share=0.5)
    rates = {number: schedule.rates(number, 1.0) for number in (2, 4, 6, 8)}
    config = config_of(digits.COMMAND, "--num_rounds=8", *falls)
    # And the round that follows, whose rate is in the state that was saved.
    expected = [*rates[4], *rates[6][4:], *rates[8][6:]]
    np.testing.assert_array_equal(run_plan.server_rates(config, plans), expected)
    config = config_of(digits.COMMAND, "--num_rounds=4", *falls)
    at_its_end = run_plan.server_rates(config, [Horizon(2, 2, MinSeparation(2))])
    np.testing.assert_array_equal(at_its_end, [*rates[2], rates[2][1], rates[4][3]])
    np.testing.assert_array_equal(run_plan.server_rates(config, []), rates[4])


def test_rows_of_noise_of_the_plan_before_make_room(begun: pathlib.Path) -> None:
    rows = begun / "noise" / "rows-0"
    rows.mkdir(parents=True, mode=0o700)
    (begun / "noise").chmod(0o700)
    assert "training begins" in _call(begun, _WHOLE).errors
    assert not rows.exists()
