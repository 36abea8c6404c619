"""The privacy that a run has spent, and the forms that a ledger may have."""

import pathlib
from typing import Any

import numpy as np
import pytest

import mf_aggregators as mfa
from mf_aggregators import accounting
from mf_aggregators.privacy import ledgers
from mf_aggregators.privacy.ledgers import LedgerError

_DELTA = 1e-6
_COHORTS = [["ada", "bo"], ["cy"], [], ["ada"]]
_MAPPING = {"ada": [3, 0], "bo": (0,), "cy": {1}}
_ROWS = "ada,3\nada,0\nbo,0\ncy,1\n"


def _mechanism() -> mfa.Mechanism:
    timers = mfa.participation.MinSeparation(separation=3)
    return mfa.Mechanism(mfa.factorizations.banded(12, num_bands=3), timers, 2.0)


def test_all_forms_are_one_ledger(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "rounds.csv"
    file.write_text(_ROWS)
    forms: tuple[Any, ...] = (_COHORTS, _MAPPING, file, str(file))
    found = [ledgers.of(given, 4) for given in forms]
    assert all(each.has_same_rounds(found[0]) and each.num_rounds == 4 for each in found)
    assert ledgers.of(found[0], 9) is found[0]
    numbered = ledgers.of({7: [0], "x": np.array([1])}, 2)
    assert numbered.client_ids == ("7", "x")
    assert ledgers.of([], 4).num_rounds == 0


@pytest.mark.parametrize(
    "given",
    [
        7,
        ["ada", "bo"],
        {"ada": [4]},
        {"ada": [1, 1]},
        {"ada": [0.0]},
        {"ada": [True]},
        [["ada", "ada"]],
        {1: [0], "1": [1]},
    ],
)
def test_other_ledgers_are_refused(given: object) -> None:
    with pytest.raises(LedgerError):
        ledgers.of(given, 4)  # type: ignore[arg-type]


def test_the_plan_comes_first_and_less_holds_under_an_assumption() -> None:
    """Four participations in rows of C x of their own are planned, and two in four rounds."""
    mechanism = _mechanism()
    matrix = mechanism.factorization.strategy_matrix()
    moved = np.linalg.norm(matrix[:4, [0, 3]]) / np.linalg.norm(matrix[:, ::3])
    found = mfa.spent(mechanism, _COHORTS, _DELTA, round_counts=[2, 1, 0, 1])
    assert found.planned.epsilon == pytest.approx(accounting.epsilon(2.0, _DELTA), rel=1e-8)
    expected = accounting.epsilon(float(2.0 / moved), _DELTA)
    assert found.so_far.epsilon == pytest.approx(expected, rel=1e-8)
    assert found.so_far.num_rounds == 4
    text = str(found)
    assert text.index("as planned") < text.index("so far, in 4 rounds, only if participation")


def test_without_counts_nothing_better_than_the_plan_is_spent() -> None:
    found = mfa.spent(_mechanism(), _COHORTS, _DELTA)
    assert found.so_far.epsilon == found.planned.epsilon
    assert "only if" not in str(found)


def test_nothing_is_spent_before_the_first_round() -> None:
    assert mfa.spent(_mechanism(), [], _DELTA, round_counts=[]).so_far.epsilon == 0.0
