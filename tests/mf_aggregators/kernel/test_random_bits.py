"""Random bits: ChaCha20 is RFC 8439's and OpenSSL's, Philox the paper's; both by row and block."""

import os

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from hypothesis import given, settings
from hypothesis import strategies as st

from mf_aggregators.kernel import draws
from mf_aggregators.kernel.draws import NoiseSource, random_blocks
from tests.refusals import refuses

_WORDS = st.integers(0, 2**32 - 1)


def _block(state: list[int]) -> bytes:
    found = draws._chacha20(np.array(state, np.uint32)[:, np.newaxis])
    return found[:, 0].astype("<u4").tobytes()


def test_chacha20_is_the_block_function_of_rfc_8439() -> None:
    """Sec. 2.3.2: the key 00 01 ... 1f, the nonce 00 00 00 09 00 00 00 4a 00 00 00 00, block 1."""
    key = np.frombuffer(bytes(range(32)), "<u4").tolist()
    constants = np.frombuffer(b"expand 32-byte k", "<u4").tolist()
    expected = (
        "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
        "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e"
    )
    assert _block([*constants, *key, 1, 0x09000000, 0x4A000000, 0]).hex() == expected


@given(st.lists(_WORDS, min_size=8, max_size=8), st.lists(_WORDS, min_size=4, max_size=4))
@settings(max_examples=50)
def test_chacha20_is_that_of_openssl(key: list[int], rest: list[int]) -> None:
    """With keys of 256 bits, which is what OpenSSL knows."""
    key_bytes, nonce = (np.array(words, "<u4").tobytes() for words in (key, rest))
    encryptor = Cipher(algorithms.ChaCha20(key_bytes, nonce), None).encryptor()
    constants = np.frombuffer(b"expand 32-byte k", "<u4").tolist()
    assert _block([*constants, *key, *rest]) == encryptor.update(bytes(64))


def test_keys_of_128_bits_give_the_published_keystream() -> None:
    """The all-zero key and nonce of the published test vectors for ChaCha20 with 128-bit keys."""
    words = random_blocks(NoiseSource.CHACHA20, np.zeros(2, np.int64), 0, 0, 1)
    expected = (
        "89670952608364fd00b2f90936f031c8e756e15dba04b8493d00429259b20f46"
        "cc04f111246b6c2ce066be3bfb32d9aa0fddfbc12123d4b9e44f34dca05a103f"
    )
    assert words.astype("<u4").tobytes().hex() == expected


@given(
    st.tuples(*2 * [st.integers(-(2**63), 2**63 - 1)]),
    st.integers(0, 2**63 - 1),
    st.one_of(st.integers(0, 2**33), st.integers(2**61 - 5, 2**61 - 1)),
)
@settings(max_examples=50)
def test_seed_row_and_block_are_key_nonce_and_counter(
    seed: tuple[int, int], row: int, block: int
) -> None:
    key = b"".join(half.to_bytes(8, "little", signed=True) for half in seed)
    state = (
        b"expand 16-byte k" + key + key + block.to_bytes(8, "little") + row.to_bytes(8, "little")
    )
    found = random_blocks(NoiseSource.CHACHA20, np.array(seed, np.int64), row, block, 1)
    assert found.dtype == np.uint32
    assert found[0].astype("<u4").tobytes() == _block(np.frombuffer(state, "<u4").tolist())


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
    outputs = draws._philox(key[0] | key[1] << 32, lower, upper)
    assert " ".join(f"{int(integer[0]):08x}" for integer in outputs) == expected


@given(st.sampled_from(NoiseSource), st.integers(0, 9000), st.integers(0, 9000))
@settings(deadline=None, max_examples=30)
def test_a_block_is_a_function_of_seed_row_and_number_alone(
    source: NoiseSource, first: int, count: int
) -> None:
    seed = np.array([-5, 2**62], np.int64)
    every = random_blocks(source, seed, 9, 0, first + count)
    np.testing.assert_array_equal(random_blocks(source, seed, 9, first, count), every[first:])


@pytest.mark.parametrize("source", NoiseSource)
def test_no_block_occurs_twice_in_rows_of_one_seed(source: NoiseSource) -> None:
    """30,000 pairs of words agree by chance once in 4e10 runs."""
    seed = np.frombuffer(os.urandom(16), np.int64)
    rows = [random_blocks(source, seed, row, 0, 1250) for row in (0, 1, 2**62)]
    assert len(np.unique(np.array(rows).view(np.uint64))) == 30_000


@pytest.mark.parametrize("source", NoiseSource)
@pytest.mark.parametrize("half", [0, 1])
def test_every_bit_of_the_seed_counts(source: NoiseSource, half: int) -> None:
    base = random_blocks(source, np.zeros(2, np.int64), 0, 0, 1)
    for bit in range(64):
        seed = np.zeros(2, np.uint64)
        seed[half] = 1 << bit
        words = random_blocks(source, seed.view(np.int64), 0, 0, 1)
        assert not np.any(words == base), bit


@pytest.mark.parametrize("source", NoiseSource)
def test_numbers_out_of_range_are_refused(source: NoiseSource) -> None:
    seed = np.zeros(2, np.int64)
    for row, first_block, count in (
        *((-1, 0, 1), (2**63, 0, 1), (0, -1, 1), (0, 0, -1)),
        *((0, 2**61, 1), (0, 2**61 - 1, 2), (0, 0.5, 1)),
    ):
        with pytest.raises(ValueError, match=r"row|block|count"):
            random_blocks(source, seed, row, first_block, count)  # type: ignore[arg-type]
    assert random_blocks(source, seed, 2**63 - 1, 2**61 - 1, 1).shape == (1, 16)


@pytest.mark.parametrize(
    "seed", [np.zeros(2), np.zeros(3, np.int64), np.zeros(2, np.uint64), np.int64(5)]
)
def test_what_is_no_seed_is_refused(seed: np.ndarray) -> None:
    with refuses("int64", "(2,)"):
        random_blocks(NoiseSource.PHILOX, seed, 0, 0, 1)


def test_sources_have_the_names_that_options_use() -> None:
    assert [NoiseSource("chacha20"), NoiseSource("philox")] == list(NoiseSource)
