"""Reads matrices published elsewhere: B and C of MF-DP-FTRL, as TensorFlow tensors.

A directory has ``b_matrix_tensor_pb`` and ``c_matrix_tensor_pb``, the decoder B and the strategy
matrix C of A = BC, and ``lr_vector_tensor_pb`` if the workload A has a schedule of learning rates.
Noise and privacy depend only on C, whose sensitivity is computed here. B shows for which workload C
was made, and that both files belong together.

``tf.io.serialize_tensor`` and ``tf.make_tensor_proto(...).SerializeToString()`` write a
``tensorflow.TensorProto`` (tensorflow/core/framework/tensor.proto), which is read here without
TensorFlow and protobuf: its data type (1), shape (2), and values as bytes (4) or as numbers (6), in
this order, each once. A file that holds anything else is refused.
"""

import math
import os
import pathlib

import numpy as np

from mf_aggregators import inputs
from mf_aggregators.factorizations import BandedFactorization, DenseFactorization, Factorization
from mf_aggregators.factorizations.factorization import bands_of_matrix
from mf_aggregators.kernel.numbers import FloatArray
from mf_aggregators.workloads import Workload

_DECODER_FILE = "b_matrix_tensor_pb"
_STRATEGY_FILE = "c_matrix_tensor_pb"
_LEARNING_RATES_FILE = "lr_vector_tensor_pb"
# Entries above the diagonal are taken as rounding errors of a solver up to this size, relative to
# the largest entry. They become zeros in the C that noise and accounting use.
_NEGLIGIBLE_ABOVE = 1e-9
# Entries below the last band are taken as rounding errors up to this size, relative to the largest
# entry. With larger ones, the matrix counts as dense.
_ROUNDING = 1e-12
# The largest condition number (by column sums): above it, the noise would be mostly rounding
# errors.
_LARGEST_CONDITION_NUMBER = 1e12
# The relative tolerance for entries of B C. Matrices in float64 reach 1e-12; this tolerance also
# accepts matrices that were stored with fewer digits, and changes stated errors by at most one in a
# million. Privacy does not depend on it.
_WORKLOAD_TOLERANCE = 1e-6
# The recovered momentum is rounded to this many digits if the rounded one fits as well.
_DIGITS_OF_MOMENTUM = 6
_ROUNDING_OF_MOMENTUM = 1e-7
# tensorflow.DataType of a float64 tensor.
_DT_DOUBLE = 2
# The numbers of a tensor's fields: its data type, its shape, and its values as bytes or numbers.
_TYPE, _SHAPE, _CONTENT, _VALUES = 1, 2, 4, 6
_EXPECTED = "expected a serialized TensorProto of float64, as tf.io.serialize_tensor writes it"
_OTHER_BYTES = "it is truncated, or holds other bytes than those of a float64 tensor"


def load(directory: str | os.PathLike[str]) -> tuple[Factorization, Workload] | None:
    """Reads and checks published matrices.

    Entries of C that are only rounding errors are set to zero first.

    Args:
      directory: The directory with the two or three files, which may be missing.

    Returns:
      The factorization with the strategy matrix C (banded if C is), and the workload B C with its
      learning rates. The schema for which C was optimised is not known. None if neither matrix
      exists.

    Raises:
      ValueError: If a file is missing or not a float64 tensor, if the matrices are not lower
        triangular, finite and of the same size, if C is nearly singular, or if B C is neither the
        prefix sum nor the workload of momentum SGD with the given learning rates; the message names
        the file and the reason.
    """
    path = pathlib.Path(directory)
    if not any((path / name).exists() for name in (_DECODER_FILE, _STRATEGY_FILE)):
        return None
    for name, other in ((_DECODER_FILE, _STRATEGY_FILE), (_STRATEGY_FILE, _DECODER_FILE)):
        if not (path / name).exists():
            raise ValueError(
                f"{path / name} is missing: published matrices are {_DECODER_FILE} and "
                f"{_STRATEGY_FILE}, and only {other} is there."
            )
    strategy = _lower_triangular(path / _STRATEGY_FILE)
    decoder = _lower_triangular(path / _DECODER_FILE)
    if decoder.shape != strategy.shape:
        raise ValueError(
            f"{path / _DECODER_FILE} is for {decoder.shape[0]} rounds, and {_STRATEGY_FILE} for "
            f"{strategy.shape[0]}: they belong to different factorizations."
        )
    _check_condition(strategy, path / _STRATEGY_FILE)
    num_rounds = strategy.shape[0]
    rates = _learning_rates(path / _LEARNING_RATES_FILE, num_rounds)
    # A product that overflows is refused below, because it is not a workload.
    with np.errstate(over="ignore", invalid="ignore"):
        workload = _workload(np.tril(decoder @ strategy), rates, path)
    num_bands = _num_bands(strategy)
    parameters = {
        "source": f"{path.resolve().name}/{_STRATEGY_FILE}",
        "num_bands": num_bands,
        "workload": workload.fingerprint(),
    }
    if num_bands < num_rounds:
        bands = bands_of_matrix(strategy, num_bands)
        return BandedFactorization(bands, parameters=parameters), workload
    return DenseFactorization(strategy, parameters=parameters), workload


def _lower_triangular(file: pathlib.Path) -> FloatArray:
    """Reads a matrix; negligible entries above its diagonal become zero."""
    matrix = inputs.square_matrix(_read_tensor(file), str(file))
    above = np.abs(np.triu(matrix, 1))
    row, column = np.unravel_index(np.argmax(above), above.shape)
    # The comparison is strict, so that a zero matrix is refused by the check of its diagonal.
    if above[row, column] > _NEGLIGIBLE_ABOVE * np.max(np.abs(matrix)):
        raise ValueError(
            f"{file} must be lower triangular, found {matrix[row, column]:.6g} in row {row + 1}, "
            f"column {column + 1}, above the diagonal."
        )
    return np.tril(matrix)


def _check_condition(strategy: FloatArray, file: pathlib.Path) -> None:
    # The condition number is infinite for a singular matrix.
    condition = np.linalg.cond(strategy, 1)
    if not condition <= _LARGEST_CONDITION_NUMBER:
        raise ValueError(
            f"{file} is singular or close to it: its condition number is {condition:.2g}, and "
            f"above {_LARGEST_CONDITION_NUMBER:.0e} its noise would be mostly rounding errors."
        )


def _num_bands(strategy: FloatArray) -> int:
    """The number of diagonals up to the last one with more than rounding errors."""
    negligible = _ROUNDING * np.max(np.abs(strategy))
    lag = strategy.shape[0] - 1
    while np.max(np.abs(np.diagonal(strategy, -lag))) <= negligible:
        lag -= 1
    return lag + 1


def _learning_rates(file: pathlib.Path, num_rounds: int) -> FloatArray | None:
    """Reads the learning rates, a vector or a matrix of one row or column; None without them."""
    if not file.exists():
        return None
    rates = _read_tensor(file)
    if rates.size != num_rounds or max(rates.shape, default=1) != num_rounds:
        raise ValueError(
            f"{file} must hold one learning rate for each of the {num_rounds} rounds, found an "
            f"array of shape {rates.shape}."
        )
    # A rate of zero would make the workload, and B with it, singular.
    if not np.all(np.isfinite(rates)) or np.any(rates <= 0.0):
        raise ValueError(f"{file} must hold learning rates that are finite and above zero.")
    return rates.ravel()


def _workload(product: FloatArray, rates: FloatArray | None, directory: pathlib.Path) -> Workload:
    """Returns the workload that equals B C.

    With M = M_eta M_beta, M_eta[i, j] = eta_j and M_beta[i, j] = beta^(i - j) for i >= j
    (Denisov et al., Prop. 4.2), row i of the differences of M's rows is eta_i beta^(i - j):
    its diagonal has the learning rates, and the diagonal below it has beta times these.
    """
    num_rounds = len(product)
    differences = np.diff(product, axis=0, prepend=0.0)
    found_rates, below = np.diagonal(differences), np.diagonal(differences, -1)
    # The least-squares estimate of beta from eta_i and eta_i beta. A chosen momentum has few
    # digits.
    weight = float(np.dot(found_rates[1:], found_rates[1:]))
    momentum = float(np.dot(found_rates[1:], below)) / weight if weight > 0.0 else 0.0
    rounded = round(momentum, _DIGITS_OF_MOMENTUM)
    if abs(momentum - rounded) <= _ROUNDING_OF_MOMENTUM or rounded == 0.0:
        # Rounding turns small negative numbers into -0.0.
        momentum = rounded + 0.0
    where = ""
    if 0.0 <= momentum < 1.0:
        workload = _named(num_rounds, momentum, np.ones(num_rounds) if rates is None else rates)
        expected = workload.matrix()
        # Entries of a product have rounding errors relative to its largest entries.
        allowed = _WORKLOAD_TOLERANCE * expected + _ROUNDING * np.max(expected)
        ratios = np.abs(product - expected) / allowed
        if np.all(ratios <= 1.0):
            return workload
        row, column = np.unravel_index(np.argmax(ratios), ratios.shape)
        where = f" The largest deviation is in row {row + 1}, column {column + 1}."
    raise ValueError(
        f"{directory / _DECODER_FILE} times {_STRATEGY_FILE} is neither the prefix sum nor the "
        f"workload of momentum SGD with the learning rates of {_LEARNING_RATES_FILE}, or of 1 "
        f"without it: the learning rates of the product are {np.min(found_rates):.6g} to "
        f"{np.max(found_rates):.6g}, and its momentum is {momentum:.6g}.{where}"
    )


def _named(num_rounds: int, momentum: float, rates: FloatArray) -> Workload:
    learning_rates = None if np.all(rates == 1.0) else tuple(float(rate) for rate in rates)
    if momentum == 0.0 and learning_rates is None:
        return Workload("prefix_sum", num_rounds)
    return Workload("momentum_sgd", num_rounds, momentum, learning_rates)


def _read_tensor(file: pathlib.Path) -> FloatArray:
    """The float64 tensor in a file; a ValueError names the file and the reason if there is none."""
    try:
        return _tensor(file.read_bytes())
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}.") from error
    except (OverflowError, TypeError, ValueError) as error:
        reason = str(error) if isinstance(error, ValueError) else _OTHER_BYTES
        raise ValueError(f"{file} is not a readable tensor: {reason}; {_EXPECTED}.") from None


def _tensor(contents: bytes) -> FloatArray:
    """The tensor of a serialized TensorProto; raises an error for other bytes."""
    fields = _fields(contents)
    if dict(fields).get(_TYPE, _DT_DOUBLE) != _DT_DOUBLE:
        raise ValueError(f"its data type has the number {dict(fields)[_TYPE]!r}, not {_DT_DOUBLE}")
    names = [name for name, _ in fields]
    if names[:2] != [_TYPE, _SHAPE] or names[2:] not in ([], [_CONTENT], [_VALUES]):
        raise ValueError(_OTHER_BYTES)
    dimensions = _fields(inputs.part(fields[1][1], bytes))
    if any(name != 2 for name, _ in dimensions):
        raise ValueError(_OTHER_BYTES)
    sizes = (dict(_fields(inputs.part(each, bytes))).get(1, 0) for _, each in dimensions)
    shape = tuple(inputs.part(size, int) for size in sizes)
    values = inputs.part(fields[2][1], bytes) if fields[2:] else b""
    if len(values) != 8 * math.prod(shape):
        raise ValueError(
            f"it holds {len(values)} bytes of values, and its shape {shape} needs "
            f"{8 * math.prod(shape)}"
        )
    return np.array(np.frombuffer(values, "<f8").reshape(shape))


def _fields(message: bytes) -> list[tuple[int, int | bytes]]:
    """The fields of a protocol buffer message: their numbers, with an int or bytes each."""
    found, rest = list[tuple[int, int | bytes]](), memoryview(message)
    while rest:
        key, rest = _varint(rest)
        value, rest = _varint(rest)
        if not key >> 3:
            raise ValueError(_OTHER_BYTES)
        if key & 7 == 2 and value <= len(rest):
            found.append((key >> 3, bytes(rest[:value])))
            rest = rest[value:]
        elif key & 7 == 0:
            found.append((key >> 3, value))
        else:
            raise ValueError(_OTHER_BYTES)
    return found


def _varint(view: memoryview) -> tuple[int, memoryview]:
    """Reads a variable-length integer (seven bits a byte); returns it and the remaining bytes."""
    # Longer numbers have more than 64 bits.
    for length, byte in enumerate(view[:10], start=1):
        if byte < 128:
            return sum((each & 127) << 7 * i for i, each in enumerate(view[:length])), view[length:]
    raise ValueError(_OTHER_BYTES)
