"""Windows over classes of rounds against enumerated patterns."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mf_aggregators.factorizations._patterns import PatternLayout
from mf_aggregators.participation import FixedEpochOrder
from tests.mf_aggregators import brute_force


@st.composite
def _layouts(draw: st.DrawFn) -> PatternLayout:
    num_rounds = draw(st.integers(1, 16))
    separation = draw(st.integers(1, num_rounds))
    most = draw(st.integers(1, -(-num_rounds // separation)))
    return PatternLayout(num_rounds, separation, most)


def _patterns(layout: PatternLayout) -> list[tuple[tuple[int, int], tuple[int, ...]]]:
    """Every pattern that the layout has, with its class and its number there."""
    return [
        ((row, start), tuple(int(i) for i in layout.rounds[row][layout.held[row, :, start]]))
        for row, start in zip(*np.nonzero(layout.windows), strict=True)
    ]


def _maximal_patterns(layout: PatternLayout) -> list[tuple[int, ...]]:
    """Straight from the definition: no pattern of the schema holds one of these and more."""
    schema = FixedEpochOrder(layout.most, layout.separation)
    found = [set(pattern) for pattern in brute_force.patterns(schema, layout.num_rounds)]
    return [
        tuple(sorted(pattern)) for pattern in found if not any(pattern < other for other in found)
    ]


@pytest.mark.parametrize("num_rounds", range(1, 11))
def test_the_windows_are_the_maximal_patterns(num_rounds: int) -> None:
    for separation in range(1, num_rounds + 1):
        for most in range(1, -(-num_rounds // separation) + 1):
            layout = PatternLayout(num_rounds, separation, most)
            held = sorted(pattern for _, pattern in _patterns(layout))
            assert held == sorted(_maximal_patterns(layout)), layout


@given(_layouts(), st.integers(0, 2**32 - 1))
@settings(deadline=None)
def test_sums_run_over_the_rounds_of_each_pattern(layout: PatternLayout, seed: int) -> None:
    generator = np.random.default_rng(seed)
    values = generator.normal(size=layout.num_rounds)
    entries = generator.normal(size=(layout.num_rounds, layout.num_rounds))
    blocks = np.zeros((layout.separation, layout.positions, layout.positions))
    for row in range(layout.separation):
        rounds = layout.rounds[row][layout.exists[row]]
        blocks[row, : len(rounds), : len(rounds)] = entries[np.ix_(rounds, rounds)]
    sums = layout.sums(layout.by_position(values))
    pair_sums = layout.pair_sums(blocks)
    for window, pattern in _patterns(layout):
        assert sums[window] == pytest.approx(np.sum(values[list(pattern)]), abs=1e-12)
        expected = np.sum(entries[np.ix_(pattern, pattern)])
        assert pair_sums[window] == pytest.approx(expected, abs=1e-12)
    assert not np.any(sums[~layout.windows])


@given(_layouts(), st.integers(0, 2**32 - 1))
@settings(deadline=None)
def test_covers_add_up_the_patterns_that_hold_a_round_or_a_pair(
    layout: PatternLayout, seed: int
) -> None:
    weights = np.random.default_rng(seed).uniform(size=layout.windows.shape)
    weights[~layout.windows] = 0.0
    single = np.zeros(layout.num_rounds)
    pairs = np.zeros((layout.num_rounds, layout.num_rounds))
    for window, pattern in _patterns(layout):
        single[list(pattern)] += weights[window]
        pairs[np.ix_(pattern, pattern)] += weights[window]
    np.testing.assert_allclose(layout.by_round(layout.cover(weights)), single, atol=1e-12)
    of_pairs = layout.cover_pairs(weights)
    for row in range(layout.separation):
        rounds = layout.rounds[row][layout.exists[row]]
        count = len(rounds)
        np.testing.assert_allclose(
            of_pairs[row, :count, :count], pairs[np.ix_(rounds, rounds)], atol=1e-12
        )


@given(_layouts(), st.integers(0, 2**32 - 1))
@settings(deadline=None)
def test_the_tightest_pattern_of_a_round_is_its_largest(layout: PatternLayout, seed: int) -> None:
    values = np.random.default_rng(seed).uniform(0.1, 1.0, layout.windows.shape)
    expected = np.zeros(layout.num_rounds)
    for window, pattern in _patterns(layout):
        expected[list(pattern)] = np.maximum(expected[list(pattern)], values[window])
    tightest = layout.tightest(values)
    np.testing.assert_array_equal(layout.by_round(tightest), expected)
    np.testing.assert_array_equal(tightest[~layout.exists], 1.0)


@given(_layouts())
@settings(deadline=None)
def test_positions_and_rounds_convert_back_and_forth(layout: PatternLayout) -> None:
    values = np.arange(1.0, layout.num_rounds + 1.0)
    table = layout.by_position(values)
    np.testing.assert_array_equal(layout.by_round(table), values)
    assert not np.any(table[~layout.exists])
    np.testing.assert_array_equal(table[layout.exists], 1.0 + layout.rounds[layout.exists])
