"""All that one client's random participation can be, written out: the truth for small numbers."""

import dataclasses
import math

import numpy as np
from hypothesis import strategies as st

from mf_aggregators.kernel.certificate import (
    DominatingPair,
    _BallsInBinsRounds,
    _MinSeparationRounds,
    _RoundsDistribution,
)
from mf_aggregators.participation import _columns_of_matrix


@dataclasses.dataclass(frozen=True)
class Patterns:
    """A mixture of normal distributions.

    Attributes:
      probabilities: (s,) of the patterns.
      means: (s, n) sums of the columns in each pattern.
      sigma: The standard deviation of the noise.
    """

    probabilities: np.ndarray
    means: np.ndarray
    sigma: float

    def log_ratios(self, outputs: np.ndarray) -> np.ndarray:
        """Returns log P/Q of (n, m) outputs."""
        exponents = self.means @ outputs - 0.5 * np.sum(self.means**2, axis=1)[:, None]
        return np.asarray(np.log(self.probabilities @ np.exp(exponents / self.sigma**2)))

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """Returns (n, count) outputs with the client."""
        which = rng.choice(len(self.probabilities), size=count, p=self.probabilities)
        noise = rng.normal(0.0, self.sigma, size=(count, self.means.shape[1]))
        return np.asarray((self.means[which] + noise).T)


def of(distribution: _RoundsDistribution, strategy_matrix: np.ndarray, sigma: float) -> Patterns:
    """Returns all patterns of a distribution, found by what clients do round by round."""
    rounds = strategy_matrix.shape[0]
    found: list[tuple[float, np.ndarray]] = []
    if isinstance(distribution, _MinSeparationRounds):
        p, b = distribution.probability, distribution.separation

        def go_on(i: int, probability: float, pattern: np.ndarray) -> None:
            if probability == 0.0:
                return
            if i >= rounds:
                found.append((probability, pattern))
                return
            go_on(i + 1, probability * (1 - p), pattern)
            joined = pattern.copy()
            joined[i] = 1.0
            go_on(i + b, probability * p, joined)

        # The stationary state: of b rounds in a cycle of 1/p + b - 1, one each for every wait.
        cycle = 1 / p + b - 1
        waits = [1 - (b - 1) / cycle] + [1 / cycle] * (b - 1)
        for wait, probability in enumerate(waits):
            go_on(wait, probability, np.zeros(rounds))
    else:
        for part in range(distribution.separation):
            own = [i for i in range(rounds) if i % distribution.separation == part]
            pattern = np.zeros(rounds)
            pattern[own] = 1.0
            found.append((1.0 / distribution.separation, pattern))
    probabilities = np.array([probability for probability, _ in found])
    assert math.isclose(np.sum(probabilities), 1.0, rel_tol=1e-12)
    return Patterns(probabilities, np.array([each for _, each in found]) @ strategy_matrix.T, sigma)


@st.composite
def cases(draw: st.DrawFn, most_rounds: int = 6) -> tuple[_RoundsDistribution, np.ndarray, float]:
    """A distribution, a non-negative strategy matrix of largest column norm 1, and sigma."""
    rounds = draw(st.integers(1, most_rounds))
    bands = draw(st.integers(1, rounds))
    separation = bands + draw(st.integers(0, 2))
    num_bins = draw(st.integers(1, rounds + 2))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    lags = np.subtract.outer(np.arange(rounds), np.arange(rounds))
    matrix = rng.uniform(0.05, 1.0, (rounds, rounds)) * ((lags >= 0) & (lags < bands))
    matrix /= np.sqrt(np.max(np.sum(matrix**2, axis=0)))
    probability = draw(st.floats(0.02, 1.0))
    cases: list[_RoundsDistribution] = [
        _MinSeparationRounds(probability, separation),
        _BallsInBinsRounds(num_bins),
    ]
    return draw(st.sampled_from(cases)), matrix, draw(st.floats(0.5, 3.0))


def dominating_pair(
    distribution: _RoundsDistribution, matrix: np.ndarray, sigma: float
) -> DominatingPair:
    """Returns the pair of a matrix of largest column norm 1."""
    has_timers = isinstance(distribution, _MinSeparationRounds)
    bands = min(distribution.separation, len(matrix)) if has_timers else len(matrix)
    columns = np.abs(_columns_of_matrix(matrix, bands))
    return DominatingPair(columns, sigma, distribution)


def log_ratios(pair: DominatingPair, outputs: np.ndarray) -> np.ndarray:
    """Returns log P/Q of (n, m) outputs of rounds."""
    if not pair.has_timers:
        vectors = np.zeros((len(pair.columns), pair.rounds.separation))
        for i, column in enumerate(pair.columns):
            height = len(pair.columns) - i
            vectors[i : i + len(column), i % vectors.shape[1]] += column[:height]
        basis, turned = np.linalg.qr(vectors)
        ((_, vectors),) = pair.blocks
        np.testing.assert_allclose(vectors, turned, rtol=0, atol=1e-12)
        outputs = basis.T @ outputs
    return pair.log_ratios(outputs)
