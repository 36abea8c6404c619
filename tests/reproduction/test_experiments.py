"""Experiments at sizes that take seconds, against print and against independent computation."""

import decimal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mf_aggregators import factorizations
from mf_aggregators.participation import SingleParticipation
from reproduction import banded_tables, best_bands, optimal_tables
from reproduction.experiment import Outcome, Row, Workspace, parse_printed

_WORKSPACE = Workspace()


def _value(outcome: Outcome, where: str, quantity: str) -> float:
    (row,) = [row for row in outcome.rows if row.row.startswith(where) and quantity in row.quantity]
    return row.ours


@pytest.mark.long
def test_the_table_of_total_errors_as_printed() -> None:
    """Tree and optimum; the structured matrix may be better than the printed one."""
    outcome = optimal_tables.table(_WORKSPACE, (256, 512))
    by_rule = [row for row in outcome.rows if "by the paper's rule" in row.quantity]
    optimal = [row for row in outcome.rows if row.quantity == "optimal: total error"]
    for row, best in zip(by_rule, optimal, strict=True):
        assert best.ours < row.ours < best.ours * (1.0 + 1e-4)
    for row in outcome.rows:
        if row in by_rule:
            continue
        if row.verdict != "agrees":
            assert "structured" in row.quantity
            assert row.ours < (row.paper or 0.0)


def test_variances_of_the_tree_jump_and_those_of_the_optimum_do_not() -> None:
    outcome = optimal_tables.variances(_WORKSPACE, 64)
    assert _value(outcome, "n = 64", "tree, online: largest") > 0.5
    # After the first rounds, whose variances are small and grow.
    assert _value(outcome, "n = 64", "total error of the online tree") > 1.5


def test_errors_of_rounds_are_ordered_as_in_the_figure() -> None:
    outcome = optimal_tables.per_round_errors(_WORKSPACE, 32)
    by_row = {row.row: row.ours for row in outcome.rows}
    sums = [value for where, value in by_row.items() if where.startswith("Prefix sums")]
    assert sums == sorted(sums, reverse=True)
    momentum = [value for where, value in by_row.items() if where.startswith("Iterates")]
    assert momentum == sorted(momentum, reverse=True)
    assert sums[-1] == momentum[-1] == 1.0


@pytest.mark.long
def test_the_best_number_of_bands_of_small_cells() -> None:
    """A cell by brute force over its candidates, and DP-SGD among them."""
    (cell,) = best_bands.cells(_WORKSPACE, (2.0,), (4,), 32)
    assert [choice.num_bands for choice in cell.choices] == [1, 2, 4, 8]
    errors = {choice.num_bands: choice.noise_multiplier * choice.rmse for choice in cell.choices}
    assert cell.best.num_bands == min(errors, key=errors.__getitem__)
    assert cell.independent_noise == pytest.approx(errors[1])
    # RMSE of prefix sums with independent noise of variance one: the root of (n + 1) / 2.
    assert cell.choices[0].rmse == pytest.approx(np.sqrt(33.0 / 2.0))


def test_verdicts() -> None:
    row = Row("here", "error", "1.50", 1.504, "a reason")
    assert (row.verdict, row.to_dict()["reason"]) == ("agrees", None)
    row = Row("here", "error", "1.50", 1.51, "a reason")
    assert (row.verdict, row.to_dict()["reason"]) == ("differs", "a reason")
    assert row.relative_difference == pytest.approx(0.01 / 1.5)
    assert Row("here", "error", None, 1.51).verdict == "not printed"


def test_the_production_run() -> None:
    outcome = banded_tables.production(_WORKSPACE)
    assert [row.verdict for row in outcome.rows] == ["agrees", "differs"]
    # The printed epsilon is that of a rho which rounds to the printed one.
    assert outcome.rows[1].reason is not None
    least, largest = map(float, outcome.rows[1].reason.split("from ")[1].split(" to "))
    assert least <= 4.35 <= largest


def test_the_sampling_of_printed_multipliers() -> None:
    """1,001 of 342,477 users are drawn in 64 groups, 33 times; 1,000 give another fourth digit."""
    reason = banded_tables._other_sampling(_WORKSPACE, 8.0, 64, "0.43490")
    assert reason.startswith("the printed one is that of 1,001 expected clients")
    assert "in groups of 5,351" in reason
    assert "1,000 of all 342,477 it is 0.43465" in reason
    other = banded_tables._other_sampling(_WORKSPACE, 8.0, 64, "0.43480")
    assert other.startswith("not explained; ours is for 1,000 of 342,000")


def test_multi_epoch_errors_are_the_least_possible_ones() -> None:
    """All are certified; as many as rounds leave a diagonal C, whose optimum is exact."""
    found, note = best_bands.multi_epoch_errors(_WORKSPACE, (1, 2, 16, 32), 32)
    workload = np.tri(32)
    single = factorizations.optimal(workload)
    assert found[1] == pytest.approx(single.rmse(workload, SingleParticipation()))
    # C = diag(c) has the squared sensitivity sum(c^2) and the error sum over j of (n - j) / c_j^2,
    # which Cauchy and Schwarz bound by the square of the sum of roots: C is the equality.
    weights = np.arange(32, 0, -1)
    expected = np.sum(np.sqrt(weights)) / np.sqrt(32.0)
    assert found[32] == pytest.approx(expected, rel=1e-3)
    assert note.endswith("certified.")


@given(st.integers(-(10**6), 10**6), st.integers(0, 6), st.floats(-3.0, 3.0))
def test_what_rounds_to_the_digits_agrees(digits: int, places: int, distance: float) -> None:
    """Half-way cases, which rounding decides by its own rule, are left out."""
    number = decimal.Decimal(digits).scaleb(-places)
    unit = decimal.Decimal(1).scaleb(-places)
    computed = float(number) + distance * float(unit)
    exactly = abs(decimal.Decimal(computed) - number) / unit
    if abs(exactly - decimal.Decimal("0.5")) < decimal.Decimal("1e-6"):
        return
    printed = parse_printed(f"{number:f}")
    assert printed.agrees(computed) == (exactly < decimal.Decimal("0.5"))
    assert printed.value == float(number)


@pytest.mark.parametrize("text", ["", "about 2", "1,000", "<1", "1.", "nan", "inf"])
def test_what_is_no_printed_number_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be a decimal number"):
        parse_printed(text)
