"""Sums of clients' integers in 64 bits, through TFF."""

import collections
import os
from collections.abc import Iterator

import numpy as np
import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import tensorflow_federated as tff

from mf_aggregators.tff import processes
from mf_aggregators.tff.integer_sum_factory import IntegerSumFactory

_TYPE = tff.to_type(
    collections.OrderedDict(
        steps=tff.StructType([(None, tff.TensorType(np.int32, [2])), (None, np.int32)]),
        num_records=np.int64,
    )
)


@pytest.fixture(scope="module", autouse=True)
def _no_worker_outlives_the_tests() -> Iterator[None]:
    yield
    processes.end_workers()


def test_sums_are_those_of_integers_without_a_bound() -> None:
    process = IntegerSumFactory().create(_TYPE)
    generator = np.random.default_rng(0)
    for count in (0, 1, 9):
        vectors = generator.integers(2**30, 2**31 - 1, (count, 2), dtype=np.int32)
        clients = [
            collections.OrderedDict(steps=[vector, np.int32(-(2**31))], num_records=np.int64(1))
            for vector in vectors
        ]
        output = process.next(process.initialize(), clients)
        total, scalar = output.result["steps"]
        assert (total.dtype, total.shape) == (np.int64, (2,))
        assert total.tolist() == [sum(map(int, column)) for column in vectors.T]
        assert scalar == count * -(2**31)
        assert output.result["num_records"] == count
        assert tuple(output.state) == ()
