"""Timers: no client ever breaks its schema, whoever is drawn."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mf_aggregators.participation import (
    FixedEpochOrder,
    MinSeparation,
    Participation,
    SingleParticipation,
)
from simulations import participation_timers
from tests.mf_aggregators import brute_force

_SCHEMAS = st.one_of(
    st.just(SingleParticipation()),
    st.builds(FixedEpochOrder, st.integers(1, 4), st.integers(1, 4)),
    st.builds(MinSeparation, st.integers(1, 5), st.one_of(st.none(), st.integers(1, 4))),
)


@given(_SCHEMAS, st.integers(1, 9), st.integers(0, 2**32 - 1), st.floats(0.1, 1.0))
@settings(deadline=None, max_examples=200)
def test_every_history_is_a_pattern_of_the_schema(
    schema: Participation, num_rounds: int, seed: int, share: float
) -> None:
    """Rounds with any number of the eligible clients, checked against all patterns."""
    generator = np.random.default_rng(seed)
    num_clients = 6
    state = participation_timers.initial(num_clients)
    histories: list[list[int]] = [[] for _ in range(num_clients)]
    for round_index in range(num_rounds):
        eligible = participation_timers.eligible(state, schema, round_index)
        joining = np.flatnonzero(eligible & (generator.random(num_clients) < share))
        for client in joining:
            histories[client].append(round_index)
        state = participation_timers.record(state, joining, round_index)
    allowed = set(brute_force.patterns(schema, num_rounds)) | {()}
    assert {tuple(history) for history in histories} <= allowed


@given(_SCHEMAS, st.integers(1, 7))
@settings(deadline=None)
def test_no_one_is_kept_out_without_reason(schema: Participation, num_rounds: int) -> None:
    """After any pattern of the schema, a client may join iff the longer pattern is allowed."""
    allowed = set(brute_force.patterns(schema, num_rounds)) | {()}
    for pattern in allowed:
        state = participation_timers.initial(1)
        for round_index in pattern:
            state = participation_timers.record(state, np.array([0]), round_index)
        for later in range(pattern[-1] + 1 if pattern else 0, num_rounds):
            may_join = bool(participation_timers.eligible(state, schema, later)[0])
            assert may_join == ((*pattern, later) in allowed)


@pytest.mark.parametrize("separation", [2, 5])
def test_the_timer_counts_the_distance_of_rounds(separation: int) -> None:
    state = participation_timers.record(participation_timers.initial(2), np.array([0]), 3)
    schema = MinSeparation(separation)
    too_early = participation_timers.eligible(state, schema, 3 + separation - 1)
    assert list(too_early) == [False, True]
    in_time = participation_timers.eligible(state, schema, 3 + separation)
    assert list(in_time) == [True, True]


def test_states_are_values() -> None:
    before = participation_timers.initial(3)
    participation_timers.record(before, np.array([1]), 0)
    assert list(before.participations) == [0, 0, 0]
    assert list(before.last_round) == [-1, -1, -1]
