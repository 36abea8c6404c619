"""Toeplitz, BLT and banded inverse matrices for momentum, against dense and brute-force optima."""

import json
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import scipy.optimize

from mf_aggregators import checkpoints
from mf_aggregators.factorizations import Factorization, banded_inverse, blt, optimal, toeplitz
from mf_aggregators.participation import MinSeparation, Participation, SingleParticipation
from mf_aggregators.workloads import Workload
from tests import console_commands
from tests.examples import covering
from tests.refusals import refuses

_SINGLE = SingleParticipation()
_BUILDERS: dict[str, Callable[..., Factorization]] = {
    "toeplitz": lambda n, schema, **options: toeplitz(n, None, schema, **options),
    "blt": lambda n, schema, **options: blt(n, 3, schema, **options),
    "banded_inverse": lambda n, schema, **options: banded_inverse(n, 12, schema, **options),
}
_EVERY_BUILDER = pytest.mark.parametrize("mechanism", sorted(_BUILDERS))


def _momentum(num_rounds: int, momentum: float = 0.9) -> Workload:
    return Workload("momentum_sgd", num_rounds, momentum)


def _dense_errors(
    workload: Workload, strategy: np.ndarray, participation: Participation
) -> np.ndarray:
    """Errors for non-increasing columns, where the pattern 0, b, 2 b, ... has the largest norm."""
    decoder = workload.matrix() @ np.linalg.inv(strategy)
    if isinstance(participation, MinSeparation):
        pattern = strategy[:, :: participation.separation]
        pattern = pattern[:, : participation.most_participations(len(strategy))]
        sensitivity = np.linalg.norm(np.sum(pattern, axis=1))
    else:
        sensitivity = np.max(np.linalg.norm(strategy, axis=0))
    return np.asarray(sensitivity * np.linalg.norm(decoder, axis=1))


@pytest.mark.short_cases(1)
@pytest.mark.parametrize(("mechanism", "momentum"), covering(list(_BUILDERS), [0.5, 0.9, 0.97]))
def test_one_participation_is_near_the_dense_optimum(mechanism: str, momentum: float) -> None:
    """Not below it, and closer by far than a matrix for prefix sums."""
    workload = _momentum(64, momentum)
    best = optimal(workload.matrix(), relative_gap=1e-4).rmse(workload, _SINGLE)
    ours = _BUILDERS[mechanism](64, _SINGLE, workload=workload)
    for_sums = _BUILDERS[mechanism](64, _SINGLE).rmse(workload, _SINGLE)
    found = ours.rmse(workload, _SINGLE)
    assert best * (1 - 1e-4) <= found
    assert found - best < (for_sums - best) / (1.2 if momentum == 0.5 else 1.8)
    assert found == pytest.approx(
        np.sqrt(np.mean(np.square(_dense_errors(workload, ours.strategy_matrix(), _SINGLE))))
    )
    assert ours.parameters["momentum"] == momentum
    assert "momentum" not in _BUILDERS[mechanism](12, _SINGLE).parameters


@pytest.mark.short_cases(2)
@_EVERY_BUILDER
@pytest.mark.parametrize("error", ["mean", "max"])
def test_clients_that_return_have_less_error_than_with_a_matrix_for_sums(
    mechanism: str, error: str
) -> None:
    workload, schema = _momentum(60), MinSeparation(15)
    ours, for_sums = (
        _BUILDERS[mechanism](60, schema, error=error, **options)
        for options in ({"workload": workload}, {})
    )
    measure = "rmse" if error == "mean" else "max_error"
    found, other = (getattr(each, measure)(workload, schema) for each in (ours, for_sums))
    assert found < 0.95 * other
    dense = _dense_errors(workload, ours.strategy_matrix(), schema)
    assert found == pytest.approx(
        np.max(dense) if error == "max" else np.sqrt(np.mean(np.square(dense)))
    )


def _least(function: Callable[[np.ndarray], float], starts: list[list[float]]) -> float:
    """By Nelder and Mead, without gradients, from several starts."""
    options = {"xatol": 1e-10, "fatol": 1e-13, "maxiter": 20_000, "maxfev": 20_000}
    return min(
        scipy.optimize.minimize(function, start, method="Nelder-Mead", options=options).fun
        for start in starts
    )


@pytest.mark.parametrize("error", ["mean", "max"])
@pytest.mark.parametrize("participation", [_SINGLE, MinSeparation(3)], ids=str)
def test_toeplitz_against_a_search_without_gradients(
    participation: Participation, error: Any
) -> None:
    """Three bands for six rounds: columns of one client do not overlap."""
    workload = _momentum(6, 0.8)
    rows: Any = np.mean if error == "mean" else np.max

    def squared(free: np.ndarray) -> float:
        strategy = scipy.linalg.toeplitz([1.0, *free, 0.0, 0.0, 0.0], np.zeros(6))
        return float(rows(np.square(_dense_errors(workload, strategy, participation))))

    ours = toeplitz(6, 3, participation, error=error, workload=workload)
    found = getattr(ours, "rmse" if error == "mean" else "max_error")(workload, participation)
    least = _least(squared, [[0.5, 0.4], [0.9, 0.8], [0.1, -0.1]])
    assert found == pytest.approx(np.sqrt(least), rel=1e-6)


@pytest.mark.parametrize("participation", [_SINGLE, MinSeparation(4)], ids=str)
def test_blt_against_a_search_without_gradients(participation: Participation) -> None:
    workload = _momentum(12, 0.7)

    def squared(decays: np.ndarray) -> float:
        ours, inverse = decays
        if not 1.0 > ours >= inverse >= 0.0:
            return 1e9
        column = np.append(1.0, (ours - inverse) * ours ** np.arange(11))
        strategy = scipy.linalg.toeplitz(column, np.zeros(12))
        return float(np.mean(np.square(_dense_errors(workload, strategy, participation))))

    found = blt(12, 1, participation, workload=workload).rmse(workload, participation)
    least = _least(squared, [[0.9, 0.3], [0.6, 0.1], [0.99, 0.05], [0.4, 0.0]])
    assert found == pytest.approx(np.sqrt(least), rel=1e-5)


@pytest.mark.parametrize("participation", [_SINGLE, MinSeparation(4)], ids=str)
@pytest.mark.parametrize("momentum", [0.3, 0.9])
def test_banded_inverse_against_a_search_without_gradients(
    participation: Participation, momentum: float
) -> None:
    """Two bands of C^-1, 1 and -x: C has the coefficients x^t."""
    workload = _momentum(9, momentum)
    found = banded_inverse(9, 2, participation, workload=workload).rmse(workload, participation)

    def squared(ratio: float) -> float:
        strategy = scipy.linalg.toeplitz(ratio ** np.arange(9), np.zeros(9))
        return float(np.mean(np.square(_dense_errors(workload, strategy, participation))))

    least = scipy.optimize.minimize_scalar(
        squared, bounds=(0.0, 1.0), method="bounded", options={"xatol": 1e-9}
    ).fun
    assert found == pytest.approx(np.sqrt(min(least, squared(1.0))), rel=1e-6)


@pytest.mark.parametrize("momentum", [0.0, 0.6, 0.95])
def test_square_roots_of_the_workload(momentum: float) -> None:
    workload = _momentum(50, momentum)
    root = toeplitz(50, coefficients="square_root", workload=workload).strategy_matrix()
    assert root @ root == pytest.approx(workload.matrix())
    inverse = banded_inverse(50, 50, coefficients="square_root", workload=workload)
    assert inverse.strategy_matrix() == pytest.approx(root)


@pytest.mark.short_cases(1)
@_EVERY_BUILDER
def test_a_constant_learning_rate_changes_nothing(mechanism: str) -> None:
    plain = _BUILDERS[mechanism](20, _SINGLE, workload=_momentum(20))
    rates = Workload("momentum_sgd", 20, 0.9, (0.3,) * 20)
    scaled = _BUILDERS[mechanism](20, _SINGLE, workload=rates)
    # Sums of floats depend on where arrays are in memory, and searches pass that on.
    assert scaled.strategy_matrix() == pytest.approx(plain.strategy_matrix(), rel=1e-5)
    sums = _BUILDERS[mechanism](20, _SINGLE, workload=Workload("prefix_sum", 20))
    default = _BUILDERS[mechanism](20, _SINGLE)
    assert default.strategy_matrix() == pytest.approx(sums.strategy_matrix(), rel=1e-5)


@pytest.mark.parametrize("mechanism", ["blt", "toeplitz"])
def test_matrices_that_are_not_toeplitz_are_refused(mechanism: str) -> None:
    matrix = np.tril(np.ones((4, 4)), -1) + np.diag([1.0, 2.0, 3.0, 4.0])
    with refuses("(4, 4)"):
        _BUILDERS[mechanism](4, _SINGLE, workload=matrix)


@_EVERY_BUILDER
@pytest.mark.parametrize(
    ("workload", "names"),
    [
        (_momentum(5), ["5 rounds", "num_rounds"]),
        (np.ones((4, 4)), ["lower triangular"]),
    ],
    ids=["rounds", "no workload"],
)
def test_other_workloads_are_refused(mechanism: str, workload: Any, names: list[str]) -> None:
    with refuses(*names):
        _BUILDERS[mechanism](4, _SINGLE, workload=workload)


def _factorize(directory: pathlib.Path, *arguments: str) -> console_commands.Ended:
    return console_commands.call(
        "mf-factorize", "--format=json", f"--output={directory}", *arguments
    )


@pytest.mark.short_cases(1)
@pytest.mark.parametrize(
    "arguments",
    [("toeplitz",), ("blt", "--num_buffers=2"), ("banded_inverse", "--num_bands=8")],
    ids=lambda arguments: arguments[0],
)
def test_the_command_optimises_for_the_workload_that_it_states_errors_for(
    tmp_path: pathlib.Path, arguments: tuple[str, ...]
) -> None:
    mechanism, *options = arguments
    common = (f"--mechanism={mechanism}", *options, "--num_rounds=40", "--separation=10")
    workload, schema = _momentum(40, 0.95), MinSeparation(10)
    momentum = ("--workload=momentum_sgd", "--momentum=0.95")
    ended = _factorize(tmp_path / "own", *common, *momentum)
    assert ended.status == 0, ended
    own = checkpoints.load(tmp_path / "own")
    dense = _dense_errors(workload, own.strategy_matrix(), schema)
    stated = json.loads(ended.printed)
    assert stated["rmse"] == pytest.approx(np.sqrt(np.mean(np.square(dense))))
    description = json.loads((tmp_path / "own" / "factorization.json").read_text())
    assert description["errors"]["rmse"] == pytest.approx(stated["rmse"])
    assert _factorize(tmp_path / "sums", *common).status == 0
    other = checkpoints.load(tmp_path / "sums").rmse(workload, schema)
    assert stated["rmse"] < 0.95 * other


def test_the_command_optimises_for_schedules(tmp_path: pathlib.Path) -> None:
    rates = tmp_path / "rates.txt"
    schedule = np.linspace(1.0, 0.05, 40)
    rates.write_text("\n".join(map(str, schedule)))
    common = ("--mechanism=banded_inverse", "--num_bands=8", "--num_rounds=40")
    training = ("--workload=momentum_sgd", f"--learning_rates={rates}")
    ended = _factorize(tmp_path / "own", *common, *training)
    assert ended.status == 0, ended
    own = checkpoints.load(tmp_path / "own")
    workload = Workload("momentum_sgd", 40, 0.9, tuple(schedule.tolist()))
    dense = _dense_errors(workload, own.strategy_matrix(), _SINGLE)
    assert json.loads(ended.printed)["rmse"] == pytest.approx(np.sqrt(np.mean(dense**2)))
    plain = banded_inverse(_momentum(40), 8)
    assert own.rmse(workload, _SINGLE) < 0.999 * plain.rmse(workload, _SINGLE)


def test_structured_is_for_prefix_sums(tmp_path: pathlib.Path) -> None:
    ended = _factorize(
        tmp_path / "own",
        "--mechanism=structured",
        "--num_rounds=6",
        "--num_diagonals=2",
        "--rank=1",
        "--workload=momentum_sgd",
    )
    assert ended.status == 2
    assert "prefix sums" in ended.errors
