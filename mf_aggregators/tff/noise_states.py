"""The state of a stream of noise rows, and how to find it in the state of a process.

The state tells the participation schema that the noise is scaled to. A guarantee needs the schema
of the noise and the schema that clients keep to, and they are named in two places: where the
aggregator is built, and where cohorts are drawn. A learning process of ``tff.learning`` does not
tell what its aggregator was built with. So the schema stands in the state as numbers: whoever draws
cohorts can compare, before the first round of a run and whenever it is resumed.
"""

import collections
from collections.abc import Mapping
from typing import Any, NamedTuple

from mf_aggregators.participation import (
    FixedEpochOrder,
    MinSeparation,
    Participation,
    SingleParticipation,
)

# Names of the schemas. Their numbers count from 1.
SCHEMA_KINDS = (SingleParticipation.name, FixedEpochOrder.name, MinSeparation.name)


class NoiseState(NamedTuple):
    """Where a stream of noise rows stands, as tensors.

    It prints neither its seed nor its history. TFF keeps the class wherever a state is nested, so
    that neither of them shows up in a notebook, a log or a traceback.

    Attributes:
      fingerprint: int64 scalar: tells the mechanism, options and version that made the state.
      round_index: int64 scalar: the round that the next row is for, from 0.
      seed: (2,) int64: the stream's secret.
      stream: (2,) int64: the stream's name, which is not secret.
      schema: (3,) int64: the participation schema that the noise is scaled to: its kind in
        SCHEMA_KINDS from 1, its separation b (0 if it has none) and its most participations k (0
        for as many as fit).
      history: For each segment of a row, what the noising matrix needs of earlier rounds and
        cannot draw again and keeps in no file: (tiles, number, width) int32 rows, oldest first, or
        float64 state vectors.
    """

    fingerprint: Any
    round_index: Any
    seed: Any
    stream: Any
    schema: Any
    history: Any

    def __repr__(self) -> str:
        """Returns a text without the secrets that noise could be subtracted with."""
        return (
            f"{type(self).__name__}(fingerprint={self.fingerprint}, "
            f"round_index={self.round_index}, seed=<secret>, stream={self.stream}, "
            f"schema={self.schema}, history=<secret>)"
        )


def states_in(state: Any) -> list[NoiseState]:
    """Returns the states of noise streams in a state.

    Use it when you ask which round a saved state is in.

    Args:
      state: The state of a learning or aggregation process: a structure of named tuples,
        mappings, tuples and lists, with values of NumPy or Python, which may hold aggregators
        of this library.

    Returns:
      That of each aggregator, in the order of the structure.

    Example:
      >>> import numpy as np
      >>> import tensorflow_federated as tff
      >>> import mf_aggregators as mfa
      >>> from mf_aggregators.tff import noise_states
      >>> once = mfa.participation.SingleParticipation()
      >>> mechanism = mfa.Mechanism(mfa.factorizations.identity(1), once, 1.0)
      >>> aggregator = mfa.mf_dp_aggregator(mechanism, clip_norm=1.0, clients_per_round=2)
      >>> process = aggregator.create(tff.TensorType(np.float32, [3]))
      >>> [int(each.round_index) for each in noise_states.states_in(process.initialize())]
      [0]
    """
    if isinstance(state, NoiseState):
        return [state]
    if not isinstance(state, (Mapping, tuple, list)):
        return []
    parts = state.values() if isinstance(state, Mapping) else state
    return [found for each in parts for found in states_in(each)]


def participations_in(state: Any) -> tuple[Participation, ...]:
    """Returns the schema of each aggregator in a state, as for ``states_in``.

    Use it when you compare a saved state with a plan.

    Args:
      state: As for :func:`states_in`.

    Example:
      >>> import numpy as np
      >>> import tensorflow_federated as tff
      >>> import mf_aggregators as mfa
      >>> from mf_aggregators.tff import noise_states
      >>> once = mfa.participation.SingleParticipation()
      >>> mechanism = mfa.Mechanism(mfa.factorizations.identity(1), once, 1.0)
      >>> aggregator = mfa.mf_dp_aggregator(mechanism, clip_norm=1.0, clients_per_round=2)
      >>> process = aggregator.create(tff.TensorType(np.float32, [3]))
      >>> print(*noise_states.participations_in(process.initialize()))
      at most one participation
    """
    return tuple(_schema(*map(int, each.schema)) for each in states_in(state))


def with_state(state: Any, noise: NoiseState) -> Any:
    """Returns a state with another state of its noise stream; nothing else is changed.

    Args:
      state: As for :func:`states_in`.
      noise: The state that replaces every noise state in it.
    """
    if isinstance(state, NoiseState):
        return noise
    if isinstance(state, Mapping):
        items = [(name, with_state(each, noise)) for name, each in state.items()]
        is_ordered = isinstance(state, collections.OrderedDict)
        return collections.OrderedDict(items) if is_ordered else dict(items)
    if isinstance(state, (tuple, list)):
        parts = [with_state(each, noise) for each in state]
        return type(state)(*parts) if hasattr(state, "_fields") else type(state)(parts)
    return state


def _schema(kind: int, separation: int, most: int) -> Participation:
    if SCHEMA_KINDS[kind - 1] == SingleParticipation.name:
        return SingleParticipation()
    if SCHEMA_KINDS[kind - 1] == FixedEpochOrder.name:
        return FixedEpochOrder(most, separation)
    return MinSeparation(separation, most or None)
