"""Discrete Gaussian noise: tables and their sums in exact arithmetic, and what the bound says."""

import dataclasses
import decimal
import functools
import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import scipy.integrate
import scipy.special
import scipy.stats

from mf_aggregators.kernel import discrete_gaussian
from mf_aggregators.kernel.discrete_gaussian import AliasTable
from tests.mf_aggregators.forced_ties import words_that_tie
from tests.refusals import refuses

_END = 2**15
_STEP = 2**10
# A statistical test fails with at most this probability if the noise is what it should be; its
# seeds are fixed, so that it fails always or never.
_FALSE_ALARM = 1e-6
_SMALL = [
    (Fraction(1), 3, 1, 2),
    (Fraction(5, 2), 3, 5, 1),
    (Fraction(1, 3), 2, 3, 2),
    (Fraction(7, 3), 4, 2, 2),
    # Equal weights, as nearly as they can be: many columns are full.
    (Fraction(10**6), 3, 4, 1),
]


def _thresholds(table: AliasTable) -> list[int]:
    """All words of each threshold as one number."""
    word_bits = table.column_bits + table.fraction_bits
    thresholds = [int(entry) >> table.column_bits for entry in table.packed]
    for further in table.further.T:
        pairs = zip(thresholds, further.tolist(), strict=True)
        thresholds = [threshold << word_bits | word for threshold, word in pairs]
    return thresholds


def _distribution(table: AliasTable) -> list[int]:
    """What is drawn with which probability, in the table's units."""
    word_bits = table.column_bits + table.fraction_bits
    room = 2 ** (table.fraction_bits + word_bits * table.further.shape[1])
    aliases = (table.packed & np.uint32(2**table.column_bits - 1)).tolist()
    distribution = [0] * len(aliases)
    for column, (threshold, alias) in enumerate(zip(_thresholds(table), aliases, strict=True)):
        distribution[column] += threshold
        distribution[alias] += room - threshold
    return distribution


def _units(sigma: Fraction, column_bits: int, total_bits: int) -> list[Decimal]:
    """The numbers that weights should be within one of, each by an exponential of its own."""
    half = 2 ** (column_bits - 1)
    with decimal.localcontext() as context:
        context.prec = math.ceil(total_bits * math.log10(2.0)) + 15
        scale = -Decimal(sigma.denominator**2) / Decimal(2 * sigma.numerator**2)
        powers = [(k * k * scale).exp() for k in range(half + 1)]
        exact = powers[:0:-1] + powers[:half]
        factor = Decimal(2**total_bits) / sum(exact)
        return [factor * power for power in exact]


@functools.cache
def _real() -> tuple[AliasTable, list[int]]:
    """The table that is used, and its distribution."""
    table = discrete_gaussian.table()
    return table, _distribution(table)


def _check_within_one_unit(distribution: list[int], units: list[Decimal], total_bits: int) -> None:
    assert sum(distribution) == 2**total_bits
    with decimal.localcontext() as context:
        context.prec = 250
        assert (
            max(abs(found - exact) for found, exact in zip(distribution, units, strict=True)) <= 1
        )


@pytest.mark.parametrize(("sigma", "column_bits", "fraction_bits", "tie_words"), _SMALL)
def test_all_words_of_small_tables_draw_the_weights(
    sigma: Fraction, column_bits: int, fraction_bits: int, tie_words: int
) -> None:
    table = discrete_gaussian.alias_table(sigma, column_bits, fraction_bits, tie_words)
    word_bits = column_bits + fraction_bits
    total_bits = (1 + tie_words) * word_bits
    # All numbers of these many bits: a first word, and all words of a tie.
    numbers = np.arange(2**total_bits, dtype=np.uint64)
    words = np.stack(
        [numbers >> np.uint64(place * word_bits) for place in range(1 + tie_words)], axis=1
    )
    words = (words & np.uint64(2**word_bits - 1)).astype(np.uint32)
    # Of which first words something ties, by their thresholds.
    shift, mask = np.uint32(column_bits), np.uint32(2**column_bits - 1)
    tied = words[:, 0] >> shift == table.packed[words[:, 0] & mask] >> shift

    def further(ties: int) -> np.ndarray:
        assert ties == tied.sum()
        return words[tied, 1:]

    drawn = table.draw(words[:, 0], further)
    counts = np.bincount(drawn + 2 ** (column_bits - 1), minlength=2**column_bits).tolist()
    assert counts == discrete_gaussian.integer_weights(sigma, column_bits, total_bits)
    assert counts == _distribution(table)
    _check_within_one_unit(counts, _units(sigma, column_bits, total_bits), total_bits)


def test_the_table_that_is_used_has_the_exact_distribution() -> None:
    table, distribution = _real()
    sigma = discrete_gaussian.SIGMA_OF_TABLE
    total_bits = 32 * (1 + table.further.shape[1])
    units = _units(sigma, 16, total_bits)
    assert distribution == discrete_gaussian.integer_weights(sigma, 16, total_bits)
    _check_within_one_unit(distribution, units, total_bits)
    # Relative errors matter where the distribution is smallest.
    claimed = discrete_gaussian._unit_share(sigma, table.further.shape[1])
    assert claimed < 2.0**-100
    with decimal.localcontext() as context:
        context.prec = 60
        assert (
            max(1 - found / exact for found, exact in zip(distribution, units, strict=True))
            <= claimed
        )
    assert float(1 / min(units)) > 0.9 * claimed


def test_one_wrong_entry_changes_the_distribution() -> None:
    table, distribution = _real()
    random = np.random.default_rng(5)
    column = int(random.integers(2**16))
    for name, index, change in (
        ("packed", column, 1),
        ("packed", column, 2**16),
        ("further", (column, 0), 1),
        ("further", (column, 8), 1),
    ):
        array = getattr(table, name).copy()
        array[index] ^= np.uint32(change)
        assert _distribution(dataclasses.replace(table, **{name: array})) != distribution


@pytest.mark.parametrize(
    ("first", "second", "step"), [(1.0, 1.0, 2), (2.0, 3.0, 2), (2.5, 2.0, 3), (4.0, 1.2, 8)]
)
def test_sums_of_discrete_gaussians_are_within_the_bound(
    first: float, second: float, step: int
) -> None:
    variance = first**2 + step**2 * second**2
    largest = int(6 * math.sqrt(variance))
    table_end = 4 * int(first)
    ripple, outside = discrete_gaussian._convolution(
        Fraction(first) ** 2, Fraction(second) ** 2, step, table_end, Fraction(largest)
    )
    sums = np.arange(-largest, largest + 1)
    # Terms beyond vanish in float64.
    summands = np.arange(-60 * largest, 60 * largest + 1)
    weights_b = np.exp(-(summands**2) / (2 * second**2))
    rest = sums[:, np.newaxis] - step * summands
    terms = np.exp(-(rest**2) / (2 * first**2)) * weights_b
    weights_a = np.exp(-(summands**2) / (2 * first**2))
    distribution = terms.sum(axis=1) / (weights_a.sum() * weights_b.sum())
    gaussian = np.exp(-(summands**2) / (2 * variance))
    ratio = distribution / (np.exp(-(sums**2) / (2 * variance)) / gaussian.sum())
    assert np.all(ratio >= (1 - ripple) / (1 + ripple) - 1e-12)
    assert np.all(ratio <= (1 + ripple) / (1 - ripple) + 1e-12)
    # The bound says no more than is needed.
    assert np.ptp(ratio) > ripple or ripple < 1e-10
    share = (terms * (np.abs(rest) >= table_end)).sum(axis=1) / terms.sum(axis=1)
    assert np.all(share <= outside)
    assert np.max(share) > outside / 8


@pytest.mark.parametrize("sigma", [0.8, 1.0, 1.5, 2.0, 3.0])
def test_rounded_normals_are_below_the_claimed_multiple(sigma: float) -> None:
    variance = sigma**2 - 1 / 12
    integers = np.arange(-30 * math.ceil(sigma), 30 * math.ceil(sigma) + 1)
    gaussian = np.exp(-(integers**2) / (2 * sigma**2))
    near = np.abs(integers) <= 8 * sigma
    gaussian = (gaussian / gaussian.sum())[near]
    integers = integers[near]

    def density(x: np.ndarray) -> np.ndarray:
        return np.exp(-(x**2) / (2 * variance)) / math.sqrt(2 * math.pi * variance)

    rounded = np.array(
        [scipy.integrate.fixed_quad(density, k - 0.5, k + 0.5, n=40)[0] for k in integers]
    )
    ripple = 3 * math.exp(-2 * math.pi**2 * sigma**2)
    claimed = (1 + ripple) * np.exp(integers**2 / (288 * variance**2 * sigma**2))
    assert np.all(rounded <= claimed * gaussian * (1 + 1e-12))
    # The factor is needed.
    assert np.any(rounded > gaussian * (1 + 1e-6))


def _probability(z: int) -> Fraction:
    """The probability of Z = z from the distribution of the table: at most 65^2 ways."""
    distribution = _real()[1]
    ways = 0
    for x1 in range(-_END + (z + _END) % _STEP, _END, _STEP):
        w = (z - x1) // _STEP
        assert w * _STEP + x1 == z
        for x2 in range(-_END + (w + _END) % _STEP, _END, _STEP):
            x3 = (w - x2) // _STEP
            if -_END <= x3 < _END:
                ways += distribution[x1 + _END] * distribution[x2 + _END] * distribution[x3 + _END]
    return Fraction(ways, sum(distribution) ** 3)


def _rounded_normal(z: int) -> Fraction:
    """The probability of z, by Simpson's rule on eight panels, which is exact to 2^-110."""
    with decimal.localcontext() as context:
        context.prec = 80
        variance = discrete_gaussian.VARIANCE - Fraction(1, 12)
        exact = Decimal(variance.numerator) / Decimal(variance.denominator)
        values = [
            (-((Decimal(z) + Decimal(t) / 16) ** 2) / (2 * exact)).exp() for t in range(-8, 9)
        ]
        weights = [1, *[4, 2] * 7, 4, 1]
        products = (weight * value for weight, value in zip(weights, values, strict=True))
        mean = sum(products, Decimal(0)) / 48
        # Digits of pi suffice for relative errors far below 2^-105.
        pi = Decimal("3.14159265358979323846264338327950288419716939937510582097494459")
        return Fraction(mean / (2 * pi * exact).sqrt())


def test_probabilities_of_z_are_at_least_what_the_bound_says() -> None:
    """From the entries of the tables, in exact arithmetic, over the whole range."""
    eta = discrete_gaussian._relative_deficit()
    covered = discrete_gaussian.COVERED
    random = np.random.default_rng(11)
    spread = [int(z) for z in random.integers(-covered, covered + 1, 40)]
    likely = [int(z) for z in discrete_gaussian.STANDARD_DEVIATION * random.standard_normal(40)]
    steps = [sign * number * _STEP**2 for sign in (-1, 1) for number in (0, 1, 3000, 32000)]
    points = [*spread, *likely, *steps, -covered, covered, covered - 1, 5, -77, _STEP, -_STEP]
    deficits = [1 - _probability(z) / _rounded_normal(z) for z in points]
    assert max(deficits) <= eta
    # Nor are they larger by much more than that: it is the distribution of a rounded normal number.
    assert min(deficits) >= -4 * eta
    assert discrete_gaussian.failure_probability(1) >= 2 * max(deficits)


def test_what_is_covered_needs_no_x3_outside_its_table() -> None:
    covered, others = discrete_gaussian.COVERED, _END * (1 + _STEP)
    assert (covered + others) // _STEP**2 == _END - 1
    assert (covered + 1 + others) // _STEP**2 == _END
    assert 15.9 < covered / discrete_gaussian.STANDARD_DEVIATION < 16.0


def test_standard_deviation_is_rounded_down() -> None:
    variance = discrete_gaussian.SIGMA_OF_TABLE**2 * (1 + 2**20 + 2**40)
    assert variance == discrete_gaussian.VARIANCE
    deviation = discrete_gaussian.STANDARD_DEVIATION
    assert Fraction(deviation) ** 2 < variance - Fraction(1, 12)
    assert Fraction(deviation * (1 + 2**-51)) ** 2 > variance - Fraction(1, 12)


def test_failure_probability_is_small_and_grows_with_coordinates() -> None:
    one = discrete_gaussian.failure_probability(1)
    assert 2 * discrete_gaussian._relative_deficit() <= one < 2.0**-89
    assert discrete_gaussian.failure_probability(2**40) == pytest.approx(2.0**40 * one)
    assert discrete_gaussian.failure_probability(2**100) == 1.0
    for wrong in (0, -1, 1.5):
        with refuses("num_coordinates"):
            discrete_gaussian.failure_probability(wrong)  # type: ignore[arg-type]


def _random_ties(ties: int) -> np.ndarray:
    return np.random.default_rng(ties).integers(0, 2**32, (ties, 9), dtype=np.uint32)


def test_drawn_integers_have_the_exact_frequencies() -> None:
    table, distribution = _real()
    count = 2**20
    words = np.random.default_rng(3).integers(0, 2**32, count, dtype=np.uint32)
    found = np.bincount(table.draw(words, _random_ties) + _END, minlength=2 * _END)
    total = sum(distribution)
    expected = np.array([weight * count / total for weight in distribution])
    # Neighbouring values together, until twenty or more are expected.
    bins = np.floor(np.cumsum(expected) / 20.0).astype(int)
    bins = np.minimum(bins, bins[-1] - 1)
    found, expected = np.bincount(bins, found), np.bincount(bins, expected)
    found, expected = found[expected > 0], expected[expected > 0]
    assert len(expected) > 1000
    assert np.min(expected) > 5
    assert scipy.stats.chisquare(found, expected * count / expected.sum()).pvalue > _FALSE_ALARM


def test_noise_has_the_moments_and_tails_of_normal_numbers() -> None:
    count = 2**18
    words = np.random.default_rng(4).integers(0, 2**32, (count, 3), dtype=np.uint32)
    drawn = discrete_gaussian.from_words(words, _random_ties)
    assert drawn.dtype == np.int64
    assert drawn.shape == (count,)
    normals = drawn / discrete_gaussian.STANDARD_DEVIATION
    quantile = scipy.stats.norm.isf(_FALSE_ALARM / 2)
    assert abs(normals.mean()) * math.sqrt(count) < quantile
    assert abs((normals**2).mean() - 1) * math.sqrt(count / 2) < quantile
    assert scipy.stats.kstest(normals, "norm").pvalue > _FALSE_ALARM
    for bound in (3.0, 4.0):
        beyond = int(np.sum(np.abs(normals) > bound))
        chance = 2 * scipy.stats.norm.sf(bound)
        assert scipy.stats.binomtest(beyond, count, chance).pvalue > _FALSE_ALARM
    # The lower bits are uniform.
    lower = np.bincount(drawn & 63, minlength=64)
    assert scipy.stats.chisquare(lower).pvalue > _FALSE_ALARM


def test_ties_are_decided_by_further_words() -> None:
    count = 3000
    words, further = words_that_tie(7, count)
    found = discrete_gaussian.from_words(words, lambda ties: further)
    table = discrete_gaussian.table()
    thresholds = _thresholds(table)
    chosen = np.zeros(count, np.int64)
    kept = ties = 0
    # Coordinate by coordinate: the order of the further words.
    for draw, triple in enumerate(words.tolist()):
        for index, word in enumerate(triple):
            column, fraction = word & 0xFFFF, word >> 16
            keeps = fraction < int(table.packed[column]) >> 16
            if fraction == int(table.packed[column]) >> 16:
                for place in range(9):
                    fraction = fraction << 32 | int(further[ties, place])
                keeps = fraction < thresholds[column]
                ties += 1
            kept += keeps
            choice = column if keeps else int(table.packed[column]) & 0xFFFF
            chosen[draw] += (choice - _END) * _STEP**index
    assert ties == len(further)
    np.testing.assert_array_equal(found, chosen)
    assert 0.1 < kept / (3 * count) < 0.9


def test_largest_noise_is_drawn_from_zeros() -> None:
    """The last columns' thresholds begin with many zeros: ties, up to the last words."""
    found = discrete_gaussian.from_words(
        np.zeros((2, 3), np.uint32), lambda ties: np.zeros((ties, 9), np.uint32)
    )
    assert found.tolist() == [-discrete_gaussian.LARGEST] * 2
    assert np.all(discrete_gaussian.table().further[0, :3] == 0)


def test_large_noise_fits() -> None:
    assert -discrete_gaussian.LARGEST == -_END - _END * _STEP - _END * _STEP**2
    assert discrete_gaussian.LARGEST < 2**36


def test_bad_words_are_refused() -> None:
    shapes: list[tuple[int, ...]] = [(3,), (3, 5), (5, 3, 1)]
    refused: list[np.ndarray] = [np.zeros(shape, np.uint32) for shape in shapes]
    for words in (*refused, np.zeros((5, 3), np.uint64)):
        with refuses("words"):
            discrete_gaussian.from_words(words, _random_ties)


_TAILS = (scipy.stats.norm.cdf, scipy.stats.norm.sf)


def _masses(mean: float, low: float, high: float, stddev: float) -> dict[int, float]:
    """A real normal number that is cut off to an interval and rounded: its probabilities."""
    cells = range(math.floor(low + 0.5), math.ceil(high - 0.5) + 1)
    edges = np.clip(np.arange(cells[0], cells[-1] + 2) - 0.5, low, high)
    below, above = (function(edges, mean, stddev) for function in _TAILS)
    # From the nearer tail, in which no digits are lost.
    masses = np.where(edges[1:] <= mean, np.diff(below), -np.diff(above))
    return dict(zip(cells, (masses / masses.sum()).tolist(), strict=True))


def _renyi(first: dict[Any, float], second: dict[Any, float], order: float) -> float:
    if any(mass > 0.0 and not second.get(value, 0.0) > 0.0 for value, mass in first.items()):
        return math.inf
    logs = [
        order * math.log(mass) + (1.0 - order) * math.log(second[value])
        for value, mass in first.items()
        if mass > 0.0
    ]
    return float(scipy.special.logsumexp(logs)) / (order - 1.0)


_ORDERS = (1.0001, 1.1, 2.0, 5.0, 30.0, 200.0)


@pytest.mark.parametrize("stddev", [0.7, 2.0, 5.0])
@pytest.mark.parametrize("shift", [1, 2, 5])
@pytest.mark.parametrize("covered", [6, 9, 14])
def test_cut_normal_numbers_have_no_larger_divergences_than_whole_ones(
    stddev: float, shift: int, covered: int
) -> None:
    """Cut off around the middle of both means; around each mean alone they have infinite ones."""
    half = covered - shift / 2 - 0.5
    first, second = (
        _masses(mean, shift / 2 - half, shift / 2 + half, stddev) for mean in (0, shift)
    )
    assert max(abs(value) for value in first) <= covered
    assert max(abs(value - shift) for value in second) <= covered
    for order in _ORDERS:
        most = order * shift**2 / (2.0 * stddev**2) * (1.0 + 1e-9)
        assert _renyi(first, second, order) <= most
        assert _renyi(second, first, order) <= most
        own = [_masses(mean, mean - covered, mean + covered, stddev) for mean in (0, shift)]
        assert _renyi(own[0], own[1], order) == math.inf


def test_divergences_of_cut_numbers_add_up_where_shifts_follow_from_what_was_released() -> None:
    """Two numbers: the second is moved by what the first one left of a square of 25."""
    stddev, covered, joint = 3.0, 12, []
    shifts = {value: 3 + value % 2 for value in range(-30, 31)}
    for is_there in (False, True):
        found = {}
        half = covered - 1.5 - 0.5
        for one, mass in _masses(3 * is_there, 1.5 - half, 1.5 + half, stddev).items():
            shift = shifts[one]
            rest = covered - shift / 2 - 0.5
            for two, other in _masses(
                shift * is_there, shift / 2 - rest, shift / 2 + rest, stddev
            ).items():
                found[one, two] = mass * other
        joint.append(found)
    for order in _ORDERS:
        most = order * 25 / (2.0 * stddev**2) * (1.0 + 1e-9)
        assert 0.8 * most < _renyi(joint[1], joint[0], order) <= most or order > 2.0
        assert max(_renyi(joint[0], joint[1], order), _renyi(joint[1], joint[0], order)) <= most


def test_delta_of_approximate_zcdp_covers_the_cut_and_the_table() -> None:
    reach = (discrete_gaussian.COVERED - 0.5) / discrete_gaussian.STANDARD_DEVIATION
    missed = 2.0 * scipy.stats.norm.sf(reach - discrete_gaussian.LARGEST_SHIFT)
    eta = discrete_gaussian._relative_deficit()
    for coordinates in (1, 10**6, 2**40):
        delta = discrete_gaussian.failure_probability(coordinates)
        # 1 - (1 - eta)^N (1 - t)^N, which no float distinguishes from 0 by its own.
        assert -math.expm1(coordinates * (math.log1p(-eta) + math.log1p(-missed))) <= delta


def test_no_pure_zcdp_holds_of_what_is_drawn() -> None:
    """The least number that can be drawn, moved by one, is none that can be drawn unmoved."""
    table, distribution = _real()
    least = -(2 ** (table.column_bits - 1))
    assert distribution[0] > 0
    assert least * (1 + _STEP + _STEP**2) == -discrete_gaussian.LARGEST
    # Column 0 of each, below its threshold.
    drawn = discrete_gaussian.from_words(
        np.zeros((1, 3), np.uint32),
        lambda ties: np.zeros((ties, discrete_gaussian.TIE_WORDS), np.uint32),
    )
    assert drawn[0] == -discrete_gaussian.LARGEST
