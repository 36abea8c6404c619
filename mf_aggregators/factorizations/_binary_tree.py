"""The binary tree over the rounds of a run, and the largest sums of squared counts in its nodes.

A node over m > 1 leaves splits at the largest power of two below m. The 2 n - 1 nodes are
numbered children before parents and left before right, which for n = 2^k is the order of the
papers' matrix (Denisov et al. App. C, Eq. 12). A node's sum is released if it is over 2^h
leaves; the others join the complete trees of the binary expansion of n.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np

from mf_aggregators.kernel.arrays import FloatArray, IntArray
from mf_aggregators.sensitivity import Sensitivity

# Elementary steps that the search for the exact sensitivity may take: a few seconds.
_MOST_STEPS = 500_000_000
# Entries of any one of its tables.
_MOST_ENTRIES = 5_000_000
# A subtree up to its place: its leaves, and how many of them belong to released rounds.
_Shape: TypeAlias = tuple[int, int]


@dataclasses.dataclass(frozen=True, eq=False)
class Tree:
    """The tree over n leaves; node v covers the leaves starts[v] to stops[v] - 1.

    Attributes:
      starts: (2 n - 1,) int64.
      stops: (2 n - 1,) int64.
      left: (2 n - 1,) int64: left children; -1 for leaves.
      right: (2 n - 1,) int64: right children; -1 for leaves.
      parents: (2 n - 1,) int64; -1 for the root, which is the last node.
      depths: (2 n - 1,) int64: edges to the root.
      precisions: (2 n - 1,) float64: those of the nodes' observations: 1 where the sum over
        the node is released, that is over 2^h leaves, and 0 elsewhere.
      leaves: (n,) int64: the leaf of each round.
      levels: For each depth, the nodes there that have children.
    """

    starts: IntArray
    stops: IntArray
    left: IntArray
    right: IntArray
    parents: IntArray
    depths: IntArray
    precisions: FloatArray
    leaves: IntArray
    levels: tuple[IntArray, ...]

    @property
    def num_rounds(self) -> int:
        """The number of leaves n."""
        return int(self.leaves.shape[0])

    @property
    def height(self) -> int:
        """The edges from the root to the deepest leaf."""
        return len(self.levels)

    def paths(self) -> Iterator[tuple[IntArray, IntArray]]:
        """Yields, from the deepest level up, the rounds below each level and their nodes there."""
        nodes = self.leaves.copy()
        for depth in range(self.height, -1, -1):
            rounds = np.flatnonzero(self.depths[nodes] == depth)
            yield rounds, nodes[rounds]
            nodes[rounds] = self.parents[nodes[rounds]]

    def completed_by(self, leaf: int) -> list[int]:
        """Returns the nodes that a leaf's round completes and releases, from the leaf up."""
        chain = [int(self.leaves[leaf])]
        while True:
            parent = int(self.parents[chain[-1]])
            if parent < 0 or not self.precisions[parent] or self.right[parent] != chain[-1]:
                return chain
            chain.append(parent)


def binary_tree(num_rounds: int) -> Tree:
    """Returns the tree.

    Args:
      num_rounds: The number of leaves n, at least 1.
    """
    num_nodes = 2 * num_rounds - 1
    starts, stops, depths = (np.zeros(num_nodes, np.int64) for _ in range(3))
    left, right, parents = (np.full(num_nodes, -1) for _ in range(3))
    leaves = np.zeros(num_rounds, np.int64)
    levels = []
    # A subtree of m leaves that starts at leaf a, its nodes numbered from o, ends with its
    # own root, node o + 2 m - 2.
    first_leaves, sizes, offsets = np.array([0]), np.array([num_rounds]), np.array([0])
    depth = 0
    while len(sizes):
        nodes = offsets + 2 * sizes - 2
        starts[nodes], stops[nodes], depths[nodes] = first_leaves, first_leaves + sizes, depth
        leaves[first_leaves[sizes == 1]] = nodes[sizes == 1]
        inner = sizes > 1
        nodes, first_leaves, sizes, offsets = (
            values[inner] for values in (nodes, first_leaves, sizes, offsets)
        )
        if len(nodes):
            levels.append(nodes)
        left_sizes = _left_size(sizes)
        left[nodes] = offsets + 2 * left_sizes - 2
        right[nodes] = nodes - 1
        parents[left[nodes]] = parents[right[nodes]] = nodes
        first_leaves = np.concatenate([first_leaves, first_leaves + left_sizes])
        offsets = np.concatenate([offsets, offsets + 2 * left_sizes - 1])
        sizes = np.concatenate([left_sizes, sizes - left_sizes])
        depth += 1
    precisions = np.where(is_complete(stops - starts), 1.0, 0.0)
    return Tree(starts, stops, left, right, parents, depths, precisions, leaves, tuple(levels))


def is_complete(size: Any) -> Any:
    """Returns whether a node over so many leaves is released: powers of two are.

    Args:
      size: Leaves, an integer or an array of them.
    """
    return size & (size - 1) == 0


def _left_size(sizes: Any) -> Any:
    """The largest power of two strictly below each size: the leaves of the left child."""
    exponents = np.frexp(np.asarray(sizes, np.float64) - 1.0)[1]
    return np.left_shift(np.int64(1), np.asarray(exponents, np.int64) - 1)


def equally_spaced_sums(tree: Tree, rounds: int, separation: int, most: int) -> IntArray:
    """Returns sums of squared counts of the maximal patterns of exact spacing, by first round.

    Appending a participation i to a pattern adds 2 c - 1 for each node over i, with c
    the count there including i, and dropping the first takes as much away. From the patterns
    that start in the first ``separation`` rounds the others follow by doing both.

    Args:
      tree: The tree.
      rounds: Only leaves before this one count.
      separation: The spacing b.
      most: The participations k of a pattern, at most those that fit.

    Returns:
      (s,) int64 for first rounds 0 to s - 1, which include all maximal patterns.
    """
    appended, dropped, first_appended = (np.zeros(rounds, np.int64) for _ in range(3))
    for leaves, nodes in tree.paths():
        inside = (leaves < rounds) & (tree.precisions[nodes] > 0.0)
        leaves, nodes = leaves[inside], nodes[inside]
        until = -((tree.starts[nodes] - leaves - 1) // separation)
        after = -((leaves - tree.stops[nodes]) // separation)
        first_appended[leaves] += 2 * until - 1
        appended[leaves] += 2 * np.minimum(until, most) - 1
        dropped[leaves] += 2 * np.minimum(after, most) - 1
    with_room = rounds - (most - 1) * separation
    num_starts = max(with_room, min(separation, rounds))
    changes = np.zeros(-(-num_starts // separation) * separation, np.int64)
    for participation in range(most):
        first = first_appended[participation * separation :][:separation]
        changes[: len(first)] += first
    moved = np.arange(separation, num_starts)
    changes[moved] = appended[moved + (most - 1) * separation] - dropped[moved - separation]
    return np.asarray(np.cumsum(changes.reshape(-1, separation), axis=0).reshape(-1)[:num_starts])


class _TooManySteps(Exception):  # noqa: N818 - a signal that ends a search, not an error.
    """Raised where a search would take longer than is worth it."""


def sensitivity_of_least_separation(
    num_rounds: int, released: int, separation: int, most: int, lower_bound: int
) -> Sensitivity:
    """Returns the sensitivity under a least separation, exact where a search can settle it.

    Args:
      num_rounds: The leaves n of the tree.
      released: Only this many rounds count, from the first on.
      separation: The least separation b.
      most: The participations k of a pattern, at most those that fit.
      lower_bound: The sum of squared counts of the best known pattern.

    Returns:
      The sensitivity, or an upper bound that says so.
    """
    search = _PatternSearch((num_rounds, released), separation, most, lower_bound)
    try:
        search.run()
        is_exact = True
    except _TooManySteps:
        is_exact = search.upper_bound == search.lower_bound
    theorem = (
        "search over the patterns of the tree (BandMF Prop. E.1)"
        if is_exact
        else "upper bound: participations apart within nodes of the tree only"
    )
    return Sensitivity(float(np.sqrt(search.upper_bound)), is_exact=is_exact, theorem=theorem)


class _PatternSearch:
    """The largest sum of squared counts over patterns of at most k rounds, b or more apart.

    Three steps, each only if those before it left a question:

    1. No node over m leaves can hold more than min(k, ceil(m / b)) participations. The
       sum of the squares is an upper bound; patterns of exact spacing give a lower one.
    2. With g_v(c) the largest sum within the subtree of v for c participations in it,
       g_v(c) <= max over c' of g_left(c') + g_right(c - c') + c^2 (without c^2 where the
       node is not released): an upper bound that forgets the separation between
       participations in different children.
    3. Whether a pattern exists whose sum falls short of that bound by less than the best
       known pattern does: for every node, count and shortfall, the least number of rounds
       that have to pass after the node before the client may return, as a function of
       the number that had to pass from its start. A shortfall adds up over the nodes, and
       it has to stay small, which keeps the tables small.

    Subtrees of the same shape share their tables, so that there are O(log n) of them.
    """

    def __init__(self, shape: _Shape, separation: int, most: int, lower_bound: int) -> None:
        self._shape = shape
        self._separation = separation
        self._most = most
        self.lower_bound = lower_bound
        self.upper_bound = self._by_counts(shape)
        self._bounds: dict[_Shape, IntArray] = {}
        self._waits: dict[tuple[_Shape, bool], IntArray] = {}
        self._shortfall = 0
        self._steps = 0

    def run(self) -> None:
        """Lowers the upper bound to the sum that a pattern reaches.

        Raises:
          _TooManySteps: If the question cannot be settled in reasonable time.
        """
        if self.upper_bound > self.lower_bound:
            self.upper_bound = int(self._bound(self._shape)[-1])
        # Without a separation step 2 forgets nothing.
        if self.upper_bound > self.lower_bound and self._separation > 1:
            self._shortfall = self.upper_bound - self.lower_bound - 1
            self._spend_on_waits(self._shape)
            # The largest sum that leaves a wait which is possible.
            waits = self._least_waits(self._shape, is_first=True)[:, :, 0]
            counts, shortfalls = np.nonzero(waits < self._separation)
            reached = int(np.max(self._bound(self._shape)[counts] - shortfalls))
            self.upper_bound = max(self.lower_bound, reached)

    def _spend(self, steps: int) -> None:
        self._steps += steps
        if self._steps > _MOST_STEPS:
            raise _TooManySteps

    def _largest_count(self, shape: _Shape) -> int:
        return min(self._most, -(-shape[1] // self._separation))

    def _by_counts(self, shape: _Shape) -> int:
        """Step 1: shapes as often as they occur in the tree."""
        total, remaining = 0, {shape: 1}
        while remaining:
            (size, released), times = remaining.popitem()
            if is_complete(size):
                total += times * self._largest_count((size, released)) ** 2
            if size > 1 and released:
                for part in _parts((size, released)):
                    remaining[part] = remaining.get(part, 0) + times
        return total

    def _bound(self, shape: _Shape) -> IntArray:
        """Step 2: the bound on g for 0, 1, ... participations in a subtree."""
        if shape not in self._bounds:
            counts = np.arange(self._largest_count(shape) + 1)
            sums = np.zeros(len(counts), np.int64)
            if shape[0] > 1 and shape[1]:
                left, right = (self._bound(part) for part in _parts(shape))
                if len(right) < len(left):
                    left, right = right, left
                self._spend(len(left) * len(right))
                for count, value in enumerate(left):
                    reached = sums[count : count + len(right)]
                    np.maximum(reached, value + right[: len(reached)], out=reached)
            self._bounds[shape] = sums + _own_term(shape, counts)
        return self._bounds[shape]

    def _spend_on_waits(self, root: _Shape) -> None:
        """Counts what step 3 will take before any of it is done."""
        done: set[tuple[_Shape, bool]] = set()
        remaining = [(root, True)]
        while remaining:
            shape, is_first = remaining.pop()
            if (shape, is_first) in done:
                continue
            done.add((shape, is_first))
            width = 1 if is_first else self._separation + 1
            if len(self._bound(shape)) * (self._shortfall + 1) * width > _MOST_ENTRIES:
                raise _TooManySteps
            if shape[0] > 1 and shape[1]:
                _, _, spare = self._splits(shape)
                self._spend(int(np.sum((spare + 1) * (spare + 2) // 2)) * width)
                left, right = _parts(shape)
                remaining += [(left, is_first), (right, False)]

    def _splits(self, shape: _Shape) -> tuple[IntArray, IntArray, IntArray]:
        """Returns the splits of a node's participations that fall short by little enough.

        Args:
          shape: The node's shape, of more than one leaf.

        Returns:
          Counts in the left child, counts in the right one, and what remains of the
          allowed shortfall, one entry of each for every split.
        """
        bounds = self._bound(shape)
        left, right = (self._bound(part) for part in _parts(shape))
        if len(left) * len(right) > _MOST_ENTRIES:
            raise _TooManySteps
        joined = np.add.outer(np.arange(len(left)), np.arange(len(right)))
        sums = np.add.outer(left, right) + _own_term(shape, joined)
        spare = self._shortfall + sums - bounds[np.minimum(joined, len(bounds) - 1)]
        first, second = np.nonzero((spare >= 0) & (joined < len(bounds)))
        return first, second, spare[first, second]

    def _least_waits(self, shape: _Shape, is_first: bool) -> IntArray:
        """Step 3: the least wait after a subtree, for a wait at its start.

        Args:
          shape: The subtree's shape.
          is_first: Whether it holds the first leaf of the tree, where there is no wait.

        Returns:
          int64 table over participations in the subtree, shortfall of their sum from the
          bound (at most), and wait at the start: 0 to b - 1, and b for "not possible",
          or 0 alone for a first subtree.
        """
        key = (shape, is_first)
        if key not in self._waits:
            impossible = self._separation
            starts = np.arange(1 if is_first else impossible + 1)
            table_shape = (len(self._bound(shape)), self._shortfall + 1, len(starts))
            waits = np.full(table_shape, impossible)
            if shape[1] == 0:
                # No released round follows.
                waits[0] = starts
            elif shape[0] == 1:
                waits[0] = np.where(starts < impossible, np.maximum(starts - 1, 0), impossible)
                waits[1, :, 0] = impossible - 1
            else:
                self._pass_both_children(shape, is_first, waits)
            self._waits[key] = waits
        return self._waits[key]

    def _pass_both_children(self, shape: _Shape, is_first: bool, waits: IntArray) -> None:
        """Lowers a node's waits to the least over its splits: by way of the left child's."""
        left, right = _parts(shape)
        left_waits = self._least_waits(left, is_first)
        right_waits = self._least_waits(right, False)
        # A larger shortfall on the left that shortens no wait leads nowhere new.
        shortens = np.any(np.diff(left_waits, axis=1, prepend=-1), axis=2)
        for first, second, spare in zip(*self._splits(shape), strict=True):
            own = self._shortfall - spare
            for lost in np.flatnonzero(shortens[first, : spare + 1]):
                reached = waits[first + second, own + lost :]
                ends = right_waits[second, : len(reached)][:, left_waits[first, lost]]
                np.minimum(reached, ends, out=reached)


def _own_term(shape: _Shape, counts: IntArray) -> IntArray:
    """What a node with so many participations adds to the sum of squared counts."""
    return np.square(counts) * int(is_complete(shape[0]))


def _parts(shape: _Shape) -> tuple[_Shape, _Shape]:
    """The shapes of the two children of a subtree."""
    size, released = shape
    left_size = 1 << ((size - 1).bit_length() - 1)
    return (
        (left_size, min(released, left_size)),
        (size - left_size, max(released - left_size, 0)),
    )
