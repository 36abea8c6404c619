"""Quiet logs, a clean end and orderly stops for programs that run TensorFlow Federated.

A state of noise is found in the state of a process. It tells the participation schema that the
noise is scaled to. A guarantee needs the schema of the noise and the schema that clients keep to,
and they are named in two places: where the aggregator is built, and where cohorts are drawn. A
learning process of ``tff.learning`` does not tell what its aggregator was built with. So the schema
stands in the state as numbers: whoever draws cohorts can compare, before the first round of a run
and whenever it is resumed.

TFF starts a ``worker_binary`` process whose only clean-up is a finaliser that often
never runs: it would outlive Python, and keep pipes open that the program writes to.
"""

import atexit
import collections
import contextlib
import functools
import gc
import inspect
import os
import re
import signal
import subprocess
import threading
import warnings
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

from mf_aggregators.kernel.numbers import Error
from mf_aggregators.participation import (
    FixedEpochOrder,
    MinSeparation,
    Participation,
    SingleParticipation,
)

# psutil comes with the extra `tff`, like TFF itself; flags and help texts need neither of them.
if TYPE_CHECKING:
    import psutil

_WORKER = "worker_binary"
# The environment variable that names hosts which gRPC alone reaches without a proxy.
_WITHOUT_PROXY = "no_grpc_proxy"
_RAISES_REFUSALS = "_raises_refusals_of_mf_aggregators"
# The prefix of this library's messages, since a context may also run checks of other programs.
_OURS = "mf_aggregators: "
# Finds the message of a failed assertion of this library in the error of TFF's worker.
_REFUSAL = re.compile(rf"assertion failed: \[{_OURS}(.*?)\](?= \[|[\"\n]|$)")
# Matches TensorFlow's escaped quotes and backslashes in such a message.
_ESCAPED = re.compile(r"\\([\"'\\])")
# A part of the error with which TFF's usual context refuses a secure sum; the error has some 60
# lines.
_CANNOT_SUM_SECURELY = "Cannot embed a federated value"
_NO_SECURE_SUM = (
    "TFF's usual context has no secure sum: before the aggregator is made, call "
    "tff.backends.test.set_sync_test_cpp_execution_context(), which simulates one on this machine. "
    "The simulation hides nothing: a server with a secure protocol compiles the process for that "
    "protocol."
)
_SECONDS_TO_END = 5.0
# The names of the participation schemas; their numbers in states count from 1.
SCHEMA_KINDS = (SingleParticipation.name, FixedEpochOrder.name, MinSeparation.name)


class RefusalError(Error, RuntimeError):
    """Raised if a TFF context, or a check in a graph, refused a round: nothing was released.

    Use it when a loop has to tell a refused round from other errors.

    Example:
      >>> import mf_aggregators as mfa
      >>> from mf_aggregators.tff import processes
      >>> [issubclass(processes.RefusalError, each) for each in (mfa.Error, RuntimeError)]
      [True, True]
    """

    @staticmethod
    def reason_of(error: BaseException) -> str | None:
        """Returns the reason why a process refused a round, from the error that ``next`` raised.

        A check in a graph fails in TFF's worker, and TFF passes the failure on within a gRPC error
        of many lines. If :func:`raise_refusals` was not called, this method finds the reason in the
        error.

        Args:
          error: The error that was raised.

        Returns:
          The message of the check that failed, one line, such as that there is noise for no further
          round; None if no check of this library failed.
        """
        if isinstance(error, RefusalError):
            return str(error)
        if _CANNOT_SUM_SECURELY in str(error):
            return _NO_SECURE_SUM
        found = _REFUSAL.search(str(error))
        return None if found is None else _ESCAPED.sub(r"\1", found[1])


def prepare_environment() -> None:
    """Silences the logs of TensorFlow, its worker, gRPC and XLA; call it before importing them.

    Variables that the user has set already are left as they are, so that TF_CPP_MIN_LOG_LEVEL=0
    brings the messages back.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    # No GPU is used: a simulation of many small clients gains nothing from one, and the search for
    # a GPU prints a page.
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    warnings.filterwarnings("ignore", category=FutureWarning)
    _reach_local_worker()


def _reach_local_worker() -> None:
    """Lets gRPC connect to this machine's own worker even if the environment sets a proxy.

    TFF waits without end for its own worker if ``http_proxy`` is set and ``no_proxy`` does not name
    localhost. gRPC reads the variable when a channel is opened.
    """
    without_proxy = os.environ.get(_WITHOUT_PROXY, "") or os.environ.get("no_proxy", "")
    if "localhost" not in without_proxy.split(","):
        os.environ[_WITHOUT_PROXY] = f"{without_proxy},localhost".lstrip(",")


def start_worker() -> None:
    """Starts TFF's worker process, and returns when the worker answers.

    Call it before a run handles signals by :func:`stop_requests`, so that the first signal ends the
    wait for the worker.
    """
    import tensorflow_federated as tff

    tff.tensorflow.computation(lambda: 0)()


def refusal(message: str) -> str:
    """Returns a check's message in the form that :func:`raise_refusals` recognises.

    Args:
      message: One line that says what is refused and what to do.
    """
    return _OURS + message


def raise_refusals(context: Any, *, needs_secure_sums: bool = False) -> None:
    """Makes a TFF context raise RefusalError, of one line, if this library refuses a round.

    TFF has no place for errors of a computation, and learning processes are built by TFF itself.
    So the method ``invoke`` of this one object is wrapped; all other errors pass as they are.
    ``client_sums.checked_argument`` refuses, by its own errors, updates with other names than their
    type has, and processes that release sums which should have noise. It passes large states in
    pieces.
    ``mf_dp_aggregator`` calls it for the context in which its process or query is made. Where
    another one runs the process, call it for that one.

    Args:
      context: What runs computations, such as ``tff.framework.get_context_stack().current``.
        One whose attributes cannot be set is left as it is.
      needs_secure_sums: Whether to warn of a usual context, in which no process with secure sums
        runs.
    """
    import tensorflow_federated as tff

    from mf_aggregators.tff import client_sums

    usual = getattr(context, "_async_context", context)
    compiler = getattr(getattr(usual, "_compiler_pipeline", None), "_compiler_fn", None)
    if needs_secure_sums and compiler is tff.backends.native.desugar_and_transform_to_native:
        warnings.warn(_NO_SECURE_SUM, stacklevel=4)
    _reach_local_worker()
    invoke = context.invoke
    if getattr(invoke, _RAISES_REFUSALS, False):
        return

    checked = functools.partial(
        client_sums.checked_argument,
        takes_pieces=isinstance(usual, tff.framework.AsyncExecutionContext),
    )

    async def awaited(computation: Any, argument: Any) -> Any:
        passed = checked(computation, argument)
        with _clear_errors():
            return await invoke(computation, passed)

    def called(computation: Any, argument: Any) -> Any:
        passed = checked(computation, argument)
        with _clear_errors():
            return invoke(computation, passed)

    is_awaited = inspect.iscoroutinefunction(invoke)
    clear = functools.wraps(invoke)(awaited if is_awaited else called)
    setattr(clear, _RAISES_REFUSALS, True)
    with contextlib.suppress(AttributeError):
        context.invoke = clear


@contextlib.contextmanager
def _clear_errors() -> Iterator[None]:
    """Raises RefusalError in place of an error of TFF if the error tells of a refusal."""
    try:
        yield
    except Exception as error:
        reason = RefusalError.reason_of(error)
        if reason is None or isinstance(error, RefusalError):
            raise
        # TFF's own error of some 60 lines remains the context of the new one, which is not printed.
        raise RefusalError(reason) from None


def end_workers() -> None:
    """Ends the worker processes of TFF that this process started.

    If TFF is used again, it starts a new worker.

    Raises:
      ImportError: If psutil is missing, which the extra ``tff`` installs.
    """
    import psutil

    # TFF's finaliser interrupts each worker that it knows of, and fails with a message if the
    # worker is gone already or Python is shutting down. So TFF must forget the worker first.
    for manager in [found for found in gc.get_objects() if _is_service_manager(found)]:
        process, manager._process, manager._stub = manager._process, None, None
        _end(psutil.Process(process.pid))
        process.poll()
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.name() == _WORKER:
                _end(child)


def end_workers_at_exit() -> None:
    """Ends TFF's worker processes when this process ends, also if SIGTERM ends it.

    Use it when a script runs TensorFlow Federated: first of all.

    A handler of SIGTERM that the program has (one that saves, for instance) stays and is called:
    workers end once it exits by ``SystemExit``, and a handler that ends the process in another way
    calls ``end_workers`` first. Python sets handlers in the main thread alone: where another
    one calls this, workers end at exit, and SIGTERM does what it did before.

    Raises:
      ImportError: If psutil is missing, which the extra ``tff`` installs.

    Example:
      >>> from mf_aggregators.tff import processes
      >>> processes.end_workers_at_exit()
    """
    # psutil is imported now, since at exit it would be too late to say that it is missing.
    import psutil  # noqa: F401

    atexit.register(end_workers)
    is_main_thread = threading.current_thread() is threading.main_thread()
    if is_main_thread and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _exit_on_signal)


class StopRequest:
    """A flag that tells whether the user has asked for an orderly stop."""

    def __init__(self) -> None:
        self.is_set = False


@contextlib.contextmanager
def stop_requests(message: str) -> Iterator[StopRequest]:
    """Turns the first Ctrl-C or SIGTERM into a request to stop after the current round.

    The first signal prints a message on standard error. A second one raises KeyboardInterrupt at
    once.

    Args:
      message: The line that the first signal prints.

    Yields:
      The request, unset until a signal arrives.
    """
    request = StopRequest()

    def handle(signal_number: int, frame: FrameType | None) -> None:
        if request.is_set:
            raise KeyboardInterrupt
        request.is_set = True
        # The message bypasses the buffer of sys.stderr, because the signal may have interrupted a
        # write to it.
        os.write(2, f"\n{message}\n".encode())

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            # None stands for a handler that was not set from Python, and which Python cannot set
            # again.
            if handler is not None:
                signal.signal(number, handler)


def _exit_on_signal(signal_number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + signal_number)


def _end(process: "psutil.Process") -> None:
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        process.terminate()
        try:
            process.wait(_SECONDS_TO_END)
        except psutil.TimeoutExpired:
            process.kill()


def _is_service_manager(candidate: object) -> bool:
    # A class inside a function of TFF, so there is no name to import.
    return type(candidate).__name__ == "ServiceManager" and isinstance(
        getattr(candidate, "_process", None), subprocess.Popen
    )


class NoiseState(NamedTuple):
    """The state of a stream of noise rows between two rounds, as tensors.

    Its text shows neither its seed nor its history. TFF keeps the class if a state is nested in
    another one, so that neither of them appears in a notebook, a log or a traceback.

    Attributes:
      fingerprint: int64 scalar: tells the mechanism, options and version that made the state.
      round_index: int64 scalar: the round that the next row is for, from 0.
      seed: (2,) int64: the stream's secret.
      stream: (2,) int64: the stream's name, which is not secret.
      schema: (3,) int64: the participation schema that the noise is scaled to: its kind in
        SCHEMA_KINDS from 1, its separation b (0 if it has none) and its most participations k (0
        for as many as fit).
      history: For each segment of a row, what the noising matrix needs of earlier rounds and
        cannot draw again and keeps in no file: (tiles, number, width) int32 rows, oldest first, or
        float64 state vectors.
    """

    fingerprint: Any
    round_index: Any
    seed: Any
    stream: Any
    schema: Any
    history: Any

    def __repr__(self) -> str:
        """Returns a text without the seed and the history, with which noise could be removed."""
        return (
            f"{type(self).__name__}(fingerprint={self.fingerprint}, "
            f"round_index={self.round_index}, seed=<secret>, stream={self.stream}, "
            f"schema={self.schema}, history=<secret>)"
        )

    def put_into(self, state: Any) -> Any:
        """Returns a state with its noise states replaced by this one, and nothing else changed.

        Args:
          state: A state as for :func:`states_in`; this object replaces every noise state in it.
        """
        if isinstance(state, NoiseState):
            return self
        if isinstance(state, Mapping):
            items = [(name, self.put_into(each)) for name, each in state.items()]
            is_ordered = isinstance(state, collections.OrderedDict)
            return collections.OrderedDict(items) if is_ordered else dict(items)
        if isinstance(state, (tuple, list)):
            parts = [self.put_into(each) for each in state]
            return type(state)(*parts) if hasattr(state, "_fields") else type(state)(parts)
        return state


def states_in(state: Any) -> list[NoiseState]:
    """Returns all noise states in the state of a learning or aggregation process.

    Use it when you ask which round a saved state is in.

    Args:
      state: The state of a learning or aggregation process: a structure of named tuples,
        mappings, tuples and lists, with values of NumPy or Python, which may hold aggregators
        of this library.

    Returns:
      That of each aggregator, in the order of the structure.

    Example:
      >>> import numpy as np
      >>> import tensorflow_federated as tff
      >>> import mf_aggregators as mfa
      >>> from mf_aggregators.tff import processes
      >>> once = mfa.participation.SingleParticipation()
      >>> mechanism = mfa.Mechanism(mfa.factorizations.identity(1), once, 1.0)
      >>> aggregator = mfa.mf_dp_aggregator(mechanism, clip_norm=1.0, clients_per_round=2)
      >>> process = aggregator.create(tff.TensorType(np.float32, [3]))
      >>> [int(each.round_index) for each in processes.states_in(process.initialize())]
      [0]
    """
    if isinstance(state, NoiseState):
        return [state]
    if not isinstance(state, (Mapping, tuple, list)):
        return []
    parts = state.values() if isinstance(state, Mapping) else state
    return [found for each in parts for found in states_in(each)]


def participations_in(state: Any) -> tuple[Participation, ...]:
    """Returns the participation schema of each noise state in a process's state.

    Use it when you compare a saved state with a plan.

    Args:
      state: As for :func:`states_in`.

    Example:
      >>> import numpy as np
      >>> import tensorflow_federated as tff
      >>> import mf_aggregators as mfa
      >>> from mf_aggregators.tff import processes
      >>> once = mfa.participation.SingleParticipation()
      >>> mechanism = mfa.Mechanism(mfa.factorizations.identity(1), once, 1.0)
      >>> aggregator = mfa.mf_dp_aggregator(mechanism, clip_norm=1.0, clients_per_round=2)
      >>> process = aggregator.create(tff.TensorType(np.float32, [3]))
      >>> print(*processes.participations_in(process.initialize()))
      at most one participation
    """
    return tuple(_schema(*map(int, each.schema)) for each in states_in(state))


def _schema(kind: int, separation: int, most: int) -> Participation:
    if SCHEMA_KINDS[kind - 1] == SingleParticipation.name:
        return SingleParticipation()
    if SCHEMA_KINDS[kind - 1] == FixedEpochOrder.name:
        return FixedEpochOrder(most, separation)
    return MinSeparation(separation, most or None)
