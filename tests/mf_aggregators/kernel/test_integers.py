"""Updates as integers, against exact rational arithmetic."""

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hypothesis_numpy

from mf_aggregators import AdaptiveClip
from mf_aggregators.kernel import integers
from mf_aggregators.kernel.integers import STEPS_PER_CLIP_NORM, IntegerSums
from mf_aggregators.private_metrics import BoundedMetric, PrivateMetrics
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
    clipped: Any = integers._clipped
    # The margin is for errors of floats: of 1.2 steps here.
    for longer, expected in ((1.001, 0), (1.0 + 1.2 * 2.0**-30, STEPS_PER_CLIP_NORM)):

        def of(*arguments: Any, longer: float = longer) -> Any:
            scaled, *others = clipped(*arguments)
            return [longer * array for array in scaled], *others

        monkeypatch.setattr(integers, "_clipped", of)
        (found,) = integers.clip_to_grid([np.array([5.0])], 5.0, STEPS_PER_CLIP_NORM)
        assert found.tolist() == [expected]


@given(st.integers(0, 2**45))
def test_squares_add_up_within_int64(num_entries: int) -> None:
    units = integers.units_of_squares(num_entries)
    # Each square is rounded up.
    assert num_entries * (units + 1.0) < 2.0**63
    assert units == 2.0**52 or 4.0 * num_entries * units >= 2.0**62
    assert math.frexp(units)[0] == 0.5


def test_indicators_tell_lengths_apart() -> None:
    for update, indicator, expected in (
        ([3.0, 4.0], 0.5, [0.6, 0.8]),
        ([3.0, math.nextafter(4.0, 5.0)], -0.5, [0.6, 0.8]),
        ([0.0, 0.0], 0.5, [0.0, 0.0]),
        ([1.5, 2.0], 0.5, [0.3, 0.4]),
        ([math.inf, 1.0], 0.0, [0.0, 0.0]),
        ([1.0, math.nan], 0.0, [0.0, 0.0]),
    ):
        (found,), said = integers.clip_with_indicator([np.array(update)], 5.0)
        assert said == indicator
        assert found == pytest.approx(expected, rel=1e-14)


def test_grids_check_their_numbers() -> None:
    three: Any = np.int64(3)
    assert len({IntegerSums(three), IntegerSums(3)}) == 1
    assert type(IntegerSums(three).largest_cohort) is int
    assert IntegerSums(2**31 - 1, 32).steps_per_clip_norm == 1
    for wrong in ((0,), (1, 65), (1, 1), (2**31, 32), (1.5,), (1, -1)):
        with refuses("bits" if len(wrong) > 1 else "largest_cohort"):
            IntegerSums(*wrong)  # type: ignore[arg-type]


def test_a_grid_that_is_too_coarse_is_refused() -> None:
    sums = integers.integer_sums(24, 1000, 1000)
    # sqrt(d) / (2 * 8388) is 5 per cent.
    sums.check_rounding(703_000)
    with refuses("705000", "secure_aggregation_bits"):
        sums.check_rounding(705_000)
    sums.check_means(1.0, 1.0 / 167.0, 0.0)
    sums.check_means(1.0, 0.0)
    with refuses("fraction"):
        sums.check_means(1.0, 1.0, 1.0 / 168.0)


@pytest.mark.parametrize("bits", [None, 24, 28, 32, 62])
@pytest.mark.parametrize("clients", [1, 7, 127])
def test_the_largest_cohort_fits_and_no_finer_grid_does(bits: int | None, clients: int) -> None:
    sums = integers.integer_sums(bits, clients, clients)
    largest_sum = sums.largest_cohort * sums.steps_per_clip_norm
    assert largest_sum <= 2 ** (sums.bits - 1) - 1
    finer = sums.largest_cohort * (sums.steps_per_clip_norm + 1)
    assert finer > 2 ** (sums.bits - 1) - 1 or sums.steps_per_clip_norm == STEPS_PER_CLIP_NORM


def test_what_a_cohort_may_be_is_what_was_said_of_it() -> None:
    assert integers.integer_sums(None, None, 12.5) == IntegerSums(2**22, 64, False)
    assert integers.integer_sums(32, None, 12.5) == IntegerSums(13, 32, True)
    assert integers.integer_sums(32, 1000, 12.5) == IntegerSums(1000, 32, True)


@pytest.mark.parametrize(
    ("bits", "largest", "clients", "name"),
    [
        (23, None, 2, "secure_aggregation_bits"),
        (63, None, 2, "secure_aggregation_bits"),
        (0, None, 2, "secure_aggregation_bits"),
        (24, None, 2**23, "24 bits"),
        (None, 9, 9.5, "clients_per_round"),
        (32, 0, 1, "largest_cohort"),
        (None, 2**64, 1, "64 bits"),
    ],
)
def test_sums_that_could_overflow_are_refused(
    bits: int | None, largest: int | None, clients: float, name: str
) -> None:
    with refuses(name):
        integers.integer_sums(bits, largest, clients)


@given(
    bits=st.integers(24, 40),
    clients=st.integers(10, 30_000),
    multiplier=st.floats(0.1, 4.0),
    norm=st.floats(0.0, 10.0),
)
@settings(deadline=None, max_examples=examples(400))
def test_fractions_and_metrics_of_a_grid_that_is_allowed_are_off_by_2_percent_at_most(
    bits: int, clients: int, multiplier: float, norm: float
) -> None:
    """All clients are alike: within the clip norm or above it, at the end of a metric's range."""
    sums = IntegerSums(clients, bits, is_secure=True)
    clip = AdaptiveClip(1.0)
    metrics = PrivateMetrics((BoundedMetric("loss", 0.0, 1.0),))
    split = metrics.split_noise(multiplier, clip, clients)
    update = [np.full(7, norm / math.sqrt(7.0))]
    clipped, indicator = integers.clip_with_indicator(update, 1.0)
    weighted = [indicator * split.indicator_weight, 0.5 * split.metric_weight]
    vector = [*clipped, *map(np.asarray, weighted)]
    steps = integers.clip_to_grid(vector, split.vector_norm, sums.steps_per_clip_norm)
    unit = split.vector_norm / sums.steps_per_clip_norm
    errors = [
        abs(int(steps[1]) * unit / split.indicator_weight - indicator),
        abs(int(steps[2]) * unit / split.metric_weight - 0.5),
    ]
    try:
        sums.check_means(split.vector_norm, split.indicator_weight, split.metric_weight)
    except ValueError:
        return
    assert max(errors) <= 0.02 * (1.0 + 1e-6)
