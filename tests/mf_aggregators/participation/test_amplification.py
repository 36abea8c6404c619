"""Amplified accounting against printed values, closed forms and direct integration."""

import dataclasses
import itertools
import math
from typing import Any

import dp_accounting
import numpy as np
import pytest
import scipy.integrate
import scipy.stats
from dp_accounting.pld import pld_privacy_accountant
from dp_accounting.rdp import rdp_privacy_accountant
from hypothesis import given, settings
from hypothesis import strategies as st

from mf_aggregators import accounting
from mf_aggregators.kernel import losses
from mf_aggregators.kernel.losses import Poisson, SampledRun
from mf_aggregators.participation import (
    FixedSizeSampling,
    PoissonSampling,
    Shuffling,
    sampling_scheme,
)
from tests.examples import examples
from tests.refusals import refuses

_DELTA = 1e-6


@pytest.mark.short_cases(3)
@pytest.mark.parametrize(
    ("epsilon", "num_bands", "printed"),
    [
        (1.0, 1, 0.37313),
        (1.0, 9, 0.79118),
        (2.0, 1, 0.30481),
        (2.0, 18, 0.64708),
        (4.0, 1, 0.25136),
        (4.0, 32, 0.52224),
        (8.0, 1, 0.20567),
        (8.0, 64, 0.43490),
        (16.0, 1, 0.16876),
    ],
)
def test_amplified_noise_multipliers_of_the_papers(
    epsilon: float, num_bands: int, printed: float
) -> None:
    """BandMF Table 5: 2052 rounds of 1,000 of 342,000 users.

    Printed noise multipliers are for matrices of sensitivity 1 under six participations of
    equal column norms, which is sqrt(6) times the norm of one. A little less noise is too little
    for the target, a little more is enough.
    """
    for factor, is_enough in ((1.0 - 2e-3, False), (1.0 + 2e-3, True)):
        found = sampling_scheme(
            "poisson",
            num_rounds=2052,
            num_bands=num_bands,
            population=342_000,
            clients_per_round=1000,
        ).epsilon(factor * math.sqrt(6.0) * printed, _DELTA)
        assert (found <= epsilon) == is_enough


def test_one_sampled_query_is_the_mixture_of_two_gaussians() -> None:
    """The privacy loss of one query by numerical integration of max(0, p - e^eps q)."""
    sigma, probability, epsilon = 0.8, 0.25, 0.7
    grid = np.linspace(-12.0, 14.0, 400_001)
    without = scipy.stats.norm.pdf(grid, 0.0, sigma)
    mixed = (1 - probability) * without + probability * scipy.stats.norm.pdf(grid, 1.0, sigma)
    delta = max(
        float(scipy.integrate.trapezoid(np.maximum(0.0, upper - math.exp(epsilon) * lower), grid))
        for upper, lower in itertools.permutations([mixed, without])
    )
    found = PoissonSampling(4, 4, 400, 25).epsilon(sigma, delta)
    assert found == pytest.approx(epsilon, rel=1e-3)


@pytest.mark.long
@pytest.mark.short_cases(1)
@pytest.mark.parametrize(
    ("num_rounds", "num_bands"),
    [(8, 1), (10, 3), *(pytest.param(*each, marks=pytest.mark.long) for each in ((9, 4), (7, 7)))],
)
def test_the_sampled_gaussians_of_the_papers_code(num_rounds: int, num_bands: int) -> None:
    """BandMF App. F.3's event by dp-accounting, with q = B b / m and ceil(n / b) compositions."""
    population, batch = 700, 10
    gaussian = dp_accounting.GaussianDpEvent(1.3)
    sampled = dp_accounting.PoissonSampledDpEvent(batch * num_bands / population, gaussian)
    event = dp_accounting.SelfComposedDpEvent(sampled, math.ceil(num_rounds / num_bands))
    accountant = pld_privacy_accountant.PLDAccountant().compose(event)
    sizes: dict[str, Any] = {
        "num_rounds": num_rounds,
        "num_bands": num_bands,
        "population": population,
        "clients_per_round": batch,
    }
    assert sampling_scheme("poisson", **sizes).event(1.3) == event
    assert sampling_scheme("poisson", **sizes).epsilon(1.3, 1e-5) == pytest.approx(
        accountant.get_epsilon(1e-5), rel=1e-3
    )
    # Renyi accounting is another way to a bound, never a tighter one.
    renyi = rdp_privacy_accountant.RdpAccountant().compose(event)
    assert sampling_scheme("poisson", **sizes).epsilon(1.3, 1e-5) <= renyi.get_epsilon(1e-5)


def test_no_sampling_is_no_amplification() -> None:
    """With as many parts as batches everybody of a part takes part: sigma / sqrt(k)."""
    for name in ["poisson", "fixed_size", "shuffling"]:
        scheme = sampling_scheme(
            name, num_rounds=12, num_bands=4, population=40, clients_per_round=10
        )
        assert scheme.epsilon(2.0, 1e-5) == pytest.approx(
            accounting.epsilon(2.0 / math.sqrt(3), 1e-5), rel=1e-5
        )
        assert scheme.noise_multiplier(1.0, 1e-5) == pytest.approx(
            accounting.noise_multiplier(1.0, 1e-5) * math.sqrt(3), rel=1e-6
        )


_sizes = st.tuples(
    st.integers(1, 40), st.integers(1, 40), st.integers(1, 20), st.integers(1, 30)
).map(
    lambda drawn: {
        "num_rounds": max(drawn[0], drawn[1]),
        "num_bands": drawn[1],
        "clients_per_round": drawn[2],
        "population": drawn[1] * drawn[2] * drawn[3],
    }
)


@pytest.mark.long
@given(_sizes, st.floats(0.2, 10.0), st.sampled_from(["poisson", "fixed_size"]))
@settings(max_examples=examples(10), deadline=None)
def test_calibration_meets_its_target(sizes: dict[str, int], target: float, name: str) -> None:
    scheme = sampling_scheme(name, **sizes)
    sigma = scheme.noise_multiplier(target, 1e-5)
    found = scheme.epsilon(sigma, 1e-5)
    assert found <= target * (1 + 1e-3)
    assert scheme.epsilon(0.97 * sigma, 1e-5) > target * (1 - 1e-3)


def test_fixed_size_subsets_cost_what_their_worst_case_does() -> None:
    """One query on a subset of one of two clients, whose worst case can be integrated.

    The client sends 1, its counterpart nothing, and the other client -1: the sum is a
    mixture of two Gaussians in both worlds.
    """
    sigma, delta = 1.5, 1e-3
    grid = np.linspace(-25.0, 25.0, 500_001)

    def density(mean: float) -> np.ndarray:
        return np.asarray(scipy.stats.norm.pdf(grid, mean, sigma))

    ours = 0.5 * density(-1.0) + 0.5 * density(1.0)
    zeroed = 0.5 * density(-1.0) + 0.5 * density(0.0)
    found = FixedSizeSampling(1, 1, 2, 1).epsilon(sigma, delta)
    deltas = []
    for upper, lower in itertools.permutations([ours, zeroed]):
        excess = np.maximum(0.0, upper - math.exp(found) * lower)
        assert float(scipy.integrate.trapezoid(excess, grid)) <= delta * (1 + 1e-6)
        less = np.maximum(0.0, upper - math.exp(0.998 * found) * lower)
        deltas.append(float(scipy.integrate.trapezoid(less, grid)))
    assert max(deltas) > delta


def test_shuffling_amplifies_many_small_batches() -> None:
    """Feldman, McMillan and Talwar Thm 3.8 by hand for one choice of the local delta."""
    scheme = Shuffling(10**6, 1, 10**6, 1)
    sigma = 4.0
    local_delta = 2e-14
    # Gaussian noise against replacing one client, whose vectors differ by 2 at most.
    local = accounting.exact_epsilon(sigma / 2.0, local_delta)
    grown = math.exp(local)
    amplified = math.log(
        1
        + (grown - 1)
        / (grown + 1)
        * (8 * math.sqrt(grown * math.log(4 / 5e-7) / 1e6) + 8 * grown / 1e6)
    )
    failure = 5e-7 + (math.exp(amplified) + 1) * (1 + 0.5 / grown) * 1e6 * local_delta
    assert failure < _DELTA
    found = scheme.epsilon(sigma, _DELTA)
    assert found <= amplified
    assert found == pytest.approx(amplified, rel=0.2)
    assert found < 0.3 * accounting.epsilon(sigma, _DELTA)
    # Three passes cost more than one and less than three.
    three = dataclasses.replace(scheme, num_rounds=3 * 10**6).epsilon(sigma, _DELTA)
    assert found < three < 3.5 * found


def test_the_failure_of_shuffling_is_within_delta() -> None:
    """The least bound over shares of delta for the theorem, with those left out that exceed it.

    Without this condition larger local deltas, which fail more often, give smaller epsilons.
    """
    scheme, sigma = Shuffling(10**6, 1, 10**6, 1), 4.0
    bounds: list[float] = []
    failing: list[float] = []
    # What drawing the noise and composing cost is less than a millionth of delta.
    for share in np.geomspace(1e-6, 0.25, 24):
        local_delta = share * _DELTA / 1e6
        local = accounting.exact_epsilon(sigma / 2.0, local_delta)
        grown = math.exp(local)
        assert local <= math.log(1e6 / (16 * math.log(2 / (0.5 * _DELTA))))
        amplified = math.log1p(
            (grown - 1)
            / (grown + 1)
            * (8 * math.sqrt(grown * math.log(4 / (0.5 * _DELTA)) / 1e6) + 8 * grown / 1e6)
        )
        failure = 0.5 * _DELTA + (math.exp(amplified) + 1) * (1 + 0.5 / grown) * 1e6 * local_delta
        (bounds if failure <= _DELTA else failing).append(amplified)
    assert min(failing) < min(bounds) * (1 - 1e-3)
    assert scheme.epsilon(sigma, _DELTA) == pytest.approx(min(bounds), rel=1e-7)


@pytest.mark.parametrize("sigma", [0.3, 0.25])
def test_little_noise_is_little_privacy(sigma: float) -> None:
    """A client that is drawn shows itself: one query has a delta of about q, whatever epsilon."""
    scheme = PoissonSampling(16, 2, 1280, 10)
    found = scheme.epsilon(sigma, 1e-3)
    without = accounting.epsilon(sigma / math.sqrt(8), 1e-3, disjoint_participations=8)
    assert 0.5 / sigma**2 < found <= without


@pytest.mark.parametrize("name", ["poisson", "fixed_size", "shuffling"])
@pytest.mark.parametrize("sigma", [0.19, 0.15, 0.1, 0.0617, 0.01])
def test_noise_that_a_client_could_leave_is_refused(sigma: float, name: str) -> None:
    scheme = sampling_scheme(name, num_rounds=16, num_bands=2, population=160, clients_per_round=10)
    with refuses("deviations"):
        scheme.epsilon(sigma, 1e-6)


@pytest.mark.parametrize("compositions", [1, 100, 10_000, 100_000])
@pytest.mark.parametrize("total", [0.3, 1.0, 5.0])
def test_many_compositions_lose_nothing_to_rounding(compositions: int, total: float) -> None:
    """Nobody is sampled out, so that the truth is one Gaussian; at the smallest delta allowed."""
    delta = max(1e-12, 4.001e-15 * compositions)
    run = SampledRun(Poisson(compositions, 1, 10, 10), total * math.sqrt(compositions))
    found = run.amplified_epsilon(delta - 2e-15 * compositions)
    assert found >= accounting.exact_epsilon(total, delta) * (1 - 1e-9)


@pytest.mark.parametrize("name", ["poisson", "fixed_size", "shuffling"])
def test_no_delta_loses_its_amplification_without_a_word(name: str) -> None:
    """Down to the least delta, epsilon grows steadily, or it is refused with the reason."""
    scheme = sampling_scheme(
        name, num_rounds=50, num_bands=1, population=10_000, clients_per_round=10
    )
    # Shuffling amplifies where noise is large beside the logarithm of delta.
    sigma = 30.0 if name == "shuffling" else 2.0
    found = [
        scheme.epsilon(sigma, delta) for delta in (1.2e-12, 1.1e-12, 1.09e-12, 1.04e-12, 1e-12)
    ]
    assert all(before <= after <= 1.05 * before for before, after in itertools.pairwise(found)), (
        found
    )
    for function in (scheme.epsilon, scheme.noise_multiplier):
        with refuses("1e-12"):
            function(sigma, 0.99e-12)


def test_deltas_that_rounding_may_hide_are_refused() -> None:
    with refuses("4e-11", "10000"):
        PoissonSampling(10_000, 1, 100_000, 300).epsilon(0.75, 1e-12)
    event = dp_accounting.SelfComposedDpEvent(accounting.event(100.0), 20_000)
    with refuses("20001"):
        accounting.composed_epsilon([event, accounting.event(3.0)], 1e-11)


def test_transforms_may_lose_what_is_taken_off_for_their_rounding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With exact deltas that are too small by all of it: no epsilon is below the true one."""
    compositions, total, delta = 100_000, 0.3, 1e-9
    lost = 2e-15 * compositions

    def lossy(unused: object, asked: float) -> float:
        return accounting.exact_epsilon(total, asked + lost)

    monkeypatch.setattr(losses, "_losses_of_rounds", lambda *unused: None)
    monkeypatch.setattr(losses, "epsilon_of", lossy)
    found = PoissonSampling(compositions, 1, 10, 10).epsilon(total * math.sqrt(compositions), delta)
    exact = accounting.exact_epsilon(total, delta)
    # What drawing the noise costs is a millionth of delta.
    assert exact <= found <= exact * (1.0 + 1e-5)


@pytest.mark.parametrize("compositions", [1, 1000, 100_000])
def test_transforms_lose_no_more_than_is_taken_off(compositions: int) -> None:
    """Where deltas are smaller than the rounding of transforms, on any processor."""
    total = 0.3
    run = SampledRun(Poisson(compositions, 1, 10, 10), total * math.sqrt(compositions))
    loss, allowed = run.losses_near(math.inf), 2e-15 * compositions
    for exact in (1e-6, 1e-9, 1e-11, 1e-13):
        found = float(loss.get_delta_for_epsilon(accounting.exact_epsilon(total, exact)))
        # Exact epsilons are rounded up by 1e-11.
        assert found >= exact * (1.0 - 1e-9) - allowed


def test_runs_are_composed() -> None:
    """Two unamplified runs are one of both squared sensitivities; sampled runs add to them."""
    together = accounting.composed_epsilon([accounting.event(3.0), accounting.event(4.0)], 1e-5)
    assert together == pytest.approx(
        accounting.epsilon(1.0 / math.sqrt(1 / 9 + 1 / 16), 1e-5), abs=1e-3
    )
    sizes: dict[str, Any] = {
        "num_rounds": 20,
        "num_bands": 2,
        "population": 1000,
        "clients_per_round": 10,
    }
    sampled = sampling_scheme("poisson", **sizes).event(1.0)
    both = accounting.composed_epsilon([accounting.event(3.0), sampled], 1e-5)
    assert both > accounting.epsilon(3.0, 1e-5)
    assert both > sampling_scheme("poisson", **sizes).epsilon(1.0, 1e-5)
    assert accounting.composed_epsilon([accounting.event(0.0)], 1e-5) == math.inf
    # What is known of a replaced client alone does not compose with a zeroed one.
    ours = sampling_scheme("fixed_size", **sizes).event(1.0)
    replaced = dp_accounting.SelfComposedDpEvent(
        dp_accounting.SampledWithoutReplacementDpEvent(500, 10, dp_accounting.GaussianDpEvent(0.5)),
        10,
    )
    for events in ([replaced], [ours, dp_accounting.ComposedDpEvent([replaced])]):
        with refuses("added or removed", "zeroed", "Mechanism.event") as refused:
            accounting.composed_epsilon(events, 1e-5)
        # Another accountant would mix this relation with that of replaced clients.
        assert "Rdp" not in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_bands": 11}, "at most num_rounds"),
        ({"population": 39}, "population of 39 is too small"),
        ({"population": 0}, "population must be at least 1"),
        ({"num_rounds": 0}, "num_rounds must be at least 1"),
        ({"clients_per_round": 2.5}, "clients_per_round must be an integer"),
        ({"name": "cyclic"}, "not one of poisson, fixed_size, shuffling"),
        ({"delta": 1.0}, "delta must be above 0 and below 1"),
        ({"delta": 1e-13}, "at least 1e-12"),
        ({"noise_multiplier": -1.0}, "must not be negative"),
    ],
)
def test_bad_arguments_are_refused(changes: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {
        "name": "poisson",
        "num_rounds": 10,
        "num_bands": 4,
        "population": 100,
        "clients_per_round": 10,
    }
    numbers: dict[str, object] = {"noise_multiplier": 1.0, "delta": 1e-5}
    for values in (arguments, numbers):
        values.update({name: value for name, value in changes.items() if name in values})
    with pytest.raises(ValueError, match=message):
        sampling_scheme(**arguments).epsilon(**numbers)  # type: ignore[arg-type]
