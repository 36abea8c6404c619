"""Strategy matrices from rows, against exact inverses in fractions."""

import dataclasses
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mf_aggregators.kernel import strategies
from mf_aggregators.kernel.numbers import NotProved
from mf_aggregators.kernel.rows import (
    BandedNoise,
    NoiseRecursion,
    StateSpaceNoise,
    WindowNoise,
    banded_rows,
    dense_rows,
    independent_rows,
    toeplitz_rows,
)
from mf_aggregators.kernel.strategies import Strategy
from tests.examples import examples
from tests.mf_aggregators import random_recursions
from tests.refusals import refuses


def _exact(array: object) -> np.ndarray:
    """Floats as fractions, with the same shape."""
    given = np.asarray(array)
    exact = np.empty(given.shape, object)
    for index in np.ndindex(given.shape):
        exact[index] = Fraction(float(given[index]))
    return exact


def _solved(lower: np.ndarray) -> np.ndarray:
    """The exact inverse of a lower-triangular matrix of fractions."""
    inverse = _exact(np.zeros(lower.shape))
    for i, row in enumerate(lower):
        inverse[i, i] = 1 / row[i]
        for j in range(i):
            inverse[i, j] = -inverse[i, i] * sum(row[k] * inverse[k, j] for k in range(j, i))
    return inverse


def exact_strategy(rows: NoiseRecursion) -> np.ndarray:
    """C in fractions, from the definitions of the classes."""
    n = rows.num_rounds
    result = _exact(np.zeros((n, n)))
    if isinstance(rows, BandedNoise):
        bands = np.broadcast_to(rows.bands, (n, rows.bands.shape[1]))
        of_columns = _exact(np.ones(n) if rows.row_scales is None else rows.row_scales)
        for i in range(n):
            for t in range(min(i + 1, bands.shape[1])):
                result[i, i - t] = Fraction(float(bands[i, t])) / of_columns[i - t]
        return result
    if isinstance(rows, WindowNoise):
        window = _exact(np.broadcast_to(rows.window, (n, rows.window_length)))
        left, right = _exact(rows.left), _exact(rows.right)
        scales = _exact(np.ones(n) if rows.row_scales is None else rows.row_scales)
        for i in range(n):
            for j in range(i + 1):
                entry = window[i, i - j] if i - j < rows.window_length else Fraction(0)
                if j <= i - rows.window_length + 1:
                    entry += sum(left[i] * right[j])
                result[i, j] = scales[i] * entry
        return _solved(result)
    assert isinstance(rows, StateSpaceNoise)
    gains, outputs, decays, feedbacks = map(
        _exact, (rows.gains, rows.outputs, rows.decays, rows.feedbacks)
    )
    identity, state = _exact(np.eye(n)), _exact(np.zeros((rows.num_state_vectors, n)))
    for i, p in enumerate(rows.phases):
        result[i] = gains[p] * identity[i] + outputs[p] @ state
        state = decays[p][:, np.newaxis] * state[rows.sources[p]]
        state = state + np.multiply.outer(feedbacks[p], result[i])
    return _solved(result)


def dense(found: Strategy) -> np.ndarray:
    """A strategy matrix as an (n, n) array."""
    if found.is_dense:
        return found.entries
    n, b = found.num_rounds, found.entries.shape[1]
    matrix, bands = np.zeros((n, n)), np.broadcast_to(found.entries, (n, b))
    for i in range(n):
        for t in range(min(i + 1, b)):
            matrix[i, i - t] = bands[i, t]
    return matrix if found.column_scales is None else matrix * found.column_scales


def _kind(found: Strategy) -> str:
    if found.is_dense:
        return "dense"
    return "Toeplitz" if len(found.entries) == 1 else "banded"


@given(random_recursions.recursions(), st.integers(1, 9), st.booleans())
@settings(max_examples=examples(200), deadline=None)
def test_errors_are_within_their_bound(rows: NoiseRecursion, first: int, is_small: bool) -> None:
    """For all kinds, the leading part included, and no bound is far from its errors."""
    first = min(first, rows.num_rounds)
    exact = exact_strategy(rows)[:first, :first]
    norms = np.linalg.norm(exact.astype(np.float64), axis=0)
    with pytest.MonkeyPatch.context() as patch:
        if is_small:
            # As for matrices whose bands would take too much memory, and in several blocks.
            patch.setattr(strategies, "_MOST_ENTRIES_OF_BANDS", 0)
            patch.setattr(strategies, "_ROWS_AT_A_TIME", 2)
        found = strategies.strategy(rows, first)
    matrix = dense(found)
    errors = np.linalg.norm((exact - _exact(matrix)).astype(np.float64), axis=0)
    # The errors of an inverse are those of its condition.
    magnitudes = np.abs(exact.astype(np.float64))
    noising = np.abs(_solved(exact).astype(np.float64))
    condition = np.linalg.norm(magnitudes @ noising, 2)
    assert np.max(errors) <= found.error
    assert found.error <= 1e-13 * (1.0 + condition**2) * np.max(norms)
    assert not np.any(np.triu(matrix, 1))
    if isinstance(rows, BandedNoise) and rows.row_scales is None:
        assert found.error == 0.0


def test_kinds_give_their_own_data() -> None:
    """So that theorems about Toeplitz and banded matrices apply."""
    none, one = np.ones((5, 0)), np.zeros(5, np.int64)
    sources = np.arange(2)[np.newaxis]
    decays = np.array([[0.9, 0.5]])
    state = StateSpaceNoise(one, np.ones(1), -decays, sources, decays, np.ones((1, 2)))
    for rows, kind in (
        (independent_rows(5), "Toeplitz"),
        (banded_rows(np.tri(5, 2)), "banded"),
        (toeplitz_rows(5, np.ones(2)), "Toeplitz"),
        (toeplitz_rows(5, np.ones(2), np.ones(5)), "banded"),
        (WindowNoise(5, np.array([[1.0, -0.5]]), none, none), "Toeplitz"),
        (WindowNoise(5, np.tri(5, 2), none, none), "dense"),
        (state, "Toeplitz"),
        (dataclasses.replace(state, sources=sources[:, ::-1]), "dense"),
        (dense_rows(np.tri(5)), "dense"),
    ):
        assert _kind(strategies.strategy(rows, 5)) == kind
        # In blocks, so that the leading part has as few bands.
        assert dense(strategies.strategy(rows, 1)).shape == (1, 1)


def test_phases_after_the_run_do_not_count() -> None:
    rows = StateSpaceNoise(
        np.array([1, 1, 0]),
        np.array([1.0, 2.0]),
        np.ones((2, 1)),
        np.zeros((2, 1), np.int64),
        np.full((2, 1), 0.5),
        np.ones((2, 1)),
    )
    found = strategies.strategy(rows, 2)
    assert _kind(found) == "Toeplitz"
    np.testing.assert_allclose(found.entries[0], [0.5, -0.5])
    assert _kind(strategies.strategy(rows, 3)) == "dense"


def test_later_rounds_do_not_count() -> None:
    bands = np.array([[1.0, 0.0], [2.0, 0.5], [0.0, 1.0]])
    np.testing.assert_array_equal(
        dense(strategies.strategy(banded_rows(bands), 2)), [[1.0, 0.0], [0.5, 2.0]]
    )


def test_zeros_of_an_inverse_are_zeros() -> None:
    """The number of bands decides which theorem applies."""
    generator = np.random.default_rng(3)
    bands = np.tril(generator.uniform(0.1, 1.0, (60, 4)))
    bands[:, 0] += 2.0
    strategy = dense(strategies.strategy(banded_rows(bands), 60))
    found = strategies.strategy(dense_rows(np.linalg.inv(strategy)), 60)
    np.testing.assert_array_equal(dense(found) != 0.0, strategy != 0.0)
    assert 0.0 < found.error < 1e-12


@pytest.mark.parametrize(
    ("rows", "num_rounds", "words"),
    [
        (banded_rows(np.tri(4, 2)), 5, ["4", "5"]),
        (dense_rows(np.tril(np.ones((4, 4)), -1)), 4, ["zero"]),
        (banded_rows(np.full((3, 1), 1e-150)), 3, ["singular"]),
        (banded_rows(np.full((3, 1), 1e150)), 3, ["singular"]),
        (toeplitz_rows(3, np.array([1.0, 1.0]), np.full(3, 1e-200)), 3, ["singular"]),
        # Of a condition beyond floats.
        (dense_rows(np.eye(60) - 2.0 * np.tri(60, k=-1)), 60, ["singular"]),
        (WindowNoise(60, np.array([[1.0] + [-2.0] * 59]), *np.ones((2, 60, 0))), 60, ["singular"]),
        (WindowNoise(3, np.array([[0.0, 1.0]]), *np.ones((2, 3, 0))), 3, ["zero"]),
        (banded_rows(np.tri(3, 2, -1)), 3, ["zero"]),
    ],
)
def test_what_is_not_proved_is_refused(
    rows: NoiseRecursion, num_rounds: int, words: list[str]
) -> None:
    with refuses(*words):
        strategies.strategy(rows, num_rounds)


def test_rows_whose_normalised_numbers_overflow_are_not_proved() -> None:
    one = np.ones((1, 1))
    rows = StateSpaceNoise(
        np.zeros(3, np.int64), np.full(1, 1e-200), 1e200 * one, np.zeros((1, 1), np.int64), one, one
    )
    with pytest.raises(NotProved, match="finite"):
        strategies.strategy(rows, 3)


def test_no_class_of_others_is_believed() -> None:
    class Mine(BandedNoise):
        pass

    with pytest.raises(NotProved, match="Mine"):
        strategies.strategy(Mine(3, np.tri(3, 2)), 3)


@pytest.mark.parametrize(
    "rows",
    [
        WindowNoise(10**6, np.ones((10**6, 1)), *np.ones((2, 10**6, 0))),
        StateSpaceNoise(
            phases=np.arange(10**6) % 2,
            gains=np.ones(2),
            outputs=np.ones((2, 1)),
            sources=np.zeros((2, 1), np.int64),
            decays=np.ones((2, 1)),
            feedbacks=np.ones((2, 1)),
        ),
    ],
)
def test_too_many_rounds_are_refused(rows: NoiseRecursion) -> None:
    with refuses(str(rows.num_rounds)):
        strategies.strategy(rows, rows.num_rounds)


def test_long_runs() -> None:
    """A state space of a million rounds, bands of a hundred thousand, in seconds."""
    rounds = 10**6
    decays = np.array([[0.999, 0.9]])
    rows = StateSpaceNoise(
        np.zeros(rounds, np.int64),
        np.full(1, 2.0),
        np.array([[-0.5, -0.25]]),
        np.arange(2)[np.newaxis],
        decays,
        np.ones((1, 2)),
    )
    found = strategies.strategy(rows, rounds)
    assert _kind(found) == "Toeplitz"
    lag = 10_000
    expected = 0.25 * 0.999 ** (lag - 1) + 0.125 * 0.9 ** (lag - 1)
    assert found.entries[0][lag] == pytest.approx(expected, rel=1e-12)
    assert found.error < 1e-13
    window = WindowNoise(rounds, np.array([[1.0, -0.5, -0.125]]), *np.ones((2, rounds, 0)))
    assert strategies.strategy(window, rounds).error < 1e-12
    # The square root of prefix sums, of as many coefficients as rounds.
    lags = np.arange(1, 10**5)
    series, expected = (np.cumprod(np.append(1.0, (lags + a) / lags)) for a in (-1.5, -0.5))
    found = strategies.strategy(WindowNoise(10**5, series[None], *np.ones((2, 10**5, 0))), 10**5)
    assert _kind(found) == "Toeplitz"
    assert np.linalg.norm(found.entries[0] - expected) <= found.error < 1e-11
    banded = banded_rows(np.tri(10**5, 8) / np.arange(1.0, 9.0))
    assert strategies.strategy(banded, 10**5).error == 0.0


@given(random_recursions.recursions(), st.integers(1, 4))
@settings(max_examples=examples(60), deadline=None)
def test_columns_and_bands_are_those_of_the_matrix(rows: NoiseRecursion, width: int) -> None:
    found = strategies.strategy(rows, rows.num_rounds)
    matrix = dense(found)
    n = len(matrix)
    lags = [i - j for i in range(n) for j in range(n) if matrix[i, j]]
    assert strategies.num_bands(found) == 1 + max(lags)
    compact = strategies.compact_columns(found, width)
    for j in range(n):
        column = np.append(matrix[j:, j], np.zeros(width))
        np.testing.assert_array_equal(compact[j], column[:width])
    chosen = tuple(range(0, n, 2))
    np.testing.assert_array_equal(strategies.columns(found, chosen), matrix[:, chosen])


def test_the_bounds_of_errors_are_those_of_their_proofs() -> None:
    """Terms that are far above the errors of small matrices, term by term."""
    unit = Fraction(1, 2**53)
    gammas = {k: float(k * unit / (1 - k * unit)) for k in range(1, 40)}
    for k, gamma in gammas.items():
        assert strategies._gamma(k) == pytest.approx(gamma, rel=1e-14, abs=0.0)
    assert strategies._gamma(2**51) == pytest.approx(1.0 / 3.0, rel=1e-14)
    assert strategies._error(0.25) == pytest.approx(0.2525 / 0.7475, rel=1e-14)
    assert strategies._error(0.49) < np.inf == strategies._error(0.5)
    # A matrix whose product with its inverse is exact, and the residual is roundings alone.
    noising, terms = np.array([[2.0, 0.0], [1.0, 4.0]]), 3
    sizes = 2.0 * np.abs(noising)
    found, largest = strategies._inverted(noising, sizes, terms)
    magnitudes = np.array([[0.5, 0.0], [0.125, 0.25]])
    product = magnitudes @ sizes
    norm = np.sqrt(np.max(np.sum(product, axis=1)) * np.max(np.sum(product, axis=0)))
    assert largest == np.hypot(0.5, 0.125)
    assert found.error == pytest.approx(1.01 * gammas[6] * norm * largest, rel=1e-9, abs=0.0)
    # A residual, and an entry that counts as zero.
    near = np.array([[1.0, 0.0], [1e-14, 1.0]])
    found, largest = strategies._inverted(near, np.abs(near), 0)
    assert found.is_dense
    np.testing.assert_array_equal(found.entries, np.eye(2))
    assert found.error == pytest.approx(1.01 * gammas[3] + 1e-14, rel=1e-9, abs=0.0)
    # Series: at least the sum of magnitudes of the product less one.
    series, wrong = np.array([1.0, -0.5, 0.25]), np.array([1.0, 0.5, 0.0, 0.5])
    exact = np.convolve(series, wrong)[:4] - np.eye(4)[0]
    residual = strategies._residual_of_series(wrong, series)
    assert residual == pytest.approx(np.sum(np.abs(exact)), rel=1e-13)
    right = np.array([1.0, 0.5, 0.0, -0.125])
    sizes_of_series = 1.625 * np.linalg.norm(series) + 2.0 * np.linalg.norm(right) * 1.75
    epsilon = float(np.finfo(np.longdouble).eps) / 2.0
    least = np.sqrt(4.0) * 16.0 * 3 * epsilon * sizes_of_series
    assert least <= strategies._residual_of_series(right, series) <= 1.5 * least


def test_errors_and_sizes_are_refused_beyond_their_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each limit is met by what equals it."""
    for size, is_known in ((1e-100, True), (1e100, True), (9e-101, False), (1.1e100, False)):
        rows = banded_rows(np.full((1, 1), size))
        if is_known:
            assert strategies.strategy(rows, 1).error == 0.0
        else:
            with refuses("singular"):
                strategies.strategy(rows, 1)
    for error, is_known in ((1e-6, True), (1.001e-6, False), (np.nan, False)):
        found = Strategy(np.ones((1, 1)), 1, error)
        monkeypatch.setattr(strategies, "_of_kind", lambda *_, found=found: (found, 1.0))
        if is_known:
            assert strategies.strategy(dense_rows(np.ones((1, 1))), 1) is found
        else:
            with refuses("singular"):
                strategies.strategy(dense_rows(np.ones((1, 1))), 1)


def test_a_scaling_of_the_rows_scales_c_and_its_errors() -> None:
    """So that no bound is of another unit than C."""
    none = np.ones((4, 0))
    state = StateSpaceNoise(
        np.array([0, 1, 0, 1]),
        np.array([1.0, 3.0]),
        np.ones((2, 1)),
        np.zeros((2, 1), np.int64),
        np.full((2, 1), 0.5),
        np.ones((2, 1)),
    )
    one_phase = dataclasses.replace(state, phases=np.zeros(4, np.int64))
    low_rank = WindowNoise(4, np.array([[2.0, 1.0]]), np.full((4, 1), 0.5), np.full((4, 1), 0.25))
    ones = np.ones(4)
    for rows in (state, one_phase):
        # Feedbacks are of rows of noise: they grow as the rows fall.
        less = dataclasses.replace(rows, gains=rows.gains / 64, feedbacks=64 * rows.feedbacks)
        less = dataclasses.replace(less, outputs=rows.outputs / 64)
        _is_scaled(rows, less)
    _is_scaled(low_rank, dataclasses.replace(low_rank, row_scales=ones / 64))
    _is_scaled(
        low_rank,
        dataclasses.replace(low_rank, window=ones[:2] / [[32, 64]], left=low_rank.left / 64),
    )
    series = WindowNoise(4, np.array([[2.0, 1.0]]), none, none, ones)
    _is_scaled(series, dataclasses.replace(series, window=series.window / 64))
    _is_scaled(series, dataclasses.replace(series, row_scales=ones / 64))
    toeplitz = toeplitz_rows(4, np.array([2.0, 1.0]), ones)
    _is_scaled(toeplitz, dataclasses.replace(toeplitz, row_scales=ones / 64))
    inverse = np.tri(4) + np.eye(4)
    _is_scaled(dense_rows(inverse), dense_rows(inverse / 64))


def _is_scaled(rows: NoiseRecursion, less: NoiseRecursion) -> None:
    """C of one is 64 times that of the other: a power of two, so that nothing is rounded."""
    one, other = (strategies.strategy(each, 4) for each in (rows, less))
    np.testing.assert_array_equal(64.0 * dense(one), dense(other))
    assert 64.0 * one.error == pytest.approx(other.error, rel=1e-12, abs=0.0)
    assert one.error > 0.0


def test_sizes_of_low_rank_rows_are_sums_of_magnitudes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding is relative to the terms of an entry, which may cancel."""
    seen: list[Any] = []

    def inverted(*given: Any) -> tuple[Strategy, float]:
        seen.append(given)
        return Strategy(np.eye(2), 2, 0.0, is_dense=True), 1.0

    monkeypatch.setattr(strategies, "_inverted", inverted)
    left, right = np.array([[1.0, -1.0]] * 2), np.array([[3.0, 2.0]] * 2)
    strategies.strategy(WindowNoise(2, np.array([[2.0]]), left, right, np.array([1.0, -4.0])), 2)
    ((noising, sizes, terms),) = seen
    np.testing.assert_allclose(noising, [[3.0, 0.0], [-4.0, -12.0]], rtol=1e-15)
    np.testing.assert_allclose(sizes, [[7.0, 0.0], [20.0, 28.0]], rtol=1e-15)
    assert terms == 2 + 8


def test_columns_of_long_scaled_matrices() -> None:
    """Their bands would take too much memory, so that they are coefficients and scales."""
    found = Strategy(np.array([[2.0, 1.0]]), 3, 0.0, column_scales=np.array([1.0, 3.0, 5.0]))
    truth = np.array([[2.0, 0.0, 0.0], [1.0, 6.0, 0.0], [0.0, 3.0, 10.0]])
    np.testing.assert_array_equal(strategies.columns(found, (0, 1, 2)), truth)
    np.testing.assert_array_equal(
        strategies.compact_columns(found, 2), [[2.0, 1.0], [6.0, 3.0], [10.0, 0.0]]
    )
