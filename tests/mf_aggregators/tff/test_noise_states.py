"""A state says which participation schema its noise is scaled to."""

import collections
from typing import Any, NamedTuple

import numpy as np
import pytest

from mf_aggregators.participation import (
    FixedEpochOrder,
    MinSeparation,
    Participation,
    SingleParticipation,
)
from mf_aggregators.tff import dp_query, noise_states
from mf_aggregators.tff.noise_states import NoiseState


class _State(NamedTuple):
    model: Any
    aggregator: Any


@pytest.mark.parametrize(
    "participation",
    [
        SingleParticipation(),
        FixedEpochOrder(6, 342),
        MinSeparation(1),
        MinSeparation(342, 6),
        MinSeparation(2**40, 2**40),
    ],
    ids=str,
)
def test_a_schema_is_found_wherever_it_stands_in_a_state(participation: Participation) -> None:
    noise = NoiseState(5, 0, None, None, np.array(dp_query._schema_numbers(participation)), ())
    zeroing = collections.OrderedDict(norm=np.float32(1.0), inner=([np.zeros(2), noise], b"x"))
    state = _State([np.ones((2, 3)), "text"], zeroing)
    assert noise_states.participations_in(state) == (participation,)
    assert noise_states.participations_in(noise) == (participation,)
    both = _State(noise, (noise,))
    assert noise_states.participations_in(both) == (participation, participation)
    other = noise._replace(round_index=1)
    assert noise_states.states_in(noise_states.with_state(state, other)) == [other]


def test_a_state_may_declare_nothing() -> None:
    assert noise_states.participations_in(_State([np.ones(3)], {"a": (1, 2, 3)})) == ()
