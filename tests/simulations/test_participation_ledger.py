"""The ledger: what is saved is loaded, and what is broken is refused."""

import pathlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulations.participation_ledger import LedgerError, ParticipationLedger

_COHORTS = st.lists(st.lists(st.integers(0, 4), unique=True, max_size=5), max_size=8)


def _ledger(cohorts: list[list[int]]) -> ParticipationLedger:
    ledger = ParticipationLedger(("ann", "bob", "čeda", "dan", "eve"))
    for cohort in cohorts:
        ledger = ledger.with_round(np.array(sorted(cohort), dtype=np.int64))
    return ledger


@given(_COHORTS)
@settings(deadline=None)
def test_what_is_saved_is_loaded(
    tmp_path_factory: pytest.TempPathFactory, cohorts: list[list[int]]
) -> None:
    path = tmp_path_factory.mktemp("ledger") / "participation.npz"
    ledger = _ledger(cohorts)
    ledger.save(path)
    loaded = ParticipationLedger.load(path)
    assert loaded.client_ids == ledger.client_ids
    assert [list(cohort) for cohort in loaded.cohorts] == [sorted(cohort) for cohort in cohorts]
    assert [path.name for path in path.parent.iterdir()] == ["participation.npz"]


@given(_COHORTS)
def test_rounds_of_clients_are_the_cohorts_transposed(cohorts: list[list[int]]) -> None:
    rounds = _ledger(cohorts).rounds_of_clients()
    for client in range(5):
        expected = [index for index, cohort in enumerate(cohorts) if client in cohort]
        assert list(rounds[client]) == expected


@given(_COHORTS)
def test_timers_remember_the_ledger(cohorts: list[list[int]]) -> None:
    ledger = _ledger(cohorts)
    timers = ledger.timers()
    for client, rounds in enumerate(ledger.rounds_of_clients()):
        assert timers.participations[client] == len(rounds)
        assert timers.last_round[client] == (rounds[-1] if len(rounds) else -1)


def test_first_rounds() -> None:
    ledger = _ledger([[0, 1], [2], [3]])
    assert ledger.first_rounds(2).num_rounds == 2
    assert ledger.num_rounds == 3


def test_the_file_has_the_documented_arrays(tmp_path: pathlib.Path) -> None:
    _ledger([[0, 2], [], [2, 4]]).save(tmp_path / "p.npz")
    with np.load(tmp_path / "p.npz") as archive:
        offsets, rounds = archive["offsets"], archive["rounds"]
        assert list(archive["client_ids"]) == ["ann", "bob", "čeda", "dan", "eve"]
        assert list(rounds[offsets[2] : offsets[3]]) == [0, 2]
        assert int(archive["num_rounds"]) == 3


def test_broken_files_are_refused(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "p.npz"
    with pytest.raises(LedgerError, match=r"p\.npz cannot be read"):
        ParticipationLedger.load(path)
    _ledger([[0, 1], [2]]).save(path)
    whole = path.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"", b"nonsense"):
        path.write_bytes(damaged)
        with pytest.raises(LedgerError, match=r"p\.npz cannot be read"):
            ParticipationLedger.load(path)
    np.savez(path, client_ids=["a"], offsets=[0, 2], rounds=[0, 9], num_rounds=3)
    with pytest.raises(LedgerError, match="broken"):
        ParticipationLedger.load(path)
