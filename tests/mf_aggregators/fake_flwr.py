"""As much of Flower as its strategy needs, for tests where Flower cannot be imported.

``test_other_environments`` runs the tests that use it against Flower itself, so that it cannot say
what Flower does not do.
"""

import importlib
import io
import sys
import types
from typing import Any

import numpy as np

import mf_aggregators


class Array:
    """An array as clients send it."""

    def __init__(self, array: np.ndarray) -> None:
        file = io.BytesIO()
        np.save(file, array)
        self.data = file.getvalue()

    def numpy(self) -> np.ndarray:
        """Returns the array."""
        return np.asarray(np.load(io.BytesIO(self.data), allow_pickle=False))


class ArrayRecord(dict[str, Array]):
    """Arrays by name; no dict, as in Flower."""


class RecordDict(dict[str, Any]):
    """Records by name."""

    @property
    def array_records(self) -> dict[str, Any]:
        """Those of arrays."""
        return {key: each for key, each in self.items() if isinstance(each, ArrayRecord)}


class Message:
    """A message to a node, or its reply."""

    def __init__(
        self,
        content: Any,
        *,
        dst_node_id: int = 0,
        message_type: str = "",
        reply_to: "Message | None" = None,
    ) -> None:
        sent = reply_to.metadata.dst_node_id if reply_to else 1
        self.metadata: Any = types.SimpleNamespace(
            src_node_id=sent, dst_node_id=dst_node_id, message_type=message_type
        )
        self.error = content if isinstance(content, Error) else None
        self.content = None if self.error else content

    def has_error(self) -> bool:
        """Whether the client has failed."""
        return self.error is not None


class Error:
    """Why a client has failed."""

    def __init__(self, code: int, reason: str) -> None:
        self.code, self.reason = code, reason


class Result:
    """What a run returns."""

    def __init__(self) -> None:
        self.arrays = ArrayRecord()
        self.train_metrics_clientapp: dict[int, Any] = {}
        self.evaluate_metrics_serverapp: dict[int, Any] = {}


class Strategy:
    """Flower's loop over rounds."""

    def start(
        self: Any,
        grid: Any,
        initial_arrays: Any,
        num_rounds: int,
        timeout: float,
        train_config: Any,
        evaluate_config: Any,
        evaluate_fn: Any,
    ) -> Result:
        """Runs the rounds."""
        self.summary()
        result, arrays = Result(), initial_arrays
        train_config = {} if train_config is None else train_config
        found = evaluate_fn(0, arrays)
        if found is not None:
            result.evaluate_metrics_serverapp[0] = found
        for number in range(1, num_rounds + 1):
            messages = self.configure_train(number, arrays, train_config, grid)
            replies = grid.send_and_receive(messages, timeout=timeout)
            arrays, metrics = self.aggregate_train(number, replies)
            result.arrays, result.train_metrics_clientapp[number] = arrays, metrics
            messages = self.configure_evaluate(number, arrays, evaluate_config, grid)
            self.aggregate_evaluate(number, grid.send_and_receive(messages, timeout=timeout))
            found = evaluate_fn(number, arrays)
            if found is not None:
                result.evaluate_metrics_serverapp[number] = found
        return result


class FedAvg(Strategy):
    """Federated averaging."""

    def __init__(self, min_available_nodes: int = 2, fraction_train: float = 1.0) -> None:
        self.min_train_nodes = 2
        self.min_available_nodes = min_available_nodes
        self.fraction_train = fraction_train
        self.weighted_by_key, self.arrayrecord_key = "num-examples", "arrays"

    def summary(self) -> None:
        """Logs nothing."""

    def configure_train(self, number: int, arrays: Any, config: Any, grid: Any) -> list[Message]:
        """Asks all nodes."""
        config["server-round"] = number
        content = RecordDict({self.arrayrecord_key: arrays, "config": config})
        nodes = list(grid.get_node_ids())
        assert len(nodes) >= self.min_train_nodes
        return [Message(content, dst_node_id=each, message_type="train") for each in nodes]

    def aggregate_train(self, number: int, replies: list[Message]) -> tuple[Any, Any]:
        """Takes the one model that there is."""
        del number
        (reply,) = replies
        assert reply.content is not None
        (arrays,) = reply.content.array_records.values()
        assert [self.weighted_by_key in each for each in reply.content.values()].count(True) == 1
        return arrays, None


class FedAvgM(FedAvg):
    """Federated averaging with a server's learning rate and momentum."""

    def __init__(self, server_learning_rate: float, server_momentum: float) -> None:
        super().__init__()
        self.server_learning_rate, self.server_momentum = server_learning_rate, server_momentum
        self.current_arrays: Any = None
        self.momentum_vector: list[np.ndarray] | None = None

    def configure_train(self, number: int, arrays: Any, config: Any, grid: Any) -> list[Message]:
        """Keeps the first model."""
        self.current_arrays = arrays if self.current_arrays is None else self.current_arrays
        return super().configure_train(number, arrays, config, grid)

    def aggregate_train(self, number: int, replies: list[Message]) -> tuple[Any, Any]:
        """Takes a step of gradient descent."""
        arrays, _ = super().aggregate_train(number, replies)
        olds = [array.numpy() for array in self.current_arrays.values()]
        moved = [old - new.numpy() for old, new in zip(olds, arrays.values(), strict=True)]
        before = self.momentum_vector
        if before is not None:
            moved = [
                self.server_momentum * one + other for one, other in zip(before, moved, strict=True)
            ]
        self.momentum_vector = moved
        self.current_arrays = ArrayRecord(
            {
                name: Array(old - self.server_learning_rate * each)
                for name, old, each in zip(arrays, olds, moved, strict=True)
            }
        )
        return self.current_arrays, None


def imported() -> tuple[Any, Any]:
    """Returns ``mf_aggregators.flower``, and what it imports from Flower in one namespace."""
    try:
        app = importlib.import_module("flwr.app")
        strategies = importlib.import_module("flwr.serverapp.strategy")
    except ImportError:
        # Flower is not there, or the protobuf beside it is that of TensorFlow Federated.
        return _with_the_fake()
    # As in a run of Flower's, without which no message is made.
    identity = importlib.import_module("flwr.supercore.task_identity").TaskIdentity
    identity.run_id, identity.task_id, identity.node_id = 1, 1, 1
    names = {**vars(app), **vars(strategies)}
    return importlib.import_module("mf_aggregators.flower"), types.SimpleNamespace(**names)


def _with_the_fake() -> tuple[Any, Any]:
    kinds = types.SimpleNamespace(TRAIN="train", QUERY="query")
    names = {**globals(), "MessageType": kinds, "ConfigRecord": dict, "MetricRecord": dict}
    modules = ("flwr", "flwr.app", "flwr.serverapp", "flwr.serverapp.strategy")
    for each in modules:
        module = types.ModuleType(each)
        vars(module).update({**names, "Grid": object, "__name__": each, "__path__": []})
        sys.modules[each] = module
    try:
        return importlib.import_module("mf_aggregators.flower"), types.SimpleNamespace(**names)
    finally:
        for each in (*modules, "mf_aggregators.flower"):
            sys.modules.pop(each, None)
        vars(mf_aggregators).pop("flower", None)
