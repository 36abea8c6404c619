"""Flags of a fleet of devices, and the schema that it survives."""

import dataclasses
from typing import Any

from absl import flags

from mf_aggregators.commands import command_line
from mf_aggregators.commands.command_line import FlagGroup
from mf_aggregators.kernel.numbers import counted
from mf_aggregators.participation import MinSeparation
from mf_aggregators.planning import fleets
from mf_aggregators.planning.fleets import Fleet

_NAMES = (
    "dropout",
    "over_selection",
    "returning",
    "timer_hours",
    "round_minutes",
    "peak_hours",
)
# The largest number of pairs that are printed.
_MOST_PRINTED = 6


@dataclasses.dataclass(frozen=True)
class FleetPlan:
    """A schema for a fleet, with its margins and the pairs that were weighed.

    Attributes:
      participation: The schema.
      fields: For the JSON object of a command.
      lines: For a reader.
    """

    participation: MinSeparation
    fields: dict[str, Any]
    lines: list[str]


def define(values: flags.FlagValues) -> None:
    """Defines the flags of a fleet."""
    group = FlagGroup(values, "Fleet")
    group.number(
        "dropout",
        "The probability that a selected device does not upload. With one of these flags, the "
        "plan looks for a separation and a number of participations with which simulated fleets "
        f"come to the last round. Default with another one of them: {fleets.DROPOUT:g}.",
    )
    group.number(
        "over_selection",
        "The number of devices selected for each upload that is needed, at least 1. Default: the "
        "one with which the fewest timers start for each round.",
    )
    group.number(
        "returning",
        "The probability that a device whose timer has run out is available in a round. Default: "
        "1.",
    )
    group.number(
        "timer_hours", "The hours that timers count. Default: timers count rounds. Needs the next."
    )
    group.number("round_minutes", "The minutes of a round, for --timer_hours.")
    group.number(
        "peak_hours",
        "The hours of each day in which rounds take place, for --timer_hours. Default: 24.",
    )


def plan_for(values: flags.FlagValues) -> FleetPlan | None:
    """Returns the schema that the fleet of some flags survives; None where none is given.

    Raises:
      CommandError: If the fleet survives no schema, or not the one that other flags name.
    """
    given = {name: values[name].value for name in _NAMES if values[name].value is not None}
    if not given:
        return None
    command_line.check_choice(
        values.sampling is None,
        f"--{next(iter(given))} is for devices with timers alone: leave --sampling out.",
    )
    # The devices have to fill an extension as well.
    num_rounds = max(values.num_rounds, values.may_extend_to or 0)
    try:
        fleet = Fleet(values.population, values.clients_per_round, **given)
        pairs = fleets.choose(fleet, num_rounds, max_participations=values.max_participations)
    except ValueError as error:
        raise command_line.CommandError(str(error)) from None
    chosen = pairs[0].participation
    if values.separation is not None:
        best, chosen = chosen, MinSeparation(values.separation, values.max_participations)
        command_line.check_choice(
            fleets.survives(fleet, num_rounds, chosen),
            f"--separation={values.separation} starves simulated fleets: {best} survive.",
        )
    margins = fleets.margins(fleet, num_rounds, chosen)
    fields = {
        "separation": chosen.separation,
        "max_participations": chosen.max_participations,
        "over_selection": fleet.selected_per_upload,
        "dropout": fleet.dropout,
        "margins": dataclasses.asdict(margins),
        "pairs": [
            {
                "separation": pair.participation.separation,
                "max_participations": pair.participation.max_participations,
                "noise": pair.noise / pairs[0].noise,
            }
            for pair in pairs
        ],
    }
    return FleetPlan(chosen, fields, _lines(fleet, fields, margins))


def _lines(fleet: Fleet, fields: dict[str, Any], margins: fleets.Margins) -> list[str]:
    lines = [
        f"{100 * fleet.dropout:g} % dropouts, {fleet.selected} devices selected a round "
        f"(--over_selection={fields['over_selection']:g}); all simulated fleets came to the last "
        "round",
        f"in simulations it just survives with {margins.population} devices, or with "
        f"{100 * margins.dropout:.3g} % dropouts",
    ]
    if margins.longest_minutes is not None:
        lines.append(
            f"participations come closer if rounds take more than {margins.longest_minutes:.3g} "
            f"minutes, or pause for more than {margins.pause_hours:.2g} hours; rounds below "
            f"{margins.shortest_minutes:.2g} minutes starve"
        )
    for pair in fields["pairs"][:_MOST_PRINTED]:
        most = pair["max_participations"]
        limit = "no limit" if most is None else f"at most {counted(most, 'participation')}"
        lines.append(f"  {pair['separation']:>6} apart, {limit}: {pair['noise']:.3f} of the noise")
    return lines
