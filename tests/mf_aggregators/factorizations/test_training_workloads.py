"""Toeplitz matrices, BLTs and banded inverses for training: momentum and schedules.

The truth is dense algebra: A C^-1 of the matrices, and searches over their errors that know nothing
of structure.
"""

import functools
import json
import pathlib
import tracemalloc
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import scipy.optimize
from hypothesis import given, settings
from hypothesis import strategies as st

from mf_aggregators import checkpoints
from mf_aggregators.factorizations import (
    BltFactorization,
    Factorization,
    NotConvergedWarning,
    ToeplitzFactorization,
    _decoder_rows,
    banded_inverse,
    blt,
    optimal,
    toeplitz,
)
from mf_aggregators.factorizations.blt import _StateRows, _States
from mf_aggregators.participation import (
    FixedEpochOrder,
    MinSeparation,
    Participation,
    SingleParticipation,
)
from mf_aggregators.workloads import Workload
from simulations.runs.run_plan import SCHEDULES
from tests import console_commands
from tests.examples import covering
from tests.mf_aggregators.toeplitz_cases import trainings
from tests.refusals import refuses

_ONCE = SingleParticipation()


def _schedule(num_rounds: int) -> tuple[float, ...]:
    """Warm-up and cool-down of BandMF App. I."""
    return tuple(SCHEDULES["warmup_cooldown"].rates(num_rounds, 1.0))


def _training(num_rounds: int, momentum: float = 0.9) -> Workload:
    return Workload("momentum_sgd", num_rounds, momentum, _schedule(num_rounds))


_OTHERS: dict[str, Callable[[int], Workload]] = {
    "momentum": lambda n: Workload("momentum_sgd", n, 0.8),
    "schedule": _training,
    "no momentum": lambda n: _training(n, 0.0),
}
# The other takes as long.
_SHORT = ("momentum", "schedule")
_EVERY_OTHER = pytest.mark.parametrize(
    "make",
    [
        pytest.param(make, id=name, marks=() if name in _SHORT else pytest.mark.long)
        for name, make in _OTHERS.items()
    ],
)


_BUILDERS: dict[str, Callable[..., Factorization]] = {
    "toeplitz": lambda workload, schema, **options: toeplitz(workload, None, schema, **options),
    "blt": lambda workload, schema, **options: blt(workload, 3, schema, **options),
    "banded_inverse": lambda workload, schema, **options: banded_inverse(
        workload, 12, schema, **options
    ),
}
_EVERY_BUILDER = pytest.mark.parametrize("mechanism", sorted(_BUILDERS))


def _momentum(num_rounds: int, momentum: float = 0.9) -> Workload:
    return Workload("momentum_sgd", num_rounds, momentum)


def _squared(workload: Workload, noising: np.ndarray) -> np.ndarray:
    decoder = workload.matrix() @ scipy.linalg.toeplitz(noising, np.zeros(len(noising)))
    return np.asarray(np.sum(np.square(decoder), axis=1))


@given(trainings(60), st.integers(0, 2**32 - 1))
@settings(max_examples=40)
def test_rows_and_their_slopes_are_those_of_dense_matrices(workload: Workload, seed: int) -> None:
    """Blocks are of 16 rounds here, and the slope of a quadratic form is exact by differences."""
    n = workload.num_rounds
    numbers = np.random.default_rng(seed)
    noising, weights = np.append(1.0, numbers.uniform(-0.5, 0.2, n - 1)), numbers.random(n)
    rows, expected = _decoder_rows.DecoderRows.of(workload), _squared(workload, noising)
    assert rows.squared(noising) == pytest.approx(expected, rel=1e-9)
    value, slope = rows.weighing(weights)(noising)
    assert value == pytest.approx(weights @ expected, rel=1e-9)
    direction = numbers.normal(size=n)
    above, below = (weights @ _squared(workload, noising + s * direction) for s in (0.5, -0.5))
    size = float(np.linalg.norm(slope) * np.linalg.norm(direction))
    assert slope @ direction == pytest.approx(above - below, abs=1e-9 * size)


@given(trainings(60), st.integers(1, 3), st.integers(0, 2**32 - 1))
@settings(max_examples=40)
def test_blts_have_the_rows_of_dense_matrices(
    workload: Workload, num_buffers: int, seed: int
) -> None:
    n, numbers = workload.num_rounds, np.random.default_rng(seed)
    decays = np.sort(numbers.uniform(0.0, 0.999, 2 * num_buffers))[::-1]
    made = BltFactorization(n, decays[0::2].copy(), decays[1::2].copy())
    expected = _squared(workload, made.noising_coefficients())
    assert made.squared_decoder_rows(workload) == pytest.approx(expected, rel=1e-9)
    assert made.rmse(workload, _ONCE) == pytest.approx(made.rmse(workload.matrix(), _ONCE))


@given(trainings(40), st.integers(0, 2**32 - 1))
@settings(max_examples=30)
def test_slopes_by_states_are_those_of_differences(workload: Workload, seed: int) -> None:
    n, numbers = workload.num_rounds, np.random.default_rng(seed)
    rounds, rows, weights = np.arange(n - 1), _StateRows(workload.recursions()), numbers.random(n)

    def states(free: np.ndarray) -> _States:
        own, decays = free[:2], free[2:]
        return _States(np.append(1.0, own @ decays[:, np.newaxis] ** rounds), own, decays)

    def value(free: np.ndarray) -> float:
        return float(weights @ _squared(workload, states(free).noising))

    free = np.concatenate([numbers.uniform(-0.4, -0.1, 2), numbers.uniform(-0.3, 0.95, 2)])
    found, slopes = rows.weighing(weights)(states(free))
    assert found == pytest.approx(value(free), rel=1e-9)
    explicit = np.append(slopes.weights, slopes.decays)
    for each, step in enumerate(1e-5 * np.eye(4)):
        moved = (states(free + step).noising - states(free - step).noising) / 2e-5
        expected = (value(free + step) - value(free - step)) / 2e-5
        assert slopes.noising @ moved + explicit[each] == pytest.approx(
            expected, rel=1e-5, abs=1e-6 * found
        )


def _squared_error(
    workload: Workload, strategy: np.ndarray, schema: Participation, error: Any
) -> float:
    """For columns that do not increase, or of one client that do not overlap."""
    n = len(strategy)
    separation = schema.separation_in(n) if schema.most_participations(n) > 1 else n
    pattern = strategy[:, ::separation][:, : schema.most_participations(n)]
    squared = np.sum(np.square(np.sum(np.abs(pattern), axis=1)))
    rows = np.sum(np.square(workload.matrix() @ np.linalg.inv(strategy)), axis=1)
    if isinstance(error, str):
        return float(squared * (np.max(rows) if error == "max" else np.mean(rows)))
    return float(squared * (error @ rows) / np.sum(error))


def _stated(made: Factorization, workload: Workload, schema: Participation, error: Any) -> float:
    rows = made.per_round_variance(workload, schema)
    if isinstance(error, str):
        return float(np.max(rows) if error == "max" else np.mean(rows))
    return float(error @ rows / np.sum(error))


def _least(function: Callable[[np.ndarray], float], starts: list[list[float]]) -> float:
    """By Nelder and Mead, without gradients, from several starts."""
    options = {"xatol": 1e-9, "fatol": 1e-12, "maxiter": 10_000, "maxfev": 10_000}
    return min(
        scipy.optimize.minimize(function, start, method="Nelder-Mead", options=options).fun
        for start in starts
    )


_LAST = np.eye(1, 12, 11)[0]


@pytest.mark.short_cases(4)
@_EVERY_OTHER
@pytest.mark.parametrize(
    ("schema", "error"),
    [(_ONCE, "mean"), (MinSeparation(4), "mean"), (_ONCE, _LAST), (FixedEpochOrder(2, 4), "max")],
    ids=["once", "separated", "last round", "maximum"],
)
def test_toeplitz_against_a_search_over_dense_errors(
    make: Callable[[int], Workload], schema: Participation, error: Any
) -> None:
    workload = make(12)

    def squared(free: np.ndarray) -> float:
        column = np.concatenate([[1.0], free, np.zeros(9)])
        strategy = scipy.linalg.toeplitz(column, np.zeros(12))
        return _squared_error(workload, strategy, schema, error)

    made = toeplitz(workload, 3, schema, error=error)
    found = _stated(made, workload, schema, error)
    assert found == pytest.approx(_squared_error(workload, made.strategy_matrix(), schema, error))
    least = _least(squared, [[0.5, 0.4], [0.9, 0.8], [0.1, -0.1]])
    # Norms take the place of a maximum.
    assert found <= least * (1.0 + (2e-3 if isinstance(error, str) and error == "max" else 1e-6))
    assert found >= least * (1.0 - 1e-6)


@pytest.mark.long_cases(10)
@pytest.mark.short_cases(3)
@_EVERY_OTHER
@pytest.mark.parametrize(
    ("schema", "error"),
    [(_ONCE, "mean"), (MinSeparation(4), "mean"), (_ONCE, _LAST), (MinSeparation(4), "max")],
    ids=["once", "separated", "last round", "maximum"],
)
def test_blt_against_a_search_over_dense_errors(
    make: Callable[[int], Workload], schema: Participation, error: Any
) -> None:
    workload = make(12)

    def squared(decays: np.ndarray) -> float:
        ours, inverse = decays
        # The search is over decays of one sign.
        if not 1.0 > ours >= inverse >= 0.0:
            return 1e9
        column = np.append(1.0, (ours - inverse) * ours ** np.arange(11))
        return _squared_error(workload, scipy.linalg.toeplitz(column, np.zeros(12)), schema, error)

    made = blt(workload, 1, schema, error=error)
    found = _stated(made, workload, schema, error)
    assert found == pytest.approx(_squared_error(workload, made.strategy_matrix(), schema, error))
    least = _least(squared, [[0.9, 0.3], [0.6, 0.1], [0.99, 0.05], [0.4, 0.0]])
    assert found <= least * (1.0 + (2e-3 if isinstance(error, str) and error == "max" else 1e-6))


def test_arrays_of_training_are_recognised() -> None:
    for workload in (_training(12), _momentum(12)):
        matrix = workload.matrix()
        found = toeplitz(matrix, 4).strategy_matrix()
        assert found == pytest.approx(toeplitz(workload, 4).strategy_matrix(), abs=1e-5)
        assert blt(matrix, 1).rmse(matrix, _ONCE) == pytest.approx(
            blt(workload, 1).rmse(matrix, _ONCE)
        )
    with refuses("(12, 12)"):
        toeplitz(scipy.linalg.toeplitz(np.arange(12.0, 0.0, -1.0), np.zeros(12)))


@pytest.mark.parametrize("length", [1, 2, 30])
def test_square_roots_of_toeplitz_workloads(length: int) -> None:
    root = toeplitz(_momentum(length), coefficients="square_root").strategy_matrix()
    assert root @ root == pytest.approx(_momentum(length).matrix())
    inverse = banded_inverse(_momentum(length), length, coefficients="square_root")
    assert inverse.strategy_matrix() == pytest.approx(root)


def test_square_roots_that_there_are_not_are_refused() -> None:
    with refuses("square_root"):
        toeplitz(_training(8), coefficients="square_root")


def test_parameters_say_what_was_optimised_for(tmp_path: pathlib.Path) -> None:
    workload, weights = _training(8), np.arange(8.0)
    for made in (toeplitz(workload, error=weights), blt(workload, 1, error=weights)):
        assert made.parameters["workload"] == workload.fingerprint()
        assert made.parameters["momentum"] == 0.9
        assert made.parameters["error"] == "weights"
        assert made.parameters["weights"] == pytest.approx(weights / np.sum(weights))
        checkpoints.save(made, tmp_path / made.mechanism, workload=workload.to_dict())
        loaded = checkpoints.load(tmp_path / made.mechanism)
        assert np.array_equal(loaded.strategy_matrix(), made.strategy_matrix())
    equal = toeplitz(8, error=np.full(8, 3.0))
    assert equal.strategy_matrix() == pytest.approx(toeplitz(8).strategy_matrix())
    with refuses("error"):
        blt(8, 1, error=[1.0, -1.0])  # type: ignore[arg-type]


def test_longer_runs_go_on_for_a_schedule() -> None:
    workload, whole = _training(8), _training(12)
    plain = toeplitz(workload)
    longer = plain.extended(12, workload=whole)
    assert isinstance(longer, ToeplitzFactorization)
    assert np.array_equal(longer.strategy_matrix()[:8, :8], plain.strategy_matrix())
    assert longer.rmse(whole, _ONCE) <= plain.extended(12).rmse(whole, _ONCE) * (1.0 + 1e-9)


@pytest.mark.short_cases(1)
@pytest.mark.parametrize(("mechanism", "momentum"), covering(list(_BUILDERS), [0.5, 0.9, 0.97]))
def test_one_participation_is_near_the_dense_optimum(mechanism: str, momentum: float) -> None:
    """Not below it, and closer by far than a matrix for prefix sums."""
    workload = _momentum(64, momentum)
    best = optimal(workload.matrix(), relative_gap=1e-4).rmse(workload, _ONCE)
    ours = _BUILDERS[mechanism](workload, _ONCE)
    for_sums = _BUILDERS[mechanism](64, _ONCE).rmse(workload, _ONCE)
    found = ours.rmse(workload, _ONCE)
    assert best * (1 - 1e-4) <= found
    assert found - best < (for_sums - best) / (1.2 if momentum == 0.5 else 1.8)
    assert ours.parameters["momentum"] == momentum
    assert "momentum" not in _BUILDERS[mechanism](12, _ONCE).parameters


@pytest.mark.short_cases(2)
@_EVERY_BUILDER
@pytest.mark.parametrize("error", ["mean", "max"])
def test_clients_that_return_have_less_error_than_with_a_matrix_for_sums(
    mechanism: str, error: str
) -> None:
    workload, schema = _momentum(60), MinSeparation(15)
    ours, for_sums = (_BUILDERS[mechanism](each, schema, error=error) for each in (workload, 60))
    found, other = (_stated(each, workload, schema, error) for each in (ours, for_sums))
    assert found < 0.9 * other
    dense = _squared_error(workload, ours.strategy_matrix(), schema, error)
    assert found == pytest.approx(dense)


@pytest.mark.short_cases(1)
@_EVERY_BUILDER
def test_a_constant_learning_rate_changes_nothing(mechanism: str) -> None:
    plain = _BUILDERS[mechanism](_momentum(20), _ONCE)
    scaled = _BUILDERS[mechanism](Workload("momentum_sgd", 20, 0.9, (0.3,) * 20), _ONCE)
    # Sums of floats depend on where arrays are in memory, and searches pass that on.
    assert scaled.strategy_matrix() == pytest.approx(plain.strategy_matrix(), rel=1e-5)


@_EVERY_BUILDER
def test_other_workloads_are_refused(mechanism: str) -> None:
    with refuses("lower triangular"):
        _BUILDERS[mechanism](np.ones((4, 4)), _ONCE)


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
    np.savetxt(tmp_path / "rates.txt", _schedule(40))
    of_training = [
        "--workload=momentum_sgd",
        f"--learning_rates={tmp_path / 'rates.txt'}",
    ]
    errors, schema = [], MinSeparation(10)
    workload = _training(40)
    for name, flags in (("own", of_training), ("sums", [])):
        fields = console_commands.call(
            "mf-factorize", "--format=json", f"--output={tmp_path / name}", *common, *flags
        ).fields()
        errors.append(checkpoints.load(tmp_path / name).rmse(workload.matrix(), schema))
        if flags:
            assert fields["rmse"] == pytest.approx(errors[0])
            description = json.loads((tmp_path / name / "factorization.json").read_text())
            assert description["errors"]["rmse"] == pytest.approx(errors[0])
    assert errors[0] < 0.95 * errors[1]


@pytest.mark.long
def test_many_rounds_need_little_memory() -> None:
    """A dense matrix would have 2 GiB."""
    workload, schema = _training(16_384, 0.95), FixedEpochOrder(6, 2730)
    plain = Workload("momentum_sgd", 16_384, 0.95)
    builders: list[Callable[..., Factorization]] = [
        functools.partial(toeplitz, num_bands=64, participation=schema, max_evaluations=60),
        functools.partial(blt, num_buffers=2, participation=schema),
    ]
    for build in builders:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NotConvergedWarning)
            other = build(plain)
            tracemalloc.start()
            own = build(workload)
            error = own.rmse(workload, schema)
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert error <= other.rmse(workload, schema) * (1.0 + 1e-9)
        assert peak < 700e6
