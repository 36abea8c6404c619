"""The statistical tests themselves: they pass true noise and catch false noise."""

import numpy as np
import pytest

from tests.mf_aggregators.statistics_of_noise import check_standard_normal


def _true_noise() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(4000, 10))


def test_true_noise_passes() -> None:
    check_standard_normal(_true_noise())


@pytest.mark.parametrize("fault", ["4 % too small", "one row reused", "correlated", "shifted"])
def test_false_noise_is_caught(fault: str) -> None:
    noise = _true_noise()
    if fault == "4 % too small":
        noise = 0.96 * noise
    elif fault == "one row reused":
        noise[:, 3] = noise[:, 2]
    elif fault == "correlated":
        noise[:, 1] = 0.2 * noise[:, 0] + np.sqrt(1 - 0.2**2) * noise[:, 1]
    else:
        noise[:, 4] += 0.2
    with pytest.raises(AssertionError):
        check_standard_normal(noise)
