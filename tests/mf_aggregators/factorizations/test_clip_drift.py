"""What clip norms that move do to errors, against dense matrices and simulated noise."""

import numpy as np
import pytest

from mf_aggregators.factorizations import (
    Factorization,
    banded,
    clip_drift,
    identity,
    tree_aggregation,
)
from mf_aggregators.workloads import momentum_sgd, prefix_sum
from tests.mf_aggregators.small_mechanisms import blt
from tests.refusals import refuses

_NUM_ROUNDS = 12
_NORMS = np.exp(np.sin(np.arange(_NUM_ROUNDS)))


@pytest.mark.parametrize(
    "factorization",
    [
        identity(_NUM_ROUNDS),
        banded(prefix_sum(_NUM_ROUNDS), 3),
        blt(_NUM_ROUNDS, 2),
        tree_aggregation(_NUM_ROUNDS),
    ],
    ids=str,
)
@pytest.mark.parametrize("workload", [None, momentum_sgd(_NUM_ROUNDS, 0.5)])
def test_squared_rows_are_those_of_the_dense_product(
    factorization: Factorization, workload: np.ndarray | None
) -> None:
    matrix = prefix_sum(_NUM_ROUNDS) if workload is None else workload
    dense = matrix @ np.diag(_NORMS) @ factorization.noising_matrix()
    found = clip_drift.squared_rows(factorization, _NORMS, workload)
    np.testing.assert_allclose(found, np.sum(np.square(dense), axis=1), rtol=1e-10)
    if workload is None:
        half = clip_drift.squared_rows(factorization, _NORMS[:6])
        np.testing.assert_allclose(half, found[:6], rtol=1e-10)


def test_a_constant_norm_is_its_own_and_costs_nothing() -> None:
    drift = clip_drift.measure(blt(_NUM_ROUNDS, 2), np.full(_NUM_ROUNDS, 0.7))
    assert drift.equivalent_norm == pytest.approx(0.7)
    assert drift.independent_norm == pytest.approx(0.7)
    assert drift.cost == pytest.approx(0.0, abs=1e-12)


def test_drift_costs_correlated_noise_and_nothing_of_independent_noise() -> None:
    assert clip_drift.measure(identity(_NUM_ROUNDS), _NORMS).cost == 0.0
    drift = clip_drift.measure(banded(prefix_sum(_NUM_ROUNDS), 6), _NORMS)
    # By definition, of the roots of mean squares: of noise that is drawn.
    assert drift.cost > 0.1
    noising = banded(prefix_sum(_NUM_ROUNDS), 6).noising_matrix()
    z = np.random.default_rng(0).normal(size=(_NUM_ROUNDS, 20_000))
    rows = noising @ z
    drawn = np.cumsum(_NORMS[:, np.newaxis] * rows, axis=0)
    constant = np.cumsum(rows, axis=0)
    ratio = float(np.sqrt(np.mean(np.square(drawn)) / np.mean(np.square(constant))))
    assert drift.equivalent_norm == pytest.approx(ratio, rel=0.02)


@pytest.mark.parametrize("norms", [[], np.ones(_NUM_ROUNDS + 1), np.ones((2, 2))])
def test_norms_of_other_rounds_are_refused(norms: np.ndarray) -> None:
    with refuses("norm"):
        clip_drift.measure(identity(_NUM_ROUNDS), norms)
