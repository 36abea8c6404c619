"""Run directories: new ones, old ones, and directories that are none."""

import contextlib
import dataclasses
import fcntl
import gc
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mf_aggregators import factorizations
from mf_aggregators.mechanism import Mechanism
from mf_aggregators.participation import SCHEMES, PoissonSampling, Sampler, sampling_scheme
from simulations.runs import run_directory
from simulations.runs.run_directory import (
    ParticipationLedger,
    RunDirectory,
    RunDirectoryError,
)
from tests.refusals import refuses
from tests.simulations.small_disks import files_of_at_most

_ROOT = pathlib.Path(__file__).parents[3]
_SECONDS = 60


def test_other_directories_are_left_alone(tmp_path: pathlib.Path) -> None:
    (tmp_path / "photo.jpg").write_text("")
    with refuses("directory", error=RunDirectoryError):
        RunDirectory(tmp_path).read_config()
    with refuses("directory", error=RunDirectoryError):
        RunDirectory(tmp_path / "photo.jpg").read_config()


@pytest.mark.parametrize("text", ["", "{", "[]"])
def test_broken_configurations_are_refused(tmp_path: pathlib.Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with refuses("config.json", error=RunDirectoryError):
        RunDirectory(tmp_path).read_config()


def test_a_run_goes_on_only_with_its_own_flags(tmp_path: pathlib.Path) -> None:
    run_directory.check_same_flags({"a": 1, "b": None}, {"a": 1, "b": None}, tmp_path)
    others: list[dict[str, int | None]] = [
        {"a": 2, "b": None},
        {"b": None},
        {"a": 1, "b": None, "c": 3},
    ]
    for other in others:
        with refuses("flags", error=RunDirectoryError):
            run_directory.check_same_flags({"a": 1, "b": None}, other, tmp_path)


# A process that has the directory until its standard input ends, or fails with the message.
# On a first line it starts a program, which has what a program may inherit.
_HOLDER = """
import subprocess
import sys
from simulations.runs.run_directory import RunDirectory, RunDirectoryError
try:
    with RunDirectory(sys.argv[1]).locked():
        print("locked", flush=True)
        if sys.stdin.readline():
            worker = subprocess.Popen(["sleep", "60"], close_fds=False, stdout=subprocess.DEVNULL)
            print(worker.pid, flush=True)
            sys.stdin.read()
except RunDirectoryError as error:
    print(error, flush=True)
"""


@contextlib.contextmanager
def _holder(path: pathlib.Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that has the directory."""
    with subprocess.Popen(
        [sys.executable, "-c", _HOLDER, str(path)],
        cwd=_ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "locked\n"
            yield process
        finally:
            process.kill()


def _second_process(path: pathlib.Path) -> str:
    """What another process says that wants the directory for a moment."""
    finished = subprocess.run(
        [sys.executable, "-c", _HOLDER, str(path)],
        cwd=_ROOT,
        input="",
        stdout=subprocess.PIPE,
        text=True,
        timeout=_SECONDS,
        check=True,
    )
    return finished.stdout.rstrip("\n")


def _run_in(path: pathlib.Path) -> RunDirectory:
    directory = RunDirectory(path)
    directory.create({"flags": {}})
    return directory


def _names(path: pathlib.Path) -> set[str]:
    return {entry.name for entry in path.iterdir()}


@pytest.mark.long
def test_one_process_has_a_directory_at_a_time(tmp_path: pathlib.Path) -> None:
    directory = _run_in(tmp_path / "run")
    with _holder(directory.path) as other:
        with pytest.raises(RunDirectoryError) as raised, directory.locked():
            pass
        assert str(raised.value) == (
            f"another process is running in {directory.path} (pid {other.pid}): wait for it or end "
            "it."
        )
        # Being refused takes nothing away from who has it.
        assert f"pid {other.pid}" in _second_process(directory.path)
        other.communicate(timeout=_SECONDS)
        assert other.returncode == 0
    assert _names(directory.path) == {"config.json"}
    with directory.locked():
        assert f"pid {os.getpid()}" in _second_process(directory.path)
        # Nor may this process go on twice.
        with refuses(f"pid {os.getpid()}", error=RunDirectoryError), directory.locked():
            pass
    assert _second_process(directory.path) == "locked"


@pytest.mark.long
def test_a_killed_process_has_the_directory_no_longer(tmp_path: pathlib.Path) -> None:
    directory = _run_in(tmp_path)
    for _ in range(3):
        with _holder(tmp_path) as other:
            other.kill()
            other.wait(_SECONDS)
            assert (tmp_path / "run.lock").read_text() == f"{other.pid}\n"
            with directory.locked():
                assert (tmp_path / "run.lock").read_text() == f"{os.getpid()}\n"
    assert _names(tmp_path) == {"config.json"}


def test_programs_that_a_killed_process_started_do_not_keep_the_directory(
    tmp_path: pathlib.Path,
) -> None:
    """TFF's worker lives on for a while."""
    directory = _run_in(tmp_path)
    with _holder(tmp_path) as other:
        assert other.stdin is not None
        other.stdin.write("worker\n")
        other.stdin.flush()
        assert other.stdout is not None
        worker = int(other.stdout.readline())
        try:
            other.kill()
            other.wait(_SECONDS)
            with directory.locked():
                # It is alive all the while.
                os.kill(worker, 0)
        finally:
            os.kill(worker, signal.SIGKILL)


def test_a_lock_is_no_way_to_other_files(tmp_path: pathlib.Path) -> None:
    directory = _run_in(tmp_path / "run")
    (tmp_path / "file").write_text("contents")
    for target in ("file", "missing", "missing/file"):
        (directory.path / "run.lock").symlink_to(tmp_path / target)
        with refuses("locked", error=RunDirectoryError), directory.locked():
            pass
        (directory.path / "run.lock").unlink()
    assert (tmp_path / "file").read_text() == "contents"
    assert _names(tmp_path) == {"run", "file"}


def test_a_new_directory_is_locked_before_it_has_a_configuration(tmp_path: pathlib.Path) -> None:
    directory = RunDirectory(tmp_path / "a" / "run")
    with directory.locked():
        assert directory.read_config() is None
        assert "another process is running" in _second_process(directory.path)
        directory.create({"flags": {}})
    assert _names(directory.path) == {"config.json"}


def test_a_new_run_may_start_where_another_was_killed_before_its_configuration(
    tmp_path: pathlib.Path,
) -> None:
    (tmp_path / "run.lock").write_text("1\n")
    (tmp_path / ".config.json.half").write_text("{")
    assert RunDirectory(tmp_path).read_config() is None
    with RunDirectory(tmp_path).locked():
        assert _names(tmp_path) == {"run.lock"}


def test_unfinished_files_of_killed_processes_are_removed(tmp_path: pathlib.Path) -> None:
    directory = _run_in(tmp_path)
    ours = {
        "config.json",
        "metrics.csv",
        "privacy.json",
        "PRIVACY.md",
        "participation.npz",
        "training.png",
        "final_model.npz",
    }
    secret = {"dataset.json", "sampling_seed.json"}
    directory.states.mkdir()
    for parent, names in ((tmp_path, ours), (directory.states, secret)):
        for name in names:
            (parent / f".{name}.x1y2").write_text("half")
            (parent / name).write_text("{}")
    (tmp_path / ".notes.txt.swp").write_text("of the user")
    others = {"run.lock", ".notes.txt.swp", directory.states.name}
    with directory.locked():
        assert _names(tmp_path) == {*ours, *others}
        assert _names(directory.states) == secret


def test_a_lock_that_is_removed_while_we_wait_is_not_ours(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever had it removes the file: a lock on what was removed keeps nobody out."""
    directory = _run_in(tmp_path)
    flock = fcntl.flock
    calls = 0

    def removed_just_before(descriptor: int, operation: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            (tmp_path / "run.lock").unlink()
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", removed_just_before)
    with directory.locked():
        assert calls == 2
        assert f"pid {os.getpid()}" in _second_process(tmp_path)


def test_a_run_goes_on_with_its_own_data_alone(tmp_path: pathlib.Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    directory.create({"flags": {}})
    directory.fix_data("one")
    assert directory.states.stat().st_mode & 0o077 == 0
    directory.fix_data("one")
    with refuses("data", error=RunDirectoryError):
        directory.fix_data("other")
    # No other file tells which data they were.
    others = [path for path in directory.path.rglob("*") if path.is_file()]
    assert [path for path in others if "one" in path.read_text()] == [directory.data]
    directory.data.write_text("{}")
    with refuses("restore", error=RunDirectoryError):
        directory.fix_data("one")
    directory.data.unlink()
    directory.fix_data("other")
    directory.data.unlink()
    directory.ledger.touch()
    with refuses("missing", error=RunDirectoryError):
        directory.fix_data("one")


def test_a_run_has_begun_with_its_statement_or_its_metrics(tmp_path: pathlib.Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    directory.create({"flags": {}})
    assert not directory.has_begun()
    directory.write_json("privacy.json", {})
    assert directory.has_begun()


_COHORTS = st.lists(st.lists(st.integers(0, 4), unique=True, max_size=5), max_size=8)


def _ledger(cohorts: list[list[int]]) -> ParticipationLedger:
    ledger = ParticipationLedger(("ann", "bob", "čeda", "dan", "eve"))
    for cohort in cohorts:
        ledger = ledger.with_round(np.array(sorted(cohort), dtype=np.int64))
    return ledger


@given(_COHORTS)
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


# A ledger is taken for a sampled one only if a data sampler can have made it.


_NAMES = tuple(SCHEMES)


def _sampler(name: str, seed: int = 3) -> Sampler:
    scheme = sampling_scheme(name, num_rounds=13, num_bands=3, population=26, clients_per_round=4)
    return scheme.sampler(seed)


def _sampled_ledger(sampler: Sampler, rounds: int) -> ParticipationLedger:
    scheme = sampler.scheme
    clients = tuple(f"client_{i}" for i in range(scheme.population))
    cohorts = tuple(sampler.draw(index) for index in range(rounds))
    return ParticipationLedger(clients, cohorts, scheme)


def _with_cohort(ledger: ParticipationLedger, index: int, clients: object) -> ParticipationLedger:
    cohorts = list(ledger.cohorts)
    cohorts[index] = np.array(clients, dtype=np.int64)
    return dataclasses.replace(ledger, cohorts=tuple(cohorts))


@pytest.mark.parametrize("name", _NAMES)
def test_a_ledger_of_another_scheme_or_of_timers_deviates(name: str) -> None:
    sampler = _sampler(name)
    ledger = _sampled_ledger(sampler, 13)
    mechanism = Mechanism(factorizations.identity(13), sampler.scheme, 1.0)
    assert mechanism.observed(ledger.record(), sampler=sampler).keeps_participation is True
    others = [
        None,
        *(_sampler(other).scheme for other in _NAMES if other != name),
        dataclasses.replace(sampler.scheme, num_bands=2),
        dataclasses.replace(sampler.scheme, num_rounds=14),
        dataclasses.replace(sampler.scheme, population=27),
    ]
    for other in others:
        changed = dataclasses.replace(ledger, sampling=other)
        observed = mechanism.observed(changed.record(), sampler=sampler)
        assert observed.keeps_participation is False
        assert observed.deviation == "the ledger records another sampling scheme"


def test_a_client_that_was_left_out_is_found_by_the_holder_of_the_seed() -> None:
    sampler = _sampler("poisson")
    ledger = _sampled_ledger(sampler, 13)
    changed = _with_cohort(ledger, 12, ledger.cohorts[12][1:])
    assert sampler.scheme.deviation(len(changed.client_ids), changed.cohorts) is None
    found = sampler.deviation(len(changed.client_ids), changed.cohorts)
    assert found == "the clients of round 13 (counted from 1) are not those that the sampler draws"
