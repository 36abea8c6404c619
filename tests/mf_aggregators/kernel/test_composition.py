"""Losses from bounds on divergences, and runs whose clients draw for themselves, together."""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import (
    pld_privacy_accountant,
    privacy_loss_distribution,
    privacy_loss_mechanism,
)
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from dp_accounting.rdp import rdp_privacy_accountant

import mf_aggregators as mfa
from mf_aggregators import accounting
from mf_aggregators.accounting import SampledRunDpEvent, _parts
from mf_aggregators.kernel import certificate, composition, gaussian, losses
from mf_aggregators.kernel.claim import Assumption
from mf_aggregators.kernel.composition import Composed, EpsilonDeltaDpEvent, Part
from mf_aggregators.kernel.draws_of_clients import Poisson, SampledRun
from mf_aggregators.kernel.numbers import NotProved
from mf_aggregators.privacy import guarantees
from tests.mf_aggregators import brute_force
from tests.refusals import refuses

_INTERVAL = 1e-2
_EPSILONS = np.linspace(-3.0, 3.0, 61)


@pytest.fixture(autouse=True)
def _few_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds of fewer samples hold as often, and are wider."""
    for name in ("_FEWEST_SAMPLES", "_MOST_SAMPLES", "_SAMPLES_OF_Q"):
        monkeypatch.setattr(certificate, name, 2**12)


def _profile(with_client: np.ndarray, without_client: np.ndarray, epsilon: float) -> float:
    """The hockey-stick divergence of two discrete distributions."""
    return brute_force.hockey_stick(with_client, without_client, epsilon)


def _pairs() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(4)
    for _ in range(12):
        yield rng.dirichlet(np.full(6, 0.7)), rng.dirichlet(np.full(6, 0.7))


def _deltas(found: PrivacyLossDistribution, direction: str, epsilon: float) -> float:
    return float(getattr(found, f"_pmf_{direction}").get_delta_for_epsilon(epsilon))


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
        upper = losses.connected_losses(_INTERVAL, steps, *above)
        for direction, pair in (("remove", (p, q)), ("add", (q, p))):
            for epsilon in _EPSILONS:
                truth = _profile(*pair, float(epsilon))
                assert _deltas(upper, direction, float(epsilon)) >= truth - 1e-12
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
    upper = losses.connected_losses(_INTERVAL, steps, values, values)
    truth = accounting.exact_epsilon(sigma / math.sqrt(runs), delta)
    found = upper.self_compose(runs).get_epsilon_for_delta(delta)
    assert truth <= found <= 1.01 * truth


@pytest.mark.parametrize("sigma", [0.3, 1.0, 40.0])
def test_deltas_of_the_gaussian_mechanism(sigma: float) -> None:
    loss = privacy_loss_mechanism.GaussianPrivacyLoss(sigma)
    epsilons = np.array([-2.0, 0.0, 0.3, 2.0, 9.0])
    known = np.array([float(loss.get_delta_for_epsilon(float(each))) for each in epsilons])
    np.testing.assert_allclose(gaussian.exact_deltas(sigma, epsilons), known, atol=1e-11)


def _with_losses(
    monkeypatch: pytest.MonkeyPatch, failure: float | None = None
) -> list[tuple[SampledRun, float]]:
    """Gives runs the losses of twice their noise, which fail; returns what is asked for."""
    asked: list[tuple[SampledRun, float]] = []

    def known(run: SampledRun, approximation: losses.Approximation) -> PrivacyLossDistribution:
        asked.append((run, approximation.failure))
        one = privacy_loss_distribution.from_gaussian_mechanism(
            2.0 * run.sigma, value_discretization_interval=approximation.interval
        )
        fails = failure or approximation.failure
        return losses.with_infinite_losses(one, fails, approximation.interval)

    monkeypatch.setattr(composition, "losses_of_run", known)
    return asked


def _run(sigma: float) -> SampledRun:
    return SampledRun(Poisson(1, 1, 2, 1), sigma)


def test_delta_pays_for_every_run_that_may_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three runs that fail with 2e-6 each: nothing is stated at a delta below 6e-6."""
    _with_losses(monkeypatch, failure=2e-6)
    event = SampledRunDpEvent(4.0, _run(4.0))
    unamplified = accounting.composed_epsilon([accounting.event(4.0)] * 3, 5.9e-6)
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
    asked = _with_losses(monkeypatch)
    one, other = (SampledRunDpEvent(4.0, _run(sigma)) for sigma in (4.0, 4.5))
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
    unamplified = accounting.event(_SMALL.event().noise_multiplier)
    without = accounting.composed_epsilon([unamplified] * 2 + others, 1e-4)
    assert found < 0.6 * without


def _fixed_size_losses(
    rng: np.random.Generator, share: float, sigma: float, size: int, with_client: bool
) -> np.ndarray:
    """Of rounds in which all others send -1, and the client 1 or 0."""
    outputs = sigma * rng.normal(size=size)
    outputs += np.where(rng.random(size) < share, 1.0 if with_client else 0.0, -1.0)

    def density(mean: float) -> np.ndarray:
        found = (1.0 - share) * np.exp(-0.5 * ((outputs + 1.0) / sigma) ** 2)
        return np.asarray(found + share * np.exp(-0.5 * ((outputs - mean) / sigma) ** 2))

    return np.asarray(np.log(density(1.0) / density(0.0)))


def _allocation_losses(
    rng: np.random.Generator, rounds: int, sigma: float, size: int, with_client: bool
) -> np.ndarray:
    """Of cycles in which the client sends 1 in one round."""
    outputs = sigma * rng.normal(size=(size, rounds))
    if with_client:
        outputs[np.arange(size), rng.integers(rounds, size=size)] += 1.0
    ratios: np.ndarray = np.exp((outputs - 0.5) / sigma**2)
    return np.asarray(np.log(ratios.mean(axis=1)))


def test_runs_of_several_schemes_compose_as_simulated_ones_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A run of each of two schemes, and a Gaussian mechanism, by what attains their losses."""
    monkeypatch.setattr(composition, "INTERVAL", 1e-3)
    fixed = mfa.participation.FixedSizeSampling(6, 1, 20, 5)
    allocated = mfa.participation.RandomAllocation(8, 1, 40, 10)
    sigma, delta, size = 1.1, 1e-2, 200_000
    events = [_mechanism(each, sigma).event() for each in (fixed, allocated)]
    found = accounting.composed_epsilon([*events, accounting.event(2.0)], delta)
    rng = np.random.default_rng(8)
    deltas = []
    for with_client in (True, False):
        loss = 2.0 * rng.normal(size=size) / 4.0 + (0.125 if with_client else -0.125)
        for _ in range(6):
            loss += _fixed_size_losses(rng, 0.25, sigma, size, with_client)
        for _ in range(2):
            loss += _allocation_losses(rng, 4, sigma, size, with_client)
        loss = loss if with_client else -loss
        lost = np.maximum(-np.expm1(np.minimum(found - loss, 0.0)), 0.0)
        deltas.append((lost.mean(), lost.std() / math.sqrt(size)))
    # A simulation is beyond so many standard errors with a probability of 3e-7.
    assert all(mean <= delta + 5.0 * error for mean, error in deltas)
    # Others that hide a client most are not the same in both directions, and one pair has both.
    assert max(mean + 5.0 * error for mean, error in deltas) >= 0.85 * delta
    unamplified = [
        accounting.event(sigma / each.as_draws().together.norm) for each in (fixed, allocated)
    ]
    without = accounting.composed_epsilon([*unamplified, accounting.event(2.0)], delta)
    assert found < 0.9 * without


@pytest.mark.parametrize("name", ["truncated_poisson", "random_allocation", "fixed_size"])
def test_two_runs_are_one_of_all_their_rounds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(composition, "INTERVAL", 1e-3)
    sizes = {"num_bands": 2, "population": 100, "clients_per_round": 10}
    more = {"largest_batch": 11} if name == "truncated_poisson" else {}
    one, both = (
        mfa.participation.sampling_scheme(name, num_rounds=rounds, **sizes, **more)
        for rounds in (20, 40)
    )
    event = one.event(1.3)
    assert event == one.event(1.3)
    assert event != one.event(1.4)
    exact = both.epsilon(1.3, 1e-5)
    for events in ([event] * 2, [dp_accounting.SelfComposedDpEvent(event, 2)]):
        found = accounting.composed_epsilon(events, 1e-5)
        # On a grid of its own, which rounds by less than that.
        assert exact * (1.0 - 1e-5) <= found <= 1.005 * exact


def test_shuffled_runs_compose_by_the_pairs_that_are_proved_of_them() -> None:
    scheme = mfa.participation.Shuffling(20_000, 1, 20_000, 1)
    found = accounting.composed_epsilon([scheme.event(8.0)] * 2, 1e-5)
    alone, without = scheme.epsilon(8.0, 0.5e-5), accounting.epsilon(8.0 / math.sqrt(2.0), 1e-5)
    assert alone < found < 0.7 * without
    # Basic composition is worse.
    assert found < 2.0 * alone


def test_a_run_of_immense_noise_adds_nothing() -> None:
    one = gaussian.exact_epsilon(1.0, 1e-6)
    immense = accounting.event(1e308)
    both = dp_accounting.ComposedDpEvent([accounting.event(1.0), immense])
    for events in ((accounting.event(1.0), immense), (both,)):
        found = accounting.composed_epsilon(events, 1e-6)
        assert one <= found == pytest.approx(one, rel=1e-6)


def test_losses_are_composed_of_all_rounds_for_delta() -> None:
    """Whose Fourier transforms may lose what delta has to pay for."""
    event = mfa.participation.FixedSizeSampling(4_000, 2, 100, 10).event(20.0)
    (part,) = _parts(dp_accounting.SelfComposedDpEvent(event, 3), 1, 1)
    assert (part.count, part.num_runs) == (3, 3)
    assert event.run.part_noise_multiplier == 10.0
    with refuses("delta", "6000"):
        accounting.composed_epsilon([event] * 3, 2e-11)


@pytest.mark.parametrize("count", [2.5, math.nan, 0, -1, True, "2", None])
def test_a_count_is_a_positive_integer(count: object) -> None:
    once = dp_accounting.SelfComposedDpEvent(accounting.event(2.0), count)
    for event in (once, dp_accounting.SelfComposedDpEvent(once, 2)):
        with refuses("the count of a SelfComposedDpEvent", repr(count)):
            accounting.composed_epsilon([accounting.event(3.0), event], 1e-6)


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (dp_accounting.GaussianDpEvent(math.nan), "noise_multiplier of a GaussianDpEvent"),
        (dp_accounting.LaplaceDpEvent(-1.0), "noise_multiplier of a LaplaceDpEvent"),
        (
            dp_accounting.PoissonSampledDpEvent(math.nan, dp_accounting.GaussianDpEvent(1.0)),
            "sampling_probability of a PoissonSampledDpEvent",
        ),
        (3, "3 is not composed"),
    ],
)
def test_what_is_wrong_with_an_event_is_named(event: object, words: str) -> None:
    with refuses(words):
        accounting.composed_epsilon([event], 1e-6)


def test_delta_pays_for_what_transforms_may_lose() -> None:
    """At half of a tiny delta, thousands of Gaussian mechanisms have no more than is stated."""
    noise, count, delta = 60.0, 4000, 1.6e-11
    lost = losses.composition_rounding(count)
    assert lost == pytest.approx(delta / 2)
    one = dp_accounting.GaussianDpEvent(noise)
    found = accounting.composed_epsilon(
        [dp_accounting.SelfComposedDpEvent(one, count)], delta, num_coordinates=1
    )
    least, most = (
        gaussian.exact_epsilon(noise / math.sqrt(count), each) for each in (delta - lost, delta / 4)
    )
    assert least <= found <= most


def test_losses_of_a_run_are_infinite_where_its_bounds_fail() -> None:
    run = _SMALL.event().run
    found = composition.losses_of_run(run, losses.Approximation(1e-3, failure=1e-3, level=1e-2))
    for direction in ("remove", "add"):
        assert 1e-3 <= _deltas(found, direction, 400.0) < 1.1e-3
    # Each direction has the losses of its own.
    exact = losses.losses_of_groups(Poisson(10, 1, 200, 10), 2.5, 1e-3)
    taken, left = (_deltas(exact, direction, 0.15) for direction in ("remove", "add"))
    assert left < 0.8 * taken
    assert left <= _deltas(found, "add", 0.15) - 1e-3 < taken <= _deltas(found, "remove", 0.15)


def test_accountants_of_dp_accounting_take_such_an_event_without_amplification() -> None:
    event = _SMALL.event()
    assert event == _SMALL.event() == guarantees.event(_SMALL.guarantee(0.05))
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


def test_the_seed_is_that_of_the_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = []
    made = certificate.Profile.__init__

    def recorded(profile: certificate.Profile, *arguments: Any, seed: int, **more: Any) -> None:
        seeds.append(seed)
        made(profile, *arguments, seed=seed, **more)

    monkeypatch.setattr(certificate.Profile, "__init__", recorded)
    event = dataclasses.replace(_SMALL, noise_multiplier=3.0).event()
    found = [accounting.composed_epsilon([event], 1e-3, seed=seed) for seed in (3, 4)]
    assert seeds == [3, 4]
    assert found[0] != found[1]


def _composed(**changes: Any) -> Composed:
    parts = (Part(accounting.event(2.0), 2, 2), Part(SampledRun(Poisson(1, 1, 4, 1), 2.0)))
    return dataclasses.replace(Composed(parts, 1e-5), **changes)


def test_a_claim_of_a_composition_is_proved_or_refused() -> None:
    proved = composition.check_composed(_composed())
    events = [dp_accounting.SelfComposedDpEvent(accounting.event(2.0), 2)]
    sampled = SampledRunDpEvent(2.0, SampledRun(Poisson(1, 1, 4, 1), 2.0))
    assert proved.epsilon == accounting.composed_epsilon([*events, sampled], 1e-5)
    assert (proved.delta, proved.claim) == (1e-5, _composed(epsilon=proved.epsilon))
    assert composition.check_composed(proved.claim).epsilon == proved.epsilon
    with pytest.raises(NotProved, match="is proved"):
        composition.check_composed(_composed(epsilon=proved.epsilon * (1.0 - 1e-6)))


def test_a_composition_says_what_it_rests_on() -> None:
    always = {Assumption.RUNS, Assumption.SERVER, Assumption.RANDOMNESS}
    assert {*composition.check_composed(_composed()).assumptions} == always | {
        Assumption.SECRET_DRAWS
    }
    once = dp_accounting.GaussianDpEvent(2.0)
    for event, drawn in ((once, False), (dp_accounting.PoissonSampledDpEvent(0.1, once), True)):
        found = composition.check_composed(_composed(parts=(Part(event),))).assumptions
        assert {*found} - always == ({Assumption.SECRET_DRAWS} if drawn else set())


def test_compositions_are_of_data_alone() -> None:
    class Quiet(dp_accounting.GaussianDpEvent):
        noise_multiplier = 1e9

    class More(Composed):  # type: ignore[misc]
        pass

    class Other(SampledRun):
        noise_multiplier = 1e9

    run = SampledRun(Poisson(1, 1, 2, 1), 1.0)
    with refuses("is not composed"):
        Part(Other(run.draws, 1.0))
    # The noise multiplier beside a run counts for nothing.
    assert [each.mechanism for each in _parts(SampledRunDpEvent(1e9, run), 1, 1)] == [run]
    with refuses("is not composed"):
        Part(Quiet(1.0))
    with refuses("is not composed"):
        Part(dp_accounting.PoissonSampledDpEvent(0.1, Quiet(1.0)))
    with refuses("count", "0"):
        Part(accounting.event(1.0), 0)
    with pytest.raises(TypeError, match="parts must be of Part"):
        _composed(parts=(accounting.event(2.0),))
    for other in (More(_composed().parts, 1e-5), None):
        with pytest.raises(TypeError, match="takes a Composed"):
            composition.check_composed(other)  # type: ignore[arg-type]
    for name, value in (("delta", 1.0), ("epsilon", -1.0), ("num_coordinates", 0), ("seed", -1)):
        with refuses(name):
            _composed(**{name: value})
    # Without noise there is no epsilon, and without a release none is needed.
    none = [dp_accounting.NonPrivateDpEvent(), accounting.event(0.0), dp_accounting.NoOpDpEvent()]
    for event, epsilon in zip(none, (math.inf, math.inf, 0.0), strict=True):
        assert composition.check_composed(_composed(parts=(Part(event),))).epsilon == epsilon
    assert composition.check_composed(_composed(parts=())).epsilon == 0.0


@pytest.mark.parametrize(
    "pairs",
    [
        [(1.0, 0.0)],
        [(0.7, 1e-4), (0.7, 1e-4)],
        [(1.0, 1e-5), (0.25, 0.0), (2.0, 1e-6)],
        [(0.33, 1e-3)] * 5,
    ],
)
def test_pairs_compose_like_the_worst_mechanisms_of_their_kind(
    pairs: list[tuple[float, float]],
) -> None:
    """All outcomes of mechanisms that tell the truth or a coin's lie, and betray all at times."""
    delta = 1e-4 + sum(each for _, each in pairs)

    def excess(epsilon: float) -> float:
        found = 1.0 - math.prod(1.0 - each for _, each in pairs)
        for signs in itertools.product((1.0, -1.0), repeat=len(pairs)):
            mass = math.prod(
                (1.0 - d) / (1.0 + math.exp(-s * e)) for s, (e, d) in zip(signs, pairs, strict=True)
            )
            loss = sum(s * e for s, (e, _) in zip(signs, pairs, strict=True))
            found += mass * max(0.0, -math.expm1(epsilon - loss))
        return found - delta

    low, high = 0.0, sum(each for each, _ in pairs)
    for _ in range(60):
        middle = (low + high) / 2.0
        low, high = (middle, high) if excess(middle) > 0.0 else (low, middle)
    found = accounting.composed_epsilon([EpsilonDeltaDpEvent(*each) for each in pairs], delta)
    assert high <= found <= high + len(pairs) * composition.INTERVAL + 1e-6


@pytest.mark.parametrize(
    "pair", [(-1.0, 0.0), (101.0, 0.0), (1.0, 1.0), (1.0, -1e-9), (1.0, math.nan)]
)
def test_other_pairs_are_refused(pair: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match=r"epsilon|delta"):
        EpsilonDeltaDpEvent(*pair)
