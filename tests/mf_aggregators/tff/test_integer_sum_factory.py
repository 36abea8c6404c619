"""Sums of clients' integers through TFF, in the open and secure, beside sums of Python's."""

import os
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import tensorflow as tf
import tensorflow_federated as tff

from mf_aggregators.tff.aggregator import _sum_of_records
from mf_aggregators.tff.dp_query import SampleState

# Both sides of 2^31, where TFF's type of a Python integer changes, and both ends.
_SOME_BITS = [24, 31, 32, 62]


def _summed(dtype: Any, size: int, bits: int | None) -> Any:
    def zero() -> SampleState:
        return SampleState((tf.zeros([size], tf.int64),), tf.zeros([], tf.int64))

    record_type = tff.types.to_type(SampleState(((dtype, [size]),), np.int64))
    return _sum_of_records(zero, record_type, bits)


def test_sums_are_those_of_integers_without_a_bound() -> None:
    summed = _summed(np.int32, 2, None)
    generator = np.random.default_rng(0)
    for count in (0, 1, 9):
        vectors = generator.integers(2**30, 2**31 - 1, (count, 2), dtype=np.int32)
        found = summed([SampleState((vector,), np.int64(1)) for vector in vectors])
        assert found.steps[0].dtype == np.int64
        assert found.steps[0].tolist() == [sum(map(int, column)) for column in vectors.T]
        assert found.num_records == count


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
        found = summed([SampleState((np.array(each),), np.int64(1)) for each in clients])
        assert found.num_records == len(clients)
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
