"""Sensitivities of Toeplitz matrices from their coefficients, against enumeration."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mf_aggregators import sensitivity
from mf_aggregators.linear_algebra import power_series
from mf_aggregators.participation import (
    MinSeparation,
    Participation,
    SingleParticipation,
)
from tests.examples import examples
from tests.mf_aggregators import brute_force
from tests.mf_aggregators.toeplitz_cases import dense, schemas
from tests.refusals import refuses

_RELATIVE = 1e-12
_KINDS = ["any", "positive", "falling", "negative falling", "whole", "nearly falling", "late fall"]


def _coefficients(kind: str, count: int, seed: int) -> np.ndarray:
    generator = np.random.default_rng(seed)
    series = generator.normal(size=count)
    falling = np.sort(np.abs(series))[::-1]
    if kind == "positive":
        return np.abs(series)
    if kind == "falling":
        return falling
    if kind == "negative falling":
        return -falling
    if kind == "whole":
        return np.round(2.0 * series)
    if kind == "nearly falling":
        return falling * (1.0 + 0.1 * series)
    if kind == "late fall":
        start = int(generator.integers(count + 1))
        return np.concatenate([np.abs(generator.normal(size=start)), falling[start:]])
    return series


@st.composite
def _problems(draw: st.DrawFn, largest: int) -> tuple[str, np.ndarray, int, Participation]:
    num_rounds = draw(st.integers(1, largest))
    kind = draw(st.sampled_from(_KINDS))
    count = draw(st.integers(1, num_rounds))
    series = _coefficients(kind, count, draw(st.integers(0, 2**32 - 1)))
    return kind, series, num_rounds, draw(schemas(num_rounds))


@given(_problems(largest=9))
@settings(max_examples=examples(400), deadline=None)
def test_never_below_enumeration_and_exact_where_it_says_so(
    problem: tuple[str, np.ndarray, int, Participation],
) -> None:
    kind, series, num_rounds, participation = problem
    computed = sensitivity.from_toeplitz_coefficients(series, num_rounds, participation)
    truth = brute_force.scalar_sensitivity(dense(series, num_rounds), participation)
    assert computed.value >= truth * (1 - _RELATIVE)
    if computed.is_exact:
        assert computed.value == pytest.approx(truth, rel=_RELATIVE, abs=1e-300)
    most = participation.most_participations(num_rounds)
    if kind in ("falling", "negative falling") or most == 1:
        assert computed.is_exact
    else:
        # Fewer bands than the separation are in this as well.
        late = series[participation.separation_in(num_rounds) :]
        if (np.all(series >= 0.0) and np.all(np.diff(late) <= 0.0)) or not len(late):
            assert computed.is_exact


@given(_problems(largest=7), st.integers(2, 3), st.integers(0, 2**32 - 1))
@settings(max_examples=examples(80), deadline=None)
def test_never_below_the_change_of_vector_contributions(
    problem: tuple[str, np.ndarray, int, Participation], dimension: int, seed: int
) -> None:
    _, series, num_rounds, participation = problem
    computed = sensitivity.from_toeplitz_coefficients(series, num_rounds, participation)
    generator = np.random.default_rng(seed)
    strategy = dense(series, num_rounds)
    for pattern in brute_force.patterns(participation, num_rounds):
        change = brute_force.vector_change(strategy, pattern, dimension, generator, steps=20)
        assert change <= computed.value * (1 + 1e-9)


@given(st.integers(1, 60), st.data())
@settings(max_examples=examples(150), deadline=None)
def test_no_pattern_beats_the_first_one_if_coefficients_fall_from_the_separation_on(
    num_rounds: int, data: st.DataObject
) -> None:
    seed = data.draw(st.integers(0, 2**32 - 1))
    separation = data.draw(st.integers(1, num_rounds + 1))
    limit = data.draw(st.one_of(st.none(), st.integers(1, num_rounds + 1)))
    generator = np.random.default_rng(seed)
    series = np.sort(generator.random(num_rounds) ** 4)[::-1]
    series[:separation] = generator.random(len(series[:separation]))
    strategy = dense(series, num_rounds)
    participation = MinSeparation(separation, limit)
    computed = sensitivity.from_toeplitz_coefficients(series, num_rounds, participation)
    most = participation.most_participations(num_rounds)
    first = np.sum(strategy[:, ::separation][:, :most], axis=1)
    assert computed.value == pytest.approx(float(np.linalg.norm(first)), rel=1e-12)
    for _ in range(5):
        gaps = separation + generator.geometric(0.7, size=most) - 1
        pattern = generator.integers(num_rounds) + np.cumsum(gaps) - gaps[0]
        pattern = pattern[pattern < num_rounds]
        change = float(np.linalg.norm(np.sum(strategy[:, pattern], axis=1)))
        assert change <= computed.value * (1 + 1e-12)


def test_all_ones_have_the_closed_form_of_squared_counts() -> None:
    num_rounds = 1000
    computed = sensitivity.from_toeplitz_coefficients(
        np.ones(num_rounds), num_rounds, MinSeparation(1)
    )
    assert computed.is_exact
    assert computed.value**2 == pytest.approx(
        num_rounds * (num_rounds + 1) * (2 * num_rounds + 1) / 6, rel=1e-12
    )


def test_a_rise_below_the_separation_is_exact() -> None:
    # Columns 0 and 1 of [[1, 0], [2, 1]] with equal signs change C x by sqrt(10).
    computed = sensitivity.from_toeplitz_coefficients([1.0, 2.0], 2, MinSeparation(1))
    assert computed.is_exact
    assert computed.value == pytest.approx(np.sqrt(10.0), rel=1e-15)


def test_a_rise_from_the_separation_on_is_a_bound() -> None:
    series = np.array([1.0, 0.0, 1.0, 0.0])
    computed = sensitivity.from_toeplitz_coefficients(series, 4, MinSeparation(1, 2))
    assert not computed.is_exact
    assert "upper bound" in computed.theorem
    # Columns 0 and 2, and not 0 and 1, are the worst.
    truth = brute_force.scalar_sensitivity(dense(series, 4), MinSeparation(1, 2))
    assert truth == pytest.approx(np.sqrt(5.0), rel=1e-15)
    assert computed.value >= truth


@given(_problems(largest=24))
@settings(max_examples=examples(150), deadline=None)
def test_bounds_are_no_looser_than_a_larger_matrix_that_falls(
    problem: tuple[str, np.ndarray, int, Participation],
) -> None:
    _, series, num_rounds, participation = problem
    computed = sensitivity.from_toeplitz_coefficients(series, num_rounds, participation)
    larger = np.maximum.accumulate(np.abs(series)[::-1])[::-1]
    bound = sensitivity.from_toeplitz_coefficients(larger, num_rounds, participation)
    assert computed.value <= bound.value * (1 + 1e-12)


@pytest.mark.parametrize("most", [2, 5, 100])
@pytest.mark.parametrize("num_rounds", [10**5, 10**6])
def test_bounds_at_many_rounds_are_not_below_a_pattern_for_rounding(
    num_rounds: int, most: int
) -> None:
    """A rise too small to matter leaves the first pattern, summed here without differences."""
    series = np.concatenate([[1.0], np.full(num_rounds - 1, 1e-3)])
    series[num_rounds // 2] += 1e-12
    computed = sensitivity.from_toeplitz_coefficients(series, num_rounds, MinSeparation(1, most))
    entries = np.zeros(num_rounds)
    for start in range(most):
        entries[start:] += series[: num_rounds - start]
    change = float(np.linalg.norm(entries))
    assert not computed.is_exact
    assert change * (1 - 1e-12) <= computed.value <= change * (1 + 1e-6)


def test_alternating_signs_are_not_taken_for_falling() -> None:
    series = np.array([1.0, -0.9, 0.8])
    computed = sensitivity.from_toeplitz_coefficients(series, 6, MinSeparation(1))
    assert not computed.is_exact
    truth = brute_force.scalar_sensitivity(dense(series, 6), MinSeparation(1))
    assert computed.value >= truth


@pytest.mark.parametrize(("bump", "is_exact"), [(1e-15, True), (1e-9, False)])
def test_only_rounding_is_forgiven(bump: float, is_exact: bool) -> None:
    series = np.array([1.0, 0.5, 0.25, 0.25 + bump, 0.125])
    computed = sensitivity.from_toeplitz_coefficients(series, 5, MinSeparation(1))
    assert computed.is_exact is is_exact
    truth = brute_force.scalar_sensitivity(dense(series, 5), MinSeparation(1))
    assert computed.value >= truth * (1 - 1e-15)


@pytest.mark.parametrize("participation", [SingleParticipation(), MinSeparation(1)])
@pytest.mark.parametrize("scale", [1e-300, 1e-170, 1e170, 1e300])
def test_scales_that_overflow_when_squared(scale: float, participation: Participation) -> None:
    series = np.array([1.0, 0.5, 0.25])
    plain = sensitivity.from_toeplitz_coefficients(series, 5, participation)
    scaled = sensitivity.from_toeplitz_coefficients(series * scale, 5, participation)
    assert scaled.value / scale == pytest.approx(plain.value, rel=1e-12)


def test_zeros_have_sensitivity_zero() -> None:
    computed = sensitivity.from_toeplitz_coefficients(np.zeros(4), 6, MinSeparation(2))
    assert (computed.value, computed.is_exact) == (0.0, True)


def test_trailing_zeros_are_no_bands() -> None:
    series = np.array([1.0, -2.0, 0.0, 0.0])
    computed = sensitivity.from_toeplitz_coefficients(series, 6, MinSeparation(2))
    assert computed.is_exact
    assert computed.value == pytest.approx(np.sqrt(15.0), rel=1e-14)


def test_a_million_rounds_lose_no_digits_to_the_sums() -> None:
    """The window of two participations is a difference of long sums."""
    num_rounds = 10**6
    series = np.concatenate([[1.0], np.full(num_rounds - 1, 1e-3)])
    computed = sensitivity.from_toeplitz_coefficients(series, num_rounds, MinSeparation(1, 2))
    # Entries 1, 1 + c, and 2 c from there.
    squared = 1.0 + 1.001**2 + 4e-6 * (num_rounds - 2)
    assert computed.value == pytest.approx(float(np.sqrt(squared)), rel=1e-9)


@given(st.integers(1, 40), st.integers(1, 45), st.integers(0, 2**32 - 1), st.data())
@settings(max_examples=examples(150), deadline=None)
def test_pattern_sums_and_their_adjoint_are_a_matrix_and_its_transpose(
    num_rounds: int, separation: int, seed: int, data: st.DataObject
) -> None:
    most = data.draw(st.integers(1, -(-num_rounds // separation)))
    generator = np.random.default_rng(seed)
    column, values = generator.normal(size=(2, num_rounds))
    shifts = np.sum([np.eye(num_rounds, k=-separation * j) for j in range(most)], axis=0)
    np.testing.assert_allclose(
        sensitivity.pattern_sum(column, separation, most), shifts @ column, atol=1e-12
    )
    np.testing.assert_allclose(
        sensitivity.pattern_sum_adjoint(values, separation, most), shifts.T @ values, atol=1e-12
    )


@pytest.mark.parametrize(
    "coefficients",
    [
        np.array([]),
        np.ones((2, 2)),
        np.ones(6),
        np.array([1.0, np.nan]),
        np.array([1.0, np.inf]),
        np.float64(1.0),
    ],
    ids=["none", "matrix", "too many", "NaN", "infinite", "number"],
)
def test_what_are_no_coefficients_is_refused(coefficients: np.ndarray) -> None:
    with refuses("coefficients"):
        sensitivity.from_toeplitz_coefficients(coefficients, 5, MinSeparation(2))


def test_something_else_than_a_schema_or_rounds_is_refused() -> None:
    with refuses("SingleParticipation", error=TypeError):
        sensitivity.from_toeplitz_coefficients([1.0], 5, "single")  # type: ignore[arg-type]
    with refuses("num_rounds"):
        sensitivity.from_toeplitz_coefficients([1.0], 0, MinSeparation(2))


def test_the_square_root_of_the_prefix_sum_at_a_million_rounds() -> None:
    num_rounds = 10**6
    series = power_series.square_root_coefficients(num_rounds)
    computed = sensitivity.from_toeplitz_coefficients(series, num_rounds, MinSeparation(10**5))
    shifted = np.zeros(num_rounds)
    for start in range(0, num_rounds, 10**5):
        shifted[start:] += series[: num_rounds - start]
    assert computed.is_exact
    assert computed.value == pytest.approx(float(np.linalg.norm(shifted)), rel=1e-12)
