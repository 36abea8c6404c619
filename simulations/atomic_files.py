"""Files that are written whole or not at all."""

import contextlib
import os
import pathlib
import tempfile
from collections.abc import Iterator
from typing import IO


@contextlib.contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Opens a binary file that takes its name only once it is complete and on disk.

    Args:
      path: The file; what stands there is replaced.

    Yields:
      A file to write to. If the block raises, the file at ``path`` stays as it was.

    Raises:
      OSError: If the file cannot be written.
    """
    target = pathlib.Path(path)
    descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    partial = pathlib.Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes files that only the owner can read.
        mask = os.umask(0o022)
        os.umask(mask)
        partial.chmod(0o666 & ~mask)
        partial.replace(target)
        synchronise(target.parent)
    finally:
        partial.unlink(missing_ok=True)


def synchronise(path: pathlib.Path) -> None:
    """Waits until a file's contents, or a directory's entries, are on the disk itself.

    Args:
      path: The file or directory.

    Raises:
      OSError: If it cannot be opened.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Writes a UTF-8 text file, whole or not at all.

    Args:
      path: The file; what stands there is replaced.
      text: Its contents.

    Raises:
      OSError: If the file cannot be written.
    """
    with writing(path) as file:
        file.write(text.encode("utf-8"))
