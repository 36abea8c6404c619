"""Truncated Poisson samples: epsilons beside those of a peer, draws, ledgers and sizes."""

import numpy as np
import pytest
import scipy.stats

from mf_aggregators.kernel import losses as groups
from mf_aggregators.kernel.draws_of_clients import TruncatedPoisson
from mf_aggregators.participation import (
    PoissonSampling,
    TruncatedPoissonSampling,
    sampling_from_dict,
    sampling_scheme,
)

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
    found = groups.amplified_epsilon(scheme.as_draws(), sigma, delta)
    assert found <= epsilon * (1.0 + 1e-4)
    poisson = PoissonSampling(rounds, 1, population, batch)
    assert found >= groups.amplified_epsilon(poisson.as_draws(), sigma, delta) * (1.0 - 1e-4)


def test_seldom_cut_batches_cost_next_to_nothing() -> None:
    sizes = {"num_rounds": 100, "num_bands": 2, "population": 2511, "clients_per_round": 100}
    scheme = sampling_scheme("truncated_poisson", **sizes)
    assert isinstance(scheme, TruncatedPoissonSampling)
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
    scheme = TruncatedPoissonSampling(8, 2, 5, 2, 2)
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
        sampling_from_dict(description)
