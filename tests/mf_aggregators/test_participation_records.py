"""Records of participation: what is written is read, and what is broken is refused."""

import pathlib

import numpy as np
import pytest

from mf_aggregators import participation_records
from mf_aggregators.sampling_schemes import FixedSizeSampling
from simulations.participation_ledger import ParticipationLedger


def test_the_ledger_of_a_run_is_read(tmp_path: pathlib.Path) -> None:
    ledger = ParticipationLedger(
        ("ada", "bo", "cy"), (np.array([0, 2]), np.array([1]), np.array([0]))
    )
    ledger.save(tmp_path / "participation.npz")
    record = participation_records.load(tmp_path / "participation.npz", 99)
    assert record.client_ids == ("ada", "bo", "cy")
    assert [list(rounds) for rounds in record.rounds_of_clients] == [[0, 2], [1], [0]]
    assert record.num_rounds == 3
    assert record.sampling is None


def test_the_sampling_of_a_ledger_is_read(tmp_path: pathlib.Path) -> None:
    scheme = FixedSizeSampling(4, 2, 6, 2)
    cohorts = (np.array([0, 2]), np.array([1, 5]))
    ledger = ParticipationLedger(tuple("abcdef"), cohorts, scheme)
    ledger.save(tmp_path / "participation.npz")
    assert participation_records.load(tmp_path / "participation.npz", 4).sampling == scheme


def test_a_sampling_scheme_that_is_none_is_refused(tmp_path: pathlib.Path) -> None:
    ParticipationLedger(("ada",), (np.array([0]),)).save(tmp_path / "participation.npz")
    with np.load(tmp_path / "participation.npz") as archive:
        contents = dict(archive)
    np.savez(tmp_path / "other.npz", **contents, sampling=np.array('{"name": "whim"}'))
    with pytest.raises(participation_records.RecordError, match=r"other\.npz cannot be read"):
        participation_records.load(tmp_path / "other.npz", 1)


@pytest.mark.parametrize("heading", ["", "client,round\n"])
def test_text_is_read(tmp_path: pathlib.Path, heading: str) -> None:
    file = tmp_path / "rounds.csv"
    file.write_text(f"{heading}ada,4\nbo, 0\n\nada,1\n")
    record = participation_records.load(file, 6)
    assert record.client_ids == ("ada", "bo")
    assert [list(rounds) for rounds in record.rounds_of_clients] == [[1, 4], [0]]
    assert record.num_rounds == 6


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ("", "no participation"),
        ("client,round\n", "no participation"),
        ("ada,1\nbo\n", "line 2"),
        ("ada,1\nbo,-2\n", "line 2"),
        ("ada,1\nbo,1.5\n", "line 2"),
        ("ada,1,2\n", "line 1"),
    ],
)
def test_text_that_is_no_record_is_refused(
    tmp_path: pathlib.Path, contents: str, message: str
) -> None:
    file = tmp_path / "rounds.csv"
    file.write_text(contents)
    with pytest.raises(participation_records.RecordError, match=message):
        participation_records.load(file, 6)


def test_damaged_archives_are_refused(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "participation.npz"
    with pytest.raises(participation_records.RecordError, match="No such file"):
        participation_records.load(file, 6)
    ledger = ParticipationLedger(("ada", "bo"), (np.array([0, 1]),))
    ledger.save(file)
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(participation_records.RecordError, match="cannot be read"):
        participation_records.load(file, 6)
    np.savez(
        file,
        client_ids=np.array(["ada"]),
        offsets=np.array([0, 3]),
        rounds=np.array([1]),
        num_rounds=np.array(4),
    )
    with pytest.raises(participation_records.RecordError, match="do not fit together"):
        participation_records.load(file, 6)


def test_two_clients_of_one_name_are_refused(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "record.npz"
    names, offsets, rounds = np.array(["a", "b", "a"]), np.arange(4), np.array([0, 1, 1])
    np.savez(file, client_ids=names, offsets=offsets, rounds=rounds, num_rounds=np.array(2))
    with pytest.raises(participation_records.RecordError, match="two clients of the same name"):
        participation_records.load(file, 2)
