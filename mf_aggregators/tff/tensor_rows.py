"""Rows of Z, rows of noise and streams of rows, as TensorFlow graphs.

Random bits become integers of a wide discrete Gaussian, and these the rows of Z that
``kernel.draws`` defines. A row of noise follows from a row of Z and from earlier rounds, as
``kernel.integers.IntegerRows`` says: earlier rows of Z are drawn again from their seeds, and
everything else is the history, int32 rows or float64 state vectors. A step works on one tile of
coordinates, whose tensors fit into a processor's cache.

A stream has a row for each round, over any structure of tensors. Its state says which row is next.
The history is a part of the state (:class:`RowsInState`), or is in files (``rows_on_disk``).
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import tensorflow as tf

from mf_aggregators.kernel import draws
from mf_aggregators.kernel.draws import (
    FIRST_TIE_BLOCK,
    TIE_BLOCKS_PER_TILE,
    TIE_WORDS,
    TILE,
    WORDS_PER_BLOCK,
    WORDS_PER_COORDINATE,
)
from mf_aggregators.kernel.integers import IntegerRows, RowLayout, Segment
from mf_aggregators.kernel.numbers import FloatArray, IntArray
from mf_aggregators.kernel.rows import Blocks, NoiseRecursion
from mf_aggregators.tff import processes
from mf_aggregators.tff.processes import NoiseState

if TYPE_CHECKING:
    from mf_aggregators.tff.rows_on_disk import RowsOnDisk

# The message that refuses a state with a fingerprint that the process does not accept.
OTHER_PROCESS = (
    "This state belongs to another mechanism, other options (clip norm, clients per round, storage "
    "of noise, sums, model) or another version: its rows of noise are not those of this process. "
    "Continue with the process that made it, or start a new run from a fresh state. (States of "
    "version 2 and before name no mechanism, and are all refused.)"
)
# The constant at the beginning of ChaCha20's state, and the number of its double rounds.
_CHACHA_CONSTANTS = np.frombuffer(b"expand 16-byte k", "<u4")
_DOUBLE_ROUNDS = 10
# Up to this number of blocks, calling TensorFlow operations takes longer than their arithmetic.
_FEW_BLOCKS = 2**10
# The mask for the bits of a random word, or of a table entry, that hold a column or an alias.
_COLUMN_MASK = 2**draws.COLUMN_BITS - 1
# The number of rows of Z that are drawn in parallel, each with some megabytes of temporary memory.
_PARALLEL_ROWS = 4
_PARALLEL_TILES = 4
# The number of rows of Z that are combined in one matrix product.
_GROUP = 64
# The number of blocks of further words that are drawn with each tile: enough for 14 ties, and a
# tile has three on average. If there are more ties, more blocks are drawn.
_TIE_BLOCKS = 8
_BLOCKS_PER_TILE = WORDS_PER_COORDINATE * TILE // WORDS_PER_BLOCK


def chacha20(
    seed: tf.Tensor, row: tf.Tensor, *ranges: tuple[tf.Tensor, tf.Tensor | int]
) -> list[tf.Tensor]:
    """Returns blocks of random words of a row, by the stream cipher ChaCha20.

    Args:
      seed: (2,) int64.
      row: int64 scalar.
      *ranges: Pairs of a first block, int64 scalar, and a number of blocks: a Python integer or
        an int32 scalar. All ranges are computed at once, which costs no more than one of their
        size.

    Returns:
      For each range (blocks, 16) uint32.
    """
    counts = [count for _, count in ranges]
    numbers = tf.concat(
        [first + tf.range(tf.cast(count, tf.int64)) for first, count in ranges], axis=0
    )
    size = numbers.shape.num_elements()
    # The only blocks with a size that is not known here are those for ties, and they are few.
    blocks = _chacha20_of_numbers(size is None or size <= _FEW_BLOCKS)(seed, row, numbers)
    blocks.set_shape([size, WORDS_PER_BLOCK])
    return tf.split(blocks, counts) if len(counts) > 1 else [blocks]


@functools.cache
def _chacha20_of_numbers(is_small: bool) -> Callable[[tf.Tensor, tf.Tensor, tf.Tensor], tf.Tensor]:
    """Returns the ChaCha20 function of a seed, a row and block numbers.

    Its result is (blocks, 16) uint32. All graphs of a Python process call one function for few
    blocks and one for many: tracing it for each use takes as long as tracing everything else in a
    round.
    """
    double_round = _double_round_of_rows if is_small else _double_round

    def blocks_of(seed: tf.Tensor, row: tf.Tensor, numbers: tf.Tensor) -> tf.Tensor:
        low, high = tf.unstack(tf.bitcast(numbers, tf.uint32), axis=1)
        shared = [
            *tf.unstack(tf.constant(_CHACHA_CONSTANTS, tf.uint32)),
            *2 * tf.unstack(tf.reshape(tf.bitcast(seed, tf.uint32), [4])),
        ]
        row_words = tf.unstack(tf.bitcast(row, tf.uint32), num=2)
        zeros = tf.zeros_like(low)
        words = [
            *(zeros + word for word in shared),
            *(low, high),
            *(zeros + word for word in row_words),
        ]
        state = tf.unstack(tf.reshape(tf.stack(words), [4, 4, -1])) if is_small else words
        # The rounds are a loop, because the operations of all rounds would make a large graph.
        _, *mixed = tf.while_loop(
            lambda number, *_: number < _DOUBLE_ROUNDS,
            lambda number, *words: (number + 1, *double_round(words)),
            (tf.constant(0), *state),
            parallel_iterations=1,
        )
        sums = [after + before for after, before in zip(mixed, state, strict=True)]
        return tf.transpose(tf.concat(sums, axis=0) if is_small else tf.stack(sums))

    # The function is traced in a graph of its own, because it outlives the graph that is being
    # built.
    with tf.Graph().as_default():
        return tf.compat.v1.wrap_function(
            blocks_of,
            [tf.TensorSpec(shape, tf.int64) for shape in ([2], [], [None])],
        )


def _double_round(words: tuple[tf.Tensor, ...]) -> list[tf.Tensor]:
    """Returns the words after a column round and a diagonal round of ChaCha20 (RFC 8439)."""
    mixed = list(words)
    for turn in range(2):
        for column in range(4):
            places = [4 * row + (column + turn * row) % 4 for row in range(4)]
            quarter = _quarter_round(*(mixed[place] for place in places))
            for place, word in zip(places, quarter, strict=True):
                mixed[place] = word
    return mixed


def _double_round_of_rows(rows: tuple[tf.Tensor, ...]) -> list[tf.Tensor]:
    """Does a double round of ChaCha20 with four (4, blocks) tensors, in fewer operations."""
    mixed = list(rows)
    for turn in (1, -1):
        mixed = list(_quarter_round(*mixed))
        mixed = [mixed[0], *(tf.roll(mixed[row], -turn * row, axis=0) for row in (1, 2, 3))]
    return mixed


def _quarter_round(
    a: tf.Tensor, b: tf.Tensor, c: tf.Tensor, d: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns four words after a quarter round of ChaCha20 (RFC 8439)."""
    for first, second in ((16, 12), (8, 7)):
        a = a + b
        d = _rotated(tf.bitwise.bitwise_xor(d, a), first)
        c = c + d
        b = _rotated(tf.bitwise.bitwise_xor(b, c), second)
    return a, b, c, d


def _rotated(words: tf.Tensor, distance: int) -> tf.Tensor:
    """Rotates the bits of 32-bit words to the left."""
    left = tf.bitwise.left_shift(words, tf.constant(distance, tf.uint32))
    right = tf.bitwise.right_shift(words, tf.constant(32 - distance, tf.uint32))
    return tf.bitwise.bitwise_or(left, right)


class _GraphTable(NamedTuple):
    """The alias table of the discrete Gaussian sampler as constants of a graph.

    Attributes:
      packed: (columns,) uint32.
      further: (columns, tie_words) uint32: further words of thresholds.
    """

    packed: tf.Tensor
    further: tf.Tensor


def _graph_table() -> _GraphTable:
    table = draws.table()
    return _GraphTable(tf.constant(table.packed), tf.constant(table.further))


def _from_words(
    table: _GraphTable, words: tf.Tensor, tie_words: Callable[[tf.Tensor], tf.Tensor]
) -> tf.Tensor:
    """Returns Z as a function of random words, by the table that ``kernel.draws`` defines.

    Args:
      table: The sampler's table.
      words: (3, count) uint32: the words for X1, X2 and X3 of all coordinates.
      tie_words: Takes the number of ties, an int32 scalar, and returns (ties, TIE_WORDS) uint32 for
        ties in the order of coordinates. It is called only if there are ties.

    Returns:
      (count,) int64.
    """
    mask = tf.constant(_COLUMN_MASK, tf.uint32)
    chosen, ties = [], []
    for word in tf.unstack(words, num=WORDS_PER_COORDINATE):
        column = tf.bitcast(tf.bitwise.bitwise_and(word, mask), tf.int32)
        # The operation tf.gather_nd is several times as fast as tf.gather here.
        entry = tf.gather_nd(table.packed, column[:, tf.newaxis])
        # ``filled`` is the word with all bits of its column set. It is below the entry if and only
        # if the word's fraction is below the threshold, and ``filled`` minus the entry, modulo
        # 2^32, has only column bits if and only if the two are equal, which is a tie.
        filled = tf.bitwise.bitwise_or(word, mask)
        chosen.append(tf.bitwise.bitwise_and(tf.where(filled < entry, word, entry), mask))
        ties.append(filled - entry <= mask)
    any_tie = tf.reduce_any([tf.reduce_any(tie) for tie in ties])
    chosen = tf.cond(
        any_tie,
        lambda: tf.unstack(_decided(table, words, tf.stack(chosen), ties, tie_words)),
        lambda: chosen,
    )
    x1, x2, x3 = (tf.cast(tf.bitcast(word, tf.int32), tf.int64) for word in chosen)
    step = 2**draws.STEP_BITS
    # Columns count from 0, so the sum for three columns of the integer zero is subtracted.
    return x1 + step * (x2 + step * x3) - draws.LARGEST


def _decided(
    table: _GraphTable,
    words: tf.Tensor,
    chosen: tf.Tensor,
    ties: list[tf.Tensor],
    tie_words: Callable[[tf.Tensor], tf.Tensor],
) -> tf.Tensor:
    """Returns the (3, count) uint32 chosen columns or aliases, after deciding all ties."""
    # Ties are sorted by coordinates, and by X1, X2 and X3 within a coordinate.
    numbers = tf.sort(
        tf.concat(
            [
                WORDS_PER_COORDINATE * tf.where(tie)[:, 0] + number
                for number, tie in enumerate(ties)
            ],
            axis=0,
        )
    )
    places = tf.stack(
        [tf.math.floormod(numbers, WORDS_PER_COORDINATE), numbers // WORDS_PER_COORDINATE], axis=1
    )
    columns = tf.bitwise.bitwise_and(
        tf.gather_nd(words, places), tf.constant(_COLUMN_MASK, tf.uint32)
    )
    # TensorFlow has more operations for int64 than for uint32.
    thresholds = tf.cast(tf.gather(table.further, tf.bitcast(columns, tf.int32)), tf.int64)
    fractions = tf.cast(tie_words(tf.size(numbers, tf.int32)), tf.int64)
    # The first word that differs decides. If no word differs, the fraction is not below the
    # threshold.
    first = tf.argmax(tf.cast(tf.not_equal(fractions, thresholds), tf.int32), axis=1)
    is_kept = tf.gather(fractions, first, batch_dims=1) < tf.gather(thresholds, first, batch_dims=1)
    # All other coordinates have their choice already, and a tie had counted as "not below".
    return tf.tensor_scatter_nd_update(
        chosen, tf.boolean_mask(places, is_kept), tf.boolean_mask(columns, is_kept)
    )


@dataclasses.dataclass(frozen=True, eq=False)
class SegmentRows:
    """Draws, combines and rounds rows of Z of a segment, tile by tile, in a graph.

    Attributes:
      rows: The mechanism's rows as integers.
      segment: The segment of a row.
      seed: (2,) int64.
      table: The sampler's table, 3 MB, which a graph should hold once.
    """

    rows: IntegerRows
    segment: Segment
    seed: tf.Tensor
    table: _GraphTable = dataclasses.field(default_factory=_graph_table)

    @property
    def width(self) -> int:
        """The number of coordinates of a tile of the segment."""
        return min(self.segment.size, TILE)

    def of_z(self, tile: tf.Tensor, first: tf.Tensor, num_rows: tf.Tensor | int) -> tf.Tensor:
        """Returns the entries of consecutive rows of Z in one tile of a segment.

        Args:
          tile: int64 scalar: the tile's number in the segment.
          first: int64 scalar: the first row's index.
          num_rows: How many rows; a Python integer or an int32 scalar.

        Returns:
          (num_rows, width) int64, in steps of Z.
        """
        width, groups = self.width, -(-self.width // WORDS_PER_BLOCK)
        number = self.segment.first_tile + tile
        first_block = _BLOCKS_PER_TILE * number
        first_tie_block = FIRST_TIE_BLOCK + TIE_BLOCKS_PER_TILE * number

        def one_row(row: tf.Tensor | int) -> tf.Tensor:
            i = first + tf.cast(row, tf.int64)
            drawn, for_ties = chacha20(
                *(self.seed, i),
                (first_block, WORDS_PER_COORDINATE * groups),
                (first_tie_block, _TIE_BLOCKS),
            )

            def tie_words(ties: tf.Tensor) -> tf.Tensor:
                count = TIE_WORDS * ties
                needed = -(-count // WORDS_PER_BLOCK)
                words = tf.cond(
                    needed <= _TIE_BLOCKS,
                    lambda: for_ties,
                    lambda: chacha20(self.seed, i, (first_tie_block, needed))[0],
                )
                return tf.reshape(tf.reshape(words, [-1])[:count], [ties, TIE_WORDS])

            by_word = tf.transpose(
                tf.reshape(drawn, [groups, WORDS_PER_COORDINATE, WORDS_PER_BLOCK]), [1, 0, 2]
            )
            words = tf.reshape(by_word, [WORDS_PER_COORDINATE, -1])[:, :width]
            return tf.ensure_shape(_from_words(self.table, words, tie_words), [width])

        if isinstance(num_rows, int) and num_rows == 1:
            return one_row(0)[tf.newaxis]
        return tf.map_fn(
            one_row,
            tf.range(num_rows),
            fn_output_signature=tf.TensorSpec([width], tf.int64),
            parallel_iterations=_PARALLEL_ROWS,
        )

    def combined(
        self, tile: tf.Tensor, first: tf.Tensor, weights: tf.Tensor, num_own: tf.Tensor | int
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the product of weights with consecutive rows of Z, and the last rows of Z.

        Rows of Z are drawn in groups. The last group has the rows of Z of the block's own rounds.

        Args:
          tile: int64 scalar: the tile's number in the segment.
          first: int64 scalar: the first row of Z.
          weights: (outputs, rows) float64.
          num_own: The number of rounds of the block.

        Returns:
          (outputs, width) float64, and (num_own, width) int64.
        """
        num_outputs, num_rows = tf.unstack(tf.shape(weights))

        def add_group(done: tf.Tensor, total: tf.Tensor, _: tf.Tensor) -> tuple[tf.Tensor, ...]:
            before = num_rows - num_own - done
            count = tf.where(before > 0, tf.minimum(_GROUP, before), num_own)
            z = self.of_z(tile, first + tf.cast(done, tf.int64), count)
            product = weights[:, done : done + count] @ tf.cast(z, tf.float64)
            return done + count, total + product, z

        some = tf.TensorShape([None, self.width])
        _, total, z = tf.while_loop(
            lambda done, *_: done < num_rows,
            add_group,
            (
                tf.constant(0),
                tf.zeros([num_outputs, self.width], tf.float64),
                tf.zeros([0, self.width], tf.int64),
            ),
            shape_invariants=(tf.TensorShape([]), some, some),
            parallel_iterations=1,
        )
        return total, z

    def rounded(self, z: tf.Tensor, earlier: tf.Tensor) -> tf.Tensor:
        """Returns rows of noise, (...) int32, from rows of Z and the part of earlier rounds.

        The rounding is that of ``kernel.integers``.

        Args:
          z: (...) int64: rows of Z, in steps of Z.
          earlier: (...) float64: the part of the rows that earlier rounds add, in steps of Z.
        """
        shift = self.rows.shift
        sums = z + tf.cast(tf.round(earlier), tf.int64) + tf.constant(1 << (shift - 1), tf.int64)
        return tf.cast(tf.bitwise.right_shift(sums, tf.constant(shift, tf.int64)), tf.int32)


@dataclasses.dataclass(frozen=True, eq=False)
class RowsInState:
    """Makes rows of noise with their history in the state that TFF passes between processes.

    Attributes:
      rows: The mechanism's rows as integers.
    """

    rows: IntegerRows

    def initial_history(self, segment: Segment) -> tf.Tensor:
        """Returns a history of zeros, (tiles, kept rows and state vectors, width).

        Args:
          segment: The segment of a row that the history is for.
        """
        unit = self.rows.recursion.normalised
        kept, vectors = unit.num_earlier_rows, unit.num_state_vectors
        shape = [segment.num_tiles, kept + vectors, min(segment.size, TILE)]
        # Kept rows are integers, and state vectors are floats.
        return tf.zeros(shape, tf.float64 if vectors else tf.int32)

    def next_row(
        self,
        segment: Segment,
        i: tf.Tensor,
        seed: tf.Tensor,
        stream: tf.Tensor,
        history: tf.Tensor,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns a segment's row of noise and the history for the next round.

        Args:
          segment: The segment of the row.
          i: int64 scalar: the round, from 0.
          seed: (2,) int64.
          stream: The stream's name, which only files need.
          history: The history that :meth:`initial_history` or the last call returned.

        Returns:
          (segment.size,) int32, and the history for the next round.
        """
        del stream
        drawn = SegmentRows(self.rows, segment, seed)

        def of_tile(tile: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            return self._step(i, drawn, tile, history[tile])

        if segment.num_tiles == 1:
            row, following = of_tile(tf.zeros([], tf.int64))
            return row, following[tf.newaxis]
        rows, following = tf.map_fn(
            of_tile,
            tf.range(segment.num_tiles, dtype=tf.int64),
            fn_output_signature=(
                tf.TensorSpec([drawn.width], tf.int32),
                tf.TensorSpec(history.shape[1:], history.dtype),
            ),
            parallel_iterations=_PARALLEL_TILES,
        )
        return tf.reshape(rows, [-1])[: segment.size], following

    def _step(
        self, i: tf.Tensor, drawn: SegmentRows, tile: tf.Tensor, history: tf.Tensor
    ) -> tuple[tf.Tensor, ...]:
        """Returns a row of C^-1 Z in one tile, (width,) int32, and the tile's next history.

        Args:
          i: int64 scalar: the round, from 0.
          drawn: The object that draws and rounds rows.
          tile: int64 scalar: the tile's number in the segment.
          history: (kept rows or vectors, width): the last rows, oldest first, or state vectors;
            zeros before the first round.
        """
        unit, kept = self.rows.recursion.normalised, history.shape[0]
        tables, number_of = self._transitions
        weights = tf.gather(tf.constant(tables), tf.gather(tf.constant(number_of), i))
        of_known, of_driving = tf.split(weights, [kept, -1], axis=1)
        wide = tf.cast(history, tf.float64)
        earlier, following = (of_known[:1] * self.rows.row_to_z) @ wide, of_known[1:] @ wide
        if unit.draws_earlier_rows_of_z:
            first = tf.maximum(i - (unit.rows_of_z_per_round - 1), 0)
            # Weights of rows of Z from before the first round are left out.
            of_z = of_driving[:, tf.cast(first - i, tf.int32) - 1 :]
            product, z = drawn.combined(tile, first, of_z, 1)
            earlier, following = earlier + product[:1], following + product[1:]
        else:
            z = drawn.of_z(tile, i, 1)
        row = drawn.rounded(z, earlier)
        if unit.num_earlier_rows:
            return row[0], tf.concat([history[1:], row], axis=0)
        if not unit.draws_earlier_rows_of_z:
            following += of_driving[1:] @ tf.cast(row, tf.float64)
        # TensorFlow does not know the number of rows here while it traces the graph, so the shape
        # is set.
        return row[0], tf.ensure_shape(tf.cast(following, history.dtype), history.shape)

    @functools.cached_property
    def _transitions(self) -> tuple[FloatArray, IntArray]:
        """The distinct transitions of single rounds, and the index of each round's transition.

        They are (number, 1 + m, weights) float64 and (n,) int64. In the first rounds, weights of
        rows that do not exist yet are zero, or those of later rounds, which the zeros of the
        history cancel.
        """
        unit, last = self.rows.recursion.normalised, self.rows.recursion.num_rounds - 1
        single = Blocks(self.rows.recursion, np.arange(last + 2))
        distinct = np.full(last + 1, last) if unit.is_toeplitz else single.distinct_transitions()
        chosen, number_of = np.unique(distinct, return_inverse=True)
        vectors, known = unit.num_state_vectors, unit.num_earlier_rows + unit.num_state_vectors
        tables = np.zeros((len(chosen), 1 + vectors, known + unit.rows_of_z_per_round))
        for table, i in zip(tables, chosen, strict=True):
            of_known, of_driving = np.split(
                single.transition(i), [single.num_earlier_rows(i) + vectors], axis=1
            )
            table[:, known - of_known.shape[1] : known] = of_known
            table[:, table.shape[1] - of_driving.shape[1] :] = of_driving
        return tables, number_of


# ----- Streams.


@dataclasses.dataclass(frozen=True, eq=False)
class TensorNoise:
    """The definition of a stream of noise rows: everything but its seed.

    Attributes:
      store: Makes the rows: ``RowsInState`` or ``RowsOnDisk``.
      specs: The tensors of a row, flat: tf.TensorSpec of floating-point types.
      fingerprints: The fingerprint of the states of each horizon before this run was extended, and
        last the fingerprint of its own states.
      schema: The numbers of the schema that the noise is scaled to, which states show.
    """

    store: "RowsInState | RowsOnDisk"
    specs: tuple[tf.TensorSpec, ...]
    fingerprints: tuple[int, ...] = (0,)
    schema: tuple[int, int, int] = (1, 0, 1)

    @property
    def recursion(self) -> NoiseRecursion:
        """The noising matrix of the mechanism."""
        return self.store.rows.recursion

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The segments of a row of noise, by the dtypes of its tensors."""
        return self.layout_of(self.specs).segments

    @staticmethod
    def layout_of(specs: tuple[tf.TensorSpec, ...]) -> RowLayout:
        """Returns the layout of a row: noise is float64 for float64 tensors, and otherwise float32.

        Args:
          specs: The shape and dtype of each tensor of an update.
        """
        shapes = tuple(tuple(spec.shape) for spec in specs)
        dtypes = ("float64" if spec.dtype == tf.float64 else "float32" for spec in specs)
        return RowLayout(shapes, tuple(dtypes))

    @staticmethod
    def of_round(numbers: FloatArray, i: tf.Tensor) -> tf.Tensor:
        """Returns a round's entry of a table in a form that TensorFlow does not optimise away.

        TensorFlow's optimizer makes a constant of a table with equal entries, and regroups products
        with constants, which changes last bits. The NaN at the end makes the entries different.

        Args:
          numbers: (n,) float64: one number for each round.
          i: int64 scalar: the round, from 0.
        """
        return tf.gather(tf.constant([*numbers, math.nan], tf.float64), i)

    def initial_state(self, seed: tf.Tensor, stream: tf.Tensor) -> NoiseState:
        """Returns the state of the stream before the first round.

        Args:
          seed: (2,) int64.
          stream: (2,) int64; two streams with different seeds must have different names.
        """
        kept = tuple(map(self.store.initial_history, self.segments))
        return self._state(tf.zeros([], tf.int64), seed, stream, kept)

    def next_row(
        self, state: NoiseState, stddev: float = 1.0
    ) -> tuple[list[tf.Tensor], tf.Tensor, NoiseState]:
        """Returns the next row of C^-1 Z as integers, the row's step, and the next state.

        Args:
          state: The state that :meth:`initial_state` or the last call returned.
          stddev: The standard deviation of Z.

        Returns:
          An int32 tensor for each spec, the row's step at this standard deviation (float64 scalar,
          not zero), and the state for the next round. Running the graph fails with
          InvalidArgumentError if the mechanism has no more rounds.
        """
        i = self._checked_round(state)
        row = [tf.zeros(spec.shape, tf.int32) for spec in self.specs]
        histories = []
        for number, segment in enumerate(self.segments):
            flat, history = self.store.next_row(
                segment, i, state.seed, state.stream, state.history[number]
            )
            histories.append(history)
            shapes = [self.specs[position].shape for position in segment.positions]
            tensors = tf.split(flat, [shape.num_elements() for shape in shapes])
            for position, shape, tensor in zip(segment.positions, shapes, tensors, strict=True):
                row[position] = tf.reshape(tensor, shape)
        step = TensorNoise.of_round(self.store.rows.steps * stddev, i)
        # If the run was extended, its next state has the fingerprint of the whole run.
        return row, step, self._state(i + 1, state.seed, state.stream, tuple(histories))

    def _state(self, i: tf.Tensor, seed: tf.Tensor, stream: tf.Tensor, history: Any) -> NoiseState:
        fingerprint, schema = (
            tf.constant(each, tf.int64) for each in (self.fingerprints[-1], self.schema)
        )
        return NoiseState(fingerprint, i, seed, stream, schema, history)

    def _checked_round(self, state: NoiseState) -> tf.Tensor:
        """Returns the state's round, after checks that it has noise and belongs to this run."""
        num_rounds = self.recursion.num_rounds
        checks = [
            tf.debugging.assert_equal(
                tf.reduce_any(
                    tf.equal(state.fingerprint, tf.constant(self.fingerprints, tf.int64))
                ),
                True,
                message=processes.refusal(OTHER_PROCESS),
            ),
            tf.debugging.assert_less(
                state.round_index,
                tf.constant(num_rounds, tf.int64),
                message=processes.refusal(
                    f"The factorization has noise for {num_rounds} rounds, and one more round was "
                    "asked for: its noise row would repeat an earlier one. Stop training, or "
                    "extend the mechanism."
                ),
            ),
        ]
        # If an assertion is known to hold while the graph is built, TensorFlow returns None.
        with tf.control_dependencies([check for check in checks if check is not None]):
            return tf.identity(state.round_index)
