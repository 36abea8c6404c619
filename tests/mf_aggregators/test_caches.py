"""Cached values: an entry that was damaged or altered is computed again."""

import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from mf_aggregators import caches
from mf_aggregators.caches import CacheWarning


def _kept(value: Any) -> float:
    if not isinstance(value, float) or value < 1.0:
        raise ValueError("it is not believed")
    return value


def _fetched(entry: pathlib.Path | None, number: float, b: int = 1) -> float:
    return caches.fetch(
        entry, {"b": b}, lambda: number, field="number", to_json=float, from_json=_kept
    )


def test_numbers_come_back_to_the_last_bit(tmp_path: pathlib.Path) -> None:
    number = 1.1 + 0.2
    assert _fetched(tmp_path / "new" / "entry", number) == number
    assert _fetched(tmp_path / "new" / "entry", 7.0) == number
    assert _fetched(None, 8.0) == 8.0


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text[:-9],
        lambda text: text.replace("1.5", "2.5"),
        lambda text: text.replace('"b": 1', '"b": 2'),
        lambda text: "[1.5]",
        lambda text: text.replace("1.5", "NaN"),
    ],
    ids=["truncated", "altered", "foreign", "no object", "no number"],
)
def test_a_damaged_number_is_computed_again(
    tmp_path: pathlib.Path, change: Callable[[str], str]
) -> None:
    entry = tmp_path / "entry"
    _fetched(entry, 1.5)
    entry.write_text(change(entry.read_text()))
    with pytest.warns(CacheWarning):
        assert _fetched(entry, 1.25) == 1.25
    assert _fetched(entry, 7.0) == 1.25


def test_a_whole_number_that_is_not_believed_or_of_another_description(
    tmp_path: pathlib.Path,
) -> None:
    for name, number, b in (("small", 0.5, 1), ("foreign", 1.5, 2)):
        _fetched(tmp_path / name, number, b)
        with pytest.warns(CacheWarning):
            assert _fetched(tmp_path / name, 7.0) == 7.0


def test_a_value_that_cannot_be_cached_is_used_with_a_warning(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("no directory")
    with pytest.warns(CacheWarning):
        assert _fetched(tmp_path / "file" / "entry", 1.5) == 1.5
