"""A clipping that does not clip, for tests of audits, which have to notice."""

from typing import Any

import pytest
import tensorflow as tf

from mf_aggregators.tff import dp_query, graph_check


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts it in the place of the library's, for aggregators that are created from now on."""
    monkeypatch.setattr(dp_query, "_clip_to_grid", _clip_nothing)
    # Which would refuse these graphs.
    monkeypatch.setattr(graph_check, "check", lambda query: None)
    query = dp_query.MatrixFactorizationSumQuery
    made = query.__init__

    def wide(self: Any, *arguments: Any, **options: Any) -> None:
        made(self, *arguments, **{**options, "record_dtype": tf.int64})

    # What is not clipped needs 64 bits.
    monkeypatch.setattr(query, "__init__", wide)


def _clip_nothing(record: Any, clip_norm: tf.Tensor, steps_per_clip_norm: int) -> Any:
    """Rounds to the grid alone, in the place of ``dp_query.clip_to_grid``."""
    per_unit = steps_per_clip_norm / tf.cast(clip_norm, tf.float64)

    def rounded(tensor: tf.Tensor) -> tf.Tensor:
        return tf.cast(tf.round(tf.cast(tensor, tf.float64) * per_unit), tf.int64)

    return tf.nest.map_structure(rounded, record)
