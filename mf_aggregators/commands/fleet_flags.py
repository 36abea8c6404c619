"""Flags of a fleet of devices, and the schema that it survives."""

import dataclasses
import math
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
    "spread",
    "timer_hours",
    "round_minutes",
    "peak_hours",
)
# The largest number of pairs that are printed.
_MOST_PRINTED = 8
# The characters of the longest bar beside them.
_WIDTH_OF_NOISE = 30


@dataclasses.dataclass(frozen=True)
class FleetPlan:
    """A schema for a fleet, with its margins and the pairs that were weighed.

    Attributes:
      participation: The schema.
      fleet: The devices; None if there are too many to simulate.
      fields: For the JSON object of a command.
      lines: For a reader.
    """

    participation: MinSeparation
    fleet: Fleet | None
    fields: dict[str, Any]
    lines: list[str]


def define(values: flags.FlagValues) -> None:
    """Defines the flags of a fleet."""
    group = FlagGroup(values, "Fleet")
    group.number(
        "dropout",
        "The probability that a selected device does not upload. The plan looks for a separation "
        "and a number of participations with which simulated fleets come to the last round. "
        f"Default: {fleets.DROPOUT:g}.",
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
        "spread",
        "The standard deviation of dropouts and of available devices between rounds, over their "
        f"mean. Default: {Fleet.spread:g}.",
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
    """Returns the schema of a plan for devices with timers; None where clients are drawn.

    Without flags of a fleet, a tenth of the devices drops out. If no separation survives that, the
    schema is the one that the population can just fill, and a line says so.

    Raises:
      CommandError: If the fleet of flags survives no schema, or not the one that other flags name.
    """
    given = {name: values[name].value for name in _NAMES if values[name].value is not None}
    if values.sampling is not None:
        command_line.check_choice(
            not given,
            f"--{next(iter(given), '')} is for devices with timers alone: leave --sampling out.",
        )
        return None
    most = values.max_participations
    # The devices have to fill an extension as well.
    rounds = max(values.num_rounds, values.may_extend_to or 0)
    full = min(values.num_rounds, values.population // values.clients_per_round)
    typed = MinSeparation(full if values.separation is None else values.separation, most)
    fleet, starves = None, ""
    pairs: tuple[fleets.Pair, ...] = ()
    try:
        fleet = Fleet(values.population, values.clients_per_round, **given)
        if values.separation is None or not fleets.survives(fleet, rounds, typed):
            pairs = fleets.choose(
                fleet,
                values.num_rounds,
                max_participations=most,
                may_extend_to=values.may_extend_to,
            )
    except ValueError as error:
        starves = str(error)
    if fleet is not None and pairs and values.separation is not None:
        best = pairs[0].participation
        starves = (
            f"--separation={values.separation} starves simulated fleets with "
            f"{100 * fleet.dropout:g} % dropouts: {best} survive."
        )
    command_line.check_choice(not starves or not given, starves)
    chosen = pairs[0].participation if pairs and values.separation is None else typed
    fields: dict[str, Any] = {
        "separation": chosen.separation,
        "max_participations": chosen.max_participations,
        "is_assumed": not given,
        "starves": starves or None,
        "pairs": [
            {
                "separation": pair.participation.separation,
                "max_participations": pair.participation.max_participations,
                "noise": pair.noise / pairs[0].noise,
            }
            for pair in pairs
        ],
    }
    if fleet is None or starves:
        return FleetPlan(chosen, fleet, fields, [f"WARNING: {starves}"])
    margins = fleets.margins(fleet, rounds, chosen)
    fields |= {
        "over_selection": fleet.selected_per_upload,
        "dropout": fleet.dropout,
        "margins": dataclasses.asdict(margins),
    }
    return FleetPlan(chosen, fleet, fields, _lines(fleet, fields, margins))


def _lines(fleet: Fleet, fields: dict[str, Any], margins: fleets.Margins) -> list[str]:
    lines = [
        f"{100 * fleet.dropout:g} % dropouts{' (--dropout)' if fields['is_assumed'] else ''}, "
        f"{fleet.selected} devices selected a round (--over_selection="
        f"{fields['over_selection']:g}); all simulated fleets came to the last round",
        f"in simulations it just survives with {margins.population} devices, or with "
        f"{100 * margins.dropout:.3g} % dropouts",
    ]
    if margins.longest_minutes is not None:
        # A rounded number would be too long.
        longest, pause = (
            math.floor(10.0 * (each or 0.0)) / 10.0
            for each in (margins.longest_minutes, margins.pause_hours)
        )
        lines.append(
            f"participations come closer if rounds take more than {longest:g} "
            f"minutes, or pause for more than {pause:g} hours; if they take "
            f"less than {margins.shortest_minutes:.2g}, half of the attempts find too few devices"
        )
    printed = fields["pairs"][:_MOST_PRINTED]
    most_noise = max((pair["noise"] for pair in printed), default=1.0)
    for pair in printed:
        most = pair["max_participations"]
        limit = "no limit" if most is None else f"at most {counted(most, 'participation')}"
        bar = "#" * round(_WIDTH_OF_NOISE * pair["noise"] / most_noise)
        lines.append(
            f"  {pair['separation']:>6} apart, {limit}: {pair['noise']:.3f} of the noise {bar}"
        )
    return lines
