"""Guarantees: planned and observed, of attackers, of rules that end a run, and of one client."""

import dataclasses
import functools
import itertools
import math
import pathlib
import types
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any
from unittest import mock

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

import mf_aggregators as mfa
from mf_aggregators import accounting, workloads
from mf_aggregators.factorizations import (
    BandedFactorization,
    DenseFactorization,
    Factorization,
    ToeplitzFactorization,
    banded,
    blt,
    identity,
    optimal,
    toeplitz,
    tree_aggregation,
)
from mf_aggregators.factorizations.blt import BltFactorization
from mf_aggregators.kernel import certificate as certificates
from mf_aggregators.kernel import integers
from mf_aggregators.kernel.certificate import dominating_pair
from mf_aggregators.kernel.claim import Assumption, Guarantee
from mf_aggregators.kernel.ledger import ObservedParticipation
from mf_aggregators.kernel.losses import LARGEST_ROUNDING
from mf_aggregators.participation import (
    BallsInBins,
    FixedEpochOrder,
    MinSeparation,
    MinSeparationSampling,
    Participation,
    PoissonSampling,
    SingleParticipation,
    sampling_scheme,
)
from mf_aggregators.privacy import guarantees, statements
from mf_aggregators.privacy.guarantees import LeastProtected, StoppingRule
from mf_aggregators.privacy.ledgers import Ledger, LedgerError
from tests.examples import examples
from tests.mf_aggregators import small_mechanisms
from tests.mf_aggregators.small_mechanisms import factorizations, plan_of
from tests.refusals import refuses

_DELTA = 1e-5


@given(
    st.lists(st.lists(st.integers(0, 11), unique=True), min_size=1, max_size=6),
    st.integers(1, 12),
)
@settings(max_examples=examples(100), deadline=None)
def test_the_observed_noise_multiplier_is_at_most_that_of_the_worst_client(
    rounds_of_clients: list[list[int]], separation: int
) -> None:
    """The same noise against the true change that each client's pattern allows."""
    factorization = banded(workloads.prefix_sum(12), min(3, separation))
    plan = plan_of(factorization, MinSeparation(separation), 1.0, _DELTA)
    rounds = [sorted(client) for client in rounds_of_clients]
    observed = ObservedParticipation.of(rounds, 12)
    found = observed.guarantee(plan)
    stddev = plan.noise_multiplier * plan.sensitivity
    strategy = factorization.strategy_matrix()
    for client in rounds:
        if client:
            # Entries of C are not negative, so equal contributions change C x the most.
            assert np.min(strategy) >= -1e-9
            change = np.linalg.norm(strategy[:, client].sum(axis=1))
            assert found.noise_multiplier <= stddev / change * (1 + 1e-9)


def test_a_broken_plan_earns_less() -> None:
    factorization = banded(workloads.prefix_sum(12), 4)
    participation = MinSeparation(4, 3)
    plan = plan_of(factorization, participation, 0.8, _DELTA)
    too_soon = ObservedParticipation.of([[0, 2, 6]], 12)
    assert not guarantees.keeps_plan(participation, too_soon)
    assert too_soon.guarantee(plan).epsilon > plan.epsilon
    too_often = ObservedParticipation.of([[0, 4, 8]], 12)
    assert not guarantees.keeps_plan(MinSeparation(4, 2), too_often)
    plan_of_two = plan_of(factorization, MinSeparation(4, 2), 0.8, _DELTA)
    assert too_often.guarantee(plan_of_two).epsilon > plan_of_two.epsilon


def test_roundings_of_a_matrix_are_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    scheme = MinSeparationSampling(8, 2, 400, 10, 2)
    mechanism = mfa.Mechanism(mfa.factorizations.banded(8, num_bands=2), scheme, 1.0)
    again: list[Any] = []
    monkeypatch.setattr(integers.IntegerRows, "of", again.append)
    assert dataclasses.replace(mechanism, noise_multiplier=2.0) != mechanism
    assert not again


def test_a_sampled_run_has_the_amplified_guarantee() -> None:
    factorization = banded(workloads.prefix_sum(12), 3)
    scheme = PoissonSampling(12, 3, 300, 10)
    plan = small_mechanisms.sampled(factorization, scheme, 1.2, _DELTA)
    assert plan.epsilon == pytest.approx(scheme.epsilon(1.2, _DELTA), rel=1e-11)
    assert plan.sensitivity == pytest.approx(factorization.sensitivity(SingleParticipation()))
    assert statements.described(plan)["schema"] == FixedEpochOrder(4, 3).to_dict()
    assert plan.rho == pytest.approx(4 * 0.5 / 1.2**2)
    assert guarantees.event(plan) == scheme.event(1.2)
    assert statements.described(plan)["sampling"] == scheme.to_dict()
    kept = ObservedParticipation(12, 40, 3, 4, keeps_sampling=True)
    assert guarantees.keeps_plan(scheme, kept)
    assert kept.guarantee(plan).epsilon == pytest.approx(plan.epsilon)


def test_noise_whose_roundings_reach_beyond_the_bands_is_not_amplified() -> None:
    """Its matrix has few enough bands, and its rows follow from earlier rows of Z."""
    factorization = toeplitz(8, 6, equal_column_norms=True)
    assert factorization.strategy_bands() == 6
    with refuses("bands"):
        small_mechanisms.sampled(factorization, PoissonSampling(8, 6, 300, 10), 1.2, _DELTA)


def test_a_sampled_run_that_was_not_sampled_earns_nothing_by_it() -> None:
    """What its participations give without amplification: three of one client, 3 rounds apart."""
    factorization = banded(workloads.prefix_sum(12), 3)
    plan = small_mechanisms.sampled(factorization, PoissonSampling(12, 3, 300, 10), 1.2, _DELTA)
    for keeps in (False, None):
        broken = ObservedParticipation(12, 40, 3, 3, keeps_sampling=keeps)
        assert not guarantees.keeps_plan(PoissonSampling(12, 3, 300, 10), broken)
        guarantee = broken.guarantee(plan)
        assert not guarantee.is_amplified
        assert guarantee.epsilon == pytest.approx(
            accounting.epsilon(1.2 / math.sqrt(3), _DELTA), rel=1e-6
        )
        assert guarantee.epsilon > plan.epsilon


@pytest.mark.short_cases(1)
@pytest.mark.parametrize(
    ("scheme", "participation"),
    [
        (MinSeparationSampling(12, 3, 300, 10, 5), MinSeparation(5, 3)),
        (BallsInBins(12, 3, 300, 50, 6), FixedEpochOrder(2, 6)),
    ],
)
def test_clients_that_draw_for_themselves_have_a_certified_guarantee(
    scheme: MinSeparationSampling | BallsInBins,
    participation: Participation,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    factorization, delta = banded(workloads.prefix_sum(12), 3), 1e-3
    plan = small_mechanisms.sampled(factorization, scheme, 1.5, delta)
    assert statements.described(plan)["schema"] == participation.to_dict()
    most = participation.most_participations(12)
    without = accounting.epsilon(1.5 / math.sqrt(most), delta)
    assert plan.rho == pytest.approx(most * 0.5 / 1.5**2)
    assert plan.claim.certificate is not None
    assert plan.claim.certificate.epsilon == plan.epsilon < without
    columns = factorization.columns_for(scheme)
    assert columns is not None
    pair = dominating_pair(scheme.run(1.5, columns))
    assert certificates.is_proved(pair, plan.claim.certificate)
    assert dict[str, Any](statements.described(plan))["certificate"]["seed"] == 0
    assert statements.described(plan)["sampling"] == scheme.to_dict()
    # What was drawn is kept: the same guarantee, and one for the rounds that there were.
    kept = ObservedParticipation(12, 40, scheme.separation, most, keeps_sampling=True)
    guarantee = kept.guarantee(plan)
    assert guarantee.epsilon == pytest.approx(plan.epsilon)
    for rounds in (1, 2, 7):
        kept = ObservedParticipation(rounds, 9, None, 1, keeps_sampling=True)
        stopped = kept.guarantee(plan)
        assert stopped.num_rounds == rounds
        # The rounds that there were are a part of all rounds, whose certificate holds for them.
        assert guarantees.scheme_of(stopped) == guarantees.scheme_of(plan)
        assert stopped.epsilon == plan.epsilon


@pytest.mark.parametrize(
    ("float_error", "charged"),
    [(0.0, 4.0), (1.499, 4.0), (10.0, 21.0), (511.0, 1023.0)]
    + [(each, None) for each in (512.0, math.inf, math.nan)],
)
@pytest.mark.parametrize("name", ["min_separation", "balls_in_bins"])
def test_what_roundings_move_is_charged_or_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, float_error: float, charged: float | None
) -> None:
    """One step, and twice what floats err by; more than half of the noise is refused."""
    matrix = banded(workloads.prefix_sum(8), 2)
    scheme = sampling_scheme(
        name, num_rounds=8, num_bands=2, population=100, clients_per_round=25, separation=4
    )
    rounded = types.SimpleNamespace(float_error=float_error)
    monkeypatch.setattr(integers.Rounding, "of", lambda *unused: rounded)
    if charged is None:
        with refuses("rounded"):
            matrix.check_scheme(scheme)
    else:
        matrix.check_scheme(scheme)
        columns = matrix.columns_for(scheme)
        assert columns is not None
        assert columns.rounding == charged


def test_amplification_needs_a_banded_matrix_for_the_same_rounds() -> None:
    scheme = PoissonSampling(12, 3, 300, 10)
    with refuses("4 bands"):
        small_mechanisms.sampled(banded(workloads.prefix_sum(12), 4), scheme, 1.0, _DELTA)
    with refuses("at most", "bands"):
        small_mechanisms.sampled(tree_aggregation(12), scheme, 1.0, _DELTA)
    with refuses("12 bands"):
        small_mechanisms.sampled(blt(12, 2), scheme, 1.0, _DELTA)
    with refuses("12", "11"):
        small_mechanisms.sampled(identity(11), scheme, 1.0, _DELTA)
    # Fewer bands than parts are fewer rows for each participation.
    assert (
        guarantees.scheme_of(small_mechanisms.sampled(identity(12), scheme, 1.0, _DELTA)) == scheme
    )


@pytest.mark.parametrize("num_rounds", [8, 64])
@pytest.mark.parametrize("scheme_type", [BallsInBins, MinSeparationSampling])
@pytest.mark.parametrize("mechanism", ["optimal", "toeplitz"])
def test_rows_of_earlier_rows_of_z_are_rounded_by_no_more_than_is_charged(
    mechanism: str, scheme_type: type[BallsInBins | MinSeparationSampling], num_rounds: int
) -> None:
    """A step e of each earlier row of Z moves row i of it by C1 e: up to the sum of its entries."""
    factorization = (
        optimal(workloads.prefix_sum(num_rounds), participation=SingleParticipation())
        if mechanism == "optimal"
        else toeplitz(num_rounds)
    )
    scheme = scheme_type(num_rounds, num_rounds, 2 * num_rounds, 2, num_rounds)
    strategy = factorization.strategy_matrix()
    moved = float(np.max(np.sum(np.abs(strategy / np.diag(strategy)), axis=1)))
    columns = factorization.columns_for(scheme)
    assert columns is not None
    # Floats err by little beside a step.
    assert max(LARGEST_ROUNDING, moved) <= columns.rounding <= max(LARGEST_ROUNDING, 1.1 * moved)
    # Where the rounding of all rows together is charged, for one participation, it is allowed.
    poisson = PoissonSampling(num_rounds, num_rounds, 2 * num_rounds, 2)
    factorization.check_scheme(poisson)


@pytest.mark.long_cases(1)
@pytest.mark.long
@pytest.mark.parametrize("num_bins", [3, pytest.param(6, marks=pytest.mark.long)])
def test_participations_that_share_rows_are_one_mechanism_to_who_knows_their_rounds(
    num_bins: int, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the sensitivity of the fixed order of rounds that a bin is, of |C|."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    scheme = BallsInBins(12, 12, 10 * num_bins, 10, num_bins)
    factorization = blt(12, 2, MinSeparation(num_bins))
    plan = small_mechanisms.sampled(factorization, scheme, 2.5, 1e-3)
    bound = factorization.sensitivity(scheme.support()).value / plan.sensitivity
    assert plan.run is not None
    assert plan.run.noise_multiplier == pytest.approx(2.5 / bound, rel=1e-8)
    assert plan.rho == pytest.approx(0.5 * (bound / 2.5) ** 2, rel=1e-8)
    without = accounting.epsilon(2.5 / bound, 1e-3)
    assert plan.claim.certificate is not None
    assert plan.epsilon < 0.97 * without
    # With other runs it composes without amplification.
    alone = accounting.composed_epsilon([guarantees.event(plan)], 1e-3)
    assert alone == pytest.approx(without, rel=1e-3)
    # A part of a client's data has half of the noise multiplier of all of them.
    half = 0.5 * plan.run.noise_multiplier
    assert guarantees.part_of_client(plan)["noise_multiplier"] == pytest.approx(half, rel=1e-8)
    mechanism = mfa.Mechanism(factorization, scheme, 2.5)
    assert accounting.composed_epsilon([mechanism.event()], 1e-3) == alone
    target = mfa.calibrate(factorization, scheme, rho=0.5)
    assert target.guarantee(1e-3).rho == pytest.approx(0.5, rel=1e-8)
    with refuses("strategy matrix"):
        scheme.epsilon(2.5, 1e-3)
    # A matrix alone does not say how its rows of noise are made.
    found = scheme.epsilon(2.5, 1e-3, factorization.strategy_matrix())
    assert plan.epsilon * (1.0 - 1e-3) <= found <= 1.01 * plan.epsilon


def test_a_matrix_alone_is_charged_for_rows_that_follow_from_rows_of_z() -> None:
    schemes = [BallsInBins(40, 40, 200, 20, 10), MinSeparationSampling(40, 40, 4000, 20, 40)]
    made = (toeplitz(40), optimal(workloads.prefix_sum(40)))
    for factorization, scheme in itertools.product(made, schemes):
        known = factorization.columns_for(scheme)
        alone = scheme._columns(factorization.strategy_matrix())
        assert known is not None
        assert alone is not None
        assert 4.0 < known.rounding <= alone.rounding <= 1.6 * known.rounding


def test_noise_that_reaches_further_than_its_bands_is_refused() -> None:
    # The coefficients of these buffers are no floats after some rounds.
    made = BltFactorization(400, np.array([0.001]), np.array([0.0005]))
    bands = made.strategy_bands()
    assert bands is not None
    assert bands < 200
    with refuses("uses earlier rows"):
        made.check_scheme(BallsInBins(400, bands, 20000, 100, 200))


@given(
    st.lists(st.integers(0, 11), unique=True, max_size=6).map(sorted),
    st.integers(1, 12),
    st.integers(1, 5),
    st.integers(1, 12),
)
@settings(max_examples=examples(60), deadline=None)
def test_a_widened_guarantee_is_never_the_better_one(
    rounds: list[int], separation: int, most: int, released: int
) -> None:
    factorization = banded(workloads.prefix_sum(12), 3)
    schemas: list[Participation] = [MinSeparation(separation, most), SingleParticipation()]
    for participation in schemas:
        plan = plan_of(factorization, participation, 1.0, _DELTA)
        kept = [i for i in rounds if i < released]
        observed = ObservedParticipation.of([kept], released)
        worst_case = observed.worst_case(plan)
        assert worst_case.epsilon >= plan.epsilon * (1 - 1e-9)
        guarantee = observed.guarantee(plan)
        assert worst_case.epsilon >= guarantee.epsilon * (1 - 1e-9)


def _gaussian_delta(shift: float, epsilon: float) -> float:
    """The hockey-stick divergence of N(shift, 1) from N(0, 1) (Balle and Wang, 2018, Thm 5)."""
    first, second = shift / 2 - epsilon / shift, -shift / 2 - epsilon / shift
    return float(scipy.stats.norm.cdf(first) - math.exp(epsilon) * scipy.stats.norm.cdf(second))


def test_who_shares_a_client_has_half_the_noise() -> None:
    """One of two people: from one update to its opposite, two clip norms apart. 8 becomes 19.8."""
    multiplier = accounting.noise_multiplier(8.0, 1e-4)
    plan = plan_of(identity(6), MinSeparation(2), multiplier, 1e-4)
    part: dict[str, Any] = {**guarantees.part_of_client(plan)}
    assert part["noise_multiplier"] == multiplier / 2
    assert part["epsilon"] == pytest.approx(19.79, abs=5e-3)
    # The whole client's epsilon does not hold for such a part, and the stated one does.
    moved = 2.0 / multiplier
    assert _gaussian_delta(moved, plan.epsilon) > 0.2
    assert _gaussian_delta(moved, part["epsilon"]) <= 1e-4
    assert _gaussian_delta(moved, part["epsilon"] * (1 - 1e-6)) > 1e-4 * (1 - 1e-6)
    assert (part["amplified_epsilon"], part["amplified_delta"]) == (None, None)


@pytest.mark.short_cases(3)
@pytest.mark.parametrize("multiplier", [0.45, 1.0, 3.0])
@pytest.mark.parametrize("clients_per_round", [3, 60])
def test_who_shares_a_client_that_is_sampled(multiplier: float, clients_per_round: int) -> None:
    """One round: with probability q an update is in the sum, and what it is differs by two."""
    scheme = PoissonSampling(1, 1, 100, clients_per_round)
    plan = small_mechanisms.sampled(identity(1), scheme, multiplier, 1e-3)
    part: dict[str, Any] = {**guarantees.part_of_client(plan)}
    share = clients_per_round / 100

    def delta(epsilon: float) -> float:
        grid = np.linspace(-1.0 - 12 * multiplier, 1.0 + 12 * multiplier, 200_001)
        out, here, there = (scipy.stats.norm.pdf(grid, at, multiplier) for at in (0.0, 1.0, -1.0))
        excess = (1 - share) * out + share * here
        excess -= math.exp(epsilon) * ((1 - share) * out + share * there)
        return float(np.maximum(excess, 0.0).sum() * (grid[1] - grid[0]))

    assert delta(plan.epsilon) > 1e-3
    assert part["epsilon"] == pytest.approx(accounting.epsilon(multiplier / 2, 1e-3), rel=1e-11)
    assert delta(part["epsilon"]) <= 1e-3
    if part["amplified_epsilon"] is not None and part["amplified_delta"] is not None:
        assert delta(part["amplified_epsilon"]) <= part["amplified_delta"]
        assert part["amplified_delta"] == pytest.approx(1e-3 * (1 + math.exp(plan.epsilon)))
    else:
        assert 1e-3 * (1 + math.exp(plan.epsilon)) > 1 - 1e-9


def test_a_part_of_a_client_in_several_participations() -> None:
    """Four of them, without amplification: what differs adds up, and so does what is stated."""
    plan = small_mechanisms.sampled(
        banded(workloads.prefix_sum(12), 3), PoissonSampling(12, 3, 300, 10), 1.2, _DELTA
    )
    part: dict[str, Any] = {**guarantees.part_of_client(plan)}
    assert part["noise_multiplier"] == pytest.approx(1.2 / 2 / 2)
    found = accounting.epsilon(1.2 / 4, _DELTA, disjoint_participations=4)
    assert part["epsilon"] == pytest.approx(found, rel=1e-11)
    assert plan.zcdp_delta == accounting.zcdp_delta(0.6, disjoint_participations=4)


@pytest.mark.parametrize("multiplier", [0.0, 0.1, 0.19])
def test_so_little_noise_has_no_zcdp_and_protects_no_part(multiplier: float) -> None:
    plan = plan_of(identity(6), MinSeparation(2), multiplier, _DELTA)
    assert (plan.rho, guarantees.part_of_client(plan)["epsilon"]) == (math.inf, math.inf)
    found = statements.described(plan)
    assert (found["rho"], found["zcdp_delta"]) == (None, None)
    between = plan_of(identity(6), MinSeparation(2), 0.3, _DELTA)
    assert between.zcdp_delta == accounting.zcdp_delta(0.3)
    assert guarantees.part_of_client(between)["epsilon"] == math.inf


@given(st.floats(1e-6, 1.0))
@settings(max_examples=examples(200))
def test_percents_are_rounded_up(rate: float) -> None:
    plan = plan_of(identity(1), SingleParticipation(), 1.0, 1e-5)
    with mock.patch.object(guarantees, "rates", return_value={"1 %": rate, "0.1 %": rate}):
        shown = Decimal(guarantees.rates_in_brief(plan).partition(" %")[0]) / 100
    assert shown >= Decimal(rate)
    assert shown <= Decimal(rate) * Decimal("1.00011")


def test_a_guarantee_says_what_an_attacker_can_do() -> None:
    guarantee = plan_of(identity(6), MinSeparation(2), 0.543, 1e-5)
    found = guarantees.rates(guarantee, "planned_")
    assert list(found) == [
        "planned_true_positive_rate_at_0.01",
        "planned_true_positive_rate_at_0.001",
    ]
    assert found["planned_true_positive_rate_at_0.01"] == pytest.approx(0.3139349, abs=1e-6)
    # In per cent, rounded up.
    stated = statements.described(guarantee)["true_positive_percent"]
    assert stated == {"1": "31.4", "0.1": "10.6"}
    brief = guarantees.rates_in_brief(guarantee)
    assert brief == (
        "31.394 % at a false positive rate of 1 % and 10.591 % at a false positive rate of 0.1 %"
    )


def test_without_a_guarantee_an_attacker_may_find_everybody() -> None:
    for multiplier in (0.0, 0.1):
        guarantee = plan_of(identity(6), MinSeparation(2), multiplier, 1e-5)
        assert set(guarantees.rates(guarantee).values()) == {1.0}
    assert set(guarantees.rates(None).values()) == {None}


def test_who_was_in_no_round_is_found_by_guessing_alone() -> None:
    factorization = identity(6)
    plan = plan_of(factorization, MinSeparation(2), 1.0, 1e-5)
    nobody = ObservedParticipation.of([], 3)
    rates = guarantees.rates(nobody.guarantee(plan))
    assert list(rates.values()) == [0.01, 0.001]
    assert guarantees.true_positive_rate(plan, 0.25) == accounting.true_positive_rate(1.0, 0.25)


_ROUNDS_OF_RULE = 6


@functools.cache
def _factorizations() -> tuple[Factorization, ...]:
    return factorizations(_ROUNDS_OF_RULE)


def _rounds_of_clients(cohorts: list[list[int]], num_clients: int) -> list[list[int]]:
    return [
        [index for index, cohort in enumerate(cohorts) if client in cohort]
        for client in range(num_clients)
    ]


def _rounds_released(rule: StoppingRule, cohorts: list[list[int]], num_clients: int) -> int:
    """How many rounds take place, of those with these cohorts."""
    for number in range(1, len(cohorts) + 1):
        observed = ObservedParticipation.of(
            _rounds_of_clients(cohorts[:number], num_clients), number
        )
        if not rule.allows(observed):
            return number - 1
    return len(cohorts)


@given(
    index=st.integers(0, 16),
    cohorts=st.lists(
        st.lists(st.integers(0, 3), min_size=1, max_size=3, unique=True),
        min_size=_ROUNDS_OF_RULE,
        max_size=_ROUNDS_OF_RULE,
    ),
    share=st.floats(0.55, 1.6),
)
@settings(max_examples=examples(200), deadline=None)
def test_what_is_released_is_within_the_limit_for_every_client(
    index: int, cohorts: list[list[int]], share: float
) -> None:
    """The true change by each client's own rounds, enumerated, whether the plan is kept or not."""
    factorization = _factorizations()[index]
    plan = plan_of(factorization, MinSeparation(2), 1.5, _DELTA)
    limit = share * plan.epsilon
    try:
        rule = StoppingRule(plan, limit)
    except ValueError:
        return
    released = _rounds_released(rule, cohorts, 4)
    assert released >= 1
    # With N the leading rows of the noise and N N^T = L L^T, releases G + N Z say as much as
    # L^-1 G plus independent noise.
    rows = factorization.noising_matrix()[:released]
    changes = np.linalg.inv(np.linalg.cholesky(rows @ rows.T))
    for rounds in _rounds_of_clients(cohorts[:released], 4):
        if not rounds:
            continue
        most = max(
            float(np.linalg.norm(changes[:, rounds] @ np.array([1.0, *signs])))
            for signs in itertools.product([1.0, -1.0], repeat=len(rounds) - 1)
        )
        multiplier = plan.noise_multiplier * plan.sensitivity / most
        assert mfa.accounting.epsilon(multiplier, _DELTA) <= limit * (1 + 1e-9)
        # So the event that is composed with other runs is of no less noise than there is.
        assert multiplier >= rule.guarantee.noise_multiplier * (1 - 1e-9)
    assert rule.guarantee.epsilon <= limit


@pytest.mark.parametrize("most", [1, 2, 3])
def test_independent_noise_ends_before_a_client_takes_part_once_too_often(most: int) -> None:
    """The sensitivity of k participations is sqrt(k), so that limits between two are known."""
    factorization = identity(12)
    plan = plan_of(factorization, MinSeparation(2, 4), 1.0, _DELTA)
    # Relative to one participation, the noise multiplier is that of the plan times two.
    epsilons = [mfa.accounting.epsilon(2.0 / k**0.5, _DELTA) for k in (most, most + 1)]
    for limit in (epsilons[0] * (1 + 1e-9), 0.5 * sum(epsilons), epsilons[1] * (1 - 1e-9)):
        rule = StoppingRule(plan, limit)
        # One client in every second round, another one once.
        cohorts = [[0] if index % 2 == 0 else [1 + index] for index in range(12)]
        assert _rounds_released(rule, cohorts, 14) == 2 * most


def test_a_limit_above_the_plan_ends_nothing_that_keeps_the_plan() -> None:
    factorization = banded(mfa.workloads.prefix_sum(9), 3)
    plan = plan_of(factorization, MinSeparation(3), 1.0, _DELTA)
    rule = StoppingRule(plan, plan.epsilon * (1 + 1e-6))
    assert _rounds_released(rule, [[index % 3] for index in range(9)], 3) == 9
    # One that breaks it is ended: all nine rounds of one client are too much.
    assert _rounds_released(rule, [[0]] * 9, 1) < 9


def _sampled_plan(num_rounds: int) -> Guarantee:
    factorization = banded(mfa.workloads.prefix_sum(num_rounds), 2)
    scheme = sampling_scheme(
        "poisson", num_rounds=num_rounds, num_bands=2, population=400, clients_per_round=20
    )
    return small_mechanisms.sampled(factorization, scheme, 1.0, 1e-4)


@pytest.mark.long
def test_a_sampled_run_ends_after_the_most_rounds_that_are_within_the_limit() -> None:
    plan = _sampled_plan(12)
    # Columns have a norm of one from the second round on, and so have all their leading parts.
    epsilons = [
        sampling_scheme(
            "poisson", num_rounds=rounds, num_bands=2, population=400, clients_per_round=20
        ).epsilon(1.0, 1e-4)
        for rounds in range(2, 13)
    ]
    limit = 0.5 * (epsilons[4] + epsilons[6])
    most = max(rounds for rounds, each in enumerate(epsilons, start=2) if each <= limit)
    assert 2 < most < 12
    rule = StoppingRule(plan, limit)
    drawn = [ObservedParticipation(rounds, 0, None, 0, True) for rounds in range(1, 13)]
    assert [rule.allows(each) for each in drawn] == [True] * most + [False] * (12 - most)
    assert rule.guarantee.epsilon == pytest.approx(epsilons[most - 2], rel=1e-9)
    # Batches that were drawn in another way are not what the limit was found for.
    assert not rule.allows(ObservedParticipation(1, 1, None, 1, False))


def test_limits_that_allow_no_round_are_refused() -> None:
    factorization = identity(4)
    plan = plan_of(factorization, MinSeparation(2), 1.0, _DELTA)
    with refuses("limit", "0.1"):
        StoppingRule(plan, 0.1)
    with refuses("epsilon"):
        StoppingRule(plan, 0.0)
    silent = plan_of(factorization, MinSeparation(2), 0.0, _DELTA)
    with refuses("noise"):
        StoppingRule(silent, 1.0)
    sampled = _sampled_plan(12)
    with refuses("limit", "0.001"):
        StoppingRule(sampled, 1e-3)


@pytest.mark.parametrize("sampling", ["min_separation", "balls_in_bins"])
def test_where_clients_draw_for_themselves_a_limit_is_for_all_rounds(sampling: str) -> None:
    factorization = identity(6)
    scheme = sampling_scheme(
        sampling, num_rounds=6, num_bands=1, population=60, clients_per_round=15, separation=4
    )
    plan = small_mechanisms.sampled(factorization, scheme, 1.0, 1e-3)
    with refuses("limit", "no round"):
        StoppingRule(plan, 0.99 * plan.epsilon)
    rule = StoppingRule(plan, 1.01 * plan.epsilon)
    drawn = [ObservedParticipation(rounds, 0, None, 0, True) for rounds in range(1, 7)]
    assert all(rule.allows(each) for each in drawn)
    assert rule.guarantee.epsilon == plan.epsilon


_ROUNDS_OF_LEDGER = 9
_patterns = st.lists(
    st.lists(st.integers(0, _ROUNDS_OF_LEDGER - 1), unique=True).map(sorted), min_size=1, max_size=8
)


def _ledger(rounds_of_clients: Sequence[Sequence[int] | np.ndarray], num_rounds: int) -> Ledger:
    """A ledger of clients that are named by their index."""
    arrays = tuple(np.array(each, np.int64) for each in rounds_of_clients)
    return Ledger(tuple(map(str, range(len(arrays)))), arrays, num_rounds)


def _worst(
    factorization: Factorization,
    rounds_of_clients: Sequence[Sequence[int] | np.ndarray],
    num_rounds: int,
) -> LeastProtected | None:
    plan = plan_of(factorization, SingleParticipation(), 1.0, 1e-5)
    return LeastProtected.of(plan, _ledger(rounds_of_clients, num_rounds))


@pytest.fixture(scope="module")
def mechanisms() -> tuple[Factorization, ...]:
    return small_mechanisms.factorizations(_ROUNDS_OF_LEDGER)


@given(rounds_of_clients=_patterns, index=st.integers(0, 16), extra=st.integers(0, 3))
@settings(max_examples=examples(150), deadline=None)
def test_the_worst_client_has_the_largest_sum_over_its_rounds(
    mechanisms: list[Factorization], rounds_of_clients: list[list[int]], index: int, extra: int
) -> None:
    factorization = mechanisms[index]
    last = max((client[-1] for client in rounds_of_clients if client), default=-1)
    num_rounds = min(_ROUNDS_OF_LEDGER, last + 1 + extra)
    worst = _worst(factorization, rounds_of_clients, num_rounds)
    if last < 0:
        assert worst is None
        return
    strategy = factorization.strategy_matrix()
    square = strategy.shape[0] == strategy.shape[1]
    strategy = strategy[:num_rounds] if square else strategy
    gram: np.ndarray = np.abs(strategy.T @ strategy)
    values = [math.sqrt(gram[np.ix_(client, client)].sum()) for client in rounds_of_clients]
    assert worst is not None
    assert worst.guarantee.sensitivity.value == pytest.approx(max(values))
    assert values[int(worst.name)] == pytest.approx(max(values))
    assert list(worst.rounds) == rounds_of_clients[int(worst.name)]


@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_negative_correlations_count_as_much(scale: float) -> None:
    """Against all signs: bands 1, -0.5 make every other entry of C^T C negative."""
    strategy = scale * (np.eye(5) - 0.5 * np.eye(5, k=-1))
    factorization = DenseFactorization(strategy)
    assert np.any(strategy.T @ strategy < 0.0)
    patterns = [[0, 1], [0, 2, 3], [1, 2], [0, 1, 2, 3, 4], [4]]
    for pattern in patterns:
        worst = _worst(factorization, [pattern], 5)
        by_signs = max(
            np.linalg.norm(strategy[:, pattern] @ np.array(signs))
            for signs in itertools.product([1.0, -1.0], repeat=len(pattern))
        )
        assert worst is not None
        assert worst.guarantee.sensitivity.value == pytest.approx(by_signs)


@given(rounds_of_clients=_patterns, index=st.integers(0, 16))
@settings(max_examples=examples(100), deadline=None)
def test_no_client_is_worse_off_than_the_observed_guarantee_says(
    mechanisms: list[Factorization], rounds_of_clients: list[list[int]], index: int
) -> None:
    factorization = mechanisms[index]
    plan = plan_of(factorization, MinSeparation(3), 1.0, 1e-5)
    observed = ObservedParticipation.of(rounds_of_clients, _ROUNDS_OF_LEDGER)
    guarantee = observed.guarantee(plan)
    record = _ledger(rounds_of_clients, _ROUNDS_OF_LEDGER)
    worst = LeastProtected.of(plan, record)
    if worst is None:
        assert observed.max_participations == 0
    else:
        assert worst.guarantee.epsilon <= guarantee.epsilon * (1 + 1e-9) + 1e-9
        assert worst.name in record.client_ids


def test_many_clients_are_looked_up_in_parts() -> None:
    generator = np.random.default_rng(3)
    patterns = [np.sort(generator.choice(300, 60, replace=False)) for _ in range(9_000)]
    worst = _worst(identity(300), patterns, 300)
    assert worst is not None
    assert worst.name == "0"
    assert worst.guarantee.sensitivity.value == pytest.approx(np.sqrt(60))


@pytest.mark.parametrize("name", ["banded", "toeplitz", "tree", "identity"])
def test_few_rounds_of_many_planned_take_little_memory(name: str) -> None:
    """A run that ends early: all of C would have 80 GB and more."""
    planned = 100_000
    bands = np.column_stack([np.ones(planned), np.full(planned, -0.4)])
    bands[0, 1] = 0.0
    factorization = {
        "banded": lambda: BandedFactorization(bands),
        "toeplitz": lambda: ToeplitzFactorization(
            planned, np.array([1.0, 0.5]), equal_column_norms=True
        ),
        "tree": lambda: tree_aggregation(planned),
        "identity": lambda: identity(planned),
    }[name]()
    clients = [[0, 5], [1, 2, 6]]
    found = _worst(factorization, clients, 7)
    assert found is not None
    assert found.name == "1"
    observed = ObservedParticipation.of(clients, 7)
    plan = plan_of(factorization, MinSeparation(2), 1.0, 1e-5)
    guarantee = observed.guarantee(plan)
    assert found.guarantee.sensitivity.value <= guarantee.sensitivity * (1.0 + 1e-9)


_PERSON_ROUNDS = 5


def _mechanism_of_people(noise_multiplier: float = 9.0) -> mfa.Mechanism:
    matrix = mfa.factorizations.banded(_PERSON_ROUNDS, num_bands=3)
    timers = mfa.participation.MinSeparation(separation=2, max_participations=2)
    return mfa.Mechanism(matrix, timers, noise_multiplier)


def _record(rounds: Mapping[str, Sequence[int]]) -> Ledger:
    arrays = tuple(np.array(each, np.int64) for each in rounds.values())
    return Ledger(tuple(rounds), arrays, _PERSON_ROUNDS)


def _counts(ledger: Ledger) -> list[int]:
    return np.bincount(np.concatenate(ledger.rounds_of_clients), minlength=_PERSON_ROUNDS).tolist()


_OWNERS = st.lists(st.sampled_from("ABC"), min_size=4, max_size=4)
_PATTERNS = st.lists(
    st.lists(st.integers(0, _PERSON_ROUNDS - 1), unique=True, min_size=1).map(sorted),
    min_size=4,
    max_size=4,
)


@settings(max_examples=examples(120), deadline=None)
@given(owners=_OWNERS, patterns=_PATTERNS, shares=st.booleans())
def test_the_least_protected_person_moves_most(
    owners: list[str], patterns: list[list[int]], shares: bool
) -> None:
    """Every sign of every participation of each client; C has no entry below zero."""
    rounds = {str(i): each for i, each in enumerate(patterns)}
    clients: dict[str, tuple[str, ...]] = {}
    for client, owner in zip(rounds, owners, strict=True):
        clients[owner] = (*clients.get(owner, ()), client)
    if shares:
        clients["D"] = ("0",)
    mechanism, ledger = _mechanism_of_people(), _record(rounds)
    matrix = mechanism.factorization.strategy_matrix()
    assert np.all(matrix >= 0.0)
    moved = {}
    for person, own in clients.items():
        # With and without a person's part, the update of a client that others share may turn round.
        sizes = [
            np.bincount(rounds[each], minlength=_PERSON_ROUNDS) * (1 + (shares and each == "0"))
            for each in own
        ]
        most = np.sum(sizes, axis=0)
        moved[person] = max(
            float(np.linalg.norm(matrix @ (most * signs)))
            for signs in itertools.product((-1.0, 1.0), repeat=_PERSON_ROUNDS)
        )
    observed = mechanism.observed(ledger, round_counts=_counts(ledger))
    found = observed.least_protected_person(clients, _DELTA)
    assert found is not None
    assert found.guarantee.sensitivity.value == pytest.approx(max(moved.values()))
    assert moved[found.name] == pytest.approx(max(moved.values()))
    assert Assumption.PEOPLE in found.guarantee.assumptions
    if observed.keeps_participation:
        planned = mechanism.unit_guarantee(_DELTA, num_clients=guarantees.most_clients(clients))
        assert planned.sensitivity.value >= found.guarantee.sensitivity.value * (1.0 - 1e-12)


def test_an_incomplete_ledger_shows_nothing_of_people() -> None:
    observed = _mechanism_of_people().observed(_record({"a": [0, 2]}))
    assert observed.least_protected_person({"A": ("a",)}, _DELTA) is None


def test_clients_that_are_nobodys_are_refused() -> None:
    ledger = _record({"a": [0], "b": [1], "never asked": []})
    observed = _mechanism_of_people().observed(ledger, round_counts=_counts(ledger))
    with pytest.raises(LedgerError, match="1 of 2 clients that took part have no person"):
        observed.least_protected_person({"A": ("a",)}, _DELTA)
