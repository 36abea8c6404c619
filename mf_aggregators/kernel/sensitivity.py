"""Participation schemas, the L2 sensitivity of a strategy matrix C under one, and its epsilon.

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
from typing import Any, NamedTuple, TypeAlias, final

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

# Entries of X, relative to its diagonal, that may be rounding errors of a product.
_ROUNDING_OF_GRAM = 1e-14
# Deviations from a non-increasing sequence, relative to its largest entry, that count as
# rounding of computed coefficients. The value is that of the non-increasing sequence.
_ROUNDING_OF_COEFFICIENTS = 1e-13
# Errors of Fourier transforms, relative to the least squared norm, that count as rounding.
_ROUNDING_OF_TRANSFORMS = 1e-8
_COLUMNS_AT_A_TIME = 256
_ENTRIES_AT_A_TIME = 2**20
# If a pattern has more participations, its sum counts as reached only if no entry is negative.
_MOST_WITH_SIGNS = 4096
# Rounds squared times participations: up to here a sensitivity that Toeplitz structure
# only bounds is also computed from the dense matrix.
_LARGEST_DENSE_BOUND = 30_000_000
# The most entries of a matrix between diagonal ones that are computed.
_MOST_ENTRIES = 1 << 26
# Up to this number of rounds, norms of columns with scales are summed term by term, and C is
# computed where a tree only bounds it.
_MOST_ROUNDS_OF_SUMS = 4096
# Pairs of partial patterns that a search of trees may look at: a few seconds.
_MOST_STEPS = 2_000_000
# Noise multipliers that an epsilon is computed for. Outside, dp-accounting's arithmetic over- or
# underflows, and an epsilon is far from any use.
_SMALLEST_NOISE_MULTIPLIER = 1e-3
LARGEST_NOISE_MULTIPLIER_ACCOUNTED = 1e100
# Many times the relative roundings of normal distribution functions and exponentials in the tails.
_ROUNDING_OF_DELTAS = 1e-12
# The largest share of delta that the failure probability may take.
_LARGEST_SHARE = 1e-3
# With less noise a client may move a number by more standard deviations than are covered.
LEAST_NOISE_MULTIPLIER = 1.0 / LARGEST_SHIFT
# The coordinates of all rounds together that every statement charges for by default. No noise is
# made for more.
DEFAULT_NUM_COORDINATES = 2**40
# dp-accounting composes by Fourier transforms. Their rounding is not on the side of privacy:
# masses are off by about 2e-16 for each composition, summed over the grid. Ten times that is
# taken off delta, and a delta that is not well above it is refused.
_ROUNDING_PER_COMPOSITION = 2e-15
_SMALLEST_DELTA = 1e-12
# A subtree up to its place: its leaves, and how many of them are rounds that count.
_Shape: TypeAlias = tuple[int, int]
_COLUMN_NORM = "largest column norm (Denisov et al. Thm 4.1)"
_BANDED = "banded matrix (BandMF Thm 2, Alg. 5)"
_ENUMERATION = "enumeration of patterns (BandMF Eq. 5)"
_TOEPLITZ = "non-increasing Toeplitz coefficients (Kalinin and Lampert, Thm 2)"


@dataclasses.dataclass(frozen=True)
class Schema:
    """A participation schema. ``Schema(1, 1)`` is single participation.

    Attributes:
      most: The most participations k of one client; None for as many as fit.
      separation: The least distance b of two participations of one client, in rounds.
      is_even: Whether adjacent participations are exactly b rounds apart, (k, b)-participation.

    Raises:
      TypeError: If ``is_even`` is no bool.
      ValueError: If a number is no integer of at least 1.
    """

    most: int | None
    separation: int
    is_even: bool = False

    def __init_subclass__(cls) -> None:
        raise TypeError("Schema takes no subclasses: guarantees are proved for Schema itself.")

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
        """Returns the most of n rounds that one client can take part in.

        Args:
          num_rounds: n, at least 1.

        Raises:
          ValueError: If n is not a positive integer.
        """
        num_rounds = numbers.positive_integer(num_rounds, "num_rounds")
        fitting = -(-num_rounds // self.separation)
        return fitting if self.most is None else min(fitting, self.most)

    def separation_in(self, num_rounds: int) -> int:
        """Returns the least distance b of two participations; n if no client returns in n rounds.

        Args:
          num_rounds: n, at least 1.

        Raises:
          ValueError: If n is not a positive integer.
        """
        return self.separation if self.most_in(num_rounds) > 1 else num_rounds

    def starts_in(self, num_rounds: int) -> range:
        """Returns the first rounds of the maximal patterns of (k, b)-participation.

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
        """Returns whether the schema allows the observed participation of clients.

        Args:
          participations: The most participations of one client.
          smallest: The smallest distance of adjacent participations; None if nobody returned.
          largest: The largest distance; None if nobody returned, or if it is not known.
        """
        if participations <= 1 or smallest is None:
            return True
        if self.is_even and not smallest == largest == self.separation:
            return False
        return smallest >= self.separation and participations <= (self.most or math.inf)

    def largest_sum(self, weights: FloatArray) -> float:
        """Returns the largest sum of weights over a pattern (BandMF Alg. 3).

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
    """Clients that are zeroed together: each of them keeps to a schema.

    Attributes:
      schema: The schema of one client; within its window if there are windows.
      num_clients: The most clients of one person; with windows, the most devices.
      window: The rounds W after which client ids change; None if they stay.
      num_windows: In how many windows one device is: 1 for a client in a window, None for all. A
        device's participations in different windows may be next to each other.

    Raises:
      TypeError: If the schema is none.
      ValueError: If a number is below 1.
    """

    schema: Schema
    num_clients: int = 1
    window: int | None = None
    num_windows: int | None = None

    def __post_init__(self) -> None:
        if type(self.schema) is not Schema:
            raise TypeError(f"a unit needs a Schema, found {numbers.shown(self.schema)}.")
        # Made anew: a pickle or an altered schema may have numbers that no constructor has checked.
        object.__setattr__(self, "schema", dataclasses.replace(self.schema))
        numbers.set_positive_integers(self, "num_clients", "window", "num_windows")

    def schema_in(self, num_rounds: int) -> Schema:
        """Returns a schema of all rounds that allows every pattern of a client or device.

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
        """Who is protected, as in ``each person with at most 2 clients``."""
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
    """Returns the largest sums of entries along the first axis that are b or more apart.

    F[i], the largest sums from entry i on, follow from F[i + 1] and F[i + b], so that b of them
    are kept. Those of b entries are computed at once, from the last ones on.

    Args:
      weights: (n, ...) non-negative numbers.
      separation: b.
      most: k; None for as many as fit.

    Returns:
      (k + 1, ...) sums of at most 0, 1, ..., k entries; (1, ...) without a limit.
    """
    chunks, shape = -(-len(weights) // separation), weights.shape[1:]
    filled = np.zeros((chunks * separation, *shape))
    filled[: len(weights)] = weights
    sums = np.zeros((1 if most is None else most + 1, separation, *shape))
    # One entry more is taken of those that begin b further on.
    fewer, more = (sums, sums) if most is None else (sums[:-1], sums[1:])
    for chunk in filled.reshape(chunks, separation, *shape)[::-1]:
        taken = np.maximum.accumulate((chunk + fewer)[:, ::-1], axis=1)[:, ::-1]
        more[...] = np.maximum(taken, more[:, :1])
    return np.asarray(sums[:, 0])


def pattern_sum(column: FloatArray, separation: int, most: int) -> FloatArray:
    """Returns the sum of a Toeplitz matrix's columns 0, b, 2 b, ..., k of them.

    Args:
      column: (n,) the first column.
      separation: b.
      most: k, with (k - 1) b < n.

    Returns:
      (n,): entry t is the sum of ``column[t - j b]`` over j < k with j b <= t.
    """
    # Sums over windows of 1, 2, 4, ... participations, put together by the bits of k.
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
      is_exact: True if the value is reached by some neighbouring pair of inputs,
        False if it is an upper bound.
      theorem: The statement that gives the value.
      error: The most that the entries of a computed C may hide of it, beside the value.

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
        """Creates a sensitivity of ``value``."""
        self = super().__new__(cls, value)
        self.is_exact, self.theorem, self.error = is_exact, theorem, error
        return self

    @property
    def value(self) -> float:
        """The sensitivity as a plain float."""
        return float(self)

    def replace(self, **changes: Any) -> "Sensitivity":
        """Returns a sensitivity with some changed attributes."""
        return Sensitivity(**{"value": self.value, **vars(self), **changes})

    def __getnewargs_ex__(self) -> tuple[tuple[float], dict[str, Any]]:
        return (float(self),), vars(self)

    def __repr__(self) -> str:
        return f"Sensitivity({float(self)!r}, is_exact={self.is_exact}, theorem={self.theorem!r})"


class _Tree(NamedTuple):
    """The tree that the noise of the first rounds comes from, and how exactly.

    Attributes:
      num_leaves: The leaves of the tree.
      error: The most that roundings change an entry of C by, over its magnitude.
      is_equal: Whether C^T C is C_T^T C_T, and not at most that.
    """

    num_leaves: int
    error: float
    is_equal: bool


# A bound of a sensitivity by what is known of rows.
_Bound: TypeAlias = Callable[[_Tree | Strategy], Sensitivity]


def of_strategy(strategy: Strategy, schema: Schema) -> Sensitivity:
    """Computes or bounds the sensitivity of a strategy matrix, from its entries alone.

    Args:
      strategy: C, for n rounds. Its numbers are finite, and so are their squares. A dense one may
        have any number of rows: those of trees have more than n.
      schema: The schema.

    Returns:
      The sensitivity, exact or an upper bound. For bands, it takes O(n b^2) operations. For a
      Toeplitz matrix, also between diagonal ones, it is the smaller of the bound in O(n) and, if n
      is not too large, that of all entries.
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
    # The bound of columns of one norm is loose.
    is_quick |= strategy.scales is not None and not np.ptp(strategy.scales[0])
    if found.is_exact or not is_quick or num_rounds * num_bands > _MOST_ENTRIES:
        return found
    return min(_of_columns(strategy.compact_columns(num_bands).T, schema), found)


def _of_matrix(strategy: FloatArray, schema: Schema) -> Sensitivity:
    """The sensitivity of any dense matrix."""
    norms = np.einsum("ij,ij->j", strategy, strategy)
    num_rounds = len(norms)
    separation = schema.separation_in(num_rounds)
    below, above = _diagonals(num_rounds, num_rounds)
    for first in range(0, num_rounds, _COLUMNS_AT_A_TIME):
        columns = strategy[:, first : first + _COLUMNS_AT_A_TIME]
        # Rows above have zeros in these columns.
        top = int(np.argmax(np.any(columns, axis=1)))
        earlier = strategy[top:, : max(first + columns.shape[1] - separation, 0)]
        for i, row in enumerate(columns[top:].T @ earlier, first):
            # X[i, 0], ..., X[i, i - b]: closer pairs are in no pattern.
            below[separation : i + 1, i] = row[: max(i - separation + 1, 0)][::-1]
    return _of_gram(norms, below, above, schema)


def _of_columns(columns: FloatArray, schema: Schema) -> Sensitivity:
    """The sensitivity of a lower-triangular C with ``columns[t, j] = C[j + t, j]``, (b, n)."""
    num_rounds = columns.shape[1]
    columns = columns[: np.max(np.flatnonzero(np.any(columns, axis=1)), initial=0) + 1]
    num_bands = len(columns)
    norms = np.einsum("tj,tj->j", columns, columns)
    separation = schema.separation_in(num_rounds)
    if 4 * num_bands > num_rounds and num_bands > separation and not schema.is_even:
        # Products of dense matrices are quicker.
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
    """Computes the sensitivity of the first rounds, from the rows that are drawn in them alone.

    C comes from the rows (``rows``). The bound on the errors of its
    columns counts k times, for at most k participations, and that on roundings of the value once.
    Rows of a binary tree are known by their arrays (:func:`_tree_of_rows`). If the tree only bounds
    C, the smaller of its bound and that of C counts, for up to 4,096 rounds.

    Args:
      rows: The rows, of one of the kernel's own classes.
      num_rounds: How many of their rounds: all, or those of a run that stopped early; at least 1.
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
    # Patterns of a wider schema may cross the ends of windows.
    is_tight = unit.window is None or unit.window >= num_rounds or schema.most == 1
    is_exact = one.is_exact and is_tight
    return one.replace(value=one.value * number, error=one.error * number, is_exact=is_exact)


def of_pattern(rows: NoiseRecursion, num_rounds: int, rounds: tuple[int, ...]) -> Sensitivity:
    """Bounds the sensitivity for given rounds of one client or person (BandMF Eq. 5).

    c clients of a person in one round add up to a contribution of norm at most c, so that the bound
    is the root of the sum of c_i c_j |X[i, j]| over pairs of rounds.

    Args:
      rows: As in :func:`of_rows`.
      num_rounds: As there.
      rounds: The rounds, never decreasing, each below ``num_rounds``; a round c times for c
        clients of one person.

    Returns:
      The root of the sum of |X[i, j]| over its rounds, and its ``error``.

    Raises:
      NotProved: As :func:`of_rows` does.
      ValueError: If a round is not among the rounds.
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
    """The bound by C of the rows, or by the tree that they are of; the smaller one of both."""
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
    """A sensitivity with the error that errors of C and of roundings make."""
    if isinstance(known, Strategy):
        relative = _roundings(known.entries, num_rounds, most)
        return value.replace(error=most * known.error + value.value * relative)
    # No column of C is larger than one of C_T, which has a one for each node over its round.
    error = most * known.error * known.num_leaves.bit_length() ** 0.5
    if known.is_equal:
        return value.replace(error=error)
    theorem = f"upper bound by a binary tree: {value.theorem.removeprefix('upper bound: ')}"
    return value.replace(is_exact=False, theorem=theorem, error=error)


def _roundings(array: FloatArray, num_rounds: int, most: int) -> float:
    """The relative error of a sensitivity by roundings, of a C that is known exactly.

    In k columns of at most m entries at most t = min(n, k m) rounds count, and the squared value
    comes from at most three nested sums of so many terms. If none is negative, its relative error
    is at most 3 t u, u = 2^-53. Else an entry of X has one of m u times two column norms (Higham,
    Sec. 3.1), and the squared sum of k norms is at most k times the squared value.

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
    """Bounds the sensitivity of C = P T D by column norms, and by that of T and largest scales.

    The squared norms of the columns of P T are sums of non-negative products. Fourier transforms
    make those of many rounds, and the bound on their errors is added.

    Args:
      coefficients: (m,) the first column of the Toeplitz matrix T, m <= n; zeros follow.
      scales: The diagonals of P and D, (n,) above zero.
      schema: The schema.

    Returns:
      The sensitivity, exact if clients take part once, or if T has no more bands than the
      separation, and if errors of transforms are next to none.
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

    Where c does not decrease, the second factor is at most e_(t + (j - i) b), with
    e_t = max |c_s| over s >= t, which gives an upper bound. Columns of a matrix of at most
    b bands are orthogonal within a pattern, and their norms decide, whatever c is.

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
    # Columns end at the last round: their norms fall.
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
        # Twice the product of the column from this round on with all earlier ones of the pattern.
        earlier[start - separation :] += envelope[: num_rounds - start + separation]
        squared += 2.0 * float(sizes[: num_rounds - start] @ earlier[start:])
    # All terms are non-negative, so that rounding is relative to the sum itself.
    rounding = (num_rounds + 2.0 * most) * np.finfo(np.float64).eps
    theorem = f"upper bound by {_TOEPLITZ}"
    return _root(float(squared * (1.0 + rounding)), theorem, is_exact=False)


def _root(squared: float, theorem: str, is_exact: bool = True) -> Sensitivity:
    return Sensitivity(float(np.sqrt(squared)), is_exact=is_exact, theorem=theorem)


def _diagonals(num_rounds: int, width: int) -> tuple[FloatArray, FloatArray]:
    """Two views of one array of zeros: (w, n) ``below[t, i]`` is ``above[t, i - t]``.

    With below[t, i] = X[i, i - t] for i >= t, and zero for i < t, it is above[t, i] = X[i, i + t],
    and zero for i + t >= n.
    """
    values = np.zeros(width * (num_rounds + 1))
    below = values[: width * num_rounds].reshape(width, num_rounds)
    return below, values.reshape(width, num_rounds + 1)[:, :num_rounds]


def _of_gram(
    norms: FloatArray, below: FloatArray, above: FloatArray, schema: Schema
) -> Sensitivity:
    """The sensitivity from squared column norms and diagonals b, b + 1, ... of X."""
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
    # The largest sum of column norms is no smaller: |X[i, j]| <= sqrt(X[i, i] X[j, j]).
    squared = schema.largest_sum(row_bounds)
    return _root(squared, "upper bound for any matrix (BandMF Thm 3)", is_exact=False)


def _enumerated(norms: FloatArray, above: FloatArray, schema: Schema) -> Sensitivity:
    """BandMF Eq. 5: sums over all patterns at once, diagonal by diagonal of X."""
    most, separation = schema.most_in(len(norms)), schema.separation
    lags = above[::separation][:most]

    def sums_from(values: FloatArray, count: int) -> FloatArray:
        return pattern_sum(values[::-1], separation, count)[::-1]

    sums = sums_from(norms, most)
    for count in range(1, len(lags)):
        # Pairs of participations ``count`` separations apart, the first of each pair.
        sums = sums + 2.0 * sums_from(np.abs(lags[count]), most - count)
    start = int(np.argmax(sums[: len(schema.starts_in(len(norms)))]))
    rounds = np.arange(start, len(norms), separation)[:most]
    is_exact = _is_reached(lags[1:, rounds], float(np.max(norms[rounds])))
    return _root(sums[start], _ENUMERATION, is_exact)


def _is_reached(lags: FloatArray, largest: float) -> bool:
    """Returns whether sum |X[i, j]| over a pattern is reached.

    It is if signs s exist with s_i s_j X[i, j] >= 0 for all i, j: then contributions s_i u, with
    one unit vector u, change C x by exactly the bound. Entries of the size of rounding errors have
    no sign.

    Args:
      lags: ``lags[c - 1, i]`` is X for participations i and i + c of the pattern.
      largest: The largest diagonal entry.
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
    # Each participation with either sign: no sign may be connected with its opposite.
    equal, opposite = pattern > 0.0, pattern < 0.0
    graph = np.block([[equal, opposite], [opposite, equal]])
    _, parts = scipy.sparse.csgraph.connected_components(graph, directed=False)
    return not np.any(parts[:count] == parts[count:])


def _largest_of_both_sides(
    after: FloatArray, before: FloatArray, schema: Schema, num_rounds: int
) -> FloatArray:
    """For each row of |X|, its largest sum over the other rounds of a pattern that holds it.

    Args:
      after: (w, rows): entry t after the diagonal.
      before: (w', rows): entry t before it.
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
    # m participations after the row leave k - 1 - m before it.
    return np.asarray(
        np.max([later[m] + earlier[min(others - m, levels)] for m in range(levels + 1)], axis=0)
    )


def of_tree(num_leaves: int, num_rounds: int, schema: Schema) -> Sensitivity:
    """Computes the sensitivity of the strategy matrix C_T of a binary tree.

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
      num_rounds: Rounds that count, from the first on.
      schema: The schema.

    Returns:
      The sensitivity, exact unless the search would take too long.
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
    """Returns the sum of squared counts of one pattern.

    Args:
      num_leaves: The leaves n of the tree.
      rounds: The rounds of the pattern, below n.
    """
    places = np.array(rounds)
    counts = (np.bincount(places >> h)[: num_leaves >> h] for h in range(num_leaves.bit_length()))
    return sum(int(np.sum(np.square(each))) for each in counts)


class _TreeSearch:
    """The largest sum of squared counts over patterns of least separation b, at most k rounds each.

    Three upper bounds, each computed only if the one before is above the best known pattern:

    1. A node over m leaves holds at most min(k, ceil(m / b)) participations.
    2. For c participations in a node, the most by its children, as if participations in
       different children could be any distance apart.
    3. The sums of all patterns that fall short of bound 2 by less than the best known pattern
       does. A partial pattern is its count in a subtree, its sum there, and how many rounds
       after the subtree the client must wait; of several partial patterns of one count those
       remain that have a larger sum or a shorter wait.

    Subtrees of equal shape share their results.
    """

    def __init__(self, separation: int, most: int) -> None:
        self._separation, self._most = separation, most
        self._allowed = self._steps = 0
        self.by_counts = functools.cache(self._by_counts)
        self.bounds = functools.cache(self._bounds)
        self.ends = functools.cache(self._ends)

    def largest(self, whole: _Shape, found: int) -> tuple[int, bool]:
        """Returns the largest sum, and True; or an upper bound and False for too long a search.

        Args:
          whole: The tree.
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

    def _ends(self, shape: _Shape, count: int, wait: int) -> dict[int, int]:
        """The largest sum of ``count`` participations in a subtree for each wait after it."""
        size, released = shape
        if count == 0 or (count == 1 and is_complete(size)):
            # One participation, as early as the client may.
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
    """The two children of a subtree; empty for a leaf, or if no round counts."""
    size, released = shape
    if size == 1 or released == 0:
        return ()
    left = 1 << ((size - 1).bit_length() - 1)
    return (left, min(released, left)), (size - left, max(released - left, 0))


def _tree_of_rows(rows: StateSpaceNoise, num_rounds: int) -> _Tree | None:
    """Returns the tree that makes the noise of the first rounds, or None for other rows.

    Arrays must be those of :func:`full_tree_rows` or :func:`online_tree_rows` number for number.
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
    """The noise that is drawn adds too large a part of delta for a guarantee to be stated."""


def epsilon(
    noise_multiplier: float,
    delta: float,
    *,
    num_coordinates: int = DEFAULT_NUM_COORDINATES,
    disjoint_participations: int = 1,
) -> float:
    """Returns the epsilon of an unamplified run at a delta.

    Use it when a noise multiplier is given, and no client is sampled.

    It is that of the exact Gaussian curve at the delta that is left (``delta_left``).

    Args:
      noise_multiplier: Relative to the sensitivity of C under its participation
        schema; zero means no noise.
      delta: Above 0 and below 1.
      num_coordinates: Parameters times rounds: each costs a delta of about 1e-27.
      disjoint_participations: 1, or the largest number of participations of a client if
        each changes rows of C x of its own, all of them by the same norm.

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
        # The squared norms of disjoint participations add up.
        delta = delta_left(delta, sigma * math.sqrt(participations), coordinates)
    return exact_epsilon(sigma, delta)


def exact_epsilon(noise_multiplier: float, delta: float) -> float:
    """Returns the epsilon of the Gaussian mechanism of real normal numbers, which nothing draws.

    Args:
      noise_multiplier: sigma; zero means no noise.
      delta: Above 0 and below 1.

    Returns:
      The smallest epsilon >= 0 at which it is (epsilon, delta)-DP; infinity without noise.

    Raises:
      ValueError: If an argument is out of its range.
    """
    sigma = numbers.non_negative_number(noise_multiplier, "noise_multiplier")
    # Less noise than this has no smaller epsilon.
    sigma, delta = min(sigma, LARGEST_NOISE_MULTIPLIER_ACCOUNTED), numbers.delta(delta)
    if sigma < _SMALLEST_NOISE_MULTIPLIER:
        return math.inf

    def excess(epsilon: float) -> float:
        return float(exact_deltas(sigma, epsilon, 0.0)) - delta

    if excess(0.0) <= 0.0:
        return 0.0
    # For real normal numbers, zCDP bounds epsilon from above (Bun and Steinke, Prop. 1.3).
    rho = zcdp_rho(sigma)
    upper = rho + 2.0 * math.sqrt(rho * math.log(1.0 / delta)) + 1.0
    root = scipy.optimize.brentq(excess, 0.0, upper, xtol=1e-12, rtol=1e-12)
    # The root may lie below the true one by the solver's tolerance.
    return float(root * (1.0 + 1e-11) + 1e-11)


# Tails may underflow to zero, also in a program that raises floating-point errors.
@np.errstate(under="ignore")
def exact_deltas(
    noise_multiplier: float, epsilons: float | FloatArray, rounding: float = _ROUNDING_OF_DELTAS
) -> FloatArray:
    """Returns the deltas of the Gaussian mechanism of real normal numbers, rounded up.

    Args:
      noise_multiplier: sigma, at least 0.001.
      epsilons: Of any shape.
      rounding: What they are raised by, relative to the probability of the tail.
    """
    half = 0.5 / noise_multiplier
    log_low = scipy.special.log_ndtr(-half - epsilons * noise_multiplier)
    high = scipy.special.ndtr(half - epsilons * noise_multiplier) * (1.0 + rounding)
    return np.asarray(np.clip(high - np.exp(np.minimum(log_low + epsilons, 0.0)), 0.0, 1.0))


def zcdp_rho(noise_multiplier: float) -> float:
    """Returns the rho of approximate zero-concentrated DP of an unamplified run: 1 / (2 sigma^2).

    Use it when a budget is counted in approximate zCDP.

    The noise that is drawn is bounded, and a client moves its bounds. So no released number is
    zCDP without an exception: what holds is (rho, delta0)-approximate zCDP (Bun and Steinke, 2016,
    Def. 8.1), with the delta0 of :func:`zcdp_delta`.

    Args:
      noise_multiplier: sigma, relative to the sensitivity of C under its schema.

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
    # Divided twice: the square of a float may be too large or too small for one. A rho that is
    # too small for a float is not 0.
    return max(0.5 / sigma / sigma, math.ulp(0.0))


def zcdp_delta(
    noise_multiplier: float,
    *,
    num_coordinates: int = DEFAULT_NUM_COORDINATES,
    disjoint_participations: int = 1,
) -> float:
    """Returns the delta0 of approximate zero-concentrated DP that belongs to :func:`zcdp_rho`.

    Use it when zCDP is stated: the noise that is drawn has it approximately.

    Of an unamplified run's released numbers, (rho, delta0)-approximate zCDP is proved
    (``kernel.draws``): in both of two neighbouring worlds there is an event of
    probability 1 - delta0 or more, given which the Renyi divergences of every order alpha > 1 are
    at most rho alpha. The delta0 of several runs together is the sum of theirs.

    Args:
      noise_multiplier: As in :func:`epsilon`.
      num_coordinates: As there.
      disjoint_participations: As there.

    Returns:
      A probability; 0 without noise, where rho is infinite.

    Raises:
      TailError: If the noise multiplier is so small that nothing is proved.
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
    """Returns the part of delta that is left for real normal numbers.

    Args:
      delta: The delta of the guarantee.
      noise_multiplier: Standard deviation of Z over what one of a client's participations can
        change in C x (in L2 norm), above zero.
      num_coordinates: The numbers that are drawn: parameters times rounds, of all runs.
      compositions: How many mechanisms are composed by Fourier transforms.

    Returns:
      A delta below the given one. If real normal numbers have it at some epsilon, the noise that
      is drawn has the given one.

    Raises:
      TailError: If less than 999 thousandths of delta are left, or there is so little noise that
        the bound does not hold.
      ValueError: If a number is out of its range, or delta is so small that the rounding of so many
        compositions is no small part of it.
    """
    delta = numbers.delta(delta)
    rounding = composition_rounding(delta, compositions)
    failure = failure_probability(noise_multiplier, num_coordinates)
    # Each share is compared with the whole: the next delta that is refused for one of them is
    # refused without amplification, too, and none loses its amplification before.
    if failure > _LARGEST_SHARE * delta:
        raise TailError(
            f"delta must be at least {failure / _LARGEST_SHARE:.3g} for {num_coordinates} numbers "
            f"of noise, found {delta:g}: use a larger delta, or fewer rounds or parameters."
        )
    return delta - failure - rounding


def composition_rounding(delta: float, compositions: int) -> float:
    """Returns the part of delta that composing may lose.

    Args:
      delta: The delta of the guarantee.
      compositions: How many mechanisms are composed by Fourier transforms.

    Raises:
      ValueError: If delta is out of its range, or that is no small part of it.
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
    """Returns the delta that drawn noise adds to that of real normal numbers, at every epsilon.

    Args:
      noise_multiplier: As in ``delta_left``.
      num_coordinates: As there.
      compositions: As there: what they may lose is added.

    Raises:
      TailError: If there is so little noise that the bound does not hold.
      ValueError: If a number is out of its range.
    """
    sigma = numbers.positive_number(noise_multiplier, "noise_multiplier")
    if sigma * LARGEST_SHIFT < 1.0:
        raise TailError(
            f"so little noise cannot be accounted for: a client moves numbers by {1.0 / sigma:.3g} "
            f"standard deviations, above {LARGEST_SHIFT:g}. Use more (a smaller epsilon)."
        )
    coordinates = numbers.positive_integer(num_coordinates, "num_coordinates")
    return min(1.0, coordinates * FAILURE_PER_NUMBER) + _ROUNDING_PER_COMPOSITION * compositions
