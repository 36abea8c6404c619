"""A graph that differs from the kernel is refused before a run begins.

Functions of ``tff`` return other numbers, one after another, and the same aggregator that was made
before is refused.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

import mf_aggregators as mfa
from mf_aggregators.kernel.draws import TILE
from mf_aggregators.kernel.numbers import NotProved
from mf_aggregators.tff import (
    dp_query,
    graph_check,
    release_record,
)
from mf_aggregators.tff.aggregator import _MeanQuery
from mf_aggregators.tff.dp_query import AdaptiveClipSumQuery, MatrixFactorizationSumQuery
from mf_aggregators.tff.tensor_rows import SegmentRows, TensorNoise

_SPECS = [tf.TensorSpec([3], tf.float32), tf.TensorSpec([2, 2], tf.float64)]
_MADE = {
    "identity": lambda: mfa.factorizations.identity(5),
    "banded": lambda: mfa.factorizations.banded(5, num_bands=3),
    "blt": lambda: mfa.factorizations.blt(5, num_buffers=2),
    "dense": lambda: mfa.factorizations.optimal(5),
    "window": lambda: mfa.factorizations.banded_inverse(5, 3),
}


def _query(name: str, storage: str = "state", specs: Any = _SPECS, **changes: Any) -> Any:
    return _factory(name, storage, **changes)._query(specs, is_recorded=True)


def _factory(name: str, storage: str = "state", **changes: Any) -> Any:
    options: dict[str, Any] = {
        "participation": mfa.participation.MinSeparation(2),
        "noise_multiplier": 1.0,
        "clip_norm": 0.7,
        "clients_per_round": 4,
        "noise_storage": storage,
        **changes,
    }
    return mfa.mf_dp_aggregator(_MADE[name](), **options)


def _found(query: Any) -> str | None:
    is_adaptive = isinstance(query, AdaptiveClipSumQuery)
    parts = query.mechanism.parts if is_adaptive else query.parts
    return next(graph_check._differences(parts, is_adaptive), None)


@pytest.mark.short_cases(2)
@pytest.mark.parametrize("storage", ["state", "disk"])
@pytest.mark.parametrize("name", _MADE)
def test_graphs_are_those_of_the_kernel(name: str, storage: str) -> None:
    assert _found(_query(name, storage)) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"clip_norm": mfa.AdaptiveClip(0.5)},
        {"specs": [tf.TensorSpec([TILE + 70], tf.float32), tf.TensorSpec([0], tf.float16)]},
        {"noise_multiplier": 0.0, "allow_no_noise": True},
    ],
    ids=["adaptive", "tiles", "without noise"],
)
def test_other_graphs_are_those_of_the_kernel(changes: dict[str, Any]) -> None:
    assert _found(_query("banded", **changes)) is None


def _times(function: Callable[..., Any], factor: int) -> Callable[..., Any]:
    def altered(*arguments: Any, **options: Any) -> Any:
        return tf.nest.map_structure(
            lambda each: each * tf.cast(factor, each.dtype), function(*arguments, **options)
        )

    return altered


_ALTERED = [
    (SegmentRows, "rounded", "state"),
    (SegmentRows, "of_z", "state"),
    (SegmentRows, "rounded", "disk"),
    (SegmentRows, "of_z", "disk"),
    (TensorNoise, "of_round", "state"),
    (dp_query, "_released", "state"),
    (dp_query, "_clip_to_grid", "state"),
    (dp_query, "_scaling", "state"),
]


@pytest.mark.short_cases(3)
@pytest.mark.parametrize(("module", "name", "storage"), _ALTERED)
def test_altered_graphs_are_found(
    module: Any, name: str, storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    query = _query("banded", storage)
    monkeypatch.setattr(module, name, _double_of(getattr(module, name)))
    assert _found(query) is not None


def test_other_weights_of_rounds_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    query = _query("banded")
    store = query.parts.noise.store
    tables, number_of = store._transitions
    monkeypatch.setitem(vars(store), "_transitions", (2.0 * tables, number_of))
    assert _found(query) is not None


def test_queries_with_altered_graphs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    query = _query("identity")
    monkeypatch.setattr(dp_query, "_released", _double_of(dp_query._released))
    with pytest.raises(NotProved, match="kernel"):
        graph_check.check(query)


def test_seeds_that_are_the_same_in_each_run_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    query = _query("identity")
    graph_check.check(query)
    monkeypatch.setattr(dp_query, "_different_each_time", tf.zeros_like)
    with pytest.raises(NotProved, match="same seed"):
        graph_check.check(query)


@pytest.mark.parametrize("kind", [AdaptiveClipSumQuery, MatrixFactorizationSumQuery, _MeanQuery])
def test_states_that_a_query_alters_are_refused(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    is_adaptive = kind is AdaptiveClipSumQuery
    factory = _factory("blt", clip_norm=mfa.AdaptiveClip(0.5) if is_adaptive else 0.5)
    original = kind.get_noised_result

    def altered(self: Any, *arguments: Any) -> Any:
        result, state, event = original(self, *arguments)
        return result, tf.nest.map_structure(lambda each: 2 * each, state), event

    monkeypatch.setattr(kind, "get_noised_result", altered)
    with pytest.raises(NotProved):
        factory.create(tff.TensorType(np.float32, [3]))


def _double_of(function: Callable[..., Any]) -> Callable[..., Any]:
    if function is not dp_query._scaling:
        return _times(function, 2)

    def doubled(*arguments: Any) -> Any:
        (unit, scale), is_within, is_finite = function(*arguments)
        return (unit, 2.0 * scale), is_within, is_finite

    return doubled


def test_a_record_that_takes_any_sum_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        release_record, "_digest", lambda *unused: tf.strings.as_string(tf.constant(1))
    )
    assert _found(_query("identity")) == "the record of sums"


def test_rounds_past_the_last_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    query = _query("identity")
    monkeypatch.setattr(TensorNoise, "_checked_round", lambda self, state: state.round_index)
    assert _found(query) is not None
