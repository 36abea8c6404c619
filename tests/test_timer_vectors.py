"""The vectors of the reference timer, against a timer that keeps its whole history."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.simulations.devices import test_reference_timer as of_timer
from tools import check_timer, timer_vectors

_TEXT = check_timer.VECTORS.read_text(encoding="utf-8")
_SEQUENCES = json.loads(_TEXT)["sequences"]
_Rule = tuple[int, float, float, float]


class _Historian:
    """A timer that decides from the list of all that it ever noted, policy by policy."""

    def __init__(self) -> None:
        self.disk: dict[str, Any] = {}
        self.copy: dict[str, Any] = {}
        self.job: dict[str, Any] | None = None
        self.rule: _Rule = (1, 0.0, 0.0, float("inf"))

    def answer(self, event: dict[str, Any]) -> dict[str, Any]:
        """The answer to an event."""
        match event["do"]:
            case "start":
                return self._start(event)
            case "back_up":
                self.copy = json.loads(json.dumps(self.disk))
            case "ask":
                return {"takes_part": self._takes_part(event)}
            case "upload":
                return self._upload()
            case "end":
                self.job = None
        return {"done": True}

    def _upload(self) -> dict[str, Any]:
        if self.job is None or self.job["is_sent"]:
            return {"refused": "job"}
        self.job["is_sent"] = True
        history = self.disk["runs"].setdefault(self.job["run"], [])
        history.append({**self.job["note"], "counts": 1})
        return {"participations": sum(each["counts"] for each in history)}

    def _start(self, event: dict[str, Any]) -> dict[str, Any]:
        policy = event["policy"]
        rounds, most = policy["rounds"], 1 if policy["most"] is None else policy["most"]
        times = policy["seconds"], policy["tolerance"]
        are_whole = all(isinstance(each, int) and each > 0 for each in (rounds, most))
        if not are_whole or min(times) < 0 or 0 < times[0] <= 2 * times[1]:
            return {"refused": "policy"}
        self.rule = (rounds, *times, float("inf") if policy["most"] is None else most)
        found = {"kept": self.disk, "backup": json.loads(json.dumps(self.copy))}
        self.disk, self.job = found.get(event["disk"], {}), None
        if self.disk.get("mark") != event["mark"]:
            self.disk = {"mark": event["mark"], "contact": event["seconds"], "runs": {}}
        return {"done": True}

    def _takes_part(self, event: dict[str, Any]) -> bool:
        history = self.disk["runs"].get(event["run"], [])
        rules = [self.rule, *(tuple(rule) for note in history for rule in note["rules"])]
        clock, round_index = event["clock"], event["round_index"]
        timed = [tolerance for _, seconds, tolerance, _ in rules if seconds]
        if any(abs(clock - event["seconds"]) > tolerance for tolerance in timed):
            return False
        note = {"round": round_index, "clock": clock, "near": min(timed, default=None), "counts": 0}
        note["rules"] = rules
        if not history and self.disk["contact"] >= event["run_began"]:
            self.disk["runs"][event["run"]] = [note]
            return False
        if self.job is not None:
            return False
        if history and timed and (history[-1]["near"] is None or history[-1]["near"] > min(timed)):
            history.append({**note, "round": history[-1]["round"]})
            return False
        for rounds, seconds, _, most in rules if history else ():
            if (
                any(round_index < each["round"] + rounds for each in history)
                or (seconds and clock < history[-1]["clock"] + seconds)
                or sum(each["counts"] for each in history) >= most
            ):
                return False
        self.job = {"run": event["run"], "note": note, "is_sent": False}
        return True


def _different(port: Callable[[], Any]) -> int:
    """How many sequences have an answer of a port that is not the one in the file."""
    found = []
    for each in _SEQUENCES:
        timer = port()
        found.append([timer.answer(event) for event in each["events"]] != each["answers"])
    return sum(found)


def test_the_file_has_the_answers_of_the_reference_by_its_recorded_seed() -> None:
    assert len(_SEQUENCES) == 500
    assert timer_vectors.text(timer_vectors.vectors(json.loads(_TEXT)["seed"])) == _TEXT


def test_a_timer_that_keeps_its_history_gives_the_same_answers() -> None:
    assert _different(_Historian) == 0


_OF_THE_SERVER = ("late uploads are summed", "an upload is summed twice")
_MORE = {
    "the looser limit": ("min(limits, default=None)", "other.most"),
    "the looser clock": ("min(tolerances, default=0.0)", "max(tolerances, default=0.0)"),
    "any clock is right": ("own.tolerance <= policy.tolerance", "True"),
    "a job is forgotten": ("        if self.job:\n", "        if False:\n"),
}
_MUTANTS = {name: each[1] for name, each in of_timer._MUTANTS.items()} | {
    name: (each,) for name, each in _MORE.items()
}


@pytest.mark.parametrize("name", sorted(set(_MUTANTS) - set(_OF_THE_SERVER)))
def test_the_vectors_find_what_may_go_wrong(name: str) -> None:
    module = of_timer._mutant(_MUTANTS[name])
    assert _different(lambda: timer_vectors.Reference(module)) > 0
