"""What all recursions of correlated noise have in common.

Row i of C^-1 Z is needed in round i and never before, and no mechanism needs a later row of Z
for it. A recursion says how the rows follow from one another, and NumPy (here) and the
TensorFlow graphs that TFF runs (``tff.tensor_noise``) ask it.

Two kinds of memory are told apart. Earlier rows of Z can be drawn again from their seeds, which
costs time and no state; everything else (rows of the noise, state vectors) has to be kept
between rounds.

Any recursion is linear, so the rows of rounds s to e - 1 together are

    rows = W_earlier * (rows before s) + W_state * (state vectors at s) + W_z * (rows of Z),

and the state vectors at e follow in the same way. These weights are small matrices that depend
on the recursion alone; coordinates of the model are independent of one another.
"""

import abc
import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

# A block of rows that draws each row of Z once: larger blocks read what is kept less often, and
# hold more rows.
_ROWS_PER_BLOCK = 64
# Tables of a recursion up to this size are put into a graph.
_LARGEST_CONSTANT_IN_BYTES = 8 << 20


@dataclasses.dataclass(frozen=True, eq=False)
class NoiseState:
    """Where a stream of noise rows stands.

    Attributes:
      round_index: The round that the next row is for, from 0.
      history: What the recursion still needs of earlier rounds, (k, ...): rows of the noise or
        of Z in a ring, or state vectors. A value, as the rest of the state:
        :meth:`NoiseRecursion.next_row` leaves it as it is.
    """

    round_index: int
    history: np.ndarray


class NoiseRecursion(abc.ABC):
    """How the rows of C^-1 Z follow from one another.

    Each kind of matrix is a subclass. ``initial_state`` and ``next_row`` make the rows one by
    one; ``block_weights`` is the linear map that makes the rows of several rounds at once.
    """

    # Whether rows of the noise need rows of Z from before their round.
    draws_earlier_rows_of_z: ClassVar[bool] = False

    if TYPE_CHECKING:
        # Some subclasses have it as a field, which a property at run time would hide.
        @property
        def num_rounds(self) -> int:
            """The number of rounds n."""

    @property
    def num_earlier_rows(self) -> int:
        """The rows of the noise that a row needs: b - 1 for b bands, else none."""
        return 0

    @property
    def num_state_vectors(self) -> int:
        """The state vectors that are kept between rounds: accumulators, or of a recurrence."""
        return 0

    @property
    def floats_per_parameter(self) -> int:
        """The floats of state that each model parameter needs between rounds.

        Rows of Z are not counted: they are drawn again from their seeds, see
        ``rows_of_z_per_round``.
        """
        return self.num_earlier_rows + self.num_state_vectors

    @property
    def rows_of_z_per_round(self) -> int:
        """The rows of Z that the most expensive round draws, earlier rows included."""
        return 1

    @property
    def mean_rows_of_z_per_round(self) -> float:
        """The rows of Z that a row of the noise draws if rows are made one by one, on average."""
        most, rounds = self.rows_of_z_per_round, self.num_rounds
        return most - most * (most - 1) / (2 * rounds) if most <= rounds else (rounds + 1) / 2

    @property
    def scales_on_use(self) -> np.ndarray | None:
        """(n,) float64 factors of the rows of blocks when they are used; None for ones.

        Blocks follow from the rows without them.
        """
        return None

    @property
    def rows_per_block(self) -> int:
        """The most rows that are worth making at once."""
        return _ROWS_PER_BLOCK

    @property
    def fits_in_graph(self) -> bool:
        """Whether the recursion's tables are small enough to be constants of a graph."""
        tables = [value for value in vars(self).values() if isinstance(value, np.ndarray)]
        return sum(table.nbytes for table in tables) <= _LARGEST_CONSTANT_IN_BYTES

    def first_row_of_z(self, first_round: int) -> int:
        """Returns the first row of Z that the noise of a round needs, both counted from 0."""
        return max(0, first_round - self.rows_of_z_per_round + 1)

    @abc.abstractmethod
    def divided_by(self, divisor: float) -> "NoiseRecursion":
        """Returns the recursion of C / divisor."""

    @abc.abstractmethod
    def advance(
        self, i: int, history: np.ndarray, row_of_z: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns row i of the noise and the next history; may change both of its arguments.

        Args:
          i: The round, from 0, of those that there are.
          history: As in :class:`NoiseState`.
          row_of_z: Row i of Z, (...), of the history's dtype.
        """

    @abc.abstractmethod
    def block_weights(self, start: int, end: int) -> np.ndarray:
        """Returns the weights of the rows of rounds ``start`` to ``end - 1`` as one matrix.

        Args:
          start: The first round.
          end: The round after the last.

        Returns:
          (end - start + m, earlier rows + m + rows of Z) float64 for m state vectors: the rows
          and then the state vectors at ``end``, from the last ``num_earlier_rows`` rows before
          ``start`` (oldest first; fewer in the first rounds), the state vectors at ``start`` and
          the rows of Z from ``first_row_of_z(start)`` on.
        """

    def block_signature(self, start: int, end: int) -> object:
        """Returns what is equal for blocks that are known to have equal weights."""
        return "rounds", start, end

    def noising_matrix(self) -> np.ndarray:
        """Returns C^-1 as a dense (n, n) float64 array."""
        return np.tril(self.apply(np.eye(self.num_rounds)))

    def scaled_to_sensitivity_one(self, sensitivity: float) -> "NoiseRecursion":
        """Returns the recursion of C / sensitivity: every scaling of C gives the same run.

        Args:
          sensitivity: The sensitivity of C, above zero and finite.

        Raises:
          ValueError: If the sensitivity is zero or not finite.
        """
        if not 0.0 < sensitivity < math.inf:
            raise ValueError(
                f"a strategy matrix of sensitivity {sensitivity} cannot be scaled to sensitivity 1."
            )
        return self.divided_by(sensitivity)

    def initial_state(self, shape: tuple[int, ...], dtype: Any = np.float64) -> NoiseState:
        """Returns the state before the first round, for rows of the given shape and dtype."""
        rows = self.floats_per_parameter
        if self.draws_earlier_rows_of_z:
            # NumPy's stream is given its rows of Z and cannot draw them again.
            rows += self.rows_of_z_per_round
        return NoiseState(0, np.zeros((rows, *shape), dtype))

    def next_row(self, state: NoiseState, row_of_z: np.ndarray) -> tuple[np.ndarray, NoiseState]:
        """Returns the noise row of the state's round and the state after it.

        The given state does not change and can be used again: the same row of Z gives the same
        noise and the same next state. That costs a copy of the history each round, which
        :meth:`stream` saves where rows are taken one after another.

        Args:
          state: What :meth:`initial_state` or an earlier call returned.
          row_of_z: The round's row of Z, of the state's row shape.

        Returns:
          Row ``state.round_index`` of C^-1 Z, and the next state.

        Raises:
          ValueError: If the mechanism has no more rounds.
        """
        own = dataclasses.replace(state, history=state.history.copy())
        return self._next_row_in_place(own, row_of_z)

    def stream(
        self, rows_of_z: Iterable[np.ndarray], shape: tuple[int, ...], dtype: Any = np.float64
    ) -> Iterator[np.ndarray]:
        """Yields the noise rows of all rows of Z in order, without a copy of the history.

        Args:
          rows_of_z: The rows of Z; each is asked for when its noise row is.
          shape: The shape of a row.
          dtype: The dtype of the noise.

        Yields:
          Row i of C^-1 Z, for i = 0, 1, ....

        Raises:
          ValueError: If there are more rows of Z than the mechanism has rounds.
        """
        # Nobody else ever sees this state, so its history can be updated in place.
        state = self.initial_state(shape, dtype)
        for row_of_z in rows_of_z:
            row, state = self._next_row_in_place(state, row_of_z)
            yield row

    def apply(self, z: np.ndarray) -> np.ndarray:
        """Returns C^-1 Z for a whole Z of shape (n, ...), row by row."""
        z = np.asarray(z)
        dtype = np.result_type(z.dtype, np.float32)
        rows = np.empty(z.shape, dtype)
        for i, row in enumerate(self.stream(z, z.shape[1:], dtype)):
            rows[i] = row
        return rows

    def check_has_round(self, round_index: int) -> None:
        """Raises ValueError if the mechanism has no round of this index, from 0."""
        if round_index >= self.num_rounds:
            raise ValueError(
                f"the mechanism has noise for {self.num_rounds} rounds, and round "
                f"{round_index + 1} was asked for: a factorization for more rounds is needed."
            )

    def _next_row_in_place(
        self, state: NoiseState, row_of_z: np.ndarray
    ) -> tuple[np.ndarray, NoiseState]:
        """What :meth:`next_row` returns; the history passes to the next state and is updated."""
        self.check_has_round(state.round_index)
        row = np.array(row_of_z, dtype=state.history.dtype)
        row, history = self.advance(state.round_index, state.history, row)
        # Arithmetic on arrays without dimensions gives NumPy scalars.
        return np.asarray(row), NoiseState(state.round_index + 1, history)
