"""A worker says where it listens, shares no port, and leaves nothing behind."""

import contextlib
import json
import signal
import socket
from collections.abc import Iterator

import psutil
import pytest

from mf_aggregators.commands import command_line
from simulations import start_worker
from tests.simulations.worker_processes import WorkerProcess, ending, free_port


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[WorkerProcess, ...]]:
    """Workers that tests end in different ways, started at the same time."""
    with ending(
        *(WorkerProcess("127.0.0.1", free_port(), "--format=json") for _ in range(4))
    ) as workers:
        for worker in workers:
            worker.wait_until_ready()
        yield workers


def _port(worker: WorkerProcess) -> int:
    return int(worker.address.split(":")[1])


def test_it_says_where_it_listens(running: tuple[WorkerProcess, ...]) -> None:
    worker = running[0]
    (line,) = worker.message().splitlines()
    assert f"port {_port(worker)} of all network interfaces" in line
    assert f"--workers=HOST:{_port(worker)}" in line
    assert json.loads(worker.printed()) == {"port": _port(worker)}
    (process,) = worker.workers()
    listening = {
        (connection.laddr.ip, connection.laddr.port)
        for connection in process.net_connections()
        if connection.status == psutil.CONN_LISTEN
    }
    everywhere = "::" if socket.has_dualstack_ipv6() else "0.0.0.0"
    assert listening == {(everywhere, _port(worker))}
    for host in ("127.0.0.1", "127.0.0.2"):
        socket.create_connection((host, _port(worker)), 60.0).close()


@pytest.mark.parametrize(
    ("number", "signal_number"), [(0, signal.SIGTERM), (1, signal.SIGINT)], ids=["term", "ctrl-c"]
)
def test_a_signal_ends_it(
    running: tuple[WorkerProcess, ...], number: int, signal_number: signal.Signals
) -> None:
    worker = running[number]
    (process,) = worker.workers()
    assert worker.ended(signal_number) == command_line.DONE
    assert not process.is_running()
    # Nothing but the first line.
    assert len(worker.message().splitlines()) == 1


def test_a_worker_that_dies_is_reported(running: tuple[WorkerProcess, ...]) -> None:
    worker = running[2]
    (process,) = worker.workers()
    process.kill()
    assert worker.ended() == command_line.BAD_INPUT
    _, line = worker.message().splitlines()
    assert "ended by itself, with status -9" in line


@pytest.mark.long
def test_no_worker_outlives_the_command(running: tuple[WorkerProcess, ...]) -> None:
    worker = running[3]
    # A port that another worker has is refused; TFF's worker alone would share it.
    second = WorkerProcess("127.0.0.1", _port(worker))
    with ending(second):
        assert second.ended() == command_line.BAD_INPUT
        (line,) = second.message().splitlines()
        assert f"port {_port(worker)} cannot be listened on" in line

    (process,) = worker.workers()
    worker.process.kill()
    worker.ended()
    with contextlib.suppress(psutil.NoSuchProcess):
        process.wait(30.0)
    assert not process.is_running()


@pytest.mark.parametrize("host", ["127.0.0.1", "::"])
def test_a_port_that_is_taken_is_refused(host: str, capsys: pytest.CaptureFixture[str]) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family, reuse_port=True) as server:
        _refused(capsys, [f"--port={server.getsockname()[1]}"], "end what uses it, or choose")


def _refused(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    argv = ["start-tff-worker", *arguments]
    status = command_line.run("", start_worker.define_flags, start_worker.main, argv)
    (line,) = capsys.readouterr().err.splitlines()
    assert status == command_line.BAD_INPUT
    assert line.startswith("start-tff-worker: ")
    assert message in line
