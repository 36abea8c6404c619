"""BLT matrices with scaled rows and columns: errors, gradients, and how good they are."""

import importlib
from typing import Any

import numpy as np
import pytest
import scipy.linalg
from hypothesis import given, settings
from hypothesis import strategies as st

from mf_aggregators import checkpoints
from mf_aggregators.factorizations import BltFactorization, _scaled_blt, blt, optimal
from mf_aggregators.factorizations.factorization import ExtensionError
from mf_aggregators.factorizations.searches import RoundError
from mf_aggregators.factorizations.toeplitz import PatternOfRounds
from mf_aggregators.participation import MinSeparation, SingleParticipation
from mf_aggregators.workloads import Workload
from tests.examples import examples
from tests.refusals import refuses

_blt = importlib.import_module("mf_aggregators.factorizations.blt")
_ONCE = SingleParticipation()


@st.composite
def _cases(draw: st.DrawFn) -> tuple[Workload, np.ndarray, np.ndarray]:
    """A workload, distances of decays, and logarithms of row scales."""
    num_rounds = draw(st.integers(1, 24))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rates = tuple(generator.uniform(0.2, 2.0, num_rounds)) if draw(st.booleans()) else None
    workload = Workload("momentum_sgd", num_rounds, draw(st.sampled_from([0.0, 0.5, 0.9])), rates)
    pairs = draw(st.integers(1, 3))
    distances = np.cumsum(generator.uniform(0.05, 1.0, 2 * pairs))
    distances *= 0.95 / distances[-1]
    logs = generator.uniform(-1.0, 1.0, len(_scaled_blt.knots(num_rounds)))
    return workload, distances, logs


def _states(distances: np.ndarray, num_rounds: int) -> _scaled_blt.States:
    decays = 1.0 - distances
    made = BltFactorization(num_rounds, decays[0::2], decays[1::2])
    return _scaled_blt.States(
        made.strategy_coefficients(), made.inverse_decays, made.inverse_output_scales
    )


def _dense(states: _scaled_blt.States, scales: np.ndarray) -> np.ndarray:
    toeplitz = scipy.linalg.toeplitz(states.strategy, np.zeros_like(states.strategy))
    matrix = scales[:, np.newaxis] * toeplitz
    return np.asarray(matrix / np.linalg.norm(matrix, axis=0))


@given(_cases())
@settings(max_examples=examples(100), deadline=None)
def test_squared_rows_are_those_of_the_dense_decoder(
    case: tuple[Workload, np.ndarray, np.ndarray],
) -> None:
    workload, distances, logs = case
    states = _states(distances, workload.num_rounds)
    scales = _scaled_blt.row_scales(logs, workload.num_rounds)
    norms = _scaled_blt.column_norms(states.strategy, scales)
    training = _scaled_blt.Training.of(workload)

    found = _scaled_blt.Rows(states, training, scales, norms).squared

    decoder = workload.matrix() @ np.linalg.inv(_dense(states, scales))
    np.testing.assert_allclose(found, np.sum(np.square(decoder), axis=1), rtol=1e-9)


@given(_cases(), st.sampled_from(["mean", "weights", "max"]), st.integers(1, 4))
@settings(max_examples=examples(60), deadline=None)
def test_the_gradient_is_that_of_differences(
    case: tuple[Workload, np.ndarray, np.ndarray], kind: str, most: int
) -> None:
    workload, distances, logs = case
    n = workload.num_rounds
    weights = np.linspace(1.0, 2.0, n)
    error = RoundError.of(weights if kind == "weights" else kind, n)
    separation = -(-n // most)
    pattern = PatternOfRounds(n, separation, min(most, -(-n // separation)))
    order = 16.0 if kind == "max" else None
    training = _scaled_blt.Training.of(workload)

    def value(states: _scaled_blt.States, logs: np.ndarray) -> float:
        return _scaled_blt.log_error(states, logs, training, pattern, error, order)[0]

    states = _states(distances, n)
    _, slopes = _scaled_blt.log_error(states, logs, training, pattern, error, order)

    def difference(name: str, place: int) -> float:
        both = []
        for step in (1e-5, -1e-5):
            moved = {"logs": logs, **vars(states)}
            moved[name] = moved[name] + step * np.eye(len(moved[name]))[place]
            free = moved.pop("logs")
            both.append(value(_scaled_blt.States(**moved), free))
        return (both[0] - both[1]) / 2e-5

    for name in ("strategy", "decays", "weights", "logs"):
        slope = getattr(slopes, name)
        for place in {0, len(slope) // 2, len(slope) - 1}:
            expected = difference(name, place)
            assert slope[place] == pytest.approx(expected, rel=1e-4, abs=1e-6), (name, place)


def test_errors_are_near_those_of_the_best_matrix() -> None:
    for n in (64, 256):
        mean = blt(n, 4, equal_column_norms=True)
        worst = blt(n, 4, equal_column_norms=True, error="max")
        for each in (mean, worst):
            norms = np.linalg.norm(each.strategy_matrix(), axis=0)
            np.testing.assert_allclose(norms, 1.0, rtol=1e-12)
            assert each.sensitivity(_ONCE).is_exact
        best = optimal(n)
        assert best.rmse(n, _ONCE) < mean.rmse(n, _ONCE) * 1.00001 < 1.001 * best.rmse(n, _ONCE)
        assert worst.max_error(n, _ONCE) < 0.965 * blt(n, 4, error="max").max_error(n, _ONCE)
        assert worst.max_error(n, _ONCE) < mean.max_error(n, _ONCE)


def test_errors_of_the_papers_rounds_are_below_those_that_are_known() -> None:
    # A Toeplitz matrix behind a diagonal one has rmse 3.2224 at best, and a maximum of 3.3169.
    assert blt(2052, 4, equal_column_norms=True).rmse(2052, _ONCE) < 3.1755
    worst = blt(2052, 4, equal_column_norms=True, error="max")
    assert worst.max_error(2052, _ONCE) < 3.1890


def test_more_rounds_than_the_first_search_begin_with_its_scales() -> None:
    logs = np.log(np.arange(1.0, 1.0 + len(_scaled_blt.knots(100))))
    longer = _scaled_blt.refined_logs(logs, 1000)
    assert len(longer) == len(_scaled_blt.knots(1000))
    half = len(logs) // 2
    np.testing.assert_array_equal(longer[:half], logs[:half])
    np.testing.assert_array_equal(longer[-half:], logs[-half:])
    # At n = 8,192 the error of all matrices is at least ln(n) / pi + 0.701.
    found = blt(8192, 3, equal_column_norms=True)
    assert np.log(8192) / np.pi + 0.701 < found.rmse(8192, _ONCE) < np.log(8192) / np.pi + 0.762


def test_clients_that_return_have_a_proved_sensitivity() -> None:
    schema = MinSeparation(12, 3)
    found = blt(36, 2, schema, equal_column_norms=True)
    plain = blt(36, 2, schema)
    assert found.rmse(36, schema) < 1.15 * plain.rmse(36, schema)
    C = found.strategy_matrix()
    worst = max(
        np.linalg.norm(np.sum(C[:, list(rounds)], axis=1))
        for rounds in ([0, 12, 24], [5, 17, 29], [11, 23, 35], [0, 12, 35], [0, 23, 35])
    )
    assert worst <= found.sensitivity(schema).value * (1.0 + 1e-12)


def test_scales_are_saved_and_cannot_be_extended(tmp_path: object) -> None:
    found = blt(20, 2, equal_column_norms=True)
    checkpoints.save(found, f"{tmp_path}/scaled")
    loaded = checkpoints.load(f"{tmp_path}/scaled")
    assert loaded.has_same_matrix(found)
    assert not loaded.has_same_matrix(blt(20, 2))
    assert loaded.parameters["equal_column_norms"] is True
    with refuses("scales", "extended", error=ExtensionError):
        found.extended(40)


@pytest.mark.parametrize("name", ["row_scales", "column_norms"])
@pytest.mark.parametrize(
    "wrong", [None, np.zeros(3), np.ones(2), np.array([1.0, np.nan, 1.0]), np.full(3, 1e51)]
)
def test_bad_scales_are_refused(name: str, wrong: np.ndarray | None) -> None:
    ones = np.ones(3)
    scales: dict[str, Any] = {"row_scales": ones, "column_norms": ones, name: wrong}
    with refuses(name):
        BltFactorization(3, np.array([0.5]), np.array([0.2]), **scales)
