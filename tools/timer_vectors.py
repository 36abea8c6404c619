r"""Writes the vectors of the reference timer: sequences of events, and the reference's answers.

  python tools/timer_vectors.py docs/timer/vectors.json

The vectors are a function of the seed, which the file records. tools/check_timer.py runs a port on
them.
"""

import json
import pathlib
import random
import sys
import types
from collections.abc import Iterator
from typing import TypeAlias, TypeVar

from mf_aggregators import inputs
from simulations.devices import reference_timer

SEED, SEQUENCES = 20_261_129, 500
_STEPS = 11
_Value = TypeVar("_Value")
_Event: TypeAlias = dict[str, object]
_KINDS = (*["part"] * 10, *["ask"] * 5, *["start"] * 4, "upload", "end", "copy")
_DAMAGED = '{"contact": 0.0, "entries": ['


class Reference:
    """Device of the reference timer that answers events.

    Attributes:
      module: The module of the timer.
    """

    def __init__(self, module: types.ModuleType = reference_timer) -> None:
        """Creates a device that has not started.

        Args:
          module: The module of the timer.
        """
        self.module = module
        self._device = module.Device(0.0)
        self._policy = module.Policy()
        self._disk: str | None = None
        self._backup: str | None = None

    def answer(self, event: _Event) -> _Event:
        """Returns the answer to an event, as docs/devices.md lists them.

        Args:
          event: The event.
        """
        values = {name: value for name, value in event.items() if name != "do"}
        found: _Event = getattr(self, f"_{event['do']}")(**values)
        return found

    def _start(self, disk: str, seconds: float, mark: str, policy: _Event) -> _Event:
        try:
            self._policy = self.module.Policy(**policy)
        except ValueError:
            return {"refused": "policy"}
        texts = {"kept": self._disk, "empty": None, "backup": self._backup, "damaged": _DAMAGED}
        self._device = self.module.started(texts[disk], seconds, mark)
        self._disk = self._device.kept()
        return {"done": True}

    def _back_up(self) -> _Event:
        self._backup = self._disk
        return {"done": True}

    def _ask(self, clock: float, **request: object) -> _Event:
        asked = self.module.Request(**request)
        before, self._device = self._device, self._device.ask(asked, self._policy, clock)
        self._disk = self._device.kept()
        return {"takes_part": self._device.job is not before.job}

    def _upload(self) -> _Event:
        try:
            self._device = self._device.upload()
        except ValueError:
            return {"refused": "job"}
        self._disk = self._device.kept()
        entry = self._device.entry(self._device.job.run)
        return {"participations": 0 if entry is None else entry.participations}

    def _end(self, acknowledged: bool) -> _Event:
        self._device = self._device.end(acknowledged)
        return {"done": True}


class _Drawn:
    """Draws random events near timers' limits, by random() only, which all Pythons have alike."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def choice(self, *values: _Value) -> _Value:
        return values[int(self._random.random() * len(values))]

    def policy(self) -> _Event:
        """Draws a policy that the timer accepts."""
        seconds = self.choice(0, 0, 3, 5.5, 8)
        return {
            "rounds": self.choice(1, 2, 2, 3),
            "seconds": seconds,
            "tolerance": self.choice(0, 0.5, 1, 1.25) if seconds else 0,
            "most": self.choice(None, None, 1, 2, 3),
        }

    def refused_policy(self) -> _Event:
        """Draws a policy with one fault, which the timer refuses."""
        faults = (("rounds", 0), ("rounds", 1.5), ("rounds", None), ("most", 0), ("most", -2))
        more = (("most", "2"), ("seconds", -1), ("tolerance", -0.5), ("tolerance", 4))
        name, value = self.choice(*faults, *more)
        return {**self.policy(), "seconds": 8, "tolerance": 1, name: value}

    def sequence(self) -> Iterator[_Event]:
        """Yields the events of one random sequence."""
        versions = [self.policy(), self.policy()]
        began = self.choice(1, 1, 1, 1, 20)
        second, rounds, marks, has_backup = 0.0, {"a": 0, "b": 0}, 0, False
        yield self._start("empty", second, marks, versions[0])
        for number in range(_STEPS):
            second += self.choice(0, 0.5, 1, 2, 3, 4)
            step = self.choice(*_KINDS)
            if step == "start":
                disk = self.choice("kept", "kept", "kept", "kept", "empty", "damaged", "backup")
                if disk == "backup" and not has_backup:
                    disk = "kept"
                # A backup may be restored to another installation, with a new mark, or to its own.
                marks += disk == "empty" or (disk == "backup" and self.choice(True, True, False))
                is_refused = self.choice(*[False] * 9, True)
                policy = self.refused_policy() if is_refused else self.choice(*versions)
                yield self._start(disk, second, marks, policy)
            if step == "copy":
                has_backup = True
                yield {"do": "back_up"}
            if step in ("ask", "part"):
                run = self.choice("a", "a", "a", "b")
                rounds[run] += self.choice(0, 1, 1, 1, 2)
                request = {"run": run, "round_index": rounds[run], "seconds": second}
                clock = second + self.choice(0, 0, 0, 0, 0.5, -0.5, 1.25, -1, -6, 6)
                request |= {"run_began": began, "token": f"t{number}", "clock": clock}
                yield {"do": "ask", **request}
            if step in ("upload", "part"):
                yield {"do": "upload"}
            if step in ("end", "part"):
                yield {"do": "end", "acknowledged": self.choice(True, False)}

    @staticmethod
    def _start(disk: str, seconds: float, marks: int, policy: _Event) -> _Event:
        start = {"do": "start", "disk": disk, "seconds": seconds, "mark": f"m{marks}"}
        return start | {"policy": policy}


def vectors(seed: int = SEED, sequences: int = SEQUENCES) -> _Event:
    """Returns sequences of events with the reference's answers, JSON-able.

    Args:
      seed: The seed that events are drawn from.
      sequences: The number of sequences.
    """
    drawn, found = _Drawn(seed), []
    for _ in range(sequences):
        events, port = list(drawn.sequence()), Reference()
        found.append({"events": events, "answers": [port.answer(each) for each in events]})
    return {"seed": seed, "program": "tools/timer_vectors.py", "sequences": found}


def text(found: _Event) -> str:
    """Returns the text of the file of vectors, with a line for each sequence.

    Args:
      found: The result of :func:`vectors`.
    """
    head = json.dumps({name: found[name] for name in ("seed", "program")})[:-1]
    lines = ",\n".join(
        json.dumps(each, separators=(",", ":")) for each in inputs.part(found, list, "sequences")
    )
    return f'{head}, "sequences": [\n{lines}\n]}}\n'


if __name__ == "__main__":
    pathlib.Path(sys.argv[1]).write_text(text(vectors()), encoding="utf-8")
