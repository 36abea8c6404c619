"""What all recursions of correlated noise have in common.

Row i of C^-1 Z is needed in round i and never before, and no mechanism needs a later row of Z
for it. A recursion says how the rows follow from one another, and NumPy (here) and the
TensorFlow graphs that TFF runs (``tff.tensor_streams``) ask it.

Two kinds of memory are told apart. Earlier rows of Z can be drawn again from their seeds, which
costs time and no state; everything else (rows of the noise, state vectors) has to be kept
between rounds.

Row i of C^-1 Z is a multiple of Z[i], by the diagonal of C^-1, and what earlier rounds add. All
arithmetic is that of a *normalised* recursion, whose diagonal is one, so that

    row i = Z[i] + earlier(i, history),

and rows are multiplied by the diagonal after that.

Any recursion is linear, so the rows of rounds s to e - 1 together are

    rows = Z + W_earlier * (rows before s) + W_state * (state vectors at s) + W * (what drives),

with the rows of Z or, where rows follow from rows, the rows themselves as what drives, each row
by those before it alone. The state vectors at e follow in the same way. These weights are small
matrices that depend on the recursion alone; coordinates of the model are independent of one
another.

**Blocks.** Row by row, a recursion reads all that it keeps of earlier rounds in every round: with b
bands, b - 1 rows of the model's size. In a block (:class:`Blocks`), whose rows are one matrix
product, what is kept is read once for all of them. Blocks start small and double (rounds 0, 1,
2 to 3, 4 to 7, ...) up to their largest size, so that no round has to wait for a whole large block,
and so that each block can be made while the one before it is used.
"""

import abc
import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from mf_aggregators import validation
from mf_aggregators.arrays import FloatArray

# A block of rows that draws each row of Z once: larger blocks read what is kept less often, and
# hold more rows.
_ROWS_PER_BLOCK = 64
# Columns of C^-1 that are computed at once.
_COLUMNS = 512
# Squares of entries are far from where floats end or lose digits.
_SENSITIVITIES = (1e-100, 1e100)
# Tables of a recursion up to this size are put into a graph.
_LARGEST_CONSTANT_IN_BYTES = 8 << 20


@dataclasses.dataclass(frozen=True, eq=False)
class NoiseState:
    """Where a stream of noise rows stands.

    Attributes:
      round_index: The round that the next row is for, from 0.
      history: What the normalised recursion still needs of earlier rounds, (k, ...) float64:
        rows of the noise or of Z in a ring, and after them state vectors. A value, as the rest of
        the state: :meth:`NoiseRecursion.next_row` leaves it as it is.
    """

    round_index: int
    history: FloatArray


class NoiseRecursion(abc.ABC):
    """How the rows of C^-1 Z follow from one another.

    Each kind of matrix is a subclass. ``earlier`` and ``following`` make the rows one by one;
    ``block_transition`` is the linear map that makes the rows of several rounds at once.

    Constructors copy their arrays and make them read-only, so that a recursion stays the one that
    was checked. They raise ValueError for a number that is not finite, also in entries that do not
    count: NumPy may leave such an entry out, and a graph multiplies it by zero, which gives NaN.
    """

    # Whether rows of the noise need rows of Z from before their round, and follow from them
    # alone. All others follow from the rows of the noise before them.
    draws_earlier_rows_of_z: ClassVar[bool] = False

    def _freeze(self, name: str, shape: tuple[int | None, ...], dtype: Any = np.float64) -> None:
        """Replaces a field of a new recursion by a checked, read-only array of its numbers.

        Args:
          name: The field.
          shape: Its shape; None for any length.
          dtype: float64, or int64 for indices.

        Raises:
          ValueError: If it has another shape, or a number that is not finite or no index.
        """
        given = getattr(self, name)
        with np.errstate(invalid="ignore"):
            array = given if _is_read_only(given, dtype) else np.array(given, dtype=dtype)
        label = f"{name} of {type(self).__name__}"
        if len(array.shape) != len(shape) or any(
            wanted not in (None, found) for wanted, found in zip(shape, array.shape, strict=True)
        ):
            wanted_shape = ", ".join("any" if length is None else str(length) for length in shape)
            raise ValueError(f"{label} must have shape ({wanted_shape}), found {array.shape}.")
        if not np.all(np.isfinite(array)):
            raise ValueError(
                f"{label} must be finite in all its entries, those that no row needs included."
            )
        if array.dtype.kind == "i" and not np.array_equal(array, given):
            raise ValueError(f"{label} must be integers.")
        array.setflags(write=False)
        object.__setattr__(self, name, array)

    def _clear_lags_before_first_round(self, name: str) -> None:
        """Sets entries of a frozen table to zero whose lags reach before the first round.

        Args:
          name: The field: (n, b), with entry [i, t] for round i and lag t; or (1, b) or (b,) for
            all rounds.
        """
        array = getattr(self, name)
        if array.ndim == 2 and len(array) > 1:
            first = array[: array.shape[1]]
            beyond = first[np.arange(len(first))[:, np.newaxis] < np.arange(array.shape[1])]
        else:
            beyond = array[..., self.num_rounds :]
        if not np.any(beyond):
            return
        cleared = array.copy()
        if array.ndim == 2 and len(array) > 1:
            cleared[: array.shape[1]] = np.tril(first)
        else:
            cleared[..., self.num_rounds :] = 0.0
        cleared.setflags(write=False)
        object.__setattr__(self, name, cleared)

    def _freeze_num_rounds(self, num_rounds: Any) -> None:
        """Replaces the field ``num_rounds`` of a new recursion by a checked int."""
        object.__setattr__(
            self, "num_rounds", validation.positive_integer(num_rounds, "num_rounds")
        )

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
    def bytes_per_parameter(self) -> int:
        """The bytes of state that each model parameter needs between rounds.

        Rows are integers of four bytes, and state vectors are float64.
        """
        return 4 * self.num_earlier_rows + 8 * self.num_state_vectors

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

    @property
    @abc.abstractmethod
    def diagonal(self) -> FloatArray:
        """(n,) float64: the diagonal of C^-1, without a zero."""

    @property
    def is_toeplitz(self) -> bool:
        """Whether the normalised recursion is known to be the same in all rounds."""
        return False

    @abc.abstractmethod
    def divided_by(self, divisor: float) -> "NoiseRecursion":
        """Returns the recursion of C / divisor."""

    @functools.cached_property
    def normalised(self) -> "NoiseRecursion":
        """The recursion of the rows of C^-1 Z over the diagonal of C^-1.

        Raises:
          ValueError: If the diagonal has a zero: C would have no inverse.
        """
        if not np.all(self.diagonal):
            raise ValueError("the diagonal of C^-1 must have no zero: C has an inverse.")
        # What overflows is refused by the constructor of the normalised recursion.
        with np.errstate(all="ignore"):
            return self._with_unit_diagonal()

    @abc.abstractmethod
    def _with_unit_diagonal(self) -> "NoiseRecursion":
        """Returns the recursion of the rows over the diagonal."""

    @abc.abstractmethod
    def earlier(self, i: int, history: FloatArray) -> FloatArray:
        """Returns what row i of a normalised recursion is beside Z[i], (...) float64.

        Args:
          i: The round, from 0, of those that there are.
          history: As in ``NoiseState``.
        """

    @abc.abstractmethod
    def following(
        self, i: int, history: FloatArray, row_of_z: FloatArray, row: FloatArray
    ) -> FloatArray:
        """Returns the next history of a normalised recursion; may change the one that is given.

        Args:
          i: The round, from 0, of those that there are.
          history: As in ``NoiseState``.
          row_of_z: Row i of Z, (...).
          row: Row i of the noise, (...).
        """

    @abc.abstractmethod
    def block_transition(self, start: int, end: int) -> FloatArray:
        """Returns the weights of rounds ``start`` to ``end - 1`` of a normalised recursion.

        Args:
          start: The first round.
          end: The round after the last.

        Returns:
          (end - start + m, earlier rows + m + driving rows) float64 for m state vectors. First what
          the rows are beside the row of Z of their round, and then the state vectors at ``end``:
          from the last ``num_earlier_rows`` rows before ``start`` (oldest first; fewer in the
          first rounds), the state vectors at ``start``, and what drives them. That is the rows of
          Z from ``first_row_of_z(start)`` on if ``draws_earlier_rows_of_z``, and else the
          block's own rows. No row has a weight for itself or for a later one.
        """

    def block_signature(self, start: int, end: int) -> object:
        """Returns what is equal for blocks that are known to have equal weights."""
        return "rounds", start, end

    def noising_matrix(self) -> FloatArray:
        """Returns C^-1 as a dense (n, n) float64 array."""
        return np.tril(self.apply(np.eye(self.num_rounds)))

    def row_norms(self) -> FloatArray:
        """Returns the (n,) L2 norms of the rows of C^-1; infinite where they are beyond floats."""
        return np.asarray(np.abs(self.diagonal) * self.normalised._normalised_row_norms())

    def _normalised_row_norms(self) -> FloatArray:
        """The (n,) norms of the rows of a normalised recursion."""
        if self.is_toeplitz:
            # Every row has what those before it have, and one number more.
            return np.sqrt(np.cumsum(np.square(self.apply(np.eye(self.num_rounds, 1)[:, 0]))))
        squares = np.zeros(self.num_rounds)
        for first in range(0, self.num_rounds, _COLUMNS):
            columns = np.eye(self.num_rounds, min(_COLUMNS, self.num_rounds - first), -first)
            squares += np.sum(np.square(self.apply(columns)), axis=1)
        return np.sqrt(squares)

    def largest_row_norm(self) -> float:
        """Returns the largest L2 norm of the rows of C^-1."""
        return float(np.max(self.row_norms()))

    def largest_vector_norms(self) -> FloatArray:
        """Returns (m,) bounds on the L2 norms of a normalised recursion's state vectors."""
        return np.zeros(self.num_state_vectors)

    def scaled_to_sensitivity_one(self, sensitivity: float) -> "NoiseRecursion":
        """Returns the recursion of C / sensitivity: every scaling of C gives the same run.

        Args:
          sensitivity: The sensitivity of C, from 1e-100 to 1e100.

        Raises:
          ValueError: If the sensitivity is another number: it was computed from squares, which
            floats do not hold.
        """
        least, largest = _SENSITIVITIES
        if not least <= sensitivity <= largest:
            raise ValueError(
                f"a strategy matrix of sensitivity {sensitivity:g} cannot be scaled to sensitivity "
                f"1: use one between {least:g} and {largest:g}."
            )
        # As in ``normalised``.
        with np.errstate(all="ignore"):
            return self.divided_by(sensitivity)

    def initial_state(self, shape: tuple[int, ...]) -> NoiseState:
        """Returns the state before the first round, for rows of the given shape."""
        rows = self.floats_per_parameter
        if self.draws_earlier_rows_of_z:
            # NumPy's stream is given its rows of Z and cannot draw them again.
            rows += self.rows_of_z_per_round
        return NoiseState(0, np.zeros((rows, *shape)))

    def next_row(self, state: NoiseState, row_of_z: FloatArray) -> tuple[FloatArray, NoiseState]:
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
        return self.next_row_in_place(own, row_of_z)

    def stream(
        self, rows_of_z: Iterable[FloatArray], shape: tuple[int, ...]
    ) -> Iterator[FloatArray]:
        """Yields the noise rows of all rows of Z in order, without a copy of the history.

        Args:
          rows_of_z: The rows of Z; each is asked for when its noise row is.
          shape: The shape of a row.

        Yields:
          Row i of C^-1 Z, float64, for i = 0, 1, ....

        Raises:
          ValueError: If there are more rows of Z than the mechanism has rounds.
        """
        # Nobody else ever sees this state, so its history can be updated in place.
        state = self.initial_state(shape)
        for row_of_z in rows_of_z:
            row, state = self.next_row_in_place(state, row_of_z)
            yield row

    def apply(self, z: FloatArray) -> FloatArray:
        """Returns C^-1 Z for a whole Z of shape (n, ...), row by row, in real arithmetic.

        It is computed in float64 and has the dtype of Z, or float32 for integers.
        """
        z = np.asarray(z)
        rows = np.empty(z.shape, np.result_type(z.dtype, np.float32))
        for i, row in enumerate(self.stream(z, z.shape[1:])):
            rows[i] = row
        return rows

    def check_has_round(self, round_index: int) -> None:
        """Raises ValueError if the mechanism has no round of this index, from 0."""
        if round_index >= self.num_rounds:
            raise ValueError(
                f"the mechanism has noise for {self.num_rounds} rounds, and round "
                f"{round_index + 1} was asked for: a factorization for more rounds is needed."
            )

    def next_row_in_place(
        self, state: NoiseState, row_of_z: FloatArray
    ) -> tuple[FloatArray, NoiseState]:
        """Returns what :meth:`next_row` does; the history passes to the next state.

        Args:
          state: As there; of no use afterwards.
          row_of_z: As there.
        """
        i = state.round_index
        self.check_has_round(i)
        z = np.array(row_of_z, np.float64)
        row = z + self.normalised.earlier(i, state.history)
        history = self.normalised.following(i, state.history, z, row)
        return np.asarray(self.diagonal[i] * row), NoiseState(i + 1, history)


def _is_read_only(given: Any, dtype: Any) -> bool:
    """Whether an array is of a type and nobody can write into it, so that it needs no copy."""
    if type(given) is not np.ndarray or given.dtype != dtype:
        return False
    while type(given) is np.ndarray:
        if given.flags.writeable:
            return False
        given = given.base
    return given is None


@dataclasses.dataclass(frozen=True, eq=False)
class Blocks:
    """The blocks in which the rows of a recursion are made.

    Attributes:
      recursion: The recursion.
      starts: (number of blocks + 1,) int64: block k has the rounds ``starts[k]`` to
        ``starts[k + 1] - 1``; the last entry is the number of rounds.
    """

    recursion: NoiseRecursion
    starts: FloatArray

    @classmethod
    def of(cls, recursion: NoiseRecursion, plans: Sequence[int] = ()) -> "Blocks":
        """Returns the blocks in which the rows of a recursion are made.

        Args:
          recursion: The recursion.
          plans: The rounds of the plans that were extended to this one, increasing. A block ends
            with each of them, so that rows are products of the same shapes as before.

        Returns:
          A function of the arguments alone, so that a run that is resumed elsewhere makes the
          same rows.
        """
        largest = recursion.rows_per_block
        starts = [0]
        for end in (*plans, recursion.num_rounds):
            begin = starts[-1]
            while starts[-1] < min(end, begin + largest):
                size = min(largest, max(1, starts[-1] - begin))
                starts.append(min(end, starts[-1] + size))
            if starts[-1] < end:
                # All later blocks are of one size.
                starts += [*range(starts[-1] + largest, end, largest), end]
        return cls(recursion, np.array(starts, dtype=np.int64))

    @property
    def num_blocks(self) -> int:
        """The number of blocks."""
        return len(self.starts) - 1

    @property
    def largest_block(self) -> int:
        """The rows of the largest block."""
        return int(np.max(np.diff(self.starts)))

    @property
    def rows_kept(self) -> int:
        """The rows that are needed at any time: for the block in use and for the next one."""
        return max(self.largest_block, self.recursion.num_earlier_rows) + self.largest_block

    def rounds(self, block: int) -> tuple[int, int]:
        """Returns the first round of a block and the one after its last."""
        return int(self.starts[block]), int(self.starts[block + 1])

    def num_earlier_rows(self, block: int) -> int:
        """Returns how many rows before a block its weights are for."""
        return min(self.recursion.num_earlier_rows, int(self.starts[block]))

    def first_row_of_z(self, block: int) -> int:
        """Returns the first row of Z that a block needs; the last one is that of its last row."""
        return self.recursion.first_row_of_z(int(self.starts[block]))

    def weights(self, block: int) -> FloatArray:
        """Returns the weights of a block, see ``NoiseRecursion.block_transition``."""
        return self.recursion.normalised.block_transition(*self.rounds(block))

    def distinct_weights(self) -> FloatArray:
        """Returns, for each block, the first block that is known to have the same weights.

        Matrices that are the same in all rounds, or repeat themselves, need few weights.

        Returns:
          (number of blocks,) int64.
        """
        first_of: dict[object, int] = {}
        signatures = (
            self.recursion.normalised.block_signature(*self.rounds(block))
            for block in range(self.num_blocks)
        )
        return np.array(
            [first_of.setdefault(signature, block) for block, signature in enumerate(signatures)]
        )
