"""The number of bands: against brute force, closed forms and BandMF's printed choices."""

import importlib.metadata
import itertools
import math
import pathlib
import types
from typing import Any

import numpy as np
import pytest

from mf_aggregators import accounting, factorizations, version, workloads
from mf_aggregators.catalogue import RELATIVE_GAP_OF_PLANS
from mf_aggregators.factorizations import BandedFactorization
from mf_aggregators.kernel import certificate as certificates
from mf_aggregators.participation import (
    MinSeparationSampling,
    PoissonSampling,
    SingleParticipation,
    certificate_search,
    sampling_scheme,
)
from mf_aggregators.participation.certificate_search import (
    Certification,
    MechanismBudget,
)
from mf_aggregators.planning import band_choice, planner, plans
from tests.refusals import refuses

_SIZES: dict[str, Any] = {"num_rounds": 6, "population": 90, "clients_per_round": 10}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tmp_path_factory.mktemp("cache")


@pytest.mark.long
def test_all_bands_are_compared_as_by_brute_force(cache: pathlib.Path) -> None:
    """sigma(b)^2 L(b) from the accountant and a dense matrix, for every b."""
    epsilon = 4.0
    sizes: dict[str, Any] = {"num_rounds": 4, "population": 60, "clients_per_round": 10}
    choices = band_choice.compare(
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
    best = band_choice.best(choices)
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
    (choice,) = band_choice.compare(
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


@pytest.mark.long
def test_the_grid_is_powers_of_two_and_the_most(cache: pathlib.Path) -> None:
    assert plans.powers_of_two(1) == [1]
    assert plans.powers_of_two(8) == [1, 2, 4, 8]
    assert plans.powers_of_two(342) == [1, 2, 4, 8, 16, 32, 64, 128, 256, 342]
    assert plans.most_bands(12, 10_000, 10) == 12
    assert plans.most_bands(12, 59, 10) == 5
    choices = band_choice.compare(4.0, 1e-6, **_SIZES, cache_directory=cache)
    assert [choice.num_bands for choice in choices] == [1, 2, 4, 6]


def test_a_kept_noise_multiplier_is_for_what_it_follows_from(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Estimates are not taken for certified numbers, nor another matrix's for this one's."""
    made = itertools.count(1.0)
    for kind in (MinSeparationSampling, PoissonSampling, certificate_search):
        name = "estimated" if kind is certificate_search else "calibrated"
        monkeypatch.setattr(kind, name, lambda *unused, **also_unused: next(made))
    for kind in (MinSeparationSampling, PoissonSampling):
        # Each number that is read is checked, and these keep any target.
        kept = types.SimpleNamespace(epsilon=0.0)
        monkeypatch.setattr(kind, "amplified", lambda *unused, kept=kept, **also_unused: kept)
    scheme = sampling_scheme("min_separation", **_SIZES, num_bands=2)
    poisson = sampling_scheme("poisson", **_SIZES, num_bands=2)
    bands = np.column_stack([np.ones(6), np.full(6, 0.5)])
    bands[0, 1] = 0.0
    first, second = BandedFactorization(bands), BandedFactorization(bands * [1.0, 0.5])

    def all_of() -> list[float]:
        return [
            planner.calibrated(
                matrix, each, epsilon, delta, tmp_path, is_estimate=rough
            ).noise_multiplier
            for each, epsilon, delta, matrix, rough in (
                (scheme, 4.0, 1e-6, first, False),
                (scheme, 4.0, 1e-6, first, True),
                (scheme, 4.0, 1e-6, second, False),
                (scheme, 4.0, 1e-6, second, True),
                (scheme, 4.0, 1e-5, first, False),
                (scheme, 5.0, 1e-6, first, False),
                (poisson, 4.0, 1e-6, first, False),
                (poisson, 4.0, 1e-5, first, False),
            )
        ]

    assert all_of() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
    assert all_of() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
    # Another version of the accounting, or of what it is built on, computes anew.
    monkeypatch.setattr(certificate_search, "ACCOUNTING_VERSION", "another one")
    assert min(all_of()) == 9.0
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "another one")
    assert min(all_of()) == 17.0
    monkeypatch.setattr(version, "__version__", "another one")
    assert min(all_of()) == 25.0


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
        band_choice.compare(arguments.pop("epsilon"), arguments.pop("delta"), **arguments)


def test_a_budget_is_what_delta_pays_for() -> None:
    budget = MechanismBudget()
    part = budget.take(10)
    assert (part.left, budget.left) == (10, certificates.MECHANISMS - 10)
    for _ in range(10):
        part.take()
    with pytest.raises(ValueError, match="mechanisms"):
        part.take()
    with pytest.raises(ValueError, match="mechanisms"):
        MechanismBudget(certificates.MECHANISMS + 1)
    scheme = MinSeparationSampling(4, 1, 40, 4, 1)
    spent = Certification(budget=part)
    with pytest.raises(ValueError, match="mechanisms"):
        scheme.amplified(1.0, 1e-3, None, spent)
    # A search that may test nothing ends with what is enough without amplification.
    assert scheme.calibrated(1.0, 1e-3, None, spent) == pytest.approx(
        2.0 * accounting.noise_multiplier(1.0, 1e-3, disjoint_participations=4)
    )
