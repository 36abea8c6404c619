"""Workloads against what they stand for: the iterates of SGD with momentum."""

import hashlib
import json
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import scipy.signal
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mf_aggregators import workloads
from tests.examples import examples
from tests.refusals import refuses


def test_prefix_sum_sums_prefixes() -> None:
    gradients = np.array([3.0, -1.0, 5.0, 2.0])
    np.testing.assert_array_equal(workloads.prefix_sum(4) @ gradients, np.cumsum(gradients))


@given(
    st.integers(1, 12),
    st.floats(0.0, 0.99),
    st.integers(0, 2**32 - 1),
)
def test_momentum_sgd_gives_the_iterates_of_the_algorithm(
    num_rounds: int, momentum: float, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    rates = generator.uniform(0.1, 2.0, num_rounds)
    gradients = generator.normal(size=(num_rounds, 3))
    model, velocity, iterates = np.zeros(3), np.zeros(3), []
    for gradient, rate in zip(gradients, rates, strict=True):
        velocity = momentum * velocity + gradient
        model = model - rate * velocity
        iterates.append(model)
    workload = workloads.momentum_sgd(num_rounds, momentum, rates)
    np.testing.assert_allclose(-workload @ gradients, iterates, atol=1e-9)
    assert workload.dtype == np.float64
    assert np.array_equal(workload, np.tril(workload))


def _trained(
    gradients: np.ndarray, momentum: float, rates: np.ndarray, weight_decay: float
) -> np.ndarray:
    """The models of SGD with decoupled weight decay, from zero, one a round."""
    model, velocity, models = np.zeros(gradients.shape[1]), np.zeros(gradients.shape[1]), []
    for gradient, rate in zip(gradients, rates, strict=True):
        velocity = momentum * velocity + gradient
        model = model - rate * velocity - rate * weight_decay * model
        models.append(model)
    return np.array(models)


@st.composite
def _training(draw: st.DrawFn) -> workloads.Workload:
    """Momentum, learning rates, weight decay and averages, each present or absent."""
    num_rounds = draw(st.integers(1, 14))
    numbers = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rates = numbers.uniform(0.1, 2.0, num_rounds) if draw(st.booleans()) else None
    return workloads.Workload(
        "momentum_sgd",
        num_rounds,
        draw(st.sampled_from([0.0, 0.3, 0.95])),
        None if rates is None else tuple(rates),
        weight_decay=draw(st.sampled_from([0.0, 0.01, 0.45])),
        average_decay=draw(st.sampled_from([0.0, 0.1, 0.9])),
    )


@given(_training(), st.integers(0, 2**32 - 1))
@settings(max_examples=examples(150), deadline=None)
def test_workloads_give_what_training_does(workload: workloads.Workload, seed: int) -> None:
    """Averages are formed here one by one, and start at the initial model, zero."""
    n = workload.num_rounds
    gradients = np.random.default_rng(seed).normal(size=(n, 3))
    rates = np.ones(n) if workload.learning_rates is None else np.array(workload.learning_rates)
    models = _trained(gradients, workload.momentum, rates, workload.weight_decay)
    outputs, average = [], np.zeros(3)
    for model in models:
        average = workload.average_decay * average + (1.0 - workload.average_decay) * model
        outputs.append(average)
    matrix = workload.matrix()
    np.testing.assert_allclose(-matrix @ gradients, outputs, atol=1e-9)
    assert np.array_equal(matrix, np.tril(matrix))
    assert workload.largest_entry() >= np.max(np.abs(matrix)) * (1.0 - 1e-12)
    described = json.loads(json.dumps(workload.to_dict()))
    assert workloads.describe(described, n) == workload
    _check_structure(workload, matrix)


def _check_structure(workload: workloads.Workload, matrix: np.ndarray) -> None:
    """What a workload knows of its structure holds for its matrix."""
    n = len(matrix)
    bands, coefficients = workload.inverse_bands(), workload.coefficients()
    if bands is not None:
        inverse = sum(np.diag(bands[lag:, lag], -lag) for lag in range(bands.shape[1]))
        np.testing.assert_allclose(inverse @ matrix, np.eye(n), atol=1e-9)
    if coefficients is not None:
        dense = scipy.linalg.toeplitz(coefficients, np.zeros(n))
        np.testing.assert_allclose(dense, matrix, rtol=1e-10)
    product, recursions = np.eye(n), workload.recursions()
    assert (recursions is None) == (workload.name == "toeplitz")
    if recursions is not None:
        for step in recursions:
            product = step.applied(product)
        np.testing.assert_allclose(product, matrix, atol=1e-12)


@given(
    st.lists(st.floats(-2.0, 2.0), max_size=12),
    st.sampled_from([-3.0, 0.5, 1.0]),
    st.booleans(),
)
@settings(max_examples=examples(100), deadline=None)
def test_toeplitz_workloads_have_their_coefficients(
    later: list[float], first: float, has_few_bands: bool
) -> None:
    """And an inverse of few bands where the reciprocal of the series has few coefficients."""
    column = np.array([first, *later])
    if has_few_bands:
        taps = np.array([1.0, -0.5, 0.25][: len(column)]) * first
        impulse = np.eye(len(column))[0]
        column = scipy.signal.lfilter([1.0], taps, impulse)
    workload = workloads.Workload("toeplitz", len(column), first_column=tuple(column))
    matrix = workload.matrix()
    assert workload.coefficients() == pytest.approx(column, abs=0.0)
    gradients = np.linspace(-1.0, 2.0, len(column))
    expected = np.convolve(column, gradients)[: len(column)]
    # Terms cancel.
    np.testing.assert_allclose(matrix @ gradients, expected, atol=1e-12)
    assert workload.largest_entry() == np.max(np.abs(matrix))
    described = json.loads(json.dumps(workload.to_dict()))
    assert workloads.describe(described, len(column)) == workload
    if has_few_bands:
        bands = workload.inverse_bands()
        assert bands is not None
        assert bands.shape[1] <= 3
        _check_structure(workload, matrix)


def test_toeplitz_workloads_of_dense_inverses_have_no_bands() -> None:
    column = np.ones(40)
    column[20:] = 0.5
    workload = workloads.Workload("toeplitz", 40, first_column=tuple(column))
    assert workload.inverse_bands() is None
    assert workloads.inverse_bands(workload.matrix()) is None


@pytest.mark.parametrize(
    ("name", "parameters", "says"),
    [
        ("momentum_sgd", {"weight_decay": -0.1}, "weight_decay"),
        ("momentum_sgd", {"weight_decay": 1.0}, "weight_decay"),
        ("momentum_sgd", {"weight_decay": 0.5, "learning_rates": (1.0, 2.0, 1.0)}, "weight_decay"),
        ("momentum_sgd", {"weight_decay": float("nan")}, "weight_decay"),
        ("momentum_sgd", {"average_decay": 1.0}, "average_decay"),
        ("momentum_sgd", {"first_column": (1.0, 1.0, 1.0)}, "first_column"),
        ("prefix_sum", {"weight_decay": 0.1}, "weight_decay"),
        ("toeplitz", {}, "first_column"),
        ("toeplitz", {"first_column": (1.0, 1.0)}, "first_column"),
        ("toeplitz", {"first_column": (0.0, 1.0, 1.0)}, "first_column"),
        ("toeplitz", {"first_column": (1.0, float("inf"), 1.0)}, "first_column"),
        ("toeplitz", {"first_column": (1.0, 1.0, 1.0), "momentum": 0.5}, "momentum"),
    ],
)
def test_parameters_out_of_their_range_are_refused(
    name: str, parameters: dict[str, Any], says: str
) -> None:
    with refuses(says):
        workloads.Workload(name, 3, **parameters)


def test_fingerprints_tell_parameters_apart() -> None:
    def training(num_rounds: int, **parameters: Any) -> workloads.Workload:
        return workloads.Workload("momentum_sgd", num_rounds, 0.9, **parameters)

    for n in (12, 5000):
        column = tuple(1.0 / np.arange(1.0, n + 1.0))
        each = [
            training(n),
            training(n, weight_decay=0.1),
            training(n, average_decay=0.5),
            training(n, average_decay=0.25),
            workloads.Workload("toeplitz", n, first_column=column),
        ]
        assert len({workloads.fingerprint(workload) for workload in each}) == len(each)
        assert workloads.has_fingerprint(each[3], workloads.fingerprint(each[3]))
        assert not workloads.has_fingerprint(each[3], workloads.fingerprint(each[4]))


def test_momentum_sgd_without_momentum_is_the_prefix_sum() -> None:
    np.testing.assert_array_equal(workloads.momentum_sgd(5, 0.0), workloads.prefix_sum(5))


def test_descriptions_name_the_same_workloads() -> None:
    description = {"name": "momentum_sgd", "momentum": 0.5, "learning_rates": [1.0, 0.5, 0.25]}
    np.testing.assert_array_equal(
        workloads.describe(description, 3).matrix(),
        workloads.momentum_sgd(3, 0.5, [1.0, 0.5, 0.25]),
    )
    np.testing.assert_array_equal(
        workloads.describe({"name": "prefix_sum"}, 3).matrix(), workloads.prefix_sum(3)
    )


@pytest.mark.parametrize(
    "description", [{}, {"name": "sgd"}, {"name": "prefix_sum", "momentum": 0.5}]
)
def test_descriptions_that_name_no_workload_are_refused(description: dict[str, object]) -> None:
    with refuses("workload"):
        workloads.describe(description, 3).matrix()


@pytest.mark.parametrize("num_rounds", [0, -1, 1.5, "3", True])
def test_rounds_must_be_a_positive_integer(num_rounds: object) -> None:
    with refuses("num_rounds"):
        workloads.prefix_sum(num_rounds)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("momentum", "rates"),
    [
        (1.0, None),
        (-0.1, None),
        (float("nan"), None),
        (0.9, [1.0, 1.0]),
        (0.9, [1.0, 0.0, 1.0]),
        (0.9, [1.0, float("inf"), 1.0]),
        (0.9, [1e-60, 1.0, 1e60]),
    ],
)
def test_bad_momentum_or_rates_are_refused(momentum: float, rates: list[float] | None) -> None:
    with pytest.raises(ValueError, match=r"momentum|learning_rates"):
        workloads.momentum_sgd(3, momentum, rates)


@given(st.integers(1, 40), st.floats(0.0, 0.99), st.booleans(), st.integers(0, 2**32 - 1))
@example(3, 1e-12, True, 2)
@settings(max_examples=60, deadline=None)
def test_the_inverse_of_a_workload_is_banded(
    num_rounds: int, momentum: float, has_rates: bool, seed: int
) -> None:
    rates = tuple(np.random.default_rng(seed).uniform(0.1, 2.0, num_rounds)) if has_rates else None
    workload = workloads.Workload("momentum_sgd", num_rounds, momentum, rates)
    matrix = workload.matrix()
    assert workload.largest_entry() == pytest.approx(np.max(matrix), rel=1e-12)
    for bands in (workload.inverse_bands(), workloads.inverse_bands(matrix)):
        assert bands is not None
        assert bands.shape[1] <= (3 if momentum > 1e-6 else 8)
        inverse = np.zeros((num_rounds, num_rounds))
        for lag in range(bands.shape[1]):
            assert not np.any(bands[:lag, lag])
            inverse += np.diag(bands[lag:, lag], -lag)
        np.testing.assert_allclose(inverse @ matrix, np.eye(num_rounds), atol=1e-9)


def test_dense_inverses_and_singular_arrays_have_no_bands() -> None:
    generator = np.random.default_rng(0)
    matrix = np.tril(generator.normal(size=(20, 20))) + 3.0 * np.eye(20)
    assert workloads.inverse_bands(matrix) is None
    # Nearly a prefix sum is none.
    other = np.tri(20)
    other[19, 0] = 1.0 + 1e-6
    assert workloads.inverse_bands(other) is None


def test_fingerprints_of_many_rounds_need_no_matrix() -> None:
    many = workloads.Workload("prefix_sum", 100_000)
    other = workloads.Workload("momentum_sgd", 100_000, 0.9)
    assert workloads.fingerprint(many) != workloads.fingerprint(other)
    same = workloads.Workload("momentum_sgd", 100_000, 0.0, (3.0,) * 100_000)
    assert workloads.fingerprint(many) == workloads.fingerprint(same)


def test_fingerprints_of_version_0_5_0_are_known() -> None:
    """They were of the matrix, for any number of rounds."""
    workload = workloads.Workload("prefix_sum", 4200)
    scaled = np.ascontiguousarray(workload.matrix(), dtype=np.float32)
    earlier = hashlib.sha256(scaled.tobytes()).hexdigest()[:16]
    assert workloads.fingerprint(workload) != earlier
    assert workloads.has_fingerprint(workload, earlier)
    assert workloads.has_fingerprint(workload, workloads.fingerprint(workload))
    assert not workloads.has_fingerprint(workload, "0" * 16)
    assert not workloads.has_fingerprint(workload, None)
