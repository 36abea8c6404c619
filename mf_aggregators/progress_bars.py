"""Progress of long work on standard error: a bar on a terminal, and plain lines elsewhere."""

import contextlib
import re
import sys
import time
from typing import IO

import tqdm

# Lines are this many seconds apart if there is no terminal, because logs keep every line.
_SECONDS_BETWEEN_LINES = 30.0
# Characters that move the cursor of a terminal.
_CURSOR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]|[\r\n]")


class ProgressBar(tqdm.tqdm):  # type: ignore[misc, unused-ignore]
    """A progress bar: that of ``tqdm`` on a terminal, and otherwise plain lines.

    If standard error is not a terminal, it prints whole lines, at most one in 30 seconds over all
    bars of the process, and the first one after 30 seconds. Without a standard error, or if it was
    closed, nothing is printed.
    """

    def __init__(self, *args: object, file: IO[str] | None = None, **options: object) -> None:
        """Begins.

        Args:
          *args: Those of ``tqdm.tqdm``.
          file: The file to print to; None for standard error.
          **options: Those of ``tqdm.tqdm``.
        """
        stream: IO[str] | None = file or sys.stderr
        prints_lines = not _is_terminal(stream)
        if stream is None:
            options["disable"] = True
        elif prints_lines:
            # tqdm updates often enough for lines that are due, and not before there is progress.
            options |= {"file": _PlainLines(stream), "mininterval": 1.0, "delay": 1.0}
        else:
            options["file"] = stream
        super().__init__(*args, **options)
        if prints_lines and not self.disable:
            amount = f"{{desc}}: {{n_fmt}} {self.unit.strip()}"
            if self.total:
                amount = "{desc}: {n_fmt} of {total_fmt}"
            left = ", about {remaining} left" if self.total else ""
            self.bar_format = f"{amount}, {{elapsed}} so far{left}{{postfix}}"


class _PlainLines:
    """A file that forwards few lines of a bar, without control characters.

    Lines that cannot be written are dropped, so that an error of output does not end the work.
    """

    # The time before which no line of any bar is printed; None before the first bar.
    _due: float | None = None

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        if _PlainLines._due is None:
            _PlainLines._due = time.monotonic() + _SECONDS_BETWEEN_LINES

    def write(self, text: str) -> None:
        """Writes a line if one is due."""
        line = _CURSOR.sub("", text).strip()
        now = time.monotonic()
        if line and (_PlainLines._due is None or now >= _PlainLines._due):
            _PlainLines._due = now + _SECONDS_BETWEEN_LINES
            with contextlib.suppress(OSError, ValueError):
                self._stream.write(f"{line}\n")
                self._stream.flush()

    def flush(self) -> None:
        """Does nothing, because lines are flushed when they are written."""


def _is_terminal(stream: IO[str] | None) -> bool:
    try:
        return stream is not None and stream.isatty()
    except (AttributeError, ValueError):
        # The stream is not a file, or is closed.
        return False
