"""The files that a statement was made from: their hashes, and whether they are still the same."""

import datetime
import hashlib
import hmac
import os
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

# A file of many gigabytes is read in pieces.
_BYTES_AT_ONCE = 1 << 20


def hashes(
    files: Iterable[pathlib.Path],
    folder: pathlib.Path,
    key_files: Mapping[pathlib.Path, pathlib.Path],
) -> tuple[dict[str, str], dict[str, str]]:
    """Returns ``files`` and ``key_files`` of ``statements.Evidence``.

    Args:
      files: The files. A directory counts as the names and hashes of the files in it.
      folder: The folder of the statement, from which they are named.
      key_files: For each file that tells a secret, a file with secret random bits. They are the key
        of an HMAC-SHA-256: the SHA-256 of who was drawn would confirm a guess of it to every
        reader. Copies of these files by other names are left out for the same reason.

    Raises:
      OSError: If one cannot be read.
    """
    secrets = {_hash(file) for file in (*key_files, *key_files.values())}
    found, keys = {}, {}
    for file in files:
        name = os.path.relpath(file, folder)
        if file in key_files:
            found[name] = _hash(file, key_files[file].read_bytes())
            keys[name] = os.path.relpath(key_files[file], folder)
        elif not secrets or _hash(file) not in secrets:
            found[name] = _hash(file)
    return found, keys


def today() -> str:
    """Returns the date of a statement that is made now: that of UTC, as 2026-11-26."""
    return datetime.datetime.now(datetime.timezone.utc).date().isoformat()


def differences(document: Mapping[str, Any], folder: pathlib.Path) -> list[str]:
    """Returns which of the files of a statement are gone, or other ones, as sentences.

    Args:
      document: The statement.
      folder: Its folder.

    Raises:
      OSError: If one cannot be read.
    """
    found = []
    for name, digest in document["files"].items():
        key_file = document["key_files"].get(name)
        missing = [each for each in (key_file, name) if each and not (folder / each).exists()]
        if missing:
            found.append(f"{missing[0]} is not there.")
            continue
        key = None if key_file is None else (folder / key_file).read_bytes()
        if _hash(folder / name, key) != digest:
            kind = "SHA-256" if key is None else "HMAC"
            found.append(f"{name} is another file: its {kind} is not the one that is stated.")
    return found


def _hash(path: pathlib.Path, key: bytes | None = None) -> str:
    found: Any = hashlib.sha256() if key is None else hmac.new(key, digestmod=hashlib.sha256)
    if path.is_dir():
        for each in sorted(path.iterdir()):
            found.update(f"{each.name} {_hash(each)}\n".encode())
        return str(found.hexdigest())
    with path.open("rb") as file:
        while piece := file.read(_BYTES_AT_ONCE):
            found.update(piece)
    return str(found.hexdigest())
