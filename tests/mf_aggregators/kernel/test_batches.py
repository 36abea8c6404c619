"""Losses of one round: against closed forms, dp-accounting, and all batches of small groups."""

import functools
import itertools

import numpy as np
import pytest
import scipy.stats
from dp_accounting.pld import privacy_loss_distribution
from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, GaussianPrivacyLoss
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from mf_aggregators.kernel import groups
from mf_aggregators.kernel.draws_of_clients import FixedSize, Poisson, TruncatedPoisson
from tests.examples import examples
from tests.mf_aggregators import brute_force

_EPSILONS = np.array([0.0, 0.2, 0.7, 1.5, 3.0])
_PROBABILITIES = st.floats(1e-4, 0.999) | st.just(1.0)


def _pair(sigma: float, probability: float, epsilons: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return groups.poisson_divergences(sigma, probability, epsilons)


@settings(max_examples=examples(200), deadline=None)
@given(st.floats(0.1, 30.0), _PROBABILITIES)
def test_deltas_are_those_of_dp_accounting(sigma: float, probability: float) -> None:
    given_once = {"sensitivity": 1.0, "sampling_prob": probability}
    for direction, adjacency in enumerate((AdjacencyType.REMOVE, AdjacencyType.ADD)):
        slow = GaussianPrivacyLoss(sigma, **given_once, adjacency_type=adjacency)
        epsilons = np.linspace(0.0, slow.connect_dots_bounds().epsilon_upper, 50)
        # Where a sample has no larger loss, too.
        epsilons = np.append(epsilons, -np.log1p(-probability / 2))
        found = _pair(sigma, probability, epsilons)[direction]
        expected = [slow.get_delta_for_epsilon(float(epsilon)) for epsilon in epsilons]
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize(("sigma", "probability"), [(0.4, 0.02), (1.3, 0.5), (6.0, 1e-3)])
def test_deltas_are_integrals_of_densities(sigma: float, probability: float) -> None:
    points, width = np.linspace(-12.0 * sigma - 1, 12.0 * sigma + 1, 400_001, retstep=True)
    without = stats.norm.pdf(points, 0.0, sigma)
    sampled = (1 - probability) * without + probability * stats.norm.pdf(points, 1.0, sigma)
    epsilons = np.array([0.0, 1e-3, 0.1, 0.5, 2.0])
    for found, (upper, lower) in zip(
        _pair(sigma, probability, epsilons), ((sampled, without), (without, sampled)), strict=True
    ):
        expected = [
            np.sum(np.maximum(upper - np.exp(epsilon) * lower, 0.0)) * width for epsilon in epsilons
        ]
        np.testing.assert_allclose(found, expected, atol=1e-7)


@pytest.mark.long_cases(2)
@pytest.mark.short_cases(1)
@pytest.mark.parametrize(
    ("sigma", "probability"),
    [
        (0.9, 0.3),
        (2.0, 1.0),
        (4.0, 0.004),
        (0.1, 0.1),
        pytest.param(0.2, 0.01, marks=pytest.mark.long),
        pytest.param(0.5, 1.0, marks=pytest.mark.long),
    ],
)
def test_grids_are_those_of_dp_accounting(sigma: float, probability: float) -> None:
    interval = 1e-3 if sigma > 0.1 else 1.0
    draws = Poisson(1, 1, 1000, round(1000 * probability))
    found = groups.losses_of_round(draws, sigma, interval).self_compose(7)
    expected = privacy_loss_distribution.from_gaussian_mechanism(
        sigma, value_discretization_interval=interval, sampling_prob=probability
    ).self_compose(7)
    # Both compose by Fourier transforms, which round deltas by about 1e-15.
    for delta in (1e-3, 1e-6):
        assert found.get_epsilon_for_delta(delta) == pytest.approx(
            expected.get_epsilon_for_delta(delta), rel=1e-8
        )
    for epsilon in (0.0, interval, 0.7, 3.0, 100.0):
        assert found.get_delta_for_epsilon(epsilon) == pytest.approx(
            expected.get_delta_for_epsilon(epsilon), rel=1e-8, abs=1e-13
        )


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
    margin = 1e-6 + 0.03 * ((axis[1] - axis[0]) / sigma) ** 2
    subsets = [list(each) for each in itertools.combinations(range(size), batch)]
    p = _density(points, np.array([updates[each].sum(axis=0) for each in subsets]), sigma)
    q = _density(points, np.array([zeroed[each].sum(axis=0) for each in subsets]), sigma)
    share = batch / size
    with_client = groups.divergence_with(sigma, share, _EPSILONS)
    without = groups.divergence_without(sigma, share, _EPSILONS)
    for epsilon, most, most_without in zip(_EPSILONS, with_client, without, strict=True):
        assert cell * brute_force.hockey_stick(p, q, epsilon) <= most + margin
        assert cell * brute_force.hockey_stick(q, p, epsilon) <= most_without + margin


@pytest.mark.parametrize("share", [0.05, 0.5, 1.0])
@pytest.mark.parametrize("sigma", [0.4, 1.3])
def test_the_bounds_are_attained(share: float, sigma: float) -> None:
    """Where all other clients have the opposite update, and where they have the same one."""
    grid = np.linspace(-12.0, 12.0, 100_001)
    step = grid[1] - grid[0]

    def density(mean: float) -> np.ndarray:
        return np.asarray(scipy.stats.norm.pdf(grid, mean, sigma))

    for epsilon in _EPSILONS:
        p = (1 - share) * density(-1.0) + share * density(1.0)
        q = (1 - share) * density(-1.0) + share * density(0.0)
        found = groups.divergence_with(sigma, share, np.array([epsilon]))[0]
        expected = step * brute_force.hockey_stick(p, q, epsilon)
        assert found == pytest.approx(expected, abs=1e-6)
        p, q = density(1.0), (1 - share) * density(1.0) + share * density(0.0)
        found = groups.divergence_without(sigma, share, np.array([epsilon]))[0]
        assert found == pytest.approx(step * brute_force.hockey_stick(q, p, epsilon), abs=1e-6)


@given(st.floats(0.3, 3.0), st.floats(0.01, 1.0))
@settings(max_examples=examples(40), deadline=None)
def test_poisson_sampling_does_not_dominate(sigma: float, share: float) -> None:
    """Subsets cost no less than Poisson samples, and where q < 1 they cost more."""
    slow = GaussianPrivacyLoss(
        sigma, sensitivity=1.0, sampling_prob=share, adjacency_type=AdjacencyType.REMOVE
    )
    poisson = np.array([slow.get_delta_for_epsilon(float(each)) for each in _EPSILONS])
    found = groups.divergence_with(sigma, share, _EPSILONS)
    assert np.all(found >= poisson - 1e-12)
    without = groups.divergence_without(sigma, share, _EPSILONS)
    np.testing.assert_allclose(without, poisson, atol=1e-12)
    if share < 0.9 and found[2] > 1e-9:
        assert found[2] > poisson[2]


@given(st.floats(0.3, 3.0), st.integers(1, 40))
@settings(max_examples=examples(20), deadline=None)
def test_grids_round_up(sigma: float, clients: int) -> None:
    share = clients / 40
    loss = groups.losses_of_round(FixedSize(1, 1, 40, clients), sigma, 1e-3)
    exact = groups.divergence_with(sigma, share, _EPSILONS)
    for epsilon, delta in zip(_EPSILONS, exact, strict=True):
        found = float(loss.get_delta_for_epsilon(float(epsilon)))
        assert delta - 1e-12 <= found <= delta * 1.01 + 1e-7


def test_two_batches_are_composed_without_loss() -> None:
    """Two subsets of one of two clients, integrated over both outputs, for fixed updates."""
    sigma, epsilon = 1.0, 0.8
    grid = np.linspace(-8.0, 8.0, 801)
    step = grid[1] - grid[0]

    def mixture(*means: float) -> np.ndarray:
        return np.asarray(np.mean([scipy.stats.norm.pdf(grid, m, sigma) for m in means], axis=0))

    loss = groups.losses_of_round(FixedSize(1, 1, 2, 1), sigma, 1e-3).self_compose(2)
    bound = float(loss.get_delta_for_epsilon(epsilon))
    exact = []
    for other in (-1.0, 0.0, 1.0):
        p, q = mixture(other, 1.0), mixture(other, 0.0)
        both, neither = np.outer(p, p), np.outer(q, q)
        for upper, lower in ((both, neither), (neither, both)):
            exact.append(step**2 * brute_force.hockey_stick(upper, lower, epsilon))
    # The two directions of one query are worst for different updates of the others.
    assert max(exact) <= bound <= 1.1 * max(exact)


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


def _outputs(
    updates: tuple[float, ...], sigma: float, q: float, largest: int, grid: np.ndarray
) -> np.ndarray:
    density = np.zeros_like(grid)
    for batch, probability in _probabilities(len(updates), q, largest).items():
        mean = sum(updates[i] for i in batch)
        density += probability * scipy.stats.norm.pdf(grid, mean, sigma)
    return density


def _largest(p: np.ndarray, q: np.ndarray, step: float) -> tuple[np.ndarray, np.ndarray]:
    """The divergences of two densities in both directions."""
    both = []
    for upper, lower in ((p, q), (q, p)):
        both.append([step * brute_force.hockey_stick(upper, lower, e) for e in _EPSILONS])
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
    bounds = groups.truncated_divergences(sigma, q, size, largest, _EPSILONS)
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
    draws = TruncatedPoisson(1, 1, size, largest, largest)
    assert draws.sampling_probability == q
    loss = groups.losses_of_round(draws, sigma, 1e-3).self_compose(2)
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
            exact.append(step**2 * brute_force.hockey_stick(upper, lower, epsilon))
    assert 0.6 * bound <= max(exact) <= bound


def test_the_probabilities_of_a_cut_are_those_of_all_coins() -> None:
    """Of a round of one client that came, by all coins of the others."""
    size, q, largest, sigma = 6, 0.4, 3, 0.9
    coins = _probabilities(size, q, largest)
    stays = sum(p for batch, p in coins.items() if 0 in batch)
    others = scipy.stats.binom(size - 1, q)
    cut = float(others.sf(largest - 1))
    r = (stays - q * (1.0 - cut)) / cut
    found = groups.truncated_divergences(sigma, q, size, largest, _EPSILONS)
    expected = (1.0 - cut) * groups.divergence_without(sigma, q, _EPSILONS)
    expected += cut * groups.divergence_with(sigma, r, _EPSILONS)
    np.testing.assert_allclose(found[0], expected, rtol=1e-8)
    expected = (1.0 - cut) * groups.poisson_divergences(sigma, q, _EPSILONS)[1]
    expected += cut * groups.divergence_without(sigma, r, _EPSILONS)
    np.testing.assert_allclose(found[1], expected, rtol=1e-8)


def test_a_batch_that_is_never_cut_is_a_poisson_sample() -> None:
    known = groups.poisson_divergences(1.1, 0.4, _EPSILONS)
    for size in (2, 3):
        found = groups.truncated_divergences(1.1, 0.4, size, 3, _EPSILONS)
        np.testing.assert_array_equal(found, known)
    # So seldom that the probability is no float.
    found = groups.truncated_divergences(1.1, 1e-40, 10, 9, _EPSILONS)
    np.testing.assert_array_equal(found, groups.poisson_divergences(1.1, 1e-40, _EPSILONS))


def test_tails_are_those_of_binomial_distributions() -> None:
    trials, counts = np.meshgrid(np.arange(1, 12), np.arange(12))
    possible = counts <= trials
    for q in (1e-3, 0.3, 0.9, 1.0):
        found = groups.binomial_tail(counts, trials, q)[possible]
        known = scipy.stats.binom.sf(counts - 1, trials, q)[possible]
        np.testing.assert_allclose(found, known, rtol=1e-12)
