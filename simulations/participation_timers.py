"""Participation timers: which clients may join a round, under a participation schema.

Each device remembers the round of its last participation and how often it took part,
and joins only if its schema allows it; no server could break the schema by asking.
Here the memories of all devices stand in two arrays. A state is never changed: what
advances it returns a new one.
"""

import dataclasses

import numpy as np

from mf_aggregators.participation import FixedEpochOrder, Participation, SingleParticipation

_NEVER = -1


@dataclasses.dataclass(frozen=True, eq=False)
class TimerState:
    """What all devices remember.

    Attributes:
      last_round: (num_clients,) int64: the last round each client took part in, -1 if none.
      participations: (num_clients,) int64: how often each client took part.
    """

    last_round: np.ndarray
    participations: np.ndarray


def initial(num_clients: int) -> TimerState:
    """Returns the memories of clients that never took part."""
    return TimerState(
        np.full(num_clients, _NEVER, dtype=np.int64), np.zeros(num_clients, dtype=np.int64)
    )


def eligible(state: TimerState, participation: Participation, round_index: int) -> np.ndarray:
    """Returns which clients may join a round.

    Args:
      state: What the devices remember.
      participation: The schema: a client may join if the rounds it took part in,
        together with this one, are a pattern of the schema.
      round_index: The round, from 0; later than every round remembered.

    Returns:
      (num_clients,) bool.
    """
    first_time = state.participations == 0
    if isinstance(participation, SingleParticipation):
        return first_time
    distance = round_index - state.last_round
    if isinstance(participation, FixedEpochOrder):
        limit: int | None = participation.epochs
        separated = distance == participation.separation
    else:
        limit = participation.max_participations
        separated = distance >= participation.separation
    below_limit = True if limit is None else state.participations < limit
    return first_time | (separated & below_limit)


def record(state: TimerState, clients: np.ndarray, round_index: int) -> TimerState:
    """Returns the state after some clients took part in a round.

    Args:
      state: The state before.
      clients: Indices of the clients, each at most once.
      round_index: The round.

    Returns:
      The new state.
    """
    last_round, participations = state.last_round.copy(), state.participations.copy()
    last_round[clients] = round_index
    participations[clients] += 1
    return TimerState(last_round, participations)
