"""Files that are written whole or not at all, and take a name only once they are on disk.

What stood under the name is replaced. Functions that write raise an OSError, with the file's name,
if they cannot, and leave it as it was.
"""

import contextlib
import glob
import os
import pathlib
import tempfile
from collections.abc import Iterator
from typing import IO


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[pathlib.Path]:
    """Opens a temporary file that replaces ``path`` after the block.

    Args:
      path: The other file. It stays as it was if the block raises.

    Yields:
      The path of the empty file, for programs that open files themselves. It has to stay the same
      file.
    """
    with _replacing(pathlib.Path(path)) as (partial, _):
        yield partial


@contextlib.contextmanager
def writing(
    path: str | os.PathLike[str], *, waits_for_disk: bool = True, mode: int | None = None
) -> Iterator[IO[bytes]]:
    """Opens a binary file that takes its name after the block.

    Args:
      path: The name. What stands there stays as it was if the block raises.
      waits_for_disk: Whether it takes its name only once it is on disk. False is for what is
        checked before it is used and can be made again: a crash of the machine may damage it.
      mode: The file's permissions; None for those of any new file.

    Yields:
      The file to write to.
    """
    with (
        _replacing(pathlib.Path(path), waits_for_disk, mode) as (_, descriptor),
        os.fdopen(descriptor, "wb", closefd=False) as file,
    ):
        yield file


def write_bytes(
    path: str | os.PathLike[str], contents: bytes | memoryview, *, waits_for_disk: bool = True
) -> None:
    """Writes a file; see :func:`writing`."""
    with writing(path, waits_for_disk=waits_for_disk) as file:
        file.write(contents)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Writes a text file in UTF-8."""
    write_bytes(path, text.encode("utf-8"))


def remove_unfinished(path: str | os.PathLike[str]) -> None:
    """Removes temporary files that killed processes left.

    Args:
      path: The file; it stays itself. No other process may be writing it.

    Raises:
      OSError: If something cannot be removed.
    """
    target = pathlib.Path(path)
    for partial in target.parent.glob(f".{glob.escape(target.name)}.*"):
        partial.unlink(missing_ok=True)


def synchronise(path: pathlib.Path) -> None:
    """Waits until a file's contents, or a directory's entries, are on the disk itself.

    Args:
      path: The file or directory.

    Raises:
      OSError: If it cannot be opened, or the disk has refused a part of it.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def usual_mode(mode: int) -> int:
    """Returns the permissions of a new file or directory under the process's umask.

    What ``tempfile`` makes is open to its owner alone.

    Args:
      mode: The permissions that are asked for, such as 0o666.
    """
    # Python can read the mask only by setting it.
    mask = os.umask(0o022)
    os.umask(mask)
    return mode & ~mask


@contextlib.contextmanager
def _replacing(
    target: pathlib.Path, waits_for_disk: bool = True, mode: int | None = None
) -> Iterator[tuple[pathlib.Path, int]]:
    """Yields the unfinished file's path and a descriptor of it."""
    descriptor, name = tempfile.mkstemp(
        prefix=f".{target.name}.", suffix=".partial", dir=target.parent
    )
    partial = pathlib.Path(name)
    try:
        try:
            yield partial, descriptor
            os.fchmod(descriptor, usual_mode(0o666) if mode is None else mode)
            # A descriptor that was open all the time reports every write that the disk refused.
            if waits_for_disk:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        partial.replace(target)
        if waits_for_disk:
            synchronise(target.parent)
    except OSError as error:
        # The system's error for a full disk names no file.
        if error.errno is not None:
            error.filename = error.filename or os.fspath(target)
        raise
    finally:
        partial.unlink(missing_ok=True)
