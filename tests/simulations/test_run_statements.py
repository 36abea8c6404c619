"""Statements of runs say what the flags made of the guarantee."""

import json
from typing import Any

import pytest
from absl import flags

import mf_aggregators as mfa
from digit_classification.run_digits import COMMAND
from simulations import device_flags, run_flags, run_plans, run_statements
from simulations.participation_ledger import ParticipationLedger


def _values(*arguments: str) -> flags.FlagValues:
    values = flags.FlagValues()
    flags.DEFINE_enum("format", "text", ["text", "json"], "", flag_values=values)
    run_flags.define_flags(values, COMMAND)
    values(["run-digits", "--num_rounds=12", "--mechanism=identity", *arguments])
    return values


def _plan(values: flags.FlagValues, **changes: Any) -> run_plans.Plan:
    options = {**run_flags.options_of(values, COMMAND), **changes}
    return run_plans.make(options, COMMAND.open_data(options), 64, None, None)


def test_few_clients_that_stand_for_many_earn_the_weaker_guarantee() -> None:
    values = _values("--clients_per_round=20", "--simulated_clients=5", "--target_epsilon=4")
    plan = _plan(values)
    assert plan.cohort_size == 5
    statement = run_statements.planned(plan, device_flags.behaviour(values))
    # A quarter of the clients, a quarter of the noise in their sum.
    multiplier = mfa.accounting.noise_multiplier(4.0, plan.options["delta"])
    expected = mfa.accounting.epsilon(multiplier / 4, plan.options["delta"])
    assert statement.plan.epsilon == pytest.approx(expected, rel=1e-9)
    assert statement.earned.epsilon == statement.plan.epsilon
    contents = json.loads(json.dumps(statement.to_dict()))
    assert contents["clients_per_round"] == 5
    assert contents["represents"]["clients_per_round"] == 20
    assert contents["represents"]["planned"]["epsilon"] == pytest.approx(4.0, rel=1e-6)
    assert contents["earned"]["epsilon"] > 4 * contents["represents"]["planned"]["epsilon"]
    (warning,) = statement.warnings
    assert "5 clients a round stood for 20" in warning
    assert warning in statement.to_markdown()


def test_a_run_of_all_its_clients_represents_nothing() -> None:
    values = _values("--clients_per_round=20", "--target_epsilon=4")
    statement = run_statements.planned(_plan(values), device_flags.behaviour(values))
    assert statement.plan.epsilon == pytest.approx(4.0, rel=1e-6)
    assert statement.represented is None
    assert statement.to_dict()["represents"] is None
    assert statement.warnings == ()


def test_the_statement_says_what_timers_by_the_wall_clock_leave_open() -> None:
    values = _values(
        "--clients_per_round=5", "--separation=4", "--timer=wall_clock", "--timer_hours=36"
    )
    behaviour = device_flags.behaviour(values)
    statement = run_statements.planned(_plan(values), behaviour)
    text = statement.to_markdown()
    assert "36 hours pass between two participations" in text
    assert "assumed, not enforced" in text
    assert "A timer on each client enforces it" not in text
    assert "\n" not in statement.to_dict()["enforcement"]


def test_a_ledger_that_breaks_the_plan_is_not_stated_as_planned() -> None:
    values = _values("--clients_per_round=1", "--separation=4", "--target_epsilon=4")
    plan = _plan(values)
    statement = run_statements.planned(plan, device_flags.behaviour(values))
    clients = tuple(map(str, range(plan.data.num_clients)))
    cohorts: list[Any] = [[index] for index in range(12)]
    kept = run_statements.realised(
        plan, statement, ParticipationLedger(clients, tuple(cohorts)), None
    )
    assert kept.keeps_plan is True
    assert kept.earned.epsilon <= statement.plan.epsilon
    # The first client again, sooner than its timer allows.
    cohorts[1:5] = [[0]] * 4
    broken = run_statements.realised(
        plan, statement, ParticipationLedger(clients, tuple(cohorts)), None
    )
    assert broken.keeps_plan is False
    assert broken.earned.epsilon > statement.plan.epsilon


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--simulated_clients=30"], "stand for fewer clients"),
        (["--simulated_clients=2", "--sampling=poisson"], "belongs to --sampling=timers"),
        (["--server_warmup=0.8", "--server_cooldown=0.4"], "must not overlap"),
        (["--server_warmup=1.5"], r"--server_warmup must be in \[0, 1\]"),
        (["--zeroing_norm=0"], "--zeroing_norm"),
        (["--workload=training"], "--workload=training needs"),
    ],
)
def test_flags_that_do_not_fit_are_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run_flags.options_of(_values("--clients_per_round=20", *arguments), COMMAND)


def test_momentum_and_schedule_inside_the_mechanism_change_its_matrix_alone() -> None:
    arguments = ["--mechanism=banded", "--num_bands=4", "--separation=4", "--clients_per_round=5"]
    recipe = ["--server_momentum=0.9", "--server_warmup=0.25", "--server_cooldown=0.25"]
    inside = _plan(_values(*arguments, *recipe, "--workload=training"))
    after = _plan(_values(*arguments, *recipe))
    rates = run_plans.server_schedule(inside.options).rates(
        12, inside.options["server_learning_rate"]
    )
    workload = mfa.workloads.momentum_sgd(12, 0.9, rates)
    error = inside.factorization.total_error(workload, inside.participation)
    assert error < 0.99 * after.factorization.total_error(workload, after.participation)
    assert inside.noise_multiplier == after.noise_multiplier
