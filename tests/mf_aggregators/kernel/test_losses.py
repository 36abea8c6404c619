"""Losses on grids have no delta and no epsilon that is below the exact one."""

import dataclasses
import math
from typing import Any

import mpmath
import numpy as np
import pytest
import scipy.stats
from dp_accounting import dp_event
from dp_accounting.pld.pld_pmf import DensePLDPmf
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from hypothesis import given, settings
from hypothesis import strategies as st

from mf_aggregators import accounting
from mf_aggregators.accounting import losses_below
from mf_aggregators.kernel import certificate, composition, gaussian, losses
from mf_aggregators.kernel.dominating_pairs import (
    DominatingPair,
    MinSeparationRounds,
    RoundsDistribution,
)
from mf_aggregators.kernel.draws_of_clients import (
    BallsInBins,
    FixedSize,
    MinSeparation,
    Poisson,
    SampledRun,
    Shuffling,
    StrategyColumns,
)
from mf_aggregators.kernel.losses import Approximation, delta_of, epsilon_of, gaussian_losses
from mf_aggregators.participation import (
    PoissonSampling,
    SamplingScheme,
    TruncatedPoissonSampling,
    sampling_scheme,
)
from tests.examples import examples
from tests.mf_aggregators.kernel.test_certificate import _CASES, _divergences
from tests.mf_aggregators.participation_patterns import dominating_pair

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
            losses.amplified_epsilon(draws, sigma, delta),
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
    with mpmath.workdps(_DIGITS):
        masses = [mpmath.mpf(float(each)) for each in found._probs]
        ratios = [
            mpmath.exp(-mpmath.mpf(interval) * (found._lower_loss + j)) for j in range(len(masses))
        ]
        above, weighted = mpmath.mpf(float(found._infinity_mass)), mpmath.mpf(0)
        for at in range(len(masses) - 1, -1, -1):
            above, weighted = above + masses[at], weighted + masses[at] * ratios[at]
            if at % 997 == 0:
                exact = _gaussian(mpmath.mpf(sigma), -mpmath.log(ratios[at]))
                assert above - weighted / ratios[at] >= exact * (1 - mpmath.mpf("1e-14"))


def test_deltas_that_rounding_makes_larger_are_made_no_smaller() -> None:
    """A delta is at most an earlier one, and at least what was computed."""
    exact = np.array([0.4, 0.3, 0.2, 0.1, 0.05])
    rough = exact * np.array([1.0, 0.5, 1.0, 0.4, 1.0])
    found = losses.of_divergences(0.5, rough, exact)
    for step, least in enumerate((0.4, 0.2, 0.2, 0.05, 0.05)):
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
    found = losses.losses_of_round(Poisson(1, 1, 10, 2), 0.5, 1e-3)
    each = [PrivacyLossDistribution(pmf) for pmf in (found._pmf_remove, found._pmf_add)]
    epsilons, deltas = zip(
        *((epsilon_of(one, 1e-3), delta_of(one, 0.5)) for one in each), strict=True
    )
    assert epsilons[0] != epsilons[1]
    assert epsilon_of(found, 1e-3) == max(epsilons)
    assert delta_of(found, 0.5) == max(deltas)


_EPSILONS = np.array([0.0, 0.1, 0.4, 1.0, 1.7, 2.5, 4.0])


def _lower(profile: certificate.Profile) -> tuple[np.ndarray, np.ndarray]:
    failure = 1e-6 / (2 * len(_EPSILONS))
    return profile.means(_EPSILONS + 4e-9, failure, losses_below.lower_mean)


@pytest.mark.short_cases(2)
@pytest.mark.parametrize(("distribution", "matrix", "sigma"), _CASES)
def test_both_divergences_are_between_their_bounds_and_near_them(
    distribution: RoundsDistribution, matrix: list[list[float]], sigma: float
) -> None:
    """Against the integrals of both, of which neither is the other."""
    exact = _divergences(distribution, np.array(matrix), sigma)
    pair = dominating_pair(distribution, np.array(matrix), sigma)
    profile = certificate.Profile(pair, 1e-6, 1e-4, seed=5, samples=2**14)
    truth = np.array([exact(float(epsilon)) for epsilon in _EPSILONS]).T
    upper, lower = profile.upper(_EPSILONS), _lower(profile)
    for direction, (above, below) in enumerate(zip(upper, lower, strict=True)):
        assert np.all(above >= truth[direction])
        assert np.all(below <= truth[direction])
        error = 8.0 * np.sqrt(truth[direction] / 2**14) + 2e-3
        assert np.all(above <= truth[direction] + error)
        assert np.all(below >= truth[direction] - error)
    # The integral's own error is far smaller than what moments alone leave open.
    assert np.all(profile.renyi_bounds(_EPSILONS) >= truth[0])
    assert np.any(upper[0] < 0.8 * profile.renyi_bounds(_EPSILONS))


@pytest.mark.parametrize("mean", [0.003, 0.05, 0.6])
@pytest.mark.parametrize("bet", [0.02, 0.3, 0.9])
def test_means_are_bounded_as_often_as_they_say(mean: float, bet: float) -> None:
    """Terms of 0 or M, for the whole distribution of their number, in both directions."""
    largest, samples = 2.0, 120
    counts = np.arange(samples + 1)
    distribution = scipy.stats.binom.pmf(counts, samples, mean / largest)
    for failure in (0.3, 0.02, 1e-4):
        arguments = samples, largest, bet / largest, failure
        above, below = (
            np.array([bound(np.full(count, largest), *arguments) for count in counts])
            for bound in (certificate.upper_mean, losses_below.lower_mean)
        )
        assert np.sum(distribution[above < mean]) <= failure
        assert np.sum(distribution[below > mean]) <= failure
        averages = counts * largest / samples
        assert np.all((below <= averages) & (averages <= above))
        # They are roots: a mean between both is refuted by neither wealth.
        middle = 0.5 * (above + below)
        losing = np.log1p(bet * (middle / largest - 1.0)) * counts
        losing += np.log1p(bet * middle / largest) * (samples - counts)
        inside = above < largest
        assert np.all(losing[inside] <= -math.log(failure) + 1e-6)


def test_samples_follow_from_pair_and_seed_alone() -> None:
    pair = DominatingPair(np.ones((4, 1)), 1.0, MinSeparationRounds(0.2, 1))

    def bounds(seed: int, failure: float = 1e-6) -> np.ndarray:
        profile = certificate.Profile(pair, failure, 1e-3, seed=seed, samples=2**12)
        return profile.upper(_EPSILONS)[0]

    np.testing.assert_array_equal(bounds(1), bounds(1))
    assert np.any(bounds(1) != bounds(2))
    # Who fails less often says less.
    assert np.all(bounds(1, 1e-12) >= bounds(1))


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
    found, known = (
        composition.losses_of_run(run, each),
        losses.losses_of_groups(run.draws, 2.0, 1e-2),
    )  # type: ignore[arg-type]
    np.testing.assert_array_equal(found._pmf_add._probs, known._pmf_add._probs)


def test_losses_of_secret_rounds_lie_on_both_sides_of_the_truth(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a separation of one, coins are those of Poisson sampling."""
    for name in ("_FEWEST_SAMPLES", "_MOST_SAMPLES", "_SAMPLES_OF_Q"):
        monkeypatch.setattr(losses, name, 2**12)
    run = SampledRun(MinSeparation(6, 1, 100, 10, 1), 1.0, _ONES)
    truth = losses.losses_of_groups(Poisson(6, 1, 100, 10), 1.0, 1e-3)
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


def test_both_directions_meet_at_epsilon_zero() -> None:
    """Of exact bounds, both divergences are met at every step, and h' at the negative ones."""
    steps, interval = np.array([0, 4, 10, 30]), 0.1
    ahead = gaussian.exact_deltas(1.3, steps * interval)
    behind = 0.9 * ahead
    behind[0] = ahead[0]
    found = losses.connected_losses(interval, steps, ahead, behind)
    directions = ((found._pmf_remove, ahead, behind), (found._pmf_add, behind, ahead))
    for pmf, forward, backward in directions:
        masses = losses._masses_of(pmf)
        for step, delta, other in zip(steps, forward, backward, strict=True):
            epsilon = float(step * interval)
            assert losses._delta(*masses, epsilon) == pytest.approx(delta, rel=1e-11)
            mirrored = -math.expm1(-epsilon) + math.exp(-epsilon) * other
            assert losses._delta(*masses, -epsilon) == pytest.approx(mirrored, rel=1e-11)
