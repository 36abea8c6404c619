"""What leaves the clients in a computation of TensorFlow Federated: every sum over clients.

An aggregator makes one sum private and knows nothing of others. A learning process may have
several: metrics of training, and for Mime Lite a second one that is as large as the model. This
module lists them all, from the computation itself, and refuses a process that releases another
sum of the shape of the private one without noise.

It also refuses a mean of the aggregator's mean.

It is a guard against mistakes, and no proof: a computation could tell of its clients in a sum
of any shape. It recognises a sum of this library by the names of what is summed.
"""

import collections
import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from mf_aggregators.errors import Error
from mf_aggregators.tff import compatibility

# What TFF calls operations from values of clients to a value of the server.
_OPERATIONS = frozenset(
    {
        "federated_aggregate",
        "federated_max",
        "federated_mean",
        "federated_min",
        "federated_secure_modular_sum",
        "federated_secure_select",
        "federated_secure_sum",
        "federated_secure_sum_bitwidth",
        "federated_select",
        "federated_sum",
        "federated_weighted_mean",
    }
)
# What a client of dp_query.MatrixFactorizationSumQuery sends.
_OF_THIS_LIBRARY = ("steps", "num_records", "least_steps")
# What TFF's mean factories and the aggregator call their measurements.
_OF_MEANS = ({"mean_value", "mean_count"}, {"mean_value", "mean_weight"})
_DIVISOR = "clients_per_round"


class UnnoisedSumError(Error, ValueError):
    """A process releases a sum without noise that should have some."""


@dataclasses.dataclass(frozen=True)
class ClientTensor:
    """A tensor that every client contributes to a sum.

    Attributes:
      name: Its names in the structure, joined by slashes; numbers where there is no name.
      shape: Its shape; None where it is not known. A dimension that is not known is 0.
    """

    name: str
    shape: tuple[int, ...] | None


@dataclasses.dataclass(frozen=True)
class ClientSum:
    """A sum, or another aggregate, over the values of clients.

    Attributes:
      operation: TFF's name of it, such as ``federated_sum``.
      tensors: What each client contributes.
      is_noised: Whether an aggregator of this library adds noise to it (none, if its noise
        multiplier is zero).
    """

    operation: str
    tensors: tuple[ClientTensor, ...]
    is_noised: bool

    def __str__(self) -> str:
        """Returns one line for a reader."""
        names = ", ".join(
            f"{each.name or 'a value'} {list(each.shape) if each.shape is not None else '[?]'}"
            for each in self.tensors
        )
        return f"{self.operation} of {names}{', with noise' if self.is_noised else ''}"

    @property
    def num_numbers(self) -> int:
        """How many numbers each client contributes, as far as shapes are known."""
        return sum(math.prod(each.shape or ()) for each in self.tensors)


def of(computation: Any) -> tuple[ClientSum, ...]:
    """Returns all sums over clients in a computation.

    Args:
      computation: A computation of TFF, such as the ``next`` of a learning process or of an
        aggregation process.

    Returns:
      The sums, in the order in which they stand there.
    """
    return tuple(
        _client_sum(each)
        for each in _intrinsics(compatibility.ConcreteComputation.get_proto(computation))
        if each.intrinsic.uri in _OPERATIONS
    )


def check(computation: Any) -> None:
    """Checks that a process adds noise to its updates, wherever it releases them.

    Args:
      computation: The ``next`` of a process.

    Raises:
      UnnoisedSumError: If no sum has noise of this library, or another sum has a tensor of each
        shape of a sum that has; the message names it and says what to do: a ValueError.
      ValueError: If a mean factory of TFF is around the aggregator.
    """
    sums = of(computation)
    noised = [each for each in sums if each.is_noised]
    if not noised:
        listed = "; ".join(map(str, sums)) or "none at all"
        raise UnnoisedSumError(
            f"no sum over clients has noise of this library. The sums are: {listed}. Pass an "
            "aggregator of mf_dp_aggregator to the builder, as model_aggregator."
        )
    check_others(sums)
    check_divided_once(computation)


def check_divided_once(computation: Any) -> None:
    """Checks that no mean factory of TFF divides the mean of the aggregator once more.

    Nothing tells an aggregator what is around it, so that this looks at the whole process: at the
    names of what it measures.

    Args:
      computation: The ``next`` of a process.

    Raises:
      ValueError: If one does; the message says what to pass in its place.
    """
    if _has_mean_of_mean(
        compatibility.ConcreteComputation.get_proto(computation).type.function.result
    ):
        raise ValueError(
            "a mean factory of TFF (UnweightedMeanFactory or MeanFactory) is around the "
            "aggregator, which is a mean already: updates and noise would be divided by the "
            "clients twice. Pass the aggregator itself or, for builders of weighted processes, "
            "tff.aggregators.as_weighted_aggregator(aggregator)."
        )


def check_others(sums: tuple[ClientSum, ...]) -> None:
    """Checks that no sum without noise has the shapes of a sum with noise.

    Args:
      sums: What :func:`of` returned.

    Raises:
      UnnoisedSumError: If one has.
    """
    private = [_shapes(each) for each in sums if each.is_noised]
    for each in sums:
        shapes = _shapes(each)
        if not each.is_noised and any(update and update <= shapes for update in private):
            raise UnnoisedSumError(
                f"the process releases a second sum of the shape of its updates, without noise: "
                f"{each}. Give its aggregator noise as well (for Mime Lite, the argument "
                "full_gradient_aggregator), and account for both together."
            )


def _has_mean_of_mean(kind: Any) -> bool:
    """Whether the measurements of a mean are in a type, and those of the aggregator below them."""
    elements = _elements(kind)
    if {name for name, _ in elements} in _OF_MEANS and _names_a_divisor(elements[0][1]):
        return True
    return any(_has_mean_of_mean(each) for _, each in elements)


def _names_a_divisor(kind: Any) -> bool:
    return any(name == _DIVISOR or _names_a_divisor(each) for name, each in _elements(kind))


def _elements(kind: Any) -> list[tuple[str, Any]]:
    """The named elements of the protocol buffer of a type, wherever it is placed."""
    if kind.WhichOneof("type") == "federated":
        kind = kind.federated.member
    return [(element.name, element.value) for element in kind.struct.element]


def _shapes(client_sum: ClientSum) -> collections.Counter[tuple[int, ...]]:
    """The shapes that are more than a number, and how often each is there."""
    return collections.Counter(each.shape for each in client_sum.tensors if each.shape)


def _intrinsics(message: Any) -> Iterator[Any]:
    """All uses of TFF's own operations, in a protocol buffer of a computation."""
    for field, value in message.ListFields():
        if field.type != field.TYPE_MESSAGE:
            continue
        for each in value if field.label == field.LABEL_REPEATED else [value]:
            if each.DESCRIPTOR.name == "Type":
                continue
            if each.DESCRIPTOR.name == "Computation" and each.HasField("intrinsic"):
                yield each
            yield from _intrinsics(each)


def _client_sum(intrinsic: Any) -> ClientSum:
    parameter = intrinsic.type.function.parameter
    if parameter.WhichOneof("type") == "struct":
        # Further arguments, such as a bound or what to begin with, come from the server.
        parameter = parameter.struct.element[0].value
    member = parameter.federated.member
    names = tuple(each.name for each in member.struct.element)
    return ClientSum(
        operation=intrinsic.intrinsic.uri,
        tensors=tuple(_tensors(member, ())),
        is_noised=names == _OF_THIS_LIBRARY,
    )


def _tensors(kind: Any, names: tuple[str, ...]) -> Iterator[ClientTensor]:
    if kind.WhichOneof("type") == "struct":
        for position, element in enumerate(kind.struct.element):
            yield from _tensors(element.value, (*names, element.name or str(position)))
        return
    shape = None
    if kind.WhichOneof("type") == "tensor" and not kind.tensor.unknown_rank:
        shape = tuple(max(0, int(size)) for size in kind.tensor.dims)
    yield ClientTensor("/".join(names), shape)
