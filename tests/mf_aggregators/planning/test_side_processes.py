"""Processes that compute a part of a plan: what they compute, and when it is waited for."""

import functools
import multiprocessing
import os
import pathlib
import signal
import time

import pytest

from mf_aggregators import atomic_files
from mf_aggregators.participation import MinSeparation
from mf_aggregators.planning import planner, proposals, side_processes
from mf_aggregators.planning.plans import Setting
from mf_aggregators.planning.proposals import Proposal
from mf_aggregators.planning.side_processes import TimeLimitError
from tests.refusals import refuses

_BASE = ("banded", (("num_bands", 4),))


def _note(directory: pathlib.Path, number: int) -> None:
    """Fails for 1, never ends for 2 and 6, dies for 5; others note who they are and what was there.

    6 is in the middle of writing a file.
    """
    if number == 6:
        with atomic_files.writing(directory / "6") as file:
            file.write(b"half of it")
            file.flush()
            time.sleep(600.0)
    if number == 1:
        raise ValueError("this one cannot be computed")
    if number == 2:
        time.sleep(600.0)
    if number == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    there = sorted(path.name for path in directory.iterdir())
    threads = os.environ["OPENBLAS_NUM_THREADS"]
    (directory / f"{number}").write_text(f"{os.getpid()} {threads} {' '.join(there)}")


def _proposals(**seconds_of_each: float) -> list[Proposal]:
    """Numbers 0, 1, ... in order; those whose name begins with ``on`` approximate the same."""
    return [
        Proposal(
            "structured" if name.startswith("on") else "banded",
            (),
            MinSeparation(4),
            lambda: pytest.fail("this process computes nothing itself"),
            base=_BASE if name.startswith("on") else None,
            expected_seconds=seconds or None,
        )
        for name, seconds in seconds_of_each.items()
    ]


@pytest.mark.long
def test_what_takes_long_is_computed_elsewhere_and_waited_for(tmp_path: pathlib.Path) -> None:
    found = _proposals(longest=9.0, fails=3.0, short=0.0, on_it=3.0, also_on_it=3.0, killed=3.0)
    compute = functools.partial(_note, tmp_path)
    with side_processes.computing(found, compute, processes=2) as wait:
        wait(0)
        assert (tmp_path / "0").exists()
        wait(1)
        # Nothing that is based on another one has begun, and what is short stays here.
        wait(2)
        assert [path.name for path in tmp_path.iterdir()] == ["0"]
        wait(3)
        assert (tmp_path / "3").exists()
        wait(4)
        wait(5)
    whole = {path.name: path.read_text().split() for path in tmp_path.iterdir()}
    assert set(whole) == {"0", "3", "4"}
    processes = [numbers[0] for numbers in whole.values()]
    assert len({*processes, str(os.getpid())}) == 4
    # Both began when what they approximate was there.
    assert whole["3"][2:3] == whole["4"][2:3] == ["0"]


@pytest.mark.long
def test_cores_that_are_left_go_to_threads(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "5")
    found = _proposals(longest=9.0, short=0.0, none=0.0, also_long=3.0)
    compute = functools.partial(_note, tmp_path)
    with side_processes.computing(found, compute, processes=7) as wait:
        wait(0)
        wait(3)
    for name in ("0", "3"):
        assert (tmp_path / name).read_text().split()[1] == "3"
    assert os.environ["OPENBLAS_NUM_THREADS"] == "5"


@pytest.mark.timeout(120)
def test_what_still_runs_ends_with_the_plan(tmp_path: pathlib.Path) -> None:
    found = _proposals(short=0.0, on_it=3.0, endless=9.0)
    with (
        pytest.raises(KeyError),
        side_processes.computing(found, functools.partial(_note, tmp_path), processes=2),
    ):
        raise KeyError("the plan cannot be made")


@pytest.mark.long
@pytest.mark.short_cases(1)
@pytest.mark.parametrize("processes", [1, 2])
def test_a_process_ends_at_the_deadline(tmp_path: pathlib.Path, processes: int) -> None:
    found = _proposals(short=0.0, also_short=0.0, endless=0.1)
    deadline = time.monotonic() + 2.0
    with side_processes.computing(
        found, functools.partial(_note, tmp_path), processes, deadline
    ) as wait:
        wait(0)
        with pytest.raises(TimeLimitError):
            wait(2)
        assert not multiprocessing.active_children()


def test_what_cannot_end_by_the_deadline_does_not_begin(tmp_path: pathlib.Path) -> None:
    found = _proposals(short=0.0, also_short=0.0, endless=9e5, on_it=3e5)
    deadline = time.monotonic() + 1000.0
    with side_processes.computing(found, functools.partial(_note, tmp_path), 1, deadline) as wait:
        for number, expected in ((2, 900000), (3, 300000)):
            with refuses(str(expected), error=TimeLimitError):
                wait(number)


@pytest.mark.timeout(120)
def test_a_process_that_is_ended_leaves_no_half_of_a_file(tmp_path: pathlib.Path) -> None:
    found = _proposals(a=0.0, b=0.0, c=0.0, d=0.0, e=0.0, f=0.0, writes=3.0)
    deadline = time.monotonic() + 600.0
    compute = functools.partial(_note, tmp_path)
    with side_processes.computing(found, compute, 1, deadline):
        while not any(path.stat().st_size for path in tmp_path.iterdir()):
            time.sleep(0.05)
        assert not (tmp_path / "6").exists()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("processes", "second"), [(1, 3.0), (2, 0.0)])
def test_no_process_without_use(tmp_path: pathlib.Path, processes: int, second: float) -> None:
    found = _proposals(longest=9.0, second=second)
    with side_processes.computing(found, functools.partial(_note, tmp_path), processes) as wait:
        wait(0)
        wait(1)
    assert not list(tmp_path.iterdir())


def test_no_process_where_none_is_allowed(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Daemons of multiprocessing, such as the workers of a pool, have no processes of their own."""
    monkeypatch.setattr(multiprocessing.current_process(), "_config", {"daemon": True})
    found = _proposals(longest=9.0, second=3.0)
    with side_processes.computing(found, functools.partial(_note, tmp_path), 2) as wait:
        wait(0)
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_a_plan_does_not_depend_on_who_computes(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proposals, "_SHORT_SECONDS", 1e-9)
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
