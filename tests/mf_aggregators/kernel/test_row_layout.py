"""Layouts of rows: every entry has one coordinate, and segments start at tiles."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mf_aggregators.kernel import integer_rows
from mf_aggregators.kernel.draws import TILE
from mf_aggregators.kernel.integer_rows import RowLayout, Segment
from tests.refusals import refuses

_SHAPES = st.one_of(
    st.lists(st.integers(0, 4), max_size=3).map(tuple),
    st.sampled_from([(TILE,), (TILE - 1,), (2, TILE + 1)]),
)
_TENSORS = st.lists(st.tuples(_SHAPES, st.sampled_from(["float32", "float64"])), max_size=6)


def test_float64_tensors_start_at_the_next_tile() -> None:
    shapes = ((3,), (TILE - 2,), (), (0,), (2, 2))
    dtypes = ("float32", "float32", "float64", "float64", "float32")
    found = RowLayout(shapes, dtypes).segments
    assert found == (
        Segment("float32", 0, TILE + 5, (0, 1, 4)),
        Segment("float64", 2, 1, (2, 3)),
    )
    assert [segment.first_coordinate for segment in found] == [0, 2 * TILE]
    assert [segment.num_tiles for segment in found] == [2, 1]
    assert integer_rows.total_size(found) == TILE + 6


def test_full_tiles_leave_no_gap() -> None:
    found = RowLayout(((2, TILE), (5,)), ("float32", "float64")).segments
    assert [segment.first_tile for segment in found] == [0, 2]
    assert found[0].num_tiles == 2


@pytest.mark.parametrize("shapes", [(), ((0,),), ((2, 0), (0,))])
def test_rows_without_entries_have_no_segments(shapes: tuple[tuple[int, ...], ...]) -> None:
    layout = RowLayout(shapes, ("float64",) * len(shapes))
    assert layout.segments == ()
    assert integer_rows.total_size(layout.segments) == 0
    assert [array.shape for array in layout.tensors([])] == list(shapes)


@given(_TENSORS)
def test_every_entry_has_a_coordinate_of_its_own(
    tensors: list[tuple[tuple[int, ...], str]],
) -> None:
    layout = RowLayout(tuple(shape for shape, _ in tensors), tuple(dtype for _, dtype in tensors))
    flats = []
    end = 0
    for segment in layout.segments:
        assert segment.first_tile == math.ceil(end / TILE)
        end = segment.first_coordinate + segment.size
        flats.append(np.arange(segment.first_coordinate, end, dtype=segment.dtype))
    found = layout.tensors(flats)
    for array, (shape, dtype) in zip(found, tensors, strict=True):
        assert (array.shape, array.dtype.name) == (shape, dtype)
    # Tensors of one dtype follow one another in order.
    for dtype in ("float32", "float64"):
        expected = [flat for flat in flats if flat.dtype == dtype]
        entries = [np.ravel(array) for array in found if array.dtype == dtype]
        np.testing.assert_array_equal(
            np.concatenate([*entries, np.empty(0)]), np.concatenate([*expected, np.empty(0)])
        )
    sizes = sum(math.prod(shape) for shape, _ in tensors)
    assert integer_rows.total_size(layout.segments) == sizes


def test_vectors_of_another_size_are_refused() -> None:
    layout = RowLayout(((3,),), ("float32",))
    with refuses("3 entries"):
        layout.tensors([np.zeros(4, np.float32)])


def test_other_dtypes_and_lengths_are_refused() -> None:
    with refuses("float16"):
        RowLayout(((3,),), ("float16",))
    with refuses("2"):
        RowLayout(((3,),), ("float32", "float32"))
