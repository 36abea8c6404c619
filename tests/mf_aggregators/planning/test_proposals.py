"""The cache of factorizations: what it keeps, and what it does not believe."""

import json
import pathlib
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mf_aggregators import checkpoints, factorizations, workloads
from mf_aggregators.caches import CacheWarning
from mf_aggregators.factorizations import Factorization
from mf_aggregators.planning import proposals

_DESCRIPTION = {"mechanism": "banded", "num_rounds": 6, "num_bands": 2}


class _Counted:
    """A computation that counts how often it is made."""

    def __init__(self, num_bands: int = 2) -> None:
        self.calls = 0
        self._num_bands = num_bands

    def __call__(self) -> Factorization:
        self.calls += 1
        return factorizations.banded(workloads.prefix_sum(6), self._num_bands)


def _entry(directory: pathlib.Path) -> pathlib.Path:
    (entry,) = directory.iterdir()
    return entry


def test_a_second_call_reads_the_same_matrix_and_computes_nothing(tmp_path: pathlib.Path) -> None:
    compute = _Counted()
    first = proposals.fetch(tmp_path, _DESCRIPTION, compute)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = proposals.fetch(tmp_path, dict(reversed(_DESCRIPTION.items())), compute)
    assert compute.calls == 1
    assert np.array_equal(first.strategy_matrix(), second.strategy_matrix())
    assert second.optimality_gap == first.optimality_gap


def test_without_a_directory_nothing_is_kept(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    compute = _Counted()
    for _ in range(2):
        proposals.fetch(None, _DESCRIPTION, compute)
    assert compute.calls == 2
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("change", [{"num_bands": 3}, {"num_rounds": 7}, {"error": "max"}])
def test_another_description_is_another_entry(
    tmp_path: pathlib.Path, change: dict[str, object]
) -> None:
    compute = _Counted()
    proposals.fetch(tmp_path, _DESCRIPTION, compute)
    proposals.fetch(tmp_path, {**_DESCRIPTION, **change}, compute)
    assert compute.calls == 2
    assert len(list(tmp_path.iterdir())) == 2


def test_another_version_of_the_library_computes_anew(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = _Counted()
    proposals.fetch(tmp_path, _DESCRIPTION, compute)
    monkeypatch.setattr("mf_aggregators.version.__version__", "0.0.0")
    proposals.fetch(tmp_path, _DESCRIPTION, compute)
    assert compute.calls == 2


def _truncate(entry: pathlib.Path) -> None:
    arrays = entry / checkpoints.ARRAYS_FILE
    arrays.write_bytes(arrays.read_bytes()[:-7])


def _alter(entry: pathlib.Path) -> None:
    description = entry / checkpoints.DESCRIPTION_FILE
    contents = json.loads(description.read_text())
    contents["optimality_gap"] = 0.0
    description.write_text(json.dumps(contents))


def _lose_half(entry: pathlib.Path) -> None:
    (entry / checkpoints.DESCRIPTION_FILE).unlink()


def _exchange(entry: pathlib.Path) -> None:
    """A whole checkpoint, of the same mechanism with other bands."""
    checkpoints.save(_Counted(3)(), entry)


def _exchange_mechanism(entry: pathlib.Path) -> None:
    checkpoints.save(factorizations.identity(6), entry)


_WEIGHTS = [1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
_ERRORS = [{}, {"error": "max"}, {"error": "weights", "weights": [w / 14.0 for w in _WEIGHTS]}]


@pytest.mark.parametrize("place", _ERRORS)
@pytest.mark.parametrize("stored", ["mean", "max", _WEIGHTS, _WEIGHTS[::-1]])
def test_no_entry_is_taken_for_one_of_another_error(
    tmp_path: pathlib.Path, place: dict[str, object], stored: str | list[float]
) -> None:
    """A whole checkpoint of the same mechanism and bands, where that of an error belongs."""
    proposals.fetch(tmp_path, {**_DESCRIPTION, **place}, _Counted())
    error: Any = stored if isinstance(stored, str) else np.array(stored)
    checkpoints.save(factorizations.banded(6, 2, error=error), _entry(tmp_path), overwrite=True)
    again = _Counted()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CacheWarning)
        proposals.fetch(tmp_path, {**_DESCRIPTION, **place}, again)
    belongs = ["mean", "max"].index(stored) if isinstance(stored, str) else 2
    is_its_own = _ERRORS[belongs] == place and stored != _WEIGHTS[::-1]
    assert again.calls == (0 if is_its_own else 1)


@pytest.mark.parametrize("damage", [_truncate, _alter, _lose_half, _exchange, _exchange_mechanism])
def test_a_damaged_or_foreign_entry_is_computed_again(
    tmp_path: pathlib.Path, damage: Callable[[pathlib.Path], None]
) -> None:
    compute = _Counted()
    first = proposals.fetch(tmp_path, _DESCRIPTION, compute)
    damage(_entry(tmp_path))
    with pytest.warns(CacheWarning):
        second = proposals.fetch(tmp_path, _DESCRIPTION, compute)
    assert compute.calls == 2
    assert np.array_equal(first.strategy_matrix(), second.strategy_matrix())
    # It is whole again.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        proposals.fetch(tmp_path, _DESCRIPTION, compute)
    assert compute.calls == 2


def test_what_cannot_be_kept_is_used_with_a_warning(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "file"
    file.write_text("no directory")
    compute = _Counted()
    with pytest.warns(CacheWarning):
        found = proposals.fetch(file / "cache", _DESCRIPTION, compute)
    assert np.array_equal(found.strategy_matrix(), _Counted()().strategy_matrix())
    with pytest.warns(CacheWarning):
        assert proposals.fetch_number(file / "cache", {"b": 1}, lambda: 1.5) == 1.5


def test_an_interrupted_computation_leaves_nothing(tmp_path: pathlib.Path) -> None:
    def interrupted() -> Factorization:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        proposals.fetch(tmp_path, _DESCRIPTION, interrupted)
    assert not list(tmp_path.iterdir())


def test_numbers_come_back_to_the_last_bit(tmp_path: pathlib.Path) -> None:
    number = 0.1 + 0.2
    assert proposals.fetch_number(tmp_path, {"b": 1}, lambda: number) == number
    assert proposals.fetch_number(tmp_path, {"b": 1}, lambda: 7.0) == number
    assert proposals.fetch_number(tmp_path, {"b": 2}, lambda: 7.0) == 7.0
    assert proposals.fetch_number(None, {"b": 1}, lambda: 8.0) == 8.0


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text[:-9],
        lambda text: text.replace("1.5", "0.5"),
        lambda text: text.replace('"b": 1', '"b": 2'),
        lambda text: "[1.5]",
        lambda text: "",
        lambda text: text.replace("1.5", "NaN"),
    ],
    ids=["truncated", "altered", "foreign", "no object", "empty", "no number"],
)
def test_a_damaged_number_is_computed_again(
    tmp_path: pathlib.Path, change: Callable[[str], str]
) -> None:
    """A noise multiplier that somebody made smaller would be no privacy."""
    proposals.fetch_number(tmp_path, {"b": 1}, lambda: 1.5)
    entry = _entry(tmp_path)
    entry.write_text(change(entry.read_text()))
    with pytest.warns(CacheWarning):
        assert proposals.fetch_number(tmp_path, {"b": 1}, lambda: 1.25) == 1.25
    assert proposals.fetch_number(tmp_path, {"b": 1}, lambda: 7.0) == 1.25


def test_a_number_that_does_not_keep_the_target_is_computed_again(tmp_path: pathlib.Path) -> None:
    proposals.fetch_number(tmp_path, {"b": 1}, lambda: 0.4)
    with pytest.warns(CacheWarning, match="0.4 does not keep the target"):
        found = proposals.fetch_number(
            tmp_path, {"b": 1}, lambda: 1.0, lambda number: number >= 1.0
        )
    assert found == 1.0
    assert proposals.fetch_number(tmp_path, {"b": 1}, lambda: 7.0) == 1.0


def test_a_whole_number_of_another_description_is_not_used(tmp_path: pathlib.Path) -> None:
    proposals.fetch_number(tmp_path, {"b": 1}, lambda: 1.5)
    one = _entry(tmp_path)
    proposals.fetch_number(tmp_path, {"b": 2}, lambda: 0.5)
    (other,) = set(tmp_path.iterdir()) - {one}
    one.write_text(other.read_text())
    with pytest.warns(CacheWarning):
        assert proposals.fetch_number(tmp_path, {"b": 1}, lambda: 1.5) == 1.5
