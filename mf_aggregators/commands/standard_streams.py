"""The standard streams of commands, also of those that were started without some of them."""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, cast

_DESCRIPTORS = (0, 1, 2)


@contextlib.contextmanager
def usable() -> Iterator[None]:
    """Lets a block write to standard output and standard error, whatever they are.

    A stream that was closed (``2>&-``) is /dev/null from now on: files that are opened later would
    take its place otherwise, and be written to. In the block, nothing is raised by what standard
    error does not take, since messages are no reason to lose the work.
    """
    for descriptor in _DESCRIPTORS:
        _open_closed(descriptor)
    for name in ("stdout", "stderr"):
        # Python has None for those that were closed.
        if getattr(sys, name) is None:
            setattr(sys, name, _nowhere())
    with contextlib.redirect_stderr(cast(Any, _NeverFailing(sys.stderr))):
        yield


def print_text(text: str) -> None:
    """Prints on standard output, and waits until it is written.

    What its encoding lacks, such as a file's name that is not UTF-8, is written with backslashes.

    Args:
      text: What is printed, with a newline after it.

    Raises:
      BrokenPipeError: If whoever read it has read enough.
      OSError: If it cannot be written. Nothing more is written then.
    """
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        drop_output()
        reason = f"standard output cannot be written: {error.strerror}"
        raise OSError(f"{reason}. What was to be printed is lost.") from error


def drop_output() -> None:
    """Turns standard output into /dev/null, so that nothing is left to be flushed at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _nowhere() -> Any:
    return os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8")


def _open_closed(descriptor: int) -> None:
    try:
        os.fstat(descriptor)
    except OSError:
        # The least that is free, and those below it are open.
        os.open(os.devnull, os.O_RDWR)


class _NeverFailing:
    """A text file whose writing never raises."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Writes what can be written."""
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flushes what can be written."""
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
