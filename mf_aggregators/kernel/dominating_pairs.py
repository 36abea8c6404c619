r"""The pair of distributions that dominates a run whose clients draw for themselves.

A client takes part in a random set S of rounds, whose distribution pi depends on no data and is
known, while S itself is secret. With c_i the columns of C, scaled to norms of at most 1, the
outputs have the distribution P = sum_S pi(S) N(sum_{i in S} c_i, sigma^2 I) with the client, and
Q = N(0, sigma^2 I) without it. This module has log P/Q at given outputs, exactly, for two pi.

**This pair dominates**, for adaptive updates of any dimension as well and in both directions, where
the entries of C are not negative; otherwise the pair of |C| does. More precisely:

*Theorem.* Let C be lower triangular. In round i the server picks, from all that was released
before round i, vectors u_i(S) with norms of at most 1, of any dimension, and releases row i of
sum_{j in S, j <= i} C_ij u_j(S) + sigma Z_i; u_j(S) may depend on S as far as it lies before j.
Then for every convex f with f(x) = O(x), the f-divergence of the outputs with the client from
those without is at most E_Q f(P/Q) for the scalar pair of |C|. So are both hockey-stick
divergences: f(x) = (x - e^eps)_+ and f(x) = (1 - e^eps x)_+.

*Proof.* Given the outputs up to row i, let w_S be pi(S) times the likelihood ratio of S so far,
and let W_i(w) be E f(sum_S w_S E_S), with E_S = exp(G_S - Var G_S / 2) and centred Gaussians G of
the covariances K_i(S, T) = sum_{r >= i} m_r(S) m_r(T) / sigma^2, m_r(S) = sum_{j in S} |C_rj|.
Claim: whatever the server does from row i on, the divergence is at most W_i(w). It holds behind
the last row. If it holds behind row i, then the divergence from row i on is at most the mean of
W_{i+1}(w_S exp(H_S - Var H_S / 2)), H_S = <sum_{j in S} C_ij u_j(S), Z_i> / sigma, because
under Q the released row is sigma Z_i. That is W for covariances K_{i+1} + Cov(H). By
Cauchy-Schwarz, Cov(H_S, H_T) <= m_i(S) m_i(T) / sigma^2, and by Kahane's convexity inequality
(1985), the mean of a convex f of a sum with non-negative weights of exponentials E_S does not
decrease where covariances grow. So the bound is W_i(w). At the first row it is E_Q f(P/Q).
Other clients only add what the server knows: their participation is independent of S. QED.

*Rounding.* Released rows are integers. What a client's participations change in row i is off by
what roundings move, a vector e_i(S) of norm r_i(S) at most: r_i(S) is zero before the first round
of S. It may depend on S and on all that was released before, as the u_j do. So the theorem holds
with m_i(S) + r_i(S) in the place of m_i(S): the shift of row i has no larger a norm.

Nothing in the proof needs bands, nor that the columns of S share no rows.

**Balls in bins** (arXiv 2410.06266): S is one of a few bins, as likely as the others, and m_S is
one vector for each. With e_S = exp((<m_S, y> - |m_S|^2 / 2) / sigma^2), P/Q is the mean of e_S over
the bins, for any lower-triangular C. It depends on y only through the products <m_S, y>, which are
normal numbers, so that a run of n rounds has no more dimensions than there are bins: turned by an
orthogonal matrix, all m_S lie in the first coordinates (:class:`BinsPair`).

**Min-separation sampling** (arXiv 2602.09338) has too many S for that. Participations of a client
are ``separation`` b or more rounds apart. Where C has at most b bands, the squared norm of
sum_{i in S} c_i is the sum of squared norms, and P/Q a sum over S of products of
e_i = exp((<c_i, y> - |c_i|^2 / 2) / sigma^2): f_i = (1 - p) f_{i+1} + p e_i f_{i+b}, and 1 behind
the last round. P/Q is f_0 from a cold start, and
(f_0 + p sum_{i=1}^{b-1} f_i) / (1 + (b - 1) p) where timers are in their stationary state.

C is held as its *compact columns*. Column i of a lower-triangular C of b bands is zero outside of
rows i to i + b - 1, and is row i of an array of n rows and b columns: ``columns[i, k] =
C[i + k, i]``.
"""

import dataclasses
import functools
import hashlib
import math
from collections.abc import Callable
from typing import Any, ClassVar, TypeAlias

import numpy as np

from mf_aggregators.kernel import validation
from mf_aggregators.kernel.arrays import FloatArray

# Steps of Z by which roundings may move one number of a row: 1 and twice what floats err by, times
# the largest sum of a row of C where rows follow from earlier rows of Z.
LARGEST_ROUNDING = 4.0
# The logarithm to base 2 of the numbers that are drawn of Q for tuning.
_POWER_OF_NUMBERS = 27
# More than 1 and twice what floats err by in a row.
_MOST_OF_A_STEP = 1.5
# More than what floats err by in the norm of a column, relative to it.
_ROUNDING_OF_NORMS = 1e-9
# Linear arithmetic is used as long as nothing is smaller or larger than this.
_SMALLEST, _LARGEST = 1e-250, 1e250


@dataclasses.dataclass(frozen=True, eq=False)
class StrategyColumns:
    """C, and what roundings move, as far as an amplified guarantee depends on them.

    Two are equal where their numbers are, bit for bit.

    Attributes:
      entries: (n, b) the compact columns of C, of which it keeps a copy.
      rounding: By how many steps of Z the roundings of one coordinate of a row move it at most, as
        far as they depend on one client (``noise.integer_rows``).
      norm: What noise multipliers are relative to, at least the norm of every column; None for the
        largest norm of a column.
    """

    entries: FloatArray
    rounding: float = LARGEST_ROUNDING
    norm: float | None = None

    def __post_init__(self) -> None:
        entries = np.array(self.entries, np.float64, order="C")
        entries.flags.writeable = False
        object.__setattr__(self, "entries", entries)

    @functools.cached_property
    def _value(self) -> tuple[bytes, tuple[int, ...], float, float | None]:
        digest = hashlib.sha256(self.entries.tobytes()).digest()
        return digest, self.entries.shape, self.rounding, self.norm

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StrategyColumns) and self._value == other._value

    def __hash__(self) -> int:
        return hash(self._value)

    def scaled(self) -> FloatArray:
        """Returns the (n, b) columns of |C| over the norm that noise multipliers are relative to.

        Raises:
          ValueError: As :func:`normalised` does, and if a column is longer than that norm.
        """
        entries = normalised(self.entries)
        if self.norm is None:
            return entries
        share = float(np.max(np.linalg.norm(self.entries, axis=1))) / self.norm
        if not share <= 1.0 + _ROUNDING_OF_NORMS:
            raise ValueError(f"a column of C is {share:.6g} of the norm that noise is relative to.")
        return entries * min(share, 1.0)

    @classmethod
    def of_any_noise(cls, entries: FloatArray) -> "StrategyColumns":
        """Returns columns with what roundings move where rows may follow from rows of Z.

        Args:
          entries: (n, b), none of the diagonal zero.
        """
        shares = np.abs(entries / entries[:, :1])
        sums = np.zeros(len(shares))
        for lag in range(shares.shape[1]):
            sums[lag:] += shares[: len(shares) - lag, lag]
        return cls(entries, max(LARGEST_ROUNDING, _MOST_OF_A_STEP * float(np.max(sums))))


@dataclasses.dataclass(frozen=True)
class MinSeparationRounds:
    """The rounds of a client that joins with probability p where its timer allows it.

    Attributes:
      probability: p, in (0, 1].
      separation: b: whoever joined may join again b rounds later.
      is_stationary: Whether timers begin in their stationary state; otherwise every client may
        join in round 0.
      has_timer: Whether a client has to wait after a round.
      num_tuning_outputs_of_q: How many outputs of Q are drawn to choose how Q from P is tested.
      sample_sizes_of_q: How many outputs that test may draw, the fewest first.
      stream_name: What random numbers and kept certificates follow from: it never changes.
    """

    probability: float
    separation: int
    is_stationary: bool = True

    has_timer: ClassVar[bool] = True
    num_tuning_outputs_of_q: ClassVar[int] = 2**14
    sample_sizes_of_q: ClassVar[tuple[int, ...]] = (2**16, 2**18)
    stream_name: ClassVar[str] = "CoinsUnderTimers"

    def __post_init__(self) -> None:
        if not 0.0 < validation.number(self.probability, "probability") <= 1.0:
            raise ValueError(
                f"probability must be above 0 and at most 1, found {self.probability}."
            )
        validation.positive_integer(self.separation, "separation")

    def first_free_probabilities(self) -> FloatArray:
        """Returns the (b,) probabilities that a client may join first in rounds 0 to b - 1."""
        first = np.zeros(self.separation)
        first[0] = 1.0
        if self.is_stationary:
            first[1:] = self.probability
        return np.asarray(first / (1.0 + np.sum(first[1:])))

    def products(self, columns: FloatArray, rounding: float) -> "BandedProducts":
        """Returns products with C; see :class:`DominatingPair`."""
        del rounding
        return BandedProducts(columns)

    def log_ratios(self, log_exponentials: FloatArray) -> FloatArray:
        """Returns log P/Q.

        Args:
          log_exponentials: (n, m) log e_i of m outputs.

        Returns:
          (m,).
        """
        fast = self._fast_log_ratios(log_exponentials)
        return self._safe_log_ratios(log_exponentials) if fast is None else fast

    def _fast_log_ratios(self, log_exponentials: FloatArray) -> FloatArray | None:
        """In linear arithmetic; None if numbers would be too large or too small for it."""
        n, m = log_exponentials.shape
        if np.max(log_exponentials) > 500.0 or n * math.log1p(-min(self.probability, 0.99)) < -550:
            return None
        p = self.probability
        values = np.ones((n + self.separation, m))
        joined = np.exp(log_exponentials)
        joined *= p
        with np.errstate(over="ignore", invalid="ignore"):
            for i in range(n - 1, -1, -1):
                joined[i] *= values[i + self.separation]
                np.multiply(values[i + 1], 1.0 - p, out=values[i])
                values[i] += joined[i]
            first = self.first_free_probabilities() @ values[: self.separation]
        if not (np.min(values) > _SMALLEST and np.max(values) < _LARGEST):
            return None
        return np.asarray(np.log(first))

    def _safe_log_ratios(self, log_exponentials: FloatArray) -> FloatArray:
        n, m = log_exponentials.shape
        with np.errstate(divide="ignore"):
            stay, join = np.log1p(-self.probability), np.log(self.probability)
            log_first = np.log(self.first_free_probabilities())
        logs = np.zeros((n + self.separation, m))
        for i in range(n - 1, -1, -1):
            joined = join + log_exponentials[i] + logs[i + self.separation]
            logs[i] = np.logaddexp(stay + logs[i + 1], joined)
        return _log_sum(log_first[:, None] + logs[: self.separation])


@dataclasses.dataclass(frozen=True)
class BallsInBinsRounds:
    """The rounds of a client in one of b bins at random: those that are its bin modulo b.

    Attributes:
      separation: The number of bins b.
      has_timer: As of :class:`MinSeparationRounds`.
      stream_name: As there.
    """

    separation: int

    has_timer: ClassVar[bool] = False
    stream_name: ClassVar[str] = "OneBin"

    def __post_init__(self) -> None:
        validation.positive_integer(self.separation, "separation")

    @property
    def num_tuning_outputs_of_q(self) -> int:
        """The outputs of Q for tuning: outputs of few coordinates cost little."""
        powers = _POWER_OF_NUMBERS - (self.separation - 1).bit_length()
        return int(2 ** min(max(powers, 14), 20))

    @property
    def sample_sizes_of_q(self) -> tuple[int, ...]:
        """How many outputs of Q a test may draw."""
        tuning = self.num_tuning_outputs_of_q
        return tuple(sorted({2**16, 2**18, tuning, 4 * tuning}))

    def products(self, columns: FloatArray, rounding: float) -> "BinProducts":
        """Returns products with the vectors m_S of all bins; see :class:`DominatingPair`."""
        return BinProducts(columns, self.separation, rounding)

    def log_ratios(self, log_exponentials: FloatArray) -> FloatArray:
        """Returns log P/Q.

        Args:
          log_exponentials: (b, m) log e_S of m outputs.

        Returns:
          (m,).
        """
        return _log_sum(log_exponentials) - math.log(self.separation)


RoundsDistribution: TypeAlias = MinSeparationRounds | BallsInBinsRounds


@dataclasses.dataclass(frozen=True)
class DominatingPair:
    """P and Q: a scaled matrix, noise, and the distribution of a client's rounds.

    Attributes:
      columns: (n, b), as :func:`normalised` returns them: those of |C|.
      sigma: The noise multiplier relative to the largest column norm.
      rounds: The distribution of a client's rounds; with timers, of a separation of at least b.
      rounding: What roundings may move in any row from a client's first round on, beyond what
        ``columns`` has; for balls in bins alone.

    Raises:
      ValueError: If there are timers, and the separation is below the number of bands or there is
        a rounding.
    """

    columns: FloatArray
    sigma: float
    rounds: RoundsDistribution
    rounding: float = 0.0

    def __post_init__(self) -> None:
        if self.rounds.has_timer and self.rounds.separation < self.columns.shape[1]:
            raise ValueError(
                f"a separation of {self.rounds.separation} is below the {self.columns.shape[1]} "
                "bands."
            )
        if self.rounds.has_timer and self.rounding:
            raise ValueError("with timers, columns hold what roundings move.")

    @functools.cached_property
    def products(self) -> "BandedProducts | BinProducts":
        """Products with the vectors that P/Q depends on, and with their transpose."""
        return self.rounds.products(self.columns, self.rounding)

    @property
    def num_outputs(self) -> int:
        """The numbers that P/Q depends on."""
        return self.products.num_outputs

    def log_ratios(self, outputs: FloatArray) -> FloatArray:
        """Returns the (m,) log P/Q of (num_outputs, m) outputs."""
        # In place: what becomes log e is a product with the outputs.
        exponents = self.products.transposed_times(outputs)
        exponents -= 0.5 * self.products.squared_norms[:, None]
        exponents /= self.sigma**2
        return self.rounds.log_ratios(exponents)

    def description(self) -> dict[str, Any]:
        """Returns what tells pairs of the same columns apart."""
        return {
            "shape": list(self.columns.shape),
            "sigma": self.sigma,
            # Random numbers and kept certificates follow from this name: it never changes.
            "law": [self.rounds.stream_name, dataclasses.asdict(self.rounds)],
            **({"rounding": self.rounding} if self.rounding else {}),
        }


def _log_sum(logs: FloatArray) -> FloatArray:
    """The logarithm of the sum of exponentials over the first axis."""
    largest = np.max(logs, axis=0)
    shares = logs - largest
    return np.asarray(largest + np.log(np.sum(np.exp(shares, out=shares), axis=0)))


def columns_of_matrix(strategy_matrix: Any, num_bands: int) -> FloatArray:
    """Returns the compact columns of a strategy matrix.

    Args:
      strategy_matrix: (n, n), C, lower triangular.
      num_bands: b, at least the bands of C, at most n.

    Returns:
      (n, b) float64.

    Raises:
      ValueError: If C is not a square, finite, lower-triangular matrix of at most b bands.
    """
    matrix = validation.lower_triangular(strategy_matrix, "strategy_matrix")
    num_rounds = matrix.shape[0]
    num_bands = min(validation.positive_integer(num_bands, "num_bands"), num_rounds)
    columns = np.zeros((num_rounds, num_bands))
    for i in range(num_rounds):
        height = min(num_bands, num_rounds - i)
        columns[i, :height] = matrix[i : i + height, i]
        if np.any(matrix[i + height :, i]):
            raise ValueError(
                f"strategy_matrix must have at most {num_bands} bands, found an entry of column "
                f"{i} below them."
            )
    return columns


def columns_of_encoder(
    encode: Callable[[FloatArray], FloatArray], num_rounds: int, num_bands: int
) -> FloatArray:
    """Returns the compact columns of a strategy matrix that is known by its products.

    Args:
      encode: Takes an (n, b + 1) array x and returns C x. C is lower triangular and has at most
        b bands, which the caller knows; here it is only made likely.
      num_rounds: n.
      num_bands: b, 1 to n.

    Returns:
      (n, b) float64.

    Raises:
      ValueError: If a product shows more bands, or entries that are not finite.
    """
    rounds = np.arange(num_rounds)
    # Columns that are b apart have no rows in common, so that one product shows all of them.
    # Another product, with random numbers, tells whether there is anything beyond.
    probes = np.zeros((num_rounds, num_bands + 1))
    probes[rounds, rounds % num_bands] = 1.0
    probes[:, num_bands] = np.random.default_rng(0).uniform(1.0, 2.0, num_rounds)
    products = np.asarray(encode(probes), dtype=np.float64)
    if products.shape != probes.shape or not np.all(np.isfinite(products)):
        raise ValueError("the strategy matrix must be square, with finite entries.")
    rows = rounds[:, None] + np.arange(num_bands)
    inside = rows < num_rounds
    columns = np.where(
        inside, products[np.minimum(rows, num_rounds - 1), (rounds % num_bands)[:, None]], 0.0
    )
    expected = np.zeros(num_rounds)
    np.add.at(expected, rows[inside], (columns * probes[:, num_bands, None])[inside])
    scale = np.max(np.abs(products), initial=0.0)
    if np.max(np.abs(expected - products[:, num_bands]), initial=0.0) > 1e-9 * scale:
        raise ValueError(
            f"the strategy matrix has more than {num_bands} bands, or is not lower triangular."
        )
    return columns


def normalised(columns: FloatArray) -> FloatArray:
    """Returns the columns of |C| over the largest norm of a column.

    Args:
      columns: (n, b), of C.

    Raises:
      ValueError: If all columns are zero, or an entry is not finite.
    """
    absolute = np.abs(columns)
    largest_entry = float(np.max(absolute))
    if not 0.0 < largest_entry < np.inf:
        raise ValueError("the strategy matrix must not be zero, and its entries must be finite.")
    # By a power of two, which rounds nothing: squares of the entries might be beyond floats.
    absolute = np.ldexp(absolute, -int(np.frexp(largest_entry)[1]))
    return np.asarray(absolute / np.sqrt(np.max(np.sum(absolute**2, axis=1))))


def gram_bands(columns: FloatArray) -> FloatArray:
    """Returns inner products of columns: ``bands[i, t]`` is that of columns i and i - t.

    Args:
      columns: (n, b).

    Returns:
      (n, b), zero where i < t.
    """
    num_rounds, num_bands = columns.shape
    bands = np.zeros((num_rounds, num_bands))
    for t in range(num_bands):
        later, earlier = columns[t:, : num_bands - t], columns[: num_rounds - t, t:]
        bands[t:, t] = np.einsum("ik,ik->i", later, earlier)
    return bands


class BandedProducts:
    """Products with C and with its transpose, as dense products of blocks.

    Attributes:
      num_outputs: The rows of C.
      squared_norms: (n,) of its columns.
    """

    def __init__(self, columns: FloatArray) -> None:
        """Makes the blocks.

        Args:
          columns: (n, b), of C.
        """
        self._num_rounds, self._num_bands = columns.shape
        self.num_outputs = self._num_rounds
        self.squared_norms = np.sum(columns**2, axis=1)
        self._blocks: list[tuple[slice, slice, FloatArray]] = []
        size = max(32, self._num_bands)
        for start in range(0, self._num_rounds, size):
            stop = min(start + size, self._num_rounds)
            last = min(stop + self._num_bands - 1, self._num_rounds)
            block = np.zeros((last - start, stop - start))
            for i in range(start, stop):
                height = min(self._num_bands, self._num_rounds - i)
                block[i - start : i - start + height, i - start] = columns[i, :height]
            self._blocks.append((slice(start, stop), slice(start, last), block))

    def turned(self, outputs: FloatArray) -> FloatArray:
        """Returns (n, m) outputs of rounds as they are: P/Q depends on all of them."""
        return outputs

    def times(self, x: FloatArray) -> FloatArray:
        """Returns C x.

        Args:
          x: (n, m).
        """
        product = np.zeros_like(x)
        for inner, outer, block in self._blocks:
            product[outer] += block @ x[inner]
        return product

    def transposed_times(self, y: FloatArray) -> FloatArray:
        """Returns C^T y.

        Args:
          y: (n, m).
        """
        product = np.empty_like(y)
        for inner, outer, block in self._blocks:
            np.matmul(block.T, y[outer], out=product[inner])
        return product


class BinProducts:
    """Products with the vectors m_S of all bins, turned into as few coordinates as there are.

    Attributes:
      num_outputs: The coordinates: the bins or the rounds, whichever are fewer.
      squared_norms: (b,) of the vectors.
    """

    def __init__(self, columns: FloatArray, num_bins: int, rounding: float = 0.0) -> None:
        """Adds up the columns of each bin.

        Args:
          columns: (n, b), of |C|, not negative.
          num_bins: The number of bins.
          rounding: What is added to each row from the first round of a bin on.
        """
        num_rounds, num_bands = columns.shape
        vectors = np.zeros((num_rounds, num_bins))
        for i in range(num_rounds):
            height = min(num_bands, num_rounds - i)
            vectors[i : i + height, i % num_bins] += columns[i, :height]
        vectors += rounding * np.tri(num_rounds, num_bins)
        self.squared_norms = np.sum(vectors**2, axis=0)
        self._basis, self._vectors = np.linalg.qr(vectors)
        self.num_outputs = len(self._vectors)

    def turned(self, outputs: FloatArray) -> FloatArray:
        """Returns (n, m) outputs of rounds in the (num_outputs, m) coordinates."""
        return np.asarray(self._basis.T @ outputs)

    def times(self, x: FloatArray) -> FloatArray:
        """Returns the (num_outputs, m) sums of the vectors, weighted by (b, m) numbers."""
        return np.asarray(self._vectors @ x)

    def transposed_times(self, y: FloatArray) -> FloatArray:
        """Returns the (b, m) products of the vectors with (num_outputs, m) outputs."""
        return np.asarray(self._vectors.T @ y)
