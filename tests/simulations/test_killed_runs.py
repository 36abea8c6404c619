"""Runs that are killed within a round and resumed release what one without a pause releases."""

import contextlib
import pathlib
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import numpy as np
import psutil
import pytest

from mf_aggregators.guarantees import keeps_plan, realised_participation
from simulations import quiet
from simulations.participation_ledger import ParticipationLedger
from tests.simulations import linear_run

_ROOT = pathlib.Path(__file__).parents[2]
_SECONDS_TO_GET_THERE = 120.0
_NUM_PROCESSES = 3


@pytest.fixture(scope="module", autouse=True)
def _no_worker_outlives_the_tests() -> Iterator[None]:
    yield
    quiet.end_workers()


class _Killable:
    """A process that can do the run, and TFF's workers that it starts."""

    def __init__(self, output: pathlib.Path) -> None:
        self._output = output
        self._directory = output.parent
        with output.open("ab") as file:
            self._process = psutil.Popen(
                [sys.executable, "-m", "tests.simulations.linear_run"],
                cwd=_ROOT,
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=file,
                text=True,
            )

    def go(self, directory: pathlib.Path, noise_storage: str) -> "_Killable":
        """Begins the rounds that are left in a directory."""
        self._directory = directory
        self._process.stdin.write(f"{directory}\n{noise_storage}\n")
        self._process.stdin.flush()
        return self

    def marks(self) -> list[str]:
        """The lines of its file of marks; the last one may be that of a round under way."""
        path = self._directory / f"marks-{self._process.pid}"
        return path.read_text().splitlines() if path.exists() else []

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Waits for a moment of the run."""
        deadline = time.monotonic() + _SECONDS_TO_GET_THERE
        while not condition():
            assert self._process.poll() is None, self._output.read_text()[-2000:]
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def kill(self) -> list[psutil.Process]:
        """Kills the process alone, and returns the workers that it leaves behind."""
        if self._process.poll() is not None:
            return []
        workers: list[psutil.Process] = self._process.children(recursive=True)
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        return workers


def _end(processes: list[psutil.Process]) -> None:
    for process in processes:
        # By psutil's handle, which never means another process of the same number.
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=10)


def _released(directory: pathlib.Path) -> list[list[np.ndarray]]:
    """For each round, what was released in it: once, or by several processes."""
    models: list[list[np.ndarray]] = [[] for _ in range(linear_run.PROGRAM_ROUNDS)]
    for path in (directory / "released").iterdir():
        # A killed process may leave a part of a file.
        if not path.name.startswith("."):
            models[int(path.name.split("-")[0])].append(np.load(path))
    return models


def _files(directory: pathlib.Path) -> dict[pathlib.Path, int]:
    times = {}
    for path in directory.rglob("row*"):
        with contextlib.suppress(FileNotFoundError):
            times[path] = path.stat().st_mtime_ns
    return times


@pytest.fixture(scope="module")
def killables(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[_Killable]]:
    """Processes that import TFF, which takes the longest, all at the same time."""
    directory = tmp_path_factory.mktemp("output")
    processes = [_Killable(directory / f"output-{number}") for number in range(_NUM_PROCESSES)]
    yield list(processes)
    for process in processes:
        _end(process.kill())


@pytest.fixture(scope="module")
def whole(
    killables: list[_Killable], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[np.ndarray]]:
    """The models of runs without a pause, by storage; made while the others import."""
    models = {}
    for noise_storage in ("disk", "state"):
        directory = tmp_path_factory.mktemp("whole")
        linear_run.run_program(directory, noise_storage)
        released = _released(directory)
        models[noise_storage] = [same for (same,) in released]
    return models


def _check(directory: pathlib.Path, whole: list[np.ndarray]) -> None:
    """Everything that was released, by whichever process, is that of the whole run."""
    released = _released(directory)
    for index, models in enumerate(released):
        assert models, f"round {index} was not released"
        for model in models:
            np.testing.assert_array_equal(model, whole[index])
    ledger = ParticipationLedger.load(directory / "ledger.npz")
    assert ledger.num_rounds == linear_run.PROGRAM_ROUNDS
    took_place = realised_participation(ledger.rounds_of_clients(), linear_run.PROGRAM_ROUNDS)
    assert keeps_plan(linear_run.PARTICIPATION, took_place)


def test_noise_on_disk_survives_kills_within_rounds(
    whole: dict[str, list[np.ndarray]], killables: list[_Killable], tmp_path: pathlib.Path
) -> None:
    # In the first round of a process, whose graphs are still being made; the worker lives on
    # and may write noise files while the next process reads them.
    first = killables.pop().go(tmp_path, "disk")
    first.wait_until(lambda: bool(first.marks()))
    time.sleep(random.Random(0).uniform(0.0, 0.2))
    orphans = first.kill()
    assert first.marks() == ["began 0"]

    # While a block's rows are written.
    second = killables.pop().go(tmp_path, "disk")
    second.wait_until(lambda: "began 4" in second.marks())
    before = _files(tmp_path / "noise")
    second.wait_until(lambda: _files(tmp_path / "noise") != before)
    _end(second.kill())
    assert second.marks()[-1].startswith("began")
    _end(orphans)

    linear_run.run_program(tmp_path, "disk")
    _check(tmp_path, whole["disk"])


def test_noise_in_the_state_survives_a_kill_anywhere(
    whole: dict[str, list[np.ndarray]], killables: list[_Killable], tmp_path: pathlib.Path
) -> None:
    killed = killables.pop().go(tmp_path, "state")
    killed.wait_until(lambda: "began 3" in killed.marks())
    # Within a round, while it is saved, or between two.
    time.sleep(random.Random(1).uniform(0.0, 0.5))
    _end(killed.kill())
    linear_run.run_program(tmp_path, "state")
    _check(tmp_path, whole["state"])
