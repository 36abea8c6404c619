"""A signal ends a run that waits for TensorFlow Federated to start."""

import types
from typing import Any

import pytest

from mf_aggregators.tff import processes
from simulations.runs import federated_runs


def test_signals_are_requests_only_once_the_worker_has_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Until then there is no round that a request could wait for."""
    calls: list[str] = []

    def stop_requests(message: str) -> Any:
        calls.append("requests")
        raise KeyboardInterrupt

    monkeypatch.setattr(processes, "end_workers_at_exit", lambda: calls.append("ends at exit"))
    monkeypatch.setattr(processes, "start_worker", lambda: calls.append("started"))
    monkeypatch.setattr(processes, "stop_requests", stop_requests)
    monkeypatch.setattr(federated_runs, "workload_note", lambda run: "")
    monkeypatch.setattr(federated_runs, "RunStatements", lambda run: None)
    run: Any = types.SimpleNamespace(
        directory=None, config=types.SimpleNamespace(secure_aggregation=False)
    )
    command: Any = types.SimpleNamespace(name="run-digits")
    with pytest.raises(KeyboardInterrupt):
        federated_runs._train(Any, command, run, None)
    assert calls == ["ends at exit", "started", "requests"]
