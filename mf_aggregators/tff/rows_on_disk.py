"""Noise rows made in blocks and kept in files, as TensorFlow graphs for TFF's worker.

The state that TFF passes between its processes holds the round and the seed alone. Rows
are made a block at a time (``kernel.rows.Blocks``), one tile of coordinates after another,
and each row of each tile is a file in a directory. A round reads its row, and makes its share
of the next block, so that no round has to make a whole block of a large model.

The files are a cache of a function of (noising matrix, seed, round): any of them may be missing,
damaged or old, and is then made again. What a block is made from is in files as well; if
that is gone, the tile is made again from the first round on. Only files of transitions cannot be:
a graph does not make them, and refuses changed ones. The directory may be deleted while no process
uses it, which costs time and never changes a row.

A graph cannot rename files. So a file begins with a checksum of its contents and with the number
that it is for. A file that was cut off in the middle, is damaged, is for another number or is
missing reads as "not there". Paths must not have characters with a meaning in patterns
(``noise_directory`` refuses them): TensorFlow's only test of a file's existence would take them as
such.
"""

import dataclasses
import os
import pathlib
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import tensorflow as tf

from mf_aggregators import atomic_files
from mf_aggregators.kernel.draws import TILE
from mf_aggregators.kernel.integers import IntegerRows, Segment
from mf_aggregators.kernel.rows import Blocks
from mf_aggregators.noise import NOISE_FORMAT
from mf_aggregators.noise.places import STATES_KEPT, NoiseCost
from mf_aggregators.tff import processes
from mf_aggregators.tff.tensor_rows import SegmentRows

# The number of decimal digits of each number in a file's header: a checksum and a label.
_DIGITS = 20
_CHECKSUMS = 2**62
# The version of the format of these files, so that files of other versions are never read.
_FORMAT = 3
# The number of rows that are computed one by one between two matrix products.
_ROWS_AT_ONCE = 8
_PARALLEL_FILES = 4

# A function that takes a block and a tile, makes and writes the block's rows of the tile, and
# returns them.
_MakeTile: TypeAlias = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]


@dataclasses.dataclass(frozen=True, eq=False)
class RowsOnDisk:
    """Rows of one noising matrix that are made in blocks and kept in files, as a graph.

    Attributes:
      rows: The mechanism's rows.
      blocks: The blocks in which rows are made.
      directory: The folder for the files of all streams of this noising matrix.
      transitions: The path of a file for each block, with the block's transition.
      checksums: The checksums of the contents of these files. No graph can make the files again,
        and a damaged file would have the weights of another matrix.
    """

    rows: IntegerRows
    blocks: Blocks
    directory: str
    transitions: tuple[str, ...]
    checksums: tuple[int, ...]

    @classmethod
    def prepared(
        cls,
        rows: IntegerRows,
        blocks: Blocks,
        segments: tuple[Segment, ...],
        directory: pathlib.Path,
    ) -> "RowsOnDisk":
        """Writes the weights of a noising matrix to files, and returns its rows in files.

        Args:
          rows: The mechanism's rows.
          blocks: The blocks in which rows are made.
          segments: The layout of a row.
          directory: A directory from ``noise_directory``; everything goes below it.

        Returns:
          The rows.

        Raises:
          OSError: If the directory cannot be written.
        """
        root = pathlib.Path(directory)
        distinct = blocks.distinct_transitions()
        contents = {
            block: blocks.transition(block).tobytes() for block in map(int, np.unique(distinct))
        }
        layout = [dataclasses.astuple(segment) for segment in segments]
        described = [_FORMAT, NOISE_FORMAT, rows.shift, layout, blocks.starts.tolist()]
        own = root / f"rows-{rows.recursion.fingerprint(described).hex()[:32]}"
        own.mkdir(mode=0o700, exist_ok=True)
        for block, content in contents.items():
            path = own / f"weights-{block}"
            if not path.exists() or path.read_bytes() != content:
                # The files are not synced to disk: there may be many, and graphs check their
                # contents.
                atomic_files.write(path, content, waits_for_disk=False)
        # The checksums are computed outside of any graph that is being built.
        with tf.init_scope():
            checksums = {
                block: int(_checksum(tf.constant(content))) for block, content in contents.items()
            }
        return cls(
            rows,
            blocks,
            os.fspath(own),
            tuple(os.fspath(own / f"weights-{block}") for block in distinct),
            tuple(checksums[int(block)] for block in distinct),
        )

    def initial_history(self, segment: Segment) -> tf.Tensor:
        """Returns (tiles, 0, width), an empty history: all rows are in files."""
        return tf.zeros([segment.num_tiles, 0, min(segment.size, TILE)], tf.int32)

    def next_row(
        self,
        segment: Segment,
        i: tf.Tensor,
        seed: tf.Tensor,
        stream: tf.Tensor,
        history: tf.Tensor,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns a row of a segment, and makes a share of the next block of rows.

        Args:
          segment: The part of the row.
          i: int64 scalar: the round, of those that there are.
          seed: (2,) int64.
          stream: (2,) int64: the public name of the stream, which its files have in their paths.
          history: What :meth:`initial_history` returned.

        Returns:
          (segment.size,) int32, and the history.
        """
        drawn = SegmentRows(self.rows, segment, seed)

        # Inside a tf.function, operations with effects run in order and are never left out. One
        # function that is used in several places makes the graph smaller.
        @tf.function(autograph=False)
        def make(
            block: tf.Tensor, tile: tf.Tensor, seed: tf.Tensor, stream: tf.Tensor
        ) -> tf.Tensor:
            own = dataclasses.replace(drawn, seed=seed)
            return _StreamFiles(self, own, stream).make(block, tile)

        @tf.function(autograph=False)
        def row_and_share(i: tf.Tensor, seed: tf.Tensor, stream: tf.Tensor) -> tf.Tensor:
            files = _StreamFiles(self, dataclasses.replace(drawn, seed=seed), stream)
            block = files.block_of(i)

            def make_tile(block: tf.Tensor, tile: tf.Tensor) -> tf.Tensor:
                rows = make(block, tile, seed, stream)
                return tf.ensure_shape(rows, [None, drawn.width])

            row = files.read_row(block, i, make_tile)
            files.make_share_of_next(block, i, make_tile)
            return row

        return tf.reshape(row_and_share(i, seed, stream), [-1])[: segment.size], history


class _StreamFiles:
    """The files of one segment of one stream, with the operations that read and write them."""

    def __init__(self, files: RowsOnDisk, drawn: SegmentRows, stream: tf.Tensor) -> None:
        self._drawn, self._blocks = drawn, files.blocks
        self._recursion, self._segment = drawn.rows.recursion.normalised, drawn.segment
        self._width = drawn.width
        self._starts = tf.constant(files.blocks.starts)
        self._transition_paths = tf.constant(files.transitions)
        self._checksums = tf.constant(files.checksums, tf.int64)
        self._first_rows_of_z = tf.constant(
            [files.blocks.first_row_of_z(block) for block in range(files.blocks.num_blocks)],
            tf.int64,
        )
        self._stream = tf.strings.join(["/stream", _number(stream[0]), _number(stream[1])])
        self._directory = tf.strings.join([files.directory, self._stream])

    def block_of(self, i: tf.Tensor) -> tf.Tensor:
        """Returns the index of the block with round i, int64 scalar."""
        position = tf.searchsorted(self._starts, i[tf.newaxis], side="right", out_type=tf.int64)
        return position[0] - 1

    def read_row(self, block: tf.Tensor, i: tf.Tensor, make_tile: _MakeTile) -> tf.Tensor:
        """Returns row i of the noise in all tiles, (tiles, width); missing rows are made."""
        number = self._segment.num_tiles
        position = tf.cast(i - self._starts[block], tf.int32)

        def of_tile(tile: tf.Tensor) -> tf.Tensor:
            row, is_there = self._read(tile, i)
            return tf.cond(is_there, lambda: row, lambda: make_tile(block, tile)[position])

        return tf.map_fn(
            of_tile,
            tf.range(number, dtype=tf.int64),
            fn_output_signature=tf.TensorSpec([self._width], tf.int32),
            # Making a tile takes much memory, so tiles are handled one after the other.
            parallel_iterations=1,
        )

    def make_share_of_next(self, block: tf.Tensor, i: tf.Tensor, make_tile: _MakeTile) -> None:
        """Makes the next block's rows for those tiles that are this round's share."""
        size = self._starts[block + 1] - self._starts[block]
        position = i - self._starts[block]
        number = self._segment.num_tiles

        def make_if_missing(tile: tf.Tensor) -> tf.Tensor:
            # The block's last row is one of the last to be written, so it tells whether the block
            # was made. Other rows that are missing are made when they are read.
            _, is_there = self._read(tile, self._starts[block + 2] - 1)

            def make() -> tf.Tensor:
                with tf.control_dependencies([make_tile(block + 1, tile)]):
                    return tile + 1

            return tf.cond(is_there, lambda: tile + 1, make)

        def make_all() -> tf.Tensor:
            first, last = position * number // size, (position + 1) * number // size
            (tile,) = tf.while_loop(
                lambda tile: tile < last,
                lambda tile: (make_if_missing(tile),),
                (first,),
                parallel_iterations=1,
            )
            return tile

        is_last = tf.equal(block, self._blocks.num_blocks - 1)
        tf.cond(is_last, lambda: tf.zeros([], tf.int64), make_all)

    def make(self, block: tf.Tensor, tile: tf.Tensor) -> tf.Tensor:
        """Makes and writes the rows of a block in one tile, (rows, width) int32.

        If the rows or vectors that the block follows from are missing, blocks are made from the
        first on.
        """
        width, most = self._width, self._recursion.num_earlier_rows
        if not most and not self._recursion.num_state_vectors:
            nothing = tf.zeros([0, width], tf.int32)
            return self._advance(block, tile, nothing, tf.cast(nothing, tf.float64))[0]
        earlier, has_earlier = self._read_earlier(block, tile)
        vectors, has_vectors = self._read_vectors(block, tile)
        is_known = has_earlier & has_vectors
        first, earlier, vectors = tf.cond(
            is_known,
            lambda: (block, earlier, vectors),
            lambda: (tf.zeros_like(block), earlier[:0], tf.zeros_like(vectors)),
        )

        def advance(
            number: tf.Tensor, earlier: tf.Tensor, vectors: tf.Tensor, _: tf.Tensor
        ) -> tuple[tf.Tensor, ...]:
            rows, vectors = self._advance(number, tile, earlier, vectors)

            def with_rows() -> tf.Tensor:
                kept = tf.concat([earlier, rows], axis=0)
                return kept[tf.maximum(tf.shape(kept)[0] - most, 0) :]

            # No block follows from the last one, so its rows are not kept.
            kept = tf.cond(number < block, with_rows, lambda: earlier)
            return number + 1, kept, vectors, rows

        # There is one loop, which for a known block has one step: each step is a large graph.
        return tf.while_loop(
            lambda number, *_: number <= block,
            advance,
            (first, earlier, vectors, tf.zeros([0, width], tf.int32)),
            shape_invariants=(
                tf.TensorShape([]),
                tf.TensorShape([None, width]),
                tf.TensorShape([self._recursion.num_state_vectors, width]),
                tf.TensorShape([None, width]),
            ),
            parallel_iterations=1,
        )[3]

    def _advance(
        self, block: tf.Tensor, tile: tf.Tensor, earlier: tf.Tensor, vectors: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Makes and writes a block's rows in a tile, and the state vectors after the block.

        The weights are those of ``NoiseRecursion.transition``, in float64 products.
        """
        size = tf.cast(self._starts[block + 1] - self._starts[block], tf.int32)
        transition = self._read_transition(block, size)
        num_earlier, num_vectors = tf.shape(earlier)[0], self._recursion.num_state_vectors
        known = tf.concat([tf.cast(earlier, tf.float64), vectors], axis=0)
        of_known, of_driving = tf.split(transition, [num_earlier + num_vectors, -1], axis=1)
        total = (of_known[:size] * self._drawn.rows.row_to_z) @ known
        following = tf.zeros([0, self._width], tf.float64)
        if self._recursion.draws_earlier_rows_of_z:
            first = self._first_rows_of_z[block]
            driven, z = self._drawn.combined(tile, first, of_driving, size)
            rows = self._drawn.rounded(z, total + driven[:size])
            if num_vectors:
                following = of_known[size:] @ known + driven[size:]
        else:
            rows = self._substituted(block, tile, total, of_driving[:size], size)
            if num_vectors:
                driven = of_driving[size:] @ tf.cast(rows, tf.float64)
                following = of_known[size:] @ known + driven
        # If there is one state vector, TensorFlow does not infer the number, so the shape is set.
        following = tf.ensure_shape(following, [num_vectors, self._width])
        with tf.control_dependencies(self._write_vectors(block + 1, tile, following)):
            are_written = self._write_rows(block, tile, size, rows)
        with tf.control_dependencies([are_written]):
            return tf.identity(rows), following

    def _substituted(
        self,
        block: tf.Tensor,
        tile: tf.Tensor,
        total: tf.Tensor,
        weights: tf.Tensor,
        size: tf.Tensor,
    ) -> tf.Tensor:
        """Returns the rows of a block that depend on its own earlier rows, (size, width) int32.

        A few rows are made at a time: one product adds what all earlier rows of the block
        contribute to them, and among themselves they are substituted one by one.

        Args:
          block: The block.
          tile: The tile.
          total: (size, width) float64: the part of the rows that does not follow from the block's
            own rows, in steps of Z.
          weights: (size, size) weights of the block's own rows.
          size: The number of rows.
        """
        width, first = self._width, self._first_rows_of_z[block]
        z = self._drawn.of_z(tile, first, size)
        missing = tf.math.floormod(-size, _ROWS_AT_ONCE)
        z, total = (tf.pad(each, [[0, missing], [0, 0]]) for each in (z, total))
        weights = tf.pad(weights * self._drawn.rows.row_to_z, [[0, missing], [0, missing]])

        def add_rows(done: tf.Tensor, rows: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            end = done + _ROWS_AT_ONCE
            of_rows = weights[done:end]
            of_earlier = of_rows[:, :done] @ tf.cast(rows, tf.float64)
            sums = tf.unstack(total[done:end] + of_earlier, _ROWS_AT_ONCE)
            own, made = of_rows[:, done:end], []
            for position, row_of_z in enumerate(tf.unstack(z[done:end], _ROWS_AT_ONCE)):
                row = self._drawn.rounded(row_of_z, sums[position])
                made.append(row)
                number = tf.cast(row, tf.float64)
                for later in range(position + 1, _ROWS_AT_ONCE):
                    sums[later] += own[later, position] * number
            return end, tf.concat([rows, tf.stack(made)], axis=0)

        _, rows = tf.while_loop(
            lambda done, _: done < size,
            add_rows,
            (tf.constant(0), tf.zeros([0, width], tf.int32)),
            shape_invariants=(tf.TensorShape([]), tf.TensorShape([None, width])),
            parallel_iterations=1,
        )
        return rows[:size]

    def _write_vectors(
        self, block: tf.Tensor, tile: tf.Tensor, vectors: tf.Tensor
    ) -> list[tf.Operation]:
        """Writes the state vectors at the start of a block, if the noising matrix has any."""
        if not self._recursion.num_state_vectors:
            return []
        label = self._label("state", tile, block)
        return [_write_tensor(self._vectors_path(tile, block), label, vectors)]

    def _write_rows(
        self, block: tf.Tensor, tile: tf.Tensor, size: tf.Tensor, rows: tf.Tensor
    ) -> tf.Tensor:
        """Writes the rows of a block, and returns a vector of True once all are written."""

        def write(position: tf.Tensor) -> tf.Tensor:
            i = self._starts[block] + tf.cast(position, tf.int64)
            written = _write_tensor(
                self._row_path(tile, i), self._label("row", tile, i), rows[position]
            )
            with tf.control_dependencies([written]):
                return tf.constant(True)

        return tf.map_fn(
            write,
            tf.range(size),
            fn_output_signature=tf.TensorSpec([], tf.bool),
            parallel_iterations=_PARALLEL_FILES,
        )

    def _read(self, tile: tf.Tensor, i: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return _read_tensor(
            self._row_path(tile, i),
            self._label("row", tile, i),
            [self._width],
            tf.int32,
        )

    def _read_earlier(self, block: tf.Tensor, tile: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the rows that a block needs from before, oldest first, and whether all exist."""
        start = self._starts[block]
        number = tf.minimum(tf.constant(self._recursion.num_earlier_rows, tf.int64), start)
        rows, are_there = tf.map_fn(
            lambda i: self._read(tile, i),
            tf.range(start - number, start),
            fn_output_signature=(
                tf.TensorSpec([self._width], tf.int32),
                tf.TensorSpec([], tf.bool),
            ),
            parallel_iterations=_PARALLEL_FILES,
        )
        return rows, tf.reduce_all(are_there)

    def _read_vectors(self, block: tf.Tensor, tile: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the state vectors at the start of a block, and whether they exist."""
        shape = [self._recursion.num_state_vectors, self._width]
        zeros = tf.zeros(shape, tf.float64)
        if not self._recursion.num_state_vectors:
            return zeros, tf.constant(True)
        return tf.cond(
            tf.equal(block, 0),
            lambda: (zeros, tf.constant(True)),
            lambda: _read_tensor(
                self._vectors_path(tile, block),
                self._label("state", tile, block),
                shape,
                tf.float64,
            ),
        )

    def _read_transition(self, block: tf.Tensor, size: tf.Tensor) -> tf.Tensor:
        """Returns the transition of a block from its file, or fails if the file is damaged."""
        contents = _contents(self._transition_paths[block])
        is_right = tf.debugging.assert_equal(
            tf.equal(_checksum(contents), self._checksums[block]),
            True,
            message=processes.refusal(
                "A file of the noise's weights is damaged or missing: create the aggregator again, "
                "which writes the file, and continue from the same state."
            ),
        )
        with tf.control_dependencies([is_right]):
            numbers = tf.io.decode_raw(contents, tf.float64)
        return tf.reshape(numbers, [size + self._recursion.num_state_vectors, -1])

    def _row_path(self, tile: tf.Tensor, i: tf.Tensor) -> tf.Tensor:
        slot = tf.math.floormod(i, NoiseCost.rows_kept(self._blocks))
        return self._path(tile, "/row", slot)

    def _vectors_path(self, tile: tf.Tensor, block: tf.Tensor) -> tf.Tensor:
        return self._path(tile, "/state", tf.math.floormod(block, STATES_KEPT))

    def _label(self, kind: str, tile: tf.Tensor, index: tf.Tensor) -> tf.Tensor:
        """Returns a number for a file header that depends on stream, kind, tile and index."""
        tile_name = _number(self._segment.first_tile + tile)
        return _checksum(tf.strings.join([self._stream, kind, tile_name, _number(index)]))

    def _path(self, tile: tf.Tensor, name: str, slot: tf.Tensor) -> tf.Tensor:
        tile_name = _number(self._segment.first_tile + tile)
        return tf.strings.join([self._directory, "/tile", tile_name, name, _number(slot)])


def _number(value: tf.Tensor) -> tf.Tensor:
    return tf.strings.join(["-", tf.strings.as_string(value)])


# ----- Files.


def _contents(path: tf.Tensor) -> tf.Tensor:
    """Returns the contents of a file; an empty string if there is no file."""
    return tf.cond(
        tf.size(tf.io.matching_files(path)) > 0,
        lambda: tf.io.read_file(path),
        lambda: tf.constant(""),
    )


def _write_tensor(path: tf.Tensor, number: tf.Tensor, tensor: tf.Tensor) -> tf.Operation:
    """Writes a tensor to a file, with a checksum and a number in the header.

    Args:
      path: Scalar string.
      number: int64 scalar that :func:`_read_tensor` has to be called with.
      tensor: The tensor to write.

    Returns:
      The operation.
    """
    body = tf.io.serialize_tensor(tensor)
    return tf.io.write_file(path, tf.strings.join([_header(number, body), body]))


def _read_tensor(
    path: tf.Tensor, number: tf.Tensor, shape: list[int], dtype: tf.DType
) -> tuple[tf.Tensor, tf.Tensor]:
    """Reads a tensor that :func:`_write_tensor` wrote to the same path with the same number.

    Args:
      path: Scalar string.
      number: int64 scalar.
      shape: The shape of the tensor.
      dtype: The type of its entries.

    Returns:
      The tensor, and whether the file is valid; zeros if it is not.
    """
    contents = _contents(path)
    # Substrings are cut at the end of a string, and a string that is too short has another header.
    is_long_enough = tf.strings.length(contents) > 2 * _DIGITS
    contents = tf.where(is_long_enough, contents, " " * 2 * _DIGITS)
    body = tf.strings.substr(contents, 2 * _DIGITS, tf.strings.length(contents) - 2 * _DIGITS)
    is_there = is_long_enough & tf.equal(
        tf.strings.substr(contents, 0, 2 * _DIGITS), _header(number, body)
    )
    tensor = tf.cond(
        is_there,
        lambda: tf.ensure_shape(tf.io.parse_tensor(body, dtype), shape),
        lambda: tf.zeros(shape, dtype),
    )
    return tensor, is_there


def _checksum(contents: tf.Tensor) -> tf.Tensor:
    """Returns an int64 checksum of a scalar string."""
    return tf.strings.to_hash_bucket_fast(contents, _CHECKSUMS)


def _header(number: tf.Tensor, body: tf.Tensor) -> tf.Tensor:
    return tf.strings.join(
        [
            tf.strings.as_string(value, width=_DIGITS, fill="0")
            for value in (_checksum(body), number)
        ]
    )
