"""Ledger and metrics: what is saved is loaded, and what is broken is refused or dropped."""

import csv
import gc
import pathlib
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mf_aggregators.participation import PoissonSampling
from simulations.runs.round_records import (
    MetricsLog,
    MetricsNotWrittenError,
    ParticipationLedger,
)
from simulations.runs.run_directory import RunDirectory
from tests.refusals import refuses
from tests.simulations.small_disks import files_of_at_most

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


def test_the_file_has_the_documented_arrays(tmp_path: pathlib.Path) -> None:
    _ledger([[0, 2], [], [2, 4]]).save(tmp_path / "p.npz")
    with np.load(tmp_path / "p.npz") as archive:
        offsets, rounds = archive["offsets"], archive["rounds"]
        assert list(archive["client_ids"]) == ["ann", "bob", "čeda", "dan", "eve"]
        assert list(rounds[offsets[2] : offsets[3]]) == [0, 2]
        assert int(archive["num_rounds"]) == 3


@pytest.mark.long
def test_a_ledger_that_cannot_be_written_leaves_the_old_one_and_no_traceback(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel lets no file grow beyond a size, as a full disk would not."""
    path = tmp_path / "p.npz"
    new = _ledger([[0, 1], [2], [3, 4]])
    new.save(path)
    size = path.stat().st_size
    _ledger([[0, 1], [2]]).save(path)
    old = path.read_bytes()
    complaints: list[object] = []
    gc.collect()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "unraisablehook", complaints.append)
        for num_bytes in (0, 1, size // 2, size - 1):
            with files_of_at_most(num_bytes), refuses("File too large", error=OSError):
                new.save(path)
            gc.collect()
            assert path.read_bytes() == old
            assert [entry.name for entry in tmp_path.iterdir()] == ["p.npz"]
    assert complaints == []
    new.save(path)
    assert ParticipationLedger.load(path).num_rounds == 3


@given(_COHORTS, _COHORTS)
@settings(deadline=None)
def test_digests_are_of_the_cohorts_and_nothing_else(
    one: list[list[int]], other: list[list[int]]
) -> None:
    ledger = _ledger(one)
    same = [sorted(cohort) for cohort in one] == [sorted(cohort) for cohort in other]
    assert (_ledger(other).digest() == ledger.digest()) == same
    renamed = ParticipationLedger(("ann", "bob", "c", "dan", "eve"), ledger.cohorts)
    assert renamed.digest() != ledger.digest()
    shuffled = ParticipationLedger(
        ledger.client_ids, tuple(cohort[::-1] for cohort in ledger.cohorts)
    )
    assert shuffled.digest() == ledger.digest()
    sampled = ParticipationLedger(ledger.client_ids, ledger.cohorts, PoissonSampling(5, 2, 8, 4))
    assert sampled.digest() != ledger.digest()


def _rows(path: pathlib.Path) -> list[dict[str, str]]:
    with (path / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_metrics_have_one_row_a_round_also_after_a_resume(tmp_path: pathlib.Path) -> None:
    directory = RunDirectory(tmp_path)
    log = MetricsLog(directory, ["loss", "accuracy"], 0)
    log.append(1, {"loss": 2.5})
    log.append(2, {"loss": float("nan"), "accuracy": 0.5})
    log.append(3, {"loss": 1.5})
    # The state of round 3 was not saved, so its row is no longer true.
    log = MetricsLog(directory, ["loss", "accuracy"], 2)
    log.append(3, {"loss": 1.25})
    assert _rows(tmp_path) == [
        {"round": "1", "loss": "2.5", "accuracy": ""},
        {"round": "2", "loss": "", "accuracy": "0.5"},
        {"round": "3", "loss": "1.25", "accuracy": ""},
    ]


@pytest.mark.parametrize(
    "damage",
    [
        b"2,9.0\r\n",
        b"2,9.0,0.5,7\r\n",
        b"2,9\0.0,0.5\r\n",
        b"2.0,9,9\r\n",
        b"\xff\xfe\r\n",
        b"2,9,0.5",
        b"garbage",
    ],
)
def test_damaged_rows_are_dropped(tmp_path: pathlib.Path, damage: bytes) -> None:
    (tmp_path / "metrics.csv").write_bytes(b"round,loss,accuracy\r\n1,2.5,0.5\r\n" + damage)
    MetricsLog(RunDirectory(tmp_path), ["loss", "accuracy"], 2)
    assert _rows(tmp_path) == [
        {"round": "1", "loss": "2.5", "accuracy": "0.5"},
        {"round": "2", "loss": "", "accuracy": ""},
    ]


def test_a_row_for_which_there_is_no_room_leaves_no_part(tmp_path: pathlib.Path) -> None:
    directory = RunDirectory(tmp_path)
    log = MetricsLog(directory, ["loss"], 0)
    log.append(1, {"loss": 2.5})
    path = tmp_path / "metrics.csv"
    before = path.read_bytes()
    row = b"2,0.123456\r\n"
    for room in range(len(row)):
        with (
            files_of_at_most(len(before) + room),
            pytest.raises(MetricsNotWrittenError) as raised,
        ):
            log.append(2, {"loss": 0.123456})
        assert path.read_bytes() == before
    message = str(raised.value)
    assert "\n" not in message
    assert f"could not be written to {path}: File too large" in message
    assert "free space" in message
    assert "run the same command again" in message
    with files_of_at_most(len(before) + len(row)):
        log.append(2, {"loss": 0.123456})
    assert path.read_bytes() == before + row
