"""Schemes without groups: their sizes, their probabilities, and how they are written down."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mf_aggregators.kernel.certificate import _rounds_of
from mf_aggregators.participation import BallsInBins, MinSeparationSampling, sampling_scheme
from tests.examples import examples


@given(st.integers(1, 40), st.integers(1, 20), st.integers(1, 30), st.integers(0, 50))
@settings(max_examples=examples(60), deadline=None)
def test_coins_fill_rounds_on_average(separation: int, clients: int, times: int, rest: int) -> None:
    """By the chain of waits itself: from the stated start, every round has the same joiners."""
    population = separation * clients * times + rest
    scheme = MinSeparationSampling(50, 1, population, clients, separation)
    p = scheme.as_draws().joining_probability
    assert 0.0 < p <= 1.0
    distribution: Any = _rounds_of(scheme.as_draws())
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
