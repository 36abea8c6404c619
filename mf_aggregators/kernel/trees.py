"""Binary trees over rounds: largest sums of squared counts of participations, and noise rows.

The tree over n leaves has a node over rounds a 2^h to (a + 1) 2^h - 1 for all a and h with
(a + 1) 2^h <= n. For its strategy matrix C_T with a row of ones and zeros for each node, C_T^T C_T
has no negative entry, and ||C_T u||^2 for ones u in a pattern is the sum over nodes of the squared
number of participations in the node (Denisov et al. App. C; BandMF Prop. E.1).

A node over m > 1 leaves splits at the largest power of two below m. Its sum is released if it is
over 2^h leaves; the other nodes join the complete trees of the binary expansion of n.
"""

import functools
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from mf_aggregators.kernel.numbers import FloatArray, IntArray
from mf_aggregators.kernel.rows import StateSpaceNoise

# Pairs of partial patterns that a search may look at: a few seconds.
_MOST_STEPS = 2_000_000
# A subtree up to its place: its leaves, and how many of them are rounds that count.
_Shape: TypeAlias = tuple[int, int]


class _TooManySteps(Exception):  # noqa: N818 - a signal that ends a search, not an error.
    """Raised if a search takes too long."""


def largest_even_sum(num_leaves: int, num_rounds: int, separation: int, most: int) -> int:
    """Returns the largest sum of squared counts over the patterns of (k, b)-participation.

    A participation i after others adds 2 c - 1 for each node over i, with c the count in the node
    including i. Counts begin anew in each node, but for the node over the first participation: if
    c rounds of the node before that one are b, 2 b, ... before it, each participation in the node
    is counted by 2 c less.

    Args:
      num_leaves: The leaves n of the tree.
      num_rounds: Rounds that count, from the first on.
      separation: b.
      most: k, at most the participations that fit.
    """
    rounds = np.arange(num_rounds)
    added, counted_before = np.zeros((2, num_rounds), np.int64)
    for size in (1 << h for h in range(num_leaves.bit_length())):
        has_node, place = rounds < num_leaves // size * size, rounds % size
        before, after = place // separation, (size - 1 - place) // separation + 1
        added += has_node * (2 * before + 1)
        counted_before += has_node * 2 * before * np.minimum(after, most)
    # Sums of entries that are b apart, k of them, as differences of sums of all that follow.
    padded = np.zeros((most - (-num_rounds // separation), separation), np.int64)
    padded.flat[:num_rounds] = added
    from_here = np.cumsum(padded[::-1], axis=0)[::-1]
    sums = (from_here[:-most] - from_here[most:]).ravel()[:num_rounds] - counted_before
    num_starts = max(num_rounds - (most - 1) * separation, min(separation, num_rounds))
    return int(np.max(sums[:num_starts]))


def sum_of_pattern(num_leaves: int, rounds: tuple[int, ...]) -> int:
    """Returns the sum of squared counts of one pattern.

    Args:
      num_leaves: The leaves n of the tree.
      rounds: The rounds of the pattern, below n.
    """
    places = np.array(rounds)
    counts = (np.bincount(places >> h)[: num_leaves >> h] for h in range(num_leaves.bit_length()))
    return sum(int(np.sum(np.square(each))) for each in counts)


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
    found = largest_even_sum(num_leaves, num_rounds, separation, most)
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
        return (self._largest_count(shape) ** 2 if is_complete(shape[0]) else 0) + below

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
        return np.asarray(sums + is_complete(shape[0]) * np.square(counts))

    def _make_splits(self, shape: _Shape, count: int) -> list[tuple[int, int]]:
        """Counts in the left child, and by how much a split falls short of bound 2."""
        left, right = map(self.bounds, _children(shape))
        first = np.arange(max(0, count - len(right) + 1), min(count, len(left) - 1) + 1)
        self._spend(1 + len(first) // 1000)
        reached = is_complete(shape[0]) * count**2 + left[first] + right[count - first]
        lost = self.bounds(shape)[count] - reached
        kept = lost <= self._allowed
        return list(zip(first[kept].tolist(), lost[kept].tolist(), strict=True))

    def _make_ends(self, shape: _Shape, count: int, wait: int) -> list[tuple[int, int]]:
        """Waits after a subtree of ``count`` participations, by growing wait, with shortfalls."""
        size, released = shape
        if count == 0:
            return [(max(wait - size, 0), 0)]
        if size <= self._separation and released == size and is_complete(shape[0]):
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


def _children(shape: _Shape) -> tuple[_Shape, ...]:
    """The two children of a subtree; empty for a leaf, or if no round counts."""
    size, released = shape
    if size == 1 or released == 0:
        return ()
    left = left_size(size)
    return (left, min(released, left)), (size - left, max(released - left, 0))


def is_complete(size: Any) -> Any:
    """Returns whether a node over a number of leaves is released: powers of two are.

    Args:
      size: Leaves, an integer or an array of them.
    """
    return size & (size - 1) == 0


def left_size(size: int) -> int:
    """Returns the leaves of the left child, the largest power of two below ``size``.

    Args:
      size: Leaves of the node, above 1.
    """
    return 1 << ((size - 1).bit_length() - 1)


def variances(sizes: IntArray) -> FloatArray:
    """Returns for each node the variance of the best estimate of its sum from its subtree alone.

    A leaf has only its own observation, of variance 1. The sum of a node is observed twice,
    by the node itself and by the sum of its children's estimates, and precisions add:
    1 / v = 1 + 1 / (v_left + v_right), without the 1 where the node is not released.

    Args:
      sizes: (m,) the leaves of each node.
    """

    def variance(size: int) -> float:
        if size == 1:
            return 1.0
        if is_complete(size):
            below = 2.0 * variance(size // 2)
            return below / (1.0 + below)
        left = left_size(size)
        return variance(left) + variance(size - left)

    found, places = np.unique(sizes, return_inverse=True)
    return np.array([variance(size) for size in found.tolist()])[places]


def most_rounds(num_slots: int) -> int:
    """Returns the most rounds that a number of state vectors is enough for."""
    return (1 << (num_slots + 1)) - 1


def online_recursion(num_rounds: int, num_slots: int) -> StateSpaceNoise:
    """Returns the recursion of the estimator from below.

    The estimates E of the largest completed nodes form a stack, a node of 2^h leaves in
    slot h, and their sum is the prefix estimate. Round i completes its leaf and merges it
    with the slots 0 to t - 1, for t the number of trailing ones of i in binary. Of the new
    noise in the nodes completed together only the part in the topmost is ever used,
    E_top = g Z_i + sum_h c_h s_h with s_h the entry of slot h, c_h the product of 1 - w
    over the new nodes of more than 2^h leaves, and g^2 the variance of what the new nodes
    contribute: f = 1 for the leaf, then w^2 + (1 - w)^2 f. The noise row is
    E_top - sum_h s_h. State vector h is Q_h, the sum of slots 0 to h, which changes by that
    row unless all of them were merged, and then is zero.

    Args:
      num_rounds: The number of rounds n.
      num_slots: The number of state vectors, for at least so many rounds.
    """
    weights = variances(1 << np.arange(num_slots + 1))
    gains = np.ones(num_slots + 1)
    # A phase for each number of merges.
    outputs, kept = (np.zeros((num_slots + 1, num_slots)) for _ in range(2))
    for merges in range(1, num_slots + 1):
        own = weights[merges]
        gains[merges] = np.sqrt(own**2 + ((1.0 - own) * gains[merges - 1]) ** 2)
        changes = np.cumprod(1.0 - weights[merges:0:-1])[::-1] - 1.0
        # s_h = Q_h - Q_{h - 1}.
        outputs[merges, :merges] = changes
        outputs[merges, : merges - 1] -= changes[1:]
    for merges in range(num_slots + 1):
        kept[merges, merges:] = 1.0
    lengths = np.arange(1, num_rounds + 1)
    trailing_ones = np.frexp((lengths & -lengths).astype(np.float64))[1] - 1
    return StateSpaceNoise(
        phases=trailing_ones.astype(np.int64),
        gains=gains,
        outputs=outputs,
        sources=np.tile(np.arange(num_slots), (num_slots + 1, 1)),
        decays=kept,
        feedbacks=kept.copy(),
    )


def full_recursion(num_rounds: int) -> StateSpaceNoise:
    """Returns the recursion of the pseudo-inverse: noise of precision matrix C_T^T C_T.

    Its density is a product with a factor exp(-s_v^2 / 2) for the sum s_v over each
    released node, so that rows can be drawn one after the other by messages along the tree.
    Given the rows before its first leaf, and by the factors of v and of all nodes that are
    not below v, the sum over v is normal with a precision lambda_v and a mean mu_v. Let
    p_v be 1 if v is released and else 0, and tau_v the variance of the sum by the factors
    of v and below (:func:`variances`):

    * for the root r, lambda = p_r and mu = 0;
    * for the left child a of v, with b its sibling and
      rho = 1 / (1 / lambda_v + tau_b), lambda = p_a + rho and mu = rho / lambda mu_v;
    * for the right child b, the sum s over the left one being known,
      lambda = p_b + lambda_v and mu = lambda_v / lambda (mu_v - s).

    (Where lambda is zero, so is mu.) Row i is mu of its leaf plus Z_i / sqrt(lambda). State
    vector d belongs to the node at depth d above the current leaf and is R = mu_v - (sum of
    the rows within v so far): every mean is then a multiple of its parent's R, so that
    the nodes on the way from the last common ancestor of leaves i and i + 1 down to leaf
    i + 1 get multiples of that ancestor's R, and the nodes above it lose the row.

    Args:
      num_rounds: The number of leaves n.
    """
    # At least one state vector, unused for one round: a recurrence without a state is none.
    height = max((num_rounds - 1).bit_length(), 1)
    precisions_of_leaves, shares_of_leaves = np.ones((2, num_rounds))
    # The depth of the last common ancestor of each leaf and the one before it.
    branchings = np.zeros(num_rounds, np.int64)
    shares_on_path = np.zeros((num_rounds, height))
    variance_of = functools.cache(lambda size: float(variances(np.array([size]))[0]))
    # Nodes to visit: their first leaf, leaves and depth, their lambda, and their mu over R of the
    # node from which the way to their first leaf branches off.
    nodes = [(0, num_rounds, 0, float(is_complete(num_rounds)), 1.0)]
    while nodes:
        start, size, depth, precision, share = nodes.pop()
        if size == 1:
            precisions_of_leaves[start], shares_of_leaves[start] = precision, share
            continue
        shares_on_path[start, depth] = share
        left = left_size(size)
        right = size - left
        branchings[start + left] = depth
        from_above = precision / (1.0 + precision * variance_of(right))
        of_left, of_right = 1.0 + from_above, is_complete(right) + precision
        share_of_right = precision / of_right if of_right else 0.0
        nodes.append((start, left, depth + 1, of_left, share * from_above / of_left))
        nodes.append((start + left, right, depth + 1, of_right, share_of_right))

    outputs = np.zeros((num_rounds, height))
    later = np.arange(1, num_rounds)
    outputs[later, branchings[later]] = shares_of_leaves[later]
    slots = np.arange(height)
    sources = np.tile(slots, (num_rounds, 1))
    decays = np.zeros((num_rounds, height))
    sources[:-1] = np.minimum(slots, branchings[later, np.newaxis])
    decays[:-1] = np.where(slots <= branchings[later, np.newaxis], 1.0, shares_on_path[later])
    return StateSpaceNoise(
        phases=np.arange(num_rounds),
        gains=1.0 / np.sqrt(precisions_of_leaves),
        outputs=outputs,
        sources=sources,
        decays=decays,
        feedbacks=-decays,
    )


class TreeRows(NamedTuple):
    """The tree that the noise of the first rounds comes from, and how exactly.

    Attributes:
      num_leaves: The leaves of the tree.
      error: The most that roundings change an entry of C by, over its magnitude.
      is_equal: Whether C^T C is C_T^T C_T, and not at most that.
    """

    num_leaves: int
    error: float
    is_equal: bool


def tree_of_rows(rows: StateSpaceNoise, num_rounds: int) -> TreeRows | None:
    """Returns the tree that makes the noise of the first rounds, or None for other rows.

    Arrays must be those of :func:`full_recursion` or :func:`online_recursion` number for number.
    Without roundings and for C the inverse of the noising matrix N of the first rounds, C^T C is at
    most C_T^T C_T for the rounds' columns of C_T, in the order of positive semi-definite matrices:

    * ``full``, all rounds: the two are equal, because N N^T is the inverse of C_T^T C_T.
    * ``full``, fewer rounds: C is a leading part of a lower-triangular matrix, so that ||C x|| is
      at most what all rows make of x and zeros in later rounds.
    * ``online``: the first rounds are those of a tree of as many leaves. N N^T = L L^T for the left
      inverse L of C_T from below. Every left inverse is the pseudo-inverse P plus an M with
      M C_T = 0. Rows of P are combinations of columns of C_T, so that M P^T = 0 and
      L L^T = P P^T + M M^T, which is at least P P^T = (C_T^T C_T)^-1. Inverses reverse the order.

    Roundings change each entry of C by at most an error times its magnitude. All of its numbers are
    sums, products and quotients of positive ones, whose relative errors add up at most. For m state
    vectors and in units of u = 2^-53, to first order:

    * ``full``: variances have 3 m, precisions 7 m, and factors of shares 7 m + 2. An entry is one
      product of shares, of at most m factors in all, over a gain of 3.5 m + 2.
    * ``online``: weights w have 4, numbers 1 - w have 9, and products of m of them 10 m. Those are
      at most 1/2; outputs, all of one sign, sum up to one of them minus one. Gains have 18.

    Args:
      rows: The rows.
      num_rounds: The first rounds that count, at most all.
    """
    rounds, (phases, vectors) = rows.num_rounds, rows.outputs.shape
    if phases == rounds == rows.phases[-1] + 1:
        leaves, roundings, is_equal = rounds, 7 * (vectors + 1) ** 2, num_rounds == rounds
        made = full_recursion(rounds)
    elif phases == vectors + 1 and num_rounds <= most_rounds(vectors):
        leaves, roundings, is_equal = num_rounds, 10 * vectors + 30, False
        made = online_recursion(num_rounds, vectors)
    else:
        return None
    is_same = np.array_equal(rows.phases[:num_rounds], made.phases[:num_rounds]) and all(
        np.array_equal(getattr(rows, name), getattr(made, name))
        for name in ("gains", "outputs", "sources", "decays", "feedbacks")
    )
    return TreeRows(leaves, roundings * 2.0**-53, is_equal) if is_same else None
