"""Workloads against what they stand for: the iterates of SGD with momentum."""

import hashlib
import json
from typing import Any

import numpy as np
import pytest
import scipy.linalg
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mf_aggregators import workloads
from tests.examples import examples
from tests.mf_aggregators import brute_force
from tests.mf_aggregators.toeplitz_cases import trainings
from tests.refusals import refuses


def test_prefix_sum_sums_prefixes() -> None:
    gradients = np.array([3.0, -1.0, 5.0, 2.0])
    np.testing.assert_array_equal(workloads.prefix_sum(4) @ gradients, np.cumsum(gradients))


@given(trainings(14), st.integers(0, 2**32 - 1))
@settings(max_examples=examples(150), deadline=None)
def test_workloads_give_what_training_does(workload: workloads.Workload, seed: int) -> None:
    n = workload.num_rounds
    gradients = np.random.default_rng(seed).normal(size=(n, 3))
    rates = np.ones(n) if workload.learning_rates is None else np.array(workload.learning_rates)
    models = brute_force.models_of_algorithm_2(gradients, workload.momentum, rates)
    matrix = workload.matrix()
    np.testing.assert_allclose(-matrix @ gradients, models, atol=1e-9)
    assert np.array_equal(
        matrix, workloads.momentum_sgd(n, workload.momentum, workload.learning_rates)
    )
    assert np.array_equal(matrix, np.tril(matrix))
    assert workload.largest_entry() >= np.max(np.abs(matrix)) * (1.0 - 1e-12)
    described = json.loads(json.dumps(workload.to_dict()))
    assert workloads.Workload.described(described, n) == workload
    _check_structure(workload, matrix)


def _check_structure(workload: workloads.Workload, matrix: np.ndarray) -> None:
    """What a workload knows of its structure holds for its matrix."""
    n = len(matrix)
    bands, coefficients = workload.inverse_bands(), workload.coefficients()
    inverse = sum(np.diag(bands[lag:, lag], -lag) for lag in range(bands.shape[1]))
    np.testing.assert_allclose(inverse @ matrix, np.eye(n), atol=1e-9)
    if coefficients is not None:
        dense = scipy.linalg.toeplitz(coefficients, np.zeros(n))
        np.testing.assert_allclose(dense, matrix, rtol=1e-10)
    product = np.eye(n)
    for step in workload.recursions():
        steps = np.diag(1.0 / step.added) - np.diag(step.kept[1:] / step.added[1:], -1)
        product = np.linalg.solve(steps, product)
    np.testing.assert_allclose(product, matrix, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "parameters", "says"),
    [
        ("prefix_sum", {"momentum": 0.5}, "momentum"),
        ("prefix_sum", {"learning_rates": (1.0, 1.0, 1.0)}, "learning_rates"),
        ("toeplitz", {}, "prefix_sum"),
    ],
)
def test_parameters_out_of_their_range_are_refused(
    name: str, parameters: dict[str, Any], says: str
) -> None:
    with refuses(says):
        workloads.Workload(name, 3, **parameters)


def test_fingerprints_tell_parameters_apart() -> None:
    for n in (12, 5000):
        each = [
            workloads.Workload("momentum_sgd", n, 0.9),
            workloads.Workload("momentum_sgd", n, 0.8),
            workloads.Workload("momentum_sgd", n, 0.9, tuple(np.linspace(1.0, 0.5, n))),
        ]
        assert len({workload.fingerprint() for workload in each}) == len(each)
        assert each[1].has_fingerprint(each[1].fingerprint())
        assert not each[1].has_fingerprint(each[2].fingerprint())


def test_momentum_sgd_without_momentum_is_the_prefix_sum() -> None:
    np.testing.assert_array_equal(workloads.momentum_sgd(5, 0.0), workloads.prefix_sum(5))


def test_descriptions_name_the_same_workloads() -> None:
    description = {"name": "momentum_sgd", "momentum": 0.5, "learning_rates": [1.0, 0.5, 0.25]}
    np.testing.assert_array_equal(
        workloads.Workload.described(description, 3).matrix(),
        workloads.momentum_sgd(3, 0.5, [1.0, 0.5, 0.25]),
    )
    np.testing.assert_array_equal(
        workloads.Workload.described({"name": "prefix_sum"}, 3).matrix(), workloads.prefix_sum(3)
    )


@pytest.mark.parametrize(
    "description",
    [
        {},
        {"name": "sgd"},
        {"name": "prefix_sum", "momentum": 0.5},
    ],
)
def test_descriptions_that_name_no_workload_are_refused(description: dict[str, object]) -> None:
    with refuses("workload"):
        workloads.Workload.described(description, 3).matrix()


@pytest.mark.parametrize(
    "description",
    [
        {"name": "momentum_sgd", "weight_decay": 0.1},
        {"name": "toeplitz", "first_column": [1.0, 0.5, 0.25]},
    ],
)
def test_workloads_of_version_2_0_0_that_left_are_refused_with_advice(
    description: dict[str, object],
) -> None:
    with refuses("--workload=prefix_sum"):
        workloads.Workload.described(description, 3)


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
    for bands in (workload.inverse_bands(), workloads.checked(matrix).inverse_bands()):
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
    assert workloads.checked(matrix).inverse_bands() is None
    # Nearly a prefix sum is none.
    other = np.tri(20)
    other[19, 0] = 1.0 + 1e-6
    assert workloads.checked(other).inverse_bands() is None


def test_fingerprints_of_many_rounds_need_no_matrix() -> None:
    many = workloads.Workload("prefix_sum", 100_000)
    other = workloads.Workload("momentum_sgd", 100_000, 0.9)
    assert many.fingerprint() != other.fingerprint()
    same = workloads.Workload("momentum_sgd", 100_000, 0.0, (3.0,) * 100_000)
    assert many.fingerprint() == same.fingerprint()


def test_fingerprints_of_version_0_5_0_are_known() -> None:
    """They were of the matrix, for any number of rounds."""
    workload = workloads.Workload("prefix_sum", 4200)
    scaled = np.ascontiguousarray(workload.matrix(), dtype=np.float32)
    earlier = hashlib.sha256(scaled.tobytes()).hexdigest()[:16]
    assert workload.fingerprint() != earlier
    assert workload.has_fingerprint(earlier)
    assert workload.has_fingerprint(workload.fingerprint())
    assert not workload.has_fingerprint("0" * 16)
    assert not workload.has_fingerprint(None)
