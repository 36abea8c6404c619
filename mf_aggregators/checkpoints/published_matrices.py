"""Matrices published elsewhere: B and C of earlier MF-DP-FTRL work, in TensorFlow's format.

A directory holds ``b_matrix_tensor_pb`` and ``c_matrix_tensor_pb``, the decoder B and the
strategy matrix C of A = BC, and ``lr_vector_tensor_pb`` where the workload A has a schedule of
learning rates. C alone decides noise and privacy: whatever a publication says about its
sensitivity, here it is computed from C. B says what C is for, and that the two belong together.

``tf.io.serialize_tensor`` and ``tf.make_tensor_proto(...).SerializeToString()`` write a
``tensorflow.TensorProto`` (tensorflow/core/framework/tensor.proto), which is read here without
TensorFlow and protobuf: its data type (1), shape (2), and values as bytes (4) or as numbers (6), in
this order, each once. A file that holds anything else is refused.
"""

import math
import os
import pathlib
import re

import numpy as np
import scipy.linalg

from mf_aggregators import inputs, workloads
from mf_aggregators.factorizations import BandedFactorization, DenseFactorization, Factorization
from mf_aggregators.kernel.numbers import FloatArray
from mf_aggregators.linear_algebra.banded_matrices import bands_of_matrix
from mf_aggregators.workloads import Workload

DECODER_FILE = "b_matrix_tensor_pb"
STRATEGY_FILE = "c_matrix_tensor_pb"
LEARNING_RATES_FILE = "lr_vector_tensor_pb"
# Entries above the diagonal, relative to the largest magnitude, that may be what a solver
# left there. They become zeros of the C that both the noise and the accounting use.
_NEGLIGIBLE_ABOVE = 1e-9
# The same for entries below the last band: only rounding, since small entries far from the
# diagonal are what tells a dense matrix from a banded one.
_ROUNDING = 1e-12
# In the norm that is the largest column sum; noise of such a C would be rounding errors.
_LARGEST_CONDITION_NUMBER = 1e12
# How far an entry of B C may be from the workload's, relative to it. Matrices solved for and
# stored in float64 reach 1e-12; one in a million also admits those that passed through fewer
# digits on their way, and changes stated errors by no more than that. Privacy does not depend
# on it.
_WORKLOAD_TOLERANCE = 1e-6
# A recovered momentum that is this close to one of few digits is taken to be that.
_DIGITS_OF_MOMENTUM = 6
_ROUNDING_OF_MOMENTUM = 1e-7
# tensorflow.DataType of a float64 tensor.
_DT_DOUBLE = 2
# The fields that a tensor begins with: its data type, and the dimensions of its shape, unnamed.
_VARINT = rb"[\x80-\xff]{0,9}[\x00-\x7f]"
_DIMENSION = re.compile(rb"\x12[\x00-\x0b](?:\x08(" + _VARINT + rb"))?")
_HEAD = re.compile(rb"\x08\x02\x12" + _VARINT + rb"((?:" + _DIMENSION.pattern + rb")*)")
# The key of a field with its values as bytes, and that of their list.
_CONTENT, _LIST = 0x22, 0x32
# Protocol buffers hold at most 2 GiB less a byte; a constant of more entries than fit into
# that is refused as well, since a few bytes could ask for any amount of memory.
_MOST_BYTES = (1 << 31) - 1
_MOST_ENTRIES = _MOST_BYTES // 8
# NumPy before 2.0 has no more.
_MOST_DIMENSIONS = 32
_EXPECTED = "expected a serialized TensorProto of float64, as tf.io.serialize_tensor writes it"
_OTHER_BYTES = "it is truncated, or holds other bytes than those of a float64 tensor"


def is_published(directory: str | os.PathLike[str]) -> bool:
    """Returns whether a directory holds published matrices, be it one of the two alone."""
    path = pathlib.Path(directory)
    return any((path / name).exists() for name in (DECODER_FILE, STRATEGY_FILE))


def load(directory: str | os.PathLike[str]) -> tuple[Factorization, Workload]:
    """Reads and checks published matrices.

    Entries of C that can only be left-overs of its computation are set to zero before
    anything follows from it.

    Args:
      directory: The directory of the two or three files.

    Returns:
      The factorization with the strategy matrix C, banded where C is, and the workload that
      B C is, with its learning rates. Nobody says which schema C was optimised for.

    Raises:
      ValueError: If a file is missing or no float64 tensor, the matrices are not lower
        triangular, finite and of one size, C is singular or close to it, or B C is neither
        the prefix sum nor that of momentum SGD with the learning rates stated; the message
        names the file and the reason.
    """
    path = pathlib.Path(directory)
    for name, other in ((DECODER_FILE, STRATEGY_FILE), (STRATEGY_FILE, DECODER_FILE)):
        if not (path / name).exists():
            raise ValueError(
                f"{path / name} is missing: published matrices are {DECODER_FILE} and "
                f"{STRATEGY_FILE}, and only {other} is there."
            )
    strategy = _lower_triangular(path / STRATEGY_FILE)
    decoder = _lower_triangular(path / DECODER_FILE)
    if decoder.shape != strategy.shape:
        raise ValueError(
            f"{path / DECODER_FILE} is for {decoder.shape[0]} rounds, and {STRATEGY_FILE} for "
            f"{strategy.shape[0]}: they are not of one factorization."
        )
    _check_condition(strategy, path / STRATEGY_FILE)
    num_rounds = strategy.shape[0]
    rates = _learning_rates(path / LEARNING_RATES_FILE, num_rounds)
    # A product that overflows is refused below as no workload.
    with np.errstate(over="ignore", invalid="ignore"):
        workload = _workload(np.tril(decoder @ strategy), rates, path)
    num_bands = _num_bands(strategy)
    parameters = {
        "source": f"{path.resolve().name}/{STRATEGY_FILE}",
        "num_bands": num_bands,
        "workload": workloads.fingerprint(workload),
    }
    if num_bands < num_rounds:
        bands = bands_of_matrix(strategy, num_bands)
        return BandedFactorization(bands, parameters=parameters), workload
    return DenseFactorization(strategy, parameters=parameters), workload


def _lower_triangular(file: pathlib.Path) -> FloatArray:
    """Reads a matrix; negligible entries above its diagonal become zero."""
    matrix = inputs.square_matrix(read_tensor(file), str(file))
    above = np.abs(np.triu(matrix, 1))
    row, column = np.unravel_index(np.argmax(above), above.shape)
    # Written so that a matrix of zeros is left to the check of its diagonal.
    if above[row, column] > _NEGLIGIBLE_ABOVE * np.max(np.abs(matrix)):
        raise ValueError(
            f"{file} must be lower triangular, found {matrix[row, column]:.6g} in row {row + 1}, "
            f"column {column + 1}, above the diagonal."
        )
    return np.tril(matrix)


def _check_condition(strategy: FloatArray, file: pathlib.Path) -> None:
    zeros = np.flatnonzero(np.diagonal(strategy) == 0.0)
    if len(zeros):
        raise ValueError(
            f"{file} is singular: its diagonal is zero in row {zeros[0] + 1}, and noise rows need "
            "an inverse."
        )
    with np.errstate(over="ignore", invalid="ignore"):
        inverse = scipy.linalg.solve_triangular(
            strategy, np.eye(strategy.shape[0]), lower=True, check_finite=False
        )
        condition = np.linalg.norm(strategy, 1) * np.linalg.norm(inverse, 1)
    # Written so that NaN does not pass.
    if not condition <= _LARGEST_CONDITION_NUMBER:
        raise ValueError(
            f"{file} is close to singular: its condition number is {condition:.2g}, and above "
            f"{_LARGEST_CONDITION_NUMBER:.0e} its noise would be mostly rounding errors."
        )


def _num_bands(strategy: FloatArray) -> int:
    """The number of diagonals up to the last that holds more than rounding errors."""
    negligible = _ROUNDING * np.max(np.abs(strategy))
    lag = strategy.shape[0] - 1
    while np.max(np.abs(np.diagonal(strategy, -lag))) <= negligible:
        lag -= 1
    return lag + 1


def _learning_rates(file: pathlib.Path, num_rounds: int) -> FloatArray | None:
    """Reads the learning rates, a vector or a matrix of one row or column; None without them."""
    if not file.exists():
        return None
    rates = read_tensor(file)
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
    """Returns the workload that B C is.

    With M = M_eta M_beta, M_eta[i, j] = eta_j and M_beta[i, j] = beta^(i - j) for i >= j
    (Denisov et al., Prop. 4.2), row i of the differences of M's rows is eta_i beta^(i - j):
    its diagonal holds the learning rates, and the one below it beta times as much.

    B may lack the learning rates that are stated beside it, if B C is then exactly the workload
    without them. What a run computes has them all the same.
    """
    num_rounds = len(product)
    differences = np.diff(product, axis=0, prepend=0.0)
    found_rates = np.diagonal(differences).copy()
    momentum = _momentum(found_rates, np.diagonal(differences, -1))
    stated = np.ones(num_rounds) if rates is None else rates
    for eta in (stated, np.ones(num_rounds)):
        for beta in _candidates(momentum):
            if _deviation(product, _matrix(num_rounds, beta, eta)) is None:
                return _named(num_rounds, beta, stated)
    file = directory / DECODER_FILE
    if np.all(found_rates > 0.0) and any(
        _deviation(product, _matrix(num_rounds, beta, found_rates)) is None
        for beta in _candidates(momentum)
    ):
        if rates is None:
            raise ValueError(
                f"{directory / LEARNING_RATES_FILE} is missing: {DECODER_FILE} times "
                f"{STRATEGY_FILE} has learning rates from {np.min(found_rates):.6g} to "
                f"{np.max(found_rates):.6g}, which it must state."
            )
        worst = int(np.argmax(np.abs(found_rates - rates) / rates))
        raise ValueError(
            f"{directory / LEARNING_RATES_FILE} states a learning rate of {rates[worst]:.9g} for "
            f"round {worst + 1}, and {DECODER_FILE} times {STRATEGY_FILE} has "
            f"{found_rates[worst]:.9g}: they are not of one factorization."
        )
    beta = next(iter(_candidates(momentum)), 0.0)
    expected = _matrix(num_rounds, beta, stated)
    row, column = _deviation(product, expected) or (0, 0)
    raise ValueError(
        f"{file} times {STRATEGY_FILE} is neither the prefix sum nor the workload of momentum SGD "
        f"with the learning rates stated: closest to momentum {beta:g}, the largest deviation is "
        f"in row {row + 1}, column {column + 1}, where {product[row, column]:.9g} stands for "
        f"{expected[row, column]:.9g}."
    )


def _momentum(rates: FloatArray, below: FloatArray) -> float:
    """The least-squares momentum of eta_i and eta_i beta, for i from the second round on."""
    weight = float(np.dot(rates[1:], rates[1:]))
    return float(np.dot(rates[1:], below)) / weight if weight > 0.0 else 0.0


def _candidates(momentum: float) -> list[float]:
    """Momenta to try: what may have been chosen, before what was recovered from products."""
    rounded = round(momentum, _DIGITS_OF_MOMENTUM)
    candidates = [momentum, rounded]
    # A chosen momentum has few digits, and the prefix sum has none.
    if abs(momentum - rounded) <= _ROUNDING_OF_MOMENTUM or rounded == 0.0:
        candidates.reverse()
    # Rounding makes -0.0 of small negative numbers.
    return [candidate + 0.0 for candidate in candidates if 0.0 <= candidate < 1.0]


def _named(num_rounds: int, momentum: float, rates: FloatArray) -> Workload:
    learning_rates = None if np.all(rates == 1.0) else tuple(float(rate) for rate in rates)
    if momentum == 0.0 and learning_rates is None:
        return Workload("prefix_sum", num_rounds)
    return Workload("momentum_sgd", num_rounds, momentum, learning_rates)


def _matrix(num_rounds: int, momentum: float, rates: FloatArray) -> FloatArray:
    return _named(num_rounds, momentum, rates).matrix()


def _deviation(product: FloatArray, expected: FloatArray) -> tuple[int, int] | None:
    """Where a product is farthest from a workload, relative to it; None if it is one."""
    # Sums of a product are rounded relative to their largest entries.
    allowed = _WORKLOAD_TOLERANCE * expected + _ROUNDING * np.max(expected)
    ratios = np.abs(product - expected) / allowed
    row, column = np.unravel_index(np.argmax(ratios), ratios.shape)
    return None if ratios[row, column] <= 1.0 else (int(row), int(column))


def read_tensor(path: str | os.PathLike[str]) -> FloatArray:
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
    return parse_tensor(contents, str(file))


def parse_tensor(contents: bytes, name: str) -> FloatArray:
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
        return _tensor(contents)
    except _FormatError as error:
        raise ValueError(f"{name} is no tensor that can be read: {error}; {_EXPECTED}.") from None


class _FormatError(Exception):
    """Why bytes are no tensor that is read here."""


def _tensor(contents: bytes) -> FloatArray:
    if len(contents) > 1 and contents[0] == 0x08 and contents[1] != _DT_DOUBLE:
        raise _FormatError(f"its data type has the number {contents[1]}, not {_DT_DOUBLE}")
    found = _HEAD.match(contents)
    shape = tuple(map(_number, _DIMENSION.findall(found[1]))) if found else ()
    # Sizes of zero are left out: the others could then be of any size.
    if len(shape) > _MOST_DIMENSIONS or math.prod(size or 1 for size in shape) > _MOST_ENTRIES:
        raise _FormatError(f"its shape {shape} is of more than 2 GiB or too many dimensions")
    size = math.prod(shape)
    dimensions = (b"\x08" + _varint(each) if each else b"" for each in shape)
    dimensions_with_keys = b"".join(b"\x12" + _varint(len(each)) + each for each in dimensions)
    head = b"\x08\x02\x12" + _varint(len(dimensions_with_keys)) + dimensions_with_keys
    if not contents.startswith(head):
        raise _FormatError(_OTHER_BYTES)
    key, length = 0, 0
    if len(contents) > len(head):
        key, start = contents[len(head)], len(head) + 1
        for digits in range(1, 6):
            if contents[start : start + digits] == _varint(max(0, len(contents) - start - digits)):
                length = len(contents) - start - digits
        if key not in (_CONTENT, _LIST) or length <= 0:
            raise _FormatError(_OTHER_BYTES)
    # The last entry of a list stands for all that follow. A file cut short has none.
    is_cut = key == _LIST and length < 8 * size and length % 8 == 0
    if not is_cut and length != 8 * size:
        raise _FormatError(
            f"it holds {length} bytes of values, and its shape {shape} needs {8 * size}"
        )
    values = np.frombuffer(contents, "<f8", length // 8, len(contents) - length)
    rest = np.full(size - len(values), values[-1] if is_cut else 0.0)
    return np.asarray(np.concatenate([values, rest]).reshape(shape))


def _number(varint: bytes) -> int:
    """The number of a varint: seven bits a byte, the lowest first; 0 of none."""
    return sum((byte & 127) << (7 * index) for index, byte in enumerate(varint))


def _varint(number: int) -> bytes:
    head = bytearray()
    while number > 127:
        head.append(number & 127 | 128)
        number >>= 7
    return bytes([*head, number])
