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
from mf_aggregators.tff import declared_participation


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
    declared = declared_participation.DeclaredParticipation(
        *map(np.int64, declared_participation.declare(participation))
    )
    zeroing = collections.OrderedDict(norm=np.float32(1.0), inner=([np.zeros(2), declared], b"x"))
    state = _State([np.ones((2, 3)), "text"], zeroing)
    assert declared_participation.in_state(state) == (participation,)
    assert declared_participation.in_state(declared) == (participation,)
    both = _State(declared, (declared,))
    assert declared_participation.in_state(both) == (participation, participation)


def test_a_state_may_declare_nothing() -> None:
    assert declared_participation.in_state(_State([np.ones(3)], {"a": (1, 2, 3)})) == ()
    assert declared_participation.in_state((declared_participation.declare(None),)) == ()
