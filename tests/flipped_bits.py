"""Archives of arrays with one wrong bit, for tests of their readers."""

import pathlib
from collections.abc import Iterator

from tests.examples import examples

# Bytes of an archive's first header, and of its directory.
_OF_HEADER, _OF_END = 50, 140


def flipped(path: pathlib.Path) -> Iterator[int]:
    """Writes an archive again and again with one bit flipped in its first header or its directory.

    The short test flips half of the bits.

    Args:
      path: The archive; it is whole again at the end.

    Yields:
      The place of the byte.
    """
    whole = path.read_bytes()
    for place in (*range(_OF_HEADER), *range(max(0, len(whole) - _OF_END), len(whole))):
        for bit in range(0, 8, 8 // examples(8, one_in=2)):
            changed = bytearray(whole)
            changed[place] ^= 1 << bit
            path.write_bytes(changed)
            yield place
    path.write_bytes(whole)
