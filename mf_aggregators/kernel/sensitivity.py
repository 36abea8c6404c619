"""Participation schemas, the L2 sensitivity of a strategy matrix under a schema, and its epsilon.

A schema says in which sets of rounds one client may take part. A separation of b means that any two
participations i, j of one client satisfy ``|i - j| >= b`` (BandMF, Def. 1), so that b = 1 allows
every round. A pattern is the set of rounds of one client.

The sensitivity is the largest change, in Frobenius norm, of C x when one client's
contributions, of L2 norm at most one each, are replaced by zero in every round of
one pattern of the schema (zero-out adjacency; BandMF Eq. 2). It is for contributions of any
dimension.

With X = C^T C and a pattern pi, the sum of |X[i, j]| over i, j in pi bounds the
square of that change (BandMF Prop. E.1) and is reached where contributions of equal
direction and suitable signs make every term non-negative. The entries of C decide which of these
theorems applies:

* one participation: the largest column norm, always exact;
* (k, b)-participation: every pattern is enumerated (BandMF Eq. 5);
* least separation b with X[i, j] = 0 for |i - j| >= b: columns of one pattern are orthogonal, so a
  dynamic program over squared column norms is exact (BandMF Thm 2, Alg. 5);
* Toeplitz matrices of non-negative coefficients that do not increase from lag b on: the
  pattern 0, b, 2 b, ... is the worst (Kalinin and Lampert, Thm 2); any other Toeplitz matrix
  is bounded by one of these;
* rows of a binary tree (``kernel.rows``): C_T^T C_T has no negative entry, and ||C_T u||^2 for ones
  u in a pattern is the sum over nodes of the squared number of participations in the node
  (Denisov et al. App. C; BandMF Prop. E.1), so that counts in nodes are searched;
* least separation b otherwise: an upper bound (BandMF Thm 3, Alg. 4).

**Units.** Client ids may change every W rounds. A client is then in one window alone, of rounds 0
to W - 1, W to 2 W - 1, and so on, and keeps to its schema there. A device is a client in each of
several windows. A person has several clients or devices. All contributions of a unit are zeroed
together.

So the participations of a client in a window are a pattern of its schema with at most those of W
rounds. Those of a device in several windows are so many in any rounds, since its timer starts again
in each window. m units together have at most m times the sensitivity of one, and exactly that if
the one is reached: all of them contribute the same. Contributions of different windows share rows
of C x, so that the squares of the sensitivities of windows do not add up to a bound.

Squares are carried throughout and one square root is taken at the very end.

**One Gaussian mechanism.** Without amplification, the whole released stream C x + Z is one Gaussian
mechanism, whatever the matrix (Denisov et al. Thm 4.1; BandMF Sec. 2), also when each round's
updates depend on the rounds before it. Its noise multiplier is the standard deviation of Z over
(clip norm times the sensitivity of C under the participation schema). Adjacency is zero-out:
neighbouring data sets differ in one client, whose contributions are replaced by zero vectors in
every round that it takes part in.

Noise is drawn from tables of integers, and a guarantee (epsilon, delta) of real normal numbers is
one of (epsilon, delta + p) of what is drawn (``draws`` has the proof); p is the delta0 of
approximate zCDP as well. The failure probability p grows with the numbers that are drawn, and does
not depend on epsilon. Where it is not small beside delta, nothing is stated.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias, final

import numpy as np
import scipy.linalg
import scipy.optimize
import scipy.sparse.csgraph
import scipy.special

from mf_aggregators.kernel import numbers
from mf_aggregators.kernel.draws import FAILURE_PER_NUMBER, LARGEST_SHIFT
from mf_aggregators.kernel.numbers import Error, FloatArray, IntArray
from mf_aggregators.kernel.rows import (
    NoiseRecursion,
    StateSpaceNoise,
    Strategy,
    check_rounds,
    full_tree_rows,
    is_complete,
    online_tree_rows,
    product_of_series,
    strategy_of,
)

# Off-diagonal entries of X = C^T C up to this number, relative to its diagonal, may be rounding
# errors of a product and count as zero.
_ROUNDING_OF_GRAM = 1e-14
# Toeplitz coefficients may increase by this number, relative to the largest one, and still count as
# non-increasing: the difference may be rounding. The sensitivity is then that of a non-increasing
# sequence above them.
_ROUNDING_OF_COEFFICIENTS = 1e-13
# Errors of Fourier transforms up to this number, relative to the least squared column norm, count
# as rounding: the sensitivity is still called exact.
_ROUNDING_OF_TRANSFORMS = 1e-8
_COLUMNS_AT_A_TIME = 256
_ENTRIES_AT_A_TIME = 2**20
# The most participations of a pattern for which signs are searched that reach the sum of |X|. With
# more, the sum counts as reached only if no entry of X is negative.
_MOST_WITH_SIGNS = 4096
# The largest product of squared rounds and participations up to which a sensitivity that Toeplitz
# structure only bounds is also computed from the dense matrix.
_LARGEST_DENSE_BOUND = 30_000_000
# The most entries of C that are computed if C is Toeplitz between diagonal matrices.
_MOST_ENTRIES = 1 << 26
# Up to this number of rounds, column norms of a scaled Toeplitz matrix are summed term by term, and
# C is computed if a tree only bounds it.
_MOST_ROUNDS_OF_SUMS = 4096
# The most steps in a search over patterns of a tree, which take a few seconds.
_MOST_STEPS = 2_000_000
# The noise multipliers for which an epsilon is computed. Outside of them, dp-accounting's
# arithmetic over- or underflows, and an epsilon is of no use.
_SMALLEST_NOISE_MULTIPLIER = 1e-3
LARGEST_NOISE_MULTIPLIER_ACCOUNTED = 1e100
# Far more than the relative rounding errors of normal distribution functions and exponentials in
# their tails.
_ROUNDING_OF_DELTAS = 1e-12
# The largest share of delta that the failure probability of drawn noise may take.
_LARGEST_SHARE = 1e-3
# The least noise multiplier of a shift: with less noise, a client could move a number by more
# standard deviations than the proof about drawn noise covers.
LEAST_NOISE_MULTIPLIER = 1.0 / LARGEST_SHIFT
# The number of coordinates of all rounds together that statements charge for by default. No noise
# is made for more coordinates.
DEFAULT_NUM_COORDINATES = 2**40
# The share of delta that is taken off for each composition. dp-accounting composes by Fourier
# transforms, and their rounding may lower an epsilon: masses are off by about 2e-16 for each
# composition, summed over the grid. Ten times that is taken off, and a delta that is not well above
# it is refused.
_ROUNDING_PER_COMPOSITION = 2e-15
_SMALLEST_DELTA = 1e-12
# The shape of a subtree: its number of leaves, and the number of them that are released rounds.
_Shape: TypeAlias = tuple[int, int]
_COLUMN_NORM = "largest column norm (Denisov et al. Thm 4.1)"
_BANDED = "banded matrix (BandMF Thm 2, Alg. 5)"
_ENUMERATION = "enumeration of patterns (BandMF Eq. 5)"
_TOEPLITZ = "non-increasing Toeplitz coefficients (Kalinin and Lampert, Thm 2)"


@dataclasses.dataclass(frozen=True)
class Schema:
    """A participation schema: the most participations of a client, and their least distance.

    ``Schema(1, 1)`` is single participation.

    Attributes:
      most: The most participations k of one client; None for no limit.
      separation: The least distance b of two participations of one client, in rounds.
      is_even: Whether adjacent participations are exactly b rounds apart, as in (k,
        b)-participation.

    Raises:
      TypeError: If ``is_even`` is not a bool.
      ValueError: If a number is not an integer of at least 1.
    """

    most: int | None
    separation: int
    is_even: bool = False

    def __init_subclass__(cls) -> None:
        raise TypeError("Schema has no subclasses: guarantees are proved for Schema itself.")

    def __post_init__(self) -> None:
        numbers.set_positive_integers(self, "most", "separation")
        if type(self.is_even) is not bool:
            raise TypeError(f"is_even must be a bool, found {numbers.shown(self.is_even)}.")

    def __str__(self) -> str:
        if self == Schema(1, 1):
            return "at most one participation"
        most = "" if self.most is None else f"at most {self.most} "
        apart = f"{self.separation} round{'' if self.separation == 1 else 's'} apart"
        if self.is_even:
            return f"{most}participations, adjacent ones exactly {apart}"
        return f"{most}participations at least {apart}"

    def most_in(self, num_rounds: int) -> int:
        """Returns the largest number of n rounds in which one client can take part.

        Args:
          num_rounds: n, at least 1.

        Raises:
          ValueError: If n is not a positive integer.
        """
        num_rounds = numbers.positive_integer(num_rounds, "num_rounds")
        fitting = -(-num_rounds // self.separation)
        return fitting if self.most is None else min(fitting, self.most)

    def separation_in(self, num_rounds: int) -> int:
        """Returns the least distance b of two participations; n if no client can take part twice.

        Args:
          num_rounds: n, at least 1.

        Raises:
          ValueError: If n is not a positive integer.
        """
        return self.separation if self.most_in(num_rounds) > 1 else num_rounds

    def starts_in(self, num_rounds: int) -> range:
        """Returns the first rounds of the maximal patterns under (k, b)-participation.

        A pattern that starts at round b or later and has no room for all its participations is
        a subset of the pattern that starts b rounds earlier.

        Args:
          num_rounds: n, at least 1.
        """
        separation = self.separation_in(num_rounds)
        full = num_rounds - (self.most_in(num_rounds) - 1) * separation
        return range(max(full, separation))

    def allows_separations(
        self, participations: int, smallest: int | None, largest: int | None
    ) -> bool:
        """Returns whether the schema allows the observed participations of clients.

        Args:
          participations: The most participations of one client.
          smallest: The smallest distance of adjacent participations; None if no client took part
            twice.
          largest: The largest distance of adjacent participations; None if no client took part
            twice, or if it is not known.
        """
        if participations <= 1 or smallest is None:
            return True
        if self.is_even and not smallest == largest == self.separation:
            return False
        return smallest >= self.separation and participations <= (self.most or math.inf)

    def largest_sum(self, weights: FloatArray) -> float:
        """Returns the largest sum of weights of rounds over the patterns that the schema allows.

        The algorithm is BandMF Alg. 3.

        Args:
          weights: (n,) non-negative numbers.
        """
        most, separation = self.most_in(len(weights)), self.separation_in(len(weights))
        if self.is_even:
            starts = self.starts_in(len(weights))
            return float(max(np.sum(weights[start::separation][:most]) for start in starts))
        is_limited = most < -(-len(weights) // separation)
        return float(_largest_sums(weights, separation, most if is_limited else None)[-1])


@final
@dataclasses.dataclass(frozen=True)
class Unit:
    """A unit of privacy: clients that are zeroed together, each of which keeps to a schema.

    Attributes:
      schema: The schema of one client; if there are windows, within a window.
      num_clients: The most clients of one person; with windows, the most devices.
      window: The number W of rounds after which client ids change; None if they never change.
      num_windows: The number of windows in which one device takes part: 1 for a client in a window,
        None for all windows. A device's participations in different windows may be in adjacent
        rounds.

    Raises:
      TypeError: If ``schema`` is not a Schema.
      ValueError: If a number is below 1.
    """

    schema: Schema
    num_clients: int = 1
    window: int | None = None
    num_windows: int | None = None

    def __post_init__(self) -> None:
        if type(self.schema) is not Schema:
            raise TypeError(f"a unit needs a Schema, found {numbers.shown(self.schema)}.")
        # The schema is made anew, because an altered or unpickled one may have unchecked numbers.
        object.__setattr__(self, "schema", dataclasses.replace(self.schema))
        numbers.set_positive_integers(self, "num_clients", "window", "num_windows")

    def schema_in(self, num_rounds: int) -> Schema:
        """Returns a schema of all rounds that allows each pattern of one client or device.

        Args:
          num_rounds: n, at least 1.
        """
        if self.window is None or self.window >= num_rounds:
            return self.schema
        windows = -(-num_rounds // self.window)
        chosen = min(self.num_windows or windows, windows)
        most = chosen * self.schema.most_in(self.window)
        return dataclasses.replace(self.schema, most=most) if chosen == 1 else Schema(most, 1)

    @property
    def who(self) -> str:
        """The words for the protected unit, as in ``each person with at most 2 clients``."""
        single = self.num_windows == 1
        changing = f"whose client id changes every {self.window} rounds"
        if self.window is None:
            one, several = "each client", "clients"
        elif single:
            one = f"each client in a window of {self.window} rounds"
            several = f"clients in a window of {self.window} rounds"
        else:
            windows = "" if self.num_windows is None else f", in {self.num_windows} windows"
            one, several = (f"{each}, {changing}{windows}" for each in ("each device", "devices"))
        return one if self.num_clients == 1 else f"each person with {self.num_clients} {several}"

    def __str__(self) -> str:
        within = "" if self.window is None else " in a window"
        return f"{self.schema} of one client{within}"


def _largest_sums(weights: FloatArray, separation: int, most: int | None) -> FloatArray:
    """Returns the largest sums of entries along the first axis that are b or more places apart.

    The largest sums F[i] from entry i on follow from F[i + 1] and F[i + b], so that only b of them
    are kept. The sums from b adjacent entries are computed together, from the last entries on.

    Args:
      weights: (n, ...) non-negative numbers.
      separation: b.
      most: k, the most entries of a sum; None for no limit.

    Returns:
      (k + 1, ...) sums of at most 0, 1, ..., k entries; (1, ...) without a limit.
    """
    chunks, shape = -(-len(weights) // separation), weights.shape[1:]
    filled = np.zeros((chunks * separation, *shape))
    filled[: len(weights)] = weights
    sums = np.zeros((1 if most is None else most + 1, separation, *shape))
    # A sum with one entry more is this entry plus a sum with fewer entries that begins b places
    # later.
    fewer, more = (sums, sums) if most is None else (sums[:-1], sums[1:])
    for chunk in filled.reshape(chunks, separation, *shape)[::-1]:
        taken = np.maximum.accumulate((chunk + fewer)[:, ::-1], axis=1)[:, ::-1]
        more[...] = np.maximum(taken, more[:, :1])
    return np.asarray(sums[:, 0])


def pattern_sum(column: FloatArray, separation: int, most: int) -> FloatArray:
    """Returns the sum of k columns of a Toeplitz matrix: 0, b, 2 b, ..., (k - 1) b.

    Args:
      column: (n,) the first column of the matrix.
      separation: The distance b of the columns.
      most: The number k of columns, with (k - 1) b < n.

    Returns:
      (n,): entry t is the sum of ``column[t - j b]`` over j < k with j b <= t.
    """
    # Sums over 1, 2, 4, ... participations are put together by the binary digits of k.
    window, width, done = np.array(column), separation, 0
    total = np.zeros_like(window)
    while most:
        if most % 2:
            total[done:] += window[: len(window) - done]
            done += width
        further = window.copy()
        further[width:] += window[:-width]
        window, width, most = further, 2 * width, most // 2
    return total


class Sensitivity(float):
    """A sensitivity: a float that knows whether it is exact or an upper bound.

    Use it when you ask whether a sensitivity is exact, and by which theorem.

    Attributes:
      value: The sensitivity, a plain float.
      is_exact: True if some neighbouring pair of inputs reaches the value, False if the value is an
        upper bound.
      theorem: The statement from which the value follows.
      error: The most by which errors in a computed C may make the true sensitivity larger than the
        value.

    Example:
      >>> import mf_aggregators as mfa
      >>> timers = mfa.participation.MinSeparation(separation=2)
      >>> found = mfa.factorizations.identity(8).sensitivity(timers)
      >>> found.value, found.is_exact
      (2.0, True)
      >>> 2.0 * found  # a float like others
      4.0
    """

    is_exact: bool
    theorem: str
    error: float

    def __new__(
        cls, value: float, *, is_exact: bool, theorem: str, error: float = 0.0
    ) -> "Sensitivity":
        """Creates a sensitivity from a value and its proof."""
        self = super().__new__(cls, value)
        self.is_exact, self.theorem, self.error = is_exact, theorem, error
        return self

    @property
    def value(self) -> float:
        """The sensitivity as a plain float."""
        return float(self)

    def replace(self, **changes: object) -> "Sensitivity":
        """Returns a copy of the sensitivity with some attributes changed."""
        return Sensitivity(**(vars(self) | {"value": self.value} | changes))

    def __getnewargs_ex__(self) -> tuple[tuple[float], dict[str, object]]:
        return (float(self),), vars(self)

    def __repr__(self) -> str:
        return f"Sensitivity({float(self)!r}, is_exact={self.is_exact}, theorem={self.theorem!r})"


class _Tree(NamedTuple):
    """A binary tree that makes the noise of the first rounds, and how well C is known from it.

    Attributes:
      num_leaves: The number of leaves of the tree.
      error: The largest relative error of an entry of C by roundings.
      is_equal: Whether C^T C equals C_T^T C_T; otherwise C^T C is at most that.
    """

    num_leaves: int
    error: float
    is_equal: bool


# A function that bounds a sensitivity, from a tree or from C.
_Bound: TypeAlias = Callable[[_Tree | Strategy], Sensitivity]


def of_strategy(strategy: Strategy, schema: Schema) -> Sensitivity:
    """Computes or bounds the sensitivity of a strategy matrix from its entries alone.

    Args:
      strategy: C, for n rounds. Its numbers and their squares are finite. A dense matrix may have
        any number of rows: the matrices of trees have more than n.
      schema: The participation schema.

    Returns:
      The sensitivity, exact or an upper bound. For bands, it takes O(n b^2) operations. For a
      Toeplitz matrix, with or without scales, it is the bound in O(n) operations or, if that is
      smaller and n is not too large, the bound from all entries.
    """
    if strategy.is_dense:
        return _of_matrix(strategy.entries, schema)
    entries, num_rounds = strategy.entries, strategy.num_rounds
    num_bands, most = entries.shape[1], schema.most_in(num_rounds)
    if len(entries) > 1:
        columns = np.zeros((num_bands, num_rounds))
        for t in range(num_bands):
            columns[t, : num_rounds - t] = entries[t:, t]
        return _of_columns(columns, schema)
    if strategy.scales is None:
        found = toeplitz_bound(entries[0], num_rounds, schema)
    else:
        found = _of_scaled(entries[0], strategy.scales, schema)
    is_quick = schema.is_even or num_rounds**2 * most <= _LARGEST_DENSE_BOUND
    # If all row scales are equal, the bound by column norms is loose, so the entries are used as
    # well.
    is_quick |= strategy.scales is not None and not np.ptp(strategy.scales[0])
    if found.is_exact or not is_quick or num_rounds * num_bands > _MOST_ENTRIES:
        return found
    return min(_of_columns(strategy.compact_columns(num_bands).T, schema), found)


def _of_matrix(strategy: FloatArray, schema: Schema) -> Sensitivity:
    """Computes or bounds the sensitivity of a dense matrix of any structure."""
    norms = np.einsum("ij,ij->j", strategy, strategy)
    num_rounds = len(norms)
    separation = schema.separation_in(num_rounds)
    below, above = _diagonals(num_rounds, num_rounds)
    for first in range(0, num_rounds, _COLUMNS_AT_A_TIME):
        columns = strategy[:, first : first + _COLUMNS_AT_A_TIME]
        # These columns have only zeros in the rows above ``top``.
        top = int(np.argmax(np.any(columns, axis=1)))
        earlier = strategy[top:, : max(first + columns.shape[1] - separation, 0)]
        for i, row in enumerate(columns[top:].T @ earlier, first):
            # The row has X[i, 0], ..., X[i, i - b]: rounds closer than b are in no common pattern.
            below[separation : i + 1, i] = row[: max(i - separation + 1, 0)][::-1]
    return _of_gram(norms, below, above, schema)


def _of_columns(columns: FloatArray, schema: Schema) -> Sensitivity:
    """Computes or bounds the sensitivity of a lower-triangular C from its compact columns."""
    num_rounds = columns.shape[1]
    columns = columns[: np.max(np.flatnonzero(np.any(columns, axis=1)), initial=0) + 1]
    num_bands = len(columns)
    norms = np.einsum("tj,tj->j", columns, columns)
    separation = schema.separation_in(num_rounds)
    if 4 * num_bands > num_rounds and num_bands > separation and not schema.is_even:
        # With many bands, products of dense matrices are quicker.
        dense = np.zeros((num_rounds, num_rounds))
        for t, diagonal in enumerate(columns):
            np.fill_diagonal(dense[t:], diagonal[: num_rounds - t])
        return _of_matrix(dense, schema)
    below, above = _diagonals(num_rounds, num_bands)
    for t in range(separation, num_bands, separation if schema.is_even else 1):
        pairs = columns[: num_bands - t, t:], columns[t:, : num_rounds - t]
        below[t, t:] = np.einsum("sj,sj->j", *pairs)
    return _of_gram(norms, below, above, schema)


def of_rows(rows: NoiseRecursion, num_rounds: int, who: Schema | Unit) -> Sensitivity:
    """Computes or bounds the sensitivity of the C that rows of noise imply, in the first rounds.

    C is computed from the rows (``rows``). The bound on the errors of its columns is charged k
    times, for at most k participations, and the bound on the rounding of the value once. Rows of a
    binary tree are recognised by their arrays (:func:`_tree_of_rows`). If the tree only bounds C,
    the smaller one of the bounds by the tree and by C is returned, for up to 4,096 rounds.

    Args:
      rows: The noising matrix, of one of the kernel's own classes.
      num_rounds: The number of its rounds: all, or those of a run that stopped early; at least 1.
      who: The schema of one client, or a unit of clients.

    Returns:
      The sensitivity of the computed C, exact or an upper bound, and its ``error``.

    Raises:
      NotProved: If C does not follow from the rows, see :func:`rows.strategy_of`.
    """
    num_rounds = numbers.positive_integer(num_rounds, "num_rounds")
    unit = dataclasses.replace(who) if isinstance(who, Unit) else Unit(who)
    schema, number = unit.schema_in(num_rounds), unit.num_clients

    def bound(known: _Tree | Strategy) -> Sensitivity:
        if isinstance(known, _Tree):
            return of_tree(known.num_leaves, num_rounds, schema)
        return of_strategy(known, schema)

    one = _least(rows, num_rounds, schema.most_in(num_rounds), bound)
    # The schema for several windows allows patterns that no client has, so the value is only a
    # bound.
    is_tight = unit.window is None or unit.window >= num_rounds or schema.most == 1
    is_exact = one.is_exact and is_tight
    return one.replace(value=one.value * number, error=one.error * number, is_exact=is_exact)


def of_pattern(rows: NoiseRecursion, num_rounds: int, rounds: tuple[int, ...]) -> Sensitivity:
    """Bounds the sensitivity for the given rounds of one client or person (BandMF Eq. 5).

    If c clients of a person take part in one round, they add up to a contribution of norm at most
    c. So the bound is the root of the sum of c_i c_j |X[i, j]| over pairs of rounds.

    Args:
      rows: As in :func:`of_rows`.
      num_rounds: As in :func:`of_rows`.
      rounds: The rounds, never decreasing, each below ``num_rounds``; a round appears c times for c
        clients of one person.

    Returns:
      The root of the sum of c_i c_j |X[i, j]| over pairs of rounds, and its ``error``.

    Raises:
      NotProved: As :func:`of_rows` raises it.
      ValueError: If there are no rounds, or a round is not below ``num_rounds``.
    """
    if not rounds or rounds[-1] >= num_rounds:
        raise ValueError(f"the rounds of a client must be below {num_rounds}, found {rounds}.")

    def bound(known: _Tree | Strategy) -> Sensitivity:
        if isinstance(known, _Tree):
            squared: float = _sum_of_pattern(known.num_leaves, rounds)
        else:
            distinct, counts = np.unique(rounds, return_counts=True)
            columns = known.columns(tuple(distinct.tolist())) * counts
            squared = float(np.sum(np.abs(columns.T @ columns)))
        return _root(squared, "sum of one pattern (BandMF Eq. 5)", is_exact=False)

    return _least(rows, num_rounds, len(rounds), bound)


def _least(rows: NoiseRecursion, num_rounds: int, most: int, bound: _Bound) -> Sensitivity:
    """Returns the smaller one of the bounds by the C of the rows and by their tree, if any."""
    check_rounds(rows, num_rounds)
    tree = _tree_of_rows(rows, num_rounds) if isinstance(rows, StateSpaceNoise) else None
    known: list[_Tree | Strategy] = [] if tree is None else [tree]
    if tree is None or not (tree.is_equal or num_rounds > _MOST_ROUNDS_OF_SUMS):
        known.append(strategy_of(rows, num_rounds))
    found = [_charged(bound(each), each, num_rounds, most) for each in known]
    return min(found, key=lambda each: each.value + each.error)


def _charged(
    value: Sensitivity, known: _Tree | Strategy, num_rounds: int, most: int
) -> Sensitivity:
    """Returns a sensitivity with its ``error``: that of C and that of floating-point arithmetic."""
    if isinstance(known, Strategy):
        relative = _roundings(known.entries, num_rounds, most)
        return value.replace(error=most * known.error + value.value * relative)
    # No column norm of C is larger than that of C_T, which has a one for each node over its round.
    error = most * known.error * known.num_leaves.bit_length() ** 0.5
    if known.is_equal:
        return value.replace(error=error)
    theorem = f"upper bound by a binary tree: {value.theorem.removeprefix('upper bound: ')}"
    return value.replace(is_exact=False, theorem=theorem, error=error)


def _roundings(array: FloatArray, num_rounds: int, most: int) -> float:
    """Returns the relative rounding error of a sensitivity that is computed from an exact C.

    The k columns of at most m entries each have at most t = min(n, k m) rounds with entries, and
    the squared value comes from at most three nested sums of t terms. If no term is negative, the
    relative error of the value is at most 3 t u, u = 2^-53. Otherwise an entry of X has an error of
    m u times two column norms (Higham, Sec. 3.1), and the squared sum of k norms is at most k times
    the squared value.

    Args:
      array: The entries of C, whose last axis has m of them.
      num_rounds: n.
      most: k.
    """
    entries = most * array.shape[-1]
    signed = entries / 4.0 if np.min(array) < 0.0 else 0.0
    return float((min(num_rounds, entries) + 4.0 + signed) * 2.0**-52)


def _of_scaled(
    coefficients: FloatArray, scales: tuple[FloatArray, FloatArray], schema: Schema
) -> Sensitivity:
    """Bounds the sensitivity of C = P T D, by its column norms or by that of T times scales.

    The squared norms of the columns of P T are sums of non-negative products. For many rounds, they
    are computed by Fourier transforms, and the bound on the errors of these is added.

    Args:
      coefficients: (m,) the first column of the Toeplitz matrix T, m <= n; zeros follow.
      scales: The diagonals of P and D, (n,) above zero.
      schema: The schema.

    Returns:
      The sensitivity. It is exact if clients take part once, or if T has no more bands than the
      separation, provided that the errors of the transforms are negligible.
    """
    rows, columns = scales
    num_rounds, squares, is_exact = len(rows), np.square(coefficients), True
    if num_rounds <= _MOST_ROUNDS_OF_SUMS:
        squared = np.correlate(np.square(rows), squares, "full")[len(squares) - 1 :]
    else:
        product, error = product_of_series(np.square(rows[::-1]), squares, num_rounds)
        squared = np.asarray(product[::-1] + error, np.float64)
        is_exact = bool(error <= _ROUNDING_OF_TRANSFORMS * np.min(squared))
    squared = squared * np.square(columns)
    if schema.most_in(num_rounds) == 1:
        return _root(np.max(squared), _COLUMN_NORM, is_exact)
    if not np.any(coefficients[schema.separation_in(num_rounds) :]):
        return _root(schema.largest_sum(squared), _BANDED, is_exact)
    plain = toeplitz_bound(coefficients, num_rounds, schema).value
    plain *= float(np.max(rows) * np.max(columns))
    theorem = "upper bound: column norms, or coefficients times the largest scales"
    bound = min(schema.largest_sum(np.sqrt(squared)), plain)
    return Sensitivity(bound, is_exact=False, theorem=theorem)


def toeplitz_bound(coefficients: FloatArray, num_rounds: int, schema: Schema) -> Sensitivity:
    """Computes or bounds the sensitivity of a lower-triangular Toeplitz matrix, in O(n).

    For non-negative coefficients c that do not increase from lag b on, the worst pattern
    starts at round 0 and takes part every b rounds. With participations p_1 < p_2 < ...,
    p_j is at least (j - 1) b and p_j - p_i at least (j - i) b, and
    ``X[p_i, p_j] = sum_t c_t c_(t + p_j - p_i)`` over t < n - p_j only grows if p_j and
    p_j - p_i become smaller: the second factor is at a lag of b or more for i < j, and for
    i = j the sum has more terms.

    If c increases somewhere, the second factor is at most e_(t + (j - i) b), with e_t = max |c_s|
    over s >= t, which gives an upper bound. Columns of a matrix of at most b bands are orthogonal
    within a pattern, so that their norms give the sensitivity, for any c.

    Args:
      coefficients: (m,) the first column, m <= n; zeros follow.
      num_rounds: n.
      schema: The schema.

    Returns:
      The sensitivity, exact or an upper bound.
    """
    most, separation = schema.most_in(num_rounds), schema.separation_in(num_rounds)
    column = np.zeros(num_rounds)
    column[: len(coefficients)] = coefficients
    sizes = np.abs(column)
    slack = _ROUNDING_OF_COEFFICIENTS * np.max(sizes)
    # Columns end at the last round, so that the norms of later columns are smaller.
    norms = np.cumsum(np.square(sizes))[::-1][::separation][:most]
    if most == 1 or not np.any(column[separation:]):
        return _root(np.sum(norms), _COLUMN_NORM if most == 1 else _BANDED)
    envelope = sizes.copy()
    envelope[separation:] = np.maximum.accumulate(sizes[separation:][::-1])[::-1]
    has_one_sign = max(np.min(column), -np.max(column)) >= -slack
    if has_one_sign and np.all(envelope - sizes <= slack):
        return _root(np.sum(np.square(pattern_sum(envelope, separation, most))), _TOEPLITZ)
    squared, earlier = float(np.sum(norms)), np.zeros(num_rounds)
    for start in range(separation, most * separation, separation):
        # The term is twice the product of the column from this round on with the sum of the earlier
        # columns.
        earlier[start - separation :] += envelope[: num_rounds - start + separation]
        squared += 2.0 * float(sizes[: num_rounds - start] @ earlier[start:])
    # All terms are non-negative, so that the rounding error is relative to the sum itself.
    rounding = (num_rounds + 2.0 * most) * np.finfo(np.float64).eps
    theorem = f"upper bound by {_TOEPLITZ}"
    return _root(float(squared * (1.0 + rounding)), theorem, is_exact=False)


def _root(squared: float, theorem: str, is_exact: bool = True) -> Sensitivity:
    return Sensitivity(float(np.sqrt(squared)), is_exact=is_exact, theorem=theorem)


def _diagonals(num_rounds: int, width: int) -> tuple[FloatArray, FloatArray]:
    """Returns two views of one array of zeros, ``below`` and ``above``, each of shape (w, n).

    ``below[t, i]`` is ``above[t, i - t]``. If below[t, i] is X[i, i - t] for i >= t, and zero for i
    < t, then above[t, i] is X[i, i + t], and zero for i + t >= n.
    """
    values = np.zeros(width * (num_rounds + 1))
    below = values[: width * num_rounds].reshape(width, num_rounds)
    return below, values.reshape(width, num_rounds + 1)[:, :num_rounds]


def _of_gram(
    norms: FloatArray, below: FloatArray, above: FloatArray, schema: Schema
) -> Sensitivity:
    """Computes the sensitivity from squared column norms and the diagonals of X = C^T C."""
    num_rounds = len(norms)
    if schema.most_in(num_rounds) == 1:
        return _root(float(np.max(norms)), _COLUMN_NORM)
    if schema.is_even:
        return _enumerated(norms, above, schema)
    if not np.any(below[schema.separation :]):
        return _root(schema.largest_sum(norms), _BANDED)
    # BandMF Thm 3. The sum over a pattern pi of |X[i, j]| is the sum over i in pi of the sum of
    # row i over pi. Alg. 4 bounds that by its maximum over all patterns; here the maximum is over
    # the patterns that contain i, which is no larger and is a bound for the same reason.
    rows_at_a_time = max(1, _ENTRIES_AT_A_TIME // len(below))
    row_bounds = norms.copy()
    for first in range(0, num_rounds, rows_at_a_time):
        rows = slice(first, first + rows_at_a_time)
        after, before = np.abs(above[: num_rounds - first, rows]), np.abs(below[: rows.stop, rows])
        row_bounds[rows] += _largest_of_both_sides(after, before, schema, num_rounds)
    # This bound is at most that by column norms, since |X[i, j]| <= sqrt(X[i, i] X[j, j]).
    squared = schema.largest_sum(row_bounds)
    return _root(squared, "upper bound for any matrix (BandMF Thm 3)", is_exact=False)


def _enumerated(norms: FloatArray, above: FloatArray, schema: Schema) -> Sensitivity:
    """Enumerates (k, b)-patterns: sums over all of them at once, diagonal by diagonal of X."""
    most, separation = schema.most_in(len(norms)), schema.separation
    lags = above[::separation][:most]

    def sums_from(values: FloatArray, count: int) -> FloatArray:
        return pattern_sum(values[::-1], separation, count)[::-1]

    sums = sums_from(norms, most)
    for count in range(1, len(lags)):
        # The sums over pairs of participations that are ``count`` separations apart, by the first
        # of the pair.
        sums = sums + 2.0 * sums_from(np.abs(lags[count]), most - count)
    start = int(np.argmax(sums[: len(schema.starts_in(len(norms)))]))
    rounds = np.arange(start, len(norms), separation)[:most]
    is_exact = _is_reached(lags[1:, rounds], float(np.max(norms[rounds])))
    return _root(sums[start], _ENUMERATION, is_exact)


def _is_reached(lags: FloatArray, largest: float) -> bool:
    """Returns whether contributions exist that reach the sum of |X[i, j]| over a pattern.

    They do if signs s exist with s_i s_j X[i, j] >= 0 for all i, j: then contributions s_i u, with
    one unit vector u, change C x by exactly the bound. Entries as small as rounding errors count as
    zero.

    Args:
      lags: ``lags[c - 1, i]`` is X for participations i and i + c of the pattern.
      largest: The largest diagonal entry of X.
    """
    signs_of = np.where(np.abs(lags) <= _ROUNDING_OF_GRAM * largest, 0.0, np.sign(lags))
    if np.all(signs_of >= 0.0):
        return True
    count = lags.shape[1]
    if count > _MOST_WITH_SIGNS:
        return False
    pattern = np.zeros((count, count))
    for lag, values in enumerate(signs_of, 1):
        np.fill_diagonal(pattern[:, lag:], values[: count - lag])
    # The graph has each participation with both signs. Signs exist if no participation is connected
    # with itself of the opposite sign.
    equal, opposite = pattern > 0.0, pattern < 0.0
    graph = np.block([[equal, opposite], [opposite, equal]])
    _, parts = scipy.sparse.csgraph.connected_components(graph, directed=False)
    return not np.any(parts[:count] == parts[count:])


def _largest_of_both_sides(
    after: FloatArray, before: FloatArray, schema: Schema, num_rounds: int
) -> FloatArray:
    """Returns for each row of |X| the largest sum over the other rounds of a pattern with it.

    Args:
      after: (w, rows): entry t places after the diagonal.
      before: (w', rows): entry t places before the diagonal.
      schema: The schema, of least separation b.
      num_rounds: n.
    """
    others, separation = schema.most_in(num_rounds) - 1, schema.separation
    sides = [side[separation:] for side in (after, before)]
    fitting = [-(-len(side) // separation) for side in sides]
    if others >= min(sum(fitting), (num_rounds - 1) // separation):
        return np.asarray(sum(_largest_sums(side, separation, None)[0] for side in sides))
    levels = min(others, max(fitting))
    later, earlier = (_largest_sums(side, separation, levels) for side in sides)
    # If m participations come after the row's round, at most k - 1 - m come before it.
    return np.asarray(
        np.max([later[m] + earlier[min(others - m, levels)] for m in range(levels + 1)], axis=0)
    )


def of_tree(num_leaves: int, num_rounds: int, schema: Schema) -> Sensitivity:
    """Computes the sensitivity of a binary tree's strategy matrix C_T, by a search of patterns.

    The pattern 0, b, 2 b, ... has the largest sum of those with an exact spacing of b, and a search
    begins with it. Take nodes over m rounds and pairs of participations j and j + d, which share
    a node only if d b < m. With f(j) the node of participation j, the pairs that share none are
    as many as the sum over j < d of f(j + k - d) - f(j). A term is floor((k - d) b / m), or one
    more for a participation j < d in the last r rounds of its node, r = (k - d) b modulo m. Modulo
    m, those d participations are b apart but for one gap, which is larger. So r rounds in a row
    hold the fewest if they end where the gap does, as the last ones do if the first round is 0.
    Nodes over m rounds cover all rounds up to an end, and no pattern has more participations before
    it.

    Args:
      num_leaves: The leaves n of the tree.
      num_rounds: The number of released rounds, from the first on.
      schema: The schema.

    Returns:
      The sensitivity, exact unless the search is too long.
    """
    most = schema.most_in(num_rounds)
    squared = _sum_of_pattern(num_leaves, range(0, num_rounds, schema.separation)[:most])
    if most == 1 or schema.is_even:
        return _root(squared, _COLUMN_NORM if most == 1 else _ENUMERATION)
    search = _TreeSearch(schema.separation, most)
    squared, is_exact = search.largest((num_leaves, num_rounds), squared)
    theorem = "upper bound: participations apart within nodes of the tree only"
    if is_exact:
        theorem = "search over the patterns of the tree (BandMF Prop. E.1)"
    return _root(squared, theorem, is_exact)


def _sum_of_pattern(num_leaves: int, rounds: Sequence[int]) -> int:
    """Returns the sum of squared counts of a pattern's rounds in the nodes of a tree.

    Args:
      num_leaves: The leaves n of the tree.
      rounds: The rounds of the pattern, below n.
    """
    places = np.array(rounds)
    counts = (np.bincount(places >> h)[: num_leaves >> h] for h in range(num_leaves.bit_length()))
    return sum(int(np.sum(np.square(each))) for each in counts)


class _TreeSearch:
    """Search for the pattern of rounds with the largest sum of squared counts in tree nodes.

    Patterns have at most k rounds, which are b or more apart. There are three upper bounds, and
    each is computed only if the one before is above the best known pattern:

    1. A node over m leaves holds at most min(k, ceil(m / b)) participations.
    2. For c participations in a node, the largest sum by its children, as if participations in
    different children could be at any distance.
    3. The largest sum of all patterns that fall short of bound 2 by less than the best known
    pattern does. A partial pattern is described by its count in a subtree, its sum in the subtree,
    and the number of rounds after the subtree that the client must wait. Of several partial
    patterns of one count, those are dropped that have neither a larger sum nor a shorter wait.

    Subtrees of equal shape share their results.
    """

    def __init__(self, separation: int, most: int) -> None:
        self._separation, self._most = separation, most
        self._allowed = self._steps = 0
        self.by_counts = functools.cache(self._by_counts)
        self.bounds = functools.cache(self._bounds)
        self.ends = functools.cache(self._ends)

    def largest(self, whole: _Shape, found: int) -> tuple[int, bool]:
        """Returns the largest sum and True, or an upper bound and False if the search is too long.

        Args:
          whole: The shape of the tree.
          found: The sum of a known pattern.
        """
        upper = self.by_counts(whole)
        try:
            if upper > found:
                upper = int(self.bounds(whole)[-1])
            if upper > found:
                self._allowed = upper - found - 1
                counts = np.flatnonzero(self.bounds(whole) > found).tolist()
                sums = [max(self.ends(whole, count, 0).values(), default=0) for count in counts]
                upper = max(found, *sums)
        except TimeoutError:
            return upper, False
        return upper, True

    def _spend(self, steps: int) -> None:
        self._steps += steps
        if self._steps > _MOST_STEPS:
            raise TimeoutError

    def _largest_count(self, shape: _Shape) -> int:
        return min(self._most, -(-shape[1] // self._separation))

    def _by_counts(self, shape: _Shape) -> int:
        below = sum(map(self.by_counts, _children(shape)))
        return (self._largest_count(shape) ** 2 if is_complete(shape[0]) else 0) + below

    def _bounds(self, shape: _Shape) -> IntArray:
        """Returns bound 2 of the class for 0, 1, ... participations in a subtree."""
        counts = np.arange(self._largest_count(shape) + 1)
        sums = np.zeros(len(counts), np.int64)
        if children := _children(shape):
            fewer, more = sorted(map(self.bounds, children), key=len)
            self._spend(len(fewer) + len(fewer) * len(more) // 1000)
            for count, value in enumerate(fewer):
                reached = sums[count : count + len(more)]
                np.maximum(reached, value + more[: len(reached)], out=reached)
        return np.asarray(sums + is_complete(shape[0]) * np.square(counts))

    def _ends(self, shape: _Shape, count: int, wait: int) -> dict[int, int]:
        """Returns, for each wait after a subtree, the largest sum of ``count`` rounds in it."""
        size, released = shape
        if count == 0 or (count == 1 and is_complete(size)):
            # A single participation is best as early as the client may join, since that makes the
            # wait shortest.
            end = max(wait + count * self._separation - size, 0)
            return {end: int(self.bounds(shape)[count])} if wait < released or not count else {}
        (left, right), own = _children(shape), is_complete(size) * count**2
        of_left, of_right = self.bounds(left), self.bounds(right)
        least = int(self.bounds(shape)[count]) - self._allowed
        first = np.arange(max(0, count - len(of_right) + 1), min(count, len(of_left) - 1) + 1)
        self._spend(1 + len(first) // 1000)
        sums: dict[int, int] = {}
        for number in first[own + of_left[first] + of_right[count - first] >= least].tolist():
            for between, before in self.ends(left, number, wait).items():
                for end, after in self.ends(right, count - number, between).items():
                    self._spend(1)
                    if (total := own + before + after) >= max(least, sums.get(end, 0)):
                        sums[end] = total
        every = sums.items()
        return {end: sum_ for end, sum_ in every if all(sum_ > s for e, s in every if e < end)}


def _children(shape: _Shape) -> tuple[_Shape, ...]:
    """Returns a subtree's two children; empty for a leaf, or if it has no released round."""
    size, released = shape
    if size == 1 or released == 0:
        return ()
    left = 1 << ((size - 1).bit_length() - 1)
    return (left, min(released, left)), (size - left, max(released - left, 0))


def _tree_of_rows(rows: StateSpaceNoise, num_rounds: int) -> _Tree | None:
    """Returns the binary tree that makes the noise of the first rounds; None for other rows.

    The arrays must equal those of :func:`full_tree_rows` or :func:`online_tree_rows`, number for
    number. In exact arithmetic, with C the inverse of the noising matrix N of the first rounds, C^T
    C is at most C_T^T C_T for the columns of C_T of these rounds, in the order of positive
    semi-definite matrices:

    * ``full``, all rounds: the two are equal, because N N^T is the inverse of C_T^T C_T.
    * ``full``, fewer rounds: C is a leading part of a lower-triangular matrix, so that ||C x|| is
      at most what all rows make of x and zeros in later rounds.
    * ``online``: the first rounds are those of a tree of as many leaves. N N^T = L L^T for the left
      inverse L of C_T from below. Every left inverse is the pseudo-inverse P plus an M with
      M C_T = 0. Rows of P are combinations of columns of C_T, so that M P^T = 0 and
      L L^T = P P^T + M M^T, which is at least P P^T = (C_T^T C_T)^-1. Inverses reverse the order.

    Rounding changes each entry of C by at most an error times the entry's magnitude. All numbers of
    C are sums, products and quotients of positive numbers, so that relative errors at most add up.
    For m state vectors and in units of u = 2^-53, the relative errors are, to first order:

    * ``full``: variances have 3 m, precisions 7 m, and factors of shares 7 m + 2. An entry is one
      product of shares, of at most m factors in all, over a gain of 3.5 m + 2.
    * ``online``: weights w have 4, numbers 1 - w have 9, and products of m of them 10 m. Those are
      at most 1/2; outputs, all of one sign, sum up to one of them minus one. Gains have 18.

    Args:
      rows: The noising matrix.
      num_rounds: The number of the first rounds that are released, at most all.
    """
    rounds, (phases, vectors) = rows.num_rounds, rows.outputs.shape
    if phases == rounds == rows.phases[-1] + 1:
        leaves, roundings, is_equal = rounds, 7 * (vectors + 1) ** 2, num_rounds == rounds
        made = full_tree_rows(rounds)
    elif phases == vectors + 1 and num_rounds < 1 << (vectors + 1):
        leaves, roundings, is_equal = num_rounds, 10 * vectors + 30, False
        made = online_tree_rows(num_rounds, vectors)
    else:
        return None
    is_same = np.array_equal(rows.phases[:num_rounds], made.phases[:num_rounds]) and all(
        np.array_equal(getattr(rows, name), getattr(made, name))
        for name in ("gains", "outputs", "sources", "decays", "feedbacks")
    )
    return _Tree(leaves, roundings * 2.0**-53, is_equal) if is_same else None


class TailError(Error, ValueError):
    """Raised if drawn noise would cost too large a share of delta, or there is too little noise."""


def epsilon(
    noise_multiplier: float,
    delta: float,
    *,
    num_coordinates: int = DEFAULT_NUM_COORDINATES,
    disjoint_participations: int = 1,
) -> float:
    """Returns the epsilon of a run without amplification, at a delta.

    Use it when a noise multiplier is given, and no client is sampled.

    It is the epsilon of the exact Gaussian curve at the delta that drawn noise leaves
    (``delta_left``).

    Args:
      noise_multiplier: The noise multiplier, relative to the sensitivity of C under its
        participation schema; zero means no noise.
      delta: Above 0 and below 1.
      num_coordinates: Parameters times rounds: each costs a delta of about 1e-27.
      disjoint_participations: 1, or the largest number of participations of a client if each
        changes other rows of C x, all of them by the same norm.

    Returns:
      An epsilon >= 0 for which the run is (epsilon, delta)-DP; infinity without noise.

    Raises:
      TailError: If the noise that is drawn costs more than a thousandth of delta, or the noise
        multiplier is below 0.2: a ValueError.
      ValueError: If an argument is out of its range.

    Example:
      >>> import mf_aggregators as mfa
      >>> round(mfa.accounting.epsilon(1.0, delta=1e-6), 3)
      4.887
    """
    sigma = numbers.non_negative_number(noise_multiplier, "noise_multiplier")
    participations = numbers.positive_integer(disjoint_participations, "disjoint_participations")
    coordinates = numbers.positive_integer(num_coordinates, "num_coordinates")
    if sigma >= _SMALLEST_NOISE_MULTIPLIER:
        # The squared norms of participations that change different rows add up.
        delta = delta_left(delta, sigma * math.sqrt(participations), coordinates)
    return exact_epsilon(sigma, delta)


def exact_epsilon(noise_multiplier: float, delta: float) -> float:
    """Returns the epsilon of the Gaussian mechanism with real normal numbers, as in theory.

    Args:
      noise_multiplier: sigma; zero means no noise.
      delta: Above 0 and below 1.

    Returns:
      The smallest epsilon >= 0 at which the mechanism is (epsilon, delta)-DP; infinity without
      noise.

    Raises:
      ValueError: If an argument is out of its range.
    """
    sigma = numbers.non_negative_number(noise_multiplier, "noise_multiplier")
    # Noise above the largest multiplier is counted as that multiplier, which is on the safe side.
    sigma, delta = min(sigma, LARGEST_NOISE_MULTIPLIER_ACCOUNTED), numbers.delta(delta)
    if sigma < _SMALLEST_NOISE_MULTIPLIER:
        return math.inf

    def excess(epsilon: float) -> float:
        return float(exact_deltas(sigma, epsilon, 0.0)) - delta

    if excess(0.0) <= 0.0:
        return 0.0
    # For real normal numbers, zCDP gives an upper bound of epsilon (Bun and Steinke, Prop. 1.3).
    rho = zcdp_rho(sigma)
    upper = rho + 2.0 * math.sqrt(rho * math.log(1.0 / delta)) + 1.0
    root = scipy.optimize.brentq(excess, 0.0, upper, xtol=1e-12, rtol=1e-12)
    # The computed root may be below the true one by the solver's tolerance, so it is raised.
    return float(root * (1.0 + 1e-11) + 1e-11)


# Tails may underflow to zero, also in a program that makes NumPy raise floating-point errors.
@np.errstate(under="ignore")
def exact_deltas(
    noise_multiplier: float, epsilons: float | FloatArray, rounding: float = _ROUNDING_OF_DELTAS
) -> FloatArray:
    """Returns the deltas of the Gaussian mechanism with real normal numbers, rounded up.

    Args:
      noise_multiplier: sigma, at least 0.001.
      epsilons: Epsilons, in an array of any shape.
      rounding: The relative amount by which the probability of the upper tail is raised.
    """
    half = 0.5 / noise_multiplier
    log_low = scipy.special.log_ndtr(-half - epsilons * noise_multiplier)
    high = scipy.special.ndtr(half - epsilons * noise_multiplier) * (1.0 + rounding)
    return np.asarray(np.clip(high - np.exp(np.minimum(log_low + epsilons, 0.0)), 0.0, 1.0))


def zcdp_rho(noise_multiplier: float) -> float:
    """Returns the rho of approximate zCDP of an unamplified run, which is 1 / (2 sigma^2).

    Use it when a budget is counted in approximate zCDP.

    The drawn noise is bounded, and a client moves its bounds. So pure zCDP does not hold for any
    released number: what holds is (rho, delta0)-approximate zero-concentrated DP (Bun and Steinke,
    2016, Def. 8.1), with the delta0 of :func:`zcdp_delta`.

    Args:
      noise_multiplier: sigma, relative to the sensitivity of C under its participation schema.

    Returns:
      rho (Bun and Steinke, Prop. 1.6); infinity without noise.

    Raises:
      ValueError: If the noise multiplier is negative or not finite.

    Example:
      >>> import mf_aggregators as mfa
      >>> mfa.accounting.zcdp_rho(0.5)
      2.0
    """
    sigma = numbers.non_negative_number(noise_multiplier, "noise_multiplier")
    if sigma == 0.0:
        return math.inf
    # Two divisions, since the square of sigma may be beyond the range of floats. A rho that
    # underflows becomes the least positive float and not 0.
    return max(0.5 / sigma / sigma, math.ulp(0.0))


def zcdp_delta(
    noise_multiplier: float,
    *,
    num_coordinates: int = DEFAULT_NUM_COORDINATES,
    disjoint_participations: int = 1,
) -> float:
    """Returns the delta0 of approximate zCDP that belongs to the rho of :func:`zcdp_rho`.

    Use it when zCDP is stated: the drawn noise has it only approximately.

    For the released numbers of an unamplified run, (rho, delta0)-approximate zero-concentrated DP
    is proved (``kernel.draws``): in each of two neighbouring worlds there is an event of
    probability 1 - delta0 or more, given which the Renyi divergences of every order alpha > 1 are
    at most rho alpha. The delta0 of several runs together is the sum of the delta0 of the runs.

    Args:
      noise_multiplier: As in :func:`epsilon`.
      num_coordinates: As in :func:`epsilon`.
      disjoint_participations: As in :func:`epsilon`.

    Returns:
      The probability delta0; 0 without noise, where rho is infinite.

    Raises:
      TailError: If the noise multiplier is too small for a proof.
      ValueError: If an argument is out of its range.

    Example:
      >>> import mf_aggregators as mfa
      >>> mfa.accounting.zcdp_delta(0.5) < 1e-15
      True
    """
    sigma = numbers.non_negative_number(noise_multiplier, "noise_multiplier")
    if sigma == 0.0:
        return 0.0
    each = sigma * math.sqrt(numbers.positive_integer(disjoint_participations, "participations"))
    return failure_probability(each, num_coordinates)


def delta_left(
    delta: float, noise_multiplier: float, num_coordinates: int, compositions: int = 0
) -> float:
    """Returns the part of delta that is left after the costs of drawn noise and of composing.

    Args:
      delta: The delta of the guarantee.
      noise_multiplier: The standard deviation of Z over the largest change of C x, in L2 norm, by
        one participation of a client; above zero.
      num_coordinates: The numbers that are drawn: parameters times rounds, of all runs.
      compositions: The number of mechanisms that are composed by Fourier transforms.

    Returns:
      A delta below the given one. If real normal numbers have an epsilon at this delta, the drawn
      noise has the same epsilon at the given delta.

    Raises:
      TailError: If less than 999 thousandths of delta are left, or there is so little noise that
        the bound does not hold.
      ValueError: If a number is out of its range, or delta is too small for the rounding errors of
        the compositions.
    """
    delta = numbers.delta(delta)
    rounding = composition_rounding(delta, compositions)
    failure = failure_probability(noise_multiplier, num_coordinates)
    # The failure probability is compared with the whole delta, before the rounding of compositions
    # is taken off: so the same deltas are refused with and without amplification.
    if failure > _LARGEST_SHARE * delta:
        raise TailError(
            f"delta must be at least {failure / _LARGEST_SHARE:.3g} for {num_coordinates} numbers "
            f"of noise, found {delta:g}: use a larger delta, or fewer rounds or parameters."
        )
    return delta - failure - rounding


def composition_rounding(delta: float, compositions: int) -> float:
    """Returns the part of delta that rounding errors of composing may cost.

    Args:
      delta: The delta of the guarantee.
      compositions: The number of mechanisms that are composed by Fourier transforms.

    Raises:
      ValueError: If delta is out of its range, or too small for these rounding errors.
    """
    delta, rounding = numbers.delta(delta), _ROUNDING_PER_COMPOSITION * compositions
    smallest = max(_SMALLEST_DELTA, 2.0 * rounding)
    if compositions and delta < smallest:
        composed = f"a composition of {compositions} mechanisms"
        raise ValueError(f"delta must be at least {smallest:.3g} for {composed}, found {delta:g}.")
    return rounding


def failure_probability(
    noise_multiplier: float, num_coordinates: int, compositions: int = 0
) -> float:
    """Returns the delta that drawn noise costs in addition to that of real normal numbers.

    Args:
      noise_multiplier: As in ``delta_left``.
      num_coordinates: As in ``delta_left``.
      compositions: As in ``delta_left``: the cost of composing is added.

    Raises:
      TailError: If there is so little noise that the bound does not hold.
      ValueError: If a number is out of its range.
    """
    sigma = numbers.positive_number(noise_multiplier, "noise_multiplier")
    if sigma * LARGEST_SHIFT < 1.0:
        raise TailError(
            f"there is too little noise: a client moves the mean by {1.0 / sigma:.3g} standard "
            f"deviations, above {LARGEST_SHIFT:g}. Use more noise (a smaller epsilon)."
        )
    coordinates = numbers.positive_integer(num_coordinates, "num_coordinates")
    return min(1.0, coordinates * FAILURE_PER_NUMBER) + _ROUNDING_PER_COMPOSITION * compositions
