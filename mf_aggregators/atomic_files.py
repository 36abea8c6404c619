"""Files that are written whole or not at all, and take a name only once they are on disk."""

import contextlib
import glob
import os
import pathlib
import tempfile
from collections.abc import Iterator
from typing import IO


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[pathlib.Path]:
    """Gives an empty file beside another one, whose place it takes once it is complete and on disk.

    Args:
      path: The file; what stands there is replaced.

    Yields:
      The path of the empty file, for programs that open files themselves: it has to stay the same
      file. If the block raises, the file at ``path`` stays as it was.

    Raises:
      OSError: If the file cannot be written.
    """
    with _replacing(pathlib.Path(path)) as (partial, _):
        yield partial


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
    with (
        _replacing(pathlib.Path(path)) as (_, descriptor),
        os.fdopen(descriptor, "wb", closefd=False) as file,
    ):
        yield file


def write_bytes(path: str | os.PathLike[str], contents: bytes | memoryview) -> None:
    """Writes a file, whole or not at all.

    Args:
      path: The file; what stands there is replaced.
      contents: Its contents.

    Raises:
      OSError: If the file cannot be written.
    """
    with writing(path) as file:
        file.write(contents)


def write_cached_bytes(path: str | os.PathLike[str], contents: bytes | memoryview) -> None:
    """Writes a file that takes its name once it is complete, and does not wait for the disk.

    After a crash of the machine it may be damaged: for what is checked before it is used and can
    be made again.

    Args:
      path: The file; what stands there is replaced.
      contents: Its contents.

    Raises:
      OSError: If the file cannot be written.
    """
    with (
        _replacing(pathlib.Path(path), waits_for_disk=False) as (_, descriptor),
        os.fdopen(descriptor, "wb", closefd=False) as file,
    ):
        file.write(contents)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Writes a UTF-8 text file, whole or not at all.

    Args:
      path: The file; what stands there is replaced.
      text: Its contents.

    Raises:
      OSError: If the file cannot be written.
    """
    write_bytes(path, text.encode("utf-8"))


def remove_unfinished(path: str | os.PathLike[str]) -> None:
    """Removes what processes that were killed in :func:`writing` have left of a file.

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
    """Returns what the process's mask leaves of the permissions of a new file or directory.

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
    target: pathlib.Path, waits_for_disk: bool = True
) -> Iterator[tuple[pathlib.Path, int]]:
    """Yields the unfinished file's path and a descriptor of it."""
    descriptor, name = tempfile.mkstemp(
        prefix=f".{target.name}.", suffix=".partial", dir=target.parent
    )
    partial = pathlib.Path(name)
    try:
        try:
            yield partial, descriptor
            os.fchmod(descriptor, usual_mode(0o666))
            # By a descriptor that was open all the time: it is told of everything that the disk
            # has refused.
            if waits_for_disk:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        partial.replace(target)
        if waits_for_disk:
            synchronise(target.parent)
    finally:
        partial.unlink(missing_ok=True)
