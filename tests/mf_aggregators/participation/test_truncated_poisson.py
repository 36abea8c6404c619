"""Truncated Poisson samples, against all coins, subsets and updates of small groups."""

import functools
import itertools
import math

import numpy as np
import pytest
import scipy.stats

from mf_aggregators.participation import (
    PoissonSampling,
    TruncatedPoissonSampling,
    fixed_size,
    sampling_from_dict,
    truncated_poisson,
)

_EPSILONS = np.array([0.0, 0.2, 0.7, 1.5, 3.0])


def _batches(size: int, q: float, largest: int) -> dict[tuple[int, ...], float]:
    """The probability of every batch, by all coins and all subsets that may stay."""
    found: dict[tuple[int, ...], float] = {}
    for coins in itertools.product([0, 1], repeat=size):
        came = tuple(i for i in range(size) if coins[i])
        probability = q ** len(came) * (1.0 - q) ** (size - len(came))
        stay = list(itertools.combinations(came, min(len(came), largest)))
        for batch in stay:
            found[batch] = found.get(batch, 0.0) + probability / len(stay)
    return found


def _outputs(
    updates: tuple[float, ...], sigma: float, q: float, largest: int, grid: np.ndarray
) -> np.ndarray:
    density = np.zeros_like(grid)
    for batch, probability in _batches(len(updates), q, largest).items():
        mean = sum(updates[i] for i in batch)
        density += probability * scipy.stats.norm.pdf(grid, mean, sigma)
    return density


def _largest(p: np.ndarray, q: np.ndarray, step: float) -> tuple[np.ndarray, np.ndarray]:
    """The divergences of two densities in both directions."""
    both = []
    for upper, lower in ((p, q), (q, p)):
        both.append([step * np.sum(np.maximum(upper - math.exp(e) * lower, 0)) for e in _EPSILONS])
    return np.array(both[0]), np.array(both[1])


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
    grid = np.linspace(-size - 7.0 * sigma, size + 7.0 * sigma, 2001)
    step = grid[1] - grid[0]
    # Where the larger of two densities changes, a sum over cells is off by a share of their area.
    margin = 1e-6 + 0.03 * (step / sigma) ** 2
    bounds = truncated_poisson.divergences(sigma, q, size, largest, _EPSILONS)
    closest = np.zeros((2, len(_EPSILONS)))
    for others in itertools.combinations_with_replacement([-1.0, 0.0, 1.0], size - 1):
        found = _largest(
            _outputs((1.0, *others), sigma, q, largest, grid),
            _outputs((0.0, *others), sigma, q, largest, grid),
            step,
        )
        for direction in (0, 1):
            assert np.all(found[direction] <= bounds[direction] + margin)
            closest[direction] = np.maximum(closest[direction], found[direction])
    # It is nearly attained.
    assert closest[0, 1] >= 0.85 * bounds[0][1]


def test_two_rounds_of_small_groups_stay_below_the_composition() -> None:
    """The sums of two rounds, integrated over both outputs, with other updates in each."""
    size, q, largest, sigma, epsilon = 4, 0.5, 2, 1.0, 0.7
    scheme = TruncatedPoissonSampling(2, 1, size, 2, largest)
    assert scheme.sampling_probability == q
    loss = scheme.composed_loss(sigma, 1e-3)
    bound = float(loss.get_delta_for_epsilon(epsilon))
    grid = np.linspace(-10.0, 10.0, 301)
    step = grid[1] - grid[0]
    densities = functools.cache(lambda updates: _outputs(updates, sigma, q, largest, grid))
    exact = []
    patterns = list(itertools.combinations_with_replacement([-1.0, 0.0, 1.0], size - 1))
    for first, second in itertools.product(patterns, repeat=2):
        p = np.outer(densities((1.0, *first)), densities((1.0, *second)))
        without = np.outer(densities((0.0, *first)), densities((0.0, *second)))
        for upper, lower in ((p, without), (without, p)):
            exact.append(step**2 * np.sum(np.maximum(upper - math.exp(epsilon) * lower, 0.0)))
    assert 0.6 * bound <= max(exact) <= bound


def test_the_probabilities_of_a_cut_are_those_of_all_coins() -> None:
    """Of a round of one client that came, by all coins of the others."""
    size, q, largest, sigma = 6, 0.4, 3, 0.9
    batches = _batches(size, q, largest)
    stays = sum(p for batch, p in batches.items() if 0 in batch)
    others = scipy.stats.binom(size - 1, q)
    cut = float(others.sf(largest - 1))
    r = (stays - q * (1.0 - cut)) / cut
    found = truncated_poisson.divergences(sigma, q, size, largest, _EPSILONS)
    expected = (1.0 - cut) * fixed_size.divergence_without(sigma, q, _EPSILONS)
    expected += cut * fixed_size.divergence_with(sigma, r, _EPSILONS)
    np.testing.assert_allclose(found[0], expected, rtol=1e-8)


# By jax_privacy 2.0's truncated_dpsgd_event and dp-accounting 0.6.0's PLDAccountant, whose cut
# batches replace a client: sigma, rounds, clients per round, population, largest batch, delta.
_OF_PEER = [
    ((1.0, 500, 100, 10_000, 100, 1e-6), 10.014253633358809),
    ((1.0, 500, 100, 10_000, 150, 1e-6), 1.5922122075179235),
    ((0.8, 200, 100, 2_500, 130, 1e-5), 8.667439401419509),
]


@pytest.mark.parametrize(("sizes", "epsilon"), _OF_PEER)
def test_epsilons_are_at_most_those_of_jax_privacy(
    sizes: tuple[float, int, int, int, int, float], epsilon: float
) -> None:
    sigma, rounds, batch, population, largest, delta = sizes
    scheme = TruncatedPoissonSampling(rounds, 1, population, batch, largest)
    found = scheme.amplified_epsilon(sigma, delta)
    assert found <= epsilon * (1.0 + 1e-4)
    poisson = PoissonSampling(rounds, 1, population, batch)
    assert found >= poisson.amplified_epsilon(sigma, delta) * (1.0 - 1e-4)


def test_seldom_cut_batches_cost_next_to_nothing() -> None:
    sizes = 100, 2, 2511, 100
    scheme = TruncatedPoissonSampling.of_sizes(*sizes)
    size = scheme.size_of_group(1)
    seldom = scipy.stats.binom(size, scheme.sampling_probability)
    assert seldom.sf(scheme.largest_batch) <= 1e-6 < seldom.sf(scheme.largest_batch - 1)
    poisson = PoissonSampling(*sizes).epsilon(0.8, 1e-5)
    assert poisson <= scheme.epsilon(0.8, 1e-5) <= 1.002 * poisson


def test_epsilons_grow_where_more_is_cut() -> None:
    found = [
        TruncatedPoissonSampling(9, 1, 400, 50, largest).epsilon(2.0, 1e-5)
        for largest in (80, 60, 50)
    ]
    assert found == sorted(found)
    assert found[2] > 1.1 * found[0]


def test_groups_of_two_sizes_have_the_larger_epsilon() -> None:
    """Of 5 clients in 2 groups one has 3 and the other has 2, of whom none is ever cut."""
    scheme = TruncatedPoissonSampling(8, 2, 5, 2, 2)
    assert [scheme.size_of_group(group) for group in (0, 1)] == [2, 3]
    loss = scheme.loss_of_round(1.0, 1e-3)
    for direction, pmf in enumerate((loss._pmf_remove, loss._pmf_add)):
        exact = [
            truncated_poisson.divergences(1.0, 0.8, size, 2, np.array([0.5]))[direction]
            for size in (2, 3)
        ]
        assert pmf.get_delta_for_epsilon(0.5) == pytest.approx(float(np.max(exact)), rel=1e-3)
        assert exact[0] != pytest.approx(exact[1], rel=1e-2)


def test_batches_are_random_subsets_of_those_of_poisson_sampling() -> None:
    sizes = 400, 2, 60, 10
    scheme = TruncatedPoissonSampling(*sizes, largest_batch=12)
    whole, cut = PoissonSampling(*sizes).sampler(3), scheme.sampler(3)
    kept = np.zeros(60)
    for index in range(400):
        came, batch = whole.draw(index), cut.draw(index)
        assert set(batch) <= set(came)
        assert len(batch) == min(len(came), 12)
        if len(came) > 12:
            kept[batch] += 1.0
        np.testing.assert_array_equal(batch, np.unique(batch))
    # All clients stay about as often: a chi-square test with 1e-6 of false alarms.
    statistic = float(np.sum((kept - kept.mean()) ** 2) / kept.mean())
    assert statistic < scipy.stats.chi2.isf(1e-6, 59)
    cohorts = [cut.draw(index) for index in range(400)]
    assert scheme.deviation(60, cohorts) is None
    assert cut.deviation(60, cohorts) is None
    uncut = [whole.draw(index) for index in range(400)]
    found = scheme.deviation(60, uncut)
    assert found is not None
    assert "largest batch of 12" in found


def test_a_scheme_is_described_with_its_largest_batch() -> None:
    scheme = TruncatedPoissonSampling(10, 2, 100, 10, 20)
    assert scheme.to_dict()["largest_batch"] == 20
    assert sampling_from_dict(scheme.to_dict()) == scheme
    assert scheme.largest_cohort == 20
    flags = {"sampling": "truncated_poisson", "clients_per_round": 10, "largest_batch": 20}
    assert scheme.run_flags() == flags
    assert scheme.of_first(4) == TruncatedPoissonSampling(4, 2, 100, 10, 20)


def test_bad_largest_batches_are_refused() -> None:
    with pytest.raises(ValueError, match="largest batch of 9 is below the 10"):
        TruncatedPoissonSampling(10, 2, 100, 10, 9)
    with pytest.raises(ValueError, match="largest_batch must be at least 1"):
        TruncatedPoissonSampling(10, 2, 100, 10, 0)
    description = {**PoissonSampling(10, 2, 100, 10).to_dict(), "largest_batch": 20}
    with pytest.raises(ValueError, match="takes no largest batch"):
        sampling_from_dict(description)
