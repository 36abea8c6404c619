"""Updates as integers, against exact rational arithmetic."""

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hypothesis_numpy

from mf_aggregators.kernel import integers
from mf_aggregators.kernel.integers import STEPS_PER_CLIP_NORM, IntegerSums
from tests.examples import examples
from tests.refusals import refuses

_STEPS = [STEPS_PER_CLIP_NORM, 2**21, 1000, 3, 1]
_ANY_FLOATS = hypothesis_numpy.arrays(
    st.sampled_from([np.float32, np.float64]), st.integers(0, 40), elements={"allow_nan": True}
)


@given(
    st.lists(_ANY_FLOATS, min_size=1, max_size=3), st.floats(1e-30, 1e30), st.sampled_from(_STEPS)
)
@settings(deadline=None, max_examples=examples(200))
def test_no_update_is_longer_than_the_clip_norm(
    update: list[np.ndarray], clip_norm: float, steps: int
) -> None:
    """In exact arithmetic, whatever it is: and it has the direction and length that it may."""
    found = np.concatenate(integers.clip_to_grid(update, clip_norm, steps))
    assert found.dtype == np.int64
    flat = np.concatenate(update).astype(np.float64)
    assert sum(int(each) ** 2 for each in found) <= steps**2
    if not np.all(np.isfinite(flat)):
        assert not np.any(found)
        return
    exact = [Fraction(float(each)) / Fraction(clip_norm) for each in flat]
    squared = sum(each**2 for each in exact)
    length = Fraction(math.isqrt(int(squared * 2**200)), 2**100) if squared > 1 else Fraction(1)
    for number, each in zip(found.tolist(), exact, strict=True):
        # Rounded to the nearest step, or towards zero by less than one, after a margin of 1e-9.
        expected = each / length * steps
        assert abs(number - expected) <= 1 + abs(expected) * Fraction(2, 10**9)
        if squared < (1 - Fraction(len(flat), steps)) ** 2 and len(flat) < steps:
            assert abs(number - expected) <= Fraction(1, 2) + Fraction(1, 10**6)


def test_an_update_that_is_as_long_as_the_clip_norm_keeps_its_length() -> None:
    cases: list[tuple[list[float], float, int, list[int]]] = [
        ([0.0, -1.0], 1.0, STEPS_PER_CLIP_NORM, [0, -STEPS_PER_CLIP_NORM]),
        ([3.0, 4.0], 5.0, 1000, [600, 800]),
        ([6.0, 8.0], 5.0, 1000, [600, 800]),
        ([1e-289, 0.0], 1e-289, 10, [10, 0]),
        ([6e-200, 8e-200], 5e-200, 1000, [600, 800]),
    ]
    for update, clip_norm, steps, expected in cases:
        (found,) = integers.clip_to_grid([np.array(update)], clip_norm, steps)
        assert found.tolist() == expected


def test_nothing_is_left_of_an_update_that_floats_left_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The integers have the last word, whatever the arithmetic before them does."""
    clipped: Any = integers.clipped
    # The margin is for errors of floats: of 1.2 steps here.
    for longer, expected in ((1.001, 0), (1.0 + 1.2 * 2.0**-30, STEPS_PER_CLIP_NORM)):

        def of(*arguments: Any, longer: float = longer) -> Any:
            scaled, *others = clipped(*arguments)
            return [longer * array for array in scaled], *others

        monkeypatch.setattr(integers, "clipped", of)
        (found,) = integers.clip_to_grid([np.array([5.0])], 5.0, STEPS_PER_CLIP_NORM)
        assert found.tolist() == [expected]


@given(st.integers(0, 2**45))
def test_squares_add_up_within_int64(num_entries: int) -> None:
    units = integers.units_of_squares(num_entries)
    # Each square is rounded up.
    assert num_entries * (units + 1.0) < 2.0**63
    assert units == 2.0**52 or 4.0 * num_entries * units >= 2.0**62
    assert math.frexp(units)[0] == 0.5


def test_grids_check_their_numbers() -> None:
    three: Any = np.int64(3)
    assert len({IntegerSums(three), IntegerSums(3)}) == 1
    assert type(IntegerSums(three).largest_cohort) is int
    assert IntegerSums(2**31 - 1, 32).steps_per_clip_norm == 1
    for wrong in ((0,), (1, 65), (1, 1), (2**31, 32), (1.5,), (1, -1)):
        with refuses("bits" if len(wrong) > 1 else "largest_cohort"):
            IntegerSums(*wrong)  # type: ignore[arg-type]
