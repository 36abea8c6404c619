"""Sums of squared counts in the nodes of binary trees, against the nodes one by one."""

import dataclasses
import functools
import itertools

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mf_aggregators.kernel import sensitivity
from mf_aggregators.kernel.rows import StateSpaceNoise, full_tree_rows, online_tree_rows
from mf_aggregators.kernel.sensitivity import Schema
from tests.examples import examples
from tests.mf_aggregators import brute_force


def nodes_of(num_leaves: int) -> list[range]:
    """All aligned blocks of 2^h rounds that end within the tree."""
    sizes = [1 << h for h in range(num_leaves.bit_length())]
    return [range(a, a + size) for size in sizes for a in range(0, num_leaves - size + 1, size)]


def tree_matrix(num_leaves: int, num_rounds: int) -> np.ndarray:
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


def _largest_sum(num_leaves: int, num_rounds: int, schema: Schema) -> tuple[int, bool]:
    """The square of the sensitivity, and whether it is exact."""
    found = sensitivity.of_tree(num_leaves, num_rounds, schema)
    return round(found.value**2), found.is_exact


def test_all_small_trees() -> None:
    """Every tree, prefix, separation and number of participations up to nine rounds."""
    for num_leaves, num_rounds in itertools.product(range(1, 10), range(1, 9)):
        if num_rounds > num_leaves:
            continue
        for separation in range(1, num_rounds + 1):
            for most in range(1, -(-num_rounds // separation) + 1):
                for is_even in (False, True):
                    schema = Schema(most, separation, is_even)
                    truth = _by_patterns(num_leaves, num_rounds, schema)
                    assert _largest_sum(num_leaves, num_rounds, schema) == (truth, True), schema


@given(st.integers(1, 80), st.data())
@settings(max_examples=examples(60), deadline=None)
def test_one_pattern_has_the_sum_of_its_columns(num_leaves: int, data: st.DataObject) -> None:
    found = data.draw(st.sets(st.integers(0, num_leaves - 1), min_size=1))
    columns = tree_matrix(num_leaves, num_leaves)[:, sorted(found)]
    truth = np.sum(np.square(np.sum(columns, axis=1)))
    assert sensitivity._sum_of_pattern(num_leaves, tuple(sorted(found))) == truth


@given(st.integers(13, 45), st.integers(2, 9), st.integers(2, 8), st.integers(0, 12))
@settings(max_examples=examples(60), deadline=None)
def test_the_search_finds_patterns_of_uneven_spacing(
    num_leaves: int, separation: int, most: int, unreleased: int
) -> None:
    num_rounds = num_leaves - unreleased
    most = min(most, -(-num_rounds // separation))
    truth = _from_left(num_leaves, num_rounds, separation, most)
    assert _largest_sum(num_leaves, num_rounds, Schema(most, separation)) == (truth, True)


@pytest.mark.parametrize("num_leaves", [38, 39])
def test_the_search_finds_patterns_that_are_better_by_one(num_leaves: int) -> None:
    truth = _from_left(num_leaves, num_leaves, 7, 6)
    for schema, found in ((Schema(6, 7, is_even=True), truth - 1), (Schema(6, 7), truth)):
        assert _largest_sum(num_leaves, num_leaves, schema) == (found, True)


@given(st.integers(10, 300), st.integers(1, 40), st.integers(1, 12))
@settings(max_examples=examples(60), deadline=None)
def test_even_sums_of_longer_runs(num_leaves: int, separation: int, most: int) -> None:
    num_rounds = num_leaves - num_leaves // 7
    truth = []
    schema = Schema(most, separation, is_even=True)
    for start in schema.starts_in(num_rounds):
        rounds = np.arange(start, num_rounds, separation)[:most]
        sizes = [1 << h for h in range(num_leaves.bit_length())]
        counts = [np.bincount(rounds // size)[: num_leaves // size] for size in sizes]
        truth.append(sum(int(np.sum(np.square(each))) for each in counts))
    assert _largest_sum(num_leaves, num_rounds, schema) == (max(truth), True)


@pytest.mark.parametrize(
    ("num_leaves", "separation", "found"),
    # Between the best pattern of exact spacing, 141 and 1008, and bound 2, 149 and 1016.
    [(1000, 100, 143), (2052, 100, 1012)],
)
def test_the_search_settles_what_its_bounds_leave_open(
    num_leaves: int, separation: int, found: int
) -> None:
    assert _largest_sum(num_leaves, num_leaves, Schema(None, separation)) == (found, True)


@given(st.integers(2, 12), st.integers(1, 5), st.integers(2, 5), st.integers(0, 30))
@settings(max_examples=examples(100), deadline=None)
def test_a_search_that_gives_up_is_an_upper_bound(
    num_leaves: int, separation: int, most: int, steps: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sensitivity, "_MOST_STEPS", steps)
        found, is_exact = _largest_sum(num_leaves, num_leaves, Schema(most, separation))
    truth = _by_patterns(num_leaves, num_leaves, Schema(most, separation))
    assert found == truth if is_exact else found >= truth


# Noise rows.


def _rows(decoder: str, num_rounds: int, slots: int = 9) -> StateSpaceNoise:
    if decoder == "full":
        return full_tree_rows(num_rounds)
    return online_tree_rows(num_rounds, slots)


def _strategy_of_rows(rows: StateSpaceNoise, number: type = float) -> np.ndarray:
    """C as the definition of the recurrence gives it, of floats or of numbers of more digits."""
    gains, outputs, decays, feedbacks = (
        np.vectorize(number, otypes=[float if number is float else object])(array)
        for array in (rows.gains, rows.outputs, rows.decays, rows.feedbacks)
    )
    identity = np.eye(rows.num_rounds, dtype=int)
    states, strategy = 0 * np.tile(outputs[0, 0], (rows.num_state_vectors, rows.num_rounds)), []
    for i, p in enumerate(rows.phases):
        strategy.append((identity[i] - outputs[p] @ states) / gains[p])
        states = decays[p][:, np.newaxis] * states[rows.sources[p]]
        states = states + np.multiply.outer(feedbacks[p], identity[i])
    return np.array(strategy)


def _estimator_from_below(num_rounds: int) -> np.ndarray:
    """The left inverse of C_T of the decoder ``online``, from its definition.

    The best estimate of a node's sum from the observations within the node is least squares over
    the node's own leaves; a prefix sum is estimated by the largest nodes completed so far.
    """
    nodes, strategy = nodes_of(num_rounds), tree_matrix(num_rounds, num_rounds)
    prefixes = np.zeros((num_rounds + 1, len(nodes)))
    for i in range(1, num_rounds + 1):
        start = 0
        for size in (1 << h for h in range(i.bit_length() - 1, -1, -1)):
            if i & size:
                within = [
                    v
                    for v, node in enumerate(nodes)
                    if start <= min(node) <= max(node) < start + size
                ]
                inverse = np.linalg.pinv(strategy[within, start : start + size])
                prefixes[i, within] += np.sum(inverse, axis=0)
                start += size
    return np.diff(prefixes, axis=0)


@pytest.mark.parametrize("num_rounds", [1, 2, 3, 8, 13, 32, 45])
def test_full_rows_have_the_product_of_columns_of_the_tree(num_rounds: int) -> None:
    """To 50 digits but for the roundings of the arrays, which are within their bound."""
    tree = tree_matrix(num_rounds, num_rounds)
    with mpmath.workdps(50):
        rows = _rows("full", num_rounds)
        found = _strategy_of_rows(rows, mpmath.mpf)
        # The lower-triangular C with C^T C = X, from the last row on.
        flipped = mpmath.matrix((tree.T @ tree)[::-1, ::-1].tolist())
        exact = np.array(mpmath.cholesky(flipped).T.tolist())[::-1, ::-1]
        known = sensitivity._tree_of_rows(rows, num_rounds)
        assert known is not None
        assert known.num_leaves == num_rounds
        assert known.is_equal
        assert np.all(np.abs(found - exact) <= known.error * np.abs(exact))


@pytest.mark.parametrize("num_rounds", [1, 2, 3, 8, 13, 32, 45])
def test_online_rows_have_the_distribution_of_the_estimator_from_below(num_rounds: int) -> None:
    found = _strategy_of_rows(_rows("online", num_rounds))
    left_inverse = _estimator_from_below(num_rounds)
    product = left_inverse @ left_inverse.T
    np.testing.assert_allclose(np.linalg.inv(found.T @ found), product, atol=1e-13)
    tree = tree_matrix(num_rounds, num_rounds)
    np.testing.assert_allclose(left_inverse @ tree, np.eye(num_rounds), atol=1e-13)


@pytest.mark.parametrize("slots", [1, 4, 20])
def test_errors_of_online_rows_are_within_their_bound(slots: int) -> None:
    """Against the same recursion with 50 digits: entries are (1 - c) / g."""
    num_rounds = min(2 ** (slots + 1) - 1, 70)
    rows = online_tree_rows(num_rounds, slots)
    known = sensitivity._tree_of_rows(rows, num_rounds)
    assert known is not None
    error = known.error
    assert not known.is_equal
    with mpmath.workdps(50):
        variances, gains = [mpmath.mpf(1)], [mpmath.mpf(1)]
        for _ in range(slots):
            own = 2 * variances[-1] / (1 + 2 * variances[-1])
            variances.append(own)
            gains.append(mpmath.sqrt(own**2 + ((1 - own) * gains[-1]) ** 2))
        for merges in range(slots + 1):
            assert abs(rows.gains[merges] - gains[merges]) <= error * gains[merges]
            for slot in range(merges):
                kept = mpmath.fprod(1 - each for each in variances[slot + 1 : merges + 1])
                entry = -mpmath.fsum(rows.outputs[merges, slot:]) / rows.gains[merges]
                exact = (1 - kept) / gains[merges]
                assert abs(entry - exact) <= error * exact
        assert np.all(rows.outputs <= 0.0)


@pytest.mark.parametrize("num_rounds", [2, 7, 33, 64, 200])
def test_no_rows_of_a_tree_have_more_than_its_matrix(num_rounds: int) -> None:
    """In the order of positive semi-definite matrices, of leading parts as well."""
    for decoder, first in itertools.product(("online", "full"), (num_rounds, num_rounds // 2)):
        rows = _rows(decoder, num_rounds)
        strategy = _strategy_of_rows(rows)[:first, :first]
        leaves = num_rounds if decoder == "full" else first
        tree = tree_matrix(leaves, first)
        least = np.min(np.linalg.eigvalsh(tree.T @ tree - strategy.T @ strategy))
        assert least >= -1e-12


@given(st.sampled_from(["online", "full"]), st.integers(6, 60), st.integers(0, 9), st.data())
@settings(max_examples=examples(200), deadline=None)
def test_one_other_number_is_no_tree(
    decoder: str, num_rounds: int, unreleased: int, data: st.DataObject
) -> None:
    rows, first = _rows(decoder, num_rounds, slots=6), max(6, num_rounds - unreleased)
    found = sensitivity._tree_of_rows(rows, first)
    assert found is not None
    assert found.num_leaves == (num_rounds if decoder == "full" else first)
    assert found.is_equal == (decoder == "full" and first == num_rounds)
    name = data.draw(st.sampled_from([each.name for each in dataclasses.fields(rows)]))
    array = getattr(rows, name).copy()
    end = first if name == "phases" else array.size
    index = data.draw(st.integers(0, end - 1))
    if name in ("phases", "sources"):
        array.flat[index] += 1 if array.flat[index] == 0 else -1
    else:
        array.flat[index] = array.flat[index] * (1.0 + 1e-9) or 1e-9
    assert sensitivity._tree_of_rows(dataclasses.replace(rows, **{name: array}), first) is None
