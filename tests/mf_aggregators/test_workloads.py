"""Workloads against what they stand for: the iterates of SGD with momentum."""

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mf_aggregators import workloads
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
    ],
)
def test_bad_momentum_or_rates_are_refused(momentum: float, rates: list[float] | None) -> None:
    with pytest.raises(ValueError, match=r"momentum|learning_rates"):
        workloads.momentum_sgd(3, momentum, rates)


@given(st.integers(1, 40), st.floats(0.0, 0.99), st.booleans(), st.integers(0, 2**32 - 1))
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
        assert bands.shape[1] <= 3
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
