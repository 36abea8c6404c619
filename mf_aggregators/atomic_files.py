"""Atomic file writes (temporary file, fsync, rename), and the user's cache of such files.

A file that is there already is replaced. Functions that write raise an OSError, with the file's
name, if they cannot, and leave it as it was. Everything in the cache can be computed again.
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
from typing import IO, Any, TypeVar

from mf_aggregators import inputs

_Value = TypeVar("_Value")


class CacheWarning(UserWarning):
    """An entry of a cache could not be used or written; its value was computed."""


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
      The empty file to write to. Programs that open files themselves find it by its ``name``; it
      has to stay the same file.
    """
    with (
        _replacing(pathlib.Path(path), waits_for_disk, mode) as partial,
        partial.open("wb") as file,
    ):
        yield file


def write(
    path: str | os.PathLike[str], contents: bytes | memoryview | str, *, waits_for_disk: bool = True
) -> None:
    """Writes a file, of text in UTF-8; see :func:`writing`."""
    with writing(path, waits_for_disk=waits_for_disk) as file:
        file.write(contents.encode("utf-8") if isinstance(contents, str) else contents)


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


def find_cache(name: str = "") -> pathlib.Path | None:
    """Returns a folder of ``mf_aggregators`` in the user's cache directory.

    Args:
      name: The folder; the whole directory by default.

    Returns:
      A path in ``$XDG_CACHE_HOME`` where that is absolute, else in ``~/.cache``. None if there is
      no home directory, as in containers that run under any user id.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification has relative paths ignored.
    if os.path.isabs(base):
        return pathlib.Path(base) / "mf_aggregators" / name
    try:
        return pathlib.Path.home() / ".cache" / "mf_aggregators" / name
    except RuntimeError:
        return None


def digest(contents: Mapping[str, Any]) -> str:
    """Returns the SHA-256 of a JSON-able mapping, in hexadecimal."""
    return hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()


def fetch(
    entry: pathlib.Path | None,
    description: Mapping[str, Any],
    compute: Callable[[], _Value],
    *,
    field: str,
    to_json: Callable[[_Value], Any],
    from_json: Callable[[Any], _Value],
) -> _Value:
    """Returns a cached value, or computes and caches it.

    An entry is written whole or not at all. One that is damaged, or is for something else, is
    computed again.

    Args:
      entry: The file; None for no cache.
      description: Everything that the value follows from, JSON-able; the file says it too.
      compute: Computes the value.
      field: The name of the value in the file.
      to_json: Makes something JSON-able of it.
      from_json: Makes it from that again; raises a ValueError for what must not be used.

    Returns:
      The value. With a CacheWarning, it was computed because its entry cannot be used, or it could
      not be cached.
    """
    if entry is None:
        return compute()
    # Unlike Path.exists, this does not raise where the cache may not be read.
    if os.path.exists(entry):
        try:
            contents = inputs.parsed_json(entry.read_text(encoding="utf-8"))
            stated = contents.pop("sha256")
            if contents["description"] != description or stated != digest(contents):
                raise ValueError("its checksum or its description differs")
            return from_json(contents[field])
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            said = f"{entry} is damaged ({error}). It is computed again."
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


def _usual_mode() -> int:
    """The permissions of a new file: what ``tempfile`` makes is open to its owner alone."""
    # Python can read the mask only by setting it.
    mask = os.umask(0o022)
    os.umask(mask)
    return 0o666 & ~mask
