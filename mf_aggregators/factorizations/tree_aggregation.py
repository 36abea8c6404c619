"""Tree aggregation: noise in every node of a binary tree over the rounds, and its decoders.

The strategy matrix C_T has a row for each node of a binary tree whose leaves are the
rounds, so that C_T x holds the sums over the nodes (Denisov et al. App. C, Eq. 12;
prefix-sum paper Sec. 2). It has more rows than columns, and Honaker's two estimators are
two choices of its left inverse (Denisov et al. Prop. C.1).

The tree exists for any number n of rounds: a node over m > 1 leaves splits at the largest
power of two below m. Its 2 n - 1 nodes are numbered children before parents and left
before right, which for n = 2^k is the order of the papers' matrix. Unless n is a power of
two, the nodes on the right edge are over a number of leaves that is none; the sums over
those are not released, as in DP-FTRL, where a node is released when all of its 2^h leaves
have arrived. Their rows of C_T are zero, and what remains are the complete trees of the
binary expansion of n. That is the matrix of BandMF's printed errors for n = 2052: a row
over all 2052 rounds would cost more than it brings, 1.72 instead of 1.53 of the optimum.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
import scipy.linalg

from mf_aggregators import validation
from mf_aggregators.factorizations.factorization import Factorization
from mf_aggregators.noise_recursions import StateSpaceNoise
from mf_aggregators.participation import (
    FixedEpochOrder,
    Participation,
    SingleParticipation,
    check,
)
from mf_aggregators.sensitivity import Sensitivity
from mf_aggregators.workloads import Workload

_DECODERS = ("online", "full")
# Elementary steps that the search for the exact sensitivity may take: a few seconds.
_MOST_STEPS = 500_000_000
# Entries of any one of its tables.
_MOST_ENTRIES = 5_000_000

# A subtree up to its place: its leaves, and how many of them belong to released rounds.
_Shape: TypeAlias = tuple[int, int]


@dataclasses.dataclass(frozen=True, eq=False)
class _Tree:
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

    starts: np.ndarray
    stops: np.ndarray
    left: np.ndarray
    right: np.ndarray
    parents: np.ndarray
    depths: np.ndarray
    precisions: np.ndarray
    leaves: np.ndarray
    levels: tuple[np.ndarray, ...]

    @property
    def num_rounds(self) -> int:
        """The number of leaves n."""
        return int(self.leaves.shape[0])

    @property
    def height(self) -> int:
        """The edges from the root to the deepest leaf."""
        return len(self.levels)

    def paths(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
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


def _tree(num_rounds: int) -> _Tree:
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
    precisions = np.where(_is_complete(stops - starts), 1.0, 0.0)
    return _Tree(starts, stops, left, right, parents, depths, precisions, leaves, tuple(levels))


def _is_complete(size: Any) -> Any:
    """Whether a node over so many leaves is released: powers of two."""
    return size & (size - 1) == 0


def _left_size(sizes: Any) -> Any:
    """The largest power of two strictly below each size: the leaves of the left child."""
    exponents = np.frexp(np.asarray(sizes, np.float64) - 1.0)[1]
    return np.left_shift(np.int64(1), np.asarray(exponents, np.int64) - 1)


def _variances_from_below(tree: _Tree) -> np.ndarray:
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


class TreeAggregationFactorization(Factorization):
    """C = C_T, with one of Honaker's two estimators as its left inverse.

    The dense view :meth:`noising_matrix` combines 2 n - 1 rows of Z, one for each node. The
    stream :meth:`noise_recursion` draws one row of Z a round instead, n in all, and its
    rows have the same joint distribution: for N_s its (n, n) lower-triangular matrix,
    N_s N_s^T = N N^T. So x plus the streamed noise is distributed as N (C_T x + Z), which
    is post-processing of C_T x + Z, since N C_T = I; the privacy of one is that of the
    other. For updates chosen in view of earlier releases the same holds through the
    square matrix C_s = N_s^-1 (Denisov et al. Thm 2.1): C_s^T C_s = (N N^T)^-1 is at most
    C_T^T C_T in the order of symmetric matrices, and equal to it for ``full``, so that no
    change of x changes C_s x more than C_T x.

    Decoders are (n, 2 n - 1): B = A N, so that B C_T = A.
    """

    mechanism = "tree"

    def __init__(self, num_rounds: int, decoder: str = "online", **attributes: Any) -> None:
        """Creates the factorization.

        Args:
          num_rounds: The number of rounds n, at least 1.
          decoder: ``online`` or ``full``, as in :func:`tree_aggregation`.
          **attributes: Those of the base class.

        Raises:
          ValueError: If an argument is out of its range.
        """
        if decoder not in _DECODERS:
            raise ValueError(f"decoder must be one of {', '.join(_DECODERS)}, found {decoder!r}.")
        attributes["parameters"] = {**(attributes.get("parameters") or {}), "decoder": decoder}
        super().__init__(**attributes)
        self._decoder = decoder
        self._num_rounds = validation.positive_integer(num_rounds, "num_rounds")

    @functools.cached_property
    def _tree(self) -> _Tree:
        return _tree(self._num_rounds)

    @property
    def num_rounds(self) -> int:
        """The number of rounds n."""
        return self._num_rounds

    @property
    def decoder(self) -> str:
        """The estimator: ``online`` or ``full``."""
        return self._decoder

    def strategy_matrix(self) -> np.ndarray:
        """Returns C_T: (2 n - 1, n) float64 zeros and ones, in the module's order of nodes."""
        rounds, tree = np.arange(self._num_rounds), self._tree
        covered = rounds >= tree.starts[:, np.newaxis]
        covered &= rounds < tree.stops[:, np.newaxis]
        return covered * tree.precisions[:, np.newaxis]

    def noising_matrix(self) -> np.ndarray:
        """Returns the left inverse N of C_T: (n, 2 n - 1) float64.

        For ``full`` the pseudo-inverse of C_T, for ``online`` S^-1 B with B the streaming
        estimator of the prefix sums (Denisov et al. Prop. C.1).
        """
        if self._decoder == "full":
            strategy = self.strategy_matrix()
            gram = strategy.T @ strategy
            return scipy.linalg.solve(gram, strategy.T, assume_a="pos", check_finite=False)
        return _online_noising_matrix(self._tree)

    def noise_recursion(self) -> StateSpaceNoise:
        """Returns the recursion of O(log n) state vectors and one row of Z a round."""
        if self._decoder == "full":
            return _full_recursion(self._tree)
        return _online_recursion(self._num_rounds)

    def _decoder_matrix(self, workload: np.ndarray) -> np.ndarray:
        # (n, 2 n - 1): B C_T = A N C_T = A.
        return workload @ self.noising_matrix()

    def _strategy_product(self, x: np.ndarray) -> np.ndarray:
        tree = self._tree
        sums = np.zeros((len(tree.starts), *x.shape[1:]))
        sums[tree.leaves] = x
        for nodes in reversed(tree.levels):
            sums[nodes] = sums[tree.left[nodes]] + sums[tree.right[nodes]]
        sums[tree.precisions == 0.0] = 0.0
        return sums

    def squared_decoder_rows(self, workload: Any) -> np.ndarray:
        """Returns ||row i of B||^2: see the base class; O(n log n) for the prefix sum."""
        if isinstance(workload, Workload) and workload.name == "prefix_sum":
            self._check_rounds(workload.num_rounds)
            if self._decoder == "full":
                return _full_prefix_variances(self._tree)
            return _online_prefix_variances(self._num_rounds)
        return super().squared_decoder_rows(workload)

    def sensitivity(self, participation: Participation) -> Sensitivity:
        """Returns the sensitivity of C_T, from counts of participations in the nodes.

        C_T^T C_T has no negative entry, so that the squared sensitivity is the largest sum,
        over the nodes, of the squared number of a pattern's participations in the node
        (BandMF Prop. E.1). Where the search over patterns with a least separation would
        take too long, the result is an upper bound that says so.
        """
        return self._sensitivity_of_first(self._num_rounds, participation)

    def _sensitivity_of_first(self, rounds: int, participation: Participation) -> Sensitivity:
        # What the first rounds release follows from C_T x + Z with x zero in later rounds:
        # C_T without the columns of those.
        most = check(participation).most_participations(rounds)
        tree = self._tree
        if most == 1:
            # The first round is in the largest complete tree, below all of its levels.
            return Sensitivity(
                float(np.sqrt(self._num_rounds.bit_length())),
                is_exact=True,
                theorem="largest column norm (Denisov et al. Thm 4.1)",
            )
        assert not isinstance(participation, SingleParticipation)
        separation = participation.separation
        equally_spaced = int(np.max(_equally_spaced_sums(tree, rounds, separation, most)))
        if isinstance(participation, FixedEpochOrder):
            return Sensitivity(
                float(np.sqrt(equally_spaced)),
                is_exact=True,
                theorem="enumeration of patterns (BandMF Eq. 5)",
            )
        return _min_separation(
            _PatternSearch((self._num_rounds, rounds), separation, most, equally_spaced)
        )

    def arrays(self) -> dict[str, np.ndarray]:
        """Returns no arrays: the number of rounds and the decoder say it all."""
        return {}

    @classmethod
    def from_arrays(
        cls, num_rounds: int, arrays: Mapping[str, np.ndarray], **attributes: Any
    ) -> "TreeAggregationFactorization":
        """Rebuilds the factorization; see the base class."""
        decoder: Any = (attributes.get("parameters") or {}).get("decoder")
        return cls(num_rounds, decoder, **attributes)


def tree_aggregation(num_rounds: int, decoder: str = "online") -> TreeAggregationFactorization:
    """Returns the binary-tree mechanism with one of Honaker's estimators.

    Args:
      num_rounds: The number of rounds n, at least 1.
      decoder: ``online`` for the estimator from below: of each prefix sum, the unbiased
        estimate of least variance from the nodes completed so far, which is DP-FTRL's;
        ``full`` for the estimate of least variance from all nodes, the pseudo-inverse
        (Denisov et al. Prop. C.1). Gaussian noise of the latter's distribution can be
        drawn round by round as well, so that both serve in streams.

    Returns:
      The factorization.

    Raises:
      ValueError: If ``num_rounds`` is not a positive integer or the decoder is unknown.
    """
    return TreeAggregationFactorization(num_rounds, decoder)


def _online_noising_matrix(tree: _Tree) -> np.ndarray:
    """Row i: the change of the prefix estimate, a sum of estimates E of completed nodes.

    E = w Z + (1 - w) (E_left + E_right) with weights in the ratio of the precisions, of
    which the node's own is 1, so that w is the variance of E.
    """
    weights = _variances_from_below(tree)
    noising = np.zeros((tree.num_rounds, len(tree.starts)))
    # E of the largest completed nodes, from left to right.
    estimates: list[np.ndarray] = []
    for i in range(tree.num_rounds):
        leaf, *completed = tree.completed_by(i)
        estimate = np.zeros(len(tree.starts))
        estimate[leaf] = 1.0
        for node in completed:
            merged = estimates.pop()
            noising[i] -= merged
            estimate = (1.0 - weights[node]) * (merged + estimate)
            estimate[node] = weights[node]
        noising[i] += estimate
        estimates.append(estimate)
    return noising


def _complete_variances(num_heights: int) -> np.ndarray:
    """Returns :func:`_variances_from_below` of complete nodes over 1, 2, 4, ... leaves."""
    variances = np.ones(num_heights)
    for height in range(1, num_heights):
        variances[height] = 2.0 * variances[height - 1] / (1.0 + 2.0 * variances[height - 1])
    return variances


def _online_recursion(num_rounds: int) -> StateSpaceNoise:
    """The recursion of the estimator from below.

    The estimates E of the largest completed nodes form a stack, a node of 2^h leaves in
    slot h, and their sum is the prefix estimate. Round i completes its leaf and merges it
    with the slots 0 to t - 1, for t the number of trailing ones of i in binary. Of the new
    noise in the nodes completed together only the part in the topmost is ever used,
    E_top = g Z_i + sum_h c_h s_h with s_h the entry of slot h, c_h the product of 1 - w
    over the new nodes of more than 2^h leaves, and g^2 the variance of what the new nodes
    contribute: f = 1 for the leaf, then w^2 + (1 - w)^2 f. The noise row is
    E_top - sum_h s_h. State vector h is Q_h, the sum of slots 0 to h, which changes by that
    row unless all of them were merged, and then is zero.
    """
    # At least one, unused for one round: a recurrence without a state is none.
    num_slots = max(num_rounds.bit_length() - 1, 1)
    weights = _complete_variances(num_slots + 1)
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
        inputs=np.zeros_like(kept),
        feedbacks=kept.copy(),
    )


def _full_recursion(tree: _Tree) -> StateSpaceNoise:
    """The recursion of the pseudo-inverse, whose noise has precision matrix C_T^T C_T.

    Its density is a product with a factor exp(-s_v^2 / 2) for the sum s_v over each
    released node, so that rows can be drawn one after the other by messages along the tree.
    Given the rows before its first leaf, and by the factors of v and of all nodes that are
    not below v, the sum over v is normal with a precision lambda_v and a mean mu_v. Let
    p_v be 1 if v is released and else 0, and tau_v the variance of the sum by the factors
    of v and below (:func:`_variances_from_below`):

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
    """
    # At least one state vector, unused for one round: a recurrence without a state is none.
    num_rounds, height = tree.num_rounds, max(tree.height, 1)
    variances = _variances_from_below(tree)
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
        inputs=np.zeros((num_rounds, height)),
        feedbacks=-decays,
    )


def _online_prefix_variances(num_rounds: int) -> np.ndarray:
    """The prefix estimate after round i is the sum over the binary expansion of i + 1."""
    lengths = np.arange(1, num_rounds + 1)
    result = np.zeros(num_rounds)
    for height, variance in enumerate(_complete_variances(num_rounds.bit_length())):
        result += variance * (lengths >> height & 1)
    return result


def _full_prefix_variances(tree: _Tree) -> np.ndarray:
    """Variances of the prefix sums of rows with precision matrix C_T^T C_T.

    Within a node over leaf i let F be the sum of the rows from the node's first leaf to
    leaf i. Given the sum s over the node, F is normal with mean alpha s and a variance
    beta: 1 and 0 for the leaf itself. Given s, the sum over the left child a has mean g s,
    g = tau_a / (tau_a + tau_b), and variance g tau_b. So from the left child to the node,
    alpha' = alpha g and beta' = beta + alpha^2 g tau_b; from the right child, where F is the
    left sum plus alpha times the right one, alpha' = alpha + (1 - alpha) g and
    beta' = beta + (1 - alpha)^2 g tau_b.
    """
    variances = _variances_from_below(tree)
    slopes, remainders = np.ones(tree.num_rounds), np.zeros(tree.num_rounds)
    for rounds, nodes in tree.paths():
        parents = tree.parents[nodes]
        if not np.all(parents >= 0):
            break
        left, right = variances[tree.left[parents]], variances[tree.right[parents]]
        share = left / (left + right)
        from_left = tree.left[parents] == nodes
        slope = slopes[rounds]
        of_left_sum = np.where(from_left, slope, 1.0 - slope)
        remainders[rounds] += np.square(of_left_sum) * share * right
        slopes[rounds] = np.where(from_left, slope * share, slope + of_left_sum * share)
    return np.square(slopes) * variances[-1] + remainders


def _equally_spaced_sums(tree: _Tree, rounds: int, separation: int, most: int) -> np.ndarray:
    """Sums of squared counts of the maximal patterns of exact spacing, by their first round.

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
    return np.cumsum(changes.reshape(-1, separation), axis=0).reshape(-1)[:num_starts]


class _TooManySteps(Exception):  # noqa: N818 - a signal that ends a search, not an error.
    """Raised where a search would take longer than is worth it."""


def _min_separation(search: "_PatternSearch") -> Sensitivity:
    """The sensitivity under a least separation, exact where the search can settle it."""
    try:
        squared, is_exact = search.run()
    except _TooManySteps:
        squared, is_exact = search.upper_bound, search.upper_bound == search.lower_bound
    theorem = (
        "search over the patterns of the tree (BandMF Prop. E.1)"
        if is_exact
        else "upper bound: participations apart within nodes of the tree only"
    )
    return Sensitivity(float(np.sqrt(squared)), is_exact=is_exact, theorem=theorem)


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
        self._bounds: dict[_Shape, np.ndarray] = {}
        self._waits: dict[tuple[_Shape, bool], np.ndarray] = {}
        self._shortfall = 0
        self._steps = 0

    def run(self) -> tuple[int, bool]:
        """Returns the best known upper bound and whether a pattern reaches it.

        Raises:
          _TooManySteps: If the question cannot be settled in reasonable time.
        """
        if self.upper_bound > self.lower_bound:
            bounds = self._bound(self._shape)
            self.upper_bound = int(bounds[-1])
            # Without a separation nothing was forgotten.
            if self.upper_bound > self.lower_bound and self._separation > 1:
                self._shortfall = self.upper_bound - self.lower_bound - 1
                self._spend_on_waits(self._shape)
                waits = self._least_waits(self._shape, is_first=True)[:, :, 0]
                counts, shortfalls = np.nonzero(waits < self._separation)
                sums = bounds[counts] - shortfalls
                self.upper_bound = max(self.lower_bound, int(np.max(sums)))
        return self.upper_bound, True

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
            if _is_complete(size):
                total += times * self._largest_count((size, released)) ** 2
            if size > 1 and released:
                for part in _parts((size, released)):
                    remaining[part] = remaining.get(part, 0) + times
        return total

    def _bound(self, shape: _Shape) -> np.ndarray:
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

    def _splits(self, shape: _Shape) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
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

    def _least_waits(self, shape: _Shape, is_first: bool) -> np.ndarray:
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
        if key in self._waits:
            return self._waits[key]
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
            left, right = _parts(shape)
            left_waits = self._least_waits(left, is_first)
            right_waits = self._least_waits(right, False)
            for first, second, spare in zip(*self._splits(shape), strict=True):
                own = self._shortfall - spare
                for lost in range(spare + 1):
                    between = left_waits[first, lost]
                    if lost and np.array_equal(between, left_waits[first, lost - 1]):
                        continue
                    reached = waits[first + second, own + lost :]
                    ends = right_waits[second, : len(reached)][:, between]
                    np.minimum(reached, ends, out=reached)
        self._waits[key] = waits
        return waits


def _own_term(shape: _Shape, counts: np.ndarray) -> np.ndarray:
    """What a node with so many participations adds to the sum of squared counts."""
    return np.square(counts) * int(_is_complete(shape[0]))


def _parts(shape: _Shape) -> tuple[_Shape, _Shape]:
    """The shapes of the two children of a subtree."""
    size, released = shape
    left_size = 1 << ((size - 1).bit_length() - 1)
    return (
        (left_size, min(released, left_size)),
        (size - left_size, max(released - left_size, 0)),
    )
