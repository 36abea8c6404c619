"""Rows of Z: random bits, the discrete Gaussian in exact arithmetic, and the bound on its law."""

import contextlib
import decimal
import functools
import math
import os
import secrets
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import scipy.integrate
import scipy.special
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from mf_aggregators.kernel import draws, sensitivity
from mf_aggregators.kernel.draws import TILE, Engine, _AliasTable, _random_blocks
from mf_aggregators.kernel.numbers import ReleaseError
from tests.examples import examples
from tests.mf_aggregators.statistics_of_noise import check_standard_normal
from tests.refusals import refuses

_HALF = TILE // 2
_SEED = np.array([2**62 + 12345, -(2**61) - 999], np.int64)
_END = 2**15
_STEP = 2**10
_SMALL = [
    (Fraction(1), 3, 1, 2),
    (Fraction(5, 2), 3, 5, 1),
    (Fraction(1, 3), 2, 3, 2),
    (Fraction(7, 3), 4, 2, 2),
    # Equal weights, as nearly as they can be: many columns are full.
    (Fraction(10**6), 3, 4, 1),
]


@functools.cache
def _long() -> np.ndarray:
    """Three tiles and a part of a fourth."""
    return draws.integers(_SEED, 7, 0, 3 * TILE + 1001)


@given(st.data())
@settings(deadline=None, max_examples=examples(30))
def test_any_range_is_a_part_of_the_row(data: st.DataObject) -> None:
    long = _long()
    edges = [tile * TILE + half * _HALF for tile in range(4) for half in range(2)]
    near_edges = st.tuples(st.sampled_from(edges), st.integers(-3, 3)).map(sum)
    coordinates = st.one_of(st.integers(0, len(long)), near_edges)
    first, stop = sorted(min(max(data.draw(coordinates), 0), len(long)) for _ in range(2))
    part = draws.integers(_SEED, 7, first, stop - first)
    assert part.dtype == np.int64
    np.testing.assert_array_equal(part, long[first:stop])


@pytest.mark.parametrize("tile", [0, 3])
def test_coordinates_follow_the_definition(tile: int) -> None:
    """Coordinate by coordinate with Python's integers, through the tile's ties."""
    count = TILE - 16
    table = draws.table()
    packed, further = table.packed.tolist(), table.further.tolist()
    first_words = _random_blocks(_SEED, 7, 3 * tile * TILE // 16, 3 * count // 16)
    first_words = first_words.tolist()
    tie_words = _random_blocks(_SEED, 7, 2**60 + tile * 2**17, 20).ravel().tolist()
    num_ties, expected = 0, []
    for place in range(count):
        total = 0
        for number in range(3):
            word = first_words[3 * (place // 16) + number][place % 16]
            column, fraction = word & 0xFFFF, word >> 16
            threshold = packed[column] >> 16
            if fraction == threshold:
                words = tie_words[9 * num_ties : 9 * num_ties + 9]
                is_below = words < further[column]
                num_ties += 1
            else:
                is_below = fraction < threshold
            chosen = column if is_below else packed[column] & 0xFFFF
            total += (chosen - 2**15) << 10 * number
        expected.append(total)
    found = draws.integers(_SEED, 7, tile * TILE, count)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("tile", [0, 5])
def test_words_for_ties_come_from_ranges_of_their_own(
    tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With first words that all tie, over several draws: the words of ties follow one another."""
    used = []
    original = _random_blocks

    def tying(seed: np.ndarray, row: int, block: int, count: int) -> Any:
        if block < draws.FIRST_TIE_BLOCK:
            packed = draws.table().packed
            return np.full((count, 16), packed[0] & np.uint32(0xFFFF0000), np.uint32)
        used.append((block - 2**60 - tile * 2**17, count))
        return original(seed, row, block, count)

    monkeypatch.setattr(draws, "_random_blocks", tying)
    count = 20_000
    draws.integers(_SEED, 0, tile * TILE, count)
    # Nine words for each of three ties a coordinate: ranges meet, and share a block where a tie's
    # words are in two of them.
    assert used[0][0] == 0
    ends = [first + number for first, number in used]
    assert all(later[0] in (end - 1, end) for later, end in zip(used[1:], ends[:-1], strict=True))
    assert ends[-1] == -(-27 * count // 16)
    # All that a tile may need is its own.
    assert 27 * TILE // 16 <= draws.TIE_BLOCKS_PER_TILE


def test_coordinates_of_one_row_are_independent_standard_normals() -> None:
    seed = np.frombuffer(os.urandom(16), np.int64)
    row = draws.integers(seed, 3, 0, 4 * TILE) * draws.STEP
    check_standard_normal(row.reshape(-1, 64))
    # Halves of tiles against each other.
    check_standard_normal(row.reshape(8, _HALF).T)


def test_bad_arguments_are_refused() -> None:
    for row, first, count, name in (
        (0, -1, 1, "first_coordinate"),
        (0, 0, -1, "count"),
        (-1, 0, 1, "row"),
        (2**63, 0, 1, "2^63"),
        (0, 2**56 - 1, 2, "2^56"),
    ):
        with refuses(name):
            draws.integers(_SEED, row, first, count)


def _block(state: list[int]) -> bytes:
    found = draws._chacha20(np.array(state, np.uint32)[:, np.newaxis])
    return found[:, 0].astype("<u4").tobytes()


def test_chacha20_is_the_block_function_of_rfc_8439() -> None:
    """Sec. 2.3.2: the key 00 01 ... 1f, the nonce 00 00 00 09 00 00 00 4a 00 00 00 00, block 1."""
    key = np.frombuffer(bytes(range(32)), "<u4").tolist()
    constants = np.frombuffer(b"expand 32-byte k", "<u4").tolist()
    expected = (
        "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
        "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e"
    )
    assert _block([*constants, *key, 1, 0x09000000, 0x4A000000, 0]).hex() == expected


def test_keys_of_128_bits_give_the_published_keystream() -> None:
    """The all-zero key and nonce of the published test vectors for ChaCha20 with 128-bit keys."""
    words = _random_blocks(np.zeros(2, np.int64), 0, 0, 1)
    expected = (
        "89670952608364fd00b2f90936f031c8e756e15dba04b8493d00429259b20f46"
        "cc04f111246b6c2ce066be3bfb32d9aa0fddfbc12123d4b9e44f34dca05a103f"
    )
    assert words.astype("<u4").tobytes().hex() == expected


@given(
    st.tuples(*2 * [st.integers(-(2**63), 2**63 - 1)]),
    st.integers(0, 2**63 - 1),
    st.one_of(st.integers(0, 2**33), st.integers(2**61 - 5, 2**61 - 1)),
)
@settings(max_examples=50)
def test_seed_row_and_block_are_key_nonce_and_counter(
    seed: tuple[int, int], row: int, block: int
) -> None:
    key = b"".join(half.to_bytes(8, "little", signed=True) for half in seed)
    state = (
        b"expand 16-byte k" + key + key + block.to_bytes(8, "little") + row.to_bytes(8, "little")
    )
    found = _random_blocks(np.array(seed, np.int64), row, block, 1)
    assert found.dtype == np.uint32
    assert found[0].astype("<u4").tobytes() == _block(np.frombuffer(state, "<u4").tolist())


@pytest.mark.parametrize("half", [0, 1])
def test_every_bit_of_the_seed_counts(half: int) -> None:
    base = _random_blocks(np.zeros(2, np.int64), 0, 0, 1)
    for bit in range(64):
        seed = np.zeros(2, np.uint64)
        seed[half] = 1 << bit
        words = _random_blocks(seed.view(np.int64), 0, 0, 1)
        assert not np.any(words == base), bit


def test_the_last_rows_and_blocks_can_be_drawn() -> None:
    seed = np.zeros(2, np.int64)
    assert _random_blocks(seed, 2**63 - 1, 2**61 - 1, 1).shape == (1, 16)
    assert draws.integers(seed, 2**63 - 1, 2**56 - 3, 3).shape == (3,)


@pytest.mark.parametrize(
    "seed", [np.zeros(2), np.zeros(3, np.int64), np.zeros(2, np.uint64), np.int64(5)]
)
def test_what_is_no_seed_is_refused(seed: np.ndarray) -> None:
    with refuses("int64", "(2,)"):
        draws.integers(seed, 0, 0, 1)


def _thresholds(table: _AliasTable) -> list[int]:
    """All words of each threshold as one number."""
    word_bits = table.column_bits + table.fraction_bits
    thresholds = [int(entry) >> table.column_bits for entry in table.packed]
    for further in table.further.T:
        pairs = zip(thresholds, further.tolist(), strict=True)
        thresholds = [threshold << word_bits | word for threshold, word in pairs]
    return thresholds


def _distribution(table: _AliasTable) -> list[int]:
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
def _real() -> tuple[_AliasTable, list[int]]:
    """The table that is used, and its distribution."""
    table = draws.table()
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
    table = draws._alias_table(sigma, column_bits, fraction_bits, tie_words)
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
    assert counts == draws._integer_weights(sigma, column_bits, total_bits)
    assert counts == _distribution(table)
    _check_within_one_unit(counts, _units(sigma, column_bits, total_bits), total_bits)


def test_the_table_that_is_used_has_the_exact_distribution() -> None:
    table, distribution = _real()
    sigma = draws._SIGMA_OF_TABLE
    total_bits = 32 * (1 + table.further.shape[1])
    units = _units(sigma, 16, total_bits)
    assert distribution == draws._integer_weights(sigma, 16, total_bits)
    _check_within_one_unit(distribution, units, total_bits)
    # Relative errors matter where the distribution is smallest.
    claimed = _unit_share(sigma, table.further.shape[1])
    assert claimed < 2.0**-100
    with decimal.localcontext() as context:
        context.prec = 60
        assert (
            max(1 - found / exact for found, exact in zip(distribution, units, strict=True))
            <= claimed
        )
    assert float(1 / min(units)) > 0.9 * claimed


@pytest.mark.parametrize(
    ("first", "second", "step"), [(1.0, 1.0, 2), (2.0, 3.0, 2), (2.5, 2.0, 3), (4.0, 1.2, 8)]
)
def test_sums_of_discrete_gaussians_are_within_the_bound(
    first: float, second: float, step: int
) -> None:
    variance = first**2 + step**2 * second**2
    largest = int(6 * math.sqrt(variance))
    table_end = 4 * int(first)
    ripple, outside = _convolution(
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
        variance = draws._VARIANCE - Fraction(1, 12)
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


def _relative_deficit() -> float:
    """The eta of the module's docstring."""
    rounding = 3.0 * _unit_share(draws._SIGMA_OF_TABLE, draws.TIE_WORDS)
    end_w, variance_of_x = Fraction(draws.COVERED + _END, _STEP), draws._SIGMA_OF_TABLE**2
    variance_w = draws._SIGMA_OF_TABLE**2 * (1 + _STEP**2)
    ripple_w, outside_w = _convolution(variance_of_x, variance_of_x, _STEP, _END, end_w)
    ripple_z, outside_z = _convolution(
        variance_of_x, variance_w, _STEP, _END, Fraction(draws.COVERED)
    )
    outside = outside_w + outside_z * ((1.0 + ripple_w) / (1.0 - ripple_w)) ** 2
    variance = draws._VARIANCE - Fraction(1, 12)
    # The e of step 4 is exp(-2^67) and less than any float.
    rounded = math.expm1(draws.COVERED**2 / (288 * variance**2 * draws._VARIANCE))
    # 1 / (1 + rounded) >= 1 - rounded, and (1 - e) / (1 + e) >= 1 - 2 e.
    return draws._SLACK * (rounding + outside + 2.0 * (ripple_w + ripple_z) + rounded)


def _unit_share(sigma: Fraction, tie_words: int) -> float:
    """A table's unit over the probability of its last column: the g of step 1."""
    # The sum of exp(-k^2 / (2 s^2)) is below s sqrt(2 pi) + 1.
    log_last = -float(_END**2 / (2 * sigma**2)) - math.log(sigma * math.sqrt(2.0 * math.pi) + 1.0)
    unit_bits = (1 + tie_words) * (draws.COLUMN_BITS + draws._FRACTION_BITS)
    return math.exp(-unit_bits * math.log(2.0) - log_last)


def _convolution(
    first: Fraction, second: Fraction, step: int, table_end: int, largest: Fraction
) -> tuple[float, float]:
    """The e of step 2, and the share of step 3.

    Args:
      first: The variance a^2.
      second: The variance b^2.
      step: The factor m.
      table_end: What |A| stays below in its table.
      largest: For |n| up to this.
    """
    variance = first + step**2 * second
    t_squared = float(first * second / variance)
    smallest = math.exp(-2.0 * math.pi**2 * t_squared)
    ripple = 2.0 * smallest / (1.0 - smallest)
    radius = float((table_end - largest * first / variance) / step)
    tail = 2.0 * math.exp(-(radius**2) / (2.0 * t_squared)) / -math.expm1(-radius / t_squared)
    return ripple, tail / (math.sqrt(2.0 * math.pi * t_squared) * (1.0 - ripple))


def test_probabilities_of_z_are_at_least_what_the_bound_says() -> None:
    """From the entries of the tables, in exact arithmetic, over the whole range."""
    eta = draws._RELATIVE_DEFICIT
    assert eta == _relative_deficit()
    covered = draws.COVERED
    random = np.random.default_rng(11)
    spread = [int(z) for z in random.integers(-covered, covered + 1, 40)]
    likely = [int(z) for z in draws.STANDARD_DEVIATION * random.standard_normal(40)]
    steps = [sign * number * _STEP**2 for sign in (-1, 1) for number in (0, 1, 3000, 32000)]
    points = [*spread, *likely, *steps, -covered, covered, covered - 1, 5, -77, _STEP, -_STEP]
    deficits = [1 - _probability(z) / _rounded_normal(z) for z in points]
    assert max(deficits) <= eta
    # Nor are they larger by much more than that: it is the distribution of a rounded normal number.
    assert min(deficits) >= -4 * eta
    assert sensitivity.failure_probability(1.0, 1) >= 2 * max(deficits)


def test_what_is_covered_needs_no_x3_outside_its_table() -> None:
    covered, others = draws.COVERED, _END * (1 + _STEP)
    assert (covered + others) // _STEP**2 == _END - 1
    assert (covered + 1 + others) // _STEP**2 == _END
    assert 15.9 < covered / draws.STANDARD_DEVIATION < 16.0


def test_standard_deviation_is_rounded_down() -> None:
    variance = draws._SIGMA_OF_TABLE**2 * (1 + 2**20 + 2**40)
    assert variance == draws._VARIANCE
    deviation = draws.STANDARD_DEVIATION
    assert Fraction(deviation) ** 2 < variance - Fraction(1, 12)
    assert Fraction(deviation * (1 + 2**-51)) ** 2 > variance - Fraction(1, 12)


def test_failure_probability_is_small_and_grows_with_coordinates() -> None:
    one = sensitivity.failure_probability(1.0, 1)
    assert 2 * draws._RELATIVE_DEFICIT <= one < 2.0**-89
    assert sensitivity.failure_probability(1.0, 2**40) == pytest.approx(2.0**40 * one)
    assert sensitivity.failure_probability(1.0, 2**100) == 1.0
    for wrong in (0, -1, 1.5):
        with refuses("num_coordinates"):
            sensitivity.failure_probability(1.0, wrong)  # type: ignore[arg-type]


def test_largest_noise_is_drawn_from_zeros() -> None:
    """The last columns' thresholds begin with many zeros: ties, up to the last words."""
    found = draws._from_words(
        np.zeros((2, 3), np.uint32), lambda ties: np.zeros((ties, 9), np.uint32)
    )
    assert found.tolist() == [-draws.LARGEST] * 2
    assert np.all(draws.table().further[0, :3] == 0)


def test_large_noise_fits() -> None:
    assert -draws.LARGEST == -_END - _END * _STEP - _END * _STEP**2
    assert draws.LARGEST < 2**36


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
    reach = (draws.COVERED - 0.5) / draws.STANDARD_DEVIATION
    missed = 2.0 * scipy.stats.norm.sf(reach - draws.LARGEST_SHIFT)
    eta = draws._RELATIVE_DEFICIT
    for coordinates in (1, 10**6, 2**40):
        delta = sensitivity.failure_probability(1.0, coordinates)
        # 1 - (1 - eta)^N (1 - t)^N, which no float distinguishes from 0 by its own.
        assert -math.expm1(coordinates * (math.log1p(-eta) + math.log1p(-missed))) <= delta


def _honest(seed: np.ndarray, row: int, tile: int, found: np.ndarray) -> None:
    found[:] = draws.integers(seed, row, tile * TILE, TILE)


def _lying(change: Callable[[np.ndarray], Any]) -> draws.FillTile:
    def fill_tile(seed: np.ndarray, row: int, tile: int, found: np.ndarray) -> None:
        found[:] = change(draws.integers(seed, row, tile * TILE, TILE))

    return fill_tile


@pytest.mark.parametrize("count", [5, TILE, 5 * TILE + 77])
def test_neither_threads_nor_functions_of_others_change_a_bit(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    expected = draws.integers(_SEED, 9, 3 * TILE + 11, count)
    for fill_tile in (None, _honest):
        with Engine.of_size(2**20, (fill_tile,) if fill_tile else ()) as engine:
            assert engine.pool is not None
            found = draws.integers(_SEED, 9, 3 * TILE + 11, count, engine)
        np.testing.assert_array_equal(found, expected)
    with Engine.of_size(2**10) as engine:
        assert engine == draws.PLAIN


@pytest.mark.parametrize(
    "change",
    [
        lambda z: z // 2,
        lambda z: 0 * z,
        lambda z: np.roll(z, 1),
        lambda z: np.where(np.arange(TILE) == TILE - 1, 0, z),
    ],
    ids=["half", "zero", "shifted", "last"],
)
def test_a_function_that_draws_other_noise_is_refused(
    change: Callable[[np.ndarray], Any],
) -> None:
    """In every row of 16 tiles or more."""
    engine = draws.Engine(fill_tile=_lying(change))
    with refuses("numba", error=ReleaseError):
        draws.integers(_SEED, 1, 0, 16 * TILE, engine)
    # A part of a tile is the kernel's own.
    found = draws.integers(_SEED, 1, 0, TILE - 1, engine)
    np.testing.assert_array_equal(found, draws.integers(_SEED, 1, 0, TILE - 1))


@pytest.mark.parametrize("tiles", [1, 15, 18])
def test_each_tile_may_be_the_one_that_is_compared(
    tiles: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    below: list[int] = []
    compared: list[int] = []
    original = draws._of_tile
    zero = draws.Engine(fill_tile=lambda seed, row, tile, found: found.fill(tile))

    def of_tile(seed: np.ndarray, row: int, tile: int, count: int) -> np.ndarray:
        compared.append(tile)
        return original(seed, row, tile, count)

    def randbelow(number: int) -> int:
        below.append(number)
        return len(below) - 1

    monkeypatch.setattr(draws, "_of_tile", of_tile)
    monkeypatch.setattr(secrets, "randbelow", randbelow)
    for _ in range(max(tiles, 16)):
        with contextlib.suppress(ReleaseError):
            draws.integers(_SEED, 1, 0, tiles * TILE, zero)
    assert set(below) == {max(tiles, 16)}
    assert compared == [*range(tiles)]
