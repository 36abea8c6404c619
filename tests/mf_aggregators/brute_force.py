"""Independent truths by enumeration, for small numbers of rounds."""

import itertools
import math
from collections.abc import Iterator

import numpy as np

from mf_aggregators.kernel.sensitivity import Schema
from mf_aggregators.participation import (
    FixedEpochOrder,
    MinSeparation,
    Participation,
    SingleParticipation,
)


def patterns(participation: Participation | Schema, num_rounds: int) -> Iterator[tuple[int, ...]]:
    """Every non-empty participation pattern of a schema, straight from its definition."""
    for size in range(1, num_rounds + 1):
        for pattern in itertools.combinations(range(num_rounds), size):
            gaps = [later - earlier for earlier, later in itertools.pairwise(pattern)]
            if allowed(participation, size, gaps):
                yield pattern


def allowed(participation: Participation | Schema, size: int, gaps: list[int]) -> bool:
    """Whether a schema allows so many participations with these distances."""
    if isinstance(participation, Schema):
        fits = participation.most is None or size <= participation.most
        apart = [gap - participation.separation for gap in gaps]
        return fits and not any(apart if participation.is_even else [gap < 0 for gap in apart])
    if isinstance(participation, SingleParticipation):
        return size == 1
    if isinstance(participation, FixedEpochOrder):
        return size <= participation.epochs and all(gap == participation.separation for gap in gaps)
    assert isinstance(participation, MinSeparation)
    limit = participation.max_participations
    return (limit is None or size <= limit) and all(gap >= participation.separation for gap in gaps)


def scalar_sensitivity(strategy: np.ndarray, participation: Participation | Schema) -> float:
    """The largest ||C u|| over patterns and contributions of one dimension: signs suffice.

    ||C u|| is convex in u, so its maximum over [-1, 1]^k is at a corner.
    """
    best = 0.0
    for pattern in patterns(participation, strategy.shape[1]):
        columns = strategy[:, pattern]
        for signs in itertools.product([1.0, -1.0], repeat=len(pattern) - 1):
            best = max(best, float(np.linalg.norm(columns @ np.array([1.0, *signs]))))
    return best


def vector_change(
    strategy: np.ndarray,
    pattern: tuple[int, ...],
    dimension: int,
    generator: np.random.Generator,
    steps: int = 60,
) -> float:
    """A large ||C U||_F over contributions of unit L2 norm in some dimensions: a lower bound.

    Each step moves one contribution to its best direction given the others, which never
    lowers the norm.
    """
    columns = strategy[:, pattern]
    gram = columns.T @ columns
    contributions = generator.normal(size=(len(pattern), dimension))
    contributions /= np.linalg.norm(contributions, axis=1, keepdims=True)
    for step in range(steps):
        i = step % len(pattern)
        direction = gram[i] @ contributions - gram[i, i] * contributions[i]
        length = np.linalg.norm(direction)
        if length > 0:
            contributions[i] = direction / length
    return float(np.linalg.norm(columns @ contributions))


def hockey_stick(p: np.ndarray, q: np.ndarray, epsilon: float) -> float:
    """The hockey-stick divergence of p from q, the sum of the positive p - e^epsilon q."""
    excess: np.ndarray = p - math.exp(epsilon) * q
    return float(excess[excess > 0.0].sum())


def models_of_algorithm_2(gradients: np.ndarray, momentum: float, rates: np.ndarray) -> np.ndarray:
    """The models of SGD with momentum (Denisov et al. Alg. 2), from zero, one a round."""
    model, velocity, models = np.zeros(gradients.shape[1:]), np.zeros(gradients.shape[1:]), []
    for gradient, rate in zip(gradients, rates, strict=True):
        velocity = momentum * velocity + gradient
        model = model - rate * velocity
        models.append(model)
    return np.array(models)
