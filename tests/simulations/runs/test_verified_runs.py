"""mf-report --verify of the directories of runs."""

import functools
import hashlib
import json
import pathlib
import shutil
from typing import Any

import numpy as np
import pytest

import mf_aggregators as mfa
from mf_aggregators.audit.run_audit import Canaries
from mf_aggregators.commands import report
from mf_aggregators.privacy import statement_file
from simulations.runs.run_directory import ParticipationLedger
from simulations.runs.run_reports import RunStatements
from tests import console_commands
from tests.refusals import refuses
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
        ((*TIMERS, "--stop_at_epsilon=2.5"), {"rounds": 4, "refused": [0]}),
        (BY_THE_CLOCK, {"cohorts": BROKEN_PLAN}),
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
    tmp_path: pathlib.Path, arguments: tuple[str, ...], more: dict[str, Any]
) -> None:
    leave_run(tmp_path / "run", *arguments, **more)
    assert verify(tmp_path / "run") == []
    # Wherever it goes.
    shutil.move(tmp_path / "run", tmp_path / "archive")
    assert verify(tmp_path / "archive") == []


def test_nothing_is_reported_of_a_run_by_the_ledger_of_another(tmp_path: pathlib.Path) -> None:
    run, other = tmp_path / "run", tmp_path / "other.npz"
    leave_run(run, *TIMERS)
    own = ParticipationLedger.load(run / "participation.npz")
    fewer = (own.cohorts[0][1:], *own.cohorts[1:])
    ParticipationLedger(own.client_ids, fewer).save(other)
    flags = (f"--checkpoint={run}", "--delta=1e-4")
    report = functools.partial(console_commands.call, "mf-report", *flags)
    report(f"--ledger={run}/participation.npz").done()
    report(f"--ledger={other}").refused("is not the ledger of the run")


@pytest.mark.parametrize("rounds", [12, 5])
def test_an_audit_is_made_again_from_what_its_rounds_released(
    rounds: int, tmp_path: pathlib.Path
) -> None:
    """Of noise alone, in which canaries are guessed by coins."""
    canaries, size, run = 300, 900, tmp_path / "run"
    arguments = (*TIMERS, f"--audit_canaries={canaries}")
    directions = len(Canaries.drawn(1, canaries, size, 12).coordinates)
    released = np.random.default_rng(1).normal(size=(12, directions)).astype(np.float32)
    begin_run(run, *arguments)
    (run / "audit").mkdir()
    for index in range(rounds):
        np.save(run / "audit" / f"round_{index + 1}.npy", released[index])
    config = json.loads((run / "config.json").read_text())
    config["num_parameters"] = size
    (run / "config.json").write_text(json.dumps(config))
    statement = leave_run(run, *arguments, rounds=rounds)
    assert statement.audit is not None
    assert (statement.audit["right"] is None) == (rounds < 12)
    assert "6. **Audit.**" in (run / "PRIVACY.md").read_text()
    assert verify(run) == []
    if rounds < 12:
        return
    assert 0 < int(str(statement.audit["right"])) < canaries
    forged = {**statement.audit, "right": canaries, "is_refuted": False}
    _forge(run, audit=forged)
    assert any(each.startswith("audit.right is 300") for each in verify(run))
    _forge(run, audit=None)
    assert verify(run)
    # What was released is evidence as well.
    _forge(run, audit=statement.audit)
    np.save(run / "audit" / "round_4.npy", 2 * released[3])
    (found,) = verify(run)
    assert found.startswith("audit is another file")


def _forge(run: pathlib.Path, **changed: Any) -> None:
    """Puts values into the data of a statement by their names, and makes its text anew."""
    document = json.loads((run / "privacy.json").read_text())
    for place, value in changed.items():
        *outer, name = place.split("__")
        inner: Any = document
        for each in outer:
            inner = inner[int(each) if each.isdigit() else each]
        inner[int(name) if name.isdigit() else name] = value
    (run / "PRIVACY.md").write_text(statement_file.render(document), encoding="utf-8")
    (run / "privacy.json").write_text(statement_file.canonical(document), encoding="utf-8")


@pytest.mark.parametrize("recorded", [{}, {"rounds": 3}, {"refused": [1]}])
def test_no_rule_ended_a_run_that_its_files_do_not_show(
    recorded: dict[str, Any], tmp_path: pathlib.Path
) -> None:
    """Client 0 would be in a second round, and client 1 would be in a first one."""
    run, arguments = tmp_path / "run", (*TIMERS, "--stop_at_epsilon=2.5")
    cohorts = [[0], *([index + 1] for index in range(1, 12))]
    given: dict[str, Any] = {"rounds": 4, "refused": [0], "cohorts": cohorts, **recorded}
    statement = leave_run(run, *arguments, **given)
    is_shown = not recorded
    assert statement.status == ("ended_by_rule" if is_shown or "rounds" in recorded else "open")
    assert verify(run) == []
    if is_shown:
        assert "The run was ended by its own stopping rule" in (run / "PRIVACY.md").read_text()
        return
    _forge(run, status="ended_by_rule" if statement.status == "open" else "finished")
    (found,) = verify(run)
    assert found.startswith("status is")


@pytest.mark.short_cases(1)
@pytest.mark.parametrize("is_there", [True, False])
def test_a_forged_noise_multiplier_of_drawn_clients_is_found(
    is_there: bool, tmp_path: pathlib.Path
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
    _forge(run, noise__noise_multipliers__0="6.0")
    found = verify(run)
    assert any(each.startswith("noise_multiplier is 6.0 in the statement") for each in found)
    assert any(each.endswith("and None in the files of the run.") for each in found) != is_there


def test_an_extended_run_is_verified_with_all_its_horizons(tmp_path: pathlib.Path) -> None:
    run = tmp_path / "run"
    arguments = ("--mechanism=identity", "--clients_per_round=5", "--separation=4")
    leave_run(run, *arguments, "--target_epsilon=4")
    more = ("--num_rounds=16", "--target_epsilon=8")
    statement = leave_run(run, *arguments, *more, rounds=16)
    assert [plan.num_rounds for plan in statement.earlier_plans] == [12]
    assert verify(run) == []
    # All horizons by the same factor, as noise that nobody added.
    multipliers = [
        repr(2.0 * each.noise_multiplier) for each in (*statement.earlier_plans, statement.plan)
    ]
    _forge(run, noise__noise_multipliers=multipliers)
    assert f"noise_multiplier is {multipliers[0]} in the statement" in verify(run)[0]


@pytest.mark.parametrize(
    "name",
    ["config.json", "participation.npz", "final_model.npz", "factorization/arrays.npz"],
)
def test_a_file_that_was_changed_or_is_gone_is_named(
    finished: pathlib.Path, tmp_path: pathlib.Path, name: str
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    with (run / name).open("ab") as file:
        file.write(b" ")
    assert [f"{name} is another file" in each for each in verify(run)] == [True]
    (run / name).unlink()
    assert verify(run) == [f"{name} is not there."]


def test_a_text_that_was_changed_is_found(finished: pathlib.Path, tmp_path: pathlib.Path) -> None:
    shutil.copytree(finished, tmp_path / "run")
    text = tmp_path / "run" / "PRIVACY.md"
    before = text.read_text()
    # Also where Markdown shows other words for the same ones.
    for forged in (
        before.replace("a population of 143", "a population of 1430"),
        before.replace("\n", " "),
        before.replace("\n", "\n    "),
    ):
        text.write_text(forged)
        (found,) = verify(tmp_path / "run")
        assert "is not the text that follows from its data" in found


def test_a_ledger_that_breaks_the_plan_of_a_run_under_way_is_found(tmp_path: pathlib.Path) -> None:
    run = begin_run(tmp_path / "run", *TIMERS)
    ledger = ParticipationLedger(tuple(map(str, range(CLIENTS))))
    RunStatements(run).before(ledger)
    for client in (0, 1):
        ledger = ledger.with_round(np.array([client]))
    ledger.save(run.directory.ledger)
    assert verify(tmp_path / "run") == []
    ledger.with_round(np.array([0])).save(run.directory.ledger)
    (found,) = verify(tmp_path / "run")
    assert "breaks the plan" in found


def test_a_ledger_that_lacks_what_the_metrics_count_is_found(tmp_path: pathlib.Path) -> None:
    run = tmp_path / "run"
    leave_run(run, *TIMERS)
    ledger = ParticipationLedger.load(run / "participation.npz")
    counts = [len(cohort) for cohort in ledger.cohorts]
    rows = [f"{number},{count}" for number, count in enumerate(counts, 1)]
    metrics = run / "metrics.csv"
    # The row of a round may have no values.
    metrics.write_text("\n".join(["round,num_updates", rows[0], "2,", *rows[2:], ""]))
    leave_run(run, *TIMERS)
    assert verify(run) == []
    metrics.write_text("\n".join(["round,num_updates", f"1,{counts[0] + 1}", ""]))
    assert [each.split()[0] for each in verify(run)] == ["metrics.csv"]
    leave_run(run, *TIMERS)
    found = verify(run)
    assert any(f"with {counts[0]} rows for {counts[0] + 1} clients" in each for each in found)


def test_a_statement_names_the_record_of_sums_with_its_noise(tmp_path: pathlib.Path) -> None:
    run = tmp_path / "run"
    leave_run(run, *TIMERS)
    mechanism = mfa.load(run)
    (run / "noise").mkdir(mode=0o700)
    aggregator = mfa.Aggregator(
        mechanism, 0.3, 5, noise_directory=run / "noise", template=np.zeros(6, np.float32)
    )
    aggregator.next(aggregator.initialize(), [np.ones(6, np.float32)])
    # What a reader of the directory finds is compared.
    assert any(each.startswith("noise.recorded_sums") for each in verify(run))
    leave_run(run, *TIMERS)
    noise: Any = statement_file.read(run / "privacy.json")["noise"]
    assert noise["recorded_sums"] == 1
    assert noise["digest"] == mechanism.guarantee(1e-4).noise_digest.hex()
    assert verify(run) == []
    _forge(run, noise__recorded_sums=12)
    assert any(each.startswith("noise.recorded_sums is 12") for each in verify(run))
    leave_run(run, *TIMERS)
    # Who verifies need not have the secret directory; then the record is the run's word.
    shutil.rmtree(run / "noise")
    assert verify(run) == []
    assert (
        statement_file.told(statement_file.read(run / "privacy.json"))["noise.recorded_sums"] == 1
    )
    # Its word is that of a run of twelve rounds.
    honest = (run / "privacy.json").read_bytes()
    _forge(run, noise__recorded_sums=13)
    with refuses("13 sums, and 12 rounds"):
        report.verify(str(run / "PRIVACY.md"))
    (run / "privacy.json").write_bytes(honest)
    # The noise of another mechanism is none of this run's.
    other = mfa.Mechanism(mechanism.factorization, mechanism.participation, 9.0)
    (run / "noise").mkdir(mode=0o700)
    foreign = mfa.Aggregator(
        other, 0.3, 5, noise_directory=run / "noise", template=np.zeros(6, np.float32)
    )
    foreign.next(foreign.initialize(), [np.ones(6, np.float32)])
    assert any(each.startswith("noise.recorded_sums is 1") for each in verify(run))


def test_no_statement_confirms_a_guess_of_who_was_drawn(tmp_path: pathlib.Path) -> None:
    run = tmp_path / "run"
    leave_run(run, *DRAWN, "--noise_multiplier=0.7")
    texts = [(run / name).read_text() for name in ("privacy.json", "PRIVACY.md")]
    secrets = [run / "participation.npz", run / "checkpoints" / "sampling_seed.json"]
    for secret in secrets:
        digest = hashlib.sha256(secret.read_bytes()).hexdigest()
        assert not any(digest in text for text in texts)
    keys = {"participation.npz": "checkpoints/sampling_seed.json"}
    assert json.loads(texts[0])["key_files"] == keys
    # Another ledger, or another seed, is found all the same.
    kept = secrets[1].read_text()
    secrets[1].write_text(kept.replace("0x", "0x1"))
    assert any("participation.npz is another file" in each for each in verify(run))
    secrets[1].unlink()
    (found,) = verify(run)
    assert "sampling_seed.json is not there" in found


def test_a_secret_ledger_has_no_second_name(tmp_path: pathlib.Path) -> None:
    run = tmp_path / "run"
    begun = begin_run(run, *DRAWN, "--noise_multiplier=0.7")
    (run / "factorization" / "link").symlink_to("../participation.npz")
    (run / "factorization" / "seed").symlink_to("../checkpoints/sampling_seed.json")
    leave_run(run, *DRAWN, "--noise_multiplier=0.7")
    document: dict[str, Any] = statement_file.read(run / "privacy.json")
    files = document["files"]
    assert "factorization/seed" not in files
    assert set(document["key_files"]) == {"participation.npz", "factorization/link"}
    for secret in (begun.directory.ledger, begun.directory.sampling_seed):
        assert hashlib.sha256(secret.read_bytes()).hexdigest() not in files.values()
    assert verify(run) == []
