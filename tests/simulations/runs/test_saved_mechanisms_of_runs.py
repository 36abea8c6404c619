"""Runs of a saved Mechanism, and the Mechanism that a run's directory is."""

import dataclasses
import json
import pathlib
import shutil
from typing import Any

import pytest

import mf_aggregators as mfa
from mf_aggregators.checkpoints import CheckpointError
from mf_aggregators.commands import command_line, report, stated_runs
from mf_aggregators.kernel.numbers import rounded_up
from mf_aggregators.participation import (
    MinSeparation,
    Participation,
    PoissonSampling,
    SingleParticipation,
)
from tests import console_commands
from tests.refusals import refuses
from tests.simulations.runs.untrained_runs import (
    BANDED,
    BY_THE_CLOCK,
    CLIENTS,
    DRAWN,
    TIMERS,
    begin_run,
    leave_run,
    verify,
)


def _reported(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    words = ("mf-report", "--delta=1e-4", "--format=json", *words)
    status = command_line.run("", report.define_flags, report.main, list(words))
    captured = capsys.readouterr()
    assert status == 0, captured.err
    fields: dict[str, Any] = json.loads(captured.out)
    del fields["seconds"]
    return fields


@pytest.mark.parametrize(
    ("arguments", "participation", "noise_multiplier"),
    [
        (TIMERS, MinSeparation(4), mfa.accounting.noise_multiplier(4.0, 1e-4)),
        # A quarter of the cohort has a quarter of the noise.
        (
            (*BANDED, "--clients_per_round=20", "--simulated_clients=5", "--noise_multiplier=4"),
            MinSeparation(7),
            1.0,
        ),
        ((*DRAWN, "--noise_multiplier=0.7"), PoissonSampling(12, 3, CLIENTS, 9), 0.7),
    ],
)
def test_the_mechanism_of_a_run_is_loaded_and_reported_from_its_directory(
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    participation: Participation,
    noise_multiplier: float,
) -> None:
    path = tmp_path / "run"
    leave_run(path, *arguments)
    matrix = mfa.checkpoints.load(path / "factorization")
    mechanism = mfa.Mechanism(matrix, participation, noise_multiplier)
    found = mfa.load(path)
    assert found == dataclasses.replace(mechanism, noise_multiplier=found.noise_multiplier)
    assert found.noise_multiplier == pytest.approx(noise_multiplier, rel=1e-12)
    # A report of it needs no flags that could be of another run.
    ledger = [f"--ledger={path / 'participation.npz'}"]
    if mechanism.sampling is not None:
        ledger.append(f"--sampling_seed={path / 'checkpoints' / 'sampling_seed.json'}")
    fields = _reported(capsys, f"--checkpoint={path}", *ledger)
    assert fields["ledger_gap"] is None
    found.save(tmp_path / "saved")
    if mechanism.sampling is None:
        # The directory of a run has the numbers of its clients itself.
        counts = tmp_path / "counts.txt"
        cohorts = mfa.privacy.ledgers.load(path / "participation.npz", 12).cohorts()
        counts.write_text("\n".join(str(len(cohort)) for cohort in cohorts))
        ledger.append(f"--round_counts={counts}")
    assert fields == _reported(capsys, f"--checkpoint={tmp_path / 'saved'}", *ledger)
    assert fields["keeps_plan"] is True
    stated = json.loads((path / "privacy.json").read_text())["planned"]
    name = "epsilon" if mechanism.sampling is None else "amplified_epsilon"
    assert rounded_up(fields[name], ".6g") == stated["epsilon"]
    # A stated epsilon is proved.
    file = path / "privacy.json"
    contents = json.loads(file.read_text())
    contents["planned"]["epsilon"] = str(0.999 * fields[name])
    file.write_text(json.dumps(contents))
    with refuses("is stated", error=CheckpointError):
        mfa.load(path)


def test_a_run_that_was_extended_is_loaded_with_all_horizons(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "run"
    noise = ("--mechanism=banded", "--num_bands=3", "--separation=4", "--noise_multiplier=1.5")
    leave_run(path, *noise, "--clients_per_round=5")
    before = mfa.load(path)
    leave_run(path, *noise, "--clients_per_round=5", "--num_rounds=16", rounds=16)
    extended = mfa.load(path)
    assert [each.num_rounds for each in extended.horizons] == [12, 16]
    assert extended.extends == before
    # Three participations of norm one before, and four of the whole.
    stddev = 1.5 * before.factorization.sensitivity(before.schema).value
    whole = extended.factorization.sensitivity(extended.schema).value
    assert extended.noise_multiplier == pytest.approx(stddev / whole, rel=1e-6)
    assert extended.noise_multiplier < 1.5


def test_directories_that_are_not_of_one_run_are_refused(tmp_path: pathlib.Path) -> None:
    path, other = tmp_path / "run", tmp_path / "other"
    leave_run(path, *TIMERS)
    whole = json.loads((path / "privacy.json").read_text())
    file = path / "privacy.json"

    def refused(*named: str, **changed: Any) -> None:
        file.write_text(json.dumps({**whole, **changed}))
        with refuses(*named, error=CheckpointError):
            mfa.load(path)

    seed = {"value": True, "origin": "read from config.json"}
    refused("fixed seed", facts={**whole["facts"], "seed_is_fixed": seed})
    refused("privacy.json", planned=None)
    refused("privacy.json", planned={**whole["planned"], "num_rounds": 11})
    refused("privacy.json", noise={**whole["noise"], "noise_multipliers": ["-1.0"]})
    for sensitivity in (str(0.9 * float(whole["planned"]["sensitivity"])), "nan"):
        planned = {**whole["planned"], "sensitivity": sensitivity}
        refused("privacy.json", planned=planned)
    # The matrix of another run, whose sensitivity is another one.
    mfa.checkpoints.save(mfa.factorizations.tree_aggregation(12), other)
    shutil.rmtree(path / "factorization")
    shutil.copytree(other, path / "factorization")
    refused("states a sensitivity of")
    file.unlink()
    with refuses("privacy.json", "after its first round", error=CheckpointError):
        mfa.load(path)


def _forge(path: pathlib.Path, **changed: Any) -> None:
    """Changes what the statement of a run plans, and nothing else of its files."""
    file = path / "privacy.json"
    contents = json.loads(file.read_text())
    multiplier = changed.pop("noise_multiplier", None)
    if multiplier is not None:
        contents["noise"]["noise_multipliers"][-1] = str(multiplier)
    file.write_text(json.dumps({**contents, "planned": {**contents["planned"], **changed}}))


@pytest.mark.parametrize(
    ("arguments", "forged", "named"),
    [
        (TIMERS, {"noise_multiplier": 50.0}, "noise_multiplier 50.0"),
        # Of the larger cohort that few clients stand for.
        (
            (*BANDED, "--clients_per_round=20", "--simulated_clients=5", "--noise_multiplier=4"),
            {"noise_multiplier": 4.0},
            "noise_multiplier 4.0, and the run's other files have 1.0",
        ),
        # In which three participations have the same sensitivity.
        (
            TIMERS,
            {"schema": MinSeparation(4, 3).to_dict()},
            '"max_participations": null',
        ),
        ((*DRAWN, "--noise_multiplier=0.7"), {"noise_multiplier": 0.71}, "0.71"),
        (
            (*DRAWN, "--noise_multiplier=0.7"),
            {"sampling": PoissonSampling(12, 3, 10 * CLIENTS, 9).to_dict()},
            str(10 * CLIENTS),
        ),
    ],
)
def test_a_plan_that_the_configuration_contradicts_is_refused(
    arguments: tuple[str, ...], forged: dict[str, Any], named: str, tmp_path: pathlib.Path
) -> None:
    """By whatever makes a Mechanism of the directory, and so by a report of several runs."""
    path = tmp_path / "run"
    leave_run(path, *arguments)
    honest = mfa.load(path)
    whole = (path / "privacy.json").read_text()
    _forge(path, **forged)
    with refuses("privacy.json", named, error=CheckpointError) as refused:
        mfa.load(path)
    assert "\n" not in str(refused.value)
    with refuses(named, error=command_line.CommandError):
        stated_runs.event_of(path, 1e-4)
    (path / "privacy.json").write_text(whole)
    assert mfa.load(path) == honest
    # What a run was asked for may be gone, and is then not compared; a broken file is no such.
    config = (path / "config.json").read_text()
    for text in ("{", "[]", '{"flags": {}}', config.replace('"seed":', '"other":')):
        (path / "config.json").write_text(text)
        with refuses("config.json", error=CheckpointError):
            mfa.load(path)
    (path / "config.json").unlink()
    assert mfa.load(path) == honest


def test_a_horizon_that_the_configuration_contradicts_is_refused(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "run"
    noise = ("--mechanism=banded", "--num_bands=3", "--separation=4", "--noise_multiplier=1.5")
    leave_run(path, *noise, "--clients_per_round=5")
    leave_run(path, *noise, "--clients_per_round=5", "--num_rounds=16", rounds=16)
    contents = json.loads((path / "privacy.json").read_text())
    earlier = [{**contents["earlier_plans"][0], "schema": MinSeparation(5).to_dict()}]
    multipliers = ["1.6", contents["noise"]["noise_multipliers"][-1]]
    changes: tuple[tuple[str, dict[str, Any]], ...] = (
        ("noise_multiplier", {"noise": {**contents["noise"], "noise_multipliers": multipliers}}),
        ("earlier_plans", {"earlier_plans": earlier}),
    )
    for name, forged in changes:
        (path / "privacy.json").write_text(json.dumps({**contents, **forged}))
        with refuses("privacy.json", name, error=CheckpointError):
            mfa.load(path)


_COHORT = "--clients_per_round=5"
_BANDS = mfa.factorizations.banded(12, num_bands=3)
_NOISE = mfa.accounting.noise_multiplier(4.0, 1e-3)


def _saved(folder: pathlib.Path, mechanism: mfa.Mechanism) -> str:
    mechanism.save(folder / "saved")
    return f"--checkpoint={folder / 'saved'}"


@pytest.mark.parametrize(
    ("participation", "of_both", "of_matrix"),
    [
        (MinSeparation(4), (_COHORT,), ("--separation=4",)),
        (
            MinSeparation(4, 2),
            (*BY_THE_CLOCK[-2:], "--clients_per_round=10", "--simulated_clients=5"),
            ("--separation=4", "--max_participations=2"),
        ),
        (SingleParticipation(), (_COHORT,), ("--max_participations=1",)),
    ],
)
def test_a_saved_mechanism_states_what_long_flags_state(
    participation: Participation,
    of_both: tuple[str, ...],
    of_matrix: tuple[str, ...],
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    mechanism = mfa.Mechanism(_BANDS, participation, _NOISE)
    mfa.checkpoints.save(_BANDS, tmp_path / "matrix")
    long = (f"--checkpoint={tmp_path / 'matrix'}", "--num_rounds=12", "--target_epsilon=4")
    stated = []
    for name, arguments in (
        ("short", [_saved(tmp_path, mechanism)]),
        ("long", [*long, *of_matrix]),
    ):
        leave_run(tmp_path / name, *arguments, *of_both, "--delta=1e-3")
        contents = json.loads((tmp_path / name / "privacy.json").read_text())
        # The flags are other ones: config.json has them.
        files = contents["files"]
        assert files.pop("config.json") is not None
        assert len(files) > 3
        stated.append(contents)
        assert verify(capsys, tmp_path / name) == []
    assert stated[0] == stated[1]
    schema = mfa.participation.from_dict(stated[0]["planned"]["schema"])
    assert schema.allows(participation, 12)
    assert participation.allows(schema, 12)


@pytest.mark.parametrize(
    "flag",
    [
        "--separation=3",
        "--noise_multiplier=1.2",
        "--sampling=poisson",
    ],
)
def test_flags_that_contradict_a_saved_mechanism_are_refused(
    flag: str, tmp_path: pathlib.Path
) -> None:
    checkpoint = _saved(tmp_path, mfa.Mechanism(_BANDS, MinSeparation(4), _NOISE))
    given = (checkpoint, _COHORT, "--delta=1e-3", flag, f"--output_dir={tmp_path / 'run'}")
    ended = console_commands.call("run-digits", *given)
    assert ended.status == 2
    (line,) = [each for each in ended.errors.splitlines() if each.startswith("run-digits:")]
    assert "--checkpoint=" in line
    assert not (tmp_path / "run").exists()


def test_a_run_of_a_saved_mechanism_goes_on_and_is_extended(tmp_path: pathlib.Path) -> None:
    saved = mfa.Mechanism(_BANDS, MinSeparation(4, 2), _NOISE)
    command = (_saved(tmp_path, saved), _COHORT)
    path = tmp_path / "run"
    leave_run(path, *command)
    assert mfa.load(path) == saved == begin_run(path, *command).mechanism
    # Another Mechanism there is another run.
    dataclasses.replace(saved, noise_multiplier=2.0).save(tmp_path / "saved")
    with refuses("other flags", "--noise_multiplier"):
        begin_run(path, *command)
    saved.save(tmp_path / "saved")
    # What is new of the whole is no contradiction.
    of_whole = ("--num_rounds=16", "--max_participations=3")
    longer = begin_run(path, *command, *of_whole).mechanism
    assert longer.extends == saved
    assert (longer.num_rounds, longer.participation) == (16, MinSeparation(4, 3))
    # The run has what it needs.
    shutil.rmtree(tmp_path / "saved")
    with refuses("other flags", "--separation=4", f"--noise_multiplier={_NOISE}"):
        begin_run(path, *command, *of_whole)
    again = ("--separation=4", f"--noise_multiplier={_NOISE!r}", *of_whole)
    assert begin_run(path, *command, *again).mechanism == longer
