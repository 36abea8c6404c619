"""The exchange of files: answers, interrupted exchanges, and what must not end the thread."""

import os
import pathlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures

import numpy as np
import pytest

from mf_aggregators.tff.aes.bit_service import BitService

_PATIENCE_IN_SECONDS = 30.0
_BAD_ROW = 666
_BAD_SHAPE_ROW = 667
_SECRET = 1234567890123456789


def _bits(seed: np.ndarray, row: int, first_index: int, count: int) -> np.ndarray:
    """Integers that depend on every argument, and failures for some rows."""
    assert seed.dtype == np.int64
    if row == _BAD_ROW:
        raise RuntimeError(f"no integers for the seed {seed.tolist()}")
    if row == _BAD_SHAPE_ROW:
        return np.zeros(count + 1, np.uint64)
    start = np.array([row * 1_000_003 + first_index], np.int64) + 7 * seed[:1] + 11 * seed[1:]
    mixed = start.view(np.uint64) + np.arange(count, dtype=np.uint64)
    return np.asarray(mixed * np.uint64(0x9E3779B97F4A7C15))


def _expected(
    seed: tuple[int, int], first_row: int, num_rows: int, first: int, count: int
) -> bytes:
    rows = range(first_row, first_row + (num_rows if count else 0))
    key = np.array(seed, np.int64)
    return b"".join(_bits(key, row, first, count).astype("<u8").tobytes() for row in rows)


def _line(seed: tuple[int, int], first_row: int, num_rows: int, first: int, count: int) -> str:
    return f"{seed[0]} {seed[1]} {first_row} {num_rows} {first} {count} end\n"


def _wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _PATIENCE_IN_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "The service does not answer."
        time.sleep(0.001)


class _Client:
    def __init__(self, directory: pathlib.Path) -> None:
        self.directory = directory

    def path(self, name: str, kind: str) -> pathlib.Path:
        return self.directory / f"{name}.{kind}"

    def write(self, name: str, kind: str, content: str = "") -> None:
        self.path(name, kind).write_text(content)

    def wait(self, name: str) -> None:
        _wait_until(lambda: not self.path(name, "request").exists())

    def ask(self, name: str, content: str) -> bytes:
        self.write(name, "request", content)
        self.wait(name)
        return self.path(name, "bits").read_bytes()

    def ask_in_vain(self, name: str, content: str) -> str:
        self.write(name, "request", content)
        self.wait(name)
        assert not self.path(name, "bits").exists()
        line = self.path(name, "error").read_text()
        assert line.endswith(".\n")
        assert line.count("\n") == 1
        return line

    def finish(self, name: str) -> None:
        self.write(name, "done")
        _wait_until(lambda: not self.path(name, "done").exists())

    def files(self) -> list[str]:
        return sorted(path.name for path in self.directory.iterdir())


@pytest.fixture
def service(tmp_path: pathlib.Path) -> Iterator[BitService]:
    with BitService(tmp_path / "exchange", _bits) as started:
        yield started


@pytest.fixture
def client(service: BitService) -> _Client:
    return _Client(service.directory)


@pytest.mark.parametrize(
    ("seed", "rows_and_bits"),
    [
        ((5, 7), (0, 1, 0, 4)),
        ((-3, 2**63 - 1), (10, 5, 6, 33)),
        ((-(2**63), 0), (2**40, 2, 2**40, 1)),
        ((1, 2), (3, 4, 0, 0)),
        ((1, 2), (0, 2**62, 0, 0)),
        ((1, 2), (3, 0, 0, 4)),
    ],
)
def test_the_answer_holds_the_bits(
    client: _Client, seed: tuple[int, int], rows_and_bits: tuple[int, int, int, int]
) -> None:
    assert client.ask("a", _line(seed, *rows_and_bits)) == _expected(seed, *rows_and_bits)
    assert client.files() == ["a.bits"]
    client.finish("a")
    assert client.files() == []


def test_an_unfinished_request_is_answered_when_it_is_finished(client: _Client) -> None:
    whole = _line((12, -34), 5, 2, 6, 10)
    for end in [0, 4, len(whole) - 5, len(whole) - 1]:
        client.write("slow", "request", whole[:end])
        # Another exchange shows that the service has looked.
        client.ask("other", _line((1, 1), 0, 1, 0, 2))
        client.finish("other")
        assert client.files() == ["slow.request"]
    assert client.ask("slow", whole) == _expected((12, -34), 5, 2, 6, 10)


def test_a_name_can_be_used_again(client: _Client) -> None:
    for row in range(5):
        line = _line((1, 2), row, 1, 0, 8)
        assert client.ask("again", line) == _expected((1, 2), row, 1, 0, 8)
        client.finish("again")


def test_an_answer_that_nobody_finished_is_kept_for_the_same_request_alone(
    client: _Client,
) -> None:
    first, second = _line((1, 2), 0, 1, 0, 8), _line((1, 2), 1, 1, 0, 8)
    client.ask("a", first)
    written = client.path("a", "bits").stat()
    client.ask("a", first)
    assert client.path("a", "bits").stat().st_ino == written.st_ino
    assert client.path("a", "bits").stat().st_mtime_ns == written.st_mtime_ns
    assert client.ask("a", second) == _expected((1, 2), 1, 1, 0, 8)
    # What is in its place, and not what was put there, is what counts.
    client.path("a", "bits").unlink()
    assert client.ask("a", second) == _expected((1, 2), 1, 1, 0, 8)
    client.path("a", "bits").write_bytes(b"else")
    assert client.ask("a", second) == _expected((1, 2), 1, 1, 0, 8)


class _HeldBits:
    """Draws row 100 when it is told to, and shows that the service is amid that."""

    def __init__(self) -> None:
        self.is_held = threading.Event()
        self.may_go_on = threading.Event()

    def __call__(self, seed: np.ndarray, row: int, first_index: int, count: int) -> np.ndarray:
        if row == 100:
            self.is_held.set()
            assert self.may_go_on.wait(_PATIENCE_IN_SECONDS)
        return _bits(seed, row, first_index, count)


def test_a_request_written_over_another_is_answered(tmp_path: pathlib.Path) -> None:
    held = _HeldBits()
    client = _Client(tmp_path / "exchange")
    with BitService(client.directory, held):
        client.write("a", "request", _line((1, 2), 100, 1, 0, 8))
        assert held.is_held.wait(_PATIENCE_IN_SECONDS)
        client.write("a", "request", _line((1, 2), 101, 1, 0, 8))
        held.may_go_on.set()
        client.wait("a")
        assert client.path("a", "bits").read_bytes() == _expected((1, 2), 101, 1, 0, 8)


def test_a_request_beside_the_end_of_an_earlier_one_is_answered(tmp_path: pathlib.Path) -> None:
    held = _HeldBits()
    client = _Client(tmp_path / "exchange")
    with BitService(client.directory, held):
        for row in [0, 1]:
            client.ask("a", _line((1, 2), 0, 1, 0, 8))
            client.write("holding", "request", _line((1, 2), 100, 1, 0, 8))
            assert held.is_held.wait(_PATIENCE_IN_SECONDS)
            # Both lie there at the service's next look.
            client.write("a", "done")
            client.write("a", "request", _line((1, 2), row, 1, 0, 8))
            held.may_go_on.set()
            client.wait("a")
            # Looks after that one must not take the end for the new answer's.
            client.finish("holding")
            client.ask("other", _line((1, 2), 0, 1, 0, 8))
            client.finish("other")
            assert client.path("a", "bits").read_bytes() == _expected((1, 2), row, 1, 0, 8)
            client.finish("a")
            assert client.files() == []
            held.is_held.clear()
            held.may_go_on.clear()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("nonsense\n", "one line of decimal integers"),
        ("1 2 3 4 6 end\n", "one line of decimal integers"),
        ("1 2 3 4 6 7\n", "one line of decimal integers"),
        ("1 2 3 4 6 7 8 end\n", "one line of decimal integers"),
        ("1 2 -3 4 6 7 end\n", "one line of decimal integers"),
        ("1 2 3 4 6 7_0 end\n", "one line of decimal integers"),
        ("1 2 3 4 6 7 end\n\n", "one line of decimal integers"),
        ("1 " * 1000, "one line of decimal integers"),
        (_line((2**63, 0), 0, 1, 0, 8), "seeds must be 64-bit integers"),
        (_line((0, -(2**63) - 1), 0, 1, 0, 8), "seeds must be 64-bit integers"),
        (_line((0, 0), 2**63, 1, 0, 8), "64-bit numbers"),
        (_line((0, 0), 0, 1, 2**63, 8), "64-bit numbers"),
        (_line((0, 0), 0, 1, 3, 8), "even, found 3"),
        (_line((0, 0), 0, 1, 0, 2**28 + 1), "at most 2147483648"),
        (_line((0, 0), 0, 2**28 + 1, 0, 1), "at most 2147483648"),
        (_line((_SECRET, 0), 0, 2**60, 0, 2**60), "at most 2147483648"),
        (_line((_SECRET, 0), _BAD_ROW - 1, 3, 0, 8), "RuntimeError in test_bit_service.py:"),
        (_line((_SECRET, 0), _BAD_SHAPE_ROW, 1, 0, 8), "must be 8 uint64"),
    ],
)
def test_what_cannot_be_answered_is_explained(client: _Client, content: str, reason: str) -> None:
    client.ask("a", _line((1, 2), 0, 1, 0, 8))
    line = client.ask_in_vain("a", content)
    assert reason in line
    assert str(_SECRET) not in line
    assert client.files() == ["a.error"]
    # The thread goes on, and the error does not outlive the next request of its name.
    assert client.ask("a", _line((1, 2), 0, 1, 0, 8)) == _expected((1, 2), 0, 1, 0, 8)
    assert client.files() == ["a.bits"]
    client.ask_in_vain("a", content)
    client.finish("a")
    assert client.files() == []


def test_even_what_ends_a_thread_is_answered(tmp_path: pathlib.Path) -> None:
    class Panic(BaseException):
        pass

    def panic(seed: np.ndarray, row: int, first_index: int, count: int) -> np.ndarray:
        if row:
            raise Panic
        return np.zeros(count, np.uint64)

    with BitService(tmp_path / "exchange", panic) as service:
        client = _Client(service.directory)
        assert "Panic" in client.ask_in_vain("a", _line((1, 2), 1, 1, 0, 8))
        assert client.ask("a", _line((1, 2), 0, 1, 0, 8)) == bytes(64)


def test_many_clients_are_answered_at_one_time(client: _Client) -> None:
    def exchanges(number: int) -> None:
        for row in range(10):
            arguments = ((number, -number), row, 3, 2 * number, 50)
            assert client.ask(f"client-{number}_x", _line(*arguments)) == _expected(*arguments)
            client.finish(f"client-{number}_x")

    with futures.ThreadPoolExecutor(16) as threads:
        list(threads.map(exchanges, range(16)))
    assert client.files() == []


def test_other_files_are_left_alone(client: _Client) -> None:
    request = _line((1, 2), 0, 1, 0, 8)
    others = [
        "a b.request",
        ".request",
        "ä.request",
        "a.b.request",
        "a.request2",
        "a.txt",
        "x.bits",
    ]
    for other in others:
        (client.directory / other).write_text(request)
    (client.directory / "folder.request").mkdir()
    (client.directory / "link.request").symlink_to(client.directory / "a.txt")
    # A pipe without a writer would hold up whoever opens it to read.
    os.mkfifo(client.directory / "pipe.request")
    before = client.files()
    client.ask("a", request)
    client.finish("a")
    assert client.files() == before
    assert all((client.directory / other).read_text() == request for other in others)


def test_names_may_be_long(client: _Client) -> None:
    name = "n" * (255 - len(".request"))
    assert client.ask(name, _line((1, 2), 0, 1, 0, 8)) == _expected((1, 2), 0, 1, 0, 8)
    client.finish(name)


def test_a_start_removes_what_a_killed_service_left(tmp_path: pathlib.Path) -> None:
    service = BitService(tmp_path / "exchange", _bits)
    client = _Client(service.directory)
    for kind in ["bits", "error", "done"]:
        client.write("old", kind, "stale")
    client.write("answer-x_1", "partial", "stale")
    client.write("notes", "txt", "kept")
    client.write("new", "bits", "stale")
    client.write("new", "request", _line((1, 2), 0, 1, 0, 8))
    with service:
        client.wait("new")
        assert client.path("new", "bits").read_bytes() == _expected((1, 2), 0, 1, 0, 8)
        assert client.files() == ["new.bits", "notes.txt"]


def test_the_directory_is_private(tmp_path: pathlib.Path) -> None:
    directory = tmp_path / "deep" / "exchange"
    previous = os.umask(0)
    try:
        with BitService(directory, _bits) as service:
            client = _Client(service.directory)
            client.ask("a", _line((1, 2), 0, 1, 0, 8))
            assert directory.stat().st_mode & 0o777 == 0o700
            assert client.path("a", "bits").stat().st_mode & 0o777 == 0o600
    finally:
        os.umask(previous)
    BitService(directory, _bits)


@pytest.mark.parametrize("mode", [0o755, 0o750, 0o701, 0o720])
def test_a_directory_open_to_others_is_refused(tmp_path: pathlib.Path, mode: int) -> None:
    directory = tmp_path / "exchange"
    service = BitService(directory, _bits)
    directory.chmod(mode)
    with pytest.raises(ValueError, match=rf"for its owner alone .* found mode {mode:04o}"):
        BitService(directory, _bits)
    with pytest.raises(ValueError, match="for its owner alone"):
        service.start()


def test_a_directory_of_another_user_is_refused(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(ValueError, match=f"found user {user}"):
        BitService(tmp_path / "exchange", _bits)


def test_a_file_is_no_directory(tmp_path: pathlib.Path) -> None:
    (tmp_path / "exchange").write_text("")
    with pytest.raises(ValueError, match="must be a directory"):
        BitService(tmp_path / "exchange", _bits)


def test_a_directory_that_vanishes_is_made_again(tmp_path: pathlib.Path) -> None:
    client = _Client(tmp_path / "exchange")
    moved = tmp_path / "moved"
    with BitService(client.directory, _bits):
        client.directory.rename(moved)
        _wait_until(client.directory.exists)
        assert client.directory.stat().st_mode & 0o777 == 0o700
        assert client.ask("a", _line((1, 2), 0, 1, 0, 8)) == _expected((1, 2), 0, 1, 0, 8)
    assert list(moved.iterdir()) == []


def test_start_and_stop_can_be_repeated(tmp_path: pathlib.Path) -> None:
    before = threading.active_count()
    service = BitService(tmp_path / "exchange", _bits)
    client = _Client(service.directory)
    service.stop()
    for _ in range(3):
        service.start()
        service.start()
        assert threading.active_count() == before + 1
        client.ask("a", _line((1, 2), 0, 1, 0, 8))
        service.stop()
        service.stop()
        assert threading.active_count() == before


def test_stop_does_not_wait_for_a_long_answer(tmp_path: pathlib.Path) -> None:
    is_drawing = threading.Event()
    rows = []

    def slow(seed: np.ndarray, row: int, first_index: int, count: int) -> np.ndarray:
        rows.append(row)
        is_drawing.set()
        time.sleep(0.01)
        return _bits(seed, row, first_index, count)

    line = _line((1, 2), 0, 100_000, 0, 2)
    with BitService(tmp_path / "exchange", slow) as service:
        client = _Client(service.directory)
        client.write("long", "request", line)
        assert is_drawing.wait(_PATIENCE_IN_SECONDS)
    assert len(rows) < 100_000
    # The request waits for the next start.
    assert client.files() == ["long.request"]


_PROGRAM = """
import os
import sys
import time
import numpy as np
from mf_aggregators.tff.aes.bit_service import BitService

def integers(seed, row, first_index, count):
    return np.full(count, os.getpid(), np.uint64)

def ask(name):
    path = os.path.join(sys.argv[1], name)
    with open(path + ".request", "w") as file:
        file.write("1 2 0 1 0 1 end\\n")
    while os.path.exists(path + ".request"):
        time.sleep(0.001)
    return int(np.fromfile(path + ".bits", "<u8")[0])

service = BitService(sys.argv[1], integers)
service.start()
parent = os.getpid()
assert ask("a") == parent
child = os.fork()
if child == 0:
    status = 1
    try:
        assert ask("b") == parent
        service.stop()
        assert ask("c") == parent
        status = 0
    finally:
        os._exit(status)
assert os.waitpid(child, 0)[1] == 0
child = os.fork()
if child == 0:
    # Whoever outlives its parent may serve; the parent stops first here.
    status = 1
    try:
        while not os.path.exists(os.path.join(sys.argv[1], "stopped")):
            time.sleep(0.001)
        service.start()
        assert ask("d") == os.getpid()
        assert os.path.exists(os.path.join(sys.argv[1], "a.bits"))
        service.stop()
        status = 0
    finally:
        os._exit(status)
service.stop()
open(os.path.join(sys.argv[1], "stopped"), "w").close()
assert os.waitpid(child, 0)[1] == 0
service.start()
with open(os.path.join(sys.argv[1], "long.request"), "w") as file:
    file.write("1 2 0 100000000 0 1 end\\n")
while not any(name.endswith(".partial") for name in os.listdir(sys.argv[1])):
    time.sleep(0.001)
print("leaving")
"""


def test_forked_processes_and_the_end_of_the_process(tmp_path: pathlib.Path) -> None:
    """The parent answers its children, and a thread amid an answer holds up no exit."""
    finished = subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore::DeprecationWarning",
            "-c",
            _PROGRAM,
            str(tmp_path / "exchange"),
        ],
        capture_output=True,
        text=True,
        timeout=2 * _PATIENCE_IN_SECONDS,
        check=False,
    )
    assert (finished.returncode, finished.stdout, finished.stderr) == (0, "leaving\n", "")
