"""Directories that hold the checksums of their files, so that no damage is overlooked."""

import hashlib
import os
import pathlib

from mf_aggregators import atomic_files

CHECKSUM_FILE = "SHA256SUMS"

_CHUNK_BYTES = 1 << 20


class DamagedDirectoryError(ValueError):
    """A directory that is not as it was written; the message names the file and the reason."""


def seal(directory: str | os.PathLike[str], title: str) -> None:
    """Writes the checksums of a directory's files beside them, and waits until all are on disk.

    The file has the format of ``sha256sum``, after a comment with the title.

    Args:
      directory: The directory; its files are complete.
      title: What the directory is, one line: it counts as a part of the contents.

    Raises:
      OSError: If a file cannot be read or the disk refuses one.
    """
    directory = pathlib.Path(directory)
    atomic_files.write_text(directory / CHECKSUM_FILE, _checksums(directory, title))
    for path in (*directory.rglob("*"), directory):
        atomic_files.synchronise(path)


def check_seal(directory: str | os.PathLike[str], title: str) -> None:
    """Compares a directory with what :func:`seal` wrote into it, byte by byte.

    Args:
      directory: The directory.
      title: What it has to be.

    Raises:
      DamagedDirectoryError: If a file was altered, is missing, cannot be read or came
        afterwards, or the directory was sealed as another one or never.
    """
    directory = pathlib.Path(directory)
    try:
        stated = (directory / CHECKSUM_FILE).read_bytes()
        found = _checksums(directory, title)
    except OSError as error:
        path = pathlib.Path(error.filename or directory)
        raise DamagedDirectoryError(f"{path} cannot be read: {error.strerror}") from error
    # The whole text is compared, so that no altered byte of the checksums is overlooked either.
    if stated == found.encode("utf-8"):
        return
    before = _by_name(stated.decode("utf-8", "replace"))
    after = _by_name(found)
    for name in sorted({*before, *after}):
        if before.get(name) != after.get(name):
            raise DamagedDirectoryError(
                f"{directory / name} does not match {directory / CHECKSUM_FILE}"
            )
    raise DamagedDirectoryError(f"{directory / CHECKSUM_FILE} is not that of {title}")


def _checksums(directory: pathlib.Path, title: str) -> str:
    files = sorted(
        path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()
    )
    lines = [f"{_sha256(directory / name)}  {name}\n" for name in files if name != CHECKSUM_FILE]
    return "".join([f"# {title}\n", *lines])


def _by_name(checksums: str) -> dict[str, str]:
    lines = [line for line in checksums.splitlines() if not line.startswith("#")]
    return {name: digest for digest, _, name in (line.partition("  ") for line in lines)}


def _sha256(path: pathlib.Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
