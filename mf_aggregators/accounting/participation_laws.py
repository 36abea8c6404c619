r"""Likelihood ratios of one client's random participation under a banded mechanism.

A client takes part in a random set S of rounds, whose law pi depends on no data and is known,
while S itself is secret. With c_i the columns of C, scaled to norms of at most 1, the outputs have
the law P = sum_S pi(S) N(sum_{i in S} c_i, sigma^2 I) with the client, and Q = N(0, sigma^2 I)
without it. This module has log P/Q at given outputs, exactly, for three laws pi.

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

Nothing in the proof needs bands. The recursions below do: participations of a client are
``separation`` or more rounds apart and C has at most as many bands, so that the squared norm of
sum_{i in S} c_i is the sum of squared norms, and P/Q a sum over S of products.

With e_i = exp((<c_i, y> - |c_i|^2 / 2) / sigma^2):

* secret coins under timers (arXiv 2602.09338): f_i = (1 - p) f_{i+1} + p e_i f_{i+b}, and 1 behind
  the last round. P/Q is f_0 from a cold start, and
  (f_0 + p sum_{i=1}^{b-1} f_i) / (1 + (b - 1) p) where timers are in their stationary state.
* balls in bins (arXiv 2410.06266): the mean over bins of the product of e_i over a bin's rounds.
* independent parts with Poisson draws (cyclic Poisson): the mean over parts of the product of
  1 - p + p e_i over a part's rounds.
"""

import dataclasses
import math
from typing import TypeAlias

import numpy as np

from mf_aggregators import validation

# Linear arithmetic is used as long as nothing is smaller or larger than this.
_SMALLEST, _LARGEST = 1e-250, 1e250


@dataclasses.dataclass(frozen=True)
class CoinsUnderTimers:
    """A client that is free joins with a coin, and is free again ``separation`` rounds later.

    Attributes:
      probability: p, of the coin, in (0, 1].
      separation: b.
      is_stationary: Whether timers begin in their stationary state; otherwise every client is
        free in round 0.
    """

    probability: float
    separation: int
    is_stationary: bool = True

    def __post_init__(self) -> None:
        _check_probability(self.probability)
        validation.positive_integer(self.separation, "separation")

    @property
    def rate(self) -> float:
        """The rate 1 / (1/p + b - 1) of participation in the stationary state."""
        return 1.0 / (1.0 / self.probability + self.separation - 1)

    def first_free_probabilities(self) -> np.ndarray:
        """Returns the (b,) probabilities that a client is first free in rounds 0 to b - 1."""
        first = np.zeros(self.separation)
        first[0] = 1.0
        if self.is_stationary:
            first[1:] = self.probability
        return np.asarray(first / (1.0 + np.sum(first[1:])))

    def log_ratios(self, log_exponentials: np.ndarray) -> np.ndarray:
        """Returns log P/Q.

        Args:
          log_exponentials: (n, m) log e_i of m outputs.

        Returns:
          (m,).
        """
        fast = self._fast_log_ratios(log_exponentials)
        return self._safe_log_ratios(log_exponentials) if fast is None else fast

    def _fast_log_ratios(self, log_exponentials: np.ndarray) -> np.ndarray | None:
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

    def _safe_log_ratios(self, log_exponentials: np.ndarray) -> np.ndarray:
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
class OneBin:
    """A client takes part in every round of one of ``separation`` bins: rounds modulo their number.

    Attributes:
      separation: The number of bins b.
    """

    separation: int

    def __post_init__(self) -> None:
        validation.positive_integer(self.separation, "separation")

    def log_ratios(self, log_exponentials: np.ndarray) -> np.ndarray:
        """As :meth:`CoinsUnderTimers.log_ratios`."""
        sums = _sums_of_residues(log_exponentials, self.separation)
        return _log_sum(sums) - math.log(self.separation)


@dataclasses.dataclass(frozen=True)
class OnePart:
    """A client is in one of ``separation`` parts at random, and each of its rounds draws it.

    Attributes:
      probability: Of being drawn in a round of its part, in (0, 1].
      separation: The number of parts b; round i draws from part i modulo b.
    """

    probability: float
    separation: int

    def __post_init__(self) -> None:
        _check_probability(self.probability)
        validation.positive_integer(self.separation, "separation")

    def log_ratios(self, log_exponentials: np.ndarray) -> np.ndarray:
        """As :meth:`CoinsUnderTimers.log_ratios`."""
        with np.errstate(divide="ignore"):
            stay, join = np.log1p(-self.probability), np.log(self.probability)
        each = np.logaddexp(stay, join + log_exponentials)
        return _log_sum(_sums_of_residues(each, self.separation)) - math.log(self.separation)


ParticipationLaw: TypeAlias = CoinsUnderTimers | OneBin | OnePart


def log_exponentials(columns: np.ndarray, sigma: float, products: np.ndarray) -> np.ndarray:
    """Returns log e_i: of a participation in round i alone against none.

    Args:
      columns: (n, b), the columns c_i.
      sigma: The standard deviation of the noise.
      products: (n, m), C^T y of m outputs; it is overwritten.

    Returns:
      (n, m).
    """
    products -= 0.5 * np.sum(columns**2, axis=1)[:, None]
    products /= sigma**2
    return products


def _check_probability(probability: float) -> None:
    if not 0.0 < validation.number(probability, "probability") <= 1.0:
        raise ValueError(f"probability must be above 0 and at most 1, found {probability}.")


def _sums_of_residues(values: np.ndarray, modulus: int) -> np.ndarray:
    """The (modulus, m) sums over rows of (n, m) values that are congruent."""
    n, m = values.shape
    sums = np.zeros((modulus, m))
    for start in range(0, n, modulus):
        rows = values[start : start + modulus]
        sums[: len(rows)] += rows
    return sums


def _log_sum(logs: np.ndarray) -> np.ndarray:
    """The logarithm of the sum of exponentials over the first axis."""
    largest = np.max(logs, axis=0)
    return np.asarray(largest + np.log(np.sum(np.exp(logs - largest), axis=0)))
