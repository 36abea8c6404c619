"""Other runs on the same clients, as a JSON file: pairs, events of dp-accounting, and statements.

The file is an object with ``format`` (:data:`FORMAT`), ``unit`` ("client") and ``adjacency``
("zero-out" or "add-or-remove"), for which all of it holds, and ``runs``, a list. Each run has
``name``, ``source`` and one of:

* ``epsilon`` and ``delta``: numbers; nothing else is known of the mechanism;
* ``event``: an event of dp-accounting, as an object with ``kind`` and the attributes of its class:
  ``Gaussian`` and ``Laplace`` (``noise_multiplier``), ``PoissonSampled``
  (``sampling_probability``, ``event``), ``SelfComposed`` (``event``, ``count``), ``Composed``
  (``events``), ``NoOp`` and ``NonPrivate``;
* ``statement``: the JSON file of a statement of this library, from the folder of the file. Its
  stated guarantee counts.

Other keys, keys that are there twice, and numbers of another type are refused.
"""

import dataclasses
import math
import os
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

from dp_accounting import dp_event

from mf_aggregators import accounting, inputs
from mf_aggregators.kernel import numbers
from mf_aggregators.kernel.composition import EpsilonDeltaDpEvent
from mf_aggregators.kernel.numbers import Error

# The form of the file; one that older programs cannot read has another number.
FORMAT = "mf_aggregators other runs 1"
_ADJACENCIES = ("zero-out", "add-or-remove")
# The kinds of events, with their attributes.
_KINDS: Mapping[str, tuple[type[dp_event.DpEvent], Mapping[str, str]]] = {
    "NoOp": (dp_event.NoOpDpEvent, {}),
    "NonPrivate": (dp_event.NonPrivateDpEvent, {}),
    "Gaussian": (dp_event.GaussianDpEvent, {"noise_multiplier": "number"}),
    "Laplace": (dp_event.LaplaceDpEvent, {"noise_multiplier": "number"}),
    "PoissonSampled": (
        dp_event.PoissonSampledDpEvent,
        {"sampling_probability": "number", "event": "event"},
    ),
    "SelfComposed": (dp_event.SelfComposedDpEvent, {"event": "event", "count": "integer"}),
    "Composed": (dp_event.ComposedDpEvent, {"events": "events"}),
}


class OtherRunsError(Error, ValueError):
    """A file of other runs that cannot be read; the message names the file and the reason."""


@dataclasses.dataclass(frozen=True)
class OtherRun:
    """Another run on the same clients.

    Attributes:
      name: The run, as a reader finds it, with the source of its numbers.
      event: What is composed.
      file: The statement that it follows from; None for others.
      seed_file: The file with the sampler's seed of a statement that is amplified, which need not
        be there: two runs with the same seed do not draw independently. None for others.
    """

    name: str
    event: dp_event.DpEvent
    file: pathlib.Path | None = None
    seed_file: pathlib.Path | None = None


def load(path: str | os.PathLike[str]) -> tuple[OtherRun, ...]:
    """Reads a file of other runs.

    Args:
      path: The JSON file, as the module describes it.

    Returns:
      The runs, at least one.

    Raises:
      OtherRunsError: If the file cannot be read, or anything in it is not as described.
    """
    file = pathlib.Path(path)
    try:
        contents = inputs.strict_json(file.read_text(encoding="utf-8"))
        _check_keys(contents, "the file", "format", "unit", "adjacency", "runs")
        if contents["format"] != FORMAT:
            raise ValueError(f"format must be {FORMAT!r}")
        if contents["unit"] != "client" or contents["adjacency"] not in _ADJACENCIES:
            raise ValueError(
                'only guarantees with unit "client" and adjacency "zero-out" or "add-or-remove" '
                "are composed"
            )
        runs = contents["runs"]
        if not isinstance(runs, list) or not runs:
            raise ValueError("runs must be a list with at least one run")
        found = tuple(_run(each, file.parent) for each in runs)
        if len({each["name"] for each in runs}) < len(runs):
            raise ValueError("two runs have one name")
    except OSError as error:
        raise OtherRunsError(f"{error.filename} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        reason = str(error).rstrip(".")
        raise OtherRunsError(f"{file} is no file of other runs: {reason}.") from error
    return found


def composed(
    own: dp_event.DpEvent, others: Iterable[dp_event.DpEvent], delta: float
) -> tuple[float, float]:
    """Returns the epsilon and the delta of a run and others together, for clients in all of them.

    Args:
      own: The run.
      others: The others.
      delta: That of the run.

    Returns:
      Epsilon, infinity if there is too little noise for any, at the sum of delta and of the deltas
      of pairs among the others: no epsilon holds at a smaller delta than theirs.

    Raises:
      ValueError: If an event cannot be composed, or the deltas add up to 1 or more.
    """
    events = [own, *others]
    delta = numbers.delta(math.fsum([delta, *map(_delta_of, events)]))
    try:
        return accounting.composed_epsilon(events, delta), delta
    except accounting.TailError:
        return math.inf, delta


def _delta_of(event: dp_event.DpEvent) -> float:
    """The sum of the deltas of pairs in an event."""
    if isinstance(event, EpsilonDeltaDpEvent):
        return event.delta
    if isinstance(event, dp_event.ComposedDpEvent):
        return math.fsum(map(_delta_of, event.events))
    if isinstance(event, dp_event.SelfComposedDpEvent):
        return int(event.count) * _delta_of(event.event)
    return 0.0


def _run(given: Any, folder: pathlib.Path) -> OtherRun:
    keys = [("epsilon", "delta"), ("event",), ("statement",)]
    fitting = [each for each in keys if isinstance(given, dict) and each[0] in given]
    if len(fitting) != 1:
        raise ValueError("each run is an object with epsilon and delta, or event, or statement")
    _check_keys(given, "a run", "name", "source", *fitting[0])
    for name in ("name", "source"):
        text = given[name]
        if not isinstance(text, str) or not text.strip() or not text.isprintable():
            raise ValueError(f"the {name} of a run must be words in one line")
    file = seed_file = None
    if "event" in given:
        event = _event(given["event"])
    elif "statement" in given:
        file = folder / _checked(given["statement"], str, "statement")
        event, seed_file = _event_of_statement(file)
    else:
        event = EpsilonDeltaDpEvent(_number(given, "epsilon"), _number(given, "delta"))
    return OtherRun(f"{given['name']} ({given['source']})", event, file, seed_file)


def _event(given: Any) -> dp_event.DpEvent:
    kind = given.get("kind") if isinstance(given, dict) else None
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ValueError(f"an event is an object whose kind is one of {', '.join(_KINDS)}")
    made, attributes = _KINDS[kind]
    _check_keys(given, f"an event {kind}", "kind", *attributes)
    values: dict[str, Any] = {}
    for name, form in attributes.items():
        if form == "number":
            values[name] = _number(given, name)
        elif form == "integer":
            values[name] = numbers.positive_integer(_checked(given[name], int, name), name)
        elif form == "event":
            values[name] = _event(given[name])
        else:
            values[name] = [_event(each) for each in _checked(given[name], list, name)]
    event = made(**values)
    if not attributes.keys() & {"count", "events"}:
        # Refuses numbers out of range, and samples of anything but noise.
        accounting.composed_epsilon([event], 0.5)
    return event


def _event_of_statement(file: pathlib.Path) -> tuple[dp_event.DpEvent, pathlib.Path | None]:
    """The stated guarantee of a statement, and the file with its sampler's seed.

    The guarantee is a Gaussian mechanism, or a pair if it is amplified.
    """
    from mf_aggregators.privacy import statement_file

    document = statement_file.read(file)
    stated = document[document["headline"]["guarantee"]]
    if not document["is_private"] or stated["epsilon"] is None:
        raise ValueError(f"{file} states no guarantee")
    if stated["sampling"] is not None:
        pair = EpsilonDeltaDpEvent(float(stated["epsilon"]), float(stated["delta"]))
        # All that is secret in the files of one statement has one key.
        keys = {file.parent / key for key in document["key_files"].values()}
        return pair, next(iter(keys), None)
    return dp_event.GaussianDpEvent(float(stated["noise_multiplier"])), None


def _number(given: Mapping[str, Any], name: str) -> float:
    value = given[name]
    if type(value) not in (int, float):
        raise ValueError(f"{name} must be a number, found {numbers.shown(value)}")
    return numbers.finite_number(value, name)


def _checked(value: Any, kind: type, name: str) -> Any:
    if type(value) is not kind:
        raise ValueError(f"{name} is of another type: {numbers.shown(value)}")
    return value


def _check_keys(given: Any, name: str, *keys: str) -> None:
    if not isinstance(given, dict) or given.keys() != set(keys):
        raise ValueError(f"{name} must be an object with the keys {', '.join(keys)}, and no others")
