"""Accounting and factorizations work where a program raises floating-point errors."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import mf_aggregators as mfa
from mf_aggregators import accounting
from mf_aggregators.factorizations import Factorization, noise_rows
from mf_aggregators.participation import (
    SCHEMES,
    FixedEpochOrder,
    MinSeparation,
    SamplingScheme,
    SingleParticipation,
    sampling_scheme,
)
from tests.mf_aggregators.scheme_rates import true_positive_rate as _true_positive_rate

_ROUNDS = 16


@pytest.fixture(autouse=True)
def _raised() -> Iterator[None]:
    with np.errstate(all="raise"):
        yield


@pytest.mark.short_cases(4)
@pytest.mark.parametrize("delta", [3e-12, 1e-6, 0.5])
@pytest.mark.parametrize("sigma", [0.2, 1.0, 1e4, 1e8])
def test_epsilons(sigma: float, delta: float) -> None:
    assert accounting.epsilon(sigma, delta) >= accounting.exact_epsilon(sigma, delta)
    accounting.true_positive_rate(sigma, np.linspace(0.0, 1.0, 5))
    if sigma <= 1e4:
        accounting.composed_epsilon(
            [accounting.event(sigma), accounting.event(3.0)], max(delta, 1e-9)
        )


@pytest.mark.parametrize("target", [1e-6, 1.0, 30.0, 1e4])
def test_noise_multipliers(target: float) -> None:
    found = accounting.noise_multiplier(target, 1e-6)
    assert accounting.epsilon(found, 1e-6) <= target


@pytest.mark.short_cases(2)
@pytest.mark.parametrize("sigma", [0.7, 1.0, 20.0])
@pytest.mark.parametrize("name", tuple(SCHEMES))
def test_sampled_runs(name: str, sigma: float) -> None:
    sizes = {"num_rounds": _ROUNDS, "num_bands": 2, "population": 400, "clients_per_round": 10}
    scheme: SamplingScheme = sampling_scheme(name, **sizes)
    matrix = np.eye(_ROUNDS) + 0.5 * np.eye(_ROUNDS, k=-1) if not scheme.has_groups else None
    assert scheme.epsilon(sigma, 1e-4, matrix) >= 0.0
    _true_positive_rate(scheme, sigma, np.array([0.0, 0.01, 1.0]), matrix)
    if scheme.has_groups:
        assert scheme.noise_multiplier(3.0, 1e-4) > 0.0
        accounting.composed_epsilon([scheme.event(sigma), accounting.event(3.0)], 1e-4)


_MADE: dict[str, Callable[[Any], Factorization]] = {
    "identity": lambda _: mfa.factorizations.identity(_ROUNDS),
    "tree": lambda _: mfa.factorizations.tree_aggregation(_ROUNDS),
    "optimal": mfa.factorizations.optimal,
    "banded": lambda workload: mfa.factorizations.banded(workload, num_bands=4),
    "banded, worst": lambda workload: mfa.factorizations.banded(workload, 4, error="max"),
    "toeplitz": mfa.factorizations.toeplitz,
    "blt": lambda workload: mfa.factorizations.blt(workload, num_buffers=2),
    "blt, returning": lambda workload: mfa.factorizations.blt(
        workload, num_buffers=4, participation=MinSeparation(4)
    ),
    "banded inverse": lambda workload: mfa.factorizations.banded_inverse(workload, num_bands=3),
}


@pytest.mark.parametrize("name", _MADE)
@pytest.mark.parametrize(
    "workload",
    [mfa.workloads.prefix_sum(_ROUNDS), mfa.workloads.momentum_sgd(_ROUNDS, momentum=0.9)],
    ids=["prefix sum", "momentum"],
)
def test_factorizations(name: str, workload: Any) -> None:
    made = _MADE[name](workload)
    for schema in (SingleParticipation(), FixedEpochOrder(2, 4), MinSeparation(4)):
        assert made.rmse(workload, schema) <= made.max_error(workload, schema)
    np.testing.assert_array_equal(made.noising_matrix().shape[0], _ROUNDS)
    noise_rows.apply(made.noise_recursion(), np.ones((_ROUNDS, 1)))
    if made.can_extend and made.mechanism != "identity":
        assert made.extended(_ROUNDS + 4).num_rounds == _ROUNDS + 4


def test_states_that_vanish() -> None:
    """Decays to the thousandth power are no normal floats."""
    made = mfa.factorizations.BltFactorization(2000, np.array([0.9, 0.3]), np.array([0.7, 0.1]))
    assert made.sensitivity(MinSeparation(100)).value > 1.0
    assert made.rmse(2000, SingleParticipation()) > 0.0
