"""Progress of long work on standard error: a bar on a terminal, and plain lines elsewhere."""

import contextlib
import re
import sys
import time
from typing import IO, Any

import tqdm

# Log files and services keep every line.
_SECONDS_BETWEEN_LINES = 30.0
# Characters that move the cursor of a terminal.
_CURSOR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]|[\r\n]")


class ProgressBar(tqdm.tqdm):  # type: ignore[misc, unused-ignore]
    """The bar of ``tqdm``, where standard error is a terminal.

    Elsewhere it prints whole lines, one in 30 seconds at most over all bars of the process, and the
    first after so long. Without a standard error, or if that takes no more, it prints nothing.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        """Begins.

        Args:
          *args: Those of ``tqdm.tqdm``.
          **options: Those of ``tqdm.tqdm``; without ``file``, it is standard error.
        """
        stream = options.pop("file", None) or sys.stderr
        prints_lines = not _is_terminal(stream)
        if stream is None:
            options["disable"] = True
        elif prints_lines:
            # Lines are made as often as one may be due, and none before there is any progress.
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
    """A file that passes on few lines of a bar, without characters that move cursors.

    Lines that cannot be written are dropped: progress is no reason to lose the work.
    """

    # Before this time no line is due, whichever bar it is of; None before the first bar.
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
        """Does nothing: lines are flushed as they are written."""


def _is_terminal(stream: IO[str] | None) -> bool:
    try:
        return stream is not None and stream.isatty()
    except (AttributeError, ValueError):
        # Not a file after all, or closed.
        return False
