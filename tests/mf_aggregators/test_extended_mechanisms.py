"""Runs that are extended more than once: every horizon enters the guarantee of the whole."""

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mf_aggregators as mfa
from mf_aggregators import accounting
from mf_aggregators.factorizations import Factorization
from mf_aggregators.participation import (
    FixedEpochOrder,
    MinSeparation,
    Participation,
    SingleParticipation,
    check_extended,
)
from tests.examples import examples
from tests.mf_aggregators import brute_force
from tests.refusals import refuses

_ROUNDS = (3, 5, 8)


def _chain(first: Factorization) -> Factorization:
    return first.extended(_ROUNDS[1]).extended(_ROUNDS[2])


_CHAINS = {
    "identity": _chain(mfa.factorizations.identity(_ROUNDS[0])),
    "blt": _chain(mfa.factorizations.blt(_ROUNDS[0], 1)),
    "toeplitz": _chain(mfa.factorizations.toeplitz(_ROUNDS[0], coefficients="square_root")),
}


@st.composite
def _schemas(draw: st.DrawFn) -> Participation:
    separation, most = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    schemas: list[Participation] = [
        SingleParticipation(),
        MinSeparation(separation),
        MinSeparation(separation, most),
        MinSeparation(separation, most),
        FixedEpochOrder(most, separation),
    ]
    return draw(st.sampled_from(schemas))


def _timer_allows(schema: Participation, before: tuple[int, ...], now: int) -> bool:
    """Whether a device whose timer is set to a schema may join now, after its earlier rounds."""
    if not before:
        return True
    if isinstance(schema, SingleParticipation):
        return False
    waited = now - before[-1]
    if isinstance(schema, FixedEpochOrder):
        return waited == schema.separation and len(before) < schema.epochs
    assert isinstance(schema, MinSeparation)
    most = schema.max_participations
    return waited >= schema.separation and (most is None or len(before) < most)


def _under_timers(schemas: tuple[Participation, ...]) -> Iterator[tuple[int, ...]]:
    """All patterns of a client that keeps in every round the timer of that round's horizon."""
    found: list[tuple[int, ...]] = [()]
    for now in range(_ROUNDS[-1]):
        schema = next(each for each, rounds in zip(schemas, _ROUNDS, strict=True) if now < rounds)
        found += [(*each, now) for each in found if _timer_allows(schema, each, now)]
    return (pattern for pattern in found if pattern)


def _reached(strategy: np.ndarray, patterns: Iterator[tuple[int, ...]]) -> float:
    """What a client can change of C x: C has no negative entries, so by ones."""
    return max(float(np.linalg.norm(strategy[:, pattern].sum(axis=1))) for pattern in patterns)


def _extended(whole: Factorization, *schemas: Participation) -> mfa.Mechanism:
    """A run that had a schema in each horizon, the first with noise multiplier 1.3."""
    mechanism = mfa.Mechanism(whole.at_horizon(whole.horizons[0]), schemas[0], 1.3)
    for rounds, schema in zip(whole.horizons[1:], schemas[1:-1], strict=True):
        mechanism = mechanism.extended(rounds, schema, factorization=whole.at_horizon(rounds))
    return mechanism.extended(whole.num_rounds, schemas[-1], factorization=whole)


@settings(max_examples=examples(400), deadline=None)
@given(st.sampled_from(sorted(_CHAINS)), st.tuples(_schemas(), _schemas(), _schemas()))
def test_no_client_that_kept_every_timer_has_less_than_is_stated(
    name: str, schemas: tuple[Participation, ...]
) -> None:
    whole = _CHAINS[name]
    assert whole.horizons == _ROUNDS[:2]
    is_kept = all(
        set(brute_force.patterns(before, rounds)) <= set(brute_force.patterns(after, rounds))
        for (before, after), rounds in zip(itertools.pairwise(schemas), _ROUNDS[:2], strict=True)
    )
    if not is_kept:
        with refuses("horizon"):
            _extended(whole, *schemas)
        return
    stated = _extended(whole, *schemas).noise_multiplier
    strategy = whole.strategy_matrix()
    assert strategy.min() >= 0.0
    first = _reached(
        strategy[: _ROUNDS[0], : _ROUNDS[0]], brute_force.patterns(schemas[0], _ROUNDS[0])
    )
    assert stated <= 1.3 * first / _reached(strategy, _under_timers(schemas)) * (1.0 + 1e-9)


def test_a_horizon_in_the_middle_is_not_forgotten() -> None:
    """Twice as often in the middle: a client who kept every timer has epsilon 12.47, not 9.50."""
    first, middle, last = MinSeparation(10, 2), MinSeparation(4, 10), MinSeparation(10, 6)
    made = mfa.factorizations.blt(20, 3, participation=first)
    begun = mfa.Mechanism(made, first, 1.0)
    longer = begun.extended(40, middle)
    whole = longer.factorization.extended(60, participation=last)
    strategy = whole.strategy_matrix()
    scale = np.linalg.norm(strategy[:20, [0, 10]].sum(axis=1))
    moved = np.linalg.norm(strategy[:, [0, 10, 20, 24, 28, 32, 36]].sum(axis=1))
    assert accounting.epsilon(float(scale / moved), 1e-6) == pytest.approx(12.467, abs=5e-4)
    with refuses("20", "40"):
        begun.extended(60, last, factorization=whole)
    with refuses("40", "10"):
        longer.extended(60, last, factorization=whole)
    # What allows the middle as well is accounted for.
    stated = longer.extended(60, MinSeparation(4, 10), factorization=whole)
    assert accounting.epsilon(stated.noise_multiplier, 1e-6) > 12.467
    assert stated.earlier_participations == {20: first, 40: middle}


def test_horizons_are_compared_one_after_the_other() -> None:
    """The whole allows each of both, and not what they allow together: eleven participations."""
    often, seldom = MinSeparation(1, 10), MinSeparation(10)
    with refuses("20"):
        check_extended({10: often, 20: seldom}, often)
    check_extended({10: seldom, 20: MinSeparation(2)}, MinSeparation(1))
    check_extended({}, seldom)


def test_wrong_horizons_are_refused() -> None:
    with refuses("participation", error=TypeError):
        check_extended({3: MinSeparation(2)}, "min_sep")  # type: ignore[arg-type]
