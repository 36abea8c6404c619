"""States on disk: whole or not there, and never gone on from once a byte of them was altered."""

import os
import pathlib
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from simulations.runs import training_loop
from simulations.runs.run_directory import LedgerError, ParticipationLedger
from simulations.runs.training_loop import (
    DamagedDirectoryError,
    Progress,
    StateNotSavedError,
    StateStore,
)
from tests.examples import covering, examples
from tests.refusals import refuses
from tests.simulations.small_disks import files_of_at_most

_CLIENTS = ("a", "b", "c")


def _state(num_rounds: int) -> dict[str, Any]:
    """A state of every round, none like another in any of its leaves."""
    rng = np.random.default_rng(num_rounds)
    return {
        "model": [rng.normal(size=(40, 5)).astype(np.float32), rng.normal(size=3)],
        "round": np.int32(num_rounds),
        "seed": rng.integers(0, 2**63, size=2),
    }


def _progress(num_rounds: int) -> Progress:
    ledger = ParticipationLedger(_CLIENTS)
    for index in range(num_rounds):
        ledger = ledger.with_round(np.array([index % 3]))
    return Progress(_state(num_rounds), num_rounds, ledger)


def _store(directory: pathlib.Path) -> StateStore:
    return StateStore(directory / "states", directory / "ledger.npz")


def _saved(directory: pathlib.Path, *rounds: int) -> StateStore:
    store = _store(directory)
    for num_rounds in rounds:
        store.save(_progress(num_rounds))
    return store


def _load(store: StateStore) -> Progress | None:
    return store.load(_state(0), _CLIENTS)


def _is_state_of(state: Any, num_rounds: int) -> bool:
    ours, theirs = tf.nest.flatten(state), tf.nest.flatten(_state(num_rounds))
    return len(ours) == len(theirs) and all(
        np.asarray(mine).dtype == np.asarray(other).dtype and np.array_equal(mine, other)
        for mine, other in zip(ours, theirs, strict=True)
    )


def _assert_goes_on_from(store: StateStore, num_rounds: int) -> None:
    progress = _load(store)
    assert progress is not None
    assert progress.num_rounds == num_rounds
    assert _is_state_of(progress.state, num_rounds)


def _names(directory: pathlib.Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


@pytest.fixture(scope="module")
def three_saved(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A run after three rounds; tests work on copies."""
    directory = tmp_path_factory.mktemp("three")
    _saved(directory, 0, 1, 2, 3)
    return directory


@pytest.fixture
def run(three_saved: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    """A copy of its own of a run after three rounds."""
    return shutil.copytree(three_saved, tmp_path / "run")


def test_the_two_newest_states_are_kept_and_nothing_else(run: pathlib.Path) -> None:
    assert _names(run) == {"states", "ledger.npz"}
    assert _names(run / "states") == {"round_2", "round_3"}
    _assert_goes_on_from(_store(run), 3)
    assert (run / "states").stat().st_mode & 0o077 == 0


@settings(
    max_examples=examples(60),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_no_altered_byte_is_gone_on_from(
    three_saved: pathlib.Path, caplog: pytest.LogCaptureFixture, data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as name:
        run = shutil.copytree(three_saved, pathlib.Path(name) / "run")
        newest = run / "states" / "round_3"
        files = sorted(path for path in newest.rglob("*") if path.is_file())
        path = data.draw(st.sampled_from(files), label="file")
        contents = bytearray(path.read_bytes())
        position = data.draw(st.integers(0, len(contents) - 1), label="position")
        contents[position] ^= data.draw(st.integers(1, 255), label="bits")
        path.write_bytes(contents)
        caplog.clear()
        _assert_goes_on_from(_store(run), 2)
        assert f"{newest} is damaged; going on from round 2" in caplog.text
        # Whichever of the two was altered, both are named.
        assert path.name in caplog.text
        assert _names(run / "states") == {"round_2"}


def _cut_in_half(newest: pathlib.Path, path: pathlib.Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _empty_file(newest: pathlib.Path, path: pathlib.Path) -> None:
    os.truncate(path, 0)


def _missing_file(newest: pathlib.Path, path: pathlib.Path) -> None:
    path.unlink()


def _link_to_itself(newest: pathlib.Path, path: pathlib.Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def _directory_in_place_of_a_file(newest: pathlib.Path, path: pathlib.Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("harm", "name"),
    covering(
        [_cut_in_half, _empty_file, _missing_file, _link_to_itself, _directory_in_place_of_a_file],
        [
            "saved_model.pb",
            "fingerprint.pb",
            "variables/variables.index",
            "variables/variables.data-00000-of-00001",
            training_loop.CHECKSUM_FILE,
        ],
    ),
)
def test_a_harmed_file_falls_back(
    run: pathlib.Path,
    caplog: pytest.LogCaptureFixture,
    harm: Callable[[pathlib.Path, pathlib.Path], None],
    name: str,
) -> None:
    newest = run / "states" / "round_3"
    harm(newest, newest / name)
    store = _store(run)
    _assert_goes_on_from(store, 2)
    assert "round_3 is damaged; going on from round 2" in caplog.text
    assert pathlib.Path(name).name in caplog.text
    # The round is run again, and its state saved under the same name.
    store.save(_progress(3))
    _assert_goes_on_from(store, 3)


def _replace_by_file(newest: pathlib.Path) -> None:
    shutil.rmtree(newest)
    newest.write_bytes(b"state")


def _empty(newest: pathlib.Path) -> None:
    shutil.rmtree(newest)
    newest.mkdir()


def _without_checksums(newest: pathlib.Path) -> None:
    (newest / training_loop.CHECKSUM_FILE).unlink()


def _state_of_another_round(newest: pathlib.Path) -> None:
    shutil.rmtree(newest)
    shutil.copytree(newest.with_name("round_2"), newest)


def _one_file_more(newest: pathlib.Path) -> None:
    (newest / "saved_model.pbtxt").write_text("")


@pytest.mark.parametrize(
    "harm",
    [
        _replace_by_file,
        _empty,
        _without_checksums,
        _state_of_another_round,
        _one_file_more,
    ],
)
def test_a_harmed_state_falls_back(
    run: pathlib.Path, caplog: pytest.LogCaptureFixture, harm: Callable[[pathlib.Path], None]
) -> None:
    harm(run / "states" / "round_3")
    store = _store(run)
    _assert_goes_on_from(store, 2)
    assert "round_3 is damaged; going on from round 2" in caplog.text
    store.save(_progress(3))
    _assert_goes_on_from(store, 3)


@pytest.mark.parametrize("mode", [0o701, 0o740, 0o755], ids=oct)
def test_states_that_others_may_read_are_refused(three_saved: pathlib.Path, mode: int) -> None:
    states = three_saved / "states"
    states.chmod(mode)
    with refuses("open to others", f"chmod 700 {states}"):
        _store(three_saved)
    states.chmod(0o700)
    _assert_goes_on_from(_store(three_saved), 3)


def test_a_state_that_the_manager_cannot_load_falls_back_and_its_values_stay_secret(
    run: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    newest = run / "states" / "round_3"
    (newest / "saved_model.pb").write_bytes(b"no model")
    (newest / training_loop.CHECKSUM_FILE).unlink()
    training_loop.seal(newest, "state after round 3")
    _assert_goes_on_from(_store(run), 2)
    assert "round_3 cannot be loaded" in caplog.text


def test_without_a_state_that_is_whole_the_run_stops_and_nothing_is_removed(
    run: pathlib.Path,
) -> None:
    _cut_in_half(run, run / "states" / "round_3" / "saved_model.pb")
    _cut_in_half(run, run / "states" / "round_2" / "fingerprint.pb")
    with refuses("saved_model.pb", "fingerprint.pb", error=LedgerError):
        _load(_store(run))
    assert _names(run / "states") == {"round_2", "round_3"}


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_writes_that_the_kernel_refuses_leave_the_states_before(run: pathlib.Path) -> None:
    sizes = sorted({path.stat().st_size for path in run.rglob("*") if path.is_file()})
    store = _store(run)
    refused = 0
    # Nothing at all, and all of each file but its last byte.
    limits = [0, *(size - 1 for size in sizes)]
    for num_bytes in limits:
        with files_of_at_most(num_bytes):
            try:
                store.save(_progress(4))
            except StateNotSavedError as error:
                refused += 1
                message = str(error)
        # The ledger may have the round already; nobody was shown its result.
        assert _names(run) == {"states", "ledger.npz"}
        if (run / "states" / "round_4").exists():
            _assert_goes_on_from(store, 4)
            shutil.rmtree(run / "states" / "round_4")
            shutil.copytree(run / "states" / "round_3", run / "states" / "round_2")
            continue
        assert _names(run / "states") == {"round_2", "round_3"}
        _assert_goes_on_from(_store(run), 3)
        assert "\n" not in message
        assert "round 4 could not be saved" in message
        assert "newest state that is saved is round 3's" in message
        assert "run the same command again" in message
    # Sizes of the next round's files differ by a few bytes from those of the rounds before.
    assert refused >= len(limits) - 2
    store.save(_progress(4))
    assert _names(run / "states") == {"round_3", "round_4"}
    _assert_goes_on_from(_store(run), 4)


class _Snapshots:
    """Copies of a run's directory as a kill would leave it, around every step of a save."""

    def __init__(self, run: pathlib.Path, copies: pathlib.Path) -> None:
        self._run = run
        self._copies = copies
        self.steps: list[str] = []

    def take(self, step: str) -> None:
        # shutil.copytree would take part in what is watched.
        subprocess.run(["cp", "-a", self._run, self._copies / str(len(self.steps))], check=True)
        self.steps.append(step)

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*arguments: Any, **named: Any) -> Any:
            self.take(f"before {name}")
            result = function(*arguments, **named)
            self.take(f"after {name}")
            return result

        return watched


@pytest.mark.long
def test_whenever_a_save_is_cut_off_the_state_before_or_after_it_is_there(
    run: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = tmp_path / "copies"
    copies.mkdir()
    snapshots = _Snapshots(run, copies)
    steps = [
        (os, "fsync"),
        (os, "unlink"),
        (os, "rmdir"),
        (pathlib.Path, "mkdir"),
        (pathlib.Path, "rename"),
        (pathlib.Path, "replace"),
        (tf.io.gfile, "makedirs"),
        (tf.io.gfile, "rename"),
        (tf.saved_model, "save"),
    ]
    store = _store(run)
    with monkeypatch.context() as patch:
        for owner, name in steps:
            patch.setattr(owner, name, snapshots.around(name, getattr(owner, name)))
        store.save(_progress(4))
    assert {"after replace", "after rename", "after rmdir", "after save"} <= set(snapshots.steps)
    assert len(snapshots.steps) > 30
    reached = []
    for number in range(len(snapshots.steps)):
        cut = copies / str(number)
        progress = _load(_store(cut))
        assert progress is not None
        assert _is_state_of(progress.state, progress.num_rounds)
        assert progress.ledger.num_rounds >= progress.num_rounds
        reached.append(progress.num_rounds)
        # No part of a state, and with it the seed, is left lying about.
        assert _names(cut) == {"states", "ledger.npz"}
        assert all(name.startswith("round_") for name in _names(cut / "states"))
        assert not [name for name in _names(cut / "states") if "temp" in name]
        # Damage to the newest of them still leaves one: nothing is removed too early.
        older = progress.num_rounds - 1
        training_loop.check_seal(cut / "states" / f"round_{older}", f"state after round {older}")
    assert reached == sorted(reached)
    assert set(reached) == {3, 4}


def test_a_state_takes_its_name_after_its_files_and_the_ledger_are_on_the_disk(
    run: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without that, a loss of power could leave the name and not the contents."""
    on_disk: list[int] = []
    named: list[tuple[list[int], list[int]]] = []
    fsync, rename = os.fsync, pathlib.Path.rename

    def watched_fsync(descriptor: int) -> None:
        fsync(descriptor)
        on_disk.append(os.fstat(descriptor).st_ino)

    def watched_rename(path: pathlib.Path, target: pathlib.Path) -> pathlib.Path:
        inodes = [entry.stat().st_ino for entry in (path, *path.rglob("*"))]
        inodes.append((run / "ledger.npz").stat().st_ino)
        named.append((inodes, list(on_disk)))
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", watched_fsync)
        patch.setattr(pathlib.Path, "rename", watched_rename)
        store = _store(run)
        store.save(_progress(4))
    ((inodes, synchronised),) = named
    assert set(inodes) <= set(synchronised)
    # The name itself.
    assert on_disk[-1] == (run / "states").stat().st_ino


def test_what_killed_processes_left_is_removed(run: pathlib.Path) -> None:
    (run / "states" / "unfinished" / "round_4_temp1234").mkdir(parents=True)
    (run / "states" / "round_4_temp1234").mkdir()
    (run / ".ledger.npz.abc").write_bytes(b"half")
    (run / "states" / "sampling_seed.json").write_text("{}")
    _assert_goes_on_from(_store(run), 3)
    assert _names(run) == {"states", "ledger.npz"}
    assert _names(run / "states") == {"round_2", "round_3", "sampling_seed.json"}


def test_a_directory_is_only_what_it_was_sealed_as(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("contents")
    with refuses("SHA256SUMS", error=DamagedDirectoryError):
        training_loop.check_seal(tmp_path, "round 7")
    training_loop.seal(tmp_path, "round 7")
    with refuses("SHA256SUMS", error=DamagedDirectoryError):
        training_loop.check_seal(tmp_path, "round 9")
    with (tmp_path / training_loop.CHECKSUM_FILE).open("ab") as checksums:
        checksums.write(b" \n\n")
    with refuses("SHA256SUMS", error=DamagedDirectoryError):
        training_loop.check_seal(tmp_path, "round 7")
    (tmp_path / "file").write_text("content")
    with refuses(str(tmp_path), "file", error=DamagedDirectoryError):
        training_loop.check_seal(tmp_path, "round 7")
