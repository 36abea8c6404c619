"""What an audit attacks: an aggregator, by whatever runs it."""

import dataclasses
from typing import Any, Protocol

import numpy as np

from mf_aggregators.aggregator import Aggregator
from mf_aggregators.arrays import FloatArray


class Process(Protocol):
    """An aggregation of vectors of one size, from state to state."""

    def initialize(self) -> Any:
        """Returns a fresh state."""

    def next(self, state: Any, clients: list[FloatArray]) -> tuple[Any, FloatArray, float | None]:
        """Returns the next state, the mean, and the next clip norm where it adapts."""


@dataclasses.dataclass(frozen=True)
class _InNumpy:
    aggregator: Aggregator

    def initialize(self) -> Any:
        return self.aggregator.initialize()

    def next(self, state: Any, clients: list[FloatArray]) -> tuple[Any, FloatArray, float | None]:
        state, mean = self.aggregator.next(state, clients)
        return state, mean, self.aggregator.metrics(state).get("next_clip_norm")


@dataclasses.dataclass(frozen=True)
class _InTff:
    process: Any

    def initialize(self) -> Any:
        return self.process.initialize()

    def next(self, state: Any, clients: list[FloatArray]) -> tuple[Any, FloatArray, float | None]:
        output = self.process.next(state, clients)
        measured = getattr(output, "measurements", None) or {}
        norm = measured.get("dp_query_metrics", {}).get("next_clip_norm")
        return output.state, np.asarray(output.result), None if norm is None else float(norm)


def of(built: Any, dtype: type[np.floating[Any]], dimension: int) -> Process:
    """Returns what runs an aggregator.

    Args:
      built: A ``mf_aggregators.Aggregator``, or a factory of ``tff.aggregators``.
      dtype: The dtype of clients' vectors.
      dimension: Their length.
    """
    if isinstance(built, Aggregator):
        return _InNumpy(built.with_template(np.zeros(dimension, dtype)))
    # TensorFlow Federated takes seconds to import.
    from mf_aggregators.tff import compatibility

    return _InTff(built.create(compatibility.TensorType(dtype, [dimension])))
