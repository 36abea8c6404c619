"""The number of bands: against brute force, closed forms and BandMF's printed choices."""

import math
import pathlib
from typing import Any

import numpy as np
import pytest

from mf_aggregators import accounting, factorizations, workloads
from mf_aggregators.catalogue import RELATIVE_GAP_OF_PLANS
from mf_aggregators.participation import (
    SingleParticipation,
    sampling_scheme,
)
from reproduction import best_bands
from tests.refusals import refuses

_SIZES: dict[str, Any] = {
    "candidates": [2],
    "num_rounds": 6,
    "population": 90,
    "clients_per_round": 10,
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tmp_path_factory.mktemp("cache")


@pytest.mark.long
def test_all_bands_are_compared_as_by_brute_force(cache: pathlib.Path) -> None:
    """sigma(b)^2 L(b) from the accountant and a dense matrix, for every b."""
    epsilon = 4.0
    sizes: dict[str, Any] = {"num_rounds": 4, "population": 60, "clients_per_round": 10}
    choices = best_bands.compare(
        epsilon, 1e-6, **sizes, candidates=range(1, 5), cache_directory=cache
    )
    assert [choice.num_bands for choice in choices] == list(range(1, 5))
    squared = []
    for choice in choices:
        sigma = choice.noise_multiplier
        # The least that gives the target, which decreases in sigma.
        for factor, is_enough in ((1.001, True), (0.98, False)):
            found = sampling_scheme("poisson", **sizes, num_bands=choice.num_bands).epsilon(
                factor * sigma, 1e-6
            )
            assert (found <= epsilon) == is_enough
        matrix = factorizations.banded(workloads.prefix_sum(4), choice.num_bands)
        strategy = matrix.strategy_matrix()
        decoder = np.linalg.solve(strategy.T, np.tri(4).T).T
        norm = np.max(np.linalg.norm(strategy, axis=0))
        squared.append(sigma**2 * norm**2 * np.sum(decoder**2))
        # Both matrices are within a certified gap of one optimum.
        assert choice.effective_rmse == pytest.approx(
            math.sqrt(squared[-1] / 4) / 10, rel=RELATIVE_GAP_OF_PLANS
        )
    best = best_bands.best(choices)
    assert squared[best.num_bands - 1] == pytest.approx(min(squared), rel=RELATIVE_GAP_OF_PLANS)


@pytest.mark.short_cases(1)
@pytest.mark.parametrize(
    ("epsilon", "epochs", "printed"),
    [
        (0.25, 4, 4),
        pytest.param(0.5, 2, 8, marks=pytest.mark.long),
        pytest.param(1.0, 4, 8, marks=pytest.mark.long),
        (2.0, 8, 8),
        pytest.param(8.0, 16, 16, marks=pytest.mark.long),
        (16.0, 8, 128),
    ],
)
def test_bands_of_the_paper(epsilon: float, epochs: int, printed: int) -> None:
    """BandMF Table 3: 1024 rounds, delta 1e-6, the best number of bands among powers of two.

    Column-normalised Toeplitz matrices stand for the optimal ones, within 2 % of them;
    ``reproduction/best_bands.py`` computes all cells.
    """
    sizes: dict[str, Any] = {
        "num_rounds": 1024,
        "population": 1024 * 1000 // epochs,
        "clients_per_round": 1000,
    }
    workload = workloads.Workload("prefix_sum", 1024)

    def rmse(num_bands: int) -> float:
        matrix = factorizations.toeplitz(1024, num_bands, equal_column_norms=True)
        return matrix.rmse(workload, SingleParticipation())

    sigma = sampling_scheme("poisson", **sizes, num_bands=printed).noise_multiplier(epsilon, 1e-6)
    for other in (printed // 2, 2 * printed):
        if other * epochs <= 1024:
            # So little noise that its error is no larger is too little for the target.
            same_error = sigma * rmse(printed) / rmse(other)
            found = sampling_scheme("poisson", **sizes, num_bands=other).epsilon(same_error, 1e-6)
            assert found > epsilon


def test_nothing_is_amplified_at_the_most_bands(cache: pathlib.Path) -> None:
    """Where b B = m, every client of a group is in every batch of it."""
    (choice,) = best_bands.compare(
        2.0,
        1e-6,
        num_rounds=12,
        population=40,
        clients_per_round=10,
        candidates=[4],
        cache_directory=cache,
    )
    assert choice.noise_multiplier == pytest.approx(
        math.sqrt(3) * accounting.noise_multiplier(2.0, 1e-6), rel=1e-6
    )


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"epsilon": 0.0}, ["epsilon", "zero"]),
        ({"epsilon": math.nan}, ["epsilon", "finite"]),
        ({"delta": 1.0}, ["delta"]),
        ({"candidates": [7]}, ["num_rounds"]),
        ({"candidates": [0]}, ["num_bands"]),
        ({"candidates": [6], "population": 59}, ["population", "59"]),
        ({"population": 9}, ["population", "9"]),
    ],
)
def test_bad_arguments_are_refused(changes: dict[str, Any], names: list[str]) -> None:
    arguments = {"epsilon": 2.0, "delta": 1e-6, **_SIZES, **changes}
    with refuses(*names):
        best_bands.compare(arguments.pop("epsilon"), arguments.pop("delta"), **arguments)
