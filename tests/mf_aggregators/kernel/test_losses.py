"""Losses on grids have no delta and no epsilon that is below the exact one."""

import math
from typing import Any

import mpmath
import numpy as np
import pytest
from dp_accounting import dp_event
from hypothesis import given, settings
from hypothesis import strategies as st

from mf_aggregators import accounting
from mf_aggregators.kernel import batches, groups
from mf_aggregators.kernel.losses import DenseLosses, epsilon_of, gaussian_losses
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
@settings(max_examples=examples(24), deadline=None)
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
        (2.641750944334138, 100, 1, 0.11022616233109589),
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
@settings(max_examples=examples(12), deadline=None)
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
    losses = gaussian_losses(sigma, interval)._pmf_remove
    with mpmath.workdps(_DIGITS):
        masses = [mpmath.mpf(float(each)) for each in losses._probs]
        ratios = [
            mpmath.exp(-mpmath.mpf(interval) * (losses._lower_loss + j)) for j in range(len(masses))
        ]
        above, weighted = mpmath.mpf(float(losses._infinity_mass)), mpmath.mpf(0)
        for at in range(len(masses) - 1, -1, -1):
            above, weighted = above + masses[at], weighted + masses[at] * ratios[at]
            if at % 997 == 0:
                exact = _gaussian(mpmath.mpf(sigma), -mpmath.log(ratios[at]))
                assert above - weighted / ratios[at] >= exact * (1 - mpmath.mpf("1e-14"))


def test_raised_masses_are_hardly_more() -> None:
    losses = batches.fixed_size_losses(1.0, 0.3, 1e-4)
    for each in (losses._pmf_remove, losses._pmf_add):
        total = math.fsum(each._probs) + each._infinity_mass
        assert total == pytest.approx(1.0, abs=1e-7)


def test_an_epsilon_is_rounded_up_and_no_further() -> None:
    """A loss of 1 with probability p: delta p (1 - exp(e - 1)), by hand."""
    losses = DenseLosses(0.25, 0, np.array([0.5, 0.0, 0.0, 0.0, 0.5]), 0.0, True)
    for delta in (0.1, 0.2, 0.3):
        exact = 1.0 + math.log1p(-2.0 * delta)
        assert exact <= losses.get_epsilon_for_delta(delta) <= exact + 1e-13
    assert losses.get_epsilon_for_delta(0.4) == 0.0
    with_infinity = DenseLosses(0.25, -2, np.array([0.5, 0.3]), 0.2, True)
    assert with_infinity.get_epsilon_for_delta(0.1) == math.inf
    assert with_infinity.get_epsilon_for_delta(0.2) == 0.0


def test_the_larger_direction_counts() -> None:
    losses = batches.poisson_losses(0.5, 0.2, 1e-3)
    each = [
        DenseLosses.of(pmf).get_epsilon_for_delta(1e-3)
        for pmf in (losses._pmf_remove, losses._pmf_add)
    ]
    assert each[0] != each[1]
    assert epsilon_of(losses, 1e-3) == max(each)
