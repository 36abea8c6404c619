"""The record of released sums."""

import contextlib
import functools
import pathlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from mf_aggregators.kernel.draws import TILE
from mf_aggregators.tff import release_record
from mf_aggregators.tff.release_record import ReleaseRecord
from tests.refusals import refuses

_SEED = np.array([2**62 + 5, -3], np.int64)
_SCALES = (2.0**-30, 1e-9)
# Of a run of four rounds that was extended to twenty.
_NOISE = ((4, b"a" * 32), (20, b"b" * 32))
_WORD = 2**64
# Coordinates of a piece, as the documentation of the digest has it.
_PIECE = 2**14


@functools.cache
def _checking(directory: pathlib.Path) -> Any:
    """The graph of a record's check, which takes far longer to trace than to run."""
    record = ReleaseRecord(directory, _NOISE)

    @tf.function(autograph=False)
    def check(stream: tf.Tensor, i: tf.Tensor, sums: Any, scales: Any) -> list[tf.Tensor]:
        return record.check(tf.constant(_SEED), stream, i, list(sums), list(scales))

    return check


@pytest.fixture(scope="module", autouse=True)
def _graphs() -> Iterator[None]:
    """Lets the graphs go while Python is still whole: later, TensorFlow complains."""
    yield
    _checking.cache_clear()


def _check(
    directory: pathlib.Path,
    i: int,
    *sums: np.ndarray,
    stream: tuple[int, int] = (1, -2),
    scales: Sequence[float] = _SCALES,
) -> None:
    checked = _checking(directory)(
        tf.constant(stream, tf.int64),
        tf.constant(i, tf.int64),
        tuple(map(tf.constant, sums)),
        tuple(tf.constant(scale, tf.float64) for scale in scales),
    )
    for tensor, given_sum in zip(checked, sums, strict=True):
        np.testing.assert_array_equal(tensor.numpy(), given_sum)


def _refused() -> Any:
    return refuses("released", error=tf.errors.InvalidArgumentError)


def _sums(seed: int = 3) -> tuple[np.ndarray, ...]:
    total = np.random.default_rng(seed).integers(-(2**50), 2**50, 1003)
    return total[:600].reshape(20, 30), total[600:1002], total[1002]


def _changed(position: int, by: int = 1) -> tuple[np.ndarray, ...]:
    total = np.concatenate([tensor.reshape(-1) for tensor in _sums()])
    total[position] += by
    return total[:600].reshape(20, 30), total[600:1002], total[1002]


def _words(seed: np.ndarray, row: int, first: int, count: int) -> list[int]:
    """Blocks of ChaCha20 with a key of 128 bits, as integers of 64 bits."""
    key = 2 * list(seed.view(np.uint32))
    counters = np.array([(first + block) % _WORD for block in range(count)], np.uint64)
    nonce = np.array([row % _WORD], np.uint64).view(np.uint32)
    constants = np.frombuffer(b"expand 16-byte k", "<u4")
    start = [np.full(count, word, np.uint32) for word in (*constants, *key)]
    start += [*counters.view(np.uint32).reshape(-1, 2).T, *(np.full(count, n) for n in nonce)]
    state = [word.copy() for word in start]
    for number in range(80):
        turn = number // 4 % 2
        a, b, c, d = (4 * place + (number + turn * place) % 4 for place in range(4))
        for (x, y, z), distance in zip(
            [(a, b, d), (c, d, b), (a, b, d), (c, d, b)], (16, 12, 8, 7), strict=True
        ):
            state[x] = state[x] + state[y]
            mixed = state[z] ^ state[x]
            state[z] = mixed << np.uint32(distance) | mixed >> np.uint32(32 - distance)
    words = np.stack([one + two for one, two in zip(state, start, strict=True)], axis=1)
    return [int(word) for word in np.ascontiguousarray(words).view(np.uint64).reshape(-1)]


def _product(halves: list[int], keys: list[int]) -> list[int]:
    return [
        sum(x * k for x, k in zip(halves, keys[column::2], strict=False)) % _WORD
        for column in (0, 1)
    ]


def _halves(numbers: np.ndarray) -> list[int]:
    return [int(half) for half in np.ascontiguousarray(numbers, np.int64).view(np.int32)]


def _digest(i: int, sums: Sequence[np.ndarray], scales: Sequence[float]) -> str:
    """The digest in Python's integers, as the module's documentation defines it."""
    secrets = np.array(_words(_SEED, -1, 0, 1)[:4], np.uint64).view(np.int64)
    of_hash, of_name = secrets[:2], secrets[2:]
    width = 2 * min(_PIECE, max(1, *(tensor.size for tensor in sums)))
    keys = _words(of_hash, 0, 0, -(-width // 4))
    hashes: list[int] = []
    for tensor in sums:
        flat = tensor.reshape(-1)
        whole = len(flat) // TILE * TILE if len(flat) > _PIECE else 0
        # The rest comes first, then whole tiles.
        parts = [flat[whole:], flat[:whole]]
        for part in parts if len(flat) > _PIECE else [flat]:
            for start in range(0, len(part), _PIECE):
                hashes += _product(_halves(part[start : start + _PIECE]), keys)
    numbers = np.array([*hashes], np.uint64).view(np.int64)
    others = np.array([i, *np.array(scales, np.float64).view(np.int64)], np.int64)
    halves = _halves(np.concatenate([numbers, others]))
    high, low = _product(halves, _words(of_hash, 1, 0, -(-len(halves) // 4)))
    signed = np.array([high, low], np.uint64).view(np.int64)
    name = np.array(_words(of_name, int(signed[0]), int(signed[1]), 1)[:2], np.uint64)
    return ".".join(map(str, name.view(np.int64)))


@pytest.mark.parametrize(
    "sizes", [(1,), (3, 1, 70), (_PIECE,), (_PIECE + 1, 5), (2 * TILE + _PIECE + 3, TILE, 2)]
)
def test_the_digest_is_the_one_that_is_documented(sizes: tuple[int, ...]) -> None:
    generator = np.random.default_rng(len(sizes))
    sums = [generator.integers(-(2**62), 2**62, size) for size in sizes]
    found = tf.function(release_record._digest, autograph=False)(
        tf.constant(_SEED),
        tf.constant(7, tf.int64),
        tuple(map(tf.constant, sums)),
        tuple(tf.constant(scale, tf.float64) for scale in _SCALES),
    )
    assert found.numpy().decode() == _digest(7, sums, _SCALES)


def test_the_same_sum_passes_and_one_step_in_any_coordinate_is_refused(
    tmp_path: pathlib.Path,
) -> None:
    # Of each tensor the first and the last, and some between.
    for position in (*range(0, 1003, 59), 599, 600, 1001, 1002):
        for _ in range(2):
            _check(tmp_path, 0, *_sums(), stream=(position, 7))
        for by in (1, -(2**30), 2**52):
            with _refused():
                _check(tmp_path, 0, *_changed(position, by), stream=(position, 7))
        # Refused sums leave nothing behind.
        _check(tmp_path, 0, *_sums(), stream=(position, 7))


def test_other_rounds_streams_and_scales_have_digests_of_their_own(tmp_path: pathlib.Path) -> None:
    _check(tmp_path, 3, *_sums())
    # The same integers in other steps would tell the sum.
    for scales in ((2.0**-30, 1.001e-9), (2.0**-31, 1e-9)):
        with _refused():
            _check(tmp_path, 3, *_sums(), scales=scales)
    _check(tmp_path, 4, *_sums(4))
    _check(tmp_path, 3, *_sums(5), stream=(1, -3))
    names = [path.name.rpartition(".") for path in tmp_path.rglob("*") if path.is_file()]
    assert len({name for name, *_ in names}) == len(names) == 3
    # Each has the digest of the claim of its horizon.
    assert sorted(claimed for *_, claimed in names) == ["61" * 32, "61" * 32, "62" * 32]


@pytest.mark.parametrize("i", [0, 1])
def test_a_sum_of_nobody_is_recorded(i: int, tmp_path: pathlib.Path) -> None:
    zeros = [np.zeros_like(tensor) for tensor in _sums()]
    for _ in range(2):
        _check(tmp_path, i, *zeros)
    # The difference to the round of nobody would be the sum, without noise.
    with _refused():
        _check(tmp_path, i, *_sums())


def test_a_spent_round_refuses_every_sum(tmp_path: pathlib.Path) -> None:
    record, stream = ReleaseRecord(tmp_path, _NOISE), tf.constant([1, -2], tf.int64)
    _check(tmp_path, 3, *_sums())
    for i in (3, 4):
        record.spend(stream, tf.constant(i, tf.int64))
        for seed in (3, 4):
            with _refused():
                _check(tmp_path, i, *_sums(seed))
    _check(tmp_path, 5, *_sums())


def test_nothing_but_names_is_on_the_disk(tmp_path: pathlib.Path) -> None:
    _check(tmp_path, 3, *_sums())
    (path,) = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert path.stat().st_size == 0
    assert path.name == f"{_digest(3, _sums(), _SCALES)}.{'61' * 32}"
    # A file that was cut off has the same name, and so is no other record.
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_of_two_that_release_at_once_at_most_one_succeeds(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has looked for other names before either writes its own, and either may be faster."""
    record, write, rounds = ReleaseRecord(tmp_path, _NOISE), tf.io.write_file, 20
    looked, outcomes = threading.Barrier(2), [[False, False] for _ in range(rounds)]

    def write_once_both_have_looked(path: tf.Tensor, contents: str) -> tf.Operation:
        both = tf.py_function(lambda: int(looked.wait() >= 0), [], tf.int64)
        with tf.control_dependencies([both]):
            return write(path, contents)

    monkeypatch.setattr(tf.io, "write_file", write_once_both_have_looked)

    def release(number: int) -> None:
        @tf.function(autograph=False)
        def check(i: tf.Tensor) -> list[tf.Tensor]:
            stream, total = tf.constant([5, 5], tf.int64), tf.constant([number], tf.int64)
            return record.check(tf.constant(_SEED), stream, i, [total], [])

        for i in range(rounds):
            with contextlib.suppress(tf.errors.InvalidArgumentError):
                check(tf.constant(i, tf.int64))
                outcomes[i][number] = True

    threads = [threading.Thread(target=release, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(sum(succeeded) <= 1 for succeeded in outcomes)
    assert all(len(list(path.iterdir())) == 2 for path in tmp_path.rglob("round-*"))
