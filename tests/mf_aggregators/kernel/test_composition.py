"""Several runs together: simulated ones, closed forms, and events that are refused."""

import dataclasses
import itertools
import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import pld_privacy_accountant
from dp_accounting.rdp import rdp_privacy_accountant

import mf_aggregators as mfa
from mf_aggregators import accounting
from mf_aggregators.kernel import composition, sensitivity
from mf_aggregators.kernel.composition import EpsilonDeltaDpEvent, SampledRunDpEvent, _parts
from mf_aggregators.kernel.losses import Poisson, SampledRun
from mf_aggregators.privacy import guarantees
from tests.refusals import refuses


def _mechanism(scheme: mfa.participation.SamplingScheme, sigma: float = 2.5) -> mfa.Mechanism:
    factorization = mfa.factorizations.identity(scheme.num_rounds)
    return mfa.Mechanism(factorization, scheme, sigma)


_SMALL = _mechanism(mfa.participation.MinSeparationSampling(10, 1, 200, 10, 1))


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
        accounting.event(each.run(sigma, None).noise_multiplier) for each in (fixed, allocated)
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


def test_a_run_of_immense_noise_adds_nothing() -> None:
    one = sensitivity.exact_epsilon(1.0, 1e-6)
    immense = accounting.event(1e308)
    both = dp_accounting.ComposedDpEvent([accounting.event(1.0), immense])
    for events in ((accounting.event(1.0), immense), (both,)):
        found = accounting.composed_epsilon(events, 1e-6)
        assert one <= found == pytest.approx(one, rel=1e-6)


def test_losses_are_composed_of_all_rounds_for_delta() -> None:
    """Whose Fourier transforms may lose what delta has to pay for."""
    event = mfa.participation.FixedSizeSampling(4_000, 2, 100, 10).event(20.0)
    (part,) = _parts(dp_accounting.SelfComposedDpEvent(event, 3), 1, 1)
    assert part[1:] == (3, 3)
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
        (3, "3 cannot be composed"),
    ],
)
def test_what_is_wrong_with_an_event_is_named(event: object, words: str) -> None:
    with refuses(words):
        accounting.composed_epsilon([event], 1e-6)


def test_delta_pays_for_what_composing_may_lose(monkeypatch: pytest.MonkeyPatch) -> None:
    """At half of a tiny delta, thousands of Gaussian mechanisms have no more than is stated."""
    noise, count, delta = 60.0, 4000, 1.6e-11
    lost = 2e-15 * count
    assert lost == pytest.approx(delta / 2)
    one = dp_accounting.GaussianDpEvent(noise)
    found = accounting.composed_epsilon(
        [dp_accounting.SelfComposedDpEvent(one, count)], delta, num_coordinates=1
    )
    least, most = (
        accounting.exact_epsilon(noise / math.sqrt(count), x) for x in (delta - lost, delta / 4)
    )
    assert least <= found <= most
    # Roundings of grids, which are relative to delta, were they a tenth for each mechanism.
    with refuses("delta"):
        accounting.composed_epsilon([dp_accounting.SelfComposedDpEvent(one, 10**12)], 0.1)
    monkeypatch.setattr(composition, "_ROUNDING_OF_DOTS", 0.1 * composition.INTERVAL)
    found = accounting.composed_epsilon([accounting.event(2.0)] * 2, 1e-5)
    least, most = (accounting.exact_epsilon(math.sqrt(2.0), x) for x in (8e-6, 7.9e-6))
    assert least <= found <= most


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
    # A builder of dp-accounting keeps the run.
    builder = dp_accounting.DpEventBuilder()
    builder.compose(event, 2)
    assert builder.build() == dp_accounting.SelfComposedDpEvent(event, 2)
    # A named tuple has the noise multiplier alone, and so has what is made of it.
    again = type(event).from_named_tuple(event.to_named_tuple())
    assert again.run is None
    assert again.noise_multiplier == event.noise_multiplier


def test_compositions_are_of_data_alone() -> None:
    class Quiet(dp_accounting.GaussianDpEvent):
        noise_multiplier = 1e9

    class Other(SampledRun):
        noise_multiplier = 1e9

    run = SampledRun(Poisson(1, 1, 2, 1), 1.0)
    # The noise multiplier beside a run counts for nothing.
    found, known = (
        accounting.composed_epsilon([SampledRunDpEvent(each, run)], 1e-5) for each in (1e9, 1.0)
    )
    assert found == known > 1.0
    for event in (
        run,
        SampledRunDpEvent(1.0, Other(run.draws, 1.0)),
        Quiet(1.0),
        dp_accounting.PoissonSampledDpEvent(0.1, Quiet(1.0)),
    ):
        with refuses("cannot be composed"):
            accounting.composed_epsilon([event], 1e-5)
    with refuses("delta"):
        accounting.composed_epsilon([accounting.event(2.0)], 1.0)
    with refuses("num_coordinates"):
        accounting.composed_epsilon([accounting.event(2.0)], 1e-5, num_coordinates=0)
    # Without noise there is no epsilon, and without a release none is needed.
    bare = SampledRunDpEvent(1.0, SampledRun(run.draws, 0.0))
    for event in (dp_accounting.NonPrivateDpEvent(), accounting.event(0.0), bare):
        for others in ([], [SampledRunDpEvent(1.0, run)]):
            assert accounting.composed_epsilon([event, *others], 1e-5) == math.inf
    assert accounting.composed_epsilon([dp_accounting.NoOpDpEvent()], 1e-5) == 0.0
    assert accounting.composed_epsilon([], 1e-5) == 0.0


def test_every_run_draws_numbers_that_may_fail() -> None:
    """A thousandth of delta is enough for the noise of one run, and not for that of two."""
    event, once = accounting.event(2.0), sensitivity.failure_probability(2.0, 2**40)
    delta = 1500.0 * once
    assert math.isfinite(accounting.composed_epsilon([event], delta))
    for events in ([event] * 2, [dp_accounting.SelfComposedDpEvent(event, 2)]):
        with pytest.raises(accounting.TailError):
            accounting.composed_epsilon(events, delta)


def test_the_least_noise_of_all_runs_counts() -> None:
    """A client moves numbers by more standard deviations than the noise is bounded for."""
    little = SampledRunDpEvent(1.0, SampledRun(Poisson(1, 1, 2, 1), 0.19))
    for event in (accounting.event(0.19), little):
        for others in ([], [accounting.event(2.0)]):
            with refuses("deviations"):
                accounting.composed_epsilon([event, *others], 1e-3)


def test_others_than_groups_compose_without_amplification() -> None:
    """Shuffled runs and clients who draw for themselves are as one pair, or Gaussian."""
    shuffled = mfa.participation.Shuffling(20_000, 1, 20_000, 1).event(8.0)
    for event in (_SMALL.event(), shuffled):
        assert event.run.is_amplified
        without = accounting.event(event.noise_multiplier)
        assert accounting.composed_epsilon([event] * 2, 1e-5) == pytest.approx(
            accounting.composed_epsilon([without] * 2, 1e-5), rel=1e-4
        )


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
