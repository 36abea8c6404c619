"""Losses from bounds on divergences, and runs whose clients draw for themselves, together."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import pld_privacy_accountant, privacy_loss_distribution
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from dp_accounting.rdp import rdp_privacy_accountant

import mf_aggregators as mfa
from mf_aggregators import accounting
from mf_aggregators.accounting import composition, gaussian
from mf_aggregators.participation.monte_carlo import curves

_INTERVAL = 1e-2
_EPSILONS = np.linspace(-3.0, 3.0, 61)


@pytest.fixture(autouse=True)
def _few_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds of fewer samples hold as often, and are wider."""
    for name in ("_FEWEST_SAMPLES", "_MOST_SAMPLES", "_SAMPLES_OF_Q"):
        monkeypatch.setattr(curves, name, 2**12)


def _profile(with_client: np.ndarray, without_client: np.ndarray, epsilon: float) -> float:
    """The hockey-stick divergence of two discrete distributions."""
    return float(np.sum(np.maximum(with_client - math.exp(epsilon) * without_client, 0.0)))


def _pairs() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(4)
    for _ in range(12):
        yield rng.dirichlet(np.full(6, 0.7)), rng.dirichlet(np.full(6, 0.7))


def _deltas(losses: PrivacyLossDistribution, direction: str, epsilon: float) -> float:
    return float(getattr(losses, f"_pmf_{direction}").get_delta_for_epsilon(epsilon))


@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_losses_dominate_what_is_bounded_and_are_dominated(noise: float) -> None:
    """For all epsilons, between those of the bounds too, and for those that are noisy."""
    rng = np.random.default_rng(1)
    steps = np.array([0, 7, 20, 45, 90, 160, 250])
    for p, q in _pairs():
        exact = [
            np.array([_profile(*pair, step * _INTERVAL) for step in steps])
            for pair in ((p, q), (q, p))
        ]
        above = [each * rng.uniform(1.0, 1.0 + noise, len(steps)) for each in exact]
        below = [each * rng.uniform(1.0 - noise, 1.0, len(steps)) for each in exact]
        upper = composition.connected_losses(_INTERVAL, steps, *above)
        lower = composition.connected_losses(_INTERVAL, steps, *below, is_pessimistic=False)
        for direction, pair in (("remove", (p, q)), ("add", (q, p))):
            for epsilon in _EPSILONS:
                truth = _profile(*pair, float(epsilon))
                assert _deltas(upper, direction, float(epsilon)) >= truth - 1e-12
                assert _deltas(lower, direction, float(epsilon)) <= truth + 1e-12
            masses = getattr(upper, f"_pmf_{direction}")
            total = sum(masses._loss_probs.values()) + masses._infinity_mass
            assert total == pytest.approx(1.0, abs=1e-12)
        if not noise:
            # Chords touch the profile where there are bounds.
            for direction, values in zip(("remove", "add"), exact, strict=True):
                for step, value in zip(steps, values, strict=True):
                    found = _deltas(upper, direction, float(step) * _INTERVAL)
                    assert found == pytest.approx(value, abs=1e-12)


def test_losses_of_few_bounds_compose_to_no_less_than_the_truth() -> None:
    """Gaussian mechanisms, which compose to another one; and to hardly more."""
    sigma, runs, delta = 2.0, 5, 1e-5
    steps = np.arange(0, 800, 8)
    values = gaussian.exact_deltas(sigma, steps * _INTERVAL)
    upper = composition.connected_losses(_INTERVAL, steps, values, values)
    lower = composition.connected_losses(_INTERVAL, steps, values, values, is_pessimistic=False)
    truth = accounting.exact_epsilon(sigma / math.sqrt(runs), delta)
    found = upper.self_compose(runs).get_epsilon_for_delta(delta)
    assert truth <= found <= 1.01 * truth
    assert 0.9 * truth <= lower.self_compose(runs).get_epsilon_for_delta(delta) <= truth


@pytest.mark.parametrize("sigma", [0.3, 1.0, 40.0])
def test_deltas_of_the_gaussian_mechanism(sigma: float) -> None:
    loss = gaussian._gaussian(sigma)
    epsilons = np.array([-2.0, 0.0, 0.3, 2.0, 9.0])
    known = np.array([float(loss.get_delta_for_epsilon(float(each))) for each in epsilons])
    np.testing.assert_allclose(gaussian.exact_deltas(sigma, epsilons), known, atol=1e-11)


@dataclasses.dataclass(frozen=True)
class _Run:
    """A run of known losses, which fail with a probability of their own."""

    sigma: float = 3.0
    failure: float | None = None
    part_noise_multiplier: float = 3.0

    def losses(
        self, failure: float, level: float, interval: float, *, seed: int
    ) -> PrivacyLossDistribution:
        one = privacy_loss_distribution.from_gaussian_mechanism(
            self.sigma, value_discretization_interval=interval
        )
        return composition.with_infinite_losses(one, self.failure or failure, interval)


def test_delta_pays_for_every_run_that_may_fail() -> None:
    """Three runs that fail with 2e-6 each: nothing is stated at a delta below 6e-6."""
    event = composition.SampledRunDpEvent(3.0, _Run(8.0, failure=2e-6))
    unamplified = accounting.composed_epsilon([composition.SampledRunDpEvent(3.0)] * 3, 5.9e-6)
    assert accounting.composed_epsilon([event] * 3, 5.9e-6) == unamplified
    for events in ([event] * 3, [event, dp_accounting.SelfComposedDpEvent(event, 2)]):
        left = accounting.composed_epsilon(events, 9e-6)
        fails = 1.0 - (1.0 - 2e-6) ** 3
        known = accounting.exact_epsilon(8.0 / math.sqrt(3), (9e-6 - fails) / (1.0 - fails))
        assert left == pytest.approx(known, rel=2e-3)
        assert left >= known


def test_failure_probabilities_of_all_runs_are_a_small_share_of_delta(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[_Run, float]] = []
    losses = _Run.losses

    def recorded(run: _Run, failure: float, *others: Any, **more: Any) -> Any:
        asked.append((run, failure))
        return losses(run, failure, *others, **more)

    monkeypatch.setattr(_Run, "losses", recorded)
    one, other = (composition.SampledRunDpEvent(4.0, _Run(sigma)) for sigma in (8.0, 9.0))
    events = [dp_accounting.SelfComposedDpEvent(one, 5), other, accounting.event(9.0)]
    accounting.composed_epsilon(events, 1e-5)
    # The same run has the same losses, and fails with the others of its kind.
    assert len(asked) == len({run for run, _ in asked}) == 2
    counts = {one.run: 5, other.run: 1}
    total = sum(counts[run] * failure for run, failure in asked)
    assert 16 * total == pytest.approx(0.01 * 1e-5, rel=1e-3)
    assert 16 * total < 0.01 * 1e-5


def _mechanism(scheme: mfa.participation.SamplingScheme, sigma: float = 2.5) -> mfa.Mechanism:
    factorization = mfa.factorizations.identity(scheme.num_rounds)
    return mfa.Mechanism(factorization, scheme, sigma)


_SMALL = _mechanism(mfa.participation.MinSeparationSampling(10, 1, 200, 10, 1))


def test_runs_with_random_check_ins_compose_amplified() -> None:
    """Where coins are those of Poisson sampling: no less than its losses, and hardly more."""
    poisson = _mechanism(mfa.participation.PoissonSampling(10, 1, 200, 10))
    others = [accounting.event(20.0), dp_accounting.LaplaceDpEvent(20.0)]
    found, known = (
        accounting.composed_epsilon([each.event(), each.event(), *others], 1e-4)
        for each in (_SMALL, poisson)
    )
    assert known <= found <= 1.25 * known
    unamplified = composition.SampledRunDpEvent(_SMALL.event().noise_multiplier)
    without = accounting.composed_epsilon([unamplified] * 2 + others, 1e-4)
    assert found < 0.6 * without


def test_losses_of_a_run_are_infinite_where_its_bounds_fail() -> None:
    run = _SMALL.event().run
    found = run.losses(1e-3, 1e-2, 1e-3, seed=0)
    for direction in ("remove", "add"):
        assert 1e-3 <= _deltas(found, direction, 400.0) < 1.1e-3
    # Each direction has the losses of its own.
    exact = mfa.participation.PoissonSampling.loss_distribution(2.5, 0.05, 1e-3).self_compose(10)
    taken, left = (_deltas(exact, direction, 0.15) for direction in ("remove", "add"))
    assert left < 0.8 * taken
    assert left <= _deltas(found, "add", 0.15) - 1e-3 < taken <= _deltas(found, "remove", 0.15)


def test_accountants_of_dp_accounting_take_such_an_event_without_amplification() -> None:
    event = _SMALL.event()
    assert event == _SMALL.event() == _SMALL.guarantee(0.05).event()
    assert len({event, _SMALL.event()}) == 1
    other = dataclasses.replace(_SMALL, noise_multiplier=2.6).event()
    assert event != other
    plain = dp_accounting.GaussianDpEvent(2.5 / math.sqrt(10))
    for kind in (pld_privacy_accountant.PLDAccountant, rdp_privacy_accountant.RdpAccountant):
        alone, known = (kind().compose(each, 2).get_epsilon(1e-4) for each in (event, plain))
        assert alone == pytest.approx(known, rel=1e-9)
    # A named tuple has the noise multiplier alone, and so has what is made of it.
    again = type(event).from_named_tuple(event.to_named_tuple())
    assert again.run is None
    assert again.noise_multiplier == event.noise_multiplier


@pytest.mark.parametrize("sigma", [0.05, 1e9])
def test_hardly_any_noise_and_hardly_any_loss_are_not_amplified(sigma: float) -> None:
    event = dataclasses.replace(_SMALL, noise_multiplier=sigma).event()
    assert type(event) is dp_accounting.GaussianDpEvent


def test_the_seed_is_that_of_the_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = []
    made = curves.Profile.__init__

    def recorded(profile: curves.Profile, *arguments: Any, seed: int, **more: Any) -> None:
        seeds.append(seed)
        made(profile, *arguments, seed=seed, **more)

    monkeypatch.setattr(curves.Profile, "__init__", recorded)
    event = dataclasses.replace(_SMALL, noise_multiplier=3.0).event()
    found = [accounting.composed_epsilon([event], 1e-3, seed=seed) for seed in (3, 4)]
    assert seeds == [3, 4]
    assert found[0] != found[1]
