"""Aggregators as processes that an audit attacks, in NumPy or in TensorFlow Federated."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from mf_aggregators.aggregator import Aggregator
from mf_aggregators.kernel.numbers import FloatArray


@dataclasses.dataclass(frozen=True)
class Process:
    """An aggregation of vectors of one size, from state to state.

    Attributes:
      initialize: Returns a fresh state.
      next: From a state and clients' vectors, returns the next state, the mean, and the next clip
        norm where it adapts, None else.
    """

    initialize: Callable[[], Any]
    next: Callable[[Any, list[FloatArray]], tuple[Any, FloatArray, float | None]]


def of(built: Any, dtype: type[np.floating[Any]], dimension: int) -> Process:
    """Returns the runner of an aggregator.

    Args:
      built: A ``mf_aggregators.Aggregator``, or a factory of ``tff.aggregators``.
      dtype: The dtype of clients' vectors.
      dimension: Their length.
    """
    if isinstance(built, Aggregator):
        aggregator = built.with_template(np.zeros(dimension, dtype))

        def in_numpy(state: Any, clients: Any) -> tuple[Any, FloatArray, float | None]:
            state, mean = aggregator.next(state, clients)
            return state, mean, aggregator.metrics(state).get("next_clip_norm")

        return Process(aggregator.initialize, in_numpy)
    # TensorFlow Federated takes seconds to import.
    from mf_aggregators.tff import compatibility

    process = built.create(compatibility.TensorType(dtype, [dimension]))

    def in_tff(state: Any, clients: Any) -> tuple[Any, FloatArray, float | None]:
        output = process.next(state, clients)
        measured = getattr(output, "measurements", None) or {}
        norm = measured.get("dp_query_metrics", {}).get("next_clip_norm")
        return output.state, np.asarray(output.result), None if norm is None else float(norm)

    return Process(process.initialize, in_tff)
