"""Updates of models are nests of arrays, which keep their leaves and structure."""

import collections
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mf_aggregators import aggregator as numpy_aggregator


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


def test_a_nest_keeps_its_structure_with_other_leaves() -> None:
    template = _template()
    found = numpy_aggregator.in_structure(template, range(7))
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
def test_leaves_come_by_sorted_keys_and_go_back_to_their_places(nest: Any) -> None:
    leaves = [leaf for _, leaf in numpy_aggregator.named_leaves(nest)]
    assert [id(leaf) for leaf in leaves] == [id(leaf) for leaf in _flattened(nest)]
    numbered = numpy_aggregator.in_structure(nest, range(len(leaves)))
    assert _flattened(numbered) == list(range(len(leaves)))


def test_order_of_insertion_does_not_count() -> None:
    assert numpy_aggregator.named_leaves({"b": 1.0, "a": 0.0}) == [("['a']", 0.0), ("['b']", 1.0)]
    assert numpy_aggregator.in_structure({"b": 1.0, "a": 0.0}, [2, 3]) == {"a": 2, "b": 3}


class _Bfloat16:
    """A dtype of another library, as ``tf.bfloat16`` and that of ml_dtypes name it."""

    name = "bfloat16"


class _Specification:
    """A shape and a dtype without values."""

    shape = (2, 2)
    dtype = _Bfloat16()


def test_specifications_of_other_libraries_will_do() -> None:
    assert numpy_aggregator._tensor_of(_Specification()) == ((2, 2), "bfloat16")
    assert numpy_aggregator.NOISE_DTYPES["bfloat16"] == "float32"


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
        numpy_aggregator._tensor_of(leaf)
