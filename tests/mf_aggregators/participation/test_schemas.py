"""Participation schemas: counts, checks, descriptions."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mf_aggregators import mechanism, participation
from mf_aggregators.kernel.sensitivity import Schema
from mf_aggregators.participation import (
    BallsInBins,
    FixedEpochOrder,
    MinSeparation,
    Participation,
    PoissonSampling,
    SamplingScheme,
    SingleParticipation,
)
from tests.mf_aggregators import brute_force
from tests.refusals import refuses

_SCHEMAS = st.one_of(
    st.just(SingleParticipation()),
    st.builds(FixedEpochOrder, st.integers(1, 6), st.integers(1, 6)),
    st.builds(MinSeparation, st.integers(1, 6), st.one_of(st.none(), st.integers(1, 6))),
)


def test_schemas_are_numbers_for_the_kernel() -> None:
    assert SingleParticipation().as_schema() == Schema(1, 1)
    assert FixedEpochOrder(3, 5).as_schema() == Schema(3, 5, is_even=True)
    assert MinSeparation(5).as_schema() == Schema(None, 5)
    assert MinSeparation(5, 3).as_schema() == Schema(3, 5)
    # Of four batches in fixed order, a client is in one.
    assert BallsInBins(8, 2, 40, 10, 4).as_schema() == Schema(2, 4, is_even=True)


@given(_SCHEMAS)
def test_numbers_name_the_schema(schema: Participation) -> None:
    found = Participation.of_schema(schema.as_schema())
    assert found.as_schema() == schema.as_schema()
    # A timer that lets a client take part once, whenever it likes, is single participation.
    assert found == (SingleParticipation() if schema == MinSeparation(1, 1) else schema)


@pytest.mark.parametrize("name", sorted(participation.SCHEMES))
def test_integers_name_the_scheme(name: str) -> None:
    scheme = participation.sampling_scheme(
        name, num_rounds=8, num_bands=2, population=40, clients_per_round=10
    )
    assert SamplingScheme.of_draws(scheme.as_draws()) == scheme
    assert scheme.as_draws().name == name
    assert str(scheme) == f"{name} sampling of 10 of 40 clients"


@given(_SCHEMAS, st.integers(1, 20))
def test_numbers_of_rounds_are_those_of_the_numbers(schema: Participation, num_rounds: int) -> None:
    numbers = schema.as_schema()
    assert schema.most_participations(num_rounds) == numbers.most_in(num_rounds)
    assert schema.limit == numbers.most
    if numbers.most_in(num_rounds) > 1:
        assert schema.separation_in(num_rounds) == numbers.separation
    assert SingleParticipation().separation_in(num_rounds) == num_rounds


@pytest.mark.parametrize("other", ["single", None, PoissonSampling(4, 1, 10, 2)])
def test_what_is_no_schema_is_refused(other: Any) -> None:
    with pytest.raises(TypeError):
        MinSeparation(2).allows(other, num_rounds=4)
    with pytest.raises(TypeError):
        mechanism._check_extended({4: MinSeparation(2)}, other)


@given(_SCHEMAS)
def test_descriptions_round_trip(schema: Participation) -> None:
    assert Participation.from_dict(schema.to_dict()) == schema


def test_separation_counts_the_distance_of_rounds() -> None:
    # |i - j| >= b: with b = 1 there is no limit, with b = 2 no two adjacent rounds.
    assert MinSeparation(1).most_participations(5) == 5
    assert MinSeparation(2).most_participations(5) == 3


@pytest.mark.parametrize(
    "description",
    [{}, {"schema": "often"}, {"schema": "min_sep"}, {"schema": "single", "separation": 2}],
)
def test_bad_descriptions_are_refused(description: dict[str, object]) -> None:
    with refuses("schema"):
        Participation.from_dict(description)


@given(_SCHEMAS, st.integers(1, 9))
def test_solvers_refuse_more_participations_than_fit(
    schema: Participation, num_rounds: int
) -> None:
    named = 1
    if isinstance(schema, FixedEpochOrder):
        named = schema.epochs
    elif isinstance(schema, MinSeparation):
        named = schema.max_participations or 1
    largest = max(len(pattern) for pattern in brute_force.patterns(schema, num_rounds))
    if named > largest:
        with refuses(str(largest)):
            participation.check(schema, num_rounds)
    else:
        assert participation.check(schema, num_rounds) == schema


@given(
    schema=st.builds(MinSeparation, st.integers(1, 9), st.none() | st.integers(1, 4))
    | st.just(SingleParticipation()),
    num_rounds=st.integers(1, 12),
    clients_per_round=st.integers(1, 5),
)
def test_the_smallest_population_is_the_first_that_is_accepted(
    schema: Participation, num_rounds: int, clients_per_round: int
) -> None:
    accepted = []
    for population in range(1, 80):
        try:
            schema.check_population(num_rounds, population, clients_per_round)
        except ValueError:
            continue
        accepted.append(population)
    smallest = schema.smallest_population(num_rounds, clients_per_round)
    assert accepted == list(range(smallest, 80))
