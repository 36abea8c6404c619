"""The reference timer: no device takes part too soon or too often, whatever happens.

A model of server, network and devices is explored in full: every order in which they can act.
"""

import ast
import dataclasses
import functools
import itertools
import math
import pathlib
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import pytest

from simulations.devices import reference_timer
from simulations.devices.reference_timer import Device, OpenRound, Policy, Request
from tests.refusals import refuses

_RUN = "words of 2026"
_NUM_ROUNDS = 6
_SOURCE = pathlib.Path(reference_timer.__file__).read_text(encoding="utf-8")


@dataclasses.dataclass(frozen=True)
class _World:
    """What the model of a device's surroundings may do.

    Attributes:
      policies: The timers of each version of the app; any may run at any time.
      attempts: The most attempts of the server at a round.
      offsets: By how much the clock of a device may be wrong; it may be set at any time.
      last_second: When the model ends.
      began: When the run was made; devices are there since time 0.
      has_backups: Whether backups are made, and restored to a new installation.
    """

    policies: tuple[Policy, ...]
    attempts: int = 2
    offsets: tuple[int, ...] = (0,)
    last_second: int = 0
    began: int = 1
    has_backups: bool = False


@dataclasses.dataclass(frozen=True)
class _Moment:
    """Where the server is: the time, its round and its attempt at it."""

    second: int
    round_index: int = 0
    attempt: int = 0

    @property
    def name(self) -> str:
        """Tokens of this attempt begin with it."""
        return f"{self.round_index}.{self.attempt}."


class _Asked(NamedTuple):
    """A request that was accepted: its round, its second, and by which policy."""

    round_index: int
    second: int
    policy: Policy

    def is_past(self, round_index: int, second: float, *policies: Policy) -> bool:
        """Whether another request keeps the timers of its policy and of others."""
        return all(
            round_index - self.round_index >= each.rounds
            and second - self.second >= each.seconds - 2.0 * each.tolerance
            for each in (self.policy, *policies)
        )


class _Person(NamedTuple):
    """One device, whatever is installed on it, with what it did and what the server knows of it.

    Attributes:
      device: Its installation.
      uploads: The uploads of this installation.
      limit: The fewest uploads that a policy allows by which this installation uploaded.
      accepted: The request of its job.
      asked: The request of the last upload, of any installation.
      backup: What a backup has of it.
      sent: The tokens of its uploads that are on their way.
      open_round: The server's, as far as it is about this device.
      summed: The tokens that were summed in this attempt.
    """

    device: Device
    uploads: int = 0
    limit: float = math.inf
    accepted: _Asked | None = None
    asked: _Asked | None = None
    backup: Device | None = None
    sent: frozenset[str] = frozenset()
    open_round: OpenRound = OpenRound()
    summed: frozenset[str] = frozenset()


class _BrokenError(Exception):
    """A device took part too soon or too often, or an upload was summed twice or too late."""


def _check(condition: bool, what: str) -> None:
    if not condition:
        raise _BrokenError(what)


class _Model:
    """All that devices, network and server can do."""

    def __init__(self, world: _World, module: types.ModuleType) -> None:
        self._world = world
        self._module = module
        # Of a device alone, whatever the time: it reads what it kept.
        self._restarted = functools.cache(
            lambda device: module.started(device.kept(), 0.0, device.mark)
        )

    def first(self) -> _Person:
        """A device that is there before the run is made."""
        return _Person(self._module.Device(0.0))

    def next_moments(self, now: _Moment) -> Iterator[_Moment]:
        """A second later, the next round, or another attempt at the same one."""
        if now.second < self._world.last_second:
            yield dataclasses.replace(now, second=now.second + 1)
        if now.round_index + 1 < _NUM_ROUNDS:
            yield _Moment(now.second, now.round_index + 1)
        if now.attempt + 1 < self._world.attempts:
            yield dataclasses.replace(now, attempt=now.attempt + 1)

    def at(self, person: _Person, before: _Moment, now: _Moment) -> _Person:
        """The same device later. Uploads that are on their way are late where an attempt ended.

        One that is not received in the next attempt never is.
        """
        if before.name == now.name:
            return self._without_past(person, now)
        late = frozenset(token for token in person.sent if token.startswith(before.name))
        closed = self._module.OpenRound()
        after = person._replace(sent=late, open_round=closed, summed=frozenset())
        return self._without_past(after, now)

    def steps(self, person: _Person, now: _Moment) -> tuple[_Person, ...]:
        """What a device is after each thing that can happen to it."""
        found = itertools.chain(self._of_device(person, now), self._of_network(person, now))
        return tuple({self._without_past(each, now) for each in found} - {person})

    def _without_past(self, person: _Person, now: _Moment) -> _Person:
        """The same without what makes no difference to anything that can still happen."""
        policies, device, asked = self._world.policies, person.device, person.asked
        # No upload can have the token of a job that was given up: it may be given out again.
        used = person.sent | ({device.job.token} if device.job else set())
        if device.contact > self._world.began:
            device = dataclasses.replace(device, contact=self._world.began)
        if (
            asked is not None
            and asked.is_past(now.round_index, now.second, *policies)
            and device.job is None
        ):
            asked = None
        return person._replace(
            device=device,
            uploads=person.uploads if any(each.most for each in policies) else 0,
            accepted=person.accepted if device.job else None,
            asked=asked,
            open_round=self._module.OpenRound(person.open_round.tokens & used),
        )

    def _of_device(self, person: _Person, now: _Moment) -> Iterator[_Person]:
        device, of = person.device, person._replace
        # Asked, as often as the server likes.
        used = person.sent | person.summed
        token = next(name for n in itertools.count() if (name := f"{now.name}{n}") not in used)
        request = self._module.Request(_RUN, now.round_index, now.second, self._world.began, token)
        for offset, policy in itertools.product(self._world.offsets, self._world.policies):
            asked = device.ask(request, policy, now.second + offset)
            if asked.job is device.job:
                yield of(device=asked)
            else:
                accepted = _Asked(now.round_index, now.second, policy)
                tokens = self._module.OpenRound(person.open_round.tokens | {token})
                yield of(device=asked, open_round=tokens, accepted=accepted)
        if device.job is not None and not device.is_uploading:
            yield self._uploaded(person)
        if device.job is not None:
            # Acknowledged; or given up, or lost, whatever became of the upload.
            yield of(device=device.end(True))
            yield of(device=device.end(False))
        # It may restart between any two steps, and be installed again.
        yield of(device=self._restarted(device))
        yield self._installed(person, self._module.started(None, now.second))
        if self._world.has_backups:
            yield of(backup=self._restarted(device))
        if person.backup is not None:
            mark = "another" if not person.backup.mark else ""
            restored = self._module.started(person.backup.kept(), now.second, mark)
            yield self._installed(person, restored)._replace(backup=None)

    def _installed(self, person: _Person, device: Device) -> _Person:
        """A new installation, which does not know by which policy the earlier one uploaded."""
        asked = person.asked and person.asked._replace(policy=Policy())
        return person._replace(device=device, uploads=0, limit=math.inf, asked=asked)

    def _uploaded(self, person: _Person) -> _Person:
        job, accepted = person.device.job, person.accepted
        assert job is not None
        assert accepted is not None
        if person.asked is not None:
            policy = accepted.policy
            _check(person.asked.is_past(job.round_index, job.seconds, policy), "too soon")
        limit = min(person.limit, accepted.policy.most or math.inf)
        _check(person.uploads < limit, "too often")
        return person._replace(
            device=person.device.upload(),
            uploads=person.uploads + 1,
            limit=limit,
            asked=accepted,
            sent=person.sent | {job.token},
        )

    def _of_network(self, person: _Person, now: _Moment) -> Iterator[_Person]:
        """Uploads are lost, received, or received and received again."""
        for token in person.sent:
            rest = person.sent - {token}
            yield person._replace(sent=rest)
            open_round, is_summed = person.open_round.receive(token)
            summed = person.summed
            if is_summed:
                _check(token.startswith(now.name), "too late")
                _check(token not in summed, "twice")
                summed = summed | {token}
            received = person._replace(open_round=open_round, summed=summed)
            yield received
            yield received._replace(sent=rest)


def _explore(
    world: _World, num_devices: int, module: types.ModuleType = reference_timer
) -> dict[_Moment, set[tuple[int, ...]]]:
    """Explores every order of steps; raises _BrokenError.

    Returns:
      For each moment the states of all devices, by numbers of states of one device.
    """
    model = _Model(world, module)
    numbers: dict[_Person, int] = {}
    people: list[_Person] = []

    def number_of(person: _Person) -> int:
        if person not in numbers:
            numbers[person] = len(people)
            people.append(person)
        return numbers[person]

    @functools.cache
    def steps(each: int, now: _Moment) -> tuple[int, ...]:
        return tuple(number_of(person) for person in model.steps(people[each], now))

    @functools.cache
    def later(each: int, before: _Moment, now: _Moment) -> int:
        return number_of(model.at(people[each], before, now))

    seen: dict[_Moment, set[tuple[int, ...]]] = {}
    moments = [(_Moment(world.began), {(number_of(model.first()),) * num_devices})]
    while moments:
        now, new = moments.pop()
        known = seen.setdefault(now, set())
        waiting = list(new - known)
        reached = set(waiting)
        known |= reached
        while waiting:
            state = waiting.pop()
            for index, each in enumerate(state):
                before, after = state[:index], state[index + 1 :]
                for step in steps(each, now):
                    if (found := (*before, step, *after)) not in known:
                        known.add(found)
                        reached.add(found)
                        waiting.append(found)
        for moment in model.next_moments(now):
            moments.append(
                (moment, {tuple(later(each, now, moment) for each in state) for state in reached})
            )
    return seen


_BY_ROUNDS = _World((Policy(rounds=3, most=2),))
_BY_TIME = _World((Policy(seconds=2.0),), attempts=1, offsets=(0, -3, 3), last_second=4)
_TWO_VERSIONS = _World((Policy(rounds=3), Policy(rounds=1, most=1)), attempts=1)
_CLOCK_IN_ONE = _World((Policy(), Policy(seconds=2.0)), 1, (0, -3), 3)
_BACKUPS = _World((Policy(rounds=3),), attempts=1, has_backups=True)


@pytest.mark.parametrize(
    "world",
    [
        _BY_ROUNDS,
        _BY_TIME,
        _World((Policy(rounds=2, most=2),)),
        _TWO_VERSIONS,
        pytest.param(_CLOCK_IN_ONE, marks=pytest.mark.long),
        _BACKUPS,
        pytest.param(
            _World((Policy(seconds=3.0, tolerance=1.0),), 1, (0, -1, 1, -4), 5),
            marks=pytest.mark.long,
        ),
        pytest.param(_World((Policy(2, 2.0, 0.5, 2),), 1, (0, -3, 3), 4), marks=pytest.mark.long),
        pytest.param(
            _World((Policy(1, 3.0, 1.0), Policy(2, 2.0, 0.0, 2)), 1, (0, -1, 1, -4), 5),
            marks=pytest.mark.long,
        ),
    ],
    ids=repr,
)
def test_no_device_takes_part_too_soon_or_too_often(world: _World) -> None:
    """In every order of all that can happen to it in six rounds; many take part twice."""
    found = _explore(world, 1)
    assert max(now.round_index for now in found) == _NUM_ROUNDS - 1
    assert sum(map(len, found.values())) > 1000


# What an engineer may get wrong: where it shows, and what is replaced in the reference.
_COUNTED_WHEN_ACKNOWLEDGED = """\
        if acknowledged and self.is_uploading:
            before = self.entry(self.job.run)
            count = 1 + (0 if before is None else before.participations)
            entry = Entry(self.job.run, self.job.round_index, self.asked, count, self.policy)
            return self._with(entry).end(False)
"""


def _at(world: _World, *replaced: tuple[str, str]) -> tuple[_World, tuple[tuple[str, str], ...]]:
    return world, replaced


_MUTANTS = {
    "a round too soon": _at(
        _BY_ROUNDS, ("self.round_index + policy.rounds", "self.round_index + 2")
    ),
    "a round strictly between": _at(
        _BY_ROUNDS,
        ("request.round_index >= self.round_index", "request.round_index + 1 >= self.round_index"),
    ),
    "a second too soon": _at(_BY_TIME, ("self.clock + policy.seconds", "self.clock + 1")),
    "the same round again": _at(
        _World((Policy(seconds=2.0),), 1, (0,), 4),
        ("request.round_index >= self.round_index + policy.rounds", "True"),
    ),
    "once too often": _at(
        _World((Policy(rounds=2, most=1),)),
        ("self.participations < policy.most", "self.participations <= policy.most"),
    ),
    "counted when acknowledged": _at(
        _BY_ROUNDS,
        ("dataclasses.replace(self._with(entry), is_", "dataclasses.replace(self, is_"),
        ("        del acknowledged\n", _COUNTED_WHEN_ACKNOWLEDGED),
    ),
    "no count on disk": _at(_BY_ROUNDS, ('for each in found["entries"]', "for each in ()")),
    "a clock that was set back": _at(
        _BY_TIME,
        ("not abs(clock - request.seconds) <= policy.tolerance", "clock > request.seconds"),
    ),
    "a clock that was set forward": _at(
        _BY_TIME,
        ("not abs(clock - request.seconds) <= policy.tolerance", "clock < request.seconds"),
    ),
    "a new installation joins at once": _at(
        _BY_ROUNDS,
        ("entry is None and not self.contact < request.run_began", "False"),
    ),
    "an installation of the same second joins at once": _at(
        _BY_ROUNDS,
        ("not self.contact < request.run_began", "self.contact > request.run_began"),
    ),
    "a new installation that waits by its clock alone": _at(
        _BY_ROUNDS,
        ("Entry(request.run, request.round_index, clock, 0,", "Entry(request.run, -9, clock, 0,"),
    ),
    "the running version alone": _at(
        _TWO_VERSIONS, ("policy if entry is None else policy.stricter(entry.policy)", "policy")
    ),
    "a clock of which nobody knows": _at(_CLOCK_IN_ONE, ("not entry.is_checked(policy)", "False")),
    "a backup is read": _at(_BACKUPS, ('found["mark"] == mark and', "")),
    "late uploads are summed": _at(_BY_ROUNDS, ("token in self.tokens", "True")),
    "an upload is summed twice": _at(_BY_ROUNDS, ("self.tokens - {token}", "self.tokens")),
}


def _mutant(replacements: Iterable[tuple[str, str]]) -> types.ModuleType:
    source = _SOURCE
    for old, new in replacements:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    module = types.ModuleType("mutated_reference_timer")
    # Dataclasses look their module up.
    with mock.patch.dict(sys.modules, {module.__name__: module}):
        exec(compile(source, "mutated_reference_timer.py", "exec"), module.__dict__)
    return module


@pytest.mark.parametrize("name", _MUTANTS)
def test_the_model_finds_what_may_go_wrong(name: str) -> None:
    world, replacements = _MUTANTS[name]
    with pytest.raises(_BrokenError):
        _explore(world, 1, _mutant(replacements))


@pytest.mark.parametrize(
    "changes",
    [
        *({"rounds": each} for each in (0, -1, 1.5, True)),
        *({"most": each} for each in (-1, 0, 1.5)),
        *(
            {name: each}
            for name in ("seconds", "tolerance")
            for each in (-1.0, math.inf, math.nan, "9", None, True)
        ),
        {"seconds": 2.0, "tolerance": 1.0},
    ],
    ids=str,
)
def test_policies_that_promise_nothing_are_refused(changes: dict[str, Any]) -> None:
    with refuses(*changes):
        Policy(**changes)


def test_one_job_is_uploaded_once() -> None:
    with refuses("job"):
        Device(0.0).upload()
    asked = Device(0.0).ask(Request(_RUN, 0, 2.0, 1.0, "token"), Policy(), 2.0)
    with refuses("job"):
        asked.upload().upload()


@pytest.mark.parametrize(
    "kept",
    [
        *("", "{}", "[]", "null", "[" * 100_000, '{"contact": 0.0}'),
        *('{"contact": 0, "entries": [{}]}', '{"contact": NaN, "entries": [], "mark": ""}'),
    ],
    ids=lambda text: text[:20],
)
def test_what_cannot_be_read_is_a_new_installation(kept: str) -> None:
    assert reference_timer.started(kept, 5.0) == Device(5.0)


def test_the_reference_stands_alone() -> None:
    """In under 225 lines."""
    imported = [
        alias.name
        for node in ast.walk(ast.parse(_SOURCE))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    ]
    assert imported == ["dataclasses", "json"]
    assert len(_SOURCE.splitlines()) < 225
