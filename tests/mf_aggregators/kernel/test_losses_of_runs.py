"""Runs whose clients are drawn, as data: noise multipliers by hand, and what is refused."""

import dataclasses
import math

import numpy as np
import pytest

from mf_aggregators.accounting import losses_below
from mf_aggregators.kernel import composition, groups, profiles
from mf_aggregators.kernel.draws_of_clients import (
    BallsInBins,
    FixedSize,
    MinSeparation,
    Poisson,
    SampledRun,
    Shuffling,
    StrategyColumns,
)
from mf_aggregators.kernel.losses import Approximation, gaussian_losses

_ONES = StrategyColumns(np.ones((6, 1)))


def test_noise_multipliers_are_those_of_all_participations() -> None:
    run = SampledRun(FixedSize(8, 2, 40, 5), 3.0, _ONES)
    # Groups need no C, and runs are equal whatever was given for it.
    assert run == SampledRun(FixedSize(8, 2, 40, 5), 3.0)
    assert (run.compositions, run.noise_multiplier) == (4, 1.5)
    # A client in the place of another one moves a sum twice.
    assert run.part_noise_multiplier == 1.5
    assert SampledRun(Poisson(8, 2, 40, 5), 3.0).part_noise_multiplier == 3.0
    timers = SampledRun(MinSeparation(6, 1, 40, 5, 4), 3.0, _ONES)
    assert (timers.compositions, timers.part_noise_multiplier) == (2, 3.0)
    assert timers.noise_multiplier == pytest.approx(3.0 / math.sqrt(2.0))
    bins = SampledRun(BallsInBins(6, 1, 40, 5, 4), 3.0, _ONES)
    assert bins.together == timers.together


def test_bins_that_share_rows_have_the_longest_sum_of_columns() -> None:
    """Columns (1, 1) of four rounds in two bins: rows 0 to 3 of |C| x are 1, 1, 1, 1."""
    columns = StrategyColumns(np.ones((4, 3)))
    run = SampledRun(BallsInBins(4, 3, 10, 5, 2), 1.0, columns)
    # Bin 0: rounds 0 and 2, rows 1, 1, 2, 1; the largest column norm is sqrt(3).
    assert run.together.norm == pytest.approx(math.sqrt(7.0 / 3.0))
    assert run.together.disjoint == 1
    assert run.noise_multiplier == run.part_noise_multiplier == 1.0 / run.together.norm


@pytest.mark.parametrize(("sigma", "is_amplified"), [(0.05, False), (3.0, True), (2e8, False)])
def test_hardly_any_noise_and_hardly_any_loss_are_not_amplified(
    sigma: float, is_amplified: bool
) -> None:
    run = SampledRun(Poisson(4, 1, 40, 5), sigma)
    assert run.is_amplified == is_amplified
    if not is_amplified and sigma > 1.0:
        found = composition.losses_of_run(run, Approximation(1.0))
        known = gaussian_losses(run.noise_multiplier, 1.0)
        np.testing.assert_array_equal(found._pmf_remove._probs, known._pmf_remove._probs)
        with pytest.raises(ValueError, match="losses of Poisson from below"):
            losses_below.losses_of_run(run, Approximation(1.0))
    # Noise of 0.3 is too little for a client in the place of another one.
    assert not SampledRun(Shuffling(4, 1, 40, 5), 0.3).is_amplified
    assert SampledRun(Shuffling(4, 1, 40, 5), 0.3).part_noise_multiplier == 0.3


def test_losses_of_groups_are_those_of_groups() -> None:
    run, each = SampledRun(Poisson(4, 1, 40, 5), 2.0), Approximation(1e-2)
    found, known = composition.losses_of_run(run, each), groups.losses(run.draws, 2.0, 1e-2)  # type: ignore[arg-type]
    np.testing.assert_array_equal(found._pmf_add._probs, known._pmf_add._probs)


def test_losses_of_secret_rounds_lie_on_both_sides_of_the_truth(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a separation of one, coins are those of Poisson sampling."""
    for name in ("_FEWEST_SAMPLES", "_MOST_SAMPLES", "_SAMPLES_OF_Q"):
        monkeypatch.setattr(profiles, name, 2**12)
    run = SampledRun(MinSeparation(6, 1, 100, 10, 1), 1.0, _ONES)
    truth = groups.losses(Poisson(6, 1, 100, 10), 1.0, 1e-3)
    upper, lower = (
        losses(run, Approximation(1e-2, 1e-4, 1e-2))
        for losses in (composition.losses_of_run, losses_below.losses_of_run)
    )
    for direction in ("_pmf_remove", "_pmf_add"):
        above, exact, below = (
            getattr(each, direction).get_delta_for_epsilon(0.2) for each in (upper, truth, lower)
        )
        assert 0.2 * exact < below < exact < above < 1.6 * exact
        assert 1e-4 <= getattr(upper, direction).get_delta_for_epsilon(300.0) < 1.1e-4


def test_what_is_no_data_of_the_kernel_is_refused() -> None:
    draws = MinSeparation(6, 1, 40, 5, 4)

    class Other(MinSeparation):  # type: ignore[misc]
        pass

    with pytest.raises(TypeError, match="draws must be one of"):
        SampledRun(Other(*dataclasses.astuple(draws)), 1.0, _ONES)
    with pytest.raises(TypeError, match="columns must be StrategyColumns, found None"):
        SampledRun(draws, 1.0)
    with pytest.raises(ValueError, match="sigma must not be negative"):
        SampledRun(draws, -1.0, _ONES)
    with pytest.raises(ValueError, match="below the 3 bands"):
        SampledRun(MinSeparation(6, 3, 40, 5, 2), 1.0, _ONES)
