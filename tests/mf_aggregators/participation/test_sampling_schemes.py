"""Schemes without groups: their sizes, their probabilities, and how they are written down."""

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

import mf_aggregators as mfa
from mf_aggregators import accounting
from mf_aggregators.factorizations import noise_rows, tree_aggregation
from mf_aggregators.kernel import certificate as certificates
from mf_aggregators.kernel import losses as groups
from mf_aggregators.kernel.allocation import _losses_of_cycle, _step_of_grid
from mf_aggregators.kernel.certificate import dominating_pair
from mf_aggregators.kernel.losses import TruncatedPoisson
from mf_aggregators.participation import (
    Amplified,
    BallsInBins,
    MinSeparation,
    MinSeparationSampling,
    Participation,
    PoissonSampling,
    RandomAllocation,
    SamplingScheme,
    SingleParticipation,
    TruncatedPoissonSampling,
    sampling_scheme,
)
from mf_aggregators.participation.certificate_search import Certification
from mf_aggregators.privacy.ledgers import Ledger
from tests.examples import examples
from tests.mf_aggregators import small_mechanisms
from tests.mf_aggregators.kernel.test_trees import tree_matrix
from tests.mf_aggregators.scheme_rates import rounds_of_cycle
from tests.refusals import refuses


@given(st.integers(1, 40), st.integers(1, 20), st.integers(1, 30), st.integers(0, 50))
@settings(max_examples=examples(60), deadline=None)
def test_coins_fill_rounds_on_average(separation: int, clients: int, times: int, rest: int) -> None:
    """By the chain of waits itself: from the stated start, every round has the same joiners."""
    population = separation * clients * times + rest
    scheme: Any = MinSeparationSampling(50, 1, population, clients, separation)
    p = scheme.as_draws().joining_probability
    assert 0.0 < p <= 1.0
    distribution: Any = dominating_pair(scheme.run(1.0, None)).rounds
    waits = list(distribution.first_free_probabilities())
    assert sum(waits) == pytest.approx(1.0)
    for _ in range(5):
        joining = p * waits[0]
        assert population * joining == pytest.approx(clients, rel=1e-9)
        following = [*waits[1:], 0.0]
        following[0] += (1 - p) * waits[0]
        following[separation - 1] += joining
        waits = following


def test_defaults_of_the_separation() -> None:
    sizes = {"num_rounds": 200, "num_bands": 8, "population": 2511, "clients_per_round": 100}
    assert sampling_scheme("min_separation", **sizes) == MinSeparationSampling(
        **sizes, separation=8
    )
    bins = sampling_scheme("balls_in_bins", **sizes)
    assert bins == BallsInBins(**sizes, separation=25)
    assert bins.most_participations() == 8
    assert bins.factorize_flags() == "--participation=single"
    assert BallsInBins(**{**sizes, "clients_per_round": 104}, separation=24).separation == 24


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("min_separation", {"separation": 3}, "separation must be at least num_bands, 4"),
        ("balls_in_bins", {"separation": 11}, "population of 100 is too small"),
        ("min_separation", {"separation": 11}, "population of 100 is too small"),
        ("min_separation", {"separation": 0}, "separation must be at least 1"),
        ("balls_in_bins", {"separation": 9}, "Use a separation of 10, or 11 clients per round"),
        ("balls_in_bins", {"clients_per_round": 0}, "clients_per_round must be at least 1"),
        ("balls_in_bins", {"clients_per_round": 101}, "population of 100 is too small"),
        ("poisson", {"separation": 4}, "'poisson' takes no separation, found 4"),
        ("min_separation", {"num_bands": 11}, "at most num_rounds"),
        ("cyclic", {}, "not one of poisson, fixed_size, shuffling, min_separation, balls_in_bins"),
        ("poisson", {"largest_batch": 20}, "takes no largest batch, found 20"),
        ("balls_in_bins", {"largest_batch": 20}, "takes no largest batch, found 20"),
        ("truncated_poisson", {"separation": 4}, "takes no separation, found 4"),
    ],
)
def test_bad_sizes_are_refused(name: str, changes: dict[str, int], message: str) -> None:
    sizes = {"num_rounds": 10, "num_bands": 4, "population": 100, "clients_per_round": 10}
    with pytest.raises(ValueError, match=message):
        sampling_scheme(name, **{**sizes, **changes})


# Truncated Poisson samples: epsilons beside those of a peer, draws, ledgers and sizes.


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
    found = scheme.run(sigma, None).amplified_epsilon(delta)
    assert found <= epsilon * (1.0 + 1e-4)
    poisson = PoissonSampling(rounds, 1, population, batch)
    assert found >= poisson.run(sigma, None).amplified_epsilon(delta) * (1.0 - 1e-4)


def test_seldom_cut_batches_cost_next_to_nothing() -> None:
    sizes = {"num_rounds": 100, "num_bands": 2, "population": 2511, "clients_per_round": 100}
    scheme: Any = sampling_scheme("truncated_poisson", **sizes)
    place = scheme.as_draws().group_slice(1)
    size = place.stop - place.start
    seldom = scipy.stats.binom(size, scheme.as_draws().sampling_probability)
    assert seldom.sf(scheme.largest_batch) <= 1e-6 < seldom.sf(scheme.largest_batch - 1)
    poisson = PoissonSampling(**sizes).epsilon(0.8, 1e-5)
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
    scheme: Any = TruncatedPoissonSampling(8, 2, 5, 2, 2)
    assert [scheme.as_draws().group_slice(group) for group in (0, 1)] == [slice(0, 2), slice(2, 5)]
    loss = groups._losses_of_round(TruncatedPoisson(8, 2, 5, 2, 2), 1.0, 1e-3)
    for direction, pmf in enumerate((loss._pmf_remove, loss._pmf_add)):
        exact = [
            groups._truncated_divergences(1.0, 0.8, size, 2, np.array([0.5]))[direction]
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


def test_bad_largest_batches_are_refused() -> None:
    with pytest.raises(ValueError, match="largest_batch must be at least clients_per_round, 10"):
        TruncatedPoissonSampling(10, 2, 100, 10, 9)
    with pytest.raises(ValueError, match="largest_batch must be at least 1"):
        TruncatedPoissonSampling(10, 2, 100, 10, 0)
    description = {**PoissonSampling(10, 2, 100, 10).to_dict(), "largest_batch": 20}
    with pytest.raises(ValueError, match="takes no largest batch"):
        SamplingScheme.from_dict(description)


# Random allocation: epsilons beside those of a peer, draws and ledgers.


def test_it_takes_less_than_a_certificate_by_simulation() -> None:
    """One round of 12 is balls in 12 bins, without a matrix."""
    bins = BallsInBins(12, 1, 120, 10, 12).epsilon(0.7, 1e-5)
    found = RandomAllocation(12, 1, 120, 10).epsilon(0.7, 1e-5)
    assert 0.9 * bins <= found <= bins


# By jax_privacy 2.0's experimental.monte_carlo, for BallsInBinsSampling(iterations=t,
# cycle_length=t) and c_col [1]: get_privacy_loss_sample(strategy, sigma, np.ones(1), rng, positive,
# 20_000) with the seeds 1 (positive) and 2, the losses of k cycles added up. Sigma, t, k, an
# epsilon and the means of max(0, 1 - e^(epsilon - loss)) at it in both directions, with their
# standard errors; and the least epsilon for which delta_from_epsilon_and_samples is at most
# get_base_delta(20_000, 0.01).
_OF_PEER_OF_ALLOCATION = [
    ((1.0, 25, 1), 0.3982330270096502, ((1.033e-2, 3.3e-4), (5.775e-3, 2.1e-4)), 0.4532),
    ((0.7, 10, 2), 2.513963720672821, ((1.006e-2, 5.1e-4), (5.880e-4, 9.1e-5)), 2.7135),
]


@pytest.mark.parametrize(("sizes", "epsilon", "means", "certified"), _OF_PEER_OF_ALLOCATION)
def test_jax_privacy_samples_have_the_same_delta_and_certify_more(
    sizes: tuple[float, int, int],
    epsilon: float,
    means: tuple[tuple[float, float], tuple[float, float]],
    certified: float,
) -> None:
    sigma, rounds, cycles = sizes
    step = _step_of_grid(sigma, rounds)
    losses = _losses_of_cycle(sigma, rounds, rounds, step).self_compose(cycles)
    for pmf, (mean, error) in zip((losses._pmf_remove, losses._pmf_add), means, strict=True):
        assert abs(float(pmf.get_delta_for_epsilon(epsilon)) - mean) <= 3.0 * error
    scheme = RandomAllocation(rounds * cycles, 1, 10 * rounds, 10)
    assert scheme.epsilon(sigma, 1e-2) < 0.95 * certified


def test_noise_multipliers_are_those_of_their_epsilons() -> None:
    scheme = RandomAllocation(24, 2, 1200, 100)
    assert rounds_of_cycle(scheme) == 6
    sigma = scheme.noise_multiplier(3.0, 1e-5)
    assert 2.998 <= scheme.epsilon(sigma, 1e-5) <= 3.0
    # Never above the guarantee of who knows all draws.
    assert scheme.epsilon(50.0, 1e-5) <= scheme.epsilon(20.0, 1e-5) <= 0.3


def test_every_client_is_once_in_every_cycle() -> None:
    scheme: Any = RandomAllocation(48, 2, 90, 11)
    assert rounds_of_cycle(scheme) == 4
    sampler = scheme.sampler(7)
    cohorts = [sampler.draw(index) for index in range(48)]
    for group, cycle in itertools.product(range(2), range(6)):
        rounds = [group + 2 * (4 * cycle + place) for place in range(4)]
        clients = np.concatenate([cohorts[index] for index in rounds])
        expected = np.sort(sampler.group_of_round(group))
        np.testing.assert_array_equal(np.sort(clients), expected)
    # Places in a cycle, and pairs of places in adjacent ones, are as likely as each other: two
    # chi-square tests with 1e-6 of false alarms.
    assert scheme.as_draws().group_size == 44
    places = np.zeros((90, 6), np.int64)
    for index, cohort in enumerate(cohorts):
        cycle, place = divmod(index // 2, 4)
        places[cohort, cycle] = place
    places = places[np.concatenate([sampler.group_of_round(group) for group in range(2)])]
    assert scipy.stats.chisquare(np.bincount(places.ravel(), minlength=4)).pvalue > 1e-6
    pairs = 4 * places[:, :-1] + places[:, 1:]
    assert scipy.stats.chisquare(np.bincount(pairs.ravel(), minlength=16)).pvalue > 1e-6
    assert scheme.deviation(90, cohorts) is None
    assert sampler.deviation(90, cohorts) is None
    assert scheme.deviation(90, cohorts[:29]) is None


# Guarantees are of exactly the library's schemas and schemes, made anew from their fields.


_DELTA = 1e-5
_SIZES = (8, 1, 40, 10)


class _Once(MinSeparation):
    pass


class _Seldom(PoissonSampling):
    @property
    def sampling_probability(self) -> float:
        return 1e-9


class _Duck:
    name = "duck"

    def as_schema(self) -> None:
        raise AssertionError


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (_Once(2), "MinSeparation"),
        (_Seldom(*_SIZES), "schema that they keep"),
        (_Duck(), "MinSeparation"),
        (None, "MinSeparation"),
        (MinSeparation, "MinSeparation"),
        (3, "MinSeparation"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_other_classes_are_refused(given: Any, words: str) -> None:
    matrix = mfa.factorizations.identity(8)
    with refuses(words, "participation", error=TypeError):
        mfa.Mechanism(matrix, given, 1.0)
    with refuses(words, error=TypeError):
        mfa.calibrate(matrix, given, epsilon=8.0, delta=1e-6)
    if not isinstance(given, SamplingScheme):
        with refuses("MinSeparation", error=TypeError):
            mfa.sensitivity.compute(np.eye(8), given)
    sampling: Any = 3 if given is None else given
    with refuses("not of a subclass", error=TypeError):
        Ledger(("a",), (np.array([0]),), 2, sampling)


def test_a_scheme_is_no_schema() -> None:
    with refuses("MinSeparation", "PoissonSampling", error=TypeError):
        mfa.participation.check(PoissonSampling(*_SIZES))


def test_methods_and_fields_that_were_replaced_count_for_nothing() -> None:
    timers: Participation = MinSeparation(2)
    drawn = PoissonSampling(*_SIZES)
    matrix = mfa.factorizations.identity(8)
    expected = mfa.Mechanism(matrix, timers, 1.0).guarantee(_DELTA)
    object.__setattr__(timers, "as_schema", lambda: MinSeparation(8).as_schema())
    assert mfa.Mechanism(matrix, timers, 1.0).guarantee(_DELTA) == expected
    amplified = drawn.epsilon(1.0, _DELTA)
    object.__setattr__(drawn, "amplified", lambda *_: Amplified(0.01, None))
    mechanism = mfa.Mechanism(matrix, drawn, 1.0)
    assert mechanism.guarantee(_DELTA).epsilon == pytest.approx(amplified)
    object.__setattr__(drawn, "clients_per_round", 400)
    with refuses("population of 40"):
        mfa.Mechanism(matrix, drawn, 1.0)


# Balls in bins amplify trees, by the square matrix whose inverse makes their rows of noise.


_QUICK = Certification(max_samples=2**13)


def _chosen(num_rounds: int, num_bins: int) -> np.ndarray:
    return np.equal.outer(np.arange(num_rounds) % num_bins, np.arange(num_bins)).astype(float)


@pytest.mark.parametrize("decoder", ["online", "full"])
@pytest.mark.parametrize("num_rounds", [2, 3, 5, 6, 8])
def test_bins_have_the_products_of_what_a_tree_releases(num_rounds: int, decoder: str) -> None:
    """For all bins: against the covariance of rows of noise, and against sums in the nodes.

    With all nodes known the pair is that of their sums; the estimator from below reveals less.
    """
    tree = tree_aggregation(num_rounds, decoder)
    noising, nodes = tree.noising_matrix(), tree_matrix(num_rounds, num_rounds)
    precision = np.linalg.inv(noising @ noising.T)
    for num_bins in range(1, num_rounds + 2):
        scheme = BallsInBins(num_rounds, num_rounds, 4 * num_bins, 4, num_bins)
        tree.check_scheme(scheme)
        columns = tree.columns_for(scheme)
        assert columns is not None
        norm = np.max(np.linalg.norm(columns.entries, axis=1))
        assert norm == pytest.approx(tree.sensitivity(SingleParticipation()).value, rel=1e-12)
        pair = dominating_pair(scheme.run(1.3, dataclasses.replace(columns, rounding=0.0)))
        ((_, vectors),) = pair.blocks
        chosen = _chosen(num_rounds, num_bins)
        products = norm**2 * vectors.T @ vectors
        np.testing.assert_allclose(products, chosen.T @ precision @ chosen, atol=1e-12)
        of_nodes = chosen.T @ nodes.T @ nodes @ chosen
        assert np.min(np.linalg.eigvalsh(of_nodes - products)) >= -1e-12
        if decoder == "full":
            np.testing.assert_allclose(products, of_nodes, atol=1e-12)


@pytest.mark.parametrize("decoder", ["online", "full"])
def test_no_entry_of_the_square_matrix_is_negative(decoder: str) -> None:
    """So that the pair of absolute entries is its own, and is attained."""
    for num_rounds in (1, 2, 7, 8, 21, 64):
        tree = tree_aggregation(num_rounds, decoder)
        square = np.linalg.inv(noise_rows.dense(tree.noise_recursion()))
        assert np.min(square) >= -1e-13
        assert np.all(np.abs(np.triu(square, 1)) <= 1e-13)


def test_a_tree_has_a_certified_guarantee() -> None:
    tree, scheme = tree_aggregation(16), BallsInBins(16, 16, 200, 25, 8)
    found = small_mechanisms.sampled(tree, scheme, 2.0, 1e-3, certification=_QUICK)
    assert found.claim.certificate is not None
    assert found.epsilon == found.claim.certificate.epsilon
    pair = dominating_pair(scheme.run(2.0, tree.columns_for(scheme)))
    assert certificates.is_proved(pair, found.claim.certificate)
    # Adversaries who know the bins: the sensitivity of fixed rounds.
    known = tree.sensitivity(scheme.support()).value / tree.sensitivity(SingleParticipation()).value
    assert found.run is not None
    assert found.run.norm_of_all == pytest.approx(known, rel=1e-6)
    multiplier = found.run.noise_multiplier
    assert multiplier == pytest.approx(2.0 / known, rel=1e-6)
    assert found.epsilon < 0.97 * accounting.epsilon(multiplier, 1e-3)
    with refuses("16 bands"):
        small_mechanisms.sampled(tree, PoissonSampling(16, 8, 320, 10), 1.0, 1e-3)
    once = MinSeparationSampling(16, 16, 3200, 10, 16)
    assert (
        small_mechanisms.sampled(tree, once, 1.0, 1e-3, certification=_QUICK).claim.certificate
        is not None
    )
