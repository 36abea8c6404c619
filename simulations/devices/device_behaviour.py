"""The behaviour of devices and their server in a run, its flags, and which devices are available.

A production server meets only those devices that are idle, on charge and on a free network just
then (Bonawitz et al. 2019, Towards Federated Learning at Scale). The models of availability say
which of the devices that are asked about are available.

Each model is a function of (seed, device, time) and keeps no memory: asking about a few thousand
of ten million devices draws nothing for the others, and a resumed run finds the same devices.
Randomness is a counter-based hash, the finaliser of SplitMix64 (Steele, Lea and Flood 2014) at a
device's number. It is fast and passes statistical tests, and it is no cryptography: draw nothing
with it that privacy rests on.
"""

import abc
import dataclasses
import math
import os
import pathlib
from collections.abc import Mapping
from typing import ClassVar

import numpy as np
from absl import flags

from mf_aggregators.commands import command_line, stated_runs
from mf_aggregators.commands.command_line import FlagGroup
from mf_aggregators.kernel import numbers
from mf_aggregators.kernel.numbers import Error
from mf_aggregators.participation import Sampler
from simulations import flag_fields
from simulations.flag_fields import flag

_MINUTE, _HOUR, _DAY = 60.0, 3600.0, 86400.0
# The title of the flags of devices in --help.
_GROUP = "Devices"

# Constants of the SplitMix64 generator: the step between states, and two factors of its finaliser.
_STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST_FACTOR = np.uint64(0xBF58476D1CE4E5B9)
_SECOND_FACTOR = np.uint64(0x94D049BB133111EB)

# Purposes for :func:`uniform`: random numbers of two purposes are independent of each other.
_INDEPENDENT = 0
_ZONE = 1
_WINDOW_START = 2
_WINDOW_LENGTH = 3
_NIGHT = 4

# The largest device number in a trace: a Trace keeps one byte for each device up to its largest.
_LARGEST_DEVICE = 10**8

_COLUMNS = ("device", "start_seconds", "end_seconds")


class TraceError(Error, ValueError):
    """A trace that cannot be read; the message names the file and the reason."""


class Availability(abc.ABC):
    """Which devices are available when."""

    is_always: ClassVar[bool] = False
    """Whether every device is available at any time."""

    @abc.abstractmethod
    def available(
        self, devices: np.ndarray, seconds: float, round_index: int, seed: int
    ) -> np.ndarray:
        """Returns which of some devices are available at a moment.

        Args:
          devices: (m,) int64: numbers of devices, from 0; any order, repeats allowed.
          seconds: The moment, in seconds since the first round began.
          round_index: The round that asks, from 0.
          seed: The seed of the population; any non-negative integer.

        Returns:
          (m,) bool.
        """

    def is_possible(self, seconds: float) -> bool:
        """Returns False if it is certain, without asking each device, that none is available."""
        return True

    def check_population(self, num_devices: int) -> None:  # noqa: B027
        """Raises ValueError if a trace names a device that a population does not have."""


@dataclasses.dataclass(frozen=True)
class Always(Availability):
    """Availability where every device is available at any time."""

    is_always: ClassVar[bool] = True

    def available(
        self, devices: np.ndarray, seconds: float, round_index: int, seed: int
    ) -> np.ndarray:
        """Returns (m,) bool, all True."""
        return np.ones(len(devices), dtype=bool)


@dataclasses.dataclass(frozen=True)
class Independent(Availability):
    """Availability of each device with one probability, drawn anew each time it is asked.

    Attributes:
      available_probability: The probability that a device is available, for
        --availability=independent.

    Raises:
      ValueError: If the probability is not above 0 and at most 1.
    """

    available_probability: float = flag(_GROUP, is_positive=True, most=1.0)

    def __post_init__(self) -> None:
        flag_fields.check(self)

    def available(
        self, devices: np.ndarray, seconds: float, round_index: int, seed: int
    ) -> np.ndarray:
        """Returns (m,) bool, drawn independently for each device, round and moment."""
        draws = uniform(seed, _INDEPENDENT, devices, _bits(seconds), round_index)
        return draws < self.available_probability


@dataclasses.dataclass(frozen=True)
class Diurnal(Availability):
    """Availability on some nights, by the local time of each device's time zone.

    Each device has a time zone, and one window of the day in local time, whose start and length are
    drawn once for the device, uniformly. Its duty cycle is the window's share of the day times the
    probability with which the device is on charge and idle in a night, independently of other
    nights. The first round begins at midnight UTC.

    Attributes:
      utc_offsets: Local time less UTC in each time zone, in hours, for --availability=diurnal.
      utc_weights: The share of devices in each time zone, up to a factor, for
        --availability=diurnal. Default: the same.
      window_start_hour: The mean local hour at which a device's window starts, for
        --availability=diurnal.
      window_spread_hours: The most hours between a device's start and the mean one, for
        --availability=diurnal.
      shortest_window_hours: The hours of the shortest window of a device, for
        --availability=diurnal.
      longest_window_hours: The hours of the longest window of a device, for --availability=diurnal.
      nightly_probability: The probability that a device is on charge in a night, for
        --availability=diurnal.

    Raises:
      ValueError: If an attribute is out of its range.
    """

    utc_offsets: tuple[float, ...] = flag(_GROUP, (-8.0, -5.0, -3.0, 0.0, 1.0, 3.0, 5.5, 8.0, 9.0))
    utc_weights: tuple[float, ...] | None = flag(_GROUP, None)
    window_start_hour: float = flag(_GROUP, 22.0, least=0.0, most=24.0)
    window_spread_hours: float = flag(_GROUP, 2.0, least=0.0, most=12.0)
    shortest_window_hours: float = flag(_GROUP, 4.0, is_positive=True)
    longest_window_hours: float = flag(_GROUP, 10.0, is_positive=True, most=24.0)
    nightly_probability: float = flag(_GROUP, 0.7, is_positive=True, most=1.0)

    def __post_init__(self) -> None:
        flag_fields.check(self)
        if not self.utc_offsets or not all(-12.0 <= each <= 14.0 for each in self.utc_offsets):
            raise ValueError(
                "utc_offsets must be at least one number from -12 to 14 hours, found "
                f"{self.utc_offsets}."
            )
        weights = self._weights()
        if len(weights) != len(self.utc_offsets) or not (
            np.all(np.isfinite(weights)) and np.all(weights >= 0.0) and np.any(weights > 0.0)
        ):
            raise ValueError(
                "utc_weights must be a finite number of at least 0 for each of the "
                f"{len(self.utc_offsets)} utc_offsets, and not all 0, found {self.utc_weights}."
            )
        if self.longest_window_hours < self.shortest_window_hours:
            raise ValueError(
                f"longest_window_hours must be at least shortest_window_hours, "
                f"{self.shortest_window_hours:g}, found {self.longest_window_hours:g}."
            )

    def available(
        self, devices: np.ndarray, seconds: float, round_index: int, seed: int
    ) -> np.ndarray:
        """Returns (m,) bool, True for devices in their window, on charge and idle this night."""
        starts, lengths = self.windows(devices, seed)
        since_first_start = seconds - starts
        nights = np.floor(since_first_start / _DAY)
        found = since_first_start - nights * _DAY < lengths
        # Draws are made only for devices inside their window, which most devices are not.
        inside = np.flatnonzero(found)
        nights_inside = nights[inside].astype(np.int64).view(np.uint64)
        draws = uniform(seed, _NIGHT, devices[inside], nights_inside)
        found[inside] = draws < self.nightly_probability
        return found

    def is_possible(self, seconds: float) -> bool:
        """Returns whether some device's window may be open, in any time zone."""
        peopled = np.asarray(self.utc_offsets, dtype=np.float64)[self._weights() > 0.0]
        earliest = self.window_start_hour - self.window_spread_hours - peopled
        # The possible span of windows is made a second longer at either end, for rounding.
        since_earliest = np.mod(seconds - earliest * _HOUR + 1.0, _DAY)
        longest = (2.0 * self.window_spread_hours + self.longest_window_hours) * _HOUR
        return bool(np.any(since_earliest < longest + 2.0))

    def windows(self, devices: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns start and length of the daily windows in which devices may be available.

        Args:
          devices: (m,) int64.
          seed: The seed of the population.

        Returns:
          (m,) float64 seconds, since the first round began, at which a window of each device
          starts, possibly negative; and (m,) float64 seconds that it lasts.
        """
        shares = np.cumsum(self._weights()) / np.sum(self._weights())
        zones = np.searchsorted(shares[:-1], uniform(seed, _ZONE, devices), side="right")
        offsets = np.asarray(self.utc_offsets, dtype=np.float64)[zones]
        spread = self.window_spread_hours * (2.0 * uniform(seed, _WINDOW_START, devices) - 1.0)
        duration = self.longest_window_hours - self.shortest_window_hours
        hours = self.shortest_window_hours + duration * uniform(seed, _WINDOW_LENGTH, devices)
        return (self.window_start_hour + spread - offsets) * _HOUR, hours * _HOUR

    def _weights(self) -> np.ndarray:
        weights = (1.0,) * len(self.utc_offsets) if self.utc_weights is None else self.utc_weights
        return np.asarray(weights, dtype=np.float64)


class Trace(Availability):
    """Availability as recorded in data, as spans of time in which each device was available.

    Devices without a span are never available. A span holds its start and not its end.
    """

    def __init__(
        self,
        devices: np.ndarray,
        start_seconds: np.ndarray,
        end_seconds: np.ndarray,
        period_seconds: float | None = None,
    ) -> None:
        """Creates a trace. The arrays are copied.

        Args:
          devices: (m,) integers: the device of each span, from 0, in any order.
          start_seconds: (m,) float64, since the first round began.
          end_seconds: (m,) float64: later than the starts. Spans of one device may overlap.
          period_seconds: The trace is repeated with this period; None for a trace after
            which no device is available any more.

        Raises:
          ValueError: If the arrays do not fit together, a number is not finite, a device's
            is no integer from 0, a span does not end after it starts, or one is not within
            the period.
        """
        columns = [np.array(each) for each in (devices, start_seconds, end_seconds)]
        if not all(each.dtype.kind in "iuf" for each in columns):
            raise ValueError("a trace needs numbers: integers for devices, seconds for times.")
        if not columns[0].size or any(each.shape != (len(columns[0]),) for each in columns):
            raise ValueError("a trace needs a device, a start and an end for each span.")
        ids, starts, ends = (each.astype(np.float64) for each in columns)
        if period_seconds is not None:
            numbers.positive_number(period_seconds, "period_seconds")
        first, last = (-np.inf, np.inf) if period_seconds is None else (0.0, period_seconds)
        wrong = ~((np.floor(ids) == ids) & (ids >= 0) & (ids <= _LARGEST_DEVICE))
        wrong |= ~(np.isfinite(starts) & np.isfinite(ends) & (starts < ends))
        wrong |= (starts < first) | (ends > last)
        if np.any(wrong):
            span = int(np.argmax(wrong))
            raise ValueError(
                f"span {span + 1} of the trace is {starts[span]:g} to {ends[span]:g} of device "
                f"{ids[span]:g}: devices are whole numbers from 0 to {_LARGEST_DEVICE}, times are "
                "finite, and a span ends after it starts and lies within the period, if any."
            )
        self._devices, self._starts, self._ends = ids.astype(np.int64), starts, ends
        self._period = period_seconds
        # A cache of the last answer: which devices are available at the moment _moment.
        self._moment = math.nan
        self._is_available = np.zeros(int(np.max(self._devices)) + 1, dtype=bool)

    @classmethod
    def load(cls, path: str | os.PathLike[str], period_seconds: float | None = None) -> "Trace":
        """Reads a trace of availability from a text file or a .npz file.

        Args:
          path: A text file of ``device,start_seconds,end_seconds`` lines, of which the first
            may be a heading; or a ``.npz`` file with arrays of these names.
          period_seconds: The period of the trace, as for the constructor.

        Returns:
          The trace.

        Raises:
          TraceError: If the file is missing, damaged, or is no trace.
        """
        file = pathlib.Path(path)
        try:
            is_archive = file.suffix.lower() == ".npz"
            if is_archive:
                with np.load(file, allow_pickle=False) as archive:
                    devices, starts, ends = (archive[name] for name in _COLUMNS)
                    return cls(devices, starts, ends, period_seconds)
            devices, starts, ends = _listed(file)
            return cls(devices, starts, ends, period_seconds)
        except OSError as error:
            raise TraceError(f"{file} cannot be read: {error.strerror or error}.") from error
        except Exception as error:
            # Catch all errors: NumPy raises many types for a damaged archive.
            raise TraceError(
                f"{file} cannot be used as a trace of {','.join(_COLUMNS)}: {error}"
            ) from error

    @property
    def largest_device(self) -> int:
        """The largest device number in the trace."""
        return len(self._is_available) - 1

    def check_population(self, num_devices: int) -> None:
        """Raises ValueError if the trace names a device that a population does not have."""
        if self.largest_device >= num_devices:
            raise ValueError(
                f"the trace names device {self.largest_device}, and those of the population are 0 "
                f"to {num_devices - 1}: use a larger population or another trace."
            )

    def available(
        self, devices: np.ndarray, seconds: float, round_index: int, seed: int
    ) -> np.ndarray:
        """Returns (m,) bool, True for devices that the trace says are available at that moment."""
        moment = seconds if self._period is None else math.fmod(seconds, self._period)
        if moment != self._moment:
            is_open = (self._starts <= moment) & (moment < self._ends)
            self._is_available[:] = False
            self._is_available[self._devices[is_open]] = True
            self._moment = moment
        known = np.minimum(devices, self.largest_device)
        return (known == devices) & self._is_available[known]

    def is_possible(self, seconds: float) -> bool:
        """Returns True if the trace is repeated or has not ended at that moment."""
        return self._period is not None or seconds < float(np.max(self._ends))


def uniform(
    seed: int, purpose: int, devices: np.ndarray, *coordinates: np.ndarray | int
) -> np.ndarray:
    """Returns uniform pseudorandom numbers in [0, 1): a hash of seed, purpose, device, coordinates.

    State ``devices[i]`` of a SplitMix64 generator whose seed follows from (seed, purpose),
    hashed again with each coordinate. Not for anything that privacy rests on.

    Args:
      seed: Any non-negative integer.
      purpose: A non-negative integer; others give independent numbers.
      devices: (m,) int64, from 0.
      *coordinates: For example a night: one integer from 0 for all, or (m,) uint64.

    Returns:
      (m,) float64, multiples of 2^-53.
    """
    key = np.random.SeedSequence(seed, spawn_key=(purpose,)).generate_state(1, np.uint64)
    hashed = np.asarray(devices, dtype=np.int64).view(np.uint64) * _STEP
    hashed += key
    _finalise(hashed)
    for coordinate in coordinates:
        hashed ^= np.asarray(coordinate, dtype=np.uint64).reshape(-1) * _STEP
        # A step is added for each coordinate, because an XOR with coordinate 0 leaves the state as
        # it was.
        hashed += _STEP
        _finalise(hashed)
    hashed >>= np.uint64(11)
    return hashed * 2.0**-53


def _finalise(state: np.ndarray) -> None:
    """Applies the finaliser of the SplitMix64 generator to an array of states, in place."""
    state ^= state >> np.uint64(30)
    state *= _FIRST_FACTOR
    state ^= state >> np.uint64(27)
    state *= _SECOND_FACTOR
    state ^= state >> np.uint64(31)


def _bits(number: float) -> np.ndarray:
    # Adding 0.0 turns -0.0 into 0.0, so that both have the same bits.
    return np.array([number + 0.0], dtype=np.float64).view(np.uint64)


def _listed(file: pathlib.Path) -> np.ndarray:
    """Returns the columns of a text file of availability; its first line may be a heading."""
    # Decode with utf-8-sig: spreadsheets write a byte order mark at the beginning of a file.
    lines = file.read_text(encoding="utf-8-sig").splitlines()
    has_heading = bool(lines) and [each.strip() for each in lines[0].split(",")] == [*_COLUMNS]
    lines = lines[has_heading:]
    if not lines:
        raise ValueError("it has no span.")
    table = np.loadtxt(lines, delimiter=",", ndmin=2, comments=None)
    if table.shape[1] != len(_COLUMNS):
        raise ValueError(f"it has {table.shape[1]} columns.")
    return table.T


class AvailableClients(Sampler):
    """Sampler that leaves out a drawn client if its device is not available in the round.

    A client takes part in the rounds S that its secret coins or its bin say, whether it can be
    asked or not: its timer starts in each of them. In a round of S in which its device is not
    available it contributes nothing, which is an update of zeros. The theorem of the amplified
    guarantee (``kernel.certificate``) covers every choice of updates of
    norm at most the clip norm, zeros among them, that follows from what was released before and
    from S up to this round. So absences cost nothing, as long as no later coin has a part in them:
    availability may depend on the device, on the time, on the data and on the model, and here it
    has random numbers of its own. The noise and the number that sums are divided by stay what they
    are, so that fewer clients make the model's updates smaller in proportion.

    If a timer did not start in a round of S because its device was absent, the client would come
    again sooner than the distribution of S says, and the guarantee would not be the one that was
    computed.

    Args:
      sampler: The sampler that draws the clients, of a scheme without groups.
      availability: Which devices are available when.
      availability_seed: The seed of availability, which is not that of the sampler.
      round_seconds: The time from the start of a round to that of the next, above 0.
    """

    _asked: tuple[Availability, int, float]

    def __init__(
        self,
        sampler: Sampler,
        availability: Availability,
        availability_seed: int,
        round_seconds: float,
    ) -> None:
        super().__init__(sampler.scheme, sampler.seed)
        object.__setattr__(self, "_asked", (availability, availability_seed, round_seconds))

    def draw(self, round_index: int) -> np.ndarray:
        """Draws the clients of a round and returns those with an available device."""
        drawn = super().draw(round_index)
        availability, seed, seconds = self._asked
        return drawn[availability.available(drawn, round_index * seconds, round_index, seed)]


WAIT = "wait"
# The server's flags that may change when a run resumes: neither noise nor timers depend on them.
MAY_CHANGE = ("minimum_uploads", "over_selection", "retry_minutes", "max_attempts")
REJOIN = stated_runs.REJOIN

# The largest value, in hours or minutes, of a flag that is a time; in seconds, it is far from the
# limits of float64.
_LONGEST = 1e12
_MODELS = {"always": Always, "independent": Independent, "diurnal": Diurnal}
_FLAGS_OF_MODELS: Mapping[str, tuple[str, ...]] = {
    **{name: tuple(flag_fields.fields_of(model)) for name, model in _MODELS.items()},
    "trace": ("trace", "trace_period_hours"),
}


@dataclasses.dataclass(frozen=True)
class DeviceBehaviour:
    """How the devices of a population and their server behave; by default nothing goes wrong.

    A device starts its timer when it uploads, whatever becomes of the upload. A round is closed
    before its end once all uploads that are needed are there.

    Attributes:
      availability: Which devices are available when.
      timer_hours: The hours that --timer=wall_clock counts. Required with it.
      over_selection: The number of devices selected for each upload that is needed. If fewer are
        available, fewer are selected, but at least as many as uploads are needed.
      dropout_probability: The probability that a selected device gives up before it uploads, so
        that its timer does not start.
      upload_loss_probability: The probability that an upload does not arrive.
      late_upload_probability: The probability that an upload arrives after its round was closed, so
        that it is never summed.
      minimum_uploads: The least number of uploads with which a round is summed at its end; with
        fewer, it is abandoned and started again. The sum is divided by --clients_per_round in any
        case. Default: --clients_per_round.
      abandonment_probability: The probability that the server abandons a round after its uploads,
        and starts it again. Nothing of the attempt is summed or released.
      history_loss_probability: The probability that a device forgets its participations, for each
        device and round.
      after_history_loss: The reaction of a device that forgot its participations: wait, as if it
        had just taken part, and as often as its timer allowed; or rejoin, as if it were new, which
        breaks its schema.
      broken_timers: The share of devices whose timers are broken: they check in as if they had
        never taken part. It is rounded to whole devices, at least one.
      round_minutes: The minutes that a round takes, after which devices upload.
      retry_minutes: The minutes that the server waits before it repeats a round that found too few
        devices or lost too many uploads.
      max_attempts: The most attempts of the server at the same round.

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
        """The time from the start of a round to its end, in seconds."""
        return self.round_minutes * _MINUTE

    @property
    def retry_seconds(self) -> float:
        """The seconds from a failed start of a round to the next start of the same round."""
        return self.retry_minutes * _MINUTE

    @property
    def timer_seconds(self) -> float | None:
        """The seconds that wall-clock timers wait; None if timers count rounds."""
        return None if self.timer_hours is None else self.timer_hours * _HOUR

    @property
    def arriving(self) -> float:
        """The probability that a selected device uploads in time, in a round that is kept."""
        losses = [name for name, (own, _) in flag_fields.fields_of(self).items() if own.below == 1]
        return math.prod(1.0 - getattr(self, name) for name in losses)

    @property
    def is_undisturbed(self) -> bool:
        """Whether a round depends only on who took part in earlier rounds: there are no faults."""
        without_effect = ("after_history_loss", "round_minutes", "retry_minutes", "max_attempts")
        own = {name: getattr(self, name) for name in without_effect}
        return self == DeviceBehaviour(**own)

    @property
    def forgets(self) -> bool:
        """Whether devices may join against their timers, as if they had never taken part."""
        return stated_runs.RunFlags(vars(self)).forgets()

    def fewest_uploads(self, clients_per_round: int) -> int:
        """Returns the smallest number of uploads with which the server sums a round.

        Args:
          clients_per_round: How many uploads a round needs, and sums at most.

        Raises:
          ValueError: If ``minimum_uploads`` is above it.
        """
        if self.minimum_uploads is None:
            return clients_per_round
        if self.minimum_uploads > clients_per_round:
            raise ValueError(
                f"minimum_uploads={self.minimum_uploads} must be at most the {clients_per_round} "
                "clients per round."
            )
        return self.minimum_uploads


def define_flags(values: flags.FlagValues) -> None:
    """Defines the flags that describe how a population of devices behaves.

    Flags:
      timer: The unit that the devices' timers count: rounds, which enforces --separation; or hours
        (wall_clock), from which a separation follows.
      availability: The times at which devices are available: always; each device independently with
        one probability; at night by local time (diurnal); or those of a file (trace).
      trace: With --availability=trace: a file of the times at which each device is available, with
        lines of device,start_seconds,end_seconds, or an .npz file with arrays of these names.
      trace_period_hours: The hours after which a --trace is repeated. Default: it is not repeated.
    """
    texts, group = flag_fields.texts_of(define_flags), FlagGroup(values, _GROUP)
    group.choice("timer", ["rounds", "wall_clock"], texts["timer"], "rounds")
    flag_fields.define(values, DeviceBehaviour, [_GROUP])
    group.choice("availability", [*_FLAGS_OF_MODELS], texts["availability"], "always")
    for model in (Independent, Diurnal):
        flag_fields.define(values, model, [_GROUP])
    group.path("trace", texts["trace"])
    group.number("trace_period_hours", texts["trace_period_hours"])


def of_flags(values: flags.FlagValues) -> DeviceBehaviour:
    """Returns the behaviour of devices and their server that the command's flags describe.

    Raises:
      CommandError: If flags do not fit together.
      ValueError: If one is out of its range, or a trace cannot be read.
    """
    command_line.check_choice(
        (values.timer == "rounds") == (values.timer_hours is None),
        "--timer_hours and --timer=wall_clock need each other: give both or neither.",
    )
    command_line.check_choice(
        values.after_history_loss == WAIT or values.history_loss_probability > 0.0,
        f"--after_history_loss={REJOIN} needs --history_loss_probability: give both.",
    )
    given = {name: values[name].value for name in flag_fields.fields_of(DeviceBehaviour)}
    return DeviceBehaviour(_availability(values), **given)


def _availability(values: flags.FlagValues) -> Availability:
    model = values.availability
    for other, names in _FLAGS_OF_MODELS.items():
        for name in names:
            command_line.check_choice(
                other == model or not values[name].present,
                f"--{name} needs --availability={other}: give both or neither.",
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
            "--utc_offsets and --utc_weights take numbers separated by commas, found "
            f"{','.join(words)}."
        ) from None
