"""A linear recurrence over state vectors: buffered linear Toeplitz matrices and trees."""

import dataclasses

import numpy as np

from mf_aggregators.noise.recursions.recursion import NoiseRecursion


@dataclasses.dataclass(frozen=True, eq=False)
class StateSpaceNoise(NoiseRecursion):
    """A linear recurrence over m state vectors S, which start at zero.

    With p = phases[i], the recurrence of round i is
    ``Y[i] = gains[p] Z[i] + outputs[p] . S`` and, for each state vector d,
    ``S'[d] = decays[p, d] S[sources[p, d]] + inputs[p, d] Z[i] + feedbacks[p, d] Y[i]``.

    Attributes:
      phases: (n,) int64: which of the P sets of weights each round uses.
      gains: (P,) float64.
      outputs: (P, m) float64.
      sources: (P, m) int64.
      decays: (P, m) float64.
      inputs: (P, m) float64.
      feedbacks: (P, m) float64.
    """

    phases: np.ndarray
    gains: np.ndarray
    outputs: np.ndarray
    sources: np.ndarray
    decays: np.ndarray
    inputs: np.ndarray
    feedbacks: np.ndarray

    @property
    def num_rounds(self) -> int:
        """The number of rounds n."""
        return int(self.phases.shape[0])

    @property
    def num_state_vectors(self) -> int:
        """The number of state vectors m."""
        return int(self.outputs.shape[1])

    def divided_by(self, divisor: float) -> NoiseRecursion:
        """Returns the recursion of C / divisor."""
        return dataclasses.replace(self, gains=self.gains * divisor, inputs=self.inputs * divisor)

    def advance(
        self, i: int, history: np.ndarray, row_of_z: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """A step of the recurrence, in float64: rounded decays would be of another matrix."""
        phase = self.phases[i]
        row = self.gains[phase] * row_of_z
        row = row + np.tensordot(self.outputs[phase], history, axes=1)
        column = (-1,) + (1,) * row_of_z.ndim
        following = history[self.sources[phase]] * self.decays[phase].reshape(column)
        if np.any(self.inputs[phase]):
            following += np.multiply.outer(self.inputs[phase], row_of_z)
        if np.any(self.feedbacks[phase]):
            following += np.multiply.outer(self.feedbacks[phase], row)
        return row.astype(history.dtype), following.astype(history.dtype)

    def block_weights(self, start: int, end: int) -> np.ndarray:
        """The recurrence applied to one unit vector for each state vector and row of Z."""
        return self._weights_of_phases(self.phases[start:end])

    def block_signature(self, start: int, end: int) -> object:
        """Blocks with the same phases have the same weights."""
        return self.phases[start:end].tobytes()

    def weights_by_phase(self) -> np.ndarray:
        """Returns the block weights of one round, for each phase.

        Returns:
          (P, 1 + m, m + 1) float64: the row and then the next state vectors, from the state
          vectors and the row of Z.
        """
        phases = np.arange(len(self.gains))
        return np.array([self._weights_of_phases(phases[p : p + 1]) for p in phases])

    def _weights_of_phases(self, phases: np.ndarray) -> np.ndarray:
        vectors, size = self.num_state_vectors, len(phases)
        state = np.eye(vectors, vectors + size)
        rows = np.zeros((size, vectors + size))
        for row, phase in enumerate(phases):
            rows[row] = self.outputs[phase] @ state
            rows[row, vectors + row] += self.gains[phase]
            state = state[self.sources[phase]] * self.decays[phase][:, np.newaxis]
            state += np.multiply.outer(self.feedbacks[phase], rows[row])
            state[:, vectors + row] += self.inputs[phase]
        return np.concatenate([rows, state])
