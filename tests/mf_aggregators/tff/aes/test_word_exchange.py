"""Words of the AES source in a graph: those of NumPy, by way of files."""

import functools
import os
import pathlib

import numpy as np
import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import tensorflow as tf

from mf_aggregators.noise import random_words, rows_of_z
from mf_aggregators.noise.random_words import NoiseSource
from mf_aggregators.noise.recursions import IndependentNoise
from mf_aggregators.noise.row_layout import PANEL
from mf_aggregators.tff import tensor_noise, tensor_rows_of_z
from mf_aggregators.tff.aes import word_exchange
from mf_aggregators.tff.aes.word_exchange import ExchangedWords
from mf_aggregators.tff.aes.word_service import WordService
from mf_aggregators.tff.rows_in_state import RowsInState


def _service(directory: pathlib.Path) -> WordService:
    directory.mkdir(mode=0o700, exist_ok=True)
    return WordService(directory, functools.partial(random_words.words, NoiseSource.AES))


@pytest.mark.parametrize("width", [1, 5, PANEL // 2 + 3, PANEL])
def test_rows_of_a_panel_are_those_of_numpy(width: int, tmp_path: pathlib.Path) -> None:
    seed = np.array([-(2**62) + 3, 2**61 + 5], dtype=np.int64)
    source = ExchangedWords(os.fspath(tmp_path / "words"))
    with _service(tmp_path / "words"):
        rows = tensor_rows_of_z.panel_rows(
            source,
            tf.constant(seed),
            tf.constant(7, tf.int64),
            tf.constant(2),
            tf.constant(3, tf.int64),
            width,
            tf.float64,
        ).numpy()
    for row, found in zip((7, 8), rows, strict=True):
        expected = rows_of_z.standard_normal(
            NoiseSource.AES, seed, row, 3 * PANEL, width, np.float64
        )
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-14)


def test_a_graph_asks_anew_in_every_round(tmp_path: pathlib.Path) -> None:
    seed = np.array([5, 6], dtype=np.int64)
    noise = tensor_noise.TensorNoise(
        RowsInState(IndependentNoise(4), ExchangedWords(os.fspath(tmp_path / "words"))),
        (tf.TensorSpec((3,), tf.float32), tf.TensorSpec((PANEL + 2,), tf.float32)),
    )
    step = tf.function(lambda state: noise.next_row(state), autograph=False)
    state = noise.initial_state(tf.constant(seed), tf.constant(seed))
    with _service(tmp_path / "words"):
        for i in range(4):
            row, state = step(state)
            expected = rows_of_z.standard_normal(NoiseSource.AES, seed, i, 0, PANEL + 5, np.float32)
            found = np.concatenate([tensor.numpy() for tensor in row])
            np.testing.assert_allclose(found, expected, atol=1e-6)


def test_no_request_with_the_seed_stays_behind(tmp_path: pathlib.Path) -> None:
    source = ExchangedWords(os.fspath(tmp_path / "words"))
    zero = tf.zeros([], tf.int64)
    with _service(tmp_path / "words"):
        source.prepare(tf.constant([1, 2], tf.int64), zero, 1, zero, 4)
        left = [path.name for path in (tmp_path / "words").iterdir()]
    assert not [name for name in left if name.endswith(".request")]


def test_without_the_service_the_graph_says_so(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(word_exchange, "_SECONDS_TO_ANSWER", 0.2)
    source = ExchangedWords(os.fspath(tmp_path))
    zero = tf.zeros([], tf.int64)
    with pytest.raises(tf.errors.InvalidArgumentError, match="did not send random words"):
        source.prepare(tf.constant([1, 2], tf.int64), zero, 1, zero, 4)
    # What was asked for held the seed.
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b""]
