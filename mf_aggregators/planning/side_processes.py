"""Long computations of a plan in processes of their own, so that every core has some of the work.

Such a process computes one proposal, which goes into the cache, and ends. Whoever evaluates
the proposal waits for it and takes the factorization from the cache; it computes what is not there
itself. So a process that fails or is killed costs time and nothing else: entries of the cache take
their names once they are whole.

With a deadline, a process that has not ended by then is ended, wherever it is. That is the one way
to hold it within a decomposition of a large matrix, which no check of a clock interrupts.
"""

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence

from mf_aggregators.planning.proposals import Proposal
from mf_aggregators.progress_bars import ProgressBar

# How many threads the numerical libraries of a process may have.
_THREADS = "OPENBLAS_NUM_THREADS"
# How long a process that is to end has for it, before it is killed: to remove an unfinished file.
_SECONDS_TO_END = 2.0
# Estimates may be so many times too long: what might be done in time is tried.
_TRUST_IN_ESTIMATES = 1.5


class TimeLimitError(Exception):
    """What is asked for is not computed within the time limit; the message says why."""


@contextlib.contextmanager
def computing(
    proposals: Sequence[Proposal],
    compute: Callable[[int], None],
    processes: int,
    deadline: float | None = None,
) -> Iterator[Callable[[int], bool]]:
    """Computes what takes long of a plan in other processes, while a block goes on.

    Args:
      proposals: What is evaluated, in this order.
      compute: Computes the proposal of a number, and caches it. It is pickled.
      processes: The most processes at a time, one for each core; with fewer than two, none is
        started, unless there is a deadline. Cores that are more than the processes go to threads
        of these.
      deadline: The time, as ``time.monotonic`` has it, after which no process goes on; None for
        none.

    Yields:
      What waits for a proposal of a number, if a process computes it or will do so, and returns
      whether one did. It raises TimeLimitError if that would not end, or has not ended, by the
      deadline.
    """
    side = _SideProcesses(proposals, compute, processes, deadline)
    try:
        side.start_first()
        yield side.wait
    finally:
        side.end()


@contextlib.contextmanager
def until(deadline: float | None) -> Iterator[None]:
    """Raises TimeLimitError in a block once its time is over, where the system can.

    Args:
      deadline: The time, as ``time.monotonic`` has it; None for none.
    """
    reason = "was not done when the time had passed"
    if deadline is None:
        yield
        return
    left = deadline - time.monotonic()
    if left <= 0.0:
        raise TimeLimitError("was not begun when the time had passed")
    is_main = threading.current_thread() is threading.main_thread()
    if not (is_main and hasattr(signal, "setitimer")):
        yield
        return

    def ring(*_: object) -> None:
        raise _AlarmError

    before = signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, left)
        try:
            yield
        finally:
            # Rings here as well end in the handler below.
            signal.setitimer(signal.ITIMER_REAL, 0.0)
    except _AlarmError:
        raise TimeLimitError(reason) from None
    finally:
        signal.signal(signal.SIGALRM, before)


class _AlarmError(BaseException):
    """The time is over. A BaseException, which no ``except Exception`` catches."""


class _SideProcesses:
    def __init__(
        self,
        proposals: Sequence[Proposal],
        compute: Callable[[int], None],
        processes: int,
        deadline: float | None,
    ) -> None:
        self._compute = compute
        self._deadline = deadline
        self._processes = processes
        self._bases = [proposal.base for proposal in proposals]
        long = {
            number: proposal.expected_seconds
            for number, proposal in enumerate(proposals)
            if proposal.expected_seconds is not None
        }
        self._expected = long
        # Daemonic processes may not have children.
        may_start = not multiprocessing.current_process().daemon
        if deadline is None:
            may_start = may_start and processes >= 2 and len(long) >= 2
        longest_first = sorted(long, key=lambda number: -long[number])
        self._waiting = longest_first if may_start else []
        self._done: set[int] = set()
        # Why proposals will not be computed, by their numbers.
        self._skipped: dict[int, str] = {}
        # Threads of several processes on one core would be in each other's way.
        self._threads = max(1, processes // max(1, len(long)))
        self._running: dict[int, multiprocessing.process.BaseProcess] = {}

    def start_first(self) -> None:
        """Starts what approximates nothing else."""
        self._skip_too_long()
        self._start([number for number in self._waiting if self._bases[number] is None])

    def wait(self, number: int) -> bool:
        """Waits for a proposal, and for a place for it among the processes before.

        Returns whether a process has computed it.
        """
        self._fill(number)
        while number in self._waiting or number in self._running:
            self._wait_for_any()
            self._fill(number)
        if number in self._skipped:
            raise TimeLimitError(self._skipped[number])
        return number in self._done

    def _fill(self, number: int) -> None:
        """Starts what there are places for: a proposal that is asked for comes first."""
        self._skip_too_long()
        wanted = []
        if number in self._waiting:
            # What approximates another factorization comes after that, which is cached now.
            base = self._bases[number]
            wanted = [number, *(each for each in self._waiting if self._bases[each] == base)]
        others = [each for each in self._waiting if self._bases[each] is None]
        self._start(list(dict.fromkeys([*wanted, *others])))

    def _wait_for_any(self) -> None:
        """Waits until a process ends, or the deadline, at which all of them are ended."""
        left = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
        ends = {process.sentinel: number for number, process in self._running.items()}
        ended = multiprocessing.connection.wait(list(ends), left)
        for sentinel in ended:
            assert isinstance(sentinel, int)
            process = self._running.pop(ends[sentinel])
            process.join()
            if process.exitcode == 0:
                self._done.add(ends[sentinel])
        if not ended:
            for number in self._running:
                self._skipped[number] = "was not done when the time had passed"
            self.end()

    def end(self) -> None:
        """Ends what still runs."""
        for process in self._running.values():
            process.terminate()
        for process in self._running.values():
            _join_or_kill(process)
        self._running.clear()

    def _skip_too_long(self) -> None:
        """Gives up what waits and would not end by the deadline."""
        if self._deadline is None:
            return
        left = max(0.0, self._deadline - time.monotonic())
        for number in list(self._waiting):
            expected = self._expected[number]
            if expected > _TRUST_IN_ESTIMATES * left or not left:
                self._waiting.remove(number)
                self._skipped[number] = (
                    f"would take about {float(f'{expected:.1g}'):.0f} s on two idle cores, and "
                    f"{left:.0f} s were left"
                )

    def _start(self, numbers: Sequence[int]) -> None:
        for number in numbers[: max(0, max(1, self._processes) - len(self._running))]:
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


def _run(compute: Callable[[int], None], number: int) -> None:
    # Ctrl-C goes to all processes, and one of them says so.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # An exit, and no death: what is half written is removed on the way.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    warnings.showwarning = _show_warning
    # Bars would have a lock of multiprocessing, which is left behind if this process is ended.
    ProgressBar.set_lock(threading.RLock())
    # Whoever waits finds nothing in the cache and comes upon the same error.
    try:
        compute(number)
    except Exception:
        sys.exit(1)


def _join_or_kill(process: multiprocessing.process.BaseProcess) -> None:
    process.join(_SECONDS_TO_END)
    if process.is_alive():
        # Within a long computation, no signal is handled. No file is open there.
        process.kill()
        process.join()


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
