"""Statements of runs of the aggregator in TensorFlow Federated."""

import pathlib
from typing import Any

import numpy as np
import tensorflow_federated as tff

import mf_aggregators as mfa
from mf_aggregators import private_metrics
from mf_aggregators.noise import noise_directory
from mf_aggregators.participation import MinSeparation
from mf_aggregators.privacy.statements import Statement
from tests.refusals import refuses

_TOLD: dict[str, Any] = {
    "population": 200,
    "public_data": "none",
    "enforcement": "Each phone keeps a timer.",
    "delta": 1e-5,
}
_ROUNDS = 3


def _ledger(rounds: int) -> list[list[str]]:
    return [[f"phone {i}", f"tablet {i}"] for i in range(rounds)]


def _aggregator(**changes: Any) -> Any:
    matrix = mfa.factorizations.banded(_ROUNDS, 2)
    mechanism = changes.pop("mechanism", mfa.Mechanism(matrix, MinSeparation(3), 1.0))
    return mfa.mf_dp_aggregator(mechanism, **{"clip_norm": 0.5, "clients_per_round": 2, **changes})


def _facts(statement: Statement) -> dict[str, Any]:
    return {name: each["value"] for name, each in statement.to_dict()["facts"].items()}


def test_a_run_of_a_learning_process_is_stated_with_its_record(tmp_path: pathlib.Path) -> None:
    """The record that graphs write has the digest of the claim that the guarantee is of."""
    aggregator = _aggregator(noise_directory=tmp_path)
    process = aggregator.create(tff.TensorType(np.float32, [2]))
    state = process.initialize()
    for _ in range(2):
        state = process.next(state, [np.ones(2, np.float32)] * 2).state
    found = aggregator.statement(_ledger(2), state=state, round_counts=[2, 2], **_TOLD)
    facts = _facts(found)
    assert (facts["clip_norm"], facts["clients_per_round"]) == ("0.5", "2")
    assert (facts["seed_is_fixed"], facts["secure_sums"]) == (False, False)
    assert facts["aggregator"] == f"mf_dp_aggregator of mf_aggregators {mfa.__version__}"
    assert (found.status, found.stated) == ("open", aggregator.mechanism.guarantee(1e-5))
    (stream,) = noise_directory.streams(tmp_path)
    record = noise_directory.read_record(tmp_path, stream)
    digest = found.to_dict()["noise"]["digest"]
    assert record.of_rounds == {0: digest, 1: digest}
    assert (found.evidence.num_sums, found.evidence.record_sha256) == (2, record.sha256)
    # Without the state, the only run of the directory is taken.
    assert aggregator.statement(_ledger(2), **_TOLD).evidence == found.evidence
    with refuses("ledger", "1", "2"):
        aggregator.statement(_ledger(1), state=state, **_TOLD)
    spent = aggregator.spend(state, tff.TensorType(np.float32, [2]))
    whole = aggregator.statement(_ledger(3), state=spent, **_TOLD)
    assert (whole.status, whole.evidence.num_sums) == ("finished", 2)
    with refuses("state", "0"):
        aggregator.statement(_ledger(2), state=(), **_TOLD)


def test_secure_sums_are_those_of_the_aggregator() -> None:
    found = _aggregator(secure_aggregation_bits=32).statement(_ledger(_ROUNDS), **_TOLD)
    fact = found.to_dict()["facts"]["secure_sums"]
    assert fact["value"] is True
    assert "32 bits" in fact["origin"]
    assert "not checked" in fact["origin"]
    with refuses("secure_sums", "open"):
        _aggregator().statement(_ledger(_ROUNDS), secure_sums=True, **_TOLD)


def test_metrics_and_indicators_have_their_share_of_the_noise() -> None:
    metrics = private_metrics.of_training(10.0, 100, counts_clients=False)
    clips: list[float | mfa.AdaptiveClip] = [0.5, mfa.AdaptiveClip(initial_norm=0.5)]
    for clip in clips:
        found = _aggregator(clip_norm=clip, metrics=metrics).statement(_ledger(_ROUNDS), **_TOLD)
        assert found.facts.clip == clip
        assert found.facts.metrics == metrics
        assert found.facts.split == metrics.split_noise(1.0, clip, 2)
        assert "loss (0 to 10)" in found.to_markdown()
