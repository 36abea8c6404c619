"""What devices and their server do in a run, and its flags: who checks in, what gets lost."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

from absl import flags

from mf_aggregators.commands import command_line, facts_of_runs
from mf_aggregators.commands.flag_groups import FlagGroup
from mf_aggregators.kernel import numbers
from simulations import flag_texts
from simulations.devices.availability import Always, Availability, Diurnal, Independent, Trace

WAIT = "wait"
# The server's flags that may change when a run resumes. Noise and timers do not depend on them, and
# neither do the sums of rounds that were released: those have the cohorts of their own flags.
MAY_CHANGE = ("minimum_uploads", "over_selection", "retry_minutes", "max_attempts")
REJOIN = facts_of_runs.REJOIN

_MINUTE = 60.0
_HOUR = 3600.0

# Probabilities that must be below 1: otherwise no attempt at a round could succeed.
BELOW_ONE = (
    "dropout_probability",
    "upload_loss_probability",
    "late_upload_probability",
    "abandonment_probability",
)

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

_MODELS: Mapping[str, Callable[..., Availability]] = {
    "always": Always,
    "independent": Independent,
    "diurnal": Diurnal,
}


@dataclasses.dataclass(frozen=True)
class WallClockTimer:
    """A timer by the device's clock: no participation within a time after an upload.

    Attributes:
      seconds: The time, above zero.

    Raises:
      ValueError: If the time is out of its range.
    """

    seconds: float

    def __post_init__(self) -> None:
        numbers.positive_number(self.seconds, "the seconds of a timer")


@dataclasses.dataclass(frozen=True)
class DeviceBehaviour:
    """What the devices of a population and their server do. By default, nothing goes wrong.

    Attributes:
      availability: Which devices are available when.
      timer: None for timers by rounds, which enforce the participation schema; or a timer
        by the wall clock, which enforces the schema's number of participations, and in
        place of its separation a time.
      over_selection: How many devices are selected for each whose upload is needed, at
        least 1. Fewer are, down to as many as are needed, where fewer are available.
      dropout_probability: Probability that a selected device gives up before it uploads: its
        timer is not started.
      upload_loss_probability: Probability that an upload does not arrive: its device's timer runs.
      late_upload_probability: Probability that an upload that arrives does so after its round was
        closed. It is summed in no round: its token was for this one. Its device's timer runs.
      minimum_uploads: The fewest uploads in time, at least 1, with which a round is closed at its
        end; None for all that are needed. With fewer, the attempt is abandoned. A round is closed
        before its end once all that are needed are there.
      abandonment_probability: Probability that the server abandons an attempt at a round whose
        uploads were made: because it restarts, for example. Nothing of the attempt is summed or
        released, and the timers of its devices run.
      history_loss_probability: Probability that a device forgets, before a round, when and
        how often it took part. Independent for each device and round.
      after_history_loss: ``"wait"``: a device without history assumes the worst that its
        timer would have allowed, which is that it has only just taken part, and as often as
        was possible, and so never breaks its schema. ``"rejoin"``: it joins as if it were
        new, and breaks it.
      broken_timers: The share of the devices whose timers are broken, at most 1: such a device
        forgets every participation at once, and joins as if it had never taken part. Of a
        population it is rounded to whole devices, and to one at least.
      round_seconds: Time from the start of a round to its end, when devices upload and the next
        round starts.
      retry_seconds: How long the server waits, after a start that found too few devices or
        lost too many of their uploads, before it starts the same round again.
      max_attempts: How often it starts the same round.

    Raises:
      ValueError: If an attribute is out of its range.
    """

    availability: Availability = dataclasses.field(default_factory=Always)
    timer: WallClockTimer | None = None
    over_selection: float = 1.0
    dropout_probability: float = 0.0
    upload_loss_probability: float = 0.0
    late_upload_probability: float = 0.0
    minimum_uploads: int | None = None
    abandonment_probability: float = 0.0
    history_loss_probability: float = 0.0
    after_history_loss: str = WAIT
    broken_timers: float = 0.0
    round_seconds: float = 300.0
    retry_seconds: float = 600.0
    max_attempts: int = 1000

    def __post_init__(self) -> None:
        if numbers.finite_number(self.over_selection, "over_selection") < 1.0:
            raise ValueError(f"over_selection must be at least 1, found {self.over_selection}.")
        for name in BELOW_ONE:
            if numbers.non_negative_number(getattr(self, name), name) >= 1.0:
                raise ValueError(f"{name} must be below 1, found {getattr(self, name)}.")
        if self.minimum_uploads is not None:
            numbers.positive_integer(self.minimum_uploads, "minimum_uploads")
        for name in ("history_loss_probability", "broken_timers"):
            if numbers.non_negative_number(getattr(self, name), name) > 1.0:
                raise ValueError(f"{name} must be at most 1, found {getattr(self, name)}.")
        if self.after_history_loss not in (WAIT, REJOIN):
            raise ValueError(
                f"after_history_loss must be {WAIT!r} or {REJOIN!r}, found "
                f"{self.after_history_loss!r}."
            )
        for name in ("round_seconds", "retry_seconds"):
            numbers.positive_number(getattr(self, name), name)
        numbers.positive_integer(self.max_attempts, "max_attempts")

    @property
    def is_undisturbed(self) -> bool:
        """Whether a round depends on nothing but who took part in earlier ones."""
        return (
            self.availability.is_always
            and self.timer is None
            and self.over_selection == 1.0
            and self.minimum_uploads is None
            and all(getattr(self, name) == 0.0 for name in BELOW_ONE)
            and self.history_loss_probability == 0.0
            and self.broken_timers == 0.0
        )

    @property
    def forgets(self) -> bool:
        """Whether a device may join as if it had never taken part, whatever its timer counts."""
        return facts_of_runs.forgets(vars(self))

    def fewest_uploads(self, clients_per_round: int) -> int:
        """Returns the fewest uploads with which a round is summed.

        Args:
          clients_per_round: How many uploads a round needs, and sums at most.

        Raises:
          ValueError: If ``minimum_uploads`` is above it.
        """
        if self.minimum_uploads is None:
            return clients_per_round
        if self.minimum_uploads > clients_per_round:
            raise ValueError(
                f"minimum_uploads={self.minimum_uploads} is above the {clients_per_round} clients "
                "per round, with which a round is closed."
            )
        return self.minimum_uploads


def define_flags(values: flags.FlagValues) -> None:
    """Defines the flags of a population of devices.

    Flags:
      timer: What the devices' timers count: rounds, which enforces --separation; or hours, from
        which a separation follows.
      timer_hours: The hours that --timer=wall_clock waits. Required with it.
      availability: Which devices are available when: all at any time; each independently with one
        probability; at night by local time; or as a file says.
      available_probability: The probability that a device is available, for
        --availability=independent.
      over_selection: The number of devices selected for each upload that is needed.
      dropout_probability: The probability that a selected device gives up before it uploads.
      upload_loss_probability: The probability that an upload does not arrive.
      late_upload_probability: The probability that an upload arrives after its round was closed: it
        is never summed.
      minimum_uploads: The number of uploads with which a round is closed at its end. With fewer, it
        is abandoned and started again. The sum is divided by --clients_per_round in any case.
        Default: --clients_per_round.
      abandonment_probability: The probability that the server abandons a round after its uploads
        were made, and starts it again.
      history_loss_probability: The probability that a device forgets its participations, for each
        device and round.
      after_history_loss: Whether a device that forgot its participations assumes the worst, or
        joins as if it were new.
      broken_timers: The share of devices whose timers are broken: they check in as if they had
        never taken part.
      round_minutes: The minutes that a round takes.
      retry_minutes: The minutes that the server waits before it starts a round again.
      max_attempts: The most times that the server starts the same round.
      utc_offsets: Local time less UTC in each time zone, in hours, for --availability=diurnal.
      utc_weights: The share of devices in each time zone, for --availability=diurnal. Default: the
        same.
      window_start_hour: The mean local hour at which a device's window starts, for
        --availability=diurnal.
      window_spread_hours: The most hours between a device's start and the mean one, for
        --availability=diurnal.
      shortest_window_hours: The hours of the shortest window of a device, for
        --availability=diurnal.
      longest_window_hours: The hours of the longest window of a device, for --availability=diurnal.
      nightly_probability: The probability that a device is on charge in a night, for
        --availability=diurnal.
      trace: A file that says when each device is available, for --availability=trace: lines of
        device,start_seconds,end_seconds, or an .npz file with arrays of these names.
      trace_period_hours: The hours after which a --trace is repeated. Default: it is not, and ends.
    """
    texts = flag_texts.of(define_flags)
    group = FlagGroup(values, "Devices", _diurnal_defaults())
    choices = {
        "timer": ["rounds", "wall_clock"],
        "availability": list(_MODEL_FLAGS),
        "after_history_loss": [WAIT, REJOIN],
    }
    integers = {"minimum_uploads": None, "max_attempts": 1000}
    defaults = {
        "over_selection": 1.0,
        **dict.fromkeys((*BELOW_ONE, "history_loss_probability", "broken_timers"), 0.0),
        "round_minutes": 5.0,
        "retry_minutes": 10.0,
    }
    for name, text in texts.items():
        if name in choices:
            group.choice(name, choices[name], text, choices[name][0])
        elif name in integers:
            group.integer(name, text, integers[name])
        elif name in ("utc_offsets", "utc_weights"):
            group.words(name, text)
        elif name == "trace":
            group.path(name, text)
        else:
            group.number(name, text, defaults.get(name))


def _diurnal_defaults() -> dict[str, str]:
    """What ``--help`` says of the defaults of the diurnal model."""
    model = Diurnal()
    texts = {}
    for name, attribute in _MODEL_FLAGS["diurnal"].items():
        default = getattr(model, attribute)
        if default is not None:
            values = default if isinstance(default, tuple) else (default,)
            texts[name] = f"Default: {','.join(f'{number:g}' for number in values)}."
    return texts


def of_flags(values: flags.FlagValues) -> DeviceBehaviour:
    """Returns the behaviour of devices that flags describe.

    Raises:
      CommandError: If flags do not fit together.
      ValueError: If one is out of its range, or a trace cannot be read.
    """
    command_line.check_choice(
        (values.timer == "rounds") == (values.timer_hours is None),
        "--timer_hours belongs to --timer=wall_clock, which needs it.",
    )
    command_line.check_choice(
        values.after_history_loss == WAIT or values.history_loss_probability > 0.0,
        f"--after_history_loss={REJOIN} belongs to --history_loss_probability: give it as well.",
    )
    timer = None
    if values.timer_hours is not None:
        timer = WallClockTimer(_seconds(values, "timer_hours", _HOUR))
    same = {
        field.name: values[field.name].value
        for field in dataclasses.fields(DeviceBehaviour)
        if field.name in values and field.name not in ("timer", "availability")
    }
    return DeviceBehaviour(
        **same,
        availability=_availability(values),
        timer=timer,
        round_seconds=_seconds(values, "round_minutes", _MINUTE),
        retry_seconds=_seconds(values, "retry_minutes", _MINUTE),
    )


def before_change(behaviour: DeviceBehaviour, old: Mapping[str, Any]) -> DeviceBehaviour:
    """Returns the behaviour before some flags were changed.

    Args:
      behaviour: The behaviour since.
      old: The values that flags had, by name; those that are not in ``MAY_CHANGE`` play no part.

    Raises:
      ValueError: If one is out of its range.
    """
    found = {name: old[name] for name in MAY_CHANGE if name in old}
    if "retry_minutes" in found:
        minutes = numbers.positive_number(found.pop("retry_minutes"), "retry_minutes")
        found["retry_seconds"] = minutes * _MINUTE
    return dataclasses.replace(behaviour, **found)


def _seconds(values: flags.FlagValues, flag: str, unit: float) -> float:
    """The seconds of a flag that takes hours or minutes."""
    return numbers.positive_number(values[flag].value * unit, f"--{flag}")


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
    needed = {"independent": "available_probability", "trace": "trace"}.get(model)
    command_line.check_choice(
        needed is None or getattr(values, needed) is not None,
        f"--availability={model} needs --{needed}.",
    )
    if model == "trace":
        period = None
        if values.trace_period_hours is not None:
            period = _seconds(values, "trace_period_hours", _HOUR)
        return Trace.load(given["trace"], period)
    for attribute in ("utc_offsets", "weights"):
        if attribute in given:
            given[attribute] = _numbers(given[attribute])
    return _of_model(_MODELS[model], model, given)


def _of_model(
    kind: Callable[..., Availability], model: str, given: Mapping[str, Any]
) -> Availability:
    """A model of availability, or a refusal in which its attributes are the flags."""
    try:
        return kind(**given)
    except ValueError as error:
        message = str(error)
        for flag, attribute in _MODEL_FLAGS[model].items():
            message = re.sub(rf"\b{attribute}\b", f"--{flag}", message)
        raise command_line.CommandError(message) from None


def _numbers(texts: list[str]) -> tuple[float, ...]:
    try:
        return tuple(float(text) for text in texts)
    except ValueError:
        raise command_line.CommandError(
            f"--utc_offsets and --utc_weights take numbers with commas, found {','.join(texts)}."
        ) from None
