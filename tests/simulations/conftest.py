"""What tests of runs share."""

from typing import NoReturn

import pytest

from simulations.runs import federated_runs


class _BegunError(ValueError):
    pass


@pytest.fixture
def _training_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ends a run with an error where its training would begin."""

    def begin(*unused: object) -> NoReturn:
        raise _BegunError("training begins")

    monkeypatch.setattr(federated_runs, "_train", begin)
