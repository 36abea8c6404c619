"""Random bits: Philox is TensorFlow's and the paper's, AES is the cipher, both by index."""

import os
import sys

import numpy as np
import pytest
from cryptography.hazmat.primitives import hashes, hmac
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import example, given, settings
from hypothesis import strategies as st

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import tensorflow as tf

from mf_aggregators.noise import random_bits
from mf_aggregators.noise.random_bits import NoiseSource

_INT64 = st.integers(-(2**63), 2**63 - 1)
_SEEDS = st.tuples(_INT64, _INT64).map(lambda halves: np.array(halves, np.int64))
_ROWS = st.integers(0, 2**63 - 1)
# Small ones, those around a carry into the counter's second integer, and the last ones.
_BLOCKS = st.one_of(
    st.integers(0, 2**40), st.integers(2**32 - 40, 2**32 + 40), st.integers(2**62 - 50, 2**62 - 21)
)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0] * 4, [0] * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_gives_the_known_answers_of_random123(
    counter: list[int], key: list[int], expected: str
) -> None:
    lower = np.array([counter[0] | counter[1] << 32], np.uint64)
    upper = counter[2] | counter[3] << 32
    outputs = random_bits._philox(key[0] | key[1] << 32, lower, upper)
    assert " ".join(f"{int(integer[0]):08x}" for integer in outputs) == expected


def _of_tensorflow(seed: np.ndarray, row: int, first_index: int, count: int) -> np.ndarray:
    upper = (int(seed[1]) + row) % 2**64
    return tf.raw_ops.StatelessRandomUniformFullIntV2(
        shape=[count],
        key=tf.constant([int(seed[0]) % 2**64], tf.uint64),
        counter=tf.constant([first_index // 2, upper], tf.uint64),
        alg=1,
        dtype=tf.uint64,
    ).numpy()


@given(_SEEDS, _ROWS, _BLOCKS, st.integers(0, 41))
@example(np.array([-1, 2**63 - 1]), 2**63 - 1, 2**62 - 21, 41)
@settings(deadline=None)
def test_philox_integers_are_those_of_tensorflow(
    seed: np.ndarray, row: int, block: int, count: int
) -> None:
    integers = random_bits.integers(NoiseSource.PHILOX, seed, row, 2 * block, count)
    assert integers.dtype == np.uint64
    np.testing.assert_array_equal(integers, _of_tensorflow(seed, row, 2 * block, count))


def test_philox_integers_beyond_one_piece_are_those_of_tensorflow() -> None:
    seed, first_index, count = np.array([-5, 2**62]), 2 * (2**32 - 40_000), 200_001
    integers = random_bits.integers(NoiseSource.PHILOX, seed, 9, first_index, count)
    np.testing.assert_array_equal(integers, _of_tensorflow(seed, 9, first_index, count))


def _by_single_blocks(seed: np.ndarray, row: int, first_index: int, count: int) -> np.ndarray:
    """AES of each counter block by itself, under a key by the definition of HKDF (RFC 5869)."""

    def keyed_hash(key: bytes, message: bytes) -> bytes:
        context = hmac.HMAC(key, hashes.SHA256())
        context.update(message)
        return context.finalize()

    secret = b"".join(int(half).to_bytes(8, "little", signed=True) for half in seed)
    pseudorandom_key = keyed_hash(bytes(32), secret)
    key = keyed_hash(pseudorandom_key, b"mf_aggregators rows of Z: AES-256-CTR" + b"\x01")
    integers = []
    for block in range(first_index // 2, (first_index + count + 1) // 2):
        encryptor = Cipher(algorithms.AES(key), modes.ECB()).encryptor()
        output = encryptor.update(row.to_bytes(8, "big") + block.to_bytes(8, "big"))
        integers += [int.from_bytes(output[start : start + 8], "little") for start in (0, 8)]
    return np.array(integers[:count], np.uint64)


@given(_SEEDS, _ROWS, _BLOCKS, st.integers(0, 41))
@example(np.array([-1, 2**63 - 1]), 2**63 - 1, 2**62 - 21, 41)
@settings(deadline=None)
def test_aes_integers_are_the_encryptions_of_their_counters(
    seed: np.ndarray, row: int, block: int, count: int
) -> None:
    integers = random_bits.integers(NoiseSource.AES, seed, row, 2 * block, count)
    assert integers.dtype == np.uint64
    np.testing.assert_array_equal(integers, _by_single_blocks(seed, row, 2 * block, count))


@given(st.sampled_from(NoiseSource), _SEEDS, _ROWS, st.integers(0, 70_000), st.integers(0, 70_000))
@settings(deadline=None, max_examples=50)
def test_an_integer_is_a_function_of_seed_row_and_index_alone(
    source: NoiseSource, seed: np.ndarray, row: int, block: int, count: int
) -> None:
    all_integers = random_bits.integers(source, seed, row, 0, 2 * block + count)
    integers = random_bits.integers(source, seed, row, 2 * block, count)
    np.testing.assert_array_equal(integers, all_integers[2 * block :])


@pytest.mark.parametrize("source", NoiseSource)
def test_no_integer_occurs_twice_in_rows_of_one_seed(source: NoiseSource) -> None:
    """30,000 integers of 64 bits agree by chance once in 4e10 runs."""
    seed = np.frombuffer(os.urandom(16), np.int64)
    rows = [random_bits.integers(source, seed, row, 0, 10_000) for row in (0, 1, 2**62)]
    assert len(np.unique(rows)) == 30_000


@pytest.mark.parametrize("source", NoiseSource)
@pytest.mark.parametrize("half", [0, 1])
def test_every_bit_of_the_seed_counts(source: NoiseSource, half: int) -> None:
    base = random_bits.integers(source, np.zeros(2, np.int64), 0, 0, 4)
    for bit in range(64):
        seed = np.zeros(2, np.uint64)
        seed[half] = 1 << bit
        integers = random_bits.integers(source, seed.view(np.int64), 0, 0, 4)
        assert not np.any(integers == base), bit


@pytest.mark.parametrize("source", NoiseSource)
def test_numbers_out_of_range_are_refused(source: NoiseSource) -> None:
    seed = np.zeros(2, np.int64)
    for row, first_index, count, message in (
        (-1, 0, 1, "row must be at least 0"),
        (2**63, 0, 1, "row must be below"),
        (0, 1, 1, "first_index must be even"),
        (0, -2, 1, "first_index must be at least 0"),
        (0, 0, -1, "count must be at least 0"),
        (0, 2**63, 1, "indices must be below"),
        (0, 2**63 - 2, 3, "indices must be below"),
        (0, 0.5, 1, "first_index must be an integer"),
    ):
        with pytest.raises(ValueError, match=message):
            random_bits.integers(source, seed, row, first_index, count)  # type: ignore[arg-type]
    assert random_bits.integers(source, seed, 2**63 - 1, 2**63 - 2, 2).shape == (2,)


@pytest.mark.parametrize(
    "seed", [np.zeros(2), np.zeros(3, np.int64), np.zeros(2, np.uint64), np.int64(5)]
)
def test_what_is_no_seed_is_refused(seed: np.ndarray) -> None:
    with pytest.raises(ValueError, match=r"int64 array of shape \(2,\)"):
        random_bits.integers(NoiseSource.PHILOX, seed, 0, 0, 1)


def test_sources_have_the_names_that_options_use() -> None:
    assert [NoiseSource("philox"), NoiseSource("aes")] == list(NoiseSource)


def test_a_missing_cipher_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives", None)
    seed = np.zeros(2, np.int64)
    with pytest.raises(ImportError, match="pip install cryptography"):
        random_bits.integers(NoiseSource.AES, seed, 0, 0, 1)
    assert random_bits.integers(NoiseSource.PHILOX, seed, 0, 0, 1).shape == (1,)
