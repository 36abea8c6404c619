"""Sums of clients: the integers that they add, open and secure, and that no other sums are made."""

import os
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import tensorflow as tf
import tensorflow_federated as tff

import mf_aggregators as mfa
from mf_aggregators import inputs
from mf_aggregators.tff import processes
from mf_aggregators.tff.aggregator import _sum_of_records
from mf_aggregators.tff.dp_query import SampleState
from tests.mf_aggregators.tff import secure_sum_table
from tests.mf_aggregators.tff.small_aggregators import (
    make_process,
)
from tests.refusals import refuses

pytestmark = pytest.mark.begun_first

_BITS = sorted({row.bits for row in secure_sum_table.rows()})


@pytest.mark.long
@pytest.mark.usefixtures("_simulated_secure_sums")
def test_a_clip_norm_that_adapts_in_secure_sums() -> None:
    """Updates and indicators are integers of a secure sum, and no other sum of clients is made."""
    clip = mfa.AdaptiveClip(0.5, update_period=1)
    process = make_process(
        tff.TensorType(np.float32, [2]), clip_norm=clip, secure_aggregation_bits=28
    )
    tff.test.assert_not_contains_unsecure_aggregation(process.next)
    clients = [np.array([0.3, 0.0], np.float32), np.array([0.0, 3.0], np.float32)]
    output = process.next(process.initialize(), clients)
    np.testing.assert_allclose(output.result, [0.3 / 4, 0.5 / 4], rtol=1e-6)
    found = output.measurements["dp_query_metrics"]
    assert found["unclipped_fraction"] == pytest.approx(0.5)
    one = process.next(output.state, clients[:1])
    found = one.measurements["dp_query_metrics"]
    assert found["unclipped_fraction"] == pytest.approx(0.5 + 0.5 / 4)
    assert found["next_clip_norm"] == pytest.approx(0.5 * np.exp(-0.125))


@pytest.mark.long_cases(1)
@pytest.mark.long
@pytest.mark.short_cases(1)
@pytest.mark.usefixtures("_simulated_secure_sums")
@pytest.mark.parametrize(
    "bits",
    [
        bits if bits in (_BITS[0], _BITS[-1]) else pytest.param(bits, marks=pytest.mark.long)
        for bits in _BITS
    ],
)
def test_secure_sums_of_all_bits_of_the_documents_are_those_of_integers(bits: int) -> None:
    clients = min(row.clients for row in secure_sum_table.rows() if row.bits == bits)
    steps = inputs.integer_sums(bits, clients, clients).steps_per_clip_norm
    process = make_process(
        tff.TensorType(np.float64, [3]),
        factorization=mfa.factorizations.identity(1),
        clients_per_round=clients,
        secure_aggregation_bits=bits,
    )
    updates = [np.array(each) for each in ([-0.9, 0.1, 0.0], [-0.7, -0.3, 0.2], [-0.51, 0.22, 0.8])]
    output = process.next(process.initialize(), updates)
    total = [
        sum(round(entry * steps) for entry in entries) for entries in zip(*updates, strict=True)
    ]
    np.testing.assert_allclose(output.result, np.array(total) / steps / clients, rtol=1e-14)


@pytest.mark.usefixtures("_simulated_secure_sums")
def test_the_computation_of_a_secure_sum_has_no_other_sum_of_clients() -> None:
    value_type = tff.TensorType(np.float32, [2])
    secure = make_process(value_type, noise_multiplier=1.0, secure_aggregation_bits=32).next
    tff.test.assert_contains_secure_aggregation(secure)
    tff.test.assert_not_contains_unsecure_aggregation(secure)
    in_the_open = make_process(value_type, noise_multiplier=1.0).next
    with pytest.raises(AssertionError):
        tff.test.assert_not_contains_unsecure_aggregation(in_the_open)


@pytest.mark.long
@pytest.mark.usefixtures("_simulated_secure_sums")
def test_a_round_of_more_clients_than_a_secure_sum_holds_is_refused() -> None:
    process = make_process(tff.TensorType(np.float32, [3]), secure_aggregation_bits=32)
    state = process.initialize()
    updates = [np.ones(3, np.float32)] * 4
    process.next(state, updates)
    with refuses("4", "clients", error=processes.RefusalError):
        process.next(state, [*updates, updates[0]])


# Both sides of 2^31, where TFF's type of a Python integer changes, and both ends.
_SOME_BITS = [24, 31, 32, 62]


def _summed(dtype: Any, size: int, bits: int | None) -> Any:
    def zero() -> SampleState:
        return SampleState((tf.zeros([size], tf.int64),), *[tf.zeros([], tf.int64)] * 2)

    record_type = tff.types.to_type(SampleState(((dtype, [size]),), np.int64, np.int64))
    return _sum_of_records(zero, record_type, bits)


def test_sums_are_those_of_integers_without_a_bound() -> None:
    summed = _summed(np.int32, 2, None)
    generator = np.random.default_rng(0)
    for count in (0, 1, 9):
        vectors = generator.integers(2**30, 2**31 - 1, (count, 2), dtype=np.int32)
        found = summed([SampleState((vector,), np.int64(1), np.int64(-2)) for vector in vectors])
        assert found.steps[0].dtype == np.int64
        assert found.steps[0].tolist() == [sum(map(int, column)) for column in vectors.T]
        assert (found.num_records, found.least_steps) == (count, -2 * count)


def _check(bits: int) -> None:
    """The largest sums of both signs, of few clients and of many, and the sum of none."""
    most = (1 << (bits - 1)) - 1
    summed = _summed(np.int64, 3, bits)
    for clients in (
        [[most, -most, 0]],
        [[most // 5, -(most // 5), -1]] * 5,
        # In residues, five of these leave int64 from 61 bits on.
        [[-1, -2, most], [-1, -2, 0], [-1, -2, 0], [-1, -2, 0], [-1, 8, -most]],
        [],
    ):
        found = summed(
            [SampleState((np.array(each),), np.int64(1), np.int64(-2)) for each in clients]
        )
        assert (found.num_records, found.least_steps) == (len(clients), -2 * len(clients))
        assert found.steps[0].tolist() == [
            sum(entries) for entries in zip([0] * 3, *clients, strict=True)
        ]


@pytest.mark.short_cases(1)
@pytest.mark.usefixtures("_simulated_secure_sums")
@pytest.mark.parametrize("bits", _SOME_BITS)
def test_a_secure_sum_is_the_sum(bits: int) -> None:
    _check(bits)


@pytest.mark.long_cases(5)
@pytest.mark.long
@pytest.mark.usefixtures("_simulated_secure_sums")
@pytest.mark.parametrize("bits", [bits for bits in range(24, 63) if bits not in _SOME_BITS])
def test_a_secure_sum_of_any_width_is_the_sum(bits: int) -> None:
    _check(bits)
