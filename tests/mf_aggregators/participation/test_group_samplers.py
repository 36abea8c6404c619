"""Data samplers: each batch from its round's part alone, by exactly the distribution of the scheme.

Statistical tests use fixed seeds. Each refuses a correct sampler with a probability of at
most 1e-4 over the choice of its seed, so that one that is changed may have to be looked at
once, and none fails by chance on the seeds that are here.
"""

import collections
import itertools
import random
from typing import Any

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from mf_aggregators.participation import (
    BallsInBins,
    FixedSizeSampling,
    MinSeparationSampling,
    PoissonSampling,
    Sampler,
    SamplingScheme,
    Shuffling,
    sampling_scheme,
)
from simulations.devices.device_populations import draw_cohort
from tests.examples import examples
from tests.mf_aggregators.scheme_rates import rounds_of_cycle

_FALSE_ALARM = 1e-4


def _order(sampler: Sampler) -> np.ndarray:
    """The clients of all parts, one part after the other."""
    parts = range(sampler.scheme.num_bands)
    return np.concatenate([sampler.group_of_round(part) for part in parts])


@st.composite
def _schemes(draw: st.DrawFn) -> SamplingScheme:
    num_bands = draw(st.integers(1, 5))
    clients_per_round = draw(st.integers(1, 4))
    smallest = num_bands * clients_per_round
    scheme = sampling_scheme(
        draw(st.sampled_from(["poisson", "fixed_size", "shuffling"])),
        num_rounds=draw(st.integers(num_bands, 25)),
        num_bands=num_bands,
        population=draw(st.integers(smallest, 5 * smallest + 3)),
        clients_per_round=clients_per_round,
    )
    assert scheme.has_groups
    return scheme


_SEEDS = st.integers(0, 2**128 - 1)


@given(_schemes(), _SEEDS)
@settings(max_examples=examples(200))
def test_clients_take_part_only_in_rounds_congruent_modulo_the_bands(
    scheme: SamplingScheme, seed: int
) -> None:
    sampler = scheme.sampler(seed)
    rounds_of = collections.defaultdict(list)
    for index in range(scheme.num_rounds):
        batch = sampler.draw(index)
        assert batch.dtype == np.int64
        assert np.all(np.diff(batch) > 0)
        assert np.all((batch >= 0) & (batch < scheme.population))
        assert np.all(np.isin(batch, sampler.group_of_round(index)))
        for client in batch.tolist():
            rounds_of[client].append(index)
    for rounds in rounds_of.values():
        assert len({index % scheme.num_bands for index in rounds}) == 1
        assert len(rounds) <= scheme.most_participations()


@given(_schemes(), _SEEDS)
def test_parts_are_disjoint_and_of_the_sizes_of_the_scheme(
    scheme: SamplingScheme, seed: int
) -> None:
    sampler = scheme.sampler(seed)
    parts = [sampler.group_of_round(part) for part in range(scheme.num_bands)]
    clients = np.concatenate(parts)
    assert len(np.unique(clients)) == len(clients)
    if isinstance(scheme, PoissonSampling):
        assert len(clients) == scheme.population
        smallest = scheme.population // scheme.num_bands
        assert all(len(part) in (smallest, smallest + 1) for part in parts)
    else:
        assert {len(part) for part in parts} == {getattr(scheme.as_draws(), "group_size", None)}


@given(
    st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.data(), _SEEDS
)
def test_each_pass_over_a_part_shows_every_client_of_it_once(
    num_bands: int, size: int, batches: int, passes: int, data: st.DataObject, seed: int
) -> None:
    left_out = data.draw(st.integers(0, num_bands * size - 1))
    scheme = Shuffling(
        num_rounds=num_bands * batches * passes,
        num_bands=num_bands,
        population=num_bands * size * batches + left_out,
        clients_per_round=size,
    )
    assert (rounds_of_cycle(scheme), scheme.most_participations()) == (batches, passes)
    sampler = scheme.sampler(seed)
    for part, number in itertools.product(range(num_bands), range(passes)):
        shown = [
            sampler.draw(part + num_bands * (number * batches + batch)) for batch in range(batches)
        ]
        np.testing.assert_array_equal(
            np.sort(np.concatenate(shown)), np.sort(sampler.group_of_round(part))
        )


@given(_schemes(), _SEEDS, st.randoms(use_true_random=False))
def test_a_batch_is_a_function_of_scheme_seed_and_round_alone(
    scheme: SamplingScheme, seed: int, chooser: random.Random
) -> None:
    """Whatever was drawn before, as after a resume."""
    sampler = scheme.sampler(seed)
    batches = [sampler.draw(index) for index in range(scheme.num_rounds)]
    order = list(range(scheme.num_rounds))
    chooser.shuffle(order)
    for index in order[:5]:
        np.testing.assert_array_equal(sampler.draw(index), batches[index])
        np.testing.assert_array_equal(scheme.sampler(seed).draw(index), batches[index])


@pytest.mark.parametrize("name", ["poisson", "fixed_size", "shuffling"])
def test_the_partition_is_random(name: str) -> None:
    """Which part each client is in, over 2,000 seeds: a chi-square test for each client."""
    scheme = sampling_scheme(name, num_rounds=3, num_bands=3, population=12, clients_per_round=4)
    counts = np.zeros((12, 3))
    for seed in range(2000):
        sampler = scheme.sampler(seed)
        for part in range(3):
            counts[sampler.group_of_round(part), part] += 1
    assert np.all(counts.sum(axis=1) == 2000)
    statistics = np.sum((counts - 2000 / 3) ** 2 / (2000 / 3), axis=1)
    assert np.min(scipy.stats.chi2.sf(statistics, 2)) > _FALSE_ALARM / 12


def _inclusions(scheme: SamplingScheme, seed: int) -> np.ndarray:
    """(participations, clients) bool: who of part 0 is in each of its rounds."""
    sampler = scheme.sampler(seed)
    part = sampler.group_of_round(0)
    rounds = range(0, scheme.num_rounds, scheme.num_bands)
    return np.array([np.isin(part, sampler.draw(index)) for index in rounds])


def _independence(pairs: np.ndarray, expected: np.ndarray) -> float:
    """The p-value of a chi-square test that 2 x 2 counts have known expectations."""
    statistic = np.sum((pairs - expected) ** 2 / expected)
    return float(scipy.stats.chi2.sf(statistic, pairs.size - 1))


def test_poisson_clients_join_with_the_probability_of_the_scheme() -> None:
    """Each client's count, all together, and the size of batches are binomial."""
    scheme: Any = PoissonSampling(12_000, num_bands=3, population=38, clients_per_round=4)
    inclusions = _inclusions(scheme, seed=3)
    rounds, clients = inclusions.shape
    probability = 4 * 3 / 38
    assert scheme.as_draws().sampling_probability == probability
    for count in inclusions.sum(axis=0):
        test = scipy.stats.binomtest(int(count), rounds, probability)
        assert test.pvalue > _FALSE_ALARM / clients
    total = scipy.stats.binomtest(int(inclusions.sum()), inclusions.size, probability)
    assert total.pvalue > _FALSE_ALARM
    # Batches of 8 and more, which are rare, in one class.
    sizes = np.bincount(np.minimum(inclusions.sum(axis=1), 8), minlength=9)
    distribution = scipy.stats.binom(clients, probability)
    expected = rounds * np.array([*distribution.pmf(np.arange(8)), distribution.sf(7)])
    assert scipy.stats.chisquare(sizes, expected).pvalue > _FALSE_ALARM


def test_poisson_clients_join_independently_of_each_other_and_of_other_rounds() -> None:
    scheme = PoissonSampling(num_rounds=9_000, num_bands=3, population=30, clients_per_round=3)
    inclusions = _inclusions(scheme, seed=4)
    rounds, clients = inclusions.shape
    probability = 0.3
    distribution = np.array([1.0 - probability, probability])
    pairs = list(itertools.combinations(range(clients), 2))
    for first, second in pairs:
        counts = np.zeros((2, 2))
        np.add.at(counts, (inclusions[:, first].astype(int), inclusions[:, second].astype(int)), 1)
        expected = rounds * np.outer(distribution, distribution)
        assert _independence(counts, expected) > _FALSE_ALARM / len(pairs)
    # Two rounds that follow each other within the part, which do not overlap with the next two.
    counts = np.zeros((2, 2))
    earlier, later = inclusions[0::2].astype(int), inclusions[1::2].astype(int)
    np.add.at(counts, (earlier.ravel(), later.ravel()), 1)
    expected = earlier.size * np.outer(distribution, distribution)
    assert _independence(counts, expected) > _FALSE_ALARM


def test_all_subsets_of_a_fixed_size_are_equally_likely() -> None:
    """Against the 10 subsets of 2 of the 5 clients of a part, and in pairs of rounds."""
    scheme = FixedSizeSampling(num_rounds=12_000, num_bands=2, population=11, clients_per_round=2)
    sampler = scheme.sampler(5)
    part = np.sort(sampler.group_of_round(0)).tolist()
    number = {subset: i for i, subset in enumerate(itertools.combinations(part, 2))}
    drawn = [number[tuple(sampler.draw(index).tolist())] for index in range(0, 12_000, 2)]
    assert len(number) == 10
    assert scipy.stats.chisquare(np.bincount(drawn, minlength=10)).pvalue > _FALSE_ALARM
    # Rounds are independent: all 100 pairs of subsets are equally likely.
    pairs = np.array(drawn[0::2]) * 10 + np.array(drawn[1::2])
    assert scipy.stats.chisquare(np.bincount(pairs, minlength=100)).pvalue > _FALSE_ALARM


def test_all_ways_to_cut_a_part_into_batches_are_equally_likely() -> None:
    """Against the 90 orders of 3 batches of 2 clients, and in pairs of passes."""
    scheme: Any = Shuffling(num_rounds=54_000, num_bands=2, population=13, clients_per_round=2)
    assert (scheme.as_draws().group_size, rounds_of_cycle(scheme)) == (6, 3)
    sampler = scheme.sampler(6)
    part = np.sort(sampler.group_of_round(1)).tolist()
    number: dict[tuple[int, ...], int] = {}
    for order in itertools.permutations(part):
        batches = itertools.chain.from_iterable(sorted(order[i : i + 2]) for i in (0, 2, 4))
        number.setdefault(tuple(batches), len(number))
    assert len(number) == 90
    drawn = []
    for first in range(1, 54_000, 6):
        shown = np.concatenate([sampler.draw(first + 2 * i) for i in range(3)])
        drawn.append(number[tuple(shown.tolist())])
    assert scipy.stats.chisquare(np.bincount(drawn, minlength=90)).pvalue > _FALSE_ALARM
    # Passes are independent: all 9 pairs of batches that one client is in, in two passes.
    passes = np.array(drawn).reshape(-1, 2)
    places = np.array([np.argsort(order) // 2 for order in number])
    pairs = places[passes[:, 0], 0] * 3 + places[passes[:, 1], 0]
    assert scipy.stats.chisquare(np.bincount(pairs, minlength=9)).pvalue > _FALSE_ALARM


@pytest.mark.short_cases(1)
@pytest.mark.parametrize("name", ["poisson", "fixed_size", "shuffling"])
def test_parts_draw_independently(name: str) -> None:
    """Who of a part is in the batch of a round, and who of the next one in that of the next."""
    scheme = sampling_scheme(
        name, num_rounds=12_000, num_bands=2, population=8, clients_per_round=2
    )
    sampler = scheme.sampler(7)
    first, second = sampler.group_of_round(0)[0], sampler.group_of_round(1)[0]
    counts = np.zeros((2, 2))
    # Only the first batch of each pass, where there are passes: the second is the rest.
    for index in range(0, 12_000, 4):
        one = int(first in sampler.draw(index))
        other = int(second in sampler.draw(index + 1))
        counts[one, other] += 1
    assert _independence(counts, np.full((2, 2), 750.0)) > _FALSE_ALARM


def test_draws_have_nothing_to_do_with_cohorts_of_the_same_seed() -> None:
    """The coordinates of generators are others than those of cohorts and of the task's data."""
    scheme = FixedSizeSampling(num_rounds=50, num_bands=1, population=1000, clients_per_round=100)
    sampler = scheme.sampler(9)
    everybody = np.ones(1000, dtype=bool)
    in_both = [
        np.intersect1d(
            sampler.draw(index), _order(sampler)[draw_cohort(everybody, 100, 9, index)]
        ).size
        for index in range(50)
    ]
    # 10 are expected in each round, with a variance of 100 * 0.1 * 0.9 * 900 / 999.
    deviation = (np.sum(in_both) - 500) / np.sqrt(50 * 8.108)
    assert 2 * scipy.stats.norm.sf(abs(deviation)) > _FALSE_ALARM


# Min-separation sampling and balls in bins:.


# p = 1/10, and p0 = 1/13.
_MIN_SEPARATION: Any = MinSeparationSampling(
    num_rounds=40, num_bands=3, population=13_000, clients_per_round=1000, separation=4
)


@st.composite
def _separated_schemes(draw: st.DrawFn) -> MinSeparationSampling | BallsInBins:
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


@given(_separated_schemes(), _SEEDS)
@settings(max_examples=examples(200))
def test_participations_keep_the_separation_and_batches_are_of_the_population(
    scheme: MinSeparationSampling | BallsInBins, seed: int
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
def test_all_128_bits_of_a_seed_change_the_draws(
    scheme: MinSeparationSampling | BallsInBins,
) -> None:
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
    scheme: Any = MinSeparationSampling(5, 2, 30_000, 7_500, 3)
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
