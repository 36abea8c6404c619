"""Everything that leaves the clients is listed, and a second update without noise is refused."""

import collections
import os
import warnings
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import tensorflow_federated as tff

import mf_aggregators as mfa
from mf_aggregators.noise import FixedSeedWarning
from mf_aggregators.tff import client_sums, compatibility
from mf_aggregators.tff.client_sums import ClientSum, ClientTensor, UnnoisedSumError
from tests.refusals import refuses

_UPDATE = compatibility.to_type(
    collections.OrderedDict(
        kernel=compatibility.TensorType(np.float32, [3, 2]),
        bias=compatibility.TensorType(np.float32, [2]),
        scale=compatibility.TensorType(np.float32),
    )
)


def _aggregator(**changes: Any) -> Any:
    return mfa.mf_dp_aggregator(
        mfa.factorizations.identity(4),
        participation=mfa.participation.MinSeparation(2),
        noise_multiplier=1.0,
        clip_norm=1.0,
        clients_per_round=2,
        seed=1,
        **changes,
    )


def _process(factory: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FixedSeedWarning)
        return factory.create(_UPDATE)


@pytest.mark.parametrize(
    ("changes", "operations"),
    [
        ({}, ["federated_aggregate", "federated_sum"]),
        (
            {"secure_aggregation_bits": 32},
            ["federated_secure_modular_sum", "federated_secure_sum_bitwidth"],
        ),
    ],
    ids=["open", "secure"],
)
def test_an_aggregator_sums_updates_with_noise_and_counts_clients(
    changes: dict[str, Any], operations: list[str]
) -> None:
    process = _process(_aggregator(**changes))
    sums = client_sums.of(process.next)
    assert [each.operation for each in sums] == operations
    assert [each.is_noised for each in sums] == [True, False]
    assert sums[0].tensors == (
        ClientTensor("steps/kernel", (3, 2)),
        ClientTensor("steps/bias", (2,)),
        ClientTensor("steps/scale", ()),
        ClientTensor("num_records", ()),
        ClientTensor("least_steps", ()),
    )
    assert sums[0].num_numbers == 11
    assert str(sums[0]).endswith("num_records [], least_steps [], with noise")
    assert str(sums[1]) == f"{operations[1]} of a value []"
    client_sums.check(process.next)


def test_what_factories_around_it_send_is_listed_as_well() -> None:
    process = _process(tff.aggregators.zeroing_factory(1.0, _aggregator()))
    sums = client_sums.of(process.next)
    assert sum(each.is_noised for each in sums) == 1
    # How many updates were zeroed is a number of its own.
    others = [each for each in sums if not each.is_noised]
    assert len(others) >= 2
    assert all(each.num_numbers == 1 for each in others)
    client_sums.check(process.next)


@pytest.mark.short_cases(1)
@pytest.mark.parametrize(
    "around",
    [
        tff.aggregators.UnweightedMeanFactory,
        lambda sums: tff.aggregators.UnweightedMeanFactory(
            tff.aggregators.zeroing_factory(1.0, sums)
        ),
        lambda sums: tff.aggregators.zeroing_factory(
            1.0, tff.aggregators.UnweightedMeanFactory(sums)
        ),
    ],
)
def test_a_mean_of_the_mean_is_refused(around: Any) -> None:
    process = _process(around(_aggregator()))
    with refuses("twice"):
        client_sums.check(process.next)


def test_a_weighted_mean_of_the_mean_is_refused_and_equal_weights_are_not() -> None:
    weight = compatibility.TensorType(np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FixedSeedWarning)
        divided = tff.aggregators.MeanFactory(_aggregator()).create(_UPDATE, weight)
        once = tff.aggregators.as_weighted_aggregator(_aggregator()).create(_UPDATE, weight)
    with refuses("twice"):
        client_sums.check(divided.next)
    client_sums.check(once.next)


def test_a_mean_of_other_values_is_not_refused() -> None:
    client_sums.check_divided_once(_process(tff.aggregators.UnweightedMeanFactory()).next)


def test_a_process_without_noise_is_refused() -> None:
    process = _process(tff.aggregators.SumFactory())
    with refuses("federated_sum", "kernel [3, 2]", "bias [2]", error=UnnoisedSumError):
        client_sums.check(process.next)


def _with_another_sum(measured: Any) -> Any:
    """A process that adds up a function of the updates as well, without noise."""

    def measure(updates: Any) -> Any:
        return collections.OrderedDict(
            other=compatibility.federated_sum(compatibility.federated_map(measured, updates))
        )

    return tff.aggregators.add_measurements(_aggregator(), client_measurement_fn=measure)


def test_a_second_update_without_noise_is_refused_and_a_number_is_not() -> None:
    @tff.tensorflow.computation(_UPDATE)
    def same(update: Any) -> Any:
        return update

    @tff.tensorflow.computation(_UPDATE)
    def in_part(update: Any) -> Any:
        return update["bias"]

    with pytest.raises(UnnoisedSumError):
        client_sums.check(_process(_with_another_sum(same)).next)
    # Less than an update may be a metric, and is listed.
    process = _process(_with_another_sum(in_part))
    client_sums.check(process.next)
    assert any(
        each.tensors == (ClientTensor("", (2,)),) and not each.is_noised
        for each in client_sums.of(process.next)
    )


def _sum(is_noised: bool, *shapes: tuple[int, ...]) -> ClientSum:
    tensors = tuple(ClientTensor(str(i), shape) for i, shape in enumerate(shapes))
    return ClientSum("federated_sum", tensors, is_noised)


@pytest.mark.parametrize(
    ("other", "is_refused"),
    [
        (_sum(False, (3, 2), (2,)), True),
        (_sum(False, (2,), (3, 2), (7,)), True),
        (_sum(False, (3, 2)), False),
        (_sum(False, (3, 2), (3, 2)), False),
        (_sum(True, (3, 2), (2,)), False),
        (_sum(False), False),
    ],
)
def test_shapes_are_compared_with_how_often_they_are_there(
    other: ClientSum, is_refused: bool
) -> None:
    sums = (other, _sum(True, (3, 2), (2,), ()))
    if is_refused:
        with pytest.raises(UnnoisedSumError):
            client_sums.check_others(sums)
    else:
        client_sums.check_others(sums)
    # Of updates that are single numbers, nothing tells a metric from an update.
    client_sums.check_others((other, _sum(True, (), ())))
