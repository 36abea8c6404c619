"""Noise rows made in blocks and kept in files, in NumPy.

Rows are made a block at a time (``blocks``), one tile of coordinates after another, and each
row of each tile is a file. The files are a cache of a function of (noising matrix, seed, round):
any of them may be missing, damaged or old, and is then made again, from the first round on where
what a block is made from is gone. ``tff.rows_on_disk`` makes the same rows in a graph, and shares
no files with this.
"""

import contextlib
import dataclasses
import functools
import itertools
import os
import pathlib
import tempfile
from typing import Any

import numpy as np

from mf_aggregators.kernel import numbers
from mf_aggregators.kernel.draws import NOISE_FORMAT, TILE, NoiseSource, integers
from mf_aggregators.kernel.integers import IntegerRows, Segment
from mf_aggregators.kernel.numbers import FloatArray, IntArray, RealArray
from mf_aggregators.kernel.rows import Blocks

# The digest at the beginning of a file.
_DIGEST_SIZE = 32


@dataclasses.dataclass(frozen=True, eq=False)
class RowsInFiles:
    """Rows of one noising matrix and one seed in files, made in blocks.

    Attributes:
      rows: The mechanism's rows.
      blocks: The blocks that they are made in.
      source: Where random bits come from.
      seed: (2,) int64: the stream's secret.
      directory: A private directory, of this stream alone.
    """

    rows: IntegerRows
    blocks: Blocks
    source: NoiseSource
    seed: IntArray = dataclasses.field(repr=False)
    directory: pathlib.Path

    def row(self, segment: Segment, i: int) -> IntArray:
        """Returns a row of a segment, (segment.size,) int64 in steps; makes its block if need be.

        Args:
          segment: The part of the row.
          i: The round, of those that there are.

        Raises:
          OSError: If the directory cannot be written.
        """
        block = int(np.searchsorted(self.blocks.starts, i, side="right")) - 1
        tiles = []
        for tile in range(segment.num_tiles):
            found: IntArray | None = self._read(segment, tile, f"row-{i}", np.int32)
            if found is None:
                made = self._make(segment, tile, block)
                found = made[i - self.blocks.starts[block]]
            tiles.append(found)
        return np.asarray(np.concatenate(tiles), np.int64)

    def _make(self, segment: Segment, tile: int, block: int) -> IntArray:
        """Makes and writes the rows of a block, (rows, width) int32."""
        recursion, width = self.rows.normalised, _width(segment, tile)
        rows = self._earlier(segment, tile, block)
        vectors = self._vectors(segment, tile, block)
        first = 0 if rows is None or vectors is None else block
        if rows is None or vectors is None:
            rows = np.empty((0, width), np.int32)
            vectors = np.zeros((recursion.num_state_vectors, width))
        earlier = made = rows
        for number in range(first, block + 1):
            made, vectors = self._advance(segment, tile, number, earlier, vectors)
            kept = np.concatenate([earlier, made])
            earlier = kept[max(0, len(kept) - recursion.num_earlier_rows) :]
        self._delete_old(segment, tile, block)
        return made

    def _earlier(self, segment: Segment, tile: int, block: int) -> IntArray | None:
        """The rows before a block that it needs, oldest first; None if one is not there."""
        start, number = int(self.blocks.starts[block]), self.blocks.num_earlier_rows(block)
        rows = []
        for i in range(start - number, start):
            row = self._read(segment, tile, f"row-{i}", np.int32)
            if row is None:
                return None
            rows.append(row)
        return np.array(rows, np.int32).reshape(-1, _width(segment, tile))

    def _vectors(self, segment: Segment, tile: int, block: int) -> FloatArray | None:
        """The state vectors at a block's start; None if they are not there."""
        shape = self.rows.normalised.num_state_vectors, _width(segment, tile)
        if shape[0] == 0 or block == 0:
            return np.zeros(shape)
        found = self._read(segment, tile, f"state-{block}", np.float64)
        return None if found is None else np.asarray(found, np.float64).reshape(shape)

    def _advance(
        self, segment: Segment, tile: int, block: int, earlier: IntArray, vectors: FloatArray
    ) -> tuple[IntArray, FloatArray]:
        """The rows of a block and the state vectors after it: see ``Blocks.transition``."""
        start, first = int(self.blocks.starts[block]), self.blocks.first_row_of_z(block)
        made, following = self.rows.block(
            self.blocks.transition(block),
            np.concatenate([earlier, vectors]),
            lambda number: self._row_of_z(segment, tile, first + number),
        )
        if len(following) and block + 1 < self.blocks.num_blocks:
            self._write(segment, tile, f"state-{block + 1}", following)
        for position, row in enumerate(made):
            self._write(segment, tile, f"row-{start + position}", row)
        return made, following

    def _row_of_z(self, segment: Segment, tile: int, row: int) -> IntArray:
        first = segment.first_coordinate + tile * TILE
        return integers(self.source, self.seed, row, first, _width(segment, tile))

    def _delete_old(self, segment: Segment, tile: int, block: int) -> None:
        """Deletes the files that neither the block before this one nor a later block needs."""
        first = int(self.blocks.starts[max(block - 1, 0)])
        oldest = {"row": first - self.rows.normalised.num_earlier_rows, "state": block - 1}
        for path in self._folder(segment, tile).iterdir():
            kind, _, number = path.name.partition("-")
            if kind in oldest and number.isdigit() and int(number) < oldest[kind]:
                path.unlink(missing_ok=True)

    def _folder(self, segment: Segment, tile: int) -> pathlib.Path:
        return self.directory / f"tile-{segment.first_tile + tile}"

    def _read(
        self, segment: Segment, tile: int, name: str, dtype: type[np.int32] | type[np.float64]
    ) -> Any:
        """The numbers of a file, flat; None if it is missing or damaged, or not of this name."""
        try:
            contents = (self._folder(segment, tile) / name).read_bytes()
        except OSError:
            return None
        digest, body = contents[:_DIGEST_SIZE], contents[_DIGEST_SIZE:]
        if digest != self._digest(segment, tile, name, body):
            return None
        return np.asarray(np.frombuffer(body, dtype))

    def _write(self, segment: Segment, tile: int, name: str, kept: RealArray) -> None:
        body = np.ascontiguousarray(kept).tobytes()
        contents = self._digest(segment, tile, name, body) + body
        # Damaged files are made again.
        write_file(self._folder(segment, tile) / name, contents)

    def _digest(self, segment: Segment, tile: int, name: str, body: bytes) -> bytes:
        """Nothing else has it: another seed, matrix, tile, round or size."""
        label = f"{segment.dtype} {segment.size} {segment.first_tile + tile} {name}"
        return numbers.digest(label, [np.frombuffer(body, np.uint8)], self._key)

    @functools.cached_property
    def _key(self) -> bytes:
        """Digest of these rows, which those of another stream or matrix do not have."""
        described = NOISE_FORMAT, self.rows.shift, self.source.value, self.blocks.starts.tolist()
        distinct = np.unique(self.blocks.distinct_transitions())
        arrays = (self.blocks.transition(int(block)) for block in distinct)
        return numbers.digest(repr(described), itertools.chain([self.seed], arrays))


def _width(segment: Segment, tile: int) -> int:
    """The coordinates of a tile: the last one may be shorter."""
    return min(TILE, segment.size - tile * TILE)


def write_file(
    path: pathlib.Path, content: bytes, *, replaces: bool = True, is_durable: bool = False
) -> None:
    """Writes a private file by way of a temporary one: readers find the whole file or none.

    Args:
      path: The file. Its folder is made if it is missing.
      content: The content.
      replaces: Whether a file that is there is replaced; it stays otherwise.
      is_durable: Whether the content and the name are on disk before this returns.

    Raises:
      OSError: If it cannot be written.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, partial = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            if is_durable:
                os.fsync(file.fileno())
        if replaces:
            os.replace(partial, path)
        else:
            # Unlike a renaming, it fails where the name is taken.
            with contextlib.suppress(FileExistsError):
                os.link(partial, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(partial)
    if is_durable:
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
