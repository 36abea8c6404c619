"""Epsilons of sampled runs: against closed forms, dp-accounting, and sums in forty digits."""

import math
from typing import Any

import dp_accounting
import mpmath
import numpy as np
import pytest
from dp_accounting.pld import common, pld_privacy_accountant
from dp_accounting.pld.privacy_loss_distribution import (
    PrivacyLossDistribution,
    from_privacy_parameters,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from mf_aggregators.kernel import cycles, gaussian, groups
from mf_aggregators.kernel.draws_of_clients import (
    FixedSize,
    Groups,
    Poisson,
    RandomAllocation,
    Shuffling,
    TruncatedPoisson,
)
from mf_aggregators.kernel.gaussian import TailError
from mf_aggregators.kernel.losses import epsilon_of
from tests.examples import examples

_ALL: list[Groups] = [
    Poisson(6, 2, 60, 6),
    TruncatedPoisson(6, 2, 61, 6, 7),
    FixedSize(6, 2, 61, 6),
    RandomAllocation(7, 1, 30, 10),
    Shuffling(20_000, 1, 20_000, 1),
]


def _exact(draws: Groups, sigma: float, epsilon: float) -> float:
    """The delta of a run of one round, in closed form."""
    at = np.array([epsilon])
    q = getattr(draws, "sampling_probability", 0.0)
    if isinstance(draws, Poisson):
        return float(np.max(groups.poisson_divergences(sigma, q, at)))
    assert isinstance(draws, FixedSize)
    return float(groups.divergence_with(sigma, q, at)[0])


@given(
    st.sampled_from([Poisson(1, 1, 20, 3), FixedSize(1, 1, 20, 3)]),
    st.floats(0.4, 8.0),
    st.floats(math.log(1e-9), math.log(0.05)).map(math.exp),
)
@settings(max_examples=examples(10), deadline=None)
def test_one_round_has_its_closed_form(draws: Groups, sigma: float, delta: float) -> None:
    found = groups.epsilon(draws, sigma, delta)
    assert _exact(draws, sigma, found) <= delta
    if found > 1e-3:
        assert _exact(draws, sigma, found * (1.0 - 1e-3)) >= delta * (1.0 - 1e-4)


@pytest.mark.parametrize("sizes", [(8, 1, 70, 10), (10, 3, 70, 10)])
def test_poisson_sampling_is_the_event_of_the_papers(sizes: tuple[int, int, int, int]) -> None:
    """BandMF App. F.3, with q = B b / m and ceil(n / b) compositions, by dp-accounting."""
    n, b, m, batch = sizes
    sampled = dp_accounting.PoissonSampledDpEvent(batch * b / m, dp_accounting.GaussianDpEvent(1.3))
    event = dp_accounting.SelfComposedDpEvent(sampled, math.ceil(n / b))
    known = pld_privacy_accountant.PLDAccountant().compose(event).get_epsilon(1e-5)
    assert groups.epsilon(Poisson(*sizes), 1.3, 1e-5) == pytest.approx(known, rel=1e-3)


@pytest.mark.parametrize("kind", [Poisson, FixedSize, RandomAllocation])
def test_where_all_are_drawn_nothing_is_amplified(kind: type) -> None:
    found = groups.epsilon(kind(12, 4, 40, 10), 2.0, 1e-5)
    alone = gaussian.epsilon(2.0 / math.sqrt(3.0), 1e-5, disjoint_participations=3)
    assert found == pytest.approx(alone, rel=1e-5)
    assert found <= alone


def test_a_truncated_batch_costs_more_than_an_uncut_one() -> None:
    sizes = 9, 1, 400, 50
    found = [groups.epsilon(TruncatedPoisson(*sizes, most), 2.0, 1e-5) for most in (400, 60, 50)]
    assert found == sorted(found)
    assert found[2] > 1.1 * found[0]
    assert found[0] == pytest.approx(groups.epsilon(Poisson(*sizes), 2.0, 1e-5), rel=1e-4)
    # Groups of 2 and of 3 clients: losses hold for both.
    for population, sizes_of_groups in ((5, (2, 3)), (4, (2,))):
        losses = groups.losses_of_round(TruncatedPoisson(8, 2, population, 2, 2), 1.0, 1e-3)
        q = 4 / population
        for direction, pmf in enumerate((losses._pmf_remove, losses._pmf_add)):
            exact = [
                groups.truncated_divergences(1.0, q, size, 2, np.array([0.5]))[direction][0]
                for size in sizes_of_groups
            ]
            assert pmf.get_delta_for_epsilon(0.5) == pytest.approx(max(exact), rel=1e-3)


def _shuffled(draws: Shuffling, sigma: float, delta: float) -> tuple[float, float]:
    """Thm 3.1 and 3.8 with the grid of shares, in forty digits."""
    passes, count = draws.most_participations, draws.rounds_of_cycle
    pass_delta = delta if passes == 1 else delta / passes / 2
    best = math.inf
    for share in np.geomspace(1e-6, 0.25, 24):
        local = share * pass_delta / count
        e0 = mpmath.mpf(gaussian.exact_epsilon(sigma / 2.0, local))
        half = mpmath.mpf(pass_delta) / 2
        if mpmath.exp(e0) * 16 * mpmath.log(2 / half) > count:
            continue
        g = mpmath.exp(e0)
        inner = 8 * mpmath.sqrt(g * mpmath.log(4 / half)) / mpmath.sqrt(count) + 8 * g / count
        e = mpmath.log(1 + (g - 1) / (g + 1) * inner)
        if half + (mpmath.exp(e) + 1) * (1 + 1 / g / 2) * count * local <= pass_delta:
            best = min(best, float(e))
    return best, pass_delta


def test_shuffling_is_the_theorem() -> None:
    with mpmath.workdps(40):
        for draws in (Shuffling(20_000, 1, 20_000, 1), Shuffling(45_000, 1, 20_000, 1)):
            best, pass_delta = _shuffled(draws, 9.0, 1e-5)
            found = groups.amplified_epsilon(draws, 9.0, 1e-5)
            if draws.most_participations > 1:
                one = from_privacy_parameters(
                    common.DifferentialPrivacyParameters(best, pass_delta),
                    value_discretization_interval=1e-5,
                )
                best = one.self_compose(3).get_epsilon_for_delta(1e-5)
            assert found == pytest.approx(best, rel=1e-4)
    draws = Shuffling(20_000, 1, 20_000, 1)
    one_pass = groups.amplified_epsilon(draws, 9.0, 1e-5)
    assert groups.epsilon(draws, 9.0, 1e-5) == pytest.approx(one_pass, rel=1e-6)
    # The theorem's condition fails for little noise, and then nothing is amplified.
    assert groups.amplified_epsilon(Shuffling(20, 1, 200, 10), 0.5, 1e-5) == math.inf
    assert groups.epsilon(Shuffling(20, 1, 200, 10), 0.5, 1e-5) == gaussian.epsilon(0.5, 1e-5)


@pytest.mark.parametrize("draws", _ALL)
def test_losses_of_a_run_compose_to_its_epsilon(draws: Groups) -> None:
    sigma = 9.0 if isinstance(draws, Shuffling) else 1.1
    found = groups.losses(draws, sigma, 1e-3)
    assert type(found) is PrivacyLossDistribution
    exact = groups.amplified_epsilon(draws, sigma, 1e-4)
    assert exact * (1.0 - 1e-5) <= found.get_epsilon_for_delta(1e-4) <= 1.03 * exact + 1e-3


def test_losses_of_one_round_are_not_composed() -> None:
    one, known = (
        groups.losses(Poisson(1, 1, 10, 2), 1.0, 1e-2),
        groups.losses_of_round(Poisson(1, 1, 10, 2), 1.0, 1e-2),
    )
    np.testing.assert_array_equal(one._pmf_remove._probs, known._pmf_remove._probs)


def test_shuffled_runs_of_little_noise_have_the_losses_of_one_gaussian_mechanism() -> None:
    found = groups.losses(Shuffling(40, 4, 4000, 10), 0.11, 1e-1)
    exact = gaussian.exact_epsilon(0.11, 1e-4)
    assert exact <= found.get_epsilon_for_delta(1e-4) <= exact + 0.2


def test_random_allocation_has_the_losses_of_its_cycles() -> None:
    draws = RandomAllocation(7, 1, 30, 10)
    step = cycles.step_of_grid(1.1, 3)
    known = epsilon_of(cycles.losses_of_cycles(3, 7, 1.1, step), 1e-4)
    assert groups.amplified_epsilon(draws, 1.1, 1e-4) == known


def test_intervals_are_fine_enough_for_an_epsilon() -> None:
    assert [groups.interval_for(each) for each in (1e-9, 0.5, 100.0)] == [1e-7, 5e-5, 1e-3]
    # Small epsilons are computed on a grid of their own.
    small = groups.amplified_epsilon(Poisson(1, 1, 1000, 1), 20.0, 1e-7)
    assert small < 1e-2
    exact = _exact(Poisson(1, 1, 1000, 1), 20.0, small * (1.0 - 1e-3))
    assert exact >= 1e-7 * (1.0 - 1e-2)
    # A grid has no more points than a limit, however little noise there is.
    losses = groups.composed_losses(Poisson(1, 1, 10, 1), 0.1, 1e-9)
    assert losses._pmf_remove.size <= 1_000_000


def test_delta_pays_for_all_parts() -> None:
    draws, delta = FixedSize(600, 1, 100, 10), 1e-6
    left = groups.delta_left(draws, 2.0, delta, 2**59)
    paid = gaussian.delta_left(delta, 1.0, 2**59)
    assert paid < delta
    assert left == paid - 600 * 2e-15
    assert groups.epsilon(draws, 2.0, delta, num_coordinates=2**59) == pytest.approx(
        groups.amplified_epsilon(draws, 2.0, left)
    )


def test_little_noise_is_refused_or_not_amplified() -> None:
    assert groups.epsilon(Poisson(4, 2, 100, 5), 0.0, 1e-5) == math.inf
    # Of one participation, noise of 0.15 cannot be accounted for, but a seldom one can.
    seldom = Poisson(1, 1, 100_000, 1)
    with pytest.raises(TailError):
        gaussian.epsilon(0.15, 1e-3)
    for sigma in (0.09, 0.15):
        with pytest.raises(TailError):
            groups.epsilon(FixedSize(1, 1, 10, 5), sigma, 1e-6)
    assert groups.epsilon(seldom, 0.25, 1e-3) < 1.0
    with pytest.raises(TailError):
        groups.epsilon(seldom, 0.05, 1e-3)


@pytest.mark.parametrize(
    ("sigma", "delta", "message"),
    [
        (-1.0, 1e-5, "sigma must not be negative"),
        (math.nan, 1e-5, "sigma must be finite"),
        (1.0, 0.0, "delta must be above 0"),
        (1.0, 0.9e-12, "at least 1e-12"),
    ],
)
def test_bad_arguments_are_refused(sigma: float, delta: float, message: str) -> None:
    for draws in _ALL:
        with pytest.raises(ValueError, match=message):
            groups.epsilon(draws, sigma, delta)


def test_only_draws_of_the_closed_list_are_accounted_for() -> None:
    other: Any = (4, 1, 10, 5)
    calls = (
        lambda: groups.epsilon(other, 1.0, 1e-5),
        lambda: groups.losses(other, 1.0, 1e-2),
    )
    for call in calls:
        with pytest.raises(TypeError, match="draws must be one of"):
            call()
