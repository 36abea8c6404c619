"""Ledgers against all patterns of a few rounds, and the claims that follow from them."""

import dataclasses
import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mf_aggregators.kernel import claim, ledger
from mf_aggregators.kernel.claim import Assumption, Claim, Pattern
from mf_aggregators.kernel.ledger import ObservedParticipation, TimedRounds
from mf_aggregators.kernel.losses import BallsInBins, Poisson
from mf_aggregators.kernel.numbers import NotProved
from mf_aggregators.kernel.sensitivity import Schema, Unit
from mf_aggregators.privacy import guarantees
from tests.examples import examples
from tests.mf_aggregators.random_recursions import banded_rows
from tests.refusals import refuses


def test_participations_are_measured() -> None:
    measured = ObservedParticipation.of([[0, 5, 9], [], [2], [1, 8]], 10)
    assert measured == ObservedParticipation(
        num_rounds=10, num_clients=3, separation=4, max_participations=3, largest_separation=7
    )
    assert measured.schema == Schema(3, 4)


@pytest.mark.parametrize("rounds", [[3, 3], [5, 2], [-1, 2], [0, 10]])
def test_impossible_records_are_refused(rounds: list[int]) -> None:
    with refuses("ledger"):
        ObservedParticipation.of([rounds], 10)


def test_before_the_first_round_nobody_took_part() -> None:
    nobody = ObservedParticipation(0, 0, None, 0)
    assert ObservedParticipation.of([], 0) == nobody
    with refuses("num_rounds", "-1"):
        dataclasses.replace(nobody, num_rounds=-1)


_SIX_ROUNDS = 6
_SCHEMAS = [
    Schema(1, 1),
    *(Schema(k, b, is_even=True) for k in range(1, 5) for b in range(1, 7)),
    *(Schema(k, b) for k in (None, 1, 2, 3, 4) for b in range(1, 7)),
]


def _patterns(schema: Schema, num_rounds: int) -> set[tuple[int, ...]]:
    """All sets of rounds that a schema allows, by its definition."""
    found = set()
    for size in range(1, num_rounds + 1):
        for pattern in itertools.combinations(range(num_rounds), size):
            apart = [later - earlier for earlier, later in itertools.pairwise(pattern)]
            is_apart = all(
                each == schema.separation if schema.is_even else each >= schema.separation
                for each in apart
            )
            if is_apart and (schema.most is None or size <= schema.most):
                found.add(pattern)
    return found


@pytest.mark.parametrize("schema", _SCHEMAS, ids=str)
def test_a_record_keeps_a_schema_exactly_if_every_client_does(schema: Schema) -> None:
    """Every pattern of six rounds, alone and beside a client that keeps to the schema."""
    allowed = _patterns(schema, _SIX_ROUNDS)
    longest = max(allowed, key=len)
    for size in range(1, _SIX_ROUNDS + 1):
        for pattern in itertools.combinations(range(_SIX_ROUNDS), size):
            for record in ([pattern], [longest, (), pattern], [pattern, (3,), longest]):
                observed = ObservedParticipation.of(record, _SIX_ROUNDS)
                assert observed.keeps(schema) == (pattern in allowed)
                # The observed schema allows it, and no distance or count beyond it.
                own = _patterns(observed.schema, _SIX_ROUNDS)
                assert own >= {each for each in record if each}
                assert max(map(len, own)) == max(map(len, record))


_records = st.lists(
    st.lists(st.integers(0, 11), unique=True, max_size=6).map(sorted), min_size=1, max_size=6
)


@given(_records, st.sampled_from(_SCHEMAS))
@settings(deadline=None, max_examples=examples(60))
def test_clients_outside_a_schema_are_counted(record: list[list[int]], schema: Schema) -> None:
    returned = [np.array(rounds) for rounds in record if len(rounds) > 1]
    allowed = _patterns(schema, 12)
    expected = sum(tuple(rounds.tolist()) not in allowed for rounds in returned)
    apart = np.concatenate([np.empty(0, np.int64), *(np.diff(rounds) for rounds in returned)])
    sizes = np.array([len(rounds) for rounds in returned], np.int64)
    assert guarantees.num_outside_schema(schema, sizes, apart) == expected


@given(_records)
@settings(deadline=None, max_examples=examples(60))
def test_a_ledger_that_lacks_a_row_has_a_gap(record: list[list[int]]) -> None:
    rounds = [np.array(each, np.int64) for each in record]
    counts = [sum(i in each for each in record) for i in range(12)]
    assert ledger.gap(rounds, 12, counts) is None
    assert ledger.gap(rounds, 12, None) == ledger.NO_COUNTS
    more = [*counts[:3], counts[3] + 1, *counts[4:]]
    said = ledger.gap(rounds, 12, more)
    assert said is not None
    assert said.startswith("1 of its 12 rounds have other numbers")
    assert f"round 3, counted from 0, with {counts[3]} rows for {counts[3] + 1} clients" in said
    assert ledger.gap(rounds, 12, counts[:-1]) == "it has 12 rounds, and the server counted 11"
    mean = sum(counts) / 12
    for share, is_told in ((0.4, True), (0.51, False), (1.9, False), (2.1, True)):
        if mean:
            found = ledger.gap(rounds, 12, counts, mean / share)
            assert (found is not None) == is_told
            assert found is None or "rows on average" in found
    assert ledger.gap([], 0, [], 5.0) is None


def _plan(num_rounds: int = 6, taking_part: Any = None, **values: Any) -> claim.Guarantee:
    bands = np.ones((num_rounds, 2))
    bands[0, 1] = 0.0
    schema = Schema(None, 2) if taking_part is None else taking_part
    return claim.check(Claim(banded_rows(bands), schema, 4.0, 1e-5, **values))


def test_observed_rounds_are_claims_of_the_same_noise() -> None:
    plan = _plan()
    kept = ObservedParticipation.of([[0, 2, 4]], 6).guarantee(plan)
    assert kept.claim.taking_part == Schema(3, 2, is_even=True)
    assert kept.assumptions[:2] == (Assumption.COMPLETE_LEDGER, Assumption.INDEPENDENCE)
    assert kept.sigma == plan.sigma
    assert kept.epsilon == pytest.approx(plan.epsilon)
    # Two columns whose rows overlap in one: |1, 2, 1|.
    close = ObservedParticipation.of([[0, 1], [4]], 5).guarantee(plan)
    assert close.sensitivity == pytest.approx(math.sqrt(6.0))
    assert close.num_rounds == 5
    one, two = (
        claim.check(plan.without_draws(taking_part=Unit(Schema(None, 2), num_clients=number)))
        for number in (1, 2)
    )
    assert one.epsilon == plan.epsilon < two.epsilon
    nobody = ObservedParticipation(2, 0, None, 0).guarantee(plan)
    assert (nobody.epsilon, nobody.claim.taking_part) == (0.0, Pattern(()))
    with pytest.raises(NotProved):
        ObservedParticipation(7, 1, None, 1).guarantee(plan)


def test_the_worst_case_is_for_all_rounds_and_both_schemas() -> None:
    plan = _plan(taking_part=Schema(2, 3))
    for observed, expected in (
        (ObservedParticipation(3, 1, 1, 3), Schema(3, 1)),
        (ObservedParticipation(5, 1, 4, 2), Schema(2, 3)),
        (ObservedParticipation(1, 0, None, 0), Schema(2, 3)),
    ):
        found = observed.worst_case(plan)
        assert found.claim.taking_part == expected
        assert found.num_rounds == 6
        assert found.is_observed
    single = ObservedParticipation(4, 1, 2, 2).worst_case(_plan(taking_part=Schema(1, 1)))
    assert single.claim.taking_part == Schema(2, 2)
    alone = ObservedParticipation(4, 1, None, 1).worst_case(_plan(taking_part=Schema(1, 1)))
    assert alone.claim.taking_part == Schema(1, 6)
    with pytest.raises(ValueError, match="a plan is for a schema"):
        ObservedParticipation(1, 1, None, 1).worst_case(_plan(taking_part=Pattern((0,))))


def test_draws_that_were_kept_stay_amplified() -> None:
    plan = _plan(taking_part=Poisson(6, 2, 100, 5))
    kept = ObservedParticipation(3, 2, 2, 2, keeps_sampling=True)
    found = kept.guarantee(plan)
    assert (found.claim.taking_part, found.num_rounds) == (Poisson(3, 2, 100, 5), 3)
    assert found.is_amplified
    assert found.epsilon < plan.epsilon
    one = ObservedParticipation(1, 2, None, 1, keeps_sampling=True).guarantee(plan)
    assert (one.claim.taking_part, one.num_rounds) == (Poisson(2, 2, 100, 5), 1)
    for keeps in (False, None):
        broken = dataclasses.replace(kept, keeps_sampling=keeps).guarantee(plan)
        assert broken.claim.taking_part == Schema(2, 2)
        assert not broken.is_amplified
    assert kept.worst_case(plan).claim.taking_part == Schema(3, 2)
    alone = claim.check(plan.without_draws(num_rounds=4))
    assert (alone.claim.taking_part, alone.num_rounds) == (Schema(3, 2, is_even=True), 4)
    assert alone.assumptions[0] == Assumption.PARTICIPATION


def test_fewer_rounds_of_clients_who_draw_for_themselves_are_a_part_of_all() -> None:
    draws = BallsInBins(6, 2, 30, 5, 2)
    plan = _plan(taking_part=draws)
    found = ObservedParticipation(3, 2, 2, 2, keeps_sampling=True).guarantee(plan)
    assert (found.claim.taking_part, found.num_rounds) == (draws, 3)
    assert found.epsilon == plan.epsilon
    alone = claim.check(plan.without_draws(num_rounds=6))
    assert (alone.run, alone.claim.taking_part) == (None, Schema(3, 2, is_even=True))


@pytest.mark.parametrize("value", [math.nan, 2.5, True, "2", -1, np.array([1, 2])])
@pytest.mark.parametrize(
    "name", ["num_rounds", "num_clients", "separation", "max_participations", "largest_separation"]
)
def test_observed_numbers_are_integers(name: str, value: object) -> None:
    seen = ObservedParticipation(np.int64(8), 5, 2, 3, largest_separation=4)  # type: ignore[arg-type]
    assert type(seen.num_rounds) is int
    with refuses(name):
        dataclasses.replace(seen, **{name: value})  # type: ignore[arg-type]


def test_clients_that_return_have_a_separation() -> None:
    """Without one, the schema would be of a single participation."""
    with refuses("separation"):
        ObservedParticipation(8, 5, None, 3)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        # One of two would have been counted, and two of three.
        ((10, 5, 20, 2), "more rounds"),
        ((10, 5, 5, 3), "more rounds"),
        ((10, 5, 1, 11), "more rounds"),
        ((10, 5, 3, 2, None, 2), "largest_separation"),
    ],
)
def test_participations_that_do_not_fit_into_the_rounds_are_refused(
    given: tuple[Any, ...], said: str
) -> None:
    with refuses(said):
        ObservedParticipation(*given)
    assert ObservedParticipation(11, 5, 5, 3, largest_separation=5).max_participations == 3


@pytest.mark.parametrize(
    ("name", "value"), [("keeps_sampling", 1), ("conditions", b"x"), ("gap", 2.0)]
)
def test_other_attributes_have_one_type(name: str, value: object) -> None:
    with refuses(name):
        ObservedParticipation(8, 5, 2, 3, **{name: value})  # type: ignore[arg-type]


def test_who_was_drawn_is_not_described() -> None:
    seen = ObservedParticipation(8, 5, 2, 3, largest_separation=4)
    assert seen.to_dict() == {
        "num_rounds": 8,
        "num_clients": 5,
        "separation": 2,
        "largest_separation": 4,
        "max_participations": 3,
        "keeps_sampling": None,
    }
    more = dataclasses.replace(seen, conditions="if", gap="lost").to_dict()
    assert more == {**seen.to_dict(), "conditions": "if", "ledger_gap": "lost"}
    drawn = dataclasses.replace(seen, keeps_sampling=True)
    assert drawn.to_dict() == {"num_rounds": 8, "keeps_sampling": True}


_HOUR = 3600.0


@st.composite
def _times(draw: st.DrawFn, most_rounds: int = 9) -> tuple[np.ndarray, np.ndarray]:
    """Starts and ends in whole seconds, rounds that overlap among them."""
    number = draw(st.integers(1, most_rounds))
    gaps = st.lists(st.integers(0, 4), min_size=number, max_size=number)
    starts = np.cumsum(draw(gaps)).astype(float)
    ends = np.maximum.accumulate(starts + np.array(draw(gaps), float))
    return starts, ends


def _timed_patterns(starts: np.ndarray, ends: np.ndarray, seconds: float) -> list[tuple[int, ...]]:
    """All sets of rounds that one device can be summed in, by what it does at which second.

    It asks at whole seconds in the course of a round, and not sooner than its timer allows.
    """
    found: set[tuple[int, ...]] = {()}
    waiting: list[tuple[tuple[int, ...], float]] = [((), -np.inf)]
    while waiting:
        rounds, allowed = waiting.pop()
        for following in range(len(starts)):
            if following in rounds:
                continue
            for asked in np.arange(starts[following], ends[following] + 1.0):
                if asked >= allowed:
                    pattern = tuple(sorted((*rounds, following)))
                    found.add(pattern)
                    waiting.append((pattern, asked + seconds))
                    break
    return sorted(found)


@given(_times(), st.integers(1, 12), st.none() | st.integers(1, 3))
@example((np.array([0.0, 4.0, 6.0]), np.array([0.0, 4.0, 6.0])), 3, None)
@settings(deadline=None, max_examples=examples(100))
def test_times_allow_what_some_device_can_do_and_no_more(
    times: tuple[np.ndarray, np.ndarray], seconds: int, most: int | None
) -> None:
    """Against the enumeration of all that one device can do, of any round it likes first."""
    starts, ends = times
    if np.max(ends - starts) >= seconds:
        with refuses("timer_hours"):
            TimedRounds(starts, ends, seconds / _HOUR, 0.0, 0.0)
        return
    found = TimedRounds(starts, ends, seconds / _HOUR, 0.0, 0.0, most).participation()
    patterns = [
        each for each in _timed_patterns(starts, ends, seconds) if len(each) <= (most or 99)
    ]
    distances = [j - i for each in patterns for i, j in itertools.pairwise(each)]
    assert found.separation == min(distances, default=None)
    assert found.max_participations == max(map(len, patterns))
    assert (found.num_rounds, found.num_clients) == (len(starts), None)


@pytest.mark.parametrize(
    ("named", "changes"),
    [
        ("starts", {"starts": np.array([0.0, 20.0, 10.0])}),
        ("ends", {"ends": np.array([20.0, 10.0, 30.0])}),
        ("ends", {"ends": np.array([10.0, 20.0])}),
        ("ends", {"ends": np.array([10.0, 20.0, np.nan])}),
        ("ends", {"ends": np.array([10.0, 20.0, 4.1e9])}),
        ("round 2", {"ends": np.array([10.0, 20.0, 20.0]), "starts": np.array([0.0, 1.0, 21.0])}),
        ("starts", {"starts": np.empty(0), "ends": np.empty(0)}),
        ("timer_hours", {"timer_hours": 0.0}),
        ("timer_hours", {"timer_hours": 0.1}),
        ("timer_hours", {"timer_hours": np.inf}),
        ("timer_hours", {"ends": np.array([10.0, 20.0, 2 * _HOUR])}),
        ("clock_drift", {"clock_drift": 1.0}),
        ("clock_drift", {"clock_drift": -0.1}),
        ("clock_margin_minutes", {"clock_margin_minutes": -1.0}),
        ("clock_margin_minutes", {"clock_margin_minutes": 60.0}),
        ("max_participations", {"max_participations": 0}),
    ],
)
def test_what_is_out_of_range_is_refused(named: str, changes: dict[str, object]) -> None:
    times = TimedRounds(np.array([0.0, 10.0, 20.0]), np.array([10.0, 20.0, 30.0]), 1.0)
    with refuses(named):
        dataclasses.replace(times, **changes)  # type: ignore[arg-type]


def test_drift_and_margin_shorten_the_timer() -> None:
    """By hand: 10 hours less 1 % and 6 minutes are 9.8 hours."""
    ends = np.array([0.5, 9.7, 9.8, 20.0]) * _HOUR
    starts = np.array([0.0, 0.5, 9.7, 9.8]) * _HOUR
    with refuses("round 3", "timer_hours"):
        TimedRounds(starts, ends, 10.0, 0.01, 6.0)
    with refuses("round 1", "timer_hours"):
        TimedRounds(np.array([0.0, 1.0, 30.0]) * _HOUR, np.array([0.9, 11.0, 31.0]) * _HOUR, 10.0)
    starts[3] = 19.9 * _HOUR
    times = TimedRounds(starts, ends, 10.0, 0.01, 6.0)
    assert list(times._next_rounds()) == [2, 3, 3, 4]
    assert dataclasses.replace(times, clock_margin_minutes=5.0)._next_rounds()[0] == 3
    assert dataclasses.replace(times, clock_drift=0.009)._next_rounds()[0] == 3


def test_times_are_rounded_by_four_microseconds() -> None:
    """Towards a shorter timer, so that floats hide no participation."""
    for early, following in ((4e-6, 1), (5e-6, 2)):
        ends = np.array([1.0, _HOUR - early])
        assert (
            TimedRounds(np.array([0.0, 3590.0]), ends, 1.0, 0.0, 0.0)._next_rounds()[0] == following
        )
