"""What tests of runs share."""

import sys
from collections.abc import Iterator
from typing import NoReturn

import pytest

from simulations.runs import federated_runs
from simulations.workers import quiet


class _BegunError(ValueError):
    pass


@pytest.fixture
def _training_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ends a run with an error where its training would begin."""

    def begin(*unused: object) -> NoReturn:
        raise _BegunError("training begins")

    monkeypatch.setattr(federated_runs, "_train", begin)


@pytest.fixture(scope="module", autouse=True)
def _no_worker_outlives_the_tests() -> Iterator[None]:
    """Ends TFF's workers after the tests of a module."""
    yield
    if "tensorflow_federated" in sys.modules:
        quiet.end_workers()
