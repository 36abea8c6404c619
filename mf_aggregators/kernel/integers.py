"""Clipped updates and rows of noise as integers, free of floating-point errors.

**Updates.** A sum of floats depends on its order and on each of its terms: taking one client out
can move it by more than that client's norm. Here each update is rounded to a grid that no data
determine, multiples of a quantization step, and its L2 norm is bounded after the rounding, in
integers. So one client moves the sum of any cohort, added up in any order and on any number of
machines, by at most the clip norm, in exact arithmetic and not only up to rounding.

The norm that an update is scaled by is itself a sum of integers, squares in units of the largest
entry, so that it depends on no order either: ``tff.dp_query`` clips to the same integers in a
graph, on any number of threads.

**Tensors** of one dtype form a *segment* of a row's coordinates, in which they follow one another
without a gap: first the float32 tensors from coordinate 0, then the float64 tensors from the next
*tile*, which is a range of TILE coordinates. Segments that start at tiles never share one, and
each can be drawn and combined as one flat vector.

With N = C^-1 and its diagonal D, row i of C^-1 Z is D[i] times row i of D^-1 N Z, and D^-1 N is
the *normalised* noising matrix. In units of Z's own step, Z is integer (``draws``), and so are

    w_i = z_i + round(earlier_i),        y_i = (w_i + 2^(c - 1)) >> c,

where ``earlier_i`` is what earlier rounds add, computed in float64: from the rows y of earlier
rounds times 2^c, or from earlier rows of Z. What is added to a sum is y_i, in steps of 2^c
times Z's step times D[i]. It fits into 32 bits, and that is what is kept of a row.

A row does not fit for every Z, but nearly certainly does. If Z were rounded normal numbers, a
number of a row would be a normal number plus roundings, whose sum is at most sqrt(n) times the norm
of the row of N, and 32 bits hold _SPREAD = 20 standard deviations of it. The guarantee would only
suffer if what one of two neighbouring worlds releases made the *other* one overflow. Their rows
differ by at most 5 standard deviations (``draws.LARGEST_SHIFT``), so that a number of
the first would have to be 15 from zero, which has probability 7e-51. In the proof of
``draws`` that is one more reason for r = 1, and negligible beside the others.

Rows of a run that was extended have the steps that it began with, though longer rows would have
coarser ones: then it is enough that 32 bits hold _SPREAD_OF_EXTENSION = 17 standard deviations,
so that it takes 12 in the first world, of probability 4e-33 for each number, where Z itself is
charged 4e-28 for its tails.

Rounding takes no part of the guarantee. Let v_i = w_i + 2^c x_i with x_i the sum of the updates
in the same steps as y_i. Then y_i + x_i = (v_i + 2^(c - 1)) >> c is a function of v_i, and v_i
is z_i plus an integer that follows from the data and from v_1, ..., v_(i - 1). How far one
client moves these integers, with all roundings, is what :class:`Rounding` bounds.

**What roundings take of the noise multiplier, and how much noise makes up.**
Two runs on neighbouring data sets release the same integers (the v_i), round
after round. How far apart are their rows of Z? Write d for differences between the two runs.

*Sums.* x_i is the exact sum of the updates over the step of row i, rounded to an integer. So
d x_i is that of the exact sums to within 1 + f_x in each coordinate, f_x from floats, and zero
where the client changes nothing. In L2 norm, a participation changes the sum by at most
(clip norm + sqrt(d) (1 + f_x) step_i).

*Rows.* From v_i being the same, d w_i = -2^c d x_i exactly, and d y_i = -d x_i. With C1 = C D the
inverse of the normalised noising matrix,

* where rows follow from earlier rows y, d z_i = -2^c (C1 d x)_i - e_i, and e_i is zero wherever
  the y that row i follows from are the same in both runs: with b bands, but for the b rows from
  a participation on;
* where they follow from earlier rows of Z, d z = -2^c C1 d x - C1 e, and e_i may be anything
  in all rows after a participation.

Here e_i is the difference of two roundings to integers of numbers that floats know to within f
each: |e_i| <= 1 + 2 f. So with g the norm of what e passes through (1, or ||C1||), for n rounds of
d coordinates, s the sensitivity of C, and sigma the standard deviation of Z,

    ||d Z|| <= s (clip norm + sqrt(d) (1 + f_x) max step_i) / sigma + g (1 + 2 f) sqrt(d n) STEP

standard deviations, whatever was released before. Then the run is a mu-Gaussian mechanism with mu
the right-hand side (Smith and Thakurta, 2022, for shifts that depend on what was released).

Both terms that are not s clip norm / sigma are known in advance, and :meth:`Rounding.enlarged`
enlarges sigma until the sum is s clip norm / (the sigma that was asked for). The last term does
not shrink with s. It is made up for at the least s of all, that of one participation in the
column of C with the least diagonal entry, so that guarantees hold for what a client really did,
too, and not only for the s of the declared schema. Where groups of clients are sampled, each
participation is a query of its own, of b rows that no other changes, and the norm of its column
takes the place of s; so rows must follow from rows there. Where clients draw for themselves, all
participations of one are a query together, and its accounting charges e once more, row by row.

A run that is extended goes on with the sigma that it began with, which :meth:`Rounding.enlarged`
found for fewer rounds and for another C. :meth:`Rounding.covered` says which sigma that is for the
whole, in real arithmetic: the one that :meth:`Rounding.enlarged` would enlarge to it.

That noise comes from floats takes a further 3e-8: C and the matrix that rows are made with may
be 1e-8 apart (``factorizations.from_matrix``), and have errors of floats besides.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np

from mf_aggregators.kernel import draws, numbers
from mf_aggregators.kernel.draws import PLAIN, STEP, TILE, Engine
from mf_aggregators.kernel.numbers import FloatArray, IntArray, RealArray
from mf_aggregators.kernel.rows import Blocks, NoiseRecursion, strategy_of

# The dtypes in which noise can be computed, in the order of their segments in a row.
NOISE_DTYPES = ("float32", "float64")
# The number of bits of the integers in a row of noise.
_ROW_BITS = 32
# The number of coordinates of rows that are computed at a time, so that temporary arrays stay in a
# processor's cache.
_COORDINATES_AT_ONCE = 2**13
# The number of rows of Z that are combined in one matrix product.
_ROWS_OF_Z_AT_ONCE = 64
# The numbers of standard deviations of an entry of a row that its 32 bits have to hold: for a run,
# and for a run that was extended.
_SPREAD, _SPREAD_OF_EXTENSION = 20.0, 17.0
# A factor that exceeds all floating-point errors in the bounds on sizes of rows.
_SLACK_OF_SIZES = 1.0 + 1e-6
# The largest c that is tried for the step 2^c of rows: no noise is as coarse as this.
_LARGEST_SHIFT = 24
# The default for the most updates that are added up in one sum.
DEFAULT_LARGEST_COHORT = 1 << 22
# The largest share of the noise that may be spent on covering roundings.
_LARGEST_SHARE = 0.1
# Unit roundoff of float64.
_ROUNDOFF = 2.0**-53
_SLACK_OF_FLOATS = 1.0 + 3e-8
_SUM_BITS = 62
# A factor that is smaller than one by more than the floating-point errors of
# :meth:`Rounding.covered`, so that its result is rounded down.
_ROUNDED_DOWN = 1.0 - 1e-14
# The most quantization steps in a clip norm. With this number, the squares of an update's integers
# add up within int64, and each integer fits into int32.
STEPS_PER_CLIP_NORM = 1 << 30
# Upper bound on the relative errors of float64 squares and norms, for any model that fits into a
# machine.
MARGIN = 2.0**-30
# An update counts as zero if no entry is larger than this: quotients of subnormal floats lose
# digits, and processors may take subnormal floats for zero.
LEAST_UNIT = 1e-290
# The least clip norm: with it, an update with no entry above the number before becomes zero steps.
LEAST_NORM = 1e-250
# The number of bits of integers that are added up without a secure sum.
_OPEN_BITS = 64
# Adding this float to a number below 2^51 rounds the number to an integer, which is the difference
# of the bits of the sum and of this float.
_ZERO_OF_INTEGERS = np.float64(1.5 * 2.0**52)
# Squares of at most one, in fixed point, add up below 2 to the power of the first number; the
# second number is the most binary digits of one square, as many as floats have.
_BITS_OF_SQUARES, _MOST_BITS_OF_A_SQUARE = 62, 52


@dataclasses.dataclass(frozen=True)
class Segment:
    """The tensors of one dtype, as a contiguous range of the coordinates of a row.

    Attributes:
      dtype: "float32" or "float64".
      first_tile: The tile at whose first coordinate the segment starts.
      size: The number of coordinates, at least 1.
      positions: The positions of the segment's tensors among the tensors of the row, in order;
        tensors without entries included.
    """

    dtype: str
    first_tile: int
    size: int
    positions: tuple[int, ...]

    @property
    def num_tiles(self) -> int:
        """The number of tiles of the segment, the last of which may be shorter."""
        return -(-self.size // TILE)

    def row_of_z(self, seed: IntArray, row: int, engine: Engine = PLAIN) -> IntArray:
        """Returns the segment's (size,) entries of a row of Z; see ``draws.integers``."""
        return draws.integers(seed, row, self.first_tile * TILE, self.size, engine)


@dataclasses.dataclass(frozen=True)
class RowLayout:
    """The shapes and dtypes of the tensors of one row of noise, in order.

    Attributes:
      shapes: The shape of each tensor.
      dtypes: The dtype in which noise for each tensor is computed: "float32" or "float64".
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]

    def __post_init__(self) -> None:
        if len(self.shapes) != len(self.dtypes) or not {*self.dtypes} <= {*NOISE_DTYPES}:
            found = f"{len(self.shapes)} shapes and {len(self.dtypes)} dtypes, {self.dtypes}"
            raise ValueError(f"a layout has shapes of float32 or float64, found {found}.")

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The row's segments in order, at most one for each dtype and none without entries."""
        found: list[Segment] = []
        first_tile = 0
        for dtype in NOISE_DTYPES:
            positions = tuple(i for i, name in enumerate(self.dtypes) if name == dtype)
            size = sum(math.prod(self.shapes[position]) for position in positions)
            if size:
                found.append(Segment(dtype, first_tile, size, positions))
                first_tile += found[-1].num_tiles
        return tuple(found)

    @property
    def size(self) -> int:
        """The number of entries of all tensors, without the gap before a segment."""
        return sum(math.prod(shape) for shape in self.shapes)

    def tensors(self, flats: Sequence[RealArray]) -> list[RealArray]:
        """Splits the flat vectors of segments into all tensors of the row, in order.

        Tensors without entries are included.

        Args:
          flats: The flat vector of each of ``segments``.

        Returns:
          One array for each of ``shapes``; views of the vectors where they have entries.

        Raises:
          ValueError: If the size of a vector is not that of its segment.
        """
        found = [*map(np.empty, self.shapes, self.dtypes)]
        for segment, flat in zip(self.segments, flats, strict=True):
            if flat.shape != (segment.size,):
                raise ValueError(f"a vector needs shape ({segment.size},), found {flat.shape}.")
            ends = np.cumsum([found[position].size for position in segment.positions])
            for position, part in zip(segment.positions, np.split(flat, ends[:-1]), strict=True):
                found[position] = part.reshape(self.shapes[position])
        return found


@dataclasses.dataclass(frozen=True, eq=False)
class IntegerRows:
    """The recursion for rows of C^-1 Z in integers, and bounds on the sizes of its numbers.

    Attributes:
      recursion: The mechanism's noising matrix.
      shift: c: the step of a row is 2^c times the step of Z.
      largest_row: A bound on the numbers of a row, in steps of Z.
      largest_vectors: (m,) float64: bounds on the numbers of the state vectors, in steps of Z.
    """

    recursion: NoiseRecursion
    shift: int
    largest_row: float
    largest_vectors: FloatArray

    @classmethod
    def of(cls, recursion: NoiseRecursion, first: NoiseRecursion | None = None) -> "IntegerRows":
        """Returns the integer rows of a noising matrix, in the finest steps that 32 bits allow.

        Args:
          recursion: The mechanism's noising matrix.
          first: The noising matrix of the first horizon, with the same first rows as ``recursion``,
            if the run was extended: it keeps the steps that it began with. None otherwise.

        Raises:
          ValueError: If rows may be so much larger than their row of Z that 32 bits do not hold
            them.
        """
        shifts, spread = [*range(1, _LARGEST_SHIFT + 1)], _SPREAD
        if first is not None:
            shifts, spread = [cls.of(first).shift], _SPREAD_OF_EXTENSION
        norms, vectors = recursion.normalised.row_norms()
        row = float(np.max(norms))
        for shift in shifts:
            # Roundings of z, w and y enter later rows as Z does, and add up in absolute value.
            rounding = (2.0**shift + 2.0) * math.sqrt(recursion.num_rounds)
            driven = _SLACK_OF_SIZES * (spread * draws.STANDARD_DEVIATION + rounding)
            if driven * row < 2.0 ** (_ROW_BITS - 1 + shift) - 2.0**shift:
                return cls(recursion, shift, driven * row, driven * vectors)
        why = "the matrix is nearly singular, or the extension is too long"
        raise ValueError(f"rows of noise may be larger than their integers hold: {why}.")

    @property
    def row_to_z(self) -> float:
        """The factor from the units of the rows that a recursion uses to steps of Z."""
        return 1.0 if self.recursion.draws_earlier_rows_of_z else 2.0**self.shift

    @property
    def steps(self) -> FloatArray:
        """(n,) float64: the step of each round's row for Z of variance 1; some may be negative."""
        return self.recursion.diagonal * (2.0**self.shift * STEP)

    def largest_rounding(self) -> float:
        """Returns by how many steps of Z one client may move a number of a row through roundings.

        The bound holds for rows that are made one by one and for rows that are made in blocks.
        """
        every = (None, Blocks.of(self.recursion))
        error = float(np.max([Rounding.of(self, blocks).float_error for blocks in every]))
        # A number of a row has all earlier roundings that the row depends on, each times an entry
        # of C1.
        return _strategy_norms(self.recursion.normalised)[1] * (1.0 + 2.0 * error)

    def next_row(
        self, i: int, history: Sequence[RealArray], z: IntArray, engine: Engine = PLAIN
    ) -> tuple[IntArray, tuple[RealArray, ...]]:
        """Computes the row of a round and the history after the round; no argument changes.

        Args:
          i: The round, from 0.
          history: The history that the call for the round before returned, also for the shorter run
            that this one extends: the state vectors, and then the rows of earlier rounds that this
            round needs, oldest first, each of shape (size,). These are rows of Z if the recursion
            uses earlier rows of Z. Before the first round, state vectors are zero.
          z: (size,) int64: the round's row of Z, in steps of Z.
          engine: How the row is computed.

        Returns:
          The row, (size,) int64 in steps of ``steps``, and the next history, which shares the
          arrays of the rows that are kept.

        Raises:
          ValueError: If the mechanism has no more rounds, or the history is of another mechanism.
        """
        unit = self.recursion.normalised
        vectors = unit.num_state_vectors
        if i >= unit.num_rounds:
            raise ValueError(f"the mechanism has noise for {unit.num_rounds} rounds, not {i + 1}.")
        is_redrawn = unit.draws_earlier_rows_of_z
        # If the run is extended, it needs the first of the last window's rows once more, so this
        # row is kept.
        most = unit.rows_of_z_per_round if is_redrawn else unit.num_earlier_rows
        number, kept = min(i, most - is_redrawn), min(i + 1, most)
        if len(history) < vectors + number:
            needed = f"{vectors + number} rows of earlier rounds, found {len(history)}"
            raise ValueError(f"round {i + 1} needs {needed}: the state belongs to another matrix.")
        rows = [*history[len(history) - number :]]
        row, after = np.empty(len(z), np.int64), np.empty((vectors, len(z)))
        before, transition = history[:vectors], unit.transition(i, i + 1)
        known, of_z = (before, [*rows, z]) if is_redrawn else ([*rows, *before], [z])

        def make(start: int) -> None:
            part = slice(start, start + _COORDINATES_AT_ONCE)
            wide = np.reshape([each[part] for each in known], (len(known), len(z[part])))
            made, after[:, part] = self.block(transition, wide, lambda j: of_z[j][part])
            row[part] = made[0]

        engine.over(make, range(0, len(z), _COORDINATES_AT_ONCE))
        if kept:
            rows.append(z.astype(np.float64) if is_redrawn else row.astype(np.int32))
        return row, (*after, *rows[number - kept + 1 :])

    def block(
        self, transition: FloatArray, known: RealArray, row_of_z: Callable[[int], RealArray]
    ) -> tuple[IntArray, FloatArray]:
        """Computes the rows of a block of rounds, and the state vectors after the block.

        Args:
          transition: The transition of the block, see ``NoiseRecursion.transition``.
          known: (earlier rows + m, size): the rows before the block, in steps of ``steps``, and the
            state vectors at its start.
          row_of_z: Takes j and returns the (size,) row of Z that is j after the first one of the
            block.

        Returns:
          (rows, size) int32 in steps of ``steps``, and (m, size) float64.
        """
        num_rows = len(transition) - self.recursion.num_state_vectors
        is_redrawn = self.recursion.draws_earlier_rows_of_z
        of_known, of_driving = np.split(transition, [len(known)], axis=1)
        wide = known.astype(np.float64, copy=False)
        earlier = (of_known[:num_rows] * self.row_to_z) @ wide
        following = of_known[num_rows:] @ wide
        made = np.empty(earlier.shape, np.int32)
        first = of_driving.shape[1] - num_rows if is_redrawn else 0
        for begin in range(0, first + num_rows if is_redrawn else 0, _ROWS_OF_Z_AT_ONCE):
            weights = of_driving[:, begin : begin + _ROWS_OF_Z_AT_ONCE]
            z = np.array([row_of_z(begin + j) for j in range(weights.shape[1])], np.float64)
            earlier += weights[:num_rows] @ z
            following += weights[num_rows:] @ z
        for j in range(num_rows):
            if not is_redrawn:
                earlier[j] += (of_driving[j, :j] * self.row_to_z) @ made[:j].astype(np.float64)
            made[j] = self.integer_row(row_of_z(first + j), earlier[j])
        if not is_redrawn:
            # Matrix products of a single row take six times as long as plain products.
            product: np.ufunc = np.multiply if num_rows == 1 else np.matmul
            following += product(of_driving[num_rows:], made.astype(np.float64))
        return made, following

    def integer_row(self, z: RealArray, earlier: FloatArray) -> IntArray:
        """Returns a row of noise, (...) int64 in steps of ``steps``, from its row of Z.

        Args:
          z: (...) int64: the round's row of Z, in steps of Z.
          earlier: (...) float64: the part of the row that follows from earlier rows, in steps of Z.
        """
        sums = z + np.rint(earlier).astype(np.int64) + (1 << (self.shift - 1))
        return np.asarray(np.right_shift(sums, self.shift))


@dataclasses.dataclass(frozen=True, eq=False)
class Rounding:
    """Bounds on the rounding errors of the rows of noise, and the noise that makes up for them.

    Attributes:
      rows: The integer rows.
      operator_norm: g of the module's docstring.
      float_error: f: the largest floating-point error in the part of a row that follows from
        earlier rows, in steps of Z.
    """

    rows: IntegerRows
    operator_norm: float
    float_error: float

    @classmethod
    def of(cls, rows: IntegerRows, blocks: Blocks | None = None) -> "Rounding":
        """Returns bounds on the rounding errors of rows of noise.

        Args:
          rows: The integer rows.
          blocks: The blocks in which rows are made; None if rows are made one by one.
        """
        normalised = rows.recursion.normalised
        if blocks is None:
            blocks = Blocks(rows.recursion, np.arange(normalised.num_rounds + 1))
        errors, largest = np.zeros(normalised.num_state_vectors), 0.0
        for block, first in enumerate(blocks.distinct_transitions()):
            # Blocks with equal transitions have equal errors, unless errors add up in state
            # vectors.
            if len(errors) or first == block:
                found, errors = _errors(rows, blocks, block, errors)
                # The NumPy maximum keeps NaN, which Python's ``max`` may drop.
                largest = float(np.maximum(largest, found))
        return cls(rows, math.sqrt(math.prod(_strategy_norms(normalised))), largest)

    def enlarged(self, sigma: float, *, num_parameters: int, largest_cohort: int) -> float:
        """Returns the enlarged standard deviation of Z that makes up for all roundings.

        Args:
          sigma: The standard deviation that real arithmetic would need, in norms of a vector.
          num_parameters: d, the entries of a row.
          largest_cohort: The most vectors in a sum.

        Returns:
          At least ``sigma``, in norms of a vector. A run that was extended keeps the value of its
          first horizon, because noise does not change in the middle of a run.

        Raises:
          ValueError: If roundings would take more than a tenth of the noise, or a sum would
            have too many steps.
        """
        share = self._share(sigma, num_parameters, largest_cohort)
        return _SLACK_OF_FLOATS * sigma / (1.0 - share)

    def covered(self, enlarged: float, *, num_parameters: int, largest_cohort: int) -> float:
        """Returns the sigma that :meth:`enlarged` would enlarge to the given standard deviation.

        Args:
          enlarged: The standard deviation of Z, in norms of a vector.
          num_parameters: As in :meth:`enlarged`.
          largest_cohort: As in :meth:`enlarged`.

        Returns:
          The sigma with which real arithmetic would give the same guarantee, rounded down.

        Raises:
          ValueError: As in :meth:`enlarged`.
        """
        # share(x) is nearly linear in x: k estimates its slope.
        least = enlarged * (1.0 - _LARGEST_SHARE)
        k = self._share(least, num_parameters, largest_cohort) / least
        found = _ROUNDED_DOWN * enlarged / (_SLACK_OF_FLOATS + k * enlarged)
        self._share(found, num_parameters, largest_cohort)
        return found

    def _share(self, sigma: float, num_parameters: int, largest_cohort: int) -> float:
        """Returns the share of noise of standard deviation ``sigma`` that roundings take."""
        steps = np.abs(self.rows.steps)
        least_sensitivity = 1.0 / float(np.max(np.abs(self.rows.recursion.diagonal)))
        # This is an upper bound: enlarged noise has larger steps, so that a sum has fewer of them.
        steps_of_sum = largest_cohort / (sigma * float(np.min(steps)))
        # Comparisons are written so that NaN is refused.
        if not steps_of_sum <= 2.0**_SUM_BITS:
            held = f"noise of {sigma:g} norms and sums of {largest_cohort} updates"
            raise ValueError(f"64 bits cannot hold {held}: use more noise or fewer updates.")
        # The errors of a cast and of a division, and of their rounding to the nearest float.
        float_error_of_sum = 8.0 * _ROUNDOFF * steps_of_sum
        of_sums = math.sqrt(num_parameters) * (1.0 + float_error_of_sum) * float(np.max(steps))
        of_rows = self.operator_norm * (1.0 + 2.0 * self.float_error) * STEP
        of_rows *= math.sqrt(num_parameters * self.rows.recursion.num_rounds)
        share = sigma * (of_sums + of_rows / least_sensitivity)
        if not share <= _LARGEST_SHARE:
            taken = f"{share:.2g} of the noise of {num_parameters} parameters, and 0.1 is allowed"
            raise ValueError(f"rounding could take {taken}: use less noise or a smaller model.")
        return share


def _errors(
    rows: IntegerRows, blocks: Blocks, block: int, errors: FloatArray
) -> tuple[float, FloatArray]:
    """Bounds the floating-point errors of the rows of a block, in steps of Z.

    Args:
      rows: The integer rows.
      blocks: The blocks in which rows are made.
      block: The index of the block.
      errors: (m,) errors of the state vectors at the block's start.

    Returns:
      The largest error of a row, and (m,) errors of the state vectors at the block's end.
    """
    matrix, vectors = blocks.transition(block), len(errors)
    start, end = blocks.rounds(block)
    is_redrawn = rows.recursion.draws_earlier_rows_of_z
    known = matrix.shape[1] - (end - (blocks.first_row_of_z(block) if is_redrawn else start))
    sizes = np.full(matrix.shape[1], float(draws.LARGEST) if is_redrawn else rows.largest_row)
    sizes[: known - vectors] = rows.largest_row
    sizes[known - vectors : known] = rows.largest_vectors
    weights = np.abs(matrix)
    # Upper bound on the relative error of a sum of products, in any order of summation.
    found = (matrix.shape[1] + 4) * _ROUNDOFF * (weights @ sizes)
    found += weights[:, known - vectors : known] @ errors
    return float(np.max(found[: end - start])), found[end - start :]


def _strategy_norms(normalised: NoiseRecursion) -> tuple[float, float]:
    """Returns the largest absolute column sum and row sum of the matrix that roundings pass.

    The matrix is C1 if rows follow from earlier rows of Z, and the identity otherwise. The product
    of the two sums bounds the square of its operator norm.
    """
    if not normalised.draws_earlier_rows_of_z:
        return 1.0, 1.0
    found = strategy_of(normalised, normalised.num_rounds)
    # Upper bound on the errors of the computed columns of C1, added up along a row or a column.
    error = normalised.num_rounds * found.error
    magnitudes = np.abs(found.entries)
    if not found.is_dense:
        # The first column of a Toeplitz matrix, which may be multiplied by diagonal matrices on
        # both sides.
        largest = float(np.sum(magnitudes)) * math.prod(map(np.max, found.scales or ())) + error
        return largest, largest
    by_columns, by_rows = (float(np.max(np.sum(magnitudes, axis=axis))) for axis in (0, 1))
    return by_columns + error, by_rows + error


@dataclasses.dataclass(frozen=True)
class IntegerSums:
    """The sizes of the integers of clipped updates and of their sums.

    Attributes:
      largest_cohort: The most updates in a sum.
      bits: The width of a sum's integers, one bit of which is the sign.
      is_secure: Whether a secure sum adds them up, modulo 2^bits.

    Raises:
      ValueError: If updates of ``largest_cohort`` clients cannot be added up in ``bits`` bits, or
        ``bits`` is above 64.
    """

    largest_cohort: int = DEFAULT_LARGEST_COHORT
    bits: int = _OPEN_BITS
    is_secure: bool = False

    def __post_init__(self) -> None:
        numbers.set_positive_integers(self, "largest_cohort", "bits")
        object.__setattr__(self, "is_secure", bool(self.is_secure))
        if self.bits > _OPEN_BITS or self.steps_per_clip_norm < 1:
            cohort = f"the updates of {self.largest_cohort} clients"
            raise ValueError(f"{cohort} cannot be added up in {self.bits} bits: use fewer clients.")

    @property
    def steps_per_clip_norm(self) -> int:
        """The number of quantization steps in a clip norm: updates are multiples of one step.

        It is the largest number, up to 2^30, with which sums of ``largest_cohort`` updates cannot
        overflow.
        """
        most = ((1 << (self.bits - 1)) - 1) // self.largest_cohort
        return min(most, STEPS_PER_CLIP_NORM)


def units_of_squares(num_entries: int) -> float:
    """Returns 2^k: squares are rounded up to multiples of 2^-k, so that they add up in int64.

    Args:
      num_entries: The number of squares that are added up, each at most 1.
    """
    bits = _BITS_OF_SQUARES - max(num_entries, 1).bit_length()
    return 2.0 ** min(bits, _MOST_BITS_OF_A_SQUARE)


def clip_to_grid(
    update: Sequence[RealArray],
    clip_norm: float,
    steps_per_clip_norm: int,
    into: list[IntArray] | None = None,
    engine: Engine = PLAIN,
) -> list[IntArray]:
    """Clips arrays to a joint L2 norm of ``clip_norm``, and rounds them to quantization steps.

    Entries are rounded to the nearest step. If the norm would then exceed the clip norm, they are
    rounded towards zero instead, which never lengthens an update. The comparison is one of
    integers: it uses the sum of squares of the rounded entries.

    Args:
      update: Arrays of floats or integers.
      clip_norm: Above zero; the step is ``clip_norm / steps_per_clip_norm``.
      steps_per_clip_norm: Steps in a clip norm, at most ``STEPS_PER_CLIP_NORM``.
      into: Contiguous int64 arrays of the same shapes, which are filled and returned; None makes
        new arrays.
      engine: How the update is computed: threads and compiled functions.

    Returns:
      The arrays as int64, in steps, whose squares add up to at most ``steps_per_clip_norm ** 2``;
      all zeros if any entry is NaN or infinite.

    Raises:
      ValueError: If an array of ``into`` is not int64 or not contiguous.
    """
    steps = into or [np.empty(np.shape(array), np.int64) for array in update]
    # A piece of an array that is not contiguous is a copy, which would not be written back.
    if not all(each.dtype == np.int64 and each.flags.c_contiguous for each in steps):
        raise ValueError("steps must be written into contiguous arrays of int64.")
    pieces = [*zip(engine.pieces(update), engine.pieces(steps), strict=True)]
    unit, scale, _ = scaling(update, clip_norm, float(steps_per_clip_norm), engine)

    def in_steps(piece: tuple[RealArray, RealArray], *, is_shorter: bool) -> int:
        found = piece[1]
        (engine.to_grid or _to_grid)(piece[0], unit, scale, is_shorter, found)
        largest = max(int(found.max()), -int(found.min()))
        if largest > steps_per_clip_norm:
            return largest**2
        if largest**2 * len(found) < 1 << (_OPEN_BITS - 1):
            return int(np.einsum("i,i", found, found))
        # The sum of squares may not fit into 64 bits, but sums of products of halves do.
        halves = np.array([np.right_shift(found, 16), np.bitwise_and(found, 0xFFFF)])
        (high, mixed), (_, low) = np.einsum("ik,jk", halves, halves).tolist()
        return int((high << 32) + (mixed << 17) + low)

    for is_shorter in (False, True) if unit else ():
        squares = engine.over(functools.partial(in_steps, is_shorter=is_shorter), pieces)
        if sum(squares) <= steps_per_clip_norm**2:
            return steps
    # If the update is still too long, it becomes zero, so the proof does not depend on sizes of
    # roundings.
    for array in steps:
        array[...] = 0
    return steps


def scaling(
    update: Sequence[RealArray], clip_norm: float, unit_norm: float, engine: Engine = PLAIN
) -> tuple[float, float, bool]:
    """Returns the unit that divides entries, and the scale that multiplies them, for clipping.

    Args:
      update: Arrays of floats or integers.
      clip_norm: Above zero: a larger norm becomes this one.
      unit_norm: The norm that an update of norm ``clip_norm`` has after scaling, but for
        floating-point errors.
      engine: How the update is computed.

    Returns:
      The unit, which is zero if an entry is NaN or infinite; the scale; and whether the norm is at
      most ``clip_norm``.
    """
    pieces = engine.pieces(update)
    # If an entry is NaN, the maximum and the minimum are NaN.
    ends = engine.over(lambda each: (float(each.max()), -float(each.min())), pieces)
    if not all(map(math.isfinite, itertools.chain.from_iterable(ends))):
        return 0.0, 0.0, True
    largest = max(itertools.chain.from_iterable(ends), default=0.0)
    unit = largest if largest > LEAST_UNIT else 1.0
    units = units_of_squares(sum(map(np.size, pieces)))
    squares = functools.partial(engine.squares or _squares, unit=unit, units=units)
    norm_in_units = math.sqrt(float(sum(engine.over(squares, pieces))) / units)
    # If the norm of an update is at most the clip norm, the update is not scaled down.
    is_within = unit * norm_in_units <= clip_norm
    scale = unit * (unit_norm / clip_norm) if is_within else unit_norm / max(norm_in_units, 1.0)
    return unit, scale, is_within


def _squares(entries: RealArray, unit: float, units: float) -> int:
    """Returns the sum of ceil(units * (entry / unit)^2) over all entries, an exact integer."""
    wide = np.divide(entries, unit, dtype=np.float64)
    np.square(wide, out=wide)
    wide *= units
    # Floats from 2^52 to 2^53 are integers, and differ by as much as their bits do.
    np.add(np.ceil(wide, out=wide), 2.0**52, out=wide)
    return (int(wide.view(np.int64).sum()) - len(wide) * (1075 << 52)) % 2**64


def _to_grid(
    entries: RealArray, unit: float, scale: float, is_short: bool, into: RealArray
) -> None:
    """Scales entries and fills ``into`` with integers: nearest ones, or rounded towards zero.

    An entry beyond 2^51 steps becomes another integer of at least that size, and the caller refuses
    it.
    """
    # The steps take the place of the floats, so that no memory is taken for either.
    wide = np.divide(entries, unit, out=into.view(np.float64), dtype=np.float64)
    wide *= scale
    if is_short:
        # Entries are made smaller by more than all floating-point errors so far, then rounded
        # towards zero.
        np.trunc(wide * (1.0 - MARGIN), out=wide)
    # Adding this float rounds the sum to an integer, because floats of this size are integers.
    wide += _ZERO_OF_INTEGERS
    np.subtract(into, _ZERO_OF_INTEGERS.view(np.int64), out=into)
