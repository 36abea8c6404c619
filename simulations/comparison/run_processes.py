"""Processes that train, several at a time: started, asked to stop, and never left behind."""

import contextlib
import dataclasses
import os
import pathlib
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import IO, Any

_SECONDS_TO_END = 20.0


@dataclasses.dataclass(frozen=True)
class Ended:
    """A process that has ended.

    Attributes:
      name: The name that it was started with.
      status: Its exit status.
      printed: What it printed on standard output.
      last_line: The last line that it added to its log.
      seconds: Wall time since it was started.
    """

    name: str
    status: int
    printed: str
    last_line: str
    seconds: float


@dataclasses.dataclass
class _UnderWay:
    """A process that has not ended, and what is to be done once it has."""

    name: str
    child: "subprocess.Popen[bytes]"
    output: IO[bytes]
    log: pathlib.Path
    log_start: int
    start: float
    closing: contextlib.ExitStack
    asked_to_stop: bool = False


class RunProcesses:
    """Processes under way, as a context: at its end those that are left are killed.

    If it ends by Ctrl-C, they are asked to stop and have some seconds before.
    """

    def __init__(self, lock: int) -> None:
        """Begins without any.

        Args:
          lock: A descriptor that all inherit, so that its lock lasts as long as they do.
        """
        self._lock = lock
        self._under_way: list[_UnderWay] = []

    def __enter__(self) -> "RunProcesses":
        """Returns itself."""
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Ends what is left."""
        del error, traceback
        with contextlib.ExitStack() as closing:
            for each in self._under_way:
                closing.push(each.closing)
            if error_type is not None and issubclass(error_type, KeyboardInterrupt):
                deadline = time.monotonic() + _SECONDS_TO_END
                for each in self._under_way:
                    each.child.send_signal(signal.SIGTERM)
                for each in self._under_way:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        each.child.wait(max(0.0, deadline - time.monotonic()))
        self._under_way.clear()

    @property
    def names(self) -> list[str]:
        """The names of the processes under way, in the order in which they were started."""
        return [each.name for each in self._under_way]

    def start(self, name: str, arguments: Sequence[str], log: pathlib.Path) -> None:
        """Starts a process.

        Args:
          name: What it is called here.
          arguments: Its command line.
          log: A file that its standard error is added to.

        Raises:
          OSError: If it cannot be started or the log cannot be written.
        """
        start = time.monotonic()
        with contextlib.ExitStack() as closing:
            output = closing.enter_context(tempfile.TemporaryFile())
            errors = closing.enter_context(log.open("ab"))
            log_start = errors.tell()
            child = closing.enter_context(process(arguments, output, errors, self._lock))
            self._under_way.append(
                _UnderWay(name, child, output, log, log_start, start, closing.pop_all())
            )

    def request_stop(self) -> None:
        """Asks all, once each, to stop after their rounds."""
        for each in self._under_way:
            if not each.asked_to_stop:
                each.asked_to_stop = True
                each.child.send_signal(signal.SIGTERM)

    def take_ended(self) -> Iterator[Ended]:
        """Yields those that have ended since; nothing of them is left here."""
        for each in [each for each in self._under_way if each.child.poll() is not None]:
            self._under_way.remove(each)
            with each.closing:
                each.output.seek(0)
                printed = each.output.read().decode("utf-8", "replace")
            seconds = time.monotonic() - each.start
            with each.log.open("rb") as log:
                log.seek(each.log_start)
                said = log.read().decode("utf-8", "replace")
            yield Ended(each.name, each.child.returncode, printed, last_line(said), seconds)


@contextlib.contextmanager
def process(
    arguments: Sequence[str], output: Any, errors: Any, lock: int | None = None
) -> Iterator["subprocess.Popen[bytes]"]:
    """Starts a process; none is left behind, and no worker of it.

    Args:
      arguments: Its command line.
      output: Its standard output, as ``subprocess`` takes it.
      errors: Its standard error, likewise.
      lock: A descriptor that it inherits.

    Yields:
      The process, which is killed at the end if it has not ended.
    """
    child = subprocess.Popen(
        arguments,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=errors,
        pass_fds=() if lock is None else (lock,),
        # A terminal's Ctrl-C reaches this process alone, which passes it on once.
        start_new_session=True,
    )
    try:
        with child:
            try:
                yield child
            finally:
                if child.poll() is None:
                    os.killpg(child.pid, signal.SIGKILL)
    finally:
        # Its workers, should it have had no time to end them.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)


def last_line(text: str) -> str:
    """Returns the last line that says something, of text that may have progress bars.

    Args:
      text: What a process printed.
    """
    # Progress bars end their lines by returning to the first column.
    lines = [line.strip() for line in re.split(r"[\r\n]", text)]
    return next((line for line in reversed(lines) if line), "(nothing)")
