"""What tests of runs share."""

import pathlib
from typing import NoReturn

import pytest

from simulations.runs import run_command
from tests.simulations.comparison_workplace import Workplace


class _BegunError(ValueError):
    pass


@pytest.fixture
def _training_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ends a run with an error where its training would begin."""

    def begin(*unused: object) -> NoReturn:
        raise _BegunError("training begins")

    monkeypatch.setattr(run_command, "_train", begin)


@pytest.fixture
def workplace(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Workplace:
    """A directory in which comparisons run."""
    # A module that python -m starts is looked for in the current directory first.
    monkeypatch.chdir(tmp_path)
    return Workplace(tmp_path)
