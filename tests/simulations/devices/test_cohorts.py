"""Cohorts: uniform, repeatable, never bent."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mf_aggregators import random_streams
from mf_aggregators.kernel import draws_of_clients
from mf_aggregators.participation import (
    BallsInBins,
    MinSeparation,
    MinSeparationSampling,
    PoissonSampling,
    SamplingScheme,
    Shuffling,
    check_population,
)
from mf_aggregators.random_streams import Stream
from simulations.devices.device_populations import (
    DeviceTimers,
    TooFewEligibleClientsError,
    draw_cohort,
)
from simulations.training import task_parts
from tests.examples import examples
from tests.refusals import refuses


@given(
    st.integers(1, 30),
    st.integers(1, 8),
    st.integers(1, 8),
    st.integers(1, 12),
    st.integers(0, 2**32 - 1),
)
@settings(deadline=None, max_examples=examples(200))
def test_plans_found_feasible_never_run_out_of_clients(
    num_clients: int, clients_per_round: int, separation: int, num_rounds: int, seed: int
) -> None:
    """With as many participations as fit, what check_population accepts can be run to its end."""
    schema = MinSeparation(separation)
    try:
        check_population(schema, num_rounds, num_clients, clients_per_round)
    except ValueError:
        return
    timers = DeviceTimers.by_rounds(num_clients, schema)
    for round_index in range(num_rounds):
        timers.advance(round_index)
        cohort = draw_cohort(timers.eligible(), clients_per_round, seed, round_index)
        timers.record(cohort, round_index)


@given(st.integers(0, 60_000), st.floats(0.0, 1.0), st.integers(1, 40), st.integers(0, 2**64))
@settings(deadline=None, max_examples=60)
def test_a_cohort_is_a_choice_from_the_list_of_eligible_clients(
    num_clients: int, share: float, clients_per_round: int, seed: int
) -> None:
    """Whatever blocks of clients it is found in."""
    eligible = np.random.default_rng(seed).random(num_clients) < share
    candidates = np.flatnonzero(eligible)
    if len(candidates) < clients_per_round:
        with refuses(str(len(candidates)), error=TooFewEligibleClientsError):
            draw_cohort(eligible, clients_per_round, seed, 4)
        return
    chosen = random_streams.generator_of(seed, 4).choice(
        candidates, clients_per_round, replace=False
    )
    drawn = draw_cohort(eligible, clients_per_round, seed, 4)
    np.testing.assert_array_equal(drawn, np.sort(chosen))


def test_no_two_streams_of_a_seed_coincide(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that a run draws from its seed, by the functions that draw it; the task's by hand."""
    owners: dict[tuple[int, ...], str] = {}
    original, owner = random_streams.generator_of, ""

    def generator_of(seed: int, *coordinates: int) -> np.random.Generator:
        assert owners.setdefault(coordinates, owner) == owner
        return original(seed, *coordinates)

    for module in (random_streams, draws_of_clients):
        monkeypatch.setattr(module, "generator_of", generator_of)
    rounds = 12
    owner = "cohorts"
    for i in range(rounds):
        draw_cohort(np.ones(8, bool), 3, 5, i)
    owner = "examples"
    for i in range(rounds):
        for client in ("", "a", "b", "a client of a long name"):
            task_parts.sample_order(5, i, client, 4)
    owner = "batches"
    schemes: list[SamplingScheme] = [
        PoissonSampling(rounds, 3, 60, 4),
        Shuffling(rounds, 3, 60, 4),
        MinSeparationSampling(rounds, 3, 60, 4, 5),
        BallsInBins(rounds, 3, 60, 4, 15),
    ]
    for scheme in schemes:
        sampler = scheme.sampler(5)
        for i in range(rounds):
            sampler.draw(i)
    owner = "evaluation"
    for split in range(3):
        generator_of(5, Stream.EVALUATION, split)
    owner = "devices"
    for kind in (0, 1):
        for i in range(rounds):
            generator_of(5, Stream.DEVICES, kind, i)
    states = {original(5, *each).bit_generator.random_raw(4).tobytes() for each in owners}
    assert len(states) == len(owners) > 6 * rounds
    # Only cohorts have one coordinate, and all others a stream's number before their own.
    for coordinates, name in owners.items():
        assert (len(coordinates) == 1) == (name == "cohorts")
        assert name == "cohorts" or Stream(coordinates[0]).name.lower() == name


@pytest.mark.parametrize(
    ("coordinates", "number"),
    [
        ((2,), 15069943504308478841),
        ((Stream.EXAMPLES, 4, 97), 12797478197352895144),
        ((Stream.BATCHES, 1, 2), 16331471807744859014),
        ((Stream.DEVICES, 0, 3, 1), 10234321911205539965),
    ],
)
def test_streams_are_those_that_runs_were_begun_with(coordinates: Any, number: int) -> None:
    """A run that is resumed draws what it would have drawn."""
    assert int(random_streams.generator_of(7, *coordinates).bit_generator.random_raw()) == number
