"""Random bits for graphs that can reach nothing but files.

TensorFlow Federated runs graphs in worker processes without Python. Where their random bits
come from a generator that TensorFlow does not have, a thread of the process that built
the aggregator draws them, and the graph asks for them through files in a private
directory. All files of one exchange share a name of letters, digits, ``-`` and ``_``:

1. The client writes ``<name>.request``, one ASCII line ``seed0 seed1 first_row num_rows
   first_index count end`` of decimal integers. It need not write it atomically: the
   service waits for the newline.
2. The service puts ``<name>.bits`` in place, atomically: for each of the rows its integers
   ``[first_index, first_index + count)``, as little-endian uint64. If it cannot, it puts
   ``<name>.error`` there, one line that says why. Then it removes the request.
3. The client waits until the request is gone, reads the answer and writes
   ``<name>.done``, of any content. The service removes the answer and that file.

The end of the request is what to wait for: an answer that stands beside a request may be
that of an earlier request of this name. A client that was killed may leave any step out,
and another may begin again with step 1 under the same name; two that live at one time need
two names.

Requests hold the seed, which is the secret of the mechanism. They are removed as soon as
they are answered, only the directory's owner can read them, and nothing that the service
writes repeats them.
"""

import contextlib
import dataclasses
import os
import pathlib
import re
import stat
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import BinaryIO

import numpy as np

# (seed, row, first_index, count) -> (count,) uint64; a pure function.
Integers = Callable[[np.ndarray, int, int, int], np.ndarray]

# TensorFlow's worker fails without an error on larger strings.
LARGEST_ANSWER_IN_BYTES = 1 << 31

_BYTES_PER_NUMBER = 8
_LONGEST_REQUEST_IN_BYTES = 1024
_REQUEST = re.compile(rb"(-?[0-9]{1,20}) (-?[0-9]{1,20})" + 4 * rb" ([0-9]{1,20})" + rb" end\n")
_CLIENT_FILE = re.compile(r"([A-Za-z0-9_-]+)\.(request|done)")
_STALE_FILE = re.compile(r"[A-Za-z0-9_-]+\.(done|bits|error|partial)")
# Names the service's unfinished files; they hold no client's name, which may be as long
# as the file system allows.
_PARTIAL_PREFIX = "answer-"

# A graph waits for random bits several times a round: short naps while it asks, and long
# ones while it trains.
_SHORTEST_NAP_IN_SECONDS = 0.0005
_LONGEST_NAP_IN_SECONDS = 0.02
_ALERT_FOR_SECONDS = 0.05


class _RequestError(Exception):
    """A request that cannot be answered; the message is the client's error line."""


class _StoppedError(Exception):
    """The service was stopped within a request, which stays for the next start."""


@dataclasses.dataclass(frozen=True)
class _Request:
    seed: tuple[int, int] = dataclasses.field(repr=False)
    first_row: int
    num_rows: int
    first_index: int
    count: int


@dataclasses.dataclass(frozen=True)
class _Answer:
    """Which request a ``.bits`` file answers, and how to tell that file from others."""

    request: _Request
    identity: tuple[int, int, int]


class BitService:
    """Answers requests for random bits in a directory, from a daemon thread.

    A directory belongs to one service at a time: its start removes the answers of
    earlier ones, as nothing tells which requests they are for. Requests that wait are
    answered. A forked process has the object without its thread, and the parent goes on
    serving; ``start`` in the child is for a parent that ends before it.

    Attributes:
      directory: Where clients put their requests, as an absolute path without links.
    """

    def __init__(self, directory: str | os.PathLike[str], integers: Integers) -> None:
        """Creates the directory, and serves nothing yet.

        Args:
          directory: Where clients put their requests; created, with its parents, for its
            owner alone if it is missing.
          integers: (seed, row, first_index, count) -> the uint64 integers [first_index,
            first_index + count) of a row, for a (2,) int64 seed and an even first_index.
            Called by the service's thread only.

        Raises:
          ValueError: If ``directory`` is not a directory, belongs to another user, or is
            open to others.
          OSError: If it cannot be created.
        """
        self.directory = pathlib.Path(directory).resolve()
        self._bits = integers
        self._answers: dict[str, _Answer] = {}
        self._partial_names: set[str] = set()
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        _make_private_directory(self.directory)
        _check_private_directory(self.directory)

    def __enter__(self) -> "BitService":
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Starts to serve; does nothing if the service is started.

        Raises:
          ValueError: If the directory is not private any more.
          OSError: If the directory cannot be created or read.
        """
        is_forked = self._process != os.getpid()
        if is_forked:
            # The thread that holds these locks may not exist in this process.
            self._process = os.getpid()
            self._lock = threading.Lock()
            self._thread = None
        with self._lock:
            if self._thread is not None:
                return
            _make_private_directory(self.directory)
            _check_private_directory(self.directory)
            if not is_forked:
                # The parent's clients may be about to read theirs.
                self._remove_stale_files()
            self._answers = {}
            self._partial_names = set()
            self._stopping = threading.Event()
            thread = threading.Thread(
                target=self._serve, args=(self._stopping,), name="bit-service", daemon=True
            )
            thread.start()
            self._thread = thread

    def stop(self) -> None:
        """Ends the thread, after the row that it draws; does nothing without a thread.

        Requests without an answer stay, and the next start answers them.
        """
        if self._process != os.getpid():
            return
        with self._lock:
            if self._thread is None:
                return
            self._stopping.set()
            self._thread.join()
            self._thread = None

    def _serve(self, stopping: threading.Event) -> None:
        nap = _SHORTEST_NAP_IN_SECONDS
        last_request = time.monotonic()
        while not stopping.wait(nap):
            is_asked = False
            try:
                is_asked = self._look(stopping)
            except Exception:
                # The directory is gone or unreadable. Clients wait for this thread, so it
                # goes on until there is a directory again.
                with contextlib.suppress(OSError):
                    _make_private_directory(self.directory)
            now = time.monotonic()
            if is_asked:
                last_request = now
                nap = _SHORTEST_NAP_IN_SECONDS
            elif now - last_request > _ALERT_FOR_SECONDS:
                nap = min(2 * nap, _LONGEST_NAP_IN_SECONDS)

    def _look(self, stopping: threading.Event) -> bool:
        """Deals with what lies in the directory; returns whether a client did anything."""
        requested, done = self._client_files()
        is_asked = False
        # A request is newer than a ``.done`` beside it, and stands for an answer wanted.
        for name in done - requested:
            with contextlib.suppress(OSError):
                self._forget(name)
                is_asked = True
        partial_names = set()
        for name in requested:
            if stopping.is_set():
                break
            try:
                content = self._read_request(name)
                if _is_complete(content):
                    self._answer(name, content, stopping)
                    is_asked = True
                else:
                    partial_names.add(name)
            except _StoppedError:
                break
            except Exception:
                # Vanished, or not even an error can be written: others still wait.
                continue
        # A request that was never finished must not keep the thread awake.
        is_asked = is_asked or partial_names != self._partial_names
        self._partial_names = partial_names
        return is_asked

    def _client_files(self) -> tuple[set[str], set[str]]:
        requested: set[str] = set()
        done: set[str] = set()
        with os.scandir(self.directory) as entries:
            for entry in entries:
                match = _CLIENT_FILE.fullmatch(entry.name)
                if match and entry.is_file(follow_symlinks=False):
                    (requested if match[2] == "request" else done).add(match[1])
        return requested, done

    def _read_request(self, name: str) -> bytes:
        # What replaced the file since it was listed may be a pipe or a link.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(self._path(name, "request"), flags)
        try:
            return os.read(descriptor, _LONGEST_REQUEST_IN_BYTES + 1)
        finally:
            os.close(descriptor)

    def _answer(self, name: str, content: bytes, stopping: threading.Event) -> None:
        # From here on, a ``.done`` is for an answer before this request. It may have been
        # written after its place in the listing was passed, so it is removed unseen: the
        # next listing would take it for the end of this exchange.
        self._remove(name, "done")
        try:
            request = _parse(content)
            if not self._is_answered(name, request):
                self._write_bits(name, request, stopping)
        except _StoppedError:
            raise
        except BaseException as error:
            # Even those that end a thread, as panics of foreign code do: clients wait.
            self._write_error(name, error)
        # Another request may have been written over this one meanwhile.
        if self._read_request(name) == content:
            self._remove(name, "request")

    def _is_answered(self, name: str, request: _Request) -> bool:
        answer = self._answers.get(name)
        if answer is None or answer.request != request:
            return False
        try:
            status = os.lstat(self._path(name, "bits"))
        except OSError:
            return False
        return answer.identity == _identity(status)

    def _write_bits(self, name: str, request: _Request, stopping: threading.Event) -> None:
        # Before the random bits: a client must not find both.
        self._remove(name, "error")
        seed = np.array(request.seed, np.int64)
        with self._replacing(name, "bits") as file:
            # A row at a time, so that 2^31 bytes need not fit into the memory.
            # No integers of how many rows ever are no rows.
            num_rows = request.num_rows if request.count else 0
            for row in range(request.first_row, request.first_row + num_rows):
                if stopping.is_set():
                    raise _StoppedError
                integers = self._bits(seed, row, request.first_index, request.count)
                if integers.shape != (request.count,) or integers.dtype != np.uint64:
                    raise _RequestError(
                        f"Random bits must be {request.count} uint64, found {integers.dtype} of "
                        f"shape {integers.shape}."
                    )
                file.write(np.ascontiguousarray(integers, "<u8").data)
            file.flush()
            identity = _identity(os.fstat(file.fileno()))
        self._answers[name] = _Answer(request, identity)

    def _write_error(self, name: str, error: BaseException) -> None:
        self._answers.pop(name, None)
        self._remove(name, "bits")
        with self._replacing(name, "error") as file:
            file.write(_error_line(error).encode("ascii", "replace"))

    def _forget(self, name: str) -> None:
        """Ends an exchange; the ``.done`` last, as it says that there is more to remove."""
        self._answers.pop(name, None)
        for kind in ("bits", "error", "done"):
            self._remove(name, kind)

    @contextlib.contextmanager
    def _replacing(self, name: str, kind: str) -> Iterator[BinaryIO]:
        """A new file that takes the place of ``<name>.<kind>`` once it is written."""
        descriptor, partial = tempfile.mkstemp(".partial", _PARTIAL_PREFIX, self.directory)
        try:
            with os.fdopen(descriptor, "wb") as file:
                yield file
            os.replace(partial, self._path(name, kind))
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(partial)
            raise

    def _remove_stale_files(self) -> None:
        with os.scandir(self.directory) as entries:
            stale = [
                entry.path
                for entry in entries
                if _STALE_FILE.fullmatch(entry.name) and entry.is_file(follow_symlinks=False)
            ]
        for path in stale:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    def _remove(self, name: str, kind: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path(name, kind))

    def _path(self, name: str, kind: str) -> str:
        return os.path.join(self.directory, f"{name}.{kind}")


def _is_complete(content: bytes) -> bool:
    # The newline is the last byte of a request, so a line without ``end`` is malformed and
    # not unfinished.
    return b"\n" in content or len(content) > _LONGEST_REQUEST_IN_BYTES


def _parse(content: bytes) -> _Request:
    match = _REQUEST.fullmatch(content)
    if match is None:
        raise _RequestError(
            "The request must be one line of decimal integers: seed0 seed1 first_row num_rows "
            "first_index count end."
        )
    seed0, seed1, first_row, num_rows, first_index, count = (int(field) for field in match.groups())
    size = num_rows * count * _BYTES_PER_NUMBER
    if size > LARGEST_ANSWER_IN_BYTES:
        raise _RequestError(
            f"The answer would have {size} bytes, and at most {LARGEST_ANSWER_IN_BYTES} can be "
            "asked for at once."
        )
    limit = 1 << 63
    if not (-limit <= seed0 < limit and -limit <= seed1 < limit):
        raise _RequestError("The seeds must be 64-bit integers.")
    if first_row + num_rows > limit or first_index + count > limit:
        raise _RequestError("The rows and the integers must have 64-bit numbers.")
    if first_index % 2:
        raise _RequestError(f"first_index must be even, found {first_index}.")
    return _Request((seed0, seed1), first_row, num_rows, first_index, count)


def _error_line(error: BaseException) -> str:
    if isinstance(error, _RequestError):
        line = str(error)
    else:
        # The type, the reason of the operating system and the place, and no message, which
        # may hold the arguments and with them the seed.
        reason = f", {error.strerror}," if isinstance(error, OSError) and error.strerror else ""
        frame = traceback.extract_tb(error.__traceback__)[-1]
        file = os.path.basename(frame.filename)
        line = (
            f"Random bits cannot be drawn: {type(error).__name__}{reason} in {file}:{frame.lineno}."
        )
    return " ".join(line.split()) + "\n"


def _identity(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_ino, status.st_size, status.st_mtime_ns


def _make_private_directory(directory: pathlib.Path) -> None:
    if os.path.lexists(directory):
        return
    directory.parent.mkdir(parents=True, exist_ok=True)
    directory.mkdir(mode=0o700, exist_ok=True)


def _check_private_directory(directory: pathlib.Path) -> None:
    status = os.stat(directory)
    if not stat.S_ISDIR(status.st_mode):
        raise ValueError(f"{directory} must be a directory.")
    if status.st_uid != os.geteuid():
        raise ValueError(
            f"{directory} must belong to the user who runs this process, found user "
            f"{status.st_uid}: whoever owns it can read the seed."
        )
    if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ValueError(
            f"{directory} must be for its owner alone (mode 0700), found mode "
            f"{stat.S_IMODE(status.st_mode):04o}: others could read the seed."
        )
