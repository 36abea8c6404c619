"""The flags of a population of devices, and the behaviour that they describe."""

from absl import flags

from mf_aggregators.commands import command_line
from simulations import device_populations
from simulations.availability import Always, Availability, Diurnal, Independent, Trace
from simulations.device_populations import DeviceBehaviour
from simulations.participation_timers import WallClockTimer

_HOUR = 3600.0

# The flags of each availability model, and the attributes that they are.
_MODEL_FLAGS = {
    "always": {},
    "independent": {"available_probability": "probability"},
    "diurnal": {
        "utc_offsets": "utc_offsets",
        "utc_weights": "weights",
        "window_start_hour": "start_hour",
        "window_spread_hours": "start_spread_hours",
        "shortest_window_hours": "shortest_hours",
        "longest_window_hours": "longest_hours",
        "nightly_probability": "nightly_probability",
    },
    "trace": {"trace": "trace", "trace_period_hours": "period"},
}


def define(values: flags.FlagValues) -> None:
    """Defines the flags of a population of devices.

    Args:
      values: Where they are defined.
    """

    def integer(name: str, default: int | None, meaning: str) -> None:
        flags.DEFINE_integer(name, default, meaning, flag_values=values)

    def number(name: str, default: float | None, meaning: str) -> None:
        flags.DEFINE_float(name, default, meaning, flag_values=values)

    def choice(name: str, default: str, choices: list[str], meaning: str) -> None:
        flags.DEFINE_enum(name, default, choices, meaning, flag_values=values)

    choice(
        "timer",
        "rounds",
        ["rounds", "wall_clock"],
        "What the devices' timers count: rounds, which enforces --separation; or hours, from "
        "which a separation follows.",
    )
    number("timer_hours", None, "The time of --timer=wall_clock.")
    choice("availability", "always", list(_MODEL_FLAGS), "Which devices are available when.")
    number("available_probability", None, "independent: each device's, at any time.")
    flags.DEFINE_list(
        "utc_offsets", None, "diurnal: local time less UTC, in hours.", flag_values=values
    )
    flags.DEFINE_list(
        "utc_weights", None, "diurnal: the share of devices at each offset.", flag_values=values
    )
    number("window_start_hour", None, "diurnal: the mean local hour at which windows start.")
    number("window_spread_hours", None, "diurnal: how far a device's start may be from it.")
    number("shortest_window_hours", None, "diurnal: the shortest window of a device.")
    number("longest_window_hours", None, "diurnal: the longest window of a device.")
    number("nightly_probability", None, "diurnal: that a device is on charge in a night.")
    flags.DEFINE_string(
        "trace",
        None,
        "trace: a file of device,start_seconds,end_seconds lines, or .npz arrays of these names.",
        flag_values=values,
    )
    number("trace_period_hours", None, "trace: repeats it; default: it ends.")
    number("over_selection", 1.0, "Devices selected for each upload that is needed.")
    number("dropout_probability", 0.0, "That a device gives up before it uploads.")
    number("upload_loss_probability", 0.0, "That an upload does not arrive.")
    number("history_loss_probability", 0.0, "That a device forgets, per device and round.")
    choice(
        "after_history_loss",
        device_populations.WAIT,
        [device_populations.WAIT, device_populations.REJOIN],
        "Whether a device without history assumes the worst, or joins as if it were new.",
    )
    number("round_minutes", 5.0, "How long a round takes.")
    number("retry_minutes", 10.0, "How long the server waits before it starts a round again.")
    integer("max_attempts", 1000, "How often the server starts the same round.")


def behaviour(values: flags.FlagValues) -> DeviceBehaviour:
    """Returns the behaviour of devices that flags describe.

    Args:
      values: The flags as they were given.

    Returns:
      The behaviour.

    Raises:
      CommandError: If flags do not fit together.
      ValueError: If one is out of its range, or a trace cannot be read.
    """
    command_line.check_choice(
        (values.timer == "rounds") == (values.timer_hours is None),
        "--timer_hours belongs to --timer=wall_clock, which needs it.",
    )
    return DeviceBehaviour(
        availability=_availability(values),
        timer=(None if values.timer_hours is None else WallClockTimer(values.timer_hours * _HOUR)),
        over_selection=values.over_selection,
        dropout_probability=values.dropout_probability,
        upload_loss_probability=values.upload_loss_probability,
        history_loss_probability=values.history_loss_probability,
        after_history_loss=values.after_history_loss,
        round_seconds=values.round_minutes * 60.0,
        retry_seconds=values.retry_minutes * 60.0,
        max_attempts=values.max_attempts,
    )


def _availability(values: flags.FlagValues) -> Availability:
    model = values.availability
    for other, names in _MODEL_FLAGS.items():
        for name in names:
            command_line.check_choice(
                other == model or getattr(values, name) is None,
                f"--{name} belongs to --availability={other}.",
            )
    given = {
        attribute: getattr(values, name)
        for name, attribute in _MODEL_FLAGS[model].items()
        if getattr(values, name) is not None
    }
    if model == "independent":
        command_line.check_choice(
            bool(given), "--availability=independent needs --available_probability."
        )
        return Independent(**given)
    if model == "diurnal":
        for attribute in ("utc_offsets", "weights"):
            if attribute in given:
                given[attribute] = _numbers(given[attribute])
        return Diurnal(**given)
    if model == "trace":
        command_line.check_choice("trace" in given, "--availability=trace needs --trace, a file.")
        period = given.get("period")
        return Trace.load(given["trace"], None if period is None else period * _HOUR)
    return Always()


def _numbers(texts: list[str]) -> tuple[float, ...]:
    try:
        return tuple(float(text) for text in texts)
    except ValueError:
        raise command_line.CommandError(
            f"--utc_offsets and --utc_weights take numbers with commas, found {','.join(texts)}."
        ) from None
