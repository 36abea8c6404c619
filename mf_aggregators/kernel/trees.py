"""Binary trees over rounds: largest sums of squared counts of participations, and noise rows.

The tree over n leaves has a node over rounds a 2^h to (a + 1) 2^h - 1 for all a and h with
(a + 1) 2^h <= n. For its strategy matrix C_T with a row of ones and zeros for each node, C_T^T C_T
has no negative entry, and ||C_T u||^2 for ones u in a pattern is the sum over nodes of the squared
number of participations in the node (Denisov et al. App. C; BandMF Prop. E.1).

As data (:class:`Tree`), a node over m > 1 leaves splits at the largest power of two below m. The
2 n - 1 nodes are numbered children before parents and left before right, which for n = 2^k is the
order of the papers' matrix (Denisov et al. App. C, Eq. 12). A node's sum is released if it is over
2^h leaves; the others join the complete trees of the binary expansion of n.
"""

import dataclasses
import functools
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from mf_aggregators.kernel.arrays import FloatArray, IntArray
from mf_aggregators.kernel.rows import StateSpaceNoise

# Pairs of partial patterns that a search may look at: a few seconds.
_MOST_STEPS = 2_000_000
# A subtree up to its place: its leaves, and how many of them are rounds that count.
_Shape: TypeAlias = tuple[int, int]
# Quotients of gains that count as one factor.
_ROUNDING_OF_GAINS = 1e-13


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
    """The two children of a subtree; none of a leaf, or where no round counts."""
    size, released = shape
    if size == 1 or released == 0:
        return ()
    left = 1 << ((size - 1).bit_length() - 1)
    return (left, min(released, left)), (size - left, max(released - left, 0))


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


def variances_from_below(tree: Tree) -> FloatArray:
    """Returns for each node the variance of the best estimate of its sum from its subtree alone.

    A leaf has only its own observation, of variance 1. The sum of a node is observed twice,
    by the node itself and by the sum of its children's estimates, and precisions add:
    1 / v = 1 + 1 / (v_left + v_right), without the 1 where the node is not released.
    """
    variances = np.ones(len(tree.starts))
    for nodes in reversed(tree.levels):
        below = variances[tree.left[nodes]] + variances[tree.right[nodes]]
        variances[nodes] = below / (1.0 + tree.precisions[nodes] * below)
    return variances


def complete_variances(num_heights: int) -> FloatArray:
    """Returns :func:`variances_from_below` of complete nodes over 1, 2, 4, ... leaves."""
    variances = np.ones(num_heights)
    for height in range(1, num_heights):
        variances[height] = 2.0 * variances[height - 1] / (1.0 + 2.0 * variances[height - 1])
    return variances


def most_rounds(num_slots: int) -> int:
    """Returns the most rounds that so many state vectors are enough for."""
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
    weights = complete_variances(num_slots + 1)
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


def full_recursion(tree: Tree) -> StateSpaceNoise:
    """Returns the recursion of the pseudo-inverse, whose noise has precision matrix C_T^T C_T.

    Its density is a product with a factor exp(-s_v^2 / 2) for the sum s_v over each
    released node, so that rows can be drawn one after the other by messages along the tree.
    Given the rows before its first leaf, and by the factors of v and of all nodes that are
    not below v, the sum over v is normal with a precision lambda_v and a mean mu_v. Let
    p_v be 1 if v is released and else 0, and tau_v the variance of the sum by the factors
    of v and below (:func:`variances_from_below`):

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
      tree: The tree.
    """
    # At least one state vector, unused for one round: a recurrence without a state is none.
    num_rounds, height = tree.num_rounds, max(tree.height, 1)
    variances = variances_from_below(tree)
    precisions = tree.precisions.copy()
    # mu of a node over R of the node from which the way to its first leaf branches off.
    shares = np.ones(len(tree.starts))
    for nodes in tree.levels:
        left, right = tree.left[nodes], tree.right[nodes]
        from_above = precisions[nodes] / (1.0 + precisions[nodes] * variances[right])
        precisions[left] += from_above
        precisions[right] += precisions[nodes]
        shares[left] = shares[nodes] * from_above / precisions[left]
        known = precisions[right] > 0.0
        shares[right] = np.where(
            known, precisions[nodes] / np.where(known, precisions[right], 1), 0
        )
    # Depth of the last common ancestor of each leaf and the one before it.
    branchings = np.full(num_rounds, height)
    np.minimum.at(branchings, tree.starts, tree.depths)
    branchings -= 1
    # Nodes that start at leaf i are those below the branching on its way.
    shares_on_path = np.zeros((num_rounds, height))
    for nodes in tree.levels:
        shares_on_path[tree.starts[nodes], tree.depths[nodes]] = shares[nodes]

    outputs = np.zeros((num_rounds, height))
    later = np.arange(1, num_rounds)
    outputs[later, branchings[later]] = shares[tree.leaves[later]]
    slots = np.arange(height)
    sources = np.tile(slots, (num_rounds, 1))
    decays = np.zeros((num_rounds, height))
    sources[:-1] = np.minimum(slots, branchings[later, np.newaxis])
    decays[:-1] = np.where(slots <= branchings[later, np.newaxis], 1.0, shares_on_path[later])
    return StateSpaceNoise(
        phases=np.arange(num_rounds),
        gains=1.0 / np.sqrt(precisions[tree.leaves]),
        outputs=outputs,
        sources=sources,
        decays=decays,
        feedbacks=-decays,
    )


class TreeRows(NamedTuple):
    """What is known of the noise of the first rounds if it is that of a binary tree.

    Attributes:
      num_leaves: The leaves of the tree.
      factor: C over that of the kernel's own arrays.
      error: The most that roundings change an entry of C by, over its magnitude.
      is_equal: Whether C^T C is C_T^T C_T times the squared factor, and not at most that.
    """

    num_leaves: int
    factor: float
    error: float
    is_equal: bool


def tree_of_rows(rows: StateSpaceNoise, num_rounds: int) -> TreeRows | None:
    """Returns the tree whose noise is that of the first rounds, or None of other rows.

    Arrays must be those of :func:`full_recursion` or :func:`online_recursion` number for number,
    apart from one factor f of all gains. C, the inverse of the noising matrix N of the first
    rounds, is then 1 / f times that of the kernel's own arrays. Without roundings and for f = 1,
    C^T C is at most C_T^T C_T for the rounds' columns of C_T, in the order of positive
    semi-definite matrices:

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
        made = full_recursion(binary_tree(rounds))
    elif phases == vectors + 1 and num_rounds <= most_rounds(vectors):
        leaves, roundings, is_equal = num_rounds, 10 * vectors + 30, False
        made = online_recursion(num_rounds, vectors)
    else:
        return None
    is_same = np.array_equal(rows.phases[:num_rounds], made.phases[:num_rounds])
    for name in ("outputs", "sources", "decays", "feedbacks"):
        is_same = is_same and np.array_equal(getattr(rows, name), getattr(made, name))
    with np.errstate(all="ignore"):
        factors = made.gains / rows.gains if is_same else np.zeros(1)
    # Less noise by a rounding is C times a diagonal matrix. NaN does not pass comparisons.
    largest = float(np.max(factors))
    if 1e-100 < largest <= np.min(factors) * (1.0 + _ROUNDING_OF_GAINS) < 1e100:
        return TreeRows(leaves, largest, roundings * 2.0**-53, is_equal)
    return None
