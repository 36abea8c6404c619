"""mf-plan for a fleet of devices: the schema it finds, and what it refuses."""

import pytest

from mf_aggregators import planning
from mf_aggregators.participation import MinSeparation
from mf_aggregators.planning.fleets import Fleet
from tests import console_commands

_PLAN = (
    "--num_rounds=60",
    "--population=300",
    "--clients_per_round=12",
    "--target_epsilon=8",
    "--delta=1e-4",
    "--mechanisms=identity",
)


def test_a_plan_has_the_schema_that_its_fleet_survives() -> None:
    found = console_commands.call(
        "mf-plan", *_PLAN, "--dropout=0.2", "--over_selection=1.4", "--format=json"
    ).fields()
    fleet = found["fleet"]
    schema = MinSeparation(fleet["separation"], fleet["max_participations"])

    assert found["participation"] == str(schema)
    assert Fleet(300, 12, 0.2, 1.4).survives(60, schema)
    assert found["commands"][1].endswith(" --dropout_probability=0.2 --over_selection=1.4")
    # Without slack, 25 apart is the most.
    assert schema.separation < 25
    assert fleet["pairs"][0]["noise"] == 1.0
    assert fleet["margins"]["population"] <= 300


def test_a_plan_keeps_slack_for_dropouts_by_default() -> None:
    fields = console_commands.call("mf-plan", *_PLAN, "--format=json").fields()
    fleet, said = fields["fleet"], console_commands.call("mf-plan", *_PLAN).printed

    assert "10 % dropouts" in said
    assert fleet["is_assumed"]
    assert fleet["dropout"] == 0.1
    schema = MinSeparation(fleet["separation"], fleet["max_participations"])
    assert Fleet(300, 12).survives(60, schema)
    setting = planning.Setting(60, 300, 12, None, None, 8.0, 1e-4, 1000, fleet=Fleet(300, 12))
    assert setting.participation == schema


def test_a_separation_stays_what_was_typed_and_is_warned_of() -> None:
    text = console_commands.call("mf-plan", *_PLAN, "--separation=25").done()
    assert "at least 25 rounds apart" in text
    assert "WARNING: with --separation=25, simulated fleets with 10 % dropouts" in text
    assert "WARNING" not in console_commands.call("mf-plan", *_PLAN, "--separation=2").done()
    text = console_commands.call("mf-plan", *_PLAN, "--population=13").done()
    assert "WARNING: no separation leaves" in text


def test_hours_are_planned_with_what_breaks_them() -> None:
    hours = ("--timer_hours=2", "--round_minutes=12", "--dropout=0")
    assert "rounds take more than" in console_commands.call("mf-plan", *_PLAN, *hours).done()


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (("--dropout=0.2", "--over_selection=1.4", "--separation=24"), "survive"),
        (("--dropout=0.1", "--sampling=poisson"), "leave out --sampling"),
        (("--timer_hours=24",), "go together"),
        (("--dropout=1.5",), "dropout"),
        (("--dropout=0.99999999",), "select at most"),
        (("--dropout=0.5", "--over_selection=1.0"), "an over-selection of 4"),
    ],
)
def test_what_starves_is_refused(given: tuple[str, ...], why: str) -> None:
    console_commands.call("mf-plan", *_PLAN, *given).refused(why)
