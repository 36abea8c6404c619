"""Losses on grids have no delta and no epsilon that is below the exact one."""

import math
from typing import Any

import mpmath
import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.pld.pld_pmf import DensePLDPmf
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from hypothesis import given, settings
from hypothesis import strategies as st

from mf_aggregators import accounting
from mf_aggregators.kernel import groups, losses
from mf_aggregators.kernel.draws_of_clients import FixedSize, Poisson
from mf_aggregators.kernel.losses import delta_of, epsilon_of, gaussian_losses
from mf_aggregators.participation import (
    PoissonSampling,
    SamplingScheme,
    TruncatedPoissonSampling,
)
from tests.examples import examples

_DIGITS = 40


def _gaussian(sigma: mpmath.mpf, epsilon: mpmath.mpf) -> mpmath.mpf:
    half = 1 / (2 * sigma)
    return mpmath.ncdf(half - epsilon * sigma) - mpmath.exp(epsilon) * mpmath.ncdf(
        -half - epsilon * sigma
    )


def _poisson(sigma: mpmath.mpf, q: mpmath.mpf, epsilon: mpmath.mpf) -> mpmath.mpf:
    """The larger divergence of (1 - q) N(0, s^2) + q N(1, s^2) and N(0, s^2), closed forms."""
    factor = mpmath.exp(epsilon)
    cut = sigma**2 * mpmath.log((factor - 1 + q) / q) + mpmath.mpf(1) / 2
    removed = q * mpmath.ncdf((1 - cut) / sigma) + (1 - q - factor) * mpmath.ncdf(-cut / sigma)
    rest = 1 / factor - 1 + q
    if rest <= 0:
        return removed
    cut = sigma**2 * mpmath.log(rest / q) + mpmath.mpf(1) / 2
    added = (1 - factor * (1 - q)) * mpmath.ncdf(cut / sigma) - factor * q * mpmath.ncdf(
        (cut - 1) / sigma
    )
    return max(removed, added)


def _exact_delta(sigma: float, q: float, rounds: int, epsilon: float) -> mpmath.mpf:
    """Of one Poisson sample, or of several rounds of everybody."""
    s, e = mpmath.mpf(sigma), mpmath.mpf(epsilon)
    if q == 1.0:
        return _gaussian(s / mpmath.sqrt(rounds), e)
    assert rounds == 1
    return _poisson(s, mpmath.mpf(q), e)


def _scheme(kind: type[SamplingScheme], clients: int, rounds: int) -> SamplingScheme:
    return kind.of_sizes(rounds, 1, 100, clients)


_deltas = st.floats(math.log(1.1e-12), math.log(0.9)).map(math.exp) | st.floats(0.01, 0.9)
_cases = st.tuples(st.just(100), st.sampled_from([1, 2, 3, 10])) | st.tuples(
    st.integers(1, 99), st.just(1)
)


@given(
    st.sampled_from([PoissonSampling, TruncatedPoissonSampling]),
    _cases,
    st.floats(math.log(0.25), math.log(30.0)).map(math.exp),
    _deltas,
)
@settings(max_examples=examples(10), deadline=None)
def test_no_epsilon_is_below_the_exact_one(
    kind: type[SamplingScheme], case: tuple[int, int], sigma: float, delta: float
) -> None:
    """The exact delta at what is stated is at most delta, in forty digits."""
    clients, rounds = case
    scheme = _scheme(kind, clients, rounds)
    draws: Any = scheme.as_draws()
    with mpmath.workdps(_DIGITS):
        for found in (
            # What a run states, and what its losses have without the charge for drawn noise.
            scheme.epsilon(sigma, delta),
            groups.amplified_epsilon(draws, sigma, delta),
        ):
            assert _exact_delta(sigma, clients / 100, rounds, found) <= delta


# Stated below the exact epsilon by 1e-12 to 1e-10 where masses and losses were summed up as floats.
@pytest.mark.parametrize(
    ("sigma", "clients", "rounds", "delta"),
    [
        (0.3, 100, 1, 0.5),
        (0.42173460229650045, 88, 1, 0.5241422243408947),
        (1.387832601930993, 100, 2, 0.31849753265629516),
        (3.2985888308025357, 64, 1, 0.045794216605094626),
    ],
)
def test_known_cases_are_not_below(sigma: float, clients: int, rounds: int, delta: float) -> None:
    found = PoissonSampling(rounds, 1, 100, clients).epsilon(sigma, delta)
    with mpmath.workdps(_DIGITS):
        exact = _exact_delta(sigma, clients / 100, rounds, found)
        assert exact <= delta
        assert exact >= delta * (1.0 - 1e-6)


@given(st.floats(math.log(0.3), math.log(30.0)).map(math.exp), st.integers(1, 20), _deltas)
@settings(max_examples=examples(3), deadline=None)
def test_no_composed_epsilon_is_below_the_exact_one(sigma: float, count: int, delta: float) -> None:
    once = dp_event.GaussianDpEvent(sigma)
    sampled = dp_event.PoissonSampledDpEvent(1.0, once)
    for event in (once, sampled):
        composed = dp_event.SelfComposedDpEvent(event, count)
        found = accounting.composed_epsilon([composed], delta, num_coordinates=1000)
        with mpmath.workdps(_DIGITS):
            assert _exact_delta(sigma, 1.0, count, found) <= delta


@pytest.mark.parametrize("sigma", [0.4, 1.0, 20.0])
def test_losses_dominate_the_gaussian_mechanism(sigma: float) -> None:
    """In exact sums of their masses, at all losses of the grid between the far ones."""
    interval = 1e-3
    found = gaussian_losses(sigma, interval)._pmf_remove
    with mpmath.workdps(_DIGITS):
        masses = [mpmath.mpf(float(each)) for each in found._probs]
        ratios = [
            mpmath.exp(-mpmath.mpf(interval) * (found._lower_loss + j)) for j in range(len(masses))
        ]
        above, weighted = mpmath.mpf(float(found._infinity_mass)), mpmath.mpf(0)
        for at in range(len(masses) - 1, -1, -1):
            above, weighted = above + masses[at], weighted + masses[at] * ratios[at]
            if at % 997 == 0:
                exact = _gaussian(mpmath.mpf(sigma), -mpmath.log(ratios[at]))
                assert above - weighted / ratios[at] >= exact * (1 - mpmath.mpf("1e-14"))


def test_raised_masses_are_hardly_more() -> None:
    found = groups.losses_of_round(FixedSize(1, 1, 10, 3), 1.0, 1e-4)
    for each in (found._pmf_remove, found._pmf_add):
        total = math.fsum(each._probs) + each._infinity_mass
        assert total == pytest.approx(1.0, abs=1e-7)


def test_deltas_that_rounding_makes_larger_are_made_no_smaller() -> None:
    """A delta is at most an earlier one, and at least what was computed."""
    exact = np.array([0.4, 0.3, 0.2, 0.1, 0.05])
    rough = exact * np.array([1.0, 0.5, 1.0, 0.4, 1.0])
    found = losses.of_divergences(0.5, rough, exact)
    for step, least in enumerate((0.4, 0.2, 0.2, 0.05, 0.05)):
        assert found._pmf_remove.get_delta_for_epsilon(0.5 * step) >= least * (1.0 - 1e-15)


def _one_way(masses: list[float], first: int, infinite: float) -> PrivacyLossDistribution:
    return PrivacyLossDistribution(DensePLDPmf(0.25, first, np.array(masses), infinite, True))


def test_an_epsilon_is_rounded_up_and_no_further() -> None:
    """A loss of 1 with probability p: delta p (1 - exp(e - 1)), by hand."""
    found = _one_way([0.5, 0.0, 0.0, 0.0, 0.5], 0, 0.0)
    for delta in (0.1, 0.2, 0.3):
        exact = 1.0 + math.log1p(-2.0 * delta)
        assert exact <= epsilon_of(found, delta) <= exact + 1e-13
        assert delta_of(found, exact) == pytest.approx(delta, rel=1e-12)
        assert delta_of(found, exact) >= delta * (1.0 - 1e-15)
    assert epsilon_of(found, 0.4) == 0.0
    with_infinity = _one_way([0.5, 0.3], -2, 0.2)
    assert epsilon_of(with_infinity, 0.1) == math.inf
    assert epsilon_of(with_infinity, 0.2) == 0.0
    assert delta_of(with_infinity, 5.0) == 0.2


def test_the_larger_direction_counts() -> None:
    found = groups.losses_of_round(Poisson(1, 1, 10, 2), 0.5, 1e-3)
    each = [PrivacyLossDistribution(pmf) for pmf in (found._pmf_remove, found._pmf_add)]
    epsilons, deltas = zip(
        *((epsilon_of(one, 1e-3), delta_of(one, 0.5)) for one in each), strict=True
    )
    assert epsilons[0] != epsilons[1]
    assert epsilon_of(found, 1e-3) == max(epsilons)
    assert delta_of(found, 0.5) == max(deltas)
