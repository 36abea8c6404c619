"""Likelihood ratios and samples against known values, all patterns, and adaptive servers."""

import itertools
import math

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from mf_aggregators.kernel import dominating_pairs as distributions
from mf_aggregators.kernel import draws, draws_of_clients
from mf_aggregators.kernel.dominating_pairs import (
    DominatingPair,
    ImportanceSampler,
    _BallsInBinsRounds,
    _MinSeparationRounds,
    _RoundsDistribution,
)
from mf_aggregators.kernel.draws_of_clients import (
    BallsInBins,
    MinSeparation,
    SampledRun,
    StrategyColumns,
)
from mf_aggregators.participation.certificate_search import columns_of_matrix
from tests.examples import examples
from tests.mf_aggregators import participation_patterns
from tests.mf_aggregators.participation_patterns import (
    cases,
    dominating_pair,
    log_ratios,
)
from tests.refusals import refuses


@given(cases(), st.integers(0, 2**32))
@settings(max_examples=examples(100), deadline=None)
def test_ratios_are_those_of_all_patterns(
    case: tuple[_RoundsDistribution, np.ndarray, float], seed: int
) -> None:
    outputs = np.random.default_rng(seed).normal(0.0, 2.0 * case[2], (len(case[1]), 4))
    expected = participation_patterns.of(*case).log_ratios(outputs)
    np.testing.assert_allclose(
        log_ratios(dominating_pair(*case), outputs), expected, rtol=0, atol=1e-12
    )


@given(cases(most_rounds=9), st.floats(0.0, 0.3))
@settings(max_examples=examples(60), deadline=None)
def test_bins_have_the_sums_of_their_columns_and_what_roundings_move(
    case: tuple[_RoundsDistribution, np.ndarray, float], rounding: float
) -> None:
    """Turned into few coordinates, whose products are the same; a row is rounded once."""
    distribution, matrix, _ = case
    n, num_bins = len(matrix), distribution.separation
    columns = columns_of_matrix(matrix, n)
    products = distributions._BinVectors(columns, num_bins, rounding)
    vectors = np.zeros((n, num_bins))
    for row, column in itertools.product(range(n), range(n)):
        vectors[row, column % num_bins] += matrix[row, column]
    for row, first in itertools.product(range(n), range(num_bins)):
        vectors[row, first] += rounding if row >= first else 0.0
    assert products.num_outputs == min(n, num_bins)
    turned = products.vectors
    np.testing.assert_allclose(turned.T @ turned, vectors.T @ vectors, rtol=0, atol=1e-12)
    np.testing.assert_allclose(products.squared_norms, np.diag(vectors.T @ vectors), rtol=1e-12)
    outputs = np.arange(2.0 * len(turned)).reshape(-1, 2)
    np.testing.assert_allclose(products.transposed_times(outputs), turned.T @ outputs, atol=1e-10)


@pytest.mark.parametrize("probability", [0.003, 0.5, 0.9, 1.0])
def test_numbers_too_large_for_linear_arithmetic(probability: float) -> None:
    """Long runs and large outputs: logarithms, against a recursion in exact arithmetic's place."""
    rounds, separation = 800, 3
    distribution = _MinSeparationRounds(probability, separation)
    rng = np.random.default_rng(0)
    for exponents in (
        rng.normal(0.0, 1.0, (rounds, 3)),
        rng.normal(0.0, 400.0, (rounds, 3)),
        np.full((rounds, 1), 2.5),
    ):
        expected = np.zeros(exponents.shape[1])
        for k in range(exponents.shape[1]):
            logs = [0.0] * (rounds + separation)
            for i in range(rounds - 1, -1, -1):
                terms = [math.log(probability) + exponents[i, k] + logs[i + separation]]
                if probability < 1.0:
                    terms.append(math.log1p(-probability) + logs[i + 1])
                logs[i] = max(terms) + math.log(sum(math.exp(t - max(terms)) for t in terms))
            first = distribution.first_free_probabilities()
            largest = max(logs[:separation])
            expected[k] = largest + math.log(
                sum(q * math.exp(x - largest) for q, x in zip(first, logs, strict=False))
            )
        found = distribution.log_ratios(exponents.copy())
        np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-10)


@given(st.integers(1, 80), st.integers(1, 80), st.integers(0, 100))
@settings(max_examples=examples(40), deadline=None)
def test_products_are_those_of_the_matrix(rounds: int, bands: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    matrix = np.tril(rng.uniform(-1.0, 1.0, (rounds, rounds)))
    matrix -= np.tril(matrix, -bands)
    columns = columns_of_matrix(matrix, min(bands, rounds))
    x = rng.normal(size=(rounds, 3))
    products = distributions._BandedProducts(columns)
    np.testing.assert_allclose(products.times(x), matrix @ x, atol=1e-11)
    np.testing.assert_allclose(products.transposed_times(x), matrix.T @ x, atol=1e-11)
    np.testing.assert_allclose(products.squared_norms, np.sum(matrix**2, axis=0))
    scaled = draws_of_clients._normalised(columns)
    assert np.min(scaled) >= 0.0
    assert np.max(np.sum(scaled**2, axis=1)) == pytest.approx(1.0)


@pytest.mark.parametrize("value", [0.0, np.nan, np.inf])
def test_columns_that_have_no_norm_are_refused(value: float) -> None:
    with pytest.raises(ValueError, match="must not be zero, and its entries must be finite"):
        draws_of_clients._normalised(np.array([[0.0, 0.0], [value, value]]))


# An adaptive server


def _hockey_stick(upper: np.ndarray, lower: np.ndarray, epsilon: float) -> np.ndarray:
    return np.asarray(np.maximum(upper - math.exp(epsilon) * lower, 0.0))


@pytest.mark.parametrize("dimensions", [1, 2])
@pytest.mark.parametrize(
    ("matrix", "distribution"),
    [
        ([[1.0, 0.0], [0.8, 0.6]], _MinSeparationRounds(0.4, 1)),
        ([[1.0, 0.0], [-0.8, 0.6]], _MinSeparationRounds(0.4, 1)),
        ([[0.7, 0.0], [0.7, 1.0]], _BallsInBinsRounds(2)),
        ([[0.6, 0.0], [-0.8, 1.0]], _BallsInBinsRounds(2)),
        ([[0.9, 0.0], [0.4, 0.9]], _MinSeparationRounds(0.7, 2)),
        # One bin and three: participations that share a row of C x, and none at all.
        ([[0.7, 0.0], [-0.7, 1.0]], _BallsInBinsRounds(1)),
        ([[0.7, 0.0], [0.7, 1.0]], _BallsInBinsRounds(3)),
    ],
)
def test_no_adaptive_server_gets_beyond_the_pair(
    matrix: list[list[float]], distribution: _RoundsDistribution, dimensions: int
) -> None:
    """Two rounds, every update of the second chosen as is worst after what the first released.

    Updates are unit vectors in one or two dimensions, and zero. For each output of the first round
    the largest divergence that is left is integrated over the outputs of the second, which is the
    divergence of the best adaptive server. It must not exceed that of the pair of |C|. The first
    round's update is along an axis without loss of generality.
    """
    c, sigma, epsilon = np.array(matrix), 1.0, 0.3
    patterns = participation_patterns.of(distribution, np.eye(2), sigma)
    grid = np.linspace(-7.0, 7.0, 85)
    step = grid[1] - grid[0]
    angles = np.linspace(0.0, np.pi, 2 if dimensions == 1 else 5)
    choices = [np.zeros(dimensions)] + [
        np.array([math.cos(a), math.sin(a)])[:dimensions] for a in angles
    ]
    first = np.eye(dimensions)[0]
    axes = np.stack(np.meshgrid(*([grid] * dimensions), indexing="ij"), axis=-1)

    def density(mean: np.ndarray) -> np.ndarray:
        return np.asarray(np.prod(scipy.stats.norm.pdf(axes, mean, sigma), axis=-1))

    zero = density(np.zeros(dimensions))
    cell = step**dimensions
    # By pattern: what the first round's output weighs, along the axis of its update alone.
    weights = patterns.probabilities[:, None] * scipy.stats.norm.pdf(
        grid[None, :], c[0, 0] * patterns.means[:, :1], sigma
    )
    without = scipy.stats.norm.pdf(grid, 0.0, sigma)
    for swapped in (False, True):
        best = np.zeros(len(grid))
        for second in choices:
            densities = np.array(
                [density(c[1, 0] * s[0] * first + c[1, 1] * s[1] * second) for s in patterns.means]
            )
            for k in range(len(grid)):
                upper, lower = np.tensordot(weights[:, k], densities, axes=1), without[k] * zero
                pair = (lower, upper) if swapped else (upper, lower)
                best[k] = max(best[k], cell * np.sum(_hockey_stick(*pair, epsilon)))
        adaptive = step * np.sum(best)
        scalar = participation_patterns.of(distribution, np.abs(c), sigma)
        points = np.stack(np.meshgrid(grid, grid, indexing="ij")).reshape(2, -1)
        q = np.prod(scipy.stats.norm.pdf(points, 0.0, sigma), axis=0)
        p = q * np.exp(scalar.log_ratios(points))
        pair = (q, p) if swapped else (p, q)
        dominating = step**2 * np.sum(_hockey_stick(*pair, epsilon))
        assert adaptive <= dominating * (1 + 1e-3) + 1e-6
        if np.all(c >= 0.0):
            # Here the pair is what a server attains.
            assert adaptive >= dominating * (1 - 2e-3)


def test_signs_need_the_absolute_matrix() -> None:
    """Updates of opposite signs undo those of C: the pair of C itself would promise too much."""
    matrix, distribution = np.array([[0.6, 0.0], [-0.8, 1.0]]), _BallsInBinsRounds(2)
    grid = np.stack(np.meshgrid(*[np.linspace(-8, 8, 161)] * 2, indexing="ij")).reshape(2, -1)
    q = np.prod(scipy.stats.norm.pdf(grid, 0.0, 1.0), axis=0)

    def divergence(signs: tuple[float, ...], c: np.ndarray) -> float:
        p = q * np.exp(
            participation_patterns.of(distribution, c * np.array(signs), 1.0).log_ratios(grid)
        )
        return float(0.01 * np.sum(_hockey_stick(p, q, 0.3)))

    attacked = max(divergence(signs, matrix) for signs in itertools.product((-1.0, 1.0), repeat=2))
    assert attacked > 1.05 * divergence((1.0, 1.0), matrix)
    assert attacked <= divergence((1.0, 1.0), np.abs(matrix)) * (1 + 1e-9)


@pytest.mark.parametrize("shape", [(11, 3), (13, 3), (12, 4)])
def test_columns_that_do_not_fit_the_scheme_are_refused(shape: tuple[int, int]) -> None:
    with refuses("scheme", "12", "3"):
        distributions.dominating_pair(
            SampledRun(MinSeparation(12, 3, 200, 10, 5), 1.2, StrategyColumns(np.ones(shape)))
        )


def test_rounding_enlarges_the_entries_or_the_rows_of_a_bin() -> None:
    """By its steps of Z for each coordinate of a row, in units of the scaled columns."""
    sigma, coordinates, steps = 1.5, 8 * 10**6, 7.0
    rows = np.arange(8)[:, None] + np.arange(2)
    entries = np.where(rows < 8, np.array([1.0, -0.5]), 0.0)
    columns = StrategyColumns(entries, steps)
    moved = sigma * steps * math.sqrt(10**6) / draws.STANDARD_DEVIATION
    assert moved > 1e-6
    apart, shared = (
        distributions.dominating_pair(
            SampledRun(BallsInBins(8, 2, 40, 10, bins), sigma, columns), coordinates
        )
        for bins in (4, 1)
    )
    scaled = np.abs(entries) / math.sqrt(1.25)
    np.testing.assert_allclose(apart.columns, scaled + moved * (rows < 8), rtol=1e-14)
    assert apart.rounding == 0.0
    np.testing.assert_allclose(shared.columns, scaled, rtol=1e-14)
    assert shared.rounding == pytest.approx(moved, rel=1e-14)
    assert (apart.sigma, apart.rounds) == (sigma, _BallsInBinsRounds(4))


def test_the_coin_is_that_of_the_rates() -> None:
    """Clients that took part in the last separation - 1 rounds are not free."""
    rounds = distributions._rounds_of(MinSeparation(12, 3, 200, 10, 5))
    assert rounds == _MinSeparationRounds(10 / (200 - 4 * 10), 5)
    assert MinSeparation(4, 1, 12, 4, 3).joining_probability == 1.0
    assert distributions._rounds_of(BallsInBins(12, 3, 200, 10, 20)) == _BallsInBinsRounds(20)


@pytest.mark.parametrize("scale", [1e-300, 2.7e-162, 1e-20, 3.0, 1e200, 1.7e308])
def test_a_scaling_of_the_matrix_changes_nothing(scale: float) -> None:
    """Squares of entries may be beyond floats, which would leave columns of zeros."""
    columns = np.array([[1.0, -0.5], [0.25, 0.5], [1.0, 0.0]])
    np.testing.assert_allclose(
        draws_of_clients._normalised(scale * columns), np.abs(columns) / 1.25**0.5, rtol=1e-12
    )


# Samples


@given(cases())
@settings(max_examples=examples(60), deadline=None)
def test_moments_are_those_of_all_tuples(
    case: tuple[_RoundsDistribution, np.ndarray, float],
) -> None:
    patterns = participation_patterns.of(*case)
    gram = patterns.means @ patterns.means.T / case[2] ** 2
    order = 1
    while order <= 4 and len(patterns.probabilities) ** order <= 3000:
        expected = sum(
            np.prod(patterns.probabilities[list(each)])
            * math.exp(sum(gram[i, j] for i, j in itertools.combinations(each, 2)))
            for each in itertools.product(range(len(gram)), repeat=order)
        )
        found = ImportanceSampler(dominating_pair(*case), order).log_mgf
        assert found == pytest.approx(math.log(expected), abs=1e-11)
        order += 1


@pytest.mark.parametrize(
    ("distribution", "matrix"),
    [
        (_MinSeparationRounds(0.35, 2), [[0.8, 0.0], [0.6, 1.0]]),
        (_MinSeparationRounds(0.35, 1), [[1.0, 0.0], [0.0, 0.7]]),
        (_MinSeparationRounds(1.0, 2), [[0.8, 0.0], [0.6, 0.9]]),
        (_BallsInBinsRounds(3), [[0.8, 0.0], [0.6, 1.0]]),
    ],
)
@pytest.mark.parametrize("order", [0, 1, 2, 4])
def test_losses_have_the_sampling_distribution(
    distribution: _RoundsDistribution, matrix: list[list[float]], order: int
) -> None:
    """The distribution of losses, against a fine grid of outputs: Kolmogorov and Smirnov.

    Each of these sixteen tests fails by chance with probability 1e-6; the seed is fixed.
    """
    c, sigma = np.array(matrix), 0.9
    of = dominating_pair(distribution, c, sigma)
    rng = np.random.default_rng(order)
    outputs = ImportanceSampler(of, order)
    drawn = np.sort(np.concatenate([outputs.log_ratios(rng, 1000) for _ in range(6)]))
    axis = np.linspace(-7.0, 11.0, 401)
    grid = np.stack(np.meshgrid(axis, axis, indexing="ij")).reshape(2, -1)
    losses = participation_patterns.of(distribution, c, sigma).log_ratios(grid)
    weights = np.exp(order * losses) * np.prod(scipy.stats.norm.pdf(grid, 0.0, sigma), axis=0)
    by_loss = np.argsort(losses)
    cumulative = np.cumsum(weights[by_loss]) / np.sum(weights)
    expected = np.interp(drawn, losses[by_loss], cumulative)
    steps = np.arange(len(drawn) + 1) / len(drawn)
    above, below = np.abs(expected - steps[1:]), np.abs(expected - steps[:-1])
    distance = max(float(above.max()), float(below.max()))
    assert distance < scipy.stats.kstwo.isf(1e-6, len(drawn)) + 4e-3


def test_orders_end_where_tables_are_large() -> None:
    rng = np.random.default_rng(0)
    columns = rng.uniform(0.0, 1.0, (2052, 64))
    for separation, expected in ((64, [1, 2, 3]), (342, [1, 2])):
        kinds: list[_RoundsDistribution] = [
            _MinSeparationRounds(0.01, separation),
            _BallsInBinsRounds(separation),
        ]
        for distribution in kinds:
            of = DominatingPair(columns, 1.0, distribution)
            orders = of.orders
            assert orders == expected
