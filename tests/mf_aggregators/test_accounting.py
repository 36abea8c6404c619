"""Noise multipliers for a target, and bounds on attackers: printed values and best attacks."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.optimize
import scipy.special
import scipy.stats
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from hypothesis import given, settings
from hypothesis import strategies as st

from mf_aggregators import accounting
from mf_aggregators.kernel import allocation, certificate, losses, sensitivity
from mf_aggregators.kernel.certificate import DominatingPair, ImportanceSampler
from mf_aggregators.kernel.losses import (
    SampledRun,
    StrategyColumns,
)
from mf_aggregators.participation import (
    BallsInBins,
    FixedSizeSampling,
    MinSeparationSampling,
    PoissonSampling,
    SamplingScheme,
    Shuffling,
    _columns_of_matrix,
    certificate_search,
    sampling_scheme,
)
from tests.examples import examples
from tests.mf_aggregators import brute_force
from tests.mf_aggregators.scheme_rates import true_positive_rate as _true_positive_rate
from tests.refusals import refuses

_RATES = np.array([1e-4, 1e-3, 0.01, 0.1, 0.5, 0.9])


def _rate(scheme: SamplingScheme, sigma: float, rates: Any, **options: Any) -> Any:
    """The rate of an attacker of a run, of what the kernel takes."""
    return accounting.true_positive_rate(scheme.run(sigma, None), rates, **options)


def test_the_production_guarantee_of_the_papers() -> None:
    """BandMF App. K.1: rho 0.52 gives epsilon 6.69 at delta 1e-10."""
    multiplier = accounting.noise_multiplier_of_zcdp(0.52)
    assert accounting.zcdp_rho(multiplier) == pytest.approx(0.52)
    assert round(accounting.epsilon(multiplier, 1e-10), 2) == 6.69


@given(st.floats(1e-300, 1e300))
def test_noise_for_a_rho_is_the_least_of_which_no_larger_one_is_stated(rho: float) -> None:
    multiplier = accounting.noise_multiplier_of_zcdp(rho)
    assert accounting.zcdp_rho(multiplier) <= rho
    assert accounting.zcdp_rho(multiplier * (1.0 - 1e-15)) > rho


@given(st.floats(0.05, 50.0), st.floats(-12.0, -1.0))
@settings(deadline=None, max_examples=examples(60))
def test_the_two_directions_are_inverse(epsilon: float, log_delta: float) -> None:
    delta = 10.0**log_delta
    multiplier = accounting.noise_multiplier(epsilon, delta)
    found = accounting.epsilon(multiplier, delta)
    assert found <= epsilon
    if found < epsilon * (1 - 1e-5):
        # The target needs less noise than anything can be stated for.
        with pytest.raises(accounting.TailError):
            accounting.epsilon(multiplier * (1 - 1e-6), delta)


@pytest.mark.parametrize("epsilon", [0.0, -1.0, float("inf"), float("nan"), 1e30])
def test_bad_epsilons_are_refused(epsilon: float) -> None:
    with refuses("epsilon"):
        accounting.noise_multiplier(epsilon, 1e-6)


@pytest.mark.parametrize(
    ("sigma", "false_positives", "printed"),
    [(0.543, 1, 31.39), (0.543, 0.1, 10.59), (1.0, 1, 9.24), (1.0, 0.1, 1.83)],
)
def test_known_values_in_percent(sigma: float, false_positives: float, printed: float) -> None:
    found = accounting.true_positive_rate(sigma, false_positives / 100.0)
    assert 100.0 * found == pytest.approx(printed, abs=0.005)


@given(st.floats(0.2, 50.0))
@settings(max_examples=examples(40), deadline=None)
def test_the_rate_is_that_of_the_whole_gaussian_curve(sigma: float) -> None:
    """Its least pair: the privacy curve in closed form (Balle and Wang, 2018, Thm 5)."""
    mu = 1.0 / sigma
    epsilons = np.linspace(0.0, 6.0 * mu + 0.5 * mu * mu, 2000)
    cdf, log_cdf = scipy.stats.norm.cdf, scipy.stats.norm.logcdf
    deltas = cdf(mu / 2 - epsilons / mu) - np.exp(epsilons + log_cdf(-mu / 2 - epsilons / mu))
    pairs = [
        (float(epsilon), float(delta)) for epsilon, delta in zip(epsilons, deltas, strict=True)
    ]
    rates = _RATES[_RATES < 0.5]
    of_pairs = np.asarray(accounting._rate_of_pairs(pairs, rates))
    found = np.asarray(accounting.true_positive_rate(sigma, rates))
    assert np.all(found <= of_pairs * (1.0 + 1e-9))
    np.testing.assert_allclose(of_pairs, found, rtol=5e-3)


def test_the_failure_probability_of_the_noise_is_charged() -> None:
    many = 2**75
    failure = sensitivity.failure_probability(1.0, many)
    assert failure > 1e-6
    with_failure = accounting.true_positive_rate(1.0, 0.001, num_coordinates=many)
    without = scipy.stats.norm.cdf(scipy.stats.norm.ppf(0.001) + 1.0)
    assert with_failure - without == pytest.approx(failure, rel=1e-6)
    scheme = PoissonSampling(20, 2, 4, 2)
    more, less = (_rate(scheme, 2.0, 0.001, num_coordinates=number) for number in (many, 1))
    assert more - less == pytest.approx(failure, rel=1e-3)


@st.composite
def _laws(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    size = draw(st.integers(2, 6))
    weights = st.lists(st.integers(0, 20), min_size=size, max_size=size).filter(any)
    with_client, without = (np.array(draw(weights), float) for _ in range(2))
    return with_client / with_client.sum(), without / without.sum()


@given(_laws())
@settings(max_examples=examples(200), deadline=None)
def test_no_test_between_two_laws_beats_the_bound(
    distributions: tuple[np.ndarray, np.ndarray],
) -> None:
    """All decisions between two distributions of a few outputs, and pairs that hold both ways."""
    with_client, without = distributions
    symmetric = _both_ways(with_client, without)
    shown = np.array(list(itertools.product((0.0, 1.0), repeat=len(with_client))))
    false_positives, true_positives = shown @ without, shown @ with_client
    found = np.asarray(
        accounting._rate_of_pairs(symmetric, np.minimum(np.maximum(false_positives, 0.0), 1.0))
    )
    assert np.all(true_positives <= found + 1e-9)


def _both_ways(one: np.ndarray, other: np.ndarray) -> list[tuple[float, float]]:
    ratios = [abs(math.log(p / q)) for p, q in zip(one, other, strict=True) if p > 0 and q > 0]
    epsilons = [0.0, *ratios]
    return [
        (
            epsilon,
            min(
                1.0,
                max(
                    brute_force.hockey_stick(p, q, epsilon) for p, q in ((one, other), (other, one))
                ),
            ),
        )
        for epsilon in epsilons
    ]


@given(st.floats(0.0, 3.0), st.floats(0.0, 0.5), st.floats(0.0, 1.0))
@settings(max_examples=examples(100), deadline=None)
def test_one_pair_is_met_by_randomised_response(
    epsilon: float, delta: float, false_positives: float
) -> None:
    """The bound of a pair is the best attack on the distributions with exactly this pair.

    With probability delta the secret is shown, else it is shown wrongly with e^-epsilon the
    probability of rightly (Kairouz, Oh and Viswanath, 2015).
    """
    right, wrong = (
        (1.0 - delta) * share / (1.0 + math.exp(epsilon)) for share in (math.exp(epsilon), 1.0)
    )
    with_client, without = [delta, right, wrong, 0.0], [0.0, wrong, right, delta]
    # Outputs in the order of falling likelihood ratio; within one of them by a coin.
    on_the_curve = np.interp(
        false_positives,
        np.cumsum([0.0, *without[1:3]]),
        delta + np.cumsum([0.0, *with_client[1:3]]),
    )
    best = 1.0 if false_positives > without[1] + without[2] else float(on_the_curve)
    found = accounting._rate_of_pairs([(epsilon, delta)], false_positives)
    assert found == pytest.approx(best, abs=1e-9)
    assert found >= best - 1e-15


@pytest.mark.parametrize(("sigma", "probability"), [(0.5, 0.5), (1.0, 0.25), (2.0, 0.1)])
def test_one_sampled_round_against_the_best_attacks(sigma: float, probability: float) -> None:
    """The likelihood ratio is monotone, so thresholds are the best tests, in both directions."""
    population = 2 * round(1 / probability)
    scheme = PoissonSampling(1, 1, population, 2)
    thresholds = sigma * scipy.stats.norm.isf(_RATES)
    accused = (1.0 - probability) * _RATES + probability * scipy.stats.norm.sf(
        thresholds - 1.0, scale=sigma
    )
    # Where the roles are exchanged: who took part is taken for the one that did not.
    reverse = []
    for rate in _RATES:

        def excess(threshold: float, rate: float = rate) -> float:
            drawn = probability * scipy.stats.norm.cdf(threshold - 1.0, scale=sigma)
            return (
                float((1.0 - probability) * scipy.stats.norm.cdf(threshold, scale=sigma) + drawn)
                - rate
            )

        threshold = scipy.optimize.brentq(excess, -60.0, 60.0)
        reverse.append(scipy.stats.norm.cdf(threshold, scale=sigma))
    best = np.maximum(accused, reverse)
    found = np.asarray(_rate(scheme, sigma, _RATES))
    assert np.all(found >= best)
    # The bound is a concave curve above both.
    assert np.all(found <= best * 1.06 + 1e-3)


@pytest.mark.short_cases(2)
@pytest.mark.parametrize(
    "scheme",
    [
        PoissonSampling(40, 4, 4000, 10),
        FixedSizeSampling(40, 4, 4000, 10),
        Shuffling(40, 4, 4000, 10),
        MinSeparationSampling(40, 1, 4000, 10, 8),
        BallsInBins(40, 1, 4000, 100, 40),
    ],
)
def test_sampling_never_helps_an_attacker_and_no_bound_is_below_guessing(
    scheme: SamplingScheme,
) -> None:
    found = np.asarray(_rate(scheme, 2.0, _RATES))
    participations = scheme.most_participations()
    unamplified = np.asarray(accounting.true_positive_rate(2.0 / participations**0.5, _RATES))
    assert np.all(found <= unamplified * (1.0 + 1e-11))
    assert np.all(found >= _RATES)
    assert np.all(np.diff(found) > 0.0)
    known = _rate(scheme, 2.0, 0.01, guarantees=[(0.01, 1e-6)])
    assert known <= math.exp(0.01) * 0.01 + 1.1e-6


def _exact_laws(
    scheme: Any, column: float, sigma: float, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Log-likelihood ratios of outputs with and without the client, for C = column I.

    By the sum over all patterns of two rounds and a separation of two: in none, the first or the
    second one. A client is free in the first round with probability 1 / (1 + p), and otherwise in
    the second one.
    """
    p = scheme.as_draws().joining_probability
    free_at_once = 1.0 / (1.0 + p)
    first = free_at_once * p
    second = (free_at_once * (1.0 - p) + (1.0 - free_at_once)) * p
    # Timers that begin in their stationary state: as many clients in every round.
    assert second == pytest.approx(first) == pytest.approx(1.0 / (1.0 / p + 1.0))
    weights = np.array([1.0 - first - second, first, second])
    means = column * np.array([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    chosen = means[rng.choice(3, size=200_000, p=weights)]
    noise = sigma * rng.standard_normal((2, 200_000, 2))

    def log_ratio(outputs: np.ndarray) -> np.ndarray:
        exponents = (outputs @ means.T - 0.5 * np.sum(means**2, axis=1)) / sigma**2
        return scipy.special.logsumexp(exponents, b=weights, axis=1)

    return log_ratio(chosen + noise[0]), log_ratio(noise[1])


@pytest.mark.parametrize("sigma", [0.7, 1.5])
def test_the_best_attack_on_min_separation_sampling_is_below_the_bound(sigma: float) -> None:
    """The likelihood ratio test of 200,000 outputs; false alarms are rarer than 1e-6.

    The bound is for all pairs of the same moments, so it is not tight: at most 1.5 times the best
    attack.
    """
    scheme = MinSeparationSampling(2, 1, 30, 5, 2)
    with_client, without = _exact_laws(scheme, 1.0, sigma, np.random.default_rng(1))
    for rate in (0.01, 0.1):
        threshold = np.quantile(without, 1.0 - rate)
        best = np.mean(with_client > threshold)
        found = _true_positive_rate(scheme, sigma, rate)
        # Five standard errors of both rates, the first of which shifts the threshold.
        error = 5.0 * (math.exp(threshold) * math.sqrt(rate) + math.sqrt(best)) / 200_000**0.5
        assert best <= found + error
        assert found <= 1.5 * best + error
        assert found < accounting.true_positive_rate(sigma, rate)


def _rate_with_min_separation(sigma: float, separation: int, **arguments: Any) -> float:
    """At a false positive rate of 1 %."""
    scheme = MinSeparationSampling(12, 1, 100, 5, separation)
    found = _true_positive_rate(scheme, sigma, 0.01, **arguments)
    assert isinstance(found, float)
    return found


def test_a_guess_of_the_bin_is_below_the_bound_where_moments_overflow() -> None:
    """One of two bins has 50 participations, and half of its clients are in it."""
    rates = np.array([1e-200, 1e-50, 1e-44, 1e-9, 0.01])
    attack = 0.5 * scipy.stats.norm.cdf(scipy.stats.norm.ppf(rates) + 50**0.5 / 0.25)
    assert np.all(_rate(BallsInBins(100, 1, 20, 10, 2), 0.25, rates) >= attack)


@pytest.mark.parametrize("failure", [0.0, 0.02])
def test_rates_are_those_of_the_best_of_all_moments(
    monkeypatch: pytest.MonkeyPatch, failure: float
) -> None:
    """Each order's inequality is solved alone, and what drawn noise may fail with is added."""
    monkeypatch.setattr(sensitivity, "failure_probability", lambda *unused: failure)
    run, rates = MinSeparationSampling(12, 1, 100, 5, 3).run(1.5, None), np.array([1e-9, 0.01, 0.3])
    found = accounting._rates_by_moments(run, rates, 2**20)
    assert found is not None
    moments = accounting._log_moments(run, 2**20)
    assert [order for order, _ in moments] == [*range(2, 9)]

    def largest(a: int, log_moment: float, x: float) -> float:
        def excess(y: float) -> float:
            terms = y**a * x ** (1 - a) + (1.0 - y) ** a * (1.0 - x) ** (1 - a)
            return math.log(terms) - log_moment

        return float(scipy.optimize.brentq(excess, x, 1.0)) if excess(1.0) > 0.0 else 1.0

    by_order = np.array([[largest(*each, x) for each in moments] for x in rates.tolist()])
    assert len(set(np.argmin(by_order, axis=1).tolist())) > 1
    np.testing.assert_allclose(found, np.min(by_order, axis=1) + failure, rtol=1e-4)


def test_rounding_of_more_numbers_helps_the_attacker() -> None:
    """Rows of noise are rounded, and a client may move as many numbers as there are."""
    few, usual, many = (
        _rate_with_min_separation(1.0, separation=3, num_coordinates=2**exponent)
        for exponent in (20, 40, 56)
    )
    assert few < usual == pytest.approx(few, rel=2e-3)
    assert usual < 0.98 * many


def test_no_noise_shows_every_client_and_no_release_shows_nothing() -> None:
    assert accounting.true_positive_rate(0.0, 0.0) == 1.0
    assert accounting.true_positive_rate(math.inf, 0.01) == 0.01
    assert accounting._rate_of_pairs([], 0.01) == 1.0
    assert accounting._rate_of_pairs([(math.inf, 0.0)], 0.01) == 1.0
    assert accounting._rate_of_pairs([(800.0, 1e-6)], 0.0) < 1.1e-6
    scheme = PoissonSampling(1, 1, 10, 1)
    assert _rate(scheme, 0.0, 0.01) == 1.0


def test_bad_arguments_are_refused() -> None:
    with refuses("1.5"):
        accounting.true_positive_rate(1.0, 1.5)
    with refuses("nan"):
        accounting.true_positive_rate(1.0, math.nan)
    with refuses("noise_multiplier"):
        accounting.true_positive_rate(-1.0, 0.5)
    for pair in ((-0.1, 0.0), (1.0, 1.5), (math.nan, 0.0)):
        with refuses("epsilon"):
            accounting._rate_of_pairs([pair], 0.5)
    with pytest.raises(sensitivity.TailError):
        accounting.true_positive_rate(0.1, 0.5)
    with pytest.raises(sensitivity.TailError):
        _rate(Shuffling(40, 4, 4000, 10), 0.11, 0.5)


_GROUPS: list[losses.Groups] = [
    losses.Poisson(6, 2, 60, 6),
    losses.TruncatedPoisson(6, 2, 61, 6, 7),
    losses.FixedSize(6, 2, 61, 6),
    losses.RandomAllocation(7, 1, 30, 10),
    losses.Shuffling(20_000, 1, 20_000, 1),
]


@pytest.mark.parametrize("draws", _GROUPS)
def test_pairs_of_the_curve_hold(draws: losses.Groups) -> None:
    sigma = 9.0 if isinstance(draws, losses.Shuffling) else 1.1
    pairs = accounting._curve(SampledRun(draws, sigma), sensitivity.DEFAULT_NUM_COORDINATES)
    assert len(pairs) == (8 if isinstance(draws, losses.Shuffling) else 120)
    for epsilon, delta in (pairs[len(pairs) // 3], pairs[len(pairs) // 2]):
        if 1e-9 < delta < 0.5:
            stated = SampledRun(draws, sigma).epsilon(delta)
            # Both have grids of their own.
            assert stated == pytest.approx(epsilon, rel=0.02, abs=2e-3)
    if not isinstance(draws, losses.Shuffling):
        epsilons, deltas = zip(*pairs, strict=True)
        assert epsilons[0] == 0.0
        assert deltas[-1] < 2e-11
        assert list(deltas) == sorted(deltas, reverse=True)
    assert accounting._curve(SampledRun(draws, 0.09), sensitivity.DEFAULT_NUM_COORDINATES) == ()


def test_the_curve_pays_for_noise_that_is_drawn_and_composed() -> None:
    draws, many = losses.FixedSize(6, 2, 61, 6), 2**75
    (_, first), *_ = accounting._curve(SampledRun(draws, 2.0), 1)
    (_, more), *_ = accounting._curve(SampledRun(draws, 2.0), many)
    failure = sensitivity.failure_probability(1.0, many)
    assert more - first == pytest.approx(failure, rel=1e-3)
    lost = sensitivity.failure_probability(1.0, 1, 3)
    assert lost <= accounting._curve(SampledRun(draws, 2.0), 1)[-1][1] < lost + 1e-11
    # Less noise for a client in the place of another one than can be accounted for.
    assert accounting._curve(SampledRun(draws, 0.3), sensitivity.DEFAULT_NUM_COORDINATES) == ()
    shuffled = SampledRun(losses.Shuffling(40, 4, 4000, 10), 0.11)
    assert accounting._curve(shuffled, sensitivity.DEFAULT_NUM_COORDINATES) == ()


# The version of the accounting, held against golden values.


_SIZES: dict[str, Any] = {
    "num_rounds": 8,
    "num_bands": 2,
    "population": 400,
    "clients_per_round": 10,
}
_COLUMNS = StrategyColumns(_columns_of_matrix(np.eye(8) + 0.5 * np.eye(8, k=-1), 2)).scaled()
_MECHANISM = DominatingPair(_COLUMNS, 1.5, certificate._MinSeparationRounds(0.05, 3))


def _at_two(loss: PrivacyLossDistribution) -> tuple[float, ...]:
    return float(loss.get_delta_for_epsilon(0.1)), float(loss.get_delta_for_epsilon(0.5))


def _amplified(sampling: str) -> float:
    scheme = sampling_scheme(sampling, **_SIZES)
    return scheme.epsilon(1.5, 1e-5)


def _values() -> dict[str, Callable[[], Any]]:
    """What users' caches follow from, by subject; smooth, so that rounding does not matter."""
    tuning = certificate_search._TuningSamples(
        _MECHANISM, ImportanceSampler(_MECHANISM, 3), 1e-5, 0, 2**11
    )
    return {
        "groups": lambda: (
            _amplified("poisson"),
            _amplified("fixed_size"),
            _amplified("shuffling"),
            *(losses._clones(0.5, each, 1000, 2e-6) for each in (1e-10, 1e-9)),
        ),
        "cycles": lambda: _at_two(allocation._losses_of_cycle(1.5, 5, 5, 1e-3)),
        "search": lambda: (
            certificate_search._most_samples(100),
            certificate_search._most_samples(10**5),
            tuning.largest(3.0),
            *tuning.needed(3.0),
        ),
        "pairs": lambda: (
            *_COLUMNS.ravel()[[0, 1, -2]],
            *certificate._MinSeparationRounds(0.05, 3).first_free_probabilities(),
            ImportanceSampler(_MECHANISM, 2).log_mgf,
            ImportanceSampler(_MECHANISM, 5).log_mgf,
        ),
        "gaussian": lambda: (
            accounting.epsilon(1.0, 1e-6),
            accounting.epsilon(4.0, 1e-6),
            accounting.noise_multiplier(2.0, 1e-6),
            accounting.exact_epsilon(1.0, 1e-6),
            sensitivity.delta_left(1e-12, 1.0, 2**40),
            1e20 * sensitivity.failure_probability(1.0, 2**40),
        ),
    }


# Of the version 5. Where one of them changes for a reason, raise the version, and put the new ones
# here: otherwise users' caches go on to serve what the accounting would no longer say.
_GOLDEN: dict[str, tuple[float, ...]] = {
    "groups": (
        0.4937729140694945,
        2.008900862579273,
        2.7533813795825006,
        0.2726376092004103,
        math.inf,
    ),
    "cycles": (0.08909355117186071, 0.01201349808896056),
    "search": (2097152, 60000, 0.0003842165423456729, 2620.9363956, 1843.4280965),
    "pairs": (
        0.8944271909999159,
        0.4472135954999579,
        0.8944271909999159,
        0.9090909090909091,
        0.045454545454545456,
        0.045454545454545456,
        0.014542226618426331,
        0.16332865574499053,
    ),
    "gaussian": (
        4.886554117731164,
        1.060701862404126,
        2.230476271530305,
        4.886554117521078,
        9.990004079004076e-13,
        99955.16955922845,
    ),
}
# More than what processors and versions of NumPy round differently, and less than a change.
_RELATIVE = 1e-6
# The search for a bet ends within a thousandth.
_OF_SEARCHES = 1e-3


@pytest.mark.short_cases(4)
@pytest.mark.parametrize("module", _GOLDEN)
def test_a_version_has_its_numbers(module: str) -> None:
    assert certificate_search.ACCOUNTING_VERSION == 5
    found = np.atleast_1d(_values()[module]())
    relative = _OF_SEARCHES if module == "search" else _RELATIVE
    np.testing.assert_allclose(found, _GOLDEN[module], rtol=relative, atol=0.0)
