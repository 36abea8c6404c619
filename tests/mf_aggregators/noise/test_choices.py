"""Grids of sums that a user chooses, and what they do to means."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mf_aggregators import AdaptiveClip, adaptive_clip
from mf_aggregators import aggregator as numpy_aggregator
from mf_aggregators.kernel import integers
from mf_aggregators.kernel.integers import STEPS_PER_CLIP_NORM, IntegerSums
from mf_aggregators.private_metrics import BoundedMetric, PrivateMetrics
from tests.examples import examples
from tests.refusals import refuses


def test_a_grid_that_is_too_coarse_is_refused() -> None:
    sums = numpy_aggregator._integer_sums(24, 1000, 1000)
    # sqrt(d) / (2 * 8388) is 5 per cent.
    numpy_aggregator._check_rounding(sums, 703_000)
    with refuses("705000", "secure_aggregation_bits"):
        numpy_aggregator._check_rounding(sums, 705_000)
    numpy_aggregator._check_means(sums, 1.0, 1.0 / 167.0, 0.0)
    numpy_aggregator._check_means(sums, 1.0, 0.0)
    with refuses("fraction"):
        numpy_aggregator._check_means(sums, 1.0, 1.0, 1.0 / 168.0)


@pytest.mark.parametrize("bits", [None, 24, 28, 32, 62])
@pytest.mark.parametrize("clients", [1, 7, 127])
def test_the_largest_cohort_fits_and_no_finer_grid_does(bits: int | None, clients: int) -> None:
    sums = numpy_aggregator._integer_sums(bits, clients, clients)
    largest_sum = sums.largest_cohort * sums.steps_per_clip_norm
    assert largest_sum <= 2 ** (sums.bits - 1) - 1
    finer = sums.largest_cohort * (sums.steps_per_clip_norm + 1)
    assert finer > 2 ** (sums.bits - 1) - 1 or sums.steps_per_clip_norm == STEPS_PER_CLIP_NORM


def test_what_a_cohort_may_be_is_what_was_said_of_it() -> None:
    assert numpy_aggregator._integer_sums(None, None, 12.5) == IntegerSums(2**22, 64, False)
    assert numpy_aggregator._integer_sums(32, None, 12.5) == IntegerSums(13, 32, True)
    assert numpy_aggregator._integer_sums(32, 1000, 12.5) == IntegerSums(1000, 32, True)


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
        numpy_aggregator._integer_sums(bits, largest, clients)


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
    clipped, indicator = adaptive_clip.clip_with_indicator(update, 1.0)
    weighted = [indicator * split.indicator_weight, 0.5 * split.metric_weight]
    vector = [*clipped, *map(np.asarray, weighted)]
    steps = integers.clip_to_grid(vector, split.vector_norm, sums.steps_per_clip_norm)
    unit = split.vector_norm / sums.steps_per_clip_norm
    errors = [
        abs(int(steps[1]) * unit / split.indicator_weight - indicator),
        abs(int(steps[2]) * unit / split.metric_weight - 0.5),
    ]
    try:
        numpy_aggregator._check_means(
            sums, split.vector_norm, split.indicator_weight, split.metric_weight
        )
    except ValueError:
        return
    assert max(errors) <= 0.02 * (1.0 + 1e-6)
