"""Rounds of a federated process whose clients are divided among several places.

A round of a ``tff.learning`` process has three parts. What clients are told (the model, the
clip norm) is taken from the server's state; each client computes its update, and updates are
summed; and from the sum the server makes its next state, which is where noise is added. Here
the first and the last are run in one context, that of this machine, and once; only the middle
one is run in other places, each of which has some of the clients. So a round has one row of
noise however many places there are, the files of the noise stay on this machine, and the
server's state, with the seed of the noise, is never sent to another one.

The sums of the places are added up in the order of the clients, not in that in which they
arrive: the same round gives the same sum again. It differs from the sum of all clients in one
place by the rounding of floating-point sums that are added in another order, and by that alone.
"""

import collections
import concurrent.futures
import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import tensorflow as tf
import tensorflow_federated as tff

from mf_aggregators.tff import compatibility


class Place(Protocol):
    """Where the clients' part of a round can be run."""

    def run(self, computation: Any, arguments: Sequence[Any], abandoned: threading.Event) -> Any:
        """Returns the result of a computation.

        Args:
          computation: The ``tff.Computation``.
          arguments: Its arguments.
          abandoned: If it is set meanwhile, the result is not wanted any more, and the call
            should end soon, by any error.
        """


class DividedContext(compatibility.SyncContext):
    """A TFF context that divides the clients of a round among places.

    Computations from (state at the server, a value for each client) to (state, output) at
    the server are divided: ``next`` of ``tff.learning`` processes. All others are run on this
    machine.
    """

    def __init__(self, local: Any, places: Sequence[Place]) -> None:
        """Creates the context.

        Args:
          local: The ``tff.framework.SyncContext`` of this machine.
          places: Where clients go, at least one. Each has the same number of them, give or
            take one, in the clients' order; with fewer clients than places, the last places
            have none and are not asked.
        """
        self.local = local
        self._places = tuple(places)
        self._rounds: dict[int, _DividedRound] = {}

    def invoke(self, comp: Any, arg: Any) -> Any:
        """Runs a computation; see the base class.

        Raises:
          ValueError: If a round cannot be divided.
        """
        if not _is_round(comp.type_signature):
            return self.local.invoke(comp, arg)
        # The computation is kept with its parts, so that its identity is not given to another.
        divided = self._rounds.setdefault(id(comp), _DividedRound(comp))
        state, clients = arg
        told = self._run_here(divided.prepare, state)
        sums = self._sums(divided.clients_part, told, list(clients))
        return self._run_here(divided.server_part(len(sums)), state, sums)

    def _run_here(self, computation: Any, *arguments: Any) -> Any:
        with compatibility.get_context_stack().install(self.local):
            return computation(*arguments)

    def _sums(self, computation: Any, told: Any, clients: list[Any]) -> list[Any]:
        """The sums over each place's clients, in the order of the places."""
        shares = _shares(clients, len(self._places))
        abandoned = threading.Event()
        with concurrent.futures.ThreadPoolExecutor(len(shares)) as threads:
            running = [
                threads.submit(place.run, computation, (told, share), abandoned)
                for place, share in zip(self._places, shares, strict=False)
            ]
            try:
                # The first error of all, not that of the first place.
                for done in concurrent.futures.as_completed(running):
                    done.result()
            except BaseException:
                abandoned.set()
                raise
            return [future.result() for future in running]


class _DividedRound:
    """The three parts of a round, made when they are first needed."""

    def __init__(self, computation: Any) -> None:
        self.computation = computation
        self._parts: _Parts | None = None
        self._server_parts: dict[int, Any] = {}

    @property
    def prepare(self) -> Any:
        """From the state to what clients are told."""
        return self._made().prepare

    @property
    def clients_part(self) -> Any:
        """From what clients are told, and their data, to the sum of their updates."""
        return self._made().clients_part

    def server_part(self, num_sums: int) -> Any:
        """From the state and a number of sums to what the whole computation returns."""
        if num_sums not in self._server_parts:
            self._server_parts[num_sums] = self._made().server_part(num_sums)
        return self._server_parts[num_sums]

    def _made(self) -> "_Parts":
        if self._parts is None:
            self._parts = _divide(self.computation)
        return self._parts


@dataclasses.dataclass(frozen=True)
class _Parts:
    prepare: Any
    clients_part: Any
    server_part: Callable[[int], Any]


def _is_round(signature: Any) -> bool:
    parameter, result = signature.parameter, signature.result
    return (
        _is_pair(parameter)
        and _is_pair(result)
        and _is_placed(parameter[0], compatibility.SERVER)
        and _is_placed(parameter[1], compatibility.CLIENTS)
        and not parameter[1].all_equal
        and all(_is_placed(part, compatibility.SERVER) for part in result)
    )


def _is_pair(kind: Any) -> bool:
    return isinstance(kind, compatibility.StructType) and len(kind) == 2


def _is_placed(kind: Any, placement: Any) -> bool:
    return isinstance(kind, compatibility.FederatedType) and kind.placement is placement


def _shares(clients: list[Any], most: int) -> list[list[Any]]:
    """Divides clients in their order into at most so many shares, none of which is empty.

    Without clients there is one share, which is empty: its sum is zero.
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
    names = compatibility.structure.name_list_with_nones(computation.type_signature.result)
    sum_type = form.merge.type_signature.result

    @compatibility.federated_computation(
        compatibility.FederatedType(form.prepare.type_signature.result, compatibility.SERVER),
        clients_type,
    )
    def clients_part(told: Any, clients: Any) -> Any:
        updates = compatibility.federated_map(
            form.work,
            compatibility.federated_zip((clients, compatibility.federated_broadcast(told))),
        )
        return compatibility.federated_aggregate(
            updates[0], form.zero(), form.accumulate, form.merge, _identity(sum_type)
        )

    def server_part(num_sums: int) -> Any:
        @compatibility.federated_computation(
            state_type, [compatibility.FederatedType(sum_type, compatibility.SERVER)] * num_sums
        )
        def whole(state: Any, sums: Any) -> Any:
            total = sums[0]
            for further in range(1, num_sums):
                total = compatibility.federated_map(form.merge, (total, sums[further]))
            # The other three are what was summed securely: nothing.
            nothing = compatibility.federated_value((), compatibility.SERVER)
            aggregates = (
                compatibility.federated_map(form.report, total),
                nothing,
                nothing,
                nothing,
            )
            after = compatibility.federated_map(
                form.update, compatibility.federated_zip((state, aggregates))
            )
            return (
                collections.OrderedDict(zip(names, (after[0], after[1]), strict=True))
                if all(names)
                else (after[0], after[1])
            )

        # The type names the result's containers, which the parts have lost.
        signature = compatibility.FunctionType(
            whole.type_signature.parameter, computation.type_signature.result
        )
        return compatibility.ConcreteComputation.with_type(whole, signature)

    return _Parts(form.prepare, clients_part, server_part)


def _identity(kind: Any) -> Any:
    return tff.tensorflow.computation(lambda value: value, kind)


def _graphs_as_they_are() -> Any:
    """No rewriting of graphs before they are sent: each is as in a round that is not divided."""
    config = tf.compat.v1.ConfigProto()
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    return config
