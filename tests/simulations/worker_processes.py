"""Workers in processes of their own, for tests that kill them."""

import contextlib
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import psutil

_ROOT = pathlib.Path(__file__).parents[2]
# A busy machine takes its time.
_SECONDS_TO_END = 120.0


class WorkerProcess:
    """``start-tff-worker`` on a port, and TFF's worker below it."""

    def __init__(self, host: str, port: int, *flags: str) -> None:
        self.address = f"{host}:{port}"
        self._port = port
        self._flags = flags
        self._directory = tempfile.TemporaryDirectory()
        self.start()

    def start(self) -> None:
        """Starts it, or starts it again."""
        command = [sys.executable, "-m", "simulations.start_worker", f"--port={self._port}"]
        with self._file("output").open("w") as out, self._file("messages").open("w") as messages:
            self.process = psutil.Popen(
                [*command, *self._flags],
                cwd=_ROOT,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=messages,
            )

    def wait_until_ready(self) -> "WorkerProcess":
        """Waits for the line that says where it listens, and for what a flag has it print then."""
        prints = "--format=json" in self._flags
        while "listening" not in self.message() or (prints and not self.printed()):
            with contextlib.suppress(psutil.TimeoutExpired):
                self.process.wait(0.05)
                raise AssertionError(self.message())
        return self

    def message(self) -> str:
        """What it wrote to standard error."""
        return self._file("messages").read_text()

    def printed(self) -> str:
        """What it wrote to standard output."""
        return self._file("output").read_text()

    def _file(self, name: str) -> pathlib.Path:
        return pathlib.Path(self._directory.name) / name

    def workers(self) -> list[psutil.Process]:
        """TFF's worker, while it runs."""
        found: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            found = self.process.children()
        return found

    def kill(self) -> None:
        """Ends TFF's worker at once, as a loss of power would, and all that belongs to it."""
        processes = [*self.workers(), self.process]
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(processes, timeout=_SECONDS_TO_END)

    def freeze(self) -> None:
        """Makes it silent, as a machine that has lost its network, until it is thawed or killed."""
        for worker in self.workers():
            worker.suspend()

    def thaw(self) -> None:
        """Lets it go on."""
        for worker in self.workers():
            worker.resume()

    def ended(self, signal_number: signal.Signals | None = None) -> int:
        """Sends a signal, if any, and returns the exit status."""
        if signal_number is not None:
            self.process.send_signal(signal_number)
        status: int = self.process.wait(_SECONDS_TO_END)
        return status


@contextlib.contextmanager
def ending(*workers: WorkerProcess) -> Iterator[tuple[WorkerProcess, ...]]:
    """Ends workers whatever happens, also those that were started again."""
    try:
        yield workers
    finally:
        for worker in workers:
            worker.kill()


def free_port() -> int:
    """Returns a port that nobody listens on."""
    with socket.create_server(("", 0)) as server:
        port: int = server.getsockname()[1]
        return port
