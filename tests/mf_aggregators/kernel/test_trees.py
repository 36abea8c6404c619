"""Sums of squared counts in the nodes of binary trees, against the nodes one by one."""

import functools
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mf_aggregators.kernel import trees
from mf_aggregators.kernel.schemas import Schema
from tests.examples import examples
from tests.mf_aggregators import brute_force


def nodes_of(num_leaves: int) -> list[range]:
    """All aligned blocks of 2^h rounds that end within the tree."""
    sizes = [1 << h for h in range(num_leaves.bit_length())]
    return [range(a, a + size) for size in sizes for a in range(0, num_leaves - size + 1, size)]


def strategy_of(num_leaves: int, num_rounds: int) -> np.ndarray:
    """C_T of the first rounds: a row of ones and zeros for each node."""
    strategy = np.zeros((len(nodes_of(num_leaves)), num_rounds))
    for row, node in zip(strategy, nodes_of(num_leaves), strict=True):
        row[node.start : node.stop] = 1.0
    return strategy


def _by_patterns(num_leaves: int, num_rounds: int, schema: Schema) -> int:
    nodes = [set(each) for each in nodes_of(num_leaves)]
    patterns = brute_force.patterns(schema, num_rounds)
    return max(sum(len(node.intersection(each)) ** 2 for node in nodes) for each in patterns)


def _from_left(num_leaves: int, num_rounds: int, separation: int, most: int) -> int:
    """The same for a least separation, round after round: for more rounds than enumeration."""
    nodes = nodes_of(num_leaves)
    of_round = [[v for v, node in enumerate(nodes) if i in node] for i in range(num_rounds)]

    @functools.cache
    def largest(start: int, left: int, counts: frozenset[tuple[int, int]]) -> int:
        if start >= num_rounds or not left:
            return 0
        known = dict(counts)
        gain = sum(2 * known.get(node, 0) + 1 for node in of_round[start])
        for node in of_round[start]:
            known[node] = known.get(node, 0) + 1
        # Counts of nodes that no later round is in do not matter any more.
        following = start + separation
        still = frozenset((v, count) for v, count in known.items() if nodes[v].stop > following)
        return max(largest(start + 1, left, counts), gain + largest(following, left - 1, still))

    return largest(0, most, frozenset())


def test_heights_are_the_numbers_of_nodes() -> None:
    for num_leaves in range(1, 40):
        for num_rounds in range(1, num_leaves + 1):
            truth = np.sum(strategy_of(num_leaves, num_rounds), axis=0)
            np.testing.assert_array_equal(trees.heights(num_leaves, num_rounds), truth)


def test_all_small_trees() -> None:
    """Every tree, prefix, separation and number of participations up to nine rounds."""
    for num_leaves, num_rounds in itertools.product(range(1, 10), range(1, 9)):
        if num_rounds > num_leaves:
            continue
        for separation in range(1, num_rounds + 1):
            for most in range(1, -(-num_rounds // separation) + 1):
                sizes = num_leaves, num_rounds, separation, most
                even = _by_patterns(num_leaves, num_rounds, Schema(most, separation, is_even=True))
                assert np.max(trees.even_sums(*sizes)) == even, sizes
                truth = _by_patterns(num_leaves, num_rounds, Schema(most, separation))
                assert trees.largest_sum(*sizes) == (truth, True), sizes


@given(st.integers(13, 45), st.integers(2, 9), st.integers(2, 8), st.integers(0, 12))
@settings(max_examples=examples(60), deadline=None)
def test_the_search_finds_patterns_of_uneven_spacing(
    num_leaves: int, separation: int, most: int, unreleased: int
) -> None:
    num_rounds = num_leaves - unreleased
    most = min(most, -(-num_rounds // separation))
    truth = _from_left(num_leaves, num_rounds, separation, most)
    assert trees.largest_sum(num_leaves, num_rounds, separation, most) == (truth, True)


@given(st.integers(10, 300), st.integers(1, 40), st.integers(1, 12))
@settings(max_examples=examples(60), deadline=None)
def test_even_sums_of_longer_runs(num_leaves: int, separation: int, most: int) -> None:
    num_rounds = num_leaves - num_leaves // 7
    most = min(most, -(-num_rounds // separation))
    truth = []
    for start in Schema(most, separation, is_even=True).starts_in(num_rounds):
        rounds = np.arange(start, num_rounds, separation)[:most]
        sizes = [1 << h for h in range(num_leaves.bit_length())]
        counts = [np.bincount(rounds // size)[: num_leaves // size] for size in sizes]
        truth.append(sum(int(np.sum(np.square(each))) for each in counts))
    assert trees.even_sums(num_leaves, num_rounds, separation, most).tolist() == truth


@pytest.mark.parametrize(
    ("num_leaves", "separation", "found"),
    # Between the best pattern of exact spacing, 141 and 1008, and bound 2, 149 and 1016.
    [(1000, 100, 143), (2052, 100, 1012)],
)
def test_the_search_settles_what_its_bounds_leave_open(
    num_leaves: int, separation: int, found: int
) -> None:
    most = -(-num_leaves // separation)
    assert trees.largest_sum(num_leaves, num_leaves, separation, most) == (found, True)


def test_a_pattern_that_is_better_by_one_is_found() -> None:
    assert np.max(trees.even_sums(79, 79, 14, 6)) == 69
    assert _from_left(79, 79, 14, 6) == 70
    assert trees.largest_sum(79, 79, 14, 6) == (70, True)


@given(st.integers(2, 12), st.integers(1, 5), st.integers(2, 5), st.integers(0, 30))
@settings(max_examples=examples(100), deadline=None)
def test_a_search_that_gives_up_is_an_upper_bound(
    num_leaves: int, separation: int, most: int, steps: int
) -> None:
    most = min(most, -(-num_leaves // separation))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trees, "_MOST_STEPS", steps)
        found, is_exact = trees.largest_sum(num_leaves, num_leaves, separation, most)
    truth = _by_patterns(num_leaves, num_leaves, Schema(most, separation))
    assert found == truth if is_exact else found >= truth


def test_giving_up_is_admitted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trees, "_MOST_STEPS", 60)
    assert trees.largest_sum(1000, 1000, 100, 10) == (149, False)
    monkeypatch.setattr(trees, "_MOST_STEPS", 0)
    # Bound 1: min(10, ceil(m / 100)) participations in each node over m of 1000 leaves.
    nodes = nodes_of(1000)
    truth = sum(min(10, -(-len(node) // 100)) ** 2 for node in nodes)
    assert trees.largest_sum(1000, 1000, 100, 10) == (truth, False)
