"""Tensors in files of TensorFlow's format, read without TensorFlow.

``tf.io.serialize_tensor`` and ``tf.make_tensor_proto(...).SerializeToString()`` write a
``tensorflow.TensorProto`` (tensorflow/core/framework/tensor.proto). Of this message only the
fields that a float64 tensor uses are described here; a file that holds anything else, or is
not byte for byte what these fields are written as, is refused rather than guessed at.
"""

import math
import os
import pathlib
from typing import Any

import numpy as np
from google.protobuf import (  # type: ignore[import-untyped]
    descriptor_pb2,
    descriptor_pool,
    message,
    message_factory,
)

# tensorflow.DataType of a float64 tensor.
_DT_DOUBLE = 2
# Protocol buffers hold at most 2 GiB less a byte; a constant of more entries than fit into
# that is refused as well, since a few bytes could ask for any amount of memory.
_MOST_BYTES = (1 << 31) - 1
_MOST_ENTRIES = _MOST_BYTES // 8
# Of NumPy before 2.0.
_MOST_DIMENSIONS = 32
_EXPECTED = "expected a serialized TensorProto of float64, as tf.io.serialize_tensor writes it"

_Field = descriptor_pb2.FieldDescriptorProto
# Messages by name, and of each field its name, number, type, message type and label. An
# enumeration travels as an int32 does.
_FIELDS: dict[str, tuple[tuple[str, int, int, str, int], ...]] = {
    "Dimension": (
        ("size", 1, _Field.TYPE_INT64, "", _Field.LABEL_OPTIONAL),
        ("name", 2, _Field.TYPE_STRING, "", _Field.LABEL_OPTIONAL),
    ),
    "Shape": (
        ("dim", 2, _Field.TYPE_MESSAGE, "Dimension", _Field.LABEL_REPEATED),
        ("unknown_rank", 3, _Field.TYPE_BOOL, "", _Field.LABEL_OPTIONAL),
    ),
    "Tensor": (
        ("dtype", 1, _Field.TYPE_INT32, "", _Field.LABEL_OPTIONAL),
        ("tensor_shape", 2, _Field.TYPE_MESSAGE, "Shape", _Field.LABEL_OPTIONAL),
        ("version_number", 3, _Field.TYPE_INT32, "", _Field.LABEL_OPTIONAL),
        ("tensor_content", 4, _Field.TYPE_BYTES, "", _Field.LABEL_OPTIONAL),
        ("double_val", 6, _Field.TYPE_DOUBLE, "", _Field.LABEL_REPEATED),
    ),
}


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
    try:
        tensor = _MESSAGE.FromString(contents)
    except (message.DecodeError, UnicodeDecodeError):
        raise _refusal(name, "it is truncated or no TensorProto") from None
    if not contents:
        raise _refusal(name, "it is empty")
    if tensor.dtype != _DT_DOUBLE:
        # Before all else: a tensor of another type holds fields that are not known here.
        raise _refusal(name, f"its data type has the number {tensor.dtype}, not {_DT_DOUBLE}")
    # A message may be cut between two entries of a list, or have anything behind it, and still
    # be parsed. Writers of protocol buffers put fields in order of their numbers and lists in
    # one piece, of which no part but the whole is written back as it was.
    tensor.DiscardUnknownFields()
    if tensor.SerializeToString() != contents:
        raise _refusal(name, "it holds other bytes than those of a float64 tensor")
    shape = _shape(tensor, name)
    size = math.prod(shape)
    if tensor.tensor_content:
        if len(tensor.double_val):
            raise _refusal(name, "it states its values twice")
        if len(tensor.tensor_content) != 8 * size:
            raise _refusal(
                name,
                f"it holds {len(tensor.tensor_content)} bytes of values, and its shape {shape} "
                f"needs {8 * size}",
            )
        values = np.frombuffer(tensor.tensor_content, dtype="<f8").astype(np.float64)
        return values.reshape(shape)
    given = len(tensor.double_val)
    # TensorFlow reads a tensor without values as zeros; a file cut short looks the same.
    if given > size or (size > 0 and given == 0):
        raise _refusal(name, f"it holds {given} values, and its shape {shape} needs {size}")
    values = np.empty(size)
    values[:given] = tensor.double_val
    if given:
        values[given:] = values[given - 1]
    return values.reshape(shape)


def _shape(tensor: Any, name: str) -> tuple[int, ...]:
    if not tensor.HasField("tensor_shape") or tensor.tensor_shape.unknown_rank:
        raise _refusal(name, "it states no shape")
    shape = tuple(dimension.size for dimension in tensor.tensor_shape.dim)
    if any(size < 0 for size in shape):
        raise _refusal(name, f"its shape {shape} is not fully known")
    if len(shape) > _MOST_DIMENSIONS:
        raise _refusal(name, f"its shape has {len(shape)} dimensions")
    # Sizes of zero aside: beside one, the others could be of any size.
    if math.prod(size for size in shape if size) > _MOST_ENTRIES:
        raise _refusal(name, f"its shape {shape} is of more than 2 GiB")
    return shape


def _refusal(name: str, reason: str) -> ValueError:
    return ValueError(f"{name} is no tensor that can be read: {reason}; {_EXPECTED}.")


def _message_class() -> Any:
    """Returns the class of the messages, from a pool of its own.

    In the default pool the description would clash with TensorFlow's, if that is imported.
    """
    package = "mf_aggregators.checkpoints.tensor_protos"
    file = descriptor_pb2.FileDescriptorProto(
        name="mf_aggregators/tensor_protos.proto", package=package, syntax="proto3"
    )
    for message_name, fields in _FIELDS.items():
        described = file.message_type.add(name=message_name)
        for field_name, number, kind, type_name, label in fields:
            field = described.field.add(name=field_name, number=number, type=kind, label=label)
            if type_name:
                field.type_name = f".{package}.{type_name}"
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    descriptor = pool.FindMessageTypeByName(f"{package}.Tensor")
    if hasattr(message_factory, "GetMessageClass"):
        return message_factory.GetMessageClass(descriptor)
    # Before protobuf 4.22.
    return message_factory.MessageFactory(pool).GetPrototype(descriptor)


_MESSAGE = _message_class()
