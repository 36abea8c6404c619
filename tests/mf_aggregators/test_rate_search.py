"""Which rate a search in short runs finds, and what it leaves of the guarantee."""

import math
from typing import Any

import numpy as np
import pytest
from scipy.stats import norm

import mf_aggregators as mfa
from mf_aggregators import accounting, clip_search, rate_search
from mf_aggregators.participation import MinSeparation, PoissonSampling
from tests.refusals import refuses


def _run(noise: float, separation: int = 25) -> mfa.Mechanism:
    return mfa.Mechanism(mfa.factorizations.identity(50), MinSeparation(separation), noise)


@pytest.mark.parametrize(("noise", "share", "candidates"), [(0.8, 0.1, 5), (3.0, 0.5, 2)])
def test_all_short_runs_and_the_run_together_have_the_guarantee_of_one(
    noise: float, share: float, candidates: int
) -> None:
    """By the events of all, composed, and never by a hair above it."""
    delta = 1e-5
    run = _run(clip_search.noise_of_run(noise, share))
    search = rate_search.of_run(run, noise, candidates, share, 40)
    events = [*(each.event() for each in search), run.event()]
    together = accounting.composed_epsilon(events, delta)
    assert 0.999 * accounting.epsilon(noise, delta) - 1e-3 <= together
    assert together <= accounting.epsilon(noise, delta)
    # What is composed is what the kernel guarantees of each.
    guarantees = [each.guarantee(delta) for each in (*search, run)]
    assert sum(each.rho for each in guarantees) <= accounting.zcdp_rho(noise)
    assert {each.noise_reference for each in search} == {MinSeparation(25, 2)}
    # A sum of squares of 1 / z, and the curve of one Gaussian.
    mu = math.sqrt(sum(each.noise_multiplier**-2 for each in (*search, run)))
    curve = norm.cdf(mu / 2 - together / mu) - math.exp(together) * norm.cdf(
        -mu / 2 - together / mu
    )
    assert len(search) == candidates
    assert 0.98 * delta < curve <= delta


def _towards_one(model: Any) -> tuple[np.ndarray, float]:
    """An update of norm 1 towards ones, and a share that falls with the distance from them."""
    rest = 1.0 - model
    return rest / np.linalg.norm(rest), math.exp(-np.linalg.norm(rest))


def test_the_rate_is_the_best_of_runs_without_noise() -> None:
    """4 is the distance: 10 rounds at rate 0.4 end there, smaller ones before, larger ones jump."""
    search = rate_search.of_run(_run(clip_search.noise_of_run(1e-3, 0.1)), 1e-3, 4, 0.1, 10)
    seen: list[tuple[int, int]] = []

    def updates_of(candidate: int, number: int, model: Any) -> list[tuple[Any, float]]:
        seen.append((candidate, number))
        return [_towards_one(model)] * 20

    found = rate_search.find(
        search,
        [0.04, 0.16, 0.64, 2.56],
        updates_of,
        lambda model, mean, rate: model + rate * mean,
        np.zeros(16),
        clip_norm=1.0,
        clients_per_round=20,
    )
    assert found.rate == 0.64
    assert seen == [(candidate, number) for candidate in range(4) for number in range(10)]
    for rate, score in zip([0.04, 0.16], found.scores, strict=False):
        distances = 4.0 - rate * np.arange(5, 10)
        assert score == pytest.approx(np.mean(np.exp(-distances)), abs=0.01)


def test_scores_have_the_noise_that_is_said() -> None:
    search = rate_search.of_run(_run(clip_search.noise_of_run(1.0, 0.5)), 1.0, 60, 0.5, 10)
    found = rate_search.find(
        search,
        list(range(1, 61)),
        # The last client of each cohort is missing, and counts one half.
        lambda *_: [({"w": np.full(3, math.inf)}, 1.0), ({"w": np.ones(3)}, 2.0)],
        lambda state, mean, rate: {"w": 0.0 * mean["w"]},
        {"w": np.zeros(3)},
        clip_norm=2.0,
        clients_per_round=3,
    )
    off = (np.array(found.scores) - (1.0 + 1.0 + 0.5) / 3.0) / found.stddev
    # A false alarm in 10^4 or less.
    assert abs(np.sum(off)) < 4.0 * math.sqrt(60)
    assert 0.6 < np.std(off) < 1.4


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"num_candidates": 0}, ["num_candidates"]),
        ({"share": 1.0}, ["share"]),
        ({"num_rounds": 9}, ["10", "9"]),
        # The run has the noise of a smaller share.
        ({"share": 0.5}, ["noise", "beside", "search"]),
    ],
)
def test_a_split_that_is_none_is_refused(changes: dict[str, Any], names: list[str]) -> None:
    run = _run(clip_search.noise_of_run(1.0, 0.1))
    arguments = {"noise_multiplier": 1.0, "num_candidates": 3, "share": 0.1, **changes}
    with refuses(*names):
        rate_search.of_run(run, **arguments)


def test_sampled_clients_and_rates_that_do_not_increase_are_refused() -> None:
    sampled = PoissonSampling(num_rounds=10, num_bands=1, population=100, clients_per_round=10)
    with refuses("poisson"):
        rate_search.of_run(mfa.Mechanism(mfa.factorizations.identity(10), sampled, 2.0), 1.0, 3)
    search = rate_search.of_run(_run(clip_search.noise_of_run(1.0, 0.1)), 1.0, 3)
    for rates in ([], [1.0, 0.3, 3.0], [0.0, 1.0, 2.0], [1.0, 2.0], [1.0, 2.0, 3.0, 4.0]):
        with refuses("rate"):
            rate_search.find(
                search, rates, lambda *_: [], lambda *_: 0, 0, clip_norm=1.0, clients_per_round=1
            )
