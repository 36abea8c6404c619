"""Lists every sum over clients in a computation of TensorFlow Federated.

An aggregator makes one sum private and knows nothing of others. A learning process may have
several: metrics of training, and for Mime Lite a second one that is as large as the model. This
module lists them all, from the computation itself, and refuses a process that releases another
sum of the shape of the private one without noise.

It also refuses a process in which the private sum, or what is made of it, follows from another sum,
in the same round or a later one. With a norm that adapts around the aggregator, a client moves the
updates of others by more than its clip norm. A mean of the aggregator's mean is refused likewise.

The first call of a process makes both checks. They are a guard against mistakes, and no proof: a
computation could tell of its clients in a sum of any shape. They recognise a sum of this library by
the names of what is summed.

Every call passes through here, so that this module also decides how a large state travels to TFF's
worker (:func:`checked_argument`).
"""

import collections
import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping
from typing import Any

import tensorflow as tf
import tensorflow_federated as tff

from mf_aggregators.aggregator import is_plain
from mf_aggregators.kernel.numbers import Error
from mf_aggregators.tff import processes

# The names of TFF's operations that aggregate values of clients at the server, or select values for
# clients.
_OPERATION = re.compile(r"federated_(aggregate|max|mean|min|secure_\w+|select|sum|weighted_mean)")
_SELECTION = re.compile(r"federated_(secure_)?select")
# The names of TFF's operations that apply a function to a value.
_MAP = re.compile(r"federated_(apply|map|map_all_equal)|sequence_map")
# The names in the records that clients of dp_query.MatrixFactorizationSumQuery send.
_OF_THIS_LIBRARY = ("steps", "num_records", "least_steps")
# The name of the attribute that marks a computation as checked.
_IS_CHECKED = "_is_checked_by_mf_aggregators"
# The largest size in bytes of a piece of a state: memory of this size is used again, not requested
# page by page.
_BYTES_OF_PIECE = 2**22


class UnnoisedSumError(Error, ValueError):
    """Raised if a process releases a sum over clients without the noise that it needs."""


@dataclasses.dataclass(frozen=True)
class _ClientTensor:
    """A tensor of which each client contributes a value to a sum over clients.

    Attributes:
      name: The names on the way to the tensor in its structure, joined by slashes; numbers where
        there is no name.
      shape: The shape of the tensor; None if it is not known. A dimension that is not known is 0.
    """

    name: str
    shape: tuple[int, ...] | None


@dataclasses.dataclass(frozen=True)
class _ClientSum:
    """A sum, or another aggregate, over the values of clients in a computation of TFF.

    Attributes:
      operation: TFF's name of the operation, such as ``federated_sum``.
      tensors: The tensors that each client contributes.
      is_noised: Whether an aggregator of this library adds noise to the sum (no noise, if its noise
        multiplier is zero).
    """

    operation: str
    tensors: tuple[_ClientTensor, ...]
    is_noised: bool

    def __str__(self) -> str:
        """Returns one line of text that describes the sum."""
        names = ", ".join(
            f"{each.name or 'a value'} {list(each.shape) if each.shape is not None else '[?]'}"
            for each in self.tensors
        )
        return f"{self.operation} of {names}{', with noise on steps' if self.is_noised else ''}"


def of(computation: Any) -> tuple[_ClientSum, ...]:
    """Returns all sums and other aggregates over clients in a computation of TFF.

    Use it when you ask what a process of TensorFlow Federated sums over clients.

    Args:
      computation: A computation of TFF, such as the ``next`` of a learning process or of an
        aggregation process.

    Returns:
      The sums, in the order in which they stand in the computation.

    Example:
      >>> import numpy as np
      >>> import tensorflow_federated as tff
      >>> from mf_aggregators.tff import client_sums
      >>> @tff.federated_computation(tff.FederatedType(np.float32, tff.CLIENTS))
      ... def add_up(values):
      ...     return tff.federated_sum(values)
      >>> print(*client_sums.of(add_up))
      federated_sum of a value []
    """
    return tuple(
        _client_sum(each)
        for each in _intrinsics(tff.framework.ConcreteComputation.get_proto(computation))
        if _OPERATION.fullmatch(each.intrinsic.uri)
    )


def check(computation: Any, *, needs_noise: bool = True) -> None:
    """Checks that a process adds noise to its updates in every sum that it releases.

    Use it when other code has built a process, before the process trains.

    Args:
      computation: The ``next`` of a process.
      needs_noise: Whether a process is refused if none of its sums has noise.

    Raises:
      UnnoisedSumError: If a sum without noise has the shapes of a sum with noise; or if a sum with
        noise, or the result of an aggregation, follows from a sum without noise in some round; or
        if noise is needed and there is none. The message names the sum and says what to do.

    Example:
      >>> import numpy as np
      >>> import tensorflow_federated as tff
      >>> from mf_aggregators.tff import client_sums
      >>> @tff.federated_computation(tff.FederatedType(np.float32, tff.CLIENTS))
      ... def add_up(values):
      ...     return tff.federated_sum(values)
      >>> try:
      ...     client_sums.check(add_up)
      ... except client_sums.UnnoisedSumError as error:
      ...     print(str(error).partition(".")[0])
      no sum over clients has noise of this library
    """
    sums = of(computation)
    if not any(each.is_noised for each in sums):
        if needs_noise:
            listed = "; ".join(map(str, sums)) or "none"
            raise UnnoisedSumError(
                f"no sum over clients has noise of this library. The sums are: {listed}. Pass an "
                "aggregator of mf_dp_aggregator to the builder, as model_aggregator."
            )
        return
    _check_shapes(sums)
    for each in _feeding(tff.framework.ConcreteComputation.get_proto(computation)):
        raise UnnoisedSumError(
            "the updates that the aggregator sums, or the mean that it returns, depend on another "
            f"sum over clients, without noise of this library: {each}. Put no adaptive clipping "
            "around the aggregator (clip_norm=AdaptiveClip(...) adapts inside the guarantee), and "
            "no mean factory: the aggregator is a mean already, and noise would be divided twice. "
            "For builders of weighted processes there is "
            "tff.aggregators.as_weighted_aggregator(aggregator)."
        )


def checked_argument(computation: Any, argument: Any, *, takes_pieces: bool) -> Any:
    """Checks the argument of a round, and returns it with its large states in pieces.

    The other sums of a process are checked once. The updates must have the names of their type, in
    their order: TFF itself takes the parts of a value by their positions. It drops the mask of an
    array.

    A state with a large history of noise goes to the worker in pieces. TFF would pass it as one
    message, for which it copies the history several times for each level that it is nested in.

    Args:
      computation: The computation that is called, of any process.
      argument: The argument of the call: a structure of TFF.
      takes_pieces: Whether the context is one of TFF's executors, which take a state in pieces.

    Returns:
      The argument, with large states as ``tff.framework.Ingestable``.

    Raises:
      TypeError: If such an update has an array that is sparse, masked or no array of numbers.
      UnnoisedSumError: As :func:`check` does, if a state goes in and out first.
      ValueError: If a client's update of an aggregator of this library has other names.
    """
    structure = tff.structure
    if not isinstance(argument, structure.Struct):
        return argument
    parameter, result = computation.type_signature.parameter, computation.type_signature.result
    if not _holds_noise_state(parameter):
        return argument
    if not getattr(computation, _IS_CHECKED, False):
        if all(map(_begins_with_noise_state, (parameter, result))):
            check(computation, needs_noise=False)
        setattr(computation, _IS_CHECKED, True)
    passed = []
    for number, (name, kind) in enumerate(structure.iter_elements(parameter)):
        value, placement = argument[number], getattr(kind, "placement", None)
        if placement is tff.CLIENTS:
            for each in value if isinstance(value, list) else ():
                _check_value(kind.member, each, name or "")
        elif takes_pieces and placement is tff.SERVER and _has_large_noise_state(value):
            value = _StateInPieces(value, kind)
        passed.append(value)
    return structure.Struct(zip(structure.name_list_with_nones(argument), passed, strict=True))


def _has_large_noise_state(state: Any) -> bool:
    return any(
        getattr(array, "nbytes", 0) > _BYTES_OF_PIECE
        for noise in processes.states_in(state)
        for array in noise.history
    )


class _StateInPieces(tff.framework.Ingestable):
    """A state of the server that is passed to TFF's worker tensor by tensor, in pieces."""

    def __init__(self, state: Any, kind: tff.FederatedType) -> None:
        self._state, self._kind = state, kind

    @property
    def type_signature(self) -> tff.FederatedType:
        """The TFF type of the state, placed at the server."""
        return self._kind

    async def ingest(self, executor: Any) -> Any:
        """Passes the state to an executor of TFF, and returns the executor's value."""
        whole = await self._value(executor, self._state, self._kind.member)
        return await _called(executor, _placing(self._kind.member), whole)

    async def _value(self, executor: Any, value: Any, kind: Any) -> Any:
        if not isinstance(kind, tff.StructType):
            array = value.numpy() if tf.is_tensor(value) else value
            if getattr(array, "nbytes", 0) <= _BYTES_OF_PIECE:
                return await executor.create_value(array, kind)
            rows = max(1, _BYTES_OF_PIECE // array[:1].nbytes)
            pieces = [array[first : first + rows] for first in range(0, len(array), rows)]
            kinds = [tff.TensorType(kind.dtype, piece.shape) for piece in pieces]
            values = [
                await executor.create_value(*each) for each in zip(pieces, kinds, strict=True)
            ]
            return await _called(
                executor, _joining(tff.StructType(kinds)), await executor.create_struct(values)
            )
        parts = tff.structure.from_container(value)
        elements = [
            (name, await self._value(executor, part, part_kind))
            for (name, part_kind), part in zip(
                tff.structure.iter_elements(kind), parts, strict=True
            )
        ]
        return await executor.create_struct(tff.structure.Struct(elements))


async def _called(executor: Any, computation: Any, argument: Any) -> Any:
    function = await executor.create_value(computation, computation.type_signature)
    return await executor.create_call(function, argument)


@functools.cache
def _placing(kind: Any) -> Any:
    """Returns the TFF computation that places a value of a type at the server."""
    return tff.federated_computation(lambda value: tff.federated_value(value, tff.SERVER), kind)


@functools.cache
def _joining(kind: Any) -> Any:
    """Returns the TFF computation that joins pieces of a tensor along their first axis."""
    return tff.tensorflow.computation(lambda pieces: tf.concat(list(pieces), axis=0), kind)


def _check_value(kind: Any, value: Any, path: str) -> None:
    structure = tff.structure
    if isinstance(kind, tff.TensorType) and hasattr(value, "dtype") and not is_plain(value):
        raise TypeError(
            f"{path} of a client is a {type(value).__name__}: convert it to a dense array of "
            "numbers."
        )
    if not isinstance(kind, tff.StructType) or isinstance(value, structure.Struct):
        return
    names = [name for name, _ in structure.iter_elements(kind)]
    found: list[object] = [None] * len(value) if isinstance(value, (list, tuple)) else names
    if isinstance(value, Mapping):
        found = list(value)
    elif hasattr(value, "_fields"):
        found = list(value._fields)
    if found != names:
        raise ValueError(
            f"{path} of a client has the names {found}, and its type has {names}: give every "
            "update the names of the type, in their order, as TFF matches them by position."
        )
    parts = value.values() if isinstance(value, Mapping) else value
    if isinstance(value, (Mapping, list, tuple)):
        for (name, part_kind), part in zip(structure.iter_elements(kind), parts, strict=True):
            _check_value(part_kind, part, f"{path}.{name}" if name else path)


def _holds_noise_state(kind: Any) -> bool:
    if isinstance(kind, tff.FederatedType):
        kind = kind.member
    if not isinstance(kind, tff.StructType):
        return False
    if getattr(getattr(kind, "python_container", None), "__name__", "") == "NoiseState":
        return True
    elements = tff.structure.iter_elements(kind)
    return any(_holds_noise_state(each) for _, each in elements)


def _begins_with_noise_state(kind: Any) -> bool:
    is_struct = isinstance(kind, tff.StructType) and len(kind) > 0
    return is_struct and _holds_noise_state(kind[0])


def _check_shapes(sums: tuple[_ClientSum, ...]) -> None:
    """Raises UnnoisedSumError if a sum without noise has the shapes of a sum with noise."""
    private = [_shapes(each) for each in sums if each.is_noised]
    for each in sums:
        shapes = _shapes(each)
        if not each.is_noised and any(update and update <= shapes for update in private):
            raise UnnoisedSumError(
                f"the process releases a second sum of the shape of its updates, without noise: "
                f"{each}. Give its aggregator noise as well (for Mime Lite, the argument "
                "full_gradient_aggregator), and account for both together."
            )


def _feeding(process: Any) -> frozenset[_ClientSum]:
    """Returns the sums without noise that a noised sum, or a result, depends on."""
    kind = process.type.function
    further = [frozenset[_ClientSum]()] * (len(kind.parameter.struct.element) - 1)
    state: Any = frozenset()
    while True:
        fed: list[Any] = []
        output = _value(process, {}, fed)((state, *further))
        following = _joined(state, _element(output, 0))
        if following == state:
            break
        state = following
    for position, element in enumerate(kind.result.struct.element):
        if element.name == "result":
            fed.append(_element(output, position))
    return _sums_of(tuple(fed))


def _value(node: Any, named: dict[str, Any], fed: list[Any]) -> Any:
    """Returns the sums without noise that a part of a TFF computation depends on.

    Args:
      node: The protocol buffer of the part.
      named: The values of the names in its scope.
      fed: A list, to which the values that sums with noise depend on are appended.

    Returns:
      A frozenset of _ClientSum; a tuple of values, for a structure; or a function of a value.
    """
    kind = node.WhichOneof("computation")
    content = getattr(node, kind)
    if kind == "reference":
        return named[content.name]
    if kind == "selection":
        return _element(_value(content.source, named, fed), content.index)
    if kind == "struct":
        return tuple(_value(each.value, named, fed) for each in content.element)
    if kind == "block":
        for local in content.local:
            named = {**named, local.name: _value(local.value, named, fed)}
        return _value(content.result, named, fed)
    if kind == "lambda":
        name = content.parameter_name
        return lambda value: _value(content.result, {**named, name: value}, fed)
    if kind == "call":
        argument = content.HasField("argument")
        return _value(content.function, named, fed)(
            _value(content.argument, named, fed) if argument else ()
        )
    if kind == "intrinsic":
        return functools.partial(_applied, node, fed=fed)
    # Any result of a graph of TensorFlow may depend on all of its arguments.
    return _sums_of if node.type.HasField("function") else frozenset()


def _applied(intrinsic: Any, argument: Any, fed: list[Any]) -> Any:
    """Returns the sums that the result of one of TFF's own operations depends on."""
    uri = intrinsic.intrinsic.uri
    if _OPERATION.fullmatch(uri) and not _SELECTION.fullmatch(uri):
        found = _client_sum(intrinsic)
        if not found.is_noised:
            return frozenset([found])
        fed.append(argument)
        return frozenset()
    if _MAP.fullmatch(uri):
        function, value = argument
        return function(value)
    if uri.startswith("federated_eval_at_"):
        return argument(())
    is_same = uri.startswith(("federated_broadcast", "federated_value_at_", "federated_zip_at_"))
    return argument if is_same else _sums_of(argument)


def _element(value: Any, position: int) -> Any:
    return value[position] if isinstance(value, tuple) else value


def _joined(one: Any, other: Any) -> Any:
    """Returns a value that depends on everything that two values of one type depend on."""
    for structure in (one, other):
        if isinstance(structure, tuple):
            return tuple(
                _joined(_element(one, position), _element(other, position))
                for position in range(len(structure))
            )
    return one | other


def _sums_of(value: Any) -> frozenset[_ClientSum]:
    """Returns all sums over clients that any part of a value depends on."""
    if isinstance(value, tuple):
        return frozenset[_ClientSum]().union(*map(_sums_of, value))
    return value if isinstance(value, frozenset) else frozenset()


def _shapes(client_sum: _ClientSum) -> collections.Counter[tuple[int, ...]]:
    """Counts the shapes of a sum's tensors, scalars left out."""
    return collections.Counter(each.shape for each in client_sum.tensors if each.shape)


def _intrinsics(message: Any) -> Iterator[Any]:
    """Yields all uses of TFF's own operations in the protocol buffer of a computation."""
    for field, value in message.ListFields():
        if field.type != field.TYPE_MESSAGE:
            continue
        for each in value if field.label == field.LABEL_REPEATED else [value]:
            if each.DESCRIPTOR.name == "Type":
                continue
            if each.DESCRIPTOR.name == "Computation" and each.HasField("intrinsic"):
                yield each
            yield from _intrinsics(each)


def _client_sum(intrinsic: Any) -> _ClientSum:
    parameter = intrinsic.type.function.parameter
    if parameter.WhichOneof("type") == "struct":
        # The first argument is the clients' value; others, such as a bound or an initial value,
        # come from the server.
        parameter = parameter.struct.element[0].value
    member = parameter.federated.member
    return _ClientSum(
        operation=intrinsic.intrinsic.uri,
        tensors=tuple(_tensors(member, ())),
        is_noised=_is_noised(member),
    )


def _is_noised(kind: Any) -> bool:
    """Whether a type is that of this library's clipped records, or consists of such types."""
    elements = kind.struct.element
    return tuple(each.name for each in elements) == _OF_THIS_LIBRARY or (
        len(elements) > 0 and all(_is_noised(each.value) for each in elements)
    )


def _tensors(kind: Any, names: tuple[str, ...]) -> Iterator[_ClientTensor]:
    if kind.WhichOneof("type") == "struct":
        for position, element in enumerate(kind.struct.element):
            yield from _tensors(element.value, (*names, element.name or str(position)))
        return
    shape = None
    if kind.WhichOneof("type") == "tensor" and not kind.tensor.unknown_rank:
        shape = tuple(max(0, int(size)) for size in kind.tensor.dims)
    yield _ClientTensor("/".join(names), shape)
