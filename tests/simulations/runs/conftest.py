"""What tests of directories of runs share."""

import pathlib

import pytest

from tests.simulations.runs.untrained_runs import TIMERS, leave_run


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The directory of a run that ended; each test works on a copy."""
    path = tmp_path_factory.mktemp("finished") / "run"
    leave_run(path, *TIMERS)
    return path
