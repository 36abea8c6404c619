"""The files that a statement was made from: their hashes, and whether they are still the same."""

import datetime
import hashlib
import hmac
import os
import pathlib
from collections.abc import Iterable
from typing import Any

from mf_aggregators.privacy.provenance import Provenance

# A file of many gigabytes is read in pieces.
_BYTES_AT_ONCE = 1 << 20


def hashes(
    files: Iterable[pathlib.Path],
    folder: pathlib.Path,
    key_file: pathlib.Path | None = None,
    *,
    secrets: Iterable[pathlib.Path] = (),
) -> tuple[tuple[str, str], ...]:
    """Returns the names of files, from a folder, and their hashes.

    Args:
      files: The files.
      folder: The folder of the statement.
      key_file: None for SHA-256. For files that tell a secret, a file with secret random bits: the
        hash is an HMAC-SHA-256 with its contents as the key. The SHA-256 of who was drawn would
        confirm a guess of it to every reader.
      secrets: Files that are left out, and so is whatever has the same contents: a copy or a link
        by another name would tell their SHA-256.

    Raises:
      OSError: If one cannot be read.
    """
    key = None if key_file is None else key_file.read_bytes()
    hidden = {_hash(file, None) for file in secrets}
    return tuple(
        (os.path.relpath(file, folder), _hash(file, key))
        for file in files
        if not hidden or _hash(file, None) not in hidden
    )


def today() -> str:
    """Returns the date of a statement that is made now: that of UTC, as 2026-11-26."""
    return datetime.datetime.now(datetime.timezone.utc).date().isoformat()


def differences(provenance: Provenance, folder: pathlib.Path) -> list[str]:
    """Returns which of the files of a statement are gone, or other ones, as sentences.

    Args:
      provenance: What the statement says of them.
      folder: The folder of the statement.

    Raises:
      OSError: If one cannot be read.
    """
    found, key = [], None
    if provenance.secret_files:
        key_file = folder / provenance.key_file
        if not key_file.is_file():
            return [f"{provenance.key_file} is not there, without which nothing can be compared."]
        key = key_file.read_bytes()
    for name, digest in provenance.files:
        file = folder / name
        if not file.is_file():
            found.append(f"{name} is not there.")
            continue
        is_secret = name in provenance.secret_files
        if _hash(file, key if is_secret else None) != digest:
            kind = "HMAC" if is_secret else "SHA-256"
            found.append(f"{name} is another file: its {kind} is not the one that is stated.")
    return found


def _hash(path: pathlib.Path, key: bytes | None) -> str:
    found: Any = hashlib.sha256() if key is None else hmac.new(key, digestmod=hashlib.sha256)
    with path.open("rb") as file:
        while piece := file.read(_BYTES_AT_ONCE):
            found.update(piece)
    return found.hexdigest()
