"""Tensors in files: what was written comes back, and anything else is not there."""

import functools
import os
import pathlib
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import tensorflow as tf

from mf_aggregators.noise import places
from mf_aggregators.tff import rows_on_disk

_NUMBER = 12345
_TENSOR = np.array([1.5, -2.25, np.pi], np.float32)


@functools.cache
def _reader(shape: tuple[int, ...], dtype: str) -> Callable[..., tuple[tf.Tensor, tf.Tensor]]:
    return tf.function(
        lambda path, number: rows_on_disk._read_tensor(
            path, number, list(shape), tf.as_dtype(dtype)
        ),
        autograph=False,
    )


@functools.cache
def _writer() -> Callable[..., None]:
    def write(path: tf.Tensor, number: tf.Tensor, tensor: tf.Tensor) -> None:
        rows_on_disk._write_tensor(path, number, tensor)

    return tf.function(write, autograph=False)


@pytest.fixture(scope="module", autouse=True)
def _graphs() -> Iterator[None]:
    """Lets graphs go while Python is still whole: later, TensorFlow complains."""
    yield
    _reader.cache_clear()
    _writer.cache_clear()


def _written(path: pathlib.Path, tensor: np.ndarray, number: int = _NUMBER) -> None:
    _writer()(tf.constant(os.fspath(path)), tf.constant(number, tf.int64), tf.constant(tensor))


def _read(
    path: pathlib.Path,
    number: int = _NUMBER,
    shape: tuple[int, ...] = _TENSOR.shape,
    dtype: str = "float32",
) -> np.ndarray | None:
    """What is in the file, or None; checks that what is not there is zeros."""
    tensor, is_there = _reader(shape, dtype)(
        tf.constant(os.fspath(path)), tf.constant(number, tf.int64)
    )
    found = tensor.numpy()
    assert (found.shape, found.dtype) == (shape, dtype)
    if is_there.numpy():
        return np.asarray(found)
    np.testing.assert_array_equal(found, np.zeros(shape))
    return None


def _is_written_tensor(found: np.ndarray | None) -> bool:
    return found is not None and found.tobytes() == _TENSOR.tobytes()


@pytest.mark.parametrize(
    "tensor",
    [
        _TENSOR,
        np.array([np.nan, np.inf, -0.0], np.float32),
        np.array(7.5, np.float32),
        np.arange(6.0).reshape(2, 3),
        np.zeros((0, 5)),
        np.random.default_rng(0).normal(size=70_000).astype(np.float32),
    ],
    ids=lambda tensor: f"{tensor.dtype}{tensor.shape}",
)
@pytest.mark.parametrize("number", [0, _NUMBER, 2**63 - 1])
def test_what_was_written_is_read_bit_for_bit(
    tensor: np.ndarray, number: int, tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "tensor"
    _written(path, tensor, number)
    found = _read(path, number, tensor.shape, tensor.dtype.name)
    assert found is not None
    assert found.tobytes() == tensor.tobytes()


@pytest.mark.parametrize("number", [0, _NUMBER + 1, _NUMBER * 10, -_NUMBER, 2**62 + _NUMBER])
def test_what_is_for_another_number_is_not_there(number: int, tmp_path: pathlib.Path) -> None:
    _written(tmp_path / "tensor", _TENSOR)
    assert _read(tmp_path / "tensor", number) is None


def test_what_was_cut_off_anywhere_is_not_there(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "tensor"
    _written(path, _TENSOR)
    whole = path.read_bytes()
    # The header of 40 digits, and more than the three numbers.
    assert len(whole) > 40 + _TENSOR.nbytes
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert _read(path) is None, length
    for longer in (whole + b"\0", whole + whole, b"\0" + whole, whole[1:], b" " * len(whole)):
        path.write_bytes(longer)
        assert _read(path) is None
    path.write_bytes(whole)
    assert _is_written_tensor(_read(path))


def test_what_has_any_flipped_bit_is_not_there(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "tensor"
    _written(path, _TENSOR)
    whole = path.read_bytes()
    for position in range(len(whole)):
        for bit in range(8):
            damaged = bytearray(whole)
            damaged[position] ^= 1 << bit
            path.write_bytes(damaged)
            assert _read(path) is None, (position, bit)


@pytest.mark.parametrize(
    "name", ["plain", "a b", "ünïcödé", "{a,b}", "~", "$HOME", "%20", "x:y", "it's", '"', "a;b&c|d"]
)
def test_other_paths_can_be_used(name: str, tmp_path: pathlib.Path) -> None:
    path = places.open_directory(tmp_path / name) / "tensor"
    assert _read(path) is None
    _written(path, _TENSOR)
    assert path.is_file()
    assert _is_written_tensor(_read(path))
