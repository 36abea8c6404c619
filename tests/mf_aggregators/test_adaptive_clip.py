"""What adaptive clipping takes of the noise, and how its norm moves."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mf_aggregators import adaptive_clip
from mf_aggregators.adaptive_clip import AdaptiveClip, NoiseSplit
from tests.examples import examples
from tests.refusals import refuses


@pytest.mark.parametrize(
    ("noise_multiplier", "known"), [(1.0, 1.0050378), (2.0, 2.0412415), (0.0, 0.0)]
)
def test_the_noise_of_updates_beside_indicators(noise_multiplier: float, known: float) -> None:
    """Numbers that TensorFlow Federated has for a clipped_count_stddev of 5."""
    split = NoiseSplit.of(noise_multiplier, 5.0)
    assert split.update_noise_multiplier == pytest.approx(known, abs=5e-8)


@given(
    st.floats(0.01, 100.0), st.floats(0.501, 1000.0), st.floats(-1.0, 1.0), st.sampled_from([-1, 1])
)
@settings(max_examples=examples(200), deadline=None)
def test_no_client_moves_more_standard_deviations_than_the_noise_multiplier_says(
    z: float, ratio: float, update: float, sign: int
) -> None:
    """An update's norm and an indicator of 1/2, each over the standard deviation of its noise."""
    split = NoiseSplit.of(z, ratio * z)
    moved = math.hypot(
        update / split.update_noise_multiplier,
        sign * 0.5 / split.clipped_count_stddev,
    )
    assert moved <= 1.0 / z * (1.0 + 1e-9)
    if abs(update) == 1.0:
        assert moved == pytest.approx(1.0 / z, rel=1e-9)
    # The same in vectors, whose coordinates all have one noise.
    assert split.indicator_weight * split.clipped_count_stddev == pytest.approx(
        split.update_noise_multiplier
    )
    assert z * split.vector_norm == pytest.approx(split.update_noise_multiplier, rel=1e-9)
    assert math.hypot(update, 0.5 * split.indicator_weight) <= split.vector_norm


@pytest.mark.parametrize("clipped_count_stddev", [0.1, 0.5])
def test_indicators_that_take_the_whole_guarantee_are_refused(clipped_count_stddev: float) -> None:
    with refuses("clipped_count_stddev"):
        NoiseSplit.of(1.0, clipped_count_stddev)


def test_the_default_noise_of_the_count() -> None:
    clip = AdaptiveClip()
    # As TensorFlow Federated has it, and more where that would take much of the guarantee.
    assert clip.clipped_count_stddev_for(1.0, 100) == 5.0
    assert clip.clipped_count_stddev_for(4.0, 100) == 8.0
    assert AdaptiveClip(clipped_count_stddev=3.0).clipped_count_stddev_for(4.0, 100) == 3.0
    for z in (0.1, 1.0, 10.0, 100.0):
        split = NoiseSplit.of(z, clip.clipped_count_stddev_for(z, 100))
        assert split.update_noise_multiplier <= 1.033 * z


def test_the_norm_finds_the_quantile() -> None:
    """Of log-normal norms, whose quantile is known, from far away and with noisy fractions."""
    generator = np.random.default_rng(0)
    clip, norm, found = AdaptiveClip(0.1, 0.75, learning_rate=0.2), 0.1, []
    for _ in range(600):
        norms = np.exp(generator.normal(size=400))
        norm = clip.next_norm(norm, float(np.mean(norms <= norm)) + 0.05 * generator.normal())
        found.append(norm)
    # Phi^-1(0.75) = 0.6745; a step moves the logarithm by 0.2 x 0.055, and fifteen in a row count.
    assert np.mean(np.log(found[200:])) == pytest.approx(0.6745, abs=0.02)


def test_the_norm_stays_within_its_bounds() -> None:
    clip = AdaptiveClip(1.0, smallest_norm=0.5, largest_norm=2.0, learning_rate=10.0)
    assert clip.next_norm(1.0, 1e6) == 0.5
    assert clip.next_norm(1.0, -1e6) == 2.0
    assert clip.next_norm(1.0, 0.5) == 1.0
    assert AdaptiveClip(1.0, learning_rate=0.0).next_norm(0.7, 5.0) == 0.7
    assert AdaptiveClip(2.0).bounds == (0.002, 2000.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"initial_norm": 0.0}, "initial_norm"),
        ({"initial_norm": math.nan}, "initial_norm"),
        ({"target_unclipped_quantile": 1.5}, "target_unclipped_quantile"),
        ({"learning_rate": -0.1}, "learning_rate"),
        ({"update_period": 0}, "update_period"),
        ({"clipped_count_stddev": 0.0}, "clipped_count_stddev"),
        ({"smallest_norm": 1.0}, "initial_norm must be between"),
        ({"largest_norm": 0.05}, "initial_norm must be between"),
        # A thousandth or a thousand times of which is beyond floats.
        ({"initial_norm": 1e-322}, "smallest_norm must be above zero"),
        ({"initial_norm": 1e306}, "largest_norm must be finite"),
    ],
)
def test_bad_numbers_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AdaptiveClip(**arguments)


def test_indicators_tell_lengths_apart() -> None:
    for update, indicator, expected in (
        ([3.0, 4.0], 0.5, [0.6, 0.8]),
        ([3.0, math.nextafter(4.0, 5.0)], -0.5, [0.6, 0.8]),
        ([0.0, 0.0], 0.5, [0.0, 0.0]),
        ([1.5, 2.0], 0.5, [0.3, 0.4]),
        ([math.inf, 1.0], 0.0, [0.0, 0.0]),
        ([1.0, math.nan], 0.0, [0.0, 0.0]),
    ):
        (found,), said = adaptive_clip.clip_with_indicator([np.array(update)], 5.0)
        assert said == indicator
        assert found == pytest.approx(expected, rel=1e-14)
