"""The central type: what it states is what its parts state, of one run and of no other."""

import dataclasses
import functools
import itertools
import json
import math
import pathlib
import pickle
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import scipy.stats
from dp_accounting.pld.privacy_loss_distribution import from_laplace_mechanism
from hypothesis import given, settings
from hypothesis import strategies as st

import mf_aggregators as mfa
from mf_aggregators import accounting, mechanism
from mf_aggregators.checkpoints import CheckpointError
from mf_aggregators.factorizations import ExtensionError, Factorization
from mf_aggregators.kernel.integers import IntegerSums
from mf_aggregators.kernel.sensitivity import DEFAULT_NUM_COORDINATES, failure_probability
from mf_aggregators.participation import (
    BallsInBins,
    FixedEpochOrder,
    FixedSizeSampling,
    MinSeparation,
    Participation,
    PoissonSampling,
    Sampler,
    SamplingScheme,
    Shuffling,
    SingleParticipation,
)
from mf_aggregators.privacy import guarantees
from mf_aggregators.privacy.ledgers import Ledger
from mf_aggregators.sensitivity import Sensitivity
from tests.examples import examples
from tests.mf_aggregators import brute_force, small_mechanisms
from tests.mf_aggregators.small_mechanisms import factorizations, plan_of
from tests.refusals import refuses

_ROUNDS = 12
_TIMERS = MinSeparation(4)
_POISSON = PoissonSampling(_ROUNDS, 2, 1000, 20)


def _mechanism(
    participation: Participation = _TIMERS, noise_multiplier: float = 1.0
) -> mfa.Mechanism:
    return mfa.Mechanism(mfa.factorizations.banded(_ROUNDS, 2), participation, noise_multiplier)


# The search for its decays takes a quarter of a second.
_blt = functools.cache(mfa.factorizations.blt)


def _schemas() -> st.SearchStrategy[Participation]:
    return st.one_of(
        st.just(SingleParticipation()),
        st.builds(FixedEpochOrder, st.integers(1, 3), st.integers(1, 5)),
        st.builds(MinSeparation, st.integers(1, 12), st.none() | st.integers(1, 4)),
    )


def _ledger(cohorts: list[set[int]]) -> Ledger:
    clients = range(6)
    rounds = [
        np.array([i for i, cohort in enumerate(cohorts) if client in cohort], np.int64)
        for client in clients
    ]
    return Ledger(tuple(f"client {client}" for client in clients), tuple(rounds), len(cohorts))


@pytest.mark.parametrize(("epsilon", "delta"), [(0.5, 1e-9), (8.0, 1e-4), (2.0, 1e-6)])
def test_calibrated_noise_gives_the_target_and_hardly_less_does_not(
    epsilon: float, delta: float
) -> None:
    """By the closed form of the Gaussian mechanism (Balle and Wang, 2018, Thm 8)."""
    mechanism = mfa.calibrate(_blt(_ROUNDS, 2), _TIMERS, epsilon=epsilon, delta=delta)

    def delta_of(noise_multiplier: float) -> float:
        shift = 1.0 / noise_multiplier
        return float(
            scipy.stats.norm.cdf(shift / 2 - epsilon / shift)
            - np.exp(epsilon) * scipy.stats.norm.cdf(-shift / 2 - epsilon / shift)
        )

    assert delta_of(mechanism.noise_multiplier) <= delta
    assert delta_of(0.999 * mechanism.noise_multiplier) > delta
    guarantee = mechanism.guarantee(delta)
    assert 0.999 * epsilon < guarantee.epsilon <= epsilon
    own = mechanism.factorization.sensitivity(_TIMERS).value
    assert guarantee.sensitivity == pytest.approx(own, rel=1e-13)


def test_calibrated_for_rho_it_has_that_rho() -> None:
    mechanism = mfa.calibrate(mfa.factorizations.identity(5), SingleParticipation(), rho=0.08)
    assert mechanism.noise_multiplier == pytest.approx(2.5)
    assert mechanism.guarantee(1e-6).rho <= 0.08 * (1 + 1e-12)
    sampled = mfa.calibrate(mfa.factorizations.banded(_ROUNDS, 2), _POISSON, rho=0.08)
    # Rho is not amplified: six rounds of one part.
    assert sampled.noise_multiplier == pytest.approx(2.5 * np.sqrt(6))
    assert sampled.guarantee(1e-6).rho <= 0.08 * (1 + 1e-12)


@pytest.mark.short_cases(1)
@pytest.mark.parametrize(
    "scheme", [_POISSON, FixedSizeSampling(_ROUNDS, 2, 1000, 20), Shuffling(_ROUNDS, 2, 1000, 20)]
)
def test_noise_for_a_scheme_is_that_of_the_accounting(scheme: SamplingScheme) -> None:
    mechanism = mfa.calibrate(
        mfa.factorizations.banded(_ROUNDS, 2), scheme, epsilon=1.0, delta=1e-6
    )
    guarantee = mechanism.guarantee(1e-6)
    assert 0.99 < guarantee.epsilon <= 1.0
    assert guarantees.scheme_of(guarantee) == scheme
    unamplified = mfa.accounting.epsilon(mechanism.noise_multiplier / np.sqrt(6), 1e-6)
    assert guarantee.epsilon < unamplified


@pytest.mark.parametrize(
    "targets", [{}, {"epsilon": 1.0}, {"delta": 1e-6}, {"rho": 1.0, "epsilon": 1.0, "delta": 0.1}]
)
def test_a_target_is_given_once(targets: dict[str, float]) -> None:
    with pytest.raises(TypeError):
        mfa.calibrate(
            mfa.factorizations.identity(5),
            SingleParticipation(),
            **targets,  # type: ignore[arg-type]
        )


def test_what_does_not_belong_together_is_refused() -> None:
    banded = mfa.factorizations.banded(_ROUNDS, 3)
    with refuses("3 bands"):
        mfa.Mechanism(banded, _POISSON, 1.0)
    with refuses("rounds"):
        mfa.Mechanism(banded, dataclasses.replace(_POISSON, num_rounds=13, num_bands=3), 1.0)
    with refuses("noise_multiplier"):
        mfa.Mechanism(banded, _TIMERS, -1.0)
    with refuses("factorization", error=TypeError):
        mfa.Mechanism("directory", _TIMERS, 1.0)  # type: ignore[arg-type]
    with refuses("participation", error=TypeError):
        mfa.Mechanism(banded, 4, 1.0)  # type: ignore[arg-type]
    extended = _blt(6, 2).extended(9)
    with refuses("Mechanism.extended"):
        mfa.Mechanism(extended, _TIMERS, 1.0)


def test_a_horizon_that_forbids_what_was_allowed_is_refused() -> None:
    first = mfa.Mechanism(_blt(20, 2), MinSeparation(10, 2), 1.0)
    second = first.extended(40, MinSeparation(4, 10))
    with refuses("40 rounds"):
        second.extended(60, MinSeparation(10, 6))
    whole = second.extended(60, MinSeparation(4, 15))
    began_with = first.factorization.sensitivity(first.noise_reference).value
    assert whole.noise_multiplier == began_with / (
        whole.factorization.sensitivity(whole.noise_reference).value
    )
    # Not one with more noise than there is, nor without its first horizon.
    with refuses("noise multiplier"):
        dataclasses.replace(whole, noise_multiplier=1.01 * whole.noise_multiplier)
    with refuses("extends"):
        dataclasses.replace(whole, extends=first)
    other = mfa.Mechanism(_blt(20, 3), MinSeparation(10, 2), 1.0)
    with refuses("extend"):
        dataclasses.replace(first.extended(40), extends=other)


def test_roundings_of_more_rounds_take_their_share() -> None:
    first = mfa.Mechanism(_blt(20, 2), MinSeparation(10, 2), 1.0)
    real = first.extended(40)
    rounded = first.extended(40, num_parameters=10**6)
    assert 0.999 * real.noise_multiplier < rounded.noise_multiplier < real.noise_multiplier


def test_roundings_that_would_take_too_much_name_the_rounds_that_are_possible() -> None:
    first = mfa.Mechanism(
        mfa.factorizations.tree_aggregation(20), mfa.participation.SingleParticipation(), 1.0
    )
    # 2^40 numbers are all that is accounted for.
    with refuses("2^40", "at most about 64 rounds are possible", error=ExtensionError):
        first.extended(127, num_parameters=2**34)
    assert first.extended(64, num_parameters=2**34).num_rounds == 64


@given(
    st.sampled_from(["identity", "blt", "tree", "toeplitz"]),
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3)), min_size=1, max_size=3),
    st.randoms(use_true_random=False),
)
@settings(max_examples=examples(30), deadline=None)
def test_an_extended_run_covers_clients_who_kept_every_timer_in_force(
    name: str, steps: list[tuple[int, int]], coins: random.Random
) -> None:
    """Any client's sensitivity, over Z, is at most what the noise multiplier of the whole says."""
    rounds, separation = 5, 4
    made = {
        "identity": mfa.factorizations.identity(rounds),
        "blt": _blt(rounds, 1),
        "tree": mfa.factorizations.tree_aggregation(rounds),
        "toeplitz": mfa.factorizations.toeplitz(rounds, coefficients="square_root"),
    }[name]
    mechanism = mfa.Mechanism(made, MinSeparation(separation), 0.9)
    sigma = 0.9 * made.sensitivity(MinSeparation(separation)).value
    timers = [separation] * rounds
    for more, less in steps:
        separation = max(1, separation - less)
        timers += [separation] * more
        try:
            mechanism = mechanism.extended(len(timers), MinSeparation(separation))
        except mfa.factorizations.ExtensionError:
            assert name == "tree"
            return
    taken: list[int] = []
    for i, timer in enumerate(timers):
        if all(i - j >= timer for j in taken) and coins.random() < 0.8:
            taken.append(i)
    x = np.zeros(len(timers))
    x[taken] = 1.0
    moved = float(np.linalg.norm(mechanism.factorization.encode(x)))
    assert moved <= sigma / mechanism.noise_multiplier * (1 + 1e-9)
    assert mechanism.earlier_participations == {
        each.num_rounds: each.noise_reference for each in mechanism.horizons[:-1]
    }


def test_drawn_clients_cannot_go_on() -> None:
    with refuses("poisson"):
        _mechanism(_POISSON).extended(20)


@given(st.lists(st.sets(st.integers(0, 5)), max_size=_ROUNDS), st.floats(0.3, 3.0))
@settings(max_examples=examples(40))
def test_an_observed_guarantee_covers_every_client(
    cohorts: list[set[int]], noise_multiplier: float
) -> None:
    mechanism = _mechanism(noise_multiplier=noise_multiplier)
    observed = mechanism.observed(
        _ledger(cohorts), round_counts=[len(cohort) for cohort in cohorts]
    )
    assert observed.ledger is not None
    found = observed.guarantee(1e-5)
    sigma = noise_multiplier * mechanism.factorization.sensitivity(_TIMERS).value
    matrix = mechanism.factorization.strategy_matrix()[: len(cohorts)]
    beyond = [
        rounds
        for rounds in observed.ledger.rounds_of_clients
        if len(rounds) > 3 or np.any(np.diff(rounds) < 4)
    ]
    assert observed.num_outside_schema() == len(beyond)
    own = []
    for rounds in observed.ledger.rounds_of_clients:
        x = np.zeros(_ROUNDS)
        x[rounds] = 1.0
        own.append(float(np.linalg.norm(matrix @ x)))
    assert found.num_rounds == len(cohorts)
    if max(own) == 0.0:
        assert found.epsilon == 0.0
        assert observed.worst_client(1e-5) is None
        return
    # The matrix has no negative entry: a client moves C x the most with updates that agree.
    assert found.sensitivity >= max(own) * (1 - 1e-12)
    assert found.noise_multiplier == pytest.approx(sigma / found.sensitivity)
    worst = observed.worst_client(1e-5)
    assert worst is not None
    assert worst.guarantee.sensitivity.value == pytest.approx(max(own))
    assert worst.guarantee.epsilon <= found.epsilon * (1 + 1e-9)
    kept = all(
        later - earlier >= 4
        for rounds in observed.ledger.rounds_of_clients
        for earlier, later in itertools.pairwise(rounds)
    )
    assert observed.keeps_participation is kept
    if kept:
        assert found.epsilon <= mechanism.guarantee(1e-5).epsilon * (1 + 1e-9)
    else:
        assert observed.worst_case(1e-5).epsilon >= found.epsilon * (1 - 1e-9)


def test_more_rounds_than_there_are_cannot_have_been_released(tmp_path: pathlib.Path) -> None:
    with refuses("13 rounds"):
        _mechanism().observed(_ledger([{1}] * 13))
    file = tmp_path / "ledger.csv"
    file.write_text("client,round\na,0\nb,0\na,5\n")
    observed = _mechanism().observed(file)
    assert observed.keeps_participation is True
    assert observed.participation.max_participations == 2


def test_draws_are_compared_with_the_seed() -> None:
    scheme = BallsInBins(_ROUNDS, 1, 6, 2, 3)
    mechanism = mfa.Mechanism(mfa.factorizations.identity(_ROUNDS), scheme, 2.0)
    sampler = scheme.sampler(7)
    cohorts = [set(sampler.draw(i).tolist()) for i in range(_ROUNDS)]
    ledger = dataclasses.replace(_ledger(cohorts), sampling=scheme)
    drawn = mechanism.observed(ledger, sampling_seed=7)
    assert drawn.keeps_participation is True
    assert drawn.num_absent == 0
    unknown = mechanism.observed(ledger)
    assert unknown.keeps_participation is None
    other = mechanism.observed(ledger, sampling_seed=8)
    assert other.keeps_participation is False
    assert other.deviation is not None
    # Nothing is amplified where the draws are not shown to be the scheme's.
    for each in (other, unknown):
        assert each.guarantee(1e-5) == each.unamplified_guarantee(1e-5)
    assert guarantees.scheme_of(drawn.guarantee(1e-5)) == scheme
    assert drawn.guarantee(1e-5).epsilon <= drawn.unamplified_guarantee(1e-5).epsilon
    # Another scheme, and names without the order of the population.
    elsewhere = dataclasses.replace(ledger, sampling=dataclasses.replace(scheme, num_bands=3))
    assert mechanism.observed(elsewhere, sampling_seed=7).keeps_participation is False
    with refuses("sampling_seed"):
        mechanism.observed(_ledger(cohorts), sampling_seed=7)


class _WithoutOne(Sampler):
    """One that leaves out the first client of each round, and says that it had to."""

    def draw(self, round_index: int) -> np.ndarray:
        return super().draw(round_index)[1:]


def test_a_sampler_is_believed_as_far_as_its_scheme_allows() -> None:
    """Absences cost nothing where clients draw for themselves, and the proof of groups has none."""
    bins, groups = BallsInBins(_ROUNDS, 1, 6, 2, 3), PoissonSampling(_ROUNDS, 1, 60, 20)
    for scheme, keeps in ((bins, True), (groups, False)):
        mechanism = mfa.Mechanism(mfa.factorizations.identity(_ROUNDS), scheme, 2.0)
        sampler = _WithoutOne(scheme, 7)
        clients = [sampler.draw(i) for i in range(_ROUNDS)]
        names = tuple(map(str, range(scheme.population)))
        rounds = tuple(
            np.array([i for i, cohort in enumerate(clients) if client in cohort], np.int64)
            for client in range(scheme.population)
        )
        ledger = Ledger(names, rounds, _ROUNDS, scheme)
        assert mechanism.observed(ledger, sampler=sampler).keeps_participation is keeps
        other = dataclasses.replace(scheme, num_rounds=_ROUNDS + 1)
        with refuses("sampler"):
            mechanism.observed(ledger, sampler=other.sampler(7))


def test_a_ledger_of_names_lacks_who_was_never_drawn() -> None:
    scheme = BallsInBins(_ROUNDS, 1, 6, 2, 3)
    mechanism = mfa.Mechanism(mfa.factorizations.identity(_ROUNDS), scheme, 2.0)
    seen = Ledger(("a", "b"), (np.array([0, 3]), np.array([1])), 4)
    assert mechanism.observed(seen).keeps_participation is None
    sooner = Ledger(("a", "b"), (np.array([0, 2]), np.array([1])), 4)
    assert mechanism.observed(sooner).keeps_participation is False
    # Six clients in their bins, and a seventh.
    rounds = [[0, 3]] * 3 + [[1]] * 2 + [[2]] * 2
    for number, keeps in ((6, None), (7, False)):
        all_drawn = Ledger(tuple("abcdefg"[:number]), tuple(map(np.array, rounds[:number])), 4)
        assert mechanism.observed(all_drawn).keeps_participation is keeps
    # A seventh that was never drawn is none of the population either.
    never = Ledger(tuple("abcdefg"), (*map(np.array, rounds[:6]), np.array([], np.int64)), 4)
    assert mechanism.observed(never).keeps_participation is False


def _digests(mechanism: mfa.Mechanism) -> tuple[bytes, bytes]:
    release = mechanism.release(1.0, IntegerSums())
    assert release.horizons[-1].noise_digest == mechanism.claim(0.1).noise_digest
    return release.digest, release.horizons[-1].noise_digest


@given(st.sampled_from(factorizations(_ROUNDS)), _schemas(), st.floats(0.0, 1e6))
@settings(max_examples=examples(40))
def test_saved_and_loaded_it_is_equal(
    tmp_path_factory: pytest.TempPathFactory,
    factorization: mfa.factorizations.Factorization,
    schema: Participation,
    noise_multiplier: float,
) -> None:
    directory = tmp_path_factory.mktemp("saved") / "mechanism"
    mechanism = mfa.Mechanism(factorization, schema, noise_multiplier)
    mechanism.save(directory)
    loaded = mfa.load(directory)
    assert loaded == mechanism
    assert hash(loaded) == hash(mechanism)
    for copied in (loaded, pickle.loads(pickle.dumps(mechanism))):
        assert _digests(copied) == _digests(mechanism)
    assert loaded != dataclasses.replace(mechanism, noise_multiplier=noise_multiplier + 1.0)
    assert mfa.checkpoints.load(directory).has_same_matrix(factorization)
    as_json = json.loads(json.dumps(mechanism.to_dict()))
    assert mfa.Mechanism.from_dict(as_json, factorization) == mechanism


def test_horizons_and_schemes_are_saved_as_well(tmp_path: pathlib.Path) -> None:
    whole = mfa.Mechanism(_blt(6, 2), _TIMERS, 0.7).extended(9).extended(11)
    for saved in (whole, _mechanism(_POISSON)):
        saved.save(tmp_path / "saved")
        loaded = mfa.load(tmp_path / "saved")
        assert loaded == saved
        assert _digests(loaded) == _digests(saved)


@pytest.mark.parametrize("kept", [[], [0], [0, 1], [1, 2], [0, 2], [1, 0, 2]])
def test_a_description_with_other_horizons_is_refused(kept: list[int]) -> None:
    whole = mfa.Mechanism(_blt(6, 2), _TIMERS, 0.7).extended(9).extended(11)
    described: dict[str, Any] = whole.to_dict()
    assert mfa.Mechanism.from_dict(described, whole.factorization) == whole
    with refuses("sigma"):
        mfa.Mechanism.from_dict(described | {"sigma": 1.6 * whole.sigma}, whole.factorization)
    described["horizons"] = [described["horizons"][place] for place in kept]
    with refuses("rounds"):
        mfa.Mechanism.from_dict(described, whole.factorization)


def test_altered_files_are_refused(tmp_path: pathlib.Path) -> None:
    directory = tmp_path / "mechanism"
    _mechanism().save(directory)
    file = directory / "mechanism.json"
    file.write_text(file.read_text().replace('_multiplier": 1.0', '_multiplier": 2.0'))
    with refuses("mechanism.json", error=CheckpointError):
        mfa.load(directory)
    # A checkpoint that replaces a mechanism is none.
    mfa.checkpoints.save(mfa.factorizations.identity(3), directory)
    with refuses("checkpoints.load", error=CheckpointError):
        mfa.load(directory)
    _mechanism().save(directory)
    # That of another run, which nobody altered.
    _mechanism(noise_multiplier=2.0).save(tmp_path / "other")
    file.write_bytes((tmp_path / "other" / "mechanism.json").read_bytes())
    with refuses("mechanism.json", error=CheckpointError):
        mfa.load(directory)
    with pytest.raises(CheckpointError):
        mfa.load(tmp_path / "nothing")


def test_windows_and_people_have_the_sensitivity_of_all_their_participations() -> None:
    """Columns of norm 1 that are orthogonal: three participations, two in a window of six."""
    mechanism = mfa.Mechanism(mfa.factorizations.banded(12, 4), MinSeparation(4, 3), 1.0)
    client, device = (
        mechanism.unit_guarantee(1e-5, window=6, num_windows=number) for number in (1, None)
    )
    person = mechanism.unit_guarantee(1e-5, num_clients=2)
    planned = mechanism.guarantee(1e-5)
    assert client.sensitivity.value == pytest.approx(math.sqrt(2.0))
    assert person.sensitivity.value == pytest.approx(2.0 * planned.sensitivity.value)
    assert client.epsilon < planned.epsilon <= device.epsilon
    assert "for each client in a window of 6 rounds over 12 rounds" in str(client)


def test_events_compose() -> None:
    """Two runs are one of a noise multiplier smaller by sqrt(2)."""
    event = _mechanism(noise_multiplier=2.0).event()
    together = mfa.accounting.composed_epsilon([event, event], 1e-6)
    assert together == pytest.approx(mfa.accounting.epsilon(np.sqrt(2.0), 1e-6), rel=1e-3)
    assert _mechanism(_POISSON).event() == guarantees.event(_mechanism(_POISSON).guarantee(1e-6))


def test_it_is_printed_in_two_lines() -> None:
    assert str(_mechanism()).splitlines() == [
        "banded factorization for 12 rounds, noise multiplier 1",
        "participations at least 4 rounds apart",
    ]
    assert "array" not in repr(_mechanism())


def test_one_schema_in_all_horizons_is_the_chain_of_extensions() -> None:
    schema = MinSeparation(3)
    whole = mfa.Mechanism(_blt(7, 2), schema, 0.8).extended(9).extended(12)
    found = mfa.Mechanism.of_one_schema(whole.factorization, schema, whole.noise_multiplier)
    assert [each.num_rounds for each in found.horizons] == [7, 9, 12]
    for each, expected in zip(found.horizons, whole.horizons, strict=True):
        assert each.noise_multiplier == pytest.approx(expected.noise_multiplier, rel=1e-12)


_SCHEMES: list[Participation] = [
    MinSeparation(6),
    PoissonSampling(_ROUNDS, 2, 1000, 20),
    FixedSizeSampling(_ROUNDS, 2, 1000, 20),
    BallsInBins(_ROUNDS, 2, 40, 10, 4),
]


@pytest.mark.short_cases(1)
@pytest.mark.parametrize("participation", _SCHEMES[:3])
def test_losses_state_what_the_guarantee_does(participation: Participation) -> None:
    """Two runs of them are those of each."""
    mechanism, delta = _mechanism(participation, 2.0), 1e-4
    losses = mechanism.privacy_loss_distribution(interval=1e-3)
    high, stated = losses.get_epsilon_for_delta(delta), mechanism.guarantee(delta).epsilon
    assert (1.0 - 1e-9) * stated <= high <= 1.02 * stated
    twice = losses.compose(losses).get_epsilon_for_delta(delta)
    composed = mfa.accounting.composed_epsilon([mechanism.event()] * 2, delta)
    # In either order, with those of dp-accounting.
    theirs = from_laplace_mechanism(4.0, value_discretization_interval=1e-3)
    both = [one.compose(other) for one, other in ((losses, theirs), (theirs, losses))]
    assert (
        high
        < both[0].get_epsilon_for_delta(delta)
        == pytest.approx(both[1].get_epsilon_for_delta(delta), rel=1e-6)
    )
    assert 0.9 * twice <= composed <= 1.03 * twice


@pytest.mark.short_cases(1)
@pytest.mark.parametrize("name", ["fixed_size", "truncated_poisson", "random_allocation"])
def test_every_scheme_has_the_losses_of_its_own_rounds(name: str) -> None:
    """And not those of the scheme that it is a kind of, which may be far smaller."""
    more = {"largest_batch": 10} if name == "truncated_poisson" else {}
    sizes = {"num_rounds": 12, "num_bands": 3, "population": 300, "clients_per_round": 10}
    mechanism = _mechanism(mfa.participation.sampling_scheme(name, **sizes, **more), 1.2)
    losses = mechanism.privacy_loss_distribution(interval=1e-3)
    for delta in (1e-3, 1e-5):
        stated = mechanism.guarantee(delta).epsilon
        assert losses.get_epsilon_for_delta(delta) >= stated * (1.0 - 1e-9)
        assert losses.get_epsilon_for_delta(delta) <= 1.02 * stated
    if name == "truncated_poisson":
        # Half of the batches are cut, and then a client replaces another one.
        coins = _mechanism(PoissonSampling(12, 3, 300, 10), 1.2)
        assert mechanism.guarantee(1e-5).epsilon > 1.5 * coins.guarantee(1e-5).epsilon


def test_a_client_in_the_place_of_another_needs_twice_the_noise_that_is_accounted_for() -> None:
    """It moves a sum by two clip norms: nothing is amplified that has less than 0.4."""
    for participation, is_amplified in ((_SCHEMES[1], True), (_SCHEMES[2], False)):
        mechanism = _mechanism(participation, 0.39)
        losses = mechanism.privacy_loss_distribution(interval=1e-2)
        most = participation.most_participations(_ROUNDS)
        unamplified = mechanism.noise_multiplier / np.sqrt(most)
        alone = accounting.exact_epsilon(unamplified, 1e-6)
        found = losses.get_epsilon_for_delta(1e-6)
        assert (found < 0.9 * alone) if is_amplified else (alone <= found <= 1.001 * alone)


@pytest.mark.parametrize("participation", _SCHEMES[:2])
def test_losses_are_infinite_where_noise_or_transforms_may_fail(
    participation: Participation,
) -> None:
    mechanism, rounds = _mechanism(participation, 2.0), 0
    if mechanism.sampling is not None:
        rounds = mechanism.sampling.as_draws().most_participations
    losses = mechanism.privacy_loss_distribution(interval=1e-2)
    fails = 2.0 * failure_probability(2.0, DEFAULT_NUM_COORDINATES)
    fails += 2e-15 * rounds
    assert losses._pmf_remove._infinity_mass >= fails * (1.0 - 1e-6)


def test_losses_that_cannot_be_had_are_refused() -> None:
    with refuses("noise_multiplier"):
        _mechanism(noise_multiplier=0.0).privacy_loss_distribution()
    with refuses("interval"):
        _mechanism(noise_multiplier=0.3).privacy_loss_distribution(interval=1e-6)
    # Without amplification, 400 passes have a twentieth of the noise multiplier.
    passes = mfa.participation.Shuffling(4000, 1, 10, 1)
    shuffled = mfa.Mechanism(mfa.factorizations.identity(4000), passes, 0.5)
    with refuses("interval"):
        shuffled.privacy_loss_distribution()
    # So little noise cannot be drawn safely.
    with refuses("too little noise", error=mfa.accounting.TailError):
        _mechanism(noise_multiplier=0.15).privacy_loss_distribution(interval=1e-2)


def test_a_factorization_of_another_class_is_refused(tmp_path: pathlib.Path) -> None:
    """A subclass could state a sensitivity that its rows of noise do not have."""
    own = mfa.factorizations.banded(8, num_bands=2)

    class Small(mfa.factorizations.BandedFactorization):
        def sensitivity(self, participation: mfa.participation.Participation) -> Sensitivity:
            found = super().sensitivity(participation)
            return Sensitivity(found.value / 40.0, is_exact=found.is_exact, theorem=found.theorem)

    timers, drawn = MinSeparation(2), PoissonSampling(8, 2, 40, 5)
    made = Small(own.bands)
    replaced = mfa.factorizations.BandedFactorization(own.bands)
    object.__setattr__(replaced, "sensitivity", lambda participation: made.sensitivity(timers))
    for matrix, said in ((made, "Small"), (replaced, "sensitivity")):
        for refused in (
            lambda matrix=matrix: mfa.calibrate(matrix, timers, epsilon=8.0, delta=1e-6),
            lambda matrix=matrix: mfa.calibrate(matrix, drawn, epsilon=8.0, delta=1e-6),
            lambda matrix=matrix: mfa.Mechanism(matrix, timers, 1.0),
            lambda matrix=matrix: mfa.Mechanism.of_one_schema(matrix, timers, 1.0),
            lambda matrix=matrix: mfa.checkpoints.save(matrix, tmp_path / "saved"),
            lambda matrix=matrix: small_mechanisms.sampled(matrix, drawn, 1.0, 1e-6),
            lambda matrix=matrix: plan_of(matrix, timers, 1.0, 1e-6),
        ):
            with refuses(said, "factorization", error=TypeError):
                refused()
    # The same numbers as data.
    mechanism = mfa.Mechanism(mfa.factorizations.BandedFactorization(made.bands), timers, 1.0)
    assert mechanism == mfa.Mechanism(own, timers, 1.0)


def test_a_mechanism_has_no_subclasses() -> None:
    with refuses("Mechanism", "subclasses", error=TypeError):
        type("Better", (mfa.Mechanism,), {})


# Runs that are extended more than once: every horizon enters the guarantee of the whole.


_HORIZONS = (3, 5, 8)


def _chain(first: Factorization) -> Factorization:
    return first.extended(_HORIZONS[1]).extended(_HORIZONS[2])


_CHAINS = {
    "identity": _chain(mfa.factorizations.identity(_HORIZONS[0])),
    "blt": _chain(mfa.factorizations.blt(_HORIZONS[0], 1)),
    "toeplitz": _chain(mfa.factorizations.toeplitz(_HORIZONS[0], coefficients="square_root")),
}


@st.composite
def _growing_schemas(draw: st.DrawFn) -> Participation:
    separation, most = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    schemas: list[Participation] = [
        SingleParticipation(),
        MinSeparation(separation),
        MinSeparation(separation, most),
        MinSeparation(separation, most),
        FixedEpochOrder(most, separation),
    ]
    return draw(st.sampled_from(schemas))


def _timer_allows(schema: Participation, before: tuple[int, ...], now: int) -> bool:
    """Whether a device whose timer is set to a schema may join now, after its earlier rounds."""
    if not before:
        return True
    if isinstance(schema, SingleParticipation):
        return False
    waited = now - before[-1]
    if isinstance(schema, FixedEpochOrder):
        return waited == schema.separation and len(before) < schema.epochs
    assert isinstance(schema, MinSeparation)
    most = schema.max_participations
    return waited >= schema.separation and (most is None or len(before) < most)


def _under_timers(schemas: tuple[Participation, ...]) -> Iterator[tuple[int, ...]]:
    """All patterns of a client that keeps in every round the timer of that round's horizon."""
    found: list[tuple[int, ...]] = [()]
    for now in range(_HORIZONS[-1]):
        schema = next(each for each, rounds in zip(schemas, _HORIZONS, strict=True) if now < rounds)
        found += [(*each, now) for each in found if _timer_allows(schema, each, now)]
    return (pattern for pattern in found if pattern)


def _reached(strategy: np.ndarray, patterns: Iterator[tuple[int, ...]]) -> float:
    """What a client can change of C x: C has no negative entries, so by ones."""
    return max(float(np.linalg.norm(strategy[:, pattern].sum(axis=1))) for pattern in patterns)


def _extended(whole: Factorization, *schemas: Participation) -> mfa.Mechanism:
    """A run that had a schema in each horizon, the first with noise multiplier 1.3."""
    mechanism = mfa.Mechanism(whole.at_horizon(whole.horizons[0]), schemas[0], 1.3)
    for rounds, schema in zip(whole.horizons[1:], schemas[1:-1], strict=True):
        mechanism = mechanism.extended(rounds, schema, factorization=whole.at_horizon(rounds))
    return mechanism.extended(whole.num_rounds, schemas[-1], factorization=whole)


@settings(max_examples=examples(400))
@given(
    st.sampled_from(sorted(_CHAINS)),
    st.tuples(_growing_schemas(), _growing_schemas(), _growing_schemas()),
)
def test_no_client_that_kept_every_timer_has_less_than_is_stated(
    name: str, schemas: tuple[Participation, ...]
) -> None:
    whole = _CHAINS[name]
    assert whole.horizons == _HORIZONS[:2]
    is_kept = all(
        set(brute_force.patterns(before, rounds)) <= set(brute_force.patterns(after, rounds))
        for (before, after), rounds in zip(itertools.pairwise(schemas), _HORIZONS[:2], strict=True)
    )
    if not is_kept:
        with refuses("horizon"):
            _extended(whole, *schemas)
        return
    stated = _extended(whole, *schemas).noise_multiplier
    strategy = whole.strategy_matrix()
    assert strategy.min() >= 0.0
    first = _reached(
        strategy[: _HORIZONS[0], : _HORIZONS[0]],
        brute_force.patterns(schemas[0], _HORIZONS[0]),
    )
    assert stated <= 1.3 * first / _reached(strategy, _under_timers(schemas)) * (1.0 + 1e-9)


def test_a_horizon_in_the_middle_is_not_forgotten() -> None:
    """Twice as often in the middle: a client who kept every timer has epsilon 12.47, not 9.50."""
    first, middle, last = MinSeparation(10, 2), MinSeparation(4, 10), MinSeparation(10, 6)
    made = mfa.factorizations.blt(20, 3, participation=first)
    begun = mfa.Mechanism(made, first, 1.0)
    longer = begun.extended(40, middle)
    whole = longer.factorization.extended(60, participation=last)
    strategy = whole.strategy_matrix()
    scale = np.linalg.norm(strategy[:20, [0, 10]].sum(axis=1))
    moved = np.linalg.norm(strategy[:, [0, 10, 20, 24, 28, 32, 36]].sum(axis=1))
    assert accounting.epsilon(float(scale / moved), 1e-6) == pytest.approx(12.467, abs=5e-4)
    with refuses("20", "40"):
        begun.extended(60, last, factorization=whole)
    with refuses("40", "10"):
        longer.extended(60, last, factorization=whole)
    # What allows the middle as well is accounted for.
    stated = longer.extended(60, MinSeparation(4, 10), factorization=whole)
    assert accounting.epsilon(stated.noise_multiplier, 1e-6) > 12.467
    assert stated.earlier_participations == {20: first, 40: middle}


def test_horizons_are_compared_one_after_the_other() -> None:
    """The whole allows each of both, and not what they allow together: eleven participations."""
    often, seldom = MinSeparation(1, 10), MinSeparation(10)
    with refuses("20"):
        mechanism._check_extended({10: often, 20: seldom}, often)
    mechanism._check_extended({10: seldom, 20: MinSeparation(2)}, MinSeparation(1))
    mechanism._check_extended({}, seldom)


def test_wrong_horizons_are_refused() -> None:
    with refuses("participation", error=TypeError):
        mechanism._check_extended({3: MinSeparation(2)}, "min_sep")  # type: ignore[arg-type]


def test_runs_that_draw_more_than_is_charged_are_refused() -> None:
    """All statements charge for 2^40 numbers where nobody says how many there are."""
    mechanism.check_charged(2**20, 2**20)
    with refuses("1.1e+12", "2^40"):
        mechanism.check_charged(2**20 + 1, 2**20)
    with refuses("8.8e+12"):
        mechanism.check_charged(2**31, 4096)
