"""Largest sums of squared counts of participations in the nodes of a binary tree over rounds.

The tree over n leaves has a node over rounds a 2^h to (a + 1) 2^h - 1 for all a and h with
(a + 1) 2^h <= n. For its strategy matrix C_T with a row of ones and zeros for each node, C_T^T C_T
has no negative entry, and ||C_T u||^2 for ones u in a pattern is the sum over nodes of the squared
number of participations in the node (Denisov et al. App. C; BandMF Prop. E.1).
"""

import functools
from typing import TypeAlias

import numpy as np

from mf_aggregators.kernel.arrays import IntArray

# Pairs of partial patterns that a search may look at: a few seconds.
_MOST_STEPS = 2_000_000
# A subtree up to its place: its leaves, and how many of them are rounds that count.
_Shape: TypeAlias = tuple[int, int]


class _TooManySteps(Exception):  # noqa: N818 - a signal that ends a search, not an error.
    """Raised if a search takes too long."""


def heights(num_leaves: int, num_rounds: int) -> IntArray:
    """Returns for each round the number of nodes over it: (num_rounds,) int64.

    Args:
      num_leaves: The leaves n of the tree.
      num_rounds: Rounds, at most n.
    """
    rounds = np.arange(num_rounds)
    nodes = [rounds < num_leaves >> h << h for h in range(num_leaves.bit_length())]
    return np.asarray(np.sum(nodes, axis=0))


def even_sums(num_leaves: int, num_rounds: int, separation: int, most: int) -> IntArray:
    """Returns sums of squared counts of the maximal patterns of (k, b)-participation.

    A further participation i adds 2 c - 1 for each node over i, with c the count in the node
    including i, and dropping the first takes as much away. Sums of patterns that start in the
    first b rounds give the others, pattern by pattern b rounds later.

    Args:
      num_leaves: The leaves n of the tree.
      num_rounds: Rounds that count, from the first on.
      separation: b.
      most: k, at most the participations that fit.

    Returns:
      (s,) int64, by the first rounds of the patterns, 0 to s - 1.
    """
    rounds = np.arange(num_rounds)
    first, appended, dropped = (np.zeros(num_rounds, np.int64) for _ in range(3))
    for size in (1 << h for h in range(num_leaves.bit_length())):
        has_node = rounds < num_leaves // size * size
        until = rounds % size // separation + 1
        after = (size - 1 - rounds % size) // separation + 1
        first += has_node * (2 * until - 1)
        appended += has_node * (2 * np.minimum(until, most) - 1)
        dropped += has_node * (2 * np.minimum(after, most) - 1)
    starts = max(num_rounds - (most - 1) * separation, min(separation, num_rounds))
    changes = np.zeros(-(-starts // separation) * separation, np.int64)
    for participation in range(most):
        added = first[participation * separation :][:separation]
        changes[: len(added)] += added
    moved = np.arange(separation, starts)
    changes[moved] = appended[moved + (most - 1) * separation] - dropped[moved - separation]
    sums = np.cumsum(changes.reshape(-1, separation), axis=0)
    return np.asarray(sums.ravel()[:starts])


def largest_sum(num_leaves: int, num_rounds: int, separation: int, most: int) -> tuple[int, bool]:
    """Returns the largest sum of squared counts over patterns of least separation b.

    Three upper bounds, each computed only if the one before is above the best known pattern:

    1. A node over m leaves holds at most min(k, ceil(m / b)) participations.
    2. For c participations in a node, the most by its children, as if participations in
       different children could be any distance apart.
    3. The sums of all patterns that fall short of bound 2 by less than the best known pattern
       does. A partial pattern is its count in a subtree, its shortfall there, and how many rounds
       after the subtree the client must wait; of several partial patterns of one count those
       remain that have less shortfall or a shorter wait.

    Args:
      num_leaves: The leaves n of the tree.
      num_rounds: Rounds that count, from the first on.
      separation: b.
      most: k, at most the participations that fit.

    Returns:
      The sum, and True; or an upper bound and False if the search would take too long.
    """
    found = int(np.max(even_sums(num_leaves, num_rounds, separation, most)))
    search = _Search(separation, most)
    whole = (num_leaves, num_rounds)
    upper = search.by_counts(whole)
    if upper > found:
        try:
            upper = int(search.bounds(whole)[-1])
            if upper > found and separation > 1:
                upper = search.largest(whole, found)
        except _TooManySteps:
            return upper, False
    return upper, True


class _Search:
    """The three bounds of :func:`largest_sum`; subtrees of equal shape share their tables."""

    def __init__(self, separation: int, most: int) -> None:
        self._separation, self._most = separation, most
        self._allowed = self._steps = 0
        self.by_counts = functools.cache(self._by_counts)
        self.bounds = functools.cache(self._bounds)
        self._splits = functools.cache(self._make_splits)
        self._ends = functools.cache(self._make_ends)

    def largest(self, whole: _Shape, found: int) -> int:
        """Returns the largest sum of a pattern, ``found`` or more."""
        bounds = self.bounds(whole)
        self._allowed = int(bounds[-1]) - found - 1
        sums = [
            int(bounds[count]) - shortfall
            for count in np.flatnonzero(bounds > found).tolist()
            for _, shortfall in self._ends(whole, count, 0)
        ]
        return max([found, *sums])

    def _spend(self, steps: int) -> None:
        self._steps += steps
        if self._steps > _MOST_STEPS:
            raise _TooManySteps

    def _largest_count(self, shape: _Shape) -> int:
        return min(self._most, -(-shape[1] // self._separation))

    def _by_counts(self, shape: _Shape) -> int:
        below = sum(map(self.by_counts, _children(shape)))
        return _is_node(shape) * self._largest_count(shape) ** 2 + below

    def _bounds(self, shape: _Shape) -> IntArray:
        """Bound 2 for 0, 1, ... participations in a subtree."""
        counts = np.arange(self._largest_count(shape) + 1)
        sums = np.zeros(len(counts), np.int64)
        if children := _children(shape):
            fewer, more = sorted(map(self.bounds, children), key=len)
            self._spend(len(fewer) + len(fewer) * len(more) // 1000)
            for count, value in enumerate(fewer):
                reached = sums[count : count + len(more)]
                np.maximum(reached, value + more[: len(reached)], out=reached)
        return np.asarray(sums + _is_node(shape) * np.square(counts))

    def _make_splits(self, shape: _Shape, count: int) -> list[tuple[int, int]]:
        """Counts in the left child, and by how much a split falls short of bound 2."""
        left, right = map(self.bounds, _children(shape))
        first = np.arange(max(0, count - len(right) + 1), min(count, len(left) - 1) + 1)
        self._spend(1 + len(first) // 1000)
        reached = _is_node(shape) * count**2 + left[first] + right[count - first]
        lost = self.bounds(shape)[count] - reached
        kept = lost <= self._allowed
        return list(zip(first[kept].tolist(), lost[kept].tolist(), strict=True))

    def _make_ends(self, shape: _Shape, count: int, wait: int) -> list[tuple[int, int]]:
        """Waits after a subtree of ``count`` participations, by growing wait, with shortfalls."""
        size, released = shape
        if count == 0:
            return [(max(wait - size, 0), 0)]
        if size <= self._separation and released == size and _is_node(shape):
            # One participation, as early as the client may.
            return [(self._separation - size + wait, 0)] if wait < size else []
        left, right = _children(shape)
        least: dict[int, int] = {}
        for first, lost in self._splits(shape, count):
            for between, lost_left in self._ends(left, first, wait):
                if lost + lost_left > self._allowed:
                    continue
                for end, lost_right in self._ends(right, count - first, between):
                    self._spend(1)
                    total = lost + lost_left + lost_right
                    if total <= self._allowed:
                        least[end] = min(total, least.get(end, total))
        ends: list[tuple[int, int]] = []
        for end in sorted(least):
            if not ends or least[end] < ends[-1][1]:
                ends.append((end, least[end]))
        return ends


def _is_node(shape: _Shape) -> bool:
    """Whether the sum over a subtree is released: over 2^h leaves."""
    return shape[0] & (shape[0] - 1) == 0


def _children(shape: _Shape) -> tuple[_Shape, ...]:
    """The two children of a subtree; none of a leaf, or where no round counts."""
    size, released = shape
    if size == 1 or released == 0:
        return ()
    left = 1 << ((size - 1).bit_length() - 1)
    return (left, min(released, left)), (size - left, max(released - left, 0))
