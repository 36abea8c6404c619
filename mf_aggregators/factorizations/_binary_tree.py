"""The binary tree over the rounds of a run.

A node over m > 1 leaves splits at the largest power of two below m. The 2 n - 1 nodes are
numbered children before parents and left before right, which for n = 2^k is the order of the
papers' matrix (Denisov et al. App. C, Eq. 12). A node's sum is released if it is over 2^h
leaves; the others join the complete trees of the binary expansion of n.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from mf_aggregators.kernel.arrays import FloatArray, IntArray


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
