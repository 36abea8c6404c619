"""What a run states of itself and other runs together."""

import json
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import pytest

import mf_aggregators as mfa
from mf_aggregators import random_streams
from mf_aggregators.commands import command_line, stated_runs
from mf_aggregators.privacy import guarantees, statement_file
from tests.refusals import refuses
from tests.simulations.runs.untrained_runs import (
    BROKEN_PLAN,
    BY_THE_CLOCK,
    DRAWN,
    TIMERS,
    begin_run,
    leave_run,
    verify,
)


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
    statement = leave_run(run, *TIMERS, f"--other_runs={others}")
    found = _together(run)
    assert found["names"] == ["../first", "../second", "../saved"]
    # Gaussian mechanisms compose to one: squares of 1 / sigma add up.
    plan = statement.plan
    sigma = (3 * plan.noise_multiplier**-2 + 2.0**-2) ** -0.5
    epsilon = float(found["epsilon"])
    assert epsilon == pytest.approx(mfa.accounting.epsilon(sigma, plan.delta), rel=1e-3)
    assert epsilon > 1.5 * plan.epsilon
    text = (run / "PRIVACY.md").read_text()
    together = f"point 3 names: **({found['epsilon']}, 0.0001)-differential privacy** of all"
    assert together in text.partition("1. **DP setting.**")[0]
    assert "in this run and in ../first, ../second, ../saved, what all of them released" in text
    assert "This covers no run that is not named here." in text
    assert verify(capsys, run) == []
    files = statement_file.read(run / "privacy.json")["files"]
    named = {"saved/mechanism.json", "first/privacy.json", "first/participation.npz"}
    assert {f"../{each}" for each in named} <= set(files)
    (tmp_path / "second" / "privacy.json").write_text("{}")
    assert any("../second/privacy.json" in each for each in verify(capsys, run))


@pytest.mark.long
def test_other_runs_that_broke_their_plan_count_as_their_worst_case(
    tmp_path: pathlib.Path,
) -> None:
    broken = leave_run(tmp_path / "broken", *BY_THE_CLOCK, cohorts=BROKEN_PLAN)
    kept = leave_run(tmp_path / "kept", *TIMERS)
    assert broken.worst_case is not None
    leave_run(tmp_path / "run", *TIMERS, f"--other_runs={tmp_path / 'broken'}")
    # In both directions: the run that broke its plan states the same of the other one.
    leave_run(
        tmp_path / "again", *BY_THE_CLOCK, f"--other_runs={tmp_path / 'kept'}", cohorts=BROKEN_PLAN
    )
    multipliers = (kept.plan.noise_multiplier, broken.worst_case.noise_multiplier)
    sigma = sum(each**-2 for each in multipliers) ** -0.5
    expected = mfa.accounting.epsilon(sigma, kept.plan.delta)
    for name in ("run", "again"):
        epsilon = float(_together(tmp_path / name)["epsilon"])
        assert epsilon == pytest.approx(expected, rel=1e-3)


def test_another_run_needs_its_ledger(tmp_path: pathlib.Path) -> None:
    """Nothing else shows whether it kept its plan, or drew its clients."""
    broken = leave_run(tmp_path / "broken", *BY_THE_CLOCK, cohorts=BROKEN_PLAN)
    drawn = leave_run(tmp_path / "drawn", *DRAWN, "--noise_multiplier=0.7")
    assert broken.worst_case is not None
    assert broken.worst_case.noise_multiplier < 0.9 * broken.plan.noise_multiplier
    for name, expected in (("broken", broken.worst_case), ("drawn", drawn.plan)):
        assert stated_runs.event_of(tmp_path / name, 1e-4) == guarantees.event(expected)
        (tmp_path / name / "participation.npz").unlink()
        with refuses(name, "bring the ledger", error=command_line.CommandError):
            stated_runs.event_of(tmp_path / name, 1e-4)


def test_runs_with_one_seed_of_their_samplers_are_not_composed(tmp_path: pathlib.Path) -> None:
    drawn = (*DRAWN, "--noise_multiplier=0.7")
    leave_run(tmp_path / "first", *drawn)
    shutil.copytree(tmp_path / "first", tmp_path / "copy")
    first, copy = tmp_path / "first", tmp_path / "copy"
    seed = copy / "checkpoints" / "sampling_seed.json"
    # Its own digits, in other letters.
    seed.write_text(f" {seed.read_text()}".replace("0x", "0X"))
    runs = [
        {"name": name, "source": "a", "statement": f"{name}/privacy.json"}
        for name in ("first", "copy")
    ]
    head = {"format": stated_runs.FORMAT, "unit": "client", "adjacency": "zero-out"}
    for name, chosen in (("both", runs), ("last", runs[1:])):
        (tmp_path / f"{name}.json").write_text(json.dumps({**head, "runs": chosen}))
    refusals: tuple[Callable[[], object], ...] = (
        lambda: stated_runs.others_of(str(tmp_path / "both.json"), tmp_path, 1e-4),
        lambda: stated_runs.others_of(
            str(tmp_path / "last.json"),
            tmp_path,
            1e-4,
            first / "checkpoints" / "sampling_seed.json",
        ),
        lambda: begin_run(tmp_path / "run", *TIMERS, f"--other_runs={first},{copy}"),
        lambda: stated_runs.others_of(
            str(copy), tmp_path, 1e-4, first / "checkpoints" / "sampling_seed.json"
        ),
    )
    for refused in refusals:
        with refuses("the same seed", "copy", error=command_line.CommandError):
            refused()
    random_streams.save_seed(7, seed)
    # Draws that are not of this seed count as a worst case.
    assert len(stated_runs.events_of([first, copy], 1e-4)) == 2
    both = stated_runs.others_of(str(tmp_path / "both.json"), tmp_path, 1e-4)
    assert both is not None
    assert len(both.events) == 2


@pytest.mark.long
def test_a_drawn_run_is_composed_amplified_while_its_seed_is_there(tmp_path: pathlib.Path) -> None:
    drawn = leave_run(tmp_path / "drawn", *DRAWN, "--noise_multiplier=0.7")
    other = f"--other_runs={tmp_path / 'drawn'}"
    plan = leave_run(tmp_path / "run", *TIMERS, other).plan
    amplified = float(_together(tmp_path / "run")["epsilon"])
    expected = mfa.accounting.composed_epsilon(
        [guarantees.event(plan), guarantees.event(drawn.plan)], plan.delta
    )
    assert amplified == pytest.approx(expected, rel=1e-5)
    (tmp_path / "drawn" / "checkpoints" / "sampling_seed.json").unlink()
    leave_run(tmp_path / "later", *TIMERS, other)
    assert float(_together(tmp_path / "later")["epsilon"]) > 1.2 * amplified
