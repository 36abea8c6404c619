"""What a client can add to a round of the benchmark, by every method."""

import math

import numpy as np
import pytest

from benchmarks import server_optimizers
from benchmarks.server_optimizers import METHODS

_D = server_optimizers._PARAMETERS


def _updates() -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    one_entry = np.zeros(_D, np.float32)
    one_entry[7] = -1.0
    two_entries = one_entry.copy()
    two_entries[-1] = 1.0
    spread = generator.standard_normal(_D).astype(np.float32)
    return [
        magnitude * update
        for update in (one_entry, two_entries, spread, spread**9)
        for magnitude in (1e-3, 1.0, 1.5, 1e3)
    ]


def _joint_norm(update: np.ndarray, weight: float) -> float:
    wide = update.astype(np.float64)
    return math.sqrt(np.sum(wide**2) + weight * np.sum(wide**4))


@pytest.mark.parametrize("weight", [0.0, 0.5, 16.0])
def test_both_moments_of_a_client_have_a_joint_norm_of_one_at_most(weight: float) -> None:
    for update in _updates():
        factor = float(server_optimizers.joint_clip_factor(update, weight))
        norm = _joint_norm(update, weight)
        if norm <= 1.0:
            assert factor == pytest.approx(1.0, rel=1e-6)
        else:
            # No more is clipped than has to be.
            assert _joint_norm(factor * update, weight) == pytest.approx(1.0, rel=1e-5)


@pytest.mark.short_cases(3)
@pytest.mark.parametrize("method", METHODS)
def test_an_update_is_clipped_to_a_norm_of_one(method: str) -> None:
    largest = 0.0
    for other in METHODS[method][1]:
        for update in _updates():
            clipped = np.asarray(server_optimizers._clipped(method, update, other), np.float64)
            released = method == server_optimizers._RELEASED
            # Second moments are in the same release, and count.
            norm = _joint_norm(
                clipped, server_optimizers._SECOND_MOMENT_WEIGHT if released else 0.0
            )
            assert norm <= 1.0 + 1e-5
            largest = max(largest, norm)
    assert largest > 0.9
