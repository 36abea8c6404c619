"""Min-separation sampling and balls in bins: draws by exactly the scheme's distribution.

Clients are independent of each other, so that one sampler of many clients is a large sample.
Statistical tests use fixed seeds. Each refuses a correct sampler with a probability of at most
1e-4 over the choice of its seed, so that one that is changed may have to be looked at once, and
none fails by chance on the seeds that are here.
"""

import collections
import itertools

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from mf_aggregators.participation import (
    BallsInBins,
    MinSeparationSampling,
    Sampler,
    SeparatedScheme,
)
from tests.examples import examples

_FALSE_ALARM = 1e-4
_SEEDS = st.integers(0, 2**128 - 1)
# p = 1/10, and p0 = 1/13.
_MIN_SEPARATION = MinSeparationSampling(
    num_rounds=40, num_bands=3, population=13_000, clients_per_round=1000, separation=4
)


@st.composite
def _schemes(draw: st.DrawFn) -> SeparatedScheme:
    num_bands = draw(st.integers(1, 4))
    separation = draw(st.integers(num_bands, 7))
    clients = draw(st.integers(1, 4))
    rounds = draw(st.integers(num_bands, 25))
    if draw(st.booleans()):
        population = separation * clients + draw(st.integers(0, separation - 1))
        return BallsInBins(rounds, num_bands, population, clients, separation)
    population = separation * clients + draw(st.integers(0, 40))
    return MinSeparationSampling(rounds, num_bands, population, clients, separation)


def _patterns(sampler: Sampler) -> np.ndarray:
    """(rounds, clients) bool: who took part when."""
    scheme = sampler.scheme
    found = np.zeros((scheme.num_rounds, scheme.population), bool)
    for index in range(scheme.num_rounds):
        found[index, sampler.draw(index)] = True
    return found


@given(_schemes(), _SEEDS)
@settings(deadline=None, max_examples=examples(200))
def test_participations_keep_the_separation_and_batches_are_of_the_population(
    scheme: SeparatedScheme, seed: int
) -> None:
    sampler = scheme.sampler(seed)
    last = np.full(scheme.population, -scheme.separation)
    for index in range(scheme.num_rounds):
        batch = sampler.draw(index)
        assert batch.dtype == np.int64
        assert np.all(np.diff(batch) > 0)
        assert np.all((batch >= 0) & (batch < scheme.population))
        assert len(batch) <= sampler.num_eligible(index) <= scheme.population
        assert np.all(index - last[batch] >= scheme.separation)
        last[batch] = index


@pytest.mark.parametrize("scheme", [_MIN_SEPARATION, BallsInBins(8, 3, 400, 100, 4)])
def test_all_128_bits_of_a_seed_change_the_draws(scheme: SeparatedScheme) -> None:
    seeds = [0, *(1 << bit for bit in range(128))]
    drawn = {scheme.sampler(seed).draw(1).tobytes() for seed in seeds}
    assert len(drawn) == len(seeds)


def _check_rate(scheme: MinSeparationSampling, sampler: Sampler) -> None:
    """From round 0 on, the clients of each round are as many as m draws of probability B / m."""
    rate = scheme.clients_per_round / scheme.population
    for index in range(scheme.num_rounds):
        test = scipy.stats.binomtest(len(sampler.draw(index)), scheme.population, rate)
        assert test.pvalue > _FALSE_ALARM / scheme.num_rounds


def test_the_rate_of_participation_is_stationary_from_round_0_on() -> None:
    assert _MIN_SEPARATION.as_draws().joining_probability == pytest.approx(0.1)
    _check_rate(_MIN_SEPARATION, _MIN_SEPARATION.sampler(1))


def test_free_clients_join_by_independent_coins_of_one_probability() -> None:
    """How many are free, how many of them join, and how long they wait after they are free."""
    sampler = _MIN_SEPARATION.sampler(2)
    assert (
        scipy.stats.binomtest(
            sampler.num_eligible(0),
            _MIN_SEPARATION.population,
            1.0 / (1.0 + 0.1 * (_MIN_SEPARATION.separation - 1)),
        ).pvalue
        > _FALSE_ALARM
    )
    free = sum(sampler.num_eligible(index) for index in range(_MIN_SEPARATION.num_rounds))
    joined = sum(len(sampler.draw(index)) for index in range(_MIN_SEPARATION.num_rounds))
    assert scipy.stats.binomtest(joined, free, 0.1).pvalue > _FALSE_ALARM
    # Waits after a participation in the first 10 rounds, those of 24 and more in one class.
    patterns = _patterns(sampler)
    counts = np.zeros(25, int)
    for client in range(_MIN_SEPARATION.population):
        rounds = np.flatnonzero(patterns[:, client])
        for earlier, later in itertools.pairwise([*rounds, 10**6]):
            if earlier < 10:
                counts[min(later - earlier - _MIN_SEPARATION.separation, 24)] += 1
    distribution = [0.1 * 0.9**wait for wait in range(24)]
    expected = counts.sum() * np.array([*distribution, 1.0 - sum(distribution)])
    assert scipy.stats.chisquare(counts, expected).pvalue > _FALSE_ALARM


def test_whole_patterns_have_the_law_of_the_scheme() -> None:
    """All patterns of five rounds, by their probabilities, worked out one by one."""
    scheme = MinSeparationSampling(5, 2, 30_000, 7_500, 3)
    p = scheme.as_draws().joining_probability
    assert p == pytest.approx(0.5)
    distribution: dict[tuple[bool, ...], float] = collections.defaultdict(float)
    starts = [1.0 / (1.0 + 2.0 * p), *[p / (1.0 + 2.0 * p)] * 2]
    for first, probability in enumerate(starts):
        for coins in itertools.product((False, True), repeat=5):
            free_from, pattern, weight = first, [], probability
            for index, coin in enumerate(coins):
                weight *= p if coin else 1.0 - p
                joins = coin and free_from <= index
                free_from = index + 3 if joins else free_from
                pattern.append(joins)
            distribution[tuple(pattern)] += weight
    assert sum(distribution.values()) == pytest.approx(1.0)
    patterns = _patterns(scheme.sampler(3))
    seen = collections.Counter(map(tuple, patterns.T.tolist()))
    assert seen.keys() <= distribution.keys()
    counts = [seen[pattern] for pattern in distribution]
    expected = [30_000 * probability for probability in distribution.values()]
    assert scipy.stats.chisquare(counts, expected).pvalue > _FALSE_ALARM


def test_clients_are_independent_of_each_other() -> None:
    """Neighbours in the population, in one round: pairs that do not overlap."""
    joined = _patterns(_MIN_SEPARATION.sampler(4))[20]
    counts = np.zeros((2, 2))
    np.add.at(counts, (joined[0::2].astype(int), joined[1::2].astype(int)), 1)
    distribution = np.array([12.0, 1.0]) / 13.0
    expected = len(joined) // 2 * np.outer(distribution, distribution)
    assert scipy.stats.chisquare(counts.ravel(), expected.ravel()).pvalue > _FALSE_ALARM


def test_bins_are_uniform_and_independent() -> None:
    """One bin for each client, by a chi-square test; likewise for pairs of neighbours."""
    scheme = BallsInBins(12, 3, 30_001, 7_500, 4)
    sampler = scheme.sampler(7)
    patterns = _patterns(sampler)
    np.testing.assert_array_equal(patterns[:4].sum(axis=0), 1)
    np.testing.assert_array_equal(patterns[4:], patterns[:-4])
    bins = np.argmax(patterns[:4], axis=0)
    assert scipy.stats.chisquare(np.bincount(bins)).pvalue > _FALSE_ALARM
    pairs = bins[0:30_000:2] * 4 + bins[1:30_000:2]
    assert scipy.stats.chisquare(np.bincount(pairs, minlength=16)).pvalue > _FALSE_ALARM
    assert sampler.num_eligible(0) == 30_001
