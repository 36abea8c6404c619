"""Toeplitz matrices with scaled rows and columns: errors, gradients, and how good they are."""

import dataclasses
import importlib
from fractions import Fraction
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mf_aggregators import checkpoints
from mf_aggregators.factorizations import (
    BandedInverseFactorization,
    BltFactorization,
    _scaled,
    banded_inverse,
    blt,
    optimal,
)
from mf_aggregators.factorizations.factorization import ExtensionError
from mf_aggregators.factorizations.toeplitz import Problem
from mf_aggregators.kernel.rows import strategy_of
from mf_aggregators.participation import (
    FixedEpochOrder,
    MinSeparation,
    Participation,
    SingleParticipation,
)
from mf_aggregators.workloads import Workload
from tests.examples import examples
from tests.mf_aggregators import brute_force
from tests.refusals import refuses

_inverse = importlib.import_module("mf_aggregators.factorizations.banded_inverse")
_ONCE = SingleParticipation()
_KINDS = pytest.mark.parametrize("kind", ["blt", "banded_inverse"])


def _plain(generator: np.random.Generator, kind: str, num_rounds: int) -> _scaled.ScaledToeplitz:
    """A matrix T of either kind, of random numbers."""
    if kind == "blt":
        distances = np.cumsum(generator.uniform(0.05, 1.0, 2 * generator.integers(1, 4)))
        decays = 1.0 - distances * 0.95 / distances[-1]
        return BltFactorization(num_rounds, decays[0::2], decays[1::2])
    bands = generator.integers(1, num_rounds + 1)
    series = np.append(1.0, -generator.uniform(-0.1, 0.5, bands - 1))
    return BandedInverseFactorization(num_rounds, series)


def _scaled_by(plain: _scaled.ScaledToeplitz, logs: np.ndarray) -> _scaled.ScaledToeplitz:
    rows = _scaled._row_scales(logs, plain.num_rounds)
    norms = np.linalg.norm(rows[:, np.newaxis] * plain.strategy_matrix(), axis=0)
    return dataclasses.replace(plain, row_scales=rows, column_norms=norms)


@st.composite
def _cases(draw: st.DrawFn, most: int = 24) -> tuple[Workload, _scaled.ScaledToeplitz, np.ndarray]:
    """A workload, a matrix without scales, and logarithms of row scales."""
    num_rounds = draw(st.integers(1, most))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rates = tuple(generator.uniform(0.2, 2.0, num_rounds)) if draw(st.booleans()) else None
    workload = Workload("momentum_sgd", num_rounds, draw(st.sampled_from([0.0, 0.5, 0.9])), rates)
    plain = _plain(generator, draw(st.sampled_from(["blt", "banded_inverse"])), num_rounds)
    return workload, plain, generator.uniform(-1.0, 1.0, len(_scaled._knots(num_rounds)))


@given(_cases(), st.integers(1, 60))
@settings(max_examples=examples(200), deadline=None)
def test_squared_rows_are_those_of_the_dense_decoder(
    case: tuple[Workload, _scaled.ScaledToeplitz, np.ndarray], entries: int
) -> None:
    workload, plain, logs = case
    scaled = _scaled_by(plain, logs)
    scales = np.interp(np.arange(plain.num_rounds), _scaled._knots(plain.num_rounds), logs)
    matrix = np.exp(scales)[:, np.newaxis] * plain.strategy_matrix()
    matrix = matrix / np.linalg.norm(matrix, axis=0)
    np.testing.assert_allclose(scaled.strategy_matrix(), matrix, rtol=1e-12)
    decoder = workload.matrix() @ np.linalg.inv(matrix)
    # Blocks of a few columns.
    with mock.patch.object(_inverse, "_ENTRIES_AT_A_TIME", entries):
        found = scaled.squared_decoder_rows(workload)
    np.testing.assert_allclose(found, np.sum(np.square(decoder), axis=1), rtol=1e-8)


@given(_cases(), st.sampled_from(["mean", "weights", "max"]), st.integers(1, 4), st.integers(1, 60))
@settings(max_examples=examples(100), deadline=None)
def test_the_gradient_is_that_of_differences(
    case: tuple[Workload, _scaled.ScaledToeplitz, np.ndarray], kind: str, most: int, entries: int
) -> None:
    workload, plain, logs = case
    n = workload.num_rounds
    separation = -(-n // most)
    schema = FixedEpochOrder(min(most, -(-n // separation)), separation)
    error: Any = np.linspace(1.0, 2.0, n) if kind == "weights" else kind
    problem = Problem.of(workload, schema, error, 1)
    seen = []

    def kept(function: Any, start: np.ndarray, **options: Any) -> Any:
        seen.append(function)
        return mock.Mock(x=start, jac=np.zeros(1), status=0, get=lambda name, default: default)

    with mock.patch.object(_scaled, "minimise", kept):
        plain.scaled(problem)
    with mock.patch.object(_inverse, "_ENTRIES_AT_A_TIME", entries):
        value, slope = seen[0](logs)
        assert np.isfinite(value)
        for place in {0, len(slope) // 2, len(slope) - 1}:
            step = 1e-5 * np.eye(len(logs))[place]
            expected = (seen[0](logs + step)[0] - seen[0](logs - step)[0]) / 2e-5
            assert slope[place] == pytest.approx(expected, rel=1e-4, abs=1e-6), place
    if kind == "mean" and schema.most_participations(n) == 1:
        # The error of a scaled matrix, whose columns have norm one.
        assert value == pytest.approx(
            2.0 * np.log(_scaled_by(plain, logs).rmse(workload, _ONCE)), rel=1e-9, abs=1e-9
        )


@_KINDS
def test_no_signs_of_a_client_do_more_than_the_sensitivity(kind: str) -> None:
    """All patterns and signs of runs of up to ten rounds, and C of the rows in exact numbers."""
    for num_rounds in (1, 2, 5, 8, 10):
        generator = np.random.default_rng(num_rounds)
        plain = _plain(generator, kind, num_rounds)
        logs = generator.uniform(-1.0, 1.0, len(_scaled._knots(num_rounds)))
        made = _scaled_by(plain, logs)
        rows = made.noise_recursion()
        noise = made.noise_rows(np.eye(num_rounds))
        exact = _inverted([[Fraction(each) for each in row] for row in noise])
        np.testing.assert_allclose(made.strategy_matrix(), exact, rtol=1e-9, atol=1e-12)
        found = strategy_of(rows, num_rounds).columns(tuple(range(num_rounds)))
        np.testing.assert_allclose(found, exact, rtol=1e-9, atol=1e-12)
        schemas: list[Participation] = [_ONCE, MinSeparation(2, 3), FixedEpochOrder(2, 3)]
        for schema in schemas:
            if schema.most_participations(num_rounds) > num_rounds:
                continue
            worst = brute_force.scalar_sensitivity(exact, schema)
            assert worst <= made.sensitivity(schema).value * (1.0 + 1e-12)
        assert made.sensitivity(_ONCE).value == pytest.approx(1.0, rel=1e-12)


def _inverted(matrix: list[list[Fraction]]) -> np.ndarray:
    """The exact inverse of a lower-triangular matrix."""
    size = len(matrix)
    found = [[Fraction(0)] * size for _ in range(size)]
    for j in range(size):
        for i in range(j, size):
            total = Fraction(int(i == j)) - sum(matrix[i][m] * found[m][j] for m in range(j, i))
            found[i][j] = total / matrix[i][i]
    return np.array(found, np.float64)


def test_errors_are_near_those_of_the_best_matrix() -> None:
    for n in (64, 256):
        best = optimal(n)
        for mean, worst, plain in (
            (
                blt(n, 4, equal_column_norms=True),
                blt(n, 4, equal_column_norms=True, error="max"),
                blt(n, 4, error="max"),
            ),
            (
                banded_inverse(n, n // 2, equal_column_norms=True),
                banded_inverse(n, n // 2, equal_column_norms=True, error="max"),
                banded_inverse(n, n // 2, error="max"),
            ),
        ):
            for each in (mean, worst):
                norms = np.linalg.norm(each.strategy_matrix(), axis=0)
                np.testing.assert_allclose(norms, 1.0, rtol=1e-9)
                assert each.sensitivity(_ONCE).is_exact
            assert best.rmse(n, _ONCE) < mean.rmse(n, _ONCE) * 1.00001
            assert mean.rmse(n, _ONCE) < 1.0015 * best.rmse(n, _ONCE)
            assert worst.max_error(n, _ONCE) < 0.965 * plain.max_error(n, _ONCE)
            assert worst.max_error(n, _ONCE) < mean.max_error(n, _ONCE)


def test_errors_of_the_papers_rounds_are_below_those_that_are_known() -> None:
    # A Toeplitz matrix behind a diagonal one has rmse 3.2224 at best, and a maximum of 3.3169.
    assert blt(2052, 4, equal_column_norms=True).rmse(2052, _ONCE) < 3.1775
    worst = blt(2052, 4, equal_column_norms=True, error="max")
    assert worst.max_error(2052, _ONCE) < 3.1920
    inverse = banded_inverse(2052, 16, equal_column_norms=True)
    assert inverse.rmse(2052, _ONCE) < 0.975 * banded_inverse(2052, 16).rmse(2052, _ONCE)


@pytest.mark.parametrize("num_rounds", [16, 31, 100, 1001])
def test_scales_are_carried_by_the_distance_over_the_rounds(num_rounds: int) -> None:
    """A power of the distance at the end, and a constant at the beginning, are kept."""
    fewer = 1024
    places = _scaled._knots(fewer)
    logs = np.where(places < fewer // 2, 0.0, 0.4 * np.log(fewer - places))
    found = _scaled._carried(logs, fewer, fewer * num_rounds)
    longer = _scaled._knots(fewer * num_rounds)
    assert len(found) == len(longer)
    is_end = longer >= fewer * num_rounds // 2
    distances = fewer * num_rounds - longer[is_end]
    expected = 0.4 * np.log(distances / num_rounds)
    far = distances < fewer * num_rounds // 4
    np.testing.assert_allclose(found[is_end][far], expected[far], atol=0.01)
    np.testing.assert_allclose(found[~is_end][: len(found) // 3], 0.0, atol=1e-12)
    # Odd numbers of rounds have one round in the middle.
    odd = _scaled._carried(logs, fewer, 2047)
    assert len(odd) == len(_scaled._knots(2047))


@pytest.mark.parametrize(("error", "most"), [("mean", 0.748), ("max", 0.81)])
def test_scales_of_fewer_rounds_serve_more(error: Any, most: float) -> None:
    """At any number of rounds the error of all matrices is at least ln(n) / pi + 0.701."""
    n = 100_000
    found = blt(n, 5, equal_column_norms=True, error=error)
    errors = found.errors(Workload("prefix_sum", n), _ONCE)
    reached = errors.max_error if error == "max" else errors.rmse
    assert 0.701 < reached - np.log(n) / np.pi < most


def test_scales_for_clients_that_return_are_near_none() -> None:
    schema = MinSeparation(12, 3)
    found = blt(36, 2, schema, equal_column_norms=True)
    assert found.rmse(36, schema) < 1.15 * blt(36, 2, schema).rmse(36, schema)


@_KINDS
def test_scales_are_saved_and_cannot_be_extended(kind: str, tmp_path: object) -> None:
    make: Any = blt if kind == "blt" else banded_inverse
    found = make(20, 2, equal_column_norms=True)
    checkpoints.save(found, f"{tmp_path}/scaled")
    loaded = checkpoints.load(f"{tmp_path}/scaled")
    assert loaded.has_same_matrix(found)
    assert not loaded.has_same_matrix(make(20, 2))
    assert loaded.parameters["equal_column_norms"] is True
    with refuses("extended", error=ExtensionError):
        found.extended(40)


@_KINDS
@pytest.mark.parametrize("name", ["row_scales", "column_norms"])
@pytest.mark.parametrize(
    "wrong", [None, np.zeros(3), np.ones(2), np.array([1.0, np.nan, 1.0]), np.full(3, 1e51)]
)
def test_bad_scales_are_refused(kind: str, name: str, wrong: np.ndarray | None) -> None:
    ones = np.ones(3)
    plain = _plain(np.random.default_rng(0), kind, 3)
    scales: dict[str, Any] = {"row_scales": ones, "column_norms": ones, name: wrong}
    with refuses(name):
        dataclasses.replace(plain, **scales)
