"""Long computations of a plan in processes of their own, so that every core has some of the work.

Such a process computes one proposal, which goes into the cache, and ends. Whoever weighs the
proposal waits for it and takes the factorization from the cache; it computes what is not there
itself. So a process that fails or is killed costs time and nothing else.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence

from mf_aggregators.planning.proposals import Proposal

# How many threads the numerical libraries of a process may have.
_THREADS = "OPENBLAS_NUM_THREADS"


@contextlib.contextmanager
def computing(
    proposals: Sequence[Proposal], compute: Callable[[int], None], processes: int
) -> Iterator[Callable[[int], None]]:
    """Computes what takes long of a plan in other processes, while a block goes on.

    Args:
      proposals: What is weighed, in this order.
      compute: Computes the proposal of a number, and keeps it in a cache. It is pickled.
      processes: The most processes at a time, one for each core; with fewer than two, none is
        started. Cores that are more than the processes go to threads of these.

    Yields:
      What waits for a proposal of a number, if a process computes it or will do so.
    """
    side = _SideProcesses(proposals, compute, processes)
    try:
        side.start_first()
        yield side.wait
    finally:
        side.end()


class _SideProcesses:
    def __init__(
        self, proposals: Sequence[Proposal], compute: Callable[[int], None], processes: int
    ) -> None:
        self._compute = compute
        self._processes = processes
        self._bases = [proposal.base for proposal in proposals]
        long = {
            number: proposal.expected_seconds
            for number, proposal in enumerate(proposals)
            if proposal.expected_seconds is not None
        }
        # A process that is to end with another one may have none of its own.
        may_start = processes >= 2 and not multiprocessing.current_process().daemon
        longest_first = sorted(long, key=lambda number: -long[number])
        self._waiting = longest_first if may_start and len(long) >= 2 else []
        # Threads of several processes on one core would be in each other's way.
        self._threads = max(1, processes // max(1, len(long)))
        self._running: dict[int, multiprocessing.process.BaseProcess] = {}

    def start_first(self) -> None:
        """Starts what approximates nothing else."""
        self._start([number for number in self._waiting if self._bases[number] is None])

    def wait(self, number: int) -> None:
        """Waits for a proposal, and for a place for it among the processes before."""
        if number in self._waiting:
            # What approximates another factorization is weighed after that, which is kept now.
            base = self._bases[number]
            same = [each for each in self._waiting if self._bases[each] == base]
            self._start([number, *(each for each in same if each != number)])
        while number in self._waiting:
            self._join(next(iter(self._running)))
            self._start([number])
        if number in self._running:
            self._join(number)
            self._start([each for each in self._waiting if self._bases[each] is None])

    def end(self) -> None:
        """Ends what still runs."""
        for process in self._running.values():
            process.terminate()
            process.join()

    def _start(self, numbers: Sequence[int]) -> None:
        for number in numbers[: self._processes - len(self._running)]:
            self._waiting.remove(number)
            process = multiprocessing.get_context("spawn").Process(
                target=_run, args=(self._compute, number), daemon=True
            )
            try:
                with _environment(self._threads):
                    process.start()
            except OSError:
                # No process can be started here: all is computed where it is asked for.
                self._waiting.clear()
                return
            self._running[number] = process

    def _join(self, number: int) -> None:
        self._running.pop(number).join()


def _run(compute: Callable[[int], None], number: int) -> None:
    # Ctrl-C goes to all processes, and one of them says so.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    warnings.showwarning = _show_warning
    # Whoever waits finds nothing in the cache and comes upon the same error.
    with contextlib.suppress(Exception):
        compute(number)


def _show_warning(message: Warning | str, *unused: object, **also_unused: object) -> None:
    print(f"warning: {' '.join(str(message).split())}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _environment(threads: int) -> Iterator[None]:
    before = os.environ.get(_THREADS)
    os.environ[_THREADS] = str(threads)
    try:
        yield
    finally:
        if before is None:
            del os.environ[_THREADS]
        else:
            os.environ[_THREADS] = before
