"""Processes that compute a part of a plan: what they compute, and when it is waited for."""

import functools
import multiprocessing
import os
import pathlib
import signal
import time
from typing import Any

import pytest

from mf_aggregators import atomic_files
from mf_aggregators.participation import MinSeparation
from mf_aggregators.planning import planner, side_processes
from mf_aggregators.planning.plans import Setting
from mf_aggregators.planning.side_processes import TimeLimitError


def _note(directory: pathlib.Path, number: int) -> None:
    """Fails for 1, dies for 4, never ends for 5 while it writes a file; others write what is there.

    Args:
      directory: Where files are written.
      number: The number, which is the name of the file.
    """
    if number == 1:
        raise ValueError("this one cannot be computed")
    if number == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    if number == 5:
        with atomic_files.writing(directory / "5") as file:
            file.write(b"half of it")
            file.flush()
            time.sleep(600.0)
    there = sorted(path.name for path in directory.iterdir())
    threads = os.environ["OPENBLAS_NUM_THREADS"]
    (directory / f"{number}").write_text(" ".join([threads, *there]))


@pytest.mark.timeout(120)
def test_searches_run_elsewhere_and_are_waited_for(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "5")
    searches = {0: None, 1: None, 3: "base"}
    compute = functools.partial(_note, tmp_path)
    with side_processes.computing(searches, compute, processes=7) as wait:
        for number in range(4):
            wait(number)
    # What approximates another factorization begins when that is there; seven cores are shared.
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"0": "2", "3": "2 0"}
    assert os.environ["OPENBLAS_NUM_THREADS"] == "5"


@pytest.mark.timeout(120)
def test_a_process_that_dies_is_no_loss(tmp_path: pathlib.Path) -> None:
    compute = functools.partial(_note, tmp_path)
    with side_processes.computing({4: None, 6: "base"}, compute, processes=1) as wait:
        wait(4)
        wait(6)
    assert not list(tmp_path.iterdir())


@pytest.mark.timeout(120)
def test_what_still_runs_ends_with_the_plan(tmp_path: pathlib.Path) -> None:
    compute = functools.partial(_note, tmp_path)
    deadline = time.monotonic() + 5.0
    with side_processes.computing({5: None}, compute, 1, deadline) as wait:
        with pytest.raises(TimeLimitError):
            wait(5)
        assert [path.stat().st_size > 0 for path in tmp_path.iterdir()] == [True]
    assert not multiprocessing.active_children()
    # No half of a file is left.
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("searches", [{}, {0: None}])
def test_no_process_where_none_is_allowed(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, searches: dict[int, Any]
) -> None:
    """Daemons of multiprocessing, such as the workers of a pool, have no processes of their own."""
    monkeypatch.setattr(multiprocessing.current_process(), "_config", {"daemon": bool(searches)})
    with side_processes.computing(searches, functools.partial(_note, tmp_path), 2) as wait:
        wait(0)
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_a_plan_does_not_depend_on_who_computes(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planner, "_FEWEST_ROUNDS_OF_PROCESSES", 1)
    setting = Setting(64, 800, 100, MinSeparation(8), None, 8.0, 1e-4, 1000)
    plans = [
        planner.make(
            setting,
            cache_directory=tmp_path / str(processes),
            processes=processes,
            # One of which is based on another.
            mechanisms=["toeplitz", "banded", "structured"],
        )
        for processes in (1, 2)
    ]
    alone, together = (
        {each.name: (each.errors.rmse, each.mechanism.noise_multiplier) for each in plan.candidates}
        for plan in plans
    )
    assert list(alone) == list(together)
    for name, numbers in alone.items():
        assert together[name] == pytest.approx(numbers, rel=1e-6)
    kept = [{path.name for path in (tmp_path / name).iterdir()} for name in ("1", "2")]
    assert kept[0] == kept[1]
