"""Plans for the worst round and for weights on rounds, against dense matrices."""

import dataclasses
import math
import pathlib
from typing import Any

import numpy as np
import pytest

from mf_aggregators import catalogue, planning
from mf_aggregators.participation import MinSeparation
from mf_aggregators.planning import Candidate, Plan
from mf_aggregators.workloads import Workload
from tests.mf_aggregators.planning.small_settings import TIMERS
from tests.refusals import refuses

# How probable it is that training stops after each round, up to a factor.
_WEIGHTS = tuple(float(weight) for weight in np.geomspace(1.0, 20.0, 24))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tmp_path_factory.mktemp("cache")


def _made(cache: pathlib.Path, *mechanisms: str, **changes: Any) -> Plan:
    return planning.make(
        dataclasses.replace(TIMERS, **changes),
        cache_directory=cache,
        mechanisms=mechanisms or None,
    )


def _rows(candidate: Candidate) -> np.ndarray:
    """The variance of each round, by dense matrices; a tree's decoder is not A C^-1."""
    made, schema = candidate.mechanism.factorization, candidate.mechanism.noise_reference
    if candidate.kind == "tree":
        return made.errors(made.num_rounds, schema).per_round_variance
    decoder = np.tri(made.num_rounds) @ np.linalg.inv(made.strategy_matrix())
    rows = np.sum(np.square(decoder), axis=1)
    return np.asarray(rows * made.sensitivity(schema).value ** 2)


def _effective(candidate: Candidate, variance: float) -> float:
    scale = candidate.mechanism.noise_multiplier / candidate.clients_per_round
    return math.sqrt(variance) * scale


def _is_made_for(candidate: Candidate) -> Any:
    return candidate.mechanism.factorization.parameters.get("error", "mean")


def test_the_worst_round_decides(cache: pathlib.Path) -> None:
    plan = _made(cache, error="max")
    found = [_effective(each, float(np.max(_rows(each)))) for each in plan.candidates]
    assert found == sorted(found)
    for each, error in zip(plan.candidates, found, strict=True):
        assert each.effective_error == each.max_effective_error == pytest.approx(error)
        assert each.lower_bound is not None
        bound = each.lower_bound
        assert each.over_lower_bound == pytest.approx(each.errors.max_error / bound.max_error)
        assert each.errors.max_error >= bound.max_error >= bound.rmse
        assert each.errors.rmse >= bound.rmse
        # The rule for learning rates was fitted to the effective RMSE.
        same = dataclasses.replace(each, rmse_of_sums=each.errors.rmse, error="mean")
        assert each.server_learning_rate == same.server_learning_rate
    asked = {each.kind for each in plan.candidates if "max" in each.name.split()}
    assert asked == {"blt", "banded_inverse", "toeplitz", "banded"}
    assert all((_is_made_for(each) == "max") == (each.kind in asked) for each in plan.candidates)
    bases = [each.variant.base for each in plan.candidates if each.kind == "structured"]
    assert {each.name for each in bases if each is not None} == {"banded 6 max"}
    assert plan.setting.words.quantity in plan.reason


@pytest.mark.long
@pytest.mark.short_cases(1)
@pytest.mark.parametrize("separation", [16, 128])
def test_another_matrix_is_recommended_for_the_worst_round(
    cache: pathlib.Path, separation: int
) -> None:
    """128 rounds: every matrix of the plan for the mean is worse in its worst round."""
    sizes: dict[str, Any] = {
        **{"num_rounds": 128, "population": 10 * separation},
        "participation": MinSeparation(separation),
    }
    names = ("identity", "tree", "toeplitz", "banded" if separation == 16 else "optimal")
    for_mean = _made(cache, *names, **sizes)
    for_max = _made(cache, *names, **sizes, error="max")
    chosen = for_max.recommended
    worst = [float(np.max(_rows(each))) for each in for_mean.candidates]
    assert float(np.max(_rows(chosen))) * 1.15 < min(worst)
    # What the plan for the mean recommends has the least mean of both plans.
    means = [float(np.mean(_rows(each))) for each in (*for_mean.candidates, chosen)]
    assert float(np.mean(_rows(for_mean.candidates[0]))) == min(means)
    assert not chosen.mechanism.factorization.has_same_matrix(
        for_mean.recommended.mechanism.factorization
    )
    gap = chosen.mechanism.factorization.optimality_gap
    assert gap is not None
    assert gap <= 1e-3


@pytest.mark.long
def test_weights_decide(cache: pathlib.Path) -> None:
    plan = _made(cache, error=np.array(_WEIGHTS))
    shares = np.divide(_WEIGHTS, np.sum(_WEIGHTS))
    found = [_effective(each, float(shares @ _rows(each))) for each in plan.candidates]
    assert found == sorted(found)
    for each, error in zip(plan.candidates, found, strict=True):
        assert each.effective_error == pytest.approx(error)
        # No bound of the mean is one for weights.
        assert each.over_lower_bound is None
    best = plan.candidates[0]
    assert best.name == "banded 6 weights"
    assert best.mechanism.factorization.parameters["weights"] == pytest.approx(shares, rel=1e-7)
    (of_mean,) = (each for each in _made(cache).candidates if each.name == "banded 6")
    assert float(shares @ _rows(best)) < 0.99 * float(shares @ _rows(of_mean))
    assert plan.setting.words.quantity in plan.reason


def test_what_is_made_for_no_error_is_made_for_the_mean(cache: pathlib.Path) -> None:
    known = catalogue.ENTRIES
    for each in _made(cache, error=_WEIGHTS).candidates:
        takes_them = "error" in known[each.kind].options
        assert _is_made_for(each) == ("weights" if takes_them else "mean")
        assert ("weights" in each.name.split()) == takes_them


def test_equal_weights_are_the_mean() -> None:
    assert dataclasses.replace(TIMERS, error=(0.5,) * 24) == TIMERS
    hash(dataclasses.replace(TIMERS, error=_WEIGHTS))


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ("least", ["'mean'", "'max'", "'least'"]),
        ("weights", ["'weights'"]),
        (np.ones(23), ["24", "(23,)"]),
        ([-1.0] + [1.0] * 23, ["-1"]),
        (np.zeros(24), ["0.0"]),
        ([math.nan] * 24, ["nan"]),
    ],
)
def test_what_is_no_error_is_refused(error: Any, words: list[str]) -> None:
    with refuses("error", *words):
        dataclasses.replace(TIMERS, error=error)


def test_no_error_takes_the_matrix_of_another_from_the_cache(tmp_path: pathlib.Path) -> None:
    """Each is computed once, and is the same from the cache as without it."""
    others = tuple(reversed(_WEIGHTS))
    errors: list[Any] = ["mean", "max", _WEIGHTS, others]
    plans = [_made(tmp_path, "banded", "toeplitz", error=error) for error in errors]
    entries = {path.name for path in tmp_path.iterdir()}
    matrices_kept = [name for name in entries if not name.startswith("lower-bound")]
    # Two numbers of bands, and the Toeplitz matrix.
    assert len(matrices_kept) == 3 * len(errors)
    for error, plan in zip(errors, plans, strict=True):
        setting = dataclasses.replace(TIMERS, error=error)
        again = planning.make(setting, cache_directory=tmp_path, mechanisms=["banded", "toeplitz"])
        afresh = planning.make(setting, mechanisms=["banded", "toeplitz"])
        for first, second, third in zip(
            plan.candidates, again.candidates, afresh.candidates, strict=True
        ):
            assert first == second == third
            matrices = [each.mechanism.factorization for each in (first, second, third)]
            assert matrices[0].has_same_matrix(matrices[1])
            assert matrices[0].has_same_matrix(matrices[2])
    assert {path.name for path in tmp_path.iterdir()} == entries
    bands = [plan.candidates[0].mechanism.factorization.strategy_matrix() for plan in plans]
    assert all(
        not np.allclose(first, second, rtol=1e-3)
        for number, first in enumerate(bands)
        for second in bands[:number]
    )


@pytest.mark.long
@pytest.mark.short_cases(1)
@pytest.mark.parametrize("sampling", ["poisson", "balls_in_bins"])
def test_sampling_compares_worst_rounds(cache: pathlib.Path, sampling: str) -> None:
    changes: dict[str, Any] = {
        **{"num_rounds": 12, "population": 60, "participation": None, "sampling": sampling},
        "delta": 1e-3,
    }
    plan = _made(cache, **changes, error="max")
    errors = [each.max_effective_error for each in plan.candidates]
    assert errors == sorted(errors)
    amplified = [each for each in plan.candidates if each.mechanism.sampling is not None]
    assert {_is_made_for(each) for each in amplified if each.kind == "banded"} == {"max"}
    assert all(each.over_lower_bound is None for each in amplified)
    fixed = [each for each in plan.candidates if each.kind == "optimal"]
    assert [_is_made_for(each) for each in fixed] == ["max"] * (sampling == "poisson")
    assert not plan.recommended.is_estimate


@pytest.mark.parametrize("rates", [None, tuple(np.linspace(1.0, 0.05, 24))], ids=["1", "falling"])
def test_momentum_and_learning_rates_decide(
    cache: pathlib.Path, rates: tuple[float, ...] | None
) -> None:
    """Errors of the models by dense matrices, whose rows are the algorithm's own steps."""
    names = ("identity", "toeplitz", "banded", "blt", "optimal", "structured")
    plan = _made(cache, *names, workload=Workload("momentum_sgd", 24, 0.9, rates))
    velocity, model, models = np.zeros(24), np.zeros(24), []
    for one, rate in zip(np.eye(24), rates or (1.0,) * 24, strict=True):
        velocity = 0.9 * velocity + one
        model = model + rate * velocity
        models.append(model)
    found = []
    for each in plan.candidates:
        made = each.mechanism.factorization
        decoder = np.array(models) @ np.linalg.inv(made.strategy_matrix())
        variance = float(np.mean(np.sum(np.square(decoder), axis=1)))
        sensitivity = made.sensitivity(each.mechanism.noise_reference).value
        found.append(_effective(each, variance * sensitivity**2))
        assert each.effective_error == pytest.approx(found[-1], rel=1e-6)
        assert each.over_lower_bound is not None
        assert each.over_lower_bound >= 1.0
        # The rule for learning rates knows prefix sums alone.
        assert each.rmse_of_sums == pytest.approx(made.rmse(24, each.mechanism.noise_reference))
    assert found == sorted(found)
    of_sums = {each.name: each for each in _made(cache, "toeplitz", "banded").candidates}
    for each in plan.candidates:
        if each.name in of_sums:
            other = of_sums[each.name].mechanism.factorization
            assert each.planned_error < other.rmse(
                plan.setting.trained, each.mechanism.noise_reference
            )
