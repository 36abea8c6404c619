"""Losses on grids have no delta and no epsilon that is below the exact one."""

import collections
import itertools
import math
import operator
from typing import Any

import dp_accounting
import mpmath
import numpy as np
import pytest
import scipy.special
import scipy.stats
from dp_accounting import dp_event
from dp_accounting.pld import common, pld_privacy_accountant, privacy_loss_distribution
from dp_accounting.pld.pld_pmf import DensePLDPmf
from dp_accounting.pld.privacy_loss_distribution import (
    PrivacyLossDistribution,
    from_privacy_parameters,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from mf_aggregators import accounting
from mf_aggregators.kernel import allocation, losses, sensitivity
from mf_aggregators.kernel.certificate import _BallsInBinsRounds
from mf_aggregators.kernel.losses import (
    BallsInBins,
    FixedSize,
    Groups,
    MinSeparation,
    Poisson,
    RandomAllocation,
    SampledRun,
    Shuffling,
    StrategyColumns,
    TruncatedPoisson,
    delta_of,
    epsilon_of,
    gaussian_losses,
)
from mf_aggregators.kernel.sensitivity import TailError
from mf_aggregators.participation import (
    PoissonSampling,
    SamplingScheme,
    TruncatedPoissonSampling,
    sampling_scheme,
)
from tests.examples import examples
from tests.mf_aggregators import brute_force, participation_patterns
from tests.mf_aggregators.kernel.random_claims import (
    _divergence,
    divergences,
    round_divergences,
)

_DIGITS = 40


def _gaussian(sigma: mpmath.mpf, epsilon: mpmath.mpf) -> mpmath.mpf:
    half = 1 / (2 * sigma)
    return mpmath.ncdf(half - epsilon * sigma) - mpmath.exp(epsilon) * mpmath.ncdf(
        -half - epsilon * sigma
    )


def _poisson(sigma: mpmath.mpf, q: mpmath.mpf, epsilon: mpmath.mpf) -> mpmath.mpf:
    """The larger divergence of (1 - q) N(0, s^2) + q N(1, s^2) and N(0, s^2), closed forms."""
    factor = mpmath.exp(epsilon)
    cut = sigma**2 * mpmath.log((factor - 1 + q) / q) + mpmath.mpf(1) / 2
    removed = q * mpmath.ncdf((1 - cut) / sigma) + (1 - q - factor) * mpmath.ncdf(-cut / sigma)
    rest = 1 / factor - 1 + q
    if rest <= 0:
        return removed
    cut = sigma**2 * mpmath.log(rest / q) + mpmath.mpf(1) / 2
    added = (1 - factor * (1 - q)) * mpmath.ncdf(cut / sigma) - factor * q * mpmath.ncdf(
        (cut - 1) / sigma
    )
    return max(removed, added)


def _exact_delta(sigma: float, q: float, rounds: int, epsilon: float) -> mpmath.mpf:
    """Of one Poisson sample, or of several rounds of everybody."""
    s, e = mpmath.mpf(sigma), mpmath.mpf(epsilon)
    if q == 1.0:
        return _gaussian(s / mpmath.sqrt(rounds), e)
    assert rounds == 1
    return _poisson(s, mpmath.mpf(q), e)


def _scheme(kind: type[SamplingScheme], clients: int, rounds: int) -> SamplingScheme:
    return sampling_scheme(
        kind.name, num_rounds=rounds, num_bands=1, population=100, clients_per_round=clients
    )


_deltas = st.floats(math.log(1.1e-12), math.log(0.9)).map(math.exp) | st.floats(0.01, 0.9)
_cases = st.tuples(st.just(100), st.sampled_from([1, 2, 3, 10])) | st.tuples(
    st.integers(1, 99), st.just(1)
)


@pytest.mark.long
@given(
    st.sampled_from([PoissonSampling, TruncatedPoissonSampling]),
    _cases,
    st.floats(math.log(0.25), math.log(30.0)).map(math.exp),
    _deltas,
)
@settings(max_examples=examples(10), deadline=None)
def test_no_epsilon_is_below_the_exact_one(
    kind: type[SamplingScheme], case: tuple[int, int], sigma: float, delta: float
) -> None:
    """The exact delta at what is stated is at most delta, in forty digits."""
    clients, rounds = case
    scheme = _scheme(kind, clients, rounds)
    draws: Any = scheme.as_draws()
    with mpmath.workdps(_DIGITS):
        for found in (
            # What a run states, and what its losses have without the charge for drawn noise.
            scheme.epsilon(sigma, delta),
            SampledRun(draws, sigma).amplified_epsilon(delta),
        ):
            assert _exact_delta(sigma, clients / 100, rounds, found) <= delta


# Stated below the exact epsilon by 1e-12 to 1e-10 where masses and losses were summed up as floats.
@pytest.mark.short_cases(3)
@pytest.mark.parametrize(
    ("sigma", "clients", "rounds", "delta"),
    [
        (0.3, 100, 1, 0.5),
        (0.42173460229650045, 88, 1, 0.5241422243408947),
        (1.387832601930993, 100, 2, 0.31849753265629516),
        (3.2985888308025357, 64, 1, 0.045794216605094626),
    ],
)
def test_known_cases_are_not_below(sigma: float, clients: int, rounds: int, delta: float) -> None:
    found = PoissonSampling(rounds, 1, 100, clients).epsilon(sigma, delta)
    with mpmath.workdps(_DIGITS):
        exact = _exact_delta(sigma, clients / 100, rounds, found)
        assert exact <= delta
        assert exact >= delta * (1.0 - 1e-6)


@pytest.mark.long
@given(st.floats(math.log(0.3), math.log(30.0)).map(math.exp), st.integers(1, 20), _deltas)
@settings(max_examples=examples(3), deadline=None)
def test_no_composed_epsilon_is_below_the_exact_one(sigma: float, count: int, delta: float) -> None:
    once = dp_event.GaussianDpEvent(sigma)
    sampled = dp_event.PoissonSampledDpEvent(1.0, once)
    for event in (once, sampled):
        composed = dp_event.SelfComposedDpEvent(event, count)
        found = accounting.composed_epsilon([composed], delta, num_coordinates=1000)
        with mpmath.workdps(_DIGITS):
            assert _exact_delta(sigma, 1.0, count, found) <= delta


@pytest.mark.parametrize("sigma", [0.4, 1.0, 20.0])
def test_losses_dominate_the_gaussian_mechanism(sigma: float) -> None:
    """In exact sums of their masses, at all losses of the grid between the far ones."""
    interval = 1e-3
    found = gaussian_losses(sigma, interval)._pmf_remove
    assert np.sum(found._probs) + found._infinity_mass == pytest.approx(1.0, abs=1e-9)
    with mpmath.workdps(_DIGITS):
        masses = [mpmath.mpf(float(each)) for each in found._probs]
        step = mpmath.exp(-mpmath.mpf(interval))
        steps = [step**found._lower_loss, *[step] * (len(masses) - 1)]
        ratios = list(itertools.accumulate(steps, operator.mul))
        above, weighted = mpmath.mpf(float(found._infinity_mass)), mpmath.mpf(0)
        for at in range(len(masses) - 1, -1, -1):
            above, weighted = above + masses[at], weighted + masses[at] * ratios[at]
            if at % 997 == 0:
                exact = _gaussian(mpmath.mpf(sigma), -mpmath.log(ratios[at]))
                assert above - weighted / ratios[at] >= exact * (1 - mpmath.mpf("1e-14"))


def test_deltas_that_rounding_makes_larger_are_made_no_smaller() -> None:
    """A delta is at most an earlier one, and at least what was computed."""
    exact = np.array([0.4, 0.3, 0.2, 0.1, 0.05, 0.01])
    rough = exact * np.array([1.0, 0.5, 1.0, 0.4, 1.0, 1.0])
    found = losses._of_divergences(0.5, rough, exact)
    for step, least in enumerate((0.4, 0.2, 0.2, 0.05, 0.05, 0.01)):
        assert found._pmf_remove.get_delta_for_epsilon(0.5 * step) >= least * (1.0 - 1e-15)


def _one_way(masses: list[float], first: int, infinite: float) -> PrivacyLossDistribution:
    return PrivacyLossDistribution(DensePLDPmf(0.25, first, np.array(masses), infinite, True))


def test_an_epsilon_is_rounded_up_and_no_further() -> None:
    """A loss of 1 with probability p: delta p (1 - exp(e - 1)), by hand."""
    found = _one_way([0.5, 0.0, 0.0, 0.0, 0.5], 0, 0.0)
    for delta in (0.1, 0.2, 0.3):
        exact = 1.0 + math.log1p(-2.0 * delta)
        assert exact <= epsilon_of(found, delta) <= exact + 1e-13
        assert delta_of(found, exact) == pytest.approx(delta, rel=1e-12)
        assert delta_of(found, exact) >= delta * (1.0 - 1e-15)
    assert epsilon_of(found, 0.4) == 0.0
    with_infinity = _one_way([0.5, 0.3], -2, 0.2)
    assert epsilon_of(with_infinity, 0.1) == math.inf
    assert epsilon_of(with_infinity, 0.2) == 0.0
    assert delta_of(with_infinity, 5.0) == 0.2


def test_the_larger_direction_counts() -> None:
    found = losses._losses_of_round(Poisson(1, 1, 10, 2), 0.5, 1e-3)
    each = [PrivacyLossDistribution(pmf) for pmf in (found._pmf_remove, found._pmf_add)]
    epsilons, deltas = zip(
        *((epsilon_of(one, 1e-3), delta_of(one, 0.5)) for one in each), strict=True
    )
    assert epsilons[0] != epsilons[1]
    assert epsilon_of(found, 1e-3) == max(epsilons)
    assert delta_of(found, 0.5) == max(deltas)


_COLUMNS = StrategyColumns(np.arange(1.0, 7.0)[:, np.newaxis])


def test_noise_multipliers_are_those_of_all_participations() -> None:
    run = SampledRun(FixedSize(8, 2, 40, 5), 3.0, _COLUMNS)
    # Groups need no C, and runs are equal whatever was given for it.
    assert run == SampledRun(FixedSize(8, 2, 40, 5), 3.0)
    assert (run.draws.most_participations, run.noise_multiplier) == (4, 1.5)
    # A client in the place of another one moves a sum twice.
    assert run.part_noise_multiplier == 1.5
    assert SampledRun(Poisson(8, 2, 40, 5), 3.0).part_noise_multiplier == 3.0
    timers = SampledRun(MinSeparation(6, 1, 40, 5, 4), 3.0, _COLUMNS)
    assert (timers.draws.most_participations, timers.part_noise_multiplier) == (2, 3.0)
    assert timers.noise_multiplier == pytest.approx(3.0 / math.sqrt(2.0))
    assert timers.epsilon(1e-5) == sensitivity.epsilon(
        timers.noise_multiplier, 1e-5, disjoint_participations=2
    )
    bins = SampledRun(BallsInBins(6, 1, 40, 5, 4), 3.0, _COLUMNS)
    assert bins.noise_multiplier == timers.noise_multiplier


@pytest.mark.parametrize(("sigma", "is_amplified"), [(0.05, False), (3.0, True), (2e8, False)])
def test_hardly_any_noise_and_hardly_any_loss_are_not_amplified(
    sigma: float, is_amplified: bool
) -> None:
    run = SampledRun(Poisson(4, 1, 40, 5), sigma)
    assert run.is_amplified == is_amplified
    if not is_amplified and sigma > 1.0:
        found = run.losses(1.0)
        known = gaussian_losses(run.noise_multiplier, 1.0)
        np.testing.assert_array_equal(found._pmf_remove._probs, known._pmf_remove._probs)
    # Noise of 0.3 is too little for a client in the place of another one.
    assert not SampledRun(Shuffling(4, 1, 40, 5), 0.3).is_amplified
    assert SampledRun(Shuffling(4, 1, 40, 5), 0.3).part_noise_multiplier == 0.3


_ALL: list[Groups] = [
    Poisson(6, 2, 60, 6),
    TruncatedPoisson(6, 2, 61, 6, 7),
    FixedSize(6, 2, 61, 6),
    RandomAllocation(7, 1, 30, 10),
    Shuffling(20_000, 1, 20_000, 1),
]


_ONE = 1, 1, 20, 3


def _exact(draws: Groups, sigma: float, epsilon: float) -> float:
    """The delta of a run of one round of one group, in closed form."""
    return float(np.max(round_divergences(draws, draws.population, 1.0 / sigma, epsilon)))


@given(
    st.sampled_from([Poisson(*_ONE), FixedSize(*_ONE), TruncatedPoisson(*_ONE, 4)]),
    st.floats(0.4, 8.0),
    st.floats(math.log(1e-9), math.log(0.05)).map(math.exp),
)
@settings(max_examples=examples(10), deadline=None)
def test_one_round_has_its_closed_form(draws: Groups, sigma: float, delta: float) -> None:
    found = SampledRun(draws, sigma).epsilon(delta)
    assert _exact(draws, sigma, found) <= delta
    if found > 1e-3:
        assert _exact(draws, sigma, found * (1.0 - 1e-3)) >= delta * (1.0 - 1e-4)


@pytest.mark.short_cases(1)
@pytest.mark.parametrize("sizes", [(8, 1, 70, 10), (10, 3, 70, 10)])
def test_poisson_sampling_is_the_event_of_the_papers(sizes: tuple[int, int, int, int]) -> None:
    """BandMF App. F.3, with q = B b / m and ceil(n / b) compositions, by dp-accounting."""
    n, b, m, batch = sizes
    sampled = dp_accounting.PoissonSampledDpEvent(batch * b / m, dp_accounting.GaussianDpEvent(1.3))
    event = dp_accounting.SelfComposedDpEvent(sampled, math.ceil(n / b))
    known = pld_privacy_accountant.PLDAccountant().compose(event).get_epsilon(1e-5)
    assert SampledRun(Poisson(*sizes), 1.3).epsilon(1e-5) == pytest.approx(known, rel=1e-3)


@pytest.mark.parametrize("kind", [Poisson, FixedSize, RandomAllocation])
def test_where_all_are_drawn_nothing_is_amplified(kind: type) -> None:
    found = SampledRun(kind(12, 4, 40, 10), 2.0).epsilon(1e-5)
    alone = sensitivity.epsilon(2.0 / math.sqrt(3.0), 1e-5, disjoint_participations=3)
    assert found == pytest.approx(alone, rel=1e-5)
    assert found <= alone


def test_a_truncated_batch_costs_more_than_an_uncut_one() -> None:
    sizes = 9, 1, 400, 50
    runs = [SampledRun(TruncatedPoisson(*sizes, most), 2.0) for most in (400, 60, 50)]
    found = [run.epsilon(1e-5) for run in runs]
    assert found == sorted(found)
    assert found[2] > 1.1 * found[0]
    assert found[0] == pytest.approx(SampledRun(Poisson(*sizes), 2.0).epsilon(1e-5), rel=1e-4)
    # Groups of 2 and of 3 clients: losses hold for both.
    for population, sizes_of_groups in ((5, (2, 3)), (4, (2,))):
        loss = losses._losses_of_round(TruncatedPoisson(8, 2, population, 2, 2), 1.0, 1e-3)
        q = 4 / population
        for direction, pmf in enumerate((loss._pmf_remove, loss._pmf_add)):
            exact = [
                losses._truncated_divergences(1.0, q, size, 2, np.array([0.5]))[direction][0]
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
        e0 = mpmath.mpf(sensitivity.exact_epsilon(sigma / 2.0, local))
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
            found = SampledRun(draws, 9.0).amplified_epsilon(1e-5)
            if draws.most_participations > 1:
                one = from_privacy_parameters(
                    common.DifferentialPrivacyParameters(best, pass_delta),
                    value_discretization_interval=1e-5,
                )
                best = one.self_compose(3).get_epsilon_for_delta(1e-5)
            assert found == pytest.approx(best, rel=1e-4)
    draws = Shuffling(20_000, 1, 20_000, 1)
    one_pass = SampledRun(draws, 9.0).amplified_epsilon(1e-5)
    assert SampledRun(draws, 9.0).epsilon(1e-5) == pytest.approx(one_pass, rel=1e-6)
    # The theorem's condition fails for little noise, and then nothing is amplified.
    assert SampledRun(Shuffling(20, 1, 200, 10), 0.5).amplified_epsilon(1e-5) == math.inf
    assert SampledRun(Shuffling(20, 1, 200, 10), 0.5).epsilon(1e-5) == accounting.epsilon(0.5, 1e-5)


@pytest.mark.parametrize("draws", _ALL)
def test_losses_of_a_run_compose_to_its_epsilon(draws: Groups) -> None:
    """But for shuffling, where they are those without amplification."""
    sigma = 9.0 if isinstance(draws, Shuffling) else 1.1
    found = SampledRun(draws, sigma).losses(1e-3)
    assert type(found) is PrivacyLossDistribution
    assert all(each._pessimistic_estimate for each in (found._pmf_remove, found._pmf_add))
    exact = SampledRun(draws, sigma).amplified_epsilon(1e-4)
    if isinstance(draws, Shuffling):
        exact = sensitivity.exact_epsilon(sigma, 1e-4)
    assert exact * (1.0 - 1e-5) <= found.get_epsilon_for_delta(1e-4) <= 1.03 * exact + 1e-3


def test_intervals_are_fine_enough_for_an_epsilon() -> None:
    assert [losses._interval_for(each) for each in (1e-9, 0.5, 100.0)] == [1e-7, 5e-5, 1e-3]
    # Small epsilons are computed on a grid of their own.
    seldom = Poisson(1, 1, 1000, 1)
    small = SampledRun(seldom, 20.0).amplified_epsilon(1e-7)
    assert small < 1e-2
    exact = _exact(seldom, 20.0, small * (1.0 - 1e-3))
    assert exact >= 1e-7 * (1.0 - 1e-2)
    # Epsilons below 1e-3 are amplified as well: delta at 0 is here a thousandth of 8e-5.
    assert 0.0 < SampledRun(FixedSize(1, 1, 1, 1), 5e3).epsilon(1e-6) < 1e-3
    assert SampledRun(seldom, 5e3).epsilon(1e-6) == 0.0
    # A grid has no more points than a limit, however little noise there is.
    loss = SampledRun(Poisson(1, 1, 10, 1), 0.1).losses_near(1e-9)
    assert loss._pmf_remove.size <= 1_000_000


def test_delta_pays_for_all_parts() -> None:
    draws, delta = FixedSize(600, 1, 100, 10), 1e-6
    left = sensitivity.delta_left(delta, 1.0, 2**59, 600)
    paid = sensitivity.delta_left(delta, 1.0, 2**59)
    assert paid < delta
    assert left == paid - 600 * 2e-15
    assert SampledRun(draws, 2.0).epsilon(delta, num_coordinates=2**59) == pytest.approx(
        SampledRun(draws, 2.0).amplified_epsilon(left)
    )


def test_little_noise_is_refused_or_not_amplified() -> None:
    assert SampledRun(Poisson(4, 2, 100, 5), 0.0).epsilon(1e-5) == math.inf
    # Of one participation, noise of 0.15 cannot be accounted for, but a seldom one can.
    seldom = Poisson(1, 1, 100_000, 1)
    with pytest.raises(TailError):
        sensitivity.epsilon(0.15, 1e-3)
    for sigma in (0.09, 0.15):
        with pytest.raises(TailError):
            SampledRun(FixedSize(1, 1, 10, 5), sigma).epsilon(1e-6)
    assert SampledRun(seldom, 0.25).epsilon(1e-3) < 1.0
    with pytest.raises(TailError):
        SampledRun(seldom, 0.05).epsilon(1e-3)


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
            SampledRun(draws, sigma).epsilon(delta)


_AT = np.array([0.0, 0.3, 1.0, 2.5])


def _losses(
    sigma: float, rounds: int, taking_place: int | None = None
) -> privacy_loss_distribution.PrivacyLossDistribution:
    step = allocation._step_of_grid(sigma, rounds)
    return allocation._losses_of_cycle(sigma, rounds, taking_place or rounds, step)


def _both_deltas(
    loss: privacy_loss_distribution.PrivacyLossDistribution,
) -> tuple[np.ndarray, np.ndarray]:
    """Of P from Q and of Q from P."""
    return (
        np.array([loss._pmf_remove.get_delta_for_epsilon(float(e)) for e in _AT]),
        np.array([loss._pmf_add.get_delta_for_epsilon(float(e)) for e in _AT]),
    )


@pytest.mark.parametrize(
    ("sigma", "rounds", "taking_place"), [(0.8, 7, 7), (0.8, 20, 20), (0.7, 9, 5)]
)
def test_sums_of_many_rounds_are_convolutions(sigma: float, rounds: int, taking_place: int) -> None:
    """Of log-normal numbers on an even grid, whose ends have 1e-6 of the mean."""
    size, step = 2**20, 2e-4
    edges = np.maximum((np.arange(size + 1) - 0.5) * step, 1e-300)
    masses = np.diff(scipy.stats.norm.cdf(sigma * np.log(rounds * edges) + 0.5 / sigma))
    total = np.fft.irfft(np.fft.rfft(masses) ** taking_place, size)
    ratios = np.arange(size) * step + (1.0 - taking_place / rounds)
    for deltas, sign in zip(
        _both_deltas(_losses(sigma, rounds, taking_place)), (1.0, -1.0), strict=True
    ):
        a = np.exp(sign * _AT)
        known = [
            np.maximum(sign * (ratios - each), 0.0) @ total / each ** (sign < 0.0) for each in a
        ]
        assert np.all(deltas >= np.array(known) * (1.0 - 1e-4) - 1e-6)
        np.testing.assert_allclose(deltas, known, rtol=2e-3, atol=2e-6)


@pytest.mark.parametrize(
    ("sigma", "rounds", "taking_place"),
    [(0.4, 1, 1), (3.0, 1, 1), (0.5, 2, 2), (2.0, 2, 2), (0.6, 4, 1), (1.2, 10, 1), (1.2, 10, 2)],
)
def test_short_cycles_have_the_divergences_of_their_sets(
    sigma: float, rounds: int, taking_place: int
) -> None:
    patterns = participation_patterns.of(_BallsInBinsRounds(rounds), np.eye(taking_place), sigma)
    exact = np.array([divergences(patterns, each) for each in _AT]).T
    for deltas, known in zip(
        _both_deltas(_losses(sigma, rounds, taking_place)), exact, strict=True
    ):
        assert np.all(deltas >= known * (1.0 - 1e-6) - 1e-12)
        np.testing.assert_allclose(deltas, known, rtol=2e-3, atol=1e-12)


def test_cycles_are_independent() -> None:
    """Two whole cycles of three rounds and a third one of which two rounds take place."""
    whole = _losses(0.9, 3)
    known = _both_deltas(whole.compose(whole).compose(_losses(0.9, 3, 2)))
    np.testing.assert_allclose(_both_deltas(allocation.losses_of_cycles(3, 8, 0.9)), known)


@pytest.mark.parametrize(("sigma", "rounds"), [(0.5, 30), (1.0, 300), (4.0, 3)])
def test_the_losses_are_those_of_a_pair(
    sigma: float, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss = _losses(sigma, rounds)
    for pmf in (loss._pmf_remove, loss._pmf_add):
        assert np.all(pmf._probs >= 0.0)
        assert np.sum(pmf._probs) + pmf._infinity_mass == pytest.approx(1.0, abs=2e-11)
        # Where nothing is lost, floats err by less than what is charged for them.
        assert abs(np.sum(pmf._probs) - 1.0) <= 1e-14 * rounds + 1e-14
        assert pmf._infinity_mass >= 1e-14 * rounds
    # The ends of a grid that is too short count as infinite losses.
    monkeypatch.setattr(allocation, "_DEVIATIONS", 3.0)
    short = _losses(sigma, rounds)
    for pmf in (short._pmf_remove, short._pmf_add):
        assert pmf._infinity_mass + 1e-12 >= 1.0 - np.sum(pmf._probs) >= 1e-3


_EPSILONS_OF_ROUND = np.array([0.0, 0.2, 0.7, 1.5, 3.0])


def _density(points: np.ndarray, means: np.ndarray, sigma: float) -> np.ndarray:
    """Of a uniform mixture of normal distributions at (k, d) points."""
    found = np.zeros(len(points))
    for mean in means:
        found += np.prod(scipy.stats.norm.pdf(points, mean, sigma), axis=1)
    return found / len(means)


@given(
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 2),
    st.floats(0.5, 2.0),
    st.integers(0, 2**32),
)
@settings(max_examples=examples(80), deadline=None)
def test_no_batch_of_small_parts_gets_beyond_the_pair(
    size: int, batch: int, dimensions: int, sigma: float, seed: int
) -> None:
    """Clients with any updates of norm at most 1; the first one is zeroed."""
    batch = min(batch, size)
    rng = np.random.default_rng(seed)
    updates = rng.normal(size=(size, dimensions))
    if rng.random() < 0.5:
        updates = np.sign(updates[:, :1]) * np.eye(dimensions)[0]
    updates /= np.maximum(1.0, np.linalg.norm(updates, axis=1, keepdims=True))
    zeroed = updates.copy()
    zeroed[0] = 0.0
    axis = np.linspace(-batch - 7.0 * sigma, batch + 7.0 * sigma, 4001 if dimensions == 1 else 301)
    points = np.stack(np.meshgrid(*[axis] * dimensions, indexing="ij"), -1).reshape(-1, dimensions)
    cell = (axis[1] - axis[0]) ** dimensions
    # Where the larger of two densities changes, a sum over cells is off by a share of their area.
    margin = 1e-6 + 0.04 * ((axis[1] - axis[0]) / sigma) ** 2
    subsets = [list(each) for each in itertools.combinations(range(size), batch)]
    p = _density(points, np.array([updates[each].sum(axis=0) for each in subsets]), sigma)
    q = _density(points, np.array([zeroed[each].sum(axis=0) for each in subsets]), sigma)
    share = batch / size
    with_client = losses._divergence_with(sigma, share, _EPSILONS_OF_ROUND)
    without = losses._divergence_without(sigma, share, _EPSILONS_OF_ROUND)
    for epsilon, most, most_without in zip(_EPSILONS_OF_ROUND, with_client, without, strict=True):
        assert cell * brute_force.hockey_stick(p, q, epsilon) <= most + margin
        assert cell * brute_force.hockey_stick(q, p, epsilon) <= most_without + margin


@pytest.mark.parametrize("clients", [1, 3, 10, 19, 20])
@pytest.mark.parametrize("sigma", [0.4, 1.3, 6.0])
def test_the_bounds_are_attained(clients: int, sigma: float) -> None:
    """Where all other clients have the opposite update, and where they have the same one."""
    sizes, q = (1, 1, 20, clients), clients / 20
    draws = Poisson(*sizes), FixedSize(*sizes), TruncatedPoisson(*sizes, clients)
    for epsilon in _EPSILONS_OF_ROUND:
        found = (
            losses._poisson_divergences(sigma, q, epsilon),
            losses._fixed_divergences(sigma, q, epsilon),
            losses._truncated_divergences(sigma, q, 20, clients, epsilon),
        )
        known = [round_divergences(each, 20, 1.0 / sigma, epsilon) for each in draws]
        np.testing.assert_allclose(found, known, rtol=1e-8, atol=1e-13)


def _probabilities(size: int, q: float, largest: int) -> dict[tuple[int, ...], float]:
    """The probability of every batch, by all coins and all subsets that may stay."""
    found: dict[tuple[int, ...], float] = {}
    for coins in itertools.product([0, 1], repeat=size):
        came = tuple(i for i in range(size) if coins[i])
        probability = q ** len(came) * (1.0 - q) ** (size - len(came))
        stay = list(itertools.combinations(came, min(len(came), largest)))
        for batch in stay:
            found[batch] = found.get(batch, 0.0) + probability / len(stay)
    return found


@pytest.mark.short_cases(5)
@pytest.mark.parametrize(
    ("size", "q", "largest"),
    [(2, 0.5, 1), (3, 0.9, 1), (4, 0.3, 2), (4, 0.8, 3), (5, 0.6, 2), (6, 0.5, 3), (3, 0.4, 3)],
)
@pytest.mark.parametrize("sigma", [0.5, 1.2])
def test_no_round_of_small_groups_gets_beyond_the_bound(
    size: int, q: float, largest: int, sigma: float
) -> None:
    """All updates of -1, 0 and 1: the first client's is zeroed."""
    bounds = losses._truncated_divergences(sigma, q, size, largest, _EPSILONS_OF_ROUND)
    batches, closest = _probabilities(size, q, largest), np.zeros((2, len(_EPSILONS_OF_ROUND)))
    for others in itertools.combinations_with_replacement([-1.0, 0.0, 1.0], size - 1):
        sides = []
        for first in (1.0, 0.0):
            weights: dict[float, float] = collections.defaultdict(float)
            for batch, probability in batches.items():
                weights[sum((first, *others)[i] for i in batch)] += probability
            sides.append(tuple((weight, mean) for mean, weight in weights.items()))
        for direction, (p, other) in enumerate((sides, sides[::-1])):
            found = [_divergence(p, other, 1.0 / sigma, each) for each in _EPSILONS_OF_ROUND]
            assert np.all(found <= bounds[direction] * (1.0 + 1e-9) + 1e-12)
            closest[direction] = np.maximum(closest[direction], found)
    # It is nearly attained.
    assert closest[0, 1] >= 0.85 * bounds[0][1]


def test_a_batch_that_is_hardly_ever_cut_is_a_poisson_sample() -> None:
    """So seldom that the probability is no float."""
    found = losses._truncated_divergences(1.1, 1e-40, 10, 9, _EPSILONS_OF_ROUND)
    known = losses._poisson_divergences(1.1, 1e-40, _EPSILONS_OF_ROUND)
    np.testing.assert_array_equal(found, known)
