"""Commands in processes of their own that need not import TensorFlow Federated again.

As a program this imports TensorFlow Federated once. For each line on its standard input, a JSON
list of a directory for its output, a directory to run in, a module and the module's arguments, it
forks a process that runs the module as ``python -m`` would, and prints the process's number.
"""

import atexit
import contextlib
import json
import os
import pathlib
import runpy
import signal
import subprocess
import sys
import threading
import time
import traceback

import psutil

_ROOT = pathlib.Path(__file__).parents[2]


class CommandProcess:
    """A command that runs, in a session of its own as a shell would start it."""

    def __init__(self, number: int, directory: pathlib.Path) -> None:
        self.number = number
        self._process = psutil.Process(number)
        self._directory = directory

    def errors(self) -> str:
        """What is in its standard error by now."""
        return (self._directory / "errors").read_text()

    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self._process.is_running() and self._process.status() != psutil.STATUS_ZOMBIE

    def interrupt(self) -> None:
        """Does what Ctrl-C does: the signal goes to the whole group, TFF's worker included."""
        os.killpg(self._process.pid, signal.SIGINT)

    def kill(self) -> list[psutil.Process]:
        """Kills the process alone, and returns the workers that it leaves behind."""
        workers: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            workers = self._process.children(recursive=True)
            self._process.kill()
        self._process.wait(timeout=180)
        return workers

    def wait(self) -> tuple[int, str, str]:
        """Waits for its end; returns the exit status, standard output and standard error."""
        while self.is_running():
            time.sleep(0.02)
        out, err, status = (
            (self._directory / name).read_text() for name in ("output", "errors", "status")
        )
        return int(status), out, err


class CommandServer:
    """A process that has imported TensorFlow Federated, which takes long, and forks at once."""

    def __init__(self, directory: pathlib.Path) -> None:
        self._directory = directory
        self._count = 0
        self._lock = threading.Lock()
        self._messages = (directory / "messages").open("w")
        self._process = psutil.Popen(
            [sys.executable, "-m", "tests.simulations.command_processes"],
            cwd=_ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._messages,
            text=True,
            start_new_session=True,
        )

    def start(
        self, module: str, *arguments: str, directory: pathlib.Path = _ROOT
    ) -> CommandProcess:
        """Starts a command in a directory. Several threads may do so."""
        with self._lock:
            self._count += 1
            output = self._directory / str(self._count)
            output.mkdir()
            line = json.dumps([str(output), str(directory), module, *arguments])
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
            number = self._process.stdout.readline()
        assert number, (self._directory / "messages").read_text()
        return CommandProcess(int(number), output)

    def end(self) -> None:
        """Ends the server and whatever it started."""
        for process in (*self._process.children(recursive=True), self._process):
            process.kill()
        self._process.wait()
        for file in (self._process.stdin, self._process.stdout, self._messages):
            file.close()


def _run_and_exit(directory: pathlib.Path, place: str, module: str, arguments: list[str]) -> None:
    """The life of a forked process."""
    import tensorflow_federated as tff

    os.setsid()
    os.chdir(place)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    places = (pathlib.Path("/dev/null"), directory / "output", directory / "errors")
    for descriptor, path in enumerate(places):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), descriptor)
    status = 1
    try:
        # The thread of the context that TFF makes when it is imported is not in a fork.
        tff.backends.native.set_sync_local_cpp_execution_context()
        sys.argv = [module, *arguments]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    (directory / "status").write_text(str(status))
    os._exit(status)


def _serve() -> None:
    """Forks a process for each line of the standard input."""
    from mf_aggregators.tff import processes

    processes.prepare_environment()
    # What most commands import.
    import tensorflow_federated  # noqa: F401

    import simulations.runs.run_command  # noqa: F401
    from tests import graph_checks

    graph_checks.compare_kinds_once()
    # How a forked process ended is in a file.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        directory, place, module, *arguments = json.loads(line)
        number = os.fork()
        if number == 0:
            _run_and_exit(pathlib.Path(directory), place, module, arguments)
        print(number, flush=True)


if __name__ == "__main__":
    _serve()
