"""The behaviour of devices and their server in a run, and its flags."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from absl import flags

from mf_aggregators.commands import command_line, facts_of_runs
from mf_aggregators.commands.command_line import FlagGroup
from mf_aggregators.kernel import numbers
from simulations import flag_fields
from simulations.devices.availability import Always, Availability, Diurnal, Independent, Trace
from simulations.flag_fields import flag

WAIT = "wait"
REJOIN = facts_of_runs.REJOIN
# The server's flags that may change when a run resumes. Noise and timers do not depend on them, and
# neither do the sums of rounds that were released: those have the cohorts of their own flags.
MAY_CHANGE = ("minimum_uploads", "over_selection", "retry_minutes", "max_attempts")
# Probabilities that must be below 1: otherwise no attempt at a round could succeed.
BELOW_ONE = (
    "dropout_probability",
    "upload_loss_probability",
    "late_upload_probability",
    "abandonment_probability",
)

_MINUTE = 60.0
_HOUR = 3600.0
_GROUP = "Devices"
# The longest time, in hours or minutes: its seconds fit into a float64 with room to spare.
_LONGEST = 1e12
_MODELS = {"always": Always, "independent": Independent, "diurnal": Diurnal}
_FLAGS_OF_MODELS: Mapping[str, tuple[str, ...]] = {
    **{name: tuple(flag_fields.fields_of(model)) for name, model in _MODELS.items()},
    "trace": ("trace", "trace_period_hours"),
}


@dataclasses.dataclass(frozen=True)
class DeviceBehaviour:
    """The behaviour of the devices of a population and of their server; by default, without faults.

    A device starts its timer when it uploads, whatever becomes of the upload. A round is closed
    before its end once all uploads that are needed are there.

    Attributes:
      availability: Which devices are available when.
      timer_hours: The hours that --timer=wall_clock waits. Required with it.
      over_selection: The number of devices selected for each upload that is needed. Fewer are
        selected, down to as many as are needed, where fewer are available.
      dropout_probability: The probability that a selected device gives up before it uploads: its
        timer does not start.
      upload_loss_probability: The probability that an upload does not arrive.
      late_upload_probability: The probability that an upload arrives after its round was closed: it
        is never summed.
      minimum_uploads: The number of uploads with which a round is closed at its end. With fewer, it
        is abandoned and started again. The sum is divided by --clients_per_round in any case.
        Default: --clients_per_round.
      abandonment_probability: The probability that the server abandons a round after its uploads
        were made, and starts it again. Nothing of the attempt is summed or released.
      history_loss_probability: The probability that a device forgets its participations, for each
        device and round.
      after_history_loss: Whether a device that forgot its participations assumes the worst (wait:
        it has just taken part, and as often as its timer allowed), or joins as if it were new
        (rejoin), which breaks its schema.
      broken_timers: The share of devices whose timers are broken: they check in as if they had
        never taken part. It is rounded to whole devices, and to one at least.
      round_minutes: The minutes that a round takes, after which devices upload.
      retry_minutes: The minutes that the server waits before it starts a round again that found too
        few devices or lost too many uploads.
      max_attempts: The most times that the server starts the same round.

    Raises:
      ValueError: If an attribute is out of its range.
    """

    availability: Availability = dataclasses.field(default_factory=Always)
    timer_hours: float | None = flag(_GROUP, None, is_positive=True, most=_LONGEST)
    over_selection: float = flag(_GROUP, 1.0, least=1.0)
    dropout_probability: float = flag(_GROUP, 0.0, least=0.0, below=1.0)
    upload_loss_probability: float = flag(_GROUP, 0.0, least=0.0, below=1.0)
    late_upload_probability: float = flag(_GROUP, 0.0, least=0.0, below=1.0)
    minimum_uploads: int | None = flag(_GROUP, None, is_positive=True)
    abandonment_probability: float = flag(_GROUP, 0.0, least=0.0, below=1.0)
    history_loss_probability: float = flag(_GROUP, 0.0, least=0.0, most=1.0)
    after_history_loss: str = flag(_GROUP, WAIT, choices=(WAIT, REJOIN))
    broken_timers: float = flag(_GROUP, 0.0, least=0.0, most=1.0)
    round_minutes: float = flag(_GROUP, 5.0, is_positive=True, most=_LONGEST)
    retry_minutes: float = flag(_GROUP, 10.0, is_positive=True, most=_LONGEST)
    max_attempts: int = flag(_GROUP, 1000, is_positive=True)

    def __post_init__(self) -> None:
        flag_fields.check(self)

    @property
    def round_seconds(self) -> float:
        """The time from the start of a round to its end."""
        return self.round_minutes * _MINUTE

    @property
    def retry_seconds(self) -> float:
        """The time from a start that failed to the next start of the same round."""
        return self.retry_minutes * _MINUTE

    @property
    def timer_seconds(self) -> float | None:
        """The time that timers by the wall clock wait; None for timers that count rounds."""
        return None if self.timer_hours is None else self.timer_hours * _HOUR

    @property
    def is_undisturbed(self) -> bool:
        """Whether a round depends on nothing but who took part in earlier ones."""
        without_effect = ("after_history_loss", "round_minutes", "retry_minutes", "max_attempts")
        own = {name: getattr(self, name) for name in without_effect}
        return self == DeviceBehaviour(**own)

    @property
    def forgets(self) -> bool:
        """Whether a device may join as if it had never taken part, against its timer."""
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
      availability: Which devices are available when: all at any time; each independently with one
        probability; at night by local time; or as a file says.
      trace: A file that says when each device is available, for --availability=trace: lines of
        device,start_seconds,end_seconds, or an .npz file with arrays of these names.
      trace_period_hours: The hours after which a --trace is repeated. Default: it is not, and ends.
    """
    texts, group = flag_fields.texts_of(define_flags), FlagGroup(values, _GROUP)
    group.choice("timer", ["rounds", "wall_clock"], texts["timer"], "rounds")
    flag_fields.define(values, DeviceBehaviour, [_GROUP])
    group.choice("availability", [*_FLAGS_OF_MODELS], texts["availability"], "always")
    for model in (Independent, Diurnal):
        flag_fields.define(values, model, [_GROUP], are_absent=True)
    group.path("trace", texts["trace"])
    group.number("trace_period_hours", texts["trace_period_hours"])


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
    given = {name: values[name].value for name in flag_fields.fields_of(DeviceBehaviour)}
    return DeviceBehaviour(_availability(values), **given)


def before_change(behaviour: DeviceBehaviour, old: Mapping[str, Any]) -> DeviceBehaviour:
    """Returns the behaviour before some flags were changed.

    Args:
      behaviour: The behaviour since.
      old: The values that flags had, by name; those that are not in ``MAY_CHANGE`` play no part.

    Raises:
      ValueError: If one is out of its range.
    """
    return dataclasses.replace(behaviour, **{name: old[name] for name in MAY_CHANGE if name in old})


def _availability(values: flags.FlagValues) -> Availability:
    model = values.availability
    for other, names in _FLAGS_OF_MODELS.items():
        for name in names:
            command_line.check_choice(
                other == model or values[name].value is None,
                f"--{name} belongs to --availability={other}.",
            )
    given = {
        name: values[name].value
        for name in _FLAGS_OF_MODELS[model]
        if values[name].value is not None
    }
    needed = {"independent": "available_probability", "trace": "trace"}.get(model)
    command_line.check_choice(
        needed is None or needed in given, f"--availability={model} needs --{needed}."
    )
    if model == "trace":
        period = values.trace_period_hours
        if period is not None:
            period = numbers.positive_number(period * _HOUR, "--trace_period_hours")
        return Trace.load(values.trace, period)
    for name, words in given.items():
        if isinstance(words, list):
            given[name] = _numbers(words)
    return _MODELS[model](**given)


def _numbers(words: list[str]) -> tuple[float, ...]:
    try:
        return tuple(float(word) for word in words)
    except ValueError:
        raise command_line.CommandError(
            f"--utc_offsets and --utc_weights take numbers with commas, found {','.join(words)}."
        ) from None
