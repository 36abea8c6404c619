"""TensorFlow's tensors read without TensorFlow: what it writes, and nothing else."""

import os
import pathlib
from collections.abc import Callable
from typing import Any

import hypothesis.extra.numpy
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import tensorflow as tf

from mf_aggregators.checkpoints.published_matrices import parse_tensor, read_tensor
from tests.examples import examples
from tests.refusals import refuses

_Writer = Callable[[np.ndarray], bytes]


def _by_operation(array: np.ndarray) -> bytes:
    return bytes(tf.io.serialize_tensor(tf.constant(array)).numpy())


def _by_message(array: np.ndarray) -> bytes:
    return bytes(tf.make_tensor_proto(array).SerializeToString())


_WRITERS = [_by_operation, _by_message]
_ARRAYS = hypothesis.extra.numpy.arrays(
    np.float64,
    hypothesis.extra.numpy.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5),
    elements=st.floats(allow_nan=False),
)


@pytest.mark.parametrize("write", _WRITERS)
@settings(deadline=None, max_examples=examples(50))
@given(array=_ARRAYS)
def test_what_tensorflow_writes_is_read_bit_by_bit(write: _Writer, array: np.ndarray) -> None:
    read = parse_tensor(write(array), "file")
    assert read.dtype == np.float64
    assert read.shape == array.shape
    assert read.tobytes() == array.tobytes()
    assert read.flags.writeable


@pytest.mark.parametrize("write", _WRITERS)
def test_nan_is_a_value(write: _Writer) -> None:
    array = np.array([[np.nan, 1.0], [np.inf, np.nan]])
    np.testing.assert_array_equal(parse_tensor(write(array), "file"), array)


@pytest.mark.parametrize("shape", [[], [1], [7], [3, 4], [2, 0]])
def test_constants_state_their_value_once(shape: list[int]) -> None:
    proto = tf.make_tensor_proto(0.1, shape=shape, dtype=tf.float64)
    read = parse_tensor(proto.SerializeToString(), "file")
    np.testing.assert_array_equal(read, np.full(shape, 0.1))


def test_the_last_value_stands_for_all_that_follow() -> None:
    proto = tf.make_tensor_proto(0.0, shape=[2, 3], dtype=tf.float64)
    proto.double_val[:] = [1.0, -2.0, 0.5]
    read = parse_tensor(proto.SerializeToString(), "file")
    np.testing.assert_array_equal(read, [[1.0, -2.0, 0.5], [0.5, 0.5, 0.5]])
    np.testing.assert_array_equal(read, tf.make_ndarray(proto))


@pytest.mark.parametrize("write", _WRITERS)
@settings(deadline=None, max_examples=examples(30))
@given(array=_ARRAYS)
def test_no_beginning_of_a_file_is_read(write: _Writer, array: np.ndarray) -> None:
    whole = write(array)
    for length in range(len(whole)):
        with refuses("file", "tensor"):
            parse_tensor(whole[:length], "file")


def test_no_beginning_of_an_abbreviated_list_is_read() -> None:
    proto = tf.make_tensor_proto(0.0, shape=[9], dtype=tf.float64)
    proto.double_val[:] = [1.0, 2.0, 3.0]
    whole = proto.SerializeToString()
    # The same list in three pieces, which are as valid, but could be cut between two of them.
    pieces = whole[: whole.index(b"\x32\x18")] + b"".join(
        b"\x32\x08" + np.float64(value).tobytes() for value in proto.double_val
    )
    np.testing.assert_array_equal(tf.make_ndarray(proto.FromString(pieces)), tf.make_ndarray(proto))
    for contents in (pieces, *(whole[:length] for length in range(len(whole)))):
        with refuses("file", "tensor"):
            parse_tensor(contents, "file")


@pytest.mark.parametrize("write", _WRITERS)
@settings(deadline=None, max_examples=examples(100))
@given(array=_ARRAYS, rest=st.binary(min_size=1, max_size=24))
def test_nothing_may_follow(write: _Writer, array: np.ndarray, rest: bytes) -> None:
    with refuses("file", "tensor"):
        parse_tensor(write(array) + rest, "file")


@settings(deadline=None, max_examples=examples(200))
@given(array=_ARRAYS, position=st.integers(0), byte=st.integers(0, 255))
def test_damage_is_a_value_error_or_another_value(
    array: np.ndarray, position: int, byte: int
) -> None:
    contents = bytearray(_by_operation(array))
    contents[position % len(contents)] = byte
    try:
        read = parse_tensor(bytes(contents), "file")
    except ValueError:
        return
    # Whatever it holds, TensorFlow reads it so too.
    np.testing.assert_array_equal(read, tf.io.parse_tensor(bytes(contents), tf.float64).numpy())


@settings(deadline=None, max_examples=200)
@given(contents=st.binary(max_size=64))
def test_random_bytes_are_no_tensor(contents: bytes) -> None:
    with refuses("file", "tensor"):
        parse_tensor(contents, "file")


@pytest.mark.parametrize(
    "array",
    [np.eye(2, dtype=np.float32), np.arange(3), np.array(["text"]), np.zeros((0,), np.float32)],
    ids=lambda array: array.dtype.name,
)
@pytest.mark.parametrize("write", _WRITERS)
def test_other_types_are_refused(write: _Writer, array: np.ndarray) -> None:
    with pytest.raises(
        ValueError, match=r"data type has the number \d+, not 2; expected .*float64"
    ):
        parse_tensor(write(array), "file")


def _changed(change: Callable[[Any], None]) -> bytes:
    proto = tf.make_tensor_proto(np.tri(3))
    change(proto)
    return bytes(proto.SerializeToString())


def _set_size(proto: Any, size: int) -> None:
    proto.tensor_shape.dim[0].size = size


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (lambda proto: proto.ClearField("tensor_shape"), ["other bytes"]),
        (lambda proto: setattr(proto.tensor_shape, "unknown_rank", True), ["other bytes"]),
        (lambda proto: _set_size(proto, -1), ["2 GiB"]),
        (lambda proto: _set_size(proto, 2), ["72 bytes", "48"]),
        (lambda proto: _set_size(proto, 0), ["72 bytes", "0"]),
        (lambda proto: _set_size(proto, 1 << 60), ["2 GiB"]),
        (lambda proto: proto.ClearField("tensor_content"), ["0 bytes", "72"]),
        (lambda proto: proto.double_val.append(1.0), ["other bytes"]),
        (lambda proto: proto.float_val.append(1.0), ["other bytes"]),
    ],
)
def test_inconsistent_tensors_are_refused(change: Callable[[Any], None], names: list[str]) -> None:
    with refuses(*names):
        parse_tensor(_changed(change), "file")


@pytest.mark.parametrize("shape", [[1 << 20, 1 << 20], [0, 1 << 62], [1] * 33])
def test_shapes_that_no_array_can_have_are_refused(shape: list[int]) -> None:
    proto = tf.make_tensor_proto(1.0, dtype=tf.float64)
    for size in shape:
        proto.tensor_shape.dim.add(size=size)
    with pytest.raises(ValueError, match=r"2 GiB or too many dimensions"):
        parse_tensor(proto.SerializeToString(), "file")


def test_more_values_than_the_shape_holds_are_refused() -> None:
    proto = tf.make_tensor_proto(1.0, shape=[2], dtype=tf.float64)
    proto.double_val[:] = [1.0, 2.0, 3.0]
    with refuses("24", "16"):
        parse_tensor(proto.SerializeToString(), "file")


def test_files_are_read_and_named(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "matrix_pb"
    file.write_bytes(_by_operation(np.tri(4)))
    np.testing.assert_array_equal(read_tensor(file), np.tri(4))
    file.write_bytes(file.read_bytes()[:-1])
    with refuses(str(file), "truncated"):
        read_tensor(file)
    with refuses(str(tmp_path / "other")):
        read_tensor(tmp_path / "other")
    with refuses(str(tmp_path)):
        read_tensor(tmp_path)


def test_a_huge_file_is_refused_before_it_is_read(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "matrix_pb"
    file.touch()
    os.truncate(file, 1 << 40)
    with refuses("2 GiB"):
        read_tensor(file)
