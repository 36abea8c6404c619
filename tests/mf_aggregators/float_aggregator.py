"""An aggregator in floats, for audits of noise: quicker than integers, and easy to break."""

import types
from typing import Any

import numpy as np

from mf_aggregators.factorizations import Factorization


class FloatAggregator:
    """Clips updates, adds a row of C^-1 Z and divides."""

    def __init__(
        self, factorization: Factorization, stddev: float, clip_norm: float, clients: float
    ) -> None:
        self._factorization, self._stddev = factorization, stddev
        self._clip_norm, self._clients, self._dimension = clip_norm, clients, 0

    def create(self, value_type: Any) -> "FloatAggregator":
        """Takes the shape of updates, as a factory of TFF does."""
        (self._dimension,) = value_type.shape
        return self

    def initialize(self) -> tuple[int, np.ndarray]:
        """Draws the noise of all rounds."""
        z = np.random.default_rng().normal(size=(self._factorization.num_rounds, self._dimension))
        return 0, self._stddev * self._factorization.noise_rows(z)

    def next(self, state: tuple[int, np.ndarray], clients: list[np.ndarray]) -> Any:
        """Releases a round."""
        index, noise = state
        total = noise[index].copy()
        for update in clients:
            total += update * min(1.0, self._clip_norm / float(np.linalg.norm(update)))
        return types.SimpleNamespace(state=(index + 1, noise), result=total / self._clients)
