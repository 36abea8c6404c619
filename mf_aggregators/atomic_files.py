"""Atomic file writes (temporary file, fsync, rename), and cached values in the user's cache.

An existing file is replaced. If a function cannot write a file, it raises an OSError with the
file's name and leaves the existing file unchanged. Everything in the cache can be computed again.
"""

import contextlib
import glob
import hashlib
import json
import os
import pathlib
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import IO, TypeVar

from mf_aggregators import inputs

_Value = TypeVar("_Value")


class CacheWarning(UserWarning):
    """A cache entry could not be used or written, so its value was computed."""


@contextlib.contextmanager
def writing(
    path: str | os.PathLike[str], *, waits_for_disk: bool = True, mode: int | None = None
) -> Iterator[IO[bytes]]:
    """Opens a binary file that gets its name only after the ``with`` block.

    Args:
      path: The name. If the block raises an error, an existing file stays unchanged.
      waits_for_disk: Whether the file gets its name only once it is on disk. False is for files
        that are checked before use and can be made again, because a crash of the machine may damage
        them.
      mode: The file's permissions; None for the usual permissions of a new file.

    Yields:
      The empty file to write to. Code that opens files by name can use its ``name``, but must not
      replace the file.
    """
    with (
        _replacing(pathlib.Path(path), waits_for_disk, mode) as partial,
        partial.open("wb") as file,
    ):
        yield file


def write(
    path: str | os.PathLike[str], contents: bytes | memoryview | str, *, waits_for_disk: bool = True
) -> None:
    """Writes a file atomically, text in UTF-8; see :func:`writing`."""
    with writing(path, waits_for_disk=waits_for_disk) as file:
        file.write(contents.encode("utf-8") if isinstance(contents, str) else contents)


def remove_unfinished(path: str | os.PathLike[str]) -> None:
    """Removes temporary files of a file that killed processes left behind.

    Args:
      path: The file, which itself is kept. No other process may be writing it.

    Raises:
      OSError: If a temporary file cannot be removed.
    """
    target = pathlib.Path(path)
    for partial in target.parent.glob(f".{glob.escape(target.name)}.*"):
        partial.unlink(missing_ok=True)


def synchronise(path: pathlib.Path) -> None:
    """Waits until a file's contents, or a directory's entries, are on the disk (fsync).

    Args:
      path: The file or directory.

    Raises:
      OSError: If it cannot be opened, or a part of it could not be written to the disk.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def find_cache(name: str = "") -> pathlib.Path | None:
    """Returns a folder of ``mf_aggregators`` in the user's cache directory.

    Args:
      name: The folder; the whole directory by default.

    Returns:
      A path in ``$XDG_CACHE_HOME`` if that is absolute, otherwise in ``~/.cache``. None if there is
      no home directory (as in some containers).
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says that relative paths are ignored.
    if os.path.isabs(base):
        return pathlib.Path(base) / "mf_aggregators" / name
    try:
        return pathlib.Path.home() / ".cache" / "mf_aggregators" / name
    except RuntimeError:
        return None


def digest(contents: Mapping[str, object]) -> str:
    """Returns the SHA-256 of a JSON-able mapping, in hexadecimal."""
    return hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()


def fetch(
    entry: pathlib.Path | None,
    description: Mapping[str, object],
    compute: Callable[[], _Value],
    *,
    field: str,
    to_json: Callable[[_Value], object],
    from_json: Callable[[object], _Value],
) -> _Value:
    """Returns a cached value, or computes and caches it.

    An entry is written atomically. If it is damaged, or for another description, the value is
    computed again.

    Args:
      entry: The file; None for no cache.
      description: All inputs that determine the value, JSON-able; the file contains it as well.
      compute: Computes the value.
      field: The name of the value in the file.
      to_json: Converts the value to JSON-able data.
      from_json: Converts this data to the value; raises a ValueError if it must not be used.

    Returns:
      The value. A CacheWarning says that the entry could not be used, so that the value was
      computed, or that it could not be cached.
    """
    if entry is None:
        return compute()
    # Unlike Path.exists, this does not raise where the cache may not be read.
    if os.path.exists(entry):
        try:
            contents = inputs.part(inputs.parsed_json(entry.read_text(encoding="utf-8")), dict)
            stated = contents.pop("sha256")
            if contents["description"] != description or stated != digest(contents):
                raise ValueError("its checksum or its description differs")
            return from_json(contents[field])
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            said = f"{entry} is damaged ({error}). Its value is computed again."
            warnings.warn(said, CacheWarning, stacklevel=2)
    value = compute()
    contents = {"description": description, field: to_json(value)}
    text = json.dumps({**contents, "sha256": digest(contents)}) + "\n"
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        write(entry, text)
    except OSError as error:
        said = (
            f"{entry} cannot be written: {error.strerror}. Its value is used without being cached."
        )
        warnings.warn(said, CacheWarning, stacklevel=2)
    return value


@contextlib.contextmanager
def _replacing(
    target: pathlib.Path, waits_for_disk: bool, mode: int | None
) -> Iterator[pathlib.Path]:
    """Yields the unfinished file's path."""
    descriptor, name = tempfile.mkstemp(
        prefix=f".{target.name}.", suffix=".partial", dir=target.parent
    )
    partial = pathlib.Path(name)
    try:
        try:
            yield partial
            os.fchmod(descriptor, _usual_mode() if mode is None else mode)
            # fsync of this descriptor reports all errors of earlier writes.
            if waits_for_disk:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        partial.replace(target)
        if waits_for_disk:
            synchronise(target.parent)
    except OSError as error:
        # The system's error for a full disk does not name the file.
        if error.errno is not None:
            error.filename = error.filename or os.fspath(target)
        raise
    finally:
        partial.unlink(missing_ok=True)


def _usual_mode() -> int:
    """The usual permissions of a new file (files of ``tempfile`` are private)."""
    # Python can read the umask only by setting it.
    mask = os.umask(0o022)
    os.umask(mask)
    return 0o666 & ~mask
