"""The record of sums, as both aggregators write it; ``privacy.test_own_runs`` has whole runs."""

import hashlib
import pathlib

import pytest

from mf_aggregators.kernel.release import ReleaseRecord
from mf_aggregators.noise import released_sums
from mf_aggregators.noise.released_sums import RecordError, ReleasedSums

_STREAM, _NOISE = "stream--3-4", b"n" * 32


def _write(tmp_path: pathlib.Path, name: str) -> None:
    path = tmp_path / "released" / _STREAM / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()


def test_files_and_folders_are_read_alike(tmp_path: pathlib.Path) -> None:
    assert released_sums.streams(tmp_path) == []
    record = ReleaseRecord(tmp_path)
    record.check(_STREAM, 10, b"s" * 32, _NOISE)
    record.spend(_STREAM, 2)
    name = f"-12.7.{_NOISE.hex()}"
    _write(tmp_path, f"round-0/{name}")
    # A round that was spent after its sum was recorded.
    _write(tmp_path, f"round-1/{name}")
    _write(tmp_path, "round-1/spent")
    assert released_sums.streams(tmp_path) == [_STREAM]
    assert released_sums.name_of_stream([-3, 4]) == _STREAM
    found = released_sums.read(tmp_path, _STREAM)
    assert found.of_rounds == {0: _NOISE.hex(), 1: "", 2: "", 10: _NOISE.hex()}
    assert (found.num_sums, found.num_rounds) == (2, 11)
    lines = (f"0 {name}", "1 spent", "2 spent", f"10 {(b's' * 32 + _NOISE).hex()}")
    assert found.text == "".join(f"{line}\n" for line in lines)
    assert found.sha256 == hashlib.sha256(found.text.encode()).hexdigest()
    assert ReleasedSums(found.text) == found
    record.check(_STREAM, 11, b"t" * 32, _NOISE)
    assert released_sums.read(tmp_path, _STREAM).sha256 != found.sha256


@pytest.mark.parametrize("names", [("-12.7",), (), ("1.2." + "0" * 64, "1.3." + "0" * 64)])
def test_what_no_aggregator_writes_is_refused(
    names: tuple[str, ...], tmp_path: pathlib.Path
) -> None:
    (tmp_path / "released" / _STREAM / "round-3").mkdir(parents=True)
    for name in names:
        _write(tmp_path, f"round-3/{name}")
    with pytest.raises(RecordError, match="'3 "):
        released_sums.read(tmp_path, _STREAM)


@pytest.mark.parametrize(
    "text",
    ["0 spent", "1 spent\n0 spent\n", "0 spent\n0 spent\n", "-1 spent\n", "\n", "01 spent\n"],
)
def test_other_texts_are_no_record(text: str) -> None:
    with pytest.raises(RecordError, match="broken"):
        ReleasedSums(text)
