"""mf-report --verify of the directories of runs."""

import hashlib
import json
import pathlib
import shutil
from typing import Any

import numpy as np
import pytest

from mf_aggregators.audit.one_run import FreshNoise, RunAudit
from mf_aggregators.commands import command_line, report, stated_runs
from simulations.runs.round_records import ParticipationLedger
from simulations.runs.run_statements import RunStatements
from simulations.training import weights_files
from tests import statement_schemas
from tests.simulations.runs.untrained_runs import (
    BANDED,
    BROKEN_PLAN,
    BY_THE_CLOCK,
    CLIENTS,
    DRAWN,
    TIMERS,
    begin_run,
    edit,
    leave_run,
    verify,
)


@pytest.mark.short_cases(6)
@pytest.mark.parametrize(
    ("arguments", "more"),
    [
        (TIMERS, {}),
        ((*TIMERS, "--responsible=Ada", "--model=m 2", "--custody=In a vault."), {"rounds": 5}),
        ((*TIMERS, "--clip_norm=adaptive", "--clip_count_stddev=4"), {}),
        ((*BANDED, "--clients_per_round=20", "--simulated_clients=5", "--noise_multiplier=4"), {}),
        ((*TIMERS, "--stop_at_epsilon=3"), {"rounds": 6, "stopped_by_rule": True}),
        ((*BY_THE_CLOCK, "--name_clients"), {"cohorts": BROKEN_PLAN}),
        ((*TIMERS, "--seed=3", "--secure_aggregation"), {}),
        ((*DRAWN, "--noise_multiplier=0.7"), {}),
        ((*DRAWN, "--target_rho=2", "--seed=3"), {}),
        (("--mechanism=none", "--clients_per_round=5"), {}),
        ((*TIMERS, "--private_metrics", "--largest_loss=5"), {}),
        ((*DRAWN, "--noise_multiplier=0.7", "--private_metrics"), {}),
        ((*TIMERS, "--over_selection=1.5", "--upload_loss_probability=0.1"), {}),
    ],
)
def test_the_statement_of_a_run_follows_from_its_files(
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    more: dict[str, Any],
) -> None:
    leave_run(tmp_path / "run", *arguments, **more)
    statement_schemas.check(json.loads((tmp_path / "run" / "privacy.json").read_text()))
    assert verify(capsys, tmp_path / "run") == []
    # Wherever it goes.
    shutil.move(tmp_path / "run", tmp_path / "archive")
    assert verify(capsys, tmp_path / "archive") == []


@pytest.mark.parametrize("is_at_its_end", [True, False])
def test_what_canaries_found_is_stated_and_has_to_agree_with_itself(
    is_at_its_end: bool, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    noise = FreshNoise(weakest_round=3, share=1.01, p_value=0.4)
    audit = RunAudit(1000, 498, 700, 1.5, 1e-5, 6.0, 1.1, 0.6, 1.4, noise, False)
    arguments = (*TIMERS, "--audit_canaries=1000")
    leave_run(tmp_path / "run", *arguments, audit=audit if is_at_its_end else None)
    contents = json.loads((tmp_path / "run" / "privacy.json").read_text())
    statement_schemas.check(contents)
    assert "6. **Audit.**" in (tmp_path / "run" / "PRIVACY.md").read_text()
    assert verify(capsys, tmp_path / "run") == []
    if is_at_its_end:
        contents["audit"]["epsilon_lower_bound"] = 0.1
        (tmp_path / "run" / "privacy.json").write_text(json.dumps(contents))
        (difference,) = verify(capsys, tmp_path / "run")
        assert difference.startswith("epsilon_lower_bound of the audit")


@pytest.mark.parametrize(
    ("arguments", "places"),
    [
        (
            (*TIMERS, "--clip_norm=adaptive", "--clip_count_stddev=4", "--private_metrics"),
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
            (*BY_THE_CLOCK, "--public_data=Wikipedia."),
            {
                "mechanism": "Another",
                "enforcement": "A timer on each client enforces it.",
                "public_data": "none",
                "has_run_directory": False,
                "provenance.secure_aggregation": True,
            },
        ),
        (
            (*BANDED, "--clients_per_round=20", "--simulated_clients=5", "--noise_multiplier=4"),
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
    leave_run(tmp_path / "run", *arguments)
    assert verify(capsys, tmp_path / "run") == []
    for place, value in places.items():
        forged = tmp_path / place
        shutil.copytree(tmp_path / "run", forged)
        _forge(forged, place, value)
        assert any("in the files of the run." in each for each in verify(capsys, forged)), place


def test_a_statement_of_other_things_is_one_line(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    leave_run(tmp_path / "run", *TIMERS)
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
    leave_run(run, *DRAWN, "--target_rho=2")
    if not is_there:
        # The statement is of this very file, which cannot be compared with it.
        file = run / "config.json"
        before = hashlib.sha256(file.read_bytes()).hexdigest()
        # Beside the flags, where what a target needs is kept.
        config = json.loads(file.read_text())
        del config["noise_multiplier"]
        file.write_text(json.dumps(config))
        after = hashlib.sha256(file.read_bytes()).hexdigest()
        edit(run / "privacy.json", before, after)
    _forge(run, "planned.noise_multiplier", 6.0)
    (found,) = verify(capsys, run)
    assert found.startswith("noise_multiplier is 6.0 in the statement")
    assert found.endswith("and None in the files of the run.") != is_there


def test_an_extended_run_is_verified_with_all_its_horizons(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    arguments = ("--mechanism=identity", "--clients_per_round=5", "--separation=4")
    leave_run(run, *arguments, "--target_epsilon=4")
    more = ("--num_rounds=16", "--target_epsilon=8")
    statement = leave_run(run, *arguments, *more, rounds=16)
    assert [plan.num_rounds for plan in statement.earlier_plans] == [12]
    assert verify(capsys, run) == []
    # All horizons by the same factor, as noise that nobody added.
    contents = json.loads((run / "privacy.json").read_text())
    first = 2.0 * contents["earlier_plans"][0]["noise_multiplier"]
    contents["planned"]["noise_multiplier"] *= 2.0
    (run / "privacy.json").write_text(json.dumps(contents))
    _forge(run, "earlier_plans.0.noise_multiplier", first)
    assert json.loads((run / "privacy.json").read_text())["planned"]["epsilon"] < (
        0.7 * statement.plan.epsilon
    )
    (found,) = verify(capsys, run)
    assert found.startswith(f"noise_multiplier is {first} in the statement")


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
    edit(tmp_path / "run" / "privacy.json", old, new)
    assert any(found in each for each in verify(capsys, tmp_path / "run"))


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
    (found,) = verify(capsys, run)
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
    assert [f"{name} is another file" in each for each in verify(capsys, run)] == [True]
    (run / name).unlink()
    assert verify(capsys, run) == [f"{name} is not there."]


def test_a_text_that_was_changed_is_found(
    finished: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(finished, tmp_path / "run")
    edit(tmp_path / "run" / "PRIVACY.md", "drawn from 143", "drawn from 1430")
    (found,) = verify(capsys, tmp_path / "run")
    assert "is not the text that its numbers give" in found


def test_a_ledger_that_breaks_the_plan_of_a_run_under_way_is_found(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = begin_run(tmp_path / "run", *TIMERS)
    ledger = ParticipationLedger(tuple(map(str, range(CLIENTS))))
    RunStatements(run).before(ledger)
    for client in (0, 1):
        ledger = ledger.with_round(np.array([client]))
    ledger.save(run.directory.ledger)
    assert verify(capsys, tmp_path / "run") == []
    ledger.with_round(np.array([0])).save(run.directory.ledger)
    (found,) = verify(capsys, tmp_path / "run")
    assert "breaks the plan" in found


def test_a_ledger_that_lacks_what_the_metrics_count_is_found(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    leave_run(run, *TIMERS)
    ledger = ParticipationLedger.load(run / "participation.npz")
    counts = [len(cohort) for cohort in ledger.cohorts]
    rows = [f"{number},{count}" for number, count in enumerate(counts, 1)]
    metrics = run / "metrics.csv"
    # The row of a round may have no values.
    metrics.write_text("\n".join(["round,num_updates", rows[0], "2,", *rows[2:], ""]))
    assert verify(capsys, run) == []
    metrics.write_text("\n".join(["round,num_updates", f"1,{counts[0] + 1}", ""]))
    found = verify(capsys, run)
    assert any(f"with {counts[0]} rows for {counts[0] + 1} clients" in each for each in found)


def test_no_statement_confirms_a_guess_of_who_was_drawn(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    leave_run(run, *DRAWN, "--noise_multiplier=0.7")
    texts = [(run / name).read_text() for name in ("privacy.json", "PRIVACY.md")]
    secrets = [run / "participation.npz", run / "checkpoints" / "sampling_seed.json"]
    for secret in secrets:
        digest = hashlib.sha256(secret.read_bytes()).hexdigest()
        assert not any(digest in text for text in texts)
    assert json.loads(texts[0])["provenance"]["secret_files"] == ["participation.npz"]
    # Another ledger, or another seed, is found all the same.
    kept = secrets[1].read_text()
    secrets[1].write_text(kept.replace("0x", "0x1"))
    assert any("participation.npz is another file" in each for each in verify(capsys, run))
    secrets[1].unlink()
    (found,) = verify(capsys, run)
    assert "sampling_seed.json is not there" in found


def test_a_secret_ledger_has_no_second_name(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    begun = begin_run(run, *DRAWN, "--noise_multiplier=0.7")
    (run / "factorization" / "link").symlink_to("../participation.npz")
    (run / "factorization" / "seed").symlink_to("../checkpoints/sampling_seed.json")
    leave_run(run, *DRAWN, "--noise_multiplier=0.7")
    files = json.loads((run / "privacy.json").read_text())["provenance"]["files"]
    assert "participation.npz" in files
    assert not {"factorization/link", "factorization/seed"} & set(files)
    for secret in (begun.directory.ledger, begun.directory.sampling_seed):
        assert hashlib.sha256(secret.read_bytes()).hexdigest() not in files.values()
    assert verify(capsys, run) == []


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
    leave_run(tmp_path / "run", *TIMERS, *said, "--model=digits 1.0", "--delta=0.001")
    text = " ".join((tmp_path / "run" / "PRIVACY.md").read_text().split())
    assert {question: text.count(answer) for question, answer in _ASKED.items()} == dict.fromkeys(
        _ASKED, 1
    )
