"""Tree aggregation: noise in every node of a binary tree over the rounds, and its decoders.

The strategy matrix C_T has a row for each node of a binary tree whose leaves are the
rounds, so that C_T x holds the sums over the nodes (Denisov et al. App. C, Eq. 12;
prefix-sum paper Sec. 2). It has more rows than columns, and Honaker's two estimators are
two choices of its left inverse (Denisov et al. Prop. C.1).

The tree (see ``binary_tree``) exists for any number n of rounds. Unless n is a power of
two, the nodes on the right edge are over a number of leaves that is none; the sums over
those are not released, as in DP-FTRL, where a node is released when all of its 2^h leaves
have arrived. Their rows of C_T are zero, and what remains are the complete trees of the
binary expansion of n. That is the matrix of BandMF's printed errors for n = 2052: a row
over all 2052 rounds would cost more than it brings, 1.72 instead of 1.53 of the optimum.
"""

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
import scipy.linalg

from mf_aggregators import memory, validation, workloads
from mf_aggregators.factorizations import tree_noise, tree_sensitivity
from mf_aggregators.factorizations.binary_tree import Tree, binary_tree
from mf_aggregators.factorizations.factorization import ExtensionError, Factorization
from mf_aggregators.noise.recursions import StateSpaceNoise
from mf_aggregators.participation import (
    Participation,
    check,
)
from mf_aggregators.sensitivity import Sensitivity
from mf_aggregators.workloads import Workload

_DECODERS = ("online", "full")

# A lower estimate, for its errors and its sensitivity as well.
_BYTES_PER_ROUND = 150


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
    goes_on = "in the same tree, with the decoder `online`, up to four times the rounds and more"

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
        memory.check_rounds(self._num_rounds, _BYTES_PER_ROUND, "the tree")

    @functools.cached_property
    def _tree(self) -> Tree:
        return binary_tree(self._num_rounds)

    @property
    def num_rounds(self) -> int:
        """The number of rounds n."""
        return self._num_rounds

    @property
    def decoder(self) -> str:
        """The estimator: ``online`` or ``full``."""
        return self._decoder

    def strategy_matrix(self) -> np.ndarray:
        """Returns C_T: (2 n - 1, n) float64 zeros and ones, in the tree's order of nodes."""
        return self._columns(np.arange(self._num_rounds), slice(None))

    def strategy_matrix_of_first(self, num_rounds: int) -> np.ndarray:
        """Returns the first columns of C_T, without the nodes that have none of their rounds."""
        return self._columns(np.arange(num_rounds), self._tree.starts < num_rounds)

    def _columns(self, rounds: np.ndarray, nodes: slice | np.ndarray) -> np.ndarray:
        starts, stops = self._tree.starts[nodes], self._tree.stops[nodes]
        covered = rounds >= starts[:, np.newaxis]
        covered &= rounds < stops[:, np.newaxis]
        return covered * self._tree.precisions[nodes, np.newaxis]

    def noising_matrix(self) -> np.ndarray:
        """Returns the left inverse N of C_T: (n, 2 n - 1) float64.

        For ``full`` the pseudo-inverse of C_T, for ``online`` S^-1 B with B the streaming
        estimator of the prefix sums (Denisov et al. Prop. C.1).
        """
        if self._decoder == "full":
            strategy = self.strategy_matrix()
            gram = strategy.T @ strategy
            return scipy.linalg.solve(gram, strategy.T, assume_a="pos", check_finite=False)
        return tree_noise.online_noising_matrix(self._tree)

    def noise_recursion(self) -> StateSpaceNoise:
        """Returns the recursion of O(log n) state vectors and one row of Z a round."""
        if self._decoder == "full":
            return tree_noise.full_recursion(self._tree)
        first = self.plans[0] if self.plans else self._num_rounds
        return tree_noise.online_recursion(self._num_rounds, tree_noise.num_slots(first))

    def _decoder_matrix(self, workload: np.ndarray) -> np.ndarray:
        # (n, 2 n - 1): B C_T = A N C_T = A.
        return workload @ self.noising_matrix()

    def _encode(self, x: np.ndarray) -> np.ndarray:
        tree = self._tree
        sums = np.zeros((len(tree.starts), *x.shape[1:]))
        sums[tree.leaves] = x
        for nodes in reversed(tree.levels):
            sums[nodes] = sums[tree.left[nodes]] + sums[tree.right[nodes]]
        sums[tree.precisions == 0.0] = 0.0
        return sums

    def squared_decoder_rows(self, workload: Any) -> np.ndarray:
        """Returns ||row i of B||^2: see the base class; O(n log n) for the prefix sum."""
        workload = workloads.resolve(workload)
        if isinstance(workload, Workload) and workload.name == "prefix_sum":
            self._check_rounds(workload.num_rounds)
            if self._decoder == "full":
                return tree_noise.full_prefix_variances(self._tree)
            return tree_noise.online_prefix_variances(self._num_rounds)
        return super().squared_decoder_rows(workload)

    def _sensitivity_of_first(self, rounds: int, participation: Participation) -> Sensitivity:
        """The sensitivity of C_T, from counts of participations in the nodes.

        C_T^T C_T has no negative entry, so that the squared sensitivity is the largest sum,
        over the nodes, of the squared number of a pattern's participations in the node
        (BandMF Prop. E.1). Where the search over patterns with a least separation would
        take too long, the result is an upper bound that says so.
        """
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
        separation = participation.separation_in(rounds)
        equally_spaced = int(
            np.max(tree_sensitivity.equally_spaced_sums(tree, rounds, separation, most))
        )
        if participation.is_evenly_spaced:
            return Sensitivity(
                float(np.sqrt(equally_spaced)),
                is_exact=True,
                theorem="enumeration of patterns (BandMF Eq. 5)",
            )
        return tree_sensitivity.of_least_separation(
            self._num_rounds, rounds, separation, most, equally_spaced
        )

    def _extended(
        self,
        num_rounds: int,
        participation: Participation,
        workload: Workload,
        parameters: dict[str, Any],
    ) -> "TreeAggregationFactorization":
        del participation, workload
        if self._decoder != "online":
            raise ExtensionError(
                f"a tree of {self._num_rounds} rounds with the decoder {self._decoder!r} cannot be "
                "extended: each of its rows of noise is made in view of all rounds that follow."
            )
        first = self.plans[0] if self.plans else self._num_rounds
        most = tree_noise.most_rounds(tree_noise.num_slots(first))
        if num_rounds > most:
            raise ExtensionError(
                f"a tree that began with {first} rounds cannot be extended to {num_rounds}: its "
                f"noise keeps the sums of a tree of at most {most} rounds."
            )
        return TreeAggregationFactorization(num_rounds, self._decoder, parameters=parameters)

    def _of_first_rounds(
        self, num_rounds: int, parameters: dict[str, Any]
    ) -> "TreeAggregationFactorization":
        return TreeAggregationFactorization(num_rounds, self._decoder, parameters=parameters)

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

    Example:
      >>> import mf_aggregators as mfa
      >>> once = mfa.participation.SingleParticipation()
      >>> tree = mfa.factorizations.tree_aggregation(64, decoder="full")
      >>> round(tree.rmse(mfa.workloads.prefix_sum(64), once), 3)
      2.518
    """
    return TreeAggregationFactorization(num_rounds, decoder)
