"""A linear recurrence over state vectors: buffered linear Toeplitz matrices and trees."""

import dataclasses

import numpy as np

from mf_aggregators.kernel.arrays import FloatArray, IntArray, RealArray
from mf_aggregators.noise.recursions.recursion import NoiseRecursion


@dataclasses.dataclass(frozen=True, eq=False)
class StateSpaceNoise(NoiseRecursion):
    """A linear recurrence over m state vectors S, which start at zero.

    With p = phases[i], the recurrence of round i is
    ``Y[i] = gains[p] Z[i] + outputs[p] . S`` and, for each state vector d,
    ``S'[d] = decays[p, d] S[sources[p, d]] + feedbacks[p, d] Y[i]``.

    Attributes:
      phases: (n,) int64: which of the P sets of weights each round uses.
      gains: (P,) float64.
      outputs: (P, m) float64.
      sources: (P, m) int64.
      decays: (P, m) float64.
      feedbacks: (P, m) float64.
    """

    phases: IntArray
    gains: FloatArray
    outputs: FloatArray
    sources: IntArray
    decays: FloatArray
    feedbacks: FloatArray

    def __post_init__(self) -> None:
        self._freeze("phases", (None,), np.int64)
        self._freeze("gains", (None,))
        phases, vectors = len(self.gains), np.shape(self.outputs)[-1]
        for name in ("outputs", "decays", "feedbacks"):
            self._freeze(name, (phases, vectors))
        self._freeze("sources", (phases, vectors), np.int64)
        if not len(self.phases):
            raise ValueError("phases of StateSpaceNoise must have at least a round.")
        # NumPy counts negative indices from the end, and a graph does not.
        for name, end in (("phases", phases), ("sources", vectors)):
            indices = getattr(self, name)
            if np.any((indices < 0) | (indices >= end)):
                raise ValueError(f"{name} of StateSpaceNoise must be at least 0 and below {end}.")

    @property
    def num_rounds(self) -> int:
        """The number of rounds n."""
        return int(self.phases.shape[0])

    @property
    def num_state_vectors(self) -> int:
        """The number of state vectors m."""
        return int(self.outputs.shape[1])

    @property
    def diagonal(self) -> FloatArray:
        """The gain of each round, (n,) float64."""
        return np.asarray(self.gains[self.phases])

    @property
    def is_toeplitz(self) -> bool:
        """Whether all rounds have the same weights."""
        return bool(np.all(self.phases == self.phases[0]))

    def divided_by(self, divisor: float) -> NoiseRecursion:
        """Returns the noising matrix of C / divisor."""
        return dataclasses.replace(self, gains=self.gains * divisor)

    def _with_unit_diagonal(self) -> NoiseRecursion:
        column = self.gains[:, np.newaxis]
        return dataclasses.replace(
            self,
            gains=np.ones_like(self.gains),
            outputs=self.outputs / column,
            feedbacks=self.feedbacks * column,
        )

    def earlier(self, i: int, history: RealArray) -> FloatArray:
        """Combines the state vectors."""
        return np.tensordot(self.outputs[self.phases[i]], history, axes=1)

    def following(
        self, i: int, history: RealArray, row_of_z: RealArray, row: RealArray
    ) -> RealArray:
        """A step of the recurrence."""
        phase = self.phases[i]
        column = (-1,) + (1,) * row.ndim
        following = history[self.sources[phase]] * self.decays[phase].reshape(column)
        if np.any(self.feedbacks[phase]):
            following += np.multiply.outer(self.feedbacks[phase], row)
        return np.asarray(following)

    def largest_vector_norms(self) -> FloatArray:
        """Returns (m,) bounds on the L2 norms of a normalised matrix's state vectors."""
        return self._normalised_norms()[1]

    def _normalised_row_norms(self) -> FloatArray:
        return self._normalised_norms()[0]

    def _normalised_norms(self) -> tuple[FloatArray, FloatArray]:
        """The (n,) norms of a normalised matrix's rows, and (m,) the largest of its vectors.

        From the covariance of the state vectors where Z is of independent numbers of variance one,
        which follows from round to round.
        """
        vectors = self.num_state_vectors
        squares, largest = np.empty(self.num_rounds), np.zeros(vectors)
        covariance = np.zeros((vectors, vectors))
        of_phases = self.following_by_phase()
        for i, phase in enumerate(self.phases):
            outputs, of_row = self.outputs[phase], of_phases[phase, :, -1]
            squares[i] = 1.0 + outputs @ covariance @ outputs / self.gains[phase] ** 2
            step = of_phases[phase, :, :-1] + np.multiply.outer(of_row, outputs)
            of_z = of_row * self.gains[phase]
            covariance = step @ covariance @ step.T + np.multiply.outer(of_z, of_z)
            np.maximum(largest, np.diagonal(covariance), out=largest)
        return np.sqrt(squares), np.sqrt(largest)

    def block_transition(self, start: int, end: int) -> FloatArray:
        """The recurrence applied to one unit vector for each state vector and each row."""
        vectors, size = self.num_state_vectors, end - start
        rows, state = np.zeros((size, vectors + size)), np.eye(vectors, vectors + size)
        for row, phase in enumerate(self.phases[start:end]):
            rows[row] = self.outputs[phase] @ state
            state = state[self.sources[phase]] * self.decays[phase][:, np.newaxis]
            state[:, vectors + row] += self.feedbacks[phase]
        return np.concatenate([rows, state])

    def block_signature(self, start: int, end: int) -> object:
        """Blocks with the same phases have the same transition."""
        return self.phases[start:end].tobytes()

    def following_by_phase(self) -> FloatArray:
        """Returns how the state vectors follow from one round to the next, for each phase.

        Returns:
          (P, m, m + 1) float64: the next state vectors from the state vectors and the row.
        """
        phases, vectors = len(self.gains), self.num_state_vectors
        kept = np.eye(vectors)[self.sources] * self.decays[:, :, np.newaxis]
        return np.concatenate([kept, self.feedbacks.reshape(phases, vectors, 1)], axis=2)
