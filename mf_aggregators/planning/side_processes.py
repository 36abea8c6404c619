"""Searches of a plan in processes of their own: every core has some, and a deadline ends them.

A process puts factorizations into the cache, from which the plan takes them. The plan computes
itself what is missing there, so that a process that fails or is killed costs time and nothing else.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from typing import Any

from mf_aggregators.progress_bars import ProgressBar

# How many threads the numerical libraries of a process may have.
_THREADS = "OPENBLAS_NUM_THREADS"
# Seconds in which a process that was told to end removes an unfinished file; then it is killed.
_SECONDS_TO_END = 2.0


class TimeLimitError(Exception):
    """A mechanism is not computed within the time limit; the message says why."""


@contextlib.contextmanager
def computing(
    searches: Mapping[int, Any],
    compute: Callable[[int], None],
    processes: int,
    deadline: float | None = None,
) -> Iterator[Callable[[int], bool]]:
    """Computes proposals in other processes while a block runs, and ends those processes with it.

    Args:
      searches: The numbers of the proposals that are computed, in order, each with what it
        approximates; None for nothing. What approximates another factorization begins when it is
        waited for, because that factorization is cached by then.
      compute: Computes the proposal of a number, and caches it. It is pickled.
      processes: The most processes at a time, at least 1. Cores that are left go to their threads.
      deadline: The time, as ``time.monotonic`` has it, after which nothing is waited for; None for
        none.

    Yields:
      A function that waits for the proposal of a number, if a process computes it, and returns
      whether one did. It raises TimeLimitError if the process has not ended by the deadline.
    """
    # Daemonic processes may not have children.
    if not searches or multiprocessing.current_process().daemon:
        yield lambda number: False
        return
    others = set(multiprocessing.active_children())
    workers = min(processes, len(searches))
    executor = futures.ProcessPoolExecutor(
        workers, multiprocessing.get_context("spawn"), initializer=_begin
    )
    running: dict[int, futures.Future[None]] = {}

    def start(base: Any) -> None:
        numbers = [number for number in searches if searches[number] == base]
        # Where no process can be started, or one was killed, the plan computes all itself.
        with contextlib.suppress(OSError, futures.BrokenExecutor), _threads(processes // workers):
            running.update({number: executor.submit(compute, number) for number in numbers})

    def wait(number: int) -> bool:
        if number in searches and number not in running:
            start(searches[number])
        if number not in running:
            return False
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            # The plan comes upon the same error itself.
            return running[number].exception(left) is None
        except futures.TimeoutError:
            raise TimeLimitError("was not done when the time had passed") from None

    try:
        start(None)
        yield wait
    finally:
        executor.shutdown(wait=False, cancel_futures=True)
        started = set(multiprocessing.active_children()) - others
        for process in started:
            process.terminate()
        for process in started:
            process.join(_SECONDS_TO_END)
            process.kill()
            process.join()


def _begin() -> None:
    """Prepares a process, which ends with an exit: files that are half written are removed."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    warnings.showwarning = _show_warning
    # A lock of multiprocessing would be left behind by a process that is killed.
    ProgressBar.set_lock(threading.RLock())


def _show_warning(message: Warning | str, *unused: object, **also_unused: object) -> None:
    print(f"warning: {' '.join(str(message).split())}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _threads(number: int) -> Iterator[None]:
    before = os.environ.get(_THREADS)
    os.environ[_THREADS] = str(number)
    try:
        yield
    finally:
        if before is None:
            del os.environ[_THREADS]
        else:
            os.environ[_THREADS] = before
