"""Runs federated rounds in which TFF workers on other machines compute the clients' updates.

``start-tff-worker`` starts a worker; :func:`use` makes rounds use some of them. The server's
part of a round stays on this machine, with the noise and its seed. TFF itself would wait for a
lost worker for ever, trying again and again; here a worker that is killed, restarted, frozen or cut
off ends the round by :class:`WorkerLostError`, within a time that has a bound. Nothing was released
then, and nothing is lost: the state before the round is on disk, and a round that is run again
gives the same result.

A round of a ``tff.learning`` process has three parts. What clients are told (the model, the
clip norm) is taken from the server's state; each client computes its update, and updates are
summed; and from the sum the server makes its next state, which is where noise is added. Here
the first and the last are run in one context, that of this machine, and once; only the middle
one is run on other hosts, each of which has some of the clients. So a round has one row of
noise however many hosts there are, the files of the noise stay on this machine, and the
server's state, with the seed of the noise, is never sent to another one.

The sums of the hosts are added up in the order of the clients, not in that in which they
arrive: the same round gives the same sum again. It differs from the sum of all clients on one
host by the rounding of floating-point sums that are added in another order, and by that alone.
"""

import asyncio
import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import grpc  # type: ignore[import-untyped]
import tensorflow as tf
import tensorflow_federated as tff
from tensorflow_federated.proto.v0 import computation_pb2, executor_pb2, executor_pb2_grpc

from simulations.workers.worker_addresses import WorkerLostError, parse, port_of

__all__ = ["Timeouts", "WorkerLostError", "connect", "parse", "use"]

# The largest message to and from a worker: TFF's own limit, a little below that of protocol
# buffers.
_LARGEST_MESSAGE_IN_BYTES = 2 * 1000 * 1000 * 1000
_CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", _LARGEST_MESSAGE_IN_BYTES),
    ("grpc.max_send_message_length", _LARGEST_MESSAGE_IN_BYTES),
    # Clients' data go straight to the named worker, not through a proxy that the environment sets.
    ("grpc.enable_http_proxy", 0),
    # A new channel to a worker that was lost connects anew, and does not share the older channel's
    # connection.
    ("grpc.use_local_subchannel_pool", 1),
)
_Client = TypeVar("_Client")
_SECONDS_FOR_CLEANING_UP = 5.0
# How often a waiting call looks for an error or a stop elsewhere; a result ends it at once.
_SECONDS_BETWEEN_LOOKS = 0.2
# A worker's error text for an executor that it does not have: it was restarted in the meantime.
_NO_EXECUTOR = "No executor found for ID"
_GREETING = executor_pb2.GetExecutorRequest(
    cardinalities=[
        executor_pb2.Cardinality(placement=computation_pb2.Placement(uri=tff.CLIENTS.uri))
    ]
)
# A request that a worker answers at once and that has no effect, to see that it is alive.
_KEEP_ALIVE = executor_pb2.DisposeRequest(executor=executor_pb2.ExecutorId(id="nobody's"))


class DividedContext(tff.framework.SyncContext):
    """TFF context that divides the clients of a round among hosts.

    Computations from (state at the server, a value for each client) to (state, output) at
    the server are divided: ``next`` of ``tff.learning`` processes. All others are run on this
    machine.
    """

    def __init__(self, local: Any, hosts: Sequence[Any]) -> None:
        """Creates the context.

        Args:
          local: The ``tff.framework.SyncContext`` of this machine.
          hosts: Where clients go, at least one. Each has the same number of them, or one more,
            in the clients' order; with fewer clients than hosts, the last hosts are not asked.
            ``host.run(computation, arguments, abandoned)`` returns the result of a
            ``tff.Computation``; if the event ``abandoned`` is set meanwhile, the result is not
            wanted any more, and the call should end soon, by any error.
        """
        self.local = local
        self._hosts = tuple(hosts)
        # The parts of rounds by the id() of their computation. The computation is kept with them,
        # so that no other object gets the same id.
        self._rounds: dict[int, tuple[Any, _Parts]] = {}

    def invoke(self, comp: Any, arg: Any) -> Any:
        """Runs a computation; see the base class.

        Raises:
          ValueError: If a round cannot be divided.
        """
        if not _is_round(comp.type_signature):
            return self.local.invoke(comp, arg)
        if id(comp) not in self._rounds:
            self._rounds[id(comp)] = (comp, _divide(comp))
        _, parts = self._rounds[id(comp)]
        state, clients = arg
        told = self._run_here(parts.prepare, state)
        sums = self._sums(parts.clients_part, told, list(clients))
        return self._run_here(parts.server_part(len(sums)), state, sums)

    def _run_here(self, computation: Any, *arguments: Any) -> Any:
        with tff.framework.get_context_stack().install(self.local):
            return computation(*arguments)

    def _sums(self, computation: Any, told: Any, clients: list[Any]) -> list[Any]:
        """Returns the sums of updates over each host's clients, in the order of the hosts."""
        shares = _shares(clients, len(self._hosts))
        abandoned = threading.Event()
        with concurrent.futures.ThreadPoolExecutor(len(shares)) as threads:
            running = [
                threads.submit(host.run, computation, (told, share), abandoned)
                for host, share in zip(self._hosts, shares, strict=False)
            ]
            try:
                # Results are taken as they come, so that the error that happens first is raised,
                # not that of the first host.
                for done in concurrent.futures.as_completed(running):
                    done.result()
            except BaseException:
                abandoned.set()
                raise
            return [future.result() for future in running]


@dataclasses.dataclass(frozen=True)
class _Parts:
    """The three parts of a round: server's preparation, clients' work and server's update.

    Attributes:
      prepare: A computation from the server's state to the values that clients are sent.
      clients_part: A computation from these values and the clients' data to the sum of their
        updates.
      server_part: A function from a number of sums to a computation, which takes the state and so
        many sums to the result of the whole round.
    """

    prepare: Any
    clients_part: Any
    server_part: Callable[[int], Any]


def _is_round(signature: Any) -> bool:
    parameter, result = signature.parameter, signature.result
    return (
        _is_pair(parameter)
        and _is_pair(result)
        and _is_placed(parameter[0], tff.SERVER)
        and _is_placed(parameter[1], tff.CLIENTS)
        and not parameter[1].all_equal
        and all(_is_placed(part, tff.SERVER) for part in result)
    )


def _is_pair(kind: Any) -> bool:
    return isinstance(kind, tff.StructType) and len(kind) == 2


def _is_placed(kind: Any, placement: Any) -> bool:
    return isinstance(kind, tff.FederatedType) and kind.placement is placement


def _shares(clients: list[_Client], most: int) -> list[list[_Client]]:
    """Divides clients, in their order, into a number of shares or fewer; no share is empty.

    Without any clients there is one empty share, whose sum is zero.
    """
    number = max(1, min(most, len(clients)))
    ends = [len(clients) * (share + 1) // number for share in range(number)]
    return [clients[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


def _divide(computation: Any) -> _Parts:
    try:
        form = tff.backends.mapreduce.get_map_reduce_form_for_computation(
            computation, _graphs_as_they_are()
        )
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"this process cannot be run with workers, because its rounds cannot be divided among "
            f"them ({error}): run it without."
        ) from error
    if form.securely_aggregates_tensors:
        raise ValueError(
            "this process cannot be run with workers, because it aggregates securely, and secure "
            "sums cannot be divided: run it without."
        )
    state_type, clients_type = computation.type_signature.parameter
    names = tff.structure.name_list_with_nones(computation.type_signature.result)
    sum_type = form.merge.type_signature.result

    @tff.federated_computation(
        tff.FederatedType(form.prepare.type_signature.result, tff.SERVER),
        clients_type,
    )
    def clients_part(told: Any, clients: Any) -> Any:
        updates = tff.federated_map(
            form.work,
            tff.federated_zip((clients, tff.federated_broadcast(told))),
        )
        return tff.federated_aggregate(
            updates[0], form.zero(), form.accumulate, form.merge, _identity(sum_type)
        )

    @functools.cache
    def server_part(num_sums: int) -> Any:
        @tff.federated_computation(state_type, [tff.FederatedType(sum_type, tff.SERVER)] * num_sums)
        def whole(state: Any, sums: Any) -> Any:
            total = sums[0]
            for further in range(1, num_sums):
                total = tff.federated_map(form.merge, (total, sums[further]))
            # The other three results would be those of secure sums, which these rounds do not have.
            nothing = tff.federated_value((), tff.SERVER)
            aggregates = (tff.federated_map(form.report, total), nothing, nothing, nothing)
            after = tff.federated_map(form.update, tff.federated_zip((state, aggregates)))
            return (
                collections.OrderedDict(zip(names, (after[0], after[1]), strict=True))
                if all(names)
                else (after[0], after[1])
            )

        # The type is annotated with the containers of the whole round's result, which the parts do
        # not know.
        signature = tff.FunctionType(
            whole.type_signature.parameter, computation.type_signature.result
        )
        return tff.framework.ConcreteComputation.with_type(whole, signature)

    return _Parts(form.prepare, clients_part, server_part)


def _identity(kind: Any) -> Any:
    return tff.tensorflow.computation(lambda value: value, kind)


def _graphs_as_they_are() -> Any:
    """Returns a config that keeps graphs as in an undivided round: they are not optimised."""
    config = tf.compat.v1.ConfigProto()
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    return config


@dataclasses.dataclass(frozen=True)
class Timeouts:
    """Time limits for a remote worker, after which it counts as lost.

    Attributes:
      seconds_to_connect: A worker has to answer within this time at the beginning.
      seconds_between_keep_alives: During a long computation, keep-alives are this far apart.
      seconds_to_answer: A worker is lost if it does not answer a keep-alive in this time, generous
        because a machine may be busy.
    """

    seconds_to_connect: float = 20.0
    seconds_between_keep_alives: float = 10.0
    seconds_to_answer: float = 60.0


def use(addresses: Sequence[str], timeouts: Timeouts | None = None) -> DividedContext:
    """Makes all rounds from now on use remote workers: sets TFF's default context."""
    context = connect(addresses, timeouts)
    tff.framework.set_default_context(context)
    return context


def connect(addresses: Sequence[str], timeouts: Timeouts | None = None) -> DividedContext:
    """Returns a context that runs the clients' part of rounds on remote workers.

    The server's parts of rounds are run in the context that is TFF's current one when this is
    called.

    Args:
      addresses: The addresses of the workers, from :func:`parse`.
      timeouts: How long a worker may be silent.

    Returns:
      A context to be installed, or set as TFF's default; :func:`use` does the latter.

    Raises:
      ValueError: If there is no address.
      WorkerLostError: If a worker does not answer, or the address is not that of a TFF worker.
    """
    if not addresses:
        raise ValueError("give the address of at least one worker.")
    timeouts = timeouts or Timeouts()
    local = tff.framework.get_context_stack().current
    if isinstance(local, DividedContext):
        local = local.local
    workers = [_Worker(address, timeouts) for address in addresses]
    for worker in workers:
        worker.check()
    return DividedContext(local, workers)


async def _awaited(coroutine: Any) -> Any:
    return await coroutine


class _AbandonedError(Exception):
    """The result of a call to a worker is not wanted any more."""


def _forwarded(name: str) -> Callable[["_Worker", Any], Any]:
    """Returns a method of _Worker that sends its request to the remote method with this name."""

    def method(self: "_Worker", request: Any) -> Any:
        return self._call(getattr(self._calls, name), request)

    return method


class _Worker(tff.framework.RemoteExecutorStub):
    """A remote TFF worker, which computes the updates of some of the clients.

    Each call to the worker ends, with its result or with an error that says why there is none.

    Attributes:
      abandoned: Set if results are not wanted any more.
      is_lost: Whether the worker was lost since the last :meth:`run` began. No further call is made
        then, because each call would wait for an answer as long as the first one.
    """

    get_executor = _forwarded("GetExecutor")
    create_value = _forwarded("CreateValue")
    create_call = _forwarded("CreateCall")
    create_struct = _forwarded("CreateStruct")
    create_selection = _forwarded("CreateSelection")
    compute = _forwarded("Compute")

    def __init__(self, address: str, timeouts: Timeouts) -> None:
        self.abandoned = threading.Event()
        self.is_lost = False
        self._address = address
        self._timeouts = timeouts
        # The dns scheme is written out, because a host's name may be that of a gRPC scheme.
        self._channel = grpc.insecure_channel(f"dns:///{address}", _CHANNEL_OPTIONS)
        self._calls = executor_pb2_grpc.ExecutorGroupStub(self._channel)

        def executor(cardinalities: Any) -> Any:
            remote = tff.framework.RemoteExecutor(self)
            remote.set_cardinalities(cardinalities)
            return remote

        self._context = tff.framework.AsyncExecutionContext(
            executor_fn=tff.framework.ResourceManagingExecutorFactory(executor),
            compiler_fn=tff.backends.native.desugar_and_transform_to_native,
            transform_args=tff.tensorflow.transform_args,
            transform_result=tff.tensorflow.transform_result,
        )

    def run(self, computation: Any, arguments: Sequence[Any], abandoned: threading.Event) -> Any:
        """Returns the result of a computation, or raises WorkerLostError."""
        self.abandoned, self.is_lost = abandoned, False
        # Each thread has its own stack of contexts. The call is awaited in this thread, because
        # RemoteExecutor blocks the thread that it runs in, although it is asynchronous.
        with tff.framework.get_context_stack().install(self._context):
            return asyncio.run(_awaited(computation(*arguments)))

    def check(self) -> None:
        """Raises WorkerLostError unless the address answers as a TFF worker does."""
        seconds = self._timeouts.seconds_to_connect
        start = (
            f"start one there by start-tff-worker --port={port_of(self._address)}, or correct the "
            "address"
        )
        try:
            grpc.channel_ready_future(self._channel).result(timeout=seconds)
        except grpc.FutureTimeoutError:
            raise WorkerLostError(
                f"no TFF worker answers at {self._address} within {seconds:g} seconds: {start}."
            ) from None
        try:
            answer = self._calls.GetExecutor(_GREETING, timeout=seconds)
        except grpc.RpcError as error:
            raise WorkerLostError(
                f"the program at {self._address} is not a TFF worker ({_what(error)}): {start}."
            ) from error
        self.dispose_executor(executor_pb2.DisposeExecutorRequest(executor=answer.executor))

    def dispose_executor(self, request: Any) -> None:
        """Frees an executor of the worker unless it is lost; see the base class."""
        self._clean_up(self._calls.DisposeExecutor, request)

    def dispose(self, request: Any) -> None:
        """Frees values of the worker unless it is lost; see the base class."""
        self._clean_up(self._calls.Dispose, request)

    def _clean_up(self, method: Callable[..., Any], request: Any) -> None:
        # Errors are suppressed, because finalisers also call this and cannot raise.
        with contextlib.suppress(grpc.RpcError, ValueError):
            if not self.is_lost:
                method(request, timeout=_SECONDS_FOR_CLEANING_UP)

    def _call(self, method: Any, request: Any) -> Any:
        """Waits as long as the worker is alive, and returns its answer to a request."""
        if self.is_lost:
            raise self._lost()
        call = method.future(request)
        answered = threading.Event()
        call.add_done_callback(lambda _: answered.set())
        keep_alive: Any = None
        asked_at = time.monotonic()
        try:
            while not answered.wait(_SECONDS_BETWEEN_LOOKS):
                if self.abandoned.is_set():
                    raise _AbandonedError
                if keep_alive is not None and keep_alive.done():
                    self._check_answer(keep_alive)
                    keep_alive = None
                waited = time.monotonic() - asked_at
                if keep_alive is None and waited >= self._timeouts.seconds_between_keep_alives:
                    keep_alive = self._calls.Dispose.future(
                        _KEEP_ALIVE, timeout=self._timeouts.seconds_to_answer
                    )
                    asked_at = time.monotonic()
            return call.result()
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.UNAVAILABLE or _NO_EXECUTOR in _what(error):
                raise self._lost() from error
            # The gRPC error is raised unchanged, not as one of TFF's own errors, after which TFF
            # would try again for ever.
            raise
        finally:
            call.cancel()

    def _check_answer(self, keep_alive: Any) -> None:
        error = keep_alive.exception()
        # Only these two errors mean silence: with any other error the worker has answered.
        silent = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)
        if error is not None and error.code() in silent:
            raise self._lost() from error

    def _lost(self) -> WorkerLostError:
        self.is_lost = True
        return WorkerLostError(
            f"the TFF worker at {self._address} was lost during the run: start it again "
            f"(start-tff-worker --port={port_of(self._address)}) and run the same command to "
            "resume."
        )


def _what(error: Any) -> str:
    return str(error.details() or error.code())
