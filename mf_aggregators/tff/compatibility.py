"""Names of TensorFlow Federated (TFF) 0.87 and TensorFlow Privacy that move in later versions.

TFF's main branch, from which no release was made, has placements, types and computations in the
package ``federated_language``, and its own copy of the DPQueries of TensorFlow Privacy. A port of
this library finds all names that move here; no other module has them. What both export
(``tff.aggregators``, ``tff.learning``, ``tff.templates``, ``tff.tensorflow``, ``tff.backends``,
``tff.simulation``) stays where it is.

A name is looked up when it is used: ``compatibility.CLIENTS`` is ``tff.CLIENTS``.
"""

import importlib
import operator
from typing import Any

import tensorflow_federated as tff
import tensorflow_privacy as tfp

_LOCAL_TRAINING = "tensorflow_federated.python.learning.templates.model_delta_client_work"
# All other names are at the top of TFF.
_PATHS = {
    path.rpartition(".")[2]: path
    for path in (
        "framework.AsyncExecutionContext",
        "framework.ConcreteComputation",
        "framework.SyncContext",
        "framework.get_context_stack",
        "framework.set_default_context",
        "types.tensorflow_to_type",
        "types.type_to_tf_tensor_specs",
    )
}


def __getattr__(name: str) -> Any:
    package: Any = tff
    if name.startswith("__"):
        # Python asks modules for attributes that they need not have.
        raise AttributeError(name)
    if name == "computation_pb2":
        return importlib.import_module("tensorflow_federated.proto.v0.computation_pb2")
    if name == "build_model_delta_update_with_tff_optimizer":
        # No public function of TFF trains locally and returns the metrics of each client.
        package = importlib.import_module(_LOCAL_TRAINING)
    elif name in ("NormalizedQuery", "SumAggregationDPQuery"):
        # TFF's DifferentiallyPrivateFactory insists on this base class.
        package = tfp
    try:
        return operator.attrgetter(_PATHS.get(name, name))(package)
    except AttributeError as error:
        raise ImportError(
            f"mf_aggregators needs TensorFlow Federated 0.87, and {name} is not in what is "
            f"installed, {getattr(tff, '__version__', 'another version')} ({error}): "
            "docs/installing.md says how to install it."
        ) from error
