"""What the end of the noise's tail adds to delta, against integrals and simulated tails."""

import math

import numpy as np
import pytest
import scipy.integrate
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from mf_aggregators.accounting import noise_tail
from mf_aggregators.noise import rows_of_z

_T = rows_of_z.LARGEST_NORMAL


def _of_one_pair(shift: float, epsilon: float) -> float:
    """By polar integration: min(p, e^eps q) over what of the shifted disc is beyond the disc at 0.

    For p the normal density around the shift and q that around 0, both discs of radius T.
    """

    def density(radius: float, angle: float) -> float:
        away = radius**2 - 2.0 * radius * shift * math.cos(angle) + shift**2
        if away > _T**2:
            return 0.0
        exponent = min(-away / 2.0, epsilon - radius**2 / 2.0)
        return radius * math.exp(exponent) / (2.0 * math.pi)

    angles, weights = np.polynomial.legendre.leggauss(60)
    total = 0.0
    for angle, weight in zip(angles * math.pi / 2.0, weights * math.pi / 2.0, strict=True):
        # Where the shifted disc ends in this direction.
        end = shift * math.cos(angle) + math.sqrt(_T**2 - (shift * math.sin(angle)) ** 2)
        grid = np.linspace(_T, max(_T, end), 2001)
        values = [density(radius, angle) for radius in grid]
        total += weight * float(scipy.integrate.trapezoid(values, grid))
    return total


@pytest.mark.parametrize("shift", [1e-3, 0.1, 0.5, 1.0, 2.0, 3.0, 4.0])
@pytest.mark.parametrize("epsilon", [0.0, 8.0, 18.0, math.inf])
def test_one_pair_costs_no_more_than_the_bound(shift: float, epsilon: float) -> None:
    exact = _of_one_pair(shift, epsilon)
    bound = noise_tail.probability(1.0 / shift, epsilon, num_coordinates=2)
    assert exact <= bound * (1 + 1e-6)
    # It is a bound, and no wild one: small epsilons charge for several pairs.
    if epsilon > 1.0:
        assert bound <= 8.0 * max(1.0, shift**2) * exact


def test_a_single_number_is_covered_as_well() -> None:
    """One number of a pair: what leaves [-T, T], as if nothing else were known of the pair."""
    for multiplier in (0.2, 0.3, 0.5, 1.0, 3.0):
        shift = 1.0 / multiplier
        alone = scipy.stats.norm.sf(_T - shift) - scipy.stats.norm.sf(_T)
        assert alone <= noise_tail.probability(multiplier, num_coordinates=1)


@given(
    st.floats(0.25, 10.0),
    st.floats(0.0, 30.0),
    st.lists(st.floats(0.0, 1.0), min_size=1, max_size=8),
    st.sampled_from([1.0, 30.0]),
)
@settings(max_examples=60, deadline=None)
def test_no_way_to_spread_a_contribution_costs_more(
    multiplier: float, epsilon: float, weights: list[float], power: float
) -> None:
    """Contributions of one norm over a few pairs, some large, some small."""
    shares = np.array(weights) ** power
    if not np.sum(shares):
        return
    shifts = np.sqrt(shares / np.sum(shares)) / multiplier
    cap = math.exp(epsilon) * rows_of_z.UNIFORM_UNIT / 2.0
    phi = scipy.stats.norm.cdf
    leaves = _T * math.sqrt(2.0 / math.pi) * (phi(shifts - _T) - phi(-_T))
    together = float(np.sum(np.minimum(leaves, cap)))
    bound = noise_tail.probability(multiplier, epsilon, num_coordinates=2 * len(weights))
    assert together <= bound * (1 + 1e-9)


@pytest.mark.parametrize("num_coordinates", [2**20, 2**34, 2**50])
def test_contributions_spread_thin_cost_as_the_root_of_their_number(num_coordinates: int) -> None:
    """At epsilon 3 hardly anything else costs: K T 2^-53 / pi times 1 / (sigma sqrt(K))."""
    pairs = num_coordinates / 2
    expected = math.sqrt(pairs) * _T * 2.0**-53 / math.pi / 2.0
    found = noise_tail.probability(2.0, 3.0, num_coordinates=num_coordinates)
    assert found == pytest.approx(expected, rel=0.05)


def test_participations_of_little_chance_cost_little() -> None:
    """2,052 rounds at 1,000 of 342,000 clients: the tail is that of six participations."""
    chance = 1000 / 342_000
    found = noise_tail.probability(0.42, 16.0, participations=2052, chance=chance)
    six = noise_tail.probability(0.42, participations=6)
    assert 0.5 * six < found < 1.5 * six
    assert found < noise_tail.probability(0.42, participations=2052) / 100


def test_the_end_of_the_tail_is_that_of_a_smaller_generator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With uniforms of 12 bits the failure is frequent enough to be counted.

    All tails of 500,000 pairs that moved by 1 / sigma; false alarm once in a billion runs.
    """
    unit = 2.0**-12
    end = math.sqrt(-2.0 * math.log(unit))
    root = math.sqrt(end**2 - 4.0)
    monkeypatch.setattr(rows_of_z, "UNIFORM_UNIT", unit)
    for name, value in (
        ("_T", end),
        ("_SMALL", (end - root) / 2.0),
        ("_LARGE", (end + root) / 2.0),
        ("_FACTOR", end * math.sqrt(2.0 / math.pi)),
    ):
        monkeypatch.setattr(noise_tail, name, value)
    generator = np.random.default_rng(11)
    trials = 500_000
    # Uniform in the cells of the generator: the law that the bound is for.
    radii = np.sqrt(-2.0 * np.log(generator.uniform(unit, 1.0, trials)))
    angles = generator.uniform(0.0, 2.0 * np.pi, trials)
    for multiplier in (0.5, 1.0, 2.0):
        moved = np.hypot(radii * np.cos(angles) + 1.0 / multiplier, radii * np.sin(angles))
        failures = int(np.sum(moved > end))
        bound = noise_tail.probability(multiplier, num_coordinates=2) / (1.0 - unit)
        assert failures > 100
        assert scipy.stats.binom.sf(failures - 1, trials, bound) > 1e-9


def test_the_numbers_of_the_module_are_those_of_the_generator() -> None:
    assert pytest.approx(8.5717, abs=1e-4) == _T
    assert math.exp(-(_T**2) / 2.0) == pytest.approx(rows_of_z.UNIFORM_UNIT, rel=1e-12)


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="noise_multiplier"):
        noise_tail.probability(0.0)
    with pytest.raises(ValueError, match="num_coordinates"):
        noise_tail.probability(1.0, num_coordinates=0)
