"""Integers of the AES source in a graph: those of NumPy, by way of files."""

import functools
import os
import pathlib

import numpy as np
import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import tensorflow as tf

from mf_aggregators.noise import random_bits, rows_of_z
from mf_aggregators.noise.integer_rows import IntegerRows
from mf_aggregators.noise.random_bits import NoiseSource
from mf_aggregators.noise.recursions import IndependentNoise
from mf_aggregators.noise.row_layout import CHUNK
from mf_aggregators.tff import tensor_discrete_gaussian, tensor_noise, tensor_rows_of_z
from mf_aggregators.tff.aes import bit_exchange
from mf_aggregators.tff.aes.bit_exchange import ExchangedBits
from mf_aggregators.tff.aes.bit_service import BitService
from mf_aggregators.tff.rows_in_state import RowsInState


def _service(directory: pathlib.Path) -> BitService:
    directory.mkdir(mode=0o700, exist_ok=True)
    return BitService(directory, functools.partial(random_bits.integers, NoiseSource.AES))


@pytest.mark.parametrize("width", [1, 5, CHUNK // 2 + 3, CHUNK])
def test_rows_of_a_chunk_are_those_of_numpy(width: int, tmp_path: pathlib.Path) -> None:
    seed = np.array([-(2**62) + 3, 2**61 + 5], dtype=np.int64)
    source = ExchangedBits(os.fspath(tmp_path / "integers"))
    with _service(tmp_path / "integers"):
        rows = tensor_rows_of_z.chunk_rows(
            source,
            tf.constant(seed),
            tf.constant(7, tf.int64),
            tf.constant(2),
            tf.constant(3, tf.int64),
            width,
            tensor_discrete_gaussian.graph_table(),
        ).numpy()
    for row, found in zip((7, 8), rows, strict=True):
        expected = rows_of_z.integers(NoiseSource.AES, seed, row, 3 * CHUNK, width)
        np.testing.assert_array_equal(found, expected)


def test_a_graph_asks_anew_in_every_round(tmp_path: pathlib.Path) -> None:
    seed = np.array([5, 6], dtype=np.int64)
    noise = tensor_noise.TensorNoise(
        RowsInState(
            IntegerRows.of(IndependentNoise(4)), ExchangedBits(os.fspath(tmp_path / "integers"))
        ),
        (tf.TensorSpec((3,), tf.float32), tf.TensorSpec((CHUNK + 2,), tf.float32)),
    )
    advance = tf.function(lambda state: noise.next_row(state), autograph=False)
    state = noise.initial_state(tf.constant(seed), tf.constant(seed))
    with _service(tmp_path / "integers"):
        for i in range(4):
            row, step, state = advance(state)
            expected = rows_of_z.integers(NoiseSource.AES, seed, i, 0, CHUNK + 5)
            found = np.concatenate([tensor.numpy() for tensor in row]) * step.numpy()
            np.testing.assert_allclose(found, expected * rows_of_z.STEP, atol=1e-7)


def test_no_request_with_the_seed_stays_behind(tmp_path: pathlib.Path) -> None:
    source = ExchangedBits(os.fspath(tmp_path / "integers"))
    zero = tf.zeros([], tf.int64)
    with _service(tmp_path / "integers"):
        source.prepare(tf.constant([1, 2], tf.int64), zero, 1, zero, 4)
        left = [path.name for path in (tmp_path / "integers").iterdir()]
    assert not [name for name in left if name.endswith(".request")]


def test_without_the_service_the_graph_says_so(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bit_exchange, "_SECONDS_TO_ANSWER", 0.2)
    source = ExchangedBits(os.fspath(tmp_path))
    zero = tf.zeros([], tf.int64)
    with pytest.raises(tf.errors.InvalidArgumentError, match="did not send random bits"):
        source.prepare(tf.constant([1, 2], tf.int64), zero, 1, zero, 4)
    # What was asked for held the seed.
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b""]
