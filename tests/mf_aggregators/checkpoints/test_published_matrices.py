"""Matrices published elsewhere: read, checked, and accounted from C itself."""

import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import hypothesis.extra.numpy
import numpy as np
import pytest
import scipy.linalg
import tensorflow as tf
from hypothesis import example, given, settings
from hypothesis import strategies as st

import mf_aggregators as mfa
from mf_aggregators import checkpoints, workloads
from mf_aggregators.checkpoints import CheckpointError, published_matrices
from mf_aggregators.factorizations import (
    BandedFactorization,
    DenseFactorization,
    Factorization,
    banded,
    identity,
    optimal,
    toeplitz,
)
from mf_aggregators.participation import (
    FixedEpochOrder,
    MinSeparation,
    Participation,
    SingleParticipation,
)
from mf_aggregators.workloads import Workload
from tests import console_commands
from tests.examples import examples
from tests.refusals import refuses

_RATES = tuple(float(rate) for rate in np.linspace(1.0, 0.05, 16))
_SCHEMAS: list[Participation] = [
    SingleParticipation(),
    FixedEpochOrder(2, 6),
    MinSeparation(4, 3),
    MinSeparation(2),
]


def _write(directory: pathlib.Path, name: str, array: Any) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    tensor = tf.constant(array, tf.float64)
    (directory / name).write_bytes(tf.io.serialize_tensor(tensor).numpy())


def _publish(
    directory: pathlib.Path, workload: np.ndarray, strategy: np.ndarray, learning_rates: Any = None
) -> pathlib.Path:
    """Writes B, C and learning rates as earlier work did: B = A C^-1 from a solver."""
    decoder = scipy.linalg.solve(strategy.T, workload.T).T
    _write(directory, published_matrices._DECODER_FILE, decoder)
    _write(directory, published_matrices._STRATEGY_FILE, strategy)
    if learning_rates is not None:
        _write(directory, published_matrices._LEARNING_RATES_FILE, learning_rates)
    return directory


def _examples() -> list[tuple[Factorization, Workload]]:
    prefix_sum = Workload("prefix_sum", 16)
    momentum = Workload("momentum_sgd", 16, 0.95)
    scheduled = Workload("momentum_sgd", 16, 0.9, _RATES)
    rates_alone = Workload("momentum_sgd", 16, 0.0, _RATES)
    long = Workload("momentum_sgd", 300, 0.95, tuple(np.geomspace(1.0, 1e-3, 300)))
    return [
        (banded(prefix_sum, 4), prefix_sum),
        (optimal(prefix_sum.matrix()), prefix_sum),
        (identity(16), prefix_sum),
        (identity(1), Workload("prefix_sum", 1)),
        (toeplitz(16), momentum),
        (banded(scheduled, 2), scheduled),
        (optimal(scheduled.matrix(), MinSeparation(16)), scheduled),
        (optimal(rates_alone.matrix()), rates_alone),
        (toeplitz(300, 20), long),
    ]


@pytest.mark.parametrize(("factorization", "workload"), _examples())
def test_what_was_published_is_loaded(
    factorization: Factorization, workload: Workload, tmp_path: pathlib.Path
) -> None:
    strategy = factorization.strategy_matrix()
    _publish(tmp_path, workload.matrix(), strategy, workload.learning_rates)
    loaded, description = checkpoints.load_with_description(tmp_path)
    np.testing.assert_array_equal(loaded.strategy_matrix(), strategy)
    np.testing.assert_allclose(
        loaded.noising_matrix(), factorization.noising_matrix(), rtol=1e-9, atol=1e-12
    )
    num_bands = np.max(np.subtract(*np.nonzero(strategy))) + 1
    expected = DenseFactorization if 1 < num_bands == len(strategy) else BandedFactorization
    if len(strategy) > 1:
        assert type(loaded) is expected
    assert loaded.parameters["num_bands"] == num_bands
    assert loaded.participation is None
    assert loaded.optimality_gap is None
    for schema in _SCHEMAS:
        own = mfa.sensitivity.compute(strategy, schema)
        assert loaded.sensitivity(schema).value == pytest.approx(own.value, rel=1e-12)
        assert loaded.sensitivity(schema).is_exact == own.is_exact
        assert loaded.rmse(workload, schema) == pytest.approx(
            own.value
            * np.linalg.norm(factorization.decoder_matrix(workload))
            / len(strategy) ** 0.5
        )
    errors: Any = description["errors"]
    assert workloads.Workload.described(errors["workload"], len(strategy)) == workload
    assert errors["participation"] == {"schema": "single"}
    assert errors["sensitivity"] == loaded.sensitivity(SingleParticipation())
    assert errors["rmse"] == pytest.approx(factorization.rmse(workload, SingleParticipation()))
    assert description["mechanism"] == loaded.mechanism
    assert description["optimised_for"] is None


def test_left_overs_of_a_solver_are_zeros_of_the_matrix_that_is_used(
    tmp_path: pathlib.Path,
) -> None:
    strategy = banded(workloads.prefix_sum(16), 4).strategy_matrix()
    dirty = strategy.copy()
    dirty[2, 9] = 1e-10
    dirty[12, 3] = -1e-14
    _publish(tmp_path, workloads.prefix_sum(16), dirty)
    loaded = checkpoints.load(tmp_path)
    np.testing.assert_array_equal(loaded.strategy_matrix(), strategy)
    assert loaded.sensitivity(MinSeparation(4)).is_exact
    np.testing.assert_allclose(loaded.noising_matrix() @ strategy, np.eye(16), atol=1e-14)


def test_small_entries_below_the_bands_are_kept(tmp_path: pathlib.Path) -> None:
    strategy = banded(workloads.prefix_sum(16), 4).strategy_matrix().copy()
    strategy[12, 3] = -1e-9
    _publish(tmp_path, workloads.prefix_sum(16), strategy)
    loaded = checkpoints.load(tmp_path)
    assert loaded.parameters["num_bands"] == 10
    np.testing.assert_array_equal(loaded.strategy_matrix(), strategy)
    assert not loaded.sensitivity(MinSeparation(4)).is_exact


@pytest.mark.parametrize(
    "workload",
    [Workload("prefix_sum", 16), Workload("momentum_sgd", 16, 0.9)],
    ids=lambda workload: workload.name,
)
def test_a_decoder_of_single_precision_will_do(workload: Workload, tmp_path: pathlib.Path) -> None:
    _publish(tmp_path, workload.matrix(), toeplitz(16).strategy_matrix())
    _with(_B, lambda matrix: matrix.astype(np.float32))(tmp_path)
    assert (published_matrices.load(tmp_path) or ())[1:] == (workload,)
    _with(_B, _entry(5, 1, 0.0))(tmp_path)
    with refuses(_B, _C, "row"):
        published_matrices.load(tmp_path)


def test_rates_may_be_a_column(tmp_path: pathlib.Path) -> None:
    expected = Workload("momentum_sgd", 16, 0.9, _RATES)
    _publish(tmp_path, expected.matrix(), toeplitz(16).strategy_matrix(), _RATES)
    _with(_LR, lambda rates: rates[:, np.newaxis])(tmp_path)
    assert (published_matrices.load(tmp_path) or ())[1:] == (expected,)


def _with(name: str, change: Callable[[np.ndarray], Any]) -> Callable[[pathlib.Path], None]:
    """What replaces a tensor by a changed one."""

    def apply(directory: pathlib.Path) -> None:
        tensor = tf.io.parse_tensor((directory / name).read_bytes(), tf.float64)
        _write(directory, name, change(tensor.numpy()))

    return apply


def _entry(row: int, column: int, value: float) -> Callable[[np.ndarray], np.ndarray]:
    def change(matrix: np.ndarray) -> np.ndarray:
        changed = matrix.copy()
        changed[row, column] = value
        return changed

    return change


def _truncate(directory: pathlib.Path) -> None:
    file = directory / _C
    file.write_bytes(file.read_bytes()[:-5])


def _single_precision(directory: pathlib.Path) -> None:
    tensor = tf.io.parse_tensor((directory / _C).read_bytes(), tf.float64)
    (directory / _C).write_bytes(tf.io.serialize_tensor(tf.cast(tensor, tf.float32)).numpy())


_B = published_matrices._DECODER_FILE
_C = published_matrices._STRATEGY_FILE
_LR = published_matrices._LEARNING_RATES_FILE


@pytest.mark.parametrize(
    ("damage", "names"),
    [
        (lambda path: (path / _B).unlink(), [_B, "missing"]),
        (lambda path: (path / _C).unlink(), [_C, "missing"]),
        (lambda path: (path / _B).write_bytes(b""), [_B, "truncated"]),
        (_truncate, [_C, "truncated"]),
        (_single_precision, [_C, "data type"]),
        (_with(_C, np.transpose), [_C, "row 1, column 2"]),
        (_with(_B, np.transpose), [_B, "triangular"]),
        (_with(_C, _entry(3, 7, 1e-8)), [_C, "row 4, column 8"]),
        (_with(_C, _entry(5, 2, np.nan)), [_C, "finite"]),
        (_with(_C, lambda matrix: matrix[:, :-1]), [_C, "square"]),
        (_with(_B, lambda matrix: matrix[:-1, :-1]), [_B, "15", _C, "16"]),
        (_with(_C, _entry(4, 4, 0.0)), [_C, "singular"]),
        (_with(_C, _entry(4, 4, 1e-14)), [_C, "condition number"]),
        (_with(_B, _entry(9, 3, 0.7)), [_B, _C, "row 10"]),
        (_with(_B, lambda matrix: -matrix), [_B, _C, "momentum"]),
        (_with(_B, np.zeros_like), [_B, _C, "momentum"]),
        (_with(_B, lambda matrix: 1e300 * matrix), [_B, _C, "momentum"]),
        (_with(_B, lambda matrix: (1.0 + 1e-5) * matrix), [_LR, "learning rates"]),
        (lambda path: (path / _LR).unlink(), [_LR, "0.05 to 1"]),
        (_with(_LR, lambda rates: rates[:-1]), [_LR, "16", "(15,)"]),
        (_with(_LR, lambda rates: 0.0 * rates), [_LR, "zero"]),
        (_with(_LR, lambda rates: np.nan * rates), [_LR, "finite"]),
        (_with(_LR, lambda rates: np.where(np.arange(16) == 7, 0.5, rates)), [_LR, "row"]),
    ],
)
def test_what_is_no_factorization_of_a_workload_is_refused(
    damage: Callable[[pathlib.Path], None], names: list[str], tmp_path: pathlib.Path
) -> None:
    workload = Workload("momentum_sgd", 16, 0.9, _RATES)
    _publish(tmp_path, workload.matrix(), toeplitz(16).strategy_matrix(), _RATES)
    assert checkpoints.load(tmp_path).num_rounds == 16
    damage(tmp_path)
    with refuses(str(tmp_path), *names, error=CheckpointError) as caught:
        checkpoints.load(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "workload",
    [
        # Rates that scale columns, and momentum after them.
        workloads.momentum_sgd(16, 0.9) * np.array(_RATES),
        np.eye(16),
        workloads.momentum_sgd(16, 0.9) + 1e-4 * np.tri(16, k=-4),
        # Momentum of one, and of less than zero.
        np.cumsum(np.tri(16), axis=0),
        np.cumsum(scipy.linalg.toeplitz((-0.5) ** np.arange(16.0), np.zeros(16)), axis=0),
    ],
)
def test_other_workloads_are_refused(workload: np.ndarray, tmp_path: pathlib.Path) -> None:
    _publish(tmp_path, workload, toeplitz(16).strategy_matrix())
    with refuses("momentum", error=CheckpointError):
        checkpoints.load(tmp_path)


def test_a_checkpoint_beside_the_matrices_comes_first(tmp_path: pathlib.Path) -> None:
    checkpoints.save(identity(5), tmp_path / "c")
    _publish(tmp_path / "c", workloads.prefix_sum(16), np.eye(16))
    assert checkpoints.load(tmp_path / "c").num_rounds == 5


def test_a_copy_is_saved_as_a_checkpoint_and_the_original_is_not_replaced(
    tmp_path: pathlib.Path,
) -> None:
    _publish(tmp_path / "p", workloads.prefix_sum(16), np.tri(16, 16))
    loaded = checkpoints.load(tmp_path / "p")
    with pytest.raises(CheckpointError):
        checkpoints.save(loaded, tmp_path / "p")
    checkpoints.save(loaded, tmp_path / "c")
    again = checkpoints.load(tmp_path / "c")
    np.testing.assert_array_equal(again.strategy_matrix(), np.tri(16))
    assert again.parameters == loaded.parameters
    assert again.parameters["source"] == f"p/{_C}"


def test_mf_report_states_sensitivity_and_errors(tmp_path: pathlib.Path) -> None:
    workload = Workload("momentum_sgd", 16, 0.9, _RATES)
    factorization = banded(workload, 4)
    _publish(tmp_path, workload.matrix(), 3.0 * factorization.strategy_matrix(), _RATES)
    given = ("--separation=4", "--target_epsilon=8", "--format=json")
    fields = console_commands.call("mf-report", f"--checkpoint={tmp_path}", *given).fields()
    # Four participations of columns of norm 3.
    assert fields["sensitivity"] == pytest.approx(6.0)
    assert fields["sensitivity_is_exact"] is True
    assert fields["mechanism"] == "banded"
    assert fields["workload"] == "momentum_sgd"
    assert fields["rmse"] == pytest.approx(factorization.rmse(workload, MinSeparation(4)))
    assert fields["optimality_gap"] is None
    assert fields["epsilon"] == pytest.approx(8.0)
    assert fields["noise_state_floats_per_parameter"] == 3


_WITHOUT_TENSORFLOW = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0].startswith("tensorflow"):
            raise ImportError(name)
        return None

sys.meta_path.insert(0, Refuse())
import mf_aggregators as mfa
factorization = mfa.checkpoints.load(sys.argv[1])
assert not [name for name in sys.modules if name.startswith("tensorflow")]
print(factorization.num_bands, factorization.sensitivity(mfa.participation.MinSeparation(4)))
"""


def test_matrices_are_read_without_tensorflow(tmp_path: pathlib.Path) -> None:
    strategy = np.tri(16) - np.tri(16, k=-4)
    _publish(tmp_path, workloads.prefix_sum(16), strategy)
    finished = subprocess.run(
        [sys.executable, "-c", _WITHOUT_TENSORFLOW, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    )
    own = mfa.sensitivity.compute(strategy, MinSeparation(4))
    assert finished.stdout == f"4 {own!r}\n"


_Writer = Callable[[np.ndarray], bytes]


def _by_operation(array: np.ndarray) -> bytes:
    return bytes(tf.io.serialize_tensor(tf.constant(array)).numpy())


def _by_message(array: np.ndarray) -> bytes:
    return bytes(tf.make_tensor_proto(array).SerializeToString())


def _read(contents: bytes) -> np.ndarray:
    """The tensor of a file with these contents."""
    with tempfile.TemporaryDirectory() as directory:
        file = pathlib.Path(directory) / "tensor_pb"
        file.write_bytes(contents)
        return published_matrices._read_tensor(file)


_EVERY_WRITER = pytest.mark.parametrize("write", [_by_operation, _by_message])
_ARRAYS = hypothesis.extra.numpy.arrays(
    np.float64,
    hypothesis.extra.numpy.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5),
    elements=st.floats(),
)


@_EVERY_WRITER
@settings(deadline=None, max_examples=examples(30))
@given(array=_ARRAYS, rest=st.binary(min_size=1, max_size=24))
def test_what_tensorflow_writes_is_read_bit_by_bit(
    write: _Writer, array: np.ndarray, rest: bytes
) -> None:
    """No beginning of it is read, and nothing may follow."""
    whole = write(array)
    read = _read(whole)
    assert read.dtype == np.float64
    assert read.shape == array.shape
    assert read.tobytes() == array.tobytes()
    for contents in (whole + rest, *(whole[:length] for length in range(len(whole)))):
        with refuses("tensor_pb", "tensor"):
            _read(contents)


@settings(deadline=None, max_examples=examples(200))
@given(array=_ARRAYS, position=st.integers(0), byte=st.integers(0, 255))
@example(np.zeros((1, 1, 0)), 850, 0)
def test_damage_is_a_value_error_or_another_value(
    array: np.ndarray, position: int, byte: int
) -> None:
    contents = bytearray(_by_operation(array))
    contents[position % len(contents)] = byte
    try:
        read = _read(bytes(contents))
    except ValueError:
        return
    # TensorFlow reads the same value.
    np.testing.assert_array_equal(read, tf.io.parse_tensor(bytes(contents), tf.float64).numpy())


@_EVERY_WRITER
@pytest.mark.parametrize("array", [np.eye(2, dtype=np.float32), np.array(["text"])], ids=str)
def test_other_types_are_refused(write: _Writer, array: np.ndarray) -> None:
    with refuses("data type has the number", "float64"):
        _read(write(array))


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (lambda proto: proto.ClearField("tensor_shape"), ["other bytes"]),
        (lambda proto: setattr(proto.tensor_shape, "unknown_rank", True), ["other bytes"]),
        (lambda proto: setattr(proto.tensor_shape.dim[0], "size", 2), ["72 bytes", "48"]),
        (lambda proto: setattr(proto.tensor_shape.dim[0], "size", 1 << 60), ["72 bytes"]),
        (lambda proto: proto.ClearField("tensor_content"), ["0 bytes", "72"]),
        (lambda proto: proto.double_val.append(1.0), ["other bytes"]),
        (lambda proto: proto.float_val.append(1.0), ["other bytes"]),
        (lambda proto: [proto.tensor_shape.dim.add(size=1) for _ in range(63)], ["dimension"]),
    ],
)
def test_inconsistent_tensors_are_refused(change: Callable[[Any], None], names: list[str]) -> None:
    proto = tf.make_tensor_proto(np.tri(3))
    change(proto)
    with refuses(*names):
        _read(proto.SerializeToString())


def test_a_number_of_millions_of_bytes_is_refused_at_once() -> None:
    with refuses("other bytes"):
        _read(b"\x80" * 10**7)


def test_files_that_cannot_be_read_are_named(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "matrix_pb"
    for path in (file, tmp_path):
        with refuses(str(path)):
            published_matrices._read_tensor(path)
