"""What a report says before a run goes on for more rounds."""

import pathlib

import pytest

from mf_aggregators import accounting, checkpoints, factorizations, workloads
from mf_aggregators.commands.report_contents import Subject
from mf_aggregators.factorizations import Factorization
from mf_aggregators.participation import MinSeparation
from tests import console_commands
from tests.refusals import refuses

_SCHEMA = MinSeparation(8)


def _sums(num_rounds: int) -> workloads.Workload:
    return workloads.describe({"name": "prefix_sum"}, num_rounds)


def _report(factorization: Factorization, path: pathlib.Path, *more: str) -> console_commands.Ended:
    checkpoints.save(factorization, path / "checkpoint", participation=_SCHEMA)
    return console_commands.call("mf-report", f"--checkpoint={path / 'checkpoint'}", *more)


@pytest.mark.long
def test_what_an_extension_costs() -> None:
    made = factorizations.blt(40, 2, _SCHEMA)
    found = Subject.of(made, _SCHEMA, _sums(40), 0.7).extension_fields(80, 1e-6)
    whole, planned = made.extended(80), factorizations.blt(80, 2, _SCHEMA)
    ratio = made.sensitivity(_SCHEMA).value / whole.sensitivity(_SCHEMA).value
    assert ratio < 0.8
    assert found["extended_noise_multiplier"] == pytest.approx(0.7 * ratio)
    assert found["extended_epsilon"] == pytest.approx(accounting.epsilon(0.7 * ratio, 1e-6))
    assert found["extended_rmse"] == pytest.approx(whole.rmse(_sums(80), _SCHEMA))
    assert found["planned_rmse"] == pytest.approx(planned.rmse(_sums(80), _SCHEMA))
    assert 1.0 <= found["extended_rmse_over_planned"] <= 1.03
    # Roundings of a model take of it, and without noise nothing is said of a guarantee.
    charged = Subject.of(made, _SCHEMA, _sums(40), 0.7).extension_fields(80, 1e-6, 10**7)
    assert charged["extended_epsilon"] > found["extended_epsilon"]
    assert (
        Subject.of(made, _SCHEMA, _sums(40)).extension_fields(80, 1e-6)["extended_epsilon"] is None
    )


def test_an_extension_in_two_steps_costs_what_one_does() -> None:
    made = factorizations.tree_aggregation(40)
    once = Subject.of(made, _SCHEMA, _sums(40), 0.7).extension_fields(80, 1e-6)
    whole = made.extended(60)
    by_now = 0.7 * made.sensitivity(_SCHEMA).value / whole.sensitivity(_SCHEMA).value
    twice = Subject.of(whole, _SCHEMA, _sums(60), by_now).extension_fields(80, 1e-6)
    assert twice["extended_epsilon"] == pytest.approx(once["extended_epsilon"])
    assert twice["extended_rmse_over_planned"] == pytest.approx(1.0)


def test_the_command_prints_it(tmp_path: pathlib.Path) -> None:
    ended = _report(factorizations.toeplitz(20), tmp_path, "--extend_to=30", "--noise_multiplier=1")
    assert ended.status == 0, ended.errors
    for name in ("extend_to", "extended_epsilon", "extended_rmse_over_planned"):
        assert name in ended.printed


@pytest.mark.parametrize(
    ("made", "rounds", "said"),
    [
        (factorizations.optimal(workloads.prefix_sum(8)), 12, "would be others"),
        (factorizations.identity(8), 8, "has 8 rounds already"),
        (factorizations.identity(8), 0, "--extend_to must be at least 1"),
    ],
)
def test_what_cannot_be_is_refused(
    made: Factorization, rounds: int, said: str, tmp_path: pathlib.Path
) -> None:
    ended = _report(made, tmp_path, f"--extend_to={rounds}")
    assert ended.status == 2
    assert ended.printed == ""
    assert said in ended.errors


def test_rates_of_rounds_that_are_not_there_are_asked_for() -> None:
    rates = workloads.describe(
        {"name": "momentum_sgd", "momentum": 0.9, "learning_rates": [1.0] * 8}, 8
    )
    made = factorizations.banded(rates, 2)
    with refuses("rate"):
        Subject.of(made, MinSeparation(2), rates, 1.0).extension_fields(12, 1e-6)
