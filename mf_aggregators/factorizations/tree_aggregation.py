"""Tree aggregation: noise in the nodes of a binary tree over the rounds, with two estimators.

The matrix C_T has a row for each node of a binary tree whose leaves are the rounds, so that C_T x
holds the sums over the nodes (Denisov et al. App. C, Eq. 12; prefix-sum paper Sec. 2). It has more
rows than columns, and Honaker's two estimators are two choices of its left inverse (Denisov et al.
Prop. C.1).

The tree (see ``kernel.rows``) exists for any number n of rounds. Unless n is a power of two, some
nodes on the right edge are incomplete. As in DP-FTRL, a node is released only when all of its 2^h
leaves have arrived, so incomplete nodes have zero rows in C_T. The complete nodes form the trees of
the binary expansion of n. That is the matrix of BandMF's printed errors for n = 2052: a row over
all 2052 rounds would cost more than it brings, 1.72 instead of 1.53 of the optimum.
"""

import dataclasses

import numpy as np

from mf_aggregators import inputs
from mf_aggregators.factorizations.factorization import ExtensionError, Factorization
from mf_aggregators.kernel import numbers
from mf_aggregators.kernel.numbers import FloatArray
from mf_aggregators.kernel.rows import (
    StateSpaceNoise,
    full_tree_rows,
    online_tree_rows,
    strategy_of,
    tree_variance,
)
from mf_aggregators.kernel.sensitivity import Sensitivity, of_rows
from mf_aggregators.participation import Participation, check
from mf_aggregators.workloads import AnyWorkload

_DECODERS = ("online", "full")
# A lower estimate of the bytes for each round of the rows of a decoder.
_BYTES_PER_ROUND = {"online": 30, "full": 150}
# Further state vectors, which the planned rounds do not need, but an extension to four times the
# rounds does.
_SPARE_SLOTS = 2


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class TreeAggregationFactorization(Factorization):
    """The factorization of a tree's estimator, with a square, lower-triangular C.

    For a left inverse L of C_T, the papers' mechanism adds L Z with a row of Z for each node. The
    rows N Z of :meth:`noise_recursion` need one row of Z a round, and have the same joint
    distribution, because N N^T = L L^T. So their guarantee is that of C = N^-1, which is at least
    as good as that of C_T (Denisov et al. Thm 2.1 for updates that are chosen in view of releases):

    * Every left inverse is the pseudo-inverse L_0 plus an M with M C_T = 0. Rows of L_0 are
      combinations of columns of C_T, so that M L_0^T = 0 and L L^T = L_0 L_0^T + M M^T.
    * So C^T C = (L L^T)^-1 is at most (L_0 L_0^T)^-1 = C_T^T C_T in the order of symmetric
      matrices, and ||C x|| <= ||C_T x|| for all x. For ``full``, L = L_0 and both are equal.

    The sensitivity is that of C. For ``online`` and one participation, it is 7 % below the
    sensitivity of C_T at n = 64 and 1,024; the papers scale noise to that of C_T.

    Attributes:
      num_rounds: The number of rounds n, at least 1.
      decoder: The estimator, ``online`` or ``full``, as in :func:`tree_aggregation`.

    Raises:
      ValueError: If an attribute is out of its range.
    """

    mechanism = "tree"
    can_extend = True

    num_rounds: int
    decoder: str

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.decoder not in _DECODERS:
            raise ValueError(
                f"decoder must be one of {', '.join(_DECODERS)}, found {self.decoder!r}."
            )
        numbers.set_positive_integers(self, "num_rounds")
        inputs.check_rounds(self.num_rounds, _BYTES_PER_ROUND[self.decoder], "the tree")
        self._set(parameters={**self.parameters, "decoder": self.decoder})

    def strategy_matrix(self) -> FloatArray:
        """Returns C, the inverse of the rows of noise: (n, n) float64, lower triangular."""
        strategy = strategy_of(self.noise_recursion(), self.num_rounds)
        return strategy.columns(tuple(range(self.num_rounds)))

    def strategy_bands(self) -> int:
        """Returns n."""
        return self.num_rounds

    def noise_recursion(self) -> StateSpaceNoise:
        """Returns the recursion of O(log n) state vectors and one row of Z a round."""
        if self.decoder == "full":
            return full_tree_rows(self.num_rounds)
        first = self.horizons[0] if self.horizons else self.num_rounds
        return online_tree_rows(self.num_rounds, _num_slots(first))

    def _squared_rows(self, workload: AnyWorkload) -> FloatArray | None:
        """Takes O(n log n) operations for the prefix sum."""
        if not workload.is_prefix_sum:
            return None
        if self.decoder == "full":
            return _full_prefix_variances(self.num_rounds)
        return _online_prefix_variances(self.num_rounds)

    def _sensitivity(self, participation: Participation) -> Sensitivity:
        """The kernel's sensitivity of C_T; for ``online``, the smaller one of it and that of C.

        C_T^T C_T has no negative entry, so that the squared sensitivity of C_T is the largest sum,
        over the nodes, of the squared number of a pattern's participations in the node
        (BandMF Prop. E.1). Where the search over patterns with a least separation would
        take too long, the result is an upper bound that says so.
        """
        return of_rows(self.noise_recursion(), self.num_rounds, check(participation).as_schema())

    def _extended(
        self,
        num_rounds: int,
        participation: Participation,
        workload: AnyWorkload,
        parameters: dict[str, object],
    ) -> Factorization:
        if self.decoder != "online":
            raise ExtensionError(
                f"a tree of {self.num_rounds} rounds with the decoder {self.decoder!r} cannot be "
                "extended: each of its rows of noise depends on all later rounds."
            )
        first = self.horizons[0] if self.horizons else self.num_rounds
        most = (1 << (_num_slots(first) + 1)) - 1
        if num_rounds > most:
            raise ExtensionError(
                f"a tree that began with {first} rounds cannot be extended to {num_rounds}: its "
                f"noise keeps the sums of a tree of at most {most} rounds."
            )
        return super()._extended(num_rounds, participation, workload, parameters)


def tree_aggregation(num_rounds: int, decoder: str = "online") -> TreeAggregationFactorization:
    """Returns the binary-tree mechanism with one of Honaker's estimators.

    Use it when you compare a run with DP-FTRL as it was before matrix factorization.

    Args:
      num_rounds: The number of rounds n, at least 1.
      decoder: ``online`` for DP-FTRL's estimator from below: the unbiased estimate with the least
        variance from the nodes that are complete so far. ``full`` for the estimate with the least
        variance from all nodes, the pseudo-inverse (Denisov et al. Prop. C.1). Noise with its
        distribution can be drawn round by round as well, so both can be used in streams.

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


def _num_slots(num_rounds: int) -> int:
    """Returns how many state vectors the estimator from below keeps.

    Args:
      num_rounds: The planned number of rounds n.

    Returns:
      floor(log2 n) for these rounds, plus :data:`_SPARE_SLOTS` for an extension. The number does
      not change with an extension, because products over another number of vectors would differ in
      their last bits.
    """
    return num_rounds.bit_length() - 1 + _SPARE_SLOTS


def _online_prefix_variances(num_rounds: int) -> FloatArray:
    """Returns the (n,) variances of prefix sums by the estimator from below.

    The estimate after round i is the sum over the binary expansion of i + 1.
    """
    lengths = np.arange(1, num_rounds + 1)
    result = np.zeros(num_rounds)
    for height in range(num_rounds.bit_length()):
        result += tree_variance(1 << height) * (lengths >> height & 1)
    return result


def _full_prefix_variances(num_rounds: int) -> FloatArray:
    """Returns the (n,) variances of the prefix sums of rows with precision matrix C_T^T C_T.

    Within a complete node over leaf i let F be the sum of the rows from the node's first leaf to
    leaf i. Given the sum s over the node, F is normal with mean alpha s and a variance beta: 1 and
    0 for the leaf itself. Given s, the sum over the left child has mean s / 2 and variance tau / 2,
    tau the variance of the sum over either child. So from the left child to the node, alpha' =
    alpha / 2 and beta' = beta + alpha^2 tau / 2; from the right child, where F is the left sum plus
    alpha times the right one, alpha' = (1 + alpha) / 2 and beta' = beta + (1 - alpha)^2 tau / 2.
    The complete trees of the binary expansion of n, the largest first, are independent.
    """
    slopes, remainders = np.ones(1), np.zeros(1)
    found: list[FloatArray] = []
    for height in range(num_rounds.bit_length()):
        variance = tree_variance(1 << height)
        if num_rounds >> height & 1:
            own = np.square(slopes) * variance + remainders
            found = [own, *(later + variance for later in found)]
        of_sums = np.concatenate([slopes, 1.0 - slopes])
        remainders = np.tile(remainders, 2) + np.square(of_sums) * variance / 2.0
        slopes = np.concatenate([slopes, 1.0 + slopes]) / 2.0
    return np.concatenate(found)
