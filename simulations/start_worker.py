r"""start-tff-worker: runs a TFF worker, which computes clients' updates for runs elsewhere.

A run on another machine uses workers that it is told of by --workers=HOST:PORT,HOST:PORT. A
worker has no state of its own: it may be ended and started again at any time.

There is no encryption and no authentication: anybody who reaches the port can run programs as
the user who started the worker, and read what runs send to it, and it listens on all network
interfaces. Start it only in a trusted network, behind a firewall that blocks its port, through
which an ssh tunnel can reach it (ssh -L 8000:localhost:8000 HOST, and --workers=localhost:8000).

Examples:
  start-tff-worker --port=8000
  start-tff-worker --port=8000 --max_concurrent_computation_calls=4
"""

import contextlib
import ctypes
import importlib.util
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

from absl import flags

from mf_aggregators.commands import command_line
from mf_aggregators.commands.command_line import CommandError, FlagGroup
from mf_aggregators.tff import processes
from simulations.workers.worker_addresses import LARGEST_PORT

_SECONDS_TO_START = 120.0
_SECONDS_TO_END = 5.0
_SECONDS_BETWEEN_LOOKS = 0.1
_PARENT_DEATH_SIGNAL = 1  # Linux's constant PR_SET_PDEATHSIG
_ENDING = (signal.SIGINT, signal.SIGTERM)


def define_flags(values: flags.FlagValues) -> None:
    """Defines the flags of start-tff-worker."""
    group = FlagGroup(values, "Worker")
    group.integer("port", "The TCP port to listen on.", 8000)
    group.integer(
        "max_concurrent_computation_calls",
        "The most clients that are computed at the same time, to bound memory. Default: no limit.",
    )


def main(values: flags.FlagValues) -> None:
    """Runs a TFF worker until it is asked to end."""
    port, most_calls = values.port, values.max_concurrent_computation_calls
    command_line.check_choice(
        1 <= port <= LARGEST_PORT, f"--port must be between 1 and {LARGEST_PORT}, found {port}."
    )
    command_line.check_choice(
        most_calls is None or most_calls >= 1,
        f"--max_concurrent_computation_calls must be at least 1, found {most_calls}.",
    )
    binary = _binary()
    _check_free(port)
    processes.prepare_environment()
    arguments = [os.fspath(binary), f"--port={port}"]
    if most_calls is not None:
        arguments.append(f"--max_concurrent_computation_calls={most_calls}")
    requests: list[int] = []
    before = {each: signal.signal(each, lambda *_: requests.append(1)) for each in _ENDING}
    try:
        with _worker(arguments) as worker:
            if _listens(worker, port, requests):
                print(
                    f"start-tff-worker: listening on port {port} of all network interfaces, "
                    f"without encryption or authentication; use it by --workers=HOST:{port}, end "
                    "it by Ctrl-C.",
                    file=sys.stderr,
                    flush=True,
                )
                if values.format == "json":
                    command_line.print_result(values, {"port": port}, "")
                    sys.stdout.flush()
            while not requests:
                _check_running(worker)
                time.sleep(_SECONDS_BETWEEN_LOOKS)
            worker.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.wait(_SECONDS_TO_END)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run() -> None:
    """Entry point of the console command."""
    sys.exit(command_line.run(__doc__ or "", define_flags, main))


@contextlib.contextmanager
def _worker(arguments: list[str]) -> Iterator["subprocess.Popen[bytes]"]:
    """Starts TFF's worker, and kills it on exit."""
    library = ctypes.CDLL(None)

    def end_with_this_process() -> None:
        library.prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        # The worker gets a process group of its own: Ctrl-C reaches only this process, which then
        # ends the worker.
        os.setpgid(0, 0)

    # The worker's messages go to standard error, where the user who started it sees them.
    with subprocess.Popen(
        arguments, stdin=subprocess.DEVNULL, stdout=sys.stderr, preexec_fn=end_with_this_process
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def _listens(worker: "subprocess.Popen[bytes]", port: int, requests: Sequence[int]) -> bool:
    """Waits until the worker listens on its port; returns False if it is asked to end before.

    Raises:
      CommandError: If the worker ends by itself or takes too long.
    """
    deadline = time.monotonic() + _SECONDS_TO_START
    while not requests:
        _check_running(worker)
        with contextlib.suppress(OSError), socket.create_connection(("localhost", port), 1.0):
            return True
        if time.monotonic() > deadline:
            raise CommandError(
                f"TFF's worker does not listen on port {port} after {_SECONDS_TO_START:g} "
                "seconds: start it again with TF_CPP_MIN_LOG_LEVEL=0 to see its messages."
            )
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    return False


def _check_running(worker: "subprocess.Popen[bytes]") -> None:
    """Raises CommandError if the worker ended without a request."""
    if worker.poll() is not None:
        raise CommandError(
            f"TFF's worker ended by itself, with status {worker.returncode}: start it again; if "
            "it ran out of memory, set --max_concurrent_computation_calls."
        )


def _binary() -> pathlib.Path:
    """Returns the path of TFF's worker program, without importing TFF, which takes seconds."""
    command_line.check_extra("a worker")
    package = importlib.util.find_spec("tensorflow_federated")
    assert package is not None
    assert package.origin is not None
    return pathlib.Path(package.origin).parent / "data" / "worker_binary"


def _check_free(port: int) -> None:
    """Raises CommandError if the port is in use, which the worker would silently share."""
    both = socket.has_dualstack_ipv6()
    with socket.socket(socket.AF_INET6 if both else socket.AF_INET, socket.SOCK_STREAM) as probe:
        if both:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        # With SO_REUSEADDR, connections of an earlier worker that are still closing do not make the
        # port taken.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("::" if both else "0.0.0.0", port))
            probe.listen(1)
        except OSError as error:
            raise CommandError(
                f"port {port} cannot be listened on ({error.strerror}): end what uses it, or "
                "choose another one by --port."
            ) from None


if __name__ == "__main__":
    sys.exit(command_line.run(__doc__ or "", define_flags, main))
