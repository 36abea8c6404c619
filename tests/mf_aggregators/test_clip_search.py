"""What a search for the clip norm finds, and what it leaves of the guarantee."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mf_aggregators as mfa
from mf_aggregators import accounting, clip_search
from mf_aggregators.participation import MinSeparation, PoissonSampling, SingleParticipation
from tests.examples import examples
from tests.refusals import refuses


def _run(noise: float, separation: int = 25, most: int | None = None) -> mfa.Mechanism:
    schema = MinSeparation(separation, most)
    return mfa.Mechanism(mfa.factorizations.identity(50), schema, noise)


@settings(max_examples=examples(8), deadline=None)
@given(
    st.floats(0.7, 20.0),
    st.floats(0.001, 0.9),
    st.integers(1, 30),
    st.integers(10, 20),
    st.sampled_from([1e-10, 1e-5, 1e-2]),
)
def test_search_and_run_together_have_the_guarantee_of_one(
    noise: float, share: float, separation: int, rounds: int, delta: float
) -> None:
    """By the events of both, composed, and never by a hair above it."""
    run = _run(clip_search.noise_of_run(noise, share), separation)
    search = clip_search.of_run(run, noise, share, rounds)
    together = accounting.composed_epsilon([search.event(), run.event()], delta)
    assert 0.999 * accounting.epsilon(noise, delta) - 1e-3 <= together
    assert together <= accounting.epsilon(noise, delta)
    rho = sum(each.guarantee(delta).rho for each in (search, run))
    assert rho <= accounting.zcdp_rho(noise)
    assert search.guarantee(delta).rho == pytest.approx(share * rho, rel=1e-6)
    # As often as a timer of the run allows, which no client exceeds.
    assert search.noise_reference.most_participations(rounds) == math.ceil(rounds / separation)
    assert search.num_rounds == rounds


@pytest.mark.parametrize("off", [0.1, 10.0])
@pytest.mark.parametrize("spread", [0.02, 0.3, 1.0])
def test_it_ends_near_the_median_from_ten_times_off(spread: float, off: float) -> None:
    """For log-normal norms of median 3, whose spread decides how the norm approaches it."""
    generator = np.random.default_rng(0)
    search = clip_search.of_run(_run(clip_search.noise_of_run(0.55)), 0.55)
    for _ in range(3):
        found = clip_search.find(
            search,
            lambda number, norm: 3.0 * np.exp(spread * generator.normal(size=100)),
            clients_per_round=100,
            initial_norm=3.0 * off,
        )
        assert 3.0 / 1.2 <= found.clip_norm <= 3.0 * 1.2
    assert (len(found.norms), len(found.fractions)) == (16, 15)


def test_fractions_are_what_clients_said_with_noise() -> None:
    """A client that is missing counts one half, and a norm that is no number is beyond."""
    search = clip_search.of_run(_run(clip_search.noise_of_run(1e-3, 0.5)), 1e-3, 0.5)
    said: list[tuple[int, float]] = []

    def norms_of(number: int, norm: float) -> list[float]:
        said.append((number, norm))
        return [0.9 * norm, norm, math.nan, math.inf, 2.0 * norm, 0.0]

    found = clip_search.find(search, norms_of, clients_per_round=8, initial_norm=2.0)
    np.testing.assert_allclose(found.fractions, 0.5, atol=0.02)
    assert [number for number, _ in said] == list(range(15))
    assert tuple(norm for _, norm in said) == found.norms[:-1]
    assert found.clip_norm == pytest.approx(float(np.exp(np.mean(np.log(found.norms[-6:])))))


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"share": 1.0}, ["share", "1"]),
        ({"share": 0.0}, ["share"]),
        ({"share": math.nan}, ["share"]),
        ({"noise_multiplier": 0.0}, ["noise_multiplier"]),
        ({"num_rounds": 9}, ["10", "9"]),
        # The run has the noise of a run without a search.
        ({"noise_multiplier": 1.1}, ["noise", "beside", "search"]),
    ],
)
def test_a_split_that_is_none_is_refused(changes: dict[str, Any], names: list[str]) -> None:
    with refuses(*names):
        clip_search.of_run(_run(1.1), **{"noise_multiplier": 1.0, **changes})


def test_sampled_clients_are_refused() -> None:
    sampled = PoissonSampling(num_rounds=10, num_bands=1, population=100, clients_per_round=10)
    run = mfa.Mechanism(mfa.factorizations.identity(10), sampled, 2.0)
    with refuses("poisson"):
        clip_search.of_run(run, 1.0)
    once = mfa.Mechanism(mfa.factorizations.identity(50), SingleParticipation(), 2.0)
    assert clip_search.of_run(once, 1.0).noise_reference == MinSeparation(15, 1)
