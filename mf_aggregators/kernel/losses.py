r"""Privacy of one run with drawn clients, by sampling schemes and their privacy losses on a grid.

**Groups.** The schemes are a closed list, one frozen dataclass each. In most of them the clients
are split into as many groups as C has bands b, and round i draws from group i modulo b alone
(BandMF Alg. 2 and 6), in secret. A client is in rounds of one group alone, b or more rounds apart,
and each of its participations changes other rows of C x: rows j to j + b - 1, for a
lower-triangular C of b bands. A run is no more revealing than ceil(n / b) adaptive queries to one
group, each a Gaussian mechanism whose sensitivity is the largest column norm of C, run on the
batches that the scheme draws (BandMF Thm 4, Cor. F.1 and F.2). For Poisson, truncated Poisson and
fixed-size sampling these are composed rounds; for random allocation, composed cycles; for shuffling
a bound on one pass is composed.

**Secret rounds.** With min-separation sampling and balls in bins, each client draws its own rounds,
a separation or more apart (``certificate``).

**Losses on a grid.** Losses, composition and the format are dp-accounting's. Its masses of a grid
are differences of deltas, divided by the interval: floats lose 1e-16 over the interval there. Its
epsilons add up a million masses in turn, at losses that are themselves sums of intervals. Here both
err on the side of privacy (:func:`_of_divergences`, :func:`epsilon_of`).

**Dominating losses.** A run is dominated by a pair (P, Q) if its hockey-stick divergences with a
client from without it are at most those of P from Q, at every epsilon, negative ones included.
Runs compose adaptively, and their pairs' product dominates the composition (Zhu, Dong and Wang,
2022, Thm 10), also where they are under way at the same time (Vadhan and Zhang, 2023). A pair is
described by its *profile* h(alpha), the divergence at alpha = e^epsilon: convex, falling, 1 at
alpha = 0.

**Shuffling.** Feldman, McMillan and Talwar (2021), Thm 3.1 and 3.8, bound a pass over a group in
which each batch is a mechanism on one client of a uniformly random order. In each batch one place
is singled out, the same for the whole pass and the one where the client is. Given everybody else,
the clients at these places are in uniformly random order, and each batch is a mechanism on one of
them. Replacing one client changes a batch by twice what zeroing it does.

No epsilon is above that without amplification: of a Gaussian mechanism with as many participations
as the scheme allows. The batches must stay secret: an adversary who knows them sees a run that was
not sampled. That noise is drawn from tables costs a small part of delta, once for the whole run,
whichever theorem is used for real normal numbers.

**Rounds.** The divergences of one round are those of a Gaussian sum over a random batch. It has
sensitivity 1 and noise of standard deviation s, of real normal numbers.

**Poisson sampling.** Each client joins by a coin of its own. Zeroing a client is adding or removing
it here: a client that does not join and one that joins with zeros add the same to the sum. So P is
(1 - q) N(0, s^2) + q N(1, s^2), and Q is N(0, s^2).

**Fixed size.** A batch is a uniformly random subset of B of the m clients of a group, and
q = B / m. Zeroing one client does not make the batch smaller: if the client is drawn, another one
is not. So the distribution of the sum without the client is a mixture as well.

Draw A, a random subset of B - 1 of the other clients, and another client J of those that are left.
With probability q the batch is A and the client, otherwise it is A and J; this is a uniformly
random subset. Given A and J, and taking the sum over A off, outputs have the distributions

    P = (1 - q) N(w, s^2 I) + q N(u, s^2 I)    and    Q = (1 - q) N(w, s^2 I) + q N(0, s^2 I)

with the update u of the client and w of J, both of norm at most 1. By joint convexity of
hockey-stick divergences, those of the whole are at most the largest ones over u and w.

*P from Q.* For eps >= 0 and k = (1 - q) (e^eps - 1) / q, the divergence is q times the mean,
under N(0, s^2 I), of F(x, y) = (x - e^eps - k y)_+ at x = exp(<u, z> / s^2 - |u|^2 / 2 s^2) and the
same y of w. F is convex with a mixed derivative that is not positive. By Gaussian interpolation, as
in Kahane's inequality (1985), the mean does not decrease where |u| or |w| grows or <u, w> falls. So
it is largest at w = -u, |u| = 1: (1 - q) N(-1, s^2) + q N(1, s^2) from
(1 - q) N(-1, s^2) + q N(0, s^2).

*Q from P.* Likewise F(x, y) = (1 - e^eps x - k y)_+, whose mixed derivative is not negative. The
mean is largest at w = u, |u| = 1: (1 - q) N(1, s^2) + q N(0, s^2) from N(1, s^2), which by symmetry
is the divergence of a Poisson sample from nothing.

Both are attained, if all other clients have one update. For e^eps = a < 1, the divergence of P
from Q is 1 - a + a times that of Q from P at 1 / a. The largest divergences at all a together are
those of a pair of distributions again (Zhu, Dong and Wang, 2022, Prop. 10), and this pair is
composed.

**Truncated Poisson.** Each client of a group of N comes with probability q, by a coin of its own.
If more than a largest size L come, a uniformly random subset of L of them stays (arXiv 2411.04205,
2508.15089). As with fixed sizes, a client in a cut batch has taken the place of another one.

Fix one client, and put the N - 1 others into a uniformly random order. The K others that come are
the first K of that order, where K is binomially distributed, and independent of the order and of
the client's coin. Let v_j be the sum of the first j of them.

* K < L: nothing is cut. The sum is v_K, and the client's update u on top with probability q.
* K >= L: the batch is the first L of the order, or else the first L - 1 and the client, who stays
  with probability L / (K + 1) if it came.

Given the order, and K < L or that the batch is cut, outputs have the distributions, with the client
and with zeros in its place,

    (1 - q) N(v_K) + q N(v_K + u)              and  N(v_K),
    (1 - r) N(v_L) + r N(v_{L-1} + u)          and  (1 - r) N(v_L) + r N(v_{L-1}),

where r is the mean of q L / (K + 1) over K >= L: the order does not depend on K, so that the
distributions of a cut batch are these two mixtures, whatever K is. The first pair is that of a
Poisson sample. The second one is that of a fixed size, with r in the place of B / m and the update
w = v_L - v_{L-1} of another client. By joint convexity, the divergences of a round are at most

    (1 - c) (those of a Poisson sample, with q)  +  c (those of a fixed size, with r),

c = P(K >= L). With binomial numbers, c = P(Bin(N - 1, q) >= L) and
c r = (L / N) P(Bin(N, q) > L), as q / (K + 1) P(K) = P(Bin(N, q) = K + 1) / N.

Groups have one of two sizes if m is no multiple of b. No client's divergences are above the larger
ones of the two, which are those of a pair again: the largest of two convex functions is convex.

jax_privacy takes a replacement, of the sensitivity 2, for the second pair, which is no less. Adding
P(K >= L) of all rounds to delta would be valid as well, and is more than that.

**Random allocation.** ``allocation`` has the losses of its cycles.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import ClassVar, TypeAlias, TypeVar, final, get_args

import numpy as np
import scipy.optimize
import scipy.special
from dp_accounting.pld import privacy_loss_distribution
from dp_accounting.pld.common import DifferentialPrivacyParameters
from dp_accounting.pld.pld_pmf import DensePLDPmf

from mf_aggregators.kernel import numbers, sensitivity
from mf_aggregators.kernel.allocation import losses_of_cycles
from mf_aggregators.kernel.integers import IntegerRows
from mf_aggregators.kernel.numbers import FloatArray, IntArray, NotProved
from mf_aggregators.kernel.rows import NoiseRecursion, strategy_of
from mf_aggregators.kernel.sensitivity import DEFAULT_NUM_COORDINATES, LEAST_NOISE_MULTIPLIER

_Losses: TypeAlias = privacy_loss_distribution.PrivacyLossDistribution
# Hockey-stick divergences of outputs with a client from outputs without it, and the other way.
_Divergences: TypeAlias = tuple[FloatArray, FloatArray]

# The largest noise multiplier at which amplification is computed: with more noise, an adversary can
# only guess, with or without sampling.
_MOST_AMPLIFIED = 1e8
# The fewest steps of Z that accounting charges for how far roundings may move one number of a row.
# The bound itself is ``IntegerRows.largest_rounding``.
LARGEST_ROUNDING = 4.0
# Upper bound on the floating-point error of a norm, relative to the norm.
_ROUNDING_OF_NORMS = 1e-9


@dataclasses.dataclass(frozen=True)
class _Draws:
    """Sizes of a sampling scheme: rounds, bands, population and clients per round.

    Attributes:
      num_rounds: The number of rounds n.
      num_bands: The most bands b of C; the number of groups, if there are groups.
      population: The number of clients m.
      clients_per_round: The number of clients B of a round, expected or exact.

    Raises:
      ValueError: If a size is not a positive integer, or there are too few clients.
    """

    num_rounds: int
    num_bands: int
    population: int
    clients_per_round: int

    # The name of the sampling scheme in text, as in command lines and files.
    name: ClassVar[str]
    # Whether the distance of a client's rounds is always a multiple of the scheme's ``distance``;
    # otherwise it is only the least distance.
    is_even: ClassVar[bool] = True
    # The farthest that zeroing one client moves the sum of a round, in clip norms: 2 if another
    # client then takes the client's place in the batch.
    largest_move: ClassVar[float] = 1.0
    _remedy: ClassVar[str] = "fewer bands"
    # The names of two attributes, the first of which must be at least as large as the second; None
    # for no such condition.
    _order: ClassVar[tuple[str, str] | None] = None

    def __post_init__(self) -> None:
        numbers.set_positive_integers(self, *(each.name for each in dataclasses.fields(self)))
        needed, most = self.distance * self.clients_per_round, self.population
        if needed > most:
            raise ValueError(
                f"a population of {most} is too small, {needed} are needed: use {self._remedy} (at "
                f"most {most // self.clients_per_round}) or fewer clients per round."
            )
        if self._order is not None:
            found, least = (getattr(self, name) for name in self._order)
            if found < least:
                name, bound = self._order
                raise ValueError(f"{name} must be at least {bound}, {least}, found {found}.")

    def __str__(self) -> str:
        return f"{self.name} sampling of {self.clients_per_round} of {self.population} clients"

    @property
    def distance(self) -> int:
        """The least number of rounds from one participation of a client to its next."""
        return self.num_bands

    @property
    def rounds_of_group(self) -> int:
        """The most rounds that a client can be in, as ``distance`` or more are between two."""
        return math.ceil(self.num_rounds / self.distance)

    @property
    def most_participations(self) -> int:
        """The largest number of rounds in which one client can take part."""
        return self.rounds_of_group

    @property
    def shares_rows(self) -> bool:
        """Whether two participations of one client may change the same row of C x."""
        return self.distance < self.num_bands

    @property
    def schema(self) -> sensitivity.Schema:
        """The participation schema that all draws of the scheme keep to."""
        return sensitivity.Schema(self.rounds_of_group, self.distance, is_even=self.is_even)


@dataclasses.dataclass(frozen=True)
class InGroups(_Draws):
    """Sizes of a scheme that splits clients into groups and draws from them in turn."""

    largest_move: ClassVar[float] = 2.0

    @property
    def group_size(self) -> int:
        """The number of clients floor(m / b) of each group."""
        return self.population // self.num_bands

    @property
    def sampling_probability(self) -> float:
        """The probability that a client is in a round of its group: B over the group's size."""
        return self.clients_per_round / self.group_size

    def group_slice(self, group: int) -> slice:
        """Returns the slice of a random order of all clients that is one of the groups.

        Args:
          group: The index of the group, from 0.
        """
        return slice(group * self.group_size, (group + 1) * self.group_size)


@dataclasses.dataclass(frozen=True)
class _Coins(InGroups):
    """Schemes in which each client of a round's group joins by a coin of its own."""

    @property
    def sampling_probability(self) -> float:
        """The probability q = B b / m that a client of the round's group joins the round."""
        return self.clients_per_round * self.num_bands / self.population

    def group_slice(self, group: int) -> slice:
        """Returns the slice of a random order of all clients that is one group."""
        m, b = self.population, self.num_bands
        return slice(group * m // b, (group + 1) * m // b)


@final
@dataclasses.dataclass(frozen=True)
class Poisson(_Coins):
    """Poisson sampling: each client of a round's group joins by a coin of its own."""

    name: ClassVar[str] = "poisson"
    largest_move: ClassVar[float] = 1.0


@final
@dataclasses.dataclass(frozen=True)
class TruncatedPoisson(_Coins):
    """Poisson sampling, but of a batch above ``largest_batch`` a random subset stays."""

    name: ClassVar[str] = "truncated_poisson"
    _order: ClassVar[tuple[str, str] | None] = ("largest_batch", "clients_per_round")
    largest_batch: int


@final
@dataclasses.dataclass(frozen=True)
class FixedSize(InGroups):
    """Fixed-size sampling: each batch is a random subset of B of a group's clients."""

    name: ClassVar[str] = "fixed_size"


@dataclasses.dataclass(frozen=True)
class _Cycles(InGroups):
    """Sizes of a scheme in which each client takes part once in each cycle of its group."""

    @property
    def rounds_of_cycle(self) -> int:
        """The number of rounds t = floor(m / (b B)) in one cycle of a group."""
        return self.population // (self.num_bands * self.clients_per_round)

    @property
    def most_participations(self) -> int:
        """The number of cycles of a group that n rounds begin: a client is in each once."""
        return math.ceil(self.rounds_of_group / self.rounds_of_cycle)

    @property
    def group_size(self) -> int:
        """The number of clients t B of each group."""
        return self.rounds_of_cycle * self.clients_per_round


@final
@dataclasses.dataclass(frozen=True)
class Shuffling(_Cycles):
    """Shuffling: in each cycle a group is shuffled and cut into batches of B clients."""

    name: ClassVar[str] = "shuffling"


@final
@dataclasses.dataclass(frozen=True)
class RandomAllocation(_Cycles):
    """Random allocation: each client of a group is in one uniformly random round of every cycle."""

    name: ClassVar[str] = "random_allocation"
    largest_move: ClassVar[float] = 1.0


@dataclasses.dataclass(frozen=True)
class _InSecret(_Draws):
    """Sizes of a scheme in which each client draws its own rounds, without groups.

    The roundings of a participation stay within ``num_bands`` rows, which :func:`claim.check`
    verifies for the rows of a claim.

    Attributes:
      separation: Two participations of a client are at least this number of rounds apart.
    """

    separation: int

    _remedy: ClassVar[str] = "a smaller separation"

    @property
    def distance(self) -> int:
        """The least number of rounds from one participation of a client to its next."""
        return self.separation


@final
@dataclasses.dataclass(frozen=True)
class MinSeparation(_InSecret):
    """Min-separation sampling: clients join by a secret coin whenever their timers allow it."""

    name: ClassVar[str] = "min_separation"
    is_even: ClassVar[bool] = False
    _order: ClassVar[tuple[str, str] | None] = ("separation", "num_bands")

    @property
    def joining_probability(self) -> float:
        """The probability that a client joins a round if its timer allows it."""
        others = self.clients_per_round * (self.separation - 1)
        return self.clients_per_round / (self.population - others)


@final
@dataclasses.dataclass(frozen=True)
class BallsInBins(_InSecret):
    """Balls in bins: a client takes part in rounds equal to its secret bin modulo separation."""

    name: ClassVar[str] = "balls_in_bins"


Groups: TypeAlias = Poisson | TruncatedPoisson | FixedSize | Shuffling | RandomAllocation
Draws: TypeAlias = Groups | MinSeparation | BallsInBins
_Kind = TypeVar("_Kind", bound=_Draws)


def checked_draws(draws: _Kind) -> _Kind:
    """Returns an equal instance of a sampling scheme, made anew so that its numbers are checked.

    Args:
      draws: An instance of one of this module's schemes.

    Raises:
      TypeError: If ``draws`` is of another class, or of a subclass.
    """
    if type(draws) not in get_args(Draws):
        names = ", ".join(kind.__name__ for kind in get_args(Draws))
        raise TypeError(f"draws must be one of {names}, found {numbers.shown(draws)}.")
    return dataclasses.replace(draws)


@dataclasses.dataclass(frozen=True)
class StrategyColumns:
    """The compact columns of C, and a bound on how far roundings move a number of a row.

    Two instances are equal if their numbers are, bit for bit.

    Attributes:
      entries: (n, b) float64, the compact columns of C, which are copied.
      rounding: The largest number of steps of Z by which roundings move one number of a row, as far
        as they depend on one client.

    Raises:
      ValueError: If an attribute is of another shape, or a number is out of its range.
    """

    entries: FloatArray = dataclasses.field(compare=False)
    rounding: float = LARGEST_ROUNDING
    _digest: bytes = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        entries = np.array(self.entries, np.float64, order="C")
        if entries.ndim != 2:
            raise ValueError(f"entries must have shape (n, b), found {entries.shape}.")
        # A read-only buffer cannot be made writeable again by a flag.
        object.__setattr__(self, "entries", np.asarray(entries.data.toreadonly()))
        object.__setattr__(self, "_digest", numbers.digest("columns", [entries]))
        numbers.set_checked(self, rounding=numbers.non_negative_number)

    @classmethod
    def of(cls, rows: NoiseRecursion, num_rounds: int) -> "StrategyColumns":
        """Returns the columns of the C that rows of noise imply, and how far roundings move a row.

        Args:
          rows: The rows, of one of the kernel's own classes.
          num_rounds: The number of their first rounds that C is for.

        Raises:
          NotProved: If C does not follow from the rows, or there is no bound on their roundings.
        """
        entries = strategy_of(rows, num_rounds).compact_columns(min(rows.reach, num_rounds))
        moved = IntegerRows.of(rows).largest_rounding()
        # Written so that NaN is refused.
        if not moved < math.inf:
            raise NotProved("the roundings of the rows have no finite bound.")
        return cls(entries, max(LARGEST_ROUNDING, moved))

    def __reduce__(self) -> tuple[object, ...]:
        # Copying and unpickling call the constructor, which computes the digest of the entries.
        return StrategyColumns, (self.entries, self.rounding)

    def scaled(self) -> FloatArray:
        """Returns the (n, b) compact columns of |C|, divided by the largest column norm.

        Raises:
          ValueError: If all columns are zero, or an entry is not finite.
        """
        absolute = np.abs(self.entries)
        largest_entry = float(np.max(absolute))
        if not 0.0 < largest_entry < np.inf:
            raise ValueError("the strategy matrix must be finite, and not zero.")
        # Dividing by a power of two is exact, and keeps squares of entries within the range of
        # floats.
        absolute = np.ldexp(absolute, -int(np.frexp(largest_entry)[1]))
        return np.asarray(absolute / np.sqrt(np.max(np.sum(absolute**2, axis=1))))


def sums_of_bins(columns: FloatArray, num_bins: int) -> FloatArray:
    """Returns, for each bin, the sum of the columns of C in its rounds: (n, num_bins).

    Args:
      columns: (n, b) compact columns of C.
      num_bins: The number of bins; rounds that are equal modulo this number are in one bin.
    """
    num_rounds, num_bands = columns.shape
    sums = np.zeros((num_rounds, num_bins))
    for i in range(num_rounds):
        height = min(num_bands, num_rounds - i)
        sums[i : i + height, i % num_bins] += columns[i, :height]
    return sums


@dataclasses.dataclass(frozen=True)
class SampledRun:
    """A run with randomly drawn clients, for which privacy losses and epsilon are computed.

    Attributes:
      draws: How clients are drawn.
      sigma: The noise multiplier, relative to the largest column norm of C.
      columns: C and the roundings of its rows, for clients who draw for themselves; None for
        groups.

    Raises:
      TypeError: If the draws or columns are of other classes than the kernel's.
      ValueError: If sigma is negative or not finite, or sizes do not fit one another.
    """

    draws: Draws
    sigma: float
    columns: StrategyColumns | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "draws", checked_draws(self.draws))
        if isinstance(self.draws, InGroups):
            object.__setattr__(self, "columns", None)
        elif type(self.columns) is not StrategyColumns:
            found = numbers.shown(self.columns)
            raise TypeError(f"columns must be StrategyColumns, found {found}.")
        numbers.set_checked(self, sigma=numbers.non_negative_number)

    @property
    def disjoint_participations(self) -> int:
        """The most participations of a client, if no two change one row of C x; otherwise 1."""
        return 1 if self.draws.shares_rows else self.draws.most_participations

    @functools.cached_property
    def norm_of_all(self) -> float:
        """The sensitivity of all participations of a client, over the largest column norm of C."""
        if self.columns is None or not self.draws.shares_rows:
            return math.sqrt(self.disjoint_participations)
        # The largest norm, over the bins, of the sum of a bin's columns of |C|.
        sums = sums_of_bins(self.columns.scaled(), self.draws.distance)
        longest = math.sqrt(float(np.max(np.sum(sums**2, axis=0))))
        return longest * (1.0 + _ROUNDING_OF_NORMS)

    @property
    def noise_multiplier(self) -> float:
        """The noise multiplier of all participations, for an adversary who knows their rounds."""
        return self.sigma / self.norm_of_all

    @property
    def amplified_part(self) -> float:
        """The noise multiplier of the largest shift of a row, if an adversary knows no draws."""
        draws = self.draws
        return self.sigma / (self.norm_of_all if draws.shares_rows else draws.largest_move)

    @property
    def part_noise_multiplier(self) -> float:
        """The noise multiplier of the largest shift of a row that the accounting uses."""
        return self.amplified_part * (1.0 if self.is_amplified else self.draws.largest_move)

    @property
    def is_amplified(self) -> bool:
        """Whether amplification is computed, for an adversary who does not know the draws."""
        return self.sigma <= _MOST_AMPLIFIED and self.amplified_part >= LEAST_NOISE_MULTIPLIER

    @property
    def composes_amplified(self) -> bool:
        """Whether the run composes by its amplified losses, and not as a Gaussian mechanism."""
        is_known = isinstance(self.draws, InGroups) and not isinstance(self.draws, Shuffling)
        return self.is_amplified and is_known

    @np.errstate(under="ignore")
    def epsilon(self, delta: float, num_coordinates: int = DEFAULT_NUM_COORDINATES) -> float:
        """Returns the epsilon of the run; not amplified if clients draw for themselves.

        Args:
          delta: Below 1; for groups at least 1e-12 and 4e-15 times the compositions.
          num_coordinates: Parameters times rounds.

        Raises:
          TailError: If ``sensitivity.epsilon`` raises it, because there is too little noise.
          ValueError: If delta is out of its range.
        """
        compositions = self.draws.most_participations if isinstance(self.draws, InGroups) else 0
        sensitivity.composition_rounding(delta, compositions)
        found = sensitivity.epsilon(
            self.noise_multiplier,
            delta,
            num_coordinates=num_coordinates,
            disjoint_participations=self.disjoint_participations,
        )
        if compositions and found > 0.0 and self.is_amplified:
            left = sensitivity.delta_left(delta, self.amplified_part, num_coordinates, compositions)
            found = min(found, self.amplified_epsilon(left))
        return found

    def amplified_epsilon(self, delta: float) -> float:
        """Returns the amplified epsilon of a run from groups, for noise of real normal numbers.

        Args:
          delta: The delta for normal numbers: above 0, below 1, and less the share that composing
            loses.

        Returns:
          The epsilon; infinity if nothing is proved.
        """
        if isinstance(self.draws, Shuffling):
            return _shuffled_epsilon(self.draws, self.sigma, delta)
        near = math.inf
        while True:
            found = epsilon_of(self.losses_near(near), delta)
            enough = 2.0 * max(_interval_for(found), self._finest_interval)
            if isinstance(self.draws, RandomAllocation) or _interval_for(near) <= enough:
                return found
            near = found

    def losses_near(self, epsilon: float, coarser: float = 1.0) -> _Losses:
        """Returns the privacy losses of a run from groups, on a grid that is made for an epsilon.

        Args:
          epsilon: The epsilon that the grid of losses is fine enough for; the grid is coarser if
            there is little noise.
          coarser: The factor by which the interval of the grid is larger than that epsilon needs.
        """
        if isinstance(self.draws, RandomAllocation):
            sizes = self.draws.rounds_of_cycle, self.draws.rounds_of_group, self.sigma
            return losses_of_cycles(*sizes, coarser=coarser)
        interval = max(coarser * _interval_for(epsilon), self._finest_interval)
        return _losses_of_rounds(self.draws, self.sigma, interval)

    @np.errstate(under="ignore")
    def losses(self, interval: float) -> _Losses:
        """Returns the privacy losses of the run, on a grid with a given interval, for composition.

        They are for noise of real normal numbers. Shuffled runs, and runs of clients who draw for
        themselves, have the losses of the Gaussian mechanism of all participations, without
        amplification.

        Args:
          interval: Losses are multiples of this number.
        """
        if not self.composes_amplified:
            return gaussian_losses(self.noise_multiplier, interval)
        if isinstance(self.draws, RandomAllocation):
            sizes = self.draws.rounds_of_cycle, self.draws.rounds_of_group, self.sigma
            return losses_of_cycles(*sizes, interval=interval)
        return _losses_of_rounds(self.draws, self.sigma, interval)

    @property
    def _finest_interval(self) -> float:
        """The interval with which the largest grid ends at the largest privacy loss."""
        return (0.5 / self.sigma**2 + 12.0 / self.sigma) / _MOST_POINTS


# Upper bound on the rounding error of one probability mass, in units of the last place.
_ROUNDINGS = 8
# Upper bound on the relative rounding error of pairwise sums and of exponentials.
_ROUNDING_OF_SUMS = 2e-14
# Losses count as infinite beyond this number of standard deviations of the noise, and beyond the
# epsilon at which the divergence is at most the second number.
_DEVIATIONS = 9.0
_NEGLIGIBLE = 1e-20
# The interval of the grid that privacy losses are rounded to, as a share of epsilon, and the limits
# of the interval. Rounding makes no epsilon smaller.
_RELATIVE_INTERVAL = 1e-4
_LARGEST_INTERVAL, _SMALLEST_INTERVAL = 1e-3, 1e-7
# The most points of the grid, even if a finer interval is asked for.
_MOST_POINTS = 500_000
# The number of local deltas that are tried when the shuffling bound is minimised.
_LOCAL_DELTAS = 24
# Upper bound on the relative floating-point error of a binomial probability.
_ROUNDING_OF_TAILS = 1e-9


def _interval_for(epsilon: float) -> float:
    """Returns the interval of the grid of losses that is fine enough for an epsilon."""
    return min(_LARGEST_INTERVAL, max(_SMALLEST_INTERVAL, _RELATIVE_INTERVAL * epsilon))


@np.errstate(under="ignore")
def _of_divergences(
    interval: float, with_client: FloatArray, without_client: FloatArray
) -> _Losses:
    """Returns privacy losses that dominate a pair of distributions with the given divergences.

    The method is Algorithm 1 of Doroshenko et al. (2022).

    Args:
      interval: The distance of neighbouring losses, which are multiples of it.
      with_client: (J,) the hockey-stick divergences of outputs with a client from those without, at
        the multiples 0 to J - 1 of the interval. At least two.
      without_client: (J,) those of outputs without the client from those with it.

    Returns:
      Losses whose masses are at least those of exact arithmetic on these divergences.
    """
    return _Losses(
        _one_direction(interval, with_client, without_client),
        _one_direction(interval, without_client, with_client),
    )


def _one_direction(interval: float, forward: FloatArray, backward: FloatArray) -> DensePLDPmf:
    """Returns the loss masses of one direction, from a pair's divergences in both directions."""
    highest = max(int(np.count_nonzero(forward > _NEGLIGIBLE)), 1)
    lowest = max(int(np.count_nonzero(backward > _NEGLIGIBLE)), 1)
    negative = -interval * np.arange(len(backward))[lowest:0:-1]
    below = np.exp(negative) * backward[lowest:0:-1] - np.expm1(negative)
    # Divergences must not increase with epsilon: if rounding makes one larger than that at a
    # smaller epsilon, the latter is raised.
    deltas = np.concatenate([below, forward[: highest + 1]])
    deltas = np.maximum.accumulate(deltas[::-1])[::-1]
    # On platforms where long doubles are no longer than doubles, masses are raised by more.
    wide = np.asarray(deltas, np.longdouble)
    falls, width = -np.diff(wide), np.expm1(np.longdouble(interval))
    # The slopes of the chords before and behind each multiple of the interval; the first multiple
    # has no chord before it, and the last one no chord behind it.
    before = np.concatenate([[0.0], falls * np.exp(np.longdouble(interval)) / width])
    behind = np.concatenate([falls / width, [0.0]])
    exact = before - behind
    exact[0] += 1.0 - wide[0]
    raised = exact + _ROUNDINGS * np.finfo(np.longdouble).eps * (before + behind + 1.0)
    masses = np.maximum(raised, 0.0).astype(np.float64) * (1.0 + 2.0 * np.finfo(float).eps)
    return DensePLDPmf(interval, -len(below), masses, float(deltas[-1]), True)


@np.errstate(under="ignore")
def delta_of(losses: _Losses, epsilon: float) -> float:
    """Returns delta at an epsilon: the larger divergence of both directions, rounded up.

    Args:
      losses: Privacy losses with pessimistic rounding.
      epsilon: A number of any sign.
    """
    return max(_delta(*each, epsilon) for each in _directions(losses))


@np.errstate(under="ignore")
def epsilon_of(losses: _Losses, delta: float) -> float:
    """Returns the least epsilon at a delta, for both directions, rounded up; infinity if none.

    Args:
      losses: Privacy losses with pessimistic rounding.
      delta: Above 0 and below 1.
    """
    return max(_epsilon(*each, delta) for each in _directions(losses))


def _directions(losses: _Losses) -> Iterator[tuple[FloatArray, FloatArray, float]]:
    """Yields, for each direction, the losses, their masses and the mass of an infinite loss."""
    # If both directions are the same object, only one is yielded.
    for pmf in {id(each): each for each in (losses._pmf_remove, losses._pmf_add)}.values():
        dense = pmf.to_dense_pmf()
        multiples = (np.arange(dense.size) + dense._lower_loss) * dense._discretization
        yield multiples, np.asarray(dense._probs), float(dense._infinity_mass)


def _delta(losses: FloatArray, masses: FloatArray, infinite: float, epsilon: float) -> float:
    first = int(np.searchsorted(losses, epsilon, side="right"))
    finite = float(np.sum(-np.expm1(epsilon - losses[first:]) * masses[first:]))
    return infinite + finite * (1.0 + _ROUNDING_OF_SUMS)


def _epsilon(losses: FloatArray, masses: FloatArray, infinite: float, delta: float) -> float:
    if infinite > delta:
        return math.inf
    if _delta(losses, masses, infinite, 0.0) <= delta:
        return 0.0

    def excess(epsilon: float) -> float:
        return math.log(max(_delta(losses, masses, infinite, epsilon) / delta, _NEGLIGIBLE))

    found = scipy.optimize.brentq(excess, 0.0, losses[-1], xtol=1e-13, rtol=1e-14)
    # The grid's losses are rounded products, and the solver's root may be too small, so it is
    # raised.
    rounding = 4.0 * np.finfo(float).eps * (1.0 + losses[-1])
    while excess(found) > 0.0 and math.isfinite(found):
        found, rounding = found + rounding, 2.0 * rounding
    return float(found + rounding)


def gaussian_losses(noise_multiplier: float, interval: float) -> _Losses:
    """Returns privacy losses of the Gaussian mechanism on a grid, rounded up.

    Args:
      noise_multiplier: sigma, above zero.
      interval: Losses are multiples of this number.
    """
    epsilons = _grid_to(_largest_loss(noise_multiplier), interval)
    deltas = sensitivity.exact_deltas(noise_multiplier, epsilons)
    return _of_divergences(interval, deltas, deltas)


def _largest_loss(sigma: float) -> float:
    """Returns the largest finite privacy loss that is kept for a Gaussian mechanism."""
    return 0.5 / sigma**2 + _DEVIATIONS / sigma


def _grid_to(most: float, interval: float) -> FloatArray:
    """Returns the multiples of an interval from 0 to the first that is not below ``most``."""
    return np.asarray(np.arange(max(math.ceil(most / interval), 1) + 1) * interval)


def _losses_of_rounds(draws: Draws, sigma: float, interval: float) -> _Losses:
    """Returns the privacy losses of all rounds of a group together, by composition."""
    assert isinstance(draws, Poisson | TruncatedPoisson | FixedSize), draws
    one, most = _losses_of_round(draws, sigma, interval), draws.most_participations
    return one if most == 1 else one.self_compose(most)


def _losses_of_round(
    draws: Poisson | TruncatedPoisson | FixedSize, sigma: float, interval: float
) -> _Losses:
    """Returns the privacy losses of one round, for real normal numbers.

    Args:
      draws: How clients are drawn.
      sigma: The noise multiplier, relative to the largest column norm of C; above zero.
      interval: Losses are multiples of this number.
    """
    q, most = draws.sampling_probability, _largest_loss(sigma)
    if isinstance(draws, Poisson):
        # The largest loss of a sampled Gaussian mechanism is smaller than that of the whole one.
        epsilons = _grid_to(math.log1p(q * math.expm1(min(most, 700.0))), interval)
        return _of_divergences(interval, *_poisson_divergences(sigma, q, epsilons))
    epsilons = _grid_to(most, interval)
    if isinstance(draws, FixedSize):
        return _of_divergences(interval, *_fixed_divergences(sigma, q, epsilons))
    # A group has one of two sizes: for each epsilon the larger divergence of both sizes is taken.
    smaller, rest = divmod(draws.population, draws.num_bands)
    sizes, largest = {smaller, smaller + min(rest, 1)}, draws.largest_batch
    each = [_truncated_divergences(sigma, q, size, largest, epsilons) for size in sizes]
    return _of_divergences(interval, *np.max(each, axis=0))


def _shuffled_epsilon(draws: Shuffling, sigma: float, delta: float) -> float:
    """Returns the least epsilon over several local deltas; infinity if the theorem proves none."""
    passes, count = draws.most_participations, draws.rounds_of_cycle
    # If several passes are composed, half of delta is kept for their composition.
    pass_delta = delta if passes == 1 else 0.5 * delta / passes
    best = math.inf
    for share in np.geomspace(1e-6, 0.25, _LOCAL_DELTAS):
        local_delta = share * pass_delta / count
        # Replacing a client changes a batch by twice the sensitivity of zeroing, so sigma is
        # halved.
        local_epsilon = sensitivity.exact_epsilon(sigma / 2.0, local_delta)
        best = min(best, _clones(local_epsilon, local_delta, count, pass_delta))
    if passes == 1 or math.isinf(best):
        return best
    one_pass = DifferentialPrivacyParameters(best, pass_delta)
    losses = privacy_loss_distribution.from_privacy_parameters(one_pass, _interval_for(best))
    return epsilon_of(losses.self_compose(passes), delta)


def _clones(local_epsilon: float, local_delta: float, count: int, pass_delta: float) -> float:
    """Returns the epsilon of a shuffled pass by Feldman, McMillan and Talwar, Thm 3.1 and 3.8.

    Returns infinity if the theorem's condition on the local epsilon does not hold.
    """
    delta = 0.5 * pass_delta
    most = math.log(max(count / (16.0 * math.log(2.0 / delta)), 1e-300))
    if local_epsilon > most:
        return math.inf
    grown = math.exp(local_epsilon)
    amplified = math.log1p(
        (grown - 1.0)
        / (grown + 1.0)
        * (8.0 * math.sqrt(grown * math.log(4.0 / delta) / count) + 8.0 * grown / count)
    )
    failure = delta + (math.exp(amplified) + 1.0) * (1.0 + 0.5 / grown) * count * local_delta
    return amplified if failure <= pass_delta else math.inf


def _fixed_divergences(sigma: float, q: float, epsilons: FloatArray) -> _Divergences:
    """Returns the divergences of a round with a fixed batch size, in both directions."""
    return _divergence_with(sigma, q, epsilons), _divergence_without(sigma, q, epsilons)


def _divergence_with(sigma: float, q: float, epsilons: FloatArray) -> FloatArray:
    """Returns a fixed-size round's divergences of outputs with a client from those without it.

    Args:
      sigma: The standard deviation s of the noise, above zero.
      q: The share B / m of a group that is in a batch, in (0, 1].
      epsilons: At least 0, of any shape.
    """
    variance, factor = sigma**2, np.exp(epsilons)
    weight = (1.0 - q) * np.expm1(epsilons) / q
    # P has the larger density for y > y*. With s = exp(y / s^2) and h = exp(-1 / 2 s^2), the
    # condition for this is h s - e^eps - k h / s > 0.
    log_half = -0.5 / variance
    root = np.sqrt(factor**2 + 4.0 * weight * math.exp(2.0 * log_half))
    cutoff = variance * (np.log(0.5 * (factor + root)) - log_half)
    upper = scipy.special.ndtr
    found = upper((1.0 - cutoff) / sigma) - factor * upper(-cutoff / sigma)
    found -= weight * upper((-1.0 - cutoff) / sigma)
    return np.asarray(np.clip(q * found, 0.0, 1.0))


def _divergence_without(sigma: float, q: float, epsilons: FloatArray) -> FloatArray:
    """Returns a fixed-size round's divergences of outputs without a client from those with it.

    Arguments are those of :func:`_divergence_with`.
    """
    grown = np.expm1(epsilons)
    # The cutoff is where the likelihood ratio (1 - q) + q exp((y - 1/2) / s^2) equals e^eps.
    cutoff = sigma**2 * np.log1p(grown / q) + 0.5
    upper = scipy.special.ndtr
    found = q * upper((1.0 - cutoff) / sigma) - (q + grown) * upper(-cutoff / sigma)
    return np.asarray(np.clip(found, 0.0, 1.0))


def _poisson_divergences(sigma: float, q: float, epsilons: FloatArray) -> _Divergences:
    """Returns the divergences of a Poisson-sampled round, in both directions.

    Args:
      sigma: The standard deviation s of the noise, above zero.
      q: The probability that a client joins the round, in (0, 1].
      epsilons: At least 0, of any shape.

    Returns:
      Two arrays of the shape of ``epsilons``: with the client from without, and the reverse.
    """
    rest = q - (1.0 - q) * np.expm1(epsilons)
    # Outputs below the cutoff are more probable without the client than with it.
    with np.errstate(divide="ignore"):
        cutoff = sigma**2 * (np.log(np.maximum(rest, 0.0) / q) - epsilons) + 0.5
    below = scipy.special.ndtr
    found = rest * below(cutoff / sigma)
    found -= q * np.exp(epsilons) * below((cutoff - 1.0) / sigma)
    without = np.clip(np.where(rest > 0.0, found, 0.0), 0.0, 1.0)
    # The divergence with the client from without equals a fixed-size one without the client from
    # with.
    return _divergence_without(sigma, q, epsilons), without


def _truncated_divergences(
    sigma: float, q: float, group_size: int, largest_batch: int, epsilons: FloatArray
) -> _Divergences:
    """Returns bounds on the divergences of a truncated Poisson round, in both directions.

    Args:
      sigma: The standard deviation s of the noise, above zero.
      q: The probability that a client of the group comes, in (0, 1].
      group_size: The clients N of the group.
      largest_batch: The most clients L of a batch.
      epsilons: At least 0, of any shape.

    Returns:
      Two arrays of the shape of ``epsilons``: with the client from without, and the reverse.
    """
    with_client, without_client = _poisson_divergences(sigma, q, epsilons)
    cut = float(_binomial_tail(largest_batch, group_size - 1, q))
    if group_size <= largest_batch or cut == 0.0:
        return with_client, without_client
    # r is the probability that a truncated batch has the client. Rounding it up is safe, because
    # divergences do not decrease where r grows.
    stays = largest_batch / group_size * float(_binomial_tail(largest_batch + 1, group_size, q))
    r = min(stays / cut * (1.0 + _ROUNDING_OF_TAILS), q)
    # Both weights are rounded up, so that they add up to a little more than 1.
    whole, cut = min(1.0 - cut + _ROUNDING_OF_TAILS, 1.0), cut * (1.0 + _ROUNDING_OF_TAILS)
    kept, replaced = _fixed_divergences(sigma, r, epsilons)
    return whole * with_client + cut * kept, whole * without_client + cut * replaced


def _binomial_tail(count: int | IntArray, trials: int | IntArray, probability: float) -> FloatArray:
    """Returns the probability that at least ``count`` of ``trials`` independent trials succeed.

    Args:
      count: The number of successes, at least 1.
      trials: The number of trials.
      probability: The probability that one trial succeeds.

    Returns:
      The probabilities, by an incomplete beta function, in the common shape of ``count`` and
      ``trials``.
    """
    fails = np.maximum(trials - count, 0) + 1
    return np.asarray(scipy.special.betainc(count, fails, probability))
