"""Rows of noise as integers, so that what is released depends on no rounding of floats.

With N = C^-1 and its diagonal D, row i of C^-1 Z is D[i] times row i of the *unit* recursion
D^-1 N. In units of Z's own step, Z is integer (``rows_of_z``), and so are

    w_i = z_i + round(earlier_i),        y_i = (w_i + 2^(c - 1)) >> c,

where ``earlier_i`` is what earlier rounds add, computed in float64: from the rows y of earlier
rounds times 2^c, or from earlier rows of Z. What is added to a sum is y_i, in steps of 2^c
times Z's step times D[i]. It fits into 32 bits, and that is what is kept of a row.

That it fits does not hold for each Z, but with near certainty. If Z were rounded normal numbers, a
number of a row would be a normal number and roundings, whose sum is at most sqrt(n) times the norm
of the row of N, and 32 bits hold _SPREAD = 20 standard deviations of it. For the guarantee, what
counts is that the *other* one of two neighbouring worlds overflows at what one of them releases:
their rows differ by at most 5 standard deviations (``discrete_gaussian.LARGEST_SHIFT``), so that
it takes 15 in the first, of probability 7e-51 for each number. In the proof of
``discrete_gaussian`` that is one more reason for r = 1, and nothing beside the others.

Rows of a run that was extended have the steps that it began with, though longer rows would have
coarser ones: then it is enough that 32 bits hold _SPREAD_OF_EXTENSION = 17 standard deviations,
so that it takes 12 in the first world, of probability 4e-33 for each number, where Z itself is
charged 4e-28 for its tails.

Rounding takes no part of the guarantee. Let v_i = w_i + 2^c x_i with x_i the sum of the updates
in the same steps as y_i. Then y_i + x_i = (v_i + 2^(c - 1)) >> c is a function of v_i, and v_i
is z_i plus an integer that follows from the data and from v_1, ..., v_(i - 1). How far one
client moves these integers, with all roundings, is what ``rounding`` bounds.
"""

import dataclasses
import math

import numpy as np

from mf_aggregators.noise import discrete_gaussian
from mf_aggregators.noise.recursions import NoiseRecursion, NoiseState
from mf_aggregators.noise.rows_of_z import STEP

# Of the integers that rows consist of.
ROW_BITS = 32
# Coordinates whose temporaries stay in a processor's cache.
_PIECE = 2**13
# Standard deviations that no number of a row exceeds.
_SPREAD, _SPREAD_OF_EXTENSION = 20.0, 17.0
# More than all errors of floats in the sizes of a recursion.
_SLACK = 1.0 + 1e-6
# No noise is as coarse as this.
_LARGEST_SHIFT = 24


@dataclasses.dataclass(frozen=True, eq=False)
class IntegerRows:
    """A recursion whose rows are integers.

    Attributes:
      recursion: The mechanism's recursion.
      shift: c: rows have steps of 2^c times those of Z.
      largest_row: What bounds the numbers of a row, in steps of Z.
      largest_vectors: (m,) float64: what bounds the state vectors, in steps of Z.
      first: The rows of the plan that an extended run began with, which these continue; None for
        rows that continue none.
    """

    recursion: NoiseRecursion
    shift: int
    largest_row: float
    largest_vectors: np.ndarray
    first: "IntegerRows | None" = None

    @classmethod
    def of(cls, recursion: NoiseRecursion) -> "IntegerRows":
        """Returns the rows of a recursion, in the finest steps that 32 bits are enough for.

        Args:
          recursion: The mechanism's recursion.

        Raises:
          ValueError: If rows may be so large beside their row of Z that 32 bits do not hold them.
        """
        for shift in range(1, _LARGEST_SHIFT + 1):
            found = cls._of_shift(recursion, shift, _SPREAD)
            if found is not None:
                return found
        raise ValueError(
            "rows of this mechanism's noise may be more than a million times as large as a row of "
            "Z, beyond what the integers of the noise hold: the matrix is nearly singular."
        )

    @classmethod
    def continuing(cls, first: NoiseRecursion, recursion: NoiseRecursion) -> "IntegerRows":
        """Returns the rows of a run that was extended, in the steps that it began with.

        Args:
          first: The recursion of the plan that the run began with.
          recursion: That of the whole, whose first rows are those of ``first``.

        Raises:
          ValueError: If rows may be so large beside their row of Z that 32 bits do not hold them.
        """
        rows = cls.of(first)
        found = cls._of_shift(recursion, rows.shift, _SPREAD_OF_EXTENSION)
        if found is None:
            raise ValueError(
                f"rows of noise of {recursion.num_rounds} rounds may be larger than the integers "
                f"hold that the run began with, whose step was chosen for {first.num_rounds} "
                "rounds: extend it by less, or start a new run."
            )
        return dataclasses.replace(found, first=rows)

    @classmethod
    def _of_shift(
        cls, recursion: NoiseRecursion, shift: int, spread: float
    ) -> "IntegerRows | None":
        """The rows in steps of 2^shift, if 32 bits hold so many standard deviations of them."""
        unit = recursion.unit
        row, vectors = unit.largest_row_norm(), unit.largest_vector_norms()
        # Roundings of z, w and y drive the recursion as Z does, by a sum of absolute values.
        rounding = (2.0**shift + 2.0) * math.sqrt(recursion.num_rounds)
        driven = _SLACK * (spread * discrete_gaussian.STANDARD_DEVIATION + rounding)
        if driven * row < 2.0 ** (ROW_BITS - 1 + shift) - 2.0**shift:
            return cls(recursion, shift, driven * row, driven * vectors)
        return None

    @property
    def unit(self) -> NoiseRecursion:
        """The unit recursion."""
        return self.recursion.unit

    @property
    def row_to_z(self) -> float:
        """What the numbers that rows follow from are multiplied by, to be in steps of Z."""
        return 1.0 if self.unit.draws_earlier_rows_of_z else 2.0**self.shift

    @property
    def steps(self) -> np.ndarray:
        """(n,) float64: the step of each round's row, at unit variance of Z; some may be < 0."""
        return self.recursion.diagonal * (2.0**self.shift * STEP)

    def initial_state(self, size: int) -> NoiseState:
        """Returns the state before the first round, for rows of a number of entries."""
        state = self.unit.initial_state((size,))
        if self.unit.num_state_vectors or self.unit.draws_earlier_rows_of_z:
            return state
        return dataclasses.replace(state, history=state.history.astype(np.int32))

    def next_row(self, state: NoiseState, z: np.ndarray) -> tuple[np.ndarray, NoiseState]:
        """Returns the row of the state's round and the state after it; no argument changes.

        Args:
          state: What :meth:`initial_state` or an earlier call returned.
          z: (size,) int64: the round's row of Z, in its steps.

        Returns:
          (size,) int64 row in steps of ``steps``, and the next state.

        Raises:
          ValueError: If the mechanism has no more rounds.
        """
        own = dataclasses.replace(state, history=state.history.copy())
        return self.next_row_in_place(own, z)

    def next_row_in_place(self, state: NoiseState, z: np.ndarray) -> tuple[np.ndarray, NoiseState]:
        """Returns what :meth:`next_row` does; the history passes to the next state.

        Args:
          state: As there; of no use afterwards.
          z: As there.
        """
        i, history = state.round_index, state.history
        self.recursion.check_has_round(i)
        row = np.empty(len(z), np.int64)
        for start in range(0, len(z), _PIECE):
            piece = slice(start, start + _PIECE)
            before = history[:, piece]
            earlier = np.rint(self.unit.earlier(i, before) * self.row_to_z).astype(np.int64)
            row[piece] = (z[piece] + earlier + (1 << (self.shift - 1))) >> self.shift
            history[:, piece] = self.unit.following(i, before, z[piece], row[piece])
        return row, NoiseState(i + 1, history)
