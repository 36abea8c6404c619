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
from mf_aggregators.workloads import prefix_sum
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
def test_the_noise_is_that_of_the_dense_product(factorization: Factorization) -> None:
    for rounds in (_NUM_ROUNDS, 6):
        sums = prefix_sum(_NUM_ROUNDS)[:rounds]
        norms = np.append(_NORMS[:rounds], np.zeros(_NUM_ROUNDS - rounds))
        moved = sums @ np.diag(norms) @ factorization.noising_matrix()
        constant = sums @ factorization.noising_matrix()
        found = clip_drift.ClipDrift.of(factorization, _NORMS[:rounds]).equivalent_norm
        expected = np.linalg.norm(moved) / np.linalg.norm(constant)
        assert found == pytest.approx(expected, rel=1e-10)


def test_a_constant_norm_is_its_own_and_costs_nothing() -> None:
    drift = clip_drift.ClipDrift.of(blt(_NUM_ROUNDS, 2), np.full(_NUM_ROUNDS, 0.7))
    assert drift.equivalent_norm == pytest.approx(0.7)
    assert drift.independent_norm == pytest.approx(0.7)
    assert drift.cost == pytest.approx(0.0, abs=1e-12)


def test_drift_costs_correlated_noise_and_nothing_of_independent_noise() -> None:
    assert clip_drift.ClipDrift.of(identity(_NUM_ROUNDS), _NORMS).cost == 0.0
    drift = clip_drift.ClipDrift.of(banded(prefix_sum(_NUM_ROUNDS), 6), _NORMS)
    assert drift.cost > 0.1


@pytest.mark.parametrize("norms", [[], np.ones(_NUM_ROUNDS + 1), np.ones((2, 2))])
def test_norms_of_other_rounds_are_refused(norms: np.ndarray) -> None:
    with refuses("norms"):
        clip_drift.ClipDrift.of(identity(_NUM_ROUNDS), norms)
