"""Forgeries of statements: each change of data or text is found, or is of what a person said.

  python -m tests.simulations.runs.forger 10000

Seven statements are written, and then a leaf, a key, an order or a line of data or text is altered,
dropped, added, doubled or moved, with the text made anew from the data. ``mf-report --verify`` has
to refuse the forgery, to name the difference, or to list the altered words among those that nothing
can check.
"""

import collections
import contextlib
import copy
import json
import pathlib
import random
import sys
import tempfile
import unittest.mock
from collections.abc import Callable, Iterator
from typing import Any

from absl import flags

from mf_aggregators import checkpoints, factorizations
from mf_aggregators.commands import command_line, report, stated_runs
from mf_aggregators.participation import MinSeparation
from mf_aggregators.privacy import statement_file, statements
from tests import console_commands
from tests.simulations.runs.untrained_runs import (
    BANDED,
    BROKEN_PLAN,
    BY_THE_CLOCK,
    DRAWN,
    TIMERS,
    leave_run,
)

_FACTS = (
    *("--public_data=none", "--enforcement=Each device keeps a timer.", "--population=40"),
    *("--clients_per_round=1", "--clip_norm=0.5", "--responsible=Jane Doe", "--model=m 2"),
)


def _call(*arguments: str) -> None:
    assert console_commands.call("mf-report", "--delta=1e-6", *arguments).status == 0, arguments


def write_statements(folder: pathlib.Path) -> list[pathlib.Path]:
    """Writes seven statements: of a ledger, with other runs, and of five run directories.

    Args:
      folder: An empty folder.

    Returns:
      Their texts.
    """
    banded = folder / "banded"
    checkpoints.save(factorizations.banded(12, num_bands=4), banded, participation=MinSeparation(4))
    ledger, counts, others = (folder / name for name in ("a.csv", "counts.csv", "others.json"))
    ledger.write_text("".join(f"client {i % 5},{i}\n" for i in range(12)))
    counts.write_text("1\n" * 12)
    run = {"name": "a", "source": "b", "epsilon": 3, "delta": 1e-8}
    head = {"format": stated_runs.FORMAT, "unit": "client", "adjacency": "zero-out"}
    others.write_text(json.dumps({**head, "runs": [run]}))
    common = (f"--checkpoint={banded}", "--noise_multiplier=1.25", f"--ledger={ledger}", *_FACTS)
    _call(*common, f"--round_counts={counts}", f"--statement={folder / 'first.md'}")
    more = (f"--other_runs={others}", f"--evidence={counts}", "--finished=yes")
    _call(*common, *more, f"--statement={folder / 'second.md'}")
    leave_run(folder / "kept", *TIMERS, "--stop_at_epsilon=6", "--responsible=Ada")
    leave_run(folder / "broken", *BY_THE_CLOCK, cohorts=BROKEN_PLAN)
    leave_run(folder / "drawn", *DRAWN, "--noise_multiplier=0.7")
    adapts = ("--clip_norm=adaptive", "--clip_count_stddev=4", "--private_metrics")
    leave_run(folder / "adapts", *TIMERS, *adapts)
    few = ("--clients_per_round=20", "--simulated_clients=5", "--noise_multiplier=4")
    leave_run(folder / "few", *BANDED, *few)
    names = ("kept", "broken", "drawn", "adapts", "few")
    runs = [folder / name / "PRIVACY.md" for name in names]
    return [folder / "first.md", folder / "second.md", *runs]


class _Verifier:
    """Verifies statements, and makes each of them again once for all the same inputs."""

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}
        self._made_again = report._made_again

    def __call__(self, path: pathlib.Path) -> tuple[bool, dict[str, Any]]:
        """Returns whether a statement is verified, and what the report says."""
        with unittest.mock.patch.object(report, "_made_again", self._cached):
            try:
                fields, _ = report.verify(str(path))
            except (ValueError, OSError, command_line.CommandError, flags.Error) as error:
                return False, {"error": str(error)}
        return bool(fields["is_verified"]), fields

    def _cached(self, document: Any, folder: pathlib.Path) -> Any:
        observed = document["participation"]["observed"] is None
        told = [document["facts"][name]["value"] for name in (*statements.TOLD, "population")]
        plans = [document["planned"], document["earlier_plans"], document["noise"]]
        inputs = [str(folder), document["flags"], told, plans, observed, document["other_runs"]]
        key = json.dumps([*inputs, document["participation"]["num_alike_names"]])
        if key not in self._made:
            try:
                self._made[key] = self._made_again(document, folder)
            except Exception as error:
                self._made[key] = error
        if isinstance(self._made[key], Exception):
            raise self._made[key]
        return self._made[key]


def _places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yields all values inside of a document with the keys that lead to them."""
    parts: Any = ()
    if isinstance(value, dict):
        parts = value.items()
    elif isinstance(value, list):
        parts = enumerate(value)
    for key, part in parts:
        yield (*place, key), part
        yield from _places(part, (*place, key))


def _altered(value: Any, draw: random.Random) -> Any:
    """Another value in the place of one."""
    others: list[Any] = [None, "", "x", 0, 1, True, False, 1.0, [], {}]
    if isinstance(value, bool):
        others += [not value, int(value)]
    elif isinstance(value, int):
        others += [value + 1, value - 1, float(value), str(value), 10 * value]
    elif isinstance(value, str):
        digits = [place for place, each in enumerate(value) if each.isdigit()]
        others += [f"{value} ", f"{value}0", value[:-1], value.upper(), f"{value}\n# Heading"]
        for place in draw.sample(digits, min(4, len(digits))):
            digit = str((int(value[place]) + draw.randint(1, 9)) % 10)
            others += [f"{value[:place]}{digit}{value[place + 1 :]}"] * 4
    return draw.choice(others)


def _forge_document(document: Any, draw: random.Random) -> tuple[str, str] | None:
    """Changes a document in one place: returns the place, and what was done; None for nothing."""
    place, value = draw.choice(list(_places(document)))
    *outer, key = place
    inner = document
    for each in outer:
        inner = inner[each]
    kind = draw.choice(["alter", "alter", "alter", "drop", "add", "move"])
    if kind == "alter":
        inner[key] = _altered(value, draw)
    elif kind == "drop":
        del inner[key]
    elif kind == "add" and isinstance(inner, list):
        inner.insert(draw.randint(0, len(inner)), copy.deepcopy(value))
    elif kind == "add":
        inner[draw.choice(["note", f"{key} ", "epsilon2"])] = copy.deepcopy(value)
    elif isinstance(inner, list):
        draw.shuffle(inner)
    else:
        names = list(inner)
        draw.shuffle(names)
        for name in names:
            inner[name] = inner.pop(name)
    return ".".join(map(str, place)), kind


def _forge_lines(text: str, draw: random.Random) -> str:
    """Changes a text in one place."""
    lines = text.splitlines(keepends=True)
    place = draw.randrange(len(lines))
    kinds: list[Callable[[], list[str]]] = [
        lambda: lines[:place] + lines[place + 1 :],
        lambda: lines[: place + 1] + lines[place:],
        lambda: [*lines[:place], *lines[place + 1 :], lines[place]],
        lambda: [*lines[:place], f" {lines[place]}", *lines[place + 1 :]],
        lambda: [*lines[:place], f"{lines[place].rstrip()} \n", *lines[place + 1 :]],
        lambda: [*lines[:place], str(_altered(lines[place], draw)), *lines[place + 1 :]],
        lambda: ["".join(lines).replace("\n", "\r\n")],
        lambda: ["".join(lines).rstrip("\n")],
    ]
    return "".join(draw.choice(kinds)())


def forge(
    paths: list[pathlib.Path], number: int, seed: int
) -> tuple[collections.Counter[str], list[str]]:
    """Forges statements, and verifies each forgery.

    Args:
      paths: The texts of honest statements.
      number: How many forgeries.
      seed: Of the forgeries.

    Returns:
      How many were found, told or proved, and those that were not found, in words.
    """
    draw, verify, counts, missed = random.Random(seed), _Verifier(), collections.Counter[str](), []
    for path in paths:
        assert verify(path)[0], path
    for _ in range(number):
        path = draw.choice(paths)
        data = path.with_suffix(".json")
        data = data if data.exists() else path.with_name("privacy.json")
        honest, text = (each.read_bytes() for each in (data, path))
        document = json.loads(honest)
        target = draw.choice(["document"] * 8 + ["data", "text"])
        place, kind = "", "lines"
        try:
            if target == "document":
                place, kind = _forge_document(document, draw) or ("", "")
                forged = statement_file.canonical(document).encode()
                data.write_bytes(forged)
                with contextlib.suppress(Exception):
                    path.write_text(statement_file.render(document), encoding="utf-8")
            else:
                file, before = (data, honest) if target == "data" else (path, text)
                forged = _forge_lines(before.decode(), draw).encode()
                file.write_bytes(forged)
            if (data.read_bytes(), path.read_bytes()) == (honest, text):
                continue
            is_verified, fields = verify(path)
            told = fields.get("told", {})
            if not is_verified:
                counts["found"] += 1
            elif any(f"{place}.".startswith(f"{each}.") for each in told):
                counts["told by a person or a clock"] += 1
            elif place and any(place in each for each in fields["notes"]):
                counts["proved, or another program: said"] += 1
            else:
                counts["MISSED"] += 1
                missed.append(f"{path.parent.name}/{path.name}: {target} {kind} {place}")
        finally:
            data.write_bytes(honest)
            path.write_bytes(text)
    return counts, missed


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        found = forge(write_statements(pathlib.Path(directory)), int(sys.argv[1]), 0)
    print(dict(found[0]))
    print("\n".join(found[1]))
    sys.exit(1 if found[1] else 0)
