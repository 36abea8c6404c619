"""Units other than one client, against all patterns, signs and windows of small runs."""

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mf_aggregators.checkpoints import claim_file
from mf_aggregators.factorizations import tree_aggregation
from mf_aggregators.kernel import claim, ledger, sensitivity, units
from mf_aggregators.kernel.claim import Assumption, Basis, Claim, Pattern
from mf_aggregators.kernel.rows import NoiseRecursion, banded_rows, dense_rows, toeplitz_rows
from mf_aggregators.kernel.schemas import Schema
from mf_aggregators.kernel.units import Unit
from tests.examples import examples
from tests.mf_aggregators import brute_force, random_recursions
from tests.mf_aggregators.kernel.random_claims import gaussian_epsilon
from tests.mf_aggregators.kernel.test_strategies import exact_strategy

_DELTA = 1e-5
_SCHEMAS = st.builds(
    Schema, st.one_of(st.none(), st.integers(1, 3)), st.integers(1, 3), st.booleans()
)


def _matrix(seed: int, num_rounds: int, bands: int, *, signed: bool) -> np.ndarray:
    rng = np.random.default_rng(seed)
    matrix = rng.uniform(-1.0 if signed else 0.0, 1.0, (num_rounds, num_rounds))
    np.fill_diagonal(matrix, rng.uniform(0.5, 2.0, num_rounds))
    return np.triu(np.tril(matrix), 1 - bands)


def _rows(matrix: np.ndarray) -> NoiseRecursion:
    return dense_rows(np.linalg.inv(matrix))


def _largest(matrix: np.ndarray, totals: set[tuple[int, ...]]) -> float:
    """The largest ||C u|| with |u_i| at most the number of clients in round i: signs suffice."""
    best = 0.0
    for total in totals:
        for signs in itertools.product((-1.0, 1.0), repeat=len(total)):
            best = max(best, float(np.linalg.norm(matrix @ (np.array(total) * signs))))
    return best


def _windowed(schema: Schema, num_rounds: int, length: int, most: int) -> set[tuple[int, ...]]:
    """Counts by round of every device that keeps the schema in each of at most so many windows."""
    starts = range(0, num_rounds, length)
    by_window: list[list[np.ndarray]] = []
    for start in starts:
        found = [np.zeros(num_rounds, np.int64)]
        for pattern in brute_force.patterns(schema, min(length, num_rounds - start)):
            counts = np.zeros(num_rounds, np.int64)
            counts[[start + i for i in pattern]] = 1
            found.append(counts)
        by_window.append(found)
    return {
        tuple(np.sum(chosen, axis=0).tolist())
        for chosen in itertools.product(*by_window)
        if sum(bool(np.any(each)) for each in chosen) <= most
    }


@settings(max_examples=examples(400), deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    num_rounds=st.integers(1, 6),
    bands=st.integers(1, 6),
    signed=st.booleans(),
    schema=_SCHEMAS,
    length=st.integers(1, 6),
    num_windows=st.one_of(st.none(), st.integers(1, 6)),
)
def test_no_device_moves_more_than_is_proved(
    seed: int,
    num_rounds: int,
    bands: int,
    signed: bool,
    schema: Schema,
    length: int,
    num_windows: int | None,
) -> None:
    matrix = _matrix(seed, num_rounds, bands, signed=signed)
    unit = Unit(**dataclasses.asdict(schema), window=length, num_windows=num_windows)
    found = units.of_unit(_rows(matrix), num_rounds, unit)
    truth = _largest(matrix, _windowed(schema, num_rounds, length, num_windows or num_rounds))
    assert found.value >= truth * (1.0 - 1e-12)
    if found.is_exact:
        assert found.value == pytest.approx(truth, rel=1e-10)


@settings(max_examples=examples(150), deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    num_rounds=st.integers(1, 4),
    signed=st.booleans(),
    schema=_SCHEMAS,
    num_clients=st.integers(1, 3),
)
def test_clients_of_one_person_move_so_many_times_as_much(
    seed: int, num_rounds: int, signed: bool, schema: Schema, num_clients: int
) -> None:
    matrix = _matrix(seed, num_rounds, num_rounds, signed=signed)
    patterns = [
        [int(i in pattern) for i in range(num_rounds)]
        for pattern in brute_force.patterns(schema, num_rounds)
    ]
    together = itertools.combinations_with_replacement(patterns, num_clients)
    truth = _largest(matrix, {tuple(np.sum(each, axis=0).tolist()) for each in together})
    unit = Unit(**dataclasses.asdict(schema), num_clients=num_clients)
    found = units.of_unit(_rows(matrix), num_rounds, unit)
    assert found.value >= truth * (1.0 - 1e-12)
    if found.is_exact:
        assert found.value == pytest.approx(truth, rel=1e-10)


@settings(max_examples=examples(150), deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    signed=st.booleans(),
    rounds=st.lists(st.integers(0, 4), min_size=1, max_size=7).map(sorted),
)
def test_rounds_of_a_person_count_once_for_each_client(
    seed: int, signed: bool, rounds: list[int]
) -> None:
    matrix = _matrix(seed, 5, 5, signed=signed)
    truth = _largest(matrix, {tuple(np.bincount(rounds, minlength=5).tolist())})
    found = sensitivity.of_pattern(_rows(matrix), 5, tuple(rounds))
    assert found.value >= truth * (1.0 - 1e-12)
    if not signed:
        # All products of columns are positive.
        assert found.value == pytest.approx(truth, rel=1e-10)


@settings(max_examples=examples(120), deadline=None)
@given(rows=random_recursions.recursions(6), length=st.integers(1, 4))
def test_rows_of_all_kinds_have_units(rows: NoiseRecursion, length: int) -> None:
    matrix = exact_strategy(rows).astype(np.float64)
    if not 1e-3 < np.linalg.norm(matrix) < 1e3:
        return
    for unit in (Unit(2, 2, window=length, num_windows=1), Unit(2, 2, window=length)):
        windows = _windowed(Schema(2, 2), len(matrix), length, unit.num_windows or 6)
        found = units.of_unit(rows, len(matrix), unit)
        assert found.value + found.error >= _largest(matrix, windows) * (1.0 - 1e-12)


def test_clients_of_a_person_count_in_nodes_of_trees() -> None:
    tree = tree_aggregation(8).noise_recursion()
    found = sensitivity.of_pattern(tree, 8, (0, 0, 1))
    # Two clients and one in leaves, and three in each node above.
    assert found.value**2 == pytest.approx(4 + 1 + 3 * 9)


def test_windows_do_not_compose_like_independent_runs() -> None:
    """The root of summed squares is below the truth: windows share rows of C x."""
    matrix = np.array([[1.0, 0.0], [1.0, 0.1]])
    of_each = [
        float(
            units.of_unit(
                _rows(matrix[:n, :n] if n == 1 else matrix), n, Unit(1, 1, window=1, num_windows=1)
            )
        )
        for n in (1, 2)
    ]
    joint = units.of_unit(_rows(matrix), 2, Unit(1, 1, window=1))
    assert joint.value == pytest.approx(np.linalg.norm(matrix.sum(axis=1)))
    assert joint.value > np.linalg.norm(np.linalg.norm(matrix, axis=0)) > of_each[1]


def test_windows_of_orthogonal_columns_are_exact() -> None:
    rows = banded_rows(np.ones((12, 1)))
    for num_windows, squared in ((1, 2.0), (2, 4.0), (None, 6.0)):
        found = units.of_unit(rows, 12, Unit(2, 1, window=4, num_windows=num_windows))
        assert found.is_exact
        assert found.value**2 == pytest.approx(squared)


def test_many_rounds_have_the_bound_of_a_schema_of_all_rounds() -> None:
    rows = toeplitz_rows(6000, np.array([1.0, 0.5]))
    found = units.of_unit(rows, 6000, Unit(3, 10, window=1000, num_windows=2))
    assert found.value == sensitivity.of_rows(rows, 6000, Schema(6, 1)).value
    assert not found.is_exact


def test_a_claim_of_a_unit_is_proved_and_says_who_is_protected(tmp_path: object) -> None:
    rows, path = toeplitz_rows(8, np.array([1.0, 0.5])), f"{tmp_path}/claim.npz"
    unit = Unit(None, 2, num_clients=2, window=4)
    made = Claim(rows, unit, 30.0, _DELTA)
    claim_file.write_claim(made, path)
    read = claim_file.read_claim(path)
    assert read.taking_part == unit
    found = claim.check(read)
    expected = gaussian_epsilon(found.sensitivity.value / 30.0, _DELTA)
    assert found.epsilon == pytest.approx(expected, rel=1e-8)
    assert found.noise_digest == made.noise_digest
    assert Assumption.PEOPLE in found.assumptions
    assert "each person with 2 devices, whose client id changes every 4 rounds" in str(found)
    plan = claim.check(Claim(rows, Schema(None, 2), 30.0, _DELTA))
    again = ledger.of_unit(plan, num_clients=2, window=4)
    assert again == found
    alone = ledger.of_unit(plan)
    assert (alone.epsilon, alone.assumptions) == (plan.epsilon, plan.assumptions)
    with pytest.raises(ValueError, match="found Unit"):
        ledger.schema_of(found)


def test_one_client_is_in_a_round_once() -> None:
    rows = toeplitz_rows(8, np.array([1.0, 0.5]))
    with pytest.raises(ValueError, match="in a round once"):
        Claim(rows, Pattern((1, 1)), 2.0, _DELTA)
    with pytest.raises(ValueError, match="must not decrease"):
        Pattern((2, 1))
    found = claim.check(Claim(rows, Pattern((1, 1)), 9.0, _DELTA, basis=Basis.PEOPLE))
    assert found.sensitivity.value == pytest.approx(2.0 * np.sqrt(1.25))
    assert Assumption.PEOPLE in found.assumptions


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ({"num_clients": 0}, ValueError),
        ({"window": 0}, ValueError),
        ({"num_windows": 0}, ValueError),
        ({"num_clients": 1.5}, ValueError),
        ({"separation": 0}, ValueError),
        ({"most": 1.0}, TypeError),
    ],
)
def test_other_units_are_refused(values: dict[str, object], kind: type[Exception]) -> None:
    with pytest.raises(kind):
        Unit(**{"most": 2, "separation": 1, **values})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "who"),
    [
        ({}, "each client"),
        ({"num_clients": 3}, "each person with 3 clients"),
        ({"window": 5, "num_windows": 1}, "each client in a window of 5 rounds"),
        ({"window": 5}, "each device, whose client id changes every 5 rounds"),
        (
            {"window": 5, "num_windows": 2, "num_clients": 3},
            "each person with 3 devices, whose client id changes every 5 rounds, in 2 windows",
        ),
    ],
)
def test_units_say_who_is_protected(values: dict[str, Any], who: str) -> None:
    unit = Unit(2, 3, **values)
    assert unit.who == who
    assert str(unit).endswith(" in a window") == ("window" in values)
