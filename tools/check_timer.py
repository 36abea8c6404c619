r"""Checks a port of the reference timer: the same events, the same answers.

  python tools/check_timer.py node docs/timer/timer.js
  python tools/check_timer.py --vectors=my_vectors.json ./timer

The words after the flags are the command of the port. It reads events from standard input, one JSON
object a line, and writes the answer to each to standard output, one JSON object a line, before it
reads on. docs/devices.md lists events and answers. Nothing but the standard library is needed.

Exit status 0 if all answers are those of the reference; 1 at the first other one, which is printed
with the events before it; 2 if the port does not run or does not answer, or for bad flags or files.
"""

import argparse
import contextlib
import json
import pathlib
import queue
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import TypeAlias

# The events and answers of a sequence, in the order of time.
_Sequence: TypeAlias = Mapping[str, Sequence[dict[str, object]]]
VECTORS = pathlib.Path(__file__).resolve().parent.parent / "docs" / "timer" / "vectors.json"
SAME, DIFFERENT, UNUSABLE = 0, 1, 2
# The seconds to wait for an answer: a port that has not flushed it by then never will.
_SECONDS = 10.0


class UnusableError(Exception):
    """A port or a file that cannot be used; the message has the reason and the remedy."""


class Port:
    """A running port of the reference timer, as a process.

    Raises:
      UnusableError: If the port does not start.
    """

    def __init__(self, command: Sequence[str]) -> None:
        """Starts a port of the reference timer as a process.

        Args:
          command: The program and its arguments.
        """
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8"
            )
        except OSError as error:
            raise UnusableError(f"{command[0]} does not run: {error.strerror or error}.") from error
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._lines.put(line)
        self._lines.put("")

    def answer(self, event: dict[str, object]) -> object:
        """Sends an event to the port and returns its answer.

        Args:
          event: The event, JSON-able.

        Raises:
          UnusableError: If no answer comes in ten seconds, or the answer is not JSON.
        """
        assert self._process.stdin is not None
        line = ""
        try:
            print(json.dumps(event), file=self._process.stdin, flush=True)
            line = self._lines.get(timeout=_SECONDS)
            return json.loads(line)
        except queue.Empty:
            why = f"it is silent for {_SECONDS:g} seconds: end each answer's line and flush it"
        except (OSError, ValueError):
            why = f"it wrote {line!r}, which is not JSON" if line else "it has ended"
        raise UnusableError(f"no answer to {json.dumps(event)}: {why}.")

    def stop(self) -> None:
        """Ends the process in which the port runs."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        # Do not wait longer: a child process of the port may hold the output open.
        self._reader.join(timeout=1.0)


def first_difference(
    port: Port, sequences: Sequence[Mapping[str, Sequence[dict[str, object]]]]
) -> str | None:
    """Returns a report of the port's first wrong answer; None if all answers are right.

    Args:
      port: The port.
      sequences: ``events`` and ``answers`` of each, in the order of time.

    Raises:
      UnusableError: If the port does not answer.
    """
    for number, sequence in enumerate(sequences):
        told = f"Sequence {number} differs:\n"
        for event, expected in zip(sequence["events"], sequence["answers"], strict=True):
            found = port.answer(event)
            told += f"  {json.dumps(event)}\n    expected {json.dumps(expected)}\n"
            # Answers are compared as text, because in Python True equals 1.
            if json.dumps(found, sort_keys=True) != json.dumps(expected, sort_keys=True):
                return f"{told}    found    {json.dumps(found)}"
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Checks the port that the command line names, and returns the exit status.

    Args:
      arguments: The words of the command line; those of the process by default.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    about = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=about[0], epilog=about[2], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--vectors", type=pathlib.Path, default=VECTORS, help="The file of vectors."
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help="The command of the port.")
    given = parser.parse_args(words)
    if not given.command:
        parser.error("give the command of a port, as in: node docs/timer/timer.js")
    try:
        try:
            sequences = json.loads(given.vectors.read_text(encoding="utf-8"))["sequences"]
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise UnusableError(f"{given.vectors} is not a file of vectors: {error}.") from error
        port = Port(given.command)
        try:
            different = first_difference(port, sequences)
        finally:
            port.stop()
    except UnusableError as error:
        print(error, file=sys.stderr)
        return UNUSABLE
    if different is not None:
        print(different)
        return DIFFERENT
    events = sum(len(each["events"]) for each in sequences)
    print(f"{len(sequences)} sequences, {events} events: all answers are those of the reference.")
    return SAME


if __name__ == "__main__":
    sys.exit(main())
