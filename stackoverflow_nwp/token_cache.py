"""Tokenized clients of a large data set, kept on disk one by one as they are asked for."""

import contextlib
import hashlib
import logging
import pathlib
import sqlite3
import zlib
from collections.abc import Iterator

import numpy as np

_LOGGER = logging.getLogger(__name__)

_SECONDS_TO_WAIT_FOR_OTHERS = 10.0
# Fast; padding, which is most of the text, vanishes all the same.
_COMPRESSION = 1
_TYPE = np.dtype("<i4")


class TokenCache:
    """Rows of token ids by client, in a file that several processes may share.

    It is a cache: whatever is missing, broken or made for another key is not found, and what
    cannot be written is not kept, with one warning. Rows are compressed, with the checksum of
    zlib.
    """

    def __init__(self, path: pathlib.Path, key: str, width: int) -> None:
        """Names the file, which the first client makes.

        Args:
            path: The file.
            key: What the rows depend on: those that were made for another key are not found.
            width: The token ids of a row.
        """
        self._path = path
        self._key = key
        self._width = width
        self._is_on = True

    def get(self, client_id: str) -> np.ndarray | None:
        """Reads a client.

        Args:
            client_id: Its name.

        Returns:
            Its rows, int32 and read-only, or None.
        """
        if not (self._is_on and self._path.exists()):
            return None
        try:
            with self._open() as connection:
                found = connection.execute(
                    "SELECT rows FROM clients WHERE client_id = ?", (client_id,)
                ).fetchone()
            contents = b"" if found is None else zlib.decompress(found[0])
            label = self._label(client_id)
            if not contents.startswith(label):
                return None
            tokens = np.frombuffer(contents, _TYPE, offset=len(label))
            return tokens.astype(np.int32, copy=False).reshape(-1, self._width)
        except (sqlite3.Error, zlib.error, TypeError, ValueError) as error:
            # It is overwritten, if the file can be written at all.
            _LOGGER.debug("Client %s is not in %s: %s", client_id, self._path, error)
            return None

    def put(self, client_id: str, rows: np.ndarray) -> None:
        """Keeps a client's rows, in place of those that it may have.

        Args:
            client_id: Its name.
            rows: An integer array, one row per sentence.
        """
        if not self._is_on:
            return
        contents = self._label(client_id) + np.ascontiguousarray(rows, _TYPE).tobytes()
        try:
            with self._open() as connection:
                connection.execute(
                    "CREATE TABLE IF NOT EXISTS clients (client_id TEXT PRIMARY KEY, rows BLOB)"
                )
                connection.execute(
                    "INSERT OR REPLACE INTO clients VALUES (?, ?)",
                    (client_id, zlib.compress(contents, _COMPRESSION)),
                )
        except sqlite3.OperationalError as error:
            self._is_on = False
            _LOGGER.warning(
                "Could not cache tokens in %s: %s. Clients are tokenized each time.",
                self._path,
                error,
            )
        except sqlite3.DatabaseError as error:
            _LOGGER.warning("%s is broken (%s): begun anew.", self._path, error)
            with contextlib.suppress(OSError):
                self._path.unlink()

    def _label(self, client_id: str) -> bytes:
        """What rows begin with, so that a broken index does not give those of another client."""
        return hashlib.sha256(f"{self._key}\n{client_id}".encode()).digest()

    @contextlib.contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        connection = sqlite3.connect(self._path, timeout=_SECONDS_TO_WAIT_FOR_OTHERS)
        with contextlib.closing(connection), connection:
            # A cache need not survive a loss of power; a killed process is rolled back.
            connection.execute("PRAGMA synchronous = OFF")
            yield connection
