"""The library's mechanisms by name.

An entry says which options a mechanism takes, how its factorization is made, and what a plan
evaluates of it.
"""

import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from mf_aggregators.catalogue.built_in import ENTRIES
from mf_aggregators.catalogue.entry import (
    Entry,
    ErrorName,
    Option,
    OptionError,
    Request,
    SamplingSetting,
    TimerSetting,
    Variant,
)
from mf_aggregators.factorizations.factorization import Factorization
from mf_aggregators.kernel import numbers
from mf_aggregators.kernel.numbers import FloatArray

__all__ = [
    "Entry",
    "ErrorName",
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
]


@functools.cache
def entries() -> Mapping[str, Entry]:
    """Returns all mechanisms by name, in the order in which commands name them."""
    return MappingProxyType({each.name: each for each in ENTRIES})


def entry(name: str) -> Entry:
    """Returns the entry of a mechanism.

    Args:
      name: As ``--mechanism`` spells it.

    Returns:
      The entry.

    Raises:
      ValueError: If there is none of this name; the message has those that there are.
    """
    known = entries()
    if name not in known:
        raise ValueError(
            f"the mechanism {name!r} is not one of {', '.join(known)}: give a matrix of another "
            "package as data, factorizations.from_matrix(C)."
        )
    return known[name]


def load(
    name: str, num_rounds: int, arrays: Mapping[str, FloatArray], **attributes: Any
) -> Factorization:
    """Rebuilds a factorization from what a checkpoint holds.

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
    if name not in entries():
        # Earlier versions let other packages name a matrix; its parameters say its structure.
        name = str(attributes["parameters"].get("structure", name))
    return entry(name).factorization.from_arrays(num_rounds, arrays, **attributes)


def check_own(factorization: Any) -> Factorization:
    """Returns a factorization of exactly one of the library's own classes.

    Args:
      factorization: What was given for a factorization.

    Raises:
      TypeError: If it is of another class, or its methods were replaced.
    """
    own = {each.factorization for each in ENTRIES}
    kind = type(factorization)
    if kind not in own:
        raise TypeError(
            "factorization must be one of mf_aggregators.factorizations, and of no subclass, found "
            f"{numbers.shown(factorization)} ({kind.__module__}.{kind.__qualname__}). Give a "
            "matrix of your own as data, factorizations.from_matrix(C); read a checkpoint with "
            "mf_aggregators.checkpoints.load."
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
