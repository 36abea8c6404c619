"""Where the tensors of one row of Z lie on the row's line of coordinates.

The tensors of one dtype form a segment, in which they follow one another without a gap:
first the float32 tensors from coordinate 0, then the float64 tensors from the next chunk.
A chunk is what the normal transform handles at once (see ``rows_of_z``); segments that
start at chunks never share one, and each can be drawn and combined as one flat vector.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

# Coordinates of a chunk: a power of two, since a chunk's halves start at even integers.
CHUNK = 2**16

# The dtypes that noise is computed in, in the order of their segments.
NOISE_DTYPES = ("float32", "float64")


@dataclasses.dataclass(frozen=True)
class Segment:
    """The tensors of one dtype, as a range of a row's coordinates.

    Attributes:
      dtype: "float32" or "float64".
      first_chunk: The chunk at whose first coordinate the segment starts.
      size: How many coordinates, at least 1.
      positions: Which tensors of the row these are, in order; tensors without entries
        included.
    """

    dtype: str
    first_chunk: int
    size: int
    positions: tuple[int, ...]

    @property
    def first_coordinate(self) -> int:
        """The coordinate of the segment's first entry within the row."""
        return self.first_chunk * CHUNK

    @property
    def num_chunks(self) -> int:
        """The number of chunks, the last of which may be shorter."""
        return -(-self.size // CHUNK)

    @property
    def width(self) -> int:
        """The coordinates of any chunk where all are treated alike: the last one is filled up."""
        return min(self.size, CHUNK)


@dataclasses.dataclass(frozen=True)
class RowLayout:
    """The tensors of one row, in order.

    Attributes:
      shapes: The shape of each tensor.
      dtypes: What noise for each tensor is computed in: "float32" or "float64".
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]

    def __post_init__(self) -> None:
        if len(self.shapes) != len(self.dtypes):
            raise ValueError(
                f"a layout needs as many shapes as dtypes, found {len(self.shapes)} and "
                f"{len(self.dtypes)}."
            )
        for dtype in self.dtypes:
            if dtype not in NOISE_DTYPES:
                raise ValueError(f"noise is computed in float32 or float64, found {dtype!r}.")

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The row's segments; those without entries are left out."""
        return segments(self.shapes, self.dtypes)

    def tensors(self, flats: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Returns all tensors of a row, those of segments without entries included.

        Args:
          flats: The flat vector of each of ``segments``.

        Returns:
          One array for each of ``shapes``; views of the vectors where they have entries.

        Raises:
          ValueError: If a vector has not its segment's size.
        """
        found: dict[int, np.ndarray] = {}
        for segment, flat in zip(self.segments, flats, strict=True):
            found.update(split(segment, flat, self.shapes))
        return [
            found[position] if position in found else np.empty(shape, dtype)
            for position, (shape, dtype) in enumerate(zip(self.shapes, self.dtypes, strict=True))
        ]


def segments(shapes: Sequence[tuple[int, ...]], dtypes: Sequence[str]) -> tuple[Segment, ...]:
    """Returns the segments of a row, in order; those without entries are left out.

    Args:
      shapes: The shape of each tensor.
      dtypes: The dtype that noise for each is computed in, "float32" or "float64".

    Returns:
      At most one segment for each dtype.
    """
    found = []
    first_chunk = 0
    for dtype in NOISE_DTYPES:
        positions = tuple(position for position, name in enumerate(dtypes) if name == dtype)
        size = sum(math.prod(shapes[position]) for position in positions)
        if size:
            found.append(Segment(dtype, first_chunk, size, positions))
            first_chunk += found[-1].num_chunks
    return tuple(found)


def total_size(segments: Sequence[Segment]) -> int:
    """Returns the number of entries of a row; the gap before a segment does not count."""
    return sum(segment.size for segment in segments)


def split(
    segment: Segment, flat: np.ndarray, shapes: Sequence[tuple[int, ...]]
) -> dict[int, np.ndarray]:
    """Returns the tensors of a segment.

    Args:
      segment: The segment.
      flat: (size,) its entries.
      shapes: The shape of each tensor of the row.

    Returns:
      Position -> array of the position's shape, a view of ``flat``.

    Raises:
      ValueError: If ``flat`` has not the segment's size.
    """
    if flat.shape != (segment.size,):
        raise ValueError(
            f"a segment of {segment.size} entries cannot be split from shape {flat.shape}."
        )
    found = {}
    start = 0
    for position in segment.positions:
        stop = start + math.prod(shapes[position])
        found[position] = flat[start:stop].reshape(shapes[position])
        start = stop
    return found
