"""Inputs: damaged files are refused by one error, and nests keep their leaves and structure."""

import collections
import pathlib
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mf_aggregators import inputs
from mf_aggregators.factorizations import Factorization, TreeAggregationFactorization
from mf_aggregators.kernel import draws
from mf_aggregators.kernel.integers import IntegerRows, RowLayout
from mf_aggregators.kernel.rows import NoiseRecursion
from tests import flipped_bits
from tests.mf_aggregators import small_mechanisms
from tests.refusals import refuses

_NUM_ROUNDS = 9
_SEED = np.array([2**62 + 12345, -(2**61) - 999], np.int64)


def test_arrays_of_a_damaged_archive_are_refused_by_one_error(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "arrays.npz"
    np.savez(path, one=np.arange(3.0), two=np.array("text"))
    refused = 0
    expected: dict[str, Any] = {"one": np.arange(3.0), "two": "text"}
    for _ in flipped_bits.flipped(path):
        try:
            found = inputs.archived_arrays(path)
        except (OSError, ValueError):
            refused += 1
            continue
        for name, array in found.items():
            np.testing.assert_array_equal(array, expected[name])
    assert refused > 250
    assert list(inputs.archived_arrays(path)) == ["one", "two"]
    np.save(tmp_path / "array.npy", np.ones(2))
    with refuses("damaged"):
        inputs.archived_arrays(tmp_path / "array.npy")


class _Layer(NamedTuple):
    kernel: Any
    bias: Any


def _template() -> dict[str, Any]:
    """Keys out of order, empty and scalar leaves, every container, every dtype."""
    return {
        "layers": [_Layer(np.ones((2, 3), np.float32), np.ones(3, np.float64)), ()],
        "empty": np.zeros((0, 4), np.float32),
        "deep": collections.OrderedDict(z=np.float16(3.0), a=(np.zeros((), np.float64),)),
        "half": np.zeros((4,), np.float16),
        "number": 0.5,
    }


# The leaves in the order of sorted keys: deep.a, deep.z, empty, half, layers, number.
_SHAPES: tuple[tuple[int, ...], ...] = ((), (), (0, 4), (4,), (2, 3), (3,), ())


_DTYPES = ("float64", "float32", "float32", "float32", "float32", "float64", "float64")


def _leaves(row: dict[str, Any]) -> list[np.ndarray]:
    layer = row["layers"][0]
    deep = row["deep"]
    flat = [deep["a"][0], deep["z"], row["empty"], row["half"], layer.kernel, layer.bias]
    return [*flat, row["number"]]


_FACTORIZATIONS = small_mechanisms.factorizations(_NUM_ROUNDS)


_EVERY_MECHANISM = pytest.mark.parametrize("factorization", _FACTORIZATIONS, ids=str)


def _inverse(factorization: Factorization) -> np.ndarray:
    if isinstance(factorization, TreeAggregationFactorization):
        # Its stream draws one row of Z a round: a square matrix of its own.
        return factorization.noise_rows(np.eye(_NUM_ROUNDS))
    return np.linalg.inv(factorization.strategy_matrix())


def _z(seed: np.ndarray) -> list[np.ndarray]:
    """Z by its definition, each leaf's rows as an array."""
    singles = sum(int(np.prod(shape)) for shape in _SHAPES if shape in ((0, 4), (4,), (2, 3))) + 1
    rows = []
    for i in range(_NUM_ROUNDS):
        single = draws.integers(seed, i, 0, singles) * draws.STEP
        double = draws.integers(seed, i, draws.TILE, 5) * draws.STEP
        rows.append(
            [
                double[0].reshape(()),
                single[0].reshape(()),
                single[:0].reshape(0, 4),
                single[1:5],
                single[5:11].reshape(2, 3),
                double[1:4],
                double[4].reshape(()),
            ]
        )
    return [np.array([row[position] for row in rows]) for position in range(len(_SHAPES))]


def _all_rows(recursion: NoiseRecursion) -> list[list[np.ndarray]]:
    """All rows at unit variance of Z, leaf by leaf, as an aggregator draws them."""
    tensors = [inputs.tensor_of(leaf) for leaf in inputs.leaves_of(_template())]
    shapes = tuple(shape for shape, _ in tensors)
    layout = RowLayout(shapes, tuple(inputs.NOISE_DTYPES[dtype] for _, dtype in tensors))
    integers = IntegerRows.of(recursion)
    histories = [integers.first_history(segment.size) for segment in layout.segments]
    rows = []
    for i, step in enumerate(integers.steps):
        flats = []
        for place, segment in enumerate(layout.segments):
            z = segment.row_of_z(_SEED, i)
            row, histories[place] = integers.next_row(i, histories[place], z)
            flats.append((row * step).astype(segment.dtype))
        rows.append(_leaves(inputs.in_structure(_template(), layout.tensors(flats))))
    return rows


@_EVERY_MECHANISM
def test_rows_are_those_of_the_dense_product(factorization: Factorization) -> None:
    rows = _all_rows(factorization.noise_recursion())
    inverse = _inverse(factorization)
    for position, z in enumerate(_z(_SEED)):
        found = np.array([row[position] for row in rows])
        assert found.dtype == _DTYPES[position]
        assert found.shape == (_NUM_ROUNDS, *_SHAPES[position])
        expected = np.tensordot(inverse, z, axes=1)
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


def test_a_nest_keeps_its_structure_with_other_leaves() -> None:
    template = _template()
    found = inputs.in_structure(template, range(7))
    assert list(found) == list(template)
    assert isinstance(found["layers"], list)
    assert found["layers"] == [_Layer(4, 5), ()]
    assert isinstance(found["layers"][0], _Layer)
    assert isinstance(found["deep"], collections.OrderedDict)
    assert list(found["deep"].items()) == [("z", 1), ("a", (0,))]
    assert (found["empty"], found["half"], found["number"]) == (2, 3, 6)


_NESTS = st.recursive(
    st.sampled_from([np.zeros(3, np.float32), np.zeros((2, 1)), np.zeros((), np.float16)]),
    lambda nests: st.one_of(
        st.lists(nests, max_size=3),
        st.lists(nests, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=2), nests, max_size=3),
    ),
    max_leaves=8,
)


def _flattened(nest: Any) -> list[Any]:
    if isinstance(nest, dict):
        return [leaf for key in sorted(nest) for leaf in _flattened(nest[key])]
    if isinstance(nest, list | tuple):
        return [leaf for child in nest for leaf in _flattened(child)]
    return [nest]


@given(_NESTS)
@settings(deadline=None)
def test_leaves_come_by_sorted_keys_and_go_back_to_their_places(nest: Any) -> None:
    leaves = inputs.leaves_of(nest)
    assert [id(leaf) for leaf in leaves] == [id(leaf) for leaf in _flattened(nest)]
    numbered = inputs.in_structure(nest, range(len(leaves)))
    assert _flattened(numbered) == list(range(len(leaves)))


def test_order_of_insertion_does_not_count() -> None:
    assert inputs.leaves_of({"b": 1.0, "a": 0.0}) == [0.0, 1.0]
    assert inputs.in_structure({"b": 1.0, "a": 0.0}, "xy") == {"a": "x", "b": "y"}


class _Bfloat16:
    """A dtype of another library, as ``tf.bfloat16`` and that of ml_dtypes name it."""

    name = "bfloat16"


class _Specification:
    """A shape and a dtype without values."""

    shape = (2, 2)
    dtype = _Bfloat16()


def test_specifications_of_other_libraries_will_do() -> None:
    assert inputs.tensor_of(_Specification()) == ((2, 2), "bfloat16")
    assert inputs.NOISE_DTYPES["bfloat16"] == "float32"


@pytest.mark.parametrize(
    "leaf",
    [
        np.zeros(3, np.int32),
        np.zeros(2, bool),
        np.zeros((), np.complex64),
        np.zeros(3, np.longdouble),
        7,
        True,
        None,
        "weights",
    ],
    ids=repr,
)
def test_what_is_not_floating_point_is_refused(leaf: Any) -> None:
    with pytest.raises(TypeError):
        inputs.tensor_of(leaf)


def test_runs_that_draw_more_than_is_charged_are_refused() -> None:
    """All statements charge for 2^40 numbers where nobody says how many there are."""
    inputs.check_charged(2**20, 2**20)
    with refuses("1.1e+12", "2^40"):
        inputs.check_charged(2**20 + 1, 2**20)
    with refuses("8.8e+12"):
        inputs.check_charged(2**31, 4096)
