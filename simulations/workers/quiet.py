"""Quiet logs, a clean end and orderly stops for programs that run TensorFlow Federated."""

import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType

from mf_aggregators.tff.processes import end_workers, end_workers_at_exit, prepare_environment

__all__ = [
    "StopRequest",
    "end_workers",
    "end_workers_at_exit",
    "prepare_environment",
    "stop_requests",
]


class StopRequest:
    """Whether the user has asked for an orderly stop."""

    def __init__(self) -> None:
        self.is_set = False


@contextlib.contextmanager
def stop_requests(message: str) -> Iterator[StopRequest]:
    """Turns the first Ctrl-C or SIGTERM into a request to stop after the round under way.

    It prints a message on standard error. A second one interrupts at once, by KeyboardInterrupt.

    Yields:
      The request, unset until a signal arrives.
    """
    request = StopRequest()

    def handle(signal_number: int, frame: FrameType | None) -> None:
        if request.is_set:
            raise KeyboardInterrupt
        request.is_set = True
        # A signal handler may interrupt a write to sys.stderr: this goes past its buffer.
        os.write(2, f"\n{message}\n".encode())

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            # None stands for one that is not Python's, which only its owner can set.
            if handler is not None:
                signal.signal(number, handler)
