"""All mechanisms: the library's own, and those that other packages register.

An entry says which options a mechanism takes, how its factorization is made, and what a plan
evaluates of it. Another package registers an :class:`Entry` by an entry point of the group
``mf_aggregators.mechanisms``, whose name is the mechanism's. The library does not rely on what the
package says of sensitivity or error: what it makes becomes a factorization of the library's
classes, or is checked row by row (:mod:`mf_aggregators.catalogue.third_party`).
"""

import functools
import importlib.metadata
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

from mf_aggregators import validation
from mf_aggregators.arrays import FloatArray
from mf_aggregators.catalogue import third_party
from mf_aggregators.catalogue.built_in import ENTRIES
from mf_aggregators.catalogue.entry import (
    Entry,
    ErrorName,
    MechanismError,
    Option,
    OptionError,
    Request,
    SamplingSetting,
    TimerSetting,
    Variant,
)
from mf_aggregators.errors import NotInstalledError
from mf_aggregators.factorizations.factorization import Factorization

__all__ = [
    "GROUP",
    "Entry",
    "ErrorName",
    "MechanismError",
    "MechanismWarning",
    "Option",
    "OptionError",
    "Request",
    "SamplingSetting",
    "TimerSetting",
    "Variant",
    "check_own",
    "entries",
    "entry",
    "load",
    "options",
    "sensitivity_computed_by",
]

# The group of entry points that other packages register mechanisms in.
GROUP = "mf_aggregators.mechanisms"

_NAME = re.compile(r"[a-z][a-z0-9_]*")


class MechanismWarning(UserWarning):
    """A mechanism of another package cannot be offered; the message says why."""


@functools.cache
def entries() -> Mapping[str, Entry]:
    """Returns all mechanisms by name: the library's own, then others in the order of names.

    Warns:
      MechanismWarning: If one of another package is left out, and why.
    """
    found = {each.name: each for each in ENTRIES}
    entry_points = importlib.metadata.entry_points(group=GROUP)
    for entry_point in sorted(entry_points, key=lambda each: (each.name, each.value)):
        try:
            made = _loaded(entry_point)
            if made.name in found:
                raise ValueError(f"there is a mechanism {made.name} already")
            _check_options(made, found.values())
        except Exception as error:
            # Whatever is wrong with another package, the library's own mechanisms remain.
            warnings.warn(
                f"the mechanism {entry_point.name} of {entry_point.value} is left out: "
                f"{str(error).rstrip('.') or type(error).__name__}.",
                MechanismWarning,
                stacklevel=2,
            )
            continue
        found[made.name] = made
    return MappingProxyType(found)


def entry(name: str) -> Entry:
    """Returns the entry of a mechanism.

    Args:
      name: As ``--mechanism`` spells it.

    Returns:
      The entry.

    Raises:
      NotInstalledError: If there is none of this name, a ValueError; the message has those that
        there are.
    """
    known = entries()
    if name not in known:
        raise NotInstalledError(
            f"the mechanism {name!r} is not one of {', '.join(known)}: install the package that "
            f"registers it as one of {GROUP}."
        )
    return known[name]


def load(
    name: str, num_rounds: int, arrays: Mapping[str, FloatArray], **attributes: Any
) -> Factorization:
    """Rebuilds a factorization from what a checkpoint holds.

    One that another package made of a class of the library is loaded without that package.

    Args:
      name: Its mechanism.
      num_rounds: The number of rounds n.
      arrays: Its arrays by name.
      **attributes: ``participation``, ``optimality_gap`` and ``parameters``.

    Returns:
      The factorization.

    Raises:
      ValueError: If there is no such mechanism, or the arrays are not what it promises.
    """
    own = {each.name: each for each in ENTRIES}
    if name in own:
        made = own[name].factorization
        assert made is not None
        return made.from_arrays(num_rounds, arrays, **attributes)
    structure = own.get(str(attributes["parameters"].get("structure")))
    if structure is not None and structure.factorization is not None:
        return structure.factorization.from_arrays(
            num_rounds, arrays, parameters=attributes["parameters"]
        ).relabelled(name)
    found = entry(name)
    if found.factorization is None:
        raise ValueError(f"its arrays are of no class that {name} has")
    assert isinstance(found, third_party.CheckedEntry)
    return found.checked(
        found.factorization.from_arrays(num_rounds, arrays, parameters=attributes["parameters"])
    )


def check_own(factorization: Any) -> Factorization:
    """Returns a factorization of the library's own classes, or one that was recomputed by them.

    Args:
      factorization: What was given for a factorization.

    Raises:
      TypeError: If it is of another class, or its methods were replaced.
    """
    own = {each.factorization for each in ENTRIES} | {third_party.CheckedFactorization}
    kind = type(factorization)
    if kind not in own:
        raise TypeError(
            "factorization must be one of mf_aggregators.factorizations, and of no subclass, found "
            f"{validation.shown(factorization)} ({kind.__module__}.{kind.__qualname__}). Give a "
            "matrix of your own as data, factorizations.BandedFactorization(bands), or by an entry "
            "of docs/other-packages.md; read a checkpoint with mf_aggregators.checkpoints.load."
        )
    assert isinstance(factorization, Factorization)
    replaced = [
        name
        for name in vars(factorization)
        if callable(getattr(kind, name, None)) or isinstance(getattr(kind, name, None), property)
    ]
    if replaced:
        raise TypeError(
            f"{replaced[0]} of the factorization was replaced: its guarantee would be stated for "
            "another matrix. Make the factorization anew."
        )
    return factorization


def sensitivity_computed_by(factorization: Factorization) -> Literal["library"] | None:
    """Returns "library" for a matrix of another package's mechanism; None for the library's own.

    Args:
      factorization: What a mechanism made.
    """
    return None if factorization.mechanism in {each.name for each in ENTRIES} else "library"


def options(names: Sequence[str]) -> Mapping[str, Sequence[tuple[str, Option]]]:
    """Returns the options of several mechanisms.

    Args:
      names: The mechanisms.

    Returns:
      By the name of each option the mechanisms that take it, each with what it is for them.
    """
    found: dict[str, list[tuple[str, Option]]] = {}
    for name in names:
        for option in entry(name).options:
            found.setdefault(option.name, []).append((name, option))
    return found


def _loaded(entry_point: importlib.metadata.EntryPoint) -> Entry:
    loaded = entry_point.load()
    made = loaded() if isinstance(loaded, type) else loaded
    if not isinstance(made, Entry):
        raise TypeError("it is no mf_aggregators.catalogue.Entry")
    if made.name != entry_point.name or not _NAME.fullmatch(made.name):
        raise ValueError(
            f"its name is {made.name!r}, which must be that of the entry point, in lower-case "
            "letters, digits and underscores"
        )
    return third_party.CheckedEntry(made, {each.factorization for each in ENTRIES})


def _check_options(made: Entry, others: Iterable[Entry]) -> None:
    """Refuses a flag that means something else for another mechanism."""
    for option in made.options:
        if not _NAME.fullmatch(option.name):
            raise ValueError(f"its option {option.name!r} is no name of a flag")
        for other in others:
            for theirs in other.options:
                if theirs.name == option.name and (theirs.kind, theirs.choices) != (
                    option.kind,
                    option.choices,
                ):
                    raise ValueError(f"its option {option.name} is another one for {other.name}")
