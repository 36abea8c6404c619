"""Steps of an algorithm whose outputs are linear in its inputs, without their (n, n) matrices."""

import abc
import dataclasses

import numpy as np

from mf_aggregators.kernel.numbers import FloatArray


class Stage(abc.ABC):
    """A step of an algorithm on the outputs of the step before: an (n, n) matrix F."""

    @abc.abstractmethod
    def applied(self, x: FloatArray) -> FloatArray:
        """Returns F x.

        Args:
          x: (n, m).
        """

    @abc.abstractmethod
    def transposed(self, x: FloatArray) -> FloatArray:
        """Returns F^T x.

        Args:
          x: (n, m).
        """

    @abc.abstractmethod
    def from_round(self, start: int) -> "Stage":
        """Returns the part of F of the last rows and columns.

        Args:
          start: The first of them.
        """


@dataclasses.dataclass(frozen=True, eq=False)
class Recursion(Stage):
    """y_i = kept_i y_(i-1) + added_i x_i: velocities, models and moving averages are such.

    Attributes:
      kept: (n,); the first has no effect.
      added: (n,), none of them zero.
    """

    kept: FloatArray
    added: FloatArray

    def applied(self, x: FloatArray) -> FloatArray:
        """Returns F x."""
        y = x * self.added[:, np.newaxis]
        if self.is_sum:
            return np.asarray(np.cumsum(y, axis=0, out=y))
        moved = np.empty(y.shape[1:])
        for i in range(1, len(y)):
            np.multiply(y[i - 1], self.kept[i], out=moved)
            y[i] += moved
        return y

    def transposed(self, x: FloatArray) -> FloatArray:
        """Returns F^T x."""
        y = x.copy()
        if self.is_sum:
            np.cumsum(y[::-1], axis=0, out=y[::-1])
        else:
            moved = np.empty(y.shape[1:])
            for i in range(len(y) - 1, 0, -1):
                np.multiply(y[i], self.kept[i], out=moved)
                y[i - 1] += moved
        y *= self.added[:, np.newaxis]
        return y

    def from_round(self, start: int) -> "Recursion":
        """Returns the recursion of the last rounds."""
        return Recursion(self.kept[start:], self.added[start:])

    @property
    def is_sum(self) -> bool:
        """Whether nothing is forgotten."""
        return bool(np.all(self.kept[1:] == 1.0))

    @property
    def is_constant(self) -> bool:
        """Whether it is the same in every round, which makes F a Toeplitz matrix."""
        return not (np.ptp(self.kept[1:]) if len(self.kept) > 1 else 0.0) and not np.ptp(self.added)


@dataclasses.dataclass(frozen=True, eq=False)
class MeanOfLast(Stage):
    """y_i is the mean of the last ``most`` of x_0 to x_i, or of all of them if they are fewer.

    Attributes:
      most: How many, at least 1.
      counts: (n,) of how many it is.
    """

    most: int
    counts: FloatArray

    @classmethod
    def of(cls, num_rounds: int, most: int) -> "MeanOfLast":
        """Returns the stage.

        Args:
          num_rounds: n.
          most: How many outputs the mean is of.
        """
        return cls(most, np.minimum(np.arange(1.0, num_rounds + 1.0), float(most)))

    def applied(self, x: FloatArray) -> FloatArray:
        """Returns F x."""
        sums = np.cumsum(x, axis=0)
        y = sums.copy()
        y[self.most :] -= sums[: -self.most]
        return np.asarray(y / self.counts[:, np.newaxis])

    def transposed(self, x: FloatArray) -> FloatArray:
        """Returns F^T x."""
        shares = x / self.counts[:, np.newaxis]
        sums = np.cumsum(shares[::-1], axis=0)[::-1]
        y = sums.copy()
        y[: -self.most] -= sums[self.most :]
        return np.asarray(y)

    def from_round(self, start: int) -> "MeanOfLast":
        """Returns the stage of the last rounds."""
        return MeanOfLast(self.most, self.counts[start:])
