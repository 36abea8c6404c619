"""Kills the processes of the example of a server at chosen lines, and fills their disks.

A ``Site`` plays the part of everything around a server: it starts processes again that have ended,
sends the updates of devices, and frees space on a disk. ``tests/test_aggregation_server.py``
compares the files of a run that was disturbed with those of one that was not.
"""

import contextlib
import http.client
import multiprocessing
import os
import pathlib
import resource
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Mapping
from multiprocessing.process import BaseProcess
from typing import TypeAlias

import numpy as np

from docs.examples import aggregation_server
from docs.examples.aggregation_server import Plan, Reply
from mf_aggregators.privacy import statements

# The role of a process: a command of the example server, and the number of the worker.
Role: TypeAlias = tuple[str, int]
_Trace: TypeAlias = "Callable[[types.FrameType, str, object], _Trace | None]"

COORDINATOR: Role = ("coordinator", 0)
WORKERS: tuple[Role, ...] = (("worker", 0), ("worker", 1))
_FULL_DISK = 3
_ROOT = pathlib.Path(__file__).parents[2]
# The functions in which a process may be killed at every line: those of the library that write
# files, and all of the example server.
_TRACED = {
    os.fspath(_ROOT / name): functions
    for name, functions in {
        "docs/examples/aggregation_server.py": (),
        "mf_aggregators/aggregator.py": ("release", "save_state"),
        "mf_aggregators/atomic_files.py": (),
        "mf_aggregators/kernel/release.py": ("check", "_written", "_write_file"),
        "mf_aggregators/privacy/statement_file.py": ("write",),
    }.items()
}
# Processes are forked from one that has imported the modules, because that is fast.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["docs.examples.disturbed_server", "pytest"])


class Site:
    """The processes and devices of a run of the example server.

    Attributes:
      folder: The folder of the run.
      num_kills: How many processes were killed at one of the lines.
      num_refused: How often a full disk ended the coordinator, or refused an update.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        lines: Mapping[Role, list[str]] | None = None,
        most_bytes: Mapping[Role, int] | None = None,
    ) -> None:
        """Sets the disturbances of a run.

        Args:
          folder: The folder of the run.
          lines: For each role, the lines (as ``lines_of`` has them) at which its processes die,
            one after another. A line is taken out when a process starts that is to die there.
          most_bytes: For each role, the size beyond which no file of its first process grows.
        """
        self.folder, self.plan = folder, Plan.read(folder)
        self.num_kills = self.num_refused = 0
        self._lines, self._most_bytes = lines or {}, dict(most_bytes or {})
        self._processes: dict[Role, BaseProcess] = {}

    def is_up(self, role: Role) -> bool:
        """Returns whether the process of a role is running."""
        return role in self._processes and self._processes[role].is_alive()

    def keep_up(self) -> None:
        """Starts processes again that have ended."""
        for role in (COORDINATOR, *WORKERS):
            if self.is_up(role):
                continue
            if role in self._processes:
                self.num_kills += self._processes[role].exitcode == -signal.SIGKILL
                self.num_refused += self._processes[role].exitcode == _FULL_DISK
            line = self._lines[role].pop(0) if self._lines.get(role) else ""
            arguments = (role, self.folder, line, self._most_bytes.pop(role, -1))
            self._processes[role] = _CONTEXT.Process(target=_run, args=arguments, daemon=True)
            self._processes[role].start()

    def turn(self, sign: float = 1.0) -> bool:
        """Lets each client ask for a task, and send its update.

        Args:
          sign: A factor of all updates.

        Returns:
          Whether the run goes on.
        """
        self.keep_up()
        for client in self.plan.clients:
            status, _, heads = _ask(self.plan.coordinator, f"/task?client={client}")
            if status == 410:
                return False
            if status == 200:
                update = (sign * update_of(client, int(heads["X-Round"]))).tobytes()
                target = f"/update?round={heads['X-Round']}&client={client}"
                status, *_ = _ask(heads["X-Worker"], target, update, heads["X-Ticket"])
                if status == 507:
                    self.num_refused += 1
                    for process in self._processes.values():
                        resource.prlimit(process.pid or 0, resource.RLIMIT_FSIZE, (-1, -1))
        return True

    def finish(self, sign: float = 1.0) -> None:
        """Runs the remaining rounds to the end of the run.

        Args:
          sign: A factor of all updates.

        Raises:
          TimeoutError: If the rounds take longer than four minutes.
        """
        deadline = time.monotonic() + 240.0
        try:
            while self.turn(sign):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{self.folder} makes no progress")
        finally:
            self.end()

    def end(self) -> None:
        """Kills all processes."""
        for process in self._processes.values():
            process.kill()
            process.join()

    def lines_of(self, role: Role) -> list[str]:
        """Returns the code lines that processes of a role ran, in the order of first execution."""
        words = map(str.split, _log(self.folder, role).read_text().splitlines())
        return [word[1] for word in words if word[0] == "ran"]

    def kept(self) -> dict[str, bytes]:
        """Returns the contents of the coordinator's files, but for those that depend on time."""
        own = self.folder / "coordinator"
        return {
            str(path.relative_to(own)): path.read_bytes()
            for path in own.rglob("*")
            # Files that a killed process left unfinished are not compared: they are digests of
            # sums, not secret.
            if path.is_file() and not path.name.startswith((".round-", "metrics"))
        }


def update_of(client: str, i: int) -> np.ndarray:
    """Returns the update that a client sends in a round, (5,) float32; one client sends NaN."""
    update = np.random.default_rng([*client.encode(), i]).normal(size=5).astype(np.float32)
    return np.full_like(update, np.nan) if client == "client-3" else update


def _ask(address: str, target: str, body: bytes = b"", ticket: str = "") -> Reply:
    """Returns the reply to a request; its status is 0 if the server does not answer."""
    with contextlib.suppress(OSError, http.client.HTTPException):
        return aggregation_server.call(address, target, body, ticket)
    return 0, b"", {}


def _log(folder: pathlib.Path, role: Role) -> pathlib.Path:
    return folder / f"{role[0]}-{role[1]}.log"


def _run(role: Role, folder: pathlib.Path, line: str, most_bytes: int) -> None:
    """Runs a role in this process, which kills itself at the given line of code, if any."""
    path = _log(folder, role) if most_bytes < 0 else pathlib.Path(os.devnull)
    log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(log, 2)
    seen: set[str] = set()

    def trace(frame: types.FrameType, event: str, _: object) -> "_Trace | None":
        functions = _TRACED.get(frame.f_code.co_filename)
        if functions is None or (functions and frame.f_code.co_name not in functions):
            return None
        place = f"{pathlib.Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        if event == "line" and place not in seen:
            if place == line:
                os.kill(os.getpid(), signal.SIGKILL)
            seen.add(place)
            os.write(log, f"ran {place}\n".encode())
        return trace

    # Fix the date, so that statements of different days are equal.
    statements.today = lambda: "2026-11-29"
    if most_bytes >= 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, resource.RLIM_INFINITY))
    threading.settrace(trace)
    sys.settrace(trace)
    try:
        aggregation_server.main(role[0], folder, role[1])
    except OSError:
        sys.exit(_FULL_DISK)
