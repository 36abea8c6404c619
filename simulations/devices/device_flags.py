"""The flags of a population of devices, and the behaviour that they describe."""

from absl import flags

from mf_aggregators.commands import command_line
from mf_aggregators.commands.flag_groups import FlagGroup
from simulations.devices import device_populations
from simulations.devices.availability import Always, Availability, Diurnal, Independent, Trace
from simulations.devices.device_populations import DeviceBehaviour
from simulations.devices.participation_timers import WallClockTimer

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
    group = FlagGroup(values, "Devices", _diurnal_defaults())
    group.choice(
        "timer",
        ["rounds", "wall_clock"],
        "What the devices' timers count: rounds, which enforces --separation; or hours, from "
        "which a separation follows.",
        "rounds",
    )
    group.number("timer_hours", "The hours that --timer=wall_clock waits. Required with it.")
    group.choice(
        "availability",
        list(_MODEL_FLAGS),
        "Which devices are available when: all at any time; each independently with one "
        "probability; at night by local time; or as a file says.",
        "always",
    )
    group.number(
        "available_probability",
        "The probability that a device is available, for --availability=independent.",
    )
    group.number(
        "over_selection", "The number of devices selected for each upload that is needed.", 1.0
    )
    group.number(
        "dropout_probability",
        "The probability that a selected device gives up before it uploads.",
        0.0,
    )
    group.number("upload_loss_probability", "The probability that an upload does not arrive.", 0.0)
    group.number(
        "history_loss_probability",
        "The probability that a device forgets its participations, for each device and round.",
        0.0,
    )
    group.choice(
        "after_history_loss",
        [device_populations.WAIT, device_populations.REJOIN],
        "Whether a device that forgot its participations assumes the worst, or joins as if it "
        "were new.",
        device_populations.WAIT,
    )
    group.number("round_minutes", "The minutes that a round takes.", 5.0)
    group.number(
        "retry_minutes", "The minutes that the server waits before it starts a round again.", 10.0
    )
    group.integer("max_attempts", "The most times that the server starts the same round.", 1000)
    group.words(
        "utc_offsets",
        "Local time less UTC in each time zone, in hours, for --availability=diurnal.",
    )
    group.words(
        "utc_weights",
        "The share of devices in each time zone, for --availability=diurnal. Default: the same.",
    )
    group.number(
        "window_start_hour",
        "The mean local hour at which a device's window starts, for --availability=diurnal.",
    )
    group.number(
        "window_spread_hours",
        "The most hours between a device's start and the mean one, for --availability=diurnal.",
    )
    group.number(
        "shortest_window_hours",
        "The hours of the shortest window of a device, for --availability=diurnal.",
    )
    group.number(
        "longest_window_hours",
        "The hours of the longest window of a device, for --availability=diurnal.",
    )
    group.number(
        "nightly_probability",
        "The probability that a device is on charge in a night, for --availability=diurnal.",
    )
    group.path(
        "trace",
        "A file that says when each device is available, for --availability=trace: lines of "
        "device,start_seconds,end_seconds, or an .npz file with arrays of these names.",
    )
    group.number(
        "trace_period_hours",
        "The hours after which a --trace is repeated. Default: it is not, and ends.",
    )


def _diurnal_defaults() -> dict[str, str]:
    """What ``--help`` says of defaults that are the model's."""
    model = Diurnal()
    texts = {}
    for name, attribute in _MODEL_FLAGS["diurnal"].items():
        default = getattr(model, attribute)
        if default is not None:
            numbers = default if isinstance(default, tuple) else (default,)
            texts[name] = f"Default: {','.join(f'{number:g}' for number in numbers)}."
    return texts


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
