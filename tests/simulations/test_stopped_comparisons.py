"""compare-mechanisms: how it stops and goes on."""

import json
import os
import signal
import time
from collections.abc import Callable

import pytest

from tests.simulations.comparison_workplace import THREE, THREE_MECHANISMS, Workplace, call


def _wait_for(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.02)


def _is_alive(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.long
def test_a_stop_is_passed_on_once_and_the_comparison_goes_on_later(
    workplace: Workplace, capfd: pytest.CaptureFixture[str]
) -> None:
    hold = workplace.control / "hold-none_1"
    hold.touch()
    process = workplace.process(*THREE)
    _wait_for((workplace.control / "at-work-none_1").exists)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate()
    assert process.returncode == 130, err
    assert out == ""
    assert (workplace.control / "stops-none_1").read_text() == "1"
    assert "stopping the run after its round" in err
    assert "interrupted; 1 of 6 runs are finished" in err
    hold.unlink()
    status, out, err = call(capfd, *THREE, "--format=json")
    assert status == 0, err
    assert [row["repetitions"] for row in json.loads(out)["rows"]] == [2, 2, 2]
    names = [name for name, _ in workplace.started()]
    assert names[:3] == ["identity_1", "none_1", "none_1"]
    assert len(names) == 7
    # Only mechanisms that had never begun were checked again.
    checked = [arguments[1] for arguments in workplace.checks()]
    assert checked == [f"--mechanism={each}" for each in (*THREE_MECHANISMS, "banded")]


@pytest.mark.long
def test_a_killed_comparison_goes_on_once_its_run_has_ended(
    workplace: Workplace, capfd: pytest.CaptureFixture[str]
) -> None:
    """The run outlives it, and no second one may work in the same directory."""
    hold = workplace.control / "hold-banded_1"
    hold.touch()
    arguments = ("--mechanisms=banded,tree", "--repetitions=1")
    process = workplace.process(*arguments)
    at_work = workplace.control / "at-work-banded_1"
    _wait_for(lambda: at_work.exists() and at_work.read_text() != "")
    process.kill()
    process.communicate()
    assert _is_alive(int(at_work.read_text()))
    status, _, err = call(capfd, *arguments)
    assert status == 2
    assert "a run that one has left behind, is at work in" in err
    assert [name for name, _ in workplace.started()] == ["banded_1"]
    hold.unlink()
    _wait_for(lambda: not _is_alive(int(at_work.read_text())))
    status, _, err = call(capfd, *arguments)
    assert status == 0, err
    assert [name for name, _ in workplace.started()] == ["banded_1", "banded_1", "tree_1"]
