"""Reference implementation of participation timers: a device's client, and a check by its server.

``docs/devices.md`` has the state machine. For all uploads of one device in a run it holds that

- the rounds of their requests are at least ``rounds`` apart: an upload is counted before it is
  sent, and the first note of an installation that is not older than the run stands for whatever an
  earlier one did;
- their requests are at least ``seconds`` less twice ``tolerance`` apart on the server's clock,
  because the device's was within ``tolerance`` of it at both;
- one installation uploads at most ``most`` times, and a new one counts from 0;
- if versions of the app have different policies, two uploads are apart by the stricter one, and an
  installation keeps to the strictest one that it has uploaded under;
- a file that a backup restored is a new installation, if the mark beside it is of another one.

The server sums an upload only while the round of its request is open (:class:`OpenRound`), so the
same holds for the rounds in which uploads are summed.
"""

import dataclasses
import json


@dataclasses.dataclass(frozen=True)
class Policy:
    """Policy of one version of an app: how often, and how far apart, a device takes part in a run.

    Attributes:
      rounds: How many rounds apart participations are at least; 1 for any other round.
      seconds: How many seconds apart they are at least; 0 for timers that need no clock.
      tolerance: By how many seconds a device's clock may differ from the server's.
      most: The most participations of an installation, at least 1; None for no limit.

    Raises:
      ValueError: If a number is out of its range: a timer of 0 rounds would allow two uploads in
        one round, and clocks that may differ by half of ``seconds`` leave no time between uploads.
    """

    rounds: int = 1
    seconds: float = 0.0
    tolerance: float = 0.0
    most: int | None = None

    def __post_init__(self) -> None:
        for name, number in (("rounds", self.rounds), ("most", self.most)):
            if (name, number) != ("most", None) and (type(number) is not int or number < 1):
                raise ValueError(f"{name} must be an integer of at least 1, found {number!r}.")
        for name, time in (("seconds", self.seconds), ("tolerance", self.tolerance)):
            if type(time) not in (int, float) or not 0.0 <= time < float("inf"):
                raise ValueError(f"{name} must be finite and at least 0, found {time!r}.")
        if self.seconds and self.seconds <= 2 * self.tolerance:
            raise ValueError(
                f"seconds must be more than twice the tolerance, {2 * self.tolerance!r}, found "
                f"{self.seconds!r}: wait longer, or let clocks differ by less."
            )

    def stricter(self, other: "Policy") -> "Policy":
        """Returns the stricter combination of two policies: it allows what both policies allow."""
        limits = [each.most for each in (self, other) if each.most is not None]
        tolerances = [each.tolerance for each in (self, other) if each.seconds]
        return Policy(
            max(self.rounds, other.rounds),
            max(self.seconds, other.seconds),
            min(tolerances, default=0.0),
            min(limits, default=None),
        )


@dataclasses.dataclass(frozen=True)
class Request:
    """Request of a server that a device take part in one round of a run.

    Attributes:
      run: The name of the run.
      round_index: The round. It never goes back in a run, and stays when the server tries again.
      seconds: The server's clock.
      run_began: The server's clock when the run was made, before its first request.
      token: A secret that the upload carries, made at random for this request alone.
    """

    run: str
    round_index: int
    seconds: float
    run_began: float
    token: str


@dataclasses.dataclass(frozen=True)
class Entry:
    """An installation's memory of one run, as when it last took part and how often."""

    run: str
    round_index: int
    clock: float
    participations: int
    policy: Policy

    def is_checked(self, policy: Policy) -> bool:
        """Returns whether the device's clock, when last noted, met a policy's tolerance."""
        own = self.policy
        return not policy.seconds or (own.seconds > 0 and own.tolerance <= policy.tolerance)

    def allows(self, request: Request, policy: Policy, clock: float) -> bool:
        """Returns whether a policy allows another participation at the time of a request."""
        return (
            request.round_index >= self.round_index + policy.rounds
            and (not policy.seconds or clock >= self.clock + policy.seconds)
            and (policy.most is None or self.participations < policy.most)
        )


@dataclasses.dataclass(frozen=True)
class Device:
    """State of one installation of the app on a device, shared by all accounts that use it.

    Attributes:
      contact: The server's clock when this installation first spoke to it.
      entries: What the installation remembers of each run.
      mark: A random mark of this installation, kept beside the file in a place that no backup
        restores.
      job: The request for which the device computes or uploads; None for none.
      asked: When the device accepted the job, by its own clock.
      policy: The policy by which the device accepted the job.
      is_uploading: Whether the upload has been counted, and may be on its way.
    """

    contact: float
    entries: tuple[Entry, ...] = ()
    mark: str = ""
    job: Request | None = None
    asked: float = 0.0
    policy: Policy = Policy()
    is_uploading: bool = False

    def ask(self, request: Request, policy: Policy, clock: float) -> "Device":
        """Returns the device's state after a request; if it takes part, the request is its ``job``.

        Args:
          request: The request.
          policy: The policy of the running version of the app.
          clock: The device's clock, in seconds.
        """
        entry = self.entry(request.run)
        policy = policy if entry is None else policy.stricter(entry.policy)
        if policy.seconds and not abs(clock - request.seconds) <= policy.tolerance:
            return self
        if entry is None and not self.contact < request.run_began:
            # The run began before this installation's first contact, so that an earlier
            # installation may have taken part: wait as after a participation.
            return self._with(Entry(request.run, request.round_index, clock, 0, policy))
        if self.job:
            return self
        if entry is not None and not entry.is_checked(policy):
            # The clock of the last upload was not held to this policy's tolerance, and may have
            # been wrong: the timer begins again now.
            return self._with(dataclasses.replace(entry, clock=clock, policy=policy))
        if entry is not None and not entry.allows(request, policy, clock):
            return self
        return dataclasses.replace(self, job=request, asked=clock, policy=policy)

    def upload(self) -> "Device":
        """Returns the device with its job counted; it may upload once ``kept`` is on disk."""
        if self.job is None or self.is_uploading:
            raise ValueError("there is no job to upload.")
        before = self.entry(self.job.run)
        count = 1 + (0 if before is None else before.participations)
        entry = Entry(self.job.run, self.job.round_index, self.asked, count, self.policy)
        return dataclasses.replace(self._with(entry), is_uploading=True)

    def end(self, acknowledged: bool) -> "Device":
        """Returns the device without its job, whether that was acknowledged, lost or given up."""
        del acknowledged
        return Device(self.contact, self.entries, self.mark)

    def entry(self, run: str) -> Entry | None:
        """Returns the device's memory of a run; None for a run that it does not know."""
        return next((entry for entry in self.entries if entry.run == run), None)

    def kept(self) -> str:
        """Returns the device's memory as text to save on disk, outside backups, without jobs."""
        return json.dumps(dataclasses.asdict(self.end(False)))

    def _with(self, entry: Entry) -> "Device":
        others = tuple(each for each in self.entries if each.run != entry.run)
        return dataclasses.replace(self, entries=(*others, entry))


def started(kept: str | None, seconds: float, mark: str = "") -> Device:
    """Returns the device that its text on disk describes, or a new one if the text is not its own.

    Args:
      kept: The text on disk; None for none.
      seconds: The server's clock.
      mark: The mark of this installation. A text that a backup restored has another one.
    """
    try:
        found = json.loads(kept or "")  # noqa: TID251 (this file stands alone)
        numbers, entries = [found["contact"]], []
        for each in found["entries"]:
            entries.append(Entry(**each | {"policy": Policy(**each["policy"])}))
            numbers += [each["round_index"], each["clock"], each["participations"]]
        are_numbers = all(type(each) in (int, float) and abs(each) < 1e300 for each in numbers)
        if found["mark"] == mark and are_numbers:
            return Device(found["contact"], tuple(entries), mark)
    except (KeyError, RecursionError, TypeError, ValueError):
        pass
    return Device(seconds, mark=mark)


@dataclasses.dataclass(frozen=True)
class OpenRound:
    """The server's check of uploads in one attempt at a round, by the tokens of its requests."""

    tokens: frozenset[str] = frozenset()

    def receive(self, token: str) -> tuple["OpenRound", bool]:
        """Returns the round after an upload, and whether the upload is summed."""
        return OpenRound(self.tokens - {token}), token in self.tokens
