"""The participation schema that noise is scaled to, as part of the state of a learning process.

A guarantee needs the schema of the noise and the schema that clients keep to, and they are named
in two places: where the aggregator is built, and where cohorts are drawn. A learning process of
``tff.learning`` does not tell what its aggregator was built with. Its state does: the schema
stands there as numbers, so that whoever draws cohorts can compare, before the first round of a
run and whenever it is resumed.
"""

import collections
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from mf_aggregators.mechanism import Mechanism
from mf_aggregators.participation import (
    FixedEpochOrder,
    MinSeparation,
    Participation,
    SingleParticipation,
    check_extended,
)

# The numbers of schemas, from 1; 0 is none.
_KINDS = (SingleParticipation.name, FixedEpochOrder.name, MinSeparation.name)


class DeclaredParticipation(NamedTuple):
    """A schema as three int64 scalars.

    Attributes:
      schema: Which of the schemas; 0 for none.
      separation: Its separation b; 0 if it has none.
      max_participations: Its most participations k; 0 for as many as fit.
    """

    schema: Any
    separation: Any
    max_participations: Any


def declare(participation: Participation | None) -> DeclaredParticipation:
    """Returns a schema as numbers.

    Args:
      participation: The schema; None if none is declared.
    """
    if participation is None:
        return DeclaredParticipation(0, 0, 0)
    described = participation.to_dict()
    return DeclaredParticipation(
        1 + _KINDS.index(described["schema"]),
        described.get("separation", 0),
        participation.limit or 0,
    )


def in_state(state: Any) -> tuple[Participation, ...]:
    """Returns the schemas that a state declares.

    Args:
      state: The state of a learning or aggregation process: a structure of named tuples,
        mappings, tuples and lists, with values of NumPy or Python, which may hold aggregators
        of this library.

    Returns:
      The schema of each aggregator, in the order of the structure; empty if there are none.
    """
    found = (_schema(declared) for declared in _declared_in(state))
    return tuple(schema for schema in found if schema is not None)


def in_extended(
    state: Any,
    mechanism: Mechanism | Mapping[int, Participation],
    whole: Participation | None = None,
) -> Any:
    """Returns the state of a run that was extended, with the schema of its extended horizon.

    Args:
      state: As for :func:`in_state`: one that was saved under an earlier horizon, or since.
      mechanism: That of the extended horizon (``Mechanism.extended``), which knows every horizon
        before; or, for a run of another aggregator, the schema of each horizon that was extended,
        by its number of rounds. No state knows these numbers, so that they are believed here.
      whole: In the second case, the schema of the extended horizon.

    Returns:
      The state, in which nothing else is changed.

    Raises:
      TypeError: If what is given is neither a mechanism nor schemas by their rounds.
      ValueError: If the state declares another schema than these, or a horizon forbids what the
        one before it allowed.
    """
    if isinstance(mechanism, Mechanism):
        earlier: Mapping[int, Participation] = mechanism.earlier_participations
        whole = mechanism.schema
    elif isinstance(mechanism, Mapping) and whole is not None:
        earlier = mechanism
    else:
        raise TypeError(
            "mechanism must be a Mechanism, or the schema of each horizon by its number of rounds, "
            "such as {20: MinSeparation(5)}, and whole that of the extended horizon, found "
            f"{mechanism!r}."
        )
    check_extended(earlier, whole)
    known = {*earlier.values(), whole}

    def replaced(part: Any) -> Any:
        if isinstance(part, DeclaredParticipation):
            schema = _schema(part)
            if schema is None:
                return part
            if schema not in known:
                raise ValueError(
                    f"the noise of the state is scaled to another participation schema ({schema}) "
                    "than the plans of the run."
                )
            numbers = zip(declare(whole), part, strict=True)
            return DeclaredParticipation(
                *(np.asarray(number, np.asarray(old).dtype) for number, old in numbers)
            )
        if isinstance(part, Mapping):
            items = [(name, replaced(each)) for name, each in part.items()]
            is_ordered = isinstance(part, collections.OrderedDict)
            return collections.OrderedDict(items) if is_ordered else dict(items)
        if isinstance(part, tuple) and hasattr(part, "_fields"):
            return type(part)(*(replaced(each) for each in part))
        if isinstance(part, (tuple, list)):
            return type(part)(replaced(each) for each in part)
        return part

    return replaced(state)


def _declared_in(state: Any) -> Iterator[DeclaredParticipation]:
    if isinstance(state, DeclaredParticipation):
        yield state
    elif isinstance(state, Mapping):
        for each in state.values():
            yield from _declared_in(each)
    elif isinstance(state, (tuple, list)):
        for each in state:
            yield from _declared_in(each)


def _schema(declared: DeclaredParticipation) -> Participation | None:
    schema, separation, most = (int(number) for number in declared)
    if schema == 0:
        return None
    if _KINDS[schema - 1] == SingleParticipation.name:
        return SingleParticipation()
    if _KINDS[schema - 1] == FixedEpochOrder.name:
        return FixedEpochOrder(most, separation)
    return MinSeparation(separation, most or None)
