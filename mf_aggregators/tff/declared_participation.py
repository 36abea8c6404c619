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

from mf_aggregators.participation import (
    FixedEpochOrder,
    MinSeparation,
    Participation,
    SingleParticipation,
)
from mf_aggregators.tff.tensor_rows import NoiseState

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
    found = map(_schema, _instances(state, DeclaredParticipation))
    return tuple(schema for schema in found if schema is not None)


def noise_states_in(state: Any) -> list[NoiseState]:
    """Returns the states of noise streams in a state, as for :func:`in_state`."""
    return list(_instances(state, NoiseState))


def fingerprints_in(state: Any) -> list[int]:
    """Returns the fingerprint of each aggregator in a state, as for ``in_state``."""
    return [int(each.fingerprint) for each in noise_states_in(state)]


def with_noise_state(state: Any, noise: NoiseState) -> Any:
    """Returns a state with another state of its noise stream; nothing else is changed.

    Args:
      state: As for :func:`in_state`.
      noise: The state that replaces every noise state in it.
    """
    if isinstance(state, NoiseState):
        return noise
    if isinstance(state, Mapping):
        items = [(name, with_noise_state(each, noise)) for name, each in state.items()]
        is_ordered = isinstance(state, collections.OrderedDict)
        return collections.OrderedDict(items) if is_ordered else dict(items)
    if isinstance(state, (tuple, list)):
        parts = [with_noise_state(each, noise) for each in state]
        return type(state)(*parts) if hasattr(state, "_fields") else type(state)(parts)
    return state


def _instances(state: Any, kind: type) -> Iterator[Any]:
    if isinstance(state, kind):
        yield state
    elif isinstance(state, (Mapping, tuple, list)):
        for each in state.values() if isinstance(state, Mapping) else state:
            yield from _instances(each, kind)


def _schema(declared: DeclaredParticipation) -> Participation | None:
    schema, separation, most = (int(number) for number in declared)
    if schema == 0:
        return None
    if _KINDS[schema - 1] == SingleParticipation.name:
        return SingleParticipation()
    if _KINDS[schema - 1] == FixedEpochOrder.name:
        return FixedEpochOrder(most, separation)
    return MinSeparation(separation, most or None)
