"""Tensors in files of TensorFlow's format, read without TensorFlow and protobuf.

``tf.io.serialize_tensor`` and ``tf.make_tensor_proto(...).SerializeToString()`` write a
``tensorflow.TensorProto`` (tensorflow/core/framework/tensor.proto). Of this message only the
fields that a float64 tensor uses are read here: its data type (1), shape (2), version (3), values
as bytes (4) and as numbers (6). A file that holds anything else, or is not byte for byte what
writers of protocol buffers make of these fields, is refused rather than guessed at.
"""

import math
import os
import pathlib
from collections.abc import Iterator

import numpy as np

# tensorflow.DataType of a float64 tensor.
_DT_DOUBLE = 2
# Protocol buffers hold at most 2 GiB less a byte; a constant of more entries than fit into
# that is refused as well, since a few bytes could ask for any amount of memory.
_MOST_BYTES = (1 << 31) - 1
_MOST_ENTRIES = _MOST_BYTES // 8
# Of NumPy before 2.0.
_MOST_DIMENSIONS = 32
_EXPECTED = "expected a serialized TensorProto of float64, as tf.io.serialize_tensor writes it"
_TRUNCATED = "it is truncated or no TensorProto"
_OTHER_BYTES = "it holds other bytes than those of a float64 tensor"


def read(path: str | os.PathLike[str]) -> np.ndarray:
    """Reads a file that holds one float64 tensor.

    Args:
      path: The file.

    Returns:
      The tensor, a new float64 array.

    Raises:
      ValueError: If the file cannot be read, or is no such tensor; the message names the
        file, the reason and what was expected.
    """
    file = pathlib.Path(path)
    try:
        if file.stat().st_size > _MOST_BYTES:
            raise ValueError(f"{file} is no tensor: it is larger than 2 GiB; {_EXPECTED}.")
        contents = file.read_bytes()
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}.") from error
    return parse(contents, str(file))


def parse(contents: bytes, name: str) -> np.ndarray:
    """Returns the float64 tensor of a serialized TensorProto.

    Values are taken from ``tensor_content``, in little-endian order, or from ``double_val``,
    of which the last one stands for all that follow, as in TensorFlow.

    Args:
      contents: The serialized message.
      name: What to call it in messages.

    Returns:
      The tensor, a new float64 array.

    Raises:
      ValueError: If the bytes are truncated, of another type or shape than they hold values
        for, or anything but such a message.
    """
    if not contents:
        raise _refusal(name, "it is empty")
    try:
        return _tensor(memoryview(contents))
    except _FormatError as error:
        raise _refusal(name, str(error)) from None


class _FormatError(Exception):
    """Why bytes are no tensor that is read here."""


def _tensor(contents: memoryview) -> np.ndarray:
    data_type, shape = 0, None
    content, listed = memoryview(b""), np.empty(0)
    for number, value in _fields(contents):
        if number == 1 and isinstance(value, int):
            data_type = value
        if data_type != _DT_DOUBLE:
            # Before all else: a tensor of another type holds fields that are not known here.
            break
        if number == 2 and isinstance(value, memoryview):
            shape = _shape(value)
        elif number == 4 and isinstance(value, memoryview) and value:
            content = value
        elif number == 6 and isinstance(value, memoryview) and value and len(value) % 8 == 0:
            listed = np.frombuffer(value, "<f8")
        elif number > 1 and not (number == 3 and isinstance(value, int) and _is_int32(value)):
            raise _FormatError(_OTHER_BYTES)
    if data_type != _DT_DOUBLE:
        raise _FormatError(f"its data type has the number {data_type}, not {_DT_DOUBLE}")
    if shape is None:
        raise _FormatError("it states no shape")
    size = math.prod(shape)
    if content:
        if len(listed):
            raise _FormatError("it states its values twice")
        if len(content) != 8 * size:
            raise _FormatError(
                f"it holds {len(content)} bytes of values, and its shape {shape} needs {8 * size}"
            )
        return np.frombuffer(content, dtype="<f8").astype(np.float64).reshape(shape)
    # TensorFlow reads a tensor without values as zeros; a file cut short looks the same.
    if len(listed) > size or (size > 0 and not len(listed)):
        raise _FormatError(f"it holds {len(listed)} values, and its shape {shape} needs {size}")
    values = np.empty(size)
    values[: len(listed)] = listed
    if len(listed):
        values[len(listed) :] = listed[-1]
    return values.reshape(shape)


def _shape(contents: memoryview) -> tuple[int, ...]:
    shape: list[int] = []
    is_known = True
    for number, value in _fields(contents, repeated=2):
        if number == 2 and isinstance(value, memoryview):
            shape.append(_size(value))
        elif number == 3 and value == 1:
            is_known = False
        else:
            raise _FormatError(_OTHER_BYTES)
    if not is_known:
        raise _FormatError("it states no shape")
    if any(size < 0 for size in shape):
        raise _FormatError(f"its shape {tuple(shape)} is not fully known")
    if len(shape) > _MOST_DIMENSIONS:
        raise _FormatError(f"its shape has {len(shape)} dimensions")
    # Sizes of zero aside: beside one, the others could be of any size.
    if math.prod(size for size in shape if size) > _MOST_ENTRIES:
        raise _FormatError(f"its shape {tuple(shape)} is of more than 2 GiB")
    return tuple(shape)


def _size(contents: memoryview) -> int:
    """The size of a dimension, which may have a name."""
    size = 0
    for number, value in _fields(contents):
        if number == 1 and isinstance(value, int) and value:
            size = value if value < 1 << 63 else value - (1 << 64)
        elif number == 2 and isinstance(value, memoryview) and value:
            try:
                str(value, "utf-8")
            except UnicodeDecodeError:
                raise _FormatError(_TRUNCATED) from None
        else:
            raise _FormatError(_OTHER_BYTES)
    return size


def _is_int32(value: int) -> bool:
    """Whether a varint is an int32 that is written at all: zero is not."""
    return 0 < value < 1 << 31 or value >= (1 << 64) - (1 << 31)


def _fields(contents: memoryview, repeated: int = 0) -> Iterator[tuple[int, int | memoryview]]:
    """Yields the number and the value of each field of a message.

    A message may be cut between two entries of a list, or have anything behind it, and still be
    valid. Writers of protocol buffers put fields in order of their numbers, each once, and lists of
    numbers in one piece; only that is accepted.

    Args:
      contents: The message.
      repeated: The number of the one field that may occur several times.
    """
    position, last = 0, 0
    while position < len(contents):
        key, position = _varint(contents, position)
        number, kind = key >> 3, key & 7
        if number < last or (number == last and number != repeated) or kind not in (0, 2):
            raise _FormatError(_OTHER_BYTES)
        last = number
        value, position = _varint(contents, position)
        if kind == 0:
            yield number, value
            continue
        if position + value > len(contents):
            raise _FormatError(_TRUNCATED)
        yield number, contents[position : position + value]
        position += value


def _varint(contents: memoryview, position: int) -> tuple[int, int]:
    """The number of seven bits a byte that begins at a position, and where it ends."""
    value = 0
    for index, byte in enumerate(contents[position : position + 10]):
        value |= (byte & 127) << (7 * index)
        if byte < 128:
            if (index and not byte) or value >> 64:
                raise _FormatError(_OTHER_BYTES)  # longer than it is written
            return value, position + index + 1
    raise _FormatError(_TRUNCATED)


def _refusal(name: str, reason: str) -> ValueError:
    return ValueError(f"{name} is no tensor that can be read: {reason}; {_EXPECTED}.")
