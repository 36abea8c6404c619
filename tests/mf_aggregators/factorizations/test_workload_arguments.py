"""Every shape of workload that constructors allow, and ints in the place of prefix sums."""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from mf_aggregators import factorizations, lower_bounds, participation, workloads
from mf_aggregators.factorizations import Factorization, NotConvergedWarning
from mf_aggregators.kernel import numbers
from mf_aggregators.participation import (
    FixedEpochOrder,
    MinSeparation,
    Participation,
    SingleParticipation,
)
from mf_aggregators.workloads import Workload
from tests.examples import examples
from tests.refusals import refuses

_ONCE = SingleParticipation()
# Solvers stop at a gap of 1e-5 of the squared error or less.
_GAP = 1e-5


@st.composite
def _workloads(draw: st.DrawFn) -> np.ndarray:
    """Diagonal, of few bands, of an inverse of few bands, and dense."""
    num_rounds = draw(st.integers(1, 10))
    kind = draw(st.sampled_from(["identity", "diagonal", "bands", "inverse bands", "prefix sum"]))
    if kind == "identity":
        return np.eye(num_rounds)
    if kind == "prefix sum":
        return draw(st.sampled_from([-3.0, 1.0, 1e100])) * np.tri(num_rounds)
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    width = 1 if kind == "diagonal" else draw(st.integers(2, num_rounds + 1))
    matrix = np.diag(random.uniform(0.3, 3.0, num_rounds) * random.choice([-1, 1], num_rounds))
    for lag in range(1, min(width, num_rounds)):
        below = random.uniform(-0.9, 0.9, num_rounds - lag)
        # Some entries of a band may be zero.
        matrix += np.diag(below * random.choice([0, 1], len(below), p=[0.2, 0.8]), -lag)
    return np.tril(np.linalg.inv(matrix)) if kind == "inverse bands" else matrix


@st.composite
def _schemas(draw: st.DrawFn, num_rounds: int) -> Participation:
    separation = draw(st.integers(1, num_rounds))
    epochs = draw(st.integers(1, -(-num_rounds // separation)))
    schemas: list[Participation] = [
        _ONCE,
        FixedEpochOrder(epochs, separation),
        MinSeparation(separation),
    ]
    return draw(st.sampled_from(schemas))


def _checked(made: Factorization, workload: np.ndarray, schema: Participation) -> float:
    """The squared total error of a factorization, after a check that A = B C."""
    decoder = made.decoder_matrix(workload)
    scale = float(np.max(np.abs(workload)))
    assert decoder @ made.strategy_matrix() == pytest.approx(workload, abs=1e-9 * scale)
    squared = float(np.sum((decoder / scale) ** 2)) * made.sensitivity(schema).value ** 2
    assert made.total_error(workload, schema) / scale == pytest.approx(squared**0.5, rel=1e-9)
    return squared


@contextlib.contextmanager
def _allowing_large_gaps() -> Iterator[None]:
    """The last digits of a gap may be rounding; what is returned states the gap that it has."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotConvergedWarning)
        yield


@hypothesis.given(data=st.data(), workload=_workloads())
@hypothesis.settings(max_examples=examples(60), deadline=None)
def test_optimal_takes_every_workload(data: st.DataObject, workload: np.ndarray) -> None:
    num_rounds = len(workload)
    schema = data.draw(_schemas(num_rounds))
    if schema.most_participations(num_rounds) > 1 and isinstance(schema, MinSeparation):
        schema = _ONCE
    with _allowing_large_gaps():
        made = factorizations.optimal(workload, schema)
    squared = _checked(made, workload, schema)
    gap = made.optimality_gap
    assert gap is not None
    # A truth for each side: no error is below this, nor is the optimum above that of C = I.
    bound = lower_bounds.compute(workload, schema)
    assert bound is not None
    scale = float(np.max(np.abs(workload)))
    assert squared >= (bound.total_error / scale) ** 2 * (1.0 - 1e-9)
    # Where clients may take part more often than the schema says, it is optimal for that.
    schema = made.participation or schema
    independent = factorizations.identity(num_rounds).total_error(workload, schema)
    assert made.total_error(workload, schema) <= independent * (1.0 + max(gap, _GAP))


@hypothesis.given(data=st.data(), workload=_workloads(), equal_column_norms=st.booleans())
@hypothesis.settings(max_examples=examples(40), deadline=None)
def test_banded_takes_every_workload(
    data: st.DataObject, workload: np.ndarray, equal_column_norms: bool
) -> None:
    num_rounds = len(workload)
    schema = data.draw(_schemas(num_rounds))
    most = (
        schema.separation_in(num_rounds)
        if schema.most_participations(num_rounds) > 1
        else num_rounds
    )
    num_bands = data.draw(st.integers(1, most))
    with _allowing_large_gaps():
        made = factorizations.banded(workload, num_bands, equal_column_norms, schema)
    # What is optimised where clients return is the fixed order.
    solved = made.participation
    assert solved is not None
    squared = _checked(made, workload, solved)
    independent = factorizations.identity(num_rounds).total_error(workload, solved)
    scale = float(np.max(np.abs(workload)))
    gap = made.optimality_gap
    assert gap is not None
    assert squared <= (independent / scale) ** 2 * (1.0 + max(gap, _GAP))


_MAKERS: dict[str, Callable[[Any], Factorization]] = {
    "optimal": lambda workload: factorizations.optimal(workload),
    "optimal of epochs": lambda workload: factorizations.optimal(workload, FixedEpochOrder(2, 3)),
    "banded": lambda workload: factorizations.banded(workload, 2),
    "toeplitz": lambda workload: factorizations.toeplitz(workload, 3),
    "blt": lambda workload: factorizations.blt(workload, 2),
    "banded_inverse": lambda workload: factorizations.banded_inverse(workload, 2),
}


@pytest.mark.short_cases(4)
@pytest.mark.parametrize("make", _MAKERS.values(), ids=_MAKERS)
@pytest.mark.parametrize("rounds", [6, np.int64(6)], ids=["int", "int64"])
def test_int_is_prefix_sum_for_mechanisms(
    make: Callable[[Any], Factorization], rounds: Any
) -> None:
    expected = make(Workload("prefix_sum", 6)).strategy_matrix()
    assert np.array_equal(make(rounds).strategy_matrix(), expected)
    assert make(np.tri(6)).strategy_matrix() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("make", _MAKERS.values(), ids=_MAKERS)
def test_momentum_may_come_first(make: Callable[[Any], Factorization]) -> None:
    workload = Workload("momentum_sgd", 6, 0.5)
    expected = make(workload).strategy_matrix()
    # A factor on an array changes nothing.
    assert make(2.0 * workload.matrix()).strategy_matrix() == pytest.approx(expected, abs=1e-5)
    assert np.max(np.abs(expected - make(6).strategy_matrix())) > 1e-3


def test_int_is_prefix_sum_for_errors() -> None:
    made, matrix = factorizations.tree_aggregation(6), np.tri(6)
    assert np.array_equal(made.decoder_matrix(6), made.decoder_matrix(matrix))
    expected = made.squared_decoder_rows(matrix)
    assert made.squared_decoder_rows(6) == pytest.approx(expected, rel=1e-9)
    assert made.rmse(6, _ONCE) == pytest.approx(made.rmse(matrix, _ONCE), rel=1e-9)
    for refused, name in ((5, "5 rounds"), (0, "num_rounds"), (True, "num_rounds")):
        for function in (made.decoder_matrix, made.squared_decoder_rows):
            with refuses(name):
                function(refused)


def test_int_is_prefix_sum_elsewhere() -> None:
    found = lower_bounds.compute(6, _ONCE)
    assert found == lower_bounds.compute(np.tri(6), _ONCE)
    plain = factorizations.toeplitz(6, 3)
    longer = plain.extended(9, workload=9)
    assert np.array_equal(longer.strategy_matrix(), plain.extended(9).strategy_matrix())


@pytest.mark.parametrize(
    "refused",
    [
        lambda: factorizations.identity(np.eye(50)),  # type: ignore[arg-type]
        lambda: factorizations.tree_aggregation(np.eye(50)),  # type: ignore[arg-type]
        lambda: factorizations.toeplitz(np.tril(np.arange(1.0, 2501.0).reshape(50, 50))),
        lambda: factorizations.banded(np.tri(50), np.eye(50)),  # type: ignore[arg-type]
        lambda: factorizations.toeplitz(50, 2, np.eye(50)),  # type: ignore[arg-type]
        lambda: factorizations.banded(50.5, 2),
        lambda: participation.MinSeparation(np.eye(50)),  # type: ignore[arg-type]
        lambda: workloads.momentum_sgd(50, np.eye(50)),  # type: ignore[arg-type]
        lambda: Workload(tuple(range(500)), 50),  # type: ignore[arg-type]
        lambda: numbers.positive_integer([1.5] * 500, "num_rounds"),
        lambda: numbers.finite_number(Workload("momentum_sgd", 99, 0.9, (0.5,) * 99), "epsilon"),
    ],
)
def test_messages_show_shapes_and_no_entries(refused: Callable[[], Any]) -> None:
    with pytest.raises((ValueError, TypeError)) as caught:
        refused()
    message = str(caught.value)
    assert len(message) < 300
    assert "\n" not in message
    assert "[[" not in message
    assert "0.5, 0.5" not in message
