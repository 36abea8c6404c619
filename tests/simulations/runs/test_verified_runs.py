"""mf-report --verify of the directories of runs, and what they state of other runs."""

import dataclasses
import hashlib
import json
import math
import pathlib
import shutil
from typing import Any

import numpy as np
import pytest
from absl import flags

import mf_aggregators as mfa
from mf_aggregators import random_streams
from mf_aggregators.audit.one_run import FreshNoise, RunAudit
from mf_aggregators.checkpoints import CheckpointError
from mf_aggregators.commands import command_line, facts_of_runs, report, stated_runs
from mf_aggregators.participation import (
    BallsInBins,
    FixedEpochOrder,
    MinSeparation,
    Participation,
    PoissonSampling,
    SamplingScheme,
    SingleParticipation,
)
from mf_aggregators.privacy.statement import PrivacyStatement
from simulations.devices import device_behaviour
from simulations.examples.digit_classification.run_digits import COMMAND
from simulations.runs import federated_runs, run_config
from simulations.runs.round_records import ParticipationLedger
from simulations.runs.run_directory import RunDirectory
from simulations.runs.run_statements import RunStatements
from simulations.training import weights_files
from tests import console_commands, statement_schemas
from tests.refusals import refuses

_CLIENTS = 143
_BANDED = ("--mechanism=banded", "--num_bands=3")
_TIMERS = (*_BANDED, "--clients_per_round=5", "--separation=4", "--target_epsilon=4")
_BY_THE_CLOCK = (*_TIMERS, "--timer=wall_clock", "--timer_hours=1")
_DRAWN = (*_BANDED, "--clients_per_round=9", "--sampling=poisson")


def _values(*arguments: str) -> flags.FlagValues:
    values = flags.FlagValues()
    flags.DEFINE_enum("format", "text", ["text", "json"], "", flag_values=values)
    run_config.define_flags(values, COMMAND)
    has_rounds = any(each.startswith("--checkpoint=") for each in arguments)
    values(["run-digits", *([] if has_rounds else ["--num_rounds=12"]), *arguments])
    return values


def _begun(path: pathlib.Path, *arguments: str) -> Any:
    values = _values(*arguments)
    config = run_config.of_flags(values, COMMAND)
    behaviour = device_behaviour.of_flags(values)
    federated_runs._check_other_runs(config, RunDirectory(path))
    begun = RunDirectory(path).read_config()
    if begun is None:
        return federated_runs.begin(config, COMMAND, RunDirectory(path), behaviour, 64)
    return federated_runs.resume(begun, config, COMMAND, RunDirectory(path), behaviour, 64)


def _ran(
    path: pathlib.Path,
    *arguments: str,
    cohorts: list[list[int]] | None = None,
    rounds: int = 12,
    stopped_by_rule: bool = False,
    audit: RunAudit | None = None,
) -> PrivacyStatement:
    """A run directory as a run leaves it, but for its states."""
    run = _begun(path, *arguments)
    names = tuple(f"writer {index}" for index in range(_CLIENTS))
    ledger = ParticipationLedger(names, sampling=run.mechanism.sampling)
    statements = RunStatements(run)
    ledger.save(run.directory.ledger)
    config = run.directory.read_config() or {}
    run.directory.write_json("config.json", {**config, "num_parameters": 6})
    statements.before(ledger)
    for index in range(rounds):
        if run.sampler is not None:
            cohort = run.sampler.draw(index)
        else:
            cohort = np.array(
                cohorts[index] if cohorts else [(5 * index + i) % _CLIENTS for i in range(5)]
            )
        ledger = ledger.with_round(cohort)
    ledger.save(run.directory.ledger)
    weights_files.save(run.directory.final_model, ["w"], [np.arange(6.0, dtype=np.float32)])
    return statements.after(ledger, stopped_by_rule, audit)


def _verified(capsys: pytest.CaptureFixture[str], path: pathlib.Path) -> list[str]:
    words = ["mf-report", f"--verify={path / 'PRIVACY.md'}", "--format=json"]
    status = command_line.run(report.__doc__ or "", report.define_flags, report.main, words)
    captured = capsys.readouterr()
    assert status in (0, 1), captured.err
    found: list[str] = json.loads(captured.out)["differences"]
    assert (status == 0) == (not found)
    return found


_BROKEN = [[0, 1, 2, 3, 4]] * 2 + [[5 * index + i for i in range(5)] for index in range(2, 12)]


@pytest.mark.short_cases(6)
@pytest.mark.parametrize(
    ("arguments", "more"),
    [
        (_TIMERS, {}),
        ((*_TIMERS, "--responsible=Ada", "--model=m 2", "--custody=In a vault."), {"rounds": 5}),
        ((*_TIMERS, "--clip_norm=adaptive", "--clip_count_stddev=4"), {}),
        ((*_BANDED, "--clients_per_round=20", "--simulated_clients=5", "--noise_multiplier=4"), {}),
        ((*_TIMERS, "--stop_at_epsilon=3"), {"rounds": 6, "stopped_by_rule": True}),
        (
            (*_TIMERS, "--timer=wall_clock", "--timer_hours=1", "--name_clients"),
            {"cohorts": _BROKEN},
        ),
        ((*_TIMERS, "--seed=3", "--secure_aggregation"), {}),
        ((*_DRAWN, "--noise_multiplier=0.7"), {}),
        ((*_DRAWN, "--target_rho=2", "--seed=3"), {}),
        (("--mechanism=none", "--clients_per_round=5"), {}),
        ((*_TIMERS, "--private_metrics", "--largest_loss=5"), {}),
        ((*_DRAWN, "--noise_multiplier=0.7", "--private_metrics"), {}),
        ((*_TIMERS, "--over_selection=1.5", "--upload_loss_probability=0.1"), {}),
    ],
)
def test_the_statement_of_a_run_follows_from_its_files(
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    more: dict[str, Any],
) -> None:
    _ran(tmp_path / "run", *arguments, **more)
    statement_schemas.check(json.loads((tmp_path / "run" / "privacy.json").read_text()))
    assert _verified(capsys, tmp_path / "run") == []
    # Wherever it goes.
    shutil.move(tmp_path / "run", tmp_path / "archive")
    assert _verified(capsys, tmp_path / "archive") == []


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
        (_TIMERS, MinSeparation(4), mfa.accounting.noise_multiplier(4.0, 1e-4)),
        # A quarter of the cohort has a quarter of the noise.
        (
            (*_BANDED, "--clients_per_round=20", "--simulated_clients=5", "--noise_multiplier=4"),
            MinSeparation(7),
            1.0,
        ),
        ((*_DRAWN, "--noise_multiplier=0.7"), PoissonSampling(12, 3, _CLIENTS, 9), 0.7),
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
    _ran(path, *arguments)
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
    found.save(tmp_path / "saved")
    assert fields == _reported(capsys, f"--checkpoint={tmp_path / 'saved'}", *ledger)
    assert fields["keeps_plan"] is True
    stated = json.loads((path / "privacy.json").read_text())["planned"]
    name = "epsilon" if mechanism.sampling is None else "amplified_epsilon"
    assert fields[name] == stated["epsilon"]


def test_a_statement_of_the_directory_of_a_run_is_verified(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run"
    _ran(path, *_TIMERS)
    (tmp_path / "stated").mkdir()
    ledger = f"--ledger={path / 'participation.npz'}"
    facts = ("--public_data=none", "--enforcement=Timers.", "--population=143", "--clip_norm=0.3")
    statement = f"--statement={tmp_path / 'stated' / 'PRIVACY.md'}"
    words = (f"--checkpoint={path}", ledger, statement, *facts, "--clients_per_round=5")
    _reported(capsys, *words)
    assert _verified(capsys, tmp_path / "stated") == []
    # The ledger of another run would have another guarantee.
    other = tmp_path / "other.csv"
    rounds = mfa.load(path).num_rounds
    other.write_text("".join(f"client {i},{i}\n" for i in range(rounds)))
    foreign = ["mf-report", "--delta=1e-4", f"--checkpoint={path}", f"--ledger={other}"]
    assert command_line.run("", report.define_flags, report.main, foreign) == 2
    assert "participation.npz" in capsys.readouterr().err
    # What says which noise there was is hashed as well.
    file = path / "privacy.json"
    file.write_text(file.read_text().replace('"status"', ' "status"'))
    (found,) = _verified(capsys, tmp_path / "stated")
    assert found.startswith("../run/privacy.json is another file")


def test_a_run_that_was_extended_is_loaded_with_all_horizons(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "run"
    noise = ("--mechanism=banded", "--num_bands=3", "--separation=4", "--noise_multiplier=1.5")
    _ran(path, *noise, "--clients_per_round=5")
    before = mfa.load(path)
    _ran(path, *noise, "--clients_per_round=5", "--num_rounds=16", rounds=16)
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
    _ran(path, *_TIMERS)
    whole = json.loads((path / "privacy.json").read_text())
    file = path / "privacy.json"

    def refused(*named: str, **changed: Any) -> None:
        file.write_text(json.dumps({**whole, **changed}))
        with refuses(*named, error=CheckpointError):
            mfa.load(path)

    refused("fixed seed", noise_seed_is_fixed=True)
    refused("privacy.json", planned=None)
    refused("privacy.json", planned={**whole["planned"], "num_rounds": 11})
    refused("privacy.json", planned={**whole["planned"], "noise_multiplier": -1.0})
    for sensitivity in (0.9 * whole["planned"]["sensitivity"], math.nan):
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


# A saved Mechanism is a run.


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
            (*_BY_THE_CLOCK[-2:], "--clients_per_round=10", "--simulated_clients=5"),
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
        _ran(tmp_path / name, *arguments, *of_both, "--delta=1e-3")
        contents = json.loads((tmp_path / name / "privacy.json").read_text())
        # The flags are other ones: config.json has them.
        files = contents["provenance"]["files"]
        assert files.pop("config.json") is not None
        assert len(files) > 3
        stated.append(contents)
        assert _verified(capsys, tmp_path / name) == []
    assert stated[0] == stated[1]
    schema = mfa.participation.from_dict(stated[0]["planned"]["participation"])
    assert schema.allows(participation, 12)
    assert participation.allows(schema, 12)


@pytest.mark.parametrize(
    ("scheme", "of_matrix"),
    [
        (PoissonSampling(12, 3, _CLIENTS, 9), ("--sampling=poisson",)),
        (BallsInBins(12, 3, _CLIENTS, 9, 15), ("--sampling=balls_in_bins",)),
    ],
)
def test_a_saved_mechanism_draws_as_long_flags_do(
    scheme: SamplingScheme, of_matrix: tuple[str, ...], tmp_path: pathlib.Path
) -> None:
    saved = mfa.Mechanism(_BANDS, scheme, 2.0)
    mfa.checkpoints.save(_BANDS, tmp_path / "matrix")
    long = ("--num_rounds=12", "--clients_per_round=9", "--noise_multiplier=2", *of_matrix)
    short, other = (
        _begun(tmp_path / name, *arguments)
        for name, arguments in (
            ("short", [_saved(tmp_path, saved)]),
            ("long", [f"--checkpoint={tmp_path / 'matrix'}", *long]),
        )
    )
    assert short.mechanism == other.mechanism == saved
    facts, others = (
        facts_of_runs.of_configuration(run.config, run.mechanism) for run in (short, other)
    )
    assert facts == others
    assert short.config["clients_per_round"] == 9
    for flag, name in (
        ("--clients_per_round=8", "clients"),
        ("--sampling=timers", "--checkpoint="),
        ("--noise_multiplier=2.1", "--checkpoint="),
    ):
        with refuses(name):
            _begun(tmp_path / "another", f"--checkpoint={tmp_path / 'saved'}", flag)
    another = dataclasses.replace(scheme, population=_CLIENTS + 1)
    with refuses("--checkpoint=", f"{_CLIENTS + 1} clients", f"{_CLIENTS} clients"):
        _begun(tmp_path / "another", _saved(tmp_path, mfa.Mechanism(_BANDS, another, 2.0)))
    assert not (tmp_path / "another").exists()


@pytest.mark.parametrize(
    "flag",
    [
        "--separation=3",
        "--separation=5",
        "--max_participations=2",
        "--noise_multiplier=1.2",
        "--target_epsilon=4.01",
        "--target_rho=0.3",
        "--num_rounds=13",
        "--sampling=poisson",
        "--mechanism=tree",
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


@pytest.mark.parametrize(
    "flags_beside",
    [
        ("--separation=4", "--num_rounds=12", "--target_epsilon=4", "--mechanism=banded"),
        # Of 12 rounds that are four apart no client has more.
        ("--max_participations=3", f"--noise_multiplier={_NOISE!r}"),
    ],
)
def test_flags_that_repeat_a_saved_mechanism_change_nothing(
    flags_beside: tuple[str, ...], tmp_path: pathlib.Path
) -> None:
    saved = mfa.Mechanism(_BANDS, MinSeparation(4), _NOISE)
    checkpoint = _saved(tmp_path, saved)
    run = _begun(tmp_path / "run", checkpoint, _COHORT, "--delta=1e-3", *flags_beside)
    assert run.mechanism.noise_multiplier == saved.noise_multiplier
    assert run.mechanism.participation.allows(saved.participation, 12)
    assert saved.participation.allows(run.mechanism.participation, 12)


def test_mechanisms_that_no_run_can_see_to_are_refused(tmp_path: pathlib.Path) -> None:
    extended = mfa.Mechanism(_BANDS, MinSeparation(4), 1.0).extended(16)
    order = mfa.Mechanism(_BANDS, FixedEpochOrder(3, 4), 1.0)
    for mechanism, said in ((order, str(order.participation)), (extended, "extended")):
        with refuses("--checkpoint=", said, error=command_line.CommandError):
            run_config.of_flags(_values(_saved(tmp_path, mechanism)), COMMAND)


def test_a_run_of_a_saved_mechanism_goes_on_and_is_extended(tmp_path: pathlib.Path) -> None:
    saved = mfa.Mechanism(_BANDS, MinSeparation(4, 2), _NOISE)
    command = (_saved(tmp_path, saved), _COHORT)
    path = tmp_path / "run"
    _ran(path, *command)
    assert mfa.load(path) == saved == _begun(path, *command).mechanism
    # Another Mechanism there is another run.
    dataclasses.replace(saved, noise_multiplier=2.0).save(tmp_path / "saved")
    with refuses("other flags", "--noise_multiplier"):
        _begun(path, *command)
    saved.save(tmp_path / "saved")
    # What is new of the whole is no contradiction.
    of_whole = ("--num_rounds=16", "--max_participations=3")
    longer = _begun(path, *command, *of_whole).mechanism
    assert longer.extends == saved
    assert (longer.num_rounds, longer.participation) == (16, MinSeparation(4, 3))
    # The run has what it needs.
    shutil.rmtree(tmp_path / "saved")
    with refuses("other flags", "--separation=4", f"--noise_multiplier={_NOISE}"):
        _begun(path, *command, *of_whole)
    again = ("--separation=4", f"--noise_multiplier={_NOISE!r}", *of_whole)
    assert _begun(path, *command, *again).mechanism == longer


@pytest.mark.parametrize("is_at_its_end", [True, False])
def test_what_canaries_found_is_stated_and_has_to_agree_with_itself(
    is_at_its_end: bool, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    noise = FreshNoise(weakest_round=3, share=1.01, p_value=0.4)
    audit = RunAudit(1000, 498, 700, 1.5, 1e-5, 6.0, 1.1, 0.6, 1.4, noise, False)
    arguments = (*_TIMERS, "--audit_canaries=1000")
    _ran(tmp_path / "run", *arguments, audit=audit if is_at_its_end else None)
    contents = json.loads((tmp_path / "run" / "privacy.json").read_text())
    statement_schemas.check(contents)
    assert "6. **Audit.**" in (tmp_path / "run" / "PRIVACY.md").read_text()
    assert _verified(capsys, tmp_path / "run") == []
    if is_at_its_end:
        contents["audit"]["epsilon_lower_bound"] = 0.1
        (tmp_path / "run" / "privacy.json").write_text(json.dumps(contents))
        (difference,) = _verified(capsys, tmp_path / "run")
        assert difference.startswith("epsilon_lower_bound of the audit")


@pytest.mark.parametrize(
    ("arguments", "places"),
    [
        (
            (*_TIMERS, "--clip_norm=adaptive", "--clip_count_stddev=4", "--private_metrics"),
            {
                "adaptive_clip.update_noise_multiplier": 3.0,
                "adaptive_clip.count_stddev": 40.0,
                "adaptive_clip.clip.initial_norm": 5.0,
                "adaptive_clip.clip.target_quantile": 0.9,
                "adaptive_clip": None,
                "clip_norm": 9.0,
                "private_metrics.update_noise_multiplier": 3.0,
                "private_metrics.metric_stddev": 99.0,
                "private_metrics.metrics.metrics.0.largest": 3.0,
                "private_metrics": None,
            },
        ),
        (
            (*_BY_THE_CLOCK, "--public_data=Wikipedia."),
            {
                "mechanism": "Another",
                "enforcement": "A timer on each client enforces it.",
                "public_data": "none",
                "has_run_directory": False,
                "provenance.secure_aggregation": True,
            },
        ),
        (
            (*_BANDED, "--clients_per_round=20", "--simulated_clients=5", "--noise_multiplier=4"),
            {
                "represents": None,
                "represents.clients_per_round": 2000,
                "represents.num_clients": 20,
                "represents.planned.noise_multiplier": 400.0,
            },
        ),
    ],
)
def test_what_the_configuration_contradicts_is_found(
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    places: dict[str, Any],
) -> None:
    """Text and data say the same, and the flags of the run say otherwise."""
    _ran(tmp_path / "run", *arguments)
    assert _verified(capsys, tmp_path / "run") == []
    for place, value in places.items():
        forged = tmp_path / place
        shutil.copytree(tmp_path / "run", forged)
        _forge(forged, place, value)
        assert any("in the files of the run." in each for each in _verified(capsys, forged)), place


def test_a_statement_of_other_things_is_one_line(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _ran(tmp_path / "run", *_TIMERS)
    file = tmp_path / "run" / "privacy.json"
    contents = json.loads(file.read_text())
    changes: dict[str, Any] = {
        "worst_client": 3,
        "num_clients": "many",
        "public_data": None,
        "enforcement": [1],
        "clip_norm": [],
        "provenance": {**contents["provenance"], "secure_aggregation": 3},
        "planned": {**contents["planned"], "noise_multiplier": "much"},
    }
    for name, value in changes.items():
        file.write_text(json.dumps({**contents, name: value}))
        words = ["mf-report", f"--verify={tmp_path / 'run' / 'PRIVACY.md'}"]
        status = command_line.run(report.__doc__ or "", report.define_flags, report.main, words)
        captured = capsys.readouterr()
        assert (status, captured.out) == (2, ""), name
        assert captured.err.startswith("mf-report: --verify"), name
        assert captured.err.count("\n") == 1, name


def test_an_extended_run_is_verified_with_all_its_horizons(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--mechanism=identity", "--clients_per_round=5", "--noise_multiplier=1")
    _ran(tmp_path / "run", *arguments, "--separation=4")
    statement = _ran(tmp_path / "run", *arguments, "--separation=4", "--num_rounds=16", rounds=16)
    assert [plan.num_rounds for plan in statement.earlier_plans] == [12]
    assert _verified(capsys, tmp_path / "run") == []


def _forge(run: pathlib.Path, place: str, value: Any) -> None:
    """Puts a number into a statement, and makes the rest of it anew from that."""
    contents = json.loads((run / "privacy.json").read_text())
    changed: Any = contents
    *outer, name = place.split(".")
    for each in outer:
        changed = changed[int(each) if each.isdigit() else each]
    changed[name] = value
    forged = stated_runs.made_again(run, contents)
    (run / "privacy.json").write_text(json.dumps(forged.to_dict()))
    (run / "PRIVACY.md").write_text(forged.to_markdown())


@pytest.mark.short_cases(1)
@pytest.mark.parametrize("is_there", [True, False])
def test_a_forged_noise_multiplier_of_drawn_clients_is_found(
    is_there: bool, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    _ran(run, *_DRAWN, "--target_rho=2")
    if not is_there:
        # The statement is of this very file, which cannot be compared with it.
        file = run / "config.json"
        before = hashlib.sha256(file.read_bytes()).hexdigest()
        # Beside the flags, where what a target needs is kept.
        config = json.loads(file.read_text())
        del config["noise_multiplier"]
        file.write_text(json.dumps(config))
        after = hashlib.sha256(file.read_bytes()).hexdigest()
        _edited(run / "privacy.json", before, after)
    _forge(run, "planned.noise_multiplier", 6.0)
    (found,) = _verified(capsys, run)
    assert found.startswith("noise_multiplier is 6.0 in the statement")
    assert found.endswith("and None in the files of the run.") != is_there


def test_a_forged_noise_multiplier_of_an_extended_run_is_found(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    arguments = ("--mechanism=identity", "--clients_per_round=5", "--separation=4")
    _ran(run, *arguments, "--target_epsilon=4")
    more = ("--num_rounds=16", "--target_epsilon=8")
    statement = _ran(run, *arguments, *more, rounds=16)
    assert _verified(capsys, run) == []
    # All horizons by the same factor, as noise that nobody added.
    contents = json.loads((run / "privacy.json").read_text())
    first = 2.0 * contents["earlier_plans"][0]["noise_multiplier"]
    contents["planned"]["noise_multiplier"] *= 2.0
    (run / "privacy.json").write_text(json.dumps(contents))
    _forge(run, "earlier_plans.0.noise_multiplier", first)
    assert json.loads((run / "privacy.json").read_text())["planned"]["epsilon"] < (
        0.7 * statement.plan.epsilon
    )
    (found,) = _verified(capsys, run)
    assert found.startswith(f"noise_multiplier is {first} in the statement")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The directory of a run that ended; each test works on a copy."""
    path = tmp_path_factory.mktemp("finished") / "run"
    _ran(path, *_TIMERS)
    return path


def test_a_run_states_when_it_was_and_what_it_left(finished: pathlib.Path) -> None:
    provenance = json.loads((finished / "privacy.json").read_text())["provenance"]
    day = provenance["date"]
    assert provenance["period"] == f"from {day} to {day}"
    assert set(provenance["files"]) == {
        *("config.json", "participation.npz", "final_model.npz"),
        *("factorization/arrays.npz", "factorization/factorization.json"),
    }
    for name, digest in provenance["files"].items():
        assert hashlib.sha256((finished / name).read_bytes()).hexdigest() == digest
    assert provenance["secure_aggregation"] is False
    text = (finished / "PRIVACY.md").read_text()
    for unsaid in ("*Responsible.*", "*Model and version.*", "ledger.*", "*With other runs.*"):
        assert text.partition(unsaid)[2].strip().lower().startswith("not stated.")
    (model,) = weights_files.load(finished / "final_model.npz")[1]
    assert model.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def _edited(path: pathlib.Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ('"num_clients": 143', '"num_clients": 1430', "num_clients"),
        ('"clients_per_round": 5', '"clients_per_round": 50', "clients_per_round"),
        ('"clip_norm": ', '"clip_norm": 1', "clip_norm"),
        ('"noise_multiplier": ', '"noise_multiplier": 1', "noise_multiplier"),
        ('"delta": 0.0001', '"delta": 0.0002', "delta"),
        ('"status": "finished"', '"status": "running"', "status"),
        ('"responsible": ""', '"responsible": "Bo"', "text"),
        ('"separation": 4', '"separation": 5', "separation"),
        ('"worst_client": {', '"worst_client": {"other": 0.5, ', "worst_client"),
    ],
)
def test_data_that_do_not_follow_from_the_files_are_found(
    finished: pathlib.Path,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
    old: str,
    new: str,
    found: str,
) -> None:
    shutil.copytree(finished, tmp_path / "run")
    _edited(tmp_path / "run" / "privacy.json", old, new)
    assert any(found in each for each in _verified(capsys, tmp_path / "run"))


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("num_clients", 1430),
        ("clients_per_round", 50),
        ("clip_norm", 0.01),
        ("noise_seed_is_fixed", True),
        ("planned.noise_multiplier", 2.0),
        ("planned.delta", 1e-9),
        ("planned.participation.separation", 5),
    ],
)
def test_a_forged_statement_that_agrees_with_itself_is_not_that_of_the_run(
    finished: pathlib.Path,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
    place: str,
    value: Any,
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    _forge(run, place, value)
    named = "participation" if "participation" in place else place.split(".")[-1]
    (found,) = _verified(capsys, run)
    assert found.startswith(f"{named} is")


@pytest.mark.parametrize(
    "name",
    ["config.json", "participation.npz", "final_model.npz", "factorization/arrays.npz"],
)
def test_a_file_that_was_changed_or_is_gone_is_named(
    finished: pathlib.Path,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    with (run / name).open("ab") as file:
        file.write(b" ")
    assert [f"{name} is another file" in each for each in _verified(capsys, run)] == [True]
    (run / name).unlink()
    assert _verified(capsys, run) == [f"{name} is not there."]


def test_a_text_that_was_changed_is_found(
    finished: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(finished, tmp_path / "run")
    _edited(tmp_path / "run" / "PRIVACY.md", "drawn from 143", "drawn from 1430")
    (found,) = _verified(capsys, tmp_path / "run")
    assert "is not the text that its numbers give" in found


def test_a_ledger_that_breaks_the_plan_of_a_run_under_way_is_found(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = _begun(tmp_path / "run", *_TIMERS)
    ledger = ParticipationLedger(tuple(map(str, range(_CLIENTS))))
    RunStatements(run).before(ledger)
    for client in (0, 1):
        ledger = ledger.with_round(np.array([client]))
    ledger.save(run.directory.ledger)
    assert _verified(capsys, tmp_path / "run") == []
    ledger.with_round(np.array([0])).save(run.directory.ledger)
    (found,) = _verified(capsys, tmp_path / "run")
    assert "breaks the plan" in found


def test_no_statement_confirms_a_guess_of_who_was_drawn(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    _ran(run, *_DRAWN, "--noise_multiplier=0.7")
    texts = [(run / name).read_text() for name in ("privacy.json", "PRIVACY.md")]
    secrets = [run / "participation.npz", run / "checkpoints" / "sampling_seed.json"]
    for secret in secrets:
        digest = hashlib.sha256(secret.read_bytes()).hexdigest()
        assert not any(digest in text for text in texts)
    assert json.loads(texts[0])["provenance"]["secret_files"] == ["participation.npz"]
    # Another ledger, or another seed, is found all the same.
    kept = secrets[1].read_text()
    secrets[1].write_text(kept.replace("0x", "0x1"))
    assert any("participation.npz is another file" in each for each in _verified(capsys, run))
    secrets[1].unlink()
    (found,) = _verified(capsys, run)
    assert "sampling_seed.json is not there" in found


def test_a_secret_ledger_has_no_second_name(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    begun = _begun(run, *_DRAWN, "--noise_multiplier=0.7")
    (run / "factorization" / "link").symlink_to("../participation.npz")
    (run / "factorization" / "seed").symlink_to("../checkpoints/sampling_seed.json")
    _ran(run, *_DRAWN, "--noise_multiplier=0.7")
    files = json.loads((run / "privacy.json").read_text())["provenance"]["files"]
    assert "participation.npz" in files
    assert not {"factorization/link", "factorization/seed"} & set(files)
    for secret in (begun.directory.ledger, begun.directory.sampling_seed):
        assert hashlib.sha256(secret.read_bytes()).hexdigest() not in files.values()
    assert _verified(capsys, run) == []


def _together(path: pathlib.Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((path / "privacy.json").read_text())["other_runs"]
    return found


def test_a_run_states_what_holds_of_it_and_others_together(
    finished: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("first", "second"):
        shutil.copytree(finished, tmp_path / name)
    matrix = mfa.factorizations.identity(5)
    mechanism = mfa.Mechanism(matrix, mfa.participation.SingleParticipation(), 2.0)
    mechanism.save(tmp_path / "saved")
    others = ",".join(str(tmp_path / name) for name in ("first", "second", "saved"))
    run = tmp_path / "run"
    statement = _ran(run, *_TIMERS, f"--other_runs={others}")
    found = _together(run)
    assert found["names"] == ["../first", "../second", "../saved"]
    # Gaussian mechanisms compose to one: squares of 1 / sigma add up.
    plan = statement.plan
    sigma = (3 * plan.noise_multiplier**-2 + 2.0**-2) ** -0.5
    assert found["epsilon"] == pytest.approx(mfa.accounting.epsilon(sigma, plan.delta), rel=1e-3)
    assert found["epsilon"] > 1.5 * plan.epsilon
    text = " ".join((run / "PRIVACY.md").read_text().split())
    assert "in this run and in `../first`, `../second`, `../saved`, what they released" in text
    assert "-DP, if each of them keeps what its own statement assumes." in text
    assert "not named here are not counted" in text
    assert _verified(capsys, run) == []
    files = json.loads((run / "privacy.json").read_text())["provenance"]["files"]
    assert {"../saved/mechanism.json", "../first/privacy.json"} <= set(files)
    (tmp_path / "second" / "privacy.json").write_text("{}")
    assert any("../second/privacy.json" in each for each in _verified(capsys, run))


@pytest.mark.long
def test_other_runs_that_broke_their_plan_count_as_their_worst_case(
    tmp_path: pathlib.Path,
) -> None:
    broken = _ran(tmp_path / "broken", *_BY_THE_CLOCK, cohorts=_BROKEN)
    kept = _ran(tmp_path / "kept", *_TIMERS)
    assert broken.worst_case is not None
    _ran(tmp_path / "run", *_TIMERS, f"--other_runs={tmp_path / 'broken'}")
    # In both directions: the run that broke its plan states the same of the other one.
    _ran(tmp_path / "again", *_BY_THE_CLOCK, f"--other_runs={tmp_path / 'kept'}", cohorts=_BROKEN)
    multipliers = (kept.plan.noise_multiplier, broken.worst_case.noise_multiplier)
    sigma = sum(each**-2 for each in multipliers) ** -0.5
    expected = mfa.accounting.epsilon(sigma, kept.plan.delta)
    for name in ("run", "again"):
        assert _together(tmp_path / name)["epsilon"] == pytest.approx(expected, rel=1e-3)


def test_another_run_whose_ledger_was_destroyed_is_what_its_statement_says(
    tmp_path: pathlib.Path,
) -> None:
    broken = _ran(tmp_path / "broken", *_BY_THE_CLOCK, cohorts=_BROKEN)
    kept = _ran(tmp_path / "kept", *_TIMERS)
    assert broken.worst_case is not None
    assert broken.worst_case.noise_multiplier < 0.9 * broken.plan.noise_multiplier
    for name, expected in (("broken", broken.worst_case), ("kept", kept.plan)):
        for is_there in (True, False):
            found = stated_runs.event_of(tmp_path / name, 1e-4)
            assert found.noise_multiplier == pytest.approx(expected.noise_multiplier, rel=1e-9)
            if is_there:
                (tmp_path / name / "participation.npz").unlink()
    # What it broke, but not how: nothing is known of it.
    contents = json.loads((tmp_path / "broken" / "privacy.json").read_text())
    (tmp_path / "broken" / "privacy.json").write_text(json.dumps({**contents, "widened": None}))
    with refuses("broken", "bring the ledger", error=command_line.CommandError):
        stated_runs.event_of(tmp_path / "broken", 1e-4)


def test_another_run_whose_clients_were_drawn_needs_its_ledger(tmp_path: pathlib.Path) -> None:
    drawn = tmp_path / "drawn"
    statement = _ran(drawn, *_DRAWN, "--noise_multiplier=0.7")
    assert stated_runs.event_of(drawn, 1e-4) == statement.plan.event()
    ledger = (drawn / "participation.npz").read_bytes()
    (drawn / "participation.npz").unlink()
    contents = json.loads((drawn / "privacy.json").read_text())
    # Also of a run that was killed before its statement had a word on who took part.
    killed = {**contents, "realised_participation": None, "keeps_plan": None}
    for each in (contents, killed):
        (drawn / "privacy.json").write_text(json.dumps(each))
        with refuses("drawn", "bring the ledger", error=command_line.CommandError):
            stated_runs.event_of(drawn, 1e-4)
    (drawn / "participation.npz").write_bytes(ledger)
    assert stated_runs.event_of(drawn, 1e-4) == statement.plan.event()


def test_runs_with_one_seed_of_their_samplers_are_not_composed(tmp_path: pathlib.Path) -> None:
    drawn = (*_DRAWN, "--noise_multiplier=0.7")
    statement = _ran(tmp_path / "first", *drawn)
    shutil.copytree(tmp_path / "first", tmp_path / "copy")
    first, copy = tmp_path / "first", tmp_path / "copy"
    seed = copy / "checkpoints" / "sampling_seed.json"
    # Its own digits, in other letters.
    seed.write_text(f" {seed.read_text()}".replace("0x", "0X"))
    refusals = [lambda: _begun(tmp_path / "run", *_TIMERS, f"--other_runs={first},{copy}")]
    refusals += [
        lambda: stated_runs.with_other_runs(
            statement, [copy], tmp_path, first / "checkpoints" / "sampling_seed.json"
        )
    ]
    for refused in refusals:
        with refuses("the same seed", "copy", error=command_line.CommandError):
            refused()
    random_streams.save_seed(7, seed)
    # Draws that are not of this seed count as a worst case.
    assert len(stated_runs.events_of([first, copy], 1e-4)) == 2


@pytest.mark.long
def test_a_drawn_run_is_composed_amplified_while_its_seed_is_there(tmp_path: pathlib.Path) -> None:
    drawn = _ran(tmp_path / "drawn", *_DRAWN, "--noise_multiplier=0.7")
    other = f"--other_runs={tmp_path / 'drawn'}"
    plan = _ran(tmp_path / "run", *_TIMERS, other).plan
    amplified = _together(tmp_path / "run")["epsilon"]
    expected = mfa.accounting.composed_epsilon([plan.event(), drawn.plan.event()], plan.delta)
    assert amplified == pytest.approx(expected, rel=1e-9)
    (tmp_path / "drawn" / "checkpoints" / "sampling_seed.json").unlink()
    _ran(tmp_path / "later", *_TIMERS, other)
    assert _together(tmp_path / "later")["epsilon"] > 1.2 * amplified


def test_without_a_guarantee_of_one_there_is_none_of_all(tmp_path: pathlib.Path) -> None:
    _ran(tmp_path / "silent", "--mechanism=none", "--clients_per_round=5")
    _ran(tmp_path / "run", *_TIMERS, f"--other_runs={tmp_path / 'silent'}")
    assert _together(tmp_path / "run")["epsilon"] is None
    text = " ".join((tmp_path / "run" / "PRIVACY.md").read_text().split())
    assert "there is no guarantee for all of them together" in text


def test_other_runs_that_cannot_be_read_are_one_line(
    finished: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    shutil.copytree(finished, tmp_path / "seeded")
    _edited(tmp_path / "seeded" / "privacy.json", '_is_fixed": false', '_is_fixed": true')
    shutil.copytree(finished, tmp_path / "damaged")
    (tmp_path / "damaged" / "participation.npz").write_bytes(b"")
    for value, named in (
        ("nowhere", "nowhere"),
        (f"{finished},{finished}", "twice"),
        (f"{finished},", "--other_runs"),
        (str(tmp_path), "neither"),
        (str(tmp_path / "seeded"), "fixed seed"),
        (str(tmp_path / "damaged"), "damaged"),
        (str(tmp_path / "run"), "itself"),
    ):
        with refuses(named, error=command_line.CommandError):
            _begun(tmp_path / "run", *_TIMERS, f"--other_runs={value}")
        assert not (tmp_path / "run").exists()


def test_others_that_are_gone_at_the_end_do_not_take_the_statement_with_them(
    finished: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    shutil.copytree(finished, tmp_path / "other")
    run = _begun(tmp_path / "run", *_TIMERS, f"--other_runs={tmp_path / 'other'}")
    statements = RunStatements(run)
    ledger = ParticipationLedger(tuple(map(str, range(_CLIENTS))))
    statements.before(ledger)
    assert _together(tmp_path / "run")["names"] == ["../other"]
    shutil.rmtree(tmp_path / "other")
    ledger = ledger.with_round(np.array([0]))
    ledger.save(run.directory.ledger)
    statements.after(ledger)
    assert _together(tmp_path / "run") is None
    assert json.loads((tmp_path / "run" / "privacy.json").read_text())["status"] == "interrupted"


# What is asked before somebody signs, and the words that answer it.
_ASKED = {
    "How well is one client protected?": "-differential privacy** for every client",
    "On what condition?": "on one condition",
    "What do epsilon and delta mean?": "the probability of whatever the run may release",
    "What may it amount to in the whole population?": "of the population is 0.143",
    "What can an attacker find out?": "is wrong about 1 in 100 clients whose",
    "What does the attacker know?": "everything of the run but its secrets",
    "Who is trusted?": "the server that sums the updates and adds the noise is trusted",
    "What does the server see?": "no: the server saw every client's clipped update.",
    "How many clients were there?": "12 planned rounds of 5 clients, drawn from 143",
    "What was public?": "Public data: none.",
    "What is not protected?": "Not covered: the choice of hyperparameters",
    "May losses be published?": "metrics of training have no noise",
    "What was released?": "Every round's noisy average update",
    "What is one unit?": "One client with all its examples",
    "And one example, or one of those who share a device?": "is protected less",
    "And a person with two devices?": "A person who uses two clients is protected as",
    "What if a device ignores its timer?": "weakens its own guarantee and nobody else's",
    "How often did a client take part?": "none more than once",
    "What about other runs?": "Each further run on these clients adds to what can be found out",
    "How is this verified, and is the program?": "`mf-report --verify=` makes this statement again",
    "Who is responsible?": "*Responsible.* Jane Doe, privacy team",
    "Of which model?": "*Model and version.* digits 1.0",
    "When was the run?": "*Period of the run.* from 20",
    "Who holds the seed, and when is it destroyed?": "ledger.* The privacy team, for a year.",
    "Which files is this about?": "`final_model.npz`",
}


def test_what_is_asked_before_somebody_signs_is_answered_once(tmp_path: pathlib.Path) -> None:
    said = ("--responsible=Jane Doe, privacy team", "--custody=The privacy team, for a year.")
    _ran(tmp_path / "run", *_TIMERS, *said, "--model=digits 1.0", "--delta=0.001")
    text = " ".join((tmp_path / "run" / "PRIVACY.md").read_text().split())
    assert {question: text.count(answer) for question, answer in _ASKED.items()} == dict.fromkeys(
        _ASKED, 1
    )
