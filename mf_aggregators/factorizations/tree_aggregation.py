"""Tree aggregation: noise in every node of a binary tree over the rounds, and its decoders.

The strategy matrix C_T has a row for each node of a binary tree whose leaves are the
rounds, so that C_T x holds the sums over the nodes (Denisov et al. App. C, Eq. 12;
prefix-sum paper Sec. 2). It has more rows than columns, and Honaker's two estimators are
two choices of its left inverse (Denisov et al. Prop. C.1).

The tree (see ``kernel.trees``) exists for any number n of rounds. Unless n is a power of
two, the nodes on the right edge are over a number of leaves that is none; the sums over
those are not released, as in DP-FTRL, where a node is released when all of its 2^h leaves
have arrived. Their rows of C_T are zero, and what remains are the complete trees of the
binary expansion of n. That is the matrix of BandMF's printed errors for n = 2052: a row
over all 2052 rounds would cost more than it brings, 1.72 instead of 1.53 of the optimum.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import scipy.linalg

from mf_aggregators import memory, workloads
from mf_aggregators.factorizations import noise_rows
from mf_aggregators.factorizations.factorization import ExtensionError, Factorization
from mf_aggregators.kernel import numbers
from mf_aggregators.kernel.numbers import FloatArray, IntArray
from mf_aggregators.kernel.rows import StateSpaceNoise
from mf_aggregators.kernel.sensitivity import Sensitivity, of_tree
from mf_aggregators.kernel.trees import (
    full_recursion,
    is_complete,
    left_size,
    most_rounds,
    online_recursion,
    variances,
)
from mf_aggregators.participation import (
    Participation,
    check,
)
from mf_aggregators.workloads import Workload

_DECODERS = ("online", "full")
# A lower estimate of what the rows of a decoder take.
_BYTES_PER_ROUND = {"online": 30, "full": 150}
# State vectors that no round of a plan needs, and those of one of four times its rounds do.
_SPARE_SLOTS = 2


@dataclasses.dataclass(frozen=True, eq=False)
class Tree:
    """The tree over n leaves; node v covers the leaves starts[v] to stops[v] - 1.

    The 2 n - 1 nodes are numbered children before parents and left before right, which for n = 2^k
    is the order of the papers' matrix (Denisov et al. App. C, Eq. 12).

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
    def sizes(self) -> IntArray:
        """The leaves of each node, (2 n - 1,) int64."""
        return self.stops - self.starts

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
        left_sizes = left_size(sizes)
        left[nodes] = offsets + 2 * left_sizes - 2
        right[nodes] = nodes - 1
        parents[left[nodes]] = parents[right[nodes]] = nodes
        first_leaves = np.concatenate([first_leaves, first_leaves + left_sizes])
        offsets = np.concatenate([offsets, offsets + 2 * left_sizes - 1])
        sizes = np.concatenate([left_sizes, sizes - left_sizes])
        depth += 1
    precisions = np.where(is_complete(stops - starts), 1.0, 0.0)
    return Tree(starts, stops, left, right, parents, depths, precisions, leaves, tuple(levels))


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
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

    Attributes:
      num_rounds: The number of rounds n, at least 1.
      decoder: The estimator, ``online`` or ``full``, as in :func:`tree_aggregation`.

    Raises:
      ValueError: If one is out of its range.
    """

    mechanism = "tree"
    goes_on = "in the same tree, with the decoder `online`, up to four times the rounds and more"

    num_rounds: int
    decoder: str

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.decoder not in _DECODERS:
            raise ValueError(
                f"decoder must be one of {', '.join(_DECODERS)}, found {self.decoder!r}."
            )
        numbers.set_positive_integers(self, "num_rounds")
        memory.check_rounds(self.num_rounds, _BYTES_PER_ROUND[self.decoder], "the tree")
        self._set(parameters={**self.parameters, "decoder": self.decoder})

    @functools.cached_property
    def _tree(self) -> Tree:
        return binary_tree(self.num_rounds)

    def strategy_matrix(self) -> FloatArray:
        """Returns C_T: (2 n - 1, n) float64 zeros and ones, in the tree's order of nodes."""
        rounds, starts, stops = np.arange(self.num_rounds), self._tree.starts, self._tree.stops
        covered = (rounds >= starts[:, np.newaxis]) & (rounds < stops[:, np.newaxis])
        return covered * self._tree.precisions[:, np.newaxis]

    def noising_matrix(self) -> FloatArray:
        """Returns the left inverse N of C_T: (n, 2 n - 1) float64.

        For ``full`` the pseudo-inverse of C_T, for ``online`` S^-1 B with B the streaming
        estimator of the prefix sums (Denisov et al. Prop. C.1).
        """
        if self.decoder == "full":
            strategy = self.strategy_matrix()
            gram = strategy.T @ strategy
            inverse = scipy.linalg.solve(gram, strategy.T, assume_a="pos", check_finite=False)
            return np.asarray(inverse)
        return online_noising_matrix(self._tree)

    def noise_recursion(self) -> StateSpaceNoise:
        """Returns the recursion of O(log n) state vectors and one row of Z a round."""
        if self.decoder == "full":
            return full_recursion(self.num_rounds)
        first = self.plans[0] if self.plans else self.num_rounds
        return online_recursion(self.num_rounds, num_slots(first))

    def streamed_bands(self) -> int:
        """Returns n: the bands of C_s, whose inverse N_s makes the streamed rows of noise."""
        return self.num_rounds

    def encode_streamed(self, x: Any) -> FloatArray:
        """Returns C_s x, for an (n, m) array x; C_s is dense on the way."""
        streamed = noise_rows.dense(self.noise_recursion())
        return np.asarray(scipy.linalg.solve_triangular(streamed, x, lower=True))

    def _decoder_matrix(self, workload: FloatArray) -> FloatArray:
        # (n, 2 n - 1): B C_T = A N C_T = A.
        return workload @ self.noising_matrix()

    def _encode(self, x: FloatArray) -> FloatArray:
        tree = self._tree
        sums = np.zeros((len(tree.starts), *x.shape[1:]))
        sums[tree.leaves] = x
        for nodes in reversed(tree.levels):
            sums[nodes] = sums[tree.left[nodes]] + sums[tree.right[nodes]]
        sums[tree.precisions == 0.0] = 0.0
        return sums

    def squared_decoder_rows(self, workload: Any) -> FloatArray:
        """Returns ||row i of B||^2: see the base class; O(n log n) for the prefix sum."""
        workload = workloads.resolve(workload)
        if isinstance(workload, Workload) and workload.name == "prefix_sum":
            self._check_rounds(workload.num_rounds)
            if self.decoder == "full":
                return full_prefix_variances(self._tree)
            return online_prefix_variances(self.num_rounds)
        return super().squared_decoder_rows(workload)

    def _sensitivity(self, participation: Participation) -> Sensitivity:
        """The sensitivity of C_T, from counts of participations in the nodes.

        C_T^T C_T has no negative entry, so that the squared sensitivity is the largest sum,
        over the nodes, of the squared number of a pattern's participations in the node
        (BandMF Prop. E.1). Where the search over patterns with a least separation would
        take too long, the result is an upper bound that says so.
        """
        return of_tree(self.num_rounds, self.num_rounds, check(participation).as_schema())

    def _extended(
        self,
        num_rounds: int,
        participation: Participation,
        workload: Workload,
        parameters: dict[str, Any],
    ) -> "TreeAggregationFactorization":
        del participation, workload
        if self.decoder != "online":
            raise ExtensionError(
                f"a tree of {self.num_rounds} rounds with the decoder {self.decoder!r} cannot be "
                "extended: each of its rows of noise is made in view of all rounds that follow."
            )
        first = self.plans[0] if self.plans else self.num_rounds
        most = most_rounds(num_slots(first))
        if num_rounds > most:
            raise ExtensionError(
                f"a tree that began with {first} rounds cannot be extended to {num_rounds}: its "
                f"noise keeps the sums of a tree of at most {most} rounds."
            )
        return TreeAggregationFactorization(num_rounds, self.decoder, parameters=parameters)

    def _of_first_rounds(
        self, num_rounds: int, parameters: dict[str, Any]
    ) -> "TreeAggregationFactorization":
        return TreeAggregationFactorization(num_rounds, self.decoder, parameters=parameters)


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

    Example:
      >>> import mf_aggregators as mfa
      >>> once = mfa.participation.SingleParticipation()
      >>> tree = mfa.factorizations.tree_aggregation(64, decoder="full")
      >>> round(tree.rmse(mfa.workloads.prefix_sum(64), once), 3)
      2.518
    """
    return TreeAggregationFactorization(num_rounds, decoder)


def online_noising_matrix(tree: Tree) -> FloatArray:
    """Returns the left inverse of C_T that is the estimator from below.

    Row i is the change of the prefix estimate, a sum of estimates E of completed nodes.
    E = w Z + (1 - w) (E_left + E_right) with weights in the ratio of the precisions, of
    which the node's own is 1, so that w is the variance of E.

    Args:
      tree: The tree.

    Returns:
      (n, 2 n - 1) float64.
    """
    weights = variances(tree.sizes)
    noising = np.zeros((tree.num_rounds, len(tree.starts)))
    # E of the largest completed nodes, from left to right.
    estimates: list[FloatArray] = []
    for i in range(tree.num_rounds):
        leaf, *completed = _completed_by(tree, i)
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


def num_slots(num_rounds: int) -> int:
    """Returns how many state vectors the estimator from below keeps.

    Args:
      num_rounds: The number of rounds n that a run is planned for.

    Returns:
      floor(log2 n) for these rounds, and :data:`_SPARE_SLOTS` for a run that is extended: products
      over another number of vectors would not be the same to the last bit.
    """
    return num_rounds.bit_length() - 1 + _SPARE_SLOTS


def online_prefix_variances(num_rounds: int) -> FloatArray:
    """Returns the variances of prefix sums by the estimator from below.

    The estimate after round i is the sum over the binary expansion of i + 1.

    Args:
      num_rounds: The number of rounds n.

    Returns:
      (n,) float64.
    """
    lengths = np.arange(1, num_rounds + 1)
    result = np.zeros(num_rounds)
    for height, variance in enumerate(variances(1 << np.arange(num_rounds.bit_length()))):
        result += variance * (lengths >> height & 1)
    return result


def full_prefix_variances(tree: Tree) -> FloatArray:
    """Returns the variances of the prefix sums of rows with precision matrix C_T^T C_T.

    Within a node over leaf i let F be the sum of the rows from the node's first leaf to
    leaf i. Given the sum s over the node, F is normal with mean alpha s and a variance
    beta: 1 and 0 for the leaf itself. Given s, the sum over the left child a has mean g s,
    g = tau_a / (tau_a + tau_b), and variance g tau_b. So from the left child to the node,
    alpha' = alpha g and beta' = beta + alpha^2 g tau_b; from the right child, where F is the
    left sum plus alpha times the right one, alpha' = alpha + (1 - alpha) g and
    beta' = beta + (1 - alpha)^2 g tau_b.

    Args:
      tree: The tree.

    Returns:
      (n,) float64.
    """
    of_nodes = variances(tree.sizes)
    slopes, remainders = np.ones(tree.num_rounds), np.zeros(tree.num_rounds)
    for rounds, nodes in _paths(tree):
        parents = tree.parents[nodes]
        if not np.all(parents >= 0):
            break
        left, right = of_nodes[tree.left[parents]], of_nodes[tree.right[parents]]
        share = left / (left + right)
        from_left = tree.left[parents] == nodes
        slope = slopes[rounds]
        of_left_sum = np.where(from_left, slope, 1.0 - slope)
        remainders[rounds] += np.square(of_left_sum) * share * right
        slopes[rounds] = np.where(from_left, slope * share, slope + of_left_sum * share)
    return np.asarray(np.square(slopes) * of_nodes[-1] + remainders)


def _paths(tree: Tree) -> Iterator[tuple[IntArray, IntArray]]:
    """Yields, from the deepest level up, the rounds below each level and their nodes there."""
    nodes = tree.leaves.copy()
    for depth in range(tree.height, -1, -1):
        rounds = np.flatnonzero(tree.depths[nodes] == depth)
        yield rounds, nodes[rounds]
        nodes[rounds] = tree.parents[nodes[rounds]]


def _completed_by(tree: Tree, leaf: int) -> list[int]:
    """Returns the nodes that a leaf's round completes and releases, from the leaf up."""
    chain = [int(tree.leaves[leaf])]
    while True:
        parent = int(tree.parents[chain[-1]])
        if parent < 0 or not tree.precisions[parent] or tree.right[parent] != chain[-1]:
            return chain
        chain.append(parent)
